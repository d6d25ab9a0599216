"""The core file beside torch's attention, plain chunks and in_depth; and its three streams over time.

    python 08_fpdt/bench_fpdt.py             verify, measure, write results and the figures
    python 08_fpdt/bench_fpdt.py --computed  write only what is computed from the log of operations, and the figures
    python 08_fpdt/bench_fpdt.py --figures   only draw

Output and gradients of each way must match torch's attention in float64 before anything is measured. A CPU copies
when it should compute, so the streams are drawn from the log of the core file: which operation waited for which.
"""

import sys
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import fpdt as script
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _fpdt_log import RecordingOffloader
from fpdt_attention import EXPLICIT, fpdt_attention
from fpdt_store import Store, machine_for
from harness.figures import COLOURS, write_figure
from harness.meter import peak_memory
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import option_given, paired, write_result
from torch import Tensor

CPU = torch.device("cpu")
S, CHUNKS = 2048, 8
BASE = f"FPDT, {CHUNKS} chunks"
TORCH = "torch's attention, all on the device"


def ways() -> dict:
    """Each takes (block, x) and returns attention's output, and what counted its bytes."""

    def with_torch(block, x: Tensor):
        q, k, v = (y.transpose(0, 1)[None] for y in block.project_qkv(x))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1), None

    def simple(block, x: Tensor):
        q, k, v = (y.transpose(0, 1) for y in block.project_qkv(x))
        kv = torch.stack((k, v)).chunk(CHUNKS, dim=2)
        outs = []
        for i, q_chunk in enumerate(q.chunk(CHUNKS, dim=1)):
            out, _ = script.chunk_attention(q_chunk.reshape(len(k), -1, q.shape[-1]), [kv[i], *kv[:i]])
            outs.append(out.view(q_chunk.shape))
        return torch.cat(outs, dim=1).transpose(0, 1).flatten(1), None

    def in_depth(block, x: Tensor):
        store = Store(machine_for(CPU))
        attention = fpdt_attention(dist.group.WORLD, CHUNKS, store, EXPLICIT)
        return attention(*(y[None] for y in block.project_qkv(x)), causal=True)[0].flatten(1), store

    def core(num_chunks: int, num_buffers: int):
        return lambda block, x: attend(block, x, num_chunks, num_buffers)

    return {
        TORCH: with_torch,
        "chunks on the device, autograd": simple,
        "FPDT, 1 chunk": core(1, 2),
        f"FPDT, {CHUNKS} chunks, one buffer": core(CHUNKS, 1),
        BASE: core(CHUNKS, 2),
        f"FPDT, {2 * CHUNKS} chunks": core(2 * CHUNKS, 2),
        f"in_depth, {CHUNKS} chunks": in_depth,
    }


def attend(block, x: Tensor, num_chunks: int, num_buffers: int):
    offloader, comm = RecordingOffloader(CPU, num_buffers), script.AllToAllComm(dist.group.WORLD)
    args = block.project_qkv, block.qkv_params(), num_chunks, offloader, comm
    return script.fpdt_attention(x, *args), offloader


def block_and_x(tokens: int, dtype: torch.dtype) -> tuple:
    torch.manual_seed(0)
    return script.Block().to(dtype), torch.randn(tokens, script.HIDDEN, dtype=dtype, requires_grad=True)


def one(way, block, x: Tensor) -> tuple:
    """[out, dx, gradients of parameters], and what counted the bytes."""
    out, counter = way(block, x)
    return [out.detach(), *torch.autograd.grad(out, (x, *block.qkv_params()), out)], counter


def measured() -> list[list]:
    made, given = ways(), block_and_x(320, torch.float64)
    expected, _ = one(made[TORCH], *given)
    for name, way in made.items():
        for index, (x, y) in enumerate(zip(one(way, *given)[0], expected, strict=True)):
            assert_same(x, y, what=f"{name}: number {index} of out, dx and gradients of parameters")
    rows, given = [], block_and_x(S, torch.float32)
    for name, way in made.items():
        with peak_memory() as memory:
            counter = one(way, *given)[1]
        host = link = 0
        if isinstance(counter, RecordingOffloader):
            host, link = counter.max_host_bytes, counter.bytes_copied.total()
        elif counter:
            host, link = counter.host_peak, counter.offloaded + counter.fetched
        ratio = 1
        if name != BASE:
            ratio = paired(lambda way=way: one(way, *given), lambda: one(made[BASE], *given), repeats=5)
        rows.append([name, memory.peak, host, link, ratio])
    return rows


# ------------------------------------------------------------------------------------------------------- the streams


def recorded(num_chunks: int, num_buffers: int) -> dict[str, list[tuple]]:
    """The log of one layer's attention. In the backward pass all events of the forward pass count as over."""
    x = torch.randn(16 * num_chunks, script.HIDDEN, requires_grad=True)
    out, offloader = attend(script.Block(), x, num_chunks, num_buffers)
    split = len(offloader.log)
    out.sum().backward()
    backward = [(*op[:3], [event - split for event in op[3] if event > split]) for op in offloader.log[split:]]
    return {"forward": offloader.log[:split], "backward": backward}


def timeline(log: list[tuple], seconds) -> list[list]:
    """[stream, name, start, end] of every operation that takes time: each stream does one at a time, in its order, and
    each operation waits for its events."""
    ends, free, rows = [0.0], Counter(), []
    for stream, name, size, wait_for in log:
        start = max([free[stream], *(ends[event] for event in wait_for)])
        ends.append(start + seconds(stream, name, size))
        free[stream] = ends[-1]
        if ends[-1] > start:
            rows.append([stream, name, start, ends[-1]])
    return rows


def speed(copy: float):
    """A pair of chunks takes 1 forward, and 2.5 backward, with five matmuls for two; a chunk with itself half of that.
    Copying a chunk's queries, or its keys and values, takes `copy`. Projections are left out."""
    Q = 16 * script.N_HEADS * script.HEAD_DIM * 4

    def seconds(stream: str, name: str, size: int) -> float:
        if stream != "compute":
            return size / Q * copy
        reader, _, item = name.partition(".")
        if not item:  # what a row computes before its first item: in the forward pass the chunk with itself
            return 0.5 if reader.startswith("q") else 0.0
        if reader.startswith("q"):
            return 1.0
        return 1.25 if item[1:] == reader[2:] else 2.5

    return seconds


def idle(rows: list[list]) -> float:
    """Per cent of its work that the computation waits, up to its end."""
    spans = [row[2:] for row in rows if row[0] == "compute"]
    work = sum(end - start for start, end in spans)
    return 100 * (max(end for _, end in spans) / work - 1)


PANELS = {  # pass, chunks, buffers, time of a copy
    "one buffer": ("forward", 4, 1, 0.75),
    "two buffers": ("forward", 4, 2, 0.75),
    "forward pass": ("forward", 3, 2, 0.5),
    "backward pass": ("backward", 3, 2, 0.5),
}


def streams() -> tuple[list[list], list[list]]:
    drawn, idles = [], []
    for panel, (way, num_chunks, num_buffers, copy) in PANELS.items():
        rows = timeline(recorded(num_chunks, num_buffers)[way], speed(copy))
        drawn += [[panel, *row] for row in rows]
    logs = [recorded(8, num_buffers)[way] for way in ("forward", "backward") for num_buffers in (1, 2)]
    for copy in (0.25, 0.5, 0.75, 1.0, 2.0):
        idles.append([copy, *(round(idle(timeline(log, speed(copy))), 1) for log in logs)])
    return drawn, idles


# ------------------------------------------------------------------------------------------------------- the figures

LANES = {"compute": "compute", "h2d": "messages", "d2h": "activations"}  # stream: colour


def draw_lanes(panel, title: str, rows: list[list]) -> None:
    """rows: [stream, operation, start, end]. The five copies for a pair of the backward pass have one label."""
    for lane, (stream, colour) in enumerate(LANES.items()):
        bars = [row[1:] for row in rows if row[0] == stream]
        for _, start, end in bars:
            panel.barh(lane, end - start, left=start, height=0.8, color=COLOURS[colour], edgecolor="white")
        for (_, _, end), (_, start, _) in pairwise(bars) if stream == "compute" else ():
            if start > end + 1e-9:
                panel.barh(lane, start - end, left=end, height=0.8, color=COLOURS["idle"], alpha=0.4)
        for number, group in groupby(bars, lambda bar: bar[0].lstrip("qoutdlse") if bar[0][0] != "k" else bar[0]):
            together = list(group)
            if not (stream == "h2d" and len(together) == 5):
                for name, start, end in together:
                    label_bar(panel, lane, name, start, end)
            else:
                label_bar(panel, lane, f"chunk {number}", together[0][1], together[-1][2])
    panel.set(yticks=range(3), yticklabels=LANES, xlabel="time; 1 is a pair of chunks in the forward pass")
    panel.set_title(title, fontsize=9)
    panel.invert_yaxis()
    panel.grid(False)


def label_bar(panel, lane: int, name: str, start: float, end: float) -> None:
    if name[0] == "q" and lane == 0 and "." not in name:  # a chunk with itself
        name = f"{name}.kv{name[1:]}"
    if end - start >= 0.4:  # not the log-sum-exp
        words = name.replace(".", "\n")
        panel.text((start + end) / 2, lane, words, ha="center", va="center", color="black", size=7)


def draw_streams(axes, result):
    rows = result["rows"]
    longest = max(row[4] for row in rows if row[0] == "one buffer")
    for panel, title in zip(axes, ("one buffer", "two buffers"), strict=True):
        draw_lanes(panel, title, [row[1:] for row in rows if row[0] == title])
        panel.set_xlim(0, longest)


def draw_schedule(axes, result):
    for panel, title in zip(axes, ("forward pass", "backward pass"), strict=True):
        rows = [row[1:] for row in result["rows"] if row[0] == title]
        begin = 0 if title == "forward pass" else min(start for _, name, start, _ in rows if name == "q2")
        draw_lanes(panel, title, [row for row in rows if row[2] >= begin])


def figures() -> None:
    folder, source = "08_fpdt/figures", ["08_ground_streams"]
    write_figure(f"{folder}/schedule.svg", source, draw_schedule, shape=(2, 1), size=(7.5, 4.4))
    write_figure(f"{folder}/streams.svg", source, draw_streams, shape=(2, 1), size=(7.5, 4.4))


def write_computed() -> None:
    drawn, idles = run_ranks(1, streams)[0]
    write_result(
        "08_ground_idle",
        "How long the computation waits, in % of its work: 8 chunks",
        ["copy of K/V / pair", "forward, 1 buffer", "forward, 2 buffers", "backward, 1 buffer", "backward, 2 buffers"],
        idles,
        "Computed from the log of fpdt.py, with pairs that take 1 forward and 2.5 backward, half of it for a chunk "
        "with itself, and nothing for projections.",
        computed=True,
    )
    write_result(
        "08_ground_streams",
        "The three streams over time",
        ["panel", "stream", "operation", "start", "end"],
        drawn,
        "Computed from the log of fpdt.py; 1 is a pair of chunks in the forward pass. Copying a chunk's K/V takes 0.75 "
        "with one buffer and with two (4 chunks), 0.5 in the two passes (3 chunks).",
        computed=True,
    )


def write_measured() -> None:
    write_result(
        "08_ground",
        "Attention of one layer, forward and backward, on one process",
        ["way", "bytes on the device at most", "bytes on the host at most", "bytes copied", "time over " + BASE],
        run_ranks(1, measured, timeout=300)[0],
        f"{S} tokens, {script.N_HEADS} query heads and {script.N_KV_HEADS} K/V heads of {script.HEAD_DIM}, float32. "
        "The device's bytes are beyond x and the parameters; all are counted. in_depth gets q, k and v of all tokens, "
        "computes pairs with its readable kernel, and stores the same on the host. A CPU's copies take time from its "
        "work.",
    )


def main() -> None:
    option = option_given("--computed", "--figures")
    if not option:
        write_measured()
    if option != "--figures":
        write_computed()
    figures()


if __name__ == "__main__":
    main()
