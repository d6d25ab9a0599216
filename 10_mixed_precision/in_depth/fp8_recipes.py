"""Published ways to train in fp8: what each keeps of a parameter, in which format, and what it costs in bytes.

Problem. fp8 products alone save no memory: with bf16 weights, fp32 masters and fp32 moments a parameter takes 20 bytes
as before. The recipes differ in what else they dare to keep in fewer bits, from nothing to nearly everything.

Idea. Write the recipe as a table row, and run the row. Bytes per parameter:

                          product         master  sums  weights  gradients  m     v       all
    bf16                  bf16            fp32    fp32  bf16     bf16       fp32  fp32    20
    bf16-no-sums          bf16            fp32    -     bf16     bf16       fp32  fp32    16
    transformer-engine    tensor-delayed  -       -     fp32     fp32       fp32  fp32    16
    fp8-lm-o3             tensor          fp16    fp16  e4m3     e4m3       e4m3  fp16     9
    deepseek-v3           block           fp32    fp32  e4m3     bf16       bf16  bf16    15
    nanotron              tensor          bf16    fp32  e4m3     e4m3       e4m3  e4m3    10

(Rows: Hugging Face's Ultra-Scale Playbook, section on fp8; FP8-LM 2310.18313, section 2; DeepSeek-V3 2412.19437,
section 3.3.3; Transformer Engine's documentation.) The table is for the matrices that go through `linear`. Embedding,
norms and head are kept as in row bf16 (fp32 beside fp32 weights): they are few and sensitive (2412.19437, 3.3.1).

What is kept in fp16 or fp8 has a scale of its own, 4 bytes per tensor (per 128 x 128 block in deepseek-v3). Where a
source names a format but not how to round to it, these are our choices:
    - the second moment in 8 bits is kept as its root, which halves its range in powers of two, and never as zero: the
      update divides by it;
    - nanotron rounds master and moments stochastically, or they would stall (formats.py).
An 8-bit weight cannot receive a gradient from autograd, which wants both in one format. A stand-in takes it in.

Run it:
    python fp8_recipes.py                                    12 steps of each row, bytes item by item
    torchrun --nproc_per_node 2 fp8_recipes.py               data parallel
    python fp8_recipes.py --recipe deepseek-v3               one of them
On a CPU the products are emulated (fp8.py). The last line is PASS, or the script exits with 1 and names what is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _precision_demo import Decoder, OneLineParser, Report, batch, launch, loss_sum, stdlib_bytes, wide
from formats import (
    OF_DTYPE,
    TILE,
    Block,
    Quantized,
    amax_of,
    e4m3,
    expand,
    lost_updates,
    quantize,
    scale_of,
    share_of,
    stochastic_round,
)
from fp8 import Fp8Linear
from precision_policies import ITEMS, POLICIES, LossScaler, MixedAdamW, adamw_update
from torch import Tensor, nn

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Row:
    """A row of the table. `product`: a recipe of fp8.py, or "bf16"."""

    product: str
    master: torch.dtype | None
    accumulation: torch.dtype | None
    weights: torch.dtype
    gradients: torch.dtype
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    stochastic: bool = False

    def bytes(self) -> dict[str, int]:
        """Bytes per parameter, item by item, scales not counted."""
        # --- exercise 10.39: a parameter of this recipe, item by item ---
        kinds = astuple(self)[1:-1]
        return {item: kind.itemsize if kind else 0 for item, kind in zip(ITEMS, kinds, strict=True)}
        # --- end exercise ---


TABLE = {
    "bf16": Row("bf16", fp32, fp32, bf16, bf16, fp32, fp32),
    "bf16-no-sums": Row("bf16", fp32, None, bf16, bf16, fp32, fp32),
    "transformer-engine": Row("tensor-delayed", None, None, fp32, fp32, fp32, fp32),
    "fp8-lm-o3": Row("tensor", fp16, fp16, e4m3, e4m3, e4m3, fp16),
    "deepseek-v3": Row("block", fp32, fp32, e4m3, bf16, bf16, bf16),
    "nanotron": Row("tensor", bf16, fp32, e4m3, e4m3, e4m3, e4m3, stochastic=True),
}

# ------------------------------------------------------------------------------------------------- what is kept, how


class Kept:
    """A tensor in some format, with scales if the format has few exponents: fp16 and fp8 need them, bf16 does not."""

    def __init__(self, value: Tensor, dtype: torch.dtype, block: Block = (0, 0), generator: Any = None):
        self.block, self.generator = block, generator  # with a generator it is rounded at random
        self.values = torch.empty_like(value, dtype=dtype)
        self.scale = scale_of(torch.zeros_like(amax_of(value, block)), dtype) if OF_DTYPE[dtype].exponent < 8 else None
        self.write(value)

    def read(self) -> Tensor:
        """In fp32; a copy."""
        if self.scale is None:
            return self.values.to(fp32, copy=True)
        return self.values.to(fp32) * expand(self.scale, self.block, self.values.shape)

    def write(self, value: Tensor, amax: Tensor | None = None) -> None:
        """Round `value` into the place; with `amax` the scale is made from it, not from `value`."""
        if self.scale is None:
            dtype = self.values.dtype
            rounded = self.generator is not None and dtype != value.dtype
            self.values.copy_(stochastic_round(value, dtype, self.generator) if rounded else value)
            return
        # --- exercise 10.40: into few exponents, with a scale that fits what is written now ---
        scale = scale_of(amax_of(value, self.block) if amax is None else amax, self.values.dtype)
        if self.generator is None:
            q = quantize(value, self.values.dtype, self.block, amax).values
        else:
            q = stochastic_round(value / expand(scale, self.block, value.shape), self.values.dtype, self.generator)
        self.values.copy_(q)
        self.scale.copy_(scale)
        # --- end exercise ---

    def finite(self) -> Tensor:
        return torch.isfinite(self.read()).all()

    def sum_over(self, group: dist.ProcessGroup) -> None:
        """Sum over the ranks, in this format. Scales differ from rank to rank: first agree on one, with which not even
        the sum overflows (FP8-LM, 2310.18313, section 2.1), then values add up like any others."""
        if self.scale is None:
            dist.all_reduce(self.values, group=group)
            return
        # --- exercise 10.41: numbers with different scales cannot be added ---
        mine = self.read()
        bound = amax_of(mine, self.block)
        dist.all_reduce(bound, group=group)  # the sum of the largest is at least the largest of the sums
        self.write(mine, amax=bound * 1.01)  # each rank rounds, perhaps up: without room the sum may be infinite
        dist.all_reduce(self.values, group=group)
        # --- end exercise ---


class KeptRoot(Kept):
    """A second moment in 8 bits: its root is kept, and what would be zero is the smallest number instead."""

    def read(self) -> Tensor:
        return super().read() ** 2

    def write(self, value: Tensor, amax: Tensor | None = None) -> None:
        super().write(value.sqrt(), amax)
        smallest = OF_DTYPE[self.values.dtype].smallest
        least = torch.full_like(self.values, smallest)
        self.values.copy_(torch.where((value > 0) & (self.values.float() == 0), least.float(), self.values.float()))


class StandIn(torch.autograd.Function):
    """The shape of a weight, in a wide format and without memory. What arrives as its gradient goes to `sink`."""

    @staticmethod
    def forward(ctx, anchor: Tensor, shape: torch.Size, dtype: torch.dtype, sink: Callable[[Tensor], None]) -> Tensor:
        ctx.sink = sink
        return torch.zeros((), dtype=dtype, device=anchor.device).expand(shape)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        # --- exercise 10.42: the gradient is kept here, not by autograd ---
        ctx.sink(gradient)
        return None, None, None, None
        # --- end exercise ---


# --------------------------------------------------------------------------------------------------- linear, optimizer


class RecipeLinear:
    """`linear(x, weight)` of a row: bf16, or fp8 from weights that are kept in fp8 or in more."""

    def __init__(self, row: Row, amax_group: dist.ProcessGroup | None, device: torch.device | str = "cpu"):
        self.fp8 = None if row.product == "bf16" else Fp8Linear(row.product, amax_group, device=device)
        self.kept: dict[Tensor, Kept] = {}  # weights in 8 bits, told by the optimizer
        self.sinks: dict[Tensor, Callable[[Tensor], None]] = {}
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.fp8 is None:
            return F.linear(x, weight)
        if weight not in self.kept:
            return self.fp8(x, weight)
        kept = self.kept[weight]
        stand_in = StandIn.apply(self.anchor, weight.shape, fp32, self.sinks[weight])
        return self.fp8(x, stand_in, Quantized(kept.values, kept.scale, kept.block))

    def end_step(self) -> None:
        if self.fp8 is not None:
            self.fp8.end_step()


class RecipeAdamW:
    """AdamW with the matrices of a model kept as a row of the table says; the other parameters as row bf16.

    The same calls as MixedAdamW: accumulate() after each backward, reduce(group), step(scaler). All ranks of a group
    draw the same random bits.
    """

    def __init__(self, model: Decoder, row: Row, linear: RecipeLinear, lr: float):
        self.row, self.linear, self.lr, self.steps = row, linear, lr, 0
        self.lost: float | None = None  # of the matrices, the share of elements whose last update rounding took away
        self.names = {p: name for name, p in model.matrices().items()}
        others = [(name, p) for name, p in model.named_parameters() if p not in self.names]
        self.rest = MixedAdamW(others, POLICIES["fp32" if row.weights == fp32 else "bf16"], lr)
        device = next(model.parameters()).device
        self.generator = torch.Generator(device=device).manual_seed(0) if row.stochastic else None
        self.items: dict[nn.Parameter, dict[str, Kept]] = {p: self.make(p) for p in self.names}

    def make(self, p: nn.Parameter) -> dict[str, Kept]:
        row, whole = self.row, p.detach().clone()
        zero = torch.zeros_like(whole)
        items = {"weights": Kept(whole, row.weights, (TILE, TILE) if row.product == "block" else (0, 0))}
        if row.master:
            items["master"] = Kept(whole, row.master, generator=self.generator)
        if row.accumulation:
            items["accumulation"] = Kept(zero, row.accumulation)
        items["exp_avg"] = Kept(zero, row.exp_avg, generator=self.generator)
        root = KeptRoot if row.exp_avg_sq.itemsize == 1 else Kept
        items["exp_avg_sq"] = root(zero, row.exp_avg_sq, generator=self.generator)
        p.data = items["weights"].values  # the same memory
        if row.weights.itemsize == 1:
            self.linear.kept[p] = items["weights"]
            self.linear.sinks[p] = lambda gradient: self.arrive(p, gradient)
        return items

    def arrive(self, p: nn.Parameter, gradient: Tensor) -> None:
        """The gradient of an 8-bit weight, from one backward."""
        if "gradients" in self.items[p]:
            raise RuntimeError(f"{self.names[p]}: a second backward before accumulate(); the first would be lost")
        self.items[p]["gradients"] = Kept(gradient, self.row.gradients)

    def take_gradient(self, p: nn.Parameter) -> Tensor | None:
        """In fp32; it is dropped where it was."""
        kept, own = self.items[p].pop("gradients", None), p.grad
        p.grad = None
        return kept.read() if kept else wide(own) if own is not None else None

    @torch.no_grad()
    def accumulate(self) -> None:
        self.rest.accumulate()
        if self.row.accumulation:
            for p, items in self.items.items():
                if (gradient := self.take_gradient(p)) is not None:
                    items["accumulation"].write(items["accumulation"].read() + gradient)

    def reduce(self, group: dist.ProcessGroup) -> None:
        self.rest.reduce(group)
        for p, items in self.items.items():
            if "accumulation" in items:
                items["accumulation"].sum_over(group)
            elif p.grad is not None:
                dist.all_reduce(p.grad, group=group)

    def gradient(self, p: nn.Parameter) -> Tensor | None:
        if "accumulation" in self.items[p]:
            return self.items[p]["accumulation"].read()
        return None if p.grad is None else wide(p.grad)

    @torch.no_grad()
    def step(self, scaler: LossScaler) -> bool:
        """Update everything; False if a gradient on any rank of the scaler's group was not finite."""
        sums = [items["accumulation"].finite() for items in self.items.values() if "accumulation" in items]
        plain = [p.grad for p in self.items if p.grad is not None]
        marks = [torch.where(finite, 0.0, torch.inf) for finite in sums]
        finite = scaler.all_finite([*marks, *plain, *self.rest.gradients()])
        inverse = scaler.inverse
        scaler.update(finite)
        if finite:
            self.steps += 1
            counts = [self.update(p, inverse) for p in self.items]
            self.lost = share_of([count for count in counts if count is not None])
            self.rest.steps += 1
            for p, state in self.rest.state.items():
                self.rest.update(p, state, inverse)
            self.linear.end_step()
        elif self.linear.fp8 is not None:
            self.linear.fp8.leave_out_step()  # its amaxes make no scale
        self.rest.zero_grad()
        for p, items in self.items.items():
            p.grad = None
            if "accumulation" in items:
                items["accumulation"].write(torch.zeros_like(items["accumulation"].read()))
        return finite

    def update(self, p: nn.Parameter, inverse: float) -> Tensor | None:
        items, gradient = self.items[p], self.gradient(p)
        if gradient is None:
            return None
        holder = items.get("master", items["weights"])
        w, m, v = holder.read(), items["exp_avg"].read(), items["exp_avg_sq"].read()
        before = w.clone()
        adamw_update(w, gradient * inverse, m, v, self.steps, self.lr, 0.0)
        for kept, value in ((holder, w), (items["exp_avg"], m), (items["exp_avg_sq"], v)):
            kept.write(value)
        after = holder.read()
        if holder is not items["weights"]:
            items["weights"].write(after)  # forward sees the master's weight, rounded once more
        return lost_updates(before, w, after)

    def held(self) -> tuple[dict[str, int], int]:
        """Bytes of the matrices, item by item, and of all their scales."""
        held, scales = dict.fromkeys(ITEMS, 0), 0
        for p, items in self.items.items():
            for item, kept in items.items():
                held[item] += kept.values.nbytes
                scales += kept.scale.nbytes if kept.scale is not None else 0
            held["gradients"] += p.grad.nbytes if p.grad is not None else 0
        return held, scales


# ------------------------------------------------------------------------------------------------------------- demo


def make(
    name: str, group: dist.ProcessGroup, device: torch.device | str = "cpu", lr: float = 2e-3, **sizes: int
) -> tuple[Decoder, RecipeAdamW]:
    """The chapter's model, trained by a row of the table."""
    linear = RecipeLinear(TABLE[name], group, device)
    model = Decoder(linear, **sizes).to(device)
    return model, RecipeAdamW(model, TABLE[name], linear, lr)


def train(name: str, group: dist.ProcessGroup, device: torch.device, steps: int, micro_batches: int) -> dict[str, Any]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    model, optimizer = make(name, group, device, layers=1)
    data, scaler = stdlib_bytes(200_000), LossScaler(group, 1.0, dynamic=False)
    seen: dict[str, Any] = {"losses": []}
    for step in range(steps):
        tokens, labels = (t.to(device) for t in batch(data, step, rows=2 * ranks * micro_batches))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for i in range(micro_batches):
            mine = slice(2 * (rank * micro_batches + i), 2 * (rank * micro_batches + i + 1))
            loss = loss_sum(model, tokens[mine], labels[mine]) / labels.numel()
            loss.backward()
            seen["held"] = optimizer.held()
            optimizer.accumulate()
            total += loss.detach()
        dist.all_reduce(total, group=group)
        optimizer.reduce(group)
        if step == 0:
            seen["gradients"] = torch.cat([optimizer.gradient(p).flatten() for p in optimizer.items])
        optimizer.step(scaler)
        seen["losses"].append(total.item())
    seen["weights"] = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    return seen | {"parameters": sum(p.numel() for p in optimizer.items), "lost": optimizer.lost}


def demo(names: list[str], group: dist.ProcessGroup, device: torch.device) -> list[str]:
    report, ranks = Report(group), dist.get_world_size(group)
    alone = dist.new_group([dist.get_rank(group)], use_local_synchronization=True)
    exact = Decoder(layers=1).to(device)  # fp32, the whole batch on one rank
    tokens, labels = (t.to(device) for t in batch(stdlib_bytes(200_000), 0, rows=4 * ranks))
    (loss_sum(exact, tokens, labels) / labels.numel()).backward()
    want = torch.cat([p.grad.flatten() for p in exact.matrices().values()])
    for name in names:
        dense = train(name, alone, device, 1, 2 * ranks)  # the reference: this recipe, whole batch, one rank
        run = train(name, group, device, 8, 2)
        own, error = (((got["gradients"] - want).norm() / want.norm()).item() for got in (dense, run))
        items, (held, scales) = TABLE[name].bytes(), run["held"]
        report.title(f"{name}: {' + '.join(str(size) for size in items.values() if size)} bytes per parameter")
        report.add("bytes per parameter of the matrices", sum(items.values()), sum(held.values()) / run["parameters"])
        report.add("  item by item", True, held == {item: size * run["parameters"] for item, size in items.items()})
        limit = 1.5 * own
        report.add(
            "error of the gradients, at most 1.5 of one rank's own", f"{limit:.1e}", f"{error:.1e}", error <= limit
        )
        same = run["weights"].clone()
        dist.all_reduce(same, op=dist.ReduceOp.MAX, group=group)
        report.add("weights after 8 steps, equal on all ranks to the bit", True, torch.equal(same, run["weights"]))
        if report.rank == 0:
            print(f"  loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}; {scales} bytes of scales;", end=" ")
            print(f"updates lost to rounding: {run['lost']:.1%}")
    return report.finish()


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--recipe", choices=TABLE, help="only this one")
    args = parser.parse_args()
    names = [args.recipe] if args.recipe else list(TABLE)
    if torch.cuda.is_available() and any(TABLE[name].product != "bf16" for name in names):
        from fp8_kernels import refusal  # not at the top: on a CPU nobody needs Triton

        if reason := refusal("cuda"):
            parser.error(f"{reason}; --recipe bf16 and bf16-no-sums run without")
    launch(lambda group, device: demo(names, group, device))


if __name__ == "__main__":
    main()
