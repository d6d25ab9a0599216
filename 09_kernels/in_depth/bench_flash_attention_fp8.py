"""Attention in e4m3, forward: the loss of accuracy, the saved bytes; on a Hopper GPU, the time.

    python 09_kernels/in_depth/bench_flash_attention_fp8.py   on any machine: errors and sectors, emulated
    python 09_kernels/in_depth/bench_flash_attention_fp8.py --gpu   on a Hopper GPU: against the same kernel in bf16
    python 09_kernels/in_depth/bench_flash_attention_fp8.py --gpu --dry --out DIR   the same program on the CPU, tiny
    python 09_kernels/in_depth/bench_flash_attention_fp8.py --build      on a Hopper GPU: only compile what --gpu runs

First it has to match the formula in e4m3 computed in float64, with equal bits in every tested order of its
threads, and to request the predicted sectors; only then is anything written. On a GPU, at uneven sizes, and
on two heads of each timed shape.
"""

import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import _cuda
import flash_attention_cuda as cuda
import flash_attention_fp8 as fp8
import torch
from _flash_verify import poisoned
from _interpreter import INTERPRETED
from bench_flash_kernels import SHAPES_GPU, TINY, Matmul, as_fast, in_turns, milliseconds, run, side_by_side
from flash_tiles import band, explicit_attention
from harness import predictions
from harness.ceilings import Table
from harness.report import write_result
from torch import Tensor

# B, S_q, S_k, N, N_kv, D, causal, offset
CASES = [(1, 200, 260, 2, 1, 64, True, 0), (1, 70, 560, 1, 1, 64, True, 490), (2, 129, 131, 2, 2, 128, True, 2)]
VERSIONS = {"one": dict(per_head=False), "apart": {}, "turned": dict(spread=True)}


def verify(device: str) -> None:
    """Exit unless the kernel computes its formula; on a CPU to a rounding of bf16, with counts."""
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
    """q, k and v, and the heads whose error is reported."""
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


DEVICE = "cpu" if INTERPRETED else "cuda"
LIMIT = 3e-2  # against the formula in e4m3, with sums of 14 bits in tensor cores


def build() -> None:
    """Compile the two sources for `gpu` in parallel."""
    given = cuda.inputs(1, 1, 1, 1, 1, 64, DEVICE)
    for error in side_by_side([lambda f=f: f(*given, causal=True) for f in (fp8.fp8_forward, cuda.cuda_forward)]):
        if error:
            sys.exit(f"bench_flash_attention_fp8.py: {error}")


def off_from_formula(out: Tensor, given: list[Tensor], causal: bool) -> float:
    """The error of the first K/V head of the first sequence, and of the last, with all query heads."""
    q, k, v = given
    G = q.shape[2] // k.shape[2]
    found = []
    for b, kv in {(0, 0), (len(q) - 1, k.shape[2] - 1)}:
        rows, head = slice(b, b + 1), slice(kv, kv + 1)
        heads = slice(kv * G, kv * G + G)  # each head has its own scales, so it can be computed alone
        want = fp8.in_float64(q[rows, :, heads], k[rows, :, head], v[rows, :, head], causal=causal)[0]
        found.append(fp8.off_by(out[rows, :, heads], want))
    return max(found) if all(off == off for off in found) else float("nan")


def gpu(folder: Path, limit: float) -> None:
    """Time the kernel in e4m3 next to bf16, on a Hopper GPU."""
    begun = time.monotonic()
    if not INTERPRETED:
        build()
    matmul = Matmul(torch.float16 if INTERPRETED else torch.bfloat16)
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
        "Verified at uneven sizes, and on two heads of each shape that is timed. TFLOP/s count 4 · B · N · S² · D, "
        "half if causal. Rounding: q, k, v to e4m3 (and v turned) by PyTorch, operation by operation, not in the times "
        "beside it. `of matmul`: share of the rate of a product of 8192 cubed in bf16. All alternate, in 20 rounds. "
        "Predicted: of products, exponentials and bytes from L2, side by side, the most.",
        folder,
    )
    verify(DEVICE)
    wrong = []
    for shape in [TINY[0]._replace(D=64)] if INTERPRETED else SHAPES_GPU:
        if table.rows and time.monotonic() > begun + 0.85 * limit:
            break
        q, k, v = cuda.inputs(shape.B, shape.S, shape.S, shape.N, shape.N_kv, shape.D, DEVICE)
        given = fp8.prepare(q, k, v)
        runs = {
            "bf16": lambda q=q, k=k, v=v, shape=shape: cuda.cuda_forward(q, k, v, causal=shape.causal),
            "e4m3": lambda given=given, shape=shape: fp8.attend(given, shape.S, causal=shape.causal),
            "rounding": lambda q=q, k=k, v=v: fp8.prepare(q, k, v),
            "matmul": matmul,
        }
        with poisoned():
            out = runs["e4m3"]()[0]
        off = off_from_formula(out, [q, k, v], shape.causal)
        if not off <= LIMIT or bool(out.isnan().any()):
            wrong.append(f"{shape}: wrong: {off:.1e} from the formula in e4m3, or NaN elsewhere")
            table.add(str(shape), "n/a", f"wrong: {off:.1e}", *["n/a"] * (len(table.columns) - 3))
            continue
        times = in_turns(runs)
        took = milliseconds(times, "e4m3")
        reached = f"{shape.flops / took.median / 1e9:.0f}" if not INTERPRETED else "n/a when emulated"
        here, (B, S, N, _, D, causal) = predictions.here(), shape
        expected = predictions.overlapped_attention(here, B, S, N, D, causal, "fp8")
        cells = predictions.cells(expected, took.median / 1e3)
        fast, share = as_fast(times, "e4m3", "bf16"), matmul.share(times, "e4m3", shape.flops)
        others = [milliseconds(times, name) for name in ("bf16", "e4m3", "rounding")]
        table.add(str(shape), *others, fast, reached, share, *cells)
    if wrong:
        sys.exit("bench_flash_attention_fp8.py: " + "; ".join(wrong))


if __name__ == "__main__":
    run("Attention in e4m3, forward: errors and sectors, or times.", cpu, gpu, build, hopper=True)
