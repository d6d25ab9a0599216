"""What a constant buffer costs and saves, and what fragmentation costs: 4 ranks, one run.

    python 03_zero/in_depth/bench_zero_buffers.py      4 processes on CPU (gloo), or 4 GPUs (nccl)

First the sums of both versions are compared; only then is anything timed.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, launch, must_be_equal
from harness.meter import peak_memory
from harness.report import paired, write_result
from zero_buffers import all_reduce_fused, all_reduce_through, heap_needed, most_alive, recorded_step

SIZES = [256 * 1024, 64, 1000 * 1000, 3, 700 * 1000]  # elements: 8 MB in fp32


def benchmark(device: torch.device) -> None:
    group, rows = dist.group.WORLD, []
    for kib in (64, 1024, 4096):
        buffer = torch.empty(kib * 256, device=device)
        torch.manual_seed(dist.get_rank())
        whole = [torch.randn(n, device=device) for n in SIZES]
        through = [t.clone() for t in whole]
        with peak_memory() as fused:
            all_reduce_fused(whole, group)
        with peak_memory() as streamed:
            messages = all_reduce_through(buffer, through, group)
        names = [f"tensor {i}" for i in range(len(SIZES))]
        must_be_equal(dict(zip(names, through, strict=True)), dict(zip(names, whole, strict=True)), f"{kib} KiB", 1e-5)
        for tensor in [*whole, *through]:
            tensor.zero_()  # or many sums of sums would overflow
        steps = (partial(all_reduce_through, buffer, through, group), partial(all_reduce_fused, whole, group))
        ratio = paired(*steps, repeats=9, setup=dist.barrier)
        rows.append([f"C_B, {kib} KiB", buffer.nbytes + streamed.peak, fused.peak, messages, ratio])
    for moved in (False, True):
        trace, arenas = recorded_step(moved)
        alive, needed = most_alive(trace) + arenas, heap_needed(trace) + arenas
        rows.append([f"{'with' if moved else 'without'} M_D", needed, alive, "-", f"{needed / alive:.3f} in bytes"])
    if dist.get_rank() == 0:
        write_result(
            "03_zero_buffers",
            f"Constant buffers against one fused buffer ({RANKS} ranks), and the heap of a step without and with M_D",
            ["", "bytes needed", "of a fused buffer, or alive at the peak", "messages", "ratio (seconds; quartiles)"],
            rows,
            f"C_B: {sum(SIZES):,} fp32 numbers are summed over the ranks; seconds through the constant buffer over "
            "those through a fused one. M_D: the heap a best-fit allocator needs for a recorded step of a decoder with "
            "checkpoints, over sequences of four lengths, beside the bytes alive at its peak.",
        )


if __name__ == "__main__":
    launch(benchmark)
