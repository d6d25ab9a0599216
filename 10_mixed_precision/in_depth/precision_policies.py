"""Mixed precision: train in 16 bits, and restore the three things that 16 bits cannot do.

Problem. Convert model, gradients and optimizer to 16 bits and training dies (fp16) or stalls (bf16). Three reasons:

    small gradients are zero       fp16 ends at 6e-8           -> loss scaling
    small updates are lost         w + u = w if |u| < |w|/2^9  -> master weights in fp32, or stochastic rounding
    long sums stop growing         at 2^(M+1) equal terms      -> sums in fp32: in matmuls, of micro-batches, of ranks

Idea (Micikevicius et al. 2017, 1710.03740, section 3). Keep one fp32 copy of the weights where the update happens; do
forward and backward in a 16-bit copy of it; multiply the loss by S before backward and the gradients by 1/S after it.

       fp32                   16 bits                         fp32
    master weights --round--> weights --forward, backward--> S · gradients, summed over micro-batches and ranks
         ^                                                      |
         +------------------- AdamW <--- · 1/S <--- all finite? +--- no, on any rank: S/2 on all, and skip the step

Loss scaling. Gradients are linear in the loss, so backward of S · loss gives S times each of them: all are
shifted up by log2(S) powers of two, out of fp16's underflow. If S is too large, they overflow. Dynamic scaling
searches for the largest S: halved after an overflow, doubled after `growth_interval` steps without one.

Bytes per parameter, item by item (`Policy.bytes`), at the end of backward, when all are alive at once:
    policy             master  summed grads  weights  gradients  moments     all
    fp32                                        4         4       4 + 4       16
    bf16-pure                                   2         2       2 + 2        8
    bf16-master           4                     2         2       4 + 4       16
    bf16, fp16            4         4           2         2       4 + 4       20
(bf16-master is the 2 + 2 + 12 of the ZeRO paper, 1910.02054, which has no sums in fp32)

Run it:
    python precision_policies.py                                    every policy for 12 steps, beside fp32
    torchrun --nproc_per_node 2 precision_policies.py               data parallel: gradients and overflow are reduced
    python precision_policies.py --policy fp16                      one of them
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _precision_demo import Decoder, OneLineParser, Report, batch, launch, loss_sum, stdlib_bytes, wide
from formats import lost_updates, share_of, stochastic_round
from torch import Tensor, nn

fp32 = torch.float32
fp16 = torch.float16
bf16 = torch.bfloat16
ITEMS = ("master", "accumulation", "weights", "gradients", "exp_avg", "exp_avg_sq")  # of a parameter


@dataclass(frozen=True)
class Policy:
    """The format of each stored item of a parameter. None: there is no such item."""

    weights: torch.dtype  # of forward, backward and the gradients
    moments: torch.dtype  # of Adam
    master: torch.dtype | None = None  # a copy of the weights, which the optimizer updates
    accumulation: torch.dtype | None = None  # sums of gradients over micro-batches and ranks
    scaling: str = "none"  # or "static", "dynamic"
    stochastic: bool = False  # round what is stored up or down at random

    def bytes(self) -> dict[str, int]:
        """Bytes per parameter, item by item."""
        # --- exercise 10.25: what a parameter costs ---
        kinds = (self.master, self.accumulation, self.weights, self.weights, self.moments, self.moments)
        return {item: kind.itemsize if kind else 0 for item, kind in zip(ITEMS, kinds, strict=True)}
        # --- end exercise ---


FP16 = Policy(fp16, fp32, master=fp32, accumulation=fp32)
POLICIES = {
    "fp32": Policy(fp32, fp32),
    "fp16-pure": Policy(fp16, fp16),
    "bf16-pure": Policy(bf16, bf16),
    "bf16-stochastic": Policy(bf16, bf16, stochastic=True),
    "bf16-master": Policy(bf16, fp32, master=fp32),
    "bf16": Policy(bf16, fp32, master=fp32, accumulation=fp32),
    "fp16-master": FP16,
    "fp16-static": replace(FP16, scaling="static"),
    "fp16": replace(FP16, scaling="dynamic"),
}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear. On a CPU fp16 emulates a tensor core, ten times as fast as torch's fp16 matmul there: exact
    products of fp16 values, summed in fp32, rounded once. Its gradients are computed in the same way."""
    if x.device.type == "cpu" and x.dtype == fp16:
        return F.linear(x.float(), weight.float()).to(fp16)
    return F.linear(x, weight)


# ----------------------------------------------------------------------------------------------------- loss scaling


class LossScaler:
    """Multiplies the loss, and decides for all ranks of `group` together whether a step is taken.

        scaler.scale(loss).backward()
        finite = scaler.all_finite(gradients)
        if finite:
            optimizer.step()                      # by the gradients times scaler.inverse, in fp32
        scaler.update(finite)

    `group` has all ranks whose gradients or weights depend on this decision: all data-parallel ranks, and all
    ranks that hold shards of the model (tensor, pipeline, ZeRO). A scale of 1 that never changes ("none")
    does not change the gradients, but still rejects those that are not finite.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        scale: float = 2.0**16,
        *,
        dynamic: bool = True,
        growth_interval: int = 2000,
        floor: float = 1.0,
        patience: int = 0,
    ):
        if not 0 < floor <= scale:
            raise ValueError(f"loss scale {scale:g} is below its floor {floor:g}; use at least the floor, above 0")
        self.group = group
        self.value = scale
        self.dynamic = dynamic
        self.growth_interval = growth_interval
        self.floor = floor
        self.patience = patience
        self.good = 0  # steps since the last change
        self.skipped = self.in_a_row = 0

    @property
    def inverse(self) -> float:
        return 1.0 / self.value

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value

    def all_finite(self, gradients: Iterable[Tensor]) -> bool:
        """Whether every gradient of every rank is free of infinity and NaN: the same result on all ranks."""
        found = [(~torch.isfinite(g)).any() for g in gradients]
        # --- exercise 10.26: one rank's overflow is everyone's ---
        kind = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        overflow = torch.stack(found).any().float() if found else torch.zeros((), device=kind)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.group)  # also without gradients
        return overflow.item() == 0
        # --- end exercise ---

    def update(self, finite: bool) -> None:
        """After each step, taken or not. Raises FloatingPointError where more steps would not help."""
        # --- exercise 10.27: the search for the largest scale that works ---
        if finite:
            self.good += 1
            self.in_a_row = 0
            if self.dynamic and self.good == self.growth_interval:
                self.value = self.value * 2
                self.good = 0
            return
        self.good = 0
        self.skipped += 1
        self.in_a_row += 1
        if self.dynamic and self.value / 2 >= self.floor:
            self.value /= 2
            return
        # --- end exercise ---
        if self.dynamic or self.in_a_row > self.patience:
            kind = "dynamic" if self.dynamic else "static"
            raise FloatingPointError(
                f"{kind} loss scale {self.value:g} (floor {self.floor:g}): gradients are infinite or NaN, "
                f"{self.in_a_row} step(s) skipped in a row; look for NaN in the input or a too high learning rate"
            )


def make_scaler(policy: Policy, group: dist.ProcessGroup, scale: float = 2.0**16) -> LossScaler:
    """The scaler of a policy. Static: a few steps in a row may overflow; without scaling none may."""
    if policy.scaling == "none":
        return LossScaler(group, 1.0, dynamic=False)
    return LossScaler(group, scale, dynamic=policy.scaling == "dynamic", patience=8)


# -------------------------------------------------------------------------------------------------------- optimizer


def adamw_update(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, lr: float, decay: float, betas=(0.9, 0.95), eps: float = 1e-8
) -> None:
    """AdamW (1711.05101, algorithm 2, but lr · decay as in torch), in place on w, m, v, all wide. `step` from 1."""
    m.lerp_(g, 1 - betas[0])
    v.lerp_(g * g, 1 - betas[1])
    w.mul_(1 - lr * decay)
    size = (v / (1 - betas[1] ** step)).sqrt() + eps
    w.sub_(lr * (m / (1 - betas[0] ** step)) / size)


class MixedAdamW:
    """AdamW over parameters in the formats of a policy.

        optimizer = MixedAdamW(model.named_parameters(), POLICIES["bf16"], lr=1e-3)    # converts the parameters
        for tokens, labels in micro_batches:
            scaler.scale(loss_sum(...) / valid_tokens_of_the_global_batch).backward()
            optimizer.accumulate()
        optimizer.reduce(data_parallel_group)        # or pass `gradients()` to another reducer
        optimizer.step(scaler)

    Each update is computed in fp32 (fp64 where the policy stores fp64) for one parameter at a time, so there
    is no fp32 copy of the full model that the policy does not count. `lost` is the fraction of weights that
    should have changed in the last step and did not, if they are stored in 16 bits only; else None.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        policy: Policy,
        lr: float,
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        seed: int = 0,
    ):
        named = [(p, name) for name, p in named_parameters]
        self.names = {p: name for p, name in named if p.requires_grad}
        if not self.names:
            raise ValueError("no trainable parameter; set requires_grad on at least one")
        for p, _ in named:
            if not p.requires_grad:  # frozen, but multiplied with what is in the policy's format
                p.data = p.data.to(policy.weights)
        self.policy = policy
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.steps = 0
        self.lost: float | None = None
        # The random bits of stochastic rounding: the same on replicas, which must stay equal.
        device = next(iter(self.names)).device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.state = {p: self.make_state(p) for p in self.names}

    def make_state(self, p: nn.Parameter) -> dict[str, Any]:
        """Make master, sum and moments of a parameter, and convert the parameter to the policy's format."""
        state: dict[str, Any] = {}
        if self.policy.master:
            state["master"] = p.detach().to(self.policy.master, copy=True)  # before p loses its digits
        if self.policy.accumulation:
            state["accumulation"] = torch.zeros_like(p, dtype=self.policy.accumulation)
        p.data = p.data.to(self.policy.weights)
        for item in ("exp_avg", "exp_avg_sq"):
            state[item] = torch.zeros_like(p, dtype=self.policy.moments)
        return state

    # ---- gradients

    @torch.no_grad()
    def accumulate(self) -> None:
        """After the backward of each micro-batch: add its gradients to the sums, and free them."""
        if not self.policy.accumulation:
            return  # autograd adds to p.grad itself, in the format of p
        for p, state in self.state.items():
            if p.grad is not None:
                # --- exercise 10.28: a sum of many small terms ---
                state["accumulation"] += p.grad.to(self.policy.accumulation)
                p.grad = None
                # --- end exercise ---

    def gradients(self) -> list[Tensor]:
        """The tensors with this rank's gradients, to be summed over ranks, in place, before `step`."""
        if self.policy.accumulation:
            return [state["accumulation"] for state in self.state.values()]
        return [p.grad for p in self.names if p.grad is not None]

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Sum over the ranks, in the format of the gradients. No average: the loss is already divided. A rank that
        did not use a parameter sends zeros for it: all ranks must sum the same tensors in one order."""
        if not self.policy.accumulation:
            for p in self.names:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for g in self.gradients():
            dist.all_reduce(g, group=group)

    def zero_grad(self) -> None:
        for p, state in self.state.items():
            p.grad = None
            if "accumulation" in state:
                state["accumulation"].zero_()

    # ---- update

    def write(self, stored: Tensor, value: Tensor) -> None:
        """Store `value`, rounded."""
        if stored.dtype != value.dtype and self.policy.stochastic:
            stored.copy_(stochastic_round(value, stored.dtype, self.generator))
        elif stored is not value:
            stored.copy_(value)

    @torch.no_grad()
    def step(self, scaler: LossScaler) -> bool:
        """Update all parameters and clear the gradients; False if the step was skipped because of an overflow."""
        finite = scaler.all_finite(self.gradients())
        inverse = scaler.inverse  # before `update` changes it: these gradients have the old scale
        scaler.update(finite)
        if finite:
            self.steps += 1
            counts = [self.update(p, state, inverse) for p, state in self.state.items()]
            self.lost = share_of([count for count in counts if count is not None])
        self.zero_grad()
        return finite

    def update(self, p: nn.Parameter, state: dict[str, Any], inverse: float) -> Tensor | None:
        gradient = state.get("accumulation", p.grad)
        if gradient is None:
            return None
        # --- exercise 10.29: the update happens in fp32, and is rounded when it is stored ---
        holder = state.get("master", p.data)  # where the optimizer stores the weight
        w = wide(holder)
        m = wide(state["exp_avg"])
        v = wide(state["exp_avg_sq"])
        before = w.clone()
        decay = self.weight_decay if p.dim() > 1 else 0.0
        adamw_update(w, wide(gradient) * inverse, m, v, self.steps, self.lr, decay, self.betas)
        for stored, value in ((holder, w), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
            self.write(stored, value)
        if "master" in state:
            p.data.copy_(holder)
        # --- end exercise ---
        return lost_updates(before, w, wide(holder)) if holder.dtype.itemsize < 4 else None

    def held(self) -> dict[str, int]:
        """Bytes of every item, of all parameters."""
        held = dict.fromkeys(ITEMS, 0)
        for p in self.names:
            items = {**self.state[p], "weights": p, "gradients": p.grad}
            for item, tensor in items.items():
                held[item] += tensor.nbytes if tensor is not None else 0
        return held


# ------------------------------------------------------------------------------------------------------------- demo


def train(
    name: str, group: dist.ProcessGroup, device: torch.device, steps: int, micro_batches: int = 2, **sizes: int
) -> dict[str, Any]:
    """A few data-parallel steps of a small decoder: losses, weights, gradients of the first step, bytes."""
    policy = POLICIES[name]
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    model = Decoder(linear, head=linear, **sizes).to(device)
    optimizer = MixedAdamW(model.named_parameters(), policy, lr=2e-3)
    scaler = make_scaler(policy, group)
    data = stdlib_bytes(200_000)
    seen: dict[str, Any] = {"losses": [], "lost": None, "died": ""}
    for step in range(steps):
        tokens, labels = (t.to(device) for t in batch(data, step, rows=2 * ranks * micro_batches))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for i in range(micro_batches):
            mine = slice(2 * (rank * micro_batches + i), 2 * (rank * micro_batches + i + 1))
            loss = loss_sum(model, tokens[mine], labels[mine]) / labels.numel()
            scaler.scale(loss).backward()
            if step == 0 and i == micro_batches - 1:
                seen["held"] = optimizer.held()
            optimizer.accumulate()
            total += loss.detach()
        dist.all_reduce(total, group=group)
        optimizer.reduce(group)
        if step == 0:
            # Directly in float64: unscaled in fp16, small gradients would be zero again.
            seen["gradients"] = torch.cat([g.double().flatten() for g in optimizer.gradients()]) * scaler.inverse
        try:
            optimizer.step(scaler)
        except FloatingPointError as died:
            seen["died"] = f"step {step}: {died}"
            break
        seen["losses"].append(total.item())
        seen["lost"] = optimizer.lost
    seen["weights"] = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    return seen | {"skipped": scaler.skipped, "parameters": sum(p.numel() for p in model.parameters())}


def demo(names: list[str], group: dist.ProcessGroup, device: torch.device) -> list[str]:
    report = Report(group)
    sizes = dict(hidden=64, inner=128, layers=1)
    alone = dist.new_group([dist.get_rank(group)], use_local_synchronization=True)  # the reference: one rank, all of it
    ranks = dist.get_world_size(group)
    exact = train("fp32", alone, device, 1, 2 * ranks, **sizes)["gradients"]
    for name in names:
        # One rank with all micro-batches of all ranks: the same global batch, rounded by the same policy.
        dense = train(name, alone, device, 1, 2 * ranks, **sizes)
        run = train(name, group, device, 12, **sizes)
        report.title(name)
        if run["died"]:
            died = "nan" in run["died"].lower()
            report.add("it ends with an error, not with a wrong model", True, died)
            continue
        own, error = ((got["gradients"] - exact).norm() / exact.norm() for got in (dense, run))
        limit = max(2 * own.item(), 1e-5)
        right = error.item() <= limit
        report.add("error of all gradients, at most twice one rank's own", f"{limit:.1e}", f"{error:.1e}", right)
        want = {item: size * run["parameters"] for item, size in POLICIES[name].bytes().items()}
        text = " + ".join(str(size) for size in POLICIES[name].bytes().values() if size)
        report.add(f"bytes, {text} per parameter, item by item", sum(want.values()), sum(run["held"].values()))
        report.add("  all items as predicted", True, run["held"] == want)
        same = run["weights"].clone()
        dist.all_reduce(same, op=dist.ReduceOp.MAX, group=group)
        report.add("weights after 12 steps, equal on all ranks to the bit", True, torch.equal(same, run["weights"]))
        if report.rank == 0:
            lost = "" if run["lost"] is None else f"; updates lost to rounding in the last step: {run['lost']:.0%}"
            print(f"  loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}, skipped {run['skipped']}{lost}")
    return report.finish()


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--policy", choices=POLICIES, help="only this one")
    args = parser.parse_args()
    launch(lambda group, device: demo([args.policy] if args.policy else list(POLICIES), group, device))


if __name__ == "__main__":
    main()
