"""A laboratory of scale: what data parallelism costs on P ranks, for P that one does not have at home.

Problem. On eight GPUs overlap hides all but one bucket, and each new rank adds its full speed. Not on five hundred,
and the reason is not bytes: a ring sends hardly more on 512 ranks than on 8. It is the 2(P-1) starts, one after
another, of every bucket. Where the cliff is depends on five numbers, and this file lets one turn each of them.

    alpha  seconds to start a message        Psi  parameters, each a gradient of s bytes
    1/beta bytes per second of one link      F    operations per second that a rank reaches
    T      tokens of a rank in the last micro-batch, whose backward is what hides the messages

    all-reduce of n bytes on P ranks           seconds
    ring           Patarasuk and Yuan 2009     2(P-1) alpha + 2(P-1)/P n beta
    two trees      Sanders et al. 2009         2 log2(P) alpha + 2 n beta
    hierarchical   g ranks in a node           a ring in the node, a ring of P/g ranks on n/g bytes between nodes
    in-network     Graham et al. 2016, SHARP   2 levels alpha + n beta: switches add, and each rank sends n only once

The last one sends less than the ring, which is optimal only as long as it is ranks that add.

One step: forward takes 2 Psi T/F seconds and backward 4 Psi T/F; bucket i of k is complete after i/k of backward and
leaves when the one before it has arrived. What ends after backward is exposed.

    python scale_lab.py                                         tables for P = 8 to 1024
    python scale_lab.py --alpha-us 3 --tokens 32768             another network, another batch
    python scale_lab.py --ranks 512 --batch-tokens 4194304      the recipe for 4 M tokens a step on 512 ranks
    torchrun --nproc_per_node 4 scale_lab.py --measure          alpha, beta and F of this machine
Ends with PASS when the tables agree with the formulas in their limits, and the hierarchical sum with torch's.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from collectives import all_gather, all_reduce_ring, chunks_of, cost, doublings, reduce_scatter
from torch import Tensor


@dataclass(frozen=True)
class Machine:
    """Seconds, bytes and operations; `node` ranks share a faster network."""

    alpha: float = 10e-6
    beta: float = 1 / 50e9
    inner_alpha: float = 3e-6
    inner_beta: float = 1 / 400e9
    node: int = 8
    radix: int = 32  # ports of a switch that adds
    flops: float = 400e12


@dataclass(frozen=True)
class Work:
    """What a rank does in a step. `tokens` are those of its last micro-batch."""

    parameters: float = 1e9
    gradient_bytes: int = 2
    tokens: int = 16384
    bucket: float = 25 * 2**20


# ------------------------------------------------------------------------------------------- seconds of one all-reduce


def ring(ranks: int, n: float, m: Machine) -> float:
    return 2 * (ranks - 1) * m.alpha + 2 * (ranks - 1) / ranks * n * m.beta


def two_trees(ranks: int, n: float, m: Machine) -> float:
    """Half of the tensor goes up and down each of two trees, in small parts, so that links are busy both ways."""
    return (2 * doublings(ranks) * m.alpha + 2 * n * m.beta) if ranks > 1 else 0.0


def hierarchical(ranks: int, n: float, m: Machine) -> float:
    """Reduce-scatter in the node, all-reduce of a g-th among the nodes, all-gather in the node. g divides P."""
    # --- exercise 2.30: three rings, of which the slow one has P/g ranks and n/g bytes ---
    inside = min(m.node, ranks)
    nodes = ranks // inside
    fast = replace(m, alpha=m.inner_alpha, beta=m.inner_beta)
    return ring(inside, n, fast) + ring(nodes, n / inside, m)
    # --- end exercise ---


def in_network(ranks: int, n: float, m: Machine) -> float:
    """Switches add on the way up and copy on the way down; both at once, so that a rank sends n and receives n."""
    levels = max(1, math.ceil(math.log(ranks, m.radix) - 1e-9)) if ranks > 1 else 0
    return 2 * levels * m.alpha + (n * m.beta if ranks > 1 else 0.0)


ALGORITHMS: dict[str, Callable[[int, float, Machine], float]] = {
    "ring": ring,
    "two trees": two_trees,
    "hierarchical": hierarchical,
    "in-network": in_network,
}


def all_reduce_hierarchical(tensor: Tensor, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
    """The sum over all ranks, in place. `inside` are my node's ranks, `across` the one of each node that is like me.

    Between nodes each rank sends 2(m-1)/m of a g-th of its tensor (m nodes of g ranks). A node's ranks together send no
    more than the one rank through which a ring over all leaves the node, and with many nodes as much: 2(m-1)/m n and
    2(P-1)/P n. Each link carries a g-th, if each rank has one.
    """
    # --- exercise 2.31: sum a chunk in the node, sum it among the nodes, give it back to the node ---
    mine = chunks_of(tensor, dist.get_world_size(inside))[dist.get_rank(inside)].clone()  # [n] -> [n/g]
    reduce_scatter(mine, tensor, inside)  # [n] -> [n/g], the sum over the node
    all_reduce_ring(mine, across)  # [n/g], the sum over all ranks
    all_gather(tensor, mine, inside)  # [n/g] -> [n]
    # --- end exercise ---


# ---------------------------------------------------------------------------------------------------------- one step


def step_seconds(ranks: int, w: Work, m: Machine, algorithm: Callable = ring) -> tuple[float, float]:
    """(seconds of a step, of them exposed): messages that end after backward. The optimizer is left out."""
    forward, backward = 2 * w.parameters * w.tokens / m.flops, 4 * w.parameters * w.tokens / m.flops
    total = w.parameters * w.gradient_bytes
    buckets = max(1, math.ceil(total / w.bucket))
    # --- exercise 2.32: when does the last bucket arrive? ---
    arrived = 0.0
    for i in range(buckets):
        size = min(w.bucket, total - i * w.bucket)
        complete = forward + backward * min((i + 1) * w.bucket, total) / total
        arrived = max(complete, arrived) + algorithm(ranks, size, m)
    # --- end exercise ---
    computed = forward + backward
    return max(computed, arrived), max(0.0, arrived - computed)


def efficiency(ranks: int, w: Work, m: Machine, algorithm: Callable = ring) -> float:
    """Throughput on P ranks over P times that of one."""
    return 6 * w.parameters * w.tokens / m.flops / step_seconds(ranks, w, m, algorithm)[0]


def hidden_from(ranks: int, w: Work, m: Machine, algorithm: Callable = ring) -> float:
    """Tokens of a rank from which on only the last bucket is exposed: its backward takes as long as its message.

    4 Psi T/(F k) >= seconds of a bucket. For a ring without alpha and many ranks that is T >= (s/2) F beta, in which
    Psi is gone: a larger model hides its larger gradients behind its longer backward.
    """
    size = min(w.bucket, w.parameters * w.gradient_bytes)
    per_token = 4 * size / w.gradient_bytes / m.flops  # seconds of backward for the parameters of one bucket
    return algorithm(ranks, size, m) / per_token


# -------------------------------------------------------------------------------------------------- who reads what


def rows_of(step: int, rank: int, ranks: int, rows: int, data: int, seed: int = 0) -> list[int]:
    """The rows of the data set that this rank reads in this step; `rows` is the global batch, of all ranks.

    Every epoch has its own order, drawn from seed and epoch, the same on all ranks without a message. The global batch
    is the next `rows` of it, on any number of ranks: a run that goes on with more ranks sees the same batches.
    """
    # --- exercise 2.33: every row once an epoch, and the same global batch for any number of ranks ---
    found, orders = [], {}
    for place in range(step * rows + rank, (step + 1) * rows, ranks):
        epoch, index = divmod(place, data)
        if epoch not in orders:  # drawn once an epoch and not once a row: a permutation is as long as the data
            orders[epoch] = torch.randperm(data, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        found.append(int(orders[epoch][index]))
    return found
    # --- end exercise ---


def recipe(batch_tokens: int, sequence: int, ranks: int, rows_that_fit: int) -> tuple[int, int, int]:
    """(rows of a rank in a step, micro-batch, accumulation): ranks * micro * accumulation * sequence is the batch.

    The batch is a choice of the training and not of the machine: more ranks mean less accumulation, not more tokens.
    ValueError, in one line, if the batch does not divide.
    """
    # --- exercise 2.34: from the batch to the micro-batch ---
    rows, rest = divmod(batch_tokens, sequence)
    if rest:
        raise ValueError(f"--batch-tokens {batch_tokens} is no multiple of --sequence {sequence}")
    mine, rest = divmod(rows, ranks)
    if rest or not mine:
        below = max(p for p in range(1, min(ranks, rows) + 1) if rows % p == 0)
        raise ValueError(f"--ranks {ranks} does not divide a batch of {rows} sequences; {below} does")
    micro = max(size for size in range(1, min(mine, rows_that_fit) + 1) if mine % size == 0)
    return mine, micro, mine // micro
    # --- end exercise ---


# ------------------------------------------------------------------------------------------------------------- checks


def wrong_formulas() -> list[str]:
    """What the laboratory says in limits where the answer is known otherwise."""
    m, w, wrong = Machine(), Work(), []

    def same(what: str, got: float, want: float) -> None:
        if not abs(got - want) <= 1e-9 * abs(want):  # so written, NaN is wrong
            wrong.append(f"{what}: {got:.6g}, but should be {want:.6g}")

    for ranks in (2, 8, 512, 1024):
        rounds, volume = cost("all_reduce_ring", ranks)
        same(f"ring on {ranks}", ring(ranks, 1e6, m), rounds * m.alpha + volume * 1e6 * m.beta)
        same(f"one rank in a node, {ranks}", hierarchical(ranks, 1e6, replace(m, node=1)), ring(ranks, 1e6, m))
    inner = replace(m, alpha=m.inner_alpha, beta=m.inner_beta)
    same("one node", hierarchical(8, 1e6, m), ring(8, 1e6, inner))
    free = replace(m, alpha=0.0, beta=0.0)
    same("a free network", step_seconds(512, w, free)[0], 6 * w.parameters * w.tokens / m.flops)
    fast, one = replace(m, flops=1e30), replace(w, bucket=1e18)
    same("no computing", step_seconds(8, one, fast)[0], ring(8, 2e9, m))
    same("a single bucket", step_seconds(8, one, m)[1], ring(8, 2e9, m))
    same("tokens without latency", hidden_from(10**9, w, replace(m, alpha=0.0)), m.flops * m.beta)  # s/2 = 1
    for ranks in (1, 2, 8):
        epoch = [row for step in range(3) for r in range(ranks) for row in rows_of(step, r, ranks, 8, 24)]
        if sorted(epoch) != list(range(24)):
            wrong.append(f"{ranks} ranks do not read every row once")
    return wrong


def wrong_sum(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The hierarchical all-reduce beside torch's. On P ranks, two nodes if P is even, else P nodes of one."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = ranks // 2 if ranks % 2 == 0 else 1
    nodes = [list(range(first, first + size)) for first in range(0, ranks, size)]
    limit = timedelta(seconds=60)  # a new group does not have that of the world, but its backend's
    inside = [dist.new_group(node, timeout=limit) for node in nodes][rank // size]
    across = [dist.new_group([node[i] for node in nodes], timeout=limit) for i in range(size)][rank % size]
    x = torch.randn(1003, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).to(device)
    want = x.clone()
    dist.all_reduce(want, group=group)
    all_reduce_hierarchical(x, inside, across)
    error = (x - want).abs().max().item()
    return [] if error <= 1e-12 else [f"rank {rank}: the hierarchical sum is off by {error:.1e}"]


def measured(group: dist.ProcessGroup, device: torch.device) -> Machine:
    """alpha from an all-reduce of one number, beta from one of 16 MiB, F from a matrix product, on this machine."""

    def seconds(run: Callable[[], object], repeats: int = 7) -> float:
        times = []
        for _ in range(repeats):
            dist.barrier(group)
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[repeats // 2]

    ranks, small, large = dist.get_world_size(group), torch.zeros(1, device=device), torch.zeros(2**22, device=device)
    a = torch.randn(1024, 1024, device=device)
    start = seconds(lambda: dist.all_reduce(small, group=group))
    whole = seconds(lambda: dist.all_reduce(large, group=group))
    found = torch.tensor([start / (2 * (ranks - 1)), (whole - start) / (2 * (ranks - 1) / ranks * large.nbytes)])
    found = torch.cat([found, torch.tensor([2 * 1024**3 / seconds(lambda: a @ a)])]).double().to(device)
    dist.all_reduce(found, group=group)
    alpha, beta, flops = (found / ranks).tolist()
    return replace(Machine(), alpha=alpha, beta=max(beta, 1e-15), flops=flops)


# -------------------------------------------------------------------------------------------------------------- tables


def tables(w: Work, m: Machine, args: argparse.Namespace) -> None:
    size = min(w.bucket, w.parameters * w.gradient_bytes)
    print(f"alpha {m.alpha * 1e6:.3g} us, 1/beta {1e-9 / m.beta:.3g} GB/s, F {m.flops * 1e-12:.3g} TFLOP/s; ", end="")
    print(f"{w.parameters:.3g} parameters, {w.tokens} tokens, buckets of {size / 2**20:.3g} MiB")
    print(f"in a node of {m.node}, for hierarchical only and whatever is measured or given: ", end="")
    print(f"alpha {m.inner_alpha * 1e6:.3g} us, 1/beta {1e-9 / m.inner_beta:.3g} GB/s")
    print(f"\n{'ranks':>6}  ms of one bucket:" + "".join(f"{name:>14}" for name in ALGORITHMS), end="")
    print("   of these, starts of the ring")
    for ranks in (8, 32, 128, 512, 1024):
        row = "".join(f"{1e3 * f(ranks, size, m):14.2f}" for f in ALGORITHMS.values())
        print(f"{ranks:6}  {'':17}{row}{2e3 * (ranks - 1) * m.alpha:17.2f} ms")
    print(f"\n{'ranks':>6}  {'throughput of a rank, of one alone':36}{'tokens from which the ring is hidden':>36}")
    for ranks in (8, 32, 128, 512, 1024):
        row = "  ".join(f"{name} {efficiency(ranks, w, m, f):.2f}" for name, f in ALGORITHMS.items())
        print(f"{ranks:6}  {row}{hidden_from(ranks, w, m):14,.0f}")
    mine, micro, accumulation = recipe(args.batch_tokens, args.sequence, args.ranks, args.rows_that_fit)
    print(
        f"\n{args.batch_tokens:,} tokens a step on {args.ranks} ranks: {mine} sequences each, in {accumulation} ",
        end="",
    )
    first = rows_of(0, 0, args.ranks, min(mine, 4) * args.ranks, 10**5)  # of a longer batch they would be the same
    print(f"micro-batches of {micro}; first rows of rank 0: {first}")


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def arguments() -> argparse.Namespace:
    parser = Parser(prog="scale_lab.py", description="What data parallelism costs on many ranks.", allow_abbrev=False)
    given = parser.add_argument
    given("--alpha-us", type=float, help="microseconds to start a message, not inside a node; default 10")
    given("--gbytes", type=float, help="gigabytes per second of one link, not inside a node; default 50")
    given("--tflops", type=float, help="10^12 operations per second that a rank reaches; default 400")
    given("--billions", type=float, default=1.0, help="10^9 parameters; default %(default)s")
    given("--gradient-bytes", type=int, choices=(2, 4), default=2)
    given("--tokens", type=int, default=16384, help="of a rank's last micro-batch; default %(default)s")
    given("--bucket-mib", type=float, default=25.0)
    given("--node", type=int, default=8, help="ranks that share a network of 3 us and 400 GB/s; default %(default)s")
    given("--batch-tokens", type=int, default=4 * 2**20, help="of a step, all ranks; default %(default)s")
    given("--sequence", type=int, default=4096)
    given("--ranks", type=int, default=128, help="for the recipe; default %(default)s")
    given(
        "--rows-that-fit", type=int, default=2, help="the largest micro-batch that memory allows; default %(default)s"
    )
    given("--measure", action="store_true", help="measure alpha, beta and F here, on two ranks or more")
    args = parser.parse_args()
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        most = 6 if name in ("ranks", "rows_that_fit") else 12  # the recipe tries these one by one
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not 1e-6 <= value <= 10**most:
            parser.error(f"{option} {value} must be a number from 0.000001 to 10^{most}")
        if args.measure and name in ("alpha_us", "gbytes", "tflops") and value is not None:
            parser.error(f"{option} {value} would be measured; leave out --measure or this")
    least = args.billions * 1e9 * args.gradient_bytes / 2**20 / 1e5
    if args.bucket_mib < least:
        parser.error(f"--bucket-mib {args.bucket_mib} makes more than 100,000 buckets; use {least:.2g} or more")
    if args.node & (args.node - 1):
        parser.error(f"--node {args.node} does not divide the ranks of the tables; use a power of two")
    try:
        recipe(args.batch_tokens, args.sequence, args.ranks, args.rows_that_fit)
    except ValueError as problem:
        parser.error(str(problem))
    local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if 0 < gpus < local:
        parser.error(f"--nproc_per_node {local} is more than the {gpus} GPUs here")
    if args.measure and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("--measure needs two ranks or more; start it with torchrun --nproc_per_node 2")
    return args


def main() -> None:
    args, gpus = arguments(), torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
    alone: dict = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if gpus:
        torch.cuda.set_device(device)
        alone["device_id"] = device
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **alone)
    group, rank = dist.group.WORLD, dist.get_rank()
    m = measured(group, device) if args.measure else Machine()
    given = {"alpha": (args.alpha_us, 1e-6), "flops": (args.tflops, 1e12)}
    m = replace(m, node=args.node, **{name: v * unit for name, (v, unit) in given.items() if v is not None})
    m = replace(m, beta=1e-9 / args.gbytes) if args.gbytes else m
    w = Work(args.billions * 1e9, args.gradient_bytes, args.tokens, args.bucket_mib * 2**20)
    wrong: list = [None] * dist.get_world_size()
    dist.all_gather_object(wrong, wrong_formulas() + wrong_sum(group, device))
    del group
    dist.destroy_process_group()
    wrong = [line for lines in wrong for line in lines]
    if rank == 0:
        tables(w, m, args)
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
