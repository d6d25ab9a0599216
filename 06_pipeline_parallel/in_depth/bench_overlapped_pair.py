"""DualPipe's pairs, timed: in sequence and in turns, next to the prediction of `simulate`.

    python 06_pipeline_parallel/in_depth/bench_overlapped_pair.py        4 processes on CPU (Gloo)

Parts of a stage sleep and messages take a known time, so that processes that share two cores can be compared
with a simulation. First gradients and the order of events, with real all-to-alls, are checked.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import overlapped_pair
import torch
import torch.distributed as dist
from harness.report import option_given, ratio_of, write_result
from harness.spawn import launch
from overlapped_pair import Turns, pair_time
from pipeline_executor import Pipeline
from schedule_simulator import Times, simulate
from schedules import build
from torch import nn

RANKS, MICRO_BATCHES, PARTS = 4, 8, 3
PART, STEPS = 0.01, 3  # seconds that a part sleeps in F, in B and in W


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_takes = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_takes)
        return grad, None, None


class Later:
    """A message that arrives after a given time."""

    def __init__(self, seconds: float):
        self.there = time.perf_counter() + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self.there - time.perf_counter()))


class Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, turns, seconds):
        ctx.turns, ctx.seconds = turns, seconds
        turns.travel(lambda: Later(seconds))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.turns.travel(lambda: Later(ctx.seconds))
        return grad, None, None


class Stage(nn.Module):
    def __init__(self, turns: Turns, message: float):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(2, dtype=torch.float64) for _ in range(PARTS))
        self.turns, self.message = turns, message

    def forward(self, x):
        for i, weight in enumerate(self.weights):
            x = Travel.apply(x, self.turns, self.message) if i else x
            x = Sleep.apply(x, PART, PART) * Sleep.apply(weight, 0.0, PART)
        return x


def measure(message: float, in_turns: bool) -> list[float]:
    """Seconds of each step, from the first start to the last end on any rank."""
    schedule, turns, group = build("dualpipe-v", RANKS, MICRO_BATCHES, 2), Turns(), dist.group.WORLD
    stages = {key: Stage(turns, message) for key in schedule.stages_of(dist.get_rank())}
    x = torch.ones(MICRO_BATCHES, 2, dtype=torch.float64)
    hook = turns.overlap if in_turns else None
    pipeline = Pipeline(schedule, stages, group, loss=lambda y, _: y.sum(), example=x[0], overlap=hook)
    found = []
    for _ in range(STEPS):
        dist.barrier()
        pipeline.step(x, [None] * MICRO_BATCHES)
        spans: list = [None] * RANKS
        dist.all_gather_object(spans, (pipeline.timeline[0][1], pipeline.timeline[-1][2]))
        found.append(max(end for _, end in spans) - min(start for start, _ in spans))
    return found


def predicted(message: float, in_turns: bool) -> float:
    waits = (PARTS - 1) * message
    f, b, w = PARTS * PART + waits, PARTS * PART + waits, PARTS * PART
    pair = pair_time([PART] * PARTS, [2 * PART] * PARTS, message) if in_turns else None
    return simulate(build("dualpipe-v", RANKS, MICRO_BATCHES, 2), Times(f, b, w, pair=pair)).makespan


def worker(device: torch.device) -> None:
    wrong = overlapped_pair.run(2, device)
    if wrong:
        raise SystemExit("; ".join(wrong))
    rows = []
    for share in (0.5, 1.0, 2.0):
        message = share * PART
        alone, turns = predicted(message, False), predicted(message, True)
        times = {in_turns: measure(message, in_turns) for in_turns in (False, True)}
        ratios = [ratio_of([seconds / want for seconds in times[key]]) for key, want in ((False, alone), (True, turns))]
        gained = ratio_of([b / a for a, b in zip(times[False], times[True], strict=True)])
        rows.append([f"{share:g}", f"{turns / alone:.2f}", gained, *ratios])
    if dist.get_rank() == 0:
        write_result(
            "06_overlapped_pair",
            f"DualPipeV with messages inside its chunks, {RANKS} ranks, {MICRO_BATCHES} micro-batches: pairs in turns",
            [
                "a message, in F's of one part",
                "step in turns / one after the other, simulated",
                "by the clock",
                "one after the other, clock / simulated",
                "in turns, clock / simulated",
            ],
            rows,
            f"{PARTS} parts in a stage, which sleep {1000 * PART:g} ms in F, B and W each, and a message between two. "
            "Sleeping needs no core. Gradients, and the order of events with real all-to-alls, were compared first. "
            "Medians and quartiles.",
        )


def main() -> None:
    option_given()
    launch(worker, RANKS, gpus=False)


if __name__ == "__main__":
    main()
