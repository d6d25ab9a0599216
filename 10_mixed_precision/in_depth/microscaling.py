"""Numbers that share a scale with few neighbours: MXFP8, MXFP4 and NVFP4, from their bits.

Problem. With 4 bits a number has eight magnitudes. One scale per tensor, or even per tile of 128, leaves most
of them unused, because the ordinary elements of a tile are all small relative to its largest. Smaller blocks
need more scales, and a scale in fp32 per 32 elements adds a full bit per element.

Idea. Store the scale in 8 bits as well. Two families differ in which 8 bits:

    MX (OCP)       | 32 elements, e4m3, e5m2 or e2m1 | + 1 byte e8m0: an exponent alone, 2^-127 ... 2^127
    NVFP4          | 16 elements, e2m1               | + 1 byte e4m3, + one fp32 for the tensor

    e2m1    s e e m    every pattern is a number: 0  1/2  1  3/2  2  3  4  6 and the same below zero
    e8m0    c          2^(c - 127); c = 255 is NaN; no sign, no zero, no infinity

                bits per number        x stands for
    mxfp8       8 + 8/32 = 8.25        element · 2^(c - 127)
    mxfp4       4 + 8/32 = 4.25        element · 2^(c - 127)
    nvfp4       4 + 8/16 = 4.5         element · s_b · s,   s_b in e4m3, s in fp32 (4 bytes per tensor)

How a scale is found. MX ("OCP Microscaling Formats (MX) Specification" 1.0, section 6.3): the largest power of two
<= amax of the block, divided by the largest power of two of the element format. Then amax may be above the largest
element, and saturates: 500 in mxfp8 becomes 448. NVIDIA takes the next power of two ("-up" here;
2506.08027 shows runs that diverge with OCP's rule, not with this). NVFP4 (2509.25149, appendix B, equations 1 to 4):

    s_enc = 6 · 448 / amax(tensor)    s = 1 / s_enc    s_b = e4m3(amax(block) / 6 · s_enc)    q = e2m1(x / (s_b · s))

A power of two wastes up to half of the range of 6; e4m3 fits better, but has only 18 powers of two, so a
block whose amax is 2^-19 of the tensor's is all zero. The fp32 scale extends the range, up to this limit.

A block lies along the sum of its matmul, as tiles do (fp8.py): dW = dyᵀ x needs x in blocks of tokens. So each
operand is quantised twice, and a weight has different values in forward and backward. (NVIDIA trains NVFP4 with
16 x 16 weight blocks, random rounding of gradients and a Hadamard transform: 2509.25149, section 4; not here.)

Run it:
    python microscaling.py                                   all patterns against torch; errors of each format
    torchrun --nproc_per_node 2 microscaling.py              shards of one tensor share the scale of the tensor
The last line is PASS, or the script exits with 1 and says which number is off. Matmuls are emulated: values of
these formats, multiplied and summed in fp32 (Blackwell's tensor cores use them directly; section 6.1 of the
MX specification defines the sum, not how many bits it keeps).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from _precision_demo import OneLineParser, Report, launch, wide
from formats import FORMATS, Block, Format, Quantized, amax_of, e4m3, emulated_matmul, expand, to_fp8, transpose
from fp8 import NAMES, Fp8Linear, Recipe, not_nan, relative
from torch import Tensor


@dataclass(frozen=True)
class Finite(Format):
    """A format in which every pattern is a number: neither infinity nor NaN (MX specification, section 5.3.3)."""

    @property
    def max(self) -> float:
        return 2.0 ** (2**self.exponent - 1 - self.bias) * (2 - self.epsilon)  # all ones

    def value(self, pattern: int) -> float:
        sign = -1.0 if pattern >> (self.bits - 1) else 1.0
        e = pattern >> self.mantissa & (2**self.exponent - 1)
        m = pattern & (2**self.mantissa - 1)
        if e == 0:
            return sign * self.smallest * m
        return sign * 2.0 ** (e - self.bias) * (1 + m * self.epsilon)


E2M1 = Finite("e2m1", 2, 1, None, ieee=False)  # torch has the type, float4_e2m1fn_x2, and no arithmetic for it
E4M3 = FORMATS["e4m3"]
E5M2 = FORMATS["e5m2"]
BIAS, NAN = 127, 255  # of e8m0
FP32_MAX = torch.finfo(torch.float32).max


def decode(codes: Tensor, form: Format) -> Tensor:
    """Bit patterns, one a byte, any shape -> the numbers they stand for, in fp64."""
    values = [form.value(pattern) for pattern in range(2**form.bits)]
    return torch.tensor(values, dtype=torch.float64, device=codes.device)[codes.long()]


def encode(x: Tensor, form: Format) -> Tensor:
    """x, any shape -> bit patterns, one a byte: rounded to nearest, ties to even. Too large becomes the largest number
    (section 6.3), NaN the pattern of all ones, which in e2m1 is -6: there the scale says NaN for the whole block."""
    # --- exercise 10.43: the pattern of a number ---
    rounded = form.round(x.double().clamp(-form.max, form.max))
    exponent = (torch.frexp(rounded).exponent - 1).masked_fill(rounded == 0, -form.bias)  # frexp says 0 = 0 · 2^0
    exponent = exponent.clamp(min=1 - form.bias)
    steps = torch.ldexp(rounded.abs(), form.mantissa - exponent)  # 2^M + m, or m alone among the subnormals: an integer
    code = (exponent + form.bias - 1) * 2**form.mantissa + steps  # and so the leading 1 adds one to the exponent field
    code = code + rounded.signbit() * 2 ** (form.bits - 1)
    # --- end exercise ---
    return code.nan_to_num(2**form.bits - 1).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Scales of MX formats -> powers of two in fp64 (section 5.4.1)."""
    values = [*(2.0 ** (code - BIAS) for code in range(NAN)), math.nan]
    return torch.tensor(values, dtype=torch.float64, device=codes.device)[codes.long()]


def encode_e8m0(amax: Tensor, form: Format, up: bool) -> Tensor:
    """The scale of blocks whose largest |x| is `amax`. `up`: so that none saturates; else by section 6.3."""
    # --- exercise 10.44: the power of two that a block shares ---
    fraction, exponent = torch.frexp(amax.double())  # amax = fraction · 2^exponent, 1/2 <= fraction < 1
    top_fraction, top_exponent = math.frexp(form.max)
    shared = exponent - top_exponent  # floor(log2 amax) - floor(log2 max)
    if up:
        shared = shared + (fraction > top_fraction)
    code = torch.where(amax == 0, 0, (shared + BIAS).clamp(0, NAN - 1))
    # --- end exercise ---
    return torch.where(amax.isfinite(), code, NAN).to(torch.uint8)


class Microscaled(NamedTuple):
    """x [R, C] as patterns: elements [R, C], one a byte, and a scale for each block [R, ceil(C/size)]."""

    codes: Tensor
    scales: Tensor
    outer: Tensor | None  # [1, 1], fp32: of the whole tensor, in nvfp4 only
    kind: Micro

    def scale(self) -> Tensor:
        """The factor of the elements of each block, in fp64."""
        if self.outer is None:
            return decode_e8m0(self.scales)
        return decode(self.scales, E4M3) * self.outer.double()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        values = decode(self.codes, self.kind.element)
        return (values * expand(self.scale(), self.kind.block, values.shape)).to(dtype)

    def bits(self) -> int:
        """Bits of memory, with elements of 4 bits packed."""
        packed = self.codes.numel() * self.kind.element.bits + self.scales.numel() * 8
        return packed + (32 if self.outer is not None else 0)


@dataclass(frozen=True)
class Micro:
    """One of the formats of this file."""

    element: Format
    size: int  # elements in a block
    two_levels: bool = False  # a scale in e4m3 and one in fp32, or one in e8m0
    up: bool = False  # which power of two an e8m0 scale is

    @property
    def block(self) -> Block:
        return (1, self.size)

    def scales(self, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """x [R, C], in fp32 or more -> patterns of the scales [R, ceil(C/size)], the scale of the tensor if
        there is one, and the factor of each block's elements before rounding."""
        peaks = amax_of(x, self.block)
        if not self.two_levels:
            scales = encode_e8m0(peaks, self.element, self.up)
            return scales, None, (1 / decode_e8m0(scales)).float()  # powers of two: exact
        amax = amax_of(x, (0, 0)) if amax is None else amax
        # --- exercise 10.45: a scale of the tensor, and of each block one in 8 bits beside it ---
        # All in fp32, as in appendix B; the clamps keep a reciprocal finite (as in Transformer Engine).
        largest = self.element.max
        # torch computes `number / tensor` as the rounded reciprocal times the number: hence a tensor.
        top = torch.full_like(amax, largest * E4M3.max)
        s_enc = torch.where(amax == 0, 1.0, (top / amax).clamp(max=FP32_MAX))  # equation 1
        s_dec = 1 / s_enc
        scales = encode(peaks / largest * s_enc, E4M3)  # equations 2 and 3
        return scales, s_dec, (1 / (decode(scales, E4M3).float() * s_dec)).clamp(max=FP32_MAX)
        # --- end exercise ---

    def quantize(self, x: Tensor, amax: Tensor | None = None) -> Microscaled:
        """x [R, C] in blocks along its rows; a row's last may be shorter. `amax` [1, 1]: of the full tensor,
        if x is a shard and the format needs it; None: x's own. NaN and infinity make their scale NaN."""
        x = wide(x.detach())
        scales, outer, inverse = self.scales(x, amax)
        codes = encode(x * expand(inverse, self.block, x.shape), self.element)  # equation 4
        return Microscaled(codes, scales, outer, self)

    def plain(self, x: Tensor, amax: Tensor | None = None) -> Quantized:
        """The values of `quantize(x, amax)` without their patterns, for the matmuls of fp8.py: much faster
        here. e4m3 holds every number of e2m1."""
        x = wide(x.detach())
        scales, outer, inverse = self.scales(x, amax)
        scaled = x * expand(inverse, self.block, x.shape)
        dtype = self.element.dtype or e4m3
        if self.element.dtype is None:
            size = scaled.abs()
            gap = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # of e2m1
            scaled = (torch.round(scaled / gap) * gap).clamp(-E2M1.max, E2M1.max)
        return Quantized(to_fp8(scaled, dtype), Microscaled(scales, scales, outer, self).scale(), self.block)


MICRO = {
    "mxfp8": Micro(E4M3, 32),
    "mxfp8-up": Micro(E4M3, 32, up=True),
    "mxfp8-e5m2": Micro(E5M2, 32),
    "mxfp4": Micro(E2M1, 32),
    "nvfp4": Micro(E2M1, 16, two_levels=True),
}


class MicroLinear(Fp8Linear):
    """`linear(x, weight)` whose three products have operands of one of these formats, each in blocks along its sum.

    amax_group   the ranks with shards of the same tensors, which share nvfp4's scale of the tensor. MX needs no
                 message, as long as a tensor is split at multiples of 32.
    """

    def __init__(self, name: str, amax_group: dist.ProcessGroup | None = None):
        if name not in MICRO:
            raise ValueError(f"microscaling format {name!r} is unknown; use {', '.join(MICRO)}")
        super().__init__("block", amax_group, matmul=emulated_matmul)
        self.micro = MICRO[name]
        self.recipe = Recipe(self.micro.block, self.micro.block, self.micro.element.dtype or e4m3)

    def quantize(self, tensor: Tensor, role: str, block: Block, weight: Tensor, counts: bool = True) -> Quantized:
        along_rows = block == self.micro.block
        amax = not_nan(amax_of(tensor, (0, 0)))
        if self.micro.two_levels and self.group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        self.watch(amax, f"{NAMES[role]} of shape {[*tensor.shape]}", counts)  # here, so that all ranks raise together
        q = self.micro.plain(tensor if along_rows else tensor.T, amax)
        return q if along_rows else transpose(q)


# ------------------------------------------------------------------------------------------------------------- demo


def unlike_torch() -> dict[str, int]:
    """Patterns on which torch differs: every element with every scale, and every fp16 value as an input."""
    code = torch.arange(256, dtype=torch.uint8)
    differ = lambda a, b: int((~((a == b) | (a.isnan() & b.isnan()))).sum())  # noqa: E731
    theirs = code.view(torch.float8_e8m0fnu).double()
    found = {"e8m0 scales": differ(decode_e8m0(code), theirs)}
    every = torch.arange(65536).to(torch.uint16).view(torch.float16)
    for form in (E4M3, E5M2):
        pairs = Microscaled(code[None].repeat(256, 1), code[:, None].repeat(1, 8), None, Micro(form, 32))
        found[f"{form.name} elements with e8m0 scales"] = differ(
            pairs.dequantize(torch.float64), code.view(form.dtype).double()[None] * theirs[:, None]
        )
        cast = every.float().clamp(-form.max, form.max).to(form.dtype).double()
        found[f"fp16 numbers to {form.name}"] = differ(decode(encode(every, form), form), cast)
    return found


def demo(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    report = Report(group)
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    report.title("Patterns read, and numbers rounded, otherwise than by torch")
    for what, count in unlike_torch().items():
        report.add(what, 0, count)
    halves = [int(2 * E2M1.value(pattern)) for pattern in range(8)]
    report.add("twice the magnitudes of e2m1", "0 1 2 3 4 6 8 12", " ".join(map(str, halves)))

    report.title("By hand: a block with 500 in it")
    block = torch.tensor([[500.0, 100.0, *[1.0] * 30]])
    for name, want in (("mxfp8", 448.0), ("mxfp8-up", 512.0), ("mxfp4", 384.0)):
        report.add(f"{name}: the largest element", want, MICRO[name].quantize(block).dequantize()[0, 0].item())

    x = torch.randn(64 * ranks, 512, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 100  # one feature, as large models have them
    x = x.to(device)  # NCCL sends only GPU tensors
    ordinary = torch.arange(512) != 7
    mine = slice(64 * rank, 64 * rank + 64)
    report.title(f"512 features of {64 * ranks} tokens, one of them 100 times as large; {ranks} rank(s)")
    for name, kind in MICRO.items():
        q = kind.quantize(x)
        bits = kind.element.bits + 8 / kind.size + (32 / x.numel() if kind.two_levels else 0)
        report.add(f"{name}: bits per number", bits, q.bits() / x.numel())
        error = relative(q.dequantize()[:, ordinary], x[:, ordinary])
        limit = 0.25 if kind.element is E2M1 else 0.06
        report.add("  error of the ordinary features", f"<= {limit}", f"{error:.4f}", error <= limit)
        linear = MicroLinear(name, group)
        own = linear.quantize(x[mine], "x", kind.block, x).dequantize()
        report.add("  pieces of ranks are those of the whole", True, torch.equal(own, kind.plain(x).dequantize()[mine]))
    return report.finish()


def main() -> None:
    OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False).parse_args()
    launch(demo)


if __name__ == "__main__":
    main()
