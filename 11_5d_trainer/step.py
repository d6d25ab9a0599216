"""One rank at work: its place in the mesh, its part of the model, and one step of training.

micro-batches of this rank, this rank's part of each sequence
  -> valid tokens of the global batch (one number, all-reduced)
  for each: loss = sum over its tokens / that number; backward      nothing is sent, except in the last one,
                                                                    where buckets leave while backward runs
  (with a pipeline: all of them in the order of the schedule)
every gradient is now the sum over all ranks that hold the same weights
norm of the whole gradient, clip, AdamW

On a GPU with chapter 09's kernels the host waits for none of it (`launch_step`): the device itself leaves out a step
whose gradient is not finite, and the loss and the norm come to the host while the next step runs (`Reading`).
"""

import dataclasses
import importlib.util
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import paths  # noqa: F401  finds the chapters below
import torch
import torch.distributed as dist
from data import Sampler
from engine import Together, clip_gradients, make_engine
from full_state import load_masters
from gradient_reducers import global_valid_tokens
from hf import read_weights
from llama import LlamaConfig
from mesh import Mesh, make_mesh
from model import Stage, build, cross_entropy_sum, cut_tensors, held_names, is_adapter, my_positions
from moe_layer import moe_layers, set_loss_scale, update_biases
from ops import AUTOCAST, FP8, WEIGHTS, Documents, end_step, leave_out_step, make_parts
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
        self.shared = [p for name in model.shared if (p := model.get_parameter(name)).requires_grad]
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


@dataclasses.dataclass
class Rank:
    """What one rank works with."""

    config: Config
    mesh: Mesh
    model: Any
    engine: Together
    positions: Tensor  # of its tokens in the sequence, [S / cp]
    device: torch.device
    pipeline: Staged | None
    scaler: LossScaler  # of 1, except in fp16
    documents: Documents  # those of the micro-batch under way, with --documents

    def mine(self, batch: Batch) -> Batch:
        """Tokens and labels [B, S] to this rank's part of the sequence [B, S / cp], on its device. Places in documents
        stay whole, on the host: they say what attention sees."""
        tokens, labels = (sent_to(self.device, x)[:, self.positions] for x in batch[:2])
        return tokens, labels, *batch[2:]

    def precision(self) -> Any:
        low = AUTOCAST.get(self.config.precision)
        # ZeRO-3 lets go of weights that nobody needs; autocast's cache would keep a copy of each to the end of forward.
        return torch.autocast(self.device.type, low, cache_enabled=self.config.zero < 3) if low else nullcontext()

    def loss_sum(self, tokens: Tensor, labels: Tensor, places: Tensor | None = None) -> Tensor:
        positions = self.positions
        if places is not None:
            self.documents.begin(places)
            positions = sent_to(self.device, places)[:, positions]  # [B, S / cp]: they begin again with each document
        if self.config.fpdt_chunks:
            return self.model(tokens, positions, labels)
        with self.precision():
            if self.model.parts.linear_cross_entropy is not None:
                return self.model(tokens, positions, labels)
            return cross_entropy_sum(self.model, self.model(tokens, positions), labels)

    def valid_tokens(self, batches: list[Batch]) -> Tensor:
        """Labels that count, over all micro-batches and all ranks that see other tokens."""
        labels = torch.cat([batch[1].flatten() for batch in batches])
        return global_valid_tokens(labels, self.mesh.groups["batch"])

    def forward_and_backward(self, batches: list[Batch], valid: Tensor) -> Tensor:
        """Gradients of the loss per token of the global batch, times the loss scale. Returns this rank's loss."""
        valid = valid / self.scaler.value
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.pipeline:
            with self.engine.micro_batch(last=True), self.precision():
                targets = [(labels, valid) for _, labels, *_ in batches]
                total += self.pipeline.step([tokens for tokens, *_ in batches], targets)
            return total * self.scaler.inverse
        for i, batch in enumerate(batches):
            with self.engine.micro_batch(last=i == len(batches) - 1):
                loss = self.loss_sum(*batch) / valid
                loss.backward()
            total += loss.detach()
        return total * self.scaler.inverse


def make_rank(
    config: Config, sizes: LlamaConfig, device: torch.device, optimizer: Any = adamw, start_from: str = ""
) -> Rank:
    """Lay out the ranks, build this one's model. `optimizer(model, lr)` makes the optimizer that ZeRO may take over.

    `start_from` names a Hugging Face model to take the first weights from.
    """
    schedule = config.pipeline(dist.get_world_size(), sizes.layers)
    mesh = make_mesh(*config.layout(sizes, dist.get_world_size()), timeout=config.timeout)
    positions = my_positions(config.seq_len, mesh, config.cp_kind, config.fpdt_chunks).to(device)
    documents = Documents()
    parts = make_parts(
        mesh,
        kernels=kernels_on(config, device),
        precision=config.precision,
        cp_kind=config.cp_kind,
        recompute=config.recompute,
        device=device,
        documents=documents if config.documents else None,
    )
    mine = {(0, 0): range(sizes.layers)}  # (direction, stage) -> layers
    if schedule:
        held = schedule.stages_of(mesh.place["pp"])
        mine = {key: layers_of(key[1], schedule.stages, sizes.layers) for key in held}
    model: Any = build(
        sizes,
        mesh,
        parts=parts,
        moe=config.mixture(sizes),
        dispatch=config.dispatch,
        fpdt_chunks=config.fpdt_chunks,
        sequence_parallel=config.sequence_parallel,
        tp_overlap=config.tp_overlap,
        recompute=config.recompute,
        seed=config.seed,
        dtype=weight_dtype(config),
        device=device,
        layers=[layer for layers in mine.values() for layer in layers] if schedule else None,
    )
    if config.compile:
        for block in model.model.layers.children():  # all alike: one program serves them all
            block.compile()
    if start_from:
        whole = read_weights(start_from, {name for name in held_names(model, mesh) if not is_adapter(name)})
        theirs = [name for name, _ in model.named_parameters() if not is_adapter(name)]
        for name, piece in cut_tensors(model, whole, mesh, theirs).items():
            model.get_parameter(name).detach().copy_(piece)
    built = optimizer(model, config.lr)
    for group in built.param_groups:
        if "betas" in group:
            group["betas"] = (config.beta1, config.beta2)
        if group["weight_decay"]:
            group["weight_decay"] = config.weight_decay
    master = torch.float32 if config.precision == "bf16-master" else None
    engine = make_engine(
        config.zero,
        model,
        built,
        mesh,
        int(config.bucket_mib * 2**20),
        hooks=not schedule,
        master=master,
        variant=zero_variant(config),
        reduce_dtype=torch.float32 if config.reduce_dtype == "fp32" else None,
        accumulate_dtype=torch.float32 if config.accumulate_dtype == "fp32" else None,
        fused=fused_adamw(config, device, built),
    )
    if start_from and master and not sizes.lora_rank:  # adapters are in no file
        load_masters(engine, lambda names: cut_tensors(model, whole, mesh, names))
    pipeline = None
    if schedule:
        stages = {key: Stage(model, layers, positions) for key, layers in mine.items()}
        length = len(positions) // (config.tp if config.sequence_parallel else 1)
        hidden = torch.empty(config.micro_batch, length, sizes.hidden, dtype=weight_dtype(config), device=device)
        pipeline = Staged(schedule, stages, model, engine, mesh, example=hidden)
    # The decision to leave a step out is everyone's, since everyone's weights depend on it.
    fp16 = config.precision == "fp16"
    scaler = LossScaler(mesh.groups["world"], config.loss_scale if fp16 else 1.0, dynamic=fp16, patience=2**31)
    return Rank(config, mesh, model, engine, positions, device, pipeline, scaler, documents)


def sent_to(device: torch.device, x: Tensor) -> Tensor:
    """x on the device. A copy to a GPU is only asked for: from pinned memory, so that the host does not wait for it."""
    pinned = x.pin_memory() if device.type == "cuda" and not x.is_cuda else x
    return pinned.to(device, non_blocking=True)


class Reading:
    """Numbers of the device on their way to the host: `values` waits for them, and not for what came after them."""

    def __init__(self, numbers: Tensor, since: torch.cuda.Event | None = None) -> None:
        self.numbers, self.since, self.done = numbers, since, None
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.done = moment()

    def values(self) -> list[float]:
        if self.done is not None:
            self.done.synchronize()
        return self.numbers.tolist()

    def seconds(self) -> float:
        """By the device's clock, from `since` until they were there."""
        assert self.since is not None and self.done is not None
        self.done.synchronize()
        return 1e-3 * self.since.elapsed_time(self.done)


def moment() -> torch.cuda.Event:
    """An event at this place in the device's queue."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def fused_adamw(config: Config, device: torch.device, optimizer: torch.optim.Optimizer) -> Any:
    """Chapter 09's AdamW for ZeRO's flat buffers, where its kernels are used on a GPU; else None: torch's."""
    kernels = device.type == "cuda" and kernels_on(config, device) in ("triton", "cuda")
    if not kernels or config.precision == "fp64" or type(optimizer) is not torch.optim.AdamW:
        return None
    from fused_adamw import adamw_  # here: on a CPU the import turns Triton's interpreter on

    return adamw_


def reads_late(me: Rank) -> bool:
    """Whether the host may hear of a step when the next one is under way: if the device itself keeps a gradient that is
    not finite out of the weights, and nothing on the host depends on the norm: no loss scale, no step to be left out
    and gone on from, no experts' biases, no scales of fp8 (which wait at the end of a step themselves)."""
    c = me.config
    depends = me.scaler.dynamic or c.on_nan == "skip" or c.precision in FP8 or moe_layers(me.model)
    return me.device.type == "cuda" and me.engine.can_leave_out and not depends


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


def zero_variant(config: Config) -> str:
    """Which of chapter 03's variants (engine.py) was asked for."""
    asked = {"offload": config.zero_offload, "late gather": config.zero_late_gather, "copies": config.zero_shards}
    return next((name for name, wanted in asked.items() if wanted), "")


def weight_dtype(config: Config) -> torch.dtype:
    return WEIGHTS.get(config.precision, torch.float32)


@torch.no_grad()
def validate(me: Rank, sampler: Sampler) -> float:
    """Loss per token over the first `eval_samples` held-out samples, which the data-parallel ranks share out."""
    dp, place = me.mesh.sizes["dp"], me.mesh.place["dp"]
    at_once = me.pipeline.micro_batches if me.pipeline else 1
    every = sampler.held_out(me.config.eval_samples, me.config.micro_batch, place, dp, at_once)
    batches = [me.mine(batch) for batch in every]
    total = torch.zeros((), dtype=torch.float64, device=me.device)
    if me.pipeline:
        one = torch.ones((), device=me.device)
        for some in (batches[i : i + at_once] for i in range(0, len(batches), at_once)):
            with me.precision():
                total += me.pipeline.forward_only([t for t, *_ in some], [(labels, one) for _, labels, *_ in some])
    else:
        for batch in batches:
            total += me.loss_sum(*batch)
    dist.all_reduce(total, group=me.mesh.groups["replica"])
    return (total / me.valid_tokens(batches)).item()


def train_step(me: Rank, batches: list[Batch]) -> tuple[float, float]:
    """One step on the global batch. Returns its loss per token and the norm of its gradient, before clipping.

    If the norm is not finite the weights stay as they are.
    """
    loss, norm = gradient_step(me, batches)
    if math.isfinite(found := float(norm)):
        update_weights(me)
    else:
        forget_step(me)
    return loss.item(), found


def launch_step(me: Rank, batches: list[Batch], since: torch.cuda.Event | None = None) -> Reading:
    """The same on a GPU for which nobody waits (`reads_late`): loss and norm come later, and with them the seconds from
    the end of the step before, or from now.

    If a norm is not finite the weights stay as they were before it, whatever is launched until the host hears of it.
    """
    since = since or moment()
    loss, norm = gradient_step(me, batches)
    me.engine.leave_out_if(~norm.isfinite())
    update_weights(me)
    return Reading(torch.stack((loss, norm)), since)


def gradient_step(me: Rank, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """The clipped gradient of the global batch. Returns its loss per token and the norm before clipping."""
    batches = [me.mine(batch) for batch in batches]
    me.engine.zero_grad()
    share = 1 / len(batches)  # of a micro-batch in the loss that balances experts; all are equally large
    set_loss_scale(me.model, share * me.scaler.value)
    loss = me.forward_and_backward(batches, me.valid_tokens(batches))
    dist.all_reduce(loss, group=me.mesh.groups["replica"])  # to show it: each rank knows the loss of its own tokens
    return loss, clip_gradients(me.engine, me.model, me.mesh, me.config.clip, me.scaler.inverse)


def update_weights(me: Rank) -> None:
    me.engine.step()
    end_step(me.model.parts)
    if moe_layers(me.model):
        update_biases(me.model, me.mesh.groups["all tokens"])


def forget_step(me: Rank) -> None:
    """How many tokens came to each expert moves its bias, and what fp8 has seen its scales; not if it is left out."""
    leave_out_step(me.model.parts)
    for layer in moe_layers(me.model):
        layer.step_counts.zero_()


def who_is_not_finite(me: Rank, batches: list[Batch]) -> str:
    """Name the rank and the parameter that a NaN or infinite gradient came from. Collective.

    After the reduction every rank has it, so the backwards are done once more without one. A NaN travels from a layer
    to those before it, so of the parameters that have one the last is named.
    """
    batches = [me.mine(batch) for batch in batches]
    me.engine.zero_grad()
    with me.engine.no_sync():
        loss = me.forward_and_backward(batches, me.valid_tokens(batches))
        mine = {name: me.engine.local_gradient(p) for name, p in me.model.named_parameters()}
        bad = [name for name, gradient in mine.items() if gradient is not None and not gradient.isfinite().all()]
    me.engine.zero_grad()
    forget_step(me)
    here = f"rank {dist.get_rank()}: gradient of {bad[-1]}" if bad else ""
    if bad and not loss.isfinite():
        here += ", from a loss that is not finite"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    return "; ".join(text for text in everyone if text) or "in the sum over the ranks only"
