"""Cost and gain of recomputation: predicted and measured bytes and FLOPs, and measured time.

Verified first: the gradients equal the gradients without recomputation, and bytes and FLOPs the formulas.
`--figures` only draws.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from accounting import GB, activations, step_flops
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import saved_activations
from harness.reference import assert_same_named
from harness.report import paired, write_result
from llama import (
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA3_405B,
    MODES,
    Llama,
    LlamaConfig,
    Parts,
    attention_math,
    next_token_loss,
)
from torch.utils.flop_counter import FlopCounterMode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = LlamaConfig(hidden=192, layers=4, intermediate=512)
BATCH, SEQ, REPEATS = 2, 256, 15
MODELS = {"8B": LLAMA3_8B, "70B": LLAMA3_70B, "405B": LLAMA3_405B}


def draw(axes, sizes) -> None:
    rows = sizes["rows"]
    for model, style in zip(MODELS, (":", "--", "-"), strict=True):
        mine = [row for row in rows if row[0] == model]
        for column, what, colour in ((2, "everything kept", "activations"), (3, "blocks recomputed", "compute")):
            at, gigabytes = [row[1] for row in mine], [row[column] for row in mine]
            axes.plot(at, gigabytes, linestyle=style, color=COLOURS[colour], label=f"{model}, {what}")
    axes.axhline(80, color=GREY, linewidth=0.8)
    axes.text(131072, 84, "80 GB, all of one GPU", fontsize=7, va="bottom", ha="right")
    axes.set(xscale="log", yscale="log", xlabel="tokens in a sequence", ylabel="GB kept for backward")
    ticks = sorted({row[1] for row in rows})
    axes.set_xticks(ticks, [f"{tick // 1024} k" for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=7)


def sizes() -> None:
    """Activations against sequence length and model size, by the formula that test_accounting.py verifies."""
    lengths = [2048 * 2**i for i in range(7)]
    rows = [
        [name, seq, *(sum(activations(config, 1, seq, 2, "fused", mode).values()) / GB for mode in ("none", "full"))]
        for name, config in MODELS.items()
        for seq in lengths
    ]
    columns = ["Llama-3", "tokens", "GB, everything kept", "GB, blocks recomputed"]
    notes = "bf16, fused attention; by the formula that the test holds against the meter. Nothing this large ran."
    write_result("01_model_sizes", "Activations of one sequence, by formula", columns, rows, notes=notes, computed=True)


def main() -> int:
    if "--figures" in sys.argv:
        write_figure("01_single_gpu/figures/sizes.svg", ["01_model_sizes"], draw)
        return 0
    torch.set_num_threads(1)  # steadier on a shared CPU
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
    sizes()
    write_figure("01_single_gpu/figures/sizes.svg", ["01_model_sizes"], draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
