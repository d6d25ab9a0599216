"""Rules of thumb, made by the planner's own searches, and beside them those of the Ultra-Scale Playbook.

Problem. Without a planner one uses a rule: "below ten billion parameters, ZeRO-3 and nothing else". Such
rules come from one cluster, batch and library. Do they hold here?

Idea. The playbook's section "Finding the Best Training Configuration" has four, by size and by number of GPUs:

    < 10B            one technique on 8 GPUs: tensor parallel, or ZeRO-3 with full recomputation
    10B to 100B      tensor parallel of 8 with a pipeline; tensor parallel of 8 with ZeRO-3; ZeRO-3 alone
    512 GPUs         ZeRO-3 alone becomes slow: combine it with tensor or pipeline ranks
    1,024 GPUs       tensor parallel of 8, ZeRO-2, and a pipeline

Each way leaves something open (micro-batch, recomputation, length of the pipeline). `fastest` finds the best
choice of these, so that a way is judged at its best, and compares it with the fastest of all layouts:

    rule = the axes of the simplest layout within the clock's accuracy (plan.py), for every model of the class

    python 11_5d_trainer/planner/plan_rules.py           searches, and prints the table 11_plan_rules
"""

from dataclasses import replace
from itertools import product
from typing import Any

import planner_paths  # noqa: F401  finds the trainer and the chapters
from plan import by_simplicity, family
from plan_figures import SIZES
from plan_search import (
    MICRO_BATCHES,
    RECOMPUTE,
    SCHEDULES,
    Candidate,
    Task,
    exact,
    grids,
    name,
    refused,
    rough_peak,
    search,
)
from plan_time import Cluster, read_cluster, step_time
from schedule_simulator import ScheduleError

BATCH, SEQ = 512, 8192  # as in the map of the best layouts
# The playbook's ways: (tensor ranks, is there a pipeline?, stage of ZeRO)
WAYS: dict[str, tuple[int, bool, int]] = {
    "tensor parallel of 8": (8, False, 1),
    "ZeRO-3": (1, False, 3),
    "tp 8 and a pipeline": (8, True, 1),
    "tp 8 and ZeRO-3": (8, False, 3),
    "tp 8, ZeRO-2 and a pipeline": (8, True, 2),
}
# (class, GPUs, models, the ways that the playbook names there)
CASES: tuple[tuple[str, int, tuple[str, ...], tuple[str, ...]], ...] = (
    ("< 10B", 8, ("1B", "3B", "8B"), ("tensor parallel of 8", "ZeRO-3")),
    ("10B to 100B", 64, ("13B", "70B"), ("tp 8 and a pipeline", "tp 8 and ZeRO-3", "ZeRO-3")),
    ("512 GPUs", 512, ("8B", "70B"), ("ZeRO-3", "tp 8 and ZeRO-3", "tp 8 and a pipeline")),
    ("1,024 GPUs", 1024, ("8B", "70B"), ("tp 8, ZeRO-2 and a pipeline",)),
)
NONE = "does not fit"


def task_of(model: str, gpus: int, cluster: Cluster) -> Task:
    return Task(SIZES[model], None, cluster, gpus, BATCH, SEQ)


def fastest(task: Task, way: tuple[int, bool, int]) -> Candidate | None:
    """The fastest layout of this way that fits, or None. Ranked by formulas, then evaluated exactly."""
    tp, deep, zero = way
    tried: list[tuple[float, int, Any]] = []
    for grid in grids(task):
        if (grid.tp, grid.pp > 1, grid.cp) != (tp, deep, 1) or refused(task, grid):
            continue
        batch = task.global_batch // grid.dp
        schedules = SCHEDULES if deep else (("1f1b", 1),)
        for each, mode, (schedule, v) in product(MICRO_BATCHES, RECOMPUTE, schedules):
            if (
                batch % each
                or grid.pp * v > task.model.layers
                or (schedule == "interleaved" and batch // each % grid.pp)
            ):
                continue
            layout = replace(grid, zero=zero, sequence_parallel=tp > 1, micro_batch=each, micro_batches=batch // each,
                             recompute=mode, schedule=schedule, stages_per_rank=v)  # fmt: skip
            try:
                if rough_peak(task, layout) <= 1.05 * task.memory:
                    seconds = step_time(task.model, None, layout, task.cluster, simulated=False).seconds
                    tried.append((seconds, len(tried), layout))
            except ScheduleError:  # too few micro-batches for this schedule
                continue
    for _, _, layout in sorted(tried, key=lambda one: one[:2]):
        candidate = exact(task, layout)
        if candidate is not None and candidate.peak <= task.memory:
            return candidate
    return None


def rule(task: Task) -> tuple[str, Candidate, Candidate]:
    """(axes of the simplest layout within the clock's accuracy, that layout, the fastest). The playbook's
    ways are included: a search's ten fastest may all be variants that beat a simpler one by a thousandth."""
    found = search(task).best
    ways = [fastest(task, way) for way in WAYS.values()]
    best = min(found, key=lambda each: each.step.seconds)
    every, _ = by_simplicity(sorted([*found, *filter(None, ways)], key=lambda each: each.step.seconds))
    return family(every[0].layout), every[0], best


def rows(cluster: Cluster, cases: Any = CASES) -> list[list[Any]]:
    """[class, GPUs, model, the planner's rule, its layout, s; the playbook's way, its layout, times as long]"""
    found: list[list[Any]] = []
    for what, gpus, models, ways in cases:
        for model in models:
            task = task_of(model, gpus, cluster)
            axes, simplest, best = rule(task)
            start = [what, gpus, model, axes, name(simplest.layout), round(simplest.step.seconds, 3)]
            for way in ways:
                other = fastest(task, WAYS[way])
                beside = [name(other.layout), round(other.step.seconds / best.step.seconds, 2)] if other else [NONE, ""]
                found.append([*start, way, *beside])
    return found


COLUMNS = ["rule for", "GPUs", "model", "the planner's rule", "layout", "predicted s"]
COLUMNS += ["the playbook's way", "at its best", "times as long as the fastest"]

if __name__ == "__main__":
    print(" | ".join(COLUMNS))
    for row in rows(read_cluster("h100-400g")):
        print(" | ".join(map(str, row)))
