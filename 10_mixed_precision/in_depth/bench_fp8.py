"""fp8: what outliers do to each recipe, what 14 bits do to a long sum, and (--gpu) how fast a real fp8 linear is.

    python 10_mixed_precision/in_depth/bench_fp8.py [--figures]
    python 10_mixed_precision/in_depth/bench_fp8.py --gpu [--out DIR] [--seconds S]       one Hopper GPU
    python 10_mixed_precision/in_depth/bench_fp8.py --gpu --dry --out DIR   the same program on a CPU, with tiny sizes

Both verify first: each recipe's three matmuls against the quantised operands' matmuls, on a GPU the
hardware's against the emulated ones, at one small size. The GPU part writes 10_fp8_speed, the most important
rows first, and starts no row in the last two seconds of --seconds.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.nn.functional as F
from _precision_bench import gpu_options
from _precision_demo import Decoder, loss_sum
from fp8 import RECIPES, Fp8Linear, e4m3, emulated_matmul, quantize, relative, tensor_core_matmul, with_outliers
from harness import predictions
from harness.ceilings import Table, device_here
from harness.figures import write_figure
from harness.report import paired, write_result
from microscaling import MICRO
from torch import Tensor, nn

FIGURES = "10_mixed_precision/figures"
LAYERS = 4  # whose forward and backward passes are timed together; then the step ends, once, as in a model
RUNS = {  # name in the table -> recipe, product
    "block, product in CUDA": ("block", "cuda"),
    "tensor-delayed": ("tensor-delayed", "triton"),
    "tensor": ("tensor", "triton"),
    "row": ("row", "triton"),
    "block, product in Triton": ("block", "triton"),
}
FEW = tuple(RUNS)[:3]
SHAPES = ((16384, 8192), (8192, 4096), (8192, 8192))  # tokens, inputs and outputs
# What the host launches for a layer, forward and backward: kernels of Triton or CUDA, and other operations
# (views count as half). test_fp8_kernels.py counts them. Seconds for each are set so that the first version's
# (9 kernels, 88 operations) add up to the 2.7 ms measured with an H200.
STARTED = {"tensor": (6, 29), "tensor-delayed": (3, 26), "row": (6, 35), "block": (6, 25)}
LAUNCH, OPERATION = 90e-6, 21e-6


def products(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = linear(x, weight)
    y.backward(dy)
    return [y.detach(), x.grad, weight.grad]


def verify(device: str, hardware: bool) -> dict[str, str]:
    """Exits non-zero if a recipe does not match its definition. Returns those of RUNS that a GPU computes
    wrongly, or not at all."""
    torch.manual_seed(0)
    wrong: dict[str, str] = {}
    M, K, N = (512, 2048, 2048) if hardware else (512, 384, 256)  # Triton compiles once
    x, weight, dy = (torch.randn(*s, device=device).bfloat16() for s in ((M, K), (N, K), (M, N)))
    for name, recipe in RECIPES.items():
        linear = Fp8Linear(name, matmul=emulated_matmul)
        got = products(linear, x.double(), weight.double(), dy.double())

        def q(tensor: Tensor, role: str, summed: int, recipe=recipe) -> Tensor:
            dtype = recipe.gradient_dtype if role == "dy" else e4m3
            return quantize(tensor.double(), dtype, recipe.block(role, summed)).dequantize(torch.float64)

        want = [
            q(x, "x", 1) @ q(weight, "w", 1).T,
            q(dy, "dy", 1) @ q(weight, "w", 0),
            q(dy, "dy", 0).T @ q(x, "x", 0),
        ]
        exact = [x.double() @ weight.double().T, dy.double() @ weight.double(), dy.double().T @ x.double()]
        for what, a, b, true in zip(("y", "dx", "dW"), got, want, exact, strict=True):
            if not (relative(a, b) <= 1e-10 and relative(a, true) <= 0.1):
                sys.exit(
                    f"bench_fp8.py: {what} of {name} is off by {relative(a, b):.1e} ({relative(a, true):.3f} exact)"
                )
        for run in [run for run, (of, _) in RUNS.items() if of == name and hardware]:
            try:
                real = products(Fp8Linear(name, device=device, product=RUNS[run][1]), x, weight, dy)
            except (RuntimeError, ValueError) as error:  # the others go on
                wrong[run] = f"{run} cannot be used: {(str(error).strip() or 'no message').splitlines()[0][:120]}"
                continue
            for what, a, b in zip(("y", "dx", "dW"), real, want, strict=True):
                if not relative(a.double(), b) <= 0.02:  # bf16 results, and sums of fewer bits
                    wrong[run] = f"{what} of {run} on the GPU is {relative(a.double(), b):.3f} off fp8.py"
    return wrong


def outliers() -> None:
    """Error of ordinary elements, and of y, as a few features grow."""
    M, K, N = 256, 4096, 256
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) / K**0.5
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        name: lambda x, block=block: quantize(x, e4m3, block).dequantize()
        for name, block in (("tensor", (0, 0)), ("row", (1, 0)), ("block", (1, 128)))
    }
    kinds |= {name: lambda x, kind=MICRO[name]: kind.plain(x).dequantize() for name in ("mxfp8", "nvfp4")}
    rows = []
    for power in range(9):
        factor = 10.0**power
        x, ordinary = with_outliers(M, K, features=6, factor=factor)
        # What the ordinary features contribute to y: the part that an error in them affects.
        rest = x[:, ordinary] @ weight[:, ordinary].T
        here = {name: there_and_back(x)[:, ordinary] for name, there_and_back in kinds.items()}
        row: list[float] = [factor]
        row += [relative(near, x[:, ordinary]) for near in here.values()]
        row += [relative(near @ weight[:, ordinary].T, rest) for near in here.values()]
        rows.append(row)
    columns = [f"{what}: {kind}" for what in ("x", "y") for kind in kinds]
    write_result(
        "10_fp8_outliers",
        "Six of 4096 features are larger than the others by a factor: relative error of the other features",
        ["factor", *columns],
        rows,
        "x: the quantised elements; y: their part of x Wᵀ. tensor, row and block are e4m3. Every row has all six "
        "outliers; at most 6 of its 32 tiles of 128 have one, and at most 6 of its 128 blocks of mxfp8 or 256 of "
        "nvfp4.",
    )


def accumulation() -> None:
    """Sums of K products, of one sign and of random ones: relative error with 14 bits, promoted or not."""
    rows = []
    for K in (128, 512, 1024, 2048, 4096, 8192):
        a, b = (quantize(torch.randn(24, K, generator=torch.Generator().manual_seed(i)).abs(), e4m3) for i in range(2))
        signed = [quantize(torch.randn(24, K, generator=torch.Generator().manual_seed(i)), e4m3) for i in range(2)]
        row: list[float] = [K]
        for pair in ((a, b), signed):
            exact = emulated_matmul(*pair, torch.float64)
            for promote in (0, 128):
                got = tensor_core_matmul(*pair, torch.float64, promote=promote)
                row.append(relative(got, exact))
        rows.append(row)
    write_result(
        "10_fp8_accumulation",
        "Relative error of a product whose sums keep 14 bits, against exact sums of the same fp8 numbers",
        ["K", "one sign, never promoted", "one sign, every 128", "random signs, never", "random signs, every 128"],
        rows,
        "Emulated (tensor_core_matmul), 24 x 24 results; errors are of the norm. DeepSeek-V3 (2412.19437, section "
        "3.3.2) reports nearly 2 % for two random matrices with K = 4096: the largest error of one element, which is "
        "not comparable with these.",
    )


# ---------------------------------------------------------------------------------------------------------------- GPU


class Part(nn.Module):
    """Forward and backward of a linear layer, LAYERS times, and the end of a step, as a function without arguments."""

    def __init__(self, linear: Callable[[Tensor, Tensor], Tensor], tokens: int, size: int, device: str):
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        make = lambda *s: torch.randn(*s, device=device, generator=generator).bfloat16()  # noqa: E731
        self.linear, self.x, self.dy = linear, make(tokens, size).requires_grad_(), make(tokens, size)
        self.weight = nn.Parameter(make(size, size) / size**0.5)

    def step(self) -> None:
        for _ in range(LAYERS):
            self.x.grad = self.weight.grad = None
            self.linear(self.x, self.weight).backward(self.dy)
        if isinstance(self.linear, Fp8Linear):
            self.linear.end_step()


def training_step(linear: Callable[[Tensor, Tensor], Tensor], device: str, dry: bool) -> Callable[[], None]:
    """The chapter's decoder at a size that fills a GPU: forward, backward and AdamW."""
    sizes = dict(hidden=128, heads=2, inner=256, layers=1, sequence=64)
    if not dry:
        sizes = dict(hidden=4096, heads=32, inner=12288, layers=4, sequence=4096)
    model = Decoder(linear, **sizes).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    tokens = torch.randint(256, (2, sizes["sequence"]), device=device)

    def step() -> None:
        loss = loss_sum(model, tokens, tokens) / tokens.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(linear, Fp8Linear):
            linear.end_step()

    return step


def linear_flops(tokens: int, size: int) -> float:
    """Three products, forward and backward."""
    return 3 * 2 * tokens * size * size


def predicted_linear(name: str, tokens: int, size: int) -> float | None:
    """Speedup over bf16, with backward: three matmuls in fp8 and the bytes of quantisation, or the launch
    time of the host if that is longer."""
    gpu = predictions.here()
    flops = linear_flops(tokens, size)
    bf16, fp8 = predictions.product(gpu, flops), predictions.product(gpu, flops, "fp8")
    if bf16 is None or fp8 is None:
        return None
    elements = 2 * (tokens * size) + size * size  # x, dy and the weight; each is quantised for two matmuls
    # Bytes per element: 16 bits read and 8 written twice, along rows and along columns; full rows, and
    # tensors without a history, are read once more first, for their largest elements.
    passes = 2 + 2 if name in ("block", "tensor-delayed") else 2 + 2 + 2
    launches, operations = STARTED[name]
    quantised = predictions.moved(gpu, passes * elements, launches)
    host = launches * LAUNCH + operations * OPERATION
    return bf16 / max(fp8 + (quantised or 0.0), host)


def gpu(dry: bool, out: Path | None, limit: float) -> None:
    end = time.monotonic() + limit
    device, interpreted = device_here().type, bool(os.environ.get("TRITON_INTERPRET"))
    wrong = verify(device, hardware=device == "cuda" and not interpreted)
    repeats = 3 if dry else 9
    # On an emulated GPU the recipes run as in fp8.py: the kernels would be interpreted, which takes minutes.
    where = "cpu" if interpreted else device
    table = Table(
        "10_fp8_speed",
        "Times as fast as bf16: forward and backward, quantisation included",
        ["what", "recipe", "times as fast: median (quartiles)", "predicted"],
        f"A linear layer: {LAYERS} times forward and backward, one after the other, and then the end of the step, in "
        "which the host waits once to look for infinities; against as many in bf16. Predicted from the data sheet: "
        "products in fp8 at 80 % of their rate, and the bytes of quantisation; or what the host needs, "
        f"{LAUNCH * 1e6:.0f} us a kernel and {OPERATION * 1e6:.0f} us an operation, if that is longer."
        + (" A dry run on a CPU: the numbers mean nothing." if dry else ""),
        out,
    )

    def linear_of(run: str) -> Fp8Linear:
        name, product = RUNS[run]
        return Fp8Linear(name, device=where, product=product if where == "cuda" else "triton")

    def row(what: str, run: str, base: Callable[[], None], step: Callable[[], None], expected: float | None) -> None:
        ratio = paired(base, step, repeats=repeats)
        table.add(what, run, ratio, f"{expected:.2f}" if expected else "-")

    def time_left(what: str, run: str) -> bool:
        """Whether one more row, of some two seconds with what is compiled for it, will end in time."""
        if end - time.monotonic() >= 2 or not table.rows:
            return True
        table.notes += f" {what}, {run}: left out for want of time."
        table.write()
        return False

    def linears(runs: tuple[str, ...], shapes: tuple[tuple[int, int], ...]) -> None:
        for tokens, size in shapes:
            base, what = Part(F.linear, tokens, size, device), f"linear {size} x {size}, {tokens} tokens"
            for run in [run for run in runs if run not in wrong]:
                if time_left(what, run):
                    part = Part(linear_of(run), tokens, size, device)
                    row(what, run, base.step, part.step, predicted_linear(RUNS[run][0], tokens, size))
                    del part

    shapes = ((256, 128),) if dry else SHAPES
    linears(FEW, shapes[:2])
    base_step = None
    for run in [run for run in FEW[:2] if run not in wrong and time_left("training step", run)]:
        base_step = base_step or training_step(F.linear, device, dry)
        linear = linear_of(run)
        row("training step", run, base_step, training_step(linear, device, dry), None)
    del base_step
    linears(tuple(RUNS)[3:], shapes[:2])
    linears(tuple(RUNS), shapes[2:])
    if wrong:
        sys.exit(f"bench_fp8.py: {'; '.join(wrong.values())}")


# ------------------------------------------------------------------------------------------------------------ figures


def draw_outliers(axes, result) -> None:
    left, right = axes
    factors = [row[0] for row in result["rows"]]
    for axis, what, title in ((left, "x", "Error of ordinary elements"), (right, "y", "Error of their part of x Wᵀ")):
        for kind, label in (("tensor", "one scale per tensor"), ("row", "one per row"), ("block", "one per 1 x 128"),
                            ("mxfp8", "MXFP8, one per 32"), ("nvfp4", "NVFP4, one per 16")):  # fmt: skip
            column = result["columns"].index(f"{what}: {kind}")
            axis.plot(factors, [row[column] for row in result["rows"]], marker="o", ms=3, label=label)
        axis.set(xscale="log", xlabel="outliers are larger by", ylabel="relative error", title=title, ylim=(0, 1.05))
    left.legend(fontsize=8)


def draw_accumulation(axes, result) -> None:
    for i, name in enumerate(result["columns"][1:], start=1):
        style = dict(color=f"C{(i - 1) // 2}", ls="-" if i % 2 else "--")
        axes.plot(
            [row[0] for row in result["rows"]],
            [row[i] for row in result["rows"]],
            marker="o",
            ms=3,
            label=name,
            **style,
        )
    axes.set(xscale="log", yscale="log", xlabel="K, terms of a sum", ylabel="relative error", title="Sums of 14 bits")
    axes.legend(fontsize=8)


def main() -> None:
    args = gpu_options("--seconds", "--figures")
    if args.gpu:
        gpu(args.dry, args.out, 400.0 if args.seconds is None else args.seconds)
        return
    if not args.figures:
        verify("cpu", hardware=False)
        outliers()
        accumulation()
    write_figure(f"{FIGURES}/outliers.svg", ["10_fp8_outliers"], draw_outliers, shape=(1, 2))
    write_figure(f"{FIGURES}/accumulation.svg", ["10_fp8_accumulation"], draw_accumulation)


if __name__ == "__main__":
    main()
