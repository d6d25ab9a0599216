"""The rings of the ground floor beside a plain all-gather, the ring in depth and PyTorch's own, on 4 ranks.

    python 05_context_parallel/bench_ring_attention.py             verify, measure, write results and figures
    python 05_context_parallel/bench_ring_attention.py --figures   only draw

Four ranks share the cores of this machine, so that a rank which waits leaves its core to the others. What counts where
each rank has a device of its own is the work of the busiest rank: the processor time that each rank uses is measured.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import ring_attention as script
import torch
import torch.distributed as dist
from context_ring import allgather_attention
from context_ring import ring_attention as ring_in_depth
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication, saved_activations
from harness.oracle import assert_same
from harness.ranks import run_ranks
from harness.report import paired, write_result
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

RANKS, S, N, N_KV, D = 4, 1024, 4, 4, 32
BASE = "ring, zigzag"
TORCH = "PyTorch's ring, zigzag, its kernel"
aten = torch.ops.aten


def fused(q, k, v, mask):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2).contiguous() for x in (q, k, v)), is_causal=mask
    )
    return out.transpose(1, 2), lse.transpose(1, 2)  # [B, N, s] -> [B, s, N]


def fused_backward(dout, q, k, v, out, lse, mask):
    given = [x.transpose(1, 2).contiguous() for x in (dout, q, k, v, out, lse)]
    shares = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, mask)
    return tuple(x.transpose(1, 2) for x in shares)


def with_kernel(q, k, v, layout, group):
    script.piece, plain = fused, script.piece
    out = script.Ring.apply(q, k, v, layout, group)
    script.piece = plain
    return out


def torch_step(q, k, v, dout):
    """What is behind PyTorch's `context_parallel`, whose public entrance refuses CPU tensors."""
    theirs.set_rotate_method("alltoall")
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    out, lse = theirs._templated_ring_attention(
        dist.group.WORLD, 2, aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=True
    )
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = theirs._templated_ring_attention_backward(
        dist.group.WORLD, 2, backward, dout, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
    )
    return [x.transpose(1, 2) for x in (out, *gradients[:3])]


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, S, n, D, generator=generator) for n in (N, N_KV, N_KV, N)]


def step(attention, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    plain, script.piece_backward = script.piece_backward, fused_backward if attention.__name__ == "kernel" else PLAIN
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    script.piece_backward = plain
    return [out.detach(), *gradients]


PLAIN = script.piece_backward


def versions():
    """Name -> (layout, step on this rank)."""
    group, rank, made = dist.group.WORLD, dist.get_rank(), {}

    def kernel(*qkv):
        return with_kernel(*qkv, "zigzag", group)

    deep, gather = ring_in_depth(group, "zigzag"), allgather_attention(group, "contiguous")
    attentions = {
        BASE: ("zigzag", lambda *qkv: script.Ring.apply(*qkv, "zigzag", group)),
        "ring, contiguous": ("contiguous", lambda *qkv: script.Ring.apply(*qkv, "contiguous", group)),
        "first ring, contiguous": ("contiguous", lambda *qkv: script.first_ring(*qkv, "contiguous", group)),
        "all-gather (in_depth), contiguous": ("contiguous", lambda *qkv: gather(*qkv, causal=True)),
        "ring (in_depth), zigzag": ("zigzag", lambda *qkv: deep(*qkv, causal=True)),
        "ring, zigzag, PyTorch's kernel": ("zigzag", kernel),
    }
    for name, (layout, attention) in attentions.items():
        mine = [x[:, script.positions_of(layout, S, rank, RANKS)].contiguous() for x in inputs()]
        made[name] = layout, lambda f=attention, m=mine: step(f, *m)
    zigzag = [x[:, script.positions_of("zigzag", S, rank, RANKS)].contiguous() for x in inputs()]
    made[TORCH] = "zigzag", lambda: torch_step(*zigzag)
    return made


def run_all() -> dict:
    """On every rank: verify each version; then bytes sent and kept, processor seconds, and time over the base's."""
    want = step(script.dense, *inputs())
    made, found = versions(), {}
    for name, (layout, run) in made.items():
        where = script.positions_of(layout, S, dist.get_rank(), RANKS)
        with communication() as sent, saved_activations() as kept:
            got = run()
        for what, x, whole in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, whole[:, where], 1e-5, f"{what} of {name}", dist.get_rank())
        found[name] = [sent.total, kept.bytes]
    for name, (_, run) in made.items():
        ratio = paired(run, made[BASE][1], repeats=7, warmup=1, setup=dist.barrier) if name != BASE else 1
        dist.barrier()
        start = time.process_time()
        for _ in range(5):
            run()
        found[name] += [time.process_time() - start, ratio]
    return found


def timeline() -> list[list]:
    """Forward on 4 ranks, 8 chunks of 1 token: when each piece is computed, if a pair takes 1 and messages hide.

    A round of a rank begins when its last one is done and the block is there, which its neighbour posted when it began
    the round before."""
    rows, s = [], 8
    for layout in ("contiguous", "zigzag"):
        begin, end = {}, {}
        for t in range(RANKS):
            for rank in range(RANKS):
                part = script.seen(layout, rank, (rank - t) % RANKS, s)
                pairs = 0
                if part is not None:
                    queries, keys = (len(range(s)[x]) for x in part[:2])
                    pairs = queries * (queries + 1) // 2 if part[2] else queries * keys
                arrived = begin[t - 1, (rank - 1) % RANKS] + 16 if t else 0
                begin[t, rank] = max(end.get((t - 1, rank), 0), arrived)
                end[t, rank] = begin[t, rank] + pairs
                rows.append([layout, rank, t, (rank - t) % RANKS, begin[t, rank], pairs, 16 if t + 1 < RANKS else 0])
    return rows


def draw_timeline(axes, result):
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    last = max(row["begins"] + row["pairs"] for row in rows)
    for panel, layout in zip(axes, ("contiguous", "zigzag"), strict=True):
        mine = [row for row in rows if row["layout"] == layout]
        whole = max(row["begins"] + row["pairs"] for row in mine)
        for rank in range(RANKS):
            panel.barh(rank, whole, height=0.5, color=COLOURS["idle"], alpha=0.25)
        for row in mine:
            edge = GREY if row["pairs"] else "none"
            panel.barh(
                row["rank"], row["pairs"], left=row["begins"], height=0.5, color=COLOURS["compute"], edgecolor=edge
            )
            panel.barh(row["rank"] + 0.36, row["message"], left=row["begins"], height=0.14, color=COLOURS["messages"])
            if row["pairs"]:
                middle = row["begins"] + row["pairs"] / 2
                panel.text(
                    middle, row["rank"], f"{row['block of']}", ha="center", va="center", color="black", fontsize=8
                )
        panel.set(xlim=(0, last * 1.02), yticks=range(RANKS), ylabel="rank", title=f"{layout}: done after {whole:.0f}")
        panel.invert_yaxis()
        panel.grid(False)
    axes[1].set_xlabel("time, in pairs. Blue: computes with the block of that rank. Orange: a message. Grey: waits")


def draw_holds(axes, result):
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    for y, row in enumerate(rows):
        left = 0
        for what, colour, alpha in (
            ("own q, out, LSE", "activations", 1),
            ("own K/V", "activations", 0.5),
            ("blocks of others", "messages", 1),
        ):
            label = what if y == 0 else None
            axes.barh(y, row[what] / 1024, left=left, color=COLOURS[colour], alpha=alpha, height=0.6, label=label)
            left += row[what] / 1024
        axes.text(left, y, f" {left:,.0f}", va="center", fontsize=8)
    axes.set(
        yticks=range(len(rows)), yticklabels=[row["who"] for row in rows], xlabel="KiB of attention's tensors on a rank"
    )
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def figures() -> None:
    folder = "05_context_parallel/figures"
    write_figure(f"{folder}/ring_timeline.svg", ["05_ground_timeline"], draw_timeline, shape=(2, 1), size=(7.5, 5))
    write_figure(f"{folder}/who_holds_what.svg", ["05_ground_holds"], draw_holds, size=(7.5, 2.6))


def sizes() -> tuple[int, int]:
    """Bytes of q, out and LSE of the whole sequence, and of its K/V."""
    return 4 * S * N * D * 2 + 4 * S * N, 4 * S * 2 * N_KV * D


def write_computed() -> None:
    """What follows from the code alone: who holds what, and the timeline."""
    own, block = sizes()
    rows = [["one process", own, block, 0]]
    for who, blocks in (("all-gather, 4 ranks", RANKS - 1), ("ring, 4 ranks", 2)):
        rows.append([who, own // RANKS, block // RANKS, blocks * block // RANKS])
    write_result(
        "05_ground_holds",
        f"Who holds what of one layer's attention: {S} tokens, {N} heads of {D}, float32; bytes on a rank",
        ["who", "own q, out, LSE", "own K/V", "blocks of others"],
        rows,
        "By the formulas; what the ring keeps was also counted, and is the same.",
    )
    write_result(
        "05_ground_timeline",
        "The forward of a ring on 4 ranks, computed from the pairs of each piece: a pair takes 1, a message 16",
        ["layout", "rank", "round", "block of", "begins", "pairs", "message"],
        timeline(),
        "Computed from `seen` of ring_attention.py, not measured.",
    )


def main() -> None:
    if "--figures" in sys.argv[1:]:
        figures()
        return
    ranks = run_ranks(RANKS, run_all, timeout=400)
    kept = ranks[0][BASE][1]
    assert kept == sum(sizes()) // RANKS, f"{kept} bytes are kept, not {sum(sizes()) // RANKS}"
    base = max(found[BASE][2] for found in ranks)
    write_result(
        "05_ground_ring",
        f"Forward and backward of causal attention on {RANKS} ranks",
        ["version", "busiest rank's work", "time", "bytes sent by a rank", "bytes kept by a rank"],
        [
            [name, max(f[name][2] for f in ranks) / base, ratio, sent, kept]
            for name, (sent, kept, _, ratio) in ranks[-1].items()
        ],
        f"{S} tokens, {N} heads of {D}, float32. Work is the processor time of the rank that uses most, and time that "
        "of all four on this machine, both over those of the ring in zigzag. Kept: for backward, between the passes; "
        "PyTorch's is called without autograd, so that nothing was counted.",
    )
    write_computed()
    figures()


if __name__ == "__main__":
    main()
