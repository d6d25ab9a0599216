"""Pipeline schedules, from one micro-batch at a time to zero bubble: fourteen ways to write the same lists of actions.

Problem. Stage s cannot start before stage s-1 is done, so with one micro-batch all ranks but one are idle.
With more micro-batches the ranks work at the same time, but each still waits for its first activation and for
its first gradient: the bubble. And each micro-batch in flight costs the memory of its activations.

Idea. The *order* of the actions decides both. Three ranks, four micro-batches; F, B, W take one unit each, BW two:

    AFAB   0 |F0 F1 F2 F3                   BW0   BW1   BW2   BW3   | holds 4    all forwards, then all backwards;
           1 |   F0 F1 F2 F3          BW0   BW1   BW2   BW3         | holds 4    with m micro-batches, m are held
           2 |      F0 F1 F2 F3 BW0   BW1   BW2   BW3               | holds 4
    1F1B   0 |F0 F1 F2             BW0   F3 BW1      BW2      BW3   | holds 3    as few forwards as keep the last
           1 |   F0 F1       BW0   F2 BW1   F3 BW2      BW3         | holds 2    rank busy, then one backward for
           2 |      F0 BW0   F1 BW1   F2 BW2   F3 BW3               | holds 1    each forward: no less idle time
    ZB-H1  0 |F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3 | holds 3                split BW: others wait only
           1 |   F0 F1    B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 | holds 3                for B, so W runs when a rank
           2 |      F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 | holds 3                would be idle
    loops      v thin stages per rank (r, r+p, r+2p, ...): the first activation arrives v times sooner
    V          stages go down the ranks and up again: the last is on rank 0, and so is the first gradient
    DualPipe   two copies of the model, micro-batches from both ends, an F beside a BW of the other direction

Bubble (idle time of the rank that idles most) and activations held, for p ranks, m micro-batches, v stages per rank,
where f, b, w are the times of F, B, W in *one stage* (so for v > 1 a stage is v times thinner):

    naive                    (p-1) m (f+b+w)     1                 one micro-batch at a time
    AFAB                     (p-1)(f+b+w)        m                 GPipe, arXiv 1811.06965
    1F1B                     (p-1)(f+b+w)        min(m, p-r)       PipeDream-Flush, arXiv 2104.04473, section 2.2
    interleaved              (p-1)(f+b+w)        (v-1)p+2(p-r)-1   depth-first, same paper; 1/v of 1F1B's ratio
    breadth-first            (p-1)(f+b+w)        m v               arXiv 2211.05953
    llama3                   (p-1)(f+b+w)        (v-1)n+2(p-r)-1   n in flight; Llama 3, arXiv 2407.21783, figure 6
    ZB-H1                    (p-1)(f+b-w)        p                 Zero Bubble, arXiv 2401.10241, table 2
    ZB-H2                    (p-1)(f+b-2w)       2p-1              same table
    ZB-V                     0 if f = b = w      2p (half stages)  same paper, section 6
    V-Min, V-Half            about 4p, 7p/2      2p/3, p (halves)  arXiv 2405.15362; exactly, in v_schedules.py
    DualPipe, DualPipeV      (p/2-1)(fb+b-2w)    p+1; p: stages    DeepSeek-V3, arXiv 2412.19437; fb: time of a pair
    auto                     no formula          its limit         schedule_search.py, v_schedules.py

`published` says when each holds; the demo and the tests compare it with the simulation, to the last digit.

Run it:
    python schedules.py                                             all schedules against their formulas
    python schedules.py --schedule 1f1b --ranks 4 --micro-batches 8 [--stages-per-rank 2] [--times 1,1,1,0] [--svg FILE]
    python schedules.py --draw-all figures                          the drawings of the README
The last line is PASS, or the script exits with 1 and names the wrong number. It needs no GPU and no torch.
"""

import argparse
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from schedule_search import automatic, cheapest
from schedule_simulator import (
    BW,
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
    parse_times,
    peak_activations,
    simulate,
)
from v_schedules import automatic_v, predicted, v_half, v_min, v_shape

LOOPED = ("interleaved", "breadth-first", "llama3")  # schedules with any number of stages per rank

# Legend: p ranks, m micro-batches, v stages per rank, r this rank. A step is an action without its micro-batch:
# (kind, stage) or, for the second half of an F&B pair, (kind, stage, True). (W, None) is the oldest W not yet done.
Step = tuple
BACKWARD = {BW: (B, W)}


def numbered(steps: Iterable[Step]) -> tuple[Action, ...]:
    """Give the steps of one rank their micro-batches: every stage takes them in order 0, 1, 2, ..."""
    count: dict[tuple[str, int], int] = {}
    waiting: deque[tuple[int, int]] = deque()  # (stage, micro-batch) of each B with a pending W
    result = []
    for kind, stage, *overlapped in steps:
        if kind == W:
            oldest = waiting[0] if stage is None else next(item for item in waiting if item[0] == stage)
            waiting.remove(oldest)
            result.append(Action(W, *oldest))
            continue
        key = (kind[0], stage)  # B and BW count together
        micro_batch = count[key] = count.get(key, -1) + 1
        if kind == B:
            waiting.append((stage, micro_batch))
        result.append(Action(kind, stage, micro_batch, *overlapped))
    return tuple(result)


# -------------------------------------------------------------------------- forwards and whole backwards: loops of v


def in_turn(forwards: Sequence[Step], backwards: Sequence[Step], warm_up: int) -> list[Step]:
    """`warm_up` forwards, then one forward and one backward alternating, then the remaining backwards.

    Naive, AFAB and 1F1B are this list with 0, all, and p-1-r forwards of warm-up.
    """
    # --- exercise 6.24: one forward, one backward ---
    warm_up = min(warm_up, len(forwards))
    steps = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        steps += [forward, backward]
    steps += backwards[len(forwards) - warm_up :]
    # --- end exercise ---
    return steps


def order_of_chunks(m: int, v: int, group: int) -> list[int]:
    """Which of its v stages (chunks) a rank forwards 1st, 2nd, 3rd, ...: micro-batches in groups, chunk after chunk.

    Groups of p micro-batches are depth-first, groups of m breadth-first; Llama 3's size is in between. The
    last group takes the remainder. [0, 0, 1, 1, 0, 0, 1, 1] for m = 4, v = 2, groups of 2.
    """
    order = []
    # --- exercise 6.31: groups of micro-batches through the chunks ---
    for first in range(0, m, group):
        for chunk in range(v):
            order += [chunk] * min(group, m - first)
    # --- end exercise ---
    return order


def looped(name: str, p: int, m: int, v: int, group: int, warm_up: Callable[[int], int]) -> Schedule:
    """Stage s is on rank s mod p: an activation passes all ranks v times. `warm_up` is given the rank."""
    chunks = order_of_chunks(m, v, group)
    lists = []
    for r in range(p):
        forwards = [(F, chunk * p + r) for chunk in chunks]
        backwards = [(BW, (v - 1 - chunk) * p + r) for chunk in chunks]  # last chunk first
        lists.append(numbered(in_turn(forwards, backwards, warm_up(r))))
    return Schedule(name, p, p * v, m, (tuple(stage % p for stage in range(p * v)),), tuple(lists))


def naive(p: int, m: int, v: int = 1) -> Schedule:
    """One micro-batch after the other, forward and backward: one rank works at a time."""
    return looped("naive", p, m, 1, m, lambda r: 0)


def afab(p: int, m: int, v: int = 1) -> Schedule:
    """All forwards, all backwards (GPipe, arXiv 1811.06965)."""
    return looped("afab", p, m, 1, m, lambda r: m)


def one_f_one_b(p: int, m: int, v: int = 1) -> Schedule:
    """1F1B (PipeDream-Flush): AFAB's bubble, but only p-r micro-batches held, however many there are.

    When the first gradient reaches rank r, p-1-r newer micro-batches are in flight on the later ranks.
    """
    return looped("1f1b", p, m, 1, m, lambda r: p - 1 - r)


def steady(p: int, v: int, group: int) -> Callable[[int], int]:
    """Warm-up of the interleaved 1F1B schedules (Megatron-LM, arXiv 2104.04473).

    The first backward belongs to the last chunk, (v-1) groups later. Then two more forwards per later rank.
    One, as in 1F1B, gives the same bubble if messages take no time, and stores less. But then each
    result is needed the moment it is made. With two, each message can take the time of an action. If it takes
    no longer, ranks wait only on the first way down and the last way up, for 2 (v p - 1) messages.
    """
    return lambda r: p - 1 - r if v == 1 else 2 * (p - 1 - r) + (v - 1) * group


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """Megatron-LM's interleaved 1F1B, depth-first: groups of p micro-batches. With v = 1 it is 1F1B."""
    if m % p:
        multiple = -(-m // p) * p
        raise ScheduleError(f"interleaved: {m} micro-batches are no multiple of {p} ranks; use {multiple}, or llama3")
    return looped("interleaved", p, m, v, p, steady(p, v, p))


def breadth_first(p: int, m: int, v: int = 2) -> Schedule:
    """All micro-batches through a chunk before the next chunk (arXiv 2211.05953): AFAB in v loops.

    It stores all activations, but uses a chunk's weights in one go, which suits weights gathered on demand.
    """
    return looped("breadth-first", p, m, v, m, lambda r: m * v)


def llama3(p: int, m: int, v: int = 2, in_flight: int | None = None) -> Schedule:
    """Interleaved 1F1B with any number of micro-batches, `in_flight` of them in a group (arXiv 2407.21783, 3.3.2).

    The default is the smallest group of at least p whose remainder is none or at least p. In a group below p
    ranks wait at each change of chunk. With the usual warm-up it can even deadlock: rank 0 waits for its next
    chunk's input, while other ranks wait for a backward of rank 0. So the warm-up grows until the lists run.
    """
    group = in_flight
    if group is None:
        group = next((n for n in range(p, m) if m % n == 0 or m % n >= p), m)
    if not 1 <= group <= m:
        raise ScheduleError(f"llama3: {group} micro-batches in flight; use 1 to {m}, the number of micro-batches")
    extra = 0
    while True:  # ends at the latest when the warm-up is all forwards
        warm_up = steady(p, v, group)
        schedule = looped("llama3", p, m, v, group, lambda r, more=extra, base=warm_up: base(r) + more)
        try:
            simulate(schedule)
            return schedule
        except ScheduleError:
            extra += 1


# ---------------------------------------------------------------------- backward in two halves: the zero-bubble family


def fill_with_w(m: int, r: int, warm_up: int, limit: int) -> list[Step]:
    """1F1B whose backward is only B, with the W's of rank r filled in (Zero Bubble, arXiv 2401.10241, figures 2, 3).

    A W is delayed until the next F would exceed `limit` micro-batches. After the last F, one W runs before
    each B, while the gradient is in flight, and the rest at the end.
    """
    warm_up = min(warm_up, m - 1)
    steps: list[Step] = [(F, r)] * warm_up
    # --- exercise 6.25: fill in the W's ---
    held = warm_up
    for _ in range(m - warm_up):
        if held == limit:
            steps.append((W, r))
            held -= 1
        steps += [(F, r), (B, r)]
        held += 1
    steps += [(W, r), (B, r)] * warm_up
    steps += [(W, r)] * (held - warm_up)
    # --- end exercise ---
    return steps


def zb_h1(p: int, m: int, v: int = 1) -> Schedule:
    """1F1B's warm-up, but W's are delayed until every rank holds p micro-batches, where 1F1B holds p-r."""
    lists = tuple(numbered(fill_with_w(m, r, p - 1 - r, p)) for r in range(p))
    return Schedule("zb-h1", p, p, m, (tuple(range(p)),), lists)


def zb_h2(p: int, m: int, v: int = 1) -> Schedule:
    """Twice the warm-up and nearly twice the memory. With f = b = w no rank waits between its first F and its last W.

    The ranks finish one after the other. So the optimizer must not wait for all of them: see the paper's section 4.
    """
    lists = tuple(numbered(fill_with_w(m, r, 2 * (p - 1 - r), 2 * p - 1)) for r in range(p))
    return Schedule("zb-h2", p, p, m, (tuple(range(p)),), lists)


def zb_v(p: int, m: int, v: int = 2) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6): zero bubble with 1F1B's memory, thanks to the V.

    Made for at least 2p-1 micro-batches. With fewer, the list for 2p-1 is built and the actions of missing
    micro-batches are dropped. The rest is still in a valid order.
    """
    full = max(m, 2 * p - 1)
    lists = []
    for r in range(p):
        down = r
        up = 2 * p - 1 - r
        below = p - 1 - r
        down_back = [(B, down), (W, down)]
        up_all = [(F, up), (B, up), (W, up)]
        steps: list[Step] = [(F, down)] * (2 * below + 1)  # until the first activation returns from rank p-1
        steps += [(F, up), (F, down)] * r
        steps += up_all * (below + 1)
        steps += [(F, down), *down_back, *up_all] * (full - 2 * p + r + 1)  # a cycle of six: the steady state
        steps += (down_back + up_all) * below
        steps += [(B, down), (B, up)] * r  # other ranks wait for these, so the W's come later
        steps += down_back * (below + 1)
        steps += [(W, up)] * r + [(W, down)] * r
        lists.append(tuple(action for action in numbered(steps) if action.micro_batch < m))
    return Schedule("zb-v", p, 2 * p, m, (v_shape(p),), tuple(lists))


# ------------------------------------------------------------------------------------------------ DualPipe and its half


def dualpipe_v(p: int, m: int, v: int = 2) -> Schedule:
    """DualPipeV: the V placement, with an F of one chunk and a BW of the other at the same time.

    One computes while the other's tokens are sent to experts and back, so a pair can be shorter than its
    parts (Times.pair). The eight steps are those of dualpipev.py in deepseek-ai/DualPipe.
    """
    if m < 2 * p:
        raise ScheduleError(f"dualpipe-v: {m} micro-batches are too few for {p} ranks; use at least {2 * p}")
    lists = []
    for r in range(p):
        down = r
        up = 2 * p - 1 - r
        below = p - 1 - r
        f_down = (F, down)
        f_up = (F, up)
        with_down = (BW, down, True)
        with_up = (BW, up, True)
        steps: list[Step] = [f_down] * (2 * below)  # step 1
        steps += [f_down, f_up] * (r + 1)  # 2
        steps += [(B, up), (W, up), f_up] * below  # 3: what other ranks need first
        main = [f_down, with_up, f_up, with_down] * (m - 2 * p + r + 1)  # 4: two alternating pairs
        if r == p - 1:
            main[1] = (BW, up)  # other ranks wait for this BW, so the first pair of rank p-1 runs in sequence
        steps += main
        steps += [(BW, up), f_up, with_down] * below  # 5
        tail = [(BW, up), (BW, down)] * (r + 1)  # 6: in its second half only B, to send sooner
        steps += tail[: r + 1] + [(B, stage) for _, stage in tail[r + 1 :]]
        steps += [(W, None), (B, down)] * below  # 7
        steps += [(W, None)] * (r + 1)  # 8
        lists.append(numbered(steps))
    return Schedule("dualpipe-v", p, 2 * p, m, (v_shape(p),), tuple(lists))


def dualpipe(p: int, m: int, v: int = 1) -> Schedule:
    """DualPipe: DualPipeV for half the ranks and micro-batches, unfolded (the "cut in half" of Qi et al., backwards).

    A V over p/2 ranks has p stages; rank r holds r and p-1-r. Unfolding gives stage p-1-r to rank p-1-r. The
    freed half of every rank runs the same schedule from the other end: rank r runs stage p-1-r for the second
    half of the micro-batches. So the model has two copies, and their gradients must be summed.
    """
    if p % 2:
        raise ScheduleError(f"dualpipe: {p} ranks; use an even number, because each rank mirrors another one")
    if m % 2 or m < 2 * p:
        raise ScheduleError(f"dualpipe: {m} micro-batches for {p} ranks; use an even number of at least {2 * p}")
    half = dualpipe_v(p // 2, m // 2)
    lists = []
    for r in range(p):
        row = []
        for action in half.actions[min(r, p - 1 - r)]:
            second = action.stage != r  # rank r holds stage r for the first direction, stage p-1-r for the second
            row.append(Action(action.kind, action.stage, action.micro_batch + second * (m // 2), action.overlapped))
        lists.append(tuple(row))
    return Schedule("dualpipe", p, p, m, (tuple(range(p)), tuple(reversed(range(p)))), tuple(lists))


def auto(p: int, m: int, v: int = 1, times: Times | None = None, limit: int | None = None) -> Schedule:
    """The cheapest schedule for given times and memory, found by the automatic schedulers or drawn by hand.

    With one stage per rank: schedule_search.py, naive, afab, 1F1B, ZB-H1, ZB-H2. With two: v_schedules.py,
    and all with 2p stages in loops or in a V. BWs are split in halves. DualPipe is excluded, because it has
    two copies of the model. `times` are for one stage; `limit`: the stage activations that a rank may hold,
    by default twice what 1F1B holds on rank 0.
    """
    times = times or Times()
    limit = 2 * p * v if limit is None else limit
    if limit < v:
        raise ScheduleError(f"auto: a limit of {limit} activations; use {v} or more, one for each stage of a rank")
    if v == 1:
        found = automatic(p, m, times, limit)
        drawn = (naive, afab, one_f_one_b, zb_h1, zb_h2)
    else:
        found = automatic_v(p, m, times, limit)
        drawn = (interleaved, breadth_first, llama3, zb_v, v_half, v_min, dualpipe_v)
    candidates = [found]
    for make in drawn:
        try:
            schedule = halved(make(p, m, v))
        except ScheduleError:
            continue  # it does not support this number of micro-batches
        if max(map(peak_activations, schedule.actions)) <= limit:
            candidates.append(schedule)
    return replace(cheapest(candidates, times), name="auto")


def halved(schedule: Schedule) -> Schedule:
    """Split BWs into B and W, and undo pairs. Without `Times.pair` nothing ends later, and some B's earlier."""
    lists = []
    for row in schedule.actions:
        halves = (
            replace(action, kind=kind, overlapped=False)
            for action in row
            for kind in BACKWARD.get(action.kind, action.kind)
        )
        lists.append(tuple(halves))
    return replace(schedule, actions=tuple(lists))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "afab": afab,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "llama3": llama3,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "auto": auto,
}
FOLDED = ("zb-v", "v-half", "v-min", "dualpipe-v")  # exactly two


def build(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1, **options) -> Schedule:
    """The schedule called `name`. Raises ScheduleError, in one line that names the rule, for what does not fit.

    Options: `in_flight` for llama3; `times` and `limit` (activations held) for auto.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"{name!r} is no schedule; use one of {', '.join(SCHEDULES)}")
    for what, number in (("ranks", ranks), ("micro-batches", micro_batches), ("stages per rank", stages_per_rank)):
        if number < 1:
            raise ScheduleError(f"{name}: {number} {what}; use 1 or more")
    if name in FOLDED and stages_per_rank != 2:
        raise ScheduleError(
            f"{name}: {stages_per_rank} stages per rank; use 2, one on the way down and one on the way up"
        )
    if name == "auto" and stages_per_rank > 2:
        raise ScheduleError(f"auto: {stages_per_rank} stages per rank; use 1, or 2 in a V or in loops")
    if name not in (*LOOPED, *FOLDED, "auto") and stages_per_rank != 1:
        raise ScheduleError(f"{name}: {stages_per_rank} stages per rank; use 1, or one of {', '.join(LOOPED)}")
    return SCHEDULES[name](ranks, micro_batches, stages_per_rank, **options)


# ---------------------------------------------------------------------------------------------------------- the demo

GALLERY = [  # what the README shows: name, micro-batches, stages per rank, options
    ("naive", 3, 1, {}),
    ("afab", 8, 1, {}),
    ("1f1b", 8, 1, {}),
    ("interleaved", 8, 2, {}),
    ("breadth-first", 8, 2, {}),
    ("llama3", 10, 2, {"in_flight": 5}),
    ("zb-h1", 8, 1, {}),
    ("zb-h2", 8, 1, {}),
    ("zb-v", 8, 2, {}),
    ("v-half", 8, 2, {}),
    ("v-min", 8, 2, {}),
    ("dualpipe", 10, 1, {}),
    ("dualpipe-v", 10, 2, {}),
    ("auto", 8, 1, {"times": Times(3, 4, 2, communication=1), "limit": 6}),
]


def draw_all(folder: Path) -> None:
    """The drawings of all schedules, for four ranks, as SVG files named after them."""
    from schedule_drawings import svg  # not at the top: a trainer draws no schedules

    folder.mkdir(parents=True, exist_ok=True)
    for name, m, v, options in GALLERY:
        timeline = simulate(build(name, 4, m, v, **options), options.get("times"))
        (folder / f"{name}.svg").write_text(svg(timeline))


def published(schedule: Schedule, times: Times) -> tuple[float | None, tuple[int, ...] | None]:
    """(bubble, activations held per rank) by the formulas at the top of this file; None where none applies.

    For stages that all take the same times, and messages that take none.
    """
    name = schedule.name
    p = schedule.ranks
    m = schedule.micro_batches
    v = schedule.stages // schedule.ranks
    f = times.f
    b = times.b
    w = times.w
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
        if n < p or 0 < m % n < p:  # a group below p: ranks wait at each change of chunk
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
        holds = f == b and w <= f and b + w <= filled <= f + b + w  # a pair: from BW alone to one after the other
        return ((half - 1) * (filled + b - 2 * w) if holds else None), (2 * half + 1,) * p
    return None, None  # auto


def size_of_first_group(schedule: Schedule) -> int:
    """How many micro-batches rank 0 runs through its first stage before its second."""
    forwards = [action.stage for action in schedule.actions[0] if action.kind == F]
    return next((i for i, stage in enumerate(forwards) if stage != forwards[0]), len(forwards))


def compare(schedule: Schedule, times: Times) -> tuple[list[str], bool]:
    """One row of the table: what was simulated, what the formula says, and whether they are equal."""
    check(schedule)
    timeline = simulate(schedule, times)
    bubble, held = published(schedule, times)
    # Equal up to rounding, because --times may be fractions. The tests use integers and require equality.
    same = bubble is None or math.isclose(bubble, timeline.bubble, abs_tol=1e-9 * timeline.cost)
    same = same and held in (None, timeline.peak_activations)
    v = schedule.stages * len(schedule.placement) // schedule.ranks
    row = [schedule.name, schedule.ranks, schedule.micro_batches, v]
    row += [f"{timeline.bubble:g}", "-" if bubble is None else f"{bubble:g}", f"{timeline.bubble_ratio:.3f}"]
    row += [max(timeline.peak_activations), "-" if held is None else max(held)]
    return [str(cell) for cell in row], same


def some_path(given: str) -> Path:
    if not given:
        raise argparse.ArgumentTypeError("'': name a file or a folder")  # Path("") would be the folder one is in
    return Path(given)


def arguments() -> argparse.Namespace:
    parser = OneLineParser(description="Builds, checks, simulates and draws pipeline schedules.", allow_abbrev=False)
    parser.add_argument("--schedule", help=f"one of {', '.join(SCHEDULES)}; without it, a table of all of them")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--stages-per-rank", type=int, default=None, help="default: 2 where a schedule folds or loops")
    parser.add_argument("--times", type=parse_times, default=Times(), help="F,B,W or F,B,W,C: units of time")
    parser.add_argument("--in-flight", type=int, help="llama3: micro-batches in a group")
    parser.add_argument("--limit", type=int, help="auto: activations a rank may hold")
    parser.add_argument("--svg", type=some_path, help="write the drawing to this file")
    parser.add_argument("--draw-all", type=some_path, metavar="DIR", help="write the drawings of all schedules")
    args = parser.parse_args()
    for option, fits in (("in_flight", ("llama3",)), ("limit", ("auto",)), ("svg", tuple(SCHEDULES))):
        if (given := getattr(args, option)) is not None and args.schedule not in fits:
            names = fits[0] if len(fits) == 1 else "NAME"
            parser.error(f"--{option.replace('_', '-')} {given} needs --schedule {names} beside it")
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit {args.limit}: a rank holds at least 1 activation; use 1 or more")
    for option, file in (("--svg", args.svg), ("--draw-all", args.draw_all)):
        if file and not file.parent.is_dir():
            parser.error(f"{option} {file}: there is no folder {file.parent}; make it first")
    for option in ("ranks", "micro_batches", "stages_per_rank", "times"):
        if args.draw_all and getattr(args, option) != parser.get_default(option):
            parser.error(f"--draw-all draws with sizes and times of its own; leave out --{option.replace('_', '-')}")
    if args.svg and args.svg.is_dir():
        parser.error(f"--svg {args.svg} is a folder; name a file in it")
    if args.draw_all and args.draw_all.exists() and not args.draw_all.is_dir():
        parser.error(f"--draw-all {args.draw_all} is a file; name a folder")
    for option, most in (("ranks", 256), ("micro_batches", 4096)):
        if not 1 <= getattr(args, option) <= most:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)}: use 1 to {most}")
    if args.stages_per_rank is not None and not 1 <= args.stages_per_rank <= 256:
        parser.error(f"--stages-per-rank {args.stages_per_rank}: use 1 to 256")
    v = args.stages_per_rank or 1
    many = args.ranks * args.micro_batches * v  # so that no command runs silently for more than a minute
    most = 65536
    if args.schedule in (None, "auto"):
        most = 2048 if v == 2 else 4096
    if many > most:
        sizes = f"--ranks {args.ranks} --micro-batches {args.micro_batches}"
        sizes += f" --stages-per-rank {v}" if args.stages_per_rank else ""
        parser.error(f"{sizes}: {many} is too many; at most {most} here")
    options = {"auto": {"times": args.times, "limit": args.limit}}
    options |= {"llama3": {"in_flight": args.in_flight}} if args.in_flight is not None else {}
    args.schedules, args.left_out = [], []
    for name in SCHEDULES if args.schedule is None else [args.schedule]:
        v = 2 if name in LOOPED + FOLDED else 1
        if args.stages_per_rank is not None and (args.schedule or name in LOOPED):
            v = args.stages_per_rank
        try:
            args.schedules.append(build(name, args.ranks, args.micro_batches, v, **options.get(name, {})))
        except ScheduleError as error:  # the table of all leaves out schedules that need other sizes
            args.left_out.append(f"{error}")
    if not args.schedules or (args.schedule and args.left_out):
        parser.error(f"--schedule {args.left_out[0]}")
    return args


def main() -> int:
    args = arguments()
    if not is_rank_zero():
        return 0
    table = [["schedule", "ranks", "m", "v", "bubble", "formula", "ratio", "held", "formula"]]
    off = []
    for schedule in args.schedules:
        row, same = compare(schedule, args.times)
        table.append(row)
        off += [] if same else [f"{schedule.name}: simulated and published differ: {' '.join(row)}"]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    if args.schedule:
        from schedule_drawings import svg, text

        timeline = simulate(args.schedules[0], args.times)
        print(text(timeline, colour=sys.stdout.isatty()), end="\n\n")
        if args.svg:
            args.svg.write_text(svg(timeline))
    if args.draw_all:
        draw_all(args.draw_all)
    for row in table:
        print(row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
    for reason in args.left_out:
        print(f"left out: {reason}")
    print("\n".join(off) if off else "PASS")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
