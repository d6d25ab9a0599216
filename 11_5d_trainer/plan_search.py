"""The planner's search: every layout of a model on a cluster, which of them fit, and which is fastest.

Problem. On 4096 GPUs there are millions of layouts. Nearly all of them do not fit, or lose to a neighbour for a reason
that could have been known before their time was computed.

Idea. A tree, whose branches are cut where no leaf can win; cut leaves are counted by their reason.

    tensor x context x pipeline x data (the product is the number of GPUs)     batch does not divide
      +- sequence parallel, ZeRO stage, experts                                the states alone do not fit
           +- schedule, stages per rank                                        more stages than layers
                +- micro-batch                                                 does not divide the batch
                     +- recomputation: the least that fits                     more of it would only be slower

The leaves that are left are timed with formulas (plan_time.py). The fastest are then asked again, exactly: the peak of
every pipeline rank by plan_memory.py, the bubble by the simulator of chapter 06. What does not fit exactly goes.

`three_steps` is the other way, the one of the Ultra-Scale Playbook: first make it fit, then reach the global batch,
then speed it up. It tries dozens of layouts, and the search says what that costs.

    python 11_5d_trainer/plan.py --model llama3-70b --cluster h100-400g --nodes 64 --tokens 4194304 --seq-len 8192

Symbols as in plan_memory.py.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import chapters  # noqa: F401  finds the chapters below
from llama import LlamaConfig
from moe_layer import MoEConfig
from plan_memory import Layout, around, block_activations, held, peak, working_set
from plan_time import Cluster, Step, rough_states, step_time
from schedule_simulator import ScheduleError

GB = 1e9
RESERVED = 0.08  # of a GPU's memory: the context, the collectives' buffers, holes in the allocator
RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8, 16)
SCHEDULES = (("afab", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1))


@dataclass(frozen=True)
class Task:
    """What is to be planned."""

    model: LlamaConfig
    moe: MoEConfig | None
    cluster: Cluster
    gpus: int
    global_batch: int  # samples
    seq_len: int
    precision: str = "bf16-master"

    @property
    def memory(self) -> float:
        """Bytes of a GPU that a step may use."""
        return self.cluster.memory_gb * GB * (1 - RESERVED)


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    step: Step
    peak: float  # bytes
    largest: str  # what most of them are for


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


def grids(task: Task) -> Iterator[tuple[int, int, int, bool]]:
    """(tp, cp, pp, by Ulysses?) that the model and the number of GPUs allow."""
    c = task.model
    for tp in powers(task.gpus, c.heads):
        if c.heads % tp or c.intermediate % tp or (c.kv_heads % tp and tp % c.kv_heads):
            continue
        for cp in powers(task.gpus // tp, 64):
            if task.seq_len % (2 * cp * tp):
                continue
            for pp in divisors(task.gpus // tp // cp):
                if pp > c.layers:
                    break
                yield tp, cp, pp, False
                if cp > 1 and c.heads // tp % cp == 0:
                    yield tp, cp, pp, True


def rough_peak(task: Task, layout: Layout) -> float:
    """Bytes at most on a rank, by formulas: states, activations in flight, and what comes and goes."""
    p, m, v = layout.pp, layout.micro_batches, layout.stages_per_rank
    in_flight = {"afab": m, "interleaved": min(m, ((v - 1) * p + 2 * p - 1) / v)}.get(layout.schedule, min(m, p))
    in_flight = in_flight if p > 1 else 1
    blocks = task.model.layers / p * block_activations(task.model, task.moe, layout)
    ends = sum(around(task.model, layout, True, True).values())
    work = max(working_set(task.model, task.moe, layout).values())
    states = rough_states(task.model, task.moe, layout)
    gathered = 0.0
    if layout.zero == 3:
        gathered = 4 * states * layout.data / 16 / max(1, task.model.layers)
    if p > 1 and layout.zero in (0, 2):
        gathered = states / 8
    return states + gathered + max(blocks * in_flight, blocks + ends) + work


def search(task: Task, top: int = 10) -> Found:
    """The fastest layouts that fit. Deterministic."""
    found = Found([], 0, 0, Counter(), None)
    heap: list[tuple[float, int, Layout]] = []
    smallest: tuple[float, Layout] | None = None
    below = len(MICRO_BATCHES) * len(RECOMPUTE)  # leaves under a schedule
    for tp, cp, pp, by_heads in grids(task):
        dp = task.gpus // tp // cp // pp
        splits = (False, True) if tp > 1 else (False,)
        zeros = (0, 1, 2) if pp > 1 else (0, 1, 2, 3)
        experts = [e for e in divisors(task.moe.experts) if dp * cp % e == 0] if task.moe else [1]
        schedules = SCHEDULES if pp > 1 else (("1f1b", 1),)
        leaves = len(splits) * len(zeros) * len(experts) * len(schedules) * below
        found.counted += leaves
        if task.global_batch % dp:
            found.pruned["the batch does not divide by dp"] += leaves
            continue
        for split in splits:
            for ep in experts:
                for zero in zeros:
                    shape = Layout(
                        dp=dp, tp=tp, pp=pp, zero=zero, ep=ep, sequence_parallel=split, seq_len=task.seq_len,
                        ring=1 if by_heads else cp, ulysses=cp if by_heads else 1, precision=task.precision,
                    )  # fmt: skip
                    states = rough_states(task.model, task.moe, shape)
                    if states > task.memory and smallest is not None:
                        found.pruned["weights, gradients and states alone do not fit"] += len(schedules) * below
                        if states < smallest[0]:
                            smallest = states, replace(shape, micro_batches=task.global_batch // dp, recompute="full")
                        continue
                    for schedule, v in schedules:
                        if pp * v > task.model.layers:
                            found.pruned["more stages than layers"] += below
                            continue
                        for micro_batch in MICRO_BATCHES:
                            if task.global_batch // dp % micro_batch:
                                found.pruned["the batch does not divide by the micro-batch"] += len(RECOMPUTE)
                                continue
                            m = task.global_batch // dp // micro_batch
                            if schedule == "interleaved" and m % pp:
                                found.pruned["interleaved needs a multiple of pp micro-batches"] += len(RECOMPUTE)
                                continue
                            leaf = replace(
                                shape, schedule=schedule, stages_per_rank=v, micro_batch=micro_batch, micro_batches=m
                            )
                            for i, mode in enumerate(RECOMPUTE):
                                layout = replace(leaf, recompute=mode)
                                need = rough_peak(task, layout)
                                if smallest is None or need < smallest[0]:
                                    smallest = need, layout
                                if need <= task.memory:
                                    step = step_time(task.model, task.moe, layout, task.cluster, simulated=False)
                                    found.timed += 1
                                    # The counter breaks ties: layouts have no order.
                                    entry = (-step.seconds, -found.timed, layout)
                                    (heapq.heappush if len(heap) < 6 * top else heapq.heappushpop)(heap, entry)
                                    found.pruned["more recomputation is only slower"] += len(RECOMPUTE) - 1 - i
                                    break
                                found.pruned["does not fit with its activations"] += 1
    for _, _, layout in sorted(heap, reverse=True):
        candidate = exact(task, layout)
        if candidate is None or candidate.peak > task.memory:
            found.pruned["looked right, but does not fit exactly"] += 1
            continue
        found.best.append(candidate)
    found.best = sorted(found.best, key=lambda each: each.step.seconds)[:top]
    if not found.best and smallest is not None:
        found.closest = exact(task, smallest[1])
    return found


def exact(task: Task, layout: Layout) -> Candidate | None:
    """The layout with its largest rank's peak, and the simulated bubble where that is quick."""
    try:
        step = step_time(task.model, task.moe, layout, task.cluster)
        places = {0, layout.pp - 1} if layout.pp * layout.micro_batches <= 2048 else set()
        peaks = [peak(task.model, task.moe, layout, place) for place in sorted(places)]
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


def name(layout: Layout) -> str:
    """One word for each axis that is in use."""
    words = [f"dp{layout.dp}"]
    words += [f"tp{layout.tp}{'+sp' if layout.sequence_parallel else ''}"] * (layout.tp > 1)
    words += [f"cp{layout.cp}{'u' if layout.ulysses > 1 else 'r'}"] * (layout.cp > 1)
    words += [f"pp{layout.pp}/{layout.schedule}{layout.stages_per_rank if layout.stages_per_rank > 1 else ''}"] * (
        layout.pp > 1
    )
    words += [f"ep{layout.ep}"] * (layout.ep > 1) + [f"zero{layout.zero}"] * (layout.zero > 0)
    return " ".join([*words, f"mb{layout.micro_batch}x{layout.micro_batches}", f"recompute-{layout.recompute}"])


def because(better: Step, worse: Step) -> str:
    """What the worse of two loses most at."""
    losses = {what: worse.parts[what] - better.parts[what] for what in better.parts}
    what = max(losses, key=lambda each: losses[each])
    return f"{worse.seconds / better.seconds - 1:+.1%} in all; {what} {1e3 * losses[what]:+,.0f} ms"


def alternatives(task: Task, best: Candidate) -> list[tuple[str, str]]:
    """(an obvious other layout, why it loses)."""
    G, layout, found = task.gpus, best.layout, []
    node = task.cluster.gpus_per_node
    batch, c = task.global_batch, task.model

    def consider(what: str, other: Layout) -> None:
        if other == layout or other.ranks != G or other.global_batch != batch:
            return
        candidate = exact(task, other)
        if candidate is None:
            return
        if candidate.peak > task.memory:
            over = candidate.peak / task.memory
            found.append(
                (
                    what,
                    f"does not fit: {candidate.peak / GB:.0f} GB, {over:.1f} x the room; mostly {candidate.largest}",
                )
            )
        elif candidate.step.seconds >= best.step.seconds:
            found.append((what, because(best.step, candidate.step)))

    base = Layout(seq_len=task.seq_len, precision=task.precision, micro_batch=1)
    if batch % G == 0:
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
    """Fit, reach the batch, speed up: the way of the playbook. Empty if nothing fits."""
    node, chosen = task.cluster.gpus_per_node, None
    for tp, cp, pp, by_heads in sorted(grids(task), key=lambda g: (g[0] * g[1] * g[2], g[2], g[1])):
        dp = task.gpus // tp // cp // pp
        if tp > node or by_heads or task.global_batch % dp:
            continue
        layout = Layout(
            dp=dp, tp=tp, ring=cp, pp=pp, zero=1, sequence_parallel=tp > 1, recompute="full", seq_len=task.seq_len,
            micro_batches=task.global_batch // dp, precision=task.precision,
        )  # fmt: skip
        if rough_peak(task, layout) <= task.memory and (fits := exact(task, layout)) and fits.peak <= task.memory:
            chosen = fits
            break
    if chosen is None:
        return []
    steps = [("1. fit: the fewest ranks per model, everything recomputed", chosen)]
    steps.append((f"2. reach the batch: dp {chosen.layout.dp} x {chosen.layout.micro_batches} micro-batches", chosen))
    best = chosen
    for mode in RECOMPUTE:
        for micro_batch in MICRO_BATCHES:
            if chosen.layout.micro_batches % micro_batch == 0:
                count = chosen.layout.micro_batches // micro_batch
                other = replace(chosen.layout, micro_batch=micro_batch, micro_batches=count, recompute=mode)
                tried = exact(task, other)
                if tried and tried.peak <= task.memory and tried.step.seconds < best.step.seconds:
                    best = tried
    return [*steps, ("3. speed up: micro-batch and recomputation", best)]
