"""The course: start the exercises of a chapter, check what you wrote, grade a class.

    python exercises/course.py list               all exercises, with their level
    python exercises/course.py start 02           student/02_data_parallel: the chapter without the exercises' bodies
    python exercises/course.py check 02           which of your exercises are right?  check 02 2.3: only this one
    python exercises/course.py progress           which of all exercises have passed so far?
    python exercises/course.py diff 02 2.3        your lines beside the chapter's (this shows the solution)
    python exercises/course.py reset 02 2.3       begin this exercise again; what you had is kept in a file
    python exercises/course.py grade FOLDER       check every submission FOLDER/NAME/02_data_parallel/...

`check` ends with exit code 0 if the core, or the exercise that was named, has passed and nothing that you wrote has
failed, else 1. A wrong argument is one line and exit code 2.
README.md and the tops of checking.py, sandbox.py, judge.py and screen.py explain how it works.
"""

import argparse
import ast
import csv
import difflib
import json
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checking import ROOT, Chapter, Course, CourseError, Report, Row, Script, check, read_submission
from harness import fences  # checking.py has put it on the path
from pages import class_page, note, progress, written
from sandbox import JudgeError, Limits, no_cell

ENDS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)  # Ctrl-C, a terminal that is closed, `kill`
COLUMNS = ("submission", "chapter", "exercise", "level", "status", "claim", "detail", "hint")


# ------------------------------------------------------------------------------------------------- the student's folder


def start(course: Course, chapter: Chapter, folder: Path, again: bool = False) -> str:
    """Make `folder`: the chapter without tests, benchmarks, bodies, lists of mistakes. Returns a message."""
    if folder.exists() and not again:
        again_ = f"`python exercises/course.py start --again {chapter.folder[:2]}`"
        raise CourseError(f"{folder} exists and is left as it is; {again_} puts it aside and begins anew")
    said = ""
    ignore = shutil.ignore_patterns("test_*", "bench_*", "mistakes.toml", "__pycache__", ".*")
    half = folder.with_name(f".{folder.name}")  # a start that is broken off leaves no folder with the chapter's bodies
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(course.root / chapter.folder, half, ignore=ignore)
    for script in chapter.scripts:
        bodies = {number: stub(script, fence) for number, fence in script.fences.items()}
        (half / script.within).write_text(fences.splice(script.text, bodies), encoding="utf-8")
    for readme in half.rglob("README.md"):
        readme.write_text(renumbered(readme, half, chapter), encoding="utf-8")
    if folder.exists():
        aside = next(f for n in range(1, 1000) if not (f := folder.with_name(f"{folder.name}.{n}")).exists())
        folder.rename(aside)
        said = f"what was there is now {aside}\n"
    half.rename(folder)
    first, (script, _) = next(iter(chapter.exercises.items()))
    few = chapter.core
    more = list(chapter.exercises)[len(few) :]
    extra = f", and {more[0]} to {more[-1]} in in_depth for who wants more" if more else ""
    return (
        f"{said}{folder}: exercises {few[0]} to {few[-1]}{extra}\n"
        f"What to write, and its target: {folder / 'README.md'}, under Exercises\n"
        f"Open {folder / script.within} and look for `exercise {first}`. "
        f"Then: make check CH={chapter.folder[:2]} N={first}\nWhat you have done so far: make progress"
    )


def stub(script: Script, fence: fences.Fence) -> str:
    """The initial text in place of a body, with the names that the body must define."""
    left = [] if fence.cuda else leaves(script.text, fence)
    return f"# your lines define: {', '.join(left)}\n" * bool(left) + fences.stub(fence)


def renumbered(readme: Path, folder: Path, chapter: Chapter) -> str:
    """The text of a README whose links `script.py#L123` lead to the same lines of the student's `script.py`."""
    scripts = {(folder / script.within).resolve(): script for script in chapter.scripts}

    def link(match: re.Match[str]) -> str:
        script = scripts.get((readme.parent / match[1]).resolve())
        if script is None:
            return match[0]
        own, line = fences.read_fences((folder / script.within).read_text(encoding="utf-8"))[0], int(match[2])
        before = [fence for fence in script.fences.values() if fence.first <= line]
        if before:
            nearest = max(before, key=lambda fence: fence.first)
            stubbed = own[nearest.number]
            line = stubbed.first if line < nearest.last else stubbed.last + line - nearest.last
        return f"({match[1]}#L{line})"

    return re.sub(r"\(([^()\s]+)#L(\d+)\)", link, readme.read_text(encoding="utf-8"))


def leaves(text: str, fence: fences.Fence) -> list[str]:
    """Names that a body defines and the lines after it, in the same function, use before they set them."""
    nodes = [node for statement in fences.parse(fence.body) for node in ast.walk(statement)]
    given = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    around = [f for f in _functions(text) if f.lineno < fence.first and (f.end_lineno or 0) >= fence.last - 1]
    events: list[tuple[int, int, str, bool]] = []  # line, column, name, whether it is read
    for node in (node for f in around[-1:] for node in ast.walk(f) if getattr(node, "lineno", 0) > fence.last):
        line, column, targets = node.lineno, node.col_offset - 1, []
        if isinstance(node, ast.Assign):
            line, column, targets = node.end_lineno or line, node.end_col_offset or column, node.targets
        elif isinstance(node, ast.For):
            targets = [node.target]
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            targets = [generator.target for generator in node.generators]
        read = node.target if isinstance(node, ast.AugAssign) else node
        if isinstance(read, ast.Name) and (read is not node or not isinstance(read.ctx, ast.Store)):
            events.append((line, column, read.id, True))
        events += [(line, column, n.id, False) for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    first = {name: read for *_, name, read in sorted(events, reverse=True)}
    return [name for name in reversed(first) if first[name] and name in given]


@cache
def _functions(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]


def reset(chapter: Chapter, number: str, folder: Path) -> str:
    """Restore the stub of one exercise. A copy of the old file is kept beside it."""
    script, fence = chapter.exercises[number]
    path = folder / script.within
    if not folder.is_dir():
        raise CourseError(f"{folder} does not exist; `make exercise CH={chapter.folder[:2]}` makes it")
    text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    found, problems = fences.read_fences(text)
    whole = not any(f"exercise {number} " in problem for problem in problems)
    begun = {number: stub(script, fence)}
    if number in found and found[number].inside == fence.inside and whole:
        new, what = fences.splice(text, begun), "only its lines changed"
    else:  # the fence is missing or moved: take the chapter's file, with the other bodies
        kept = {n: found[n].body if n in found else stub(script, f) for n, f in script.fences.items()}
        lost = [n for n in script.fences if n not in (*found, number)]  # their fences are broken as well
        what = f"as does {', '.join(lost)}, whose fence is gone" if lost else "your other exercises are as they were"
        new = fences.splice(script.text, kept | begun)
    said = f"{path}: exercise {number} begins again, {what}"
    if text:
        backup = next(f for n in range(1, 1000) if not (f := path.with_name(f"{path.name}.{n}")).exists())
        shutil.copy(path, backup)
        said += f"; the file as it was is {backup.name}"
    path.write_text(new, encoding="utf-8")
    return said


def difference(chapter: Chapter, folder: Path, number: str | None) -> str:
    submission = read_submission(chapter, folder, screened=False)
    parts = []
    for n, (script, fence) in chapter.exercises.items():
        if n in submission.bodies and number in (None, n):
            ours, theirs = fence.body.splitlines(), submission.bodies[n].splitlines()
            lines = difflib.unified_diff(theirs, ours, f"yours, exercise {n}", f"{script.path}", lineterm="")
            parts.append("\n".join(lines) or f"exercise {n}: the same")
        elif number in (None, n):
            parts.append(f"exercise {n}: {(submission.refused | submission.missing).get(n, 'not there')}")
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------------------- tables


def listing(course: Course) -> str:
    lines = []
    for chapter in course.chapters.values():
        lines.append(f"{chapter.folder}")
        for number, (script, fence) in chapter.exercises.items():
            lines.append(f"  {number:<6}{chapter.level(number):<8}{script.name:<22}{fence.title}")
    return "\n".join(lines)


def row_lines(row: Row) -> list[str]:
    lines = [f"{row.number:<6}{row.status:<13}{row.title}"]
    for label, text in (("claim", row.claim), ("", row.detail), ("hint", row.hint)):
        indent = f"{'':6}{label + ': ' if label else '':<7}"
        lines += textwrap.wrap(text, 110, initial_indent=indent, subsequent_indent=" " * 13)
    return lines


def verdict(report: Report) -> str:
    count = {s: sum(row.status == s for row in report.rows) for s in dict.fromkeys(row.status for row in report.rows)}
    lines = [f"warning: {warning}" for warning in report.warnings]
    lines += [f"REJECTED: {report.rejected}"] if report.rejected else []
    lines.append(f"{report.chapter}: " + ", ".join(f"{n} {status}" for status, n in count.items()))
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- grade


def submissions_in(course: Course, folder: Path) -> list[tuple[str, Chapter, Path]]:
    """(name, chapter, folder of its scripts) for each submission. A submission holds one or more chapter folders."""
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder; give one with a subfolder for each submission")
    found = []
    for student in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
        name = student.name.encode("unicode_escape").decode()  # one line, even if it has a line break
        try:
            there = {path.name for path in student.iterdir() if path.is_dir() and not path.is_symlink()}
            why = "" if there & set(course.chapters) else "holds no folder of a chapter"
        except OSError as error:
            there, why = set(), f"cannot be read: {error.strerror}"
        if why:
            print(f"{name}: {why}")
        found += [(name, chapter, student / at) for at, chapter in course.chapters.items() if at in there]
    if not found:
        raise CourseError(f"{folder} holds no submission; expected {folder}/NAME/{next(iter(course.chapters))}/")
    return found


def grade(course: Course, folder: Path, limits: Limits | None = None, unsafe: bool = False) -> list[dict[str, str]]:
    """Check all submissions, one after the other, and write grades.csv, grades.json and class.md into `folder`."""
    rows: list[dict[str, str]] = []
    bodies: dict[str, dict[str, str]] = {}
    if not unsafe and (why := no_cell()):
        raise CourseError(
            f"submissions could not be kept apart from this machine ({why}); "
            "if you trust who wrote them, grade them with --unsafe"
        )
    submissions = submissions_in(course, folder)
    write_grades(rows, folder)  # fail early if it cannot be written
    for name, chapter, where in submissions:
        try:
            submission = read_submission(chapter, where)
            bodies.setdefault(name, {}).update(written(chapter, submission.bodies))
            report = check(course, chapter, submission, limits=limits, apart=True)
        except Exception as error:  # an error of the checker in one submission must not affect the others
            rows_ = [Row(n, fence.title, chapter.level(n)) for n, (_, fence) in chapter.exercises.items()]
            report = Report(chapter.folder, rows_, rejected=f"the checker failed: {type(error).__name__}: {error}")
        passed = sum(row.status == "passed" for row in report.rows)
        print(f"{name}: {chapter.folder}: {passed} of {len(report.rows)} passed" + ", REJECTED" * bool(report.rejected))
        for row in report.rows:
            detail = row.detail or (report.rejected if row.status == "not reached" else "")
            values = (name, chapter.folder, row.number, row.level, row.status, row.claim, detail, row.hint)
            rows.append(dict(zip(COLUMNS, values, strict=True)))
        write_grades(rows, folder)  # after each, so that an interrupted run keeps its results
    (folder / "class.md").write_text(class_page(rows, bodies), encoding="utf-8")
    return rows


def write_grades(rows: list[dict[str, str]], folder: Path) -> None:
    with open(folder / "grades.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(rows)
    (folder / "grades.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"course.py: {message}", file=sys.stderr)
        sys.exit(2)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--student", type=Path, default=ROOT / "student", help="the folder of your own versions")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    commands.add_parser("list", help="all exercises, with their level")
    commands.add_parser("progress", help="which of them have passed so far")
    for name, words in (("start", "begin a chapter"), ("check", "check yours"), ("diff", "yours beside the chapter's")):
        command = commands.add_parser(name, help=words)
        command.add_argument("chapter")
        if name == "start":
            command.add_argument("--again", action="store_true", help="put aside what is there, and begin anew")
        else:
            command.add_argument("exercise", nargs="?")
    command = commands.add_parser("reset", help="begin one exercise again")
    command.add_argument("chapter")
    command.add_argument("exercise")
    command = commands.add_parser("grade", help="check a folder of submissions")
    command.add_argument("folder", type=Path)
    command.add_argument("--unsafe", action="store_true", help="also where they cannot be kept apart from the machine")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        named = Course(only=getattr(arguments, "chapter", ""))
        return run(arguments, named if named.chapters else Course())  # which names the chapters
    except (CourseError, JudgeError, OSError) as error:
        print(f"course.py: {error}", file=sys.stderr)
        return 2


def end(number: int, *_: object) -> NoReturn:
    """Raise an exception, so that started processes are ended. `make`, or anything that ends a process group,
    may signal twice, as may Ctrl-C; the second signal must not interrupt the cleanup."""
    for each in ENDS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def run(arguments: argparse.Namespace, course: Course) -> int:
    if arguments.command == "list":
        print(listing(course))
        return 0
    if arguments.command == "progress":
        print(progress(course, arguments.student))
        return 0
    if arguments.command == "grade":
        grade(course, arguments.folder, unsafe=arguments.unsafe)
        print(f"written: {arguments.folder / 'grades.csv'}, grades.json and class.md")
        return 0
    chapter = course.chapter(arguments.chapter)
    folder = arguments.student / chapter.folder
    if arguments.command == "start":
        print(start(course, chapter, folder, arguments.again))
        return 0
    number = course.number(chapter, arguments.exercise) if arguments.exercise else None
    if arguments.command == "reset":
        print(reset(chapter, str(number), folder))
        return 0
    if not folder.is_dir():
        raise CourseError(f"{folder} does not exist; `make exercise CH={chapter.folder[:2]}` makes it")
    if arguments.command == "diff":
        print(difference(chapter, folder, number))
        return 0
    later: list[str] = []
    shown: list[str] = []

    def first(row: Row) -> None:
        shown.extend(row_lines(row))
        print(*shown, sep="\n", flush=True)

    def show(row: Row) -> None:  # exercises in depth are left out of the core file's list
        if row.status == "not done" and row.number not in (number, *chapter.core):
            later.append(row.number)
        else:
            lines = row_lines(row)
            print(*lines[len(shown) if lines[: len(shown)] == shown else 0 :], sep="\n", flush=True)

    read = partial(read_submission, chapter, folder, only=number)
    report = check(course, chapter, read, [number] if number else None, show=show, first=first if number else None)
    if later:
        print(f"{later[0]} to {later[-1]}: {len(later)} in depth are not done")
    print(verdict(report))
    note(arguments.student, report)
    due = [row for row in report.rows if row.number not in later]
    return 0 if due and not report.rejected and all(row.status == "passed" for row in due) else 1


if __name__ == "__main__":
    for number in ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` leaves it
            signal.signal(number, end)
    sys.exit(main())
