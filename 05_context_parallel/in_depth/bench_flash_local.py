"""What attention to one block needs: readable, in tiles, and by PyTorch's kernel.

    python 05_context_parallel/in_depth/bench_flash_local.py

First every version must give the output and the gradients of the readable one in float64; only then is anything
measured. Peaks are counted tensor by tensor; what PyTorch's kernel takes and frees inside itself is not seen.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from context_ring import EXPLICIT, LocalAttention
from flash_local import FLASH, step_of, tiled
from harness.meter import peak_memory
from harness.reference import assert_same
from harness.report import write_result
from torch import Tensor

HEADS, D, TILE = 4, 64, 128
LENGTHS = (512, 1024, 2048)
VERSIONS = {"explicit": EXPLICIT, f"tiles of {TILE}": tiled(TILE), "PyTorch's kernel": FLASH}


def inputs(s: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, s, HEADS, D, generator=generator) for _ in range(4)]


def peak_of(local: LocalAttention, s: int) -> int:
    q, k, v, dout = inputs(s)
    with peak_memory() as memory:
        step_of(local, q, k, v, dout, True)
    return memory.peak


def main() -> None:
    given = inputs(LENGTHS[0])
    want = step_of(EXPLICIT, *(x.double() for x in given), True)
    for name, local in VERSIONS.items():
        for what, got, x in zip(("out", "lse", "dq", "dk", "dv"), step_of(local, *given, True), want, strict=True):
            assert_same(got, x.float(), 1e-5, f"{what} of {name}")
    rows = [[s, *(peak_of(local, s) for local in VERSIONS.values())] for s in LENGTHS]
    write_result(
        "05_flash_local",
        "Peak bytes of causal attention to one block on one rank, forward and backward",
        ["queries and keys", *VERSIONS],
        rows,
        f"{HEADS} heads of {D}, float32. Peaks are counted, results included.",
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: it has no options; use nothing", file=sys.stderr)
        sys.exit(2)
    main()
