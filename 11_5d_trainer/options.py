"""Every option of the trainer, in one dataclass, and the checks that need nothing but the options.

`parse` makes the command line from the dataclass: a field `micro_batch` is the option `--micro-batch`, with the
field's type, default and help. A wrong value raises UsageError, whose text is the one line that the user sees.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import paths  # noqa: F401  finds the chapters below
from accounting import micro_steps
from context_ring import check_layout
from context_ulysses import check_heads, usp_positions
from fpdt_attention import check_sizes as check_chunks
from llama import LlamaConfig
from model import EXPERTS, PRESETS
from moe_layer import VERSIONS as DISPATCHES
from moe_layer import MoEConfig
from ops import AUTOCAST, FP8, LAYOUTS, PRECISIONS
from parallel_block import check_sizes
from routing import ROUTERS
from schedule_simulator import W
from schedules import SCHEDULES, Schedule
from schedules import build as build_schedule

SIZES = ("hidden", "layers", "heads", "kv_heads", "intermediate")  # given by a preset, a file or options
KERNELS = ("auto", "torch", "triton", "cuda")
WIDTHS = ("weights", "fp32")  # of sums of gradients
POSITIVE = ("lr", "bucket_mib", "timeout", "loss_scale")


class UsageError(ValueError):
    """The options cannot be met. One line says which option, which value, and what would be right."""


class NothingLeft(UsageError):
    """A run that is started again has done all its steps already. That is no failure: exit code 0."""


class RunEnds(RuntimeError):
    """The run cannot go on, and all ranks know it. Its text is the one line that the user sees. Exit code 3,
    because restarted ranks would fail in the same way."""


def option(
    default: Any,
    help: str,
    fixed: bool = False,
    choices: tuple | None = None,
    least: int | None = None,
    bare: str | None = None,
) -> Any:
    """A field of Config. `fixed` options define what is trained and may not change when a run is resumed.
    `bare` is the value of an option that is given without one."""
    about = {"help": help, "fixed": fixed, "choices": choices, "least": least, "bare": bare}
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True)
class Config:
    # what is trained
    preset: str = option("tiny", "size of the model", fixed=True, choices=tuple(PRESETS))
    tied: bool = option(False, "share the embedding with the output layer", fixed=True)
    config: str = option("", "config.json of a Hugging Face model, whose sizes to use; replaces --preset", fixed=True)
    hidden: int = option(
        0, "hidden size; this and the next four are those of --preset or --config unless given", fixed=True, least=0
    )
    layers: int = option(0, "blocks", fixed=True, least=0)
    heads: int = option(0, "query heads", fixed=True, least=0)
    kv_heads: int = option(0, "key/value heads, which query heads share", fixed=True, least=0)
    intermediate: int = option(0, "width of the MLP, or of each expert", fixed=True, least=0)
    init: str = option(
        "",
        "folder of a Hugging Face model (hf.py) to start from, or its name on the Hub; replaces --preset",
        fixed=True,
    )
    lora_rank: int = option(
        0, "train adapters of this rank (LoRA) beside --init's linear layers, not its weights; 0: none", True, least=0
    )
    lora_alpha: float = option(16.0, "an adapter counts this / --lora-rank times", fixed=True)
    data: str = option(
        "",
        "text file, folder, .bin of tokens, or what prepare.py wrote; default: Python's standard library. A resumed "
        "run finds it by its contents, wherever it lies now",
    )
    bin_dtype: str = option("uint16", "type of the tokens in a .bin", fixed=True, choices=("uint16", "uint32"))
    tokenizer: str = option("", "tokenizer.json, a folder with one, or a name on the Hub; default: text is bytes")
    vocab_size: int = option(
        0,
        "tokens; needed for a .bin without a meta file. If 0, those of --tokenizer, without one 256",
        fixed=True,
        least=0,
    )
    documents: bool = option(
        False, "no token sees another document (chapter 05), nor learns to predict its beginning", fixed=True
    )
    seq_len: int = option(128, "tokens per sample", fixed=True, least=1)
    seed: int = option(0, "of the first weights and of the order of the samples (default: 0)", fixed=True)
    # how
    steps: int = option(300, "optimizer steps", least=1)
    global_batch: int = option(
        32,
        "samples per step, over all ranks and micro-batches; default: 32, or the next number that the ranks can share",
        fixed=True,
        least=1,
    )
    micro_batch: int = option(
        8, "samples per rank that are in memory at once; default: 8, or fewer if --global-batch is small", least=1
    )
    lr: float = option(
        3e-3, "peak learning rate; default: 0.003 up to a million parameters, less for larger models and with --init"
    )
    warmup: int = option(
        30, "steps until the peak; default: 30, or a tenth of few --steps, or a hundredth of many", least=0
    )
    min_lr: float = option(3e-4, "learning rate at the end of the cosine; default: a tenth of --lr", least=0)
    lr_schedule: str = option(
        "cosine",
        "after the warm-up: half a cosine down to --min-lr, or wsd: constant, and down in the last --decay-steps",
        choices=("cosine", "wsd"),
    )
    decay_steps: int = option(0, "of --lr-schedule wsd; 0: a fifth of the steps", least=0)
    beta1: float = option(0.9, "of AdamW: how much of its mean of gradients it keeps in a step", least=0)
    beta2: float = option(0.95, "of AdamW: the same for their squares", least=0)
    weight_decay: float = option(0.1, "of the matrices; norm weights are not decayed", fixed=True, least=0)
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip", least=0)
    precision: str = option(
        "fp32",
        "of weights and products (chapter 10; ops.py); default: fp32 on a CPU, on a GPU bf16-master, or fp16 "
        "if it has no bf16",
        fixed=True,
        choices=PRECISIONS,
    )
    kernels: str = option(
        "auto",
        "fused kernels (chapter 09); auto: triton on a GPU that has bf16, but torch if compiled or without Triton",
        choices=KERNELS,
    )
    compile: bool = option(False, "torch.compile each block, where nothing in it waits for other ranks")
    loss_scale: float = option(65536.0, "first loss scale of --precision fp16", fixed=True, least=1)
    recompute: str = option("none", "activations to recompute in backward", choices=("none", "selective", "full"))
    bucket_mib: float = option(25.0, "size of a gradient bucket")
    # on which ranks: data parallel is what remains of the world
    zero: int = option(
        0,
        "ZeRO stage: what data-parallel ranks hold in shards (chapter 03); 0: nothing; default: 1 where --precision is "
        "bf16-master, else 0",
        choices=(0, 1, 2, 3),
    )
    zero_shards: int = option(
        0, "ranks that share one copy of the model; as many others share another (HSDP); 0: all share one", least=0
    )
    zero_offload: bool = option(False, "the optimizer, its states and the gradients' sums in host memory (--zero 2, 3)")
    zero_late_gather: bool = option(False, "new weights are gathered during the next forward (--zero 1, 2)")
    reduce_dtype: str = option("weights", "in which ranks sum gradients of --precision bf16-master", choices=WIDTHS)
    accumulate_dtype: str = option("weights", "the same for sums over micro-batches", choices=WIDTHS)
    tp: int = option(1, "tensor-parallel ranks (chapter 04)", least=1)
    sequence_parallel: bool = option(False, "cut activations between the layers over the tensor-parallel ranks too")
    tp_overlap: str = option(
        "none",
        "hide tensor-parallel messages behind matmuls: gradients' in backward, or those of one half of each "
        "micro-batch behind the other half's, both ways (domino)",
        choices=("none", "backward", "domino"),
        bare="backward",
    )
    cp: int = option(1, "context-parallel ranks, which share each sequence (chapter 05)", least=1)
    cp_kind: str = option("zigzag", "how they share it", choices=tuple(LAYOUTS))
    fpdt_chunks: int = option(0, "run blocks in so many chunks, the others on the host (chapter 08); 0: whole", least=0)
    pp: int = option(
        1, "pipeline-parallel ranks (chapter 06); micro-batches per step: global batch / micro-batch / dp", least=1
    )
    schedule: str = option("1f1b", "order of forwards and backwards in the pipeline", choices=tuple(SCHEDULES))
    stages_per_rank: int = option(
        1, "stages that a pipeline rank holds, where the schedule allows more than one", least=1
    )
    experts: int = option(
        0, "experts in each layer (chapter 07); 0: as the preset says, which is mostly none", fixed=True, least=0
    )
    top_k: int = option(2, "experts that a token uses", fixed=True, least=1)
    router: str = option("softmax", "how a token chooses its experts", fixed=True, choices=ROUTERS)
    balance: float = option(0.01, "factor of the loss that balances the experts; 0: none", fixed=True, least=0)
    bias_speed: float = option(
        0.0, "also balance by a bias (router sigmoid): size of its step, say 0.001", fixed=True, least=0
    )
    capacity: float = option(
        0.0, "drop tokens beyond this many times an even load of an expert; 0: never", fixed=True, least=0
    )
    ep: int = option(1, "expert-parallel ranks: a slice of data x context", least=1)
    dispatch: str = option(
        "pairs",
        "how tokens go to their experts; pairs: a row for each expert of a token; once: one for each rank of them; "
        "everywhere: to all ranks; fixed: in slots of fixed shape, so that the host never waits",
        choices=DISPATCHES,
    )
    # what is kept and shown
    out: str = option("", "folder of this run; default: runs/ and the time")
    resume: str = option("", "run folder (its last complete checkpoint) or one checkpoint to continue from")
    restart: bool = option(False, "go on with the run in --out if it has a checkpoint (torchrun --max-restarts)")
    save_every: int = option(100, "steps between checkpoints; 0: only at the end", least=0)
    keep: int = option(2, "complete checkpoints to keep", least=1)
    keep_best: bool = option(
        False, "save after each validation that is the best so far, and keep that checkpoint too; its name is RUN/best"
    )
    evaluate: bool = option(
        False, "validate what --resume or --init names, print its loss, and end; nothing is written"
    )
    eval_every: int = option(50, "steps between validations; 0: only at the start and the end", least=0)
    eval_samples: int = option(256, "validation samples", least=1)
    on_nan: str = option(
        "stop", "what to do when a gradient is not finite (fp16 lowers its scale first)", choices=("stop", "skip")
    )
    meter: bool = option(False, "after the first step print bytes held and sent, beside the chapters' formulas")
    profile: int = option(
        0, "steps to trace, communication and compute together, from the second on (default: none)", least=0
    )
    tensorboard: bool = option(False, "write the log for TensorBoard too")
    wandb: str = option("", "project of Weights & Biases to send the log to (default: none)")
    show_mesh: bool = option(False, "print who sits where and which groups exist, and end")
    sample: int = option(300, "tokens to generate at the end", least=0)
    device: str = option("auto", "where to train: auto, cpu or cuda; auto: on GPUs if there are any")
    timeout: float = option(300.0, "seconds after which a collective that waits for a stuck rank fails")

    def __post_init__(self) -> None:
        if isinstance(self.tp_overlap, bool):  # in checkpoints from when it was a flag
            object.__setattr__(self, "tp_overlap", "backward" if self.tp_overlap else "none")

    def check(self) -> None:
        """Raise UsageError for a value that is wrong whatever the others are."""
        for field in dataclasses.fields(self):
            least = field.metadata["least"]
            value = getattr(self, field.name)
            if least is not None and not (value >= least):  # also for NaN
                raise UsageError(f"{flag(field.name)} {value} must {'be at least 1' if least else 'not be negative'}")
            if isinstance(value, float) and not math.isfinite(value) and field.name not in POSITIVE:
                raise UsageError(f"{flag(field.name)} {value} must be a finite number")
        for name in POSITIVE:
            if not (0 < getattr(self, name) < float("inf")):
                raise UsageError(f"{flag(name)} {getattr(self, name)} must be a positive number")
        if self.timeout < 1:
            raise UsageError(
                f"--timeout {self.timeout} must be at least 1: in less, ranks do not even find one another"
            )
        for name, most in (("seed", 2**40), ("bucket_mib", 2**20), ("timeout", 1e7)):
            value = getattr(self, name)
            if abs(value) > most:
                bound = f"at most {most:,.0f}" if value > 0 else f"at least {-most:,.0f}"
                raise UsageError(f"{flag(name)} {value} must be {bound}")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise UsageError(f"{flag(name)} {getattr(self, name)} must be less than 1")
        if self.warmup + self.decay_steps > self.steps and self.decay_steps:
            what = f"--warmup {self.warmup} and --decay-steps {self.decay_steps} are more than --steps {self.steps}"
            raise UsageError(f"{what}; use fewer")
        if self.warmup > self.steps:
            raise UsageError(f"--warmup {self.warmup} is more than --steps {self.steps}; use at most {self.steps}")
        if self.min_lr > self.lr:
            raise UsageError(f"--min-lr {self.min_lr:g} is more than --lr {self.lr:g}; use at most that")

    def check_heard(self, given: dict[str, Any], sizes: LlamaConfig) -> None:
        """Raise UsageError for these options where they are given and would have no effect."""
        no_experts = self.mixture(sizes) is None
        without_effect = {
            ("lora_alpha",): (not self.lora_rank, "there are no adapters; add --lora-rank 8"),
            ("top_k", "router", "bias_speed", "capacity"): (no_experts, "there are no experts; add --experts 8"),
            ("schedule", "stages_per_rank"): (self.pp == 1, "there is no pipeline; add --pp 2"),
            ("decay_steps",): (self.lr_schedule != "wsd", "a cosine decays from the warm-up on; add --lr-schedule wsd"),
            ("cp_kind",): (self.cp == 1, "each rank has whole sequences; add --cp 2"),
        }
        for names, (unused, why) in without_effect.items():
            for name in names:
                if unused and given.get(name, usual := getattr(Config, name)) != usual:
                    raise UsageError(f"{flag(name)} {given[name]}: {why}, or leave it out")

    def dp(self, world_size: int) -> int:
        """Data-parallel ranks: what remains of the world."""
        taken = self.pp * self.tp * self.cp
        if world_size % taken:
            fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise UsageError(
                f"--pp {self.pp} x --tp {self.tp} x --cp {self.cp} does not divide the {world_size} ranks of this run; "
                f"the product may be {', '.join(map(str, fits))}"
            )
        return world_size // taken

    def layout(self, sizes: LlamaConfig, world_size: int) -> tuple[dict[str, int], int, bool, bool, int]:
        """What mesh.py needs: sizes of the axes, expert-parallel ranks, two directions?, tensor ranks' own tokens?, and
        the ranks that share one copy of the model."""
        ring, all_to_all = self.ring_and_ulysses(sizes)
        axes = {"pp": self.pp, "dp": self.dp(world_size), "ring": ring, "ulysses": all_to_all, "tp": self.tp}
        return axes, self.ep, self.mirrored(sizes, world_size), self.sequence_parallel, self.zero_shards

    def mirrored(self, sizes: LlamaConfig, world_size: int) -> bool:
        """Whether each stage is on two ranks: pipelines in both directions."""
        schedule = self.pipeline(world_size, sizes.layers)
        return schedule is not None and len(schedule.placement) == 2

    def pipeline(self, world_size: int, layers: int) -> Schedule | None:
        """The schedule of the pipeline, checked; None without one."""
        if self.pp == 1:
            return None
        micro_batches = self.accumulation(self.dp(world_size))
        where = f"--pp {self.pp} --schedule {self.schedule} --stages-per-rank {self.stages_per_rank}"
        try:
            schedule = build_schedule(self.schedule, self.pp, micro_batches, self.stages_per_rank)
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
        if schedule.stages > layers:
            raise UsageError(f"{where}: {layers} layers are too few for {schedule.stages} stages; use fewer stages")
        return schedule

    def mixture(self, sizes: LlamaConfig) -> MoEConfig | None:
        """The mixture of experts in each block; None for a dense model."""
        experts, top_k = (self.experts, self.top_k) if self.experts else EXPERTS.get(self.preset, (0, 0))
        if not experts:
            return None
        return MoEConfig(
            hidden=sizes.hidden,
            intermediate=sizes.intermediate,
            experts=experts,
            top_k=top_k,
            router=self.router,
            balance=self.balance,
            bias_speed=self.bias_speed,
            capacity=self.capacity or None,
        )

    def ring_and_ulysses(self, sizes: LlamaConfig) -> tuple[int, int]:
        """The context axis as ring x ulysses."""
        if self.cp_kind == "ulysses" or self.fpdt_chunks:
            return 1, self.cp
        if self.cp_kind != "usp":
            return self.cp, 1
        # As many ranks of Ulysses as a tensor-parallel rank's heads allow, but fewer than cp; the ring takes the rest.
        heads = sizes.heads // self.tp
        all_to_all = max(n for n in range(1, max(2, self.cp)) if self.cp % n == 0 and heads % n == 0)
        return self.cp // all_to_all, all_to_all

    def check_layout(self, sizes: LlamaConfig, world_size: int) -> None:
        """Raise UsageError unless model and batch can be split as asked, by the chapters' own checks."""
        self.accumulation(self.dp(world_size))
        self.pipeline(world_size, sizes.layers)
        if self.zero == 3 and self.pp > 1:
            raise UsageError(
                "--zero 3 with --pp: a layer would be gathered again for each micro-batch in flight; use --zero 1 or 2"
            )
        self.check_documents()
        self.check_lora(sizes)
        self.check_experts(sizes, self.dp(world_size) * self.cp)
        self.check_fpdt(sizes)
        if self.precision == "bf16-master" and self.zero == 0:
            raise UsageError("--precision bf16-master keeps the fp32 weights in ZeRO's shards; use --zero 1, 2 or 3")
        self.check_zero(self.dp(world_size) * self.cp * (1 + self.mirrored(sizes, world_size)))
        self.check_overlap(sizes, world_size)
        ring, all_to_all = self.ring_and_ulysses(sizes)
        try:
            check_sizes(sizes, self.tp, self.seq_len // self.cp if self.sequence_parallel else 0)
        except ValueError as error:
            raise UsageError(f"--tp {self.tp}: {error}") from None
        try:
            if self.cp > 1:  # one rank may have any number of tokens
                check_layout(LAYOUTS[self.cp_kind], self.seq_len, ring)
            if all_to_all > 1:
                check_heads(sizes.heads // self.tp, all_to_all)
                usp_positions(LAYOUTS[self.cp_kind], self.seq_len, 0, ring, 0, all_to_all)
        except ValueError as error:
            raise UsageError(f"--cp {self.cp} --cp-kind {self.cp_kind}: {error}") from None
        if self.sequence_parallel and self.tp == 1:
            raise UsageError("--sequence-parallel cuts over tensor-parallel ranks, and --tp is 1; use --tp 2 or more")

    def check_documents(self) -> None:
        others = {
            "--pp": (self.pp > 1, "stages do not pass on where documents begin"),
            "--cp-kind usp": (self.cp > 1 and self.cp_kind == "usp", "use ring, zigzag, allgather or ulysses"),
            "--fpdt-chunks": (self.fpdt_chunks, "a chunk sees all chunks before it"),
            "--tp-overlap domino": (self.tp_overlap == "domino", "its halves are not the samples of a micro-batch"),
            "--kernels cuda": (self.kernels == "cuda", "its attention takes whole tiles; use --kernels triton"),
            "--compile": (self.compile, "each sample has borders of its own"),
        }
        for other, (wanted, why) in others.items():
            if self.documents and wanted:
                raise UsageError(f"--documents cannot go with {other}: {why}; leave one of them out")

    def check_lora(self, sizes: LlamaConfig) -> None:
        if not self.lora_rank:
            return
        where = f"--lora-rank {self.lora_rank}"
        if not (self.init or self.resume):
            raise UsageError(f"{where} adapts a model that is there; add --init FOLDER")
        if not (0 < self.lora_alpha < float("inf")):
            raise UsageError(f"--lora-alpha {self.lora_alpha} must be a positive number")
        layers = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.intermediate, sizes.hidden)
        if self.lora_rank > min(layers):
            raise UsageError(f"{where} is more than the {min(layers)} of a linear layer's side; use at most that")
        others = {
            "--experts": (self.mixture(sizes), "an expert is no linear layer here"),
            f"--tp-overlap {self.tp_overlap}": (self.tp_overlap != "none", "it takes the products of a layer apart"),
            f"--fpdt-chunks {self.fpdt_chunks}": (self.fpdt_chunks, "it runs the backward of a whole block itself"),
            f"--precision {self.precision}": (self.precision in FP8, "an adapter has no fp8 products"),
            "--kernels cuda": (self.kernels == "cuda", "an adapter has no CUDA products"),
            "--compile": (self.compile, "its blocks have frozen weights"),
            "--meter": (self.meter, "its formulas count what is trained of a whole model"),
        }
        for other, (wanted, why) in others.items():
            if wanted:
                raise UsageError(f"{where} cannot go with {other}: {why}; leave one of them out")

    def check_overlap(self, sizes: LlamaConfig, world_size: int) -> None:
        if self.tp_overlap == "none":
            return
        if self.tp == 1:
            raise UsageError("--tp-overlap hides what tensor-parallel ranks send, and --tp is 1; use --tp 2 or more")
        if self.precision in FP8 or self.precision == "fp16":
            what = f"--tp-overlap takes the products of a layer apart, and --precision {self.precision}"
            raise UsageError(f"{what} has products of its own; use bf16, or leave it out")
        if self.tp_overlap == "backward":
            return
        schedule = self.pipeline(world_size, sizes.layers)
        splits = schedule and any(action.kind == W for actions in schedule.actions for action in actions)
        others = {
            "--micro-batch 1": (self.micro_batch == 1, "one row has no halves"),
            "--experts": (self.mixture(sizes), "they send in the middle of what the halves take for products"),
            "--recompute full": (self.recompute == "full", "backward comes in pieces; each would run a block again"),
            "--zero-late-gather": (self.zero_late_gather, "halves ask for the weights of all blocks when they begin"),
            f"--schedule {self.schedule}": (splits, "it splits the backward of blocks, which halves run as one"),
        }
        for other, (wanted, why) in others.items():
            if wanted:
                raise UsageError(f"--tp-overlap domino cannot go with {other}: {why}; use --tp-overlap backward")

    def check_zero(self, ranks: int) -> None:
        """The variants of ZeRO; `ranks` hold the same weights."""
        stages: dict[str, tuple[int, tuple[int, ...]]] = {
            "--zero-offload": (self.zero_offload, (2, 3)),
            "--zero-late-gather": (self.zero_late_gather, (1, 2)),
            f"--zero-shards {self.zero_shards}": (self.zero_shards, (1, 2, 3)),
        }
        wanted = [name for name, (asked, _) in stages.items() if asked]
        for name in wanted:
            fits = stages[name][1]
            if self.zero not in fits:
                use = f"{', '.join(map(str, fits[:-1]))} or {fits[-1]}"
                raise UsageError(f"{name} is a variant of ZeRO's stages {use}; use one of them, not --zero {self.zero}")
        if len(wanted) > 1:
            raise UsageError(f"{wanted[0]} cannot go with {wanted[1]}: each is a ZeRO of its own; use one of them")
        if self.zero_shards and ranks % self.zero_shards:
            fits_too = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise UsageError(
                f"--zero-shards {self.zero_shards} does not divide the {ranks} ranks that hold the same weights; "
                f"use {fits_too}"
            )
        if self.zero_shards and self.ep > 1:
            raise UsageError(
                f"--zero-shards {self.zero_shards} cannot go with --ep {self.ep}: experts lie across its copies; "
                "leave one of them out"
            )
        for name in ("reduce_dtype", "accumulate_dtype"):
            if getattr(self, name) == "fp32" and self.precision != "bf16-master":
                what = f"{flag(name)} fp32: gradients of --precision {self.precision} are that wide already"
                raise UsageError(f"{what}; leave it out, or use --precision bf16-master")
        if self.accumulate_dtype == "fp32" and self.pp > 1:
            raise UsageError(
                "--accumulate-dtype fp32 cannot go with --pp: a pipeline sums its micro-batches before ZeRO sees them; "
                "leave it out"
            )

    def check_fpdt(self, sizes: LlamaConfig) -> None:
        if not self.fpdt_chunks:
            return
        where = f"--fpdt-chunks {self.fpdt_chunks}"
        if self.cp > 1 and self.cp_kind != "ulysses":
            raise UsageError(f"{where} exchanges heads as Ulysses does; use --cp-kind ulysses, not {self.cp_kind}")
        others = {"--tp": self.tp > 1, "--experts": self.mixture(sizes), "--pp": self.pp > 1}
        others |= {f"--recompute {self.recompute}": self.recompute != "none"}
        others |= {f"--precision {self.precision}": self.precision in AUTOCAST}
        for other, wanted in others.items():
            if wanted:
                raise UsageError(f"{where} cannot go with {other}: it runs the backward of a whole dense block itself")
        try:
            check_chunks(self.seq_len, self.cp, self.fpdt_chunks, sizes.heads)
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
        if self.seq_len // self.cp // self.fpdt_chunks % 2:
            raise UsageError(
                f"{where}: a chunk of a rank has {self.seq_len // self.cp // self.fpdt_chunks} tokens; must be even"
            )

    def check_experts(self, sizes: LlamaConfig, ranks: int) -> None:
        """`ranks` see different tokens: data x context."""
        moe = self.mixture(sizes)
        if moe is None:
            if self.ep > 1:
                raise UsageError(f"--ep {self.ep}: there are no experts to share out; add --experts 8, or leave it out")
            if self.dispatch != "pairs":
                raise UsageError(f"--dispatch {self.dispatch}: there are no experts; add --experts 8, or leave it out")
            return
        products = {f"--precision {p}": p for p in (*FP8, "fp16")} | {"--kernels cuda": "cuda"}
        for other, value in products.items():
            if self.dispatch == "fixed" and value in (self.precision, self.kernels):
                what = f"--dispatch fixed multiplies all experts at once, and {other}"
                raise UsageError(f"{what} has products of its own; use another --dispatch, or leave that out")
        if ranks % self.ep:
            fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise UsageError(f"--ep {self.ep} does not divide the {ranks} ranks of data x context; use {fits}")
        try:
            moe.check(self.ep)
        except ValueError as error:
            raise UsageError(f"--experts {moe.experts} --top-k {moe.top_k} --ep {self.ep}: {error}") from None

    def accumulation(self, dp: int) -> int:
        """Micro-batches per rank and step: global batch = micro-batch x accumulation x dp."""
        try:
            return micro_steps(self.global_batch, self.micro_batch, dp)
        except ValueError as error:
            raise UsageError(f"--global-batch and --micro-batch: {error}") from None


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# ------------------------------------------------------------------------------- a new run: what was not asked for


def fresh(given: dict[str, Any]) -> Config:
    """The options of a new run, with the defaults that follow from other options."""
    config = Config(**given)
    more: dict[str, Any] = {}
    if "warmup" not in given and config.steps > 0:
        more["warmup"] = max(1, min(30, config.steps // 10), config.steps // 100)
    if "min_lr" not in given and config.lr > 0:
        more["min_lr"] = tenth(config.lr)
    if "zero" not in given and config.precision == "bf16-master":
        more["zero"] = 1
    return dataclasses.replace(config, **more)


def settle(
    config: Config, given: dict[str, Any], parameters: int, world_size: int, bf16: bool | None
) -> tuple[Config, list[str]]:
    """The same with defaults that follow from the model, the ranks and the device; and messages for the user.

    `bf16`: whether the GPUs compute in it; None on a CPU.
    """
    more: dict[str, Any] = {}
    said = []
    if "lr" not in given and (rate := learning_rate_for(parameters, bool(config.init))) != config.lr:
        more["lr"] = rate
        said.append(f"--lr {rate:g}, as for {parameters:,} parameters{' that were trained before' * bool(config.init)}")
        if "min_lr" not in given:
            more["min_lr"] = tenth(rate)
    if "precision" not in given and bf16 is not None:
        more["precision"] = precision_for(config, given, bf16)
        if more["precision"] == "bf16-master" and not config.zero:
            more["zero"] = 1
        said.append(
            f"--precision {more['precision']} --zero {more.get('zero', config.zero)}, as on a GPU with"
            f"{'' if bf16 else 'out'} bf16"
        )
    dp = config.dp(world_size)
    at_once = config.micro_batch * dp
    if "global_batch" not in given and config.global_batch % at_once:
        more["global_batch"] = -(-config.global_batch // at_once) * at_once
        said.append(
            f"--global-batch {more['global_batch']} and not {config.global_batch}: a multiple of {config.micro_batch} "
            f"samples on each of {dp} data-parallel ranks"
        )
    elif "micro_batch" not in given and config.global_batch % at_once and config.global_batch % dp == 0:
        each = config.global_batch // dp
        more["micro_batch"] = max(size for size in range(1, config.micro_batch + 1) if each % size == 0)
        said.append(
            f"--micro-batch {more['micro_batch']} and not {config.micro_batch}: a divisor of a rank's {each} samples"
        )
    return dataclasses.replace(config, **more), said


def learning_rate_for(parameters: int, trained: bool) -> float:
    """The peak for a model of this size; a tenth of it for one that was trained before.

    It falls with the fourth root of the parameters, from 0.003 at a million: 2401.02954 fits that it falls with the
    eighth root of the FLOPs, which grow with the square of the parameters. 8 billion get 0.00032; Llama 3 took 0.0003.
    """
    rate = float(f"{3e-3 * min(1.0, (1e6 / parameters) ** 0.25):.2g}")
    return tenth(rate) if trained else rate


def tenth(rate: float) -> float:
    return float(f"{rate / 10:.4g}")


def precision_for(config: Config, given: dict[str, Any], bf16: bool) -> str:
    """The default precision on a GPU. Some options cannot go with autocast or with scaled losses."""
    if bf16 and given.get("zero") != 0:
        return "bf16-master"
    if config.fpdt_chunks or (not bf16 and (config.tp_overlap != "none" or config.dispatch == "fixed")):
        return "fp32"
    return "bf16" if bf16 else "fp16"


GROUPS = {  # of `--help`, by their first option
    "preset": "what is trained",
    "steps": "how",
    "zero": "on which ranks: data parallel is what remains of the world",
    "out": "what is kept and shown",
}


class OneLineParser(argparse.ArgumentParser):
    """Its errors are one line and exit code 2; argparse would print the whole usage as well."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":  # once, and not by every rank
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the options")


def parse(arguments: list[str]) -> dict[str, Any]:
    """The options that are on the command line, and no others: a resumed run takes the rest from its checkpoint."""
    parser = _Parser(
        "train.py",
        usage="torchrun --nproc_per_node RANKS 11_5d_trainer/train.py [options]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        description="Train a Llama, or a mixture of experts. Without options: a tiny one, data parallel, on the source "
        "of Python's standard library.",
    )
    group: Any = parser
    for field in dataclasses.fields(Config):
        about = field.metadata
        said = not field.default or "default:" in about["help"]  # the help says what 0 or nothing means
        help = about["help"] if said else f"{about['help']} (default: {field.default})"
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        if field.type is bool:
            both = argparse.BooleanOptionalAction  # --no-...: a resumed run may turn it off
            group.add_argument(flag(field.name), action=both, help=help)
        else:
            values = {"nargs": "?", "const": about["bare"]} if about["bare"] else {}
            group.add_argument(flag(field.name), type=field.type, choices=about["choices"], help=help, **values)
    parser.add_argument(
        "--options",
        metavar="FILE",
        help="options from a .toml (examples/) or from a run's config.json; those on the command line win",
    )
    found = vars(parser.parse_args(arguments))
    file = found.pop("options", None)
    return (from_file(parser, file) if file else {}) | found


OF_ONE_RUN = ("out", "resume", "restart", "evaluate", "show_mesh")  # not taken from another run's config.json
OF_THE_MODEL = ("preset", "config", "init", *SIZES, "tied", "experts", "top_k")  # by default, as others say
KINDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}


def from_file(parser: argparse.ArgumentParser, name: str) -> dict[str, Any]:
    """The options in a file, checked as if they stood on the command line.

    A run's config.json has all options, also those left at their defaults. Raises UsageError.
    """
    path = Path(name)
    here = f"--options {name}"
    words = []
    try:
        stored = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
        if not isinstance(stored, dict):
            raise ValueError("no table of options")
    except OSError as error:
        raise UsageError(f"{here} cannot be read ({os.strerror(error.errno or 0)})") from None
    except ValueError as error:
        raise UsageError(f"{here} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    fields = {field.name: field for field in dataclasses.fields(Config)}
    for key, value in stored.items():
        option_name = key.replace("-", "_")
        if isinstance(value, dict):
            raise UsageError(f"{here}: {key} is a table; options stand without one")
        if option_name not in fields:
            nearest = difflib.get_close_matches(option_name, fields, 1, 0)[0]
            raise UsageError(f"{here}: there is no option {key}; the nearest name is {nearest}")
        field = fields[option_name]
        own = option_name in OF_ONE_RUN or (option_name in OF_THE_MODEL and value == field.default)
        if path.suffix == ".json" and own:
            continue
        kind: Any = field.type
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        if not fits:
            raise UsageError(f"{here}: {key} = {value!r} must be {KINDS[kind]}")
        if kind is bool:
            words.append(flag(option_name if value else f"no_{option_name}"))
        else:
            words.append(f"{flag(option_name)}={value}")
    try:
        return vars(parser.parse_args(words))
    except UsageError as error:
        raise UsageError(f"{here}: {str(error).removesuffix('; --help lists the options')}") from None


def merge(stored: dict[str, Any], given: dict[str, Any], where: str) -> Config:
    """The options of a resumed run: as stored in the checkpoint `where`, except for those given now.

    Raises UsageError if a given option would make it another run.
    """
    if "out" in given:
        raise UsageError(f"--out {given['out']} cannot go with --resume: a resumed run goes on in its own folder")
    for field in dataclasses.fields(Config):
        name = field.name
        old = stored.get(name, field.default)
        new = given.get(name)  # a run may be older than an option
        fixed = field.metadata["fixed"] or (name == "tokenizer" and not old)  # bytes stay bytes
        if fixed and name in given and new != old:
            raise UsageError(f"{flag(name)} {new} does not fit {where}, which was trained with {old}; leave it out")
    return Config(**(stored | {"out": "", "restart": False} | given))


def check_folder(out: str, restart: bool = False) -> None:
    """Raise UsageError unless a new run can be written to `out`; `restart` may write over one without checkpoints."""
    folder = Path(out)
    if not restart and ((folder / "log.jsonl").exists() or (folder / "checkpoints").exists()):
        raise UsageError(f"--out {out} holds a run already; use --resume {out}, or another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written to ({os.strerror(error.errno or 0)})") from None
