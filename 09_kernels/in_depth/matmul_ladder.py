"""Chapter 9, the CUDA ladder: a matmul from the first kernel to the tensor cores, one idea per rung.

The problem. C = A·B with M = N = K = n needs 2n³ FLOPs and could read each element once: n/6 FLOPs per byte
in fp32. The simplest kernel reads two elements per FMA, a quarter of a FLOP per byte. A GPU that computes 14
fp32 FLOPs in the time in which its memory delivers a byte (H200: 67 TFLOP/s, 4.8 TB/s) then waits nearly all
the time. Every rung of the ladder removes one reason to wait.

The idea. Fetch an element once and reuse it often, from memories closer to the cores:

    global memory ──> shared memory ──> registers ──> FMA units, tensor cores
                 BM x BN tile      TM x TN per thread

    bytes fetched by tiles of BM x BN:   M/BM · N/BN · K (BM + BN) · size  =  M N K · size (1/BM + 1/BN)
    intensity = 2 M N K / bytes          time >= max(FLOPs / peak, bytes / bandwidth)      (roofline, Williams 2009)
    occupancy = warps that fit into a multiprocessor's registers, shared memory and slots, over the most it can hold

The kernels are CUDA: matmul_ladder.cu (0 to 7, fp32), tensor_cores.cu (8 to 10, bf16), clusters.cu (11 and 12). This
file builds and calls them, predicts what they fetch, and compares that with the count. One rung is here,
in Triton: the tiled matmul of rung 3, in which the compiler chooses threads, shared memory and copies.

Without a GPU everything runs on the CPU, through cuda_on_cpu.h and Triton's interpreter; TMA, mbarriers, mma, wgmma and
clusters are emulated instruction by instruction (ptx.h, clusters.h). This shows if a kernel is right in any
order of its threads, and how many sectors it requests. It shows nothing about time.

    python matmul_ladder.py   every rung against float64, in four orders of the threads; ends with PASS
    python matmul_ladder.py --rung warp_tiles --size 200 300 77
    python matmul_ladder.py --resources sm_90a   registers, stack, shared memory, occupancy (needs nvcc, but no GPU)

Shapes: A [M, K], B [K, N], C [M, N].
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _cuda import FORWARD, REVERSE, Counters, CudaError, Parser, Resources, call, racing, resources
from _interpreter import INTERPRETED, tl, triton  # Triton, run by Python without a GPU
from torch import Tensor

SECTOR = 32  # bytes: the unit in which global memory is read

# ------------------------------------------------------------------------------------------------------- the ladder


@dataclass(frozen=True)
class Rung:
    number: int
    name: str  # of the kernel
    dtype: torch.dtype
    tile: tuple[int, int] | None  # (BM, BN); None: each thread fetches its own
    threads: int  # of a block
    dynamic_shared: int = 0  # bytes requested at launch
    per_fma: int = 0  # sectors that a warp of 32 FMAs fetches, without tiles
    bank_turns: float = 1.0  # cycles of loads from shared memory, over the minimum
    capability: tuple[int, int] = (0, 0)  # the oldest GPU that can run it
    cluster: int = 1  # blocks with common columns: B is fetched once for all

    def load_sectors(self, M: int, N: int, K: int) -> int:
        """Requested sectors of 32 bytes. M, N and K are multiples of the tile, so that all tiles are full."""
        if self.tile is None:
            return M * N // 32 * K * self.per_fma
        BM, BN = self.tile
        return (M // BM) * (N // BN) * K * (BM + BN // self.cluster) * self.dtype.itemsize // SECTOR

    def intensity(self, M: int, N: int, K: int) -> float:
        """FLOPs per requested byte."""
        return 2 * M * N * K / (self.load_sectors(M, N, K) * SECTOR)

    @property
    def call(self) -> tuple[str, str]:
        """The source and its function that runs this rung."""
        if self.dtype == torch.float32:
            return "matmul_ladder.cu", "run_matmul"
        return ("tensor_cores.cu", "run_matmul_bf16") if self.cluster == 1 else ("clusters.cu", "run_matmul_clusters")


# bank_turns of coarsened_2d: of 16 loads per step, the 8 of A take 2 turns each and the 8 of B take 4; 48/16 = 3.
LADDER = [
    Rung(1, "naive", torch.float32, None, 1024, per_fma=32 + 1),
    Rung(2, "coalesced", torch.float32, None, 1024, per_fma=1 + 4),
    Rung(3, "shared_tiles", torch.float32, (32, 32), 1024),
    Rung(4, "coarsened_1d", torch.float32, (64, 64), 512),
    Rung(5, "coarsened_2d", torch.float32, (128, 128), 256, bank_turns=3.0),
    Rung(6, "vectorised", torch.float32, (128, 128), 256),
    Rung(7, "warp_tiles", torch.float32, (128, 128), 256),
    Rung(8, "mma_tiles", torch.bfloat16, (128, 128), 256, 3 * (128 + 128) * 64 * 2, capability=(8, 0)),
    Rung(9, "tma_wgmma", torch.bfloat16, (128, 256), 256, 4 * (128 + 256) * 64 * 2, capability=(9, 0)),
    # From here on output sums are stored behind the tiles: half of a tile's 64 KB in rungs 10 and 11, and two
    # full tiles of 32 KB in rung 12. In rungs 11 and 12, ten barriers of 8 bytes follow.
    Rung(10, "persistent", torch.bfloat16, (128, 256), 384, 4 * (128 + 256) * 128 + 32768, capability=(9, 0)),
    Rung(11, "multicast", torch.bfloat16, (128, 256), 384, 4 * (128 + 256) * 128 + 32848, capability=(9, 0), cluster=2),
    Rung(12, "ping_pong", torch.bfloat16, (64, 256), 384, 4 * (64 + 256) * 128 + 65616, capability=(9, 0), cluster=2),
]
RUNGS = {rung.name: rung for rung in LADDER}
TRITON = "triton"  # the tiled matmul in Triton, below


@dataclass(frozen=True)
class Multiprocessor:
    """Resources of a multiprocessor (CUDA C++ programming guide, table of specifications per capability)."""

    shared: int  # bytes for all blocks; each block costs 1024 extra
    block_shared: int  # the most for one block
    registers: int = 65536
    warps: int = 64
    blocks: int = 32


GPUS = {"sm_80": Multiprocessor(164 * 1024, 163 * 1024), "sm_90a": Multiprocessor(228 * 1024, 227 * 1024)}


def occupancy(used: Resources, threads: int, gpu: Multiprocessor, dynamic_shared: int = 0) -> float:
    """Resident warps of a multiprocessor, over the maximum.

    While a warp waits for memory another resident warp can compute. Registers are allocated per warp (32
    threads), each thread's count rounded up to a multiple of 8; blocks are resident in full or not at all.
    """
    # --- exercise 9.24: the scarcest of registers, shared memory, warps and blocks decides ---
    warps = -(-threads // 32)
    block_registers = -(-used.registers // 8) * 8 * 32 * warps
    block_shared = used.shared + dynamic_shared + 1024
    blocks = min(gpu.registers // block_registers, gpu.shared // block_shared, gpu.warps // warps, gpu.blocks)
    return blocks * warps / gpu.warps
    # --- end exercise ---


# --------------------------------------------------------------------------------------------- the same tile in Triton


@triton.jit
def tiled_kernel(
    A, B, C, M, N, K, a_row, a_col, b_row, b_col, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """One program computes a BM x BN tile of C. a_row, a_col, ...: strides, so A and B may be any view."""
    row = tl.program_id(1) * BM + tl.arange(0, BM)[:, None]  # [BM, 1]
    col = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]  # [1, BN]
    total = tl.zeros((BM, BN), tl.float32)
    # --- exercise 9.23: a loop over the tiles along K; beyond the edge a tile is filled with zeros ---
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(A + row * a_row + k[None, :] * a_col, mask=(row < M) & (k[None, :] < K), other=0.0)  # [BM, BK]
        b = tl.load(B + k[:, None] * b_row + col * b_col, mask=(k[:, None] < K) & (col < N), other=0.0)  # [BK, BN]
        # "ieee": otherwise fp32 on tensor cores is silently TF32, with the 10 bits of fp16's mantissa.
        total += tl.dot(a, b, input_precision="ieee")
    # --- end exercise ---
    tl.store(C + row * N + col, total.to(C.dtype.element_ty), mask=(row < M) & (col < N))


# ------------------------------------------------------------------------------------------------------- one interface


def matmul(
    a: Tensor, b: Tensor, rung: str = "warp_tiles", *, out: Tensor | None = None, order: int = FORWARD
) -> Tensor:
    """a [M, K] times b [K, N] by the named rung. The inputs may be any views; `order`: of the CPU's threads.

    Raises ValueError, in one line, for what the rung cannot do: other dtypes, two devices, shapes that do not fit, 2³¹
    elements or more (offsets are 32 bits), a GPU that is too old, an `out` of another kind or layout.
    """
    check_matmul(a, b, rung)
    M, K = a.shape
    N = b.shape[1]
    if out is None:
        out = a.new_empty(M, N)
    elif (out.shape, out.dtype, out.device) != ((M, N), a.dtype, a.device) or aligned(out) is not out:
        wanted = f"[{M}, {N}] of {a.dtype} on {a.device}, in rows from an address that is a multiple of 16"
        raise ValueError(f"out is {list(out.shape)} of {out.dtype} on {out.device}; it has to be {wanted}")
    if M * N == 0 or K == 0:
        return out.zero_()
    if rung == TRITON:
        grid = (triton.cdiv(N, 64), triton.cdiv(M, 64))
        with torch.cuda.device_of(a):  # launch where the tensors are, whatever the current device
            tiled_kernel[grid](a, b, out, M, N, K, *a.stride(), *b.stride(), BM=64, BN=64, BK=32)
        return out
    spec = RUNGS[rung]
    a_across = lies_across(a)
    b_across = lies_across(b.t())
    if rung == "multicast" and (a_across or b_across):  # it reads this layout directly
        a = a.t() if a_across else aligned(a)
        b = b if b_across else aligned(b.t())
        call(spec.call[0], "run_matmul_across", int(a_across), int(b_across), M, N, K, a, b, out, order=order)
        return out
    a, b = (aligned(a), aligned(b)) if spec.dtype == torch.float32 else bf16_operands(a, b)
    call(*spec.call, spec.number, M, N, a.shape[1], a, b, out, order=order)
    return out


def aligned(x: Tensor) -> Tensor:
    """x if row-major at an address that is a multiple of 16, as 16-byte loads require; otherwise a copy."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def bf16_operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a [M, K] and bᵀ [N, K], K padded with zeros to a multiple of 8. No copy if b = weight.t() and K is one."""
    pad = -a.shape[1] % 8
    return aligned(F.pad(a, (0, pad)) if pad else a), aligned(F.pad(b.t(), (0, pad)) if pad else b.t())


def lies_across(x: Tensor) -> bool:
    """Whether a factor x [R, K] is contiguous along R (a transpose), rows at multiples of 16 bytes, so that
    TMA can fetch them directly. K must also be a multiple of 8, as the other factor may be contiguous along
    it. A single row or column has both layouts, and is excluded."""
    rows = not x.is_contiguous() and x.t().is_contiguous()
    return rows and x.shape[0] % 8 == x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0


def check_matmul(a: Tensor, b: Tensor, rung: str) -> None:
    if rung not in RUNGS and rung != TRITON:
        raise ValueError(f"rung {rung!r} does not exist; there are {', '.join([*RUNGS, TRITON])}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {list(a.shape)} times b {list(b.shape)} is no product of matrices [M, K] and [K, N]")
    if a.device != b.device or a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} on {a.device} and b is {b.dtype} on {b.device}; they must be alike")
    narrow = () if INTERPRETED else (torch.bfloat16,)  # the interpreter is silently wrong for bf16
    allowed = (torch.float32, torch.float16, *narrow) if rung == TRITON else (RUNGS[rung].dtype,)
    if a.dtype not in allowed:
        raise ValueError(f"rung {rung} takes {' or '.join(str(d) for d in allowed)}, not {a.dtype}; cast a and b first")
    extents = {"a": (list(a.shape), a.stride()), "b": (list(b.shape), b.stride())}
    M, K = a.shape
    N = b.shape[1]
    if rung != TRITON and RUNGS[rung].dtype == torch.bfloat16:  # as bf16_operands will change them
        K += -K % 8
        extents |= {"a, with K padded,": ([M, K], (K, 1)), "b, with K padded,": ([K, N], (1, K))}
    for name, (shape, strides) in (extents | {"the product": ([M, N], (N, 1))}).items():
        span = 1 + sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))  # from first to last element
        if max(span, shape[0] * shape[1]) >= 2**31:
            raise ValueError(f"{name} {shape} reaches over 2^31 elements, too far for 32-bit offsets; split it")
    if a.shape[0] > 65535 * 32:  # rows of tiles are the grid's y, at most 65535
        raise ValueError(f"a has {a.shape[0]} rows; a grid has at most 65535 rows of tiles of 32; split a")
    if rung in RUNGS and a.is_cuda:
        have = torch.cuda.get_device_capability(a.device)
        need = RUNGS[rung].capability
        if have < need or (need == (9, 0) and have != need):  # wgmma exists only on Hopper, not on later GPUs
            raise ValueError(f"rung {rung} needs compute capability {need[0]}.{need[1]}, not {have[0]}.{have[1]}")


def count(rung: Rung, M: int, N: int, K: int) -> Counters:
    """The counters of the rung on the CPU for a matmul of this size."""
    a = torch.zeros(M, K, dtype=rung.dtype)
    b = torch.zeros(K, N, dtype=rung.dtype)
    if rung.dtype == torch.bfloat16:
        a, b = bf16_operands(a, b)
    return call(*rung.call, rung.number, M, N, K, a, b, a.new_empty(M, N), counting=True)


# ----------------------------------------------------------------------------------------------- the check and the demo


def rms_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of got - want. NaN if `got` has any."""
    return float((got.double() - want).square().mean().sqrt())


def reference(a: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """a · b in float64, and the error of PyTorch's matmul in the precision of a and b.

    If that is below the expected error of a sequential fp32 sum of K terms, it is that error instead: each of
    the K additions rounds a partial sum of k terms by up to eps/2 of it, in the mean square eps²/12, and over
    all k that gives eps √(K/24) of the result. cuBLAS may split K into p pieces and add those; its error is
    √p times smaller, but a kernel without this is as correct. TF32 is off while PyTorch computes, because a
    reference in lower precision would accept any error.
    """
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        theirs = a @ b
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    want = a.double() @ b.double()
    in_order = torch.finfo(torch.float32).eps * math.sqrt(a.shape[1] / 24) * float(want.square().mean().sqrt())
    return want, max(rms_error(theirs, want), in_order, 1e-30)


def error_ratio(got: Tensor, a: Tensor, b: Tensor) -> float:
    """The error of `got` over the error of PyTorch's matmul in the same precision, against float64."""
    want, theirs = reference(a, b)
    return rms_error(got, want) / theirs


def within(error: float, limit: float) -> bool:
    """NaN is not within any limit. (`error > limit` is also false for NaN, so do not test it that way.)"""
    return error <= limit


def random_inputs(M: int, N: int, K: int, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """a and b inside larger fields of NaN, so that reads outside of them show."""
    generator = torch.Generator().manual_seed(seed)

    def field(rows: int, cols: int) -> Tensor:
        whole = torch.full((rows * cols + 512,), float("nan"))
        whole[256 : 256 + rows * cols] = torch.randn(rows * cols, generator=generator)
        return whole.to(device, dtype)[256 : 256 + rows * cols].view(rows, cols)

    return field(M, K), field(K, N)


def verify(rung: str, M: int, N: int, K: int, device: str) -> tuple[float, bool]:
    """(error over PyTorch's, equal bits in all thread orders), for fresh inputs and a poisoned output."""
    dtype = torch.float32 if rung == TRITON else RUNGS[rung].dtype
    a, b = random_inputs(M, N, K, dtype, device)
    orders = (FORWARD, REVERSE, 7, racing(7)) if device == "cpu" and rung != TRITON else (FORWARD,)
    outs = [matmul(a, b, rung, out=a.new_full((M, N), float("nan")), order=order) for order in orders]
    return error_ratio(outs[0], a, b), all(torch.equal(outs[0], other) for other in outs[1:])


def print_resources(arch: str) -> bool:
    """A table of the resources of each kernel. False if one exceeds a multiprocessor."""
    gpu = GPUS[arch]
    fits = True
    rungs = [rung for rung in LADDER if arch != "sm_80" or rung.capability <= (8, 0)]
    found: dict[str, Resources] = {}
    for source in dict.fromkeys(rung.call[0] for rung in rungs):
        found |= resources(source, arch)
    print(f"{'kernel':<14}{'registers':>10}{'stack':>9}{'shared':>9}{'occupancy':>11}    {arch}")
    for rung in rungs:
        used = found[rung.name]
        share = occupancy(used, rung.threads, gpu, rung.dynamic_shared)
        fits &= used.stack == 0 and used.shared + rung.dynamic_shared <= gpu.block_shared and share > 0
        shared = used.shared + rung.dynamic_shared
        print(f"{rung.name:<14}{used.registers:>10}{used.stack:>9}{shared:>9}{share:>11.0%}")
    return fits


def main() -> int:
    parser = Parser(prog="matmul_ladder.py", description="Climb the ladder of matrix products.", allow_abbrev=False)
    parser.add_argument("--rung", choices=[*RUNGS, TRITON], help="only this one")
    parser.add_argument("--size", type=int, nargs=3, metavar=("M", "N", "K"), default=(139, 263, 77))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resources", choices=list(GPUS), metavar="ARCH", help=f"{' or '.join(GPUS)}; then exit")
    options = parser.parse_args()
    if min(options.size) < 1:
        parser.error(f"--size {' '.join(map(str, options.size))}: M, N and K must be at least 1")
    given = [f"--{name}" for name in ("rung", "size", "device") if getattr(options, name) != parser.get_default(name)]
    if options.resources and given:
        parser.error(f"--resources compiles all rungs and ends; leave out {' '.join(given)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if options.device == "cpu" and not INTERPRETED and options.rung in (None, TRITON):
        parser.error("--device cpu: on a machine with a GPU, Triton runs on the CPU only with TRITON_INTERPRET=1 set")
    if int(os.environ.get("RANK", 0)) != 0:
        return 0  # a kernel uses one device; under torchrun only rank 0 runs it
    try:
        if options.resources:
            fits = print_resources(options.resources)
            print("PASS" if fits else "a kernel keeps numbers in local memory, or does not fit into a multiprocessor")
            return int(not fits)
        M, N, K = options.size
        return demo([options.rung] if options.rung else [*RUNGS, TRITON], M, N, K, options.device)
    except (CudaError, ValueError) as error:
        parser.error(str(error))


def demo(rungs: list[str], M: int, N: int, K: int, device: str) -> int:
    wrong = []
    M0 = 128
    N0 = 256
    K0 = 64  # sizes to count: full tiles of every rung; a cluster has two, stacked
    print(f"errors at {M} x {N} x {K} on {device}; sectors and bank turns on the CPU only, at {M0} x {N0} x {K0}, and")
    print(f"for clusters of two at {2 * M0} x {N0} x {K0}")
    print(f"{'rung':<17}{'error/torch':>12}{'any order':>11}{'sectors: predicted':>20}{'counted':>9}{'bank turns':>13}")
    for name in rungs:
        if name in RUNGS and device == "cuda":
            try:
                check_matmul(*random_inputs(1, 1, 1, RUNGS[name].dtype, device), name)
            except ValueError as why:
                print(f"{name:<17}not run: {why}")
                continue
        ratio, same = verify(name, M, N, K, device)
        if not within(ratio, 2):
            wrong.append(f"{name}: its error is {ratio:.3g} times PyTorch's; at most 2 times is right")
        if not same:
            wrong.append(f"{name}: the result depends on the order of the threads: a barrier is missing")
        counted = ""
        if device == "cpu" and name in RUNGS:
            rung = RUNGS[name]
            size = (M0 * rung.cluster, N0, K0)
            got = count(rung, *size)
            predicted = rung.load_sectors(*size)
            turns = got.bank_turns / got.bank_turns_least if got.bank_turns_least else 1.0
            counted = f"{predicted:>20}{got.load_sectors:>9}{turns:>8.2f} of {rung.bank_turns:.0f}"
            if got.load_sectors != predicted or turns != rung.bank_turns:
                wrong.append(f"{name}: {got.load_sectors} sectors, {turns} turns, not {predicted}, {rung.bank_turns}")
        print(f"{name:<17}{ratio:>12.3f}{'yes' if same else 'NO':>11}{counted}")
    if device == "cpu":
        print("mma, TMA, mbarriers and wgmma are emulated (ptx.h), Triton is interpreted. Nothing here is a time.")
    print("\n".join(wrong) or "PASS")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
