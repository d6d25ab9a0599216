"""Ulysses and Ulysses x ring against the ring; bytes and memory by number of ranks; with TP; the cost model.

    python 05_context_parallel/in_depth/bench_context_ulysses.py             verify, measure, write results and figure
    python 05_context_parallel/in_depth/bench_context_ulysses.py --counts    only counts and formulas
    python 05_context_parallel/in_depth/bench_context_ulysses.py --figures   only draw

Before anything is timed or written, every version must match the output and the gradients of dense attention,
and the bytes that the table of bytes calls measured must equal the formula.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from bench_context_ring import RANKS, S, inputs, step_of
from context_ring import LocalAttention, allgather_attention, dense_attention, layout_positions, ring_attention
from context_ulysses import (
    Machine,
    check_enough_heads,
    cost_model,
    kv_heads_of,
    sent_per_layer,
    ulysses,
    usp,
    usp_groups,
    usp_positions,
)
from flash_local import FLASH, tiled
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication, peak_memory, saved_activations
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import Ratio, option_given, processor_paired, write_result
from torch import Tensor

BASE = "ring, zigzag"
LENGTH, HIDDEN, HEADS = 64, 64, 8  # tokens per rank, and the layer, of the table of bytes
KINDS = ("ulysses", "megatron", "ring")


def steps() -> dict[str, tuple[Tensor, Callable[[], list[Tensor]]]]:
    """Every version on this rank: the positions of its tokens, and its forward and backward."""
    group, rank = dist.group.WORLD, dist.get_rank()
    zigzag, contiguous = (layout_positions(layout, S, rank, RANKS) for layout in ("zigzag", "contiguous"))
    versions = {
        BASE: (ring_attention(group, "zigzag", FLASH), zigzag),
        "all-gather, zigzag": (allgather_attention(group, "zigzag", FLASH), zigzag),
        "Ulysses": (ulysses(group), contiguous),
        "Ulysses, one message": (ulysses(group, together=True), contiguous),
        "Ulysses x ring, 2 x 2": (
            usp(*usp_groups(RANKS, 2), "zigzag", FLASH),
            usp_positions("zigzag", S, rank // 2, 2, rank % 2, 2),
        ),
    }
    made = {}
    for name, (attention, where) in versions.items():
        shards = [x[:, where].contiguous() for x in inputs()]
        made[name] = where, lambda attention=attention, shards=shards: step_of(attention, *shards)
    return made


def verify() -> dict[str, tuple[float, int]]:
    """Bytes and messages that this rank sends in each version, after a check of the results."""
    want = step_of(dense_attention, *inputs())
    sent_by = {}
    for name, (where, step) in steps().items():
        with communication() as sent:
            got = step()
        for what, x, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, expected[:, where], 1e-5, f"{what} of {name}", dist.get_rank())
        sent_by[name] = sent.total, sum(n for what, n in sent.calls.items() if what != "recv")
    return sent_by


def measure() -> dict[str, Ratio]:
    """Ratio of the work of all ranks in each version to the zigzag ring's."""
    made = {name: step for name, (_, step) in steps().items()}
    base = made.pop(BASE)
    return {name: processor_paired(step, base) for name, step in made.items()}


# ---------------------------------------------------------------------------------------- memory against the degree

TOKENS, Q_HEADS, KV_HEADS, D, TILE = 1024, 8, 2, 64, 64
DEGREES = (1, 2, 4, 8)
VERSIONS = ("all-gather", "ring", "Ulysses", "Ulysses x ring")


def memory_of(version: str) -> tuple[int, int]:
    """Bytes that this rank saves for backward, and the peak of forward and backward beyond the inputs q, k, v
    and the gradient of the output. The kernel is in Python, so that its memory is counted as well."""
    group, rank, P = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    local, generator = tiled(TILE), torch.Generator().manual_seed(rank)

    def alone(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        return OneDevice.apply(q, k, v, local, causal)

    attention = {
        "all-gather": lambda: allgather_attention(group, "zigzag", local),
        "ring": lambda: ring_attention(group, "zigzag", local),
        "Ulysses": lambda: ulysses(group, alone),
        "Ulysses x ring": lambda: usp(*usp_groups(P, 2 if P > 1 else 1), "zigzag", local),
    }[version]()
    shapes = [(1, TOKENS // P, heads, D) for heads in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS)]
    q, k, v, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    peaks = []
    for _ in range(min(P, 3)):  # Gloo's threads may free a buffer late: the smallest of three counts
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with saved_activations() as saved, peak_memory() as memory:
            attention(q, k, v, causal=True).backward(dout)
        peaks.append(memory.peak)
    return saved.bytes, min(peaks)


class OneDevice(torch.autograd.Function):
    """A local attention as attention on one device."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, local: LocalAttention, causal: bool) -> Tensor:
        out, lse = local.forward(q, k, v, causal=causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = local, causal
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple:
        local, causal = ctx.arguments
        return *local.backward(dout, *ctx.saved_tensors, causal=causal), None, None


def memory_rows() -> list[list]:
    rows = []
    for P in DEGREES:
        for version in VERSIONS:
            ranks = run_ranks(P, memory_of, version, timeout=300)
            rows.append([version, P, max(kept for kept, _ in ranks), max(peak for _, peak in ranks)])
    return rows


def draw_memory(axes, result) -> None:
    rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    looks = {
        "all-gather": (COLOURS["messages"], "-"),
        "ring": (COLOURS["compute"], "-"),
        "Ulysses": (COLOURS["activations"], "-"),
        "Ulysses x ring": (COLOURS["activations"], "--"),
    }
    ranks = sorted({row["ranks"] for row in rows})
    first = max(row["peak"] for row in rows if row["ranks"] == 1) / 2**20
    axes.plot(ranks, [first / P for P in ranks], color=GREY, linestyle=":", label="divided by the ranks")
    for version, (colour, line) in looks.items():
        peaks = [row["peak"] / 2**20 for P in ranks for row in rows if (row["version"], row["ranks"]) == (version, P)]
        axes.plot(ranks, peaks, color=colour, linestyle=line, marker="o", markersize=4, label=version)
    axes.set(xscale="log", yscale="log", xlabel="ranks that share the sequence", ylabel="peak of a rank, MiB")
    axes.set_xticks(ranks, [str(P) for P in ranks])
    axes.minorticks_off()
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16) if min(first / ranks[-1], 9) / 1.5 <= t <= first * 1.5]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.legend(fontsize=8)


def figures() -> None:
    write_figure("05_context_parallel/figures/memory_by_ranks.svg", ["05_memory"], draw_memory, size=(6.5, 3.8))


# ------------------------------------------------------------------------------------ tensor parallelism, and heads


def heads_rows(N: int = 32, N_kv: int = 8, P: int = 8) -> list[list]:
    """Tensor parallelism shards the heads first. For each degree: heads left for Ulysses, cost of K/V."""
    rows = []
    for tp in (1, 2, 4, 8, 16):
        heads, kv = N // tp, max(1, N_kv // tp)
        try:
            check_enough_heads(heads, P)
            copies = sum(len(kv_heads_of(rank, P, heads, kv)) for rank in range(P))
            sent = sent_per_layer("ulysses", 1024 * P, heads, P, heads, kv) / (1024 * heads)
            ring = sent_per_layer("ring", 1024 * P, heads, P, heads, kv) / (1024 * heads)
            rows.append([tp, heads, kv, copies / kv, sent, ring])
        except ValueError:
            rows.append([tp, heads, kv, "refused", "refused", 2 * kv * (P - 1) / heads])
    return rows


def sent_forward(kind: str) -> float:
    """Bytes of one layer's forward on this rank, with LENGTH tokens per rank."""
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


def write_timed(sent: list[dict[str, tuple[float, int]]]) -> None:
    assert sent[0][BASE][1] == 9
    ratios = run_ranks(RANKS, measure, timeout=600)[0]
    most = {name: max(s[name][0] for s in sent) for name in sent[0]}
    write_result(
        "05_ulysses",
        f"Forward and backward of causal attention on {RANKS} ranks, over those of the ring with the zigzag layout",
        ["version", "work of all ranks", "bytes sent", "messages of a rank"],
        [[name, ratio, most[name] / most[BASE], sent[0][name][1]] for name, ratio in ratios.items()],
        f"{S} tokens, float32, as many K/V heads as query heads; PyTorch's kernel in all. Work is CPU seconds of all "
        "ranks. The ring sends 9 messages: 3 rounds of K/V in the forward pass, then 3 and 3 of dK/dV.",
    )


def main() -> None:
    option = option_given("--figures", "--counts")
    if option == "--figures":
        figures()
        return
    sent = run_ranks(RANKS, verify, timeout=300)
    rows = bytes_rows()
    if option != "--counts":
        write_timed(sent)
    write_result(
        "05_memory",
        "Bytes of a layer's attention on a rank, as the same sequence is shared by more ranks: forward and backward",
        ["version", "ranks", "kept for backward", "peak"],
        memory_rows(),
        f"{TOKENS} tokens, {Q_HEADS} heads of {D} that share {KV_HEADS} of K/V, float32, tiles of {TILE}. Counted, the "
        "largest of all ranks, beyond q, k, v and the gradient of the output. In Ulysses x ring 2 ranks swap.",
    )
    write_result(
        "05_ulysses_and_tp",
        "What tensor parallelism leaves for Ulysses on 8 ranks: a model of 32 heads that share 8 of K/V",
        [
            "TP",
            "query heads left",
            "K/V heads left",
            "copies of a K/V head on 8 ranks",
            "Ulysses sends",
            "a ring sends",
        ],
        heads_rows(),
        "Sent by a rank in forward, in units of its own part of q.",
        computed=True,
    )
    write_result(
        "05_ulysses_bytes",
        "Bytes that each rank sends in the forward pass of one layer, as sequence and ranks grow together",
        ["ranks", "tokens", "Ulysses", "Megatron's sequence parallelism", "ring attention", "measured"],
        rows,
        f"{LENGTH} tokens per rank, hidden size {HIDDEN}, float32, no GQA; of Megatron's layer the collectives only.",
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
        "The assumptions are those of `Machine` in context_ulysses.py.",
        computed=True,
    )
    figures()


if __name__ == "__main__":
    main()
