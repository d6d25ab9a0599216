"""Expert parallelism II, dispatch: send every token to the ranks of its experts, and combine the outputs.

Problem. The experts of a layer do not fit on one device. So each of P ranks holds E/P full experts. Then the
tokens of a rank need experts of all ranks, and the counts per rank are not known in advance.

Idea. Tokens sorted by expert are also sorted by rank. Send every rank its count, then the rows in one
all-to-all with uneven splits; run each expert on the rows that arrived; send the outputs back the same way.

    E = 4, K = 1, P = 2       rank 0: experts 0, 1        rank 1: experts 2, 3
    tokens choose             a→2  b→0  c→2  d→1          p→0  q→3  r→0  s→0
    permute                   b0 d1 | a2 c2               p0 r0 s0 | q3
    all-to-all of counts      sends 1 1 | 2 0             sends 3 0 | 0 1
    all-to-all of tokens      b0 d1  p0 r0 s0             a2 c2  q3
    sort by expert, compute   b p r s → 0,  d → 1         a c → 2,  q → 3
    combine                   a b c d                     p q r s        · weight, summed over K

Versions:   everywhere   every token to every rank, as an all-gather and a reduce-scatter would. No counts.
            pairs        a row for each (token, expert): the drawing above; GShard (2006.16668), Megatron-Core
            once         a row for each (token, rank): a token's experts on one rank share it, and their sum
                         is sent back; with a router limited to M ranks, at most M rows

Formulas. n rows leave this rank and m arrive from others, each of H elements of e bytes:
    forward        n H e for dispatch, m H e for combine; backward the same in reverse; + tables, counts
    everywhere     n = (P-1) T        pairs: n about K T (P-1)/P        once: n <= M T
    weights        3 H F E/P elements of experts on a rank, instead of 3 H F E

Sums of gradients. An expert has seen the tokens of all ranks of its expert group, and its gradient is already
their sum. So it is summed only over the ranks that hold the same expert.

Run it:
    python expert_dispatch.py                                             one rank, CPU or GPU
    torchrun --nproc_per_node 4 expert_dispatch.py --version once         Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 expert_dispatch.py --compute padded --capacity 1.0
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _moe_demo import OneLineParser, Report, Wire, check_gpus, launch, text
from routing import ROUTERS, Group, check_routing, expert_counts, route, router_logits, within_capacity
from torch import Tensor
from torch.autograd.function import once_differentiable

# Legend of shapes: B batch, S sequence, H hidden, F intermediate size of one expert, T = B S tokens of this rank,
# E experts, K experts per token, P ranks of the expert group; n rows that this rank sends, n' that it receives.
Compute = Callable[[Tensor, list[int]], Tensor]  # (rows [n', H] by expert; rows per expert) -> [n', H]

# ------------------------------------------------------------------------------------ the experts: three computations


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def experts_loop(
    x: Tensor, counts: list[int], w1: Tensor, w3: Tensor, w2: Tensor, linear: Callable = F.linear, act=swiglu
) -> Tensor:
    """One expert after the other. x [n', H] sorted by expert, w1 and w3 [E/P, F, H], w2 [E/P, H, F] -> [n', H].

    An expert without tokens runs on zero rows, at no cost, so it gets a gradient of zero. If a rank skipped
    all of its experts, its backward would not reach the all-to-all for which the other ranks wait.
    """
    # --- exercise 7.28: every expert on its own rows, those without rows too ---
    shares = zip(x.split(counts), w1, w3, w2, strict=True)
    return torch.cat([linear(act(linear(rows, gate), linear(rows, up)), down) for rows, gate, up, down in shares])
    # --- end exercise ---


def experts_padded(
    x: Tensor, counts: list[int], w1: Tensor, w3: Tensor, w2: Tensor, linear: Callable = F.linear, act=swiglu
) -> Tensor:
    """All experts in one batched matmul: each has as many slots as the busiest needs, the rest is padding."""
    C = max(counts)
    # --- exercise 7.29: rows into slots, three batched products, rows out of slots ---
    slot = torch.cat([torch.arange(e * C, e * C + n, device=x.device) for e, n in enumerate(counts)])  # [n']
    slots = (
        x.new_zeros(len(counts) * C, x.shape[1]).index_copy(0, slot, x).view(len(counts), C, x.shape[1])
    )  # [E/P, C, H]
    hidden = act(slots @ w1.transpose(1, 2), slots @ w3.transpose(1, 2))  # [E/P, C, H] @ [E/P, H, F]
    return (hidden @ w2.transpose(1, 2)).flatten(0, 1)[slot]  # [E/P, C, H] -> [n', H]
    # --- end exercise ---


def experts_grouped(
    x: Tensor, counts: list[int], w1: Tensor, w3: Tensor, w2: Tensor, linear: Callable = F.linear, act=swiglu
) -> Tensor:
    """One kernel for groups of rows of any size, without loop or padding (MegaBlocks, 2211.15841).

    torch's kernel takes fp32, bf16 and fp16, and rows whose size is a multiple of 16 bytes.
    """
    if x.dtype == torch.float64 or any(size * x.element_size() % 16 for size in w1.shape[1:]):
        raise ValueError(f"grouped products need no float64, and rows of 16 bytes: {x.dtype}, {list(w1.shape[1:])}")
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)  # [E/P], ends of the rows
    mm = partial(product, offs=ends)
    hidden = act(mm(x, w1.transpose(1, 2)), mm(x, w3.transpose(1, 2)))  # [n', H] -> [n', F]
    return mm(hidden, w2.transpose(1, 2))


# Only the loop uses `linear`: the others multiply all experts at once, with torch.
COMPUTES = {"loop": experts_loop, "padded": experts_padded, "grouped": experts_grouped}

# ---------------------------------------------------------------------------------------- rows to other ranks and back


def size_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def check_experts(E: int, P: int) -> None:
    """ValueError in one line unless P divides E."""
    if E % P:
        fits = ", ".join(str(p) for p in range(1, E + 1) if E % p == 0)
        raise ValueError(f"experts {E} do not divide among {P} expert-parallel ranks; use {fits} ranks")


def global_rank(group: Group, rank: int) -> int:
    return dist.get_global_rank(group, rank) if group is not None else rank


def exchange_rows(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """The first send[0] rows of x go to rank 0 of the group, the next send[1] to rank 1, ...: [n, ...] -> [n', ...]."""
    if size_of(group) == 1:
        return x
    received = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), receive, send, group=group)
    return received


class Exchange(torch.autograd.Function):
    """`exchange_rows` with a gradient. Rows are only moved, so their gradients are moved back, unscaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send = send
        ctx.receive = receive
        ctx.group = group
        return exchange_rows(x, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        # --- exercise 7.30: gradients retrace the way of the rows ---
        return exchange_rows(dy, ctx.receive, ctx.send, ctx.group), None, None, None
        # --- end exercise ---


class RouterError(ValueError):
    """Router logits that are not finite, with layer and rank; raised on all ranks of the expert group."""


@dataclass
class Plan:
    """The plan of one call of the layer, reused if the call is recomputed."""

    E: int
    experts: Tensor  # [T, K]
    kept: Tensor | None  # [T, K] bool, the choices that are not dropped; None: all
    rows: Tensor  # [n] what this rank sends, by receiver: flat (token, choice), or token
    to: Tensor  # [n] the receiver of each row
    send: list[int]  # [P] rows for each rank
    receive: list[int]  # [P] rows from each rank
    arrived: list[list[int]]  # [P][E/P] pairs from each rank for each expert here


def make_plan(
    version: str, experts: Tensor, kept: Tensor | None, E: int, group: Group, bad: Tensor | None = None, what: str = ""
) -> Plan:
    """Count the rows per receiver and exchange the counts in one small all-to-all. The host reads them.

    This is the only host wait in a layer, forward and backward (`experts_grouped` adds one), because the host
    needs the numbers of rows to send them. Operations whose output size depends on data (`nonzero`, indexing
    with a mask) are avoided: the wanted entries are sorted to the front, and cut once the sizes are known.

    bad: 0-dim, how many tokens have logits that are not finite. It is sent with the counts, so that all ranks
    end with the same error at the same time, rather than some in a timeout. what: the layer of the logits.
    """
    P = size_of(group)
    T = len(experts)
    bad = experts.new_zeros(()) if bad is None else bad
    if version == "pairs":
        # --- exercise 7.31: permute: the pairs sorted by expert and so by rank, dropped ones last ---
        wants = experts.flatten() if kept is None else experts.flatten().masked_fill(~kept.flatten(), E)  # E: dropped
        rows = wants.argsort(stable=True)  # [T K] flat pairs t·K + k; within an expert in token order
        to = wants[rows] // (E // P)  # [T K]
        mine = expert_counts(wants, E + 1)[:E].view(P, -1)  # [P, E/P]
        # --- end exercise ---
        leave = mine.sum(1, keepdim=True)  # [P, 1] rows for each rank
    else:
        used = torch.ones_like(experts, dtype=torch.bool) if kept is None else kept
        wanted = torch.zeros(T, P, dtype=torch.int64, device=experts.device)
        wanted.scatter_add_(1, experts // (E // P), used.long())  # how many experts of each rank a token uses
        wanted = wanted > 0 if version == "once" else torch.ones_like(wanted)
        rows = first_true(wanted.T)  # [P T] by rank, then by token; unused ones last
        to = rows // max(T, 1)
        rows = rows % max(T, 1)
        leave = wanted.sum(0)[:, None]  # [P, 1]
        mine = expert_counts(experts.masked_fill(~used, E), E + 1)[:E].view(P, -1)  # [P, E/P]
    message = torch.cat((leave, mine, bad.expand(P, 1)), 1)
    if version == "pairs":
        message = message[:, 1:]  # the receiver can sum the pairs to get the rows
    theirs = exchange_rows(message, [1] * P, [1] * P, group)  # [P, E/P + 1] or [P, E/P + 2]: row r is from rank r
    message, come = torch.stack((message, theirs)).tolist()  # the host waits
    ill = [f"{row[-1]} tokens on rank {global_rank(group, rank)}" for rank, row in enumerate(come) if row[-1]]
    if ill:
        raise RouterError(f"router logits of {what} are not finite: {', '.join(ill)}")
    send, receive = ([sum(row[:-1]) if version == "pairs" else row[0] for row in side] for side in (message, come))
    arrived = [row[-1 - E // P : -1] for row in come]
    n = sum(send)
    if n < len(rows):
        rows = rows[:n].clone()
        to = to[:n].clone()  # a view would also keep the rest alive
    return Plan(E, experts, kept, rows, to, send, receive, arrived)


def first_true(wanted: Tensor) -> Tensor:
    """The flat indices where `wanted` is true, in order, then the others: the length is always that of
    `wanted`. The length of `nonzero` depends on the data, so the host would wait for it."""
    return (wanted.flatten() == 0).long().argsort(stable=True)


def dispatch_pairs(x: Tensor, weights: Tensor, plan: Plan, compute: Compute, group: Group) -> Tensor:
    """x [T, H], weights [T, K] -> [T, H]. The rank of the token takes the weighted sum."""
    K = weights.shape[1]
    per_rank = len(plan.arrived[0])
    # --- exercise 7.32: there, compute, and back, each row to its place ---
    rows = Exchange.apply(x[plan.rows // K], plan.send, plan.receive, group)  # [n, H] -> [n', H]: by rank, then expert
    blocks = torch.arange(len(rows), device=x.device).split([n for row in plan.arrived for n in row])  # P E/P of them
    order = torch.cat([block for e in range(per_rank) for block in blocks[e::per_rank]])  # [n'] by expert, then rank
    y = compute(rows[order], [sum(column) for column in zip(*plan.arrived, strict=True)])
    y = torch.zeros_like(y).index_copy(0, order, y)  # back into the order of arrival
    y = Exchange.apply(y, plan.receive, plan.send, group)  # [n', H] -> [n, H]
    pairs = y.new_zeros(weights.numel(), y.shape[1]).index_copy(0, plan.rows, y)  # [T K, H]; dropped pairs stay zero
    return (pairs.unflatten(0, (-1, K)) * weights[..., None].to(y.dtype)).sum(1)  # [T, K, H] -> [T, H]
    # --- end exercise ---


def dispatch_rows(x: Tensor, weights: Tensor, plan: Plan, compute: Compute, group: Group) -> Tensor:
    """The same for versions everywhere and once. The weights are also sent; the expert's rank takes the sum.

    Each row has a table [n, E/P] of the weights for the receiver's experts, with -1 for "not this one", since
    a weight is never negative, but can be 0 and still have a gradient.
    """
    P = size_of(group)
    E = plan.E
    weights = weights if plan.kept is None else weights.masked_fill(~plan.kept, -1)
    table = weights.new_full((len(x), E), -1).scatter(1, plan.experts, weights)  # [T, E]
    # --- exercise 7.33: rows and weights there, one sum per row back ---
    table = table.unflatten(1, (P, -1))[plan.rows, plan.to]  # [T, P, E/P] -> [n, E/P]
    rows = Exchange.apply(x[plan.rows], plan.send, plan.receive, group)  # [n, H] -> [n', H]
    table = Exchange.apply(table, plan.send, plan.receive, group)  # [n, E/P] -> [n', E/P]
    counts = [sum(column) for column in zip(*plan.arrived, strict=True)]  # pairs of each expert here
    pairs = first_true((table >= 0).T)[: sum(counts)]  # (row, expert) pairs here, by expert
    expert = pairs // max(len(table), 1)
    row = pairs % max(len(table), 1)
    y = compute(rows[row], counts)
    y = y * table[row, expert, None].to(y.dtype)
    y = y.new_zeros(len(rows), y.shape[1]).index_add(0, row, y)  # [n', H]: summed over this rank's experts
    y = Exchange.apply(y, plan.receive, plan.send, group)  # [n', H] -> [n, H]
    return y.new_zeros(len(x), y.shape[1]).index_add(0, plan.rows, y)  # [n, H] -> [T, H]: summed over ranks
    # --- end exercise ---


DISPATCH = {"everywhere": dispatch_rows, "pairs": dispatch_pairs, "once": dispatch_rows}


def reference(x: Tensor, weights: Tensor, plan: Plan, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """Every expert computes every token, and most results are multiplied by 0: slow, E/K times the work."""
    weights = weights if plan.kept is None else weights * plan.kept
    share = weights.new_zeros(len(x), plan.E).scatter(1, plan.experts, weights)  # [T, E]
    every = torch.stack(
        [F.linear(swiglu(F.linear(x, g), F.linear(x, u)), d) for g, u, d in zip(w1, w3, w2, strict=True)]
    )
    return (every * share.T[..., None]).sum(0)  # [E, T, H] -> [T, H]


# ------------------------------------------------------------------------------------------------------------- demo


def rows_that_leave(version: str, experts: Tensor, used: Tensor, E: int, P: int, rank: int) -> list[int]:
    """Rows that `rank` of P sends to each rank (to itself 0), from its tokens' choices: the formula's n."""
    owner = experts // (E // P)  # [T, K]
    if version == "everywhere":
        rows = [len(experts)] * P
    elif version == "pairs":
        rows = [int(((owner == r) & used).sum()) for r in range(P)]
    else:
        rows = [int(((owner == r) & used).any(1).sum()) for r in range(P)]
    return [n if r != rank else 0 for r, n in enumerate(rows)]


def bytes_sent(version: str, rows: list[list[int]], rank: int, H: int, E: int, e: int, e_weight: int) -> int:
    """Bytes that `rank` sends in all-to-alls, both passes. rows[i][j]: rows from rank i to rank j, i != j."""
    P = len(rows)
    n = sum(rows[rank])
    m = sum(row[rank] for row in rows)
    counts = (P - 1) * 8 * (E // P + (1 if version == "pairs" else 2))  # int64, forward only
    tables = 0 if version == "pairs" else (n + m) * E // P * e_weight  # weights and their gradients
    return 2 * (n + m) * H * e + tables + counts


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """One layer on P ranks, each with its own text, next to one process with all tokens and all experts."""
    rank = dist.get_rank(group)
    P = size_of(group)
    E = args.experts
    K = args.top_k
    H = args.hidden
    F_ = args.intermediate
    report = Report(group)
    T = args.tokens
    dtype = torch.float32 if args.compute == "grouped" else torch.float64
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (256, H), "gate": (E, H), "w1": (E, F_, H), "w3": (E, F_, H), "w2": (E, H, F_)}
    full = {n: torch.randn(*s, generator=generator, dtype=dtype).to(device) / s[-1] ** 0.5 for n, s in shapes.items()}
    inputs = F.rms_norm(full.pop("embed")[text(1, P * T)[0].to(device)], (H,))  # [P·T, H]

    def leaf(x: Tensor) -> Tensor:
        return x.clone().requires_grad_()

    def choose(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        routing = route(router_logits(x, gate), K, args.router, None, args.nodes, args.max_nodes)
        return routing.experts, routing.weights

    def drop(experts: Tensor, among: Group) -> Tensor | None:
        return within_capacity(experts, E, args.capacity, among) if args.capacity else None

    want = {name: leaf(value) for name, value in full.items()}
    want_x = leaf(inputs)
    experts, weights = choose(want_x, want["gate"])
    plan = make_plan("pairs", experts, drop(experts, None), E, None)
    all_kept = plan.kept
    want_y = reference(want_x, weights, plan, want["w1"], want["w3"], want["w2"])
    (want_y * want_y.detach().cos()).sum().backward()  # a gradient with different elements

    here = slice(rank * T, (rank + 1) * T)
    local = slice(rank * E // P, (rank + 1) * E // P)
    mine = {n: leaf(v if n == "gate" else v[local]) for n, v in full.items()}
    my_x = leaf(inputs[here])
    with Wire() as wire:
        my_experts, my_weights = choose(my_x, mine["gate"])
        plan = make_plan(args.version, my_experts, drop(my_experts, group), E, group)
        compute = partial(COMPUTES[args.compute], w1=mine["w1"], w3=mine["w3"], w2=mine["w2"])
        y = DISPATCH[args.version](my_x, my_weights, plan, compute, group)
        (y * y.detach().cos()).sum().backward()
    dist.all_reduce(mine["gate"].grad, group=group)  # routers have seen different tokens
    report.compare(y, want_y[here])
    report.compare(my_x.grad, want_x.grad[here])
    for name, value in mine.items():  # an expert is on one rank and has seen all of its tokens: no sum
        report.compare(value.grad, want[name].grad if name == "gate" else want[name].grad[local])

    kept = torch.ones_like(experts, dtype=torch.bool) if all_kept is None else all_kept
    of_ranks = zip(experts.split(T), kept.split(T), strict=True)
    rows = [rows_that_leave(args.version, theirs, k, E, P, r) for r, (theirs, k) in enumerate(of_ranks)]
    report.title(f"{P} rank(s) with {T} tokens, {K} of {E} experts, version {args.version}, compute {args.compute}")
    report.add_errors("largest error of outputs and gradients", 1e-10 if dtype == torch.float64 else 1e-5)
    e = inputs.element_size()
    report.add("rows that leave this rank", sum(rows[rank]), sum(plan.send) - plan.send[rank])
    sent = bytes_sent(args.version, rows, rank, H, E, e, e)
    report.add("bytes sent in all-to-alls, forward and backward", sent, wire.bytes)
    held = sum(value.nbytes for name, value in mine.items() if name != "gate")
    report.add("bytes of experts on this rank, 3 H F E/P", 3 * H * F_ * E // P * e, held)
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="Dispatch of tokens to experts on other ranks.", allow_abbrev=False)
    parser.add_argument("--version", choices=DISPATCH, default="pairs")
    parser.add_argument("--compute", choices=COMPUTES, default="loop")
    parser.add_argument("--router", choices=ROUTERS, default="softmax")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the experts lie on")
    parser.add_argument("--max-nodes", type=int, default=1, help="nodes that a token may use")
    parser.add_argument("--capacity", type=float, default=None, help="capacity factor; without it nothing is dropped")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=96, help="of one expert")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each rank")
    args = parser.parse_args()
    parser.check_range(args, experts=(1, 1024), top_k=(1, 1024), nodes=(1, 1024), tokens=(1, 4096))
    parser.check_range(args, hidden=(4, 4096), intermediate=(4, 4096))
    try:
        check_routing(args.experts, args.top_k, args.router, args.nodes, args.max_nodes)
        check_experts(args.experts, int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        parser.error(f"--{error}")
    if args.capacity is not None and not 0 < args.capacity < math.inf:
        parser.error(f"--capacity {args.capacity} leaves no room; use a positive number")
    if args.compute == "grouped" and (args.hidden % 4 or args.intermediate % 4):
        parser.error("--compute grouped needs --hidden and --intermediate that are multiples of 4")
    check_gpus(parser)
    launch(lambda group, device: demo(args, group, device))


if __name__ == "__main__":
    main()
