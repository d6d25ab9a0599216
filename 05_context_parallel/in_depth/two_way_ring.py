"""A ring in two directions: half of the heads' keys and values travel one way, half the other.

Problem. A link between two ranks carries as much in one direction as in the other, both at the same time. A ring sends
K/V from rank r to rank r + 1 only: half of what the links could carry is not used, and where computing does not hide
the messages, that is half the time.

Idea. Cut the K/V heads in two halves, each with the query heads that use it. The first half goes round from rank to
rank as ever, the second in the other direction, at the same time. A round's message is half as large on each link:

    round t   rank r computes  heads of the first half  with K/V of rank r - t    -> to rank r + 1
                               heads of the second half with K/V of rank r + t    -> to rank r - 1

Why heads, and not the tokens of a block? A block's early and late tokens do not meet equally many queries; with tokens
halved some rounds would cost a rank three times as much as others. Heads all cost the same: in zigzag every rank
computes the same in every round, as in one direction.

Formulas, with K and V of one rank in `block` bytes, as in context_ring.py, and N_kv even:
    sent over each link      forward  (P-1)/2 block in each direction      instead of (P-1) block in one, 0 in the other
    messages of a rank       forward  2 (P-1), half as large               backward 4 (P-1)
    blocks held              two halves each way: as much as the ring's two blocks
A round hides its messages from half as many tokens on. The bytes a rank sends altogether are the same.
Both directions at once, in another way: TokenRing, arXiv 2412.20501, sends queries one way and outputs the other.

Run it:
    python two_way_ring.py                                       one rank, CPU or GPU
    torchrun --nproc_per_node 4 two_way_ring.py                  gloo on CPU, nccl on GPU; --kv-heads 3 --heads 6
The last line is PASS, or the script exits with 1 and says which number is off.
"""

import argparse
import math
import os
import sys
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from context_ring import (
    EXPLICIT,
    LAYOUTS,
    Attention,
    Block,
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
    layout_positions,
    merge,
    plan_of,
    run,
    train_step,
)
from torch import Tensor

# Legend of shapes: B batch, S sequence, N query heads, N_kv key/value heads, G = N / N_kv, D head dim; S/P is S sharded
# over the group. Way 0 sends to the next rank, way 1 to the previous one.


def halves_of(N: int, N_kv: int) -> list[tuple[slice, slice]]:
    """For each way its K/V heads, and the query heads that use them. ValueError if there are no two K/V heads."""
    if N_kv < 2:
        raise ValueError(f"{N_kv} K/V head cannot be halved; use ring_attention of context_ring.py, in one direction")
    # --- exercise 5.35: which heads go which way ---
    half, G = N_kv // 2, N // N_kv
    return [(slice(half), slice(half * G)), (slice(half, None), slice(half * G, None))]
    # --- end exercise ---


def post_both(pair: list[Tensor], into: list[Tensor] | None, group: dist.ProcessGroup) -> tuple:
    """Start to send pair[0] to the next rank and pair[1] to the previous one, and to receive their likes; `into` is
    memory that may be written over. One batch: in two, nccl would send the second half after the first."""
    rank, P = group.rank(), group.size()
    received = [torch.empty_like(x) for x in pair] if into is None else into
    messages = []
    for sent, arriving, way in zip(pair, received, (1, -1), strict=True):
        messages.append(dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + way) % P))
        messages.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - way) % P))
    return dist.batch_isend_irecv(messages), pair, received  # `pair` must live until it is sent


def wait(parcel: tuple) -> tuple[list[Tensor], list[Tensor]]:
    """(what arrived, what was sent: of no use now but for its memory)."""
    works, sent, received = parcel
    for work in works:
        work.wait()
    return received, sent


class TwoWays(torch.autograd.Function):
    """As `AttentionToBlocks` of context_ring.py, with two blocks of half the heads in every round."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup,
        plan: list[list[Block]],
        local: LocalAttention,
    ) -> Tensor:
        rank, P, halves = group.rank(), group.size(), halves_of(q.shape[2], k.shape[2])
        out = torch.zeros_like(at_least_fp32(q))
        lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)  # [B, N, S/P]: no key seen so far
        blocks, spare = [torch.stack((k[:, :, h], v[:, :, h])) for h, _ in halves], None  # each [2, B, S/P, N_kv/2, D]
        # --- exercise 5.36: the rounds of both ways ---
        for t in range(P):
            last = t + 1 == P
            under_way = None if last else post_both(blocks, spare, group)
            for way, (_, queries) in enumerate(halves):
                owner = (rank - t if way == 0 else rank + t) % P
                for rows, columns, causal in plan[owner]:
                    part = local.forward(q[:, rows, queries], *blocks[way][:, :, columns], causal=causal)
                    out_, lse_ = out[:, rows, queries], lse[:, queries, rows]  # views: what is written stays
                    for total, merged in zip((out_, lse_), merge(out_, lse_, *part), strict=True):
                        total.copy_(merged)
            if not last:
                blocks, spare = wait(under_way)
        # --- end exercise ---
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = group, plan, local
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        group, plan, local = ctx.arguments
        rank, P, halves = group.rank(), group.size(), halves_of(q.shape[2], k.shape[2])
        dq, wide = torch.zeros_like(at_least_fp32(q)), torch.promote_types(k.dtype, torch.float32)
        blocks, spare = [torch.stack((k[:, :, h], v[:, :, h])) for h, _ in halves], None
        home: list[Tensor] = []
        returning, free = None, None  # dK/dV follow their blocks one rank behind, each its way
        for t in range(P):
            last = t + 1 == P
            under_way = None if last else post_both(blocks, spare, group)
            shares = [torch.zeros_like(block, dtype=wide) for block in blocks]
            for way, (_, queries) in enumerate(halves):
                owner = (rank - t if way == 0 else rank + t) % P
                for rows, columns, causal in plan[owner]:
                    dout_, q_, out_ = (x[:, rows, queries] for x in (dout, q, out))
                    block, dkv, lse_ = blocks[way][:, :, columns], shares[way], lse[:, queries, rows]
                    share = local.backward(dout_, q_, *block, out_, lse_, causal=causal)
                    totals = (dq[:, rows, queries], dkv[0, :, columns], dkv[1, :, columns])
                    for total, more in zip(totals, share, strict=True):
                        total += more
            if t == 0:
                home = shares  # of my own block; what the others find for it comes last
            else:
                if returning is not None:
                    arrived, free = wait(returning)
                    for mine, theirs in zip(shares, arrived, strict=True):
                        mine += theirs
                returning = post_both(shares, free, group)
            if not last:
                blocks, spare = wait(under_way)
        if returning is not None:
            for mine, theirs in zip(home, wait(returning)[0], strict=True):
                mine += theirs
        dk, dv = (torch.cat([half[i] for half in home], 2).to(k.dtype) for i in (0, 1))  # [B, S/P, N_kv, D]
        return dq.to(q.dtype), dk, dv, None, None, None


def two_way_ring(group: dist.ProcessGroup, layout: str = "zigzag", local: LocalAttention = EXPLICIT) -> Attention:
    """A drop-in for `ring_attention`, for models with two K/V heads or more."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """q [B, S/P, N, D], k and v [B, S/P, N_kv, D] -> [B, S/P, N, D]."""
        check_inputs(q, k, v, causal, layout)
        halves_of(q.shape[2], k.shape[2])
        plan = plan_of(layout, group.rank(), group.size(), q.shape[1], causal)
        return TwoWays.apply(q, k, v, group, plan, local)

    return attention


# ------------------------------------------------------------------------------------------------------------- demo


class Links(Wire):
    """Counts what this rank sends to the next rank, and to the previous one."""

    def __init__(self, size: int, rank: int):
        super().__init__(size, rank)
        self.to, self.sends = {1: 0, -1: 0}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._opname == "send":
            # Two ranks are each other's neighbours on both sides; there the messages of the two ways take turns.
            forwards = args[2] == (self.rank + 1) % self.size if self.size > 2 else self.sends % 2 == 0
            self.sends += 1
            self.to[1 if forwards else -1] += args[0][0].nbytes
        return super().__torch_dispatch__(func, types, args, kwargs)


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description="A ring in two directions.", allow_abbrev=False)
    parser.add_argument("--layout", choices=["all", *LAYOUTS], default="all")
    add_model_options(parser)
    args = parser.parse_args()
    check_model_options(parser, args)
    if args.kv_heads < 2:
        parser.error(f"--kv-heads {args.kv_heads} cannot be halved; use 2 or more")
    try:  # what divides for zigzag divides for all
        check_layout(
            "zigzag" if args.layout == "all" else args.layout, args.seq, int(os.environ.get("WORLD_SIZE", "1"))
        )
    except ValueError as error:
        parser.error(f"--seq {args.seq}: {error}")
    return args


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Every asked layout beside the reference; prints the table on rank 0 and returns what is wrong."""
    rank, P, S = dist.get_rank(group), dist.get_world_size(group), args.seq
    dtype, tolerance = (torch.float64, 1e-10) if args.dtype == "float64" else (torch.float32, 1e-5)
    torch.manual_seed(0)
    start = Model(args.heads, args.kv_heads).to(device, dtype)
    head = 2 * 2 * S // P * start.head_dim * dtype.itemsize  # K and V of one head of 2 sequences' tokens of a rank
    half, wrong = args.kv_heads // 2, []
    want = [3 * (P - 1) * head * heads for heads in (half, args.kv_heads - half)]  # K/V, and again, and dK/dV
    if rank == 0:
        print(f"{P} rank(s) on {device.type}, {S} tokens, {args.heads}/{args.kv_heads} heads")
        print(f"{'':12} {'error':>8} {'to the next':>12} {'predicted':>10} {'to the one before':>18} {'predicted':>10}")
    for layout in LAYOUTS if args.layout == "all" else [args.layout]:
        positions = layout_positions(layout, S, rank, P).to(device)
        step = partial(train_step, positions=positions, attention=two_way_ring(group, layout), group=group)
        with Links(P, rank) as links:
            error = against_reference(deepcopy(start), step, S)
        found: list = [None] * P
        dist.all_gather_object(found, (error, [links.to[way] // 3 for way in (1, -1)]), group=group)  # of one step
        errors, sent = zip(*found, strict=True)
        if rank == 0:
            print(f"{layout:12} {max(errors):8.1e} {sent[0][0]:12} {want[0]:10} {sent[0][1]:18} {want[1]:10}")
        wrong += [f"{layout}: rank {r} off by {e:.1e}" for r, e in enumerate(errors) if not e <= tolerance]
        wrong += [f"{layout}: rank {r} sent {x}, predicted {want}" for r, x in enumerate(sent) if x != want]
    return wrong


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(run(arguments, demo))
