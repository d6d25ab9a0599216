"""Published measurements, and what the planner says to the same questions. No number is fitted to a row.

The two constants of plan_time.py (`CEILING`, `HALF`) were chosen once so that the eight iteration times of Korthikanti
et al. (arXiv 2205.05198, table 5) deviate least; all else there comes from NVIDIA's data sheets. The other tables
were not looked at for it. Each table prints its deviations.

    ZeRO        GB per device of a 7.5B model at each stage (1910.02054, table 1)             chapter 03's formula
    iteration   22B to 1T on A100s, full recomputation | sequence parallel and selective      the clock, on a GPT
    activation  bytes of a layer in the same paper (equations 2 and 4, table 2)               chapter 01's formula
    playbook    throughput lost from 8 to 16 tensor ranks, and from 8 to 16 pipeline ranks    the clock
    Ulysses     TFLOPs by GPUs and length (2309.14509)                                        chapter 05's cost model
    FPDT        GB at one and two chunks; longest sequences by the number of GPUs             chapter 08's formulas

    python 11_5d_trainer/plan.py --facts
"""

from dataclasses import dataclass

import chapters  # noqa: F401  finds the chapters below
from accounting import gpt_activations
from fpdt_costs import paper_table as fpdt_table
from llama import LLAMA3_8B, LLAMA3_70B, LlamaConfig
from plan_memory import Layout, fpdt_host, peak
from plan_search import GB, RESERVED
from plan_time import Cluster, read_cluster, step_time
from plan_traffic import Flow
from ulysses import Machine, cost_model
from zero_memory import bytes_per_parameter

Table = tuple[str, list[str], list[list[str]]]


@dataclass(frozen=True)
class Gpt:
    """A row of tables 3 and 5 of 2205.05198. Sequences of 2048, vocabulary 51200, 8 tensor ranks, as many
    micro-batches as the global batch allows; `full` and `selective` are the published seconds of an iteration."""

    name: str
    hidden: int
    layers: int
    heads: int
    pp: int
    chunks: int  # interleaved stages per rank
    gpus: int
    batch: int
    micro_batch: int
    full: float
    selective: float


GPTS = (
    Gpt("22B", 6144, 48, 64, 1, 1, 8, 4, 4, 1.42, 1.10),
    Gpt("175B", 12288, 96, 96, 8, 3, 64, 64, 1, 18.13, 13.75),
    Gpt("530B", 20480, 105, 128, 35, 3, 280, 280, 1, 49.05, 37.83),
    Gpt("1T", 25600, 128, 160, 64, 1, 512, 512, 1, 94.42, 71.49),
)


def gpt_seconds(g: Gpt, cluster: Cluster, selective: bool) -> float:
    """An iteration of a GPT with dropout, no data parallelism, by the rules of plan_time.py.

    Bytes kept for backward (table 2): of the 34 s b h of a layer, 10 lie outside of the tensor-parallel regions, and
    5 a s² b are attention's. `selective` means sequence parallel too. Sequence parallel's third all-gather hides
    behind the gradient of the weights, as the paper says.
    """
    s, V, t, b, h, L, p, v = 2048, 51200, 8, g.micro_batch, g.hidden, g.layers, g.pp, g.chunks
    width, m = min(h / t, b * s), g.batch // g.micro_batch
    core = 4 * b * s * s * h / t  # flops: no causal half is skipped there
    attention = 5 * g.heads * b * s * s / t  # bytes kept
    kept = 10 * s * b * h / (t if selective else 1) + 24 * s * b * h / t + attention
    work = cluster.product(24 * b * s * h * h / t + core, width) + cluster.elementwise(2 * kept)
    reduce = 2 * cluster.seconds(Flow("all_reduce", "tp", 2 * b * s * h, t), 1)
    forward, backward = work + reduce, 2 * work + reduce
    again = cluster.product(core, width) + cluster.elementwise(2 * attention) if selective else forward
    stage = L / p * (forward + backward + again)
    head = 3 * cluster.product(2 * b * s * h * V / t, width) + cluster.elementwise(24 * b * s * V / t)
    message = cluster.seconds(Flow("send", "pp", 2 * b * s * h / t, p), 64) if p > 1 else 0.0
    turns = 2 * v * message
    parameters = (12 * L * h * h + V * h) / p / t
    update = cluster.elementwise(36 * parameters)  # 18 bytes of weights, gradients and states, read and written
    return m * (stage + head + turns) + (p - 1) / v * (stage + turns) + update


def iterations(cluster: Cluster | None = None) -> list[tuple[str, str, float, float, float]]:
    """(model, recomputation, published, predicted, deviation) of table 5."""
    cluster = cluster or read_cluster("a100-dgx")
    rows = []
    for selective in (False, True):
        for g in GPTS:
            want = g.selective if selective else g.full
            got = gpt_seconds(g, cluster, selective)
            kind = "selective, sequence parallel" if selective else "full"
            rows.append((g.name, kind, want, got, got / want - 1))
    return rows


def zero_rows() -> list[tuple[int, float, float]]:
    """(stage, GB published, GB by the formula) of 7.5B parameters on 64 ranks (1910.02054, figure 1)."""
    published = (120.0, 31.4, 16.6, 1.9)
    return [(z, want, 7.5 * bytes_per_parameter(z, 64)) for z, want in enumerate(published)]


def activation_rows() -> list[tuple[str, float]]:
    """What is left of a layer's activations with selective recomputation and sequence parallel on 8 tensor ranks, as a
    share of tensor parallel alone: 34/t against 10 + 24/t + 5 a s / (h t) (2205.05198, table 2 and figure 7)."""
    rows = []
    for g in GPTS:
        all_of = gpt_activations(g.hidden, 1, g.heads, 2048, 1) / (2048 * g.hidden)
        square = all_of - 34
        rows.append((g.name, (34 / 8) / (10 + 24 / 8 + square / 8)))
    return rows


LLAMA_3B = LlamaConfig(128256, 3072, 28, 24, 8, 8192, rope_theta=500000.0)


def throughput(layout: Layout, cluster: Cluster, model: LlamaConfig = LLAMA_3B) -> float:
    """Tokens per second and GPU."""
    step = step_time(model, None, layout, cluster)
    return layout.global_batch * layout.seq_len / step.seconds / layout.ranks


def playbook() -> list[tuple[str, float, float]]:
    """(what, share of the throughput lost as published, as predicted).

    Assumed: a Llama of 3B, sequences of 4096, bf16; tensor parallel with sequence parallel and a micro-batch of 4;
    a pipeline of 1F1B with 32 micro-batches of one sequence, and a vocabulary so small that all stages take the same
    time. A large vocabulary would make the last of 16 stages much slower than the others.

    With 32 micro-batches (the playbook says m = 32) the bubble alone loses 1 - (32 + 7) / (32 + 15) = 17.0 %, more than
    was published. So what is missing is no cost, but something that slowed 8 ranks more than 16, and that the text does
    not tell. The planner adds what messages cost, of which one in fifteen leaves a node.
    """
    cluster, rows = read_cluster("h100-playbook"), []
    wide = LlamaConfig(128256, 4096, 28, 32, 16, 11008)  # heads that 16 ranks divide
    tensor = [
        throughput(
            Layout(tp=t, sequence_parallel=True, micro_batch=4, seq_len=4096, precision="bf16-master"), cluster, wide
        )
        for t in (8, 16)
    ]
    rows.append(("tensor parallel, 8 to 16 ranks", 0.43, 1 - tensor[1] / tensor[0]))
    deep = LlamaConfig(1024, 3072, 32, 24, 8, 8192)
    pipeline = [
        throughput(Layout(pp=p, micro_batches=32, seq_len=4096, precision="bf16-master"), cluster, deep)
        for p in (8, 16)
    ]
    rows.append(("pipeline parallel, 8 to 16 ranks", 0.14, 1 - pipeline[1] / pipeline[0]))
    return rows


@dataclass(frozen=True)
class Longest:
    """Sequences that FPDT is reported to train (2408.16978, abstract, and DeepSpeed's blog on Ulysses-Offload).

    Assumed: A100s of 80 GB, four in a node with 1 TB of host memory; Ulysses over all GPUs, ZeRO stage 3, bf16 with
    master weights, chunks of 64K tokens. The shape of "GPT-30B" is ours. Sequences are tried in steps of 128K tokens;
    the authors report powers of two and one length between, and do not say that twice as much failed.
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
    cluster, step, rows = read_cluster("a100-dgx"), 2**17, []
    device, host = cluster.memory_gb * GB * (1 - RESERVED), cluster.host_memory_gb * GB
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


def tables() -> list[Table]:
    """Every fact as text: (title, columns, rows)."""

    def percent(x: float) -> str:
        return f"{100 * x:+.1f} %"

    found = iterations()
    mean, worst = sum(abs(r[4]) for r in found) / len(found), max(abs(r[4]) for r in found)
    columns = ["model", "recomputation", "published s", "predicted s", "deviation"]
    rows = [[name, kind, f"{want:.2f}", f"{got:.2f}", percent(off)] for name, kind, want, got, off in found]
    rows.append(["mean, worst", "", "", "", f"{100 * mean:.1f} %, {100 * worst:.1f} %"])
    result: list[Table] = [("Iteration times on A100s (2205.05198, table 5)", columns, rows)]
    zero = [[f"{z}", f"{want:g}", f"{got:.1f}", percent(got / want - 1)] for z, want, got in zero_rows()]
    result.append(("GB of 7.5B parameters on 64 ranks (1910.02054)", ["stage", "published", "predicted", "off"], zero))
    kept = [[name, "a fifth", f"{100 * share:.1f} %"] for name, share in activation_rows()]
    result.append(
        ("Activations left by selective + sequence parallel (2205.05198)", ["model", "published", "of tp alone"], kept)
    )
    lost = [
        [what, percent(-want), percent(-got), f"{100 * (want - got):+.1f} points"] for what, want, got in playbook()
    ]
    result.append(("Throughput lost (playbook)", ["from one node to two", "published", "predicted", "off"], lost))
    swaps = [
        [f"{S:,}", f"{gpus}", f"{want:.1f}", f"{got:.1f}", f"{off:+.1f} %"]
        for S, gpus, want, got, off in cost_model(Machine())
    ]
    result.append(("Ulysses, TFLOPs per GPU (2309.14509)", ["tokens", "GPUs", "published", "predicted", "off"], swaps))
    fpdt = [[name, f"{two:g}", f"{got:.1f}", percent(got / two - 1)] for name, _, two, got, _ in fpdt_table()]
    result.append(("FPDT, GB at two chunks", ["model", "published", "predicted", "off"], fpdt))
    far = [
        [name, f"{gpus}", f"{want:,}", f"{got:,}", percent(got / want - 1), ends]
        for name, gpus, want, got, ends in longest_rows()
    ]
    columns = ["model", "GPUs", "published", "fits", "off", "ends at memory of"]
    result.append(("FPDT, longest sequences (2408.16978)", columns, far))
    return result
