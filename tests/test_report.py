"""From measurement to README: ratios, the results file, the filled tables."""

import json

import pytest
from harness.figures import stale, write_figure
from harness.report import ROOT, Ratio, fill, paired, ratio_of, table, write_result

COLUMNS, ROWS = ["what", "bytes", "time ratio"], [["ring", 12345, Ratio(0.5, 0.4, 0.6)], ["tree", 1.23456, "n/a"]]


def test_paired_measures_the_ratio_and_alternates_who_goes_first(monkeypatch):
    order, clock = [], [0.0]
    monkeypatch.setattr("harness.report.time.perf_counter", lambda: clock[0])

    def slow():
        order.append("a")
        clock[0] += 3.0

    def fast():
        order.append("b")
        clock[0] += 2.0

    def setup():
        order.append("setup")
        clock[0] += 100.0  # outside the time

    ratio = paired(slow, fast, repeats=4, warmup=1, setup=setup)
    assert ratio == Ratio(1.5, 1.5, 1.5)
    assert [x for x in order if x != "setup"][:6] == ["a", "b", "b", "a", "a", "b"]
    assert order.count("setup") == 10 and order[0] == "setup"


def test_median_and_quartiles():
    assert ratio_of([1.0, 2.0, 3.0, 4.0, 100.0]) == Ratio(3.0, 2.0, 4.0)
    with pytest.raises(ValueError, match="at least 3"):
        paired(int, int, repeats=2)


def test_a_result_names_device_versions_and_commit(tmp_path):
    record = json.loads(write_result("09_x", "Rings", COLUMNS, ROWS, folder=tmp_path).read_text())
    assert set(record["environment"]) >= {"device", "torch", "python", "commit", "date"}
    assert record["verified"] is True
    assert all(record["environment"].values())
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        write_result("09_x", "Rings", COLUMNS, [["ring", 1]], folder=tmp_path)


def test_tables_are_filled_between_the_markers_and_filling_twice_changes_nothing(tmp_path):
    path = write_result("09_x", "Rings", COLUMNS, ROWS, notes="Two sizes.", folder=tmp_path)
    text = "before\n<!-- results: 09_x -->\nstale words\n<!-- end results -->\nafter\n"
    filled = fill(text, tmp_path)
    assert filled.startswith("before\n") and filled.endswith("after\n") and "stale" not in filled
    assert "| ring | 12,345 | 0.50 (0.40 to 0.60) |" in filled
    assert "| tree | 1.235 | n/a |" in filled
    assert table(json.loads(path.read_text())) in filled
    assert fill(filled, tmp_path) == filled


def test_a_block_without_a_result_is_an_error_not_an_empty_table(tmp_path):
    with pytest.raises(ValueError, match="run the benchmark first"):
        fill("<!-- results: 09_nothing -->\n<!-- end results -->", tmp_path)


def test_the_tables_in_the_readmes_are_those_of_the_results():
    readmes = [ROOT / "README.md", *ROOT.glob("*/README.md")]
    stale = [str(path) for path in readmes if fill(path.read_text(), ROOT / "results") != path.read_text()]
    assert not stale, f"run `make tables`: {stale}"


def test_a_figure_is_drawn_from_results_is_repeatable_and_knows_when_it_is_old(tmp_path):
    def draw(axes, rings):
        axes.bar([row[0] for row in rings["rows"]], [row[1] for row in rings["rows"]])

    write_result("09_x", "Rings", COLUMNS, ROWS, folder=tmp_path / "results")
    first = write_figure("09_x/figures/rings.svg", ["09_x"], draw, root=tmp_path).read_text()
    assert "ring" in first and "drawn from 09_x: " in first and not stale(tmp_path)
    assert write_figure("09_x/figures/rings.svg", ["09_x"], draw, root=tmp_path).read_text() == first
    write_result("09_x", "Rings", COLUMNS, [["ring", 12346, "n/a"]], folder=tmp_path / "results")
    assert stale(tmp_path) == ["09_x/figures/rings.svg is older than 09_x"]
    with pytest.raises(FileNotFoundError, match="no result is called 09_y"):
        write_figure("09_x/figures/rings.svg", ["09_y"], draw, root=tmp_path)


def test_no_figure_is_older_than_its_results():
    assert not stale(), "\n".join(stale())
