"""What schedule_drawings.py claims: everything is in the picture, in its true place and length."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from schedule_drawings import SHADES, svg, text
from schedules import GALLERY, SCHEDULES, Times, build, draw_all, simulate

HERE = Path(__file__).parent


def timeline_of(name, m, v, options):
    return simulate(build(name, 4, m, v, **options), options.get("times"))


@pytest.mark.parametrize("entry", GALLERY, ids=lambda entry: entry[0])
def test_every_action_is_a_box_as_long_as_it_takes_and_never_over_another(entry):
    timeline = timeline_of(*entry)
    root = ElementTree.fromstring(svg(timeline))
    colours = {colour: kind for kind, shades in SHADES.items() for colour in shades}
    boxes, scale = {}, 0.0
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        if box.get("fill") in colours and float(box.get("y")) < 30 + 4 * 28:  # above the legend
            rank, inside = divmod(float(box.get("y")) - 30, 28)
            row = boxes.setdefault(rank, [])
            row.append((float(box.get("x")), inside, float(box.get("width")), colours[box.get("fill")]))
        if box.get("fill") == "#f1f1f1":  # the ground on which a rank's boxes lie
            scale = float(box.get("width")) / timeline.makespan
    for rank, actions in enumerate(timeline.schedule.actions):
        drawn = sorted(boxes[rank])
        assert len(drawn) == len(actions)
        for i, action in enumerate(actions):
            x, inside, width, kind = drawn[i]
            assert kind == action.kind
            assert x == pytest.approx(52 + timeline.start[rank][i] * scale, abs=0.15)
            assert width == pytest.approx((timeline.end[rank][i] - timeline.start[rank][i]) * scale, abs=0.15)
            assert inside == (12 if action.overlapped else 0)


@pytest.mark.parametrize("entry", GALLERY, ids=lambda entry: entry[0])
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


def test_the_same_timeline_is_the_same_file():
    assert svg(timeline_of("zb-v", 8, 2, {})) == svg(timeline_of("zb-v", 8, 2, {}))


def test_the_figures_of_the_readme_are_those_of_the_schedules(tmp_path):
    draw_all(tmp_path)
    drawn = {file.stem for file in tmp_path.iterdir()}
    assert drawn == set(SCHEDULES), f"a schedule needs a row of GALLERY: {', '.join(drawn ^ set(SCHEDULES))}"
    for file in tmp_path.iterdir():
        assert (HERE.parent / "figures" / file.name).read_text() == file.read_text(), (
            f"figures/{file.name} is old; run python schedules.py --draw-all figures"
        )


def test_colours_are_only_there_when_asked_for():
    timeline = simulate(build("1f1b", 2, 2), Times())
    assert "\033" not in text(timeline)
    coloured = text(timeline, colour=True)
    assert re.sub(r"\033\[[\d;]+m", "", coloured).split() == text(timeline).split()
