"""What this device can do at most: the numbers that every other measurement is held against.

    python tests/harness/ceilings.py --gpu [--out DIR]       on a GPU: writes results/gpu_ceilings.DEVICE.json
    python tests/harness/ceilings.py --gpu --dry --out DIR   the same program on the CPU, tiny

A kernel has to move its bytes and to do its operations. Bytes over the copy bandwidth and operations over the rate of
matrix products are two times, and the larger one is its floor: nothing runs below it. Data sheets print rates that no
program reaches, so both ceilings are measured here, on random data (on zeros a GPU draws less power, clocks higher, and
shows a rate that training never sees).
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "01_single_gpu" / "in_depth"))

from harness.report import Ratio, ratio_of, write_result

GIB = 2**30


def timer(device: torch.device, repeats: int) -> Callable[[Callable[[], Any]], Ratio]:
    """A function that says how many seconds a call takes: median and quartiles, on a GPU with a cold L2 cache."""
    if device.type != "cuda":

        def on_cpu(run: Callable[[], Any]) -> Ratio:
            seconds = []
            for _ in range(max(3, repeats)):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
            return ratio_of(seconds)

        return on_cpu
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=device)  # larger than any L2 cache

    def on_gpu(run: Callable[[], Any]) -> Ratio:
        for _ in range(3):
            run()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(device)
        return ratio_of([begin.elapsed_time(end) / 1e3 for begin, end in events])

    return on_gpu


def rate(work: float, seconds: Ratio) -> Ratio:
    """Work per second; the slow quartile of the seconds is the low one of the rate."""
    return Ratio(work / seconds.median, work / seconds.high, work / seconds.low)


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses: other processes may sit on the same GPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else GIB


# Each returns (what it was, units of work per second), after it has verified what it measured.


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
    there = torch.zeros_like(host, device=device) if to_device else host.to(device, copy=True)
    source, target = (host, there) if to_device else (there, host)
    seconds = timer(device, repeats)(lambda: target.copy_(source, non_blocking=True))
    if not torch.equal(host, there.cpu()):
        sys.exit("ceilings.py: a copy between host and device differs from its source")
    return rate(nbytes, seconds)


def matmul_rate(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16, repeats: int = 20) -> Ratio:
    """FLOP/s of PyTorch's own matrix product on random data; 2 for each multiply-add."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = timer(device, repeats)(lambda: a @ b)
    _check(a @ b, a, b, f"{dtype} matrix product")
    return rate(2 * size**3, seconds)


def fp8_rate(device: torch.device, size: int, repeats: int = 20) -> Ratio:
    """The same in fp8 (e4m3, one scale for each tensor, fast accumulation), result in bf16."""
    e4m3, one = torch.float8_e4m3fn, torch.ones((), device=device)
    a, b = (torch.randn(size, size, device=device).to(e4m3) for _ in range(2))

    def product() -> Tensor:
        # The second matrix has to lie column by column.
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=device.type == "cuda")

    seconds = timer(device, repeats)(product)
    _check(product(), a, b.t(), "fp8 matrix product")
    return rate(2 * size**3, seconds)


def _check(got: Tensor, a: Tensor, b: Tensor, what: str) -> None:
    """64 rows against fp32. What bf16 leaves of a number is 2^-9 of it, and fp8 sums are shorter still."""
    want = a[:64].float() @ b.float()
    error = ((got[:64].float() - want).norm() / want.norm()).item()
    if not error <= 0.02:
        sys.exit(f"ceilings.py: {what} is off by {error:.1e}")


# ------------------------------------------------------------------------------------------------------------- program


@dataclass(frozen=True)
class Ceiling:
    what: str
    unit: str
    measure: Callable[[], Ratio]


def ceilings(device: torch.device) -> tuple[list[Ceiling], str]:
    """What to measure, and a note on the sizes. They shrink where other processes left little memory."""
    cuda, free = device.type == "cuda", free_bytes(device)
    copied = min(4 * GIB, free // 8) // 4096 * 4096 if cuda else 2**20
    side = 256
    if cuda:
        side = max(n for n in (1024, 2048, 4096, 8192) if n == 1024 or 12 * n * n < free // 4)
    linked = min(GIB, free // 8) if cuda else 2**20
    sizes = f"{copied / GIB:.3g} GiB copied within the device, {linked / GIB:.3g} GiB over the link; {side} cubed"
    found = [
        Ceiling("copy within the device, read + written", "TB/s", lambda: copy_bandwidth(device, copied)),
        Ceiling("host to device, pinned", "GB/s", lambda: link_bandwidth(device, linked, True)),
        Ceiling("device to host, pinned", "GB/s", lambda: link_bandwidth(device, linked, False)),
        Ceiling("matrix product, bf16", "TFLOP/s", lambda: matmul_rate(device, side)),
        Ceiling("matrix product, fp32 (no TF32)", "TFLOP/s", lambda: matmul_rate(device, side // 2, torch.float32)),
    ]
    if not cuda or torch.cuda.get_device_capability(device) >= (8, 9):  # older ones have no fp8
        found.append(Ceiling("matrix product, fp8", "TFLOP/s", lambda: fp8_rate(device, side)))
    return found, sizes


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what the device can do at most.")
    parser.add_argument("--gpu", action="store_true", help="measure")
    parser.add_argument("--dry", action="store_true", help="with --gpu: the same on the CPU, tiny")
    parser.add_argument("--out", type=Path, help="folder for the result instead of results/")
    args = parser.parse_args()
    if args.dry and not args.out:
        print("ceilings.py: --dry measures nothing worth keeping; add --out DIR", file=sys.stderr)
        return 2
    if not args.dry and not torch.cuda.is_available():
        print("ceilings.py: PyTorch finds no GPU here; --gpu --dry --out DIR tries it on the CPU", file=sys.stderr)
        return 2
    from accounting import peak_flops

    device = torch.device("cpu" if args.dry else "cuda")
    peak = None if args.dry else peak_flops(torch.cuda.get_device_name(device))
    torch.manual_seed(0)
    found, sizes = ceilings(device)
    rows: list[list[Any]] = []
    for ceiling in found:
        try:
            reached = ceiling.measure()
        except RuntimeError as error:  # no kernel for it, or no memory: the others go on
            rows.append([ceiling.what, f"n/a: {str(error).strip().splitlines()[0][:80]}", ceiling.unit, "n/a"])
            continue
        share = f"{reached.median / peak:.0%}" if peak and ceiling.what.endswith("bf16") else "n/a"
        scale = {"G": 1e9, "T": 1e12}[ceiling.unit[0]]
        value = Ratio(*(x / scale for x in (reached.median, reached.low, reached.high)))
        rows.append([ceiling.what, value, ceiling.unit, share])
    write_result(
        "gpu_ceilings",
        "What the device reaches at most: every floor below is computed from these",
        ["what", "median (quartiles)", "unit", "of the data sheet"],
        rows,
        f"{sizes}. Random data, each result verified, cold L2 cache.",
        folder=args.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
