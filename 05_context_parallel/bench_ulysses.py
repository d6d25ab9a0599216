"""Ulysses and the mesh of the ground floor beside the zigzag ring, a plain all-gather and Ulysses in depth, on 4 ranks.

python 05_context_parallel/bench_ulysses.py             verify, measure, write results and the figure
python 05_context_parallel/bench_ulysses.py --figures   only draw
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import ring_attention
import torch
import torch.distributed as dist
import ulysses as script
from context_ring import allgather_attention
from context_ulysses import ulysses as ulysses_in_depth
from harness.figures import COLOURS, write_figure
from harness.meter import communication, saved_activations
from harness.oracle import assert_same
from harness.ranks import run_ranks
from harness.report import paired, write_result

RANKS, S, N, N_KV, D = 4, 1024, 8, 2, 32
BASE = "Ulysses"


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, S, n, D, generator=generator) for n in (N, N_KV, N_KV, N)]


def step(attention, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def run_all() -> dict:
    """On every rank: verify each version; then bytes sent and kept, processor seconds, and time over the base's."""
    group, rank, made, found = dist.group.WORLD, dist.get_rank(), {}, {}
    row, column = script.mesh(2, 2, list(range(RANKS)))
    deep, gather = ulysses_in_depth(group), allgather_attention(group, "contiguous")
    contiguous, zigzag = script.positions_of(S, 0, 1, rank, RANKS), script.positions_of(S, rank, RANKS, 0, 1)
    both = script.positions_of(S, rank // 2, 2, rank % 2, 2)
    for name, where, attention in (
        (BASE, contiguous, lambda *qkv: script.ulysses(*qkv, group, script.dense)),
        ("Ulysses x ring, 2 x 2", both, lambda *x: script.ulysses(*x, row, lambda *qkv: script.ring(*qkv, column))),
        ("ring, zigzag", zigzag, lambda *qkv: ring_attention.Ring.apply(*qkv, "zigzag", group)),
        ("Ulysses (in_depth)", contiguous, lambda *qkv: deep(*qkv, causal=True)),
        ("all-gather (in_depth)", contiguous, lambda *qkv: gather(*qkv, causal=True)),
    ):
        mine = [x[:, where].contiguous() for x in inputs()]
        made[name] = where, lambda f=attention, m=mine: step(f, *m)
    want = step(script.dense, *inputs())
    for name, (where, run) in made.items():
        with communication() as sent, saved_activations() as kept:
            got = run()
        for what, x, whole in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, whole[:, where], 1e-5, f"{what} of {name}", rank)
        found[name] = [sent.total, kept.bytes]
    for name, (_, run) in made.items():
        ratio = paired(run, made[BASE][1], repeats=7, warmup=1, setup=dist.barrier) if name != BASE else 1
        dist.barrier()
        start = time.process_time()
        for _ in range(5):
            run()
        found[name] += [time.process_time() - start, ratio]
    return found


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
        "By `heads_of` of ulysses.py.",
    )


def main() -> None:
    if "--figures" in sys.argv[1:]:
        figures()
        return
    ranks = run_ranks(RANKS, run_all, timeout=400)
    base = max(found[BASE][2] for found in ranks)
    write_result(
        "05_ground_ulysses",
        f"Forward and backward of causal attention on {RANKS} ranks, {N} heads that share {N_KV} K/V heads",
        ["version", "busiest rank's work", "time", "bytes sent by a rank", "bytes kept by a rank"],
        [
            [name, max(f[name][2] for f in ranks) / base, ratio, sent, kept]
            for name, (sent, kept, _, ratio) in ranks[-1].items()
        ],
        f"{S} tokens, heads of {D}, float32. Work is the processor time of the rank that uses most, time that of all "
        "four on this machine, both over those of Ulysses, which uses PyTorch's kernel; the rings and the all-gather "
        "compute attention in readable PyTorch.",
    )
    write_computed()
    figures()


if __name__ == "__main__":
    main()
