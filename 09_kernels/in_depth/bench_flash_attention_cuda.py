"""Attention in CUDA, forward: errors, requested bytes, and, on a Hopper GPU, time.

    python 09_kernels/in_depth/bench_flash_attention_cuda.py   on any machine: errors and sectors, emulated
    python 09_kernels/in_depth/bench_flash_attention_cuda.py --gpu   on a Hopper GPU: against the plain kernel in Triton
    python 09_kernels/in_depth/bench_flash_attention_cuda.py --gpu --dry --out DIR   the same on the CPU, tiny
    python 09_kernels/in_depth/bench_flash_attention_cuda.py --build      on a Hopper GPU: only compile what --gpu runs

First it has to agree with float64, in every tested order of its threads, and to request the predicted
sectors. On a GPU, at uneven sizes, and at each timed shape.
"""

import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import _cuda
import flash_attention_cuda as cuda
import torch
from _flash_verify import Yardstick, poisoned
from _interpreter import INTERPRETED
from bench_flash_kernels import (
    SHAPES_GPU,
    TINY,
    Call,
    Matmul,
    Measurement,
    Shape,
    as_fast,
    milliseconds,
    run,
    side_by_side,
    with_theirs,
)
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


DEVICE = "cpu" if INTERPRETED else "cuda"
TRITONS = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter has no bf16


def inputs_of(shape: Shape) -> tuple[Measurement, list[torch.Tensor], Call]:
    """The plain kernel's inputs; the same in bf16; and a call of the CUDA kernel with them."""
    one = Measurement(shape, TRITONS)
    given = [x.bfloat16() for x in one.given]
    return one, given, lambda: cuda.cuda_forward(*given[:3], causal=shape.causal)


def build() -> None:
    """Compile for `gpu`, in parallel: the source, and the plain kernel in Triton."""
    shapes = [SHAPES_GPU[0]._replace(B=1, S=256, D=D) for D in cuda.HEAD_DIMS]
    calls = [inputs_of(shapes[0])[2], *(Measurement(shape, TRITONS).forward() for shape in shapes)]
    for error in side_by_side(calls):
        if error:
            sys.exit(f"bench_flash_attention_cuda.py: {error}")


def gpu(folder: Path, limit: float) -> None:
    """Time the CUDA kernel next to the plain one in Triton and PyTorch's, on a Hopper GPU."""
    begun = time.monotonic()
    if not INTERPRETED:
        build()
    matmul = Matmul(TRITONS)
    table = Table(
        "09_flash_cuda_speed",
        "Attention in CUDA against the plain Triton kernel and PyTorch's, forward, bfloat16",
        [
            "shape",
            "plain, ms",
            "CUDA, ms",
            "times as fast",
            "times flash",
            "times cuDNN",
            "TFLOP/s",
            "of matmul",
            *predictions.COLUMNS,
        ],
        "Verified at uneven sizes, and at each shape that is timed. TFLOP/s count 4 · B · N · S² · D, half if causal. "
        "`of matmul`: share of the rate of a matrix product of 8192 cubed. All in turns, in the same rounds. "
        "Predicted: of products, exponentials and bytes from L2, side by side, the most.",
        folder,
    )
    for case in CASES:
        *sizes, causal, offset = case
        given = cuda.inputs(*sizes, DEVICE)
        with poisoned():
            found = cuda.cuda_forward(*given, causal=causal, offset=offset)
        error, of_lse = cuda.errors(*found, *given, causal, offset)
        if not (error <= 8e-3 and of_lse <= 1e-4):
            sys.exit(f"{case}: off by {error:.1e}, LSE by {of_lse:.1e}; nothing is timed")
    wrong = []
    for shape in [TINY[0]._replace(D=64)] if INTERPRETED else SHAPES_GPU:
        if table.rows and time.monotonic() > begun + 0.85 * limit:
            break
        one, given, call = inputs_of(shape)
        with poisoned():
            lines = Yardstick(given, shape.causal).failures(call()[:1])
        if lines:
            wrong.append(f"{shape}: wrong: {lines[0]}")
            table.add(str(shape), "n/a", f"wrong: {lines[0]}", *["n/a"] * (len(table.columns) - 3))
            continue
        times = with_theirs({"plain": one.forward(), "CUDA": call}, given, shape.causal, False, matmul)
        took = milliseconds(times, "CUDA")
        reached = f"{shape.flops / took.median / 1e9:.0f}" if not INTERPRETED else "n/a when emulated"
        here, (B, S, N, _, D, causal) = predictions.here(), shape
        expected = predictions.overlapped_attention(here, B, S, N, D, causal, "bf16")
        ratios = [as_fast(times, "CUDA", other) for other in ("plain", "flash", "cuDNN")]
        share = matmul.share(times, "CUDA", shape.flops)
        cells = predictions.cells(expected, took.median / 1e3)
        table.add(str(shape), milliseconds(times, "plain"), took, *ratios, reached, share, *cells)
    if wrong:
        sys.exit("bench_flash_attention_cuda.py: " + "; ".join(wrong))


if __name__ == "__main__":
    run("Attention in CUDA, forward: errors and sectors, or times.", cpu, gpu, build, hopper=True)
