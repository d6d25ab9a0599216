"""FlashAttention in CUDA for Hopper, forward: warps that only load, and warps that only compute.

Problem. On a Hopper GPU the tensor cores are so fast that all other work shows. A warp that requests the next
tile, waits for it, and only then issues the matmul, leaves them idle. They are also idle while it computes
exponentials, of which a multiprocessor does 16 per cycle against 2048 multiply-adds. FlashAttention-3
specialises the warps. Its speed has two more sources: two groups of warps alternate at the tensor cores, and
a group computes the softmax of one tile while the values of the previous tile are still being multiplied.
(Triton specialises the warps of a loop with `warp_specialize=True`, but cannot express either of the two.)

Idea. One CUDA file, flash_attention_cuda.cu, with the instructions of ptx.h (rungs 9 and 10 of the ladder)
and ptx_attention.h. A block of 384 threads processes 128 queries of one head, and then another 128: there is
one block per multiprocessor, which takes query tiles until none is left. The copy engine loads the next tile
and writes the previous one while the tensor cores are busy:

    producer      1 warp       requests tiles of 128 keys and values when stages are free
    consumer 0    4 warps      queries 0..63       turn | softmax | turn | softmax | ...
    consumer 1    4 warps      queries 64..127          | turn | softmax | turn | ...         turn = the tensor cores

Forward only; gradients are from flash_kernels.py on a GPU and flash_tiles.py on a CPU, with this output and
log-sum-exp. bf16, head dims 64 and 128, causal (with any offset) or all keys, grouped K/V heads.

Formulas: in flash_tiles.py. FLOPs 4 · B · N · S² · D, half if causal. Loaded bytes, tiles of 128:
    Q once; K and V once per query tile that sees them               `sectors` below; counted on the CPU
Paper: FlashAttention-3, Shah et al. 2024 (arXiv 2407.08608), algorithm 2 and section 3.1.

Without a GPU the kernel runs on the CPU, thread by thread (cuda_on_cpu.h), in any order of its warps. That
shows the results, missing barriers, and the turns at the tensor cores. It shows no time.

    python flash_attention_cuda.py                      errors against float64, in three orders of the threads
    python flash_attention_cuda.py --head-dim 128 --seq 200 --keys 150
    python flash_attention_cuda.py --resources          registers, stack, shared memory (needs nvcc, but no GPU)
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import sys

import torch
from _cuda import FORWARD, REVERSE, CudaError, call, library, racing, resources
from _interpreter import INTERPRETED
from flash_kernels import triton_backward
from flash_tiles import OneLineParser, Version, band, explicit_attention, tiled_backward
from torch import Tensor

# Legend of shapes: B batch, S sequence (S_q queries, S_k keys), N query heads, N_kv key/value heads, D head dim.
SOURCE = "flash_attention_cuda.cu"
ROWS = 128
KEYS = 128
THREADS = 384
HEAD_DIMS = (64, 128)


def cuda_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    offset: int = 0,
    dtype: torch.dtype | None = torch.bfloat16,
    order: int = FORWARD,
) -> tuple[Tensor, Tensor]:
    """out [B, S_q, N, D] in bf16 and LSE [B, N, S_q] in fp32; `order`: of the threads on the CPU.

    ValueError, in one line, for what the kernel cannot do.
    """
    check(q, k, v, window, dtype)
    B, S_q, N, D = q.shape
    S_k, N_kv = k.shape[1:3]
    last = band(S_q, S_k, causal, None, offset)[1]  # query i sees the keys up to i + last
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(B, N, S_q, dtype=torch.float32, device=q.device)
    given = [fit(x) for x in (q, k, v)]
    sizes = (D, B, S_q, S_k, N, N_kv, last, 1 / math.sqrt(D))
    call(SOURCE, "run_attention", *sizes, *given, out, lse, order=order)
    return out, lse


def fit(x: Tensor) -> Tensor:
    """x if contiguous at an address that 16 divides, as the copy engine requires; otherwise a copy."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def check(q: Tensor, k: Tensor, v: Tensor, window: int | None, dtype: torch.dtype | None) -> None:
    B, S_q, N, D = q.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {x.dtype}; the CUDA kernel takes bfloat16; cast it, or use flash_kernels.py")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {x.device}; move them to one device")
    if dtype != torch.bfloat16:
        raise ValueError(f"dtype {dtype}: the CUDA kernel writes bfloat16; use flash_kernels.py for another output")
    if D not in HEAD_DIMS:
        raise ValueError(f"head dim {D} is not among the CUDA kernel's, 64 and 128; use flash_kernels.py")
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (B, D):
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]} do not fit; B and D have to be equal")
    if q.numel() == 0 or k.numel() == 0:
        raise ValueError(f"q {[*q.shape]} and k {[*k.shape]}: an empty tensor has no tile; leave the call out")
    if N % k.shape[2]:
        raise ValueError(f"{N} query heads do not divide among {k.shape[2]} K/V heads; use a divisor")
    if window is not None:
        raise ValueError(f"window {window}: the CUDA kernel knows causal and offset only; use flash_kernels.py")
    if max(S_q, k.shape[1]) >= 2**29 or B * N * -(-S_q // ROWS) >= 2**30:
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]}: token and tile numbers pass 32 bits; split the batch")
    if q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
        raise ValueError(f"{torch.cuda.get_device_name(q.device)} is no sm_90, and wgmma exists there only")
    if not q.is_cuda and q.device.type != "cpu":
        raise ValueError(f"q is on {q.device}; the CUDA kernel runs on a GPU, or emulated on the CPU")


def cuda_backward(*arguments, **options) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from this kernel's out and LSE: in Triton, or if interpreted (wrong in bf16) in tiles."""
    return (tiled_backward if INTERPRETED else triton_backward)(*arguments, **options)


CUDA = Version(cuda_forward, cuda_backward)  # flash_attention(..., version=CUDA)


def tiles_of_keys(S_q: int, S_k: int, last: int) -> list[int]:
    """For each tile of queries, the number of its tiles of keys."""
    # --- exercise 9.42: the tiles of keys that a tile of queries needs ---
    ends = (min(min(row + ROWS, S_q) + last, S_k) for row in range(0, S_q, ROWS))
    return [max(0, -(-end // KEYS)) for end in ends]
    # --- end exercise ---


def sectors(B: int, S_q: int, S_k: int, N: int, D: int, last: int) -> int:
    """Requested sectors of 32 bytes: Q if a tile sees any key, K and V for each such tile."""
    tokens = 0
    for row, tiles in zip(range(0, S_q, ROWS), tiles_of_keys(S_q, S_k, last), strict=True):
        tokens += (min(ROWS, S_q - row) if tiles else 0) + 2 * min(tiles * KEYS, S_k)
    return B * N * tokens * D * 2 // 32


def turns(source: str = SOURCE) -> list[int]:
    """The consumer, 0 or 1, of each turn at the tensor cores in the last launch (on the CPU)."""
    return recorded("attention_turns", source)


def tiles_taken() -> list[int]:
    """For each tile of queries, in order of blocks and within a block: the number of its tiles of keys."""
    return recorded("attention_tiles", SOURCE)


def recorded(what: str, source: str) -> list[int]:
    lib = library(source, "cpu", (0, 0))
    numbers = (ctypes.c_int * 65536)()
    return list(numbers[: getattr(lib, what)(numbers, len(numbers))])


# ----------------------------------------------------------------------------------------------- the check and the demo


def errors(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int) -> tuple[float, float]:
    """Largest errors of out (relative to its largest element) and LSE against float64. NaN if any."""
    exact = [x.double() for x in (q, k, v)]
    want = explicit_attention(*exact, causal=causal, offset=offset)
    rows = exact[0].unflatten(2, (k.shape[2], -1))  # [B, S_q, N, D] -> [B, S_q, N_kv, G, D]
    scores = torch.einsum("bshgd,bthd->bhgst", rows, exact[1]).flatten(1, 2) / math.sqrt(q.shape[-1])
    i, j = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    hidden = j > i[:, None] + band(len(i), len(j), causal, None, offset)[1]
    want_lse = scores.masked_fill(hidden, -math.inf).logsumexp(-1)  # [B, N, S_q]
    far = (lse.double() - want_lse).abs().masked_fill(lse.double() == want_lse, 0.0)  # -inf - -inf would be NaN
    largest = want.abs().max().clamp(min=1e-30)
    return ((out.double() - want).abs().max() / largest).item(), far.max().item()


def inputs(B: int, S_q: int, S_k: int, N: int, N_kv: int, D: int, device: str, seed: int = 0) -> list[Tensor]:
    """q, k and v in bf16, each inside a field of NaN, so that reads beyond them show."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in ((B, S_q, N, D), (B, S_k, N_kv, D), (B, S_k, N_kv, D)):
        size = math.prod(shape)
        field = torch.full((size + 256 * D,), math.nan)
        field[128 * D : 128 * D + size] = torch.randn(size, generator=generator)
        made.append(field.to(device, torch.bfloat16)[128 * D : 128 * D + size].view(shape))
    return made


def main() -> int:
    parser = OneLineParser(description="Attention in CUDA for Hopper, forward.", allow_abbrev=False)
    parser.add_argument("--seq", type=int, default=140, help="queries; default %(default)s")
    parser.add_argument("--keys", type=int, default=140, help="keys; default %(default)s")
    parser.add_argument("--heads", type=int, default=2, help="query heads; default %(default)s")
    parser.add_argument("--kv-heads", type=int, default=1, help="key/value heads; default %(default)s")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, default=64, help="default %(default)s")
    parser.add_argument("--resources", action="store_true", help="only print the registers and stack")
    args = parser.parse_args()
    names = ("seq", "keys", "heads", "kv_heads", "head_dim")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) != parser.get_default(name)]
    if args.resources and given:
        parser.error(f"--resources says what nvcc makes of the kernel and ends; leave out {' '.join(given)}")
    for option in names[:-1]:
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)} is too small; use 1 or more")
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}; use a divisor of it")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        parser.error(f"{torch.cuda.get_device_name()} is no sm_90, and wgmma exists there only; hide it to emulate")
    if int(os.environ.get("RANK", 0)) != 0:
        return 0  # a kernel uses one device; under torchrun only rank 0 runs it
    try:
        wrong = fits() if args.resources else demo(args, device)
    except (CudaError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(wrong) or "PASS")
    return int(bool(wrong))


def fits(source: str = SOURCE, kernel: str = "attention_forward") -> list[str]:
    used = resources(source, "sm_90a")[kernel]  # the maximum over both head dims
    print(f"sm_90a: {used.registers} registers a thread, {used.stack} bytes of stack, {used.spills} spilled")
    said = f"{used.stack} bytes of stack, {used.spills} spilled: numbers in local memory"
    return [said] * bool(used.stack + used.spills)


def demo(args: argparse.Namespace, device: str) -> list[str]:
    wrong = []
    given = inputs(1, args.seq, args.keys, args.heads, args.kv_heads, args.head_dim, device)
    print(f"{args.seq} queries, {args.keys} keys, {args.heads}/{args.kv_heads} heads of {args.head_dim} on {device}")
    print(f"{'':<24}{'error':>9}{'of LSE':>9}{'any order':>11}{'sectors: predicted':>20}{'counted':>9}")
    for name, mask in {
        "causal": dict(causal=True, offset=0),
        "all keys": dict(causal=False, offset=0),
        "rows before any key": dict(causal=True, offset=-(args.seq // 2)),
    }.items():
        orders = (FORWARD, REVERSE, racing(1)) if device == "cpu" else (FORWARD,)
        outs = [cuda_forward(*given, **mask, order=order) for order in orders]
        same = all(torch.equal(x, y) for other in outs[1:] for x, y in zip(outs[0], other, strict=True))
        error, off = errors(*outs[0], *given, **mask)
        last = band(args.seq, args.keys, mask["causal"], None, mask["offset"])[1]
        predicted = sectors(1, args.seq, args.keys, args.heads, args.head_dim, last)
        counted = "on a CPU"
        if device == "cpu":
            counted = count(given, last)
            if counted != predicted:
                wrong.append(f"{name}: {counted} sectors, not {predicted}")
        print(f"{name:<24}{error:>9.1e}{off:>9.1e}{'yes' if same else 'NO':>11}{predicted:>20}{counted:>9}")
        if not error <= 8e-3:
            wrong.append(f"{name}: off by {error:.1e}, of which 8.0e-03 is two roundings to bf16")
        if not off <= 1e-4:
            wrong.append(f"{name}: the LSE is off by {off:.1e}")
        if not same:
            wrong.append(f"{name}: the result depends on the order of the threads")
    return wrong


def count(given: list[Tensor], last: int) -> int:
    """Sectors that the kernel requests on the CPU."""
    B, S_q, N, D = given[0].shape
    S_k, N_kv = given[1].shape[1:3]
    out = torch.empty(B, S_q, N, D, dtype=torch.bfloat16)
    lse = torch.empty(B, N, S_q)
    sizes = (D, B, S_q, S_k, N, N_kv, last, 1 / math.sqrt(D))
    counters = call(SOURCE, "run_attention", *sizes, *given, out, lse, counting=True)
    return counters.load_sectors


if __name__ == "__main__":
    sys.exit(main())
