"""One step of one rank, from micro-batches to new weights. Read `train_step` first, and from there down.

micro-batches of this rank, this rank's part of each sequence                       `shard_batch`
  -> valid tokens of the global batch (one number, all-reduced)                     `valid_tokens`
  for each: loss = sum over its tokens / that number; backward                      `forward_and_backward`
      gradients are sent in the last one (ZeRO 2, 3: in each), bucket by bucket while backward runs
  (with a pipeline: all of them in the order of the schedule)                       `pipeline_passes`
every gradient is now the sum over all ranks that hold the same weights
norm of the full gradient, clip, AdamW                                              `clip_gradients`, `update_weights`

On a GPU with chapter 09's kernels the host does not wait for the step (`launch_step`). The device leaves out
a step whose gradient is not finite, and the host gets loss and norm while the next step runs (`Reading`).
"""

import dataclasses
import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import paths  # noqa: F401  finds the chapters below
import torch
import torch.distributed as dist
from data import Sampler
from full_state import load_masters
from gradient_reducers import global_valid_tokens
from gradients import clip_gradients, local_gradient, make_owners, owner_of
from hf import read_weights
from llama import LlamaConfig
from mesh import Mesh, make_mesh
from model import Stage, build, cross_entropy_sum, cut_tensors, held_names, is_adapter, my_positions
from moe_layer import moe_layers, set_loss_scale, update_biases
from ops import AUTOCAST, FP8, Documents, end_step, leave_out_step, make_parts, weight_dtype
from options import Config, RunEnds
from parallel_block import sync_replicated_gradients
from pipeline_executor import Pipeline, layers_of
from precision_policies import LossScaler
from schedules import Schedule
from torch import Tensor, nn
from training_step import adamw

Batch = tuple[Tensor, ...]  # tokens and labels, [B, S] each; with --documents also places in documents


class NotFinite(RunEnds):
    """A gradient is NaN or infinite. Says at which step, on which rank, in which parameter."""


@dataclasses.dataclass
class Trainer:
    """What one rank trains with."""

    config: Config
    mesh: Mesh
    model: Any  # this rank's part of it
    owners: list[Any]  # each sums the gradients of its parameters over its group (gradients.py)
    positions: Tensor  # of this rank's tokens in the sequence, [S / cp]
    device: torch.device
    scaler: LossScaler  # a scale of 1, except in fp16
    documents: Documents  # of the current micro-batch, with --documents
    pipeline: Pipeline | None = None
    unfinished: Counter[nn.Parameter] = dataclasses.field(default_factory=Counter)  # pending contributions
    broken: Tensor | None = None  # on the device: whether a gradient was ever not finite (`launch_step`)


# ------------------------------------------------------------------------------------------------------- one step


def train_step(me: Trainer, batches: list[Batch]) -> tuple[float, float]:
    """One step on the global batch. Returns its loss per token and the norm of its gradient, before clipping.

    If the norm is not finite the weights stay as they are.
    """
    loss, norm = gradient_step(me, batches)
    if math.isfinite(found := float(norm)):
        update_weights(me)
    else:
        forget_step(me)
    return loss.item(), found


def gradient_step(me: Trainer, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """The clipped gradient of the global batch. Returns its loss per token and the norm before clipping."""
    batches = [shard_batch(me, batch) for batch in batches]
    zero_grad(me)
    share = 1 / len(batches)  # of a micro-batch in the load-balancing loss; all have the same size
    set_loss_scale(me.model, share * me.scaler.value)
    loss = forward_and_backward(me, batches, valid_tokens(me, batches)) * me.scaler.inverse
    dist.all_reduce(loss, group=me.mesh.groups["replica"])  # for the log: each rank has its own tokens' loss
    return loss, clip_gradients(me.owners, me.model, me.mesh, me.config.clip, me.scaler.inverse)


def shard_batch(me: Trainer, batch: Batch) -> Batch:
    """Tokens and labels of this rank's part of the sequence, [B, S] -> [B, S / cp], on its device. Positions
    in documents stay full, on the host, because they define what attention sees."""
    tokens, labels = (sent_to(me.device, x)[:, me.positions] for x in batch[:2])
    return tokens, labels, *batch[2:]


def zero_grad(me: Trainer) -> None:
    for owner in me.owners:
        owner.zero_grad()


def valid_tokens(me: Trainer, batches: list[Batch]) -> Tensor:
    """Number of labels with a target, over all micro-batches and all ranks with different tokens."""
    labels = torch.cat([batch[1].flatten() for batch in batches])
    return global_valid_tokens(labels, me.mesh.groups["batch"])


def forward_and_backward(me: Trainer, batches: list[Batch], valid: Tensor, send: bool = True) -> Tensor:
    """Gradients of the loss per token of the global batch, times the loss scale. Returns this rank's loss.

    Without `send` the gradients are not summed over ranks.
    """
    valid = valid / me.scaler.value
    total = torch.zeros((), dtype=torch.float64, device=me.device)
    if me.pipeline:
        with summed_gradients(me, last=True, send=send):
            total += pipeline_passes(me, me.pipeline, batches, valid)
        return total
    for i, batch in enumerate(batches):
        with summed_gradients(me, last=i == len(batches) - 1, send=send):
            loss = loss_sum(me, *batch) / valid
            loss.backward()
        total += loss.detach()
    return total


@contextmanager
def summed_gradients(me: Trainer, last: bool, send: bool = True) -> Iterator[None]:
    """Context of a micro-batch's forward and backward. After the last one, gradients are sums over ranks."""
    with ExitStack() as stack:
        for owner in me.owners:
            stack.enter_context(owner.micro_batch(last) if send else owner.no_sync())
        yield


def loss_sum(me: Trainer, tokens: Tensor, labels: Tensor, places: Tensor | None = None) -> Tensor:
    """Sum of the losses of this rank's tokens in a micro-batch."""
    positions = me.positions
    if places is not None:
        me.documents.begin(places)
        positions = sent_to(me.device, places)[:, positions]  # [B, S / cp], from 0 in each document
    if me.config.fpdt_chunks:
        return me.model(tokens, positions, labels)
    with precision(me):
        if me.model.parts.linear_cross_entropy is not None:
            return me.model(tokens, positions, labels)
        return cross_entropy_sum(me.model, me.model(tokens, positions), labels)


def precision(me: Trainer) -> Any:
    low = AUTOCAST.get(me.config.precision)
    # ZeRO-3 frees weights that are not needed; autocast's cache would keep a copy of each until forward ends.
    return torch.autocast(me.device.type, low, cache_enabled=me.config.zero < 3) if low else nullcontext()


def pipeline_passes(me: Trainer, pipeline: Pipeline, batches: list[Batch], valid: Tensor) -> Tensor:
    """All micro-batches of a step in the order of the schedule (chapter 06), forward and backward.

    Returns the sum of the losses that this rank computed, which is zero except on the last stage.
    """
    shared = [me.model.get_parameter(name) for name in me.model.shared]  # by the first and the last stage
    me.unfinished = Counter([p for stage in pipeline.stages.values() for p in stage.parameters()] + shared)
    with precision(me):
        loss = pipeline.step([tokens for tokens, *_ in batches], [(labels, valid) for _, labels, *_ in batches])
    for p in shared:
        if p.requires_grad:
            dist.all_reduce(p.grad, group=me.mesh.groups["ends"])  # embedding + output layer
        complete_one(me, p)
    return loss


def stage_done(me: Trainer, stage: nn.Module) -> None:
    """Called by the executor after the last weight gradient of `stage`; more actions may follow."""
    if me.mesh.sizes["tp"] > 1:  # some are partial sums: of norms (of a part of the sequence) or K/V heads
        sync_replicated_gradients(stage, me.mesh.groups["tp"])
    for p in stage.parameters():
        complete_one(me, p)


def complete_one(me: Trainer, p: nn.Parameter) -> None:
    """Pass a gradient to its owner as soon as nothing else on this rank will add to it."""
    me.unfinished[p] -= 1
    if not me.unfinished[p] and p.requires_grad:
        owner_of(me.owners, p).start(p)


def update_weights(me: Trainer) -> None:
    for owner in me.owners:
        owner.step()
    end_step(me.model.parts)
    if moe_layers(me.model):
        update_biases(me.model, me.mesh.groups["all tokens"])


def wait_for_weights(me: Trainer) -> None:
    """Wait for new weights that are in flight. Call it before the groups are destroyed."""
    for owner in me.owners:
        owner.arrive()


def forget_step(me: Trainer) -> None:
    """Discard a left-out step's token counts, which move experts' biases, and what would set fp8's scales."""
    leave_out_step(me.model.parts)
    for layer in moe_layers(me.model):
        layer.step_counts.zero_()


def who_is_not_finite(me: Trainer, batches: list[Batch]) -> str:
    """Name the rank and the parameter that a NaN or infinite gradient came from. Collective.

    After the reduction every rank has it, so forward and backward are repeated without one. Backward
    propagates a NaN to earlier layers, so of the parameters that have one the last is named.
    """
    batches = [shard_batch(me, batch) for batch in batches]
    zero_grad(me)
    loss = forward_and_backward(me, batches, valid_tokens(me, batches), send=False)
    mine = {name: local_gradient(me.owners, p) for name, p in me.model.named_parameters()}
    bad = [name for name, gradient in mine.items() if gradient is not None and not gradient.isfinite().all()]
    zero_grad(me)
    forget_step(me)
    here = f"rank {dist.get_rank()}: gradient of {bad[-1]}" if bad else ""
    if bad and not loss.isfinite():
        here += ", from a loss that is not finite"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    return "; ".join(text for text in everyone if text) or "in the sum over the ranks only"


@torch.no_grad()
def validate(me: Trainer, sampler: Sampler) -> float:
    """Loss per token over the first `eval_samples` held-out samples, split over the data-parallel ranks."""
    dp = me.mesh.sizes["dp"]
    place = me.mesh.place["dp"]
    at_once = me.pipeline.schedule.micro_batches if me.pipeline else 1
    every = sampler.held_out(me.config.eval_samples, me.config.micro_batch, place, dp, at_once)
    batches = [shard_batch(me, batch) for batch in every]
    total = torch.zeros((), dtype=torch.float64, device=me.device)
    me.model.eval()  # validation tokens must not move the experts' biases
    if me.pipeline:
        one = torch.ones((), device=me.device)
        for some in (batches[i : i + at_once] for i in range(0, len(batches), at_once)):
            with precision(me):
                total += me.pipeline.forward_only([t for t, *_ in some], [(labels, one) for _, labels, *_ in some])
    else:
        for batch in batches:
            total += loss_sum(me, *batch)
    me.model.train()
    dist.all_reduce(total, group=me.mesh.groups["replica"])
    return (total / valid_tokens(me, batches)).item()


# ------------------------------------------------------------------------- on a GPU: the host does not wait for it


def launch_step(me: Trainer, batches: list[Batch], since: torch.cuda.Event | None = None) -> "Reading":
    """`train_step` on a GPU without waiting for it (`reads_late`). The `Reading` has loss and norm, and the
    seconds since the end of the step before, or since now.

    If a norm is not finite, this step and all launched before the host reads it leave the weights unchanged.
    """
    since = since or moment()
    loss, norm = gradient_step(me, batches)
    broken = ~norm.isfinite()
    me.broken = broken if me.broken is None else me.broken | broken
    for owner in me.owners:
        owner.leave_out_if(me.broken)
    update_weights(me)
    return Reading(torch.stack((loss, norm)), since)


def reads_late(me: Trainer) -> bool:
    """Whether the host may read a step's loss and norm while the next step runs. Then the device itself must
    keep a gradient that is not finite out of the weights (chapter 09's AdamW does, in ZeRO's buffers), and
    nothing on the host may depend on the norm: no loss scale, no --on-nan skip, no experts' biases, no scales
    of fp8 (which wait at the end of a step themselves)."""
    c = me.config
    depends = me.scaler.dynamic or c.on_nan == "skip" or c.precision in FP8 or moe_layers(me.model)
    fused = all(getattr(owner, "fused", None) is not None for owner in me.owners)
    return me.device.type == "cuda" and fused and not depends


class Reading:
    """Values in flight from the device to the host. `values` waits for this copy, not for later work."""

    def __init__(self, numbers: Tensor, since: torch.cuda.Event | None = None) -> None:
        self.numbers = numbers
        self.since = since
        self.done = None
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.done = moment()

    def values(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return self.numbers.tolist()

    def seconds(self) -> float:
        """By the device's clock, from `since` until the copy was complete."""
        assert self.since is not None and self.done is not None
        self.done.synchronize()
        return 1e-3 * self.since.elapsed_time(self.done)


def moment() -> torch.cuda.Event:
    """An event at this place in the device's queue."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def sent_to(device: torch.device, x: Tensor) -> Tensor:
    """x on the device. A copy to a GPU is asynchronous, from pinned memory, and the host does not wait."""
    pinned = x.pin_memory() if device.type == "cuda" and not x.is_cuda else x
    return pinned.to(device, non_blocking=True)


# ----------------------------------------------------------------------------------------------- what it is made of


def make_trainer(
    config: Config, sizes: LlamaConfig, device: torch.device, optimizer: Any = adamw, start_from: str = ""
) -> Trainer:
    """Lay out the ranks and build this rank's model. `optimizer(model, lr)` makes what ZeRO may take over.

    `start_from` names a Hugging Face model to take the first weights from.
    """
    schedule = config.pipeline(dist.get_world_size(), sizes.layers)
    mesh = make_mesh(*config.layout(sizes, dist.get_world_size()), timeout=config.timeout)
    positions = my_positions(config.seq_len, mesh, config.cp_kind, config.fpdt_chunks).to(device)
    documents = Documents()
    mine: dict[tuple[int, int], range] = {}  # with a pipeline: (direction, stage) -> layers
    if schedule:
        held = schedule.stages_of(mesh.place["pp"])
        mine = {key: layers_of(key[1], schedule.stages, sizes.layers) for key in held}
    layers = [layer for each in mine.values() for layer in each] if schedule else None
    parts = make_parts(
        mesh,
        kernels=kernels_on(config, device),
        precision=config.precision,
        cp_kind=config.cp_kind,
        recompute=config.recompute,
        device=device,
        documents=documents if config.documents else None,
    )
    model: Any = build(config, sizes, mesh, parts, layers, device)
    if config.compile:
        for block in model.model.layers.children():  # all are alike, so one compiled program serves all
            block.compile()
    whole = load_weights(model, mesh, start_from) if start_from else {}
    built = optimizer(model, config.lr)
    for group in built.param_groups:
        if "betas" in group:
            group["betas"] = (config.beta1, config.beta2)
        if group["weight_decay"]:
            group["weight_decay"] = config.weight_decay
    owners = make_owners(config, model, built, mesh, not schedule, fused_adamw(config, device, built))
    if start_from and config.precision == "bf16-master" and not sizes.lora_rank:  # files have no adapters
        load_masters(owners, lambda names: cut_tensors(model, whole, mesh, names))
    # All ranks decide together to leave a step out, since the weights of all ranks depend on it.
    fp16 = config.precision == "fp16"
    scaler = LossScaler(mesh.groups["world"], config.loss_scale if fp16 else 1.0, dynamic=fp16, patience=2**31)
    me = Trainer(config, mesh, model, owners, positions, device, scaler, documents)
    if schedule:
        me.pipeline = make_pipeline(me, schedule, {key: Stage(model, each, positions) for key, each in mine.items()})
    return me


def load_weights(model: nn.Module, mesh: Mesh, folder: str) -> Mapping[str, Tensor]:
    """Load this rank's shards of a Hugging Face model's weights. Returns the full weights, read lazily."""
    whole = read_weights(folder, {name for name in held_names(model, mesh) if not is_adapter(name)})
    theirs = [name for name, _ in model.named_parameters() if not is_adapter(name)]
    for name, piece in cut_tensors(model, whole, mesh, theirs).items():
        model.get_parameter(name).detach().copy_(piece)
    return whole


def make_pipeline(me: Trainer, schedule: Schedule, stages: dict[tuple[int, int], nn.Module]) -> Pipeline:
    """Chapter 06's executor with the stages of this rank."""
    config = me.config
    model = me.model
    length = len(me.positions) // (config.tp if config.sequence_parallel else 1)
    hidden = (config.micro_batch, length, model.config.hidden)
    return Pipeline(
        schedule,
        stages,
        me.mesh.groups["pp"],
        loss=lambda logits, target: cross_entropy_sum(model, logits, target[0]) / target[1],
        example=torch.empty(hidden, dtype=weight_dtype(config), device=me.device),
        on_stage_done=partial(stage_done, me),
    )


def fused_adamw(config: Config, device: torch.device, optimizer: torch.optim.Optimizer) -> Any:
    """Chapter 09's AdamW for ZeRO's flat buffers, if its kernels run on a GPU; else None, for torch's."""
    kernels = device.type == "cuda" and kernels_on(config, device) in ("triton", "cuda")
    if not kernels or config.precision == "fp64" or type(optimizer) is not torch.optim.AdamW:
        return None
    from fused_adamw import adamw_  # not at the top: on a CPU the import turns Triton's interpreter on

    return adamw_


def kernels_on(config: Config, device: torch.device) -> str:
    if config.kernels != "auto":
        return config.kernels
    fused = device.type == "cuda" and not config.compile and config.precision != "fp64"
    return "triton" if fused and has_triton() and has_bf16() else "torch"


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_bf16() -> bool:
    """Whether all GPUs of this machine compute in bf16. Triton supports the same: compute capability 8.0 on."""
    return all(torch.cuda.get_device_capability(i) >= (8, 0) for i in range(torch.cuda.device_count()))
