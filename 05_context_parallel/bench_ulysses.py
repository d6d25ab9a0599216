"""Ulysses and the mesh of the ground floor beside the zigzag ring, a plain all-gather and Ulysses in depth, on 4 ranks.

    python 05_context_parallel/bench_ulysses.py             verify, measure, write results and the figure
    python 05_context_parallel/bench_ulysses.py --figures   only draw

All compute attention by the same kernel, PyTorch's. A time is that of the work of all ranks, which share the cores.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import ring_attention
import torch.distributed as dist
import ulysses as script
from bench_ring_attention import inputs, kernel, kernel_backward, local, measured, step
from context_ring import allgather_attention
from context_ulysses import ulysses as ulysses_in_depth
from harness.figures import COLOURS, write_figure
from harness.ranks import run_ranks
from harness.report import write_result

RANKS, S, N, N_KV, D = 4, 2048, 8, 2, 32
BASE = "Ulysses"


def run_all() -> dict:
    """On every rank: verify each version; then bytes sent and kept, and time over the base's."""
    group, rank, made = dist.group.WORLD, dist.get_rank(), {}
    row, column = script.mesh(2, 2, list(range(RANKS)))
    alone = [dist.new_group([r]) for r in range(RANKS)][rank]

    def ring(of):
        """The ring in two loops, in place of the simplest one. It keeps K/V in a tensor of their own; with a copy of q,
        the buffer in which the swap brought all three need not be kept besides."""
        return lambda q, k, v: ring_attention.Ring.apply(q.contiguous(), k, v, "zigzag", of)

    one_device = ring(alone)  # a ring of one rank is one call of the kernel
    deep = ulysses_in_depth(group, lambda q, k, v, *, causal: one_device(q, k, v))
    gather = allgather_attention(group, "contiguous", local())
    parts = {R: script.positions_of(S, rank * R // RANKS, R, rank % (RANKS // R), RANKS // R) for R in (1, 2, RANKS)}
    for name, where, attention in (
        (BASE, parts[1], lambda *qkv: script.ulysses(*qkv, group, one_device)),
        ("Ulysses x ring, 2 x 2", parts[2], lambda *qkv: script.ulysses(*qkv, row, ring(column))),
        ("ring, zigzag", parts[RANKS], ring(group)),
        ("Ulysses (in_depth)", parts[1], lambda *qkv: deep(*qkv, causal=True)),
        ("all-gather (in_depth), contiguous", parts[1], lambda *qkv: gather(*qkv, causal=True)),
    ):
        mine = [x[:, where].contiguous() for x in inputs(S, (N, N_KV))]
        made[name] = where, lambda f=attention, m=mine: step(f, *m)
    plain = ring_attention.piece, ring_attention.piece_backward
    ring_attention.piece, ring_attention.piece_backward = kernel, kernel_backward
    try:
        return measured(made, BASE, inputs(S, (N, N_KV)))
    finally:
        ring_attention.piece, ring_attention.piece_backward = plain


def draw_swap(axes, result):
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    for panel, when in zip(axes, ("before", "between"), strict=True):
        for row in (row for row in rows if row["when"] == when):
            alpha = 0.35 if row["head"].startswith("q") else 0.7
            x = int(row["head"][1:]) + (0 if row["head"].startswith("q") else 6.5)
            panel.barh(row["tokens of"], 0.9, left=x, height=0.9, color=COLOURS["activations"], alpha=alpha)
            panel.text(x + 0.45, row["tokens of"], row["ranks"], ha="center", va="center", color="black", fontsize=8)
        names = [f"q{i}" for i in range(6)] + ["kv0", "kv1"]
        panel.set(
            xticks=[i + 0.45 + (0.5 if i > 5 else 0) for i in range(8)], xticklabels=names, ylabel="tokens of rank"
        )
        panel.set(yticks=range(4), title=f"{when} the swaps: which rank holds it")
        panel.invert_yaxis()
        panel.grid(False)


def figures() -> None:
    path = "05_context_parallel/figures/ulysses_swap.svg"
    write_figure(path, ["05_ground_swap"], draw_swap, shape=(1, 2), size=(9, 3))


def write_computed() -> None:
    """What follows from the code alone: who holds what."""
    heads = [script.heads_of(rank, RANKS, 6, 2) for rank in range(RANKS)]
    rows = [["before", f"{kind}{h}", t, str(t)] for kind, n in (("q", 6), ("k", 2)) for h in range(n) for t in range(4)]
    for kind, which in (("q", 0), ("k", 1)):
        for h in range((6, 2)[which]):
            owners = ", ".join(str(rank) for rank in range(RANKS) if h in heads[rank][which])
            rows += [["between", f"{kind}{h}", t, owners] for t in range(4)]
    write_result(
        "05_ground_swap",
        "Ulysses on 4 ranks, 6 query heads and 2 K/V heads: which ranks hold which tokens of which heads",
        ["when", "head", "tokens of", "ranks"],
        rows,
        "Computed by `heads_of` of ulysses.py, not measured.",
    )


def main() -> None:
    if "--figures" in sys.argv[1:]:
        figures()
        return
    ranks = run_ranks(RANKS, run_all, timeout=300)
    write_result(
        "05_ground_ulysses",
        f"Forward and backward of causal attention on {RANKS} ranks, {N} heads that share {N_KV} K/V heads",
        ["version", "time over Ulysses", "bytes sent by a rank", "bytes kept by a rank"],
        [[name, ratio, sent, kept] for name, (sent, kept, _, ratio) in ranks[-1].items()],
        f"{S} tokens, heads of {D}, float32; the same kernel in all. Bytes are counted; those kept are for backward.",
    )
    write_computed()
    figures()


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--figures"]):
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: use nothing, or --figures", file=sys.stderr)
        sys.exit(2)
    main()
