"""Published measurements of bytes, of layers and of long sequences, beside the planner's formulas.

No constant is fitted to a row here. Full runs, those that the clock was fitted to and others, are in
plan_published.py.

    ZeRO        GB per device of a 7.5B model at each stage (1910.02054, figure 1)            chapter 03's formula
    layer       milliseconds of one layer of a GPT on A100s (2205.05198, table 4)             the clock, on a GPT
    activation  fraction of tensor parallel alone, and what fits 80 GB (figures 7 and 1)      the paper's table 2
    Ulysses     TFLOPs by GPUs and length (2309.14509)                                        chapter 05's cost model
    FPDT        GB at one and two chunks; longest sequences by the number of GPUs             chapter 08's formulas

    python 11_5d_trainer/planner/plan.py --facts
"""

from dataclasses import dataclass

import planner_paths  # noqa: F401  finds the trainer and the chapters
from accounting import gpt_activations
from context_ulysses import Machine, cost_model
from fpdt_costs import paper_table as fpdt_table
from llama import LLAMA3_8B, LLAMA3_70B, LlamaConfig
from plan_memory import Layout, fpdt_host, peak
from plan_search import GB, RESERVED
from plan_time import Cluster, read_cluster, width_of
from plan_traffic import Flow
from zero_memory import bytes_per_parameter

Table = tuple[str, list[str], list[list[str]]]
SEQ = 2048  # of every GPT in 2205.05198
VOCABULARY = 51200
TENSOR = 8
K = 1024
BYTES = 18  # per parameter there: fp16 weights, fp32 gradients, 12 for Adam's states and master weights


@dataclass(frozen=True)
class Gpt:
    """A row of table 3 of 2205.05198."""

    name: str
    hidden: int
    layers: int
    heads: int
    pp: int
    chunks: int  # interleaved stages per rank
    gpus: int
    micro_batch: int

    @property
    def parameters(self) -> float:
        """Parameters per GPU, if they were spread evenly."""
        return (12 * self.layers * self.hidden**2 + VOCABULARY * self.hidden) / self.pp / TENSOR

    @property
    def square(self) -> float:
        """5 a s / h: bytes of attention's saved square matrices, over s b h; the rest of a layer saves 34."""
        return gpt_activations(self.hidden, 1, self.heads, SEQ, 1) / (SEQ * self.hidden) - 34


GPTS = (
    Gpt("22B", 6144, 48, 64, 1, 1, 8, 4),
    Gpt("175B", 12288, 96, 96, 8, 3, 64, 1),
    Gpt("530B", 20480, 105, 128, 35, 3, 280, 1),
    Gpt("1T", 25600, 128, 160, 64, 1, 512, 1),
)


@dataclass(frozen=True)
class GptLayer:
    """Seconds of one micro-batch in one layer of a GPT with dropout on 8 tensor ranks, by the rules of plan_time.py.

    Sequence parallel's third all-gather overlaps with the weight gradients, as the paper says.
    """

    forward: float
    backward: float
    again: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.again


def gpt_layer(g: Gpt, cluster: Cluster, recompute: str, sequence_parallel: bool) -> GptLayer:
    s = SEQ
    t = TENSOR
    b = g.micro_batch
    h = g.hidden
    T = b * s
    width = width_of([(T, h, 3 * h / t), (T, h / t, h), (T, h, 4 * h / t), (T, 4 * h / t, h)])
    core = 4 * b * s * s * h / t  # flops: no causal half is skipped there
    kept = b * s * h * kept_factor(g, "none", sequence_parallel)
    # Attention is not fused there: its squares are written and read; fused kernels' constants do not apply.
    work = cluster.product(24 * b * s * h * h / t + core, width) + cluster.elementwise(2 * cluster.passes * kept)
    reduce = 2 * cluster.seconds(Flow("all_reduce", "tp", 2 * b * s * h, t), 1)
    forward = work + reduce
    backward = 2 * work + reduce
    selective = cluster.product(core, width) + cluster.elementwise(2 * cluster.passes * b * s * h * g.square / t)
    return GptLayer(forward, backward, {"none": 0.0, "selective": selective, "full": forward}[recompute])


def zero_rows() -> list[tuple[int, float, float]]:
    """(stage, GB published, GB by the formula) of 7.5B parameters on 64 ranks (1910.02054, figure 1)."""
    published = (120.0, 31.4, 16.6, 1.9)
    return [(z, want, 7.5 * bytes_per_parameter(z, 64)) for z, want in enumerate(published)]


# (what, recomputation, sequence parallel, forward, backward): milliseconds as published in table 4. The
# backward of a row includes recomputation.
LAYER_22B = (
    ("nothing recomputed", "none", False, 7.7, 11.9),
    ("sequence parallel", "none", True, 7.2, 11.8),
    ("full", "full", False, 7.7, 19.5),
    ("selective", "selective", False, 7.7, 13.2),
    ("selective, sequence parallel", "selective", True, 7.2, 13.1),
)


def layer_rows() -> list[tuple[str, float, float]]:
    """(what, published ms of forward and backward, predicted ms) of one layer of the 22B model."""
    cluster = read_cluster("a100-dgx")
    return [
        (what, forward + backward, 1e3 * gpt_layer(GPTS[0], cluster, recompute, sequence).seconds)
        for what, recompute, sequence, forward, backward in LAYER_22B
    ]


def kept_factor(g: Gpt, recompute: str, sequence_parallel: bool) -> float:
    """Bytes that one layer saves on one of the tensor ranks, over s b h (2205.05198, table 2).

    Of the 34 of a layer, 10 lie outside of the tensor-parallel regions.
    """
    if recompute == "full":
        return 2.0
    outside = 10 / TENSOR if sequence_parallel else 10
    return outside + 24 / TENSOR + (g.square / TENSOR if recompute == "none" else 0)


# (what, recomputation, sequence parallel, what section 6.1 reads off figure 7)
TECHNIQUES = (
    ("sequence parallel", "none", True, "nearly half is saved"),
    ("selective", "selective", False, "nearly half is saved"),
    ("both", "selective", True, "under 20 %"),
    ("full", "full", False, "10 %"),
)


def activation_rows() -> list[tuple[str, str, str, float]]:
    """(model, technique, published, fraction left of what tensor parallel alone saves in a layer)."""
    return [
        (g.name, what, published, kept_factor(g, recompute, sequence) / kept_factor(g, "none", False))
        for what, recompute, sequence, published in TECHNIQUES
        for g in GPTS
    ]


def fits_rows() -> list[tuple[str, float, float, float]]:
    """(model, GB of weights, gradients and states, GB of activations with tensor parallel alone, and with both
    techniques) on the first pipeline stage, which holds L layers of them, and (p - 1) / p v as many more if stages
    interleave (section 4.2.3). By figure 1 all four exceed an A100's 80 GB, and fit with both techniques."""
    rows = []
    for g in GPTS:
        layers = g.layers * (1 + (g.pp - 1) / (g.pp * g.chunks) * (g.chunks > 1))
        each = layers * SEQ * g.micro_batch * g.hidden / GB
        baseline, both = (each * kept_factor(g, *how) for how in (("none", False), ("selective", True)))
        rows.append((g.name, BYTES * g.parameters / GB, baseline, both))
    return rows


def saved_rows() -> list[tuple[str, float, float]]:
    """(what, published, predicted) of section 5 and of appendix B, in per cent and GiB."""
    rows = []
    for g, saved, more in ((GPTS[1], 70.0, 2.7), (GPTS[2], 65.0, 1.6)):
        rows.append((f"{g.name}: % of the activations that selective saves", saved, 100 * g.square / (34 + g.square)))
        rows.append((f"{g.name}: % of FLOPs that it adds", more, 100 * SEQ / 6 / g.hidden))
    g = GPTS[2]
    rows.append(("530B: GiB of outputs that wait for nobody", 2.73, 2 * SEQ * g.micro_batch * g.hidden * g.pp / 2**30))
    return rows


def data_parallel_row() -> tuple[float, float]:
    """(published, predicted) seconds that 8 replicas add to an iteration of 530B (section 6.3: 37.83 to 39.15 s).

    The all-reduce is not overlapped there. Assumed: gradients of 4 bytes, one GPU of each replica in a node,
    each with the network card that the paper describes.
    """
    flow = Flow("all_reduce", "data", 4 * GPTS[2].parameters, 8)
    return 39.15 - 37.83, read_cluster("a100-dgx").seconds(flow, GPTS[2].gpus)


@dataclass(frozen=True)
class Longest:
    """Sequences that FPDT is reported to train (2408.16978, abstract, and DeepSpeed's blog on Ulysses-Offload).

    Assumed: A100s of 80 GB, four in a node with 1 TB of host memory; Ulysses over all GPUs, ZeRO stage 3, bf16 with
    master weights, chunks of 64K tokens. The shape of "GPT-30B" is ours. Sequences are tried in steps of 128K tokens;
    the authors report powers of two and one length between, and do not say that twice the length failed.
    """

    model: str
    sizes: LlamaConfig
    gpus: int
    tokens: int  # published


GPT_30B = LlamaConfig(50304, 7168, 48, 64, 64, 4 * 7168 * 2 // 3)  # a gated MLP of as many weights as GPT's
LONGEST = (
    Longest("8B", LLAMA3_8B, 4, 2 * 2**20),
    Longest("30B", GPT_30B, 16, 3 * 2**20),
    Longest("70B", LLAMA3_70B, 32, 4 * 2**20),
)


def longest_rows() -> list[tuple[str, int, int, int, str]]:
    """(model, GPUs, tokens published, tokens that fit, what ends it)."""
    cluster = read_cluster("a100-dgx")
    step = 2**17
    rows = []
    device = cluster.memory_gb * GB * (1 - RESERVED)
    host = cluster.host_memory_gb * GB
    for row in LONGEST:
        tokens, ends = 0, ""
        while not ends:
            layout = Layout(
                ulysses=row.gpus, zero=3, precision="bf16-master", seq_len=tokens + step,
                fpdt_chunks=(tokens + step) // 2**16,
            )  # fmt: skip
            if sum(peak(row.sizes, None, layout).values()) > device:
                ends = "device"
            elif fpdt_host(row.sizes, layout) > host:
                ends = "host"
            else:
                tokens += step
        rows.append((row.model, row.gpus, row.tokens, tokens, ends))
    return rows


def numbers() -> dict[str, list[tuple[str, float, float]]]:
    """By source: (what, published, predicted)."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    found["Milliseconds of a layer of 22B, forward and backward (2205.05198, table 4)"] = layer_rows()
    rows = [*saved_rows(), ("530B: s that 8 replicas add", *data_parallel_row())]
    found["Further numbers of 2205.05198 (sections 5, 6.3, B)"] = rows
    rows = [(f"stage {stage}", want, got) for stage, want, got in zero_rows()]
    found["GB of 7.5B parameters on 64 ranks (1910.02054)"] = rows
    rows = [(f"{S:,} tokens, {gpus} GPUs", want, got) for S, gpus, want, got, _ in cost_model(Machine())]
    found["TFLOPs per GPU of Ulysses (2309.14509)"] = rows
    rows = [(f"{name}, two chunks", two, got) for name, _, two, got, _ in fpdt_table()]
    found["GB of FPDT (2408.16978)"] = rows
    rows = [(f"{name}, {gpus} GPUs, ends at the {ends}'s memory", want / K, got / K)
            for name, gpus, want, got, ends in longest_rows()]  # fmt: skip
    found["Thousands (1024) of tokens that fit with FPDT (2408.16978)"] = rows
    return found


def tables() -> list[Table]:
    """Every fact as text: (title, columns, rows)."""
    result: list[Table] = []
    for title, facts in numbers().items():
        rows = [[what, f"{want:,g}", f"{got:,.5g}", f"{100 * (got / want - 1):+.1f} %"] for what, want, got in facts]
        off = [abs(got / want - 1) for _, want, got in facts]
        rows.append(["mean, worst", "", "", f"{100 * sum(off) / len(off):.1f} %, {100 * max(off):.1f} %"])
        result.append((title, ["what", "published", "predicted", "off"], rows))
    kept: dict[str, list[str]] = {}
    for _, what, published, share in activation_rows():
        kept.setdefault(what, [what, published]).append(f"{100 * share:.1f} %")
    columns = ["what is left of tensor parallel's", "published", *(g.name for g in GPTS)]
    result.append(("Activations of a layer (2205.05198, figure 7)", columns, list(kept.values())))
    full = [
        [name, f"{states:.1f}", f"{baseline:.1f}", f"{states + baseline:.0f}", f"{both:.1f}", f"{states + both:.0f}"]
        for name, states, baseline, both in fits_rows()
    ]
    columns = ["model", "states", "tp alone", "sum (published: > 80)", "both techniques", "sum (published: < 80)"]
    result.append(("GB on the first stage (2205.05198, figure 1)", columns, full))
    return result
