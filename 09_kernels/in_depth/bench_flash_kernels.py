"""FlashAttention in Triton: its binaries, its errors, and, on a GPU, its time.

    python 09_kernels/in_depth/bench_flash_kernels.py                      errors, and the binaries for sm_80 and sm_90
    python bench_flash_kernels.py --gpu [--out DIR]   on a GPU: against PyTorch's flash and cuDNN kernels
    python 09_kernels/in_depth/bench_flash_kernels.py --gpu --dry --out DIR    the same program on the CPU, tiny
    python bench_flash_kernels.py --build             on a GPU: only compile what --gpu will run

Every shape is verified before it is timed, with the timed binary and inputs (_flash_verify.py); a failure
gets a row of its own. Other tile sizes first have to agree with the plan's; those that do not, or do not
compile, are left out with a message. Compared runs alternate, one of each per round, with a cold L2 cache,
and a ratio is the median over rounds.

The fake GPU of tests/fake_device compiles as in a launch, so a machine without a GPU can fill Triton's cache:
    FAKE_GPUS=1 TRITON_INTERPRET=0 PYTHONPATH=tests/fake_device python bench_flash_kernels.py --build
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _bench_options import bench_options
from _flash_launch import Tiles, plan_of
from _flash_verify import Yardstick, poisoned
from _interpreter import INTERPRETED, triton
from flash_kernels import TRITON, triton_backward, triton_forward
from flash_tiles import Version, explicit_attention, step, torch_attention
from flash_tiles import error as error_of
from harness import predictions
from harness.ceilings import Table, device_here, paired_seconds, quotient
from harness.report import ROOT, Ratio, ratio_of, write_result
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).resolve().parent
DEVICE = device_here().type
SHAPES = [("float16", "64"), ("float16", "128"), ("bfloat16", "256"), ("float32", "64"), ("float32", "128")]

# Candidates: those that are not the plan's own are tried by --gpu after it.
FORWARD = [Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(128, 128, 8, 3)]
DKDV = [Tiles(32, 128, 8, 3), Tiles(64, 64, 8, 2), Tiles(64, 128, 8, 1), Tiles(64, 128, 8, 3)]
SEVEN = "backward, seven products"


def inputs(B: int, S: int, N: int, N_kv: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(S)
    shapes = [(B, S, heads, D) for heads in (N, N_kv, N_kv, N)]
    return [torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes]


def errors(version: Version, dtype: torch.dtype, D: int, S: int) -> tuple[float, float]:
    """Our and PyTorch's worst errors of a causal mask, a window, and no mask with only full tiles."""
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


def binary_rows(capability: int, shapes: list[tuple[str, str]]) -> list[list]:
    """The output of `_flash_compile.py` for the binaries, in the order of BINARY_COLUMNS."""
    words = [str(capability), *(word for shape in shapes for word in shape)]
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
    binaries = [row for sm in (80, 90) for row in binary_rows(sm, SHAPES) if row[0] != "delta"]
    spilled = [" ".join(map(str, row[:4])) for row in binaries if row[BINARY_COLUMNS.index("spilled bytes")]]
    if spilled := [name for name in spilled if not name.startswith("forward sm_90")]:  # plan_for says why these may
        sys.exit(f"{', '.join(spilled)}: numbers lie in local memory")
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
        "Registers of one thread, of 255 at most. Spilled: with what is on its stack. dkdvdq: five products; dq, dkdv: "
        "seven.",
    )


# ------------------------------------------------------------------------------------------------------------- on a GPU

Call = Callable[[], tuple[Tensor, ...]]
Times = dict[str, list[float]]  # seconds of each run, per round


def in_turns(runs: dict[str, Callable[[], object]], repeats: int = 20) -> Times:
    return paired_seconds(torch.device(DEVICE), runs, 2 if INTERPRETED else repeats)


def as_fast(times: Times, this: str, other: str) -> Ratio | str:
    """The speed of `this` over the speed of the other."""
    return quotient(times[other], times[this]) if other in times else "n/a"


def milliseconds(times: Times, name: str) -> Ratio:
    return ratio_of([1e3 * seconds for seconds in times[name]])


class Matmul:
    """PyTorch's matmul of 8192 cubed, for comparison."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.size = 256 if INTERPRETED else 8192
        self.a, self.b = (torch.randn(self.size, self.size, device=DEVICE).to(dtype) for _ in range(2))

    def __call__(self) -> Tensor:
        return self.a @ self.b

    def share(self, times: Times, name: str, flops: float) -> Ratio:
        """The rate of a run with `flops` over the rate of the matmul, in the same rounds."""
        return ratio_of(
            [flops / mine / (2 * self.size**3 / its) for mine, its in zip(times[name], times["matmul"], strict=True)]
        )


def side_by_side(calls: Iterable[Callable[[], object]]) -> list[Exception | None]:
    """Call all of them in threads, to compile their kernels in parallel. Returns what each raised."""

    def outcome(call: Callable[[], object]) -> Exception | None:
        try:
            torch.zeros(1, device=DEVICE)  # a new thread has no GPU context, which a descriptor needs
            call()
        except Exception as error:  # a tile size may not compile or fit: the others continue
            return error
        return None

    threads = 1  # the interpreter has one global state
    if not INTERPRETED:
        triton.runtime.driver.active.get_current_target()  # initialises the driver once, not in each thread
        threads = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(outcome, calls))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return found


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def theirs(backend: SDPBackend, given: list[Tensor], causal: bool) -> tuple[Call, Call] | None:
    """Forward and backward of one of PyTorch's kernels, or None if not available."""
    q, k, v, dout = (x.detach().transpose(1, 2) for x in given)  # [B, S, N, D] -> [B, N, S, D]
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)

    try:
        out = forward()
        backward = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        backward()
    except RuntimeError as reason:
        print(f"{backend.name}: not available ({first_line(reason)})", flush=True)
        return None
    return forward, backward


def with_theirs(ours: dict[str, Call], given: list[Tensor], causal: bool, backward: bool, matmul: Matmul) -> Times:
    """Seconds of our runs, PyTorch's two kernels and a matmul, all alternating."""
    runs: dict[str, Callable[[], object]] = dict(ours)
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        if pair := theirs(backend, given, causal):
            runs[name] = pair[backward]
    return in_turns(runs | {"matmul": matmul})


class Shape(NamedTuple):
    B: int
    S: int
    N: int
    N_kv: int
    D: int
    causal: bool

    def __str__(self) -> str:
        heads = "" if self.N_kv == self.N else f", {self.N_kv} K/V heads"
        return f"{self.S} tokens, D {self.D}{heads}, {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> float:
        return 4 * self.B * self.N * self.S**2 * self.D * (0.5 if self.causal else 1.0)


# The target shape first; then the other head dim, no mask, shared K/V heads, short sequences. All with the
# plan's tiles, then the first two again with the best of several.
SHAPES_GPU = [Shape(2, 8192, 16, 16, D, causal) for causal in (True, False) for D in (128, 64)]
SHAPES_GPU += [Shape(2, 8192, 32, 8, 128, True), Shape(16, 1024, 16, 16, 128, True)]
TINY = [Shape(1, 40, 2, 1, 32, True)]
SPEED_COLUMNS = ["pass", "shape", "ms", "speed-up by tuning", "TFLOP/s", "of matmul", "times flash", "times cuDNN"]
SPEED_COLUMNS += ["tiles", *predictions.COLUMNS]


class Measurement:
    """One shape: its inputs, and calls of the kernels."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.given = inputs(*shape[:5], dtype)
        self.plan = plan_of(self.given[0])
        self.mask = dict(causal=shape.causal, dtype=dtype)

    def forward(self, tiles: Tiles | None = None) -> Call:
        plan = self.plan._replace(forward=tiles or self.plan.forward)
        return lambda: triton_forward(*self.given[:3], plan=plan, **self.mask)

    def backward(self, saved: Sequence[Tensor], dkdv: Tiles | None = None, repeatable: bool = False) -> Call:
        """`saved`: the output and the LSE of the forward pass."""
        plan = self.plan._replace(dkdv=dkdv or self.plan.dkdv)
        q, k, v, dout = self.given
        return lambda: triton_backward(dout, q, k, v, *saved, plan=plan, repeatable=repeatable, **self.mask)

    def anything_saved(self) -> tuple[Tensor, Tensor]:
        """A stand-in for output and LSE, to compile the backward pass in advance."""
        q = self.given[0]
        return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=q.device)

    def kernels(self) -> list[Call]:
        """Everything that `rows` runs."""
        saved = self.anything_saved()
        return [self.forward(), self.backward(saved), self.backward(saved, repeatable=True)]

    def predicted(self, which: str) -> float | None:
        B, S, N, _, D, causal = self.shape
        kernels = {"forward": ["forward"], "backward": ["dkdvdq"], SEVEN: ["dq", "dkdv"]}[which]
        here = predictions.here()
        found = [predictions.attention(here, kernel, B, S, N, D, causal) for kernel in kernels]
        if which != "forward":  # delta: reads dout and out
            found.append(predictions.moved(here, 2 * B * S * N * D * self.dtype.itemsize))
        if which == "backward":  # dq in fp32: writes zeros; reads and rounds the result
            found.append(predictions.moved(here, B * S * N * D * (4 + 4 + self.dtype.itemsize), 2))
        return None if None in found else sum(found)

    def row(self, which: str, times: Times, run: str, default: str, tiles: str, matmul: Matmul) -> list:
        work = self.shape.flops * (1 if which == "forward" else 2.5)
        took = milliseconds(times, run)
        rate = f"{work / took.median / 1e9:.0f}" if not INTERPRETED else "n/a when interpreted"
        cells = [which, str(self.shape), took, as_fast(times, run, default), rate, matmul.share(times, run, work)]
        ratios = [as_fast(times, run, other) for other in ("flash", "cuDNN")]
        return [*cells, *ratios, tiles, *predictions.cells(self.predicted(which), took.median / 1e3)]

    def rows(self, matmul: Matmul) -> list[list]:
        """With the plan's tiles: verified at this shape, then timed next to PyTorch's."""
        yardstick = Yardstick(self.given, self.shape.causal)
        with poisoned():
            saved = self.forward()()
            backward = {"backward": self.backward(saved), SEVEN: self.backward(saved, repeatable=True)}
            results = {name: call() for name, call in backward.items()}
        wrong = {name: yardstick.failures([saved[0], *gradients]) for name, gradients in results.items()}
        wrong["forward"] = yardstick.failures(saved[:1])
        del yardstick, results
        rows = []
        for runs in ({"forward": self.forward()}, backward):
            right = {name: call for name, call in runs.items() if not wrong[name]}
            for name in set(runs) - set(right):
                rows.append([name, str(self.shape), f"wrong: {wrong[name][0]}", *["n/a"] * (len(SPEED_COLUMNS) - 3)])
            if right:
                times = with_theirs(right, self.given, self.shape.causal, "forward" not in runs, matmul)
                rows += [self.row(name, times, name, name, "the plan's", matmul) for name in right]
        return rows

    def tuned(self, which: str, tried: dict[str, Call], default: Call, matmul: Matmul) -> list:
        """The fastest of the default and of `tried`, each compared with the default before it is timed."""
        expected, runs = default(), {"the plan's": default}
        for (name, call), error in zip(tried.items(), side_by_side(tried.values()), strict=True):
            try:
                if error:
                    raise error
                off = error_of(list(call()), list(expected))
                if not off <= 2 * torch.finfo(expected[0].dtype).eps:  # each has a rounding error of its own
                    raise ArithmeticError(f"differs from the plan's by {off:.1e}")
                runs[name] = call
            except Exception as reason:
                print(f"{which}, {self.shape}, {name}: left out ({first_line(reason)})", flush=True)
        times = with_theirs(runs, self.given, self.shape.causal, which != "forward", matmul)
        best = min(runs, key=lambda name: milliseconds(times, name).median)
        line = ", ".join(f"{name} {milliseconds(times, name).median:.3f} ms" for name in runs)
        print(f"{which}, {self.shape}: {best}; {line}", flush=True)
        return self.row(which, times, best, "the plan's", best, matmul)

    def tuned_rows(self, matmul: Matmul) -> list[list]:
        saved = self.forward()()
        of_forward, of_backward = ([Tiles(16, 16)], []) if INTERPRETED else (FORWARD, DKDV)
        forward = {str(tuple(t)): self.forward(t) for t in of_forward if t != self.plan.forward}
        backward = {str(tuple(t)): self.backward(saved, t) for t in of_backward if t != self.plan.dkdv}
        side_by_side([*forward.values(), *backward.values()])  # all in parallel
        return [
            self.tuned("forward", forward, self.forward(), matmul),
            self.tuned("backward", backward, self.backward(saved), matmul),
        ]


def build() -> None:
    """Compile for `gpu`, in parallel. No kernel is specialised on a length, so short inputs suffice."""
    shapes = [] if INTERPRETED else [SHAPES_GPU[0]._replace(B=1, S=256, D=D) for D in (128, 64)]
    for error in side_by_side([call for shape in shapes for call in Measurement(shape, torch.bfloat16).kernels()]):
        if error:
            sys.exit(f"bench_flash_kernels.py: {first_line(error)}")


def gpu(folder: Path, limit: float) -> None:
    begun, dtype = time.monotonic(), torch.float16 if INTERPRETED else torch.bfloat16
    build()
    print(f"compiled in {time.monotonic() - begun:.1f} s", flush=True)
    matmul = Matmul(dtype)
    table = Table(
        "09_flash_speed",
        f"FlashAttention in Triton, {str(dtype)[6:]}, against PyTorch's flash and cuDNN kernels",
        SPEED_COLUMNS,
        "TFLOP/s count 4 · B · N · S² · D forward (half if causal) and 2.5 times that backward, whatever a kernel "
        "computes twice. `of matmul`: share of the rate of a matrix product of 8192 cubed in the same rounds. `times "
        "flash`: how many times as fast as SDPA's flash back end, in the same rounds. Each verified at its shape. "
        "Tiles: rows, columns, warps, stages. Predicted from the SASS of the plan's tiles "
        "(tests/harness/predictions.py). A shape's later rows: the best of several tiles.",
        folder,
    )
    shapes, wrong = TINY if INTERPRETED else SHAPES_GPU, []
    for shape in shapes:
        if table.rows and time.monotonic() > begun + 0.6 * limit:
            break
        for row in Measurement(shape, dtype).rows(matmul):
            table.add(*row)
            wrong += [f"{row[0]}, {row[1]}: {row[2]}"] if str(row[2]).startswith("wrong") else []
    for shape in shapes[:2]:  # compiles eight kernels for each
        if wrong or time.monotonic() > begun + 0.75 * limit:
            break
        for row in Measurement(shape, dtype).tuned_rows(matmul):
            table.add(*row)
    if wrong:
        sys.exit("bench_flash_kernels.py: " + "; ".join(wrong))


def run(
    about: str,
    cpu: Callable[[], None],
    gpu: Callable[[Path, float], None],
    build: Callable[[], None],
    hopper: bool = False,
) -> None:
    """The command line of FlashAttention's benchmarks."""
    names = ("--gpu", "--dry", "--out", "--seconds", "--build")
    given = bench_options(about, *names, triton=True, hopper=hopper)
    if given.build:
        build()
    elif given.gpu:
        gpu(given.out or ROOT / "results", given.seconds)
    else:
        cpu()


if __name__ == "__main__":
    run("FlashAttention in Triton: errors and binaries, or times.", cpu, gpu, build)
