"""Bytes over the slow link and inside the nodes, in one hop and in two, with and without a limit to nodes of a token.

    python 07_expert_parallel/in_depth/bench_two_hops.py                counts at 8 ranks, then draws the figure
    python 07_expert_parallel/in_depth/bench_two_hops.py --figures      only draws it, from the results

First the outputs of each way must be those of all experts on all tokens, and bytes of two hops those of their formulas.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _moe_demo import Wire
from expert_dispatch import DISPATCH, experts_loop, make_plan, reference
from harness.figures import COLOURS, write_figure
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import write_result
from routing import route
from torch import Tensor
from two_hops import bytes_by_link, dispatch_two_hops, node_groups, weight_table

P, NODES, E, K, T, H, F_ = 8, 4, 32, 4, 64, 256, 32  # ranks, nodes, experts, experts per token, tokens of a rank
WAYS = [  # (what, nodes of a token)
    ("pairs", NODES),
    ("once", NODES),
    ("two hops", NODES),
    ("pairs", 2),
    ("once", 2),
    ("two hops", 2),
    ("two hops", 1),
]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measure() -> list[tuple[int, int]]:
    """On each rank, of each way: bytes to other nodes and inside its own, forward and backward."""
    rank, group, found = dist.get_rank(), dist.group.WORLD, []
    inside, across = node_groups(list(range(P)), NODES)
    whole = [random(E, F_, H, seed=1) / 16, random(E, F_, H, seed=2) / 16, random(E, H, F_, seed=3) / 6]
    compute = partial(experts_loop, **dict(zip(("w1", "w3", "w2"), (w.chunk(P)[rank] for w in whole), strict=True)))
    for way, M in WAYS:
        choices = [route(random(T, E, seed=10 + r), K, "softmax", None, NODES, M) for r in range(P)]
        mine = choices[rank]
        x, weights = random(T, H, seed=50 + rank).requires_grad_(), mine.weights.clone().requires_grad_()
        with Wire() as wire:
            if way == "two hops":
                y = dispatch_two_hops(x, weight_table(mine.experts, weights, E), compute, inside, across)
            else:
                y = DISPATCH[way](x, weights, make_plan(way, mine.experts, None, E, group), compute, group)
            y.sum().backward()
        want = reference(x, weights, make_plan("pairs", mine.experts, None, E, None), *whole)
        assert_same(y, want, 2e-5, f"{way}, at most {M} nodes", rank)
        slow = sum(n for to, n in wire.to.items() if to // (P // NODES) != rank // (P // NODES))
        if way == "two hops":
            expected = bytes_by_link([c.experts for c in choices], rank, NODES, E, H, 4)
            if (slow, wire.bytes - slow) != expected:
                raise ValueError(f"{way}, rank {rank}: {slow} and {wire.bytes - slow} bytes; formulas say {expected}")
        found.append((slow, wire.bytes - slow))
    return found


def draw(axes, result) -> None:
    axis = axes
    names = [f"{row[0]},\n{row[1]}" for row in result["rows"]]
    bottom = [0.0] * len(names)
    for column, name, alpha in ((2, "over the slow link", 1.0), (3, "inside the nodes", 0.4)):
        values = [row[column] for row in result["rows"]]
        axis.bar(names, values, bottom=bottom, label=name, color=COLOURS["messages"], alpha=alpha, width=0.6)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    axis.set(ylabel="kilobytes per token")
    axis.tick_params(axis="x", labelsize=8)
    axis.legend(frameon=False)


def figures() -> None:
    write_figure("07_expert_parallel/figures/two_hops.svg", ["07_two_hops"], draw, shape=(1, 1), size=(9, 3.4))


def main() -> None:
    parser = argparse.ArgumentParser(description="Count bytes by link.", allow_abbrev=False)
    parser.add_argument("--figures", action="store_true", help="only draw, from the results")
    if parser.parse_args().figures:
        return figures()
    by_rank = run_ranks(P, measure, timeout=300)
    sums = [[sum(found[way][link] for found in by_rank) for link in (0, 1)] for way in range(len(WAYS))]
    write_result(
        "07_two_hops",
        f"Bytes by link, forward and backward, at {P} ranks on {NODES} nodes",
        ["dispatch", "nodes of a token", "kB per token over the slow link", "inside the nodes", "slow link over pairs"],
        [
            [
                way,
                "any" if M == NODES else f"at most {M}",
                slow / (1000 * P * T),
                fast / (1000 * P * T),
                slow / sums[0][0],
            ]
            for (way, M), (slow, fast) in zip(WAYS, sums, strict=True)
        ],
        f"{K} of {E} experts, {T} tokens per rank, hidden size {H}, float32, random choices: a row is 1,024 bytes. "
        "Counted, tables of weights and counts included; those of two hops equal their formulas.",
    )
    figures()
    return None


if __name__ == "__main__":
    main()
