"""Facts about the kernels of fp8_kernels.py, compiled for sm_90 without a GPU. TRITON_INTERPRET=0."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: int) -> dict[str, int]:
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    # At run time Triton specializes on pointers and these strides being multiples of 16; so also here.
    even = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in signature
        if signature[name][0] == "*" and name not in ("given", "note")  # which may be columns of a history
    }
    for name in ("x_row", "q_row", "K", "N", "rows", "columns"):
        if name in signature:
            even[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    binary = triton.compile(ASTSource(kernel, types, constexprs=constants, attrs=even), target=HOPPER, options=options)
    ptx = binary.asm["ptx"]
    return {
        "shared": binary.metadata.shared,
        "wgmma_e4m3": len(re.findall(r"wgmma\.mma_async\S*e4m3", ptx)),
        "cvt_e4m3": len(re.findall(r"cvt\S*e4m3x2", ptx)),
    }


def facts(kernels: Any) -> dict[str, dict[str, int]]:
    """By kernel: bytes of shared memory, and counts of fp8 instructions."""
    whole = dict.fromkeys(("rows", "columns", "x_row", "q_row", "q_column", "s_row", "s_column"), "i32")
    pointers = {"x": "*bf16", "q": "*fp8e4nv", "turned": "*fp8e4nv", "s": "*fp32"}
    quantize = {**pointers, **whole, "largest": "fp32", "smallest": "fp32"}
    flags = {"MANTISSA": 3, "BY_HAND": False, "SIZE": 128}
    made = {}
    for (rows, columns), mode in kernels.MODES.items():
        constants = {"MODE": mode, "BOTH": False, "given": None, "note": None, **flags}
        made[f"quantize {rows} x {columns}"] = compiled(kernels.quantize_kernel, quantize, constants, num_warps=8)
    noted = quantize | {"note": "*fp32"}
    for what, mode, types, more in (
        ("both: 128 x 128", kernels.PER_TILE, noted, {"given": None}),
        ("both: one scale", kernels.GIVEN, quantize | {"given": "*fp32"}, {"note": None}),
        ("both: a scale of steps before", kernels.GIVEN, noted | {"given": "*fp32"}, {}),
    ):
        constants = {"MODE": mode, "BOTH": True, **more, **flags}
        made[what] = compiled(kernels.quantize_kernel, types, constants, num_warps=8)
    made["amax"] = compiled(kernels.amax_kernel, {"x": "*bf16", "out": "*fp32", "count": "i32"}, {"SIZE": 8192})
    whole = dict.fromkeys(("rows", "columns", "x_row", "sl_row", "sl_tile", "sc_tile"), "i32")
    pointers = {"x": "*bf16", "along": "*fp8e4nv", "across": "*fp8e4nv", "s_along": "*fp32", "s_across": "*fp32"}
    both = {**pointers, "note": "*fp32", **whole, "largest": "fp32", "smallest": "fp32"}
    for given, what in ((False, "1 x 128 and 128 x 1"), (True, "whole rows and columns")):
        types, constants = (both | {"peaks": "*fp32"}, {}) if given else (both, {"peaks": None})
        made[f"both: {what}"] = compiled(
            kernels.both_kernel, types, {"GIVEN": given, **constants, **flags}, num_warps=8
        )
    peaks = {"x": "*bf16", "peaks": "*fp32", **dict.fromkeys(("rows", "columns", "x_row"), "i32")}
    made["peaks of rows and columns"] = compiled(kernels.peaks_kernel, peaks, {"SIZE": 128}, num_warps=8)
    sizes = dict.fromkeys(("M", "N", "K", "sa_row", "sa_column", "sb_row", "sb_column"), "i32")
    matmul = {"a": "*fp8e4nv", "b": "*fp8e4nv", "out": "*bf16", "s_a": "*fp32", "s_b": "*fp32", **sizes}
    constants = {"A_ROWS": 1, "B_ROWS": 128, "SIZE": 128, "GROUP": 8}
    made["block_matmul"] = compiled(kernels.block_matmul_kernel, matmul, constants, num_warps=8, num_stages=4)
    return made
