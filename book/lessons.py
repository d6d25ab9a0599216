"""From the READMEs of the repository to the pages of the book: links, anchors, and names that lead to lines of code.

The same files are read on a code host and in the book, so nothing is written twice. A link to a file becomes one to its
page, a heading gets the anchor that the code host would give it, and a name in backquotes that the chapter's file
defines, such as `Zero2`, leads to the line that defines it. Python's standard library only: `make test` tests it.
"""

import posixpath
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from formulas import TIE, cell_as_mathml, is_cell, lines_as_mathml
from symbols import ROOT, symbols

LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<url>[^()\s]+)(?P<title>\s+\"[^\"]*\")?\)")
CODE = re.compile(r"(?P<ticks>`+)(?P<code>[^`]+?)(?P=ticks)(?!`)")
EITHER = re.compile(f"(?P<link>{LINK.pattern})|(?P<span>{CODE.pattern})", re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}\S.*\n)+(?=\n|\Z)")
IMAGES = (".svg", ".png")
SHORT = 3  # names below this length are the letters of formulas
NARROW = 60  # letters of code that a column beside another, or a telephone, has room for


@cache
def tracked() -> frozenset[str]:
    """Every file of the repository, and every folder of one, by its path from the root."""
    files: list[str] = []
    with suppress(OSError):  # no git
        command = ["git", "ls-files", "-co", "--exclude-standard"]
        files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if not files:  # a plain copy, without a history
        made = {".git", ".venv", "__pycache__", "site", "pages", "runs", "student", "submissions"}
        found = (file.relative_to(ROOT) for file in ROOT.rglob("*") if file.is_file())
        files = [str(file) for file in found if not made & {*file.parts}]
    return frozenset(file for file in files if (ROOT / file).is_file())


@cache
def folders() -> frozenset[str]:
    return frozenset(str(parent) for file in tracked() for parent in Path(file).parents)


def page_of(path: str) -> str:
    """The page that shows a file or folder of the repository: its path among the pages."""
    path = posixpath.normpath(path)
    if path in folders():
        inside = posixpath.join(path, "README.md") if path != "." else "README.md"
        return page_of(inside) if inside in tracked() else posixpath.join(path, "files.md")
    if path.endswith("README.md"):
        return posixpath.join(posixpath.dirname(path), "index.md")
    if path in ("book/cheat_sheet.md", "book/glossary.md"):
        return posixpath.basename(path)
    if path.endswith((".md", *IMAGES)):
        return path
    return f"{path}.md"


def slug(heading: str) -> str:
    """The anchor that a code host gives to a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def blocks(text: str) -> Iterator[tuple[bool, str]]:
    """(is it fenced code?, lines) of a README, in order; joined they are the README."""
    fenced, lines = False, []
    for line in text.splitlines(keepends=True):
        if line.startswith("```"):
            if fenced:
                yield True, "".join([*lines, line])
                lines = []
            else:
                yield False, "".join(lines)
                lines = [line]
            fenced = not fenced
        else:
            lines.append(line)
    yield fenced, "".join(lines)


def anchors(text: str) -> list[str]:
    """Those of all headings; of equal ones, the later have a number."""
    found: list[str] = []
    for fenced, part in blocks(text):
        for line in [] if fenced else part.splitlines():
            if heading := re.match(r"#{1,6} (.*)", line):
                name = base = slug(heading[1])
                number = 0
                while name in found:
                    number += 1
                    name = f"{base}-{number}"
                found.append(name)
    return found


def links(text: str) -> Iterator[str]:
    """The target of every link and picture."""
    for fenced, part in blocks(text):
        if not fenced:
            yield from (found["url"] for found in EITHER.finditer(part) if found["link"])


@cache
def names_of(chapter: str) -> dict[str, str]:
    """What a name in backquotes leads to, in the README of a chapter: `FILE:SYMBOL`, or `FILE` for a file's own name.

    The core file's functions, classes and methods; tests; and every file of the chapter. A name that two files or
    two classes have leads nowhere.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(file for file in tracked() if file.startswith(f"{chapter}/") and file.endswith((".py", ".cu"))):
        inside = posixpath.relpath(path, chapter)
        for name in {inside, posixpath.basename(path)}:
            found.setdefault(name, set()).add(path)
        ground = "/" not in inside and not inside.startswith(("bench_", "_")) and chapter[:2] != "11"
        tests = posixpath.basename(path).startswith("test_")
        if path.endswith(".py") and (ground or tests or inside == "five_d.py"):
            for symbol in symbols(ROOT / path):
                last = symbol.rpartition(".")[2]
                if len(last) >= SHORT and not last.startswith("__") and last.startswith("test_") == tests:
                    for name in {symbol, last}:
                        found.setdefault(name, set()).add(f"{path}:{symbol}")
    return {name: next(iter(where)) for name, where in found.items() if len(where) == 1}


def commands(block: str) -> str:
    """A block of commands too wide for its column: each comment comes above its command, where it can be seen."""
    lines = block.splitlines(keepends=True)
    if lines[0].strip() != "```sh" or max(map(len, lines)) <= NARROW:
        return block
    made = []
    for line in lines:
        found = re.fullmatch(r"(?P<command>\S.*?) {2,}(?P<comment># .*\n)", line)
        made += [found["comment"], f"{found['command']}\n"] if found else [line]
    return "".join(made)


def typeset(text: str) -> str:
    """The formulas of a README's tables, and blocks of indented lines that are all formulas, as MathML."""
    made, tied, before = [], False, "\n"
    text = INDENTED.sub(lambda found: f"{lines_as_mathml(found[0].splitlines()) or found[0].rstrip()}\n", text)
    for line in text.splitlines(keepends=True):
        tied = bool(TIE.fullmatch(line.strip())) or (
            tied and (line[0] == "|" or (not line.strip() and before[0] != "|"))
        )
        before = line
        if line.startswith("|") and tied:
            cells = line.strip().strip("|").split("|")
            line = "|" + "|".join(f" {cell_as_mathml(cell)} " if is_cell(cell) else cell for cell in cells) + "|\n"
        made.append(line)
    return "".join(made)


def lesson(path: str, text: str, refer: Callable[[str, str], str], at: str = "") -> str:
    """A README as a page. `refer(target, fragment)` gives the address of a file of the repository, seen from the page.

    `at` is the page's place among the pages if it is not where the README's own page is.
    """
    here, chapter = posixpath.dirname(path), path.partition("/")[0]
    names = names_of(chapter) if re.match(r"\d\d_", chapter) and "/" in path else {}
    ids = iter(anchors(text))

    def link(found: re.Match) -> str:
        url, title = found["url"], found["title"] or ""
        if re.match(r"[a-z]+:", url) or (url.startswith("#") and not at):
            return found["link"]
        target, _, fragment = url.partition("#")
        target = posixpath.normpath(posixpath.join(here, target)) if target else path
        return f"{found['text']}({refer(target, fragment)}{title})"

    def span(found: re.Match) -> str:
        name = re.match(r"[\w./]+(?=(\(.*\))?$)", found["code"])
        where = names.get(name[0]) if name and not found["code"].isdigit() else None
        if not where:
            return found["span"]
        file, _, symbol = where.partition(":")
        fragment = f"L{symbols(ROOT / file)[symbol]}" if symbol else ""
        return f"[{found['span']}]({refer(file, fragment)}){{.to-code}}"

    made = []
    for fenced, part in blocks(text):
        if fenced:
            made.append(commands(part))
            continue
        lines = []
        for piece in re.split(r"(?m)(^#{1,6} .*\n?)", typeset(part)):
            if re.match(r"#{1,6} ", piece):  # a heading: its links stay, its names lead nowhere
                lines.append(f"{piece.rstrip()} {{#{next(ids)}}}\n")
            else:
                lines.append(EITHER.sub(lambda found: link(found) if found["link"] else span(found), piece))
        made.append("".join(lines))
    page = (
        "".join(made).replace("<details>", '<details markdown="1">').replace("<summary>", '<summary markdown="span">')
    )
    return re.sub(r"<!--.*?-->\n?", "", page, flags=re.DOTALL)


def ground_section(readme: str, file: str) -> str:
    """The part of a README that walks through a core file; "" if there is none."""
    text = "".join(text.replace("\n## ", "\n\0## ") if fenced else text for fenced, text in blocks(readme))
    parts = re.split(r"(?m)^(?=## )", text)
    found = [part.replace("\0", "") for part in parts if re.match(r"## .*(core file|five_d)", part)]
    named = [part for part in found if file in part.partition("\n")[0]]
    return (named or found or [""])[0]
