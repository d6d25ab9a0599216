"""A matmul in 8 bits in CUDA for Hopper: TMA, wgmma, and sums that are promoted every 128 terms.

Problem. The kernel of fp8_kernels.py leaves to Triton which warps load, which multiply and when. The recipe
that it computes, a scale for 1 x 128 elements of A and for 128 x 128 of B, is DeepSeek-V3's. Its speed needs
what Triton cannot express: one group of warps scales and adds a sum while the tensor cores work for another.

Idea. One file of CUDA, fp8_matmul.cu: the last rungs of chapter 09's ladder in 8 bits. A block of 384 threads:

    producer      1 thread     loads tiles of A [128, 128] and B [256, 128] and their scales, as stages become free
    consumer 1    4 warps      rows 0..63      wgmma | promote | wgmma | promote | ...       promote = the CUDA cores
    consumer 2    4 warps      rows 64..127          | wgmma | promote | wgmma | ...

Two thread blocks, one above the other, are a cluster: each loads half of B's tile for both.

Formulas. s counts steps of 128 terms (2412.19437, sections 3.3.2 and 3.5.2):
    part_s [m, n]  = sum over the 128 terms k of step s of A[m, k] B[n, k]       by the tensor core, in about 14 bits
    C [m, n]       = sum over s of part_s [m, n] · sA[m, s] · sB[n, s]           by the CUDA cores, in fp32
The three products of a linear layer: Fprop x [1 x 128] by W [128 x 128], Dgrad dy by Wᵀ the same, Wgrad dyᵀ by xᵀ, both
1 x 128. A may be e4m3 or e5m2. M and N are any, K is a multiple of 16 (TMA needs rows aligned to 16 bytes).
Bytes read from L2 for a block's 128 x 256 results: (128 + 256 / 2) · K, and 4 (in Wgrad 12) · K of scales.

Without a GPU the kernel runs on the CPU, thread by thread, with an accumulator of 14 bits. That shows what it
computes and whether a barrier is missing, but no time. `Fp8Linear("block", device="cuda", product="cuda")` uses it.

    python fp8_matmul.py                                       three products; errors; any order of the threads
    torchrun --nproc_per_node 2 fp8_matmul.py                  each rank multiplies matrices of its own
    python fp8_matmul.py --rows 200 --columns 30 --terms 400
    python fp8_matmul.py --resources                           registers, stack, spills (nvcc, but no GPU)
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _cuda_build import FORWARD, REVERSE, CudaError, ahead, behind, call, library, racing, resources  # noqa: F401
from _precision_demo import OneLineParser, Report, launch
from formats import TILE, Quantized, e4m3, emulated_matmul, quantize, transpose
from torch import Tensor

# Legend: a [M, K] and b [N, K] in 8 bits, out [M, N]; a tile and a step have TILE = 128 rows, columns and terms.
SOURCE = Path(__file__).with_name("fp8_matmul.cu")
KERNEL = "fp8_product"
THREADS = 384
CLUSTER = 256  # rows and columns of a tile of a cluster of two blocks
e5m2 = torch.float8_e5m2
BITS = 14  # of the tensor core's accumulator, where it is emulated


def lines(q: Quantized) -> Tensor:
    """The scales of q [R, K] as TMA needs them: [steps, R rounded up to a multiple of CLUSTER] in fp32, so
    that the scales of 256 rows for one step are contiguous. Where 128 rows share a scale: [steps, blocks].
    Scales that are already in this layout (as from fp8_kernels.py), without padding, are not copied."""
    # --- exercise 10.46: the scales of a step in one line ---
    lacking = -q.scale.shape[0] % CLUSTER if q.block[0] == 1 else 0
    scales = F.pad(q.scale.T, (0, lacking), value=1.0) if lacking else q.scale.T  # [R, steps] -> [steps, R + lacking]
    return scales.float().contiguous()
    # --- end exercise ---


def cuda_matmul(a: Quantized, b: Quantized, dtype: torch.dtype, *, order: int = FORWARD) -> Tensor:
    """a [M, K] b [N, K]ᵀ -> [M, N]; scales of 1 x 128, b's also 128 x 128. `order`: of threads, on the CPU.

    ValueError, in one line, for what the kernel cannot do.
    """
    check(a, b)
    M, K = a.values.shape
    N = b.values.shape[0]
    left = rows_of(a.values)
    right = rows_of(b.values)
    s_a = rows_of(lines(a))
    s_b = rows_of(lines(b))
    out = torch.empty(M, N, dtype=dtype if dtype == torch.bfloat16 else torch.float32, device=left.device)
    kinds = (int(left.dtype == e5m2), int(b.block[0] == TILE), int(out.dtype == torch.bfloat16))
    sizes = (M, N, K, s_a.shape[1], s_b.shape[1])
    call(SOURCE, "run_fp8_matmul", *kinds, *sizes, left, right, s_a, s_b, out, order=order)
    return out.to(dtype)


def rows_of(values: Tensor) -> Tensor:
    """values in contiguous rows, from an address that 16 divides, as TMA needs them."""
    if values.is_cuda and not values.is_contiguous():
        import fp8_kernels

        values = fp8_kernels.rows_of(values)
    values = values.contiguous()
    return values.clone() if values.data_ptr() % 16 else values


def check(a: Quantized, b: Quantized) -> None:
    if a.values.dtype not in (e4m3, e5m2) or b.values.dtype != e4m3:
        raise ValueError(f"fp8 product of {a.values.dtype} and {b.values.dtype}: use e4m3, or e5m2 and e4m3")
    if a.block != (1, TILE) or b.block not in ((1, TILE), (TILE, TILE)):
        raise ValueError(f"fp8 product with scales of {a.block} and {b.block}: use (1, 128), and for b (128, 128) too")
    if a.values.shape[1] != b.values.shape[1]:
        raise ValueError(f"fp8 product of {[*a.values.shape]} and {[*b.values.shape]}: K has to be equal")
    if a.values.shape[1] % 16:
        K = a.values.shape[1]
        raise ValueError(f"fp8 product with K = {K}: no multiple of 16; pad it with zeros to {-(-K // 16) * 16}")
    if 0 in (*a.values.shape, *b.values.shape):
        raise ValueError(f"fp8 product of {[*a.values.shape]} and {[*b.values.shape]}: an empty tensor has no tile")
    if a.values.device != b.values.device:
        raise ValueError(f"fp8 product of tensors on {a.values.device} and {b.values.device}; move them to one device")
    if a.values.device.type != "cpu" and (reason := known_refusal(a.values.device)):
        raise ValueError(reason)


@functools.cache
def known_refusal(device: torch.device) -> str:
    """Cached for all matmuls, because looking for nvcc takes longer than launching the kernel."""
    return refusal(device)


def refusal(device: torch.device | str) -> str:
    """Why the kernel cannot run on this GPU, in one line; "" if it can."""
    if torch.device(device).type != "cuda":
        return f"fp8 product 'cuda' on {device}: it needs a Hopper GPU; leave the argument out for another product"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"fp8 product 'cuda' on {torch.cuda.get_device_name(device)}: no sm_90, and wgmma exists there only"
    if not shutil.which("nvcc"):
        return "fp8 product 'cuda': nvcc, which builds it, is not on the PATH; install the CUDA toolkit"
    return ""


@contextmanager
def accumulator(bits: int) -> Iterator[None]:
    """Set how many bits of a sum the emulated tensor core keeps, up to 18; 0: as many as fp32."""
    if not 0 <= bits <= 18:
        raise ValueError(f"an accumulator of {bits} bits: use 1 to 18, or 0 for fp32")
    lib = library(SOURCE, "cpu", (0, 0))
    lib.set_accumulator_bits(bits)
    try:
        yield
    finally:
        lib.set_accumulator_bits(BITS)


# ----------------------------------------------------------------------------------------------- the check and the demo


def operands(M: int, N: int, K: int, product: str, device: torch.device | str, seed: int = 0) -> list[Quantized]:
    """a [M, K] and b [N, K] as in one of the three matmuls, with scales that differ from block to block."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(R: int) -> Tensor:
        wide = torch.randn(R, K, generator=generator) * torch.logspace(-2, 2, R)[:, None]
        return (wide * torch.logspace(-2, 2, K)).to(device)

    if product == "Wgrad":  # dyᵀ and xᵀ: quantised along tokens, and transposed
        return [transpose(quantize(drawn(R).T.contiguous(), e4m3, (TILE, 1))) for R in (M, N)]
    form = e5m2 if product == "Dgrad, e5m2" else e4m3
    return [quantize(drawn(M), form, (1, TILE)), quantize(drawn(N), e4m3, (TILE, TILE))]


PRODUCTS = ("Fprop", "Dgrad, e5m2", "Wgrad")


def error(got: Tensor, a: Quantized, b: Quantized) -> float:
    """The largest error against the exact matmul of the same 8-bit values, relative to the sum of |terms|."""
    want = emulated_matmul(a, b, torch.float64)
    sizes = emulated_matmul(*(q._replace(values=q.values.double().abs()) for q in (a, b)), torch.float64)
    return ((got.double() - want).abs() / sizes.clamp(min=1e-300)).max().item()


def demo(group: dist.ProcessGroup, device: torch.device, args: argparse.Namespace) -> list[str]:
    report = Report(group)
    report.title(f"[{args.rows}, {args.terms}] by [{args.columns}, {args.terms}] on {device}: errors / sum |terms|")
    on_cpu = device.type == "cpu"
    for product in PRODUCTS:
        a, b = operands(args.rows, args.columns, args.terms, product, device, report.rank)
        out = cuda_matmul(a, b, torch.float32)
        off = error(out, a, b)
        what = f"{product}, {f'sums of {BITS} bits' if on_cpu else 'on tensor cores'}"
        report.add(what, "<= 1e-03", f"{off:.1e}", off <= 1e-3)  # 33 values lose 2^-14, 4 times
        if on_cpu:
            with accumulator(0):
                exact = error(cuda_matmul(a, b, torch.float32), a, b)
            report.add(f"{product}, sums of fp32", "<= 1e-06", f"{exact:.1e}", exact <= 1e-6)
            same = all(torch.equal(out, cuda_matmul(a, b, torch.float32, order=o)) for o in (REVERSE, racing(1)))
            report.add(f"{product}, the same bits in any order of the threads", True, same)
    return report.finish()


def fits() -> list[str]:
    used = resources(SOURCE, "sm_90a")[KERNEL]  # the most demanding of four variants
    print(f"sm_90a: {used.registers} registers a thread, {used.stack} bytes of stack, {used.spills} spilled")
    return [f"{used.stack} bytes of stack, {used.spills} spilled"] * bool(used.stack + used.spills)


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=70, help="M; default %(default)s")
    parser.add_argument("--columns", type=int, default=133, help="N; default %(default)s")
    parser.add_argument("--terms", type=int, default=272, help="K, a multiple of 16; default %(default)s")
    parser.add_argument("--resources", action="store_true", help="what nvcc makes of it for sm_90a; and end")
    args = parser.parse_args()
    for option in ("rows", "columns", "terms"):
        value = getattr(args, option)
        if not 1 <= value <= 65536:
            parser.error(f"--{option} {value} is out of range; use 1 to 65536")
        if args.resources and value != parser.get_default(option):
            parser.error(f"--{option} {value} changes nothing about --resources; leave one of them out")
    if args.terms % 16:
        parser.error(f"--terms {args.terms} is no multiple of 16, as the copy engine's rows are; use one")
    if not args.resources and torch.cuda.is_available() and (reason := refusal("cuda")):
        parser.error(reason)
    try:
        if args.resources:
            wrong = fits()
            print("\n".join(wrong) or "PASS")
            sys.exit(bool(wrong))
        if not torch.cuda.is_available():
            library(SOURCE, "cpu", (0, 0))  # is there a compiler? checked before the group starts
    except CudaError as failed:
        parser.error(str(failed))
    launch(functools.partial(demo, args=args))


if __name__ == "__main__":
    main()
