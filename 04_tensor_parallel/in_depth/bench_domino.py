"""What halves leave in sight: messages that nobody computes beside, over the number of blocks, 4 ranks.

    python 04_tensor_parallel/in_depth/bench_domino.py     4 processes on CPU (gloo), or 4 GPUs (nccl)

First the halves must give the output and every gradient of the same blocks with whole batches; only then is anything
counted. A message is in sight if no product was asked for between its start and its wait. What halves cost in seconds
where nothing can be hidden is in bench_overlap.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _tensor_parallel_bench import RANKS, must_be_same, options, run
from bench_overlap import BASE, LAYOUTS, block_of, recording
from domino import in_halves, one_by_one
from harness.report import write_result
from parallel_block import Config, rope_tables
from parallel_linear import init_weights
from torch import Tensor, nn

CONFIG = Config()
ROWS, SEQUENCE = 4, 32
BLOCKS = (1, 2, 4)


def in_sight(events: list) -> tuple[int, int, int]:
    """Messages, those with no product between start and wait, and bytes sent."""
    kinds, started, hidden = [kind for kind, *_ in events], {}, set()
    for at, (kind, number, _) in enumerate(events):
        if kind == "start":
            started[number] = at
        elif kind == "wait" and "product" in kinds[started[number] : at]:
            hidden.add(number)
    return len(started), len(started) - len(hidden), sum(size for kind, _, size in events if kind == "start")


def measure(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, SEQUENCE, CONFIG.hidden, device=device)
    cos, sin = rope_tables(torch.arange(SEQUENCE, device=device), CONFIG.hidden // CONFIG.heads, CONFIG.rope_theta)
    rows = []
    for layout, sequence in LAYOUTS.items():
        mine = x.chunk(RANKS, 1)[dist.get_rank()] if sequence else x
        for count in BLOCKS:
            found: list[tuple[list[Tensor], tuple[int, int, int]]] = []
            for version, through in ((BASE[sequence], one_by_one), ("halves", in_halves)):
                blocks = nn.ModuleList(block_of(version, dist.group.WORLD, sequence, CONFIG) for _ in range(count))
                init_weights(blocks.to(device), layers=count, seed=0)
                given = mine.clone().requires_grad_()
                with recording() as recorder:
                    z = through(given, list(blocks), cos, sin)
                    z.backward(z.detach())
                results = [z.detach(), given.grad, *(p.grad for p in blocks.parameters())]
                found.append((results, in_sight(recorder.events)))
            (want, whole), (got, halves) = found
            for a, b in zip(got, want, strict=True):
                must_be_same(a, b, f"halves of {count} block(s), {layout}: a tensor")
            seen = [f"{alone} of {sent}" for sent, alone, _ in (whole, halves)]
            rows.append([layout, count, *seen, whole[2], halves[2]])
    if dist.get_rank() == 0:
        columns = ["layout", "blocks", "in sight, whole batches", "in halves", "bytes sent, whole batches", "in halves"]
        note = (
            f"Forward and backward; whole batches are `{BASE[False]}` and, with sequence parallelism, `{BASE[True]}`."
        )
        write_result("04_domino", f"Messages without a computation beside them, {RANKS} ranks", columns, rows, note)


if __name__ == "__main__":
    options(__doc__)
    run(measure)
