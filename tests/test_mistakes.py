"""The tests are tested: every listed mistake, planted in a copy of the repository, turns its named test red.

`make test` plants one mistake of chapter 06's core file, `make prove` all mistakes, and other right solutions. What
was caught before, or passed, with everything that decides it as it is now, is tried again only with `make prove
FRESH=1`.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from harness import fences
from harness.layout import CHAPTERS, ROOT, TRAINER, scripts
from harness.mutations import all_mistakes, digest, known, mistakes_of, remember, verdict_of

sys.path.insert(0, str(ROOT / "exercises"))
from checking import Course, same_symptom, symptom
from sandbox import Judge, Limits

HARNESS = [ROOT / "tests" / "harness" / f"{name}.py" for name in ("ranks", "meter", "report", "mutations", "figures")]

# What a loaded machine may report first, because the rank at fault is slower than those that wait for it.
ON_ANOTHER_RANK = "were still running after|gloo/transport/.*Connection (reset|closed) by peer"


def chosen():
    """The mistakes to plant in this run, each with the chapter it is about."""
    picked = all_mistakes() if "PROVE" in os.environ else mistakes_of("06_pipeline_parallel/pipeline_parallel.py")
    return [
        pytest.param(m, marks=pytest.mark.chapter(m.script[:2]), id=f"{Path(m.script).stem}-{m.name}") for m in picked
    ]


@pytest.fixture(scope="module")
def course():
    return Course()


@pytest.fixture(scope="module")
def judge(course):
    with Judge(course.files, Limits(test_cpu_seconds=120, hang=60), trusted=True) as judge:
        yield judge


@pytest.fixture(scope="module")
def caught(request):
    """The digests of the mistakes and right solutions that need not be planted again."""
    return set() if request.config.getoption("--fresh") else known()


@pytest.fixture(scope="module")
def listed():
    return all_mistakes()


def run_planted(mistake, judge):
    """What the named test says in a copy with the mistake in it. A mistaken harness needs a judge of its own."""
    text = mistake.planted((ROOT / mistake.script).read_text())
    if not mistake.script.startswith("tests/harness"):
        return judge.run({mistake.script: text}, [mistake.test], enough=1)
    with Judge(judge.files | {mistake.script: text.encode()}, judge.limits, trusted=True) as mistaken:
        return mistaken.run({}, [mistake.test], enough=1)


@pytest.mark.always("pipeline_parallel-gradients_are_divided_by_micro_batches")
@pytest.mark.parametrize("mistake", chosen())
def test_the_mistake_is_caught_by_the_named_test(mistake, judge, caught):
    try:
        verdict = digest(mistake)
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)
    if verdict in caught:
        return
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
    said = symptom(red[0].message)
    if mistake.symptom and not same_symptom(said, mistake.symptom):
        if re.search(ON_ANOTHER_RANK, said):
            return  # caught, and not remembered: with more time the rank at fault would have spoken
        text = f"symptom = {json.dumps(said, ensure_ascii=False)}"
        pytest.fail(f"{mistake.script}, {mistake.name}: write {text}, or none if it varies", pytrace=False)
    remember(verdict)


@pytest.mark.prove
def test_without_a_mistake_the_same_machinery_says_passed(judge, listed):
    some = list({m.script[:2]: m for m in reversed(listed)}.values())  # the first of each chapter
    outcome = judge.run({}, [mistake.test for mistake in some])
    assert outcome.results and all(result.passed for result in outcome.results), outcome


def test_a_test_that_does_not_exist_is_no_verdict(judge):
    outcome = judge.run({}, ["tests/test_reference.py::test_no_such_claim"])
    assert not [result for result in outcome.results if not result.broken], outcome


def test_every_script_has_its_mistakes_and_each_in_an_exercise_has_a_hint(listed):
    for script in [*scripts(), *HARNESS]:
        mine = [m for m in listed if ROOT / m.script == script]
        assert len(mine) >= 3, f"{script.name}: {len(mine)} planted mistakes"
        strange = [m.name for m in mine if bool(m.hint) != bool(m.exercise)]
        assert not strange, f"{script.name}: {strange}: an exercise's mistakes have a hint, and no others"


@pytest.mark.parametrize("folder", [*(f.name for f in [*CHAPTERS, TRAINER]), "tests"])
def test_every_mistake_can_be_planted(folder, listed):
    """Whatever is said here is one line for each mistake that cannot, with the text that fixes it."""
    here = [mistake for mistake in listed if mistake.script.startswith(f"{folder}/")]
    texts, problems = {m.script: (ROOT / m.script).read_text() for m in here}, []
    for mistake in here:
        try:
            if mistake.planted(texts[mistake.script]) == texts[mistake.script]:
                problems.append(f"mistake {mistake.name} changes nothing in {mistake.script}")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# ----------------------------------------------------------------------------------------------- other right solutions


@pytest.mark.prove
@pytest.mark.parametrize(
    "folder", [pytest.param(f.name, marks=pytest.mark.chapter(f.name[:2])) for f in [*CHAPTERS, TRAINER]]
)
def test_right_solutions_that_are_written_differently_pass(folder, course, judge, caught):
    chapter = course.chapters[folder]
    for script in chapter.scripts:
        for other in script.alternatives:
            text = fences.splice(script.text, {other.exercise: other.body.strip("\n")})
            tests = [course.test_path(chapter, test) for test in chapter.tests(other.exercise)]
            verdict = verdict_of(script.path, text, tests, other.exercise, *sorted(tests))
            if verdict in caught:
                continue
            outcome = course.graded(judge, chapter, other.exercise, {script.path: text})
            red = [(result.test, result.message) for result in outcome.results if not result.passed]
            assert outcome.results and not red and not outcome.ended, f"{other.exercise}, {other.why}: {red} {outcome}"
            remember(verdict)
