# ruff: noqa: E402 -- the harness and the checker must be on the path before they are imported
"""Which changes of a script does no test notice?

    python tests/mutants.py 03_zero/zero.py                      25 changes, drawn at random, each planted alone
    python tests/mutants.py 03_zero/*.py --number 10 --seed 1    10 others of each file

The changes are made by rule, as for the hints of exercises (exercises/hints.py): an operator becomes its opposite, a
condition always holds, a call is left out. The tests of the script's chapter that reach it run as in `make test`, its
own first, and then the nets, until one fails. A change that is printed is either nothing that can be seen (a default
that is given again, the size of a demo), or a gap in the tests.
"""

import argparse
import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "exercises")]
from checking import Course
from harness.mutations import tests_for
from hints import mutants_of
from sandbox import Judge, Limits

SHOWN_ONLY = ("main", "demo", "parse", "print", "refuse", "run")  # functions that show, or refuse what is impossible


def left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name.lstrip("_").startswith(SHOWN_ONLY)
    if isinstance(node, ast.If):  # the last lines of a script
        return ast.unparse(node.test) == "__name__ == '__main__'"
    return isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom)


def tests_of(script: Path) -> list[str]:
    """The files of tests that may notice a change of this script, nearest first."""
    home = script.relative_to(ROOT).parts[0]
    found = [test for test in tests_for({script}) if test.relative_to(ROOT).parts[0] == home]
    found.sort(key=lambda test: (test.stem != f"test_{script.stem}", test.parent != script.parent, test))
    return [test.relative_to(ROOT).as_posix() for test in [*found, ROOT / "tests" / "test_nets.py"]]


def survivors(script: Path, number: int, seed: int, judge: Judge) -> list[str]:
    """The changes that no test notices, each as the lines that it takes away and adds."""
    tree, path, tests = ast.parse(script.read_text()), script.relative_to(ROOT).as_posix(), tests_of(script)
    found = []
    for text in mutants_of(tree, number, f"{seed}{path}", left_out):
        outcomes = (judge.run({path: text}, [test], enough=1) for test in tests)
        if not any(outcome.ended or any(not result.passed for result in outcome.results) for outcome in outcomes):
            lines = difflib.ndiff(ast.unparse(tree).splitlines(), text.splitlines())
            found.append("\n".join(line for line in lines if line[0] in "-+"))
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
    with Judge(Course().files, Limits(test_cpu_seconds=120, hang=60), trusted=True) as judge:
        for script in args.scripts:
            found = survivors(script.resolve(), args.number, args.seed, judge)
            print(f"{script}: {len(found)} of {args.number} changes are not noticed", *found, sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
