"""Ring, all-gather and layouts against each other, and against PyTorch's own ring attention, at 4 ranks.

    python 05_context_parallel/in_depth/bench_context_ring.py
    python 05_context_parallel/in_depth/bench_context_ring.py --counts   only counts, no times

Before any timing, every version must match the output and the gradients of dense attention. All versions use
the same local attention, PyTorch's fused kernel for the CPU, so that only the work around it differs.

The wall time of four ranks on two cores means little: a waiting rank leaves its core to the others, so
imbalance does not show, and the order in which ranks run shows too much. So two things are measured: the work, in CPU
seconds of all ranks (one that waits uses none), and the time of two ranks with a core each, where all wait, as on GPUs.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from context_ring import VERSIONS, dense_attention, layout_positions, pairs_of, shard_sequence
from flash_local import FLASH
from harness.meter import communication
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import Ratio, option_given, paired, processor_paired, write_result
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RANKS, S, HEADS, D = 4, 2048, 4, 64
BASE = "ring, zigzag"
TORCH = "torch's ring attention, zigzag"
OURS = {
    f"{version}, {layout}": (version, layout) for version in VERSIONS for layout in ("zigzag", "contiguous", "striped")
}
aten = torch.ops.aten


def inputs() -> list[Tensor]:
    """q, k, v and the gradient of the output, of the full sequence: [1, S, N, D]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, S, HEADS, D, generator=generator) for _ in range(4)]


def step_of(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Forward and backward: out, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, causal=True)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def torch_step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """The same with the functions behind torch's `context_parallel`, whose public API rejects CPU tensors."""
    theirs.set_rotate_method("alltoall")  # a ring; the default gathers all K/V at once
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, lse = theirs._templated_ring_attention(dist.group.WORLD, 2, forward, q, k, v, is_causal=True)
    gradients = theirs._templated_ring_attention_backward(
        dist.group.WORLD, 2, backward, dout, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
    )
    return [x.transpose(1, 2) for x in (out, *gradients[:3])]


def steps() -> dict[str, Callable[[], list[Tensor]]]:
    """Every version, ready to run on this rank's shard."""
    group, rank, P = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    made: dict[str, Callable[[], list[Tensor]]] = {}
    for name, (version, layout) in OURS.items():
        shards = [shard_sequence(x, layout, rank, P).contiguous() for x in inputs()]
        attention = VERSIONS[version](group, layout, FLASH)
        made[name] = lambda attention=attention, shards=shards: step_of(attention, *shards)
    zigzag = [shard_sequence(x, "zigzag", rank, P).contiguous() for x in inputs()]
    made[TORCH] = lambda: torch_step(*zigzag)
    return made


def verify() -> dict[str, float]:
    """Bytes that this rank sends in each version, after a check of the results."""
    want, P = step_of(dense_attention, *inputs()), dist.get_world_size()
    sent_by = {}
    for name, step in steps().items():
        layout = OURS.get(name, ("", "zigzag"))[1]
        where = layout_positions(layout, S, dist.get_rank(), P)
        with communication() as sent:
            got = step()
        for what, x, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, expected[:, where], 1e-5, f"{what} of {name}", dist.get_rank())
        sent_by[name] = sent.total
    return sent_by


def measure_work() -> dict[str, Ratio]:
    made = steps()
    base = made.pop(BASE)
    return {name: processor_paired(step, base) for name, step in made.items()}


def with_a_core_each() -> dict[str, Ratio]:
    """Ratio of each version's seconds to the zigzag ring's, with one core for all threads of a rank."""
    cores, threads = sorted(os.sched_getaffinity(0)), [int(x) for x in os.listdir("/proc/self/task")]
    if len(cores) < dist.get_world_size():
        sys.exit(f"{dist.get_world_size()} ranks need a core each; there are {len(cores)}")
    for thread in threads:
        os.sched_setaffinity(thread, {cores[dist.get_rank()]})
    try:
        made = steps()
        base = made.pop(BASE)
        return {name: paired(step, base, repeats=9, setup=dist.barrier) for name, step in made.items()}
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), set(cores))


KINDS = {"clone": "copied", "copy_": "copied", "cat": "copied", "stack": "copied", "add_": "added", "add": "added"}


class Operators(TorchDispatchMode):
    """Operators that write tensors, without kernels and messages: number, bytes of copies, bytes of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, dict.fromkeys(("copied", "added"), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        if func.namespace == "aten" and not views and "flash" not in func._opname:
            self.calls += 1
            if kind := KINDS.get(func._opname):
                self.bytes[kind] += sum(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))
        return out


def operators() -> dict[str, tuple[int, int, int]]:
    made, found = steps(), {}
    for name in (BASE, TORCH):
        with Operators() as seen:
            made[name]()
        found[name] = seen.calls, seen.bytes["copied"], seen.bytes["added"]
    return found


def main() -> None:
    only_counts = option_given("--counts")
    sent = run_ranks(RANKS, verify, timeout=300)
    run_ranks(2, verify, timeout=300)
    ranks = run_ranks(RANKS, operators, timeout=300)
    write_result(
        "05_ring_operators",
        f"What two rings do around the same kernel and messages, forward and backward on {RANKS} ranks",
        ["version", "operators that write", "bytes copied", "bytes added"],
        [[name, *(max(rank[name][i] for rank in ranks) for i in range(3))] for name in (BASE, TORCH)],
        f"{S} tokens, {HEADS} heads of {D}, float32. Counted, the rank with most.",
    )
    if only_counts:
        return
    work = run_ranks(RANKS, measure_work, timeout=600)[0]
    alone = run_ranks(2, with_a_core_each, timeout=600)
    rows = []
    for name, ratio in work.items():
        layout = OURS.get(name, ("", "zigzag"))[1]
        busiest = [
            max(pairs_of(layout, S, r, P, True) for r in range(P)) / pairs_of("zigzag", S, 0, P, True)
            for P in (2, RANKS)
        ]
        bytes_sent = max(s[name] for s in sent) / max(s[BASE] for s in sent)
        slowest = max((rank[name] for rank in alone), key=lambda r: r.median)
        rows.append([name, ratio, busiest[1], slowest, busiest[0], bytes_sent])
    write_result(
        "05_ring_attention",
        "Forward and backward of causal attention, over those of the ring with the zigzag layout",
        [
            "version",
            "work of all 4 ranks",
            "pairs of the busiest of 4",
            "time of 2 ranks, a core each",
            "pairs of the busiest of 2",
            "bytes sent",
        ],
        rows,
        f"{S} tokens, {HEADS} heads of {D}, float32, PyTorch's kernel in all. Work is CPU seconds of all ranks; "
        "median and quartiles. Pairs by formula; of two ranks with a core each, the larger ratio.",
    )


if __name__ == "__main__":
    main()
