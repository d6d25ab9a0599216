"""The rings of the core file beside a plain all-gather, the ring in depth and PyTorch's own, on 4 ranks.

    python 05_context_parallel/bench_ring_attention.py             verify, measure, write results and figures
    python 05_context_parallel/bench_ring_attention.py --figures   only draw

Four ranks share the cores of this machine, and a rank that waits leaves its core to the others. So a time here is that
of the work of all ranks together; how much of it the busiest one has, which is what all wait for where each has a
device of its own, is counted in (query, key) pairs. Within a table all versions compute blocks by the same function.
"""

import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import ring_attention as script
import torch
import torch.distributed as dist
from bench_context_ring import torch_step
from context_ring import LocalAttention, allgather_attention
from context_ring import ring_attention as ring_in_depth
from flash_local import for_each_query_head
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication, saved_activations
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import option_given, paired, processor_paired, write_result

RANKS, N, N_KV, D = 4, 4, 4, 32
S, S_KERNEL = 1024, 4096  # a kernel is so fast that less would measure calls of functions
BASE = "ring, zigzag"
TORCH = "PyTorch's ring"
aten = torch.ops.aten


# -------------------------------------------------------------------------------- PyTorch's kernel, for every version


def kernel(q, k, v, causal, mask=None):
    """In place of `attention_block`: PyTorch's kernel, which wants [B, heads, s, D] and K/V for each query head."""
    k, v = for_each_query_head(q, k, v)
    given = (x.transpose(1, 2) for x in (q, k, v))  # views: the kernel reads rows of D numbers wherever they lie
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*given, is_causal=causal)
    return out.transpose(1, 2), lse.transpose(1, 2)  # [B, N, s] -> [B, s, N]


def kernel_backward(dout, q, k, v, out, lse, causal):
    N_kv, G = k.shape[2], q.shape[2] // k.shape[2]
    given = [
        *(x.transpose(1, 2) for x in (dout, q, *for_each_query_head(q, k, v), out)),
        lse.transpose(1, 2).contiguous(),
    ]
    shares = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)
    dq, dk, dv = (x.transpose(1, 2) for x in shares)
    return dq, *(x.unflatten(2, (N_kv, G)).sum(3) if G > 1 else x for x in (dk, dv))


def local():
    """The functions that the core file computes blocks with just now, in the form that the depth takes."""

    def forward(q, k, v, *, causal):
        out, lse = script.attention_block(q, k, v, causal)
        return out, lse.transpose(1, 2)  # [B, s, N] -> [B, N, s]

    def backward(dout, q, k, v, out, lse, *, causal):
        return script.attention_block_backward(dout, q, k, v, out, lse.transpose(1, 2), causal)

    return LocalAttention(forward, backward)


# ------------------------------------------------------------------------------------------------------ measuring


def inputs(S, heads=(N, N_KV)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, S, n, D, generator=generator) for n in (heads[0], heads[1], heads[1], heads[0])]


def step(attention, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def measured(made, base, full):
    """`made`: name -> (which tokens, step on this rank). Each is verified; then bytes sent and saved, pairs, time over
    the base's."""
    expected, found, plain = step(script.reference_attention, *full), {}, script.attention_block
    for name, (where, run) in made.items():
        pairs = []

        def counted(q, k, v, causal, mask=None, pairs=pairs):
            s, t = q.shape[1], k.shape[1]
            pairs.append(
                q.shape[2] * (s * (s + 1) // 2 if causal else s * t)
            )  # kernels skip what is above the diagonal
            return plain(q, k, v, causal) if mask is None else plain(q, k, v, causal, mask)

        with patch.object(script, "attention_block", counted), communication() as sent, saved_activations() as saved:
            got = run()
        for what, x, y in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
            assert_same(x, y[:, where], 1e-5, f"{what} of {name}", dist.get_rank())
        found[name] = [sent.total, saved.bytes, sum(pairs)]
    for name, (_, run) in made.items():
        found[name].append(1 if name == base else paired(run, made[base][1], repeats=9, setup=dist.barrier))
    return found


def readable():
    group, rank, made = dist.group.WORLD, dist.get_rank(), {}
    ring, gather = script.RingComm(group), allgather_attention(group, "contiguous", local())
    for name, layout, attention in (
        (BASE, "zigzag", lambda *qkv: script.RingAttention.apply(*qkv, "zigzag", ring)),
        ("ring, contiguous", "contiguous", lambda *qkv: script.RingAttention.apply(*qkv, "contiguous", ring)),
        ("simple ring, contiguous", "contiguous", lambda *qkv: script.simple_ring_attention(*qkv, ring)),
        ("all-gather (in_depth), contiguous", "contiguous", lambda *qkv: gather(*qkv, causal=True)),
    ):
        where = script.token_positions(layout, S, rank, RANKS)
        mine = [x[:, where].contiguous() for x in inputs(S)]
        made[name] = where, lambda f=attention, m=mine: step(f, *m)
    return measured(made, BASE, inputs(S))


def with_kernel():
    group = dist.group.WORLD
    where = script.token_positions("zigzag", S_KERNEL, dist.get_rank(), RANKS)
    mine = [x[:, where].contiguous() for x in inputs(S_KERNEL)]
    deep, ring = ring_in_depth(group, "zigzag", local()), script.RingComm(group)
    made = {
        TORCH: (where, lambda: torch_step(*mine)),
        "ring of the core file": (
            where,
            lambda: step(lambda *x: script.RingAttention.apply(*x, "zigzag", ring), *mine),
        ),
        "ring in_depth": (where, lambda: step(lambda *x: deep(*x, causal=True), *mine)),
    }
    with patch.multiple(script, attention_block=kernel, attention_block_backward=kernel_backward):
        found = measured(made, TORCH, inputs(S_KERNEL))
        for name, (_, run) in made.items():
            found[name].append(1 if name == TORCH else processor_paired(run, made[TORCH][1]))
        return found


def timeline() -> list[list]:
    """The forward pass on 4 ranks, 8 tokens each: when each block is computed if a pair takes 1 and a message 16.

    A step of a rank begins when its last one has ended and the block is there, which its neighbour began to send when
    it began the step before."""
    rows, s = [], 8
    for layout in ("contiguous", "zigzag"):
        begin, end = {}, {}
        for t in range(RANKS):
            for rank in range(RANKS):
                part = script.visible_slices(layout, rank, (rank - t) % RANKS, s)
                pairs = 0
                if part is not None:
                    queries, keys = (len(range(s)[x]) for x in part[:2])
                    pairs = queries * (queries + 1) // 2 if part[2] else queries * keys
                arrived = begin[t - 1, (rank - 1) % RANKS] + 16 if t else 0
                begin[t, rank] = max(end.get((t - 1, rank), 0), arrived)
                end[t, rank] = begin[t, rank] + pairs
                rows.append([layout, rank, t, (rank - t) % RANKS, begin[t, rank], pairs, 16 if t + 1 < RANKS else 0])
    return rows


def draw_hops(axes, result):
    """Which block each rank computes with, step by step. Block 0 and its gradient are drawn strongly."""
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    blocks = {(row["step"], row["rank"]): row["block of"] for row in rows if row["layout"] == "zigzag"}
    arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "linewidth": 1.6}
    for panel, backward in zip(axes, (False, True), strict=True):
        for (step, rank), block in blocks.items():
            alpha = 0.8 if block == 0 else 0.25
            panel.barh(rank, 0.5, left=step, height=0.62, color=COLOURS["activations"], alpha=alpha)
            partial = f"\n+ dK/dV {block}" if backward else ""
            text = {"ha": "center", "va": "center", "color": GREY if block else "black", "fontsize": 9}
            panel.text(step + 0.25, rank, f"K/V {block}{partial}", **text)
            for what, shift in (("messages", -0.12), ("gradients", 0.12)):
                if what == "gradients" and not (backward and step):
                    continue  # the owner's own gradient is not sent
                if what == "messages" and step + 1 == RANKS:
                    continue
                after, alpha = (rank + 1) % RANKS, 1 if block == 0 else 0.3
                ends = {"xy": (step + 1, after + shift), "xytext": (step + 0.5, rank + shift)}
                panel.annotate("", **ends, arrowprops=arrow | {"color": COLOURS[what], "alpha": alpha})
        if backward:
            for rank in range(RANKS):
                panel.text(RANKS + 0.05, rank, f"dK/dV {rank}\ncomplete", va="center", fontsize=9)
        panel.set(xlim=(-0.1, RANKS + 0.6), xticks=[i + 0.25 for i in range(RANKS)], yticks=range(RANKS), ylabel="rank")
        panel.set(
            xticklabels=[f"step {i}" for i in range(RANKS)],
            title="backward pass: the sum of dK/dV follows its block"
            if backward
            else "forward pass: K/V are sent round",
        )
        panel.invert_yaxis()
        panel.grid(False)


def draw_timeline(axes, result):
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    last = max(row["begins"] + row["pairs"] for row in rows)
    for panel, layout in zip(axes, ("contiguous", "zigzag"), strict=True):
        mine = [row for row in rows if row["layout"] == layout]
        end = max(row["begins"] + row["pairs"] for row in mine)
        for rank in range(RANKS):
            panel.barh(rank, end, height=0.5, color=COLOURS["idle"], alpha=0.25)
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
        panel.set(xlim=(0, last * 1.02), yticks=range(RANKS), ylabel="rank", title=f"{layout}: done after {end:.0f}")
        panel.invert_yaxis()
        panel.grid(False)
    axes[1].set_xlabel(
        "time, in pairs. Blue: computes with the block of that rank. Orange: a message in flight. Grey: waits"
    )


def draw_stored(axes, result):
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
        yticks=range(len(rows)),
        yticklabels=[row["method"] for row in rows],
        xlabel="KiB of attention's tensors on a rank",
    )
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def figures() -> None:
    folder = "05_context_parallel/figures"
    write_figure(f"{folder}/ring_hops.svg", ["05_ground_timeline"], draw_hops, shape=(2, 1), size=(7.5, 7))
    write_figure(f"{folder}/ring_timeline.svg", ["05_ground_timeline"], draw_timeline, shape=(2, 1), size=(7.5, 5))
    write_figure(f"{folder}/who_stores_what.svg", ["05_ground_holds"], draw_stored, size=(7.5, 2.6))


def sizes() -> tuple[int, int]:
    """Bytes of q, out and LSE of the whole sequence, and of its K/V."""
    return 4 * S * N * D * 2 + 4 * S * N, 4 * S * 2 * N_KV * D


def write_computed() -> None:
    """What follows from the code alone: what each rank stores, and the timeline."""
    own, block = sizes()
    rows = [["one process", own, block, 0]]
    for method, blocks in (("all-gather, 4 ranks", RANKS - 1), ("ring, 4 ranks", 2)):
        rows.append([method, own // RANKS, block // RANKS, blocks * block // RANKS])
    write_result(
        "05_ground_holds",
        f"What a rank stores of one layer's attention: {S} tokens, {N} heads of {D}, float32; bytes",
        ["method", "own q, out, LSE", "own K/V", "blocks of others"],
        rows,
        "Computed from the formulas, not measured.",
        computed=True,
    )
    write_result(
        "05_ground_timeline",
        "The forward pass of a ring on 4 ranks: a pair takes 1, a message 16",
        ["layout", "rank", "step", "block of", "begins", "pairs", "message"],
        timeline(),
        "Computed from `visible_slices` of ring_attention.py, not measured.",
        computed=True,
    )


def main() -> None:
    if option_given("--figures"):
        figures()
        return
    ranks = run_ranks(RANKS, readable, timeout=200)
    kept = ranks[0][BASE][1]
    assert kept == sum(sizes()) // RANKS, f"{kept} bytes are saved, not {sum(sizes()) // RANKS}"
    busiest = {name: max(found[name][2] for found in ranks) for name in ranks[0]}
    write_result(
        "05_ground_ring",
        f"Forward and backward passes of causal attention on {RANKS} ranks, over the ring in zigzag",
        ["version", "pairs of the busiest rank", "time of all ranks", "bytes sent by a rank", "bytes saved by a rank"],
        [
            [name, busiest[name] / busiest[BASE], ratio, sent, kept]
            for name, (sent, kept, _, ratio) in ranks[-1].items()
        ],
        f"{S} tokens, {N} heads of {D}, float32. All compute by `attention_block` of ring_attention.py. Pairs are "
        "counted in the forward pass; bytes are also counted, and those saved are for the backward pass.",
    )
    ranks = run_ranks(RANKS, with_kernel, timeout=200)
    write_result(
        "05_ground_ring_kernel",
        f"The same kernel in three rings: forward and backward passes on {RANKS} ranks, zigzag",
        ["version", "work of all ranks", "time, 4 ranks on the cores there are", "bytes sent by a rank"],
        [[name, work, ratio, sent] for name, (sent, _, _, ratio, work) in ranks[-1].items()],
        f"{S_KERNEL} tokens, {N} heads of {D}, float32; the kernel is PyTorch's flash attention for CPUs. Work is CPU "
        "seconds of all ranks together; both over PyTorch's ring.",
    )
    write_computed()
    figures()


if __name__ == "__main__":
    main()
