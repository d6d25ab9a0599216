"""Mixed precision: train in 16 or 8 bits, and keep in fp32 what so few bits cannot hold.

A value of 16 bits takes half the memory and half the time to send of one in fp32, and tensor cores
multiply it many times as fast. But convert a whole model to fp16 and it does not learn. There are
four failures, and each has its own repair:

    underflow      gradients below 2^-25 become 0 in fp16      multiply the loss by a scale
    overflow       65,504 is fp16's largest value, then inf    skip it on all ranks, halve the scale
    lost updates   w - u = w if u is below half a gap at w     update a master copy in fp32
    long sums      every addition rounds: 2,048 + 1 = 2,048    add up the gradients in fp32

bf16 has the range of fp32, so it needs no scale. In fp8, linear layers of a bf16 model multiply
8-bit values. Each tensor has a scale that maps its largest absolute value to fp8's.

    bytes per parameter (SGD)  params  main_grads  master_weights  sent per step
    fp32                         4         4             -         4
    fp16, bf16, fp8              2         4             4         4, and 4 per found_inf or amax

Sources: Micikevicius et al. 2017, arXiv 1710.03740, section 3; and 2022, arXiv 2209.05433 (fp8).

    python mixed_precision.py                                one rank
    torchrun --nproc_per_node 4 mixed_precision.py           NCCL on GPUs, Gloo on CPUs

The last line is PASS if each failure shows, each repaired run is at most 1.5 times as far from
float64 as rounding alone must be, bytes are as in the table, and the ranks equal one process to
1e-10 where sums are float64.
"""

import argparse
import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

fp16 = torch.float16
bf16 = torch.bfloat16
fp32 = torch.float32
fp64 = torch.float64
e4m3 = torch.float8_e4m3fn
e5m2 = torch.float8_e5m2


# ----------------------------------------------------------- fp32: a training step in one precision
class Batch(NamedTuple):
    micro_batches: list[tuple[Tensor, Tensor]]  # this rank's tokens and labels, [B, S] each
    num_labels: int  # of all ranks, so that their losses and gradients simply add up


def plain_step(model: nn.Module, batch: Batch, lr: float, group):
    """One step of SGD, data parallel. Returns this rank's part of the loss, and the gradients.

    In fp32 this is all there is. In 16 bits each line with a comment fails, without a message.
    """
    params = list(model.parameters())
    model.zero_grad()
    total_loss = 0.0
    for tokens, labels in batch.micro_batches:
        loss = loss_sum(model(tokens), labels) / batch.num_labels
        loss.backward()  # underflow; and long sums, since p.grad adds up in 16 bits
        total_loss += loss.detach()
    for p in params:
        dist.all_reduce(p.grad, group=group)  # a sum over ranks, again in 16 bits
        p.data -= lr * p.grad  # lost updates
    return total_loss, [p.grad for p in params]


# --------------------------- bf16: a master copy against lost updates, main_grads against long sums
def update_master(param: Tensor, master: Tensor, grad: Tensor, lr: float) -> None:
    """Update the fp32 copy of a parameter, and round the result into the parameter.

    Lost updates: between 2^k and 2^(k+1) the values of a format with m bits of mantissa lie 2^(k-m)
    apart, and an update of less than half of that is lost. (Downwards from 2^k it is a quarter: the
    gap there is half as wide.) For bf16 that is every update below 1/512 of the parameter.
    """
    # --- exercise 10.2: the update happens where there are bits for it ---
    master -= lr * grad
    param.data.copy_(master)  # rounded here, and never read back: the master keeps all its bits
    # --- end exercise ---


def accumulate_grads(params: list[nn.Parameter], main_grads: list[Tensor]) -> None:
    """After the backward pass of a micro-batch, move its gradients into the sums.

    Long sums: at 2^(m+1) the gap is 2, so 4,096 gradients of 1 add up to 2,048 in fp16 and to 256
    in bf16.
    """
    for p, main_grad in zip(params, main_grads, strict=True):
        # --- exercise 10.4: add in the wide dtype, and free the narrow gradient ---
        main_grad += p.grad.to(main_grad.dtype)
        p.grad = None  # else autograd adds the next micro-batch to it, in 16 bits
        # --- end exercise ---


def forward_backward(model: nn.Module, batch: Batch, scale: float = 1.0):
    """All micro-batches of this rank: its part of the loss, and its gradients times `scale`."""
    params = list(model.parameters())
    main_grads = [torch.zeros_like(p, dtype=fp32) for p in params]
    total_loss = 0.0
    for tokens, labels in batch.micro_batches:
        loss = loss_sum(model(tokens), labels) / batch.num_labels
        (scale * loss).backward()
        accumulate_grads(params, main_grads)
        total_loss += loss.detach()
    return total_loss, main_grads


def master_step(model, master_weights: list[Tensor], batch: Batch, lr: float, group):
    """One step of SGD in bf16, also if linear layers compute in fp8."""
    total_loss, main_grads = forward_backward(model, batch)
    for p, master, main_grad in zip(model.parameters(), master_weights, main_grads, strict=True):
        dist.all_reduce(main_grad, group=group)
        update_master(p, master, main_grad, lr)
    return total_loss, main_grads


# ----------------------------- fp16: a loss scale against underflow, skipped steps against overflow
class LossScaler:
    """The factor on the loss, with the numbers of torch.amp.GradScaler.

    Underflow: the smallest value of fp16 is 2^-24, and half of that rounds to 0. Gradients are
    linear in the loss, so the factor multiplies them as well. A power of two changes only exponents
    and rounds nothing. The scale should be as large as overflow allows, and training finds it.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000):
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0  # since the scale has changed

    def update(self, found_inf: bool) -> None:
        self.good_steps = 0 if found_inf else self.good_steps + 1
        if found_inf:
            self.scale /= 2
            if self.scale < 1:  # NaN in the input: no scale helps, and skipping would never end
                raise FloatingPointError("gradients are infinite or NaN at a loss scale of 1")
        elif self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0


def found_inf_on_any_rank(main_grads: list[Tensor], group: dist.ProcessGroup) -> bool:
    """Whether any gradient is infinite or NaN. All ranks return the same.

    Overflow: the largest value of fp16 is 65,504. Two finite partial sums can have an infinite sum,
    so call this after the sum over ranks. With ZeRO, tensor or pipeline parallelism a rank has only
    some of the gradients. To imitate that, each rank checks only every world_size-th of them.
    """
    own_grads = main_grads[dist.get_rank(group) :: dist.get_world_size(group)]
    # --- exercise 10.3: the same answer on all ranks ---
    found_inf = torch.zeros((), device=main_grads[0].device)
    for grad in own_grads:
        found_inf += (~grad.isfinite()).any()
    # A rank that kept this to itself would skip alone, and then have other parameters.
    dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)  # [], 4 bytes
    return found_inf.item() > 0
    # --- end exercise ---


def scaled_step(model, master_weights, scaler: LossScaler, batch: Batch, lr: float, group):
    """One step of SGD in fp16. A skipped step changes only the scale, and its gradients are None.

    With Adam or clipping the order is: sum over ranks, look for infinities, divide by the scale,
    clip, update. In a skipped step Adam's moments and its count of steps stay as they are.
    """
    total_loss, main_grads = forward_backward(model, batch, scaler.scale)
    for main_grad in main_grads:
        dist.all_reduce(main_grad, group=group)
    found_inf = found_inf_on_any_rank(main_grads, group)
    if not found_inf:
        params = model.parameters()
        for p, master, main_grad in zip(params, master_weights, main_grads, strict=True):
            main_grad /= scaler.scale  # in fp32: in fp16 the zeros would come back
            update_master(p, master, main_grad, lr)
    scaler.update(found_inf)  # last: these gradients carry the scale from before
    return total_loss, None if found_inf else main_grads


# --------------------------------------------------- fp8: a scale for each tensor of a linear layer
def quantize_unscaled(x: Tensor, dtype: torch.dtype, group) -> tuple[Tensor, Tensor]:
    """Underflow again: the smallest value of e5m2 is 2^-16, and most gradients are below half."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype), x.new_ones(())


def quantize_scaled(x: Tensor, dtype: torch.dtype, group) -> tuple[Tensor, Tensor]:
    """Returns values in fp8 and one scale for the x of all ranks, with x = values * scale.

    The tokens of all ranks are one batch, so their activations are one tensor with one amax. With
    a scale for each rank the result would depend on the number of ranks.
    """
    largest = torch.finfo(dtype).max  # 448 in e4m3, 57,344 in e5m2
    # --- exercise 10.5: the scale that puts the largest |x| of all ranks on the largest value ---
    amax = x.abs().amax() if x.numel() > 0 else x.new_zeros(())  # a rank without tokens takes part
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)  # [], 4 bytes
    scale = amax / largest
    scale = torch.where(scale == 0, 1.0, scale)  # zeros stay zeros; NaN stays NaN
    # --- end exercise ---
    values = (x / scale).clamp(-largest, largest)  # a subnormal scale may be rounded down
    return values.to(dtype), scale


class Fp8Linear(torch.autograd.Function):
    """y = x @ weight.T of fp8 values, which are also what it saves for the backward pass.

    All terms of a sum have the same scale, so it is applied once, to the sum. Backward treats
    rounding as the identity. The rest of the model is in bf16, and `master_step` trains it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, quantize: Callable, group) -> Tensor:
        x_fp8, x_scale = quantize(x, e4m3, group)
        weight_fp8, weight_scale = quantize(weight, e4m3, group)
        ctx.save_for_backward(x_fp8, x_scale, weight_fp8, weight_scale)
        ctx.quantize = quantize
        ctx.group = group
        y = F.linear(x_fp8.to(x.dtype), weight_fp8.to(x.dtype))  # [B, S, K], [O, K] -> [B, S, O]
        return y * (x_scale * weight_scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor):
        x_fp8, x_scale, weight_fp8, weight_scale = ctx.saved_tensors
        # --- exercise 10.6: the other two matmuls, also of fp8 values ---
        grad_fp8, grad_scale = ctx.quantize(grad_y, e5m2, ctx.group)  # range before resolution
        grad = grad_fp8.to(grad_y.dtype)
        grad_x = grad @ weight_fp8.to(grad.dtype)  # [B, S, O], [O, K] -> [B, S, K]
        rows = grad.flatten(0, -2)  # [B S, O]
        grad_weight = rows.T @ x_fp8.to(grad.dtype).flatten(0, -2)  # [O, B S], [B S, K] -> [O, K]
        grad_x *= grad_scale * weight_scale
        grad_weight *= grad_scale * x_scale
        return grad_x, grad_weight, None, None
        # --- end exercise ---


# ------------------------------------------------------------------------------- What the bits mean
def decode(pattern: Tensor, exp_bits: int, man_bits: int, has_inf: bool) -> Tensor:
    """Bit patterns, as integers [n] -> their values in float64 [n].

    A sign, exp_bits that read e, and man_bits that read f. With bias = 2^(exp_bits - 1) - 1:

    e > 0          (-1)^sign 2^(e - bias) (1 + f / 2^man_bits)    equal steps between powers of two
    e = 0          (-1)^sign 2^(1 - bias) f / 2^man_bits          the same steps down to zero
    e all ones     infinity (f = 0) or NaN. But e4m3 has no infinity, and NaN only if f is all ones
                   as well: it ends at 448 instead of 240
    """
    # --- exercise 10.1: the value of a bit pattern ---
    bias = 2 ** (exp_bits - 1) - 1
    f = pattern & (2**man_bits - 1)
    e = pattern >> man_bits & (2**exp_bits - 1)
    sign = 1.0 - 2.0 * (pattern >> (exp_bits + man_bits))
    fraction = f.to(fp64) / 2**man_bits
    leading_one = (e > 0).to(fp64)
    magnitude = torch.ldexp(leading_one + fraction, e.clamp(min=1) - bias)
    top = e == 2**exp_bits - 1
    if has_inf:
        is_nan = top & (f > 0)
        magnitude = magnitude.masked_fill(top, torch.inf)
    else:
        is_nan = top & (f == 2**man_bits - 1)
    return sign * magnitude.masked_fill(is_nan, torch.nan)
    # --- end exercise ---


FORMATS = {  # exp_bits, man_bits, has_inf
    "fp16": (5, 10, True),
    "bf16": (8, 7, True),
    "e5m2": (5, 2, True),
    "e4m3": (4, 3, False),
}


# ----------------------------------------------------------- A small Llama, and text to train it on
VOCAB_SIZE = 256  # bytes
HIDDEN = 32
FFN_HIDDEN = 64
N_LAYERS = 2
MICRO_BATCHES = 8
BATCH = 4  # sequences of a micro-batch, on all ranks together
SEQ_LEN = 32
IGNORE_INDEX = -100  # a label that does not count
REPLICAS = 4096  # as if so many ranks had this batch: a real loss is divided by millions of labels


class Block(nn.Module):
    def __init__(self, linear: Callable):
        super().__init__()
        self.linear = partial(run_kernel, linear)  # F.linear or its fp8 form
        self.attn_norm = draw_weight(HIDDEN)
        self.qkv_proj = draw_weight(3 * HIDDEN, HIDDEN)
        self.o_proj = draw_weight(HIDDEN, HIDDEN)
        self.mlp_norm = draw_weight(HIDDEN)
        self.gate_proj = draw_weight(FFN_HIDDEN, HIDDEN)
        self.up_proj = draw_weight(FFN_HIDDEN, HIDDEN)
        self.down_proj = draw_weight(HIDDEN, FFN_HIDDEN)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H] -> [B, S, H]
        h = run_kernel(rms_norm, x, self.attn_norm)
        q, k, v = self.linear(h, self.qkv_proj).chunk(3, dim=-1)
        attention = partial(F.scaled_dot_product_attention, is_causal=True)  # one head
        attn = run_kernel(attention, q, k, v)
        x = run_kernel(torch.add, x, self.linear(attn, self.o_proj))
        h = run_kernel(rms_norm, x, self.mlp_norm)
        h = run_kernel(swiglu, self.linear(h, self.gate_proj), self.linear(h, self.up_proj))
        return run_kernel(torch.add, x, self.linear(h, self.down_proj))


class Transformer(nn.Module):
    def __init__(self, linear: Callable):
        super().__init__()
        torch.manual_seed(0)  # the same initial parameters on every rank
        self.blocks = nn.Sequential(*[Block(linear) for _ in range(N_LAYERS)])
        self.embed = draw_weight(VOCAB_SIZE, HIDDEN)
        self.norm = draw_weight(HIDDEN)
        self.head = draw_weight(VOCAB_SIZE, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, S] -> [B, S, V]
        x = run_kernel(partial(F.embedding, tokens), self.embed)
        x = run_kernel(rms_norm, self.blocks(x), self.norm)
        return run_kernel(F.linear, x, self.head)  # embedding and head stay out of fp8


def draw_weight(*shape: int) -> nn.Parameter:
    weight = torch.randn(shape, dtype=fp64)
    return nn.Parameter(weight / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.1 * weight)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (HIDDEN,), weight, 1e-5)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum, not the mean, over the tokens that have a label; in fp32 or better."""
    logits = logits.to(torch.promote_types(logits.dtype, fp32)).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def get_batch(step: int, group: dist.ProcessGroup, device: torch.device) -> Batch:
    """Rank r of P takes the sequences r, r + P, ... of each micro-batch of a text."""
    data = torch.tensor(list(inspect.getsource(argparse).encode()))[1000 * step :]
    text = data[: MICRO_BATCHES * BATCH * (SEQ_LEN + 1)].view(MICRO_BATCHES, BATCH, SEQ_LEN + 1)
    tokens = text[..., :-1].to(device)
    labels = text[..., 1:].clone().to(device)
    labels[:, 1, SEQ_LEN // 2 :] = IGNORE_INDEX
    labels[0, 2] = IGNORE_INDEX
    own = slice(dist.get_rank(group), None, dist.get_world_size(group))
    micro_batches = list(zip(tokens[:, own], labels[:, own], strict=True))
    return Batch(micro_batches, REPLICAS * int((labels != IGNORE_INDEX).sum()))


# -------------------- The check: each recipe next to float64, and next to what rounding alone costs
STEPS = 3
LR = 0.05


class Recipe(NamedTuple):
    param_dtype: torch.dtype  # of parameters, activations and their gradients
    step: Callable
    floor: float = 0.0  # the error that rounding alone costs, by the benchmark; for fp32 a bound
    quantize: Callable | None = None  # the linear layers of the blocks compute in fp8


RECIPES = {
    "fp32": Recipe(fp32, plain_step, 1e-4),
    "fp16": Recipe(fp16, plain_step, 0.00079),
    "fp16-scaled": Recipe(fp16, scaled_step, 0.00079),
    "bf16": Recipe(bf16, plain_step, 0.0074),
    "bf16-master": Recipe(bf16, master_step, 0.0074),
    "fp8-unscaled": Recipe(bf16, master_step, 0.095, quantize_unscaled),
    "fp8-scaled": Recipe(bf16, master_step, 0.095, quantize_scaled),
}
FAILING = ("fp16", "bf16", "fp8-unscaled")
EXACT = {  # sums in float64
    "fp64": Recipe(fp64, plain_step),
    "fp8 in fp64": Recipe(fp64, plain_step, quantize=quantize_scaled),
}


class Run(NamedTuple):  # three steps of a recipe; all values in float64
    losses: Tensor  # [3]
    grads: Tensor  # [3, number of parameters]
    weights: Tensor  # [4, number of parameters], at first and after each step; of the master copy
    bytes_stored: int
    bytes_sent: int  # handed to all-reduces in the last step
    skipped: int


def run_kernel(op: Callable, *inputs: Tensor) -> Tensor:
    """As a kernel of a GPU does: read 16 bits, compute in fp32, round once, write 16 bits."""
    storage_dtype = inputs[0].dtype
    compute_dtype = torch.promote_types(storage_dtype, fp32)
    # Autograd reverses the casts, so a gradient is rounded where it is stored.
    return op(*[x.to(compute_dtype) for x in inputs]).to(storage_dtype)


def train(recipe: Recipe, group, device, scale: float = 2.0**34) -> Run:
    """The scale begins far too high, to show how it is found."""

    def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
        return Fp8Linear.apply(x, weight, recipe.quantize, group)

    model = Transformer(fp8_linear if recipe.quantize else F.linear).to(device)
    params = list(model.parameters())
    weights = params  # the tensors that are updated: the parameters, or their master copy
    if recipe.step is not plain_step:
        weights = [p.detach().to(fp32) for p in params]  # before the parameters lose bits
    model.to(recipe.param_dtype)
    scaler = LossScaler(scale)
    state = {plain_step: (), master_step: (weights,), scaled_step: (weights, scaler)}[recipe.step]
    losses = []
    all_grads = []
    all_weights = [flatten(weights)]
    skipped = 0
    while len(losses) < STEPS:
        batch = get_batch(len(losses), group, device)
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            loss, grads = recipe.step(model, *state, batch, LR * REPLICAS, group)
        sent = sum(call.args[0].nbytes for call in all_reduce.call_args_list)
        all_reduce.reset_mock()  # a mock refers to itself, and would keep the group alive
        if grads is None:  # a trainer goes on with the next batch; here the steps have to match
            skipped += 1
            continue
        dist.all_reduce(loss, group=group)
        losses.append(loss * REPLICAS)
        all_grads.append(flatten(grads) * REPLICAS)
        all_weights.append(flatten(weights))
    tensors = [*params, *weights, *grads, *[p.grad for p in params if p.grad is not None]]
    stored = sum({t.data_ptr(): t.nbytes for t in tensors}.values())  # each address once
    history = [torch.stack(tensors) for tensors in (losses, all_grads, all_weights)]
    return Run(*history, stored, sent, skipped)


def flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().to(fp64).flatten() for t in tensors])


def relative_error(run: Run, expected: Run) -> float:
    """The error of the weights as a share of how far float64 has moved them."""
    moved = run.weights[-1] - run.weights[0]
    expected_move = expected.weights[-1] - expected.weights[0]
    return ((moved - expected_move).norm() / expected_move.norm()).item()


def expected_bytes(recipe: Recipe, num_params: int) -> tuple[int, int]:
    """Stored and sent, by the table at the top."""
    param_bytes = recipe.param_dtype.itemsize
    # x, weight and grad_y of five linear layers per block
    num_amax = 3 * 5 * N_LAYERS * MICRO_BATCHES if recipe.quantize is quantize_scaled else 0
    if recipe.step is plain_step:
        return 2 * param_bytes * num_params, param_bytes * num_params
    num_found_inf = int(recipe.step is scaled_step)
    return (param_bytes + 4 + 4) * num_params, 4 * (num_params + num_found_inf + num_amax)


def check_sums() -> bool:
    sums = {}
    for dtype in (fp16, bf16, fp32):
        p = nn.Parameter(torch.zeros(1, dtype=dtype))
        main_grad = torch.zeros(1, dtype=dtype)
        for _ in range(4096):
            p.grad = torch.ones_like(p)
            accumulate_grads([p], [main_grad])
        sums[dtype] = main_grad.item()
        print_once(f"4,096 gradients of 1, added up in {dtype}: {sums[dtype]:,.0f}")
    return sums == {fp16: 2048, bf16: 256, fp32: 4096}


def check_recipe(name: str, expected: Run, group, device) -> bool:
    recipe = RECIPES[name]
    run = train(recipe, group, device)
    error = relative_error(run, expected)
    passed = error > 7.5 * recipe.floor if name in FAILING else error <= 1.5 * recipe.floor
    measured = (run.bytes_stored, run.bytes_sent)
    formula = expected_bytes(recipe, expected.weights.shape[1])
    passed &= measured == formula
    stored, sent = [f"{m:,} ({f:,})" for m, f in zip(measured, formula, strict=True)]
    numbers = f"{error:8.5f}{recipe.floor:10.5f}{run.skipped:9}{stored:>20}{sent:>20}"
    print_once(f"{name:13}{numbers}{'' if passed else '  FAIL'}")
    return passed


def check(group: dist.ProcessGroup, device: torch.device) -> bool:
    passed = [check_sums()]
    self_group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    references = {}
    for name, recipe in EXACT.items():
        run = train(recipe, group, device)
        references[name] = train(recipe, self_group, device)
        errors = [(run[i] - references[name][i]).abs().max() for i in range(3)]  # not bytes
        error = torch.stack(errors).max().item()  # NaN if any error is NaN
        print_once(f"{name}: ranks and one process differ by {error:.1e}")
        passed.append(error <= 1e-10)
    print_once("recipe          error     floor  skipped    stored (formula)      sent (formula)")
    for name in RECIPES:
        passed.append(check_recipe(name, references["fp64"], group, device))
    return all(passed)


# ------------------------------------------------------------------- Options, and the process group
def print_once(message: str, file=None) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(message, file=file)


def fail(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
        print(f"{os.path.basename(__file__)}: {message}", file=sys.stderr)
    sys.exit(2)


def init_distributed() -> torch.device:
    """Start torchrun's process group, or one of this process alone. Returns this rank's device."""
    num_gpus = torch.cuda.device_count()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < num_gpus < num_local:
        fail(f"--nproc_per_node {num_local}: use at most {num_gpus}, one for each GPU here")
    if num_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # or all would use GPU 0
    single = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if num_gpus else "gloo", timeout=timedelta(seconds=60), **single)
    return torch.device("cuda" if num_gpus else "cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed precision in one file", allow_abbrev=False)
    parser.error = fail
    parser.parse_args()
    device = init_distributed()
    passed = torch.tensor(int(check(dist.group.WORLD, device)), device=device)
    dist.all_reduce(passed, dist.ReduceOp.MIN)  # of all ranks
    print_once("PASS" if passed else "FAIL")
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
