"""Progress of a student, and results of a class for its teacher, as Markdown tables that read well as text.

`course.py check` records the status of each judged exercise in student/progress.json, and `course.py
progress` shows them all. `course.py grade` writes class.md beside grades.csv: how many passed each exercise,
the most frequent hints, and pairs of similar submissions.
"""

import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from checking import Chapter, Course, Report
from harness import fences

FILE = "progress.json"
SIGNS = {"passed": "x", "failed": "-", "refused": "!"}
ALIKE = 0.9  # fraction of equal words of two submissions, in order
ENOUGH = 120  # words: fewer can be written in too few ways to compare


def note(student: Path, report: Report) -> None:
    """Save the results of a check. A file that cannot be read is replaced."""
    status = {row.number: row.status for row in report.rows if row.status != "not reached"}
    half = student / f"{FILE}.{os.getpid()}"  # a check that ends here, or beside it, leaves the file whole
    half.write_text(json.dumps(read(student) | status, indent=1, sort_keys=True) + "\n")
    half.replace(student / FILE)


def read(student: Path) -> dict[str, str]:
    try:
        noted = json.loads((student / FILE).read_text())
        return {str(number): str(status) for number, status in noted.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def progress(course: Course, student: Path) -> str:
    """One line per chapter: a sign for each exercise of its core file, and a count of those in depth."""
    noted = read(student)
    rows, done = [("chapter", "core", "in depth", "next")], 0
    for chapter in course.chapters.values():
        signs = " ".join(SIGNS.get(noted.get(n, ""), ".") for n in chapter.core)
        passed = [n for n in chapter.exercises if noted.get(n) == "passed"]
        depth = f"{len(set(passed) - set(chapter.core))} of {len(chapter.exercises) - len(chapter.core)}"
        following = next((n for n in chapter.core if n not in passed), "")
        rows.append((chapter.folder, f"`{signs}`", depth, following))
        done += len(passed)
    total = sum(len(chapter.exercises) for chapter in course.chapters.values())
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]  # also read in a terminal
    rows.insert(1, tuple("-" * width for width in wide))
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, wide, strict=True))} |" for row in rows]
    return "\n".join([*lines, "", f"{done} of {total} passed. x passed, - failed, ! refused, . not checked yet"])


def class_page(rows: Sequence[Mapping[str, str]], bodies: Mapping[str, Mapping[str, str]]) -> str:
    """`rows` are those of grades.csv, `bodies` what each submission wrote: name -> exercise -> lines."""
    rows = [{column: text.replace("|", "\\|") for column, text in row.items()} for row in rows]  # in cells of tables
    bodies = {name.replace("|", "\\|"): theirs for name, theirs in bodies.items()}
    parts = ["# The class", "", f"{len({row['submission'] for row in rows})} submissions.", ""]
    parts += ["| exercise | level | passed | failed | refused | other | most frequent claim that failed |"]
    parts += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for number in dict.fromkeys(row["exercise"] for row in rows):
        of = [row for row in rows if row["exercise"] == number]
        count = Counter(row["status"] for row in of)
        other = len(of) - count["passed"] - count["failed"] - count["refused"]
        claims = Counter(row["claim"] for row in of if row["claim"]).most_common(1)
        claim = f"{claims[0][0]} ({claims[0][1]})" if claims else ""
        figures = f"{count['passed']} | {count['failed']} | {count['refused']} | {other}"
        parts.append(f"| {number} | {of[0]['level']} | {figures} | {claim} |")
    hints = Counter((row["exercise"], row["hint"]) for row in rows if row["hint"])
    if hints:
        parts += ["", "## Hints that were given", "", "| times | exercise | hint |", "| --- | --- | --- |"]
        parts += [f"| {n} | {exercise} | {hint} |" for (exercise, hint), n in hints.most_common(20)]
    pairs = alike(bodies)
    if pairs:
        parts += ["", "## Submissions that look alike", "", "Layout, comments and docstrings do not count."]
        parts += ["This proves nothing: ask both.", "", "| alike | submissions | exercises |", "| --- | --- | --- |"]
        parts += [f"| {ratio:.2f} | {a}, {b} | {', '.join(numbers)} |" for ratio, a, b, numbers in pairs]
    return "\n".join(parts) + "\n"


def alike(bodies: Mapping[str, Mapping[str, str]]) -> list[tuple[float, str, str, list[str]]]:
    """(likeness from 0 to 1, one, other, exercises that both have) of pairs above ALIKE, most alike first."""
    words = {
        name: {n: re.findall(r"\w+|\S", _normal(body)) for n, body in theirs.items()} for name, theirs in bodies.items()
    }
    found = []
    for a, b in combinations(sorted(words), 2):
        both = [number for number in words[a] if number in words[b]]
        sizes = [sum(len(words[name][number]) for number in both) for name in (a, b)]
        if min(sizes) < ENOUGH:
            continue
        # Exercise by exercise: in a full submission each word would be compared with hundreds.
        matchers = [difflib.SequenceMatcher(None, words[a][n], words[b][n], autojunk=False) for n in both]
        same = sum(block.size for matcher in matchers for block in matcher.get_matching_blocks())
        if (ratio := 2 * same / sum(sizes)) >= ALIKE:
            found.append((ratio, a, b, both))
    return sorted(found, key=lambda pair: (-pair[0], pair[1:3]))


def written(chapter: Chapter, bodies: Mapping[str, str]) -> dict[str, str]:
    """The bodies in which something was written that is not the chapter's."""
    return {
        number: body
        for number, body in bodies.items()
        for _, fence in [chapter.exercises[number]]
        if not fences.is_stub(fence, body) and _normal(body) != _normal(fence.body)
    }


def _normal(body: str) -> str:
    try:
        return fences.normal(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or CUDA
        return fences.normal(body, cuda=True)
