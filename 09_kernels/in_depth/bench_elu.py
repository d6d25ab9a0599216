"""ELU four ways, fusion and divergence: bytes moved; on a GPU also time, against the measured copy bandwidth.

    python 09_kernels/in_depth/bench_elu.py   on any machine: bytes moved
    python 09_kernels/in_depth/bench_elu.py --gpu              verify on the GPU, then time
    python bench_elu.py --gpu --dry --out DIR   the same program at tiny sizes on the CPU: no results

First every version must be as exact as PyTorch's ELU, and move the predicted bytes; only then is anything
written. On a GPU every timed element is also compared with float64, each version alternates with PyTorch's
ELU and a copy, and --seconds S ends it early.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import elu as chapter
import torch
import torch.nn.functional as F
from _bench_options import bench_options
from _cuda import call
from elu import VERSIONS, elu, errors
from harness import predictions
from harness.ceilings import Table, device_here, paired_seconds, quotient
from harness.report import ratio_of, write_result
from torch import Tensor

ALPHA = 1.3
IN_ONE, FMAS, BESIDE = 77, 64, 33  # instructions of a warp: of bias_gelu; of a path of diverge; of both. nvcc 13, sm_90


def verify_all(device: str) -> None:
    """Exit unless every version is right."""
    for n, scale in ((5003, 4.0), (1027, 1e-3)):
        x = scale * torch.randn(n, generator=torch.Generator().manual_seed(n)).to(device)
        for version in VERSIONS:
            if version == "compile" and chapter.INTERPRETED and scale < 1:
                continue  # its CPU code loses the digits of expm1 near 0 (see README.md)
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


PART = 2**24  # elements compared at once: all of them in float64 would need too much memory


def poisoned(shape: torch.Size, device: torch.device) -> None:
    """Leave NaN in the memory that the allocator returns next for a tensor of this shape."""
    torch.full(shape, float("nan"), device=device)


def off(got: Tensor, want: Callable[[slice], Tensor], limit: float = 2e-6) -> str:
    """The largest error against float64 `want`, if above `limit` relative to itself or 1; otherwise ""."""
    got, worst = got.flatten(), 0.0
    for start in range(0, len(got), PART):
        part = slice(start, start + PART)
        exact = want(part)
        error = ((got[part] - exact).abs() / exact.abs().clamp(min=1)).max().item()
        if not error <= limit:
            return f"an element is off by {error:.2g}, and {limit:.1g} is allowed"
        worst = max(worst, error)
    return ""


def elu_exactly(x: Tensor) -> Callable[[slice], Tensor]:
    return lambda part: F.elu(x[part].double(), ALPHA)


def gradient_exactly(x: Tensor, dy: Tensor) -> Callable[[slice], Tensor]:
    def want(part: slice) -> Tensor:
        t = x[part].double()
        return dy[part].double() * torch.where(t > 0, 1.0, ALPHA * t.exp())

    return want


def gelu_exactly(x: Tensor, bias: Tensor) -> Callable[[slice], Tensor]:
    return lambda part: F.gelu((x[part].double().view(-1, len(bias)) + bias.double()).flatten())


def diverged_exactly(x: Tensor, by_warp: int) -> Callable[[slice], Tensor]:
    """The results of elu.cu's two loops of 64 steps: their fixed points, 2 and -4/3."""

    def want(part: slice) -> Tensor:
        i = torch.arange(part.start, min(part.stop, len(x)), device=x.device)
        path = (i // 32 if by_warp else i) % 2
        t = x[part].double()
        return torch.where(path == 0, 2 + (t - 2) * 0.5**64, -4 / 3 + (t + 4 / 3) * 0.25**64)

    return want


def time_all(dry: bool, folder: Path | None, limit: float) -> None:
    end = time.monotonic() + limit
    device, n, gpu, repeats = device_here(), 4096 if dry else 2**27, predictions.here(), 2 if dry else 30
    x = torch.randn(n, device=device)
    leaf, dy = x.clone().requires_grad_(), torch.randn(n, device=device)
    target = torch.empty_like(x)
    compiled = torch.compile(chapter.elu_eager)
    wrong = []
    table = Table(
        "09_elu_gpu",
        f"ELU of {n:,} numbers, fp32",
        [
            *("version", "forward, ms", "of a copy's bandwidth", "times as fast as F.elu"),
            *("backward, ms", "of a copy's bandwidth ", "times as fast as F.elu ", *predictions.COLUMNS),
        ],
        "One kernel has to move 8 bytes per element forward, as a copy does, and 12 backward. Medians of 30 calls with "
        "a cold L2 cache; a copy and F.elu have their turn after each, and ratios are of neighbours, with quartiles. "
        "Every element is compared with float64. Predicted for both directions together; refuted above 1.3 times that: "
        "then bytes do not explain the time.",
        folder,
    )

    def run(version: str, t: Tensor) -> Tensor:
        if version == "compile":
            return compiled(t, ALPHA)  # `elu` would look up its compilation at every call
        return F.elu(t, ALPHA) if version == "F.elu" else elu(t, ALPHA, version)

    theirs = F.elu(leaf, ALPHA)
    for version in ("F.elu", "triton", "cuda", "eager", "compile"):
        if end - time.monotonic() < 3 and table.rows:
            table.add(version, f"left out: less than 3 of {limit:.0f} s are left", *["-"] * 7)
            continue
        poisoned(x.shape, device)
        why = off(run(version, x), elu_exactly(x))
        y = run(version, leaf)
        poisoned(x.shape, device)
        why = why or off(torch.autograd.grad(y, leaf, dy, retain_graph=True)[0], gradient_exactly(x, dy))
        if why:
            wrong.append(f"{version}: {why}")
            table.add(version, f"left out: {why}", *["-"] * 7)
            continue
        runs = {
            "forward": lambda version=version: run(version, x),
            "F.elu": lambda: F.elu(x, ALPHA),
            "copy": lambda: target.copy_(x),
            "backward": lambda y=y: torch.autograd.grad(y, leaf, dy, retain_graph=True),
            "F.elu's": lambda: torch.autograd.grad(theirs, leaf, dy, retain_graph=True),
        }
        took = paired_seconds(device, runs, repeats)
        forward, backward = (ratio_of(took[name]).median for name in ("forward", "backward"))
        shares = quotient(took["copy"], took["forward"]), quotient([1.5 * s for s in took["copy"]], took["backward"])
        beside = quotient(took["F.elu"], took["forward"]), quotient(took["F.elu's"], took["backward"])
        expected = predictions.moved(gpu, 20 * n, 2) if version != "eager" else None
        cells = predictions.cells(expected, forward + backward)
        table.add(version, forward * 1e3, shares[0], beside[0], backward * 1e3, shares[1], beside[1], *cells)
    fields, bias = x.view(-1, 1024), torch.randn(1024, device=device)
    out = torch.empty_like(x)
    fusion = Table(
        "09_fusion_gpu",
        "Fusion and divergence, timed",
        ["what", "over", "seconds: ratio", "predicted"],
        f"{n:,} numbers, fp32, in turns, every element compared with float64. Predicted from the bytes moved, 28 to 8, "
        f"or from the {IN_ONE} instructions of the one kernel where these take longer; and from the {FMAS} FMAs of "
        f"each path beside {BESIDE} other instructions. Refuted by ratios 20 % away.",
        folder,
    )
    gelus = {"in three": chapter.gelu_in_three, "in one": chapter.gelu_in_one}
    for name, gelu in gelus.items():
        poisoned(x.shape, device)
        if why := off(gelu(fields, bias)[0], gelu_exactly(x, bias)):
            wrong.append(f"bias + GELU {name}: {why}")
    for by_warp in (0, 1):
        out.fill_(float("nan"))
        call("elu.cu", "run_diverge", n, by_warp, x, out)
        if why := off(out, diverged_exactly(x, by_warp)):
            wrong.append(f"diverge, by_warp {by_warp}: {why}")
    if wrong:
        sys.exit("; ".join(wrong))
    expected: float = 28 / 8
    if gpu:
        issued = predictions.START + IN_ONE * n / 32 / (4 * gpu.clocks)
        expected = (predictions.moved(gpu, 28 * n, 3) or 0.0) / max(predictions.moved(gpu, 8 * n) or 0.0, issued)
    took = paired_seconds(device, {name: lambda f=f: f(fields, bias) for name, f in gelus.items()}, repeats)
    fusion.add("bias + GELU in three kernels", "in one", quotient(took["in three"], took["in one"]), expected)
    ways = {w: lambda w=w: call("elu.cu", "run_diverge", n, w, x, out) for w in (0, 1)}
    took = paired_seconds(device, {str(w): way for w, way in ways.items()}, repeats)
    paths = (2 * FMAS + BESIDE) / (FMAS + BESIDE)
    fusion.add("lanes of a warp disagree", "whole warps disagree", quotient(took["0"], took["1"]), paths)


def main() -> None:
    about = "Count and time ELU, fusion and divergence."
    options = bench_options(about, "--gpu", "--dry", "--out", "--seconds", counts_into_out=True)
    verify_all(device_here().type)
    if options.gpu:
        time_all(options.dry, options.out, options.seconds)
    else:
        count(options.out)


if __name__ == "__main__":
    main()
