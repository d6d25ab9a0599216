"""The paper's memory table, and whether the formulas of fpdt_costs.py are true.

    python 08_fpdt/in_depth/bench_fpdt_costs.py   writes results/08_fpdt_paper*

First idle time of a forward against a simulation of the recorded schedule for every speed of link and kernel, bytes on
the device against a meter, copies and bytes over the link against the record. If one number is off, nothing is written.
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from bench_fpdt_attention import attention_numbers, predicted_numbers
from fpdt_costs import (
    Sizes,
    idle_forward,
    idle_time,
    link_bytes,
    paper_table,
    record_forward,
)
from fpdt_store import Op
from harness.ranks import run_ranks
from harness.report import write_result

GRID = itertools.product((1, 2, 3, 4, 8, 13), (0.4, 1.2, 3.0), (0.1, 0.9, 1.0, 1.3, 2.2, 3.5))


def verify_time() -> None:
    """The closed form of the idle time, against the simulation; u chunks, a row's own work a, a fetch f, a pair 1."""
    for u, a, f in GRID:
        own = min(0.5, a / 2)  # of a: attention of the chunk to itself
        if f / 2 > a + own:
            continue  # then storing the first chunk is late, which the formula leaves out
        costs = {"project": (a - own) / 2, "finish": (a - own) / 2, "fetch": f / 2, "offload": f / 2}

        def seconds(op: Op, costs: dict[str, float] = costs, own: float = own) -> float:
            return costs.get(op.name, {1: own, 2: 1.0}.get(op.amount, 0.0))

        got, want = idle_time(record_forward(u), seconds), idle_forward(u, a, 1.0, f)
        if not abs(got - want) < 1e-9:
            sys.exit(f"{u} chunks, a = {a}, f = {f}: idle for {got} in the simulation, {want} by the formula")


def verify_bytes() -> None:
    for u in (1, 2, 3, 8):
        z = Sizes(24 * u, 1, u, 8, 2, 16, 4)
        K = z.letters()[1]
        ops = record_forward(u)
        counted = tuple(sum(op.stream == stream for op in ops) * K for stream in ("offload", "fetch"))
        if counted != link_bytes(z, "forward"):
            sys.exit(f"{u} chunks: {counted} bytes over the link by the record, {link_bytes(z, 'forward')} by formula")
    for u in (2, 4, 8):
        z = Sizes(512, 1, u, 8, 2, 16, 4)
        [got] = run_ranks(1, attention_numbers, z, timeout=120)
        if got != predicted_numbers(z):
            sys.exit(f"{z}: measured {got}, predicted {predicted_numbers(z)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="draw the figures again; here there are none")
    if not parser.parse_args().figures:
        verify_time()
        verify_bytes()
        write_result(
            "08_fpdt_paper",
            "Device memory in GB: published (arXiv 2408.16978) and by M(u) = F + A/u",
            ["model", "1 chunk, published", "2 chunks, published", "2 chunks, formula", "tensors that would be exact"],
            [
                [model, one, two, round(formula, 1), round(exact, 1)]
                for model, one, two, formula, exact in paper_table()
            ],
            "The formula takes the first column and 14 tensors of [tokens, hidden]; its assumptions are the docstring "
            "of `PaperRow` in fpdt_costs.py. That count was chosen with the second column in sight, so the agreement "
            "shows that the formula can explain these figures, not that it predicted them.",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
