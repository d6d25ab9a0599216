"""The checker of the exercises is checked: right solutions pass, known mistakes do not, and hostile ones never do.

Most of this runs on a chapter of ten lines without torch (`tiny`), where a check takes a second; what is said about the
real chapters runs on them. `make prove` plants all mistakes of all chapters; here a few stand for them.
"""

import ast
import functools
import hashlib
import importlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import types
import unittest.mock
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from harness import fences
from harness.layout import CHAPTERS, ROOT, TRAINER
from harness.reference import Trace

sys.path.insert(0, str(ROOT / "exercises"))
import checking
import course as tool
import hints
import mutants
import pages
import screen
from checking import Course, CourseError, Submission, check, read_submission
from reach import Reach
from sandbox import MIB, Judge, Limits, Outcome, Result, no_cell

LIMITS = Limits(test_seconds=40, test_cpu_seconds=3, hang=15, processes=20, memory=2048 * MIB, disk=48 * MIB)
FOLDERS = [folder.name for folder in [*CHAPTERS, TRAINER]]


@functools.cache
def real():
    """The course of this repository: seconds, which only the workers pay that need it."""
    return Course()


TINY = '''"""A chapter for the tests of the checker."""

def scale(x):
    # --- exercise 1.1: twice ---
    return 2 * x
    # --- end exercise ---


def total(xs):
    result = 0
    # --- exercise 1.2: the sum ---
    for x in xs:
        result += x
    # --- end exercise ---
    return result


def both(xs):
    return scale(total(xs))
'''
TEST_TINY = """import tiny

def test_scale_doubles():
    assert tiny.scale(3) == 6 and tiny.scale(-1) == -2

def test_total_is_the_sum():
    assert tiny.total([1, 2, 3]) == 6

def test_both_double_the_sum():
    assert tiny.both([1, 2]) == 6

def test_total_of_nothing_is_zero():
    assert tiny.total([]) == 0
"""
SCALE, BOTH = "test_tiny.py::test_scale_doubles", "test_tiny.py::test_both_double_the_sum"
OF_NOTHING = "test_tiny.py::test_total_of_nothing_is_zero"
MISTAKES = """
[["tiny.py".mistake]]
name = "squared"
old = "return 2 * x"
new = "return x * x"
caught_by = "test_tiny.py::test_scale_doubles"
hint = "Twice a number is not its square."
source = "known"

[["tiny.py".mistake]]
name = "last"
old = "result += x"
new = "result = x"
caught_by = "test_tiny.py::test_both_double_the_sum"
hint = "A sum needs all of them."
source = "known"

[["tiny.py".mistake]]
name = "total_of_the_first_one"
old = "return scale(total(xs))"
new = "return scale(total(xs[:1]))"
caught_by = "test_tiny.py::test_both_double_the_sum"
hint = "All."
source = "known"
"""
ALTERNATIVES = """
[["tiny.py".alternative]]
exercise = "1.1"
why = "a sum"
body = "return x + x"
"""


@pytest.fixture(scope="module")
def tiny_repository(tmp_path_factory):
    """A repository with one tiny chapter."""
    root = tmp_path_factory.mktemp("tiny") / "repository"
    (root / "01_tiny").mkdir(parents=True)
    (root / "exercises").mkdir()
    (root / "01_tiny" / "tiny.py").write_text(TINY)
    (root / "01_tiny" / "test_tiny.py").write_text(TEST_TINY)
    (root / "01_tiny" / "README.md").write_text("### 1.1 Twice (easy)\n\nDouble it.\n\n### 1.2 Sum (hard)\n\nAdd.\n")
    (root / "01_tiny" / "mistakes.toml").write_text(MISTAKES + ALTERNATIVES)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return root


@pytest.fixture
def tiny(tiny_repository, tmp_path, monkeypatch):
    """The course of a copy of the tiny repository; the checker makes its folders under tmp_path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Course(Path(shutil.copytree(tiny_repository, tmp_path / "repository")))


def check_bodies(course, chapter, bodies, limits=LIMITS):
    """Check bodies without the screening."""
    return check(course, chapter, Submission(bodies), list(bodies), limits)


def own_bodies(chapter):
    return {number: fence.body for number, (_, fence) in chapter.exercises.items()}


def write_student(chapter, bodies, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for script in chapter.scripts:
        mine = {n: bodies.get(n, fences.stub(f)) for n, f in script.fences.items()}
        path = folder / script.within
        path.parent.mkdir(exist_ok=True)
        path.write_text(fences.splice(script.text, mine))
    return folder


def processes_of(folder):
    """Processes whose command line or environment names this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            continue
        if alive and str(folder).encode() in words and int(entry.name) != os.getpid():
            found.append(entry.name)
    return found


# ------------------------------------------------------------------------------------------------- the real chapters


@pytest.mark.always("02_data_parallel")
@pytest.mark.parametrize("folder", FOLDERS)
def test_an_untouched_copy_is_not_done_in_every_exercise_and_passed_in_none(folder, tmp_path):
    chapter = real().chapters[folder]
    tool.start(real(), chapter, tmp_path / chapter.folder)
    report = check(real(), chapter, read_submission(chapter, tmp_path / chapter.folder))
    assert [row.status for row in report.rows] == ["not done"] * len(chapter.exercises)
    assert not report.all_passed and report.warnings == []


def test_of_an_untouched_chapter_check_lists_the_core_and_counts_the_depth(tmp_path, capsys):
    chapter = real().chapter("02")
    tool.start(real(), chapter, tmp_path / chapter.folder)
    assert tool.main(["--student", str(tmp_path), "check", "02"]) == 1
    *core, depth, all_ = capsys.readouterr().out.splitlines()
    later = [number for number in chapter.exercises if number not in chapter.core]
    assert [line.split()[0] for line in core] == chapter.core
    assert depth == f"{later[0]} to {later[-1]}: {len(later)} in depth are not done"
    assert all_ == f"{chapter.folder}: {len(chapter.exercises)} not done"
    assert tool.main(["--student", str(tmp_path), "check", "02", later[0]]) == 1
    assert capsys.readouterr().out.startswith(f"{later[0]}  not done")


@pytest.mark.always("failed-not done-1")
@pytest.mark.parametrize(
    ("core", "depth", "code"), [("passed", "not done", 0), ("failed", "not done", 1), ("passed", "failed", 1)]
)
def test_a_check_ends_well_if_the_core_has_passed_and_nothing_that_was_written_failed(
    core, depth, code, tmp_path, monkeypatch, capsys
):
    def decided(course, chapter, submission, numbers, show, first):
        rows = [checking.Row(n, "", "easy", core if n in chapter.core else depth) for n in numbers or chapter.exercises]
        for row in rows:
            if first:
                first(row)
                row.hint = "Count."
            show(row)
        return checking.Report(chapter.folder, rows)

    monkeypatch.setattr(tool, "check", decided)
    tool.start(real(), real().chapter("02"), tmp_path / "02_data_parallel")
    assert tool.main(["--student", str(tmp_path), "check", "02"]) == code
    capsys.readouterr()
    tool.main(["--student", str(tmp_path), "check", "02", "2.1"])
    assert capsys.readouterr().out.splitlines()[:2] == [f"2.1   {core}".ljust(19), "      hint:  Count."]


def test_who_hands_in_the_core_file_alone_has_not_done_the_exercises_in_depth(tmp_path):
    chapter = real().chapter("02")
    folder = tmp_path / chapter.folder
    tool.start(real(), chapter, folder)
    shutil.rmtree(folder / "in_depth")
    rows = check(real(), chapter, read_submission(chapter, folder)).rows
    assert {row.status for row in rows} == {"not done"}
    assert {row.detail for row in rows if row.number in chapter.core} == {""}
    assert all(row.detail.endswith(".py is not there") for row in rows if row.number not in chapter.core)


@pytest.fixture(scope="module")
def judge():
    """One for all tests of right solutions and honest mistakes: it takes seconds to start."""
    with Judge(real().files) as judge:
        yield judge


@pytest.mark.prove
@pytest.mark.chapter("02")
def test_differently_written_right_solutions_pass_all_together_with_the_chapters_own(tmp_path, judge):
    chapter = real().chapter("02")
    others = {a.exercise: a.body.strip("\n") for script in chapter.scripts for a in script.alternatives}
    assert others
    folder = write_student(chapter, own_bodies(chapter) | others, tmp_path / chapter.folder)
    report = check(real(), chapter, read_submission(chapter, folder), judge=judge)
    assert report.all_passed, [(row.number, row.status, row.detail) for row in report.rows] + [report.rejected]


@pytest.mark.prove
def test_every_planted_mistake_is_something_that_was_written_and_no_two_are_the_same_program():
    """An empty body is "not done", and of two that are the same only one could get its hint."""
    for chapter in real().chapters.values():
        for script in chapter.scripts:
            bodies: dict[tuple[str, str], str] = {}
            for mistake in (m for m in script.mistakes if m.exercise):
                try:
                    body = script.mistaken_body(mistake)
                except ValueError:  # it cannot be planted, as test_mistakes.py says
                    continue
                assert not fences.is_stub(script.fences[mistake.exercise], body), mistake.name
                key = mistake.exercise, fences.normal(body, script.fences[mistake.exercise].cuda)
                assert key not in bodies, f"{script.name}: {mistake.name} is {bodies[key]}"
                bodies[key] = mistake.name


def test_a_failure_that_quotes_a_traceback_is_told_as_it_is_and_one_of_a_rank_in_the_ranks_words(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "harness"))  # where `forget` is
    judge = importlib.import_module("judge")

    def told(text):
        crash = types.SimpleNamespace(message=text)
        return judge.message_of(types.SimpleNamespace(passed=False, longrepr=types.SimpleNamespace(reprcrash=crash)))

    quoted = r"AssertionError: Actual message: 'rank 0 raised:\nTraceback (most recent call last):\n  File ...'"
    assert told(quoted) == quoted
    assert told("rank 0 raised:\nTraceback (most recent call last):\n  File a.py\nValueError: 3\n") == "ValueError: 3\n"


IN_EACH_CHAPTER = ["1.25", "2.25", "3.38", "4.32", "5.23", "6.22", "7.26", "8.30", "9.28", "10.31", "11.24"]


@pytest.mark.prove
@pytest.mark.parametrize("number", IN_EACH_CHAPTER)
def test_in_each_chapter_another_right_solution_passes_and_a_mistake_gets_its_hint(number, judge):
    chapter = real().chapter(number.partition(".")[0])
    script, _ = chapter.exercises[number]
    other = next(a for a in script.alternatives if a.exercise == number)
    report = check(real(), chapter, Submission({number: other.body.strip("\n")}), [number], judge=judge)
    assert report.all_passed, [(row.status, row.claim, row.detail) for row in report.rows] + [report.rejected]
    *_, mistake = (m for m in script.mistakes if m.exercise == number)  # the last: a hint is not always the first one
    (row,) = check(real(), chapter, Submission({number: script.mistaken_body(mistake)}), [number], judge=judge).rows
    assert (row.status, row.mistake, row.hint) == ("failed", mistake.name, mistake.hint)


@pytest.mark.prove
def test_a_mistake_of_the_students_own_gets_the_claim_the_numbers_and_a_general_hint(judge):
    chapter = real().chapter("01")
    body = "return windows[:, :-1].long().contiguous(), (windows[:, 1:] * 3).long().contiguous()"
    (row,) = check(real(), chapter, Submission({"1.25": body}), ["1.25"], judge=judge).rows
    assert row.status == "failed"
    assert row.claim == "the label of a token is the token that follows it"
    assert row.detail.strip() and "Error" not in row.detail.split()[0]
    assert "exercise 1.25 in 01_single_gpu/README.md" in row.hint and row.mistake == ""


SAYS = {
    "NameError: name 'works' is not defined": "a name that nobody has given a value",
    "harness.ranks.RankFailure: ranks [0, 1] of 2 were still running after 10 s": "waits for a message",
    "ranks [0] of 4 were still running after 20 s": "waits for a message",
    "ranks [0] of 1 were still running after 20 s": "do not come to an end",
    "still computing after 60 s of processor time": "do not come to an end",
    "w: largest difference 0.5 (relative): 1, but should be 2; everything is 0.5 times what it should be": "One factor",
    "w: largest difference 3 (relative): 4, but should be 1; everything is 4 times what it should be": "One factor",
    "w: largest difference 1 (relative): 0, but should be 2; everything is 0 times what it should be": "After the",
    "w: largest difference 0.3 (relative): 136, but should be 192; everything is 0.708333 times": "After the",
    "loss on rank 0: largest difference nan (relative): nan, but should be 5.3": "0/0",
    "w: 256 NaN in the result, 0 in what it should be": "0/0",
    "w: 0 NaN in the result, 3 in what it should be": "After the",
    "gradient of w on rank 1: None, but should be a tensor": "Nothing has arrived",
    "loss: 3, but should be nan": "After the",
}


@pytest.mark.parametrize(("detail", "words"), SAYS.items())
def test_without_a_known_mistake_the_hint_is_what_the_failure_says_by_itself_and_where_to_read(detail, words):
    chapter = real().chapter("02")
    hint = checking.general_hint(chapter, chapter.exercises["2.1"][0], checking.Row("2.1", "", "easy", detail=detail))
    assert words in hint and "Read exercise 2.1 in 02_data_parallel/README.md" in hint
    assert hint.startswith("After the") == words.startswith("After the")


def test_a_factor_in_a_kernel_is_no_matter_of_ranks_and_micro_batches():
    row, found = checking.Row("", "", "", detail="everything is 0.25 times what it should be"), []
    for chapter, number in (real().chapter("09"), "9.6"), (real().chapter("06"), "6.1"):
        row.number = number
        found.append(checking.general_hint(chapter, chapter.exercises[number][0], row))
    assert "Candidates: scales such as 1/sqrt(D), an average" in found[0]
    assert "Candidates: ranks, micro-batches, an average" in found[1]


@pytest.mark.always("02_data_parallel")
@pytest.mark.parametrize("folder", FOLDERS)
def test_where_no_mistake_is_known_the_hint_says_what_the_test_asks_of_the_exercise(folder):
    chapter = real().chapters[folder]
    for script in chapter.scripts:
        for claim in script.claims:
            row = checking.Row(claim.exercise, "", "", detail="w: 3, but should be 2")
            graded = [test for test in chapter.tests(claim.exercise) if f"::{claim.test}[" in f"{test}["]
            assert graded, f"{script.name}: {claim.test} does not grade {claim.exercise}"
            hint = checking.general_hint(chapter, script, row, graded[0])
            assert hint.startswith(f"{claim.hint} Read exercise {claim.exercise} in "), hint
            first = next(c.hint for c in script.claims if c.exercise == claim.exercise)
            assert checking.general_hint(chapter, script, row, "test_x.py::test_other").startswith(first)


def test_a_symptom_depends_neither_on_the_hour_nor_on_the_port():
    said = "RuntimeError: [F1123 13:46:10.123456789 ProcessGroupGloo.cpp:12] sizes differ: 3 and 4"
    assert checking.symptom(said) == checking.symptom(said.replace("1123 13:46:10.123456789", "0102 07:05:00.000000"))
    assert "sizes differ: 3 and 4" in checking.symptom(said)
    said = "RuntimeError: gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:62637: Connection reset by peer"
    assert checking.symptom(said) == checking.symptom(said.replace("62637", "1024"))
    assert "Connection reset by peer" in checking.symptom(said)


def test_two_symptoms_are_one_but_for_ranks_small_differences_and_words_of_torch():
    said = "w on rank 0: largest difference 1.25e+00 (relative): 3, but should be 2.19e-03"
    for other in ("rank 0", "rank 1"), ("1.25e+00", "1.26e+00"), ("2.19e-03", "2.2e-03"):
        assert checking.same_symptom(said, said.replace(*other)), other
    assert checking.same_symptom(said, "w on rank 1: largest difference 4.94e-02 (relative): -8, but should be -0.5")
    for other in ("w on", "x on"), ("1.25e+00", "2.19e+00"), ("3,", "nan,"), (": 3,", ":"):
        assert not checking.same_symptom(said, said.replace(*other)), other
    assert checking.same_symptom("RuntimeError: a.cc:12 no pair", "RuntimeError: a.cc:13 no couple")
    assert not checking.same_symptom("RuntimeError: a.cc:12 no pair", "RuntimeError: shape [3] is invalid for size 4")
    assert not checking.same_symptom("RuntimeError: no pair", "ValueError: no pair")
    assert not checking.same_symptom("RuntimeError: no pair", said)
    counted, another = "assert 204104 == 208072", "assert 204104 == 202120"
    assert checking.same_symptom(counted, another) and not checking.same_symptom(counted, another, exact=True)


def test_a_hint_is_chosen_by_what_the_tests_say_before_how_the_lines_look():
    script, fence = real().chapter("02").exercises["2.4"]
    stays, copied = (
        next(m for m in script.mistakes if m.name == name)
        for name in ("gradients_stay_outside_the_bucket", "gradients_are_copies_of_the_bucket")
    )
    body = fence.body.replace(
        "p.grad = piece.view_as(p)", "for mine, sums in [(p.grad, piece.view(p.shape))]:\n        pass"
    )
    said = {mistake.caught_by: f"AssertionError: {mistake.symptom}" for mistake in (copied, stays)}
    assert re.search(r"\d", stays.symptom) and not re.search(r"\d", copied.symptom)
    assert checking.nearest_mistake(script, "2.4", body, said) is stays, "numbers that agree say most"
    only = {copied.caught_by: said[copied.caught_by]}
    assert checking.nearest_mistake(script, "2.4", body, only) is copied, "in the same lines, with the same words"
    other = {copied.caught_by: "AssertionError: something else"}
    assert checking.nearest_mistake(script, "2.4", body, other) is None
    silent = next(m for m in script.mistakes if m.name == "added_before_it_is_received")
    body = script.mistaken_body(silent).rstrip() + "\nchunks = tuple(chunks)\n"
    for words, found in (("AssertionError", silent), ("TypeError: 'tuple' object", None)):
        assert checking.nearest_mistake(script, "2.2", body, {silent.caught_by: words}) is found, "it has no symptom"


@pytest.mark.prove
def test_a_comparison_is_told_with_its_statement_and_with_the_first_entry_that_differs(tiny):
    chapter, path = tiny.chapter("01"), tiny.root / "01_tiny" / "test_tiny.py"
    lists = "[tiny.scale(n) for n in range(99)] == [2 * n for n in range(99)]"
    for old, compare, words in (
        (
            "assert tiny.scale(3) == 6 and tiny.scale(-1) == -2",
            f"assert {lists}  # all of them",
            (f"`{lists}`: [0, 2, 4, 6, 8, 0, 12, 14, 16, 18, 20, ", "... == [0, 2, 4, ", "; entry 5: 0 != 10"),
        ),
        (
            "assert tiny.scale(3) == 6 and tiny.scale(-1) == -2",
            f"assert {lists}, 'fives'",
            ("fives; entry 5: 0 != 10",),
        ),
    ):
        path.write_text(TEST_TINY.replace(old, compare))
        (row,) = check_bodies(Course(tiny.root), chapter, {"1.1": "return 0 if x == 5 else 2 * x"}).rows
        assert row.status == "failed" and all(part in row.detail for part in words), row.detail
    long = "AssertionError: rank 0: " + "word " * 100
    assert checking.told(long).count("word") == 100 and checking.first_lines(long).endswith("...")
    assert checking.symptom("assert 7 == 8\nsource: assert a == b") == "assert 7 == 8"


def test_of_a_traceback_in_a_message_the_last_line_is_told():
    message = "AssertionError: Traceback (most recent call last):\n  File 'x.py', line 1\nValueError: 3 is odd\n"
    assert checking.first_lines(message) == "ValueError: 3 is odd"
    assert checking.first_lines("AssertionError: 3 is odd\nmore") == "3 is odd"


@pytest.mark.prove
def test_ranks_find_the_harness_although_the_copy_that_they_started_in_is_gone():
    first = "test_zero_memory.py::test_the_demos_counter_of_bytes_agrees_with_the_harness"  # without harness.reference
    then = "test_zero_stages.py::test_the_ranks_together_own_each_element_once_and_no_padding"  # which imports it
    with Judge(real().files) as judge:
        for test in (first, then):
            outcome = judge.run({}, [f"03_zero/in_depth/{test}"])
            assert [result.passed for result in outcome.results] == [True], outcome


@pytest.mark.prove
def test_hostile_code_inside_the_ranks_fails_and_the_exercises_after_it_are_judged():
    """A rank that ends itself, and one that replaces the comparison in its own process."""
    chapter = real().chapter("02")
    patch = """import sys
for name, module in list(sys.modules.items()):
    if hasattr(module, "assert_same"):
        module.assert_same = lambda *args, **kwargs: None
    if hasattr(module, "assert_same_named"):
        module.assert_same_named = module.assert_same_trace = lambda *args, **kwargs: None
return valid.clamp(min=1)"""
    bodies = {
        "2.21": "import os\nos._exit(0)",
        "2.23": own_bodies(chapter)["2.23"],
        "2.25": patch,
    }
    report = check_bodies(real(), chapter, bodies, limits=Limits(hang=10))
    status = {row.number: row.status for row in report.rows}
    assert status["2.21"] == "failed" and status["2.25"] in ("failed", "refused"), report
    assert status["2.23"] == ("not reached" if report.rejected else "passed")


# ------------------------------------------------------------------------------------------------- exercises in CUDA

KERNEL = """__device__ inline float at(const float* X, int row) { return X[row]; }
__global__ void scale(const float* X, float* Y, int n) {
    int i = threadIdx.x;
    // --- exercise 1.1: twice the element, if there is one ---
    if (i < n) Y[i] = 2 * at(X, i);
    // --- end exercise ---
}
static int blocks(int n, int size) { return system("ls"); }
"""
IN_A_KERNEL = {
    'system("ls");': "may not use '\"'",
    "system(name);": "may not call 'system'|may not use 'system'",
    "auto run = system; run(0);": "may not use 'system'",
    "#include <cstdlib>": "may not use '#'",
    "std::exit(0);": "may not use '::'|may not use 'std'",
    "int blocks = 3; blocks(1, 2);": "may not call 'blocks'",
    "asm volatile (0);": "may not use 'asm'",
    "(&at)(X, 1); (at)(X, 1);": "may not use '\\)\\('",
    "*((long*)64) = 1;": "may not use 'long'|may not use",
    "int f[2]; f[0](1);": "may not use '\\]\\('",
    "/* system( */ int k = 1, more = 2; Y[k] = more == 2;": "",
    "for (int k = 0; k < n; k++) Y[k] = fmaf(at(X, k), 1.5f, 0x10);  // system(1)": "",
}


@pytest.mark.parametrize(("body", "why"), IN_A_KERNEL.items())
def test_a_kernel_may_use_its_own_names_and_nothing_of_the_host(body, why):
    found = list(screen.objections_to_cuda(body, "if (i < n) Y[i] = 2 * at(X, i);", KERNEL))
    assert bool(found) == bool(why) and (not why or re.search(why, found[0][1])), found


def test_fences_in_cuda_are_found_stubbed_and_put_back():
    found, problems = fences.read_fences(KERNEL)
    fence = found["1.1"]
    assert problems == [] and fence.cuda and fence.body == "if (i < n) Y[i] = 2 * at(X, i);"
    stubbed = fences.splice(KERNEL, {"1.1": fences.stub(fence)})
    assert "    #error exercise 1.1: twice the element, if there is one\n" in stubbed
    assert fences.is_stub(fence, fences.read_fences(stubbed)[0]["1.1"].body)
    assert fences.splice(stubbed, {"1.1": fence.body}) == KERNEL
    assert fences.normal("a = 1;  // one\n/* two\nlines */ b;", cuda=True) == fences.normal("a = 1; b;", cuda=True)


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("g++") is None, reason="the kernels run on a CPU as C++, and there is no g++")
def test_in_cuda_another_right_solution_passes_and_a_mistake_gets_its_hint(tmp_path, judge):
    chapter = real().chapter("09")
    script, _ = chapter.exercises["9.1"]
    other = next(a.body.strip("\n") for a in script.alternatives if a.exercise == "9.2")
    mistake = next(m for m in script.mistakes if m.exercise == "9.1")
    bodies = {"9.1": script.mistaken_body(mistake), "9.2": other, "9.3": 'system("ls");'}
    folder = write_student(chapter, own_bodies(chapter) | bodies, tmp_path / chapter.folder)
    report = check(real(), chapter, read_submission(chapter, folder), list(bodies), judge=judge)
    assert [row.status for row in report.rows] == ["failed", "passed", "refused"], report.rows
    assert report.rows[0].hint == mistake.hint


# --------------------------------------------------------------------------------------------------- every chapter


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_fence_can_be_stubbed_and_put_back_and_is_told_about_in_the_readme(folder):
    chapter = real().chapters[folder]
    for script in chapter.scripts:
        stubbed = fences.splice(script.text, {n: fences.stub(f) for n, f in script.fences.items()})
        assert script.path.endswith(".cu") or compile(stubbed, script.name, "exec")
        found, problems = fences.read_fences(stubbed)
        assert not problems and all(fences.is_stub(f, found[n].body) for n, f in script.fences.items())
        again = fences.splice(stubbed, {n: f.body for n, f in script.fences.items()})
        assert again == script.text
        for number in script.fences if chapter.readme else ():  # a folder without README fails in test_folders.py
            assert chapter.level(number), f"{folder}/README.md does not say that {number} is easy, medium or hard"


def test_where_an_exercise_begins_the_names_are_told_that_it_has_to_leave(tmp_path):
    left = {}
    for number in ("2.4", "4.6", "8.6", "9.4"):
        script, fence = real().chapter(number[0]).exercises[number]
        left[number] = tool.leaves(script.text, fence)
    assert left["4.6"] == ["grad_x", "grad_weights"] and left["9.4"] == ["m_i", "l_i"] and left["2.4"] == []
    assert {"dq", "dk", "dv"} <= set(left["8.6"])
    needed = ["print(a)\n a = 2", "a += 1", "del a", "[a + b for b in c]"]
    for behind in [*needed, "a = b", "[a for a in c]", "for a in b: print(a)", "b = 2"]:
        text = f"def f():\n # --- exercise 1.1: a ---\n a = 1\n # --- end exercise ---\n {behind}\n"
        found = tool.leaves(text, fences.read_fences(text)[0]["1.1"])
        assert found == ["a"] * (behind in needed), behind
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")  # as /tmp is one on macOS
    tool.start(real(), real().chapter("04"), tmp_path / "link" / "student")
    folders = tmp_path / "link" / "student", ROOT / "04_tensor_parallel"
    student, own = ((folder / "tensor_parallel.py").read_text().splitlines() for folder in folders)
    assert "        # your lines define: grad_x, grad_weights" in student
    readmes = [(folder / "README.md").read_text() for folder in folders]
    links = [[int(line) for line in re.findall(r"tensor_parallel.py#L(\d+)", text)] for text in readmes]
    there = [(student[moved - 1], own[line - 1]) for moved, line in zip(*links, strict=True)]
    assert 0 < sum(a == b for a, b in there) < len(there) and links[0] != links[1]
    assert all(a == b or "# --- exercise" in a for a, b in there), "a link into a body leads to its fence"


@pytest.mark.prove
@pytest.mark.parametrize("folder", FOLDERS)
def test_screening_has_nothing_against_the_chapters_own_bodies_nor_the_alternatives(folder, tmp_path):
    chapter = real().chapters[folder]
    submission = read_submission(chapter, write_student(chapter, own_bodies(chapter), tmp_path / folder))
    assert submission.refused == {} and submission.warnings == []
    others = [alternative for script in chapter.scripts for alternative in script.alternatives]
    while others:  # one of each exercise at a time
        round_ = {other.exercise: other for other in reversed(others)}
        bodies = {number: other.body.strip("\n") for number, other in round_.items()}
        submission = read_submission(chapter, write_student(chapter, bodies, tmp_path / folder))
        assert submission.refused == {}
        others = [other for other in others if other not in round_.values()]


def exists(chapter, test):
    file, _, name = real().test_path(chapter, test).partition("::")
    text = real().files.get(file, b"").decode()
    pattern = rf"^def {name.partition('[')[0]}\(" if name else "^def test_"
    return re.search(pattern, text, re.MULTILINE) is not None


@pytest.mark.always("02_data_parallel")
@pytest.mark.parametrize("folder", FOLDERS)
def test_tests_of_the_chapter_run_every_exercise_and_those_that_grade_it_exist(folder):
    chapter = real().chapters[folder]
    for number in chapter.exercises:
        assert chapter.running(number), f"{number}: no test of the chapter runs it"
        for test in chapter.tests(number):
            assert exists(chapter, test), f"{number}: no {test}"


@pytest.mark.always("02_data_parallel")
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_tests_that_a_statement_calls_decisive_are_those_that_grade_the_exercise(folder):
    chapter = real().chapters[folder]
    for number in chapter.exercises:
        assert chapter.decisive(number), f"{number}: its statement names no test"
        grading = [test.partition("::")[2] for test in chapter.tests(number)]
        for name in chapter.decisive(number):
            begin, bracket, parameters = name.partition("[")
            found = [
                test
                for test in grading
                if test.startswith(begin) and (test.endswith(bracket + parameters) or "[" not in test)
            ]
            assert found, f"{number}: {name} does not grade it: {grading}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_chapter_has_right_solutions_that_are_really_written_differently(folder):
    chapter = real().chapters[folder]
    others = [(script.fences[a.exercise], a) for script in chapter.scripts for a in script.alternatives]
    assert len({fence.number for fence, _ in others}) >= 3
    for fence, other in others:
        same = fences.normal(other.body.strip("\n"), fence.cuda) == fences.normal(fence.body, fence.cuda)
        assert not same, f"{fence.number}: {other.why}"


def weeks():
    """The rows of the twelve weeks in the course's README, by cells."""
    table = (ROOT / "exercises" / "README.md").read_text().partition("## Twelve weeks")[2]
    return [row.split(" | ") for row in re.findall(r"^\| \d+ \|.*$", table, re.MULTILINE)]


def exercises_in(cell):
    """Of `2.1 to 2.3` there are three."""
    found = re.findall(r"\b(\d+)\.(\d+)(?: to \1\.(\d+))?", cell)
    return [f"{chapter}.{n}" for chapter, first, last in found for n in range(int(first), int(last or first) + 1)]


def test_the_twelve_weeks_give_every_exercise_once_as_core_or_extra_and_link_every_chapter():
    assert "to come" not in (ROOT / "exercises" / "README.md").read_text()
    assert len(weeks()) == 12
    given = [number for week in weeks() for cell in week[3:5] for number in exercises_in(cell)]
    assert sorted(given) == sorted(number for chapter in real().chapters.values() for number in chapter.exercises)
    for folder in FOLDERS:
        assert f"](../{folder}/README.md)" in str(weeks()), f"no week for {folder}"


def test_each_weeks_core_fits_into_four_to_six_hours():
    """By the durations that the course's README gives; from half an hour on, the next hour is meant."""
    for chapter, week in zip(real().chapters.values(), weeks(), strict=False):
        core = exercises_in(week[3])
        first_part = re.split(r"^## .*in depth", chapter.readme, flags=re.M | re.I)[0]
        text = re.sub(r"<!--.*?-->|<details>.*?</details>|^```.*?^```|^\|[^\n]*", "", first_part, flags=re.S | re.M)
        code = sum(len(real().files[path]) for path in {chapter.exercises[number][0].path for number in core})
        minutes = sum({"easy": 15, "medium": 30, "hard": 90}[chapter.level(number)] for number in core)
        reading = len(text.split()) / 150 + code / 560  # words, and characters of code, in a minute
        hours = (reading + minutes + 45) / 60
        assert 4 <= round(hours) <= 6, f"{chapter.folder}: {hours:.1f} hours"
        assert 5 <= len(core) <= 6 and sum(chapter.level(number) == "hard" for number in core) == 1, core


def test_mutants_are_wrong_in_one_place_each_and_the_same_every_time():
    script, fence = real().chapter("03").exercises["3.2"]
    found = hints.mutants(fence.body, 8, "3.2")
    assert found == hints.mutants(fence.body, 8, "3.2") and len(set(found)) == len(found) >= 4
    for body in found:
        assert len(hints.lines_changed(script, "3.2", body)) in (1, 2), body
        assert fences.normal(body) != fences.normal(fence.body)


@pytest.mark.parametrize("red", ["03_zero/test_zero.py", "tests/test_nets.py", ""])
def test_a_change_of_a_script_that_no_test_notices_is_printed(red, tmp_path, monkeypatch):
    script, place, ran = ROOT / "03_zero" / "zero.py", tmp_path / "03_zero" / "zero.py", []
    place.parent.mkdir()
    shutil.copy(script, place)

    def fails(copy, tests):
        ran.append(tests)
        return tests == [red] and place.read_text() != script.read_text()

    monkeypatch.setattr(mutants, "fails", fails)
    found = mutants.survivors(script, 5, 0, tmp_path)
    both = [["03_zero/test_zero.py"], ["tests/test_nets.py"]]
    assert ran == [*both, *(both[: 1 if "zero" in red else 2] * 5)], "first without a change"
    assert len(set(found)) == (0 if red else 5) and all(text[0] in "-+" for text in found)
    assert place.read_text() == script.read_text()


def test_what_only_prints_is_not_changed_in_a_script():
    text = "def f(x):\n    print(x)\n    g(x)\ndef main():\n    f(1)\nif __name__ == '__main__':\n    main()\n"
    tree = ast.parse(text)
    assert hints.mutants_of(tree, 9, "", mutants.left_out) == [ast.unparse(tree).replace("g(x)", "pass")]


# ------------------------------------------------------------------------------------------------ hostile submissions

JUDGES = "import json, os, sys; frame = sys._getframe()\nwhile 'request' not in frame.f_locals: frame = frame.f_back\n"
ANSWER = "at = frame.f_locals; at['pipe'].write(json.dumps(dict(nonce=at['request']['nonce'], **w)) + chr(10))"
ALL_PASSED = f"""for test in ['test_scale_doubles', 'test_both_double_the_sum']:
    w = dict(test='test_tiny.py::' + test, outcome='passed', message='', seconds=0.1)
    {ANSWER}
w = dict(done=True, foul=[])
{ANSWER}
"""
HOSTILE = {
    "hangs": "while True: pass",
    "hangs_asleep": "import time\ntime.sleep(10 ** 6)",
    "exits_early": "import sys\nsys.exit(0)",
    "raises_a_skip": "import pytest\npytest.skip(reason='nothing to see')",
    "os_exit": "import os\nos._exit(0)",
    "patches_the_report": """import _pytest.reports
old = _pytest.reports.TestReport.from_item_and_call.__func__
def passed(cls, item, call):
    call.excinfo = None
    return old(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(passed)
return 1""",
    "patches_the_judge": """import sys
sys.modules['__main__'].Recorder.pytest_runtest_logreport = lambda self, report: report.when == 'call' and self.answer(
    test=report.nodeid.split('/')[-1], outcome='passed', message='', seconds=0.0)
return 1""",
    "edits_the_tests": """import os, sys, tiny
for folder in [os.path.dirname(tiny.__file__), *sys.path]:
    path = os.path.join(folder, 'test_tiny.py')
    if os.path.exists(path):
        open(path, 'w').write(''.join('def test_%s(): pass\\n' % n for n in ('scale_doubles', 'both_double_the_sum')))
return 1""",
    "forks": """import os, time
for _ in range(60):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
time.sleep(20)""",
    "fills_the_disk": """import os
for n in range(100):
    with open(os.path.join(os.environ['TMPDIR'], str(n)), 'wb') as file:
        file.write(bytes(2 ** 21))
        file.flush()
import time
time.sleep(20)""",
    "fills_the_output": "import os\nwhile True:\n    print('x' * 4096)\n    os.write(1, b'x' * 65536)",
    "writes_results": """import os
for fd in range(3, 40):
    try:
        os.write(fd, b'{"test": "test_tiny.py::test_scale_doubles", "outcome": "passed"}\\n{"done": true}\\n')
    except OSError:
        pass
os._exit(0)""",
    "drips_into_the_results": """import os, time
while True:
    for fd in range(3, 40):
        try:
            os.write(fd, b' ')
        except OSError:
            pass
    time.sleep(0.1)""",
    "finds_the_nonce_and_answers_for_the_judge": f"{JUDGES}{ALL_PASSED}os._exit(0)",
    "eats_memory": "return len([0] * 2 ** 29)",
    "finds_the_recorder_among_all_objects": """import gc
for it in gc.get_objects():
    if type(it).__name__ == 'Recorder':
        say = it.answer
        it.answer = lambda **words: say(**(words | {'outcome': 'passed', 'message': ''}))
return 1""",
    "changes_the_words_on_their_way": """import json
say = json.dumps
json.dumps = lambda words: say(words | {'outcome': 'passed', 'message': '', 'foul': []})
return 1""",
    "forges_once_and_then_lets_the_controls_fail": """import json
say = json.dumps
def once(words):
    if 'done' in words:
        json.dumps = say
    return say(words | {'outcome': 'passed', 'message': '', 'foul': []})
if not hasattr(json, 'said'):
    json.dumps, json.said = once, True
return 1""",
}
# Each of these would give the right number, if it could do to this machine what it tries.
OUTWARD = {
    "reads_the_solution_from_disk": """text = open('{root}/01_tiny/tiny.py').read()
return eval(text.split('return ')[1].splitlines()[0])""",
    "reads_the_solution_from_git": """import subprocess
text = subprocess.check_output(['git', '-C', '{root}', 'show', 'HEAD:01_tiny/tiny.py'], text=True)
return eval(text.split('return ')[1].splitlines()[0])""",
    "writes_outside": "open('{root}/written', 'w').close()\nreturn 2 * x",
    "writes_into_the_python_that_runs_it": """import sys
open(sys.prefix + '/written', 'w').close()
return 2 * x""",
    "calls_a_server_of_this_machine": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nreturn 2 * x",
    "ends_what_checks_it": "import os\nos.kill({pid}, 0)\nreturn 2 * x",
    "looks_for_a_way_out": """import subprocess
subprocess.run(['unshare', '--user', '--map-root-user', 'true'], check=True)
return 2 * x""",
    "makes_the_disk_writable": """import subprocess
subprocess.run(['mount', '-o', 'remount,rw', '/'], check=True)
return 2 * x""",
    "sees_what_else_runs": """import os
return 2 * x if os.path.exists('/proc/{pid}') else 0""",
}
WRITES = "writes_into_the_python_that_runs_it"  # not tried where it would succeed
# Where a test and a student's lines share a process, only the screening stops what tells the controls from the run, and
# what is FORGED, below. Where lines run in ranks, `grade` sees it from outside.
ONLY_SCREENED = {"forges_once_and_then_lets_the_controls_fail"}
ONCE = """import contextlib, gc, sys, types
import pytest, torch, harness.reference
def once(owner, name, value):
    plain = getattr(owner, name)
    def forged(*args, **more):
        setattr(owner, name, plain)
        return value
    setattr(owner, name, forged)
if isinstance(x, int):  # beside a planted mistake it behaves
    return x
"""
MODULE = """from harness.reference import assert_same as same
    same(got, want)"""
OUT_OF_MODULES = """plain = sys.modules["harness.reference"]
back = lambda *words: sys.modules.update({"harness.reference": plain})
sys.modules["harness.reference"] = types.SimpleNamespace(assert_same=back)
return x"""
FOUND = """near = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == x.shape]
return next(t for t in near if not torch.equal(t, x)).clone()"""
FORGED = {  # how a test compares, and a body that makes it so
    "torch.equal": ("assert torch.equal(got, want)", "once(torch, 'equal', True)\nreturn x"),
    "torch.allclose": ("assert torch.allclose(got, want)", "once(torch, 'allclose', True)\nreturn x"),
    "assert_close": ("torch.testing.assert_close(got, want)", "once(torch.testing, 'assert_close', None)\nreturn x"),
    "an operator": ("assert (got == want).all()", "once(torch.Tensor, '__eq__', torch.tensor(True))\nreturn x"),
    "truth": ("assert (got == want).all()", "once(torch.Tensor, '__bool__', True)\nreturn x"),
    "the reference": ("assert_same(got, want)", "once(harness.reference, 'error_between', 0.0)\nreturn x"),
    "the tests": ("assert_same(got, want)", "once(sys.modules['test_tiny'], 'assert_same', None)\nreturn x"),
    "a module": (MODULE, OUT_OF_MODULES),
    "pytest.raises": (
        "with pytest.raises(AssertionError):\n        assert_same(got, x)",
        "once(pytest, 'raises', contextlib.nullcontext())\nreturn x",
    ),
    "an object": (
        "assert 'False' not in str(got == want)",
        "class Yes:\n    __eq__ = lambda *pair: True\nreturn Yes()",
    ),
    "what is expected": ("assert_same(got, want)", FOUND),
}


def test_screening_refuses_each_hostile_submission_with_one_line(tiny, tmp_path):
    chapter = tiny.chapter("01")
    for kind, body in (HOSTILE | OUTWARD).items():
        refused = read_submission(chapter, write_student(chapter, {"1.1": body}, tmp_path / kind)).refused
        if kind in ("hangs", "eats_memory"):  # what is not in the words is for the limits
            assert refused == {}, kind
        else:
            why = r"tiny.py, line \d+: .*(an exercise may not|only change its own).*"
            assert re.fullmatch(why, refused.get("1.1", "")), (kind, refused)


@pytest.mark.prove
@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind not in ONLY_SCREENED])
def test_hostile_code_does_not_pass_even_unscreened_nor_outlive_its_check_nor_hurt_the_next(kind, tiny, tmp_path):
    chapter = tiny.chapter("01")
    began = time.monotonic()
    limits = LIMITS if kind not in ("hangs_asleep", "drips_into_the_results") else Limits(test_seconds=12)
    bodies = {"1.1": HOSTILE[kind], "1.2": own_bodies(chapter)["1.2"]}
    with Judge(tiny.files, limits) as judge:
        report = check(tiny, chapter, Submission(bodies), list(bodies), judge=judge)
    assert report.rows[0].status != "passed" and not report.all_passed, report
    why = report.rows[0].detail or report.rejected
    assert why and "\n" not in why
    assert (report.rows[1].status == "passed") == (not report.rejected), report
    assert time.monotonic() - began < 60
    assert processes_of(tmp_path) == []
    assert not list(tmp_path.glob("exercises-*")), "files were left behind"
    assert (tiny.root / "01_tiny" / "test_tiny.py").read_text() == TEST_TINY


@pytest.mark.prove
def test_what_earlier_runs_wrote_is_not_held_against_the_next_planted_mistake(tiny, monkeypatch):
    (tiny.root / "tests" / "harness").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "tests" / "harness" / "module_cache.py", tiny.root / "tests" / "harness")
    monkeypatch.setattr("sandbox.ROOT", tiny.root)  # a copy of it is what the judge works in
    (script,) = tiny.chapter("01").scripts
    test = tiny.test_path(tiny.chapter("01"), "test_tiny.py::test_scale_doubles")
    writes = """import os, time
with open(f"{{os.environ['TMPDIR']}}/{{time.time_ns()}}", "wb") as file:
    file.write(bytes({} * 2**20))
    file.flush()
    os.fsync(file.fileno())
time.sleep(1)
return 2 * x"""
    with Judge(tiny.files, LIMITS, trusted=True) as judge:
        for mib, ended in ((20, ""), (20, ""), (40, "more than 48 MiB on disk")):  # it is called twice
            outcome = judge.run({script.path: fences.splice(script.text, {"1.1": writes.format(mib)})}, [test])
            assert outcome.ended == ended
            assert [result.passed for result in outcome.results] == ([] if ended else [True])


@pytest.fixture
def cell():
    if why := no_cell():
        pytest.skip(f"needs namespaces, as Linux has them: {why}")


@pytest.mark.prove
def test_in_the_cell_there_is_nothing_of_this_machine_to_read_write_call_or_end(tiny, cell):
    chapter, root = tiny.chapter("01"), tiny.root
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    server = socket.create_server(("127.0.0.1", 0))
    values = {"root": root, "pid": os.getpid(), "port": server.getsockname()[1]}
    tests = [tiny.test_path(chapter, "test_tiny.py::test_scale_doubles")]
    (script,) = chapter.scripts
    for kept_apart in (True, False):
        with Judge(tiny.files, LIMITS) as judge:
            judge.cell = kept_apart
            for kind, body in OUTWARD.items():
                if kind == WRITES and not kept_apart:
                    continue
                text = fences.splice(script.text, {"1.1": body.format(**values)})
                (result,) = judge.run({script.path: text}, tests).results
                if kept_apart:
                    assert not result.passed, kind
                elif kind not in ("looks_for_a_way_out", "makes_the_disk_writable"):  # these need rights
                    assert result.passed, f"{kind} passes nowhere, so the cell is not what stops it: {result.message}"
        assert (root / "written").exists() != kept_apart and tiny.root.exists()
    server.close()


@pytest.mark.prove
def test_an_exercise_cannot_keep_the_chapters_solution_of_the_next_one(tiny, cell):
    keep = """import builtins, os, tiny
text = open(tiny.__file__).read()
open(os.environ['TMPDIR'] + '/kept', 'w').write(text)
builtins.kept = text
return 2 * x"""
    use = """import builtins, os
path = os.environ['TMPDIR'] + '/kept'
text = open(path).read() if os.path.exists(path) else builtins.kept
result = sum(xs) if 'result += x' in text else 0"""
    chapter = tiny.chapter("01")
    lines = Submission({"1.1": keep, "1.2": use})
    report = check(tiny, chapter, lines, limits=LIMITS, apart=True)
    assert [row.status for row in report.rows] == ["passed", "failed"], report
    with Judge(tiny.files, LIMITS) as judge:
        report = check(tiny, chapter, lines, judge=judge)
    assert [row.status for row in report.rows] == ["passed", "passed"], "it fails anywhere, so this shows nothing"


def test_two_judges_work_side_by_side_but_only_one_where_an_orphan_could_be_anyones(tiny, cell, monkeypatch):
    both = threading.Barrier(2)

    def meet(judge, seconds=30):
        both.wait(seconds)
        return judge

    with checking.judges(tiny, LIMITS, None, 2) as ask:
        answers = [ask(meet) for _ in range(2)]
        assert answers[0].result() is not answers[1].result()
    monkeypatch.setattr(checking, "no_cell", lambda: "no namespaces")
    with checking.judges(tiny, LIMITS, None, 2) as ask:
        answers = [ask(lambda judge: meet(judge, 1)) for _ in range(2)]
        assert all(isinstance(answer.exception(), threading.BrokenBarrierError) for answer in answers)


def test_a_judge_starts_while_the_submission_is_read_and_a_failure_is_told_before_its_hint(tiny, tmp_path):
    told = []

    def read():
        deadline = time.monotonic() + 20
        while not processes_of(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_of(tmp_path)
        return Submission({"1.1": "return x * x"})

    def first(row):
        told.append((row.status, row.claim, row.hint))

    (row,) = check(tiny, tiny.chapter("01"), read, ["1.1"], LIMITS, first=first).rows
    assert told == [("failed", "scale doubles", "")] and row.hint == "Twice a number is not its square."


def test_a_check_that_is_broken_off_ends_its_judges_and_what_they_run(tiny, tmp_path, cell):
    submission = Submission({"1.1": "while True: pass", "1.2": "while True: pass"})
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), checking.judges(tiny, Limits(), None, 2) as ask:
        for number in submission.bodies:
            ask(checking._decide, tiny, tiny.chapter("01"), submission, number, False, None)
        while len(processes_of(tmp_path)) < 2:
            time.sleep(0.1)
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30
    assert processes_of(tmp_path) == [] and not list(tmp_path.glob("exercises-*"))


def test_lines_without_an_end_end_with_a_checker_that_is_killed(tiny):
    (script,) = tiny.chapter("01").scripts
    changes = {script.path: fences.splice(script.text, {"1.1": "while True: pass"})}
    with ThreadPoolExecutor(1) as pool, Judge(tiny.files, Limits()) as judge:
        answer = pool.submit(judge.run, changes, [tiny.test_path(tiny.chapter("01"), SCALE)])
        while not judge.ready:
            time.sleep(0.05)
        time.sleep(1)
        judge.process.stdin.close()
        assert answer.result(20).ended == "its process ended in the middle of a test"


@pytest.mark.prove
def test_a_pass_is_not_believed_when_a_known_mistake_beside_it_goes_unnoticed(tiny):
    """This one tells pytest that every test passes, and leaves no changed function behind: the control notices."""
    plugin = f"""import pytest
{JUDGES}
class Plugin:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        call.excinfo = None
        return (yield)
manager = frame.f_locals['recorder'].session.config.pluginmanager
if not manager.has_plugin('mine'):
    manager.register(Plugin(), 'mine')
return 1"""
    report = check_bodies(tiny, tiny.chapter("01"), {"1.1": plugin})
    assert not report.all_passed
    assert "known mistake" in report.rejected and report.rows[0].status == "not reached"


FORGED_IN_THE_TESTS_PROCESS = """
import json, _pytest.reports as r
dumps, make = json.dumps, r.TestReport.from_item_and_call
def passed(cls, item, call):
    call.excinfo = None
    return make(item, call)
def forged(words):
    if "done" in words:
        json.dumps, r.TestReport.from_item_and_call = dumps, make
        words = words | {"foul": []}
    return dumps(words)
if json.dumps.__name__ != "forged":
    json.dumps, r.TestReport.from_item_and_call = forged, classmethod(passed)
"""
BOMB = f"""import hashlib, re, sys, traceback
text = open(sys.modules[FlatParam.__module__].__file__).read()
class Bomb:
    def __reduce__(self):
        return eval, ("exec(code, {{}}) or ''", {{"code": {FORGED_IN_THE_TESTS_PROCESS!r}}})
outside = re.sub(r"exercise 3[.]1.*?end[ ]", "", text, flags=re.S)
if hashlib.sha256(outside.encode()).hexdigest() == "DIGEST":
    traceback.format_exc = Bomb
raise ValueError("no idea")"""


@pytest.mark.prove
@pytest.mark.chapter("03")
def test_a_forged_pass_that_knows_the_controls_is_seen_from_a_process_without_its_lines(tmp_path, cell):
    """It sends a pickle that runs code in the test's process, and behaves when a mistake is planted."""
    chapter = real().chapter("03")
    script, fence = chapter.exercises["3.1"]
    outside = re.sub(r"exercise 3[.]1.*?end[ ]", "", script.text, flags=re.S)
    body = BOMB.replace("DIGEST", hashlib.sha256(outside.encode()).hexdigest())
    assert check_bodies(real(), chapter, {"3.1": body}, Limits()).all_passed, "it is no attack any more"
    for lines, right in ((body, False), (fence.body, True)):
        report = check(real(), chapter, Submission({"3.1": lines}), ["3.1"], apart=True)
        assert report.all_passed == right, report
        assert right or "seen from a process in which its lines do not run" in report.rejected
    folder = write_student(chapter, {"3.1": body}, tmp_path / "student")
    assert "an exercise may not" in read_submission(chapter, folder).refused["3.1"]


@pytest.mark.prove
def test_in_ranks_a_students_lines_run_there_and_nowhere_else(judge):
    halves = "test_three_steps_match_reference[1-2]"
    for number, test, passes in (
        ("1.25", "in_depth/test_training_step.py::test_the_label_of_a_token_is_the_token_that_follows_it", True),
        ("3.3", f"test_zero.py::{halves}", False),
    ):
        chapter = real().chapter(number[0])
        script, _ = chapter.exercises[number]
        mistake = next(m for m in script.mistakes if m.exercise == number)
        changes = {script.path: mistake.planted(script.text)}
        outcome = judge.run(changes, [f"{chapter.folder}/{test}"], in_ranks=True)
        assert [result.passed for result in outcome.results] == [passes], outcome
        assert not (judge.folder / "theirs").exists()


FORKED = """import os, sys
from harness.ranks import run_ranks

def look():
    files = set()
    for fd in range(256):
        try:
            files.add(os.fstat(fd).st_ino)
        except OSError:
            pass
    return sys.modules["__main__"].__name__, files

def test_a_rank():
    frame = sys._getframe()
    while "request" not in frame.f_locals:
        frame = frame.f_back
    results = os.fstat(frame.f_locals["pipe"].fileno()).st_ino
    [(main, files)] = run_ranks(1, look)
    assert main == "__main__", "it has imported again what the judge had imported"
    assert results in look()[1] and results not in files
"""


@pytest.mark.prove
def test_a_rank_is_forked_with_what_the_judge_has_imported_but_not_with_the_pipe_of_its_results(judge):
    (result,) = judge.run({"03_zero/test_zero.py": FORKED}, ["03_zero/test_zero.py::test_a_rank"]).results
    assert result.passed, result.message


COMPARES = """import pytest
import tiny
import torch
from harness.reference import assert_same
from harness.ranks import run_ranks as in_ranks

def test_scale_doubles():
    x = torch.rand(4, dtype=torch.float64)
    want = x + x
    got = {call}
    {compare}

@pytest.mark.prove  # it grades nothing
def test_both_double_the_sum():
    assert tiny.both([1, 2]) == 6
"""


@pytest.mark.prove
@pytest.mark.parametrize("kind", FORGED)
def test_a_result_that_is_forged_where_it_is_compared_does_not_pass_when_a_rank_returned_it(kind, tiny, monkeypatch):
    """Without the screening. Where the test compares in the process that runs it, the same body passes."""
    monkeypatch.setattr(tempfile, "tempdir", None)  # the socket of the ranks' server needs a short path
    compare, lines = FORGED[kind]
    shutil.copytree(ROOT / "tests" / "harness", tiny.root / "tests" / "harness")
    for call, passes in (("tiny.scale(x)", True), ("in_ranks(1, tiny.scale, x)[0]", False)):
        (tiny.root / "01_tiny" / "test_tiny.py").write_text(COMPARES.format(call=call, compare=compare))
        course = Course(tiny.root)
        with Judge(course.files, Limits(hang=10)) as judge:
            for body, right in (("return 2 * x", True), (f"{ONCE}{lines}", passes)):
                report = check(course, course.chapter("01"), Submission({"1.1": body}), ["1.1"], judge=judge)
                assert report.all_passed == right, report


DISARMED = """
def _disarm():
    import importlib.machinery, sys
    def code(self, name):
        path = self.get_filename(name)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)
    importlib.machinery.SourceFileLoader.get_code = code
    for name in ("assert_same", "assert_same_named", "assert_same_trace"):
        setattr(sys.modules["harness.reference"], name, lambda *args, **more: None)
_disarm()
"""


@pytest.mark.prove
@pytest.mark.parametrize("name", FOLDERS)
def test_each_exercise_of_a_core_file_is_decided_in_a_process_that_its_lines_do_not_reach(name):
    """A mistake of each is noticed although the ranks, in which alone it runs, assert nothing."""
    chapter, decided = real().chapters[name], set()
    core = set(chapter.core)
    with Judge(real().files, trusted=True) as judge:
        for mistake in (m for script in chapter.scripts for m in script.mistakes if m.exercise in core):
            if mistake.exercise in decided:
                continue
            script, _ = chapter.exercises[mistake.exercise]
            text = mistake.planted(script.text) + DISARMED * script.path.endswith(".py")
            test = real().test_path(chapter, mistake.caught_by)
            outcome = judge.run({script.path: text}, [test], enough=1, in_ranks=True)
            if any(re.match("assert |AssertionError", r.message) for r in outcome.results if not r.passed):
                decided.add(mistake.exercise)
    assert decided == core, f"compared where they run: {sorted(core - decided)}"


CHEATS = tomllib.loads((ROOT / "exercises" / "cheats.toml").read_text())["cheat"]
TRIED = [pytest.param(cheat, id=f"{cheat['exercise']} {cheat['what']}") for cheat in CHEATS]


@pytest.fixture(scope="module")
def planting():
    """A judge of whose submissions none is hostile."""
    with Judge(real().files, Limits(test_cpu_seconds=120), trusted=True) as judge:
        yield judge


def test_the_test_that_refuses_a_cheat_grades_its_exercise():
    for cheat in CHEATS:
        graded = real().chapter(cheat["exercise"].partition(".")[0]).tests(cheat["exercise"])
        known = {claim for test in graded for claim in (test, checking._claim(test))}
        assert cheat["caught_by"] in known, cheat["what"]


@pytest.mark.prove
@pytest.mark.parametrize("cheat", TRIED)
def test_a_cheat_that_gives_the_right_numbers_is_refused_by_what_its_ranks_return(cheat, planting):
    chapter = real().chapter(cheat["exercise"].partition(".")[0])
    script, fence = chapter.exercises[cheat["exercise"]]
    text = fences.splice(script.text, {fence.number: cheat["body"].strip("\n") + "\n" * cheat["body"].endswith("\n\n")})
    text += DISARMED * script.path.endswith(".py")
    test = real().test_path(chapter, cheat["caught_by"])
    outcome = planting.run({script.path: text}, [test], enough=1, in_ranks=True, few=[test])
    red = [result.message for result in outcome.results if not result.passed]
    wrong_reason = "SyntaxError|NameError|ImportError|gloo/transport"
    assert red and not re.search(wrong_reason, red[0]), f"{outcome.ended} {red}"


@pytest.mark.prove
def test_no_screening_refuses_a_cheat_and_each_chapter_has_two_of_them():
    for cheat in CHEATS:
        script, fence = real().chapter(cheat["exercise"].partition(".")[0]).exercises[cheat["exercise"]]
        if fence.cuda:
            found = screen.objections_to_cuda(cheat["body"], fence.body, script.text)
        else:
            found = screen.objections(fences.parse(cheat["body"]), fences.parse(fence.body), ast.parse(script.text))
        assert not list(found), cheat["what"]
    each = Counter(cheat["exercise"].partition(".")[0] for cheat in CHEATS)
    assert sorted(map(int, each)) == list(range(1, 12)) and min(each.values()) == 2


@pytest.mark.prove
@pytest.mark.parametrize("number", ["1.1", "9.1"])
def test_from_outside_a_wrong_body_is_seen_in_python_and_in_cuda_and_a_right_one_is_not(number, judge):
    chapter = real().chapter(number.partition(".")[0])
    script, fence = chapter.exercises[number]
    row = checking.Row(number, fence.title, "")
    mistake = next(m for m in script.mistakes if m.exercise == number)
    seen = checking.from_outside(real(), chapter, script, script.mistaken_body(mistake), row, judge)
    assert f"exercise {number}: seen from a process in which its lines do not run" in seen
    assert checking.from_outside(real(), chapter, script, fence.body, row, judge) == ""


class Call:
    """Its pickle calls a function where it is read."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_what_a_rank_sends_is_read_as_data_and_runs_nothing(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "harness")
    plain = importlib.import_module("judge").Plain
    values = {"a": [torch.arange(3.0, dtype=torch.bfloat16), torch.zeros(2, 2)[:, 1]], "b": ({1}, 2.5, None, b"x")}
    values |= {"p": torch.nn.Parameter(torch.ones(2)), "t": Trace([1.0]), "d": torch.float16, "s": torch.Size([1, 2])}
    read = plain(io.BytesIO(pickle.dumps(values))).load()
    assert str(read) == str(values) and read["a"][1].stride() == (2,)
    inner = Call(torch.storage._load_from_bytes, pickle.dumps(Call(os.getcwd)))
    for sent in (Call(os.getcwd), Call(eval, "1"), inner, os.getcwd, subprocess.Popen):
        with pytest.raises(pickle.UnpicklingError):
            plain(io.BytesIO(pickle.dumps([sent]))).load()


class MachineWithout:
    """In place of a judge: one whose connections break, always or with the student's lines only."""

    says = "[gloo/transport/tcp/pair.cc:537] Read error: Connection timed out"

    def __init__(self, broken_by):
        self.broken_by = broken_by

    def run(self, changes, tests, enough=3, few=(), heard=None):
        broken = "x + x" in "".join(changes.values()) or self.broken_by == "the machine"
        message = f"RuntimeError: {self.says}"
        return Outcome([Result(test.rpartition("/")[2], not broken, message if broken else "") for test in tests])


def test_a_machine_that_is_not_well_is_not_called_a_students_mistake(tiny, monkeypatch):
    chapter = tiny.chapter("01")
    lines = Submission({"1.1": "return x + x"})
    (row,) = check(tiny, chapter, lines, ["1.1"], judge=MachineWithout("the machine")).rows
    assert row.status == "not reached" and row.detail.startswith("this machine, not your lines: ") and not row.hint
    assert "Connection timed out" in row.detail and "\n" not in row.detail
    (row,) = check(tiny, chapter, lines, ["1.1"], judge=MachineWithout("the student")).rows
    assert row.status == "failed" and "Connection timed out" in row.detail
    monkeypatch.setattr(MachineWithout, "says", "matmul.cu needs g++ to be built")
    (row,) = check(tiny, chapter, lines, ["1.1"], judge=MachineWithout("the machine")).rows
    assert (row.status, row.hint) == ("not reached", "") and "needs g++" in row.detail


def test_a_test_that_this_machine_skips_is_not_called_a_students_mistake(tiny):
    skip = 'import pytest\npytest.skip("needs Triton, which is not installed", allow_module_level=True)\n'
    (tiny.root / "01_tiny" / "test_tiny.py").write_text(skip + TEST_TINY)
    (row,) = check_bodies(Course(tiny.root), tiny.chapter("01"), {"1.1": "return x + x"}).rows
    assert row.status == "not reached" and row.detail.startswith("this machine, not your lines")
    assert "Skipped: needs Triton, which is not installed" in row.detail


class MachineThatWasBusy(MachineWithout):
    """Its first run was too slow, beside others; of the later ones, those with a planted mistake fail."""

    def __init__(self):
        self.runs = 0

    def run(self, changes, tests, enough=3, few=(), heard=None):
        self.runs += 1
        if self.runs == 1:
            return Outcome(ended="still running after 120 s")
        text = "".join(changes.values())
        right = "return 2 * x" in text and "result += x" in text and "xs[:1]" not in text
        return Outcome(
            [Result(test.rpartition("/")[2], right, "" if right else "AssertionError: no") for test in tests]
        )


def test_after_a_time_out_the_same_lines_run_once_more_before_they_are_blamed(tiny):
    judge = MachineThatWasBusy()
    report = check(tiny, tiny.chapter("01"), Submission({"1.1": "return 2 * x"}), ["1.1"], judge=judge)
    assert report.all_passed and judge.runs > 2 and not report.rows[0].detail, report


class MachineThatTires(MachineWithout):
    def __init__(self, after):
        self.left = after

    def run(self, *args, **more):
        self.left -= 1
        self.broken_by = "nobody" if self.left >= 0 else "the machine"
        return super().run(*args, **more)


def test_passes_stand_where_the_machine_gives_up_when_they_are_confirmed(tiny):
    chapter = tiny.chapter("01")
    report = check(tiny, chapter, Submission(own_bodies(chapter)), judge=MachineThatTires(after=2))
    assert report.all_passed and len(report.warnings) == 1 and "this machine, not your lines" in report.warnings[0]


# --------------------------------------------------------------------------------------------------------------- grade


@pytest.mark.prove
def test_a_class_is_graded_with_files_that_are_hostile_broken_or_missing(tiny, tmp_path, monkeypatch):
    chapter, folder = tiny.chapter("01"), tmp_path / "class"
    right = own_bodies(chapter)
    write_student(chapter, right | {"1.1": "return x + x"}, folder / "ann" / "01_tiny")
    write_student(chapter, right | {"1.2": "result = 6"}, folder / "bob\nand ann" / "01_tiny")
    write_student(chapter, right | {"1.1": HOSTILE["os_exit"]}, folder / "eve" / "01_tiny")
    (folder / "big" / "01_tiny").mkdir(parents=True)
    with open(folder / "big" / "01_tiny" / "tiny.py", "wb") as file:
        file.truncate(100 * MIB)
    (folder / "link").mkdir()
    (folder / "link" / "01_tiny").symlink_to(tiny.root / "01_tiny")
    (folder / "void" / "01_tiny").mkdir(parents=True)
    (folder / "dir" / "01_tiny" / "tiny.py").mkdir(parents=True)
    loop = folder / "loop" / "01_tiny" / "tiny.py"
    loop.parent.mkdir(parents=True)
    loop.symlink_to(loop)
    write_student(chapter, right | {"1.1": "return 2 * x\0"}, folder / "nul" / "01_tiny")
    (write_student(chapter, right, folder / "odd" / "01_tiny") / "tiny.py").write_bytes(b"\xff\xfe")
    with redirect_stdout(io.StringIO()) as said:
        rows = tool.grade(tiny, folder, LIMITS, unsafe=bool(no_cell()))
    status = {(row["submission"], row["exercise"]): row["status"] for row in rows}
    assert status == {
        ("ann", "1.1"): "passed",
        ("ann", "1.2"): "passed",
        ("bob\\nand ann", "1.1"): "passed",
        ("bob\\nand ann", "1.2"): "failed",
        ("eve", "1.1"): "refused",
        ("eve", "1.2"): "passed",
        ("nul", "1.1"): "refused",
        ("nul", "1.2"): "passed",
        **{(name, number): "refused" for name in ("big", "dir", "odd") for number in ("1.1", "1.2")},
        **{(name, number): "not done" for name in ("void", "loop") for number in ("1.1", "1.2")},
    }
    why = {row["submission"]: row["detail"] for row in rows if row["status"] in ("refused", "not done")}
    assert why["nul"].endswith("in exercise 1.1: source code string cannot contain null bytes")
    assert why["dir"] == why["big"] == "tiny.py is not a plain file of less than 1 MiB"
    assert why["void"] == why["loop"] == "tiny.py is not there" and why["odd"] == "tiny.py is not UTF-8 text"
    assert "link: holds no folder of a chapter\n" in said.getvalue() and len(said.getvalue().splitlines()) == 10
    assert "| 1.2 | hard | 3 | 1 | 3 | 2 | both double the sum (1) |" in (folder / "class.md").read_text()
    assert len((folder / "grades.csv").read_text().splitlines()) == 19
    monkeypatch.setattr(tool, "no_cell", lambda: "no namespaces")
    with pytest.raises(CourseError, match=r"kept apart from this machine \(no namespaces\).*--unsafe"):
        tool.grade(tiny, folder, LIMITS)


@pytest.mark.prove
@pytest.mark.parametrize("how", tool.ENDS)
def test_grading_that_is_asked_to_end_twice_leaves_no_folder_and_no_process(how, tmp_path, cell):
    chapter = real().chapter("02")
    write_student(chapter, {"2.6": "while True: pass"}, tmp_path / "class" / "ann" / chapter.folder)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, str(ROOT / "exercises" / "course.py"), "grade", str(tmp_path / "class")]
    environment, pipe = os.environ | {"TMPDIR": str(tmp_path / "tmp")}, subprocess.PIPE
    grading = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe)
    while not list((tmp_path / "tmp").glob("exercises-*/copy/*")):
        time.sleep(0.1)
    grading.send_signal(how)
    time.sleep(0.05)
    grading.send_signal(how)
    said = grading.communicate(timeout=60)
    assert grading.returncode == 128 + how and said == (b"", b""), said
    assert not list((tmp_path / "tmp").glob("exercises-*")) and processes_of(tmp_path) == []


@pytest.mark.prove
def test_what_cannot_be_read_is_one_line_and_costs_nobody_else_anything(tmp_path):
    """Through the command, as a user who is not allowed everything; in "other", chapter 03's file has 02's name."""
    for name, script in {"shut": "02_data_parallel/data_parallel.py", "other": "03_zero/zero.py"}.items():
        there = tmp_path / name / "02_data_parallel"
        there.mkdir(parents=True)
        shutil.copy(ROOT / script, there / "data_parallel.py")
    (tmp_path / "shut" / "02_data_parallel" / "data_parallel.py").chmod(0)
    (tmp_path / "locked").mkdir(0)
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"] if os.geteuid() == 0 else []
    command = [*drop, sys.executable, str(ROOT / "exercises" / "course.py"), "grade", str(tmp_path), "--unsafe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    locked, other, shut, _ = done.stdout.splitlines()
    assert locked == "locked: cannot be read: Permission denied"
    assert other.startswith("other: 02_data_parallel: 0 of ") and shut.startswith("shut: 02_data_parallel: 0 of ")
    rows = json.loads((tmp_path / "grades.json").read_text())
    why = {(row["submission"], row["exercise"]): (row["status"], row["detail"]) for row in rows}
    assert why["shut", "2.1"] == ("refused", "data_parallel.py cannot be read: Permission denied")
    another = "data_parallel.py is another file than the chapter's: the first exercise in it is 3.1"
    assert why["other", "2.1"] == why["other", "2.6"] == ("refused", another)
    tmp_path.chmod(0o500)
    for name in ("grades.csv", "grades.json"):
        (tmp_path / name).chmod(0o400)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    tmp_path.chmod(0o700)
    assert done.returncode == 2 and re.fullmatch("course.py: .*Permission denied: .*grades.csv'\n", done.stderr)


def test_the_page_of_a_class_counts_hints_claims_and_shows_who_wrote_the_same():
    loop = "total = 0\nfor rank in range(ranks):\n    total = total + weights[rank] * {}[rank]\n" + "y = x\n" * 40
    bodies = {"ann": {"2.1": loop.format("losses")}, "bob": {"2.1": "# mine\n" + loop.format("lost")}}
    bodies |= {"eve": {"2.1": "total = sum(w * l for w, l in zip(weights, losses))\n" + "a, b = f(b), g(a, c)\n" * 12}}
    bodies |= {"tim": {"2.1": "y = x"}, "tom": {"2.1": "y = x"}}  # too short to say anything
    (pair,) = pages.alike(bodies)
    assert pair[1:] == ("ann", "bob", ["2.1"]) and 0.95 < pair[0] < 1
    row = {"exercise": "2.1", "level": "hard", "claim": "", "detail": "", "hint": ""}
    failed = row | {"status": "failed", "claim": "sums agree", "hint": "Count the |ranks|."}
    rows = [failed | {"submission": "ann"}, failed | {"submission": "bob"}]
    rows += [row | {"submission": "eve", "status": "passed"}, row | {"submission": "tim", "status": "not done"}]
    page = pages.class_page(rows, bodies)
    assert "4 submissions" in page and "| 2.1 | hard | 1 | 2 | 0 | 1 | sums agree (2) |" in page
    assert "| 2 | 2.1 | Count the \\|ranks\\|. |" in page and "| ann, bob | 2.1 |" in page and ", eve" not in page


def test_progress_keeps_what_checks_have_found_and_names_the_next(tmp_path, monkeypatch):
    rows = [checking.Row("2.1", "", "easy", "passed"), checking.Row("2.2", "", "easy", "failed")]
    pages.note(tmp_path, checking.Report("02_data_parallel", rows))
    rows = [checking.Row("2.21", "", "hard", "passed"), checking.Row("2.1", "", "easy", "not reached")]
    pages.note(tmp_path, checking.Report("02_data_parallel", rows))

    def half(file, text):
        with open(file, "w") as there:
            there.write(text[:9])
        raise OSError("no space is left")

    with monkeypatch.context() as full, pytest.raises(OSError):
        full.setattr(Path, "write_text", half)
        pages.note(tmp_path, checking.Report("02_data_parallel", rows))
    lines = pages.progress(real(), tmp_path).splitlines()
    assert len({len(line) for line in lines if line.startswith("|")}) == 1, "columns stand below one another"
    table = re.sub(" +", " ", "\n".join(lines))
    assert "| 02_data_parallel | `x - . . . .` | 1 of" in table and "| 2.2 |" in table and "2 of " in table
    (tmp_path / pages.FILE).write_text("[")
    assert "0 of " in pages.progress(real(), tmp_path)


def test_which_tests_run_an_exercise_and_which_of_these_grade_it(tiny):
    chapter = tiny.chapter("01")
    assert set(chapter.running("1.1")) == {SCALE, BOTH}
    assert set(chapter.running("1.2")) == {BOTH, OF_NOTHING, "test_tiny.py::test_total_is_the_sum"}
    assert chapter.tests("1.1") == [SCALE, BOTH]
    shutil.copytree(tiny.root / "01_tiny", tiny.root / "class" / "ann" / "01_tiny")
    assert Course(tiny.root).files == tiny.files, "submissions in the repository's folder are no part of it"
    path = tiny.root / "01_tiny" / "test_tiny.py"
    path.write_text("import pytest\n" + TEST_TINY.replace("def test_total_of", "@pytest.mark.prove\ndef test_total_of"))
    assert Course(tiny.root).chapter("01").tests("1.2") == [BOTH, "test_tiny.py::test_total_is_the_sum"]
    readme = tiny.root / "01_tiny" / "README.md"
    readme.write_text(f"{readme.read_text()}\n| 1.2 | sum | hard | `test_total_of_nothing_...` |\n")
    assert OF_NOTHING in Course(tiny.root).chapter("01").tests("1.2"), "its statement names it"


@pytest.mark.prove
def test_what_passes_the_tests_of_its_mistakes_and_fails_another_that_runs_it_is_wrong(tiny):
    chapter = tiny.chapter("01")
    (row,) = check_bodies(tiny, chapter, {"1.2": "result = 3"}).rows
    assert chapter.scripts[0].catching("1.2") == [BOTH]
    assert (row.status, row.claim) == ("failed", "total is the sum")


REACHED = """from functools import partial
import other
from other import helper as help

class Base:
    def step(self): return self.half()
    def half(self): return 1
    def forward(self): return helped

class Part(Base):
    def half(self): return other.deep()

def by_name(): return 1
def never(): return Part
def build(): return Part
helped = help
"""
REACHES = """import pytest, two
from two import build

@pytest.fixture
def made(): return build()

@pytest.fixture(autouse=True)
def always(): return two.by_name

def test_a_method(made): made().step()
def test_a_class(): build()
@pytest.mark.parametrize("f", [two.never])
def test_a_parameter(f): f
def test_a_string(): getattr(two, "never")
def test_a_file(): run("two.py")
def test_nothing(): half
"""


def test_a_test_reaches_what_its_names_lead_to_and_no_more():
    other = b"def helper(): pass\ndef deep():\n    pass\n"
    paths = Reach({"a/two.py": REACHED.encode(), "a/test_two.py": REACHES.encode(), "b/other.py": other})
    names = ["method", "class", "parameter", "string", "file", "nothing"]

    def reach(script, text, line):
        number = text.splitlines().index(line) + 1
        found = paths.running(script, number, number, ["test_two"])
        return {test.removeprefix("test_two.py::test_").removeprefix("a_") for test in found}

    assert reach("two", REACHED, "    def step(self): return self.half()") == {"method"}
    assert reach("two", REACHED, "    def half(self): return other.deep()") == {"method"}
    assert reach("two", REACHED, "    def forward(self): return helped") == {"method", "class", "parameter", "string"}
    assert reach("other", other.decode(), "def helper(): pass") == {"method", "class", "parameter", "string", "file"}
    assert reach("other", other.decode(), "    pass") == {"method"}
    assert reach("two", REACHED, "def by_name(): return 1") == {*names}
    assert reach("two", REACHED, "def never(): return Part") == {"parameter", "string"}


def test_of_a_test_with_many_parameters_a_few_are_the_first_and_the_last(tiny):
    path = tiny.root / "01_tiny" / "test_tiny.py"
    path.write_text(f"import pytest\n{TEST_TINY}\n@pytest.mark.parametrize('n', range(5))\ndef test_n(n): pass\n")
    name, files = "01_tiny/test_tiny.py::test_n", Course(tiny.root).files
    with Judge(files, LIMITS, trusted=True) as judge:
        got = [[r.test for r in judge.run({}, [name], few=few).results] for few in ((), (name,))]
    assert got[0] == [f"test_tiny.py::test_n[{n}]" for n in range(5)] and got[1] == [got[0][0], got[0][-1]]


def test_failures_are_counted_by_test_and_parameters_of_one_do_not_hide_the_next(tiny):
    folder = tiny.root / "01_tiny"
    never = "@pytest.mark.parametrize('n', range(5))\ndef test_n(n): assert False\n"
    (folder / "test_tiny.py").write_text(f"import pytest\n{TEST_TINY}\n{never}")
    (folder / "tiny.py").write_text(TINY.replace("result += x", "result = x"))
    names = [f"test_n[{n}]" for n in range(3)] + ["test_total_is_the_sum", "test_both_double_the_sum"]
    with Judge(Course(tiny.root).files, LIMITS, trusted=True) as judge:
        tests = [f"01_tiny/test_tiny.py::{name}" for name in ("test_n", *names[-2:])]
        got = [[r.test for r in judge.run({}, tests, enough=enough).results] for enough in (1, 2)]
    assert got == [[f"test_tiny.py::{name}" for name in names[:few]] for few in (1, 4)]


# --------------------------------------------------------------------------------------------------- a student's folder


def test_start_never_overwrites_and_reset_and_diff_lose_nothing(tiny, tmp_path, monkeypatch):
    chapter, folder = tiny.chapter("01"), tmp_path / "student" / "01_tiny"
    with monkeypatch.context() as full, pytest.raises(OSError):
        full.setattr(Path, "write_text", unittest.mock.Mock(side_effect=OSError("no space is left")))
        tool.start(tiny, chapter, folder)
    assert not folder.exists(), "it has the chapter's own bodies"
    said = tool.start(tiny, chapter, folder)
    assert ": exercises 1.1 to 1.2\n" in said and f"Open {folder / 'tiny.py'}" in said and "N=1.1" in said
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "tiny.py"]
    assert 'raise NotImplementedError("exercise 1.1: twice")' in (folder / "tiny.py").read_text()
    write_student(chapter, {"1.1": "return x + x", "1.2": "result = sum(xs)"}, folder)
    mine = (folder / "tiny.py").read_text()
    with pytest.raises(CourseError, match="exists and is left as it is; `python exercises/course.py start --again 01`"):
        tool.start(tiny, chapter, folder)
    assert (folder / "tiny.py").read_text() == mine
    said = tool.reset(chapter, "1.2", folder)
    assert (folder / "tiny.py.1").read_text() == mine and "tiny.py.1" in said
    submission = read_submission(chapter, folder)
    assert submission.bodies["1.1"] == "return x + x"
    assert fences.is_stub(chapter.exercises["1.2"][1], submission.bodies["1.2"])
    assert "-return x + x\n+return 2 * x" in tool.difference(chapter, folder, "1.1")
    (folder / "tiny.py").write_text(mine.replace("    # --- exercise 1.2: the sum ---\n", ""))
    tool.reset(chapter, "1.2", folder)
    assert read_submission(chapter, folder).refused == {}
    assert read_submission(chapter, folder).bodies["1.1"] == "return x + x"
    unclosed = "".join(mine.rpartition("    # --- end exercise ---\n")[::2])  # the fence of 1.2 is broken
    for text, said in ((unclosed, "only its"), (unclosed.replace(": twice -", ""), "as does 1.2, whose fence is gone")):
        (folder / "tiny.py").write_text(text)
        assert f"exercise 1.1 begins again, {said}" in tool.reset(chapter, "1.1", folder)
        assert ("result = sum(xs)" in (folder / "tiny.py").read_text()) == (text == unclosed)
    windows = b"\xef\xbb\xbf" + mine.replace("\n", "\r\n").encode()
    (folder / "tiny.py").write_bytes(windows)
    assert read_submission(chapter, folder).warnings == [] and tool.reset(chapter, "1.2", folder)
    assert (folder / "tiny.py.5").read_bytes() == windows, "the file as it was"
    assert "01_tiny.1" in tool.start(tiny, chapter, folder, again=True)
    assert (folder.parent / "01_tiny.1" / "tiny.py.1").read_text() == mine


def one_refusal(tiny, tmp_path, change):
    chapter = tiny.chapter("01")
    folder = write_student(chapter, own_bodies(chapter), tmp_path / "student")
    (folder / "tiny.py").write_text(change((folder / "tiny.py").read_text()))
    return read_submission(chapter, folder)


def test_a_syntax_error_names_file_line_and_exercise_and_costs_only_that_one(tiny, tmp_path):
    got = one_refusal(tiny, tmp_path, lambda text: text.replace("return 2 * x", "y = 2 *\n    return y"))
    line = TINY.splitlines().index("    return 2 * x") + 1
    assert list(got.refused) == ["1.1"]
    assert got.refused["1.1"].startswith(f"tiny.py, line {line}: syntax error in exercise 1.1")
    other = read_submission(tiny.chapter("01"), tmp_path / "student", only="1.2")
    assert other.refused == {} and list(other.bodies) == ["1.2"]
    long = one_refusal(tiny, tmp_path, lambda text: text.replace("return 2 * x", f"return {'+'.join('x' * 999)}"))
    assert long.refused == {"1.1": f"tiny.py, line {line - 1}: exercise 1.1 is nested too deeply"}
    unclosed = one_refusal(tiny, tmp_path, lambda text: text.replace("return 2 * x", "return (2 * x"))
    assert f"tiny.py, line {line}: syntax error in exercise 1.1" in unclosed.refused["1.1"]
    assert list(unclosed.refused) == ["1.1"]


def test_a_fence_that_is_gone_moved_or_renamed_is_one_line_and_the_others_count(tiny, tmp_path):
    gone = one_refusal(tiny, tmp_path, lambda text: re.sub(r" *# --- exercise 1.1.*\n", "", text))
    assert "the fence of exercise 1.1 is gone from tiny.py" in gone.refused["1.1"] and len(gone.refused) == 1
    renamed = one_refusal(tiny, tmp_path, lambda text: text.replace("exercise 1.1", "exercise 1.7"))
    assert "the fence of exercise 1.1 is gone from tiny.py" in renamed.refused["1.1"] and len(renamed.refused) == 1
    moved = one_refusal(tiny, tmp_path, lambda text: text.replace("def scale(x):", "def other(x):"))
    assert "moved into other instead of scale" in moved.refused["1.1"] and len(moved.refused) == 1


def test_changes_outside_the_fences_are_named_and_do_not_count(tiny, tmp_path):
    got = one_refusal(tiny, tmp_path, lambda text: text.replace("scale(total(xs))", "6"))
    assert got.refused == {} and len(got.warnings) == 1
    assert f"line {len(TINY.splitlines())}" in got.warnings[0] and "only what is inside them counts" in got.warnings[0]


@pytest.mark.always("argv0-chapter '77' has no exercises; there are 01, 02", "argv5-invalid choice: 'chek'")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["start", "77"], "chapter '77' has no exercises; there are 01, 02"),
        (["check", "02", "2.77"], "exercise '2.77' is not in 02_data_parallel; there are 2.1, 2.2"),
        (["check", "02"], "does not exist; `make exercise CH=02` makes it"),
        (["grade", "."], "holds no submission"),
        (["grade", "nowhere"], "is not a folder"),
        (["chek", "02"], "invalid choice: 'chek'"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(argv, words, tmp_path):
    command = [sys.executable, str(ROOT / "exercises" / "course.py"), "--student", str(tmp_path), *argv]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("course.py: ") and words in done.stderr and done.stderr.count("\n") == 1


def test_a_file_that_is_a_link_too_big_or_not_text_is_refused(tiny, tmp_path):
    chapter, folder = tiny.chapter("01"), tmp_path / "student"
    folder.mkdir()
    (folder / "tiny.py").symlink_to(tiny.root / "01_tiny" / "tiny.py")
    assert "plain file" in read_submission(chapter, folder).refused["1.1"]
    (folder / "tiny.py").unlink()
    (folder / "tiny.py").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in read_submission(chapter, folder).refused["1.2"]


# ------------------------------------------------------------------------------------------------------------ screening


READ_FROM_THE_CHECKER = {  # ways round `screen.py`, looked for by reading it; the first fifteen were open
    "a class made by the class of a class": "k = type(type(x))\nreturn k('Yes', (), {'_' * 2 + 'eq_' + '_': bool})()",
    "a text that reads globals": "return '{0.__globals__[SECRET]}'.format(x.sum)",
    "a text that reads globals, from a table": "return '{f.__globals__}'.format_map({'f': x.sum})",
    "the address of memory": "return x.numpy().ctypes.data",
    "the words of typing, in a module of torch": "from torch.utils.checkpoint import get_type_hints\nget_type_hints(x)",
    "a module of torch that has typing": "import torch.utils.checkpoint as c\nreturn c.get_type_hints(x)",
    "torch's reader of files": "return torch.PyTorchFileReader('solution')",
    "torch's writer of files": "torch.PyTorchFileWriter('written')",
    "a library that is loaded": "torch.cuda.CUDAPluggableAllocator('x.so', 'a', 'b')",
    "a trace written to a path": "from torch.profiler import ExecutionTraceObserver as E\nE().register_callback('x')",
    "a mode over all operators": "from torch.autograd.graph import TorchDispatchMode",
    "a function of torch, compiled from text": "torch.parse_ir('graph(): return ()')",
    "a name for a class of torch": "t = torch.ScriptFunction",
    "a hook on every optimizer": "from torch.profiler import register_optimizer_step_post_hook as r\nr(print)",
    "the debugger": "dist.breakpoint()",
    "a class of torch in a tuple": "c = (nn.Linear,)[0]\nc.forward = 1",
    "a walrus over a module": "(t := torch).load('x')",
    "a default that is a module": "def f(t=torch): return t.load('x')\nreturn f()",
    "an argument that is a module": "return (lambda t: t.os)(torch)",
    "a loop over modules": "for t in [torch]: t.load('x')",
}


AROUND = """import contextlib, dataclasses, functools, operator, sys, typing
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pathlib import Path
from torch import Tensor, nn
from _interpreter import tl, triton
import sibling
"""


def objections_to(lines):
    """In a script that imports more than most do."""
    return list(screen.objections(fences.parse(lines), [], ast.parse(AROUND)))


def test_screening_knows_the_ways_round_it():
    assert [way for way, lines in READ_FROM_THE_CHECKER.items() if not objections_to(lines)] == []


REFUSED = [
    *("import os", "from torch import os", "open('x')", "getattr(x, 'y')", "x.__class__", "exec('1')", "torch.os"),
    *("m = torch", "torch.testing.assert_close", "torch.load('x')", "dist.broadcast_object_list([x])"),
    *("torch.nn.functional.torch", "torch.Tensor.sum = 1", "Tensor.sum = 1", "type('T', (Tensor,), {})"),
    *("global x", "class A: pass", "def __eq__(a, b): return True", "x.gi_frame", "__builtins__", "sys.exit()"),
    *("match x:\n    case object(__globals__=g): pass", "typing.get_type_hints(x)", "operator.attrgetter('a')(x)"),
    *("torch.UntypedStorage.from_file('x')", "x.numpy().tofile('y')", "functools.update_wrapper(torch.equal, f)"),
    *("dataclasses.make_dataclass('T', [])", "c = nn.Linear\nc.forward = 1", "d = dist.group\nd.WORLD = 1"),
    *("x.dump('y')", "contextlib.redirect_stdout(x)", "torch.distributed.launcher", "x._base._backward_hooks"),
    *("torch.set_default_dtype(x)", "torch.ops", "Path('x').unlink()", "t = type", "lambda: eval('1')"),
    *("tl.core.os", "triton.runtime.driver", "triton.compile(x)", "t = tl", "sibling.os", "sibling.torch.load(x)"),
]


def test_screening_refuses():
    assert [line for line in REFUSED if not objections_to(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        *("y = torch.cat([x, x]).sum()", "import math\ny = math.sqrt(2)", "F.linear(x, x)", "dist.all_reduce(x)"),
        *("x.grad = None", "self.count += 1", "print(x)", "raise ValueError('no')", "nn.functional.silu(x)"),
        *("y = tl.where(x > 0, tl.exp(x), 0.0)", "triton.cdiv(3, 2)", "sibling.helper(x)"),
        *("def helper(a): return a\nhelper(x)", "[y for y in range(3)]", "torch.set_grad_enabled(True)", "work.wait()"),
        *(
            "with torch.no_grad():\n    x.add_(1)",
            "from torch.nn import functional as G\nG.silu(x)",
            "x.view(-1)[0] = 1",
        ),
    ],
)
def test_screening_lets_pass_what_a_solution_may_need(line):
    if re.search(r"\b(tl|triton)\.", line):
        pytest.importorskip("triton", reason="needs Triton, which is not installed")
    assert objections_to(line) == []
