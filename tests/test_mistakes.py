"""The tests are tested: every listed mistake, planted in a copy of the repository, turns its named test red.

`make test` plants those whose digest is not the one in the ledger, and one of each script in turn; `make prove` all.
"""

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest
from harness import fences
from harness.house import ROOT, scripts
from harness.plant import LedgerError, all_mistakes, changed, digest, read_ledger

sys.path.insert(0, str(ROOT / "exercises"))
from checking import Course, symptom
from sandbox import Judge, Limits

MISTAKES = all_mistakes()
TEXTS = {mistake.script: (ROOT / mistake.script).read_text() for mistake in MISTAKES}
COURSE = Course()


def chosen():
    """The mistakes to plant in this run, each with the chapter it is about."""
    picked = MISTAKES
    if "PROVE" not in os.environ:
        turn = int(os.environ["PLANT_TURN"])
        by_script = {script: [m for m in MISTAKES if m.script == script] for script in TEXTS}
        picked = [mistakes[turn % len(mistakes)] for mistakes in list(by_script.values())[turn % 12 :: 12]]
        with contextlib.suppress(LedgerError):  # which is a failure of its own, below
            picked += [mistake for mistake in changed(MISTAKES, read_ledger()) if mistake not in picked]
    return [
        pytest.param(m, marks=pytest.mark.chapter(m.script[:2]), id=f"{Path(m.script).stem}-{m.name}") for m in picked
    ]


@pytest.fixture(scope="module")
def judge():
    with Judge(COURSE.files, Limits(test_cpu_seconds=120, hang=60), trusted=True) as judge:
        yield judge


def run_planted(mistake, judge):
    """What the named test says in a copy with the mistake in it. A mistaken harness needs a judge of its own."""
    text = mistake.planted(TEXTS[mistake.script])
    if not mistake.script.startswith("tests/harness"):
        return judge.run({mistake.script: text}, [mistake.test], enough=1)
    with Judge(judge.files | {mistake.script: text.encode()}, judge.limits, trusted=True) as mistaken:
        return mistaken.run({}, [mistake.test], enough=1)


@pytest.mark.parametrize("mistake", chosen())
def test_the_mistake_is_caught_by_the_named_test(mistake, judge, record_property):
    before = digest(mistake)
    outcome = run_planted(mistake, judge)
    assert not outcome.ended, f"{mistake.caught_by}: {outcome.ended}"
    red = [result for result in outcome.results if not result.passed]
    assert red, f"{mistake.caught_by} passes"
    assert not red[0].broken, f"{mistake.caught_by} could not be run: {red[0].message}"
    if red[0].message.startswith("Skipped: "):  # half way, as where there are no network namespaces: no verdict
        pytest.skip(reason=f"{mistake.caught_by}: {red[0].message}")
    # Red for the right reason: the check spoke, not the interpreter about a typing error in the planted lines.
    wrong_reason = re.search(r"\b(SyntaxError|NameError|ImportError|ModuleNotFoundError)\b", red[0].message)
    assert not wrong_reason, red[0].message
    record_property(
        "caught", [mistake.script, mistake.name, before, symptom(red[0].message) if mistake.exercise else ""]
    )


def test_without_a_mistake_the_same_machinery_says_passed(judge):
    first = list({m.script[:2]: m for m in reversed(MISTAKES)}.values())  # of each chapter
    some = first if "PROVE" in os.environ else first[int(os.environ["PLANT_TURN"]) % 4 :: 4]
    outcome = judge.run({}, [mistake.test for mistake in some])
    assert outcome.results and all(result.passed for result in outcome.results), outcome


def test_a_test_that_does_not_exist_is_no_verdict(judge):
    outcome = judge.run({}, ["tests/test_oracle.py::test_no_such_claim"])
    assert not [result for result in outcome.results if not result.broken], outcome


def test_every_script_has_its_mistakes_and_each_has_a_hint_and_a_source():
    harness = [ROOT / "tests" / "harness" / f"{name}.py" for name in ("ranks", "meter", "report", "plant", "figures")]
    for script in [*scripts(), *harness]:
        mine = [m for m in MISTAKES if ROOT / m.script == script]
        assert len(mine) >= 5, f"{script.name}: {len(mine)} planted mistakes"
        assert all(m.hint and m.source for m in mine)


def test_every_mistake_can_be_planted():
    for mistake in MISTAKES:  # a comment that it changes is in no digest
        assert mistake.planted(TEXTS[mistake.script]) != TEXTS[mistake.script], mistake.name


# --------------------------------------------------------------------------------------------------------- the ledger


@pytest.mark.skipif("PROVE" in os.environ, reason="make prove writes the ledger when it is done")
def test_the_ledger_is_whole_and_current():
    known = read_ledger()
    old = changed(MISTAKES, known)
    chapters = sorted({mistake.script[:2] for mistake in old if mistake.script[:2].isdigit()})
    command = f"make prove CH={chapters[0]}" if len(chapters) == 1 else "make prove"
    names = [f"{mistake.script} {mistake.name}" for mistake in old]
    assert not old, f"not proven as they are now, {len(old)} of {len(MISTAKES)}; `{command}` does it: {names[:5]}"
    unknown = known.keys() - {(mistake.script, mistake.name) for mistake in MISTAKES}
    assert not unknown, f"the ledger knows mistakes that nobody lists: {sorted(unknown)[:5]}"


# ----------------------------------------------------------------------------------------------- other right solutions


@pytest.mark.prove
@pytest.mark.parametrize("folder", [pytest.param(f, marks=pytest.mark.chapter(f[:2])) for f in COURSE.chapters])
def test_right_solutions_that_are_written_differently_pass(folder, judge):
    chapter = COURSE.chapters[folder]
    for script in chapter.scripts:
        for other in script.alternatives:
            text = fences.splice(script.text, {other.exercise: other.body.strip("\n")})
            tests = [COURSE.test_path(chapter, test) for test in script.tests(other.exercise)]
            outcome = judge.run({script.path: text}, tests)
            red = [(result.test, result.message) for result in outcome.results if not result.passed]
            assert outcome.results and not red and not outcome.ended, f"{other.exercise}, {other.why}: {red} {outcome}"
