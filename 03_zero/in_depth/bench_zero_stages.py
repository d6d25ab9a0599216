"""Stage 1 and 2 against torch's DistributedDataParallel with ZeroRedundancyOptimizer: same model, 4 ranks, one run.

    python 03_zero/in_depth/bench_zero_stages.py              4 processes on CPU (gloo), or 4 GPUs (nccl)

First the weights after two AdamW steps are compared; only then is anything measured. A step is zero_grad, forward,
backward with its communication, and the update. Peaks count every tensor from the building of the model on, on the
rank where they are largest.
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
from harness.meter import peak_memory
from harness.report import Ratio, paired, write_result
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from zero3 import make_zero
from zero_stages import ExchangeAndSum, SendToAll

MODELS = {"0.9M": {"hidden": 128, "layers": 4}, "3.3M": {"hidden": 256, "layers": 4}}
MIB = 2**20
BUCKET = 4  # MiB, of both


# gloo's own reduce-scatter is an all-reduce inside, so both are measured there.
OURS: dict[str, tuple[int, dict]] = {"stage 1": (1, {}), "stage 2": (2, {})}
if not torch.cuda.is_available():
    direct = {"reduce_scatter": ExchangeAndSum, "all_gather": SendToAll}
    OURS |= {f"{name}, point to point": (stage, direct) for name, (stage, _) in OURS.items()}


class Ours:
    def __init__(self, stage: int, own: dict, sizes: dict[str, int], device: torch.device, dtype=torch.float32):
        torch.manual_seed(0)
        self.model = Decoder(**sizes).to(device, dtype)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.zero = make_zero(stage, self.model, optimizer, dist.group.WORLD, bucket_bytes=BUCKET * MIB, **own)

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
        self.model = DistributedDataParallel(
            Decoder(**sizes).to(device, dtype), bucket_cap_mb=BUCKET, gradient_as_bucket_view=True
        )
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3
        )

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        # DDP averages over the ranks, so the mean of this rank's tokens is the right loss for it.
        (token_loss_sum(self.model, tokens, labels) / labels.numel()).backward()
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.module.named_parameters()}


def benchmark(device: torch.device) -> None:
    rows: list[list[str | float | Ratio]] = []
    tokens = make_batch(0, RANKS, 1, rows=2, length=64)[dist.get_rank()][0][0].to(device)
    labels = tokens.roll(-1, 1)
    for name, sizes in MODELS.items():
        peaks, weights = {}, {}
        for who, make in {
            "torch": partial(Torchs, sizes, device),
            **{who: partial(Ours, stage, own, sizes, device) for who, (stage, own) in OURS.items()},
        }.items():
            exact = make(torch.float64)  # in fp32 Adam's division makes much of the order of sums
            for _ in range(2):
                exact.step(tokens, labels)
            weights[who] = exact.weights()
            with peak_memory() as memory:
                one = make()
                for _ in range(2):
                    one.step(tokens, labels)
            peaks[who] = largest(memory.peak, device)
            del one, exact
            gc.collect()
        for who in OURS:
            must_be_equal(weights[who], weights["torch"], f"{who}, {name}")
        theirs = Torchs(sizes, device)
        for who, (stage, own) in OURS.items():
            ours = Ours(stage, own, sizes, device)
            steps = (partial(ours.step, tokens, labels), partial(theirs.step, tokens, labels))
            ratio = paired(*steps, repeats=9, setup=dist.barrier)
            rows.append([name, who, ratio, peaks[who] / peaks["torch"], peaks["torch"]])
    if dist.get_rank() == 0:
        write_result(
            "03_zero",
            f"Stages 1 and 2 against DistributedDataParallel with ZeroRedundancyOptimizer, {RANKS} ranks",
            ["parameters", "ours", "seconds of a step / torch's (quartiles)", "peak bytes / torch's", "torch's peak"],
            rows,
            f"fp32, AdamW, buckets of {BUCKET} MiB, 2 x 64 tokens a rank. The weights after two steps in float64 were "
            "compared first. A peak is that of building the model and two steps, on the rank where it is largest.",
        )


if __name__ == "__main__":
    launch(benchmark)
