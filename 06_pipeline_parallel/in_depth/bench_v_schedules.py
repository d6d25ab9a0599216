"""What memory buys in a V: the cheapest named schedule and the automatic one under each limit, and the proven optimum.

    python 06_pipeline_parallel/in_depth/bench_v_schedules.py

Nothing here is timed: what a schedule costs is computed, and the same on every machine. First V-Min and V-Half have to
hold, and to cost, what is predicted, and the search has to find the same from two starts; if not, nothing is written.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.report import write_result
from schedule_search import Exhaustive, exhaustive
from schedule_simulator import ScheduleError, Timeline, Times, check, simulate
from schedules import FOLDED, LOOPED, build
from v_schedules import automatic_v, predicted

P, M = 4, 16
TIMES = (Times(1, 1, 1), Times(3, 4, 2, communication=1))


def verify() -> None:
    for name in ("v-min", "v-half"):
        for p in range(1, 9):
            schedule = build(name, p, 2 * p + 2, 2)
            check(schedule)
            timeline = simulate(schedule)
            if (timeline.bubble, timeline.peak_activations) != predicted(name, p):
                sys.exit(
                    f"{name}, {p} ranks: bubble {timeline.bubble}, holds {timeline.peak_activations}, not as predicted"
                )
    for limit in (2, 3, 4):
        times = Times(2, 3, 3, communication=1)
        start = automatic_v(2, 2, times, limit)
        _, cost, _ = exhaustive(2, 2, times, limit, start)
        best, again = Exhaustive(2, 2, times, limit, start.placement[0]).run(start, float("inf"))
        if not cost == again == simulate(best, times).cost <= simulate(start, times).cost:
            sys.exit(f"limit {limit}: the search finds {cost} and {again}")


def named(p: int, m: int, times: Times, limit: int) -> tuple[Timeline, str] | None:
    """The cheapest that fits, of those with two stages on each rank."""
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
        row = [limit, f"{limit / (2 * P):.2f}"]
        for times in TIMES:
            ours = simulate(build("auto", P, M, 2, times=times, limit=limit), times)
            best = named(P, M, times, limit)
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


def main() -> None:
    if "--figures" in sys.argv[1:]:
        return  # it has none
    verify()
    rows, measured = frontier(), optimum(12)
    write_result(
        "06_v_schedules",
        f"Idle time / compute time, two stages on each of {P} ranks, {M} micro-batches",
        [
            "half stages a rank may hold",
            "of what 1F1B holds",
            "cheapest named, F = B = W",
            "auto",
            "cheapest named, F, B, W, message = 3, 4, 2, 1",
            "auto, the same",
        ],
        rows,
        "Simulated. Named: interleaved, breadth-first, llama3, zb-v, v-half, v-min, dualpipe-v, as drawn.",
    )
    write_result(
        "06_v_schedules_optimum",
        "Auto with two stages on each rank against the proven optimum of a V, F, B, W from 2 to 6, messages 0 or 1",
        ["ranks", "micro-batches", "half stages a rank may hold", "optimal", "mean gap", "largest gap"],
        measured,
        "Gap: cost over the cheapest order that exists in a V, minus 1. Optimal: as cheap, or cheaper in loops.",
    )


if __name__ == "__main__":
    main()
