"""Activation checkpoints replicated, partitioned and offloaded, on 4 tensor-parallel ranks, one run.

    python 03_zero/in_depth/bench_zero_r.py            4 processes on CPU (gloo), or 4 GPUs (nccl)

First each kind's gradients are compared with those of replicated checkpoints, kept whole by torch's own
`torch.utils.checkpoint`; only then is anything timed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, launch, must_be_equal
from _zero_demo import Decoder
from harness.meter import communication, saved_activations
from harness.report import paired, write_result
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_r import Offloaded, ParallelBlock, Partitioned, Replicated, recompute

LAYERS, SHAPE = 4, (2, 256, 192)  # B, S, H
COLUMNS = ["checkpoints", "bytes kept on the device", "bytes in host memory", "traffic added"]
COLUMNS += ["seconds of forward and backward / torch.utils.checkpoint's (quartiles)"]


def benchmark(device: torch.device) -> None:
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

    def torchs() -> int:
        y = x
        with saved_activations(exclude=layers.parameters()) as saved:
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=False)
        y.sum().backward()
        return saved.bytes

    def step(keeper: object) -> int:
        y = x
        with saved_activations(exclude=layers.parameters()) as saved:
            for layer in layers:
                y = recompute(layer, y, keeper)
        y.sum().backward()
        return saved.bytes

    def gradients() -> dict[str, Tensor]:
        found = {name: p.grad for name, p in layers.named_parameters()}
        layers.zero_grad()
        return found

    torchs()
    want = gradients()
    rows = []
    for name, keeper in keepers.items():
        with communication() as sent:
            kept = step(keeper)
        must_be_equal(gradients(), want, name, 1e-5)
        ratio = paired(lambda keeper=keeper: step(keeper), torchs, repeats=9, setup=dist.barrier)
        layers.zero_grad()
        host = keeper.host.nbytes if isinstance(keeper, Offloaded) else 0
        added = sent.sent["all_gather"] / sent.sent["all_reduce"]
        rows.append([name, kept, host, f"{added:.2%}", ratio])
    if dist.get_rank() == 0:
        write_result(
            "03_zero_r",
            f"Activation checkpoints of {LAYERS} tensor-parallel layers on {RANKS} ranks",
            COLUMNS,
            rows,
            f"fp32, x of {SHAPE[0]} x {SHAPE[1]} x {SHAPE[2]}. The gradients were compared first.",
        )


if __name__ == "__main__":
    launch(benchmark)
