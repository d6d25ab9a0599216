"""Chapter 9, ELU four ways: the same elementwise function as PyTorch calls, compiled, in Triton and in CUDA.

The problem. ELU(x) = x for x > 0, α(eˣ − 1) otherwise (1511.07289). In PyTorch it is one line and five
kernels: clamp, expm1, multiply, compare, where. Each reads its inputs from memory and writes its output, and
an elementwise kernel is bound by memory. One kernel would read x, write y, and keep the rest in registers.

The idea. Four ways to that one kernel, from least to most work for the programmer:

    eager      torch.where(x > 0, x, α·expm1(x))      the reference; every step reads and writes memory
    compile    torch.compile(eager)                   writes the fused kernel for you, in Triton (on a CPU, in C++)
    triton     elu_forward, elu_backward below        you write a block of elements; the compiler, the threads
    cuda       elu.cu                                 you write a thread

    bytes moved in forward, n elements of 4 bytes (a boolean has 1):
      eager    clamp 8n, expm1 8n, multiply 8n, compare 5n, where 13n    = 42 n
      fused    x in, y out                                               =  8 n
    backward from the output: dx = dy where y > 0, else dy·(y + α), because α eˣ = y + α. It saves only y,
    which the next layer also saves, and computes no exponential.

How to read what torch.compile generates: `python elu.py --show`. On a GPU look for `@triton.jit`: xindex is
the index of the element, xmask the guard at the end, each tmp one step of the formula; there is one tl.load
and one tl.store. On a CPU it is C++: the same tmps in a vectorised loop. Two demonstrations, also in elu.cu:

    divergence    lanes of a warp that disagree at an `if` take both paths, one after the other
    fusion        bias + GELU in three kernels moves 7n elements, in one 2n

    python elu.py                   all versions against float64, divergence and fusion counted; ends with PASS
    python elu.py --compile         also torch.compile (it takes a while on a CPU)
    python elu.py --show            the code that torch.compile generates for forward and backward
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from _cuda import Counters, CudaError, Parser, call
from _interpreter import INTERPRETED, tl, triton  # Triton, run by Python without a GPU
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 1024  # elements of one Triton program
VERSIONS = ("eager", "compile", "triton", "cuda")

# ------------------------------------------------------------------------------------------------------------ eager


def elu_eager(x: Tensor, alpha: float = 1.0) -> Tensor:
    """The direct form. expm1, not exp - 1: near 0 the difference of two values near 1 has no digits left.

    Both branches of `where` are computed, for every element, and autograd differentiates both: for x > 88 the unused
    one is inf, its gradient inf · 0 = NaN. Hence the clamp, which changes no value that is used.
    """
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


# ----------------------------------------------------------------------------------------------------------- Triton


@triton.jit
def forward_kernel(X, Y, n, alpha, BLOCK: tl.constexpr):
    """One program, BLOCK neighbours. Values are computed in fp32, for any dtype in memory."""
    # --- exercise 9.21: load a block, guard its end, apply ELU, store ---
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n).to(tl.float32)
    small = x * (1 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24))))  # eˣ - 1 near 0, where tl.exp(x) - 1 loses its digits
    negative = tl.where(x > -0.03, small, tl.exp(x) - 1)
    tl.store(Y + i, tl.where(x > 0, x, alpha * negative).to(Y.dtype.element_ty), mask=i < n)
    # --- end exercise ---


@triton.jit
def backward_kernel(Y, DY, DX, n, alpha, BLOCK: tl.constexpr):
    # --- exercise 9.22: the gradient, from the output alone ---
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(Y + i, mask=i < n).to(tl.float32)
    dy = tl.load(DY + i, mask=i < n).to(tl.float32)
    dx = tl.where(y > 0, dy, dy * (y + alpha))
    tl.store(DX + i, dx.to(DX.dtype.element_ty), mask=i < n)
    # --- end exercise ---


# ---------------------------------------------------------------------------------------------- into PyTorch's autograd


class Elu(torch.autograd.Function):
    """y = ELU(x) by kernels unknown to PyTorch and autograd: both directions are defined here."""

    @staticmethod
    def forward(ctx, x: Tensor, alpha: float, version: str) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        if version == "triton" and x.numel():
            with torch.cuda.device_of(x):  # launch where the tensors are, whatever the current device
                forward_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), alpha, BLOCK=BLOCK)
        elif x.numel():
            x = x.clone() if x.data_ptr() % 16 else x  # the 16-byte loads of elu.cu
            call("elu.cu", "run_elu_forward", x.numel(), alpha, x, y)
        ctx.save_for_backward(y)  # and not x
        ctx.alpha = alpha
        ctx.version = version
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        (y,) = ctx.saved_tensors
        dy = dy.contiguous()  # the gradient of a sum is one element with strides of 0
        dx = torch.empty_like(dy)
        if ctx.version == "triton" and dy.numel():
            with torch.cuda.device_of(dy):
                backward_kernel[(triton.cdiv(dy.numel(), BLOCK),)](y, dy, dx, dy.numel(), ctx.alpha, BLOCK=BLOCK)
        elif dy.numel():
            y, dy = (t.clone() if t.data_ptr() % 16 else t for t in (y, dy))
            call("elu.cu", "run_elu_backward", dy.numel(), ctx.alpha, y, dy, dx)
        return dx, None, None


def elu(x: Tensor, alpha: float = 1.0, version: str = "triton") -> Tensor:
    """ELU of any shape and strides. Raises ValueError, in one line, for what a version cannot do."""
    check_elu(x, alpha, version)
    if version == "eager":
        return elu_eager(x, alpha)
    if version == "compile":
        return torch.compile(elu_eager)(x, alpha)
    return Elu.apply(x, float(alpha), version)


def check_elu(x: Tensor, alpha: float, version: str) -> None:
    if version not in VERSIONS:
        raise ValueError(f"version {version!r} does not exist; there are {', '.join(VERSIONS)}")
    if not alpha >= 0:  # also NaN
        raise ValueError(f"alpha {alpha} must be 0 or more: with a negative one the sign of y does not tell that of x")
    narrow = () if INTERPRETED else (torch.bfloat16,)  # Triton's interpreter is wrong for bf16
    allowed = {"cuda": (torch.float32,), "triton": (torch.float32, torch.float16, *narrow)}.get(version)
    if allowed and x.dtype not in allowed:
        raise ValueError(f"version {version} takes {' or '.join(str(d) for d in allowed)}, not {x.dtype}; cast x first")
    if version == "cuda" and x.numel() >= 2**31 - 1024:
        raise ValueError(f"x has {x.numel()} elements; elu.cu counts them in 32 bits; split x, or use version triton")


# ----------------------------------------------------------------------------------------------- divergence and fusion


def divergence(n: int = 4096) -> dict[str, Counters]:
    """The same work, with lanes that disagree and with warps that agree. On the CPU, counted."""
    x = torch.ones(n)
    return {
        name: call("elu.cu", "run_diverge", n, by_warp, x, torch.empty(n), counting=True)
        for name, by_warp in (("lanes alternate", 0), ("warps alternate", 1))
    }


def new_output(x: Tensor, poisoned: bool) -> Tensor:
    """Memory for a result like x, poisoned with NaN so that an unwritten element cannot look right."""
    return torch.full_like(x, float("nan")) if poisoned else torch.empty_like(x)


def gelu_in_three(x: Tensor, bias: Tensor, *, counting: bool = False) -> tuple[Tensor, list[Counters]]:
    """gelu(x + bias) by three kernels, and the counters of each (if counting)."""
    t, u, y = (new_output(x, poisoned=counting) for _ in range(3))
    n = x.numel()
    columns = bias.numel()
    counted = [
        call("elu.cu", "run_add_bias", n, columns, x, bias, t, counting=counting),
        call("elu.cu", "run_cdf", n, t, u, counting=counting),
        call("elu.cu", "run_multiply", n, t, u, y, counting=counting),
    ]
    return y, counted


def gelu_in_one(x: Tensor, bias: Tensor, *, counting: bool = False) -> tuple[Tensor, list[Counters]]:
    y = new_output(x, poisoned=counting)
    return y, [call("elu.cu", "run_bias_gelu", x.numel(), bias.numel(), x, bias, y, counting=counting)]


class Traffic(TorchDispatchMode):
    """Counts the bytes of all tensors that PyTorch's operations read and write, as if there were no cache."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.bytes += sum(x.nbytes for x in (*args, result) if isinstance(x, Tensor) and x.dim())
        return result


def numbers_moved(counted: list[Counters], n: int, kernels_with_bias: int = 1) -> float:
    """How many times n elements were read or written, without the bias, which would be cached."""
    sectors = sum(c.load_sectors + c.store_sectors for c in counted) - kernels_with_bias * n // 8
    return sectors * 8 / n


# ----------------------------------------------------------------------------------------------- the check and the demo


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def errors(x: Tensor, alpha: float, run: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Errors of y and dx, each over the error of F.elu in the same precision, all against float64.

    The comparison is with PyTorch's in-place ELU, which also takes the gradient from the output.
    """
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    results = []
    for which in ("float64", "PyTorch's", "ours"):
        leaf = (x.double() if which == "float64" else x).detach().requires_grad_()
        y = run(leaf) if which == "ours" else F.elu(leaf * 1, alpha, inplace=which == "PyTorch's")
        y.backward(dy.to(y))
        assert leaf.grad is not None
        results.append((y.detach().double(), leaf.grad.double()))
    want, theirs, ours = results
    floor = torch.finfo(x.dtype).eps / 8  # PyTorch may be exact by chance
    pairs = []
    for i in range(2):
        scale = rms(want[i])
        pairs.append(rms(ours[i] - want[i]) / max(rms(theirs[i] - want[i]), floor * scale, 1e-30))
    return pairs[0], pairs[1]


def show_compiled(device: str) -> None:
    """Print the code that torch.compile generates for the forward and the backward of `elu_eager`."""
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(4096, device=device, requires_grad=True)

    def both() -> None:
        torch.compile(elu_eager)(x, 1.0).sum().backward()

    _, sources = run_and_get_code(both)
    print("\n\n".join(sources))


def main() -> int:
    about = "ELU as eager PyTorch, compiled, in Triton and in CUDA."
    parser = Parser(prog="elu.py", description=about, allow_abbrev=False)
    parser.add_argument("--size", type=int, default=5003, help="elements; 5003 by default")
    parser.add_argument("--alpha", type=float, default=1.3)
    parser.add_argument("--compile", action="store_true", help="check torch.compile too")
    parser.add_argument("--show", action="store_true", help="print what torch.compile generates, and end")
    options = parser.parse_args()
    if options.size < 1:
        parser.error(f"--size {options.size} must be at least 1")
    if not 0 <= options.alpha <= 1e30:
        parser.error(f"--alpha {options.alpha} must be 0 or more, and finite in float32")
    given = [f"--{name}" for name in ("size", "alpha", "compile") if getattr(options, name) != parser.get_default(name)]
    if options.show and given:
        parser.error(f"--show prints the code and ends; leave out {' '.join(given)}")
    if int(os.environ.get("RANK", 0)) != 0:
        return 0  # a kernel uses one device; under torchrun only rank 0 runs it
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if options.show:
            show_compiled(device)
            return 0
        return demo(options.size, options.alpha, device, options.compile or device == "cuda")
    except CudaError as error:
        parser.error(str(error))


def demo(size: int, alpha: float, device: str, with_compile: bool) -> int:
    wrong = []

    def hold(what: str, value: float, right: bool, remark: str = "") -> None:
        print(f"{what:<44}{value:>10.3f}   {remark}")
        if not right:
            wrong.append(f"{what} is {value:.4g}; {remark}")

    x = 4 * torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)
    for version in VERSIONS:
        if version == "compile" and not with_compile:
            continue
        y_error, dx_error = errors(x, alpha, partial(elu, alpha=alpha, version=version))
        hold(f"{version}: error of y over F.elu's", y_error, y_error <= 2, "2 at most")
        hold(f"{version}: error of dx over F.elu's", dx_error, dx_error <= 2, "2 at most")
    with Traffic() as traffic, torch.no_grad():
        elu_eager(x, alpha)
    hold("eager: bytes moved / element", traffic.bytes / size, traffic.bytes == 42 * size, "predicted 42; fused: 8")
    if device == "cpu":
        for name, counted in divergence().items():
            ways = counted.paths / counted.path_requests
            predicted = 2 if name == "lanes alternate" else 1
            hold(f"paths a warp goes, {name}", ways, ways == predicted, f"predicted {predicted}")
        fields = torch.randn(64, 64)
        bias = torch.randn(64)
        want = F.gelu(fields.double() + bias.double())
        for name, run, predicted in (("three kernels", gelu_in_three, 7), ("one kernel", gelu_in_one, 2)):
            y, moved = run(fields, bias, counting=True)
            hold(f"bias + GELU in {name}: error", rms(y - want), rms(y - want) <= 1e-6, "1e-6 at most")
            times = numbers_moved(moved, fields.numel())
            hold(f"bias + GELU in {name}: numbers moved / n", times, times == predicted, f"predicted {predicted}")
        print("CUDA and Triton ran on the CPU: what was counted holds on a GPU as well, and nothing here is a time.")
    print("\n".join(wrong) or "PASS")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
