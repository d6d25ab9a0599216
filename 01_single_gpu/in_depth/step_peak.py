"""Chapter 1, the peak: the most bytes that a training step holds at any moment, predicted to the byte.

The problem. A step runs out of memory at one moment, and adding up what is kept for backward does not find it. With
full recomputation a small model needs about three times the bytes that the formula for activations gives: the block
that is being recomputed, the gradient of the logits, copies made by autocast and gradients that exist already all come
on top. The script predicts the peak and where it is, for each kind of recomputation and three precisions:

    fp32             weights, gradients, moments and activations of 4 bytes
    bf16 autocast    weights, gradients and moments stay fp32; each matrix product casts its input, and its weight once
                     a forward. What was cast is kept for backward, too: 2 bytes more for each weight of a matrix
    bf16 weights     everything of 2 bytes, moments included; statistics of norms and the loss stay fp32

The idea. Memory rises through forward and falls through backward, with a spike for each operation. Only a few spikes
can be the highest, and each is a formula:

    bytes                   loss: + gradients of log-probabilities and of logits, 8 T V
                           /    head: + gradients of the head's weight and input
     kept for backward   _/|   /   last block: - loss and last norm, + gradient of its output, + 2 F wide gradients
                       _/  |__/|      /
                     _/        |_/\\_/     recomputed: the same spike for every block, on top of the inputs of all
     held from step to step: weights, gradients, two moments, tokens and labels

It is exact for the fused attention of the CPU and the fused AdamW, from the second micro-batch of the second step on
(before that, gradients or moments do not exist yet), for T >= H tokens, and for F >= 2 H and V >= 2 H, as is usual.
Numbers that stand alone (a loss, a count) are left out.

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

# --------------------------------------------------------------------------------------------- what is kept


def block_matrices(config: LlamaConfig) -> int:
    """Weights of one block that are multiplied: all but the scales of its norms."""
    c = config
    return 2 * c.hidden * (c.attention_width + c.kv_heads * c.head_dim) + 3 * c.hidden * c.intermediate


def whole_block(config: LlamaConfig, batch: int, seq: int, precision: str) -> int:
    """Bytes that one block keeps for backward when nothing in it is recomputed, its own input included.

    Under autocast the residual stream and the norms stay fp32. Each of the five matrices that read a norm's output
    casts it for itself (autocast remembers casts of weights only), and each cast is kept.
    """
    c, T = config, batch * seq
    if precision != "bf16 autocast":
        kept = activations(c, batch, seq, 4 if precision == "fp32" else 2)
        return sum(size for name, size in kept.items() if name not in AROUND) // c.layers
    # --- exercise 1.32: one block under autocast ---
    norms = 2 * T * (4 * c.hidden + 4 * c.hidden + 4)  # the input, the normalised input, 1 / rms: fp32
    casts = (3 + 2) * T * 2 * c.hidden  # for q, k, v; for gate, up
    attention = T * (2 * (c.hidden + 2 * c.kv_heads * c.head_dim) + 4 * c.heads)  # q, k, v; the log-sum-exp is fp32
    out, mlp = T * 2 * c.hidden, 4 * T * 2 * c.intermediate
    return norms + casts + attention + out + mlp + 2 * block_matrices(c)  # and the cast weights
    # --- end exercise ---


def kept_for_backward(config: LlamaConfig, batch: int, seq: int, precision: str, recompute: str) -> dict[str, int]:
    """Bytes that autograd keeps from forward to backward, tokens and labels left out: they are there anyway."""
    c, T = config, batch * seq
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
    """Bytes held at each moment that can be the highest of a step."""
    c, T = config, batch * seq
    kept = kept_for_backward(c, batch, seq, precision, recompute)
    all_kept, e = sum(kept.values()), 4 if precision == "fp32" else 2  # e: bytes of what matrices multiply
    stream = 4 if precision == "bf16 autocast" else e  # of the residual stream and its gradient
    base = held(c, batch, seq, micro_batches, precision)
    # --- exercise 1.33: the spikes ---
    loss = all_kept + 2 * 4 * T * c.vocab_size  # gradients of log-probabilities and of logits, fp32
    # The log-probabilities are gone; the gradient of the logits, and of what the head multiplied.
    head = all_kept - kept["loss"] + e * (T * c.vocab_size + c.vocab_size * c.hidden + T * c.hidden)
    # The last block. What lay behind it is gone; the gradient of its output has come.
    block = kept["blocks"] + kept["tables"] + stream * T * c.hidden
    if c.tied:  # the head's part of the one gradient waits for the embedding's
        block += stream * c.vocab_size * c.hidden
    if recompute == "full":  # and what was forgotten, but for its input (in bf16 weights a norm keeps an fp32 copy)
        block += whole_block(c, batch, seq, precision) - (0 if precision == "bf16 weights" else stream * T * c.hidden)
    wide, weight = T * c.intermediate, c.hidden * c.intermediate
    spike = max(2 * e * wide, e * (wide + weight))  # of silu(gate) and up; or of `down` and of what it read
    if precision == "bf16 autocast":
        # `down`: the gradient cast to bf16 as well, then its weight's gradient cast back; its cast weight is then gone.
        spike = max(2 * T * c.hidden + 2 * (wide + weight), 4 * weight, 4 * wide - 2 * weight)
    forward = all_kept + 4 * T * c.vocab_size  # logits and log-probabilities
    if precision == "bf16 autocast" and recompute == "full":
        forward += 2 * c.layers * block_matrices(c)  # autocast forgets its casts when its context ends: after the loss
    moments = {"end of forward": forward, "loss": loss, "head": head, "last block": block + spike}
    return {name: base + size for name, size in moments.items()}
    # --- end exercise ---


def peak(
    config: LlamaConfig, batch: int, seq: int, micro_batches: int = 2, precision: str = "fp32", recompute: str = "none"
) -> tuple[str, int]:
    """(where, bytes) of the highest moment of a step: see the docstring for what it is exact for."""
    for name, value, known in (("precision", precision, PRECISIONS), ("recompute", recompute, MODES)):
        if value not in known:
            raise ValueError(f"{name} {value!r} must be one of {', '.join(known)}")
    return max(
        step_moments(config, batch, seq, micro_batches, precision, recompute).items(), key=lambda moment: moment[1]
    )


# ------------------------------------------------------------------------------------------------- measured


class Peak(TorchDispatchMode):
    """Bytes of all tensors alive, `now` and at most, numbers that stand alone left out; `there` are those from before.

    Every result of an operation passes by here; a finalizer on its storage tells when it goes.
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
        self.seen ^= {key}  # in when it comes, out when it goes
        self.now += size
        self.most = max(self.most, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.look(results)
        return results


def step(model: Llama, optimizer: torch.optim.Optimizer, batch: list, precision: str) -> None:
    """A training step as training_step.py makes it, without clipping, which allocates next to nothing."""
    optimizer.zero_grad(set_to_none=True)
    for tokens, labels in batch:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast"):
            loss = model.parts.cross_entropy(model(tokens), labels) / labels.numel()
        loss.backward()
        del loss
    optimizer.step()


def build(config: LlamaConfig, batch: int, seq: int, micro_batches: int, precision: str, recompute: str) -> tuple:
    """(model, optimizer, batch) after a first step, when the moments are there."""
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
    report, config = Report(), LlamaConfig(hidden=64, layers=2, intermediate=172)
    for precision in PRECISIONS:
        for mode in MODES:
            where, predicted = peak(config, 3, 32, 2, precision, mode)
            measured = measure(config, 3, 32, 2, precision, mode)
            what = f"peak in bytes: {precision}, {mode} ({where})"
            report.add(what, f"{predicted:,}", f"{measured:,}", predicted == measured)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
