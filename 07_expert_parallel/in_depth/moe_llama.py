"""Expert parallelism IV, the model: a Mixtral whose experts are spread over the data-parallel ranks.

Problem. Data parallelism keeps every parameter on every rank and sums every gradient over all ranks. With
expert parallelism the experts are spread, but their tokens still come from all ranks. Over which ranks is
each gradient summed now, and what is the norm of a gradient that no rank has in full?

Idea. Take the ranks with different tokens, data x context, and split them into groups of P, slices: each has
all experts once, E/P per rank. The mesh gets no new axis; the expert axis is folded into an existing one.

    8 ranks with different tokens, P = 4, E = 8        rank   0    1    2    3  |  4    5    6    7
                                                       expert 0,1  2,3  4,5  6,7 | 0,1  2,3  4,5  6,7
    expert groups (all-to-all)                                [0    1    2    3]  [4    5    6    7]
    replica groups (gradients of experts)                     [0 4]  [1 5]  [2 6]  [3 7]
    data group (all other gradients)                          [0    1    2    3    4    5    6    7]

    gradient of an expert    the backward of an expert sums over the tokens of all 4 ranks of the slice.
                             The sum over its 2 replicas completes it. No division by 4 or by 8: the loss was
                             divided by the number of tokens of the global batch before backward
    norm of the gradient     all other parameters once, plus the squares of the experts summed over one slice

Formulas, with N_d dense parameters, N_e parameters in experts, D ranks with different tokens, in elements:
    stored by a rank         N_d + N_e/P  (and as many gradients)
    gradients sent           2 (D-1)/D N_d  +  2 (D/P - 1)/(D/P) N_e/P     ring all-reduces; the last is 0 if P = D
    tokens sent              expert_dispatch.py, per layer

Names are as in Mixtral's checkpoints: model.layers.0.block_sparse_moe.gate.weight, ...experts.3.w1.weight.
Whatever P is, a model is initialised from the seed and these names, and loaded and saved by them.

Run it:
    python moe_llama.py                                                   one rank, CPU or GPU
    torchrun --nproc_per_node 4 moe_llama.py --ep 2 --router sigmoid      Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 moe_llama.py --capacity 1.0 --recompute
Three steps of plain SGD next to the same model on one process. The last line is PASS, or the script exits
with 1 and says which number is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _moe_demo import OneLineParser, Report, check_gpus, launch, text
from expert_dispatch import COMPUTES, DISPATCH, size_of
from moe_layer import MoE, MoEConfig, moe_layers, recompute_blocks, set_loss_scale, take_losses, update_biases
from routing import ROUTERS, Group, group_sum
from torch import Tensor, nn

# Legend of shapes: B batch, S sequence, H hidden, N heads, N_kv key/value heads, D head dim, V vocabulary; E experts, P
# ranks of an expert group.
IGNORE = -100  # a label without a target
MicroBatch = tuple[Tensor, Tensor]  # tokens and labels, both [B, S]

# --------------------------------------------------------------------------------- which ranks hold what, and sum what


def expert_groups(
    slices: Sequence[Sequence[int]], P: int, timeout: float = 60.0
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(expert group, replica group) of this rank. Collective over the world: every rank makes every group.

    slices   the world, split into lists of ranks with different tokens: one list with only data and context
             parallelism, else one for each pair of tensor, pipeline coordinates
    timeout  seconds that a collective of these groups may take; a new group does not inherit the world's
    """
    mine: list = [None, None]
    for ranks in map(sorted, slices):  # as groups list their ranks, so that replicas have the same place in theirs
        if len(ranks) % P:
            fits = ", ".join(str(p) for p in range(1, len(ranks) + 1) if len(ranks) % p == 0)
            raise ValueError(f"ep {P} does not divide the {len(ranks)} ranks with different tokens; use {fits}")
        # --- exercise 7.37: cut the ranks into expert groups, and find the replicas ---
        experts = [list(ranks[i : i + P]) for i in range(0, len(ranks), P)]  # neighbours: short paths
        replicas = [list(ranks[i::P]) for i in range(P)]
        # --- end exercise ---
        for axis, members in [(0, m) for m in experts] + [(1, m) for m in replicas]:
            group = dist.new_group(members, timeout=timedelta(seconds=timeout))
            if dist.get_rank() in members:
                mine[axis] = group
    return mine[0], mine[1]


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, the parameters of this rank's experts: sum their gradients over the replica group."""
    inside = {id(p) for layer in moe_layers(model) for p in layer.experts.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in inside}


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All others, including routers and shared experts: sum their gradients over data x context."""
    experts = expert_parameters(model)
    return {name: p for name, p in model.named_parameters() if name not in experts}


@torch.no_grad()
def reduce_gradients(model: nn.Module, data_group: Group, replica_group: Group) -> None:
    """After the last backward of a step. Chapter 02's reducers do the same in buckets, one reducer for each kind."""
    # --- exercise 7.38: every gradient over the ranks that hold its parameter ---
    for parameters, group in ((dense_parameters(model), data_group), (expert_parameters(model), replica_group)):
        for p in parameters.values():
            if size_of(group) > 1:
                dist.all_reduce(p.grad, group=group)  # a sum: the loss is divided already
    # --- end exercise ---


@torch.no_grad()
def squared_gradient_norm(model: nn.Module, group: Group) -> Tensor:
    """Squared norm of the full gradient, each parameter once; equal on all ranks. `group`: expert group."""
    # --- exercise 7.39: the experts of this rank are not all experts ---
    dense, experts = (
        torch.stack([p.grad.double().square().sum() for p in parameters.values()]).sum()
        for parameters in (dense_parameters(model), expert_parameters(model))
    )
    return dense + group_sum(experts, group)
    # --- end exercise ---


# -------------------------------------------------------------------------------------- full weights by Mixtral's names


def full_name(model: nn.Module, name: str) -> str:
    """model.layers.0.mlp.gate.weight -> model.layers.0.block_sparse_moe.gate.weight, if that `mlp` is an MoE layer."""
    place, dot, rest = name.partition(".mlp.")
    return f"{place}.block_sparse_moe.{rest}" if dot and isinstance(model.get_submodule(f"{place}.mlp"), MoE) else name


def expert_names(model: nn.Module, name: str) -> list[str]:
    """The E names behind a stacked parameter, ...mlp.experts.w1.weight; [] for any other."""
    found = re.fullmatch(r"(.*\.block_sparse_moe\.experts)\.(w\d\.weight)", full_name(model, name))
    if not found:
        return []
    layer = model.get_submodule(name.partition(".experts.")[0])
    assert isinstance(layer, MoE)
    return [f"{found[1]}.{e}.{found[2]}" for e in range(layer.config.experts)]


@torch.no_grad()
def gather_experts(model: nn.Module, tensors: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """From one tensor per parameter of this rank (weights, gradients, moments), by the model's names, to full
    ones by Mixtral's, on every rank of the expert group. Collective; other tensors pass unchanged."""
    whole = {}
    for name, tensor in tensors.items():
        if names := expert_names(model, name):
            # --- exercise 7.40: all experts, each under its name ---
            pieces = [torch.empty_like(tensor) for _ in range(size_of(group))]
            if size_of(group) > 1:
                dist.all_gather(pieces, tensor.contiguous(), group=group)
            else:
                pieces = [tensor]
            whole.update(zip(names, torch.cat(pieces).unbind(), strict=True))  # [E, F, H] -> E times [F, H]
            # --- end exercise ---
        else:
            whole[full_name(model, name)] = tensor
    return whole


def cut_experts(model: nn.Module, whole: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """The inverse of `gather_experts`: this rank's tensors by the model's names."""
    rank, P = (0, 1) if group is None else (dist.get_rank(group), size_of(group))
    mine = {}
    for name in model.state_dict(keep_vars=True):  # only names: under ZeRO-3 values may be missing
        if names := expert_names(model, name):
            mine[name] = torch.stack([whole[n] for n in names[rank * len(names) // P : (rank + 1) * len(names) // P]])
        elif full_name(model, name) in whole:
            mine[name] = whole[full_name(model, name)]
    return mine


def full_state_dict(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """Full parameters and router biases, on the CPU of every rank. Collective over the expert group."""
    return {name: t.to("cpu", copy=True) for name, t in gather_experts(model, model.state_dict(), group).items()}


def load_full_state_dict(model: nn.Module, state: dict[str, Tensor], group: Group) -> None:
    """Load this rank's shard of `state`. KeyError if an expert is missing, RuntimeError for any other name."""
    model.load_state_dict(cut_experts(model, state, group))


# --------------------------------------------------------------------------------------------------- the same start


def initial_weight(name: str, shape: Sequence[int], layers: int, seed: int) -> Tensor:
    """The initial value of a parameter, in fp32, from only (seed, Mixtral's name), as in chapter 01."""
    if len(shape) == 1:
        return torch.ones(*shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    residual = name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))  # adds into the residual stream
    drawn = torch.randn(*shape, dtype=torch.float32, generator=generator)
    return drawn * (0.02 / math.sqrt(2 * layers) if residual else 0.02)


@torch.no_grad()
def init_moe(model: nn.Module, layers: int, seed: int, names: Iterable[str] | None = None) -> None:
    """Initialise the MoE layers of any model (or the parameters in `names`), and set the layers' names.

    Each expert is drawn separately, so a rank draws only its own, and they are the same for every P.
    """
    for place, layer in model.named_modules():
        if isinstance(layer, MoE):
            layer.name = place
    moe = {id(p) for layer in moe_layers(model) for p in layer.parameters()}
    for name in [n for n, p in model.named_parameters() if id(p) in moe] if names is None else names:
        p = model.get_parameter(name)
        if experts := expert_names(model, name):
            layer = model.get_submodule(name.partition(".experts.")[0])
            first = 0 if layer.group is None else dist.get_rank(layer.group) * len(p)
            draws = [initial_weight(n, p.shape[1:], layers, seed) for n in experts[first : first + len(p)]]
            p.copy_(torch.stack(draws))
        else:
            p.copy_(initial_weight(full_name(model, name), p.shape, layers, seed))


# ------------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class LlamaConfig:
    moe: MoEConfig = field(default_factory=MoEConfig)
    vocab_size: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped K/V heads; chapter 01 explains it."""

    def __init__(self, c: LlamaConfig):
        super().__init__()
        H = c.moe.hidden
        self.D = c.moe.hidden // c.heads
        self.theta = c.rope_theta
        sizes = {"q_proj": H, "k_proj": c.kv_heads * self.D, "v_proj": c.kv_heads * self.D}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(H, size, bias=False))
        self.o_proj = nn.Linear(H, H, bias=False)

    def rope(self, x: Tensor) -> Tensor:  # [B, S, N, D]
        exponent = torch.arange(0, self.D, 2, device=x.device).float() / self.D
        angle = torch.arange(x.shape[1], device=x.device)[:, None].float() * (1.0 / self.theta**exponent)
        cos = angle.cos()[:, None]
        sin = angle.sin()[:, None]  # [S, 1, D/2]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.D)) for p in (self.q_proj, self.k_proj, self.v_proj))  # [B, S, N, D]
        q, k, v = (y.transpose(1, 2) for y in (self.rope(q), self.rope(k), v))  # [B, N, S, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2))  # [B, N, S, D] -> [B, S, H]


class Block(nn.Module):
    def __init__(self, c: LlamaConfig, feed_forward: Callable[[], nn.Module]):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(c.moe.hidden, c.norm_eps) for _ in range(2))
        self.self_attn = Attention(c)
        self.mlp = feed_forward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class MoELlama(nn.Module):
    """tokens [B, S] -> logits [B, S, V]. `group`, `count_group` and options are passed to MoE."""

    def __init__(self, c: LlamaConfig, group: Group, count_group: Group, *, recompute: bool = False, **options):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.moe.hidden)
        blocks = [Block(c, lambda: MoE(c.moe, group, count_group, **options)) for _ in range(c.layers)]
        self.model.layers = nn.ModuleList(blocks)
        self.model.norm = nn.RMSNorm(c.moe.hidden, c.norm_eps)
        self.lm_head = nn.Linear(c.moe.hidden, c.vocab_size, bias=False)
        init_moe(self, c.layers, 0, [name for name, _ in self.named_parameters()])
        if recompute:
            recompute_blocks(self.model.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.lm_head(self.model.norm(x))


def loss_sum(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum, not mean, of the cross entropy over valid labels, in fp32 or better."""
    logits = model(tokens).flatten(0, 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def train_step(model: nn.Module, batches: list[MicroBatch], data_group: Group, replica_group: Group) -> Tensor:
    """Forward and backward of this rank's micro-batches; gradients are then complete. Returns the cross
    entropy of the global batch; for the balance losses see `take_losses`."""
    model.zero_grad()
    valid = torch.stack([(labels != IGNORE).sum() for _, labels in batches]).sum()
    valid = group_sum(valid, data_group).clamp(min=1)  # of the global batch
    set_loss_scale(model, 1 / len(batches))  # equal micro-batches
    total = torch.zeros((), dtype=torch.float64, device=valid.device)
    for tokens, labels in batches:
        loss = loss_sum(model, tokens, labels) / valid
        loss.backward()
        total += loss.detach()
    reduce_gradients(model, data_group, replica_group)
    return group_sum(total, data_group)  # only for the log: each rank has a part of the loss


# ------------------------------------------------------------------------------------------------------------- demo


def batch_of(step: int, micro_batches: int, B: int, S: int, device: torch.device | str = "cpu") -> list[MicroBatch]:
    """Micro-batches of text; a part of the first rows has no targets."""
    data = text(micro_batches * B, S + 1, start=step * micro_batches * B * (S + 1)).to(device)
    tokens = data[:, :-1]
    labels = data[:, 1:].clone()
    labels[0, : S // 2] = IGNORE
    return list(zip(tokens.chunk(micro_batches), labels.chunk(micro_batches), strict=True))


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    rank = dist.get_rank(group)
    D = size_of(group)
    P = args.ep or size_of(group)
    m = 2
    S = 24
    experts, replicas = expert_groups([list(range(D))], P)
    sigmoid = args.router == "sigmoid"
    balance = dict(bias_speed=0.01) if sigmoid else dict(balance=0.1, z=0.01)
    moe = MoEConfig(32, 48, args.experts, args.top_k, 1, args.router, capacity=args.capacity, **balance)
    config = LlamaConfig(moe)
    report = Report(group)
    dtype = torch.float32 if args.compute == "grouped" else torch.float64
    options = dict(version=args.version, compute=args.compute)
    model = MoELlama(config, experts, group, recompute=args.recompute, **options).to(device, dtype)
    reference = MoELlama(config, None, None).to(device, dtype)  # one process, tested against transformers
    for step in range(3):
        batch = batch_of(step, m, 2 * D, S, device)
        mine = [(tokens.chunk(D)[rank], labels.chunk(D)[rank]) for tokens, labels in batch]
        want = train_step(reference, batch, None, None)
        loss = train_step(model, mine, group, replicas)
        report.compare(loss, want)
        wanted = gather_experts(reference, {n: p.grad for n, p in reference.named_parameters()}, None)
        for name, gradient in gather_experts(model, {n: p.grad for n, p in model.named_parameters()}, experts).items():
            report.compare(gradient, wanted[name])
        report.compare(squared_gradient_norm(model, experts), squared_gradient_norm(reference, None))
        losses = take_losses(model, group)
        expected = take_losses(reference, None)
        for what, value in expected.items():
            report.compare(torch.tensor(losses[what]), torch.tensor(value))
        counts = update_biases(model, group)
        expected = update_biases(reference, None)
        report.compare(counts.double(), expected.double())
        for p in [*model.parameters(), *reference.parameters()]:
            p.data -= 0.1 * p.grad
    state = full_state_dict(model, experts)
    expected = full_state_dict(reference, None)
    for name, value in state.items():
        report.compare(value.double(), expected[name].double())

    report.title(f"{D} rank(s), {moe.experts} experts on {P}, {args.router} router{', recomputed' * args.recompute}")
    what = "largest error of losses, gradients, norms, counts, weights"
    report.add_errors(what, 1e-10 if dtype == torch.float64 else 1e-5)
    e = dtype.itemsize
    held = sum(p.nbytes for p in expert_parameters(model).values())
    whole = config.layers * 3 * moe.hidden * moe.intermediate * moe.experts * e
    report.add("bytes of experts on this rank, N_e/P", whole // P, held)
    again = MoELlama(config, experts, group).to(device, dtype)
    load_full_state_dict(again, state, experts)
    differ = sum(not torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    report.add("weights that differ after a full state dict", 0, differ)
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="A small Mixtral on several ranks.", allow_abbrev=False)
    parser.add_argument("--ep", type=int, default=0, help="ranks of an expert group; by default all")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--router", choices=ROUTERS, default="softmax")
    parser.add_argument("--capacity", type=float, default=None, help="capacity factor; without it nothing is dropped")
    parser.add_argument("--version", choices=DISPATCH, default="pairs")
    parser.add_argument("--compute", choices=COMPUTES, default="loop")
    parser.add_argument("--recompute", action="store_true", help="run each block again in backward")
    args = parser.parse_args()
    parser.check_range(args, ep=(0, 1024), experts=(1, 1024), top_k=(1, 1024))
    if args.capacity is not None and not 0 < args.capacity < math.inf:
        parser.error(f"--capacity {args.capacity} leaves no room; use a positive number")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.ep and world % args.ep:
        fits = ", ".join(str(p) for p in range(1, world + 1) if world % p == 0)
        parser.error(f"--ep {args.ep} does not divide {world} ranks; use {fits}")
    try:
        MoEConfig(experts=args.experts, top_k=args.top_k).check(args.ep or world)
    except ValueError as error:
        parser.error(f"--{error}")
    check_gpus(parser)
    launch(lambda group, device: demo(args, group, device))


if __name__ == "__main__":
    main()
