"""Context parallelism I: one long sequence over many ranks, with attention over all of it.

Problem. At a million tokens the activations of a single sequence fill many GPUs, and there is no batch to
split. So the sequence is split. Norms, MLPs and the loss are per token and need no change. Attention does: a
query needs the keys and values of every earlier token, and most of them are on other ranks.

Idea. A softmax can be computed in parts. Attention over some of the keys gives an output and the logarithm of
the sum of its exponentials (LSE); two such partial results merge exactly into the result over all their keys.
So each rank stores its queries, and receives the blocks of keys and values (K/V):

    allgather   gather the K/V of all ranks, then compute                    simple; stores P blocks
    ring        compute with one block while the next is in flight           stores 2 blocks, hides messages

        rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0      round 0: own block;  round t: the block of rank r - t
        backward: K/V are sent around again, each block's gradient is sent after it and ends at its owner

Shards of 8 chunks on 4 ranks (S/P tokens each), and each rank's number of the 36 causal (chunk, chunk) pairs:
                  rank 0     rank 1     rank 2     rank 3
    contiguous    0 1        2 3        4 5        6 7         3  7 11 15      the last rank has most work
    zigzag        0 7        1 6        2 5        3 4         9  9  9  9      an early and a late chunk: equal
    striped       token t is on rank t mod P                   nearly equal: S/P pairs more from rank to rank

Formulas, for P ranks, with KV bytes of K and V of the full sequence, and dKV bytes of their fp32 gradients:
    sent by each rank   forward (P-1)/P KV      backward (P-1)/P (KV + dKV)        both versions, any layout
    messages (ring)     forward P - 1           backward 2 (P - 1)                 KV = 2 · B · S · N_kv · D · bytes
    (query, key) pairs  contiguous s(s+1)/2 + r s² on rank r, s = S/P              zigzag S(S+1)/2P on every rank
Ring: Liu, Zaharia & Abbeel 2023 (arXiv 2310.01889). Striped: Brandon et al. 2023 (2311.09431). Zigzag and the
all-gather version as in Llama 3 (2407.21783, section 3.3.2). LSE and backward: FlashAttention-2 (2307.08691).

Run it:
    python context_ring.py                                              one rank, CPU or GPU
    torchrun --nproc_per_node 4 context_ring.py                         Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 context_ring.py --version ring --layout striped --attention full
The last line is PASS, or the script exits with 1 and says which number is off.
"""

import argparse
import gc
import math
import os
import sys
import tokenize
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: if first imported while a group exists, it would keep the group alive
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

# Legend of shapes: B batch, S sequence, H hidden, N query heads, N_kv key/value heads, G = N / N_kv, D head dim,
# V vocab; S/P is S sharded over the context group; s queries and t keys of one block.
IGNORE = -100  # a label without a target
LAYOUTS = ("contiguous", "zigzag", "striped")
Attention = Callable[..., Tensor]  # (q [B, S, N, D], k, v [B, S, N_kv, D], *, causal) -> [B, S, N, D]
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast bf16 and fp16 to fp32, in which sums over many terms are safe; fp32 and fp64 are not changed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def without_autocast(function: Callable) -> Callable:
    """Under autocast a product would round to 16 bits what `at_least_fp32` has widened."""

    @wraps(function)
    def run(x: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, ...]:
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *others, **options)

    return run


def under_autocast(*qkv: Tensor) -> tuple[Tensor, ...]:
    """Cast q, k and v as autocast does for PyTorch's attention: a norm of q and k may have widened these two."""
    kind = qkv[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return qkv
    return tuple(x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind)) for x in qkv)


# --------------------------------------------------------------------- layouts: which rank stores which token


def check_layout(layout: str, S: int, P: int) -> None:
    """ValueError unless S tokens can be laid out over P ranks."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    chunks = 2 * P if layout == "zigzag" else P
    if S < 1 or S % chunks:
        near = " or ".join(str(n) for n in (S // chunks * chunks, (S // chunks + 1) * chunks) if n)
        why = f"2P = {chunks} chunks" if layout == "zigzag" else f"P = {P} parts"
        raise ValueError(f"a sequence of {S} tokens does not divide into the {why} of the {layout} layout; use {near}")


def layout_positions(layout: str, S: int, rank: int, P: int) -> Tensor:
    """Positions in the full sequence of the tokens on `rank` of P, ascending: int64 [S/P].

    Everything that depends on a token's position takes these: RoPE, labels, masks.
    """
    check_layout(layout, S, P)
    # --- exercise 5.21: the tokens of one rank, in three layouts ---
    tokens = torch.arange(S)
    if layout == "striped":
        return tokens[rank::P]
    if layout == "zigzag":
        chunks = tokens.chunk(2 * P)
        return torch.cat((chunks[rank], chunks[2 * P - 1 - rank]))
    return tokens.chunk(P)[rank]
    # --- end exercise ---


def shard_sequence(x: Tensor, layout: str, rank: int, P: int, dim: int = 1) -> Tensor:
    """The shard of x on `rank`: [B, S, ...] -> [B, S/P, ...]."""
    return x.index_select(dim, layout_positions(layout, x.shape[dim], rank, P).to(x.device))


def next_token_labels(tokens: Tensor) -> Tensor:
    """The label of a token is the next token of the *full* sequence [B, S]; the last has none.

    Shift first, then split, because the label of a chunk's last token is the first token of the next chunk,
    which is on another rank.
    """
    return torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE)), dim=1)


class Block(NamedTuple):
    """The visible part of (my queries) x (the keys of one owner): a rectangle of rows and columns, or if
    `causal` the lower triangle of a square. No layout needs any other mask."""

    rows: slice
    columns: slice
    causal: bool


def block_of(layout: str, rank: int, owner: int, length: int, causal: bool) -> Block | None:
    """The visible part of the keys of `owner` for the queries of `rank`, `length` tokens each, or None."""
    all_tokens = slice(None)
    half = length // 2
    if not causal or owner == rank:  # a rank's own tokens ascend, so their mask is the ordinary triangle
        return Block(all_tokens, all_tokens, causal)
    earlier = owner < rank
    # --- exercise 5.22: what is left of a block of another rank under the causal mask ---
    if layout == "zigzag":  # my two chunks see the owner's first, or my second chunk sees both of the owner's
        return Block(all_tokens, slice(half), False) if earlier else Block(slice(half, None), all_tokens, False)
    if layout == "striped":  # my token i sees the owner's token j if j <= i, or j < i if its stripe is later
        if earlier:
            return Block(all_tokens, all_tokens, True)
        return Block(slice(1, None), slice(length - 1), True) if length > 1 else None
    return Block(all_tokens, all_tokens, False) if earlier else None
    # --- end exercise ---


# ------------------------------------------------------------------- attention to one block of keys; merging two parts


class LocalAttention(NamedTuple):
    """Attention to one block, with the interface of FlashAttention kernels. `causal`: query i sees keys 0..i.

    forward   (q, k, v, *, causal) -> out [B, s, N, D], lse [B, N, s]               lse in fp32 (fp64 for fp64)
    backward  (dout, q, k, v, out, lse, *, causal) -> dq, dk, dv                    out, lse over *all* keys
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def block_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q kᵀ / sqrt(D), -inf above the diagonal if causal; q [B, s, N, D], k [B, t, N_kv, D] -> [B, N_kv, G, s, t].

    The einsum pairs the G query heads of a group with their K/V head, so K is never expanded to N heads.
    """
    grouped = at_least_fp32(q).unflatten(2, (k.shape[2], -1))  # [B, s, N, D] -> [B, s, N_kv, G, D]
    scores = torch.einsum("bshgd,bthd->bhgst", grouped, at_least_fp32(k)) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


@without_autocast
def explicit_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / sqrt(D)) v of one block, and its LSE, both in fp32 or better."""
    scores = block_scores(q, k, causal)
    lse = scores.logsumexp(-1)  # [B, N_kv, G, s]
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("bhgst,bthd->bshgd", weights, at_least_fp32(v))
    return out.flatten(2, 3), lse.flatten(1, 2)  # [B, s, N, D], [B, N, s]


def merge(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to all keys of two parts, from attention to each: out [B, s, N, D], lse [B, N, s], >= fp32.

    A softmax over both divides by e^lse + e^lse_block, so each output has weight e^(its lse - the new lse).
    Only differences are exponentiated, because e^1000 would overflow. A row without a key has lse -inf.
    """
    out, lse, out_block, lse_block = (at_least_fp32(x) for x in (out, lse, out_block, lse_block))
    # --- exercise 5.23: merge two partial softmaxes ---
    total = torch.logaddexp(lse, lse_block)
    safe = total.masked_fill(total == -math.inf, 0.0)  # no key in either part: e^(-inf - 0) is 0, but -inf + inf is NaN
    weight, weight_block = ((part - safe).exp().transpose(1, 2)[..., None] for part in (lse, lse_block))
    return weight * out + weight_block * out_block, total  # weights [B, N, s] -> [B, s, N, 1]
    # --- end exercise ---


@without_autocast
def explicit_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of dq, dk, dv in fp32 or better (FlashAttention-2, algorithm 2).

    With the LSE of all keys, exp(score - lse) is the final softmax weight: a block needs no other blocks.
    """
    kv_heads = k.shape[2]
    q_, k_, v_, dout_, out_ = (at_least_fp32(x) for x in (q, k, v, dout, out))
    q_, dout_, out_ = (x.unflatten(2, (kv_heads, -1)) for x in (q_, dout_, out_))  # [B, s, N_kv, G, D]
    # --- exercise 5.24: the backward of one block, from the output and the LSE of all blocks ---
    weights = (block_scores(q, k, causal) - lse.unflatten(1, (kv_heads, -1))[..., None]).exp()  # [B, N_kv, G, s, t]
    dv = torch.einsum("bhgst,bshgd->bthd", weights, dout_)
    dweights = torch.einsum("bshgd,bthd->bhgst", dout_, v_)
    delta = (dout_ * out_).sum(-1).permute(0, 2, 3, 1)[..., None]  # [B, s, N_kv, G] -> [B, N_kv, G, s, 1]
    dscores = weights * (dweights - delta) / math.sqrt(q.shape[-1])
    dq = torch.einsum("bhgst,bthd->bshgd", dscores, k_).flatten(2, 3)
    dk = torch.einsum("bhgst,bshgd->bthd", dscores, q_)
    # --- end exercise ---
    return dq, dk, dv


EXPLICIT = LocalAttention(explicit_forward, explicit_backward)


# ------------------------------------------- two ways to receive K/V and to send their gradients to the owner


class AllGather:
    """Version 1: one all-gather for K/V, one reduce-scatter for their gradients. Stores P blocks of each."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.contributions: Tensor | None = None

    def blocks(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(owner, its K/V) for every rank; kv [2, B, S/P, N_kv, D] is this rank's."""
        everything = kv.new_empty(self.group.size(), *kv.shape)
        all_gather(everything.flatten(0, 1), kv, group=self.group)  # -> [P, 2, B, S/P, N_kv, D]
        yield from enumerate(everything)

    def send_home(self, owner: int, gradient: Tensor) -> None:
        """Copy this rank's part of the gradient of `owner`'s K/V, because the caller reuses `gradient`."""
        if self.contributions is None:
            self.contributions = gradient.new_empty(self.group.size(), *gradient.shape)
        self.contributions[owner] = gradient

    def collect(self) -> Tensor:
        """The gradient of this rank's K/V: the sum of the parts of all ranks."""
        assert self.contributions is not None
        home = torch.empty_like(self.contributions[0])
        reduce_scatter(home, self.contributions.flatten(0, 1), group=self.group)  # sums over the ranks
        return home


class Ring:
    """Version 2: blocks are sent around a ring. Each message starts before the computation that hides it.

    Send and receive of a round start together: if each rank sent before it received, all would wait for a
    neighbour that does not receive yet.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.home: Tensor | None = None  # the gradient of my own K/V
        self.parcel: Any = None  # a gradient in flight

    def post(self, tensor: Tensor) -> Any:
        """Start to send `tensor` to the next rank and to receive one of its shape from the previous rank."""
        received = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.size)
        receive = dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.size)
        return dist.batch_isend_irecv([send, receive]), tensor, received  # `tensor` must live until sent

    def wait(self, parcel: Any) -> Tensor:
        works, _, received = parcel
        for work in works:
            work.wait()
        return received

    def blocks(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(owner, its K/V), starting with this rank's. While the caller uses a block, the next is in flight.

        At most two blocks are alive if the caller deletes a block before it requests the next.
        """
        # --- exercise 5.25: the rounds of the ring; compute and communication overlap ---
        for step in range(self.size):
            last = step == self.size - 1
            parcel = None if last else self.post(kv)
            yield (self.rank - step) % self.size, kv
            if not last:
                kv = self.wait(parcel)
                parcel = None  # else the sent block would be the third alive when the next message starts
        # --- end exercise ---

    def send_home(self, owner: int, gradient: Tensor) -> None:
        """Add this rank's part to the received gradient of `owner`'s block, and send it on.

        A block starts at its owner and its gradient one rank later, so that it reaches the owner after P - 1
        hops; the owner's own part is stored there. `copy=True`, because the caller overwrites `gradient` in
        the next round, and `.to(float32)` of an fp32 tensor returns the same tensor, not a copy.
        """
        # --- exercise 5.26: dK and dV are sent to their owner, accumulated in fp32 ---
        wide = torch.promote_types(gradient.dtype, torch.float32)
        if owner == self.rank:
            self.home = gradient.to(wide, copy=True)
            return
        arrived = None if self.parcel is None else self.wait(self.parcel)
        self.parcel = None  # frees the tensor sent in the last round, before the next message needs memory
        travelling = gradient.to(wide, copy=True) if arrived is None else arrived.add_(gradient)
        self.parcel = self.post(travelling)
        # --- end exercise ---

    def collect(self) -> Tensor:
        assert self.home is not None
        return self.home if self.parcel is None else self.home.add_(self.wait(self.parcel))


class AttentionToBlocks(torch.autograd.Function):
    """Attention of my queries to the K/V of all ranks, received by `Transport` (AllGather or Ring).

    Autograd saves q, k, v, out and the LSE of this rank's own tokens. The K/V of the other ranks are received
    again in backward, because saving them would store the full sequence in every layer on every rank.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, Transport, group, plan, local) -> Tensor:
        out = torch.zeros_like(at_least_fp32(q))
        lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)  # [B, N, S/P]: no key seen so far
        for owner, block in Transport(group).blocks(torch.stack((k, v))):
            for rows, columns, causal in plan[owner]:  # empty if all is masked; the block is still sent on
                part = local.forward(q[:, rows], *block[:, :, columns], causal=causal)
                out[:, rows], lse[:, :, rows] = merge(out[:, rows], lse[:, :, rows], *part)
            del block  # or three would be alive while the one after the next is in flight
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = Transport, group, plan, local
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        Transport, group, plan, local = ctx.arguments
        transport = Transport(group)
        dq = torch.zeros_like(at_least_fp32(q))
        dkv = dq.new_zeros(2, *k.shape)  # my part of one block's gradient, fp32 like dq, reused for each
        for owner, block in transport.blocks(torch.stack((k, v))):
            dkv.zero_()
            for rows, columns, causal in plan[owner]:
                dout_, q_, out_ = (x[:, rows] for x in (dout, q, out))
                share = local.backward(dout_, q_, *block[:, :, columns], out_, lse[:, :, rows], causal=causal)
                for total, more in zip((dq[:, rows], dkv[0, :, columns], dkv[1, :, columns]), share, strict=True):
                    total += more
            del block  # as in forward
            transport.send_home(owner, dkv)
        dk, dv = transport.collect()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def plan_of(layout: str, rank: int, P: int, length: int, causal: bool) -> list[list[Block]]:
    """For every owner, the part of its block that `rank` computes: one rectangle or triangle, or nothing. It
    is the same in forward and backward. (With packed documents there can be several: packed_documents.py.)"""
    blocks = (block_of(layout, rank, owner, length, causal) for owner in range(P))
    return [[] if block is None else [block] for block in blocks]


def attention_over(
    Transport: type, group: dist.ProcessGroup, layout: str, local: LocalAttention, plan_of: Callable = plan_of
) -> Attention:
    """A drop-in for `attention(q, k, v, *, causal)` with tokens sharded over `group` in `layout`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """q [B, S/P, N, D], k and v [B, S/P, N_kv, D] -> [B, S/P, N, D]."""
        q, k, v = under_autocast(q, k, v)
        check_inputs(q, k, v, causal, layout)
        plan = plan_of(layout, group.rank(), group.size(), q.shape[1], causal)
        return AttentionToBlocks.apply(q, k, v, Transport, group, plan, local)

    return attention


def check_inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool, layout: str) -> None:
    """ValueError, in one line, for unsupported inputs."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} is {list(x.shape)}; give it [batch, tokens, heads, head dim], none of them 0")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}; give all three one dtype")
        if x.dtype.itemsize < 2:
            raise ValueError(
                f"{name} is {x.dtype}, too coarse for sums of exponentials; convert it to bfloat16 or wider"
            )
    if k.shape != v.shape:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} are sent as one message; give them one shape")
    for what, axis in (("batch", 0), ("head dim", 3)):
        if q.shape[axis] != k.shape[axis]:
            raise ValueError(f"q has {what} {q.shape[axis]}, k and v have {k.shape[axis]}; give all three one {what}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads do not divide among {k.shape[2]} K/V heads; use a divisor")
    if causal and q.shape[1] != k.shape[1]:
        sizes = f"{q.shape[1]} queries and {k.shape[1]} keys on a rank"
        raise ValueError(f"{sizes}: cross attention has no causal order; use causal=False")
    if causal and layout == "zigzag" and q.shape[1] % 2:
        raise ValueError(f"{q.shape[1]} tokens on a rank are not two chunks of the zigzag layout; use an even number")


def allgather_attention(
    group: dist.ProcessGroup, layout: str = "zigzag", local: LocalAttention = EXPLICIT
) -> Attention:
    """Version 1, as in Llama 3: all-gather the K/V of all ranks, then compute."""
    return attention_over(AllGather, group, layout, local)


def ring_attention(group: dist.ProcessGroup, layout: str = "zigzag", local: LocalAttention = EXPLICIT) -> Attention:
    """Version 2: K/V are in flight while attention is computed."""
    return attention_over(Ring, group, layout, local)


VERSIONS = {"allgather": allgather_attention, "ring": ring_attention}


# ------------------------------------------------------------------------------------------------ a model and its text


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """The reference's attention: PyTorch's, over the full sequence on one rank."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, N, D] -> [B, N, S, D]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


class Model(nn.Module):
    """Embedding, a transformer block with RoPE and grouped-query heads, head; `attention` is an argument."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, vocab: int = 256, causal: bool = True):
        super().__init__()
        hidden = heads * head_dim
        self.causal, self.head_dim = causal, head_dim
        self.embed = nn.Embedding(vocab, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(hidden) for _ in range(3))
        self.q_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv_heads * head_dim, bias=False) for _ in range(2))
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [B, S/P, N, D] by its tokens' positions in the full sequence. Angles are fp32 for any
        dtype of x, because bf16 has 8 bits of precision: positions 1000 and 1001 are equal."""
        frequency = 10000.0 ** (-torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim)
        angle = (positions[:, None].float() * frequency)[:, None]  # [S/P, 1, D/2]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).to(x.dtype)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed(tokens)  # [B, S/P] -> [B, S/P, H]
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (proj(self.norm1(x)).unflatten(-1, (-1, self.head_dim)) for proj in projections)
        out = attention(self.rope(q, positions), self.rope(k, positions), v, causal=self.causal)
        x = x + self.o_proj(out.flatten(2))  # [B, S/P, N, D] -> [B, S/P, H]
        return self.lm_head(self.norm3(x + self.down(F.gelu(self.up(self.norm2(x))))))  # [B, S/P, V]


def loss_sum(model: Model, tokens: Tensor, labels: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Sum of the cross entropy over this rank's valid tokens."""
    logits = model(tokens, positions, attention)
    return F.cross_entropy(at_least_fp32(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def train_step(
    model: Model, tokens: Tensor, positions: Tensor, attention: Attention, group: dist.ProcessGroup
) -> Tensor:
    """One step on full sequences, tokens [B, S], of which this rank computes `positions` [S/P]. Returns the
    loss of the full sequences, and leaves its gradient in each p.grad.

    The tokens of all ranks use a parameter, so its gradient is the *sum* over the ranks of the context group,
    even with only one data-parallel rank. The only scaling is the division by the number of valid tokens.
    """
    model.zero_grad()
    labels = next_token_labels(tokens)[:, positions]  # [B, S] -> [B, S/P]
    valid = (labels != IGNORE).sum()
    dist.all_reduce(valid, group=group)  # tokens of the full sequences, not of this rank
    loss = loss_sum(model, tokens[:, positions], labels, positions, attention) / valid.clamp(min=1)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def text(B: int, S: int, step: int = 0) -> Tensor:
    """B sequences of S bytes [B, S] from the source of Python's tokenizer."""
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    return data[(torch.arange(B * S) + step * B * S) % len(data)].view(B, S)


# ------------------------------------------------------------------------------------------------------------- demo

WHOLE = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "alltoall_base_": 1}  # index of the full tensor


class Wire(TorchDispatchMode):
    """Counts the bytes this rank sends inside `attention`: messages exactly, collectives of `size` ranks by
    their ring algorithms, (P-1)/P of the full tensor; with unequal rows, all rows for other ranks."""

    def __init__(self, size: int, rank: int = 0):
        super().__init__()
        self.size = size
        self.rank = rank
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._opname == "alltoall_base_" and args[4]:  # rows for each rank, not equal
            rows = sum(args[4])
            own = args[4][self.rank]
            self.bytes += args[1].nbytes // rows * (rows - own)
        elif func.namespace == "c10d" and func._opname in WHOLE:
            self.bytes += args[WHOLE[func._opname]].nbytes * (self.size - 1) // self.size
        elif func.namespace == "c10d" and func._opname == "send":
            self.bytes += args[0][0].nbytes
        return func(*args, **(kwargs or {}))


def pairs_of(layout: str, S: int, rank: int, P: int, causal: bool) -> int:
    """(query, key) pairs that `rank` computes for one head, the work of attention, by closed formulas."""
    s = S // P
    if not causal:
        return s * S
    if layout == "zigzag":
        return S * (S + 1) // (2 * P)
    if layout == "striped":
        return (rank + 1) * s * (s + 1) // 2 + (P - 1 - rank) * s * (s - 1) // 2
    return s * (s + 1) // 2 + rank * s * s


def counting(local: LocalAttention, count: list[int]) -> LocalAttention:
    """The same local attention, which also adds the (query, key) pairs of every forward block to count[0]."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        s = q.shape[1]
        t = k.shape[1]
        count[0] += s * (s + 1) // 2 if causal else s * t
        return local.forward(q, k, v, causal=causal)

    return LocalAttention(forward, local.backward)


def off(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def against_reference(
    model: Model,
    step_of: Callable[[Model, Tensor], Tensor],
    S: int,
    reference: Attention = dense_attention,
    labels_of: Callable[[Tensor], Tensor] = next_token_labels,
    positions: Tensor | None = None,
) -> float:
    """The largest relative error of losses, gradients and weights in three SGD steps of `model`, made by
    `step_of(model, tokens)`, against the unsharded model. Not Adam, which would hide a wrong scale."""
    unsharded = deepcopy(model)
    errors = []
    everywhere = torch.arange(S, device=model.lm_head.weight.device) if positions is None else positions
    for step in range(3):
        tokens = text(2, S, step).to(everywhere.device)
        model.zero_grad()
        unsharded.zero_grad()
        loss = step_of(model, tokens)
        labels = labels_of(tokens)
        want = loss_sum(unsharded, tokens, labels, everywhere, reference) / (labels != IGNORE).sum()
        want.backward()
        errors.append(off(loss, want.detach()))
        for p, q in zip(model.parameters(), unsharded.parameters(), strict=True):
            errors.append(off(p.grad, q.grad))
            p.data -= 0.1 * p.grad
            q.data -= 0.1 * q.grad
            errors.append(off(p.data, q.data))
    return max(errors) if all(e == e for e in errors) else math.nan  # max() may lose a NaN


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq", type=int, default=96, help="tokens of the whole sequence; default %(default)s")
    parser.add_argument("--heads", type=int, default=4, help="query heads; default %(default)s")
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads; default %(default)s")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")


def check_model_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if not 1 <= args.heads <= 1024:
        parser.error(f"--heads {args.heads}: use 1 to 1024")
    if args.kv_heads < 1 or args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}; use a divisor of it")
    if args.seq < 3:  # of 2 tokens only the first has a label, and sees only itself: q and k have no gradient
        parser.error(f"--seq {args.seq} is too short for a token with a label to see another; use 3 or more")
    if args.seq > 16384:
        parser.error(f"--seq {args.seq}: the demo stores all scores of a block; use 16384 or less")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if 0 < gpus < local:
        parser.error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description="All-gather and ring attention in three layouts.", allow_abbrev=False)
    parser.add_argument("--version", choices=["all", *VERSIONS], default="all")
    parser.add_argument("--layout", choices=["all", *LAYOUTS], default="all")
    parser.add_argument(
        "--attention", choices=["causal", "full"], default="causal", help="cross attention: context_ulysses.py"
    )
    add_model_options(parser)
    args = parser.parse_args()
    check_model_options(parser, args)
    try:  # a length that fits zigzag fits all layouts
        check_layout(
            "zigzag" if args.layout == "all" else args.layout, args.seq, int(os.environ.get("WORLD_SIZE", "1"))
        )
    except ValueError as error:
        parser.error(f"--seq {args.seq}: {error}")
    return args


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Every requested version next to the reference; prints the table on rank 0 and returns what is wrong."""
    rank = dist.get_rank(group)
    P = dist.get_world_size(group)
    causal = args.attention == "causal"
    S = args.seq
    dtype, tolerance = (torch.float64, 1e-10) if args.dtype == "float64" else (torch.float32, 1e-5)
    torch.manual_seed(0)
    start = Model(args.heads, args.kv_heads, causal=causal).to(device, dtype)
    kv = 2 * 2 * S * args.kv_heads * start.head_dim * dtype.itemsize  # K and V of 2 sequences; gradients too
    wrong: list[str] = []
    if rank == 0:
        print(
            f"{P} rank(s) on {device.type}, {S} tokens, {args.heads}/{args.kv_heads} heads, attention {args.attention}"
        )
        print(f"{'':20} {'error':>8} {'pairs of a rank':>16} {'predicted':>16} {'bytes sent':>11} {'predicted':>11}")
    for version in VERSIONS if args.version == "all" else [args.version]:
        for layout in LAYOUTS if args.layout == "all" else [args.layout]:
            count = [0]
            attention = VERSIONS[version](group, layout, counting(EXPLICIT, count))
            positions = layout_positions(layout, S, rank, P).to(device)
            step = partial(train_step, positions=positions, attention=attention, group=group)
            with Wire(P) as wire:  # of attention; the all-reduce of gradients is chapter 2's subject
                error = against_reference(deepcopy(start), step, S)
            found: list = [None] * P
            dist.all_gather_object(found, (error, count[0] // 3, wire.bytes // 3), group=group)  # of one step
            errors, pairs, sent = zip(*found, strict=True)
            want_pairs = tuple(pairs_of(layout, S, r, P, causal) for r in range(P))
            want_sent = 3 * kv * (P - 1) // P  # forward KV, backward KV + dKV
            name = f"{version} {layout}"
            if rank == 0:
                between = [f"{min(numbers)} to {max(numbers)}" for numbers in (pairs, want_pairs)]
                print(f"{name:20} {max(errors):8.1e} {between[0]:>16} {between[1]:>16} {max(sent):11} {want_sent:11}")
            wrong += [f"{name}: rank {r} off by {e:.1e}" for r, e in enumerate(errors) if not e <= tolerance]
            if pairs != want_pairs:
                wrong.append(f"{name}: pairs {pairs}, predicted {want_pairs}")
            if set(sent) != {want_sent}:
                wrong.append(f"{name}: sent {sent}, predicted {want_sent}")
    return wrong


def run(args: argparse.Namespace, demo: Callable[..., list[str]]) -> int:
    """Start the process group, run the demo, print PASS or FAIL on rank 0."""
    gpu = torch.cuda.is_available()
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


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(run(arguments, demo))
