"""The tests' reference: a mixture of experts, token by token, on one process. Nothing is sorted or sent."""

import math

import torch
from moe_layer import MoE, MoEConfig
from torch import Tensor, nn


def queue_by_queue(experts: list[list[int]], room: float, num_experts: int) -> list[list[bool]]:
    """[T][K]: does the choice find room? First choices come first, then earlier tokens."""
    left, kept = [room] * num_experts, [[False] * len(row) for row in experts]
    for k in range(len(experts[0]) if experts else 0):
        for t, row in enumerate(experts):
            kept[t][k] = left[row[k]] > 0
            left[row[k]] -= kept[t][k]
    return kept


def silu_expert(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    gate = w1 @ x
    return w2 @ (gate * torch.sigmoid(gate) * (w3 @ x))


def chosen(scores: list[float], c: MoEConfig) -> list[int]:
    """Experts of one token, the best first."""
    size = c.experts // c.nodes
    nodes = range(c.nodes)
    if c.max_nodes < c.nodes:
        good = [sum(sorted(scores[n * size : (n + 1) * size])[-(c.top_k // c.max_nodes) :]) for n in nodes]
        nodes = sorted(nodes, key=lambda n: -good[n])[: c.max_nodes]
    return sorted((e for e in range(c.experts) if e // size in nodes), key=lambda e: -scores[e])[: c.top_k]


class SlowMoE(nn.Module):
    """The layer with all experts; `extra`: balance loss and z-loss of the last call."""

    def __init__(self, c: MoEConfig):
        super().__init__()
        self.c = c
        self.steps = torch.zeros(c.experts, dtype=torch.int64)
        whole = MoE(c, None, None)
        self.gate = whole.gate
        self.experts = whole.experts
        if c.shared:
            self.shared_experts = whole.shared_experts
        self.counts = torch.zeros(c.experts, dtype=torch.int64)
        self.extra = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        logits = x @ self.gate.weight.T
        s = logits.sigmoid() if c.router == "sigmoid" else logits.exp() / logits.exp().sum(-1, keepdim=True)
        bias = c.bias_speed * self.steps
        picks = [chosen(row, c) for row in (s + bias).tolist()]
        room = math.inf if c.capacity is None else math.ceil(c.capacity * c.top_k * len(x) / c.experts)
        kept = queue_by_queue(picks, room, c.experts)
        counts = torch.bincount(torch.tensor(picks).flatten(), minlength=c.experts)
        self.counts += counts
        rows = []
        for t, experts in enumerate(picks):
            y = torch.zeros_like(x[t])
            for k, e in enumerate(experts):
                if kept[t][k]:
                    w1, w3, w2 = (self.experts[name].weight[e] for name in ("w1", "w3", "w2"))
                    normalise = c.top_k > 1 if c.normalise is None else c.normalise
                    divisor = s[t, experts].sum() if normalise else 1.0
                    y = y + s[t, e] / divisor * silu_expert(x[t], w1, w3, w2)
            if c.shared:
                y = y + silu_expert(
                    x[t], *(self.shared_experts[n].weight for n in ("gate_proj", "up_proj", "down_proj"))
                )
            rows.append(y)
        mean_score = (s / s.sum(-1, keepdim=True)).mean(0)
        fraction = counts.double() * (c.experts / (c.top_k * len(x)))
        z = logits.exp().sum(-1).log().square().mean()
        self.extra = c.balance * (fraction * mean_score).sum() + c.z * z
        return torch.stack(rows).view(shape)
