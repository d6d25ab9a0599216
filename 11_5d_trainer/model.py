"""The model of a rank: chapter 01's Llama, cut by chapter 04 and with the attention of chapter 05, as the mesh says.

All of them start from the same weights, drawn by name (chapter 01), so a layout never changes what is trained.
"""

from dataclasses import replace
from typing import Any

import chapters  # noqa: F401  finds the chapters below
import llama
import parallel_llama
import tensor_parallel
import torch
from llama import LLAMA3_8B, LLAMA3_70B, Llama, LlamaConfig, Parts, recomputed
from mesh import Mesh
from parallel_block import sync_in_backward
from parallel_llama import ParallelLlama
from ring_attention import allgather_attention, layout_positions, ring_attention
from tensor_parallel import TensorParallel, shards
from torch import Tensor, nn
from ulysses import ulysses, usp, usp_positions

PRESETS = {
    # 0.75 M parameters on bytes: learns on two CPU cores while you watch
    "tiny": LlamaConfig(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=320),
    # 25 M, the size of a first experiment on one GPU
    "small": LlamaConfig(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1408),
    # 124 M with GPT-2's vocabulary
    "base": LlamaConfig(50304, hidden=768, layers=12, heads=12, kv_heads=12, intermediate=2048, tied=True),
    "smollm-1.7b": LlamaConfig(
        49152, hidden=2048, layers=24, heads=32, kv_heads=32, intermediate=8192, rope_theta=130000.0, tied=True
    ),
    "llama3-8b": LLAMA3_8B,
    "llama3-70b": LLAMA3_70B,
}

# --cp-kind -> layout of the sequence over the ring axis. Zigzag gives every rank the same share of a causal mask.
LAYOUTS = {"allgather": "zigzag", "ring": "contiguous", "zigzag": "zigzag", "ulysses": "contiguous", "usp": "zigzag"}


def build(
    sizes: LlamaConfig,
    mesh: Mesh,
    *,
    cp_kind: str = "zigzag",
    sequence_parallel: bool = False,
    recompute: str = "none",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """This rank's model with its first weights. It takes this rank's tokens and their positions (`my_positions`)."""
    parts = replace(Parts(), attention=attention_over_ranks(mesh, cp_kind)) if mesh.cp > 1 else Parts()
    if mesh.sizes["tp"] == 1:
        model: Any = Llama(sizes, parts, recompute)
        llama.init_weights(model, seed)
        return model.to(device, dtype)
    if recompute == "selective":
        parts = replace(parts, attention=recomputed(parts.attention))
    wrap = recomputed if recompute == "full" else lambda block: block
    group = mesh.groups["tp"]
    model = ParallelLlama(sizes, TensorParallel(group, sequence_parallel), parts, wrap=wrap)
    tensor_parallel.init_weights(model, sizes.layers, seed)
    model.to(device, dtype)
    # Some gradients are shares: of a norm, which saw a piece of the sequence, or of a K/V head that several ranks hold.
    sync_in_backward(model, group)
    return model


def attention_over_ranks(mesh: Mesh, kind: str) -> Any:
    """attention(q, k, v, *, causal) for tokens that lie over the context axis, by chapter 05."""
    ring, all_to_all = mesh.groups["ring"], mesh.groups["ulysses"]
    if kind == "usp":
        return usp(all_to_all, ring, LAYOUTS[kind])
    if kind == "ulysses":
        return ulysses(all_to_all)
    return (allgather_attention if kind == "allgather" else ring_attention)(ring, LAYOUTS[kind])


def my_positions(seq_len: int, mesh: Mesh, kind: str) -> Tensor:
    """Positions in the sequence of the tokens that this rank holds, [S / cp]."""
    ring, all_to_all = (mesh.place["ring"], mesh.sizes["ring"]), (mesh.place["ulysses"], mesh.sizes["ulysses"])
    if kind == "usp":
        return usp_positions(LAYOUTS[kind], seq_len, *ring, *all_to_all)
    return layout_positions(LAYOUTS[kind], seq_len, mesh.cp_rank, mesh.cp)


def loss_sum(model: Any, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    """Sum of the losses of this rank's tokens. Ranks of a tensor group get the same number."""
    logits = model(tokens, positions)
    return (model.cross_entropy if isinstance(model, ParallelLlama) else model.parts.cross_entropy)(logits, labels)


# ------------------------------------------------------------------------------ whole weights, by Hugging Face's names


def full_shapes(sizes: LlamaConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):  # shapes without memory
        return {name: p.shape for name, p in Llama(sizes).named_parameters()}


def gather_tensors(model: nn.Module, tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """From one tensor for each parameter of this rank (the weights, or an optimizer's moments) to whole ones."""
    if mesh.sizes["tp"] == 1:
        return tensors
    both = {name: tensors.get(name, tensors["model.embed_tokens.weight"]) for name in shards(model)}  # a tied head
    device = next(model.parameters()).device
    both = {name: tensor.to(device) for name, tensor in both.items()}
    whole = parallel_llama.full_state_dict(model, mesh.groups["tp"], both)
    return {name: whole[name] for name in tensors}


def cut_tensors(model: nn.Module, whole: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The other way: this rank's pieces of whole tensors."""
    if mesh.sizes["tp"] == 1:
        return whole
    held = shards(model)
    # Contiguous: fused AdamW walks through its states as if they lay in memory like the weight.
    return {name: held[name].cut(tensor).contiguous() for name, tensor in whole.items()}


def share_of_norm(model: nn.Module, mesh: Mesh) -> dict[str, float]:
    """By parameter, what its squares count for in the sum over the tensor group, so that each element counts once."""
    tp = mesh.sizes["tp"]
    if tp == 1:
        return {name: 1.0 for name, _ in model.named_parameters()}
    return {name: shard.pieces / tp for name, shard in shards(model).items()}
