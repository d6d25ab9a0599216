"""Mixed precision: train in 16 or 8 bits, and put back what so few bits cannot do.

A number of 16 bits takes half the memory of one of 32, half the time to send, and tensor cores multiply it many times
as fast. But convert everything to fp16 and the model does not learn, for three reasons. Each has its own repair:
    too small    a gradient below 2^-25 is rounded to 0        multiply the loss by a scale, divide before the update
    lost         w + u = w where u is below half a gap at w    keep a master copy of the weights in fp32; update that
    sums stall   every addition rounds to 10 bits again        add gradients up in fp32, over micro-batches and ranks

    fp32               16 bits                     fp32
    masters --round--> weights --> forward,        sums of (scale x gradients)
       ^                           backward -----> over micro-batches and ranks
       +------ - lr / scale x sum <-- all finite, on all ranks? --+-- no: half the scale, and the step again

    fp16   5 bits of exponent e, 10 of mantissa m     e > 0   (-1)^s 2^(e - bias) (1 + m / 2^M)   bias = 2^(E-1) - 1
    bf16   8                      7                   e = 0   (-1)^s 2^(1 - bias) m / 2^M         the same steps to zero
    e5m2   5                      2                   e all ones: infinity (m = 0) or NaN; but e4m3 has no infinity, and
    e4m3   4                      3                   NaN only where m is all ones, too: it ends at 448, not at 240

bf16 has the range of fp32: its loss needs no scale. In fp8 every tensor has one, amax / largest number, where amax is
the largest |x| on all ranks; a linear layer is then three products of 8-bit numbers, each multiplied by two scales.
Bytes per weight, with SGD: 4 + 4 (weights, sums) in fp32, 2 + 2 in 16 bits, 2 + 4 + 4 (masters) mended. Adam's moments
add 8. Sent in a step: an all-reduce of the sums, 4 bytes (or 2) per weight, and one of 4 bytes that says "an overflow".
Micikevicius et al. 2017 (arXiv 1710.03740, section 3: the three repairs) and 2022 (2209.05433: fp8).
    python mixed_precision.py; torchrun --nproc_per_node 4 mixed_precision.py        gloo on CPUs, nccl on GPUs
Ends with PASS when every bit pattern has torch's value, each failure was seen, each mended run is at most 1.5 times as
far from float64 as rounding alone must be, and ranks equal one process to 1e-10 wherever sums are float64.
"""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# B sequences of T tokens, H numbers for each (hidden size), FF inside the MLP, V words. A global batch is MICRO
# micro-batches of 4 sequences; rank r of N takes sequences r, r + N, ... of each. Linear layers: K inputs, O outputs.
LAYERS, H, FF, V, T, MICRO, STEPS, LR, IGNORE = 2, 32, 64, 256, 32, 8, 3, 0.05, -100
REPLICAS = 4096  # the loss of a real batch is divided by millions of tokens: as if so many had this one, and summed up
fp16, bf16, fp32, fp64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
sent = Counter()  # bytes handed to all-reduces by this rank, by what they are


@dataclass(frozen=True)
class Format:
    E: int  # bits of exponent
    M: int  # bits of mantissa
    largest: float  # finite number
    dtype: torch.dtype
    infinite: bool = True  # whether the largest exponent is kept for infinity and NaN

    def decode(self, pattern: Tensor) -> Tensor:
        """Bit patterns, as integers [n] -> the numbers that they stand for, in fp64 [n]."""
        # --- exercise 10.1: the value of a bit pattern ---
        m, e = pattern & (2**self.M - 1), pattern >> self.M & (2**self.E - 1)
        sign, bias = 1.0 - 2.0 * (pattern >> (self.M + self.E)), 2 ** (self.E - 1) - 1
        fraction = m.to(fp64) / 2**self.M
        value = torch.where(e > 0, torch.ldexp(1 + fraction, e - bias), fraction * 2.0 ** (1 - bias))
        top = e == 2**self.E - 1
        if self.infinite:
            return sign * value.masked_fill(top, torch.inf).masked_fill(top & (m > 0), torch.nan)
        return sign * value.masked_fill(top & (m == 2**self.M - 1), torch.nan)
        # --- end exercise ---

    def nearest(self, x: Tensor, limits: bool = True) -> Tensor:
        """x rounded to the nearest number, or the even one, in fp64. Without `limits`: by M bits alone, at any size."""
        lowest = 2 - 2 ** (self.E - 1) if limits else -900  # below 2^lowest gaps do not shrink any more
        exponent = (torch.frexp(x.to(fp64)).exponent - 1).clamp(min=lowest)  # |x| = 2^exponent (1 <= ... < 2)
        gap = torch.ldexp(torch.ones_like(x, dtype=fp64), exponent - self.M)
        return torch.round(x.to(fp64) / gap) * gap  # torch.round takes the even one; the fp8 cast below stays in range


FORMATS = {
    "fp16": Format(5, 10, 65504.0, fp16),
    "bf16": Format(8, 7, 2.0**127 * (2 - 2.0**-7), bf16),
    "e5m2": Format(5, 2, 57344.0, torch.float8_e5m2),
    "e4m3": Format(4, 3, 448.0, torch.float8_e4m3fn, infinite=False),
}


def unlike_torch(form: Format) -> int:
    """How many patterns torch reads otherwise; how many numbers, halves between two, and next to these it rounds so."""
    pattern = torch.arange(2 ** (1 + form.E + form.M))
    raw = pattern.to(torch.uint8) if form.dtype.itemsize == 1 else (pattern - (pattern >> 15 << 16)).to(torch.int16)
    ours, theirs = form.decode(pattern), raw.view(form.dtype).to(fp64)
    alike = (ours == theirs) & (ours.signbit() == theirs.signbit()) | ours.isnan() & theirs.isnan()
    finite = ours[ours.isfinite()].sort().values
    half = (finite[1:] + finite[:-1]) / 2  # exact in fp32, from which torch casts
    x = torch.cat([finite, half, half * (1 + 2.0**-20), half * (1 - 2.0**-20)]).to(fp32)
    return int((~alike).sum() + (form.nearest(x) != x.to(form.dtype).to(fp64)).sum() + (finite[-1] != form.largest))


@dataclass(frozen=True)
class Policy:
    weights: torch.dtype  # and activations, and their gradients
    sums: torch.dtype  # of gradients, over micro-batches and ranks
    masters: bool = False  # a copy of the weights in fp32
    scaling: bool = False  # of the loss
    fp8: str = ""  # linear layers of the blocks in 8 bits: "unscaled", "scaled", or "must"
    must: Format | None = None  # fp64, rounded to M bits wherever something is stored: what M bits cost at least

    def up(self, x: Tensor) -> Tensor:
        """From memory into a kernel, which computes in fp32. Backward, a gradient goes to memory."""
        y = x.view_as(x) if self.must else x.to(torch.promote_types(x.dtype, fp32))
        if self.must:
            y.register_hook(lambda gradient: self.must.nearest(gradient, limits=False))
        return y

    def down(self, x: Tensor) -> Tensor:
        """From a kernel to memory."""
        if self.must is None:
            return x.to(self.weights)
        return self.up(x + (self.must.nearest(x, limits=False) - x).detach())


POLICIES = {
    "fp32": Policy(fp32, fp32),
    "fp16": Policy(fp16, fp16),
    "fp16-masters": Policy(fp16, fp16, masters=True),
    "fp16-scaling": Policy(fp16, fp16, masters=True, scaling=True),
    "fp16-mended": Policy(fp16, fp32, masters=True, scaling=True),
    "bf16": Policy(bf16, bf16),
    "bf16-mended": Policy(bf16, fp32, masters=True),
    "fp8": Policy(bf16, fp32, masters=True, fp8="unscaled"),
    "fp8-mended": Policy(bf16, fp32, masters=True, fp8="scaled"),
}
EXACT = {"fp64": Policy(fp64, fp64), "fp8 summed in fp64": Policy(fp64, fp64, fp8="scaled")}
MUST = {name: Policy(fp64, fp64, must=FORMATS[name]) for name in ("fp16", "bf16")}
MUST["fp8"] = Policy(fp64, fp64, must=FORMATS["bf16"], fp8="must")


def all_reduce(x: Tensor, op, group: dist.ProcessGroup, what: str) -> Tensor:
    sent[what] += x.nbytes
    dist.all_reduce(x, op=op, group=group)
    return x


def quantize(x: Tensor, form: Format, how: str, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """x ~ values x scale: values in 8 bits, and one scale, for what the ranks hold are parts of one tensor."""
    scale = torch.ones((), dtype=x.dtype, device=x.device)
    if how == "must":
        return form.nearest(x, limits=False), scale
    if how == "scaled":
        # --- exercise 10.5: the scale that puts the largest |x| of all ranks on the largest number ---
        amax = x.abs().amax() if x.numel() else 0 * scale  # a rank may have no tokens, and takes part
        all_reduce(amax, dist.ReduceOp.MAX, group, "amax")
        scale = torch.where(amax == 0, scale, amax / form.largest)  # zeros stay zeros; the scale of NaN is NaN
        # --- end exercise ---
    return (x / scale).clamp(-form.largest, form.largest).to(form.dtype), scale


class Fp8Linear(torch.autograd.Function):
    """y = x Wᵀ, x [..., K], W [O, K]: 8-bit numbers, summed in fp32 (or fp64), and kept for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, how: str, group: dist.ProcessGroup) -> Tensor:
        (xq, sx), (wq, sw) = (quantize(t, FORMATS["e4m3"], how, group) for t in (x, w))
        ctx.save_for_backward(xq, sx, wq, sw)
        ctx.how, ctx.group = how, group
        return F.linear(xq.to(x.dtype), wq.to(x.dtype)) * (sx * sw)  # [..., K], [O, K] -> [..., O]

    @staticmethod
    def backward(ctx, dy: Tensor):
        xq, sx, wq, sw = ctx.saved_tensors
        # --- exercise 10.6: the other two products, of 8-bit numbers, too ---
        dyq, sdy = quantize(dy, FORMATS["e5m2"], ctx.how, ctx.group)
        dyq, xq, wq = (q.to(dy.dtype) for q in (dyq, xq, wq))
        dx = dyq @ wq * (sdy * sw)  # [..., O] [O, K] -> [..., K]
        dw = dyq.flatten(0, -2).T @ xq.flatten(0, -2) * (sdy * sx)  # [O, B T] [B T, K] -> [O, K]
        return dx, dw, None, None
        # --- end exercise ---


def first_weights(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)  # the same on every rank, in fp64
    block = {"norm1": (H,), "qkv": (3 * H, H), "out": (H, H), "norm2": (H,)}
    block |= {"gate": (FF, H), "value": (FF, H), "down": (H, FF)}
    shapes = {f"{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}
    shapes |= {"embed": (V, H), "norm": (H,), "head": (V, H)}
    draw = {name: torch.randn(shape, generator=generator, dtype=fp64) for name, shape in shapes.items()}
    return {n: (w / w.shape[-1] ** 0.5 if w.dim() > 1 else 1 + 0.1 * w).to(device) for n, w in draw.items()}


def loss_sum(w: dict, tokens: Tensor, labels: Tensor, policy: Policy, group: dist.ProcessGroup) -> Tensor:
    """Summed over the tokens [B, T] that have a label. Between `up` and `down` stands what one kernel does, in fp32."""
    up, down = policy.up, policy.down
    w = {name: down(weight) for name, weight in w.items()}  # as they are, except in fp64 with a `must`

    def linear(x: Tensor, weight: Tensor, fp8: str = policy.fp8) -> Tensor:
        return down(Fp8Linear.apply(up(x), up(weight), fp8, group) if fp8 else F.linear(up(x), up(weight)))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return down(F.rms_norm(up(x), (H,), up(weight), 1e-5))

    x = down(F.embedding(tokens, up(w["embed"])))  # [B, T] -> [B, T, H]
    for i in range(LAYERS):
        q, k, v = (up(t) for t in linear(norm(x, w[f"{i}.norm1"]), w[f"{i}.qkv"]).chunk(3, -1))
        mixed = down(F.scaled_dot_product_attention(q, k, v, is_causal=True))  # one head
        x = down(up(x) + up(linear(mixed, w[f"{i}.out"])))
        h = norm(x, w[f"{i}.norm2"])
        inner = down(F.silu(up(linear(h, w[f"{i}.gate"]))) * up(linear(h, w[f"{i}.value"])))
        x = down(up(x) + up(linear(inner, w[f"{i}.down"])))
    logits = up(linear(norm(x, w["norm"]), w["head"], fp8=""))  # [B, T, V]; embedding and head stay out of fp8
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def text(step: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and labels [MICRO, 4, T] of a global batch: bytes of Python's own argparse; some have no label."""
    data = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long().to(device)
    both = data[1000 * step :][: MICRO * 4 * (T + 1)].view(MICRO, 4, T + 1)
    labels = both[..., 1:].clone()
    labels[:, 1, T // 2 :] = labels[0, 2] = IGNORE
    return both[..., :-1], labels


def add_up(sums: dict[str, Tensor], weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """After the backward of a micro-batch: its gradients join the sums, and are dropped."""
    for name, weight in weights.items():
        # --- exercise 10.4: add in the wide format, and let the narrow gradient go ---
        gradient, weight.grad = weight.grad.to(dtype), None
        sums[name] = sums[name] + gradient if name in sums else gradient
        # --- end exercise ---


def overflow(sums: dict[str, Tensor], group: dist.ProcessGroup, device: str) -> bool:
    """Whether any gradient is infinite or NaN. Each rank looks at every N-th of them only, as if it had no more."""
    mine = [*sums.values()][dist.get_rank(group) :: dist.get_world_size(group)]
    # --- exercise 10.3: the same answer on all ranks ---
    found = torch.tensor(float(any(not g.isfinite().all() for g in mine)), device=device)
    return bool(all_reduce(found, dist.ReduceOp.MAX, group, "overflow"))  # or some would step, and others not
    # --- end exercise ---


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.detach().to(fp64).flatten() for t in tensors.values()])


def train(policy: Policy, group: dist.ProcessGroup, device: str, scale: float = 2.0**34) -> dict:
    """STEPS steps of SGD, the batch cut over the ranks of `group`. A scale begins far too high, to show the search."""
    N, rank, start = dist.get_world_size(group), dist.get_rank(group), first_weights(device)
    w = {name: value.to(policy.weights, copy=True).requires_grad_() for name, value in start.items()}
    masters = {name: value.to(fp32) for name, value in start.items()} if policy.masters else {}  # not from the rounded
    losses, gradients, states, skipped = [], [], [flat(masters or w)], 0
    scale = scale if policy.scaling else 1.0  # then overflow() only refuses infinities and NaN
    while len(losses) < STEPS:
        sent.clear()
        tokens, labels = text(len(losses), device)
        valid, sums, total = int((labels != IGNORE).sum()), {}, torch.zeros((), dtype=fp64, device=device)
        for some, wanted in zip(tokens, labels, strict=True):
            loss = loss_sum(w, some[rank::N], wanted[rank::N], policy, group) / valid  # tokens of all ranks, not ours
            (loss / REPLICAS * scale).backward()
            add_up(sums, w, policy.sums)
            total += loss.detach()
        held = sum(t.untyped_storage().nbytes() for t in [*w.values(), *masters.values(), *sums.values()])
        for gradient in sums.values():
            all_reduce(gradient, dist.ReduceOp.SUM, group, "gradients")  # a sum: `valid` counts the tokens of all ranks
        if overflow(sums, group, device):
            assert scale > 1, "gradients are infinite or NaN, and no smaller scale can help"
            scale, skipped = scale / 2, skipped + 1
            continue
        lr = LR * REPLICAS / scale  # which undoes the scale: here, in fp32; in fp16, zeros would come back
        for name, gradient in sums.items():
            # --- exercise 10.2: the update happens where there are bits for it ---
            (masters or w)[name].data -= lr * gradient.to((masters or w)[name].dtype)
            w[name].data.copy_((masters or w)[name])  # rounded once, and never read back
            # --- end exercise ---
        losses.append(all_reduce(total, dist.ReduceOp.SUM, group, "loss"))
        gradients.append(flat(sums) * (REPLICAS / scale))
        states.append(flat(masters or w))
    tensors = zip(("losses", "gradients", "states"), map(torch.stack, (losses, gradients, states)), strict=True)
    return dict(tensors) | {"held": held, "sent": dict(sent), "scale": scale, "skipped": skipped}


def distance(run: dict, right: dict) -> float:
    """How far the weights are from where they should have moved, as a part of that way."""
    way, true = (made["states"][-1] - made["states"][0] for made in (run, right))
    return ((way - true).norm() / true.norm()).item()


def check(group: dist.ProcessGroup, device: str) -> list[str]:
    """Train by each policy, beside one process in float64 -> what is off, in words."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    say, wrong = print if dist.get_rank(group) == 0 else lambda *_: None, []
    wrong += [f"{name} is not torch's: {n} numbers" for name, form in FORMATS.items() if (n := unlike_torch(form))]
    for dtype, stall in ((fp16, 2048), (bf16, 256), (fp32, 4096)):
        sums = {}
        for _ in range(4096):
            add_up(sums, {"w": SimpleNamespace(grad=torch.ones(1, dtype=dtype))}, dtype)
        say(f"4,096 gradients of 1, added up in {dtype}: {sums['w'].item():,.0f}")
        wrong += [] if sums["w"].item() == stall else [f"a sum in {dtype} ends at {sums['w'].item()}"]
    for name, policy in reversed(EXACT.items()):
        mine, right = train(policy, group, device), train(policy, alone, device)
        error = max((mine[k] - right[k]).abs().max().nan_to_num(9e9) for k in ("losses", "gradients", "states")).item()
        say(f"{name}: loss, gradients and weights of the ranks differ from those of one process by {error:.1e}")
        wrong += [] if error <= 1e-10 else [f"{name} is off by {error:.1e}"]
    say("policy           error  must be  zeros  lost      held (formula)      sent (formula) tokens/s  skipped")
    for name, policy in POLICIES.items():
        start, kind, P = time.perf_counter(), name.split("-")[0], right["states"].shape[1]
        run = train(policy, group, device)
        speed = 4 * MICRO * T * (STEPS + run["skipped"]) / (time.perf_counter() - start)
        must = distance(train(MUST[kind], alone, device), right) if kind in MUST else 1e-4  # what so few bits cost
        error, limit = distance(run, right), 1.5 * must
        zeros = (run["gradients"][0] == 0)[right["gradients"][0] != 0].double().mean()  # lost: not half arrived
        lost = (run["states"].diff(dim=0) / run["gradients"] > -LR / 2)[run["gradients"] != 0].double().mean()
        counted = run["held"], sum(run["sent"].values())
        amaxes = 3 * 5 * LAYERS * MICRO if policy.fp8 == "scaled" else 0  # of x, W and dy of 5 linear layers
        held, sends = policy.weights.itemsize + policy.sums.itemsize + 4 * policy.masters, policy.sums.itemsize
        formula = P * held, P * sends + 4 + 8 + 4 * amaxes
        cells = "".join(f"{f'{n:,} ({f:,})':>20}" for n, f in zip(counted, formula, strict=True))
        say(f"{name:13}{error:9.5f}{must:9.5f}{zeros:7.0%}{lost:6.0%}{cells}{speed:9,.0f}{run['skipped']:9}")
        wrong += [f"{name} holds and sends {counted} bytes, not {formula}"] if counted != formula else []
        if not (error > 5 * limit if name in ("fp16", "fp16-masters", "bf16", "fp8") else error <= limit):
            wrong.append(f"{name} is off by {error:.5f}, and the limit, 1.5 times what rounding costs, is {limit:.5f}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed precision in one file", allow_abbrev=False)
    say = print if os.environ.get("RANK", "0") == "0" else lambda *_, **__: None  # one line, and not one for each rank
    parser.error = lambda words: (say(f"{parser.prog}: {words}", file=sys.stderr), sys.exit(2))
    parser.parse_args()
    if 0 < (gpus := torch.cuda.device_count()) < (local := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        parser.error(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(device)
    single = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **single)
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, check(dist.group.WORLD, device))  # a rank that is off makes all fail
    wrong = [line for lines in everyone for line in lines]
    say("FAIL: " + "; ".join(wrong) if wrong else "PASS")
    gc.collect()  # what refers to the group in a cycle must not outlive it
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
