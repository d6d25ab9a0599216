"""The fp8 recipes beside fp32: loss after 300 steps, and whether one fails first as the learning rate grows.

    python 10_mixed_precision/in_depth/bench_fp8_recipes.py [--only recipes|rates] [--keep DIR] [--figures]

First every recipe's gradients are checked. Then the runs, some minutes on two idle cores: `recipes` writes
10_fp8_recipes and 10_fp8_curves, `rates` 10_fp8_learning_rates. With --keep, finished runs are stored in that
folder, and a second call of the same commit continues from there.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
from _precision_bench import LR, STEPS, curves, start
from _precision_demo import Decoder, OneLineParser, batch, loss_sum, stdlib_bytes
from harness.figures import GREY, write_figure
from harness.report import write_result

FIGURES = "10_mixed_precision/figures"
PRODUCTS = [
    "bf16",
    "fp8-tensor",
    "fp8-tensor-delayed",
    "fp8-row",
    "fp8-block",
    "mxfp8",
    "nvfp4",
]  # choices of the trainer's `--precision`
LIMIT = 0.5  # per cent of the loss of fp32, for DeepSeek-style fp8
RATES = [LR, 1e-2, 3e-2, 1e-1]
SWEPT = ["fp32", "fp8-tensor", "fp8-tensor-delayed", "fp8-block"]
NEAR = 1.0  # per cent of the loss of fp32 on the same batches, for each run at the first of these rates
SWEEP_STEPS, SEEDS = 60, 3


def verify() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tokens, labels = batch(stdlib_bytes(20_000), 0)
    exact = Decoder()
    (loss_sum(exact, tokens, labels) / labels.numel()).backward()
    for name in PRODUCTS:
        model, *_ = start(name)
        (loss_sum(model, tokens, labels) / labels.numel()).backward()
        for label, p in model.matrices().items():
            want = exact.get_parameter(label).grad
            error = ((p.grad - want).norm() / want.norm()).item()
            if not error < (0.3 if name == "nvfp4" else 0.12):
                sys.exit(f"bench_fp8_recipes.py: {name}: gradient of {label} is off by {error:.3f}")


def off(run: dict, base: dict) -> float:
    return math.nan if run["died"] else 100 * (run["held_out"] / base["held_out"] - 1)


def measure_recipes(keep: Path | None) -> None:
    names = ["fp32", *PRODUCTS]
    slow = curves([(name, STEPS, LR) for name in names], keep)
    by_name = {run["name"]: run for run in slow}
    base = by_name["fp32"]
    table = [[run["name"], run["died"] or f"{run['held_out']:.4f}", f"{off(run, base):+.2f} %"] for run in slow[1:]]
    if not abs(off(by_name["fp8-block"], base)) <= LIMIT:
        sys.exit(f"bench_fp8_recipes.py: fp8-block is {off(by_name['fp8-block'], base):+.2f} % off fp32")
    write_result(
        "10_fp8_recipes",
        f"Loss on held-out text after {STEPS} steps; fp32: {base['held_out']:.4f}",
        ["recipe", "loss", "against fp32"],
        table,
        "Same model, text and first weights as for the policies; all with bf16 weights and fp32 masters. Products are "
        "emulated with fp32 sums.",
    )
    rows = []
    for step in range(0, STEPS, 10):
        rows.append([step + 5, *(sum(run["losses"][step : step + 10]) / 10 for run in slow)])
    write_result("10_fp8_curves", "Training loss, mean of ten steps", ["step", *names], rows)


def measure_rates(keep: Path | None) -> None:
    """By learning rate and recipe: the median of runs on different batches, the smallest and the largest."""
    jobs = [(name, SWEEP_STEPS, lr, seed) for lr in RATES for name in SWEPT for seed in range(SEEDS)]
    runs, rows = curves(jobs, keep), []
    for i in range(0, len(jobs), SEEDS):
        name, _, lr, _ = jobs[i]
        # A run that ended counts as worse than any other.
        losses = sorted(math.inf if run["died"] else run["held_out"] for run in runs[i : i + SEEDS])
        worst_fp32 = losses[-1] if name == "fp32" else next(row[4] for row in rows if row[:2] == [f"{lr:g}", "fp32"])
        fails = losses[SEEDS // 2] > worst_fp32
        bases = runs[i - i % (SEEDS * len(SWEPT)) :][:SEEDS]  # fp32, by seed
        apart = [off(run, base) for run, base in zip(runs[i : i + SEEDS], bases, strict=True)]
        if lr == RATES[0] and not max(map(abs, apart)) <= NEAR:
            sys.exit(f"bench_fp8_recipes.py: {name} at {lr:g} is {apart} % off fp32, more than {NEAR}")
        cell = "-" if name == "fp32" else f"{min(apart):+.2f} to {max(apart):+.2f} %"
        rows.append([f"{lr:g}", name, losses[SEEDS // 2], losses[0], losses[-1], cell, "yes" if fails else "no"])
    write_result(
        "10_fp8_learning_rates",
        f"Loss after {SWEEP_STEPS} steps: median, smallest and largest of {SEEDS} runs on different batches",
        ["learning rate", "recipe", "median", "smallest", "largest", "against fp32, run by run",
         "median worse than every run of fp32"],
        rows,
        "Run by run: each beside the run of fp32 on the same batches.",
    )  # fmt: skip


def draw_curves(axes, result) -> None:
    left, right = axes
    columns = {name: [row[i] for row in result["rows"]] for i, name in enumerate(result["columns"])}
    left.plot(columns["step"], columns["fp32"], color=GREY, label="fp32")
    for name in ("fp8-block", "nvfp4"):
        left.plot(columns["step"], columns[name], "--", lw=1, label=name)
    left.set(xlabel="step", ylabel="training loss", title="Curves that coincide")
    left.legend(fontsize=8)
    for name in result["columns"][2:]:
        difference = [100 * (a / b - 1) for a, b in zip(columns[name], columns["fp32"], strict=True)]
        right.plot(columns["step"], difference, lw=1, label=name)
    right.set(xlabel="step", ylabel="training loss against fp32, %", title="And what lies between them", ylim=(-2, 2))
    right.legend(fontsize=7, ncols=2)


def draw_rates(axes, result) -> None:
    for i, name in enumerate(SWEPT):
        mine = [row for row in result["rows"] if row[1] == name]
        rates = [float(row[0]) * 1.04 ** (i - 1.5) for row in mine]  # side by side
        median, low, high = ([row[column] for row in mine] for column in (2, 3, 4))
        bars = [[m - a for m, a in zip(median, low, strict=True)], [b - m for m, b in zip(median, high, strict=True)]]
        axes.errorbar(rates, median, bars, marker="o", ms=3, capsize=2, lw=1, label=name, color=f"C{i}" if i else GREY)
    axes.set(
        xscale="log", xlabel="learning rate", ylabel="loss on held-out text", title="Where recipes part, if they do"
    )
    axes.legend(fontsize=8)


def main() -> None:
    parser = OneLineParser(allow_abbrev=False)
    parser.add_argument("--only", choices=("recipes", "rates"), help="one of the two parts")
    parser.add_argument("--keep", type=Path, help="folder of finished runs")
    parser.add_argument("--figures", action="store_true", help="only draw the figures again")
    args = parser.parse_args()
    if args.keep and args.figures:
        parser.error(f"--keep {args.keep} is for runs, and --figures makes none; leave one of them out")
    if not args.figures:
        torch.set_num_threads(1)
        verify()
    if args.only != "rates":
        if not args.figures:
            measure_recipes(args.keep)
        write_figure(f"{FIGURES}/recipes.svg", ["10_fp8_curves"], draw_curves, shape=(1, 2))
    if args.only != "recipes":
        if not args.figures:
            measure_rates(args.keep)
        write_figure(f"{FIGURES}/learning_rates.svg", ["10_fp8_learning_rates"], draw_rates)


if __name__ == "__main__":
    main()
