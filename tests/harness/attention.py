"""The reference of every attention that is computed in parts: inputs of a full sequence, results, the definition."""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .reference import assert_same


def random_qkv(
    heads: tuple[int, int], length: int, head_dim: int, *, kv_length: int = 0, batch: int = 2, seed: int = 1
) -> list[Tensor]:
    """q, k, v of query and K/V heads and the gradient of the output, float64 [batch, length, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    q, kv = (length, heads[0]), (kv_length or length, heads[1])
    return [torch.randn(batch, *x, head_dim, generator=generator, dtype=torch.float64) for x in (q, kv, kv, q)]


def attention_results(attention: Callable, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options) -> list[Tensor]:
    """out, dq, dk, dv."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written out, with nothing of a script: [B, S, N, D], causal, each K/V head repeated for its query heads."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * q.shape[-1] ** -0.5
    scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype).triu(1)
    return torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v)


def assert_losses_of_few_labels(
    script: ModuleType, model: nn.Module, shard: Sequence[Tensor], attention: Callable, group: dist.ProcessGroup
) -> None:
    """On a rank: the loss of a core file's model with labels on rank 0 alone, and then on none. Changes the labels."""
    if group.rank() > 0:
        shard[1].fill_(script.IGNORE_INDEX)
    with torch.no_grad():
        logits = script.run_model(model, shard[0], shard[2], attention)
    loss = script.forward_backward(model, shard, attention, group)
    if group.rank() == 0:
        own = F.cross_entropy(logits.flatten(0, 1), shard[1].flatten())
        assert_same(loss, own, what="the loss where one rank has all labels")
    shard[1].fill_(script.IGNORE_INDEX)
    assert script.forward_backward(model, shard, attention, group) == 0, "without any label a loss is 0, not 0/0"
