"""From gradients to new weights: chapter 02's buckets at ZeRO stage 0, chapter 03's shards at stages 1 to 3.

Every gradient has exactly one owner. Dense gradients are summed over the `data` ranks, experts' over the
ranks that hold the same experts; where these groups differ there are two owners. For all stages step.py uses
one interface, that of `Zero1`:

    zero_grad(); with micro_batch(last): ... backward(); gradient_pieces(); scale_gradients(); step(); param_groups
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import paths  # noqa: F401  finds the chapters below
import torch
import torch.distributed as dist
from gradient_reducers import BucketedReducer, broadcast_parameters
from mesh import Mesh
from model import ranks_that_hold
from moe_llama import expert_parameters
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
        broadcast_parameters(holder, group)  # the same seed gives the same weights; this makes sure
        self.names, self.group = names, group
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
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
        """Nothing is in flight after a step."""

    def load(self, weights: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> None:
        for p, name in self.names.items():
            p.copy_(weights[name])
            self.optimizer.state[p] = {kind: value.to(p.device) for kind, value in states[name].items()}


def owner_of(owners: Iterable[Any], p: nn.Parameter) -> Any:
    return next(owner for owner in owners if p in owner.names)


def local_gradient(owners: Iterable[Any], p: nn.Parameter) -> Tensor | None:
    """The gradient after backwards inside `no_sync`, on this rank: `p.grad`, or stage 1's wider buffer."""
    return getattr(owner_of(owners, p), "views", {}).get(p, p.grad) if p.requires_grad else None


def make_owners(
    config: Any,
    model: Any,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    hooks: bool = True,
    fused: Callable[..., None] | None = None,
) -> list[Any]:
    """The owners of `model`'s gradients. With `hooks=False` the pipeline says when a gradient is complete.

    `fused` is chapter 09's AdamW, which updates ZeRO's shards if they are on a device.
    """
    stage = config.zero
    bucket_bytes = int(config.bucket_mib * 2**20)
    fp32 = torch.float32
    named = {p: name for name, p in model.named_parameters()}
    # --- exercise 11.30: who sums which gradient? Two groups, and the parameters of each ---
    experts = set(expert_parameters(model).values()) if mesh.size("ep") > 1 else set()
    summed = [(mesh.groups["data"], named.keys() - experts), (mesh.groups["experts"], experts)]
    # --- end exercise ---
    owners: list[Any] = []
    for group, params in summed:
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
            "master": fp32 if config.precision == "bf16-master" else None,
            "fused": None if config.zero_offload else fused,
            "reduce_dtype": fp32 if config.reduce_dtype == "fp32" else None,
            "accumulate_dtype": fp32 if config.accumulate_dtype == "fp32" else None,
        }
        make: Any = make_overlapped if config.zero_late_gather else make_zero
        if config.zero_offload:
            make = make_offloaded
        if config.zero_shards:
            make = partial(hybrid, mesh)
            group = mesh.groups["shards"]
        elif dist.get_backend(group) == "gloo" and not any(p.is_cuda for p in params):
            options["reduce_scatter"] = ExchangeAndSum  # Gloo sends from host memory only
        if stage == 3 and params is not experts:
            options |= {"units": model.model.layers}
            del options["bucket_bytes"]  # a bucket per layer
        # Experts are already split over their own ranks: at stage 3 they stay so, the rest is sharded.
        owners.append(make(min(stage, 2) if params is experts else stage, model, own, group, **options))
    return owners


def hybrid(mesh: Mesh, stage: int, model: Any, optimizer: Any, shards: dist.ProcessGroup, **options: Any) -> Any:
    return make_hybrid(model, optimizer, shards, mesh.groups["copies"], stage=stage, **options)


def copies_of(owner: Any, mesh: Mesh) -> int:
    """How many ranks own the same shard of a ZeRO gradient's sum: one, or one in each copy of the model."""
    return mesh.size("copies") if owner.group is mesh.groups.get("shards") else 1


def runs(pieces: Iterable[tuple[str, Tensor]], holders: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The same gradients in fewer tensors: those adjacent in a flat buffer and held by equally many ranks are
    one, under the first's name. A GPU then launches one kernel for their norm, not one for each."""
    name, run = "", None
    for other, piece in pieces:
        flat = piece.view(-1) if piece.is_contiguous() else piece
        if run is not None and holders[name] == holders[other] and adjacent(run, flat):
            run = run.as_strided((run.numel() + flat.numel(),), (1,))
            continue
        if run is not None:
            yield name, run
        name, run = other, flat
    if run is not None:
        yield name, run


def adjacent(a: Tensor, b: Tensor) -> bool:
    """Whether b begins where a ends, in one buffer."""
    if a.dim() != 1 or b.dim() != 1 or a.dtype != b.dtype:
        return False
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() + a.numel() == b.storage_offset()
    )


CHUNK = 2**16  # elements whose squares a GPU sums in fp32


def norm_of(piece: Tensor) -> Tensor:
    """The norm of `piece`, in float64.

    For a float64 norm a GPU first writes a copy of 8 bytes per element: 18 bytes of traffic instead of 2, and
    4 times the memory of a bf16 gradient. So there chunks are summed in fp32 as read, then in float64.
    """
    if not piece.is_cuda or piece.dtype == torch.float64:
        return torch.linalg.vector_norm(piece, dtype=torch.float64)
    flat = piece.reshape(-1)
    full = flat.numel() // CHUNK * CHUNK
    rows = torch.linalg.vector_norm(flat[:full].view(-1, CHUNK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[full:], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.cat((rows, rest[None])), dtype=torch.float64)


@torch.no_grad()
def clip_gradients(owners: list[Any], model: nn.Module, mesh: Mesh, max_norm: float, unscale: float = 1.0) -> Tensor:
    """Scale the gradient to `max_norm` if its norm is larger (0: never). Returns its norm, the same on all
    ranks, on the device.

    All gradients are first multiplied by `unscale`, 1 / the loss scale.

    Every element of the full model's gradient counts once in the sum over the world: an element that n ranks
    hold counts 1/n on each of them.
    """
    # --- exercise 11.31: the norm of the whole model's gradient, in which every element counts once; and clip by it ---
    holders = ranks_that_hold(model, mesh)
    squares = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for owner in owners:
        copies = dist.get_world_size(owner.group) if isinstance(owner, Replicated) else copies_of(owner, mesh)
        for name, piece in runs(owner.gradient_pieces(), holders):
            squares += norm_of(piece) ** 2 / (holders[name] * copies)
    dist.all_reduce(squares, group=mesh.groups["world"])
    norm = squares.sqrt() * unscale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    if max_norm or unscale != 1.0:
        for owner in owners:
            owner.scale_gradients(factor * unscale)
    # --- end exercise ---
    return norm
