"""FPDT I: tensors on device and host, the link between them, and three streams in the right order.

Problem. Keys and values of a million tokens do not fit into GPU memory. The host has several times as much,
behind a link that is fifty times slower. So store them there in chunks, and copy each chunk to the device
when it is needed. If every chunk is first fetched and then used, the GPU waits most of the time.

Idea. Copies and computation run on different engines. Give each its own stream (a queue of work), and use two
sets of buffers on the device: while the computation reads one, the next chunk is copied to the other.

    compute    | use A: chunk 0  | use B: chunk 1  | use A: chunk 2  |
    fetch      | B <- chunk 1    | A <- chunk 2    | B <- chunk 3    |        host -> device
    offload      earlier results, no longer needed on the device              device -> host

Streams are not ordered among each other. Required orders are set with events: `wait(stream, event)` blocks a
stream until another one has reached the event. Four waits are needed; without any one of them the program is
usually right, but not always:
    1. offload waits for the computation of what it sends            or it stores old data
    2. fetch waits until its chunk has been stored                   Megatron-LM #7398
    3. the computation waits until the fetch has arrived             or it reads the previous chunk
    4. a buffer is overwritten after its last read                   torchtune #1867
On a CPU everything runs in program order. So `CpuMachine` tracks the orders that a GPU *could* run.
Each stream has a vector clock (Mattern 1988) that says how far each other stream must have come. Two accesses
to a buffer, one of them a write, without an order by events raise `Race`, every time. The same program then
runs on `CudaMachine`, with CUDA's streams, events and pinned memory.

Double buffering stores 2 chunks instead of u, 2/u of the memory, and copies no more bytes (2408.16978, 4.2).

Run it:
    python fpdt_store.py                                 double buffering, counted, on CPU or GPU
    python fpdt_store.py --version single                one buffer: the fetch cannot start before the use has ended
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

import argparse
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

STREAMS = ("compute", "fetch", "offload")
MOST_CHUNKS = 2048  # of a demo

# ----------------------------------------------------------------------------------------------- machines: CPU and CUDA


class Race(RuntimeError):
    """Two streams access a buffer, one of them writes, and their order is not defined."""


@dataclass
class Op:
    """A piece of work on a stream. It may start once `after[stream]` pieces of each stream are done."""

    stream: str
    name: str
    amount: float  # bytes of a copy; of a computation e.g. (query, key) pairs
    after: dict[str, int]


@dataclass(eq=False)
class Buffer:
    """Memory on the host or the device, with the events that guard it."""

    data: Tensor
    written: Any = None  # an event after which the data is complete
    readers: list[Any] = field(default_factory=list)  # events after which it may be overwritten
    touched: dict[tuple[str, bool], tuple[int, str]] = field(default_factory=dict)  # (stream, wrote) -> last tick, name


class CpuMachine:
    """Runs everything in program order, and tracks which operations could run in another one.

    record    log every operation in `ops`, for simulations; off in training, to save memory
    """

    def __init__(self, record: bool = False) -> None:
        self.recording = record
        self.ops = list[Op]()
        self.clock = {stream: dict.fromkeys(STREAMS, 0) for stream in STREAMS}  # by stream, what it knows
        self.slots = weakref.WeakValueDictionary[int, Buffer]()  # buffers filled by fetches, by storage
        self.announced: set[int] = set()  # storages that the computation has announced

    def record(self, stream: str) -> dict[str, int]:
        """An event: all work given to the stream so far, and all that this work waited for."""
        return dict(self.clock[stream])

    def wait(self, stream: str, event: dict[str, int]) -> None:
        """All work given to the stream from now on starts after the event."""
        mine = self.clock[stream]
        for other, tick in event.items():
            mine[other] = max(mine[other], tick)

    def launch(
        self, stream: str, name: str, amount: float, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        clock = self.clock[stream]
        if self.recording:
            self.ops.append(Op(stream, name, amount, dict(clock)))
        for buffer, write in [(b, False) for b in reads] + [(b, True) for b in writes]:
            for (other, wrote), (tick, what) in buffer.touched.items():
                if (write or wrote) and clock[other] < tick:
                    doing = "overwrites" if write else "reads"
                    raise Race(f"{name} ({stream}) {doing} a buffer without waiting for: {what} ({other})")
        clock[stream] += 1
        if stream == "compute":
            self.announced = {buffer.data.untyped_storage()._cdata for buffer in (*reads, *writes)}
        for buffer, write in [(b, False) for b in reads] + [(b, True) for b in writes]:
            buffer.touched[stream, write] = (clock[stream], name)

    def copy(self, stream: str, to: Buffer, source: Buffer) -> None:
        self.launch(stream, stream, source.data.nbytes, reads=[source], writes=[to])
        if stream == "fetch":
            self.slots[to.data.untyped_storage()._cdata] = to
        with _disable_current_modes():  # not an operator of the computation
            to.data.copy_(source.data)

    def host_empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():  # meters of operators count device memory only
            return torch.empty(shape, dtype=dtype)


class CudaMachine:
    """The same calls, on CUDA's streams. The computation is on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = {stream: torch.cuda.Stream(device) for stream in STREAMS[1:]}

    def _stream(self, stream: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if stream == "compute" else self.streams[stream]

    def record(self, stream: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: str, event: torch.cuda.Event) -> None:
        self._stream(stream).wait_event(event)

    def launch(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to track: the GPU itself shows whether the waits are right."""

    def copy(self, stream: str, to: Buffer, source: Buffer) -> None:
        with torch.cuda.stream(self.streams[stream]):
            to.data.copy_(source.data, non_blocking=True)
        for side in (to.data, source.data):
            if side.is_cuda:  # when freed, not reused before this copy ends
                side.record_stream(self.streams[stream])

    def host_empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        try:  # asynchronous copies need pages that the system does not move
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            size = shape.numel() * dtype.itemsize
            raise MemoryError(f"no pinned memory for {size:,} bytes ({str(error).splitlines()[0]}); "
                              "raise `ulimit -l` or use fewer tokens") from error  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the store


class Store:
    """Moves tensors between device and host, counts the bytes, and reuses its host buffers.

    machine      CpuMachine or CudaMachine
    host_limit   bytes of host memory that may be used; None for no limit
    """

    def __init__(self, machine: CpuMachine | CudaMachine, host_limit: int | None = None) -> None:
        self.machine, self.host_limit = machine, host_limit
        self.offloaded = self.fetched = 0  # bytes over the link, each way
        self.host_bytes = self.host_peak = 0  # bytes in use on the host
        self.allocated = 0  # bytes of all host buffers, in use or free for reuse
        self.pool: dict[tuple[torch.Size, torch.dtype], list[Buffer]] = {}

    def compute(
        self, name: str, amount: float = 0, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Announce the next computation and its buffers."""
        self.machine.launch("compute", name, amount, reads, writes)

    def made(self, tensor: Tensor) -> Buffer:
        """The buffer of a device tensor that the computation has just written or allocated."""
        buffer = Buffer(tensor)
        if isinstance(self.machine, CpuMachine):
            buffer.touched["compute", True] = (self.machine.clock["compute"]["compute"], "its computation")
        return buffer

    def device_empty(self, like: Buffer, device: torch.device) -> Buffer:
        """A buffer on the device. An unfinished computation may still read its memory, so wait for that."""
        buffer = self.made(torch.empty_like(like.data, device=device))
        buffer.readers = [self.machine.record("compute")]
        return buffer

    def host_empty(self, shape: torch.Size, dtype: torch.dtype) -> Buffer:
        """A host buffer, a free one if one fits."""
        size = shape.numel() * dtype.itemsize
        waiting = self.pool.get((shape, dtype))
        if not waiting:
            if self.host_limit is not None and self.allocated + size > self.host_limit:
                self.pool.clear()  # of other shapes, from batches of another length
                self.allocated = self.host_bytes
            if self.host_limit is not None and self.allocated + size > self.host_limit:
                raise MemoryError(f"the host store would need {self.allocated + size:,} of {self.host_limit:,} bytes")
            self.allocated += size
        self.host_bytes += size
        self.host_peak = max(self.host_peak, self.host_bytes)
        return waiting.pop(0) if waiting else Buffer(self.machine.host_empty(shape, dtype))

    def drop(self, host: Buffer) -> None:
        """Return a host buffer to the pool. Its next user waits for fetches that may still read it."""
        self.host_bytes -= host.data.nbytes
        self.pool.setdefault((host.data.shape, host.data.dtype), []).append(host)

    def offload(self, source: Tensor | Buffer, into: Buffer | None = None) -> Buffer:
        """Start a copy to the host; returns the host buffer at once. `source` must not be written before it
        is done. A slot's `readers` ensure this; a plain tensor must not be written again."""
        source = self.made(source) if isinstance(source, Tensor) else source
        host = into or self.host_empty(source.data.shape, source.data.dtype)
        # --- exercise 8.21: what does the offload stream wait for, and who must wait for the offload? ---
        for event in (self.machine.record("compute"), *host.readers):
            self.machine.wait("offload", event)
        self.machine.copy("offload", host, source)
        host.written = self.machine.record("offload")
        host.readers = []
        source.readers.append(host.written)
        # --- end exercise ---
        self.offloaded += host.data.nbytes
        return host

    def fetch(self, host: Buffer, slot: Buffer) -> None:
        """Start a copy to a buffer on the device."""
        # --- exercise 8.22: the same for the way back ---
        for event in (host.written, *slot.readers):
            self.machine.wait("fetch", event)
        self.machine.copy("fetch", slot, host)
        slot.written = self.machine.record("fetch")
        slot.readers = []
        host.readers = [slot.written]
        # --- end exercise ---
        self.fetched += host.data.nbytes

    def use(self, slot: Buffer) -> Tensor:
        """The computation waits for the fetch into this slot."""
        self.machine.wait("compute", slot.written)
        return slot.data

    def done(self, slot: Buffer) -> None:
        """The computation no longer needs the slot."""
        slot.readers.append(self.machine.record("compute"))


class Guard:
    """Returns host buffers when its owner is freed: a forward with a discarded result has no backward."""

    def __init__(self, store: Store, buffers: Sequence[Buffer]) -> None:
        self.finalizer = weakref.finalize(self, self.drop, store, buffers)
        self.finalizer.atexit = False

    @staticmethod
    def drop(store: Store, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            store.drop(buffer)

    def release(self) -> None:
        """Call in backward, which returns the buffers itself."""
        self.finalizer.detach()


class Prefetch:
    """Copies the host buffers `lookup(key)` to slots on the device, for one key after the other.

    With two sets of slots, the buffers of the next key are in flight while the caller computes with these:

        for key in keys:
            slots = prefetch.take()
            ...                            compute with slots
            prefetch.done()

    `lookup` is called `sets` keys ahead. A key may lack the last of the buffers that others have.
    """

    def __init__(
        self,
        store: Store,
        keys: Sequence[Any],
        lookup: Callable[[Any], Sequence[Buffer]],
        device: torch.device,
        sets: int = 2,
    ) -> None:
        self.store = store
        self.keys = keys
        self.lookup = lookup
        self.device = device
        self.sets: list[list[Buffer]] = [[] for _ in range(sets)]
        self.turn = 0
        self.lengths = [0] * sets

    def fetch(self, n: int) -> None:
        """Start to fetch the buffers of key n, if it exists, to set n mod the number of sets."""
        if n >= len(self.keys):
            return
        hosts = self.lookup(self.keys[n])
        slots = self.sets[n % len(self.sets)]
        for host in hosts[len(slots) :]:  # allocated at first use, then kept
            slots.append(self.store.device_empty(host, self.device))
        for host, slot in zip(hosts, slots, strict=False):
            self.store.fetch(host, slot)
        self.lengths[n % len(self.sets)] = len(hosts)

    def take(self) -> list[Buffer]:
        """The slots of the next key; the computation waits until they are filled."""
        if self.turn == 0:
            for n in range(len(self.sets)):
                self.fetch(n)
        which = self.turn % len(self.sets)
        slots = self.sets[which][: self.lengths[which]]
        for slot in slots:
            self.store.use(slot)
        return slots

    def done(self) -> None:
        """The computation no longer needs these slots: refill them."""
        which = self.turn % len(self.sets)
        # --- exercise 8.23: the second buffer ---
        for slot in self.sets[which][: self.lengths[which]]:
            self.store.done(slot)
        self.fetch(self.turn + len(self.sets))
        # --- end exercise ---
        self.turn += 1


# ------------------------------------------------------------------------------- what the computation really touches


class Watch(TorchDispatchMode):
    """Records what the computation really reads and writes, whatever `Store.compute` announced.

    Inside, every operator that accesses a slot's memory is an operation of the compute stream: a `Race` if no
    event says that the slot is filled. A fetch that does not wait for it is also a `Race`. `undeclared` has
    the operators that accessed buffers not named by the last `Store.compute`. For tests, because it is slow.
    """

    def __init__(self, machine: CpuMachine) -> None:
        super().__init__()
        self.machine = machine
        self.undeclared = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = {t.untyped_storage()._cdata for t in tree_leaves(out) if isinstance(t, Tensor)}
        changes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        for at in {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}:
            slot = self.machine.slots.get(at)
            view = at in made and not changes
            if slot is None or view or "_like" in str(func) or "new_" in str(func):  # or only its shape
                continue
            announced = self.machine.announced
            if at not in announced:
                self.undeclared.add(str(func))
            self.machine.launch("compute", str(func), 0, [slot], [slot] if changes and at in made else [])
            self.machine.announced = announced
        return out


# ------------------------------------------------------------------------------------------------------ bytes, in time


class DeviceMemory(TorchDispatchMode):
    """Bytes of tensors made inside the block, now and at most, without the host store. With a `limit` it
    emulates a device of that size: the operator that exceeds it raises MemoryError."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.current = 0
        self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (at := tensor.untyped_storage()._cdata) not in given | self.sizes.keys():
                self.sizes[at] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self._freed, at).atexit = False
                self.current += self.sizes[at]
                self.peak = max(self.peak, self.current)
                if self.limit is not None and self.current > self.limit:
                    raise MemoryError(f"{func} needs {self.current:,} of {self.limit:,} bytes of the device")
        return out

    def _freed(self, at: int) -> None:
        self.current -= self.sizes.pop(at)


# --------------------------------------------------------------------------------------------------------------- demo


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)


def machine_for(device: torch.device, record: bool = False) -> CpuMachine | CudaMachine:
    return CudaMachine(device) if device.type == "cuda" else CpuMachine(record)


def available_host_memory() -> int:
    """Bytes available now; or HOST_MEMORY, in GiB, from the environment, for a virtual machine that gets its
    memory on demand."""
    if "HOST_MEMORY" in os.environ:
        return int(float(os.environ["HOST_MEMORY"]) * 2**30)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    except (OSError, StopIteration):  # not Linux: all, free or not
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_chunks(u: int) -> None:
    """ValueError for more chunks than a demo, which runs all pairs one by one, can handle."""
    if u > MOST_CHUNKS:
        raise ValueError(f"{u} chunks are {u * (u + 1) // 2:,} pairs, one after the other; use {MOST_CHUNKS} or fewer")


def check_host(needed: int) -> None:
    """ValueError if the host cannot hold `needed` bytes. Call before anything starts."""
    if needed > (free := available_host_memory()):
        raise ValueError(
            f"the chunks on the host need {needed:,} bytes and {free:,} are free; use fewer tokens or layers"
        )


def demo(args: argparse.Namespace, device: torch.device) -> list[str]:
    """Store u chunks, then sum over all pairs (i, j <= i) of them, like attention."""
    u = args.chunks
    sets = {"single": 1, "double": 2}[args.version]
    machine = machine_for(device, record=True)
    store = Store(machine)
    chunks = [torch.full((args.elements,), float(i + 1), dtype=torch.float64, device=device) for i in range(u)]
    want = sum((i + 1) * (j + 1) for i in range(u) for j in range(i + 1)) * float(args.elements)
    hosts = []
    for chunk in chunks:
        store.compute("make")
        hosts.append(store.offload(chunk))
    total = torch.zeros((), dtype=torch.float64, device=device)
    pairs = [(i, j) for i in range(u) for j in range(i + 1)]
    memory = DeviceMemory()
    with memory:
        prefetch = Prefetch(store, pairs, lambda ij: [hosts[ij[1]]], device, sets)
        for i, _ in pairs:
            [slot] = prefetch.take()
            store.compute("use", 1, reads=[slot])
            total += torch.dot(chunks[i], slot.data)
            prefetch.done()
    size = chunks[0].nbytes
    rows = [
        ("sum over all pairs", want, total.item()),
        ("bytes device -> host", u * size, store.offloaded),
        ("bytes host -> device", u * (u + 1) // 2 * size, store.fetched),
        ("bytes on the host", u * size, store.host_peak),
    ]
    if isinstance(machine, CpuMachine):
        # A fetch that has to wait for the last use cannot run beside it.
        fetches = [op for op in machine.ops if op.stream == "fetch"]
        beside = sum(op.after["compute"] < u + n for n, op in enumerate(fetches) if n)
        rows.append(("fetches beside a computation", (len(pairs) - 1) * (sets - 1), beside))
        slots = min(sets, len(pairs)) * size
        rows.append(("bytes on the device at most: buffers and a product", slots + 8, memory.peak))
    if os.environ.get("RANK", "0") != "0":  # every rank does the same, without communication
        return [name for name, predicted, got in rows if predicted != got]
    print(f"{args.version} buffering, {u} chunks of {size:,} bytes on {device.type}")
    print(f"{'':56}{'predicted':>14}{'measured':>14}")
    for name, predicted, measured in rows:
        print(f"{name:56}{predicted:14,.0f}{measured:14,.0f}")
    return [f"{name}: predicted {predicted:,}, measured {got:,}" for name, predicted, got in rows if predicted != got]


def main() -> int:
    parser = OneLineParser(description="Chunks on the host, double buffers on the device.", allow_abbrev=False)
    parser.add_argument("--version", choices=["single", "double"], default="double")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--elements", type=int, default=4096, help="of a chunk; default %(default)s")
    args = parser.parse_args()
    for option in ("chunks", "elements"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} {getattr(args, option)} is too few; use 1 or more")
    try:
        check_chunks(args.chunks)
        check_host(8 * args.chunks * args.elements)
    except ValueError as error:
        parser.error(f"--chunks {args.chunks} of --elements {args.elements}: {error}")
    wrong = demo(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if os.environ.get("RANK", "0") == "0":
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
