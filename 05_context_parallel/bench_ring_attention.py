"""The rings of the ground floor beside a plain all-gather, the ring in depth and PyTorch's own, on 4 ranks.

    python 05_context_parallel/bench_ring_attention.py             verify, measure, write results and figures
    python 05_context_parallel/bench_ring_attention.py --figures   only draw

Four ranks share the cores of this machine, and a rank that waits leaves its core to the others. So a time here is that
of the work of all ranks together; how much of it the busiest one has, which is what all wait for where each has a
device of its own, is counted in (query, key) pairs. Within a table all versions compute pieces by the same function.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import ring_attention as script
import torch
import torch.distributed as dist
from bench_context_ring import work_of_all
from context_ring import LocalAttention, allgather_attention
from context_ring import ring_attention as ring_in_depth
from flash_local import for_each_query_head
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication, saved_activations
from harness.oracle import assert_same
from harness.ranks import run_ranks
from harness.report import paired, write_result
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

RANKS, N, N_KV, D = 4, 4, 4, 32
S, S_KERNEL = 1024, 4096  # a kernel is so fast that less would measure calls of functions
BASE = "ring, zigzag"
TORCH = "PyTorch's ring"
aten = torch.ops.aten


# -------------------------------------------------------------------------------- PyTorch's kernel, for every version


def kernel(q, k, v, mask):
    """In place of `piece`: PyTorch's flash attention, which wants [B, heads, s, D] and as many K/V heads as queries."""
    k, v = for_each_query_head(q, k, v)
    given = (x.transpose(1, 2) for x in (q, k, v))  # views: the kernel reads rows of D numbers wherever they lie
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*given, is_causal=mask)
    return out.transpose(1, 2), lse.transpose(1, 2)  # [B, N, s] -> [B, s, N]


def kernel_backward(dout, q, k, v, out, lse, mask):
    N_kv, G = k.shape[2], q.shape[2] // k.shape[2]
    given = [
        *(x.transpose(1, 2) for x in (dout, q, *for_each_query_head(q, k, v), out)),
        lse.transpose(1, 2).contiguous(),
    ]
    shares = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, mask)
    dq, dk, dv = (x.transpose(1, 2) for x in shares)
    return dq, *(x.unflatten(2, (N_kv, G)).sum(3) if G > 1 else x for x in (dk, dv))


def local():
    """The function that the ground floor computes pieces with just now, in the form that the depth takes."""

    def forward(q, k, v, *, causal):
        out, lse = script.piece(q, k, v, causal)
        return out, lse.transpose(1, 2)  # [B, s, N] -> [B, N, s]

    def backward(dout, q, k, v, out, lse, *, causal):
        return script.piece_backward(dout, q, k, v, out, lse.transpose(1, 2), causal)

    return LocalAttention(forward, backward)


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


# ------------------------------------------------------------------------------------------------------ measuring


def inputs(S, heads=(N, N_KV)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, S, n, D, generator=generator) for n in (heads[0], heads[1], heads[1], heads[0])]


def step(attention, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def measured(made, base, whole):
    """`made`: name -> (which tokens, step on this rank). Each is verified; then bytes sent and kept, pairs, time over
    the base's."""
    want, found = step(script.dense, *whole), {}
    for name, (where, run) in made.items():
        script.count.clear()
        with communication() as sent, saved_activations() as kept:
            got = run()
        for what, x, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, expected[:, where], 1e-5, f"{what} of {name}", dist.get_rank())
        found[name] = [sent.total, kept.bytes, script.count["pairs"]]
    for name, (_, run) in made.items():
        found[name].append(1 if name == base else paired(run, made[base][1], repeats=9, setup=dist.barrier))
    return found


def readable():
    group, rank, made = dist.group.WORLD, dist.get_rank(), {}
    gather = allgather_attention(group, "contiguous", local())
    for name, layout, attention in (
        (BASE, "zigzag", lambda *qkv: script.Ring.apply(*qkv, "zigzag", group)),
        ("ring, contiguous", "contiguous", lambda *qkv: script.Ring.apply(*qkv, "contiguous", group)),
        ("first ring, contiguous", "contiguous", lambda *qkv: script.first_ring(*qkv, "contiguous", group)),
        ("all-gather (in_depth), contiguous", "contiguous", lambda *qkv: gather(*qkv, causal=True)),
    ):
        where = script.positions_of(layout, S, rank, RANKS)
        mine = [x[:, where].contiguous() for x in inputs(S)]
        made[name] = where, lambda f=attention, m=mine: step(f, *m)
    return measured(made, BASE, inputs(S))


def with_kernel():
    group = dist.group.WORLD
    where = script.positions_of("zigzag", S_KERNEL, dist.get_rank(), RANKS)
    mine = [x[:, where].contiguous() for x in inputs(S_KERNEL)]
    deep = ring_in_depth(group, "zigzag", local())
    made = {
        TORCH: (where, lambda: torch_step(*mine)),
        "ring of the ground floor": (where, lambda: step(lambda *x: script.Ring.apply(*x, "zigzag", group), *mine)),
        "ring in_depth": (where, lambda: step(lambda *x: deep(*x, causal=True), *mine)),
    }
    plain = script.piece, script.piece_backward
    script.piece, script.piece_backward = kernel, kernel_backward
    try:
        found = measured(made, TORCH, inputs(S_KERNEL))
        for name, (_, run) in made.items():
            found[name].append(1 if name == TORCH else work_of_all(run, made[TORCH][1]))
        return found
    finally:
        script.piece, script.piece_backward = plain


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
        "Computed from the formulas, not measured.",
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
    ranks = run_ranks(RANKS, readable, timeout=200)
    kept = ranks[0][BASE][1]
    assert kept == sum(sizes()) // RANKS, f"{kept} bytes are kept, not {sum(sizes()) // RANKS}"
    busiest = {name: max(found[name][2] for found in ranks) for name in ranks[0]}
    write_result(
        "05_ground_ring",
        f"Forward and backward of causal attention on {RANKS} ranks, over the ring in zigzag",
        ["version", "pairs of the busiest rank", "time of all ranks", "bytes sent by a rank", "bytes kept by a rank"],
        [
            [name, busiest[name] / busiest[BASE], ratio, sent, kept]
            for name, (sent, kept, _, ratio) in ranks[-1].items()
        ],
        f"{S} tokens, {N} heads of {D}, float32. All compute by `piece` of ring_attention.py. Pairs are counted in "
        "forward; bytes are counted, too, and those kept are for backward, between the passes.",
    )
    ranks = run_ranks(RANKS, with_kernel, timeout=200)
    write_result(
        "05_ground_ring_kernel",
        f"The same kernel in three rings: forward and backward on {RANKS} ranks, zigzag",
        ["version", "work of all ranks", "time, 4 ranks on the cores there are", "bytes sent by a rank"],
        [[name, work, ratio, sent] for name, (sent, _, _, ratio, work) in ranks[-1].items()],
        f"{S_KERNEL} tokens, {N} heads of {D}, float32; the kernel is PyTorch's flash attention for CPUs. Work is CPU "
        "seconds of all ranks together; both over PyTorch's ring.",
    )
    write_computed()
    figures()


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--figures"]):
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: use nothing, or --figures", file=sys.stderr)
        sys.exit(2)
    main()
