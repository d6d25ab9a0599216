"""The executor against torch.distributed.pipelining: same stages, same schedule, same ranks, one run.

    python 06_pipeline_parallel/in_depth/bench_pipeline_executor.py  4 processes on CPU (Gloo) or 4 GPUs

First losses and all gradients are compared with torch's; only then is anything timed. A step is zero_grad,
and forward and backward of all micro-batches. Our steps and torch's alternate. The processes share this
machine's cores, so the ratio compares the overhead: finding the split, starting messages, bookkeeping.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _pipeline_model import Sizes, Stage, make_batch, token_loss_sum
from harness.report import Ratio, option_given, paired, write_result
from harness.spawn import launch
from pipeline_executor import Pipeline, layers_of
from schedules import build
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as theirs

RANKS, MICRO_BATCHES, ROWS, LENGTH = 4, 8, 2, 64
SIZES = Sizes(hidden=128, heads=4, layers=8)
PAIRS = {  # our name -> stages per rank, torch's class
    "afab": (1, theirs.ScheduleGPipe),
    "1f1b": (1, theirs.Schedule1F1B),
    "interleaved": (2, theirs.ScheduleInterleaved1F1B),
    "zb-v": (2, theirs.ScheduleZBVZeroBubble),
    "dualpipe-v": (2, theirs.ScheduleDualPipeV),
}


class Positioned(nn.Module):
    """A stage with its own positions, so that both executors can call it with one tensor."""

    def __init__(self, stage: int, stages: int, device: torch.device):
        super().__init__()
        layers = layers_of(stage, stages, SIZES.layers)
        self.stage = Stage(SIZES, layers, first=stage == 0, last=stage == stages - 1, tied=False).to(device)
        self.positions = torch.arange(LENGTH, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x, self.positions)


def compare(name: str, device: torch.device) -> list[str | int | Ratio]:
    group, rank = dist.group.WORLD, dist.get_rank()
    per_rank, their_schedule = PAIRS[name]
    schedule = build(name, RANKS, MICRO_BATCHES, per_rank)
    tokens, labels = (x.to(device) for x in make_batch(0, MICRO_BATCHES, rows=ROWS, length=LENGTH))
    valid = labels.numel()

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss_sum(logits, labels) / valid

    held = [stage for _, stage in schedule.stages_of(rank)]
    mine, other = ({s: Positioned(s, schedule.stages, device) for s in held} for _ in range(2))
    example = torch.empty(ROWS, LENGTH, SIZES.hidden, device=device)
    pipeline = Pipeline(schedule, {(0, s): mine[s] for s in held}, group, loss=loss_of, example=example)
    stages = [pipelining.PipelineStage(other[s], s, schedule.stages, device, group=group) for s in held]
    given = stages[0] if name in ("afab", "1f1b") else stages
    runner = their_schedule(given, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    first, last = 0 in held, schedule.stages - 1 in held
    whole = {"args": (tokens.flatten(0, 1),) if first else (), "target": labels.flatten(0, 1) if last else None}
    losses: list[Tensor] = []

    def our_step() -> Tensor:
        for module in mine.values():
            module.zero_grad()
        return pipeline.step(tokens, labels)

    def their_step() -> None:
        for module in other.values():
            module.zero_grad()
        losses.clear()
        runner.step(*whole["args"], target=whole["target"], losses=losses)

    for _ in range(2):
        loss = our_step()
        their_step()
    wrong = ""
    if last and not abs(loss.item() - sum(x.item() for x in losses)) <= 1e-4 * loss.item():
        wrong = f"{name}: loss {loss.item()}, torch's {sum(x.item() for x in losses)}"
    for s in held:
        for (key, p), q in zip(mine[s].named_parameters(), other[s].parameters(), strict=True):
            error = (p.grad - q.grad).abs().max() / q.grad.abs().max()
            if not error <= 1e-4:
                wrong = f"{name}: the gradient of {key} in stage {s} differs from torch's by {error:.1e}"
    found = [None] * RANKS
    dist.all_gather_object(found, wrong)
    if any(found):
        raise SystemExit("; ".join(filter(None, found)))
    ratio = paired(our_step, their_step, repeats=15, setup=lambda: dist.barrier(group))
    return [name, their_schedule.__name__, schedule.stages, ratio]


def worker(device: torch.device) -> None:
    rows = [compare(name, device) for name in PAIRS]
    if dist.get_rank() == 0:
        write_result(
            "06_pipeline_parallel",
            f"Step time against torch.distributed.pipelining, {RANKS} ranks, {MICRO_BATCHES} micro-batches",
            ["schedule", "torch's class", "stages", "seconds of this executor / of torch's"],
            rows,
            "A step is zero_grad, and forward and backward of all micro-batches. Losses and gradients were compared "
            "first. Medians of pairs, and quartiles, on rank 0.",
        )


def main() -> None:
    option_given()
    launch(worker, RANKS)


if __name__ == "__main__":
    main()
