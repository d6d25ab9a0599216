"""Tensor and sequence parallelism overlapped: some communication is hidden behind matrix products.

Problem. Data parallelism sends gradients that are not used before the step ends. Here the next operation uses
the result: a norm cannot start before f* is done. So each block waits four times, on every rank.

Idea 1: backward has two products, dx = dy W and dW = dyᵀ x, and only dx is sent. Send it first, then compute
dW. Sequence parallel gives a second overlap: x must be gathered again for dW, but not for dx.

    simple       | dW | dx | all-reduce dx ... |        | gather x | dW | dx | reduce-scatter dx | (gather-again)
    overlapped   | dx | dW ............. |              | dx ..... | dW .............. |
                      | all-reduce dx .. |              | gather x | reduce-scatter dx |

Idea 2: split the collective into the t - 1 steps of a ring, and the product into t chunks of S/t tokens. A
product of a gathered x starts with the local chunk; a sum sends one chunk and computes the next (Wang et al.
2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS).

    all-gather, then product: rank 1 of 4      | x1 W | x0 W | x3 W | x2 W |       computes
                                               | x0   | x3   | x2   |              receives from rank 0, meanwhile
    product, then reduce-scatter: rank 1 of 4  | y0 W | y3 W | y2 W | y1 W |       adds the received sum and
                                                      | c0   | c3   | c2   |       sends it on; c1 is its own

domino.py continues: it splits the batch and hides one half's messages behind the other's products.

Formulas, n = B S H e bytes. The ring sends as much as the collective: t - 1 chunks of n/t bytes.
    ring all-reduce   2(t-1) (α + n/t β), α seconds per step, β per byte, slowest link  Thakur et al. 2005

Run it:
    python overlap.py                                                           one rank, CPU or GPU
    torchrun --nproc_per_node 4 overlap.py                                      Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 overlap.py --nic-gbs 100 --latency-us 5         another cluster
The demo compares all versions, counts products behind a message, and prints the time of a Llama 3 70B block on 1 to
32 GPUs: why tensor parallelism stays in a node. The last line is PASS, or it exits with 1 and a reason.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tensor_parallel_demo import OneLineParser, Report, Wire, launch, tokens_of_text
from parallel_block import Config, ParallelBlock, Parts, check_sizes, rope_tables
from parallel_linear import (
    Columns,
    Shard,
    TensorParallel,
    all_gather,
    all_gather_single,
    column_gather_again,
    column_simple,
    init_weights,
    initial_weight,
    input_gradient,
    products,
    reduce_scatter_single,
    row_simple,
    stacked,
    under_autocast,
    weight_gradients,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

# Legend of shapes: B batch, S sequence, H hidden, t ranks of the tensor group. S/t is S sharded over that group.
Log = Callable[[str], object]  # receives the events in order


def silent(event: str) -> None:
    pass


def only_plain(linear: Callable, version: str) -> None:
    if linear is not F.linear:
        raise ValueError(
            f"{version} takes the product apart, so linear must be F.linear; use column_simple, row_simple"
        )


# -------------------------------------------------------------------------------------- 1: the order of two products


class Overlapped(torch.autograd.Function):
    """Column-parallel products of one x. Backward sends dx while it computes the weights' gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel, log: Log, *weights: Tensor) -> Columns:
        ctx.tp, ctx.log = tp, log
        ctx.save_for_backward(x, *weights)
        whole = all_gather(x, tp.group) if tp.sequence_parallel else x
        return products(whole, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        tp = ctx.tp
        log = ctx.log
        group = ctx.tp.group

        def dx_of_this_rank() -> Tensor:
            log("product dx")
            return input_gradient(grads, weights)  # [B, S, out/t] each -> [B, S, H]

        def dw_of(whole: Tensor) -> list[Tensor]:
            log("product dW")
            return weight_gradients(grads, whole)  # [out/t, B S] @ [B S, H] each

        # --- exercise 4.31: what is sent must be in flight while something else is computed ---
        if not tp.sequence_parallel:
            dx = dx_of_this_rank()
            log("start all-reduce")
            sending = dist.all_reduce(dx, group=group, async_op=True)
            dw = dw_of(x)
            log("wait all-reduce")
            sending.wait()
            return dx, None, None, *dw
        pieces = x.new_empty(tp.size, *x.shape)  # [t, B, S/t, H]
        log("start all-gather")
        gathering = all_gather_single(pieces.flatten(0, 1), x.contiguous(), group=group, async_op=True)
        dx = dx_of_this_rank()
        to_send = dx.unflatten(1, (tp.size, -1)).movedim(1, 0).contiguous()  # [B, S, H] -> [t, B, S/t, H]
        log("wait all-gather")
        gathering.wait()
        dx = torch.empty_like(x)
        log("start reduce-scatter")
        sending = reduce_scatter_single(dx, to_send.flatten(0, 1), group=group, async_op=True)
        dw = dw_of(pieces.movedim(0, 1).flatten(1, 2))
        log("wait reduce-scatter")
        sending.wait()
        return dx, None, None, *dw
        # --- end exercise ---


def column_overlapped(
    x: Tensor, weights: Sequence[Tensor], tp: TensorParallel, linear: Callable, log: Log = silent
) -> Columns:
    """Version 3, for `TensorParallel(column=...)`: version 2 with communication overlapped in backward."""
    only_plain(linear, "column_overlapped")
    x, *weights = under_autocast(x, *weights)
    return Overlapped.apply(x, tp, log, *weights)


# ----------------------------------------------------------------------------------------------------- 2: the ring


def exchange(outgoing: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Start to send to the next rank and receive from the previous one, in one batch to avoid deadlock."""
    me = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    incoming = torch.empty_like(outgoing)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=(me + 1) % ranks)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(me - 1) % ranks)
    return incoming, dist.batch_isend_irecv([send, receive])


def gathered(x: Tensor, group: dist.ProcessGroup, log: Log = silent) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its x) for every rank, this one first; the next is in flight while the caller uses one."""
    me = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    x = x.contiguous()
    # --- exercise 4.32: an all-gather in t - 1 steps, one chunk ahead of the products ---
    for step in range(ranks):
        more = step < ranks - 1
        if more:
            log("start chunk")
            incoming, works = exchange(x, group)
        yield (me - step) % ranks, x
        if more:
            log("wait chunk")
            for work in works:
                work.wait()
            x = incoming
    # --- end exercise ---


def scattered(product: Callable[[int], Tensor], group: dist.ProcessGroup, log: Log = silent) -> Tensor:
    """The sum over ranks of product(this rank), where product(c) is a rank's partial sum of rank c's chunk.

    The sum of chunk c starts at rank c + 1 and ends at rank c: each rank adds its part and sends it on.
    """
    me = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    incoming = torch.empty(0)  # the sum in flight to this rank
    works = []
    # --- exercise 4.33: a reduce-scatter in t - 1 steps; the next product overlaps the sum in flight ---
    for step in range(ranks):
        share = product((me - 1 - step) % ranks)
        if step > 0:
            log("wait chunk")
            for work in works:
                work.wait()
            share += incoming
        if step < ranks - 1:
            log("start chunk")
            incoming, works = exchange(share.contiguous(), group)
    return share
    # --- end exercise ---


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, 1).T @ x.flatten(0, 1)  # [B, S, out], [B, S, in] -> [out, in]


class RingColumn(torch.autograd.Function):
    """g and column-parallel products, chunk by chunk."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel, log: Log, *weights: Tensor) -> Columns:
        ctx.tp, ctx.log = tp, log
        ctx.save_for_backward(x, *weights)
        B, chunk, _ = x.shape
        outputs = [x.new_empty(B, tp.size, chunk, weight.shape[0]) for weight in weights]
        stack = stacked(weights)
        sizes = [weight.shape[0] for weight in weights]
        for owner, tokens in gathered(x, tp.group, log):
            log("product y")
            parts = F.linear(tokens, stack).split(sizes, dim=-1)  # [B, S/t, H] -> [B, S/t, out/t] each
            for output, part in zip(outputs, parts, strict=True):
                output[:, owner] = part
        return tuple(output.flatten(1, 2) for output in outputs)  # [B, t, S/t, out/t] -> [B, S, out/t]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        chunks = [dy.unflatten(1, (ctx.tp.size, -1)) for dy in grads]  # [B, t, S/t, out/t]
        stack = stacked(weights)
        together = torch.cat(chunks, dim=-1)  # [B, t, S/t, sum of out/t]

        def share(c: int) -> Tensor:
            ctx.log("product dx")
            return together[:, c] @ stack

        dx = scattered(share, ctx.tp.group, ctx.log)
        dw = [torch.zeros_like(weight) for weight in weights]
        for owner, tokens in gathered(x, ctx.tp.group, ctx.log):
            ctx.log("product dW")
            for total, dy in zip(dw, chunks, strict=True):
                total += weight_gradient(dy[:, owner], tokens)
        return dx, None, None, *dw


class RingRow(torch.autograd.Function):
    """A row-parallel product and g*, chunk by chunk."""

    @staticmethod
    def forward(ctx, y: Tensor, weight: Tensor, tp: TensorParallel, log: Log) -> Tensor:
        ctx.tp, ctx.log = tp, log
        ctx.save_for_backward(y, weight)
        chunks = y.unflatten(1, (tp.size, -1))  # [B, t, S/t, in/t]

        def share(c: int) -> Tensor:
            log("product z")
            return F.linear(chunks[:, c], weight)

        return scattered(share, tp.group, log)  # [B, S/t, out]

    @staticmethod
    @once_differentiable
    def backward(ctx, dz: Tensor):
        y, weight = ctx.saved_tensors
        chunks = y.unflatten(1, (ctx.tp.size, -1))
        dy = torch.empty_like(chunks)
        dw = torch.zeros_like(weight)
        for owner, tokens in gathered(dz, ctx.tp.group, ctx.log):
            ctx.log("product dy and dW")
            dy[:, owner] = tokens @ weight
            dw += weight_gradient(tokens, chunks[:, owner])
        return dy.flatten(1, 2), dw, None, None


def column_ring(
    x: Tensor, weights: Sequence[Tensor], tp: TensorParallel, linear: Callable, log: Log = silent
) -> Columns:
    """Version 4, with sequence parallel only (without it there is no gather): all-gather -> product."""
    only_plain(linear, "column_ring")
    if not tp.sequence_parallel:
        raise ValueError("column_ring gathers a sharded sequence; use sequence_parallel=True or column_overlapped")
    x, *weights = under_autocast(x, *weights)
    return RingColumn.apply(x, tp, log, *weights)


def row_ring(x: Tensor, weight: Tensor, tp: TensorParallel, linear: Callable, log: Log = silent) -> Tensor:
    """Version 4, with sequence parallel only: product -> reduce-scatter."""
    only_plain(linear, "row_ring")
    if not tp.sequence_parallel:
        raise ValueError("row_ring leaves a sharded sequence; use sequence_parallel=True or row_simple")
    if x.shape[1] % tp.size:
        raise ValueError(f"sequence of {x.shape[1]} on {tp.size} ranks; use a multiple of {tp.size}")
    x, weight = under_autocast(x, weight)
    return RingRow.apply(x, weight, tp, log)


VERSIONS: dict[str, tuple[Callable[..., Columns], Callable[..., Tensor]]] = {
    "simple": (column_simple, row_simple),
    "gather-again": (column_gather_again, row_simple),
    "overlapped": (column_overlapped, row_simple),
    "ring": (column_ring, row_ring),
}

# --------------------------------------------------------------------- why tensor parallelism stays in a node


@dataclass(frozen=True)
class Cluster:
    """Bandwidths in bytes/s each way, per GPU; `flops` as products reach them, not as on the data sheet."""

    gpus_per_node: int
    inside: float
    nic: float
    latency: float
    flops: float


def block_time(
    config: Config, tokens: int, sequence: int, t: int, cluster: Cluster, rings: str, e: int = 2
) -> tuple[float, float]:
    """Seconds of products and of communication of one block, forward and backward, on t ranks, not overlapped.

    e: bytes of an element, 2 in bf16. `rings`: "one", in which all bytes cross the slowest link, or "many",
    one ring through each NIC of a node.
    """
    H = config.hidden
    kv = config.kv_heads * config.hidden // config.heads
    products = 2 * tokens * (2 * H * H + 2 * H * kv + 3 * H * config.intermediate)  # a product is 2 flops per weight
    attention = 2 * tokens * sequence * H  # q kᵀ and weights v, half of them masked
    compute = 3 * (products + attention) / t / cluster.flops  # backward has two products for each of forward
    across = cluster.nic * (cluster.gpus_per_node if rings == "many" else 1)
    bandwidth = cluster.inside if t <= cluster.gpus_per_node else min(cluster.inside, across)
    n = tokens * H * e
    return compute, 4 * 2 * (t - 1) * (cluster.latency + n / t / bandwidth)


LLAMA_70B = Config(hidden=8192, heads=64, kv_heads=8, intermediate=28672)


def print_cost_table(cluster: Cluster, tokens: int) -> None:
    print(f"one block of Llama 3 70B, {tokens} tokens, forward and backward: milliseconds, by the formulas")
    print(f"{'ranks':>7}{'products':>10}{'sending, one ring':>20}{'in all':>8}{'a ring per NIC':>17}{'in all':>8}")
    for t in (1, 2, 4, 8, 16, 32):
        cells = []
        for rings in ("one", "many"):
            compute, send = (1e3 * seconds for seconds in block_time(LLAMA_70B, tokens, tokens, t, cluster, rings))
            cells += [send, compute + send]
        crosses = "  leaves the node" if t > cluster.gpus_per_node else ""
        print(f"{t:>7}{compute:>10.2f}{cells[0]:>20.2f}{cells[1]:>8.2f}{cells[2]:>17.2f}{cells[3]:>8.2f}{crosses}")


# ------------------------------------------------------------------------------------------------------------- demo


def demo(args: argparse.Namespace, config: Config, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Every version of a block next to the simple one."""
    B = 2
    S = args.sequence
    t = dist.get_world_size(group)
    report = Report(group)
    table = initial_weight("embed.weight", (256, config.hidden), 1, seed=0)
    x = F.embedding(tokens_of_text(B, S), table).to(device, torch.float64)
    cos, sin = rope_tables(torch.arange(S, device=device), config.hidden // config.heads, config.rope_theta)
    n = x.nbytes
    for sequence in (False, True):
        want: list[Tensor] = []
        for version, (column, row) in VERSIONS.items():
            if version == "ring" and not sequence:
                continue
            events: list[str] = []
            if column in (column_overlapped, column_ring):
                column = partial(column, log=events.append)
            tp = TensorParallel(group, sequence, column=column, row=row)
            block = ParallelBlock(config, tp, Parts())
            init_weights(block, layers=1, seed=0)
            block.to(device, torch.float64)
            my_x = Shard(S, 1, t if sequence else 1, tp.rank if sequence else 0).cut(x).clone().requires_grad_()
            with Wire(t) as wire:
                z = block(my_x, cos, sin)
                forward_events = len(events)
                z.backward(z.detach())
            got = [z.detach(), my_x.grad, *(p.grad for p in block.parameters())]
            want = want or got
            for a, b in zip(got, want, strict=True):
                report.compare(a, b)
            report.title(f"{t} rank(s), tensor parallel{' and sequence parallel' * sequence}, {version}")
            report.add_errors("largest difference from the simple version", 1e-12)
            again = 2 * (sequence and version != "simple")
            report.add("bytes sent by a rank", (8 + again) * (t - 1) * n // t, wire.bytes)
            if events and t > 1:
                backward = events[forward_events:]
                first = next((i for i, e in enumerate(backward) if e.startswith("start")), 0)
                waits = next((i for i, e in enumerate(backward) if i > first and e.startswith("wait")), len(backward))
                hidden = [e for e in backward[first:waits] if e.startswith("product")]
                report.add("products between first start and its wait", ">= 1", len(hidden), len(hidden) >= 1)
    if report.rank == 0:
        cluster = Cluster(
            args.gpus_per_node, args.nvlink_gbs * 1e9, args.nic_gbs * 1e9, args.latency_us * 1e-6, args.tflops * 1e12
        )
        print_cost_table(cluster, args.tokens)
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="Tensor parallelism that waits less.", allow_abbrev=False)
    parser.add_argument("--sequence", type=int, default=48)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--nvlink-gbs", type=float, default=450, help="GB/s each way per GPU inside a node")
    parser.add_argument("--nic-gbs", type=float, default=50, help="GB/s each way per GPU between nodes")
    parser.add_argument("--latency-us", type=float, default=10, help="microseconds per step of a ring")
    parser.add_argument("--tflops", type=float, default=400, help="TFLOP/s that products reach")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro-batch, for the cost table")
    args = parser.parse_args()
    for option in ("gpus_per_node", "nvlink_gbs", "nic_gbs", "latency_us", "tflops", "tokens"):
        if not 0 < getattr(args, option) <= 10**9:  # which is False for NaN
            what = f"--{option.replace('_', '-')} {getattr(args, option)}"
            parser.error(f"{what} must be a number above 0, and not above {10**9:,}")
    if not 2 <= args.sequence <= 4096:  # with one position softmax is 1, and the gradients of q and k are zero
        parser.error(f"--sequence {args.sequence} is not in 2 .. 4096")
    config = Config()
    try:
        check_sizes(config, int(os.environ.get("WORLD_SIZE", "1")), args.sequence)
    except ValueError as error:
        parser.error(str(error))
    launch(lambda group, device: demo(args, config, group, device))


if __name__ == "__main__":
    main()
