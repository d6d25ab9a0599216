"""What the layer saves for backward, with and without recomputation, and the cost of recomputation.

    python 07_expert_parallel/in_depth/bench_moe_layer.py

First the recomputed layer must give the gradients of the plain one; only then is anything timed or written.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from harness.meter import communication, saved_activations
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import paired, write_result
from moe_layer import MoE, MoEConfig, recomputed
from torch import Tensor

P, T = 4, 256
BASE = MoEConfig(64, 64, experts=8, top_k=2, balance=0.01)
LAYERS = {  # the same parameters per token in all: K · F, or with a shared expert (K + 1) · F
    "2 of 8 experts": BASE,
    "4 of 16, half as wide": replace(BASE, intermediate=32, experts=16, top_k=4),
    "1 shared + 3 of 15, half as wide": replace(BASE, intermediate=32, experts=16, top_k=3, shared=1),
    "2 of 8, capacity factor 1": replace(BASE, capacity=1.0),
}


def make(config: MoEConfig) -> tuple[MoE, Tensor]:
    layer = MoE(config, dist.group.WORLD, dist.group.WORLD)
    generator = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        p.data.copy_(torch.randn(*p.shape, generator=generator) / p.shape[-1] ** 0.5)
    return layer, torch.randn(T, 64, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()


def run() -> dict:
    found = {}
    for name, config in LAYERS.items():
        layer, x = make(config)
        calls = {"plain": layer, "again": recomputed(layer)}
        gradients, kept, sent = {}, {}, {}
        for kind, call in calls.items():
            layer.zero_grad()
            with communication() as wire:
                with saved_activations(exclude=layer.parameters()) as saved:
                    y = call(x)
                y.square().sum().backward()
            gradients[kind] = {n: p.grad.clone() for n, p in layer.named_parameters()}
            kept[kind], sent[kind] = saved.bytes, wire.total
        for n, want in gradients["plain"].items():
            assert_same(gradients["again"][n], want, 1e-5, f"{name}: gradient of {n}", dist.get_rank())
        if kept["again"] > x.nbytes + 4 * y.nbytes:
            raise AssertionError(f"{name}: recomputed, it still keeps {kept['again']} bytes")
        steps = {kind: (lambda call=call, x=x: call(x).square().sum().backward()) for kind, call in calls.items()}
        ratio = paired(steps["again"], steps["plain"], repeats=7, setup=dist.barrier)
        found[name] = [kept["plain"] / x.nbytes, kept["again"] / x.nbytes, sent["again"] / sent["plain"], ratio]
    return found


def main() -> None:
    argparse.ArgumentParser(description="Count and time a recomputed layer.", allow_abbrev=False).parse_args()
    rows = run_ranks(P, run, timeout=300)[0]
    write_result(
        "07_moe_layer",
        f"What a layer keeps for backward on one of {P} ranks, and what its recomputation costs",
        ["layer", "kept / input", "recomputed: kept / input", "recomputed: bytes sent", "recomputed: seconds"],
        [[name, *row] for name, row in rows.items()],
        f"{T} tokens per rank, hidden size 64, float32. The last two columns are over those of the plain layer; "
        "seconds are of forward and backward, median and quartiles.",
    )


if __name__ == "__main__":
    main()
