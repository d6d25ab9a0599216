"""The layer with fixed shapes next to the one that waits: host waits, dropped pairs, bytes, seconds.

    python 07_expert_parallel/in_depth/bench_fixed_dispatch.py

First both must agree on outputs and every gradient, with the same pairs dropped, and the bytes of fixed shapes must
equal their formula; only then is anything timed or written.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _moe_demo import HostWaits
from expert_dispatch import dispatch_pairs, experts_loop, make_plan
from fixed_dispatch import bytes_sent_fixed, moe_fixed, slots_of
from harness.meter import communication
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import paired, write_result
from routing import balance_loss, capacity, expert_counts, group_sum, route, router_logits
from torch import Tensor

P, E, K, T, H, F_ = 4, 16, 2, 256, 128, 128  # ranks, experts, top-k, tokens per rank, hidden, intermediate
SLOTS = {"c = 1": 1.0, "c = 1.25": 1.25, "c = 2": 2.0, "C = T": None}


def leaves() -> dict[str, Tensor]:
    generator, rank = torch.Generator().manual_seed(0), dist.get_rank()
    shapes = {"gate": (E, H), "w1": (E, F_, H), "w3": (E, F_, H), "w2": (E, H, F_)}
    whole = {n: torch.randn(*s, generator=generator) / s[-1] ** 0.5 for n, s in shapes.items()}
    mine = {"x": torch.randn(T, H, generator=torch.Generator().manual_seed(10 + rank))}
    mine |= {n: w if n == "gate" else w.chunk(P)[rank] for n, w in whole.items()}
    return {n: t.clone().requires_grad_() for n, t in mine.items()}


def waiting(x, gate, w1, w3, w2, C: int | None) -> tuple[Tensor, Tensor]:
    """The layer that waits, `pairs` and `loop`; C: pairs without a slot are dropped."""
    group = dist.group.WORLD
    routing = route(router_logits(x, gate), K)
    kept = None if C is None else slots_of(routing.experts, E, C) < E * C
    plan = make_plan("pairs", routing.experts, kept, E, group)
    y = dispatch_pairs(x, routing.weights, plan, partial(experts_loop, w1=w1, w3=w3, w2=w2), group)
    return y, balance_loss(routing.probabilities, group_sum(expert_counts(routing.experts, E), group), K)


def step_of(layer: Callable) -> Callable[[], dict[str, Tensor]]:
    tensors = leaves()

    def step() -> dict[str, Tensor]:
        for t in tensors.values():
            t.grad = None
        y, balance, *seen = layer(*tensors.values())
        (y.square().sum() + 0.1 * balance).backward()
        last = {"dropped": seen[0].dropped} if seen else {}
        return {"y": y.detach()} | {n: t.grad for n, t in tensors.items()} | last

    return step


def measure() -> list[list]:
    rank = dist.get_rank()
    base = step_of(partial(waiting, C=None))
    with communication() as plain, HostWaits() as waits:
        base()
    rows = [["waits", "any", len(waits.found), 0.0, 1.0]]
    steps = [step_of(partial(waiting, C=None))]
    for name, factor in SLOTS.items():
        C = T if factor is None else int(capacity(T, E, K, factor))
        step = step_of(partial(moe_fixed, K=K, C=C, group=dist.group.WORLD))
        with communication() as sent, HostWaits() as waits:
            got = step()
        for what, value in step_of(partial(waiting, C=C))().items():
            assert_same(got[what], value, 2e-5, f"{name}: {what}", rank)
        want = bytes_sent_fixed(P, E, C, H, 4)
        if sent.sent["all_to_all"] != want:
            raise ValueError(f"{name}, rank {rank}: {sent.sent['all_to_all']} bytes sent; the formula says {want}")
        share = got["dropped"].double() / (K * T)
        ratio = torch.tensor([sent.sent["all_to_all"], plain.sent["all_to_all"]]).double()
        dist.all_reduce(share)
        dist.all_reduce(ratio)
        rows.append([f"fixed, {name}", C, len(waits.found), share.item() / P, (ratio[0] / ratio[1]).item()])
        steps.append(step)
    seconds = [paired(step, base, repeats=9, setup=dist.barrier) for step in steps]
    return [[*row, ratio] for row, ratio in zip(rows, seconds, strict=True)]


def main() -> None:
    argparse.ArgumentParser(description="Time the layer with fixed shapes.", allow_abbrev=False).parse_args()
    rows = run_ranks(P, measure, timeout=300)[0]
    write_result(
        "07_fixed_dispatch",
        f"The layer with fixed shapes beside the one that waits, forward and backward on {P} ranks",
        ["layer", "slots of an expert on a rank", "waits of the host", "pairs dropped", "bytes / row 1", "seconds"],
        rows,
        f"{K} of {E} experts, {T} tokens per rank, hidden size {H}, {F_} per expert, float32, an untrained router. "
        "Seconds are over those of the layer that waits; the first row is that layer against itself. On a CPU nobody "
        "waits for a device, so seconds show what empty slots cost and not what a wait does.",
    )


if __name__ == "__main__":
    main()
