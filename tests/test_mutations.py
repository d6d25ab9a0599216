"""Planted mistakes: that they are found in a script that was edited, and what could change a verdict."""

import dataclasses
import subprocess

import pytest
from harness import mutations
from harness.mutations import Mistake, digest, known, needed_by, remember
from harness.programs import error_from

SCRIPT = """x = 1
# --- exercise 1.1: more ---
x += 1
# --- end exercise ---
print(x)
"""
MISTAKE = Mistake("a.py", "x", "x += 1", "x += 2", "test_a.py::test_it", "One more.")


def test_a_mistake_is_planted_in_one_place_or_is_an_error_and_knows_its_exercise():
    assert MISTAKE.planted(SCRIPT) == SCRIPT.replace("x += 1", "x += 2")
    with pytest.raises(ValueError, match="occurs 0 times"):
        dataclasses.replace(MISTAKE, old="these words are not in it").planted(SCRIPT)
    with pytest.raises(ValueError, match="occurs 2 times"):
        dataclasses.replace(MISTAKE, old="1\n").planted(SCRIPT)
    for old, exercise in (("x += 1", "1.1"), ("print(x)", ""), ("x = 1", "")):
        assert dataclasses.replace(MISTAKE, old=old).lying_in(SCRIPT).exercise == exercise


EDITED = """x = 1
# --- exercise 1.1: more ---
while x < 9:
    if x:  # two
        total = run(x,
            "# 1")  # what is run
# --- end exercise ---
"""


def test_comments_and_layout_of_a_script_may_change_and_a_mistake_is_still_planted():
    old = "    if x:\n        total = run(x, '# 1')  # as it was\n".replace("'", '"')
    new = "    if not x:\n        total = 1\n"
    mistake = dataclasses.replace(MISTAKE, old=old, new=new)
    assert mistake.planted(EDITED) == EDITED.replace(EDITED[EDITED.index("    if") : EDITED.index("# --- end")], new)
    deeper = dataclasses.replace(MISTAKE, old="if x: # 2", new="if not x:")
    assert deeper.planted(EDITED) == EDITED.replace("if x:  # two", "if not x:")
    goes_on = dataclasses.replace(MISTAKE, old="if x:  # tw", new="if not x:")
    assert goes_on.planted(EDITED) == deeper.planted(EDITED)
    shallow = dataclasses.replace(MISTAKE, old=old.replace("    if", "  if"), new="  if not x:\n    pass\n")
    assert "\n    if not x:\n      pass\n# --- end" in shallow.planted(EDITED)
    with pytest.raises(ValueError, match="occurs 2 times"):
        dataclasses.replace(MISTAKE, old="if  x:").planted(EDITED.replace("while x < 9", "if x"))
    with pytest.raises(ValueError, match="occurs 0 times"):
        dataclasses.replace(MISTAKE, old='run(x, "#1")').planted(EDITED)
    kernel = "// --- exercise 1.1: more ---\nx += 1;  /* how\n   much */ y = x // 2;\n  / 3;\n// --- end exercise ---\n"
    cuda = dataclasses.replace(MISTAKE, script="a.cu", old="x += 1; y = x / 3;", new="y = x;")
    assert cuda.planted(kernel) == "// --- exercise 1.1: more ---\ny = x;\n// --- end exercise ---\n"


def test_a_mistake_that_is_not_found_is_one_line_with_the_text_that_would_mend_it():
    mistake = dataclasses.replace(MISTAKE, old="        total = run(x)", new="        total = run(x) * total")
    with pytest.raises(ValueError) as refusal:
        mistake.planted(EDITED.replace('total = run(x,\n            "# 1")', "subtotal = run(x)"))
    offer = 'old = "        subtotal = run(x)  # what is run", new = "        subtotal = run(x) * subtotal"'
    assert str(refusal.value) == f"mistake x: its `old` occurs 0 times in a.py; perhaps {offer}"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """a imports b, which imports c and names d.cu; test_a imports a; nobody imports e, which imports b."""
    texts = {
        "a.py": f"import b\n{SCRIPT}",
        "b.py": "import c\nSOURCE = 'd.cu'",
        "c.py": "X = 1",
        "d.cu": "int d;",
        "e.py": "import b",
    }
    for name, text in (texts | {"test_a.py": "from a import x"}).items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "_modules", lambda: {file.stem: file for file in tmp_path.glob("*.py")})
    monkeypatch.setattr(mutations, "find", lambda name: tmp_path / name)
    monkeypatch.setattr(mutations, "shared_build", frozenset)
    forget()
    yield tmp_path
    forget()


def forget():
    for function in (mutations._near, mutations._digest_of, mutations._digests_of, mutations._path_of):
        function.cache_clear()


def test_a_digest_changes_with_the_script_the_test_and_what_they_import_or_name(repository):
    first = digest(MISTAKE)
    forget()
    assert digest(MISTAKE) == first
    for name in ("a.py", "b.py", "c.py", "d.cu", "test_a.py", "e.py"):
        before = (repository / name).read_text()
        (repository / name).write_text(before + "\nint_e;")
        forget()
        assert (digest(MISTAKE) != first) == (name != "e.py"), name
        (repository / name).write_text(before)
    forget()
    changes = {"new": "x += 3", "caught_by": "test_a.py::other", "symptom": "3, but should be 2"}
    for field, value in changes.items():
        assert digest(dataclasses.replace(MISTAKE, **{field: value})) != first, field
    assert digest(dataclasses.replace(MISTAKE, hint="Another.")) == first
    assert [file.name for file in needed_by(repository / "a.py")] == ["a.py", "b.py", "c.py", "d.cu"]


def test_words_about_the_code_do_not_change_a_digest_and_everything_else_does(repository):
    def with_b(text, kernel="int d;"):
        (repository / "b.py").write_text(text)
        (repository / "d.cu").write_text(kernel)
        forget()
        return digest(MISTAKE)

    code = "import c\n\n\ndef f():\n{}    return 'd.cu'\n"
    plain = with_b(code.format(""))
    told = code.format('    """What.\n\n    Why.\n    """\n    # how\n\n')
    assert with_b(f'"""The lesson, also of \'e.py\'.\n"""\n\n{told}  # d') == plain
    assert with_b(code.format("    # --- exercise 2.3: other words ---\n")) == plain
    assert with_b(code.format(""), "/* d */ int\n d;  // why") == plain
    assert with_b(code.format(""), "int e;") != plain
    assert with_b(code.format("").replace("def f", "@pytest.mark.prove\n@pytest.mark.always('2-4')\ndef f")) == plain
    assert with_b(code.format("").replace("def f", "@pytest.mark.skip\ndef f")) != plain
    for line in ("    x = 1\n", '    x = """\n# a\n"""\n', '    x = """\n# b\n"""\n', '    f"""\n# {c}\n"""\n'):
        other = with_b(code.format(line))
        assert other != plain, line
        plain = other


@pytest.mark.prove
def test_the_tests_for_a_change_are_those_that_import_it_and_for_a_text_those_that_cross_chapters():
    def names(*changed):
        return {file.name for file in mutations.tests_for({mutations.ROOT / name for name in changed})}

    assert {"test_schedules.py", "test_train.py"} <= names("06_pipeline_parallel/in_depth/schedules.py")
    assert "test_zero.py" not in names("06_pipeline_parallel/in_depth/schedules.py")
    assert {"test_folders.py", "test_glossary.py"} <= names("03_zero/README.md") < names("conftest.py")
    assert {"test_zero.py", "test_nets.py"} <= names("03_zero/README.md", "03_zero/zero.py")
    assert "test_zero.py" not in names("03_zero/README.md")


def test_what_has_changed_is_what_differs_from_main_or_is_new(tmp_path, monkeypatch):
    monkeypatch.setattr(mutations, "ROOT", tmp_path)

    assert "has to be installed" in error_from(LookupError, mutations.changed_files), "and not: nothing has changed"

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path, check=True)

    git("init", "-q", "-b", "main")
    for step, name in enumerate(("a b.py", "b.py", "c.py", "d.py")):
        (tmp_path / name).write_text("1")
        if step < 3:
            git("add", ".")
            git("commit", "-qm", name)
        if step == 0:
            git("checkout", "-qb", "branch")
    (tmp_path / "b.py").write_text("2")
    assert sorted(file.name for file in mutations.changed_files()) == ["b.py", "c.py", "d.py"]
    (tmp_path / "a b.py").write_text("2")
    assert tmp_path / "a b.py" in mutations.changed_files()


def test_verdicts_are_remembered_and_none_are_where_there_is_no_cache(tmp_path):
    file = tmp_path / "cache" / "verdicts"
    assert known(file) == set()
    remember("12", file)
    remember("34", file)
    assert known(file) == {"12", "34"}


def test_mistakes_of_a_script_that_is_not_beside_their_list_are_an_error(repository, monkeypatch):
    mistake = '[["b.py".mistake]]\nname = "two"\nold = "1"\nnew = "2"\ncaught_by = "test_b.py::test_b"\n'
    (repository / "01_a" / "in_depth").mkdir(parents=True)
    (repository / "01_a" / "in_depth" / "b.py").write_text("x = 1")
    (repository / "01_a" / "in_depth" / "mistakes.toml").write_text(mistake)
    monkeypatch.setattr(mutations, "homes", lambda root: {"01_a"})
    [found] = mutations.all_mistakes()
    assert (found.script, found.name) == ("01_a/in_depth/b.py", "two")
    (repository / "01_a" / "mistakes.toml").write_text(mistake)
    with pytest.raises(ValueError, match="01_a/mistakes.toml lists mistakes in b.py, which is not beside it"):
        mutations.all_mistakes()
