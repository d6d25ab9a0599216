"""The warp-specialised forward pass: how exact, what the compiler makes of it, and, on a Hopper GPU, how fast.

    python 09_kernels/in_depth/bench_flash_attention_hopper.py   errors, and the binary beside the plain one
    python bench_flash_attention_hopper.py --gpu [--out DIR]   on a Hopper GPU: against the plain kernel
    python 09_kernels/in_depth/bench_flash_attention_hopper.py --gpu --dry --out DIR   the same program on the CPU, tiny

First it has to agree with the definition in float64, and the compiler must have divided the labour: twelve warps where
four were asked for. bench_flash_kernels.py --gpu compares both kernels with PyTorch's.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _interpreter import INTERPRETED
from bench_flash_kernels import (
    BINARY_COLUMNS,
    ERROR_COLUMNS,
    SHAPES_GPU,
    TINY,
    Measurement,
    binary_rows,
    error_rows,
    exact,
    matmul_rate,
    run,
    seconds,
)
from flash_attention_hopper import SPECIALISED, TILES
from flash_kernels import TRITON
from harness import predictions
from harness.ceilings import Table
from harness.report import write_result

COMPILED = [("float16", "64"), ("float16", "128"), ("bfloat16", "64"), ("bfloat16", "128")]


def cpu() -> None:
    rows = error_rows(SPECIALISED)
    plain = binary_rows(90, COMPILED, "--only", "forward")
    divided = binary_rows(90, COMPILED, "--only", "specialised")
    for row in divided:
        if row[4] != 12:
            sys.exit(f"{row[2]}, head dim {row[3]}: {row[4]} warps, and 12 should divide the labour")
    write_result(
        "09_flash_hopper",
        "The specialised kernel: largest relative error of output and gradients, in Triton's interpreter",
        ERROR_COLUMNS,
        rows,
        "Against float64, 70 tokens, 4 query and 2 K/V heads; the worst of a causal mask, a sliding window and none. "
        "Backward is that of flash_kernels.py, from this output and log-sum-exp.",
    )
    write_result(
        "09_flash_hopper_binaries",
        "The two forward kernels for sm_90, read from the binaries; no GPU is needed for it",
        BINARY_COLUMNS,
        [row for pair in zip(plain, divided, strict=True) for row in pair],
        "Registers of one thread, of 255 at most; for the specialised kernel the average over its twelve warps.",
    )


def gpu(folder: Path) -> None:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    rate = matmul_rate(dtype, 256 if INTERPRETED else 8192)
    table = Table(
        "09_flash_hopper_speed",
        f"The warp-specialised forward pass against the plain one, {str(dtype)[6:]}",
        ["shape", "plain, ms", "specialised, ms", "times as fast", "TFLOP/s", "of matmul", *predictions.COLUMNS],
        "Each with the tiles of its plan; bench_flash_kernels.py --gpu tries others. TFLOP/s count 4 · B · N · S² · D, "
        "half if causal. `of matmul`: share of the rate measured for a matrix product of 8192 cubed. Predicted from "
        "the SASS, for the specialised one (tests/harness/predictions.py).",
        folder,
    )
    for shape in TINY if INTERPRETED else SHAPES_GPU:
        one = Measurement(shape, dtype, rate)
        for version in (TRITON, SPECIALISED):
            exact(version, dtype, shape.D, 70 if INTERPRETED else 500)
        plain, took = seconds(one.forward(one.plan.forward)), seconds(one.specialised(TILES))
        reached = f"{shape.flops / took / 1e12:.0f}" if not INTERPRETED else "n/a when interpreted"
        cells = predictions.cells(one.predicted("forward", "specialised"), took)
        table.add(
            str(shape), plain * 1e3, took * 1e3, plain / took, reached, f"{shape.flops / took / rate:.2f}", *cells
        )


if __name__ == "__main__":
    run("The warp-specialised forward pass: errors and binaries, or times.", cpu, gpu, hopper=True)
