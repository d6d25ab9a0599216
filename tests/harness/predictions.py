"""The expected time of a kernel, before it runs: from bytes, operations and the instructions of its binary.

A measurement alone says little: is 3 ms good? So each GPU benchmark has a column with the expected time,
computed here from constants of the GPU that was found, and one with the measured time over it. Where the two
differ, a statement of the model is wrong, and that is where to look.

Four models. Resources that are used at the same time count by their maximum, others add up:

    moved        bytes over the copy bandwidth, and the launch of a kernel
    product      FLOPs over the rate that a matmul reaches
    issued       instructions of the innermost loop, counted in the SASS, over what a multiprocessor issues in a clock:
                 4 instructions of a warp, 16 results of the special functions, 1 access to memory of 128 bytes
    in tiles     a matmul's FLOPs over the rate of the tensor cores, or its tiles' L2 bytes over L2's bytes per
                 clock; and what does not overlap with matmuls: the start of a block, the store of a tile

Constants are from data sheets and the architecture; `COPIED` and `MULTIPLIED` are what a copy and a matmul
reach on an H200 under load, where the clock falls. Nothing is measured in the run that it is compared with.
"""

import functools
import importlib.metadata
import re
from dataclasses import dataclass

COPIED, MULTIPLIED = 0.90, 0.80  # of the data sheet's bandwidth, and of its rate
START = 4e-6  # seconds from one kernel's end to the next one's first load
MMA_SYNC = 0.62  # of wgmma's rate: what Hopper gives the older instruction


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU by its data sheet (SXM where there are two), dense, without sparsity."""

    name: str  # a pattern for torch.cuda.get_device_name
    bandwidth: float  # bytes/s
    bf16: float  # FLOP/s
    fp32: float
    fp8: float | None
    link: float  # bytes/s from the host, one way
    processors: int
    clock: float  # Hz at which the rates are reached

    @property
    def tensor(self) -> float:
        """bf16 FLOPs of a multiprocessor in one clock."""
        return self.bf16 / self.processors / self.clock

    @property
    def clocks(self) -> float:
        """Clocks of all multiprocessors in a second, under load."""
        return MULTIPLIED * self.processors * self.clock


GPUS = (
    Gpu(r"H200", 4.8e12, 989.4e12, 66.9e12, 1978.9e12, 64e9, 132, 1.83e9),
    Gpu(r"H100.*PCIe", 2.0e12, 756e12, 51e12, 1513e12, 64e9, 114, 1.62e9),
    Gpu(r"H100", 3.35e12, 989.4e12, 66.9e12, 1978.9e12, 64e9, 132, 1.83e9),
    Gpu(r"A100.*80", 2.04e12, 312e12, 19.5e12, None, 32e9, 108, 1.41e9),
    Gpu(r"A100", 1.56e12, 312e12, 19.5e12, None, 32e9, 108, 1.41e9),
    Gpu(r"B200", 8.0e12, 2250e12, 75e12, 4500e12, 64e9, 148, 1.85e9),
)


def gpu_called(device_name: str) -> Gpu | None:
    """None for a GPU that is not in the table: then nothing is predicted, because a guess would be worse."""
    return next((gpu for gpu in GPUS if re.search(gpu.name, device_name, re.IGNORECASE)), None)


def here() -> Gpu | None:
    import torch

    return gpu_called(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def moved(gpu: Gpu | None, nbytes: float, kernels: int = 1) -> float | None:
    """Seconds to read and write `nbytes` bytes."""
    return None if gpu is None else kernels * START + nbytes / (COPIED * gpu.bandwidth)


def product(gpu: Gpu | None, flops: float, kind: str = "bf16") -> float | None:
    """Seconds of matmuls with tensor cores (bf16, fp8) or without (fp32)."""
    rate = None if gpu is None else getattr(gpu, kind)
    return START + flops / (MULTIPLIED * rate) if rate else None


# ------------------------------------------------------------------------------------------------------ FlashAttention

# What would refute a statement of this model, if the clock does not fall further than MULTIPLIED says:
#   forward, dkdvdq, dq + dkdv in Triton   products and softmax of a warp one after the other, and nothing else: wrong
#                                          if measured / predicted is below 0.85 (eight warps overlap them after all) or
#                                          above 1.3 (something waits: registers, L2, the additions to dq). Refuted by
#                                          the forward at D = 64: with programs of four warps, of which several share a
#                                          multiprocessor, an H200 took 0.84 of it (0.90 at D = 128)
#   CUDA, fp8                              products beside the softmax: wrong above 1.3, the turns do not hide it
#   the kernels of the core file           both groups of warps compute the scores: wrong below 0.85, they share them
#   L2                                     never the bound at these tiles: wrong if a larger tile of the same work is
#                                          faster by more than its instructions say
L2_BYTES = 5120  # in a clock from the L2 cache of a Hopper GPU to all multiprocessors together (source: chapter 09)


@dataclass(frozen=True)
class Loop:
    """The innermost loop of a kernel without masking, by its SASS for sm_90 (bf16, the tiles of the plan)."""

    products: float  # matmuls of 2 D FLOPs per score, including those that two groups of warps both compute
    instructions: int  # of one thread, per iteration
    special: int  # of these on the special functions: 2^x
    masked: int  # instructions of the same loop where it also masks
    tile: tuple[int, int]  # rows and columns: scores of one iteration
    threads: int  # that share them
    masks_all: bool = False  # under a causal mask, does it mask every tile, not only those on the diagonal?

    def clocks(self, gpu: Gpu, D: int, masked: bool) -> float:
        """Clocks of one multiprocessor, per score."""
        scores = self.tile[0] * self.tile[1]
        vector = max(
            (self.masked if masked else self.instructions) * self.threads / scores / 128,
            self.special * self.threads / scores / 16,
        )
        tensor = self.products * 2 * D / gpu.tensor
        return tensor + vector

    def l2_bytes(self, kernel: str, D: int) -> float:
        """Bytes read from the L2 cache per score: two tiles of 16 bits per rows, or columns, of a program.
        Where dq is accumulated, its 32-bit part counts as well."""
        owned = self.tile[1] if "dkdv" in kernel else self.tile[0]
        return (4 + 4 * kernel.endswith("dkdvdq")) * D / owned


# Counted by tests/test_predictions.py in the kernels as Triton 3.7 compiles them; nothing runs for it.
LOOPS = {
    ("forward", 64): Loop(2, 301, 34, 462, (64, 64), 128),
    ("forward", 128): Loop(2, 632, 68, 960, (128, 64), 128),
    ("dq", 64): Loop(3, 266, 32, 425, (128, 64), 256),
    ("dq", 128): Loop(3, 292, 32, 474, (128, 64), 256),
    ("dkdv", 64): Loop(4, 492, 32, 682, (64, 128), 256),
    ("dkdv", 128): Loop(4, 520, 32, 706, (64, 128), 256),
    ("dkdvdq", 64): Loop(5, 636, 32, 812, (64, 128), 256),
    ("dkdvdq", 128): Loop(5, 700, 32, 872, (64, 128), 256),
    # In the core file two groups of four warps share 64 rows, so that both compute the scores: one matmul
    # more, and two more in backward. At D = 128 dk and dv, of 32 rows, use the older instruction.
    ("ground forward", 64): Loop(3, 519, 34, 653, (64, 64), 256, masks_all=True),
    ("ground forward", 128): Loop(3, 363, 18, 438, (64, 32), 256, masks_all=True),
    ("ground dq", 64): Loop(5, 495, 32, 627, (64, 64), 256, masks_all=True),
    ("ground dq", 128): Loop(5, 378, 16, 454, (64, 32), 256, masks_all=True),
    ("ground dkdv", 64): Loop(6, 649, 32, 713, (64, 64), 256, masks_all=True),
    ("ground dkdv", 128): Loop(4 + 2 / MMA_SYNC, 544, 16, 576, (64, 32), 256, masks_all=True),
}


# Where Triton 3.6 compiles them differently.
BEFORE_3_7 = {
    ("dkdv", 64): Loop(4, 628, 32, 834, (64, 128), 256),
    ("dkdv", 128): Loop(4, 415, 16, 510, (32, 128), 256),
    ("dkdvdq", 64): Loop(5, 780, 32, 976, (64, 128), 256),
    ("dkdvdq", 128): Loop(5, 553, 16, 634, (32, 128), 256),
}


@functools.cache
def installed_loops() -> dict[tuple[str, int], Loop]:
    """The loops of the installed Triton. Without one, of the pinned version."""
    try:
        version = [int(part) for part in re.findall(r"\d+", importlib.metadata.version("triton"))[:2]]
    except importlib.metadata.PackageNotFoundError:
        return LOOPS
    return LOOPS | BEFORE_3_7 if version < [3, 7] else LOOPS


def attention(gpu: Gpu | None, kernel: str, B: int, S: int, N: int, D: int, causal: bool) -> float | None:
    """Seconds of one kernel of chapter 09 over [B, S, N, D]. A causal mask leaves half of the scores and the
    diagonal tiles, which need the masked loop."""
    loop = installed_loops().get((kernel, D))
    if gpu is None or loop is None:
        return None
    diagonal = B * N * S * max(loop.tile) if causal else 0
    plain = B * N * S * S / (2 if causal else 1) - diagonal / 2
    if causal and loop.masks_all:
        plain, diagonal = 0, plain + diagonal
    clocks = plain * loop.clocks(gpu, D, False) + diagonal * loop.clocks(gpu, D, True)
    from_l2 = (plain + diagonal) * loop.l2_bytes(kernel, D) / (L2_BYTES * gpu.clock)
    return START + max(clocks / gpu.clocks, from_l2)


def overlapped_attention(gpu: Gpu | None, B: int, S: int, N: int, D: int, causal: bool, kind: str) -> float | None:
    """Seconds of attention in CUDA, forward, whose matmuls and exponentials overlap: the maximum of matmuls,
    of exponentials (16 per clock and multiprocessor), and of bytes from L2. Tiles are of 128."""
    scores = B * N * S * (S + 128 if causal else 2 * S) / 2
    products = product(gpu, 4 * scores * D, kind)
    if gpu is None or products is None:
        return None
    from_l2 = scores * 2 * D * (2 if kind == "bf16" else 1) / 128 / (L2_BYTES * gpu.clock)
    return max(products, START + scores / (16 * gpu.clocks), START + from_l2)


# ----------------------------------------------------------------------------------------------- the ladder of products


FILL = 1e-6  # seconds from the start of a block to its first matmul: two reads of HBM, and a barrier


@dataclass(frozen=True)
class Rung:
    """The cost of 32 multiply-adds of a warp, with overhead, by SASS and by the counts of chapter 09."""

    instructions: float  # all that are issued, the multiply-add included
    accesses: float  # cycles of shared memory, or accesses to the cache
    tile: tuple[int, int]  # of C, for which a block reads as many rows of A and columns of B
    refuted: str  # the measurement that would refute the prediction


# Counted by tests/test_predictions.py in the two sources as nvcc 13 compiles them for sm_90a: the
# instructions issued in one step along K. Unrolled code for longer loops is in the binary but is skipped.
LADDER = {
    "naive": Rung(
        73 / 16,
        8 + 1,  # 32 sectors of 32 bytes, 4 of which come in a clock, and one more
        (32, 32),
        "under 0.7 of the time predicted: then L1 gives more than 4 sectors a clock",
    ),
    "coalesced": Rung(
        73 / 16,
        2,
        (32, 32),
        "under 0.8 of the time predicted: then a warp's load takes L1 less than a clock, or less is loaded",
    ),
    "shared_tiles": Rung(
        96 / 32,
        1.25,
        (32, 32),
        "under 0.7 of the time predicted: then a load of 16 bytes from one address is less than a turn",
    ),
    "coarsened_1d": Rung(
        167 / 64,
        0.375,
        (64, 64),
        "over 1.4 of the time predicted: then the barriers bind, two for 8 terms, and not the issue",
    ),
    "coarsened_2d": Rung(
        (262 - 82 + 8 * 82) / 512, 0.5, (128, 128), "slower than coarsened_1d: then conflicts of banks bind it"
    ),
    "register_tiles": Rung(  # of matmul.cu; the others are in_depth's
        893 / 512, 0.25, (128, 128), "over 1.4 of the time predicted: then barriers bind it, and not the issue"
    ),
    "vectorised": Rung(
        565 / 512, 0.25, (128, 128), "over 1.3 of the time predicted: then nothing hides the loads of a step"
    ),
    "warp_tiles": Rung(
        579 / 512, 0.25, (128, 128), "over 1.2 of the time predicted: then two buffers do not hide the loads"
    ),
}


@dataclass(frozen=True)
class Tiles:
    """A matmul on tensor cores, as the thread blocks of the kernel divide C."""

    rows: int  # of C for one block
    columns: int
    refuted: str
    cluster: int = 1  # blocks, one above the other, that load each part of B once for all of them
    exposed: float = 1.0  # fraction of a tile's store time that does not overlap with matmuls
    fill: float = 0.0  # seconds before the first matmul of a tile
    rate: float = 1.0  # of wgmma's
    blocks: int = 1  # on a multiprocessor at one time
    size: int = 2  # bytes of an element of A and B

    def asks(self, gpu: Gpu) -> float:
        """Bytes per clock that all multiprocessors together read from L2 at the full matmul rate."""
        return gpu.processors * (self.rows + self.columns / self.cluster) * self.size / self.products(gpu)

    def products(self, gpu: Gpu) -> float:
        """Clocks of the tensor cores for one tile and one term along K."""
        return 2 * self.rows * self.columns / (gpu.tensor * 2 / self.size * self.rate)

    def seconds(self, gpu: Gpu, M: int, N: int, K: int) -> float:
        tiles = -(-M // (self.rows * self.cluster)) * -(-N // self.columns)
        at_once = gpu.processors // self.cluster * self.blocks
        waves = -(-tiles // at_once) * self.blocks  # the last one may be half empty
        term = self.products(gpu) * max(1.0, self.asks(gpu) / L2_BYTES)
        store = self.exposed * gpu.processors * self.rows * self.columns * 2 / L2_BYTES  # in 16 bits
        seconds = waves * ((K * term + store) / (MULTIPLIED * gpu.clock) + self.fill)
        hbm = ((M + N) * K * self.size + 2 * M * N) / (COPIED * gpu.bandwidth)
        return START + max(seconds, hbm)


# `exposed`: rung 9 ends with its tile; in 10 and 11 the store of a tile's second half overlaps with the next
# one's matmuls; in 12 all of it does, and in 8 it overlaps with the other block on the multiprocessor.
TENSOR = {
    "mma_tiles": Tiles(
        rows=128,
        columns=128,
        exposed=0.0,
        rate=MMA_SYNC,
        blocks=2,
        refuted="under 0.9 of the time predicted: then mma.sync has more than 0.62 of wgmma's rate",
    ),
    "tma_wgmma": Tiles(
        rows=128, columns=256, fill=FILL, refuted="faster than persistent: then to start a block costs nothing"
    ),
    "persistent": Tiles(
        rows=128, columns=256, exposed=0.5, refuted="within 5 % of multicast at 8192 cubed: then L2 does not bind it"
    ),
    "multicast": Tiles(
        rows=128,
        columns=256,
        cluster=2,
        exposed=0.5,
        refuted="slower than persistent: then a cluster's barriers cost more than L2 gains",
    ),
    "ping_pong": Tiles(
        rows=64,
        columns=256,
        cluster=2,
        exposed=0.0,
        refuted="faster than multicast at 8192 cubed: then L2 gives more than 6,336 bytes a clock",
    ),
    "fp8_product": Tiles(
        rows=128,
        columns=256,
        cluster=2,
        size=1,
        refuted="over 1.3 of the time predicted: then promotion does not run beside the other group's products",
    ),
}


def ladder(gpu: Gpu | None, rung: str, M: int, N: int, K: int) -> float | None:
    """Seconds of a matmul by a rung of the ladder, or by chapter 10's kernel in 8 bits."""
    if gpu is None:
        return None
    if rung in LADDER:
        mine = LADDER[rung]
        clocks = max(mine.instructions / 4, mine.accesses) / 32 / gpu.clocks
        l2 = 4 * (1 / mine.tile[0] + 1 / mine.tile[1]) / (L2_BYTES * MULTIPLIED * gpu.clock)
        return START + M * N * K * max(clocks, l2)
    if rung in TENSOR and not (TENSOR[rung].size == 1 and gpu.fp8 is None):
        return TENSOR[rung].seconds(gpu, M, N, K)
    return None


def refuted(rung: str) -> str:
    """One line: the measurement that would refute the prediction for this rung."""
    known = LADDER | TENSOR
    return known[rung].refuted if rung in known else "-"


# --------------------------------------------------------------------------------------------------- in a table's cells

COLUMNS = ["predicted, ms", "measured / predicted"]


def cells(predicted: float | None, measured: float) -> list[str]:
    """The two cells beside a measured time, in seconds."""
    return ["-", "-"] if predicted is None else [f"{1e3 * predicted:.3g}", f"{measured / predicted:.2f}"]
