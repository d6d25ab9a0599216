"""FlashAttention in 8 bits for Hopper, forward: twice the FLOPs per cycle, half the bytes; and the costs.

Problem. Tensor cores multiply e4m3 (4 bits of exponent, 3 of mantissa) at twice the rate of bf16. But half of
the bits are lost, the largest value is 448, the smallest 2^-9, and factors have only one layout.

Idea (FlashAttention-3, section 3.3 and its library). The kernel of flash_attention_cuda.py, its turns and waits, and:

    q, k, v    x ≈ scale · e4m3; a scale for each head, its largest element / 448. The scores are multiplied by the
               scales of q and k, out by that of v
    v          given as [B, N_kv, D, S]: 8 bits are summed only along rows. Rounding v transposes it
    weights    scaled by 2^8: then weights down to 2^-14 of the largest keep 4 digits. The sum divides it out
    layout     of 16 keys a thread has 0 1 8 9, but needs 0 1 2 3. So the columns of v are permuted

Accuracy. e4m3 is a floating-point format: below the largest value of a head there are 15 powers of two with 4
digits each, so one scale per head suffices. Errors come from a column that is large in q *and* in k, as in
trained models: its product is most of a score, and up to 6 % of each factor are lost. The remedy is a random
rotation M of all rows of q and k (`spread`), since (q M)(k M)ᵀ = q kᵀ. M, a Hadamard matrix / sqrt(D) with
random signs, spreads the column over all D, whose roundings partly cancel ("incoherent processing").

Forward only, as in the paper; gradients raise an error. Takes bf16 and rounds it. Head dims 64, 128, causal
(with any offset) or all keys, grouped K/V heads. FLOPs as in bf16. Bytes requested from global memory, one
per element: q once, k and v once per tile of 128 queries that sees them, v in full tiles: `sectors`, counted
on the CPU. Paper: FlashAttention-3, Shah et al. 2024 (arXiv 2407.08608), 3.3, 4.3.

Without a GPU the kernel runs on the CPU, thread by thread, with tensor cores that truncate sums to 14 bits,
as measured on Hopper (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).

    python flash_attention_fp8.py                       errors next to bf16, in three orders of the threads
    python flash_attention_fp8.py --head-dim 128 --seq 200 --keys 150 --outliers column --spread
    python flash_attention_fp8.py --resources           registers, stack (needs nvcc, but no GPU)
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from _cuda import FORWARD, REVERSE, CudaError, call, library, racing
from flash_attention_cuda import HEAD_DIMS, KEYS, ROWS, check, cuda_forward, fit, fits, inputs, tiles_of_keys
from flash_tiles import OneLineParser, band, explicit_attention
from torch import Tensor

# Legend of shapes: B batch, S sequence (S_q queries, S_k keys), N query heads, N_kv key/value heads, D head dim.
SOURCE = "flash_attention_fp8.cu"
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LIFT = 8  # weights are 2^8 times as large


class Eight(NamedTuple):
    """q [B, S_q, N, D], k [B, S_k, N_kv, D] and v [B, N_kv, D, S] (see `across`) in e4m3, scales [B, heads] in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale_q: Tensor
    scale_k: Tensor
    scale_v: Tensor


def to_e4m3(x: Tensor, per_head: bool = True) -> tuple[Tensor, Tensor]:
    """x [B, S, N, D] -> e4m3 of the same shape and scales [B, N], with x ≈ e4m3 · scale. One scale for all if not."""
    largest = x.float().abs().amax((1, 3)) if per_head else x.float().abs().max().expand(x.shape[0], x.shape[2])
    scale = torch.where(largest == 0, 1.0, largest / LARGEST).contiguous()
    return (x.float() / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale


def across(v: Tensor) -> Tensor:
    """v [B, S, N_kv, D] in e4m3 -> [B, N_kv, D, S'] as the kernel sums it, keys along the last dimension.

    S' is a multiple of KEYS, with zeros at the end. Of every 16 keys place 4c + 2h + e has key 8h + 2c + e: lane c of
    four has the keys 2c, 2c + 1, 8 + 2c, 9 + 2c after q kᵀ, and wgmma takes them for 4c to 4c + 3.
    """
    # --- exercise 9.43: v turned, its keys in the order in which the weights come ---
    padded = F.pad(v.view(torch.uint8), (0, 0, 0, 0, 0, -v.shape[1] % KEYS))
    keys = padded.unflatten(1, (-1, 2, 4, 2))  # [B, S', N_kv, D] -> [B, S'/16, h, c, e, N_kv, D]
    return keys.permute(0, 5, 6, 1, 3, 2, 4).flatten(3).contiguous().view(E4M3)  # -> [B, N_kv, D, S'/16 · c · h · e]
    # --- end exercise ---


def spread_out(q: Tensor, k: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """q M and k M for a random orthogonal M [D, D]: same q kᵀ, but an outlier is spread over its row."""
    D = q.shape[-1]
    hadamard = torch.ones(1, 1)
    while len(hadamard) < D:  # D is a power of two
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    signs = torch.randint(2, (D, 1), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
    rotation = (signs * hadamard / math.sqrt(D)).to(q.device)
    return q.float() @ rotation, k.float() @ rotation


def prepare(q: Tensor, k: Tensor, v: Tensor, *, per_head: bool = True, spread: bool = False) -> Eight:
    """Rounds bf16 to e4m3, transposes v. In a model the kernel that writes q, k and v would do it."""
    if spread:
        q, k = spread_out(q, k)
    (q8, scale_q), (k8, scale_k), (v8, scale_v) = (to_e4m3(x, per_head) for x in (q, k, v))
    return Eight(fit(q8), fit(k8), across(v8), scale_q, scale_k, scale_v)


def attend(given: Eight, S_k: int, *, causal: bool, offset: int = 0, order: int = FORWARD) -> tuple[Tensor, Tensor]:
    """out [B, S_q, N, D] in bf16 and LSE [B, N, S_q] in fp32 of what `prepare` made."""
    out = torch.empty(given.q.shape, dtype=torch.bfloat16, device=given.q.device)
    lse = torch.empty(*given.scale_q.shape, out.shape[1], dtype=torch.float32, device=out.device)
    call(SOURCE, "run_attention", *arguments(given, S_k, causal, offset), out, lse, order=order)
    return out, lse


def arguments(given: Eight, S_k: int, causal: bool, offset: int) -> tuple:
    """Arguments of run_attention before its outputs. Bytes are passed as uint8: ctypes takes addresses."""
    B, S_q, N, D = given.q.shape
    last = band(S_q, S_k, causal, None, offset)[1]  # query i sees the keys up to i + last
    sizes = (D, B, S_q, S_k, N, given.scale_k.shape[1], given.v.shape[3], last, 1 / math.sqrt(D))
    return (*sizes, *(x.view(torch.uint8) for x in given[:3]), *given[3:])


def fp8_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    offset: int = 0,
    order: int = FORWARD,
    per_head: bool = True,
    spread: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [B, S_q, N, D] in bf16 and LSE [B, N, S_q] in fp32, from q, k, v in bf16; `order` as in cuda_forward.

    ValueError, in one line, for what the kernel cannot do.
    """
    check(q, k, v, None, torch.bfloat16)
    if max(q.shape[0], q.shape[2]) > 65535:
        raise ValueError(f"q {[*q.shape]}: a grid has at most 65535 sequences and heads; split it")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("attention in e4m3 has no backward pass; use torch.no_grad(), or flash_attention_cuda.py")
    given = prepare(q, k, v, per_head=per_head, spread=spread)
    return attend(given, k.shape[1], causal=causal, offset=offset, order=order)


def sectors(B: int, S_q: int, S_k: int, N: int, D: int, last: int) -> int:
    """Requested sectors of 32 bytes: Q per query tile that sees any key, its K and V, V in full tiles."""
    tokens = 0
    for row, tiles in zip(range(0, S_q, ROWS), tiles_of_keys(S_q, S_k, last), strict=True):
        tokens += (min(ROWS, S_q - row) if tiles else 0) + min(tiles * KEYS, S_k) + tiles * KEYS
    return B * N * tokens * D // 32


def count(given: Eight, S_k: int, causal: bool, offset: int) -> int:
    """Sectors that the kernel requests on the CPU."""
    out = torch.empty(given.q.shape, dtype=torch.bfloat16)
    lse = torch.empty(*given.scale_q.shape, out.shape[1])
    what = arguments(given, S_k, causal, offset)
    return call(SOURCE, "run_attention", *what, out, lse, counting=True).load_sectors


@contextmanager
def accumulator_bits(bits: int) -> Iterator[None]:
    """Bits of the emulated tensor cores' sums: by default 14, as measured on Hopper; 0 for full fp32."""
    lib = library(SOURCE, "cpu", (0, 0))
    lib.set_accumulator_bits(bits)
    try:
        yield
    finally:
        lib.set_accumulator_bits(14)


# ----------------------------------------------------------------------------------------------- the check and the demo


def in_float64(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, offset: int = 0, **how) -> tuple[Tensor, Tensor]:
    """The exact result: factors in e4m3, weights in e4m3 relative to the running maximum; sums in float64.

    Written from the formulas, without `across` and the kernel. Only the tiles of keys are the kernel's,
    because the maximum of a tile decides how its weights are rounded.
    """
    S_q, G, D = (q.shape[1], q.shape[2] // k.shape[2], q.shape[3])
    S_k = k.shape[1]
    if how.pop("spread", False):
        q, k = spread_out(q, k)
    q, k, v = ((x.double() * scale.double()[:, None, :, None]) for x, scale in (to_e4m3(x, **how) for x in (q, k, v)))
    k, v = (x.repeat_interleave(G, 2) for x in (k, v))  # [B, S_k, N_kv, D] -> [B, S_k, N, D]
    scores = torch.einsum("bind,bjnd->bnij", q, k) / math.sqrt(D)
    i = torch.arange(S_q, device=q.device)
    j = torch.arange(S_k, device=q.device)
    scores = scores.masked_fill(j > i[:, None] + band(S_q, S_k, causal, None, offset)[1], -math.inf)
    m = torch.full_like(scores[..., 0], -math.inf)
    total = torch.zeros_like(scores[..., 0])
    acc = 0.0
    for tile in range(0, S_k, KEYS):
        some = scores[..., tile : tile + KEYS]
        new = torch.maximum(m, some.amax(-1))
        safe = new.masked_fill(new == -math.inf, 0.0)
        shrink = (m - safe).exp()
        weights = (some - safe[..., None]).exp()
        total = total * shrink + weights.sum(-1)
        rounded = (weights * 2**LIFT).float().to(E4M3).double() / 2**LIFT
        acc = acc * shrink[..., None] + torch.einsum("bnij,bjnd->bnid", rounded, v[:, tile : tile + KEYS])
        m = new
    out = (acc / total[..., None]).masked_fill(total[..., None] == 0, 0.0)
    return out.transpose(1, 2), m + total.log()  # [B, N, S_q, D] -> [B, S_q, N, D]


def with_outliers(x: Tensor, kind: str, seed: int = 0) -> Tensor:
    """x [B, S, N, D] with outliers: "rare", one in a thousand 10 times as wide (FlashAttention-3, 4.3);
    "column", one of the D larger by 10 in every row, as in trained models."""
    if kind == "column":
        return x + 10.0 * (torch.arange(x.shape[3], device=x.device) == 3).to(x)
    generator = torch.Generator().manual_seed(seed)
    rare = torch.rand(x.shape, generator=generator) < 1e-3
    return (x.cpu().float() + rare * 10 * torch.randn(x.shape, generator=generator)).to(x)


def off_by(got: Tensor, want: Tensor) -> float:
    """The root mean square of the difference, relative to the one of `want`; NaN if any."""
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


def parse(words: list[str] | None = None) -> tuple[OneLineParser, argparse.Namespace]:
    parser = OneLineParser(description="Attention in e4m3 for Hopper, forward.", allow_abbrev=False)
    parser.add_argument("--seq", type=int, default=140, help="queries; default %(default)s")
    parser.add_argument("--keys", type=int, default=140, help="keys; default %(default)s")
    parser.add_argument("--heads", type=int, default=2, help="query heads; default %(default)s")
    parser.add_argument("--kv-heads", type=int, default=1, help="key/value heads; default %(default)s")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, default=64, help="default %(default)s")
    parser.add_argument("--outliers", choices=("rare", "column"), help="numbers of q and k that stand out")
    parser.add_argument("--per-tensor", action="store_true", help="one scale for all heads")
    parser.add_argument(
        "--spread", action="store_true", help="rotate q and k, so that a column that stands out is shared by all"
    )
    parser.add_argument("--resources", action="store_true", help="only print the registers and stack")
    args = parser.parse_args(words)
    names = ("seq", "keys", "heads", "kv_heads", "head_dim", "outliers", "per_tensor", "spread")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) != parser.get_default(name)]
    if args.resources and given:
        parser.error(f"--resources says what nvcc makes of the kernel and ends; leave out {' '.join(given)}")
    for option in names[:4]:
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)} is too small; use 1 or more")
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}; use a divisor of it")
    return parser, args


def main() -> int:
    parser, args = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        parser.error(f"{torch.cuda.get_device_name()} is no sm_90, and wgmma exists there only; hide it to emulate")
    if int(os.environ.get("RANK", 0)) != 0:
        return 0  # a kernel uses one device; under torchrun only rank 0 runs it
    try:
        wrong = fits(SOURCE, "attention_fp8") if args.resources else demo(args, device)
    except (CudaError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(wrong) or "PASS")
    return int(bool(wrong))


def demo(args: argparse.Namespace, device: str) -> list[str]:
    wrong = []
    how = dict(per_head=not args.per_tensor, spread=args.spread)
    q, k, v = inputs(1, args.seq, args.keys, args.heads, args.kv_heads, args.head_dim, device)
    if args.outliers:
        q, k = (with_outliers(x, args.outliers, seed) for seed, x in enumerate((q, k)))
    print(f"{args.seq} queries, {args.keys} keys, {args.heads}/{args.kv_heads} heads of {args.head_dim} on {device}")
    print(f"{'off by':<22}{'bf16':>9}{'e4m3':>9}{'from formula':>14}{'any order':>11}{'sectors':>9}{'counted':>9}")
    for name, mask in {
        "causal": dict(causal=True, offset=0),
        "all keys": dict(causal=False, offset=0),
        "rows before any key": dict(causal=True, offset=-(args.seq // 2)),
    }.items():
        orders = (FORWARD, REVERSE, racing(1)) if device == "cpu" else (FORWARD,)
        outs = [fp8_forward(q, k, v, **mask, **how, order=order) for order in orders]
        same = all(torch.equal(x, y) for other in outs[1:] for x, y in zip(outs[0], other, strict=True))
        with accumulator_bits(0) if device == "cpu" else nullcontext():
            exact = off_by(fp8_forward(q, k, v, **mask, **how)[0], in_float64(q, k, v, **mask, **how)[0])
        want = explicit_attention(*(x.double() for x in (q, k, v)), **mask)
        plain, eight = (off_by(x, want) for x in (cuda_forward(q, k, v, **mask)[0], outs[0][0]))
        last = band(args.seq, args.keys, mask["causal"], None, mask["offset"])[1]
        predicted = sectors(1, args.seq, args.keys, args.heads, args.head_dim, last)
        counted = "on a CPU"
        if device == "cpu":
            counted = count(prepare(q, k, v, **how), args.keys, **mask)
            if counted != predicted:
                wrong.append(f"{name}: {counted} sectors, not {predicted}")
        cells = f"{plain:>9.1e}{eight:>9.1e}{exact:>14.1e}{'yes' if same else 'NO':>11}{predicted:>9}{counted:>9}"
        print(f"{name:<22}{cells}")
        limit = 3e-3 if device == "cpu" else 3e-2  # a rounding to bf16; on a GPU also sums of 14 bits
        if not exact <= limit:
            wrong.append(f"{name}: {exact:.1e} from the formula in e4m3; {limit} is allowed")
        wrong += [f"{name}: {eight:.1e} from float64 is not a number"] * math.isnan(eight)
        if not same:
            wrong.append(f"{name}: the result depends on the order of the threads")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
