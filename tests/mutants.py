# ruff: noqa: E402 -- the harness and the checker must be on the path before they are imported
"""Which changes of a script does no test notice?

    python tests/mutants.py 03_zero/zero.py                      25 changes, drawn at random, each planted alone
    python tests/mutants.py 03_zero/*.py --number 10 --seed 1    10 others of each file

The changes are made by rule, as for the hints of exercises (exercises/hints.py): an operator becomes its opposite, a
condition always holds, a call is left out. The tests of the script's chapter that reach it run as in `make test`, its
own first, and then the nets, until one fails. A change that is printed is either nothing that can be seen (a default
that is given again, the size of a demo), or a gap in the tests. Some ten seconds for each change.
"""

import argparse
import ast
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "exercises")]
from harness import warm_python
from harness.layout import chapter_of, files
from harness.mutations import reached
from hints import mutants_of

SHOWN_ONLY = ("main", "demo", "parse", "print", "refuse", "run")  # functions that show, or refuse what is impossible


def left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name.lstrip("_").startswith(SHOWN_ONLY)
    if isinstance(node, ast.If):  # the last lines of a script
        return ast.unparse(node.test) == "__name__ == '__main__'"
    return isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom)


def tests_of(script: Path) -> list[list[str]]:
    """Files of tests that may notice a change of this script: its own, others of its chapter, the nets."""
    found = [test for test in files("test_*.py", chapter_of(script)) if script in reached([test])]
    own = [test for test in found if test.stem == f"test_{script.stem}"]
    groups = own, [test for test in found if test not in own], [ROOT / "tests" / "test_nets.py"]
    return [[test.relative_to(ROOT).as_posix() for test in group] for group in groups if group]


def fails(copy: Path, tests: list[str]) -> bool:
    """Whether one of these tests fails in a copy of the repository, or does not end within ten minutes."""
    path = os.pathsep.join([warm_python.folder(), os.environ["PATH"]])  # a Python that has imported torch
    command = ["python", "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=600).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def survivors(script: Path, number: int, seed: int, copy: Path) -> list[str]:
    """The changes that no test notices, each as the lines that it takes away and adds. ValueError if a test fails
    without a change."""
    tree, where, groups = ast.parse(script.read_text()), script.relative_to(ROOT), tests_of(script)
    if any(fails(copy, tests) for tests in groups):
        raise ValueError(f"{where}: tests fail without a change")
    found = []
    for text in mutants_of(tree, number, f"{seed}{where}", left_out):
        (copy / where).write_text(text)
        if not any(fails(copy, tests) for tests in groups):
            lines = difflib.ndiff(ast.unparse(tree).splitlines(), text.splitlines())
            found.append("\n".join(line for line in lines if line[0] in "-+"))
    shutil.copy(script, copy / where)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the changes of scripts that no test notices.")
    parser.add_argument("scripts", nargs="+", type=Path)
    parser.add_argument("--number", type=int, default=25, help="changes of each script (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn (default: 0)")
    args = parser.parse_args()
    for script in args.scripts:
        if script.suffix != ".py" or not script.is_file() or not script.resolve().is_relative_to(ROOT):
            parser.error(f"{script} is no Python file of this repository")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "results", "student"))
        for script in args.scripts:
            try:
                found = survivors(script.resolve(), args.number, args.seed, copy)
            except ValueError as error:
                print(f"mutants.py: {error}", file=sys.stderr)
                return 1
            print(f"{script}: {len(found)} of {args.number} changes are not noticed", *found, sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
