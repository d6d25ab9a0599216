"""What it costs to check and to simulate a schedule, by the number of its actions and of its ranks.

    python 06_pipeline_parallel/in_depth/bench_schedule_simulator.py

A scheduler that tries many orders simulates each of them, and a trainer checks its schedule before it starts.
So the cost per action should not grow with their number. First the simulator has to agree with the longest
paths through the dependencies, computed independently, and the checker has to reject every schedule with an
action missing, doubled or misplaced. Only then is anything timed. Seconds are ratios within this run.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.report import Ratio, option_given, paired, write_result
from schedule_simulator import BW, B, F, Schedule, ScheduleError, Times, W, check, peak_activations, simulate
from schedules import build

KINDS = (("1f1b", 1), ("interleaved", 2), ("zb-v", 2))
START = 8, 16  # ranks and micro-batches of the schedule that the others are measured by


def actions(schedule: Schedule) -> int:
    return sum(map(len, schedule.actions))


def longest_paths(schedule: Schedule, times: Times) -> list[list[float]]:
    """When each action ends: the longest path to it. For schedules without overlapped pairs.

    Written from the docstring of schedule_simulator.py, without its `needs`.
    """
    found = {}
    for rank, row in enumerate(schedule.actions):
        for i, action in enumerate(row):
            found |= dict.fromkeys(((kind, action.stage, action.micro_batch) for kind in action.kind), (rank, i))

    @cache
    def end(rank: int, i: int) -> float:
        action = schedule.actions[rank][i]
        s, m, before = action.stage, action.micro_batch, [(rank, i - 1)] if i else []
        if action.kind == F and s > 0:
            before.append(found[F, s - 1, m])
        if action.kind in (B, BW):
            before.append(found[F, s, m])
            if s < schedule.stages - 1:
                before.append(found[B, s + 1, m])
        if action.kind == W:
            before.append(found[B, s, m])
        start = max((end(*at) + (times.communication if at[0] != rank else 0) for at in before), default=0)
        return start + {F: times.f, B: times.b, W: times.w, BW: times.b + times.w}[action.kind]

    return [[end(rank, i) for i in range(len(row))] for rank, row in enumerate(schedule.actions)]


def verify_times() -> None:
    for name, v in KINDS:
        for p, m in ((1, 2), (2, 4), (4, 8)):
            for times in (Times(), Times(3, 4, 2, communication=1)):
                schedule = build(name, p, m, v)
                check(schedule)
                timeline, want = simulate(schedule, times), longest_paths(schedule, times)
                if [list(row) for row in timeline.end] != want:
                    sys.exit(f"{name}, {p} ranks, {m} micro-batches, {times}: ends at {timeline.end}, not {want}")
                idle = [
                    row[-1] - begin[0] - work
                    for row, begin, work in zip(want, timeline.start, timeline.work, strict=True)
                ]
                if timeline.bubble < max(idle) or timeline.bubble != timeline.cost - min(timeline.work):
                    sys.exit(f"{name}, {p} ranks: bubble {timeline.bubble}, and a rank idles for {max(idle)}")
        if name == "1f1b" and [peak_activations(row) for row in build(name, 4, 8).actions] != [4, 3, 2, 1]:
            sys.exit("1F1B on 4 ranks holds 4, 3, 2 and 1 activations, and these are counted otherwise")


def verify_refusals() -> None:
    """The checker rejects every list with an action left out, doubled, or moved to the front."""
    for name, v in KINDS:
        good = build(name, 2, 4, v)
        for rank, row in enumerate(good.actions):
            for i, action in enumerate(row):
                rest = row[:i] + row[i + 1 :]
                broken = {"missing": rest, "there twice": (*row, action)}
                if action.kind != F:  # a backward before its own forward
                    broken["the first"] = (action, *rest)
                for how, wrong in broken.items():
                    lists = (*good.actions[:rank], wrong, *good.actions[rank + 1 :])
                    try:
                        check(replace(good, actions=lists))
                    except ScheduleError:
                        continue
                    sys.exit(f"{name}: {action} on rank {rank} is {how}, and the checker does not notice")


def cost(work: Callable[[Schedule], object], schedule: Schedule, unit: Schedule) -> Ratio:
    """Seconds per action in `schedule` over seconds per action in `unit`. One measurement runs as many units
    as have the same number of actions, so both take about equally long."""
    times = max(1, round(actions(schedule) / actions(unit)))

    def many() -> None:
        for _ in range(times):
            work(unit)

    ratio = paired(lambda: work(schedule), many, repeats=5, warmup=1)
    exact = times * actions(unit) / actions(schedule)  # they need not divide
    return Ratio(ratio.median * exact, ratio.low * exact, ratio.high * exact)


def measure() -> list[list]:
    rows = []
    for name, v in KINDS:
        unit = build(name, *START, v)
        for p, m in (START, (8, 64), (8, 256), (32, 64)):
            schedule = build(name, p, m, v)
            ratios = [cost(work, schedule, unit) if (p, m) != START else 1.0 for work in (simulate, check)]
            both = paired(lambda s=schedule: check(s), lambda s=schedule: simulate(s), repeats=5, warmup=1)
            rows.append([name, p, m, actions(schedule), *ratios, both])
    return rows


def main() -> None:
    option_given()
    verify_times()
    verify_refusals()
    rows = measure()
    write_result(
        "06_schedule_simulator",
        f"Seconds per action, in those of the same schedule on {START[0]} ranks with {START[1]} micro-batches",
        ["schedule", "ranks", "micro-batches", "actions", "simulate", "check", "check / simulate, seconds"],
        rows,
        "Medians of pairs, and quartiles. A check simulates once, and then passes every message with blocking sends.",
    )


if __name__ == "__main__":
    main()
