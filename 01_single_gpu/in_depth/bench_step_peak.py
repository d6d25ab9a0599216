"""Where the peak of a step comes from, in nine modes: always stored, saved for the backward pass, and temporary.

Verified first: every peak is the predicted one, to the byte. `--figures` only draws.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from harness.figures import COLOURS, write_figure
from harness.report import write_result
from llama import MODES, LlamaConfig
from step_peak import PRECISIONS, held, kept_for_backward, measure, peak

CONFIG, BATCH, SEQ = LlamaConfig(hidden=192, layers=4, intermediate=512), 2, 256


def draw(axes, peaks) -> None:
    names = [f"{precision}\n{mode}" for precision, mode, *_ in peaks["rows"]]
    below = [0.0] * len(names)
    for column, what, colour in (
        (2, "weights, gradients, moments", "weights"),
        (3, "saved for backward", "activations"),
        (4, "temporary", "compute"),
    ):
        sizes = [row[column] / 2**20 for row in peaks["rows"]]
        axes.bar(names, sizes, bottom=below, color=COLOURS[colour], label=what)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.set(ylabel="MiB at the peak")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=9)


def main() -> int:
    if "--figures" not in sys.argv:
        torch.set_num_threads(1)  # steadier on a CPU that others use too
        rows = []
        for precision in PRECISIONS:
            for mode in MODES:
                where, predicted = peak(CONFIG, BATCH, SEQ, 2, precision, mode)
                measured = measure(CONFIG, BATCH, SEQ, 2, precision, mode)
                if measured != predicted:
                    print(f"{precision}, {mode}: peak {measured}, predicted {predicted}", file=sys.stderr)
                    return 1
                always = held(CONFIG, BATCH, SEQ, 2, precision)
                kept = sum(kept_for_backward(CONFIG, BATCH, SEQ, precision, mode).values())
                rows.append([precision, mode, always, kept, measured - always - kept, measured, where])
        write_result(
            "01_peak",
            f"The peak of a step, predicted and measured: {CONFIG.layers} layers, hidden {CONFIG.hidden}, "
            f"two micro-batches of {BATCH} x {SEQ} tokens",
            ["precision", "recompute", "always stored", "saved for backward", "temporary", "peak, bytes", "where"],
            rows,
            notes="Predicted and measured agree to the byte in all nine; the fused attention of the CPU.",
        )
    write_figure("01_single_gpu/figures/peaks.svg", ["01_peak"], draw, size=(9.0, 3.6))
    return 0


if __name__ == "__main__":
    sys.exit(main())
