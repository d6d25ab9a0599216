"""The output layer and its loss: peak memory with and without the logits; on a GPU also time, with V = 128k.

    python 09_kernels/in_depth/bench_fused_loss.py   on any machine: peak memory, and the figure
    python 09_kernels/in_depth/bench_fused_loss.py --figures                  only the figure, from the results
    python 09_kernels/in_depth/bench_fused_loss.py --gpu   verify on the GPU, then measure time and memory
    python 09_kernels/in_depth/bench_fused_loss.py --gpu --dry --out DIR      the same program at tiny sizes: no results

First loss and gradients of small inputs must be about as exact as PyTorch's; only then is anything measured. On a GPU
every version must also agree with PyTorch's at the shape at which it is timed.
"""

import gc
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from _bench_options import bench_options
from _fused_demo import DEVICE, allowed, compare, loss_inputs
from _interpreter import INTERPRETED
from bench_fused import far_apart
from bench_matmul_ladder import copied, timed
from fused_loss import (
    FUSED,
    REFERENCE,
    cross_entropy,
    cross_entropy_reference,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from harness import predictions
from harness.ceilings import Table, device_here
from harness.figures import write_figure
from harness.meter import peak_memory
from harness.report import write_result
from torch import Tensor

VOCAB, HIDDEN, CHUNK, TOKENS = 4096, 64, 128, (128, 256, 512, 1024)


def verify(dtypes: list[torch.dtype], vocab: int) -> None:
    """Exit unless both kernels are right."""
    for dtype in dtypes:
        for name, (tensors, rest) in loss_inputs(60, vocab, 32).items():
            call = partial(FUSED[name], chunk=25) if name == "linear_cross_entropy" else FUSED[name]
            error, theirs, _, _ = compare(call, REFERENCE[name], tensors, rest, dtype)
            if not error <= allowed(theirs, dtype):
                sys.exit(f"{name} of {vocab} words in {dtype}: error {error:.1e}, PyTorch's own is {theirs:.1e}")


def predicted_peak(tokens: int) -> int:
    """float32. Forward: a chunk of logits, d weight, its next matmul, d hidden; per token a label of 8 bytes,
    loss, m and s. Backward: both gradients twice.
    """
    weight, hidden = VOCAB * HIDDEN, tokens * HIDDEN
    return 4 * max(CHUNK * VOCAB + 2 * weight + hidden + 5 * tokens, 2 * weight + 2 * hidden)


def peaks(folder: Path | None) -> None:
    rows = []
    for tokens in TOKENS:
        tensors, rest = loss_inputs(tokens, VOCAB, HIDDEN)["linear_cross_entropy"]
        measured = []
        for call in (linear_cross_entropy_reference, partial(linear_cross_entropy, chunk=CHUNK)):
            leaves = [x.to(DEVICE, torch.float32).requires_grad_() for x in tensors]
            with peak_memory() as memory:
                loss = call(*leaves, *(x.to(DEVICE) for x in rest))
                gc.collect()  # Triton's interpreter holds a kernel's last arguments in reference cycles
                loss.backward()
            measured.append(memory.peak)
        predicted = predicted_peak(tokens)
        if not abs(measured[1] - predicted) <= 256:  # scalars
            sys.exit(f"{tokens} tokens: the peak is {measured[1]} bytes, predicted {predicted}")
        rows.append([tokens, *measured, predicted, measured[1] / measured[0]])
    write_result(
        "09_fused_loss",
        f"Peak bytes of the output layer and its loss, forward and backward: {VOCAB:,} words, hidden {HIDDEN}, float32",
        ["tokens", "PyTorch", f"fused, chunks of {CHUNK} tokens", "predicted", "fused / PyTorch"],
        rows,
        "Weights and inputs, which both have, are left out. Exact counts of allocations, the same anywhere.",
        folder,
    )


def draw(axes, result) -> None:
    tokens = [row[0] for row in result["rows"]]
    for column, style in ((1, "o-"), (2, "s-"), (3, "k:")):
        axes.plot(tokens, [row[column] / 2**20 for row in result["rows"]], style, label=result["columns"][column])
    axes.set(xlabel="tokens", ylabel="peak, MiB", ylim=(0, None))
    axes.legend()


def time_all(dry: bool, folder: Path | None) -> None:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    tokens, vocab, hidden = (64, 500, 32) if dry else (32768, 128256, 4096)
    device, gpu = device_here(), predictions.here()
    seconds, copy = timed(dry, 5), copied(dry)
    labels = torch.randint(vocab, (tokens,), device=device)
    precision = str(dtype).removeprefix("torch.")
    layer(dry, folder, dtype, tokens, vocab, hidden, labels)  # the target table first

    rows_of_logits = tokens if dry else 8192
    logits = torch.randn(rows_of_logits, vocab, device=device, dtype=dtype).requires_grad_()
    some = labels[:rows_of_logits]
    table = Table(
        "09_cross_entropy_gpu",
        f"Cross-entropy of {rows_of_logits:,} rows of {vocab:,} logits, {precision}",
        [
            "version",
            "forward, ms",
            "of the copy bandwidth",
            "backward, ms",
            "of the copy bandwidth ",
            *predictions.COLUMNS,
        ],
        f"Counted as one reading of the logits forward, a reading and a writing backward; a copy moves "
        f"{copy / 1e12:.3g} TB/s. Cold L2 cache, median of 5. Predicted for both together, from those bytes.",
        folder,
    )
    want: list[Tensor] = []  # of the first
    versions = {"eager": cross_entropy_reference, "fused": cross_entropy}
    if not dry:
        versions["torch.compile"] = torch.compile(cross_entropy_reference, dynamic=False)
    for name, call in versions.items():
        loss = call(logits, some)

        def backward(loss=loss, logits=logits):
            return torch.autograd.grad(loss, logits, retain_graph=True)

        want = agreed(name, [loss.detach(), *backward()], want)
        with torch.no_grad():
            forward = seconds(partial(call, logits, some))
        times = forward, seconds(backward)
        shares = [f"{k * logits.nbytes / t / copy:.0%}" for k, t in zip((1, 2), times, strict=True)]
        expected = predictions.moved(gpu, 3 * logits.nbytes, 2) if name == "fused" else None
        cells = predictions.cells(expected, sum(times))
        table.add(name, times[0] * 1e3, shares[0], times[1] * 1e3, shares[1], *cells)
        del loss, backward


def agreed(name: str, got: list[Tensor], want: list[Tensor]) -> list[Tensor]:
    """`want`, or what the first version got. Exit unless the others agree with it."""
    if why := far_apart(got, want or got):
        sys.exit(f"{name}: {why}")
    return want or got


def layer(
    dry: bool, folder: Path | None, dtype: torch.dtype, tokens: int, vocab: int, hidden: int, labels: Tensor
) -> None:
    """The output layer and its loss: time, and peak memory without weights and inputs."""
    device, seconds, gpu = labels.device, timed(dry, 5), predictions.here()
    h = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, device=device, dtype=dtype) / hidden**0.5).requires_grad_()
    table = Table(
        "09_fused_loss_gpu",
        f"The output layer and its loss: {tokens:,} tokens, {vocab:,} words, hidden {hidden:,}, forward and backward",
        ["version", "ms", "peak GiB beyond inputs", "time / PyTorch", "peak / PyTorch", *predictions.COLUMNS],
        f"{str(dtype).removeprefix('torch.')}; median of 5. Predicted: three products of the layer at 80 % of the data "
        "sheet's rate, and the logits of every chunk written, read twice, written again and read twice.",
        folder,
    )
    first: list[float] = []
    want: list[Tensor] = []
    versions = {"PyTorch": linear_cross_entropy_reference}
    for chunk in (16, 32) if dry else (2048, 4096, 1024, 8192):
        versions[f"fused, {chunk} tokens at a time"] = partial(linear_cross_entropy, chunk=chunk)
    if not dry:
        versions["torch.compile"] = torch.compile(linear_cross_entropy_reference, dynamic=False)
    for name, call in versions.items():

        def step(call=call):
            loss = call(h, weight, labels) / tokens
            return [loss.detach(), *torch.autograd.grad(loss, (h, weight))]

        want = agreed(name, step(), want)
        took, peak = seconds(step), 0
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        first = first or [took, peak]
        products = predictions.product(gpu, 3 * 2 * tokens * vocab * hidden)
        logits = predictions.moved(gpu, 6 * tokens * vocab * dtype.itemsize)
        expected = products + logits if name.startswith("fused") and products and logits else None
        cells = [took / first[0], peak / first[1] if first[1] else 0.0, *predictions.cells(expected, took)]
        table.add(name, took * 1e3, peak / 2**30, *cells)


def main() -> None:
    about = "Measure the output layer and its loss."
    options = bench_options(about, "--gpu", "--dry", "--out", "--figures", counts_into_out=True)
    if not options.figures:
        dtypes = (
            [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16]
        )  # on a GPU the tests cover the others
        for vocab in (500, 9000):  # in one block, and in two
            verify(dtypes, vocab)
        if options.gpu:
            return time_all(options.dry, options.out)
        peaks(options.out)
    if not options.out:
        write_figure("09_kernels/figures/fused_loss.svg", ["09_fused_loss"], draw)
    return None


if __name__ == "__main__":
    main()
