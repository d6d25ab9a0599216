"""The core file's fp8 layer, timed beside in_depth's and torch.autocast; errors of its recipes; its figures.

    python 10_mixed_precision/bench_mixed_precision.py               ratios, errors, figures
    python 10_mixed_precision/bench_mixed_precision.py --figures     draw again

First the script's own check must find nothing wrong and the fp8 layer must equal in_depth's; then it is timed.
"""

import contextlib
import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import mixed_precision as mp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _precision_demo import OneLineParser
from fp8 import Fp8Linear
from harness.figures import COLOURS, GREY, write_figure
from harness.report import paired, write_result
from torch import Tensor

FOLDER = "10_mixed_precision/figures"
CPU = torch.device("cpu")


def round_to_nearest(x: Tensor, man_bits: int) -> Tensor:
    """x in float64, rounded to man_bits of mantissa; the exponent may have any size."""
    exponent = torch.frexp(x.double()).exponent - 1  # |x| = 2^exponent * (1 to 2)
    gap = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent.clamp(min=-900) - man_bits)
    return torch.round(x.double() / gap) * gap  # torch.round takes the even one of two


def rounding_floor(name: str, group: dist.ProcessGroup, device: torch.device) -> mp.Run:
    """A run that loses what rounding alone must cost, and nothing else: the lower bound on errors.

    It computes, sums and updates in float64. What a GPU would store in 16 bits, or multiply in 8, is rounded to as many
    bits of mantissa, at any exponent: no underflow and no overflow.
    """
    bits = {getattr(mp, name): man_bits for name, (_, man_bits, _) in mp.FORMATS.items()}
    recipe = mp.RECIPES[name]
    nearest = partial(round_to_nearest, man_bits=bits[recipe.param_dtype])

    def store(x: Tensor) -> Tensor:  # and in the backward pass its gradient
        rounded = x + (nearest(x) - x).detach()
        rounded.register_hook(nearest)
        return rounded

    def run_kernel(op: Callable, *inputs: Tensor) -> Tensor:
        return store(op(*[store(x) for x in inputs]))

    def quantize(x: Tensor, dtype: torch.dtype, group) -> tuple[Tensor, Tensor]:
        return round_to_nearest(x, bits[dtype]), x.new_ones(())

    with patch.object(mp, "run_kernel", run_kernel):
        exact = mp.Recipe(torch.float64, mp.plain_step, quantize=quantize if recipe.quantize else None)
        return mp.train(exact, group, device)


def shares(run: mp.Run, expected: mp.Run) -> tuple[float, float]:
    """The share of zeros among gradients of the first step that should not be zero; and the share of updates of which
    less than half arrives in the weights that are updated."""
    zero_grads = (run.grads[0] == 0)[expected.grads[0] != 0]
    arrived = run.weights.diff(dim=0) / -run.grads
    lost_updates = (arrived < mp.LR / 2)[run.grads != 0]
    return zero_grads.double().mean().item(), lost_updates.double().mean().item()


def matmuls(linear, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    y = linear(x, w)
    return [y.detach(), *torch.autograd.grad(y, (x, w), dy)]


def amp_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w).float()


def verify(ours, in_depth, given: list[Tensor]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        failures = [] if mp.check(dist.group.WORLD, CPU) else ["the check of mixed_precision.py fails"]
    pairs = zip(matmuls(ours, *given), matmuls(in_depth, *given), strict=True)
    # The same fp8 values, but scaled and summed in fp32 in another order: a sum that comes out near 0 has no digits to
    # compare, so each matmul is compared as a whole. Only the order may differ.
    for what, (a, b) in zip(("y", "grad_x", "grad_weight"), pairs, strict=True):
        error = ((a - b).norm() / b.norm()).item()
        if not error <= 1e-5:
            failures.append(f"{what} of the fp8 linear layer is {error:.0e} from in_depth's")
    if failures:
        sys.exit("bench_mixed_precision.py: " + "; ".join(failures))


def measure() -> None:
    group = dist.group.WORLD
    in_depth = Fp8Linear("tensor")

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return mp.Fp8Linear.apply(x, w, mp.quantize_scaled, group)

    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(n, 256, generator=generator).requires_grad_() for n in (512, 256, 512)]  # x, w, dy
    verify(ours, in_depth, given)
    others = {
        "in_depth/fp8.py, recipe tensor": in_depth,
        "torch.autocast, bf16": amp_linear,
        "F.linear, fp32": F.linear,
    }
    mine = partial(matmuls, ours, *given)
    rows = [[name, paired(mine, partial(matmuls, other, *given))] for name, other in others.items()]
    write_result(
        "10_ground", "The fp8 linear layer of the core file, emulated: seconds / seconds of others",
        ["against", "forward and backward"], rows, "512 x 256 x 256; on a CPU 8 bits save memory and cost time.",
    )  # fmt: skip
    expected = mp.train(mp.EXACT["fp64"], group, CPU)
    rows, num_params = [], expected.weights.shape[1]
    for name, recipe in mp.RECIPES.items():
        run, floor = mp.train(recipe, group, CPU), "-"
        if name != "fp32":
            floor = mp.relative_error(rounding_floor(name, group, CPU), expected)
        zeros, lost = shares(run, expected)
        error = mp.relative_error(run, expected)
        rows.append([name, run.bytes_stored // num_params, error, floor, zeros, lost, run.skipped])
    columns = ["recipe", "bytes per parameter", "error", "rounding alone", "gradients zero", "updates lost", "skipped"]
    write_result(
        "10_ground_policies", "Three steps of each recipe: how far the weights are from where float64 moves them",
        columns, rows,
        "Errors are shares of how far float64 moves the weights. Gradients zero: share of those of the first step "
        "that are not zero in float64. Updates lost: less than half arrives; share of those with a gradient not zero.",
    )  # fmt: skip
    rows = []
    for name, (exp_bits, man_bits, has_inf) in mp.FORMATS.items():
        values = mp.decode(torch.arange(2 ** (1 + exp_bits + man_bits)), exp_bits, man_bits, has_inf)
        finite = values[values.isfinite() & (values > 0)].sort().values
        for k in range(-30, 21):
            inside = finite[(finite >= 2.0**k) & (finite < 2.0 ** (k + 1))]
            rows.append([name, k, len(inside)])
    write_result("10_ground_formats", "Values between 2^k and 2^(k+1), decoded", ["format", "k", "values"], rows)


def draw_where_bits_are_lost(axes, result) -> None:
    """Above, the powers of two that each format has; below, the values of bf16 around an update and around a sum."""
    axes[0].get_gridspec().set_height_ratios([3, 1, 1])
    count = {(name, k): n for name, k, n in result["rows"]}
    draw_ranges(axes[0], count)
    gap = 1 / count["bf16", 0]  # between 1 and 2
    note = f"Lost update: 1 + {gap / 4:.3f} is less than half a gap from 1, so the weight stays at 1"
    draw_gaps(axes[1], 1, gap, 1 + gap / 4, note)
    stall = 2 / gap
    note = f"Long sum: {stall:.0f} + 1 lies in the middle of a gap and rounds back to {stall:.0f}"
    draw_gaps(axes[2], stall, 2, stall + 1, note)


def draw_ranges(axes, count: dict) -> None:
    first, last = min(k for _, k in count), max(k for _, k in count)
    lost, one_arrow = COLOURS["gradients"], {"arrowstyle": "-|>"}
    for row, name in enumerate(mp.FORMATS):
        ends = [k for k in range(first, last + 1) if count[name, k]]
        normal = next(k for k in ends if count[name, k] == count[name, 0])  # below it are subnormals
        axes.barh(row, ends[-1] + 1 - normal, 0.6, left=normal, color=COLOURS["weights"])
        axes.barh(row, normal - ends[0], 0.6, left=ends[0], color=COLOURS["weights"], alpha=0.4)
        for x, step in ((first, -3), (last + 1, 3)) if ends[0] == first else ():
            axes.annotate("", (x + step, row), (x, row), arrowprops=one_arrow | {"color": COLOURS["weights"]})
        label = f"{count[name, 0]:,} values per power of two"
        label += ", from 2^−133 to 2^128" if ends[0] == first else ""
        axes.text((normal + ends[-1] + 1) / 2, row, label, ha="center", va="center", color="white", fontsize=9)
    axes.text(-24.4, 0, "underflow: 0", fontsize=10, ha="right", va="center")
    axes.text(16.4, 0, "overflow: infinite", fontsize=10, va="center")
    axes.plot(-29.75, 4, "o", color=lost)
    axes.annotate("", (1.25, 4), (-29.75, 4), arrowprops=one_arrow | {"color": lost})
    axes.text(2, 4, "a gradient, times the loss scale 2^31", va="center", fontsize=10)
    axes.set(yticks=range(5), yticklabels=[*mp.FORMATS, "loss scale"], ylim=(4.5, -0.6), xlim=(-35, 26))
    axes.grid(False, axis="y")
    axes.set(title="Range: all bits of mantissa where solid, fewer where pale (subnormals)")
    axes.set_xticks(range(-30, 21, 10), [f"$2^{{{k}}}$" for k in range(-30, 21, 10)])


def draw_gaps(axes, middle: float, gap: float, exact: float, note: str) -> None:
    """The values of bf16 around a power of two; what should come out, and the value to which it is rounded."""
    values = [middle - i * gap / 2 for i in range(1, 5)] + [middle + i * gap for i in range(4)]
    axes.plot(values, [0] * len(values), "|", markersize=20, markeredgewidth=2, color=COLOURS["weights"])
    axes.plot(exact, 0, "o", color=COLOURS["gradients"])
    arrow = {"arrowstyle": "-|>", "color": COLOURS["gradients"], "connectionstyle": "arc3,rad=0.5"}
    axes.annotate("", (middle, 0.5), (exact, 0.2), arrowprops=arrow)
    axes.set(yticks=[0], yticklabels=["bf16"], ylim=(-0.8, 1.2), title=note)
    axes.set_xticks([middle - gap, middle, middle + gap, middle + 2 * gap])
    axes.grid(False)


def draw_repairs(axes, result) -> None:
    rows = [row for row in result["rows"] if row[0] != "fp32"]
    for i, (name, _, error, floor, *_) in enumerate(rows):
        axes.barh(i, error - 1e-4, left=1e-4, color=COLOURS["gradients" if name in mp.FAILING else "weights"])
        axes.plot([floor, floor], [i - 0.45, i + 0.45], color=GREY, lw=2)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set(yticks=range(len(rows)), yticklabels=[row[0] for row in rows], xlim=(1e-4, 2))
    axes.set(xlabel="error after three steps; line: what rounding alone costs", title="Failures and repairs")


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--figures", action="store_true", help="only draw again")
    if not parser.parse_args().figures:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        measure()
        dist.destroy_process_group()
    sources = ["10_ground_formats"]
    write_figure(f"{FOLDER}/where_bits_are_lost.svg", sources, draw_where_bits_are_lost, shape=(3, 1), size=(9, 5.2))
    write_figure(f"{FOLDER}/repairs.svg", ["10_ground_policies"], draw_repairs, size=(7, 3.6))


if __name__ == "__main__":
    main()
