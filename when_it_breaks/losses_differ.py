"""The losses of two layouts differ: read the cause from the ratio of the gradients.

"The same" run on one rank and on two should agree except for the last digit. If it does not, the loss curves
say little: they begin alike and drift apart. The gradients of the first step show nearly everything,
parameter by parameter:

    mean      every rank averages over its own valid tokens, then ranks are averaged: wrong everywhere, no common ratio
    twice     summed by hand and by a hook: all ratios are the number of ranks
    forgotten a parameter whose input is split over the ranks (a norm with sequence parallelism) is not summed
    divided   the loss is divided by the tokens of all ranks, and its gradients are averaged on top: all ratios are one
              over the number of ranks
    start     every rank draws its own initial weights: these differ before the step, everything after it
    batch     all ranks read the same samples: losses that look fine, and gradients of half the data

Compare in float64, where rounding is 1e-16 and a mistake is not, and in the first step, before optimizers hide it
(Adam divides by the gradient's size: a factor of two disappears). Before that, check two cheap things: do all
ranks begin with the same weights, and does each have other tokens? This script checks both, and then compares
ranks with one process.

    torchrun --nproc_per_node 2 losses_differ.py --cause mean             the table, what it means, exit code 1
    torchrun --nproc_per_node 2 losses_differ.py --cause mean --fixed    PASS
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

WIDTH, TOKENS = 8, 12
NAMES = ("scale", "first", "second")


def weights_of(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def data() -> tuple[Tensor, Tensor, Tensor]:
    """x and target [T, H], and which tokens count [T]: three of the first half, all of the second."""
    generator = torch.Generator().manual_seed(7)
    x, target = (torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target, torch.arange(TOKENS) >= TOKENS // 4


def summed_loss(weights: list[Tensor], x: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    scale, first, second = weights
    out = torch.tanh(x * scale @ first) @ second  # [t, H]
    return ((out - target).square().mean(1) * valid).sum()


def one_process() -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of all tokens, which every layout must equal."""
    weights = weights_of(0)
    x, target, valid = data()
    loss = summed_loss(weights, x, target, valid) / valid.sum()
    loss.backward()
    return loss.detach(), [weight.grad for weight in weights]


def ranks_that_agree(value: Tensor) -> bool:
    """Whether every rank has the same value, by one sum of each."""
    sums = [torch.empty((), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, value.detach().double().sum())  # ranks x []
    return len({s.item() for s in sums}) == 1


def on_ranks(cause: str) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients over the tokens of all ranks. `cause` is the mistake to make, "" for none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = weights_of(rank if cause == "start" else 0)
    part = 0 if cause == "batch" else rank
    mine = slice(part * TOKENS // world, (part + 1) * TOKENS // world)
    x, target, valid = (tensor[mine] for tensor in data())
    same = [ranks_that_agree(weight) for weight in weights]  # on every rank, for all weights
    if not all(same) and rank == 0:
        print("before the step: the ranks begin with different weights")
    if ranks_that_agree(x) and world > 1 and rank == 0:  # the call first: every rank must make it
        print("before the step: all ranks have the same tokens")
    count = valid.sum()
    if cause == "mean":
        loss = summed_loss(weights, x, target, valid) / count / world  # the mean of means
    else:
        dist.all_reduce(count)  # [] valid tokens of all ranks
        loss = summed_loss(weights, x, target, valid) / count
    loss.backward()
    for name, weight in zip(NAMES, weights, strict=True):
        if cause == "forgotten" and name == "scale":
            continue
        for _ in range(2 if cause == "twice" else 1):
            dist.all_reduce(weight.grad)
        if cause == "divided":
            weight.grad /= world
    total = loss.detach()
    dist.all_reduce(total)
    return total, [weight.grad for weight in weights]


def compare(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]], world: int) -> str:
    """Print the table. Returns the cause that it shows, or "" if all is equal to ten digits."""
    loss = abs(ours[0] / theirs[0] - 1).item()
    print(f"{'':8} {'error':>9} {'ratio':>9}\n{'loss':8} {loss:9.1e} {(ours[0] / theirs[0]).item():9.4f}")
    wrong, ratios = [], []
    for name, mine, right in zip(NAMES, ours[1], theirs[1], strict=True):
        error = ((mine - right).norm() / right.norm()).item()
        ratio = ((mine * right).sum() / right.square().sum()).item()  # the factor that fits best
        rest = ((mine - ratio * right).norm() / right.norm()).item()  # and the remaining difference
        more = f"  and {rest:.1e} that no factor explains" if rest > 1e-10 else ""
        print(f"{name:8} {error:9.1e} {ratio:9.4f}{more}")
        if not error <= 1e-10:
            wrong.append(name)
            ratios.append(ratio if rest <= 1e-10 else float("nan"))
    if not wrong and loss <= 1e-10:
        return ""
    if all(abs(ratio - world) < 1e-9 for ratio in ratios) and len(wrong) == len(NAMES):
        return f"every gradient is {world} times too large: summed twice, or summed where a mean was meant"
    if loss <= 1e-10 and all(abs(ratio * world - 1) < 1e-9 for ratio in ratios) and len(wrong) == len(NAMES):
        return f"the loss is right and every gradient is {world} times too small: averaged, and divided before"
    if loss <= 1e-10 and len(wrong) < len(NAMES):
        only = f"the loss is right and only {', '.join(wrong)} is wrong"
        if all(abs(ratio - ratios[0]) < 1e-9 for ratio in ratios):  # one for all; NaN, where there is none, is not
            return f"{only}, by a factor of {ratios[0]:.4f}: summed over too many ranks, or divided once too often"
        return f"{only}: it is not summed over the ranks that cut its input"
    return "loss and gradients are wrong and no factor explains it: other weights, other tokens, or a mean of means"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    causes = ("mean", "twice", "divided", "forgotten", "start", "batch")
    parser.add_argument("--cause", choices=causes, required=True)
    parser.add_argument("--fixed", action="store_true", help="without the mistake")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("it needs ranks; start it with torchrun --nproc_per_node 2")
    dist.init_process_group("gloo")
    ours = on_ranks("" if options.fixed else options.cause)
    found = ""
    if dist.get_rank() == 0:
        found = compare(ours, one_process(), dist.get_world_size())
        print(found or "PASS")
    dist.destroy_process_group()
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
