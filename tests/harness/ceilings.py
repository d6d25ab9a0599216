"""The ceilings of this device: the rates that every other measurement is compared with.

    python tests/harness/ceilings.py --gpu [--out DIR]       on a GPU: writes the result gpu_ceilings
    python tests/harness/ceilings.py --gpu --dry --out DIR   the same program at tiny sizes, to try it

A kernel must move its bytes and do its operations. Bytes over the copy bandwidth and operations over the rate
of matmuls are two times, and the larger one is its floor: nothing runs faster. Data sheets print rates that
no program reaches, so both ceilings are measured here, on random data (on zeros a GPU draws less power,
clocks higher, and shows a rate that training never reaches).
"""

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "01_single_gpu" / "in_depth"))

from harness import predictions
from harness.report import Ratio, ratio_of, save, write_result

GIB = 2**30
CLOCK = 2e9  # Hz, at most, of a GPU: what torch.cuda._sleep counts in
LONGEST_SLEEP = 5e-3  # seconds


class Table:
    """A result that is rewritten with every row, so that a program that is ended keeps its rows.

    tests/gpu.py passes a folder, which it reads every second. Without one the result is written to results/,
    and only from a clean tree.
    """

    def __init__(self, name: str, title: str, columns: Sequence[str], notes: str = "", folder: Path | None = None):
        self.name, self.title, self.columns, self.notes, self.folder = name, title, list(columns), notes, folder
        self.rows: list[list[Any]] = []
        self.path: Path | None = None

    def add(self, *row: Any) -> None:
        self.rows.append(list(row))
        self.write()
        print(f"{self.name}: " + "; ".join(str(cell) for cell in row), flush=True)

    def write(self) -> None:
        """Called by `add`, and after a change of an old row."""
        if self.folder is None or self.path is None:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):  # it prints the full table
                self.path = write_result(self.name, self.title, self.columns, self.rows, self.notes, self.folder)
            first = said.getvalue().partition("\n")[0]
            if "is not written" in first:
                print(first, flush=True)
            return
        run = json.loads(self.path.read_text())
        record = run["results"][self.name]  # keep its environment, which takes a second to find
        rows = [[{"ratio": asdict(cell)} if isinstance(cell, Ratio) else cell for cell in row] for row in self.rows]
        run["results"][self.name] = record | {"rows": rows, "notes": self.notes}
        save(run, self.path)


def device_here() -> torch.device:
    """The GPU, or the emulated GPU of a dry run, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


def paired_seconds(device: torch.device, runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each of these calls, by name. They alternate, so that a temporary slowdown of
    the device affects all of them; quotients of two calls are taken repeat by repeat.

    On a GPU each call starts with a cold L2 cache and a queue that is never empty. The cache is filled by
    reading: a flush that writes leaves modified lines, and writing them back would be charged to the call.
    Then the device sleeps for as long as the host needs to launch the call, which otherwise would be part of
    the time. At least two repeats; up to three are for dry runs, which do not warm up.
    """
    repeats = max(2, repeats)
    names, seconds = list(runs), {name: [0.0] * repeats for name in runs}
    rounds = [(repeat, name) for repeat in range(repeats) for name in (names if repeat % 2 else names[::-1])]
    if device.type != "cuda":
        for repeat, name in rounds:
            start = time.perf_counter()
            runs[name]()
            seconds[name][repeat] = time.perf_counter() - start
        return seconds
    launch = dict.fromkeys(names, 0.0)
    for name in names if repeats > 3 else ():
        for _ in range(3):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            runs[name]()
            launch[name] = time.perf_counter() - start  # the last: the first one compiles
    flush = torch.zeros(l2_bytes(device), dtype=torch.float32, device=device)  # four times the cache
    events = {}
    for repeat, name in rounds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.sum()
        torch.cuda._sleep(int(CLOCK * min(1.5 * launch[name] + 20e-6, LONGEST_SLEEP)))
        begin.record()
        runs[name]()
        end.record()
        events[repeat, name] = begin, end
    torch.cuda.synchronize(device)
    for (repeat, name), (begin, end) in events.items():
        seconds[name][repeat] = begin.elapsed_time(end) / 1e3
    return seconds


def timer(device: torch.device, repeats: int) -> Callable[[Callable[[], Any]], Ratio]:
    """A function that times a call: median and quartiles in seconds. See `paired_seconds`."""
    return lambda run: ratio_of(paired_seconds(device, {"": run}, repeats)[""])


def quotient(one: Sequence[float], other: Sequence[float]) -> Ratio:
    """The quotient of the seconds of two alternating calls: median over the repeats, and both quartiles."""
    return ratio_of([a / b for a, b in zip(one, other, strict=True)])


def rate(work: float, seconds: Ratio) -> Ratio:
    """Work per second; the slow quartile of the seconds is the low one of the rate."""
    return Ratio(work / seconds.median, work / seconds.high, work / seconds.low)


def free_bytes(device: torch.device) -> int:
    """Free memory: other processes may use the same GPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else GIB


# Each returns units of work per second, after it has verified what it measured.


def copy_bandwidth(device: torch.device, nbytes: int, repeats: int = 20) -> Ratio:
    """Bytes per second, read plus written, of a copy within the device's memory."""
    source = torch.randn(nbytes // 4, device=device)
    target = torch.full_like(source, float("nan"))
    seconds = timer(device, repeats)(lambda: target.copy_(source))
    if not torch.equal(source, target):
        sys.exit("ceilings.py: a copy within the device differs from its source")
    return rate(2 * source.nbytes, seconds)


def link_bandwidth(device: torch.device, nbytes: int, to_device: bool, repeats: int = 10) -> Ratio:
    """Bytes per second between the device and pinned memory of the host, one way."""
    host = torch.randint(256, (nbytes,), dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = host.to(device, copy=True)
    source, target = (host, there) if to_device else (there, host)
    target.zero_()
    seconds = timer(device, repeats)(lambda: target.copy_(source, non_blocking=True))
    if not torch.equal(host, there.cpu()):
        sys.exit("ceilings.py: a copy between host and device differs from its source")
    return rate(nbytes, seconds)


def matmul_rate(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16, repeats: int = 20) -> Ratio:
    """FLOP/s of PyTorch's own matmul on random data; 2 for each multiply-add."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = timer(device, repeats)(lambda: a @ b)
    # With the 10 bits of TF32 it would be off by some 3e-4, and seven times as fast.
    _check(a @ b, a, b, f"{dtype} matrix product", 1e-5 if dtype == torch.float32 else 0.02)
    return rate(2 * size**3, seconds)


def fp8_rate(device: torch.device, size: int, repeats: int = 20) -> Ratio:
    """The same in fp8 (e4m3, one scale for each tensor, fast accumulation), result in bf16."""
    e4m3, one = torch.float8_e4m3fn, torch.ones((), device=device)
    a, b = (torch.randn(size, size, device=device).to(e4m3) for _ in range(2))

    def product() -> Tensor:
        # The second matrix must be column-major.
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=device.type == "cuda")

    seconds = timer(device, repeats)(product)
    _check(product(), a, b.t(), "fp8 matrix product")
    return rate(2 * size**3, seconds)


def _check(got: Tensor, a: Tensor, b: Tensor, what: str, limit: float = 0.02) -> None:
    """Compare 64 rows with fp64. bf16 rounds to 2^-9 of a value, and fp8 sums have even fewer bits."""
    want = a[:64].double() @ b.double()
    error = ((got[:64].double() - want).norm() / want.norm()).item()
    if not error <= limit:
        sys.exit(f"ceilings.py: {what} is off by {error:.1e}")


# ------------------------------------------------------------------------------------------------------------- program


@dataclass(frozen=True)
class Ceiling:
    what: str
    unit: str
    measure: Callable[[], Ratio]
    predicted: float | None = None  # in the same units, from the data sheet, before anything ran


def ceilings(device: torch.device, dry: bool) -> tuple[list[Ceiling], str]:
    """What to measure, and a note on the sizes, which are smaller if other processes left little memory."""
    free, repeats = free_bytes(device), 2 if dry else 20
    copied = 2**20 if dry else min(4 * GIB, free // 8) // 4096 * 4096
    side = 128 if dry else max(n for n in (1024, 2048, 4096, 8192) if n == 1024 or 12 * n * n < free // 4)
    linked = 2**20 if dry else min(GIB // 4, free // 8)
    gpu = predictions.here()
    sizes = f"{copied / GIB:.3g} GiB copied within the device, {linked / GIB:.3g} GiB over the link; {side} cubed"

    def product(n: int, kind: str) -> float | None:
        seconds = predictions.product(gpu, 2 * n**3, kind)
        return 2 * n**3 / seconds if seconds else None

    copy = partial(copy_bandwidth, device, copied, repeats)
    there, back = (partial(link_bandwidth, device, linked, to_device, repeats) for to_device in (True, False))
    bf16 = partial(matmul_rate, device, side, repeats=repeats)
    fp32 = partial(matmul_rate, device, side // 2, torch.float32, repeats)
    link = 0.85 * gpu.link if gpu else None  # packets have headers
    seconds = predictions.moved(gpu, 2 * copied)
    moved = 2 * copied / seconds if seconds else None
    found = [
        Ceiling("copy within the device, read + written", "TB/s", copy, moved),
        Ceiling("host to device, pinned", "GB/s", there, link),
        Ceiling("device to host, pinned", "GB/s", back, link),
        Ceiling("matrix product, bf16", "TFLOP/s", bf16, product(side, "bf16")),
        Ceiling("matrix product, fp32 (no TF32)", "TFLOP/s", fp32, product(side // 2, "fp32")),
    ]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):  # older ones have no fp8
        fp8 = partial(fp8_rate, device, side, repeats)
        found.append(Ceiling("matrix product, fp8", "TFLOP/s", fp8, product(side, "fp8")))
    return found, sizes


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what the device can do at most.")
    parser.add_argument("--gpu", action="store_true", help="the same: every benchmark takes it")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, to try the program")
    parser.add_argument("--out", type=Path, help="folder for the result instead of results/")
    args = parser.parse_args()
    if args.dry and not args.out:
        print("ceilings.py: --dry measures nothing worth keeping; add --out DIR", file=sys.stderr)
        return 2
    if not args.dry and not torch.cuda.is_available():
        print("ceilings.py: PyTorch finds no GPU here; --gpu --dry --out DIR tries it on the CPU", file=sys.stderr)
        return 2
    from accounting import peak_flops

    device = device_here()
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    torch.backends.cuda.matmul.allow_tf32 = False  # the default, unless the environment differs
    torch.manual_seed(0)
    found, sizes = ceilings(device, args.dry)
    table = Table(
        "gpu_ceilings",
        "What the device reaches at most",
        ["what", "median (quartiles)", "unit", "of the data sheet", "predicted", "measured / predicted"],
        f"{sizes}. Random data, each result verified, cold L2 cache. Predicted: 90 % of the data sheet's bandwidth, 80 "
        "% of its rate, 85 % of the link's; these are rates, so above 1 is faster than expected.",
        args.out,
    )
    for ceiling in found:
        scale = {"G": 1e9, "T": 1e12}[ceiling.unit[0]]
        expected = f"{ceiling.predicted / scale:.3g}" if ceiling.predicted else "-"
        try:
            reached = ceiling.measure()
        except RuntimeError as error:  # no kernel for it, or no memory: the others go on
            why = f"n/a: {str(error).strip().splitlines()[0][:80]}"
            table.add(ceiling.what, why, ceiling.unit, "n/a", expected, "-")
            continue
        share = f"{reached.median / peak:.0%}" if peak and ceiling.what.endswith("bf16") else "n/a"
        over = f"{reached.median / ceiling.predicted:.2f}" if ceiling.predicted else "-"
        value = Ratio(*(x / scale for x in (reached.median, reached.low, reached.high)))
        table.add(ceiling.what, value, ceiling.unit, share, expected, over)
    return 0


if __name__ == "__main__":
    sys.exit(main())
