"""The schedules side by side, what memory buys in a V, and how far the automatic scheduler is from the proven optimum.

    python 06_pipeline_parallel/in_depth/bench_schedules.py   verify, simulate, write the results 06_*schedules*, draw
    python 06_pipeline_parallel/in_depth/bench_schedules.py --figures     redraw the figures from results/

Nothing here is timed: the cost of a schedule is computed, so it is the same on every machine. First every
schedule is compared with its published formula, and V-Min and V-Half with their predictions. The search has
to find the same cost from a good start and from a bad one. If one number is wrong, nothing is written.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.figures import write_figure
from harness.report import write_result
from schedule_search import Exhaustive, automatic, exhaustive, schedule_of
from schedule_simulator import B, F, Schedule, ScheduleError, Timeline, Times, W, check, peak_activations, simulate
from schedules import FOLDED, LOOPED, SCHEDULES, build, published
from v_schedules import automatic_v, predicted

CURVES = {"afab": 1, "1f1b": 1, "interleaved": 4, "llama3": 4, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}
P = 8
SIZES = ((2, 4), (3, 4), (4, 4))  # ranks, micro-batches of the search
V_RANKS, V_MICRO_BATCHES = 4, 16
V_TIMES = (Times(1, 1, 1), Times(3, 4, 2, communication=1))
SEARCHES = [  # ranks, micro-batches, times, memory limit
    (2, 3, Times([1, 3], [2, 1], [3, 2], communication=2), 2),
    (2, 4, Times(), 3),
    (3, 4, Times(), 5),
    (3, 3, Times(3, 4, 2), 2),
]


def stages_per_rank(name: str) -> int:
    return 2 if name in LOOPED + FOLDED else 1


def verify() -> None:
    """Check a grid of sizes and times: each schedule is valid, with the published bubble and memory."""
    for name in SCHEDULES:
        for p in (1, 2, 3, 4, 8):
            for m in (1, p, 2 * p, 4 * p + 1, 4 * p + 2):
                for times in (Times(1, 1, 1), Times(3, 3, 2), Times(2, 4, 1)):
                    try:
                        schedule = build(name, p, m, stages_per_rank(name))
                    except ScheduleError:
                        continue  # this schedule does not support the size
                    check(schedule)
                    timeline = simulate(schedule, times)
                    bubble, held = published(schedule, times)
                    if bubble not in (None, timeline.bubble) or held not in (None, timeline.peak_activations):
                        sys.exit(
                            f"{name}, {p} ranks, {m} micro-batches, {times}: bubble {timeline.bubble}, not {bubble}; "
                            f"holds {timeline.peak_activations}, not {held}"
                        )


def verify_searches() -> None:
    """V-Min and V-Half match their predictions; the search finds the same cost from two starts."""
    for name in ("v-min", "v-half"):
        for p in range(1, 9):
            timeline = simulate(build(name, p, 2 * p + 2, 2))
            if (timeline.bubble, timeline.peak_activations) != predicted(name, p):
                sys.exit(f"{name}, {p} ranks: bubble {timeline.bubble}, holds {timeline.peak_activations}")
    for p, m, times, limit in SEARCHES:
        start = schedule_of([[F, B, W] * m] * p, m)
        found = exhaustive(p, m, times, limit)[0], Exhaustive(p, m, times, limit).run(start, float("inf"))[0]
        costs = [simulate(schedule, times).cost for schedule in found]
        if costs[0] != costs[1] or max(map(held, found)) > limit:
            sys.exit(f"{p} ranks, {m} micro-batches, {times}: the search finds {costs} from two starts")


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


def held(schedule: Schedule) -> int:
    return max(map(peak_activations, schedule.actions))


def gaps(cases: int) -> list[list]:
    """The heuristic's cost over the proven optimum, on random times; one row per size and memory limit."""
    rng, rows = random.Random(0), []
    for p, m in SIZES:
        for limit in (p, 2 * p - 1):
            found = []
            for _ in range(cases):
                times = Times(*(rng.randint(2, 6) for _ in range(3)), communication=rng.choice((0, 0, 1)))
                schedule = automatic(p, m, times, limit)
                check(schedule)
                _, optimum, _ = exhaustive(p, m, times, limit)
                cost = simulate(schedule, times).cost
                if cost < optimum or held(schedule) > limit:
                    sys.exit(f"the heuristic costs {cost} under the limit {limit}, the search says {optimum} is best")
                found.append(cost / optimum - 1)
            mean, worst, best = sum(found) / cases, max(found), sum(gap == 0 for gap in found)
            rows.append([p, m, limit, f"{best} of {cases}", f"{mean:.1%}", f"{worst:.1%}"])
    return rows


def named(p: int, m: int, times: Times, limit: int) -> tuple[Timeline, str] | None:
    """The cheapest schedule with two stages per rank that fits the limit, and its name."""
    found = []
    for name in (*FOLDED, *LOOPED):
        try:
            timeline = simulate(build(name, p, m, 2), times)
        except ScheduleError:
            continue
        if max(timeline.peak_activations) <= limit:
            found.append((timeline.cost, name, timeline))
    return min(found)[2::-1][:2] if found else None


def frontier() -> list[list]:
    rows = []
    for limit in (3, 4, 5, 6, 7, 8, 12, 16):
        row = [limit, f"{limit / (2 * V_RANKS):.2f}"]
        for times in V_TIMES:
            ours = simulate(build("auto", V_RANKS, V_MICRO_BATCHES, 2, times=times, limit=limit), times)
            best = named(V_RANKS, V_MICRO_BATCHES, times, limit)
            if max(ours.peak_activations) > limit or (best and ours.cost > best[0].cost):
                sys.exit(f"limit {limit}: auto holds {ours.peak_activations} and costs {ours.cost}")
            row += [
                "none fits" if best is None else f"{best[1]} {best[0].bubble_ratio:.1%}",
                f"{ours.bubble_ratio:.1%}",
            ]
        rows.append(row)
    return rows


def optimum(cases: int) -> list[list]:
    rng, rows = random.Random(0), []
    for p, m, limit in ((2, 2, 2), (2, 2, 3), (2, 2, 4), (2, 3, 2), (3, 2, 3), (3, 2, 4)):
        gaps = []
        for _ in range(cases):
            times = Times(*(rng.randint(2, 6) for _ in range(3)), communication=rng.choice((0, 0, 1)))
            found = build("auto", p, m, 2, times=times, limit=limit)
            start = automatic_v(p, m, times, limit)
            _, best, _ = exhaustive(p, m, times, limit, start)
            cost = simulate(found, times).cost
            if found.placement == start.placement and cost < best:
                sys.exit(f"auto costs {cost}, and the search says that {best} is the best in a V")
            gaps.append(cost / best - 1 if cost > best else 0.0)
        best = f"{sum(gap == 0 for gap in gaps)} of {cases}"
        rows.append([p, m, limit, best, f"{sum(gaps) / cases:.1%}", f"{max(gaps):.1%}"])
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
    verify_searches()
    table, curve = side_by_side(P, 4 * P), curves(P)
    searched, v, searched_v = gaps(40), frontier(), optimum(12)
    columns = ["schedule", "stages per rank", "bubble", "by formula", "of compute time", "stage activations held"]
    write_result(
        "06_schedules",
        f"{P} ranks, {4 * P} micro-batches, F = B = W = 1 unit of time in one stage",
        [*columns, "in micro-batches of the whole model", "copies of the model"],
        table,
        "Simulated. Where a rank has two stages they are half as thick, except DualPipe's; so compare the percentages, "
        "not the units of time. An overlapped pair is counted here as long as its parts: DualPipe without what it was "
        "made for.",
        computed=True,
    )
    write_result(
        "06_schedules_bubble",
        f"Bubble and memory against micro-batches, {P} ranks",
        ["schedule", "micro-batches", "bubble of compute time", "micro-batches of the whole model held"],
        curve,
        computed=True,
    )
    write_result(
        "06_schedules_auto",
        "The automatic scheduler against the proven optimum, F, B, W from 2 to 6, messages 0 or 1",
        ["ranks", "micro-batches", "memory limit", "optimal", "mean gap", "largest gap"],
        searched,
        "Gap: cost over the cheapest order that exists, minus 1.",
        computed=True,
    )
    write_result(
        "06_v_schedules",
        f"Idle time / compute time, two stages on each of {V_RANKS} ranks, {V_MICRO_BATCHES} micro-batches",
        [
            "half stages a rank may hold",
            "of what 1F1B holds",
            "cheapest named, F = B = W",
            "auto",
            "cheapest named, F, B, W, message = 3, 4, 2, 1",
            "auto, the same",
        ],
        v,
        "Simulated. Named: interleaved, breadth-first, llama3, zb-v, v-half, v-min, dualpipe-v, as drawn.",
        computed=True,
    )
    write_result(
        "06_v_schedules_optimum",
        "Auto with two stages on each rank against the proven optimum of a V, F, B, W from 2 to 6, messages 0 or 1",
        ["ranks", "micro-batches", "half stages a rank may hold", "optimal", "mean gap", "largest gap"],
        searched_v,
        "Gap: cost over the cheapest order that exists in a V, minus 1. Optimal: as cheap, or cheaper in loops.",
        computed=True,
    )
    figures()


if __name__ == "__main__":
    main()
