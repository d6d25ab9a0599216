"""Attention in chunks: bytes by number of chunks, measured and predicted, and time; on a GPU, its limits.

    python bench_fpdt_attention.py   CPU: writes the results 08_fpdt, 08_fpdt_speed and the figure
    python 08_fpdt/in_depth/bench_fpdt_attention.py --figures       only redraws the figure
    python bench_fpdt_attention.py --gpu   one GPU, under 9 minutes: longest sequence, MFU, against recomputation
    python 08_fpdt/in_depth/bench_fpdt_attention.py --gpu --dry --out DIR   the same program on the CPU, with tiny sizes

First output and gradients of attention in chunks must match the full attention, and the bytes the formulas;
only then is anything timed or written.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _fpdt_demo import dense_attention, settled
from fpdt_attention import ChunkedAttention, fpdt_attention, fpdt_positions, to_heads
from fpdt_costs import Sizes, attention_peak, block_link_bytes, host_peak, link_bytes, network_bytes
from fpdt_store import CpuMachine, Store
from harness.figures import write_figure
from harness.meter import communication, peak_memory
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import paired, write_result

HEADS, KV_HEADS, D = 8, 2, 16
S = 2048  # tokens of the measured table
CHUNKS = (1, 2, 4, 8, 16)


def verify() -> None:
    """Check output and gradients in 1, 2 and 4 chunks against the full sequence on one rank."""
    group, P, S = dist.group.WORLD, dist.get_world_size(), 64
    make = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, S, n, 8, generator=make, dtype=torch.float64) for n in (4, 2, 2, 4))
    want = [x.clone().requires_grad_() for x in (q, k, v)]
    out = dense_attention(*want, causal=True)
    out.backward(dout)
    for u in (1, 2, 4):
        mine = fpdt_positions(S, group.rank(), P, u)
        shard = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
        got = fpdt_attention(group, u, Store(CpuMachine()))(*shard, causal=True)
        got.backward(dout[:, mine])
        pairs = [("out", got, out), *((f"d{n}", x.grad, y.grad) for n, x, y in zip("qkv", shard, want, strict=True))]
        for name, x, y in pairs:
            assert_same(x.detach(), y.detach()[:, mine], what=f"{name} in {u} chunks", rank=group.rank())


def attention_numbers(z: Sizes) -> dict[str, int]:
    """Measured bytes of one layer's attention on this rank, forward and backward, float32."""
    with settled():
        return numbers_of(z)


def numbers_of(z: Sizes) -> dict[str, int]:
    group, T = dist.group.WORLD, z.S // z.P
    qkv = [torch.randn(1, T, n, z.head_dim) for n in (z.heads, z.kv_heads, z.kv_heads)]
    dout, s, store = torch.randn(1, T, z.heads, z.head_dim), T // z.u, Store(CpuMachine())
    core = ChunkedAttention(group, z.u, store)
    with communication() as sent:
        with peak_memory() as forward:
            kept = core.forward(
                lambda i: [x[:, i * s : (i + 1) * s] for x in qkv], lambda i, o: None, dout.device, True
            )
        away = [store.offload(to_heads(chunk, group)) for chunk in dout.split(s, 1)]
        with peak_memory() as backward:
            core.backward(kept, away, lambda *grads: None, dout.device)
    link = store.offloaded + store.fetched
    return dict(forward=forward.peak, backward=backward.peak, host=store.host_peak, link=link, network=sent.total)


def predicted_numbers(z: Sizes) -> dict[str, int]:
    """The same, by the formulas."""
    want = dict(forward=attention_peak(z, "forward"), backward=attention_peak(z, "backward"), host=host_peak(z))
    link = sum(link_bytes(z, "forward, kept")) + sum(link_bytes(z, "backward"))
    return want | dict(link=link, network=2 * network_bytes(z))


def memory_rows() -> list[list]:
    """Sequence, chunks, ranks, and bytes; each is measured and must equal its formula."""
    cases = [Sizes(S, P, u, HEADS, KV_HEADS, D, 4) for P in (1, 2) for u in CHUNKS]
    cases += [Sizes(2 * S, 1, 8, HEADS, KV_HEADS, D, 4), Sizes(4 * S, 1, 16, HEADS, KV_HEADS, D, 4)]
    rows = []
    for z in cases:
        want = predicted_numbers(z)
        for rank, got in enumerate(run_ranks(z.P, attention_numbers, z, timeout=120)):
            if got != want:
                sys.exit(f"{z}, rank {rank}: measured {got}, predicted {want}")
        rows.append([z.S, z.u, z.P, *want.values()])
    return rows


def speed_rows() -> list[list]:
    """Seconds of attention, forward and backward, in u chunks over seconds in one chunk; one process."""

    def step(u: int) -> None:
        make = torch.Generator().manual_seed(0)
        x = [torch.randn(1, S, n, D, generator=make, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS)]
        fpdt_attention(dist.group.WORLD, u, Store(CpuMachine()))(*x, causal=True).sum().backward()

    return [[u, paired(lambda u=u: step(u), lambda: step(1), repeats=7)] for u in CHUNKS[1:]]


# ------------------------------------------------------------------------------------------------------------- figures


def draw_memory(axes, result) -> None:
    rows = [row for row in result["rows"] if row[0] == S]
    for P, ranks in ((1, "one rank"), (2, "two ranks")):
        mine = [row for row in rows if row[2] == P]
        for column, way, style in ((3, "forward", "o-"), (4, "backward", "s--")):
            megabytes = [row[column] / 1e6 for row in mine]
            axes.loglog([row[1] for row in mine], megabytes, style, label=f"{way}, {ranks}")
    axes.set(xlabel="chunks", ylabel="MB on the device", title="Attention: memory falls as 1/u")
    axes.set_xticks(CHUNKS, [str(u) for u in CHUNKS])
    ticks = (0.2, 0.5, 1, 2, 5)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend()


def figures() -> None:
    write_figure("08_fpdt/figures/memory.svg", ["08_fpdt"], draw_memory)


# ---------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="only draw the figures again")
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU")
    parser.add_argument("--dry", action="store_true", help="with --gpu: the same program on the CPU, tiny")
    parser.add_argument("--out", type=Path, help="folder for the results of --gpu; default results/")
    parser.add_argument("--seconds", type=float, default=450.0, help="about how long --gpu may take")
    args = parser.parse_args()
    if (args.dry or args.out) and not args.gpu:
        print("bench_fpdt_attention.py: --dry and --out are about --gpu; add --gpu", file=sys.stderr)
        return 2
    if args.figures:
        figures()
        return 0
    if args.gpu:
        from _fpdt_gpu import measure

        return measure(args.dry, args.out, args.seconds)
    for ranks in (1, 2):
        run_ranks(ranks, verify, timeout=120)
    rows = memory_rows()
    [speed] = run_ranks(1, speed_rows, timeout=300)
    z = Sizes(S, 1, 8, HEADS, KV_HEADS, D, 4)
    write_result(
        "08_fpdt",
        "Attention of one layer in chunks: bytes on a rank, measured, and equal to the formulas",
        ["tokens", "chunks", "ranks", "device, forward", "device, backward", "host", "link", "network"],
        rows,
        f"{HEADS} query and {KV_HEADS} key/value heads of {D}, float32. Link and network: both ways together. "
        f"By formula, with 8 chunks on one rank, a block that keeps its input only moves "
        f"{sum(block_link_bytes(z, HEADS * D, 'input')):,} bytes over the link, and one that keeps attention "
        f"{sum(block_link_bytes(z, HEADS * D, 'attention')):,}.",
    )
    write_result(
        "08_fpdt_speed",
        "Attention forward and backward in u chunks: seconds over those in one chunk",
        ["chunks", "seconds: median (quartiles)"],
        speed,
        f"{S} tokens, one process, on a CPU, which copies when it should compute: nothing hides here.",
    )
    figures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
