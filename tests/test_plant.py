"""Planted mistakes and the ledger of those that were caught: that it notices whatever could change a verdict."""

import dataclasses

import pytest
from harness import plant
from harness.plant import LedgerError, Mistake, changed, digest, needed_by, read_ledger, write_ledger

SCRIPT = """x = 1
# --- exercise 1.1: more ---
x += 1
# --- end exercise ---
print(x)
"""
MISTAKE = Mistake("a.py", "x", "1.1", "x += 1", "x += 2", "test_a.py::test_it", "One more.", "known")


def test_a_mistake_is_planted_in_one_place_inside_its_exercise_or_is_an_error():
    assert MISTAKE.planted(SCRIPT) == SCRIPT.replace("x += 1", "x += 2")
    with pytest.raises(ValueError, match="occurs 0 times"):
        dataclasses.replace(MISTAKE, old="these words are not in it").planted(SCRIPT)
    with pytest.raises(ValueError, match="occurs 2 times"):
        dataclasses.replace(MISTAKE, old="1\n").planted(SCRIPT)
    with pytest.raises(ValueError, match=r"says exercise '9.9' but lies in '1.1'"):
        dataclasses.replace(MISTAKE, exercise="9.9").planted(SCRIPT)
    with pytest.raises(ValueError, match=r"says exercise '1.1' but lies in ''"):
        dataclasses.replace(MISTAKE, old="print(x)").planted(SCRIPT)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """a imports b, which imports c and names d.cu; test_a imports a; nobody imports e, which imports b."""
    texts = {
        "a.py": "import b",
        "b.py": "import c\nSOURCE = 'd.cu'",
        "c.py": "X = 1",
        "d.cu": "int d;",
        "e.py": "import b",
    }
    for name, text in (texts | {"test_a.py": "from a import x"}).items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(plant, "ROOT", tmp_path)
    monkeypatch.setattr(plant, "_modules", lambda: {file.stem: file for file in tmp_path.glob("*.py")})
    monkeypatch.setattr(plant, "find", lambda name: tmp_path / name)
    forget()
    yield tmp_path
    forget()


def forget():
    for remembered in (plant._read, plant._digests_of, plant._path_of):
        remembered.cache_clear()


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
    for field in ("exercise", "old", "new", "caught_by"):
        assert digest(dataclasses.replace(MISTAKE, **{field: "test_a.py::other"})) != first, field
    assert digest(dataclasses.replace(MISTAKE, hint="Another.")) == first
    assert [file.name for file in needed_by(repository / "a.py")] == ["a.py", "b.py", "c.py", "d.cu"]


def test_words_about_the_code_do_not_change_a_digest_and_everything_else_does(repository):
    def with_b(text):
        (repository / "b.py").write_text(text)
        forget()
        return digest(MISTAKE)

    code = "import c\n\n\ndef f():\n{}    return 'd.cu'\n"
    plain = with_b(code.format(""))
    assert (
        with_b('"""The lesson.\n\nMore.\n"""\n\n' + code.format('    """What.\n\n    Why.\n    """\n    # how\n\n'))
        == plain
    )
    assert with_b(code.format("    # --- exercise 2.3: other words ---\n")) == plain
    assert with_b(code.format("").replace("def f", "@pytest.mark.turn(3)\n@pytest.mark.prove\ndef f")) == plain
    assert with_b(code.format("").replace("def f", "@pytest.mark.skip\ndef f")) != plain
    for line in (
        "    x = 1\n",
        '    x = """\n# a\n"""\n',
        '    x = """\n# b\n"""\n',
        '    f"""\n# {c}\n"""\n',
        "    1  # why\n",
    ):
        other = with_b(code.format(line))
        assert other != plain, line
        plain = other


def test_a_ledger_that_was_tampered_with_or_is_of_another_version_is_noticed_in_one_line(repository):
    file = repository / "ledger.txt"
    some = [dataclasses.replace(MISTAKE, name=name, new=name) for name in "zyx"]
    write_ledger({(m.script, m.name): (digest(m), "loss: 2 instead of 1") for m in some}, file)
    assert [line.split()[1] for line in file.read_text().splitlines()[1:]] == ["x", "y", "z"], "sorted"
    assert changed(some, read_ledger(file)) == []
    file.write_text(file.read_text().replace(digest(some[1]), "0123456789abcdef"))
    assert changed(some, read_ledger(file)) == [some[1]], "a digest was edited"
    write_ledger({(m.script, m.name): (digest(m), "") for m in some[:2]}, file)
    assert changed(some, read_ledger(file)) == [some[2]], "a mistake is missing"
    bad = {"# ledger 0\n": "begins with '# ledger 0'", f"{plant.heading()}\na b\n": "none of script", "": "nothing"}
    for text, words in bad.items():
        file.write_text(text)
        with pytest.raises(LedgerError, match=words) as refusal:
            read_ledger(file)
        assert "\n" not in str(refusal.value)
