"""All techniques in one table: what is cut, memory, bytes on the wire, what one waits for, what goes with what.

    python book/cheat_sheet.py            writes book/cheat_sheet.md from techniques.toml

The page in the repository links to files and names the symbol; that of the web edition links to the very line.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from formulas import mathml, names, show
from symbols import place

HERE = Path(__file__).parent
PAGE = HERE / "cheat_sheet.md"
Entry = dict[str, Any]

TOP = """# Cheat sheet

<!-- made by `python book/cheat_sheet.py` from book/techniques.toml: change it there -->

A row for each technique of this book. Bytes are those of one rank. "Sent" is what it puts on the wire with ring
algorithms; a step has M micro-batches. A test computes every formula beside the planner's bytes or the chapter's own,
on sizes that divide evenly. *code* leads to the file that does it (the link's title names the symbol; in the web
edition *line* leads to the very line), *test* to the test that proves the cell. Combinations are options of the
trainer: a test asks whether it takes them, and whether it refuses those under "excludes". Below it are the symbols, and
which letter a chapter has for the same, where it is another one.

"""


def techniques() -> list[Entry]:
    return tomllib.loads((HERE / "techniques.toml").read_text())["technique"]


def symbols() -> dict[str, str]:
    return tomllib.loads((HERE / "techniques.toml").read_text())["symbols"]


def link_to_file(path: str, symbol: str, line: int, word: str) -> str:
    """On the page in the repository: a line number there would be wrong after the next change of the file."""
    return f'[{"code" if word == "line" else word}](../{path} "{symbol}")'


def formulas_of(entry: Entry) -> list[str]:
    bubble = [entry["bubble"]] if "bubble" in entry else []
    return [f["formula"] for f in (*entry["memory"], *entry["sent"])] + bubble


def rows(link: Callable[..., str], typeset: Callable[[str], str]) -> list[str]:
    lines = ["| technique | what is cut | memory | sent | on the critical path | needs | combines with | excludes |"]
    lines.append("| --- " * 8 + "|")
    for entry in techniques():

        def proof(cell: str, entry: Entry = entry) -> str:
            words = {"line": entry.get(f"{cell}_at"), "test": entry[f"{cell}_test"]}
            return " ".join(link(*place(name), word) for word, name in words.items() if name)

        def cell(of: str, nothing: str, entry: Entry = entry) -> str:
            parts = [f"{f['what']}: {typeset(f['formula'])}" for f in entry[of]] or [nothing]
            return "<br>".join([*parts, proof(of)])

        chapter = f"[{entry['chapter'][:2]}](../{entry['chapter']}/README.md)"
        there = f"see chapter {int(entry['chapter'][:2])}"
        critical = entry["critical"] + (f" {typeset(entry['bubble'])}" if "bubble" in entry else "")
        taken = "<br>".join(f"{what}: `{options}`" for what, options in entry["combines"])
        refused = "<br>".join(f"{what}: `{options}`" for what, options in entry["excludes"]) or "–"
        cells = [f"**{entry['name']}** {chapter}", entry["cuts"], cell("memory", there)]
        cells += [cell("sent", there if entry["key"] in ("5d", "fp8") else "nothing")]
        cells += [f"{critical}<br>{proof('critical')}", f"{entry['needs']}<br>{proof('needs')}", taken, refused]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def legend(typeset: Callable[[str], str]) -> list[str]:
    used = {name for entry in techniques() for formula in formulas_of(entry) for name in names(formula)}
    return [
        "",
        "## Symbols",
        "",
        "| symbol | meaning |",
        "| --- | --- |",
        *(f"| {typeset(name)} | {what} |" for name, what in symbols().items() if name in used),
        "",
    ]


def page(link: Callable[..., str] = link_to_file, typeset: Callable[[str], str] = show) -> str:
    return TOP + "\n".join([*rows(link, typeset), *legend(typeset)])


def web_page(link: Callable[..., str]) -> str:
    """For the web edition: links to lines, formulas set, and all the width there is."""
    front = "---\nhide:\n  - navigation\n  - toc\n---\n"
    text = re.sub(
        r"\*code\* leads .*? very line\)", "*line* leads to the line that does it", page(link, mathml), flags=re.S
    )
    text = text.replace("\n| technique", '\n<div class="wide" markdown="1">\n\n| technique')
    return front + text.replace("\n\n## Symbols", "\n\n</div>\n\n## Symbols")


def one_page() -> str:
    """For the web edition: formulas and their symbols, nothing else, on one sheet of A4."""
    lines = ["---\nhide:\n  - navigation\n  - toc\n---", "# Cheat sheet on one page\n"]
    lines.append(
        "Bytes of one rank. The [reference](cheat_sheet.md) has for each formula the code, the test, and what it needs."
    )
    lines += [
        '\n<div class="one-page" markdown="1">\n',
        "| technique | what is cut | memory | sent | idle |",
        "| --- " * 5 + "|",
    ]
    for entry in techniques():
        cells = ["<br>".join(f"{f['what']}: {mathml(f['formula'])}" for f in entry[of]) for of in ("memory", "sent")]
        cells.append(mathml(entry["bubble"]) if "bubble" in entry else "")
        lines.append(f"| **{entry['name']}** {entry['chapter'][:2]} | {entry['cuts']} | {' | '.join(cells)} |")
    used = {name for entry in techniques() for formula in formulas_of(entry) for name in names(formula)}
    told = [f"{mathml(name)} {what.partition(' (')[0]}" for name, what in symbols().items() if name in used]
    return "\n".join([*lines, "", "Symbols: " + "; ".join(told) + ".", "\n</div>\n"])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
