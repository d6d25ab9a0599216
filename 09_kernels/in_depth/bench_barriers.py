"""Which warps wait for which in rungs 9, 10 and 12 of the ladder: a figure from the diary of the emulator.

    python 09_kernels/in_depth/bench_barriers.py              any machine: verify, write the result, draw
    python 09_kernels/in_depth/bench_barriers.py --figures    only draw, from results/

First each rung must be as exact as torch's matmul in the run of the diary, and the diary must show the point
of the rungs; only then is anything written. In a sweep of the emulator all threads run, one after the other,
until they have to wait for others. So the figure shows an order, not a time.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import _cuda
import matmul_ladder as ladder
import torch
from _bench_options import bench_options
from harness.figures import COLOURS, write_figure
from harness.report import write_result

FIGURE = "09_kernels/figures/barriers.svg"
# One warp of each job in block 0, and matmuls of more steps than stages, in rungs 10 and 12 for two tiles of C.
WARPS = {
    "tma_wgmma": {0: "warp 0: orders, multiplies", 4: "warp 4: multiplies"},
    "persistent": {0: "producer", 4: "consumers 1", 8: "consumers 2"},
    "ping_pong": {0: "producer", 4: "consumers 1", 8: "consumers 2"},
}
SIZES = {"tma_wgmma": (128, 256, 448), "persistent": (128, 1024, 320), "ping_pong": (128, 1024, 320)}
COLOUR = {"orders": "messages", "multiplies": "compute", "writes": "activations", "waits": "idle"}


def diary(name: str) -> list[list]:
    """Rows of rung, job, sweep, deed, count. Exits if the matmul is wrong."""
    rung = ladder.RUNGS[name]
    (a, b), (M, N, K) = ladder.random_inputs(*SIZES[name], rung.dtype, "cpu"), SIZES[name]
    out = a.new_full((M, N), float("nan"))
    # In reverse order copies take no time, so every wait is for other warps.
    entries = _cuda.diary(*rung.call, rung.number, M, N, K, *ladder.bf16_operands(a, b), out, order=_cuda.REVERSE)
    if not ladder.within(ladder.error_ratio(out, a, b), 2):
        sys.exit(f"{name}: its error is {ladder.error_ratio(out, a, b)} times torch's")
    found: dict = {}
    for sweep, warp, deed in entries:
        if warp in WARPS[name]:
            key = (f"{rung.number} {name}", WARPS[name][warp], sweep, deed)
            found[key] = found.get(key, 0) + 1
    return [[*key, count] for key, count in found.items()]


def together(rows: list[list]) -> int:
    """Sweeps in which one group of consumers multiplies while the other writes out."""
    does = {(job, sweep, deed) for _, job, sweep, deed, _ in rows}
    pairs = (("consumers 1", "consumers 2"), ("consumers 2", "consumers 1"))
    return sum(
        (b, sweep, "multiplies") in does for a, b in pairs for j, sweep, deed in does if (j, deed) == (a, "writes")
    )


def measure() -> None:
    kept = {name: diary(name) for name in WARPS}
    if not together(kept["ping_pong"]):
        sys.exit("ping_pong: no warpgroup multiplies while the other group writes out")
    both = {(sweep, job) for _, job, sweep, deed, _ in kept["ping_pong"] if deed == "multiplies"}
    if len({sweep for sweep, _ in both}) < len(both):
        sys.exit("ping_pong: both groups multiply in one sweep")
    write_result(
        "09_barriers",
        "What one warp of each job did in block 0, by the emulator's diary",
        ["rung", "job", "sweep", "deed", "times"],
        [row for rows in kept.values() for row in rows],
        "In a sweep all threads run until they have to wait for others: an order, and no time. Threads run in reverse "
        "order, and copies are there at once.",
    )


def draw(axes, result) -> None:
    """A line for each job, a column for each sweep; grey until a waiting warp continues."""
    titles = {"9": "9: all in step", "10": "10: one loads, two multiply", "12": "12: two take turns"}
    for panel, rung in zip(axes, dict.fromkeys(row[0] for row in result["rows"]), strict=True):
        rows = [row for row in result["rows"] if row[0] == rung]
        jobs, last = list(WARPS[rung.split()[1]].values()), max(row[2] for row in rows)
        for y, job in enumerate(jobs):
            waiting, steps = False, 0
            for sweep in range(1, last + 1):
                done = {deed: times for _, j, s, deed, times in rows if (j, s) == (job, sweep)}
                busy = [deed for deed in done if deed != "waits"]  # in order of execution
                for i, deed in enumerate(busy or ["waits"] * (waiting or "waits" in done)):
                    parts = len(busy) or 1
                    panel.bar(
                        *(sweep + (i + 0.5) / parts, -0.8 if deed != "waits" else -0.3),
                        width=1 / parts,
                        bottom=y + (0.9 if deed != "waits" else 0.65),
                        color=COLOURS[COLOUR[deed]],
                        alpha=1.0 if deed != "waits" else 0.5,
                    )
                    steps += done.get(deed, 0) * (deed == "multiplies")
                    words = {"orders": done.get("orders"), "multiplies": steps}.get(deed, "")
                    at = sweep + (i + 0.5) / parts
                    panel.text(at, y + 0.52, words, ha="center", va="center", fontsize=7, color="black")
                waiting = "waits" in done or (waiting and not done)
        panel.set(title=titles[rung.split()[0]], xlim=(0.5, last + 1.5), ylim=(len(jobs), 0), xlabel="sweep")
        panel.set_yticks([y + 0.5 for y in range(len(jobs))], jobs, fontsize=8)
        panel.grid(False)
    for deed, words in (
        ("orders", "orders tiles (how many)"),
        ("multiplies", "multiplies (which step)"),
        ("writes", "writes sums"),
        ("waits", "waits"),
    ):
        axes[0].bar(0, 0, color=COLOURS[COLOUR[deed]], label=words)
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=8, frameon=False)


def main() -> None:
    if not bench_options("Keep a diary of three rungs, and draw it.", "--figures").figures:
        torch.manual_seed(0)
        measure()
    write_figure(FIGURE, ["09_barriers"], draw, shape=(1, 3), size=(15.0, 3.4))


if __name__ == "__main__":
    main()
