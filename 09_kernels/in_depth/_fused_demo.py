"""Shared by demos, tests and benchmarks of the fused kernels: options, inputs, comparison, the table."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Parser(argparse.ArgumentParser):
    """Errors are one line and exit code 2; under torchrun only rank 0 prints it."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def options(script: str, description: str, **numbers: int) -> argparse.Namespace:
    """--dtype and one option for each of `numbers`, all at least 1."""
    parser = Parser(prog=script, description=description, allow_abbrev=False)
    parser.add_argument("--dtype", choices=("float64", "float32", "float16", "bfloat16"), default="float32")
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    chosen = parser.parse_args()
    for name in numbers:
        if getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(chosen, name)} must be at least 1")
    if chosen.dtype == "bfloat16" and DEVICE == "cpu":
        parser.error("--dtype bfloat16 is rounded wrongly by Triton's interpreter; use float32, or run on a GPU")
    chosen.dtype = getattr(torch, chosen.dtype)
    chosen.error = parser.error
    return chosen


def is_spectator() -> bool:
    """Under torchrun: every rank but 0. Kernels do not depend on ranks, so the others do nothing."""
    return os.environ.get("RANK", "0") != "0"


def inputs(batch: int, seq: int, hidden: int, seed: int = 0) -> dict[str, tuple[list[Tensor], list[Any]]]:
    """For each kernel of fused.py: float64 tensors that get a gradient, x first, and the other arguments."""
    generator = torch.Generator().manual_seed(seed)
    heads = 3
    head_dim = 16
    eps = 1e-5

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    angle = torch.arange(seq)[:, None] / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    tables = [angle.cos(), angle.sin()]  # always float32: bf16 cannot tell position 256 from 257
    x = (batch, seq, hidden)
    weight = 1 + 0.1 * random(hidden)
    return {
        "softmax": ([3 * random(*x)], []),
        "rms_norm": ([random(*x), weight], [eps]),
        "add_rms_norm": ([random(*x), random(*x), weight], [eps]),
        "rope": ([random(batch, seq, heads, head_dim)], tables),
        "swiglu": ([random(*x), random(*x)], []),
    }


def outputs_and_gradients(
    function: Callable, tensors: Sequence[Tensor], rest: Sequence[Any], seed: int = 1
) -> tuple[list[Tensor], int]:
    """All outputs, then gradients of all tensors for random gradients of the outputs; and the saved bytes.

    Tensors saved by autograd are counted by storage, each once, without one-dimensional inputs (weights).
    """
    leaves = [x.detach().requires_grad_() for x in tensors]
    storages = {}

    def pack(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result = function(*leaves, *rest)
    for x in leaves:
        if x.dim() == 1:
            storages.pop(x.untyped_storage().data_ptr(), None)
    out = [result] if isinstance(result, Tensor) else list(result)
    generator = torch.Generator().manual_seed(seed)
    dout = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in out]
    return [*out, *torch.autograd.grad(out, leaves, dout)], sum(s.nbytes() for s in storages.values())


def worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest ‖got - want‖ / ‖want‖ of all tensors (‖got‖ where `want` is all zeros); NaN if there is any NaN.

    A norm over all elements, since the largest rounding error is random and differs between two equally good
    kernels by a factor of three. One wrong element still shows: it is millions of rounding errors large.
    """
    errors = []
    for g, w in zip(got, want, strict=True):
        w = w.double().cpu()
        errors.append((g.double().cpu() - w).norm().item() / (w.norm().item() or 1.0))
    return float("nan") if any(e != e for e in errors) else max(errors)


def compare(
    fused: Callable, reference: Callable, tensors: Sequence[Tensor], rest: Sequence[Any], dtype: torch.dtype
) -> tuple[float, float, int, int]:
    """(error of the kernel, error of PyTorch in the same dtype, bytes saved by the kernel, by PyTorch).

    Both start from the same rounded inputs; the reference is computed in float64 on the CPU.
    """
    rounded = [x.to(dtype) for x in tensors]
    want, _ = outputs_and_gradients(reference, [x.double() for x in rounded], rest)
    here = [x.to(DEVICE) for x in rounded]
    rest = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in rest]
    got, kept = outputs_and_gradients(fused, here, rest)
    theirs, kept_by_torch = outputs_and_gradients(reference, here, rest)
    return worst(got, want), worst(theirs, want), kept, kept_by_torch


def allowed(error_of_torch: float, dtype: torch.dtype) -> float:
    """Twice PyTorch's own error, but at least one rounding of the result, as PyTorch may be exact by chance.

    In float64 PyTorch is the reference and has no error; there the limit is 1e-10.
    """
    return 1e-10 if dtype == torch.float64 else max(2 * error_of_torch, torch.finfo(dtype).eps)


class Report:
    """A table of expected and measured values; `finish` prints it and returns the exit status."""

    def __init__(self, *columns: str) -> None:
        self.rows = [columns]
        self.wrong = []

    def add(self, *cells: str, wrong: str = "") -> None:
        self.rows.append(cells)
        if wrong:
            self.wrong.append(f"{cells[0]}: {wrong}")

    def finish(self) -> int:
        widths = [max(len(row[column]) for row in self.rows) for column in range(len(self.rows[0]))]
        for row in self.rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if self.wrong:
            print("FAIL  " + "; ".join(self.wrong), file=sys.stderr)
            return 1
        print("PASS")
        return 0


def demo_of_fused(fused: dict, reference: dict, bytes_kept: Callable) -> int:
    chosen = options("fused.py", "Fused kernels against PyTorch.", batch=2, seq=24, hidden=200)
    if chosen.hidden > 16384:
        chosen.error(f"--hidden {chosen.hidden}: a row must fit into registers, at most 16384")
    if is_spectator():
        return 0
    report = Report("kernel", "largest error", "PyTorch's own", "bytes kept", "predicted", "PyTorch keeps")
    for name, (tensors, rest) in inputs(chosen.batch, chosen.seq, chosen.hidden).items():
        error, theirs, kept, kept_by_torch = compare(fused[name], reference[name], tensors, rest, chosen.dtype)
        expected = bytes_kept(name, tuple(tensors[0].shape), chosen.dtype)
        wrong = "" if error <= allowed(theirs, chosen.dtype) else f"error {error:.1e}, PyTorch's own is {theirs:.1e}"
        if kept != expected:
            wrong = f"keeps {kept} bytes, predicted {expected}"
        cells = f"{error:.1e}", f"{theirs:.1e}", f"{kept:,}", f"{expected:,}", f"{kept_by_torch:,}"
        report.add(name, *cells, wrong=wrong)
    return report.finish()


# ------------------------------------------------------------------------------------------------------- the loss


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest floating-point tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.is_floating_point():
                self.numel = max(self.numel, x.numel())
        return result


def loss_inputs(
    tokens: int, vocab: int, hidden: int, seed: int = 0
) -> dict[str, tuple[list[Tensor], list[Any], list[Any]]]:
    """Per kernel of fused_loss.py: float64 tensors that get a gradient, and labels, a third ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 1 / 3] = -100
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64) / hidden**0.5
    return {"cross_entropy": ([3 * h @ weight.T], [labels]), "linear_cross_entropy": ([h, weight], [labels])}


def demo_of_fused_loss(fused: dict, reference: dict, bytes_kept: Callable, largest_tensor: Callable) -> int:
    numbers = dict(tokens=40, vocab=1000, hidden=24, chunk=16)
    chosen = options("fused_loss.py", "Cross-entropy and the output layer, fused, against PyTorch.", **numbers)
    if is_spectator():
        return 0
    report = Report(
        "kernel", "largest error", "PyTorch's own", "bytes kept", "predicted", "PyTorch keeps", "largest tensor"
    )
    sizes = chosen.tokens, chosen.vocab, chosen.hidden
    for name, (tensors, rest) in loss_inputs(*sizes).items():
        limit = largest_tensor(name, *sizes, chosen.chunk)
        call = partial(fused[name], chunk=chosen.chunk) if name == "linear_cross_entropy" else fused[name]
        error, theirs, kept, kept_by_torch = compare(call, reference[name], tensors, rest, chosen.dtype)
        with Largest() as largest:
            here = [x.to(DEVICE, chosen.dtype) for x in tensors]
            outputs_and_gradients(call, here, [x.to(DEVICE) for x in rest])
        expected = bytes_kept(name, *sizes, chosen.dtype)
        wrong = "" if error <= allowed(theirs, chosen.dtype) else f"error {error:.1e}, PyTorch's own is {theirs:.1e}"
        if kept != expected:
            wrong = f"keeps {kept} bytes, predicted {expected}"
        if largest.numel > limit:
            wrong = f"holds a tensor of {largest.numel} elements, {limit} are enough"
        cells = (
            f"{error:.1e}",
            f"{theirs:.1e}",
            f"{kept:,}",
            f"{expected:,}",
            f"{kept_by_torch:,}",
            f"{largest.numel:,}",
        )
        report.add(name, *cells, wrong=wrong)
    return report.finish()


# --------------------------------------------------------------------------------------------------- the optimizer


def adamw_run(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shapes: list[tuple[int, ...]], dtype: Any, steps: int
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Weights after `steps` steps with random gradients, equal for all callers; and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(s, generator=generator).to(DEVICE, dtype)) for s in shapes]
    optimizer = make(parameters)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        for p in parameters:
            gradient = torch.randn(p.shape, generator=generator).to(DEVICE, dtype)
            p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        optimizer.step()
    return [p.detach().double().cpu() for p in parameters], optimizer


def demo_of_fused_adamw(fused: type, flatten: Callable, bytes_held: Callable) -> int:
    chosen = options("fused_adamw.py", "AdamW in one kernel against torch's.", steps=5, width=33)
    if chosen.dtype != torch.float32:
        chosen.error("--dtype is for the other scripts: weights and moments of this one are float32")
    if is_spectator():
        return 0
    shapes = [(chosen.width, 7), (chosen.width,), (3, chosen.width, 5), (1,)] * 2
    settings = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    want, _ = adamw_run(lambda ps: torch.optim.AdamW(ps, **settings), shapes, torch.float64, chosen.steps)
    theirs, _ = adamw_run(lambda ps: torch.optim.AdamW(ps, **settings), shapes, torch.float32, chosen.steps)
    report = Report("AdamW", "kernels a step", "largest error", "torch's own", "bytes of states", "predicted")
    numel = sum(x.numel() for x in want)
    for name, make in {
        "one kernel a parameter": lambda ps: fused(ps, **settings),
        "one kernel in all": lambda ps: fused([flatten(ps)], **settings),
    }.items():
        got, optimizer = adamw_run(make, shapes, torch.float32, chosen.steps)
        error = worst(got, want)
        own = worst(theirs, want)
        held = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if x.dim())
        kernels = len(optimizer.state)
        padded = sum(p.numel() for p in optimizer.state)
        wrong = "" if error <= allowed(own, torch.float32) else f"error {error:.1e}, torch's own is {own:.1e}"
        if held != bytes_held(padded):
            wrong = f"holds {held} bytes, predicted {bytes_held(padded)}"
        note = f"{bytes_held(padded):,}" + (f" ({padded - numel} elements are gaps)" if padded > numel else "")
        report.add(name, str(kernels), f"{error:.1e}", f"{own:.1e}", f"{held:,}", note, wrong=wrong)
    return report.finish()
