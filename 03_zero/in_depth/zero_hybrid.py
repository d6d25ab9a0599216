"""HSDP: sharded inside a machine, replicated across machines. ZeRO for networks with fast and slow links.

Problem. Stage 3 over N ranks gathers each layer from all ranks twice per step, at the slowest link's speed.
Links in a machine are an order of magnitude faster than between machines; memory needs fewer than N shards.

Idea. Shard over the S ranks of a machine only, and let R machines have copies of these shards. Weights are
then gathered inside the machine. The reduce-scatter sums a gradient inside the machine, and an all-reduce
sums the resulting shard over the machines:

                      shards, fast links ->
        machine 0   | rank 0: shard 0 | rank 1: shard 1 |      gather weights and reduce-scatter gradients in a row,
        machine 1   | rank 2: shard 0 | rank 3: shard 1 |      all-reduce a shard of the gradients in a column
          copies, slow links, downwards

R = 1 is stage 3 over all ranks; S = 1 is plain data parallelism.

Formulas, for Psi parameters, K bytes of state each, weights and gradients of 2 bytes, N = S R:
    stores              (2 + 2 + K) Psi / S                    S instead of N: memory is the price
    sends in a machine  3 (2 Psi) (S-1)/S                      less (2 kept)(S-1)/S, as in zero3.py
    sends across        2 (2 Psi / S) (R-1)/R                  instead of 3 (2 Psi) (N-1)/N

If all of the latter crosses, that is about 1.5 S times less for large R. It is about 1.5 times less for a machine as a
whole, since in a ring of all ranks one rank in S has its neighbour elsewhere.

Zhao et al. 2023 (arXiv 2304.11277), section 3.2.2; Zhang et al. 2022 (MiCS, arXiv 2205.00119).

Run it:
    python zero_hybrid.py                                            one rank, CPU or GPU
    torchrun --nproc_per_node 4 zero_hybrid.py --shards 2            2 shards x 2 copies: Gloo on CPU, NCCL on GPU
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _zero_demo import (
    Decoder,
    OneLineParser,
    Row,
    WireCounter,
    error_against_the_unsharded_model,
    make_batch,
    report,
    storage_bytes,
    token_loss_sum,
    world,
)
from torch import Tensor, nn
from zero3 import make_zero
from zero_memory import bytes_per_parameter, bytes_sent
from zero_stages import Zero1, reduce_scatter

# S is the number of shards (ranks of a machine), R that of copies (machines), [n] the length of a shard.


def grid(ranks: int, shards: int) -> tuple[list[list[int]], list[list[int]]]:
    """Groups of shards (rows: consecutive ranks, one machine) and of copies (columns), or ValueError."""
    if shards < 1 or ranks % shards:
        raise ValueError(f"{shards} shards do not divide {ranks} ranks")
    # --- exercise 3.44: which ranks have the other shards of my copy, which the other copies of my shard? ---
    rows = [list(range(first, first + shards)) for first in range(0, ranks, shards)]
    columns = [list(range(first, ranks, shards)) for first in range(shards)]
    # --- end exercise ---
    return rows, columns


def make_groups(shards: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """My group of shards and my group of copies. All ranks of the world create all groups, in one order."""
    mine: list[Any] = []
    limit = timedelta(seconds=60)  # the default is the backend's (Gloo: half an hour), not the world's
    for groups in grid(dist.get_world_size(), shards):
        made = [(ranks, dist.new_group(ranks, timeout=limit)) for ranks in groups]
        mine += [group for ranks, group in made if dist.get_rank() in ranks]
    return mine[0], mine[1]


class ShardThenCopies:
    """A reduce-scatter over the shards of a machine, then an all-reduce of my shard over the machines. Call
    and `wait()` are the same as a collective's, so that stages 1 to 3 accept it as `reduce_scatter=`."""

    def __init__(
        self, out: Tensor, flat: Tensor, *, group: dist.ProcessGroup, async_op: bool, copies: dist.ProcessGroup
    ):
        self.out, self.copies = out, copies
        self.work: Any = reduce_scatter(out, flat, group=group, async_op=True)  # [S n] -> [n]
        if not async_op:
            self.wait()

    def wait(self) -> None:
        # --- exercise 3.45: the sum of my machine becomes the sum of all ---
        self.work.wait()
        dist.all_reduce(self.out, group=self.copies)  # [n], the same on all copies; all wait in the same order
        # --- end exercise ---


def make_hybrid(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    shards: dist.ProcessGroup,
    copies: dist.ProcessGroup,
    *,
    stage: int = 3,
    units: Iterable[nn.Module] = (),
    **options: Any,
) -> Zero1:
    """`make_zero` over the group of shards, with gradients also summed over the copies.

    The loss is divided by the tokens of all ranks, copies included. The norm over the shards is the norm of
    all gradients, because copies are equal. The first rank of the first copy broadcasts the initial weights.
    """
    for p in module.parameters():
        dist.broadcast(p.data, group_src=0, group=copies)
    options["reduce_scatter"] = partial(ShardThenCopies, copies=copies)
    return make_zero(stage, module, optimizer, shards, units=units, **options)


def bytes_across(shards: int, copies: int, gradients: int, micro_batches: int = 1) -> float:
    """Bytes that a rank sends to other machines per step, for gradients of `gradients` bytes in total: one
    all-reduce of its shard per micro-batch."""
    # --- exercise 3.46: what crosses the slow links? ---
    return micro_batches * 2 * (gradients / shards) * (copies - 1) / copies
    # --- end exercise ---


# ------------------------------------------------------------------------------------------------------------- demo


def measure(
    row: dist.ProcessGroup, column: dist.ProcessGroup, device: torch.device
) -> tuple[int, int, int, float, float]:
    """One bf16 AdamW step: bytes stored, padded parameters, bytes of kept weights, sent in and across."""
    torch.manual_seed(0)
    model = Decoder().to(device, torch.bfloat16)
    zero = make_hybrid(
        model, torch.optim.AdamW(model.parameters()), row, column, units=model.layers, master=torch.float32
    )
    batch = [(x.to(device), y.to(device)) for x, y in make_batch(0, dist.get_world_size(), 1)[dist.get_rank()]]
    zero.zero_grad()
    with WireCounter(row) as inside, WireCounter(column) as across:
        with zero.micro_batch(last=True):
            token_loss_sum(model, *batch[0]).backward()
        zero.step()
    padded = [bucket.padded for bucket in zero.buckets]  # first the root, then the units from last to first
    held = storage_bytes(t for ts in zero.held().values() for t in ts)
    return held, sum(padded), 2 * (padded[0] + padded[1]), inside.bytes, across.bytes


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--shards", type=int, help="ranks that share one copy; default: half of them, or all if odd")
    args = parser.parse_checked()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    usual = ranks if ranks % 2 else ranks // 2
    shards = usual if args.shards is None else args.shards
    if shards < 1 or ranks % shards:
        parser.error(f"--shards {shards} does not divide {ranks} rank(s)")
    with world() as (group, device):
        row, column = make_groups(shards)
        copies = ranks // shards
        worst = error_against_the_unsharded_model(
            lambda model, optimizer, _: make_hybrid(model, optimizer, row, column, units=model.layers), group, device
        )
        held, psi, kept, inside, across = measure(row, column, device)
        must = {
            f"bytes held, bf16 and AdamW, Psi = {psi:,}": (psi * bytes_per_parameter(3, shards), held),
            "sent in the machine (payload x formula)": (bytes_sent(3, shards, 2 * psi, kept), inside),
            "sent across (payload x formula)": (bytes_across(shards, copies, 2 * psi), across),
        }
        rows: list[Row] = [
            ("largest error against the reference (SGD, float64)", "<= 1e-10", f"{worst:.1e}", worst <= 1e-10)
        ]
        rows += [(what, round(want), round(got), abs(want - got) < 1e-6) for what, (want, got) in must.items()]
        if dist.get_rank(group) == 0:
            print(f"{shards} shard(s) x {copies} cop(ies) on {ranks} {device.type} rank(s)")
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
