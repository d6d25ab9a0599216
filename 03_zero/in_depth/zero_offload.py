"""ZeRO-Offload: the optimizer in host memory. Reduced gradients are copied down to it, new weights back up.

Problem. ZeRO divides by the number of ranks, which helps little with one GPU or a few. Of the 16 bytes per
parameter 14 are used once per step: the gradient and the optimizer's 12. The GPU's host has several times its
memory, behind a link that is some 60 times slower than the GPU's own memory.

Idea. Split where the least data has to cross. Forward and backward do 6 operations per parameter and token,
so they stay on the device, with the 16-bit weights. The update does a dozen per parameter and step, so it
runs on the host, with all its state. Per parameter a gradient is copied down and a weight up, 2 bytes each:

    device   | weights, 16 bits |  forward, backward, reduce-scatter  |            all-gather -> weights
                                                  | my shard, 2 bytes             ^ my shard, rounded, 2 bytes
    link     -------------------------------------v-------------------------------|------------------------
    host     | master weights, moments, sums of gradients |     update on the CPU

    backward     | bucket 3 | bucket 2 | bucket 1 |            a bucket is copied while the next is computed
    down                    | 3        | 2        | 1 |
    update                                            | 3 | 2 | 1 |
    up                                                    | 3 | 2 | 1 |   is copied while the next is updated

Formulas, for Psi parameters, K bytes of optimizer state each, weights and gradients of 2 bytes, M micro-batches
(Ren et al. 2021, arXiv 2101.06840, sections 3 and 4; Psi is its M, which counts 4 M bytes on the link and 2 M
on the device):
    device stores  2 Psi                     at stage 2; 2 Psi / N at stage 3, not 2 Psi + (2 + K) Psi / N
    host stores    (2 + K) Psi / N           per rank, and two slots for copies in flight
    down, up       M 2 Psi / N, 2 Psi / N    per rank: 4 Psi for all ranks together at M = 1, for any N
    between ranks  as without offloading
Temporary memory on the device: as in stage 2 or 3, and two shards of buckets that are being copied down.

Run it:
    python zero_offload.py                                           one rank, CPU or GPU
    torchrun --nproc_per_node 2 zero_offload.py --stage 3            Gloo on CPU, NCCL on GPU
On a CPU, device and host share one memory. Copies are still made, and each byte that would cross is counted.
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from _zero_demo import (
    Decoder,
    OneLineParser,
    Row,
    error_against_the_unsharded_model,
    make_batch,
    report,
    storage_bytes,
    table,
    train_step,
    world,
)
from torch import Tensor, nn
from zero3 import Zero3
from zero_memory import GB, largest_model
from zero_stages import Zero2

# N is the number of ranks, S the elements of a rank's shard of a bucket.

# ------------------------------------------------------------------------------------------------------- the formulas


def bytes_apart(stage: int, ranks: int, k: int = 12, weight: int = 2, gradient: int = 2) -> tuple[float, float]:
    """(device bytes, host bytes) per rank and parameter: 2101.06840, table 1, divided as in ZeRO."""
    if stage not in (2, 3):
        raise ValueError(f"stage {stage} is not offloaded; use 2 or 3")
    return weight / ranks if stage == 3 else weight, (k + gradient) / ranks


def bytes_over_the_link(ranks: int, gradients: int, weights: int, micro_batches: int = 1) -> tuple[float, float]:
    """Bytes per rank and step, (down, up); `gradients` and `weights` are the bytes of the full tensors."""
    # --- exercise 3.47: what crosses the link, and how often? ---
    return micro_batches * gradients / ranks, weights / ranks
    # --- end exercise ---


def paper_table() -> list[str]:
    """The largest model whose states fit in 32 GB: at stage 2, and offloaded at stages 2 and 3."""
    rows = {
        f"{ranks} ranks": [
            f"{largest_model(32 * GB, 2, ranks) / 1e9:.3g}B",
            *(f"{32 * GB / bytes_apart(stage, ranks)[0] / 1e9:.4g}B" for stage in (2, 3)),
        ]
        for ranks in (1, 4, 16, 64)
    }
    return table("largest model in 32 GB", ("stage 2", "offloaded", "at stage 3"), rows)


# ----------------------------------------------------------------------------------------------------------- the link


class Crossing:
    """A pending copy between device and host. It keeps both tensors alive, so drop it when the copy is done.

    There are two ways to wait. `wait_on_device` makes later kernels in the stream wait. The host must block
    with `wait_on_host` before it reads what the copy writes, or writes what the copy reads.
    """

    def __init__(self, done: Any, ends: tuple[Tensor, Tensor]):
        self.done, self.ends = done, ends

    def wait_on_host(self) -> None:
        self.done.synchronize() if isinstance(self.done, torch.cuda.Event) else self.done.result()

    def wait_on_device(self) -> None:
        if isinstance(self.done, torch.cuda.Event):
            torch.cuda.current_stream().wait_event(self.done)
        else:
            self.done.result()


class Link:
    """Copies one by one, overlapped with computation: in a stream of its own on a GPU, in a thread on a CPU.

    `bytes` counts the bytes copied down to the host and up to the device.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = None if self.stream else ThreadPoolExecutor(max_workers=1)
        self.bytes = {"down": 0, "up": 0}

    def slot(self, size: int) -> Tensor:
        """Host memory for asynchronous copies; with a GPU it has to be pinned."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)

    def start(self, way: str, to: Tensor, source: Tensor) -> Crossing:
        self.bytes[way] += source.nbytes
        if self.thread is not None:
            return Crossing(self.thread.submit(self.carry, to, source), (to, source))
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())  # the source must have been computed
        with torch.cuda.stream(self.stream):
            self.carry(to, source)
            done = self.stream.record_event()
        for tensor in (to, source):
            if tensor.is_cuda:
                tensor.record_stream(self.stream)  # its memory must not be reused before the copy is done
        return Crossing(done, (to, source))

    def carry(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)


# ------------------------------------------------------------------------------------------------------ the technique


class Offload2(Zero2):
    """Stage 2 with the optimizer on the host: one new idea. What is used once per step can be off the device.

        zero = Offload2(model, optimizer, group, master=torch.float32)

    and then as in `Zero1`. The optimizer keeps its class and options, but its tensors are on the host, so its
    update runs there (AdamW(fused=True) is the fast one on a CPU). `accumulate_dtype=torch.float32` adds
    micro-batches in fp32 on the host, at no cost on the device.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, **options: Any):
        first = next(module.parameters(), None)
        self.link = self.make_link(torch.device("cpu") if first is None else first.device)
        self.under_way: list[tuple[int | None, Tensor, Crossing]] = []  # bucket (None: up), slot, crossing
        self.turn = 0
        super().__init__(module, optimizer, group, **options)
        wide = self.reduce_dtype.itemsize if self.reduce_dtype else 0
        longest = max(b.shard_numel * max(wide, b.params[0].element_size()) for b in self.buckets)
        self.slots = [self.link.slot(longest) for _ in range(2)]

    def make_link(self, device: torch.device) -> Link:
        return Link(device)

    def own_copy(self, index: int, dtype: torch.dtype) -> Tensor:
        return self.weight_shard(index).to("cpu", copy=True).to(dtype)  # 2 bytes cross; the host widens them

    def hold_gradients(self) -> None:
        kept = [(b.shard_numel, self.accumulate_dtype or b.params[0].dtype) for b in self.buckets]
        self.gradients = [torch.zeros(numel, dtype=dtype) for numel, dtype in kept]  # [S] each, on the host

    # ---- two slots in turn

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A slot on the host for the next copy: while one is in flight the other is filled or emptied."""
        if len(self.under_way) == len(self.slots):
            self.land()  # the oldest copy uses this slot
        self.turn = (self.turn + 1) % len(self.slots)
        return self.slots[self.turn][: numel * dtype.itemsize].view(dtype)

    def land(self) -> None:
        """Wait for the oldest copy, and add a gradient to its sum. Then the slot is free."""
        index, slot, crossing = self.under_way.pop(0)
        # --- exercise 3.48: when may the host read the slot, and what becomes of earlier micro-batches? ---
        crossing.wait_on_host()
        if index is not None:
            self.gradients[index].add_(slot)
        # --- end exercise ---

    def land_all(self) -> None:
        while self.under_way:
            self.land()

    # ---- down

    def zero_grad(self) -> None:
        self.land_all()  # copies that a failed backward has left must not be added to the next sums
        super().zero_grad()

    def retire(self) -> None:
        """Copy the result of the oldest reduction to the host, and free it on the device."""
        index, flat, work = self.works.pop(0)
        work.wait()
        self.send_down(index, flat[self.buckets[index].mine])

    def send_down(self, index: int, mine: Tensor) -> None:
        # --- exercise 3.49: copy my shard to the host, and let nothing keep the bucket on the device ---
        slot = self.slot(mine.numel(), mine.dtype)  # [S]
        piece = mine.clone()  # [S]: a view would keep all N shards until the copy has been made
        self.under_way.append((index, slot, self.link.start("down", slot, piece)))
        # --- end exercise ---
        self.events.append(("down", index))

    def finish(self) -> None:
        super().finish()
        self.land_all()  # the update, and the norm before it, read the sums

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor | float) -> None:
        super().scale_gradients(factor.cpu() if isinstance(factor, Tensor) else factor)

    # ---- up

    def send_up(self, index: int) -> Crossing:
        """Copy my new weights to the device while the CPU updates the next bucket."""
        mine = self.weight_shard(index)  # [S] on the device
        # --- exercise 3.50: the new weights in a slot, in the dtype in which they are to cross ---
        slot = self.slot(mine.numel(), mine.dtype)
        slot.copy_(self.masters[index])  # rounded on the host, so 2 bytes cross and the device never needs 4
        crossing = self.link.start("up", mine, slot)
        self.under_way.append((None, slot, crossing))
        # --- end exercise ---
        self.events.append(("up", index))
        return crossing

    def publish(self, index: int) -> list[Any]:
        self.send_up(index).wait_on_device()  # on a GPU the gather waits for the copy, the host for neither
        if self.stage == 3:
            return []  # the next forward gathers it
        self.events.append(("gather", index))
        return [self.all_gather(self.flats[index], self.weight_shard(index), group=self.group, async_op=True)]

    # ---- what is stored, and full tensors

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """As in `Zero1`, but the master weights are a copy at every dtype."""
        return {segment: {**state, "master": segment.data} for segment, state in super().state.items()}

    def whole(self, index: int, shard: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Through the device, because the group's collectives run there."""
        return super().whole(index, shard.to(self.buckets[index].params[0].device))

    def on_device(self) -> list[Tensor]:
        return self.held()["weights"]

    def on_host(self) -> list[Tensor]:
        held = self.held()
        return [*held["gradients"], *held["optimizer states"]]


class Offload3(Offload2, Zero3):
    """Stage 3 with the optimizer on the host: between steps a device stores a shard of weights only."""

    stage = 3


def make_offloaded(
    stage: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    *,
    units: Iterable[nn.Module] = (),
    **options: Any,
) -> Offload2:
    """`make_zero` with the optimizer on the host. ValueError for stage 1, which has full gradients."""
    if type(stage) is not int or stage not in (2, 3):
        raise ValueError(f"stage {stage!r} is not offloaded; use 2 or 3")
    units = list(units)
    if stage == 2:
        return Offload2(module, optimizer, group, **options)
    if not units:
        raise ValueError("stage 3 without units would gather all weights at once; give units=model.layers, say")
    return Offload3(module, optimizer, group, units=units, **options)


# ------------------------------------------------------------------------------------------------------------- demo


def measure(
    stage: int, group: dist.ProcessGroup, device: torch.device, micro_batches: int = 2
) -> tuple[int, Offload2, int]:
    """One bf16 AdamW step: (padded parameters, the sharded optimizer, bytes allocated on the device)."""
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    torch.manual_seed(0)
    model = Decoder().to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    zero = make_offloaded(stage, model, optimizer, group, units=model.layers, master=torch.float32)
    batch = [(x.to(device), y.to(device)) for x, y in make_batch(0, ranks, micro_batches)[rank]]
    train_step(model, zero, batch, max_norm=1.0)
    zero.step()
    allocated = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
    return sum(bucket.padded for bucket in zero.buckets), zero, allocated


def demo(stage: int, make: Callable[..., Offload2], group: dist.ProcessGroup, device: torch.device) -> list[Row]:
    ranks = dist.get_world_size(group)
    worst = error_against_the_unsharded_model(make, group, device)
    micro_batches = 2
    psi, zero, allocated = measure(stage, group, device, micro_batches)
    apart = [round(psi * each) for each in bytes_apart(stage, ranks)]
    held = storage_bytes(zero.on_device()), storage_bytes(zero.on_host())
    down, up = bytes_over_the_link(ranks, 2 * psi, 2 * psi, micro_batches)
    rows: list[Row] = [
        ("largest error against the reference (SGD, float64)", "<= 1e-10", f"{worst:.1e}", worst <= 1e-10),
        (f"bytes on the device, bf16, Psi = {psi:,}", apart[0], held[0], apart[0] == held[0]),
        ("bytes on the host, AdamW", apart[1], held[1], apart[1] == held[1]),
        ("bytes down the link in a step of 2", round(down), zero.link.bytes["down"], down == zero.link.bytes["down"]),
        ("bytes up the link", round(up), zero.link.bytes["up"], up == zero.link.bytes["up"]),
    ]
    if device.type == "cuda" and stage == 2:  # by the allocator, in blocks of 512 bytes, with the batch
        limit = apart[0] + 512 * 200 + 2**16
        rows.append(("bytes allocated on the device", f"<= {limit}", allocated, allocated <= limit))
    return rows


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--stage", type=int, choices=[2, 3], default=2, help="the stage that is offloaded")
    args = parser.parse_checked()

    def make(module: Any, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> Offload2:
        options: dict[str, Any] = {"bucket_bytes": 2**17} if args.stage == 2 else {}
        return make_offloaded(args.stage, module, optimizer, group, units=module.layers, **options)

    with world() as (group, device):
        rows = demo(args.stage, make, group, device)
        if dist.get_rank(group) == 0:
            print("\n".join(paper_table()))
            print(f"stage {args.stage}, offloaded, on {dist.get_world_size(group)} {device.type} rank(s)")
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
