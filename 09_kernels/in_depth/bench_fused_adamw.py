"""AdamW in one kernel: bytes moved and kernels launched per step, against PyTorch's; on a GPU also the time.

    python 09_kernels/in_depth/bench_fused_adamw.py                            on any machine: counts
    python 09_kernels/in_depth/bench_fused_adamw.py --gpu [--out DIR]          verify on the GPU, then time
    python 09_kernels/in_depth/bench_fused_adamw.py --gpu --dry --out DIR   the same program at tiny sizes: no results

First ten steps must be as exact as torch.optim.AdamW's, one tensor at a time and in one flat buffer, with the same bits
in both; only then is anything counted, timed or written.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import fused_adamw
import torch
from _bench_options import bench_options
from _fused_demo import DEVICE, adamw_run, allowed, worst
from bench_fused import SETTINGS, Traffic
from bench_matmul_ladder import copied, timed
from fused_adamw import AdamW, adamw_, bytes_held, bytes_moved, flatten
from harness import predictions
from harness.ceilings import Table
from harness.meter import held_bytes
from harness.report import write_result
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

SHAPES = [(33, 7), (33,), (1,), (3, 1029)]
BLOCKS = 24  # blocks of the model that is counted and timed


def verify() -> None:
    """Exit unless the optimizer is right."""
    want, _ = adamw_run(partial(torch.optim.AdamW, **SETTINGS), SHAPES, torch.float64, 10)
    theirs, _ = adamw_run(partial(torch.optim.AdamW, **SETTINGS), SHAPES, torch.float32, 10)
    ours, optimizer = adamw_run(partial(AdamW, **SETTINGS), SHAPES, torch.float32, 10)
    flat, _ = adamw_run(lambda ps: AdamW([flatten(ps)], **SETTINGS), SHAPES, torch.float32, 10)
    if not worst(ours, want) <= allowed(worst(theirs, want), torch.float32):
        sys.exit(f"AdamW: error {worst(ours, want):.1e}, torch's own is {worst(theirs, want):.1e}")
    if not all(torch.equal(a, b) for a, b in zip(ours, flat, strict=True)):
        sys.exit("AdamW: a flat buffer gives other weights than many tensors")
    parameters = optimizer.param_groups[0]["params"]
    predicted = bytes_held(sum(p.numel() for p in parameters))
    if held_bytes(parameters, optimizer).optimizer != predicted:
        sys.exit(f"AdamW holds {held_bytes(parameters, optimizer).optimizer} bytes of states, predicted {predicted}")


def shapes_of(hidden: int) -> list[tuple[int, ...]]:
    """The tensors of BLOCKS Llama blocks: four projections, three of the MLP, two norms."""
    block = [(hidden, hidden)] * 4 + [(3 * hidden, hidden)] * 2 + [(hidden, 3 * hidden)] + [(hidden,)] * 2
    return block * BLOCKS


class Counting:
    """Replaces the Triton kernel: counts its launches and the bytes of its buffers."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.started, self.bytes = kernel, 0, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(p: Tensor, g: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, *rest: Any, **options: Any) -> None:
            self.started += 1
            written = [p, m, v] + ([] if copy is None else [copy])
            self.bytes += sum(x.nbytes for x in (p, g, m, v, *written))
            self.kernel[grid](p, g, m, v, copy, *rest, **options)

        return start


class Operators(Traffic):
    """Traffic, and the operators that caused it, each a kernel on a GPU; without the step counter."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        large = any(x.dim() for x in tree_leaves(result) if isinstance(x, Tensor))
        self.started += self.bytes > before and large
        return result


def parameters(hidden: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(shape, dtype=dtype, device=DEVICE)) for shape in shapes_of(hidden)]
    for p in made:
        p.grad = torch.ones_like(p)
    return made


def count(folder: Path | None) -> None:
    scale, hidden = torch.tensor(0.5, device=DEVICE), 16
    many = parameters(hidden)
    numel = sum(p.numel() for p in many)
    theirs = torch.optim.AdamW(many, foreach=False, fused=False, **SETTINGS)
    theirs.step()  # creates the states

    def clip() -> None:
        for p in many:
            p.grad.mul_(scale)

    def copy() -> None:
        for p in many:
            p.to(torch.bfloat16)

    flat = flatten(parameters(hidden))
    ours = AdamW([flat], **SETTINGS)
    ours.step()
    states = [ours.state[flat][name] for name in ("exp_avg", "exp_avg_sq")]
    low = torch.empty_like(flat, dtype=torch.float16 if DEVICE == "cpu" else torch.bfloat16)  # 2 bytes each
    settings = SETTINGS | {"eps": 1e-8}
    with_copy = partial(adamw_, flat.data, flat.grad, *states, step=2, scale=scale, copy=low, **settings)
    rows = []
    for name, eager, fused, predicted in (
        ("a step", theirs.step, ours.step, bytes_moved(1)),
        ("with gradients clipped", lambda: (clip(), theirs.step()), lambda: ours.step(scale=scale), bytes_moved(1)),
        (
            "and a copy of the weights in 2 bytes",
            lambda: (clip(), theirs.step(), copy()),
            with_copy,
            bytes_moved(1, copy=2),
        ),
    ):
        with torch.no_grad(), Operators() as of_torch:
            eager()
        kernel, fused_adamw.adamw_kernel = fused_adamw.adamw_kernel, Counting(fused_adamw.adamw_kernel)
        fused()
        found, fused_adamw.adamw_kernel = fused_adamw.adamw_kernel, kernel
        if found.bytes != predicted * flat.numel():
            sys.exit(f"{name}: {found.bytes} bytes go into and out of the kernel, predicted {predicted * flat.numel()}")
        rows.append([name, round(of_torch.bytes / numel, 1), predicted, of_torch.started, found.started])
    write_result(
        "09_fused_adamw",
        f"AdamW for {len(many)} float32 tensors: what a step moves for each parameter, and how many kernels it starts",
        ["what", "bytes, eager", "bytes, one kernel", "operators, eager", "kernels, one flat buffer"],
        rows,
        "Eager: counted, every operation's inputs and outputs, with foreach=False. One kernel: what it is given, equal "
        "to the formula. States of both: 8 bytes for each parameter.",
        folder,
    )


def time_all(dry: bool, folder: Path | None) -> None:
    hidden, seconds, gpu = 16 if dry else 2048, timed(dry, 20), predictions.here()
    copy, first = copied(dry), 0.0
    shapes = shapes_of(hidden)
    numel = sum(math.prod(shape) for shape in shapes)
    table = Table(
        "09_fused_adamw_gpu",
        f"One step of AdamW, {numel:,} float32 parameters in {len(shapes)} tensors",
        ["optimizer", "tensors", "ms", "of the copy bandwidth", "time / flat buffer", *predictions.COLUMNS],
        f"Bytes by the formula, 28 for each parameter, over those of a large copy in the same run, {copy / 1e12:.3g} "
        "TB/s. Cold L2 cache, median of 20. Predicted: those bytes, and a start for each kernel.",
        folder,
    )

    def run(name: str, kind: Callable, of: Callable[[list], list], **options: Any) -> None:
        """Create, time and free: at most one set of weights and states exists at a time."""
        nonlocal first
        weights = of(parameters(hidden))
        optimizer = kind(weights, **SETTINGS, **options)
        optimizer.step()
        took = seconds(optimizer.step)
        first = first or took
        expected = predictions.moved(gpu, bytes_moved(numel), len(weights) if kind is AdamW else 1)
        cells = predictions.cells(expected if kind is AdamW else None, took)
        table.add(name, len(weights), took * 1e3, f"{bytes_moved(numel) / took / copy:.0%}", took / first, *cells)

    run("this kernel, one flat buffer", AdamW, lambda ps: [flatten(ps)])
    run("this kernel, one for each tensor", AdamW, list)
    run("torch, fused=True", torch.optim.AdamW, list, fused=True)
    run("torch, foreach=True", torch.optim.AdamW, list, foreach=True)
    run("torch, foreach=False", torch.optim.AdamW, list, foreach=False, fused=False)


def main() -> None:
    options = bench_options("Count and time AdamW.", "--gpu", "--dry", "--out", counts_into_out=True)
    verify()
    if options.gpu:
        time_all(options.dry, options.out)
    else:
        count(options.out)


if __name__ == "__main__":
    main()
