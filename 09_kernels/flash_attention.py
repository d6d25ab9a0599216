"""FlashAttention in Triton: from a row of softmax to attention that never stores its scores.

Problem. softmax(q kᵀ / √D) v makes S x S scores per head: 128 MiB in bf16 at S = 8192, for one head
of one sequence. Dense attention writes them to the GPU's memory (HBM), reads them for the softmax,
writes the probabilities, reads them for the matmul with v, and saves them for the backward pass.
Moving these matrices takes longer than computing them.

Idea. Compute, use and discard each tile of scores on the chip. A softmax can be computed in blocks:

    1 fused      a row is loaded once, normalized in registers, stored once    softmax_kernel
    2 online     a row in blocks: m is the maximum and l the denominator of    online_softmax_
                 the blocks so far; a larger maximum rescales l by             kernel
                 alpha = exp(m - m_new)
    3 forward    acc, the sum of exp(score - m) v, is rescaled as l is. One    forward_kernel
                 program has BLOCK_M queries and loops over BLOCK_N keys
    4 backward   no probability was saved: each is exp(score - LSE)            dq_kernel,
                 again, with LSE = m + log l                                   dkdv_kernel

             keys 0    1    2    3      out and dq: a program has a row of tiles
    queries 0    [/]   .    .    .      dk and dv:  a program has a column of tiles
            1    [#]  [/]   .    .      # every query of the tile sees every key
            2    [#]  [#]  [/]   .      / the diagonal: the upper half of the tile is masked
            3    [#]  [#]  [#]  [/]     . causal: neither loaded nor computed

No two programs write to the same place. Elements moved by the forward pass (B sequences, N heads;
S̄ is the mean number of keys per query tile: S, or (S + BLOCK_M)/2 with a causal mask):

    dense                   4 B N (S D + S²)            q, k, v, out; scores and p, each twice
    tiles of BLOCK_M rows   2 B N S D (1 + S̄/BLOCK_M)   q and out once; k, v once per query tile

The backward pass gets q, k, v, out and one LSE per row: O(S) instead of O(S²). FLOPs: 4 B N S S̄ D
in the forward pass (two matmuls) and 14 B N S S̄ D in the backward pass (seven). Five would do, but
two are computed in both kernels, so that no program has to add to the result of another.

Sources: Milakov & Gimelshein 2018, arXiv 1805.02867 (online softmax); Dao et al. 2022, 2205.14135,
theorem 2; Dao 2023 (FlashAttention-2), 2307.08691, algorithms 1 and 2.

    python flash_attention.py                           on a GPU compiled, otherwise interpreted
    python flash_attention.py --tokens 77 --kv-heads 1 --block-m 16

The last line is PASS if outputs and gradients match dense attention in float64 and all bytes match
the formulas; otherwise the exit code is 1.
"""

import argparse
import os
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

if find_spec("triton") is None:
    sys.exit("flash_attention.py needs Triton, which runs on Linux, or in WSL on Windows")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton where a kernel is defined

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
if INTERPRETED.value:
    # tl.sum, tl.max and others are kernels as well. If another module has already imported Triton,
    # they were defined for a GPU.
    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, triton.JITFunction):
            setattr(tl.standard, name, triton.jit(function.fn))
            setattr(tl, name, getattr(tl.standard, name))


# ---------------------------------------------------- 1 and 2: softmax of a row, at once and online
@triton.jit
def softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    """One program per row of x [rows, n_cols]. BLOCK is a power of two, n_cols or more."""
    row_start = tl.program_id(0).to(tl.int64) * n_cols
    offs = tl.arange(0, BLOCK)
    mask = offs < n_cols
    x = tl.load(x_ptr + row_start + offs, mask=mask, other=float("-inf"))  # exp(-inf) = 0
    p = tl.exp(x - tl.max(x, 0))  # without the maximum, exp(89) overflows in float32
    tl.store(y_ptr + row_start + offs, p / tl.sum(p, 0), mask=mask)


@triton.jit
def online_softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    """The same for rows of any length, in blocks: one pass for m and l, and one that writes."""
    row_start = tl.program_id(0).to(tl.int64) * n_cols
    offs = tl.arange(0, BLOCK)
    m_i = tl.load(x_ptr + row_start)  # any element of the row can be the first maximum
    l_i = tl.zeros_like(m_i)
    # --- exercise 9.4: maximum and denominator of a row in one pass ---
    for start in range(0, n_cols, BLOCK):
        mask = start + offs < n_cols
        x = tl.load(x_ptr + row_start + start + offs, mask=mask, other=float("-inf"))
        m_new = tl.maximum(m_i, tl.max(x, 0))
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(tl.exp(x - m_new), 0)
        m_i = m_new
    # --- end exercise ---
    for start in range(0, n_cols, BLOCK):
        mask = start + offs < n_cols
        x = tl.load(x_ptr + row_start + start + offs, mask=mask, other=0.0)
        tl.store(y_ptr + row_start + start + offs, tl.exp(x - m_i) / l_i, mask=mask)


def softmax(x: Tensor, block: int | None = None) -> Tensor:
    """Softmax of rows x [rows, n_cols]. With `block` online: a first block of -inf gives NaN."""
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, n_cols = x.shape
    with torch.cuda.device_of(x):  # launch where the tensor is, whatever the current device
        if block is None:
            softmax_kernel[(rows,)](x, y, n_cols, BLOCK=triton.next_power_of_2(n_cols))
        else:
            online_softmax_kernel[(rows,)](x, y, n_cols, BLOCK=block)
    return y


# ---------------------------------------------------------------------------- 3: attention, forward
@triton.jit
def tile_offsets(tokens, batch, head, seq_len, n_heads, HEAD_DIM: tl.constexpr):
    """Where these tokens of one head lie in a tensor [B, S, N, D]: [tokens] -> [tokens, D]."""
    first_row = batch.to(tl.int64) * seq_len * n_heads + head  # B S N D can exceed 2^31: 64 bits
    rows = first_row + tokens * n_heads
    return rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def dot(a, b):
    """a @ b, summed in float32 (float64 for float64)."""
    if INTERPRETED and a.dtype == tl.bfloat16:  # the interpreter would read it as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")  # by default float32 is rounded to TF32: 10 bits


@triton.jit
def masked_scores(q, k, offs_m, offs_n, seq_len, CAUSAL: tl.constexpr):
    """q [M, D], k [N, D] -> scores [M, N], with -inf where a query does not see a key."""
    scores = dot(q, k.T) * q.shape[1] ** -0.5
    visible = offs_n[None, :] < seq_len  # a key past the end is 0, and its score as well: not -inf
    if CAUSAL:
        visible = visible & (offs_n[None, :] <= offs_m[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit(do_not_specialize=["seq_len", "n_heads", "group"])  # one binary for all values
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    seq_len, n_heads, group,  # group: query heads that share a K/V head
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """out and LSE of BLOCK_M queries of one head: FlashAttention-2, algorithm 1."""
    SUM_DTYPE: tl.constexpr = lse_ptr.dtype.element_ty  # float32, or float64 for float64
    start_m = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < seq_len
    q_offsets = tile_offsets(offs_m, batch, head, seq_len, n_heads, HEAD_DIM)
    q = tl.load(q_ptr + q_offsets, mask=mask_m[:, None], other=0.0)  # stays on the chip

    m_i = tl.full([BLOCK_M], float("-inf"), SUM_DTYPE)
    l_i = tl.zeros([BLOCK_M], SUM_DTYPE)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], SUM_DTYPE)
    # --- exercise 9.5: BLOCK_M queries loop over the keys that they see ---
    kv_head = head // group
    end_n = seq_len
    if CAUSAL:
        end_n = tl.minimum(start_m + BLOCK_M, seq_len)  # tiles above the diagonal are skipped
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < seq_len
        # `group` query heads share this K/V head; it is never expanded
        kv_offsets = tile_offsets(offs_n, batch, kv_head, seq_len, n_heads // group, HEAD_DIM)
        k = tl.load(k_ptr + kv_offsets, mask=mask_n[:, None], other=0.0)
        v = tl.load(v_ptr + kv_offsets, mask=mask_n[:, None], other=0.0)
        scores = masked_scores(q, k, offs_m, offs_n, seq_len, CAUSAL)
        m_new = tl.maximum(m_i, tl.max(scores, 1))  # finite: each query sees key 0, in tile 0
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + dot(p.to(v.dtype), v)  # [M, N] @ [N, D], summed in SUM_DTYPE
        m_i = m_new
    # --- end exercise ---
    tl.store(out_ptr + q_offsets, acc / l_i[:, None], mask=mask_m[:, None])
    lse_offsets = (batch.to(tl.int64) * n_heads + head) * seq_len + offs_m  # [B, N, S]
    tl.store(lse_ptr + lse_offsets, m_i + tl.log(l_i), mask=mask_m)


# --------------------------------------------------------------------------- 4: attention, backward
@triton.jit
def recompute_p_ds(q, k, v, dout, lse, delta, offs_m, offs_n, seq_len, CAUSAL: tl.constexpr):
    """The probabilities of a tile again, p [M, N], and the gradients of its scores, ds [M, N].

    A row of p sums to 1, so a larger probability for one key means smaller ones for all others.
    The derivative of softmax therefore subtracts delta, the sum of p dp over all keys of the row.
    It equals the sum of dout out over D (algorithm 2, line 4), so one value per row is enough.
    """
    # --- exercise 9.6: probabilities from the LSE, gradients of the scores from delta ---
    scores = masked_scores(q, k, offs_m, offs_n, seq_len, CAUSAL)
    p = tl.exp(scores - lse[:, None])
    dp = dot(dout, v.T)  # [M, D] @ [D, N]
    ds = p * (dp - delta[:, None])
    # --- end exercise ---
    return p, ds


@triton.jit(do_not_specialize=["seq_len", "n_heads", "group"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr,
    seq_len, n_heads, group,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head, by the loop of forward_kernel. Stores delta as well."""
    SUM_DTYPE: tl.constexpr = lse_ptr.dtype.element_ty
    start_m = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < seq_len
    q_offsets = tile_offsets(offs_m, batch, head, seq_len, n_heads, HEAD_DIM)
    q = tl.load(q_ptr + q_offsets, mask=mask_m[:, None], other=0.0)
    out = tl.load(out_ptr + q_offsets, mask=mask_m[:, None], other=0.0)
    dout = tl.load(dout_ptr + q_offsets, mask=mask_m[:, None], other=0.0)
    lse_offsets = (batch.to(tl.int64) * n_heads + head) * seq_len + offs_m
    lse = tl.load(lse_ptr + lse_offsets, mask=mask_m, other=0.0)
    delta = tl.sum(dout.to(SUM_DTYPE) * out.to(SUM_DTYPE), 1)
    tl.store(delta_ptr + lse_offsets, delta, mask=mask_m)

    dq = tl.zeros([BLOCK_M, HEAD_DIM], SUM_DTYPE)
    kv_head = head // group
    end_n = seq_len
    if CAUSAL:
        end_n = tl.minimum(start_m + BLOCK_M, seq_len)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < seq_len
        kv_offsets = tile_offsets(offs_n, batch, kv_head, seq_len, n_heads // group, HEAD_DIM)
        k = tl.load(k_ptr + kv_offsets, mask=mask_n[:, None], other=0.0)
        v = tl.load(v_ptr + kv_offsets, mask=mask_n[:, None], other=0.0)
        _, ds = recompute_p_ds(q, k, v, dout, lse, delta, offs_m, offs_n, seq_len, CAUSAL)
        dq += dot(ds.to(k.dtype), k)  # [M, N] @ [N, D]
    tl.store(dq_ptr + q_offsets, dq * HEAD_DIM**-0.5, mask=mask_m[:, None])


@triton.jit(do_not_specialize=["seq_len", "n_heads", "group"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    seq_len, n_heads, group,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one K/V head: sums over the queries of all its query heads."""
    SUM_DTYPE: tl.constexpr = lse_ptr.dtype.element_ty
    start_n = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < seq_len
    kv_offsets = tile_offsets(offs_n, batch, kv_head, seq_len, n_heads // group, HEAD_DIM)
    k = tl.load(k_ptr + kv_offsets, mask=mask_n[:, None], other=0.0)
    v = tl.load(v_ptr + kv_offsets, mask=mask_n[:, None], other=0.0)

    dk = tl.zeros([BLOCK_N, HEAD_DIM], SUM_DTYPE)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], SUM_DTYPE)
    # --- exercise 9.7: BLOCK_N keys loop over queries that see them, in each head of a group ---
    first_m = 0
    if CAUSAL:
        first_m = start_n // BLOCK_M * BLOCK_M  # the query tile that contains query start_n
    for g in range(group):
        head = kv_head * group + g
        for start_m in range(first_m, seq_len, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            mask_m = offs_m < seq_len
            q_offsets = tile_offsets(offs_m, batch, head, seq_len, n_heads, HEAD_DIM)
            q = tl.load(q_ptr + q_offsets, mask=mask_m[:, None], other=0.0)
            dout = tl.load(dout_ptr + q_offsets, mask=mask_m[:, None], other=0.0)
            lse_offsets = (batch.to(tl.int64) * n_heads + head) * seq_len + offs_m
            # past the end: p = exp(0 - inf) = 0
            lse = tl.load(lse_ptr + lse_offsets, mask=mask_m, other=float("inf"))
            delta = tl.load(delta_ptr + lse_offsets, mask=mask_m, other=0.0)
            p, ds = recompute_p_ds(q, k, v, dout, lse, delta, offs_m, offs_n, seq_len, CAUSAL)
            dv += dot(p.T.to(dout.dtype), dout)  # [N, M] @ [M, D]
            dk += dot(ds.T.to(q.dtype), q)
    # --- end exercise ---
    tl.store(dk_ptr + kv_offsets, dk * HEAD_DIM**-0.5, mask=mask_n[:, None])
    tl.store(dv_ptr + kv_offsets, dv, mask=mask_n[:, None])


# ----------------------------------------------------------------------------------- Under autograd
def block_sizes(q: Tensor) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N). Larger tiles move fewer bytes, as long as their sums fit in registers."""
    if INTERPRETED.value:
        return 32, 16
    if q.itemsize > 2:
        return 16, 16
    return (64, 64) if q.shape[-1] <= 64 else (64, 32)


class FlashAttention(torch.autograd.Function):
    """(q, k, v, causal, block_m, block_n) -> (out, LSE). Saves inputs, output and LSE."""

    @staticmethod
    def forward(ctx, q, k, v, causal: bool, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
        q, k, v = (tensor.contiguous() for tensor in (q, k, v))
        batch, seq_len, n_heads, head_dim = q.shape
        out = torch.empty_like(q)
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(batch, n_heads, seq_len, dtype=lse_dtype, device=q.device)
        ctx.sizes = (seq_len, n_heads, n_heads // k.shape[2])
        ctx.options = dict(CAUSAL=causal, BLOCK_M=block_m, BLOCK_N=block_n, HEAD_DIM=head_dim)
        ctx.options["num_warps"] = 8 if q.itemsize == 2 else 4  # of one program
        grid = (triton.cdiv(seq_len, block_m), n_heads, batch)
        with torch.cuda.device_of(q):
            forward_kernel[grid](q, k, v, out, lse, *ctx.sizes, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor, _):
        q, k, v, out, lse = ctx.saved_tensors
        dout = dout.contiguous()  # the gradient of a sum is one element with strides of 0
        batch, seq_len, n_heads, _ = q.shape
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        delta = torch.empty_like(lse)
        query_grid = (triton.cdiv(seq_len, ctx.options["BLOCK_M"]), n_heads, batch)
        key_grid = (triton.cdiv(seq_len, ctx.options["BLOCK_N"]), k.shape[2], batch)
        with torch.cuda.device_of(q):
            dq_kernel[query_grid](q, k, v, out, dout, lse, delta, dq, *ctx.sizes, **ctx.options)
            dkdv_kernel[key_grid](q, k, v, dout, lse, delta, dk, dv, *ctx.sizes, **ctx.options)
        return dq, dk, dv, None, None, None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal=True, blocks=None) -> Tensor:
    """softmax(q kᵀ / √D) v. q [B, S, N, D]; k, v [B, S, N_kv, D] -> out [B, S, N, D]."""
    batch, seq_len, n_heads, head_dim = q.shape
    same_shapes = k.shape == v.shape == (batch, seq_len, k.shape[2], head_dim)
    if not same_shapes or n_heads % k.shape[2] or head_dim not in (16, 32, 64, 128):
        shapes = f"q {[*q.shape]}, k {[*k.shape]}, v {[*v.shape]}"
        raise ValueError(f"{shapes}: D must be 16, 32, 64 or 128, and N_kv must divide N")
    if not q.dtype == k.dtype == v.dtype:  # a matmul on tensor cores has factors of one dtype
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: convert them to one dtype")
    block_m, block_n = blocks or block_sizes(q)
    return FlashAttention.apply(q, k, v, causal, block_m, block_n)[0]


# ---------------------------------------------------------------------------------------- The check
def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """The definition, with all scores in a matrix and K and V copied for every head."""
    k, v = (tensor.repeat_interleave(q.shape[2] // k.shape[2], 2) for tensor in (k, v))
    scores = torch.einsum("bind,bjnd->bnij", q, k) * q.shape[-1] ** -0.5  # [B, N, S, S]
    if causal:
        mask = torch.full(scores.shape[2:], -torch.inf, dtype=q.dtype, device=q.device)
        scores = scores + mask.triu(1)
    return torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v)


@contextmanager
def count_traffic():
    """Yields a list of one element: the bytes that kernels load and store, without any cache.

    The interpreter executes every load and store, with its mask. For compiled kernels: None.
    """
    if not INTERPRETED.value:
        yield [None]
        return
    moved = [0]
    builder = triton.runtime.interpreter.interpreter_builder
    load = builder.create_masked_load
    store = builder.create_masked_store

    def count(pointers, mask):
        moved[0] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(pointers, mask, *args):
        count(pointers, mask)
        return load(pointers, mask, *args)

    def counted_store(pointers, values, mask, *args):
        count(pointers, mask)
        return store(pointers, values, mask, *args)

    builder.create_masked_load = counted_load
    builder.create_masked_store = counted_store
    try:
        yield moved
    finally:
        builder.create_masked_load = load
        builder.create_masked_store = store


def bytes_moved(q: Tensor, k: Tensor, causal: bool, block_m: int, block_n: int) -> tuple[int, int]:
    """Bytes of the forward and of the backward pass: the formula above with all small terms."""
    batch, seq_len, n_heads, head_dim = q.shape
    keys = 0  # loaded for one head, over all its query tiles
    for start_m in range(0, seq_len, block_m):
        end_n = min(start_m + block_m, seq_len) if causal else seq_len
        keys += min(seq_len, triton.cdiv(end_n, block_n) * block_n)
    queries = 0  # loaded for one head, over all key tiles
    for start_n in range(0, seq_len, block_n):
        queries += seq_len - start_n // block_m * block_m if causal else seq_len
    lse_bytes = max(4, q.itemsize)
    row_bytes = head_dim * q.itemsize
    heads = batch * n_heads
    full = heads * seq_len * row_bytes  # q, out, dout or dq
    per_row = heads * seq_len * lse_bytes  # LSE or delta
    load_kv = heads * keys * 2 * row_bytes
    load_q = heads * queries * 2 * (row_bytes + lse_bytes)  # q, dout; LSE, delta
    forward = 2 * full + per_row + load_kv
    backward_dq = 4 * full + 2 * per_row + load_kv
    backward_dkdv = 4 * k.nbytes + load_q  # k, v, dk, dv
    return forward, backward_dq + backward_dkdv


def run_attention(attention, q, k, v, dout, **options) -> tuple[list[Tensor], list[int]]:
    """[out, dq, dk, dv]; and bytes moved forward, moved backward, and saved between them."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, count_traffic() as forward:
        out = attention(q, k, v, **options)
    with count_traffic() as backward:
        grads = torch.autograd.grad(out, (q, k, v), dout)
    return [out.detach(), *grads], [forward[0], backward[0], sum(saved.values())]


def relative_errors(tensors: list[Tensor], expected: list[Tensor]) -> Tensor:
    pairs = zip(tensors, expected, strict=True)
    return torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs])


def check_softmax(seq_len: int, device: str) -> list[str]:
    """Print a line for each kernel, and return what is wrong."""
    x = torch.randn(20, seq_len, dtype=torch.float64, device=device)
    online_bytes = 3 * x.nbytes + x[:, 0].nbytes  # and the first maximum of each row
    failures = []
    for name, block, formula in [("at once", None, 2 * x.nbytes), ("online", 16, online_bytes)]:
        with count_traffic() as moved:
            error = (softmax(x, block) - x.softmax(-1)).abs().max().item()
        counted = f"{moved[0] or '-':>9} ({formula:7})"
        print(f"softmax, {name:18}{error:8.1e}  1.0e-10{counted}")
        if not error <= 1e-10:  # "not", so that NaN fails
            failures.append(f"softmax, {name}: error {error:.1e}")
        if moved[0] not in (None, formula):
            failures.append(f"softmax, {name}: {moved[0]} bytes, expected {formula}")
    return failures


def check_attention(inputs: list[Tensor], causal: bool, block_m: int | None) -> list[str]:
    """Compare with dense attention in float64; print a line, and return what is wrong."""
    q, k, _, dout = inputs
    default_m, block_n = block_sizes(q)
    blocks = (block_m or default_m, block_n)
    wide = [tensor.double() for tensor in inputs]
    expected, _ = run_attention(dense_attention, *wide, causal=causal)
    dense, dense_bytes = run_attention(dense_attention, *inputs, causal=causal)
    results, measured = run_attention(flash_attention, *inputs, causal=causal, blocks=blocks)

    errors = relative_errors(results, expected)  # of out, dq, dk, dv
    if q.itemsize == 2:  # as close to float64 as dense attention in the same precision
        allowed = 1.5 * relative_errors(dense, expected)
    else:
        allowed = torch.full_like(errors, 1e-5 if q.dtype == torch.float32 else 1e-10)
    saved = sum(tensor.nbytes for tensor in inputs)  # q, k, v; out is as large as dout
    saved += dout[..., 0].numel() * max(4, q.itemsize)  # LSE
    formulas = [*bytes_moved(q, k, causal, *blocks), saved]

    dtype = str(q.dtype).removeprefix("torch.")
    name = f"{'causal' if causal else 'full'}, {q.shape[1]} tokens, {dtype}"
    print(f"{name:27}{errors.max():8.1e} {allowed.max():8.1e}", end="")
    failures = []
    for bytes_, formula in zip(measured, formulas, strict=True):
        print(f"{bytes_ or '-':>9} ({formula:7})", end="")
        if bytes_ not in (None, formula):
            failures.append(f"{name}: {bytes_} bytes, expected {formula}")
    print(f"{dense_bytes[2]:>8}")
    if not bool((errors <= allowed).all()):  # a NaN is not <= anything
        failures.append(f"{name}: errors {errors.tolist()}")
    return failures


def check(seq_len: int, n_kv_heads: int, block_m: int | None, device: str) -> list[str]:
    print("bytes: counted (formula)      error  allowed", end="")
    print("     forward moves    backward moves             saved  dense")
    failures = check_softmax(seq_len, device)
    half = torch.float16 if INTERPRETED.value else torch.bfloat16
    cases = [(seq_len, torch.float64, True), (seq_len, torch.float64, False)]
    cases += [(seq_len, torch.float32, True), (2 * seq_len, torch.float32, True)]
    cases += [(seq_len, half, True), (seq_len, half, False)]
    for length, dtype, causal in cases:
        heads = (4, n_kv_heads, n_kv_heads, 4)  # of q, k, v, dout
        inputs = [torch.randn(1, length, n, 32, device=device).to(dtype) for n in heads]
        failures += check_attention(inputs, causal, block_m)
    return failures


# ------------------------------------------------------------------------------------------ Options
def fail(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
        print(f"{os.path.basename(__file__)}: {message}", file=sys.stderr)
    sys.exit(2)


def main() -> int:
    parser = argparse.ArgumentParser(description="FlashAttention in one file", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--tokens", type=int, default=50, help="sequence length, 6 or more")
    parser.add_argument("--kv-heads", type=int, default=2, choices=(1, 2, 4), help="for 4 heads")
    parser.add_argument("--block-m", type=int, choices=(16, 32, 64), help="queries per tile")
    args = parser.parse_args()
    if args.tokens < 6:  # of fewer values an error in 16 bits is a matter of luck
        parser.error(f"--tokens {args.tokens}: use 6 or more")
    if not INTERPRETED.value and not torch.cuda.is_available():
        parser.error("TRITON_INTERPRET=0 needs a GPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    failures = check(args.tokens, args.kv_heads, args.block_m, device)
    print(f"FAIL: {'; '.join(failures)}" if failures else "PASS")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
