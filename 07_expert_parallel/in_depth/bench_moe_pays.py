"""Does it pay? Experts against a dense model with as many parameters per token, over several seeds.

    python 07_expert_parallel/in_depth/bench_moe_pays.py               trains all, then draws the figure
    python 07_expert_parallel/in_depth/bench_moe_pays.py --figures     only draws it, from the results

All models have the same attention, seed, data order and optimizer. The dense ones are the mixture with one
expert, which all tokens use: a feed-forward layer of its width. First, a mixture whose experts are all equal
must give the outputs and gradients of the dense model with one of them.
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from harness.figures import write_figure
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import write_result
from moe_layer import MoEConfig, moe_layers
from moe_llama import LlamaConfig, MoELlama, batch_of, init_moe, loss_sum, train_step
from torch import Tensor

H, ACTIVE, BALANCE = 64, 128, 0.01  # hidden size; total width of the experts that a token uses
MODELS = {  # width `ACTIVE` per token, but in the last as much as "1 of 8" and "2 of 16" hold
    "dense": MoEConfig(H, ACTIVE, experts=1, top_k=1, normalise=True),
    "1 of 8 experts": MoEConfig(H, ACTIVE, experts=8, top_k=1, balance=BALANCE),
    "2 of 8 experts": MoEConfig(H, ACTIVE // 2, experts=8, top_k=2, balance=BALANCE),
    "2 of 16 experts": MoEConfig(H, ACTIVE // 2, experts=16, top_k=2, balance=BALANCE),
    "dense, 8 times as wide": MoEConfig(H, 8 * ACTIVE, experts=1, top_k=1, normalise=True),
}
HALF = {"half": MoEConfig(H, ACTIVE // 2, experts=1, top_k=1, normalise=True)}  # to verify with
SEEDS, STEPS, B, S, EVERY = (0, 1, 2), 400, 12, 64, 20


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's source: to train on, and every tenth file held out."""
    files = [p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py"))]
    sets = [b"".join(f for i, f in enumerate(files) if (i % 10 == 9) == held) for held in (False, True)]
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in sets)  # type: ignore[return-value]


def pieces(data: Tensor, many: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    both = data[torch.randint(len(data) - S, (many, 1), generator=generator) + torch.arange(S + 1)]  # [many, S + 1]
    return both[:, :-1], both[:, 1:]


def make(name: str, seed: int) -> MoELlama:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the router of a single expert cannot learn
        model = MoELlama(LlamaConfig((MODELS | HALF)[name]), None, None)
    init_moe(model, 2, seed, [n for n, _ in model.named_parameters()])
    return model


def verify() -> None:
    """Equal experts of a mixture are one expert, since the weights of a token sum to 1."""
    dense, half, mixture = (make(name, 0).double() for name in ("dense", "half", "2 of 16 experts"))
    mixture.eval()  # no balance loss
    for name, p in mixture.named_parameters():
        other = half.get_parameter(name)
        if ".experts." in name:
            p.data.copy_(other.data.expand_as(p))
        elif ".gate." not in name:
            p.data.copy_(other.data)
    [(tokens, labels)] = batch_of(0, 1, 4, 16)
    for model in (half, mixture):
        loss_sum(model, tokens, labels).backward()
    assert_same(mixture(tokens), half(tokens), 1e-12, "logits of equal experts")
    for name, p in half.named_parameters():
        if ".gate." not in name:
            got = mixture.get_parameter(name).grad
            assert_same(got.sum(0, keepdim=True) if ".experts." in name else got, p.grad, 1e-10, f"gradient of {name}")
    if dense.get_parameter("model.layers.0.mlp.experts.w1.weight").shape != (1, ACTIVE, H):
        sys.exit("the dense model is not as wide as the experts of a token together")


def train(name: str, seed: int, steps: int = STEPS) -> tuple[list[tuple[int, float]], float, float]:
    """(Step, held-out loss) every EVERY steps; busiest expert over the mean at the end; seconds per step."""
    torch.set_num_threads(1)
    data, held = corpus()
    fixed = pieces(held, 64, torch.Generator().manual_seed(99))
    model, places, curve, seconds = make(name, seed), torch.Generator().manual_seed(1000 + seed), [], 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(1, steps + 1):
        batch = pieces(data, B, places)
        begin = time.perf_counter()
        train_step(model, [batch], None, None)
        optimizer.step()
        seconds += time.perf_counter() - begin
        if step % EVERY == 0:
            counts = torch.stack([layer.step_counts for layer in moe_layers(model)]).double()
            model.eval()
            with torch.no_grad():
                curve.append((step, loss_sum(model, *fixed).item() / fixed[1].numel()))
            model.train()
            for layer in moe_layers(model):
                layer.step_counts.zero_()
    return curve, (counts.amax(1) / counts.mean(1)).mean().item(), seconds / steps


def run() -> dict:
    """Every second training on each of two ranks; seeds in the outer loop, so that both have all models."""
    jobs = [(name, seed) for seed in SEEDS for name in MODELS]
    return {job: train(*job) for job in jobs[dist.get_rank() :: 2]}


def draw(axes, curves, summary) -> None:
    for i, name in enumerate(row[0] for row in summary["rows"]):
        colour = f"C{i}"
        rows = [row for row in curves["rows"] if row[0] == name]
        steps = [row[1] for row in rows]
        axes[0].plot(steps, [row[2] for row in rows], label=name, color=colour)
        axes[0].fill_between(steps, [row[3] for row in rows], [row[4] for row in rows], color=colour, alpha=0.2, lw=0)
        base = [row[2] for row in curves["rows"] if row[0] == "dense"]
        axes[1].plot(steps, [row[2] - b for row, b in zip(rows, base, strict=True)], color=colour)
    axes[0].set(xlabel="step", ylabel="held-out loss", ylim=(None, 3.2))
    axes[1].set(xlabel="step", ylabel="minus that of the dense model", ylim=(-0.2, 0.25))
    axes[0].legend(frameon=False, fontsize=8)


def figures() -> None:
    sources = ["07_moe_pays_steps", "07_moe_pays"]
    write_figure("07_expert_parallel/figures/pays.svg", sources, draw, shape=(1, 2), size=(10, 3.6))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train experts and dense models.", allow_abbrev=False)
    parser.add_argument("--figures", action="store_true", help="only draw, from the results")
    if parser.parse_args().figures:
        return figures()
    verify()
    found = {job: result for rank in run_ranks(2, run, timeout=600) for job, result in rank.items()}
    curves, summary = [], []
    base = [found["dense", seed] for seed in SEEDS]
    for name, c in MODELS.items():
        mine = [found[name, seed] for seed in SEEDS]
        for points in zip(*(curve for curve, _, _ in mine), strict=True):
            losses = [loss for _, loss in points]
            curves.append([name, points[0][0], sum(losses) / len(losses), min(losses), max(losses)])
        last = [curve[-1][1] for curve, _, _ in mine]
        less = [dense[0][-1][1] - loss for dense, loss in zip(base, last, strict=True)]
        layer = 3 * H * c.intermediate
        summary.append(
            [
                name,
                f"{layer * c.top_k:,}",
                f"{layer * c.experts:,}",
                f"{sum(last) / len(last):.3f} ({min(last):.3f} to {max(last):.3f})",
                f"{sum(less) / len(less):+.3f} ({min(less):+.3f} to {max(less):+.3f})",
                sum(busiest for _, busiest, _ in mine) / len(mine),
                sum(s for _, _, s in mine) / sum(s for _, _, s in base),
            ]
        )
    write_result(
        "07_moe_pays",
        f"Held-out loss after {STEPS} steps, {len(SEEDS)} seeds: mean, least and most",
        [
            "model",
            "parameters of a layer that a token meets",
            "that it has",
            "loss",
            "less than dense, seed by seed",
            "busiest expert over the mean",
            "seconds of a step over dense",
        ],
        summary,
        f"2 layers, hidden size {H}, {B} x {S} bytes of the standard library's source per step, AdamW, held out: every "
        f"tenth file. Balance loss times {BALANCE}. Each training is one process with one thread, and sends nothing.",
    )
    write_result("07_moe_pays_steps", "Held-out loss by step", ["model", "step", "mean", "least", "most"], curves)
    figures()
    return None


if __name__ == "__main__":
    main()
