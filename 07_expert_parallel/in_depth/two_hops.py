"""Expert parallelism VI, the slow link: two hops, to the node and inside it, overlapped with shared experts.

Problem. Inside a node messages are many times as fast as between nodes. A row for each (token, rank) crosses
the slow link several times if a token uses experts on several ranks of one other node. And the
ranks compute nothing while rows are in flight.

Idea. (1) Two hops. A token is sent once to each node that it needs, to the rank with the same place there,
and from there over fast links to the ranks of its experts. Their outputs are summed inside the node, and one
row is sent back. One algorithm, `hop`, is used twice: the experts behind the first hop are a second hop.

    4 ranks, 2 nodes of 2, E = 8         node 0: rank 0: e0 e1, rank 1: e2 e3      node 1: rank 2: e4 e5, rank 3: e6 e7
    a token of rank 1 uses e0 e4 e7
    version once   1 -> 0, 1 -> 2, 1 -> 3                    two rows over the slow link
    two hops       1 -> 3 (its place in node 1)              one row over the slow link
                   1 -> 0 and 3 -> 2, 3 itself               inside the nodes
                   3 sums e4 and e7, 1 adds e0 to it         one row back

    across     the ranks with my place, one in each node: [0 2] [1 3]        inside     my node: [0 1] [2 3]

A router that is limited to M nodes (routing.py) bounds what crosses the link: at most M rows for a token.

(2) Overlap. A shared expert needs no remote rows. So rows are sent, the shared expert computes meanwhile, and
only then the rank waits for what arrives. Backward mirrors this without extra code: autograd runs the
operations in reverse, so it sends where forward waited, and waits where forward sent.

    forward     rows sent     | shared expert |            rows there     experts     outputs
    backward    gradients of outputs    experts    gradients sent    | shared expert |    gradients there

Formulas, for rows of H elements of e bytes, sent with tables of weights. n_t: other nodes of token t
    over the slow link     sum over t of n_t rows, as many back; at most min(K, N - 1) T, limited: M T
    a table for each row   E/N weights over the slow link, E/P inside a node; gradients alike
    counts                 8 bytes for the rows, and for each expert behind the receiver; forward only
Each hop waits once for its counts: two waits per layer. (Two hops: DeepSeek-V3, 2412.19437, section 3.2.2.)

Run it:
    python two_hops.py                                                one rank, CPU or GPU
    torchrun --nproc_per_node 4 two_hops.py --nodes 2                 Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 4 two_hops.py --nodes 2 --max-nodes 1
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _moe_demo import OneLineParser, Report, Wire, check_gpus, launch, text
from expert_dispatch import (
    Compute,
    Exchange,
    check_experts,
    exchange_rows,
    experts_loop,
    first_true,
    make_plan,
    reference,
    size_of,
)
from routing import ROUTERS, Group, check_routing, route, router_logits
from torch import Tensor
from torch.autograd.function import once_differentiable

# Legend of shapes: T tokens of this rank, H hidden, F intermediate size of one expert, E experts, K experts per token;
# N nodes of P/N ranks. Rank r is on node r // (P/N) and holds the E/P experts from r E/P on: a node's are
# consecutive. P' ranks of the group of a hop, E' experts in its table, m rows that leave in it and m' that arrive.
Inner = Callable[[Tensor, Tensor, list[int]], Tensor]  # rows [n, H], table [n, E'], pairs of each expert -> [n, H]
Note = Callable[[str], None]  # called for each event


def node_groups(ranks: list[int], nodes: int, timeout: float = 60.0) -> tuple[Group, Group]:
    """(inside, across) of this rank, if it is in `ranks`: its node, and the ranks with its place in other
    nodes. Collective over the world. `ranks` ascend, and the ranks of a node are consecutive.

    Raises ValueError if the nodes cannot have equally many ranks.
    """
    if nodes < 1 or len(ranks) % nodes:
        fits = ", ".join(str(n) for n in range(1, len(ranks) + 1) if len(ranks) % n == 0)
        raise ValueError(f"{nodes} nodes cannot share {len(ranks)} ranks evenly; use {fits}")
    size = len(ranks) // nodes
    mine = [None, None]
    # --- exercise 7.43: cut the ranks into nodes, and into those that have the same place ---
    inside = [ranks[i : i + size] for i in range(0, len(ranks), size)]
    across = [ranks[i::size] for i in range(size)]
    # --- end exercise ---
    for axis, members in [(0, m) for m in inside] + [(1, m) for m in across]:
        group = dist.new_group(members, timeout=timedelta(seconds=timeout))
        if dist.get_rank() in members:
            mine[axis] = group
    return mine[0], mine[1]


# -------------------------------------------------------------------------------------------------- rows in flight


@dataclass
class Trip:
    """Rows that are sent now and waited for later, and the same for their gradients."""

    send: list[int]
    receive: list[int]
    group: Group
    note: Note
    under_way: tuple | None = None  # the work, its output, and its input, kept alive until it is done

    def depart(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        x = x.contiguous()
        y = x.new_empty(sum(receive), *x.shape[1:]) if size_of(self.group) > 1 else x.clone()
        many = size_of(self.group) > 1
        work = dist.all_to_all_single(y, x, receive, send, group=self.group, async_op=True) if many else None
        self.under_way = work, y, x
        return y

    def arrive(self) -> Tensor:
        work, y, _ = self.under_way
        if work is not None:
            work.wait()
        self.under_way = None
        return y


class Depart(torch.autograd.Function):
    """Send rows [m, H]; do not read the result [m', H] before `Arrive`. Backward: wait for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.note("rows sent")
        return trip.depart(x, trip.send, trip.receive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, passes: Tensor) -> tuple:  # a placeholder from `Arrive`; the gradient is in flight
        dx = ctx.trip.arrive()
        ctx.trip.note("gradients there")
        return dx, None


class Arrive(torch.autograd.Function):
    """Wait: from here on the rows can be read. Backward: send their gradients back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.arrive()
        trip.note("rows there")
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        # --- exercise 7.44: send the gradients without a wait; `Depart` gets a tensor of the right shape ---
        ctx.trip.note("gradients sent")
        ctx.trip.depart(dy, ctx.trip.receive, ctx.trip.send)
        return dy, None
        # --- end exercise ---


# --------------------------------------------------------------------------------------------- one hop, and a second


def hop(
    x: Tensor,
    table: Tensor,
    inner: Inner,
    group: Group,
    meanwhile: Callable[[], Tensor] | None = None,
    note: Note = lambda event: None,
) -> Tensor:
    """x [n, H], table [n, E'] of weights, -1 for "not this one" -> [n, H], the weighted sums of the experts' outputs.

    Each of the P' ranks of the group covers E'/P' consecutive experts of the table; `inner` computes their
    sums. A row is sent once to each rank that covers one of its experts, and one sum comes back. `meanwhile`
    is computed while rows are in flight, and added: [n, H].
    """
    P = size_of(group)
    n = len(x)
    by_rank = table.unflatten(1, (P, -1))  # [n, P', E'/P']
    # --- exercise 7.45: each row to each rank that it needs, once; there `inner` answers; the sums come back ---
    wanted = (by_rank >= 0).any(2).T  # [P', n]
    to_row = first_true(wanted)  # [P' n] by rank, then by row; unused ones last
    mine = torch.cat((wanted.sum(1, keepdim=True), (by_rank >= 0).sum(0)), 1)  # [P', 1 + E'/P'] rows, pairs by expert
    theirs = exchange_rows(mine, [1] * P, [1] * P, group)  # [P', 1 + E'/P']: row r is from rank r
    out, come = torch.stack((mine, theirs)).tolist()  # the host waits
    send = [row[0] for row in out]
    receive = [row[0] for row in come]
    to = to_row[: sum(send)] // max(n, 1)
    row = to_row[: sum(send)] % max(n, 1)
    tables = Exchange.apply(by_rank[row, to], send, receive, group)  # [m, E'/P'] -> [m', E'/P']
    trip = Trip(send, receive, group, note)
    rows = Depart.apply(x[row], trip)  # [m, H] -> [m', H]
    aside = meanwhile() if meanwhile else None  # [n, H]
    rows = Arrive.apply(rows, trip)
    sums = inner(rows, tables, [sum(column) for column in list(zip(*come, strict=True))[1:]])  # [m', H]
    sums = Exchange.apply(sums, receive, send, group)  # [m', H] -> [m, H]
    y = sums.new_zeros(n, sums.shape[1]).index_add(0, row, sums)  # [m, H] -> [n, H]
    return y if aside is None else y + aside
    # --- end exercise ---


def answer(rows: Tensor, table: Tensor, counts: list[int], compute: Compute) -> Tensor:
    """The innermost step: rows [n, H], table [n, E/P] -> weighted sums [n, H] over this rank's experts."""
    pairs = first_true((table >= 0).T)[: sum(counts)]  # by expert, then by row
    expert = pairs // max(len(rows), 1)
    row = pairs % max(len(rows), 1)
    y = compute(rows[row], counts) * table[row, expert, None].to(rows.dtype)
    return y.new_zeros(len(rows), y.shape[1]).index_add(0, row, y)


def weight_table(experts: Tensor, weights: Tensor, E: int) -> Tensor:
    """[T, K] twice -> [T, E]. -1 for none, since a weight is never negative but can be 0 with a gradient."""
    return weights.new_full((len(weights), E), -1).scatter(1, experts, weights)


def dispatch_two_hops(
    x: Tensor,
    table: Tensor,
    compute: Compute,
    inside: Group,
    across: Group,
    meanwhile: Callable[[], Tensor] | None = None,
    note: Note = lambda event: None,
) -> Tensor:
    """x [T, H], table [T, E] -> [T, H]: over the slow link to the nodes of a token, then to the ranks."""
    # --- exercise 7.46: a hop whose experts are a second hop ---
    in_node = lambda rows, table, counts: hop(rows, table, partial(answer, compute=compute), inside)  # noqa: E731
    return hop(x, table, in_node, across, meanwhile, note)
    # --- end exercise ---


# ------------------------------------------------------------------------------------------------------------- demo


def bytes_by_link(experts: list[Tensor], rank: int, nodes: int, E: int, H: int, e: int) -> tuple[int, int]:
    """(over the slow link, inside the node): bytes from `rank` in all-to-alls, both passes, with two hops.

    experts: [T, K] of each rank. Rows, tables of weights and gradients have e bytes per element."""
    P = len(experts)
    size = P // nodes
    node = rank // size
    place = rank % size
    owner = [chosen // (E // P) for chosen in experts]  # [T, K]

    def rows(of: int, *ranks: int) -> int:
        """Tokens of rank `of` that use an expert on one of these ranks."""
        return int(torch.stack([(owner[of] == r).any(1) for r in ranks]).any(0).sum())

    members = lambda n: range(n * size, (n + 1) * size)  # noqa: E731
    others = [n for n in range(nodes) if n != node]
    out = sum(rows(rank, *members(n)) for n in others)
    back = sum(rows(n * size + place, *members(node)) for n in others)
    slow = (out + back) * (2 * H + E // nodes) * e + (nodes - 1) * 8 * (1 + E // nodes)
    peers = [r for r in members(node) if r != rank]
    out = sum(rows(n * size + place, peer) for n in range(nodes) for peer in peers)
    back = sum(rows(n * size + peer % size, rank) for n in range(nodes) for peer in peers)
    return slow, (out + back) * (2 * H + E // P) * e + (size - 1) * 8 * (1 + E // P)


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """One layer with a shared expert, in two hops, next to one process with all tokens and all experts."""
    rank = dist.get_rank(group)
    P = size_of(group)
    E = args.experts
    K = args.top_k
    T = args.tokens
    H = 32
    F_ = 48
    inside, across = node_groups(list(range(P)), args.nodes)
    report = Report(group)
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (256, H), "gate": (E, H), "w1": (E, F_, H), "w3": (E, F_, H), "w2": (E, H, F_)}
    shapes |= {"up": (F_, H), "down": (H, F_)}
    full = {n: torch.randn(*s, generator=generator, dtype=torch.float64).to(device) / 6 for n, s in shapes.items()}
    inputs = F.rms_norm(full.pop("embed")[text(1, P * T)[0].to(device)], (H,))  # [P T, H]

    def choose(x: Tensor, gate: Tensor):
        return route(router_logits(x, gate), K, args.router, None, args.nodes, args.max_nodes)

    want = {name: value.clone().requires_grad_() for name, value in (full | {"x": inputs}).items()}
    routing = choose(want["x"], want["gate"])
    plan = make_plan("pairs", routing.experts, None, E, None)
    y = reference(want["x"], routing.weights, plan, want["w1"], want["w3"], want["w2"])
    want_y = y + F.linear(F.linear(want["x"], want["up"]).tanh(), want["down"])
    (want_y * want_y.detach().cos()).sum().backward()

    cut = ("w1", "w3", "w2")
    here = {n: v.chunk(P)[rank] if n in (*cut, "x") else v for n, v in (full | {"x": inputs}).items()}
    mine = {name: value.clone().requires_grad_() for name, value in here.items()}
    events: list[str] = []

    def shared() -> Tensor:
        events.append("shared expert")
        out = F.linear(F.linear(mine["x"], mine["up"]).tanh(), mine["down"])
        out.register_hook(lambda gradient: events.append("shared expert, backward"))
        return out

    compute = partial(experts_loop, w1=mine["w1"], w3=mine["w3"], w2=mine["w2"])
    with Wire() as wire:
        choice = choose(mine["x"], mine["gate"])
        table = weight_table(choice.experts, choice.weights, E)
        y = dispatch_two_hops(mine["x"], table, compute, inside, across, shared, events.append)
        (y * y.detach().cos()).sum().backward()
    report.compare(y, want_y.chunk(P)[rank])
    for name, value in mine.items():
        if name in ("gate", "up", "down"):
            dist.all_reduce(value.grad, group=group)  # on every rank, with different tokens
        report.compare(value.grad, want[name].grad.chunk(P)[rank] if name in (*cut, "x") else want[name].grad)
    report.title(f"{P} rank(s) on {args.nodes} node(s) with {T} tokens, {K} of {E} experts on {args.max_nodes} node(s)")
    report.add_errors("largest error of outputs and gradients")
    my_node = rank // (P // args.nodes)
    slow = sum(n for to, n in wire.to.items() if to // (P // args.nodes) != my_node)
    expected = bytes_by_link(list(routing.experts.split(T)), rank, args.nodes, E, H, 8)
    report.add("bytes over the slow link, forward and backward", expected[0], slow)
    report.add("bytes inside the node", expected[1], wire.bytes - slow)
    report.add("events, in their order, as in the docstring", 6, len(events), events == EVENTS)
    if rank == 0:
        print("  " + ", ".join(events))
    return report.finish()


EVENTS = ["rows sent", "shared expert", "rows there", "gradients sent", "shared expert, backward", "gradients there"]


def main() -> None:
    parser = OneLineParser(description="Dispatch to the node first, then inside it.", allow_abbrev=False)
    parser.add_argument("--router", choices=ROUTERS, default="softmax")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the ranks are on")
    parser.add_argument("--max-nodes", type=int, default=None, help="nodes that a token may use; default: all")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each rank")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parser.check_range(args, experts=(1, 1024), top_k=(1, 1024), nodes=(1, 1024), tokens=(1, 4096))
    if world % args.nodes:
        fits = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        parser.error(f"--nodes {args.nodes} cannot share {world} ranks evenly; use {fits}")
    args.max_nodes = args.nodes if args.max_nodes is None else args.max_nodes
    try:
        check_routing(args.experts, args.top_k, args.router, args.nodes, args.max_nodes)
        check_experts(args.experts, world)
    except ValueError as error:
        parser.error(f"--{error}")
    check_gpus(parser)
    launch(lambda group, device: demo(args, group, device))


if __name__ == "__main__":
    main()
