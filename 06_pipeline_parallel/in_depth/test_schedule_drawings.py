"""What schedule_drawings.py claims: everything is in the picture, in its true place and length."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import schedule_drawings
from schedule_drawings import NAMES, SHADES, svg, text
from schedules import GALLERY, SCHEDULES, Times, build, draw_all, simulate

HERE = Path(__file__).parent
ENTRIES = {entry[0]: entry for entry in GALLERY} | {"five stages of a rank": ("interleaved", 4, 5, {})}


def timeline_of(name, m, v, options):
    return simulate(build(name, 4, m, v, **options), options.get("times"))


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_every_action_is_a_box_as_long_as_it_takes_and_never_over_another(entry):
    timeline = timeline_of(*entry)
    root = ElementTree.fromstring(svg(timeline))
    colours = {colour: kind for kind, shades in SHADES.items() for colour in shades}
    boxes, scale, dark = {}, 0.0, 0
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        colour = box.get("fill")
        if colour in colours and float(box.get("y")) < 30 + 4 * 28:  # above the legend
            rank, inside = divmod(float(box.get("y")) - 30, 28)
            row = boxes.setdefault(rank, [])
            row.append((float(box.get("x")), inside, float(box.get("width")), colours[colour], colour))
        if colour == "#f1f1f1":  # the ground on which a rank's boxes lie
            scale = float(box.get("width")) / timeline.makespan
    for rank, actions in enumerate(timeline.schedule.actions):
        drawn = sorted(boxes[rank])
        held = [stage for _, stage in timeline.schedule.stages_of(rank)]
        assert len(drawn) == len(actions)
        for i, action in enumerate(actions):
            x, inside, width, kind, colour = drawn[i]
            assert kind == action.kind
            shade = held.index(action.stage) % 4
            dark += shade > 1
            assert colour == SHADES[action.kind][shade]
            assert x == pytest.approx(52 + timeline.start[rank][i] * scale, abs=0.15)
            assert width == pytest.approx((timeline.end[rank][i] - timeline.start[rank][i]) * scale, abs=0.15)
            assert inside == (12 if action.overlapped else 0)
    labels = root.iter("{http://www.w3.org/2000/svg}text")
    assert sum(label.get("fill") == "#fff" for label in labels) == dark, "white letters on dark boxes, and nowhere else"


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_the_text_names_every_action_in_order_and_at_its_time(entry):
    timeline = timeline_of(*entry)
    lines = text(timeline).splitlines()
    spots = []
    for rank, actions in enumerate(timeline.schedule.actions):
        line = lines[1 + rank].split("|")[1]
        found = [(match.start(), match.group()) for match in re.finditer(r"(BW|F|B|W)\d+'*", line)]
        held = [stage for _, stage in timeline.schedule.stages_of(rank)]
        want = [f"{a.kind}{a.micro_batch}" + "'" * held.index(a.stage) for a in actions]
        assert [name for _, name in found] == want
        columns = [(column, a) for (column, _), a in zip(found, actions, strict=True)]
        spots += [(timeline.start[rank][i], column) for i, (column, a) in enumerate(columns) if not a.overlapped]
        assert lines[1 + rank].endswith(f"holds {timeline.peak_activations[rank]}")
    assert len({column / start for start, column in spots if start}) == 1  # characters per unit of time
    assert len({line.rindex("|") for line in lines[1:5]}) == 1
    legend = lines[5]
    kinds = {a.kind for actions in timeline.schedule.actions for a in actions}
    assert {kind for kind, what in NAMES.items() if what in legend} == kinds
    notes = ["overlapped pair" in legend, "second copy" in legend, "next stage" in legend]
    assert notes == ["dualpipe" in entry[0], entry[0] == "dualpipe", entry[2] > 1]


def test_the_figures_of_the_readme_are_those_of_the_schedules(tmp_path):
    draw_all(tmp_path)
    drawn = {file.stem for file in tmp_path.iterdir()}
    assert drawn == set(SCHEDULES), f"a schedule needs a row of GALLERY: {', '.join(drawn ^ set(SCHEDULES))}"
    for file in tmp_path.iterdir():
        kept = HERE.parent / "figures" / file.name
        right = kept.exists() and kept.read_text() == file.read_text()
        assert right, f"figures/{file.name} is old; run python in_depth/schedules.py --draw-all figures"


def test_colours_are_only_there_when_asked_for():
    timeline = simulate(build("1f1b", 2, 2), Times())
    assert "\033" not in text(timeline)
    coloured = text(timeline, colour=True)
    assert "\033[44;30mF0" in coloured and "\033[41;30mBW0" in coloured, "a forward is blue, a backward red"
    assert re.sub(r"\033\[[\d;]+m", "", coloured).split() == text(timeline).split()


def test_the_demo_draws_two_ranks_and_fails_if_the_drawing_leaves_something_out(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["schedule_drawings.py"])
    for code in (0, 1):
        with pytest.raises(SystemExit) as end:
            schedule_drawings.main()
        assert end.value.code == code
        monkeypatch.setattr(schedule_drawings, "text", lambda timeline, colour: "F0 F1 BW0")
    heading, first, second, _, last, *less = capsys.readouterr().out.splitlines()
    assert (heading, last) == ("1f1b: 2 ranks, 2 micro-batches; bubble 3 of 9 units of time", "PASS")
    assert first == "rank 0 |F0 F1       BW0      BW1   | holds 2"
    assert second == "rank 1 |   F0 BW0   F1 BW1         | holds 1"
    assert less == ["F0 F1 BW0", "FAIL: the drawing leaves out ['BW1@0', 'BW1@1']"]
