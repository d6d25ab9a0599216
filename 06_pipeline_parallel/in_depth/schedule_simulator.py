"""A pipeline schedule is data: lists of actions. This file has the types, the checker and the simulator.

Problem. A pipeline splits the model into stages and the batch into micro-batches. Which rank does what, and
when? In most training code the answer is spread over loops, sends and counters. It cannot be inspected, and a
wrong order shows only as a job that hangs.

Idea. Each rank gets a list of actions and runs them one after the other:

    F2@1   forward of micro-batch 2 through stage 1          needs F2 of stage 0
    B2@1   backward for the stage's *input*                  needs F2 of stage 1 and B2 of stage 2
    W2@1   backward for the stage's *weights*                needs B2 of stage 1
    BW2@1  both at once, the ordinary backward               needs what B2 needs

    rank 0   F0 F1 BW0 BW1          a list is an order, not a timetable: an action starts when the previous
    rank 1   F0 BW0 F1 BW1          one is done and what it needs has arrived, however long that takes

Because the lists are plain data, one can check them (`check`), predict their time and memory (`simulate`),
draw (schedule_drawings.py) and run them (pipeline_executor.py) without a second, different description.

Deadlock. There must be an order of all actions of all ranks in which everything an action needs comes before
it. If the lists wait for each other in a circle, there is none. Given such an order, put each message
directly after the action that produces it, and let every rank run its part in that order (`programs`). This
cannot hang, even with sends that block until they are received and with any delay: of all steps not yet done,
the first in the common order has everything it needs, on both ends. A runtime that posts messages earlier, or
does not wait for sends, waits for less, so it is also safe as long as it keeps their order.

Time, for stages that take f, b, w (Zero Bubble, arXiv 2401.10241: the times in section 2.3, the cost in 5.3):
    cost           the longest time any rank is occupied, from its own first start to its own last end: a rank may
                   begin its next step while others still finish this one
    bubble         cost - the time a rank computes, for the rank that idles most
    bubble ratio   bubble / that computing time: idle time / compute time, as in arXiv 2104.04473, section 2.2

    python schedule_simulator.py     checks a tiny schedule, breaks it, shows what the checker says; last line PASS
"""

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

F = "F"  # forward
B = "B"  # backward for the input
W = "W"  # backward for the weights
BW = "BW"  # both at once
Key = tuple[str, int, int]  # a result: (F, B or W; stage; micro-batch). BW yields two: B and W


class ScheduleError(ValueError):
    """A schedule that cannot be built or run. The message is one line that names the rule."""


@dataclass(frozen=True)
class Action:
    """One entry of a rank's list. `overlapped`: runs with the one before it (DualPipe's F&B pair)."""

    kind: str
    stage: int
    micro_batch: int
    overlapped: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}@{self.stage}"

    def yields(self) -> list[Key]:
        """The results that exist once this action is done."""
        return [(kind, self.stage, self.micro_batch) for kind in self.kind]  # "BW" has two letters, and two results


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one step. `placement[direction][stage]` is the rank that holds the stage.

    There is one direction, except in DualPipe, where a second copy of the model has the reverse placement and
    processes the second half of the micro-batches.
    """

    name: str
    ranks: int
    stages: int
    micro_batches: int
    placement: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]  # actions[rank], in order of execution

    def direction(self, micro_batch: int) -> int:
        return int(len(self.placement) == 2 and micro_batch >= self.micro_batches // 2)

    def rank_of(self, stage: int, micro_batch: int) -> int:
        return self.placement[self.direction(micro_batch)][stage]

    def stages_of(self, rank: int) -> list[tuple[int, int]]:
        """The (direction, stage) pairs whose weights this rank holds."""
        return [(d, s) for d, row in enumerate(self.placement) for s, holder in enumerate(row) if holder == rank]


def needs(schedule: Schedule, action: Action) -> list[Key]:
    """The results that must exist before the action may start."""
    stage = action.stage
    micro_batch = action.micro_batch
    # --- exercise 6.23: what an action waits for ---
    if action.kind == F:
        return [(F, stage - 1, micro_batch)] if stage > 0 else []
    if action.kind == W:
        return [(B, stage, micro_batch)]
    above = [(B, stage + 1, micro_batch)] if stage < schedule.stages - 1 else []
    return [(F, stage, micro_batch), *above]
    # --- end exercise ---


def blocks(actions: Iterable[Action]) -> list[list[Action]]:
    """The list of one rank, split into units that run at once: single actions, and F&B pairs."""
    result: list[list[Action]] = []
    for action in actions:
        if action.overlapped and result:
            result[-1].append(action)
        else:
            result.append([action])
    return result


# ------------------------------------------------------------------------------------------------- communication


@dataclass(frozen=True)
class Message:
    """An activation (kind F, from `stage` to the stage above) or its gradient (kind B, to the stage below)."""

    kind: str
    stage: int  # the stage that produces it
    micro_batch: int
    source: int  # ranks
    destination: int

    def __str__(self) -> str:
        what = "activation" if self.kind == F else "gradient"
        return f"the {what} of {self.kind}{self.micro_batch}@{self.stage} from rank {self.source} to {self.destination}"


Program = list[Action | Message]


def messages_of(schedule: Schedule, action: Action) -> list[Message]:
    """The messages to send after the action: none if the next stage is on the same rank."""
    result = []
    for kind, stage, micro_batch in action.yields():
        target = {F: stage + 1, B: stage - 1, W: -1}[kind]
        if 0 <= target < schedule.stages:
            source = schedule.rank_of(stage, micro_batch)
            destination = schedule.rank_of(target, micro_batch)
            if source != destination:
                result.append(Message(kind, stage, micro_batch, source, destination))
    return result


def programs(schedule: Schedule) -> list[Program]:
    """For each rank: its actions and its messages (sent *and* received), in an order that cannot deadlock.

    All programs are parts of one order, that in which actions end if F, B and W take one unit, each
    followed by its messages. (An action ends later than everything it needs, so this order is valid.) A
    runtime must keep the order of messages; it may post them earlier and need not wait for its sends.
    """
    timeline = simulate(schedule)
    order = sorted((end, rank, i) for rank, ends in enumerate(timeline.end) for i, end in enumerate(ends))
    result: list[Program] = [[] for _ in range(schedule.ranks)]
    for _, rank, i in order:
        action = schedule.actions[rank][i]
        result[rank].append(action)
        for message in messages_of(schedule, action):
            result[message.source].append(message)
            result[message.destination].append(message)
    return result


def crossings(schedule: Schedule) -> dict[Message, tuple[Message, ...]]:
    """The messages that two ranks exchange at the same time, each mapped to all messages of its crossing.

    In the steady state of 1F1B an activation crosses a gradient of the opposite direction. A runtime may
    start them as one batch, at the last of them in `programs`. No rank needs the others sooner, because every
    action that needs them ends later. (The time is for actions of one unit each, as in `programs`.)
    """
    timeline = simulate(schedule)
    at = {}  # at[two ranks, moment]: their messages, in the order of `programs`
    order = sorted((end, rank, i) for rank, ends in enumerate(timeline.end) for i, end in enumerate(ends))
    for end, rank, i in order:
        for message in messages_of(schedule, schedule.actions[rank][i]):
            key = (frozenset((message.source, message.destination)), end)
            at[key] = (*at.get(key, ()), message)
    both_ways = [group for group in at.values() if len({message.source for message in group}) == 2]
    return {message: group for group in both_ways for message in group}


def check_programs(schedule: Schedule, given: Sequence[Program]) -> None:
    """Run the programs with sends that block until the receiver takes them. Raises ScheduleError if they get stuck.

    One thread per rank and no buffers: the most severe runtime. Durations do not matter, because a step that
    is possible stays possible: either all timings finish or none does.
    """
    position = [0] * schedule.ranks
    done: set[Key] = set()

    def at(rank: int) -> Action | Message | None:
        return given[rank][position[rank]] if position[rank] < len(given[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            while (step := at(rank)) is not None:
                if isinstance(step, Message):
                    peer = step.destination if rank == step.source else step.source
                    if at(peer) != step:
                        break
                    position[peer] += 1
                    done.add(("sent " + step.kind, step.stage, step.micro_batch))
                else:
                    arrived = {key: key for key in needs(schedule, step)}
                    for key in arrived:  # a result of another rank counts once its message has arrived
                        if schedule.rank_of(key[1], key[2]) != rank:
                            arrived[key] = ("sent " + key[0], *key[1:])
                    if not done.issuperset(arrived.values()):
                        break
                    done.update(step.yields())
                position[rank] += 1
                moved = True
    steps = {rank: at(rank) for rank in range(schedule.ranks)}
    stuck = [f"rank {rank} at {step}" for rank, step in steps.items() if step is not None]
    if stuck:
        raise ScheduleError(f"{schedule.name}: messages deadlock under unbuffered sends: {'; '.join(stuck)}")


# --------------------------------------------------------------------------------------------------- the checker


def check(schedule: Schedule) -> None:
    """Raise ScheduleError, naming the offending action, unless the schedule is complete, ordered and free of deadlock.

    1. every list belongs to a rank, and every action is on the rank that holds its stage;
    2. for each stage and micro-batch: one F, and either one BW or one B and one W;
    3. on a rank, F before B before W; a pair that overlaps is one F, then one backward of something else;
    4. the lists do not wait for each other in a circle;
    5. the messages, in the order of `programs`, pass even with blocking sends.
    """
    name = schedule.name
    p = schedule.ranks
    m = schedule.micro_batches
    if len(schedule.actions) != p:
        raise ScheduleError(f"{name}: {len(schedule.actions)} lists of actions for {p} ranks")
    for direction, row in enumerate(schedule.placement):
        if len(row) != schedule.stages or not all(0 <= rank < p for rank in row):
            raise ScheduleError(
                f"{name}: placement[{direction}] must name a rank below {p} for {schedule.stages} stages"
            )
    seen: Counter[Key] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            where = f"{name}: rank {rank}: {action}"
            if action.kind not in (F, B, W, BW):
                raise ScheduleError(f"{where}: the kind is {action.kind!r}, not F, B, W or BW")
            if not (0 <= action.stage < schedule.stages and 0 <= action.micro_batch < m):
                raise ScheduleError(f"{where}: there are {schedule.stages} stages and {m} micro-batches")
            if (holder := schedule.rank_of(action.stage, action.micro_batch)) != rank:
                raise ScheduleError(f"{where}: that stage lies on rank {holder} for this micro-batch")
            for key in action.yields():
                seen[key] += 1
                if seen[key] > 1:
                    raise ScheduleError(f"{where}: its {key[0]} is done twice")
            for key in needs(schedule, action):
                if schedule.rank_of(key[1], key[2]) == rank and not seen[key]:
                    raise ScheduleError(f"{where} comes before {key[0]}{key[2]}@{key[1]}, which it needs")
        if actions and actions[0].overlapped:
            raise ScheduleError(
                f"{name}: rank {rank}: {actions[0]} overlaps with an action before it, but is the first"
            )
        for block in blocks(actions):
            pair = "".join(action.kind[0] for action in block)
            if len(block) > 1 and (pair != "FB" or block[0].yields()[0][1:] == block[1].yields()[0][1:]):
                raise ScheduleError(
                    f"{name}: rank {rank}: {block[-1]} overlaps with {block[0]}; a pair is one F, then one backward of "
                    "another stage or micro-batch"
                )
    for stage in range(schedule.stages):
        for micro_batch in range(m):
            for kind in (F, B, W):
                if not seen[kind, stage, micro_batch]:
                    rank = schedule.rank_of(stage, micro_batch)
                    raise ScheduleError(f"{name}: rank {rank}: {kind}{micro_batch}@{stage} is missing")
    check_programs(schedule, programs(schedule))  # the simulation inside `programs` finds a circle of lists


# ------------------------------------------------------------------------------------------------- the simulator


@dataclass(frozen=True)
class Times:
    """How long one action takes, in any unit. f, b, w: one number for all stages, or one for each stage.

    `communication` is the time from the end of an action until another rank can use its result. `pair` is the
    time of an overlapped F&B pair (one number); by default the sum of its parts, without any gain.
    """

    f: float | Sequence[float] = 1
    b: float | Sequence[float] = 1
    w: float | Sequence[float] = 1
    communication: float = 0
    pair: float | None = None

    def of(self, action: Action) -> float:
        total: float = 0
        for kind in action.kind:
            time = {F: self.f, B: self.b, W: self.w}[kind]
            total += time[action.stage] if isinstance(time, Sequence) else time
        return total

    def of_block(self, block: Sequence[Action]) -> float:
        return self.pair if len(block) == 2 and self.pair is not None else sum(self.of(action) for action in block)


@dataclass(frozen=True)
class Timeline:
    """The result of `simulate`. start[rank][i] and end[rank][i] belong to schedule.actions[rank][i]."""

    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    work: tuple[float, ...]  # time each rank computes
    peak_activations: tuple[int, ...]  # per rank: most (stage, micro-batch) pairs held at once

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks: the wall-clock time of one step."""
        return max(end[-1] for end in self.end if end)

    @property
    def cost(self) -> float:
        """The longest time any rank is occupied, from its own first start to its own last end."""
        return max(end[-1] - start[0] for start, end in zip(self.start, self.end, strict=True) if end)

    @property
    def bubble(self) -> float:
        """Idle time of the rank that idles most. Waiting for a slower stage also counts as idle time."""
        # --- exercise 6.21: the bubble, in time ---
        return self.cost - min(self.work)
        # --- end exercise ---

    @property
    def bubble_ratio(self) -> float:
        return self.bubble / min(self.work)


def simulate(schedule: Schedule, times: Times | None = None) -> Timeline:
    """Start every action once its rank is free and its inputs are there. Raises ScheduleError on deadlock."""
    times = times or Times()
    finished: dict[Key, tuple[float, int]] = {}  # result -> (when, on which rank)
    start: list[list[float]] = [[] for _ in range(schedule.ranks)]
    end: list[list[float]] = [[] for _ in range(schedule.ranks)]
    work = [0.0] * schedule.ranks
    waiting = [blocks(actions)[::-1] for actions in schedule.actions]  # reversed: the next block is the last
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(waiting):
            while queue:
                block = queue[-1]
                wanted = [key for action in block for key in needs(schedule, action)]
                if any(key not in finished for key in wanted):
                    break
                begin = end[rank][-1] if end[rank] else 0.0
                for key in wanted:
                    when, where = finished[key]
                    begin = max(begin, when if where == rank else when + times.communication)
                duration = times.of_block(block)
                for action in block:
                    start[rank].append(begin)
                    end[rank].append(begin + duration)
                    finished.update((key, (begin + duration, rank)) for key in action.yields())
                work[rank] += duration
                queue.pop()
                moved = True
    stuck = []
    for rank, queue in enumerate(waiting):
        if queue:
            key = next(k for action in queue[-1] for k in needs(schedule, action) if k not in finished)
            stuck.append(f"rank {rank} waits at {queue[-1][0]} for {key[0]}{key[2]}@{key[1]}")
    if stuck:
        raise ScheduleError(f"{schedule.name}: deadlock: {'; '.join(stuck)}")
    peaks = tuple(peak_activations(actions) for actions in schedule.actions)
    return Timeline(schedule, tuple(map(tuple, start)), tuple(map(tuple, end)), tuple(work), peaks)


def peak_activations(actions: Iterable[Action]) -> int:
    """The most (stage, micro-batch) pairs whose activations one rank holds at once: from F until W (or BW) is done.

    It depends only on the order, not on the times. B frees nothing here, because the weight gradient still
    needs the inputs of the layers and the gradients of their outputs.
    """
    held = peak = 0
    # --- exercise 6.22: count what is held ---
    for action in actions:
        if action.kind == F:
            held += 1
            peak = max(peak, held)
        elif action.kind in (W, BW):
            held -= 1
    # --- end exercise ---
    return peak


# ------------------------------------------------------------------------------------------- the command line's manners


def is_rank_zero() -> bool:
    """Whether this process prints. Under torchrun every rank computes the same, without communication."""
    return os.environ.get("RANK", "0") == "0"


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, printed only by rank 0."""

    def error(self, message: str) -> NoReturn:
        if is_rank_zero():
            print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
        sys.exit(2)


def parse_times(given: str) -> Times:
    """Times from "F,B,W" or "F,B,W,C" as in --times 3,4,2,1."""
    try:
        numbers = [float(part) for part in given.split(",")]
    except ValueError:
        numbers = []
    finite = all(math.isfinite(number) for number in numbers)  # not NaN, for which "< 0" is false
    if len(numbers) not in (3, 4) or not finite or min(numbers[:3]) <= 0 or numbers[-1] < 0:
        raise argparse.ArgumentTypeError(f"{given!r}: give F,B,W, all > 0, or F,B,W,C with C >= 0 for messages")
    return Times(*numbers[:3], communication=numbers[3] if len(numbers) == 4 else 0)


def main() -> None:
    """Check the two-rank schedule of the docstring, then both lists in an order that deadlocks."""
    OneLineParser(description="Checks and simulates a schedule of two ranks, then a broken one.").parse_args()
    say = print if is_rank_zero() else lambda line: None
    first = tuple(Action(kind, 0, i) for kind, i in ((F, 0), (F, 1), (BW, 0), (BW, 1)))
    second = tuple(Action(kind, 1, i) for kind, i in ((F, 0), (BW, 0), (F, 1), (BW, 1)))
    good = Schedule("by hand", 2, 2, 2, ((0, 1),), (first, second))
    check(good)
    timeline = simulate(good)
    say(f"good: {timeline.makespan:g} units of time, bubble {timeline.bubble:g}, held {timeline.peak_activations}")
    bad = Schedule("by hand", 2, 2, 2, ((0, 1),), (first[::2] + first[1::2], second[2:] + second[:2]))
    try:
        check(bad)
    except ScheduleError as error:
        say(f"bad: {error}")
    else:
        raise SystemExit("the checker let a deadlock pass")
    say("PASS")


if __name__ == "__main__":
    main()
