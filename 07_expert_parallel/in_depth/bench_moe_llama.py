"""Balance over a training run: the load of every expert with no remedy, with a balance loss, and with the bias.

    python 07_expert_parallel/in_depth/bench_moe_llama.py               trains three models, then draws the figures
    python 07_expert_parallel/in_depth/bench_moe_llama.py --figures     only draws them, from the results

First a step on 4 ranks in each layout must give the gradients, the norm and the biases of one process.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from harness.figures import write_figure
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named
from harness.report import write_result
from moe_layer import MoEConfig, moe_layers, update_biases
from moe_llama import LlamaConfig, MoELlama, batch_of, expert_groups, gather_experts, squared_gradient_norm, train_step
from routing import max_violation
from torch import Tensor

MOE = MoEConfig(64, 64, experts=8, top_k=2, router="sigmoid")
REMEDIES = {
    "none": MOE,
    "balance loss": MoEConfig(64, 64, experts=8, top_k=2, router="sigmoid", balance=0.1),
    "bias": MoEConfig(64, 64, experts=8, top_k=2, router="sigmoid", bias_speed=0.02),
}
STEPS, B, S, EVERY = 300, 12, 64, 5


def one_step(ep: int | None) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    config = LlamaConfig(MoEConfig(16, 12, experts=4, top_k=2, router="sigmoid", balance=0.1, bias_speed=0.01))
    world = dist.group.WORLD if ep else None
    experts, replicas = expert_groups([[0, 1, 2, 3]], ep) if ep else (None, None)
    model = MoELlama(config, experts, world).double()
    batch = batch_of(0, 2, 4, 8)
    if ep:
        batch = [(tokens.chunk(4)[dist.get_rank()], labels.chunk(4)[dist.get_rank()]) for tokens, labels in batch]
    train_step(model, batch, world, replicas)
    update_biases(model, world)
    gradients = gather_experts(model, {n: p.grad for n, p in model.named_parameters()}, experts)
    steps = torch.stack([layer.bias_steps for layer in moe_layers(model)])
    return gradients, squared_gradient_norm(model, experts), steps


def verify() -> None:
    want, norm, steps = one_step(None)
    for ep in (1, 2, 4):
        for rank, (got, its_norm, its_steps) in enumerate(run_ranks(4, one_step, ep)):
            assert_same_named(got, want, 1e-10, f"ep {ep}: gradient of", rank)
            assert_same(its_norm, norm, 1e-10, f"ep {ep}: squared norm", rank)
            assert_same(its_steps.double(), steps.double(), 0.0, f"ep {ep}: biases", rank)


def train(moe: MoEConfig, data: Tensor) -> list[tuple[float, Tensor]]:
    """Loss of each step, and the load of each expert, int64 [layers, E]."""
    model, found, places = MoELlama(LlamaConfig(moe), None, None), [], torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(STEPS):
        text = data[torch.randint(len(data) - S, (B, 1), generator=places) + torch.arange(S + 1)]  # [B, S + 1]
        loss = train_step(model, [(text[:, :-1], text[:, 1:])], None, None)
        optimizer.step()
        found.append((loss.item(), update_biases(model, None)))
    return found


def draw_load(axes, result) -> None:
    """One panel per remedy: the share of each expert of the last layer over the steps."""
    names = list(REMEDIES)
    for axis, name in zip(axes, names, strict=True):
        rows = [row for row in result["rows"] if row[0] == name]
        loads = list(zip(*(row[4:] for row in rows), strict=True))
        axis.stackplot([row[1] for row in rows], *loads, linewidth=0.3, edgecolor="white")
        axis.set(title=f"remedy: {name}", xlabel="step", ylim=(0, 1), xlim=(rows[0][1], rows[-1][1]))
        axis.grid(False)
        axis.set_yticks([i / len(loads) for i in range(len(loads) + 1)], labels=[])
    axes[0].set_ylabel("share of the choices, by expert")


def draw_loss(axes, result) -> None:
    for name in REMEDIES:
        rows = [row for row in result["rows"] if row[0] == name]
        for axis, column in zip(axes, (2, 3), strict=True):
            axis.plot([row[1] for row in rows], [row[column] for row in rows], label=name)
    for axis, label in zip(axes, ("loss", "MaxVio (0: even)"), strict=True):
        axis.set(xlabel="step", ylabel=label)
    axes[0].legend(title="remedy", frameon=False)


def figures() -> None:
    write_figure("07_expert_parallel/figures/load.svg", ["07_balance_steps"], draw_load, shape=(1, 3), size=(10, 3.2))
    write_figure("07_expert_parallel/figures/loss.svg", ["07_balance_steps"], draw_loss, shape=(1, 2), size=(10, 3.4))


def main() -> None:
    parser = argparse.ArgumentParser(description="Balance over a training run.", allow_abbrev=False)
    parser.add_argument("--figures", action="store_true", help="only draw, from the results")
    if parser.parse_args().figures:
        return figures()
    verify()
    torch.set_num_threads(1)
    source = b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    curves, summary = [], []
    for name, moe in REMEDIES.items():
        steps = train(moe, data)
        window = range(0, STEPS - EVERY + 1, EVERY)
        for start in window:
            part = steps[start : start + EVERY]
            load = torch.stack([counts for _, counts in part]).sum(0)  # [layers, E]
            vio = sum(max_violation(layer) for _, counts in part for layer in counts) / (EVERY * len(load))
            share = (load[-1] / load[-1].sum()).tolist()
            loss = sum(loss for loss, _ in part) / EVERY
            curves.append([name, start, round(loss, 4), round(vio, 4), *(round(s, 4) for s in share)])
        last = steps[-STEPS // 4 :]
        vio = [max_violation(layer) for _, counts in last for layer in counts]
        load = torch.stack([counts for _, counts in last]).sum(0).double()
        idle = (load < load.mean(1, keepdim=True) / 4).sum().item()
        loss = sum(loss for loss, _ in last) / len(last)
        summary.append([name, loss, sum(vio) / len(vio), f"{idle} of {load.numel()}"])
    write_result(
        "07_balance",
        f"The last quarter of {STEPS} steps on the source of the standard library",
        ["remedy", "loss", "MaxVio", "experts with less than a quarter of the mean load"],
        summary,
        f"{LlamaConfig().layers} layers, {MOE.top_k} of {MOE.experts} experts, hidden size {MOE.hidden}, {B} x {S} "
        "bytes per step, AdamW, one seed, sigmoid router in all three. MaxVio is the mean over steps and layers.",
    )
    write_result(
        "07_balance_steps",
        f"Means over {EVERY} steps",
        ["remedy", "step", "loss", "MaxVio", *(f"expert {e}" for e in range(MOE.experts))],
        curves,
        "Shares are those of the last layer.",
    )
    figures()
    return None


if __name__ == "__main__":
    main()
