"""FlashAttention in plain PyTorch: exact attention that stores no matrix of scores.

Problem. softmax(q kᵀ / sqrt(D)) v in three operations writes the S x S scores to memory, then the softmax,
and in backward their gradients. At S = 8192 that is 128 MiB in bf16 for one head of one sequence, and moving
it takes longer than computing it: a score costs 4 D operations and several memory accesses.

Idea. Keep a tile of queries on the chip, loop over tiles of keys and values, never store a score. A softmax
needs maximum and sum of its full row, unknown until the last tile. The *online* softmax keeps both for the
keys seen so far, and for a larger maximum scales its sums by e^(old maximum - new maximum):

               keys  0    1    2    3        forward: loop over a row of tiles and keep, for each query,
    queries 0       [/]   .    .    .            m, ℓ, acc  ->  out = acc / ℓ,  LSE = m + log ℓ
            1       [#]  [/]   .    .        backward: from q, k and the LSE every weight e^(score - LSE) is computed
            2       [#]  [#]  [/]   .            again; dq is a sum along a row of tiles, dk and dv down a column
            3       [#]  [#]  [#]  [/]       # all visible    / some    . none: skipped, never loaded

All masks here are bands. Query i sees key j if first <= j - i <= last, for causal, sliding window, the offset
between two chunks of a ring, and any combination. A row without keys has out = 0 and LSE = -inf.

In PyTorch this saves memory but no time, because each line below is a kernel of its own. It shows the
algorithm, in any dtype, to the last digit. flash_kernels.py keeps the same tiles in registers.

Formulas, B sequences, N query heads of D, elements of e bytes, tiles of R queries:
    saved for backward   q, k, v, out, and B · N · S values of LSE        explicit: at least e · B · N · S²
    FLOPs, all visible   forward 4 · B · N · S² · D                       backward 2.5 times that
    K/V read, forward    2 · e · B · N · S² · D / R                       each tile of queries reads all of them
FlashAttention: Dao et al. 2022 (arXiv 2205.14135). Loops, LSE, delta: FlashAttention-2 (2307.08691, algorithms 1 and
2). Online softmax: Milakov & Gimelshein 2018 (1805.02867).

Run it:
    python flash_tiles.py                                      one rank, CPU or GPU
    python flash_tiles.py --seq 100 --window 7 --dtype float32
    torchrun --nproc_per_node 2 flash_tiles.py                 every rank checks its own inputs
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

import argparse
import gc
import math
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, with a group open, it would keep that group alive
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

# Legend of shapes: B batch, S sequence (S_q queries, S_k keys), N query heads, N_kv key/value heads, G = N / N_kv,
# D head dim; R queries (rows) and C keys (columns) of a tile.


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ------------------------------------------------------------------------------------------------- who sees whom


def band(S_q: int, S_k: int, causal: bool, window: int | None = None, offset: int = 0) -> tuple[int, int]:
    """(first, last): query i sees key j if first <= j - i <= last.

    Query i is at position i + offset among the keys. `causal` hides later keys; `window` hides keys `window`
    or more tokens away, so a causal window of 1 leaves only the token itself. ±(S_q + S_k) means no limit.
    """
    far = S_q + S_k
    # --- exercise 9.28: causal, window and offset as two limits ---
    first = -far if window is None else offset - window + 1
    last = far if window is None else offset + window - 1
    if causal:
        last = offset
    return max(-far, min(first, far)), max(-far, min(last, far))  # within 32 bits for any offset
    # --- end exercise ---


def visible(i: Tensor, j: Tensor, first: int, last: int) -> Tensor:
    """Which of the keys j [C] the queries i [R] see: bool [R, C]."""
    distance = j - i[:, None]
    return (distance >= first) & (distance <= last)


# -------------------------------------------------------------------------- reference: the scores as one matrix


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, offset: int = 0):
    """The definition, with [S_q, S_k] scores. q [B, S_q, N, D]; k, v [B, S_k, N_kv, D] -> like q."""
    rows = q.unflatten(2, (k.shape[2], -1))  # [B, S_q, N, D] -> [B, S_q, N_kv, G, D]: K and V are never expanded
    scores = torch.einsum("bshgd,bthd->bhgst", rows, k) / math.sqrt(q.shape[-1])
    i, j = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    seen = visible(i, j, *band(len(i), len(j), causal, window, offset))
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0.0)  # no key at all: 0, not NaN
    return torch.einsum("bhgst,bthd->bshgd", weights, v).flatten(2, 3)


# -------------------------------------------------------------------------------- version 1: tiles, in plain PyTorch


def tiled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    offset: int = 0,
    dtype: torch.dtype | None = None,
    tile: int = 32,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, algorithm 1: out [B, S_q, N, D] and LSE [B, N, S_q], in fp32 or better; or out in `dtype`."""
    B, S_q, N, D = q.shape
    S_k, kv_heads = k.shape[1:3]
    first, last = band(S_q, S_k, causal, window, offset)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(B, S_q, N, D, dtype=dtype or wide, device=q.device)
    lse = torch.empty(B, N, S_q, dtype=wide, device=q.device)
    for i in torch.arange(S_q, device=q.device).split(tile):
        rows = at_least_fp32(q[:, i]).unflatten(2, (kv_heads, -1))  # [B, R, N_kv, G, D]
        acc = torch.zeros_like(rows).permute(0, 2, 3, 1, 4)  # [B, N_kv, G, R, D]: sum of weight · v
        m = acc.new_full(acc.shape[:-1], -math.inf)  # [B, N_kv, G, R]: the largest score so far
        total = torch.zeros_like(m)  # the paper's ℓ: sum of e^(score - m)
        for j in torch.arange(S_k, device=q.device).split(tile):
            seen = visible(i, j, first, last)
            if not seen.any():
                continue  # half of all tiles under a causal mask: neither loaded nor computed
            k_tile = at_least_fp32(k[:, j])
            v_tile = at_least_fp32(v[:, j])
            scores = torch.einsum("brhgd,bchd->bhgrc", rows, k_tile) / math.sqrt(D)
            scores = scores.masked_fill(~seen, -math.inf)
            # --- exercise 9.29: the online softmax: add a tile of keys to m, total and acc ---
            new = torch.maximum(m, scores.amax(-1))
            safe = new.masked_fill(new == -math.inf, 0.0)  # no keys so far: e^(-inf - 0) = 0, no NaN
            weights = (scores - safe[..., None]).exp()
            shrink = (m - safe).exp()  # earlier sums were relative to the old maximum
            total = total * shrink + weights.sum(-1)
            acc = acc * shrink[..., None] + torch.einsum("bhgrc,bchd->bhgrd", weights, v_tile)
            m = new
            # --- end exercise ---
        acc = acc / total.masked_fill(total == 0, 1.0)[..., None]
        out[:, i] = acc.permute(0, 3, 1, 2, 4).flatten(2, 3).to(out.dtype)  # [B, N_kv, G, R, D] -> [B, R, N, D]
        lse[:, :, i] = (m + total.log()).flatten(1, 2)  # [B, N_kv, G, R] -> [B, N, R]; no key: -inf
    return out, lse


def tiled_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    offset: int = 0,
    dlse: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: int = 32,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2, algorithm 2: dq, dk, dv, summed in fp32 or better, returned in that or in `dtype`.

    `out` and `lse` may be over more keys: if over the keys of all ranks, this is one block's part of the
    gradients. `dlse` is the gradient of the LSE, if a loss used it.
    """
    kv_heads = k.shape[2]
    scale = 1 / math.sqrt(q.shape[-1])
    first, last = band(q.shape[1], k.shape[1], causal, window, offset)
    dq, dk, dv = (torch.zeros_like(at_least_fp32(x), memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = (at_least_fp32(dout) * at_least_fp32(out)).sum(-1).transpose(1, 2)  # [B, N, S_q]: line 4 of the algorithm
    delta = delta if dlse is None else delta - dlse
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # a row without keys: every weight is e^(score - inf) = 0
    for i in torch.arange(q.shape[1], device=q.device).split(tile):
        rows, drows = (at_least_fp32(x[:, i]).unflatten(2, (kv_heads, -1)) for x in (q, dout))  # [B, R, N_kv, G, D]
        lse_tile, delta_tile = (x[:, :, i].unflatten(1, (kv_heads, -1))[..., None] for x in (lse, delta))
        for j in torch.arange(k.shape[1], device=q.device).split(tile):
            seen = visible(i, j, first, last)
            if not seen.any():
                continue
            k_tile = at_least_fp32(k[:, j])
            v_tile = at_least_fp32(v[:, j])
            scores = torch.einsum("brhgd,bchd->bhgrc", rows, k_tile) * scale
            # --- exercise 9.30: this tile's share of dq, dk and dv ---
            weights = (scores - lse_tile).exp().masked_fill(~seen, 0.0)  # final, without a running maximum
            dv[:, j] += torch.einsum("bhgrc,brhgd->bchd", weights, drows)
            dweights = torch.einsum("brhgd,bchd->bhgrc", drows, v_tile)
            dscores = weights * (dweights - delta_tile) * scale
            dq[:, i] += torch.einsum("bhgrc,bchd->brhgd", dscores, k_tile).flatten(2, 3)
            dk[:, j] += torch.einsum("bhgrc,brhgd->bchd", dscores, rows)
            # --- end exercise ---
    return dq.to(dtype or dq.dtype), dk.to(dtype or dk.dtype), dv.to(dtype or dv.dtype)


class Version(NamedTuple):
    """A way to compute attention and its gradients; the `local` attention of chapter 5's ring.

    forward   (q, k, v, *, causal) -> out [B, S_q, N, D], lse [B, N, S_q]          in fp32 or better;
    backward  (dout, q, k, v, out, lse, *, causal) -> dq, dk, dv                   all but lse in a given `dtype`

    The out and lse given to backward are over all keys; k and v may be a block of them.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


TILED = Version(tiled_forward, tiled_backward)


class Attention(torch.autograd.Function):
    """Either version under autograd: (q, k, v, version, causal, window, offset) -> out in the dtype of q, LSE.

    It saves the inputs, the output and one value per query and head, but no S x S matrix. K and V are saved
    with their own number of heads.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, version: Version, causal: bool, window, offset):
        ctx.version = version
        ctx.mask = dict(causal=causal, window=window, offset=offset)
        with torch.autocast(q.device.type, enabled=False):  # it would round the fp32 factors of a product to 16 bits
            out, lse = version.forward(q, k, v, **ctx.mask, dtype=q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # an unused LSE has gradient None, not a tensor of zeros
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        with torch.autocast(q.device.type, enabled=False):
            gradients = ctx.version.backward(dout, q, k, v, out, lse, **ctx.mask, dlse=dlse, dtype=q.dtype)
        return *gradients, None, None, None, None


# -------------------------------------------------------------------------------------------------------------- demo


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operator returns inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        self.bytes = max(self.bytes, *(x.untyped_storage().nbytes() for x in tensors), 0)
        return out


def step(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Forward and backward: out, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest error of the four, each relative to its largest element, unless that is 0; NaN if there is one."""
    errors = [((x - y).abs().max() / (y.abs().max() or 1)).item() for x, y in zip(got, want, strict=True)]
    return max(errors) if all(e == e for e in errors) else math.nan


def torch_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, offset: int) -> Tensor:
    """PyTorch's own. It needs any mask but a plain causal one as a matrix."""
    mask = None
    if window is not None or offset:
        i, j = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
        mask = visible(i, j, *band(len(i), len(j), causal, window, offset))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, N, D] -> [B, N, S, D]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=True).transpose(
        1, 2
    )


def compare(version: Version, args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """`version` against the definition in float64. Rank 0 prints the table; returns the failures."""
    S = args.seq
    dtype = getattr(torch, args.dtype)
    rank = dist.get_rank(group)
    generator = torch.Generator(device).manual_seed(rank)
    shapes = [(1, S, heads, args.head_dim) for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype) for shape in shapes]
    exact = [x.double() for x in given]
    wide = max(4, dtype.itemsize)
    wrong: list[str] = []
    if rank == 0:
        print(
            f"{dist.get_world_size(group)} rank(s) on {device.type}, {S} tokens, {args.heads}/{args.kv_heads} heads",
            end=" ",
        )
        print(f"of {args.head_dim}, {args.dtype}; scores would be {args.heads * S * S * wide} bytes")
        print(f"{'':22} {'error':>8} {'PyTorch':>8} {'saved bytes':>12} {'predicted':>10} {'largest':>9}")
    cases = {
        "causal": dict(causal=True, window=None, offset=0),
        "all keys": dict(causal=False, window=None, offset=0),
        f"window of {args.window}": dict(causal=True, window=args.window, offset=0),
        f"{S // 3} rows before any key": dict(causal=True, window=None, offset=-(S // 3)),
    }
    for name, mask in cases.items():
        want = step(lambda q, k, v, mask=mask: explicit_attention(q, k, v, **mask), *exact)
        theirs = error(step(lambda q, k, v, mask=mask: torch_attention(q, k, v, **mask), *given), want)
        saved: dict[int, int] = {}

        def keep(x: Tensor, saved=saved) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            got = step(lambda q, k, v, mask=mask: Attention.apply(q, k, v, version, *mask.values())[0], *given)
        lse_bytes = args.heads * S * wide
        predicted = sum(x.nbytes for x in given[:3]) + got[0].nbytes + lse_bytes  # q, k, v, out, LSE
        found: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (error(got, want), theirs, sum(saved.values()), largest.bytes), group=group)
        if rank == 0:
            ours, theirs, kept, most = (max(column) for column in zip(*found, strict=True))
            print(f"{name:22} {ours:8.1e} {theirs:8.1e} {kept:12} {predicted:10} {most:9}")
        for r, (ours, theirs, kept, most) in enumerate(found):
            # Twice the error of PyTorch's kernel, or, if more, two roundings of the result and those of an
            # exponent of up to 8 in fp32, forward and backward: exp(x + x eps) has an error of x eps.
            lucky = 2 * torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps
            allowed = 1e-10 if dtype == torch.float64 else max(2 * theirs, lucky)
            if not ours <= allowed:
                wrong.append(f"{name}: rank {r} off by {ours:.1e}, PyTorch by {theirs:.1e}")
            if kept != predicted:
                wrong.append(f"{name}: saved {kept} bytes, predicted {predicted}")
            # dq in fp32 or better, or a tile of scores of all heads
            if most > wide * args.heads * max(S * args.head_dim, min(S, 32) ** 2):
                wrong.append(f"{name}: a tensor of {most} bytes")
    return wrong


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)


def add_options(description: str, dtypes: list[str]) -> OneLineParser:
    parser = OneLineParser(description=description, allow_abbrev=False)
    parser.add_argument("--seq", type=int, default=96, help="tokens; default %(default)s")
    parser.add_argument("--heads", type=int, default=4, help="query heads; default %(default)s")
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads; default %(default)s")
    parser.add_argument("--head-dim", type=int, default=32, help="default %(default)s")
    parser.add_argument(
        "--window", type=int, default=20, help="tokens that the sliding window shows; default %(default)s"
    )
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0], help="default %(default)s")
    return parser


def check_options(parser: OneLineParser) -> argparse.Namespace:
    """The parsed options, or one line and exit code 2."""
    args = parser.parse_args()
    for option in ("seq", "heads", "kv_heads", "head_dim", "window"):
        if getattr(args, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)} is too small; use 1 or more")
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}; use a divisor of it")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if 0 < gpus < local:
        parser.error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")
    return args


def run(args: argparse.Namespace, version: Version) -> int:
    """Start the process group, compare, print the verdict on rank 0."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    alone: dict = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if gpu:
        torch.cuda.set_device(device)
        alone["device_id"] = device
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=120), **alone)
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    wrong = compare(version, args, group, device)
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    arguments = check_options(add_options("FlashAttention in plain PyTorch.", ["float64", "float32"]))
    sys.exit(run(arguments, TILED))
