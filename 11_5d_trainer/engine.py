"""From gradients to new weights: chapter 02's buckets at ZeRO stage 0, chapter 03's shards at stages 1 to 3.

The trainer sees one surface, that of `Zero1`, whatever the stage:

    zero_grad(); with micro_batch(last): ... backward(); gradient_pieces(); scale_gradients(); step(); param_groups
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import chapters  # noqa: F401  finds the chapters below
import torch
import torch.distributed as dist
import zero_state
from data_parallel import BucketedReducer, broadcast_parameters
from mesh import Mesh
from model import cut_tensors, gather_tensors, share_of_norm
from torch import Tensor, nn
from zero import ExchangeAndSum
from zero3 import make_zero


class Replicated:
    """Stage 0: each rank has all gradients and all optimizer states."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, bucket_bytes: int
    ) -> None:
        broadcast_parameters(model, group)  # the same seed gave the same weights; this makes it certain
        self.names = {p: name for name, p in model.named_parameters()}
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.reducer = BucketedReducer(model, group, bucket_bytes=bucket_bytes)

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

    def gradient_pieces(self) -> Iterator[tuple[str, Tensor]]:
        for p, name in self.names.items():
            if p.grad is not None:
                yield name, p.grad

    def scale_gradients(self, factor: Tensor) -> None:
        for _, gradient in self.gradient_pieces():
            gradient.mul_(factor)

    def step(self) -> None:
        self.optimizer.step()

    def full_state(self) -> dict[str, Any]:
        state = {name: dict(self.optimizer.state[p]) for p, name in self.names.items()}
        return {"weights": {name: p.detach() for p, name in self.names.items()}, "optimizer": state}

    @torch.no_grad()
    def load_full_state(self, full: dict[str, Any]) -> None:
        for p, name in self.names.items():
            p.copy_(full["weights"][name])
            state = full["optimizer"][name]
            self.optimizer.state[p] = {k: v if v.dim() == 0 else v.to(p.device) for k, v in state.items()}


def make_engine(
    stage: int, model: Any, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, bucket_bytes: int
) -> Any:
    """The owner of the gradients of `model`, which it sums over `group` (data and context ranks)."""
    if stage == 0:
        return Replicated(model, optimizer, group, bucket_bytes)
    options: dict[str, Any] = {} if stage == 3 else {"bucket_bytes": bucket_bytes}  # stage 3 has a bucket per layer
    if dist.get_backend(group) == "gloo":
        options["reduce_scatter"] = ExchangeAndSum
    return make_zero(stage, model, optimizer, group, units=model.model.layers, **options)


@torch.no_grad()
def clip_gradients(engine: Any, model: nn.Module, mesh: Mesh, max_norm: float) -> float:
    """Scale the gradient to `max_norm` if its norm is larger (0: never). Returns its norm, the same on all ranks.

    Every element of the whole model's gradient counts once: a piece that several tensor ranks hold counts for its
    share on each, and the slices of ZeRO are summed over the ranks that own them.
    """
    share = share_of_norm(model, mesh)
    squares = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for name, piece in engine.gradient_pieces():
        squares += share[name] * torch.linalg.vector_norm(piece, dtype=torch.float64) ** 2
    dist.all_reduce(squares, group=mesh.groups["tp"])
    if not isinstance(engine, Replicated):
        dist.all_reduce(squares, group=mesh.groups["data"])
    norm = squares.sqrt()
    if max_norm:
        engine.scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.item()


def full_state(engine: Any, model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """Weights and optimizer states, whole, by Hugging Face's names: the same whatever the layout. Collective."""
    state = engine.full_state() if isinstance(engine, Replicated) else zero_state.full_state_dict(engine)
    kinds = {kind for values in state["optimizer"].values() for kind in values}
    optimizer: dict[str, dict[str, Tensor]] = {name: {} for name in state["optimizer"]}
    for kind in sorted(kinds):
        values = {name: torch.as_tensor(held[kind]) for name, held in state["optimizer"].items()}
        for name, tensor in (values if kind == "step" else gather_tensors(model, values, mesh)).items():
            optimizer[name][kind] = tensor
    return {"weights": gather_tensors(model, state["weights"], mesh), "optimizer": optimizer}


def load_full_state(engine: Any, model: nn.Module, mesh: Mesh, full: dict[str, Any]) -> None:
    """Take over what `full_state` gave, in this layout or another one."""
    optimizer: dict[str, dict[str, Tensor]] = {name: {} for name in full["optimizer"]}
    for kind in next(iter(full["optimizer"].values())):
        values = {name: held[kind] for name, held in full["optimizer"].items()}
        for name, tensor in (values if kind == "step" else cut_tensors(model, values, mesh)).items():
            optimizer[name][kind] = tensor
    state = {"weights": cut_tensors(model, full["weights"], mesh), "optimizer": optimizer}
    if isinstance(engine, Replicated):
        engine.load_full_state(state)
    else:
        zero_state.load_full_state_dict(engine, state)
