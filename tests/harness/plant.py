"""Planted mistakes: what is listed, what a script looks like with one in it, and the ledger of those that were caught.

`exercises/mistakes/SCRIPT.toml` lists mistakes: a few lines of SCRIPT.py, what a student or a real project wrote in
their place, the test that must turn red, and a hint for whoever made it (`elu.cu.toml` is about elu.cu).

Planting all of them takes long, and most of the time nothing has changed. So exercises/ledger.txt keeps, for each
mistake that its test has caught, a digest of all that decided it: the mistake, its script, the test file, and every
file that these import, without docstrings and comment lines, which decide nothing. Behind it stands, for a mistake in
an exercise, what the test said: hints are chosen by it.
`make test` plants those whose digest is another now, and one of each script in turn, and demands that the ledger is
whole and current. `make prove` plants all of them and writes the ledger anew.
"""

import ast
import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from harness import fences
from harness.house import ROOT, files, find

LEDGER = ROOT / "exercises" / "ledger.txt"
VERSION = "ledger 2"
WORDS = re.compile(r"\s*($|#|@pytest\.mark\.(turn\(\d+\)|prove|long)$)")  # lines that decide no verdict


@dataclass(frozen=True)
class Mistake:
    script: str  # "03_zero/zero.py"
    name: str
    exercise: str  # "2.3", or "" outside the exercises
    old: str
    new: str
    caught_by: str  # "test_file.py::test_name"
    hint: str
    source: str  # a project and the number of its issue, where one has shipped it; "known" if it is typical
    spoils: str = ""  # the benchmarks that have to notice it: "bench_zero bench_zero3"
    symptom: str = ""  # what the test says of it, as the ledger has it; of those in an exercise

    @property
    def test(self) -> str:
        """The test's node id, relative to the repository."""
        file, _, name = self.caught_by.partition("::")
        return f"{_path_of(file)}::{name}"

    def planted(self, text: str) -> str:
        """The script with the mistake. ValueError unless `old` occurs exactly once, inside the named exercise."""
        if text.count(self.old) != 1:
            raise ValueError(f"mistake {self.name}: its `old` occurs {text.count(self.old)} times in {self.script}")
        line = text[: text.index(self.old)].count("\n") + 1
        numbers = [f.number for f in fences.read_fences(text)[0].values() if f.first < line <= f.last]
        if "".join(numbers) != self.exercise:
            where = numbers[0] if numbers else ""
            raise ValueError(f"mistake {self.name}: says exercise {self.exercise!r} but lies in {where!r}")
        return text.replace(self.old, self.new)


@cache
def _path_of(file: str) -> str:
    return find(file).relative_to(ROOT).as_posix()


def mistakes_of(script: str, root: Path = ROOT) -> tuple[Mistake, ...]:
    """Those that are listed for this script, by its path in the repository."""
    path = Path(script)
    file = root / "exercises" / "mistakes" / f"{path.stem if path.suffix == '.py' else path.name}.toml"
    listed = tomllib.loads(file.read_text())["mistake"] if file.exists() else []
    return tuple(Mistake(script, **entry) for entry in listed)


def all_mistakes() -> list[Mistake]:
    """ValueError if a list belongs to no script, or to two."""
    names = (f.stem if "." in f.stem else f"{f.stem}.py" for f in sorted((ROOT / "exercises/mistakes").glob("*.toml")))
    return [mistake for name in names for mistake in mistakes_of(find(name).relative_to(ROOT).as_posix())]


# --------------------------------------------------------------------------------------------------------- the ledger


def digest(mistake: Mistake) -> str:
    """16 hex digits that change with anything that decides whether the mistake is caught."""
    words = [mistake.exercise, mistake.old, mistake.new, mistake.test]
    words += _digests_of((mistake.script, mistake.test.partition("::")[0]))
    return _sha("\0".join(words))


@cache
def _digests_of(names: tuple[str, ...]) -> list[str]:
    decided = sorted(reached([ROOT / name for name in names]))
    return [f"{file.relative_to(ROOT).as_posix()} {_read(file)[0]}" for file in decided]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def reached(start: Iterable[Path]) -> set[Path]:
    """These files and all of the repository that they import or name, directly or not."""
    found: set[Path] = set()
    new = set(start)
    while new:
        found |= new
        new = set().union(*(_read(file)[1] for file in new)) - found
    return found


def needed_by(script: Path) -> list[Path]:
    """A script and the files beside it that have to be copied with it."""
    return [script, *sorted(file for file in reached([script]) if file.parent == script.parent and file != script)]


def statements(text: str, nodes: Iterable[ast.AST]) -> str:
    """A Python file without docstrings, comment lines and empty lines: what it does, however it is told, whenever a
    test's turn is."""
    lines, docstrings, texts = text.splitlines(), set[int](), set[int]()
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if ast.get_docstring(node) else None
            if first and not lines[first.lineno - 1][: first.col_offset].strip():  # alone on its lines
                docstrings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and (node.end_lineno or 0) > node.lineno:
            texts |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    told = {n for n, line in enumerate(lines, 1) if WORDS.match(line)} - texts
    return "\n".join(line for n, line in enumerate(lines, 1) if n not in told | docstrings)


@cache
def _modules() -> dict[str, Path]:
    here = [*files("*.py"), *(ROOT / "exercises").glob("*.py"), *(ROOT / "tests").glob("*.py")]
    return {f.stem: f for f in here} | {f"harness.{f.stem}": f for f in (ROOT / "tests" / "harness").glob("*.py")}


@cache
def _read(file: Path) -> tuple[str, set[Path]]:
    """The digest of what a file does, and what it imports of the repository, and the files beside it that it names in
    quotes (sources, scripts)."""
    text = file.read_text()
    quoted = {file.with_name(name) for name in re.findall(r"[\"']([\w-]+\.(?:py|cu|h|sbatch))[\"']", text)}
    nodes = list(ast.walk(ast.parse(text))) if file.suffix == ".py" else []
    names: set[str] = set()
    for node in nodes:
        if type(node) is ast.Import:
            names |= {alias.name for alias in node.names}
        elif type(node) is ast.ImportFrom and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif type(node) is ast.ImportFrom:  # `from . import x` and `from .x import y`, inside the harness
            names |= {f"harness.{alias.name}" for alias in node.names}
    own = {"harness." + name for name in names if file.parent.name == "harness"}
    near = {f for f in quoted if f.is_file()} | {_modules()[name] for name in names | own if name in _modules()}
    return _sha(statements(text, nodes) if nodes else text), near


class LedgerError(ValueError):
    """Why the ledger cannot be used, in one line."""


def heading() -> str:
    return f"# {VERSION}, torch {version('torch').partition('+')[0]}: written by `make prove`"


Ledger = dict[tuple[str, str], tuple[str, str]]  # {(script, name of the mistake): (digest, symptom)}


def read_ledger(file: Path = LEDGER) -> Ledger:
    """LedgerError for one of another version, or that no ledger is."""
    first, *lines = (file.read_text() if file.exists() else "").splitlines() or ["nothing"]
    if first != heading():
        raise LedgerError(f"{file.name} begins with {first!r} and not with {heading()!r}; `make prove` writes it anew")
    rows = [line.split(" ", 3) for line in lines]
    if bad := [line for line, row in zip(lines, rows, strict=True) if len(row) < 3]:
        raise LedgerError(f"{file.name} has a line that is none of script, mistake and digest: {bad[0]!r}")
    return {(script, name): (value, " ".join(symptom)) for script, name, value, *symptom in rows}


def write_ledger(caught: Ledger, file: Path = LEDGER) -> None:
    """Sorted, a line each, so that the difference between two of them can be read."""
    lines = [" ".join([*key, *value]).rstrip() for key, value in sorted(caught.items())]
    file.write_text("\n".join([heading(), *lines]) + "\n")


def changed(mistakes: Iterable[Mistake], ledger: Ledger) -> list[Mistake]:
    """Those that the ledger does not know as they are now."""
    return [mistake for mistake in mistakes if ledger.get((mistake.script, mistake.name), "")[:1] != (digest(mistake),)]
