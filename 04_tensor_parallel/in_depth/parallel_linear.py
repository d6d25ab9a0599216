"""Tensor parallelism, the idea: a matrix product on t ranks, each of which stores 1/t of the matrix.

Problem. A layer may be too large or too slow for one device. So split the matrices, not the batch.

Idea. Two identities of block matrices are enough. By columns, x [A1 A2] = [x A1, x A2]: each rank computes
some columns of the output and needs all of x. By rows, [y1 y2] [B1; B2] = y1 B1 + y2 B2: each rank needs its
columns of y, and the partial products are summed. Elementwise functions in between need no communication:

    x -> f -> A, split by columns -> silu(gate) * up -> B, split by rows -> f* -> z

    rank 0    x    x A1 = y1      y1 B1, a partial z      f* sums the partial z of all ranks; in backward, f sums
    rank 1    x    x A2 = y2      y2 B2, a partial z      the partial gradients of x

          forward          backward
    f     identity         all-reduce        tensor parallel: x and z are replicated (1909.08053, section 3)
    f*    all-reduce       identity
    g     all-gather       reduce-scatter    sequence parallel: each rank has S/t of the tokens of x and z
    g*    reduce-scatter   all-gather        (2205.05198, section 4.2.2)

    each rank has              x, z           y             A (nn.Linear: [F, H])   B (nn.Linear: [H, F])
    tensor parallel            [B, S, H]      [B, S, F/t]   [F/t, H]                [H, F/t]
    with sequence parallel     [B, S/t, H]    [B, S, F/t]   [F/t, H]                [H, F/t]

Formulas, for an x of n bytes. An all-reduce is a reduce-scatter and an all-gather, so both send the same:
    sent, tensor parallel      2 all-reduces, one each way                         2 · 2(t-1)/t n
    with sequence parallel     an all-gather and a reduce-scatter each way         4 ·  (t-1)/t n
                               + an all-gather of the x that was not saved              (t-1)/t n
    weights, gradients         1/t of the matrices
    saved for backward         x (x/t with sequence parallel) and 4 tensors like y

Run it:
    python parallel_linear.py                                              one rank, CPU or GPU
    torchrun --nproc_per_node 4 parallel_linear.py                         Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 parallel_linear.py --column simple         saves all of x
Each runs with and without sequence parallel. The last line is PASS, or it exits with 1 and says which number is off.
"""

from __future__ import annotations

import argparse
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tensor_parallel_demo import OneLineParser, Report, Wire, kept_for_backward, launch, tokens_of_text
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Legend of shapes: B batch, S sequence, H hidden, F intermediate size, t ranks of the tensor group. S/t is S sharded
# over that group. Weights are [out, in] as in nn.Linear, so the paper's A by columns is split in dim 0.
Columns = tuple[Tensor, ...]
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# -------------------------------------------------------------------------------------- the conjugate operators


def same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group. x is not changed, because the residual stream or autograd may still use it."""
    total = x.clone(memory_format=torch.contiguous_format)  # the collective works in place, on the copy
    dist.all_reduce(total, group=group)
    return total


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S/t, H] -> all-gather -> [B, S, H], in the order of the ranks."""
    pieces = x.new_empty(dist.get_world_size(group), *x.shape)  # [t, B, S/t, H]: the collective stacks in front
    all_gather_single(pieces.flatten(0, 1), x.contiguous(), group=group)
    return pieces.movedim(0, 1).flatten(1, 2)  # a copy if B > 1; Megatron's [S, B, H] avoids it


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S, H] on each rank -> reduce-scatter -> this rank's [B, S/t, H] of the sum."""
    ranks = dist.get_world_size(group)
    if x.shape[1] % ranks:
        raise ValueError(f"sequence of {x.shape[1]} on {ranks} sequence-parallel ranks; use a multiple of {ranks}")
    pieces = x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()  # [t, B, S/t, H]
    mine = torch.empty_like(pieces[0])
    reduce_scatter_single(mine, pieces.flatten(0, 1), group=group)
    return mine


class Conjugate(torch.autograd.Function):
    """One collective in forward and, as its derivative, another in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, forward: Callable, backward: Callable) -> Tensor:
        ctx.group, ctx.send_back = group, backward
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.send_back(grad, ctx.group), None, None, None


def pair_of(operator: str) -> tuple[Callable, Callable]:
    """An operator's collective in forward, and in backward."""
    # --- exercise 4.21: which collective in forward, which in backward? ---
    return {
        "f": (same, all_reduce),  # x enters t products, so its gradient is the sum of t gradients
        "f*": (all_reduce, same),  # z is the sum of t partial sums, so each has the gradient dz
        "g": (all_gather, reduce_scatter),  # f, if each rank has S/t tokens of x
        "g*": (reduce_scatter, all_gather),  # f*, if each rank gets S/t tokens of z
    }[operator]
    # --- end exercise ---


def f(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S, H] -> [B, S, H]"""
    return Conjugate.apply(x, group, *pair_of("f"))


def f_star(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A partial sum [B, S, H] -> [B, S, H]"""
    return Conjugate.apply(x, group, *pair_of("f*"))


def g(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, S/t, H] -> [B, S, H]"""
    return Conjugate.apply(x, group, *pair_of("g"))


def g_star(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A partial sum [B, S, H] -> [B, S/t, H]"""
    return Conjugate.apply(x, group, *pair_of("g*"))


# ----------------------------------------------------------------------------------- column and row parallel products


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the inputs of a product as autocast would. Before communication this also halves the bytes."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)


def column_simple(x: Tensor, weights: Sequence[Tensor], tp: TensorParallel, linear: Callable) -> Columns:
    """Version 1: operators around `linear`. All weights (q, k and v) share x, so autograd first sums
    dx over them, and f or g sends the sum. With sequence parallel it saves the gathered x, S tokens."""
    (x,) = under_autocast(x)
    # --- exercise 4.22: one collective for several products of the same input ---
    whole = g(x, tp.group) if tp.sequence_parallel else f(x, tp.group)
    return tuple(linear(whole, weight) for weight in weights)
    # --- end exercise ---


def stacked(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))  # [out/t, in] each -> [sum of out/t, in]


def products(x: Tensor, weights: Sequence[Tensor]) -> Columns:
    """[B, S, in] -> [B, S, out/t] for each weight, by one product, which uses a GPU better than three small
    ones. It copies the weights, and the result, because a view of a part would keep all of it alive."""
    y = F.linear(x, stacked(weights))
    if len(weights) == 1:
        return (y,)
    parts = y.split([weight.shape[0] for weight in weights], dim=-1)
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)


def input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """[B, S, out/t] for each weight -> partial [B, S, in], by one product. Its accumulators, in fp32 for
    bf16, sum over q, k and v. A sum of three products would round in between, and go through memory."""
    dy = grads[0] if len(grads) == 1 else torch.cat(list(grads), dim=-1)
    return dy @ stacked(weights)


def weight_gradients(grads: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """[B, S, out/t] for each weight, [B, S, in] -> [out/t, in] each. One product per weight, because the
    parts of a single product would share memory, and no gradient could be freed by itself."""
    return [dy.flatten(0, 1).T @ x.flatten(0, 1) for dy in grads]


class GatherAgain(torch.autograd.Function):
    """g and the products in one node, which saves only the shard of x and gathers it again in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, *weights: Tensor) -> Columns:
        # --- exercise 4.23: keep S/t tokens for backward, not S ---
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        whole = all_gather(x, group)  # [B, S/t, H] -> [B, S, H], freed when this function returns
        # --- end exercise ---
        return products(whole, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        dw = weight_gradients(grads, all_gather(x, ctx.group))  # frees the gathered x before dx is computed
        return reduce_scatter(input_gradient(grads, weights), ctx.group), None, *dw


def column_gather_again(x: Tensor, weights: Sequence[Tensor], tp: TensorParallel, linear: Callable) -> Columns:
    """Version 2: with sequence parallel, one more all-gather in backward, and every saved tensor has S/t
    tokens (2205.05198, section 4.2.2). A custom `linear` decides what to save, so it gets version 1."""
    if not tp.sequence_parallel or linear is not F.linear:
        return column_simple(x, weights, tp, linear)
    x, *weights = under_autocast(x, *weights)
    return GatherAgain.apply(x, tp.group, *weights)


def row_simple(x: Tensor, weight: Tensor, tp: TensorParallel, linear: Callable) -> Tensor:
    """[B, S, in/t] times this rank's columns of W [out, in/t], summed over ranks -> [B, S, out] or [B, S/t, out]."""
    part = linear(x, weight)
    return g_star(part, tp.group) if tp.sequence_parallel else f_star(part, tp.group)


@dataclass(frozen=True)
class TensorParallel:
    """How a layer is split: the group, with or without sequence parallel, the versions of the products."""

    group: dist.ProcessGroup
    sequence_parallel: bool = False
    column: Callable[..., Columns] = column_gather_again  # (x, weights, tp, linear)
    row: Callable[..., Tensor] = row_simple  # (x, weight, tp, linear)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


COLUMNS = {"simple": column_simple, "gather-again": column_gather_again}

# ------------------------------------------------------------------------------ which rank stores which piece


@dataclass(frozen=True)
class Shard:
    """The part of a weight that a rank stores: piece `index` of `pieces` in dimension `dim` of length `size`.

    With fewer pieces than ranks, several ranks store the same piece. If `partial`, each of them computes only
    a partial sum of its gradient (parallel_block.py adds these up).
    """

    size: int
    dim: int
    pieces: int
    index: int
    partial: bool = False

    @property
    def length(self) -> int:
        return -(-self.size // self.pieces)  # rounded up: the last pieces may end in padding

    def cut(self, full: Tensor) -> Tensor:
        """This rank's piece of the full tensor; padding is zero."""
        missing = list(full.shape)
        missing[self.dim] = self.length * self.pieces - self.size
        full = torch.cat((full, full.new_zeros(missing)), self.dim) if missing[self.dim] else full
        return full.narrow(self.dim, self.index * self.length, self.length)

    def full_shape(self, piece: Tensor) -> list[int]:
        shape = list(piece.shape)
        shape[self.dim] = self.size
        return shape


def shards(model: nn.Module) -> dict[str, Shard]:
    """Parameter name -> its Shard on this rank, for each `weight` and each `bias`, which are split alike."""
    return {
        f"{name}.{kind}".lstrip("."): module.shard
        for name, module in model.named_modules()
        if hasattr(module, "shard")
        for kind in ("weight", "bias")
        if isinstance(getattr(module, kind, None), nn.Parameter)
    }


def initial_weight(name: str, shape: Sequence[int], layers: int, seed: int) -> Tensor:
    """The initial value of the *full* parameter `name`, from (seed, name) alone, as in chapter 01."""
    if len(shape) == 1:
        return torch.full(shape, float(not name.endswith("bias")), dtype=torch.float32)
    if name.endswith("lora_B.weight"):
        return torch.zeros(*shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    if name.endswith("lora_A.weight"):
        return torch.randn(*shape, dtype=torch.float32, generator=generator) * shape[1] ** -0.5
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    drawn = torch.randn(*shape, dtype=torch.float32, generator=generator)
    return drawn * (0.02 / math.sqrt(2 * layers) if residual else 0.02)


@torch.no_grad()
def init_weights(model: nn.Module, layers: int, seed: int) -> None:
    """Start from the same model for every t. Drawing only the shard would depend on t, and with the same seed
    on all ranks it would give t copies of the same columns, whose gradients stay equal for ever."""
    held = shards(model)
    for name, p in model.named_parameters():
        # --- exercise 4.24: draw the whole weight, keep a piece ---
        full = initial_weight(name, held[name].full_shape(p), layers, seed)
        p.copy_(held[name].cut(full))
        # --- end exercise ---


# ------------------------------------------------------------------------------------------------------ the layers


class Factor(nn.Module):
    """A matrix of an adapter (chapter 01): this rank's piece of lora_A [rank, in] or lora_B [out, rank]."""

    def __init__(self, outputs: int, inputs: int, shard: Shard):
        super().__init__()
        self.shard = shard
        self.weight = nn.Parameter(torch.empty(outputs, inputs))


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ, [B, S, in] (or [B, S/t, in]) -> [B, S, out/t]. With `pieces` < t some ranks hold the same columns."""

    def __init__(
        self, inputs: int, outputs: int, tp: TensorParallel, linear: Callable = F.linear, pieces: int | None = None
    ):
        super().__init__()
        pieces = pieces or tp.size
        self.tp, self.linear = tp, linear
        self.shard = Shard(outputs, 0, pieces, tp.rank * pieces // tp.size, partial=pieces < tp.size)
        self.weight = nn.Parameter(torch.empty(self.shard.length, inputs))
        self.bias: nn.Parameter | None = None
        self.lora_A: Factor | None = None

    def add_bias(self) -> None:
        """y = x Wᵀ + b. The bias is split like the columns: each rank adds its part, and nothing is sent."""
        self.bias = nn.Parameter(torch.zeros(self.shard.length))

    def add_adapter(self, rank: int, scale: float) -> None:
        """y = x Wᵀ + scale · (x Aᵀ) Bᵀ. B is split like the columns. A is replicated, and each rank has a
        partial gradient of it, from its own columns. x Aᵀ is one more product with an x that is sent once."""
        t = self.tp.size
        self.scale = scale
        self.lora_A = Factor(rank, self.weight.shape[1], Shard(rank, 0, 1, 0, partial=t > 1))
        self.lora_B = Factor(self.shard.length, rank, self.shard)

    @property
    def factors(self) -> list[Tensor]:
        """The weights that x is multiplied by."""
        return [self.weight] if self.lora_A is None else [self.weight, self.lora_A.weight]

    def forward(self, x: Tensor, made: Sequence[Tensor] | None = None) -> Tensor:
        """`made`: x times each of `factors`, if `columns` has computed them together with other layers."""
        y, *low = made or self.tp.column(x, self.factors, self.tp, self.linear)
        y = y if self.bias is None else y + self.bias.to(y.dtype)  # autocast: y may be narrower than the bias
        return y + self.scale * F.linear(low[0], self.lora_B.weight) if low else y


def columns(x: Tensor, layers: Sequence[nn.Module]) -> Columns:
    """The outputs of several layers of x. Those of this file's class gather x, and sum dx, together.

    Each layer is called, so that its hooks run. A layer of another class, or with hooks that see x first or
    its gradient, is called with x alone and needs a collective of its own.
    """
    plain = [layer for layer in layers if shares_a_product(layer)]
    plain = [layer for layer in plain if layer.linear is plain[0].linear]
    factors = [weight for layer in plain for weight in layer.factors]
    products = iter(plain[0].tp.column(x, factors, plain[0].tp, plain[0].linear) if plain else ())
    made = {layer: [next(products) for _ in layer.factors] for layer in plain}
    return tuple(layer(x, made[layer]) if layer in made else layer(x) for layer in layers)


def shares_a_product(layer: nn.Module) -> bool:
    own = getattr(layer.forward, "__func__", None) is not ColumnParallelLinear.forward
    return not (own or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ, [B, S, in/t] -> [B, S, out] (or [B, S/t, out])."""

    def __init__(self, inputs: int, outputs: int, tp: TensorParallel, linear: Callable = F.linear):
        super().__init__()
        self.tp, self.linear = tp, linear
        self.shard = Shard(inputs, 1, tp.size, tp.rank)
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size))
        self.lora_A: Factor | None = None

    def add_adapter(self, rank: int, scale: float) -> None:
        """y = x Wᵀ + scale · (x Aᵀ) Bᵀ. A is split like the rows; B is replicated, with partial gradients. A
        rank's part of the adapter is added to its part of x Wᵀ, before the one sum over the ranks."""
        t = self.tp.size
        outputs, inputs = self.weight.shape
        self.scale = scale
        self.lora_A = Factor(rank, inputs, self.shard)
        self.lora_B = Factor(outputs, rank, Shard(outputs, 0, 1, 0, partial=t > 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.row(x, self.weight, self.tp, self.linear if self.lora_A is None else self.with_adapter)

    def with_adapter(self, x: Tensor, weight: Tensor) -> Tensor:
        low = F.linear(x, self.lora_A.weight)  # [B, S, in/t] -> [B, S, rank], a partial sum
        return self.linear(x, weight) + self.scale * F.linear(low, self.lora_B.weight)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class ParallelMLP(nn.Module):
    """W_down (silu(W_gate x) * (W_up x)). Gate and up are split alike: one rank has column i of both."""

    def __init__(
        self, hidden: int, intermediate: int, tp: TensorParallel, linear: Callable = F.linear, act: Callable = swiglu
    ):
        super().__init__()
        if problem := cannot_divide(tp.size, "intermediate size", intermediate):
            raise ValueError(problem)
        self.act = act
        self.gate_proj = ColumnParallelLinear(hidden, intermediate, tp, linear)
        self.up_proj = ColumnParallelLinear(hidden, intermediate, tp, linear)
        self.down_proj = RowParallelLinear(intermediate, hidden, tp, linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.inner(x))  # [B, S, F/t] -> [B, S, H] or [B, S/t, H]

    def inner(self, x: Tensor) -> Tensor:
        """The part between the two messages: [B, S, H] or [B, S/t, H] -> [B, S, F/t]."""
        return self.act(*columns(x, [self.gate_proj, self.up_proj]))


def cannot_divide(ranks: int, what: str, size: int) -> str:
    """An error message of one line that names the fitting sizes; empty if `ranks` divides `size`."""
    if size % ranks == 0:
        return ""
    fitting = ", ".join(str(d) for d in range(1, min(size, 128) + 1) if size % d == 0)
    return f"{ranks} tensor-parallel ranks do not divide {what} {size}; use {fitting} ranks, or a multiple of {ranks}"


# ------------------------------------------------------------------------------------------------------------- demo


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """One MLP next to the reference, with and without sequence parallel."""
    B = 2
    S = args.sequence
    H = args.hidden
    F_ = args.intermediate
    t = dist.get_world_size(group)
    report = Report(group)
    x = F.embedding(tokens_of_text(B, S), initial_weight("embed.weight", (256, H), 1, seed=0)).to(device, torch.float64)
    want_x = x.clone().requires_grad_()
    shapes = {"gate_proj.weight": (F_, H), "up_proj.weight": (F_, H), "down_proj.weight": (H, F_)}
    w = {n: initial_weight(n, shape, 1, seed=0).to(x).requires_grad_() for n, shape in shapes.items()}
    hidden = swiglu(F.linear(want_x, w["gate_proj.weight"]), F.linear(want_x, w["up_proj.weight"]))
    want = F.linear(hidden, w["down_proj.weight"])  # the reference: the MLP on one device
    (want * want.detach()).sum().backward()  # a gradient that differs from element to element

    for sequence in (False, True):
        tp = TensorParallel(group, sequence, column=COLUMNS[args.column])
        mlp = ParallelMLP(H, F_, tp)
        init_weights(mlp, layers=1, seed=0)
        mlp.to(device, torch.float64)
        mine = Shard(S, 1, t if sequence else 1, tp.rank if sequence else 0).cut  # [B, S/t, H] of [B, S, H]
        my_x = mine(x).clone().requires_grad_()
        with Wire(t) as wire:
            z, kept = kept_for_backward(lambda mlp=mlp, my_x=my_x: mlp(my_x), list(mlp.parameters()))
            z.backward(mine(want.detach()))
        report.compare(z, mine(want))
        report.compare(my_x.grad, mine(want_x.grad))
        for name, shard in shards(mlp).items():
            report.compare(mlp.get_parameter(name).grad, shard.cut(w[name].grad))

        n = x.nbytes
        e = x.element_size()
        again = int(sequence and args.column != "simple")
        collectives = {"all-gather": 2 + again, "reduce-scatter": 2} if sequence else {"all-reduce": 2}
        report.title(f"{t} rank(s), tensor parallel{' + sequence parallel' * sequence}, column: {args.column}")
        report.add_errors("largest error against the reference")
        for name, count in collectives.items():
            report.add(f"calls of {name}", count, wire.calls[name])
        report.add("bytes sent by a rank", (4 + again) * (t - 1) * n // t, wire.bytes)
        report.add("bytes of weights, 3 H F / t", 3 * H * F_ * e // t, sum(p.nbytes for p in mlp.parameters()))
        report.add("bytes kept for backward", n // (t if again else 1) + 4 * B * S * F_ * e // t, kept)
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="An MLP on several ranks.", allow_abbrev=False)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=48)
    parser.add_argument("--column", choices=COLUMNS, default="gather-again")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for option, limit in (("hidden", 4096), ("intermediate", 16384), ("sequence", 4096)):
        if not 1 <= getattr(args, option) <= limit:
            parser.error(f"--{option} {getattr(args, option)} is not in 1 .. {limit}")
    for option in ("intermediate", "sequence"):
        if problem := cannot_divide(ranks, f"--{option}", getattr(args, option)):
            parser.error(problem)
    launch(lambda group, device: demo(args, group, device))


if __name__ == "__main__":
    main()
