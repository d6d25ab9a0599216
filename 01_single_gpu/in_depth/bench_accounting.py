"""What recomputation costs and saves: bytes and FLOPs predicted and measured, and the time it really takes.

Verified first: the gradients are those without recomputation, and bytes and FLOPs equal the formulas.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from accounting import activations, step_flops
from harness.meter import saved_activations
from harness.oracle import assert_same_named
from harness.report import paired, write_result
from llama import MODES, Llama, LlamaConfig, Parts, attention_math, next_token_loss
from torch.utils.flop_counter import FlopCounterMode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = LlamaConfig(hidden=192, layers=4, intermediate=512)
BATCH, SEQ, REPEATS = 2, 256, 15


def main() -> int:
    torch.set_num_threads(1)  # steadier on a CPU that others use too
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    models = {m: Llama(CONFIG, replace(Parts(), attention=attention_math), recompute=m).to(DEVICE) for m in MODES}

    def step(mode: str) -> None:
        models[mode].zero_grad()
        next_token_loss(models[mode], tokens).backward()

    rows = []
    for mode, model in models.items():
        with saved_activations(exclude=model.parameters()) as saved:
            next_token_loss(model, tokens)
        with FlopCounterMode(display=False) as counter:
            step(mode)
        bytes_predicted = sum(activations(CONFIG, BATCH, SEQ, 4, "explicit", mode).values())
        flops = step_flops(CONFIG, BATCH, SEQ, mode, "explicit")
        if saved.bytes != bytes_predicted or counter.get_total_flops() != flops.hardware:
            print(f"{mode}: {saved.bytes} bytes, {counter.get_total_flops()} FLOPs differ from", file=sys.stderr)
            print(f"the predicted {bytes_predicted} bytes, {flops.hardware} FLOPs", file=sys.stderr)
            return 1
        want = {name: p.grad for name, p in models["none"].named_parameters()}
        assert_same_named({name: p.grad for name, p in model.named_parameters()}, want, 1e-5, f"{mode}: gradient of")
        times = 1 if mode == "none" else paired(partial(step, mode), partial(step, "none"), repeats=REPEATS)
        rows.append([mode, bytes_predicted, saved.bytes, flops.hardware / flops.model, times])
        print(rows[-1][:4], times)
    write_result(
        "01_accounting",
        f"Recomputation, explicit attention: {CONFIG.layers} layers, hidden {CONFIG.hidden}, {BATCH} x {SEQ} tokens",
        ["recompute", "bytes predicted", "bytes measured", "FLOPs / none (predicted = counted)", "seconds / none"],
        rows,
        notes=f"fp32, 1 CPU thread, forward and backward; median of {REPEATS} pairs (quartiles).",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
