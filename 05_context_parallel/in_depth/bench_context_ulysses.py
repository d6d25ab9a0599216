"""Ulysses and Ulysses x ring beside the ring, the bytes of all as sequence and ranks grow, and the cost model.

    python 05_context_parallel/in_depth/bench_context_ulysses.py

First every version must give the output and the gradients of dense attention, and send the bytes of its formula; only
then is anything timed or written.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from bench_context_ring import FUSED, RANKS, S, inputs, step_of
from context_ring import allgather_attention, dense_attention, layout_positions, ring_attention
from context_ulysses import Machine, cost_model, sent_per_layer, ulysses, usp, usp_groups, usp_positions
from harness.meter import communication
from harness.oracle import assert_same
from harness.ranks import run_ranks
from harness.report import Ratio, paired, write_result
from torch import Tensor

BASE = "ring, zigzag"
LENGTH, HIDDEN, HEADS = 64, 64, 8  # tokens per rank, and the layer, of the table of bytes
KINDS = ("ulysses", "megatron", "ring")


def steps() -> dict[str, tuple[Tensor, Callable[[], list[Tensor]]]]:
    """Every version on this rank: where its tokens are, and its forward and backward."""
    group, rank = dist.group.WORLD, dist.get_rank()
    zigzag, contiguous = (layout_positions(layout, S, rank, RANKS) for layout in ("zigzag", "contiguous"))
    versions = {
        BASE: (ring_attention(group, "zigzag", FUSED), zigzag),
        "all-gather, zigzag": (allgather_attention(group, "zigzag", FUSED), zigzag),
        "Ulysses": (ulysses(group), contiguous),
        "Ulysses x ring, 2 x 2": (
            usp(*usp_groups(RANKS, 2), "zigzag", FUSED),
            usp_positions("zigzag", S, rank // 2, 2, rank % 2, 2),
        ),
    }
    made = {}
    for name, (attention, where) in versions.items():
        shards = [x[:, where].contiguous() for x in inputs()]
        made[name] = where, lambda attention=attention, shards=shards: step_of(attention, *shards)
    return made


def verify() -> dict[str, float]:
    """Bytes that this rank sends in each version, once each has given the right results."""
    want = step_of(dense_attention, *inputs())
    sent_by = {}
    for name, (where, step) in steps().items():
        with communication() as sent:
            got = step()
        for what, x, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, expected[:, where], 1e-5, f"{what} of {name}", dist.get_rank())
        sent_by[name] = sent.total
    return sent_by


def measure() -> dict[str, Ratio]:
    """On every rank: seconds of each version over those of the zigzag ring."""
    made = {name: step for name, (_, step) in steps().items()}
    base = made.pop(BASE)
    return {name: paired(step, base, repeats=9, setup=dist.barrier) for name, step in made.items()}


def sent_forward(kind: str) -> float:
    """Bytes of one layer's forward on this rank; the sequence is LENGTH tokens per rank long."""
    group, P = dist.group.WORLD, dist.get_world_size()
    with communication() as sent:
        if kind == "megatron":  # the collectives of chapter 4: around attention, and around the MLP
            whole, part = torch.zeros(LENGTH * P, HIDDEN), torch.zeros(LENGTH, HIDDEN)
            for _ in ("attention", "MLP"):
                dist.all_gather(list(whole.chunk(P)), part)
                dist.reduce_scatter(part, list(whole.chunk(P)))
        else:
            x = torch.zeros(1, LENGTH, HEADS, HIDDEN // HEADS)
            (ulysses(group) if kind == "ulysses" else ring_attention(group))(x, x, x, causal=True)
    return sent.total


def bytes_rows() -> list[list]:
    """Ranks, tokens, and bytes by kind. Up to 4 ranks they are measured, and must equal the formula."""
    rows = []
    for P in (2, 4, 8, 16, 32, 64):
        formula = {kind: 4 * sent_per_layer(kind, LENGTH * P, HIDDEN, P, HIDDEN, HIDDEN) for kind in KINDS}
        if P <= RANKS:
            for kind, want in formula.items():
                measured = run_ranks(P, sent_forward, kind)
                if set(measured) != {want}:
                    sys.exit(f"{kind} on {P} ranks sent {measured} bytes; the formula says {want}")
        rows.append([P, LENGTH * P, *formula.values(), "yes" if P <= RANKS else "formula only"])
    return rows


def main() -> None:
    sent = run_ranks(RANKS, verify, timeout=300)
    rows = bytes_rows()
    ratios = run_ranks(RANKS, measure, timeout=600)[0]
    most = {name: max(s[name] for s in sent) for name in sent[0]}
    write_result(
        "05_ulysses",
        f"Forward and backward of causal attention on {RANKS} ranks, over those of the ring with the zigzag layout",
        ["version", "seconds: median (quartiles)", "bytes sent"],
        [[name, ratio, most[name] / most[BASE]] for name, ratio in ratios.items()],
        f"{S} tokens, float32, as many K/V heads as query heads; fused local attention in all.",
    )
    write_result(
        "05_ulysses_bytes",
        "Bytes that each rank sends in the forward pass of one layer, as sequence and ranks grow together",
        ["ranks", "tokens", "Ulysses", "Megatron's sequence parallelism", "ring attention", "measured"],
        rows,
        f"{LENGTH} tokens per rank, hidden size {HIDDEN}, float32, no grouped-query attention.",
    )
    write_result(
        "05_ulysses_cost_model",
        "TFLOPs per GPU of a 7-billion GPT with Ulysses: published (arXiv 2309.14509, tables 2 and 3) and predicted",
        ["scaling", "tokens", "GPUs", "published", "predicted", "deviation in %"],
        [
            [scaling, tokens, gpus, published, round(predicted, 1), f"{deviation:+.1f}"]
            for scaling, (tokens, gpus, published, predicted, deviation) in zip(
                ("strong, calibrated", "strong and weak", "strong, calibrated", "weak", "weak"),
                cost_model(Machine()),
                strict=True,
            )
        ],
        "Computed, not measured here; the assumptions are those of `Machine` in context_ulysses.py.",
    )


if __name__ == "__main__":
    main()
