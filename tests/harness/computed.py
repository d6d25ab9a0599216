"""The tables of the READMEs that need no measurement: formulas of the chapters, evaluated.

    python tests/harness/computed.py             print them
    python tests/harness/computed.py --figures   draw the figures that show them

`make tables` writes them between `<!-- results: NAME -->` marks, like measured tables, and a test computes
them again. The tests of the chapters verify the formulas against a meter.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # for the run as a script

import torch  # noqa: E402

from harness.layout import CHAPTERS  # noqa: E402

IN_DEPTH = [str(folder / "in_depth") for folder in CHAPTERS]

Rows = list[list[Any]]
Words = str | Callable[[], str]
TABLES: dict[str, Callable[[], dict[str, Any]]] = {}
FIGURES: dict[str, tuple[str, Any, dict[str, Any]]] = {}


def computed(name: str, title: str, columns: list[str], notes: Words = "") -> Callable[[Callable[[], Rows]], Any]:
    """The function returns the rows of the table NAME. A measured result has more: `write_result`."""

    def register(rows: Callable[[], Rows]) -> Callable[[], Rows]:
        @functools.cache
        def record() -> dict[str, Any]:
            before = sys.path[:]
            sys.path += IN_DEPTH
            try:  # the last digits depend on the processor
                cells = [[float(f"{x:.10g}") if isinstance(x, float) else x for x in row] for row in rows()]
                words = notes() if callable(notes) else notes
            finally:
                sys.path[:] = before
            return {"name": name, "title": title, "columns": columns, "rows": cells, "notes": words}

        TABLES[name] = record
        return rows

    return register


def drawn(path: str, source: str, **how: Any) -> Callable[[Callable[..., None]], Any]:
    """The function draws the figure `path` from the table `source`."""

    def register(draw: Callable[..., None]) -> Callable[..., None]:
        FIGURES[path] = (source, draw, how)
        return draw

    return register


# ------------------------------------------------------------------------------------------------------- 01 single GPU


@computed(
    "01_peak",
    "The peak of a step: 4 layers, hidden 192, two micro-batches of 2 x 256 tokens",
    ["precision", "recompute", "always stored", "saved for backward", "temporary", "peak, bytes", "where"],
    "By the formulas, which a real step reaches to the byte in all nine; the fused attention of the CPU.",
)
def peaks() -> Rows:
    from llama import MODES, LlamaConfig
    from step_peak import PRECISIONS, held, kept_for_backward, peak

    config, batch, seq, rows = LlamaConfig(hidden=192, layers=4, intermediate=512), 2, 256, []
    for precision in PRECISIONS:
        for mode in MODES:
            where, most = peak(config, batch, seq, 2, precision, mode)
            always = held(config, batch, seq, 2, precision)
            saved = sum(kept_for_backward(config, batch, seq, precision, mode).values())
            rows.append([precision, mode, always, saved, most - always - saved, most, where])
    return rows


@drawn("01_single_gpu/figures/peaks.svg", "01_peak", size=(9.0, 3.6))
def draw_peaks(axes: Any, table: dict) -> None:
    from harness.figures import COLOURS

    names = [f"{precision}\n{mode}" for precision, mode, *_ in table["rows"]]
    below = [0.0] * len(names)
    for column, what, colour in (
        (2, "weights, gradients, moments", "weights"),
        (3, "saved for backward", "activations"),
        (4, "temporary", "compute"),
    ):
        sizes = [row[column] / 2**20 for row in table["rows"]]
        axes.bar(names, sizes, bottom=below, color=COLOURS[colour], label=what)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.set(ylabel="MiB at the peak")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=9)


# ------------------------------------------------------------------------------------------------------------- 03 ZeRO


@computed(
    "03_zero_memory",
    "The paper's model sizes by the formula of bytes per parameter",
    ["stage", "7.5B parameters on 64 ranks", "largest on 64 ranks of 32 GB", "largest on 1024 ranks of 16 GB"],
    "bf16 with AdamW and fp32 master weights (K = 12). A model that trains holds and sends, to the byte, what the "
    "formulas say; stage 3 keeps its last unit and the root gathered between forward and backward, and so sends less "
    "than 3/2.",
)
def zero_memory() -> Rows:
    from zero_memory import GB, STAGES, bytes_per_parameter, largest_model

    rows: Rows = []
    for stage in STAGES:
        largest = [largest_model(memory * GB, stage, ranks) / 1e9 for memory, ranks in ((32, 64), (16, 1024))]
        size = 7.5e9 * bytes_per_parameter(stage, 64) / GB
        rows.append([str(stage), f"{size:.4g} GB", *(f"{billions:.4g}B" for billions in largest)])
    return rows


# ------------------------------------------------------------------------------------------------- 05 context parallel

LENGTHS, RANKS = [1024, 64, 256, 128, 64, 512], 4  # one long document and several short ones


@computed(
    "05_packed",
    f"Documents of {', '.join(map(str, LENGTHS))} tokens packed in one sequence, on {RANKS} ranks",
    ["version", "pairs of all ranks", "busiest rank over average", "bytes sent"],
    "Causal attention; pairs of forward, bytes of both passes, both over one document of as many tokens.",
)
def packed() -> Rows:
    from packed_documents import boundaries, packed_pairs

    documents, one, rows = boundaries(LENGTHS), [0, sum(LENGTHS)], []
    of_one, of_all = (sum(n * (n + 1) // 2 for n in lengths) for lengths in ([sum(LENGTHS)], LENGTHS))
    for name, layout, cu in (
        ("one document, ring, zigzag", "zigzag", one),
        ("ring, contiguous", "contiguous", documents),
        ("ring, zigzag", "zigzag", documents),
        ("ring, striped", "striped", documents),
        ("ring, each document in zigzag", "each", documents),
        ("all-gather, each document in zigzag", "each", documents),
    ):
        pairs = [packed_pairs(layout, cu, rank, RANKS) for rank in range(RANKS)]
        rows.append([name, sum(pairs) / of_one, max(pairs) * RANKS / sum(pairs), 1])
    # The ring's P - 1 hops take k and v forward, k, v, dk and dv backward; Ulysses sends q, k, v and out, both ways.
    return [*rows, ["Ulysses", of_all / of_one, 1, 8 / (6 * RANKS)]]


# -------------------------------------------------------------------------------------------------- 07 expert parallel


def choices_of(rank: int, experts: int, k: int, nodes: int, most: int) -> torch.Tensor:
    """The experts of 256 tokens of a rank, each on at most `most` of so many nodes."""
    import torch.nn.functional as F
    from routing import route, router_logits

    x = F.rms_norm(torch.randn(256, 64, generator=torch.Generator().manual_seed(rank)), (64,))
    gate = torch.randn(experts, 64, generator=torch.Generator().manual_seed(99)) / 8
    return route(router_logits(x, gate), k, "softmax", None, nodes, most).experts


def rows_of(version: str, choices: list[torch.Tensor], experts: int, ranks: int) -> list[list[int]]:
    from expert_dispatch import rows_that_leave

    used = torch.ones_like(choices[0]).bool()
    return [rows_that_leave(version, chosen, used, experts, ranks, rank) for rank, chosen in enumerate(choices)]


@computed(
    "07_routing_bytes",
    "Rows that leave a rank, and bytes of all all-to-alls, forward and backward, at 4 ranks",
    ["dispatch", "ranks of a token", "rows per token", "bytes over pairs"],
    "4 of 32 experts, 256 tokens per rank, hidden size 64, float32, from routed counts.",
)
def routing_bytes() -> Rows:
    from expert_dispatch import bytes_sent

    found = []
    for version, most in (("everywhere", 4), ("pairs", 4), ("pairs", 2), ("once", 4), ("once", 2), ("once", 1)):
        rows = rows_of(version, [choices_of(rank, 32, 4, 4, most) for rank in range(4)], 32, 4)
        sent = sum(bytes_sent(version, rows, rank, 64, 32, 4, 4) for rank in range(4))
        found.append([version, "any" if most == 4 else f"at most {most}", sum(map(sum, rows)) / (4 * 256), sent])
    return [[*cells, sent / found[1][3]] for *cells, sent in found]


@computed(
    "07_routing_nodes",
    "Rows that leave a rank per token with 8 of 256 experts, from routed counts",
    ["ranks", "pairs", "once", "once, at most M ranks", "M"],
    "DeepSeek-V3's numbers of experts (8 of 256, at most 4 nodes).",
)
def routing_nodes() -> Rows:
    def per_token(version: str, most: int, ranks: int) -> float:
        rows = rows_of(version, [choices_of(rank, 256, 8, ranks, most) for rank in range(4)], 256, ranks)
        return sum(map(sum, rows)) / (4 * 256)

    return [
        [ranks, per_token("pairs", ranks, ranks), per_token("once", ranks, ranks), per_token("once", most, ranks), most]
        for ranks, most in ((8, 2), (8, 4), (16, 4), (64, 4))
    ]


@computed(
    "07_two_hops",
    "Bytes by link, forward and backward, at 8 ranks on 4 nodes",
    ["dispatch", "nodes of a token", "kB per token over the slow link", "inside the nodes", "slow link over pairs"],
    "4 of 32 experts, 64 tokens per rank, hidden size 256, float32, random choices: a row is 1,024 bytes. Tables of "
    "weights and counts are included.",
)
def two_hops() -> Rows:
    from expert_dispatch import bytes_sent
    from routing import route
    from two_hops import bytes_by_link

    ranks, nodes, experts, tokens, hidden = 8, 4, 32, 64, 256

    def in_one_hop(way: str, choices: list[torch.Tensor], rank: int) -> tuple[int, int]:
        """bytes_sent, split: each rank of another node, and each of one's own, has its rows and its counts."""
        full = rows_of(way, choices, experts, ranks)
        own = {rank - rank % 2, rank - rank % 2 + 1}
        near = [[n * (i in own and j in own) for j, n in enumerate(row)] for i, row in enumerate(full)]
        counts = bytes_sent(way, [[0] * ranks] * ranks, rank, hidden, experts, 4, 4)
        total, inside = (bytes_sent(way, rows, rank, hidden, experts, 4, 4) for rows in (full, near))
        inside -= counts - counts // (ranks - 1)  # of one peer
        return total - inside, inside

    found = []
    for way, most in (("pairs", 4), ("once", 4), ("two hops", 4), ("pairs", 2), ("once", 2), ("two hops", 2),
                      ("two hops", 1)):  # fmt: skip
        logits = [torch.randn(tokens, experts, generator=torch.Generator().manual_seed(10 + r)) for r in range(ranks)]
        choices = [route(x, 4, "softmax", None, nodes, most).experts for x in logits]
        by_rank = [
            bytes_by_link(choices, rank, nodes, experts, hidden, 4)
            if way == "two hops"
            else in_one_hop(way, choices, rank)
            for rank in range(ranks)
        ]
        slow, fast = (sum(link) / (1000 * ranks * tokens) for link in zip(*by_rank, strict=True))
        found.append([way, "any" if most == nodes else f"at most {most}", slow, fast])
    return [[*row, row[2] / found[0][2]] for row in found]


@drawn("07_expert_parallel/figures/two_hops.svg", "07_two_hops", size=(9, 3.4))
def draw_two_hops(axes: Any, table: dict) -> None:
    from harness.figures import COLOURS

    names = [f"{row[0]},\n{row[1]}" for row in table["rows"]]
    bottom = [0.0] * len(names)
    for column, name, alpha in ((2, "over the slow link", 1.0), (3, "inside the nodes", 0.4)):
        values = [row[column] for row in table["rows"]]
        axes.bar(names, values, bottom=bottom, label=name, color=COLOURS["messages"], alpha=alpha, width=0.6)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    axes.set(ylabel="kilobytes per token")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(frameon=False)


# ------------------------------------------------------------------------------------------------------------- 08 FPDT


def assumed() -> str:
    from fpdt_costs import Hardware

    return f"With {Hardware()}"


@computed(
    "08_fpdt_paper",
    "Device memory in GB: published (arXiv 2408.16978) and by M(u) = F + A/u",
    ["model", "1 chunk, published", "2 chunks, published", "2 chunks, formula", "tensors that would be exact"],
    "The formula takes the first column and 14 tensors of [tokens, hidden]; its assumptions are the docstring of "
    "`PaperRow` in fpdt_costs.py. That count was chosen with the second column in sight, so the agreement shows that "
    "the formula can explain these figures, not that it predicted them.",
)
def fpdt_paper() -> Rows:
    from fpdt_costs import paper_table

    return [[model, one, two, round(formula, 1), round(exact, 1)] for model, one, two, formula, exact in paper_table()]


@computed(
    "08_fpdt_chunk_size",
    "Attention of one layer of a 1.2-billion Llama, 512k tokens on one GPU, by size of a chunk",
    ["tokens of a chunk", "a pair, ms", "its fetch, ms", "back, ms", "its fetches, ms", "forward, s", "backward, s",
     "peak, GB", ""],
    lambda: f"{assumed()} and 2 GB for attention.",
)  # fmt: skip
def fpdt_chunk_size() -> Rows:
    from fpdt_costs import Hardware, Sizes
    from fpdt_time import recommend, seconds_table

    h = Hardware()
    best, found = recommend(Sizes(2**19, 1, 1, 32, 8, 64), h, 2e9)
    rows: Rows = []
    for z, forward, backward, peak in found:
        x, y = (seconds_table(z, h, way) for way in ("forward", "backward"))
        cells = [1e3 * seconds for seconds in (x.pair, 2 * x.kv, y.pair, 3 * y.q + y.lse + y.dq)]
        rows.append([z.c, *cells, forward, backward, peak / 1e9, "recommended" if z == best else ""])
    return rows


@computed(
    "08_fpdt_shared",
    "Attention of the same layer, 2M tokens on 8 GPUs, whose link to the host is shared",
    ["GPUs that share the link", "c* of the backward", "recommended chunk", "16k: forward waits", "16k: backward",
     "64k, one slot: forward", "64k, one slot: backward", "64k, two slots: forward", "64k, two slots: backward"],
    lambda: f"In % of what the computation works, all-to-alls included. {assumed()}, with enough memory.",
)  # fmt: skip
def fpdt_shared() -> Rows:
    from fpdt_costs import Hardware, Sizes
    from fpdt_time import attention_seconds, recommend, smallest_hidden_chunk

    rows: Rows = []
    for sharing in (1, 2, 4, 8):
        z, h, waits = Sizes(2**21, 8, 1, 32, 8, 64), Hardware(sharing=sharing), []
        for c, slots in ((2**14, 2), (2**16, 1), (2**16, 2)):
            for way in ("forward", "backward"):
                total, idle = attention_seconds(z.with_chunks(z.S // c), h, way, slots)
                waits.append(f"{idle / (total - idle):.1%}")
        rows.append([sharing, round(smallest_hidden_chunk(z, h, "backward")), recommend(z, h, 40e9)[0].c, *waits])
    return rows


@computed(
    "08_fpdt_timelines",
    "The streams of one of 4 GPUs, in ms: attention of one layer, 64k tokens in 4 chunks",
    ["case", "stream", "what", "start", "end"],
    "From the schedule of the loops. An all-to-all is on the computation's stream.",
)
def fpdt_timelines() -> Rows:
    from fpdt_costs import Hardware, Sizes
    from fpdt_time import timeline

    z, rows = Sizes(2**16, 4, 4, 32, 8, 64), []
    for way, sharing, slots in (("forward", 4, 2), ("backward", 1, 1), ("backward", 1, 2), ("backward", 4, 2)):
        case = f"{way}, {slots} slot{'s' * (slots > 1)}, link {'shared by 4' if sharing > 1 else 'of its own'}"
        for stream, name, start, end in timeline(z, Hardware(sharing=sharing), way, slots):
            rows.append([case, stream, name, 1e3 * start, 1e3 * end])
    return rows


@drawn("08_fpdt/figures/chunk_size.svg", "08_fpdt_chunk_size")
def draw_chunk_size(axes: Any, table: dict) -> None:
    chunk, forward, backward, peak = ([row[n] for row in table["rows"]] for n in (0, 5, 6, 7))
    axes.loglog(chunk, forward, "o-", label="seconds, forward")
    axes.loglog(chunk, backward, "^-", label="seconds, backward")
    axes.loglog(chunk, peak, "s--", label="GB at most, backward")
    [best] = [row[0] for row in table["rows"] if row[8]]
    axes.axvline(best, color="gray", linestyle=":")
    axes.set(xlabel="tokens of a chunk", title="Too small waits for the link, too large fills the memory")
    axes.legend()


@drawn("08_fpdt/figures/timelines.svg", "08_fpdt_timelines", shape=(4, 1), size=(9, 8))
def draw_timelines(axes: Any, table: dict) -> None:
    from harness.figures import COLOURS

    lanes = ("compute", "fetch", "offload")
    longest = max(row[4] for row in table["rows"])
    for panel, case in zip(axes, dict.fromkeys(row[0] for row in table["rows"]), strict=True):
        mine = [row[1:] for row in table["rows"] if row[0] == case]
        for stream, name, start, end in mine:
            message = stream == "compute" and not name.startswith("attend")
            kind = "messages" if message or stream == "fetch" else {"offload": "activations"}.get(stream, stream)
            panel.barh(lanes.index(stream), end - start, left=start, height=0.8, color=COLOURS[kind])
        spans = sorted(row[2:] for row in mine if row[0] == "compute")
        for (_, end), (start, _) in pairwise([(0, 0), *spans]):
            if start > end + 1e-6:
                panel.barh(0, start - end, left=end, height=0.8, color=COLOURS["idle"], alpha=0.4)
        panel.set(yticks=range(3), yticklabels=lanes, title=case, xlim=(0, longest), xlabel="ms")
        panel.invert_yaxis()
        panel.grid(False)


# -------------------------------------------------------------------------------------------------- 10 mixed precision


@computed(
    "10_formats",
    "Formats, computed from the number of bits, and equal to torch.finfo where torch has the format",
    ["format", "bits", "exponent", "mantissa", "largest", "smallest normal", "smallest", "epsilon",
     "1 + 1 + ... ends at"],
    "In the last column 5,000 is no stall: so many ones were added. In the formats with a dash torch cannot add; there "
    "the sum would end at 2^(M+1), which is 2,048, 16 and 8.",
)  # fmt: skip
def formats() -> Rows:
    from formats import FORMATS, running_sum

    rows: Rows = []
    for f in FORMATS.values():
        stalls = int(running_sum(torch.ones(5000), f.dtype).item()) if f.dtype and f.bits >= 16 else "-"
        rows.append([f.name, f.bits, f.exponent, f.mantissa, f.max, f.smallest_normal, f.smallest, f.epsilon, stalls])
    return rows


@drawn("10_mixed_precision/figures/formats.svg", "10_formats", shape=(1, 2))
def draw_formats(axes: Any, table: dict) -> None:
    ranges, gaps = axes
    for y, (name, _, _, _, high, normal, low, step, _) in enumerate(table["rows"]):
        low, normal, high = map(math.log2, (low, normal, high))
        ranges.plot([normal, high], [y, y], linewidth=7, solid_capstyle="butt", color=f"C{y}")
        ranges.plot([low, normal], [y, y], linewidth=2, color=f"C{y}")
        ranges.annotate(name, (high + 4, y), va="center")
        marks = [1 + i * step for i in range(int(1 / step) + 1)] if step > 0.001 else []
        gaps.plot(marks, [y] * len(marks), "|", markersize=12, color=f"C{y}")
        if not marks:  # too dense to be drawn one by one
            gaps.plot([1, 2], [y, y], linewidth=12, solid_capstyle="butt", color=f"C{y}")
        gaps.annotate(f"{name}: {int(1 / step):,} steps", (1.0, y + 0.28), fontsize=8)
    ranges.set(xlabel="power of two (thin: subnormal)", title="Range", yticks=[], xlim=(-155, 160))
    gaps.set(xlabel="numbers in [1, 2]", title="Resolution", yticks=[], ylim=(-0.5, 6))


def main() -> None:
    from harness.figures import write_figure
    from harness.report import table

    parser = argparse.ArgumentParser(description="The tables of the READMEs that need no measurement.")
    parser.add_argument("--figures", action="store_true", help="draw the figures that show them")
    if not parser.parse_args().figures:
        print("\n".join(table(record()) for record in TABLES.values()))
        return
    for path, (source, draw, how) in FIGURES.items():
        print(f"wrote {write_figure(path, [source], draw, **how).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
