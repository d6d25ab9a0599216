"""Chapter 9, the loss in Triton: cross-entropy in two passes over the logits, then without full logits.

The problem. The last layer of a language model is its largest matmul, and its output the largest tensor of
the training step: T tokens times vocabulary V. With T = 32,768 and V = 128,256 the logits are 8.4 GB in bf16.
PyTorch stores more of that size (float32 logits, their log-softmax, two gradients), for one scalar.

The idea, in two steps. First: the loss of a row needs the label's logit and two values, from which backward
recomputes the softmax. m is the largest logit, s the sum of exp(logit - m) over the row:

    loss = log s - (logit[label] - m)             d logit = exp(logit - m) / s - [1 at the label]

A row of V logits does not fit into registers. It is read in blocks with a running maximum m and a running sum s (the
online softmax, 1805.02867). If a block raises the maximum from m to m', the earlier sum is exp(m' - m)
times too large:

    block 1     block 2     block 3             m' = max(m, max of the block)
    [-------]   [-------]   [----···]           s' = s exp(m - m') + sum of exp(block - m')
    m, s    ->  m', s'   -> m'', s''            (labels of -100: loss 0, gradient 0)

Saved for backward: the logits as given, and m and s. (One value, m + log s, would suffice but cost digits: of
a sum around 100, float32 keeps 1e-5, so every probability would have that error.)

Second: a token's loss depends on no other token. So the output layer and the loss can run on C tokens at a
time, and compute the gradients of that chunk while its logits exist. The next chunk reuses the memory:

    hidden [T, H]   C rows -> logits [C, V] -> loss of C tokens
                                  |  overwritten by their own gradient G
                                  +-> G W   -> C rows of d hidden [T, H]
                                  +-> Gᵀ h  -> added to d weight  [V, H], in float32

    memory      chunk C·V·e  +  d weight V·H·4  +  d hidden T·H·e         instead of several times T·V·e
    FLOPs       6·T·H·V, the same three matmuls; nothing is computed twice

Backward then only multiplies by the gradient of the sum, a scalar. Liger does the same (2410.10989).

    python fused_loss.py                             both against float64 and PyTorch; ends with PASS
    python fused_loss.py --tokens 100 --vocab 3000 --chunk 7 --dtype float16

Shapes: T = B·S tokens, H hidden, V vocabulary, C tokens of a chunk; e bytes per element.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from _fused_demo import demo_of_fused_loss
from _interpreter import tl, triton
from fused import as_rows, check, wide
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # the label of a token without a target
# From torch 2.12 on a bf16 matmul can accumulate into fp32. Before, the result is written and added in a pass
# of its own, 16 bytes per element of d weight and chunk instead of 8, so chunks are twice as large.
ADDS_WIDE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
CHUNK_BYTES = 2**30 if ADDS_WIDE else 2**31  # the logits of one chunk: small compared with everything else
SLICE_BYTES = 2**28  # the part of d weight that is computed before it is added

# -------------------------------------------------------------------------------------------------- references


def cross_entropy_reference(logits: Tensor, labels: Tensor) -> Tensor:
    """SUM of -log p(label) over the valid labels, in float32 or better, as chapter 1 writes it."""
    wider = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(wider, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy_reference(F.linear(hidden, weight), labels)


# ----------------------------------------------------------------------------------------------------- kernels


@triton.jit
def cross_entropy_kernel(
    logits_ptr, labels_ptr, loss_ptr, m_ptr, s_ptr, stride, vocab, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits_ptr += row * stride
    # --- exercise 9.37: m and s of a row that is read in blocks of BLOCK; a block may be all -inf ---
    m = tl.full([], -float("inf"), WIDE)
    s = tl.zeros([], WIDE)
    for start in range(0, vocab, BLOCK):
        word = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + word, mask=word < vocab, other=-float("inf")).to(WIDE)
        higher = tl.maximum(m, tl.max(x, 0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # only -inf so far: -inf - (-inf) would be NaN
        s = s * tl.exp(m - safe) + tl.sum(tl.exp(x - safe), 0)
        m = higher
    # --- end exercise ---
    inside = (label >= 0) & (label < vocab)
    loss = tl.log(s) - (tl.load(logits_ptr + label, mask=inside, other=0.0).to(WIDE) - m)
    # An invalid label must not read beyond the row, and its loss is NaN.
    loss = tl.where(inside, loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(label == -100, 0.0, loss))
    tl.store(m_ptr + row, m)
    tl.store(s_ptr + row, s)


# Each program handles one block of one row, because nothing has to be summed. `gradient` may be `logits` itself: every
# element is read by the one thread that overwrites it.
@triton.jit
def cross_entropy_backward_kernel(
    logits_ptr, labels_ptr, m_ptr, s_ptr, scale_ptr, gradient_ptr, stride, gradient_stride, vocab,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    m = tl.load(m_ptr + row)
    s = tl.load(s_ptr + row)
    scale = tl.load(scale_ptr).to(WIDE)  # the gradient of the sum, one scalar for all rows
    # --- exercise 9.38: the gradient of this block of the row's logits ---
    x = tl.load(logits_ptr + row * stride + word, mask=word < vocab, other=0.0).to(WIDE)
    gradient = tl.exp(x - m) / s - tl.where(word == label, 1.0, 0.0)
    gradient = tl.where(label == -100, 0.0, gradient * scale)  # zeros must be written too: the memory is not empty
    # --- end exercise ---
    gradient = tl.where((label >= 0) & (label < vocab) | (label == -100), gradient, float("nan"))
    at = gradient_ptr + row * gradient_stride + word
    tl.store(at, gradient.to(gradient_ptr.dtype.element_ty), mask=word < vocab)


def block_of(vocab: int) -> tuple[int, int]:
    """(BLOCK, warps): 16 elements for each thread, as in fused.py."""
    block = min(8192, triton.next_power_of_2(vocab))
    return block, max(1, block // 512)


def loss_of_rows(logits: Tensor, labels: Tensor, loss: Tensor, m: Tensor, s: Tensor) -> None:
    """Loss, maximum and sum of exponentials of each row of logits [rows, V], written to loss, m and s [rows]."""
    block, warps = block_of(logits.shape[1])
    args = logits.stride(0), logits.shape[1], wide(logits.dtype), block
    cross_entropy_kernel[(logits.shape[0],)](logits, labels, loss, m, s, *args, num_warps=warps)


def gradient_of_rows(logits: Tensor, labels: Tensor, m: Tensor, s: Tensor, scale: Tensor, out: Tensor) -> None:
    """The gradient of scale · (sum of the losses) with respect to logits [rows, V], written to `out`."""
    block, warps = block_of(logits.shape[1])
    grid = logits.shape[0], triton.cdiv(logits.shape[1], block)
    args = logits.stride(0), out.stride(0), logits.shape[1], wide(logits.dtype), block
    cross_entropy_backward_kernel[grid](logits, labels, m, s, scale, out, *args, num_warps=warps)


def rows_and_labels(x: Tensor, labels: Tensor, vocab: int, name: str) -> tuple[Tensor, Tensor]:
    """x as [T, ...], labels as [T]; ValueError unless they fit each other."""
    if labels.shape != x.shape[:-1] or labels.dtype != torch.int64 or labels.device != x.device:
        has = f"{list(labels.shape)} {labels.dtype} on {labels.device}"
        wants = f"{list(x.shape[:-1])} int64 on {x.device}"
        raise ValueError(f"labels are {has}; {name} {list(x.shape)} needs {wants}")
    if labels.device.type == "cpu" and ((labels != IGNORE) & ((labels < 0) | (labels >= vocab))).any():
        raise ValueError(f"labels must be 0 to {vocab - 1}, or {IGNORE}; on a GPU the loss of such a row is NaN")
    return as_rows(x), labels.reshape(-1).contiguous()


# ----------------------------------------------------------------------------------------- cross-entropy of logits


class CrossEntropy(torch.autograd.Function):
    """Saves the logits as given and two values per row; PyTorch saves the log-softmax of a float32 copy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows, labels = rows_and_labels(logits, labels, logits.shape[-1], "logits")
        exact = torch.promote_types(rows.dtype, torch.float32)
        loss, m, s = (torch.empty(len(rows), dtype=exact, device=rows.device) for _ in range(3))
        loss_of_rows(rows, labels, loss, m, s)
        ctx.save_for_backward(rows, labels, m, s)
        ctx.shape = logits.shape
        return loss.sum()  # by PyTorch, in a fixed order; atomic additions would give other bits in every run

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        rows, labels, m, s = ctx.saved_tensors
        gradient = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        gradient_of_rows(rows, labels, m, s, dloss, gradient)
        return gradient.view(ctx.shape), None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """SUM of -log p(label) over the labels that are not -100, as float32; logits [..., V], labels [...] int64."""
    check(logits=logits)
    return CrossEntropy.apply(logits, labels)


# --------------------------------------------------------------------------- the output layer and its loss at once


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [V, H] += aᵀ b, with a [C, V], b [C, H]; total in float32 for any dtype of a and b.

    In bf16 the sum over chunks would be rounded once per chunk. The matmul runs on slices of `total`, so that
    it needs little memory, and on a GPU returns the float32 sums of the tensor cores.
    """
    step = max(1, SLICE_BYTES // (total.shape[1] * total.element_size()))
    for begin in range(0, total.shape[0], step):
        part = slice(begin, begin + step)
        if a.dtype == total.dtype or a.device.type == "cpu":  # here a matmul returns the dtype of its factors
            total[part] += a[:, part].T.to(total.dtype) @ b.to(total.dtype)
        elif ADDS_WIDE:
            rows = total[part]
            torch.addmm(rows, a[:, part].T, b, out_dtype=total.dtype, out=rows)
        else:
            total[part] += torch.mm(a[:, part].T, b, out_dtype=total.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients of the output layer, C tokens at a time. Saves both gradients and no activations."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, differentiate: bool) -> Tensor:
        h, labels = rows_and_labels(hidden, labels, weight.shape[0], "hidden")
        T = h.shape[0]
        V = weight.shape[0]
        exact = torch.promote_types(h.dtype, torch.float32)
        loss, m, s = (torch.empty(T, dtype=exact, device=h.device) for _ in range(3))
        one = torch.ones((), dtype=exact, device=h.device)  # the scale is known only in backward
        for_h, for_weight = (differentiate and needed for needed in ctx.needs_input_grad[:2])
        dh = torch.empty(h.shape, dtype=h.dtype, device=h.device) if for_h else None
        dweight = torch.zeros(weight.shape, dtype=exact, device=h.device) if for_weight else None
        buffer = torch.empty(min(chunk, T), V, dtype=h.dtype, device=h.device)
        # --- exercise 9.39: loss, dh and dweight, with no more than `chunk` rows of logits at any time ---
        for begin in range(0, T, chunk):
            part = slice(begin, min(begin + chunk, T))
            logits = buffer[: part.stop - begin]
            torch.mm(h[part], weight.T, out=logits)  # [C, H] @ [H, V] -> [C, V]
            loss_of_rows(logits, labels[part], loss[part], m[part], s[part])
            if dh is not None or dweight is not None:
                gradient_of_rows(logits, labels[part], m[part], s[part], one, out=logits)  # now a gradient
            if dh is not None:
                torch.mm(logits, weight, out=dh[part])  # [C, V] @ [V, H] -> [C, H]
            if dweight is not None:
                add_product(dweight, logits, h[part])  # [V, C] @ [C, H] -> [V, H]
        # --- end exercise ---
        ctx.save_for_backward(dh, dweight)
        ctx.shape = hidden.shape
        ctx.dtype = weight.dtype
        return loss.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dh, dweight = ctx.saved_tensors
        if dh is not None:
            # [1], in float32: a GPU rounds a tensor without dimensions to the 16 bits of dh before it multiplies.
            dh = torch.mul(dh, dloss.view(1), out=torch.empty_like(dh)).view(ctx.shape)
        if dweight is not None:  # multiplied and rounded in one step: no second float32 matrix
            dweight = torch.mul(dweight, dloss, out=torch.empty(dweight.shape, dtype=ctx.dtype, device=dweight.device))
        return dh, dweight, None, None, None


def chunk_for(tokens: int, vocab: int, dtype: torch.dtype) -> int:
    """Tokens of a chunk, a multiple of 128, the rows of a tensor-core tile. As few chunks as CHUNK_BYTES of
    logits allow, all equal, since a short last one would also cost a pass over d weight.

    Smaller is not better: each chunk reads and writes all of d weight, V·H·4 bytes, against C·V·e of its own logits.
    So C should not be small against H.
    """
    most = max(128, CHUNK_BYTES // (vocab * dtype.itemsize) // 128 * 128)
    chunks = max(1, -(-tokens // most))
    return max(128, -(-tokens // (chunks * 128)) * 128)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None = None) -> Tensor:
    """cross_entropy(hidden @ weightᵀ, labels) without the logits; hidden [..., H], weight [V, H], labels [...] int64.

    Under autocast hidden and weight are cast as before a linear layer, which does not change float64.
    """
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
    check(hidden=hidden, weight=weight)
    if hidden.dtype != weight.dtype or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"hidden {list(hidden.shape)} {hidden.dtype} does not fit weight {list(weight.shape)} {weight.dtype}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk {chunk} must be at least 1")
    chunk = chunk or chunk_for(hidden.shape[:-1].numel(), weight.shape[0], weight.dtype)
    # Decided here: in forward no_grad is always on, and needs_input_grad reflects only the inputs.
    return LinearCrossEntropy.apply(hidden, weight, labels, chunk, torch.is_grad_enabled())


# ----------------------------------------------------------------------------------------------- formulas and demo


def bytes_kept(name: str, tokens: int, vocab: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes that autograd saves between forward and backward, without the layer's weight."""
    exact = torch.promote_types(dtype, torch.float32).itemsize
    if name == "cross_entropy":  # logits, labels, m and s
        return tokens * vocab * dtype.itemsize + 8 * tokens + 2 * tokens * exact
    return tokens * hidden * dtype.itemsize + vocab * hidden * exact  # the two gradients


def largest_tensor(name: str, tokens: int, vocab: int, hidden: int, chunk: int) -> int:
    """Elements of the largest tensor that is created."""
    return (
        tokens * vocab if name == "cross_entropy" else max(min(chunk, tokens) * vocab, vocab * hidden, tokens * hidden)
    )


FUSED = dict(cross_entropy=cross_entropy, linear_cross_entropy=linear_cross_entropy)
REFERENCE = dict(cross_entropy=cross_entropy_reference, linear_cross_entropy=linear_cross_entropy_reference)

if __name__ == "__main__":
    sys.exit(demo_of_fused_loss(FUSED, REFERENCE, bytes_kept, largest_tensor))
