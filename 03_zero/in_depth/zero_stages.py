"""ZeRO stages 1 and 2: data parallelism where a rank stores optimizer states and gradients of its shard only.

Problem. In data parallelism all N ranks store the same weights, summed gradients and optimizer states. With
Adam in mixed precision that is 16 bytes per parameter on each rank, 12 of them states (see zero_memory.py).

Idea. One rank is enough to update an element. Flatten the parameters end to end, split them into N equal
shards, and let rank r own shard r. An all-reduce is a reduce-scatter followed by an all-gather; stop halfway:

    gradients  --reduce-scatter-->  my shard of the sum  --update-->  my shard of the weights  --all-gather-->  weights

    stored by rank 1 of 4   weights            gradients          master weights, momentum, variance
    stage 0                 ################   ################   ################   everything (chapter 02)
    stage 1  (P_os)         ################   ################   ----####--------   the states of my shard
    stage 2  (P_os+g)       ################   ----####--------   ----####--------   gradients reduced at once
    stage 3  (P_os+g+p)     ----####--------   ----####--------   ----####--------   zero3.py

Formulas, for Psi parameters, K bytes of optimizer state each, weights and gradients of 2 bytes
(Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.1, 5.2 and 7.2.1):
    stage 1   stores (2 + 2) Psi + K Psi / N    sends 2 (2 Psi) (N-1)/N, as much as plain data parallelism
    stage 2   stores 2 Psi + (2 + K) Psi / N    sends the same; (2 Psi) (N-1)/N more per further micro-batch
Psi includes padding: each bucket of parameters gets fewer than N zeros, so that N equal shards cover it.
Temporary memory comes on top. Stage 2 has one complete bucket of gradients and one in flight; in mixed
precision the update converts one bucket's shard of gradients to fp32 at a time.

Run it:
    python zero_stages.py                                            one rank, CPU or GPU
    torchrun --nproc_per_node 2 zero_stages.py --stage 2             Gloo on CPU, NCCL on GPU
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from _zero_demo import OneLineParser, Row, error_against_the_unsharded_model, measure, report, world
from torch import Tensor, nn
from zero_memory import bytes_per_parameter, bytes_sent

# N is the number of ranks, S the elements of a shard; model tensors are [B, S, H] (batch, sequence, hidden) as always.
# An elementwise update gives the same result on a slice of a parameter as on the full parameter.
# Adagrad is elementwise too, but its constructor creates states for full parameters, useless for a shard.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
# torch 2.13 gave these two collectives new names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ExchangeAndSum:
    """A reduce-scatter as sends and a local sum: the same bytes, and (N-1)/N of a buffer as temporary memory.

    Gloo has no reduce-scatter of its own. It does a full all-reduce and copies this rank's shard out, which
    sends twice (N-1)/N n. Pass this class as `reduce_scatter=` where that matters; calls look the same.
    Every rank adds the terms in the order of the ranks. Otherwise two copies of a weight that lie in different
    buckets, such as a tied embedding at the two ends of a pipeline, would drift apart.
    """

    def __init__(self, out: Tensor, flat: Tensor, *, group: dist.ProcessGroup, async_op: bool):
        ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        slices = flat.view(ranks, -1)  # [N, S]: rank r sums slice r
        self.out = out
        self.rank = rank
        self.mine = slices[rank]
        self.arrived = flat.new_empty(ranks - 1, self.mine.numel())  # this rank's own slice is not sent
        others = [other for other in range(ranks) if other != rank]
        self.works = []
        for other, buffer in zip(others, self.arrived, strict=True):
            self.works.append(dist.isend(slices[other], group=group, group_dst=other))
            self.works.append(dist.irecv(buffer, group=group, group_src=other))
        if not async_op:
            self.wait()

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()
        terms = [*self.arrived[: self.rank], self.mine, *self.arrived[self.rank :]]
        total = terms[0].to(torch.promote_types(self.out.dtype, torch.float32), copy=True)  # rounded once, at the end
        for term in terms[1:]:
            total += term
        self.out.copy_(total)  # `out` may be `mine` itself, as in a bucket


class SendToAll:
    """An all-gather as one message to each other rank: a ring's bytes, in one step instead of N - 1.

    Gloo's ring waits N - 1 times for a neighbour. Pass this class as `all_gather=` to avoid that.
    """

    def __init__(self, flat: Tensor, mine: Tensor, *, group: dist.ProcessGroup, async_op: bool):
        ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        slices = flat.view(ranks, -1)  # [N, S]
        if slices[rank].data_ptr() != mine.data_ptr():  # stage 3 stores its shard outside the flat buffer
            slices[rank].copy_(mine)
        self.works = []
        for other in range(ranks):
            if other != rank:
                self.works.append(dist.isend(mine, group=group, group_dst=other))
                self.works.append(dist.irecv(slices[other], group=group, group_src=other))
        if not async_op:
            self.wait()

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()


class StaysHere:
    """A reduce-scatter or an all-gather of one rank: sends nothing, and copies only if it is not in place."""

    def __init__(self, out: Tensor, given: Tensor, *, group: dist.ProcessGroup, async_op: bool):
        same = out.untyped_storage()._cdata == given.untyped_storage()._cdata
        if not (same and out.storage_offset() == given.storage_offset()):  # stage 3: separate tensors
            out.copy_(given)

    def wait(self) -> None:
        """Nothing is in flight."""


# On one rank these return the gradient itself. zero_hybrid.py's reduce-scatter still sends to other machines.
PLAIN_SUMS = (reduce_scatter, ExchangeAndSum)

# --------------------------------------------------------------------------------------- flattened parameters


class Bucket:
    """Parameters of one dtype and device, end to end in a flat buffer that is padded to N equal shards.

    | a a a a a | b b b | c c | - - |        N = 4 ranks, 10 elements: shards of S = 3, padded to 12
    | rank 0 | rank 1 | rank 2 | rank 3 |    a shard may begin and end inside a parameter
    """

    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup):
        ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self.params = params
        self.numel = sum(p.numel() for p in params)
        # --- exercise 3.24: equal shards, also when N does not divide the number of elements ---
        self.shard_numel = -(-self.numel // ranks)  # rounded up
        self.padded = self.shard_numel * ranks
        self.mine = slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)
        # --- end exercise ---
        self.begin: dict[nn.Parameter, int] = {}  # where each parameter begins
        for p in params:
            self.begin[p] = sum(q.numel() for q in self.begin)

    def zeros(self, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(numel, dtype=dtype or self.params[0].dtype, device=self.params[0].device)

    def view(self, flat: Tensor, param: nn.Parameter) -> Tensor:
        """The part of a flat buffer [padded] that belongs to `param`, in the parameter's shape."""
        return flat[self.begin[param] : self.begin[param] + param.numel()].view(param.shape)

    def pieces(self) -> Iterator[tuple[nn.Parameter, slice, slice]]:
        """(parameter, slice of my shard, slice of the parameter) for each with elements in my shard."""
        for p in self.params:
            first = max(self.begin[p], self.mine.start)
            last = min(self.begin[p] + p.numel(), self.mine.stop)
            if first < last:
                in_param = slice(first - self.begin[p], last - self.begin[p])
                yield p, slice(first - self.mine.start, last - self.mine.start), in_param

    def flatten(self, group: dist.ProcessGroup) -> Tensor:
        """Make the parameters views of one flat buffer, with the values of the group's rank 0.

        Without the broadcast, ranks that start from different weights would mix slices of different models.
        """
        flat = self.zeros(self.padded)
        for p in self.params:
            self.view(flat, p).copy_(p.detach())
            p.data = self.view(flat, p)
        dist.broadcast(flat, group_src=0, group=group)
        return flat


# ----------------------------------------------------------------------------------------------------------- stage 1


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


class Zero1:
    """Stage 1 (P_os): every rank has all gradients, but updates only its shard and stores only its states.

        optimizer = torch.optim.AdamW(groups_of_parameters, lr=1e-3)       # an ordinary optimizer, not used yet
        zero = Zero1(model, optimizer, group, master=torch.float32)        # takes over its class and its groups
        zero.zero_grad()
        for i, (tokens, labels) in enumerate(micro_batches):
            with zero.micro_batch(last=i == len(micro_batches) - 1):
                (loss_sum(model(tokens), labels) / valid_tokens_of_the_global_batch).backward()
        norm = zero.clip_grad_norm(1.0)
        zero.param_groups[0]["lr"] = 3e-4                                  # as with any optimizer
        zero.step()

    Gradients are summed over the group, not averaged, because the loss is already divided by the global
    number of tokens. With `master=torch.float32` the optimizer updates an fp32 copy of a bf16 model's shard.
    A frozen parameter gets rank 0's value, a tied one counts once. A trainable parameter without a gradient
    on any rank has gradient zero (torch's optimizers would skip it; here its weight decays and its momentum
    fades).

    `reduce_dtype=torch.float32` sums a bf16 model's gradients over the ranks in fp32, at twice the bytes.
    `accumulate_dtype=torch.float32` sums micro-batches in fp32 (a sum of 64 in bf16 is more than twice as far
    from float64). The stored gradients then take 4 bytes each: 4 Psi at stage 1, 4 Psi / N at stages 2 and 3.
    An exception is `no_sync()` at stages 2 and 3, where `p.grad` accumulates in the parameter's dtype.

    `fused` is an AdamW in one kernel, called like chapter 09's `adamw_`. It reads the gradient in its stored
    dtype and writes moments, master and the model's weight. `scale_gradients` passes it the factor, so the
    stored gradients stay unscaled. Each bucket then has parameters of one parameter group only. On one rank,
    which sends nothing, stage 1 has a single bucket for each group, so that its update is one kernel.

    With `hooks=False` nothing is automatic: call `start(param)` when `param.grad` is final for this step. Parameters
    in `ignored` are not managed here: experts, say, of which only some ranks of the group have copies.
    `events` records what happened since `zero_grad()`, in order. All ranks of the group must make the same calls.
    """

    stage = 1

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        *,
        master: torch.dtype | None = None,
        bucket_bytes: int = 25 * 2**20,
        hooks: bool = True,
        reduce_scatter: Callable[..., Any] = reduce_scatter,
        all_gather: Callable[..., Any] = all_gather,
        ignored: Collection[nn.Parameter] = (),
        reduce_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        fused: Callable[..., None] | None = None,
    ):
        self.module = module
        self.group = group
        self.bucket_bytes = bucket_bytes
        if dist.get_world_size(group) == 1:
            all_gather = StaysHere
            reduce_scatter = StaysHere if reduce_scatter in PLAIN_SUMS else reduce_scatter
        self.reduce_scatter, self.all_gather = reduce_scatter, all_gather  # or ExchangeAndSum, SendToAll
        self.fused = fused
        self.scale: Tensor | None = None  # the factor of the gradients, for the next fused update
        self.rounded: set[int] = set()  # buckets whose new weights the fused update has already written
        self.reduce_dtype, self.accumulate_dtype = reduce_dtype, accumulate_dtype
        left_out = set(ignored)
        self.everything = {p: name for name, p in module.named_parameters() if p not in left_out}
        self.names = {p: name for p, name in self.everything.items() if p.requires_grad}
        check_optimizer(optimizer, self.names)
        if fused is not None:
            check_fused(optimizer)
        self.param_groups = optimizer.param_groups
        self.group_of = {p: i for i, options in enumerate(self.param_groups) for p in options["params"]}
        self.hooks = hooks
        self.syncing = True
        self.finished = False
        self.events: list[tuple[str, Any]] = []
        self.buckets = self.make_buckets()
        self.bucket_of = {p: index for index, bucket in enumerate(self.buckets) for p in bucket.params}
        self.hold_weights()
        # The optimizer's copy of this rank's shard. Without `master` it is a view of the weights instead.
        self.masters = [self.own_copy(i, master or b.params[0].dtype) for i, b in enumerate(self.buckets)]
        self.segments = [self.cut(i) for i in range(len(self.buckets))]
        self.inner = [self.make_inner(type(optimizer), segments) for segments in self.segments]
        self.hold_gradients()
        self.begin()
        for p in self.names if hooks else ():
            p.register_post_accumulate_grad_hook(weakly(self.start))
        for p in self.names if not hooks and accumulate_dtype else ():  # add each micro-batch, sent or not
            p.register_post_accumulate_grad_hook(weakly(self.collect))

    def make_buckets(self) -> list[Bucket]:
        """In reverse order of registration, roughly the order in which backward completes gradients."""
        full: list[list[nn.Parameter]] = []
        filling: dict[Any, list[nn.Parameter]] = {}
        stays = self.fused is not None and self.stage == 1 and dist.get_world_size(self.group) == 1
        for p in reversed(self.names):
            kind = (p.device, p.dtype, self.group_of[p] if self.fused is not None else None)
            bucket = filling.setdefault(kind, [])
            bucket.append(p)
            if not stays and sum(q.nbytes for q in bucket) >= self.bucket_bytes:
                full.append(filling.pop(kind))
        # Inside a bucket parameters are sorted by group, so that a shard has at most one run of each group.
        return [Bucket(sorted(b, key=self.group_of.__getitem__), self.group) for b in [*full, *filling.values()]]

    def cut(self, index: int) -> list[tuple[int, slice, nn.Parameter]]:
        """My shard of a bucket as runs of one group each: (group, slice of the shard, optimizer's view)."""
        runs: list[tuple[int, slice]] = []
        for p, where, _ in self.buckets[index].pieces():
            if runs and runs[-1][0] == self.group_of[p]:
                runs[-1] = (runs[-1][0], slice(runs[-1][1].start, where.stop))
            else:
                runs.append((self.group_of[p], where))
        # The padding joins the last run: zeros with gradient zero stay zeros under every elementwise update.
        last, where = runs[-1] if runs else (0, slice(0, 0))
        runs[-1:] = [(last, slice(where.start, self.buckets[index].shard_numel))]
        return [(g, where, nn.Parameter(self.masters[index][where])) for g, where in runs]

    def make_inner(
        self, kind: Callable[..., torch.optim.Optimizer], segments: list[tuple[int, slice, nn.Parameter]]
    ) -> torch.optim.Optimizer:
        """One optimizer per bucket, so that one bucket can be updated while another is in flight."""
        return kind([{**self.param_groups[g], "params": [segment]} for g, _, segment in segments])

    def hold_weights(self) -> None:
        self.flats = [bucket.flatten(self.group) for bucket in self.buckets]
        for p in self.everything:
            if p not in self.names:  # a frozen weight is in no bucket
                dist.broadcast(p.detach(), group_src=0, group=self.group)

    def weight_shard(self, index: int) -> Tensor:
        return self.flats[index][self.buckets[index].mine]

    def own_copy(self, index: int, dtype: torch.dtype) -> Tensor:
        return self.weight_shard(index).to(dtype)

    def hold_gradients(self) -> None:
        self.gradients = [bucket.zeros(bucket.padded, self.accumulate_dtype) for bucket in self.buckets]
        self.views = {p: self.buckets[i].view(self.gradients[i], p) for p, i in self.bucket_of.items()}

    def gradient_shard(self, index: int) -> Tensor:
        """My shard of the summed gradient, after `finish()`. It is a view, so writes to it take effect."""
        return self.gradients[index][self.buckets[index].mine]

    # ---- gradients

    def begin(self) -> None:
        """Reset the state of one synchronizing backward pass."""
        self.ready: set[nn.Parameter] = set()
        self.launched: list[int] = []
        self.works: list[tuple[int, Tensor, dist.Work]] = []  # pending reductions: bucket, buffer, handle

    def zero_grad(self) -> None:
        """With hooks the first gradient of a step overwrites the buffer, so old values may stay until then.
        Without hooks autograd adds in place, so the buffer has to be zero."""
        self.scale = None
        for p, view in self.views.items():
            p.grad = None
            if not self.hooks or view.dtype != p.dtype:
                view.zero_()
            if not self.hooks and view.dtype == p.dtype:
                p.grad = view
        self.finished, self.events = False, []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate locally and send nothing. At stage 1 this costs no memory."""
        before = self.syncing
        self.syncing = False
        try:
            yield
        finally:
            self.syncing = before

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch. Stage 1 accumulates, and reduces after the last."""
        with nullcontext() if last else self.no_sync():
            yield
        if last:
            self.finish()

    def start(self, param: nn.Parameter) -> None:
        """`param.grad` is final on this rank. The hook calls this; without hooks, the caller does."""
        self.finished, late = False, self.finished
        self.collect(param)
        if not self.syncing:
            return
        if param in self.ready or (self.stage == 1 and late):
            raise RuntimeError(
                f"the gradient of {self.names[param]!r} became final twice: call finish() after each backward that "
                "sends, and at stage 1 run all micro-batches but the last inside no_sync()"
            )
        self.events.append(("ready", self.names[param]))
        self.ready.add(param)
        self.after_ready()

    def collect(self, param: nn.Parameter) -> None:
        """Put this micro-batch's gradient into the buffer at once, while it is in the cache. Autograd adds
        later ones in place if the dtypes are equal; to a wider buffer they are added here."""
        view = self.views[param]
        if view.dtype != param.dtype and param.grad is not None:
            view += param.grad
            param.grad = None
        elif param.grad is not None and param.grad is not view:
            param.grad = view.copy_(param.grad)

    def after_ready(self) -> None:
        """Start reductions during backward, in one order on all ranks, whatever the order of gradients."""
        while (index := len(self.launched)) < len(self.buckets) and self.ready.issuperset(self.buckets[index].params):
            self.launch(index)

    def fill(self, index: int) -> Tensor:
        """The gradients of a bucket as one flat buffer [padded]; zeros where there is none."""
        for p in self.buckets[index].params:
            view = self.views[p]
            self.collect(p)
            if p.grad is None and view.dtype == p.dtype:  # no gradient: the view has the last step's sum
                p.grad = view.zero_()
        return self.gradients[index].to(self.reduce_dtype or self.gradients[index].dtype)  # a copy only if it differs

    def launch(self, index: int) -> None:
        """Start a bucket's reduction. A gradient that is not final is sent as it is, a missing one as 0."""
        mine = self.buckets[index].mine
        flat = self.fill(index)
        # --- exercise 3.25: sum over the group, and receive only my shard of the sum, in place ---
        work = self.reduce_scatter(flat[mine], flat, group=self.group, async_op=True)
        # --- end exercise ---
        self.works.append((index, flat, work))
        self.launched.append(index)
        if len(self.works) > 2:  # two in flight keep the links busy; more would only take more buffers
            self.retire()
        self.events.append(("reduce", index))

    def retire(self) -> None:
        """Wait for the oldest reduction."""
        index, flat, work = self.works.pop(0)
        work.wait()
        if flat is not self.gradients[index]:  # a copy, because it was summed in another dtype
            self.gradient_shard(index).copy_(flat[self.buckets[index].mine])

    def finish(self) -> None:
        """Start the reductions that have not started, and wait for all. Every rank calls it after each
        synchronizing backward pass. Until then some may not be summed yet, and `step` and `clip_grad_norm`
        raise.
        """
        if self.finished and self.stage == 1:  # a second reduction would count this rank's shard twice
            return
        for index in range(len(self.buckets)):
            if index not in self.launched:
                self.launch(index)
        while self.works:
            self.retire()
        self.finished = True
        self.begin()

    # ---- norm, update

    def check_finished(self) -> None:
        """RuntimeError if a reduction is pending or missing: some weights would be silently off."""
        if not self.finished:
            raise RuntimeError(
                f"stage {self.stage}: gradients are not summed yet; call finish() after backward, on every rank, or "
                "use micro_batch(last=...), which does"
            )

    def check_in_place(self) -> None:
        """RuntimeError if a weight is no longer in its flat buffer, where the update would not reach it."""
        for flat, bucket in zip(self.flats, self.buckets, strict=True):
            for p in bucket.params:
                if p.untyped_storage()._cdata != flat.untyped_storage()._cdata:
                    raise RuntimeError(
                        f"{self.names[p]!r} was moved or cast after sharding, so updates would not reach it; move and "
                        "cast the model first"
                    )

    def gradient_pieces(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter's name, the part of its summed gradient that this rank owns).

        Together the ranks yield each element once, without padding; the norm sums the squares over the group.
        """
        self.check_finished()
        for index, bucket in enumerate(self.buckets):
            for p, where, _ in bucket.pieces():
                yield self.names[p], self.gradient_shard(index)[where]

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """The norm of all gradients, the same on all ranks. Above `max_norm`, scale them to it.

        Same result as `torch.nn.utils.clip_grad_norm_` on the unsharded gradients.
        """
        # --- exercise 3.26: the norm of a vector of which I hold one shard ---
        squares = torch.zeros((), dtype=torch.float64, device=self.buckets[0].params[0].device)
        for _, piece in self.gradient_pieces():
            squares += torch.linalg.vector_norm(piece, dtype=torch.float64) ** 2
        dist.all_reduce(squares, group=self.group)
        norm = squares.sqrt()
        # --- end exercise ---
        if self.scale is not None:  # a factor that the fused update has yet to apply
            norm = norm * self.scale.abs()
        self.scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply this rank's shards. The fused update multiplies when it reads them."""
        if self.fused is not None:
            like = self.masters[0]
            wide = torch.promote_types(like.dtype, torch.float32)
            factor = torch.as_tensor(factor, dtype=wide, device=like.device)
            self.scale = factor if self.scale is None else self.scale * factor
            return
        for index in range(len(self.buckets)):
            self.gradient_shard(index).mul_(factor)

    @torch.no_grad()
    def leave_out_if(self, broken: Tensor) -> None:
        """If `broken`, the next step() changes no weight and no moment. The host need not wait for the value.

        Only the fused update can do this; the step still counts.
        """
        assert self.fused is not None
        self.scale_gradients(torch.where(broken, torch.nan, 1.0))

    @torch.no_grad()
    def step(self) -> None:
        """Update my shards bucket by bucket; a bucket's all-gather overlaps the next bucket's update."""
        self.check_finished()
        self.check_in_place()
        works: list[Any] = []
        # --- exercise 3.27: update shard by shard, and overlap the all-gathers with the updates ---
        for index in range(len(self.buckets)):
            self.update(index)
            works += self.publish(index)
        for work in works:
            work.wait()
        # --- end exercise ---

    def update(self, index: int) -> None:
        inner = self.inner[index]
        gradient = self.gradient_shard(index)
        if self.fused is None:
            gradient = gradient.to(self.masters[index].dtype)  # in mixed precision a copy, of one bucket only
        for options, (g, where, segment) in zip(inner.param_groups, self.segments[index], strict=True):
            options.update((key, value) for key, value in self.param_groups[g].items() if key != "params")
            if self.fused is None:
                segment.grad = gradient[where]
            else:
                self.update_in_one_kernel(index, options, segment, where)
        if self.fused is None:
            inner.step()
            for _, _, segment in self.segments[index]:
                segment.grad = None
        self.events.append(("update", index))

    def update_in_one_kernel(self, index: int, options: dict[str, Any], segment: nn.Parameter, where: slice) -> None:
        """The states have the names of torch's AdamW, so they are saved and loaded as without the kernel."""
        assert self.fused is not None
        state = self.inner[index].state[segment]
        mine = self.weight_shard(index)
        if not state:
            wide = torch.promote_types(segment.dtype, torch.float32)
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(segment, dtype=wide) for _ in range(2))
        state["step"] = state["step"].cpu() + 1  # a loaded counter may be on the device: reading it waits
        self.fused(
            segment.detach(),
            self.gradient_shard(index)[where],
            state["exp_avg"],
            state["exp_avg_sq"],
            step=int(state["step"]),
            lr=float(options["lr"]),
            betas=options["betas"],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            scale=self.scale,
            copy=None if mine.dtype == segment.dtype else mine[where],
        )
        self.rounded.add(index)

    def round_weights(self, index: int) -> None:
        """Copy the new weights to the model's dtype, unless the fused update has already written them."""
        mine = self.weight_shard(index)
        if mine.dtype != self.masters[index].dtype and index not in self.rounded:  # equal dtypes share memory
            mine.copy_(self.masters[index])
        self.rounded.discard(index)

    def publish(self, index: int) -> list[Any]:
        """Start the all-gather of the updated shards into the flat buffer behind the parameters."""
        self.round_weights(index)
        self.events.append(("gather", index))
        return [self.all_gather(self.flats[index], self.weight_shard(index), group=self.group, async_op=True)]

    def arrive(self) -> None:
        """Wait for weights that are in flight after step(). Here there are none; zero_overlap.py has some."""

    # ---- what is stored, and full tensors

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Optimizer states of this rank's shard, by segment, with master weights where they are a copy."""
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for index, inner in enumerate(self.inner):
            copied = self.masters[index].dtype != self.buckets[index].params[0].dtype
            for _, _, segment in self.segments[index]:
                states[segment] = {**inner.state.get(segment, {}), **({"master": segment.data} if copied else {})}
        return states

    def held(self) -> dict[str, list[Tensor]]:
        """Every tensor that stays on this rank between two steps."""
        states = [value for state in self.state.values() for value in state.values() if isinstance(value, Tensor)]
        return {"weights": [*self.everything], "gradients": self.gradients, "optimizer states": states}

    def whole(self, index: int, shard: Tensor) -> Iterator[tuple[str, Tensor]]:
        """All-gather the shards [S] of a bucket and split the result into parameters."""
        bucket = self.buckets[index]
        flat = shard.new_empty(bucket.padded)
        all_gather(flat, shard, group=self.group)
        for p in bucket.params:
            yield self.names[p], bucket.view(flat, p).clone()

    def full_gradients(self) -> dict[str, Tensor]:
        """The full summed gradient of each trainable parameter on every rank: for tests, not for training."""
        return dict(pair for i in range(len(self.buckets)) for pair in self.whole(i, self.gradient_shard(i)))

    def frozen_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The frozen parameters in full, one after the other."""
        yield from ((name, p.detach()) for p, name in self.everything.items() if p not in self.names)

    def load_frozen(self, weights: dict[str, Tensor]) -> None:
        """Copy the weights of frozen parameters, by name."""
        for p, name in self.everything.items():
            if p not in self.names:
                p.copy_(weights[name])

    def full_weights(self) -> dict[str, Tensor]:
        """Each parameter in full, on every rank. zero_state.py adds the optimizer states."""
        weights = {name: tensor.clone() for name, tensor in self.frozen_weights()}
        return weights | dict(pair for i in range(len(self.buckets)) for pair in self.whole(i, self.weight_shard(i)))


# ----------------------------------------------------------------------------------------------------------- stage 2


class Zero2(Zero1):
    """Stage 2 (P_os+g): one new idea. A rank frees the gradients outside its shard once they are reduced.

    A full buffer exists only during its reduction, while the backward pass computes the next bucket's
    gradients. Each micro-batch is reduced and *added* to the shard. `no_sync()` saves those reductions but
    gives up what this stage has won: full gradients stay on the rank until the next synchronizing backward
    pass, in the parameters' dtype whatever `accumulate_dtype` is.
    """

    stage = 2

    def hold_gradients(self) -> None:
        self.gradients = [bucket.zeros(bucket.shard_numel, self.accumulate_dtype) for bucket in self.buckets]

    def gradient_shard(self, index: int) -> Tensor:
        return self.gradients[index]

    def collect(self, param: nn.Parameter) -> None:
        """Does nothing: a gradient is added to its shard when it has been reduced."""

    def zero_grad(self) -> None:
        self.scale = None
        for p in self.names:
            p.grad = None
        for shard in self.gradients:
            shard.zero_()
        self.finished, self.events = False, []

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch. It is reduced at once; no full gradient is stored."""
        yield
        self.finish()

    def fill(self, index: int) -> Tensor:
        """Move the gradients from the parameters into a new buffer, once the previous one is reduced."""
        while self.works:
            self.retire()
        bucket = self.buckets[index]
        like = bucket.params[0]  # at stage 3 it may have no values here, but has its dtype and device
        flat = torch.empty(bucket.padded, dtype=self.reduce_dtype or like.dtype, device=like.device)
        flat[bucket.numel :].zero_()  # only the padding: the copies below write all other elements
        for p in bucket.params:
            view = bucket.view(flat, p)
            view.zero_() if p.grad is None else view.copy_(p.grad)
            p.grad = None
        return flat

    def retire(self) -> None:
        index, flat, work = self.works.pop(0)
        # --- exercise 3.28: keep my shard of this micro-batch, together with those of the earlier ones ---
        work.wait()
        self.gradients[index].add_(flat[self.buckets[index].mine])
        # --- end exercise ---


# ---------------------------------------------------------------------------------------------------- what is refused


def check_optimizer(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> None:
    """ValueError, naming a parameter, if the optimizer cannot be sharded or has other parameters."""
    kind = type(optimizer).__name__
    mine = {p for options in optimizer.param_groups for p in options["params"]}
    first = next(iter(names.values()), None)
    if first is None:
        raise ValueError("the module has no trainable parameter; set requires_grad on at least one")
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(known.__name__ for known in ELEMENTWISE)
        raise ValueError(f"{kind} cannot be sharded: a shard holds only a slice of {first!r}; use {known}")
    if optimizer.state:
        raise ValueError(f"{kind} has states already (of {first!r}, say); give a new one, then load_full_state_dict()")
    for option in ("differentiable", "capturable"):
        if any(options.get(option) for options in optimizer.param_groups):
            raise ValueError(f"{kind}({option}=True) cannot be honoured for shards of {first!r}; leave it out")
    for option in ("momentum", "amsgrad", "centered"):  # each adds or removes a kind of state
        if len({bool(options.get(option)) for options in optimizer.param_groups}) > 1:
            raise ValueError(
                f"{kind} has groups with {option} and groups without, so that parameters beside {first!r} have other "
                "kinds of state than it, which the ranks could not save alike; use it in all groups or in none"
            )
    for p, name in names.items():
        if p not in mine:
            raise ValueError(f"{kind} does not have the parameter {name!r}; add it to a group, or freeze it")
    for p in mine:
        if p.requires_grad and p not in names:
            raise ValueError(f"{kind} has a parameter of shape {list(p.shape)} that is not in the module; take it out")


def check_fused(optimizer: torch.optim.Optimizer) -> None:
    """ValueError if a fused AdamW cannot replace this optimizer."""
    if type(optimizer) is not torch.optim.AdamW:
        raise ValueError(f"fused is an AdamW, the optimizer is {type(optimizer).__name__}; leave fused out")
    for option in ("amsgrad", "maximize"):
        if any(options.get(option) for options in optimizer.param_groups):
            raise ValueError(f"AdamW({option}=True) is not in the fused kernel; leave one of them out")


# ------------------------------------------------------------------------------------------------------------- demo


def one_of(make: Callable[..., Zero1], stage: int, *of: Any, units: Any, master: torch.dtype) -> Zero1:
    """A stage for `measure`, with everything in one bucket; `measure` passes `units` at every stage."""
    return make(*of, master=master, bucket_bytes=25 * 2**20)


def demo(stage: int, make: Callable[..., Zero1], group: dist.ProcessGroup, device: torch.device) -> list[Row]:
    """Rows of the table for one stage: three steps next to the reference, then bytes in mixed precision."""
    ranks = dist.get_world_size(group)
    worst = error_against_the_unsharded_model(make, group, device)
    held, psi, kept, sent = measure(stage, group, device, partial(one_of, make))
    must_hold = round(psi * bytes_per_parameter(stage, ranks))
    must_send = bytes_sent(stage, ranks, 2 * psi, kept)
    return [
        ("largest error against the reference (SGD, float64)", "<= 1e-10", f"{worst:.1e}", worst <= 1e-10),
        (f"bytes held, bf16 and AdamW, Psi = {psi:,}", must_hold, held, must_hold == held),
        ("bytes sent in a step (payload x formula)", f"{must_send:.0f}", f"{sent:.0f}", abs(must_send - sent) < 1e-6),
    ]


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--stage", type=int, choices=[1, 2], default=2, help="stage 3 is in zero3.py")
    args = parser.parse_checked()
    kind = {1: Zero1, 2: Zero2}[args.stage]
    with world() as (group, device):
        rows = demo(args.stage, partial(kind, bucket_bytes=2**17), group, device)
        if dist.get_rank(group) == 0:
            print(f"stage {args.stage} on {dist.get_world_size(group)} {device.type} rank(s)")
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
