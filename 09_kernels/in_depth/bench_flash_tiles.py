"""Memory of attention in tiles and of the definition, both passes, by sequence length: exact bytes.

    python 09_kernels/in_depth/bench_flash_tiles.py               (--figures: only draw the figure again)

First output and gradients must agree with the definition; only then are bytes counted, and seconds compared.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _bench_options import bench_options
from flash_tiles import TILED, Attention, explicit_attention, step
from harness.figures import write_figure
from harness.meter import peak_memory, saved_activations
from harness.reference import assert_same
from harness.report import paired, write_result

LENGTHS, HEADS, D = (128, 256, 512, 1024), 2, 64


def tiled(q, k, v):
    return Attention.apply(q, k, v, TILED, True, None, 0)[0]


def explicit(q, k, v):
    return explicit_attention(q, k, v, causal=True)


def inputs(S: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(S)
    return [torch.randn(1, S, HEADS, D, generator=generator).to(dtype) for _ in range(4)]


def bytes_of(attention, S: int) -> tuple[int, int]:
    """Saved for backward, and the peak of forward and backward together."""
    q, k, v, dout = inputs(S)
    with peak_memory() as memory:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        with saved_activations() as saved:
            out = attention(q, k, v)
        out.backward(dout)
    return saved.bytes, memory.peak


def draw(axes: Any, result: dict) -> None:
    """Peak bytes of both versions over the length, both axes in powers of two."""
    lengths = [row[0] for row in result["rows"]]
    for column, label in ((4, "scores as a matrix"), (3, "tiles")):
        axes.plot(lengths, [row[column] / 2**20 for row in result["rows"]], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="peak of forward and backward, MiB", xticks=lengths)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.legend()


def main() -> None:
    if not bench_options("Memory of attention in tiles, and of the definition.", "--figures").figures:
        for S in (100, 128):
            given = inputs(S, torch.float64)
            for name, got, want in zip(
                ("out", "dq", "dk", "dv"), step(tiled, *given), step(explicit, *given), strict=True
            ):
                assert_same(got, want, 1e-10, f"{name} at {S} tokens")
        rows = []
        for S in LENGTHS:
            ours, theirs = bytes_of(tiled, S), bytes_of(explicit, S)
            given = inputs(S)
            seconds = paired(
                lambda given=given: step(tiled, *given), lambda given=given: step(explicit, *given), repeats=5
            )
            rows.append([S, ours[0], theirs[0], ours[1], theirs[1], seconds])
        write_result(
            "09_flash_memory",
            "Bytes of causal attention in plain PyTorch: in tiles of 32, and with the scores as a matrix",
            ["tokens", "saved, tiles", "saved, matrix", "peak, tiles", "peak, matrix", "seconds, tiles / matrix"],
            rows,
            f"{HEADS} heads of {D}, float32, counted exactly. Twice the tokens: twice the bytes in tiles, and with a "
            "matrix nearly four times. In time, tiles cost here what they cost in small operations; a kernel has no "
            "such cost.",
        )
    write_figure("09_kernels/figures/flash_memory.svg", ["09_flash_memory"], draw)


if __name__ == "__main__":
    main()
