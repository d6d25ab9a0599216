"""The ground floor against torch.amp and in_depth, in one run; and the data of its figures.

    python 10_mixed_precision/bench_mixed_precision.py               ratios, errors, figures
    python 10_mixed_precision/bench_mixed_precision.py --figures     draw again

First the script's own check must find nothing wrong and the fp8 layer must equal the depth's; then it is timed.
"""

import contextlib
import io
import sys
from pathlib import Path

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

FOLDER = "10_mixed_precision/figures"


def products(linear) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 256, generator=generator).requires_grad_() for n in (512, 256))
    y = linear(x, w)
    y.square().sum().backward()
    return [y.detach(), x.grad, w.grad]


def amp_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w).float()


def verify(ours, depth) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        wrong = mp.check(dist.group.WORLD, "cpu")
    pairs = zip(products(ours), products(depth), strict=True)
    # The same 8-bit numbers, but scaled and summed in fp32 in another order: a sum that comes out near 0 has no digits
    # to compare, so each product is compared as a whole. Only the order may differ.
    off = {what: ((a - b).norm() / b.norm()).item() for what, (a, b) in zip(("y", "dx", "dW"), pairs, strict=True)}
    wrong += [f"{what} of the fp8 linear is {e:.0e} from the depth's" for what, e in off.items() if not e <= 1e-5]
    if wrong:
        sys.exit("bench_mixed_precision.py: " + "; ".join(wrong))


def measure() -> None:
    group = dist.group.WORLD
    ours, depth = lambda x, w: mp.Fp8Linear.apply(x, w, "scaled", group), Fp8Linear("tensor")
    verify(ours, depth)
    others = {"in_depth/fp8.py, recipe tensor": depth, "torch.autocast, bf16": amp_linear, "F.linear, fp32": F.linear}
    rows = [[name, paired(lambda: products(ours), lambda o=o: products(o))] for name, o in others.items()]
    write_result(
        "10_ground", "The fp8 linear of the ground floor, emulated: seconds / seconds of others",
        ["against", "forward and backward"], rows, "512 x 256 x 256; on a CPU 8 bits save memory and cost time.",
    )  # fmt: skip
    right = mp.train(mp.EXACT["fp64"], group, "cpu")
    rows, P = [], right["states"].shape[1]
    for name, policy in mp.POLICIES.items():
        run, kind = mp.train(policy, group, "cpu"), name.split("-")[0]
        must = mp.distance(mp.train(mp.MUST[kind], group, "cpu"), right) if kind in mp.MUST else "-"
        zeros = (run["gradients"][0] == 0)[right["gradients"][0] != 0].double().mean().item()
        moved = run["states"].diff(dim=0) / run["gradients"]  # lost: where not half of an update arrived
        lost = (moved > -mp.LR / 2)[run["gradients"] != 0].double().mean().item()
        rows.append([name, run["held"] // P, mp.distance(run, right), must, zeros, lost, run["skipped"]])
    columns = ["policy", "bytes per weight", "error", "rounding alone", "gradients zero", "updates lost", "skipped"]
    write_result(
        "10_ground_policies", "Three steps of each policy: how far the weights are from where float64 moves them",
        columns, rows,
        "Errors are parts of the way that float64 moves the weights. Gradients zero: share of those of the first step "
        "that are not zero in float64. Updates lost: share of those by a gradient that is not zero. Skipped: steps.",
    )  # fmt: skip
    rows = []
    for name, form in mp.FORMATS.items():
        values = form.decode(torch.arange(2 ** (1 + form.E + form.M)))
        finite = values[values.isfinite() & (values > 0)].sort().values
        for k in range(-30, 21):
            inside = finite[(finite >= 2.0**k) & (finite < 2.0 ** (k + 1))]
            rows.append([name, k, len(inside)])
    write_result("10_ground_formats", "Numbers between 2^k and 2^(k+1), decoded", ["format", "k", "numbers"], rows)


def draw_formats(axes, result) -> None:
    colours = dict(zip(mp.FORMATS, ("gradients", "weights", "messages", "activations"), strict=True))
    for name, colour in colours.items():
        pairs = [(k, n) for form, k, n in result["rows"] if form == name and n]
        axes.step(*zip(*pairs, strict=True), where="post", color=COLOURS[colour], label=name)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="k", ylabel="numbers between 2^k and 2^(k+1)", title="Range and resolution")
    axes.legend(fontsize=8)


def draw_repairs(axes, result) -> None:
    rows = [row for row in result["rows"] if row[0] != "fp32"]
    for i, (name, _, error, must, *_) in enumerate(rows):
        mended = "mended" in name or name == "fp16-scaling"
        axes.barh(i, error - 1e-4, left=1e-4, color=COLOURS["weights" if mended else "gradients"])
        axes.plot([must, must], [i - 0.45, i + 0.45], color=GREY, lw=2)
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
    write_figure(f"{FOLDER}/range.svg", ["10_ground_formats"], draw_formats)
    write_figure(f"{FOLDER}/repairs.svg", ["10_ground_policies"], draw_repairs, size=(6.5, 3.6))


if __name__ == "__main__":
    main()
