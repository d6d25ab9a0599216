"""Fused kernels: bytes moved and saved against eager PyTorch; on a GPU, and there AdamW too, share of bandwidth.

    python 09_kernels/in_depth/bench_fused.py                             on any machine: the counts
    python 09_kernels/in_depth/bench_fused.py --gpu                       verify on the GPU, then time
    python bench_fused.py --gpu --dry --out DIR   the same program at tiny sizes on the CPU: no results

First every kernel must be as exact as PyTorch in the same precision; only then is anything counted or
written. On a GPU the right ones are timed in any case, and wrong ones are named at the end, with exit code 1.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _bench_options import bench_options
from _fused_demo import DEVICE, adamw_run, allowed, compare, inputs, worst
from _interpreter import INTERPRETED
from fused import FUSED, MOVED, REFERENCE, bytes_moved
from fused_adamw import AdamW, adamw_
from fused_adamw import bytes_moved as adamw_bytes
from harness import predictions
from harness.ceilings import Table, device_here, paired_seconds, quotient
from harness.meter import saved_activations
from harness.report import write_result
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EAGER = REFERENCE | {"softmax": partial(torch.softmax, dim=-1)}  # the reference also checks for rows of -inf
COMPILING = 14.0  # seconds that must be left: torch.compile takes ten of them, the rows after it the rest
SETTINGS = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


class Traffic(TorchDispatchMode):
    """Counts the bytes that PyTorch's operations read and write, as if there were no cache. Views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in read}
        view = written and all(x.untyped_storage().data_ptr() in storages for x in written)
        if func._schema.is_mutable or not view:
            self.bytes += sum(x.nbytes for x in [*read, *written])
        return result


def verify(dtypes: list[torch.dtype], hidden: tuple[int, ...]) -> dict[str, str]:
    """Kernel -> its failure, for the wrong ones only."""
    wrong: dict[str, str] = {}
    for dtype in dtypes:
        for cols in hidden:
            for name, (tensors, rest) in inputs(2, 20, cols).items():
                error, theirs, _, _ = compare(FUSED[name], REFERENCE[name], tensors, rest, dtype)
                if not error <= allowed(theirs, dtype):
                    off = f"error {error:.1e}, PyTorch's own is {theirs:.1e}"
                    wrong.setdefault(name, f"{name} of {cols} columns in {dtype}: {off}")
    return wrong


def verify_adamw() -> dict[str, str]:
    """The same for the optimizer, after five steps."""
    shapes = [(33, 7), (5000,)]
    want, _ = adamw_run(partial(torch.optim.AdamW, **SETTINGS), shapes, torch.float64, 5)
    theirs, _ = adamw_run(partial(torch.optim.AdamW, **SETTINGS), shapes, torch.float32, 5)
    got, _ = adamw_run(partial(AdamW, **SETTINGS), shapes, torch.float32, 5)
    if not worst(got, want) <= allowed(worst(theirs, want), torch.float32):
        return {"AdamW": f"AdamW: error {worst(got, want):.1e}, torch's own is {worst(theirs, want):.1e}"}
    return {}


def verify_beyond_2_to_the_31() -> dict[str, str]:
    """The same, on a GPU with enough memory, for the last elements of a tensor of more than 2^31."""
    n = 2**31 + 4096
    gate, up = torch.full((2, n), 1.5, dtype=torch.bfloat16, device=DEVICE)
    gate[-1] = up[-1] = 3.0
    out = FUSED["swiglu"](gate, up)
    want = REFERENCE["swiglu"](gate[-2:].double(), up[-2:].double()).bfloat16()  # rounded once, as the kernel does
    if not torch.equal(out[-2:], want) or not bool((out[: 2**20] == want[0]).all()):
        return {"swiglu": f"swiglu of {n} elements ends in {out[-2:].tolist()}, not {want.tolist()}"}
    return {}


def count(folder: Path | None) -> None:
    rows = []
    for name, (tensors, rest) in inputs(4, 128, 1024).items():
        leaves = [x.bfloat16().requires_grad_() for x in tensors]
        n = leaves[0].nbytes
        eager = EAGER[name]
        with Traffic() as forward:
            out = eager(*leaves, *rest)
        out = [out] if isinstance(out, Tensor) else list(out)
        gradients = [torch.ones_like(y) for y in out]
        with Traffic() as backward:
            torch.autograd.grad(out, leaves, gradients)
        kept = []
        for function, dtype in ((eager, torch.bfloat16), (FUSED[name], torch.float16)):  # 2 bytes each; see fused.check
            leaves = [x.to(DEVICE, dtype).requires_grad_() for x in tensors]
            here = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in rest]
            with saved_activations(exclude=[x for x in leaves if x.dim() == 1]) as saved:
                held = function(*leaves, *here)
            kept.append(round(saved.bytes / n, 2))
            del held
        moved = round(forward.bytes / n, 1), round(backward.bytes / n, 1)
        rows.append([name, moved[0], MOVED[name][0], moved[1], MOVED[name][1], *kept])
    columns = ["kernel", "forward moves, eager", "fused", "backward moves, eager", "fused ", "keeps, eager", "fused  "]
    write_result(
        "09_fused_bytes",
        "Bytes moved and kept, in tensors of the size of x (bf16; rows of 1024)",
        columns,
        rows,
        "Eager: counted, every operation's inputs and outputs. Fused moves: the formula, every input and output once. "
        "Kept: counted. PyTorch's own softmax is one kernel, too.",
        folder,
    )


Calls = dict[str, Callable[[], object]]


def copy_of(nbytes: int, device: torch.device) -> Callable[[], object]:
    """Reads half of `nbytes` and writes the other half: the baseline of a kernel that moves as many bytes."""
    source = torch.randn(max(1, nbytes // 8), device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def adamw_calls(n: int, device: torch.device) -> Calls:
    """A step of n parameters by the fused kernel, and by torch's."""
    p, g, m, v = (torch.randn(n, device=device).abs_() for _ in range(4))
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g
    torchs = torch.optim.AdamW([weight], fused=True, **SETTINGS)
    torchs.step()
    return {"fused": lambda: adamw_(p, g, m, v, step=10, eps=1e-8, **SETTINGS), "eager": torchs.step}


def timed_inputs(name: str, dry: bool, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list]:
    batch, seq, hidden = (1, 8, 64) if dry else (4, 8192, 4096)
    tensors, rest = inputs(1, seq, hidden)[name]
    shapes = [(hidden,) if x.dim() == 1 else (batch, seq, *x.shape[2:]) for x in tensors]
    if name == "rope":
        heads, D = (hidden // 16, 16) if dry else (32, 128)
        shapes = [(batch, seq, heads, D)]
        angle = torch.rand(seq, D // 2)
        rest = [angle.cos(), angle.sin()]
    if name == "swiglu" and not dry:
        shapes = [(batch, seq, 14336)] * 2
    leaves = [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]
    return leaves, [x.to(device) if isinstance(x, Tensor) else x for x in rest]


def passes(function: Callable, leaves: list[Tensor], rest: list) -> tuple[tuple[Callable, Callable], list[Tensor]]:
    """The calls of a forward and of a backward pass, and their results."""
    out = function(*leaves, *rest)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    generator = torch.Generator(leaves[0].device).manual_seed(1)
    dout = [torch.randn(y.shape, device=y.device, dtype=y.dtype, generator=generator) for y in outputs]

    def forward() -> object:
        with torch.no_grad():
            return function(*leaves, *rest)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, dout, retain_graph=True)

    return (forward, backward), [y.detach() for y in outputs] + list(backward())


def far_apart(fused: list[Tensor], eager: list[Tensor]) -> str:
    """The difference of the two beyond a few roundings; "" if none. NaN differs from everything."""
    for x, y in zip(fused, eager, strict=True):
        error = ((x.float() - y.float()).norm() / y.float().norm()).item()
        if not error <= max(4 * torch.finfo(y.dtype).eps, 1e-5):  # a loss in fp32 sums many of them
            return f"at the shape that is timed it is {error:.1e} away from PyTorch's"
    return ""


def time_all(dry: bool, folder: Path | None, wrong: dict[str, str], end: float) -> None:
    """Times every correct kernel, next to PyTorch, eager and compiled, and a copy of as many bytes; all alternate."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    device, gpu, repeats = device_here(), predictions.here(), 2 if dry else 30
    table = Table(
        "09_fused_gpu",
        f"Fused kernels, {8 if dry else 32768:,} rows of {64 if dry else 4096:,}, {str(dtype).removeprefix('torch.')}",
        [
            "kernel",
            "ms",
            "of the copy bandwidth",
            "eager takes, times",
            "torch.compile takes, times",
            *predictions.COLUMNS,
        ],
        "Bytes by the formula, over those of a copy of as many bytes that is timed in turns. Cold L2 cache, median of "
        f"{repeats} calls. RoPE: 32 heads of 128. SwiGLU: 14,336 columns. Predicted: those bytes over 90 % of the data "
        "sheet's bandwidth; under 0.9 of it, some of them were found in L2, or are not moved.",
        folder,
    )

    def row(what: str, calls: Calls, nbytes: int) -> None:
        seconds = paired_seconds(device, calls | {"copy": copy_of(nbytes, device)}, repeats)
        took = statistics.median(seconds["fused"])
        moved = 2 * (max(1, nbytes // 8) * 4)  # by the copy
        share = (
            statistics.median(c / f for c, f in zip(seconds["copy"], seconds["fused"], strict=True)) * nbytes / moved
        )
        others = [quotient(seconds[of], seconds["fused"]) if of in seconds else "-" for of in ("eager", "compiled")]
        cells = predictions.cells(predictions.moved(gpu, nbytes), took)
        table.add(what, took * 1e3, f"{share:.0%}", *others, *cells)

    if "AdamW" not in wrong:
        n = 4096 if dry else 2**28
        row("AdamW, float32 (eager: torch's fused=True)", adamw_calls(n, device), adamw_bytes(n))
    for name in [name for name in FUSED if name not in wrong]:
        leaves, rest = timed_inputs(name, dry, device, dtype)
        versions = {"fused": FUSED[name], "eager": EAGER[name]}
        if end - time.monotonic() > COMPILING and not dry:
            versions["compiled"] = torch.compile(EAGER[name], dynamic=False)
        elif not dry:
            table.notes += f" {name} was not compiled, for want of time."
        ran = {version: passes(function, leaves, rest) for version, function in versions.items()}
        off = {version: far_apart(results, ran["eager"][1]) for version, (_, results) in ran.items()}
        wrong |= {f"{name}, {version}": f"{name}, {version}: {why}" for version, why in off.items() if why}
        calls = {version: both for version, (both, _) in ran.items() if not off[version]}
        del ran
        if "fused" not in calls:
            continue
        moved = bytes_moved(name, leaves[0].numel(), dtype.itemsize)
        for i, what in enumerate(("forward", "backward")):
            row(f"{name}, {what}", {version: both[i] for version, both in calls.items()}, moved[i])


def main() -> None:
    about = "Count and time the fused kernels."
    options = bench_options(about, "--gpu", "--dry", "--out", "--seconds", counts_into_out=True)
    end = time.monotonic() + options.seconds
    # Each dtype and width is compiled anew: fused.py and the tests cover all; GPU time is short.
    if options.gpu and not options.dry:
        wrong = verify([torch.bfloat16], (200, 4096))
    else:
        wrong = verify([torch.float32, *([] if INTERPRETED else [torch.bfloat16]), torch.float16], (200,))
    if options.gpu:
        wrong = verify_adamw() | wrong
        time_all(options.dry, options.out, wrong, end)
    if options.gpu and not options.dry and end - time.monotonic() > 5:
        wrong = verify_beyond_2_to_the_31() | wrong
    if wrong:
        sys.exit("; ".join(wrong.values()))
    if not options.gpu:
        count(options.out)


if __name__ == "__main__":
    main()
