"""The block against torch's DTensor plan of the same block: same weights, same input, 4 ranks, one run.

    python 04_tensor_parallel/in_depth/bench_parallel_block.py    4 processes on CPU (Gloo), or 4 GPUs (NCCL)

Output and all gradients are compared before any timing. A step is forward, backward and the sum of partial
gradients. Both sides use the same norm, attention and RoPE.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _tensor_parallel_bench import (
    RANKS,
    Block,
    fused_norm,
    must_be_same,
    options,
    run,
    step,
    torch_plan,
    whole,
)
from harness.meter import communication, saved_activations
from harness.report import paired, write_result
from overlap import column_overlapped
from parallel_block import Config, ParallelBlock, Parts, rope_tables, sync_replicated_gradients
from parallel_linear import TensorParallel, column_gather_again, column_simple, init_weights
from parallel_llama import full_state_dict

SIZES = {
    "H 128": Config(hidden=128, heads=8, kv_heads=4, intermediate=344),
    "H 512": Config(hidden=512, heads=8, kv_heads=4, intermediate=1408),
}
ROWS, SEQUENCE = 2, 128
VERSIONS = {"simple": column_simple, "gather-again": column_gather_again, "overlapped": column_overlapped}


def sum_of_torchs_norms(model: Block) -> None:
    """Like our sync_replicated_gradients, because torch's gradients of norm weights are partial as well."""
    for norm in (model.input_layernorm, model.post_attention_layernorm):
        whole(norm.weight.grad)


def worker(device: torch.device) -> None:
    group, rows = dist.group.WORLD, []
    for name, config in SIZES.items():
        cos, sin = rope_tables(torch.arange(SEQUENCE, device=device), config.hidden // config.heads, 10000.0)
        for sequence in (False, True):
            x = torch.randn(ROWS, SEQUENCE, config.hidden, generator=torch.Generator().manual_seed(0)).to(device)
            mine = (x.chunk(RANKS, 1)[dist.get_rank()] if sequence else x).clone().requires_grad_()
            theirs = Block(config).to(device)
            for version, column in VERSIONS.items():
                if version == "gather-again" and not sequence:
                    continue
                tp = TensorParallel(group, sequence, column=column)
                ours = ParallelBlock(config, tp, Parts(norm=fused_norm)).to(device)
                init_weights(ours, layers=1, seed=0)
                if version == "simple":
                    theirs.load_state_dict(full_state_dict(ours, group))
                    theirs = torch_plan(theirs, sequence)

                ends = {ours: partial(sync_replicated_gradients, group=group), theirs: sum_of_torchs_norms}
                results, sent, kept = [], [], []
                for model, end in ends.items():
                    with communication() as wire, saved_activations([*model.parameters(), cos, sin]) as saved:
                        z = step(model, mine, cos, sin, finish=end)
                    sent.append(wire.total)
                    kept.append(saved.bytes)
                    results.append((z, mine.grad))
                must_be_same(results[0][0], results[1][0], "the output")
                must_be_same(results[0][1], results[1][1], "the gradient of the input")
                gradients = {n: p.grad for n, p in ours.named_parameters()}
                for n, full in full_state_dict(ours, group, gradients).items():
                    must_be_same(full, whole(theirs.get_parameter(n).grad).cpu(), f"the gradient of {n}")
                steps = [partial(step, model, mine, cos, sin, finish=end) for model, end in ends.items()]
                ratio = paired(*steps, repeats=11, setup=dist.barrier)
                layout = f"{'sequence' if sequence else 'tensor'} parallel, {version}"
                rows.append([name, layout, *sent, *kept, ratio])
    if dist.get_rank() == 0:
        columns = ["block", "layout", "bytes sent, ours", "torch's", "bytes kept, ours", "torch's"]
        columns.append("seconds of a step / torch's (quartiles)")
        note = (
            f"A step is forward, backward and the sum of partial gradients, {ROWS} x {SEQUENCE} tokens. With sequence "
            "parallel, all versions but `simple` pay two all-gathers to keep S/t tokens of the gathered inputs."
        )
        write_result("04_parallel_block", f"A block against torch's DTensor plan, {RANKS} ranks", columns, rows, note)


if __name__ == "__main__":
    options(__doc__)
    run(worker)
