"""The overlapped and the ring version of a block against the one that waits: same weights and input, 4 ranks, one run.

    python 04_tensor_parallel/in_depth/bench_overlap.py              4 processes on CPU (gloo), or 4 GPUs (nccl)

First output and gradients are compared; only then is anything timed. A step is forward and backward. On a CPU the
ranks and their messages share the cores, so nothing can hide: a ratio near 1 says that the order costs nothing.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _tensor_parallel_bench import RANKS, must_be_same, run, step
from harness.meter import communication
from harness.report import paired, write_result
from overlap import VERSIONS
from parallel_block import Config, ParallelBlock, Parts, rope_tables
from parallel_linear import TensorParallel, init_weights

CONFIG = Config(hidden=512, heads=8, kv_heads=4, intermediate=1408)
ROWS, SEQUENCE = 2, 256


def worker(device: torch.device) -> None:
    group, rows = dist.group.WORLD, []
    cos, sin = rope_tables(torch.arange(SEQUENCE, device=device), CONFIG.hidden // CONFIG.heads, 10000.0)
    x = torch.randn(ROWS, SEQUENCE, CONFIG.hidden, generator=torch.Generator().manual_seed(0)).to(device)
    for sequence, base, others in ((False, "simple", ["overlapped"]), (True, "gather-again", ["overlapped", "ring"])):
        mine = (x.chunk(RANKS, 1)[dist.get_rank()] if sequence else x).clone().requires_grad_()
        blocks = {}
        for version in (base, *others):
            column, row = VERSIONS[version]
            blocks[version] = ParallelBlock(CONFIG, TensorParallel(group, sequence, column, row), Parts()).to(device)
            init_weights(blocks[version], layers=1, seed=0)

        want = [step(blocks[base], mine, cos, sin), mine.grad, *(p.grad for p in blocks[base].parameters())]
        for version in others:
            with communication() as wire:
                z = step(blocks[version], mine, cos, sin)
            got = [z, mine.grad, *(p.grad for p in blocks[version].parameters())]
            for a, b in zip(got, want, strict=True):
                must_be_same(a, b, f"{version}: a tensor")
            steps = [partial(step, blocks[name], mine, cos, sin) for name in (version, base)]
            ratio = paired(*steps, repeats=11, setup=dist.barrier)
            layout = "sequence parallel" if sequence else "tensor parallel"
            rows.append([layout, f"{version} / {base}", wire.total, ratio])
    if dist.get_rank() == 0:
        columns = ["layout", "versions", "bytes sent in a step", "ratio of seconds (quartiles)"]
        note = f"Forward and backward of a block, H {CONFIG.hidden}, {ROWS} x {SEQUENCE} tokens."
        write_result(
            "04_overlap", f"Versions that wait less against those that wait, {RANKS} ranks", columns, rows, note
        )


if __name__ == "__main__":
    run(worker)
