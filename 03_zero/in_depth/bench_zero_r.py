"""ZeRO-R on 4 ranks: replicated, partitioned and offloaded checkpoints; cost and gain of a constant buffer.

    python 03_zero/in_depth/bench_zero_r.py            4 processes on CPU (Gloo), or 4 GPUs (NCCL)

Before any timing, the gradients of each kind are compared with torch's own `torch.utils.checkpoint`, which
keeps full checkpoints on every rank, and the sums through a constant buffer with the sums through a fused
one. The cost of fragmentation, without and with M_D, is counted, not timed.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, launch, must_be_equal
from _zero_demo import Decoder
from harness.meter import communication, peak_memory, saved_activations
from harness.report import paired, write_result
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_r import (
    Offloaded,
    ParallelBlock,
    Partitioned,
    Replicated,
    all_reduce_fused,
    all_reduce_through,
    heap_needed,
    most_alive,
    recompute,
    recorded_step,
)

LAYERS, SHAPE = 4, (2, 256, 192)  # B, S, H
SIZES = [256 * 1024, 64, 1000 * 1000, 3, 700 * 1000]  # elements that go through a buffer: 8 MB in fp32
COLUMNS = ["checkpoints", "bytes kept on the device", "bytes in host memory", "traffic added"]
COLUMNS += ["seconds of forward and backward / torch.utils.checkpoint's (quartiles)"]


def checkpoints(device: torch.device) -> list[list]:
    group = dist.group.WORLD
    torch.manual_seed(0)
    full = Decoder(hidden=SHAPE[2], heads=12, layers=LAYERS).to(device)
    layers = nn.ModuleList(ParallelBlock(layer, group) for layer in full.layers)
    x = torch.randn(SHAPE, device=device, requires_grad=True)
    piece = x.numel() // RANKS
    keepers = {
        "replicated": Replicated(),
        "P_a": Partitioned(group),
        "P_a+cpu": Offloaded(group, LAYERS, piece, x.dtype, device),
    }

    def torchs() -> None:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False)
        y.sum().backward()

    def forward(keeper: object) -> Tensor:
        y = x
        for layer in layers:
            y = recompute(layer, y, keeper)
        return y.sum()

    def gradients() -> dict[str, Tensor]:
        found = {name: p.grad for name, p in layers.named_parameters()}
        layers.zero_grad()
        return found

    torchs()
    want = gradients()
    rows = []
    for name, keeper in keepers.items():
        with communication() as sent:
            with saved_activations(exclude=layers.parameters()) as saved:
                loss = forward(keeper)
            loss.backward()
        must_be_equal(gradients(), want, name, 1e-5)
        ratio = paired(lambda keeper=keeper: forward(keeper).backward(), torchs, repeats=9, setup=dist.barrier)
        layers.zero_grad()
        host = keeper.host.nbytes if isinstance(keeper, Offloaded) else 0
        added = sent.sent["all_gather"] / sent.sent["all_reduce"]
        rows.append([name, saved.bytes, host, f"{added:.2%}", ratio])
    return rows


def buffers(device: torch.device) -> list[list]:
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
        rows.append([f"{kib} KiB", buffer.nbytes + streamed.peak, fused.peak, messages, ratio])
    return rows


def heaps() -> list[list]:
    rows = []
    for what, moved in {"without M_D": False, "with M_D": True}.items():
        trace, arenas = recorded_step(moved)
        needed = heap_needed(trace) + arenas
        alive = most_alive(trace) + arenas
        rows.append([what, needed, alive, needed / alive])
    return rows


def benchmark(device: torch.device) -> None:
    kept, through = checkpoints(device), buffers(device)
    if dist.get_rank() == 0:
        write_result(
            "03_zero_r",
            f"Activation checkpoints of {LAYERS} tensor-parallel layers on {RANKS} ranks",
            COLUMNS,
            kept,
            f"fp32, x of {SHAPE[0]} x {SHAPE[1]} x {SHAPE[2]}. The gradients were compared first.",
        )
        write_result(
            "03_zero_buffers",
            f"C_B: constant buffers against one fused buffer, {RANKS} ranks",
            ["buffer", "bytes needed", "with a fused buffer", "messages", "seconds / with a fused buffer (quartiles)"],
            through,
            f"{sum(SIZES):,} fp32 numbers are summed over the ranks. The sums were compared first.",
        )
        write_result(
            "03_zero_heap",
            "The heap of a step without and with M_D",
            ["", "bytes of the heap", "bytes alive at the peak", "heap / alive"],
            heaps(),
            "What a best-fit allocator needs for a recorded step of a decoder with checkpoints, over sequences of four "
            "lengths.",
        )


if __name__ == "__main__":
    launch(benchmark)
