"""One GPU: a Llama, a step of its training, and every byte that the step needs.

Before a model is cut over many GPUs it has to be right on one, and one has to know why one is not enough. What runs
out of memory is the *peak* of a step: what is held anyway, what autograd keeps from forward to backward, and what
backward needs for a moment, all at the same time.

    bytes                         one step, two micro-batches (the README shows the measured curve)
     peak ->       _                    _
                 /  |_                /  |_       momentary: the gradient of the logits, of a block
               /      |_            /      |_     kept for backward: grows with B S L
     --------/----------|---------/----------|----------  gradients: W (from the first backward on)
     ####################################################  weights and two moments of AdamW: 3 W
       forward   backward   forward   backward   clip, update

Two ideas make a step fit. Neither changes its result:
    accumulation     M micro-batches one after another, gradients added up; activations of one are there at a time
    recomputation    keep the input of each block, compute the block again in backward (arXiv 1604.06174):
                     a block keeps H numbers a token, and a step costs nearly 4 forwards in place of 3

Formulas, in numbers of 4 bytes, for T = B S tokens of a micro-batch; held against what torch really allocates:
    weights     W = 2 V H + L (2 H H + 2 H K D + 3 H F + 2 H) + H
    kept        T (L (8 H + 2 K D + N + 4 F + 2) + 3 H + 1 + V) + S D;  recomputed: T (L H + 3 H + 1 + V) + S D
    FLOPs       2 for a multiply-add, backward twice forward: `flops` (arXiv 2204.02311, appendix B)

    python single_gpu.py --recompute --micro-batches 4     checks all of it, then trains; every option may be left out
Ends with PASS when loss, gradients and weights are the plain form's to 1e-10, bytes and FLOPs the formulas', and the
last losses are finite and, after 60 steps or more, below 0.6 log V (log V is the loss of a model that knows nothing).
"""

import argparse
import math
import os
import sys
import time
import tokenize
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

IGNORE = -100  # the label of a token that is not to be predicted: padding, or a prompt
PEAK = {"NVIDIA A100-SXM4-80GB": 19.5e12, "NVIDIA H100 80GB HBM3": 66.9e12, "NVIDIA H200": 66.9e12}  # FLOP/s in fp32


@dataclass(frozen=True)
class Sizes:
    """Of the model. A micro-batch is B sequences of S tokens, T = B S; a batch has M micro-batches."""

    V: int = 256  # words of the vocabulary: here the values of a byte
    H: int = 64  # numbers that a token is on its way through the model (hidden size)
    L: int = 2  # blocks
    N: int = 4  # heads of queries
    K: int = 2  # heads of keys and values
    F: int = 172  # width of the feed-forward network
    D: int = 16  # numbers of a head, H / N


# ------------------------------------------------------------------------------------------------ the model, and a step
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE. Attention alone cannot tell the order of tokens. Turn each pair of numbers by an angle that grows with the
    position: the product of a query and a key then depends on how far apart they are, and not on where they are."""
    # --- exercise 1.1: turn the pairs (x[i], x[i + D/2]) of every head ---
    a, b = x.chunk(2, dim=-1)  # [B, S, N, D] -> two of [B, S, N, D/2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    # --- end exercise ---


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v as it is written: S · S numbers for each head, and N / K copies of k and v."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2).transpose(1, 2) for x in (k, v))  # -> [B, N, S, D]
    scores = q.transpose(1, 2) @ k.mT / math.sqrt(q.shape[3])  # [B, N, S, D] @ [B, N, D, S] -> [B, N, S, S]
    later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)  # a token does not see those after it
    return (scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(1, 2)  # -> [B, S, N, D]


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in one kernel. For backward it keeps one number for each row of scores, their log-sum-exp."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, N, D] -> [B, N, S, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). [B, S, H] -> [B, S, H]"""

    def __init__(self, c: Sizes, attention):
        super().__init__()
        self.D, self.attention = c.D, attention
        # RMSNorm: x / sqrt(mean(x²) + 1e-5) · scale
        self.norm1, self.norm2 = nn.RMSNorm(c.H, 1e-5), nn.RMSNorm(c.H, 1e-5)
        # Grouped-query attention: N / K heads of queries share one of keys and values. Who generates text keeps keys
        # and values of all tokens so far; of these there are then N / K times fewer.
        self.q, self.k, self.v = (nn.Linear(c.H, heads * c.D, bias=False) for heads in (c.N, c.K, c.K))
        self.out = nn.Linear(c.H, c.H, bias=False)
        # SwiGLU: one product decides, number by number, how much of another passes. For the same number of weights it
        # learns better than a fixed curve between two products (arXiv 2002.05202).
        self.gate, self.up = nn.Linear(c.H, c.F, bias=False), nn.Linear(c.H, c.F, bias=False)
        self.down = nn.Linear(c.F, c.H, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.D)) for part in (self.q, self.k, self.v))  # -> [B, S, N or K, D]
        h = self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.out(h.flatten(2))  # [B, S, N, D] -> [B, S, H]
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Tokens [B, S] -> logits [B, S, V]: what stands at position s speaks of the token after s."""

    def __init__(self, c: Sizes, attention=fused_attention, recompute: bool = False):
        super().__init__()
        torch.manual_seed(0)  # the same first weights for everyone
        self.sizes, self.recompute = c, recompute
        self.embed, self.norm = nn.Embedding(c.V, c.H), nn.RMSNorm(c.H, 1e-5)
        self.blocks, self.head = nn.ModuleList(Block(c, attention) for _ in range(c.L)), nn.Linear(c.H, c.V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, (S, D) = self.embed(tokens), (tokens.shape[1], self.sizes.D)  # [B, S] -> [B, S, H]
        # Angles of RoPE, position / 10000^(2i/D) for pair i: [S, 1, D/2]. In fp32: in bf16 position 257 would be 256.
        speed = 1.0 / 10000.0 ** (torch.arange(0, D, 2, device=x.device, dtype=torch.float32) / D)
        angle = torch.arange(S, device=x.device, dtype=torch.float32)[:, None, None] * speed
        cos, sin = angle.cos(), angle.sin()
        if self.recompute and torch.is_grad_enabled():
            x.requires_grad_()  # a frozen embedding's, too: weights are no inputs of Recompute, so x has to call it
        for block in self.blocks:
            x = Recompute.apply(x, cos, sin, block) if self.recompute else block(x, cos, sin)
        return self.head(self.norm(x))


class Recompute(torch.autograd.Function):
    """Forget what a block computes on its way; compute it again when backward asks for it. Under autocast backward has
    to be called inside, too: the second forward has the precision that is switched on then."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, block: nn.Module) -> Tensor:
        ctx.save_for_backward(x, cos, sin)
        ctx.block = block
        return block(x, cos, sin)  # nothing is recorded in here

    @staticmethod
    def backward(ctx, g: Tensor):
        # --- exercise 1.2: the block once more, recorded; gradients for its weights and its input ---
        x, cos, sin = ctx.saved_tensors
        x = x.detach().requires_grad_()  # a leaf: the backward below ends here, and not in the blocks before
        with torch.enable_grad():
            y = ctx.block(x, cos, sin)
        y.backward(g)  # adds to .grad of the block's weights, as every backward does
        return x.grad, None, None, None
        # --- end exercise ---


def loss_sum(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum over the valid tokens of -log p(label), in fp32 or better. Whoever knows the whole batch divides it."""
    logits = model(tokens).flatten(0, 1)  # [B, S, V] -> [T, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def accumulate(model: nn.Module, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add the gradient of the batch's loss to every .grad, one (tokens, labels) at a time. Returns the loss."""
    # --- exercise 1.3: the gradient of the whole batch, with the activations of one micro-batch at a time ---
    valid = sum((labels != IGNORE).sum() for _, labels in batch).clamp(min=1)  # no valid token: 0, and not 0 / 0
    total = 0.0
    for tokens, labels in batch:
        loss = loss_sum(model, tokens, labels) / valid
        loss.backward()  # what was divided is what is differentiated
        total = total + loss.detach()  # a total that autograd knows of would keep every micro-batch's graph
    return total
    # --- end exercise ---


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    # Weight decay is for matrices: the scale of a norm is not to be pulled to 0.
    groups = [{"params": [w], "weight_decay": 0.1 if w.dim() > 1 else 0.0} for w in model.parameters()]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def train_step(model: nn.Module, optimizer, batch: list, limit: float = 1.0) -> Tensor:
    """One update. Returns the loss before it. AdamW makes its moments at its first: later steps peak 2 W higher."""
    # --- exercise 1.4: the four lines, in their order ---
    optimizer.zero_grad(set_to_none=True)  # let go, not filled with zeros: forward has W more for its own
    loss = accumulate(model, batch)
    nn.utils.clip_grad_norm_(model.parameters(), limit)  # one factor for all, after the last micro-batch
    optimizer.step()
    return loss
    # --- end exercise ---


# ----------------------------------------------------------------------------------------- what it takes, and the proof
def kept_bytes(c: Sizes, B: int, S: int, recompute: bool = False, fused: bool = True) -> int:
    """What autograd keeps from forward to backward of a micro-batch in fp32: 4 bytes a number."""
    T = B * S
    # --- exercise 1.5: every tensor that backward will ask for, each once ---
    norm = 3 * c.H + 1  # its input x, x / rms, 1 / rms, and its output, which the matrices after it read
    core = c.H + 2 * c.K * c.D + c.N if fused else 3 * c.H + c.N * S  # q, k, v, log-sum-exp; or copies of k, v; softmax
    block = c.H if recompute else 2 * norm + core + c.H + 4 * c.F  # `out` reads H; gate, silu(gate), up, their product
    numbers = T * (c.L * block + norm + c.V) + S * c.D  # the last norm, log-probabilities; cos and sin for all blocks
    return 4 * numbers + (0 if fused or recompute else c.L * S * S)  # the mask: single bytes
    # --- end exercise ---


def peak_bytes(c: Sizes, B: int, S: int, M: int, recompute: bool = False) -> tuple[int, str]:
    """Of a step in fp32, and where. From the second step on (the moments are there), M >= 2, F >= 2 H."""
    T, kept = B * S, kept_bytes(c, B, S, recompute)
    # Gradients of log-probabilities and of logits; or, when there are few tokens, of the head and of its input.
    loss = kept + 4 * max(2 * T * c.V, T * c.H + c.V * c.H)
    # The last block: what lay behind it is gone; gradients of silu(gate) and up, or of `down` and of what it read.
    block = kept - 4 * T * (3 * c.H + 1 + c.V) + 4 * (T * c.H + T * c.F + max(T * c.F, c.H * c.F))
    block += recompute * ((kept_bytes(c, B, S) - kept) // c.L + 4 * T * c.H)  # what was forgotten; the block's output
    update = 4 * 2 * c.H * max(c.V, c.F)  # AdamW: the root of the largest weight's moment, and that divided
    held = 4 * 4 * weights(c) + 2 * 8 * M * T  # weights, gradients, two moments; tokens and labels
    return max((held + loss, "loss"), (held + block, "last block"), (held + update, "update"))


def weights(c: Sizes) -> int:
    return 2 * c.V * c.H + c.L * (2 * c.H * c.H + 2 * c.H * c.K * c.D + 3 * c.H * c.F + 2 * c.H) + c.H


def flops(c: Sizes, B: int, S: int, recompute: bool = False) -> int:
    """Of a micro-batch, in matrix products. MFU counts them without recomputation; S · S counts whole, mask or not."""
    blocks = 2 * B * S * (weights(c) - 2 * c.V * c.H - c.H - 2 * c.H * c.L) + 4 * B * S * S * c.H * c.L
    return (3 + recompute) * blocks + 3 * 2 * B * S * c.H * c.V


class Meter(TorchDispatchMode):
    """`course`: bytes of all tensors, those of one number left out, after every change. Each result of an operation
    comes by here, and a finalizer sees it go. Tensors that share a storage count once."""

    def __init__(self, there: list):
        super().__init__()
        self.seen, self.course = set(), [0]
        self.look(there)

    def look(self, results) -> None:
        for storage in (t.untyped_storage() for t in tree_leaves(results) if isinstance(t, Tensor) and t.dim()):
            if storage._cdata not in self.seen:
                self.change(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self.change, storage._cdata, -storage.nbytes()).atexit = False

    def change(self, key: int, size: int) -> None:
        self.seen ^= {key}  # in when it comes, out when it goes
        self.course.append(self.course[-1] + size)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.look(results := operation(*args, **(kwargs or {})))
        return results


def draw_batch(M: int, B: int, S: int, seed: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """M micro-batches from the source of Python's tokenizer. Labels are shifted here, while the sequence is whole."""
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - S, (M, B, 1), generator=torch.Generator().manual_seed(seed))
    windows = [data[start + torch.arange(S + 1)].to(device) for start in starts]
    return [(w[:, :-1].clone(), w[:, 1:].clone()) for w in windows]  # label s is token s + 1


def six_steps(c: Sizes, plain: bool, device: str = "cpu") -> list[Tensor]:
    """Losses, gradients and weights of three steps of plain SGD, then three of AdamW that clip, in float64: plainly
    (the whole batch at once) or with everything above. The micro-batches have 26, 9 and 1 valid tokens."""
    model = Llama(c, plain_attention if plain else fused_attention, recompute=not plain).to(device, torch.float64)
    batch, ws, seen = draw_batch(3, 2, 13, seed=0, device=device), list(model.parameters()), []
    for (_, labels), valid in zip(batch, (26, 9, 1), strict=True):
        labels.view(-1)[valid:] = IGNORE
    tokens, labels = (torch.cat(x) for x in zip(*batch, strict=True))
    for optimizer, limit in [(torch.optim.SGD(ws, lr=0.1), math.inf)] * 3 + [(adamw(model, 0.01), 0.1)] * 3:
        if plain:
            model.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)  # a mean
            loss.backward()
            nn.utils.clip_grad_norm_(ws, limit)
            optimizer.step()
        else:
            loss = train_step(model, optimizer, batch, limit)
        seen += [loss.detach(), *(w.grad.clone() for w in ws), *(w.detach().clone() for w in ws)]
    return seen


def measure(c: Sizes, B: int, S: int, M: int, recompute: bool) -> tuple[int, list[int]]:
    """Bytes kept from forward to backward, and the course of the bytes in a step that is not the first. On the CPU."""
    model, batch = Llama(c, recompute=recompute), draw_batch(M, B, S, seed=0)
    optimizer = adamw(model, 1e-3)
    train_step(model, optimizer, batch)
    with Meter([batch, list(optimizer.state.values()), [(w, w.grad) for w in model.parameters()]]) as meter:
        before, loss = meter.course[-1], loss_sum(model, *batch[0])
        kept = meter.course[-1] - before
        del loss, meter.course[:-1]  # the course begins again, at what is held now
        train_step(model, optimizer, batch)
    return kept, meter.course[:]


def main() -> int:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str):  # one line, before anything runs
            sys.exit(print(f"single_gpu.py: {message}", file=sys.stderr) or 2)

    parser, c, wrong = Parser(description="Check every number of a training step, then train."), Sizes(), []
    most = {"steps": 100_000, "micro_batches": 1000, "micro_batch": 64, "seq": 4096}
    for name, default in zip(most, (60, 2, 4, 64), strict=True):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--recompute", action="store_true", help="train with recomputation, too")
    o, device = parser.parse_args(), "cuda" if torch.cuda.is_available() else "cpu"
    for name, limit in most.items():
        if not 1 <= getattr(o, name) <= limit:
            parser.error(f"--{name.replace('_', '-')} {getattr(o, name)} must be 1 to {limit}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        parser.error(f"WORLD_SIZE {os.environ['WORLD_SIZE']}: this chapter is one process; see 02_data_parallel")

    def row(what: str, formula: str, measured: str, right: bool | None = None) -> None:
        print(f"{what:46} {formula:>14} {measured:>14}")
        if not (formula == measured if right is None else right):
            wrong.append(f"{what}: {measured}, not {formula}")

    row("", "formula", "measured", True)
    pairs = zip(six_steps(c, False, device), six_steps(c, True, device), strict=True)
    error = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()
    row("largest relative error in six steps", "at most 1e-10", f"{error:.1e}", error <= 1e-10)  # false for NaN
    for again, recompute in (("", False), ("recomputed: ", True)):
        kept, course = measure(c, 3, 32, 2, recompute)
        peak, where = peak_bytes(c, 3, 32, 2, recompute)
        row(f"{again}bytes kept for backward", f"{kept_bytes(c, 3, 32, recompute):,}", f"{kept:,}")
        row(f"{again}bytes at the peak ({where})", f"{peak:,}", f"{max(course):,}")
        with FlopCounterMode(display=False) as counter:  # on a CPU it cannot look into the fused kernel
            accumulate(Llama(c, plain_attention, recompute), draw_batch(1, 3, 32, seed=0))
        row(f"{again}FLOPs", f"{flops(c, 3, 32, recompute):,}", f"{counter.get_total_flops():,}")

    model, losses, begin = Llama(c, recompute=o.recompute).to(device), [], time.perf_counter()
    optimizer, goal = adamw(model, lr=0.01), 0.6 * math.log(c.V) if o.steps >= 60 else math.inf
    for step in tqdm(range(o.steps), desc="train", leave=False):
        batch = draw_batch(o.micro_batches, o.micro_batch, o.seq, step, device)
        losses.append(train_step(model, optimizer, batch).item())  # .item() waits for the device
    speed, last = o.steps / (time.perf_counter() - begin), sum(losses[-10:]) / len(losses[-10:])
    row("loss, mean of the last ten steps", f"under {goal:.3f}", f"{last:.3f}", last < goal)  # false for NaN
    row("tokens a second", "", f"{speed * o.micro_batches * o.micro_batch * o.seq:,.0f}", True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    used = speed * o.micro_batches * flops(c, o.micro_batch, o.seq)
    row(f"MFU of {name}", "", f"{used / PEAK[name]:.2%}" if name in PEAK else "n/a", True)
    print("; ".join(wrong) or "PASS")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main())
