"""--kernels cuda: chapter 09's CUDA in the layers of a model, on a Hopper GPU.

    layer             forward                             backward
    linear            y = x Wᵀ          rung multicast    dx = dy W and dW = dyᵀ x, the same rung
    attention         flash_attention_cuda.cu             Triton's kernels, from that output and its log-sum-exp
    the others        Triton's (fused.py, fused_loss.py)  Triton's

All products are of bf16 numbers with sums in fp32, rounded once: what torch's do under --precision bf16. y sums along
the rows of both its factors. Backward sums over the other sides: dx over the rows of W, dW over those of dy and of x.
Rung multicast reads such a factor across, as it lies, so no product copies one, if all sides are multiples of 8.

The CUDA kernel has no backward of its own. Nor does it give the fp32 output that a ring of context ranks merges: there
each block is Triton's, and with --cp-kind ulysses, where a rank has whole sequences, the CUDA kernel does them all.

On a CPU the sources run thread by thread (chapter 09's cuda_on_cpu.h), with PyTorch's own functions for the others,
since Triton's interpreter knows no bf16. A step of a tiny model takes seconds: test_kernels.py does that, the command
refuses it.
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
        (dy,), (x, weight) = gradients, ctx.saved_tensors
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
    """A model's attention over whole sequences, in bf16: q [B, S, N, D], k and v [B, S, N_kv, D] -> like q."""
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    return flash_attention(q, k, v, causal=causal, version=CUDA)
