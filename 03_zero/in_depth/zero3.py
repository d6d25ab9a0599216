"""ZeRO stage 3: a rank stores its shard of everything, and all-gathers weights layer by layer to use them.

Problem. After stage 2 each rank still stores all weights, 2 Psi bytes, but computes with one layer at a time.

Idea. Split the model into units: each layer is one, the rest is the root unit. A unit's weights are one flat
buffer, of which each rank owns a shard. Gather it before the unit computes and drop it afterwards. Backward
gathers it again to compute the gradient of the unit's input. While one unit computes, prefetch the next:

    forward             backward
    gather  0 1 2 3   . 2 1 0              .  unit 3, the last, stays gathered: backward needs it first
    compute   0 1 2 3   3 2 1 0
    drop        0 1 2     3 2 1 0
    reduce                3 2 1 0          reduce-scatter of the gradients, as in stage 2

    between steps                 rank 0 | w0 | g0 | states 0 |      rank 1 | w1 | g1 | states 1 |   ...
    while unit n computes         rank 0 | w0 | g0 | states 0 | all of unit n | all of unit n+1 | all of the root

How weights are freed. Each parameter is a view of its unit's flat buffer. Dropping the unit resizes the
*storage* of the buffer to zero bytes. Views that autograd has saved keep the storage object alive but not its
bytes, so they cannot keep a unit by accident. When the storage is filled again, all views see it. (With a new
tensor for each gather, autograd would keep them all, and stage 3 would store more than stage 2.)

Formulas, for Psi parameters, K bytes of state each, weights and gradients of 2 bytes (arXiv 1910.02054, 5.3 and 7.2):
    stores  (2 + 2 + K) Psi / N                          each unit padded to a multiple of N
    peak    + 2 (root) + 2 (two units)                   gathered weights
            + 2 (root) + 2 (two units)                   gradients: of the unit that computes, and of one being reduced
    sends   3 (2 Psi) (N-1)/N                            less (2 kept)(N-1)/N for the last unit and the root
PyTorch's FSDP has the same mechanism: Zhao et al. 2023 (arXiv 2304.11277), sections 3.2 and 3.3.

Run it:
    python zero3.py                                      one rank, CPU or GPU
    torchrun --nproc_per_node 2 zero3.py                 Gloo on CPU, NCCL on GPU; prints the order of events
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _zero_demo import OneLineParser, report, world
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from zero_stages import Bucket, Zero1, Zero2, all_gather, demo

# N is the number of ranks, S the elements of a rank's shard.
# What a dropped parameter still offers. Everything else would read memory that has been freed.
ALLOWED_WITHOUT_VALUES = {
    *("grad", "shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "grad_fn", "_version"),
    *("is_cuda", "is_meta", "is_sparse", "itemsize", "nbytes", "names"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
    *("size", "dim", "numel", "nelement", "stride", "element_size"),
    *("is_floating_point", "is_complex", "untyped_storage"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "__hash__", "is_contiguous"),
}


class Dropped(nn.Parameter):
    """The class of a parameter whose unit is not gathered: using it raises an error that names it."""

    described: str  # its name, and its unit's

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):  # an attribute
            name = func.__self__.__name__
        if name not in ALLOWED_WITHOUT_VALUES:
            culprit = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, Dropped))
            raise RuntimeError(
                f"{name}() needs {culprit.described} outside its unit, where it has no values; compute it inside the "
                "unit's forward, or leave the parameter to the root unit by not naming its module in `units`"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Unit:
    """Weights that are gathered and dropped together, in `buckets` of one dtype, trainable or frozen."""

    def __init__(self, index: int, name: str, module: nn.Module):
        self.index = index
        self.name = name
        self.module = module
        self.trainable: list[int] = []  # indices of its buckets in Zero3.buckets
        self.buckets: list[Bucket] = []
        self.flats: list[Tensor] = []  # [padded] while gathered; no storage while dropped
        self.shards: list[Tensor] = []  # [S] my shard of the weights, stored all the time
        self.works: list[dist.Work] = []
        self.gathered = False


class AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs. Its backward runs when their gradients are complete: the unit is done."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.callback()
        return None, *gradients


class Zero3(Zero2):
    """Stage 3 (P_os+g+p): one new idea on top of stage 2. Full weights, too, exist only while they are used.

        zero = Zero3(model, optimizer, group, units=model.layers, master=torch.float32)

    and then as in `Zero1`. `units` are the modules to gather and drop, in the order of forward. All other
    parameters (embedding, last norm, head) are the root unit, gathered from the start of the model's forward
    to the end of backward. The units must use only their own parameters and be called on all ranks alike.
    Recomputation (torch.utils.checkpoint, both kinds) works around and inside units. A unit may run again.

    keep      leave the last unit and the root gathered between forward and backward, which needs them first
    prefetch  gather the next unit while this one computes

    Outside forward and backward parameters have no values: use `full_weights()`. `no_sync()` costs as much as
    in stage 2 and saves no all-gather. `events` also has ("gather" | "wait" | "drop", unit) and a unit's
    ("forward", unit), ("forward done", unit), ("backward", unit), ("backward done", unit).
    """

    stage = 3

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        *,
        units: Iterable[nn.Module],
        keep: bool = True,
        prefetch: bool = True,
        **options: Any,
    ):
        self.keep = keep
        self.prefetching = prefetch
        self.in_backward = False
        self.units = [Unit(i, f"unit {i}", unit) for i, unit in enumerate(units)]
        self.root = Unit(len(self.units), "root", module)
        super().__init__(module, optimizer, group, **options)  # master=, hooks=, reduce_scatter=, all_gather=
        for unit in [*self.units, self.root]:
            unit.module.register_forward_pre_hook(partial(self.before_forward, unit), with_kwargs=True)
            unit.module.register_forward_hook(partial(self.after_forward, unit))

    # ---- which unit owns a parameter

    def make_buckets(self) -> list[Bucket]:
        """One bucket for each unit, dtype and device: the root, then the units from last to first."""
        names = self.everything
        every = set(self.module.parameters())
        owner: dict[nn.Parameter, Unit] = {}
        for unit in self.units:
            for p in unit.module.parameters():
                if p not in every:
                    raise ValueError(
                        f"{unit.name} has a parameter of shape {list(p.shape)} that the module does not have"
                    )
                if p not in names:  # ignored
                    continue
                if p in owner:
                    raise ValueError(
                        f"parameter {names[p]!r} is in {owner[p].name} and in {unit.name}; a shared parameter belongs "
                        "to the root: leave both modules out of `units`"
                    )
                owner[p] = unit
        for unit in self.units:
            inside = set(unit.module.modules())
            for path, other in self.module.named_modules():
                for p in () if other in inside else other.parameters(recurse=False):
                    if owner.get(p) is unit:
                        raise ValueError(
                            f"parameter {names[p]!r} of {unit.name} is also used outside it, by "
                            f"{path or 'the model'!r}; leave the module of {unit.name} out of `units`"
                        )
        for p in names:
            owner.setdefault(p, self.root)
        buckets: list[Bucket] = []
        for unit in [self.root, *reversed(self.units)]:
            kinds: dict[Any, list[nn.Parameter]] = {}
            for p in names:
                if owner[p] is unit:
                    kinds.setdefault((p.requires_grad, p.dtype, p.device), []).append(p)
            for (trainable, *_), params in kinds.items():
                unit.buckets.append(Bucket(sorted(params, key=lambda p: self.group_of.get(p, 0)), self.group))
                if trainable:
                    unit.trainable.append(len(buckets))
                    buckets.append(unit.buckets[-1])
        for p, unit in owner.items():
            p.described = f"parameter {names[p]!r} of {unit.name}"  # type: ignore[attr-defined]
        return buckets

    def hold_weights(self) -> None:
        """Store my shard of each unit and free the rest."""
        self.weight_shards: dict[Bucket, Tensor] = {}
        for unit in [*self.units, self.root]:
            for bucket in unit.buckets:
                unit.flats.append(bucket.flatten(self.group))
                unit.shards.append(unit.flats[-1][bucket.mine].clone())
                self.weight_shards[bucket] = unit.shards[-1]
            unit.gathered = True
            self.drop(unit)

    def weight_shard(self, index: int) -> Tensor:
        return self.weight_shards[self.buckets[index]]

    # ---- gather and drop

    def request(self, unit: Unit) -> None:
        """Start to gather a unit, unless it is gathered or in flight."""
        if unit.gathered:
            return
        unit.gathered = True
        self.events.append(("gather", unit.name))
        for flat, shard in zip(unit.flats, unit.shards, strict=True):
            # --- exercise 3.29: give the buffer its bytes back and fill it, without waiting ---
            flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
            unit.works.append(self.all_gather(flat, shard, group=self.group, async_op=True))
            # --- end exercise ---

    def gather(self, unit: Unit) -> None:
        """Gather a unit and wait for it, so that it can compute."""
        self.request(unit)
        if unit.works:
            self.events.append(("wait", unit.name))
        while unit.works:
            unit.works.pop().wait()
        for bucket in unit.buckets:
            for p in bucket.params:
                p.__class__ = nn.Parameter

    def drop(self, unit: Unit) -> None:
        """Free a unit's bytes, although autograd may keep views of it."""
        if not unit.gathered:
            return
        while unit.works:  # prefetched but never used
            unit.works.pop().wait()
        self.events.append(("drop", unit.name))
        unit.gathered = False
        # --- exercise 3.30: free the memory although views of it are alive ---
        for flat in unit.flats:
            flat.untyped_storage().resize_(0)
        # --- end exercise ---
        for bucket in unit.buckets:
            for p in bucket.params:
                p.__class__ = Dropped

    def drop_all(self) -> None:
        for unit in [*self.units, self.root]:
            self.drop(unit)
        self.in_backward = False

    def request_next(self, unit: Unit, step: int) -> None:
        """Gather the unit after this one (step 1, forward) or before it (step -1, backward) while this one computes."""
        # --- exercise 3.31: which unit does forward need next, and which one backward? ---
        first = 0 if step == 1 else len(self.units) - 1
        following = first if unit is self.root else unit.index + step
        if self.prefetching and 0 <= following < len(self.units):
            self.request(self.units[following])
        # --- end exercise ---

    # ---- hooks

    def before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit is self.root:
            self.in_backward = False
        self.gather(unit)
        if not self.in_backward:  # in a recomputation, backward prefetches instead
            self.request_next(unit, 1)
        self.events.append(("forward", unit.name))
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, form = tree_flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if at:
            through = AfterBackward.apply(partial(self.after_backward, unit), *(leaves[i] for i in at))
            for i, tensor in zip(at, through, strict=True):
                leaves[i] = tensor
        return tree_unflatten(leaves, form)

    def after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        self.events.append(("forward done", unit.name))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.before_backward, unit))
        if self.in_backward:  # a recomputation: backward of this unit follows at once
            return
        last = unit is self.root or unit.index == len(self.units) - 1
        if not (self.keep and last and torch.is_grad_enabled()):
            self.drop(unit)

    def before_backward(self, unit: Unit, gradient: Tensor) -> None:
        """Hook: the gradient of an output of the unit is complete."""
        self.in_backward = True
        self.gather(unit)
        self.request_next(unit, -1)
        self.events.append(("backward", unit.name))

    def after_backward(self, unit: Unit) -> None:
        """The gradients of the unit's inputs are complete, and so are the gradients of its weights.

        The reduction starts here, not in the hook of the last gradient. If a rank does not use a parameter,
        that hook never runs there, but all ranks must call their collectives in the same order.
        """
        self.events.append(("backward done", unit.name))
        self.drop(unit)
        if self.syncing and self.hooks:
            for index in unit.trainable:
                self.launch(index)

    # ---- what differs from stage 2

    def after_ready(self) -> None:
        """Does nothing: see `after_backward`."""

    def finish(self) -> None:
        super().finish()
        self.drop_all()
        for p, name in self.names.items():
            if p.grad is not None:
                raise RuntimeError(f"the gradient of {name!r} came after the backward of its unit had ended")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self.drop_all()

    def step(self) -> None:
        self.check_finished()
        self.drop_all()  # gathered weights would be out of date after the update
        super().step()

    def check_in_place(self) -> None:
        """Does nothing: a weight without values cannot be moved."""

    def arrive(self) -> None:
        """Drop gathered units: loading a state changes the shards only."""
        self.drop_all()

    def publish(self, index: int) -> list[dist.Work]:
        """Send nothing: the next forward gathers the new weights."""
        self.round_weights(index)
        return []

    def frozen_weights(self) -> Iterator[tuple[str, Tensor]]:
        for bucket, shard in self.weight_shards.items():
            if bucket.params[0] not in self.names:
                flat = shard.new_empty(bucket.padded)
                all_gather(flat, shard, group=self.group)
                yield from ((self.everything[p], bucket.view(flat, p).clone()) for p in bucket.params)

    def load_frozen(self, weights: dict[str, Tensor]) -> None:
        names = self.everything
        for bucket, shard in self.weight_shards.items():
            for p, mine, theirs in bucket.pieces():
                if p not in self.names:
                    shard[mine] = weights[names[p]].flatten()[theirs].to(shard)

    def held(self) -> dict[str, list[Tensor]]:
        return super().held() | {"weights": [*self.everything, *self.weight_shards.values()]}


def make_zero(
    stage: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    *,
    units: Iterable[nn.Module] = (),
    **options: Any,
) -> Zero1:
    """The sharded optimizer of a stage. `units` (for stage 3) may be given at every stage."""
    if type(stage) is not int or stage not in (1, 2, 3):  # not "2", not True
        raise ValueError(f"ZeRO stage {stage!r} does not exist; use 1, 2 or 3 (stage 0 is plain data parallelism)")
    units = list(units)
    if stage == 3:
        if not units:
            raise ValueError("stage 3 without units would gather all weights at once; give units=model.layers, say")
        return Zero3(module, optimizer, group, units=units, **options)
    return (Zero1, Zero2)[stage - 1](module, optimizer, group, **options)


# ------------------------------------------------------------------------------------------------------------- demo


def main() -> None:
    OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False).parse_checked()
    with world() as (group, device):
        made: list[Zero3] = []

        def make(module: Any, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, **options: Any) -> Zero3:
            made.append(Zero3(module, optimizer, group, units=module.layers, **options))
            return made[-1]

        rows = demo(3, make, group, device)
        events = made[0].events  # of the last step
        units = len(made[0].units)
        made.clear()  # it refers to the group, which is destroyed next
        early = all(
            events.index(("gather", f"unit {n + 1}")) < events.index(("forward done", f"unit {n}"))
            for n in range(units - 1)
        )
        rows.append(("unit n+1 is asked for before unit n has computed", "True", early, early))
        if dist.get_rank(group) == 0:
            print(f"stage 3 on {dist.get_world_size(group)} {device.type} rank(s); the last step was")
            said = ", ".join(f"{what} {who}".replace(" ", "\0") for what, who in events if what != "ready")
            print("\n".join(f"  {line}" for line in textwrap.wrap(said.replace(",\0", ", "), 116)).replace("\0", " "))
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
