"""Shared by the demos of this chapter: a text, a small Llama as the reference, bytes sent, process groups."""

import argparse
import gc
import math
import os
import time
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, with a group open, it would keep that group alive
import torch.nn.functional as F
from fpdt_store import CpuMachine
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

IGNORE = -100  # a label without a target


class Wire(TorchDispatchMode):
    """Bytes that this rank sends in its all-to-alls: all but the part it keeps."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.P = group.size()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname == "alltoall_base_":
            self.bytes += args[1].nbytes * (self.P - 1) // self.P
        return func(*args, **(kwargs or {}))


@contextmanager
def settled() -> Iterator[None]:
    """Inside, an all-to-all ends when Gloo has freed its messages. A thread of Gloo does so some time after
    the call has returned, and until then a byte counter still counts the messages."""
    plain = dist.all_to_all_single

    def call(output: Tensor, source: Tensor, *args: Any, **options: Any) -> Any:
        storages = [x.untyped_storage()._cdata for x in (output, source)]
        before = [torch._C._storage_Use_Count(storage) for storage in storages]
        work = plain(output.view_as(output), source.view_as(source), *args, **options)  # Gloo holds these
        until = time.monotonic() + 60
        for storage, users in zip(storages, before, strict=True):
            while torch._C._storage_Use_Count(storage) > users and time.monotonic() < until:
                time.sleep(0)
        return work

    dist.all_to_all_single = call
    try:
        yield
    finally:
        dist.all_to_all_single = plain


def text(B: int, S: int, step: int = 0) -> Tensor:
    """B sequences of S bytes [B, S] from the source of Python's tokenizer."""
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    return data[(torch.arange(B * S) + step * B * S) % len(data)].view(B, S)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """The reference: PyTorch's attention over the full sequence on one rank."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, N, D] -> [B, N, S, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


# ----------------------------------------------------------------------- a Llama with Hugging Face's names (chapter 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope_tables(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every rotation angle, [T, D/2], in fp32 for any dtype of the model."""
    angle = positions[:, None].float() * theta ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos = cos[..., None, :]
    sin = sin[..., None, :]  # equal for all heads
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.parts = SimpleNamespace(rope=apply_rope, attention=dense_attention)
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = self.parts.attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, causal=True)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden)
        self.self_attn = Attention(hidden, heads, kv_heads)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.mlp = MLP(hidden, intermediate)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Tokens [B, T] to the residual stream after the last block [B, T, H]."""

    def __init__(self, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(LlamaBlock(hidden, heads, kv_heads, intermediate) for _ in range(layers))
        self.norm = RMSNorm(hidden)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rope_tables(positions, self.head_dim)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class Llama(nn.Module):
    """Weights of seed 0; the reference of this chapter."""

    def __init__(
        self, vocab: int = 256, hidden: int = 32, layers: int = 2, heads: int = 4, kv_heads: int = 2,
        intermediate: int = 48,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = Decoder(vocab, hidden, layers, heads, kv_heads, intermediate)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() > 1:
                    p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(hidden))

    def loss_sum(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """Sum over valid labels, from all logits at once."""
        logits = self.lm_head(self.model.norm(self.model(tokens, positions)))
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def batch(S: int, vocab: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [1, S] of a text; labels are shifted here, before the sequence is split."""
    tokens = text(1, S + 1, step) % vocab
    labels = tokens[:, 1:].clone()
    labels[:, : S // 5] = IGNORE  # a prompt without targets
    return tokens[:, :-1], labels


class Watched(CpuMachine):
    """A machine with a progress bar: its unit is a (query, key) pair of one head."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self.bar = bar

    def launch(self, stream: str, name: str, amount: float, reads: Any = (), writes: Any = ()) -> None:
        super().launch(stream, name, amount, reads, writes)
        self.bar.update(amount if stream == "compute" else 0)


def three_steps(model: nn.Module, loss_of: Callable[[int], tuple[Tensor, Tensor]], group: Any) -> list[Tensor]:
    """Losses, gradients and weights of three steps of plain SGD. Gradients are summed over `group`, if there is one."""
    found = []
    for step in range(3):
        model.zero_grad()
        loss, valid = loss_of(step)
        loss = loss / valid
        loss.backward()
        loss = loss.detach()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        for x in [loss, *grads] if group is not None else []:
            dist.all_reduce(x, group=group)
        found += [loss.clone(), *(grad.clone() for grad in grads)]
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.sub_(0.1 * grad)
    return [*found, *(p.detach().clone() for p in model.parameters())]


# ------------------------------------------------------------------------------------------------------------- ranks


def run(args: argparse.Namespace, demo: Callable[..., list[str]], on_cpu: bool = False) -> int:
    """Start the process group, run the demo, print the verdict on rank 0. `on_cpu`: even with a GPU."""
    gpu = torch.cuda.is_available() and not on_cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    alone: dict = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if gpu:
        torch.cuda.set_device(device)
        alone["device_id"] = device
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=60), **alone)
    rank = dist.get_rank()
    wrong = demo(args, dist.group.WORLD, device)
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    return 1 if wrong else 0


def check_ranks_and_heads(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """One line on stderr and exit code 2 for inconsistent sizes."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        parser.error(f"--nproc_per_node {os.environ['LOCAL_WORLD_SIZE']} is more than the GPUs here; use {gpus}")
    if args.heads < 1 or args.kv_heads < 1 or args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}; use a divisor of it")
    if args.seq < 1:
        parser.error(f"--seq {args.seq} is no sequence; use 1 or more tokens")
