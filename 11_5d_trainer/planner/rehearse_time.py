"""The rehearsed programs on a clock: when each rank computes or waits, and for whom. An event simulation.

Problem. Formulas of a step's time assume what overlaps. The programs of the ranks show it: a collective
overlaps with what a rank computes between its start and its wait, and an early rank waits for a late one.

Idea. The match (rehearse_match.py) already replays all programs. Here each entry takes time, by three rules:

    compute      the matmuls and elementwise operators before the entry, by plan_time.py's rates
    a collective begins when its last rank has started it and the group's previous one is done, and takes the
                 time that plan_time.py gives for its bytes and its group
    a wait       ends when the collective does, if that is later than now

    rank 0   ===compute===|start            |==compute==|wait . . . .|==compute==
    group                          [=======all-reduce=======]
    rank 1   =======compute=======|start    |=====compute=====|wait .|

A twin has the clock of the rank that was run for it. The time of a wait is *exposed*; waits for messages
between stages are the bubble of the pipeline (and the time of the messages).

Not modelled: messages of different groups that share links, the host's own time. Chapter 09's fused kernels
take the time of their reads and writes; readable PyTorch also reads and writes every intermediate tensor.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_time import Cluster
from plan_traffic import Flow
from rehearse_match import Play, Twin, at
from rehearse_rank import Group, Recorded


@dataclass
class Slice:
    """An interval of a rank's time, in seconds from the start of the step.

    lane   "compute", "waits" (its name is then the group that is waited for), or a group
    """

    rank: int
    lane: str
    name: str
    begin: float
    end: float
    note: str = ""
    pair: int = 0  # of a message: its id, the same on both sides


@dataclass
class Timeline:
    """A timed step: its length, and for each rank compute seconds, and wait seconds by group."""

    seconds: float
    compute: dict[int, float]
    exposed: dict[int, dict[str, float]]
    slices: list[Slice]


class Clock(Play):
    """`Play`, with a clock on every rank."""

    def __init__(self, runs: Mapping[int, Recorded], twin: Twin, backend: str, cluster: Cluster) -> None:
        super().__init__(runs, twin, backend)
        self.cluster = cluster
        self.now: dict[int, float] = dict.fromkeys(runs, 0.0)
        self.begun: dict[tuple[int, int], float] = {}  # (rank, op) -> when this rank started it
        self.ends: dict[tuple[int, int], float] = {}
        self.free: dict[tuple[int, Group], float] = defaultdict(float)  # when the group's last one is done, by rank
        self.compute: dict[int, float] = dict.fromkeys(runs, 0.0)
        self.exposed: dict[int, dict[str, float]] = {rank: defaultdict(float) for rank in runs}
        self.slices: list[Slice] = []
        self.pairs = 0

    def start(self, rank: int, index: int) -> None:
        self.work(rank)
        self.begun[rank, index] = self.now[rank]
        super().start(rank, index)

    def work(self, rank: int) -> None:
        run = self.runs[rank]
        place = self.at[rank]
        seconds = run.busy[place] if place < len(run.busy) else 0.0
        if seconds:
            begin = self.now[rank]
            self.now[rank] += seconds
            self.compute[rank] += seconds
            self.slices.append(Slice(rank, "compute", "compute", begin, self.now[rank]))

    def arrive(self, both_sides: list[tuple[int, int]]) -> None:
        super().arrive(both_sides)
        rank, index = both_sides[0]
        op = self.runs[rank].ops[index]
        if index < self.runs[rank].step_from:  # while the model is built no time passes
            self.ends.update(dict.fromkeys(both_sides, 0.0))
            return
        lines = [(r, op.group) for r, _ in both_sides]
        begin = max(
            [*(self.begun[each] for each in both_sides), *(self.free[line] for line in lines if op.peer is None)]
        )
        end = begin + self.seconds(rank, index)
        self.pairs += op.peer is not None
        for each, line in zip(both_sides, lines, strict=True):
            self.ends[each] = end
            if op.peer is None:
                self.free[line] = end
            if end > begin:
                mine = self.runs[each[0]].ops[each[1]]
                lane = self.runs[each[0]].names.get(op.group, "a group")
                self.slices.append(Slice(each[0], lane, mine.name, begin, end, f"{op.bytes:,} bytes, {at(mine)}"))
                self.slices[-1].pair = self.pairs if op.peer is not None else 0

    def seconds(self, rank: int, index: int) -> float:
        """Seconds by plan_time.py for this collective or message between just these ranks."""
        op = self.runs[rank].ops[index]
        ranks = op.group[1]
        if len(ranks) == 1:
            return 0.0
        if op.peer is not None:
            return self.cluster.seconds(Flow("send", "", op.bytes, 2), abs(ranks[op.peer] - rank))
        name = "all_gather" if op.name == "broadcast" else op.name
        return self.cluster.seconds(Flow(name, "", op.bytes, len(ranks)), ranks[1] - ranks[0])

    def passed(self, rank: int, starts: bool, index: int) -> None:
        if starts:
            return
        self.work(rank)
        late = self.ends[rank, index] - self.now[rank]
        if late > 0:
            op = self.runs[rank].ops[index]
            lane = self.runs[rank].names.get(op.group, "a group")
            self.exposed[rank][lane] += late
            end = self.ends[rank, index]
            self.slices.append(Slice(rank, "waits", lane, self.now[rank], end, f"for {op.name}, {at(op)}"))
            self.now[rank] = self.ends[rank, index]


def on_the_clock(runs: Mapping[int, Recorded], twin: Twin, backend: str, cluster: Cluster) -> Timeline:
    """Replay programs that were recorded with this cluster and match. ValueError if they do not match."""
    clock = Clock(runs, twin, backend, cluster)
    finding = clock.run()
    if finding:
        raise ValueError(finding.text)
    for rank in runs:
        clock.work(rank)  # what follows the last entry
    return Timeline(max(clock.now.values()), clock.compute, clock.exposed, clock.slices)


def tracks(slices: list[Slice]) -> list[int]:
    """For each slice the track of its lane, from 0, so that no two on a track overlap. Messages to several
    peers are in flight at once, and a viewer draws overlapping slices on one track as nested."""
    free: dict[tuple[int, str], list[float]] = defaultdict(list)  # when each track of a lane is free
    found = [0] * len(slices)
    for i in sorted(range(len(slices)), key=lambda i: (slices[i].begin, slices[i].end)):
        piece = slices[i]
        ends = free[piece.rank, piece.lane]
        found[i] = next((track for track, end in enumerate(ends) if end <= piece.begin), len(ends))
        ends[found[i] :] = [piece.end, *ends[found[i] + 1 :]]
    return found


def write_trace(timeline: Timeline, runs: Mapping[int, Recorded], path: Path) -> None:
    """A Chrome trace, which https://ui.perfetto.dev opens: a process for each rank that was run, a thread for
    its compute, one for its waits and one for each of its groups (more where messages overlap), and an arrow
    from every send to its receive. Sorted by time, the names first."""
    slices = timeline.slices
    order = {"compute": 0, "waits": 1}
    every = {(each.rank, each.lane, track) for each, track in zip(slices, tracks(slices), strict=True)}
    lanes: dict[tuple[int, str, int], int] = {}
    for rank, lane, track in sorted(every, key=lambda key: (key[0], order.get(key[1], 2), key[1:])):
        lanes[rank, lane, track] = sum(other == rank for other, _, _ in lanes)
    names: list[dict[str, Any]] = []
    for rank, run in runs.items():
        where = ", ".join(f"{axis} {place}" for axis, place in run.place.items())
        names.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} ({where})"}})
    for (rank, lane, track), thread in lanes.items():
        name = f"{lane} {track + 1}" if track else lane
        names.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}})
    events: list[dict[str, Any]] = []
    sides: dict[int, set[str]] = defaultdict(set)
    for piece in slices:
        if piece.pair:
            sides[piece.pair].add(piece.name)
    for piece, track in zip(slices, tracks(slices), strict=True):
        at_once = {"pid": piece.rank, "tid": lanes[piece.rank, piece.lane, track]}
        ts = 1e6 * piece.begin
        dur = 1e6 * (piece.end - piece.begin)
        events.append({"name": piece.name, "ph": "X", **at_once, "ts": ts, "dur": dur, "args": {"note": piece.note}})
        if len(sides[piece.pair]) == 2 and piece.pair:  # an arrow lies inside the slices that it joins
            arrow = {"name": "message", "cat": "message", "id": piece.pair, **at_once}
            first = piece.name == "send"
            events.append(arrow | ({"ph": "s", "ts": ts} if first else {"ph": "f", "bp": "e", "ts": ts + dur / 2}))
    events.sort(key=lambda event: event["ts"])
    path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
