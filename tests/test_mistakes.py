"""The tests are tested: every listed mistake, planted in a copy of the repository, turns its named test red."""

import re

import pytest
from harness.house import ROOT, scripts
from harness.plant import Mistake, Runner, all_mistakes, copy_repository, plant

MISTAKES = all_mistakes()


@pytest.fixture(scope="module")
def runner():
    process = Runner()
    yield process
    process.close()


def run_planted(mistake, copy, runner):
    """What the named test says in a copy with the mistake in it. A mistaken harness needs a runner of its own."""
    copy_repository(copy)
    plant(mistake, copy)
    if mistake.script.is_relative_to("tests/harness"):
        runner = Runner(copy / "tests" / "harness")
        try:
            return runner.run(copy, mistake.test)
        finally:
            runner.close()
    return runner.run(copy, mistake.test)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.script.stem}-{m.name}")
def test_the_mistake_is_caught_by_the_named_test(mistake, runner, tmp_path):
    result = run_planted(mistake, tmp_path / "copy", runner)
    assert result["outcome"] == "failed", f"{mistake.caught_by} {result['outcome']}: {result['message']}"
    # Red for the right reason: the check spoke, not the interpreter about a typing error in the planted lines.
    wrong_reason = re.search(r"\b(SyntaxError|NameError|ImportError|ModuleNotFoundError)\b", result["message"])
    assert not wrong_reason, result["message"]


def test_without_a_mistake_the_same_machinery_says_passed(runner, tmp_path):
    copy = copy_repository(tmp_path / "copy")
    for test in {m.script.parent: m.test for m in reversed(MISTAKES)}.values():  # the first of each folder
        assert runner.run(copy, test)["outcome"] == "passed", test


def test_a_test_that_does_not_exist_is_broken_not_red(runner, tmp_path):
    copy = copy_repository(tmp_path / "copy")
    assert runner.run(copy, "tests/test_oracle.py::test_no_such_claim")["outcome"] == "broken"


def test_a_mistake_that_no_longer_fits_its_script_is_an_error(tmp_path):
    copy = copy_repository(tmp_path / "copy")
    script = MISTAKES[0].script
    good = dict(script=script, name="x", exercise="", new="", caught_by="", hint="", source="")
    with pytest.raises(ValueError, match="occurs 0 times"):
        plant(Mistake(old="these words are not in it", **good), copy)
    with pytest.raises(ValueError, match="says exercise '9.9' but lies in"):
        plant(MISTAKES[0].__class__(**(MISTAKES[0].__dict__ | {"exercise": "9.9"})), copy)


def test_every_chapter_script_has_its_mistakes_and_each_has_a_hint_and_a_source():
    for script in scripts():
        mine = [m for m in MISTAKES if ROOT / m.script == script]
        assert len(mine) >= 5, f"{script.name}: {len(mine)} planted mistakes"
        assert all(m.hint and m.source for m in mine)
