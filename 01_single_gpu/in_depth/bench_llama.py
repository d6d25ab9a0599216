"""Gain of the fused attention kernel: time and saved bytes against explicit attention, by sequence length.

Verified first: both give the same loss and the same gradients.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from harness.meter import saved_activations
from harness.reference import assert_same, assert_same_named
from harness.report import paired, write_result
from llama import Llama, LlamaConfig, Parts, attention, attention_math, next_token_loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = LlamaConfig(layers=2)
REPEATS = 15


def main() -> int:
    torch.set_num_threads(1)  # steadier on a shared CPU
    rows = []
    for seq in (128, 512, 1024):
        tokens = torch.randint(CONFIG.vocab_size, (1, seq), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        models = [Llama(CONFIG, replace(Parts(), attention=f)).to(DEVICE) for f in (attention, attention_math)]

        def step(model: Llama, tokens: torch.Tensor = tokens) -> torch.Tensor:
            model.zero_grad()
            loss = next_token_loss(model, tokens)
            loss.backward()
            return loss

        assert_same(step(models[0]), step(models[1]), 1e-5, "loss")
        gradients = [{name: p.grad for name, p in model.named_parameters()} for model in models]
        assert_same_named(*gradients, tol=1e-4, what="gradient of")
        kept = []
        for model in models:
            with saved_activations(exclude=model.parameters()) as saved:
                next_token_loss(model, tokens)
            kept.append(saved.bytes)
        ratio = paired(partial(step, models[0]), partial(step, models[1]), repeats=REPEATS)
        rows.append([seq, ratio, kept[0] / kept[1]])
        print(seq, ratio, kept)
    write_result(
        "01_llama",
        "Fused attention over explicit attention, forward and backward of the whole model",
        ["sequence", "seconds, fused / explicit", "saved bytes, fused / explicit"],
        rows,
        notes=f"{CONFIG.layers} layers, hidden {CONFIG.hidden}, 1 sample, fp32, 1 thread; median of {REPEATS} pairs.",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
