"""Do hints fit? Measured on wrong solutions that nobody chose.

    python exercises/hints.py 03                  the core exercises of chapter 03; without a number, of all chapters

Each body of the chapter is changed in one place by rule: an operator becomes its opposite, a number one more, two
arguments change places, a call or an argument is left out, a slice loses a bound. The mutant goes through the checker
like a submission. A hint is *right* if the mistake that it was written for changes the statement that was changed here,
*wrong* if it changes another one. *From the message* is what the failure says by itself (a factor, a NaN, a name
without a value); *no hint* is only where to read. A mutant that passes is a solution that is right after all, or a hole
in the tests: its line is printed.
"""

import ast
import copy
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checking import Chapter, Course, Script, Submission, check
from harness import fences
from sandbox import Judge, Limits

OPPOSITE: dict[type, type] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod},
    **{ast.Mod: ast.FloorDiv, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And},
}
OUTCOMES = ("passed", "right hint", "hint from the message", "no hint", "wrong hint")


def changes(node: ast.AST) -> Iterator[Callable[[], object]]:
    """What may go wrong at one node; each, when called, changes the tree."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OPPOSITE:
        yield partial(setattr, node, "op", OPPOSITE[type(node.op)]())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        yield partial(node.ops.__setitem__, 0, OPPOSITE[type(node.ops[0])]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        yield partial(setattr, node, "value", not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield partial(setattr, node, "op", ast.UAdd())
    elif isinstance(node, ast.Slice):
        yield from (partial(setattr, node, bound, None) for bound in ("lower", "upper") if getattr(node, bound))
    elif isinstance(node, ast.Call):
        if len(node.args) > 1:
            yield node.args.reverse
        yield from (partial(node.keywords.remove, keyword) for keyword in node.keywords)
    for block in (getattr(node, name, None) for name in ("body", "orelse")):
        if not isinstance(block, list):  # of a lambda
            continue
        for at, statement in enumerate(block):
            call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if call or isinstance(statement, ast.AugAssign):
                yield partial(block.__setitem__, at, ast.Pass())


def mutants(body: str, most: int, seed: str) -> list[str]:
    """Up to `most` versions of a body with one change each, all different programs, drawn by the seed."""
    tree = ast.Module(fences.parse(body), [])
    count = sum(1 for node in ast.walk(tree) for _ in changes(node))
    found: list[str] = []
    for n in random.Random(seed).sample(range(count), count):
        changed = copy.deepcopy(tree)
        [change for node in ast.walk(changed) for change in changes(node)][n]()
        text = ast.unparse(ast.fix_missing_locations(changed))
        if len(found) < most and text not in (*found, ast.unparse(tree)):
            found.append(text)
    return found


def lines_changed(script: Script, number: str, body: str) -> set[str]:
    """The statements of the chapter's body, as normal text, that are not in this one."""
    own, other = (fences.normal(text).splitlines() for text in (script.fences[number].body, body))
    return {line.strip() for line in own} - {line.strip() for line in other}


def measure(course: Course, chapter: Chapter, judge: Judge, most: int = 5) -> Counter[str]:
    """How many mutants of a chapter's core exercises passed, and how many got which kind of hint."""
    outcomes: Counter[str] = Counter()
    for number in chapter.core:
        script, fence = chapter.exercises[number]
        if fence.cuda:
            continue
        for body in mutants(fence.body, most, number):
            (row,) = check(course, chapter, Submission({number: body}), [number], judge=judge).rows
            wrong = lines_changed(script, number, body)
            mistake = next((m for m in script.mistakes if m.name == row.mistake), None)
            if row.status == "passed":
                kind = "passed"
            elif mistake:
                right = wrong & lines_changed(script, number, script.mistaken_body(mistake))
                kind = "right hint" if right else "wrong hint"
            else:
                kind = "no hint" if row.hint.startswith("Read exercise") else "hint from the message"
            outcomes[kind] += 1
            if kind in ("passed", "wrong hint"):
                print(
                    f"  {number} {kind}: {sorted(wrong)}" + f", got {row.mistake}: {row.hint}" * bool(mistake),
                    flush=True,
                )
    return outcomes


def main() -> None:
    course, total = Course(), Counter[str]()
    limits = Limits(test_seconds=40, test_cpu_seconds=60, hang=10)
    for name in sys.argv[1:] or course.chapters:
        chapter = course.chapter(name)
        with Judge(course.files, limits, trusted=True) as judge:
            counted = measure(course, chapter, judge)
        total += counted
        print(f"{chapter.folder}: " + ", ".join(f"{counted[kind]} {kind}" for kind in OUTCOMES), flush=True)
    print("all: " + ", ".join(f"{total[kind]} {kind}" for kind in OUTCOMES))


if __name__ == "__main__":
    main()
