"""The three computations of experts and the three ways to dispatch, against a dense layer of equal active parameters.

    python 07_expert_parallel/in_depth/bench_expert_dispatch.py                 4 ranks on the CPU, ratios
    python 07_expert_parallel/in_depth/bench_expert_dispatch.py --gpu           one GPU, milliseconds and TFLOPs
    python 07_expert_parallel/in_depth/bench_expert_dispatch.py --gpu --dry --out DIR   the same at toy size, on the CPU

First all must match a reference of all experts on all tokens (on a GPU the loop in fp32), in both passes; only then is
anything timed.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from expert_dispatch import COMPUTES, DISPATCH, make_plan, reference, swiglu
from harness import predictions
from harness.ceilings import Table, device_here
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import Ratio, median_seconds, paired, write_result
from routing import route, router_logits
from torch import Tensor

P, E, K, T, H, F_ = 4, 16, 2, 512, 128, 128  # ranks, experts, top-k, tokens per rank, hidden, intermediate
WAYS = [("pairs", "loop"), ("pairs", "padded"), ("pairs", "grouped"), ("once", "loop"), ("everywhere", "loop")]


def weights_of(experts: int, device: str = "cpu", H: int = H, F_: int = F_) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(experts, F_, H), (experts, F_, H), (experts, H, F_), (experts, H)]
    return [torch.randn(*s, generator=generator, device=device) / s[-1] ** 0.5 for s in shapes]


def tokens_of(rank: int) -> Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(10 + rank))


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def layer_step(version: str, compute: str) -> Callable[[], list[Tensor]]:
    """Forward and backward of a full layer on this rank: router, dispatch, experts, combine."""
    rank, group = dist.get_rank(), dist.group.WORLD
    w1, w3, w2, gate = weights_of(E)
    local = leaves([w.chunk(P)[rank] for w in (w1, w3, w2)])
    (gate, x) = leaves([gate, tokens_of(rank)])

    def step() -> list[Tensor]:
        for t in (x, gate, *local):
            t.grad = None
        routing = route(router_logits(x, gate), K)
        plan = make_plan(version, routing.experts, None, E, group)
        experts = partial(COMPUTES[compute], w1=local[0], w3=local[1], w2=local[2])
        y = DISPATCH[version](x, routing.weights, plan, experts, group)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(w.grad for w in local)]

    return step


def dense_step() -> Callable[[], None]:
    """A feed-forward layer with as many parameters per token as K experts: K times as wide."""
    w1, w3, w2, _ = (w.flatten(0, 1) for w in weights_of(K))
    gate, up, down, x = leaves([w1, w3, w2.view(K, H, F_).transpose(0, 1).flatten(1), tokens_of(dist.get_rank())])

    def step() -> None:
        for t in (gate, up, down, x):
            t.grad = None
        F.linear(swiglu(F.linear(x, gate), F.linear(x, up)), down).square().sum().backward()

    return step


def verify_layers() -> None:
    rank = dist.get_rank()
    w1, w3, w2, gate = leaves(weights_of(E))
    (x,) = leaves([torch.cat([tokens_of(r) for r in range(P)])])
    routing = route(router_logits(x, gate), K)
    y = reference(x, routing.weights, make_plan("pairs", routing.experts, None, E, None), w1, w3, w2)
    y.square().sum().backward()
    want = [y.detach().chunk(P)[rank], x.grad.chunk(P)[rank], *(w.grad.chunk(P)[rank] for w in (w1, w3, w2))]
    for version, compute in WAYS:
        for what, a, b in zip(("y", "dx", "dw1", "dw3", "dw2"), layer_step(version, compute)(), want, strict=True):
            assert_same(a, b, 2e-5, f"{what} of {version}, {compute}", rank)


def measure() -> list[tuple[Ratio, Ratio]]:
    """On each rank: seconds of each way over those of the first one, and over those of the dense layer."""
    base, dense = layer_step(*WAYS[0]), dense_step()
    found = []
    for way in WAYS:
        step = layer_step(*way)
        found.append(tuple(paired(step, other, repeats=7, setup=dist.barrier) for other in (base, dense)))
    return found


def on_cpu() -> None:
    run_ranks(P, verify_layers, timeout=300)
    rows = run_ranks(P, measure, timeout=600)[0]
    write_result(
        "07_expert_parallel",
        f"Forward and backward of one layer on {P} ranks",
        ["dispatch", "experts", "seconds over pairs, loop", "seconds over the dense layer of equal active parameters"],
        [[*way, *ratios] for way, ratios in zip(WAYS, rows, strict=True)],
        f"{K} of {E} experts, {T} tokens per rank, hidden size {H}, {F_} per expert, float32; medians and quartiles. "
        "The first row is measured against itself. The dense layer sends nothing.",
    )


def both_passes(compute: Callable[..., Tensor], counts: list[int], inputs: list[Tensor]) -> list[Tensor]:
    """The experts' output, and the gradients of their rows and weights, with the output as its own gradient."""
    y = compute(inputs[0], counts, *inputs[1:])
    return [y.detach(), *torch.autograd.grad(y, inputs, y.detach())]


def on_gpu(dry: bool, out: Path | None) -> None:
    """The three computations on one device in bf16, on rows as uneven as an untrained router makes them."""
    device = str(device_here())
    tokens, experts, k, H, F_ = (64, 4, 2, 32, 16) if dry else (16384, 64, 6, 2048, 1408)
    *w, gate = weights_of(experts, device, H, F_)
    x = torch.randn(tokens, H, generator=torch.Generator(device).manual_seed(1), device=device)
    chosen = route(router_logits(x, gate), k).experts.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=experts).tolist()
    rows = x[order // k]
    want = both_passes(COMPUTES["loop"], counts, leaves([rows, *w]))
    half = leaves([t.bfloat16() for t in (rows, *w)])
    own: list[float] = []  # what bf16 itself costs: the errors of the loop, which comes first
    for name, compute in COMPUTES.items():
        pairs = zip(both_passes(compute, counts, half), want, strict=True)
        errors = [((got - exact).abs().max() / exact.abs().max()).item() for got, exact in pairs]  # on the device
        own = own or errors
        for what, error, limit in zip(("y", "dx", "dw1", "dw3", "dw2"), errors, own, strict=True):
            if not error <= 2 * limit:
                sys.exit(f"{what} of {name}: error {error:.2e} in bf16, where the loop has {limit:.2e}")
    flops = 3 * 2 * 3 * len(rows) * H * F_
    table = Table(
        "07_expert_compute_gpu",
        "Forward and backward of the experts of one layer on one device",
        ["experts", "milliseconds", "TFLOPs per second", *predictions.COLUMNS],
        f"{len(rows)} rows of {H} for {experts} experts of {F_}, the busiest with {max(counts)}; bf16; median. "
        "Predicted from the products alone, 80 % of the rate; padded, of as many rows as the busiest expert has.",
        out,
    )
    for name in ("grouped", *(name for name in COMPUTES if name != "grouped")):
        seconds = median_seconds(partial(both_passes, COMPUTES[name], counts, half), 3 if dry else 20)
        really = max(counts) * experts / len(rows) if name == "padded" else 1.0
        expected = predictions.product(predictions.here(), really * flops)
        table.add(name, 1e3 * seconds, flops / seconds / 1e12, *predictions.cells(expected, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time experts and dispatch.", allow_abbrev=False)
    parser.add_argument("--gpu", action="store_true", help="measure on one GPU")
    parser.add_argument("--dry", action="store_true", help="with --gpu: toy sizes on the CPU, to try the program")
    parser.add_argument("--out", type=Path, help="folder for the results instead of results/")
    args = parser.parse_args()
    if (args.dry or args.out) and not args.gpu:
        print(
            f"bench_expert_dispatch.py: {'--dry' if args.dry else f'--out {args.out}'} is about --gpu; add --gpu",
            file=sys.stderr,
        )
        sys.exit(2)
    if args.gpu and not args.dry and not torch.cuda.is_available():
        print(
            "bench_expert_dispatch.py: --gpu needs a GPU; with --dry it tries the program on the CPU", file=sys.stderr
        )
        sys.exit(2)
    if args.dry and not args.out:
        print(
            "bench_expert_dispatch.py: --dry needs --out DIR, so that no toy number lands in results", file=sys.stderr
        )
        sys.exit(2)
    on_gpu(args.dry, args.out) if args.gpu else on_cpu()


if __name__ == "__main__":
    main()
