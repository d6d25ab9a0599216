"""MXFP8, MXFP4 and NVFP4 beside fp8: what each loses where, and a model with outliers in which the recipes part.

    python 10_mixed_precision/in_depth/bench_microscaling.py [--only formats|model] [--figures]

First all patterns must be torch's. `formats` takes seconds and writes 10_microscaling; `model` trains a decoder with
K = 4096, a run for each recipe, size of outliers and seed. It takes some ten minutes of one core and writes
10_outlier_model.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _precision_bench import LR, curves
from formats import FORMATS, Format, quantize
from fp8 import e4m3, relative, with_outliers
from harness.figures import write_figure
from harness.report import write_result
from microscaling import E2M1, MICRO, unlike_torch
from torch import Tensor

FIGURES = "10_mixed_precision/figures"
RECIPES = ["tensor", "row", "block", "mxfp8", "mxfp4", "nvfp4"]
FACTORS = [1, 2**7, 2**17]
STEPS, SEEDS = 60, 3
LIMIT = 1.0  # per cent of the loss of fp32 with the same batches, for tiles and mxfp8, whatever the outliers


def verify() -> None:
    wrong = {what: count for what, count in unlike_torch().items() if count}
    if wrong or E2M1.max != 6:
        sys.exit(f"bench_microscaling.py: not what torch has: {wrong}; e2m1 ends at {E2M1.max}")
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for name, kind in MICRO.items():
        if not torch.equal(kind.plain(x).dequantize(torch.float64), kind.quantize(x).dequantize(torch.float64)):
            sys.exit(f"bench_microscaling.py: {name} has other numbers without its patterns")


def measure_formats() -> None:
    """The failures of the chapter's other formats: too large, too small, beside an outlier."""
    rows, columns = 256, 4096
    draw = torch.Generator().manual_seed(1)
    normal = torch.randn(rows, columns, generator=draw)
    spread = normal * 2.0 ** (5 * torch.randn(rows, columns, generator=draw))
    ramp = torch.linspace(1, 2, 4000)[:-1, None].repeat(1, 32)  # blocks of one number, up to the next power of two
    beside = [with_outliers(rows, columns, features=6, factor=factor) for factor in (1e2, 1e5)]

    def row(name: str, form: Format, bits: float, there_and_back) -> list:
        near = [relative(there_and_back(x)[:, plain], x[:, plain]) for x, plain in beside]
        return [
            name,
            f"{bits:g}",
            2**form.mantissa,
            f"{torch.tensor(form.max / form.smallest).log2().item():.1f}",
            relative(there_and_back(normal), normal),
            f"{(there_and_back(ramp) / ramp - 1).abs().max().item():.1%}",
            *near,
            f"{(there_and_back(spread) == 0).double().mean().item():.2%}",
        ]

    def fp8(block: tuple[int, int]):
        return lambda x: quantize(x, e4m3, block).dequantize()

    table = [row("e4m3, a scale per tensor", FORMATS["e4m3"], 8, fp8((0, 0)))]
    table.append(row("e4m3, per 1 x 128", FORMATS["e4m3"], 8 + 32 / 128, fp8((1, 128))))
    for name, kind in MICRO.items():

        def there_and_back(x: Tensor, kind=kind) -> Tensor:
            return kind.plain(x).dequantize()

        table.append(row(name, kind.element, kind.element.bits + 8 / kind.size, there_and_back))
    write_result(
        "10_microscaling",
        "What a number costs, and what becomes of it",
        ["format", "bits per number", "steps between 1 and 2", "powers of two in a block", "error, normal numbers",
         "largest of a block, at worst", "error beside 100 times", "beside 100,000 times", "gradients zero"],
        table,
        "Errors are relative, of the norm; of the largest element of a block, the worst of blocks of equal numbers "
        "(a scale per tensor has all of these to serve). Outliers: 6 of 4096 features; the error is of the others. "
        "Gradients: normal numbers times powers of two with a standard deviation of 5.",
    )  # fmt: skip


def measure_model() -> None:
    jobs = [(f"outliers {FACTORS[-1]}: fp32", STEPS, LR, 0)]
    jobs += [(f"outliers 1: {name}", STEPS, LR, seed) for name in ["fp32", *RECIPES] for seed in range(SEEDS)]
    jobs += [
        (f"outliers {f}: {name}", STEPS, LR, seed) for f in FACTORS[1:] for name in RECIPES for seed in range(SEEDS)
    ]
    runs = dict(zip([(job[0], job[3]) for job in jobs], curves(jobs), strict=True))
    if runs[jobs[0][0], 0]["losses"] != runs["outliers 1: fp32", 0]["losses"]:
        sys.exit(
            "bench_microscaling.py: in fp32 the outliers change the loss, so they are not what the recipes lose to"
        )
    table, off = [], {}
    for name in RECIPES:
        cells = []
        for factor in FACTORS:
            pairs = [(runs[f"outliers {factor}: {name}", s], runs["outliers 1: fp32", s]) for s in range(SEEDS)]
            if died := [run["died"] for run, _ in pairs if run["died"]]:
                sys.exit(f"bench_microscaling.py: {name} with outliers of {factor}: {died[0]}")
            off[name, factor] = sorted(100 * (run["held_out"] / base["held_out"] - 1) for run, base in pairs)
            low, median, high = off[name, factor][0], statistics.median(off[name, factor]), off[name, factor][-1]
            cells.append(f"{median:+.2f} % ({low:+.2f} to {high:+.2f})")
        table.append([name, *cells])
    for name, factor in off:
        if name in ("block", "mxfp8") and not max(map(abs, off[name, factor])) <= LIMIT:
            sys.exit(f"bench_microscaling.py: {name} with outliers of {factor} is {off[name, factor]} % off fp32")
    write_result(
        "10_outlier_model",
        f"Loss on held-out text after {STEPS} steps, against fp32 on the same batches: median of {SEEDS} (all of them)",
        ["recipe", *(f"outliers of {factor:,}" if factor > 1 else "no outliers" for factor in FACTORS)],
        table,
        "A decoder whose down-projection has K = 4096; 6 of its 4096 input features are larger by the factor, and "
        "their weights smaller. In fp32 the factor changes nothing, to the bit. Weights and optimizer are fp32.",
    )
    rows = [[name, factor, *off[name, factor]] for name, factor in off]
    write_result("10_outlier_model_runs", "Per cent of the loss of fp32", ["recipe", "factor", *"123"], rows)


def draw(axes, result) -> None:
    names = list(dict.fromkeys(row[0] for row in result["rows"]))
    for i, name in enumerate(names):
        mine = [row[1:] for row in result["rows"] if row[0] == name]
        places = [k + 0.1 * (i - (len(names) - 1) / 2) for k in range(len(mine))]
        middle = [statistics.median(row[1:]) for row in mine]
        bars = [[m - min(row[1:]) for m, row in zip(middle, mine, strict=True)],
                [max(row[1:]) - m for m, row in zip(middle, mine, strict=True)]]  # fmt: skip
        axes.errorbar(places, middle, bars, marker="o", ms=4, capsize=2, lw=0, elinewidth=1, label=name, color=f"C{i}")
    factors = list(dict.fromkeys(row[1] for row in result["rows"]))
    axes.axhline(0, color="0.6", lw=0.8)
    axes.set_xticks(range(len(factors)), ["no outliers", *(f"{factor:,} times" for factor in factors[1:])])
    axes.set(ylabel="loss against fp32, %", title="A model with 6 large features of 4096")
    axes.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("formats", "model"), help="one of the two parts")
    parser.add_argument("--figures", action="store_true", help="only draw the figure again")
    args = parser.parse_args()
    if not args.figures:
        torch.set_num_threads(1)
        verify()
        if args.only != "model":
            measure_formats()
        if args.only != "formats":
            measure_model()
    if args.only != "formats":
        write_figure(f"{FIGURES}/outlier_model.svg", ["10_outlier_model_runs"], draw)


if __name__ == "__main__":
    main()
