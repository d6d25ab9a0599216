"""fp8 on a GPU: quantise in one pass over memory, and multiply on fp8 tensor cores with a scale for every 128 terms.

Problem. fp8.py defines what a recipe computes. Done op by op, quantising reads and writes a tensor five
times, which costs more than the faster matmul saves. And few libraries have a matmul with a scale per tile.

Idea. Each program of the first kernel loads a 128 x 128 tile of x into registers, finds the largest element
of each row, of each column, or of the full tile, divides, rounds and writes 8 bits. It reads x once. For
matmuls that sum over rows it also transposes the tile in registers, and an operand of two matmuls is written
in both forms from one read (`quantize_both`, `cast`):

     x [M, K], 16 bits                     q [M, K], 8 bits, or [K, M]        s, fp32
    +-----+-----+                         +-----+-----+                       1 x 128:    [M, K/128]
    | 128 |     |  -> amax, 1/s, round -> |     |     |                       128 x 1:    [M/128, K]
    +-----+-----+                         +-----+-----+                       128 x 128:  [M/128, K/128]

The other is a tiled matmul whose inner loop is 128 terms long. The tensor core sums those with its own,
limited precision; then the partial sum is scaled and added to fp32 registers on the CUDA cores. One
multiplication does two things: it applies the scales of the tile, and it moves the sum out of the tensor core
before it is too long (2412.19437, section 3.3.2 and figure 7).

Why transpose x? Hopper's fp8 instructions need both operands with the summed dimension contiguous in memory.
Dgrad sums over rows of W, Wgrad over rows of dy and x, so backward needs transposed copies, of 1 byte each.

Few launches. The host needs tens of microseconds for each kernel and each PyTorch operation that it launches,
and a layer of 4096 x 4096 takes a millisecond. So a kernel also does what could be an operation after it:
programs combine their maxima by an atomic maximum, a scale is computed where it is used, and the largest
element of all, by which fp8.py finds an infinity, is stored as a by-product.

Traffic, for x [M, K] in bf16: 2 M K read, M K written, and 4 M K / 128 of scales. By the data sheet of an
H200, 4.8 TB/s and 1979 TFLOP/s of fp8, a tensor of 8192 x 8192 takes 42 us and the matmul of two such 0.56
ms: quantising five operands is not free.

Run it:
    python fp8_kernels.py                                    on a CPU: Triton's interpreter, tiny sizes; else the GPU
    torchrun --nproc_per_node 2 fp8_kernels.py               each rank checks a tensor of its own
The last line is PASS, or the script exits with 1 and says which number is off. bench_fp8.py --gpu measures.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch

if find_spec("triton") is None:
    sys.exit("this needs Triton, which is not installed: it is for Linux, or WSL on Windows; macOS has none")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.distributed as dist
import triton
import triton.language as tl
from _precision_demo import OneLineParser, Report, launch
from formats import OF_DTYPE, TILE, Block, Quantized, amax_of, e4m3, emulated_matmul, transpose
from formats import quantize as reference_quantize
from torch import Tensor
from triton.runtime.jit import JITFunction

if triton.knobs.runtime.interpret:  # if PyTorch has imported Triton before, its own functions compile
    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            setattr(tl.standard, name, triton.jit(function.fn))
            if getattr(tl, name, None) is function:
                setattr(tl, name, getattr(tl.standard, name))

GIVEN = 0  # the source of quantize_kernel's scales
PER_ROW = 1
PER_COLUMN = 2
PER_TILE = 3
INTERPRETED = triton.knobs.runtime.interpret
MODES = {(1, TILE): PER_ROW, (TILE, 1): PER_COLUMN, (TILE, TILE): PER_TILE}


def refusal(device: torch.device | str) -> str:
    """Why these kernels cannot run on this GPU, in one line without advice; "" if they can.

    Before 8.9 (Ada) a GPU has no fp8 units, and Triton no e4m3. Ada has both, but these kernels do not target it.
    """
    have = torch.cuda.get_device_capability(device)
    if have < (9, 0):
        name = torch.cuda.get_device_name(device)
        return f"fp8 on {name}: the kernels are for Hopper (capability 9.0) or later, not {have[0]}.{have[1]}"
    return ""


def on_its_gpu(function: Callable) -> Callable:
    """Kernels start on the current device. So let it be that of the first argument."""

    @functools.wraps(function)
    def there(x: Tensor | Quantized, *rest, **options):
        with torch.cuda.device_of(x.values if isinstance(x, Quantized) else x):
            return function(x, *rest, **options)

    return there


# ------------------------------------------------------------------------------------------------------ quantisation


@triton.jit
def magnitude(x):
    """|x|, where NaN counts as infinite, because Triton's maximum ignores NaN silently."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def round_by_hand(x, mantissa: tl.constexpr, smallest):
    """x to the nearest value with so many bits of mantissa, ties to even, still in fp32. For Triton's interpreter,
    whose cast to fp8 does not carry into the exponent (124 becomes 64, not 128) unless nothing is rounded."""
    drop: tl.constexpr = 23 - mantissa
    bits = x.to(tl.int32, bitcast=True)
    bits += (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)  # half of the last place, and the tie to even
    normal = ((bits >> drop) << drop).to(tl.float32, bitcast=True)
    shift = smallest * 12582912.0  # 1.5 · 2^23 of the smallest: adding it drops finer bits
    return tl.where(tl.abs(x) < smallest * (1 << mantissa), (x + shift) - shift, normal)


@triton.jit
def saturated(scaled, largest, smallest, MANTISSA: tl.constexpr, BY_HAND: tl.constexpr):
    """`scaled`, clamped to the range of the format, so that only a cast to it is left."""
    # A given scale may be too small for x, so saturate; but the minimum of NaN and 448 is 448, and NaN must stay.
    clamped = tl.minimum(tl.maximum(scaled, -largest), largest)
    if BY_HAND:
        clamped = round_by_hand(clamped, MANTISSA, smallest)
    return tl.where(scaled == scaled, clamped, scaled)


@triton.jit
def scale_of_amax(amax, largest):
    """The same as formats.scale_of, for an amax that is not NaN."""
    return tl.where(amax > 0, tl.maximum(amax / largest, 1.1754943508222875e-38), 1.0)


@triton.jit
def amax_kernel(x, out, count, SIZE: tl.constexpr):
    """out[0] = the largest of itself and all |x|. Programs may run in any order: it changes no maximum."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    peak = tl.max(magnitude(tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)), 0)
    tl.atomic_max(out, peak, sem="relaxed")


# Most values of a history are not aligned to 16 bytes; Triton need not compile again for the aligned ones.
@triton.jit(do_not_specialize_on_alignment=["given", "note"])
def quantize_kernel(
    x, q, turned, s, given, note, rows, columns, x_row, q_row, q_column, s_row, s_column, largest, smallest,
    MODE: tl.constexpr, BOTH: tl.constexpr, MANTISSA: tl.constexpr, BY_HAND: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] to 8 bits, one SIZE x SIZE tile per program. The strides of q decide whether it is
    transposed; BOTH also writes the transpose, into `turned` [columns, rows]. `given`: the amax, in mode 0.
    `note`, if given, becomes the largest of itself and all |x|."""
    tile_r = tl.program_id(0)
    tile_c = tl.program_id(1)
    r = tile_r.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    c = tile_c.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    value = tl.load(x + r[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32)  # [SIZE, SIZE]
    if note is not None:
        tl.atomic_max(note, tl.max(tl.max(magnitude(value), axis=1), axis=0), sem="relaxed")
    # --- exercise 10.37: amax and scale of each row, of each column, or of the whole piece ---
    if MODE == 0:
        scale = scale_of_amax(tl.load(given), largest)
        tl.store(s, scale, mask=tile_r + tile_c == 0)  # the same in all programs
        scaled = value / scale
    elif MODE == 1:
        amax = tl.max(magnitude(value), axis=1)
        scale = tl.where(amax > 0, tl.maximum(amax / largest, 1.1754943508222875e-38), 1.0)
        tl.store(s + r * s_row + tile_c * s_column, scale, mask=r < rows)
        scaled = value / scale[:, None]
    elif MODE == 2:
        amax = tl.max(magnitude(value), axis=0)
        scale = tl.where(amax > 0, tl.maximum(amax / largest, 1.1754943508222875e-38), 1.0)
        tl.store(s + tile_r * s_row + c * s_column, scale, mask=c < columns)
        scaled = value / scale[None, :]
    else:
        amax = tl.max(tl.max(magnitude(value), axis=1), axis=0)
        scale = tl.where(amax > 0, tl.maximum(amax / largest, 1.1754943508222875e-38), 1.0)
        tl.store(s + tile_r * s_row + tile_c * s_column, scale)
        scaled = value / scale
    # --- end exercise ---
    result = saturated(scaled, largest, smallest, MANTISSA, BY_HAND).to(q.dtype.element_ty)
    tl.store(q + r[:, None] * q_row + c[None, :] * q_column, result, mask=inside)
    if BOTH:
        there = (c[:, None] < columns) & (r[None, :] < rows)
        tl.store(turned + c[:, None] * rows + r[None, :], tl.trans(result), mask=there)


@on_its_gpu
def amax(x: Tensor) -> Tensor:
    """The largest |x| as [1, 1] in fp32; infinite if x has NaN."""
    x = x.contiguous()
    size = 8192
    out = torch.zeros(1, 1, dtype=torch.float32, device=x.device)
    amax_kernel[(triton.cdiv(x.numel(), size),)](x, out, x.numel(), SIZE=size)
    return out


@on_its_gpu
def run_quantize(
    x: Tensor,
    dtype: torch.dtype,
    scale: Tensor,
    mode: int,
    turned: bool = False,
    both: bool = False,
    given: Tensor | None = None,
    note: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch; returns q [R, C]. If `turned`, its memory layout is [C, R], so that its transpose is
    contiguous. With `both` the second result is in that layout."""
    x = x.contiguous()
    rows, columns = x.shape
    memory = torch.empty((columns, rows) if turned else (rows, columns), dtype=dtype, device=x.device)
    q = memory.T if turned else memory
    second = torch.empty((columns, rows), dtype=dtype, device=x.device) if both else memory
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    strides = (x.stride(0), *q.stride(), *scale.stride())
    form = OF_DTYPE[dtype]
    quantize_kernel[grid](
        x, q, second, scale, given, note, rows, columns, *strides, form.max, form.smallest,
        MODE=mode, BOTH=both, MANTISSA=form.mantissa, BY_HAND=INTERPRETED, SIZE=TILE, num_warps=8,
    )  # fmt: skip
    return q, second.T if both else q


def cast(x: Tensor, dtype: torch.dtype, amax: Tensor, note: Tensor | None = None) -> tuple[Quantized, Quantized]:
    """x [R, C] in fp8 with one scale, from a known amax [1, 1]; larger elements saturate. Twice: the second has the
    memory layout [C, R]. `note` [1, 1] becomes the largest of itself and all |x|, from the same read."""
    scale = torch.empty(1, 1, dtype=torch.float32, device=x.device)
    q, turned = run_quantize(x, dtype, scale, GIVEN, both=True, given=amax, note=note)
    return Quantized(q, scale, (0, 0)), Quantized(turned, scale, (0, 0))


def quantize(x: Tensor, dtype: torch.dtype, block: Block) -> Quantized:
    """x [R, C] in fp8 with a scale for each 1 x 128, 128 x 1 or 128 x 128."""
    shape = (triton.cdiv(x.shape[0], block[0]), triton.cdiv(x.shape[1], block[1]))
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    return Quantized(run_quantize(x, dtype, scale, MODES[block], block == (TILE, 1))[0], scale, block)


# ----------------------------------------------------------------------------------------- both orientations at once


@triton.jit
def peaks_kernel(x, peaks, rows, columns, x_row, SIZE: tl.constexpr):
    """peaks[:rows] = the largest |x| of each row, or the old value if larger; peaks[rows:] of columns."""
    tile_r = tl.program_id(0)
    tile_c = tl.program_id(1)
    r = tile_r.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    c = tile_c.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    value = magnitude(tl.load(x + r[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32))
    tl.atomic_max(peaks + r, tl.max(value, axis=1), mask=r < rows, sem="relaxed")
    tl.atomic_max(peaks + rows + c, tl.max(value, axis=0), mask=c < columns, sem="relaxed")


@triton.jit
def both_kernel(
    x, along, across, s_along, s_across, peaks, note, rows, columns, x_row, sl_row, sl_tile, sc_tile, largest, smallest,
    GIVEN: tl.constexpr, MANTISSA: tl.constexpr, BY_HAND: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """x [rows, columns] to 8 bits twice, from one read: `along` [rows, columns], scaled by rows for a sum over columns,
    and `across` [columns, rows], scaled by columns and transposed, for a sum over rows. Scales are for tiles
    of SIZE, or, if GIVEN, for full rows and columns, whose largest elements are in `peaks`: then sl_tile and
    sc_tile are 0. `note`, if given, becomes the largest of itself and all |x|."""
    tile_r = tl.program_id(0)
    tile_c = tl.program_id(1)
    r = tile_r.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    c = tile_c.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    value = tl.load(x + r[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32)  # [SIZE, SIZE]
    new_r = r < rows  # scales that this program stores
    new_c = c < columns
    if GIVEN:
        peak_r = tl.load(peaks + r, mask=new_r, other=0.0)
        peak_c = tl.load(peaks + rows + c, mask=new_c, other=0.0)
        new_r = new_r & (tile_c == 0)
        new_c = new_c & (tile_r == 0)  # once per scale
    else:
        size = magnitude(value)
        peak_r = tl.max(size, axis=1)
        peak_c = tl.max(size, axis=0)
    by_row = scale_of_amax(peak_r, largest)
    by_column = scale_of_amax(peak_c, largest)
    tl.store(s_along + r * sl_row + tile_c * sl_tile, by_row, mask=new_r)
    tl.store(s_across + tile_r * sc_tile + c, by_column, mask=new_c)
    if note is not None:
        tl.atomic_max(note, tl.max(peak_r, axis=0), sem="relaxed")
    first = saturated(value / by_row[:, None], largest, smallest, MANTISSA, BY_HAND).to(along.dtype.element_ty)
    tl.store(along + r[:, None] * columns + c[None, :], first, mask=inside)
    second = saturated(value / by_column[None, :], largest, smallest, MANTISSA, BY_HAND).to(across.dtype.element_ty)
    turned = (c[:, None] < columns) & (r[None, :] < rows)
    tl.store(across + c[:, None] * rows + r[None, :], tl.trans(second), mask=turned)


@on_its_gpu
def quantize_both(
    x: Tensor, dtype: torch.dtype, block: Block, note: Tensor | None = None
) -> tuple[Quantized, Quantized]:
    """x [R, C] in fp8 as `quantize(x, dtype, block)` and `quantize(x, dtype, block[::-1])`, for `block` (1, 128),
    (128, 128) or (1, 0), full rows. The second has the memory layout [C, R]; for (128, 128) it is the
    transposed first. `note` [1, 1], if given, becomes the largest of itself and all |x|.

    Bytes, for x in 16 bits: tiles read 2 R C and write 2 R C, where two calls read 4 R C. Full rows and
    columns span several tiles, so for their largest elements x is read once more. Scales add 4 bytes each.
    """
    x = x.contiguous()
    rows, columns = x.shape
    form = OF_DTYPE[dtype]
    tiles_r = triton.cdiv(rows, TILE)
    tiles_c = triton.cdiv(columns, TILE)
    if block == (TILE, TILE):
        scale = torch.empty(tiles_r, tiles_c, dtype=torch.float32, device=x.device)
        q, turned = run_quantize(x, dtype, scale, PER_TILE, both=True, note=note)
        return Quantized(q, scale, block), Quantized(turned, scale, block)
    peaks = None
    if given := block == (1, 0):
        peaks = torch.zeros(rows + columns, dtype=torch.float32, device=x.device)
        peaks_kernel[(tiles_r, tiles_c)](x, peaks, rows, columns, x.stride(0), SIZE=TILE, num_warps=8)
        s_along = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
        s_across = torch.empty(1, columns, dtype=torch.float32, device=x.device)
    elif block == (1, TILE):
        # Memory layout [tiles, R], for the CUDA kernel: the scales of many rows for one step are contiguous.
        s_along = torch.empty(tiles_c, rows, dtype=torch.float32, device=x.device).T
        s_across = torch.empty(tiles_r, columns, dtype=torch.float32, device=x.device)
    else:
        raise ValueError(f"block {block} has no second orientation here; use (1, {TILE}), ({TILE}, {TILE}) or (1, 0)")
    along = torch.empty(rows, columns, dtype=dtype, device=x.device)
    across = torch.empty(columns, rows, dtype=dtype, device=x.device)
    strides = (x.stride(0), s_along.stride(0), 0 if given else s_along.stride(1), 0 if given else columns)
    both_kernel[(tiles_r, tiles_c)](
        x, along, across, s_along, s_across, peaks, note, rows, columns, *strides, form.max, form.smallest,
        GIVEN=given, MANTISSA=form.mantissa, BY_HAND=INTERPRETED, SIZE=TILE, num_warps=8,
    )  # fmt: skip
    return Quantized(along, s_along, block), Quantized(across.T, s_across, block[::-1])


# ---------------------------------------------------------------------------------------------------------- products


@triton.jit
def transpose_kernel(x, out, rows, columns, SIZE: tl.constexpr):
    """out [columns, rows] = x [rows, columns]ᵀ, of one byte each."""
    r = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    c = tl.program_id(1).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + r[:, None] * columns + c[None, :], mask=(r[:, None] < rows) & (c[None, :] < columns))
    tl.store(out + c[:, None] * rows + r[None, :], tl.trans(value), mask=(c[:, None] < columns) & (r[None, :] < rows))


@triton.jit
def block_matmul_kernel(
    a, b, out, s_a, s_b, M, N, K, sa_row, sa_column, sb_row, sb_column,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [M, N] = a [M, K] b [N, K]ᵀ with scales of 128 columns and A_ROWS or B_ROWS rows each, 1 or 128.

    Programs are numbered so that GROUP rows of tiles run together, and what they read of b stays in L2.
    """
    program = tl.program_id(0)
    down = tl.cdiv(M, SIZE)
    across = tl.cdiv(N, SIZE)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    m = (first + program % height).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    n = (program % (GROUP * across) // height).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    k = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    # --- exercise 10.38: 128 terms on the tensor core, then a scale and an fp32 sum ---
    for tile in range(0, tl.cdiv(K, SIZE)):
        at = tile * SIZE + k
        left = tl.load(a + m[:, None] * K + at[None, :], mask=(m[:, None] < M) & (at[None, :] < K), other=0.0)
        right = tl.load(b + n[:, None] * K + at[None, :], mask=(n[:, None] < N) & (at[None, :] < K), other=0.0)
        scale_a = tl.load(s_a + m // A_ROWS * sa_row + tile * sa_column, mask=m < M, other=0.0)
        scale_b = tl.load(s_b + n // B_ROWS * sb_row + tile * sb_column, mask=n < N, other=0.0)
        total += tl.dot(left, tl.trans(right)) * scale_a[:, None] * scale_b[None, :]
    # --- end exercise ---
    tl.store(
        out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N)
    )


@on_its_gpu
def rows_of(values: Tensor) -> Tensor:
    """values [R, C] of one byte, contiguous: unchanged, or transposed by the kernel."""
    if values.is_contiguous():
        return values
    if not values.T.is_contiguous():
        return values.contiguous()
    source = values.T.view(torch.uint8)  # [C, R]
    out = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    grid = (triton.cdiv(source.shape[0], TILE), triton.cdiv(source.shape[1], TILE))
    transpose_kernel[grid](source, out, *source.shape, SIZE=TILE, num_warps=8)
    return out.view(values.dtype)


@on_its_gpu
def block_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a [M, K] b [N, K]ᵀ -> [M, N], both with scales for 128 terms of the sum."""
    left = rows_of(a.values)
    right = rows_of(b.values)
    M, K, N = *left.shape, right.shape[0]
    out = torch.empty(M, N, dtype=dtype, device=left.device)
    strides = (*a.scale.stride(), *b.scale.stride())
    block_matmul_kernel[(triton.cdiv(M, TILE) * triton.cdiv(N, TILE),)](
        left, right, out, a.scale, b.scale, M, N, K, *strides,
        A_ROWS=a.block[0], B_ROWS=b.block[0], SIZE=TILE, GROUP=8, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out


def scaled_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a bᵀ on fp8 tensor cores: cuBLAS through torch for one scale per tensor or row, `block_matmul` for tiles."""
    if a.block[1] == TILE:
        return block_matmul(a, b, dtype)
    left = rows_of(a.values)
    right = rows_of(b.values).t()  # b as [K, N] whose columns are contiguous
    per_tensor = a.block == (0, 0)
    kind = dtype if per_tensor and dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.bfloat16
    scale_a, scale_b = (a.scale.view(()), b.scale.view(())) if per_tensor else (a.scale, b.scale.t())
    # Fast accumulation stays in the tensor core for the full sum. Transformer Engine uses it only for Fprop.
    fast = a.values.dtype == b.values.dtype == e4m3 and per_tensor
    return torch._scaled_mm(
        left, right, scale_a=scale_a.contiguous(), scale_b=scale_b.contiguous(), out_dtype=kind, use_fast_accum=fast
    ).to(dtype)


# -------------------------------------------------------------------------------------------------------------- demo


def demo(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    report = Report(group)
    size = 320 if device.type == "cpu" else 2064  # neither a multiple of 128
    report.title(f"{size} x {size - 48}, {'Triton interpreter' if device.type == 'cpu' else 'GPU'}")
    generator = torch.Generator().manual_seed(report.rank)
    x = (
        torch.randn(size, size - 48, generator=generator).to(device)
        * torch.logspace(-3, 3, size, device=device)[:, None]
    )
    w = torch.randn(192, size - 48, generator=generator).to(device)
    report.add("amax", amax_of(x, (0, 0)).item(), amax(x).item())
    for block in MODES:
        got = quantize(x, e4m3, block)
        want = reference_quantize(x, e4m3, block)
        # Neither division is IEEE's on a GPU: Triton's `/` is div.full.f32, right to 2 units in the last place, and
        # PyTorch multiplies by a reciprocal, right to 1.5. Together they differ by less than 4. Exact division
        # (tl.div_rn) would be slow without a benefit, because the matmul uses the stored scale.
        apart = (got.scale.view(torch.int32) - want.scale.view(torch.int32)).abs().max().item()
        limit = 0 if device.type == "cpu" else 4
        where = f"scales of {block[0]} x {block[1]}: apart, in units of the last place"
        report.add(where, f"<= {limit}", apart, apart <= limit)
        # A quotient that differs by one bit may be on the other side of a tie.
        differ = (got.values.float() != want.values.float()).float().mean().item()
        report.add("  elements that differ", "<= 0.1 %", f"{differ:.3%}", differ <= 1e-3)
        if block[1] == TILE:
            other = quantize(w, e4m3, (TILE, TILE))
            y = block_matmul(got, other, torch.float32)
            exact = emulated_matmul(got, other, torch.float32)
            error = ((y - exact).norm() / exact.norm()).item()
            limit = 1e-5 if device.type == "cpu" else 1e-2  # tensor cores sum the 128 terms with fewer bits
            report.add("  matmul against fp32 sums", f"<= {limit}", f"{error:.1e}", error <= limit)
    for block in ((1, TILE), (1, 0)):
        wanted = [reference_quantize(x, e4m3, shape) for shape in (block, block[::-1])]
        pairs = list(zip(quantize_both(x, e4m3, block), wanted, strict=True))
        differ = max((a.values.float() != b.values.float()).float().mean().item() for a, b in pairs)
        what = "tiles" if block[1] else "whole rows and columns"
        report.add(f"both forms at once, {what}: elements that differ", "<= 0.1 %", f"{differ:.3%}", differ <= 1e-3)
    turned = transpose(quantize(x, e4m3, (TILE, 1)))
    report.add("128 x 1 lies in memory as Wgrad wants it", True, turned.values.is_contiguous())
    return report.finish()


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.parse_args()
    if torch.cuda.is_available() and (reason := refusal("cuda")):
        parser.error(f"{reason}; with CUDA_VISIBLE_DEVICES= they run in Triton's interpreter")
    launch(demo)


if __name__ == "__main__":
    main()
