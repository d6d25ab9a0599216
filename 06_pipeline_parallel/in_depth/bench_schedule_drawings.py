"""The drawings of the README: every action in its place, the same bytes each time; and what drawing costs.

    python 06_pipeline_parallel/in_depth/bench_schedule_drawings.py   verify, time, write results/ and figures/*.svg
    python 06_pipeline_parallel/in_depth/bench_schedule_drawings.py --figures    verify and draw

First every drawing is read back: each action has to be there once, where the timeline says and as long as it says, in
the picture as in the text; and a second process, in which Python's sets and dictionaries hash differently, has to make
the same files. Only then is anything written. Seconds are those of one drawing over those of one simulation.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.report import paired, write_result
from schedule_drawings import SHADES, svg, text
from schedule_simulator import Timeline
from schedules import GALLERY, build, draw_all, simulate

HERE = Path(__file__).resolve().parent
RANKS = 4  # as in draw_all
SVG = "{http://www.w3.org/2000/svg}"


def gallery() -> dict[str, Timeline]:
    return {name: simulate(build(name, RANKS, m, v, **more), more.get("times")) for name, m, v, more in GALLERY}


def boxes_of(picture: str) -> tuple[list[list[tuple[float, float, str, str]]], float]:
    """(left, width, kind, micro-batch) of every box with a number, by rank; and pixels of the longest row."""
    colours = {colour: kind for kind, shades in SHADES.items() for colour in shades}
    rows: list[list[tuple[float, float, str, str]]] = []
    length, box = 0.0, None
    for shape in ElementTree.fromstring(picture):
        if shape.tag == SVG + "rect" and shape.get("fill") == "#f1f1f1":  # the ground of the next rank's boxes
            rows.append([])
            length = float(shape.get("width", 0))
        elif shape.tag == SVG + "rect":
            box = shape if shape.get("fill") in colours else None
        elif box is not None:  # a text right behind a coloured box: its number
            if shape.get("text-anchor") == "middle":
                left, width = float(box.get("x", 0)), float(box.get("width", 0))
                rows[-1].append((left, width, colours[box.get("fill", "")], shape.text or ""))
            box = None
    return rows, length


def verify(name: str, timeline: Timeline) -> None:
    """Ends the program unless every action is in the drawings once, in its place."""
    picture, lines = svg(timeline), text(timeline).splitlines()[1:]
    rows, length = boxes_of(picture)
    scale = length / timeline.makespan  # pixels per unit of time; x is rounded to a tenth of a pixel
    if len(rows) != RANKS:
        sys.exit(f"{name}: the picture has {len(rows)} rows for {RANKS} ranks")
    for rank, actions in enumerate(timeline.schedule.actions):
        where = f"{name}, rank {rank}"
        ends = zip(timeline.start[rank], timeline.end[rank], strict=True)
        want = sorted((b, e, a.kind, str(a.micro_batch)) for a, (b, e) in zip(actions, ends, strict=True))
        got = sorted(((x - 52) / scale, (x - 52 + w) / scale, kind, label) for x, w, kind, label in rows[rank])
        if len(got) != len(want):
            sys.exit(f"{where}: {len(got)} boxes for {len(want)} actions")
        for a, b in zip(sorted(got, key=place), sorted(want, key=place), strict=True):
            if a[2:] != b[2:] or not max(abs(a[0] - b[0]), abs(a[1] - b[1])) * scale < 0.2:
                sys.exit(
                    f"{where}: {b[2]}{b[3]} from {b[0]} to {b[1]} is drawn as {a[2]}{a[3]}, {a[0]:.2f} to {a[1]:.2f}"
                )
        words = re.findall(r"(?:BW|F|B|W)\d+", lines[rank])
        if words != [f"{a.kind}{a.micro_batch}" for a in actions]:
            sys.exit(f"{where}: the text says {' '.join(words)}")


def place(box: tuple[float, float, str, str]) -> tuple[float, str, str]:
    return round(box[0], 1), *box[2:]


def verify_bytes(folder: Path) -> None:
    """Ends the program unless another process draws the same files."""
    draw_all(folder / "here")
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    command = [sys.executable, HERE / "schedules.py", "--draw-all", folder / "there"]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    for file in (folder / "here").iterdir():
        if file.read_bytes() != (folder / "there" / file.name).read_bytes():
            sys.exit(f"{file.name} is another file when it is drawn again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="only verify and draw")
    only_figures = parser.parse_args().figures
    drawn = gallery()
    for name, timeline in drawn.items():
        verify(name, timeline)
    with tempfile.TemporaryDirectory() as folder:
        verify_bytes(Path(folder))
    if not only_figures:
        rows = []
        for name, timeline in drawn.items():
            times = next(more.get("times") for other, _, _, more in GALLERY if other == name)
            again = lambda timeline=timeline, times=times: simulate(timeline.schedule, times)  # noqa: E731
            ratios = [paired(lambda f=f, t=timeline: f(t), again, repeats=15) for f in (svg, text)]
            rows.append([name, sum(map(len, timeline.schedule.actions)), len(svg(timeline).encode()), *ratios])
        write_result(
            "06_schedule_drawings",
            f"The drawings of this page, {RANKS} ranks: what drawing costs, in simulations of the same schedule",
            ["schedule", "actions", "bytes of the SVG", "SVG / simulation, seconds", "text / simulation, seconds"],
            rows,
            "Read back first: every action is in each drawing once, in its place and as long as it takes.",
        )
    draw_all(HERE.parent / "figures")


if __name__ == "__main__":
    main()
