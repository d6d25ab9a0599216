"""Bytes that the trainer stores, saves for backward, sends and has at the peak in a step, by the meter."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import planner_paths  # noqa: F401  finds the trainer and the chapters
import moe_layer
import step as step_module
import torch
import torch.distributed as dist
from data import Sampler
from fpdt_store import DeviceMemory
from gradients import Replicated
from harness.meter import communication, peak_memory, storage_bytes
from llama import LlamaConfig
from model import cross_entropy_sum
from options import Config

TEXT = torch.arange(20000) * 7919 % 251


@contextmanager
def even_load() -> Iterator[None]:
    """Routers send tokens to the experts in turn, so that what a layout sends can be counted."""
    routed = moe_layer.route

    def round_robin(logits: torch.Tensor, top_k: int, *rest: Any) -> Any:
        choices = torch.arange(len(logits) * top_k, device=logits.device) % logits.shape[1]
        return routed(logits, top_k, *rest[:-1], choices.view(-1, top_k))

    moe_layer.route = round_robin
    try:
        yield
    finally:
        moe_layer.route = routed


def made(words: dict[str, Any], sizes: LlamaConfig) -> tuple[Any, list]:
    """This rank of a layout before the first step, and the batches of that step."""
    config = Config(**words)
    config.check()
    config.check_layout(sizes, dist.get_world_size())
    me = step_module.make_trainer(config, sizes, torch.device("cpu"))
    sampler = Sampler(TEXT, config.seq_len, sizes.vocab_size, 0)
    place, dp = me.mesh.place["dp"], me.mesh.sizes["dp"]
    return me, sampler.step(config.micro_batch, config.accumulation(dp), place, dp)


@even_load()
def measured(words: dict[str, Any], sizes: LlamaConfig) -> dict[str, Any]:
    """Train two steps with an even load of experts: bytes sent in the first, memory in the second."""
    me, batches = made(words, sizes)

    def step() -> None:
        step_module.train_step(me, batches)

    with communication() as sent:
        step()  # makes the optimizer's states
    result: dict[str, Any] = {"rank": me.mesh.place["pp"]}
    result["sent"] = {name: count for name, count in sent.sent.items() if count}
    result["activations"] = [] if me.config.fpdt_chunks else alive_after_forward(me, batches)
    result |= held(me)
    step_module.zero_grad(me)
    gc.collect()
    meter: Any = DeviceMemory() if me.config.fpdt_chunks else peak_memory()  # DeviceMemory leaves out the host
    with meter as memory:
        step()
    gathered = sum(result[what] for what in ("weights", "gradients", "optimizer states"))
    result["peak"] = gathered + memory.peak
    return result


def held(me: Any) -> dict[str, int]:
    weights = list(me.model.parameters())
    gradients = []
    states = []
    for owner in me.owners:
        if isinstance(owner, Replicated):
            gradients += owner.reducer.flats
            states += [s for each in owner.optimizer.state.values() for s in each.values()]
        else:
            kept = owner.held()
            weights += kept["weights"]
            gradients += kept["gradients"]
            states += [s for inner in owner.inner for each in inner.state.values() for s in each.values()]
            states += [m for m in owner.masters if m.dtype != weights[0].dtype]
    states = [s for s in states if isinstance(s, torch.Tensor) and s.dim() > 0]
    found = {"weights": weights, "gradients": gradients, "optimizer states": states}
    return {what: storage_bytes(tensors) for what, tensors in found.items()}


def alive_after_forward(me: Any, batches: list) -> list[int]:
    """Bytes alive between forward and backward of a micro-batch, for each stage of this rank in model order.

    Weights that ZeRO stage 3 has gathered are not activations, so they are subtracted.
    """
    tokens, labels = step_module.shard_batch(me, batches[0])
    found = []
    stages: list[Any] = sorted(me.pipeline.stages.values(), key=lambda s: not s.first) if me.pipeline else [None]
    for stage in stages:
        hidden: Any = None
        if stage is not None and not stage.first:
            hidden = torch.randn_like(me.pipeline.example).requires_grad_()
        with peak_memory() as memory, step_module.precision(me):
            if stage is None:
                out = step_module.loss_sum(me, tokens, labels)
            else:
                x = tokens if stage.first else hidden.detach().clone().requires_grad_()
                out = stage(x)
                if stage.last:
                    out = cross_entropy_sum(me.model, out, labels)
            extra = out.nbytes  # sent to the next stage, or the loss itself
            gc.collect()
            alive = memory.current
        for owner in me.owners:
            for unit in [*getattr(owner, "units", []), getattr(owner, "root", None)]:
                if unit is not None and unit.gathered:
                    alive -= sum(flat.nbytes for flat in unit.flats)
        found.append(alive - extra)
        if me.mesh.size("tp") > 1 or me.mesh.cp > 1 or me.config.zero == 3:
            with ExitStack() as stack:
                for owner in me.owners:
                    stack.enter_context(owner.no_sync())
                out.sum().backward()  # on all ranks, so that no collective stays pending
            if me.config.zero == 3:
                for owner in me.owners:
                    if hasattr(owner, "drop_all"):
                        owner.drop_all()
        del out
    step_module.zero_grad(me)
    return found
