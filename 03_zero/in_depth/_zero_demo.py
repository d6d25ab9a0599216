"""Shared by this chapter's demos: a small decoder, its text, a step, the reference, a byte counter, a table.

No technique is in here, and reading one does not need this file. A script is copied together with it.
"""

from __future__ import annotations

import argparse
import gc
import math
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
import torch.distributed.nn  # now: if first imported while a group exists, it would keep the group alive
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Legend of shapes: B batch, S sequence, H hidden, D head dim, V vocab. N is the number of ranks everywhere else.
IGNORE = -100  # a label without a target
MicroBatch = tuple[Tensor, Tensor]  # tokens and labels, both [B, S]

# ------------------------------------------------------------------------------------------ a small model and its text


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(hidden)
        self.norm2 = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, heads, S, D]
        x = x + self.out(mixed.transpose(1, 2).flatten(2))  # [B, heads, S, D] -> [B, S, H]
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Embedding, `layers` blocks (the units of stage 3), norm, head. The odd sizes make padding necessary."""

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
    """Sum of the cross entropy over valid tokens, in fp32 or better: 0, not NaN, if there are none."""
    logits = model(tokens).flatten(0, 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def make_batch(
    step: int, ranks: int, micro_batches: int = 2, rows: int = 1, length: int = 24
) -> list[list[MicroBatch]]:
    """A global batch as [rank][micro-batch], from the bytes of Python's own tokenizer module.

    Later ranks have fewer targets, so that an average over ranks would be wrong.
    """
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    count = ranks * micro_batches * rows
    begin = (torch.arange(count) + step * count) * length % (len(data) - length - 1)
    text = data[begin[:, None] + torch.arange(length + 1)].unflatten(0, (ranks, micro_batches, rows))
    tokens = text[..., :-1]
    labels = text[..., 1:].clone()  # [rank, micro-batch, B, S]
    for rank in range(ranks):
        labels[rank, ..., length * (ranks - rank) // ranks :] = IGNORE
    return [list(zip(*part, strict=True)) for part in zip(tokens, labels, strict=True)]


def valid_tokens(batch: list[MicroBatch], group: dist.ProcessGroup, device: torch.device | str = "cpu") -> Tensor:
    """Number of targets in the global batch, by which every rank divides its loss. At least 1."""
    valid = torch.stack([(labels != IGNORE).sum() for _, labels in batch]).sum().to(device)
    dist.all_reduce(valid, group=group)
    return valid.clamp(min=1)


# ------------------------------------------------------------------------------------------- a step, and the reference


def train_step(
    model: nn.Module,
    zero: Any,
    batch: list[MicroBatch],
    max_norm: float | None = None,
    everyone: dist.ProcessGroup | None = None,
) -> Tensor:
    """Forward and backward over this rank's micro-batches, at any stage. Returns the loss of the global
    batch. Afterwards the gradients are ready for `zero.step()`."""
    group = everyone or zero.group  # all ranks with different tokens; with HSDP more than the group of shards
    valid = valid_tokens(batch, group, batch[0][0].device)
    total = torch.zeros((), dtype=torch.float64, device=valid.device)
    zero.zero_grad()
    for i, (tokens, labels) in enumerate(batch):
        with zero.micro_batch(last=i == len(batch) - 1):
            loss = token_loss_sum(model, tokens, labels) / valid
            loss.backward()
        total += loss.detach()
    if max_norm is not None:
        zero.clip_grad_norm(max_norm)
    dist.all_reduce(total, group=group)  # only for the log
    return total


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def worst_of(errors: Iterable[float]) -> float:
    """The largest error, or NaN if any is NaN. (`max(0.0, nan)` is 0.0, so a demo that used it printed PASS
    with NaN in every weight.)"""
    errors = [0.0, *errors]
    return math.nan if any(math.isnan(e) for e in errors) else max(errors)


def error_against_the_unsharded_model(
    make: Callable[..., Any], group: dist.ProcessGroup, device: torch.device
) -> float:
    """Largest error of losses, gradients and weights in three float64 SGD steps against the full model."""
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    torch.manual_seed(0)
    reference = Decoder().to(device, torch.float64)
    torch.manual_seed(rank)  # on purpose different on all ranks, until sharding broadcasts rank 0's weights
    model = Decoder().to(device, torch.float64)
    zero = make(model, torch.optim.SGD(model.parameters(), lr=0.1), group)
    errors: list[float] = []
    for step in range(3):
        batch = [[(x.to(device), y.to(device)) for x, y in part] for part in make_batch(step, ranks)]
        loss = train_step(model, zero, batch[rank], everyone=group)
        x, y = (torch.cat([pair[i] for part in batch for pair in part]) for i in (0, 1))
        reference.zero_grad()
        want = token_loss_sum(reference, x, y) / (y != IGNORE).sum()
        want.backward()
        gradients = zero.full_gradients()
        zero.step()
        weights = zero.full_weights()
        errors.append(error(loss, want.detach()))
        for name, q in reference.named_parameters():
            assert q.grad is not None
            errors.append(error(gradients[name], q.grad))
            q.data -= 0.1 * q.grad  # plain SGD, because Adam would hide a wrong scale
            errors.append(error(weights[name], q.data))
    return worst_of(errors)


# ----------------------------------------------------------------------------------------------- counting and running


class WireCounter(TorchDispatchMode):
    """Bytes that this rank sends in a group: a message's payload, a collective's payload times the ring's
    factor. A library may send less or more: Gloo's reduce-scatter is an all-reduce."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.name = group.group_name
        self.ranks = dist.get_world_size(group)
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname not in ("recv_", "barrier", "monitored_barrier_"):
            given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            group = dist.ProcessGroup.unbox(given["process_group"])
            share = (self.ranks - 1) / self.ranks
            last = (group.rank() - given.get("root_rank", 0)) % group.size() == group.size() - 1  # of a line from root
            known = {
                "_allgather_base_": (args[:1], share),
                "_reduce_scatter_base_": (args[1:2], share),
                "allreduce_": (args[0], 2 * share),
                "send": (args[0], 1),
                "broadcast_": (args[0], 0 if last else 1),
            }
            if func._opname not in known:  # counting it as 0 would be wrong
                raise NotImplementedError(f"the demo's counter does not know what {func._opname} sends")
            tensors, times = known[func._opname]
            self.bytes += (group.group_name == self.name) * times * sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of these tensors, without Adam's step counters (no dimension)."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.dim() > 0}
    return sum(storages.values())


class OneLineParser(argparse.ArgumentParser):
    """One line on stderr, from the first rank only, and exit code 2, before any process group exists."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)

    def parse_checked(self) -> argparse.Namespace:
        args = self.parse_args()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = torch.cuda.device_count()
        if 0 < gpus < local:
            self.error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")
        return args


@contextmanager
def world() -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The ranks that torchrun started, or a single one."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=60), **alone)
    group = dist.group.WORLD
    assert group is not None
    yield group, device
    gc.collect()  # with a reference left, the group's threads would still run when Python ends
    dist.destroy_process_group()


Row = tuple[str, object, object, bool]  # what, predicted, measured, passed


def report(rows: Sequence[Row], group: dist.ProcessGroup) -> bool:
    """Rank 0 prints the table and PASS, or FAIL and the values that are wrong on any rank."""
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


def measure(
    stage: int, group: dist.ProcessGroup, device: torch.device, make: Callable[..., Any] | None = None
) -> tuple[int, int, int, float]:
    """One bf16 AdamW step: (bytes stored, padded parameters, bytes of weights kept by stage 3, bytes sent).

    `make(stage, model, optimizer, group, units=, master=)` is `make_zero` of zero3.py; stage 0 needs none.
    """
    ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
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
    if make is None:  # data parallelism, where every rank stores and updates everything
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
    optimizer = torch.optim.AdamW(model.parameters())
    zero = make(stage, model, optimizer, group, units=model.layers, master=torch.float32)
    zero.zero_grad()
    with WireCounter(group) as wire:
        with zero.micro_batch(last=True):
            loss_of().backward()
        zero.step()
    return storage_bytes(t for ts in zero.held().values() for t in ts), sum(padded), kept, wire.bytes


def table(title: str, columns: Iterable[object], rows: Mapping[str, Iterable[object]]) -> list[str]:
    """Lines of a table with right-aligned cells."""
    lines = [title, " " * 24 + "".join(f"{c!s:>12}" for c in columns)]
    return [*lines, *(f"{name:24}" + "".join(f"{cell!s:>12}" for cell in cells) for name, cells in rows.items()), ""]
