"""The laboratory's curves, beside a published one.

    python 02_data_parallel/in_depth/bench_scale_lab.py               verify, compute, draw
    python 02_data_parallel/in_depth/bench_scale_lab.py --figures     only draw again

Nothing is timed: the curves are the formulas of scale_lab.py, which are held against their limits first, and against a
hierarchical sum that is really done. The published points are measured by others, on their model and network.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from harness.figures import COLOURS, GREY, write_figure
from harness.ranks import run_ranks
from harness.report import write_result
from scale_lab import ALGORITHMS, Machine, Work, efficiency, hidden_from, ring, wrong_formulas, wrong_sum

# Tokens per second and GPU, data parallel on 8 to 256 GPUs: Tazi et al. 2025, "The Ultra-Scale Playbook" (Hugging Face,
# nanotron), the figure "Throughput Scaling with Data Parallelism"; dp_scaling.html in its sources.
PUBLISHED = {8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23, 128: 26446.44, 256: 15700.38}
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
LINES = {"ring": "messages", "two trees": "compute", "hierarchical": "weights", "in-network": "optimizer"}


def verify():
    return wrong_formulas() + wrong_sum(dist.group.WORLD, torch.device("cpu"))


def draw(axes, cliff, sweeps):
    for name, colour in LINES.items():
        at = cliff["columns"].index(name)
        axes[0].plot(
            [row[0] for row in cliff["rows"]],
            [row[at] for row in cliff["rows"]],
            "o-",
            ms=3,
            label=name,
            color=COLOURS[colour],
        )
    points = [(row[0], row[-1]) for row in cliff["rows"] if row[-1] != "-"]
    axes[0].plot(*zip(*points, strict=True), "s", ms=5, label="published (8 to 256 GPUs)", color=COLOURS["gradients"])
    axes[0].set(
        xscale="log",
        xlabel="ranks",
        ylabel="throughput of a rank / on 8 ranks",
        ylim=(0, 1.08),
        xticks=RANKS,
        xticklabels=RANKS,
    )
    axes[0].minorticks_off()
    axes[0].legend(fontsize=7)
    for axis, what, label in ((axes[1], "tokens", "tokens of a rank"), (axes[2], "bucket, MiB", "bucket, MiB")):
        for ranks, style in ((128, "o-"), (512, "s--")):
            rows = [row for row in sweeps["rows"] if row[0] == what and row[1] == ranks]
            axis.plot(
                [row[2] for row in rows],
                [row[3] for row in rows],
                style,
                ms=3,
                color=COLOURS["messages"],
                label=f"{ranks} ranks",
            )
        axis.set(xscale="log", xlabel=label, ylim=(0, 1.08))
        axis.legend(fontsize=7)
    axes[1].axvline(hidden_from(512, Work(), Machine()), color=GREY, linewidth=0.8, linestyle=":")


def figures():
    write_figure(
        "02_data_parallel/figures/cliff.svg", ["02_scale", "02_scale_sweeps"], draw, shape=(1, 3), size=(11, 3.2)
    )


def main():
    wrong = sorted({line for lines in run_ranks(4, verify) for line in lines})
    if wrong:
        sys.exit("\n".join(wrong))
    m, w = Machine(), Work()
    rows = []
    for ranks in RANKS:
        relative = [round(efficiency(ranks, w, m, f) / efficiency(8, w, m, f), 3) for f in ALGORITHMS.values()]
        published = round(PUBLISHED[ranks] / PUBLISHED[8], 3) if ranks in PUBLISHED else "-"
        starts = round(1e3 * ring(ranks, 0, m), 2)
        rows.append([ranks, *relative, starts, round(hidden_from(ranks, w, m)), published])
    write_result(
        "02_scale",
        "Throughput of a rank over that on 8 ranks, computed; and as published",
        ["ranks", *ALGORITHMS, "starts of one ring, ms", "tokens that hide the ring", "published"],
        rows,
        "Computed by `scale_lab.py` with α = 10 µs, 50 GB/s, 400 TFLOP/s, 1 billion parameters, gradients of 2 bytes, "
        "16,384 tokens of a rank, buckets of 25 MiB; the formulas were held against their limits first. Published: "
        "Tazi et al. 2025, The Ultra-Scale Playbook; measured by its authors with their model, batch and network, to "
        "which nothing here was fitted.",
    )
    sweeps = [
        ["tokens", r, t, round(efficiency(r, replace(w, tokens=t), m), 4)]
        for r in (128, 512)
        for t in (2**i for i in range(11, 19))
    ]
    sweeps += [
        ["bucket, MiB", r, b, round(efficiency(r, replace(w, bucket=b * 2**20), m), 4)]
        for r in (128, 512)
        for b in (1, 5, 25, 100, 250, 500, 1000, 2000)
    ]
    write_result(
        "02_scale_sweeps",
        "Throughput of a rank over one alone, computed",
        ["varied", "ranks", "at", "throughput"],
        sweeps,
    )
    figures()


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--figures"]):
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: use nothing, or --figures", file=sys.stderr)
        sys.exit(2)
    figures() if sys.argv[1:] else main()
