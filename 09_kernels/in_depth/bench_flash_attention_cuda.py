"""Attention in CUDA, forward: how exact, how many bytes it asks for, and, on a Hopper GPU, how fast.

    python 09_kernels/in_depth/bench_flash_attention_cuda.py   on any machine: errors and sectors, emulated
    python 09_kernels/in_depth/bench_flash_attention_cuda.py --gpu   on a Hopper GPU: against the plain kernel in Triton
    python 09_kernels/in_depth/bench_flash_attention_cuda.py --gpu --dry   the same program on the CPU, tiny

First it has to agree with float64, in every order of its threads that is tried, and to ask for the sectors predicted.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import _cuda
import flash_attention_cuda as cuda
import torch
from _interpreter import INTERPRETED
from bench_flash_kernels import SHAPES_GPU, TINY, Measurement, Shape, matmul_rate, run, seconds
from flash_tiles import band
from harness import predictions
from harness.ceilings import Table
from harness.report import write_result

# B, S_q, S_k, N, N_kv, D, causal, offset
CASES = [
    (1, 128, 128, 1, 1, 64, False, 0),
    (1, 200, 260, 2, 1, 64, True, 0),
    (1, 70, 560, 1, 1, 64, True, 490),
    (2, 129, 131, 2, 2, 128, True, 2),
]


def cpu() -> None:
    rows, used = [], _cuda.resources(cuda.SOURCE, "sm_90a")["attention_forward"] if shutil.which("nvcc") else None
    for case in CASES:
        *sizes, causal, offset = case
        B, S_q, S_k, N, N_kv, D = sizes
        given, last = cuda.inputs(*sizes, "cpu"), band(S_q, S_k, causal, None, offset)[1]
        outs = [
            cuda.cuda_forward(*given, causal=causal, offset=offset, order=order)
            for order in (_cuda.FORWARD, _cuda.REVERSE, _cuda.ahead(0), _cuda.ahead(4), _cuda.racing(1))
        ]
        if not all(torch.equal(x, y) for other in outs[1:] for x, y in zip(outs[0], other, strict=True)):
            sys.exit(f"{case}: the bits depend on the order of the threads")
        error, of_lse = cuda.errors(*outs[0], *given, causal, offset)
        predicted, counted = cuda.sectors(B, S_q, S_k, N, D, last), cuda.count(given, last)
        if not (error <= 8e-3 and of_lse <= 1e-5 and predicted == counted):
            sys.exit(f"{case}: off by {error:.1e}, LSE by {of_lse:.1e}; {counted} sectors, predicted {predicted}")
        shape = f"{B} x {S_q} queries, {S_k} keys, {N}/{N_kv} heads of {D}, {'causal' if causal else 'all keys'}"
        rows.append([shape, f"{error:.1e}", f"{of_lse:.1e}", predicted, counted])
    write_result(
        "09_flash_cuda",
        "Attention in CUDA, emulated: largest errors against float64, and sectors of 32 bytes that it asks for",
        ["shape", "error of out", "of LSE", "sectors predicted", "counted"],
        rows,
        "out: relative to its largest element, in bf16. The same bits in five orders of the warps, two of them with "
        "one warp as far ahead as barriers let it. "
        + (f"nvcc for sm_90a: {used.registers} registers, {used.stack} bytes of stack. " if used else "")
        + "Not timed.",
    )


def gpu(folder: Path) -> None:
    """The CUDA kernel beside the plain one in Triton, on a Hopper GPU."""
    dtype = torch.bfloat16
    rate = matmul_rate(torch.float16 if INTERPRETED else dtype, 256 if INTERPRETED else 8192)
    table = Table(
        "09_flash_cuda_speed",
        "Attention in CUDA against the plain Triton kernel, forward, bfloat16",
        ["shape", "plain, ms", "CUDA, ms", "times as fast", "TFLOP/s", "of matmul", *predictions.COLUMNS],
        "Verified first at uneven sizes. TFLOP/s count 4 · B · N · S² · D, half if causal. `of matmul`: share of the "
        "rate of a matrix product of 8192 cubed. Predicted: the larger of products and exponentials, side by side.",
        folder,
    )
    device = "cpu" if INTERPRETED else "cuda"
    for case in CASES:
        *sizes, causal, offset = case
        given = cuda.inputs(*sizes, device)
        error, of_lse = cuda.errors(*cuda.cuda_forward(*given, causal=causal, offset=offset), *given, causal, offset)
        if not (error <= 8e-3 and of_lse <= 1e-4):
            sys.exit(f"{case}: off by {error:.1e}, LSE by {of_lse:.1e}; nothing is timed")
    for shape in [TINY[0]._replace(D=64)] if INTERPRETED else SHAPES_GPU:
        one = Measurement(shape, torch.float16 if INTERPRETED else dtype, rate)
        q, k, v, _ = (x.bfloat16() for x in one.given)
        plain = seconds(one.forward(one.plan.forward))
        took = seconds(lambda q=q, k=k, v=v, shape=shape: cuda.cuda_forward(q, k, v, causal=shape.causal))
        reached = f"{shape.flops / took / 1e12:.0f}" if not INTERPRETED else "n/a when emulated"
        cells = predictions.cells(expected(shape), took)
        table.add(
            str(shape), plain * 1e3, took * 1e3, plain / took, reached, f"{shape.flops / took / rate:.2f}", *cells
        )


def expected(shape: Shape) -> float | None:
    """Seconds: the larger of products and exponentials. One exponential, of 16 a clock and SM, for 4 D operations."""
    here = predictions.here()
    if here is None:
        return None
    exponentials = shape.flops / (4 * shape.D) / (16 * here.clocks)
    return predictions.START + max(predictions.product(here, shape.flops), exponentials)


if __name__ == "__main__":
    run("Attention in CUDA, forward: errors and sectors, or times.", cpu, gpu, hopper=True)
