"""Every option of the trainer, in one dataclass, and the checks that need nothing but the options.

`parse` makes the command line from the dataclass: a field `micro_batch` is the option `--micro-batch`, with the
field's type, default and help. A wrong value raises UsageError, whose text is the one line that the user sees.
"""

import argparse
import dataclasses
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import chapters  # noqa: F401  finds the chapters below
from accounting import micro_steps
from llama import LlamaConfig
from model import LAYOUTS, PRESETS
from parallel_block import check_sizes
from ring_attention import check_layout
from ulysses import check_heads, usp_positions


class UsageError(ValueError):
    """What the user asked for cannot be done; says in one line which option, which value, and what would be right."""


def option(default: Any, help: str, fixed: bool = False, choices: tuple | None = None) -> Any:
    """A field of Config. `fixed` options define what is being trained and may not change when a run is resumed."""
    return dataclasses.field(default=default, metadata={"help": help, "fixed": fixed, "choices": choices})


@dataclass(frozen=True)
class Config:
    # what is trained
    preset: str = option("tiny", "size of the model", fixed=True, choices=tuple(PRESETS))
    tied: bool = option(False, "share the embedding with the output layer", fixed=True)
    data: str = option("", "text file, folder, or .bin of tokens; default: Python's standard library", fixed=True)
    bin_dtype: str = option("uint16", "type of the tokens in a .bin", fixed=True, choices=("uint16", "uint32"))
    vocab_size: int = option(0, "needed for a .bin; text is read as bytes, 256", fixed=True)
    seq_len: int = option(128, "tokens per sample", fixed=True)
    seed: int = option(0, "of the first weights and of the order of the samples", fixed=True)
    # how
    steps: int = option(300, "optimizer steps")
    global_batch: int = option(32, "samples per step, over all ranks and micro-batches", fixed=True)
    micro_batch: int = option(8, "samples per rank that are in memory at once")
    lr: float = option(3e-3, "peak learning rate")
    warmup: int = option(30, "steps until the peak")
    min_lr: float = option(3e-4, "learning rate at the end of the cosine")
    weight_decay: float = option(0.1, "of the matrices; norm weights are not decayed", fixed=True)
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    precision: str = option("fp32", "of the forward and backward pass", fixed=True, choices=("fp32", "bf16", "fp64"))
    recompute: str = option("none", "activations to recompute in backward", choices=("none", "selective", "full"))
    bucket_mib: float = option(25.0, "size of a gradient bucket")
    # on which ranks: data parallel is what remains of the world
    zero: int = option(0, "ZeRO stage: what data-parallel ranks hold in shards (chapter 03)", choices=(0, 1, 2, 3))
    tp: int = option(1, "tensor-parallel ranks (chapter 04)")
    sequence_parallel: bool = option(False, "cut activations between the layers over the tensor-parallel ranks too")
    cp: int = option(1, "context-parallel ranks, which share each sequence (chapter 05)")
    cp_kind: str = option("zigzag", "how they share it", choices=tuple(LAYOUTS))
    # what is kept and shown
    out: str = option("", "folder of this run; default: runs/ and the time")
    resume: str = option("", "run folder (its last complete checkpoint) or one checkpoint to continue from")
    save_every: int = option(100, "steps between checkpoints; 0: only at the end")
    keep: int = option(2, "complete checkpoints to keep")
    eval_every: int = option(50, "steps between validations; 0: only at the start and the end")
    eval_samples: int = option(256, "validation samples")
    sample: int = option(300, "tokens to generate at the end")
    device: str = option("auto", "where to train", choices=("auto", "cpu", "cuda"))
    timeout: float = option(300.0, "seconds after which a collective that waits for a stuck rank fails")

    def check(self) -> None:
        """Raise UsageError for a value that is wrong whatever the others are."""
        for name in ("seq_len", "steps", "global_batch", "micro_batch", "keep", "eval_samples", "tp", "cp"):
            if getattr(self, name) < 1:
                raise UsageError(f"{flag(name)} {getattr(self, name)} must be at least 1")
        for name in ("vocab_size", "warmup", "save_every", "eval_every", "sample", "clip", "weight_decay", "min_lr"):
            if not (getattr(self, name) >= 0):
                raise UsageError(f"{flag(name)} {getattr(self, name)} must not be negative")
        for name in ("lr", "bucket_mib", "timeout"):
            if not (0 < getattr(self, name) < float("inf")):
                raise UsageError(f"{flag(name)} {getattr(self, name)} must be a positive number")
        if self.warmup > self.steps:
            raise UsageError(f"--warmup {self.warmup} is more than --steps {self.steps}; use at most {self.steps}")
        if self.min_lr > self.lr:
            raise UsageError(f"--min-lr {self.min_lr:g} is more than --lr {self.lr:g}; use at most that")

    def dp(self, world_size: int) -> int:
        """Data-parallel ranks: what remains of the world."""
        if world_size % (self.tp * self.cp):
            fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise UsageError(
                f"--tp {self.tp} x --cp {self.cp} does not divide the {world_size} ranks of this run; "
                f"the product may be {', '.join(map(str, fits))}"
            )
        return world_size // (self.tp * self.cp)

    def ring_and_ulysses(self, sizes: LlamaConfig) -> tuple[int, int]:
        """The context axis as ring x ulysses."""
        if self.cp_kind == "ulysses":
            return 1, self.cp
        if self.cp_kind != "usp":
            return self.cp, 1
        # As many ranks of Ulysses as the heads of a tensor-parallel rank allow; the ring takes the rest.
        heads = sizes.heads // self.tp
        all_to_all = max(n for n in range(1, max(2, self.cp)) if self.cp % n == 0 and heads % n == 0)
        return self.cp // all_to_all, all_to_all

    def check_layout(self, sizes: LlamaConfig, world_size: int) -> None:
        """Raise UsageError unless the model and the batch can be cut as asked: the chapters' own checks."""
        self.accumulation(self.dp(world_size))
        ring, all_to_all = self.ring_and_ulysses(sizes)
        try:
            check_sizes(sizes, self.tp, self.seq_len // self.cp if self.sequence_parallel else 0)
        except ValueError as error:
            raise UsageError(f"--tp {self.tp}: {error}") from None
        try:
            check_layout(LAYOUTS[self.cp_kind], self.seq_len, ring)
            if all_to_all > 1:
                check_heads(sizes.heads // self.tp, all_to_all)
                usp_positions(LAYOUTS[self.cp_kind], self.seq_len, 0, ring, 0, all_to_all)
        except ValueError as error:
            raise UsageError(f"--cp {self.cp} --cp-kind {self.cp_kind}: {error}") from None
        if self.sequence_parallel and self.tp == 1:
            raise UsageError("--sequence-parallel cuts over tensor-parallel ranks, and --tp is 1; use --tp 2 or more")

    def accumulation(self, dp: int) -> int:
        """Micro-batches per rank and step: global batch = micro-batch x accumulation x dp."""
        try:
            return micro_steps(self.global_batch, self.micro_batch, dp)
        except ValueError as error:
            raise UsageError(f"--global-batch and --micro-batch: {error}") from None


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would print the whole usage as well
        raise UsageError(f"{message}; --help lists the options")


def parse(arguments: list[str]) -> dict[str, Any]:
    """The options that are on the command line, and no others: a resumed run takes the rest from its checkpoint."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = _Parser("train.py", formatter_class=formatter, allow_abbrev=False, description="Train a Llama.")
    for field in dataclasses.fields(Config):
        about = field.metadata
        help = f"{about['help']} (default: {field.default!r})"
        if field.type is bool:
            parser.add_argument(flag(field.name), action="store_true", default=argparse.SUPPRESS, help=about["help"])
        else:
            kind: Any = field.type
            choices, default = about["choices"], argparse.SUPPRESS
            parser.add_argument(flag(field.name), type=kind, choices=choices, default=default, help=help)
    return vars(parser.parse_args(arguments))


def merge(stored: dict[str, Any], given: dict[str, Any], where: str) -> Config:
    """The options of a resumed run: as stored in the checkpoint `where`, except for those given now.

    Raises UsageError if a given option would make it another run.
    """
    if "out" in given:
        raise UsageError(f"--out {given['out']} cannot go with --resume: a resumed run goes on in its own folder")
    for field in dataclasses.fields(Config):
        name = field.name
        if field.metadata["fixed"] and name in given and given[name] != stored[name]:
            old, new = stored[name], given[name]
            raise UsageError(f"{flag(name)} {new} does not fit {where}, which was trained with {old}; leave it out")
    return Config(**(stored | {"out": ""} | given))


def check_folder(out: str) -> None:
    """Raise UsageError unless a new run can be written to `out`."""
    folder = Path(out)
    if (folder / "log.jsonl").exists() or (folder / "checkpoints").exists():
        raise UsageError(f"--out {out} holds a run already; use --resume {out}, or another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written to ({os.strerror(error.errno or 0)})") from None
