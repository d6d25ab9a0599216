"""MXFP8, MXFP4 and NVFP4 next to fp8: what each loses where, and a model with outliers that separates them.

    python 10_mixed_precision/in_depth/bench_microscaling.py [--only formats|model] [--figures]

First all patterns must match torch's. `formats` takes seconds and writes 10_microscaling. `model` trains three
decoders with K = 4096 in fp32 and evaluates each with every recipe and outliers of three sizes: the loss on
held-out text, and the gradients of one batch. That takes 1 to 2 minutes of one core and writes 10_outlier_model.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.nn.functional as F
from _precision_demo import Decoder, OneLineParser, batch, loss_sum, stdlib_bytes
from formats import FORMATS, Format, quantize
from fp8 import Fp8Linear, LargeFeatures, e4m3, relative, with_outliers
from harness.figures import write_figure
from harness.report import write_result
from microscaling import E2M1, MICRO, MicroLinear, unlike_torch
from torch import Tensor

FIGURES = "10_mixed_precision/figures"
RECIPES = ["tensor", "row", "block", "mxfp8", "mxfp4", "nvfp4"]
FACTORS = [1, 2**7, 2**17]
STEPS, SEEDS, LR = 150, 3, 2e-3
LIMIT = 1.0  # per cent of the loss of fp32, for 8 bits and usual outliers


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


def looked_at(model: Decoder, data: Tensor, recipe: str, factor: int) -> tuple[float, Tensor]:
    """Loss on held-out text and gradients of a batch, with the recipe's matmuls and features of that size."""
    linear = F.linear if recipe == "fp32" else MicroLinear(recipe) if recipe in MICRO else Fp8Linear(recipe)
    for block in model.blocks:
        block.linear = LargeFeatures(linear, float(factor))
    model.zero_grad()
    tokens, labels = batch(data, STEPS)  # the next of those it was trained on
    (loss_sum(model, tokens, labels) / labels.numel()).backward()
    with torch.no_grad():
        held_out = sum(loss_sum(model, *batch(data, -1 - i, rows=16)).item() for i in range(4)) / (4 * 16 * 64)
    return held_out, torch.cat([p.grad.flatten() for p in model.matrices().values()])


def measure_model() -> None:
    off: dict[tuple[str, int], list[tuple[float, float]]] = {}
    data = stdlib_bytes()
    for seed in range(SEEDS):
        model = Decoder(inner=4096, layers=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        for step in range(STEPS):
            tokens, labels = batch(data, 10_000 * seed + step)
            optimizer.zero_grad()
            (loss_sum(model, tokens, labels) / labels.numel()).backward()
            optimizer.step()
        loss, gradients = looked_at(model, data, "fp32", 1)
        again, same = looked_at(model, data, "fp32", FACTORS[-1])
        if loss != again or not torch.equal(gradients, same):
            sys.exit(
                "bench_microscaling.py: outliers change what fp32 computes, so they are not what a recipe loses to"
            )
        for name in RECIPES:
            for factor in FACTORS:
                got, theirs = looked_at(model, data, name, factor)
                off.setdefault((name, factor), []).append((100 * (got / loss - 1), relative(theirs, gradients)))
    for (name, factor), pairs in off.items():
        if "fp4" not in name and factor < 1000 and not max(abs(loss) for loss, _ in pairs) <= LIMIT:
            sys.exit(f"bench_microscaling.py: {name} with outliers of {factor} is off fp32 by {pairs}")
    for name in ("tensor", "row"):
        for (_, mine), (_, tiles) in zip(off[name, FACTORS[-1]], off["block", FACTORS[-1]], strict=True):
            if not mine > 3 * tiles:
                sys.exit(f"bench_microscaling.py: the largest outliers cost {name} {mine:.3f} and tiles {tiles:.3f}")
    table = [
        [name, *(cell for factor in FACTORS for cell in (
            f"{statistics.median(loss for loss, _ in off[name, factor]):+.2f} %",
            f"{statistics.median(error for _, error in off[name, factor]):.3f}",
        ))]
        for name in RECIPES
    ]  # fmt: skip
    sizes = ["no outliers", *(f"{factor:,} times" for factor in FACTORS[1:])]
    write_result(
        "10_outlier_model",
        f"A trained model by each recipe: loss on held-out text against fp32, and error of its gradients; median of "
        f"{SEEDS} models",
        ["recipe", *(f"{what}, {size}" for size in sizes for what in ("loss", "gradients"))],
        table,
        f"A decoder whose down-projection has K = 4096, trained for {STEPS} steps in fp32, each on other batches. 6 of "
        "the 4096 input features are larger by the factor, and their weights smaller: in fp32 that changes nothing, to "
        "the bit. Gradients: relative error of those of all matrices.",
    )
    rows = [[name, factor, *(loss for loss, _ in pairs)] for (name, factor), pairs in off.items()]
    columns = ["recipe", "factor", *(f"model {seed}" for seed in range(SEEDS))]
    write_result("10_outlier_model_each", "Loss on held-out text against fp32, per cent", columns, rows)


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
    axes.legend(fontsize=8, loc="upper left")


def main() -> None:
    parser = OneLineParser(allow_abbrev=False)
    parser.add_argument("--only", choices=("formats", "model"), help="one of the two parts")
    parser.add_argument("--figures", action="store_true", help="only draw the figure again")
    args = parser.parse_args()
    if args.only == "formats" and args.figures:
        parser.error("--only formats has no figure; leave --figures out")
    if not args.figures:
        torch.set_num_threads(1)
        verify()
        if args.only != "model":
            measure_formats()
        if args.only != "formats":
            measure_model()
    if args.only != "formats":
        write_figure(f"{FIGURES}/outlier_model.svg", ["10_outlier_model_each"], draw)


if __name__ == "__main__":
    main()
