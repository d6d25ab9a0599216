"""Chapter 1, the model: a Llama short enough to read, and exact enough to be the later chapters' reference.

The problem. In chapter 11 this model runs on many GPUs, split along five axes. Each split must compute the
same as the model on one device. Here is that model. With the same weights it gives the logits of Hugging
Face's `LlamaForCausalLM`, and its parameters have the same names.

The idea. A decoder is a stack of equal blocks on a residual stream x of shape [B, S, H]:

    tokens -> embed_tokens -> x
                              x = x + o_proj(attention(rope(q), rope(k), v))     q, k, v = projections of norm(x)
                              x = x + down_proj(silu(gate) * up)                 gate, up = projections of norm(x)
                              ... L blocks ...
                              norm -> lm_head -> logits [B, S, V]

    norm:       x / sqrt(mean(x^2) + eps) * weight                                             RMSNorm, 1910.07467
    rope:       (a, b) -> (a cos t - b sin t, b cos t + a sin t), t = position / theta^(2i/D)  RoPE, 2104.09864
    attention:  softmax(q k^T / sqrt(D)) v, where G query heads share one key/value head       GQA, 2305.13245
                Qwen2 adds biases to q, k, v; Qwen3 puts an RMSNorm over each head of q and k  2505.09388
    MLP:        W_down (silu(W_gate x) * (W_up x))                                             SwiGLU, 2002.05202

Each thing that a later chapter replaces is one function in `Parts` (attention, linear, norm, rope, swiglu,
cross_entropy) or one argument of `Llama` (feed_forward, recompute).

Recomputation trades FLOPs for bytes:   none       save all that autograd needs
                                        selective  free the inside of attention, recompute it in backward
                                        full       save the input of each block, recompute the block

    python llama.py      fused against explicit attention, and bytes saved in each mode; ends with PASS

Shapes: B batch, S sequence, H hidden, N query heads, N_kv key/value heads, G = N / N_kv, D head dim (mostly H / N),
F intermediate size of the MLP, V vocabulary, L layers.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MODES = ("none", "selective", "full")  # of recomputation
IGNORE = -100  # the label of tokens without a target: padding, or a prompt

# ------------------------------------------------------------------------------------------------ configuration


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes that define a Llama. The defaults are the model that training_step.py trains."""

    vocab_size: int = 256
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 344
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False  # as in Qwen2: q, k, v = x Wᵀ + b
    qk_norm: bool = False  # as in Qwen3: an RMSNorm over each head of q and of k, before RoPE
    own_head_dim: int = 0  # the head dimension if it is not hidden / heads, otherwise 0
    rope_scaling: tuple[float, float, float, int] | None = None  # as in Llama 3.1: see `rope_frequencies`
    lora_rank: int = 0  # of the adapters of the blocks' linear layers; 0: none
    lora_scale: float = 1.0  # factor of an adapter: alpha / rank

    def __post_init__(self) -> None:
        if self.rope_scaling is not None:  # from JSON it is a list
            object.__setattr__(self, "rope_scaling", tuple(self.rope_scaling))
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "intermediate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.hidden % self.heads and not self.own_head_dim:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head dim {self.head_dim} must be even: RoPE rotates pairs")

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Width of q and of attention's output over all heads: hidden, unless own_head_dim is set."""
        return self.heads * self.head_dim


TINY = LlamaConfig(vocab_size=64, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48)
LLAMA3_8B = LlamaConfig(128256, 4096, 32, 32, 8, 14336, rope_theta=500000.0)
LLAMA3_70B = LlamaConfig(128256, 8192, 80, 64, 8, 28672, rope_theta=500000.0)
LLAMA3_405B = LlamaConfig(128256, 16384, 126, 128, 8, 53248, rope_theta=500000.0)

# ------------------------------------------------------------------- the functions that later chapters replace


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast bf16 and fp16 to fp32, in which sums over many terms are safe; fp32 and fp64 are not changed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (1910.07467). The mean is taken in fp32 or better."""
    # --- exercise 1.21: RMSNorm, with the statistics in fp32 whatever the dtype of x ---
    wide = at_least_fp32(x)
    inverse_rms = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse_rms).to(x.dtype)
    # --- end exercise ---


def rope_frequencies(
    head_dim: int, theta: float, scaling: Sequence[float] | None, device: torch.device | str
) -> Tensor:
    """The angle per position of each of the D/2 pairs, in fp32.

    `scaling` (factor, low, high, length) is as in Llama 3.1, which was first trained on `length` positions. A
    pair that rotates more than `high` times within them keeps its frequency. One that rotates less than `low`
    times is slowed down by `factor`, so that longer texts give no angle that is new to the model. Between the
    two, the frequency is interpolated in the number of rotations.
    """
    exponent = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    speed = 1.0 / theta**exponent
    if scaling is None:
        return speed
    factor, low, high, length = scaling
    wavelength = 2 * math.pi / speed  # positions for one rotation
    kept = (length / wavelength - low) / (high - low)
    mixed = (1 - kept) * speed / factor + kept * speed
    slowed = torch.where(wavelength > length / low, speed / factor, mixed)
    return torch.where(wavelength < length / high, speed, slowed)


def rope_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of every rotation angle, [..., S, D/2], in fp32 for every dtype of the model.

    bf16 has 8 significant bits and cannot distinguish positions 1000 and 1001, so neighbours far along would
    rotate alike. `positions` are an argument, because a context-parallel rank's tokens do not start at 0.
    """
    angle = positions[..., None].float() * rope_frequencies(head_dim, theta, scaling, positions.device)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+D/2}) of every head by the angle of their position. x [B, S, N, D] -> same shape.

    Pairing i with i + D/2 (not 2i with 2i + 1 as in the paper) is the layout of Hugging Face's Llama weights.
    """
    # --- exercise 1.22: rotate each pair by its angle; the product is taken in fp32 ---
    cos = cos[..., None, :]
    sin = sin[..., None, :]  # [..., S, D/2] -> [..., S, 1, D/2]: alike for all heads
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    # --- end exercise ---


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v by PyTorch's fused kernel. q [B, S, N, D], k and v [B, S, N_kv, D] -> [B, S, N, D].

    With `enable_gqa` the kernel reads each K/V head G times and writes no copies; on CUDA in bf16 and fp16 only.
    """
    q = q.transpose(1, 2)  # [B, S, N, D] -> [B, N, S, D]
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def attention_math(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """The same by explicit matrix products: the readable reference. It stores the full [S, S] score matrix.

    Query heads gG .. gG+G-1 share K/V head g. Instead of copying K and V to all N heads, the G query heads of a
    group become more rows of one matrix product with their K/V head.
    """
    B, S, N, D = q.shape
    kv_heads = k.shape[2]
    # --- exercise 1.23: grouped-query attention in which K and V are never expanded ---
    rows = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, S, N_kv, G, D] -> [B, N_kv, G, S, D]
    rows = rows.reshape(B, kv_heads, -1, D) / math.sqrt(D)  # [B, N_kv, G·S, D]
    scores = at_least_fp32(rows @ k.permute(0, 2, 3, 1))  # [B, N_kv, G·S, D] @ [B, N_kv, D, S] -> [B, N_kv, G·S, S]
    scores = scores.view(B, kv_heads, -1, S, S)
    if causal:  # token i sees tokens 0..i: -inf above the diagonal
        scores = scores + torch.full((S, S), -math.inf, dtype=scores.dtype, device=q.device).triu(1)
    weights = scores.softmax(-1).to(v.dtype).view(B, kv_heads, -1, S)
    out = weights @ v.transpose(1, 2)  # [B, N_kv, G·S, S] @ [B, N_kv, S, D] -> [B, N_kv, G·S, D]
    return out.view(B, N, S, D).transpose(1, 2)
    # --- end exercise ---


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (2002.05202): the gate decides, per element, how much of `up` passes."""
    return F.silu(gate) * up


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """SUM of -log p(label) over the valid labels, in fp32 or better; logits [B, S, V], labels [B, S].

    A sum, not a mean, because the right divisor is known only from the full global batch. Without valid
    labels the sum is 0, but a mean would be 0 / 0 = NaN.
    """
    logits = at_least_fp32(logits).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


@dataclass(frozen=True)
class Parts:
    """The functions of a model. A later chapter replaces one: `Llama(config, replace(Parts(), norm=fused))`.

    The last three fuse several operations, if a later chapter has such a function. None: not fused.
    """

    attention: Callable[..., Tensor] = attention  # (q, k, v, *, causal)
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear  # (x, weight [out, in])
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm  # (x, weight, eps)
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = apply_rope  # (x, cos, sin)
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu  # (gate, up)
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy  # (logits, labels), a sum
    linears: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] | None = None  # (x, weights): x through each
    add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None  # (x, residual, weight, eps): norm of the sum, the sum
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # (x, weight, labels), a sum


class OneInput(torch.autograd.Function):
    """x Wᵀ for several W, each with its own gradient. The gradient of x is the sum of dy W over all of them:
    each product accumulates into it. Autograd would write each and add them in separate passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.flatten(0, -2)  # [..., in] -> [T, in]
        dys = [dy.flatten(0, -2) for dy in gradients]  # [T, out] each
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dys[0] @ weights[0]  # [T, out] [out, in] -> [T, in]
            for dy, weight in zip(dys[1:], weights[1:], strict=True):
                dx.addmm_(dy, weight)
            dx = dx.view(x.shape)
        needed = ctx.needs_input_grad[1:]
        dweights = [dy.t() @ rows if wanted else None for dy, wanted in zip(dys, needed, strict=True)]  # [out, in]
        return dx, *dweights


def linears_of_one_input(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """`linear(x, weight)` for each weight; x [..., in], weight [out, in] -> [..., out]. For `Parts.linears`.

    Under autocast x and weights are cast as `linear` casts them: all but float64.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weights = [weight.to(dtype) for weight in weights]
    return OneInput.apply(x, *weights)


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, but autograd saves only its inputs; backward calls it again to recompute the other tensors.

    It trades FLOPs for bytes (1604.06174). PyTorch's `checkpoint` also restores the random state for the
    second call (dropout must draw the same mask), and stops that call once the last saved tensor is rebuilt.
    """

    def run(*args: Tensor, **kwargs) -> Tensor:
        # --- exercise 1.24: keep the inputs only ---
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
        # --- end exercise ---

    return run


# ------------------------------------------------------------------------------------------------------ the model


class Factor(nn.Module):
    """One of the two matrices of an adapter, under the name that peft gives it: lora_A.weight [rank, in], or
    lora_B.weight [out, rank], which is initialised to zero."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))


class Linear(nn.Module):
    """y = x Wᵀ by `parts.linear`, and + b if there is a bias. weight [out, in].

    `lora`: (rank, scale) of an adapter (LoRA, 2106.09685), y = x Wᵀ + scale · (x Aᵀ) Bᵀ, or rank 0 for none.
    With an adapter only A and B should be trained, and W + scale · B A is the adapted weight.
    """

    def __init__(
        self, inputs: int, outputs: int, parts: Parts, bias: bool = False, lora: tuple[int, float] = (0, 1.0)
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.parts = parts
        rank, self.scale = lora
        self.lora_A = Factor(rank, inputs) if rank else None
        self.lora_B = Factor(outputs, rank) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        return self.complete(x, self.parts.linear(x, self.weight))

    def complete(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the bias and the adapter, if there are any, to y = x Wᵀ."""
        y = y if self.bias is None else y + self.bias.to(y.dtype)  # autocast: y may be narrower than the bias
        if self.lora_A is None or self.lora_B is None:
            return y
        return y + self.scale * F.linear(F.linear(x, self.lora_A.weight), self.lora_B.weight)


def each(layers: Sequence[Linear], x: Tensor) -> Sequence[Tensor]:
    """Apply each of these layers to x, in one fused function if there is one."""
    linears = layers[0].parts.linears
    if linears is None:
        return [layer(x) for layer in layers]
    products = linears(x, [layer.weight for layer in layers])
    return [layer.complete(x, y) for layer, y in zip(layers, products, strict=True)]


class RMSNorm(nn.Module):
    """RMSNorm over the hidden size, or over the `size` elements of a head."""

    def __init__(self, config: LlamaConfig, parts: Parts, size: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size or config.hidden))
        self.eps = config.norm_eps
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts.norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual)."""
        if self.parts.add_norm is not None:
            return self.parts.add_norm(x, residual, self.weight, self.eps)
        total = x + residual
        return self(total), total


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, parts: Parts) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.parts = parts
        lora = (config.lora_rank, config.lora_scale)
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, config.attention_width, parts, config.qkv_bias, lora)
        self.k_proj = Linear(config.hidden, kv_width, parts, config.qkv_bias, lora)
        self.v_proj = Linear(config.hidden, kv_width, parts, config.qkv_bias, lora)
        self.o_proj = Linear(config.attention_width, config.hidden, parts, lora=lora)
        self.q_norm = RMSNorm(config, parts, config.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(config, parts, config.head_dim) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projected = each((self.q_proj, self.k_proj, self.v_proj), x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        # q [B, S, N, D], k and v [B, S, N_kv, D]
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = self.parts.rope(q, cos, sin)
        k = self.parts.rope(k, cos, sin)
        out = self.parts.attention(q, k, v, causal=True)
        return self.o_proj(out.flatten(-2))  # [B, S, N, D] -> [B, S, N D] -> [B, S, H]


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        lora = (config.lora_rank, config.lora_scale)
        self.gate_proj = Linear(config.hidden, config.intermediate, parts, lora=lora)
        self.up_proj = Linear(config.hidden, config.intermediate, parts, lora=lora)
        self.down_proj = Linear(config.intermediate, config.hidden, parts, lora=lora)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = each((self.gate_proj, self.up_proj), x)
        return self.down_proj(self.parts.swiglu(gate, up))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, parts: Parts, feed_forward: Callable[..., nn.Module] = MLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config, parts)
        self.self_attn = Attention(config, parts)
        self.post_attention_layernorm = RMSNorm(config, parts)
        self.mlp = feed_forward(config, parts)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normalised, x = self.post_attention_layernorm.of_sum(x, self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.mlp(normalised)


class Decoder(nn.Module):
    """Tokens [B, S] to the last hidden states [B, S, H]."""

    def __init__(self, config: LlamaConfig, parts: Parts, recompute: str, feed_forward: Callable[..., nn.Module]):
        super().__init__()
        self.config, self.recompute = config, recompute
        if recompute == "selective":  # only the core of attention, as in 2205.05198 section 5
            parts = replace(parts, attention=recomputed(parts.attention))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Block(config, parts, feed_forward) for _ in range(config.layers))
        self.norm = RMSNorm(config, parts)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        c = self.config
        cos, sin = rope_tables(positions, c.head_dim, c.rope_theta, c.rope_scaling)  # one table for all layers
        x = self.embed_tokens(tokens)  # [B, S] -> [B, S, H]
        for block in self.layers:
            x = (recomputed(block) if self.recompute == "full" else block)(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    """A Llama with Hugging Face's parameter names, initialised with seed 0 (see `init_weights`).

    recompute     "none", "selective" (the core of attention) or "full" (every block)
    feed_forward  makes the second half of a block from (config, parts); a mixture of experts goes here
    """

    def __init__(
        self,
        config: LlamaConfig,
        parts: Parts | None = None,
        recompute: str = "none",
        feed_forward: Callable[..., nn.Module] = MLP,
    ) -> None:
        super().__init__()
        if recompute not in MODES:
            raise ValueError(f"recompute {recompute!r} must be one of {', '.join(MODES)}")
        self.config = config
        self.parts = parts or Parts()
        self.model = Decoder(config, self.parts, recompute, feed_forward)
        self.lm_head = Linear(config.hidden, config.vocab_size, self.parts)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        init_weights(self, seed=0)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """tokens [B, S] -> logits [B, S, V]; with labels [B, S], the sum of their losses. `Parts` may fuse
        output layer and loss. `positions` ([S] or [B, S]) are 0..S-1 unless given."""
        hidden = self.model(tokens, positions)
        if labels is None:
            return self.lm_head(hidden)
        if self.parts.linear_cross_entropy is not None:
            return self.parts.linear_cross_entropy(hidden, self.lm_head.weight, labels)
        return self.parts.cross_entropy(self.lm_head(hidden), labels)


def initial_weight(name: str, shape: Sequence[int], layers: int, seed: int) -> Tensor:
    """The initial value of the parameter `name`, in fp32, drawn from (seed, name) alone.

    It does not depend on other parameters, so a rank with one layer, or one slice of this weight, can draw
    the full weight and take its shard: every layout starts from the same model.
    """
    if len(shape) == 1:  # a bias is initialised to zero, the scale of a norm to one
        return torch.full(shape, float(not name.endswith("bias")), dtype=torch.float32)
    if name.endswith("lora_B.weight"):  # the adapted model starts as the original model
        return torch.zeros(*shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    # 2L branches add to the residual stream; with this factor its variance does not grow with depth (GPT-2).
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = 0.02 / math.sqrt(2 * layers) if residual else 0.02
    std = shape[1] ** -0.5 if name.endswith("lora_A.weight") else std
    return torch.randn(*shape, dtype=torch.float32, generator=generator) * std


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Set every parameter to its `initial_weight`. Parameters on the meta device are skipped."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            parameter.copy_(initial_weight(name, parameter.shape, model.config.layers, seed))


# ----------------------------------------------------------------------------------------------------------- demo


class Report:
    """A table of expected and measured values; `finish` prints it and returns the exit status."""

    def __init__(self) -> None:
        self.rows = [("", "expected", "measured")]
        self.wrong: list[str] = []

    def add(self, what: str, expected: str, measured: str, right: bool = True) -> None:
        self.rows.append((what, expected, measured))
        if not right:
            self.wrong.append(f"{what}: expected {expected}, measured {measured}")

    def finish(self) -> int:
        widths = [max(len(row[column]) for row in self.rows) for column in range(3)]
        for row in self.rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if self.wrong:
            print("FAIL  " + "; ".join(self.wrong), file=sys.stderr)
            return 1
        print("PASS")
        return 0


def kept_for_backward(forward: Callable[[], Tensor], model: nn.Module) -> tuple[Tensor, int]:
    """The result of `forward`, and the bytes that autograd saves: each storage once, without the weights."""
    storages = {}

    def pack(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result = forward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return result, sum(storage.nbytes() for at, storage in storages.items() if at not in weights)


def next_token_loss(model: Llama, tokens: Tensor) -> Tensor:
    """Sum of -log p(next token) over the sequence; the last token has no next one."""
    labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)), dim=1)
    return model.parts.cross_entropy(model(tokens), labels)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":  # one line, also under torchrun
            print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    OneLineParser(
        description="Hold the explicit attention, the fused one and recomputation against each other."
    ).parse_args()
    report = Report()
    config = LlamaConfig(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128)
    tokens = torch.randint(config.vocab_size, (2, 96), generator=torch.Generator().manual_seed(0))
    want: dict[str, Tensor] = {}  # the gradients of the most explicit version, which comes first
    most = 0
    for kernel in (attention_math, attention):
        for mode in MODES:
            model = Llama(config, replace(Parts(), attention=kernel), recompute=mode).double()
            loss, kept = kept_for_backward(partial(next_token_loss, model, tokens), model)
            loss.backward()
            got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            want = want or got
            errors = [(got[name] - want[name]).abs().max() / want[name].abs().max() for name in want]
            error = torch.stack(errors).max().item()  # NaN if any error is NaN
            report.add(f"gradients: {kernel.__name__}, {mode}", "< 1e-10", f"{error:.1e}", error < 1e-10)
            if mode == "none":
                most = kept
                report.add("  bytes kept for backward", "most", f"{kept:,}")
            else:
                report.add("  bytes kept for backward", f"< {most:,}", f"{kept:,}", kept < most)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
