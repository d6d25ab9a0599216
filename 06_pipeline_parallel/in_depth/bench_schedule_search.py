"""How good the automatic scheduler is: its cost over the proven optimum, on random times.

    python 06_pipeline_parallel/in_depth/bench_schedule_search.py

Nothing here is timed: what a schedule costs is computed, and the same on every machine. First the search has to find
what trying every order finds, from a good start and from a bad one, and the heuristic has to reach the published
optimum of equal times; if not, nothing is written.
"""

import random
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.report import write_result
from schedule_search import Exhaustive, automatic, exhaustive, schedule_of
from schedule_simulator import B, F, Schedule, ScheduleError, Times, W, check, peak_activations, simulate

SIZES = ((2, 4), (3, 4), (4, 4))  # ranks, micro-batches
TINY = [  # ranks, micro-batches, times, memory limit: few enough orders to try them all
    (2, 3, Times(1, 1, 1), 2),
    (2, 3, Times(3, 4, 2, communication=1), 3),
    (2, 3, Times([1, 3], [2, 1], [3, 2], communication=2), 2),
    (3, 2, Times(2, 5, 1, communication=1), 2),
    (3, 2, Times([1, 2, 4], [3, 1, 2], [2, 2, 1]), 2),
]


SMALL = [(2, 4, Times(), 3), (3, 4, Times(), 5), (3, 3, Times(3, 4, 2), 2)]  # too many orders, but soon searched


def orders(m: int) -> list[list[str]]:
    """Every order of one rank in which the k-th B comes after the k-th F, and the k-th W after the k-th B."""
    words = [""]
    for _ in range(3 * m):
        words = [word + kind for word in words for kind in (F, B, W)]
        words = [w for w in words if m >= w.count(F) >= w.count(B) >= w.count(W)]
    return [list(word) for word in words]


def held(schedule: Schedule) -> int:
    return max(map(peak_activations, schedule.actions))


def cheapest(p: int, m: int, times: Times, limit: int) -> float:
    """The optimum, by trying everything."""
    best = float("inf")
    for words in product(orders(m), repeat=p):
        schedule = schedule_of(list(words), m)
        if held(schedule) <= limit:
            try:
                best = min(best, simulate(schedule, times).cost)
            except ScheduleError:
                continue  # the lists wait for each other
    return best


def verify() -> None:
    for p, m, times, limit in TINY + SMALL:
        one_by_one = schedule_of([[F, B, W] * m] * p, m)
        found = {"the search": exhaustive(p, m, times, limit)[0]}
        found["the search from a bad start"] = Exhaustive(p, m, times, limit).run(one_by_one, float("inf"))[0]
        costs = [simulate(schedule, times).cost for schedule in found.values()]
        want = cheapest(p, m, times, limit) if (p, m, times, limit) in TINY else min(costs)
        for who, schedule in found.items():
            check(schedule)
            cost = simulate(schedule, times).cost
            if cost != want or held(schedule) > limit:
                sys.exit(f"{p} ranks, {m} micro-batches, {times}: {who} finds {cost}, and {want} is possible")
    for p in (2, 3, 4, 8):
        for limit, bubble in ((p, p - 1), (2 * p - 1, 0)):  # ZB-H1 and ZB-H2 (arXiv 2401.10241, table 2) for F = B = W
            schedule = automatic(p, 2 * p, Times(), limit)
            check(schedule)
            if simulate(schedule).bubble != bubble or held(schedule) > limit:
                sys.exit(f"{p} ranks, limit {limit}: bubble {simulate(schedule).bubble}, and {bubble} is possible")


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


def main() -> None:
    if "--figures" in sys.argv[1:]:
        return  # it has none
    verify()
    rows = gaps(40)
    write_result(
        "06_schedules_auto",
        "The automatic scheduler against the proven optimum, F, B, W from 2 to 6, messages 0 or 1",
        ["ranks", "micro-batches", "memory limit", "optimal", "mean gap", "largest gap"],
        rows,
        "Gap: cost over the cheapest order that exists, minus 1.",
    )


if __name__ == "__main__":
    main()
