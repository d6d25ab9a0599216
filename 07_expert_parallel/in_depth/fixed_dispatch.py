"""Expert parallelism V, fixed shapes: a layer in which the host never waits, since it knows every size.

Problem. The number of rows per sender and receiver is known only after routing, and the host needs it to send
them. So the layers of expert_dispatch.py wait once, until the device has finished all queued work. Then the
device is idle until the host queues more. And a layer that reads a value in the middle cannot be captured as
a CUDA graph and replayed.

Idea. Always send the same number of rows. Each rank has C slots for each of the E experts, and puts a pair
(token, expert) into the next free slot of its expert. Empty slots are sent as zeros; pairs without a slot are
dropped. A matmul [E/P, P C, H] x [E/P, H, F] computes all experts at once, including empty slots.

    E = 4, K = 1, P = 2, C = 2      rank 0: experts 0, 1        rank 1: experts 2, 3
    tokens choose                   a>2  b>0  c>2  d>1          p>0  q>3  r>0  s>0
    slots                           b .  d . | a c  . .         p r  . . | . .  q .        s finds no slot
    all-to-all of slots             b .  d .   p r  . .         a c  . .   . .  q .
    by expert, compute              b . p r > 0,  d . . . > 1   a c . . > 2,  . . q . > 3
    sent back                       a b c d                     p q r, and zero for s

Dropped pairs. An expert takes C pairs from each rank: first choices before second ones, then earlier tokens
before later ones. A dropped pair adds nothing to its token's output, gets no gradient and gives its weight
none; the other weights are not rescaled (GShard 2006.16668, section 2.2). With one queue over all ranks, as
in routing.py, all P C pairs of an expert may be from one rank: P times as many slots. A token chooses an
expert once, so with C = T nothing is dropped. Drops are counted on the device, to be read at any time. So are
tokens with logits that are not finite, which stop all ranks in expert_dispatch.py.

Formulas, with C = ceil(c K T/E), elements of e bytes
    sent by a rank       forward 2 (P-1) E/P C H e, about 2 c K T H e (P-1)/P; backward the same; no counts
    matmul rows          3 P C E/P on a rank: c times the rows of an even load, for any load
It pays if c is small, that is, if the load is even (routing.py), and if the host is the bottleneck.

Run it:
    python fixed_dispatch.py                                          one rank, CPU or GPU
    torchrun --nproc_per_node 4 fixed_dispatch.py                     Gloo on CPU, NCCL on GPU; no drops
    torchrun --nproc_per_node 2 fixed_dispatch.py --capacity 1.25     like the other layer with the same pairs dropped
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _moe_demo import HostWaits, OneLineParser, Report, Wire, check_gpus, launch, text
from expert_dispatch import Exchange, check_experts, dispatch_pairs, experts_loop, make_plan, size_of, swiglu
from routing import (
    ROUTERS,
    Group,
    balance_loss,
    capacity,
    check_routing,
    expert_counts,
    group_sum,
    route,
    router_logits,
)
from torch import Tensor

# Legend of shapes: T tokens of this rank, H hidden, F intermediate size of one expert, E experts, K experts per token,
# P ranks of the expert group, C slots of an expert on each rank. A pair is a token with one of its K experts.


def slots_of(experts: Tensor, E: int, C: int) -> Tensor:
    """experts [T, K] -> slots [T, K]: e C + place in the queue of expert e, or E C for a pair without one.

    The place is the number of earlier pairs of the same expert: a running sum, not a sort, of shape [K T, E]
    for any choices.
    """
    # --- exercise 7.41: a slot for each pair, first choices first; E C for those that find none ---
    wants = experts.T.flatten()  # [K T]: all first choices, then all second choices
    is_it = wants[:, None] == torch.arange(E, device=experts.device)  # [K T, E]
    place = (is_it.long().cumsum(0) - 1).gather(1, wants[:, None])[:, 0]  # [K T]
    slot = torch.where(place < C, wants * C + place, E * C)
    return slot.view(experts.shape[1], -1).T  # [K T] -> [T, K]
    # --- end exercise ---


def dispatch_fixed(
    x: Tensor,
    weights: Tensor,
    slots: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    C: int,
    group: Group,
    act: Callable = swiglu,
) -> Tensor:
    """x [T, H], weights and slots [T, K], w1 and w3 [E/P, F, H], w2 [E/P, H, F] of this rank's experts -> [T, H].

    The host knows every shape: no plan, no counts, no wait. T may differ between ranks, C may not.
    """
    T, K = slots.shape
    H = x.shape[1]
    P = size_of(group)
    mine = len(w1)
    E = mine * P
    share = [mine * C] * P
    # --- exercise 7.42: into slots, there, compute all slots, and all the way back ---
    pairs = x[:, None].expand(T, K, H).reshape(T * K, H)
    out = x.new_zeros(E * C + 1, H).index_copy(0, slots.flatten(), pairs)[:-1]  # the last slot is for the dropped
    rows = Exchange.apply(out, share, share, group)  # [P E/P C, H] -> all-to-all -> [P E/P C, H]: by sender
    rows = rows.view(P, mine, C, H).transpose(0, 1).reshape(mine, P * C, H)  # by expert
    hidden = act(rows @ w1.transpose(1, 2), rows @ w3.transpose(1, 2))  # [E/P, P C, F]
    y = (hidden @ w2.transpose(1, 2)).view(mine, P, C, H).transpose(0, 1).reshape(E * C, H)  # by sender
    y = Exchange.apply(y, share, share, group)  # [P E/P C, H] -> all-to-all -> [E C, H], into their slots
    y = torch.cat((y, y.new_zeros(1, H)))  # for dropped pairs
    return (y[slots] * weights[..., None].to(y.dtype)).sum(1)  # [T, K, H] -> [T, H]
    # --- end exercise ---


@dataclass(frozen=True)
class FixedPlan:
    """What moe_layer.py decides once per call, like `Plan` of expert_dispatch.py: here without messages."""

    experts: Tensor  # [T, K]
    slots: Tensor  # [T, K]
    C: int
    send: list[int]  # [P] slots to each rank, equal to `receive`
    receive: list[int]


def room(T: int, E: int, K: int, factor: float | None) -> int:
    """C, never more than T: a token chooses an expert once."""
    return T if factor is None else min(T, int(capacity(T, E, K, factor)))


def plan_fixed(experts: Tensor, E: int, factor: float | None, group: Group) -> FixedPlan:
    """factor: of the capacity; None: room for all, nothing is dropped."""
    T, K = experts.shape
    P = size_of(group)
    C = room(T, E, K, factor)
    return FixedPlan(experts, slots_of(experts, E, C), C, [E // P * C] * P, [E // P * C] * P)


@dataclass(frozen=True)
class Seen:
    """The counts of a call, on the device. Reading one makes the host wait, at a time of your choice."""

    dropped: Tensor  # 0-dim, pairs of this rank that found no slot
    ill: Tensor  # 0-dim, tokens of this rank with logits that are not finite
    counts: Tensor  # [E], how often each expert was chosen, on all ranks


def moe_fixed(
    x: Tensor,
    gate: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    K: int,
    C: int,
    group: Group,
    router: str = "softmax",
) -> tuple[Tensor, Tensor, Seen]:
    """The full layer, x [T, H] -> its output, this rank's share of the balance loss, and what was counted.

    Router, losses, experts: as in moe_layer.py; only dispatch differs.
    """
    logits = router_logits(x, gate)
    E = len(gate)
    routing = route(logits, K, router)
    slots = slots_of(routing.experts, E, C)
    y = dispatch_fixed(x, routing.weights, slots, w1, w3, w2, C, group)
    counts = group_sum(expert_counts(routing.experts, E), group)
    seen = Seen((slots == E * C).sum(), (~logits.isfinite()).any(1).sum(), counts)
    return y, balance_loss(routing.probabilities, counts, K), seen


def bytes_sent_fixed(P: int, E: int, C: int, H: int, e: int) -> int:
    """Bytes each rank sends in all-to-alls: dispatch and combine, in forward and in backward."""
    return 2 * 2 * (P - 1) * (E // P) * C * H * e


# ------------------------------------------------------------------------------------------------------------- demo


def eager(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, K: int, C: int, group: Group, router: str):
    """The layer in which the host waits, with the same pairs dropped: (output, balance loss)."""
    E = len(gate)
    routing = route(router_logits(x, gate), K, router)
    plan = make_plan("pairs", routing.experts, slots_of(routing.experts, E, C) < E * C, E, group)
    y = dispatch_pairs(x, routing.weights, plan, partial(experts_loop, w1=w1, w3=w3, w2=w2), group)
    return y, balance_loss(routing.probabilities, group_sum(expert_counts(routing.experts, E), group), K)


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    rank = dist.get_rank(group)
    P = size_of(group)
    E = args.experts
    K = args.top_k
    T = args.tokens
    H = 32
    F_ = 48
    C = room(T, E, K, args.capacity)
    report = Report(group)
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (256, H), "gate": (E, H), "w1": (E, F_, H), "w3": (E, F_, H), "w2": (E, H, F_)}
    full = {n: torch.randn(*s, generator=generator, dtype=torch.float64) / s[-1] ** 0.5 for n, s in shapes.items()}
    inputs = F.rms_norm(full.pop("embed")[text(1, P * T)[0]], (H,))[rank * T : (rank + 1) * T]
    first = {"x": inputs} | {n: v if n == "gate" else v.chunk(P)[rank] for n, v in full.items()}

    def run(layer: Callable, waiting: str = "default") -> tuple[dict[str, Tensor], list[str], int, tuple]:
        leaves = {name: value.to(device, copy=True).requires_grad_() for name, value in first.items()}
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode(waiting)  # "error": from here on a host wait raises
        with Wire() as wire, HostWaits() as waits:
            y, balance, *seen = layer(*leaves.values(), K, C, group, args.router)
            ((y * y.detach().cos()).sum() + 0.1 * balance).backward()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        return {"y": y.detach()} | {n: v.grad for n, v in leaves.items()}, waits.found, wire.bytes, (*seen, balance)

    want, its_waits, _, (its_balance,) = run(eager)
    got, waits, sent, (seen, balance) = run(moe_fixed, waiting="error")
    for name, value in want.items():
        report.compare(got[name], value)
    report.compare(balance.detach(), its_balance.detach())
    report.title(f"{P} rank(s) with {T} tokens, {K} of {E} experts, {C} slots for an expert on each rank")
    report.add_errors("largest error of outputs and gradients, against the layer that waits")
    report.add("waits of the host in the other layer", 1, len(its_waits))
    report.add("waits of the host in this one", 0, len(waits))
    chosen = route(router_logits(first["x"], first["gate"]), K, args.router).experts.flatten().bincount(minlength=E)
    report.add("pairs dropped here", int((chosen - C).clamp(min=0).sum()), int(seen.dropped))
    report.add("bytes sent in all-to-alls, forward and backward", bytes_sent_fixed(P, E, C, H, 8), sent)
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="Dispatch with fixed shapes: the host waits for nothing.", allow_abbrev=False)
    parser.add_argument("--router", choices=ROUTERS, default="softmax")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--capacity", type=float, default=None, help="capacity factor; without it C = T, none dropped")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each rank")
    args = parser.parse_args()
    parser.check_range(args, experts=(1, 1024), top_k=(1, 1024), tokens=(1, 4096))
    try:
        check_routing(args.experts, args.top_k, args.router)
        check_experts(args.experts, int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        parser.error(f"--{error}")
    if args.capacity is not None and not 0 < args.capacity < math.inf:
        parser.error(f"--capacity {args.capacity} leaves no room; use a positive number")
    check_gpus(parser)
    launch(lambda group, device: demo(args, group, device))


if __name__ == "__main__":
    main()
