"""The model of a rank: chapter 01's Llama, sharded as in chapter 04, with the attention of chapter 05.

All ranks start from the same weights, drawn by name (chapter 01), so a layout never changes what is trained.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import paths  # noqa: F401  finds the chapters below
import llama
import parallel_linear
import parallel_llama
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_ring import layout_positions
from context_ulysses import usp_positions
from domino import HalvedBlock, has_hooks, in_halves
from fp8 import Fp8Linear
from fpdt_attention import fpdt_positions
from fpdt_model import chunked, chunked_loss, fpdt_block
from fpdt_store import Store, machine_for
from llama import LLAMA3_8B, LLAMA3_70B, Llama, LlamaConfig, Parts, rope_tables
from mesh import Mesh
from moe_layer import MoE, MoEConfig, moe_layers, recompute_blocks
from moe_llama import expert_names, full_name, init_moe
from ops import LAYOUTS, weight_dtype
from overlap import VERSIONS
from parallel_block import sync_in_backward
from parallel_linear import TensorParallel, shards
from parallel_llama import ParallelLlama
from split_backward import recomputed_once
from torch import Tensor, nn

PRESETS = {
    # 0.75 M parameters on bytes: learns on two CPU cores while you watch
    "tiny": LlamaConfig(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=320),
    # 24 M, the size of a first experiment on one GPU
    "small": LlamaConfig(hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1408),
    # 124 M with GPT-2's vocabulary
    "base": LlamaConfig(50304, hidden=768, layers=12, heads=12, kv_heads=12, intermediate=2048, tied=True),
    "smollm-1.7b": LlamaConfig(
        49152, hidden=2048, layers=24, heads=32, kv_heads=32, intermediate=8192, rope_theta=130000.0, tied=True
    ),
    "llama3-8b": LLAMA3_8B,
    "llama3-70b": LLAMA3_70B,
    "mixtral-8x7b": LlamaConfig(
        32000, hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, rope_theta=1e6
    ),
}
EXPERTS = {"mixtral-8x7b": (8, 2)}  # experts, and how many a token uses


def build(
    config: Any, sizes: LlamaConfig, mesh: Mesh, parts: Parts, layers: list[int] | None, device: torch.device
) -> nn.Module:
    """This rank's model with its initial weights, made of the functions in `parts`, as the options say. It
    takes this rank's tokens and their positions (`my_positions`).

    A pipeline rank holds only some `layers`, the embedding if the first is among them, and norm and output
    layer if the last is. Its parameters keep their names in the full model, and hence their initial values.
    Such a model cannot be called; its `Stage`s can. Their caller sums the partial gradients over the tensor
    group (`sync_replicated_gradients`), once when a stage is done and not for each micro-batch.
    """
    held = list(range(sizes.layers)) if layers is None else sorted(layers)
    first = held[0] == 0
    last = held[-1] == sizes.layers - 1
    with torch.device("meta"):  # no memory yet
        model = make_layers(config, sizes, mesh, parts, len(held))
    model.config = model.model.config = sizes
    # If tied, the first and the last stage both hold the embedding, each with a part of its gradient.
    model.shared = {"model.embed_tokens.weight"} if sizes.tied and first != last else set()
    if layers is not None:
        model.model.layers = nn.ModuleDict({str(i): block for i, block in zip(held, model.model.layers, strict=True)})
        if not last:
            model.model.norm = model.lm_head = None
        if not (first or (last and sizes.tied)):  # if tied, the output layer is the embedding
            model.model.embed_tokens = None
    model.to(weight_dtype(config))  # while it has no memory: in fp32 it may not fit
    fill(model, sizes, config.seed, device, tie=sizes.tied and last)
    freeze(model, sizes)
    if mesh.sizes["tp"] > 1 and layers is None:
        # Some gradients, of norms or K/V heads, are partial sums, to be reduced before an owner takes them.
        sync_in_backward(model, mesh.groups["tp"])
    wrap_blocks(config, model, mesh, device)
    return model


def make_layers(config: Any, sizes: LlamaConfig, mesh: Mesh, parts: Parts, layers: int) -> Any:
    """A model of `layers` layers, sharded over the tensor group. With experts the feed-forward layer of each
    block is a mixture of experts, of which this rank holds its part."""
    few = replace(sizes, layers=layers)
    moe = config.mixture(sizes)
    tp = mesh.groups["tp"]
    high = replace(parts, linear=F.linear) if isinstance(parts.linear, Fp8Linear) else parts
    own_feed_forward: dict[str, Any] = {}
    if moe:
        groups = (mesh.groups["ep"], mesh.groups["tokens"])
        how = {"sequence_parallel": config.sequence_parallel}
        own_feed_forward["feed_forward"] = lambda *made: MoE(
            moe, *groups, version=config.dispatch, parts=made[-1], **how
        )
    if mesh.sizes["tp"] == 1:
        model: Any = Llama(few, parts, **own_feed_forward)
        model.lm_head.parts = high  # the output layer is not in fp8
        return model
    products = () if config.tp_overlap == "none" else VERSIONS["overlapped"]
    cut = TensorParallel(tp, config.sequence_parallel, *products)
    model = ParallelLlama(few, cut, parts, through=through, **own_feed_forward)
    model.lm_head.linear = high.linear
    if config.tp_overlap == "domino":
        halves = (HalvedBlock(few, tp, config.sequence_parallel, parts) for _ in range(layers))
        model.model.layers = nn.ModuleList(halves)
    return model


def wrap_blocks(config: Any, model: Any, mesh: Mesh, device: torch.device) -> None:
    """Add recomputation of full blocks, and chunks of the sequence of which only some are on the device."""
    blocks = list(model.model.layers.children())
    if config.recompute == "full" and config.pp > 1 and not moe_layers(model):
        for block in blocks:  # a pipeline may split the backward; torch's checkpoint would recompute a block
            block.forward = recomputed_once(block.forward)  # for each part
    elif config.recompute == "full":
        recompute_blocks(blocks)
    if config.fpdt_chunks:
        store = Store(machine_for(device))
        for block in blocks:
            block.forward = fpdt_block(block, config.fpdt_chunks, mesh.groups["ulysses"], store)
        model.forward = partial(loss_in_chunks, model, config.fpdt_chunks)


def give_memory(model: Any, device: torch.device | str, tie: bool) -> None:
    """Allocate a model that is on the meta device. Its weights are uninitialized."""
    model.to_empty(device=device)
    if tie:
        model.lm_head.weight = model.model.embed_tokens.weight
    for buffer in model.buffers():  # counters of the experts
        buffer.zero_()


def fill(model: Any, sizes: LlamaConfig, seed: int, device: torch.device | str, tie: bool) -> None:
    """Allocate a model that is on the meta device and initialize it."""
    give_memory(model, device, tie)
    if isinstance(model, ParallelLlama):
        parallel_linear.init_weights(model, sizes.layers, seed)
    else:
        llama.init_weights(model, seed)
    init_moe(model, sizes.layers, seed)


def alone(sizes: LlamaConfig, moe: MoEConfig | None = None, device: torch.device | str = "cpu") -> Llama:
    """The full model in one process. On the meta device it has shapes and no memory."""
    own = {"feed_forward": lambda config, parts: MoE(moe, None, None, parts=parts)} if moe else {}
    with torch.device("meta"):
        model = Llama(sizes, **own)  # type: ignore[arg-type]
    if str(device) != "meta":
        fill(model, sizes, 0, device, tie=sizes.tied)
        freeze(model, sizes)
    return model


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def freeze(model: Any, sizes: LlamaConfig) -> None:
    """Freeze all but the adapters of a model that has them.

    The embedding's output requires a gradient all the same, though it is not used. So the first block
    computes and sends what every other block does, and hooks at the end of its backward are called.
    """
    if not sizes.lora_rank:
        return
    for name, p in model.named_parameters():
        p.requires_grad_(is_adapter(name))
    if model.model.embed_tokens is not None:
        model.model.embed_tokens.register_forward_hook(lambda module, given, out: out.requires_grad_())


def through(x: Tensor, blocks: Iterable[Any], cos: Tensor, sin: Tensor) -> Tensor:
    """Run x through these blocks. Domino's halves run through all of them at once, unless blocks have hooks,
    as with ZeRO-3; then the halves are joined at each block."""
    blocks = list(blocks)
    if all(isinstance(block, HalvedBlock) and not has_hooks(block) for block in blocks):
        return in_halves(x, blocks, cos, sin)
    for block in blocks:
        x = block(x, cos, sin)
    return x


def loss_in_chunks(model: Any, chunks: int, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    """Forward pass of a model with `fpdt_chunks`: the sum of the losses, without all logits at once."""
    config = model.config
    cos, sin = rope_tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    x = model.model.embed_tokens(tokens)
    for block in model.model.layers:
        x = block(x, cos, sin)
    return chunked_loss(chunked(model.model.norm, chunks)(x), model.lm_head.weight, labels, chunks)


class Stage(nn.Module):
    """Some layers of a model, with the embedding before the first and norm and output layer after the last.

    Takes tokens [B, S] or the previous stage's hidden states, returns hidden states or logits. The layers
    belong to `model`, which has the parameters under their names in the full model.
    """

    def __init__(self, model: Any, layers: range, positions: Tensor) -> None:
        super().__init__()
        config = model.config
        self.positions = positions
        self.rope = (config.head_dim, config.rope_theta, config.rope_scaling)
        self.first = layers.start == 0
        self.last = layers.stop == config.layers
        self.embed_tokens: Any = model.model.embed_tokens if self.first else None
        self.layers = nn.ModuleList(model.model.layers[str(i)] for i in layers)
        self.norm: Any = model.model.norm if self.last else None
        self.lm_head: Any = model.lm_head if self.last else None

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = rope_tables(self.positions, *self.rope)
        x = self.embed_tokens(x) if self.first else x
        x = through(x, self.layers, cos, sin)
        return self.lm_head(self.norm(x)) if self.last else x


def my_positions(seq_len: int, mesh: Mesh, kind: str, fpdt_chunks: int = 0) -> Tensor:
    """Positions in the sequence of the tokens that this rank holds, [S / cp]."""
    if fpdt_chunks:
        return fpdt_positions(seq_len, mesh.cp_rank, mesh.cp, fpdt_chunks)
    if mesh.cp == 1:
        return torch.arange(seq_len)
    ring = (mesh.place["ring"], mesh.sizes["ring"])
    all_to_all = (mesh.place["ulysses"], mesh.sizes["ulysses"])
    if kind == "usp":
        return usp_positions(LAYOUTS[kind], seq_len, *ring, *all_to_all)
    return layout_positions(LAYOUTS[kind], seq_len, mesh.cp_rank, mesh.cp)


def cross_entropy_sum(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the losses of this rank's tokens. Ranks of a tensor group get the same value."""
    return (model.cross_entropy if isinstance(model, ParallelLlama) else model.parts.cross_entropy)(logits, labels)


# ---------------------------------------------------------------------- full weights, by Hugging Face's names


class Lazy(Mapping[str, Any]):
    """A mapping that makes its values on access, without a cache. Iteration holds one value at a time."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Any]) -> None:
        self.names = {name: name for name in names}
        self.make = make

    def __getitem__(self, name: str) -> Any:
        return self.make(self.names[name])  # KeyError for others

    def __contains__(self, name: object) -> bool:  # without making it
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def whole_names(model: nn.Module, name: str) -> list[str]:
    """The names under which a rank's parameter is saved: its own, or one for each expert stacked in it."""
    return expert_names(model, name) or [full_name(model, name)]


def full_shapes(sizes: LlamaConfig, moe: MoEConfig | None = None) -> dict[str, Tensor]:
    """Every parameter of the full model, and the routers' biases, which follow from counts; on "meta"."""
    model = alone(sizes, moe, "meta")
    whole: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *state_buffers(model).items()]:
        names = whole_names(model, name)
        whole |= zip(names, tensor.detach() if len(names) > 1 else [tensor.detach()], strict=True)
    return whole


def own_names(model: nn.Module, name: str, mesh: Mesh) -> list[str]:
    """The part of a parameter's `whole_names` that this rank has: only its own experts."""
    names = whole_names(model, name)
    each = len(names) // mesh.size("ep")
    first = dist.get_rank(mesh.groups["ep"]) * each
    return names[first : first + each] if expert_names(model, name) else names


def held_names(model: nn.Module, mesh: Mesh) -> set[str]:
    """The full tensors of which a rank needs its shards."""
    mine = [*dict(model.named_parameters()), *state_buffers(model)]
    return {whole for name in mine for whole in own_names(model, name, mesh)}


def state_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a model learns besides its parameters, the same on every rank that has the layer."""
    kept = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def join_pieces(model: nn.Module, name: str, piece: Tensor, mesh: Mesh) -> Tensor:
    """Join the tensor group's shards of a parameter (the weight, or an optimizer's moment).

    Collective over that group. On a GPU shards are gathered on the device, and the result is in host memory.
    """
    if mesh.sizes["tp"] == 1:
        return piece
    here = piece.to(next(model.parameters()).device)
    return parallel_llama.full_state_dict(model, mesh.groups["tp"], {name: here})[name]


def cut_tensors(
    model: nn.Module, whole: Mapping[str, Tensor], mesh: Mesh, names: Iterable[str]
) -> Mapping[str, Tensor]:
    """The inverse: this rank's shards of these parameters, from full tensors. Each is made on access."""
    held = shards(model) if mesh.sizes["tp"] > 1 else {}

    def cut(name: str) -> Tensor:
        mine = [whole[each] for each in own_names(model, name, mesh)]
        tensor = torch.stack(mine) if expert_names(model, name) else mine[0]
        # A copy, since a view would keep the full tensor; contiguous, since fused AdamW assumes that a state
        # has the memory layout of its weight.
        return held[name].cut(tensor).clone(memory_format=torch.contiguous_format) if held else tensor

    return Lazy(names, cut)


def ranks_that_hold(model: Any, mesh: Mesh) -> dict[str, int]:
    """For each parameter, how many ranks hold the same shard, besides those that share its gradient's sum."""
    tp = mesh.sizes["tp"]
    held = shards(model) if tp > 1 else {}
    copies = {name: tp // held[name].pieces if held else 1 for name, _ in model.named_parameters()}
    return {name: 2 * count if name in model.shared else count for name, count in copies.items()}
