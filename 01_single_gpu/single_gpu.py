"""One GPU: a Llama, a training step, and every byte and FLOP that the step takes.

Training runs out of memory at the peak of a step. At that moment the GPU holds what it always
stores, what autograd has saved for the backward pass, and what the running operation needs:

    bytes                 one step with two micro-batches (the README shows it measured)
     peak ->       _                    _
                 /  |_                /  |_       temporary: gradients of the logits, of a block
               /      |_            /      |_     saved for the backward pass
             /     -----|---------/----------|----------  gradients: Ψ elements
     ####################################################  parameters and AdamW's moments: 3 Ψ
       forward   backward   forward   backward   clip, update

Two techniques make a step fit. Neither changes its result:

    gradient accumulation      run M micro-batches one after another and add up their gradients:
                               the activations of only one micro-batch are alive at a time
    activation recomputation   save only the input of a block and run the block again in the
                               backward pass (arXiv 1604.06174): H elements per token instead of
                               8 H + 2 N_kv D + N + 4 F + 2, but nearly 4 forwards instead of 3

Ψ is the number of parameters, H the hidden size, N and N_kv the number of query and of key/value
heads, D the size of a head, F the inner size of the feed-forward layer. The functions num_params,
saved_activation_bytes, peak_bytes and flops hold the formulas, term by term.

    python single_gpu.py                                   check everything, then train
    python single_gpu.py --recompute --micro-batches 4     train with recomputation

The last line is PASS if losses, gradients and parameters match a reference to 1e-10, bytes and
FLOPs match the formulas, and the loss falls from log V to below 0.6 log V (in a run of fewer than
60 steps it only has to be finite). Otherwise the exit code is 1.
"""

import argparse
import math
import os
import sys
import time
import tokenize
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

IGNORE_INDEX = -100  # the label of a token without a target: padding, or a prompt


# -------------------------------------------------------------------------------------------------
# The model: a small Llama
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 256  # V; here a token is a byte
    hidden: int = 64  # H
    n_layers: int = 2  # L
    n_heads: int = 4  # N, of queries
    n_kv_heads: int = 2  # N_kv, of keys and values
    ffn_hidden: int = 172  # F

    @property
    def head_dim(self) -> int:  # D
        return self.hidden // self.n_heads


def rotary_tables(seq_len: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position / 10000^(2i/D) for pair i; in fp32, as in bf16 257 would be 256."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    inv_freq = 1.0 / 10000.0**exponent
    position = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = position[:, None, None] * inv_freq  # [S, 1, D/2]
    return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (RoPE): rotate pair i of every head by its angle. [B, S, N, D]

    Attention by itself does not see the order of tokens. After the rotation the dot product of a
    query and a key depends on the distance between their positions.
    """
    # --- exercise 1.1: rotate the pairs (x[i], x[i + D/2]) of every head ---
    x1, x2 = x.chunk(2, dim=-1)  # [B, S, N, D] -> two of [B, S, N, D/2]
    rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return rotated.to(x.dtype)  # in bf16 the only rounding: cos and sin are fp32
    # --- end exercise ---


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v by the formula, with S x S scores per head. [B, S, N, D]"""
    queries_per_kv = q.shape[2] // k.shape[2]
    q = q.transpose(1, 2)  # [B, S, N, D] -> [B, N, S, D]
    k = k.repeat_interleave(queries_per_kv, dim=2).transpose(1, 2)  # -> [B, N, S, D], as q
    v = v.repeat_interleave(queries_per_kv, dim=2).transpose(1, 2)
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # [B, N, S, D] @ [B, N, D, S] -> [B, N, S, S]
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)  # hidden from each query
    probs = scores.masked_fill(future, -math.inf).softmax(-1)
    return (probs @ v).transpose(1, 2)  # [B, N, S, D] -> [B, S, N, D]


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in one kernel: no scores are stored, only the log-sum-exp of each row of them."""
    q = q.transpose(1, 2)  # [B, S, N, D] -> [B, N, S, D]
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attn.transpose(1, 2)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). [B, S, H] -> [B, S, H]

    Grouped-query attention: N / N_kv query heads share one head of keys and values, so that
    generating text has to cache N / N_kv times fewer keys and values.
    SwiGLU: silu(gate) scales every element of up. With as many parameters it learns better than a
    fixed activation function between two matrices (arXiv 2002.05202).
    """

    def __init__(self, config: ModelConfig, attention: Callable):
        super().__init__()
        self.attention = attention
        self.head_dim = config.head_dim
        hidden = config.hidden
        kv_hidden = config.n_kv_heads * config.head_dim
        self.attn_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv_hidden, bias=False)
        self.v_proj = nn.Linear(hidden, kv_hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_proj = nn.Linear(hidden, config.ffn_hidden, bias=False)
        self.up_proj = nn.Linear(hidden, config.ffn_hidden, bias=False)
        self.down_proj = nn.Linear(config.ffn_hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attn_norm(x)
        q = self.q_proj(h).unflatten(-1, (-1, self.head_dim))  # [B, S, H] -> [B, S, N, D]
        k = self.k_proj(h).unflatten(-1, (-1, self.head_dim))  # [B, S, H] -> [B, S, N_kv, D]
        v = self.v_proj(h).unflatten(-1, (-1, self.head_dim))
        attn = self.attention(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        x = x + self.o_proj(attn.flatten(2))  # [B, S, N, D] -> [B, S, H]
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    """Tokens [B, S] -> logits [B, S, V]. The logits at position s predict the token at s + 1."""

    def __init__(self, config: ModelConfig, attention=fused_attention, recompute: bool = False):
        super().__init__()
        torch.manual_seed(0)  # every variant starts from the same parameters
        self.config = config
        self.recompute = recompute
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # [B, S] -> [B, S, H]
        cos, sin = rotary_tables(tokens.shape[1], self.config.head_dim, x.device)
        if self.recompute and torch.is_grad_enabled():
            # For a frozen embedding: autograd runs the backward of CheckpointedBlock only if one of
            # its input tensors requires a gradient, and the output of the embedding would not.
            x.requires_grad_()
        for block in self.blocks:
            inputs = (x, cos, sin)
            x = CheckpointedBlock.apply(block, *inputs) if self.recompute else block(*inputs)
        return self.head(self.norm(x))  # [B, S, H] -> [B, S, V]


# -------------------------------------------------------------------------------------------------
# The training step, with recomputation and accumulation
# -------------------------------------------------------------------------------------------------


class CheckpointedBlock(torch.autograd.Function):
    """A block that saves only its input. `torch.utils.checkpoint` does the same for any function.

    forward:  run the block without autograd, so that nothing inside it is saved
    backward: run it again with autograd on, and backpropagate through this second run

    Under autocast the second run uses the precision that is active in the backward pass;
    `torch.utils.checkpoint` restores that of the forward pass.
    """

    @staticmethod
    def forward(ctx, block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(x, cos, sin)
        ctx.block = block
        return block(x, cos, sin)  # autograd is off inside a Function

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output: Tensor):
        # --- exercise 1.2: run the block again, backpropagate, return the gradient of its input ---
        x, cos, sin = ctx.saved_tensors
        x = x.detach().requires_grad_()  # a leaf: the inner backward must stop at this block
        with torch.enable_grad():
            output = ctx.block(x, cos, sin)
        output.backward(grad_output)  # also adds to .grad of the block's parameters
        return None, x.grad, None, None
        # --- end exercise ---


def loss_sum(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label) over the valid tokens, in fp32 or better. `accumulate` divides it."""
    logits = model(tokens).flatten(0, 1)  # [B, S, V] -> [T, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def accumulate(model: nn.Module, micro_batches: list) -> Tensor:
    """Add the gradient of the full batch to .grad, one micro-batch at a time. Returns the loss.

    The loss is a sum over tokens, divided by the number of valid tokens in the full batch. So the
    gradients of micro-batches simply add up, even if their numbers of valid tokens differ.
    """
    # --- exercise 1.3: the gradient of the full batch with one micro-batch's activations alive ---
    num_valid = sum((labels != IGNORE_INDEX).sum() for _, labels in micro_batches)
    num_valid = num_valid.clamp(min=1)  # without valid tokens the loss is 0, not 0 / 0
    total_loss = 0.0
    for tokens, labels in micro_batches:
        loss = loss_sum(model, tokens, labels) / num_valid
        loss.backward()  # backward needs the division too, not only the loss that is logged
        total_loss = total_loss + loss.detach()  # or the total keeps every graph alive
    return total_loss
    # --- end exercise ---


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only: it would pull the scale of a norm towards 0."""
    groups = []
    for p in model.parameters():  # one group each, so the update has temporaries of one at a time
        groups.append({"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0})
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def train_step(model: nn.Module, optimizer, micro_batches: list, max_norm=1.0) -> Tensor:
    """One update. Returns the loss before it.

    AdamW creates its moments at the end of the first step; every later step stores 2 Ψ more.
    """
    # --- exercise 1.4: the four lines of a step, in their order ---
    optimizer.zero_grad(set_to_none=True)  # frees the gradients; zeros would take Ψ elements
    loss = accumulate(model, micro_batches)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # by one norm over all parameters
    optimizer.step()
    return loss
    # --- end exercise ---


# -------------------------------------------------------------------------------------------------
# What a step takes: parameters, bytes and FLOPs by formula
# -------------------------------------------------------------------------------------------------


def block_matmul_params(config: ModelConfig) -> int:
    """Parameters of a block's matrices, which is all of them but the scales of its two norms."""
    kv_hidden = config.n_kv_heads * config.head_dim
    attn = 2 * config.hidden * config.hidden + 2 * config.hidden * kv_hidden  # q, o; k, v
    mlp = 3 * config.hidden * config.ffn_hidden  # gate, up, down
    return attn + mlp


def num_params(config: ModelConfig) -> int:
    block = block_matmul_params(config) + 2 * config.hidden  # two norms
    embed_and_head = 2 * config.vocab_size * config.hidden
    return embed_and_head + config.n_layers * block + config.hidden  # the last norm


def saved_activation_bytes(config, batch, seq_len, recompute=False, fused=True) -> int:
    """Bytes that autograd saves for the backward pass of one micro-batch, in fp32."""
    hidden = config.hidden
    # --- exercise 1.5: count each tensor that the backward pass needs once; elements per token ---
    norm = 3 * hidden + 1  # input x, x / rms, 1 / rms, and the output, which the next matmuls read
    attn = hidden + 2 * config.n_kv_heads * config.head_dim + config.n_heads  # q, k, v, log-sum-exp
    if not fused:
        attn = 3 * hidden + config.n_heads * seq_len  # q, expanded k and v, probabilities
    o_proj = hidden  # its input
    mlp = 4 * config.ffn_hidden  # gate, silu(gate), up, and their product, the input of down_proj
    block = norm + attn + o_proj + norm + mlp
    if recompute:
        block = hidden  # its input
    log_probs = config.vocab_size
    per_token = config.n_layers * block + norm + log_probs  # the last norm, and the loss
    rotary = seq_len * config.head_dim  # cos and sin, shared by all blocks
    saved = 4 * (batch * seq_len * per_token + rotary)
    if not fused and not recompute:
        saved += config.n_layers * seq_len * seq_len  # each block's mask: one byte per element
    return saved
    # --- end exercise ---


def peak_bytes(config, batch, seq_len, num_micro_batches, recompute=False) -> tuple[int, str]:
    """The most bytes alive in a step in fp32, and where: from the second step on, M >= 2, F >= 2 H.

    The first step is without moments, the first micro-batch without gradients.
    """
    tokens = batch * seq_len
    hidden = config.hidden
    ffn_hidden = config.ffn_hidden
    vocab_size = config.vocab_size
    saved = saved_activation_bytes(config, batch, seq_len, recompute)

    # The start of the backward pass: everything saved, and the gradients of log-probabilities and
    # logits. With few tokens, the gradients of the head's weight and input are larger.
    logits_grads = 2 * tokens * vocab_size
    head_grads = vocab_size * hidden + tokens * hidden
    loss = saved + 4 * max(logits_grads, head_grads)

    # The backward pass of the last block. What the loss and the last norm saved has been freed.
    loss_saved = 4 * tokens * (3 * hidden + 1 + vocab_size)
    output_grad = tokens * hidden
    gate_up_grads = 2 * tokens * ffn_hidden  # of silu(gate) and of up
    down_grads = tokens * ffn_hidden + hidden * ffn_hidden  # of down_proj's input and weight
    block = saved - loss_saved + 4 * (output_grad + max(gate_up_grads, down_grads))
    if recompute:  # also what the second run of the block saves, and its output
        not_saved = saved_activation_bytes(config, batch, seq_len) - saved
        recomputed_block = not_saved // config.n_layers
        block += recomputed_block + 4 * tokens * hidden

    # The update: AdamW takes the square root of a moment and divides it, for one parameter at a
    # time. The largest one is the embedding or a matrix of the feed-forward layer.
    update = 4 * 2 * hidden * max(vocab_size, ffn_hidden)

    stored = 4 * 4 * num_params(config)  # parameters, gradients, two moments
    stored += 2 * 8 * num_micro_batches * tokens  # tokens and labels of the batch, int64
    highest = {"loss": loss, "last block": block, "update": update}
    where = max(highest, key=highest.get)
    return stored + highest[where], where


def flops(config: ModelConfig, batch: int, seq_len: int, recompute: bool = False) -> int:
    """FLOPs of a micro-batch in matmuls, 2 per multiply-add; scores count even if they are masked.

    For each matmul of the forward pass the backward pass has two: one per input's gradient.
    """
    tokens = batch * seq_len
    linear = 2 * tokens * block_matmul_params(config)
    attn = 2 * 2 * tokens * seq_len * config.hidden  # q kᵀ and probs v
    head = 2 * tokens * config.vocab_size * config.hidden
    block_passes = 4 if recompute else 3
    return block_passes * config.n_layers * (linear + attn) + 3 * head


# -------------------------------------------------------------------------------------------------
# The check: six steps next to a reference, and every byte and FLOP next to its formula
# -------------------------------------------------------------------------------------------------


def get_batch(num_micro_batches, batch, seq_len, seed: int, device="cpu") -> list:
    """Micro-batches (tokens, labels) of [B, S] from Python's tokenizer; label s is token s + 1."""
    text = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    micro_batches = []
    for _ in range(num_micro_batches):
        start = torch.randint(len(text) - seq_len, (batch, 1), generator=generator)
        window = text[start + torch.arange(seq_len + 1)].long().to(device)  # [B, S + 1]
        micro_batches.append((window[:, :-1].clone(), window[:, 1:].clone()))
    return micro_batches


def reference_step(model: nn.Module, optimizer, micro_batches: list, max_norm: float) -> Tensor:
    """A step without any technique: the full batch at once, and torch's mean over valid tokens."""
    tokens, labels = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
    optimizer.zero_grad()
    logits = model(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.detach()


def six_steps(model: nn.Module, step: Callable, device: str) -> list[Tensor]:
    """Losses, gradients and parameters of three steps of SGD, then of three of AdamW that clip.

    SGD comes first because AdamW hides a gradient that is too large by a constant factor.
    """
    model = model.to(device, torch.float64)
    micro_batches = get_batch(3, 2, 13, seed=0, device=device)
    for (_, labels), num_valid in zip(micro_batches, (26, 9, 1), strict=True):
        labels.view(-1)[num_valid:] = IGNORE_INDEX
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    adam = adamw(model, lr=0.01)
    history = []
    for optimizer, max_norm in ((sgd, math.inf), (adam, 0.1)):
        for _ in range(3):
            history.append(step(model, optimizer, micro_batches, max_norm))
            history += [p.grad.clone() for p in model.parameters()]
            history += [p.detach().clone() for p in model.parameters()]
    return history


def largest_error(config: ModelConfig, device: str = "cpu") -> float:
    """The largest relative error of `train_step`, recomputation on, against `reference_step`."""
    actual = six_steps(Llama(config, fused_attention, recompute=True), train_step, device)
    expected = six_steps(Llama(config, naive_attention), reference_step, device)
    pairs = zip(actual, expected, strict=True)
    errors = [(a - b).abs().max() / b.abs().max() for a, b in pairs]
    return torch.stack(errors).max().item()  # NaN if any error is NaN


class MemoryTracker(TorchDispatchMode):
    """`timeline` is the number of bytes alive after each allocation and release, in order.

    Every result of an operation passes through __torch_dispatch__, and a finalizer reports when its
    storage is freed. Tensors that share a storage count once. Scalars do not count.
    """

    def __init__(self, existing: list):
        super().__init__()
        self.alive = set()
        self.timeline = [0]
        self.track(existing)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        self.track(results)
        return results

    def track(self, results) -> None:
        tensors = [t for t in tree_leaves(results) if isinstance(t, Tensor) and t.dim() > 0]
        for storage in [t.untyped_storage() for t in tensors]:
            key = storage._cdata
            if key not in self.alive:
                self.alive.add(key)
                self.record(storage.nbytes())
                weakref.finalize(storage, self.release, key, storage.nbytes()).atexit = False

    def release(self, key: int, num_bytes: int) -> None:
        self.alive.remove(key)
        self.record(-num_bytes)

    def record(self, num_bytes: int) -> None:
        self.timeline.append(self.timeline[-1] + num_bytes)


def measure_bytes(config, batch, seq_len, num_micro_batches, recompute) -> tuple[int, list[int]]:
    """Bytes saved for a backward pass, and the timeline of a step after the first; on the CPU."""
    model = Llama(config, recompute=recompute)
    optimizer = adamw(model, lr=1e-3)
    micro_batches = get_batch(num_micro_batches, batch, seq_len, seed=0)
    train_step(model, optimizer, micro_batches)
    params_and_grads = [(p, p.grad) for p in model.parameters()]
    existing = [micro_batches, params_and_grads, list(optimizer.state.values())]
    tracker = MemoryTracker(existing)
    del existing, params_and_grads  # or the step could not free the gradients
    with tracker:
        before = tracker.timeline[-1]
        loss = loss_sum(model, *micro_batches[0])
        saved = tracker.timeline[-1] - before
        del loss  # frees what was saved
        tracker.timeline = [tracker.timeline[-1]]
        train_step(model, optimizer, micro_batches)
    return saved, tracker.timeline[:]


# -------------------------------------------------------------------------------------------------
# main: check, then train
# -------------------------------------------------------------------------------------------------


def check(config: ModelConfig, device: str) -> list[tuple]:
    """Rows of (what, formula, measurement, whether they agree)."""
    error = largest_error(config, device)
    passed = error <= 1e-10  # False for NaN
    rows = [("largest relative error in six steps", "at most 1e-10", f"{error:.1e}", passed)]
    for recompute in (False, True):
        saved, timeline = measure_bytes(config, 3, 32, 2, recompute)
        saved_formula = saved_activation_bytes(config, 3, 32, recompute)
        peak_formula, where = peak_bytes(config, 3, 32, 2, recompute)
        with FlopCounterMode(display=False) as counter:  # blind to the fused kernel of a CPU
            accumulate(Llama(config, naive_attention, recompute), get_batch(1, 3, 32, seed=0))
        numbers = {
            "bytes saved for backward": (saved_formula, saved),
            f"bytes at the peak ({where})": (peak_formula, max(timeline)),
            "FLOPs": (flops(config, 3, 32, recompute), counter.get_total_flops()),
        }
        for what, (formula, measured) in numbers.items():
            name = f"recomputed: {what}" if recompute else what
            rows.append((name, f"{formula:,}", f"{measured:,}", formula == measured))
    return rows


def train(config: ModelConfig, args: argparse.Namespace, device: str) -> list[tuple]:
    model = Llama(config, recompute=args.recompute).to(device)
    optimizer = adamw(model, lr=0.01)
    losses = []
    start = time.perf_counter()
    for step in tqdm(range(args.steps), desc="train", leave=False):
        size = (args.micro_batches, args.micro_batch, args.seq_len)
        loss = train_step(model, optimizer, get_batch(*size, seed=step, device=device))
        losses.append(loss.item())  # .item() waits for the device
    seconds = (time.perf_counter() - start) / args.steps

    last = losses[-10:]
    mean = sum(last) / len(last)
    limit = 0.6 * math.log(config.vocab_size) if args.steps >= 60 else math.inf
    passed = mean < limit  # False for NaN
    tokens = args.micro_batches * args.micro_batch * args.seq_len
    step_flops = args.micro_batches * flops(config, args.micro_batch, args.seq_len)
    return [
        ("loss, mean of the last ten steps", f"under {limit:.3f}", f"{mean:.3f}", passed),
        ("tokens per second", "", f"{tokens / seconds:,.0f}", True),
        ("TFLOP/s (MFU: over the device's peak)", "", f"{step_flops / seconds / 1e12:.3f}", True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="One GPU in one file")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batches", type=int, default=2, help="per step")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences in each")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--recompute", action="store_true", help="also train with recomputation")
    args = parser.parse_args()
    limits = {"steps": 100_000, "micro-batches": 1000, "micro-batch": 64, "seq-len": 4096}
    for option, limit in limits.items():
        value = getattr(args, option.replace("-", "_"))
        if not 1 <= value <= limit:
            parser.error(f"--{option} {value} must be 1 to {limit}")
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        parser.error(f"WORLD_SIZE {world_size}: this is one process; see 02_data_parallel")

    config = ModelConfig()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = check(config, device) + train(config, args, device)
    failures = []
    for what, formula, measured, passed in [("", "formula", "measured", True), *rows]:
        print(f"{what:46} {formula:>14} {measured:>14}")
        if not passed:
            failures.append(f"{what}: {measured}, not {formula}")
    print("; ".join(failures) or "PASS")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
