"""Shared helpers of this chapter's scripts: a small decoder, its text, a table, a group."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import sysconfig
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100
Linear = Callable[[Tensor, Tensor], Tensor]


def wide(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it was: the dtype for sums of many terms."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = wide(x)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


class Block(nn.Module):
    """[B, S, H] -> [B, S, H]. All of its matrices go through `linear(x, weight)`; weights are [out, in]."""

    def __init__(self, hidden: int, heads: int, inner: int, linear: Linear):
        super().__init__()
        self.heads, self.linear = heads, linear
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.qkv = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.out = nn.Parameter(torch.empty(hidden, hidden))
        self.gate, self.up = (nn.Parameter(torch.empty(inner, hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(hidden, inner))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.linear(rms_norm(x, self.norm1), self.qkv)
        # Attention itself is not part of a recipe. On a CPU its fused kernel is fast only in fp32, so it runs
        # in fp32 and is rounded once at the end, as in a fused kernel on a GPU.
        inside = wide(qkv) if x.device.type == "cpu" else qkv
        q, k, v = inside.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 times [B, N, S, D]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(x.dtype)
        x = x + self.linear(mixed.transpose(1, 2).flatten(2), self.out)
        y = rms_norm(x, self.norm2)
        return x + self.linear(F.silu(self.linear(y, self.gate)) * self.linear(y, self.up), self.down)


class Decoder(nn.Module):
    """A small decoder. Embedding, norms and head stay out of `linear`: the recipes keep them in higher precision."""

    def __init__(
        self,
        linear: Linear = F.linear,
        *,
        vocab: int = 256,
        hidden: int = 128,
        heads: int = 4,
        inner: int = 256,
        layers: int = 2,
        sequence: int = 64,
        head: Linear | None = None,
    ):
        super().__init__()
        angle = torch.arange(sequence)[:, None] * torch.logspace(0, -4, hidden // 2)[None]
        self.positions: Tensor
        self.register_buffer("positions", 0.02 * torch.cat([angle.sin(), angle.cos()], dim=-1))
        self.embed = nn.Parameter(torch.empty(vocab, hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads, inner, linear) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.head = nn.Parameter(torch.empty(vocab, hidden))
        self.head_linear = head or F.linear
        generator = torch.Generator().manual_seed(0)  # the same first weights for every policy, drawn in fp32
        for name, p in self.named_parameters():
            if p.dim() > 1:
                std = 0.02 / (2 * layers) ** 0.5 if name.endswith(("out", "down")) else 0.02
                p.data.copy_(torch.randn(p.shape, generator=generator) * std)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embed) + self.positions[: tokens.shape[1]].to(self.embed.dtype)  # [B, S, H]
        for block in self.blocks:
            x = block(x)
        return self.head_linear(rms_norm(x, self.norm), self.head)  # [B, S, V]

    def matrices(self) -> dict[str, nn.Parameter]:
        """The weights that go through `linear`."""
        return {name: p for name, p in self.named_parameters() if name.startswith("blocks") and p.dim() > 1}


def loss_sum(model: Callable[[Tensor], Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy over valid tokens, in fp32 or better."""
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(wide(logits), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def stdlib_bytes(limit: int = 1_000_000) -> Tensor:
    """The first `limit` bytes of the source of Python's standard library, files in sorted order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batch(data: Tensor, step: int, rows: int = 6, length: int = 64) -> tuple[Tensor, Tensor]:
    """tokens and labels [rows, length] of a step, the same in every call; half of `data` is held out."""
    generator = torch.Generator().manual_seed(step)
    if step >= 0:
        start = torch.randint(len(data) // 2 - length - 1, (rows, 1), generator=generator)
    else:  # negative steps are the held-out text
        start = len(data) // 2 + torch.randint(len(data) // 2 - length - 1, (rows, 1), generator=generator)
    window = data[start + torch.arange(length + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class Report:
    """A table of expected and measured values, printed by rank 0."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.wrong: list[str] = []
        self.rank = dist.get_rank(group) if group is not None else 0

    def title(self, text: str) -> None:
        if self.rank == 0:
            print(f"{text}\n{'':58}{'expected':>14}{'measured':>14}")

    def add(self, what: str, expected: Any, measured: Any, right: bool | None = None) -> None:
        if not (expected == measured if right is None else right):
            self.wrong.append(f"rank {self.rank}: {what} is {measured}, not {expected}")
        if self.rank == 0:
            print(f"  {what:56}{expected!s:>14}{measured!s:>14}")

    def finish(self) -> list[str]:
        if self.group is None:
            return self.wrong
        everyone: list[list[str]] = [[]] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, self.wrong, group=self.group)
        return [line for lines in everyone for line in lines]


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)


def launch(demo: Callable[[dist.ProcessGroup, torch.device], list[str]]) -> NoReturn:
    """Start the process group, run the demo, print PASS or what is off."""
    gpus = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < gpus < local:
        OneLineParser().error(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **alone)
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    wrong = demo(dist.group.WORLD, device)
    gc.collect()  # cyclic references to the group must not outlive it
    dist.destroy_process_group()
    if rank == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    sys.exit(1 if wrong else 0)
