"""From plan to run: a run's measured speed beside the planner's prediction, and written into a cluster file.

Problem. The speed of a matmul depends on the GPU's power limit, the libraries, and the code around it. The
same H100 rules are off by a fifth from one published program to the next, and right within each. One run of
your own fixes that. Idea. A run's folder has its options, its sizes (in a checkpoint) and its tokens per
second. The options go through `step_time` on the cluster file; the result is compared with the median of the
measured steps after three steps of warm-up. With --write, `ceiling`, the fraction of the file's rate that
matmuls reach, is set so that both agree: it is the constant in which GPUs and programs differ most. All later
plans with this file use it. The cost of messages is not changed, so use a run whose time is mostly matmuls.

    python 11_5d_trainer/planner/plan.py --after runs/20260101-120000 --cluster my.json --nodes 1
    python 11_5d_trainer/planner/plan.py --after runs/20260101-120000 --cluster my.json --nodes 1 --write

The world of the run is --nodes times the file's gpus_per_node.
"""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import planner_paths  # noqa: F401  finds the trainer and the chapters
import checkpoint
from llama import LlamaConfig
from moe_layer import MoEConfig
from options import Config, UsageError
from plan_memory import Layout, check_planned
from plan_search import name
from plan_time import Cluster, Step, read_cluster, step_time

WARM = 3  # steps that are not counted


def measured_seconds(run: Path, tokens: int) -> float:
    """Seconds of a step: its tokens over the median rate in log.jsonl. Raises UsageError."""
    file = run / "log.jsonl"
    if not file.is_file():
        raise UsageError(f"--after {run} holds no log.jsonl; give the folder that a run wrote")
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    except ValueError:
        raise UsageError(f"--after {run}: log.jsonl is damaged; take another run") from None
    speeds = [line["tokens_per_s"] for line in lines if line.get("tokens_per_s")][WARM:]
    if not speeds:
        raise UsageError(
            f"--after {run} has no more than {WARM} steps with a speed, which warm up; let it train longer"
        )
    return tokens / statistics.median(speeds)


def fitting_ceiling(
    model: LlamaConfig, moe: MoEConfig | None, layout: Layout, cluster: Cluster, seconds: float
) -> float | None:
    """The ceiling at which the planner predicts `seconds`; None if there is none up to the full peak."""

    def at(ceiling: float) -> float:
        return step_time(model, moe, layout, replace(cluster, ceiling=ceiling)).seconds

    low, high = 1e-4, 1.0
    if not at(high) <= seconds <= at(low):
        return None
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) > seconds else (low, middle)
    return high


def after(run: Path, cluster_name: str, nodes: int, write: bool) -> tuple[list[str], dict[str, Any]]:
    """What `plan.py --after` prints. Raises UsageError."""
    cluster = read_cluster(cluster_name)
    if nodes > cluster.nodes:
        raise UsageError(f"--nodes {nodes} is more than the {cluster.nodes} of {cluster_name}; use {cluster.nodes}")
    if write and not cluster_name.endswith(".json"):
        raise UsageError(f"--write would change {cluster_name}, which others use; copy it, and name your file.json")
    if not run.is_dir():
        raise UsageError(f"--after {run} is no folder; give the one that a run wrote")
    try:
        _, _, progress, _ = checkpoint.find(str(run))
    except UsageError as error:
        raise UsageError(str(error).replace("--resume", "--after")) from None
    config = Config(**progress.config)
    sizes = LlamaConfig(**progress.sizes)
    layout = Layout.of(config, sizes, (nodes or cluster.nodes) * cluster.gpus_per_node)
    check_planned(config, sizes, (nodes or cluster.nodes) * cluster.gpus_per_node)
    moe = config.mixture(sizes)
    measured = measured_seconds(run, layout.global_batch * layout.seq_len)
    step: Step = step_time(sizes, moe, layout, cluster)
    lines = [
        name(layout),
        "",
        f"measured   {measured:10.4f} s a step, the median",
        f"predicted  {step.seconds:10.4f} s",
    ]
    lines += [f"           {seconds:10.4f}   {what}" for what, seconds in step.parts.items() if seconds]
    ceiling = fitting_ceiling(sizes, moe, layout, cluster, measured)
    data: dict[str, Any] = {"measured": measured, "predicted": step.seconds, "parts": step.parts, "ceiling": ceiling}
    if ceiling is None:
        why = "no share of the peak explains it; is --nodes right, and the peak of the file?"
        if write:
            raise UsageError(f"--write: {measured:.4f} s measured and {step.seconds:.4f} s predicted: {why}")
        return [*lines, f"ceiling    {cluster.ceiling:10.4f}   stays: {why}"], data
    lines.append(f"ceiling    {cluster.ceiling:10.4f}   in the file; they agree at {ceiling:.4f}")
    if write:
        file = Path(cluster_name)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"ceiling": ceiling}, indent=1) + "\n")
        lines.append(f"wrote {file}")
    return lines, data
