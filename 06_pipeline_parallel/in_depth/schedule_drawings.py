"""Draw what a schedule does: one row per rank, time to the right; as text for the terminal, as SVG for the README.

Problem. A list of actions gives the order, but a bubble is time. Only a drawing to scale shows it.

Idea. Draw the simulated timeline (`schedule_simulator.simulate`), never the schedule itself, so the drawing
cannot show an order that does not run. All schedules are drawn the same way:

    rank 0 |F0 F1       BW0      BW1   | holds 2    letters  what: F, B, W, or BW for both halves at once
    rank 1 |   F0 BW0   F1 BW1         | holds 1    number   the micro-batch
                                                    '        the rank's second stage (or DualPipe's second copy), '' ...
    length = time;  F3+BW1' = an overlapped pair    holds    the most (stage, micro-batch) activations at once

A kind has one colour in the terminal. In the SVG a later stage of the same rank is a darker shade of it, and an
overlapped pair is one box with the forward above and the backward below.

Run it:
    python schedule_drawings.py                 the two-rank schedule above; the last line is PASS
    python schedules.py --schedule zb-v --ranks 4 --micro-batches 8 --stages-per-rank 2 --svg zb-v.svg
"""

import math
import sys
from html import escape

from schedule_simulator import BW, Action, B, F, OneLineParser, Schedule, Timeline, W, blocks, is_rank_zero, simulate

# Four shades of each kind, from the rank's first stage to its fourth (the fifth starts again). The last two are dark
# enough to need white letters.
SHADES = {
    F: ("#b5d4f4", "#6ea8e0", "#2f6fb3", "#1b4677"),
    B: ("#fbd9a5", "#f0ab4f", "#b8741a", "#7a4a0c"),
    W: ("#c4e6bd", "#86c77b", "#3f8a3a", "#24561f"),
    BW: ("#f6c1c0", "#e58583", "#b94442", "#792321"),
}
ANSI = {F: 44, B: 43, W: 42, BW: 41}
NAMES = {F: "F forward", B: "B backward, input", W: "W backward, weights", BW: "BW backward, both"}


def chunk_of(schedule: Schedule, rank: int, action: Action) -> int:
    """Which of the rank's stages the action works on: 0 for the first one it holds."""
    return schedule.stages_of(rank).index((schedule.direction(action.micro_batch), action.stage))


def placed(timeline: Timeline, rank: int) -> list[tuple[float, float, list[Action]]]:
    """(start, end, actions) in the row of a rank; an overlapped pair is one entry with two actions."""
    result, i = [], 0
    # --- exercise 6.34: what lies where in a row ---
    for block in blocks(timeline.schedule.actions[rank]):
        result.append((timeline.start[rank][i], timeline.end[rank][i], block))
        i += len(block)
    # --- end exercise ---
    return result


def heading(timeline: Timeline) -> str:
    schedule = timeline.schedule
    v = schedule.stages * len(schedule.placement) // schedule.ranks
    stages = "" if v == 1 else f", {v} stages per rank"
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.micro_batches} micro-batches{stages}; bubble "
        f"{timeline.bubble:g} of {timeline.cost:g} units of time"
    )


def kinds_in(schedule: Schedule) -> list[str]:
    return [kind for kind in (F, B, W, BW) if any(a.kind == kind for row in schedule.actions for a in row)]


def text(timeline: Timeline, colour: bool = False) -> str:
    """The timeline in characters, lengths rounded to whole ones."""
    schedule = timeline.schedule
    rows = []
    for rank in range(schedule.ranks):
        row = []
        for start, end, block in placed(timeline, rank):
            label = "+".join(f"{a.kind}{a.micro_batch}" + "'" * chunk_of(schedule, rank, a) for a in block)
            row.append((start, end, label, block[-1].kind))
        rows.append(row)
    timed = [(end - start, len(label)) for row in rows for start, end, label, _ in row if end > start]
    scale = math.ceil(max((length + 1) / time for time, length in timed))  # characters per unit: every label fits
    lines = [heading(timeline)]
    for rank, row in enumerate(rows):
        line, column = "", 0
        for start, end, label, kind in row:
            first = round(start * scale)
            last = round(end * scale)
            cell = label.ljust(last - first - 1)[: max(0, last - first - 1)]
            line += " " * (first - column) + (f"\033[{ANSI[kind]};30m{cell}\033[0m " if colour else f"{cell} ")
            column = max(first + len(cell) + 1, last)
        line += " " * (round(timeline.makespan * scale) - column)
        lines.append(f"rank {rank} |{line}| holds {timeline.peak_activations[rank]}")
    pair = [", + an overlapped pair"] if any(a.overlapped for row in schedule.actions for a in row) else [""]
    second = ", ' the second copy of the model" if len(schedule.placement) == 2 else ", ' the rank's next stage"
    many = len(schedule.stages_of(0)) > 1
    lines.append("       " + ", ".join(NAMES[kind] for kind in kinds_in(schedule)) + second * many + pair[0])
    return "\n".join(lines)


def svg(timeline: Timeline) -> str:
    """The timeline as an SVG picture; the same timeline gives the same file, byte for byte."""
    schedule = timeline.schedule
    height = 24
    left = 52
    shortest = min(
        end - start for rank in range(schedule.ranks) for start, end, _ in placed(timeline, rank) if end > start
    )
    scale = min(20 / shortest, 1100 / timeline.makespan)  # pixels per unit of time
    width = left + timeline.makespan * scale + 74
    bottom = 30 + schedule.ranks * (height + 4)
    parts = []

    def box(x: float, y: float, wide: float, high: float, kind: str, shade: int, label: str) -> None:
        size = 11 if high > 16 and wide >= 14 else 8
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{SHADES[kind][shade % 4]}" '
            'stroke="#fff" stroke-width="0.8"/>'
        )
        if label:
            ink = "#000" if shade % 4 < 2 else "#fff"
            parts.append(
                f'<text x="{x + wide / 2:.1f}" y="{y + high / 2 + size * 0.36:.1f}" font-size="{size}" fill="{ink}" '
                f'text-anchor="middle">{label}</text>'
            )

    def words(x: float, y: float, content: str, size: int = 12) -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(content)}</text>')

    words(4, 17, heading(timeline), 13)
    for rank in range(schedule.ranks):
        y = 30 + rank * (height + 4)
        words(4, y + 16, f"rank {rank}")
        parts.append(
            f'<rect x="{left}" y="{y}" width="{timeline.makespan * scale:.1f}" height="{height}" fill="#f1f1f1"/>'
        )
        for start, end, block in placed(timeline, rank):
            x = left + start * scale
            wide = (end - start) * scale
            high = height / len(block)
            for i, action in enumerate(block):
                shade = chunk_of(schedule, rank, action)
                box(x, y + i * high, wide, high, action.kind, shade, str(action.micro_batch))
            if len(block) == 2:
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height}" fill="none" stroke="#000"/>'
                )
        words(left + timeline.makespan * scale + 8, y + 16, f"holds {timeline.peak_activations[rank]}")
    x = float(left)
    y = bottom + 10
    many = len(schedule.stages_of(0))
    for kind in kinds_in(schedule):
        for shade in range(min(many, 4)):
            box(x, y, 14, 14, kind, shade, "")
            x += 15
        words(x + 4, y + 11, NAMES[kind])
        x += 22 + 6.2 * len(NAMES[kind])
    if many > 1:
        note = (
            "darker: the second copy of the model" if len(schedule.placement) == 2 else "darker: the rank's next stage"
        )
        words(x, y + 11, note)
        x += 16 + 6.2 * len(note)
    if any(action.overlapped for row in schedule.actions for action in row):
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="14" height="14" fill="none" stroke="#000"/>')
        words(x + 19, y + 11, "framed: an overlapped pair")
        x += 190
    width = max(width, x)
    total = bottom + 32
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {total}" width="{width:.0f}" '
            f'height="{total}" font-family="sans-serif">',
            f'<rect width="{width:.0f}" height="{total}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Draw 1F1B for two ranks and two micro-batches, and check that every action is in the drawing."""
    OneLineParser(description="Draws a schedule of two ranks; see schedules.py for the others.").parse_args()
    lists = [[Action(kind, rank, i) for kind, i in row] for rank, row in enumerate((
        ((F, 0), (F, 1), (BW, 0), (BW, 1)),
        ((F, 0), (BW, 0), (F, 1), (BW, 1)),
    ))]  # fmt: skip
    timeline = simulate(Schedule("1f1b", 2, 2, 2, ((0, 1),), tuple(map(tuple, lists))))
    drawing = text(timeline, colour=False)
    missing = [str(a) for rank, row in enumerate(lists) for a in row if a.kind + str(a.micro_batch) not in drawing]
    if is_rank_zero():
        print(text(timeline, colour=sys.stdout.isatty()))
        print("PASS" if not missing else f"FAIL: the drawing leaves out {missing}")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
