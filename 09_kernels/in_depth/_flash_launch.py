"""From the tensors of a caller to the kernels of flash_kernels.py: checks, addresses, sizes of tiles."""

from typing import NamedTuple

import torch
from _interpreter import INTERPRETED, triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OLD = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)  # needs some more registers on Hopper


class Tiles(NamedTuple):
    """Tiling of one kernel: R rows and C columns of a tile, warps of a program, tiles in flight (stages)."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


class Plan(NamedTuple):
    """The tiles of forward, of dq alone and of dk, dv (and dq); and whether Hopper's copy engine (TMA) fetches them."""

    forward: Tiles
    dq: Tiles
    dkdv: Tiles
    tma: bool
    five: bool = True  # does backward in five matmuls fit the registers?


def plan_for(D: int, dtype: torch.dtype, hopper: bool) -> Plan:
    """Tiles by head dim, for shared memory and registers of a Hopper GPU (227 KiB per program) or older.

    Larger tiles reuse their loads more often, until the sums of a program no longer fit its registers: [R, W]
    in forward and dq, twice [C, W] in dk, dv. bench_flash_kernels.py --gpu tries others. On an H200 those of
    the forward at D = 64 and 128 were a quarter faster than [128, 128] by 8 warps, although at D = 128 they
    leave some 112 bytes on the stack: for the masked tiles, not in the loop over the others.
    """
    if INTERPRETED:  # small, so that short sequences have many tiles
        return Plan(Tiles(32, 16), Tiles(32, 16), Tiles(16, 32), tma=True)
    if dtype == torch.float32:  # exact matmuls use no tensor cores: all is in registers
        # Of the sizes tried, those without stack in ptxas: sm_80 and sm_90, Triton 3.6 and 3.7.
        if D <= 64:
            across = Tiles(32, 32, 4 if D <= 32 else 8, 1)
            return Plan(across, across, Tiles(16, 16, 4, 1), tma=False)
        if D <= 128:
            down = Tiles(16, 16, 4, 1) if hopper else Tiles(32, 16, 8, 1)
            return Plan(Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1), down, tma=False)
        down = Tiles(16, 32, 8, 2) if hopper else Tiles(16, 16, 8, 3)
        return Plan(Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), down, tma=False)
    if D <= 64:
        if hopper:
            backward = Tiles(32 if OLD and D <= 32 else 64, 128, 8, 2 if OLD or D <= 32 else 3)
            return Plan(Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3), backward, tma=True)
        warps = 4 if D <= 32 else 8  # as in fp32, sizes that leave nothing on the stack
        return Plan(Tiles(128, 64, 4, 3), Tiles(64, 64, warps, 3), Tiles(16, 64, warps, 1), tma=False)
    if D <= 128:
        if hopper:
            backward = Tiles(32, 128, 8, 3) if OLD else Tiles(64, 128, 8, 2)
            return Plan(Tiles(128, 64, 4, 2), Tiles(128, 64, 8, 2), backward, tma=True)
        return Plan(Tiles(128, 32, 8, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 2), tma=False, five=False)
    if hopper:
        return Plan(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(16 if OLD else 32, 64, 8, 2), tma=True)
    return Plan(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1), tma=False, five=False)


def fit(x: Tensor, tokens: int, tma: bool) -> tuple[Tensor, int, int, int, int]:
    """x [B, S, N, D] as (address, D, three strides). Slices are read in place if D is contiguous.

    The copy engine (`tma`) needs strides and address in multiples of 16 bytes, and a tile offsets within 32
    bits. Other tensors are copied first (such as the gradient of `.sum()`, one expanded element).
    """
    walked = [stride for stride, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1]
    unfit = tma and (x.data_ptr() % 16 or any(s == 0 or s * x.itemsize % 16 for s in walked))
    if unfit or x.stride(3) != 1 or x.stride(1) * tokens >= 2**31:
        x = x.clone(memory_format=torch.contiguous_format)
    # The stride of a dimension of size 1 is arbitrary and never used, but also has to be a multiple.
    of_b, of_s, of_n = (stride if size > 1 else 16 for stride, size in zip(x.stride()[:3], x.shape, strict=False))
    return x, x.shape[3], of_b, of_s, of_n


def describe(x: Tensor, tokens: int, tma: bool) -> TensorDescriptor | tuple:
    """x for the kernels: a descriptor of [B, N, S, D], in tiles of `tokens` of one head, or the tuple."""
    x, D, of_b, of_s, of_n = fit(x, tokens, tma)
    if not tma:
        return x, D, of_b, of_s, of_n
    B, S, N = x.shape[:3]
    W = triton.next_power_of_2(D)
    return TensorDescriptor(x, [B, N, S, D], [of_b, of_n, of_s, 1], [1, 1, tokens, W])


def check_head_dim(D: int) -> None:
    """ValueError, in one line, for a head dim without tiles."""
    if not 32 <= D <= 256 or D % 16:
        raise ValueError(f"head dim {D} is no multiple of 16 from 32 to 256; pad q, k and v, or use flash_tiles.py")


def check_inputs(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> None:
    """ValueError, in one line, for what the kernels cannot do."""
    B, S_q, N, D = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {x.device}; move them to one device")
        if x.dtype != q.dtype:
            raise ValueError(f"q is {q.dtype} and {name} {x.dtype}; convert them to one dtype")
        if (x.shape[0], x.shape[3]) != (B, D) or x.shape != k.shape:
            raise ValueError(f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]} do not fit; B and D have to be equal")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; the kernels take float16, bfloat16 and float32 (float64: flash_tiles.py)")
    check_head_dim(D)
    if q.numel() == 0 or k.numel() == 0:
        raise ValueError(f"q {[*q.shape]} and k {[*k.shape]}: an empty tensor has no tile; leave the call out")
    if N % k.shape[2]:
        raise ValueError(f"{N} query heads do not divide among {k.shape[2]} K/V heads; use a divisor")
    if window is not None and window < 1:
        raise ValueError(f"window {window} hides every key; use 1 (the token itself) or more")
    if max(S_q, k.shape[1]) >= 2**29 or B * N * triton.cdiv(max(S_q, k.shape[1]), 16) >= 2**31:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]}: token and program numbers pass 32 bits; split the batch")
    if INTERPRETED:
        if q.dtype == torch.bfloat16:
            raise ValueError("bfloat16 is wrong in Triton's interpreter; use float16 or float32 on a CPU")
    elif q.device.type not in ("cuda", "meta"):
        raise ValueError(
            f"the kernels are compiled for a GPU and q is on {q.device}; move it, or set TRITON_INTERPRET=1"
        )
    elif torch.cuda.is_available() and torch.cuda.get_device_capability(q.get_device() if q.is_cuda else None) < (8, 0):
        raise ValueError(
            f"{torch.cuda.get_device_name()} is older than sm_80, which the kernels need; use flash_tiles.py"
        )


def plan_of(q: Tensor) -> Plan:
    hopper = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] in (9, 10)  # 12: 99 KiB
    return plan_for(q.shape[-1], q.dtype, hopper)


def settings(tiles: Tiles, q: Tensor, window: int | None) -> dict:
    """The compile-time arguments of forward, dq and dkdv."""
    return dict(
        WINDOW=window is not None,
        R=tiles.rows,
        C=tiles.columns,
        W=triton.next_power_of_2(q.shape[-1]),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
