"""The planner's clock: seconds of one training step on a described cluster, by purpose.

Problem. A step is matmuls, elementwise work, messages and waiting, and only some of it overlaps. To predict
it one needs a description of the machine that is short enough to be right.

Idea. A cluster is a few values from data sheets, in a file of clusters/. Four rules turn work into seconds:

    a matmul      its FLOPs at `ceiling` of the rate that the largest matmuls were measured at (the file's
                  matmul_tflops), plus HALF times the reads and writes of its matrices. [M, K] x [K, N] moves
                  1/n = 1/M + 1/K + 1/N per FLOP, so this is  flops / (rate x n / (n + half)),  half = HALF x
                  peak / memory bandwidth: a GPU that computes faster than it reads needs larger matmuls
    attention     its core as matmuls of n = `attention` head dimensions
    elementwise   `passes` times the bytes saved for backward, written and read once in forward, twice back
    a collective  bytes sent (plan_traffic.py) / bandwidth + steps x latency, the better of ring and tree

    bandwidth of a group: inside a node, of its links; across nodes, of the network cards of its ranks in one
    node together, or the all-reduce measured on so many nodes if the file has that

        tp 0 1 2 3 | tp 0 1 2 3        ranks next to each other: tp, then context, then data, then pipeline
        ---- node 0 ----|---- node 1 ----

Overlap. The ring overlaps with attention, gradients with the backward of the last micro-batch (at stages 2
and 3 of every one), gathered weights with the blocks. Overlapped communication still costs: a second of it
takes `slowed` seconds of processors and memory from the computation. Pipeline messages delay a micro-batch,
and count in the bubble. Not overlapped are tensor parallel, all-to-alls, keys and values gathered before
attention, and stage 1's new weights.

The bubble is from chapter 06's simulator or, for long schedules, from the formula that it was checked
against. The five constants in CAPITALS are fitted to published runs and tested on others: plan_published.py.

Symbols as in plan_memory.py. GB/s are 10^9 bytes, one way, per GPU.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import planner_paths  # noqa: F401  finds the trainer and the chapters
from accounting import forward_flops
from fpdt_costs import Hardware, idle_forward, link_bytes, pair_seconds
from llama import LlamaConfig
from moe_layer import MoEConfig
from options import UsageError
from pipeline_executor import layers_of
from plan_memory import Layout, block_activations, fpdt_sizes, held, schedule_of, weights_of, widths
from plan_traffic import Flow, of_ends, of_layers
from schedule_simulator import Times, simulate

CLUSTERS = Path(__file__).parent / "clusters"
# The five fitted constants (plan_published.py --fit), in the order in which the fields of Cluster are explained.
CEILING = 1.0
HALF = 2.583
ATTENTION = 1.586
PASSES = 0.558
SLOWED = 0.409
SIMULATED = 4096  # pairs of stage and micro-batch up to which the simulator is used


@dataclass(frozen=True)
class Cluster:
    name: str
    gpus_per_node: int
    nodes: int  # at most
    memory_gb: float
    peak_tflops: float  # dense, bf16, or fp16 where there is none
    memory_gb_per_s: float
    inside_gb_per_s: float
    outside_gb_per_s: float
    latency_us: float
    source: str
    host_gb_per_s: float = 25.0  # of a GPU to and from its host: PCIe 4, unless the file says more
    host_memory_gb: float = 250.0  # for each GPU
    alone: float = 1.0  # speedup of a rank while the others wait: more than 1 where ranks share cores
    bf16: bool = True  # computes in it; else the planner proposes fp16 and torch's kernels
    # Measured bus bandwidth of whole nodes, by their number.
    all_reduce_gb_per_s: dict[str, float] | None = field(default=None, hash=False)
    matmul_tflops: float = 0.0  # of the largest matmuls, as measured; 0: not measured, use the peak
    fp32_tflops: float = 0.0  # without tensor cores; 0: as fast as in bf16, as a CPU is
    # Fitted to published runs where a file does not say otherwise:
    ceiling: float = CEILING  # fraction of that rate that a trainer's large matmuls reach
    half: float = 0.0  # n at which a matmul reaches half of that; 0: HALF times the flops per byte read
    attention: float = ATTENTION  # the core of attention is as fast as matmuls of n = so many head dimensions
    passes: float = PASSES  # how often a saved byte is really moved, over the least number of times
    slowed: float = SLOWED  # seconds that computation loses per second of overlapped messages

    @property
    def narrow(self) -> float:
        """The n of a matmul that reaches half of the ceiling."""
        return self.half or HALF * self.peak_tflops * 1e3 / self.memory_gb_per_s

    @property
    def rate(self) -> float:
        """FLOPs per second of the largest matmuls."""
        return (self.matmul_tflops or self.peak_tflops) * 1e12

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def hides(self) -> bool:
        """Can messages overlap with computation? Ranks that share cores also use them to copy bytes."""
        return self.alone < 1.2  # measured, so never quite 1

    def product(self, flops: float, width: float) -> float:
        # --- exercise 11.27: the seconds of matrix products whose sides give `width`, see `width_of` ---
        return flops / (self.rate * self.ceiling * width / (width + self.narrow))
        # --- end exercise ---

    def at(self, precision: str) -> "Cluster":
        """The same with the peak of a precision: nothing is rounded to TF32 silently."""
        wide = self.fp32_tflops and widths(precision).activation >= 4
        return replace(self, peak_tflops=self.fp32_tflops, matmul_tflops=0.0) if wide else self

    def core(self, flops: float, head_dim: float) -> float:
        """Seconds of attention between queries and keys: its matmuls are as narrow as a head."""
        return self.product(flops, self.attention * head_dim)

    def elementwise(self, count: float) -> float:
        """Seconds to read or write so many bytes of the GPU's own memory."""
        return count / (self.memory_gb_per_s * 1e9)

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second that a rank of a group sends; neighbours in the group are `stride` ranks apart.

        Groups lie side by side, each `ranks * stride` wide: the one counts that lies across most nodes.
        """
        step = math.gcd(ranks * stride, self.gpus_per_node)  # where in a node groups begin: at multiples of it
        nodes = (self.gpus_per_node - step + (ranks - 1) * stride) // self.gpus_per_node + 1
        if nodes == 1:
            return self.inside_gb_per_s * 1e9
        together = max(1, min(self.gpus_per_node // stride, ranks // nodes))  # ranks of the group in one node
        out = self.outside_gb_per_s * together
        if self.all_reduce_gb_per_s:
            out = measured_on(self.all_reduce_gb_per_s, nodes) * together / self.gpus_per_node
        return min(self.inside_gb_per_s, out) * 1e9

    def seconds(self, flow: Flow, stride: int) -> float:
        """Seconds of all messages of a kind; the better of ring and tree where both exist."""
        P = flow.ranks
        each = flow.wire / flow.times
        steps = {"all_reduce": min(2 * (P - 1), 2 * math.log2(P)), "send": 1, "all_to_all": 1}
        latency = steps.get(flow.collective, P - 1) * self.latency_us * 1e-6
        if flow.collective == "send":
            speed = self.outside_gb_per_s if (P - 1) * stride >= self.gpus_per_node else self.inside_gb_per_s
            return flow.times * (each / (speed * 1e9) + latency)
        return flow.times * (each / self.bandwidth(P, stride) + latency)

    def hop(self, message: float, ranks: int, stride: int) -> float:
        """Mean seconds of a message from one pipeline rank to the next: few of them leave a node."""
        out = min(ranks - 1, (ranks - 1) * stride // self.gpus_per_node) / (ranks - 1)
        speeds = out / self.outside_gb_per_s + (1 - out) / self.inside_gb_per_s
        return message * speeds / 1e9 + self.latency_us * 1e-6


def measured_on(table: dict[str, float], nodes: int) -> float:
    """Between two measured numbers of nodes: linear on a logarithmic scale; beyond the last: the last."""
    points = sorted((int(n), speed) for n, speed in table.items())
    for (n0, s0), (n1, s1) in pairwise(points):
        if n0 <= nodes <= n1:
            return s0 + (s1 - s0) * (math.log(nodes / n0) / math.log(n1 / n0))
    return points[-1][1] if nodes > points[-1][0] else points[0][1]


def read_cluster(name: str) -> Cluster:
    """A file, or a name in clusters/. Raises UsageError in one line that says which field is wrong."""
    path = Path(name) if name.endswith(".json") else CLUSTERS / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in CLUSTERS.glob("*.json")))
        raise UsageError(f"--cluster {name} is no file, and no known cluster; use {known}")
    try:
        given: dict[str, Any] = json.loads(path.read_text())
    except UnicodeDecodeError:
        raise UsageError(f"--cluster {name} is not JSON, nor any text; name another file") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"--cluster {name} is not JSON (line {error.lineno}: {error.msg}); correct it") from None
    if not isinstance(given, dict):
        raise UsageError(f"--cluster {name} must hold one JSON object of fields, such as those in {CLUSTERS.name}/")
    known_fields = {each.name for each in fields(Cluster)}
    needed = [each.name for each in fields(Cluster) if each.default is MISSING]
    if missing := [name for name in needed if name not in given]:
        raise UsageError(f"--cluster {name} has no field {missing[0]!r}; add it")
    if unknown := sorted(set(given) - known_fields):
        raise UsageError(f"--cluster {name}: field {unknown[0]!r} is unknown; use {', '.join(sorted(known_fields))}")
    if not isinstance(given.get("bf16", True), bool):
        raise UsageError(f"--cluster {name}: bf16 {given['bf16']} must be true or false")
    for each in sorted((known_fields - {"name", "source", "bf16", "all_reduce_gb_per_s"}) & set(given)):
        check_positive(given[each], f"--cluster {name}: {each}", each in ("gpus_per_node", "nodes"))
    table = given.get("all_reduce_gb_per_s") or {}
    if not isinstance(table, dict) or not all(nodes.isdecimal() and int(nodes) for nodes in table):
        raise UsageError(
            f"--cluster {name}: all_reduce_gb_per_s must give GB/s by number of nodes, as in h100-playbook"
        )
    for nodes, speed in table.items():
        check_positive(speed, f"--cluster {name}: all_reduce_gb_per_s of {nodes} nodes")
    return Cluster(**given)


def check_positive(value: Any, what: str, whole: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    if not number or (whole and value != int(value)):
        raise UsageError(f"{what} is {value!r}; it must be a positive {'whole ' * whole}number")


# ------------------------------------------------------------------------------------------------------- one layout


def stride_of(axis: str, layout: Layout) -> int:
    """Distance between neighbours of a group, in ranks of the mesh (mesh.py: tp innermost, pp outermost).

    For a group that DualPipe doubles, within one stage.
    """
    t = layout.tp
    stage = layout.tp * layout.cp * layout.dp
    tokens = 1 if layout.sequence_parallel else t  # then tensor ranks also hold different ones
    strides = {"tp": 1, "world": 1, "tokens": tokens, "all tokens": tokens, "ends": (layout.pp - 1) * stage}
    strides |= {"batch": t, "replica": t, "data": t, "ep": t, "experts": t * layout.ep, "pp": stage}
    return (strides | {"ulysses": t, "ring": t * layout.ulysses})[axis]


@dataclass(frozen=True)
class Step:
    """Seconds of one step on the slowest rank, by purpose; and what was overlapped."""

    parts: dict[str, float]
    hidden: dict[str, float]
    model_flops: float  # of the whole cluster

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def mfu(self, layout: Layout, cluster: Cluster) -> float:
        return self.model_flops / (self.seconds * layout.ranks * cluster.peak_tflops * 1e12)


@lru_cache(maxsize=4096)
def flops_of(model: LlamaConfig, batch: int, seq: int) -> tuple[float, float, float]:
    """(matmuls of a layer, its core of attention, output layer), forward. A causal kernel skips half."""
    flops = forward_flops(model, batch, seq)
    layer = (flops["projections"] + flops["MLP"]) / model.layers
    return layer, flops["attention core"] / model.layers / 2, flops["lm_head"]


def active_part(model: LlamaConfig, moe: MoEConfig | None) -> LlamaConfig:
    """The dense model with the same FLOPs per token."""
    return replace(model, intermediate=model.intermediate * moe.top_k) if moe else model


def width_of(products: Iterable[tuple[float, float, float]]) -> float:
    """n of several matmuls [M, K] x [K, N], given as (M, K, N): together they move as many matrix elements
    per FLOP as one with 1/n = 1/M + 1/K + 1/N. Backward's matmuls have the same three sides."""
    sides = list(products)
    moved = sum(M * K + K * N + M * N for M, K, N in sides)
    return sum(M * K * N for M, K, N in sides) / moved


def products_of(model: LlamaConfig, moe: MoEConfig | None, layout: Layout) -> list[tuple[float, float, float]]:
    """(M, K, N) of a block's matmuls on one rank: q, out, k, v, gate, up, down."""
    c = model
    t = layout.tp
    T = layout.tokens
    kv = c.kv_heads * c.head_dim / t
    attention: list[tuple[float, float, float]] = [
        (T, c.hidden, c.attention_width / t),
        (T, c.attention_width / t, c.hidden),
    ]
    attention += [(T, c.hidden, kv)] * 2
    rows: float = T
    wide = c.intermediate / t
    times = 1
    if moe:  # an expert's rows, with an even load; tensor ranks do not shard experts
        rows = max(1, moe.top_k * layout.outer_tokens * layout.ep / moe.experts)
        wide = moe.intermediate
        times = max(1, moe.experts // layout.ep)
    return attention + times * [(rows, c.hidden, wide), (rows, c.hidden, wide), (rows, wide, c.hidden)]


@dataclass(frozen=True)
class BlockSeconds:
    """For one micro-batch: a block's forward, what recomputation adds, its messages by kind, the exposed time
    of a ring, and the matmuls and messages around the blocks."""

    forward: float
    again: float
    sends: dict[str, float]
    ring: float
    vocabulary: float
    ends: float


@lru_cache(maxsize=2**16)
def block_seconds(model: LlamaConfig, moe: MoEConfig | None, cluster: Cluster, layout: Layout) -> BlockSeconds:
    share = layout.cp * layout.tp
    products = products_of(model, moe, layout)
    width = width_of(products)
    layer = 2 * sum(M * K * N for M, K, N in products)
    core, head = (x / share for x in flops_of(model, layout.micro_batch, layout.seq_len)[1:])
    cluster = cluster.at(layout.precision)
    attention = cluster.core(core, model.head_dim)
    forward = cluster.product(layer, width) + attention
    forward += cluster.elementwise(2 * cluster.passes * block_activations(model, moe, layout, "none"))
    again = {"none": 0.0, "selective": attention, "full": forward}[layout.recompute]
    if layout.fpdt_chunks:
        again = forward  # FPDT saves only the input of a block
    sends = {"tp": 0.0, "ring": 0.0, "all-to-all": 0.0}
    for flow in of_layers(model, moe, layout, 1, 1):
        if flow.ranks > 1 and flow.what != "counts of a step":
            kind = "tp" if flow.axis == "tp" else "all-to-all"
            if flow.axis == "ring" and not layout.gather_kv:
                kind = "ring"  # behind attention
            sends[kind] += cluster.seconds(flow, stride_of(flow.axis, layout))
    # --- exercise 11.28: what of the ring's time can be seen? ---
    ring = max(0.0, sends["ring"] - 3 * attention)
    # --- end exercise ---
    ring = ring if cluster.hides else sends["ring"]
    vocabulary = 3 * cluster.product(head, width_of([(layout.tokens, model.hidden, model.vocab_size / layout.tp)]))
    vocabulary += cluster.elementwise(6 * layout.tokens * model.vocab_size / layout.tp * 4)
    around = (flow for flow in of_ends(model, layout, 1, layout.pp == 1, True) if flow.ranks > 1)
    ends = sum(cluster.seconds(flow, stride_of(flow.axis, layout)) for flow in around)
    return BlockSeconds(forward, again, sends, ring, vocabulary, ends)


def one_block(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, cluster: Cluster) -> BlockSeconds:
    """Computed once for all layouts that differ only outside of a block."""
    felt = Layout(
        dp=layout.dp if moe else 1, tp=layout.tp, sequence_parallel=layout.sequence_parallel, ring=layout.ring,
        ulysses=layout.ulysses, gather_kv=layout.gather_kv, ep=layout.ep, micro_batch=layout.micro_batch,
        seq_len=layout.seq_len, recompute=layout.recompute, precision=layout.precision, pp=min(layout.pp, 2),
        fpdt_chunks=layout.fpdt_chunks, kernels=layout.kernels,
    )  # fmt: skip
    return block_seconds(model, moe, cluster, felt)


def least_seconds(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, cluster: Cluster) -> float:
    """The least with any schedule, ZeRO stage and recomputation: matmuls, and exposed messages of blocks.

    Per token it only falls with the micro-batch: matmuls get wider, and there are fewer latencies.
    """
    one = one_block(model, moe, layout, cluster)
    block = 3 * one.forward + one.sends["tp"] + one.sends["all-to-all"] + one.ring
    return layout.micro_batches * (model.layers / layout.pp * block + one.vocabulary + one.ends)


def step_time(
    model: LlamaConfig, moe: MoEConfig | None, layout: Layout, cluster: Cluster, simulated: bool = True
) -> Step:
    """Raises ScheduleError for a pipeline that cannot be built."""
    m = layout.micro_batches
    p = layout.pp
    v = layout.stages_per_rank
    layers = model.layers / p  # of a rank, on average; uneven layers count in the bubble
    one = one_block(model, moe, layout, cluster)
    forward = one.forward
    backward = 2 * one.forward
    again = one.again
    vocabulary = one.vocabulary
    ends = one.ends
    sends = one.sends
    ring = one.ring
    block = forward + backward + again + sends["tp"] + sends["all-to-all"] + ring
    parts = {
        "products and elementwise": m * layers * (forward + backward) + m * vocabulary,
        "recomputation": m * layers * again,
        "tensor parallel": m * (layers * sends["tp"] + ends),
        "context and experts": m * layers * (sends["all-to-all"] + ring),
    }
    bubble = 0.0
    if p > 1:
        width_e = widths(layout.precision).activation
        message = cluster.hop(layout.outer_tokens * model.hidden * width_e, p, stride_of("pp", layout))
        waiting = bubble_seconds(layout, layers / v * block, vocabulary + ends, message, simulated, model.layers)
        busy = m * (layers * block + vocabulary + ends)
        bubble = max(0.0, (busy + waiting) / cluster.alone - busy)  # a waiting rank may free its core
        bubble += 0.0 if cluster.hides else 2 * m * v * message
    parts["pipeline bubble"] = bubble
    if layout.fpdt_chunks:
        parts["link to the host"] = m * layers * fpdt_idle(model, layout, cluster)
    exposed, hidden = data_parallel(model, moe, layout, cluster, layers * forward, layers * (backward + again))
    parts["data parallel"] = exposed
    states = sum(held(model, moe, layout, p - 1).values()) if simulated else rough_states(model, moe, layout)
    parts["update"] = cluster.elementwise(2 * states)
    hidden |= {"ring": m * layers * (sends["ring"] - ring)}
    active = active_part(model, moe)
    whole = flops_of(active, layout.global_batch, layout.seq_len)
    model_flops = 3 * (model.layers * (whole[0] + 2 * whole[1]) + whole[2])
    return Step(parts, hidden, model_flops)


def fpdt_idle(model: LlamaConfig, layout: Layout, cluster: Cluster) -> float:
    """Seconds that a layer waits for its host: forward, recomputation, backward, by chapter 08's formulas."""
    z = fpdt_sizes(model, layout)
    rate = cluster.rate * cluster.ceiling
    link = Hardware(rate, cluster.host_gb_per_s * 1e9)
    pair, fetch = pair_seconds(z, link)
    forward = idle_forward(z.u, pair / 2, pair, fetch)
    pairs = z.u * z.u / 2  # backward of a pair takes 5/2 of its forward: five matmuls for two
    backward = max(0.0, sum(link_bytes(z, "backward")) / link.link - pairs * 2.5 * pair)
    return layout.micro_batch * (2 * forward + backward)


def bubble_seconds(layout: Layout, stage: float, last: float, message: float, simulated: bool, layers: int) -> float:
    """How much longer the step takes than the last rank computes, if all have equally many layers. `stage`:
    one micro-batch in one stage, forward and backward, on average; `last`: extra work of the last stage;
    `message`: from one rank to the next; `layers`: of the model, which the stages may not divide."""
    p = layout.pp
    m = layout.micro_batches
    v = layout.stages_per_rank
    if simulated and p * m * v <= SIMULATED:
        schedule = schedule_of(layout)
        held = [len(layers_of(s, schedule.stages, layers)) for s in range(schedule.stages)]
        thirds = [stage / 3 * count * schedule.stages / layers for count in held]  # F, B and W alike
        thirds[-1] += last / 3
        times = Times(thirds, thirds, thirds, communication=message)
        return simulate(schedule, times).makespan - m * (v * stage + last)
    third = stage / 3  # chapter 06's formulas, F = B = W; ZB-H2 and ZB-V lose (p - 1) F: all wait for the norm
    way = {"zb-h1": 1, "zb-h2": 1, "zb-v": 1, "auto": 1, "dualpipe": 0.5, "dualpipe-v": 0.5}.get(layout.schedule, 3)
    if layout.schedule == "naive":
        way *= m
    fullest = math.ceil(layers / p) * p / layers  # relative to the average number of layers
    uneven = max(0, m - p) * (fullest - 1) * v * stage  # in the steady state all wait for that rank
    return (p - 1) * way * third + uneven + waits(layout) * message


def waits(layout: Layout) -> float:
    """Messages on the critical path of a step, if each is short compared with a stage, by the simulator.

    All schedules have warm-up and cool-down. In 1F1B a rank has exactly p - r micro-batches in flight, so
    each round trip of 2 (p - 1) messages is exposed, once per p micro-batches.
    """
    p = layout.pp
    m = layout.micro_batches
    v = layout.stages_per_rank
    steady = max(2 * (p - 1), 2 * (p - 1) * m / p + 2 * (p - 2))
    other = {"afab": 2 * (p - 1), "naive": 2 * (p - 1) * m, "zb-h1": 4 * (p - 1), "zb-h2": p - 1, "zb-v": 5 * p - 7}
    other["breadth-first"] = 2 * (p - 1) if m > p else 2 * (p * v - 1)
    return other.get(layout.schedule, 2 * (p * v - 1) if v > 1 else steady)


def data_parallel(
    model: LlamaConfig, moe: MoEConfig | None, layout: Layout, cluster: Cluster, ahead: float, behind: float
) -> tuple[float, dict[str, float]]:
    """Seconds that reducing gradients and gathering weights add to a step, and seconds that are overlapped.

    `ahead`, `behind`: of one micro-batch's forward and backward. Overlap also costs: it takes processors and
    memory from the computation (`slowed`). Experts have fewer ranks, further apart.
    """
    if layout.data == 1:
        return 0.0, {}
    e = widths(layout.precision).weight
    m = layout.micro_batches
    g = 4 if layout.reduce_dtype == "fp32" else e
    backwards = 1 if layout.pp > 1 else m  # backwards that reduce, at stage 2
    total = bare = 0.0
    for axis, psi, ranks, stage in rough_owners(model, moe, layout):
        sent = model.layers / layout.pp + 1 if stage == 3 else max(1.0, psi * e / layout.bucket_bytes)  # buckets
        half, other, both = (
            cluster.seconds(Flow(collective, axis, psi * width / sent, ranks, sent), stride_of(axis, layout))
            for collective, width in (("reduce_scatter", g), ("all_gather", e), ("all_reduce", g))
        )
        if stage == 3:
            total += m * (half + 2 * other)
        elif stage:
            total += backwards * half if stage == 2 else half
            bare += other
        else:
            total += both
    shelter = {2: backwards * behind, 3: m * (behind + ahead)}.get(layout.zero, behind)
    hidden = min(total, shelter) if cluster.hides else 0.0
    return total - hidden + cluster.slowed * hidden + bare, {"data parallel": hidden}


def rough_owners(model: LlamaConfig, moe: MoEConfig | None, layout: Layout) -> list[tuple[str, float, int, int]]:
    """(axis, parameters of a rank, ranks that hold them, stage of ZeRO): experts have fewer ranks, and no stage 3."""
    every = rough_parameters(model, moe, layout)
    if moe is None or layout.ep == 1:
        return [("data", every, layout.data, layout.zero)]
    experts = model.layers / layout.pp * moe.experts / layout.ep * 3 * moe.intermediate * model.hidden
    dense = ("data", every - experts, layout.data, layout.zero)
    return [dense, ("experts", experts, layout.data // layout.ep, min(layout.zero, 2))]


@lru_cache(maxsize=4096)
def of_model(model: LlamaConfig, moe: MoEConfig | None, tp: int, ep: int) -> tuple[float, float]:
    """(elements of a block, elements at both ends together) on one tensor rank."""
    every = weights_of(model, moe, Layout(tp=tp, ep=ep))
    block = sum(weight.numel for weight in every if weight.layer == 0)
    return block, sum(weight.numel for weight in every) - model.layers * block


def rough_parameters(model: LlamaConfig, moe: MoEConfig | None, layout: Layout) -> float:
    block, ends = of_model(model, moe, layout.tp, layout.ep)
    return model.layers / layout.pp * block + (ends if layout.pp == 1 else ends / 2)


def rough_held(model: LlamaConfig, moe: MoEConfig | None, layout: Layout) -> dict[str, float]:
    """Weights, gradients and optimizer states of a rank, without padding."""
    width = widths(layout.precision)
    total = {"weights": 0.0, "gradients": 0.0, "optimizer states": 0.0}
    for _, psi, N, z in rough_owners(model, moe, layout):
        total["weights"] += psi * width.weight / (N if z == 3 else 1)
        total["gradients"] += psi * width.weight / (N if z >= 2 else 1)
        total["optimizer states"] += psi * (2 * width.state + width.master) / (N if z else 1)
    return total


def rough_states(model: LlamaConfig, moe: MoEConfig | None, layout: Layout) -> float:
    return sum(rough_held(model, moe, layout).values())
