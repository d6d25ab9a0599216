"""Where the memory went: bytes per parameter and rank, by formula as in the ZeRO paper, and in a model that trains.

Problem. A model of 7.5 billion parameters has weights of 15 GB in 16-bit numbers, and does not train on a device with
80 GB. Data parallelism adds devices but not room: each of them holds everything once more.

Idea. Count first. Mixed-precision training with Adam keeps for each parameter (1910.02054, section 3.1):

    2 bytes   weight, 16 bits      \\
    2 bytes   gradient, 16 bits     |  16 bytes: 7.5B parameters take 120 GB.
    4 bytes   master weight, fp32   |  The last three are the optimizer's: K = 12. They are used once per step, on one
    4 bytes   momentum, fp32        |  element at a time, so one rank's copy of each element would do.
    4 bytes   variance, fp32       /

    | weights | gradients | master weights, momentum, variance |      one rank of data parallelism
    |   2     |     2     |                 12                 |
                                 ^ stage 1 divides this by N
                    ^ stage 2 this too
         ^ stage 3 this too: 16/N bytes in all, and any model fits, given enough ranks

Formulas (1910.02054, figure 1; sections 5.1 to 5.3 for the bytes held, 7.1 and 7.2 for the bytes sent):
    stage                 0                   1                   2                  3
    held, per parameter   2 + 2 + K           2 + 2 + K/N         2 + (2 + K)/N      (2 + 2 + K)/N
    sent, per step        2 G (N-1)/N         2 G (N-1)/N         2 G (N-1)/N        3 G (N-1)/N
for gradients, and weights, of G bytes. Stage 3 sends (N-1)/N G_kept less when it keeps weights of G_kept bytes from
forward to backward instead of gathering them twice. The rest of a device is for activations and buffers: zero_r.py.

This file also has what the other scripts of the chapter share: a small decoder, its text, and a counter of bytes.

Run it:
    python zero_memory.py                                    the paper's tables; stages 0 to 3 on one rank
    torchrun --nproc_per_node 4 zero_memory.py               the same, measured on 4 ranks (gloo on CPU, nccl on GPU)
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Legend of shapes: B batch, S sequence, H hidden, D head dim, V vocab. N is the number of ranks everywhere else.
IGNORE = -100  # a label that is no target
STAGES = (0, 1, 2, 3)
GB = 1e9  # the paper's gigabyte
MicroBatch = tuple[Tensor, Tensor]  # tokens and labels, both [B, S]

# ------------------------------------------------------------------------------------------------------- the formulas


def bytes_per_parameter(stage: int, ranks: int, k: int = 12, weight: int = 2, gradient: int = 2) -> float:
    """Bytes of weights, gradients and optimizer states on a rank, per parameter of the model.

    `k` bytes of optimizer state per parameter; plain fp32 training with Adam is k=8, weight=4, gradient=4.
    Raises ValueError for a stage that does not exist. 1910.02054, figure 1.
    """
    if stage not in STAGES:
        raise ValueError(f"stage {stage} does not exist; use 0, 1, 2 or 3")
    # --- exercise 3.21: what does each stage divide by the number of ranks? ---
    weights = weight / ranks if stage >= 3 else weight
    gradients = gradient / ranks if stage >= 2 else gradient
    states = k / ranks if stage >= 1 else k
    return weights + gradients + states
    # --- end exercise ---


def largest_model(memory: float, stage: int, ranks: int) -> float:
    """Number of parameters with which a rank's weights, gradients and states fill `memory` bytes.

    Nothing is left for activations: an upper limit (1910.02054, table 2, where a device has 32 GB).
    """
    # --- exercise 3.22: the same formula, solved for the model ---
    return memory / bytes_per_parameter(stage, ranks)
    # --- end exercise ---


def bytes_sent(stage: int, ranks: int, gradients: int, kept: int = 0, micro_batches: int = 1) -> float:
    """Bytes each rank puts on the wire per step, for gradients (and weights) of `gradients` bytes.

    From stage 2 on every micro-batch is reduced at once. Stage 3 gathers the weights for forward and for backward,
    except `kept` bytes that stay in between. 1910.02054, section 7.
    """
    # --- exercise 3.23: reduce-scatters and all-gathers of each stage, a ring's (N-1)/N of the tensor each ---
    if stage == 3:
        times = micro_batches * (3 * gradients - kept)
    elif stage == 2:
        times = micro_batches * gradients + gradients  # the reduce-scatters; the updated weights go round once
    else:
        times = 2 * gradients  # stage 0: an all-reduce. Stage 1: its two halves, with the update in between
    return times * (ranks - 1) / ranks
    # --- end exercise ---


def table(title: str, columns: Iterable[object], rows: Mapping[str, Iterable[object]]) -> list[str]:
    """Lines of a table with right-aligned cells."""
    lines = [title, " " * 24 + "".join(f"{c!s:>12}" for c in columns)]
    return [*lines, *(f"{name:24}" + "".join(f"{cell!s:>12}" for cell in cells) for name, cells in rows.items()), ""]


def paper_tables() -> list[str]:
    """Table 1 of 1910.02054, and table 2 for more numbers of ranks (there it is 64, times tensor parallelism)."""
    lines = []
    degrees = (1, 4, 16, 64, 256, 1024)
    for size in (7.5e9, 128e9, 1e12):
        rows = {
            f"{ranks} ranks": [f"{size * bytes_per_parameter(stage, ranks) / GB:.4g}" for stage in STAGES]
            for ranks in degrees
        }
        title = f"GB per rank for {size / 1e9:g}B parameters (table 1)"
        lines += table(title, ("stage 0", "stage 1", "stage 2", "stage 3"), rows)
    rows = {
        f"{ranks} ranks": [f"{largest_model(32 * GB, stage, ranks) / 1e9:.4g}B" for stage in STAGES]
        for ranks in degrees
    }
    lines += table("largest model whose states fit in 32 GB (table 2)", (f"stage {s}" for s in STAGES), rows)
    needed = 1e12 * bytes_per_parameter(3, 1024) / GB
    return [*lines, f"10^12 parameters on 1024 ranks at stage 3: {needed:.4g} GB each", ""]


# ------------------------------------------------------------------------------------------ a small model and its text


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, S, D]
        x = x + self.out(mixed.transpose(1, 2).flatten(2))  # [B, heads, S, D] -> [B, S, H]
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head. `layers` blocks are the units of stage 3. The odd sizes make padding necessary."""

    def __init__(self, vocab: int = 257, hidden: int = 48, heads: int = 4, layers: int = 3, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [B, S] -> [B, S, H]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # [B, S, V]


def token_loss_sum(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy over valid tokens, in fp32 or better: 0, not NaN, when there is none."""
    logits = model(tokens).flatten(0, 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def make_batch(
    step: int, ranks: int, micro_batches: int = 2, rows: int = 1, length: int = 24
) -> list[list[MicroBatch]]:
    """A global batch as [rank][micro-batch], from the source of Python's own tokenizer, as bytes.

    The later a rank, the fewer of its tokens are targets, so that an average over ranks would be wrong.
    """
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    count = ranks * micro_batches * rows
    begin = (torch.arange(count) + step * count) * length % (len(data) - length - 1)
    text = data[begin[:, None] + torch.arange(length + 1)].unflatten(0, (ranks, micro_batches, rows))
    tokens, labels = text[..., :-1], text[..., 1:].clone()  # [rank, micro-batch, B, S]
    for rank in range(ranks):
        labels[rank, ..., length * (ranks - rank) // ranks :] = IGNORE
    return [list(zip(*part, strict=True)) for part in zip(tokens, labels, strict=True)]


def valid_tokens(batch: list[MicroBatch], group: dist.ProcessGroup, device: torch.device | str = "cpu") -> Tensor:
    """Number of targets in the whole global batch, by which every rank divides its loss. At least 1."""
    valid = torch.stack([(labels != IGNORE).sum() for _, labels in batch]).sum().to(device)
    dist.all_reduce(valid, group=group)
    return valid.clamp(min=1)


# ------------------------------------------------------------------------------------------- a step, and the oracle


def train_step(model: nn.Module, zero: Any, batch: list[MicroBatch], max_norm: float | None = None) -> Tensor:
    """Forward and backward over this rank's micro-batches, at any stage. Returns the loss of the global batch; the
    gradients are where the stage keeps them, so `zero.step()` comes next."""
    valid = valid_tokens(batch, zero.group, batch[0][0].device)
    total = torch.zeros((), dtype=torch.float64, device=valid.device)
    zero.zero_grad()
    for i, (tokens, labels) in enumerate(batch):
        with zero.micro_batch(last=i == len(batch) - 1):
            loss = token_loss_sum(model, tokens, labels) / valid
            loss.backward()
        total += loss.detach()
    if max_norm is not None:
        zero.clip_grad_norm(max_norm)
    dist.all_reduce(total, group=zero.group)  # only to show it
    return total


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def error_against_the_unsharded_model(
    make: Callable[..., Any], group: dist.ProcessGroup, device: torch.device
) -> float:
    """Largest error in losses, gradients and weights over three steps of SGD in float64, beside the unsharded model."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    oracle = Decoder().to(device, torch.float64)
    torch.manual_seed(rank)  # on purpose: every rank but 0 starts from other weights, until sharding heals it
    model = Decoder().to(device, torch.float64)
    zero = make(model, torch.optim.SGD(model.parameters(), lr=0.1), group)
    worst = 0.0
    for step in range(3):
        batch = [[(x.to(device), y.to(device)) for x, y in part] for part in make_batch(step, ranks)]
        loss = train_step(model, zero, batch[rank])
        x, y = (torch.cat([pair[i] for part in batch for pair in part]) for i in (0, 1))
        oracle.zero_grad()
        want = token_loss_sum(oracle, x, y) / (y != IGNORE).sum()
        want.backward()
        gradients = zero.full_gradients()
        zero.step()
        weights = zero.full_weights()
        worst = max(worst, error(loss, want.detach()))
        for name, q in oracle.named_parameters():
            assert q.grad is not None
            worst = max(worst, error(gradients[name], q.grad))
            q.data -= 0.1 * q.grad  # plain SGD: it forgives no wrong scale, as Adam would
            worst = max(worst, error(weights[name], q.data))
    return worst


# ----------------------------------------------------------------------------------------------- counting and running


class WireCounter(TorchDispatchMode):
    """Bytes that this rank's reduce-scatters, all-gathers and all-reduces put on the wire, by the ring algorithm."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.ranks, self.bytes = dist.get_world_size(group), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            full = {
                "_allgather_base_": (args[:1], 1),
                "_reduce_scatter_base_": (args[1:2], 1),
                "allreduce_": (args[0], 2),
            }
            tensors, times = full.get(func._opname, ((), 0))
            self.bytes += times * sum(t.nbytes for t in tensors) * (self.ranks - 1) / self.ranks
        return func(*args, **(kwargs or {}))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors; Adam's step counters (no dimension) are left out."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.dim() > 0}
    return sum(storages.values())


class OneLineParser(argparse.ArgumentParser):
    """One line on stderr and exit code 2, before any process group exists; of all ranks only the first speaks."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)

    def parse_checked(self) -> argparse.Namespace:
        args = self.parse_args()
        local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if 0 < gpus < local:
            self.error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")
        return args


@contextmanager
def world() -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The ranks that torchrun started, or one alone."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=60), **alone)
    group = dist.group.WORLD
    assert group is not None
    yield group, device
    gc.collect()  # nothing may refer to the group any more, or its threads are still there when Python ends
    dist.destroy_process_group()


Row = tuple[str, object, object, bool]  # what, predicted, measured, is it right?


def report(rows: Sequence[Row], group: dist.ProcessGroup) -> bool:
    """Rank 0 prints the table and PASS, or FAIL and the numbers that are off on any rank."""
    rank = dist.get_rank(group)
    everyone: list[list[str]] = [[]] * dist.get_world_size(group)
    off = [f"rank {rank}: {what} is {got}, not {want}" for what, want, got, right in rows if not right]
    dist.all_gather_object(everyone, off, group=group)
    wrong = [line for lines in everyone for line in lines]
    if rank == 0:
        print(f"{'':48}{'predicted':>14}{'measured':>14}")
        for what, want, got, _ in rows:
            print(f"{what:48}{want!s:>14}{got!s:>14}")
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    return not wrong


def measure(stage: int, group: dist.ProcessGroup, device: torch.device) -> tuple[int, int, int, float]:
    """One bf16 AdamW step: (bytes held, padded number of parameters, bytes of weights kept by stage 3, bytes sent)."""
    from zero3 import make_zero  # stage 3 needs this file too

    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(0)
    model = Decoder().to(device, torch.bfloat16)
    batch = [(x.to(device), y.to(device)) for x, y in make_batch(0, ranks, micro_batches=1)[rank]]
    valid = valid_tokens(batch, group, device)
    counts = [p.numel() for p in model.parameters()]
    units = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    per_bucket = [sum(counts)] if stage < 3 else [*units, sum(counts) - sum(units)]
    padded = [-(-count // ranks) * ranks for count in per_bucket]
    kept = 2 * (padded[-2] + padded[-1]) if stage == 3 else 0  # the last layer, and what is in no layer; 2 bytes each
    loss_of = [lambda: sum(token_loss_sum(model, x, y) for x, y in batch) / valid][0]
    if stage == 0:  # every rank holds and updates all: what ZeRO starts from
        masters = [p.detach().float() for p in model.parameters()]
        optimizer: Any = torch.optim.AdamW(masters)
        with WireCounter(group) as wire:
            loss_of().backward()
            for p, master in zip(model.parameters(), masters, strict=True):
                assert p.grad is not None
                dist.all_reduce(p.grad, group=group)
                master.grad = p.grad.float()
            optimizer.step()
        states = [v for s in optimizer.state.values() for v in s.values()]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        held = storage_bytes([*model.parameters(), *gradients, *masters, *states])
        return held, sum(counts), 0, wire.bytes
    zero = make_zero(
        stage, model, torch.optim.AdamW(model.parameters()), group, units=model.layers, master=torch.float32
    )
    zero.zero_grad()
    with WireCounter(group) as wire:
        with zero.micro_batch(last=True):
            loss_of().backward()
        zero.step()
    return storage_bytes(t for ts in zero.held().values() for t in ts), sum(padded), kept, wire.bytes


def main() -> None:
    OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False).parse_checked()
    with world() as (group, device):
        ranks = dist.get_world_size(group)
        rows: list[Row] = []
        if dist.get_rank(group) == 0:
            print("\n".join(paper_tables()))
            print(f"measured: a decoder in bf16 with AdamW on {ranks} {device.type} rank(s); Psi with its padding\n")
        for stage in STAGES:
            held, psi, kept, sent = measure(stage, group, device)
            must_hold = round(psi * bytes_per_parameter(stage, ranks))
            rows.append((f"stage {stage}: bytes held, Psi = {psi:,}", must_hold, held, must_hold == held))
            must_send = bytes_sent(stage, ranks, 2 * psi, kept)
            right = abs(must_send - sent) < 1e-6
            rows.append((f"stage {stage}: bytes sent in a step", f"{must_send:.0f}", f"{sent:.0f}", right))
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
