"""The planner's clock against published runs: some to fit its constants, more to test it.

Problem. A clock that was fitted to eight times of one paper is right about these. Is it right about other
GPUs, models and software? Only runs that were not used for the fit can tell.

Idea. planner/published.json has a family for each published table: its source, its cluster file, what had to
be assumed, and a row for each run. Every row goes through `step_time`, the function that plans layouts. A
family is fitted or held out completely, and which it is was decided before the first fit:

    fitted      llm-foundry on A100s of 80 GB    products of many sizes, attention of many lengths, FSDP in one node
                Megatron 2022, table 5           tensor, sequence and pipeline parallelism
                playbook, data parallel          gradients behind backward, on 8 to 256 GPUs
    held out    all others: more GPUs than all of those, other GPUs, other software

Five constants are fitted (plan_time.py: CEILING, HALF, ATTENTION, PASSES, SLOWED). `fit` minimizes the mean
over the fitted families of |log(predicted / published)|; the absolute value, since tables have outliers. It
is a coordinate descent with ever smaller steps, and needs ten seconds:

    python 11_5d_trainer/planner/plan_published.py          each family, each row, and how far off it is
    python 11_5d_trainer/planner/plan_published.py --fit    the constants that it finds, beside those of plan_time.py

Throughput is compared: +10 % means that the planner predicts a tenth more tokens per second than were
measured. `after one run` is the error after the clock is scaled to the family's first row, as with a run of
your own. It shows whether layouts of the same software on the same machine are told apart.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import planner_paths  # noqa: F401  finds the trainer and the chapters
import plan_time
from llama import LlamaConfig
from plan_memory import Layout
from plan_search import name
from plan_time import Cluster, read_cluster, step_time

FILE = Path(__file__).parent / "published.json"
CONSTANTS = ("ceiling", "half", "attention", "passes", "slowed")
MEASURES = ("tokens_per_s_per_gpu", "seconds", "of_the_first")
FITTED, HELD_OUT = "fitted", "held out"


@dataclass(frozen=True)
class Run:
    """One published row. `measure` is the published quantity, one of MEASURES."""

    model_name: str
    model: LlamaConfig
    layout: Layout
    measure: str
    published: float

    def throughput(self, seconds: float) -> float:
        """Tokens per second and GPU of a step that takes so long."""
        return self.layout.global_batch * self.layout.seq_len // self.layout.ranks / seconds

    def as_throughput(self) -> float:
        """The published value in the same unit; for a ratio to the family's first row, the ratio itself."""
        if self.measure == "seconds":
            return self.throughput(self.published)
        return self.published


@dataclass(frozen=True)
class Family:
    family: str
    use: str  # FITTED or HELD_OUT
    cluster: str
    source: str
    assumed: str
    runs: tuple[Run, ...]

    @property
    def counted(self) -> range:
        """The rows that carry information: the first of ratios is 1 by definition."""
        return range(1 if self.runs[0].measure == "of_the_first" else 0, len(self.runs))


@lru_cache
def families() -> tuple[Family, ...]:
    given: dict[str, Any] = json.loads(FILE.read_text())
    models = {name: LlamaConfig(**sizes) for name, sizes in given["models"].items()}
    found = []
    for each in given["families"]:
        runs = []
        for row in each.pop("rows"):
            (measure,) = set(row) & set(MEASURES)
            sizes = row.pop("model")
            published = row.pop(measure)
            layout = Layout(**({"precision": "bf16-master"} | row))  # with --kernels torch: no source fused its norms
            runs.append(Run(sizes, models[sizes], layout, measure, published))
        found.append(Family(runs=tuple(runs), **each))
    return tuple(found)


def with_constants(cluster: Cluster, constants: Sequence[float]) -> Cluster:
    """`half` is relative to the FLOPs that a GPU does while it reads a byte, as HALF is."""
    values: dict[str, Any] = dict(zip(CONSTANTS, constants, strict=True))
    values["half"] *= cluster.peak_tflops * 1e3 / cluster.memory_gb_per_s
    return replace(cluster, **values)


def now() -> tuple[float, ...]:
    """The constants that the planner uses."""
    return tuple(getattr(plan_time, each.upper()) for each in CONSTANTS)


def predicted(family: Family, constants: Sequence[float] | None = None) -> list[float]:
    """The planner's value for `as_throughput`, for each run."""
    cluster = read_cluster(family.cluster)
    if constants is not None:
        cluster = with_constants(cluster, constants)
    times = (step_time(run.model, None, run.layout, cluster, simulated=False).seconds for run in family.runs)
    found = [run.throughput(each) for run, each in zip(family.runs, times, strict=True)]
    ratio = family.runs[0].measure == "of_the_first"
    return [each / found[0] for each in found] if ratio else found


def deviations(family: Family, constants: Sequence[float] | None = None) -> list[float]:
    """predicted / published - 1 of each run."""
    said = predicted(family, constants)
    return [got / run.as_throughput() - 1 for got, run in zip(said, family.runs, strict=True)]


def after_one_run(off: list[float]) -> list[float]:
    """Deviations after the clock is scaled to the first row."""
    return [(1 + each) / (1 + off[0]) - 1 for each in off]


# ------------------------------------------------------------------------------------------------------------- the fit


def loss(constants: Sequence[float]) -> float:
    """The mean over the fitted families of their mean |log(predicted / published)|."""
    means = []
    for family in families():
        if family.use == FITTED:
            off = deviations(family, constants)
            means.append(sum(abs(math.log1p(off[i])) for i in family.counted) / len(family.counted))
    return sum(means) / len(means)


# Several, since the minimum is flat: a higher ceiling with more elementwise work takes nearly as long.
STARTS = ((0.8, 2.0, 2.0, 1.0, 0.2), (0.7, 1.0, 2.0, 0.5, 0.1), (0.9, 3.0, 1.5, 0.5, 0.2), (0.85, 2.0, 1.2, 1.2, 0.3))


def fit() -> tuple[float, ...]:
    return min((downhill(start) for start in STARTS), key=loss)


def downhill(start: Sequence[float]) -> tuple[float, ...]:
    """Coordinate descent; the steps are halved where no step helps."""
    at = list(start)
    steps = [0.1 * each for each in at]
    best = loss(at)
    while steps[0] > 1e-4:
        moved = False
        for i, step in enumerate(steps):
            for change in (step, -step):
                tried = [*at[:i], at[i] + change, *at[i + 1 :]]
                if tried[i] > 0 and tried[0] <= 1 and (found := loss(tried)) < best:
                    at = tried
                    best = found
                    moved = True
                    break
        if not moved:
            steps = [step / 2 for step in steps]
    return tuple(at)


# ---------------------------------------------------------------------------------------------------------- the tables


def in_order(family: Family) -> str:
    """Pairs of rows published more than 5 % apart, and how many of them the planner orders alike."""
    said = predicted(family)
    want = [run.as_throughput() for run in family.runs]
    right = pairs = 0
    for i in range(len(want)):
        for j in range(i):
            if abs(math.log(want[i] / want[j])) > math.log(1.05):
                pairs += 1
                right += (said[i] < said[j]) == (want[i] < want[j])
    return f"{right} of {pairs}" if pairs else ""


def summary() -> tuple[list[str], list[list[Any]]]:
    """One row for each family, then the mean and the worst of the fitted and of the held-out families."""
    columns = ["rows", "family", "runs", "mean off, %", "bias, %", "worst, %"]
    columns += ["mean after one run, %", "pairs in order"]
    lines: list[list[Any]] = []
    for use in (FITTED, HELD_OUT):
        every: list[float] = []
        for family in families():
            if family.use != use:
                continue
            off = [deviations(family)[i] for i in family.counted]
            later = after_one_run(deviations(family))[1:]
            mean_later = percent(sum(map(abs, later)) / len(later)) if later else ""
            lines.append([use, family.family, len(off), *three(off), mean_later, in_order(family)])
            every += off
        lines.append([use, "all rows", len(every), *three(every), "", ""])
    return columns, lines


def three(off: list[float]) -> list[float]:
    mean = sum(map(abs, off)) / len(off)
    bias = sum(off) / len(off)
    return [percent(mean), percent(bias), percent(max(off, key=abs))]


def percent(share: float) -> float:
    return round(100 * share, 1)


def rows() -> tuple[list[str], list[list[Any]]]:
    """Every run with its source's number and the planner's."""
    columns = ["rows", "family", "run", "published", "predicted", "off, %"]
    lines: list[list[Any]] = []
    for use in (FITTED, HELD_OUT):
        for family in families():
            if family.use == use:
                said = predicted(family)
                off = deviations(family)
                for run, got, share in zip(family.runs, said, off, strict=True):
                    what = f"{run.model_name}, {run.layout.seq_len} tokens, {name(run.layout)}"
                    lines.append([use, family.family, what, *map(digits, (run.as_throughput(), got)), percent(share)])
    return columns, lines


def digits(number: float) -> float | int:
    return round(number) if number > 10 else round(number, 2)


@lru_cache
def error_bar() -> tuple[float, float]:
    """The fractions of the predicted seconds between which nine in ten of the held-out runs lie."""
    ratios = sorted(
        1 + deviations(family)[i] for family in families() if family.use == HELD_OUT for i in family.counted
    )
    return ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]


def main() -> None:
    if "--fit" in sys.argv[1:]:
        print("constant   fitted     in plan_time.py")
        for each, found, used in zip(CONSTANTS, fit(), now(), strict=True):
            print(f"{each:10} {found:<10.4g} {used:g}")
        return
    for columns, lines in (rows(), summary()):
        print(" | ".join(columns))
        for line in lines:
            print(" | ".join(map(str, line)))
        print()
    for family in families():
        print(f"{family.family}: {family.source}; {family.assumed}")


if __name__ == "__main__":
    main()
