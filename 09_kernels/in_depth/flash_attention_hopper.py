"""FlashAttention on Hopper: warps that load and warps that compute. The forward pass once more, for sm_90.

Problem. On a Hopper GPU the tensor cores are so fast that everything around them shows. A warp that has to ask for the
next tile, wait for it, and only then issue the product, leaves them idle; and while it computes exponentials, of which
a multiprocessor does 16 per cycle against 2048 multiply-adds, they idle as well.

Idea. Divide the labour. One group of four warps, the producer, does nothing but ask the copy engine for tiles; two
groups of four, the consumers, do nothing but compute, each on its half of the queries. While one group of consumers is
at its exponentials, the other can have the tensor cores. A ring of buffers in shared memory connects them, with a
barrier each for "full" and "empty":

    producer        k0 v0 | k1 v1 | k2 v2 | ...        waits only for an empty buffer; needs few registers
    consumer 0      rows 0..63       QK  exp  PV  QK  exp  PV          one computes exponentials while
    consumer 1      rows 64..127         QK  exp  PV  QK  exp  PV      the other has the tensor cores

Triton's compiler does all this for a loop marked `warp_specialize=True`, if the loop is one it understands: one loop
in the kernel, tiles from two-dimensional descriptors, four warps asked for (it makes twelve). So this kernel is the
one of flash_kernels.py with three changes: a descriptor is made for each head; the three runs of tiles become one
loop; and with one loop, every tile is compared with the band, which costs two instructions a score. Where no tile is
cut (no mask, and S a multiple of the tile), the comparison is compiled away.

Whether it pays is a question for a GPU: bench_flash_attention_hopper.py --gpu measures both. It is never chosen by
itself, and refuses Triton 3.6, whose binary gave wrong numbers on an H200 (the interpreter's are right).

Formulas: in flash_tiles.py. Warp specialisation of attention: FlashAttention-3, Shah et al. 2024 (arXiv 2407.08608,
section 3.1, also for the rate of exponentials).

Run it:
    python flash_attention_hopper.py                           CPU: the interpreter, which has no warps to divide
    python flash_attention_hopper.py --dtype float16 --seq 100
    torchrun --nproc_per_node 2 flash_attention_hopper.py      every rank checks inputs of its own
The last line is PASS, or the script exits with 1 and says which number is off.
"""

import math
import sys

import torch
from _flash_launch import OLD, Tiles, check_inputs, fit
from _interpreter import INTERPRETED, tl, triton
from flash_kernels import LOG2_E, SIZES, dot, parse_arguments, triton_backward
from flash_tiles import Version, band, run
from torch import Tensor

# Legend of shapes: B batch, S sequence (S_q queries, S_k keys), N query heads, N_kv key/value heads, G = N / N_kv,
# D head dim; R queries (rows) and C keys (columns) of a tile, W the next power of two from D.


@triton.jit
def head_of(x, S, b, n, T: tl.constexpr, W: tl.constexpr):
    """A descriptor of [S, D], one head of one sequence, in tiles of [T, W]: what lies outside is zero.

    One descriptor of [B · S, D] for everything would run on from the last token of a sequence into the next sequence,
    whose numbers a mask would hide, but not a NaN among them: 0 · NaN is NaN.
    """
    address, D, stride_b, stride_s, stride_n = x
    # --- exercise 9.34: the descriptor of one head ---
    address += b * stride_b.to(tl.int64) + n * stride_n.to(tl.int64)
    return tl.make_tensor_descriptor(address, [S, D], [stride_s, 1], [T, W])
    # --- end exercise ---


@triton.jit(do_not_specialize=SIZES)
def specialised_kernel(
    q, k, v, out, lse, S_q, S_k, N, G, first, last, scale, CUT: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr
):  # fmt: skip
    """out and LSE of R queries of one head, in a single loop over the tiles of keys that any of them sees."""
    tiles = tl.cdiv(S_q, R)
    tile = tiles - 1 - tl.program_id(0) % tiles  # the longest rows first
    head = tl.program_id(0) // tiles
    b, n = head // N, head % N
    start_i = tile * R
    i = start_i + tl.arange(0, R)
    keys, values = head_of(k, S_k, b, n // G, C, W), head_of(v, S_k, b, n // G, C, W)
    q_tile = head_of(q, S_q, b, n, R, W).load([start_i, 0])
    # --- exercise 9.35: the tiles that any of my queries sees, and what each of them sees of these ---
    begin = tl.maximum(start_i + first, 0) // C * C
    end = tl.minimum(tl.minimum(start_i + R, S_q) + last, S_k)
    lowest, highest = i + first, tl.minimum(i + last, S_k - 1)  # [R]: query i sees the keys lowest..highest
    # --- end exercise ---
    m = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, W], tl.float32)
    for start_j in tl.range(begin, end, C, warp_specialize=True):
        k_tile = keys.load([start_j, 0])
        scores = dot(q_tile, k_tile.T)  # [R, W] @ [W, C] -> [R, C]
        # --- exercise 9.36: mask, and the online softmax ---
        if CUT:
            j = start_j + tl.arange(0, C)
            inside = (j[None, :] >= lowest[:, None]) & (j[None, :] <= highest[:, None])
            scores = tl.where(inside, scores, float("-inf"))
        new = tl.maximum(m, tl.max(scores, 1) * (scale * LOG2_E))
        safe = tl.where(new == float("-inf"), 0.0, new) if CUT else new
        weights = tl.exp2(scores * (scale * LOG2_E) - safe[:, None])
        shrink = tl.exp2(m - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        m = new
        # --- end exercise ---
        v_tile = values.load([start_j, 0])
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    total = tl.where(total == 0.0, 1.0, total)
    head_of(out, S_q, b, n, R, W).store([start_i, 0], (acc / total[:, None]).to(out[0].dtype.element_ty))
    tl.store(lse + head.to(tl.int64) * S_q + i, (m + tl.log2(total)) / LOG2_E, mask=i < S_q)


def refusal() -> str:
    """Why this Triton is not for the kernel, in one line; "" if it is, or if it interprets."""
    if INTERPRETED or not OLD:
        return ""
    return f"Triton {triton.__version__} divides the warps wrongly; use 3.7 or later, or flash_kernels.py"


# Four warps: the compiler adds a second group of consumers and the producer. Registers and shared memory are full with
# these tiles and D = 128.
TILES = Tiles(32, 16) if INTERPRETED else Tiles(128, 128, 4, 2)


def specialised_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    offset: int = 0,
    dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, S_q, N, D] in `dtype` (or fp32) and LSE [B, N, S_q] in fp32.

    ValueError for a GPU that is no Hopper, for D above 128, and on any GPU for fp32, which tensor cores do not multiply
    exactly.
    """
    check_inputs(q, k, v, window)
    if q.shape[-1] > 128:
        raise ValueError(f"head dim {q.shape[-1]} does not fit the specialised kernel (128); use flash_kernels.py")
    if not INTERPRETED and torch.cuda.get_device_capability(q.device)[0] != 9:
        raise ValueError(f"{torch.cuda.get_device_name(q.device)} is no sm_90; use the kernels of flash_kernels.py")
    if reason := refusal():
        raise ValueError(reason)
    if not INTERPRETED and q.dtype == torch.float32:
        raise ValueError("float32 has no warp-specialised kernel; use the kernels of flash_kernels.py")
    B, S_q, N, D = q.shape
    S_k = k.shape[1]
    R, C, warps, stages = tiles or TILES
    out = torch.empty(q.shape, dtype=dtype or torch.float32, device=q.device)
    lse = torch.empty(B, N, S_q, dtype=torch.float32, device=q.device)
    cut = causal or window is not None or offset != 0 or S_k % C != 0
    # Descriptors that a kernel makes live in memory that Triton asks for here: 128 bytes each, per program.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=q.device))
    with torch.cuda.device_of(q):
        specialised_kernel[(triton.cdiv(S_q, R) * B * N,)](
            *(fit(x, tokens, tma=True) for x, tokens in ((q, R), (k, C), (v, C), (out, R))),
            *(lse, S_q, S_k, N, N // k.shape[2], *band(S_q, S_k, causal, window, offset), 1 / math.sqrt(D)),
            **dict(CUT=cut, R=R, C=C, W=triton.next_power_of_2(D), num_warps=warps, num_stages=stages),
        )
    return out, lse


SPECIALISED = Version(specialised_forward, triton_backward)  # flash_attention(..., version=SPECIALISED)


if __name__ == "__main__":
    arguments = parse_arguments(hopper=True)
    if why_not := refusal():
        print(f"flash_attention_hopper.py: {why_not}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(arguments, SPECIALISED))
