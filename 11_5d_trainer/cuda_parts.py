"""--kernels cuda: chapter 09's CUDA in the layers of a model, on a Hopper GPU.

    layer             forward                             backward
    linear            y = x Wᵀ          rung multicast    dx = dy W and dW = dyᵀ x, the same rung
    attention         flash_attention_cuda.cu             Triton's kernels, from that output and its log-sum-exp
    other layers      Triton's (fused.py, fused_loss.py)  Triton's

All matmuls have bf16 operands and fp32 sums, rounded once, as torch's under --precision bf16. y sums along
the rows of both factors. Backward sums over the other sides: dx over the rows of W, dW over the rows of dy
and x. Rung multicast reads such a factor transposed, without a copy, if all sides are multiples of 8.

The CUDA kernel has no backward of its own. Nor does it return the fp32 output that ring attention merges, so
there each block is Triton's. With --cp-kind ulysses a rank has full sequences, all run by the CUDA kernel.

On a CPU the sources run thread by thread (chapter 09's cuda_on_cpu.h). The other layers are PyTorch's own
functions, since Triton's interpreter has no bf16. A step of a tiny model takes seconds, so only
test_kernels.py runs it; the command refuses it.
"""

from typing import Any

import paths  # noqa: F401  finds the chapters below
import torch
from flash_attention_cuda import CUDA
from flash_kernels import flash_attention
from matmul_ladder import matmul
from torch import Tensor

RUNG = "multicast"  # the fastest of the ladder: two blocks of a cluster share the tiles of B, by TMA


class Product(torch.autograd.Function):
    """y [T, out] = x [T, in] Wᵀ, W [out, in], all in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight.t(), RUNG)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        dx = matmul(dy, weight, RUNG) if of_x else None  # [T, out] [out, in] -> [T, in]
        dw = matmul(dy.t(), x, RUNG) if of_weight else None  # [out, T] [T, in] -> [out, in]
        return dx, dw


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ in bf16, of whatever width x and W are: x [..., in], W [out, in] -> [..., out].

    Autograd casts the gradients back to the widths of x and W.
    """
    rows = x.to(torch.bfloat16).flatten(0, -2)  # [..., in] -> [T, in]
    return Product.apply(rows, weight.to(torch.bfloat16)).unflatten(0, x.shape[:-1])  # [T, out] -> [..., out]


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """A model's attention over full sequences, in bf16: q [B, S, N, D], k and v [B, S, N_kv, D] -> like q."""
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    return flash_attention(q, k, v, causal=causal, version=CUDA)
