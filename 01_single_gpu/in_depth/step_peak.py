"""Chapter 1, the peak: the most bytes that are alive at any moment of a training step, predicted to the byte.

The problem. A step runs out of memory at its peak, and the bytes saved for backward do not predict it. With
full recomputation a small model needs about three times the bytes of the activation formula. The block that
is being recomputed, the gradient of the logits, autocast's copies and existing gradients are added to them.
The script predicts the peak and its place, for each kind of recomputation and three precisions:

    fp32             weights, gradients, moments and activations of 4 bytes
    bf16 autocast    weights, gradients and moments stay fp32; each matrix product casts its input, and once
                     per forward its weight. The casts are also saved, 2 bytes more per weight of a matrix
    bf16 weights     everything of 2 bytes, moments included; statistics of norms and the loss stay fp32

The idea. Memory rises through forward and falls through backward, with a spike for each operation. Only a few
spikes can be the highest, and each has a formula:

    bytes                   loss: + gradients of log-probabilities and of logits, 8 T V
                           /    head: + gradients of the head's weight and input
     saved for backward  _/|   /   last block: - loss and last norm, + gradient of its output, + 2 of [T, F]
                       _/  |__/|      /
                     _/        |_/\\_/     recomputed: the same spike for every block, on top of the inputs of all
     stored all the time: weights, gradients, two moments, tokens and labels

It is exact for the fused attention of the CPU and the fused AdamW, from the second micro-batch of the second step on
(before that, gradients or moments do not exist yet), for T >= H tokens, and for F >= 2 H and V >= 2 H, as is usual.
Scalars (a loss, a count) are left out, as are adapters and, under autocast, norms of heads.

    python step_peak.py              nine predictions, nine measurements; the last line is PASS
    python step_peak.py --tables     the table of README.md

Symbols: see llama.py; T = B S. GB = 10^9 bytes.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from accounting import AROUND_THE_BLOCKS, GB, activations, markdown, parameters
from llama import LLAMA3_8B, MODES, Llama, LlamaConfig, OneLineParser, Report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRECISIONS = ("fp32", "bf16 autocast", "bf16 weights")
AROUND = AROUND_THE_BLOCKS

# --------------------------------------------------------------------------------------- saved for backward


def block_matrices(config: LlamaConfig) -> int:
    """Weights of one block's matrices, that is all but the scales of its norms."""
    c = config
    return 2 * c.hidden * (c.attention_width + c.kv_heads * c.head_dim) + 3 * c.hidden * c.intermediate


def whole_block(config: LlamaConfig, batch: int, seq: int, precision: str) -> int:
    """Bytes that one block saves for backward without recomputation, its input included.

    Under autocast the residual stream and the norms stay fp32. Five matrices read a norm's output, and each
    casts it again (autocast caches casts of weights only). All these casts are saved.
    """
    c = config
    T = batch * seq
    if precision != "bf16 autocast":
        kept = activations(c, batch, seq, 4 if precision == "fp32" else 2)
        return sum(size for name, size in kept.items() if name not in AROUND) // c.layers
    # --- exercise 1.32: one block under autocast ---
    norms = 2 * T * (4 * c.hidden + 4 * c.hidden + 4)  # the input, the normalised input, 1 / rms: fp32
    casts = (3 + 2) * T * 2 * c.hidden  # for q, k, v; for gate, up
    qkv = c.attention_width + 2 * c.kv_heads * c.head_dim
    attention = T * (2 * qkv + 4 * c.heads)  # q, k, v; the log-sum-exp is fp32
    out = T * 2 * c.attention_width
    mlp = 4 * T * 2 * c.intermediate
    return norms + casts + attention + out + mlp + 2 * block_matrices(c)  # and the cast weights
    # --- end exercise ---


def kept_for_backward(config: LlamaConfig, batch: int, seq: int, precision: str, recompute: str) -> dict[str, int]:
    """Bytes that autograd saves from forward to backward, but for tokens and labels (see `held`)."""
    c = config
    T = batch * seq
    if precision != "bf16 autocast":
        kept = activations(c, batch, seq, 4 if precision == "fp32" else 2, "fused", recompute)
        blocks = sum(size for name, size in kept.items() if name not in AROUND)
        norm, loss, _, tables = (kept[name] for name in AROUND)
        return {"blocks": blocks, "last norm": norm, "head's weight": 0, "loss": loss - 4, "tables": tables}
    block = {
        "none": whole_block(c, batch, seq, precision),
        "selective": whole_block(c, batch, seq, precision) - 4 * T * c.heads,  # without the log-sum-exp
        "full": 4 * T * c.hidden,
    }[recompute]
    return {
        "blocks": c.layers * block,
        "last norm": T * (4 * c.hidden + 4 * c.hidden + 4 + 2 * c.hidden),  # its output is cast for the head
        "head's weight": 2 * c.vocab_size * c.hidden,
        "loss": 4 * T * c.vocab_size,
        "tables": 4 * seq * c.head_dim,
    }


def held(config: LlamaConfig, batch: int, seq: int, micro_batches: int, precision: str) -> int:
    """Bytes between two steps: weights, gradients, two moments; tokens and labels of all micro-batches."""
    element = 2 if precision == "bf16 weights" else 4
    return 4 * element * parameters(config) + 2 * 8 * micro_batches * batch * seq


# ----------------------------------------------------------------------------------------------- the moments


def step_moments(
    config: LlamaConfig, batch: int, seq: int, micro_batches: int, precision: str, recompute: str
) -> dict[str, int]:
    """Bytes alive at each moment that can be the peak of a step."""
    c = config
    T = batch * seq
    kept = kept_for_backward(c, batch, seq, precision, recompute)
    all_kept = sum(kept.values())
    e = 4 if precision == "fp32" else 2  # bytes of what matrices multiply
    stream = 4 if precision == "bf16 autocast" else e  # of the residual stream and its gradient
    base = held(c, batch, seq, micro_batches, precision)
    # --- exercise 1.33: the spikes ---
    loss = all_kept + 2 * 4 * T * c.vocab_size  # gradients of log-probabilities and of logits, fp32
    # Without the log-probabilities, but with the gradients of the logits and of the head's weight and input.
    head = all_kept - kept["loss"] + e * (T * c.vocab_size + c.vocab_size * c.hidden + T * c.hidden)
    # The last block: tensors of later layers are freed, and the gradient of its output is added.
    block = kept["blocks"] + kept["tables"] + stream * T * c.hidden
    if c.tied:  # the head's part of the shared gradient waits for the embedding's part
        block += stream * c.vocab_size * c.hidden
    if recompute == "full":  # recomputed tensors, without the input (bf16 weights: an fp32 copy in a norm)
        block += whole_block(c, batch, seq, precision) - (0 if precision == "bf16 weights" else stream * T * c.hidden)
    wide = T * c.intermediate
    weight = c.hidden * c.intermediate
    spike = max(2 * e * wide, e * (wide + weight))  # gradients of silu, up; or of `down`'s input and weight
    if precision == "bf16 autocast":
        # `down`: + the gradient in bf16; its weight's in fp32; silu's and up's. Used casts are freed.
        spike = max(2 * T * c.hidden + 2 * (wide + weight), 4 * weight, 4 * wide - 2 * weight)
    forward = all_kept + 4 * T * c.vocab_size  # logits and log-probabilities
    if precision == "bf16 autocast" and recompute == "full":
        forward += 2 * c.layers * block_matrices(c)  # autocast frees its casts at its end, after the loss
    moments = {"end of forward": forward, "loss": loss, "head": head, "last block": block + spike}
    return {name: base + size for name, size in moments.items()}
    # --- end exercise ---


def peak(
    config: LlamaConfig, batch: int, seq: int, micro_batches: int = 2, precision: str = "fp32", recompute: str = "none"
) -> tuple[str, int]:
    """(where, bytes) of the peak of a step. The module's docstring says in which cases it is exact."""
    for name, value, known in (("precision", precision, PRECISIONS), ("recompute", recompute, MODES)):
        if value not in known:
            raise ValueError(f"{name} {value!r} must be one of {', '.join(known)}")
    return max(
        step_moments(config, batch, seq, micro_batches, precision, recompute).items(), key=lambda moment: moment[1]
    )


# ------------------------------------------------------------------------------------------------- measured


class Peak(TorchDispatchMode):
    """Bytes of all live tensors but scalars, `now` and at most; `there` are the tensors that exist already.

    It sees the result of every operation, and a finalizer on the storage reports when it is freed.
    """

    def __init__(self, there: Any) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()
        self.look(there)

    def look(self, results: Any) -> None:
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.untyped_storage()._cdata not in self.seen:
                storage = tensor.untyped_storage()
                self.change(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self.change, storage._cdata, -storage.nbytes()).atexit = False

    def change(self, key: int, size: int) -> None:
        self.seen ^= {key}  # added when it is allocated, removed when it is freed
        self.now += size
        self.most = max(self.most, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.look(results)
        return results


def step(model: Llama, optimizer: torch.optim.Optimizer, batch: list, precision: str) -> None:
    """A training step as in training_step.py, without clipping, which allocates almost nothing."""
    optimizer.zero_grad(set_to_none=True)
    for tokens, labels in batch:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast"):
            loss = model.parts.cross_entropy(model(tokens), labels) / labels.numel()
        loss.backward()
        del loss
    optimizer.step()


def build(config: LlamaConfig, batch: int, seq: int, micro_batches: int, precision: str, recompute: str) -> tuple:
    """(model, optimizer, batch) after a first step, so that the moments exist."""
    model = Llama(config, recompute=recompute)
    model = model.bfloat16() if precision == "bf16 weights" else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(
        config.vocab_size, (2, micro_batches, batch, seq), generator=torch.Generator().manual_seed(0)
    )
    data = [(x.clone(), y.clone()) for x, y in zip(*tokens, strict=True)]
    step(model, optimizer, data, precision)
    return model, optimizer, data


def measure(config: LlamaConfig, batch: int, seq: int, micro_batches: int, precision: str, recompute: str) -> int:
    model, optimizer, data = build(config, batch, seq, micro_batches, precision, recompute)
    there = [data, [list(state.values()) for state in optimizer.state.values()]]
    with Peak([there, [(p, p.grad) for p in model.parameters()]]) as meter:
        del there
        step(model, optimizer, data, precision)
    return meter.most


# ----------------------------------------------------------------------------------------------------- demo


def table() -> str:
    """The nine peaks of Llama-3 8B, one sequence of 8192 tokens in each of two micro-batches."""
    rows = []
    for precision in PRECISIONS:
        cells = [peak(LLAMA3_8B, 1, 8192, 2, precision, mode) for mode in MODES]
        base = held(LLAMA3_8B, 1, 8192, 2, precision)
        rows.append([precision, f"{base / GB:,.1f}", *(f"{size / GB:,.1f} ({where})" for where, size in cells)])
    return markdown("peaks", ["GB, 8192 tokens", "between steps", *MODES], rows)


def main() -> int:
    parser = OneLineParser(description="Predict the peak of a training step in nine modes, and measure it.")
    parser.add_argument("--tables", action="store_true", help="print the table of README.md and end")
    if parser.parse_args().tables:
        print(table())
        return 0
    report = Report()
    config = LlamaConfig(hidden=64, layers=2, intermediate=172)
    for precision in PRECISIONS:
        for mode in MODES:
            where, predicted = peak(config, 3, 32, 2, precision, mode)
            measured = measure(config, 3, 32, 2, precision, mode)
            what = f"peak in bytes: {precision}, {mode} ({where})"
            report.add(what, f"{predicted:,}", f"{measured:,}", predicted == measured)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
