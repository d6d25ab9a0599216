"""V schedules for a chosen memory: V-Min, V-Half, and an automatic one for any limit.

Problem. 1F1B holds p micro-batches on rank 0, ZB-V as much on every rank. If that does not fit, rules such as
"warm-up, steady state, cool-down" do not say what to change.

Idea (arXiv 2405.15362). Take *one* micro-batch alone. It goes down the ranks (F), up again (F, the rank's
second stage), back down (B) and back up (B). The time from its F's to its W's on a rank is our choice. Repeat
this block every six units of time, because F, F, B, B, W, W keep a rank busy for six. Then a rank holds

    (time that the first chunk stays + time that the second stays) / 6        half stages; 1F1B holds 2p on rank 0

    rank 0   F0 . . . . . . f0 B0 . . . . . . b0     V-Min, p = 4: a step from rank to rank takes one unit everywhere.
    rank 1   . F0 . . . . f0 . . B0 . . . . b0 .     Capitals: on the way down; f, b: on the way up.
    rank 2   . . F0 . . f0 . . . . B0 . . b0 . .     Rank 0: F0 stays 16 units, f0 two. Rank 3: 10 and 8. In a V the
    rank 3   . . . F0 f0 . . . . . . B0 b0 . . .     sum is the same on all ranks, and the sum is what is held.

These schedules differ only in how long a step to the next rank takes on each of the four ways:

    ways      F down, F up, B down, B up    a micro-batch stays about  held, of 1F1B's 2p half stages
    V-Min         1,   1,    1,    1                  4p                    1/3
    V-Half        2,   1,    2,    1                  6p                    1/2
    ZB-V          4,   2,    4,    2                 12p                    all of it, and no bubble (schedules.py)

Two blocks six units apart must not use the same unit of a rank. So the block may have to pause where it
changes direction: the code tries pauses, shortest first (the paper has cases of p). W's fill the free units.

If F, B and W take one unit each, this is exact for m > p, with W's (counted here; the paper has the limits):

    V-Min     holds 2 floor((p+1)/3) + 2, two less on every third rank if p mod 3 = 2; bubble 4p-5, 4p-3 if 3 divides p
    V-Half    holds 2 floor(p/2) + 2;                                                  bubble floor(7p/2) - 2 - p mod 2
    1F1B      holds 2p on rank 0, in the same half stages;                             bubble 6 (p-1)

The paper shortens both ends by moving what fits. Here `automatic_v` does so: for measured times and any
limit, each rank runs what is ready. It tries many caps, orders and waits, and keeps the best.

Run it:
    python v_schedules.py [--ranks 4] [--micro-batches 8]         the table above, counted; last line PASS
"""

import heapq
import sys
from collections import deque
from collections.abc import Sequence
from itertools import product

from schedule_search import cheapest
from schedule_simulator import (
    Action,
    B,
    F,
    OneLineParser,
    Schedule,
    ScheduleError,
    Times,
    W,
    check,
    is_rank_zero,
    simulate,
)

# Legend: p ranks, m micro-batches, r this rank. Stage r of rank r is its first chunk, stage 2p-1-r its second.
WAYS = {"v-min": (1, 1, 1, 1), "v-half": (2, 1, 2, 1)}  # units from rank to rank: F down, F up, B down, B up
INTERVAL = 6  # F, F, B, B, W, W


def v_shape(p: int) -> tuple[int, ...]:
    """Stages 0..p-1 go down the ranks, stages p..2p-1 up again: rank 0 holds the first and the last."""
    return (*range(p), *reversed(range(p)))


# ------------------------------------------------------------------------------------------------ the building block


def starts(p: int, ways: Sequence[int], pauses: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """For each rank, when F, F, B, B of micro-batch 0 start. `pauses`: units to wait at the three turns.

    The turns are on rank p-1 (from F down to F up), on rank 0 (from F to B), and on rank p-1 again.
    """
    # --- exercise 6.39: one micro-batch's way through the V, and back ---
    times: list[list[int]] = [[] for _ in range(p)]
    now = 0
    for way, pause, ranks in zip(ways, (0, *pauses), (range(p), range(p)[::-1], range(p), range(p)[::-1]), strict=True):
        now += pause
        for step, rank in enumerate(ranks):
            times[rank].append(now + step * way)
        now += (p - 1) * way + 1  # the last rank of this way is done, and the first of the next
    return [tuple(row) for row in times]
    # --- end exercise ---


def block(p: int, ways: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The starts with the shortest pauses for which blocks six units apart never overlap on a rank."""
    pauses = sorted(product(range(INTERVAL), repeat=3), key=lambda given: (sum(given), max(given), given))
    for given in pauses:
        times = starts(p, ways, given)
        if all(len({time % INTERVAL for time in row}) == 4 for row in times):
            return times
    raise ScheduleError(f"ways of {list(ways)} units meet on some of {p} ranks, whatever the pauses")


def repeated(name: str, p: int, m: int, ways: Sequence[int]) -> Schedule:
    """The block, once for every micro-batch, six units apart, and the W's in the first units that are free."""
    lists = []
    for r, times in enumerate(block(p, ways)):
        down = r
        up = 2 * p - 1 - r
        steps = ((F, down), (F, up), (B, up), (B, down))
        row = {time + INTERVAL * i: Action(*step, i) for i in range(m) for step, time in zip(steps, times, strict=True)}
        actions = []
        waiting = deque()  # B's with a pending W
        for now in range(max(row) + 1):
            if now in row:
                actions.append(row[now])
                if row[now].kind == B:
                    waiting.append(row[now])
            elif waiting:
                done = waiting.popleft()
                actions.append(Action(W, done.stage, done.micro_batch))
        actions += [Action(W, done.stage, done.micro_batch) for done in waiting]
        lists.append(tuple(actions))
    return Schedule(name, p, 2 * p, m, (v_shape(p),), tuple(lists))


def v_min(p: int, m: int, v: int = 2) -> Schedule:
    """A third of 1F1B's memory. With unequal times every block is delayed, so the bubble grows with m."""
    return repeated("v-min", p, m, WAYS["v-min"])


def v_half(p: int, m: int, v: int = 2) -> Schedule:
    """Half of 1F1B's memory. Its blocks have slack for unequal times."""
    return repeated("v-half", p, m, WAYS["v-half"])


def predicted(name: str, p: int) -> tuple[float, tuple[int, ...]]:
    """(bubble, half stages held per rank) of V-Min or V-Half for F = B = W = 1 and more micro-batches than ranks."""
    if name == "v-min":
        held = 2 * ((p + 1) // 3) + 2
        rows = tuple(held - 2 * (p % 3 == 2 and r % 3 == 0) for r in range(p))
        return (0 if p == 1 else 4 * p - 5 + 2 * (p % 3 == 0)), rows
    return 7 * p // 2 - 2 - p % 2, (2 * (p // 2) + 2,) * p


# ------------------------------------------------------------------------------------------------------- automatic

ORDERS = (  # priority among ready actions; chunk 0 is the one of the way down
    ((B, 1), (B, 0), (F, 1), (F, 0)),
    ((B, 0), (B, 1), (F, 1), (F, 0)),
    ((F, 1), (B, 1), (B, 0), (F, 0)),
)


def greedy_v(p: int, m: int, times: Times, limit: int, caps: Sequence[int], order: Sequence, patient: bool) -> Schedule:
    """An idle rank runs the first action of `order` that is ready and fits, or a W if there is none.

    `caps[r]`: how many first chunks rank r may hold, below `limit`. The rest is reserved for second chunks,
    or else ranks would fill with micro-batches of the way down, and none could continue. With one place free
    the oldest can always proceed. `patient`: wait for a result that arrives before a W would end.
    """
    place = v_shape(p)
    c = times.communication
    last = 2 * p - 1
    cost = {(kind, stage): times.of(Action(kind, stage, 0)) for kind in (F, B, W) for stage in range(2 * p)}
    arrived: dict[tuple[str, int], list[float]] = {(kind, stage): [] for kind in (F, B) for stage in range(2 * p)}
    arrived[F, 0] = [0.0] * m
    done = dict.fromkeys(cost, 0)
    waiting: list[deque[int]] = [deque() for _ in range(p)]  # stages of the B's with a pending W
    free = [0.0] * p
    lists = [[] for _ in range(p)]
    events = [(0.0, rank) for rank in range(p)]
    while events:
        now, r = heapq.heappop(events)
        if now < free[r]:
            continue
        stages = (r, last - r)
        first = done[F, r] - done[W, r]
        held = sum(done[F, s] - done[W, s] for s in stages)
        choice = None
        next_arrival = float("inf")
        for kind, chunk in order:
            stage = stages[chunk]
            k = done[kind, stage]
            if kind == F and (held >= limit or (chunk == 0 and (first >= caps[r] or held >= limit - 1))):
                continue
            when = arrived[kind, stage][k] if k < len(arrived[kind, stage]) else float("inf")
            if when <= now:
                choice = kind, stage
                break
            next_arrival = min(next_arrival, when)
        if choice is None and waiting[r] and not (patient and next_arrival - now < cost[W, waiting[r][0]]):
            choice = W, waiting[r].popleft()
        if choice is None:
            continue  # wait for the next arrival
        kind, stage = choice
        lists[r].append(Action(kind, stage, done[choice]))
        done[choice] += 1
        free[r] = end = now + cost[choice]
        heapq.heappush(events, (end, r))
        target = (F, stage + 1) if kind == F else (B, stage - 1)
        if kind == B:
            waiting[r].append(stage)
        if choice == (F, last):
            target = B, last
        if kind != W and target[1] >= 0:
            there = place[target[1]]
            arrived[target].append(end + c * (there != r))
            heapq.heappush(events, (arrived[target][-1], there))
    return Schedule("auto", p, 2 * p, m, (place,), tuple(map(tuple, lists)))


def automatic_v(p: int, m: int, times: Times | None = None, limit: int | None = None) -> Schedule:
    """The cheapest of `greedy_v` with all answers. `limit`: half stages a rank may hold, at least 2; 4p by default."""
    times = times or Times()
    limit = 4 * p if limit is None else limit
    if limit < 2:
        raise ScheduleError(
            f"a limit of {limit}: in a V each micro-batch holds two half stages on a rank; use 2 or more"
        )
    shapes = set()  # about a dozen caps, from a third of the limit up, equal on all ranks or falling
    for most in range(max(1, limit // 3), limit, max(1, limit // 12)):
        shapes |= {tuple(max(1, min(most - fall * r // 2, m)) for r in range(p)) for fall in (0, 1)}
    answers = product(sorted(shapes), ORDERS, (False, True))
    return cheapest((greedy_v(p, m, times, limit, *answer) for answer in answers), times)


# ---------------------------------------------------------------------------------------------------------- the demo


def main() -> int:
    parser = OneLineParser(description="V-Min and V-Half, predicted and counted.", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=4, help="1 to 64")
    parser.add_argument("--micro-batches", type=int, default=None, help="more than ranks; default: 2 * ranks + 2")
    args = parser.parse_args()
    p = args.ranks
    m = 2 * args.ranks + 2 if args.micro_batches is None else args.micro_batches
    if not 1 <= p <= 64:
        parser.error(f"--ranks {p}: use 1 to 64")
    if not p < m <= 256:
        parser.error(f"--micro-batches {m}: use {p + 1} to 256, more than there are ranks")
    if not is_rank_zero():
        return 0
    table = [["schedule", "bubble", "predicted", "held", "predicted", "of 1F1B's"]]
    off = []
    for name, make in (("v-min", v_min), ("v-half", v_half)):
        schedule = make(p, m)
        check(schedule)
        timeline = simulate(schedule)
        bubble, held = predicted(name, p)
        if (timeline.bubble, timeline.peak_activations) != (bubble, held):
            off.append(f"{name}: bubble {timeline.bubble:g}, holds {timeline.peak_activations}; not {bubble:g}, {held}")
        most = max(timeline.peak_activations)
        table.append([name, f"{timeline.bubble:g}", f"{bubble:g}", f"{most}", f"{max(held)}", f"{most / (2 * p):.2f}"])
    for row in table:
        print(row[0].ljust(10), *(cell.rjust(10) for cell in row[1:]))
    print("\n".join(off) if off else "PASS")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
