"""A linear layer in 8 bits: one scale per tensor, per row, or per tile, for three matrix products.

Problem. Tensor cores multiply fp8 twice as fast as bf16, but e4m3 has 18 powers of two, and up to 8 steps in
each. A gradient of 1e-5 is zero in it, an activation of 500 is too large. So every tensor needs a scale. One
scale must cover the largest element, so a single outlier pushes all others towards zero.

Idea. q = x / s in fp8, s = amax / 448 in fp32, x ~ q · s. The question is how many elements share an s:

    tensor                     row                      tile (DeepSeek-V3)
    +---------------+          +---------------+ s      +-------+-------+
    |               |          +---------------+ s      | s     | s     |   activations: 1 x 128
    |       s       |          +---------------+ s      +-------+-------+
    |               |          +---------------+ s      |   s   |   s   |   weights: 128 x 128
    +---------------+          ...                      +-------+-------+

Three products, each with its own sum, and a scale may not change inside a sum without interrupting it (W [N, K]):
    Fprop   y  [M, N] = x  Wᵀ     sum over K     scales of x and W lie along K
    Dgrad   dx [M, K] = dy W      sum over N     scales of dy and W lie along N
    Wgrad   dW [N, K] = dyᵀ x     sum over M     scales of dy and x lie along M (tokens): x is quantised twice
With one scale per tensor, or per 128 x 128 block, one quantised copy serves both directions.

    recipe           scale of x, dy / W        from                    formats (forward, gradients)    source
    tensor           full / full               this tensor             e4m3, e5m2                      2209.05433
    tensor-delayed   full / full               largest of 16 steps     e4m3, e5m2                      Transf. Engine
    row              1 x all / 1 x all         this tensor             e4m3, e4m3                      torchao
    block            1 x 128 / 128 x 128       this tensor             e4m3, e4m3                      2412.19437, 3.3.2
(16 steps are this file's choice; Transformer Engine's default is 1024.)

Sharing. If ranks hold shards of a tensor, its amax is the largest of all shards: an all-reduce (MAX) over
that group, or ranks would round the same values differently. Delayed scaling sends all amaxes of a step in
one message. Tiles need no message as long as the tensor is split at multiples of 128.

Bytes saved for backward: x and W in fp8, M·K + N·K, and their scales. A bf16 layer saves 2·M·K, no copy of W.

Run it:
    python fp8.py                                    every recipe: errors of the three products, bytes saved
    torchrun --nproc_per_node 2 fp8.py               tokens sharded over ranks: same results as on one rank
This script emulates, also on a GPU: real fp8 values, matmuls in fp32. `Fp8Linear(recipe, device="cuda")`
multiplies on the fp8 tensor cores of a Hopper GPU (fp8_kernels.py), as `bench_fp8.py --gpu` and the trainer
do. The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _precision_demo import Decoder, OneLineParser, Report, batch, launch, loss_sum, stdlib_bytes
from formats import TILE, Block, Quantized, amax_of, e4m3, emulated_matmul, expand, quantize, transpose
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

# Legend: x [M, K] activations of M tokens, W [N, K] a weight, dy [M, N] the gradient of y. Blocks are (rows, columns);
# 0 stands for all of them.
e5m2 = torch.float8_e5m2
PRODUCTS = ("triton", "cuda")  # kernels for a GPU
NAMES = {"x": "an input", "w": "a weight", "dy": "a gradient"}


def check_finite(amax: Tensor, what: str) -> None:
    """Raise FloatingPointError if x has infinity or NaN, which a saturating cast would hide or spread."""
    if not torch.isfinite(amax).all():
        raise FloatingPointError(f"fp8: {what} has an infinity or NaN, and no scale fits it; look at what made it")


def not_nan(amax: Tensor) -> Tensor:
    """Replace NaN by infinity: a maximum over ranks may ignore NaN, but not infinity."""
    return amax.nan_to_num(torch.inf, torch.inf)


# ----------------------------------------------------------------------------------------------------- three products


@dataclass(frozen=True)
class Recipe:
    """Which elements share a scale, for activations and gradients, and for weights, if the sum runs along a row."""

    activation: Block
    weight: Block
    gradient_dtype: torch.dtype
    history: int = 0  # steps whose largest amax makes the scale; 0: the tensor's own

    def block(self, role: str, summed: int) -> Block:
        """The block of "x", "w" or "dy" in a product that sums over dimension `summed` of it."""
        across, along = self.weight if role == "w" else self.activation
        # --- exercise 10.32: scales lie along the dimension that is summed ---
        return (across, along) if summed == 1 else (along, across)
        # --- end exercise ---


RECIPES = {
    "tensor": Recipe((0, 0), (0, 0), e5m2),
    "tensor-delayed": Recipe((0, 0), (0, 0), e5m2, history=16),
    "row": Recipe((1, 0), (1, 0), e4m3),
    "block": Recipe((1, TILE), (TILE, TILE), e4m3),
}


def tensor_core_matmul(a: Quantized, b: Quantized, dtype: torch.dtype, promote: int = TILE, bits: int = 14) -> Tensor:
    """The matmul as summed by Hopper's tensor cores, for study, not for training: memory M·N·33.

    They take 32 products at a time, shift them and the accumulator to the largest exponent among them, keep
    `bits` bits and truncate the rest (2412.19437, section 3.5.2). The remedy is to add the partial sum to an
    fp32 register after every `promote` terms (section 3.3.2; there 128, four instructions). 0: never.
    """
    K = a.values.shape[1]
    if promote == 0 and a.scale.shape[1] * b.scale.shape[1] > 1:
        raise ValueError("promote 0 with scales that change along the sum: each tile needs its own partial sum")
    left = a.values.float()
    right = b.values.float()
    scale_a, scale_b = (expand(q.scale, q.block, q.values.shape) for q in (a, b))  # one per element
    total = left.new_zeros(len(left), len(right))
    partial = torch.zeros_like(total)
    # --- exercise 10.34: a sum of 14 bits, and its rescue ---
    for k in range(0, K, 32):
        products = left[:, None, k : k + 32] * right[None, :, k : k + 32]  # [M, N, 32], exact in fp32
        terms = torch.cat((products, partial[..., None]), dim=-1)
        largest = torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent
        unit = torch.ldexp(torch.ones_like(partial)[..., None], largest - bits)
        partial = (torch.trunc(terms / unit) * unit).sum(-1)
        if k + 32 >= K or (promote and (k + 32) % promote == 0):
            total += partial * scale_a[:, k, None] * scale_b[None, :, k]
            partial = torch.zeros_like(total)
    # --- end exercise ---
    return total.to(dtype)


class ThreeProducts(torch.autograd.Function):
    """y = x Wᵀ with its gradients. `operands(tensor, role)` gives the two quantised forms of a tensor: for a sum along
    its rows, and for one along its columns. `matmul(a, b, dtype)` is a bᵀ. Saved for backward: x and W in 8 bits."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, operands: Callable, matmul: Callable[..., Tensor]):
        x_k, x_m = operands(x, "x")
        w_k, w_n = operands(weight, "w")  # named by the dimension that is summed
        ctx.save_for_backward(x_m.values, x_m.scale, w_n.values, w_n.scale)
        ctx.blocks = (x_m.block, w_n.block)
        ctx.dtype = weight.dtype
        ctx.operands, ctx.matmul = operands, matmul
        return matmul(x_k, w_k, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x_values, x_scale, w_values, w_scale = ctx.saved_tensors
        x_m = Quantized(x_values, x_scale, ctx.blocks[0])
        w_n = Quantized(w_values, w_scale, ctx.blocks[1])
        # --- exercise 10.33: Dgrad and Wgrad, each with operands that are scaled along its sum ---
        dy_n, dy_m = ctx.operands(dy, "dy")
        dx = ctx.matmul(dy_n, transpose(w_n), dy.dtype)  # [M, N] and [K, N], summed over N -> [M, K]
        dw = ctx.matmul(transpose(dy_m), transpose(x_m), ctx.dtype)  # [N, M] and [K, M], over M -> [N, K]
        # --- end exercise ---
        return dx, dw, None, None


class Fp8Linear:
    """`linear(x, weight)` by a recipe, for any number of layers, which are identified by their weight.

        linear = Fp8Linear("tensor-delayed", amax_group=group)
        model = Llama(config, replace(Parts(), linear=linear))      # or ColumnParallelLinear(..., linear=linear)
        ... forward, backward ...
        linear.end_step()                                            # once per optimizer step, on every rank

    recipe       a key of RECIPES
    amax_group   the ranks that share an amax: those with shards of the same tensors (tensor parallel) or of the
                 same batch (data and context parallel). Used only with one scale per tensor. None, or a group
                 of one rank: not shared. All of its ranks must run the same layers in the same order.
    matmul       (a, b, dtype) -> a bᵀ. None: emulated_matmul on a CPU, fp8_kernels.py on a GPU, Hopper or later
    product      on a GPU: "triton", or "cuda" for recipe block on Hopper, where nvcc is (fp8_matmul.py)

    Raises FloatingPointError if an input has NaN or infinity: at once on a CPU, in end_step() on a GPU (a check at
    once would synchronize). Where ranks share amaxes all raise: with a delayed scale in end_step(), where they next
    share one. Recipes "row" and "block" share none, so there only the rank with the value raises.

    A history of zeros (an expert without tokens, a weight that begins as zeros) gives no scale: the tensor's own
    amax does then, as in the first step.

    A forward pass without gradients, as in validation, is not part of a step: it adds nothing to the history,
    and a GPU records nothing. With recomputation one or both forward passes count: the maximum is equal.

    On a GPU each operand is read and written by kernels that make both of its forms. A weight is quantised
    again in each forward pass, also for each micro-batch: saving it would cost 2 N K bytes in all layers at
    once, and an optimizer that writes weights in its own kernel does not tell PyTorch that they have changed.
    """

    def __init__(
        self,
        recipe: str,
        amax_group: dist.ProcessGroup | None = None,
        *,
        device: str | torch.device = "cpu",
        matmul: Callable[..., Tensor] | None = None,
        product: str = "triton",
    ):
        if recipe not in RECIPES:
            raise ValueError(f"fp8 recipe {recipe!r} is unknown; use {', '.join(RECIPES)}")
        if product not in PRODUCTS:
            raise ValueError(f"fp8 product {product!r} is unknown; use {', '.join(PRODUCTS)}")
        if product == "cuda" and recipe != "block":
            raise ValueError(f"fp8 product 'cuda' multiplies by recipe block only, not {recipe!r}; leave it out")
        if product == "cuda" and matmul is not None:
            raise ValueError("fp8 matmul and product 'cuda' both say who multiplies; leave one out")
        if amax_group is not None and dist.get_world_size(amax_group) == 1:
            amax_group = None
        self.recipe = RECIPES[recipe]
        self.group = amax_group
        self.kernels: Any = None
        if matmul is None and torch.device(device).type == "cuda":
            import fp8_kernels

            if reason := fp8_kernels.refusal(device):
                raise ValueError(f"{reason}; use bf16")
            self.kernels = fp8_kernels
        if product == "cuda":
            import fp8_matmul

            if reason := fp8_matmul.refusal(device):
                raise ValueError(reason)
            matmul = fp8_matmul.cuda_matmul
        self.matmul = matmul or (self.kernels.scaled_matmul if self.kernels else emulated_matmul)
        self.per_tensor = self.recipe.activation == (0, 0)
        self.histories: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> role -> History
        self.columns: list[History] = []  # whose tensors are columns of `past`, `now` and `peak`
        self.ended = 0  # steps
        self.bad: list[tuple[str, Tensor]] = []  # on a GPU: amaxes to check in end_step(),
        self.notes: dict[str, Tensor] = {}  # and those with the largest element of all tensors of a name

    def several(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """x through several layers, as one by one, but quantised once: they save the same form for backward.
        With a history every layer records the amax of x under its own weight, and quantises x itself."""
        shared: dict[str, Any] | None = None if self.recipe.history else {}
        products = [self(x, weight, shared) for weight in weights]
        if shared is not None:
            shared.clear()  # so that backward does not hold the form of x that only forward uses
        return products

    def __call__(self, x: Tensor, weight: Tensor, shared: dict[str, Any] | None = None) -> Tensor:
        """x [..., K] Wᵀ -> [..., N]. `shared` has the forms of x for layers of the same x; the first layer fills it."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))  # y takes the dtype of x
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # [B, S, K] -> [M, K]
        # A rank without tokens (an expert without rows) still shares its amax, but needs no kernel.
        matmul = self.matmul if len(rows) else emulated_matmul
        lack = -len(rows) % 16 if self.kernels else 0  # experts get any number of rows; zeros change nothing
        rows = F.pad(rows, (0, 0, 0, lack)) if lack else rows
        if self.kernels:
            check_sizes(*weight.shape)

        counts = torch.is_grad_enabled()  # read here: inside `apply` it is off

        def operands(tensor: Tensor, role: str) -> tuple[Quantized, Quantized]:
            if role != "x" or shared is None:
                return quantised(tensor, role)
            if role not in shared:
                shared[role] = quantised(tensor, role)
            return shared[role]

        def quantised(tensor: Tensor, role: str) -> tuple[Quantized, Quantized]:
            if self.kernels and tensor.numel():
                return self.both(tensor, role, weight, counts)
            along_rows = self.recipe.block(role, 1)
            along_columns = self.recipe.block(role, 0)
            first = self.quantize(tensor, role, along_rows, weight, counts)
            if along_rows == along_columns:  # one scale, or a square block: one form serves both sums
                return first, first
            return first, self.quantize(tensor, role, along_columns, weight, counts)

        y = ThreeProducts.apply(rows, weight, operands, matmul)
        y = y[: len(rows) - lack] if lack else y  # a slice, even of all rows, is a copy in the backward pass
        return y if x.dim() == 2 else y.view(*x.shape[:-1], len(weight))

    def quantize(self, tensor: Tensor, role: str, block: Block, weight: Tensor, counts: bool = True) -> Quantized:
        """One operand in fp8, by the recipe, in PyTorch. `counts`: whether it is part of a step."""
        dtype = self.recipe.gradient_dtype if role == "dy" else e4m3
        what = f"{NAMES[role]} of shape {[*tensor.shape]}"
        if self.per_tensor:
            amax = not_nan(amax_of(tensor, block))
            shared = self.share(amax, role, weight, counts)
            # Only now: a rank that raised before it sent its amax would leave the others waiting.
            self.watch(amax if self.group is None else shared, what, counts)
            return quantize(tensor, dtype, block, shared)
        q = quantize(tensor, dtype, block)
        self.watch(q.scale, what, counts)  # a block with NaN or infinity has a scale that is not finite
        return q

    def both(self, tensor: Tensor, role: str, weight: Tensor, counts: bool) -> tuple[Quantized, Quantized]:
        """The two forms of an operand, for a sum along its rows and along its columns, by the kernels of the GPU."""
        dtype = self.recipe.gradient_dtype if role == "dy" else e4m3
        what = f"{NAMES[role]} of shape {[*tensor.shape]}"
        if not self.per_tensor:
            note = self.note(what, tensor.device, counts)
            forms = self.kernels.quantize_both(tensor, dtype, self.recipe.block(role, 1), note)
            if tensor.device.type == "cpu":
                check_finite(note, what)
            return forms
        history = self.history(weight, role, tensor.device) if self.recipe.history else None
        if history and history.steps > 0:  # the scale is already known: one read of the tensor is enough
            return self.kernels.cast(tensor, dtype, history.peak, history.now if counts else None)
        amax = self.kernels.amax(tensor)
        shared = self.share(amax, role, weight, counts)
        self.watch(amax if self.group is None else shared, what, counts)
        return self.kernels.cast(tensor, dtype, shared)

    def note(self, what: str, device: torch.device, counts: bool) -> Tensor:
        """Where kernels store the largest element of the tensors of this name, [1, 1] in fp32. It is checked
        in end_step(), unless this is not part of a step."""
        if counts and what in self.notes:
            return self.notes[what]
        note = torch.zeros(1, 1, dtype=torch.float32, device=device)
        if counts and device.type != "cpu":
            self.notes[what] = note
        return note

    def watch(self, amax: Tensor, what: str, counts: bool) -> None:
        if amax.device.type == "cpu":
            check_finite(amax, what)
        elif counts:  # or they would accumulate without end_step()
            if amax.numel() != 1:
                amax = (amax.amax() if amax.numel() else amax.sum()).view(1, 1)
            self.bad.append((what, amax))

    def history(self, weight: Tensor, role: str, device: torch.device) -> History:
        roles = self.histories.setdefault(weight, {})
        if role not in roles:
            roles[role] = History(self.recipe.history, device)
        return roles[role]

    def share(self, amax: Tensor, role: str, weight: Tensor, counts: bool) -> Tensor:
        """The amax for the scale [1, 1]: of this tensor or the last steps, of this rank's shard or all."""
        if self.recipe.history:
            history = self.history(weight, role, amax.device)
            # --- exercise 10.35: remember this step, unless it does not count, and use the steps before ---
            if counts:
                torch.maximum(history.now, amax, out=history.now)  # several micro-batches make one step
            if history.steps > 0:
                return history.past.amax().view(1, 1)  # all ranks agree on it since end_step(): nothing to send
            # --- end exercise ---
        if self.group is not None:
            # --- exercise 10.36: one scale for a tensor whose pieces are on several ranks ---
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
            # --- end exercise ---
        return amax

    def end_step(self) -> None:
        """After the optimizer step: add the step's amaxes to the history, in one message for all layers."""
        bad = [*self.bad, *self.notes.items()]
        self.bad = []
        self.notes = {}
        histories = [history for roles in self.histories.values() for history in roles.values()]
        if histories != self.columns:
            self.line_up(histories)
        if histories and self.group is not None:
            dist.all_reduce(self.now, op=dist.ReduceOp.MAX, group=self.group)
        amaxes = [amax.flatten() for _, amax in bad]
        amaxes += [self.now[0]] if histories else []  # the same on all ranks, so that they raise together
        found = torch.cat(amaxes).tolist() if amaxes else []  # one wait for the GPU
        if not all(map(math.isfinite, found)):
            names = [f"{NAMES[r]} of a layer with weights {[*w.shape]}" for w, rs in self.histories.items() for r in rs]
            bad += zip(names, self.now[0], strict=True) if histories else ()
            for what, amax in bad:
                check_finite(amax, what)
        if histories:
            self.past[self.ended % self.recipe.history] = self.now[0]
            torch.amax(self.past, 0, keepdim=True, out=self.peak)
            self.now.zero_()
            self.ended += 1
        for history, amax in zip(histories, found[len(found) - len(histories) :], strict=True):
            history.quiet = 0 if amax > 0 else history.quiet + 1
            history.steps = history.steps + 1 if history.quiet < self.recipe.history else 0

    def line_up(self, histories: list[History]) -> None:
        """Make their tensors columns of shared ones: end_step() is a few operations for all layers together."""
        self.past, self.now, self.peak = (
            torch.cat([getattr(history, name) for history in histories], dim=1) for name in ("past", "now", "peak")
        )
        for i, history in enumerate(histories):
            here = slice(i, i + 1)
            history.past = self.past[:, here]
            history.now = self.now[:, here]
            history.peak = self.peak[:, here]
        self.columns = histories

    def leave_out_step(self) -> None:
        """Replaces end_step() for a step that leaves the weights unchanged: its amaxes are dropped."""
        self.notes = {}
        self.bad = []
        for history in (history for roles in self.histories.values() for history in roles.values()):
            history.now.zero_()


class History:
    """For one operand of a layer: the amaxes of the last steps in a ring buffer, the largest of them, and the
    current step's amax. After its first step these are views of tensors that all layers share."""

    def __init__(self, length: int, device: torch.device):
        self.past, self.now, self.peak = (torch.zeros(n, 1, dtype=torch.float32, device=device) for n in (length, 1, 1))
        self.steps = 0  # it looks back on; 0: none, or none with an amax above 0, which gives no scale
        self.quiet = length  # steps since such an amax, as of an expert without tokens


def check_sizes(outputs: int, inputs: int) -> None:
    """ValueError unless an fp8 tensor core takes a weight of these sizes: rows of n · 16 bytes, in all products."""
    for what, size in (("outputs", outputs), ("inputs", inputs)):
        if size % 16:
            fitting = -(-size // 16) * 16
            raise ValueError(f"fp8 matmul with {size} {what}: no multiple of 16; pad it to {fitting}, or use bf16")


# ------------------------------------------------------------------------------------------------------------- demo


def with_outliers(rows: int, columns: int, features: int = 1, factor: float = 1e5) -> tuple[Tensor, Tensor]:
    """Activations as large models have them (2208.07339): normal, but huge in a few features, always the same
    ones. Returns x [rows, columns] and which columns are ordinary."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    ordinary = torch.ones(columns, dtype=torch.bool)
    ordinary[torch.randperm(columns, generator=generator)[:features]] = False
    x[:, ~ordinary] *= factor
    return x, ordinary


class LargeFeatures:
    """`linear(x, weight)` in a model with outliers: of x's K features the same few are `factor` times as large, and
    their weights as much smaller. A power of two, so that in fp32 neither y nor a gradient changes by a bit.
    So a recipe's error comes from both kinds sharing a scale.

    Layers with fewer than 4096 inputs stay as they are. Six features of 4096 are what 2208.07339 finds at 6.7 B
    parameters; factors of about 100 are usual (2211.10438), and 100,000 have been seen (2402.17762).
    """

    def __init__(self, linear: Callable[[Tensor, Tensor], Tensor], factor: float):
        if factor <= 0 or math.frexp(factor)[0] != 0.5:
            raise ValueError(f"factor {factor:g} of the outliers is no power of two, and would change what is computed")
        self.linear = linear
        self.factor = factor

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        inputs = weight.shape[1]
        if inputs < 4096:
            return self.linear(x, weight)
        factors = torch.ones(inputs, device=x.device, dtype=x.dtype)
        chosen = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))[:6]
        factors[chosen] = self.factor
        return self.linear(x * factors, weight / factors.to(weight.dtype))


def relative(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def step_of(model: nn.Module, linear: Fp8Linear | None, tokens: Tensor, labels: Tensor, valid: int) -> dict:
    """Loss and gradients of one batch, as sums over this rank's tokens divided by the global number."""
    loss = loss_sum(model, tokens, labels) / valid
    loss.backward()
    if linear:
        linear.end_step()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def demo(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    report = Report(group)
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    sizes: dict[str, Any] = dict(hidden=128, inner=256, layers=1)
    tokens, labels = (t.to(device) for t in batch(stdlib_bytes(200_000), 0, rows=2 * ranks))
    mine = slice(2 * rank, 2 * rank + 2)
    # Emulated in float64, sums do not depend on their order, so a difference is a scale that was not shared.
    exact = step_of(Decoder(**sizes).to(device, torch.float64), None, tokens, labels, labels.numel())
    for name in RECIPES:
        alone, shared = (Fp8Linear(name, g, matmul=emulated_matmul) for g in (None, group))
        dense = step_of(
            Decoder(alone, **sizes).to(device, torch.float64), alone, tokens, labels, labels.numel()
        )  # the reference: the full batch on one rank, in the same recipe
        model = Decoder(shared, **sizes).to(device, torch.float64)
        run = step_of(model, shared, tokens[mine], labels[mine], labels.numel())
        for tensor in run.values():
            dist.all_reduce(tensor, group=group)
        worst = max((relative(run[key], dense[key]) for key in dense), key=lambda e: (e != e, e))  # a NaN is the worst
        report.title(f"{name} on {ranks} rank(s)")
        own = max((relative(dense[key], exact[key]) for key in dense), key=lambda e: (e != e, e))
        # In Wgrad a scale of "row" covers all tokens of a rank: another sharding has other, not worse scales.
        limit = own if name == "row" else 1e-10
        report.add("against the same recipe on one rank", f"<= {limit:.1e}", f"{worst:.1e}", worst <= limit)
        report.add("that recipe against none: largest error", "<= 0.15", f"{own:.3f}", own <= 0.15)
        M = 256
        K = 512
        N = 128
        x, ordinary = with_outliers(M, K)
        x = x.requires_grad_()
        weight = nn.Parameter(torch.randn(N, K) / K**0.5)
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t,
            lambda t: t,
        ):
            Fp8Linear(name, matmul=emulated_matmul)(x, weight)
        scales = {"row": 2 * K, "block": K * M // TILE + K * N // TILE**2}.get(name, 2)
        report.add("bytes kept for backward: M K + N K + 4 per scale", (M + N) * K + 4 * scales, sum(kept.values()))
        q = quantize(x.detach(), e4m3, RECIPES[name].block("x", 1)).dequantize()
        error = relative(q[:, ordinary], x.detach()[:, ordinary])
        lost = 0.6 if name == "block" else 1.0  # one tile in four has the outlier: half of the norm
        report.add("beside an outlier, error of ordinary elements", f"<= {lost}", f"{error:.3f}", error <= lost)
    return report.finish()


def main() -> None:
    OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False).parse_args()
    launch(demo)


if __name__ == "__main__":
    main()
