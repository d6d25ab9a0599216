"""The MLP against torch's DTensor plan of the same MLP: same weights, same input, 4 ranks, one run.

    python 04_tensor_parallel/in_depth/bench_parallel_linear.py    4 processes on CPU (Gloo), or 4 GPUs (NCCL)

Output and gradients are compared before any timing. A step is forward and backward.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _tensor_parallel_bench import MLP, RANKS, must_be_same, options, run, step, torch_plan, whole
from harness.meter import communication
from harness.report import paired, write_result
from parallel_block import Config
from parallel_linear import COLUMNS, ParallelMLP, TensorParallel, init_weights
from parallel_llama import full_state_dict

SIZES = {"H 128": (128, 256), "H 512": (512, 1408)}
ROWS, SEQUENCE = 2, 128


def worker(device: torch.device) -> None:
    group, rows = dist.group.WORLD, []
    for name, (hidden, intermediate) in SIZES.items():
        for sequence in (False, True):
            x = torch.randn(ROWS, SEQUENCE, hidden, generator=torch.Generator().manual_seed(0)).to(device)
            mine = (x.chunk(RANKS, 1)[dist.get_rank()] if sequence else x).clone().requires_grad_()
            theirs = MLP(Config(hidden=hidden, intermediate=intermediate)).to(device)
            for version in COLUMNS if sequence else ["simple"]:
                tp = TensorParallel(group, sequence, column=COLUMNS[version])
                ours = ParallelMLP(hidden, intermediate, tp).to(device)
                init_weights(ours, layers=1, seed=0)
                if version == "simple":
                    theirs.load_state_dict(full_state_dict(ours, group))
                    theirs = torch_plan(theirs, sequence)

                results = []
                sent = []
                for model in (ours, theirs):
                    with communication() as wire:
                        z = step(model, mine)
                    sent.append(wire.total)
                    results.append((z, mine.grad))
                must_be_same(results[0][0], results[1][0], "the output")
                must_be_same(results[0][1], results[1][1], "the gradient of the input")
                gradients = {n: p.grad for n, p in ours.named_parameters()}
                for n, full in full_state_dict(ours, group, gradients).items():
                    must_be_same(full, whole(theirs.get_parameter(n).grad).cpu(), f"the gradient of {n}")
                ratio = paired(partial(step, ours, mine), partial(step, theirs, mine), repeats=11, setup=dist.barrier)
                layout = f"sequence parallel, {version}" if sequence else "tensor parallel"
                rows.append([name, layout, *sent, ratio])
    if dist.get_rank() == 0:
        columns = ["MLP", "layout", "bytes sent, ours", "torch's", "seconds of a step / torch's (quartiles)"]
        note = f"Forward and backward of {ROWS} x {SEQUENCE} tokens; `gather-again` pays an all-gather for memory."
        write_result("04_tensor_parallel", f"An MLP against torch's DTensor plan, {RANKS} ranks", columns, rows, note)


if __name__ == "__main__":
    options(__doc__)
    run(worker)
