"""Attention to one block without its scores in memory, as local attention of a ring or an all-gather.

Problem. `EXPLICIT` of context_ring.py stores the scores of a block: s t elements for each head, in fp32. With
16,384 tokens on a rank and 32 heads that is 34 GB, although the sequence was split to save memory.

Idea. The merge of blocks from many ranks also works for tiles of one block. So split the block into tiles of
T x T, compute attention to one after the other, and merge. Only one tile's scores exist at a time, as in
FlashAttention's forward. Backward needs no merge: with the final LSE, tiles are independent, like ranks.

      queries   tile 0 | S00                        S = scores of a tile, T x T, one at a time; if causal,
                tile 1 | S10  S11                   tiles above the diagonal are never computed, and
                tile 2 | S20  S21  S22              tiles on it are triangles
                        keys: tile 0  1  2

Three versions, each a `LocalAttention`, to be passed as `ring_attention(group, layout, FLASH)`:
    TILED   this file's, from the functions of context_ring.py: any device, any dtype, in Python
    TORCH   PyTorch's own kernels, which return the LSE: on CPUs all dtypes, on GPUs bf16 and fp16
    FLASH   TORCH if possible, else TILED: on GPUs fp32 and fp64, head dims over 256, not a multiple of 8, or
            in (192, 224] on sm_86 to sm_89 and sm_120 to sm_121, where backward raises; and GPUs before sm_80
Chapter 9's Triton kernels also have this form: `ring_attention(group, layout, flash_kernels.TRITON)`.

Formulas, for a block of s queries and t keys, N heads of D elements, fp32:
    EXPLICIT   stores 2 · 4 B N s t bytes or more (scores, weights)       in backward twice that
    TILED      stores 2 · 4 B N T T or more, for any s and t              and 4 B s N D for the output
Dao et al. 2022 (arXiv 2205.14135), algorithm 1; Dao 2023 (2307.08691), algorithms 1 and 2.

Run it:
    python flash_local.py                        on a CPU or a GPU; --tokens 512 --tile 64
The last line is PASS, or the script exits with 1 and says which number is off.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from context_ring import (
    EXPLICIT,
    LocalAttention,
    OneLineParser,
    at_least_fp32,
    explicit_backward,
    explicit_forward,
    merge,
    off,
)
from torch import Tensor

# Legend of shapes: B batch, s queries, t keys, N query heads, N_kv key/value heads, G = N / N_kv, D head dim, T tile.
TILE = 512
aten = torch.ops.aten


# ----------------------------------------------------------------------------------------------------- tile by tile


def tiles_of(s: int, t: int, causal: bool, tile: int) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """For each tile of queries its visible tiles of keys, and whether only the lower triangle is visible."""
    rows = [slice(i, min(i + tile, s)) for i in range(0, s, tile)]
    columns = [slice(j, min(j + tile, t)) for j in range(0, t, tile)]
    return [(r, [(c, causal and c == r) for c in columns if not causal or c.start <= r.start]) for r in rows]


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """`explicit_forward`, one tile at a time: out [B, s, N, D], lse [B, N, s], both in fp32 or better."""
    out = torch.zeros_like(at_least_fp32(q))
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    # --- exercise 5.33: one tile of scores at a time ---
    for rows, columns in tiles_of(q.shape[1], k.shape[1], causal, tile):
        for keys, triangle in columns:
            part = explicit_forward(q[:, rows], k[:, keys], v[:, keys], causal=triangle)
            out[:, rows], lse[:, :, rows] = merge(out[:, rows], lse[:, :, rows], *part)
    # --- end exercise ---
    return out, lse


def tiled_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, tile: int = TILE
) -> tuple[Tensor, Tensor, Tensor]:
    """`explicit_backward`, one tile at a time: dq, dk, dv in fp32 or better."""
    dq, dk, dv = (torch.zeros_like(at_least_fp32(x)) for x in (q, k, v))
    for rows, columns in tiles_of(q.shape[1], k.shape[1], causal, tile):
        for keys, triangle in columns:
            given = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[:, :, rows])
            for total, share in zip(
                (dq[:, rows], dk[:, keys], dv[:, keys]), explicit_backward(*given, causal=triangle), strict=True
            ):
                total += share
    return dq, dk, dv


def tiled(tile: int) -> LocalAttention:
    """A local attention with tiles of this size. ValueError unless it is 1 or more."""
    if tile < 1:
        raise ValueError(f"tiles of {tile} tokens; use 1 or more")
    return LocalAttention(partial(tiled_forward, tile=tile), partial(tiled_backward, tile=tile))


TILED = tiled(TILE)


# ------------------------------------------------------------------------------------------------ PyTorch's kernels


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, s, N, D] -> [B, N, s, D] for these kernels. A view, since only rows of D must be contiguous."""
    turned = (x.transpose(1, 2) for x in tensors)
    return [x if x.stride(3) == 1 else x.contiguous() for x in turned]


def for_each_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V repeated to the heads of q, as some kernels need, mostly in backward. Never sent so."""
    return tuple(x.repeat_interleave(q.shape[2] // x.shape[2], 2) if x.shape[2] < q.shape[2] else x for x in (k, v))


def torch_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """out in the dtype of q, lse in fp32 (fp64 of fp64)."""
    q_, k_, v_ = heads_first(q, *for_each_query_head(q, k, v))
    if q.device.type != "cpu":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q_, k_, v_, 0.0, causal)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_, k_, v_, is_causal=causal)
    return out.transpose(1, 2), lse


def torch_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; the gradients of the query heads that share a K/V head are summed in fp32 or better."""
    given = [*heads_first(dout, q, *for_each_query_head(q, k, v), out), lse.contiguous()]
    if q.device.type != "cpu":  # no document boundaries; and no dropout, so no state of the generator
        nothing = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in ((2,), ()))
        of_all = (None, None, q.shape[1], k.shape[1], 0.0, causal, *nothing)
        gradients = aten._scaled_dot_product_flash_attention_backward(*given, *of_all)
    else:
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    if k.shape[2] < q.shape[2]:  # [B, t, N, D] -> [B, t, N_kv, G, D] -> [B, t, N_kv, D]
        dk, dv = (at_least_fp32(x).unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
    return dq, dk, dv


TORCH = LocalAttention(torch_forward, torch_backward)


def chosen(q: Tensor) -> LocalAttention:
    """TORCH where PyTorch has a flash kernel for tensors like q, else TILED."""
    if q.device.type == "cpu":
        return TORCH
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] <= 256 and q.shape[3] % 8 == 0
    if q.device.type == "cuda":
        gpu = torch.cuda.get_device_capability(q.device)
        small = (8, 6) <= gpu <= (8, 9) or (12, 0) <= gpu <= (12, 1)  # too little shared memory in backward
        fits = fits and gpu >= (8, 0) and not (small and 192 < q.shape[3] <= 224)
    return TORCH if fits else TILED


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    return chosen(q).forward(q, k, v, causal=causal)


def flash_backward(dout: Tensor, q: Tensor, *others: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    return chosen(q).backward(dout, q, *others, causal=causal)


FLASH = LocalAttention(flash_forward, flash_backward)


# ------------------------------------------------------------------------------------------------------------- demo


def step_of(local: LocalAttention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> list[Tensor]:
    """out, lse, dq, dk, dv of a single block with all keys."""
    out, lse = local.forward(q, k, v, causal=causal)
    return [out, lse, *local.backward(dout, q, k, v, out, lse, causal=causal)]


def timed(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], float]:
    wait = torch.cuda.synchronize if run()[0].is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    found = run()
    wait()
    return found, time.perf_counter() - start


def demo(args: argparse.Namespace, device: torch.device) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    wrong = []
    shapes = [(1, args.tokens, n, 16) for n in (4, 2, 2, 4)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    limit = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 3e-2}[args.dtype]
    print(f"{args.tokens} queries and keys, 4 heads that share 2 of K/V, {args.dtype} on {device.type}")
    print(f"{'':18} {'error':>8} {'scores at once, bytes':>22} {'tokens/s':>10}")
    for causal in (True, False):
        want = step_of(EXPLICIT, *(x.double() for x in given), causal)
        for name, local in (("explicit", EXPLICIT), ("tiled", tiled(args.tile)), ("flash", FLASH)):
            got, seconds = timed(partial(step_of, local, *given, causal))
            error = max([off(x.double(), y) for x, y in zip(got, want, strict=True)], key=lambda e: (e != e, e))
            side = {"explicit": args.tokens, "tiled": min(args.tile, args.tokens)}.get(name)
            scores = f"{4 * side * side * max(4, dtype.itemsize):,}" if side else "the kernel's"
            name = f"{name}, {'causal' if causal else 'full'}"
            print(f"{name:18} {error:8.1e} {scores:>22} {args.tokens / seconds:10.0f}")
            if not error <= limit:
                wrong.append(f"{name}: off by {error:.1e}")
    return wrong


def main() -> int:
    parser = OneLineParser(description="Attention to one block, without its scores in memory.", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=200, help="queries and keys; default %(default)s")
    parser.add_argument("--tile", type=int, default=64, help="of queries, and of keys; default %(default)s")
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float64")
    args = parser.parse_args()
    for option in ("tokens", "tile"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} {getattr(args, option)}: use 1 or more")
    if not 2 <= args.tokens <= 16384:  # with one token q and k have no gradient; EXPLICIT stores all scores
        parser.error(f"--tokens {args.tokens}: use 2 to 16384")
    wrong = demo(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
