"""What node-limited routing saves: rows and bytes of each way to dispatch, measured at 4 ranks.

    python 07_expert_parallel/in_depth/bench_routing.py

First every router must choose as a loop in plain Python does, and every byte count must equal its formula; only then is
anything written. Each rank counts as a node here: what a limit to M nodes bounds is how many ranks a token is sent to.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from expert_dispatch import DISPATCH, bytes_sent, experts_loop, make_plan, rows_that_leave
from harness.meter import communication
from harness.ranks import run_ranks
from harness.report import write_result
from routing import chosen_one_by_one, route, router_logits
from torch import Tensor

P, E, K, T, H = 4, 32, 4, 256, 64  # ranks, experts, experts per token, tokens of a rank, hidden
WAYS = [  # version, limit M of nodes per token (P: none)
    ("everywhere", P),
    ("pairs", P),
    ("pairs", 2),
    ("once", P),
    ("once", 2),
    ("once", 1),
]


def logits_of(rank: int, experts: int = E) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = F.rms_norm(torch.randn(T, H, generator=generator), (H,))
    gate = torch.randn(experts, H, generator=torch.Generator().manual_seed(99)) / H**0.5
    return router_logits(x, gate)


def verify() -> None:
    bias = 0.2 * torch.randn(E, generator=torch.Generator().manual_seed(1)).double()
    for router in ("softmax", "sigmoid"):
        for M in (1, 2, P):
            logits = logits_of(0).double()
            got = route(logits, K, router, bias if router == "sigmoid" else None, P, M).experts.tolist()
            nodes = (P, M) if M < P else (1, 1)
            if got != chosen_one_by_one(logits, K, router, bias, *nodes):
                sys.exit(f"the {router} router with at most {M} nodes chooses other experts than a loop does")


def measure() -> list[tuple[int, float]]:
    """On each rank: rows that left it, and bytes of forward and backward, by way. Exits if a formula is off."""
    rank, group, found = dist.get_rank(), dist.group.WORLD, []
    w = [torch.randn(E // P, *shape) / 8 for shape in ((16, H), (16, H), (H, 16))]
    for version, M in WAYS:
        choices = [route(logits_of(r), K, "softmax", None, P, M) for r in range(P)]
        used = torch.ones_like(choices[0].experts).bool()
        rows = [rows_that_leave(version, c.experts, used, E, P, r) for r, c in enumerate(choices)]
        x, weights = torch.randn(T, H).requires_grad_(), choices[rank].weights.clone().requires_grad_()
        with communication() as sent:
            plan = make_plan(version, choices[rank].experts, None, E, group)
            y = DISPATCH[version](x, weights, plan, partial(experts_loop, w1=w[0], w3=w[1], w2=w[2]), group)
            y.sum().backward()
        want = bytes_sent(version, rows, rank, H, E, 4, 4)
        if sent.sent["all_to_all"] != want:
            raise ValueError(f"{version}, rank {rank}: {sent.sent['all_to_all']} bytes sent; the formula says {want}")
        found.append((sum(rows[rank]), sent.sent["all_to_all"]))
    return found


def rows_per_token(version: str, M: int, ranks: int, experts: int, k: int) -> float:
    choices = [route(logits_of(r, experts), k, "softmax", None, ranks, M).experts for r in range(4)]
    used = torch.ones_like(choices[0]).bool()
    return sum(sum(rows_that_leave(version, c, used, experts, ranks, r)) for r, c in enumerate(choices)) / (4 * T)


def main() -> None:
    argparse.ArgumentParser(description="Count rows and bytes of routed tokens.", allow_abbrev=False).parse_args()
    verify()
    by_rank = run_ranks(P, measure)
    total = [sum(found[way][1] for found in by_rank) for way in range(len(WAYS))]
    base = total[WAYS.index(("pairs", P))]
    write_result(
        "07_routing_bytes",
        f"Rows that leave a rank, and bytes of all all-to-alls, forward and backward, at {P} ranks",
        ["dispatch", "ranks of a token", "rows per token", "bytes over pairs"],
        [
            [
                version,
                "any" if limit == P else f"at most {limit}",
                sum(found[way][0] for found in by_rank) / (P * T),
                total[way] / base,
            ]
            for way, (version, limit) in enumerate(WAYS)
        ],
        f"{K} of {E} experts, {T} tokens per rank, hidden size {H}, float32. Every count equals its formula.",
    )
    sizes = [(8, 2), (8, 4), (16, 4), (64, 4)]
    write_result(
        "07_routing_nodes",
        "Rows that leave a rank per token with 8 of 256 experts, from routed counts",
        ["ranks", "pairs", "once", "once, at most M ranks", "M"],
        [
            [
                ranks,
                rows_per_token("pairs", ranks, ranks, 256, 8),
                rows_per_token("once", ranks, ranks, 256, 8),
                rows_per_token("once", M, ranks, 256, 8),
                M,
            ]
            for ranks, M in sizes
        ],
        "DeepSeek-V3's numbers of experts (8 of 256, at most 4 nodes). Counted by the same formula, not sent.",
    )


if __name__ == "__main__":
    main()
