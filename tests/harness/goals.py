"""The chapters' goals on one H100 or H200, and whether a run on a GPU reached them.

The goals were set before anything had been measured. `judge` finds each value in the results of a run and
returns "reached" or "missed"; a goal whose benchmark did not run stays "not measured".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


def number(cell: Any) -> float | None:
    """The number in a cell: of 0.93, "93%", "1.24" or a ratio; None for words."""
    if isinstance(cell, dict):
        return float(cell["ratio"]["median"])
    if isinstance(cell, (int, float)):
        return float(cell)
    text = str(cell).strip()
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


@dataclass(frozen=True)
class Goal:
    chapter: str
    what: str
    result: str  # the name in results/
    column: str  # whose `best` value counts
    where: Mapping[str, str | float]  # in rows where these columns equal a word, or are less than a number
    bound: float
    best: Callable[..., float | None] = max
    at_most: bool = False
    on_h100: float | None = None  # the bound where there are 80 GB of memory and not 141

    @property
    def columns(self) -> set[str]:
        """The columns that are read; a benchmark that renames one breaks a test."""
        return {self.column, *self.where}

    def figure(self, rows: Sequence[dict[str, Any]]) -> float | None:
        fits = [row for row in rows if all(_holds(row[column], what) for column, what in self.where.items())]
        return self.best((value for row in fits if (value := number(row[self.column])) is not None), default=None)

    def bound_on(self, device: str) -> float:
        return self.on_h100 if self.on_h100 is not None and "H100" in device else self.bound

    def met(self, value: float, device: str) -> bool:
        return value <= self.bound_on(device) if self.at_most else value >= self.bound_on(device)


def _holds(cell: Any, what: str | float) -> bool:
    return what in str(cell) if isinstance(what, str) else 0 < (number(cell) or 0) < what


FORWARD, BACKWARD = ({"pass": name, "shape": "8192 tokens, D 128, causal"} for name in ("forward", "backward"))
FASTER = "times as fast: median (quartiles)"
SMALL = "fused output layer and loss in under 15 % of the memory, time against PyTorch"
SMALL_ONES: Mapping[str, str | float] = {"version": "fused", "peak / PyTorch": 0.15}
COPIES = "of the copy bandwidth"
FP32: Mapping[str, str | float] = {"precision": "float32"}
CUBE, SHORT = ({"precision": "bfloat16", "shape": f"8192 x 8192 x {K}"} for K in (8192, 1024))
GOALS = (
    Goal("08", "tokens that FPDT fits", "08_fpdt_longest", "tokens", {"way": "FPDT"}, 2e6, on_h100=1e6),
    # 90 % of the formula (_fpdt_gpu.predicted_seconds): 69 % with heads of 128, attention counted as the full square
    Goal("08", "MFU of FPDT at 524,288 tokens", "08_fpdt_gpu", "MFU", {"tokens": "524288", "way": "FPDT"}, 0.62),
    Goal("09", "slowest fused kernel, share of the copy bandwidth", "09_fused_gpu", COPIES, {}, 0.9, best=min),
    Goal("09", "FlashAttention forward, times SDPA's flash", "09_flash_speed", "times flash", FORWARD, 1.2),
    Goal("09", "FlashAttention backward, times SDPA's flash", "09_flash_speed", "times flash", BACKWARD, 1.1),
    Goal("09", "FlashAttention forward, times cuDNN", "09_flash_speed", "times cuDNN", FORWARD, 0.9),
    Goal("09", "best fp32 rung, share of cuBLAS", "09_matmul_gpu", "of cuBLAS", FP32, 0.93),
    Goal("09", "best bf16 rung at 8192 cubed, share of cuBLAS", "09_matmul_gpu", "of cuBLAS", CUBE, 0.9),
    Goal("09", "best bf16 rung with K 1024, share of cuBLAS", "09_matmul_gpu", "of cuBLAS", SHORT, 0.9),
    Goal("09", SMALL, "09_fused_loss_gpu", "time / PyTorch", SMALL_ONES, 1.0, best=min, at_most=True),
    Goal("10", "fp8 linear layer, times as fast as bf16", "10_fp8_speed", FASTER, {"what": "linear"}, 1.4),
    Goal("10", "fp8 training step, times as fast as bf16", "10_fp8_speed", FASTER, {"what": "training step"}, 1.2),
    Goal("11", "MFU of a training step in bf16", "11_train_gpu", "MFU", {"kernels; precision": "bf16"}, 0.6),
)


def rows_of(record: Record) -> list[dict[str, Any]]:
    return [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]]


def judge(results: dict[str, Record], device: str) -> list[list[Any]]:
    """One row for each goal: chapter, goal, what was asked, what was reached, the verdict, and where the time went."""
    table = []
    for goal in GOALS:
        record, value = results.get(goal.result), None
        if record and goal.columns <= set(record["columns"]):
            value = goal.figure(rows_of(record))
        asked = f"{'at most' if goal.at_most else 'at least'} {goal.bound_on(device):,.10g}"
        if value is None:
            table.append([goal.chapter, goal.what, asked, "-", "not measured", "-"])
            continue
        met = goal.met(value, device)
        reason = "-" if met or goal.result != "11_train_gpu" else first_reason(results.get("11_train_parts"))
        table.append([goal.chapter, goal.what, asked, f"{value:,.4g}", "reached" if met else "missed", reason])
    return table


def ran(sections: Sequence[dict[str, Any]], commit: str) -> list[list[Any]]:
    """One row for each section of a run: its name, how many steps passed, their seconds, the clock of the GPU
    and its power in each step, and the status of the others.

    A section that ran at another commit than `commit` says so: files of several calls may be merged later.
    """
    rows = []
    for section in sections:
        steps = section["steps"]
        passed = sum(step["status"] == "passed" for step in steps)
        others = [f"{step['step']}: {step['status']}, {step['reason']}" for step in steps if step["status"] != "passed"]
        at = section.get("commit", commit)
        name = section["name"] + (f" (commit {at})" if at != commit else "")
        seconds = round(sum(step["seconds"] for step in steps), 1)
        clocks = [step["clocks"] for step in steps if step.get("clocks")]
        rows.append([name, f"{passed} of {len(steps)}", seconds, "; ".join(clocks) or "-", "; ".join(others) or "-"])
    return rows


def overview(run: Record) -> dict[str, Record]:
    """Two results about all the others of a run: what ran, and which goals it reached."""
    asked = ["chapter", "goal", "asked", "reached", "verdict", "first reason"]
    what = ["section", "steps passed", "seconds of its steps", "clock and power of each step", "the others"]
    tables = {
        "gpu_run": ("What ran on the GPU", what, ran(run["sections"], run["environment"]["commit"])),
        "gpu_goals": (
            "Goals that were set for one H100 or H200, and what was reached",
            asked,
            judge(run["results"], run["environment"]["device"]),
        ),
    }
    same = {"notes": "", "verified": True, "environment": run["environment"]}
    return {
        name: {"name": name, "title": title, "columns": columns, "rows": rows} | same
        for name, (title, columns, rows) in tables.items()
    }


def first_reason(record: Record | None) -> str:
    """The part of a training step that is farthest above its floor, from the profile."""
    if not record:
        return "-"
    lost = {}
    for row in rows_of(record):
        floor = number(row["floor, ms"]) or 0.0
        if row["part"] != "step":
            lost[f"{row['part']}, {row['model']}"] = row["ms"] - floor
    part = max(lost, key=lost.__getitem__)
    return f"{part}: {lost[part]:.3g} ms above its floor"
