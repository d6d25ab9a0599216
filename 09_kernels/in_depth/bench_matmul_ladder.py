"""The ladder, predicted and counted; on a GPU also timed, against cuBLAS.

    python 09_kernels/in_depth/bench_matmul_ladder.py   on any machine: sectors, bank turns, registers, the roofline
    python 09_kernels/in_depth/bench_matmul_ladder.py --figures       only draw the figure again
    python 09_kernels/in_depth/bench_matmul_ladder.py --gpu --seconds 40    verify on the GPU, then time every rung
    python bench_matmul_ladder.py --gpu --dry --out DIR   the same program at tiny sizes on the CPU: no results

First every rung must be as exact as PyTorch's matmul, and fetch the predicted sectors; only then is anything
written. On a GPU each rung first runs in a process of its own. Then, at the timed shape, every element is
compared with float64, before and after timing. Times: CUDA events around one call, with a cold L2 cache;
cuBLAS runs after each call of the rung, and "of cuBLAS" is the ratio of two neighbours. The most valuable
rungs come first; rungs beyond --seconds are named and left out. Run `python _cuda.py --build` first to save
nvcc's time.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import _cuda
import matmul_ladder as ladder
import torch
from _bench_options import bench_options
from harness import predictions
from harness.ceilings import Table, copy_bandwidth, device_here, paired_seconds, quotient, timer
from harness.figures import COLOURS, GREY, write_figure
from harness.report import ratio_of, write_result
from matmul_ladder import GPUS, LADDER, RUNGS, TRITON, check_matmul, occupancy, rms_error, verify, within

COUNTED = (256, 256, 128)  # full tiles of every rung, and a full cluster
ARCH = "sm_90a"
# One iteration of a rung's main loop, by its machine code: loads from shared memory of 4 and of 16 bytes,
# FMAs, and the cycles of the loads. 32 lanes take one cycle, also if all ask for one address; 16 bytes per
# lane take 4 cycles of 8 lanes. In coarsened_2d two rows of As are on one bank, and 8 lanes read Bs from 16
# banks: both take twice as long.
SHARED = {
    "shared_tiles": (32, 8, 32, 32 + 8),
    "coarsened_1d": (8, 16, 64, 8 + 16),
    "coarsened_2d": (8, 2, 64, 8 * 2 + 2 * 8),
    "vectorised": (0, 4, 64, 4 * 4),
    "warp_tiles": (0, 32, 512, 32 * 4),
}
# A warp of mma_tiles: 6 ldmatrix of 512 bytes for 16 mma, each one cycle at the peak.
TENSOR_TURNS, TENSOR_CLOCKS = 6 * 4, 16
# NVIDIA H200 (SXM) datasheet: TFLOP/s without sparsity, and TB/s.
PEAK, BANDWIDTH = {torch.float32: 67.0, torch.bfloat16: 989.0}, 4.8
FIGURE, SWIZZLE = "09_kernels/figures/roofline.svg", "09_kernels/figures/swizzle.svg"
SWIZZLED = """
#include "ptx.h"
extern "C" const char* run_swizzled(int* places, void*) {
    for (int row = 0; row < 8; row++)
        for (int chunk = 0; chunk < 8; chunk++) places[row * 8 + chunk] = swizzled(row, chunk) % TILE_K / 8;
    return nullptr;
}
"""


def verify_all(device: str) -> None:
    """Exit unless every rung that runs on `device` is right."""
    for name in [*RUNGS, TRITON]:
        if name in RUNGS and device == "cuda" and not runs(name):
            continue
        where = "cuda" if name == TRITON and not ladder.INTERPRETED else device
        for size in ((139, 263, 333), (256, 256, 128)):
            ratio, same = verify(name, *size, where)
            if not within(ratio, 2) or not same:
                sys.exit(f"{name} at {size}: its error is {ratio} times PyTorch's; same bits in every order: {same}")


# The third exceeds the edge, in rows that the copy engine can write; the last has more tiles than a GPU has
# multiprocessors.
SIZES_ON_GPU = ((139, 263, 333), (256, 256, 128), (140, 264, 320), (2048, 4096, 512))
CHECK = """
import sys, matmul_ladder as ladder
for size in eval(sys.argv[2]):
    ratio, _ = ladder.verify(sys.argv[1], *size, "cuda")
    if not ladder.within(ratio, 2):
        sys.exit(f"at {size} its error is {ratio:.3g} times PyTorch's")
"""


def wrong_on_gpu(names: list[str], sizes: tuple[tuple[int, ...], ...] = SIZES_ON_GPU, limit: float = 60.0) -> dict:
    """Rung -> why it is not timed. Each runs in a process of its own, all in parallel: a hang or an invalid
    write does not affect the others."""
    if torch.version.cuda:  # built once for all, in parallel
        sources = sorted({_cuda.HERE / RUNGS[name].call[0] for name in names if name in RUNGS})
        _cuda.build_all(sources, _cuda.architecture(torch.cuda.get_device_capability()))
    pipes, here = dict(stderr=subprocess.PIPE, text=True), Path(ladder.__file__).parent
    children = {
        name: subprocess.Popen([sys.executable, "-c", CHECK, name, str(sizes)], cwd=here, **pipes) for name in names
    }
    wrong, until = {}, time.monotonic() + limit
    for name, child in children.items():
        try:
            _, said = child.communicate(timeout=max(1.0, until - time.monotonic()))
            if child.returncode:
                wrong[name] = (said.strip().splitlines() or [f"exit code {child.returncode}"])[-1][:120]
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a kernel that hangs may block its process
                child.communicate(timeout=5)
            wrong[name] = f"not done after {limit:.0f} s"
    return wrong


def runs(name: str) -> bool:
    x = torch.zeros(1, 1, dtype=RUNGS[name].dtype, device="cuda")
    try:
        check_matmul(x, x, name)
    except ValueError as why:
        print(f"not timed: {why}")
        return False
    return True


def draw_roofline(axes, result) -> None:
    columns = {name: i for i, name in enumerate(result["columns"])}
    for precision, color in (("float32", "tab:blue"), ("bfloat16", "tab:red")):
        rows = [row for row in result["rows"] if row[columns["precision"]] == precision]
        peak, bandwidth = rows[0][columns["peak, TFLOP/s"]], rows[0][columns["bandwidth, TB/s"]]
        ridge = peak / bandwidth
        axes.plot(
            [0.04, ridge, 2000], [0.04 * bandwidth, peak, peak], color=color, lw=1, label=f"{precision} on an H200"
        )
        placed = {}
        for row in rows:
            placed.setdefault(row[columns["FLOPs per byte"]], []).append(row[columns["rung"]])
        for i, (intensity, names) in enumerate(placed.items()):
            y = min(peak, bandwidth * intensity)
            axes.plot(intensity, y, "o", color=color, ms=4)
            # Names alternate below right and above left, so that neighbours do not overlap.
            place = (
                dict(xytext=(-4, 4), ha="right", va="bottom") if i % 2 else dict(xytext=(4, -3), ha="left", va="top")
            )
            label = "\n".join(names)
            axes.annotate(label, (intensity, y), textcoords="offset points", fontsize=7, **place)
        for row in rows:
            intensity, y = row[columns["FLOPs per byte"]], row[columns["by DRAM, TFLOP/s"]]
            if (
                row[columns["by shared memory, TFLOP/s"]] != "no bound"
                and row[columns["by shared memory, TFLOP/s"]] < y
            ):
                below = row[columns["by shared memory, TFLOP/s"]]
                axes.plot([intensity, intensity], [below, y], ":", color=color, lw=1)
                axes.plot(intensity, below, "v", color=color, ms=5)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte asked of global memory", ylabel="at most, TFLOP/s")
    axes.set_title("What each rung could reach if no cache helped it", fontsize=10)
    axes.plot([], [], "v", color="grey", ms=5, label="what shared memory allows, where that is less")
    axes.legend(loc="upper left", fontsize=8)


def write_swizzle(folder: Path | None) -> None:
    """The positions of the 16-byte chunks of 8 rows of a tile, by ptx.h."""
    with tempfile.TemporaryDirectory() as there:
        source = Path(there) / "swizzled.cu"
        source.write_text(SWIZZLED)
        places = torch.zeros(8, 8, dtype=torch.int32)
        _cuda.call(str(source), "run_swizzled", places)
    for way in (places, places.t()):  # chunks of a row must differ, and chunks of a column
        if not all(sorted(line) == list(range(8)) for line in way.tolist()):
            sys.exit(f"swizzled() puts two chunks into one place: {places.tolist()}")
    write_result(
        "09_swizzle",
        "The place of each 16-byte chunk in its row of 128 bytes, for 8 rows of a tile in bf16",
        ["row", *(f"chunk {chunk}" for chunk in range(8))],
        [[row, *places[row].tolist()] for row in range(8)],
        "By swizzled() of ptx.h, which follows Hopper's 128-byte swizzle.",
        folder,
    )


def draw_swizzle(axes, result) -> None:
    """Rows of a tile over the banks, stored plain and swizzled; one column of chunks in colour."""
    chosen = 2
    for panel, swizzled in zip(axes, (False, True), strict=True):
        for row, *places in result["rows"]:
            for chunk, place in enumerate(places if swizzled else range(8)):
                colour = COLOURS["activations"] if chunk == chosen else "none"
                panel.bar(place + 0.5, -1, 1, bottom=row + 1, color=colour, edgecolor=GREY, linewidth=0.5)
                ink = "black" if chunk == chosen else GREY
                panel.text(place + 0.5, row + 0.52, str(chunk), ha="center", va="center", fontsize=8, color=ink)
        title = "chunk c of row r at place c XOR r: 1 wavefront" if swizzled else "plain: a column takes 8 wavefronts"
        panel.set(title=title, xlim=(0, 8), ylim=(8, 0), xlabel="place in the row: four banks each")
        panel.set_xticks([place + 0.5 for place in range(8)], [f"{4 * p}-{4 * p + 3}" for p in range(8)], fontsize=8)
        panel.set_yticks([row + 0.5 for row in range(8)], range(8))
        panel.grid(False)
    axes[0].set_ylabel("row of the tile")


# L2 traffic of a block's tile. An H100 as published (sources: bench_matmul.py): multiprocessors,
# bytes per cycle from L2, cycles of a wgmma of 64 x 256 x 16 at the peak.
SMS, L2_BYTES, WGMMA_CLOCKS = 132, 5120, 128
STRIPES = {
    "tma_wgmma": None,
    "persistent": 8,
    "multicast": 8,
    "ping_pong": 16,
}  # None: row by row, in order of launch
TILES = """
#include "tiles.h"
extern "C" const char* run_tiles(int stripe, int count, int rows, int cols, int* row, int* col, void*) {
    for (int i = 0; i < count; i++)
        if (stripe == 8) tile_of<8>(i, rows, cols, row + i, col + i);
        else tile_of<16>(i, rows, cols, row + i, col + i);
    return nullptr;
}
"""


def tiles_in_order(stripe: int | None, rows: int, cols: int) -> torch.Tensor:
    """[rows · cols, 2]: row and column of each tile of C, in order of start."""
    index = torch.arange(rows * cols, dtype=torch.int32)
    if stripe is None:
        return torch.stack([index // cols, index % cols], 1)
    with tempfile.TemporaryDirectory() as there:
        source = Path(there) / "tiles.cu"
        source.write_text(TILES)
        row, col = torch.zeros_like(index), torch.zeros_like(index)
        _cuda.call(str(source), "run_tiles", stripe, rows * cols, rows, cols, row, col)
    if len((row * cols + col).unique()) != rows * cols:
        sys.exit(f"stripes of {stripe} leave out a tile of {rows} x {cols}")
    return torch.stack([row, col], 1)


def write_l2(folder: Path | None, size: int = 8192) -> None:
    """L2 requests per cycle of the rungs with wgmma, and how much of A and B is in use at once."""
    rows = []
    for name, stripe in STRIPES.items():
        rung = RUNGS[name]
        BM, BN = rung.tile
        asked = (BM + BN // rung.cluster) * 64 * 2  # per block, in a step of 64 along K
        clocks = BM // 64 * 4 * WGMMA_CLOCKS
        order = tiles_in_order(stripe, size // BM // rung.cluster, size // BN)
        # 128 rows and 256 columns are in flight per multiprocessor; in ping_pong as two tiles.
        wave = SMS * 128 * 256 // (BM * rung.cluster * BN)
        parts = [order[i : i + wave] for i in range(0, len(order), wave)]
        height, width = (
            [BM * rung.cluster * len(part[:, 0].unique()) for part in parts],
            [BN * len(part[:, 1].unique()) for part in parts],
        )
        needed = sum(h + w for h, w in zip(height, width, strict=True)) * size * 2
        rows.append(
            [
                *(f"{rung.number} {name}", f"{BM * rung.cluster} x {BN}", asked, clocks, round(SMS * asked / clocks)),
                round(PEAK[rung.dtype] * min(1.0, L2_BYTES * clocks / (SMS * asked))),
                *(f"{height[0]} + {width[0]}", round(needed / 1e9, 2)),
            ]
        )
    write_result(
        "09_l2",
        f"What the rungs with wgmma ask of L2 on an H100, and what of A and B they use at one time, at {size}³",
        [
            *("rung", "C of a block or cluster", "bytes a step asks of L2", "clocks of its products"),
            *("bytes a clock, all blocks", "TFLOP/s at L2's rate"),
            *("rows of A + of B in the first wave", "GB from HBM, if a wave fetches each once"),
        ],
        rows,
        f"Computed. A step: 64 along K, of one block. L2 gives {L2_BYTES} bytes a clock. A wave: the tiles that {SMS} "
        "multiprocessors have at one time, in the order of tile_of().",
        folder,
        computed=True,
    )


def by_shared_memory(rung, loops: dict) -> float | str:
    """TFLOP/s allowed by shared memory, one access per cycle. Exit if SHARED does not match."""
    if rung.name == "mma_tiles":
        return round(PEAK[rung.dtype] * TENSOR_CLOCKS / TENSOR_TURNS, 1)
    if rung.name not in SHARED:
        return "no bound"
    narrow, wide, fmas, turns = SHARED[rung.name]
    if loops:
        loop = loops[rung.name]
        if (loop.shared_loads - loop.wide_loads, loop.wide_loads, loop.fmas) != (narrow, wide, fmas):
            sys.exit(f"{rung.name}: {loop} in the machine code, not {(narrow, wide, fmas)}")
    return round(PEAK[rung.dtype] * min(1.0, fmas / 4 / turns), 1)  # 4 FMAs of 32 lanes per cycle


def predict_and_count(folder: Path | None) -> None:
    rows, roofline = [], []
    used, loops = {}, {}
    if shutil.which("nvcc"):
        with tempfile.TemporaryDirectory() as there:
            cubin = Path(there) / "ladder.cubin"
            used = _cuda.resources("matmul_ladder.cu", ARCH, cubin)
            for source in sorted({rung.call[0] for rung in LADDER} - {"matmul_ladder.cu"}):
                used |= _cuda.resources(source, ARCH)
            code = _cuda.disassembled(cubin)
        loops = {name: _cuda.multiplying_loop(code[name]) for name in SHARED}
        if framed := [name for name, mine in used.items() if mine.stack]:
            sys.exit(f"{', '.join(framed)}: numbers lie in local memory")
    for rung in LADDER:
        counted, predicted = ladder.count(rung, *COUNTED), rung.load_sectors(*COUNTED)
        turns = counted.bank_turns / counted.bank_turns_least if counted.bank_turns_least else 1.0
        if counted.load_sectors != predicted or turns != rung.bank_turns:
            sys.exit(
                f"{rung.name}: {counted.load_sectors} sectors, not {predicted}; {turns} turns, not {rung.bank_turns}"
            )
        precision = str(rung.dtype).removeprefix("torch.")
        takes: list = ["n/a"] * 3
        if used:
            mine = used[rung.name]
            share = occupancy(mine, rung.threads, GPUS[ARCH], rung.dynamic_shared)
            takes = [mine.registers, mine.shared + rung.dynamic_shared, f"{share:.0%}"]
        banks = f"{turns:.0f}" if counted.bank_turns_least else "none used"
        rows.append([f"{rung.number} {rung.name}", precision, predicted, counted.load_sectors, banks, *takes])
        intensity = rung.intensity(*COUNTED)
        peak = PEAK[rung.dtype]
        roofline.append(
            [
                *(rung.name, precision, round(intensity, 3), round(min(peak, BANDWIDTH * intensity), 2)),
                *(by_shared_memory(rung, loops), peak, BANDWIDTH),
            ]
        )
    write_result(
        "09_matmul",
        f"The ladder at {' x '.join(map(str, COUNTED))}: what it asks of memory, and takes of a multiprocessor",
        [
            "rung",
            "precision",
            "sectors predicted",
            "counted",
            "wavefronts per shared load, in the source",
            "registers",
            "shared bytes",
            "occupancy",
        ],
        rows,
        f"Sectors of 32 bytes. Registers, shared memory: nvcc for {ARCH}; no kernel has a stack frame. Not timed.",
        folder,
    )
    write_result(
        "09_roofline",
        "The most that each rung could reach on an H200: if all bytes came from DRAM, and by its shared loads",
        [
            *("rung", "precision", "FLOPs per byte", "by DRAM, TFLOP/s", "by shared memory, TFLOP/s"),
            *("peak, TFLOP/s", "bandwidth, TB/s"),
        ],
        roofline,
        "Computed from the formulas and NVIDIA's datasheet of the H200; caches raise the first bound. The second: 128 "
        "bytes a clock, for the loads in the machine code.",
        folder,
        computed=True,
    )


# --------------------------------------------------------------------------------------------------------- on a GPU


def copied(dry: bool, repeats: int = 20) -> float:
    """Bytes per second, read and written, of a large copy: the limit of a memory-bound kernel."""
    return copy_bandwidth(device_here(), 2**16 if dry else 2**30, 2 if dry else repeats).median


def timed(dry: bool, repeats: int) -> Callable[[Callable[[], object]], float]:
    """A function that measures the seconds of a call: the median, with a cold L2 cache."""
    clock = timer(device_here(), 2 if dry else repeats)
    return lambda run: clock(run).median


@dataclass(frozen=True)
class Problem:
    """A timed matmul, and its expected result."""

    a: torch.Tensor  # [M, K]
    b: torch.Tensor  # [K, N]
    want: torch.Tensor  # in float64
    error: float  # of PyTorch's matmul in the same precision

    def objection(self, out: torch.Tensor) -> str:
        """The error of this product; "" if none. Every element counts, and NaN is an error."""
        ratio = rms_error(out, self.want) / self.error
        if not within(ratio, 2):
            return f"its error is {ratio:.3g} times that of torch.mm"
        size = float(self.want.square().mean().sqrt())
        worst = float(((out.double() - self.want).abs() / (self.want.abs() + size)).max())
        limit = 2**-8 if out.dtype == torch.bfloat16 else 1e-4  # one wrong element hardly changes a mean of millions
        return "" if within(worst, limit) else f"an element is off by {worst:.2g} of it, and {limit:.2g} is allowed"


def problem(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Problem:
    """Random values: with zeros a GPU draws less power and clocks higher than in training."""
    M, N, K = shape
    generator = torch.Generator(device).manual_seed(sum(shape))
    a, b = (torch.randn(rows, K, device=device, generator=generator).to(dtype) for rows in (M, N))
    b = b.t().contiguous() if dtype == torch.float32 else b.t()  # bf16: as F.linear passes its weight
    return Problem(a, b, *ladder.reference(a, b))


def to_time(dry: bool) -> list[tuple[str, torch.dtype, tuple[int, int, int]]]:
    """Rung, precision and M, N, K, the most valuable first, in case of an early end."""
    large, short, fp32 = (8192, 8192, 8192), (8192, 8192, 1024), (4096, 4096, 4096)
    if dry:
        large, short, fp32 = (256, 256, 256), (256, 256, 64), (128, 128, 128)
    chosen = []
    for name in ("multicast", "ping_pong", "persistent", "tma_wgmma", "mma_tiles"):
        chosen += [(name, torch.bfloat16, shape) for shape in (large, short)]
    slow = [rung.name for rung in LADDER[::-1] if rung.dtype == torch.float32]
    chosen += [(name, torch.float32, fp32) for name in (*slow, TRITON)]
    chosen.insert(6, chosen.pop(10))  # the last rung in fp32 before the first ones in bf16
    return chosen


def time_ladder(dry: bool, folder: Path | None, limit: float) -> None:
    """Times every correct rung, for `limit` seconds; exit code 1 if one is wrong."""
    end = time.monotonic() + limit
    if dry:
        verify_all(device_here().type)
    tried = ["naive"] if dry else [name for name in RUNGS if runs(name)] + [TRITON]
    wrong = wrong_on_gpu(tried, SIZES_ON_GPU[:1] if dry else SIZES_ON_GPU, max(20.0, limit / 2))
    device, gpu = device_here(), predictions.here()
    torch.backends.cuda.matmul.allow_tf32 = False  # cuBLAS in fp32 must not use TF32
    table = Table(
        "09_matmul_gpu",
        "The ladder, timed",
        [
            *("rung", "precision", "shape", "TFLOP/s", "cuBLAS beside it, TFLOP/s", "of cuBLAS"),
            *(*predictions.COLUMNS, "the prediction is refuted by"),
        ],
        "Shape: M x N x K. Medians of 20 calls, fewer if they are slow, each with a cold L2 cache; cuBLAS (torch.mm) "
        "after each, and their ratio with quartiles. TF32 off. A copy of a large tensor moves "
        f"{copied(dry) / 1e12:.3g} TB/s. Predicted from the SASS of each rung, and from what it asks of L2.",
        folder,
    )
    problems: dict[tuple, Problem] = {}
    for name, dtype, shape in to_time(dry):
        if name in RUNGS and device.type == "cuda" and not runs(name):
            continue
        cells = [name, str(dtype).removeprefix("torch."), " x ".join(map(str, shape))]
        if name not in wrong and end - time.monotonic() < 2 and table.rows:
            table.add(*cells, f"left out: less than 2 of {limit:.0f} s are left", *["-"] * 5)
            continue
        if name not in wrong:
            if (shape, dtype) not in problems:
                problems[shape, dtype] = problem(shape, dtype, device)
            rows = time_rung(name, problems[shape, dtype], 2 if dry else 20, device)
            if isinstance(rows, str):
                wrong[name] = f"at {cells[2]} {rows}"
        if name in wrong:
            table.add(*cells, f"left out: {wrong[name]}", *["-"] * 5)
            continue
        ours, cublas = rows["rung"], rows["cuBLAS"]
        took, theirs = ratio_of(ours).median, ratio_of(cublas).median
        pairs = quotient(cublas, ours)
        work = 2e-12 * shape[0] * shape[1] * shape[2]
        expected = predictions.cells(predictions.ladder(gpu, name, *shape), took)
        table.add(*cells, work / took, work / theirs, pairs, *expected, predictions.refuted(name))
    if wrong:
        sys.exit("; ".join(f"{name}: {why}" for name, why in wrong.items()))


def time_rung(name: str, given: Problem, repeats: int, device: torch.device) -> dict[str, list[float]] | str:
    """Seconds of each call of the rung and of cuBLAS, alternating; or the error of the rung."""
    out = given.a.new_full(given.want.shape, float("nan"))
    theirs = torch.empty_like(out)

    def run() -> None:
        ladder.matmul(given.a, given.b, name, out=out)

    run()
    if why := given.objection(out):
        return why
    first = out.clone()
    start = time.monotonic()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    repeats = max(min(repeats, 5), min(repeats, int(1.5 / max(1e-6, time.monotonic() - start))))
    runs = {"rung": run, "cuBLAS": lambda: torch.mm(given.a, given.b, out=theirs)}
    seconds = paired_seconds(device, runs, repeats)
    if not torch.equal(out, first):
        return "its last call has another result than its first"
    return seconds


def main() -> None:
    about = "Predict, count and time the ladder of matrix products."
    options = bench_options(about, "--gpu", "--dry", "--out", "--figures", "--seconds", counts_into_out=True)
    if not options.figures:
        if options.gpu:
            time_ladder(options.dry, options.out, options.seconds)
            return
        verify_all("cpu")
        predict_and_count(options.out)
        write_swizzle(options.out)
        write_l2(options.out)
    if not options.out:
        write_figure(FIGURE, ["09_roofline"], draw_roofline, size=(7.0, 4.4))
        write_figure(SWIZZLE, ["09_swizzle"], draw_swizzle, shape=(1, 2), size=(9.0, 3.2))


if __name__ == "__main__":
    main()
