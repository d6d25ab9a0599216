"""Stage 1 and 2 against torch's DistributedDataParallel with ZeroRedundancyOptimizer: same model, 4 ranks, one run.

    python 03_zero/in_depth/bench_zero_stages.py              4 processes on CPU (gloo), or 4 GPUs (nccl)

First the weights after two AdamW steps are compared; only then is anything measured. A step is zero_grad, forward,
backward with its communication, and the update. Peaks count every tensor from the building of the model on, on the
rank where they are largest. On a CPU a second table says what gloo's reduce-scatter costs beside its all-reduce.
"""

import gc
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, largest, launch, must_be_equal, processor_ratios
from _zero_demo import Decoder, make_batch, token_loss_sum
from harness.meter import peak_memory
from harness.report import Ratio, paired, ratio_of, write_result
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from zero3 import make_zero
from zero_stages import ExchangeAndSum, SendToAll, reduce_scatter

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
            ratio = paired(*steps, repeats=15, setup=dist.barrier)
            processor = [] if torch.cuda.is_available() else [ratio_of(processor_ratios(*steps, repeats=15))]
            rows.append([name, who, ratio, *processor, peaks[who] / peaks["torch"], peaks["torch"]])
    if dist.get_rank() == 0:
        write_result(
            "03_zero",
            f"Stages 1 and 2 against DistributedDataParallel with ZeroRedundancyOptimizer, {RANKS} ranks",
            [
                "parameters",
                "ours",
                "seconds of a step / torch's (quartiles)",
                *([] if torch.cuda.is_available() else ["processor seconds / torch's"]),
                "peak bytes / torch's",
                "torch's peak",
            ],
            rows,
            f"fp32, AdamW, buckets of {BUCKET} MiB, 2 x 64 tokens a rank. The weights after two steps in float64 were "
            "compared first. A peak is that of building the model and two steps, on the rank where it is largest. "
            "Processor seconds are those of all ranks and all their threads.",
        )
    if not torch.cuda.is_available():
        compare_reductions(device)


def compare_reductions(device: torch.device) -> None:
    """gloo's reduce-scatter against its all-reduce, and an exchange with a sum: the same buffer of a bucket."""
    numel = BUCKET * MIB // 4
    flat, mine = torch.ones(numel, device=device), torch.empty(numel // RANKS, device=device)
    group = dist.group.WORLD
    ways = {
        "gloo's reduce-scatter": lambda: reduce_scatter(mine, flat, group=group),
        "ExchangeAndSum": lambda: ExchangeAndSum(mine, flat, group=group, async_op=False),
    }

    def all_reduce() -> None:
        dist.all_reduce(whole, group=group)

    rows = []
    for what, way in ways.items():
        way()
        if not (mine == RANKS).all():
            raise SystemExit(f"{what}: a sum of {RANKS} ones is not {mine[0].item()}")
        whole = torch.zeros(numel)  # zeros stay what they are, however often they are added
        seconds = paired(way, all_reduce, repeats=31, setup=dist.barrier)
        rows.append([what, seconds, ratio_of(processor_ratios(way, all_reduce, repeats=31))])
    if dist.get_rank() == 0:
        write_result(
            "03_zero_gloo",
            f"Ways to sum a bucket of {BUCKET} MiB into shards, {RANKS} ranks, against gloo's all-reduce of it",
            ["", "seconds / all-reduce", "processor seconds / all-reduce"],
            rows,
            "Medians of pairs, and quartiles; processor seconds are those of all ranks and all their threads.",
        )


if __name__ == "__main__":
    launch(benchmark)
