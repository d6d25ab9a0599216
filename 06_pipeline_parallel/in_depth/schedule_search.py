"""The automatic zero-bubble scheduler: a heuristic for measured times, and a search that finds the optimum.

Problem. Schedules drawn by hand assume that F, B and W take equally long and that messages are free. Measured
times differ: the core of attention has no weights, the last stage computes the loss, and messages take time.

Idea (Zero Bubble, arXiv 2401.10241, section 3.1). Simulate, and let an idle rank choose its next action among
the ready ones, under a limit on stored activations. F and B take 2, W 1, a message 1; the limit is 3:

    rank 0 |F0    F1    F2          B0    W0 F3    B1    W1 B2    W2       B3    W3 |
    rank 1 |         F0    B0    F1    B1    F2    B2    W0 F3    B3    W1 W2 W3    |
    warm-up   F's while they are ready and fit in memory (rank 0 stops at 3)
    steady    F and B alternate
    memory    a W before an F that would exceed the limit (W0 on both ranks)
    gap       a W, if it ends before the next B arrives, or if idling would make this rank the one with the
              most idle time (W1 and W2 on rank 0)
    the end   the remaining W's

Three questions have no answer that is always right. May a warm-up F delay the first B? May a rank whose B is
late run another F out of turn? Should every rank use all the memory, or later ranks less, as in ZB-H1 and
ZB-H2? The heuristic tries all twelve combinations and keeps the best; the paper also searches a grid. `auto`
in schedules.py adds the schedules drawn by hand, so it is never worse than one that fits.

How good is it? `exhaustive` searches every order, with pruning that never removes the optimum, and so proves
the optimum of small cases, with one stage per rank or in a V. What keeps the number of orders finite:
    order       the k-th F, B and W of a stage can be micro-batch k. Take a valid schedule, renumber the F's
                of each stage by their starts, and the B's and W's too: the k-th smallest start of a stage is
                still after the k-th smallest end of the stage that it needs.
    bound       cost >= the time a rank has spent + the work it has left. Cost >= the time at which any r
                can end its last B, then the B's of ranks r-1, ..., 0, then one W of rank 0.
    dominance   a state is dropped if another one with the same counts of actions is no later anywhere.

"Cost" is the longest time a rank is occupied (Timeline.cost), if every action starts as soon as possible.
Times are Times(f, b, w, communication); b and w are the two halves of a backward.

Run it:
    python schedule_search.py                          the gap of the heuristic on all cases of a small grid
    python schedule_search.py --ranks 3 --micro-batches 4 --times 3,4,2,1 --limit 3
The search gives up a case after 150,000 partial schedules, and says so. The last line is PASS, or the script
exits with 1 and says which number is wrong.
"""

import heapq
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from schedule_simulator import (
    Action,
    B,
    F,
    OneLineParser,
    Schedule,
    Times,
    W,
    check,
    is_rank_zero,
    parse_times,
    simulate,
)


def schedule_of(words: list[list[str]], micro_batches: int) -> Schedule:
    """A schedule from one list of kinds per rank; the k-th F, B, W of a rank is micro-batch k."""
    lists = []
    for rank, word in enumerate(words):
        count = {F: 0, B: 0, W: 0}
        actions = []
        for kind in word:
            actions.append(Action(kind, rank, count[kind]))
            count[kind] += 1
        lists.append(tuple(actions))
    p = len(words)
    return Schedule("auto", p, p, micro_batches, (tuple(range(p)),), tuple(lists))


# ------------------------------------------------------------------------------------------------- the heuristic


def greedy(p: int, m: int, times: Times, limits: Sequence[int], eager: bool, ahead: bool) -> Schedule:
    """One run of the heuristic of section 3.1, with fixed answers to its questions.

    `limits[rank]`: the activations a rank may hold. `eager`: a warm-up F may delay the rank's first B.
    `ahead`: in the steady state a rank whose next B has not arrived may run another F if one is ready.
    """
    cost = [{kind: times.of(Action(kind, rank, 0)) for kind in (F, B, W)} for rank in range(p)]
    c = times.communication
    words: list[list[str]] = [[] for _ in range(p)]
    arrived: list[dict[str, list[float]]] = [{F: [], B: []} for _ in range(p)]  # when the k-th F or B may start
    arrived[0][F] = [0.0] * m
    free = [0.0] * p
    idle = [0.0] * p
    forwards = sum(row[F] for row in cost) + (p - 1) * c  # when micro-batch 0 leaves the last stage
    first_b = [forwards + sum(row[B] + c for row in cost[rank + 1 :]) for rank in range(p)]  # without delays
    events = [(0.0, rank) for rank in range(p)]  # times at which a rank may choose an action
    while events:
        now, rank = heapq.heappop(events)
        word = words[rank]
        count = {kind: words[rank].count(kind) for kind in (F, B, W)}
        if now < free[rank] or count[W] == m:
            continue
        coming = {k: arrived[rank][k][count[k]] if count[k] < len(arrived[rank][k]) else float("inf") for k in (F, B)}
        ready = {kind: coming[kind] <= now for kind in (F, B)}
        waiting_w = count[B] - count[W]
        gap = coming[B] - now  # until the next B in flight arrives; infinite if none is
        # --- exercise 6.33: what an idle rank does next ---
        if count[B] == 0:  # warm-up
            in_time = count[F] == 0 or eager or now + cost[rank][F] <= first_b[rank]
            turn = F if ready[F] and in_time and count[F] < limits[rank] else B
        else:
            last = next(kind for kind in reversed(word) if kind != W)
            turn = B if last == F or count[F] == m else F
            if not ready[turn] and (turn == F or (ahead and coming[F] <= now)):
                turn = B if turn == F else F  # the other one, if it is ready
        full = turn == F and count[F] - count[W] >= limits[rank]
        if ready[turn] and not full:
            choice = turn
        elif waiting_w and (full or gap >= cost[rank][W] or idle[rank] + gap > max(idle)):
            choice = W
        elif ready[B]:
            choice = B
        else:
            continue  # wait for the next arrival
        # --- end exercise ---
        word.append(choice)
        end = now + cost[rank][choice]
        if len(word) > 1:
            idle[rank] += now - free[rank]
        free[rank] = end
        heapq.heappush(events, (end, rank))
        for kind, target, delay in ((F, rank + 1, c), (B, rank - 1, c)):
            if choice == kind and 0 <= target < p:
                arrived[target][kind].append(end + delay)
                heapq.heappush(events, (end + delay, target))
        if choice == F and rank == p - 1:
            arrived[rank][B].append(end)
    return schedule_of(words, m)


def automatic(p: int, m: int, times: Times | None = None, limit: int | None = None) -> Schedule:
    """The best of the heuristic's twelve runs: smallest cost, then smallest makespan.

    `limit`: the most activations of micro-batches a rank may hold; 2p by default, as the paper's ZB-2p.
    """
    times = times or Times()
    limit = limit or 2 * p
    falling = ([limit] * p, [min(limit, p - r) for r in range(p)], [min(limit, 2 * (p - r) - 1) for r in range(p)])
    answers = product(falling, (False, True), (False, True))
    return cheapest((greedy(p, m, times, *answer) for answer in answers), times)


def cheapest(schedules: Iterable[Schedule], times: Times) -> Schedule:
    """The smallest cost, then the smallest makespan, then the first."""
    timelines = [simulate(schedule, times) for schedule in schedules]
    return min(timelines, key=lambda timeline: (timeline.cost, timeline.makespan)).schedule


# --------------------------------------------------------------------------------------------- exhaustive search


MOST = 150_000  # partial schedules per case of the demo: some ten seconds


class Exhaustive:
    """Branch and bound over the orders of all ranks. `run` returns the best schedule and its cost.

    A node is a partial schedule. The rank that is free first commits to its next action (up to three branches
    for each of its stages). A commitment is executed once the times of its inputs are known, so each set of
    orders is visited once. `place[stage]` is a rank; by default rank r holds stage r. After `most` nodes the
    search gives up; then `proven` is False, and the best schedule so far need not be optimal.
    """

    def __init__(
        self, p: int, m: int, times: Times, limit: int, place: Sequence[int] | None = None, most: float = math.inf
    ):
        self.p = p
        self.m = m
        self.limit = limit
        self.most = most
        self.place = place or range(p)
        self.stages = [[s for s, rank in enumerate(self.place) if rank == r] for r in range(p)]
        every = range(len(self.place))
        self.cost = [{kind: times.of(Action(kind, s, 0)) for kind in (F, B, W)} for s in every]
        self.travel = [0, *(times.communication * (self.place[s] != self.place[s - 1]) for s in every[1:])]  # s-1 to s
        below = [sum(self.cost[s][B] + self.travel[s + 1] for s in range(stage)) for stage in every]
        self.after_b = [time + self.cost[0][W] for time in below]
        self.seen: dict[tuple, list[tuple[float, ...]]] = {}
        self.nodes, self.proven = 0, True

    def run(self, start: Schedule, start_cost: float) -> tuple[Schedule, float]:
        self.best, self.best_cost = start, start_cost
        lists = [()] * self.p
        nothing = [()] * len(self.place)
        self.visit(lists, [0.0] * self.p, [None] * self.p, nothing, nothing, [None] * self.p)
        return self.best, self.best_cost

    def counts(self, row: Sequence[Action]) -> dict[tuple[str, int], int]:
        """Count the actions in the list of a rank, by kind and stage."""
        return Counter((action.kind, action.stage) for action in row)

    def bound(self, counts, free, first) -> float:
        """No completion of this partial schedule costs less. Rank 0 starts at time 0."""
        result = 0.0
        for r, stages in enumerate(self.stages):
            left = {(kind, s): self.m - counts[r][kind, s] for s in stages for kind in (F, B, W)}
            # --- exercise 6.32: a bound that no completion beats ---
            rest = sum(number * self.cost[s][kind] for (kind, s), number in left.items())
            result = max(result, rest if first[r] is None else free[r] - first[r] + rest)
            held = sum(counts[r][F, s] - counts[r][W, s] for s in stages)
            for s in stages:
                if left[B, s]:  # before its last B: all its F's and B's, and the W's that the limit forces
                    forced = max(0, held + left[F, s] - self.limit) * min(self.cost[each][W] for each in stages)
                    before = left[F, s] * self.cost[s][F] + left[B, s] * self.cost[s][B] + forced
                    result = max(result, free[r] + before + self.after_b[s])
            # --- end exercise ---
        return result

    def begin(self, want: Action, free: float, f_end, b_end) -> float | None:
        """When a rank free from `free` on can start this; None while the end of its input is unknown."""
        if want.kind == F and want.stage > 0:
            ends = f_end[want.stage - 1]
            travel = self.travel[want.stage]
        elif want.kind == B and want.stage < len(self.place) - 1:
            ends = b_end[want.stage + 1]
            travel = self.travel[want.stage + 1]
        else:
            return free
        return max(free, ends[want.micro_batch] + travel) if len(ends) > want.micro_batch else None

    def visit(self, lists, free, first, f_end, b_end, wants) -> None:
        if self.nodes >= self.most:
            self.proven = False
            return
        self.nodes += 1
        lists = list(lists)
        free = list(free)
        first = list(first)
        wants = list(wants)
        f_end = list(f_end)
        b_end = list(b_end)
        moved = True
        while moved:  # execute the commitments whose inputs have known times
            moved = False
            for r, want in enumerate(wants):
                if want is None:
                    continue
                begin = self.begin(want, free[r], f_end, b_end)
                if begin is None:
                    continue
                kind = want.kind
                s = want.stage
                free[r] = begin + self.cost[s][kind]
                first[r] = begin if first[r] is None else first[r]
                lists[r] = (*lists[r], want)
                if kind == F:
                    f_end[s] = (*f_end[s], free[r])
                if kind == B:
                    b_end[s] = (*b_end[s], free[r])
                wants[r] = None
                moved = True
        counts = [self.counts(row) for row in lists]
        if self.bound(counts, free, first) >= self.best_cost:
            return
        whole = [3 * self.m * len(stages) for stages in self.stages]
        open_ranks = [r for r in range(self.p) if wants[r] is None and len(lists[r]) < whole[r]]
        if not open_ranks:
            if all(len(row) == whole[r] for r, row in enumerate(lists)):
                self.best_cost = max(free[r] - first[r] for r in range(self.p))
                self.best = Schedule("auto", self.p, len(self.place), self.m, (tuple(self.place),), tuple(lists))
            return  # otherwise a deadlock: every rank waits for another
        times = list(free)
        for s in range(len(self.place)):  # results that are still to be used
            if s < len(self.place) - 1:
                times += f_end[s][len(f_end[s + 1]) :]
            if s > 0:
                times += b_end[s][len(b_end[s - 1]) :]
        for r in range(self.p):  # first starts: later is better
            times.append(0.0 if first[r] is None else -first[r])
        state = tuple(tuple(counts[r][kind, s] for s in self.stages[r] for kind in (F, B, W)) for r in range(self.p))
        known = self.seen.setdefault((state, tuple(wants)), [])
        if any(all(old <= new for old, new in zip(other, times, strict=True)) for other in known):
            return
        known.append(tuple(times))
        r = min(open_ranks, key=lambda rank: free[rank])
        held = sum(counts[r][F, s] - counts[r][W, s] for s in self.stages[r])
        for s in reversed(self.stages[r]):
            forward, backward, weight = (counts[r][kind, s] for kind in (F, B, W))
            for kind, k, allowed in (
                (B, backward, backward < forward),
                (F, forward, forward < self.m and held < self.limit),
                (W, weight, weight < backward),
            ):
                if allowed:
                    wants[r] = Action(kind, s, k)
                    self.visit(lists, free, first, f_end, b_end, wants)


def exhaustive(
    p: int,
    m: int,
    times: Times | None = None,
    limit: int | None = None,
    start: Schedule | None = None,
    most: float = math.inf,
) -> tuple[Schedule, float, int]:
    """The optimal schedule for p ranks and m micro-batches, its cost, and the number of nodes visited.

    `start`: a schedule that fits; the search keeps its placement, such as a V. By default one stage per rank.
    If `most` nodes were visited, the search gave up, and nothing is proven.
    """
    times = times or Times()
    limit = limit or 2 * p
    start = start or automatic(p, m, times, limit)
    search = Exhaustive(p, m, times, limit, start.placement[0], most)
    best, cost = search.run(start, simulate(start, times).cost)
    return best, cost, search.nodes


def compare(p: int, m: int, times: Times, limit: int) -> tuple[list[str], str]:
    """One row of the demo's table, and its failure, if any."""
    found = automatic(p, m, times, limit)
    best, cost, nodes = exhaustive(p, m, times, limit, most=MOST)
    wrong = ""
    for schedule in (found, best):
        check(schedule)
        if max(simulate(schedule, times).peak_activations) > limit:
            wrong = f"a schedule holds more than {limit}"
    heuristic = simulate(found, times).cost
    optimum = simulate(best, times).cost
    if optimum != cost or optimum > heuristic:
        wrong = f"the search says {cost:g}, its schedule costs {optimum:g}, the heuristic's {heuristic:g}"
    proven = nodes < MOST
    if proven and times.f == times.b == times.w and times.communication == 0 and optimum != heuristic:
        wrong = f"with equal times the heuristic costs {heuristic:g}, the optimum is {optimum:g}"
    given = ",".join(f"{time:g}" for time in (times.f, times.b, times.w, times.communication))
    numbers = [f"{heuristic:g}", f"{optimum:g}", f"{heuristic / optimum - 1:.1%}", str(nodes)]
    if not proven:
        numbers = [f"{heuristic:g}", f"<= {optimum:g}", "unknown", f"{nodes}, gave up"]
    return [str(p), str(m), given, str(limit), *numbers], wrong


def main() -> int:
    parser = OneLineParser(description="The automatic zero-bubble scheduler against the proven optimum.")
    parser.add_argument("--ranks", type=int, help="2 to 4; without it, a grid of small cases")
    parser.add_argument("--micro-batches", type=int, help="1 to 6: the search is exponential; 4 by default")
    parser.add_argument("--times", type=parse_times, help="F,B,W or F,B,W,C; 1,1,1,0 by default")
    parser.add_argument("--limit", type=int, help="activations a rank may hold; default: 2 * ranks")
    args = parser.parse_args()
    if args.ranks is not None and not 2 <= args.ranks <= 4:
        parser.error(f"--ranks {args.ranks} is out of the search's reach; use 2, 3 or 4")
    m = 4 if args.micro_batches is None else args.micro_batches
    times = args.times or Times()
    if not 1 <= m <= 6:
        parser.error(f"--micro-batches {m} is out of the search's reach; use 1 to 6")
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit {args.limit}: a rank holds at least 1 activation; use 1 or more")
    alone = {"micro-batches": args.micro_batches, "times": args.times, "limit": args.limit}
    if args.ranks is None and (ignored := [option for option, given in alone.items() if given is not None]):
        parser.error(f"--{ignored[0]} needs --ranks beside it: the grid has its own")
    if not is_rank_zero():
        return 0
    grid = [(args.ranks, m, times, args.limit or 2 * (args.ranks or 0))]
    if args.ranks is None:
        every = [Times(1, 1, 1), Times(3, 4, 2, communication=1), Times(2, 3, 3), Times(2, 2, 5)]
        grid = [(p, m, times, limit) for p in (2, 3) for m in (2, 4) for times in every for limit in (p, 2 * p - 1)]
    table = [["ranks", "m", "F,B,W,C", "limit", "heuristic", "optimum", "gap", "looked at"]]
    off = []
    for case in grid:
        row, wrong = compare(*case)
        table.append(row)
        off += [f"{wrong} ({' '.join(row)})"] if wrong else []
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print(*(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print("\n".join(off) if off else "PASS")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
