"""Formats: the table from the bits, and figures of range and resolution.

    python 10_mixed_precision/in_depth/bench_formats.py [--figures]

First every 8- and 16-bit format must round 200 000 numbers as torch does; then the results are written.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _precision_demo import OneLineParser
from formats import FORMATS, running_sum
from harness.figures import write_figure
from harness.report import write_result

FIGURES = "10_mixed_precision/figures"


def verify() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 6, 200_000)
    for form in FORMATS.values():
        if form.dtype is None:
            continue
        info = torch.finfo(form.dtype)
        if (form.max, form.smallest_normal, form.epsilon) != (info.max, info.smallest_normal, info.eps):
            sys.exit(f"bench_formats.py: {form.name} is not torch's {form.dtype}")
        inside = x[x.abs() <= form.max]
        if not torch.equal(form.round(inside), inside.to(form.dtype).double()):
            sys.exit(f"bench_formats.py: {form.name} rounds otherwise than torch")


def measure() -> None:
    rows = []
    for f in FORMATS.values():
        stalls = int(running_sum(torch.ones(5000), f.dtype).item()) if f.dtype and f.bits >= 16 else "-"
        rows.append([f.name, f.bits, f.exponent, f.mantissa, f.max, f.smallest_normal, f.smallest, f.epsilon, stalls])
    write_result(
        "10_formats",
        "Formats, computed from the number of bits, and equal to torch.finfo where torch has the format",
        ["format", "bits", "exponent", "mantissa", "largest", "smallest normal", "smallest", "epsilon",
         "1 + 1 + ... ends at"],
        rows,
        "In the last column 5,000 is no stall: so many ones were added. In the formats with a dash torch cannot add; "
        "there the sum would end at 2^(M+1), which is 2,048, 16 and 8.",
    )  # fmt: skip


def draw(axes, result) -> None:
    import math

    ranges, gaps = axes
    rows = {row[0]: dict(zip(result["columns"], row, strict=True)) for row in result["rows"]}
    for y, (name, row) in enumerate(rows.items()):
        low, normal, high = (math.log2(row[key]) for key in ("smallest", "smallest normal", "largest"))
        ranges.plot([normal, high], [y, y], linewidth=7, solid_capstyle="butt", color=f"C{y}")
        ranges.plot([low, normal], [y, y], linewidth=2, color=f"C{y}")
        ranges.annotate(name, (high + 4, y), va="center")
        step = row["epsilon"]
        marks = [1 + i * step for i in range(int(1 / step) + 1)] if step > 0.001 else []
        gaps.plot(marks, [y] * len(marks), "|", markersize=12, color=f"C{y}")
        if not marks:  # too dense to be drawn one by one
            gaps.plot([1, 2], [y, y], linewidth=12, solid_capstyle="butt", color=f"C{y}")
        text = f"{name}: {int(1 / step):,} steps"
        gaps.annotate(text, (1.0, y + 0.28), fontsize=8)
    ranges.set(xlabel="power of two (thin: subnormal)", title="Range", yticks=[], xlim=(-155, 160))
    gaps.set(xlabel="numbers in [1, 2]", title="Resolution", yticks=[], ylim=(-0.5, 6))


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--figures", action="store_true", help="only draw the figures again")
    if not parser.parse_args().figures:
        verify()
        measure()
    write_figure(f"{FIGURES}/formats.svg", ["10_formats"], draw, shape=(1, 2))


if __name__ == "__main__":
    main()
