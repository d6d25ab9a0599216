"""What the papers say about the schedules of schedules.py: their bubbles and how many activations they hold.

The formulas are those listed at the top of schedules.py, with their sources. Here stands *when* each holds.
"""

from schedule_simulator import F, Schedule, Times
from v_schedules import predicted

LOOPED = ("interleaved", "breadth-first", "llama3")  # schedules with any number of stages per rank


def published(schedule: Schedule, times: Times) -> tuple[float | None, tuple[int, ...] | None]:
    """(bubble, activations held per rank) by the formulas at the top of this file; None where none applies.

    For stages that all take the same times, and messages that take none.
    """
    name, p, m, v = schedule.name, schedule.ranks, schedule.micro_batches, schedule.stages // schedule.ranks
    f, b, w = times.f, times.b, times.w
    if times.communication or not all(isinstance(time, (int, float)) for time in (f, b, w)):
        return None, None
    filled = f + b + w if times.pair is None else times.pair  # the time of an F&B pair
    ranks = range(p)
    if name == "naive":
        return (p - 1) * m * (f + b + w), (1,) * p
    if name in ("afab", "1f1b") or (name in LOOPED and v == 1):
        one_by_one = name in ("1f1b", "interleaved", "llama3")
        return (p - 1) * (f + b + w), tuple(min(m, p - r) if one_by_one else m for r in ranks)
    if name == "breadth-first":
        return ((p - 1) * (f + b + w) if m >= p else None), (m * v,) * p
    if name in ("interleaved", "llama3"):
        n = p if name == "interleaved" else size_of_first_group(schedule)
        if n < p or 0 < m % n < p:  # a group below p: the ranks wait at its turns
            return None, None
        return (p - 1) * (f + b + w), tuple(min(m * v, (v - 1) * n + 2 * (p - r) - 1) for r in ranks)
    if name == "zb-h1":
        return ((p - 1) * (f + b - w) if m >= p and w <= min(f, b) else None), (min(m, p),) * p
    if name == "zb-h2":
        return ((p - 1) * (f + b - 2 * w) if m >= 2 * p - 1 and w <= min(f, b) else None), (min(m, 2 * p - 1),) * p
    if name == "zb-v":
        return (0 if f == b == w and m >= 2 * p - 1 else None), ((2 * p,) * p if m >= 2 * p - 1 else None)
    if name in ("v-min", "v-half"):
        bubble, held = predicted(name, p)
        return (bubble * f if f == b == w and m > p else None), (held if m > p else None)
    if name in ("dualpipe", "dualpipe-v"):
        half = p if name == "dualpipe-v" else p // 2  # "PP/2" of the paper counts stages; its B is our b + w
        return ((half - 1) * (filled + b - 2 * w) if f == b and w <= f else None), (2 * half + 1,) * p
    return None, None  # auto


def size_of_first_group(schedule: Schedule) -> int:
    """How many micro-batches rank 0 forwards through its first stage before it turns to the second."""
    forwards = [action.stage for action in schedule.actions[0] if action.kind == F]
    return next((i for i, stage in enumerate(forwards) if stage != forwards[0]), len(forwards))
