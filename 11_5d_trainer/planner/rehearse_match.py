"""Match the recorded programs of the ranks of a run: does every message have its other side?

Problem. A rank that skips a collective, or calls two in another order, does not fail. It waits, and so do all
others, until a timeout says that something did not arrive. Or worse: sizes happen to fit, and the sum is wrong.

Idea. The programs of the ranks (rehearse_rank.py) are lists of starts and waits. Replay them: a rank
continues until it waits for something that is not complete. What can be decided without any clock:

    a collective completes     when every rank of its group has started its k-th in this group. All k-th must
                               agree in name, sizes, dtype, sum or root, and in the splits of an all-to-all
    a message completes        when its receive and its send have both been started, k-th with k-th between two
                               ranks. On NCCL two ranks have one queue for both directions: a send matches a
                               receive, unless both are posted in one batch
    a deadlock                 is when no rank can continue: follow the waits until a rank recurs, or has ended

A send waits for its receive, as on NCCL: that Gloo may have buffered a small message is luck.

Ranks with the same program. `twin(rank)` is the rank whose program a rank runs: of 16,384 ranks only those of
different stages differ. Twins run in lockstep, so a collective completes when one of each kind has started
it. A message to or from a rank that was not run is matched with its twin's, as many places apart. This
needs every group of a rank to contain its twin; `check_twins` reports where one does not. That twins really
do the same is verified by `--all-ranks`, where every rank runs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rehearse_rank import Group, Line, Op, Recorded, written

Twin = Callable[[int], int]
Key = tuple[Group, int, int, int]  # group; twins of sender and receiver; their distance in the group


@dataclass(frozen=True)
class Finding:
    """Why the run would not continue, in a few lines that name ranks and lines of code."""

    kind: str  # "groups" | "mismatch" | "deadlock" | "left over"
    text: str


class Play:
    """Replays all programs. `run` returns the first finding, or None if every rank reaches its end."""

    def __init__(self, runs: Mapping[int, Recorded], twin: Twin, backend: str) -> None:
        self.runs = runs
        self.twin = twin
        self.backend = backend
        self.at = dict.fromkeys(runs, 0)  # place in the program
        self.calls: dict[tuple[Group, int], int] = defaultdict(int)  # collectives started, by group and rank
        self.order: dict[tuple[int, int], int] = {}  # (rank, op) -> its index in its group
        self.here: dict[tuple[Group, int], dict[int, int]] = defaultdict(dict)  # (group, k) -> rank -> its op
        self.mail: dict[Key, tuple[deque[Any], deque[Any]]] = defaultdict(lambda: (deque(), deque()))  # sends, receives
        self.done: set[tuple[int, int]] = set()
        self.members: dict[Group, list[int]] = {}
        self.found: Finding | None = None

    def run(self) -> Finding | None:
        going = True
        while going and not self.found:
            going = False
            for rank in self.runs:
                going |= self.advance(rank)
        if self.found:
            return self.found
        stuck = [rank for rank, run in self.runs.items() if self.at[rank] < len(run.program)]
        if stuck:
            return self.deadlock(stuck[0])
        return self.left_over() or (self.out_of_line() if self.backend == "nccl" else None)

    def advance(self, rank: int) -> bool:
        """Continue as far as this rank can. Returns whether anything happened."""
        program = self.runs[rank].program
        begin = self.at[rank]
        while self.at[rank] < len(program) and not self.found:
            starts, index = program[self.at[rank]]
            if starts:
                self.start(rank, index)
            elif (rank, index) not in self.done:
                break
            self.passed(rank, starts, index)
            self.at[rank] += 1
        return self.at[rank] > begin

    def start(self, rank: int, index: int) -> None:
        op = self.runs[rank].ops[index]
        if op.peer is not None:
            self.post(rank, index, op)
            return
        k = self.calls[op.group, rank]
        self.calls[op.group, rank] += 1
        self.order[rank, index] = k
        here = self.here[op.group, k]
        here[rank] = index
        if len(here) == len(self.of(op.group)):
            self.compare(op.group, k, here)
            self.arrive(list(here.items()))
            del self.here[op.group, k]

    def of(self, group: Group) -> list[int]:
        """The ranks of a group whose programs were run: one of each kind."""
        if group not in self.members:
            self.members[group] = [rank for rank in group[1] if rank in self.runs]
        return self.members[group]

    def post(self, rank: int, index: int, op: Op) -> None:
        """Post a message: find its peer, and whether the other side is posted."""
        key = self.line_of(rank, op)
        sends, receives = self.mail[key]
        (sends if op.name == "send" else receives).append((rank, index))
        while sends and receives:
            one = sends.popleft()
            other = receives.popleft()
            a, b = (self.runs[r].ops[i] for r, i in (one, other))
            self.arrive([one, other])
            if (a.numel, a.dtype) != (b.numel, b.dtype) and not self.found:
                self.found = Finding("mismatch", self.both(one, other, "what is sent is not what is received"))

    def line_of(self, rank: int, op: Op) -> Key:
        ranks = op.group[1]
        assert op.peer is not None
        apart = (op.peer - ranks.index(rank)) % len(ranks)
        peer = self.twin(ranks[op.peer])
        return (op.group, rank, peer, apart) if op.name == "send" else (op.group, peer, rank, -apart % len(ranks))

    def compare(self, group: Group, k: int, here: Mapping[int, int]) -> None:
        """Is the k-th collective of a group the same on all of its ranks?"""
        (first, index), *others = sorted(here.items())
        mine = self.runs[first].ops[index]
        for rank, other_index in others:
            other = self.runs[rank].ops[other_index]
            why = differ(mine, other, group[1].index(first), group[1].index(rank))
            if why:
                text = self.both((first, index), (rank, other_index), why) + self.parted(group, first, rank, k)
                self.found = Finding("mismatch", text)
                return

    def arrive(self, both_sides: list[tuple[int, int]]) -> None:
        """All participants have started. (rehearse_time.py adds a clock here, and in `passed`.)"""
        self.done.update(both_sides)

    def passed(self, rank: int, starts: bool, index: int) -> None:
        """A rank continues with the next entry of its program."""

    # ---- messages

    def parted(self, group: Group, first: int, other: int, before: int) -> str:
        """Collectives of equal sizes hide that one is missing. The lines of code show where ranks diverge."""
        mine, theirs = (
            [op for op in self.runs[rank].ops if op.group == group and op.peer is None] for rank in (first, other)
        )
        for k, (a, b) in enumerate(zip(mine[:before], theirs[:before], strict=False)):
            if a.lines != b.lines:
                return (
                    f"\n  they parted at the {nth(k)}, with the same sizes:"
                    f"\n    rank {first} at {at(a)}\n    rank {other} at {at(b)}"
                )
        return ""

    def both(self, one: tuple[int, int], other: tuple[int, int], why: str) -> str:
        lines = [why]
        lines += [f"  rank {rank} {self.what(rank, index)}" for rank, index in (one, other)]
        return "\n".join(lines)

    def what(self, rank: int, index: int) -> str:
        op = self.runs[rank].ops[index]
        name = self.runs[rank].names.get(op.group, "a group")
        size = f"{op.numel:,} x {str(op.dtype).removeprefix('torch.')}" if op.name != "barrier" else "nothing"
        if op.peer is not None:
            way = "to" if op.name == "send" else "from"
            return f"{op.name} of {size} {way} rank {op.group[1][op.peer]} in {name}\n    at {at(op)}"
        detail = f" ({op.detail})" if op.detail else ""
        count = f", the {nth(self.order[rank, index])} there" if (rank, index) in self.order else ""
        return f"{op.name}{detail} of {size} in {name} {few(op.group[1])}{count}\n    at {at(op)}"

    def missing(self, rank: int, index: int) -> int:
        """A rank that has not started what this rank waits for."""
        op = self.runs[rank].ops[index]
        if op.peer is not None:
            return self.twin(op.group[1][op.peer])
        return next(r for r in self.of(op.group) if r not in self.here[op.group, self.order[rank, index]])

    def deadlock(self, rank: int) -> Finding:
        """Follow the waits from a rank that is stuck, until a rank occurs twice or has ended."""
        chain: list[int] = []
        lines: list[str] = []
        while rank not in chain:
            chain.append(rank)
            run = self.runs[rank]
            if self.at[rank] == len(run.program):
                last = f", after {at(run.ops[-1])}" if run.ops else ""
                before = self.runs[chain[-2]].ops[self.runs[chain[-2]].program[self.at[chain[-2]]][1]]
                hint = ""
                if before.peer is None:
                    hint = self.parted(before.group, chain[-2], rank, len(run.ops))
                return Finding("deadlock", "\n".join([*lines, f"rank {rank} has ended without it{last}{hint}"]))
            index = run.program[self.at[rank]][1]
            lines.append(f"rank {rank} waits in {self.what(rank, index)}")
            rank = self.missing(rank, index)
            lines.append(f"  for rank {rank}")
        begin = chain.index(rank)
        text = f"a circle of {len(chain) - begin} rank(s), each waiting for the next\n"
        text += "\n".join(lines[2 * begin :])
        if begin == 0 and len(chain) - begin == 2:
            a, b = (self.runs[r].ops[self.runs[r].program[self.at[r]][1]] for r in chain)
            if a.group == b.group and a.peer is None:
                text += self.parted(a.group, chain[0], chain[1], len(self.runs[chain[0]].ops))
        return Finding("deadlock", text)

    def left_over(self) -> Finding | None:
        """All ranks have ended; was something started that was never matched or waited for?"""
        for (group, _), here in self.here.items():
            rank, index = next(iter(here.items()))
            other = next(r for r in self.of(group) if r not in here)
            last = [i for i, op in enumerate(self.runs[other].ops) if op.group == group and op.peer is None]
            text = f"rank {rank} {self.what(rank, index)}\n  rank {other} never calls it"
            text += f"; its last there is\n  {self.what(other, last[-1])}" if last else ""
            return Finding("left over", text)
        for sends, receives in self.mail.values():
            for rank, index in [*sends, *receives]:
                return Finding("left over", f"rank {rank} {self.what(rank, index)}\n  whose other side never comes")
        return None

    def out_of_line(self) -> Finding | None:
        """NCCL has no tags, and a pair of ranks one queue: their operations must mirror each other."""
        lines: dict[tuple[Group, int, int], list[tuple[list[str], int]]] = defaultdict(list)
        for rank, run in self.runs.items():
            last: dict[tuple[Group, int, int], int] = {}
            for index, op in enumerate(run.ops):
                if op.peer is None or op.group[1][op.peer] not in self.runs:
                    continue
                key = op.group, rank, op.group[1][op.peer]
                if op.batch and last.get(key) == op.batch:
                    lines[key][-1][0].append(op.name)
                else:
                    lines[key].append(([op.name], index))
                last[key] = op.batch
        mirror = {"send": "recv", "recv": "send"}
        for (group, a, b), mine in lines.items():
            for (names, i), (others, j) in zip(mine, lines[group, b, a], strict=False) if a < b else ():
                if sorted(names) != sorted(mirror[name] for name in others):
                    why = (
                        "on nccl these two wait for each other: neither is the other side of what stands first in line"
                    )
                    return Finding("deadlock", self.both((a, i), (b, j), why))
        return None


def differ(a: Op, b: Op, i: int, j: int) -> str:
    """Why two calls are not the same collective, seen from places i and j of the group; empty if they are."""
    for what, x, y in (("name", a.name, b.name), ("dtype", a.dtype, b.dtype), ("detail", a.detail, b.detail)):
        if x != y:
            return {"name": "two different collectives meet", "dtype": "their dtypes differ"}.get(
                what, "one is not the other's"
            )
    if a.name == "all_to_all":
        assert a.splits and b.splits
        if a.splits[0][j] != b.splits[1][i] or b.splits[0][i] != a.splits[1][j]:
            return f"rank by rank: {a.splits[0][j]} sent for {b.splits[1][i]} received, or the other way round"
        return ""
    return "their sizes differ" if a.numel != b.numel else ""


def nth(k: int) -> str:
    return f"{k + 1}{ {1: 'st', 2: 'nd', 3: 'rd'}.get((k + 1) % 10 if (k + 1) // 10 % 10 != 1 else 0, 'th') }"


def few(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    if len(ranks) <= 8:
        return f"({', '.join(map(str, ranks))})"
    return f"({', '.join(map(str, ranks[:3]))} ... {ranks[-1]}: {len(ranks)} ranks)"


def at(op: Op) -> str:
    inner, trainer = op.lines
    return written(inner) + (f", called at {written(trainer)}" if trainer and trainer != inner else "")


def compare_groups(runs: Mapping[int, Recorded]) -> Finding | None:
    """Making a group is a collective of the whole world: every rank makes the same ones in the same order."""
    (first, mine), *others = runs.items()
    for rank, run in others:
        if run.made == mine.made:
            continue
        no_group: tuple[tuple[int, ...], Line | None] = ((), None)
        for k in range(max(len(mine.made), len(run.made))):
            a, b = (each[k] if k < len(each) else no_group for each in (mine.made, run.made))
            if a[0] != b[0]:
                text = f"the {nth(k)} group that is made is not the same on all ranks"
                for who, (ranks, line) in ((first, a), (rank, b)):
                    text += f"\n  rank {who}: {few(ranks) if line else 'no more groups'}"
                    text += f"\n    at {written(line)}" if line else ""
                return Finding("groups", text)
    return None


def check_twins(runs: Mapping[int, Recorded], twin: Twin) -> str:
    """Why the ranks that were run cannot represent all; empty if they can."""
    for rank in runs:
        if twin(rank) != rank:
            return f"rank {rank} was run, and it stands for no rank"
    for group in {op.group for run in runs.values() for op in run.ops}:
        inside = set(group[1])
        for rank in group[1]:
            if twin(rank) not in inside:
                return (
                    f"rank {rank} is in the group {few(group[1])}, and rank {twin(rank)}, which stands for it, is not"
                )
    return ""


def match(runs: Mapping[int, Recorded], twin: Twin = lambda rank: rank, backend: str = "nccl") -> Finding | None:
    """The first thing that goes wrong when these ranks run together; None if nothing does."""
    return compare_groups(runs) or Play(runs, twin, backend).run()
