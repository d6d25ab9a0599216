"""Every 16-bit policy next to fp32: 300 steps on the same text from the same weights; what is lost where.

    python 10_mixed_precision/in_depth/bench_precision_policies.py [--figures]

First the pieces are checked: unscaled gradients, sums of micro-batches, bytes. Then the runs: about 80 s on two cores.
Each run stands for 1024 data-parallel ranks with the same batch (_precision_bench.py), so that its loss is divided by
as many tokens as in a real run, and its gradients are as small.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
from _precision_bench import LR, REPLICAS, STEPS, curves
from _precision_demo import Decoder, OneLineParser, batch, loss_sum, stdlib_bytes
from harness.figures import GREY, write_figure
from harness.reference import assert_same
from harness.report import write_result
from precision_policies import POLICIES, LossScaler, MixedAdamW, fp16, linear
from torch import nn

FIGURES = "10_mixed_precision/figures"
NAMES = ["fp32", "fp32, nudged", *(name for name in POLICIES if name != "fp32")]
LIMIT = 0.3  # per cent of the loss of fp32, for bf16 with master weights
SLOW = 2e-4  # a learning rate as late in a run, where updates are small beside the weights


def verify() -> None:
    """Checks that a wrong policy would fail: exits non-zero before anything is measured."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, policy in POLICIES.items():
        model = Decoder(linear, head=linear, hidden=32, inner=64, layers=1)
        exact = Decoder(hidden=32, inner=64, layers=1)
        optimizer = MixedAdamW(model.named_parameters(), policy, lr=1e-3)
        scaler = LossScaler(dist.group.WORLD, 1024.0 if policy.scaling != "none" else 1.0)
        for step in range(3):
            tokens, labels = batch(stdlib_bytes(20_000), step, rows=2)
            scaler.scale(loss_sum(model, tokens, labels) / labels.numel()).backward()
            (loss_sum(exact, tokens, labels) / labels.numel()).backward()
            size = sum(p.numel() for p in model.parameters())
            want = {item: kind * size for item, kind in policy.bytes().items()}
            if step == 0 and optimizer.held() != want:
                sys.exit(f"bench_precision_policies.py: {name} holds {optimizer.held()}, not {want}")
            optimizer.accumulate()
        for p, got, want in zip(optimizer.names, optimizer.gradients(), exact.parameters(), strict=True):
            error = (got.double() / scaler.value - want.grad.double()).norm() / want.grad.norm()
            if not error < 0.03:
                sys.exit(f"bench_precision_policies.py: {name}: gradient of {optimizer.names[p]} is off by {error:.3f}")
    p = nn.Parameter(torch.ones(64))
    optimizer = MixedAdamW([("p", p)], POLICIES["bf16"], lr=1e-4)
    for _ in range(400):
        p.grad = torch.ones_like(p)
        optimizer.accumulate()
        optimizer.step(LossScaler(dist.group.WORLD, 1.0, dynamic=False))
    assert_same(p.detach().float(), torch.full((64,), 0.96), 5e-3, "bf16 weight after 400 small updates")


def underflow() -> None:
    """The fraction of gradients outside of fp16's range, without and with scaling, by power of two."""
    model = Decoder()
    tokens, labels = batch(stdlib_bytes(), 0)
    seen: list[torch.Tensor] = []
    keep = lambda x, w: Watch.apply(nn.functional.linear(x, w), seen)  # noqa: E731  gradients of activations
    for block in model.blocks:
        block.linear = keep
    (loss_sum(model, tokens, labels) / labels.numel() / REPLICAS).backward()
    exponents = torch.cat([torch.frexp(g[g != 0]).exponent - 1 for g in seen])
    rows = []
    for exponent in range(-45, -9):
        rows.append([exponent, (exponents == exponent).double().mean().item()])
    flat = torch.cat([g.flatten() for g in seen])
    shares = [((flat * 2.0**k).to(fp16) == 0).double().mean().item() for k in (0, 16)]
    write_result(
        "10_underflow",
        "Gradients of activations, by power of two: share of those that are not zero",
        ["power of two", "share"],
        rows,
        f"First step, loss divided by the tokens of {REPLICAS:,} ranks. fp16 makes zero of {shares[0]:.1%} of them; "
        f"after scaling the loss by 2^16, of {shares[1]:.2%}.",
    )
    if not shares[0] > 0.5 > 0.01 > shares[1]:
        sys.exit(f"bench_precision_policies.py: {shares} of the gradients are zero in fp16 without and with scaling")


def accumulation() -> None:
    """The gradient of many micro-batches, summed in bf16 and in fp32, against the exact sum."""
    rows, counts = [], (1, 4, 16, 64, 256)
    optimizers = {}
    for name in ("bf16-master", "bf16"):
        model = Decoder(hidden=64, inner=128, layers=1)
        optimizers[name] = (model, MixedAdamW(model.named_parameters(), POLICIES[name], lr=1e-3))
    exact: list[torch.Tensor] = []
    for i in range(counts[-1]):
        tokens, labels = batch(stdlib_bytes(), i, rows=1)
        for name, (model, optimizer) in optimizers.items():
            kept = [p.grad for p in optimizer.names]
            for p in optimizer.names:
                p.grad = None
            (loss_sum(model, tokens, labels) / labels.numel() / counts[-1]).backward()
            mine = [p.grad.double() for p in optimizer.names]
            if name == "bf16-master":  # autograd's own addition, but with this gradient kept apart
                exact = [a + b for a, b in zip(exact, mine, strict=True)] if exact else mine
                for p, before in zip(optimizer.names, kept, strict=True):
                    p.grad = p.grad if before is None else before + p.grad
            optimizer.accumulate()
        if i + 1 in counts:
            true = torch.cat([g.flatten() for g in exact])
            errors = []
            for _, optimizer in optimizers.values():
                got = torch.cat([g.double().flatten() for g in optimizer.gradients()])
                errors.append(((got - true).norm() / true.norm()).item())
            rows.append([i + 1, *errors])
    if not (rows[-1][1] > 0.01 and rows[-1][2] < 1e-5):
        sys.exit(f"bench_precision_policies.py: 256 micro-batches in bf16 and fp32 are off by {rows[-1][1:]}")
    write_result(
        "10_accumulation",
        "Sum of the gradients of many micro-batches: relative error of the sum itself",
        ["micro-batches", "summed in bf16", "summed in fp32"],
        rows,
        "Against the exact sum of the same bf16 gradients.",
    )


class Watch(torch.autograd.Function):
    """Identity in forward; records the gradient in backward."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(gradient.detach().clone())
        return gradient, None


def measure() -> None:
    slow = ["fp32", "bf16-pure", "bf16-stochastic", "bf16"]
    runs = curves([(name, STEPS, LR) for name in NAMES] + [(name, 200, SLOW) for name in slow])
    fast, late = runs[: len(NAMES)], runs[len(NAMES) :]
    base = fast[0]["held_out"]
    rows = []
    for run in fast:
        policy = POLICIES[run["name"].split(",")[0]]
        lost = [share for share in run["lost"] if share is not None]
        alive = not run["died"]
        rows.append([
            run["name"],
            sum(policy.bytes().values()),
            f"{run['held_out']:.4f}" if alive else "-",
            f"{100 * (run['held_out'] / base - 1):+.2f} %" if alive else f"ended at {run['died'].split(':')[0]}: NaN",
            f"{sum(lost) / len(lost):.0%}" if lost else "-",
            run["skipped"] if alive else "-",
        ])  # fmt: skip
    off = {run["name"]: abs(100 * (run["held_out"] / base - 1)) for run in fast}
    for name in ("bf16", "bf16-master"):
        if not off[name] <= LIMIT:
            sys.exit(f"bench_precision_policies.py: {name} is {off[name]:.2f} % off fp32, more than {LIMIT} %")
    write_result(
        "10_mixed_precision",
        f"Loss on held-out text after {STEPS} steps, from the same weights, on the same batches",
        ["policy", "bytes per parameter", "loss", "against fp32", "updates lost to rounding", "steps skipped"],
        rows,
        f'0.4 million parameters, bytes of Python\'s standard library, AdamW, learning rate {LR:g}. "fp32, nudged" '
        "starts with every weight two to four units in the last place larger. Single runs, each on the "
        "same batches: a few tenths of a per cent do not rank them (10_fp8_learning_rates has the spread).",
    )
    curve_rows = []
    for step in range(0, STEPS, 5):
        row = [step + 2]
        for run in fast:
            part = run["losses"][step : step + 5]
            row.append(sum(part) / len(part) if part else None)
        curve_rows.append(row)
    write_result("10_mixed_precision_curves", "Training loss, mean of five steps", ["step", *NAMES], curve_rows)
    rows = []
    for run in late:
        lost = [share for share in run["lost"] if share is not None]
        rows.append([run["name"], run["held_out"], f"{sum(lost) / len(lost):.0%}" if lost else "-"])
    write_result(
        "10_lost_updates",
        f"200 steps with a learning rate of {SLOW:g}: updates are smaller, and more of them are lost",
        ["policy", "loss", "updates lost to rounding"],
        rows,
    )


def draw_curves(axes, result) -> None:
    left, right = axes
    steps = [row[0] for row in result["rows"]]
    columns = {name: [row[i] for row in result["rows"]] for i, name in enumerate(result["columns"])}
    dead = {"fp16-pure", "fp16-master"}
    for name in ("fp32", "bf16", "fp16", "fp16-master", "fp16-pure"):
        pairs = [(s, v) for s, v in zip(steps, columns[name], strict=True) if v is not None]
        mark = "x" if len(pairs) < 2 else ""
        left.plot(
            *(zip(*pairs, strict=True) if pairs else ([], [])), marker=mark, label=name, lw=2 if name in dead else 1.2
        )
    left.set(title="What fp16 needs", xlabel="step", ylabel="training loss")
    left.legend(fontsize=8)
    for name in ("bf16", "bf16-master", "bf16-stochastic", "bf16-pure", "fp32, nudged"):
        difference = [100 * (a / b - 1) for a, b in zip(columns[name], columns["fp32"], strict=True)]
        right.plot(steps, difference, label=name, lw=1.2)
    right.set(title="What bf16 loses", xlabel="step", ylabel="training loss against fp32, %", ylim=(-2, 2))
    right.legend(fontsize=8)


def draw_underflow(axes, result) -> None:
    powers, shares = zip(*result["rows"], strict=True)
    axes.bar(powers, shares, color=["C3" if power < -25 else "C0" for power in powers], label="as they are")
    axes.step([p + 16 for p in powers], shares, where="mid", color="C2", label="loss times 2^16")
    axes.axvline(-25.5, color=GREY, lw=1)
    axes.annotate("fp16 ends here", (-25.2, max(shares) * 0.95), fontsize=8)
    axes.set(xlabel="power of two of the gradient", ylabel="share of the elements", title="Gradients of activations")
    axes.legend(fontsize=8)


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--figures", action="store_true", help="only draw the figures again")
    if not parser.parse_args().figures:
        verify()
        underflow()
        accumulation()
        measure()
    write_figure(f"{FIGURES}/policies.svg", ["10_mixed_precision_curves"], draw_curves, shape=(1, 2))
    write_figure(f"{FIGURES}/underflow.svg", ["10_underflow"], draw_underflow)


if __name__ == "__main__":
    main()
