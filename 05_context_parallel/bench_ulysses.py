"""Ulysses of the core file beside the zigzag ring, a plain all-gather and Ulysses in depth, on 4 ranks.

    python 05_context_parallel/bench_ulysses.py             verify, measure, write results and the figure
    python 05_context_parallel/bench_ulysses.py --figures   only draw

All compute attention by the same kernel, PyTorch's. A time is that of the work of all ranks, which share the cores.
"""

import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import ring_attention
import torch.distributed as dist
import ulysses as script
from bench_ring_attention import inputs, kernel, kernel_backward, local, measured, step
from context_ring import allgather_attention
from context_ulysses import ulysses as ulysses_in_depth
from harness.figures import COLOURS, GREY, write_figure
from harness.ranks import run_ranks
from harness.report import option_given, write_result

RANKS, S, N, N_KV, D = 4, 2048, 8, 2, 32
BASE = "Ulysses"


def run_all() -> dict:
    """On every rank: verify each version; then bytes sent and saved, and time over the base's."""
    group, rank, made = dist.group.WORLD, dist.get_rank(), {}
    self_group = [dist.new_group([r]) for r in range(RANKS)][rank]

    def ring(over):
        """It saves K/V in a tensor of their own; with a copy of q, the buffer that the all-to-all filled is freed."""
        comm = ring_attention.RingComm(over)
        return lambda q, k, v: ring_attention.RingAttention.apply(q.contiguous(), k, v, "zigzag", comm)

    one_device = ring(self_group)  # a ring of one rank is one call of the kernel
    comm = script.AllToAllComm(group)
    deep = ulysses_in_depth(group, lambda q, k, v, *, causal: one_device(q, k, v))
    gather = allgather_attention(group, "contiguous", local())
    contiguous, zigzag = (ring_attention.token_positions(layout, S, rank, RANKS) for layout in ("contiguous", "zigzag"))
    for name, where, attention in (
        (BASE, contiguous, lambda *qkv: script.ulysses_attention(*qkv, one_device, comm)),
        ("ring, zigzag", zigzag, ring(group)),
        ("Ulysses (in_depth)", contiguous, lambda *qkv: deep(*qkv, causal=True)),
        ("all-gather (in_depth), contiguous", contiguous, lambda *qkv: gather(*qkv, causal=True)),
    ):
        mine = [x[:, where].contiguous() for x in inputs(S, (N, N_KV))]
        made[name] = where, lambda f=attention, m=mine: step(f, *m)
    with patch.multiple(ring_attention, attention_block=kernel, attention_block_backward=kernel_backward):
        return measured(made, BASE, inputs(S, (N, N_KV)))


def draw_all_to_all(axes, result):
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    for panel, when in zip(axes, ("before", "between"), strict=True):
        for row in (row for row in rows if row["when"] == when):
            alpha = 0.35 if row["head"].startswith("q") else 0.85
            x = int(row["head"][1:]) + (0 if row["head"].startswith("q") else 6.5)
            panel.barh(row["tokens of"], 0.9, left=x, height=0.9, color=COLOURS["activations"], alpha=alpha)
            ink = GREY if row["head"].startswith("q") else "black"
            panel.text(x + 0.45, row["tokens of"], row["ranks"], ha="center", va="center", color=ink, fontsize=9)
        names = [f"q{i}" for i in range(6)] + ["kv0", "kv1"]
        panel.set(
            xticks=[i + 0.45 + (0.5 if i > 5 else 0) for i in range(8)], xticklabels=names, ylabel="tokens of rank"
        )
        panel.set(yticks=range(4), title=f"{when} the all-to-alls: the rank that stores it")
        panel.invert_yaxis()
        panel.grid(False)


def figures() -> None:
    path = "05_context_parallel/figures/ulysses_all_to_all.svg"
    write_figure(path, ["05_ground_swap"], draw_all_to_all, shape=(2, 1), size=(7.5, 5.5))


def write_computed() -> None:
    """What follows from the code alone: which rank stores what."""
    heads = [script.local_heads(rank, RANKS, 6, 2) for rank in range(RANKS)]
    rows = [["before", f"{kind}{h}", t, str(t)] for kind, n in (("q", 6), ("k", 2)) for h in range(n) for t in range(4)]
    for kind, which in (("q", 0), ("k", 1)):
        for h in range((6, 2)[which]):
            owners = ", ".join(str(rank) for rank in range(RANKS) if h in heads[rank][which])
            rows += [["between", f"{kind}{h}", t, owners] for t in range(4)]
    write_result(
        "05_ground_swap",
        "Ulysses on 4 ranks, 6 query heads and 2 K/V heads: which ranks store which tokens of which heads",
        ["when", "head", "tokens of", "ranks"],
        rows,
        "Computed by `local_heads` of ulysses.py, not measured.",
        computed=True,
    )


def main() -> None:
    if option_given("--figures"):
        figures()
        return
    ranks = run_ranks(RANKS, run_all, timeout=300)
    write_result(
        "05_ground_ulysses",
        f"Forward and backward passes of causal attention on {RANKS} ranks, {N} heads that share {N_KV} K/V heads",
        ["version", "time over Ulysses", "bytes sent by a rank", "bytes saved by a rank"],
        [[name, ratio, sent, kept] for name, (sent, kept, _, ratio) in ranks[-1].items()],
        f"{S} tokens, heads of {D}, float32; the same kernel in all. Bytes are counted; those saved are for the "
        "backward pass.",
    )
    write_computed()
    figures()


if __name__ == "__main__":
    main()
