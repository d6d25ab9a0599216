"""The planner's memory: what a rank stores and its peak in one step, in bytes, before anything is run.

Problem. Whether a layout fits is the first question, and a wrong answer costs a night in the queue. Every
chapter has a formula for its technique; a layout uses eight at once, and all add to one number: the peak.

Idea. Sort what is in memory by its lifetime, and evaluate the few moments at which it can be most:

    stays for the run    weights, gradients, optimizer states: to the byte, with every bucket's padding
    stays for a step     tokens and labels; pipeline messages that are not waited for
    stays from F to BW   activations, times the micro-batches in flight, which the schedule decides (chapter 06)
    temporary            what an operator needs while it runs

         |            __a__                a   the loss: all activations, and two more copies of the logits
         |         __/ b   \\__             b   backward of the last block: all but the logits, the MLP's gradients
         |      __/           \\c_          c   the end of backward: few activations, but all gradients
         |_____/                 \\___d     d   the update
         | weights, states, gradients      time ->

Formulas, on T = B S / c tokens of a rank, T' = T / t with sequence parallel and T without, e bytes per element:
    one block, nothing recomputed (chapter 01, sharded by chapter 04: kept_bytes there; a shard is 1/t)
        norms 2 T' (H w + 2 H e + w)    q, k, v, out  T (2 H + 2 H_kv) e / t    lse  T N w / t    MLP  4 T F e / t
    Ulysses    out again, split by heads; K/V heads copied where there are fewer than ranks
    ring       as above: blocks of other ranks are sent again. Full recomputation: T' H e
    experts    n = K T rows:  n (4 H + 4 F) e, and the router's T (E w + ...)
    around     last norm, logits: T V w / t + ...

`held`, `activations` and `peak` each return a dictionary, so that the largest contributor has a name.
test_plan_memory.py checks them against the meter, two to the byte and `peak` within 5 %. The trainer's
metrics.py counts the buckets of a built model, where `held` has none; test_metrics.py checks both are equal.

    python 11_5d_trainer/planner/plan.py --explain "--tp 2 --zero 1" --model tiny      prints it, line by line

Symbols: B micro-batch, S sequence, H hidden, N heads, F intermediate, V vocabulary, E experts, K of them per
token; t tensor, c context, p pipeline ranks; w = max(e, 4) bytes per element of statistics and the loss.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import paths  # noqa: F401  finds the chapters below
import torch
from context_ulysses import kv_heads_of, repeated_kv_heads
from fpdt_costs import Sizes, attention_peak, feed_forward_peak, loss_peak, model_host_peak
from llama import LlamaConfig
from moe_layer import MoEConfig
from ops import AUTOCAST, FP8
from options import Config, UsageError
from pipeline_executor import layers_of
from schedule_simulator import BW, Action, B, F, Schedule, W, programs
from schedules import build as build_schedule

Bytes = dict[str, int]


@dataclass(frozen=True)
class Layout:
    """How the model and a step are split. The fields are the trainer's options, resolved."""

    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    ring: int = 1
    ulysses: int = 1
    gather_kv: bool = False  # context parallel by all-gather instead of a ring
    pp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    zero: int = 0
    ep: int = 1
    micro_batch: int = 1
    micro_batches: int = 1  # per rank and step
    seq_len: int = 128
    recompute: str = "none"
    precision: str = "fp32"
    fpdt_chunks: int = 0
    bucket_bytes: int = 25 * 2**20
    reduce_dtype: str = "weights"
    kernels: str = "torch"  # or "triton": chapter 09's fused kernels, which save less
    tp_overlap: str = "none"  # used only for bytes sent (check_planned)

    @classmethod
    def of(cls, config: Config, sizes: LlamaConfig, world_size: int) -> "Layout":
        """The trainer's layout with these options and ranks. Raises UsageError as the trainer would."""
        config.check()
        config.check_layout(sizes, world_size)
        ring, all_to_all = config.ring_and_ulysses(sizes)
        dp = config.dp(world_size)
        return cls(
            dp=dp,
            ring=ring,
            ulysses=all_to_all,
            gather_kv=config.cp_kind == "allgather" and config.cp > 1,
            micro_batches=config.accumulation(dp),
            bucket_bytes=int(config.bucket_mib * 2**20),
            kernels=kernels_of(config),
            **{name: getattr(config, name) for name in SAME},
        )

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def mirrored(self) -> bool:
        return self.pp > 1 and self.schedule == "dualpipe"

    @property
    def data(self) -> int:
        """Ranks that hold the same weights: gradients are summed over them, and ZeRO shards over them."""
        return self.dp * self.cp * (2 if self.mirrored else 1)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank, T."""
        return self.micro_batch * self.seq_len // self.cp

    @property
    def outer_tokens(self) -> int:
        """Tokens that a rank holds between the parallel regions, T'."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.micro_batches * self.dp

    @property
    def cp_kind(self) -> str:
        if self.gather_kv:
            return "allgather"
        if self.ulysses == 1:
            return "zigzag"
        return "ulysses" if self.ring == 1 else "usp"

    def options(self) -> str:
        """This layout as options of train.py."""
        in_use = {
            f"--micro-batch {self.micro_batch} --global-batch {self.global_batch}": True,
            f"--tp {self.tp}": self.tp > 1,
            "--sequence-parallel": self.sequence_parallel,
            f"--cp {self.cp} --cp-kind {self.cp_kind}": self.cp > 1,
            f"--pp {self.pp} --schedule {self.schedule}": self.pp > 1,
            f"--stages-per-rank {self.stages_per_rank}": self.stages_per_rank > 1,
            f"--zero {self.zero}": self.zero > 0,
            f"--ep {self.ep}": self.ep > 1,
            f"--fpdt-chunks {self.fpdt_chunks}": self.fpdt_chunks > 0,
            f"--recompute {self.recompute}": self.recompute != "none",
            "--kernels torch": self.kernels == "torch",
            f"--precision {self.precision}": True,
        }
        return " ".join(option for option, used in in_use.items() if used)


def kernels_of(config: Config) -> str:
    """What `--kernels auto` means on the device of these options; without one, a GPU."""
    if config.kernels != "auto":
        return config.kernels
    return "torch" if config.device == "cpu" or config.precision == "fp64" else "triton"


def check_planned(config: Config, sizes: LlamaConfig, world_size: int, timed: bool = True) -> None:
    """Raise UsageError for options of the trainer whose bytes, or if `timed` seconds, the formulas do not have.

    Ignoring them silently would plan another run.
    """
    schedule = config.pipeline(world_size, sizes.layers)
    split = schedule is not None and any(action.kind == W for actions in schedule.actions for action in actions)
    again = split and config.recompute == "full" and config.mixture(sizes) is not None
    unknown = {
        "--zero-offload": (config.zero_offload, "what its states cost on the way to the host"),
        "--zero-late-gather": (config.zero_late_gather, "how much of a gather hides behind the next forward"),
        f"--zero-shards {config.zero_shards}": (config.zero_shards, "shards and copies at once"),
        f"--reduce-dtype {config.reduce_dtype}": (config.reduce_dtype != "weights", "gradients wider than weights"),
        f"--accumulate-dtype {config.accumulate_dtype}": (config.accumulate_dtype != "weights", "a second sum"),
        f"--tp-overlap {config.tp_overlap}": (config.tp_overlap != "none", "tensor parallel behind products"),
        f"--dispatch {config.dispatch}": (config.dispatch != "pairs", "other rows than one for each pair"),
        f"--lora-rank {config.lora_rank}": (config.lora_rank, "weights that are not trained"),
        f"--capacity {config.capacity:g}": (config.capacity, "tokens that are dropped"),
        "--documents": (config.documents, "attention that sees less than its sequence"),
        "--cp-kind ring": (timed and config.cp > 1 and config.cp_kind == "ring", "which rank has more of the mask"),
        "--compile": (config.compile, "what a compiler fuses"),
        "--kernels cuda": (config.kernels == "cuda", "its products and its attention"),
        f"--precision {config.precision}": (config.precision in FP8, "products in 8 bits"),
        f"--schedule {config.schedule} with --recompute full and experts": (
            again,
            "W, which runs a block again for each group of weights",
        ),
    }
    for option, (asked, what) in unknown.items():
        if asked:
            raise UsageError(f"{option} cannot be planned: the formulas do not know {what}; leave it out")


SAME = (
    *("tp", "sequence_parallel", "pp", "schedule", "stages_per_rank", "zero", "ep", "micro_batch", "seq_len"),
    *("recompute", "precision", "fpdt_chunks", "tp_overlap"),
)


@dataclass(frozen=True)
class Widths:
    """Bytes per element of the weights (and their gradients), of activations, of the optimizer's copies."""

    weight: int
    activation: int
    state: int
    master: int


def widths(precision: str) -> Widths:
    if precision == "bf16-master":
        return Widths(2, 2, 4, 4)
    weight = 8 if precision == "fp64" else 4
    return Widths(weight, 2 if precision in AUTOCAST else weight, weight, 0)


# --------------------------------------------------------------------------------- what stays: weights and their kin


@dataclass(frozen=True)
class Weight:
    """A parameter as one rank holds it. `layer` is -1 before the layers, and L after them."""

    numel: int
    layer: int
    expert: bool = False
    slots: int = 0  # elements of the all-reduce of its partial gradient over tensor ranks; 0: none


def stage_layers(layout: Layout, layers: int, rank: int) -> list[range]:
    """The layers of each stage that a pipeline rank holds, in the order of the model."""
    if layout.pp == 1:
        return [range(layers)]
    schedule = schedule_of(layout)
    stages = sorted({stage for _, stage in schedule.stages_of(rank)})
    return [layers_of(stage, schedule.stages, layers) for stage in stages]


built = lru_cache(maxsize=256)(build_schedule)


def schedule_of(layout: Layout) -> Schedule:
    return built(layout.schedule, layout.pp, layout.micro_batches, layout.stages_per_rank)


@lru_cache(maxsize=64)
def programs_of(name: str, pp: int, micro_batches: int, stages_per_rank: int) -> list[list[Any]]:
    """For every rank of a schedule: actions, and messages between them (chapter 06)."""
    return [list(items) for items in programs(built(name, pp, micro_batches, stages_per_rank))]


def program_of(layout: Layout, rank: int) -> list[Any]:
    return programs_of(layout.schedule, layout.pp, layout.micro_batches, layout.stages_per_rank)[rank]


def block_weights(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, layer: int) -> list[Weight]:
    """The weights of one block, in the order in which the module registers them."""
    c = model
    t = layout.tp
    split = layout.sequence_parallel
    pieces = min(c.kv_heads, t)  # of K and V; if fewer than ranks, some hold the same
    kv = c.kv_heads * c.head_dim // pieces
    norm = Weight(c.hidden, layer, slots=c.hidden if split else 0)
    query = Weight(c.attention_width * c.hidden // t, layer)
    shared_kv = Weight(kv * c.hidden, layer, slots=pieces * kv * c.hidden if pieces < t else 0)
    attention = [query, shared_kv, shared_kv, query]
    if c.qkv_bias:
        kv_bias = Weight(kv, layer, slots=pieces * kv if pieces < t else 0)
        attention = [query, Weight(c.attention_width // t, layer), shared_kv, kv_bias, shared_kv, kv_bias, query]
    if c.qk_norm:  # each tensor rank has different heads
        attention += [Weight(c.head_dim, layer, slots=c.head_dim if t > 1 else 0)] * 2
    if moe is None:
        feed_forward = [Weight(c.hidden * c.intermediate // t, layer)] * 3
    else:  # tensor ranks do not shard experts: all hold the same
        router = moe.experts * c.hidden
        matrix = moe.experts // layout.ep * moe.intermediate * c.hidden
        feed_forward = [Weight(router, layer, slots=router if split else 0)]
        feed_forward += [Weight(matrix, layer, layout.ep > 1, slots=matrix if split else 0)] * 3
    return [norm, *attention, norm, *feed_forward]


def weights_of(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, rank: int = 0) -> list[Weight]:
    """Every parameter of pipeline rank `rank`, in the order of registration."""
    stages = stage_layers(layout, model.layers, rank)
    first = any(layers.start == 0 for layers in stages)
    last = any(layers.stop == model.layers for layers in stages)
    vocabulary = -(-model.vocab_size // layout.tp) * model.hidden
    found = [Weight(vocabulary, -1)] if first or (last and model.tied) else []
    for layers in stages:
        for layer in layers:
            found += block_weights(model, moe, layout, layer)
    if last:
        found.append(Weight(model.hidden, model.layers, slots=model.hidden if layout.sequence_parallel else 0))
        found += [] if model.tied else [Weight(vocabulary, model.layers)]
    return found


@dataclass(frozen=True)
class Buckets:
    """The parameters of one owner of gradients: how many ranks share them, ZeRO stage, bucket sizes."""

    ranks: int
    stage: int
    numels: tuple[int, ...]
    expert: bool = False

    @property
    def shards(self) -> list[int]:
        return [-(-numel // self.ranks) for numel in self.numels]  # rounded up: the last may have padding

    @property
    def padded(self) -> int:
        return sum(self.shards) * self.ranks


def owners(weights: list[Weight], layout: Layout, element: int) -> list[Buckets]:
    """As the trainer makes them (gradients.py): dense parameters, and experts, in smaller groups."""
    found = []
    for experts, ranks in ((False, layout.data), (True, layout.data // layout.ep)):
        mine = [weight for weight in weights if weight.expert == experts]
        stage = min(layout.zero, 2) if experts else layout.zero
        if mine:
            cut = unit_buckets(mine) if stage == 3 else size_buckets(mine, layout.bucket_bytes, element)
            found.append(Buckets(ranks, stage, tuple(cut), experts))
    return found


def size_buckets(weights: list[Weight], least: int, element: int) -> list[int]:
    """Filled in reverse order of registration, each bucket to at least `least` bytes (chapters 02 and 03)."""
    # --- exercise 11.21: how many elements does each bucket have? ---
    full, filling = [], 0
    for weight in reversed(weights):
        filling += weight.numel
        if filling * element >= least:
            full.append(filling)
            filling = 0
    if filling > 0:
        full.append(filling)
    return full
    # --- end exercise ---


def unit_buckets(weights: list[Weight]) -> list[int]:
    """One bucket per layer, and first the root, for what is in no layer (chapter 03, stage 3)."""
    last = max(weight.layer for weight in weights)
    outside = sum(weight.numel for weight in weights if weight.layer in (-1, last))
    by_layer = [sum(w.numel for w in weights if w.layer == layer) for layer in range(last)]
    return [outside, *by_layer]


def held(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, rank: int = 0) -> Bytes:
    """Bytes of weights, gradients and optimizer states that pipeline rank `rank` holds between two steps. Exact.

    Adam's step counters, one value per tensor, are left out.
    """
    width = widths(layout.precision)
    total = {"weights": 0, "gradients": 0, "optimizer states": 0}
    # --- exercise 11.22: what does each stage of ZeRO divide, and where does padding count? ---
    for owner in owners(weights_of(model, moe, layout, rank), layout, width.weight):
        whole = sum(owner.numels) if owner.stage == 0 else owner.padded
        shard = sum(owner.shards)
        total["weights"] += (shard if owner.stage == 3 else whole) * width.weight
        total["gradients"] += (shard if owner.stage >= 2 else whole) * width.weight
        total["optimizer states"] += (shard if owner.stage else whole) * (2 * width.state + width.master)
    # --- end exercise ---
    return total


# ----------------------------------------------------------------------------------------------------- activations


def block_activations(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, recompute: str = "") -> int:
    """Bytes that one block saves for backward, of one micro-batch."""
    c = model
    t = layout.tp
    e = widths(layout.precision).activation
    w = max(e, 4)
    T = layout.tokens
    outer = layout.outer_tokens
    mode = recompute or layout.recompute
    # --- exercise 11.23: every byte that a block leaves behind, on one rank ---
    if mode == "full":
        return outer * c.hidden * e + (tape_bytes(moe, outer) if moe else 0)
    fused = layout.kernels == "triton"
    norm = 2 * c.hidden * e if fused else c.hidden * w + 2 * c.hidden * e  # eager: an fp32 copy is squared
    norms = 2 * outer * (norm + w)
    kv_heads = c.kv_heads // min(c.kv_heads, t)  # of this rank
    q = T * c.attention_width // t * e
    kv = T * kv_heads * c.head_dim * e
    core = q + 2 * kv + q  # q, k, v; and out, which o_proj multiplies
    if c.qk_norm:  # their inputs, and 1/rms of each head
        core += (q + kv) * (e if fused else w + e) // e + T * (c.heads // t + kv_heads) * w
    if mode == "none":
        core += T * c.heads // t * w  # log-sum-exp
        if layout.ulysses > 1:  # q, k, v are saved by heads only; out by heads and by tokens
            most = max(map(len, kv_heads_by_rank(model, layout)))  # [B, S, most, D], before: [B, S/U, N_kv, D]
            core += q + 2 * T * (layout.ulysses * most - kv_heads) * c.head_dim * e
    feed_forward = (3 if fused else 4) * T * c.intermediate // t * e  # gate, up, their product; silu(gate)
    # --- end exercise ---
    if layout.precision in AUTOCAST:  # the residual stream is in fp32, and so are a norm's input and output
        norms += 2 * outer * c.hidden * (2 * w - e)
    return norms + core + (feed_forward if moe is None else expert_activations(model, moe, layout))


def kv_heads_by_rank(model: LlamaConfig, layout: Layout) -> list[list[int]]:
    """The K/V heads of a tensor rank that each Ulysses rank needs (chapter 05)."""
    heads = model.heads // layout.tp
    kv_heads = max(model.kv_heads // layout.tp, 1)
    U = layout.ulysses
    return [kv_heads_of(rank, U, heads, kv_heads) for rank in range(U)]


def ring_heads(model: LlamaConfig, layout: Layout) -> list[int]:
    """How many K/V heads each Ulysses rank sends around a ring. If the heads that it needs serve unequal
    numbers of query heads, it is one for each query head, since they are repeated first (chapter 05)."""
    N = model.heads // layout.tp
    kv = max(model.kv_heads // layout.tp, 1)
    U = layout.ulysses
    needed = kv_heads_by_rank(model, layout)
    return [N // U if repeated_kv_heads(rank, U, N, kv) else len(needed[rank]) for rank in range(U)]


def expert_activations(model: LlamaConfig, moe: MoEConfig, layout: Layout) -> int:
    """Bytes of a mixture of experts in place of the MLP, with an even load on all ranks."""
    e = widths(layout.precision).activation
    w = max(e, 4)
    T = layout.outer_tokens
    H = model.hidden
    K = moe.top_k
    E = moe.experts
    rows = K * T
    router = T * (2 * E + K + 1) * w + 4 * rows * 8 + 4 * E + 20  # probabilities and weights; the plan, int64
    wide = 3 if layout.kernels == "triton" else 4
    return router + rows * (4 * H + wide * moe.intermediate) * e + (T * H * (w - e) if w != e else 0)


def tape_bytes(moe: MoEConfig, tokens: int) -> int:
    """What recomputation needs from forward: the routing, three times int64, and counts (chapter 07)."""
    return 3 * moe.top_k * tokens * 8 + moe.experts * 8 + 8


def loss_in_chunks(layout: Layout) -> bool:
    """Whether output layer and loss are one function, which never holds all logits: the rule of ops.py."""
    return layout.kernels == "triton" and layout.tp == layout.pp == 1 and layout.precision != "fp16"


# Constants of chapter 09's fused_loss.py, which cannot be imported without Triton. From torch 2.12 on a bf16
# matmul can accumulate into fp32.
ADDS_WIDE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
CHUNK_BYTES = 2**30 if ADDS_WIDE else 2**31
SLICE_BYTES = 2**28


def chunk_of(tokens: int, vocab: int, element: int) -> int:
    """Tokens whose logits the fused loss holds at once."""
    most = max(128, CHUNK_BYTES // (vocab * element) // 128 * 128)
    chunks = max(1, -(-tokens // most))
    return min(tokens, max(128, -(-tokens // (chunks * 128)) * 128))


def around(model: LlamaConfig, layout: Layout, first: bool, last: bool) -> Bytes:
    """Bytes saved outside of the blocks: RoPE's tables, and in the last stage the last norm and the loss."""
    c = model
    t = layout.tp
    e = widths(layout.precision).activation
    w = max(e, 4)
    T = layout.tokens
    outer = layout.outer_tokens
    kept = {"RoPE tables": layout.seq_len // layout.cp * c.head_dim * 4}
    if first and t > 1:
        kept["embedding"] = T * (8 + 1)  # row index, and whether it is local
    if last:
        fused = layout.kernels == "triton"
        kept["last norm"] = outer * ((2 * c.hidden * e if fused else c.hidden * w + 2 * c.hidden * e) + w)
        words = T * -(-c.vocab_size // t)
        if loss_in_chunks(layout):  # forward makes both gradients; the norm's output is not saved
            kept["last norm"] = outer * (c.hidden * e + w)
            kept["log-probabilities"] = T * c.hidden * e + c.vocab_size * c.hidden * w
        elif fused and t == 1:  # the logits as computed, and two values per token
            kept["log-probabilities"] = words * e + 2 * T * w
        else:
            kept["log-probabilities"] = words * w + (T * (8 + 1) if t > 1 else w)
        if layout.precision in AUTOCAST:
            kept["last norm"] += outer * c.hidden * (2 * w - e)
    return kept


def activations(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, layers: range, recompute: str = "") -> Bytes:
    """Bytes that a stage with these layers saves, of one micro-batch. Tokens and labels are not counted."""
    first = layers.start == 0
    last = layers.stop == model.layers
    kept = {"blocks": len(layers) * block_activations(model, moe, layout, recompute)}
    return kept | around(model, layout, first, last)


# ------------------------------------------------------------------------------------------------------------ FPDT


def fpdt_sizes(model: LlamaConfig, layout: Layout) -> Sizes:
    """Attention of one layer and one sequence, as chapter 08 counts it."""
    e = widths(layout.precision).activation
    c = model
    return Sizes(layout.seq_len, layout.cp, layout.fpdt_chunks, c.heads, c.kv_heads, c.head_dim, e)


def fpdt_host(model: LlamaConfig, layout: Layout) -> int:
    """Peak bytes of host memory on one rank: the input of every layer, and the rest of one (chapter 08)."""
    return layout.micro_batch * model_host_peak(fpdt_sizes(model, layout), model.hidden, model.layers, "input")


def fpdt_working_set(model: LlamaConfig, layout: Layout) -> dict[str, Bytes]:
    """What is on the device besides weights, gradients and states, by moment, all by chapter 08's formulas.

    Of a rank's full sequence only the inputs and outputs are there: of a block, its backward, the loss.
    """
    c = model
    e = widths(layout.precision).activation
    z = fpdt_sizes(model, layout)
    T = layout.tokens
    w = max(e, 4)
    u = layout.fpdt_chunks
    stream = T * c.hidden * e
    chunk = T // u * c.hidden * e
    block = sum(weight.numel for weight in block_weights(model, None, layout, 0))
    attention = layout.micro_batch * attention_peak(z, "backward") + chunk
    # Besides the MLP: x in two buffers, h, q, output by tokens and by heads, its gradient; k, v three times.
    beside = 7 * chunk + layout.micro_batch * 6 * z.letters()[1]
    backward = max(attention, feed_forward_peak(T // u // 2, c.hidden, c.intermediate, e, "backward") + beside)
    head = loss_peak(T // u, T, c.hidden, c.vocab_size, e)
    return {
        "loss": {"residual stream": 2 * stream, "working set": head},
        "block": {"residual stream": 2 * stream, "working set": backward, "sums of gradients": block * w},
        "end": {"residual stream": stream},
    }


# ------------------------------------------------------------------------------------------------------------ peak


def working_set(model: LlamaConfig, moe: MoEConfig | None, layout: Layout) -> Bytes:
    """Temporary memory while one stage computes: at the loss, and in the backward of a block."""
    c = model
    t = layout.tp
    e = widths(layout.precision).activation
    w = max(e, 4)
    T = layout.tokens
    outer = layout.outer_tokens
    logits = T * -(-c.vocab_size // t)
    stream = outer * c.hidden * e  # a gradient of the residual stream
    rows = T if moe is None else moe.top_k * outer
    wide = rows * (c.intermediate // t if moe is None else moe.intermediate) * e
    block = stream + 2 * wide
    loss = logits * w * (2 if t == 1 else 1) + (logits * e if w != e else 0)
    fused = layout.kernels == "triton"
    if fused and t == 1:
        loss = logits * e  # the logits' gradient
    if loss_in_chunks(layout):  # forward: the norm's output, and a chunk of logits; backward: both gradients, rounded
        matrix = c.vocab_size * c.hidden
        added = min(matrix * w, SLICE_BYTES) if e == w or not ADDS_WIDE else 0  # a matmul before it is added
        chunk = chunk_of(T, c.vocab_size, e) * c.vocab_size * e
        loss = max(stream + 3 * T * w + chunk + added, stream + matrix * e)
    if layout.sequence_parallel:  # the input is gathered again; its gradient, and that in chunks to send
        loss = max(loss, 3 * T * c.hidden * e + -(-c.vocab_size // t) * c.hidden * e + stream)
        block += T * c.hidden * e
    if layout.recompute == "full":  # one block is recomputed completely
        block += block_activations(model, moe, layout, "none") - outer * c.hidden * (e if fused else w)
        if moe is not None:  # highest one matmul later: combined rows and one wide tensor are freed
            block -= wide + rows * c.hidden * e - stream
    # B ends in the attention of the first block, when all that W needs is saved.
    kv = c.kv_heads // min(c.kv_heads, t) * c.head_dim
    ring = 0
    if layout.ring > 1:  # sums in fp32, and buffers in flight
        ring = T * (2 * c.attention_width // t + 8 * kv) * 4 + 2 * T * kv * e
    whole = 2 * T * c.hidden * e if layout.sequence_parallel else 0
    return {"loss": loss, "block": block, "B": stream + T * c.attention_width // t * e + ring, "W": whole}


def kept_for_weights(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, layers: range) -> int:
    """Bytes of gradients that a stage saves from B to W: of the output of every matmul and every norm."""
    c = model
    t = layout.tp
    e = widths(layout.precision).activation
    T = layout.tokens
    stream = layout.outer_tokens * c.hidden * e
    kv = c.kv_heads // min(c.kv_heads, t) * c.head_dim
    whole = T * c.hidden * e  # after a row-parallel matmul its gradient is gathered again
    if moe is None:
        feed_forward = whole + T * 2 * c.intermediate // t * e
    else:  # every row that goes to an expert; the router's logits
        rows = moe.top_k * layout.outer_tokens
        feed_forward = rows * (c.hidden + 2 * moe.intermediate) * e
    block = 2 * stream + whole + T * (c.attention_width // t + 2 * kv) * e + feed_forward
    if layout.recompute == "full" and moe is None:  # B has recomputed the block, and W continues
        block += block_activations(c, moe, layout, "none") - layout.outer_tokens * c.hidden * e
    ends = stream * (layers.start == 0)
    if layers.stop == c.layers:
        ends += stream + T * -(-c.vocab_size // t) * e
    return len(layers) * block + ends


def gone_after_b(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, layers: range) -> Bytes:
    """Bytes of a stage's activations that only B needs: those after its last matmul. W does not use them."""
    if layers.stop == model.layers:
        what = "log-probabilities"
        return {what: around(model, layout, False, True)[what]}
    e = widths(layout.precision).activation  # of a block: rows of experts, during and after the combine
    return {"blocks": 3 * moe.top_k * layout.outer_tokens * model.hidden * e if moe else 0}


def passing_weights(layout: Layout, weights: list[Weight]) -> dict[str, Bytes]:
    """Weights and gradients that are full for a while, by moment: the loss, a block, the end of backward."""
    width = widths(layout.precision).weight
    moments: dict[str, Bytes] = {"loss": {}, "block": {}, "end": {}}

    def add(moment: str, what: str, count: int) -> None:
        moments[moment][what] = moments[moment].get(what, 0) + count * width

    for owner in owners(weights, layout, width):
        every = sum(owner.numels)
        largest = max(owner.numels)
        if owner.stage == 0 and layout.pp > 1:
            for moment in moments:  # before the last micro-batch, gradients are not in buckets
                add(moment, "gradients outside their buckets", every)
        if owner.stage == 1 and owner.ranks > 1:
            add("end", "bucket in flight", largest)  # all ranks' new weights, before they are copied
        if owner.stage == 2:
            if layout.recompute == "full" and layout.pp == 1:  # the first block is as high as the last one
                one = sum(weight.numel for weight in weights if weight.layer == 0 and weight.expert == owner.expert)
                add("block", "gradients not yet reduced", max(0, largest - one))
            if layout.pp > 1:
                for moment in ("loss", "block"):
                    add(moment, "gradients not yet reduced", every)
            arriving = largest - largest // owner.ranks
            add("end", "gradients not yet reduced", largest)
            add("end", "bucket in flight", max(largest, arriving))
        if owner.stage == 3:
            root, *units = owner.numels
            unit = max(units)
            add("loss", "gathered weights", root + unit)
            add("block", "gathered weights", root + 2 * unit)
            matrix = max(weight.numel for weight in weights if weight.layer == 0)
            add("block", "gradients not yet reduced", weights[-1].numel + matrix)
            if layout.recompute == "full":  # then every block is as high as the last one
                add("block", "bucket in flight", 2 * unit - unit // owner.ranks)
            add("end", "gathered weights", root + unit)
            add("end", "gradients not yet reduced", root + unit)
            add("end", "bucket in flight", 2 * root)
    return moments


def peak(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, rank: int = 0) -> Bytes:
    """The most bytes that pipeline rank `rank` has at once in a step, by purpose. The sum is the peak."""
    weights = weights_of(model, moe, layout, rank)
    stays = held(model, moe, layout, rank)
    if layout.precision in AUTOCAST:  # operands of matmuls, until backward
        stays["weights in 16 bits"] = 2 * sum(weight.numel for weight in weights)
    stays["tokens and labels"] = layout.micro_batches * 2 * layout.tokens * 8
    passing = passing_weights(layout, weights)
    if layout.fpdt_chunks:
        tables = {"RoPE tables": layout.seq_len // layout.cp * model.head_dim * 4}
        chunks = fpdt_working_set(model, layout)
        found = [stays | tables | chunks[moment] | passing[moment] for moment in chunks]
        return {what: size for what, size in max(found, key=lambda each: sum(each.values())).items() if size}
    work = working_set(model, moe, layout)
    found = []
    for kept, messages, moment, ends, late in climbs(model, moe, layout, rank):
        now = dict(kept)
        if moment == "block" and ends:  # the loss is done
            for what in ("log-probabilities", "last norm"):
                now[what] -= around(model, layout, False, True)[what]
        now["working set"] = work[moment] if moment != "end" else 0
        now["messages"] = messages
        outside = {what: int(size * late) for what, size in passing[MOMENT.get(moment, moment)].items()}
        found.append(stays | now | outside)
    streams = 2 * layout.outer_tokens * model.hidden * widths(layout.precision).activation
    found.append(stays | {"working set": streams} | passing["end"])
    return {what: size for what, size in max(found, key=lambda each: sum(each.values())).items() if size}


def full_places(model: LlamaConfig, layout: Layout) -> list[int]:
    """Pipeline ranks one of which has the peak: the first, the last, the second, with messages on both sides,
    and the first and last with most layers. Where layers do not divide, the middle stages have one more."""
    layers = [sum(map(len, stage_layers(layout, model.layers, rank))) for rank in range(layout.pp)]
    most = [rank for rank, count in enumerate(layers) if count == max(layers)]
    return sorted({0, min(1, layout.pp - 1), layout.pp - 1, most[0], most[-1]})


MOMENT = {"B": "block", "W": "block"}  # which weights are full at the end of B, and in W
# Activations, bytes of messages, "loss", "block", "B" or "W", is the loss done?, fraction of gradients made
Climb = tuple[Bytes, int, str, bool, float]


def steady(layout: Layout) -> Layout:
    """The same with as few micro-batches as have the same peak: rounds of p micro-batches are alike, except
    the first and the last few. If all forwards come before the backwards, each micro-batch counts."""
    if layout.schedule in ("afab", "breadth-first", "naive"):
        return layout
    rounds = layout.micro_batches // layout.pp
    return replace(layout, micro_batches=layout.micro_batches - max(0, rounds - 4) * layout.pp)


def climbs(model: LlamaConfig, moe: MoEConfig | None, layout: Layout, rank: int) -> Iterable[Climb]:
    """The moments of a step at which activations are most: each start of a backward."""
    if layout.pp == 1:
        kept = activations(model, moe, layout, range(model.layers))
        return [(kept, 0, "loss", False, 1.0), (kept, 0, "block", True, 1.0)]
    layout = steady(layout)
    schedule = schedule_of(layout)
    e = widths(layout.precision).activation
    message = layout.outer_tokens * model.hidden * e
    sizes = [
        activations(model, moe, layout, layers_of(stage, schedule.stages, model.layers))
        for stage in range(schedule.stages)
    ]
    here: Bytes = {}
    sent: dict[int, int] = {}
    done: set[int] = set()  # layers that have gradients already
    numels = [(weight.layer, weight.numel) for weight in weights_of(model, moe, layout, rank)]
    every = sum(numel for _, numel in numels)
    found: list[Climb] = []
    width = widths(layout.precision).weight
    last_layer = model.layers - 1

    def fresh_of(layers: range) -> int:
        return sum(numel for layer, numel in numels if min(max(layer, 0), last_layer) in layers) * width

    def first_of(layers: range) -> int:
        """The output layer's; also the embedding's, where blocks are recomputed and have a W each."""
        ends = set()
        if last_layer in layers:
            ends.add(model.layers)
        if 0 in layers and layout.recompute == "full":
            ends.add(-1)
        return sum(numel for layer, numel in numels if layer in ends) * width

    for item in program_of(layout, rank):
        if not isinstance(item, Action):
            if item.source == rank:  # kept until it is sent, or old enough to be
                sent[item.destination] = min(sent.get(item.destination, 0) + 1, 2 * layout.pp)
            continue
        mine = sizes[item.stage]
        layers = layers_of(item.stage, schedule.stages, model.layers)
        last = item.stage == schedule.stages - 1
        if item.kind == F:
            here = {what: here.get(what, 0) + mine.get(what, 0) for what in here | mine}
        late = sum(numel for layer, numel in numels if min(max(layer, 0), model.layers - 1) in done) / every
        in_flight = (sum(sent.values()) + 2) * message
        if item.kind in (F, B, BW):
            found.append((dict(here), in_flight, "loss" if last else "block", False, late))
        if last and item.kind in (B, BW):
            found.append((dict(here), in_flight, "block", True, late))
        if item.kind in (B, W):
            sign = 1 if item.kind == B else -1
            gone = gone_after_b(model, moe, layout, layers)
            for_weights = sign * kept_for_weights(model, moe, layout, layers)
            if item.kind == W:  # at its start: the first weights' gradients, with nothing freed
                found.append((here | {"gradients not yet added": first_of(layers)}, in_flight, "W", False, late))
            here["gradients for W"] = here.get("gradients for W", 0) + for_weights
            if item.kind == B:  # at its end
                found.append((dict(here), in_flight, "B", False, late))
            here |= {what: here[what] - sign * size for what, size in gone.items()}
        if item.kind in (BW, W):
            here = {what: here[what] - mine.get(what, 0) for what in here}
        if item.kind == W:  # a stage's weight gradients are computed, then all added at once
            found.append((here | {"gradients not yet added": fresh_of(layers)}, in_flight, "W", False, late))
        if item.kind in (BW, W):
            done |= set(layers)
    return found
