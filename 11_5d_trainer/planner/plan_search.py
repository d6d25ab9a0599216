"""The planner's search: every layout of a model on a cluster, which of them fit, and which is fastest.

Problem. On 4096 GPUs there are millions of layouts. Nearly all of them do not fit, or lose to a neighbour for
a reason that is known before their time is computed.

Idea. A tree whose branches are pruned where no leaf can win; pruned leaves are counted by their reason.

    tensor x ring x Ulysses x pipeline x data, whose product is the number of GPUs; sequence parallel; experts
     |                                                  the batch, the heads, the sequence do not divide
     |                                                  the best case is slower than the best so far
     +- micro-batch                                     the same for this micro-batch; it never fits
         +- ZeRO stage                                  the trainer refuses it; the states alone do not fit
             +- schedule, stages per rank               more stages than layers
                 +- recomputation: the least that fits  more of it would only be slower
                    FPDT: the fewest chunks that fit    the same; its host's memory is too small

The best case of a branch is its time without a bubble, without data parallelism and without recomputation, at
its largest micro-batch (`least_seconds`). No leaf is faster, so pruning there changes nothing. Branches are
taken in the order of their best cases, so most are pruned before they are expanded.

The remaining leaves are timed with formulas (plan_time.py). The fastest are then evaluated exactly: every
pipeline rank's peak by plan_memory.py, the bubble by chapter 06's simulator. What does not fit is dropped.

`three_steps` is the method of the Ultra-Scale Playbook: first make it fit, then reach the global batch, then
speed it up. It tries dozens of layouts; the search shows what that costs.

    python 11_5d_trainer/planner/plan.py --model llama3-70b --cluster h100-400g --nodes 64 --seq-len 8192

Symbols as in plan_memory.py.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import planner_paths  # noqa: F401  finds the trainer and the chapters
from llama import LlamaConfig
from moe_layer import MoEConfig
from ops import AUTOCAST
from options import Config
from plan_memory import (
    Layout,
    around,
    block_activations,
    fpdt_host,
    fpdt_working_set,
    full_places,
    held,
    kept_for_weights,
    peak,
    steady,
    widths,
    working_set,
)
from plan_time import Cluster, Step, least_seconds, of_model, rough_parameters, rough_states, step_time
from schedule_simulator import ScheduleError

GB = 1e9
RESERVED = 0.08  # of a GPU's memory: the context, the collectives' buffers, holes in the allocator
RECOMPUTE = ("none", "selective", "full")
CHUNKS = (2, 4, 8, 16, 32, 64)  # FPDT's, of a rank's tokens
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
ZEROS = (0, 1, 2, 3)
SCHEDULES = (("afab", 1), ("1f1b", 1), *(("interleaved", v) for v in (2, 3, 4, 5, 6, 8, 10)))
SCHEDULES += (("breadth-first", 2), ("breadth-first", 4), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2))
TOO_SLOW = "slower in the best case than those already found"
NOT_EXACTLY = "looked right, but does not fit exactly"


@dataclass(frozen=True)
class Task:
    """The task to plan."""

    model: LlamaConfig
    moe: MoEConfig | None
    cluster: Cluster
    gpus: int
    global_batch: int  # samples
    seq_len: int
    precision: str = ""  # empty: as the trainer's on such GPUs
    name: str = ""  # as given: "--model llama3-8b"
    kernels: str = ""  # "torch" or "triton"; empty: as the trainer's --kernels auto on a GPU

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", self.precision or ("bf16-master" if self.cluster.bf16 else "fp16"))

    @property
    def base(self) -> Layout:
        """The fields that all layouts of this task share."""
        kernels = self.kernels or ("torch" if self.no_kernels else "triton")
        return Layout(seq_len=self.seq_len, precision=self.precision, kernels=kernels)

    @property
    def no_kernels(self) -> str:
        """Why the trainer would refuse --kernels triton; empty if it would not."""
        if not self.cluster.bf16:
            return "needs GPUs that compute in bf16"
        size = self.model.head_dim
        return "" if 32 <= size <= 256 and size % 16 == 0 else f"takes heads of 32, 48, ... 256, and not of {size}"

    @property
    def memory(self) -> float:
        """Bytes of a GPU that a step may use."""
        return self.cluster.memory_gb * GB * (1 - RESERVED)


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    step: Step
    peak: float  # bytes
    largest: str  # the largest part's name


@dataclass
class Found:
    best: list[Candidate]
    counted: int
    timed: int
    pruned: Counter[str]
    closest: Candidate | None  # the smallest, if nothing fits


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def powers(n: int, most: int) -> list[int]:
    return [d for d in (1, 2, 4, 8, 16, 32, 64) if n % d == 0 and d <= most]


def grids(task: Task) -> Iterator[Layout]:
    """Every way to divide the GPUs among the axes (tp, cp: powers of two up to 64), valid or not."""
    base = task.base
    for tp in powers(task.gpus, task.model.heads):
        for cp in powers(task.gpus // tp, 64):
            for pp in divisors(task.gpus // tp // cp):
                if pp > task.model.layers:
                    break
                shape = replace(base, tp=tp, pp=pp, dp=task.gpus // tp // cp // pp)
                yield from (replace(shape, ring=cp // u, ulysses=u) for u in divisors(cp))
                if cp > 1:
                    yield replace(shape, ring=cp, gather_kv=True)


def refused(task: Task, shape: Layout) -> str:
    """Why the trainer would not run any layout of this shape; empty if it would."""
    c = task.model
    tp = shape.tp
    cp = shape.cp
    if c.heads % tp or c.intermediate % tp or (c.kv_heads % tp and tp % c.kv_heads):
        return "tp does not divide the heads, or the MLP"
    if task.seq_len % (2 * cp * tp):
        return "the sequence does not divide by 2 cp tp"
    if c.heads // tp % shape.ulysses:
        return "more ranks of Ulysses than heads"
    if shape.ulysses not in (1, cp) and shape.ulysses != usp(c, tp, cp):
        return "--cp-kind usp gives Ulysses as many ranks as it can, and the ring the rest"
    return "the batch does not divide by dp" if task.global_batch % shape.dp else ""


@lru_cache
def usp(model: LlamaConfig, tp: int, cp: int) -> int:
    return Config(tp=tp, cp=cp, cp_kind="usp").ring_and_ulysses(model)[1]


Room = tuple[float, float, float, float]


def room(task: Task, layout: Layout) -> Room:
    """Bytes, by formulas, of: one micro-batch in all blocks of a rank, both ends of the model, the working
    set at the loss, and in the backward of a block."""
    if layout.fpdt_chunks:
        moments = fpdt_working_set(task.model, layout)
        return 0.0, 0.0, sum(moments["loss"].values()), sum(moments["block"].values())
    layers = task.model.layers / layout.pp
    blocks = layers * block_activations(task.model, task.moe, layout)
    ends = sum(around(task.model, layout, True, True).values())
    work = working_set(task.model, task.moe, layout)
    return blocks, ends, work["loss"], work["block"]


def chunkable(task: Task, shape: Layout) -> bool:
    """Does the trainer run FPDT in this shape? It exchanges heads like Ulysses; nothing else is split."""
    plain = task.moe is None and task.precision not in AUTOCAST
    return plain and shape.tp == shape.pp == shape.ring == 1 and not shape.gather_kv


def modes(task: Task, at: Layout) -> list[Layout]:
    """The choices for this layout's activations, from the fastest to the one that saves least."""
    recomputed = [replace(at, recompute=mode) for mode in RECOMPUTE]
    return recomputed + [replace(at, fpdt_chunks=chunks) for chunks in CHUNKS] * chunkable(task, at)


def in_flight(schedule: str, p: int, m: int, v: int) -> float:
    """Micro-batches in flight on rank 0 (chapter 06's table)."""
    if p == 1:
        return 1
    known = {
        "afab": m,
        "breadth-first": m,
        "interleaved": min(m, ((v - 1) * p + 2 * p - 1) / v),
        "zb-h2": min(m, 2 * p - 1),
    }
    return known.get(schedule, min(m, p))


def fills(schedule: str, p: int) -> int:
    """The number of micro-batches from which the formulas of chapter 06's table hold."""
    if schedule.startswith("zb-"):
        return 2 * p - 1
    return p if schedule == "breadth-first" else 1


def rough_peak(task: Task, layout: Layout) -> float:
    """Peak bytes on a rank, by formulas: states, activations in flight, and the working set."""
    return higher(task, layout, stays(task, layout), room(task, layout))


def higher(task: Task, layout: Layout, states: tuple[float, float], rooms: Room) -> float:
    """The higher of two moments: the loss, on the last rank, and the backward of a block, on the first."""
    blocks, ends, loss, block = rooms
    if layout.schedule.startswith("zb-"):  # what is saved for W
        blocks += kept_for_weights(task.model, task.moe, layout, range(1, 2)) * task.model.layers / layout.pp
    flight = in_flight(layout.schedule, layout.pp, layout.micro_batches, layout.stages_per_rank)
    return max(states[0] + blocks + ends + loss, states[1] + blocks * flight + block)


def stays(task: Task, layout: Layout) -> tuple[float, float]:
    """Bytes of states by formulas, with temporarily full weights and gradients, at the same two moments."""
    states = rough_states(task.model, task.moe, layout)
    if task.precision in AUTOCAST:
        states += 2 * rough_parameters(task.model, task.moe, layout)
    if layout.zero == 3:  # gathered: the root, and a layer or two; in a block also gradients in flight
        block, ends = of_model(task.model, task.moe, layout.tp, layout.ep)
        width = widths(task.precision).weight
        return states + width * (ends + block), states + width * (1.5 * ends + 2.5 * block)
    if layout.pp > 1 and layout.zero in (0, 2):  # full gradients, until the last micro-batch
        states += widths(task.precision).weight * rough_parameters(task.model, task.moe, layout)
    return states, states


def branches(task: Task, found: Found) -> list[tuple[float, int, Layout, int]]:
    """(seconds of its best case, its number, shape, how many leaves), the best first. Counts the others."""
    possible: list[tuple[float, int, Layout, int]] = []
    for grid in grids(task):
        schedules = len(SCHEDULES) if grid.pp > 1 else 1
        leaves = len(MICRO_BATCHES) * len(ZEROS) * schedules * len(modes(task, grid))
        tokens = grid.dp * grid.cp
        experts = [e for e in divisors(task.moe.experts) if tokens % e == 0] if task.moe else [1]
        splits = (False, True) if grid.tp > 1 else (False,)
        found.counted += len(splits) * len(experts) * leaves
        if reason := refused(task, grid):
            found.pruned[reason] += len(splits) * len(experts) * leaves
            continue
        batch = task.global_batch // grid.dp
        wide = max(size for size in MICRO_BATCHES if batch % size == 0)
        for split in splits:
            for ep in experts:
                shape = replace(grid, sequence_parallel=split, ep=ep, micro_batch=wide, micro_batches=batch // wide)
                least = least_seconds(task.model, task.moe, shape, task.cluster)
                possible.append((least, len(possible), shape, leaves))
    return sorted(possible, key=lambda each: each[:2])


def search(task: Task, top: int = 10) -> Found:
    """The fastest layouts that fit. Deterministic.

    If layouts that fit by formula do not fit exactly, the search is repeated with less room.
    """
    found = search_once(task, top, 1.0)
    for share in (0.9, 0.8, 0.65):
        if len(found.best) >= top or not found.pruned[NOT_EXACTLY]:
            break
        more = [each for each in search_once(task, top, share).best if each not in found.best]
        found.best = sorted(found.best + more, key=lambda each: each.step.seconds)[:top]
    return found


def search_once(task: Task, top: int, share: float) -> Found:
    """`share`: how much of the memory the formulas may fill."""
    found = Found([], 0, 0, Counter(), None)
    timed = Timed(task, top, share)
    for least, _, shape, leaves in branches(task, found):
        if timed.too_slow(least):
            found.pruned[TOO_SLOW] += leaves
            continue
        below = leaves // len(MICRO_BATCHES)
        for micro_batch in MICRO_BATCHES:
            batch = task.global_batch // shape.dp
            if batch % micro_batch:
                found.pruned["the batch does not divide by the micro-batch"] += below
                continue
            at = replace(shape, micro_batch=micro_batch, micro_batches=batch // micro_batch)
            if timed.too_slow(least_seconds(task.model, task.moe, at, task.cluster)):
                found.pruned[TOO_SLOW] += below
                continue
            try_stages_of_zero(task, found, timed, at)
    for seconds, _, layout in sorted(timed.heap, reverse=True):
        if len(found.best) >= top and -seconds > sorted(each.step.seconds for each in found.best)[top - 1]:
            break  # a simulated bubble is no shorter than the formula's
        candidate = exact(task, layout)
        if candidate is None or candidate.peak > task.memory:
            found.pruned[NOT_EXACTLY] += 1
            continue
        found.best.append(candidate)
    found.best = sorted(found.best, key=lambda each: each.step.seconds)[:top]
    if not found.best and timed.smallest is not None:
        found.closest = exact(task, timed.smallest[1])
    return found


class Timed:
    """The fastest layouts so far that fit by formulas, and the one with the least memory, fitting or not."""

    def __init__(self, task: Task, top: int, share: float) -> None:
        self.most = 6 * top
        self.memory = share * task.memory
        self.heap: list[tuple[float, int, Layout]] = []  # the slowest first
        self.smallest: tuple[float, Layout] | None = None

    def too_slow(self, seconds: float) -> bool:
        return len(self.heap) == self.most and seconds > -self.heap[0][0]

    def fits(self, need: float, layout: Layout) -> bool:
        if self.smallest is None or need < self.smallest[0]:
            self.smallest = need, layout
        return need <= self.memory

    def add(self, seconds: float, number: int, layout: Layout) -> None:
        entry = (-seconds, -number, layout)  # the number breaks ties: layouts have no order
        (heapq.heappush if len(self.heap) < self.most else heapq.heappushpop)(self.heap, entry)


def try_stages_of_zero(task: Task, found: Found, timed: Timed, at: Layout) -> None:
    """The leaves of a branch, for one micro-batch: ZeRO's stages, and with each of them the schedules."""
    p = at.pp
    m = at.micro_batches
    schedules = SCHEDULES if p > 1 else (("1f1b", 1),)
    tried = [(mode, room(task, mode)) for mode in modes(task, at)]
    for zero in ZEROS:
        below = len(schedules) * len(tried)
        if zero == 3 and p > 1:
            found.pruned["--zero 3 with --pp: each micro-batch in flight would gather again"] += below
            continue
        if zero == 0 and task.precision == "bf16-master":
            found.pruned["bf16-master keeps its fp32 weights in ZeRO's shards"] += below
            continue
        cut = replace(at, zero=zero)
        states = stays(task, cut)
        if states[0] > timed.memory:
            found.pruned["weights, gradients and states alone do not fit"] += below
            timed.fits(states[0], replace(cut, recompute="full"))
            continue
        for schedule, v in schedules:
            if p * v > task.model.layers:
                found.pruned["more stages than layers"] += len(tried)
            elif schedule == "interleaved" and m % p:
                found.pruned["interleaved needs a multiple of pp micro-batches"] += len(tried)
            elif m < fills(schedule, p):
                found.pruned["too few micro-batches to fill the schedule"] += len(tried)
            else:
                try_modes(task, found, timed, replace(cut, schedule=schedule, stages_per_rank=v), tried, states)


def try_modes(
    task: Task, found: Found, timed: Timed, cut: Layout, tried: list[tuple[Layout, Room]], states: tuple[float, float]
) -> None:
    """Try the choices for activations, for one schedule and ZeRO stage: the first that fits is timed."""
    for i, (mode, each) in enumerate(tried):
        layout = replace(cut, recompute=mode.recompute, fpdt_chunks=mode.fpdt_chunks)
        if task.moe and layout.recompute == "full" and layout.schedule.startswith("zb-"):
            found.pruned["experts that are recomputed in W: again for each group of weights"] += 1
        elif layout.fpdt_chunks and task.seq_len // layout.cp % (2 * layout.fpdt_chunks):
            found.pruned["the sequence does not divide into so many chunks"] += 1
        elif not timed.fits(higher(task, layout, states, each), layout):
            found.pruned["does not fit with its activations"] += 1
        elif layout.fpdt_chunks and fpdt_host(task.model, layout) > task.cluster.host_memory_gb * GB:
            found.pruned["FPDT does not fit the host's memory"] += 1
        else:
            step = step_time(task.model, task.moe, layout, task.cluster, simulated=False)
            found.timed += 1
            timed.add(step.seconds, found.timed, layout)
            found.pruned["more recomputation, or more chunks, is only slower"] += len(tried) - 1 - i
            return


def exact(task: Task, layout: Layout) -> Candidate | None:
    """The layout with its largest rank's peak, and the simulated bubble where that is quick."""
    try:
        step = step_time(task.model, task.moe, layout, task.cluster)
        places = full_places(task.model, layout) if layout.pp * steady(layout).micro_batches <= 2048 else []
        peaks = [peak(task.model, task.moe, layout, place) for place in places]
    except ScheduleError:
        return None
    if not peaks:  # a long pipeline: by formulas
        parts = {"activations": int(rough_peak(task, layout))}
        if layout.pp * layout.micro_batches * layout.stages_per_rank < 100_000:
            parts = held(task.model, task.moe, layout, 0)
            parts["activations"] = int(rough_peak(task, layout)) - sum(parts.values())
        peaks = [parts]
    most = max(peaks, key=lambda each: sum(each.values()))
    return Candidate(layout, step, sum(most.values()), max(most, key=lambda what: most[what]))


def context_name(layout: Layout) -> str:
    """The kind of the context axis: ring, Ulysses, both, or K and V gathered."""
    if layout.gather_kv:
        return "g"
    if layout.ulysses == 1:
        return "r"
    return "u" if layout.ring == 1 else f"=r{layout.ring}u{layout.ulysses}"


def name(layout: Layout) -> str:
    """One word for each axis that is in use."""
    stages = layout.stages_per_rank if layout.stages_per_rank > 1 else ""
    in_use = {
        f"dp{layout.dp}": True,
        f"tp{layout.tp}{'+sp' if layout.sequence_parallel else ''}": layout.tp > 1,
        f"cp{layout.cp}{context_name(layout)}": layout.cp > 1,
        f"pp{layout.pp}/{layout.schedule}{stages}": layout.pp > 1,
        f"fpdt{layout.fpdt_chunks}": layout.fpdt_chunks > 0,
        f"ep{layout.ep}": layout.ep > 1,
        f"zero{layout.zero}": layout.zero > 0,
        f"mb{layout.micro_batch}x{layout.micro_batches}": True,
        f"recompute-{layout.recompute}": True,
    }
    return " ".join(word for word, used in in_use.items() if used)


def because(better: Step, worse: Step) -> str:
    """Where the worse of two loses most."""
    losses = {what: worse.parts[what] - better.parts[what] for what in better.parts}
    what = max(losses, key=lambda each: losses[each])
    return f"{worse.seconds / better.seconds - 1:+.1%} in all; {what} {1e3 * losses[what]:+,.0f} ms"


def alternatives(task: Task, best: Candidate) -> list[tuple[str, str]]:
    """(an obvious alternative, why it loses)."""
    G = task.gpus
    layout = best.layout
    found = []
    node = task.cluster.gpus_per_node
    batch = task.global_batch
    c = task.model

    def consider(what: str, other: Layout) -> None:
        if other == layout or other.ranks != G or other.global_batch != batch or refused(task, other):
            return
        candidate = exact(task, other)
        if candidate is None:
            return
        if candidate.peak > task.memory:
            over = f"{candidate.peak / GB:.0f} GB, {candidate.peak / task.memory:.1f} x the room"
            found.append((what, f"does not fit: {over}; mostly {candidate.largest}"))
        elif candidate.step.seconds >= best.step.seconds:
            found.append((what, because(best.step, candidate.step)))

    base = task.base
    if batch % G == 0:
        if task.precision != "bf16-master":  # which the trainer has with a stage of ZeRO only
            consider("data parallel alone", replace(base, dp=G, micro_batches=batch // G))
        consider("ZeRO stage 3 alone", replace(base, dp=G, micro_batches=batch // G, zero=3))
    wide = 2 * node
    if G % wide == 0 and c.heads % wide == 0 and batch % (G // wide) == 0:
        other = replace(base, tp=wide, sequence_parallel=True, dp=G // wide, micro_batches=batch * wide // G, zero=1)
        consider("tensor parallel across two nodes", other)
    deep = max((p for p in divisors(G) if p <= c.layers and c.layers % p == 0 and batch % (G // p) == 0), default=1)
    if deep > 1:
        consider(
            "the longest pipeline alone", replace(base, pp=deep, dp=G // deep, micro_batches=batch * deep // G, zero=1)
        )
    return found


def three_steps(task: Task) -> list[tuple[str, Candidate]]:
    """Fit, reach the batch, speed up: the playbook's method. Empty if nothing fits."""
    node = task.cluster.gpus_per_node
    chosen = None
    for grid in sorted(grids(task), key=lambda g: (-g.dp, g.pp, g.cp)):
        if grid.tp > node or grid.ulysses > 1 or grid.gather_kv or refused(task, grid):
            continue
        count = task.global_batch // grid.dp
        layout = replace(grid, zero=1, sequence_parallel=grid.tp > 1, recompute="full", micro_batches=count)
        if rough_peak(task, layout) <= task.memory and (fits := exact(task, layout)) and fits.peak <= task.memory:
            chosen = fits
            break
    if chosen is None:
        return []
    steps = [("1. fit: the fewest ranks per model, everything recomputed", chosen)]
    steps.append((f"2. reach the batch: dp {chosen.layout.dp} x {chosen.layout.micro_batches} micro-batches", chosen))
    best = chosen
    stages = (1, 2, 3) if chosen.layout.pp == 1 else (1, 2)
    for mode, micro_batch, zero in product(RECOMPUTE, MICRO_BATCHES, stages):
        if chosen.layout.micro_batches % micro_batch == 0:
            count = chosen.layout.micro_batches // micro_batch
            cut: dict[str, Any] = {"micro_batch": micro_batch, "micro_batches": count}
            other = replace(chosen.layout, recompute=mode, zero=zero, **cut)
            tried = exact(task, other)
            if tried and tried.peak <= task.memory and tried.step.seconds < best.step.seconds:
                best = tried
    return [*steps, ("3. speed up: micro-batch, recomputation and stage of ZeRO", best)]
