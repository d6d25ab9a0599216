"""Tensor and sequence parallelism, one transformer block: heads, norms, dropout, and what autograd saves.

Problem. With tensor parallelism alone, everything outside the matrix products is replicated: all t ranks
normalise the same tokens and save the same bytes for backward. And the matrices of attention can be split
only between heads, but there may be fewer key/value heads than ranks.

Idea. Outside the products no operation mixes tokens, so each rank can take S/t of them. The all-reduce
becomes a reduce-scatter and a later all-gather, at the same cost (2205.05198, section 4.2.2). Inside, split
by heads, because attention mixes tokens but no heads.

    all S, or S/t                 N/t heads                     all S, or S/t              F/t columns
    x -> norm -> f or g -> q, k, v, attention, o -> f* or g* -> drop, +, norm -> f or g -> MLP -> f* or g* -> drop, +

    stored on 4 ranks                        rank 0      rank 1      rank 2      rank 3
    query heads, N = 8                       0, 1        2, 3        4, 5        6, 7
    key/value heads, N_kv = 4                0           1           2           3
    key/value heads, N_kv = 2                0           0           1           1        copies: sum gradients
    tokens of x, S = 8, sequence parallel    0, 1        2, 3        4, 5        6, 7

Partial gradients. Two ranks with the same key/value head use it for different query heads; with sequence
parallel, ranks with the same norm weight see different tokens. `sync_replicated_gradients` sums them.

Formulas for a block: n = B S H elements of e bytes; h = 1/t with sequence parallel, 1 without. Saved bytes
are counted as in 2205.05198, section 4.1, but for RMSNorm, SwiGLU, grouped heads and fused attention.
    sent                        8 (t-1)/t n e  as 4 all-reduces, or as 4 all-gathers and 4 reduce-scatters;
                                2 (t-1)/t n e  in 2 more all-gathers, of what sequence parallel did not save
    saved outside the products  (6 n + 2 B S) e h                     see `kept_bytes`; + 2 n h with dropout
    saved inside                (2 n + 2 B S D max(N_kv, t) + 4 B S F + B S N) e / t

Run it:
    python parallel_block.py                                                     one rank, CPU or GPU
    torchrun --nproc_per_node 4 parallel_block.py --kv-heads 2                   more ranks than key/value heads
    torchrun --nproc_per_node 2 parallel_block.py --dropout 0.1                  Gloo on CPU, NCCL on GPU
Each runs with and without sequence parallel. The last line is PASS, or it exits with 1 and says which number is off.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tensor_parallel_demo import OneLineParser, Report, Wire, kept_for_backward, launch, tokens_of_text
from parallel_linear import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    Shard,
    TensorParallel,
    cannot_divide,
    columns,
    init_weights,
    initial_weight,
    shards,
    swiglu,
)
from torch import Tensor, nn

# Legend of shapes: B batch, S sequence, H hidden, N query heads, N_kv key/value heads, G = N / N_kv, D head dim,
# F intermediate size, t ranks of the tensor group. S/t is S sharded over that group.

# ----------------------------------------------------------------------------- the same as on a single device


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama. Any object with these attributes can be used as a `config`."""

    vocab_size: int = 256
    hidden: int = 64
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    intermediate: int = 128
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False
    # Other configs may lack the following.
    qkv_bias: bool = False  # as in Qwen2
    qk_norm: bool = False  # as in Qwen3, over each head of q and of k
    own_head_dim: int = 0  # the head dimension if it is not hidden / heads, otherwise 0
    rope_scaling: tuple[float, float, float, int] | None = None  # as in Llama 3.1
    lora_rank: int = 0  # of adapters
    lora_scale: float = 1.0

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or self.hidden // self.heads


def head_dim_of(config: Config) -> int:
    return getattr(config, "head_dim", 0) or config.hidden // config.heads


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's rotation angles, [S, D/2], in fp32 for every dtype of the model.
    `scaling` is Llama 3.1's (factor, low, high, length), which chapter 01 explains."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    speed = 1.0 / theta**exponent
    if scaling is not None:
        factor, low, high, length = scaling
        wavelength = 2 * math.pi / speed
        kept = (length / wavelength - low) / (high - low)
        slowed = torch.where(wavelength > length / low, speed / factor, (1 - kept) * speed / factor + kept * speed)
        speed = torch.where(wavelength < length / high, speed, slowed)
    angle = positions[..., None].float() * speed
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos = cos[..., None, :]
    sin = sin[..., None, :]  # the same rotation for every head
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """PyTorch's fused attention. q [B, S, N, D], k and v [B, S, N_kv, D] -> [B, S, N, D]; any N that N_kv divides."""
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


@dataclass(frozen=True)
class Parts:
    """The functions that other chapters replace. None of them depends on ranks."""

    attention: Callable[..., Tensor] = attention  # (q, k, v, *, causal)
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear  # (x, weight [out, in])
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm  # (x, weight, eps)
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = apply_rope  # (x, cos, sin)
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu  # (gate, up)


# ---------------------------------------------------------------------------------------------------------- dropout

# Replicated activations need the same mask on every rank, or the copies of the residual stream diverge.
# Sharded ones need a different mask on each, or every shard drops the same positions (1909.08053, appendix).
# Each call draws a key from PyTorch's default CPU generator, and a mask from (key, stream). All ranks of a
# tensor group must seed that generator alike, and other replicas differently. torch.utils.checkpoint restores
# it, so a recomputation gets the same keys and masks.


def new_key() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


def drop_with(x: Tensor, p: float, key: int, stream: int) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(key + stream)
    dropped = torch.rand(x.shape, generator=generator, device=x.device) < p
    return x.masked_fill(dropped, 0.0) / (1 - p)  # autograd saves the mask, one byte per element


def dropout(x: Tensor, p: float, tp: TensorParallel, sharded: bool) -> Tensor:
    """Zero a fraction p of x and scale the rest. `sharded`: ranks have different parts of one activation."""
    # --- exercise 4.25: one mask for all, or one for each rank ---
    return drop_with(x, p, new_key(), stream=1 + tp.rank if sharded else 0)
    # --- end exercise ---


def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, drop: Callable[[Tensor], Tensor]
) -> Tensor:
    """Attention by explicit products, with dropout on the weights; fused kernels use their own generator. It
    saves [S, S] per head: the 5 a s² b bytes of 2205.05198, 2 (weights) + 1 (mask) + 2 (dropped)."""
    B, S, N, D = q.shape
    rows = q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)  # [B, S, N, D] -> [B, N_kv, G, S, D]
    rows = rows.flatten(2, 3) / math.sqrt(D)  # [B, N_kv, G S, D]
    scores = (rows @ k.permute(0, 2, 3, 1)).view(B, N, S, S)
    if causal:
        scores = scores + torch.full((S, S), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = drop(scores.softmax(-1)).view(B, k.shape[2], -1, S)  # [B, N_kv, G S, S]
    return (weights @ v.transpose(1, 2)).view(B, N, S, D).transpose(1, 2)


# ------------------------------------------------------------------------------------------ partial gradients


def sum_over_holders(grads: list[Tensor], held: list[Shard], group: dist.ProcessGroup) -> list[Tensor]:
    """For each gradient, its sum over the ranks with the same piece, in one all-reduce for all gradients.

    Each piece has its own slot in the message, which is zero on the ranks without that piece. So the ranks of
    one key/value head need no process group of their own.
    """
    # --- exercise 4.26: sum shares of the same piece, and only those ---
    slots = [
        torch.zeros(shard.pieces, grad.numel(), dtype=grad.dtype, device=grad.device)
        for grad, shard in zip(grads, held, strict=True)
    ]
    for slot, grad, shard in zip(slots, grads, held, strict=True):
        slot[shard.index] = grad.flatten()
    message = torch.cat([slot.flatten() for slot in slots])
    dist.all_reduce(message, group=group)
    parts = message.split([slot.numel() for slot in slots])
    return [p.view(s.pieces, -1)[s.index].view_as(grad) for p, s, grad in zip(parts, held, grads, strict=True)]
    # --- end exercise ---


def sync_replicated_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum partial gradients after a step's last backward, before or after the sum over data-parallel ranks.

    Partial: weights of norms with sequence parallel (S/t tokens), of norms of q and k, of K and V if ranks share
    heads, and of an adapter's replicated matrix (own heads or columns). Parts of one gradient: sum, not mean.
    """
    found = [(model.get_parameter(name), shard) for name, shard in shards(model).items() if shard.partial]
    found = [(p, shard) for p, shard in found if p.grad is not None]
    if found:
        whole = sum_over_holders([p.grad for p, _ in found], [shard for _, shard in found], group)
        for (p, _), grad in zip(found, whole, strict=True):
            p.grad.copy_(grad)  # in place, because the gradient may be a view of a bucket


def sync_in_backward(model: nn.Module, group: dist.ProcessGroup) -> None:
    """The same by a hook on each such parameter: every backward then gives full gradients, at the cost of one
    all-reduce per parameter. Needed if gradients are consumed during backward, as ZeRO does. Call it once,
    after freezing: frozen parameters get no hook."""
    for name, shard in shards(model).items():
        p = model.get_parameter(name)
        if shard.partial and p.requires_grad:
            p.register_hook(lambda grad, shard=shard: sum_over_holders([grad], [shard], group)[0])


# -------------------------------------------------------------------------------------------------------- the block


class Norm(nn.Module):
    """RMSNorm with a replicated weight; with sequence parallel each rank applies it to different tokens. With
    `head_dim` elements it is applied to the heads of a rank, with sequence parallel and without."""

    def __init__(self, config: Config, tp: TensorParallel, parts: Parts, head_dim: int = 0):
        super().__init__()
        self.eps = config.norm_eps
        self.norm = parts.norm
        size = head_dim or config.hidden
        self.shard = Shard(size, 0, 1, 0, partial=tp.sequence_parallel)
        if head_dim:  # each rank has different heads, so its gradient is partial
            self.shard = Shard(size, 0, 1, 0, partial=tp.size > 1)
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


class ParallelAttention(nn.Module):
    """Each rank computes N/t query heads and their N_kv/t key/value heads, or one that other ranks also have.
    With local indices, query head i still uses key/value head i // G, so any `parts.attention` works."""

    def __init__(self, config: Config, tp: TensorParallel, parts: Parts, p: float = 0.0):
        super().__init__()
        check_sizes(config, tp.size)
        if p and parts.attention is not type(parts).attention:  # others may not drop, or may communicate
            raise ValueError(f"dropout {p} needs the attention of this file, not another parts.attention; use p = 0")
        self.tp = tp
        self.parts = parts
        self.p = p
        self.head_dim = head_dim_of(config)
        width = config.heads * self.head_dim
        kv_width = config.kv_heads * self.head_dim
        # --- exercise 4.27: which key/value heads does a rank hold, also when there are fewer of them than ranks? ---
        pieces = min(config.kv_heads, tp.size)
        self.q_proj = ColumnParallelLinear(config.hidden, width, tp, parts.linear)
        self.k_proj = ColumnParallelLinear(config.hidden, kv_width, tp, parts.linear, pieces)
        self.v_proj = ColumnParallelLinear(config.hidden, kv_width, tp, parts.linear, pieces)
        # --- end exercise ---
        self.o_proj = RowParallelLinear(width, config.hidden, tp, parts.linear)
        normed = getattr(config, "qk_norm", False)
        self.q_norm = Norm(config, tp, parts, self.head_dim) if normed else None
        self.k_norm = Norm(config, tp, parts, self.head_dim) if normed else None
        if getattr(config, "qkv_bias", False):
            for layer in (self.q_proj, self.k_proj, self.v_proj):
                layer.add_bias()
        add_adapters(config, self)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.o_proj(self.inner(x, cos, sin))  # [B, S, H/t] -> [B, S, H], or S/t

    def inner(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The part between the two messages: [B, S, H] or [B, S/t, H] -> [B, S, H/t], this rank's heads."""
        q, k, v = columns(x, [self.q_proj, self.k_proj, self.v_proj])  # one collective for the three
        # [B, S, H/t] -> [B, S, N/t, D]; k and v [B, S, N_kv/t, D]
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.q_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = self.parts.rope(q, cos, sin)
        k = self.parts.rope(k, cos, sin)
        core = self.parts.attention
        if self.p and self.training:  # heads are sharded, with sequence parallel and without
            core = partial(attention_with_dropout, drop=partial(dropout, p=self.p, tp=self.tp, sharded=True))
        return core(q, k, v, causal=True).flatten(-2)  # [B, S, N/t, D] -> [B, S, H/t]


def parallel_mlp(config: Config, tp: TensorParallel, parts: Parts) -> nn.Module:
    return add_adapters(config, ParallelMLP(config.hidden, config.intermediate, tp, parts.linear, parts.swiglu))


def add_adapters(config: Config, module: nn.Module) -> nn.Module:
    """Add the config's adapters, if any, to the module's linear layers."""
    if rank := getattr(config, "lora_rank", 0):
        for layer in module.children():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                layer.add_adapter(rank, config.lora_scale)
    return module


class ParallelBlock(nn.Module):
    """x and the result are [B, S, H] on every rank, or with sequence parallel this rank's [B, S/t, H].

    cos and sin are for all S tokens. `feed_forward` makes the second half; p is the dropout rate for
    attention weights and both residual branches. ValueError for p > 0 if `parts.attention` was replaced.
    """

    def __init__(
        self,
        config: Config,
        tp: TensorParallel,
        parts: Parts,
        feed_forward: Callable[..., nn.Module] = parallel_mlp,
        p: float = 0.0,
    ):
        super().__init__()
        self.tp, self.p = tp, p
        self.input_layernorm = Norm(config, tp, parts)
        self.self_attn = ParallelAttention(config, tp, parts, p)
        self.post_attention_layernorm = Norm(config, tp, parts)
        self.mlp = feed_forward(config, tp, parts)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))

    def drop(self, x: Tensor) -> Tensor:
        if not (self.p and self.training):
            return x
        return dropout(x, self.p, self.tp, sharded=self.tp.sequence_parallel)


def check_sizes(config: Config, ranks: int, sequence: int = 0) -> None:
    """ValueError with one line that names fitting sizes. `sequence`: its length, if ranks have S/t tokens."""
    own = getattr(config, "own_head_dim", 0)  # then the hidden size does not matter
    if own % 2:
        raise ValueError(f"own-head-dim {own} is odd; use an even number")
    least = 2 * config.heads
    if not own and config.hidden % least:
        raise ValueError(f"hidden {config.hidden} / {config.heads} heads is not even; use a multiple of {least}")
    if config.heads % config.kv_heads:
        fitting = ", ".join(str(n) for n in range(1, config.heads + 1) if config.heads % n == 0)
        raise ValueError(f"kv-heads {config.kv_heads} do not divide {config.heads} heads; use {fitting}")
    if config.kv_heads % ranks and ranks % config.kv_heads and config.heads % ranks == 0:
        fitting = ", ".join(
            str(n) for n in range(1, config.heads + 1) if config.heads % n == 0 and (n % ranks == 0 or ranks % n == 0)
        )
        raise ValueError(
            f"kv-heads {config.kv_heads} and {ranks} ranks: one must divide the other; use {fitting} kv-heads"
        )
    for what, size in (("heads", config.heads), ("intermediate size", config.intermediate), ("sequence", sequence)):
        if problem := cannot_divide(ranks, what, size):
            raise ValueError(problem)


def one_by_one(x: Tensor, blocks: Iterable[Callable[..., Tensor]], cos: Tensor, sin: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, cos, sin)
    return x


def kept_bytes(
    config: Config, B: int, S: int, tp: TensorParallel, e: int, dropout: bool = False, gather_again: bool = True
) -> dict[str, int]:
    """Bytes that autograd saves for one block on one rank, by kind, counted as in 2205.05198, section 4.1.

    e is the size of an element of x and of the weights: 8, 4, or 2 bytes. Below fp32 a norm saves its input
    as the fp32 copy of which it took the mean, and 1/rms is also in fp32, as is the log-sum-exp of attention.
    RoPE tables and weights are no activations and are left out. The sum of the values is the total. On a GPU
    no fused attention supports float64, so the scores are saved as well.
    """
    wide = max(e, 4)
    n = B * S * config.hidden
    t = tp.size
    heads = config.heads // tp.size
    q = B * S * config.heads * head_dim_of(config)
    h = t if tp.sequence_parallel else 1  # the divisor of the region outside the products
    kv = max(config.kv_heads // t, 1) * head_dim_of(config)
    normed = getattr(config, "qk_norm", False)
    kept = {
        "norms: their inputs in fp32 or better": 2 * n // h * wide,
        "norms: normalised inputs": 2 * n // h * e,
        "norms: 1/rms": 2 * B * S // h * wide,
        "inputs of q, k, v and of gate, up": 2 * n * e // (h if gather_again else 1),
        "masks of dropout outside the products": 2 * n // h * dropout,
        "q, k, v and the output of attention": (2 * q // t + 2 * B * S * kv) * e,
        "log-sum-exp of attention": B * S * heads * wide * (not dropout),
        "norms of q and k": normed * (q // t + B * S * kv) * (wide + e),
        "norms of q and k: 1/rms": normed * B * S * (heads + max(config.kv_heads // t, 1)) * wide,
        "weights of attention: as they were, mask, dropped": B * S * S * heads * (2 * e + 1) * dropout,
        "gate, silu(gate), up, their product": 4 * B * S * config.intermediate // t * e,
    }
    return {what: size for what, size in kept.items() if size}


# ------------------------------------------------------------------------------------------------------------- demo


def reference_block(
    x: Tensor, w: dict[str, Tensor], config: Config, cos: Tensor, sin: Tensor, drops: Callable | None = None
) -> Tensor:
    """The reference: the same block on one device, without any parallel code from above. `drops(y, dim)`
    drops what t ranks together would drop from a y that is sharded in dimension `dim`."""
    drops = drops or (lambda y, dim: y)
    S = x.shape[1]
    groups = config.heads // config.kv_heads
    norm = rms_norm(x, w["input_layernorm.weight"], config.norm_eps)
    names = [f"self_attn.{name}_proj" for name in "qkv"]
    q, k, v = (F.linear(norm, w[f"{name}.weight"], w.get(f"{name}.bias")) for name in names)
    q, k, v = (y.unflatten(-1, (-1, cos.shape[-1] * 2)) for y in (q, k, v))
    if "self_attn.q_norm.weight" in w:
        q, k = (rms_norm(y, w[f"self_attn.{n}_norm.weight"], config.norm_eps) for y, n in ((q, "q"), (k, "k")))
    q = apply_rope(q, cos, sin)
    k = apply_rope(k, cos, sin)
    k, v = (y.repeat_interleave(groups, dim=2) for y in (k, v))  # [B, S, N_kv, D] -> [B, S, N, D]
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1), -math.inf)
    mixed = torch.einsum("bnst,btnd->bsnd", drops(scores.softmax(-1), 1), v)
    x = x + drops(F.linear(mixed.flatten(-2), w["self_attn.o_proj.weight"]), -2)
    norm = rms_norm(x, w["post_attention_layernorm.weight"], config.norm_eps)
    inner = swiglu(F.linear(norm, w["mlp.gate_proj.weight"]), F.linear(norm, w["mlp.up_proj.weight"]))
    return x + drops(F.linear(inner, w["mlp.down_proj.weight"]), -2)


def drops_of_all_ranks(p: float, ranks: int, sequence_parallel: bool) -> Callable[[Tensor, int], Tensor]:
    """The masks of all ranks combined on one device, for `reference_block`."""

    def drops(y: Tensor, dim: int) -> Tensor:
        key = new_key()
        sharded = dim == 1 or sequence_parallel  # dim 1 is the heads, dim -2 the tokens
        if not p:
            return y
        if not sharded:
            return drop_with(y, p, key, 0)
        return torch.cat([drop_with(piece, p, key, 1 + r) for r, piece in enumerate(y.chunk(ranks, dim))], dim)

    return drops


def block_weights(config: Config, like: Tensor) -> dict[str, Tensor]:
    """The full weights of a block by name, on the device and in the dtype of `like`."""
    H = config.hidden
    F_ = config.intermediate
    D = head_dim_of(config)
    q = config.heads * D
    kv = config.kv_heads * D
    shapes = {f"self_attn.{n}_proj.weight": (out, H) for n, out in (("q", q), ("k", kv), ("v", kv))}
    shapes |= {"self_attn.o_proj.weight": (H, q)}
    shapes |= {"mlp.gate_proj.weight": (F_, H), "mlp.up_proj.weight": (F_, H), "mlp.down_proj.weight": (H, F_)}
    if config.qkv_bias:
        shapes |= {f"self_attn.{n}_proj.bias": (out,) for n, out in (("q", q), ("k", kv), ("v", kv))}
    if config.qk_norm:
        shapes |= {f"self_attn.{n}_norm.weight": (D,) for n in "qk"}
    shapes |= {f"{name}_layernorm.weight": (H,) for name in ("input", "post_attention")}
    full = {name: initial_weight(name, shape, 1, seed=0) for name, shape in shapes.items()}
    return {name: value.to(like).requires_grad_() for name, value in full.items()}


def demo(args: argparse.Namespace, config: Config, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """One block next to the reference, with and without sequence parallel."""
    B = 2
    S = args.sequence
    t = dist.get_world_size(group)
    report = Report(group)
    table = initial_weight("embed.weight", (256, config.hidden), 1, seed=0)
    x = F.embedding(tokens_of_text(B, S), table).to(device, torch.float64)
    cos, sin = rope_tables(torch.arange(S, device=device), head_dim_of(config), config.rope_theta, config.rope_scaling)
    n = x.nbytes
    for sequence in (False, True):
        tp = TensorParallel(group, sequence)
        block = ParallelBlock(config, tp, Parts(), p=args.dropout)
        init_weights(block, layers=1, seed=0)
        block.to(device, torch.float64)
        mine = Shard(S, 1, t if sequence else 1, tp.rank if sequence else 0).cut  # [B, S/t, H] of [B, S, H]

        w = block_weights(config, x)
        want_x = x.clone().requires_grad_()
        torch.manual_seed(0)  # the default generator, seeded alike on all ranks and here
        want = reference_block(want_x, w, config, cos, sin, drops_of_all_ranks(args.dropout, t, sequence))
        want.backward(want.detach())
        my_x = mine(x).clone().requires_grad_()
        torch.manual_seed(0)
        leave_out = [*block.parameters(), cos, sin]
        with Wire(t) as forward:
            z, kept = kept_for_backward(lambda block=block, my_x=my_x: block(my_x, cos, sin), leave_out)
        with Wire(t) as backward:
            z.backward(mine(want.detach()))
        sync_replicated_gradients(block, group)
        report.compare(z, mine(want))
        report.compare(my_x.grad, mine(want_x.grad))
        for name, shard in shards(block).items():
            report.compare(block.get_parameter(name).grad, shard.cut(w[name].grad))

        report.title(f"{t} rank(s), tensor parallel{' and sequence parallel' * sequence}, dropout {args.dropout}")
        report.add_errors("largest error against the reference")
        plan = {"all-gather": (2, 4), "reduce-scatter": (2, 2)} if sequence else {"all-reduce": (2, 2)}
        for name, counts in plan.items():
            report.add(f"{name}s in forward, backward", counts, (forward.calls[name], backward.calls[name]))
        report.add("bytes sent by a rank", (8 + 2 * sequence) * (t - 1) * n // t, forward.bytes + backward.bytes)
        parts = kept_bytes(config, B, S, tp, x.element_size(), dropout=args.dropout > 0)
        want = sum(parts.values())
        exact = device.type == "cpu" or args.dropout > 0
        report.add("bytes kept for backward", want, kept, None if exact else kept >= want)  # see `kept_bytes`
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="A transformer block on several ranks.", allow_abbrev=False)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=48)
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout} is not a rate; use 0 or more, less than 1")
    for option in ("hidden", "heads", "kv_heads", "intermediate", "sequence"):
        if not 1 <= getattr(args, option) <= 4096:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)} is not in 1 .. 4096")
    config = Config(hidden=args.hidden, heads=args.heads, kv_heads=args.kv_heads, intermediate=args.intermediate)
    try:
        check_sizes(config, int(os.environ.get("WORLD_SIZE", "1")), args.sequence)
    except ValueError as error:
        parser.error(str(error))
    launch(lambda group, device: demo(args, config, group, device))


if __name__ == "__main__":
    main()
