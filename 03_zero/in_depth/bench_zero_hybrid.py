"""HSDP against torch's (`fully_shard` on a mesh of two dimensions): 2 shards x 2 copies, same model, one run.

    python 03_zero/in_depth/bench_zero_hybrid.py       4 processes on CPU (gloo), or 4 GPUs (nccl)

First the weights after two steps of plain SGD in float64 are compared; only then is anything measured.
"""

import gc
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, largest, launch, must_be_equal
from _zero_demo import Decoder, make_batch, token_loss_sum
from harness.meter import communication, peak_memory
from harness.report import paired, write_result
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero_hybrid import make_groups, make_hybrid

SHARDS = 2
SIZES = {"hidden": 128, "layers": 4}


def optimizer_of(model: torch.nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    if dtype == torch.float64:  # to compare: AdamW would hide a wrong factor
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Ours:
    def __init__(self, groups, mesh, device: torch.device, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.model = Decoder(**SIZES).to(device, dtype)
        optimizer = optimizer_of(self.model, dtype)
        self.zero = make_hybrid(self.model, optimizer, *groups, units=self.model.layers)

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        self.zero.zero_grad()
        with self.zero.micro_batch(last=True):
            (token_loss_sum(self.model, tokens, labels) / (labels.numel() * RANKS)).backward()
        self.zero.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return self.zero.full_weights()


class Torchs:
    def __init__(self, groups, mesh, device: torch.device, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.model = Decoder(**SIZES).to(device, dtype)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = optimizer_of(self.model, dtype)

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (token_loss_sum(self.model, tokens, labels) / labels.numel()).backward()  # FSDP averages over the ranks
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.full_tensor().detach() for name, p in self.model.named_parameters()}


def benchmark(device: torch.device) -> None:
    groups = make_groups(SHARDS)
    mesh = init_device_mesh(device.type, (RANKS // SHARDS, SHARDS), mesh_dim_names=("copies", "shards"))
    tokens = make_batch(0, RANKS, 1, rows=2, length=64)[dist.get_rank()][0][0].to(device)
    labels = tokens.roll(-1, 1)
    weights, peaks, sent, runs = {}, {}, {}, {}
    for who, make in {"torch": Torchs, "ours": Ours}.items():
        exact = make(groups, mesh, device, torch.float64)
        for _ in range(2):
            exact.step(tokens, labels)
        weights[who] = exact.weights()
        del exact
        gc.collect()
    must_be_equal(weights["ours"], weights["torch"], "HSDP")
    for who, make in {"torch": Torchs, "ours": Ours}.items():
        runs[who] = make(groups, mesh, device)
        runs[who].step(tokens, labels)
        with peak_memory() as memory, communication() as wire:
            runs[who].step(tokens, labels)
        peaks[who], sent[who] = largest(memory.peak, device), dict(wire.sent)
    steps = (partial(runs[who].step, tokens, labels) for who in ("ours", "torch"))
    ratio = paired(*steps, repeats=9, setup=dist.barrier)
    inside = {who: sent[who]["all_gather"] + sent[who]["reduce_scatter"] for who in sent}
    across = {who: sent[who]["all_reduce"] for who in sent}
    if dist.get_rank() == 0:
        write_result(
            "03_zero_hybrid",
            f"HSDP, {SHARDS} shards x {RANKS // SHARDS} copies, against torch's FSDP2 on the same mesh",
            [
                "parameters",
                "seconds of a step / torch's (quartiles)",
                "peak bytes in a step / torch's",
                "sent in the machine / torch's",
                "sent across / torch's",
                "sent across, bytes",
            ],
            [
                [
                    "0.9M",
                    ratio,
                    peaks["ours"] / peaks["torch"],
                    inside["ours"] / inside["torch"],
                    across["ours"] / across["torch"],
                    round(across["ours"]),
                ]
            ],
            "fp32, AdamW, each layer a unit, 2 x 64 tokens a rank. The weights after two steps of SGD in float64 were "
            "compared first. The peak is what a step needs beyond what stays. Bytes are payloads times formulas.",
        )
    runs.clear()
    gc.collect()


if __name__ == "__main__":
    launch(benchmark)
