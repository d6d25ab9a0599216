"""What the demo, the tests and the benchmark of pipeline_executor.py run: a small decoder in stages, and some text."""

import tokenize
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Legend of shapes: B batch, S sequence, H hidden, N heads, D head dim, V vocab.
IGNORE = -100  # a label without a target


@dataclass(frozen=True)
class Sizes:
    vocab: int = 256
    hidden: int = 32
    heads: int = 2
    layers: int = 8


class Block(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads = sizes.heads
        hidden = sizes.hidden
        self.norm1 = nn.RMSNorm(hidden)
        self.norm2 = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 of [B, N, S, D]
        mixed = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))  # [B, N, S, D] -> [B, S, H]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE (2104.09864). Every stage needs the positions, so they are passed beside x, not inside it."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / 10000 ** (torch.arange(half, device=x.device) / half)  # [S, D/2]
    cos = angle.cos().to(x.dtype)
    sin = angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Stage(nn.Module):
    """Layers `layers` of the decoder; the first stage also holds the embedding, the last one the norm and the head.

    A stage with all layers is the full model, the reference. A parameter has the same name in both.
    """

    def __init__(self, sizes: Sizes, layers: range, first: bool, last: bool, tied: bool):
        super().__init__()
        self.wrap: Callable = lambda block: block  # recomputation is plugged in here
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden) if first else None
        # Named by their number in the model.
        self.blocks = nn.ModuleDict({str(layer): Block(sizes) for layer in layers})
        self.norm = nn.RMSNorm(sizes.hidden) if last else None
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False) if last else None
        with torch.no_grad():  # seeded by name, so that every partition starts from the same weights
            for name, p in self.named_parameters():
                seen_as = "embed.weight" if tied and name == "head.weight" else name
                generator = torch.Generator().manual_seed(zlib.crc32(seen_as.encode()))
                if p.dim() > 1:
                    p.copy_(torch.randn(*p.shape, generator=generator) * p.shape[-1] ** -0.5)
        if tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Tokens [B, S] on the first stage, else [B, S, H] -> [B, S, H], or logits [B, S, V] on the last stage."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = self.wrap(block)(x, positions)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))

    def tied_weights(self) -> list[nn.Parameter]:
        return list({id(end.weight): end.weight for end in (self.embed, self.head) if end is not None}.values())


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """SUM over the valid tokens. The caller divides, because it knows the full global batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def make_batch(step: int, micro_batches: int, rows: int = 2, length: int = 16) -> tuple[Tensor, Tensor]:
    """Tokens and labels, both [micro-batch, B, S]: bytes of the standard library's own source.

    Micro-batches have different numbers of targets, and the last of several has none at all.
    """
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    count = micro_batches * rows
    starts = (torch.arange(count) + step * count) * length % (len(data) - length - 1)
    text = data[starts[:, None] + torch.arange(length + 1)].unflatten(0, (micro_batches, rows))
    tokens = text[..., :-1]
    labels = text[..., 1:].clone()
    for m in range(micro_batches):
        labels[m, :, length * (micro_batches - m) // micro_batches :] = IGNORE
    if micro_batches > 1:
        labels[-1] = IGNORE
    return tokens, labels


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank hands to `send`."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._opname == "send":
            self.bytes += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))
