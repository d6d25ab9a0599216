"""Floating-point formats from their bits: what a 16-bit or 8-bit number can hold, and what rounding does to a sum.

Problem. A number with fewer bits is smaller to store, cheaper to send and faster to multiply. It also has
gaps. Whether a model still trains depends on where the gaps are, and "half precision" does not say.

Idea. A format is defined by two numbers, its bits of exponent and of mantissa; all else follows. A pattern is

    | s | e e e e e | m m m m m m m m m m |      fp16: 5 bits of exponent, 10 of mantissa, bias 2^(5-1) - 1 = 15

    e > 0    (-1)^s · 2^(e - bias) · (1 + m / 2^M)      normal: 2^M equal steps between powers of two
    e = 0    (-1)^s · 2^(1 - bias) · m / 2^M            subnormal: the same steps all the way down to zero
    e = all ones: infinity (m = 0) and NaN in IEEE formats. In e4m3 only m = all ones is NaN, so its largest
    number is 448, not 240, and there is no infinity (2209.05433, section 3.1).

                bits    exponent   mantissa    purpose
    fp32         32        8          23
    tf32         19        8          10       fp32's range with fp16's resolution; in registers only, 32 bits in memory
    fp16         16        5          10       resolution
    bf16         16        8           7       range
    e4m3          8        4           3       weights and activations
    e5m2          8        5           2       gradients

Formulas, for M bits of mantissa: spacing above 2^k is 2^(k-M); epsilon, the spacing above 1, is 2^-M; rounding to the
nearest is off by at most half a spacing. So w + u rounds back to w if |u| < 2^(k-M-1), or half of it from w = 2^k down.
As w is between 2^k and twice that, an update below 1/2^(M+2) of the weight (in bf16 1/512) is always *lost*, one
above 1/2^(M+1) (1/256) never, and between the two it depends on w. Stochastic rounding rounds up with a probability
equal to the fraction of the gap that is covered, and is right on average.

Run it:
    python formats.py                                    the table, checked against torch; sums that stall
    torchrun --nproc_per_node 2 formats.py               two ranks that round at random end with the same bits
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _precision_demo import OneLineParser, Report, launch, wide
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating-point format. `ieee`: the largest exponent is reserved for infinity and NaN."""

    name: str
    exponent: int  # bits
    mantissa: int  # bits, the leading 1 not counted
    dtype: torch.dtype | None  # torch's, if it has one
    ieee: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def epsilon(self) -> float:
        """The gap between 1 and the next number."""
        return 2.0**-self.mantissa

    @property
    def max(self) -> float:
        """The largest finite number."""
        # --- exercise 10.21: the largest number, with the infinities and without ---
        top = 2**self.exponent - 1 - self.bias  # all ones in the exponent
        if self.ieee:
            return 2.0 ** (top - 1) * (2 - 2.0**-self.mantissa)  # one exponent less, all ones in the mantissa
        return 2.0**top * (2 - 2 * 2.0**-self.mantissa)  # that exponent counts, and only m = all ones is NaN
        # --- end exercise ---

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal. Half of it and less rounds to zero."""
        return self.smallest_normal * self.epsilon

    def value(self, pattern: int) -> float:
        """The number that a bit pattern stands for."""
        sign = -1.0 if pattern >> (self.bits - 1) else 1.0
        e = pattern >> self.mantissa & (2**self.exponent - 1)
        m = pattern & (2**self.mantissa - 1)
        if e == 2**self.exponent - 1:
            if self.ieee:
                return sign * math.inf if m == 0 else math.nan
            if m == 2**self.mantissa - 1:
                return math.nan
        if e == 0:
            return sign * self.smallest * m
        return sign * 2.0 ** (e - self.bias) * (1 + m * self.epsilon)

    def spacing(self, x: Tensor) -> Tensor:
        """The gap between neighbours of the format around |x|, in fp64. Below the smallest normal it stays the same."""
        exponent = torch.frexp(x.double()).exponent - 1  # |x| = 2^exponent · (1 ..< 2)
        exponent = exponent.masked_fill(x == 0, 1 - self.bias).clamp(min=1 - self.bias)
        return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - self.mantissa)

    def round(self, x: Tensor) -> Tensor:
        """x, rounded to the nearest number of the format and to the even one at a tie; returned in fp64.

        Out of range it is infinite if the format has infinities, else the largest number (saturation:
        hardware offers both, and a scale that is slightly too small should not produce NaN).
        """
        # --- exercise 10.22: round to nearest, ties to even ---
        gap = self.spacing(x)
        rounded = torch.round(x.double() / gap) * gap  # torch.round takes the even neighbour at a tie
        if self.ieee:
            return rounded.masked_fill(rounded.abs() > self.max, math.inf).copysign(x.double())
        return rounded.clamp(-self.max, self.max)
        # --- end exercise ---


FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 8, 23, torch.float32),
        Format("tf32", 8, 10, None),
        Format("fp16", 5, 10, torch.float16),
        Format("bf16", 8, 7, torch.bfloat16),
        Format("e4m3", 4, 3, torch.float8_e4m3fn, ieee=False),
        Format("e5m2", 5, 2, torch.float8_e5m2),
    )
}
OF_DTYPE = {f.dtype: f for f in FORMATS.values() if f.dtype is not None}
e4m3 = torch.float8_e4m3fn
TILE = 128
Block = tuple[int, int]  # (rows, columns) that share a scale; 0 stands for all of them


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in an 8-bit format; values out of range become the largest number, and NaN stays NaN.

    Clamp first: whether a bare `.to(float8)` saturates or makes NaN (or infinity) differs between versions of torch.
    """
    largest = OF_DTYPE[dtype].max
    return x.clamp(-largest, largest).to(dtype)


def stochastic_round(x: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> Tensor:
    """x [any shape, fp32 or fp64], rounded up or down to `dtype` at random, so that the mean over many draws is x.

    If x lies a fraction f of the gap above its lower neighbour, it goes up with probability f.
    """
    form = OF_DTYPE[dtype]
    # --- exercise 10.23: up with the probability of the fraction that is lost ---
    gap = form.spacing(x)
    steps = x.double() / gap
    draw = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64)
    rounded = torch.floor(steps + draw) * gap  # floor(steps + draw) is one more iff draw >= 1 - fraction
    # --- end exercise ---
    # Infinite only if x was and the format has infinities: casts of infinity to e4m3 differ between torch versions.
    edge = torch.full_like(rounded, math.inf if form.ieee else form.max).copysign(rounded)
    rounded = torch.where(x.isinf(), edge, rounded.clamp(-form.max, form.max))
    return rounded.to(dtype)


def running_sum(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of `terms` [n] as an accumulator of `dtype` forms it: rounded after each addition."""
    # --- exercise 10.24: an accumulator that rounds ---
    total = torch.zeros((), dtype=dtype)
    for term in terms.to(dtype):
        total = total + term  # both of `dtype`: each sum is rounded before the next
    return total
    # --- end exercise ---


def lost_updates(before: Tensor, exact: Tensor, after: Tensor) -> Tensor:
    """[elements that should have changed, from `before` to `exact`, and did not; those that should have changed].

    Counts, not a fraction: counts of several tensors add up, and a matrix counts more than a norm.
    """
    asked = exact.double() != before.double()
    return torch.stack([((after == before) & asked).sum(), asked.sum()])


def share_of(counts: list[Tensor]) -> float | None:
    """The fraction of lost elements in all tensors together; None if there are none."""
    if not counts:
        return None
    lost, asked = torch.stack(counts).sum(0).tolist()
    return lost / max(1, asked)


# --------------------------------------------------------------------------------------- numbers that share a scale


class Quantized(NamedTuple):
    """x ~ values · scale, where scale [ceil(R/rows), ceil(C/columns)] has one value per block of x [R, C]."""

    values: Tensor
    scale: Tensor
    block: Block

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.values.to(dtype) * expand(self.scale, self.block, self.values.shape).to(dtype)


def amax_of(x: Tensor, block: Block) -> Tensor:
    """The largest |x| of each block, in fp32. x [R, C] -> [ceil(R/rows), ceil(C/columns)]; the last may be smaller."""
    if x.numel() == 0:  # no tokens: blocks of full columns have an amax of 0, and there are no blocks of rows
        return x.new_zeros([-(-n // b) if b else 1 for n, b in zip(x.shape, block, strict=True)], dtype=torch.float32)
    rows = block[0] or x.shape[0]
    columns = block[1] or x.shape[1]
    # --- exercise 10.30: the largest element of each block ---
    padded = F.pad(x.detach().abs(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))  # zeros do not change a maximum
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [R/rows, rows, C/columns, columns]
    return tiles.amax(dim=(1, 3)).float()
    # --- end exercise ---


def expand(scale: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """One scale per block -> one per element (a view where there is only one)."""
    if scale.numel() != 1:
        scale = scale.repeat_interleave(block[0] or shape[0], 0).repeat_interleave(block[1] or shape[1], 1)
        return scale[: shape[0], : shape[1]]
    return scale.expand(shape)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The s that puts amax on the largest number of the format; 1 for a block of zeros, which must not give 0 / 0."""
    # --- exercise 10.31: a scale that wastes no range and divides by nothing dangerous ---
    scale = (amax / OF_DTYPE[dtype].max).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(scale), scale)  # the scale of NaN is NaN, not 1
    # --- end exercise ---


def quantize(x: Tensor, dtype: torch.dtype, block: Block = (0, 0), amax: Tensor | None = None) -> Quantized:
    """x [R, C] in fp8. `amax`, if given, replaces that of x; what is larger saturates."""
    scale = scale_of(amax_of(x, block) if amax is None else amax, dtype)
    return Quantized(to_fp8(wide(x) / expand(scale, block, x.shape), dtype), scale, block)


def transpose(q: Quantized) -> Quantized:
    return Quantized(q.values.T, q.scale.T, q.block[::-1])


def emulated_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a [M, K] times b [N, K]ᵀ: products of 8-bit values and their scales, summed in fp32 (fp64 for fp64)."""
    kind = torch.promote_types(dtype, torch.float32)
    left = a.dequantize(kind)
    right = b.dequantize(kind)
    with torch.autocast(left.device.type, enabled=False):  # it would round them to bf16
        return (left @ right.T).to(dtype)


# ------------------------------------------------------------------------------------------------------------- demo


def check_against_torch(report: Report) -> None:
    """Each format's numbers against torch.finfo, and its rounding against torch's casts."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, generator=generator) * torch.logspace(-9, 9, 20_000)
    for form in FORMATS.values():
        if form.dtype is None:
            continue
        info = torch.finfo(form.dtype)
        for what, want, got in (
            ("largest", info.max, form.max),
            ("smallest normal", info.smallest_normal, form.smallest_normal),
            ("epsilon", info.eps, form.epsilon),
        ):
            report.add(f"{form.name}: {what}", f"{want:.4g}", f"{got:.4g}", want == got)
        inside = x[x.abs() <= form.max]
        differ = (form.round(inside) != inside.to(form.dtype).double()).sum().item()
        report.add(f"{form.name}: of {len(inside):,} numbers, rounded otherwise than by torch", 0, differ)


def demo(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    report = Report(group)
    if report.rank == 0:
        print(f"{'':6}{'bits':>6}{'largest':>12}{'smallest':>12}{'epsilon':>12}{'numbers in [1, 2)':>20}")
        for f in FORMATS.values():
            print(f"{f.name:6}{f.bits:6}{f.max:12.4g}{f.smallest:12.4g}{f.epsilon:12.4g}{2**f.mantissa:20,}")
    report.title("The same from torch")
    check_against_torch(report)

    report.title("Adding 1 to an accumulator, 5000 times")
    ones = torch.ones(5000)
    for name, stalls in (("fp32", 5000), ("fp16", 2048), ("bf16", 256)):  # at 2^(M+1) the gap is 2
        report.add(f"{name}: it stops at", stalls, int(running_sum(ones, FORMATS[name].dtype).item()))

    report.title("A weight of 1 and 1000 updates of 0.001 in bf16, where the gap above 1 is 0.0078")
    weight = torch.ones(4096, dtype=torch.bfloat16)
    nearest = weight.clone()
    drawn = weight.clone()
    same_seed = torch.Generator().manual_seed(0)
    for _ in range(1000):
        nearest += 0.001
        drawn = stochastic_round(drawn.float() + 0.001, torch.bfloat16, same_seed)
    report.add("rounded to nearest: the weight", 1.0, nearest.mean(dtype=torch.float32).item())
    mean = drawn.mean(dtype=torch.float32).item()
    report.add("rounded stochastically: mean of 4096 weights", "2 ± 0.02", f"{mean:.3f}", abs(mean - 2) < 0.02)
    # Replicas must draw the same bits, or their weights drift apart, which no gradient corrects.
    mine = drawn.to(device)  # NCCL sends only GPU tensors
    alike = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(alike, mine, group=group)
    report.add("ranks with the same weights, same seed", len(alike), sum(torch.equal(mine, other) for other in alike))
    return report.finish()


def main() -> None:
    OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False).parse_args()
    launch(demo)


if __name__ == "__main__":
    main()
