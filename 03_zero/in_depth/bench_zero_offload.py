"""The optimizer on the host, against the same stage without offloading: bytes on either side, on the link, and time.

    python 03_zero/in_depth/bench_zero_offload.py      4 processes on CPU (gloo), or 4 GPUs (nccl)

First the weights after two steps in float64 are compared, with two micro-batches each; only then is anything measured.
On a CPU host and device are the same memory, so the time is what the copies and the slots cost, and not a link's.
"""

import gc
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, launch, must_be_equal
from _zero_demo import Decoder, make_batch, storage_bytes, token_loss_sum
from harness.report import Ratio, paired, write_result
from torch import Tensor
from zero3 import make_zero
from zero_offload import make_offloaded

SIZES = {"hidden": 256, "layers": 4}


class Run:
    def __init__(self, make, stage: int, device: torch.device, dtype: torch.dtype = torch.bfloat16):
        torch.manual_seed(0)
        self.model = Decoder(**SIZES).to(device, dtype)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        master = torch.float32 if dtype == torch.bfloat16 else None
        options = {"bucket_bytes": 2**20} if stage == 2 else {}
        units = self.model.layers
        self.zero = make(stage, self.model, optimizer, dist.group.WORLD, units=units, master=master, **options)

    def step(self, tokens: Tensor, labels: Tensor, micro_batches: int = 1) -> None:
        self.zero.zero_grad()
        for i in range(micro_batches):
            with self.zero.micro_batch(last=i == micro_batches - 1):
                (token_loss_sum(self.model, tokens, labels.roll(i, 1)) / (labels.numel() * RANKS)).backward()
        self.zero.step()


def benchmark(device: torch.device) -> None:
    rows: list[list[str | float | Ratio]] = []
    tokens = make_batch(0, RANKS, 1, rows=2, length=64)[dist.get_rank()][0][0].to(device)
    labels = tokens.roll(-1, 1)
    for stage in (2, 3):
        weights, runs = {}, {}
        for who, make in {"stays": make_zero, "goes": make_offloaded}.items():
            exact = Run(make, stage, device, torch.float64)
            for _ in range(2):
                exact.step(tokens, labels, micro_batches=2)
            weights[who] = exact.zero.full_weights()
            del exact
            gc.collect()
            runs[who] = Run(make, stage, device)
            runs[who].step(tokens, labels)
        must_be_equal(weights["goes"], weights["stays"], f"stage {stage}, offloaded")
        stays, goes = runs["stays"].zero, runs["goes"].zero
        link = dict(goes.link.bytes)  # of the one step so far
        held = storage_bytes(t for tensors in stays.held().values() for t in tensors)
        apart = storage_bytes(goes.on_device()), storage_bytes(goes.on_host())
        step = {who: partial(run.step, tokens, labels) for who, run in runs.items()}
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
