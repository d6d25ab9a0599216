"""Every formula in a table of a chapter's README, or on a line of its own, is computed from the code it describes."""

import math

import pytest
import readme_formulas
from readme_formulas import displayed, is_formula, quoted, value
from symbols import ROOT

CHAPTERS = sorted(ROOT.glob("[01]*_*/README.md"))
SHOWN = [(readme, *found) for readme in CHAPTERS for found in displayed(readme.read_text())]


def wrong(tie: str, cells: list[str]) -> list[str]:
    """What the README says that the code does not."""
    pairs = getattr(readme_formulas, tie)(lambda **symbols: [value(cell, symbols) for cell in cells])
    return [f"{tie}: {said:,.2f}, not {right:,.2f}" for said, right in pairs if not math.isclose(said, right)]


@pytest.mark.parametrize(
    ("readme", "line", "tie", "cells"), [pytest.param(*found, id=found[2]) for found in SHOWN if found[2]]
)
def test_formulas_of_a_readme_are_those_of_the_code(readme, line, tie, cells):
    assert not wrong(tie, cells), f"{readme.parent.name}, above line {line}"


def test_no_chapter_displays_a_formula_that_nothing_computes():
    untied = [f"{readme.parent.name}:{line}: {cells}" for readme, line, tie, cells in SHOWN if not tie]
    assert not untied, "\n".join(untied)


@pytest.mark.parametrize(
    ("chapter", "words", "symbols", "right"), [pytest.param(*found, id=found[1]) for found in quoted()]
)
def test_a_formula_in_a_sentence_is_that_of_the_code(chapter, words, symbols, right):
    [readme] = ROOT.glob(f"{chapter}_*/README.md")
    assert words.replace("‹", "").replace("›", "") in " ".join(readme.read_text().split())
    formula = words.partition("‹")[2].partition("›")[0]
    assert math.isclose(value(formula, symbols) if symbols else float(formula), right)


def test_each_function_that_computes_formulas_is_named_above_one_table():
    named = [tie for _, _, tie, _ in SHOWN if tie]
    known = [name for name in vars(readme_formulas) if name in readme_formulas.TIES]
    assert sorted(named) == sorted(known)


@pytest.mark.parametrize(
    ("cell", "right"),
    [("2(P−1)/P · G", 75.0), ("8 (t-1)/t n", 42.0), ("2Ψ + 14Ψ/N", 110.0), ("⌈log₂ P⌉α", 4.0), ("*r s*²", 36.0)],
)
def test_a_formula_is_read_from_left_to_right(cell, right):
    symbols = {"P": 4, "G": 50, "t": 4, "n": 7, "Ψ": 20, "N": 4, "α": 2, "r": 4, "s": 3}
    assert is_formula(cell) and value(cell, symbols) == right


@pytest.mark.parametrize(
    "cell", ["a0 b1", "128 x 256", "rs", "1e+04", "70B", "n/a", "q, k", "4 collectives", "B", "17 GB"]
)
def test_names_numbers_and_words_are_no_formulas(cell):
    assert not is_formula(cell)


@pytest.mark.parametrize(("old", "new"), [("(N−1)/N", "(N+1)/N"), ("3·H + 1", "3·H"), ("14Ψ/N", "12Ψ/N")])
def test_a_formula_that_is_off_is_named(old, new):
    tied = [(tie, cells) for _, _, tie, cells in SHOWN if tie and any(old in cell for cell in cells)]
    assert tied
    for tie, cells in tied:
        assert wrong(tie, [cell.replace(old, new) for cell in cells])


def test_a_table_of_formulas_without_a_comment_is_found():
    text = "<!-- formulas: x -->\n| a | 2 P |\n\n| b | 3 P/N |\n\n```\n| c | 4 P |\n```\n\n    W = 5 P\n"
    assert [(tie, cells) for _, tie, cells in displayed(text)] == [("x", ["2 P"]), ("", ["3 P/N"]), ("", ["5 P"])]
