"""The state of a run as full tensors by Hugging Face's names, in any layout: what checkpoint.py saves.

    own_tensors      of one owner of gradients: weights and optimizer states, unsharded over ZeRO's group
    whole_tensors    of this rank's layers and experts: unsharded over the tensor group too, one at a time
    share_of_state   the full tensors that this rank writes: each is on exactly one rank of the world
    load_full_state  the inverse, into this layout or another one
    load_masters     master weights of more bits than the weights, from a Hugging Face model

No rank ever holds all of it: a tensor is freed when the next is requested.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import paths  # noqa: F401  finds the chapters below
import torch
import torch.distributed as dist
import zero_state
from gradients import Replicated, copies_of
from mesh import Mesh
from model import Lazy, cut_tensors, join_pieces, own_names, state_buffers
from moe_llama import expert_names
from torch import Tensor, nn


def own_tensors(owner: Any) -> Iterator[tuple[str, str, Any]]:
    """(parameter, "weight" or kind of optimizer state, tensor or counter) of an owner, unsharded by ZeRO.

    Collective over its group. With ZeRO one bucket of one kind is gathered at a time, else nothing is copied.
    """
    if isinstance(owner, Replicated):
        for p, name in owner.names.items():
            yield name, "weight", p.detach()
            yield from ((name, kind, value) for kind, value in owner.optimizer.state[p].items())
        return
    owner.arrive()
    yield from ((name, "weight", tensor) for name, tensor in owner.frozen_weights())
    for index in range(len(owner.buckets)):
        yield from ((name, "weight", tensor) for name, tensor in owner.whole(index, owner.weight_shard(index)))
    wider = owner.masters[0].dtype != owner.buckets[0].params[0].dtype  # if not, an offloaded master is the weight
    for states in zero_state.gathered_states(owner):
        for name, state in states.items():
            yield from ((name, kind, value) for kind, value in state.items() if kind != "master" or wider)


def whole_tensors(owners: list[Any], model: Any, mesh: Mesh) -> Iterator[tuple[str, str, Tensor, int]]:
    """(Hugging Face's name, kind, full tensor, parts) of everything that this rank's layers and experts save.

    A tensor is freed when the next is requested. If `parts` is p, every p-th data rank has the tensor, and
    the ranks between have other experts. Collective: the ranks with the same layers iterate in step.
    """
    for name, buffer in state_buffers(model).items():
        yield own_names(model, name, mesh)[0], "weight", buffer, 1
    for owner in owners:
        parts = mesh.size("data") // (dist.get_world_size(owner.group) * copies_of(owner, mesh))
        for name, kind, value in own_tensors(owner):
            if name in model.shared and dist.get_rank(mesh.groups["ends"]) > 0:
                continue  # tied: the first stage also has it
            names = own_names(model, name, mesh)
            if not zero_state.per_element(kind):  # one value for all its experts
                yield from ((each, kind, torch.as_tensor(value), parts) for each in names)
                continue
            tensor = join_pieces(model, name, value, mesh)
            each_its_own = tensor.unbind() if expert_names(model, name) else [tensor]
            yield from ((each, kind, one, parts) for each, one in zip(names, each_its_own, strict=True))


@torch.no_grad()
def load_masters(owners: list[Any], pieces: Callable[[list[str]], Mapping[str, Tensor]]) -> None:
    """Master weights from weights of more bits than the model's; `pieces` gives this rank's, by bucket."""
    for owner in owners:
        for index, bucket in enumerate(owner.buckets):
            mine = pieces([owner.names[p] for p, _, _ in bucket.pieces()])
            owner.masters[index].copy_(zero_state.shard_of(owner, index, mine))


State = dict[str, dict[str, Any]]  # {"weights": {name: tensor}, "optimizer": {name: {kind: tensor}}}


@torch.no_grad()
def share_of_state(owners: list[Any], model: Any, mesh: Mesh) -> State:
    """A rank's share of a checkpoint, in host memory: full tensors, each on exactly one rank of the world.

    Collective. A rank holds its share, and briefly the current tensor (with ZeRO, the bucket). Of the ranks
    that have a tensor, the one with the fewest bytes so far keeps it; all count alike and send no message.
    """
    tp = mesh.sizes["tp"]
    row = dist.get_rank(mesh.groups["data"])
    column = dist.get_rank(mesh.groups["tp"])
    kept: dict[int, list[int]] = {}  # parts -> bytes so far on each rank of this rank's part
    share: State = {"weights": {}, "optimizer": {}}
    for name, kind, tensor, parts in whole_tensors(owners, model, mesh):
        held = kept.setdefault(parts, [0] * (mesh.size("data") // parts * tp))
        keeper = held.index(min(held))
        held[keeper] += tensor.nbytes
        if keeper == row // parts * tp + column:
            place = share["weights"] if kind == "weight" else share["optimizer"].setdefault(name, {})
            place[name if kind == "weight" else kind] = tensor.to("cpu", copy=True)  # it may be a view of a larger one
    return share


def full_state(owners: list[Any], model: Any, mesh: Mesh) -> State:
    """The shares of all ranks, gathered on every rank: the full model's state. For tests. Collective."""
    everyone: list[Any] = [None] * mesh.size("world")
    dist.all_gather_object(everyone, share_of_state(owners, model, mesh), group=mesh.groups["world"])
    full: State = {"weights": {}, "optimizer": {}}
    for share in everyone:
        full["weights"] |= share["weights"]
        for name, state in share["optimizer"].items():
            full["optimizer"].setdefault(name, {}).update(state)
    return full


@torch.no_grad()
def load_full_state(owners: list[Any], model: nn.Module, mesh: Mesh, full: Mapping[str, Mapping[str, Any]]) -> None:
    """Load what `full_state` returned, or what checkpoint.py opened, written in this layout or another one.

    Collective. Each tensor of `full` is read when it is needed, sliced to this rank's shard, and freed.
    """
    device: dict[str, torch.device] = {}  # of its optimizer: the weight's, or the host
    for owner in owners:
        where = next(iter(owner.names)).device if isinstance(owner, Replicated) else owner.masters[0].device
        device |= dict.fromkeys(owner.names.values(), where)
    for name, buffer in state_buffers(model).items():
        buffer.copy_(full["weights"][own_names(model, name, mesh)[0]])

    def states(name: str) -> Mapping[str, Tensor]:
        names = own_names(model, name, mesh)

        def piece(kind: str) -> Tensor:
            if not zero_state.per_element(kind):
                return full["optimizer"][names[0]][kind].to(device[name])  # where fused AdamW counts steps
            whole = Lazy(names, lambda each: full["optimizer"][each][kind])
            return cut_tensors(model, whole, mesh, [name])[name]

        return Lazy(full["optimizer"][names[0]], piece)

    for owner in owners:
        names = list(owner.names.values())
        if isinstance(owner, Replicated):
            owner.load(cut_tensors(model, full["weights"], mesh, names), Lazy(names, states))
            continue
        every = list(owner.everything.values())
        weights = cut_tensors(model, full["weights"], mesh, every)
        zero_state.load_buckets(owner, weights, Lazy(names, states))
        owner.load_frozen(weights)
