"""The cheat sheet: every formula against the planner or the chapter, every combination against the trainer."""

import math
import re
from functools import cache

import front_figure
import pytest
import train_figure
from cheat_sheet import PAGE, formulas_of, one_page, page, symbols, techniques
from formulas import evaluate, mathml, names, show
from referees import MODEL, REFEREES, Config, Layout, UsageError, Verdict, parse
from symbols import place
from symbols import symbols as symbols_of

ENTRIES = {entry["key"]: entry for entry in techniques()}


def wrong_cells(entry: dict, verdict: Verdict) -> list[str]:
    """Each formula of a row that is not what the referee says."""
    wrong = []
    for cell in ("memory", "sent", "bubble"):
        given = entry.get(cell, [])
        given = [{"what": "idle", "formula": given}] if isinstance(given, str) else given
        right = getattr(verdict, cell)
        if len(given) != len(right):
            wrong.append(f"{cell}: {len(given)} formulas, {len(right)} in the referee")
        for formula, value in zip(given, right, strict=False):
            found = evaluate(formula["formula"], verdict.symbols)
            if not math.isclose(found, value, rel_tol=1e-12):
                wrong.append(f"{cell}, {formula['what']}: {show(formula['formula'])} is {found:,.0f}, not {value:,.0f}")
    return wrong


@pytest.mark.parametrize("key", REFEREES)
def test_every_formula_gives_the_bytes_of_the_planner_or_of_the_chapter(key):
    assert not wrong_cells(ENTRIES[key], REFEREES[key]())


def test_the_page_that_prints_has_every_technique_every_formula_and_each_symbol_once():
    text = one_page()
    for entry in ENTRIES.values():
        assert f"**{entry['name']}**" in text and all(mathml(formula) in text for formula in formulas_of(entry))
    told = text.rpartition("\n\n</div>")[0].rpartition("\n\n")[2]
    used = {name for entry in ENTRIES.values() for formula in formulas_of(entry) for name in names(formula)}
    assert all(told.count(f"{mathml(name)} ") == 1 for name in used)


def test_every_row_with_a_formula_has_a_referee():
    assert {key for key, entry in ENTRIES.items() if formulas_of(entry)} == REFEREES.keys()


def test_a_formula_that_is_off_by_a_factor_is_named():
    entry = ENTRIES["zero2"] | {"sent": [{"what": "a step", "formula": "(g + w) * Psi * (N - 1) / N"}]}
    [line] = wrong_cells(entry, REFEREES["zero2"]())
    assert line.startswith("sent, a step: (g + w) Ψ (N − 1)/N is ")
    assert wrong_cells(entry | {"memory": []}, REFEREES["zero2"]())[0].startswith("memory: 0 formulas, 1")


def layout_of(options: str) -> Layout:
    config = Config(**{"seq_len": 64, "global_batch": 64, "micro_batch": 2} | parse(options.split()))
    return Layout.of(config, MODEL, 2 * config.pp * config.cp * config.tp)


@pytest.mark.parametrize("key", ENTRIES)
def test_the_trainer_takes_what_is_said_to_combine_and_refuses_what_is_said_to_exclude(key):
    for _, options in ENTRIES[key]["combines"]:
        layout_of(options)
    for what, options in ENTRIES[key]["excludes"]:
        with pytest.raises(UsageError) as refused:
            layout_of(options)
        named = re.findall(r"--[a-z-]+", options)
        assert any(option in str(refused.value) for option in named), (what, str(refused.value))


def test_every_symbol_is_explained_and_every_explanation_is_used():
    used = {name for entry in ENTRIES.values() for formula in formulas_of(entry) for name in names(formula)}
    assert used == symbols().keys()


def test_every_cell_leads_to_a_line_that_has_what_it_names():
    for entry in ENTRIES.values():
        for field, name in entry.items():
            if field.endswith(("_at", "_test")):
                path, symbol, line = place(name)
                assert symbol.rpartition(".")[2] in lines_of(path)[line - 1], (name, line)


@cache
def lines_of(path: str) -> list[str]:
    return (PAGE.parents[1] / path).read_text().splitlines()


@pytest.mark.parametrize(
    "name", ["03_zero/zero.py:Zero4", "03_zero/zorro.py:Zero1", "03_zero/test_zero.py::test_nothing"]
)
def test_a_name_that_is_not_there_is_an_error(name):
    with pytest.raises(LookupError, match=name.replace(":", ".")):
        place(name)


def test_methods_are_found_by_class(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("N = 1\n\n\nclass A:\n    def f(self):\n        pass\n\n\n@cache\ndef f():\n    pass\n")
    assert symbols_of(file) == {"N": 1, "A": 4, "A.f": 5, "f": 10}


def test_the_page_in_the_repository_is_the_one_that_is_made_now():
    assert PAGE.read_text() == page(), "run python book/cheat_sheet.py"


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        ("a * (b + c) / d", "a (b + c)/d"),
        ("a - (b - c)", "a − (b − c)"),
        ("a / (b / c)", "a/(b/c)"),
        ("2 * (a * b)", "2 a b"),
        ("min(a - 1, 2) * Psi", "min(a − 1, 2) Ψ"),
    ],
)
def test_a_formula_as_text_keeps_its_meaning(formula, text):
    assert show(formula) == text


def test_a_formula_as_mathml_has_fractions_and_a_name_for_the_ear():
    set_ = mathml("a * (N - 1) / N")
    assert set_.startswith('<math aria-label="a (N − 1)/N"><mfrac>')
    assert set_.count("<mrow>") == set_.count("</mrow>")
    with pytest.raises(ValueError, match="cannot be"):
        mathml("a ** 2")


def test_a_formula_knows_no_functions_but_min_and_max():
    with pytest.raises(NameError):
        evaluate("open", {})
    assert evaluate("max(min(a, 2), b)", {"a": 3, "b": 1}) == 2


def test_the_figure_of_the_front_page_is_the_one_that_is_drawn_now():
    assert front_figure.PAGE.read_text() == front_figure.drawing(), "run python book/front_figure.py"
    assert train_figure.PAGE.read_text() == train_figure.drawing(), "run python book/train_figure.py"


def test_the_figure_shows_who_cuts_what():
    table = front_figure.table()
    quarters = {name: [column for column, part in row.items() if round(part, 3) == 0.25] for name, row in table.items()}
    states = ["weights", "gradients", "optimizer states"]
    assert quarters["data parallel"] == []
    assert [quarters[f"ZeRO-{stage}"] for stage in (1, 2, 3)] == [states[2:], states[1:], states]
    assert quarters["tensor + sequence"][:3] == states
    assert quarters["context: ring"] == ["activations"]


FRONT = {"data parallel": "data", "ZeRO 1, 2": "zero2", "ZeRO 3": "zero3", "tensor": "tensor", "experts": "expert"}
LARGE = 10**12  # ranks: the front page leaves the factor (ranks - 1)/ranks out


@pytest.mark.parametrize("name", FRONT)
def test_what_the_front_page_says_a_rank_sends_is_what_the_cheat_sheet_says(name):
    [line] = re.findall(rf"(?m)^\| {re.escape(name)} .*$", (PAGE.parents[1] / "README.md").read_text())
    said = re.match(r"(\d+) ((?:\w )*\w)(?= per layer|$)", line.strip("| ").split("|")[-1].strip())
    values = {
        "Psi": 7.0,
        "L": 3,
        "T": 5,
        "H": 11,
        "K": 2,
        "M": 1,
        "b": 1,
        "g": 1,
        "w": 1,
        "N": LARGE,
        "t": LARGE,
        "e": LARGE,
    }
    front = math.prod([int(said[1]), *(values["Psi" if letter == "Ψ" else letter] for letter in said[2].split())])
    times = values["L"] if "L" in said[2].split() else 1  # of all layers
    assert front == pytest.approx(times * evaluate(ENTRIES[FRONT[name]]["sent"][0]["formula"], values), rel=1e-9)
