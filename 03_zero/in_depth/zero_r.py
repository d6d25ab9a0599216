"""ZeRO-R: activation checkpoints partitioned (P_a) or moved to the host (P_a+cpu), and two kinds of buffers (C_B, M_D).

Problem 1. Recomputation saves one activation per layer, the layer's input x. In tensor parallelism all ranks
of the group compute with the same x and save the same checkpoint: N copies of L layers of B S H elements.

Idea, P_a. Save 1/N of x on each rank, and all-gather x before backward recomputes a layer. No other change:

    forward   x --> [layer] --> y      rank r saves   |  |x r|     |     1/N of x
    backward  all-gather x --> [layer] once more --> gradients

Idea, P_a+cpu. Backward needs a checkpoint long after forward made it, so offload it to host memory. Copies
overlap the computation: backward prefetches the checkpoint of layer l-1 while it recomputes layer l.

    compute      | layer 0 | layer 1 | layer 2 |   | layer 2 back | layer 1 back | layer 0 back |
    copies                 | 0 out   | 1 out   | 2 out | 2 in, 1 in | 0 in                            in this order

Formulas, for a message of M = B S H elements, N ranks, L layers (1910.02054, sections 6.1 and 8):
    saved on a rank    replicated L M        P_a  L M / N        P_a+cpu  0, with L M / N in host memory
    sent per layer     tensor parallelism: 2 all-reduces in forward, recomputation and backward:  12 M (N-1)/N
                       P_a: one all-gather more:  M (N-1)/N, that is 1/12 of it, below 10 %
    copied per layer   P_a+cpu: M / N to the host and M / N back

The tensor-parallel layer below is the smallest with this traffic; chapter 04 explains it. Each rank has some
heads and some columns of the MLP, and the operators f and g sum over the ranks (Megatron-LM, 1909.08053).

Problem 2. Fusing all gradients into one buffer before a collective is fast, but the buffer is as large as the
model: 1910.02054, section 6.2, counts 12 GB for 3 billion parameters in fp32. Idea, C_B. Collectives reach
full speed at far smaller sizes. Send the model through a buffer of constant size:

    tensors   | a a a a a a a | b b | c c c c |        buffer of 4, used four times
    messages  | a a a a | a a a b | b c c c | c |      a tensor may be split over messages

Problem 3. Allocators return contiguous blocks. Training mixes long-lived with short-lived tensors: in forward
checkpoints between activations, in backward gradients of weights between gradients of activations. The freed
short-lived tensors leave holes between the long-lived ones, and a large tensor fits into none of them:

    heap      |####|  hole  |##|   hole   |####| hole |       enough bytes free, and yet: out of memory
Idea, M_D. The size of all long-lived tensors is known. Allocate it once and copy them there (section 6.3):

    arena     |####|##|####|          heap  |                 one hole                |

To measure it, this file records all allocations of a real training step and replays them in an exact
simulation of a best-fit allocator, which takes the smallest free block that fits; a freed block merges with
free neighbours. The reported ratio is the heap that the step needs over its peak of live bytes, 1 for a
perfect allocator. On a GPU the demo also prints what PyTorch's caching allocator reports of the same steps.

Formulas, for G bytes to be reduced and a buffer of C bytes:
    messages    ceil(G / C)           temporary memory    C, instead of G
    sent        2 (N-1)/N G           as with one buffer: nothing is sent twice

Run it:
    python zero_r.py                                         one rank, CPU or GPU
    torchrun --nproc_per_node 2 zero_r.py                    Gloo on CPU, NCCL on GPU; 1, 2, 3, 4, 6 or 12 ranks
    python zero_r.py --table                                 configurations C1 to C5 of the paper, by formula
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _zero_demo import (
    Block,
    Decoder,
    OneLineParser,
    Row,
    WireCounter,
    error,
    make_batch,
    report,
    table,
    token_loss_sum,
    world,
    worst_of,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from zero_memory import GB, bytes_per_parameter
from zero_stages import all_gather

# Shapes: B batch, S sequence, H hidden, D head dim. N is the number of tensor-parallel ranks.
HEADS = 12

# --------------------------------------------------------------------------------------------------- C_B: constant size


def all_reduce_fused(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """The baseline: one message, and a buffer as large as all tensors together. Returns the message count."""
    tensors = list(tensors)
    for tensor in tensors:
        check_dtype("first tensor", tensors[0], tensor)
    buffer = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(buffer, group=group)
    for t, piece in zip(tensors, buffer.split([t.numel() for t in tensors]), strict=True):
        t.copy_(piece.view(t.shape))
    return 1


def check_dtype(place: str, there: Tensor, tensor: Tensor) -> None:
    """ValueError if copying `tensor` to `there` would round it silently."""
    if tensor.dtype != there.dtype:
        raise ValueError(
            f"the {place} is {there.dtype}, the tensor {tensor.dtype}: copying would round; give it its own"
        )


def all_reduce_through(buffer: Tensor, tensors: Iterable[Tensor], group: dist.ProcessGroup) -> int:
    """C_B: sum contiguous tensors over the group, in place, through a flat buffer of constant size.

    Every rank passes tensors of the same sizes in the same order. Returns the number of messages,
    ceil(elements / C). Raises ValueError for an empty buffer, or one whose dtype would round the sums.
    """
    tensors = list(tensors)
    if not buffer.numel():
        raise ValueError("a buffer of 0 elements is never full; give it at least one")
    for tensor in tensors:
        check_dtype("buffer", buffer, tensor)
    pieces: list[Tensor] = []  # views of the tensors whose values are in the buffer now
    messages = filled = 0

    def flush() -> None:
        nonlocal messages, filled
        dist.all_reduce(buffer[:filled], group=group)
        for piece, sums in zip(pieces, buffer[:filled].split([p.numel() for p in pieces]), strict=True):
            piece.copy_(sums)
        pieces.clear()
        messages += 1
        filled = 0

    # --- exercise 3.35: fill the buffer to its last element, whatever the sizes of the tensors ---
    for tensor in tensors:
        rest = tensor.detach().view(-1)  # raises for a tensor with gaps: reshape would copy and sum the copy
        while rest.numel():
            n = min(rest.numel(), buffer.numel() - filled)
            piece, rest = rest.split([n, rest.numel() - n])
            buffer[filled : filled + n].copy_(piece)
            pieces.append(piece)
            filled += n
            if filled == buffer.numel():
                flush()
    if filled:
        flush()
    # --- end exercise ---
    return messages


# ---------------------------------------------------------------------- M_D: one arena for long-lived tensors


class Arena:
    """One allocation that is split into tensors end to end; all of them are released together.

    Raises ValueError for a tensor of another dtype, which would be rounded, and when the arena is full: its
    size is computed beforehand, so the computation must be wrong.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.memory = torch.empty(numel, dtype=dtype, device=device)
        self.used = 0

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` in the arena. The tensor can be freed, and its hole in the heap closes."""
        check_dtype("arena", self.memory, tensor)
        # --- exercise 3.36: cut the next piece, and refuse to write past the end ---
        end = self.used + tensor.numel()
        if end > self.memory.numel():
            raise ValueError(
                f"arena of {self.memory.numel()} elements is full: {tensor.numel()} more after {self.used}"
            )
        # `.data`, because autograd must not take a write to a later piece for a change of this one.
        piece = self.memory[self.used : end].view(tensor.shape).data
        self.used = end
        # --- end exercise ---
        return piece.copy_(tensor)

    def reset(self) -> None:
        """Release all pieces."""
        self.used = 0


# -------------------------------------------------------------------------------------- a simulated allocator


class OutOfMemoryInHeap(Exception):
    """No free block is large enough."""


class BestFit:
    """A heap of `capacity` bytes, simulated exactly, including addresses."""

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
        """Free a block; it merges with free neighbours."""
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
    """The peak of live bytes, which is all that a perfect allocator would need."""
    sizes = {number: size for number, size in trace if size}
    most = alive = 0
    for number, size in trace:
        alive += size or -sizes[number]
        most = max(most, alive)
    return most


def heap_needed(trace: Trace) -> int:
    """Bytes from the first address of an unlimited heap to the highest one that the trace uses."""
    heap = BestFit(1 << 60)
    replay(trace, heap)
    return heap.top


def training_step(
    model: Decoder, micro_batches: list[tuple[Tensor, Tensor]], checkpoints: Arena | None, gradients: Arena | None
) -> None:
    """Forward and backward with a checkpoint at each layer. Arenas store checkpoints and gradients (M_D)."""

    def keep(tensor: Tensor) -> Tensor:
        if checkpoints is None or not tensor.numel():  # torch 2.11's checkpoint() also saves an empty tensor
            return tensor
        return checkpoints.hold(tensor)

    if gradients is not None:
        gradients.reset()
        for p in model.parameters():
            p.grad = gradients.hold(torch.zeros_like(p))  # autograd adds into it
    for tokens, labels in micro_batches:
        # Layers save their inputs for backward; embedding and head save what they need, outside the arena.
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
    lengths = (64, 128, 96, 160)
    rows = 2
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
    """Statistics of PyTorch's caching allocator for a step: peaks of bytes in use and of bytes reserved."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    recorded_step(with_arenas, device)
    stats = torch.cuda.memory_stats(device)
    in_use = stats["allocated_bytes.all.peak"]
    reserved = stats["reserved_bytes.all.peak"]
    return f"in use {in_use:,}, reserved {reserved:,}, split and inactive {stats['inactive_split_bytes.all.peak']:,}"


# ------------------------------------------------------------------------------- where a checkpoint is stored


class Replicated:
    """The baseline: each rank saves all of x.

    A keeper's `keep(x)` returns a tensor that autograd saves for backward, or None, and what else `restore`
    needs. `drop` gets the latter when the graph is freed, since a discarded forward never calls `restore`.
    """

    def keep(self, x: Tensor) -> tuple[Tensor | None, Any]:
        return x, None

    def restore(self, tensor: Tensor | None, rest: Any) -> Tensor:
        assert tensor is not None
        return tensor

    def drop(self, rest: Any) -> None:
        """Does nothing: the tensor was freed with the graph."""


class Partitioned:
    """P_a: x is the same on all ranks of the group. Each rank saves 1/N of x, and backward all-gathers it.

    With an `arena`, the pieces are stored there (M_D); call `arena.reset()` after each backward pass.
    """

    def __init__(self, group: dist.ProcessGroup, arena: Arena | None = None):
        self.group, self.arena = group, arena

    def piece(self, x: Tensor) -> Tensor:
        """My 1/N of x, [ceil(x.numel() / N)], with zeros at the end where N does not divide."""
        rank = dist.get_rank(self.group)
        ranks = dist.get_world_size(self.group)
        # --- exercise 3.39: keep my part, and nothing that keeps the rest alive ---
        flat = x.detach().flatten()
        size = -(-flat.numel() // ranks)
        mine = flat[rank * size : (rank + 1) * size]
        if mine.numel() < size:
            mine = F.pad(mine, (0, size - mine.numel()))
        return self.arena.hold(mine) if self.arena else mine.clone()  # a view would keep all of x
        # --- end exercise ---

    def gather(self, piece: Tensor, shape: torch.Size) -> Tensor:
        """The full x, from the pieces of all ranks."""
        # --- exercise 3.40: all pieces, without the padding ---
        flat = piece.new_empty(piece.numel() * dist.get_world_size(self.group))
        all_gather(flat, piece, group=self.group)
        return flat[: shape.numel()].view(shape)
        # --- end exercise ---

    def keep(self, x: Tensor) -> tuple[Tensor | None, Any]:
        return self.piece(x), x.shape

    def restore(self, tensor: Tensor | None, rest: Any) -> Tensor:
        assert tensor is not None
        return self.gather(tensor, rest)

    def drop(self, rest: Any) -> None:
        """Does nothing: the piece was freed with the graph."""


class CopyEngine:
    """Copies tensors one by one, overlapped with computation: on a CUDA stream, or in a CPU thread."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = None if self.stream else ThreadPoolExecutor(max_workers=1)

    def copy(self, to: Tensor, source: Tensor) -> Callable[[], Any]:
        """Start a copy and return a function that waits for it. `source` must not change until then."""
        if self.thread is not None:
            return self.thread.submit(self.work, to, source).result
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())  # the source must have been computed
        with torch.cuda.stream(self.stream):
            self.work(to, source)
            done = self.stream.record_event()
        for tensor in (to, source):
            if tensor.is_cuda:
                tensor.record_stream(self.stream)  # its memory must not be reused before the copy is done
        return lambda: torch.cuda.current_stream().wait_event(done)

    def work(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)


@dataclass(eq=False)
class Ticket:
    """A checkpoint in slot `slot` of the host's buffer, or in flight from or to the device."""

    slot: int
    shape: torch.Size
    piece: Tensor | None  # on the device, until it has been copied
    wait_out: Callable[[], Any]
    wait_in: Callable[[], Any] | None = None
    back: Tensor | None = None


class Offloaded(Partitioned):
    """P_a+cpu: the pieces are stored in a buffer of host memory, with `slots` slots of `numel` elements each.

    On a GPU the buffer is pinned, so that copies overlap kernels. ValueError if the checkpoints do not fit.
    """

    def __init__(
        self, group: dist.ProcessGroup, slots: int, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ):
        super().__init__(group)
        self.device = device or torch.device("cpu")
        self.host = torch.empty(slots, numel, dtype=dtype, pin_memory=self.device.type == "cuda")
        self.free = list(range(slots))
        self.engine = CopyEngine(self.device)
        self.order: list[Ticket] = []  # in the order of forward; backward takes them from the end
        self.events: list[tuple[str, int]] = []  # ("out" | "in", slot), since the buffer was last empty

    def keep(self, x: Tensor) -> tuple[Tensor | None, Any]:
        if not self.free:
            raise ValueError(f"host buffer of {len(self.host)} checkpoints is full; give it one slot for each layer")
        check_dtype("host buffer", self.host, x)
        if not self.order:  # the first layer of a forward
            self.events = []
        piece = self.piece(x)
        if piece.numel() > self.host.shape[1]:
            length = self.host.shape[1]
            raise ValueError(f"slots of {length} elements are too small for a checkpoint of {piece.numel()}")
        slot = self.free.pop()
        for last in self.order[-1:]:  # its copy has had a layer's time, so free the source
            last.wait_out()
            last.piece = None
        self.events.append(("out", slot))
        ticket = Ticket(slot, x.shape, piece, self.engine.copy(self.host[slot][: piece.numel()], piece))
        self.order.append(ticket)
        return None, ticket

    def fetch(self, ticket: Ticket) -> None:
        """Start the copy back to the device."""
        if ticket.wait_in is None:
            # --- exercise 3.41: not before the way out has ended; and the slot is busy until the way back has ---
            ticket.wait_out()
            numel = -(-ticket.shape.numel() // dist.get_world_size(self.group))
            ticket.piece = None
            ticket.back = torch.empty(numel, dtype=self.host.dtype, device=self.device)
            ticket.wait_in = self.engine.copy(ticket.back, self.host[ticket.slot][:numel])
            # --- end exercise ---
            self.events.append(("in", ticket.slot))

    def restore(self, tensor: Tensor | None, rest: Any) -> Tensor:
        ticket: Ticket = rest
        at = self.order.index(ticket)
        self.fetch(ticket)
        if at > 0:
            self.fetch(self.order[at - 1])  # prefetch: backward needs it next
        assert ticket.wait_in is not None and ticket.back is not None
        ticket.wait_in()
        self.order.remove(ticket)
        self.free.append(ticket.slot)
        return self.gather(ticket.back, ticket.shape)

    def drop(self, rest: Any) -> None:
        """Free the slot, if no backward pass has done so."""
        if rest in self.order:
            rest.wait_out()
            if rest.wait_in is not None:
                rest.wait_in()
            self.order.remove(rest)
            self.free.append(rest.slot)


# -------------------------------------------------------------------------------------------------- recomputing a layer


class Graph:
    """A token that is freed together with the autograd graph it is stored in."""


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Callable[[Tensor], Tensor], keeper: Any, x: Tensor) -> Tensor:
        ctx.layer, ctx.keeper = layer, keeper
        ctx.random = torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None
        dtype = torch.get_autocast_dtype(x.device.type)
        enabled = torch.is_autocast_enabled(x.device.type)
        ctx.autocast = torch.autocast(x.device.type, dtype, enabled)  # as in forward, for recomputation
        y = layer(x)  # inside forward() autograd records nothing, so no activation of the layer is saved
        tensor, ctx.rest = keeper.keep(x)
        ctx.graph = Graph()
        weakref.finalize(ctx.graph, keeper.drop, ctx.rest).atexit = False
        ctx.save_for_backward(tensor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.keeper.restore(*ctx.saved_tensors, ctx.rest).detach().requires_grad_()
        # --- exercise 3.42: the layer once more, with the random numbers of the first time, and backward through it ---
        with torch.random.fork_rng([x.device] if x.is_cuda else []), torch.enable_grad():
            torch.set_rng_state(ctx.random[0])
            if x.is_cuda:
                torch.cuda.set_rng_state(ctx.random[1], x.device)
            with ctx.autocast:  # backward() may be called outside autocast
                y = ctx.layer(x)
        torch.autograd.backward(y, gradients[0])  # also adds to the .grad of the layer's weights
        # --- end exercise ---
        return None, None, x.grad


def recompute(layer: Callable[[Tensor], Tensor], x: Tensor, keeper: Any) -> Tensor:
    """layer(x) with only x saved for backward, stored by `keeper`.

    ValueError if x requires no gradient while autograd records: backward would never reach the layer, and its
    weights would silently get no gradient.
    """
    if not torch.is_grad_enabled():
        return layer(x)
    if not x.requires_grad:
        raise ValueError("the input of a recomputed layer must require a gradient, or its weights get none")
    return _Recompute.apply(layer, keeper, x)


# ---------------------------------------------------------------------------------------- a tensor-parallel transformer


class _ToParallel(torch.autograd.Function):
    """f: identity in forward; in backward the sum over the ranks, which used different weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _FromParallel(torch.autograd.Function):
    """g: the sum of the ranks' partial results in forward; identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def my_part(name: str, tensor: Tensor, heads: int, rank: int, ranks: int) -> Tensor:
    """This rank's part of a full weight of `Block`, or of its gradient; norms are replicated."""
    if name == "qkv":
        by_head = tensor.view(3, heads, -1, tensor.shape[1])  # [3 H, H] -> [3, heads, D, H]
        return by_head.chunk(ranks, dim=1)[rank].reshape(-1, tensor.shape[1])
    if name == "up":
        return tensor.chunk(ranks, dim=0)[rank]
    if name in ("out", "down"):
        return tensor.chunk(ranks, dim=1)[rank]
    return tensor


class ParallelBlock(nn.Module):
    """`Block` over a group: each rank has some heads and some columns of the MLP, the same x [B, S, H]."""

    def __init__(self, block: Block, group: dist.ProcessGroup):
        super().__init__()
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.heads = block.heads // self.ranks
        for name, layer in block.named_children():
            part = my_part(name, layer.weight.detach(), block.heads, self.rank, self.ranks)
            self.register_parameter(name, nn.Parameter(part.clone()))

    def norm(self, x: Tensor, weight: Any) -> Tensor:
        return _ToParallel.apply(F.rms_norm(x, weight.shape, weight), self.group)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(self.norm(x, self.norm1), self.qkv)  # [B, S, H] -> [B, S, 3 H/N]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in h.chunk(3, -1))  # 3 of [B, heads/N, S, D]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)  # [B, S, H/N]
        x = x + _FromParallel.apply(F.linear(mixed, self.out), self.group)  # partial sums -> all_reduce -> [B, S, H]
        h = F.silu(F.linear(self.norm(x, self.norm2), self.up))  # [B, S, 4 H/N]
        return x + _FromParallel.apply(F.linear(h, self.down), self.group)


class ParallelDecoder(nn.Module):
    """`Decoder` with parallel blocks, recomputed with a keeper. Embedding, norm and head are replicated."""

    def __init__(self, full: Decoder, group: dist.ProcessGroup, keeper: Any):
        super().__init__()
        self.embed = full.embed
        self.norm = full.norm
        self.head = full.head
        self.layers = nn.ModuleList(ParallelBlock(layer, group) for layer in full.layers)
        self.keeper = keeper

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = recompute(layer, x, self.keeper)
        return self.head(self.norm(x))


# ------------------------------------------------------------------------------ the configurations C1 to C5, by formula


@dataclass(frozen=True)
class Configuration:
    """A row of the paper's table 3; C_B and M_D are part of each."""

    stage: int
    partitioned: bool = False
    offloaded: bool = False

    def states(self, parameters: float, tensor: int, data: int) -> float:
        """Bytes of weights, gradients and optimizer states on each of `tensor` times `data` ranks."""
        return parameters / tensor * bytes_per_parameter(self.stage, data)

    def checkpoints(self, layers: int, message: int, tensor: int) -> float:
        """Bytes of 16-bit checkpoints on the device, for B S H = `message`."""
        # --- exercise 3.43: what do P_a and P_a+cpu leave on the device? ---
        if self.offloaded:
            return 0.0
        return 2.0 * layers * message / (tensor if self.partitioned else 1)
        # --- end exercise ---


CONFIGURATIONS = {
    "C1": Configuration(1),
    "C2": Configuration(1, partitioned=True),
    "C3": Configuration(2),
    "C4": Configuration(2, partitioned=True),
    "C5": Configuration(2, partitioned=True, offloaded=True),
}


def configuration_table(hidden: int, batch: int, sequence: int, tensor: int, data: int, memory: float) -> list[str]:
    """C1 to C5: bytes per rank of a 100-layer model, and the size of the deepest model in `memory` bytes."""
    rows: dict[str, list[str]] = {}
    for name, c in CONFIGURATIONS.items():
        layers = 100
        per_layer = 12 * hidden**2
        message = batch * sequence * hidden
        states = c.states(layers * per_layer, tensor, data)
        kept = c.checkpoints(layers, message, tensor)
        deepest = int(memory // (c.states(per_layer, tensor, data) + c.checkpoints(1, message, tensor)))
        parts = f"P_os{'+g' * (c.stage == 2)}{' P_a' * c.partitioned}{'+cpu' * c.offloaded}"
        rows[f"{name}  {parts}"] = [
            *(f"{value / GB:.2f}" for value in (states, kept, states + kept)),
            f"{deepest * per_layer / 1e9:.0f}B",
        ]
    title = (
        f"GB per rank: 100 layers of H = {hidden}, batch {batch}, sequence {sequence}, {tensor} tensor-parallel x "
        f"{data} data-parallel ranks; and the largest model of such layers in {memory / GB:g} GB"
    )
    return table(title, ("states", "checkpoints", "sum", "largest"), rows)


# ------------------------------------------------------------------------------------------------------------- demo


def constant_buffer_rows(group: dist.ProcessGroup, device: torch.device) -> list[Row]:
    """Both versions of the reduction give the same sums; one needs only a constant buffer."""
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
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


def buffer_rows(group: dist.ProcessGroup, device: torch.device) -> list[Row]:
    """C_B against one large message; the heap of a step without and with M_D; a device between the two."""
    rows = constant_buffer_rows(group, device)
    plain, _ = recorded_step(False)
    moved, arenas = recorded_step(True)
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
    found = "fits" if failed == "fits" else "out"
    rows.append((f"a device of {device_size:,} bytes, without M_D", "out", found, found == "out"))
    if dist.get_rank(group) == 0:
        print(f"without M_D on a device of {device_size:,} bytes: {failed}")
        print("with M_D on the same device: the step runs")
        for moving in (False, True) if device.type == "cuda" else ():
            print(f"caching allocator, {'with' if moving else 'without'} M_D: {on_gpu(moving, device)}")
    return rows


def run_once(keeper: Any, group: dist.ProcessGroup, device: torch.device) -> tuple[float, int, float]:
    """One step next to the unsharded model: (largest error, bytes that layers save, bytes sent)."""
    torch.manual_seed(0)
    reference = Decoder(heads=HEADS).to(device, torch.float64)
    torch.manual_seed(0)
    model = ParallelDecoder(Decoder(heads=HEADS).to(device, torch.float64), group, keeper)
    tokens, labels = (t.to(device) for t in make_batch(0, 1, 1, rows=2)[0][0])
    want = token_loss_sum(reference, tokens, labels)
    want.backward()
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with WireCounter(group) as wire:
        x = model.embed(tokens)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for layer in model.layers:
                x = recompute(layer, x, keeper)
        kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
        saved.clear()
        loss = token_loss_sum(lambda _: model.head(model.norm(x)), tokens, labels)  # type: ignore[arg-type]
        loss.backward()
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    errors = [error(loss.detach(), want.detach()), error(model.embed.weight.grad, reference.embed.weight.grad)]
    for mine, full in zip(model.layers, reference.layers, strict=True):
        for name, whole in full.named_children():
            part = my_part(name, whole.weight.grad, HEADS, rank, ranks)
            errors.append(error(mine.get_parameter(name).grad, part))
    return worst_of(errors), kept, wire.bytes


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--table", action="store_true", help="print the configurations C1 to C5 and stop")
    args = parser.parse_checked()
    if args.table:
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(configuration_table(8192, 16, 1024, 16, 8, 32 * GB)))
            print("PASS")
        return
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if HEADS % ranks:
        parser.error(f"--nproc_per_node {ranks} does not divide {HEADS} attention heads; use 1, 2, 3, 4, 6 or 12")
    rows: list[Row] = []
    with world() as (group, device):
        layers = 3  # of the demo
        message = 2 * 24 * 48 * 8  # bytes of x [B, S, H] in float64
        piece = -(-message // 8 // ranks) * 8
        traffic = 12 * layers * message * (ranks - 1) / ranks
        extra = layers * message * (ranks - 1) / ranks
        arena = Arena(layers * piece // 8, torch.float64, device)
        offloaded = Offloaded(group, layers, piece // 8, torch.float64, device)
        for name, keeper, keeps, sends in (
            ("replicated", Replicated(), layers * message, traffic),
            ("P_a", Partitioned(group), layers * piece, traffic + extra),
            ("P_a and M_D", Partitioned(group, arena), layers * piece, traffic + extra),
            ("P_a+cpu", offloaded, 0, traffic + extra),
        ):
            worst, kept, sent = run_once(keeper, group, device)
            rows += [
                (f"{name}: largest error (float64)", "<= 1e-10", f"{worst:.1e}", worst <= 1e-10),
                (f"{name}: bytes kept of {layers} layers", keeps, kept, keeps == kept),
                (f"{name}: bytes sent (payload x formula)", f"{sends:.0f}", f"{sent:.0f}", abs(sends - sent) < 1e-6),
            ]
        held = offloaded.host.nbytes
        rows.append(("P_a+cpu: bytes in host memory", layers * piece, held, held == layers * piece))
        if ranks > 1:
            rows.append(("P_a: traffic added", "1/12 < 10 %", f"{extra / traffic:.2%}", extra < 0.1 * traffic))
        if dist.get_rank(group) == 0:
            print(f"activation checkpoints on {ranks} {device.type} rank(s)")
        rows += buffer_rows(group, device)
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
