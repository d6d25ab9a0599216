"""The field's words, their names in other frameworks, and the one word that this book uses.

    python book/glossary.py            writes book/glossary.md from glossary.toml

The page in the repository leads to the chapter; that of the web edition to the section in which the word first stands.
"""

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "book" / "glossary.md"

TOP = """# Glossary

<!-- made by `python book/glossary.py` from book/glossary.toml: change it there -->

The first column is the word that this book uses, everywhere for the same thing. The second is what it is called
elsewhere: papers and frameworks have several words for one thing, and one word for several things. A test looks for
every word in the chapter that introduces it.

| word | also called | meaning | chapter |
| --- | --- | --- | --- |
"""


def terms() -> list[dict[str, str]]:
    return tomllib.loads((ROOT / "book" / "glossary.toml").read_text())["term"]


def sections(readme: str) -> Iterator[tuple[str, str]]:
    """(heading, text below it) of a README; what stands in fenced code has no headings."""
    heading, text, fenced = "", [], False
    for line in readme.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and (found := re.match(r"#+ (.*)", line)):
            yield heading, "\n".join(text)
            heading, text = found[1], [line]
        else:
            text.append(line)
    yield heading, "\n".join(text)


def heading_of(term: dict[str, str]) -> str | None:
    """The heading under which the chapter first uses the word; None if it never does."""
    pattern = re.compile(term.get("seen") or rf"(?i)\b{re.escape(term['word'])}")
    for heading, text in sections((ROOT / term["chapter"] / "README.md").read_text()):
        if pattern.search(text):
            return heading
    return None


def link_to_chapter(term: dict[str, str]) -> str:
    return f"[{term['chapter'][:2]}](../{term['chapter']}/README.md)"


def page(link: Callable[[dict[str, str]], str] = link_to_chapter) -> str:
    rows = [f"| **{t['word']}** | {t['also']} | {t['meaning']} | {link(t)} |\n" for t in terms()]
    return TOP + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
