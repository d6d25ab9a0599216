"""From gradients to new weights: chapter 02's buckets at ZeRO stage 0, chapter 03's shards at stages 1 to 3.

The trainer sees one surface, that of `Zero1`, whatever the stage:

    zero_grad(); with micro_batch(last): ... backward(); gradient_pieces(); scale_gradients(); step(); param_groups

Every gradient has exactly one owner. Dense parameters are summed over the `data` ranks, experts over the ranks that
hold the same experts; where these differ there are two owners side by side (`Together`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import chapters  # noqa: F401  finds the chapters below
import torch
import torch.distributed as dist
import zero_state
from gradient_reducers import BucketedReducer, broadcast_parameters
from mesh import Mesh
from model import Lazy, cross_entropy_sum, cut_tensors, join_pieces, own_names, ranks_that_hold, state_buffers
from moe_llama import expert_names, expert_parameters
from parallel_block import sync_replicated_gradients
from pipeline_executor import Pipeline
from schedules import Schedule
from torch import Tensor, nn
from zero3 import make_zero
from zero_hybrid import make_hybrid
from zero_offload import make_offloaded
from zero_overlap import make_overlapped
from zero_stages import ExchangeAndSum


class Replicated:
    """Stage 0: each rank has all gradients and all optimizer states."""

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        bucket_bytes: int,
        hooks: bool,
    ) -> None:
        holder = nn.ParameterList(names)
        broadcast_parameters(holder, group)  # the same seed gave the same weights; this makes it certain
        self.names, self.group = names, group
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.reducer = BucketedReducer(names, group, bucket_bytes=bucket_bytes, hooks=hooks)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        if last:
            yield
            self.reducer.finish()
        else:
            with self.reducer.no_sync():
                yield

    def no_sync(self) -> Any:
        return self.reducer.no_sync()

    def start(self, param: nn.Parameter) -> None:
        self.reducer.start(param)

    def gradient_pieces(self) -> Iterator[tuple[str, Tensor]]:
        for p, name in self.names.items():
            if p.grad is not None:
                yield name, p.grad

    def full_gradients(self) -> dict[str, Tensor]:
        return dict(self.gradient_pieces())

    def scale_gradients(self, factor: Tensor) -> None:
        for _, gradient in self.gradient_pieces():
            gradient.mul_(factor)

    def step(self) -> None:
        self.optimizer.step()

    def arrive(self) -> None:
        """Nothing is on its way after a step."""

    def load(self, weights: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> None:
        for p, name in self.names.items():
            p.copy_(weights[name])
            self.optimizer.state[p] = {kind: value.to(p.device) for kind, value in states[name].items()}


class Together:
    """Several owners as one. Each has its parameters and its group."""

    def __init__(self, owners: list[Any]) -> None:
        self.owners, self.alone = owners, False
        self.owner = {p: owner for owner in owners for p in owner.names}
        self.names = {p: name for owner in owners for p, name in owner.names.items()}
        self.param_groups = [group for owner in owners for group in owner.param_groups]

    def zero_grad(self) -> None:
        for owner in self.owners:
            owner.zero_grad()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for owner in [] if self.alone else self.owners:
                stack.enter_context(owner.micro_batch(last))
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave this rank's own gradients in `p.grad`; nothing is sent, not even in the last."""
        with ExitStack() as stack:
            for owner in self.owners:
                stack.enter_context(owner.no_sync())
            before, self.alone = self.alone, True
            yield
            self.alone = before

    def start(self, param: nn.Parameter) -> None:
        if not self.alone:
            self.owner[param].start(param)

    def full_gradients(self) -> dict[str, Tensor]:
        return {name: tensor for owner in self.owners for name, tensor in owner.full_gradients().items()}

    def scale_gradients(self, factor: Tensor) -> None:
        for owner in self.owners:
            owner.scale_gradients(factor)

    def step(self) -> None:
        for owner in self.owners:
            owner.step()

    def arrive(self) -> None:
        """Wait for new weights that are still on their way. Before the groups are destroyed."""
        for owner in self.owners:
            owner.arrive()

    def local_gradient(self, p: nn.Parameter) -> Tensor | None:
        """What backwards inside `no_sync` have left on this rank: in `p.grad`, or in stage 1's wider buffer."""
        return getattr(self.owner[p], "views", {}).get(p, p.grad)


class Staged:
    """Chapter 06's executor with the stages of this rank. A gradient goes to its owner as soon as no stage of this rank
    adds to it any more."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[tuple[int, int], nn.Module],
        model: Any,
        engine: Together,
        mesh: Mesh,
        example: Tensor,
    ) -> None:
        self.stages, self.engine, self.mesh = list(stages.values()), engine, mesh
        self.shared = [model.get_parameter(name) for name in model.shared]
        self.pipeline = Pipeline(
            schedule,
            dict(stages),
            mesh.groups["pp"],
            loss=lambda logits, target: cross_entropy_sum(model, logits, target[0]) / target[1],
            example=example,
            on_stage_done=self.done,
        )
        self.micro_batches, self.forward_only = schedule.micro_batches, self.pipeline.forward_only

    def step(self, tokens: list[Tensor], targets: list[tuple[Tensor, Tensor]]) -> Tensor:
        """All micro-batches of a step, forward and backward. `targets` are labels and what to divide their losses by.
        Returns the sum of the losses that this rank computed: those of the last stage, elsewhere zero."""
        self.unfinished = Counter(p for stage in self.stages for p in stage.parameters())
        loss = self.pipeline.step(tokens, targets)
        for p in self.shared:
            dist.all_reduce(p.grad, group=self.mesh.groups["ends"])  # the embedding's share and the output layer's
            self.engine.start(p)
        return loss

    def done(self, stage: nn.Module) -> None:
        """The last weight gradient of `stage` is in place."""
        if self.mesh.size("tp") > 1:  # some are shares: of a norm, which saw a piece of the sequence, or of a K/V head
            sync_replicated_gradients(stage, self.mesh.groups["tp"])
        for p in stage.parameters():
            self.unfinished[p] -= 1
            if not self.unfinished[p] and all(p is not other for other in self.shared):
                self.engine.start(p)


def make_engine(
    stage: int,
    model: Any,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    bucket_bytes: int,
    hooks: bool = True,
    master: torch.dtype | None = None,
    variant: str = "",
    **sums: torch.dtype | None,
) -> Together:
    """The owners of the gradients of `model`. With `hooks=False` the pipeline says when a gradient is complete.

    `variant` is one of chapter 03's: "offload", "late gather" or "copies"; `sums` are its reduce_dtype and
    accumulate_dtype.
    """
    named = {p: name for name, p in model.named_parameters()}
    experts = set(expert_parameters(model).values()) if mesh.size("ep") > 1 else set()
    owners: list[Any] = []
    for group, params in ((mesh.groups["data"], named.keys() - experts), (mesh.groups["experts"], experts)):
        if not params:
            continue
        groups = [{**g, "params": [p for p in g["params"] if p in params]} for g in optimizer.param_groups]
        own: Any = type(optimizer)([g for g in groups if g["params"]])  # type: ignore[call-arg]
        if stage == 0:
            owners.append(Replicated({p: n for p, n in named.items() if p in params}, own, group, bucket_bytes, hooks))
            continue
        options: dict[str, Any] = {
            "ignored": named.keys() - params,
            "hooks": hooks,
            "bucket_bytes": bucket_bytes,
            "master": master,
            **sums,
        }
        make: Any = {"offload": make_offloaded, "late gather": make_overlapped}.get(variant, make_zero)
        if variant == "copies":
            make, group = partial(hybrid, mesh), mesh.groups["shards"]
        elif dist.get_backend(group) == "gloo":
            options["reduce_scatter"] = ExchangeAndSum
        if stage == 3 and params is not experts:
            options |= {"units": model.model.layers}
            del options["bucket_bytes"]  # a bucket per layer
        # Experts are cut over their own ranks already: at stage 3 they stay where they are, the rest is sharded.
        owners.append(make(min(stage, 2) if params is experts else stage, model, own, group, **options))
    return Together(owners)


def hybrid(mesh: Mesh, stage: int, model: Any, optimizer: Any, shards: dist.ProcessGroup, **options: Any) -> Any:
    return make_hybrid(model, optimizer, shards, mesh.groups["copies"], stage=stage, **options)


def copies_of(owner: Any, mesh: Mesh) -> int:
    """How many ranks own the same slice of a ZeRO gradient's sum: one, or one in each copy of the model."""
    return mesh.size("copies") if owner.group is mesh.groups.get("shards") else 1


@torch.no_grad()
def clip_gradients(engine: Together, model: nn.Module, mesh: Mesh, max_norm: float, unscale: float = 1.0) -> float:
    """Scale the gradient to `max_norm` if its norm is larger (0: never). Returns its norm, the same on all ranks.

    All gradients are multiplied by `unscale` first: 1 / the loss scale.

    Every element of the whole model's gradient counts once in the sum over the world: what several ranks hold counts
    on each of them for one part in so many.
    """
    holders = ranks_that_hold(model, mesh)
    squares = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for owner in engine.owners:
        copies = dist.get_world_size(owner.group) if isinstance(owner, Replicated) else copies_of(owner, mesh)
        for name, piece in owner.gradient_pieces():
            squares += torch.linalg.vector_norm(piece, dtype=torch.float64) ** 2 / (holders[name] * copies)
    dist.all_reduce(squares, group=mesh.groups["world"])
    norm = squares.sqrt() * unscale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    if max_norm or unscale != 1.0:
        engine.scale_gradients(factor * unscale)
    return norm.item()


# ------------------------------------------------------------------- the state: whole tensors, one after the other


def own_tensors(owner: Any) -> Iterator[tuple[str, str, Any]]:
    """(parameter, "weight" or kind of optimizer state, tensor or counter) of an owner, without ZeRO's cuts.

    Collective over its group. With ZeRO one bucket of one kind is there at a time, otherwise nothing new.
    """
    if isinstance(owner, Replicated):
        for p, name in owner.names.items():
            yield name, "weight", p.detach()
            yield from ((name, kind, value) for kind, value in owner.optimizer.state[p].items())
        return
    owner.arrive()
    for index in range(len(owner.buckets)):
        yield from ((name, "weight", tensor) for name, tensor in owner.whole(index, owner.weight_shard(index)))
    wider = owner.masters[0].dtype != owner.buckets[0].params[0].dtype  # if not, an offloaded master is the weight
    for states in zero_state.gathered_states(owner):
        for name, state in states.items():
            yield from ((name, kind, value) for kind, value in state.items() if kind != "master" or wider)


def whole_tensors(engine: Together, model: Any, mesh: Mesh) -> Iterator[tuple[str, str, Tensor, int]]:
    """(Hugging Face's name, kind, whole tensor, parts) of everything this rank's layers and experts have to save.

    A tensor is here until the next is asked for. With `parts` of p every p-th data rank has it, and the ranks between
    have other experts. Collective: the ranks that have the same layers go through it in step.
    """
    for name, buffer in state_buffers(model).items():
        yield own_names(model, name, mesh)[0], "weight", buffer, 1
    for owner in engine.owners:
        parts = mesh.size("data") // (dist.get_world_size(owner.group) * copies_of(owner, mesh))
        for name, kind, value in own_tensors(owner):
            if name in model.shared and dist.get_rank(mesh.groups["ends"]) > 0:
                continue  # tied: the first stage has it too
            names = own_names(model, name, mesh)
            if not zero_state.per_element(kind):  # one number for all its experts
                yield from ((each, kind, torch.as_tensor(value), parts) for each in names)
                continue
            tensor = join_pieces(model, name, value, mesh)
            each_its_own = tensor.unbind() if expert_names(model, name) else [tensor]
            yield from ((each, kind, one, parts) for each, one in zip(names, each_its_own, strict=True))


@torch.no_grad()
def load_masters(engine: Together, pieces: Callable[[list[str]], Mapping[str, Tensor]]) -> None:
    """Masters from weights of more bits than the model's; `pieces` gives this rank's, of a bucket at a time."""
    for owner in engine.owners:
        for index, bucket in enumerate(owner.buckets):
            mine = pieces([owner.names[p] for p, _, _ in bucket.pieces()])
            owner.masters[index].copy_(zero_state.shard_of(owner, index, mine))


State = dict[str, dict[str, Any]]  # {"weights": {name: tensor}, "optimizer": {name: {kind: tensor}}}


@torch.no_grad()
def share_of_state(engine: Together, model: Any, mesh: Mesh) -> State:
    """What this rank writes of a checkpoint, in host memory: whole tensors, each on exactly one rank of the world.

    Collective. A rank holds its share, and for a moment the tensor (with ZeRO, the bucket) that comes by. A tensor goes
    to the rank with the fewest bytes so far, of those that have it; all of them count alike and need no message.
    """
    tp, row, column = mesh.sizes["tp"], dist.get_rank(mesh.groups["data"]), dist.get_rank(mesh.groups["tp"])
    kept: dict[int, list[int]] = {}  # parts -> bytes so far on each rank of this rank's part
    share: State = {"weights": {}, "optimizer": {}}
    for name, kind, tensor, parts in whole_tensors(engine, model, mesh):
        held = kept.setdefault(parts, [0] * (mesh.size("data") // parts * tp))
        keeper = held.index(min(held))
        held[keeper] += tensor.nbytes
        if keeper == row // parts * tp + column:
            place = share["weights"] if kind == "weight" else share["optimizer"].setdefault(name, {})
            place[name if kind == "weight" else kind] = tensor.to("cpu", copy=True)  # it may be a view of a larger one
    return share


def full_state(engine: Together, model: Any, mesh: Mesh) -> State:
    """The shares of all ranks of the world on every one of them: the whole model's state. For tests. Collective."""
    everyone: list[Any] = [None] * mesh.size("world")
    dist.all_gather_object(everyone, share_of_state(engine, model, mesh), group=mesh.groups["world"])
    full: State = {"weights": {}, "optimizer": {}}
    for share in everyone:
        full["weights"] |= share["weights"]
        for name, state in share["optimizer"].items():
            full["optimizer"].setdefault(name, {}).update(state)
    return full


def whole_model(mine: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """What all stages of the pipeline have, from what this rank's has; on every rank, in host memory. For tests, which
    compare gradients. Collective."""
    everyone: list[Any] = [None] * mesh.size("pp")
    dist.all_gather_object(everyone, {name: tensor.cpu() for name, tensor in mine.items()}, group=mesh.groups["pp"])
    return {name: tensor for stage in everyone for name, tensor in stage.items()}


@torch.no_grad()
def load_full_state(engine: Together, model: nn.Module, mesh: Mesh, full: Mapping[str, Mapping[str, Any]]) -> None:
    """Take over what `full_state` gave, or what checkpoint.py opened, written in this layout or another one.

    Collective. Of `full` a tensor is asked for when its turn comes, cut to this rank's piece, and dropped.
    """
    device: dict[str, torch.device] = {}  # where its optimizer is: beside the weight, or on the host
    for owner in engine.owners:
        where = next(iter(owner.names)).device if isinstance(owner, Replicated) else owner.masters[0].device
        device |= dict.fromkeys(owner.names.values(), where)
    for name, buffer in state_buffers(model).items():
        buffer.copy_(full["weights"][own_names(model, name, mesh)[0]])

    def states(name: str) -> Mapping[str, Tensor]:
        names = own_names(model, name, mesh)

        def piece(kind: str) -> Tensor:
            if not zero_state.per_element(kind):
                return full["optimizer"][names[0]][kind].to(device[name])  # fused AdamW counts its steps there
            whole = Lazy(names, lambda each: full["optimizer"][each][kind])
            return cut_tensors(model, whole, mesh, [name])[name]

        return Lazy(full["optimizer"][names[0]], piece)

    for owner in engine.owners:
        names = list(owner.names.values())
        load = owner.load if isinstance(owner, Replicated) else partial(zero_state.load_buckets, owner)
        load(cut_tensors(model, full["weights"], mesh, names), Lazy(names, states))
