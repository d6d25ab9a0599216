"""FlashAttention in Triton: the tiles of flash_tiles.py as GPU kernels, forward and backward, on tensor cores.

Problem. Attention in tiles does the right work, but a tile in PyTorch is ten kernels that write ten small
matrices to memory. The scores of a tile have to stay in the registers of one program, from the matmul that
computes them to the matmul that uses them.

Idea. One program owns one tile of one head; programs run at once, in any order, without waiting for another:

    kernel           a program owns         it loops over                it writes                    matmuls
    forward          R queries              the keys they see            out, LSE                        2
    delta            R queries              nothing                      sum of dout · out per query     0
    dk, dv, dq       C keys                 the queries that see them    dk, dv; adds to the dq of all   5
 or dq               R queries              the keys they see            dq                              3
    and dk, dv       C keys                 the queries that see them    dk, dv of one K/V head          4

    queries 0       [/]   .    .    .        . skipped, never loaded    # full: no mask is computed
            1       [#]  [/]   .    .        / cut by the edge of the band: masked
            2       [#]  [#]  [/]   .        A program has at most three runs of tiles: cut, full, cut. Full
            3       [#]  [#]  [#]  [/]       ones have their own loop, so the long one has no comparison.

Five matmuls are enough for backward: scores, gradients of the weights, dv, dk, dq. But dk and dv are sums
over queries, and dq is a sum over keys. A program that owns keys has a part of each dq, and adds it to the
parts of other programs in memory, in fp32, atomically. The order differs from run to run, and so do the last
bits. For equal bits in every run (`REPEATABLE`), two kernels each keep their own sums in registers, and both
compute scores and gradients of the weights: seven matmuls. The query heads of a group share a K/V head, so
the program of its dk and dv loops over all G of them; K and V are never expanded.

Tiles are loaded through tensor descriptors. On Hopper the copy engine (TMA) uses them: one thread requests a
tile, the engine computes addresses and bounds, and fills zeros beyond the end of S or D. On older GPUs, and
for fp32, `load_tile` computes addresses. Exponentials are of base 2: e^x = 2^(x log2 e), with log2 e folded
into the scale. Matmuls of fp32 tiles are exact ("ieee"): TF32, the default, keeps 10 of 23 bits.

Formulas: in flash_tiles.py. Saved: q, k, v, out and 4 · B · N · S bytes of LSE. FLOPs: forward 4 · B · N · S² · D,
half of it if causal. Papers: FlashAttention-2 (arXiv 2307.08691), FlashAttention-3 (2407.08608). Warps that only load
and warps that only compute: flash_attention_cuda.py.

Run it:
    python flash_kernels.py                                  CPU: Triton's interpreter; GPU: compiled
    python flash_kernels.py --dtype float16 --seq 100 --head-dim 96
    python flash_kernels.py --version seven                  seven matmuls in backward: same bits in every run
    torchrun --nproc_per_node 2 flash_kernels.py             every rank checks its own inputs
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

import argparse
import math
import sys
from functools import partial

import torch
from _flash_launch import Plan, check_inputs, describe, plan_of, settings
from _flash_launch import check_head_dim as check_head_dim
from _interpreter import INTERPRETED, tl, triton
from flash_tiles import Attention, Version, add_options, band, check_options, run
from torch import Tensor

# Legend of shapes: B batch, S sequence (S_q queries, S_k keys), N query heads, N_kv key/value heads, G = N / N_kv,
# D head dim; R queries (rows) and C keys (columns) of a tile, W the next power of two from D.
LOG2_E = tl.constexpr(math.log2(math.e))

# Triton compiles a kernel anew for an argument that is 1, and for one that 16 divides. These vary from call
# to call, and knowing more about them makes no load wider, so one binary serves all. Strides and addresses
# are not in the list, because 16-byte loads depend on them.
SIZES = ["S_q", "S_k", "N", "G", "first", "last"]


# --------------------------------------------------------------------------------------- what all the kernels share


@triton.jit
def runs_of_tiles(start, stop, first, last, length, STEP: tl.constexpr):
    """Items start..stop-1 see others x with first <= x - item <= last. Which tiles of STEP others are these?

    (begin, whole, cut, end): tiles from `begin` are cut by the band's left edge, from `whole` on seen by all
    items, from `cut` on cut by its right edge or by `length`. Non-empty runs begin at a multiple of STEP.
    """
    # --- exercise 9.31: the three runs of tiles that a program walks along ---
    begin = tl.maximum(start + first, 0) // STEP * STEP  # what the first item sees
    end = tl.maximum(tl.minimum(stop + last, length), begin)  # and the last one
    whole = tl.cdiv(tl.maximum(stop - 1 + first, 0), STEP) * STEP  # what all see begins where the last item's does,
    cut = tl.maximum(tl.minimum(start + last + 1, length), 0) // STEP * STEP  # and ends where the first one's ends
    whole = tl.minimum(whole, end)
    cut = tl.maximum(tl.minimum(cut, end), whole)
    # --- end exercise ---
    return begin, whole, cut, end


@triton.jit
def load_tile(x, b, head, start, S, T: tl.constexpr, W: tl.constexpr):
    """T tokens of one head of x [B, S, N, D], from `start` on: [T, W]; zeros beyond the last token and beyond D.

    x is a tensor descriptor, or a tuple from which the addresses are computed here (`describe`).
    """
    if isinstance(x, tl.core.tensor_descriptor_base):
        tile = x.load([b, head, start, 0]).reshape(T, W)
    else:
        address, D, stride_b, stride_s, stride_n = x
        address += b * stride_b.to(tl.int64) + head * stride_n.to(tl.int64) + start * stride_s.to(tl.int64)  # past 2^31
        t = tl.arange(0, T)[:, None]
        d = tl.arange(0, W)[None, :]
        tile = tl.load(address + t * stride_s + d, mask=(start + t < S) & (d < D), other=0.0)
    return tile


@triton.jit
def store_tile(x, b, head, start, S, tile, T: tl.constexpr, W: tl.constexpr):
    """The inverse of `load_tile`; nothing is written beyond the last token and beyond D."""
    if isinstance(x, tl.core.tensor_descriptor_base):
        x.store([b, head, start, 0], tile.to(x.dtype).reshape(1, 1, T, W))
    else:
        address, D, stride_b, stride_s, stride_n = x
        address += b * stride_b.to(tl.int64) + head * stride_n.to(tl.int64) + start * stride_s.to(tl.int64)
        t = tl.arange(0, T)[:, None]
        d = tl.arange(0, W)[None, :]
        tl.store(address + t * stride_s + d, tile, mask=(start + t < S) & (d < D))


@triton.jit
def add_tile(x, b, head, start, S, tile, T: tl.constexpr, W: tl.constexpr):
    """Add to memory, like other programs at the same time. The L2 cache adds, so nothing is awaited."""
    if isinstance(x, tl.core.tensor_descriptor_base):
        x.atomic_add([b, head, start, 0], tile.reshape(1, 1, T, W))
    else:
        address, D, stride_b, stride_s, stride_n = x
        address += b * stride_b.to(tl.int64) + head * stride_n.to(tl.int64) + start * stride_s.to(tl.int64)
        t = tl.arange(0, T)[:, None]
        d = tl.arange(0, W)[None, :]
        tl.atomic_add(address + t * stride_s + d, tile, mask=(start + t < S) & (d < D), sem="relaxed")


@triton.jit
def dot(a, b):
    """a @ b, summed in fp32. "ieee": fp32 inputs are not rounded to TF32; 16-bit inputs are unaffected."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def seen(i, j, S_k, first, last):
    """`i` and `j` broadcast against each other: which of the queries i see which of the keys j."""
    return (j - i >= first) & (j - i <= last) & (j < S_k)


# ----------------------------------------------------------------------------------------------------------- forward


@triton.jit
def forward_run(
    state, q, k, v, b, kv_head, i, start, stop, S_k, first, last, scale, CUT: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr
):  # fmt: skip
    """Add the tiles of keys from `start` to `stop` to the state (m, total, acc) of a tile of queries."""
    m, total, acc = state
    for start_j in tl.range(start, stop, C):
        k_tile = load_tile(k, b, kv_head, start_j, S_k, C, W)
        scores = dot(q, k_tile.T)  # [R, W] @ [W, C] -> [R, C]
        if CUT:
            j = start_j + tl.arange(0, C)
            scores = tl.where(seen(i[:, None], j[None, :], S_k, first, last), scores, float("-inf"))
        # --- exercise 9.32: the online softmax, in powers of two ---
        new = tl.maximum(m, tl.max(scores, 1) * scale)  # the scale is positive: scaling the maximum is enough
        safe = new
        if CUT:  # only a cut tile can leave a row without keys
            safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores * scale - safe[:, None])  # one multiply-add and one exponential per score
        shrink = tl.exp2(m - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        m = new
        # --- end exercise ---
        v_tile = load_tile(v, b, kv_head, start_j, S_k, C, W)
        acc += dot(weights.to(v_tile.dtype), v_tile)  # [R, C] @ [C, W]
    return m, total, acc


@triton.jit
def in_turn(tiles):
    """Tile and head of this program. Eight heads at a time, whose keys and values fit the L2 cache: first
    their first tiles, then their second ones. Under a causal mask the longest tiles start first, so that no
    multiprocessor runs a long one at the end."""
    program = tl.program_id(0)
    heads = tl.num_programs(0) // tiles
    first = program // (8 * tiles) * 8
    together = tl.minimum(heads - first, 8)
    place = program - first * tiles
    return place // together, first + place % together


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, out, lse, S_q, S_k, N, G, first, last, scale, WINDOW: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr
):  # fmt: skip
    """out and LSE of R queries of one head."""
    tiles = tl.cdiv(S_q, R)
    turn, head = in_turn(tiles)
    b = head // N
    n = head % N
    start_i = (tiles - 1 - turn) * R  # under a causal mask the last rows are the longest
    i = start_i + tl.arange(0, R)
    q_tile = load_tile(q, b, n, start_i, S_q, R, W)
    m = tl.full([R], float("-inf"), tl.float32)
    state = (m, tl.zeros([R], tl.float32), tl.zeros([R, W], tl.float32))
    edges = runs_of_tiles(start_i, tl.minimum(start_i + R, S_q), first, last, S_k, C)
    for part in tl.static_range(3):  # unrolled by the compiler: three loops, of which the middle one has no mask
        if WINDOW or part > 0:  # without a window there is no left edge
            state = forward_run(
                state, q_tile, k, v, b, n // G, i, edges[part], edges[part + 1], S_k, first, last, scale * LOG2_E,
                part != 1, C, W
            )  # fmt: skip
    m, total, acc = state
    total = tl.where(total == 0.0, 1.0, total)  # no key: acc = 0 and m = -inf give out = 0 and LSE = -inf
    store_tile(out, b, n, start_i, S_q, acc / total[:, None], R, W)
    at = head.to(tl.int64) * S_q + i  # B · N · S may pass 2^31
    tl.store(lse + at, (m + tl.log2(total)) / LOG2_E, mask=i < S_q)


# ---------------------------------------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=["S_q", "N"])
def delta_kernel(dout, out, delta, S_q, N, R: tl.constexpr, W: tl.constexpr):
    """delta = sum over D of dout · out, [B, N, S_q]: beside the LSE, all a tile needs of other keys."""
    tiles = tl.cdiv(S_q, R)
    head = tl.program_id(0) // tiles
    start_i = tl.program_id(0) % tiles * R
    i = start_i + tl.arange(0, R)
    product = load_tile(dout, head // N, head % N, start_i, S_q, R, W).to(tl.float32)
    product *= load_tile(out, head // N, head % N, start_i, S_q, R, W).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * S_q + i, tl.sum(product, 1), mask=i < S_q)


@triton.jit
def load_rows(lse, delta, head, i, S_q):
    """LSE (of base 2) and delta of the queries i. Without a query, or for one without keys, the LSE is +inf:
    every weight 2^(score - LSE) of such a row is 0, without a mask."""
    at = head.to(tl.int64) * S_q + i
    valid = i < S_q
    row_lse = tl.load(lse + at, mask=valid, other=float("-inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E)
    return row_lse, tl.load(delta + at, mask=valid, other=0.0)


@triton.jit
def dq_run(
    dq, q, dout, row_lse, row_delta, k, v, b, kv_head, i, start, stop, S_k, first, last, scale, CUT: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Add the part of the key tiles from `start` to `stop` to dq / scale of a tile of queries."""
    for start_j in tl.range(start, stop, C):
        k_tile = load_tile(k, b, kv_head, start_j, S_k, C, W)
        v_tile = load_tile(v, b, kv_head, start_j, S_k, C, W)
        weights = tl.exp2(dot(q, k_tile.T) * (scale * LOG2_E) - row_lse[:, None])  # [R, C]
        if CUT:
            j = start_j + tl.arange(0, C)
            weights = tl.where(seen(i[:, None], j[None, :], S_k, first, last), weights, 0.0)
        dscores = weights * (dot(dout, v_tile.T) - row_delta[:, None])
        dq += dot(dscores.to(k_tile.dtype), k_tile)
    return dq


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q, k, v, dout, lse, delta, dq, S_q, S_k, N, G, first, last, scale, WINDOW: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """dq of R queries of one head, in the loops of the forward kernel."""
    tiles = tl.cdiv(S_q, R)
    turn, head = in_turn(tiles)
    start_i = (tiles - 1 - turn) * R
    b = head // N
    n = head % N
    i = start_i + tl.arange(0, R)
    q_tile = load_tile(q, b, n, start_i, S_q, R, W)
    dout_tile = load_tile(dout, b, n, start_i, S_q, R, W)
    row_lse, row_delta = load_rows(lse, delta, head, i, S_q)
    acc = tl.zeros([R, W], tl.float32)
    edges = runs_of_tiles(start_i, tl.minimum(start_i + R, S_q), first, last, S_k, C)
    for part in tl.static_range(3):
        if WINDOW or part > 0:
            acc = dq_run(
                acc, q_tile, dout_tile, row_lse, row_delta, k, v, b, n // G, i, edges[part], edges[part + 1], S_k,
                first, last, scale, part != 1, C, W
            )  # fmt: skip
    store_tile(dq, b, n, start_i, S_q, acc * scale, R, W)


@triton.jit
def dkdv_run(
    dk, dv, dq, k, v, q, dout, lse, delta, b, n, head, j, start, stop, leap, over, S_q, S_k, first, last, scale,
    CUT: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Add the part of query tiles of head n to dk / scale and dv of a tile of keys, and to dq (if not None).

    The queries are `start` to `stop`; with CUT, queries from `leap` on are shifted by `over`. Scores and
    weights are computed transposed, [C, R], so that they are the left factors of dv and dk as they are.
    """
    # Without disable_licm the compiler computes the addresses of all the tiles' parts before the loop, and then has no
    # registers left to keep them in.
    for at in tl.range(start, stop, R, disable_licm=True):
        start_i = at + tl.where(at < leap, 0, over) if CUT else at
        i = start_i + tl.arange(0, R)
        q_tile = load_tile(q, b, n, start_i, S_q, R, W)
        dout_tile = load_tile(dout, b, n, start_i, S_q, R, W)
        row_lse, row_delta = load_rows(lse, delta, head, i, S_q)
        # --- exercise 9.33: dk and dv of one tile ---
        weights = tl.exp2(dot(k, q_tile.T) * (scale * LOG2_E) - row_lse[None, :])  # [C, W] @ [W, R] -> [C, R]
        if CUT:
            weights = tl.where(seen(i[None, :], j[:, None], S_k, first, last), weights, 0.0)
        dv += dot(weights.to(dout_tile.dtype), dout_tile)
        dweights = tl.zeros_like(weights) - row_delta[None, :]  # initial sum of the matmul
        dscores = weights * tl.dot(v, dout_tile.T, dweights, input_precision="ieee")
        dk += dot(dscores.to(q_tile.dtype), q_tile)
        # --- end exercise ---
        if dq is not None:
            share = dot(k.T, dscores.to(k.dtype))  # [W, C] @ [C, R] -> [W, R]
            add_tile(dq, b, n, start_i, S_q, share.T * scale, R, W)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, dq, S_q, S_k, N, G, first, last, scale, WINDOW: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """dk and dv of C keys of one K/V head: a sum over the G query heads of its group, fp32, in fixed order.
    And, if dq is not None, these keys' parts of dq, added to a dq that begins with zeros."""
    tiles = tl.cdiv(S_k, C)
    kv_heads = N // G
    turn, kv_head = in_turn(tiles)
    start_j = turn * C  # under a causal mask the first keys have most work
    b = kv_head // kv_heads
    kv = kv_head % kv_heads
    j = start_j + tl.arange(0, C)
    k_tile = load_tile(k, b, kv, start_j, S_k, C, W)
    v_tile = load_tile(v, b, kv, start_j, S_k, C, W)
    dk_tile = tl.zeros([C, W], tl.float32)
    dv_tile = tl.zeros([C, W], tl.float32)
    # For a key the band is reversed: -last <= i - j <= -first.
    begin, whole, cut, end = runs_of_tiles(start_j, tl.minimum(start_j + C, S_k), -last, -first, S_q, R)
    if not WINDOW:  # reversed, only a window has a right edge; queries beyond S_q have weight 0
        cut = end
    if start_j + C > S_k:  # keys beyond the end: e^(0 - LSE) may be infinite, and dq NaN
        whole, cut = end, end
    for g in range(G):
        n = kv * G + g
        for part in tl.static_range(2):  # the cut tiles, in one loop that skips the full ones; then these
            dk_tile, dv_tile = dkdv_run(
                dk_tile, dv_tile, dq, k_tile, v_tile, q, dout, lse, delta, b, n, b * N + n, j,
                whole if part else begin, cut if part else end - (cut - whole), whole, cut - whole,
                S_q, S_k, first, last, scale, part == 0, R, W
            )  # fmt: skip
    store_tile(dk, b, kv, start_j, S_k, dk_tile * scale, C, W)
    store_tile(dv, b, kv, start_j, S_k, dv_tile, C, W)


# ------------------------------------------------------------------------------------------- from tensors to kernels


def triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    offset: int = 0,
    dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, S_q, N, D] in `dtype` (by default fp32, for a later merge) and LSE [B, N, S_q] in fp32."""
    check_inputs(q, k, v, window)
    B, S_q, N, D = q.shape
    plan = plan or plan_of(q)
    R, C, *_ = plan.forward
    tma = plan.tma
    out = torch.empty(q.shape, dtype=dtype or torch.float32, device=q.device)
    lse = torch.empty(B, N, S_q, dtype=torch.float32, device=q.device)
    limits = band(S_q, k.shape[1], causal, window, offset)
    with torch.cuda.device_of(q):  # launch on the device of the tensors
        forward_kernel[(triton.cdiv(S_q, R) * B * N,)](
            *(describe(x, tokens, tma) for x, tokens in ((q, R), (k, C), (v, C), (out, R))),
            *(lse, S_q, k.shape[1], N, N // k.shape[2], *limits, 1 / math.sqrt(D)),
            **settings(plan.forward, q, window),
        )
    return out, lse


def triton_backward(
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
    plan: Plan | None = None,
    repeatable: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in `dtype` (or fp32). `out` and `lse` are over all keys; k and v may be one block of them.

    `repeatable`: the same bits in every run, with seven matmuls instead of five. The default is as set by
    `torch.use_deterministic_algorithms`. Before Hopper, in 16 bits and with D above 64, five do not fit the
    registers.
    """
    check_inputs(q, k, v, window)
    B, S_q, N, D = q.shape
    S_k, kv_heads = k.shape[1:3]
    plan = plan or plan_of(q)
    dout = dout.to(q.dtype)  # tensor cores multiply factors of one dtype
    lse = lse.contiguous()
    if repeatable is None:
        repeatable = torch.are_deterministic_algorithms_enabled() or not plan.five
    dk, dv = (torch.empty(x.shape, dtype=dtype or torch.float32, device=x.device) for x in (k, v))
    # A sum of many programs begins at zero and is fp32, for any dtype of the result.
    dq = torch.empty(q.shape, dtype=dk.dtype if repeatable else torch.float32, device=q.device)
    dq = dq if repeatable else dq.zero_()
    delta = torch.empty_like(lse)
    numbers = (S_q, S_k, N, N // kv_heads, *band(S_q, S_k, causal, window, offset), 1 / math.sqrt(D))
    with torch.cuda.device_of(q):
        grid = (triton.cdiv(S_q, 32) * B * N,)
        W = triton.next_power_of_2(D)
        delta_kernel[grid](*(describe(x, 32, plan.tma) for x in (dout, out)), delta, S_q, N, R=32, W=W)
        if dlse is not None:
            delta -= dlse  # d LSE / d score is the weight, like the factor of -delta: one value serves both
        for kernel, tiles, owned in (
            (dq_kernel, plan.dq, triton.cdiv(S_q, plan.dq.rows) * N),
            (dkdv_kernel, plan.dkdv, triton.cdiv(S_k, plan.dkdv.columns) * kv_heads),
        ):
            if kernel is dq_kernel and not repeatable:
                continue
            R = tiles.rows
            C = tiles.columns
            left = [describe(x, tokens, plan.tma) for x, tokens in ((dk, C), (dv, C), (dq, R))]
            left = left[2:] if kernel is dq_kernel else [*left[:2], None if repeatable else left[2]]
            kernel[(owned * B,)](
                *(describe(x, tokens, plan.tma) for x, tokens in ((q, R), (k, C), (v, C), (dout, R))),
                *(lse, delta, *left, *numbers),
                **settings(tiles, q, window),
            )
    return dq.to(dk.dtype), dk, dv


TRITON = Version(triton_forward, triton_backward)  # also the `local` attention of chapter 5's ring
REPEATABLE = Version(triton_forward, partial(triton_backward, repeatable=True))
VERSIONS = {"five": TRITON, "seven": REPEATABLE}


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    offset: int = 0,
    version: Version = TRITON,
) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v over the keys in `band`: q [B, S_q, N, D]; k, v [B, S_k, N_kv, D] -> like q.

    A model's `attention(q, k, v, *, causal)`. ValueError, in one line, for what the kernels cannot do.
    """
    return Attention.apply(q, k, v, version, causal, window, offset)[0]


def flash_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    offset: int = 0,
    version: Version = TRITON,
) -> tuple[Tensor, Tensor]:
    """The same and its LSE [B, N, S_q], fp32; both have gradients, so parts may be merged under autograd."""
    return Attention.apply(q, k, v, version, causal, window, offset)


# -------------------------------------------------------------------------------------------------------------- demo


def parse_arguments() -> argparse.Namespace:
    """The options, checked before any process group is made."""
    parser = add_options("FlashAttention in Triton, forward and backward.", ["float32", "float16", "bfloat16"])
    parser.add_argument("--version", choices=VERSIONS, default="five", help="matmuls of backward; five where they fit")
    args = check_options(parser)
    on_gpu = torch.cuda.is_available()
    try:  # on tensors without memory
        q = torch.empty(1, args.seq, args.heads, args.head_dim, dtype=getattr(torch, args.dtype), device="meta")
        check_inputs(q, q[:, :, : args.kv_heads], q[:, :, : args.kv_heads], args.window)
    except ValueError as error:
        parser.error(f"--dtype {args.dtype} --head-dim {args.head_dim}: {error}")
    if not (on_gpu or INTERPRETED):
        parser.error("TRITON_INTERPRET=0 compiles for a GPU, and there is none; unset it")
    return args


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(run(arguments, VERSIONS[arguments.version]))
