"""A full model in chunks: memory and time of a step next to recomputation, and what stays on the device.

    python 08_fpdt/in_depth/bench_fpdt_model.py   CPU: writes the results 08_fpdt_model and 08_fpdt_remaining

First loss and every gradient of the model in 1 and 4 chunks, with both values of `keep`, have to match the
full model, on one rank and on two; only then is anything measured. On a GPU: bench_fpdt_attention.py --gpu.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _fpdt_demo import IGNORE, Llama, LlamaBlock, batch
from fpdt_attention import fpdt_positions
from fpdt_costs import loss_peak
from fpdt_model import chunked_loss, fpdt_block, loss_sum, use_fpdt
from fpdt_store import CpuMachine, Store
from harness.meter import peak_memory
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import option_given, paired, write_result
from torch.utils.checkpoint import checkpoint

S = 2048
SIZES = dict(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128)


def verify() -> None:
    """Check loss and every gradient against the full model."""
    group, P = dist.group.WORLD, dist.get_world_size()
    tokens, labels = batch(64, 256, 0)
    valid = (labels != IGNORE).sum()
    want = Llama().double()
    loss = want.loss_sum(tokens, labels, torch.arange(64)) / valid
    loss.backward()
    for u, keep in ((1, "input"), (4, "input"), (4, "attention")):
        model = use_fpdt(Llama().double(), u, group, Store(CpuMachine()), keep=keep)
        mine = fpdt_positions(64, group.rank(), P, u)
        share = loss_sum(model, tokens[:, mine], labels[:, mine], mine, u) / valid
        share.backward()
        total = share.detach().clone()
        dist.all_reduce(total, group=group)
        assert_same(total, loss.detach(), what=f"loss in {u} chunks", rank=group.rank())
        for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
            dist.all_reduce(p.grad, group=group)
            assert_same(p.grad, q.grad, what=f"gradient of {name} in {u} chunks", rank=group.rank())


def step_of(u: int, keep: str) -> Callable[[], None]:
    """Forward and backward of a model; u = 0: without chunks, each block recomputed if `keep` is "input"."""
    model, store = Llama(**SIZES), Store(CpuMachine())
    tokens, labels = batch(S, 256, 0)
    positions = torch.arange(S)
    if u:
        use_fpdt(model, u, dist.group.WORLD, store, keep=keep)
    elif keep == "input":
        for layer in model.model.layers:
            layer.forward = lambda *x, whole=layer.forward: checkpoint(whole, *x, use_reentrant=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def step() -> None:
        for p in model.parameters():
            p.grad.zero_()
        loss = loss_sum(model, tokens, labels, positions, 4 * u) if u else model.loss_sum(tokens, labels, positions)
        (loss / (labels != IGNORE).sum()).backward()

    step.store = store
    return step


def step_rows() -> list[list]:
    """Peak bytes of a step on the device, bytes on the host, and seconds over seconds of recomputation."""
    recomputed = step_of(0, "input")
    rows = []
    for name, u, keep in (
        ("whole", 0, "all"),
        ("blocks recomputed", 0, "input"),
        ("4 chunks, inputs kept", 4, "input"),
        ("16 chunks, inputs kept", 16, "input"),
        ("16 chunks, attention kept", 16, "attention"),
    ):
        step = step_of(u, keep)
        step()
        with peak_memory() as memory:
            step()
        seconds = 1 if (u, keep) == (0, "input") else paired(step, recomputed, repeats=5, warmup=1)
        rows.append([name, memory.peak, step.store.host_peak, seconds])
    return rows


def remaining() -> list[list]:
    """The peak memory of the device in a step of one layer, in bytes, by kind; 16 chunks."""
    H, V, F, u = 64, 2048, 128, 16
    block = LlamaBlock(H, 4, 2, F)
    run = fpdt_block(block, u, dist.group.WORLD, Store(CpuMachine()), finer=4)
    x, tables = torch.randn(1, S, H, requires_grad=True), torch.ones(S, H // 8)
    with peak_memory() as forward:
        y = run(x, tables, tables)
    dy = torch.randn_like(y)
    with peak_memory() as backward:
        y.backward(dy)
    weights = sum(p.nbytes for p in block.parameters())
    hidden, head = torch.randn(1, S, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    labels = torch.randint(V, (1, S))
    with peak_memory() as loss:
        chunked_loss(hidden, head, labels, 4 * u)
    if loss.peak != loss_peak(S // 4 // u, S, H, V, 4):
        sys.exit(f"the loss took {loss.peak} bytes at most")
    logits = S // 4 // u * V * 4
    return [
        ["residual stream: y, beside x", y.nbytes, "ranks (S/P); offload whole chunks of it"],
        ["inside a block, forward", forward.peak - y.nbytes, "u"],
        ["residual stream: dx, beside dy", x.nbytes, "the same"],
        [
            "weight gradients of one block, until they are reduced",
            weights,
            "one block at a time; ZeRO keeps 1/P of each",
        ],
        ["inside a block, backward", backward.peak - x.nbytes - weights, "u"],
        ["head: gradient of its weight and a share of it", 2 * V * H * 4, "ZeRO, or tensor parallel (chapter 4)"],
        ["head: gradient of the hidden states", hidden.nbytes, "ranks"],
        ["head: logits of a piece, and the rest", loss.peak - 2 * V * H * 4 - hidden.nbytes, "pieces of the loss"],
        ["  of which logits", logits, ""],
        ["embedding: gradient, as large as the head's weight", V * H * 4, "ZeRO, or tensor parallel (chapter 4)"],
    ]


def main() -> int:
    option_given()
    for ranks in (1, 2):
        run_ranks(ranks, verify, timeout=120)
    [left], [steps] = run_ranks(1, remaining, timeout=120), run_ranks(1, step_rows, timeout=300)
    write_result(
        "08_fpdt_model",
        f"A step of a model of {SIZES['layers']} layers, hidden size {SIZES['hidden']}, {S} tokens, float32",
        ["way", "bytes on the device at most", "bytes on the host at most", "seconds, of those with blocks recomputed"],
        steps,
        "Beyond weights and their gradients. Loss in pieces only where there are chunks. Seconds on a CPU, where every "
        "copy takes its time from the computation: medians of pairs, and quartiles.",
    )
    write_result(
        "08_fpdt_remaining",
        "What a step holds on the device beyond weights and inputs, and what makes it smaller",
        ["what", "bytes", "falls with"],
        left,
        f"One layer of hidden size 64, {S} tokens in 16 chunks, a vocabulary of 2048, float32.",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
