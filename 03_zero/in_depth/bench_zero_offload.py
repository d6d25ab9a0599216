"""The optimizer on the host, against the same stage without offloading: bytes on each side, link bytes, time.

    python 03_zero/in_depth/bench_zero_offload.py      4 processes on CPU (Gloo), or 4 GPUs (NCCL)

Before any measurement, the weights after two steps in float64 are compared, with two micro-batches each.
On a CPU host and device share one memory, so the time has the cost of copies and slots, but not of a link.
"""

import gc
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, Ours, after_two_steps, batch_of_rank, launch, must_be_equal
from _zero_demo import storage_bytes
from harness.report import Ratio, paired, write_result
from torch import nn
from zero3 import make_zero
from zero_offload import make_offloaded

SIZES = {"hidden": 256, "layers": 4}


def run(make: Any, stage: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Ours:
    master = torch.float32 if dtype == torch.bfloat16 else None
    options = {"bucket_bytes": 2**20} if stage == 2 else {}

    def zero(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return make(stage, model, optimizer, dist.group.WORLD, units=model.layers, master=master, **options)

    return Ours(zero, SIZES, device, dtype)


def benchmark(device: torch.device) -> None:
    rows: list[list[str | float | Ratio]] = []
    tokens, labels = batch_of_rank(device)
    for stage in (2, 3):
        weights, runs = {}, {}
        for who, make in {"stays": make_zero, "goes": make_offloaded}.items():
            weights[who] = after_two_steps(run(make, stage, device, torch.float64), tokens, labels, micro_batches=2)
            gc.collect()
            runs[who] = run(make, stage, device)
            runs[who].step(tokens, labels)
        must_be_equal(weights["goes"], weights["stays"], f"stage {stage}, offloaded")
        stays, goes = runs["stays"].zero, runs["goes"].zero
        link = dict(goes.link.bytes)  # of the one step so far
        held = storage_bytes(t for tensors in stays.held().values() for t in tensors)
        apart = storage_bytes(goes.on_device()), storage_bytes(goes.on_host())
        step = {who: partial(one.step, tokens, labels) for who, one in runs.items()}
        ratio = paired(step["goes"], step["stays"], repeats=9, setup=dist.barrier)
        rows.append([f"stage {stage}", held, *apart, link["down"], link["up"], ratio])
        del runs, step, stays, goes
        gc.collect()
    if dist.get_rank() == 0:
        write_result(
            "03_zero_offload",
            f"The optimizer on the host, {RANKS} ranks",
            [
                "",
                "bytes on the device, not offloaded",
                "offloaded: on the device",
                "offloaded: on the host",
                "down the link in a step",
                "up the link",
                "seconds of a step / not offloaded (quartiles)",
            ],
            rows,
            "Each of the ranks; 3.3M parameters in bf16, AdamW with a master copy in fp32, one micro-batch of 2 x 64 "
            "tokens. The weights after two steps in float64 were compared first. Bytes on the link are those of the "
            "copies that were made; on a CPU both sides are the same memory, and the time has no link in it.",
        )


if __name__ == "__main__":
    launch(benchmark)
