"""Ring, all-gather and layouts against each other, and against PyTorch's own ring attention, at 4 ranks.

    python 05_context_parallel/in_depth/bench_context_ring.py

First every version must give the output and the gradients of dense attention; only then is anything timed. All versions
use the same local attention, PyTorch's fused kernel for the CPU, so that what differs is the work around it.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from context_ring import VERSIONS, LocalAttention, dense_attention, layout_positions, pairs_of, shard_sequence
from harness.meter import communication
from harness.oracle import assert_same
from harness.ranks import run_ranks
from harness.report import Ratio, paired, write_result
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

RANKS, S, HEADS, D = 4, 2048, 4, 64
BASE = "ring, zigzag"
TORCH = "torch's ring attention, zigzag"
OURS = {
    f"{version}, {layout}": (version, layout) for version in VERSIONS for layout in ("zigzag", "contiguous", "striped")
}
aten = torch.ops.aten


def fused_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # [B, S, N, D] -> [B, N, S, D], which it is fast in
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)
    return out.transpose(1, 2), lse


def fused_backward(dout, q, k, v, out, lse, *, causal: bool) -> tuple[Tensor, ...]:
    given = (x.transpose(1, 2).contiguous() for x in (dout, q, k, v, out))
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, lse.contiguous(), 0.0, causal)
    return tuple(x.transpose(1, 2) for x in gradients)


FUSED = LocalAttention(fused_forward, fused_backward)


def inputs() -> list[Tensor]:
    """q, k, v and the gradient of the output, of the whole sequence: [1, S, N, D]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, S, HEADS, D, generator=generator) for _ in range(4)]


def step_of(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Forward and backward: out, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, causal=True)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def torch_step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """The same by the functions behind torch's `context_parallel`, whose public entrance refuses CPU tensors."""
    theirs.set_rotate_method("alltoall")  # a ring; its default gathers all K/V at once
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
    group, rank = dist.group.WORLD, dist.get_rank()
    made: dict[str, Callable[[], list[Tensor]]] = {}
    for name, (version, layout) in OURS.items():
        shards = [shard_sequence(x, layout, rank, RANKS).contiguous() for x in inputs()]
        attention = VERSIONS[version](group, layout, FUSED)
        made[name] = lambda attention=attention, shards=shards: step_of(attention, *shards)
    zigzag = [shard_sequence(x, "zigzag", rank, RANKS).contiguous() for x in inputs()]
    made[TORCH] = lambda: torch_step(*zigzag)
    return made


def verify() -> dict[str, float]:
    """Bytes that this rank sends in each version, once each has given the right results."""
    want = step_of(dense_attention, *inputs())
    sent_by = {}
    for name, step in steps().items():
        layout = OURS.get(name, ("", "zigzag"))[1]
        where = layout_positions(layout, S, dist.get_rank(), RANKS)
        with communication() as sent:
            got = step()
        for what, x, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, expected[:, where], 1e-5, f"{what} of {name}", dist.get_rank())
        sent_by[name] = sent.total
    return sent_by


def measure() -> dict[str, Ratio]:
    """On every rank: seconds of each version over those of the zigzag ring."""
    made = steps()
    base = made.pop(BASE)
    return {name: paired(step, base, repeats=9, setup=dist.barrier) for name, step in made.items()}


def main() -> None:
    sent = run_ranks(RANKS, verify, timeout=300)
    ratios = run_ranks(RANKS, measure, timeout=600)[0]
    zigzag = pairs_of("zigzag", S, 0, RANKS, True)
    rows = []
    for name, ratio in ratios.items():
        layout = OURS.get(name, ("", "zigzag"))[1]
        busiest = max(pairs_of(layout, S, rank, RANKS, True) for rank in range(RANKS))
        rows.append([name, ratio, max(s[name] for s in sent) / max(s[BASE] for s in sent), busiest / zigzag])
    write_result(
        "05_ring_attention",
        f"Forward and backward of causal attention on {RANKS} ranks, over those of the ring with the zigzag layout",
        ["version", "seconds: median (quartiles)", "bytes sent", "pairs on the busiest rank"],
        rows,
        f"{S} tokens, {HEADS} heads of {D}, float32, the same fused local attention in all. The ranks are processes "
        "that share a few cores, so an idle rank leaves its core to the others and imbalance costs little here; where "
        "each rank has a device of its own, all wait for the busiest, and the last column is the ratio to expect.",
    )


if __name__ == "__main__":
    main()
