"""The schedules side by side: bubble against micro-batches, and memory against bubble.

    python 06_pipeline_parallel/in_depth/bench_schedules.py   verify, simulate, write results/06_schedules*, draw
    python 06_pipeline_parallel/in_depth/bench_schedules.py --figures     draw again from the results that are there

Nothing here is timed: what a schedule costs is computed, and the same on every machine. First every schedule is checked
and compared with its published formula; if one number is off, nothing is written.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.figures import write_figure
from harness.report import write_result
from schedules import (
    FOLDED,
    LOOPED,
    SCHEDULES,
    ScheduleError,
    Times,
    build,
    check,
    published,
    simulate,
)

CURVES = {"afab": 1, "1f1b": 1, "interleaved": 4, "llama3": 4, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}
P = 8


def stages_per_rank(name: str) -> int:
    return 2 if name in LOOPED + FOLDED else 1


def verify() -> None:
    """Every schedule on a grid of sizes and times: valid, and its bubble and memory as published."""
    for name in SCHEDULES:
        for p in (1, 2, 3, 4, 8):
            for m in (1, p, 2 * p, 4 * p + 1, 4 * p + 2):
                for times in (Times(1, 1, 1), Times(3, 3, 2), Times(2, 4, 1)):
                    try:
                        schedule = build(name, p, m, stages_per_rank(name))
                    except ScheduleError:
                        continue  # a size this schedule does not take
                    check(schedule)
                    timeline = simulate(schedule, times)
                    bubble, held = published(schedule, times)
                    if bubble not in (None, timeline.bubble) or held not in (None, timeline.peak_activations):
                        sys.exit(
                            f"{name}, {p} ranks, {m} micro-batches, {times}: bubble {timeline.bubble}, not {bubble}; "
                            f"holds {timeline.peak_activations}, not {held}"
                        )


def side_by_side(p: int, m: int) -> list[list]:
    rows = []
    for name in SCHEDULES:
        more = {"in_flight": 2 * p} if name == "llama3" else {}  # with p in flight it is interleaved
        schedule = build(name, p, m, stages_per_rank(name), **more)
        timeline = simulate(schedule)
        bubble, _ = published(schedule, Times())
        copies, held = len(schedule.placement), max(timeline.peak_activations)
        ours, theirs = f"{timeline.bubble:g}", "none" if bubble is None else f"{bubble:g}"
        share = [f"{timeline.bubble_ratio:.1%}", held, f"{held / schedule.stages:.2f}", copies]
        label = f"{name}, {2 * p} in flight" if more else name
        rows.append([label, schedule.stages * copies // p, ours, theirs, *share])
    return rows


def curves(p: int) -> list[list]:
    rows = []
    for name, v in CURVES.items():
        for m in range(p, 8 * p + 1, 2):
            try:
                schedule = build(name, p, m, v)
            except ScheduleError:
                continue
            timeline = simulate(schedule)
            held = max(timeline.peak_activations) / schedule.stages
            rows.append([name if v == 1 else f"{name}, v={v}", m, round(timeline.bubble_ratio, 6), round(held, 6)])
    return rows


def draw(axes, result) -> None:
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name, m, ratio, held in result["rows"]:
        lines.setdefault(name, []).append((m, ratio, held))
    left, right = axes
    for i, (name, points) in enumerate(lines.items()):
        micro_batches, ratio, held = zip(*points, strict=True)
        style = dict(color=f"C{i}", linewidth=5.5 - 0.6 * i, label=name)  # where lines coincide, both can be seen
        left.plot(micro_batches, ratio, **style)
        right.plot(micro_batches, held, **style)
    left.set(
        xlabel="micro-batches",
        ylabel="idle time / compute time",
        title=f"Idle time, {P} ranks, F = B = W",
        ylim=(-0.02, 0.9),
    )
    right.set(xlabel="micro-batches", title="Activations held by the fullest rank", ylim=(0, 3))
    right.set_ylabel("micro-batches through the whole model")
    left.legend(fontsize=8)


def figures() -> None:
    write_figure("06_pipeline_parallel/figures/bubble.svg", ["06_schedules_bubble"], draw, shape=(1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="only draw again")
    if parser.parse_args().figures:
        figures()
        return
    verify()
    table, curve = side_by_side(P, 4 * P), curves(P)
    columns = ["schedule", "stages per rank", "bubble", "by formula", "of compute time", "stage activations held"]
    write_result(
        "06_schedules",
        f"{P} ranks, {4 * P} micro-batches, F = B = W = 1 unit of time in one stage",
        [*columns, "in micro-batches of the whole model", "copies of the model"],
        table,
        "Simulated. Where a rank has two stages they are half as thick, except DualPipe's; so compare the percentages, "
        "not the units of time. An overlapped pair is counted here as long as its parts: DualPipe without what it was "
        "made for.",
    )
    write_result(
        "06_schedules_bubble",
        f"Bubble and memory against micro-batches, {P} ranks",
        ["schedule", "micro-batches", "bubble of compute time", "micro-batches of the whole model held"],
        curve,
    )
    figures()


if __name__ == "__main__":
    main()
