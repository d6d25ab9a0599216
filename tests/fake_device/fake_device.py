"""A GPU that is not there: CPU tensors that say they are on one, and refuse what CUDA and nccl refuse.

    FAKE_GPUS=1 PYTHONPATH=tests/fake_device python any_script.py

A program that is only ever run on a CPU has mistakes that no CPU shows. Here the same program runs with one device
more. Its tensors are ordinary CPU tensors, so that all numbers are right; each storage has a note of where it is said
to be, which every operator hands on to what it returns. With the notes, these are refused as on a real GPU:

    two devices in one operator           "Expected all tensors to be on the same device"; a host scalar is allowed
    a host tensor in a collective of nccl "No backend type associated with device type cpu"; nor has it 16-bit integers
    a device tensor sent over gloo        gloo sends from host memory only
    .numpy() and np.asarray               numpy reads host memory only
    a generator of the other device       torch.rand(..., generator=g, device=d)
    products of integers, .is_pinned()    CUDA has no kernel for them; memory is pinned only if it was asked for
    reading too early                     the host reads a tensor that a non-blocking copy may still be writing; a
                                          stream reads what another one writes, and no event or synchronisation orders
                                          the two; elapsed_time of an event that nobody waited for
    giving away too early                 memory is freed while a stream may still use it, other than that which it was
                                          allocated in, and neither record_stream nor a wait says so
    the bits of a CPU's division          CUDA's tensor / number multiplies by the reciprocal, and Triton's `/` of fp32
                                          is div.full.f32, right to 2 units in the last place: here they are, too; and
                                          where allow_tf32 is set, products of fp32 have factors of 10 bits

Order in time is kept by vector clocks: a stream knows how far each other stream was when it last waited for it, and so
does the host. What is not here: speed, memory that runs out, the order inside a collective. Triton's kernels run in its
interpreter, those in .cu files through g++.

FAKE_KIND=T4 makes it a Tesla T4, of compute capability 7.5: there no Triton kernel runs.

With TRITON_INTERPRET=0 Triton's kernels are compiled, for sm_90 and as the launch asks for it, and not run. So the
numbers are wrong; what shows is what only a compiler refuses, and tiles that need more shared memory than there is.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import os
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {"H200": ("an NVIDIA H200", (9, 0), 232448), "T4": ("a Tesla T4", (7, 5), 65536)}
KIND, CAPABILITY, SHARED = KINDS[os.environ.get("FAKE_KIND", "H200")]
NAME = f"stand-in for {KIND}"
HOST = -1
WILD = -2  # made inside torch without a word of where, for example zeros in a backward pass
_now: dict[str, Any] = {"device": 0, "count": 1, "sync": "default"}
_allocated = {"now": 0, "peak": 0}  # bytes of all GPUs
_real: dict[str, Any] = {}


class Access(NamedTuple):
    first: int  # byte
    last: int  # byte + 1
    stream: int
    piece: int  # of the stream's work
    wrote: bool


@dataclasses.dataclass
class Memory:
    """What is known of a storage."""

    place: int = HOST  # the index of its GPU, HOST or WILD
    pinned: bool = False
    nbytes: int = 0  # on a GPU
    owner: int = 0  # the stream in which it was allocated on a GPU, and is given away again
    told: set[int] = dataclasses.field(default_factory=set)  # the streams of its `record_stream`s
    accesses: list[Access] = dataclasses.field(default_factory=list)


_known: dict[int, Memory] = {}  # by storage
_nothing = Memory()
_given_away: list[str] = []  # what was freed too early; the next operator says it


def _key(t: Tensor) -> int | None:
    """The storage of an ordinary CPU tensor; None for meta, fake and sparse tensors, which are let through."""
    try:
        storage = t.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return storage._cdata if _real["device"].__get__(t).type == "cpu" else None


def _memory(t: Tensor) -> Memory:
    """What is known of the storage of `t`. Not to be changed."""
    return _known.get(_key(t), _nothing)  # type: ignore[arg-type]


def _remember(t: Tensor) -> Memory:
    """The same, to be changed: kept until the storage is freed."""
    key = _key(t)
    if key is None:
        return Memory()
    if key not in _known:
        _known[key] = Memory()
        weakref.finalize(t.untyped_storage(), _forget, key).atexit = False
    return _known[key]


def place(t: Tensor) -> int:
    """The index of its GPU, HOST or WILD."""
    return _memory(t).place


def _forget(key: int) -> None:
    memory = _known.pop(key)
    _allocated["now"] -= memory.nbytes
    owner = Stream.everyone.get(memory.owner)
    if owner is None:
        return
    for access in memory.accesses:
        done = max(owner.knows.get(access.stream, 0), _host.get(access.stream, 0))
        if access.stream not in (owner.id, *memory.told) and done < access.piece:
            _given_away.append(f"memory of stream {owner.id} was freed while stream {access.stream} may still use it")


def _note(t: Tensor, where: int) -> None:
    """From now on the storage of `t` is there."""
    if where == HOST and place(t) == HOST:
        return
    memory = _remember(t)
    memory.place = where
    nbytes = t.untyped_storage().nbytes() if where >= 0 else 0
    _allocated["now"] += nbytes - memory.nbytes
    _allocated["peak"] = max(_allocated["peak"], _allocated["now"])
    memory.nbytes = nbytes
    if where >= 0 and not memory.owner and _current:
        memory.owner = _current[0].id


def _index(device: Any) -> int | None:
    """The GPU's index of what was given as `device=`; HOST for the CPU, None for what is neither."""
    if device is None:
        return HOST
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        index = _now["device"] if device.index is None else device.index
        if not index < _now["count"]:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device}; there are {_now['count']})")
        return index
    return HOST if device.type == "cpu" else None


# -------------------------------------------------------------------------------------------------------- order in time


class Stream:
    """A queue of work. `knows[other]`: how many pieces of work of the other are done before its next one begins."""

    everyone: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()
    made = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream.made += 1
        self.id, self.cuda_stream = Stream.made, 0
        self.knows: dict[int, int] = {}
        self.device = torch.device("cuda", _now["device"] if device is None else max(_index(device) or 0, 0))
        Stream.everyone[self.id] = self

    def work(self) -> None:
        """One more piece of work, after all that the host has waited for."""
        _learn(self.knows, _host)
        self.knows[self.id] = self.knows.get(self.id, 0) + 1

    def wait_event(self, event: Event) -> None:
        _learn(self.knows, event.knows)

    def wait_stream(self, other: Stream) -> None:
        _learn(self.knows, other.knows)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _learn(_host, self.knows)

    def __enter__(self) -> Stream:
        self._before = _current[0]
        _current[0] = self
        return self

    def __exit__(self, *error: Any) -> None:
        _current[0] = self._before


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.timing, self.knows, self.at = enable_timing, {}, None
        self.knows: dict[int, int]

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or _current[0]
        stream.work()  # so that even an event on an idle stream has to be waited for
        self.knows, self.at = dict(stream.knows), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _current[0]).wait_event(self)

    def synchronize(self) -> None:
        _learn(_host, self.knows)

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if not event.timing or event.at is None:
                raise ValueError("Both events must be created with enable_timing=True, and recorded")
            if any(_host.get(stream, 0) < done for stream, done in event.knows.items()):
                raise RuntimeError("device not ready: elapsed_time of an event that nobody has waited for")
        return 1e3 * (end.at - self.at)


_host: dict[int, int] = {}
_current: list[Stream] = []


def _learn(knows: dict[int, int], others: dict[int, int]) -> None:
    for stream, done in others.items():
        if knows.get(stream, 0) < done:
            knows[stream] = done


def _span(t: Tensor) -> tuple[int, int]:
    first = t.storage_offset() * t.itemsize
    last = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return first, first + last * t.itemsize


def _ordered(t: Tensor, write: bool, knows: dict[int, int], who: str, what: str) -> None:
    """Raises if somebody writes `t`, or reads what is written here, and may not be done."""
    past = _memory(t).accesses
    if not past:
        return
    first, last = _span(t)
    for access in past:
        overlaps = access.first < last and first < access.last
        if (write or access.wrote) and overlaps and knows.get(access.stream, 0) < access.piece:
            doing, other = ("writes" if write else "reads"), ("written" if access.wrote else "read")
            may = f"what may still be {other} by stream {access.stream}"
            raise RuntimeError(f"{who} {doing} in {what} {may}: wait for it first")


def _accessed(t: Tensor, write: bool) -> None:
    stream = _current[0]
    memory = _remember(t)
    mine = Access(*_span(t), stream.id, stream.knows[stream.id], write)
    # Of one stream the last access to the same bytes stands for those before it.
    kept = [access for access in memory.accesses if access[:3] != mine[:3] or access.wrote > write]
    memory.accesses = [*kept[-200:], mine]


# ------------------------------------------------------------------------------------------------------- every operator

INTEGER_PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::dot", "aten::mv", "aten::baddbmm"}
HOST_MAY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"}
ONLY_SHAPES = {f"aten::{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")}
ONLY_SHAPES |= {f"aten::new_{kind}" for kind in ("empty", "zeros", "ones", "full", "empty_strided")}
STAYS = {"aten::set_", "aten::record_stream"}  # what they return is where it was
MOVES = {"aten::_to_copy", "aten::resize_", "aten::_resize_output_", *STAYS}


def _may_wait(name: str) -> None:
    if _now["sync"] in ("error", 2):
        raise RuntimeError(f"called a synchronizing CUDA operation ({name})")


class Device(TorchDispatchMode):
    """Sees every operator, those of a backward pass as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if _given_away:
            raise RuntimeError(f"{_given_away.pop()}: wait for it first, or tell with record_stream")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        memories = [_memory(x) for x in given]
        places = [memory.place for memory in memories]
        collective = name.startswith(("c10d::", "_c10d_functional::"))
        if collective:
            _check_collective(name, args, given, places)
        if name == "aten::copy_":
            return self.copy(func, args, kwargs, given, places)
        where = max((p for p in places if p != WILD), default=WILD)
        on_device = where >= 0
        written = _written(func, args, kwargs)
        quiet = _is_view(func) or name in ONLY_SHAPES  # reads and writes no element of what it is given
        if on_device:
            self.check(name, given, places, anywhere=collective or name in MOVES)
            _current[0].work()
        knows, who = (_current[0].knows, f"stream {_current[0].id}") if on_device else (_host, "the host")
        for x, memory in zip(given, memories, strict=True):
            if memory.accesses and not quiet:
                _ordered(x, _among(x, written), knows, who, name)
        if on_device:
            if name in WAITS or (name in HOST_MAY_INDEX and any(x.dtype == torch.bool for x in given[1:])):
                _may_wait(name)
            if name == "aten::_local_scalar_dense":
                _current[0].synchronize()
            func = STAND_INS.get(f"{name}.{func._schema.overload_name}".rstrip("."), func)
        out = func(*args, **kwargs)
        moves = name in MOVES or name.startswith("c10d::")
        if name in STAYS or (moves and not on_device):
            return out
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and not _among(x, given)]
        for x in made:
            if where != HOST and place(x) in (HOST, WILD):
                _note(x, where)
        if on_device and Stream.made > 1 and (name in ONLY_SHAPES or not quiet):
            for x in made if quiet else [*given, *made]:
                _accessed(x, _among(x, [*written, *made]))
        return out

    @staticmethod
    def check(name: str, given: list[Tensor], places: list[int], anywhere: bool) -> None:
        """Refuse what no kernel of a GPU takes."""
        there = {p for p in places if p >= 0}
        strangers = [x for x, p in zip(given, places, strict=True) if p == HOST and x.dim() and x.numel()]
        if name in HOST_MAY_INDEX:
            strangers = [x for x in strangers if x is given[0] or x.dtype not in (torch.int64, torch.bool, torch.int32)]
        if anywhere:
            strangers = []
        if strangers or len(there) > 1:
            devices = sorted({f"cuda:{p}" for p in there} | ({"cpu"} if strangers else set()), reverse=True)
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found {', '.join(devices)}")
        if name in INTEGER_PRODUCTS and not (given[0].is_floating_point() or given[0].is_complex()):
            raise RuntimeError(f'"{name.removeprefix("aten::")}_cuda" not implemented for {given[0].dtype}')

    @staticmethod
    def copy(func: Any, args: Any, kwargs: Any, given: list[Tensor], places: list[int]) -> Any:
        to, source = given
        by_device = max(places) >= 0
        asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        stream = _current[0]
        if by_device:
            stream.work()
        knows, who = (stream.knows, f"stream {stream.id}") if by_device else (_host, "the host")
        _ordered(to, True, knows, who, "a copy")
        _ordered(source, False, knows, who, "a copy")
        out = func(*args, **kwargs)
        if not by_device:
            return out
        for x, write in ((to, True), (source, False)):
            # From pageable memory the driver takes a copy of its own before the call returns.
            staged = place(x) == HOST and not write and not _memory(x).pinned
            if not staged and (Stream.made > 1 or (asynchronous and place(x) == HOST)):
                _accessed(x, write)
        if min(places) == HOST and not asynchronous:
            _may_wait("a copy")
            stream.synchronize()
        return out


@functools.cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """Place and name of the arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in _writes(func)]
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)] if values else []


def _among(x: Tensor, tensors: list[Tensor]) -> bool:
    return any(x is y for y in tensors)


@functools.cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *rest: Any, **more: Any):
    """CUDA's flash kernel by the CPU's, with the outputs of the former."""
    more.pop("return_debug_mask", None)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, dropout_p, is_causal, **more)
    none = torch.empty(0)
    return out, lse, none, none, q.shape[2], k.shape[2], none, none, none


def _flash_backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *rest, scale=None):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(dout, q, k, v, out, lse, dropout_p, is_causal, scale=scale)


def _divided(a: Any, b: Any, *rest: Any, **more: Any) -> Any:
    """By a number of the host: times its reciprocal (BinaryDivTrueKernel.cu)."""
    number = b if not isinstance(b, Tensor) else b.item() if not b.dim() and place(b) < 0 else None
    if number and isinstance(a, Tensor) and a.dtype == torch.float32 and not rest and not more:
        return torch.ops.aten.mul.Tensor(a, torch.ones(()).div(number))
    return torch.ops.aten.div.Tensor(a, b, *rest, **more)


def _rounded(product: Callable) -> Callable:
    """A product of fp32 as the tensor cores compute it where TF32 is allowed: its two factors lose 13 of 23 bits."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        if torch.backends.cuda.matmul.allow_tf32 and args[-1].dtype == torch.float32:
            args = (*args[:-2], *((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in args[-2:]))
        return product(*args, **kwargs)

    return call


def _wider(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """CUDA's product with a result in fp32, which a CPU does not have."""
    return torch.ops.aten.mm(a.to(out_dtype), b.to(out_dtype))


def _wider_sum(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **more: Any) -> Tensor:
    """The same, added to a tensor in fp32."""
    return torch.ops.aten.addmm.out(total, a.to(out_dtype), b.to(out_dtype), out=out, **more)


STAND_INS: dict[str, Callable] = {
    "aten::mm.dtype": _wider,
    "aten::addmm.dtype_out": _wider_sum,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
}
STAND_INS |= {f"aten::div.{overload}": _divided for overload in ("Tensor", "Scalar")}
STAND_INS |= {f"aten::{x}": _rounded(getattr(torch.ops.aten, x).default) for x in ("mm", "bmm", "addmm", "baddbmm")}

# ---------------------------------------------------------------------------------------------------------- collectives

_nccl: set[str] = set()  # names of the groups that were asked to use nccl


NOT_OF_NCCL = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


def _check_collective(name: str, args: Any, given: list[Tensor], places: list[int]) -> None:
    import torch.distributed as dist

    groups = [x for x in args if isinstance(x, str)]
    for x in args:
        if isinstance(x, torch.ScriptObject):
            try:
                groups.append(dist.ProcessGroup.unbox(x).group_name)
            except (RuntimeError, TypeError, AttributeError):
                continue
    nccl = any(group in _nccl for group in groups)
    if nccl and "monitored_barrier" in name:
        raise RuntimeError("monitored_barrier is for gloo only")
    if "barrier" in name or "wait_tensor" in name or "_wrap_tensor" in name:
        return
    for x in given if nccl else ():
        if x.dtype in NOT_OF_NCCL:
            raise RuntimeError(f"Input tensor data type is not supported for NCCL process group: {x.dtype}")
    if nccl and any(p == HOST for p in places):
        raise RuntimeError(f"{name}: No backend type associated with device type cpu")
    if not nccl and name in ("c10d::send", "c10d::recv_", "c10d::recv_any_source_") and any(p >= 0 for p in places):
        raise RuntimeError(f"{name}: gloo sends and receives in host memory only, not on cuda")


def _install_collectives() -> None:
    import torch.distributed.distributed_c10d as c10d

    start, new_group, backend_of = c10d.init_process_group, c10d.new_group, c10d.get_backend
    object_device = c10d._get_object_coll_device

    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        nccl = backend == "nccl" or (backend is None and device_id is not None and _index(device_id) != HOST)
        start("gloo" if nccl or backend is None else backend, *args, **kwargs)
        if nccl:
            _nccl.add(c10d.GroupMember.WORLD.group_name)

    def inherits(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        world = c10d.GroupMember.WORLD.group_name in _nccl
        nccl = str(backend).lower() == "nccl" or (backend is None and world)
        kwargs.pop("device_id", None)
        group = new_group(ranks, timeout, "gloo" if nccl else backend, *args, **kwargs)
        if nccl and group is not c10d.GroupMember.NON_GROUP_MEMBER:
            _nccl.add(group.group_name)
        return group

    def get_backend(group: Any = None) -> Any:
        group = group or c10d.GroupMember.WORLD
        return "nccl" if getattr(group, "group_name", None) in _nccl else backend_of(group)

    def coll_device(group: Any = None) -> str:
        return "cuda" if get_backend(group) == "nccl" else object_device(group)

    def end(group: Any = None) -> None:
        if group is None or group is c10d.GroupMember.WORLD:
            _nccl.clear()
        destroy(group)

    def wait_for_all(*args: Any, **kwargs: Any) -> Any:
        asked["now"] = "cpu"  # gloo's barrier is on the host
        try:
            return barrier(*args, **kwargs)
        finally:
            asked["now"] = "cuda"

    destroy, barrier, asked = c10d.destroy_process_group, c10d.barrier, {"now": "cuda"}
    torch._C._get_accelerator = lambda check=None: torch.device(asked["now"])  # FSDP2 asks it where to shard
    changed = dict(
        init_process_group=init_process_group, new_group=inherits, get_backend=get_backend, destroy_process_group=end,
        barrier=wait_for_all,
    )  # fmt: skip
    for module in (c10d, torch.distributed):
        for name, function in changed.items():
            setattr(module, name, functools.wraps(getattr(c10d, name) if module is c10d else function)(function))
    c10d._get_object_coll_device = coll_device
    c10d.is_nccl_available = torch.distributed.is_nccl_available = lambda: True


# ----------------------------------------------------------------------------------------------- torch's Python surface

FACTORIES = ["empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "logspace"]
FACTORIES += ["eye", "tensor", "scalar_tensor", "empty_strided", "normal", "tril_indices", "triu_indices"]
ALIKE = [f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
NEW = [f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "tensor", "empty_strided")]


def _check_generator(generator: Any, where: int) -> None:
    if generator is None:
        return
    has = getattr(generator, "where", HOST)
    if (has >= 0) != (where >= 0):
        kinds = ["cuda" if x >= 0 else "cpu" for x in (where, has)]
        raise RuntimeError(f"Expected a '{kinds[0]}' device type for generator but found '{kinds[1]}'")


def _factory(make: Callable, like: bool) -> Callable:
    """`make`, with its tensor where it was asked to be; if `like`, without a word, where the first argument is."""

    @functools.wraps(make)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        model = next((x for x in args if isinstance(x, Tensor)), kwargs.get("input")) if like else None
        if device is None and model is None and torch._C._len_torch_function_stack():  # `with torch.device("meta")`
            stack = torch.overrides._get_current_function_mode_stack()
            device = next((mode.device for mode in stack[::-1] if hasattr(mode, "device")), None)
        where = place(model) if model is not None and device is None else _index(device)
        asked = {} if device is None else {"device": device}
        if where is None or (model is not None and device is None and _key(model) is None):  # meta and the like
            return make(*args, **asked, **kwargs)
        _check_generator(kwargs.get("generator"), where)
        if make.__name__ in ("tensor", "new_tensor") and where >= 0:  # copied from memory that is not pinned
            _may_wait("a copy")
        if asked:
            asked = {"device": "cpu"}
        out = make(*args, **asked, **kwargs)
        if kwargs.get("out") is None:
            _note(out, where)
            if where >= 0 and Stream.made > 1:
                _current[0].work()
                _accessed(out, True)
        if pin_memory:
            _remember(out).pinned = True
        return out

    return made


class _Move(torch.autograd.Function):
    """A copy on another device; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: int, blocking: bool) -> Tensor:
        ctx.where = place(x)
        return _moved(x, where, blocking)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _moved(grads[0], ctx.where, True), None, None


def _moved(x: Tensor, where: int, blocking: bool) -> Tensor:
    with torch.no_grad():
        made = torch.empty_like(x, device=torch.device("cuda", where) if where >= 0 else "cpu")
        made.copy_(x, non_blocking=not blocking)
    return made


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    other = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("other")
    copy = kwargs.pop("copy", False)
    if isinstance(other, Tensor):
        device, dtype, blocking, form = other.device, other.dtype, True, None
    else:
        if len(args) > 1 and isinstance(args[-1], bool) and isinstance(args[-2], bool):
            args, copy = args[:-1], args[-1]
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", args[0]), *args[1:])
        device, dtype, asynchronous, form = torch._C._nn._parse_to(*args, **kwargs)
        blocking = not asynchronous
    where = place(self) if device is None else _index(device)
    rest: dict[str, Any] = {"dtype": dtype or self.dtype, "copy": copy}
    if form is not None:
        rest["memory_format"] = form
    if where is None or _key(self) is None:  # meta and the like
        return _real["to"](self, **rest, **({} if device is None else {"device": device}))
    here = place(self)
    if here == WILD:
        out = _real["to"](self, **rest)
        _note(out, where)
        return out
    if here == where:
        return _real["to"](self, **rest)
    moved = (
        _Move.apply(self, where, blocking)
        if self.requires_grad and torch.is_grad_enabled()
        else _moved(self.detach(), where, blocking)
    )
    return _real["to"](moved, **(rest | {"copy": False}))


def _no_numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    if place(self) >= 0:
        raise TypeError(
            f"can't convert cuda:{place(self)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )
    _ordered(self, False, _host, "the host", "numpy()")
    return _real["numpy"](self, *args, **kwargs)


def _no_array(self: Tensor, dtype: Any = None) -> Any:
    values = _no_numpy(self)
    return values if dtype is None else values.astype(dtype, copy=False)


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self.where = _index(device)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.where) if self.where is not None and self.where >= 0 else torch.device("cpu")


class Attribute(property):
    """A property with a name: torch asks the attributes of its tensors for it."""

    def __init__(self, name: str, get: Callable) -> None:
        super().__init__(get)
        self.__name__ = name


def _install_tensor() -> None:
    tensor: Any = torch.Tensor
    _real.update(device=tensor.device, to=tensor.to, numpy=tensor.numpy)
    tensor.device = Attribute(
        "device", lambda t: torch.device("cuda", p) if (p := place(t)) >= 0 else _real["device"].__get__(t)
    )
    tensor.is_cuda = Attribute("is_cuda", lambda t: place(t) >= 0)
    tensor.is_cpu = Attribute("is_cpu", lambda t: place(t) < 0 and _real["device"].__get__(t).type == "cpu")
    tensor.get_device = lambda t: place(t) if place(t) >= 0 else -1
    tensor.to, tensor.numpy, tensor.__array__ = _to, _no_numpy, _no_array
    tensor.cpu = lambda t, memory_format=None: _to(t, "cpu")
    tensor.cuda = lambda t, device=None, non_blocking=False, **_: _to(
        t, torch.device("cuda", _index("cuda" if device is None else device)), non_blocking=non_blocking
    )
    deepcopy = tensor.__deepcopy__

    def copied(t: Tensor, memo: Any) -> Tensor:
        copy = deepcopy(t, memo)
        if place(t) != HOST and place(copy) == HOST:
            _note(copy, place(t))
        return copy

    tensor.__deepcopy__ = copied
    tensor.record_stream = lambda t, stream: _remember(t).told.add(stream.id)
    tensor.is_pinned = lambda t, device=None: _memory(t).pinned

    def pin_memory(t: Tensor, device: Any = None) -> Tensor:
        copy = t.clone()
        _remember(copy).pinned = True
        return copy

    tensor.pin_memory = pin_memory


def _install_makers() -> None:
    """Functions that make a tensor: on which device, and with whose generator."""
    tensor: Any = torch.Tensor
    for name in NEW:
        setattr(tensor, name, _factory(getattr(tensor, name), like=True))
    for name in [name for name in FACTORIES + ALIKE if hasattr(torch, name)]:
        setattr(torch, name, _factory(getattr(torch, name), like=name in ALIKE))
    as_tensor = torch.as_tensor

    def as_tensor_on(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        found = data if isinstance(data, Tensor) else as_tensor(data, dtype=dtype)
        where = {} if device is None else {"device": device}
        return found.to(**where, **({} if dtype is None else {"dtype": dtype})) if where or dtype else found

    torch.as_tensor = as_tensor_on
    torch.Generator = Generator  # type: ignore[misc]
    multinomial, normal = torch.multinomial, tensor.normal_

    def drawn(x: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        _check_generator(generator, place(x))
        return multinomial(x, *args, generator=generator, **kwargs)

    def filled(self: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        _check_generator(generator, place(self))
        return normal(self, *args, generator=generator, **kwargs)

    torch.multinomial, tensor.normal_ = drawn, filled


class CurrentDevice:
    """torch.cuda.device."""

    def __init__(self, which: Any) -> None:
        self.index = None if which is None else _index(which)

    def __enter__(self) -> None:
        self.before = _now["device"]
        if self.index is not None and self.index >= 0:
            _now["device"] = self.index

    def __exit__(self, *error: Any) -> None:
        _now["device"] = self.before


def _install_cuda(count: int) -> None:
    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=2 * 2**30, multi_processor_count=1,
        L2_cache_size=2**14, shared_memory_per_block_optin=SHARED, shared_memory_per_multiprocessor=SHARED + 1024,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32, gcnArchName="",
        is_integrated=0, uuid="none",
    )  # fmt: skip

    def stream(s: Stream | None) -> Any:
        return s if s is not None else CurrentDevice(None)

    def set_device(which: Any) -> None:
        index = _index(which)
        if index is not None and index >= 0:
            _now["device"] = index

    def synchronize(device: Any = None) -> None:
        for s in list(Stream.everyone.values()):
            s.synchronize()

    def reset_peak(device: Any = None) -> None:
        _allocated["peak"] = _allocated["now"]

    def memory_stats(device: Any = None) -> dict[str, int]:
        peaks = dict.fromkeys(("allocated_bytes.all.peak", "reserved_bytes.all.peak"), _allocated["peak"])
        return collections.defaultdict(int, peaks)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    first = Stream()
    _current.append(first)
    cuda.first_stream = first  # kept alive
    changed = dict(
        is_available=lambda: True, device_count=lambda: count, current_device=lambda: _now["device"],
        is_initialized=lambda: True, set_device=set_device, device=CurrentDevice,
        device_of=lambda t: CurrentDevice(t.device if place(t) >= 0 else None), get_device_name=lambda d=None: NAME,
        get_device_capability=lambda d=None: CAPABILITY, get_device_properties=lambda d=None: properties,
        mem_get_info=lambda d=None: (properties.total_memory - _allocated["now"], properties.total_memory),
        set_sync_debug_mode=lambda mode: _now.update(sync=mode), is_bf16_supported=lambda *a, **k: True,
        synchronize=synchronize, Stream=Stream, Event=Event, stream=stream, current_stream=lambda d=None: _current[0],
        default_stream=lambda d=None: first, is_current_stream_capturing=lambda: False,
        memory_allocated=lambda d=None: _allocated["now"], max_memory_allocated=lambda d=None: _allocated["peak"],
        reset_peak_memory_stats=reset_peak, memory_stats=memory_stats,
        get_rng_state=lambda d="cuda": torch.get_rng_state(), set_rng_state=lambda s, d="cuda": torch.set_rng_state(s),
    )  # fmt: skip
    changed |= dict.fromkeys(("_lazy_init", "init", "_sleep", "empty_cache", "manual_seed", "manual_seed_all"), nothing)
    for name, value in changed.items():
        setattr(cuda, name, value)
    cuda.nccl.version = lambda: (2, 28, 9)  # c10d's messages name it
    torch.version.cuda = None  # kernels of .cu files go to g++ and not to nvcc
    autocast: Any = torch.autocast
    begin = autocast.__init__

    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    autocast.__init__ = on_cpu


def install(module: Any = None) -> None:
    """torch as if FAKE_GPUS were there, in this process, until it ends."""
    if _real:
        return
    for name in ("torch._dynamo", "torch.distributed.optim"):  # one is imported by a dispatch mode, the other reads
        importlib.import_module(name)  # torch's source: both want to find torch as it is

    _now["count"] = int(os.environ["FAKE_GPUS"])
    _install_tensor()
    _install_makers()
    _install_cuda(_now["count"])
    _install_collectives()
    Device().__enter__()
    in_a_thread = threading.Thread.run

    def run(self: threading.Thread) -> None:  # a mode is its thread's own, a GPU everybody's
        with Device():
            in_a_thread(self)

    threading.Thread.run = run  # type: ignore[method-assign]


def install_division(interpreter: Any) -> None:
    """A GPU's quotients and powers in fp32 (div.full.f32, ex2.approx) are right to 2 units in the last place.

    So half of those that the interpreter computes are put off here: quotients by one unit, powers by two.
    """
    import numpy as np

    if CAPABILITY < (8, 0):

        def refuse(self: Any, *_: Any, **__: Any) -> None:
            raise RuntimeError(f"{self.fn.__name__}: Triton supports no GPU before sm_80")

        interpreter.InterpretedFunction.run = refuse

    def off(exact: Any, units: int) -> Any:
        if exact.dtype != np.float32:
            return exact
        odd = (exact.view(np.int32) & 1).astype(bool) & np.isfinite(exact)
        for _ in range(units):
            exact = np.where(odd, np.nextafter(exact, np.float32(0)), exact)
        return exact

    builder = interpreter.InterpreterBuilder
    builder.create_exp = lambda self, x: self.unary_op(x, lambda value: off(np.exp(value), 2))
    builder.create_exp2 = lambda self, x: self.unary_op(x, lambda value: off(np.exp2(value), 2))
    builder.create_fdiv = lambda self, a, b: self.binary_op(a, b, lambda x, y: off(np.divide(x, y), 1))


def install_compiler(module: Any) -> None:
    """For TRITON_INTERPRET=0: a driver that lets Triton compile for sm_90, and launches nothing."""
    if os.environ.get("TRITON_INTERPRET") != "0":
        return

    class Binaries:
        def get_device_properties(self, device: int) -> dict[str, int]:
            p = torch.cuda.get_device_properties(device)
            return {
                "max_shared_mem": p.shared_memory_per_block_optin,
                "max_num_regs": p.regs_per_multiprocessor,
                "multiprocessor_count": p.multi_processor_count,
                "warpSize": p.warp_size,
            }

        def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
            return 0, 0, 0, 0, 1024  # module, function, registers, spills, threads of a program at most

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            pass

        def __call__(self, *arguments: Any, **options: Any) -> None:
            pass

    class Compiling:
        utils, launcher_cls = Binaries(), Launcher

        def get_current_device(self) -> int:
            return _now["device"]

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def get_current_target(self) -> Any:
            from triton.backends.compiler import GPUTarget

            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", _now["device"])

        def get_device_interface(self) -> Any:
            return torch.cuda

    module.driver.set_active(Compiling())
