"""What waiting for the norm costs, by schedule, and what is lost when AdamW is turned round instead of copied.

    python 06_pipeline_parallel/in_depth/bench_post_validation.py        2 processes on CPU (gloo)

Nothing is timed: the first table is simulated, the second one counts rounding errors. First six steps on two ranks have
to be those of one process, and to the bit those of a pipeline that waits; if not, nothing is written.
"""

import argparse
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
import torch.multiprocessing as mp
from harness.report import write_result
from post_validation import LateStep, before_backward, demo, repeated, room
from schedule_simulator import simulate
from schedules import build
from torch import nn

RANKS, MICRO_BATCHES, STEPS = 8, 32, 10


def verify(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    groups = [dist.group.WORLD, dist.new_group()]
    wrong = demo(argparse.Namespace(rollback="copy"), build("zb-h2", 2, 4), groups, torch.device("cpu"))
    del groups
    dist.destroy_process_group()
    if wrong:
        raise SystemExit("; ".join(wrong))


def by_schedule() -> list[list]:
    rows = []
    for name, per_rank in (("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)):
        schedule = build(name, RANKS, MICRO_BATCHES, per_rank)
        one, many = simulate(schedule), simulate(repeated(schedule, STEPS))
        again = max(before_backward(schedule, list(actions)) for actions in schedule.actions)
        work = STEPS * min(one.work)
        waits, late = STEPS * one.makespan / work - 1, many.makespan / work - 1
        rows.append([name, f"{waits:.1%}", f"{late:.1%}", f"{room(schedule):g}", again])
    return rows


def one_step(size: float, rollback: str) -> float:
    """Step with a gradient of this norm, where the one before had 1, and back: the largest error of what is there."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(256, 256, generator=generator))
    optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1)
    directions = [torch.randn(p.shape, generator=generator) for _ in range(2)]
    p.grad = directions[0] / directions[0].norm()
    optimizer.step()
    state = optimizer.state[p]
    before = [t.clone() for t in (p.detach(), state["exp_avg"], state["exp_avg_sq"])]
    p.grad = directions[1] * size / directions[1].norm()
    group = dist.group.WORLD
    steps = LateStep(optimizer, group, 2 * size, rollback)
    steps.step()
    work, parts = steps.pending
    work.wait()
    parts.fill_(float("inf"))  # another rank's part says that this step must not be
    steps.validate()
    state = optimizer.state[p]
    after = (p.detach(), state["exp_avg"], state["exp_avg_sq"])
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(after, before, strict=True))


def main() -> None:
    if "--figures" in sys.argv[1:]:
        return  # it has none
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(verify, args=(folder,), nprocs=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sizes = (1, 100, 10_000)
    rows = [[rollback, *(f"{one_step(size, rollback):.0e}" for size in sizes)] for rollback in ("copy", "invert")]
    dist.destroy_process_group()
    if any(cell != "0e+00" for cell in rows[0][1:]):
        sys.exit(f"a copy brought back something else: {rows[0]}")
    write_result(
        "06_post_validation",
        f"Idle time / compute time over {STEPS} steps, {RANKS} ranks, {MICRO_BATCHES} micro-batches, F = B = W = 1",
        ["schedule", "all wait for the norm", "nobody waits", "the parts may take", "forwards of a bad look, at most"],
        by_schedule(),
        "Simulated; a stage of zb-v is half as long. The parts: how long they may be under way after the last rank's "
        "step before a rank waits for them. A bad look costs the rank that has made most so many forwards, and a step.",
    )
    write_result(
        "06_post_validation_rollback",
        "A step of AdamW taken back: largest error of weights and moments, float32",
        ["rollback", *(f"gradient of norm {size:,}" for size in sizes)],
        rows,
        "Over the largest number of the same tensor. The gradient of the step before had norm 1.",
    )


if __name__ == "__main__":
    main()
