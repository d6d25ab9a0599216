"""ZeRO-R, part two: temporary buffers of constant size (C_B) and long-lived tensors kept out of the heap (M_D).

Problem 1. Fusing all gradients into one buffer before a collective is fast, but the buffer is as large as the model:
1910.02054, section 6.2, counts 12 GB for 3 billion parameters in fp32.
Idea, C_B. A collective is at full speed long before that. Take a buffer of constant size and send the model through it:

    tensors   | a a a a a a a | b b | c c c c |        buffer of 4, used four times
    messages  | a a a a | a a a b | b c c c | c |      a tensor may be split over messages

Problem 2. Allocators hand out contiguous blocks. Training mixes tensors that live long with tensors that live briefly:
in forward checkpoints between activations, in backward gradients of weights between gradients of activations. When the
brief ones die they leave holes between the long-lived ones, and a large tensor fits into none of them:

    heap      |####|  hole  |##|   hole   |####| hole |       enough bytes free, and yet: out of memory
Idea, M_D. One knows beforehand how much the long-lived ones take. Allocate that once and move them there (section 6.3):

    arena     |####|##|####|          heap  |                 one hole                |

To see it, this file records every allocation of a real training step and replays it in an exact simulation of a
best-fit allocator: the free block that leaves least over is taken, a freed block merges with free neighbours. What is
reported is the heap that the step needs over the bytes alive at once at the peak; a perfect allocator's ratio is 1.
On a GPU, the demo adds what PyTorch's caching allocator says of the same two steps.

Formulas, for G bytes to be reduced and a buffer of C bytes:
    messages    ceil(G / C)           temporary memory    C, instead of G
    sent        2 (P-1)/P G           as before: nothing is sent twice

Run it:
    python zero_buffers.py                                   one rank, CPU or GPU
    torchrun --nproc_per_node 2 zero_buffers.py              gloo on CPU, nccl on GPU
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from _zero_demo import Decoder, OneLineParser, Row, make_batch, report, token_loss_sum, world
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

# Shapes: B batch, S sequence, H hidden.

# --------------------------------------------------------------------------------------------------- C_B: constant size


def all_reduce_fused(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """The version to beat: one message, and a buffer as large as all tensors together. Returns the messages sent."""
    tensors = list(tensors)
    for tensor in tensors:
        check_dtype("first tensor", tensors[0], tensor)
    buffer = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(buffer, group=group)
    for t, piece in zip(tensors, buffer.split([t.numel() for t in tensors]), strict=True):
        t.copy_(piece.view(t.shape))
    return 1


def check_dtype(place: str, there: Tensor, tensor: Tensor) -> None:
    """ValueError if copying `tensor` to `there` would round it in silence."""
    if tensor.dtype != there.dtype:
        raise ValueError(
            f"the {place} is {there.dtype}, the tensor {tensor.dtype}: copying would round; give it its own"
        )


def all_reduce_through(buffer: Tensor, tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """C_B: sum contiguous tensors over the group, in place, through a flat buffer of constant size.

    Every rank gives tensors of the same sizes in the same order. Returns the number of messages, ceil(elements / C).
    Raises ValueError for a buffer without room, and for one of another dtype, in which the sums would be rounded.
    """
    tensors = list(tensors)
    if not buffer.numel():
        raise ValueError("a buffer of 0 elements is never full; give it at least one")
    for tensor in tensors:
        check_dtype("buffer", buffer, tensor)
    pieces: list[Tensor] = []  # what the buffer holds at present, as views of the tensors
    messages = filled = 0

    def flush() -> None:
        nonlocal messages, filled
        dist.all_reduce(buffer[:filled], group=group)
        for piece, sums in zip(pieces, buffer[:filled].split([p.numel() for p in pieces]), strict=True):
            piece.copy_(sums)
        pieces.clear()
        messages, filled = messages + 1, 0

    # --- exercise 3.35: fill the buffer to its last element, whatever the sizes of the tensors ---
    for tensor in tensors:
        rest = tensor.detach().view(-1)  # of a tensor with gaps this is an error: a copy would be summed in its place
        while rest.numel():
            piece, rest = rest.split([n := min(rest.numel(), buffer.numel() - filled), rest.numel() - n])
            buffer[filled : filled + n].copy_(piece)
            pieces.append(piece)
            filled += n
            if filled == buffer.numel():
                flush()
    if filled:
        flush()
    # --- end exercise ---
    return messages


# --------------------------------------------------------------------------------------- M_D: one place for what stays


class Arena:
    """One allocation from which tensors are cut end to end, all to be given back together.

    Raises ValueError when it is full: its size is computed beforehand, so that is a mistake in the computation. Also
    for a tensor of another dtype, which would be rounded.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.memory = torch.empty(numel, dtype=dtype, device=device)
        self.used = 0

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` in the arena. The tensor itself may die; its hole in the heap closes."""
        check_dtype("arena", self.memory, tensor)
        # --- exercise 3.36: cut the next piece, and refuse to write past the end ---
        end = self.used + tensor.numel()
        if end > self.memory.numel():
            raise ValueError(
                f"arena of {self.memory.numel()} elements is full: {tensor.numel()} more after {self.used}"
            )
        # `.data`: autograd must not think that a later piece of the same memory overwrites this one.
        piece = self.memory[self.used : end].view(tensor.shape).data
        self.used = end
        # --- end exercise ---
        return piece.copy_(tensor)

    def reset(self) -> None:
        """Give all pieces back."""
        self.used = 0


# --------------------------------------------------------------------------------------------- an allocator to watch


class OutOfMemoryInHeap(Exception):
    """No free block is large enough."""


class BestFit:
    """A heap of `capacity` bytes: an exact simulation, addresses and all."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.free_blocks = [(0, capacity)]  # (address, size), in order of address, never two that touch
        self.used: dict[int, int] = {}  # address -> size
        self.top = 0  # highest address ever used

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self.free_blocks)

    @property
    def largest_free(self) -> int:
        return max((size for _, size in self.free_blocks), default=0)

    def allocate(self, size: int) -> int:
        """Address of a new block of `size` bytes."""
        # --- exercise 3.37: best fit, that is, the block that leaves least over ---
        fitting = [(free, address) for address, free in self.free_blocks if free >= size]
        if not fitting:
            raise OutOfMemoryInHeap(
                f"{size:,} bytes asked for; {self.free_bytes:,} are free, but only {self.largest_free:,} in a row"
            )
        free, address = min(fitting)
        at = self.free_blocks.index((address, free))
        self.free_blocks[at : at + 1] = [(address + size, free - size)] if free > size else []
        # --- end exercise ---
        self.used[address] = size
        self.top = max(self.top, address + size)
        return address

    def free(self, address: int) -> None:
        """Give a block back; it merges with free neighbours."""
        # --- exercise 3.38: a hole must not stay cut in two ---
        merged: list[tuple[int, int]] = []
        for begin, size in sorted([*self.free_blocks, (address, self.used.pop(address))]):
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self.free_blocks = merged
        # --- end exercise ---


Trace = list[tuple[int, int]]  # (number of the allocation, bytes), and (the same number, 0) when it is freed


class Recorder(TorchDispatchMode):
    """Every allocation and release inside the block, as a `Trace`."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: Trace = []
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage.nbytes() and not {storage._cdata} & (before | self.known):
                number = len(self.trace)
                self.trace.append((number, storage.nbytes()))
                self.known.add(storage._cdata)
                weakref.finalize(storage, self.freed, number, storage._cdata).atexit = False
        return out

    def freed(self, number: int, storage: int) -> None:
        self.known.discard(storage)
        self.trace.append((number, 0))


def replay(trace: Trace, heap: BestFit) -> None:
    """Make the recorded allocations in the heap. Raises OutOfMemoryInHeap where one does not fit."""
    addresses: dict[int, int] = {}
    for number, size in trace:
        if size:
            addresses[number] = heap.allocate(size)
        else:
            heap.free(addresses.pop(number))


def most_alive(trace: Trace) -> int:
    """The most bytes that are alive at once: what a perfect allocator would need."""
    sizes = {number: size for number, size in trace if size}
    most = alive = 0
    for number, size in trace:
        alive += size or -sizes[number]
        most = max(most, alive)
    return most


def heap_needed(trace: Trace) -> int:
    """Bytes of heap, from its first address to the highest used, if it never runs out of fresh memory."""
    heap = BestFit(1 << 60)
    replay(trace, heap)
    return heap.top


def training_step(
    model: Decoder, micro_batches: list[tuple[Tensor, Tensor]], checkpoints: Arena | None, gradients: Arena | None
) -> None:
    """Forward and backward with a checkpoint at each layer. With arenas, checkpoints and gradients live there (M_D)."""

    def keep(tensor: Tensor) -> Tensor:
        if checkpoints is None or not tensor.numel():  # torch 2.11's checkpoint() keeps an empty tensor, too
            return tensor
        return checkpoints.hold(tensor)

    if gradients is not None:
        gradients.reset()
        for p in model.parameters():
            p.grad = gradients.hold(torch.zeros_like(p))  # autograd adds into it
    for tokens, labels in micro_batches:
        # Saved for backward are the inputs of the layers, and outside of them what embedding and head need.
        if checkpoints is not None:
            checkpoints.reset()
        x = model.embed(tokens)
        for layer in model.layers:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
                x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        token_loss_sum(lambda _, x=x: model.head(model.norm(x)), tokens, labels).backward()  # type: ignore
        del x


def recorded_step(with_arenas: bool, device: torch.device | str = "cpu") -> tuple[Trace, int]:
    """The trace of one step over sequences of four lengths, and the bytes of the arenas (0 without)."""
    lengths, rows = (64, 128, 96, 160), 2
    torch.manual_seed(0)
    model = Decoder(hidden=32, layers=8).to(device)
    batch = [(x.to(device), y.to(device)) for n in lengths for x, y in make_batch(0, 1, 1, rows=rows, length=n)[0]]
    checkpoints = gradients = None
    if with_arenas:
        checkpoints = Arena(len(model.layers) * rows * max(lengths) * 32, torch.float32, device)
        gradients = Arena(sum(p.numel() for p in model.parameters()), torch.float32, device)
    with Recorder() as recorder:
        training_step(model, batch, checkpoints, gradients)
    return recorder.trace, sum(arena.memory.nbytes for arena in (checkpoints, gradients) if arena)


def on_gpu(with_arenas: bool, device: torch.device) -> str:
    """What PyTorch's caching allocator says of a step: bytes it reserved beyond those in use at the peak."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    recorded_step(with_arenas, device)
    stats = torch.cuda.memory_stats(device)
    in_use, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return f"in use {in_use:,}, reserved {reserved:,}, split and inactive {stats['inactive_split_bytes.all.peak']:,}"


# ------------------------------------------------------------------------------------------------------------- demo


def constant_buffer_rows(group: dist.ProcessGroup, device: torch.device) -> list[Row]:
    """Both versions of the reduction give the same sums; one needs a constant buffer."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes = (1000, 3, 0, 4097, 256, 1)
    whole, through = ([torch.arange(n, device=device) + float(rank) for n in sizes] for _ in range(2))
    all_reduce_fused(whole, group)
    buffer = torch.empty(512, device=device)
    messages = all_reduce_through(buffer, through, group)
    wanted = [torch.arange(n, device=device) * float(ranks) + sum(range(ranks)) for n in sizes]
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(whole, through, wanted, strict=True))
    must = -(-sum(sizes) // buffer.numel())
    return [
        ("C_B: sums equal to those of one large message", True, same, same),
        (f"C_B: messages of {buffer.nbytes:,} bytes", must, messages, must == messages),
    ]


def main() -> None:
    OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False).parse_checked()
    with world() as (group, device):
        rows = constant_buffer_rows(group, device)
        (plain, _), (moved, arenas) = recorded_step(False), recorded_step(True)
        needs = {"without M_D": heap_needed(plain), "with M_D": heap_needed(moved) + arenas}
        alive = {"without M_D": most_alive(plain), "with M_D": most_alive(moved) + arenas}
        for name, limit in (("without M_D", "> 1.05"), ("with M_D", "< 1.01")):
            ratio = needs[name] / alive[name]
            right = ratio > 1.05 if name == "without M_D" else ratio < 1.01
            rows.append((f"{name}: heap needed / bytes alive at the peak", limit, f"{ratio:.3f}", right))
        device_size = (needs["without M_D"] + needs["with M_D"]) // 2
        failed = "fits"
        try:
            replay(plain, BestFit(device_size))
        except OutOfMemoryInHeap as full:
            failed = str(full)
        replay(moved, BestFit(device_size - arenas))  # raises if it does not fit
        rows.append(
            (
                f"a device of {device_size:,} bytes, without M_D",
                "out",
                "fits" if failed == "fits" else "out",
                failed != "fits",
            )
        )
        if dist.get_rank(group) == 0:
            print(f"without M_D on a device of {device_size:,} bytes: {failed}")
            print("with M_D on the same device: the step runs")
            for moving in (False, True) if device.type == "cuda" else ():
                print(f"caching allocator, {'with' if moving else 'without'} M_D: {on_gpu(moving, device)}")
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
