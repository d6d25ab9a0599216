"""Gathers during the next forward, against the same stages with their gathers in the step, and against torch's own.

    python 03_zero/in_depth/bench_zero_overlap.py      4 processes on CPU (gloo), or 4 GPUs (nccl)

First the weights after two steps of plain SGD in float64 are compared with those of DistributedDataParallel with
ZeroRedundancyOptimizer; only then is anything measured.
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
from bench_zero_stages import Torchs
from harness.meter import communication, peak_memory
from harness.report import Ratio, paired, write_result
from torch import Tensor
from zero3 import make_zero
from zero_overlap import make_overlapped
from zero_stages import ExchangeAndSum, SendToAll

SIZES = {"hidden": 256, "layers": 4}
MIB = 2**20
# gloo's own reduce-scatter is an all-reduce inside, so there the ranks exchange and sum by themselves.
OWN = {} if torch.cuda.is_available() else {"reduce_scatter": ExchangeAndSum, "all_gather": SendToAll}


class Ours:
    def __init__(self, make, stage: int, device: torch.device, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.model = Decoder(**SIZES).to(device, dtype)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.zero = make(stage, self.model, optimizer, dist.group.WORLD, bucket_bytes=2 * MIB, **OWN)

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        self.zero.zero_grad()
        with self.zero.micro_batch(last=True):
            (token_loss_sum(self.model, tokens, labels) / (labels.numel() * RANKS)).backward()
        self.zero.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}  # whoever reads, waits


def travelling_in_forward(run: Ours, tokens: Tensor, labels: Tensor) -> tuple[int, int]:
    """(buckets that nobody had waited for when the first block began to compute, buckets)."""
    run.step(tokens, labels)
    log = run.zero.log
    handle = run.model.layers[0].qkv.register_forward_pre_hook(lambda *_: log.append(("forward", 0)))
    run.step(tokens, labels)
    handle.remove()
    waited = {who for what, who in log[: log.index(("forward", 0))] if what == "wait"}
    return len(run.zero.buckets) - len(waited), len(run.zero.buckets)


def benchmark(device: torch.device) -> None:
    rows: list[list[str | float | Ratio]] = []
    tokens = make_batch(0, RANKS, 1, rows=2, length=64)[dist.get_rank()][0][0].to(device)
    labels = tokens.roll(-1, 1)
    for stage in (1, 2):
        make = {
            "torch": partial(Torchs, SIZES, device),
            "waits": partial(Ours, make_zero, stage, device),
            "late": partial(Ours, make_overlapped, stage, device),
        }
        weights, peaks, sent, runs = {}, {}, {}, {}
        for who in make:
            exact = make[who](torch.float64)  # in fp32 Adam's division makes much of the order of sums
            for _ in range(2):
                exact.step(tokens, labels)
            weights[who] = exact.weights()
            del exact
            gc.collect()
            runs[who] = make[who]()
            runs[who].step(tokens, labels)
            with peak_memory() as memory, communication() as wire:
                runs[who].step(tokens, labels)
            peaks[who], sent[who] = largest(memory.peak, device), wire.total
        must_be_equal(weights["late"], weights["torch"], f"stage {stage}, gathers in forward")
        left, buckets = travelling_in_forward(runs["late"], tokens, labels)
        step = {who: partial(run.step, tokens, labels) for who, run in runs.items()}
        ratios = [paired(step["late"], step[who], repeats=9, setup=dist.barrier) for who in ("waits", "torch")]
        held, bytes_sent = peaks["late"] / peaks["waits"], sent["late"] / sent["waits"]
        rows.append([f"stage {stage}", f"{left} of {buckets}", *ratios, held, bytes_sent])
        runs["late"].zero.arrive()
        del runs, step
        gc.collect()
    if dist.get_rank() == 0:
        write_result(
            "03_zero_overlap",
            f"Gathers during the next forward, {RANKS} ranks",
            [
                "",
                "buckets that travel when the first block computes",
                "seconds of a step / with gathers in the step (quartiles)",
                "seconds of a step / torch's (quartiles)",
                "peak bytes in a step / with gathers in the step",
                "bytes sent / with gathers in the step",
            ],
            rows,
            "3.3M parameters, fp32, AdamW, buckets of 2 MiB, 2 x 64 tokens a rank; torch's is DistributedDataParallel "
            "with ZeroRedundancyOptimizer. The weights after two steps in float64 were compared first. On a CPU ours "
            "send from rank to rank, and messages take time from the computation that they hide behind.",
        )


if __name__ == "__main__":
    launch(benchmark)
