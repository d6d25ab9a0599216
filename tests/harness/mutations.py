"""Planted mistakes: the lists, the script with a mistake in it, and which mistakes were caught.

A mistakes.toml lists, for each script beside it, mistakes: a few lines of the script, what a student or real project
wrote instead, and the test that must fail. A mistake in an exercise also has a hint for a student who made it, and
may have a symptom, the test's message, by which hints are chosen. The same file has other correct solutions of
exercises, their alternatives.

Planting all of them takes long, and usually nothing has changed. So a cache, .pytest_cache/verdicts, has a
digest of all that decided a verdict: the script with the mistake in it, the test file, and every file that
these import. Comments, docstrings and layout do not count. The same for alternatives that pass. The cache may
be deleted at any time: no test fails because a verdict is missing, and `make prove` plants what is not in it.
"""

import ast
import difflib
import hashlib
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from harness import fences
from harness.layout import ROOT, files, find, homes

LISTS = "mistakes.toml"
VERDICTS = ROOT / ".pytest_cache" / "verdicts"
MARKS = ("prove", "long", "always")  # these say when a test runs, not what it finds
STRING = r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
TOKENS = {  # a comment in one language is an operator in the other
    ".py": re.compile(rf"#[^\n]*|(?P<token>{STRING}|\w+|\S)"),
    ".cu": re.compile(rf"//[^\n]*|/\*(?s:.*?)\*/|(?P<token>{STRING}|\w+|\S)"),
}


@dataclass(frozen=True)
class Mistake:
    script: str  # "03_zero/zero.py"
    name: str
    old: str
    new: str
    caught_by: str  # "test_file.py::test_name"
    hint: str = ""  # shown to whoever made it in an exercise
    exercise: str = ""  # "2.3", the fence in which `old` lies: no list says it; "" outside the exercises
    source: str = "known"  # a project and the number of its issue, where one has shipped it; or typical
    spoils: str = ""  # the benchmarks that must catch it: "bench_zero bench_zero3"
    symptom: str = ""  # the test's message; "" if it differs from run to run

    @property
    def test(self) -> str:
        """The test's node id, relative to the repository."""
        file, _, name = self.caught_by.partition("::")
        return f"{_path_of(file)}::{name}"

    def planted(self, text: str) -> str:
        """The script with the mistake. ValueError, in one line, unless `old` occurs once."""
        start, end, new = self._place(text)
        return text[:start] + new + text[end:]

    def lying_in(self, text: str) -> "Mistake":
        """The same with the number of the exercise in which it lies; without one if it cannot be planted."""
        try:
            start, _, _ = self._place(text)
        except ValueError:
            return self
        line = text[:start].count("\n") + 1
        return replace(self, exercise="".join(n for n, first, last in _fences(text) if first < line <= last))

    def _place(self, text: str) -> tuple[int, int, str]:
        """Start, end, and what comes there. If the exact text does not occur, comments and layout are ignored."""
        start = text.find(self.old)
        end = start + len(self.old)
        if start >= 0 and self._comment(self.old) and not self._comment(self.new):
            end = text.find("\n", end)  # the rest of the comment must not follow text without one
        exact = [(start, end, self.new)] * text.count(self.old)
        spans = exact or self._spans(text)
        if len(spans) != 1:
            offer = "" if spans else self._offer(text)
            raise ValueError(f"mistake {self.name}: its `old` occurs {len(spans)} times in {self.script}{offer}")
        return spans[0]

    def _comment(self, text: str) -> str:
        """The text after the last token of a text that ends in a comment."""
        behind = text[max((end for _, _, end in tokens(text, self.script)), default=0) :]
        return "" if "\n" in behind else behind.strip()

    def _spans(self, text: str) -> list[tuple[int, int, str]]:
        """Where the tokens of `old` occur in sequence: start, end, and `new` with the indent there."""
        there, mine = tokens(text, self.script), tokens(self.old, self.script)
        words = [word for word, _, _ in mine]
        found = []
        for at in range(len(there) - len(mine) + 1) if mine else ():
            if [word for word, _, _ in there[at : at + len(mine)]] != words:
                continue
            start, end, new = there[at][1], there[at + len(mine) - 1][2], self.new
            first = text.rfind("\n", 0, start) + 1
            was, now = self.old[self.old.rfind("\n", 0, mine[0][1]) + 1 : mine[0][1]], text[first:start]
            if was and not now.strip():  # both begin a line
                start, new = first, re.sub(rf"^{was}", now, new, flags=re.MULTILINE)
            rest = self.old[mine[-1][2] :]
            if rest:  # a comment, or the end of its line
                following = there[at + len(mine)][1] if at + len(mine) < len(there) else len(text)
                last = text.find("\n", end, following)
                end = last + ("\n" in rest) if last >= 0 else end
            found.append((start, end, new))
        return found

    def _offer(self, text: str) -> str:
        """The script's lines that are most like `old`, as a list of mistakes would have them; "" if none."""
        lines, count = text.splitlines(keepends=True), len(self.old.strip("\n").splitlines())
        mine = [word for word, _, _ in tokens(self.old, self.script)]
        best, near = 0.6, ""
        for size in range(max(1, count - 1), count + 2):
            for first in range(len(lines) - size + 1):
                window = "".join(lines[first : first + size])
                match = difflib.SequenceMatcher(None, mine, [w for w, _, _ in tokens(window, self.script)], False)
                if match.quick_ratio() > best and match.ratio() > best:
                    best, near = match.ratio(), window
        if not near:
            return ""
        theirs = [word for word, _, _ in tokens(near, self.script)]
        renamed: dict[str, str] = {}
        for kind, a, b, c, d in difflib.SequenceMatcher(None, mine, theirs, False).get_opcodes():
            if kind == "replace" and b - a == d - c:
                renamed |= {x: y for x, y in zip(mine[a:b], theirs[c:d], strict=True) if x.isidentifier()}
        new = re.sub(r"\b[^\W\d]\w*", lambda m: renamed.get(m[0], m[0]), self.new)
        old = near if self.old.endswith("\n") else near.rstrip("\n")
        said = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in (("old", old), ("new", new))]
        return f"; perhaps {', '.join(said)}"


def tokens(text: str, script: str) -> list[tuple[str, int, int]]:
    """Words, numbers, strings and signs of a text, each with its start and end, without comments and layout."""
    found = TOKENS[".py" if script.endswith(".py") else ".cu"].finditer(text)
    return [(match[0], match.start(), match.end()) for match in found if match["token"]]


@cache
def _fences(text: str) -> list[tuple[str, int, int]]:
    return [(fence.number, fence.first, fence.last) for fence in fences.read_fences(text)[0].values()]


@cache
def _path_of(file: str) -> str:
    return find(file).relative_to(ROOT).as_posix()


def mistakes_of(script: str, root: Path = ROOT) -> tuple[Mistake, ...]:
    """The mistakes listed for this script, by its path in the repository."""
    listed = tables(script, root).get("mistake", [])
    text = (root / script).read_text() if listed else ""
    return tuple(Mistake(script, **entry).lying_in(text) for entry in listed)


def tables(script: str, root: Path = ROOT) -> dict[str, list[dict[str, str]]]:
    """All lists for a script: its mistakes, the other correct solutions of its exercises, and claims: what a
    test requires of an exercise, as a hint for mistakes that are not listed."""
    file = (root / script).with_name(LISTS)
    return _tables(file.read_text()).get(Path(script).name, {}) if file.exists() else {}


@cache
def _tables(text: str) -> dict[str, dict[str, list[dict[str, str]]]]:
    return tomllib.loads(text)


def all_mistakes() -> list[Mistake]:
    """All mistakes. ValueError if a list is about a script that is not beside it."""
    found: list[Mistake] = []
    folders = [ROOT / name for name in sorted(homes(ROOT))] + [ROOT / "tests"]
    for file in (file for folder in folders for file in sorted(folder.rglob(LISTS))):
        for name in _tables(file.read_text()):
            script = file.with_name(name).relative_to(ROOT)
            if not (ROOT / script).exists():
                raise ValueError(f"{file.relative_to(ROOT)} lists mistakes in {name}, which is not beside it")
            found += mistakes_of(script.as_posix(), ROOT)
    return found


# ------------------------------------------------------------------------------------------------------- the verdicts


def digest(mistake: Mistake) -> str:
    """16 hex digits that change with anything that decides whether the mistake is caught, and how it shows."""
    text = mistake.planted((ROOT / mistake.script).read_text())
    return verdict_of(mistake.script, text, [mistake.test], mistake.exercise, mistake.test, mistake.symptom)


def verdict_of(script: str, text: str, tests: Iterable[str], *words: str) -> str:
    """16 hex digits that change with these words and anything that decides how the tests end with this text."""
    decided = _digests_of((script, *dict.fromkeys(test.partition("::")[0] for test in tests)))
    return _sha("\0".join([*words, meaning(text, ROOT / script), *decided]))


def known(file: Path = VERDICTS) -> set[str]:
    """The digests of the caught mistakes in the cache."""
    return set(file.read_text().split()) if file.exists() else set()


def remember(verdict: str, file: Path = VERDICTS) -> None:
    """Add a digest to the cache. Several processes may do it at the same time."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as lines:
        lines.write(f"{verdict}\n")


@cache
def _digests_of(names: tuple[str, ...]) -> list[str]:
    decided = sorted(reached([ROOT / name for name in names]))
    return [f"{file.relative_to(ROOT).as_posix()} {_digest_of(file)}" for file in decided]


@cache
def _digest_of(file: Path) -> str:
    return _sha(meaning(file.read_text(), file))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def meaning(text: str, file: Path) -> str:
    """Equal for two texts that are the same program, without comments, docstrings and layout."""
    if file.suffix == ".py":
        try:
            return ast.dump(program(text))
        except SyntaxError:  # of a mistake; the test that plants it reports it
            return text
    return " ".join(word for word, _, _ in tokens(text, file.name)) if file.suffix in (".cu", ".h") else text


def program(text: str) -> ast.Module:
    """The syntax tree of a Python file without docstrings, and without marks that only say when a test runs."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body[:1] = [] if len(node.body) > 1 or isinstance(node, ast.Module) else [ast.Pass()]
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = [d for d in node.decorator_list if _mark(d) not in MARKS]
    return tree


def _mark(decorator: ast.expr) -> str:
    return getattr(decorator.func if isinstance(decorator, ast.Call) else decorator, "attr", "")


# ------------------------------------------------------------------------------------------------------- what imports


def reached(start: Iterable[Path]) -> set[Path]:
    """These files and all of the repository that they import or name, directly or not."""
    found: set[Path] = set()
    new = set(start)
    while new:
        found |= new
        new = set().union(*(_near(file) for file in new)) - found
    return found


def changed_files() -> set[Path]:
    """Files that differ from the commit at which this branch left main, committed or in the working tree.
    LookupError where git knows of none."""

    def git(*words: str) -> list[str]:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        except OSError:  # not installed
            return []
        return done.stdout.split("\0") if "-z" in words else done.stdout.split()

    if not git("rev-parse", "HEAD"):
        raise LookupError("git says what has changed: it has to be installed, and to know a commit of this folder")
    [base, *_] = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main") or ["HEAD"]
    names = git("diff", "-z", "--name-only", base) + git("ls-files", "-z", "--others", "--exclude-standard")
    return {ROOT / name for name in names if name}


def tests_for(changed: set[Path]) -> set[Path]:
    """The files with tests that import or name one of these, directly or not. Files that none of them names,
    such as a README or a list of mistakes, are read by the tests that cross chapters."""
    across = [*(ROOT / "tests").glob("test_*.py"), *(ROOT / "book").glob("test_*.py")]
    tests = {file: reached([file]) for file in [*files("test_*.py"), *across, *ROOT.glob("when_it_breaks/test_*.py")]}
    if changed & {ROOT / name for name in ("conftest.py", "pyproject.toml", "requirements.txt")}:
        return set(tests)
    unknown = changed - set().union(*tests.values())
    return {file for file, needs in tests.items() if needs & changed} | set(across if unknown else ())


def needed_by(script: Path) -> list[Path]:
    """A script and the files to copy with it: those beside it, and chapter 09's build where it uses that."""
    near = {file for file in reached([script]) if file.parent == script.parent or file in shared_build()}
    return [script, *sorted(near - {script}, key=lambda file: file.name)]


@cache
def shared_build() -> frozenset[Path]:
    """The files that build CUDA sources and emulate a GPU, for all chapters, with the kernels' headers."""
    folder = ROOT / "09_kernels" / "in_depth"
    return frozenset({folder / "_cuda.py", *folder.glob("*.h")})


@cache
def _modules() -> dict[str, Path]:
    here = [*files("*.py"), *(ROOT / "exercises").glob("*.py"), *(ROOT / "tests").glob("*.py")]
    return {f.stem: f for f in here} | {f"harness.{f.stem}": f for f in (ROOT / "tests" / "harness").glob("*.py")}


@cache
def _near(file: Path) -> set[Path]:
    """The repository's files that a file imports, `import_module` included, and files beside it that it names."""
    text = file.read_text()
    names: set[str] = set()
    if file.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text)))
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            if type(node) is ast.Import:
                names |= {alias.name for alias in node.names}
            elif type(node) is ast.ImportFrom and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif type(node) is ast.ImportFrom:  # `from . import x` and `from .x import y`, inside the harness
                names |= {f"harness.{alias.name}" for alias in node.names}
        constants = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in alone]
        texts = [value for value in constants if isinstance(value, str)]
        if any(isinstance(node, ast.Attribute) and node.attr == "import_module" for node in nodes):
            names |= {*texts}
        text = "\n".join(f'"{value}"' for value in texts)
    own = {"harness." + name for name in names if file.parent.name == "harness"}
    named = re.findall(r"[\"']([\w-]+\.(?:py|cu|h|sbatch))[\"']", text)
    quoted = {file.with_name(name) for name in named} | {header for header in shared_build() if header.name in named}
    return {f for f in quoted if f.is_file()} | {_modules()[name] for name in names | own if name in _modules()}
