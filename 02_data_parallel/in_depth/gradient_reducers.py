"""Data parallelism: each rank stores the full model and gets its own part of the batch; gradients are summed.

Problem. P ranks compute P different gradients, and the optimizer step needs their sum on each rank. Sending
them after backward is correct but slow: links idle during backward, processors idle during communication.

Idea. Backward completes the last layer's gradients first, so they can be sent while earlier layers compute.
Each message has a start-up time (the dots below), so small gradients share one, in flat buckets.

    backward     ---h---g---f---e---d---c---b---a
    naive                                        ···hh···gg···ff···ee···dd···cc···bb···aa| step
    overlapped       ···hh···gg···ff···ee···dd···cc···bb···aa| step
    bucketed                 ···hhggff   ···eeddcc···bbaa| step

    rank 0  all weights, all gradients, batch part 0     after finish() the gradients are the same on every rank,
    rank 1  all weights, all gradients, batch part 1     so equal weights stay equal and are never sent again

Why a sum. The loss is  sum over this rank's tokens / valid tokens in the global batch.  The losses of all
ranks (and all micro-batches) then add up to the loss of the global batch, and so do their gradients. An
average of per-rank means would be different if ranks have different numbers of valid tokens.

Formulas, for P ranks and gradients of G bytes:
    sent by each rank   2 (P-1)/P G    ring all-reduce: Patarasuk and Yuan 2009
    stored on each      G              a gradient is a view of its bucket, so buckets are no second copy
    messages            one per parameter, or one per bucket
The three versions, and accumulation: Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704), section 3.2.

Run it:
    python gradient_reducers.py                                               one rank, CPU or GPU
    torchrun --nproc_per_node 2 gradient_reducers.py --version naive          Gloo on CPUs, NCCL on GPUs
    torchrun --nproc_per_node 2 gradient_reducers.py --profile traces         one chrome trace per rank
The last line is PASS, or the script exits with 1 and says which number is off.
"""

import argparse
import gc
import os
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from weakref import WeakMethod

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: if first imported while a group exists, it would keep the group alive
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

# Legend of shapes: B batch, S sequence, H hidden, N heads, D head dim, V vocab.
IGNORE = -100  # a label without a target: padding, a prompt, another document
MicroBatch = tuple[Tensor, Tensor]  # tokens and labels, both [B, S]


# ------------------------------------------------------------------------------------------- before the first step


def device_of(group: dist.ProcessGroup) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def global_valid_tokens(labels_or_count: Tensor | int, group: dist.ProcessGroup) -> Tensor:
    """Number of valid tokens (label != -100) in the global batch: the divisor of the loss on every rank.

    Pass this rank's labels, or their count, over *all* micro-batches of the step. The result is a 0-dim int64
    tensor on the device, so that the host does not wait. It is at least 1, so that a batch without targets
    has loss 0, not 0/0.
    """
    given = torch.as_tensor(labels_or_count, device=device_of(group))
    valid = (given != IGNORE).sum() if given.dim() > 0 else given.clone()
    # --- exercise 2.25: the divisor of the loss is a number of the whole group ---
    dist.all_reduce(valid, group=group)
    return valid.clamp(min=1)
    # --- end exercise ---


def broadcast_parameters(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the parameters and buffers of the group's rank 0 to every rank of the group, in place.

    Data parallelism sends only gradients, so replicas with different initial weights would stay different.
    """
    # --- exercise 2.26: the same start on every rank ---
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), group_src=0, group=group)  # rank 0 of the *group*, whatever its global rank
    # --- end exercise ---


# ----------------------------------------------------------------------------------------------------- the reducer


def weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that calls `method` but does not keep its object alive. A strong reference would leak the
    object, because the garbage collector cannot see a cycle that runs through autograd's side of a parameter.
    """
    reference = WeakMethod(method)

    def call(param: nn.Parameter) -> None:
        alive = reference()
        if alive is not None:
            alive(param)

    return call


def cut_into_buckets(
    parameters: list[nn.Parameter], bucket_bytes: int, first_bytes: int | None = None
) -> list[list[nn.Parameter]]:
    """Buckets of one device and dtype each, filled in the order of `parameters` until full (`bucket_bytes`).

    The first can be smaller (`first_bytes`), so that communication starts early.
    """
    # --- exercise 2.29: buckets in the order in which backward completes them ---
    full: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for p in parameters:
        bucket = filling.setdefault((p.device, p.dtype), [])
        bucket.append(p)
        if sum(q.nbytes for q in bucket) >= (bucket_bytes if full or first_bytes is None else first_bytes):
            full.append(filling.pop((p.device, p.dtype)))
    position = {p: i for i, p in enumerate(parameters)}
    return sorted([*full, *filling.values()], key=lambda bucket: position[bucket[-1]])
    # --- end exercise ---


def span(name: str) -> AbstractContextManager[object]:
    """A named range in a profiler's trace. With no profiler a no-op, because 50 names per step cost time."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


class Reducer:
    """Sums gradients over the group. The three versions differ in two arguments (see below).

        reducer = BucketedReducer(model, group)
        with reducer.no_sync():
            (loss_of_micro_batch_0 / valid).backward()        # accumulates on this rank, sends nothing
        (loss_of_micro_batch_1 / valid).backward()
        reducer.finish()                                      # now every p.grad is the sum over the group
        optimizer.step(); optimizer.zero_grad()

    The path of a gradient: backward completes it -> `start` copies it to its bucket and launches complete
    buckets in order -> `launch` starts the sum of one -> `finish` launches the rest and waits for all.
    `p.grad` becomes a view of its bucket in the first backward, so nothing is copied back, and gradients take
    G bytes, not 2 G. `zero_grad(set_to_none=False)` keeps the views, and autograd adds in place to the
    bucket; after `set_to_none=True` it makes a new tensor, which `start` copies in.

    early           launch during backward; False: all in `finish`, one after the other
    bucket_bytes    a bucket is closed once it reaches this size; 1: one bucket per parameter
    first_bytes     the same for the first bucket
    rebuild         after the first step, rebuild buckets in the order in which rank 0 completed its gradients
    main_grads      sum micro-batches and ranks in fp32, in `p.main_grad` (Megatron-LM's); `p.grad` stays None
    find_unused     one more small message, and a parameter that no rank used keeps gradient None
    hooks           False: nothing is automatic, the caller calls `start(param)`
    all_reduce      a replacement of torch's; it blocks, so only without `early`

    A tied parameter counts once; a frozen one (`requires_grad=False` when the reducer is made) is left out. A
    parameter without a gradient on this rank sends zeros. Without one on any rank, its gradient becomes
    zeros, and AdamW would decay the weight; hence `find_unused`. After a backward that raised, on one rank or
    on all, call `finish()`, which sends the remaining buckets so that ranks stay in sync, then `zero_grad()`.
    `events` has the last step: ("ready", parameter's name), ("launch", bucket), ("wait", bucket).
    """

    def __init__(
        self,
        parameters_or_module: nn.Module | Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        early: bool = True,
        bucket_bytes: int = 25 * 2**20,
        first_bytes: int | None = None,
        rebuild: bool = False,
        main_grads: bool = False,
        find_unused: bool = False,
        hooks: bool = True,
        all_reduce: Callable[..., object] | None = None,
    ):
        if isinstance(parameters_or_module, nn.Module):
            named = list(parameters_or_module.named_parameters())
        else:
            named = [(f"parameter {i}", p) for i, p in enumerate(parameters_or_module)]
        if early and all_reduce is not None:
            raise ValueError("an all_reduce of your own blocks, so nothing can be early: use early=False")
        self.names = {p: name for name, p in reversed(named) if p.requires_grad}  # in the order of backward
        self.group = group
        self.early = early
        self.rebuild = rebuild
        self.main_grads = main_grads
        self.find_unused = find_unused
        self.all_reduce = all_reduce
        self.bucket_bytes, self.first_bytes = bucket_bytes, first_bytes
        self.make_buckets(list(self.names))
        self.events: list[tuple[str, str | int]] = []
        self.syncing = True
        self.begin()
        for p in self.names if hooks else ():
            p.register_post_accumulate_grad_hook(weakly(self.start))  # calls start(p): a hook gets its parameter

    def make_buckets(self, order: list[nn.Parameter]) -> None:
        """Flat tensors for gradients that complete in this order, and each parameter's view of them."""
        self.buckets = cut_into_buckets(order, self.bucket_bytes, self.first_bytes)
        self.bucket_of = {p: index for index, bucket in enumerate(self.buckets) for p in bucket}
        self.flats: list[Tensor] = []  # one for each bucket
        self.views: dict[nn.Parameter, Tensor] = {}  # each gradient's view of its bucket
        for bucket in self.buckets:
            sizes = [p.numel() for p in bucket]
            dtype = torch.float32 if self.main_grads else bucket[0].dtype
            self.flats.append(torch.zeros(sum(sizes), dtype=dtype, device=bucket[0].device))
            for p, part in zip(bucket, self.flats[-1].split(sizes), strict=True):
                self.views[p] = part.view_as(p)

    def begin(self) -> None:
        """Reset the state of a step, which lasts from the first gradient to `finish()`."""
        self.ready: set[nn.Parameter] = set()  # final on this rank
        self.unused: set[nn.Parameter] = set()  # sent as zeros
        self.works: list[dist.Work] = []  # all-reduces in flight
        self.launched = 0  # buckets sent so far; the next one to send
        self.missing = [len(bucket) for bucket in self.buckets]  # pending gradients of each bucket
        self.stale = set(self.names)  # parameters whose view still has the last step's sum

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients on this rank and send nothing."""
        before = self.syncing
        self.syncing = False
        try:
            yield
        finally:
            self.syncing = before

    def start(self, param: nn.Parameter) -> None:
        """`param.grad` is final on this rank for this step. Called by the hook, or by the user."""
        if param in self.ready:
            raise RuntimeError(
                f"the gradient of {self.names[param]!r} became final twice in one step: call finish() after each "
                "backward that sends (also after one that raised), and run other micro-batches inside no_sync()"
            )
        if param.grad is not None or self.syncing:  # a missing one must not send the last step's sum
            self.into_bucket(param)
        if not self.syncing:
            return
        if not self.ready:
            self.events = []
        self.ready.add(param)
        self.events.append(("ready", self.names[param]))
        # --- exercise 2.28: launch while backward runs, in the same order on every rank ---
        # Messages are matched by order alone. Two ranks may complete gradients in different orders (one did
        # not use a parameter, say), so a bucket is sent only after all buckets before it.
        self.missing[self.bucket_of[param]] -= 1
        while self.early and self.launched < len(self.buckets) and self.missing[self.launched] == 0:
            self.launch(self.launched)
        # --- end exercise ---

    def into_bucket(self, param: nn.Parameter) -> None:
        """Put the parameter's gradient of this step into its bucket, zeros if there is none."""
        view = self.views[param]
        stale = param in self.stale
        self.stale.discard(param)
        if self.main_grads:
            if param.grad is None and stale:
                self.unused.add(param)
                view.zero_()  # the bucket still has the last step's sum
            elif param.grad is not None:
                view.copy_(param.grad) if stale else view.add_(param.grad)  # bf16 is added to fp32, and rounded to it
            param.grad, param.main_grad = None, view  # type: ignore[attr-defined]
        elif param.grad is None:
            self.unused.add(param)
            param.grad = view.zero_()  # as above
        elif param.grad is not view:
            index = self.bucket_of[param]
            if len(self.buckets[index]) == 1 and param.grad.is_contiguous():  # then the gradient *is* the bucket
                self.flats[index] = param.grad.view(-1)
                self.views[param] = param.grad
            else:
                view.copy_(param.grad)
                param.grad = view

    def launch(self, index: int) -> None:
        # --- exercise 2.27: sum the gradients of one bucket over the group ---
        for p in self.buckets[index]:
            if p not in self.ready:  # it got no gradient, in this backward or in the full step
                self.into_bucket(p)
        self.events.append(("launch", index))
        self.launched += 1
        with span(f"all-reduce of bucket {index}"):
            if self.early:
                self.works.append(dist.all_reduce(self.flats[index], group=self.group, async_op=True))
            else:  # a sum, because the loss is already divided
                (self.all_reduce or dist.all_reduce)(self.flats[index], group=self.group)
                self.events.append(("wait", index))
        # --- end exercise ---

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, leave sums in `p.grad`. Once per step, on every rank."""
        if not self.ready:
            self.events = []
        while self.launched < len(self.buckets):
            self.launch(self.launched)
        for index, work in enumerate(self.works):
            with span(f"wait for bucket {index}"):
                work.wait()
            self.events.append(("wait", index))
        if self.find_unused:
            used = torch.tensor([p not in self.unused for p in self.names], device=device_of(self.group)).byte()
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
            for p, used_somewhere in zip(self.names, used.tolist(), strict=True):
                if not used_somewhere:
                    p.grad = p.main_grad = None  # type: ignore[attr-defined]
        if self.rebuild:  # a collective, so also on a rank that ran no backward
            self.rebuild_buckets()
        self.begin()

    def rebuild_buckets(self) -> None:
        """Once, order the buckets as rank 0 completed its gradients."""
        self.rebuild = False
        names = list(self.names.values())
        parameters = list(self.names)
        seen = [names.index(name) for what, name in self.events if what == "ready"]
        seen += [i for i in range(len(names)) if i not in seen]
        order = torch.tensor(seen, device=device_of(self.group))
        dist.broadcast(order, group_src=0, group=self.group)  # [parameters]: all ranks need the same buckets
        before = self.views
        self.make_buckets([parameters[i] for i in order.tolist()])
        for p, view in self.views.items():
            view.copy_(before[p])
            if p.grad is before[p]:
                p.grad = view
            if getattr(p, "main_grad", None) is before[p]:
                p.main_grad = view  # type: ignore[attr-defined]


# Three versions, each with one argument changed from the one before.
NaiveReducer = partial(Reducer, early=False, bucket_bytes=1)  # after backward, one gradient after the other
OverlappedReducer = partial(Reducer, bucket_bytes=1)  # each as soon as it is final, during backward
BucketedReducer = Reducer  # neighbours share a message, by default of 25 MiB
VERSIONS: dict[str, Callable[..., Reducer]] = {
    "naive": NaiveReducer,
    "overlapped": OverlappedReducer,
    "bucketed": BucketedReducer,
}


def train_step(model: nn.Module, reducer: Reducer, micro_batches: list[MicroBatch]) -> Tensor:
    """Forward and backward over this rank's micro-batches. Returns the loss of the global batch, (sum over
    all valid tokens of all ranks) / (their number). Each `p.grad` is then the gradient of that loss."""
    valid = global_valid_tokens(torch.cat([labels.flatten() for _, labels in micro_batches]), reducer.group)
    parts = []
    for i, (tokens, labels) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with nullcontext() if last else reducer.no_sync():
            loss = token_loss_sum(model, tokens, labels) / valid
            with record_function("backward"):
                loss.backward()
        parts.append(loss.detach())
    reducer.finish()
    total = torch.stack(parts).sum()
    dist.all_reduce(total, group=reducer.group)  # only for the log: each rank has its own part of the loss
    return total


# ---------------------------------------------------------------------------------------------- a model and its text


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(hidden)
        self.norm2 = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 of [B, N, S, D]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))  # [B, N, S, D] -> [B, S, H]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A small decoder with tied embedding and head, and a buffer of sinusoidal positions."""

    def __init__(self, vocab: int = 256, hidden: int = 64, heads: int = 4, layers: int = 2, sequence: int = 64):
        super().__init__()
        angle = torch.arange(sequence)[:, None] * torch.logspace(0, -4, hidden // 2)[None]
        self.register_buffer("positions", torch.cat([angle.sin(), angle.cos()], dim=-1))
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight  # one parameter with two uses: its gradient is reduced once

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]  # [B, S] -> [B, S, H]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # [B, S, V]


def token_loss_sum(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy over valid tokens, in fp32 or better: 0, not NaN, if there are none."""
    logits = model(tokens).flatten(0, 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def make_batch(step: int, ranks: int, micro_batches: int = 2) -> list[list[MicroBatch]]:
    """The global batch of one step, as [rank][micro-batch]: bytes of the standard library's source.

    (P-r)/P of the labels on rank r are targets, and the last rank has none in its first micro-batch.
    """
    rows, length = 2, 64  # B and S of one micro-batch
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    count = ranks * micro_batches * rows
    starts = (torch.arange(count) + step * count) * length % (len(data) - length - 1)
    text = data[starts[:, None] + torch.arange(length + 1)].unflatten(0, (ranks, micro_batches, rows))
    tokens = text[..., :-1]
    labels = text[..., 1:].clone()  # [rank, micro-batch, B, S]
    for rank in range(ranks):
        labels[rank, ..., length * (ranks - rank) // ranks :] = IGNORE
    if count > rows:
        labels[-1, 0] = IGNORE
    return [list(zip(*part, strict=True)) for part in zip(tokens, labels, strict=True)]


# ------------------------------------------------------------------------------------------------------------- demo


class WireCounter(TorchDispatchMode):
    """Counts this rank's all-reduces and the bytes it sends, from its calls to torch.distributed."""

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks
        self.all_reduces = 0
        self.bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._opname in ("allreduce_", "send"):
            reduces = func._opname == "allreduce_"
            payload = sum(tensor.nbytes for tensor in args[0])
            self.all_reduces += reduces
            self.bytes += payload * 2 * (self.ranks - 1) / self.ranks if reduces else payload  # the ring algorithm's
        return func(*args, **(kwargs or {}))


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)


def folder(name: str) -> Path:
    """Create the folder, or raise an error of one line with the reason."""
    if not name:
        raise argparse.ArgumentTypeError("'' is no name of a folder")
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"{name} cannot be made a folder: {problem.strerror}") from None
    return Path(name)


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description="Data parallelism in three versions.", allow_abbrev=False)
    parser.add_argument("--version", choices=VERSIONS, default="bucketed")
    parser.add_argument("--all-reduce", choices=["torch", "ring"], default="torch", help="ring: that of collectives.py")
    parser.add_argument("--bucket-kib", type=int, help="size of a bucket; default: 256")
    parser.add_argument("--profile", type=folder, metavar="DIR", help="write the traces of one step to DIR")
    args = parser.parse_args()
    if args.bucket_kib is not None and args.bucket_kib < 1:
        parser.error(f"--bucket-kib {args.bucket_kib} is too small; use 1 or more")
    if args.bucket_kib is not None and args.version != "bucketed":
        parser.error(f"--bucket-kib {args.bucket_kib}: --version {args.version} has no buckets; leave it out")
    if args.all_reduce == "ring" and args.version != "naive":
        parser.error(f"--all-reduce ring blocks, so --version {args.version} cannot overlap it; use --version naive")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if 0 < gpus < local:
        parser.error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")
    return args


def make_reducer(args: argparse.Namespace, model: nn.Module, group: dist.ProcessGroup) -> Reducer:
    if args.version == "bucketed":
        return BucketedReducer(model, group, bucket_bytes=(args.bucket_kib or 256) * 1024)
    if args.all_reduce == "ring":
        from collectives import all_reduce_ring

        return NaiveReducer(model, group, all_reduce=all_reduce_ring)
    return VERSIONS[args.version](model, group)


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Three steps next to the reference; prints the table on rank 0 and returns what is wrong."""
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    torch.manual_seed(rank)  # on purpose different on all ranks, to test broadcast_parameters
    model = Decoder().to(device, torch.float64)
    broadcast_parameters(model, group)
    reference = deepcopy(model)  # the reference runs the full global batch on one rank
    reducer = make_reducer(args, model, group)
    counter = WireCounter(ranks)
    watched = {0: counter}
    if args.profile:  # open the file in https://ui.perfetto.dev or chrome://tracing
        file = str(args.profile / f"rank{rank}.json")
        watched[2] = profile(on_trace_ready=lambda trace: trace.export_chrome_trace(file))
    errors: list[float] = []

    def compare(got: Tensor, want: Tensor) -> None:
        errors.append(((got - want).abs().max() / want.abs().max()).item())

    for step in range(3):
        batch = [[(x.to(device), y.to(device)) for x, y in part] for part in make_batch(step, ranks)]
        model.zero_grad()
        reference.zero_grad()
        with watched.get(step, nullcontext()):
            loss = train_step(model, reducer, batch[rank])
        tokens, labels = (torch.cat([pair[i] for part in batch for pair in part]) for i in (0, 1))
        want = token_loss_sum(reference, tokens, labels) / (labels != IGNORE).sum()
        want.backward()
        compare(loss, want.detach())
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            compare(p.grad, q.grad)
            p.data -= 0.1 * p.grad  # plain SGD, because Adam would hide a wrong scale
            q.data -= 0.1 * q.grad
            compare(p.data, q.data)

    sent = torch.tensor(counter.bytes, dtype=torch.float64, device=device)
    dist.all_reduce(sent, group=group)  # an integer over all ranks, even if P does not divide every tensor
    storages = [p.grad.untyped_storage() for p in reducer.names]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    gradients = sum(p.nbytes for p in reducer.names)
    messages = len(reducer.buckets) if args.all_reduce == "torch" else 0  # the ring uses sends
    last_ready = max(i for i, (what, _) in enumerate(reducer.events) if what == "ready")
    early = sum(what == "launch" for what, _ in reducer.events[:last_ready])
    least = int(args.version != "naive" and len(reducer.buckets) > 1)
    to_send = 2 * (ranks - 1) * (gradients + 2 * 8)
    rows = [  # what, predicted, measured, passed. The two scalars are the loss and its divisor, 8 bytes each.
        ("largest error against the reference", "<= 1e-10", f"{max(errors):.1e}", all(e <= 1e-10 for e in errors)),
        ("all-reduces: buckets + 2 scalars", messages + 2, counter.all_reduces, messages + 2 == counter.all_reduces),
        ("bytes sent by all ranks, 2 (P-1) G", to_send, round(sent.item()), to_send == round(sent.item())),
        ("bytes held for gradients, G", gradients, held, gradients == held),
        ("buckets sent before backward ended", f">= {least}", early, early >= least),
    ]
    if rank == 0:
        print(f"{args.version} data parallel on {ranks} rank(s), {device.type}; valid tokens by rank:", end=" ")
        print(*(sum((labels != IGNORE).sum().item() for _, labels in part) for part in batch))
        print("the last backward began with", *(f"{what} {name}," for what, name in reducer.events[:8]), "...")
        print(f"{'':36}{'predicted':>12}{'measured':>12}")
        for what, predicted, measured, _ in rows:
            print(f"{what:36}{predicted:>12}{measured:>12}")
    wrong: list[list[str]] = [[]] * ranks
    dist.all_gather_object(wrong, [f"rank {rank}: {what}" for what, _, _, right in rows if not right], group=group)
    return [line for lines in wrong for line in lines]


def main() -> None:
    args = parse_arguments()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=60), **alone)
    rank = dist.get_rank()
    wrong = demo(args, dist.group.WORLD, device)
    gc.collect()  # with a reference left, the group's threads would still run when Python ends
    dist.destroy_process_group()
    if rank == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
