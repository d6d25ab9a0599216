"""The state of a run as whole tensors by Hugging Face's names, whatever layout holds it: what checkpoint.py saves.

    own_tensors      of one owner of gradients: weights and optimizer states without ZeRO's cuts
    whole_tensors    of this rank's layers and experts: without tensor parallelism's either, one after the other
    share_of_state   of these the ones that this rank writes: each is on exactly one rank of the world
    load_full_state  the way back, into this layout or another one
    load_masters     masters of more bits than the weights, from a Hugging Face model

No rank ever holds all of it: a tensor is there until the next is asked for.
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
    """(parameter, "weight" or kind of optimizer state, tensor or counter) of an owner, without ZeRO's cuts.

    Collective over its group. With ZeRO one bucket of one kind is there at a time, otherwise nothing new.
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
    """(Hugging Face's name, kind, whole tensor, parts) of everything this rank's layers and experts have to save.

    A tensor is here until the next is asked for. With `parts` of p every p-th data rank has it, and the ranks between
    have other experts. Collective: the ranks that have the same layers go through it in step.
    """
    for name, buffer in state_buffers(model).items():
        yield own_names(model, name, mesh)[0], "weight", buffer, 1
    for owner in owners:
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
def load_masters(owners: list[Any], pieces: Callable[[list[str]], Mapping[str, Tensor]]) -> None:
    """Masters from weights of more bits than the model's; `pieces` gives this rank's, of a bucket at a time."""
    for owner in owners:
        for index, bucket in enumerate(owner.buckets):
            mine = pieces([owner.names[p] for p, _, _ in bucket.pieces()])
            owner.masters[index].copy_(zero_state.shard_of(owner, index, mine))


State = dict[str, dict[str, Any]]  # {"weights": {name: tensor}, "optimizer": {name: {kind: tensor}}}


@torch.no_grad()
def share_of_state(owners: list[Any], model: Any, mesh: Mesh) -> State:
    """What this rank writes of a checkpoint, in host memory: whole tensors, each on exactly one rank of the world.

    Collective. A rank holds its share, and for a moment the tensor (with ZeRO, the bucket) that comes by. A tensor goes
    to the rank with the fewest bytes so far, of those that have it; all of them count alike and need no message.
    """
    tp, row, column = mesh.sizes["tp"], dist.get_rank(mesh.groups["data"]), dist.get_rank(mesh.groups["tp"])
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
    """The shares of all ranks of the world on every one of them: the whole model's state. For tests. Collective."""
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
    """Take over what `full_state` gave, or what checkpoint.py opened, written in this layout or another one.

    Collective. Of `full` a tensor is asked for when its turn comes, cut to this rank's piece, and dropped.
    """
    device: dict[str, torch.device] = {}  # where its optimizer is: beside the weight, or on the host
    for owner in owners:
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

    for owner in owners:
        names = list(owner.names.values())
        if isinstance(owner, Replicated):
            owner.load(cut_tensors(model, full["weights"], mesh, names), Lazy(names, states))
            continue
        every = list(owner.everything.values())
        weights = cut_tensors(model, full["weights"], mesh, every)
        zero_state.load_buckets(owner, weights, Lazy(names, states))
        owner.load_frozen(weights)
