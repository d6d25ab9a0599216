"""Chapter 9, fused kernels in Triton: read and write each element once, and save only what backward needs.

The problem. Between two matmuls a transformer does cheap arithmetic: a norm, a rotation, a gate. PyTorch runs
it as a row of small kernels, and each of them reads its full input from memory and writes its full output:

    eager     x -> [square] -> x² -> [mean] -> m -> [rsqrt] -> r -> [mul] -> x̂ -> [mul] -> y      memory at every ->
    fused     x -> [   square, mean, rsqrt, mul, mul    ] -> y                                    memory twice

A GPU can do dozens of operations in the time of moving one element (the roofline model, Williams et al.
2009), so such a layer takes as long as its bytes. Fusing saves no arithmetic. It saves memory traffic.

The idea. One program of a Triton kernel takes one row into registers, does everything there, and writes the result:

    rows of x      row 0 -> program 0        BLOCK = the next power of two >= columns; a mask hides the rest
    [rows, cols]   row 1 -> program 1        sums along a row stay inside one program: no communication
                   ...

The backward passes are derived by hand, because autograd sees a kernel as one step. For a row x with n columns:

    softmax   y = exp(x - max x) / sum         dx = y (dy - sum(y dy))
    RMSNorm   x̂ = x r, r = 1/sqrt(mean x² + eps), y = w x̂          (1910.07467)
              dx = r (w dy - x̂ mean(w dy x̂)),  dw = sum over rows of dy x̂
    RoPE      (a, b) -> (a c - b s, b c + a s)  backward is the same with -s, the inverse rotation
    SwiGLU    y = g σ(g) u                      du = dy g σ(g),  dg = dy u σ(g) (1 + g (1 - σ(g)))      (2002.05202)

Bytes moved per element of size e, and bytes saved for backward: `bytes_moved` and `bytes_kept`, exact.

    python fused.py                      every kernel against float64 and PyTorch; ends with PASS
    python fused.py --dtype float16      also float64, and on a GPU bfloat16

Without a GPU the kernels run in Triton's interpreter, on numpy, one program after the other: slow, exact, debuggable.
Shapes: B batch, S sequence, N heads, D head dim, rows = B·S tokens, cols = hidden or intermediate size.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from _fused_demo import demo_of_fused
from _interpreter import INTERPRETED, tl, triton
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_COLS = 16384  # a row has to fit into the registers of one program

# ------------------------------------------------------------------------------------- what every kernel needs


def check(**tensors: Tensor) -> None:
    """ValueError in one line unless the kernels support these tensors: device, dtype, GPU, interpreter."""
    names = list(tensors)
    values = list(tensors.values())
    for name, x in tensors.items():
        if x.device != values[0].device:
            raise ValueError(f"{name} is on {x.device} but {names[0]} on {values[0].device}; move one of them")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {x.dtype}; the kernels take {', '.join(str(d) for d in DTYPES)}")
        if INTERPRETED and x.dtype == torch.bfloat16:  # it truncates where a GPU rounds
            raise ValueError(f"{name} is bfloat16, which Triton's interpreter rounds wrongly; use float32 or a GPU")
    device = values[0].device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(f"{torch.cuda.get_device_name(device)} is older than sm_80, which these kernels need")
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(f"{names[0]} is on {device}, not the current device; call torch.cuda.set_device first")
    if device.type == "cpu" and not INTERPRETED:
        raise ValueError("a tensor on the CPU needs Triton's interpreter; set TRITON_INTERPRET=1 before Python starts")


def as_rows(x: Tensor) -> Tensor:
    """x [..., cols] as [rows, cols] with contiguous rows. A view if possible, otherwise a copy."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def block_of(cols: int, what: str) -> int:
    if not 1 <= cols <= MAX_COLS:
        raise ValueError(f"{what} over {cols} columns: a row must fit into registers, 1 to {MAX_COLS} columns")
    return triton.next_power_of_2(cols)


def warps(block: int) -> int:
    """16 elements per thread: in bf16 two loads of 16 bytes, both in flight before the first is used."""
    return max(1, min(32, block // 512))


def wide(dtype: torch.dtype) -> Any:
    """The dtype of the computation: float32, in which sums over a row are safe; float64 for float64."""
    return tl.float64 if dtype == torch.float64 else tl.float32


# ------------------------------------------------------------------------------------------------------ softmax


def softmax_reference(x: Tensor) -> Tensor:
    """Over the last dimension. A row of only -inf (fully masked) gives zeros; torch.softmax gives NaN."""
    return torch.softmax(x, dim=-1).masked_fill((x == -float("inf")).all(-1, keepdim=True), 0)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, x_stride, cols, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: in a tensor of more than 4 GiB of bf16, row * stride passes 2^31
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=-float("inf")).to(WIDE)
    # --- exercise 9.25: softmax of one row x, in which -inf means "not there"; a row of -inf gives zeros ---
    largest = tl.max(x, 0)
    largest = tl.where(largest == -float("inf"), 0.0, largest)  # otherwise -inf - (-inf) = NaN
    e = tl.exp(x - largest)  # no exponent is above 0: nothing overflows
    total = tl.sum(e, 0)
    y = e / tl.where(total == 0, 1.0, total)
    # --- end exercise ---
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def softmax_backward_kernel(dy_ptr, y_ptr, dx_ptr, dy_stride, cols, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * cols + col, mask=col < cols, other=0.0).to(WIDE)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0).to(WIDE)
    dx = y * (dy - tl.sum(y * dy, 0))
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)


class Softmax(torch.autograd.Function):
    """Saves its output but not its input: the gradient needs only y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = as_rows(x)
        block = block_of(x.shape[-1], "softmax")
        y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        grid = (rows.shape[0],)
        softmax_kernel[grid](rows, y, rows.stride(0), rows.shape[1], wide(x.dtype), block, num_warps=warps(block))
        ctx.save_for_backward(y)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        rows = as_rows(dy)
        block = triton.next_power_of_2(y.shape[1])
        dx = torch.empty_like(y)
        options = dict(num_warps=warps(block))
        softmax_backward_kernel[(y.shape[0],)](rows, y, dx, rows.stride(0), y.shape[1], wide(y.dtype), block, **options)
        return dx.view(dy.shape)


def softmax(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)) over the last dimension, x [..., cols]; a row of -inf gives zeros."""
    check(x=x)
    return Softmax.apply(x)


# ------------------------------------------------------------------------------------------------------ RMSNorm


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, as chapter 1 writes it."""
    wider = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wider * torch.rsqrt(wider.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


# `residual_ptr` may be None: Triton then compiles a kernel without the lines that use it.
@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, y_ptr, inverse_ptr, x_stride, residual_stride, cols,
    eps: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + col, mask=inside, other=0.0)
        x = (x.to(WIDE) + residual.to(WIDE)).to(x.dtype)  # rounded: backward sees the same values
        tl.store(total_ptr + row * cols + col, x, mask=inside)
    x = x.to(WIDE)
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(WIDE)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / cols + eps)  # over cols, not BLOCK: columns beyond are padding
    tl.store(inverse_ptr + row, inverse)
    tl.store(y_ptr + row * cols + col, (x * inverse * weight).to(y_ptr.dtype.element_ty), mask=inside)


# dw sums over rows, which are in different programs. So only a few programs run: each loops over many rows,
# adds their part of dw in registers, and writes one row of partial sums at the end. A second, tiny sum adds
# those. (Atomic additions to one dw would have another order, and other bits, in every run.)
@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, inverse_ptr, dx_ptr, dweight_ptr, dy_stride, dtotal_stride, x_stride,
    rows, cols, WIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < cols
    if BLOCK <= 8192:  # for wider rows 32 warps have no registers for it: it is read for each row
        weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(WIDE)
    dweight = tl.zeros([BLOCK], WIDE)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):  # 2: the next row is in flight
        x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(WIDE)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=inside, other=0.0).to(WIDE)
        inverse = tl.load(inverse_ptr + row)
        if BLOCK > 8192:
            weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(WIDE)
        # --- exercise 9.26: dx of this row, and what the row adds to dw ---
        normalized = x * inverse
        dweight += dy * normalized
        scaled = dy * weight
        # r depends on every x of the row; that is the second term.
        dx = (scaled - normalized * (tl.sum(scaled * normalized, 0) / cols)) * inverse
        # --- end exercise ---
        if dtotal_ptr is not None:  # x + residual also bypassed the norm; add its gradient
            dx += tl.load(dtotal_ptr + row * dtotal_stride + col, mask=inside, other=0.0).to(WIDE)
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + program * cols + col, dweight, mask=inside)


def programs_for(rows: int, block: int, device: torch.device) -> int:
    """As many as a GPU runs at once, if 16 warps (or one program) of 100 registers fit a multiprocessor."""
    if device.type != "cuda":
        return max(1, min(rows, 3))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(rows, processors * max(1, 16 // warps(block))))


class RMSNorm(torch.autograd.Function):
    """Saves x (or x + residual, which the caller also has) and one value per row, not the normalised rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
        x2 = as_rows(x)
        block = block_of(x.shape[-1], "RMSNorm")
        rows, cols = x2.shape
        add = None if residual is None else as_rows(residual)
        total = x2 if add is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # Not a view: autograd would refuse to change it in place, although backward does not need it.
        y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
        inverse = torch.empty(rows, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        rms_norm_kernel[(rows,)](
            x2, add, weight, total, y, inverse, x2.stride(0), 0 if add is None else add.stride(0), cols,
            eps, wide(x.dtype), block, num_warps=warps(block),
        )  # fmt: skip
        ctx.save_for_backward(total, weight, inverse)
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)  # an unused output has gradient None, not a tensor of zeros
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        total, weight, inverse = ctx.saved_tensors
        if dy is None:  # only x + residual was used
            return dtotal, dtotal, None, None
        x = as_rows(total)
        rows, cols = x.shape
        dy2 = as_rows(dy)
        extra = None if dtotal is None else as_rows(dtotal)
        block = triton.next_power_of_2(cols)
        programs = programs_for(rows, block, x.device)
        stages = 2 if block <= 8192 else 1
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dweight = torch.empty(programs, cols, dtype=inverse.dtype, device=x.device)
        rms_norm_backward_kernel[(programs,)](
            dy2, extra, x, weight, inverse, dx, dweight, dy2.stride(0), 0 if extra is None else extra.stride(0),
            x.stride(0), rows, cols, wide(x.dtype), block, stages, num_warps=warps(block),
        )  # fmt: skip
        dx = dx.view(ctx.shape)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight.sum(0).to(weight.dtype), None


def check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}: one number for each column")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight; x [..., cols], weight [cols]. Computed in float32 and rounded once."""
    check(x=x, weight=weight)
    check_weight(x, weight)
    return RMSNorm.apply(x, None, weight.contiguous(), eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the sum is already in registers when the norm begins."""
    check(x=x, residual=residual, weight=weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(f"x {list(x.shape)} {x.dtype} and residual {list(residual.shape)} {residual.dtype} differ")
    check_weight(x, weight)
    return RMSNorm.apply(x, residual, weight.contiguous(), eps)


# --------------------------------------------------------------------------------------------------------- RoPE


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+D/2}) of every head, as chapter 1 writes it."""
    cos = cos[..., None, :]
    sin = sin[..., None, :]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


# One program rotates HEADS heads of one token: they share its angles, which are read once for all.
@triton.jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, batch_stride, token_stride, head_stride, tokens, angles, heads, half,
    BACKWARD: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # of [B·S]
    head = (tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, HALF)
    table = (row % angles) * half + i  # cos and sin have S rows, one for all samples, or B·S rows
    cos = tl.load(cos_ptr + table, mask=i < half, other=0.0).to(WIDE)[None, :]
    sin = tl.load(sin_ptr + table, mask=i < half, other=0.0).to(WIDE)[None, :]
    if BACKWARD:
        sin = -sin
    inside = (head < heads) & (i < half)[None, :]
    at = x_ptr + (row // tokens) * batch_stride + (row % tokens) * token_stride + head * head_stride + i[None, :]
    a = tl.load(at, mask=inside, other=0.0).to(WIDE)  # [HEADS, HALF]
    b = tl.load(at + half, mask=inside, other=0.0).to(WIDE)
    out = y_ptr + (row * heads + head) * 2 * half + i[None, :]
    tl.store(out, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(out + half, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """x [B, S, N, D], cos and sin [S, D/2] or [B, S, D/2], contiguous."""
    if x.stride(3) != 1:
        x = x.contiguous()
    B, S, N, D = x.shape
    half = triton.next_power_of_2(D // 2)
    heads = min(triton.next_power_of_2(N), max(1, 4096 // half))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rope_kernel[(B * S, triton.cdiv(N, heads))](
        x, cos, sin, y, *x.stride()[:3], S, cos.numel() // (D // 2), N, D // 2,
        backward, wide(x.dtype), heads, half, num_warps=warps(2 * heads * half),
    )  # fmt: skip
    return y


class RoPE(torch.autograd.Function):
    """Saves the two tables but not x: a rotation is linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return rotate(dy, *ctx.saved_tensors, backward=True), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+D/2}) of every head; x [B, S, N, D], cos and sin [S, D/2] or [B, S, D/2]."""
    check(x=x, cos=cos, sin=sin)
    B, S, _, D = x.shape
    if D % 2 or D > 512:
        raise ValueError(f"head dim {D} must be even, as RoPE turns pairs, and at most 512")
    if cos.shape != sin.shape or cos.shape not in ((S, D // 2), (B, S, D // 2), (1, S, D // 2)):
        raise ValueError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} must be [S, D/2] = {[S, D // 2]}, or [B, S, D/2]"
        )
    return RoPE.apply(x, cos.contiguous(), sin.contiguous())


# ------------------------------------------------------------------------------------------------------- SwiGLU


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) with an exponent that is never above 0."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def swiglu_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, cols, blocks, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    col = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=col < cols, other=0.0).to(WIDE)
    up = tl.load(up_ptr + row * up_stride + col, mask=col < cols, other=0.0).to(WIDE)
    y = gate * sigmoid(gate) * up
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def swiglu_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, dy_stride, gate_stride, up_stride, cols, blocks,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    col = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = col < cols
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=inside, other=0.0).to(WIDE)
    up = tl.load(up_ptr + row * up_stride + col, mask=inside, other=0.0).to(WIDE)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=inside, other=0.0).to(WIDE)
    # --- exercise 9.27: the two gradients; sigmoid(gate) is computed again, not kept ---
    s = sigmoid(gate)
    dup = dy * gate * s
    dgate = dy * up * s * (1.0 + gate * (1.0 - s))
    # --- end exercise ---
    tl.store(dgate_ptr + row * cols + col, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * cols + col, dup.to(dup_ptr.dtype.element_ty), mask=inside)


def elementwise(*tensors: Tensor) -> tuple[list[Tensor], tuple[int, ...], tuple[int, ...]]:
    """The tensors as rows (if all are contiguous: as one long row), (cols, blocks, BLOCK), and the grid."""
    if all(x.is_contiguous() for x in tensors):
        tensors = tuple(x.view(1, -1) for x in tensors)
    views = [as_rows(x) for x in tensors]
    rows, cols = views[0].shape
    block = min(2048, triton.next_power_of_2(max(cols, 1)))
    blocks = triton.cdiv(cols, block)
    return views, (cols, blocks, block), (rows * blocks,)


class SwiGLU(torch.autograd.Function):
    """Saves gate and up, the inputs; PyTorch's kernels also save silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        (g, u), (cols, blocks, block), grid = elementwise(gate, up)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        swiglu_kernel[grid](g, u, y, g.stride(0), u.stride(0), cols, blocks, wide(gate.dtype), block, num_warps=4)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (d, g, u), (cols, blocks, block), grid = elementwise(dy, gate, up)
        dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        swiglu_backward_kernel[grid](
            d, g, u, dgate, dup, d.stride(0), g.stride(0), u.stride(0), cols, blocks,
            wide(gate.dtype), block, num_warps=4,
        )  # fmt: skip
        return dgate, dup


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, elementwise; both [..., F] of one shape and dtype."""
    check(gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {list(gate.shape)} {gate.dtype} and up {list(up.shape)} {up.dtype} differ")
    return SwiGLU.apply(gate, up)


# --------------------------------------------------------------------------------------------- formulas and demo

# Tensors of the size of x read and written by (forward, backward), and saved for backward. Weights, tables
# and the value per row are small in comparison.
MOVED = {"softmax": (2, 3), "rms_norm": (2, 3), "add_rms_norm": (4, 4), "rope": (2, 2), "swiglu": (3, 5)}
KEPT = {"softmax": 1, "rms_norm": 1, "add_rms_norm": 1, "rope": 0, "swiglu": 2}


def bytes_moved(name: str, numel: int, size: int) -> tuple[int, int]:
    """Bytes that forward and backward must move, for x of `numel` elements of `size` bytes."""
    forward, backward = MOVED[name]
    return forward * numel * size, backward * numel * size


def bytes_kept(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that autograd saves, without weights. RoPE saves its tables, shared by all layers of a model."""
    numel = torch.Size(shape).numel()
    rows = torch.Size(shape[:-1]).numel()
    per_row = torch.promote_types(dtype, torch.float32).itemsize if name.endswith("rms_norm") else 0
    tables = 2 * shape[1] * (shape[3] // 2) * 4 if name == "rope" else 0
    return KEPT[name] * numel * dtype.itemsize + rows * per_row + tables


FUSED = dict(softmax=softmax, rms_norm=rms_norm, add_rms_norm=add_rms_norm, rope=rope, swiglu=swiglu)
REFERENCE = dict(
    softmax=softmax_reference,
    rms_norm=rms_norm_reference,
    add_rms_norm=add_rms_norm_reference,
    rope=rope_reference,
    swiglu=swiglu_reference,
)

if __name__ == "__main__":
    sys.exit(demo_of_fused(FUSED, REFERENCE, bytes_kept))
