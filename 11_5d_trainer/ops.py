"""Which functions a model is made of: readable PyTorch, or the kernels and the low precision of chapters 08 to 10.

attention       chapter 01's, FlashAttention (09, in Triton or CUDA), over the context ranks (05), or with
                chunks on the host (08)
norm, rope, swiglu, cross_entropy       chapter 01's, or fused (09)
linear          F.linear, a product in CUDA (09: cuda_parts.py), or in fp8 (10)

With --kernels triton and full layers on one rank (no --tp, no --pp), three fused functions replace several of
these, with the same rounding. q, k, v and gate, up sum the gradient of x in their matmuls (01; not in fp16).
The norm after attention adds the residual (09), unless autocast makes one of the two narrower. The output
layer and the loss never hold all logits (09), except in fp16, whose loss scale is applied too late for them.
In fp8 such layers' q, k, v and gate, up share one x in 8 bits (10), with any kernels.

--precision     weights    products                      besides
fp64, fp32      as named   as named
bf16            fp32       bf16 (autocast)
fp16            fp32       fp16 (autocast)               the loss is scaled, and a step that overflows is left out
bf16-master     bf16       bf16                          ZeRO stores fp32 master weights (--zero 1 or more)
fp8-...         fp32       fp8 in the layers             bf16 for the rest; the output layer stays in bf16

The matmuls of fp8-block are chapter 10's in CUDA on Hopper with nvcc, else Triton's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import paths  # noqa: F401  finds the chapters below
import torch
from context_ring import EXPLICIT, allgather_attention, ring_attention
from context_ulysses import ulysses, usp
from fp8 import RECIPES, Fp8Linear
from llama import Parts, linears_of_one_input, recomputed
from mesh import Mesh
from packed_documents import in_documents, packed_attention
from precision_policies import linear as linear_fp16
from torch import Tensor

FP8 = {f"fp8-{name}": name for name, recipe in RECIPES.items() if not recipe.history}
WEIGHTS = {"fp64": torch.float64, "bf16-master": torch.bfloat16}  # else fp32
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16} | dict.fromkeys(FP8, torch.bfloat16)
PRECISIONS = ("fp32", "fp64", "bf16", "bf16-master", "fp16", *FP8)

# --cp-kind -> layout of the sequence over the ring axis. Zigzag gives every rank the same share of a causal mask.
LAYOUTS = {"allgather": "zigzag", "ring": "contiguous", "zigzag": "zigzag", "ulysses": "contiguous", "usp": "zigzag"}


def weight_dtype(config: Any) -> torch.dtype:
    return WEIGHTS.get(config.precision, torch.float32)


def make_parts(
    mesh: Mesh,
    *,
    kernels: str,
    precision: str,
    cp_kind: str,
    recompute: str,
    device: torch.device | str,
    documents: "Documents | None" = None,
) -> Parts:
    """The functions for this rank. With `documents`, attention is within each document."""
    parts = Parts()
    local = EXPLICIT
    attention = None
    whole_layers = mesh.sizes["tp"] == mesh.sizes["pp"] == 1
    # Imported here: on a CPU these imports turn Triton's interpreter on, which lacks bf16, cuda's dtype.
    if kernels == "triton" or (kernels == "cuda" and torch.device(device).type == "cuda"):
        from flash_kernels import TRITON, flash_attention
        from fused import add_rms_norm, rms_norm, rope, swiglu
        from fused_loss import cross_entropy, linear_cross_entropy

        local, attention = TRITON, flash_attention
        parts = Parts(flash_attention, norm=rms_norm, rope=rope, swiglu=swiglu, cross_entropy=cross_entropy)
        if kernels == "triton" and whole_layers:
            parts = replace(
                parts,
                linears=linears_of_one_input if precision != "fp16" else None,
                add_norm=add_rms_norm if precision not in AUTOCAST else None,
                linear_cross_entropy=linear_cross_entropy if precision != "fp16" else None,
            )
    if kernels == "cuda":
        import cuda_parts

        attention = cuda_parts.attention
        parts = replace(parts, attention=attention, linear=cuda_parts.linear)
    if documents:
        documents.attention_in = partial(attention_in_documents, mesh, cp_kind, local, parts.attention)
        parts = replace(parts, attention=documents)
    elif mesh.cp > 1:
        parts = replace(parts, attention=attention_over_ranks(mesh, cp_kind, local, attention))
    if recompute == "selective":  # only the core of attention
        parts = replace(parts, attention=recomputed(parts.attention))
    if precision == "fp16":
        parts = replace(parts, linear=linear_fp16)
    if precision in FP8:
        product = fp8_product(FP8[precision], device)
        linear = Fp8Linear(FP8[precision], mesh.groups["stage"], device=device, product=product)
        parts = replace(parts, linear=linear, linears=linear.several if whole_layers else None)
    return parts


def fp8_product(recipe: str, device: torch.device | str) -> str:
    """Which kernel multiplies in fp8 on a GPU, "cuda" or "triton"; for other recipes than "block" both mean cuBLAS."""
    if recipe != "block" or torch.device(device).type != "cuda":
        return "triton"
    import fp8_matmul

    return "triton" if fp8_matmul.refusal(device) else "cuda"


def attention_over_ranks(mesh: Mesh, kind: str, local: Any, attention: Any) -> Any:
    """attention(q, k, v, *, causal) for tokens sharded over the context axis. `local` computes one block of a
    ring, `attention` a full sequence; None means chapter 05's own."""
    ring = mesh.groups["ring"]
    all_to_all = mesh.groups["ulysses"]
    if kind == "usp":
        return usp(all_to_all, ring, LAYOUTS[kind], local)
    if kind == "ulysses":
        return ulysses(all_to_all, attention) if attention else ulysses(all_to_all)
    return (allgather_attention if kind == "allgather" else ring_attention)(ring, LAYOUTS[kind], local)


class Documents:
    """attention(q, k, v, *, causal) in which no token sees another document. Each sample has its own
    boundaries and is computed by itself."""

    attention_in: Callable[[list[int]], Any]  # from cu_seqlens (chapter 05) to the attention for one sample

    def begin(self, places: Tensor) -> None:
        """Start a micro-batch. `places` [B, S]: how far each token is from the beginning of its document."""
        borders = [[*(row == 0).nonzero().flatten().tolist(), len(row)] for row in places]
        self.each = [self.attention_in(cu_seqlens) for cu_seqlens in borders]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        samples = (each.split(1) for each in (q, k, v))
        return torch.cat([f(*qkv, causal=causal) for f, *qkv in zip(self.each, *samples, strict=True)])


def attention_in_documents(mesh: Mesh, kind: str, local: Any, attention: Any, cu_seqlens: list[int]) -> Any:
    """attention(q, k, v, *, causal) for one sample. A ring's blocks leave out what documents do not see;
    between its all-to-alls Ulysses has full sequences, as a single rank has."""
    if mesh.cp == 1:
        return in_documents(cu_seqlens, attention)
    if kind == "ulysses":
        return ulysses(mesh.groups["ulysses"], in_documents(cu_seqlens, attention))
    version = "allgather" if kind == "allgather" else "ring"
    return packed_attention(mesh.groups["ring"], cu_seqlens, LAYOUTS[kind], version, local)


def leave_out_step(parts: Parts) -> None:
    """Replaces `end_step` for a step that leaves the weights unchanged."""
    if isinstance(parts.linear, Fp8Linear):
        parts.linear.leave_out_step()


def end_step(parts: Parts) -> None:
    """After the optimizer step: report what the fp8 matmuls have recorded. Raises FloatingPointError."""
    if isinstance(parts.linear, Fp8Linear):
        parts.linear.end_step()
