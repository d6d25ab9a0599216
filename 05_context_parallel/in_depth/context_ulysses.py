"""Context parallelism II: Ulysses, which turns a sharded sequence into sharded heads; and Ulysses x ring.

Problem. In ring attention every rank receives all keys and values, so the bytes it sends grow with the
sequence, and the local attention depends on the block. A sliding window, a block-sparse pattern or cross
attention would each need a ring of its own.

Idea. Attention heads are independent. After the projections every rank has some tokens of all heads. An
all-to-all turns this into all tokens of some heads, for which any attention kernel for one device can be used
unchanged. A second all-to-all returns the output to the first form.

    before            q, k, v  [B, S/P, N, D]            after             [B, S, N/P, D]
              heads    0    1    2    3                          heads     0    1    2    3
      tokens 0..3    | rank 0            |               tokens 0..3     | r | r | r | r |
      tokens 4..7    | rank 1            |  all-to-all   tokens 4..7     | a | a | a | a |
      tokens 8..11   | rank 2            |  ---------->  tokens 8..11    | n | n | n | n |
      tokens 12..15  | rank 3            |               tokens 12..15   | 0 | 1 | 2 | 3 |

Elements that a rank sends per layer in forward (M = S·H, batch 1; backward the same, the ring's more). As in the
paper, all but the ring's count full messages, of which (P-1)/P are sent to other ranks:
    Ulysses, N K/V heads     4M/P                                       2309.14509, section 3.2
    Ulysses, N_kv K/V heads  (2 + 2 C/N) M/P                            C: K/V heads needed, over all ranks;
    Megatron's sequence par. 4M                                         max(N_kv, P) if one divides the other
    ring attention           2 (P-1)/P · N_kv/N · M                     also constant in P, not falling
If sequence and ranks grow together, M/P is constant: Ulysses sends as much as before, the others ever more.

`together=True` sends q, k and v as one message, with 2 all-to-alls instead of 4 and the same bytes. P need
not divide N: 6 heads on 4 ranks are 1, 2, 1 and 2 (then always as one message).

The limit: N heads are enough for N ranks. USP (2405.07719) arranges ranks in a mesh, with Ulysses in rows and
a ring in columns: P = R · U with U <= N. The all-to-all is inside a node, the ring crosses nodes.

Run it:
    python context_ulysses.py                                                     one rank, CPU or GPU
    torchrun --nproc_per_node 4 context_ulysses.py                                Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 context_ulysses.py --version ulysses --attention window
    python context_ulysses.py --cost-model                                        TFLOPs predicted, published
The last line is PASS, or the script exits with 1 and says which number is off.
"""

import argparse
import inspect
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_ring import (
    EXPLICIT,
    LAYOUTS,
    Attention,
    LocalAttention,
    Model,
    OneLineParser,
    Wire,
    add_model_options,
    against_reference,
    at_least_fp32,
    check_inputs,
    check_layout,
    check_model_options,
    dense_attention,
    layout_positions,
    ring_attention,
    run,
    train_step,
    under_autocast,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

# Legend of shapes: B batch, S sequence, H hidden, N query heads, N_kv key/value heads, D head dim; S/P is S sharded
# over the group. USP: R ranks in the ring, U ranks in the all-to-all, P = R · U.

# --------------------------------------------------------------------------------------- from tokens to heads and back


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Some tokens of all heads -> all tokens of some heads: [B, S/P, N, D] -> [B, S, N/P, D]. Not differentiable."""
    P = group.size()
    # --- exercise 5.27: one all-to-all, and the sequence in its right order ---
    pieces = x.unflatten(2, (P, -1)).permute(2, 0, 1, 3, 4).contiguous()  # [P, B, S/P, N/P, D]: piece r is for rank r
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)  # [P, B, S/P, N/P, D]: piece r is of rank r's tokens
    return received.permute(1, 0, 2, 3, 4).flatten(1, 2)  # -> [B, P, S/P, N/P, D] -> [B, S, N/P, D]
    # --- end exercise ---


def to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse: all tokens of some heads -> some tokens of all heads, [B, S, N/P, D] -> [B, S/P, N, D]."""
    P = group.size()
    # --- exercise 5.28: the inverse ---
    pieces = x.unflatten(1, (P, -1)).permute(1, 0, 2, 3, 4).contiguous()  # [P, B, S/P, N/P, D]: piece r is for rank r
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)  # [P, B, S/P, N/P, D]: piece r is of rank r's heads
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)  # -> [B, S/P, P, N/P, D] -> [B, S/P, N, D]
    # --- end exercise ---


class Swap(torch.autograd.Function):
    """`there(x)`, with `back` for the gradient. An all-to-all is a permutation, so its transpose is its
    inverse: an element's gradient is sent back to the element's source, unscaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Callable, back: Callable) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple:
        return ctx.back(dx, ctx.group), None, None, None


def query_heads_of(rank: int, P: int, N: int) -> range:
    """The query heads of `rank`: N/P consecutive ones, or one more or less if P does not divide N."""
    return range(rank * N // P, (rank + 1) * N // P)


def kv_heads_of(rank: int, P: int, N: int, N_kv: int) -> list[int]:
    """The K/V heads that the query heads of `rank` of P use, each once.

    If P divides N_kv there are N_kv/P, and no head is sent to two ranks. If N_kv divides P there is one. If
    neither, ranks get different numbers: for N = 12, N_kv = 4 on 6 ranks 1, 2, 1, 1, 2, 1.
    """
    # --- exercise 5.29: the K/V heads that a rank needs, and no more ---
    queries = query_heads_of(rank, P, N)
    return sorted({head * N_kv // N for head in queries})  # N/N_kv consecutive query heads share one
    # --- end exercise ---


def repeated_kv_heads(rank: int, P: int, N: int, N_kv: int) -> list[int] | None:
    """None if the K/V heads of `rank` have equally many query heads, as any kernel supports. Otherwise the
    index of each query head's K/V head (0 0 1, say): K and V have to be repeated so after the all-to-all."""
    mine = kv_heads_of(rank, P, N, N_kv)
    queries = query_heads_of(rank, P, N)
    uses = [mine.index(head * N_kv // N) for head in queries]
    n = len(queries)
    return None if n % len(mine) == 0 and uses == [i * len(mine) // n for i in range(n)] else uses


class SwapKV(torch.autograd.Function):
    """K or V: some tokens of all heads -> all tokens of the heads that a rank needs, [B, S/P, N_kv, D] -> [B, S, m, D].

    `heads[r]` is sent to rank r, so a head may be sent to several ranks. Backward receives a gradient from
    each of them and sums these in fp32 or better."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, heads: list[list[int]]) -> Tensor:
        ctx.group = group
        ctx.heads = heads
        ctx.N_kv = x.shape[2]
        rank = group.rank()
        P = group.size()
        sizes = [len(of) for of in heads]
        rows = x.movedim(2, 0)[[head for of in heads for head in of]].contiguous()  # [C, B, S/P, D], for rank 0, 1, ...
        received = rows.new_empty(P * sizes[rank], *rows.shape[1:])
        dist.all_to_all_single(received, rows, [sizes[rank]] * P, sizes, group=group)  # -> [P m, B, S/P, D]
        # -> [B, P, S/P, m, D] -> [B, S, m, D]
        return received.unflatten(0, (P, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple:
        P = ctx.group.size()
        sizes = [len(of) for of in ctx.heads]
        rows = dx.unflatten(1, (P, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1).contiguous()  # [P m, B, S/P, D]
        received = rows.new_empty(sum(sizes), *rows.shape[1:])
        dist.all_to_all_single(received, rows, sizes, [dx.shape[2]] * P, group=ctx.group)  # -> [C, B, S/P, D]
        of = torch.tensor([head for of in ctx.heads for head in of], device=dx.device)
        received = at_least_fp32(received)
        home = received.new_zeros(ctx.N_kv, *received.shape[1:]).index_add_(0, of, received)
        return home.to(dx.dtype).movedim(0, 2), None, None


Heads = list[tuple[list[int], list[int], list[int]]]  # for each rank, its heads of q, of k and of v


class SwapTogether(torch.autograd.Function):
    """q, k and v in one message: some tokens of all heads -> all tokens of the rank's heads. Ranks may get
    different numbers of heads. If several ranks get a K/V head, backward sums its gradients in >= fp32.

    An all-to-all has no shapes, only a number of elements per rank: q, k and v of a rank are concatenated.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, heads: Heads, *qkv: Tensor) -> tuple[Tensor, ...]:
        """q [B, S/P, N, D], k and v [B, S_kv/P, N_kv, D] -> [B, S, n, D] and twice [B, S_kv, m, D]."""
        ctx.group = group
        ctx.heads = heads
        ctx.shapes = [x.shape for x in qkv]
        P = group.size()
        mine = heads[group.rank()]
        # --- exercise 5.34: q, k and v as one message ---
        pieces = [[x[:, :, of].flatten() for x, of in zip(qkv, heads[r], strict=True)] for r in range(P)]
        sizes = [sum(x.numel() for x in piece) for piece in pieces]
        message = torch.cat([x for piece in pieces for x in piece])
        shapes = [(x.shape[0], x.shape[1], len(of), x.shape[3]) for x, of in zip(qkv, mine, strict=True)]
        counts = [B * tokens * n * D for B, tokens, n, D in shapes]  # all ranks have equally many tokens
        received = message.new_empty(P * sum(counts))
        dist.all_to_all_single(received, message, [sum(counts)] * P, sizes, group=group)
        parts = received.view(P, -1).split(counts, 1)  # [P, B · S/P · n · D], and two for k and v
        # -> [P, B, S/P, n, D] -> [B, P, S/P, n, D] -> [B, S, n, D]
        return tuple(x.unflatten(1, shape).movedim(0, 1).flatten(1, 2) for x, shape in zip(parts, shapes, strict=True))
        # --- end exercise ---

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        P = ctx.group.size()
        # [B, S, n, D] -> [B, P, S/P, n, D] -> [P, B, S/P, n, D] -> [P, B · S/P · n · D]
        parts = [x.unflatten(1, (P, -1)).movedim(1, 0).flatten(1) for x in gradients]
        message = torch.cat(parts, 1).flatten()
        shapes = [
            [(B, tokens, len(of), D) for (B, tokens, _, D), of in zip(ctx.shapes, r, strict=True)] for r in ctx.heads
        ]
        counts = [[B * tokens * n * D for B, tokens, n, D in of] for of in shapes]
        received = message.new_empty(sum(map(sum, counts)))
        dist.all_to_all_single(
            received, message, [sum(of) for of in counts], [sum(counts[ctx.group.rank()])] * P, group=ctx.group
        )
        wide = torch.promote_types(received.dtype, torch.float32)
        home = [received.new_zeros(shape, dtype=wide) for shape in ctx.shapes]
        pieces = iter(received.split([n for of in counts for n in of]))
        for r in range(P):
            for total, of, shape in zip(home, ctx.heads[r], shapes[r], strict=True):
                total[:, :, of] += next(pieces).view(shape)  # a rank gets a head once: unique indices
        return None, None, *(x.to(gradients[0].dtype) for x in home)


class SwapBack(torch.autograd.Function):
    """The output, for any number of heads per rank: all tokens of some heads -> some tokens of all heads."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, heads: list[int], out: Tensor) -> Tensor:
        """out [B, S, n, D], `heads` of each rank -> [B, S/P, N, D]."""
        ctx.group, ctx.heads = group, heads
        P = group.size()
        rank = group.rank()
        pieces = out.unflatten(1, (P, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1).contiguous()  # [P n, B, S/P, D]
        received = pieces.new_empty(sum(heads), *pieces.shape[1:])
        dist.all_to_all_single(received, pieces, heads, [heads[rank]] * P, group=group)  # ordered by rank
        return received.movedim(0, 2)  # [N, B, S/P, D] -> [B, S/P, N, D]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        P = ctx.group.size()
        n = ctx.heads[ctx.group.rank()]
        pieces = dout.movedim(2, 0).contiguous()  # [B, S/P, N, D] -> [N, B, S/P, D]
        received = pieces.new_empty(P * n, *pieces.shape[1:])
        dist.all_to_all_single(received, pieces, [n] * P, ctx.heads, group=ctx.group)
        # [P n, B, S/P, D] -> [P, n, B, S/P, D] -> [B, P, S/P, n, D] -> [B, S, n, D]
        return None, None, received.unflatten(0, (P, n)).permute(2, 0, 3, 1, 4).flatten(1, 2)


def check_enough_heads(heads: int, P: int) -> None:
    """ValueError unless each of P ranks gets a query head."""
    if heads < P:
        raise ValueError(
            f"{heads} query heads are not enough for {P} ranks of Ulysses; use {heads} or fewer ranks, or USP"
        )


def check_heads(heads: int, P: int) -> None:
    """ValueError unless P divides the query heads, which a plan with equal ranks requires."""
    if heads % P:
        fits = ", ".join(str(p) for p in range(1, heads + 1) if heads % p == 0)
        raise ValueError(f"{heads} query heads do not divide among {P} ranks of Ulysses; use {fits} ranks, or USP")


def ulysses(group: dist.ProcessGroup, attention: Attention = dense_attention, *, together: bool = False) -> Attention:
    """A drop-in for `attention(q, k, v, *, causal)` of a model with contiguous shards of tokens over `group`.

    `attention` is any attention for one device; it gets full sequences of some of the heads. `together` sends
    q, k and v as one message, which is always done if the ranks get different numbers of query heads.
    """

    def parallel(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """q [B, S/P, N, D], k and v [B, S_kv/P, N_kv, D] -> [B, S/P, N, D]."""
        P = group.size()
        N = q.shape[2]
        N_kv = k.shape[2]
        q, k, v = under_autocast(q, k, v)
        check_inputs(q, k, v, causal, "contiguous")
        check_enough_heads(N, P)
        heads = [kv_heads_of(r, P, N, N_kv) for r in range(P)]
        one_message = together or N % P != 0
        if one_message:
            of_ranks = [(list(query_heads_of(r, P, N)), heads[r], heads[r]) for r in range(P)]
            q, k, v = SwapTogether.apply(group, of_ranks, q, k, v)
        else:
            q = Swap.apply(q, group, to_heads, to_tokens)  # [B, S, N/P, D]
            k, v = (SwapKV.apply(x, group, heads) for x in (k, v))  # [B, S_kv, m, D]
        if uses := repeated_kv_heads(group.rank(), P, N, N_kv):
            k = k[:, :, uses]
            v = v[:, :, uses]
        out = attention(q, k, v, causal=causal)
        if one_message:
            return SwapBack.apply(group, [len(query_heads_of(r, P, N)) for r in range(P)], out)
        return Swap.apply(out, group, to_tokens, to_heads)  # [B, S, N/P, D] -> [B, S/P, N, D]

    return parallel


# ----------------------------------------------------------------------------------------------- Ulysses x ring: USP


def usp(
    ulysses_group: dist.ProcessGroup,
    ring_group: dist.ProcessGroup,
    layout: str = "zigzag",
    local: LocalAttention = EXPLICIT,
) -> Attention:
    """Ulysses with a ring as local attention: the all-to-all assembles one shard of the ring's layout."""
    # --- exercise 5.30: one line ---
    return ulysses(ulysses_group, ring_attention(ring_group, layout, local))
    # --- end exercise ---


def usp_positions(layout: str, S: int, ring_rank: int, R: int, ulysses_rank: int, U: int) -> Tensor:
    """Positions of the tokens of one rank: int64 [S/(R·U)].

    The sequence is first sharded over the ring, then each shard is split into U runs. The all-to-all
    concatenates these runs, and the result must be the ring's layout.
    """
    check_layout(layout, S, R)
    if S // R % U:
        raise ValueError(
            f"{S // R} tokens of a ring rank do not divide among {U} ranks of Ulysses; use a multiple of {U}"
        )
    return layout_positions(layout, S, ring_rank, R).chunk(U)[ulysses_rank]


def usp_groups(P: int, U: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's (Ulysses group, ring group) in a world of P = R · U ranks: rank = ring_rank · U +
    ulysses_rank. Nothing hides all-to-alls, so their ranks are consecutive. ValueError unless U divides P."""
    if U < 1 or P % U:
        fits = ", ".join(str(u) for u in range(1, P + 1) if P % u == 0)
        raise ValueError(f"{P} ranks are not rows of {U} ranks of Ulysses; use rows of {fits}")
    grid = torch.arange(P).view(-1, U)
    mine: list = [None, None]
    for axis, groups in enumerate((grid.tolist(), grid.T.tolist())):
        for ranks in groups:  # every rank creates every group, in the same order
            group = dist.new_group(ranks, timeout=timedelta(seconds=60))  # or it would be 30 minutes
            if dist.get_rank() in ranks:
                mine[axis] = group
    return mine[0], mine[1]


# ------------------------------------------------------------------- other kinds of attention, for one device


def masked(sees: Callable[[Tensor, Tensor], Tensor]) -> Attention:
    """Attention in which query i sees key j if `sees(i, j)`, and j <= i if causal. Independent of ranks."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        i, j = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
        mask = sees(i[:, None], j[None]) & ((i[:, None] >= j[None]) if causal else True)  # [S, S_kv]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, N, D] -> [B, N, S, D]
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return attention


def sliding_window(width: int) -> Attention:
    """Query i sees keys i - width + 1 to i + width - 1."""
    return masked(lambda i, j: (i - j).abs() < width)


def block_sparse(block: int, stride: int) -> Attention:
    """Query i sees its own block of keys, and every `stride`-th block of all (after Child et al. 2019, 1904.10509)."""
    return masked(lambda i, j: (i // block == j // block) | (j // block % stride == 0))


def every_other_key(attention: Attention) -> Attention:
    """Cross attention, to a sequence half as long: the even tokens. There is no causal order between two sequences."""
    return lambda q, k, v, *, causal: attention(q, k[:, ::2], v[:, ::2], causal=False)


KINDS: dict[str, Attention] = {
    "causal": dense_attention,
    "full": dense_attention,
    "window": sliding_window(10),
    "sparse": block_sparse(4, 3),
    "cross": dense_attention,
}

# ------------------------------------------------------------------------------------------- cost: bytes sent


def sent_per_layer(kind: str, S: int, H: int, P: int, N: int, N_kv: int, rank: int = 0) -> int:
    """The exact number of elements that `rank` sends in the forward pass of one layer (batch 1). All ranks
    send the same, except in Ulysses if P does not divide N, or neither of N_kv and P divides the other.

    ulysses   4 all-to-alls: q, out, the K/V heads needed      backward the same, summed over all ranks
    megatron  2 all-gathers and 2 reduce-scatters of [S, H]     tensor + sequence parallel (2205.05198)
    ring      P - 1 blocks of K and V                           its backward also sends dK and dV, in fp32
    """
    per_head = S * H // N
    if kind == "ulysses":
        others = sum(len(kv_heads_of(r, P, N, N_kv)) for r in range(P) if r != rank)
        n = len(query_heads_of(rank, P, N))
        return (N - n + n * (P - 1) + 2 * others) * per_head // P
    return {"megatron": 4 * N, "ring": 2 * N_kv}[kind] * per_head * (P - 1) // P


# ------------------------------------------------------------------------------------------------- cost: time


@dataclass(frozen=True)
class Machine:
    """The assumptions behind `step_seconds`. The paper (2309.14509, section 4) gives a 7-billion GPT, up to 256 A100
    GPUs, sequence lengths, seconds and TFLOPs; the rest is ours.

    - The shape of the model is GPT-3's at 6.7 billion, and the global batch is 8 sequences: with them the formula for
      FLOPs below gives, from the published seconds, the published TFLOPs to 0.3 %.
    - 8 data-parallel replicas with one sequence each, hence P = GPUs / 8 ranks of Ulysses: at most 32, one per head.
    - Nodes of 8 GPUs, so that 8 ranks of Ulysses stay inside a node; there a rank sends at 300 GB/s (NVLink).
    - bf16. Per layer 12 all-to-alls: 4 forward, 4 in the recomputed forward, 4 backward. Nothing hides them.
    - ZeRO's collectives hide behind the computation.
    - Two numbers are calibrated on strong scaling: the one rate of all FLOPs on its row of 64 GPUs, and the bandwidth
      out of a node, per GPU, on its row of 256. The other three rows are predictions.
    """

    layers: int = 32
    hidden: int = 4096
    vocab: int = 50257
    batch: int = 8
    node: int = 8
    inside: float = 300e9  # bytes/s
    outside: float = 5.34e9  # bytes/s, calibrated
    flops_per_second: float = 166.2e12  # calibrated


# (tokens, GPUs, TFLOPs per GPU): strong scaling has the first three rows, weak scaling the second and the last two.
PAPER = ((131072, 64, 165.5), (131072, 128, 157.4), (131072, 256, 136.1), (65536, 64, 161.4), (262144, 256, 147.4))


def step_flops(S: int, machine: Machine) -> float:
    """FLOPs of one step, the recomputed forward included (Narayanan et al. 2021, 2104.04473, equation 3)."""
    L = machine.layers
    h = machine.hidden
    V = machine.vocab
    return 96 * machine.batch * S * L * h**2 * (1 + S / (6 * h) + V / (16 * L * h))


def step_seconds(S: int, gpus: int, machine: Machine) -> dict[str, float]:
    """Seconds of one step, split into computation and communication."""
    P = gpus // machine.batch
    message = 2 * S * machine.hidden / P  # bytes of one all-to-all on one rank, S·H/P elements of bf16
    near = min(P, machine.node) - 1  # other ranks inside the node
    far = max(P - machine.node, 0)  # ranks outside
    swap = message / P * (near / machine.inside + far / machine.outside)
    return {
        "compute": step_flops(S, machine) / gpus / machine.flops_per_second,
        "all-to-all": 12 * machine.layers * swap,
    }


def cost_model(machine: Machine) -> list[tuple[int, int, float, float, float]]:
    """(tokens, GPUs, the paper's TFLOPs per GPU, predicted TFLOPs, deviation in %)."""
    rows = []
    for S, gpus, published in PAPER:
        predicted = step_flops(S, machine) / gpus / sum(step_seconds(S, gpus, machine).values()) / 1e12
        deviation = round(100 * (predicted / published - 1), 1) + 0.0  # no -0.0
        rows.append((S, gpus, published, predicted, deviation))
    return rows


def print_cost_model(machine: Machine) -> None:
    print(inspect.getdoc(Machine), end="\n\n")
    print(f"{'tokens':>8} {'GPUs':>5} {'paper':>7} {'model':>7} {'deviation':>10}   seconds")
    for S, gpus, published, predicted, deviation in cost_model(machine):
        parts = ", ".join(f"{what} {seconds:.2f}" for what, seconds in step_seconds(S, gpus, machine).items())
        print(f"{S:8} {gpus:5} {published:7.1f} {predicted:7.1f} {deviation:+9.1f}%   {parts}")


# ------------------------------------------------------------------------------------------------------------- demo


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description="Ulysses, and Ulysses x ring.", allow_abbrev=False)
    parser.add_argument("--version", choices=["all", "ulysses", "together", "usp"], default="all")
    parser.add_argument("--attention", choices=["all", *KINDS], default="all")
    parser.add_argument("--ulysses-size", type=int, help="U, ranks per all-to-all in USP; default 2 if even")
    parser.add_argument("--layout", choices=LAYOUTS, help="of the ring in USP; default zigzag")
    parser.add_argument("--cost-model", action="store_true", help="only print predicted and published TFLOPs")
    add_model_options(parser)
    args = parser.parse_args()
    P = int(os.environ.get("WORLD_SIZE", "1"))
    check_model_options(parser, args)
    given = [word for word in sys.argv[1:] if word.startswith("--") and word != "--cost-model"]
    if args.cost_model and given:
        parser.error(f"{given[0]} changes nothing in --cost-model, which is of one model and one machine; leave it out")
    for option, value in (("--layout", args.layout), ("--ulysses-size", args.ulysses_size)):
        if args.version in ("ulysses", "together") and value is not None:
            parser.error(f"{option} {value} is of Ulysses x ring; leave it out, or use --version usp")
    args.layout = args.layout or "zigzag"
    if args.ulysses_size is None:
        args.ulysses_size = 2 if P % 2 == 0 else 1
    U = args.ulysses_size
    if args.version == "usp" and args.attention in ("window", "sparse"):
        parser.error(f"--attention {args.attention} does not fit the blocks of a ring; use --version ulysses")
    if U < 1 or P % U:
        parser.error(f"--ulysses-size {U} does not divide {P} ranks; use a divisor")
    try:
        if args.version != "usp":
            check_enough_heads(args.heads, P)
        elif args.heads < U:
            fits = ", ".join(str(u) for u in range(1, args.heads + 1) if P % u == 0)
            raise ValueError(f"not enough for all-to-alls of {U} ranks; use --ulysses-size {fits}")
    except ValueError as error:
        parser.error(f"--heads {args.heads}: {error}")
    try:
        check_layout("contiguous", args.seq, P)
        if args.version in ("all", "usp"):
            usp_positions(args.layout, args.seq, 0, P // U, 0, U)
        if args.attention in ("all", "cross") and args.seq // P % 2:
            why = f"{args.seq // P} tokens on a rank cannot be halved for --attention cross"
            raise ValueError(f"{why}; use a multiple of {2 * P}")
    except ValueError as error:
        parser.error(f"--seq {args.seq}: {error}")
    return args


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Every requested version and kind next to the reference; prints a table on rank 0, returns errors."""
    rank = dist.get_rank(group)
    P = dist.get_world_size(group)
    S = args.seq
    U = args.ulysses_size
    R = P // U
    ulysses_group, ring_group = usp_groups(P, U)
    dtype, tolerance = (torch.float64, 1e-10) if args.dtype == "float64" else (torch.float32, 1e-5)
    wrong: list[str] = []
    if rank == 0:
        print(f"{P} rank(s) on {device.type}, USP {R} x {U}, {S} tokens, {args.heads}/{args.kv_heads} heads")
        print(f"{'':16} {'error':>8} {'bytes sent':>11} {'predicted':>11}")
    for version in ("ulysses", "together", "usp") if args.version == "all" else (args.version,):
        for kind, local in KINDS.items():
            if args.attention not in ("all", kind) or (version == "usp" and kind in ("window", "sparse")):
                continue
            torch.manual_seed(0)
            model = Model(args.heads, args.kv_heads, causal=kind in ("causal", "window", "sparse")).to(device, dtype)
            if version != "usp":
                attention = ulysses(group, local, together=version == "together")
                positions = layout_positions("contiguous", S, rank, P)
            else:
                attention = usp(ulysses_group, ring_group, args.layout)
                positions = usp_positions(args.layout, S, rank // U, R, rank % U, U)
            swap = U if version == "usp" else P
            keys = S // 2 if kind == "cross" else S
            if kind == "cross":
                attention = every_other_key(attention)
                local = every_other_key(local)
            step = partial(train_step, positions=positions.to(device), attention=attention, group=group)
            with Wire(swap, rank % swap) as wire:
                error = against_reference(deepcopy(model), step, S, local)
            # In head dims of 2 sequences. All-to-alls: q and out, backward as much; K and V (`others`), and
            # their gradients (`home`). Ring: K and V; in backward K, V, dK and dV: 3 times `ringed`.
            heads = [len(kv_heads_of(r, swap, args.heads, args.kv_heads)) for r in range(swap)]
            n = len(query_heads_of(rank % swap, swap, args.heads))
            m = heads[rank % swap]
            others = sum(heads) - m
            home = m * (swap - 1)
            swapped = 2 * (args.heads - n + n * (swap - 1)) * S // P + 2 * (others + home) * keys // P
            ring_heads = n if repeated_kv_heads(rank % swap, swap, args.heads, args.kv_heads) else m
            ringed = 2 * ring_heads * keys * (R - 1) // R if version == "usp" else 0
            predicted = (swapped + 3 * ringed) * 2 * model.head_dim * dtype.itemsize
            found: list = [None] * P
            dist.all_gather_object(found, (error, wire.bytes // 3, predicted), group=group)  # bytes of one step
            errors, sent, wanted = zip(*found, strict=True)
            name = f"{version} {kind}"
            if rank == 0:
                print(f"{name:16} {max(errors):8.1e} {max(sent):11} {max(wanted):11}")
            wrong += [f"{name}: rank {r} off by {e:.1e}" for r, e in enumerate(errors) if not e <= tolerance]
            if sent != wanted:
                wrong.append(f"{name}: sent {sent}, predicted {wanted}")
    return wrong


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.cost_model:
        if os.environ.get("RANK", "0") == "0":
            print_cost_model(Machine())
            print("PASS")
        sys.exit(0)
    sys.exit(run(arguments, demo))
