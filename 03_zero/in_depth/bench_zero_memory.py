"""Bytes held and sent by a model that trains, beside the formulas of the paper, at 4 ranks.

    python 03_zero/in_depth/bench_zero_memory.py       4 processes on CPU (gloo), or 4 GPUs (nccl)

There is nothing to time here: the numbers are exact, and the same on every machine. It exits non-zero if one is off.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, launch
from _zero_demo import measure
from harness.report import write_result
from zero3 import make_zero
from zero_memory import GB, STAGES, bytes_per_parameter, bytes_sent, largest_model

COLUMNS = [
    "stage",
    "parameters, padded",
    "held: formula",
    "held: measured",
    "sent: formula of the step",
    "sent: payloads x formula",
]
COLUMNS += ["7.5B parameters on 64 ranks", "largest on 64 ranks of 32 GB", "largest on 1024 ranks of 16 GB"]
UNITS = [" GB", "B", "B"]


def benchmark(device: torch.device) -> None:
    rows = []
    for stage in STAGES:
        held, psi, kept, sent = measure(stage, dist.group.WORLD, device, make_zero if stage else None)
        must_hold, must_send = round(psi * bytes_per_parameter(stage, RANKS)), bytes_sent(stage, RANKS, 2 * psi, kept)
        if held != must_hold or abs(sent - must_send) > 1e-6:
            raise SystemExit(f"stage {stage}: holds {held}, not {must_hold}; sends {sent:.0f}, not {must_send:.0f}")
        sizes = [7.5e9 * bytes_per_parameter(stage, 64) / GB]
        sizes += [largest_model(memory * GB, stage, ranks) / 1e9 for memory, ranks in ((32, 64), (16, 1024))]
        numbers = [psi, must_hold, held, round(must_send), round(sent)]
        rows.append([str(stage), *numbers, *(f"{size:.4g}{unit}" for size, unit in zip(sizes, UNITS, strict=True))])
    if dist.get_rank() == 0:
        write_result(
            "03_zero_memory",
            f"Bytes on each of {RANKS} ranks, by formula and measured; and the paper's model sizes by the same formula",
            COLUMNS,
            rows,
            "A decoder in bf16 with AdamW and fp32 master weights (K = 12), one step of one micro-batch. Stage 3 keeps "
            "its last unit and the root gathered between forward and backward, and so sends less than 3/2. Bytes held "
            "are measured; bytes sent are the payload of each call times the formula of a ring.",
        )


if __name__ == "__main__":
    launch(benchmark)
