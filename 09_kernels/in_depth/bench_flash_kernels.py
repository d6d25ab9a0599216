"""FlashAttention in Triton: what the compiler makes of it, how exact it is, and, on a GPU, how fast.

    python 09_kernels/in_depth/bench_flash_kernels.py                      errors, and the binaries for sm_80 and sm_90
    python bench_flash_kernels.py --gpu [--out DIR]   on a GPU: against PyTorch's flash and cuDNN kernels
    python 09_kernels/in_depth/bench_flash_kernels.py --gpu --dry --out DIR    the same program on the CPU, tiny

Every version and every size of tile first has to agree with the definition in float64; one that does not, or does not
compile, is left out with a line that says so, and the default plan has to pass or nothing is written. On a GPU times
are from events, each run after the L2 cache has been filled with something else, medians of many.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _flash_launch import Plan, Tiles, plan_of
from _interpreter import INTERPRETED
from flash_attention_hopper import TILES, specialised_forward
from flash_kernels import TRITON, triton_backward, triton_forward
from flash_tiles import Version, explicit_attention, step, torch_attention
from flash_tiles import error as error_of
from harness.report import ROOT, write_result
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).resolve().parent
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [("float16", "64"), ("float16", "128"), ("bfloat16", "256"), ("float32", "64"), ("float32", "128")]

# What else may be fastest: tried by --gpu, after the plan's own.
FORWARD = [Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 3)]
SPECIALISED_TILES = [Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 3)]
DQ = [Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 2)]
DKDV = [Tiles(32, 128, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 3), Tiles(128, 128, 8, 1)]


def inputs(B: int, S: int, N: int, N_kv: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(S)
    shapes = [(B, S, heads, D) for heads in (N, N_kv, N_kv, N)]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def errors(version: Version, dtype: torch.dtype, D: int, S: int) -> tuple[float, float]:
    """Ours and PyTorch's, against float64: the worst of a causal mask, a window, and no mask with no ragged tile."""
    found = []
    whole = S // 128 * 128 or 64
    for length, causal, window in ((S, True, None), (S, True, S // 3), (whole, False, None)):
        mask = dict(causal=causal, window=window, offset=0)
        given = inputs(2, length, 4, 2, D, dtype)
        q, k, v, dout = given
        want = step(lambda q, k, v, mask=mask: explicit_attention(q, k, v, **mask), *(x.double() for x in given))
        theirs = step(lambda q, k, v, mask=mask: torch_attention(q, k, v, **mask), *given)
        out, lse = version.forward(q, k, v, **mask, dtype=dtype)
        got = [out, *version.backward(dout, q, k, v, out, lse, **mask, dtype=dtype)]
        found.append((error_of(got, want), error_of(theirs, want)))
    return max(found) if all(e == e for e, _ in found) else (float("nan"), 0.0)


def exact(version: Version, dtype: torch.dtype, D: int, S: int) -> tuple[float, float]:
    """The same; SystemExit unless ours is at most twice PyTorch's, or a few roundings."""
    ours, theirs = errors(version, dtype, D, S)
    floor = (8 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps
    if not ours <= max(2 * theirs, floor):
        sys.exit(f"head dim {D}, {dtype}: off by {ours:.1e}, PyTorch by {theirs:.1e}; nothing is measured")
    return ours, theirs


ERROR_COLUMNS = ["dtype", "head dim", "ours", "PyTorch's on this CPU", "ratio"]
BINARY_COLUMNS = ["kernel", "GPU", "dtype", "head dim", "warps", "registers", "spilled bytes", "shared KiB"]
BINARY_COLUMNS += ["products", "loads"]


def error_rows(version: Version) -> list[list]:
    rows = []
    for dtype in (torch.float32, torch.float16):
        for D in (32, 64):
            ours, theirs = exact(version, dtype, D, 70)
            rows.append([str(dtype)[6:], D, f"{ours:.1e}", f"{theirs:.1e}", f"{ours / theirs:.2f}"])
    return rows


def binary_rows(capability: int, shapes: list[tuple[str, str]], *which: str) -> list[list]:
    """What `_flash_compile.py` reads from the binaries, in the order of BINARY_COLUMNS."""
    words = [str(capability), *(word for shape in shapes for word in shape), *which]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, HERE / "_flash_compile.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode:
        sys.exit(f"sm_{capability}: {done.stderr.strip().splitlines()[-1]}")
    rows = []
    for b in (json.loads(line) for line in done.stdout.splitlines()):
        row = [b["kernel"], f"sm_{capability}", b["dtype"], b["D"], b["warps"], b["registers"], b["spilled"]]
        row += [f"{b['shared'] / 1024:.0f} of {b['shared_limit'] // 1024}"]
        row += ["wgmma" if b["wgmma"] else "mma" if b["mma"] else "fma", "TMA" if b["tma"] else "addresses"]
        rows.append(row)
    return rows


def cpu() -> None:
    """Two tables that need no GPU: errors in the interpreter, and the compiled kernels."""
    rows = error_rows(TRITON)
    binaries = [row for sm in (80, 90) for row in binary_rows(sm, SHAPES, "--but", "specialised") if row[0] != "delta"]
    write_result(
        "09_flash_errors",
        "flash_kernels.py: largest relative error of output and gradients against float64, in Triton's interpreter",
        ERROR_COLUMNS,
        rows,
        "70 tokens, 4 query and 2 K/V heads; the worst of a causal mask, a sliding window and none.",
    )
    write_result(
        "09_flash_binaries",
        "What the compiler made of each kernel, read from the binaries; no GPU is needed for it",
        BINARY_COLUMNS,
        binaries,
        "Registers of one thread, of 255 at most.",
    )


# ------------------------------------------------------------------------------------------------------------- on a GPU


def seconds(function: Callable[[], object], repeats: int = 25) -> float:
    """Median; on a GPU between events, with a cold L2 cache."""
    if INTERPRETED:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=DEVICE)  # several times the L2 cache
    for _ in range(3):
        function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in events)


def matmul_rate(dtype: torch.dtype, size: int) -> float:
    """FLOP/s of PyTorch's matrix product, to compare with."""
    a, b = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b)


def fastest(what: str, tried: dict[str, tuple[Callable[[], Version], Callable]], check: Callable) -> tuple:
    """The fastest of `tried` that is right: (name, its seconds, those of the first, which has to be right)."""
    found = {}
    for name, (version, function) in tried.items():
        try:
            check(version())
            found[name] = seconds(function)
        except (SystemExit, Exception) as reason:  # a size of tile may not compile or not fit; the others go on
            if not found:
                raise
            line = (str(reason).strip() or type(reason).__name__).splitlines()[0][:120]
            print(f"{what}, {name}: left out ({line})", flush=True)
    best = min(found, key=found.__getitem__)
    print(f"{what}: {best}; " + ", ".join(f"{n} {s * 1e3:.3f} ms" for n, s in found.items()), flush=True)
    return best, found[best], next(iter(found.values()))


def theirs(backend: SDPBackend, given: list[Tensor], causal: bool) -> tuple[float, float] | None:
    """Seconds of forward and of backward of one of PyTorch's kernels, or None where it is not available."""
    q, k, v, dout = (x.detach().transpose(1, 2) for x in given)  # [B, S, N, D] -> [B, N, S, D], as it wants them
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
    try:
        with sdpa_kernel(backend):
            out = sdpa(*leaves)
            forward = seconds(lambda: sdpa(*leaves))
            backward = seconds(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    except RuntimeError as reason:
        print(f"{backend.name}: not available ({str(reason).splitlines()[0][:100]})", flush=True)
        return None
    return forward, backward


def measure(dtype: torch.dtype, B: int, S: int, N: int, N_kv: int, D: int, causal: bool, rate: float) -> list[list]:
    """The rows of one shape, forward and backward."""
    given = inputs(B, S, N, N_kv, D, dtype)
    q, k, v, dout = given
    check = partial(exact, dtype=dtype, D=D, S=70 if INTERPRETED else 500)
    plan, mask = plan_of(q), dict(causal=causal, dtype=dtype)
    trials: dict = {}
    for tiles in [plan.forward] if INTERPRETED else [plan.forward, *FORWARD]:
        forward = partial(triton_forward, plan=plan._replace(forward=tiles))
        trials[f"plain {tuple(tiles)}"] = (
            lambda f=forward: Version(f, triton_backward),
            lambda f=forward: f(q, k, v, **mask),
        )
    if INTERPRETED or torch.cuda.get_device_capability()[0] == 9:
        for tiles in [TILES] if INTERPRETED else [TILES, *SPECIALISED_TILES]:
            forward = partial(specialised_forward, tiles=tiles)
            trials[f"specialised {tuple(tiles)}"] = (
                lambda f=forward: Version(f, triton_backward),
                lambda f=forward: f(q, k, v, **mask),
            )
    shape = f"{S} tokens, D {D}, {'causal' if causal else 'full'}"
    best, forward_time, forward_default = fastest(f"forward, {shape}", trials, check)

    out, lse = triton_forward(q, k, v, **mask)

    def backwards(plans: dict[str, Plan]) -> dict:
        made = {n: partial(triton_backward, plan=p) for n, p in plans.items()}
        return {
            n: (lambda f=f: Version(triton_forward, f), lambda f=f: f(dout, q, k, v, out, lse, **mask))
            for n, f in made.items()
        }

    plans = {f"dq {tuple(t)}": plan._replace(dq=t) for t in ([plan.dq] if INTERPRETED else [plan.dq, *DQ])}
    best_dq, _, backward_default = fastest(f"backward, {shape}", backwards(plans), check)
    plan = plans[best_dq]
    tried = [plan.dkdv] if INTERPRETED else [plan.dkdv, *DKDV]
    plans = {f"dk, dv {tuple(t)}": plan._replace(dkdv=t) for t in tried}
    best_dkdv, backward_time, _ = fastest(f"backward, {shape}", backwards(plans), check)

    flash, cudnn = (theirs(b, given, causal) for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION))
    flops = 4 * B * N * S * S * D * (0.5 if causal else 1.0)
    rows = []
    for index, (name, mine, default, work, how) in enumerate(
        (
            ("forward", forward_time, forward_default, flops, best),
            ("backward", backward_time, backward_default, 2.5 * flops, f"{best_dq}; {best_dkdv}"),
        )
    ):
        ratios = [f"{other[index] / mine:.2f}" if other else "n/a" for other in (flash, cudnn)]
        rows.append(
            [
                name,
                shape,
                f"{mine * 1e3:.3f}",
                f"{default / mine:.2f}",
                f"{work / mine / 1e12:.0f}" if not INTERPRETED else "n/a on CPU",
                f"{work / mine / rate:.2f}",
                *ratios,
                how,
            ]
        )
    return rows


def gpu(folder: Path) -> None:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    shapes = [(1, 70, 2, 1, 32, True)]
    if not INTERPRETED:
        shapes = [(2, 8192, 16, 16, D, causal) for D in (64, 128) for causal in (True, False)]
        shapes += [(2, 8192, 32, 8, 128, True), (16, 1024, 16, 16, 128, True)]
    rate = matmul_rate(dtype, 256 if INTERPRETED else 8192)
    rows = [row for shape in shapes for row in measure(dtype, *shape, rate=rate)]
    write_result(
        "09_flash_speed",
        f"FlashAttention in Triton, {str(dtype)[6:]}, against PyTorch's flash and cuDNN kernels",
        ["pass", "shape", "ms", "speed-up by tuning", "TFLOP/s", "of matmul", "times flash", "times cuDNN", "tiles"],
        rows,
        "TFLOP/s count 4 · B · N · S² · D forward (half if causal) and 2.5 times that backward, whatever a kernel "
        "computes twice. `of matmul`: share of the rate measured for a matrix product of 8192 cubed. `times flash`: "
        "how many times as fast as SDPA's flash back end. Tiles: rows, columns, warps, stages.",
        folder=folder,
    )


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--gpu", action="store_true", help="time on a GPU")
    parser.add_argument("--dry", action="store_true", help="with --gpu: the same on the CPU, tiny; needs --out")
    parser.add_argument("--out", type=Path, help="folder for the results; default results/")
    parser.add_argument("--figures", action="store_true", help="draw the figures again; here there are none")
    args = parser.parse_args()
    if args.figures:
        return
    if not args.gpu:
        cpu()
        return
    if INTERPRETED and not (args.dry and args.out):
        parser.exit(2, "bench_flash_kernels.py: --gpu finds no GPU; on a CPU use --gpu --dry --out DIR\n")
    gpu(args.out or ROOT / "results")


if __name__ == "__main__":
    main()
