"""Expert parallelism III, the layer: a feed-forward layer with balance losses that can be recomputed.

Problem. Routing and dispatch are functions. A model adds three things made for ordinary layers: a loss at the
end of the network, recomputation that runs a layer twice, and a step of many micro-batches.

Idea.
  1. The balance loss is attached to the layer's output. Forward: the output is unchanged. Backward: when
     the gradient of the output arrives, the balance loss gets its own, a constant. So neither the block, nor
     a pipeline stage, nor the training loop has to pass the loss to the end of the network.

         x -> router -> dispatch -> y --AttachLoss--> y          dL/dy <---------------- dL/dy
                   \\-> balance loss ---/                         scale -> balance loss -> router

  2. A recomputed layer does not choose again. Its input may differ in the last digit and swap two experts,
     and then the gradient does not belong to the output. So the first call records its plan on a tape, and
     its recomputation reads it. Each call has its own tape, however many micro-batches are in flight.
  3. Counts are taken in the first call only, and summed over micro-batches and ranks, as integers.

The scale. The loss of a step is a sum over tokens, divided by their number, and so is the balance loss: a
micro-batch of n_i tokens (of all ranks) has f_e from its own choices and weight n_i / (n_1 + ... + n_m), or
1/m if all are equal. So it balances over the ranks, in each micro-batch.

Which sum runs over which ranks, if tokens are split over data and context ranks, and t tensor ranks
                                 replicated [B, S, H]           sequence parallel [B, S/t, H]
    counts (count_group)         data x context                 data x context x tensor
    gradient of the router       data x context                 data x context, and tensor (partial sums)
    gradient of an expert        data x context / P             data x context / P, and tensor
    bias (update_biases)         data x context                 data x context x tensor

Run it:
    python moe_layer.py                                                   one rank, CPU or GPU
    torchrun --nproc_per_node 4 moe_layer.py --recompute                  Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 moe_layer.py --router sigmoid --version once
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _moe_demo import OneLineParser, Report, check_gpus, launch, text
from expert_dispatch import COMPUTES, DISPATCH, Plan, check_experts, make_plan, reference, size_of, swiglu
from fixed_dispatch import FixedPlan, dispatch_fixed, plan_fixed
from routing import (
    ROUTERS,
    Group,
    balance_loss,
    bias_step,
    cannot_learn,
    check_routing,
    expert_counts,
    group_sum,
    route,
    router_logits,
    within_capacity,
    z_loss,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Legend of shapes: B batch, S sequence, H hidden, F intermediate size of one expert, T = B S tokens of this rank,
# E experts, K experts per token, P ranks of the expert group, t tensor ranks.
VERSIONS = (*DISPATCH, "fixed")


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts. DeepSeekMoE's fine-grained experts are many `experts` with a small
    `intermediate`. Its shared experts, used by all tokens, are one MLP of `shared` times that width."""

    hidden: int = 64
    intermediate: int = 96  # of one expert
    experts: int = 8
    top_k: int = 2
    shared: int = 0
    router: str = "softmax"
    nodes: int = 1  # a token uses experts on at most max_nodes of them
    max_nodes: int = 1
    capacity: float | None = None  # None: dropless
    balance: float = 0.0  # factor of the balance loss
    z: float = 0.0  # factor of the z-loss
    bias_speed: float = 0.0  # size of a step of the bias; 0: no bias
    normalise: bool | None = None  # weights are divided by their sum; None: if top_k > 1 (see `route`)

    def check(self, P: int) -> None:
        """ValueError in one line unless P ranks can hold this layer."""
        check_routing(self.experts, self.top_k, self.router, self.nodes, self.max_nodes)
        check_experts(self.experts, P)
        if self.capacity is not None and not 0 < self.capacity < math.inf:  # NaN fails
            raise ValueError(f"capacity {self.capacity} leaves no room; use a positive number, or None")
        if self.bias_speed and self.router != "sigmoid":
            raise ValueError("bias-speed needs the sigmoid router; here, as in DeepSeek-V3, no other router has a bias")


# -------------------------------------------------------------------------------------------------------- the layer


class AttachLoss(torch.autograd.Function):
    """y, unchanged. Backward also gives `loss` the gradient `scale`, as if scale · loss were added."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.dtype = loss.dtype
        ctx.device = loss.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        # --- exercise 7.34: the gradient of y passes, and the loss gets its own ---
        return dy, torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None
        # --- end exercise ---


@dataclass(frozen=True)
class Whole:
    """Tells tensor parallelism (chapter 04) that each rank holds the full weight, piece 0 of 1. `partial`:
    ranks have different tokens (sequence parallel), so their gradients are partial sums."""

    size: int
    partial: bool
    dim: int = 0
    pieces: int = 1
    index: int = 0

    def cut(self, full: Tensor) -> Tensor:
        return full

    def full_shape(self, piece: Tensor) -> list[int]:
        return list(piece.shape)


class Weight(nn.Module):
    def __init__(self, *shape: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape))
        self.shard = Whole(shape[0], sequence_parallel)


@dataclass
class Tape:
    """What one call of the layer records for its recomputation: its plan, and the counts of its losses."""

    plan: Plan | FixedPlan | None = None
    counts: Tensor | None = None


class MoE(nn.Module):
    """[B, S, H] -> [B, S, H]: a feed-forward layer. The ranks of `group` have different tokens.

    group        holds the experts, E/P per rank: a slice of data x context ranks; None: this process has all
    count_group  the ranks whose tokens count for losses and capacity (table above); None: this process
    version, compute    of expert_dispatch.py; or "fixed" of fixed_dispatch.py: equal token counts, slots of
                 fixed shape, no host wait, a capacity per rank, no error for bad logits
    parts        an object with functions `linear` and `swiglu` to use instead of torch's. Its `linear` is for
                 compute "loop" (the others, which take all experts at once, reject it) and shared experts;
                 with version "fixed" only for the shared ones, since torch multiplies all its slots at once
    sequence_parallel   tensor ranks have different tokens, [B, S/t, H]; if not, all compute the same
    loss_scale   an attribute: the weight of the next call in its step (see "The scale"), times other factors
                 of the loss. `set_loss_scale` sets it for all layers of a model.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: Group,
        count_group: Group,
        *,
        version: str = "pairs",
        compute: str = "loop",
        parts: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        config.check(size_of(group))
        if compute != "loop" and version != "fixed" and getattr(parts, "linear", F.linear) is not F.linear:
            raise ValueError(f"compute {compute!r} multiplies all experts at once, and not by parts.linear; use loop")
        if stuck := cannot_learn(config.experts, config.top_k, config.router, config.normalise):
            warnings.warn(f"the router learns from no loss but its own: {stuck}", stacklevel=2)
        self.config = config
        self.group = group
        self.count_group = count_group
        self.version = version
        self.compute = COMPUTES[compute]
        self.parts = parts
        self.name = "an MoE layer"  # for error messages
        H = config.hidden
        F_ = config.intermediate
        mine = config.experts // size_of(group)
        weight = partial(Weight, sequence_parallel=sequence_parallel)
        self.gate = weight(config.experts, H)
        self.experts = nn.ModuleDict({"w1": weight(mine, F_, H), "w3": weight(mine, F_, H), "w2": weight(mine, H, F_)})
        if config.shared:
            wide = config.shared * F_
            sizes = {"gate_proj": (wide, H), "up_proj": (wide, H), "down_proj": (H, wide)}
            self.shared_experts = nn.ModuleDict({name: weight(*shape) for name, shape in sizes.items()})
        # The bias as an integer number of steps: exact on all ranks, and `.to(bfloat16)` cannot round it.
        self.register_buffer("bias_steps", torch.zeros(config.experts, dtype=torch.int64), bool(config.bias_speed))
        self.register_buffer("step_counts", torch.zeros(config.experts, dtype=torch.int64), persistent=False)
        self.loss_scale = 1.0
        self.losses: dict[str, Tensor] = {}  # this rank's shares since the last `take_losses`
        self.tape: Tape | None = None

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        tape = self.tape or Tape()
        shape = x.shape
        x = x.flatten(0, -2)  # [B, S, H] -> [T, H]
        logits = router_logits(x, self.gate.weight)  # [T, E]
        bias = c.bias_speed * self.bias_steps if c.bias_speed else None
        again = tape.plan.experts if tape.plan else None
        routing = route(logits, c.top_k, c.router, bias, c.nodes, c.max_nodes, c.normalise, again)
        if tape.plan is None:
            self.decide(tape, logits, routing.experts)
        linear = getattr(self.parts, "linear", F.linear)
        act = getattr(self.parts, "swiglu", swiglu)
        h, w1, w3, w2 = under_autocast(x, *(self.experts[name].weight for name in ("w1", "w3", "w2")))
        if isinstance(tape.plan, FixedPlan):
            y = dispatch_fixed(h, routing.weights, tape.plan.slots, w1, w3, w2, tape.plan.C, self.group, act)  # [T, H]
        else:
            compute = partial(self.compute, w1=w1, w3=w3, w2=w2, linear=linear, act=act)
            y = DISPATCH[self.version](h, routing.weights, tape.plan, compute, self.group)  # [T, H]
        if c.shared:
            gate, up, down = (self.shared_experts[n].weight for n in ("gate_proj", "up_proj", "down_proj"))
            y = y + linear(act(linear(h, gate), linear(h, up)), down)
        if self.training and torch.is_grad_enabled() and (c.balance or c.z):
            y = self.attach_losses(y, routing.probabilities, logits, tape.counts)
        return y.view(shape)

    @torch.no_grad()
    def decide(self, tape: Tape, logits: Tensor, experts: Tensor) -> None:
        """Everything that needs counts, once per call, with all collectives but the all-to-alls of rows."""
        c = self.config
        if recomputing():
            raise RuntimeError(f"{self.name} is recomputed without its routing; wrap its block in `recomputed`")
        tape.counts = expert_counts(experts, c.experts)
        if self.training:
            self.step_counts += tape.counts
        if c.balance or c.z:
            tape.counts = group_sum(tape.counts, self.count_group)
        if self.version == "fixed":
            tape.plan = plan_fixed(experts, c.experts, c.capacity, self.group)
            return
        kept = within_capacity(experts, c.experts, c.capacity, self.count_group) if c.capacity else None
        bad = (~logits.isfinite()).any(1).sum()
        tape.plan = make_plan(self.version, experts, kept, c.experts, self.group, bad, self.name)

    def attach_losses(self, y: Tensor, probabilities: Tensor, logits: Tensor, counts: Tensor) -> Tensor:
        K = self.config.top_k
        losses = {"balance": balance_loss(probabilities, counts, K), "z": z_loss(logits, counts, K)}
        if not recomputing():  # for the log, which counts each call once
            for name, loss in losses.items():
                self.losses[name] = self.losses.get(name, 0.0) + self.loss_scale * loss.detach()
        total = self.config.balance * losses["balance"] + self.config.z * losses["z"]
        return AttachLoss.apply(y, total, self.loss_scale)


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast would cast a matmul's inputs. Before they are sent, this also halves the bytes."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)


# ---------------------------------------------------------------------------------------------------- recomputation


def recomputing() -> bool:
    """Is a backward pass running? Then a forward pass is a recomputation. (As in torch.utils.checkpoint.)"""
    return torch._C._current_graph_task_id() != -1


def moe_layers(module: nn.Module) -> list[MoE]:
    return [m for m in module.modules() if isinstance(m, MoE)]


class UseTapes:
    """In this context the layers record on these tapes if they are empty, and replay them otherwise.

    It may be entered again: a backward in two parts (chapter 06) reruns it several times.
    """

    def __init__(self, layers: Sequence[MoE], tapes: Sequence[Tape]) -> None:
        self.layers, self.tapes = layers, tapes

    def __enter__(self) -> None:
        for layer, tape in zip(self.layers, self.tapes, strict=True):
            layer.tape = tape

    def __exit__(self, *error: object) -> None:  # also on an exception, with which checkpoint stops early
        for layer in self.layers:
            layer.tape = None


def recomputed(block: nn.Module, call: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """`block`, of which autograd saves only the inputs; backward reruns it with the routing of the first run.

    The tapes belong to the call, not to the layer. A queue in the layer would need backward passes in the
    order of the forward passes, and fail under a pipeline schedule with another order.
    """
    return partial(run_with_tapes, moe_layers(block), call or block)  # a deep copy of it has layers of its own


def run_with_tapes(layers: Sequence[MoE], call: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    # --- exercise 7.35: one set of tapes for both runs of this call ---
    tapes = [Tape() for _ in layers]
    contexts = lambda: (UseTapes(layers, tapes), UseTapes(layers, tapes))  # noqa: E731  (forward, recomputation)
    return checkpoint(call, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    # --- end exercise ---


def recompute_blocks(blocks: Sequence[nn.Module]) -> None:
    """Make each block recompute itself, for any caller."""
    for block in blocks:
        block.forward = recomputed(block, block.forward)  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------- once per step, for a model


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """The weight of the next micro-batch: its fraction of the step's tokens, 1/m for m equal ones."""
    for layer in moe_layers(model):
        layer.loss_scale = scale


def take_losses(model: nn.Module, group: Group) -> dict[str, float]:
    """For the log: balance loss and z-loss since the last call, summed over layers and over `group`, the
    count group. Without the factors of the configuration; 1 per layer is an even load. Collective."""
    layers = [layer for layer in moe_layers(model) if layer.losses]
    if not layers:
        return {}
    total = torch.stack([torch.stack([layer.losses["balance"], layer.losses["z"]]) for layer in layers]).sum(0)
    if group is not None:
        dist.all_reduce(total, group=group)
    for layer in layers:
        layer.losses = {}
    return dict(zip(("balance", "z"), total.tolist(), strict=True))


@torch.no_grad()
def update_biases(model: nn.Module, group: Group) -> Tensor:
    """After the last micro-batch of a step: move each bias by a step. `group`: all ranks that hold tokens of the step.

    Returns how often each expert was chosen, int64 [layers, E], and resets the counts. One message for all.
    """
    layers = moe_layers(model)
    # --- exercise 7.36: counts of all micro-batches and ranks, then one step ---
    counts = group_sum(torch.stack([layer.step_counts for layer in layers]), group)
    for layer, count in zip(layers, counts, strict=True):
        if layer.config.bias_speed:
            layer.bias_steps += bias_step(count)
        layer.step_counts.zero_()
    # --- end exercise ---
    return counts


# ------------------------------------------------------------------------------------------------------------- demo


def plain_loss(x: Tensor, w: dict[str, Tensor], c: MoEConfig, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference for one micro-batch [T, H] of all ranks: its output, losses (added up), counts."""
    logits = router_logits(x, w["gate"])
    bias = c.bias_speed * steps if c.bias_speed else None
    routing = route(logits, c.top_k, c.router, bias, normalise=c.normalise)
    counts = expert_counts(routing.experts, c.experts)
    plan = make_plan("pairs", routing.experts, None, c.experts, None)
    y = reference(x, routing.weights, plan, w["w1"], w["w3"], w["w2"])
    y = y + F.linear(swiglu(F.linear(x, w["gate_proj"]), F.linear(x, w["up_proj"])), w["down_proj"])
    extra = c.balance * balance_loss(routing.probabilities, counts, c.top_k) + c.z * z_loss(logits, counts, c.top_k)
    return y, extra, counts


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Two steps of two micro-batches, each rank with its own text, next to one process with all text."""
    rank = dist.get_rank(group)
    P = size_of(group)
    T = 64
    m = 2
    speed = 0.01 if args.router == "sigmoid" else 0.0
    normalise = {"yes": True, "no": False}.get(args.normalise)
    losses = {"balance": 0.1, "z": 0.01}
    c = MoEConfig(32, 48, args.experts, args.top_k, 1, args.router, **losses, bias_speed=speed, normalise=normalise)
    layer = MoE(c, group, group, version=args.version).to(device, torch.float64)
    run = recomputed(layer) if args.recompute else layer
    generator = torch.Generator().manual_seed(0)
    full = {}
    named = {name.split(".")[-2]: (name, p) for name, p in layer.named_parameters()}
    E = c.experts
    local = slice(rank * c.experts // P, (rank + 1) * c.experts // P)
    for name, (_, p) in named.items():
        shape = (E, *p.shape[1:]) if name in ("w1", "w2", "w3") else p.shape
        full[name] = torch.randn(*shape, generator=generator, dtype=torch.float64).to(device) / shape[-1] ** 0.5
        p.data.copy_(full[name][local] if name in ("w1", "w2", "w3") else full[name])
    table = torch.randn(256, c.hidden, generator=generator, dtype=torch.float64).to(device)
    steps = torch.zeros(E, dtype=torch.int64, device=device)
    report = Report(group)
    for step in range(2):
        batch = F.rms_norm(table[text(m, P * T, start=step * m * P * T).to(device)], (c.hidden,))  # [m, P·T, H]
        want = {name: value.clone().requires_grad_() for name, value in full.items()}
        counts = torch.zeros_like(steps)
        for x in batch:
            y, extra, count = plain_loss(x, want, c, steps)
            ((y * y.detach().cos()).sum() / batch[..., 0].numel() + extra / m).backward()
            counts += count
        layer.zero_grad()
        set_loss_scale(layer, 1 / m)
        for x in batch:
            y = run(x[rank * T : (rank + 1) * T].clone().requires_grad_())
            ((y * y.detach().cos()).sum() / batch[..., 0].numel()).backward()
        for name, (_, p) in named.items():
            if name not in ("w1", "w2", "w3"):  # experts have seen the tokens of all ranks
                dist.all_reduce(p.grad, group=group)
            report.compare(p.grad, want[name].grad[local] if name in ("w1", "w2", "w3") else want[name].grad)
        logged = take_losses(layer, group)
        seen = update_biases(layer, group)[0]
        steps += bias_step(counts) if speed else 0
        report.title(
            f"step {step}: {P} rank(s), {m} micro-batches, {args.router} router{', recomputed' * args.recompute}"
        )
        report.add_errors("largest error of gradients, the balance loss's included")
        report.add("choices that the layer and one process count differently", 0, int((seen - counts).abs().sum()))
        report.add("biases that differ after the update", 0, int((layer.bias_steps != steps).sum()))
        report.add("balance loss (1 is even)", ">= 0", f"{logged['balance']:.4f}", logged["balance"] >= 0)
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="A mixture-of-experts layer.", allow_abbrev=False)
    parser.add_argument("--router", choices=ROUTERS, default="softmax")
    parser.add_argument("--version", choices=VERSIONS, default="pairs")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument(
        "--normalise", choices=("yes", "no"), help="divide by the chosen scores' sum; default: if K > 1"
    )
    parser.add_argument("--recompute", action="store_true", help="run the layer again in backward")
    args = parser.parse_args()
    parser.check_range(args, experts=(1, 1024), top_k=(1, 1024))
    try:
        MoEConfig(experts=args.experts, top_k=args.top_k).check(int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        parser.error(f"--{error}")
    check_gpus(parser)
    launch(lambda group, device: demo(args, group, device))


if __name__ == "__main__":
    main()
