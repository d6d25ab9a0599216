"""The warp-specialised forward pass: how exact, what the compiler makes of it, and, on a Hopper GPU, how fast.

    python 09_kernels/in_depth/bench_flash_attention_hopper.py   errors, and the binary beside the plain one
    python bench_flash_attention_hopper.py --gpu [--out DIR]   on a Hopper GPU: against the plain kernel
    python 09_kernels/in_depth/bench_flash_attention_hopper.py --gpu --dry --out DIR   the same program on the CPU, tiny
    python bench_flash_attention_hopper.py --build             on a Hopper GPU: only compile what --gpu runs

First it has to agree with the definition in float64, and the compiler must have divided the labour: twelve warps where
four were asked for.

On a GPU every shape is verified and timed in a process of its own, which has 30 seconds. Warp specialisation is young,
and programs of it have been seen to hang (triton issue 8311) and to be wrong (issue 9728). A process that does not
answer is ended, its row says so, and no other shape is tried.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import flash_attention_hopper as hopper
import torch
from _flash_launch import Tiles
from _flash_verify import Yardstick, poisoned
from _interpreter import INTERPRETED
from bench_flash_kernels import (
    BINARY_COLUMNS,
    ERROR_COLUMNS,
    SHAPES_GPU,
    TINY,
    Call,
    Matmul,
    Measurement,
    as_fast,
    binary_rows,
    error_rows,
    first_line,
    in_turns,
    milliseconds,
    run,
    side_by_side,
)
from flash_attention_hopper import SPECIALISED, TILES, specialised_forward
from harness import predictions
from harness.ceilings import Table
from harness.report import Ratio, write_result

COMPILED = [("float16", "64"), ("float16", "128"), ("bfloat16", "64"), ("bfloat16", "128")]
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
SHAPES = TINY if INTERPRETED else SHAPES_GPU
OTHER_TILES = [] if INTERPRETED else [Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 3)]
LIMIT = 120.0 if INTERPRETED else 30.0  # seconds of one shape


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


# ------------------------------------------------------------------------------------------------------------- on a GPU


def specialised(one: Measurement, tiles: Tiles) -> Call:
    return lambda: specialised_forward(*one.given[:3], tiles=tiles, **one.mask)


class OnlyCompiled:
    """In place of a kernel: a launch compiles it, and does not start what might not end."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self.kernel.warmup, grid=grid)


def compile_specialised(ones: Sequence[Measurement]) -> None:
    """All sizes of tile side by side. What does not compile says so when it is called."""
    if INTERPRETED:
        return
    kernel, hopper.specialised_kernel = hopper.specialised_kernel, OnlyCompiled(hopper.specialised_kernel)
    try:
        side_by_side([specialised(one, tiles) for one in ones for tiles in (TILES, *OTHER_TILES)])
    finally:
        hopper.specialised_kernel = kernel


def build() -> None:
    """Compile what the processes below run. There is another binary where no tile is cut: without a mask."""
    shapes = [SHAPES_GPU[0]._replace(B=1, S=256, D=D, causal=causal) for D in (128, 64) for causal in (True, False)]
    ones = [Measurement(shape, DTYPE) for shape in shapes]
    compile_specialised(ones)
    side_by_side([one.forward() for one in ones])


def measure(index: int) -> dict:
    """In a process of its own: what is wrong with this shape, or how the fastest tiles compare with the plain kernel.

    {"wrong": a line}, or {"tiles": a name, "plain", "took": milliseconds, "fast", "share": ratios}, where each of the
    last four is [median, low, high].
    """
    one = Measurement(SHAPES[index], DTYPE)
    compile_specialised([one])
    yardstick, runs, wrong = Yardstick(one.given, one.shape.causal), {"plain": one.forward()}, []
    for tiles in (TILES, *OTHER_TILES):
        call = specialised(one, tiles)
        try:
            with poisoned():
                lines = yardstick.failures(call()[:1])
        except Exception as error:  # other tiles may not compile, or not fit
            lines = [first_line(error)]
        if lines:
            wrong.append(f"{tuple(tiles)}: {lines[0]}")
        else:
            runs[str(tuple(tiles))] = call
    if len(runs) == 1:
        return {"wrong": wrong[0]}
    print("\n".join(wrong), file=sys.stderr)
    matmul = Matmul(DTYPE)
    times = in_turns({**runs, "matmul": matmul})
    best = min(set(runs) - {"plain"}, key=lambda name: milliseconds(times, name).median)
    found = {
        "plain": milliseconds(times, "plain"),
        "took": milliseconds(times, best),
        "fast": as_fast(times, best, "plain"),
        "share": matmul.share(times, best, one.shape.flops),
    }
    return {"tiles": best} | {name: [ratio.median, ratio.low, ratio.high] for name, ratio in found.items()}


def child(index: int) -> list[str]:
    code = f"import json, bench_flash_attention_hopper as bench; print(json.dumps(bench.measure({index})))"
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {code}"]


def answer_of(command: Sequence[str], limit: float) -> dict:
    """What a process prints last, as JSON; {"wrong": why} if it fails; {"hangs": so} if it had to be ended."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may not let go of it at once
            process.communicate(timeout=10)
        return {"hangs": f"hangs: no answer within {limit:.0f} s"}
    print(err, end="", file=sys.stderr)
    if process.returncode:
        return {"wrong": (err.strip().splitlines() or ["no message"])[-1][:120]}
    return json.loads(out.splitlines()[-1])


def gpu(folder: Path, limit: float) -> None:
    begun = time.monotonic()
    table = Table(
        "09_flash_hopper_speed",
        f"The warp-specialised forward pass against the plain one, {str(DTYPE)[6:]}",
        [
            "shape",
            "plain, ms",
            "specialised, ms",
            "times as fast",
            "TFLOP/s",
            "of matmul",
            "tiles",
            *predictions.COLUMNS,
        ],
        "The fastest of three sizes of tile, each verified at its shape, in turns with the plain kernel and a matrix "
        "product of 8192 cubed; of its rate is `of matmul`. TFLOP/s count 4 · B · N · S² · D, half if causal. A shape "
        "has 30 s in a process of its own. Predicted from the SASS, for the specialised one with the tiles of its plan "
        "(tests/harness/predictions.py).",
        folder,
    )
    failed = []
    for index, shape in enumerate(SHAPES):
        if table.rows and time.monotonic() > begun + limit - LIMIT:
            break
        found = answer_of(child(index), LIMIT)
        if "took" not in found:
            why = found.get("hangs") or f"wrong: {found['wrong']}"
            table.add(str(shape), "n/a", why, *["n/a"] * 4, *predictions.cells(None, 0.0))
            failed.append(f"{shape}: {why}")
            if "hangs" in found:
                break
            continue
        plain, took, fast, share = (Ratio(*found[name]) for name in ("plain", "took", "fast", "share"))
        reached = f"{shape.flops / took.median / 1e9:.0f}" if not INTERPRETED else "n/a when interpreted"
        expected = predictions.attention(predictions.here(), "specialised", *shape[:3], shape.D, shape.causal)
        cells = predictions.cells(expected, took.median / 1e3)
        table.add(str(shape), plain, took, fast, reached, share, found["tiles"], *cells)
    if failed:
        sys.exit("bench_flash_attention_hopper.py: " + "; ".join(failed))


if __name__ == "__main__":
    run(
        "The warp-specialised forward pass: errors and binaries, or times.",
        cpu,
        gpu,
        build,
        "--seconds",
        "--build",
        hopper=True,
    )
