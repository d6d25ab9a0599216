"""One rank of a run that sends nothing and stores nothing: the trainer's own code on tensors without memory.

Problem. Mismatches between the ranks of a layout show when they run, and ten thousand GPUs are an expensive
way to find out that one of them calls its collectives in another order.

Idea. torch's "meta" device computes only shapes and strides of results. So one process can be rank 4711 of
16,384: it builds that rank's part of the model and runs a full step, forward, backward and update, in
seconds. A dispatch mode intercepts every operator:

    a collective or message    recorded (name, group, sizes, dtype, lines of code), not sent; also its `wait()`
    a new tensor               its bytes are counted until it is freed, as the meter of the tests counts them
    a value for the host       1 (a loss, a norm): there is none, and the step continues as after a finite one

What is replaced, and why it must be (`stand_ins`; everything else is the trainer's and chapters' code):

    dist.new_group             records every group, makes only those of this rank: 16,384 ranks have some 25,000
    dist.get_backend           "nccl" or "gloo", whichever is rehearsed: on Gloo the trainer reduces by sends
    initial weights            not drawn: they would have values, and there is no memory for them
    attention                  the fused kernel by name: on "meta" torch would take one that saves [S, S] scores
    launches of Triton         left out: chapter 09's functions allocate what they return, and a kernel fills it in
    device_of                  chapter 02 puts its token count on the backend's device; here there is one device
    torch.autocast             off: it does not support this device, and options that need it are refused
    fused AdamW                asks whether it supports the device; if told so, it computes shapes like others
    route, make_plan           tokens go to the experts in turn. Row counts are values; everything else is shape
    resize_, batch_isend_irecv no operators: stage 3 of ZeRO frees memory by one, the other joins messages

Bytes on "meta" are bytes that the same tensors would have. A kernel's own temporary memory is not counted.
"""

import dataclasses
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import planner_paths  # noqa: F401  finds the trainer and the chapters
import gradient_reducers
import llama
import model as model_module
import moe_layer
import parallel_linear
import step as step_module
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gradients import Replicated
from llama import LlamaConfig
from ops import AUTOCAST
from options import Config, UsageError
from plan_time import Cluster, width_of
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
HOME = Path(__file__).resolve().parents[2]
TRAINER = Path(__file__).resolve().parents[1]
BACKEND = "rehearsal"
Line = tuple[str, int, str]  # file, line, function
Group = tuple[int, tuple[int, ...]]  # its index among all groups of the run, and its global ranks

# operator -> (name, which argument holds the full tensor)
COLLECTIVES = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::barrier": ("barrier", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
}


@dataclasses.dataclass(slots=True)
class Op:
    """A collective or message as one rank starts it."""

    name: str
    group: Group
    numel: int
    dtype: torch.dtype
    detail: str  # the sum, or the root
    peer: int | None  # of a message: rank in the group
    splits: tuple[list[int], list[int]] | None  # of an all-to-all: elements to and from each rank of the group
    lines: tuple[Line | None, Line | None]  # the innermost of this project, and the innermost of the trainer
    batch: int = 0  # of a message: which `batch_isend_irecv` it is part of; 0: none
    waited: bool = False

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclasses.dataclass
class Recorded:
    """What one rank did. `program`: (True, i) starts ops[i], (False, i) waits for it, in host order."""

    rank: int
    place: dict[str, int]
    names: dict[Group, str]  # of groups, as the mesh calls them
    made: list[tuple[tuple[int, ...], Line | None]]  # every group that the run makes, in order, and where
    ops: list[Op]
    program: list[tuple[bool, int]]
    bytes: dict[str, int]  # stored between steps by category, and the most that a step adds
    step_from: int = 0  # index in `ops` of the first of the step
    busy: list[float] = dataclasses.field(default_factory=list)  # seconds of compute before each entry, and at the end

    def sent(self) -> Counter[str]:
        """Bytes that the step sends, by collective: rings, as plan_traffic.py counts them."""
        found: Counter[str] = Counter()
        for op in self.ops[self.step_from :]:
            found[op.name] += wire(op, self.rank)  # type: ignore[assignment]
        return Counter({name: count for name, count in found.items() if count})


def wire(op: Op, rank: int) -> float:
    """Bytes that this rank sends for it by the bandwidth-optimal algorithm (Patarasuk and Yuan 2009)."""
    P = len(op.group[1])
    n = op.bytes
    if P == 1 or op.name in ("recv", "barrier"):
        return 0
    if op.name == "send":
        return n
    if op.name == "all_to_all" and op.splits:
        own = op.splits[0][op.group[1].index(rank)]
        return n - own * op.dtype.itemsize
    if op.name == "broadcast":  # along a line from the root
        distance = (op.group[1].index(rank) - int(op.detail.split()[-1])) % P
        return n if distance < P - 1 else 0
    return {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}[op.name] * n * (P - 1) / P


class Sent(Work):
    """What `async_op=True` returns. It is complete at once, but its wait is recorded."""

    def __init__(self, recorder: "Recorder", index: int) -> None:
        super().__init__()
        self.recorder, self.index = recorder, index

    def wait(self, *_: Any) -> bool:
        self.recorder.wait(self.index)
        return True


FRESH: dict[Any, bool] = {}  # operator -> does it return new tensors only?
WRITES: dict[Any, bool] = {}  # operator -> does it write into an argument?
KNOWN: dict[Any, tuple[bool, list[Any]]] = {}  # operator, shapes -> shapes of results; for all ranks


class Recorder(TorchDispatchMode):
    """Intercepts every operator of one rank: communication is recorded, not done, and bytes are counted."""

    def __init__(self, rank: int, cluster: Cluster | None = None) -> None:
        super().__init__()
        self.rank, self.cluster = rank, cluster
        self.busy: list[float] = []  # seconds that this rank computes before each entry of its program
        self.seconds = 0.0  # since the last entry
        self.made: list[tuple[tuple[int, ...], Line | None]] = []
        self.batch = 0  # number of the `batch_isend_irecv` that is being posted, or 0
        self.batches = 0
        self.group_of: dict[str, Group] = {}  # by torch's name for the group
        self.ops: list[Op] = []
        self.program: list[tuple[bool, int]] = []
        self.works: list[Sent] = []  # torch's references do not keep the Python object alive
        self.where: dict[str, int] = {}  # file -> 0 other code, 1 a chapter, 2 the trainer
        self.arriving = 0  # rows received by this rank's experts in each layer
        self.sizes: dict[StorageWeakRef, tuple[int, int]] = {}  # -> (bytes, which step made it)
        self.step = 0
        self.current = 0
        self.peak = 0

    # ---- bytes

    def begin_step(self) -> None:
        """New tensors count from here on; existing ones are what is stored between steps."""
        self.step += 1
        self.current = 0
        self.peak = 0
        self.busy = [0.0] * len(self.program)
        self.seconds = 0.0

    def enter(self, starts: bool, index: int) -> None:
        self.program.append((starts, index))
        self.busy.append(self.seconds)
        self.seconds = 0.0

    def watch(self, storage: torch.UntypedStorage) -> None:
        ref = StorageWeakRef(storage)
        now = storage.nbytes()
        before, step = self.sizes.get(ref, (0, -1))
        if step < 0:
            step = self.step
            weakref.finalize(storage, self.freed, ref).atexit = False
        elif before == now:
            return
        elif step < self.step:  # older than this step, but it grows: the growth is this step's
            step = self.step
            before = now if before > now else before
        self.current += now - before
        self.peak = max(self.peak, self.current)
        self.sizes[ref] = now, step

    def freed(self, ref: StorageWeakRef) -> None:
        size, step = self.sizes.pop(ref)
        if step == self.step:
            self.current -= size

    # ---- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            return self.communicate(name, func, args)
        if name in VALUES and isinstance(args[0], Tensor) and args[0].is_meta:
            return VALUES[name](self, *args, **(kwargs or {}))
        out = self.shapes(func, args, kwargs or {})
        if self.cluster is not None:
            self.seconds += seconds_of(func, args, out, self.cluster)
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self.watch(each.untyped_storage())
        return out

    def shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator's results. Most shapes are in the cache, because the layers are alike."""
        fresh = FRESH.get(func)
        if fresh is None:
            fresh = FRESH[func] = returns_new_tensors(func)
        if not fresh:
            return func(*args, **kwargs)
        try:
            key = (func, described(args), described(tuple(kwargs.items())))
            known = KNOWN.get(key)
        except (HasMemory, TypeError):  # a real tensor, or something that cannot be a key
            return func(*args, **kwargs)
        if known is None:
            out = func(*args, **kwargs)
            several = isinstance(out, (tuple, list))
            if all(isinstance(each, Tensor) and each.is_meta for each in (out if several else (out,))):
                form = [(tuple(t.shape), t.stride(), t.dtype) for t in (out if several else (out,))]
                KNOWN[key] = several, form
            return out
        several, form = known
        made = [torch.empty_strided(shape, stride, dtype=dtype, device=META) for shape, stride, dtype in form]
        return tuple(made) if several else made[0]

    def communicate(self, operator: str, func: Any, args: Any) -> Any:
        if operator not in COLLECTIVES:
            raise NotImplementedError(f"the rehearsal does not know what {operator} sends")
        name, at = COLLECTIVES[operator]
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        group = dist.ProcessGroup.unbox(given["process_group"])
        tensors = args[at] if isinstance(args[at], (list, tuple)) else [args[at]]
        peer = given.get("dst", given.get("src")) if name in ("send", "recv") else None
        detail = f"root {given['root_rank']}" if "root_rank" in given else ""
        if "reduce_op" in given:
            detail = dist.ReduceOp.RedOpType(given["reduce_op"].op()).name.lower()
        op = Op(
            name,
            self.group_of[group.group_name],
            0 if name == "barrier" else sum(t.numel() for t in tensors),
            tensors[0].dtype,
            detail,
            peer,
            splits_of(given, group.size()) if name == "all_to_all" else None,
            self.lines(),
            self.batch,
        )
        self.fill(name, given, group)
        self.enter(True, len(self.ops))
        self.ops.append(op)
        self.works.append(Sent(self, len(self.ops) - 1))
        work = Work.boxed(self.works[-1])
        return (args[0], work) if len(func._schema.returns) == 2 else work

    def wait(self, index: int) -> None:
        if not self.ops[index].waited:
            self.ops[index].waited = True
            self.enter(False, index)

    def fill(self, name: str, given: dict[str, Any], group: dist.ProcessGroup) -> None:
        """The few tensors with values (row counts for experts) are received as if all ranks did the same."""
        if name == "all_to_all" and not given["output"].is_meta:
            mine = given["input"].view(group.size(), -1)[group.rank()]
            given["output"].view(group.size(), -1).copy_(mine.expand(group.size(), -1))

    def lines(self) -> tuple[Line | None, Line | None]:
        """The current lines: the innermost of a chapter (or trainer), and the innermost of the trainer."""
        frame: Any = sys._getframe(2)
        chapter = None
        while frame is not None:
            code = frame.f_code
            kind = self.where.get(code.co_filename)
            if kind is None:
                kind = self.where[code.co_filename] = kind_of(code.co_filename)
            if code.co_name.startswith("<"):  # a comprehension: use the function around it
                kind = 0
            if kind and chapter is None:
                chapter = code.co_filename, frame.f_lineno, code.co_name
            if kind == 2:
                return chapter, (code.co_filename, frame.f_lineno, code.co_name)
            frame = frame.f_back
        return chapter, None


PRODUCTS: dict[str, Callable[..., tuple[float, float]]] = {  # -> FLOPs, and the width (attention: a head's)
    "aten::mm": lambda a, b, *_: (2 * a.numel() * b.shape[1], width_of([(*a.shape, b.shape[1])])),
    "aten::bmm": lambda a, b, *_: (2 * a.numel() * b.shape[2], width_of([(*a.shape[1:], b.shape[2])])),
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda q, k, *_: attention_flops(q, k, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda _, q, k, *__: attention_flops(q, k, 5),
}


def attention_flops(q: Tensor, k: Tensor, products: int) -> tuple[float, int]:
    """q [B, N, S, D], k [B, N_kv, S, D]; half of each matmul, since the mask is causal."""
    batch, heads, length, depth = q.shape
    return products * batch * heads * length * k.shape[2] * depth, depth


def seconds_of(func: Any, args: Any, out: Any, cluster: Cluster) -> float:
    """A matmul by its FLOPs; other operators that write a tensor by bytes read and written; a view: 0."""
    name = func._schema.name
    product = PRODUCTS.get(name)
    if product:
        return (cluster.core if "attention" in name else cluster.product)(*product(*args))
    writes = WRITES.get(func)
    if writes is None:
        of = func._schema.arguments
        writes = WRITES[func] = any(each.alias_info is not None and each.alias_info.is_write for each in of)
    if not writes and not FRESH.get(func):
        return 0.0
    moved = 0
    for each in args if writes else (*args, out):  # in place: an argument is written
        for tensor in each if isinstance(each, (list, tuple)) else (each,):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                moved += tensor.nbytes
    return cluster.elementwise(moved)


# Chapter 09's FlashAttention -> matmuls over all pairs of query and key; backward recomputes the scores.
ATTENTION_KERNELS = {"forward_kernel": 2, "dq_kernel": 3, "dkdv_kernel": 4}
DQ = 8  # the argument of dkdv_kernel with which it also computes dq, for one more matmul


def seconds_of_kernel(kernel: str, args: Any, cluster: Cluster) -> float:
    """FlashAttention by its FLOPs, any other kernel by the bytes of its arguments."""
    products = ATTENTION_KERNELS.get(kernel)
    if kernel == "dkdv_kernel" and args[DQ] is not None:
        products = 5
    if products is None:
        tensors = [each[0] if isinstance(each, tuple) else each for each in args]
        return cluster.elementwise(sum(each.nbytes for each in tensors if isinstance(each, Tensor)))
    q = args[0][0]
    k = args[1][0]  # from `describe`: the tensor, then its sizes and strides
    batch, length, heads, depth = q.shape
    last = args[-2]  # the first key that a query sees, the last, and the scale
    pairs = length * k.shape[1] / (2 if last == 0 else 1)
    return cluster.core(2 * products * batch * heads * pairs * depth, depth)


class HasMemory(Exception):
    """A tensor with values: an operator's result does not depend on shapes alone."""


def described(value: Any) -> Any:
    """The properties of arguments that the shapes of the results depend on."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise HasMemory
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(described(each) for each in value)
    return value.__class__, value  # 1, 1.0 and True are equal, and make different dtypes


def returns_new_tensors(func: Any) -> bool:
    """Whether it returns only new tensors: no views, nothing written in place."""
    schema = func._schema
    aliases = any(each.alias_info is not None for each in [*schema.arguments, *schema.returns])
    return not aliases and bool(schema.returns) and schema.name not in ("aten::_unsafe_view", "aten::lift_fresh")


def kind_of(file: str) -> int:
    path = Path(file)
    if not path.is_relative_to(HOME) or ".venv" in path.parts or path.parent == Path(__file__).parent:
        return 0
    return 2 if path.parent == TRAINER else 1


def splits_of(given: dict[str, Any], ranks: int) -> tuple[list[int], list[int]]:
    """Elements to each rank of the group, and from each."""
    found = []
    for tensor, splits in (("input", "input_split_sizes"), ("output", "output_split_sizes")):
        whole = given[tensor]
        rows = given.get(splits)
        row = whole.numel() // len(whole) if len(whole) else 0
        found.append([n * row for n in rows] if rows else [whole.numel() // ranks] * ranks)
    return found[0], found[1]


# ----------------------------------------------------------------------------- what has a value where there are shapes


def one(recorder: Recorder, x: Tensor) -> Any:
    return torch.ones((), dtype=x.dtype).item()


def rows_here(recorder: Recorder, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """As many indices as rows are received: how often each is repeated is a value."""
    return integers(recorder, recorder.arriving if output_size is None else output_size)


def integers(recorder: Recorder, numel: int) -> Tensor:
    out = torch.empty(numel, dtype=torch.int64, device=META)
    recorder.watch(out.untyped_storage())
    return out


VALUES: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": one,
    "aten::equal": lambda recorder, a, b: a.shape == b.shape,
    "aten::repeat_interleave": rows_here,
    "aten::bincount": lambda recorder, x, weights=None, minlength=0: integers(recorder, minlength),
}


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool = False) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)[0]


def in_turn(tokens: int, top_k: int, experts: int) -> Tensor:
    """The experts of each token, [T, K], in turn, so that every expert gets its share."""
    return (torch.arange(tokens * top_k) % experts).view(tokens, top_k)


def even_plan(plain: Callable[..., Any], recorder: Recorder, version: str, experts: Tensor, kept: Any, E: int,
              group: Any, *_: Any) -> Any:  # fmt: skip
    """The chapter's own `make_plan`, on routing with values, and the row counts that it gives."""
    plan = plain(version, in_turn(len(experts), experts.shape[1], E), None, E, group)
    recorder.arriving = sum(plan.receive)
    return dataclasses.replace(plan, experts=experts, rows=plan.rows.to(META), to=plan.to.to(META))


def even_route(plain: Callable[..., Any], logits: Tensor, top_k: int, *rest: Any) -> Any:
    return plain(logits, top_k, *rest[:-1], in_turn(len(logits), top_k, logits.shape[1]).to(META))


def without_launches(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """Patches that keep chapter 09's kernels from being launched, compiled or interpreted."""
    import _flash_launch  # imported here: on a CPU the import turns Triton's interpreter on
    import flash_kernels
    import fused
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, **_: Any) -> None:  # its results are allocated already, without values
        if recorder.cluster is not None:
            recorder.seconds += seconds_of_kernel(kernel.fn.__name__, args, recorder.cluster)

    changed: list[tuple[Any, str, Any]] = [(each, "run", run) for each in (JITFunction, InterpretedFunction)]
    return changed + [(module, "INTERPRETED", False) for module in (_flash_launch, flash_kernels, fused)]


@contextmanager
def stand_ins(recorder: Recorder, backend: str, kernels: str) -> Iterator[None]:
    """See the table on top."""
    plain_group = dist.new_group
    plain_resize = torch.UntypedStorage.resize_
    plain_batch = dist.batch_isend_irecv
    plain_route = moe_layer.route
    plain_plan = moe_layer.make_plan

    def new_group(ranks: Any = None, **_: Any) -> Any:
        every = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
        recorder.made.append((every, recorder.lines()[0]))
        if recorder.rank not in every:
            return None
        group = plain_group(list(every), backend=BACKEND)
        recorder.group_of[group.group_name] = len(recorder.made), tuple(sorted(every))
        return group

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain_resize(storage, size)
        recorder.watch(storage)
        return result

    def batch_isend_irecv(messages: list[dist.P2POp]) -> list[dist.Work]:
        recorder.batches += 1
        recorder.batch = recorder.batches
        try:
            return plain_batch(messages)
        finally:
            recorder.batch = 0

    def nothing(*_: Any, **__: Any) -> None:
        pass

    changed: list[tuple[Any, str, Any]] = [
        (dist, "new_group", new_group),
        (dist, "batch_isend_irecv", batch_isend_irecv),
        (dist, "get_backend", lambda group=None: backend),
        (torch.UntypedStorage, "resize_", resize_),
        (F, "scaled_dot_product_attention", fused_attention),
        (llama, "init_weights", nothing),
        (parallel_linear, "init_weights", nothing),
        (model_module, "init_moe", nothing),
        (gradient_reducers, "device_of", lambda group: "meta"),
        (sys.modules[torch.optim.Optimizer.__module__], "_get_fused_kernels_supported_devices", lambda: ["meta"]),
        (torch, "is_autocast_enabled", lambda *_: False),
        (torch, "autocast", lambda *_, **__: nullcontext()),
        (moe_layer, "route", lambda *given: even_route(plain_route, *given)),
        (moe_layer, "make_plan", lambda *given: even_plan(plain_plan, recorder, *given)),
    ]
    changed += without_launches(recorder) if kernels == "triton" else []
    with ExitStack() as stack:
        for owner, name, value in changed:
            stack.enter_context(patch.object(owner, name, value))
        yield


# --------------------------------------------------------------------------------------------------------- one rank


def check(config: Config, sizes: LlamaConfig, ranks: int, backend: str = "nccl") -> Config:
    """The options as they are rehearsed. UsageError, in one line, for those that cannot be.

    `--kernels auto` is resolved as the trainer does with the GPUs' backend: chapter 09's fused kernels, or
    PyTorch's where Triton is not installed.
    """
    config.check()
    config.check_layout(sizes, ranks)
    if config.precision in AUTOCAST:
        raise UsageError(
            f"--precision {config.precision} cannot be rehearsed: torch's autocast knows no tensors without memory; "
            "use bf16-master (the planner's), fp32 or fp64"
        )
    if config.fpdt_chunks:
        raise UsageError(f"--fpdt-chunks {config.fpdt_chunks} cannot be rehearsed: its chunks lie on the host")
    if config.zero_offload:
        raise UsageError("--zero-offload cannot be rehearsed: its states lie on the host")
    if config.capacity:
        raise UsageError(f"--capacity {config.capacity:g} cannot be rehearsed: which tokens are dropped is a value")
    if config.documents:
        raise UsageError("--documents cannot be rehearsed: where they begin is a value")
    if config.dispatch != "pairs":
        raise UsageError(
            f"--dispatch {config.dispatch} cannot be rehearsed: the planner counts a row for each pair; use pairs"
        )
    if config.kernels == "cuda" or config.compile:
        what = "--compile" if config.compile else "--kernels cuda"
        raise UsageError(f"{what} cannot be rehearsed: what it builds needs real tensors; use --kernels triton")
    kernels = config.kernels
    if kernels == "auto":
        fused = backend == "nccl" and config.precision != "fp64" and step_module.has_triton()
        kernels = "triton" if fused else "torch"
    if kernels == "triton" and not step_module.has_triton():
        raise UsageError("--kernels triton needs Triton, which is not installed (it is for Linux); use --kernels torch")
    if kernels == "triton" and (not 32 <= sizes.head_dim <= 256 or sizes.head_dim % 16):
        what = f"--kernels {config.kernels} cannot be rehearsed for heads of {sizes.head_dim}"
        raise UsageError(f"{what}: FlashAttention takes multiples of 16 from 32 to 256; use --kernels torch")
    if kernels == "triton" and config.precision == "fp64":
        raise UsageError("--kernels triton cannot be rehearsed in fp64: no kernel computes in it; use --kernels torch")
    return dataclasses.replace(config, kernels=kernels)


def make_backend(common: Any, options: Any) -> Any:
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)  # type: ignore[call-arg]


@contextmanager
def built(
    config: Config, sizes: LlamaConfig, rank: int, ranks: int, backend: str = "nccl", cluster: Cluster | None = None
) -> Iterator[tuple[Any, Recorder]]:
    """Rank `rank` of `ranks` as the trainer builds it, and the recorder of all that it does inside."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, make_backend, extended_api=True, devices=["cpu", "meta"])
    recorder = Recorder(rank, cluster)
    dist.init_process_group(BACKEND, rank=rank, world_size=ranks, store=FakeStore())
    try:
        with stand_ins(recorder, backend, config.kernels), recorder:
            yield step_module.make_trainer(config, sizes, META), recorder
    finally:
        dist.destroy_process_group()


def run_rank(
    config: Config, sizes: LlamaConfig, rank: int, ranks: int, backend: str = "nccl", cluster: Cluster | None = None
) -> Recorded:
    """Build rank `rank` of `ranks` and run one step; with a cluster, record how long it would compute."""
    with built(config, sizes, rank, ranks, backend, cluster) as (me, recorder):
        make_states(me)
        step_from = len(recorder.ops)
        held = bytes_held(me)
        shape = config.micro_batch, config.seq_len
        batches: list[Any] = []
        for _ in range(config.accumulation(me.mesh.sizes["dp"])):
            batches.append(tuple(torch.empty(shape, dtype=torch.int64, device=META) for _ in range(2)))
        recorder.begin_step()
        step_module.train_step(me, batches)
        names: dict[Group, str] = {}
        for name, group in me.mesh.groups.items():
            names.setdefault(recorder.group_of[group.group_name], name)
        place = dict(me.mesh.place)
    held["activations and buffers"] = recorder.peak
    busy = [*recorder.busy, recorder.seconds]
    return Recorded(rank, place, names, recorder.made, recorder.ops, recorder.program, held, step_from, busy)


def make_states(me: Any) -> None:
    """Make the optimizer's states, as its first step does: the rehearsed step is a later one."""
    for owner in me.owners:
        optimizers = [owner.optimizer] if isinstance(owner, Replicated) else owner.inner
        for optimizer in optimizers:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for p in params:
                p.grad = torch.empty_like(p)
            optimizer.step()
            for p in params:
                p.grad = None


def bytes_held(me: Any) -> dict[str, int]:
    """Between two steps: weights, gradients, optimizer states. Step counters (a value each) are left out."""
    found: dict[str, list[Any]] = {"weights": list(me.model.parameters()), "gradients": [], "optimizer states": []}
    for owner in me.owners:
        if isinstance(owner, Replicated):
            found["gradients"] += owner.reducer.flats
            found["optimizer states"] += [s for each in owner.optimizer.state.values() for s in each.values()]
        else:
            for what, tensors in owner.held().items():
                found[what] += tensors
    total = {}
    for what, tensors in found.items():
        big = [t for t in tensors if isinstance(t, Tensor) and t.dim() > 0]
        total[what] = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in big}.values())
    return total


def written(line: Line | None) -> str:
    """`parallel_linear.py:66 in all_reduce`"""
    return f"{Path(line[0]).name}:{line[1]} in {line[2]}" if line else ""
