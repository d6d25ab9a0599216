"""The planner's traffic: the bytes that a rank sends in one step, by purpose. Exact.

Problem. How long a collective takes depends on its bytes, its group, and what it can overlap with. The bytes
and the group do not depend on the machine at all, so they can be verified before any speed is estimated.

Idea. A list of `Flow`s: a collective, the axis whose group runs it, its payload, how often per step. It gives

    bytes sent, by collective           ring algorithms, as the meter counts them: test_plan_memory.py
    seconds                             plan_time.py, which knows where on the cluster the group lies

                         once a step                             each micro-batch, each layer
    data (02, 03)        all-reduce G | reduce-scatter, gather   stage 2: reduce-scatter; 3: and 2 gathers
    tensor (04)          partial norm gradients with --pp        4 all-reduces of T H | 10 halves; else these
    context (05)         -                                       K/V around the ring, 8 all-to-alls
    pipeline (06)        a tied embedding                        one message to each neighbouring stage, F and B
    expert (07)          counts of all layers                    rows to their experts and back, four times
    everyone             three scalars: valid tokens, loss, norm of the gradient

The trainer's meter (metrics.py) prints these, except what a model decides: buckets, a rank's heads, rows.

Sources of the counts: the docstrings of the chapters' scripts. Recomputation repeats what comes before the
last tensor that backward needs: the all-reduce after attention runs twice, the one after the MLP does not. In
a pipeline a dense block is recomputed to its end, so there `tp` lacks the all-reduce after the MLP.

Only the rows of experts are an expectation (an even load); no other value depends on the data. If neither of
K/V heads and Ulysses ranks divides the other, ranks send different numbers of heads, and means are given.

Symbols as in plan_memory.py.
"""

from collections import Counter
from dataclasses import dataclass

import paths  # noqa: F401  finds the chapters below
from fpdt_costs import network_bytes
from llama import LlamaConfig
from moe_layer import MoEConfig
from pipeline_executor import layers_of
from plan_memory import (
    Layout,
    fpdt_sizes,
    kv_heads_by_rank,
    owners,
    program_of,
    ring_heads,
    schedule_of,
    weights_of,
    widths,
)
from schedule_simulator import Action, F, W

SCALAR = 8  # bytes: the trainer sends counts as int64 and sums of losses as float64


@dataclass(frozen=True)
class Flow:
    """One kind of message. `axis`: the group, as mesh.py calls it. `payload`: bytes of the full tensor, or of
    one message for `send`."""

    collective: str
    axis: str
    payload: float
    ranks: int
    times: float = 1
    what: str = ""

    @property
    def wire(self) -> float:
        """Bytes that this rank sends (Patarasuk and Yuan 2009: rings)."""
        # --- exercise 11.24: what each collective sends, for a payload of n bytes on P ranks ---
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share, "send": 1}
        return self.times * factor[self.collective] * self.payload
        # --- end exercise ---


def flows(
    model: LlamaConfig, moe: MoEConfig | None, layout: Layout, rank: int = 0, *, p2p_reduce: bool = False
) -> list[Flow]:
    """All messages of one step of a rank on pipeline place `rank`.

    p2p_reduce   ZeRO's reduce-scatter is made of sends, as the trainer does on Gloo
    """
    found = everyone(layout)
    found += of_gradients(model, moe, layout, rank, p2p_reduce)
    for stage, layers, times in passes_of(model, layout, rank):
        found += of_layers(model, moe, layout, len(layers), times)
        found += of_ends(model, layout, times, layers.start == 0, layers.stop == model.layers)
        if (layout.sequence_parallel or layout.tp_overlap == "backward") and layout.pp > 1:
            found += of_split_backward(model, moe, layout, rank, stage, len(layers), layers.stop == model.layers)
    if layout.pp > 1:
        found += of_pipeline(model, layout, rank)
    return [flow for flow in found if flow.ranks > 1 and flow.payload and flow.times]


def passes_of(model: LlamaConfig, layout: Layout, rank: int) -> list[tuple[int, range, int]]:
    """(stage, its layers, how many micro-batches go through it) for each stage of a pipeline rank."""
    if layout.pp == 1:
        return [(0, range(model.layers), layout.micro_batches)]
    schedule = schedule_of(layout)
    times = Counter(action.stage for action in schedule.actions[rank] if action.kind == F)
    return [(stage, layers_of(stage, schedule.stages, model.layers), each) for stage, each in times.items()]


def everyone(layout: Layout) -> list[Flow]:
    batch = layout.dp * layout.cp
    return [
        Flow("all_reduce", "batch", SCALAR, batch, what="valid tokens"),
        Flow("all_reduce", "replica", SCALAR, batch * layout.pp, what="loss"),
        Flow("all_reduce", "world", SCALAR, layout.ranks, what="norm of the gradient"),
    ]


def of_gradients(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, rank: int, p2p_reduce: bool) -> list[Flow]:
    """Data parallel and ZeRO, and the partial gradients of tensor ranks."""
    e = widths(layout.precision).weight
    weights = weights_of(model, moe, layout, rank)
    found = []
    backwards = 1 if layout.pp > 1 else layout.micro_batches  # backwards that reduce, at stages 2 and 3
    for owner in owners(weights, layout, e):
        N = owner.ranks
        axis = "experts" if owner.expert else "data"
        if owner.stage == 0:
            found += [Flow("all_reduce", axis, numel * e, N, what="gradients") for numel in owner.numels]
            continue
        times = backwards if owner.stage >= 2 else 1
        for shard in owner.shards:
            if p2p_reduce:
                found.append(Flow("send", axis, shard * e, N, times * (N - 1), "gradients"))
            else:
                found.append(Flow("reduce_scatter", axis, shard * N * e, N, times, "gradients"))
        if owner.stage < 3:
            found += [Flow("all_gather", axis, shard * N * e, N, what="new weights") for shard in owner.shards]
            continue
        root, *units = owner.shards
        # --- exercise 11.25: how often does stage 3 gather what, in a step of several micro-batches? ---
        gathered = root + 2 * sum(units) - units[-1]  # root and last layer stay until backward
        found.append(Flow("all_gather", "data", gathered * N * e, N, backwards, "weights"))
        # --- end exercise ---
    shares = sum(weight.slots for weight in weights)
    times = 1 if layout.pp > 1 else layout.micro_batches
    found.append(Flow("all_reduce", "tp", shares * e, layout.tp, times, "shares of gradients"))
    return found


def of_layers(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, layers: int, times: int) -> list[Flow]:
    """What blocks send, forward and backward: tensor, context and expert parallel."""
    c = model
    t = layout.tp
    width = widths(layout.precision)
    e = width.activation
    w = max(width.activation, 4)
    T = layout.tokens
    n = T * c.hidden * e
    calls = layers * times
    again = layout.recompute == "full"
    found = []
    halves = 2 if moe is None else 1  # attention and MLP; tensor ranks do not shard a mixture of experts
    if layout.sequence_parallel:
        # Forward g and g*; backward their conjugates, and the input is gathered again. Domino saves it.
        regather = layout.tp_overlap != "domino"
        gathers = (2 + regather + again) * halves
        scatters = 2 * halves + again
        found.append(Flow("all_gather", "tp", n, t, calls * gathers, "into products"))
        found.append(Flow("reduce_scatter", "tp", n, t, calls * scatters, "sums of products"))
    else:
        found.append(Flow("all_reduce", "tp", n, t, calls * (2 * halves + again), "sums of products"))
    # --- exercise 11.26: what the context axis sends in one block, forward, backward and again ---
    once_more = layout.recompute != "none"
    if layout.ring > 1:
        R = layout.ring
        heads = sum(ring_heads(model, layout))  # of the U ranks that share a sequence
        kv = 2 * T * heads * c.head_dim  # elements of K and V on one of them
        if layout.gather_kv:
            found.append(Flow("all_gather", "ring", kv * R * e, R, calls * (2 + once_more), "K and V"))
            found.append(Flow("reduce_scatter", "ring", kv * R * w, R, calls, "gradients of K and V"))
        else:
            found.append(Flow("send", "ring", kv * e, R, calls * (R - 1) * (2 + once_more), "K and V"))
            found.append(Flow("send", "ring", kv * w, R, calls * (R - 1), "gradients of K and V"))
    if layout.fpdt_chunks and layout.ulysses > 1:  # forward, recomputation, backward: chunks change nothing
        sent = layout.micro_batch * network_bytes(fpdt_sizes(model, layout))
        whole = sent * layout.ulysses / (layout.ulysses - 1)
        found.append(Flow("all_to_all", "ulysses", whole, layout.ulysses, 3 * calls, "heads of chunks"))
    elif layout.ulysses > 1:
        U = layout.ulysses
        q = T * c.attention_width // t * e
        kv = T * sum(map(len, kv_heads_by_rank(model, layout))) * c.head_dim * e
        inputs = q + 2 * kv
        found.append(Flow("all_to_all", "ulysses", inputs, U, calls * (2 + once_more), "q, k, v by heads"))
        found.append(Flow("all_to_all", "ulysses", q, U, calls * (2 + again), "out by tokens"))
    # --- end exercise ---
    if moe is not None:
        P = layout.ep
        tokens = layout.dp * layout.cp * (t if layout.sequence_parallel else 1)
        counts = moe.experts * 8
        if moe.balance:
            found.append(Flow("all_reduce", "tokens", counts, tokens, calls, "counts of experts"))
        found.append(Flow("all_to_all", "ep", P * (moe.experts // P + 1) * 8, P, calls, "counts of rows"))
        rows = moe.top_k * layout.outer_tokens * c.hidden * e
        found.append(Flow("all_to_all", "ep", rows, P, calls * (4 + 2 * again), "rows of experts"))
        mirrored = tokens * (2 if layout.mirrored else 1)
        found.append(Flow("all_reduce", "all tokens", counts * layers, mirrored, 1, "counts of a step"))
    return found


def of_ends(model: LlamaConfig, layout: Layout, times: int, first: bool, last: bool) -> list[Flow]:
    """Tensor parallel at the embedding, the output layer and the loss."""
    e = widths(layout.precision).activation
    T = layout.tokens
    t = layout.tp
    found = []
    n = T * model.hidden * e
    ways = ("reduce_scatter", "all_gather") if layout.sequence_parallel else ("all_reduce",)
    if first:
        found += [Flow(way, "tp", n, t, times, "embedding") for way in ways]
    if last:
        found += [Flow(way, "tp", n, t, times, "output layer") for way in ways]
        if layout.sequence_parallel:
            found.append(Flow("all_gather", "tp", n, t, times, "output layer"))
        found.append(Flow("all_reduce", "tp", 3 * T * max(e, 4), t, times, "softmax"))
    return found


def of_split_backward(
    model: LlamaConfig, moe: MoEConfig | None, layout: Layout, rank: int, stage: int, layers: int, last: bool
) -> list[Flow]:
    """What W sends again after B: a column-parallel backward makes both gradients, and runs in B and W."""
    again = sum(action.kind == W and action.stage == stage for action in schedule_of(layout).actions[rank])
    calls = again * (layers * (2 if moe is None else 1) + last)
    n = layout.tokens * model.hidden * widths(layout.precision).activation
    return [Flow(way, "tp", n, layout.tp, calls, "once more for W") for way in ("all_gather", "reduce_scatter")]


def of_pipeline(model: LlamaConfig, layout: Layout, rank: int) -> list[Flow]:
    schedule = schedule_of(layout)
    width = widths(layout.precision)
    items = program_of(layout, rank)
    sends = sum(not isinstance(item, Action) and item.source == rank for item in items)
    message = layout.outer_tokens * model.hidden * width.activation
    found = [Flow("send", "pp", message, layout.pp, sends, "between stages")]
    stages = {stage for _, stage in schedule.stages_of(rank)}
    ends = stages & {0, schedule.stages - 1}
    if model.tied and len(ends) == 1:
        vocabulary = -(-model.vocab_size // layout.tp) * model.hidden
        found.append(Flow("all_reduce", "ends", vocabulary * width.weight, 2, 1, "tied embedding"))
    return found


def by_collective(found: list[Flow]) -> dict[str, float]:
    """Bytes sent, by the meter's names."""
    total: Counter[str] = Counter()
    for flow in found:
        total[flow.collective] += flow.wire  # type: ignore[assignment]
    return {name: value for name, value in total.items() if value}
