"""The automatic zero-bubble scheduler: a heuristic that fits the W's to measured times, and a search that judges it.

Problem. Schedules drawn by hand assume that F, B and W take equally long and that messages are free. Measured times
obey neither: the core of attention has no weights, the last stage carries the loss, the links take time.

Idea (Zero Bubble, arXiv 2401.10241, section 3.1). Let time flow, and whenever a rank falls idle choose its next action
from what is ready, under a limit on the activations it may hold. F and B take 2, W 1, a message 1; at most 3 are held:

    rank 0 |F0    F1    F2          B0    W0 F3    B1    W1 B2    W2       B3    W3 |
    rank 1 |         F0    B0    F1    B1    F2    B2    W0 F3    B3    W1 W2 W3    |
    warm-up   F's while they are ready and fit in memory (rank 0 stops at 3)
    steady    F and B in turn
    memory    a W before an F that would exceed the limit (W0 on both ranks)
    gap       a W, if it is over before the next B arrives, or if idling would make this rank the one that has
              idled longest (W1 and W2 on rank 0)
    the end   all W's that are left

Three questions have no answer that is always right: may a warm-up F delay the first B, may a rank whose B is late take
another F out of turn, and should every rank use all the memory there is, or later ranks less, as in ZB-H1 and ZB-H2?
The heuristic tries all twelve answers and keeps the best; the paper searches a grid as well. What it finds is
compared with the schedules drawn by hand (`auto` in schedules.py), so that it is never worse than one that fits.

How good is it? `exhaustive` looks at every order there is, pruned but complete, and so proves the optimum for small
cases. What keeps the number of orders finite:
    order       the k-th F, B and W of a stage can be micro-batch k. Take any valid schedule, renumber the F's of each
                stage by their starts, and the B's and W's likewise: the k-th smallest start of a stage still lies
                behind the k-th smallest end of the stage that it needs.
    bound       cost >= what a rank has spent + what it has left to do; and for rank 0: what any rank r must do before
                its last B ends, then the B's of ranks r-1, ..., 0, then one W.
    dominance   a state is dropped if another with the same counts of done actions is nowhere later.

"Cost" is the longest time a rank is occupied (Timeline.cost), with every action started as soon as it can. Times are
Times(f, b, w, communication); b and w are the two halves of a backward.

Run it:
    python schedule_search.py                          the gap of the heuristic on all cases of a small grid
    python schedule_search.py --ranks 3 --micro-batches 4 --times 3,4,2,1 --limit 3
The last line is PASS, or the script exits with 1 and says which number is off.
"""

import heapq
import sys
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

    `limits[rank]`: what the rank may hold. `eager`: a warm-up F may delay the rank's first B. `ahead`: in the steady
    state a rank whose turn is B, but whose B is not there yet, may take another F if one is ready.
    """
    cost = [{kind: times.of(Action(kind, rank, 0)) for kind in (F, B, W)} for rank in range(p)]
    c = times.communication
    words: list[list[str]] = [[] for _ in range(p)]
    arrived: list[dict[str, list[float]]] = [{F: [], B: []} for _ in range(p)]  # when the k-th F or B may start
    arrived[0][F] = [0.0] * m
    free, idle = [0.0] * p, [0.0] * p
    forwards = sum(row[F] for row in cost) + (p - 1) * c  # micro-batch 0 reaches the end of the last stage
    first_b = [forwards + sum(row[B] + c for row in cost[rank + 1 :]) for rank in range(p)]  # if nobody delays it
    events = [(0.0, rank) for rank in range(p)]  # moments at which a rank may have something to decide
    while events:
        now, rank = heapq.heappop(events)
        word, count = words[rank], {kind: words[rank].count(kind) for kind in (F, B, W)}
        if now < free[rank] or count[W] == m:
            continue
        coming = {k: arrived[rank][k][count[k]] if count[k] < len(arrived[rank][k]) else float("inf") for k in (F, B)}
        ready = {kind: coming[kind] <= now for kind in (F, B)}
        waiting_w = count[B] - count[W]
        gap = coming[B] - now  # until the next B that is already under way arrives; infinite if none is
        # --- exercise 6.33: what an idle rank does next ---
        if count[B] == 0:  # warm-up
            in_time = count[F] == 0 or eager or now + cost[rank][F] <= first_b[rank]
            turn = F if ready[F] and in_time and count[F] < limits[rank] else B
        else:
            last = next(kind for kind in reversed(word) if kind != W)
            turn = B if last == F or count[F] == m else F
            if not ready[turn] and (turn == F or (ahead and coming[F] <= now)):
                turn = B if turn == F else F  # the other one, if it is there
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

    `limit`: the most activations of micro-batches that a rank may hold; 2p by default, as the paper's ZB-2p.
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


class Exhaustive:
    """Branch and bound over the orders of all ranks. `run` returns the best schedule and its cost.

    A node is a partial schedule. The rank that is free first commits to its next kind (three branches at most); a
    commitment is carried out as soon as the times of what it needs are known, so each set of orders is met once.
    """

    def __init__(self, p: int, m: int, times: Times, limit: int):
        self.p, self.m, self.limit, self.c = p, m, limit, times.communication
        self.cost = [{kind: times.of(Action(kind, rank, 0)) for kind in (F, B, W)} for rank in range(p)]
        self.after_b = [sum(self.cost[s][B] + self.c for s in range(r)) + self.cost[0][W] for r in range(p)]
        self.seen: dict[tuple, list[tuple[float, ...]]] = {}
        self.nodes = 0

    def run(self, start: Schedule, start_cost: float) -> tuple[Schedule, float]:
        self.best, self.best_cost = start, start_cost
        empty = tuple(() for _ in range(self.p))
        self.visit([""] * self.p, [0.0] * self.p, [None] * self.p, empty, empty, [None] * self.p)
        return self.best, self.best_cost

    def bound(self, words, free, first) -> float:
        """No completion of this partial schedule costs less."""
        result = 0.0
        # --- exercise 6.32: a bound that no completion beats ---
        for r, word in enumerate(words):
            left = {kind: self.m - word.count(kind) for kind in (F, B, W)}
            rest = sum(left[kind] * self.cost[r][kind] for kind in (F, B, W))
            result = max(result, rest if first[r] is None else free[r] - first[r] + rest)
            if left[B]:  # before its last B, rank r does all its F's and B's, and the W's that the limit asks for
                forced = max(0, left[W] - self.limit) * self.cost[r][W]
                before = left[F] * self.cost[r][F] + left[B] * self.cost[r][B] + forced
                result = max(result, free[r] + before + self.after_b[r])  # rank 0 starts at time 0
        # --- end exercise ---
        return result

    def visit(self, words, free, first, f_end, b_end, wants) -> None:
        self.nodes += 1
        words, free, first, wants = list(words), list(free), list(first), list(wants)
        f_end, b_end = list(f_end), list(b_end)
        moved = True
        while moved:  # carry out the commitments whose needs are known
            moved = False
            for r, kind in enumerate(wants):
                if kind is None:
                    continue
                k = words[r].count(kind)
                begin = free[r]
                if kind == F and r > 0:
                    if len(f_end[r - 1]) <= k:
                        continue
                    begin = max(begin, f_end[r - 1][k] + self.c)
                if kind == B and r < self.p - 1:
                    if len(b_end[r + 1]) <= k:
                        continue
                    begin = max(begin, b_end[r + 1][k] + self.c)
                free[r] = begin + self.cost[r][kind]
                first[r] = begin if first[r] is None else first[r]
                words[r] += kind
                if kind == F:
                    f_end[r] = (*f_end[r], free[r])
                if kind == B:
                    b_end[r] = (*b_end[r], free[r])
                wants[r] = None
                moved = True
        if self.bound(words, free, first) >= self.best_cost:
            return
        open_ranks = [r for r in range(self.p) if wants[r] is None and len(words[r]) < 3 * self.m]
        if not open_ranks:
            if all(len(word) == 3 * self.m for word in words):
                self.best_cost = max(free[r] - first[r] for r in range(self.p))
                self.best = schedule_of([list(word) for word in words], self.m)
            return  # else every rank waits for another: a deadlock
        counts = tuple(tuple(word.count(kind) for kind in (F, B, W)) for word in words)
        times = list(free)
        for r in range(self.p):  # results that somebody still has to use, and first starts (later is better)
            times += f_end[r][counts[r + 1][0] :] if r < self.p - 1 else ()
            times += b_end[r][counts[r - 1][1] :] if r > 0 else ()
            times.append(0.0 if first[r] is None else -first[r])
        known = self.seen.setdefault((counts, tuple(wants)), [])
        if any(all(old <= new for old, new in zip(other, times, strict=True)) for other in known):
            return
        known.append(tuple(times))
        r = min(open_ranks, key=lambda rank: free[rank])
        forward, backward, weight = counts[r]
        for kind, allowed in (
            (B, backward < forward),
            (F, forward < self.m and forward - weight < self.limit),
            (W, weight < backward),
        ):
            if allowed:
                wants[r] = kind
                self.visit(words, free, first, f_end, b_end, wants)


def exhaustive(p: int, m: int, times: Times | None = None, limit: int | None = None) -> tuple[Schedule, float, int]:
    """The optimal schedule for p ranks and m micro-batches, its cost, and how many partial schedules were looked at."""
    times, limit = times or Times(), limit or 2 * p
    start = automatic(p, m, times, limit)
    search = Exhaustive(p, m, times, limit)
    best, cost = search.run(start, simulate(start, times).cost)
    return best, cost, search.nodes


def compare(p: int, m: int, times: Times, limit: int) -> tuple[list[str], str]:
    """One row of the demo's table, and what is wrong with it, if anything is."""
    found, (best, cost, nodes) = automatic(p, m, times, limit), exhaustive(p, m, times, limit)
    wrong = ""
    for schedule in (found, best):
        check(schedule)
        if max(simulate(schedule, times).peak_activations) > limit:
            wrong = f"a schedule holds more than {limit}"
    heuristic, optimum = simulate(found, times).cost, simulate(best, times).cost
    if optimum != cost or optimum > heuristic:
        wrong = f"the search says {cost:g}, its schedule costs {optimum:g}, the heuristic's {heuristic:g}"
    if times.f == times.b == times.w and times.communication == 0 and optimum != heuristic:
        wrong = f"with equal times the heuristic costs {heuristic:g}, the optimum is {optimum:g}"
    given = ",".join(f"{time:g}" for time in (times.f, times.b, times.w, times.communication))
    numbers = [f"{heuristic:g}", f"{optimum:g}", f"{heuristic / optimum - 1:.1%}", str(nodes)]
    return [str(p), str(m), given, str(limit), *numbers], wrong


def main() -> int:
    parser = OneLineParser(description="The automatic zero-bubble scheduler against the proven optimum.")
    parser.add_argument("--ranks", type=int, help="2 to 4; without it, a grid of small cases")
    parser.add_argument("--micro-batches", type=int, help="1 to 6: the search is exponential; 4 by default")
    parser.add_argument("--times", type=parse_times, help="F,B,W or F,B,W,C; all 1 by default")
    parser.add_argument("--limit", type=int, help="activations a rank may hold; 2 ranks by default")
    args = parser.parse_args()
    if args.ranks is not None and not 2 <= args.ranks <= 4:
        parser.error(f"--ranks {args.ranks} is out of the search's reach; use 2, 3 or 4")
    m, times = 4 if args.micro_batches is None else args.micro_batches, args.times or Times()
    if not 1 <= m <= 6:
        parser.error(f"--micro-batches {m} is out of the search's reach; use 1 to 6")
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit {args.limit}: a rank holds at least 1 activation; use 1 or more")
    alone = {"micro-batches": args.micro_batches, "times": args.times, "limit": args.limit}
    if args.ranks is None and (ignored := [option for option, given in alone.items() if given is not None]):
        parser.error(f"--{ignored[0]} {alone[ignored[0]]} needs --ranks beside it: the grid has its own")
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
