"""The kernels of matmul.cu: what they ask of each memory, counted; and their machine code, beside in_depth's rungs.

    python 09_kernels/bench_matmul.py              any machine: verify, count, write results and figures; no speed
    python 09_kernels/bench_matmul.py --gpu        on a GPU: build with nvcc, verify, time
    python 09_kernels/bench_matmul.py --figures    only draw, from what results/ has

First the program must print PASS, and its kernels must be as exact as torch's matmul in four orders of their threads,
equal in_depth's to the bit, and load as many sectors as the formulas say. Only then is anything written. Sectors and
wavefronts are counted on the CPU (cuda_on_cpu.h), instructions in the machine code that nvcc makes for an H100.

--gpu [--seconds S] times the kernels, alternating with torch.mm, and compares every element of what was timed with
float64; then the program itself must print PASS. --gpu --dry --out DIR does the same on the CPU, without results.
"""

import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import _cuda
import bench_matmul_ladder
import matmul_ladder
import torch
from _bench_options import bench_options
from _cuda import FORWARD, REVERSE, call, multiplying_loop, racing
from _plain_cuda import for_cpu
from harness import predictions
from harness.ceilings import Table, device_here, paired_seconds, quotient
from harness.figures import COLOURS, GREY, write_figure
from harness.report import ratio_of, write_result

PROGRAM = Path(__file__).resolve().with_name("matmul.cu")
KERNELS = {"naive": 1, "coalesced": 2, "shared_tiles": 3, "register_tiles": 4}
COUNTED = (128, 256, 64)
FIGURES = "09_kernels/figures"
LABEL = 10  # points; at the width of a README they are 9 pixels or more
MATMUL = """
extern "C" const char* run_matmul(int kernel, int M, int N, int K, const float* A, const float* B, float* C, void*) {
    matmul(kernel, M, N, K, A, B, C);  // in the default stream, which is also PyTorch's
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
"""
INSIDE = (
    MATMUL
    + """
extern "C" const char* run_elements(int* rows, int* cols, int* stores, void*) {
    for (int t = 0; t < THREADS; t++) {
        for (int i = 0; i < 8; i++) rows[8 * t + i] = thread_row(t, i), cols[8 * t + i] = thread_col(t, i);
        stores[t] = t % BK * AS_STRIDE + t / BK;  // where a thread stores its first element of A
    }
    return nullptr;
}
"""
)

# ------------------------------------------------------------------------------------------- an H100 by its data sheet

# NVIDIA H100 SXM: data sheet (TFLOP/s, HBM), white paper (multiprocessors, sizes), CUDA programming guide (32 banks of
# 4 bytes per cycle; 128 FMAs per cycle, each of which reads three registers). L2's bytes per cycle and the latencies in
# cycles: table 3 of doi.org/10.1016/j.ultsonch.2023.106546. TB/s at the 1.755 GHz of that table; HBM's: data sheet.
CLOCK, SMS, PEAK, DRAM = 1.755e9, 132, 66.9, 3.35
HIERARCHY = [  # name, visible to, how many there are, bytes of one, bytes per cycle of one, latency in cycles
    ["registers", "one thread (at most 255)", SMS, 256 * 1024, 128 * 3 * 4, 0],
    ["shared memory", "one block", SMS, 228 * 1024, 32 * 4, 20],
    ["L2 cache", "all threads", 1, 50e6, 5120, 200],
    ["HBM (global memory)", "all threads", 1, 80e9, DRAM * 1e12 / CLOCK, 400],
]


def write_hierarchy() -> None:
    rows = [
        [name, scope, n, round(size), round(n * size), n * per_clock * CLOCK / 1e12, latency]
        for name, scope, n, size, per_clock, latency in HIERARCHY
    ]
    write_result(
        "09_hierarchy",
        "The memories of an H100 (SXM), by its data sheet",
        ["memory", "visible to", "how many", "bytes of one", "bytes of all", "TB/s of all", "latency, cycles"],
        rows,
        f"{SMS} SMs at {CLOCK / 1e9} GHz. NVIDIA's data sheet, white paper and programming guide; L2's speed "
        "and the latencies: doi 10.1016/j.ultsonch.2023.106546, table 3. Registers: what 128 FMAs per cycle read. The "
        "data sheet's peaks, 66.9 TFLOP/s in fp32 and 989 in bf16, are at higher clocks: 1.98 and 1.83 GHz.",
        computed=True,
    )


# ---------------------------------------------------------------------------------------------------------- the kernels


def build(on_gpu: bool) -> Path:
    """The program, built. On a GPU `python in_depth/_cuda.py --build` has usually done that before."""
    if on_gpu:
        return _cuda.program_file(PROGRAM, _cuda.architecture(torch.cuda.get_device_capability()))
    return _cuda.program_file(for_cpu(PROGRAM), "cpu")


def passing_rows(program: Path, seconds: float = 500) -> Iterator[list[str]]:
    """The words of each line that the program prints, as it prints it; ends this program unless the last is PASS."""
    line = ""
    with subprocess.Popen([str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        clock = threading.Timer(seconds, running.kill)
        clock.daemon = True  # a caller that stops reading does not wait for it
        clock.start()
        for line in running.stdout or ():
            yield line.split()
        clock.cancel()
    if running.returncode != 0 or line.strip() != "PASS":
        sys.exit(f"matmul: {line.strip()} (exit code {running.returncode})")


def run_kernel(inside: str, kernel: str, a, b, order: int = FORWARD, counting: bool = False):
    c = torch.full((a.shape[0], b.shape[1]), float("nan"))
    sizes = a.shape[0], b.shape[1], a.shape[1]
    counters = call(inside, "run_matmul", KERNELS[kernel], *sizes, a, b, c, order=order, counting=counting)
    return counters if counting else c


def verify(inside: str) -> None:
    """Ends the program unless every kernel is right."""
    list(passing_rows(build(on_gpu=False)))
    for kernel in KERNELS:
        a, b = matmul_ladder.random_inputs(139, 130, 77, torch.float32, "cpu")
        results = [run_kernel(inside, kernel, a, b, order) for order in (FORWARD, REVERSE, 7, racing(7))]
        error = matmul_ladder.error_ratio(results[0], a, b)
        rung = matmul_ladder.matmul(a, b, kernel.replace("register_tiles", "coarsened_2d"))
        if not error <= 2 or not all(torch.equal(rung, result) for result in results):
            sys.exit(f"{kernel}: its error is {error} times that of torch's matmul, or an order of threads changes it")


def loops_of(source: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "out.cubin"
        used = _cuda.resources(source, "sm_90a", cubin)
        codes = _cuda.disassembled(cubin)
    return {name: (multiplying_loop(code), used[name]) for name, code in codes.items() if "FFMA" in code}


def count(inside: str) -> None:
    M, N, K = COUNTED
    found = loops_of(str(PROGRAM)) | {f"in_depth: {n}": x for n, x in loops_of("matmul_ladder.cu").items()}
    per_fma = {"naive": 33, "coalesced": 5}  # sectors for 32 FMAs of a warp
    tile = {"shared_tiles": 32, "register_tiles": 128}
    rows = []
    for kernel in KERNELS:
        got = run_kernel(inside, kernel, torch.randn(M, K), torch.randn(K, N), counting=True)
        asked = M * N * K / 32 * per_fma[kernel] if kernel in per_fma else M * N * K * 2 / tile[kernel] / 8
        if got.load_sectors != asked or got.bank_turns != got.bank_turns_least:
            sys.exit(f"{kernel}: {got.load_sectors} sectors, not {asked}, or conflicts between banks")
        loop, used = found[kernel]
        # Cycles in which a multiprocessor's memory (128 bytes per cycle: 4 sectors, or 1 wavefront) serves the 32 FMAs
        # of one instruction; the FMA units need a quarter of a cycle for them. A load takes at least a cycle.
        cycles = loop.per_fma() if kernel in tile else {"naive": 32 / 4 + 1, "coalesced": 1 + 1}[kernel]
        intensity = 2 * M * N * K / (got.load_sectors * 32)
        blocks = 65536 // (-(-used.registers // 8) * 8 * (256 if kernel == "register_tiles" else 1024))
        dram, shared = min(PEAK, DRAM * intensity), PEAK / max(1, 4 * cycles)
        rows.append(
            [
                *(kernel, round(asked), got.load_sectors, round(intensity, 3), f"{loop.shared_loads} / {loop.fmas}"),
                *(used.registers, blocks, round(dram, 2), round(shared, 1)),
            ]
        )
    write_result(
        "09_ground",
        f"The kernels of matmul.cu at {M} x {N} x {K}: what they load, and what that allows on an H100",
        [
            *("kernel", "sectors by formula", "counted", "FLOPs per byte", "shared loads / FMAs", "registers"),
            *("blocks that fit", "TFLOP/s, bound by HBM", "TFLOP/s, bound by the nearer memory"),
        ],
        rows,
        "Sectors of 32 bytes that loads ask for. Shared loads and FMAs: of a thread, in the machine code for sm_90. "
        f"Blocks: on a multiprocessor, by registers. Bounds: HBM with {DRAM} TB/s, without caches; "
        "L1 or shared memory with 128 bytes (4 sectors) per cycle in each multiprocessor, at least a cycle per load; "
        f"at most {PEAK} TFLOP/s. Computed, not timed.",
    )
    rows = []
    for name, (loop, used) in found.items():
        loads = f"{loop.shared_loads - loop.wide_loads} + {loop.wide_loads}" if loop.shared_loads else "none"
        rows.append([name, loop.fmas, loads, loop.global_loads, loop.instructions, used.registers, used.stack])
    write_result(
        "09_sass",
        "One iteration of the innermost loop in machine code for sm_90: matmul.cu, and the fp32 rungs in depth",
        [
            "kernel",
            "FMAs",
            "shared loads: of 4 + of 16 bytes",
            "global loads",
            "instructions",
            "registers",
            "stack bytes",
        ],
        rows,
        "One thread. The compiler unrolls loops, and merges neighbouring loads into wider ones.",
    )


def write_places(inside: str) -> None:
    """Which elements of the tile each thread of register_tiles owns, by the program's own functions."""
    rows, cols = torch.zeros(256, 8, dtype=torch.int32), torch.zeros(256, 8, dtype=torch.int32)
    stores = torch.zeros(256, dtype=torch.int32)
    call(inside, "run_elements", rows, cols, stores)
    if len((rows[:, :, None] * 128 + cols[:, None, :]).unique()) != 128 * 128:
        sys.exit("register_tiles: not every element of the tile has an owner")
    places = [
        [t, int(r[0]), int(r[1] - r[0]), int(c[0]), int(c[1] - c[0])]
        for t in range(256)
        for r, c in [(rows[t], cols[t])]
    ]
    columns = ["thread", "first row", "row step", "first column", "column step"]
    write_result("09_places", "register_tiles: which 8 x 8 elements of the tile a thread owns", columns, places)
    addresses = {
        "load a[0]": rows[:32, 0],
        "load b[0]": cols[:32, 0],
        "store As": stores[:32],
        "store As without padding": torch.tensor([lane % 8 * 128 + lane // 8 for lane in range(32)]),
    }
    write_result(
        "09_banks",
        "register_tiles, at k = 0: the address in As or Bs, in floats, that each lane of warp 0 accesses",
        ["access", *(f"lane {lane}" for lane in range(32))],
        [[access, *asked.tolist()] for access, asked in addresses.items()],
        "The bank of an address is its remainder by 32.",
    )


def time_on_gpu(dry: bool, folder: Path | None, limit: float) -> None:
    """The kernels on this GPU beside torch.mm and the prediction; then the program, which must pass."""
    end = time.monotonic() + limit
    gpu, device = predictions.here(), device_here()
    on_gpu = device.type == "cuda" and torch.version.cuda is not None
    inside = _cuda.program_inside(PROGRAM if on_gpu else for_cpu(PROGRAM), MATMUL, on_gpu=on_gpu)
    size = 128 if dry else 4096
    given = bench_matmul_ladder.problem((size, size, size), torch.float32, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    table = Table(
        "09_ground_gpu",
        f"matmul.cu at {size} x {size} x {size}, timed",
        [
            *("kernel", "TFLOP/s", "torch.mm (cuBLAS) beside it, TFLOP/s", "of torch.mm"),
            *(*predictions.COLUMNS, "the prediction is refuted by"),
        ],
        "fp32 without TF32. Medians of 20 calls with a cold L2 cache, torch.mm after each call, and their ratio with "
        "quartiles. Every element of the result is compared with float64, before and after.",
        folder,
    )
    wrong = []
    for kernel, number in reversed(KERNELS.items()):  # the fastest first; naive takes longest
        out = torch.full((size, size), float("nan"), device=device)
        theirs = torch.empty_like(out)

        def run(out=out, number=number) -> None:
            call(inside, "run_matmul", number, size, size, size, given.a, given.b, out)

        run()
        if why := given.objection(out):
            wrong.append(f"{kernel} at {size} cubed: {why}")
            table.add(kernel, f"left out: {why}", *["-"] * 5)
            continue
        first = out.clone()
        runs = {"ours": run, "theirs": lambda theirs=theirs: torch.mm(given.a, given.b, out=theirs)}
        seconds = paired_seconds(device, runs, 2 if dry else 20)
        if not torch.equal(out, first):
            wrong.append(f"{kernel} at {size} cubed: its last call has another result than its first")
            continue
        took, beside = (ratio_of(seconds[name]).median for name in ("ours", "theirs"))
        pairs = quotient(seconds["theirs"], seconds["ours"])
        cells = predictions.cells(predictions.ladder(gpu, kernel, size, size, size), took)
        rates = (2e-12 * size**3 / each for each in (took, beside))
        table.add(kernel, *rates, pairs, *cells, predictions.refuted(kernel))
    left = end - time.monotonic()
    if left < 3:
        print(f"matmul, the program: not run, {max(0.0, left):.0f} of {limit:.0f} s are left")
    else:
        for words in passing_rows(build(on_gpu), left):
            print("matmul:", *words, flush=True)
    if wrong:
        sys.exit("; ".join(wrong))


# -------------------------------------------------------------------------------------------------------------- figures


def human(n: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if n >= size:
            return f"{n / size:.0f} {unit}"
    return f"{n / 1024:.0f} KB"


def draw_gpu(axes, result) -> None:
    """The parts of a GPU as boxes, with the sizes and speeds of the result."""
    from matplotlib.patches import Rectangle

    def box(x, y, width, height, words, colour=GREY, alpha=0.3, at=0.5, fontsize=9):
        axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, alpha=alpha, linewidth=0))
        axes.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=GREY, linewidth=0.8))
        axes.text(x + width / 2, y + height * at, words, ha="center", va="center", fontsize=fontsize)

    def link(x, y0, y1, speed, words):
        """As wide as its bandwidth, on a logarithmic scale."""
        width = 1.5 * math.log2(speed)
        axes.plot([x, x], [y0, y1], color=COLOURS["messages"], linewidth=width, solid_capstyle="butt")
        axes.text(x + 2, (y0 + y1) / 2, words, ha="left", va="center", fontsize=9.5)

    registers, shared, l2, hbm = result["rows"]
    for x, n in ((2, 1), (52, registers[2])):
        title = f"multiprocessor (SM) {n}: up to 64 warps of 32 lanes, in blocks"
        box(x, 36, 46, 62, title, alpha=0.06, at=0.95)
        for part in range(4):
            words = "32 FMA units\n1 tensor core"
            box(x + 1.5 + 10.9 * part, 79, 10.2, 11, words, COLOURS["compute"], fontsize=9)
        link(x + 8, 69, 79, registers[5], f"{registers[5]:.0f} TB/s in all SMs")
        words = f"registers {human(registers[3])}: divided among the threads"
        box(x + 1.5, 60, 43, 9, words, COLOURS["activations"])
        link(x + 8, 50, 60, shared[5], f"{shared[5]:.0f} TB/s in all SMs, {shared[6]} cycles")
        words = f"shared memory {human(shared[3])}: divided among the blocks"
        box(x + 1.5, 41, 43, 9, words, COLOURS["weights"])
        link(x + 8, 28, 36, l2[5], f"{l2[5]:.1f} TB/s to all SMs together, {l2[6]} cycles" if n == 1 else "")
    axes.text(50, 65, "...", ha="center", va="center", fontsize=14)
    box(2, 19, 96, 9, f"L2 cache {human(l2[3])}: shared by all multiprocessors", COLOURS["optimizer"])
    link(10, 10, 19, hbm[5], f"{hbm[5]:.2f} TB/s, {hbm[6]} cycles")
    words = f"HBM {human(hbm[3])}: global memory, where every tensor is stored"
    box(2, 1, 96, 9, words, COLOURS["gradients"])
    axes.set(xlim=(0, 100), ylim=(0, 100), xticks=[], yticks=[])
    axes.axis("off")


def draw_tile(axes, places, banks) -> None:
    """The tile of a block by warps, the first elements of warp 0 by lanes, and the banks that warp 0 accesses."""
    from matplotlib.patches import Rectangle

    owner = torch.zeros(128, 128, dtype=torch.long)
    for t, row, down, col, right in places["rows"]:
        owner[row : row + 8 * down : down, col : col + 8 * right : right] = t
    left, middle, bottom = axes
    warps = owner // 32
    left.imshow(warps % 2 + warps // 2 % 2 == 1, cmap="Greys", alpha=0.15, extent=(0, 128, 128, 0))
    for warp in range(8):
        rows, cols = (warps == warp).nonzero().T
        centre = cols.double().mean().item() + 0.5, rows.double().mean().item() + 0.5
        left.text(*centre, f"warp {warp}", ha="center", va="center", fontsize=LABEL)
        edge = COLOURS["compute"] if warp == 0 else GREY
        corner = int(cols.min()), int(rows.min())
        size = int(cols.max() - cols.min()) + 1, int(rows.max() - rows.min()) + 1
        left.add_patch(Rectangle(corner, *size, facecolor="none", edgecolor=edge, linewidth=3 if warp == 0 else 1))
    left.set(xticks=range(0, 129, 64), yticks=range(0, 129, 32))
    left.set_title("a block: 128 x 128 of C", fontsize=LABEL)
    rows, cols = (warps == 0).nonzero().T
    corner = owner[int(rows.min()) :, int(cols.min()) :][:8, :16]  # the pattern repeats
    lane = 13
    for r in range(8):
        for c in range(16):
            colour = COLOURS["compute"] if corner[r, c] == lane else "none"
            middle.add_patch(Rectangle((c, r), 1, 1, facecolor=colour, alpha=0.7, edgecolor=GREY, lw=0.4))
            if r < 4 and c < 8:  # each lane once
                ink = "black" if corner[r, c] == lane else GREY
                middle.text(c + 0.5, r + 0.52, int(corner[r, c]), ha="center", va="center", fontsize=9, color=ink)
    for at in range(0, 17, 4):
        middle.plot([0, 16], [at, at], color=GREY, lw=1.6)
        middle.plot([at, at], [0, 8], color=GREY, lw=1.6 if at % 8 == 0 else 0)
    middle.set(xlim=(0, 16), ylim=(8, 0), xticks=range(0, 17, 8), yticks=range(0, 9, 4))
    middle.set_title(f"of warp 0, by lane; blue: lane {lane}", fontsize=LABEL)
    for y, (access, *asked) in enumerate(banks["rows"]):
        waits = [len({address for address in asked if address % 32 == bank}) for bank in range(32)]
        for bank, wavefronts in enumerate(waits):
            colour = COLOURS["gradients"] if wavefronts > 1 else COLOURS["weights"] if wavefronts else "none"
            bottom.add_patch(Rectangle((bank, y), 1, 0.45, facecolor=colour, alpha=0.6, edgecolor=GREY, lw=0.4))
        words = f"{access}: {max(waits)} wavefront{'s' * (max(waits) > 1)}"
        bottom.text(0, y - 0.08, words, ha="left", va="bottom", fontsize=LABEL)
    bottom.set(xlim=(0, 32), ylim=(len(banks["rows"]) - 0.4, -0.5), xticks=range(0, 33, 8), yticks=[])
    bottom.set_title("banks that warp 0 accesses", fontsize=LABEL)
    for panel in axes:
        panel.grid(False)
        panel.tick_params(labelsize=LABEL)


def figures() -> None:
    write_figure(f"{FIGURES}/gpu.svg", ["09_hierarchy"], draw_gpu, size=(10, 6.2))
    write_figure(f"{FIGURES}/register_tile.svg", ["09_places", "09_banks"], draw_tile, shape=(1, 3), size=(10.5, 3.6))


def main() -> None:
    about = "Verify matmul.cu, count what it asks for, draw it."
    options = bench_options(about, "--gpu", "--dry", "--out", "--figures", "--seconds")
    if options.gpu:
        time_on_gpu(options.dry, options.out, options.seconds)
        return
    if not options.figures:
        if not shutil.which("nvcc"):
            sys.exit("bench_matmul.py: instructions are counted in what nvcc compiles, and nvcc is not on the PATH")
        inside = _cuda.program_inside(for_cpu(PROGRAM), INSIDE)
        verify(inside)
        write_hierarchy()
        count(inside)
        write_places(inside)
    figures()


if __name__ == "__main__":
    main()
