"""Shared by this chapter's benchmarks: the ranks, and the same block with torch's own tensor parallelism."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _tensor_parallel_demo import OneLineParser
from harness.spawn import launch
from parallel_block import Config, apply_rope, attention
from parallel_linear import swiglu
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

RANKS = 4


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, causal=True).flatten(-2))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of `Block`, as a function: both sides of a benchmark use the same."""
    return F.rms_norm(x, weight.shape, weight, eps)


def torch_plan(module: nn.Module, sequence: bool) -> nn.Module:
    """Apply torch's plan (DTensor) to an MLP or a Block. PrepareModuleInput gathers once for all products of x."""
    outside = Shard(1) if sequence else Replicate()
    inputs = dict(input_layouts=outside, desired_input_layouts=Replicate())
    mlp: dict[str, Any] = {
        "": PrepareModuleInput(**inputs),
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(output_layouts=outside),
    }
    attention_inputs = {name: (layout, None, None) for name, layout in inputs.items()}
    heads: dict[str, Any] = {
        "": PrepareModuleInput(**attention_inputs),
        **{f"{name}_proj": ColwiseParallel() for name in "qkv"},
        "o_proj": RowwiseParallel(output_layouts=outside),
    }
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (RANKS,))
    if isinstance(module, MLP):
        return parallelize_module(module, mesh, mlp)
    plan = {f"mlp.{name}".rstrip("."): style for name, style in mlp.items()}
    plan |= {f"self_attn.{name}".rstrip("."): style for name, style in heads.items()}
    if sequence:
        plan |= {f"{name}_layernorm": SequenceParallel() for name in ("input", "post_attention")}
    return parallelize_module(module, mesh, plan)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: nn.Module, x: Tensor, *tables: Tensor, finish: Callable[[nn.Module], object] | None = None) -> Tensor:
    """Forward and backward, and then `finish(model)`."""
    model.zero_grad()
    x.grad = None
    z = model(x, *tables)
    z.backward(z.detach())
    if finish is not None:
        finish(model)
    return z.detach()


def must_be_same(got: Tensor, want: Tensor, what: str) -> None:
    error = ((got - want).abs().max() / want.abs().max()).item()
    if not error <= 1e-5:
        raise SystemExit(f"{what} differs by {error:.1e}: nothing is measured")


def options(about: str | None, figures: bool = False) -> argparse.Namespace:
    """The command line's options. An unknown one ends in one line and exit code 2; no rank starts."""
    parser = OneLineParser(description=(about or "").partition("\n")[0], allow_abbrev=False)
    if figures:
        parser.add_argument("--figures", action="store_true", help="measure nothing; draw the figures from the results")
    return parser.parse_args()


def run(worker: Callable[[torch.device], None]) -> None:
    """`worker(device)` on RANKS ranks: processes on the CPU, or a GPU each."""
    launch(worker, RANKS)
