"""The course as data, and the check of one submission.

How an exercise is checked. The student's body is put into the chapter's script, with the chapter's bodies of
all other exercises, in a new copy of the repository; then the chapter's tests run. So a wrong exercise does
not affect another, a student's file can change nothing outside its fences, and tests are never the student's.

The tests are those that catch the planted mistakes of this exercise, those that its statement names, and a
few more that run it, as `reach.py` finds. Before a pass is accepted, known mistakes are planted *beside* the
student's bodies; a submission with which they are not caught has broken the tests, not passed them.
"""

import ast
import difflib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from queue import LifoQueue
from typing import Any

import screen
from reach import Reach
from sandbox import ROOT, Judge, Limits, Outcome, Result, no_cell, read_files

sys.path.insert(0, str(ROOT / "tests"))
from harness import fences
from harness.fences import Fence
from harness.layout import homes
from harness.mutations import Mistake, mistakes_of, tables

LEVELS = ("easy", "medium", "hard")
IN_A_PART_OF_THE_WORLD = r"_slices_of_the_world|_the_given_group_only|_of_the_groups?_"  # in the name of a test


class CourseError(ValueError):
    """A request that cannot be met; the message is one line that says why and what would be right."""


@dataclass(frozen=True)
class Alternative:
    """A correct solution that differs from the chapter's."""

    exercise: str
    body: str
    why: str


@dataclass(frozen=True)
class Claim:
    """What a test requires of one exercise, as a hint for mistakes that are not listed."""

    exercise: str
    test: str  # "test_messages_are_in_flight"
    hint: str


@dataclass(frozen=True)
class Script:
    path: str  # "02_data_parallel/in_depth/collectives.py"
    text: str
    fences: dict[str, Fence]
    mistakes: tuple[Mistake, ...]
    alternatives: tuple[Alternative, ...]
    claims: tuple[Claim, ...] = ()

    @property
    def name(self) -> str:
        return self.path.split("/")[-1]

    @property
    def within(self) -> str:
        """Its path in its chapter: "zero.py", "in_depth/zero3.py"."""
        return self.path.partition("/")[2]

    def catching(self, number: str) -> list[str]:
        """The tests that catch an exercise's mistakes: "test_collectives.py::test_every_rank_can_be_the_root". The
        one that catches most is the most likely to fail, so it is first."""
        return [test for test, _ in Counter(m.caught_by for m in self.mistakes if m.exercise == number).most_common()]

    @property
    def test_files(self) -> list[str]:
        """Its own test files and those that its mistakes name."""
        named = [m.caught_by.partition("::")[0] for m in self.mistakes]
        return list(dict.fromkeys([f"test_{Path(self.name).stem}.py", *named]))

    def mistaken_body(self, mistake: Mistake) -> str:
        found, _ = fences.read_fences(mistake.planted(self.text))
        return found[mistake.exercise].body


@dataclass(frozen=True)
class Chapter:
    folder: str  # "02_data_parallel"
    scripts: tuple[Script, ...]
    readme: str
    reach: Reach

    @property
    def exercises(self) -> dict[str, tuple[Script, Fence]]:
        """All exercises in the order of their numbers, which is the order to do them in."""
        found = {n: (script, fence) for script in self.scripts for n, fence in script.fences.items()}
        return {n: found[n] for n in sorted(found, key=_key)}

    @property
    def core(self) -> list[str]:
        """The exercises of its core file; from 21 on they are in depth."""
        return [number for number in self.exercises if _key(number)[1] < 21]

    def statement(self, number: str) -> str:
        """What the README says about an exercise: its section and its rows in tables. "" if it says nothing."""
        head = rf"^(#+) +(?:Exercise )?{re.escape(number)}(?![\d.]*\d)"
        section = re.search(rf"{head}.*?(?=^#|\Z)", self.readme, re.MULTILINE | re.DOTALL)
        rows = re.findall(rf"^\| *\**{re.escape(number)}\** *\|.*$", self.readme, re.MULTILINE)
        return "\n".join([*([section[0].strip()] if section else []), *rows])

    def tests(self, number: str) -> list[str]:
        """The tests that decide an exercise."""
        script, _ = self.exercises[number]
        return [*script.catching(number), *self.more(number)]

    def more(self, number: str, most: int = 3) -> list[str]:
        """More tests that run an exercise, besides those that catch its mistakes: the README's decisive ones,
        for lines with a group one in which the world is larger, and up to `most` in all. First those that catch
        other mistakes, then the nearest; no long ones."""
        script, fence = self.exercises[number]
        known = {_claim(mistake.caught_by) for mistake in script.mistakes}
        own = {_claim(test) for test in script.catching(number)}
        running = [test for test in self.running(number) if test not in own]
        decisive = []
        for name, bracket, parameters in (name.partition("[") for name in self.decisive(number)):
            caught = [] if bracket else own  # other parameters of a test that catches mistakes may be named
            tests = [test for test in self.running(number) if test not in (*caught, *script.catching(number))]
            decisive += [f"{test}{bracket}{parameters}" for test in tests if test.partition("::")[2].startswith(name)]
        if re.search(r"\bgroup\b", fence.body):
            decisive += [test for test in running if re.search(IN_A_PART_OF_THE_WORLD, test)]
        decisive = [test for test in dict.fromkeys(decisive) if test not in script.catching(number)]
        there = {_claim(test) for test in decisive}
        marks = "prove|long|as_written"
        quick = [test for test in running if test not in there and not self.reach.marked(test, marks)]
        quick = [test for test in quick if "::test_check_" not in test]  # of the script's own check, with faults
        quick.sort(key=lambda test: test not in known)
        return [*decisive, *quick[: max(0, most - len(decisive))]] or ([] if own else script.test_files)

    def running(self, number: str) -> dict[str, int]:
        """The tests that run an exercise, each with its distance, nearest first. For CUDA it is not known:
        there it is all tests."""
        if number not in self._running:
            script, fence = self.exercises[number]
            files = [file.removesuffix(".py") for file in script.test_files]
            if fence.cuda:
                found = {f"{file}.py::{test}": 0 for file in files for test in self.reach.tests(file)}
            else:
                found = self.reach.running(Path(script.name).stem, fence.first, fence.last, files)
            self._running[number] = found
        return self._running[number]

    @cached_property
    def _running(self) -> dict[str, dict[str, int]]:
        return {}

    def decisive(self, number: str) -> list[str]:
        """Prefixes of the tests that the README calls decisive: `test_x_...`, `test_y[3]`, or "the same"."""
        return self._decisive[number]

    @cached_property
    def _decisive(self) -> dict[str, list[str]]:
        names: list[str] = []
        found = {}
        for number in self.exercises:
            cell = self.statement(number).rstrip("| ").rpartition("|")[2].strip()
            more = ["".join(parts) for parts in re.findall(r"`(test_\w+?)(?:_?\.\.\.)?(\[\w+\])?`", cell)]
            found[number] = names = [*(names if cell.startswith("the same") else []), *more]
        return found

    def level(self, number: str) -> str:
        words = re.findall(r"\b(easy|medium|hard)\b", self.statement(number))
        return words[0] if words else ""


class Course:
    """All chapters with exercises, read once, so that later changes of the files by a submission have no
    effect. With `only`, a name as for `chapter`, just that one, since reading all takes a second."""

    def __init__(self, root: Path = ROOT, only: str = "") -> None:
        self.root = root
        self.files = read_files(root, homes(root) | {"tests"})
        self.chapters: dict[str, Chapter] = {}
        reach = Reach(self.files)
        for folder in sorted(root / name for name in homes(root)):
            if only and only not in _names(folder.name):
                continue
            inside = [home for home in (folder, folder / "in_depth", folder / "planner") if home.is_dir()]
            paths = [path for home in inside for path in sorted(home.iterdir()) if path.suffix in (".py", ".cu")]
            scripts = [script for script in map(self._script, paths) if script.fences]
            if scripts:
                readme = folder / "README.md"
                text = readme.read_text() if readme.exists() else ""
                self.chapters[folder.name] = Chapter(folder.name, tuple(scripts), text, reach)

    def _script(self, path: Path) -> Script:
        text = path.read_text()
        found, problems = fences.read_fences(text)
        if problems:
            raise CourseError(f"{path.relative_to(self.root)}, {problems[0]}")
        where = path.relative_to(self.root).as_posix()
        listed = tables(where, self.root) if found else {}
        mistakes = mistakes_of(where, self.root) if found else ()
        alternatives = tuple(Alternative(**entry) for entry in listed.get("alternative", []))
        claims = tuple(Claim(**entry) for entry in listed.get("claim", []))
        return Script(where, text, found, mistakes, alternatives, claims)

    def chapter(self, name: str) -> Chapter:
        """By "02", "2" or the folder's name."""
        for folder, chapter in self.chapters.items():
            if name in _names(folder):
                return chapter
        known = ", ".join(folder[:2] for folder in self.chapters)
        raise CourseError(f"chapter {name!r} has no exercises; there are {known}")

    def number(self, chapter: Chapter, name: str) -> str:
        if name not in chapter.exercises:
            known = ", ".join(chapter.exercises)
            raise CourseError(f"exercise {name!r} is not in {chapter.folder}; there are {known}")
        return name

    def graded(self, judge: Judge, chapter: Chapter, number: str, changes: Mapping[str, str], **more: Any) -> Outcome:
        """The result of an exercise's tests in a copy with these changes. `more` is for `Judge.run`."""
        paths = {test: self.test_path(chapter, test) for test in chapter.tests(number)}
        known = len(chapter.exercises[number][0].catching(number))  # each of these may identify the mistake
        few = [paths[test] for test in chapter.more(number)]
        return judge.run(changes, list(paths.values()), enough=max(3, known), few=few, **more)

    def test_path(self, chapter: Chapter, test: str) -> str:
        """ "test_x.py::test_y" of this chapter (or, for a test that crosses chapters, of another), from the root."""
        file, _, name = test.partition("::")
        found = next((f for f in self.files if f.endswith(f"/{file}")), f"{chapter.folder}/{file}")
        return f"{found}::{name}" if name else found


# -------------------------------------------------------------------------------------------------------- submissions


@dataclass
class Submission:
    """What a student wrote in a chapter's scripts, and what of it cannot be used."""

    bodies: dict[str, str] = field(default_factory=dict)  # by exercise
    refused: dict[str, str] = field(default_factory=dict)  # by exercise: why, in one line
    missing: dict[str, str] = field(default_factory=dict)  # by exercise: its script was not handed in
    warnings: list[str] = field(default_factory=list)


def read_submission(chapter: Chapter, folder: Path, screened: bool = True, only: str | None = None) -> Submission:
    """Find the student's bodies, of all exercises or of `only` one. An error in a file affects only the
    exercises it belongs to."""
    submission = Submission()
    for script in chapter.scripts:
        path, text, why = folder / script.within, "", ""
        try:  # no link may lead outside
            inside = os.path.realpath(path) == os.path.join(os.path.realpath(folder), script.within)
            if not path.exists():
                why = "is not there"
            elif not inside or not path.is_file() or path.stat().st_size > 2**20:
                why = "is not a plain file of less than 1 MiB"
            else:
                text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        except UnicodeDecodeError:
            why = "is not UTF-8 text"
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
        if why:
            unusable = submission.missing if why == "is not there" else submission.refused
            unusable |= dict.fromkeys(script.fences, f"{script.name} {why}")
        else:
            _read_script(script, text, submission, screened, only)
    return submission


def _read_script(script: Script, text: str, submission: Submission, screened: bool, only: str | None) -> None:
    found, problems = fences.read_fences(text)
    submission.warnings += [f"{script.name}, {problem}" for problem in problems]
    for number, fence in script.fences.items():
        if only not in (None, number):
            continue
        theirs = found.get(number)
        if theirs is None and found and not set(found) & set(script.fences):
            why = f"{script.name} is another file than the chapter's: the first exercise in it is {next(iter(found))}"
        elif theirs is None:
            why = f"the fence of exercise {number} is gone from {script.name}; `reset` of {number} puts it back"
        elif theirs.inside != fence.inside:
            where = f"{theirs.inside or 'the top of the file'} instead of {fence.inside or 'the top of the file'}"
            why = f"{script.name}, line {theirs.first}: the fence of exercise {number} was moved into {where}"
        else:
            why = _objection(script, fence, theirs, screened)
            submission.bodies[number] = theirs.body
        if why:
            submission.refused[number] = why
    mine, kept = fences.outside(script.text), fences.outside(text)
    pairs = zip([*kept, (len(text.splitlines()), None)], [*mine, (0, None)], strict=False)
    line = next((line for (line, theirs_), (_, ours) in pairs if theirs_ != ours), None)
    if line is not None:
        submission.warnings.append(
            f"{script.name}, line {line}: differs from the chapter outside the fences; only what is inside them counts"
        )


def _objection(script: Script, fence: Fence, theirs: Fence, screened: bool) -> str:
    """Why this body cannot run at all, or must not; "" if it can."""
    if fence.cuda:
        found = screen.objections_to_cuda(theirs.body, fence.body, script.text) if screened else []
        stubbed = fences.is_stub(fence, theirs.body)
        return "" if stubbed else next((f"{script.name}, line {theirs.first + n}: {why}" for n, why in found), "")
    try:
        statements = fences.parse(theirs.body)
        compile(fences.splice(script.text, {fence.number: theirs.body}), script.name, "exec")
        stubbed = fences.is_stub(fence, theirs.body)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        line = getattr(error, "lineno", None) or 1
        if getattr(error, "filename", "") == script.name:  # found by `compile`, in the chapter's lines
            line -= fence.first
        line = theirs.first + max(1, min(line, theirs.last - theirs.first - 1))
        return f"{script.name}, line {line}: syntax error in exercise {fence.number}: {getattr(error, 'msg', error)}"
    except (RecursionError, MemoryError):
        return f"{script.name}, line {theirs.first}: exercise {fence.number} is nested too deeply"
    if screened and not stubbed:
        for line, why in screen.objections(statements, fences.parse(fence.body), ast.parse(script.text)):
            return f"{script.name}, line {theirs.first + line}: {why}"
    return ""


# -------------------------------------------------------------------------------------------------------------- check


@dataclass
class Row:
    number: str
    title: str
    level: str
    status: str = "not reached"  # or "passed", "failed", "refused", "not done"
    claim: str = ""  # the test that failed, as a sentence
    detail: str = ""  # tensor and numbers, or why it was refused
    hint: str = ""
    mistake: str = ""  # the planted mistake it is, or looks most like
    doubtful: bool = False  # a limit of time was passed, or a connection broke: the machine may be to blame


@dataclass
class Report:
    chapter: str
    rows: list[Row]
    warnings: list[str] = field(default_factory=list)
    rejected: str = ""  # why no result of this submission can be trusted

    @property
    def all_passed(self) -> bool:
        return not self.rejected and all(row.status == "passed" for row in self.rows)


def check(
    course: Course,
    chapter: Chapter,
    submission: Submission | Callable[[], Submission],
    numbers: Iterable[str] | None = None,
    limits: Limits | None = None,
    show: Callable[[Row], None] = lambda row: None,
    judge: Judge | None = None,
    apart: bool = False,
    first: Callable[[Row], None] | None = None,
) -> Report:
    """Check the exercises `numbers`, or all. `show` is called with each row when it is decided; a pass is
    final only with the report, because it is confirmed at the end. `first` is called with an exercise's row
    when its first test has failed: the hint follows when all tests that may identify the mistake have run.

    For several exercises two judges work in parallel. A caller that trusts all its submissions may pass one, to
    save the seconds of its start. A submission that is given as a function is read in these seconds. With `apart`
    there is one judge, new for each exercise, so that no code of one exercise can see the chapter's solution of
    the next, and each pass is verified from outside.
    """
    wanted = list(chapter.exercises) if numbers is None else list(numbers)
    with judges(course, limits, judge, 1 if apart or len(wanted) == 1 else 2) as ask:
        if callable(submission):
            ask(Judge.start)
            submission = submission()
        report = Report(chapter.folder, [], list(submission.warnings))
        answers = {number: ask(_decide, course, chapter, submission, number, apart, first) for number in wanted}
        for number, answer in answers.items():
            row = _row(chapter, number)
            if not report.rejected:
                row, report.rejected = answer.result()
                if row.doubtful:  # it may only have been slow beside other work: repeat it alone
                    wait(answers.values())
                    row, report.rejected = ask(_decide, course, chapter, submission, number, apart, None).result()
            else:
                answer.cancel()
            report.rows.append(row)
            show(row)
        passed = [row.number for row in report.rows if row.status == "passed"]
        if passed and not report.rejected:
            bodies = {number: submission.bodies[number] for number in passed}
            report.rejected = confirm(course, chapter, bodies, report.warnings, ask)
    for row in report.rows:
        if row.status == "passed" and report.rejected:
            row.status = "not reached"
    return report


@contextmanager
def judges(course: Course, limits: Limits | None, judge: Judge | None, most: int) -> Iterator[Callable[..., Future]]:
    """A function that schedules a call with a judge as its last argument, as soon as a judge is free.

    It is `judge`, or as many new ones as may work in parallel: only one where there are no cells, because the
    owner of an orphan process would be unknown.
    """
    own = [] if judge else [Judge(course.files, limits) for _ in range(1 if no_cell() else most)]
    free: LifoQueue[Judge] = LifoQueue()  # warm ones first
    for one in own or [judge]:
        free.put(one)

    def turn(what: Callable, *args: Any) -> Any:
        one = free.get()
        try:
            return what(*args, one)
        finally:
            free.put(one)

    pool = ThreadPoolExecutor(free.qsize())
    try:
        yield partial(pool.submit, turn)
    finally:
        for one in own:
            one.deadline = 0.0  # the pending runs are no longer needed
        pool.shutdown(cancel_futures=True)
        for one in own:
            one.close()


def _row(chapter: Chapter, number: str) -> Row:
    return Row(number, chapter.exercises[number][1].title, chapter.level(number))


def _decide(
    course: Course,
    chapter: Chapter,
    submission: Submission,
    number: str,
    apart: bool,
    first: Callable[[Row], None] | None,
    judge: Judge,
) -> tuple[Row, str]:
    """The row of one exercise, and why the entire submission is rejected, if it is."""
    row, why = _row(chapter, number), ""
    script, fence = chapter.exercises[number]
    if number in submission.refused:
        row.status, row.detail = "refused", submission.refused[number]
    elif number in submission.missing:
        row.status, row.detail = "not done", submission.missing[number]
    elif fences.is_stub(fence, submission.bodies[number]):
        row.status = "not done"
    else:
        why = _judge_one(course, chapter, script, submission.bodies[number], row, first, judge)
        if apart:
            judge.stop()
        if apart and row.status == "passed":
            why = from_outside(course, chapter, script, submission.bodies[number], row, judge)
    return row, why


def _judge_one(
    course: Course,
    chapter: Chapter,
    script: Script,
    body: str,
    row: Row,
    first: Callable[[Row], None] | None,
    judge: Judge,
) -> str:
    """Fill in the row. Returns why the entire submission is rejected, if it is."""

    def heard(result: Result) -> None:
        if first and row.status != "failed" and not result.passed and not OF_THE_MACHINE.search(result.message):
            row.status, row.claim, row.detail = "failed", sentence(result.test), told(result.message)
            first(row)

    text = fences.splice(script.text, {row.number: body})
    tests = chapter.tests(row.number)
    outcome = course.graded(judge, chapter, row.number, {script.path: text}, heard=heard)
    if outcome.foul:
        row.status, row.detail = "refused", outcome.foul
        return f"exercise {row.number}: {outcome.foul}"
    failed = [result for result in outcome.results if not result.passed]
    if outcome.ended:
        at = next((test for test in tests if test not in {r.test for r in outcome.results}), tests[-1])
        row.detail = outcome.ended
    elif failed:
        at, row.detail = failed[0].test, told(failed[0].message)
    elif missing := unanswered(tests, outcome):
        at, row.detail = missing[0], "the test was not run to its end"
    else:
        row.status = "passed"
        return ""
    row.status, row.claim = "failed", sentence(at)
    row.doubtful = bool(outcome.ended or (failed and OF_THE_MACHINE.search(failed[0].message)))
    if row.doubtful and (why := unwell(course, chapter, at, judge)):
        row.status, row.detail, row.claim = "not reached", why, ""
        return ""
    said = {result.test: result.message for result in failed} or {at: ""}
    mistake = nearest_mistake(script, row.number, body, said)
    row.mistake, row.hint = (mistake.name, mistake.hint) if mistake else ("", general_hint(chapter, script, row, at))
    return ""


OF_THE_MACHINE = re.compile(  # perhaps: then the chapter's own lines fail as well
    r"gloo/transport|Connection (closed|reset|refused|timed out)|still running after|needs (g\+\+|Triton)"
)


def unwell(course: Course, chapter: Chapter, test: str, judge: Judge) -> str:
    """After a hang or a broken connection: do the chapter's lines pass? If not, the machine is at fault."""
    control = judge.run({}, [course.test_path(chapter, test)], enough=1)
    if control.results and all(result.passed for result in control.results):
        return ""
    why = control.ended or first_lines(next((r.message for r in control.results if not r.passed), "no result"))
    return f"this machine, not your lines: with the chapter's own it does not work either ({why})"


def from_outside(course: Course, chapter: Chapter, script: Script, body: str, row: Row, judge: Judge) -> str:
    """Repeat the tests of a pass with these lines only in the ranks; the comparing process never runs them.

    "" or why the pass is not accepted. A failure that the chapter's lines share, or only once, is ignored.
    """
    paths = {test: course.test_path(chapter, test) for test in chapter.tests(row.number)}
    tests = [t for t, path in paths.items() if b"run_ranks" in course.files.get(path.partition("::")[0], b"")]
    few = [paths[test] for test in chapter.more(row.number)]
    if not tests:
        return ""

    def red(text: str) -> set[str]:
        outcome = judge.run({script.path: text}, [paths[t] for t in tests], enough=len(tests), in_ranks=True, few=few)
        judge.stop()
        return {_claim(r.test) for r in outcome.results if not r.passed} | set(map(_claim, unanswered(tests, outcome)))

    theirs = fences.splice(script.text, {row.number: body})
    if (found := red(theirs)) and (found := found - red(script.text)) and (found := found & red(theirs)):
        claim = sentence(min(found))
        return f"exercise {row.number}: seen from a process in which its lines do not run, it is not true that {claim}"
    return ""


def unanswered(tests: Sequence[str], outcome: Outcome) -> list[str]:
    """Tests without a result. One that is named without its parameters, or a file of tests, has several results."""
    answered = {name for r in outcome.results for name in (r.test, _claim(r.test), r.test.partition("::")[0])}
    return [test for test in tests if test not in answered]


def confirm(
    course: Course, chapter: Chapter, bodies: Mapping[str, str], warnings: list[str], ask: Callable[..., Future]
) -> str:
    """Would a mistake be caught beside these bodies? Returns "" or why the passes are not accepted.

    First all bodies together must pass one test of each exercise, since each was tested with the chapter's
    own. Then known mistakes are planted outside the student's bodies, and the tests that catch them must
    fail. Failures of the machine are warnings. `ask` is of `judges`, so two of these run at a time.
    """
    asked = []
    for script in chapter.scripts:
        mine = {number: body for number, body in bodies.items() if number in script.fences}
        if not mine:
            continue
        if len(mine) > 1:
            asked.append(ask(_together, course, chapter, script, mine, warnings))
        asked += [ask(_beside, course, chapter, script, mine, mistake) for mistake in controls(chapter, script, mine)]
    reasons = (answer.result() for answer in asked)
    return next(filter(None, reasons), "")


def _together(
    course: Course, chapter: Chapter, script: Script, mine: Mapping[str, str], warnings: list[str], judge: Judge
) -> str:
    tests = list(dict.fromkeys(chapter.tests(number)[0] for number in mine))
    text, paths = fences.splice(script.text, mine), [course.test_path(chapter, test) for test in tests]
    outcome = judge.run({script.path: text}, paths, few=paths)
    messages = {result.test: result.message for result in outcome.results if not result.passed}
    failed = [*messages, *unanswered(tests, outcome)]
    if outcome.foul:
        return outcome.foul
    doubtful = outcome.ended or any(OF_THE_MACHINE.search(message) for message in messages.values())
    if doubtful and (why := unwell(course, chapter, (failed or tests)[0], judge)):
        warnings.append(f"whether these exercises pass together is not known: {why}")
        return ""
    if failed and not outcome.ended:
        return f"each exercise passes alone, but together it is not true that {sentence(failed[0])}"
    return outcome.ended


def _beside(
    course: Course, chapter: Chapter, script: Script, mine: Mapping[str, str], mistake: Mistake, judge: Judge
) -> str:
    others = {number: body for number, body in mine.items() if number != mistake.exercise}
    text = fences.splice(mistake.planted(script.text), others)
    outcome = judge.run({script.path: text}, [course.test_path(chapter, mistake.caught_by)], enough=1)
    if outcome.foul:
        return outcome.foul
    if not outcome.ended and (not outcome.results or all(result.passed for result in outcome.results)):
        return f"beside these solutions a known mistake ({mistake.name}) goes unnoticed: the tests do not work"
    if "process ended" in outcome.ended:
        return f"the test for a known mistake ({mistake.name}) was broken off"
    return ""


def controls(chapter: Chapter, script: Script, bodies: Mapping[str, str]) -> list[Mistake]:
    """Mistakes to plant beside `bodies`: for each of these exercises one whose test runs it, if there is one.

    A mistake in an exercise replaces the student's body there, so it is evidence for all exercises but its
    own. A test certainly runs an exercise if it catches a mistake in it; if it is near, it probably does.
    """
    vouching: dict[str, dict[Mistake, int]] = {}  # exercise -> mistakes that are evidence for it, by distance
    for number in bodies:
        sure, near = script.catching(number), chapter.running(number)
        others = [m for m in script.mistakes if m.exercise != number]
        steps = {m: near[_claim(m.caught_by)] for m in others if _claim(m.caught_by) in near}
        steps = {m: 0 for m in others if m.caught_by in sure} or steps
        vouching |= {number: {m: n for m, n in steps.items() if n <= min(steps.values()) + 1}} if steps else {}
    chosen: list[Mistake] = []
    while vouching:
        each = [m for m in script.mistakes if any(m in steps for steps in vouching.values())]
        chosen.append(max(each, key=lambda m: sum(m in steps for steps in vouching.values())))
        vouching = {number: steps for number, steps in vouching.items() if chosen[-1] not in steps}
    if not chosen:
        chosen = [m for m in script.mistakes if set(bodies) != {m.exercise}][:1] or list(script.mistakes[:1])
    return chosen


# -------------------------------------------------------------------------------------------------------------- hints


def nearest_mistake(script: Script, number: str, body: str, failed: Mapping[str, str]) -> Mistake | None:
    """The planted mistake that this body is, or one with the same symptom; None rather than a wrong one.

    `failed` has the message of each failed test. A symptom is better evidence than the text: if exactly one
    mistake made the same test report the same tensor and numbers, it is that one. Of several such mistakes,
    or of mistakes without a known symptom, it is the one in the same statements with the most similar text,
    if that is more similar than the chapter's own. A mistake with another symptom is excluded, and where Python
    itself ended the lines (a TypeError), one without a symptom.
    """
    mistakes = [m for m in script.mistakes if m.exercise == number]
    cuda = script.fences[number].cuda
    own, mine = fences.normal(script.fences[number].body, cuda), fences.normal(body, cuda)
    bodies = {m: fences.normal(script.mistaken_body(m), cuda) for m in mistakes}
    for mistake, text in bodies.items():
        if text == mine:
            return mistake
    claims: dict[str, list[str]] = {}  # messages of each test, for each of its parameters
    for test, message in failed.items():
        claims.setdefault(_claim(test), []).append(symptom(message))
    says = {m: claims.get(_claim(m.caught_by), []) for m in mistakes if m.symptom}
    same = [m for m, said in says.items() if any(same_symptom(m.symptom, words, exact=True) for words in said)]
    sure = [m for m in same if any(_same_numbers(m.symptom, words, exact=True) for words in says[m])]
    numbers = [m for m in sure if re.search(r"\d", m.symptom)]
    if len(numbers) == 1:
        return numbers[0]
    touched = {m: _changed_lines(own, text) for m, text in bodies.items()}
    likeness = {
        m: _likeness(mine, bodies[m])
        for m in same or (m for m in mistakes if not m.symptom and not crashed(claims.get(_claim(m.caught_by), [])))
        if _claim(m.caught_by) in claims and touched[m] & _changed_lines(own, mine)
    }
    best = max(likeness, key=lambda m: likeness[m], default=None)
    if best is None:
        return None
    telling = re.search(r"\d|^(?!assert |$)", best.symptom)  # many mistakes only report "assert False"
    least = 0.0 if telling else max(_likeness(mine, own), 0.5)  # same symptom, any text
    return best if likeness[best] > least else None


def crashed(messages: Iterable[str]) -> bool:
    """Whether one of the messages is an error of the language: the lines ended before any result was compared."""
    return any(re.match(r"(Type|Attribute|Name|UnboundLocal)Error\b", message) for message in messages)


def _changed_lines(own: str, other: str) -> set[int]:
    """Lines of the chapter's normal text that are not in the other. Insertions count for their neighbours."""
    a, b = own.splitlines(), other.splitlines()
    codes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return {n for kind, i, j, *_ in codes if kind != "equal" for n in (range(i, j) if i < j else (i - 1, i))}


def symptom(message: str) -> str:
    """A failure's first line with numbers to three digits: the same for the same mistake on every machine."""
    number = r"(?<![\w.])\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.]*[a-z_])"
    timeless = re.sub(r"\[[A-Z]\d{4} [\d:.]+", "[", first_lines(message))  # the time stamp of torch's log
    timeless = re.sub(r"\[[\da-f.:]+\]:\d+", "[address]", timeless)  # ports differ from run to run
    line = re.sub(number, lambda m: f"{float(m[0]):.2e}", timeless)
    return " ".join(line.split())


def _on_any_rank(symptom: str) -> str:
    """Remove the rank, since the first of several ranks to report is random."""
    return re.sub(r"\brank ?\d+", "a rank", symptom)


def same_symptom(a: str, b: str, exact: bool = False) -> bool:
    """Whether a hint for one symptom is right for the other: the same words, and numbers within a tenth. With
    `exact`, numbers are within 2 % and large integers agree: a byte count that differs by 3 % is another mistake.

    Of an exception the name and most of the words count, since torch's versions differ. The first of several
    ranks to report is random, and each has its own numbers: if the ranks differ, only the words count.
    """
    error = r"([A-Z]\w*(?:Error|Exception))\b"
    names = [match and match[1] for match in (re.match(error, a), re.match(error, b))]
    if any(names):
        return names[0] == names[1] and _likeness(a, b) > 0.5
    same_words = re.split(NUMBER, _on_any_rank(a)) == re.split(NUMBER, _on_any_rank(b))
    return same_words and (_ranks(a) != _ranks(b) or _same_numbers(a, b, exact))


NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*[a-z_])"


def _same_numbers(a: str, b: str, exact: bool = False) -> bool:
    def close(x: str, y: str) -> bool:
        counts = exact and x.isdigit() and y.isdigit() and len(x) > 3
        return math.isclose(float(x), float(y), rel_tol=0.001 if counts else 0.02 if exact else 0.1, abs_tol=1e-12)

    found = [re.findall(NUMBER, _on_any_rank(text)) for text in (a, b)]
    return _ranks(a) == _ranks(b) and len(found[0]) == len(found[1]) and all(map(close, *found))


def _ranks(symptom: str) -> list[str]:
    return re.findall(r"\brank ?\d+", symptom)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, re.findall(r"\w+|\S", a), re.findall(r"\w+|\S", b), autojunk=False).ratio()


SAYS = {  # the meaning of a failure's own words, in any code
    r"(NameError|UnboundLocalError)\b": "Your lines, or those behind them, use a name that nobody has given a value.",
    r"ranks \[.*\] of (?!1 ).*still running": "A rank waits for a message that no rank sends, or whose send was "
    "started and not waited for. Write down for each rank which sends, receives and collectives it starts, in their "
    "order: the first line that differs is the place.",
    r"ranks \[\d+\] of 1 were still|still (running|computing) after": "Your lines do not come to an end, or take many "
    "times as long as they should: which loop has no end, and what is computed again in each round?",
    r"everything is ([1-9]\d*|0\.(5|333333|25|2|166667|125|0625)) times": "One factor everywhere: what is counted once "
    "too often or too rarely? Candidates: {factors}.",
    r"(difference|error) nan\b|[1-9]\d* NaN in the result": "A NaN is 0/0, inf - inf, or memory that nobody has "
    "written: what may be empty, masked, or still on its way?",
    r": None, but should be": "Nothing has arrived there at all: who should have written it, and when?",
}
FACTORS = {  # what may be counted twice, and a pattern of scripts that have it
    "ranks": r"dist\.",
    "micro-batches": "micro_batch",
    "scales such as 1/sqrt(D)": r"sqrt|\*\* -0\.5",
    "an average where a sum is meant": "",
}


def general_hint(chapter: Chapter, script: Script, row: Row, test: str = "") -> str:
    """For a mistake that is not listed: the failure's message, what the exercise asks, and where to read."""
    fence, name = script.fences[row.number], _claim(test).partition("::")[2]
    claims = [claim for claim in script.claims if claim.exercise == row.number]
    own = [claim.hint for claim in claims if claim.test == name]
    # The first claim says what the exercise is about: for a test that has no hint of its own.
    asked = own[0] if own else claims[0].hint if claims else ""
    said = next((words for pattern, words in SAYS.items() if re.search(pattern, row.detail)), "")
    if not said and not own and re.search(IN_A_PART_OF_THE_WORLD, name):
        said = "Here the group is a part of the world: is it named in each message, and in sizes and ranks?"
    said = said.format(factors=", ".join(word for word, there in FACTORS.items() if re.search(there, script.text)))
    around = f"the docstring of {fence.inside} in {script.name}" if fence.inside else script.name
    where = (
        f"Read exercise {row.number} in {chapter.folder}/README.md and {around} once more, then the test that failed."
    )
    return " ".join(filter(None, (said, asked, where)))


def sentence(test: str) -> str:
    """ "test_x.py::test_every_rank_can_be_the_root[3]" -> "every rank can be the root (3)" """
    name, _, parameters = test.partition("::")[2].partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words} ({parameters[:-1]})" if parameters else words


def told(message: str) -> str:
    """A failure as shown to a student: its first line; what was compared, if the line does not say it; and
    the first entry that differs."""
    line, more = first_lines(message, most=700), message.splitlines()
    source = next((text.removeprefix(SOURCE + "assert ") for text in more if text.startswith(SOURCE + "assert ")), "")
    if source and re.match("assert |AssertionError$", line):
        values = line.removeprefix("AssertionError").removeprefix("assert ")
        line = f"`{source}`" + f": {values}" * bool(values)
    differs = next(filter(None, (re.match(r"\s*At index (\d+) diff: (.*)", text) for text in more)), None)
    return line + (f"; entry {differs[1]}: {differs[2]}" if differs else "")


SOURCE = "source: "  # judge.py puts it before the statement that failed


def first_lines(message: str, most: int = 240) -> str:
    """A failure in one line: its first line without the exception's name."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith(SOURCE)]
    lines = lines or ["no message"]
    line = lines[-1 if "Traceback (most" in lines[0] else 0]
    line = re.sub(r"^(?:[\w.]*\.)?(AssertionError|RankFailure|Failed): ", "", line)
    line = re.sub(r"0x[0-9a-f]{6,}", "0x...", line)
    return line if len(line) <= most else line[: most - 3] + "..."


def _names(folder: str) -> tuple[str, str, str]:
    """The accepted names of a chapter."""
    return folder, folder[:2], folder[:2].lstrip("0")


def _key(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split("."))


def _claim(test: str) -> str:
    return test.partition("[")[0]
