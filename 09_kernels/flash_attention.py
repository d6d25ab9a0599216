"""FlashAttention in Triton: from a row of softmax to attention that never writes its scores, forward and backward.

Problem. softmax(q kᵀ / sqrt(D)) v makes S x S scores a head: 128 MiB in bf16 at S = 8192, for one head of one sequence.
Written to the GPU's memory (HBM), they are read for the softmax, its result is written, read for the product, and kept
for backward. Moving these matrices takes longer than computing them.

Idea. What is computed on the chip should be used up on the chip, and a softmax can be computed in pieces:

  1 fused     one program has a row in its registers: reads x once, writes y once           `softmax_kernel`
  2 online    a row in blocks; maximum m and sum l of what came so far; when a larger
              maximum comes, l shrinks by e^(m - new)                                       `online_softmax_kernel`
  3 attention the row need not be written: what is wanted is the sum of e^score · v, and it
              shrinks as l does. A program has R queries; C keys at a time pass by          `forward_kernel`
  4 backward  no weight is kept: each is e^(score - LSE) again, with LSE = m + log l        `dq_kernel`, `dkdv_kernel`

             keys 0    1    2    3      forward and dq: a program has a row of tiles and walks to the right
    queries 0    [/]   .    .    .      dk and dv:      a program has a column of tiles and walks down
            1    [#]  [/]   .    .      # all of the tile is seen    / the diagonal: half of it is masked
            2    [#]  [#]  [/]   .      . causal: nothing is seen, so it is neither loaded nor computed
            3    [#]  [#]  [#]  [/]     No two programs write to the same place, and none waits for another.

To and from HBM in forward: B sequences, N query heads of D numbers of b bytes; K̄ keys pass by a query's tile, S or, if
causal, (S + R)/2 of them. Single numbers such as LSE are left out:
    scores written out    4 b B N (S D + S²)          q, k, v, out; scores and weights, both written and read
    in tiles of R rows    2 b B N S D (1 + K̄/R)       q and out once; K and V once for every tile of queries
Tiles fill the M numbers of on-chip memory (SRAM): R ~ M/D, which gives Θ(S² D²/M) in place of Θ(S D + S²).
Kept for backward: q, k, v, out and one LSE a row, O(S) in place of O(S²). FLOPs: forward 4 B N S K̄ D, two products;
backward 14 B N S K̄ D, seven: five are needed, and two are computed twice so that no program waits for another.
Online softmax: Milakov & Gimelshein 2018, arXiv 1805.02867. FlashAttention: Dao et al. 2022, 2205.14135, theorem 2;
FlashAttention-2: Dao 2023, 2307.08691, algorithms 1 and 2.

    python flash_attention.py                           no GPU: in Triton's interpreter; GPU: compiled
    python flash_attention.py --tokens 77 --kv-heads 1 --rows 16
Ends with PASS when outputs and gradients are those of dense attention, and bytes those of the formulas.
"""

import argparse
import os
import sys
from contextlib import contextmanager

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it where a kernel is defined; programs run as Python

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
for name, function in list(vars(tl.standard).items()):
    if INTERPRETED.value and isinstance(function, triton.JITFunction):  # tl.sum and others are kernels, too, and were
        setattr(tl.standard, name, triton.jit(function.fn))  # defined when somebody first imported Triton
        setattr(tl, name, getattr(tl.standard, name))

# B sequences, S tokens, N query heads, N_kv heads of K/V, G = N / N_kv, D numbers a head. A tile is R queries (rows) by
# C keys (columns), i is a query and j a key; `head` counts the heads of all sequences.


# ------------------------------------------------------------------------------------------ 1 and 2: a row of softmax
@triton.jit
def softmax_kernel(x, y, length, BLOCK: tl.constexpr):
    """Program r has row r of x [rows, length], all of it: BLOCK, a power of two, is `length` or more."""
    row, j = tl.program_id(0).to(tl.int64) * length, tl.arange(0, BLOCK)
    scores = tl.load(x + row + j, mask=j < length, other=float("-inf"))  # e^-inf = 0: what is not there
    weights = tl.exp(scores - tl.max(scores, 0))  # without the maximum, e^89 is too large for float32
    tl.store(y + row + j, weights / tl.sum(weights, 0), mask=j < length)


@triton.jit
def online_softmax_kernel(x, y, length, BLOCK: tl.constexpr):
    """The same for a row of any length, BLOCK numbers at a time: one walk for m and l, and one that writes."""
    row, j = tl.program_id(0).to(tl.int64) * length, tl.arange(0, BLOCK)
    m = tl.load(x + row)  # any number of the row will do as the first maximum, unless the first block is all -inf
    total = tl.zeros_like(m)  # l: the sum of e^(x - m) so far
    # --- exercise 9.4: maximum and sum of a row in one walk ---
    for start in range(0, length, BLOCK):
        scores = tl.load(x + row + start + j, mask=start + j < length, other=float("-inf"))
        new = tl.maximum(m, tl.max(scores, 0))
        total = total * tl.exp(m - new) + tl.sum(tl.exp(scores - new), 0)
        m = new
    # --- end exercise ---
    for start in range(0, length, BLOCK):
        scores = tl.load(x + row + start + j, mask=start + j < length, other=0.0)
        tl.store(y + row + start + j, tl.exp(scores - m) / total, mask=start + j < length)


def softmax(x: Tensor, block: int | None = None) -> Tensor:
    """Of rows x [rows, length], float32 or float64, at once or by `block`: a first one of only -inf gives NaN."""
    x = x.contiguous()
    kernel, y = online_softmax_kernel if block else softmax_kernel, torch.empty_like(x)
    kernel[(len(x),)](x, y, x.shape[1], BLOCK=block or triton.next_power_of_2(x.shape[1]))
    return y


# ---------------------------------------------------------------------------------------------- 3: attention, forward
@triton.jit
def tile_of(head, start, S, N, T: tl.constexpr, D: tl.constexpr):
    """T tokens of one head of [B, S, N, D] -> where their numbers are [T, D], which exist [T, 1], their places [T]."""
    t, first = start + tl.arange(0, T), (head // N).to(tl.int64) * S * N + head % N  # 64 bits: B S N D may pass 2^31
    return (first + t[:, None] * N) * D + tl.arange(0, D)[None, :], t[:, None] < S, t


@triton.jit
def dot(a, b):
    """a @ b, summed wide. "ieee": by default float32 is rounded to TF32, which keeps 10 of its 23 bits."""
    if INTERPRETED and a.dtype == tl.bfloat16:  # which the interpreter would take for integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def scores_of(q_i, k_j, start_i, start_j, S, CAUSAL: tl.constexpr):
    """Queries [R, D] and keys [C, D], from tokens start_i and start_j on -> [R, C]; -inf where i does not see j."""
    i, j = start_i + tl.arange(0, q_i.shape[0])[:, None], start_j + tl.arange(0, k_j.shape[0])[None, :]
    seen = (j <= i if CAUSAL else i >= 0) & (j < S)  # a tile may run over the end: its zeros must not get weights
    return tl.where(seen, dot(q_i, k_j.T) * q_i.shape[1] ** -0.5, float("-inf"))


@triton.jit(do_not_specialize=["S", "N"])  # one binary for all lengths
def forward_kernel(q, k, v, out, lse, S, N, G, CAUSAL: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """out and LSE of R queries of one head. FlashAttention-2, algorithm 1."""
    WIDE: tl.constexpr = lse.dtype.element_ty  # float32, or float64 for float64: all sums and maxima
    head, start_i = tl.program_id(0) // tl.cdiv(S, R), tl.program_id(0) % tl.cdiv(S, R) * R
    rows, there, i = tile_of(head, start_i, S, N, R, D)
    q_i = tl.load(q + rows, mask=there, other=0.0)  # stays on the chip
    m, total, acc = tl.full([R], float("-inf"), WIDE), tl.zeros([R], WIDE), tl.zeros([R, D], WIDE)
    # --- exercise 9.5: R queries meet the keys that they see ---
    stop = tl.minimum(start_i + R, S) if CAUSAL else S  # beyond it, tiles are neither loaded nor computed
    for start_j in range(0, stop, C):
        columns, exist, _ = tile_of(head // G, start_j, S, N // G, C, D)  # G query heads share it: nothing is expanded
        k_j, v_j = tl.load(k + columns, mask=exist, other=0.0), tl.load(v + columns, mask=exist, other=0.0)
        scores = scores_of(q_i, k_j, start_i, start_j, S, CAUSAL)
        new = tl.maximum(m, tl.max(scores, 1))  # never -inf: everyone sees key 0, which is in the first tile
        weights, shrink = tl.exp(scores - new[:, None]), tl.exp(m - new)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + dot(weights.to(v_j.dtype), v_j)  # [R, C] @ [C, D]: 16-bit factors, a wide sum
        m = new
    # --- end exercise ---
    tl.store(out + rows, acc / total[:, None], mask=there)
    tl.store(lse + head.to(tl.int64) * S + i, m + tl.log(total), mask=i < S)


# --------------------------------------------------------------------------------------------------------- 4: backward
@triton.jit
def again(q_i, do_i, lse_i, delta_i, k_j, v_j, start_i, start_j, S, CAUSAL: tl.constexpr):
    """The weights of a tile once more, [R, C], and the gradients of its scores. A row of weights sums to 1, so more for
    one key is less for the others. How much less is one number for the row, delta = sum over all keys of
    weight · dweight, and that is dout · out (algorithm 2, line 4)."""
    # --- exercise 9.6: weights from the LSE, gradients of scores from delta ---
    weights = tl.exp(scores_of(q_i, k_j, start_i, start_j, S, CAUSAL) - lse_i[:, None])
    dscores = weights * (dot(do_i, v_j.T) - delta_i[:, None])  # [R, D] @ [D, C] are the gradients of the weights
    # --- end exercise ---
    return weights, dscores


@triton.jit(do_not_specialize=["S", "N"])
def dq_kernel(
    q, k, v, out, dout, lse, delta, dq, S, N, G, CAUSAL: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr
):
    """dq of R queries of one head, a sum over the keys that they see: the walk of forward. Leaves delta for dk, dv."""
    WIDE: tl.constexpr = lse.dtype.element_ty
    head, start_i = tl.program_id(0) // tl.cdiv(S, R), tl.program_id(0) % tl.cdiv(S, R) * R
    rows, there, i = tile_of(head, start_i, S, N, R, D)
    q_i, do_i = tl.load(q + rows, mask=there, other=0.0), tl.load(dout + rows, mask=there, other=0.0)
    delta_i = tl.sum(do_i.to(WIDE) * tl.load(out + rows, mask=there, other=0.0).to(WIDE), 1)
    single, acc = head.to(tl.int64) * S + i, tl.zeros([R, D], WIDE)
    lse_i = tl.load(lse + single, mask=i < S, other=0.0)
    tl.store(delta + single, delta_i, mask=i < S)
    for start_j in range(0, tl.minimum(start_i + R, S) if CAUSAL else S, C):
        columns, exist, _ = tile_of(head // G, start_j, S, N // G, C, D)
        k_j, v_j = tl.load(k + columns, mask=exist, other=0.0), tl.load(v + columns, mask=exist, other=0.0)
        _, dscores = again(q_i, do_i, lse_i, delta_i, k_j, v_j, start_i, start_j, S, CAUSAL)
        acc += dot(dscores.to(k_j.dtype), k_j)  # [R, C] @ [C, D]
    tl.store(dq + rows, acc * D**-0.5, mask=there)


@triton.jit(do_not_specialize=["S", "N"])
def dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, S, N, G, CAUSAL: tl.constexpr, R: tl.constexpr, C: tl.constexpr, D: tl.constexpr
):
    """dk and dv of C keys of one K/V head: sums over the queries that see them, in all G heads that share it."""
    WIDE: tl.constexpr = lse.dtype.element_ty
    kv_head, start_j = tl.program_id(0) // tl.cdiv(S, C), tl.program_id(0) % tl.cdiv(S, C) * C
    columns, exist, _ = tile_of(kv_head, start_j, S, N // G, C, D)
    k_j, v_j = tl.load(k + columns, mask=exist, other=0.0), tl.load(v + columns, mask=exist, other=0.0)
    dk_j, dv_j = tl.zeros([C, D], WIDE), tl.zeros([C, D], WIDE)
    # --- exercise 9.7: C keys meet the queries that see them ---
    first = start_j // R * R if CAUSAL else 0  # the tile of queries in which key start_j is seen for the first time
    for g in range(G):
        head = kv_head * G + g
        for start_i in range(first, S, R):
            rows, there, i = tile_of(head, start_i, S, N, R, D)
            q_i, do_i = tl.load(q + rows, mask=there, other=0.0), tl.load(dout + rows, mask=there, other=0.0)
            single = head.to(tl.int64) * S + i
            lse_i = tl.load(lse + single, mask=i < S, other=float("inf"))  # beyond the end: weights e^(0 - inf) = 0
            delta_i = tl.load(delta + single, mask=i < S, other=0.0)
            weights, dscores = again(q_i, do_i, lse_i, delta_i, k_j, v_j, start_i, start_j, S, CAUSAL)
            dv_j += dot(weights.T.to(do_i.dtype), do_i)  # [C, R] @ [R, D]
            dk_j += dot(dscores.T.to(q_i.dtype), q_i)
    # --- end exercise ---
    tl.store(dk + columns, dk_j * D**-0.5, mask=exist)
    tl.store(dv + columns, dv_j, mask=exist)


# ---------------------------------------------------------------------------------------------------- under autograd
def tile_sizes(x: Tensor) -> tuple[int, int]:
    """(R, C). Larger tiles move fewer bytes, until the sums of a program no longer fit the registers of its threads."""
    return (32, 16) if INTERPRETED.value else (64, 64 if x.shape[-1] <= 64 else 32) if x.itemsize == 2 else (16, 16)


class Attention(torch.autograd.Function):
    """(q, k, v, causal, R, C) -> out, LSE. A program for each tile of each head, in any order. Autograd keeps inputs,
    output and a number a row: nothing is S x S, and K and V have N_kv heads."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, R: int, C: int) -> tuple[Tensor, Tensor]:
        (B, S, N, D), (q, k, v) = q.shape, (x.contiguous() for x in (q, k, v))
        out, lse = torch.empty_like(q), q.new_empty(B, N, S, dtype=torch.promote_types(q.dtype, torch.float32))
        warps = 8 if q.itemsize == 2 else 4  # of 32 threads each, for one program
        ctx.numbers = dict(S=S, N=N, G=N // k.shape[2], CAUSAL=causal, R=R, C=C, D=D, num_warps=warps)
        forward_kernel[(B * N * triton.cdiv(S, R),)](q, k, v, out, lse, **ctx.numbers)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor, _):
        (q, k, v, out, lse), dout, numbers = ctx.saved_tensors, dout.contiguous(), ctx.numbers
        tiles_q, tiles_k = (triton.cdiv(q.shape[1], numbers[tile]) for tile in "RC")
        dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, lse))
        dq_kernel[(len(q) * q.shape[2] * tiles_q,)](q, k, v, out, dout, lse, delta, dq, **numbers)
        dkdv_kernel[(len(k) * k.shape[2] * tiles_k,)](q, k, v, dout, lse, delta, dk, dv, **numbers)
        return dq, dk, dv, None, None, None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, tiles: tuple = ()) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v. q [B, S, N, D]; k, v [B, S, N_kv, D] -> like q."""
    B, S, N, D = q.shape
    if k.shape != v.shape or k.shape != (B, S, k.shape[2], D) or N % k.shape[2] or D not in (16, 32, 64, 128):
        raise ValueError(f"q {[*q.shape]}, k {[*k.shape]}, v {[*v.shape]}: D is 16, 32, 64 or 128; N_kv divides N")
    return Attention.apply(q, k, v, causal, *(tiles or tile_sizes(q)))[0]


# ------------------------------------------------------------------------------------------------------------ the proof
def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """The definition, with a matrix of scores, and K and V copied for all heads that share them."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bind,bjnd->bnij", q, k) * q.shape[-1] ** -0.5  # [B, N, S, S]
    if causal:
        scores = scores + torch.full(scores.shape[2:], -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    return torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v)


@contextmanager
def traffic():
    """[bytes that kernels load and store]: the interpreter executes each load, and a mask says which numbers are there.
    A cache would answer some of them. Compiled kernels are not counted: None."""
    machine = triton.runtime.interpreter.interpreter_builder if INTERPRETED.value else None
    count, plain = [0 if machine else None], {}
    for mask, name in enumerate(("create_masked_load", "create_masked_store") if machine else (), 1):
        plain[name] = getattr(machine, name)

        def counted(*args, mask=mask, function=plain[name]):
            count[0] += int(args[mask].data.sum()) * args[0].get_element_ty().primitive_bitwidth // 8
            return function(*args)

        setattr(machine, name, counted)
    try:
        yield count
    finally:
        for name, function in plain.items():
            setattr(machine, name, function)


def bytes_moved(q: Tensor, k: Tensor, causal: bool, R: int, C: int) -> tuple[int, int]:
    """(forward, backward), to the byte: the docstring's formula with all that it leaves out."""
    (B, S, N, D), e = q.shape, q.itemsize
    keys = sum(min(S, triton.cdiv(min(i + R, S), C) * C) if causal else S for i in range(0, S, R))  # for one head
    queries = sum(S - j // R * R if causal else S for j in range(0, S, C))
    one, kv, single = B * N * S * D * e, 2 * k.numel() * e, B * N * S * max(4, e)  # q, out or dq; K and V; LSE or delta
    walk, down = B * N * keys * 2 * D * e, B * N * queries * 2 * (D * e + max(4, e))  # K, V; q, dout, LSE, delta
    return 2 * one + single + walk, 4 * one + 2 * single + walk + 2 * kv + down


def run(attention, *given: Tensor, **how) -> tuple[list[Tensor], list[int]]:
    """[out, dq, dk, dv] and bytes: moved in forward, moved in backward, kept between them."""
    (q, k, v), kept = (x.detach().requires_grad_() for x in given[:3]), {}
    keep = lambda x: kept.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), traffic() as there:
        out = attention(q, k, v, **how)
    with traffic() as back:
        gradients = torch.autograd.grad(out, (q, k, v), given[3])
    return [out.detach(), *gradients], [there[0], back[0], sum(kept.values())]


def check(S: int, N_kv: int, rows: int, device: str) -> list[str]:
    """Each case beside dense attention in float64; prints a line for each, returns what is wrong."""
    x, wrong = torch.randn(20, S, dtype=torch.float64, device=device), []
    for name, block, moved in (("a row at once", None, 2 * x.nbytes), ("online", 16, 3 * x.nbytes + x[:, 0].nbytes)):
        with traffic() as count:
            error = (softmax(x, block) - x.softmax(-1)).abs().max().item()
        print(f"softmax, {name:18}{error:8.1e} {1e-10:8.1e} {count[0] or '-':>8} ({moved:7})")
        bad = not (error <= 1e-10 and count[0] in (moved, None))  # "not", so that NaN is bad
        wrong += [f"softmax, {name}: error {error:.1e}, {count[0]} bytes"] * bad
    f64, f32, f16 = torch.float64, torch.float32, torch.float16 if INTERPRETED.value else torch.bfloat16
    cases = ((True, S, f64), (False, S, f64), (True, S, f32), (True, 2 * S, f32), (True, S, f16), (False, S, f16))
    for causal, length, dtype in cases:
        given = [torch.randn(1, length, n, 32, device=device).to(dtype) for n in (4, N_kv, N_kv, 4)]
        tiles = (rows or tile_sizes(given[0])[0], tile_sizes(given[0])[1])
        want, _ = run(dense_attention, *(x.double() for x in given), causal=causal)
        dense, (*_, dense_keeps) = run(dense_attention, *given, causal=causal)
        got, bytes_ = run(flash_attention, *given, causal=causal, tiles=tiles)
        off = [torch.stack([(a - b).norm() / b.norm() for a, b in zip(z, want, strict=True)]) for z in (got, dense)]
        allowed = {8: off[1] * 0 + 1e-10, 4: off[1] * 0 + 1e-5, 2: 1.5 * off[1]}[dtype.itemsize]  # out, dq, dk, dv
        kept = sum(x.nbytes for x in given) + 4 * length * max(4, dtype.itemsize)  # q, k, v; out is like dout; LSE
        pairs = list(zip(bytes_, (*bytes_moved(*given[:2], causal, *tiles), kept), strict=True))
        name = f"{'causal' if causal else 'full'}, {length} tokens, {str(dtype)[6:]}"
        columns = "".join(f"{n or '-':>9} ({formula:7})" for n, formula in pairs)
        print(f"{name:27}{off[0].max():8.1e} {allowed.max():8.1e}{columns}{dense_keeps:>8}")
        wrong += [f"{name}: errors {off[0].tolist()}"] * (not bool((off[0] <= allowed).all()))
        wrong += [f"{name}: {n} bytes, not {formula}" for n, formula in pairs if n not in (formula, None)]
    return wrong


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    parser = Parser(description="FlashAttention in one file", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=50, help="of a sequence; default %(default)s")
    parser.add_argument("--kv-heads", type=int, default=2, choices=(1, 2, 4), help="for 4 heads; default %(default)s")
    parser.add_argument("--rows", type=int, choices=(16, 32, 64), help="queries in a tile; default: by dtype")
    args = parser.parse_args()
    if args.tokens < 2 or not (INTERPRETED.value or torch.cuda.is_available()):
        parser.error(f"--tokens {args.tokens}: use 2 or more" if args.tokens < 2 else "TRITON_INTERPRET=0 needs a GPU")
    torch.manual_seed(0)
    print("bytes: counted (formula)      error  allowed     forward moves    backward moves             keeps  dense")
    wrong = check(args.tokens, args.kv_heads, args.rows or 0, "cuda" if torch.cuda.is_available() else "cpu")
    print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
