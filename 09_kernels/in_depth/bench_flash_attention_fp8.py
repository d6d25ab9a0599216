"""Attention in e4m3, forward: what 8 bits cost in accuracy and save in bytes; on a Hopper GPU, how fast.

    python 09_kernels/in_depth/bench_flash_attention_fp8.py   on any machine: errors and sectors, emulated
    python 09_kernels/in_depth/bench_flash_attention_fp8.py --gpu   on a Hopper GPU: against the same kernel in bf16
    python 09_kernels/in_depth/bench_flash_attention_fp8.py --gpu --dry --out DIR   the same program on the CPU, tiny

First it has to be what the formula in e4m3 gives in float64, with the same bits in every order of its threads that is
tried, and to ask for the sectors predicted; only then is anything written.
"""

import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import _cuda
import flash_attention_cuda as cuda
import flash_attention_fp8 as fp8
import torch
from _interpreter import INTERPRETED
from bench_flash_kernels import SHAPES_GPU, TINY, Shape, matmul_rate, run, seconds
from flash_tiles import band, explicit_attention
from harness import predictions
from harness.ceilings import Table
from harness.report import write_result
from torch import Tensor

# B, S_q, S_k, N, N_kv, D, causal, offset
CASES = [(1, 200, 260, 2, 1, 64, True, 0), (1, 70, 560, 1, 1, 64, True, 490), (2, 129, 131, 2, 2, 128, True, 2)]
VERSIONS = {"one": dict(per_head=False), "apart": {}, "turned": dict(spread=True)}


def verify(device: str) -> None:
    """Ends the program unless the kernel computes its formula; on the CPU to a rounding of bf16, and counted."""
    for case in CASES:
        *sizes, causal, offset = case
        given, mask = cuda.inputs(*sizes, device), dict(causal=causal, offset=offset)
        limit = 3e-3 if device == "cpu" else 3e-2  # on a GPU also sums of 14 bits
        for name, how in VERSIONS.items():
            with fp8.accumulator_bits(0) if device == "cpu" else nullcontext():
                off = fp8.off_by(fp8.fp8_forward(*given, **mask, **how)[0], fp8.in_float64(*given, **mask, **how)[0])
            if not off <= limit:
                sys.exit(f"{case}, {name}: {off:.1e} from the formula in e4m3, {limit} is allowed")
        if device == "cpu":
            B, S_q, S_k, N, _, D = sizes
            orders = (_cuda.FORWARD, _cuda.REVERSE, _cuda.ahead(0), _cuda.ahead(4), _cuda.racing(1))
            first, *others = [fp8.fp8_forward(*given, **mask, order=order) for order in orders]
            if not all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True)):
                sys.exit(f"{case}: the bits depend on the order of the threads")
            predicted = fp8.sectors(B, S_q, S_k, N, D, band(S_q, S_k, causal, None, offset)[1])
            counted = fp8.count(fp8.prepare(*given), S_k, **mask)
            if counted != predicted:
                sys.exit(f"{case}: {counted} sectors, predicted {predicted}")


def kinds(D: int) -> dict[str, tuple[list[Tensor], slice]]:
    """q, k and v, and the heads whose error is of interest."""
    q, k, v = cuda.inputs(1, 200, 200, 4, 2, D, "cpu")
    rare, column = ([fp8.with_outliers(x, kind, seed) for seed, x in enumerate((q, k))] for kind in ("rare", "column"))
    loud = v * torch.tensor([1.0, 3e4])[:, None].bfloat16()  # query heads 0 and 1 share the first head of v
    return {
        "normal": ([q, k, v], slice(None)),
        "one number in a thousand 10 times as wide": ([*rare, v], slice(None)),
        "a column of q and k larger by 10": ([*column, v], slice(None)),
        "a second head of v 30,000 times as large": ([q, k, loud], slice(2)),
    }


def cpu() -> None:
    verify("cpu")
    used = _cuda.resources(fp8.SOURCE, "sm_90a")["attention_fp8"] if shutil.which("nvcc") else None
    if used and used.stack + used.spills:
        sys.exit(f"{used.stack} bytes of stack: numbers lie in local memory")
    rows = []
    for D in cuda.HEAD_DIMS:
        for name, (given, heads) in kinds(D).items():
            want = explicit_attention(*(x.double() for x in given), causal=True)[:, :, heads]
            outs = [cuda.cuda_forward(*given, causal=True)[0]]
            outs += [fp8.fp8_forward(*given, causal=True, **how)[0] for how in VERSIONS.values()]
            off = [f"{fp8.off_by(out[:, :, heads], want):.1e}" for out in outs]
            rows.append([name, D, *off, cuda.sectors(1, 200, 200, 4, D, 0), fp8.sectors(1, 200, 200, 4, D, 0)])
    write_result(
        "09_flash_fp8",
        "Attention in CUDA, emulated: errors against float64 in bf16 and in e4m3, and sectors of 32 bytes asked for",
        ["q, k, v", "head dim", "bf16", "e4m3, one scale", "a scale a head", "and rotated", "sectors, bf16", "e4m3"],
        rows,
        "200 tokens, causal, 4/2 heads. Root of the mean square, relative; where a head of v is so large, of the other "
        "one. The same bits in five orders of the warps. With exact sums the kernel is off from its formula by a "
        "rounding to bf16; the errors are those of sums of 14 bits. "
        + (f"nvcc for sm_90a: {used.registers} registers, {used.stack} bytes of stack. " if used else "")
        + "Not timed.",
    )


def gpu(folder: Path) -> None:
    """The kernel in e4m3 beside the one in bf16, on a Hopper GPU."""
    device = "cpu" if INTERPRETED else "cuda"
    rate = matmul_rate(torch.float16 if INTERPRETED else torch.bfloat16, 256 if INTERPRETED else 8192)
    table = Table(
        "09_flash_fp8_speed",
        "Attention in CUDA in e4m3 against the same in bf16, forward",
        [
            "shape",
            "bf16, ms",
            "e4m3, ms",
            "rounding, ms",
            "times as fast",
            "TFLOP/s",
            "of matmul",
            *predictions.COLUMNS,
        ],
        "Verified first at uneven sizes. TFLOP/s count 4 · B · N · S² · D, half if causal. Rounding: q, k, v to e4m3 "
        "(and v turned) by PyTorch, operation by operation, not in the times beside it. `of matmul`: share of the rate "
        "of a product of 8192 cubed in bf16. Predicted: the larger of products and exponentials, side by side.",
        folder,
    )
    verify(device)
    for shape in [TINY[0]._replace(D=64)] if INTERPRETED else SHAPES_GPU:
        q, k, v = cuda.inputs(shape.B, shape.S, shape.S, shape.N, shape.N_kv, shape.D, device)
        given = fp8.prepare(q, k, v)
        plain = seconds(lambda q=q, k=k, v=v, shape=shape: cuda.cuda_forward(q, k, v, causal=shape.causal))
        took = seconds(lambda given=given, shape=shape: fp8.attend(given, shape.S, causal=shape.causal))
        turning = seconds(lambda q=q, k=k, v=v: fp8.prepare(q, k, v))
        reached = f"{shape.flops / took / 1e12:.0f}" if not INTERPRETED else "n/a when emulated"
        cells = predictions.cells(expected(shape), took)
        share = f"{shape.flops / took / rate:.2f}"
        table.add(str(shape), plain * 1e3, took * 1e3, turning * 1e3, plain / took, reached, share, *cells)


def expected(shape: Shape) -> float | None:
    """Seconds: the larger of products in fp8 and exponentials, of which an SM makes 16 a clock."""
    here = predictions.here()
    if here is None or (products := predictions.product(here, shape.flops, "fp8")) is None:
        return None
    return max(products, predictions.START + shape.flops / (4 * shape.D) / (16 * here.clocks))


if __name__ == "__main__":
    run("Attention in e4m3, forward: errors and sectors, or times.", cpu, gpu, hopper=True)
