"""Five kernels in NVIDIA's profiler, Nsight Compute: its report on what this chapter counts by hand.

    python 09_kernels/in_depth/bench_profile.py --gpu                 one warm launch of each kernel, on a GPU with ncu
    python bench_profile.py --gpu --dry --out DIR   the same program with a fake ncu, on the CPU: no results

A profiler does not change results, so nothing is verified here: the benchmark of each kernel verifies it at
the same shape. It repeats a kernel to read all counters, so its seconds are useless; use the benchmarks'.
`--clock-control none` leaves the clocks as in a training run. --seconds is 120 at most, also by default.
"""

import csv
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _bench_options import bench_options
from harness.ceilings import Table, device_here

SECTIONS = ("SpeedOfLight", "WarpStateStats", "MemoryWorkloadAnalysis")
# A column of the table, and its names in ncu's report.
METRICS = {
    "multiprocessors busy": ("GPU Speed Of Light Throughput", "Compute (SM) Throughput"),
    "L1 and shared memory busy": ("GPU Speed Of Light Throughput", "L1/TEX Cache Throughput"),
    "L2 busy": ("GPU Speed Of Light Throughput", "L2 Cache Throughput"),
    "HBM busy": ("GPU Speed Of Light Throughput", "DRAM Throughput"),
    "found in L2": ("Memory Workload Analysis", "L2 Hit Rate"),
    "a warp waits per instruction": ("Warp State Statistics", "Warp Cycles Per Issued Instruction"),
    "clock": ("GPU Speed Of Light Throughput", "SM Frequency"),
}


@dataclass(frozen=True)
class Profiled:
    what: str
    kernel: str  # a regular expression for the full name
    prepare: Callable[[bool], Callable[[], Any]]  # at tiny sizes if True; returns the launch function


def product(rung: str, dtype: torch.dtype) -> Callable[[bool], Callable[[], Any]]:
    def prepare(dry: bool) -> Callable[[], Any]:
        import matmul_ladder as ladder

        size = 128 if dry else 8192 if dtype == torch.bfloat16 else 4096
        a, b = (torch.randn(size, size, device=device_here()).to(dtype) for _ in range(2))
        return lambda: ladder.matmul(a, b, rung)

    return prepare


def attention_in_triton(dry: bool) -> Callable[[], Any]:
    from flash_kernels import flash_attention

    q, k, v = heads(dry, torch.float16 if dry else torch.bfloat16)
    return lambda: flash_attention(q, k, v, causal=True)


def attention_in_cuda(dry: bool) -> Callable[[], Any]:
    from flash_attention_cuda import cuda_forward

    q, k, v = heads(dry, torch.bfloat16)
    return lambda: cuda_forward(q, k, v, causal=True)


def heads(dry: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (1, 128, 1, 64) if dry else (2, 8192, 16, 128)
    return [torch.randn(shape, device=device_here()).to(dtype) for _ in range(3)]


def norm(dry: bool) -> Callable[[], Any]:
    from fused import rms_norm

    rows, cols = (8, 64) if dry else (32768, 4096)
    x = torch.randn(rows, cols, device=device_here()).to(torch.float16 if dry else torch.bfloat16)
    weight = torch.ones_like(x[0])
    return lambda: rms_norm(x, weight, 1e-5)


PROFILED = {
    "ping_pong": Profiled("bf16 product, 8192 cubed", "ping_pong", product("ping_pong", torch.bfloat16)),
    "warp_tiles": Profiled("fp32 product, 4096 cubed", "warp_tiles", product("warp_tiles", torch.float32)),
    "triton": Profiled("FlashAttention in Triton, 8192 tokens, D 128", "forward_kernel", attention_in_triton),
    "cuda": Profiled("FlashAttention in CUDA, the same", "attention_forward", attention_in_cuda),
    "rms_norm": Profiled("RMSNorm, 32,768 rows of 4096", "rms_norm_kernel", norm),
}


def report(name: str, dry: bool, limit: float) -> list[list[str]]:
    """ncu's report of the third launch: section, metric, unit, value. RuntimeError with a reason if none."""
    own = [sys.executable, str(Path(__file__).resolve()), "--launch", name, *(["--dry"] if dry else [])]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    which = ["--kernel-name", f"regex:^{PROFILED[name].kernel}$", "--launch-skip", "2", "--launch-count", "1"]
    command = ["ncu", "--csv", "--page", "details", "--clock-control", "none", *sections, *which, *own]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {limit:.0f} s") from None
    print(done.stdout, flush=True)  # the log has the full report
    rows = rows_of(done.stdout.splitlines())
    if not rows:
        words = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(next((word for word in words if "==ERROR==" in word or "Error" in word), words[-1])[:160])
    return rows


def rows_of(lines: Iterable[str]) -> list[list[str]]:
    """The table in ncu's output, after its progress messages."""
    table = [line for line in lines if line.startswith('"')]
    asked = ("Section Name", "Metric Name", "Metric Unit", "Metric Value")
    return [[row.get(key) or "" for key in asked] for row in csv.DictReader(table)]


def readable(unit: str, value: str) -> str:
    """Three digits of a value, and GHz for Hz."""
    try:
        number = float(value.replace(",", ""))
    except ValueError:  # ncu could not measure it
        return value
    return f"{number / 1e9:.3g} GHz" if unit == "hz" else f"{number:.3g} {unit}"


def profile(dry: bool, folder: Path | None, limit: float) -> int:
    begun, failures = time.monotonic(), 0
    table = Table(
        "09_profile",
        "Five kernels under Nsight Compute, one warm launch each",
        ["kernel", *METRICS],
        "ncu --clock-control none. Busy: of the most that this unit could do, by its busiest part. "
        "What ncu calls the columns: 09_kernels/README.md.",
        folder,
    )
    for name, profiled in PROFILED.items():
        left = limit - (time.monotonic() - begun)
        if left < 5.0:
            print(f"{profiled.what}: left out, {max(left, 0):.0f} s are left")
            continue
        try:
            found = {(section, metric): (unit, value) for section, metric, unit, value in report(name, dry, left)}
        except (OSError, RuntimeError) as error:
            print(f"bench_profile.py: {profiled.what}: {error}", file=sys.stderr)
            failures += 1
            continue
        table.add(
            f"{profiled.what} ({profiled.kernel})",
            *(readable(*found[key]) if key in found else "-" for key in METRICS.values()),
        )
    return 1 if failures else 0


def main() -> int:
    if sys.argv[1:2] == ["--launch"]:  # started by ncu
        launch = PROFILED[sys.argv[2]].prepare("--dry" in sys.argv)
        for _ in range(1 if "--dry" in sys.argv else 3):
            launch()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 0
    options = bench_options("Profile five kernels.", "--gpu", "--dry", "--out", "--seconds")
    if not options.gpu:
        print("bench_profile.py: a profiler needs a GPU; there, use --gpu")
        return 0
    return profile(options.dry, options.out, min(options.seconds, 120.0))


if __name__ == "__main__":
    sys.exit(main())
