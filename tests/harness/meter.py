"""Count bytes: what a rank holds, what autograd saves, the peak, and what every collective sends.

All counts are exact and come from what torch really does, not from what the code under test reports:

- held:  the storages behind parameters, gradients and optimizer states. A storage is counted once for all its
         views, and completely, since a small view keeps a large buffer alive.
- saved: the storages that autograd packs for backward (torch.autograd.graph.saved_tensors_hooks).
- peak:  a dispatch mode sees every tensor that any operator returns; a finalizer on its storage sees it freed.
- sent:  a dispatch mode over torch's communication operators, also of C++ callers such as DDP's reducer.

A collective is one call into a library, so what it *sends* is the cost of its bandwidth-optimal algorithm for
its bytes (`bytes_on_the_wire`); send and receive are counted directly. tests/test_meter.py compares the
all-reduce formula with the operating system's count of bytes on the loopback interface. (Gloo's
reduce-scatter is an all-reduce inside, and really sends twice its formula; NCCL's is a reduce-scatter.)
"""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # a dispatch mode imports it; imported while a group is up, it would keep that group alive
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ------------------------------------------------------------------------------------------------------- held


@dataclass(frozen=True)
class Held:
    """Bytes that stay on this rank between two steps."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The tensor's storage on this rank. (A DTensor has the shape of the full tensor, and stores a shard.)"""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    storages = [storage_of(t) for t in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def held_bytes(model: nn.Module | Iterable[Tensor], optimizer: torch.optim.Optimizer | None = None) -> Held:
    """Bytes of the parameters of `model` (or of the given parameters), their gradients and the optimizer's tensors.

    The optimizer's zero-dimensional tensors (Adam's step counters) are left out: they are 4 bytes per
    parameter tensor, which no formula includes.
    """
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    states = [] if optimizer is None else tree_leaves([list(s.values()) for s in optimizer.state.values()])
    return Held(
        parameters=storage_bytes(parameters),
        gradients=storage_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer=storage_bytes(s for s in states if isinstance(s, Tensor) and s.dim() > 0),
    )


# ------------------------------------------------------------------------------------------------------ saved


@dataclass
class Saved:
    """Bytes saved for backward. `storages` maps each saved storage to its size; one is counted once."""

    storages: dict[StorageWeakRef, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())


@contextmanager
def saved_activations(exclude: Iterable[Tensor] = ()) -> Iterator[Saved]:
    """Record what autograd saves inside the block, leaving out the storages of `exclude` (usually the parameters)."""
    saved = Saved()
    excluded = {StorageWeakRef(storage_of(t)) for t in exclude}

    def pack(tensor: Tensor) -> Tensor:
        storage = storage_of(tensor)
        ref = StorageWeakRef(storage)
        if ref not in excluded:
            saved.storages[ref] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


# ------------------------------------------------------------------------------------------------------- peak


def _until_gloo_has_let_go(seconds: float = 2.0) -> None:
    """Wait until no thread of Gloo is between the end of a message and the release of its tensor.

    `wait()` returns as soon as the message is complete; the thread that sent it drops its reference when it
    next runs, perhaps milliseconds later. It has done so when seen asleep twice, with time to run between.
    """
    if not dist.is_initialized():
        return
    deadline, asleep = time.monotonic() + seconds, 0
    while asleep < 2 and time.monotonic() < deadline:
        asleep += 1
        for thread in Path("/proc/self/task").glob("*/stat"):  # does not exist on a Mac
            try:
                name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                continue
            if name.startswith("pt_gloo") and rest.split()[0] != "S":
                asleep = 0
        time.sleep(0.0002)


class peak_memory(TorchDispatchMode):
    """Bytes of tensors that were allocated inside the block: `current`, and their maximum `peak`.

    Tensors from before the block count only if they grow in it. Scratch space that an operator allocates and frees
    inside itself is not seen. What only a thread of Gloo still holds of a finished message is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._current = 0
        self._communicated = self._unsettled = False  # ever, and since Gloo last released all tensors
        self._lock = threading.RLock()  # a thread of Gloo may free a tensor during a count
        self._sizes: dict[StorageWeakRef, int] = {}

    @property
    def current(self) -> int:
        if self._communicated:
            self._settle()
        return self._current

    def _settle(self) -> None:
        _until_gloo_has_let_go()
        self._unsettled = False

    def _watch(self, storage: torch.UntypedStorage) -> None:
        ref = StorageWeakRef(storage)  # unlike an address, it is never reused while we hold it
        with self._lock:
            if ref not in self._sizes:
                self._sizes[ref] = 0
                weakref.finalize(storage, self._freed, ref).atexit = False
            size = storage.nbytes()
            grown, self._sizes[ref] = size - self._sizes[ref], size
            self._current += grown
        if self._current > self.peak and self._unsettled:
            self._settle()
        self.peak = max(self.peak, self._current)

    def _freed(self, ref: StorageWeakRef) -> None:
        with self._lock:
            size = self._sizes.pop(ref)
            self._current -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # let it run first: its operators on this rank's tensors are seen then
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._communicated = self._unsettled = True
        if func is torch.ops.aten.lift_fresh.default:  # tensors of torch.tensor([...]) are first seen here
            given = set()
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.device.type == "meta":  # shapes without memory; torch also uses them to infer shapes
                continue
            # An output in an input's storage (a view, an in-place result) is no allocation, unless it grew.
            if storage._cdata not in given or StorageWeakRef(storage) in self._sizes:
                self._watch(storage)
        return out

    def __enter__(self) -> "peak_memory":
        # FSDP frees and regrows parameters by resizing their storages, which is not an operator.
        self._plain_resize = torch.UntypedStorage.resize_
        plain, watch = self._plain_resize, self._watch

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            watch(storage)
            return result

        # The end of a message is not an operator either.
        self._plain_wait = plain_wait = dist.Work.wait

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            result = plain_wait(work, *args, **kwargs)
            self._unsettled = True
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._plain_resize  # type: ignore[method-assign]
        dist.Work.wait = self._plain_wait  # type: ignore[method-assign]
        return super().__exit__(*error)


# ------------------------------------------------------------------------------------------------------- sent


def bytes_on_the_wire(name: str, payload: int, size: int, rank: int = 0, root: int = 0, own: int = 0) -> int | float:
    """Bytes that `rank` of `size` sends in one collective by its bandwidth-optimal algorithm.

    `payload` is the full tensor: what an all-reduce or broadcast is given, what an all-gather returns, what a
    reduce-scatter or all-to-all gets. `own` is the part of an all-to-all that stays on the rank. Rings:
    Patarasuk & Yuan 2009; broadcast and reduce send the message along a line that starts or ends at root.
    """
    if size == 1:
        return 0
    distance = (rank - root) % size  # distance from the root, along the line
    sent = {
        "all_reduce": 2 * (size - 1) * payload,
        "all_gather": (size - 1) * payload,
        "reduce_scatter": (size - 1) * payload,
        "all_to_all": size * (payload - own),
        "broadcast": size * payload if distance < size - 1 else 0,
        "reduce": size * payload if distance > 0 else 0,
        "scatter": (size - 1) * payload if distance == 0 else 0,
        "gather": payload if distance > 0 else 0,
        "send": size * payload,
        "recv": 0,
        "barrier": 0,
    }[name]
    return sent // size if sent % size == 0 else sent / size


def loopback_bytes() -> int:
    """Bytes that the loopback interface has received so far, headers of TCP and IP included (Linux only)."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


# operator -> (collective, index of the argument that holds the payload, whether that is one rank's part of it)
_OPERATORS = {
    "c10d::allreduce_": ("all_reduce", 0, False),
    "c10d::allreduce_coalesced_": ("all_reduce", 0, False),
    "c10d::broadcast_": ("broadcast", 0, False),
    "c10d::reduce_": ("reduce", 0, False),
    "c10d::_allgather_base_": ("all_gather", 0, False),
    "c10d::allgather_": ("all_gather", 0, False),
    "c10d::allgather_coalesced_": ("all_gather", 0, False),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0, False),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, False),
    "c10d::reduce_scatter_": ("reduce_scatter", 1, False),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, False),
    "c10d::alltoall_base_": ("all_to_all", 1, False),
    "c10d::alltoall_": ("all_to_all", 1, False),
    "c10d::gather_": ("gather", 1, True),
    "c10d::scatter_": ("scatter", 0, True),
    "c10d::send": ("send", 0, False),
    "c10d::recv_": ("recv", 0, False),
    "c10d::recv_any_source_": ("recv", 0, False),
    "c10d::barrier": ("barrier", 0, False),
    "_c10d_functional::all_reduce": ("all_reduce", 0, False),
    "_c10d_functional::all_reduce_": ("all_reduce", 0, False),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0, False),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", 0, False),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0, True),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", 0, True),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0, True),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, False),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0, False),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0, False),
    "_c10d_functional::broadcast": ("broadcast", 0, False),
    "_c10d_functional::broadcast_": ("broadcast", 0, False),
}
_NOT_COMMUNICATION = {
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "c10d::monitored_barrier_",
}


class communication(TorchDispatchMode):
    """Per collective, of this rank: `calls`, `payload` bytes handed over, `sent` bytes on the wire; `events` in order.

    An event is (collective, payload bytes, ranks in its group). An unknown communication operator raises
    NotImplementedError, because counting it as zero would be wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.events: list[tuple[str, int, int]] = []

    @property
    def total(self) -> int | float:
        """Bytes this rank sends, over all collectives."""
        return sum(self.sent.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # as above
        operator = func.name().partition(".")[0]
        namespace = operator.partition("::")[0]
        if namespace in ("c10d", "_c10d_functional") and operator not in _NOT_COMMUNICATION:
            self._count(operator, func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, func: Any, args: Any) -> None:
        if operator not in _OPERATORS:
            raise NotImplementedError(f"the meter does not know how many bytes {operator} sends")
        name, payload_at, per_rank = _OPERATORS[operator]
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        group = _group(given)
        size, rank, root = group.size(), group.rank(), given.get("root_rank", given.get("src", 0))
        payload = sum(t.numel() * t.element_size() for t in tree_leaves(args[payload_at]) if isinstance(t, Tensor))
        if name == "barrier":
            payload = 0
        if per_rank:
            payload *= size
        own = _own_part(given, payload, size, rank) if name == "all_to_all" else 0
        self.calls[name] += 1
        self.payload[name] += payload
        self.sent[name] += bytes_on_the_wire(name, payload, size, rank, root, own)  # type: ignore[assignment]
        self.events.append((name, payload, size))


def _group(given: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    group = given["group_name"]
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group


def _own_part(given: dict[str, Any], payload: int, size: int, rank: int) -> int:
    """Bytes of an all-to-all's input that are for this rank itself."""
    if "input_tensors" in given:
        tensor = given["input_tensors"][rank]
        return tensor.numel() * tensor.element_size()
    splits = given.get("input_split_sizes")
    return payload * splits[rank] // sum(splits) if splits and sum(splits) else payload // size
