"""Fused kernels: bytes moved and kept against eager PyTorch; on a GPU, with AdamW, the share of the copy bandwidth.

    python 09_kernels/in_depth/bench_fused.py                             on any machine: what is moved and kept
    python 09_kernels/in_depth/bench_fused.py --gpu                       verify on the GPU, then time
    python bench_fused.py --gpu --dry --out DIR   the same program at tiny sizes on the CPU: no results

First every kernel must be as exact as PyTorch in the same precision; only then is anything counted or written. On a GPU
the right ones are timed all the same, and a wrong one is named at the end, with exit code 1.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _bench_options import bench_options
from _fused_demo import DEVICE, adamw_run, allowed, compare, inputs, worst
from _interpreter import INTERPRETED
from bench_matmul_ladder import copied, timed
from fused import FUSED, MOVED, REFERENCE, bytes_moved
from fused_adamw import AdamW, adamw_
from fused_adamw import bytes_moved as adamw_bytes
from harness import predictions
from harness.ceilings import Table, device_here
from harness.meter import saved_activations
from harness.report import write_result
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EAGER = REFERENCE | {"softmax": partial(torch.softmax, dim=-1)}  # the reference also looks for rows of -inf
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
    """Kernel -> what is wrong with it; nothing of those that are right."""
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
    """The same, on a GPU with the memory for it, for the last elements of a tensor of more than 2^31."""
    n = 2**31 + 4096
    gate, up = torch.full((2, n), 1.5, dtype=torch.bfloat16, device=DEVICE)
    gate[-1] = up[-1] = 3.0
    out = FUSED["swiglu"](gate, up)
    want = REFERENCE["swiglu"](gate[-2:], up[-2:])
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


def time_adamw(n: int, device: torch.device, seconds: Callable) -> tuple[float, int, str, str]:
    """Seconds of a step of n parameters, its bytes, what torch's takes, and nothing for torch.compile."""
    p, g, m, v = (torch.randn(n, device=device).abs_() for _ in range(4))
    mine = seconds(lambda: adamw_(p, g, m, v, step=10, eps=1e-8, **SETTINGS))
    weight = torch.nn.Parameter(p)
    weight.grad = g
    torchs = torch.optim.AdamW([weight], fused=True, **SETTINGS)
    torchs.step()
    return mine, adamw_bytes(n), f"{seconds(torchs.step) / mine:.2f}", "-"


def time_all(dry: bool, folder: Path | None, wrong: dict[str, str]) -> None:
    """Times every kernel that is right."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    batch, seq, hidden = (1, 8, 64) if dry else (4, 8192, 4096)
    device, seconds, gpu = device_here(), timed(dry, 30), predictions.here()
    copy = copied(dry)
    table = Table(
        "09_fused_gpu",
        f"Fused kernels, {batch * seq:,} rows of {hidden:,}, {str(dtype).removeprefix('torch.')}",
        [
            "kernel",
            "ms",
            "of the copy bandwidth",
            "eager takes, times",
            "torch.compile takes, times",
            *predictions.COLUMNS,
        ],
        f"Bytes by the formula, over those of a large copy in the same run, {copy / 1e12:.3g} TB/s. Cold L2 cache, "
        "median of 30 calls. RoPE: 32 heads of 128. SwiGLU: 14,336 columns. Predicted: those bytes over 90 % of the "
        "data sheet's bandwidth.",
        folder,
    )

    def row(what: str, mine: float, nbytes: float, *others: str) -> None:
        cells = predictions.cells(predictions.moved(gpu, nbytes), mine)
        table.add(what, mine * 1e3, f"{nbytes / mine / copy:.0%}", *others, *cells)

    if "AdamW" not in wrong:
        row("AdamW, float32 (eager: torch's fused=True)", *time_adamw(4096 if dry else 2**28, device, seconds))

    def measure(name: str, versions: dict[str, Callable]) -> tuple[int, dict[str, list[float]]]:
        """Elements of x, and seconds of forward and backward of each version."""
        tensors, rest = inputs(1, seq, hidden)[name]
        shapes = [(hidden,) if x.dim() == 1 else (batch, seq, *x.shape[2:]) for x in tensors]
        if name == "rope":
            shapes = [(batch, seq, hidden // 16 if dry else hidden // 128, 16)] if dry else [(batch, seq, 32, 128)]
            angle = torch.rand(seq, shapes[0][3] // 2)
            rest = [angle.cos(), angle.sin()]
        if name == "swiglu" and not dry:
            shapes = [(batch, seq, 14336)] * 2
        leaves = [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]
        here = [x.to(device) if isinstance(x, Tensor) else x for x in rest]
        times: dict[str, list[float]] = {}
        for version, function in versions.items():

            def forward(function=function):
                with torch.no_grad():
                    return function(*leaves, *here)

            out = function(*leaves, *here)
            out = [out] if isinstance(out, Tensor) else list(out)
            dout = [torch.randn_like(y) for y in out]

            def backward(out=out, dout=dout):
                return torch.autograd.grad(out, leaves, dout, retain_graph=True)

            times[version] = [seconds(forward), seconds(backward)]
            del out, dout
        return leaves[0].numel(), times

    fused: dict[str, list[float]] = {}
    right = [name for name in FUSED if name not in wrong]
    for name in right:
        numel, times = measure(name, {"fused": FUSED[name], "eager": EAGER[name]})
        fused[name], moved = times["fused"], bytes_moved(name, numel, dtype.itemsize)
        for i, what in enumerate(("forward", "backward")):
            row(f"{name}, {what}", fused[name][i], moved[i], f"{times['eager'][i] / fused[name][i]:.2f}", "-")
    for name in right if not dry else ():  # torch.compile takes its time before it is fast, so it comes last
        _, times = measure(name, {"compile": torch.compile(EAGER[name], dynamic=False)})
        for i, what in enumerate(("forward", "backward")):
            [cells] = [cells for cells in table.rows if cells[0] == f"{name}, {what}"]
            cells[4] = f"{times['compile'][i] / fused[name][i]:.2f}"
        table.write()


def main() -> None:
    about = "Count and time the fused kernels."
    options = bench_options(about, "--gpu", "--dry", "--out", counts_into_out=True)
    on_gpu = options.gpu and not options.dry
    low = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
    # Each width is compiled anew: the tests of the chapter go through all of them, and here the time is short.
    wrong = verify([torch.float32, *low], (200,))
    if on_gpu:
        wrong = verify([torch.bfloat16], (4096, 16384)) | wrong
        wrong = verify_beyond_2_to_the_31() | wrong
    if options.gpu:
        wrong = verify_adamw() | wrong
        time_all(options.dry, options.out, wrong)
    if wrong:
        sys.exit("; ".join(wrong.values()))
    if not options.gpu:
        count(options.out)


if __name__ == "__main__":
    main()
