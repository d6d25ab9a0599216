"""The matmul in CUDA: how exact its sums are, what nvcc compiles it to, and, on a Hopper GPU, how fast it is.

    python 10_mixed_precision/in_depth/bench_fp8_matmul.py
    python 10_mixed_precision/in_depth/bench_fp8_matmul.py --gpu [--out DIR [--dry]] [--seconds S]

First it must agree with its definition, in all tested orders of its threads (on a GPU with the exact matmul).
Without a GPU it writes errors of emulated sums (10_fp8_cuda). With --gpu it is timed in turns with the Triton
kernel and bf16 (10_fp8_cuda_speed), which needs nvcc. Every element of what is timed is compared with the
exact matmul, before and after.
"""

import math
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch

if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
    # Whether Triton interprets is decided when it is imported, and the harness imports it.
    os.environ["TRITON_INTERPRET"] = "1"

import fp8_kernels
import fp8_matmul
from _precision_bench import gpu_options
from formats import TILE, Quantized, e4m3, quantize
from fp8 import tensor_core_matmul
from fp8_matmul import (
    FORWARD,
    PRODUCTS,
    REVERSE,
    CudaError,
    accumulator,
    ahead,
    cuda_matmul,
    error,
    operands,
    racing,
    resources,
)
from harness import predictions
from harness.ceilings import Table, device_here, paired_seconds, quotient
from harness.report import ratio_of, write_result

SHAPES = ((8192, 8192, 8192), (4096, 7168, 2048), (4096, 4096, 4096), (1000, 3000, 4096))  # M, N, K


def verify(device: str) -> None:
    for product in PRODUCTS:
        for M, N, K in ((70, 133, 272), (1, 257, 16)):
            a, b = operands(M, N, K, product, device)
            out = cuda_matmul(a, b, torch.float32)
            off = error(out, a, b)
            if not off <= 1e-3:
                sys.exit(f"bench_fp8_matmul.py: {product} of {M} x {N} x {K} is off by {off:.1e}; nothing is written")
            orders = (REVERSE, ahead(0), ahead(4), racing(1)) if device == "cpu" else (FORWARD,)
            if not all(torch.equal(out, cuda_matmul(a, b, torch.float32, order=order)) for order in orders):
                sys.exit(f"bench_fp8_matmul.py: {product}: the bits depend on the order of the threads")


def of_one_sign(K: int) -> list[Quantized]:
    values = torch.rand(2, 24, K, generator=torch.Generator().manual_seed(0)) + 0.5
    return [quantize(x, e4m3, (1, TILE)) for x in values]


def sums() -> None:
    rows = []
    for K in (128, 512, 2048, 4096):
        a, b = of_one_sign(K)
        whole = [q._replace(scale=torch.ones(1, 1), block=(0, 0)) for q in (a, b)]  # one scale: no promotion
        kernel = error(cuda_matmul(a, b, torch.float32), a, b)
        reference = error(tensor_core_matmul(a, b, torch.float32), a, b)
        if not abs(kernel - reference) <= 1e-6:
            sys.exit(f"bench_fp8_matmul.py: {kernel:.3e} with K = {K}, by the definition {reference:.3e}")
        with accumulator(0):
            exact = error(cuda_matmul(a, b, torch.float32), a, b)
        never = error(tensor_core_matmul(*whole, torch.float32, promote=0), *whole)
        rows.append([K, f"{never:.1e}", f"{kernel:.1e}", f"{exact:.1e}"])
    note = "24 x 24 results of numbers of one sign, against their exact product. "
    if shutil.which("nvcc"):
        used = resources(fp8_matmul.SOURCE, "sm_90a")[fp8_matmul.KERNEL]
        note += f"nvcc for sm_90a: {used.registers} registers, {used.stack} bytes of stack. "
    write_result(
        "10_fp8_cuda",
        "The product in CUDA, emulated: largest error with an accumulator of 14 bits, and with one of fp32",
        ["K", "14 bits, never promoted", "14 bits, the kernel", "fp32, the kernel"],
        rows,
        note + "Never promoted: by the definition, since the kernel always promotes. Not timed.",
    )


def time_on_gpu(device: str, dry: bool, out: Path | None, limit: float) -> None:
    repeats, end, gpu = 3 if dry else 15, time.monotonic() + limit, predictions.here()
    table = Table(
        "10_fp8_cuda_speed",
        "The product in CUDA against the kernel in Triton and against bf16, recipe block",
        ["M x N x K", "ms", "TFLOP/s", "times as fast as Triton", "as bf16", *predictions.COLUMNS],
        "A with scales of 1 x 128, B of 128 x 128, quantised before; result in bf16. By the GPU's clock, with a cold "
        "L2 cache; medians, and ratios of neighbours in time with their quartiles. Predicted: the larger of 80 % of "
        f"the fp8 rate and of the bytes asked of L2. It is refuted by: {predictions.refuted('fp8_product')}."
        + (" A dry run on a CPU: the numbers mean nothing." if dry else ""),
        out,
    )
    for M, N, K in ((64, 64, 128),) if dry else SHAPES:
        shape = f"{M} x {N} x {K}"
        if end - time.monotonic() < 2 and table.rows:
            table.add(shape, f"left out: less than 2 of {limit:.0f} s are left", *["-"] * 5)
            continue
        generator = torch.Generator(device).manual_seed(0)
        x, w = (torch.randn(rows, K, generator=generator, device=device) for rows in (M, N))
        a, b = quantize(x, e4m3, (1, TILE)), quantize(w, e4m3, (TILE, TILE))
        narrow = [t if dry else t.bfloat16() for t in (x, w)]
        kind = torch.float32 if dry else torch.bfloat16

        def ours(a=a, b=b, kind=kind) -> torch.Tensor:
            return cuda_matmul(a, b, kind)

        torch.full((M, N), math.nan, dtype=kind, device=device)  # for the result's memory
        first = ours()
        # Relative to the sum of |terms|: 14 bits of each of 4 instructions, and bf16 rounds the result.
        if not (error_there := error(first, a, b)) <= 3e-3:
            sys.exit(f"bench_fp8_matmul.py: {shape} is off by {error_there:.1e}; nothing is written")
        runs = {
            "ours": ours,
            "Triton": lambda a=a, b=b, k=kind: fp8_kernels.block_matmul(a, b, k),
            "bf16": lambda n=narrow: n[0] @ n[1].T,
        }
        seconds = paired_seconds(device_here(), runs, repeats)
        if not torch.equal(first, ours()):
            sys.exit(f"bench_fp8_matmul.py: {shape}: its last call has another result than its first")
        took = ratio_of(seconds["ours"]).median
        triton, bf16 = (quotient(seconds[name], seconds["ours"]) for name in ("Triton", "bf16"))
        predicted = predictions.ladder(gpu, "fp8_product", M, N, K)
        rate = f"{2 * M * N * K / took / 1e12:.0f}"
        table.add(shape, took * 1e3, rate, triton, bf16, *predictions.cells(predicted, took))


def main() -> None:
    args = gpu_options("--seconds")
    if args.gpu and not args.dry and (reason := fp8_matmul.refusal("cuda")):
        print(f"bench_fp8_matmul.py: --gpu: {reason}; add --dry --out DIR to try it here", file=sys.stderr)
        sys.exit(2)
    device = "cuda" if args.gpu and not args.dry else "cpu"
    try:
        verify(device)
        if args.gpu:
            time_on_gpu(device, args.dry, args.out, 400.0 if args.seconds is None else args.seconds)
        else:
            sums()
    except CudaError as failed:
        sys.exit(f"bench_fp8_matmul.py: {failed}")


if __name__ == "__main__":
    main()
