"""ELU four ways, fusion and divergence: what they move; on a GPU also how fast, against the measured copy bandwidth.

    python 09_kernels/in_depth/bench_elu.py   on any machine: bytes moved, and eager against torch.compile
    python 09_kernels/in_depth/bench_elu.py --gpu              verify on the GPU, then time
    python bench_elu.py --gpu --dry --out DIR   the same program at tiny sizes on the CPU: no results

First every version must be as exact as PyTorch's ELU, and move what was predicted; only then is anything written.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import elu as chapter
import torch
import torch.nn.functional as F
from _bench_options import bench_options
from _cuda import call
from bench_matmul_ladder import copied, timed
from elu import VERSIONS, elu, errors
from harness import predictions
from harness.ceilings import Table, device_here
from harness.report import paired, write_result

ALPHA = 1.3
IN_ONE, FMAS, BESIDE = 77, 64, 33  # instructions of a warp: of bias_gelu; of a path of diverge; of both. nvcc 13, sm_90


def verify_all(device: str) -> None:
    """Ends the program unless every version is right."""
    for n, scale in ((5003, 4.0), (1027, 1e-3)):
        x = scale * torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device)
        for version in VERSIONS:
            if version == "compile" and chapter.INTERPRETED and scale < 1:
                continue  # what it writes for a CPU loses the digits of expm1 near 0 (see README.md)
            worst = errors(x, ALPHA, lambda t, v=version: elu(t, ALPHA, v))
            if not (worst[0] <= 2 and worst[1] <= 2):
                sys.exit(f"{version} at {n} elements: errors of y and dx are {worst} times those of F.elu")


def count(folder: Path | None) -> None:
    n = 4096
    x = torch.randn(n)
    with chapter.Traffic() as traffic, torch.no_grad():
        chapter.elu_eager(x, ALPHA)
    counted = call("elu.cu", "run_elu_forward", n, ALPHA, x, torch.empty(n), counting=True)
    fused = (counted.load_sectors + counted.store_sectors) * 32
    rows = [
        ["ELU in eager PyTorch", "bytes per element", 42, traffic.bytes / n],
        ["ELU in one kernel", "bytes per element", 8, fused / n],
    ]
    for name, run, predicted in (("three kernels", chapter.gelu_in_three, 28), ("one kernel", chapter.gelu_in_one, 8)):
        moved = chapter.numbers_moved(run(x.view(64, 64), torch.randn(64), counting=True)[1], n)
        rows.append([f"bias + GELU in {name}", "bytes per element", predicted, 4 * moved])
    for (name, c), predicted in zip(chapter.divergence(n).items(), (2, 1), strict=True):
        rows.append([f"two paths, {name}", "paths per warp", predicted, c.paths / c.path_requests])
    for what, _, predicted, got in rows:
        if got != predicted:
            sys.exit(f"{what}: {got}, but {predicted} was predicted")
    write_result(
        "09_elu",
        "Fusion and divergence: what the kernels move and do",
        ["what", "unit", "predicted", "counted"],
        rows,
        "fp32, forward. The bias, which is short and stays in a cache, is left out.",
        folder,
    )
    compiled = torch.compile(chapter.elu_eager)
    big = torch.randn(4 * 2**20)
    with torch.no_grad():
        compiled(big, ALPHA)
        rows = [
            ["eager", paired(lambda: chapter.elu_eager(big, ALPHA), lambda: F.elu(big, ALPHA))],
            ["torch.compile", paired(lambda: compiled(big, ALPHA), lambda: F.elu(big, ALPHA))],
        ]
    write_result(
        "09_elu_compile",
        "ELU of 4 million numbers, forward: seconds over those of PyTorch's own kernel",
        ["version", "seconds: median (quartiles)"],
        rows,
        "fp32. Triton's interpreter and the CUDA shim say nothing about time, so they are not here.",
        folder,
    )


def time_all(dry: bool, folder: Path | None) -> None:
    device, n, gpu = device_here(), 4096 if dry else 2**27, predictions.here()
    seconds, copy = timed(dry, 30), copied(dry)
    x = torch.randn(n, device=device)
    leaf, dy = x.clone().requires_grad_(), torch.randn(n, device=device)
    compiled = torch.compile(chapter.elu_eager)
    table = Table(
        "09_elu_gpu",
        f"ELU of {n:,} numbers, fp32",
        [
            "version",
            "forward, ms",
            "of the copy bandwidth",
            "backward, ms",
            "of the copy bandwidth ",
            *predictions.COLUMNS,
        ],
        f"One kernel has to move 8 bytes per element forward, 12 backward; a copy of as many numbers moves "
        f"{copy / 1e12:.3g} TB/s. Median of 30 calls with a cold L2 cache. Predicted for both together.",
        folder,
    )
    for version in ("F.elu", *VERSIONS):

        def run(t, version=version):
            if version == "compile":
                return compiled(t, ALPHA)  # `elu` would look its compilation up at every call
            return F.elu(t, ALPHA) if version == "F.elu" else elu(t, ALPHA, version)

        forward = seconds(lambda run=run: run(x))
        y = run(leaf)
        backward = seconds(lambda y=y: torch.autograd.grad(y, leaf, dy, retain_graph=True))
        shares = [f"{bytes_ * n / took / copy:.0%}" for bytes_, took in ((8, forward), (12, backward))]
        expected = predictions.moved(gpu, 20 * n, 2) if version != "eager" else None
        cells = predictions.cells(expected, forward + backward)
        table.add(version, forward * 1e3, shares[0], backward * 1e3, shares[1], *cells)
    fields, bias = x.view(-1, 1024), torch.randn(1024, device=device)
    out = torch.empty_like(x)
    fusion = Table(
        "09_fusion_gpu",
        "Fusion and divergence, timed",
        ["what", "over", "seconds: ratio", "predicted"],
        f"{n:,} numbers, fp32. Predicted from the bytes moved, 28 to 8, or from the {IN_ONE} instructions of the one "
        f"kernel where these take longer; and from the {FMAS} FMAs of each path beside {BESIDE} other instructions.",
        folder,
    )
    three, one = (seconds(lambda f=f: f(fields, bias)) for f in (chapter.gelu_in_three, chapter.gelu_in_one))
    expected: float = 28 / 8
    if gpu:
        issued = predictions.START + IN_ONE * n / 32 / (4 * gpu.clocks)
        expected = (predictions.moved(gpu, 28 * n, 3) or 0.0) / max(predictions.moved(gpu, 8 * n) or 0.0, issued)
    fusion.add("bias + GELU in three kernels", "in one", three / one, expected)
    alternate, agree = (seconds(lambda w=w: call("elu.cu", "run_diverge", n, w, x, out)) for w in (0, 1))
    paths = (2 * FMAS + BESIDE) / (FMAS + BESIDE)
    fusion.add("lanes of a warp disagree", "whole warps disagree", alternate / agree, paths)


def main() -> None:
    about = "Count and time ELU, fusion and divergence."
    options = bench_options(about, "--gpu", "--dry", "--out", counts_into_out=True)
    verify_all(device_here().type)
    if options.gpu:
        time_all(options.dry, options.out)
    else:
        count(options.out)


if __name__ == "__main__":
    main()
