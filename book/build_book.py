"""The web edition: pages from the READMEs and the code, a site from the pages, and a look at every link of the site.

    python book/build_book.py              writes book/site/; open book/site/index.html
    python book/build_book.py --pages      only the pages, book/pages/: what the generator reads

README.md of this folder says why this generator, and what else would do. Nothing here is fetched from anywhere.
"""

import argparse
import html
import itertools
import json
import posixpath
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import cheat_sheet
import glossary
from check_site import faults
from colours_of_code import numbered
from lessons import IMAGES, anchors, folders, ground_section, lesson, page_of, tracked
from play_data import PLAYS, write_data
from symbols import ROOT

HERE = Path(__file__).parent
PAGES, SITE = HERE / "pages", HERE / "site"
FETCHED = "https://unpkg.com/iframe-worker/shim"
LARGE = 300_000  # bytes: a longer file is linked as it is, not shown
OPTION = re.compile(r"(?<![\w-])--[\w-]+(?: [^-\s]\S*)?")  # with its value
LONG, SHORT = 60, 24  # letters: a cell with more gets some width; code with fewer stays on one line
WORDS = 40  # letters: a table with such a cell is one of words
MORE = ("results", "11_5d_trainer/planner", "book")  # the last pages of the navigation


class Book:
    """The pages made so far, and the files that they refer to and that still need a page."""

    def __init__(self, pages: Path):
        self.pages = pages
        self.wanted: list[str] = []
        self.made: dict[str, str] = {}  # by the file of the repository

    def write(self, page: str, text: str) -> None:
        file = self.pages / page
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(titled(text))

    def refer(self, page: str, target: str, fragment: str = "") -> str:
        """The address of a file of the repository, seen from `page`; the file will have a page."""
        if target not in tracked() and target not in folders():
            raise LookupError(f"{page}: there is no {target}")
        self.wanted.append(target)
        to = target if shown_as_it_is(target) else page_of(target)
        return posixpath.relpath(to, posixpath.dirname(page) or ".") + (f"#{fragment}" if fragment else "")

    def readme(self, path: str) -> None:
        text, page = (ROOT / path).read_text(), page_of(path)
        made = lesson(path, text, lambda target, fragment: self.refer(page, target, fragment))
        if beside := [file for file in ground_files(path) if ground_section(text, posixpath.basename(file))]:
            to = " · ".join(f"[`{posixpath.basename(file)}`]({self.refer(page, file)})" for file in beside)
            made = made.replace("\n\n", f"\n\nThe lesson beside its code: {to}{{.beside-link}}\n\n", 1)
        self.write(page, made)

    def code(self, path: str) -> None:
        """A file with a line number and an anchor on every line; a core file beside its part of the README."""
        page, name = page_of(path), posixpath.basename(path)
        readme = posixpath.join(posixpath.dirname(path), "README.md")
        lesson_ = ""
        if path in ground_files(readme) and readme in tracked():
            section = ground_section((ROOT / readme).read_text(), name)
            lesson_ = lesson(readme, section, lambda target, fragment: self.beside(page, target, fragment), at=page)
            lesson_ = re.sub(r" \{#[^}]*\}$", "", lesson_, flags=re.MULTILINE)
        hidden = "hide:\n  - navigation\n  - toc\nsearch:\n  exclude: true\n"
        hidden = f"---\n{hidden}description: The source of {path}, with a number and an anchor for each line.\n---\n"
        up = f"From the lesson, [{posixpath.dirname(path)}]({self.refer(page, readme)})." if readme in tracked() else ""
        body = f'<div class="work">{numbered((ROOT / path).read_text(errors="replace"), path)}</div>\n'
        if lesson_:
            text = f'<div class="lesson" markdown="1">\n\n{lesson_}\n\n</div>'
            script = posixpath.relpath("assets/beside.js", posixpath.dirname(page))
            body = f'<div class="beside" markdown="1">\n{text}\n{body}</div>\n\n<script src="{script}"></script>\n'
        self.write(page, f"{hidden}# {path}\n\n{up}\n\n{body}")

    def beside(self, page: str, target: str, fragment: str) -> str:
        """On a page that has a lesson beside its code, what leads to this code stays on the page."""
        return f"#{fragment}" if page_of(target) == page and fragment else self.refer(page, target, fragment)

    def listing(self, folder: str) -> None:
        page = page_of(folder)
        inside = sorted(file for file in tracked() if posixpath.dirname(file) == folder)
        rows = [f"- [{posixpath.basename(file)}]({self.refer(page, file)})\n" for file in inside]
        self.write(page, f"---\nsearch:\n  exclude: true\n---\n# {folder}\n\n{''.join(rows)}")

    def make(self) -> None:
        shutil.rmtree(self.pages, ignore_errors=True)
        for page, text in (("cheat_sheet.md", cheat_sheet.web_page), ("glossary.md", glossary.page)):
            self.write(page, self.generated(page, text))
        self.write("one_page.md", cheat_sheet.one_page())
        for name in PLAYS:  # their links are those of a file at the root
            text = (HERE / "play" / f"{name}.md").read_text()
            self.write(f"{name}.md", lesson("README.md", text, partial(self.refer, f"{name}.md")))
        self.wanted += [path for path in tracked() if path.endswith(".md") and not path.startswith("book/play/")]
        self.wanted += [file for path in tracked() for file in ground_files(path)]
        done: set[str] = {"book/cheat_sheet.md", "book/glossary.md"}
        while self.wanted:
            path = self.wanted.pop()
            if path in done:
                continue
            done.add(path)
            if path in folders():
                self.listing(path) if page_of(path).endswith("files.md") else self.wanted.append(page_file(path))
            elif shown_as_it_is(path):
                (self.pages / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, self.pages / path)
            elif path.endswith(".md"):
                self.readme(path)
            else:
                self.code(path)
        shutil.copytree(HERE / "assets", self.pages / "assets")
        write_data(self.pages / "assets")

    def generated(self, page: str, make) -> str:
        if page == "glossary.md":

            def section(term: dict[str, str]) -> str:
                readme = f"{term['chapter']}/README.md"
                heading = glossary.heading_of(term)
                headings = [h for h, _ in glossary.sections((ROOT / readme).read_text())][1:]
                fragment = anchors((ROOT / readme).read_text())[headings.index(heading)] if heading else ""
                return f"[{term['chapter'][:2]}]({self.refer(page, readme, fragment)})"

            return make(section).replace("\n| word", '\n<div class="words" markdown="1">\n\n| word') + "\n</div>\n"
        text = make(lambda path, symbol, line, word: f'[{word}]({self.refer(page, path, f"L{line}")} "{symbol}")')
        return re.sub(r"\(\.\./([^)#]*README\.md)\)", lambda found: f"({self.refer(page, found[1])})", text)


def titled(text: str) -> str:
    """A page with a title for its tab, for the header and the search, and with a description: its heading, and the
    first sentences below it. Without them every chapter would be called "Index"."""
    front, body = text.removeprefix("---\n").split("---\n", 1) if text.startswith("---\n") else ("", text)
    heading, _, rest = body.lstrip().partition("\n")
    parts = re.split(r"\n\s*\n", re.sub(r"(?ms)^```.*?^```$", "", rest).strip())
    first = next((part for part in parts if re.match(r"[\w*`\"(]", part) and "{.beside-link}" not in part), heading)
    description = ""
    for sentence in re.split(r"(?<=[.?]) ", plain(first)):
        if description and len(description) + len(sentence) > 160:
            break
        description = f"{description} {sentence}".strip()
    told = {"title": plain(heading), "description": description}
    lines = [f"{name}: {json.dumps(words, ensure_ascii=False)}\n" for name, words in told.items() if name not in front]
    return f"---\n{front}{''.join(lines)}---\n{body}"


def plain(text: str) -> str:
    """Markdown as words."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|<[^>]*>|\{[#.:][^}]*\}", lambda found: found[1] or "", text)
    return " ".join(re.sub(r"^#+ |[*`]|(?<!\w)_|_(?!\w)", "", text).split())


LOST = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Not in this book</title>
<style>
:root { color-scheme: light dark }
body { font: 1.1rem/1.6 sans-serif; max-width: 40rem; margin: 20vh auto; padding: 0 1rem }
</style>
</head>
<body><h1>There is no such page</h1><p>It may have moved. <a id="book" href="index.html">The book</a> has a search.</p>
<script>
// A server shows this page at any address: the book begins at the deepest folder above it that has the book's style.
(async () => {
  for (const parts = location.pathname.split("/").slice(0, -1); parts.length; parts.pop()) {
    const start = `${parts.join("/")}/`, found = await fetch(`${start}assets/book.css`, { method: "HEAD" });
    if (found.ok) return document.getElementById("book").href = `${start}index.html`;
  }
})();
</script></body></html>
"""


def page_file(folder: str) -> str:
    return "README.md" if folder == "." else f"{folder}/README.md"


def shown_as_it_is(path: str) -> bool:
    return path.endswith(IMAGES) or (path in tracked() and (ROOT / path).stat().st_size > LARGE)


def ground_files(readme: str) -> list[str]:
    """The files that stand alone beside this README, if it is a chapter's."""
    chapter = re.fullmatch(r"(\d\d_\w+)/README\.md", readme)
    if not chapter:
        return []
    if chapter[1].startswith("11"):
        return [f"{chapter[1]}/five_d.py"]
    files = [f for f in tracked() if posixpath.dirname(f) == chapter[1] and f.endswith((".py", ".cu"))]
    return sorted(f for f in files if not posixpath.basename(f).startswith(("test_", "bench_", "_")))


def heading(readme: str) -> str:
    return (ROOT / readme).read_text().partition("\n")[0].lstrip("# ")


def navigation() -> list:
    chapters = []
    for readme in sorted(path for path in tracked() if re.fullmatch(r"\d\d_\w+/README\.md", path)):
        title = re.sub(r"^(Chapter )?\d+[.:] ", "", heading(readme))
        code = [{posixpath.basename(file): page_of(file)} for file in ground_files(readme)]
        chapters.append({f"{readme[:2]} {title[0].upper()}{title[1:]}": [page_of(readme), *code]})
    course = sorted(path for path in tracked() if path.startswith("exercises/lectures/") and path.endswith(".md"))
    play = [{title: f"{name}.md"} for name, title in PLAYS.items()]
    return [
        {"The book": "index.md"},
        {"Chapters": chapters},
        *([{"Demos": play}] if play else []),
        {"Cheat sheet": [{"On one page": "one_page.md"}, {"Reference": "cheat_sheet.md"}]},
        {"Glossary": "glossary.md"},
        {"Notation": "book/symbols.md"},
        {"What runs where": "book/machines.md"},
        {"Course": ["exercises/index.md", {"Lectures": [page_of(path) for path in course]}]},
        {"When it breaks": "when_it_breaks/index.md"},
        {"More": [{heading(f"{folder}/README.md"): f"{folder}/index.md"} for folder in MORE]},
    ]


def configuration(pages: Path, site: Path) -> str:
    """JSON is YAML, too."""
    base = json.loads((HERE / "site.json").read_text())
    return json.dumps(base | {"docs_dir": str(pages), "site_dir": str(site), "nav": navigation()}, indent=1)


def stay_at_home(site: Path) -> None:
    """The generator lets each page fetch one script, with which its search works from file://. We bring our own."""
    (site / "404.html").write_text(LOST)  # the generator's own is for a server whose root is the book
    for file in site.rglob("*.html"):
        up = "../" * (len(file.relative_to(site).parts) - 1)
        file.write_text(measured(file.read_text().replace(FETCHED, f"{up}assets/worker_for_files.js")))


def measured(page: str) -> str:
    """Columns of words are not squeezed beside columns of numbers, nor options broken behind their dashes: styles
    cannot count letters, so what is long or short is called so."""

    def cell(found: re.Match) -> str:
        words = re.sub(r"<[^>]*>", "", found[2])
        return f'<td class="long"{found[1]}>{found[2]}</td>' if len(words) > LONG else found[0]

    def code(found: re.Match) -> str:
        if len(found[1]) <= SHORT:
            return f'<code class="short">{found[1]}</code>'
        made = OPTION.sub(r'<span class="short">\g<0></span>', found[1])
        return f"<code>{made.replace('_', '_<wbr>')}</code>"  # a long name may go on in the next line

    def labelled(found: re.Match) -> str:
        """On a telephone a row of a table of words is a list: each cell says what its column is called."""
        heads = [
            html.escape(re.sub(r"<[^>]*>", "", head).strip()) for head in re.findall("<th[^>]*>(.*?)</th>", found[0])
        ]
        if len(heads) < 3 or not re.search(rf">[^<>]{{{WORDS},}}<|class=\"long\"", found[0]):
            return found[0]
        names = itertools.cycle(heads)
        cells = re.sub(r"<td", lambda _: f'<td data-head="{next(names)}"', found[0])
        return cells.replace("<table", '<table data-words="1"', 1)

    page = re.sub(r"<td((?: style=\"[^\"]*\")?)>(.*?)</td>", cell, page, flags=re.DOTALL)
    page = re.sub(r"<table>.*?</table>", labelled, page, flags=re.DOTALL)
    return re.sub(r"(?<!<pre>)(?<!</span>)<code>([^<\n]+)</code>", code, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--pages", action="store_true", help="only the pages, not the site")
    args = parser.parse_args()
    print("the pages, from READMEs and code", flush=True)
    Book(PAGES).make()
    print(f"{sum(1 for _ in PAGES.rglob('*.md'))} pages in {PAGES}", flush=True)
    if args.pages:
        return 0
    if not find_spec("zensical"):
        print("build_book.py: zensical is not installed; run `make book`", file=sys.stderr)
        return 2
    (HERE / "mkdocs.yml").write_text(configuration(Path("pages"), Path("site")))
    shutil.rmtree(SITE, ignore_errors=True)
    print("the site, from these; about a minute", flush=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "-f", "mkdocs.yml"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-3000:] + done.stderr[-3000:], file=sys.stderr)
        return 1
    stay_at_home(SITE)
    print("every link of it", flush=True)
    wrong = faults(SITE)
    print("\n".join(wrong[:40]) or f"every link and anchor of {len(list(SITE.rglob('*.html')))} pages leads somewhere")
    if wrong:
        print(f"build_book.py: {len(wrong)} faults", file=sys.stderr)
        return 1
    print(f"the book: {SITE / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
