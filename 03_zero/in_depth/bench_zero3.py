"""Stage 3 against torch's FSDP2 (`fully_shard`): same model, same units, same optimizer, 4 ranks, one run.

    python 03_zero/in_depth/bench_zero3.py             4 processes on CPU (gloo), or 4 GPUs (nccl)

First the weights after two AdamW steps are compared; only then is anything measured. Both gather the next unit while
one computes, and keep the root gathered between forward and backward; we keep the last unit too.
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
from harness.report import Ratio, paired, write_result
from torch.distributed.fsdp import fully_shard
from zero3 import Zero3

MODELS = {"0.9M": {"hidden": 128, "layers": 4}, "6.4M": {"hidden": 256, "layers": 8}}


class Ours:
    def __init__(self, sizes: dict[str, int], device: torch.device, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.model = Decoder(**sizes).to(device, dtype)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.zero = Zero3(self.model, optimizer, dist.group.WORLD, units=self.model.layers)

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        self.zero.zero_grad()
        with self.zero.micro_batch(last=True):
            (token_loss_sum(self.model, tokens, labels) / (labels.numel() * RANKS)).backward()
        self.zero.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return self.zero.full_weights()


class Torchs:
    def __init__(self, sizes: dict[str, int], device: torch.device, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.model = Decoder(**sizes).to(device, dtype)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        # FSDP averages over the ranks, so the mean of this rank's tokens is the right loss for it.
        (token_loss_sum(self.model, tokens, labels) / labels.numel()).backward()
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.full_tensor().detach() for name, p in self.model.named_parameters()}


def benchmark(device: torch.device) -> None:
    rows: list[list[str | float | Ratio]] = []
    tokens = make_batch(0, RANKS, 1, rows=2, length=64)[dist.get_rank()][0][0].to(device)
    labels = tokens.roll(-1, 1)
    for name, sizes in MODELS.items():
        peaks, weights, sent = {}, {}, {}
        for who, make in {"torch": partial(Torchs, sizes, device), "ours": partial(Ours, sizes, device)}.items():
            exact = make(torch.float64)  # in fp32 Adam's division makes much of the order of sums
            for _ in range(2):
                exact.step(tokens, labels)
            weights[who] = exact.weights()
            one = make()
            one.step(tokens, labels)  # after the first step all that stays is there
            with peak_memory() as memory, communication() as wire:
                one.step(tokens, labels)
            peaks[who], sent[who] = largest(memory.peak, device), wire.total
            del one, exact
            gc.collect()
        must_be_equal(weights["ours"], weights["torch"], f"stage 3, {name}")
        ours, theirs = Ours(sizes, device), Torchs(sizes, device)
        steps = (partial(ours.step, tokens, labels), partial(theirs.step, tokens, labels))
        ratio = paired(*steps, repeats=9, setup=dist.barrier)
        rows.append([name, ratio, peaks["ours"] / peaks["torch"], peaks["torch"], sent["ours"] / sent["torch"]])
    if dist.get_rank() == 0:
        write_result(
            "03_zero3",
            f"Stage 3 against torch's FSDP2, {RANKS} ranks",
            [
                "parameters",
                "seconds of a step / FSDP2's (quartiles)",
                "peak bytes in a step / FSDP2's",
                "FSDP2's peak",
                "bytes sent / FSDP2's",
            ],
            rows,
            "fp32, AdamW, each layer a unit, 2 x 64 tokens a rank. The weights after two steps in float64 were "
            "compared first. The peak is what a step needs beyond the shards that stay, on the rank with the largest. "
            "Bytes sent are payloads times the formula of a ring.",
        )


if __name__ == "__main__":
    launch(benchmark)
