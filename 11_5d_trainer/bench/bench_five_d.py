"""A step of five_d.py next to the trainer's, with the same layout and the same weights.

    python 11_5d_trainer/bench/bench_five_d.py   CPU, 4 ranks

First both make three steps of plain SGD from the same weights on the same batches in float64, and losses and norms must
agree to 1e-10; only then is a step timed, in pairs. A ratio above 1 means that five_d.py takes longer.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paths  # noqa: F401  finds the chapters below
import five_d
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from harness.report import Ratio, paired, write_result
from test_five_d_and_trainer import side_by_side

SIZES = five_d.ModelConfig(4, 64, 8, 4, 160, 0, 0, 64, 16, 4, torch.float64)
OPTIONS = "--device cpu --seq-len 64 --global-batch 16 --precision fp64 --clip 1.0 --zero 1"
LAYOUTS = {  # of five_d.py: pp, cp, tp; and of the trainer
    "data 4": ((1, 1, 1), ""),
    "data 2 x tensor 2": ((1, 1, 2), "--tp 2 --sequence-parallel"),
    "data 2 x context 2": ((1, 2, 1), "--cp 2 --cp-kind zigzag"),
    "data 2 x pipeline 2": ((2, 1, 1), "--pp 2 --schedule 1f1b"),
    "pipeline 2 x tensor 2": ((2, 1, 2), "--pp 2 --schedule 1f1b --tp 2 --sequence-parallel"),
}


def next_to_the_trainer(layout, words):
    """Losses and norms of both, then how long a step takes, five_d.py's against the trainer's."""
    pp, cp, tp = layout
    c = SIZES
    mesh = five_d.Mesh(list(range(dist.get_world_size())), pp, cp, tp, 1)
    steps_on = side_by_side(c, mesh, [*words.split(), "--micro-batch", str(c.batch // (mesh.dp * c.num_micro_batches))])
    text = torch.frombuffer(bytearray(Path(five_d.__file__).read_bytes()), dtype=torch.uint8).long()
    both = []
    for step in range(3):
        run_ours, run_theirs = steps_on(*five_d.get_batch(text, step, c, masked=True))
        both.append((run_ours(), run_theirs()))
    error = max((abs(a - b) for pair in both for a, b in zip(*pair, strict=True)), key=lambda e: (e != e, e))
    if not error <= 1e-10:
        raise SystemExit(f"{layout}: five_d.py and the trainer differ by {error:.1e}")
    ratio = paired(run_ours, run_theirs, setup=dist.barrier)
    return error, (ratio.median, ratio.low, ratio.high)


def measure_speed():
    rows = []
    for name, (layout, words) in LAYOUTS.items():
        error, ratio = run_ranks(4, next_to_the_trainer, layout, f"{OPTIONS} {words}", timeout=120)[0]
        rows.append([name, error, Ratio(*ratio)])
    write_result(
        "11_five_d",
        "five_d.py next to the trainer, 4 ranks, dense, ZeRO-1",
        ["layout", "largest difference of losses and norms", "seconds per step / the trainer's (quartiles)"],
        rows,
        f"{SIZES.n_layers} layers of hidden size {SIZES.hidden} in float64, {SIZES.batch} x {SIZES.seq_len} tokens per "
        f"step in {SIZES.num_micro_batches} micro-batches, plain SGD. Three steps were compared first.",
    )


if __name__ == "__main__":
    measure_speed()
