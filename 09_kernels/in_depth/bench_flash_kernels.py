"""FlashAttention in Triton: what the compiler makes of it, how exact it is, and, on a GPU, how fast.

    python 09_kernels/in_depth/bench_flash_kernels.py                      errors, and the binaries for sm_80 and sm_90
    python bench_flash_kernels.py --gpu [--out DIR]   on a GPU: against PyTorch's flash and cuDNN kernels
    python 09_kernels/in_depth/bench_flash_kernels.py --gpu --dry --out DIR    the same program on the CPU, tiny

Every version and every size of tile first has to agree with the definition in float64; one that does not, or does not
compile, is left out with a line that says so, and the default plan has to pass or nothing is written. On a GPU times
are from events, each run after the L2 cache has been filled with something else, medians of many.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _bench_options import bench_options
from _flash_launch import Plan, Tiles, plan_of
from _interpreter import INTERPRETED
from flash_attention_hopper import TILES, specialised_forward
from flash_kernels import REPEATABLE, TRITON, triton_backward, triton_forward
from flash_tiles import Version, explicit_attention, step, torch_attention
from flash_tiles import error as error_of
from harness import predictions
from harness.ceilings import Table, device_here, timer
from harness.report import ROOT, write_result
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).resolve().parent
DEVICE = device_here().type
SHAPES = [("float16", "64"), ("float16", "128"), ("bfloat16", "256"), ("float32", "64"), ("float32", "128")]

# What else may be fastest: tried by --gpu, after the plan's own.
FORWARD = [Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 3)]
SPECIALISED_TILES = [Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 3)]
DKDV = [Tiles(32, 128, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 128, 8, 1), Tiles(64, 128, 8, 3)]
SEVEN = "backward, seven products"


def inputs(B: int, S: int, N: int, N_kv: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(S)
    shapes = [(B, S, heads, D) for heads in (N, N_kv, N_kv, N)]
    return [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes]


def errors(version: Version, dtype: torch.dtype, D: int, S: int) -> tuple[float, float]:
    """Ours and PyTorch's, against float64: the worst of a causal mask, a window, and no mask with no ragged tile."""
    found = []
    whole = S // 128 * 128 or 64
    for length, causal, window in ((S, True, None), (S, True, S // 3), (whole, False, None)):
        mask = dict(causal=causal, window=window, offset=0)
        given = inputs(2, length, 4, 2, D, dtype)
        q, k, v, dout = given
        want = step(lambda q, k, v, mask=mask: explicit_attention(q, k, v, **mask), *(x.double() for x in given))
        theirs = step(lambda q, k, v, mask=mask: torch_attention(q, k, v, **mask), *given)
        out, lse = version.forward(q, k, v, **mask, dtype=dtype)
        got = [out, *version.backward(dout, q, k, v, out, lse, **mask, dtype=dtype)]
        found.append((error_of(got, want), error_of(theirs, want)))
    return max(found) if all(e == e for e, _ in found) else (float("nan"), 0.0)


def exact(version: Version, dtype: torch.dtype, D: int, S: int) -> tuple[float, float]:
    """The same; SystemExit unless ours is at most twice PyTorch's, or a few roundings."""
    ours, theirs = errors(version, dtype, D, S)
    floor = (8 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps
    if not ours <= max(2 * theirs, floor):
        sys.exit(f"head dim {D}, {dtype}: off by {ours:.1e}, PyTorch by {theirs:.1e}; nothing is measured")
    return ours, theirs


ERROR_COLUMNS = ["dtype", "head dim", "ours", "PyTorch's on this CPU", "ratio"]
BINARY_COLUMNS = ["kernel", "GPU", "dtype", "head dim", "warps", "registers", "spilled bytes", "shared KiB"]
BINARY_COLUMNS += ["products", "loads"]


def error_rows(version: Version) -> list[list]:
    rows = []
    for dtype in (torch.float32, torch.float16):
        for D in (32, 64):
            ours, theirs = exact(version, dtype, D, 70)
            rows.append([str(dtype)[6:], D, f"{ours:.1e}", f"{theirs:.1e}", f"{ours / theirs:.2f}"])
    return rows


def binary_rows(capability: int, shapes: list[tuple[str, str]], *which: str) -> list[list]:
    """What `_flash_compile.py` reads from the binaries, in the order of BINARY_COLUMNS."""
    words = [str(capability), *(word for shape in shapes for word in shape), *which]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, HERE / "_flash_compile.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode:
        sys.exit(f"sm_{capability}: {done.stderr.strip().splitlines()[-1]}")
    rows = []
    for b in (json.loads(line) for line in done.stdout.splitlines()):
        row = [b["kernel"], f"sm_{capability}", b["dtype"], b["D"], b["warps"], b["registers"], b["spilled"]]
        row += [f"{b['shared'] / 1024:.0f} of {b['shared_limit'] // 1024}"]
        row += ["wgmma" if b["wgmma"] else "mma" if b["mma"] else "fma", "TMA" if b["tma"] else "addresses"]
        rows.append(row)
    return rows


def cpu() -> None:
    """Two tables that need no GPU: errors in the interpreter, and the compiled kernels."""
    rows = error_rows(TRITON)
    binaries = [row for sm in (80, 90) for row in binary_rows(sm, SHAPES, "--but", "specialised") if row[0] != "delta"]
    if spilled := [" ".join(map(str, row[:4])) for row in binaries if row[BINARY_COLUMNS.index("spilled bytes")]]:
        sys.exit(f"{', '.join(spilled)}: numbers lie in local memory")
    write_result(
        "09_flash_errors",
        "flash_kernels.py: largest relative error of output and gradients against float64, in Triton's interpreter",
        ERROR_COLUMNS,
        rows,
        "70 tokens, 4 query and 2 K/V heads; the worst of a causal mask, a sliding window and none.",
    )
    write_result(
        "09_flash_binaries",
        "What the compiler made of each kernel, read from the binaries; no GPU is needed for it",
        BINARY_COLUMNS,
        binaries,
        "Registers of one thread, of 255 at most. Spilled: with what is on its stack. dkdvdq: five products; dq, dkdv: "
        "seven.",
    )


# ------------------------------------------------------------------------------------------------------------- on a GPU


def seconds(function: Callable[[], object], repeats: int = 25) -> float:
    """Median; on a GPU between events, with a cold L2 cache."""
    return timer(torch.device(DEVICE), 2 if INTERPRETED else repeats)(function).median


def matmul_rate(dtype: torch.dtype, size: int) -> float:
    """FLOP/s of PyTorch's matrix product, to compare with."""
    a, b = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b)


Call = Callable[[], tuple[Tensor, ...]]


def fastest(what: str, default: Call, tried: dict[str, Call], until: float) -> tuple[str, float, float]:
    """The fastest of the default and of `tried`: (name, its seconds, those of the default).

    The default has been held against float64; each of the others has to agree with it before it is timed. When the
    time is over, those that are left are not tried.
    """
    found, want = {"plan": seconds(default)}, default()
    for name, call in tried.items():
        if time.monotonic() > until:
            print(f"{what}: {name} and what follows were not tried, for want of time", flush=True)
            break
        try:
            off = error_of(list(call()), list(want))
            if not off <= 2 * torch.finfo(want[0].dtype).eps:  # each is off by a rounding of its own
                raise ArithmeticError(f"differs from the plan's by {off:.1e}")
            found[name] = seconds(call)
        except Exception as reason:  # a size of tile may not compile or not fit; the others go on
            line = (str(reason).strip() or type(reason).__name__).splitlines()[0][:120]
            print(f"{what}, {name}: left out ({line})", flush=True)
    best = min(found, key=found.__getitem__)
    print(f"{what}: {best}; " + ", ".join(f"{n} {s * 1e3:.3f} ms" for n, s in found.items()), flush=True)
    return best, found[best], found["plan"]


def theirs(backend: SDPBackend, given: list[Tensor], causal: bool) -> tuple[float, float] | None:
    """Seconds of forward and of backward of one of PyTorch's kernels, or None where it is not available."""
    q, k, v, dout = (x.detach().transpose(1, 2) for x in given)  # [B, S, N, D] -> [B, N, S, D], as it wants them
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
    try:
        with sdpa_kernel(backend):
            out = sdpa(*leaves)
            forward = seconds(lambda: sdpa(*leaves))
            backward = seconds(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    except RuntimeError as reason:
        print(f"{backend.name}: not available ({str(reason).splitlines()[0][:100]})", flush=True)
        return None
    return forward, backward


class Shape(NamedTuple):
    B: int
    S: int
    N: int
    N_kv: int
    D: int
    causal: bool

    def __str__(self) -> str:
        heads = "" if self.N_kv == self.N else f", {self.N_kv} K/V heads"
        return f"{self.S} tokens, D {self.D}{heads}, {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> float:
        return 4 * self.B * self.N * self.S**2 * self.D * (0.5 if self.causal else 1.0)


# The goals' shape first. All of them with the plan's tiles, then the same again with the best of several.
SHAPES_GPU = [Shape(2, 8192, 16, 16, D, causal) for D in (128, 64) for causal in (True, False)]
SHAPES_GPU += [Shape(2, 8192, 32, 8, 128, True), Shape(16, 1024, 16, 16, 128, True)]
TINY = [Shape(1, 70, 2, 1, 32, True)]
SPEED_COLUMNS = ["pass", "shape", "ms", "speed-up by tuning", "TFLOP/s", "of matmul", "times flash", "times cuDNN"]
SPEED_COLUMNS += ["tiles", *predictions.COLUMNS]


class Measurement:
    """One shape: forward and backward with the plan's tiles, PyTorch's two kernels, then other tiles."""

    def __init__(self, shape: Shape, dtype: torch.dtype, rate: float) -> None:
        self.shape, self.dtype, self.rate = shape, dtype, rate
        self.given = inputs(*shape[:5], dtype)
        self.plan = plan_of(self.given[0])
        self.mask = dict(causal=shape.causal, dtype=dtype)
        self.others: list = []

    def forward(self, tiles: Tiles) -> Call:
        q, k, v, _ = self.given
        return lambda: triton_forward(q, k, v, plan=self.plan._replace(forward=tiles), **self.mask)

    def specialised(self, tiles: Tiles) -> Call:
        q, k, v, _ = self.given
        return lambda: specialised_forward(q, k, v, tiles=tiles, **self.mask)

    def backward(self, plan: Plan, repeatable: bool = False) -> Call:
        q, k, v, dout = self.given
        if not hasattr(self, "saved"):
            self.saved = triton_forward(q, k, v, **self.mask)
        return lambda: triton_backward(dout, q, k, v, *self.saved, plan=plan, repeatable=repeatable, **self.mask)

    def predicted(self, which: str, best: str) -> float | None:
        B, S, N, _, D, causal = self.shape
        forward = ["specialised" if "special" in best else "forward"]
        kernels = {"forward": forward, "backward": ["dkdvdq"], SEVEN: ["dq", "dkdv"]}[which]
        found = [predictions.attention(predictions.here(), kernel, B, S, N, D, causal) for kernel in kernels]
        if which == "backward":  # dq in fp32: its zeros are written, and when it is complete it is read and rounded
            found.append(predictions.moved(predictions.here(), B * S * N * D * (4 + 4 + self.dtype.itemsize), 2))
        return None if None in found else sum(found)

    def row(self, which: str, mine: float, default: float, how: str) -> list:
        index = int(which != "forward")
        work = self.shape.flops * (1, 2.5)[index]
        rate = f"{work / mine / 1e12:.0f}" if not INTERPRETED else "n/a when interpreted"
        ratios = [f"{other[index] / mine:.2f}" if other else "n/a" for other in self.others]
        cells = [which, str(self.shape), f"{mine * 1e3:.3f}", f"{default / mine:.2f}", rate]
        expected = predictions.cells(self.predicted(which, how), mine)
        return [*cells, f"{work / mine / self.rate:.2f}", *ratios, how, *expected]

    def with_the_plan(self) -> list[list]:
        """Verified against float64, timed against PyTorch's."""
        for version in (TRITON, REPEATABLE):
            exact(version, self.dtype, self.shape.D, 70 if INTERPRETED else 500)
        backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
        self.others = [theirs(backend, self.given, self.shape.causal) for backend in backends]
        calls = self.forward(self.plan.forward), self.backward(self.plan), self.backward(self.plan, repeatable=True)
        times = [seconds(call) for call in calls]
        return [
            self.row(which, took, took, "the plan's")
            for which, took in zip(("forward", "backward", SEVEN), times, strict=True)
        ]

    def tuned_forward(self, until: float) -> list:
        tried = {f"plain {tuple(t)}": self.forward(t) for t in ([] if INTERPRETED else FORWARD)}
        if INTERPRETED or torch.cuda.get_device_capability()[0] == 9:
            # The specialised ones first: where they are right, one of them should be the fastest.
            special = [TILES] if INTERPRETED else [TILES, *SPECIALISED_TILES]
            tried = {f"specialised {tuple(t)}": self.specialised(t) for t in special} | tried
        best, took, default = fastest(f"forward, {self.shape}", self.forward(self.plan.forward), tried, until)
        return self.row("forward", took, default, best)

    def tuned_backward(self, until: float) -> list:
        plans = [self.plan._replace(dkdv=tiles) for tiles in ([] if INTERPRETED else DKDV)]
        tried = {str(tuple(plan.dkdv)): self.backward(plan) for plan in plans}
        best, took, default = fastest(f"backward, {self.shape}", self.backward(self.plan), tried, until)
        return self.row("backward", took, default, best)


def gpu(folder: Path, limit: float) -> None:
    begun, dtype = time.monotonic(), torch.float16 if INTERPRETED else torch.bfloat16
    rate = matmul_rate(dtype, 256 if INTERPRETED else 8192)
    table = Table(
        "09_flash_speed",
        f"FlashAttention in Triton, {str(dtype)[6:]}, against PyTorch's flash and cuDNN kernels",
        SPEED_COLUMNS,
        "TFLOP/s count 4 · B · N · S² · D forward (half if causal) and 2.5 times that backward, whatever a kernel "
        "computes twice. `of matmul`: share of the rate measured for a matrix product of 8192 cubed. `times flash`: "
        "how many times as fast as SDPA's flash back end. Tiles: rows, columns, warps, stages. Predicted from the SASS "
        "of the plan's tiles (tests/harness/predictions.py). A shape that stands there twice was tuned later.",
        folder,
    )
    shapes, until = TINY if INTERPRETED else SHAPES_GPU, begun + 0.85 * limit
    for shape in shapes:
        if table.rows and time.monotonic() > begun + 0.5 * limit:
            break
        for row in Measurement(shape, dtype, rate).with_the_plan():
            table.add(*row)
    for shape in shapes:
        if time.monotonic() > until:
            break
        measurement = Measurement(shape, dtype, rate)
        measurement.with_the_plan()  # compiled by now
        for row in (measurement.tuned_forward(until), measurement.tuned_backward(until)):
            table.add(*row)


def run(about: str, cpu: Callable[[], None], gpu: Callable[..., None], *more: str, hopper: bool = False) -> None:
    """The command line of FlashAttention's benchmarks. `more`: options beside --gpu, --dry and --out."""
    options = bench_options(about, "--gpu", "--dry", "--out", *more, triton=True, hopper=hopper)
    if not options.gpu:
        cpu()
        return
    limit = {"limit": options.seconds} if "--seconds" in more else {}
    gpu(options.out or ROOT / "results", **limit)


if __name__ == "__main__":
    run("FlashAttention in Triton: errors and binaries, or times.", cpu, gpu, "--seconds")
