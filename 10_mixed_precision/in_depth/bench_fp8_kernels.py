"""The kernels of fp8_kernels.py: verified, in the interpreter too; on a GPU also timed.

    python 10_mixed_precision/in_depth/bench_fp8_kernels.py
    python 10_mixed_precision/in_depth/bench_fp8_kernels.py --gpu [--out DIR [--dry]]

With --gpu: quantisation against the same operations in PyTorch, and the matmul with tiles against bf16, each in turns
(10_fp8_kernels_speed).
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch

if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
    # Whether Triton interprets is decided when it is imported, and the harness imports it.
    os.environ["TRITON_INTERPRET"] = "1"

import fp8_kernels
from _precision_bench import gpu_options
from fp8 import emulated_matmul, quantize, relative
from harness import predictions
from harness.ceilings import Table, device_here, paired_seconds, quotient
from harness.report import ratio_of


def on_gpu(x: torch.Tensor) -> bool:
    """Whether it is a real GPU: Triton's interpreter, used for an emulated one, has no bf16."""
    return x.is_cuda and not os.environ.get("TRITON_INTERPRET")


def inputs(rows: int, columns: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 2, columns)
    x = x.to(device)
    return x.bfloat16() if on_gpu(x) else x


def verify(device: str) -> None:
    x, w = inputs(300, 400, device), inputs(200, 400, device)
    for block in fp8_kernels.MODES:
        got, want = fp8_kernels.quantize(x, torch.float8_e4m3fn, block), quantize(x, torch.float8_e4m3fn, block)
        differ = (got.values.float() != want.values.float()).double().mean().item()
        if not (torch.allclose(got.scale, want.scale, rtol=1e-6) and differ < 1e-3):
            sys.exit(f"bench_fp8_kernels.py: {block} differs from fp8.py in {differ:.1%} of the elements, or in scales")
    for block in ((1, 128), (1, 0)):
        wanted = [quantize(x, torch.float8_e4m3fn, shape) for shape in (block, block[::-1])]
        for got, want in zip(fp8_kernels.quantize_both(x, torch.float8_e4m3fn, block), wanted, strict=True):
            differ = (got.values.float() != want.values.float()).double().mean().item()
            if not (torch.allclose(got.scale, want.scale, rtol=1e-6) and differ < 1e-3):
                sys.exit(
                    f"bench_fp8_kernels.py: both forms of {block} differ from fp8.py in {differ:.1%}, or in scales"
                )
    a = fp8_kernels.quantize(x, torch.float8_e4m3fn, (1, 128))
    b = fp8_kernels.quantize(w, torch.float8_e4m3fn, (128, 128))
    error = relative(fp8_kernels.block_matmul(a, b, torch.float32), emulated_matmul(a, b, torch.float32))
    if not error < 1e-2:
        sys.exit(f"bench_fp8_kernels.py: the matmul is off by {error:.1e}")


def time_on_gpu(device: str, dry: bool, out: Path | None) -> None:
    repeats, e4m3, gpu = 2 if dry else 15, torch.float8_e4m3fn, predictions.here()
    table = Table(
        "10_fp8_kernels_speed",
        "Times as fast as the alternative",
        ["kernel", "alternative", "times as fast: median (quartiles)", "ms", *predictions.COLUMNS],
        "By the GPU's clock, with a cold L2 cache. Predicted: 2 bytes read and 1 written for each element, and the "
        "scales; for the matmul 80 % of the fp8 rate."
        + (" A dry run on a CPU: the numbers mean nothing." if dry else ""),
        out,
    )

    def row(what: str, alternative: str, kernel: Callable, other: Callable, expected: float | None) -> None:
        seconds = paired_seconds(device_here(), {"kernel": kernel, "other": other}, repeats)
        took = ratio_of(seconds["kernel"]).median
        ratio = quotient(seconds["other"], seconds["kernel"])
        table.add(what, alternative, ratio, took * 1e3, *predictions.cells(expected, took))

    for size in (256,) if dry else (8192, 4096):
        x, w = inputs(size, size, device), inputs(size, size, device)
        a, b = fp8_kernels.quantize(x, e4m3, (1, 128)), fp8_kernels.quantize(w, e4m3, (128, 128))

        def matmul(a=a, b=b, x=x):
            return fp8_kernels.block_matmul(a, b, torch.bfloat16 if on_gpu(x) else torch.float32)

        products = predictions.product(gpu, 2 * size**3, "fp8")
        row(f"matmul with tiles, {size} cubed", "bf16 matmul", matmul, lambda x=x, w=w: x @ w.T, products)
        for block in fp8_kernels.MODES:
            moved = predictions.moved(gpu, size * size * (3 + 4 / min(block[0] * block[1], 128 * 128)))
            row(
                f"quantize {block[0]} x {block[1]}, {size} x {size}",
                "the same in PyTorch",
                lambda x=x, b=block: fp8_kernels.quantize(x, e4m3, b),
                lambda x=x, b=block: quantize(x, e4m3, b),
                moved,
            )
        for block, what, read in (((1, 128), "tiles", 2), ((1, 0), "whole rows and columns", 4)):
            row(
                f"both forms, {what}, {size} x {size}",
                "the same in PyTorch",
                lambda x=x, b=block: fp8_kernels.quantize_both(x, e4m3, b),
                lambda x=x, b=block: [quantize(x, e4m3, b), quantize(x, e4m3, b[::-1])],
                predictions.moved(gpu, size * size * (read + 2)),
            )


def main() -> None:
    args = gpu_options()
    device = device_here().type if args.gpu else "cpu"
    if device == "cpu" and torch.cuda.is_available():
        sys.exit("bench_fp8_kernels.py: with a GPU here, Triton does not interpret; use --gpu")
    verify(device)
    if args.gpu:
        time_on_gpu(device, args.dry, args.out)
    else:
        print("bench_fp8_kernels.py: the kernels are right; on a GPU, --gpu times them")


if __name__ == "__main__":
    main()
