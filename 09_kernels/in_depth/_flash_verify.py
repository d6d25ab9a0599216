"""Is the timed kernel right? Attention of the timed shape, against float64 and next to PyTorch's own kernel.

A check at 500 tokens says little about 8192: there another binary may run, or another path of the same one.
So each benchmark checks each shape before timing it. All heads in float64 would take longer than all
else, so the first K/V head of the first sequence and the last of the last are computed, with all of their
query heads; the other heads are compared with PyTorch's kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.utils.deterministic
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Legend of shapes: B batch, S sequence, N query heads, N_kv key/value heads, G = N / N_kv, D head dim.
NAMES = ("out", "dq", "dk", "dv")
FURTHER = 1.5  # times the error of PyTorch's kernel against float64: the root mean square,
LARGEST = 4.0  # and the maximum, which varies more


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that PyTorch allocates here is NaN until written, not the right result of the last call."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def in_float64(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of one head, [S, D] each, from the formulas and with all S x S scores."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    scale = q.shape[1] ** -0.5
    scores = q @ k.T * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -torch.inf)
    weights = scores.softmax(-1)
    del scores
    out = weights @ v
    dscores = dout @ v.T
    dscores -= (dout * out).sum(-1, keepdim=True)
    dscores *= weights
    return out, dscores @ k * scale, dscores.T @ q * scale, weights.T @ dout


def of_pytorch(given: Sequence[Tensor], causal: bool) -> list[Tensor]:
    """out, dq, dk, dv [B, S, heads, D] of PyTorch's flash kernel. K and V are expanded."""
    q, k, v, dout = (x.detach().transpose(1, 2) for x in given)  # [B, S, N, D] -> [B, N, S, D]
    G = q.shape[1] // k.shape[1]
    q, k, v = (x.detach().requires_grad_() for x in (q, *(x.repeat_interleave(G, 1) for x in (k, v))))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        dq, *shares = torch.autograd.grad(out, (q, k, v), dout)
    dk, dv = (x.float().unflatten(1, (-1, G)).sum(2) for x in shares)  # over the query heads of a K/V head
    return [x.detach().transpose(1, 2) for x in (out, dq, dk, dv)]


def distance(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Root mean square and maximum of the difference of two tensors. NaN if any."""
    off = x.to(y.dtype) - y
    return off.square().mean().sqrt().item(), off.abs().max().item()


class Yardstick:
    """Expected attention of q, k, v and the gradient of the output, and the allowed error."""

    def __init__(self, given: Sequence[Tensor], causal: bool) -> None:
        q, k, v, dout = given
        B, _, N, _ = q.shape
        N_kv = k.shape[2]
        self.G = N // N_kv
        self.places = sorted({(0, 0), (B - 1, N_kv - 1)})  # (sequence, K/V head)
        self.theirs = of_pytorch(given, causal)
        self.exact: list[list[Tensor]] = [[] for _ in NAMES]
        for b, kv in self.places:
            heads = range(kv * self.G, kv * self.G + self.G)
            parts = [in_float64(q[b, :, n], k[b, :, kv], v[b, :, kv], dout[b, :, n], causal) for n in heads]
            out, dq, dk, dv = zip(*parts, strict=True)
            found = (torch.stack(out, 1), torch.stack(dq, 1), sum(dk)[:, None], sum(dv)[:, None])  # [S, heads, D]
            for tensors, tensor in zip(self.exact, found, strict=True):
                tensors.append(tensor)
        self.off = [distance(self.chosen(x, at), torch.stack(self.exact[at])) for at, x in enumerate(self.theirs)]

    def chosen(self, x: Tensor, at: int) -> Tensor:
        """The heads of out, dq, dk or dv [B, S, heads, D] that are known exactly: [2, S, G or 1, D]."""
        width = self.G if NAMES[at] in ("out", "dq") else 1
        return torch.stack([x[b, :, kv * width : (kv + 1) * width] for b, kv in self.places])

    def failures(self, got: Sequence[Tensor], further: float = FURTHER) -> list[str]:
        """A line for each of out, dq, dk, dv (or the first few) with too large an error; none if all pass."""
        lines = []
        for at, x in enumerate(got):
            mean, largest = distance(self.chosen(x, at), torch.stack(self.exact[at]))
            its_mean, its_largest = self.off[at]
            elsewhere = distance(x.float(), self.theirs[at].float())[0]  # on all heads
            for what, found, allowed in (
                ("off from float64 by", mean, further * its_mean),
                ("off from float64 in one place by", largest, further / FURTHER * LARGEST * its_largest),
                ("off from PyTorch's on all heads by", elsewhere, (further + 1) * its_mean),
            ):
                if not found <= allowed:  # NaN as well
                    lines.append(f"{NAMES[at]} is {what} {found:.1e}, allowed are {allowed:.1e}")
                    break
        return lines
