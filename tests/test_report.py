"""From measurement to README: ratios, the results file, the filled tables."""

import json
import re
import runpy
import subprocess
import sys

import pytest
from harness import report
from harness.computed import computed
from harness.figures import DRAWN_FROM, compact, faults, read_result, stale, write_figure
from harness.layout import CHAPTERS
from harness.module_cache import forget_modules
from harness.report import (
    ROOT,
    Ratio,
    environment,
    fill,
    filled,
    in_rows,
    measured,
    paired,
    ratio_of,
    save,
    table,
    without_certificate,
    write_result,
)

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
    write_result("09_x", "Rings", COLUMNS, ROWS, folder=tmp_path)
    (record,) = measured("09_x", tmp_path)
    assert set(record["environment"]) >= {"device", "torch", "python", "commit", "date"}
    assert record["verified"] is True
    assert all(record["environment"].values())
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        write_result("09_x", "Rings", COLUMNS, [["ring", 1]], folder=tmp_path)


def git(*words):
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.split()


HISTORY = (ROOT / ".git").exists() and git("rev-parse", "--is-shallow-repository") == ["false"]


def test_every_row_of_a_result_is_one_line_and_says_the_same(tmp_path):
    write_result("09_x", "Rings", COLUMNS, ROWS, folder=tmp_path)
    (record,) = measured("09_x", tmp_path)
    run = {"sections": [{"name": "x", "steps": []}], "results": {"09_x": record, "09_y": record | {"rows": []}}}
    text = in_rows(run)
    assert json.loads(text) == run
    assert [json.loads(line.rstrip(",")) for line in text.splitlines() if line.startswith("    [")] == record["rows"]


@pytest.mark.skipif(not HISTORY, reason="needs the whole history of git; reason: this is a copy")
def test_every_result_has_a_birth_certificate():
    replaced = ROOT / "results" / "squashed.txt"  # commits that were there before a squash or a rebase, one per line
    commits = {*git("rev-list", "HEAD"), *(replaced.read_text().split() if replaced.exists() else ())}
    lacking = without_certificate(ROOT / "results", {commit[:10] for commit in commits})
    assert not lacking, f"measure these again from a clean commit: {lacking}"


@pytest.mark.parametrize("lost", ["device", "torch", "python", "date", "commit", "verified"])
def test_a_result_without_one_of_its_facts_is_noticed(lost, tmp_path):
    path = write_result("09_x", "Rings", COLUMNS, ROWS, folder=tmp_path)
    run = json.loads(path.read_text())
    record = run["results"]["09_x"]
    record["environment"]["commit"] = "0123456789"
    save(run, path)
    assert without_certificate(tmp_path, {"0123456789"}) == {}
    del (record if lost == "verified" else record["environment"])[lost]
    save(run, path)
    assert lost in without_certificate(tmp_path, {"0123456789"})["09_x in cpu.json"]


def test_a_result_whose_commit_nobody_has_is_noticed(tmp_path):
    path = write_result("09_x", "Rings", COLUMNS, ROWS, folder=tmp_path)
    run = json.loads(path.read_text())
    for commit in ("9876543210", "0123456789-dirty"):
        run["results"]["09_x"]["environment"]["commit"] = commit
        save(run, path)
        assert f"a commit ({commit})" in without_certificate(tmp_path, {"0123456789"})["09_x in cpu.json"]


def test_from_a_tree_with_changes_nothing_is_written_into_results(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("harness.report.ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "code.py").write_text("1")
    subprocess.run(["git", "-C", tmp_path, "add", "code.py"], check=True)
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", tmp_path, *name, "commit", "-qm", "One"], check=True)
    for name in ("09_x", "09_y"):  # what a benchmark has just written does not count
        assert name in json.loads(write_result(name, "Rings", COLUMNS, ROWS).read_text())["results"]
    for change in ("code.py", "new.py"):
        (tmp_path / change).write_text("2")
        assert environment()["commit"].endswith("-dirty"), change
        write_result("09_z", "Rings", COLUMNS, ROWS)
        assert not measured("09_z", tmp_path / "results"), change
        assert "09_z is not written, the tree has changes" in capsys.readouterr().out
        (tmp_path / change).write_text("1")
        (tmp_path / "new.py").unlink(missing_ok=True)


def test_tables_are_filled_between_the_markers_and_filling_twice_changes_nothing(tmp_path):
    write_result("09_x", "Rings", COLUMNS, ROWS, notes="Two sizes.", folder=tmp_path)
    text = "before\n<!-- results: 09_x -->\nstale words\n<!-- end results -->\nafter\n"
    filled = fill(text, tmp_path)
    assert filled.startswith("before\n") and filled.endswith("after\n") and "stale" not in filled
    assert "| ring | 12,345 | 0.50 (0.40 to 0.60) |" in filled
    assert "| tree | 1.235 | n/a |" in filled
    assert table(*measured("09_x", tmp_path)) in filled
    assert fill(filled, tmp_path) == filled


def test_a_block_without_a_result_is_an_error_not_an_empty_table(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="run the benchmark first"):
        fill("<!-- results: 09_nothing -->\n<!-- end results -->", tmp_path)
    (tmp_path / "README.md").write_text("<!-- results: 09_nothing -->\n<!-- end results -->")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["report.py"])
    assert report.main() == 2
    assert capsys.readouterr().err.startswith("report.py: README.md: results/ has no 09_nothing:")


def test_a_block_without_an_end_is_an_error_and_erases_nothing(tmp_path):
    write_result("09_x", "Rings", COLUMNS, ROWS, folder=tmp_path)
    begin, end = "<!-- results: 09_x -->\n", "<!-- end results -->\n"
    for text in (f"{begin}words\n{begin}{end}", f"{begin}{end}{begin}words\n"):
        with pytest.raises(ValueError, match="one of the blocks 09_x, 09_x has no"):
            fill(text, tmp_path)


def test_what_is_computed_needs_no_file_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("harness.computed.TABLES", {})
    computed("09_x", "Thirds", ["one"], "Of one.")(lambda: [[1 / 3]])
    filled = fill("<!-- results: 09_x -->\nstale\n<!-- end results -->", tmp_path)
    assert "| 0.3333 |" in filled and "Of one. Computed, not measured." in filled and "stale" not in filled
    assert read_result("09_x")["rows"] == [[0.3333333333]], "ten digits: the last ones are the processor's"


def test_the_tables_in_the_readmes_are_those_of_the_results():
    readmes = [ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("*/planner/*.md")]
    stale = [str(path) for path in readmes if filled(path) != path.read_text()]
    assert not stale, f"run `make tables`: {stale}"
    for chapter in CHAPTERS:
        assert report.FILES.search((chapter / "README.md").read_text()), f"{chapter.name}: which files to copy?"


DRAWS = """
WIDTH = 0.5
OTHER = 1


def names(rings):
    return [row[0] for row in rings["rows"]]


def draw(axes, rings):
    axes.bar(names(rings), [row[1] for row in rings["rows"]], WIDTH)
"""


def test_a_figure_is_drawn_from_results_is_repeatable_and_knows_when_it_is_old(tmp_path):
    code = tmp_path / "09_x" / "bench_rings.py"
    code.parent.mkdir()
    code.write_text(DRAWS)
    draw = runpy.run_path(str(code))["draw"]
    write_result("09_x", "Rings", COLUMNS, ROWS, folder=tmp_path / "results")
    first = write_figure("09_x/figures/rings.svg", ["09_x"], draw, root=tmp_path).read_text()
    assert "ring" in first and "drawn from 09_x: " in first and not stale(tmp_path)
    assert write_figure("09_x/figures/rings.svg", ["09_x"], draw, root=tmp_path).read_text() == first
    for change, counts in {("0.5", "0.4"): True, ("row[0]", "row[-1]"): True, ("= 1", "= 2"): False}.items():
        code.write_text("# a comment\n" + DRAWS.replace(*change))
        assert bool(stale(tmp_path)) == counts, change
    code.write_text(DRAWS)
    write_result("09_x", "Rings", COLUMNS, [["ring", 12346, "n/a"]], folder=tmp_path / "results")
    assert stale(tmp_path) == ["09_x/figures/rings.svg is older than 09_x"]
    (tmp_path / "09_x/figures/rings.svg").write_text("<!-- drawn from 09_x: 0123456789abcdef -->")
    assert stale(tmp_path) == ["09_x/figures/rings.svg does not say by which code it was drawn"]
    with pytest.raises(FileNotFoundError, match="no result is called 09_y"):
        write_figure("09_x/figures/rings.svg", ["09_y"], draw, root=tmp_path)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="its ast.unparse writes f-strings otherwise: other digests")
def test_no_figure_is_older_than_its_results():
    assert not stale(), "\n".join(stale())


def drawn_figures():
    for file in sorted(ROOT.glob("[01]*/figures/*.svg")):
        if drawn := DRAWN_FROM.search(file.read_text()):
            yield pytest.param(
                file, drawn, marks=pytest.mark.chapter(file.parts[-3][:2]), id=f"{file.parts[-3][:2]}-{file.stem}"
            )


OURS = ("harness", "conftest", "test_report")


def look_alike(one: str, other: str) -> bool:
    """Two SVG files, whichever processors drew them: the last digits of a coordinate are the processor's.

    An id is a hash of coordinates in all their digits, so ids count by the order in which they are met.
    """

    def parts(svg: str) -> tuple[list[str], list[float]]:
        for number, name in enumerate(dict.fromkeys(re.findall(r"\b[mp][0-9a-f]{10}\b", svg))):
            svg = svg.replace(name, f"id-{number}-")
        number = r"\d+(?:\.\d+)?"
        return re.split(number, svg), [float(found) for found in re.findall(number, svg)]

    (words, numbers), (others, other_numbers) = parts(one), parts(other)
    return words == others and numbers == pytest.approx(other_numbers, rel=0, abs=0.011)


def test_figures_look_alike_when_only_last_digits_and_ids_differ():
    svg = '<path id="p0123456789" d="M 1.5 -2.5"/> <use href="#p0123456789"/> <use href="#mabcdef0123"/>'
    assert look_alike(svg, svg.replace("1.5", "1.51").replace("p0123456789", "pfedcba9876"))
    for wrong in (("1.5", "1.53"), ("-2.5", "2.5"), ("#mabcdef0123", "#p0123456789"), ("<path", "<line")):
        assert not look_alike(svg, svg.replace(*wrong)), wrong


def test_a_figure_has_two_decimals_a_line_for_each_thing_drawn_and_the_names_that_are_used():
    path = '<path id="m1" d="M 0 3.123456 \nL -0.001 2\n"/>'
    group = '<g id="a">\n <g style="s">\n  <use href="#m1" x="1.5"/>\n  <text>1.23456</text>\n </g>\n</g>'
    svg = f"<svg>\n <metadata>x</metadata>\n <defs>\n  {path}\n </defs>\n <!-- b -->{group}\n</svg>"
    defs = '<defs><path id="m1" d="M 0 3.12 L 0 2"/></defs>'
    drawn = '<g style="s"><use href="#m1" x="1.5"/>\n<text>1.23456</text></g>'
    assert compact(svg) == f"<svg>\n{defs}\n{drawn}\n</svg>"


@pytest.mark.prove
@pytest.mark.parametrize(("file", "drawn"), list(drawn_figures()))
def test_every_figure_can_be_drawn_again_and_looks_the_same_neither_empty_nor_cut_off(file, drawn, monkeypatch):
    code = ROOT / drawn["file"]
    monkeypatch.syspath_prepend(str(code.parent))
    monkeypatch.setattr("sys.argv", [str(code)])
    loaded = dict(sys.modules)
    forget_modules(OURS)  # benchmarks set sizes in the scripts that they measure: theirs are not those of the tests
    draw = runpy.run_path(str(code))[drawn["name"]]
    forget_modules(OURS)
    sys.modules.update(loaded)
    shape, size = (tuple(float(n) for n in drawn[key].split("x")) for key in ("shape", "size"))
    before = file.read_text()
    try:  # into its own place, since the file says which code drew it
        where = file.relative_to(ROOT)
        write_figure(where, drawn["sources"].split(", "), draw, shape=tuple(map(int, shape)), size=size)
        assert look_alike(file.read_text(), before)
    finally:
        file.write_text(before)


def test_a_figure_that_is_empty_or_cut_off_is_refused():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2)
    axes[0].plot([1, 2], [1, 2])
    assert faults(figure) == ["axes 1 are empty"]
    axes[1].plot([1], [1])
    assert faults(figure) == []
    axes[1].text(0.5, 1.8, "far above", transform=axes[1].transAxes)
    assert faults(figure) == ["'far above' is cut off"]
    plt.close(figure)
