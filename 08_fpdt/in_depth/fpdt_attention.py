"""FPDT II: attention over a sequence in chunks, with keys and values on the host.

Problem. Ulysses (chapter 5) gives each of P ranks all S tokens of N/P heads. This splits the work, but at
S = 2 million every rank still stores q, k, v, the output, and in backward their gradients, of all tokens.

Idea. Split the sequence into u chunks and run Ulysses on one chunk at a time (FPDT, 2408.16978, section 4).
Under a causal mask chunk i needs only the keys and values of chunks 0..i. Earlier ones are fetched from the
host, the next one during attention to this one. The results per chunk are merged by log-sum-exp.

    chunk i   q_i k_i v_i  --all-to-all-->  q̂_i k̂_i v̂_i      [S/uP tokens, N heads] -> [S/u tokens, N/P heads]
    device    q̂_i stays; attend to k̂_i v̂_i, then fetch | k̂_0 v̂_0 | k̂_1 v̂_1 | ... | k̂_i-1 v̂_i-1 |
    host      k̂_0 v̂_0 ... k̂_i v̂_i (and for backward q̂, the output ô, the log-sum-exp)
              ô_i  --all-to-all-->  o_i

Backward swaps the loops: outer over k̂_j v̂_j, inner over the q̂_i with i >= j, fetched with ô_i, its
gradient, the log-sum-exp and partial dq̂_i. The inner loop completes dk̂_j, dv̂_j and dq̂_j: k̂_j was q̂_j's
last. They are returned by all-to-all. The device never stores more than a few chunks.

Order of tokens. Chunk i of all ranks together must be a contiguous slice of the sequence, so rank r holds
    i·S/u + r·S/(uP) ... + S/(uP) - 1   for i = 0 .. u-1
and its positions, labels and masks follow this order (`fpdt_positions`).

Per layer and rank, n = N/P query, n_kv key/value heads, c = S/u tokens, e bytes, w in sums (see fpdt_costs.py):
    device, forward    c n D (e + 2w) + 4 c n_kv D e + ...     falls as 1/u, does not depend on S at fixed c
    link, forward      (u - 1) c n_kv D e · 2 stored,  u(u-1)/2 · 2 c n_kv D e fetched
    network            as in Ulysses, for any u

Run it:
    python fpdt_attention.py                                                        one rank, CPU or GPU
    torchrun --nproc_per_node 2 fpdt_attention.py --chunks 8                        Gloo on CPU, NCCL on GPU
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from _fpdt_demo import Wire, check_ranks_and_heads, dense_attention, run, settled, text
from fpdt_costs import Sizes, attention_peak, host_peak, link_bytes, network_bytes
from fpdt_store import (
    Buffer,
    DeviceMemory,
    Guard,
    OneLineParser,
    Prefetch,
    Store,
    check_chunks,
    check_host,
    machine_for,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

# Legend of shapes: B batch, S sequence, N query heads, N_kv key/value heads, D head dim; P ranks, u chunks,
# c = S/u tokens of a chunk, s = c/P of them on a rank, n = N/P heads. A hat in the text is the head-sharded side.

# ---------------------------------------------------------------------------------------------- who holds which tokens


def check_sizes(S: int, P: int, u: int, heads: int) -> None:
    """ValueError in one line unless S tokens in u chunks and the heads divide among P ranks."""
    if u < 1 or u > S:
        raise ValueError(f"{u} chunks of a sequence of {S} tokens; use 1 to {S // P} chunks")
    if S % (P * u):
        raise ValueError(f"{S} tokens do not divide into {u} chunks on {P} ranks; use a multiple of {P * u}")
    if heads % P:
        fits = ", ".join(str(p) for p in range(1, heads + 1) if heads % p == 0)
        raise ValueError(f"{heads} query heads do not divide among {P} ranks; use {fits} ranks")


def fpdt_positions(seq_len: int, rank: int, ranks: int, chunks: int) -> Tensor:
    """Positions in the sequence of the tokens of `rank`, in its order: int64 [S/P]."""
    check_sizes(seq_len, ranks, chunks, ranks)
    # --- exercise 8.24: chunk i of all ranks together is a contiguous piece ---
    return torch.arange(seq_len).view(chunks, ranks, -1)[:, rank].flatten()
    # --- end exercise ---


# ------------------------------------------------------------------------- from tokens to heads and back, as in Ulysses


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, s, N, D] -> all_to_all -> [B, c, n, D]. Not differentiable; its transpose is `to_tokens`."""
    pieces = x.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4).contiguous()  # [P, B, s, n, D]
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received.permute(1, 0, 2, 3, 4).flatten(1, 2)  # [B, P, s, n, D] -> [B, c, n, D]


def to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, c, n, D] -> all_to_all -> [B, s, N, D]."""
    pieces = x.unflatten(1, (group.size(), -1)).permute(1, 0, 2, 3, 4).contiguous()  # [P, B, s, n, D]
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, s, P, n, D] -> [B, s, N, D]


def copy_kv_heads(x: Tensor, P: int) -> Tensor:
    """K or V with the fewest heads that P divides: [B, s, N_kv, D] -> [B, s, lcm(N_kv, P), D].
    Differentiable: the gradients of copies are summed. Never expanded to all query heads."""
    copies = math.lcm(x.shape[2], P) // x.shape[2]
    return x if copies == 1 else x.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)


# ------------------------------------------------------------------------------------ attention of one pair of chunks


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over chunks: fp32 or better."""
    return torch.promote_types(dtype, torch.float32)


def explicit_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The readable form. q, k, v [B, c, heads, D] -> out as q, lse [B, heads, c] in fp32 or better."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, c, heads, D] -> [B, heads, c, D]
    scores = (q @ k.mT).to(wide(q.dtype)) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1).to(q.dtype) @ v).transpose(1, 2), scores.logsumexp(-1)


def explicit_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """With the log-sum-exp over *all* keys, exp(score - lse) are final weights, so each pair of chunks gives
    its part of dq, dk and dv independently (2307.08691, algorithm 2)."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))  # [B, c, heads, D] -> [B, heads, c, D]
    scale = 1 / math.sqrt(q.shape[-1])
    scores = (q @ k.mT).to(lse.dtype) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    weights = (scores - lse[..., None]).exp()
    delta = (dout.to(lse.dtype) * out).sum(-1, keepdim=True)
    dscores = (weights * ((dout @ v.mT).to(lse.dtype) - delta) * scale).to(q.dtype)
    shares = dscores @ k, dscores.mT @ q, weights.to(q.dtype).mT @ dout
    return tuple(x.transpose(1, 2) for x in shares)  # type: ignore[return-value]


aten = torch.ops.aten


def fused_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's FlashAttention for the device of q. It never writes the scores to memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, c, heads, D] -> [B, heads, c, D]
    if q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out.transpose(1, 2), lse


def fused_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))  # [B, c, heads, D] -> [B, heads, c, D]
    if q.is_cuda:
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state, for a dropout of 0
        shape = (None, None, q.shape[2], k.shape[2])
        shares = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, *shape, 0.0, causal, unused, unused[:1]
        )
    else:
        shares = aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, causal)
    return tuple(x.transpose(1, 2) for x in shares)  # type: ignore[return-value]


@dataclass(frozen=True)
class Kernel:
    """Attention of a query chunk to a key chunk with as many heads; called as in chapter 5."""

    forward: Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, *, causal) -> out, lse
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]  # (dout, q, k, v, out, lse, *, causal) -> dq, dk, dv


EXPLICIT = Kernel(explicit_forward, explicit_backward)
FUSED = Kernel(fused_forward, fused_backward)


def kernel_for(x: Tensor) -> Kernel:
    """CUDA's FlashAttention needs bf16 or fp16; the CPU's takes all dtypes."""
    return FUSED if not x.is_cuda or x.dtype in (torch.bfloat16, torch.float16) else EXPLICIT


def by_group(x: Tensor, kv_heads: int) -> Iterator[Tensor]:
    """G views of the query heads, with one head per K/V head: [B, c, n, D] -> [B, c, n_kv, D]; of an lse [B,
    n, c] -> [B, n_kv, c]. So grouped-query attention is G plain calls, without expanding K and V."""
    yield from x.unflatten(-2, (kv_heads, -1)).unbind(-2)  # query head g of K/V head h is h·G + g


def attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q [B, c, n, D], k and v [B, c, n_kv, D] -> out as q, lse [B, n, c], both contiguous and in fp32 or better."""
    out = torch.empty_like(q, dtype=wide(q.dtype))
    lse = torch.empty_like(out[..., 0].transpose(1, 2), memory_format=torch.contiguous_format)
    for q_g, out_g, lse_g in zip(*(by_group(x, k.shape[2]) for x in (q, out, lse)), strict=True):
        some, its_lse = kernel.forward(q_g, k, v, causal=causal)
        out_g.copy_(some)
        lse_g.copy_(its_lse)
        del some, its_lse
    return out, lse


def attend_backward(
    kernel: Kernel, grads: Sequence[Tensor], given: Sequence[Tensor], k: Tensor, v: Tensor, causal: bool
) -> None:
    """Add this pair's part to grads = (dq, dk, dv). given = (dout, q, out, lse) of the chunk of queries."""
    dq, dk, dv = grads
    for dq_g, dout_g, q_g, out_g, lse_g in zip(*(by_group(x, k.shape[2]) for x in (dq, *given)), strict=True):
        more_q, more_k, more_v = kernel.backward(dout_g, q_g, k, v, out_g, lse_g.contiguous(), causal=causal)
        dq_g.add_(more_q)
        dk.add_(more_k)
        dv.add_(more_v)
        del more_q, more_k, more_v


def merge(out: Tensor, lse: Tensor, out_block: Tensor, lse_block: Tensor) -> tuple[Tensor, Tensor]:
    """Chapter 5's, in place: add attention over more keys to out [B, c, n, D] and lse [B, n, c]."""
    # --- exercise 8.25: online softmax ---
    both = torch.logaddexp(lse, lse_block)
    out.mul_((lse - both).exp_().transpose(1, 2)[..., None])
    out.addcmul_(out_block, (lse_block - both).exp_().transpose(1, 2)[..., None])
    lse.copy_(both)
    # --- end exercise ---
    return out, lse


# ------------------------------------------------------------------------------------------- the loops over the chunks


@dataclass
class Kept:
    """What is stored on the host for backward, one buffer per chunk."""

    q: list[Buffer] = field(default_factory=list)
    k: list[Buffer] = field(default_factory=list)
    v: list[Buffer] = field(default_factory=list)
    out: list[Buffer] = field(default_factory=list)
    lse: list[Buffer] = field(default_factory=list)

    def buffers(self) -> list[Buffer]:
        return [*self.q, *self.k, *self.v, *self.out, *self.lse]


class ChunkedAttention:
    """Causal attention over `group`, chunk by chunk, from a source to a sink. It owns no tensors."""

    def __init__(
        self, group: dist.ProcessGroup, chunks: int, store: Store, kernel: Kernel | None = None, slots: int = 2
    ) -> None:
        if slots not in (1, 2):  # the dq of the last rows would be fetched before it is stored
            raise ValueError(f"{slots} slots for what comes from the host; use 1 or 2")
        self.group = group
        self.u = chunks
        self.store = store
        self.kernel = kernel
        self.slots = slots

    def forward(
        self, source: Callable[[int], Sequence[Tensor]], sink: Callable[[int, Tensor], None], device: torch.device,
        keep: bool,
    ) -> Kept:  # fmt: skip
        """`source(i)` gives q_i, k_i, v_i, [B, s, heads, D]; `sink(i, out)` gets [B, s, N, D].

        keep    store all that backward needs; if not, only the k̂ and v̂ that later chunks need
        """
        kept = Kept()
        pairs = [(i, j) for i in range(self.u) for j in range(i)]
        earlier = Prefetch(self.store, pairs, lambda ij: (kept.k[ij[1]], kept.v[ij[1]]), device, self.slots)
        for i in range(self.u):
            sink(i, self._row(i, source(i), earlier, kept, keep))
        return kept

    def _row(self, i: int, qkv: Sequence[Tensor], earlier: Prefetch, kept: Kept, keep: bool) -> Tensor:
        """Chunk i of the queries, against chunks 0..i of the keys."""
        q, k, v = (to_heads(x, self.group) for x in qkv)  # [B, s, heads, D] -> [B, c, heads/P, D]
        kernel = self.kernel or kernel_for(q)
        dtype = q.dtype
        c = q.shape[1]
        self.store.compute("project")
        if keep or i < self.u - 1:  # only backward needs the last k̂, v̂
            kept.k.append(self.store.offload(k))
            kept.v.append(self.store.offload(v))
        if keep:
            kept.q.append(self.store.offload(q))
        self.store.compute("attend", c * (c + 1) / 2)
        out, lse = attend(kernel, q, k, v, causal=True)  # own chunk first: k̂_i, v̂_i are on the device
        del k, v
        # --- exercise 8.26: and to the chunks before ---
        for _ in range(i):
            slots = earlier.take()
            self.store.compute("attend", c * c, reads=slots)
            merge(out, lse, *attend(kernel, q, slots[0].data, slots[1].data, causal=False))
            earlier.done()
        # --- end exercise ---
        out = out.to(dtype)
        self.store.compute("finish")
        if keep:
            kept.out.append(self.store.offload(out))
            kept.lse.append(self.store.offload(lse))
        del q, lse
        self.store.compute("to tokens")
        return to_tokens(out, self.group)

    def backward(
        self, kept: Kept, dout: Sequence[Buffer], sink: Callable[[int, Tensor, Tensor, Tensor], None],
        device: torch.device,
    ) -> None:  # fmt: skip
        """The nested loop. `dout[i]` is the gradient of ô_i on the host; `sink(j, dq, dk, dv)` gets [B, s, heads, D].
        Returns all host buffers."""
        u = self.u
        store = self.store
        dq_home: dict[int, Buffer] = {}  # partial dq̂_i, on the host
        stays: list[Tensor] = []  # the dq̂ that the next step needs again

        def queries(ji: tuple[int, int]) -> list[Buffer]:
            j, i = ji
            rest = [dq_home[i]] if j > 0 and (j, i) != (u - 1, u - 1) else []
            return [dout[i], kept.q[i], kept.out[i], kept.lse[i], *rest]

        inner = Prefetch(store, [(j, i) for j in range(u) for i in range(j, u)], queries, device, self.slots)
        outer = Prefetch(store, range(u), lambda j: (kept.k[j], kept.v[j]), device, self.slots)
        for j in range(u):
            kv = outer.take()
            k, v = (slot.data for slot in kv)
            dk, dv = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (k, v))
            dq_j: list[Tensor] = []
            # --- exercise 8.27: the inner loop ---
            for i in range(j, u):
                slots = inner.take()
                if len(slots) == 5:
                    into = slots[4]  # dq̂_i of earlier steps, accumulated in place
                elif stays:
                    into = store.made(stays.pop())
                else:
                    into = store.made(torch.zeros_like(slots[1].data, dtype=wide(k.dtype)))
                c = k.shape[1]
                store.compute("attend back", c * (c + 1) / 2 if i == j else c * c, [*kv, *slots[:4]], [into])
                given = [slot.data for slot in slots[:4]]
                attend_backward(self.kernel or kernel_for(k), (into.data, dk, dv), given, k, v, causal=i == j)
                if i == j:  # no later chunk of keys: dq̂_j is complete
                    store.compute("dq to tokens", reads=[into])
                    dq_j.append(to_tokens(into.data.to(k.dtype), self.group))
                elif (j, i) == (u - 2, u - 1):  # the next step is (u-1, u-1): its fetch is in flight
                    stays.append(into.data)
                else:
                    dq_home[i] = store.offload(into, into=dq_home.get(i))
                del slots, into, given
                inner.done()
            # --- end exercise ---
            store.compute("dk, dv to tokens")
            dk, dv = (to_tokens(x.to(k.dtype), self.group) for x in (dk, dv))
            sink(j, dq_j.pop(), dk, dv)
            outer.done()
            del kv, k, v, dk, dv
        for buffer in [*kept.buffers(), *dout, *dq_home.values()]:
            store.drop(buffer)


# ----------------------------------------------------------------------------------- a drop-in for a model's attention


class FPDTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: ChunkedAttention, keep: bool) -> Tensor:
        out = torch.empty_like(q)
        s = q.shape[1] // core.u

        def put(i: int, chunk: Tensor) -> None:
            out[:, i * s : (i + 1) * s] = chunk

        ctx.core = core
        ctx.shapes = (q.shape, k.shape)
        ctx.kept = core.forward(lambda i: [x[:, i * s : (i + 1) * s] for x in (q, k, v)], put, q.device, keep)
        ctx.guard = Guard(core.store, ctx.kept.buffers())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        core = ctx.core
        s = dout.shape[1] // ctx.core.u
        kept = ctx.kept
        ctx.kept = None
        if kept is None:  # its buffers are reused
            raise RuntimeError("backward through this attention a second time; run forward again")
        ctx.guard.release()
        dq, dk, dv = (dout.new_empty(shape) for shape in (*ctx.shapes, ctx.shapes[1]))
        away = [core.store.offload(to_heads(chunk, core.group)) for chunk in dout.split(s, dim=1)]

        def put(j: int, *chunks: Tensor) -> None:
            for grad, chunk in zip((dq, dk, dv), chunks, strict=True):
                grad[:, j * s : (j + 1) * s] = chunk

        core.backward(kept, away, put, dout.device)
        return dq, dk, dv, None, None


def fpdt_attention(group: dist.ProcessGroup, chunks: int, store: Store, kernel: Kernel | None = None) -> Callable:
    """A drop-in for `attention(q, k, v, *, causal)` of a model with tokens in the order of `fpdt_positions`.

    q [B, S/P, N, D], k and v [B, S/P, N_kv, D] stay on the device in full; fpdt_model.py also chunks them.
    """
    core = ChunkedAttention(group, chunks, store, kernel)

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        if not causal:
            raise ValueError("FPDT is for causal attention: without a mask every chunk needs the chunks after it")
        P = group.size()
        check_sizes(q.shape[1] * P, P, chunks, q.shape[2])
        # Decided here: in `apply` gradients are always off, and needs_input_grad is also true under no_grad.
        keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        kind = q.device.type
        if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:  # like PyTorch's; a norm may give fp32 q, k
            q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
        with torch.autocast(kind, enabled=False):
            return FPDTAttention.apply(q, copy_kv_heads(k, P), copy_kv_heads(v, P), core, keep)

    return attention


# --------------------------------------------------------------------------------------------------------------- demo


def forward_peak(attention: Callable, qkv: Sequence[Tensor]) -> int:
    with settled(), DeviceMemory() as memory:
        attention(*qkv, causal=True)
    return memory.peak


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Attention over a text, forward and backward, with more and more chunks, next to the dense reference."""
    P = group.size()
    S = args.seq
    D = 8
    dtype = torch.float64
    sizes = Sizes(S=S, P=P, u=1, heads=args.heads, kv_heads=args.kv_heads, head_dim=D, e=8)
    make = torch.Generator().manual_seed(0)
    widths = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    tables = [torch.randn(256, w * D, generator=make, dtype=dtype) for w in widths]
    q, k, v, weight = (t[text(1, S)].unflatten(-1, (-1, D)).to(device) for t in tables)
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    want_out = dense_attention(*wanted, causal=True)
    (want_out * weight).sum().backward()
    wrong: list[str] = []
    if group.rank() == 0:
        print(f"{P} rank(s) on {device.type}, {S} tokens, {args.heads}/{args.kv_heads} heads of {D}, float64")
        print(f"{'chunks':>6} {'error':>8}   bytes: {'link':>9} {'predicted':>9} {'network':>9} {'predicted':>9}"
              f" {'peak fwd':>9} {'predicted':>9}")  # fmt: skip
    for u in [n for n in range(1, args.chunks + 1) if args.chunks % n == 0]:  # so u divides the sequence
        now = sizes.with_chunks(u)
        store = Store(machine_for(device))
        mine = fpdt_positions(S, group.rank(), P, u)
        x = [t[:, mine].clone().requires_grad_() for t in (q, k, v)]
        attention = fpdt_attention(group, u, store)
        with Wire(group) as wire:
            out = attention(*x, causal=True)
            (out * weight[:, mine]).sum().backward()
        pairs = [(out, want_out[:, mine]), *((a.grad, b.grad[:, mine]) for a, b in zip(x, wanted, strict=True))]
        errors = [(a - b).abs().max() / b.abs().max() for a, b in pairs]
        error = torch.stack(errors).max().item()  # NaN if any error is NaN
        expected = sum(link_bytes(now, "forward, kept")) + sum(link_bytes(now, "backward"))
        counted = [
            ("bytes over the link", store.offloaded + store.fetched, expected),
            ("bytes over the network", wire.bytes, 2 * network_bytes(now)),
        ]
        if device.type == "cpu" and args.kv_heads % P == 0:  # else K/V copies or scores on top
            peak = forward_peak(attention, x)
            counted.append(("peak of the device", peak, attention_peak(now, "forward") + out.nbytes))
        found: list = [None] * P
        dist.all_gather_object(found, (error, counted), group=group)
        for r, (off, numbers) in enumerate(found):
            if not off <= 1e-10:
                wrong.append(f"{u} chunks, rank {r}: error {off:.1e}")
            wrong += [f"{u} chunks, rank {r}: {w} {a:,}, predicted {b:,}" for w, a, b in numbers if a != b]
        if group.rank() == 0:
            line = " ".join(f"{number:9,}" for _, *both in counted for number in both)
            largest = max((off for off, _ in found), key=lambda e: (e != e, e))  # a NaN counts as the largest
            print(f"{u:6} {largest:8.1e}          {line}")
    return wrong


def main() -> int:
    parser = OneLineParser(description="Causal attention in chunks that wait on the host.", allow_abbrev=False)
    parser.add_argument("--seq", type=int, default=512, help="tokens of the whole sequence; default %(default)s")
    parser.add_argument("--chunks", type=int, default=8, help="its divisors are shown; default %(default)s")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    args = parser.parse_args()
    check_ranks_and_heads(parser, args)
    P = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = Sizes(S=args.seq, P=P, u=1, heads=args.heads, kv_heads=args.kv_heads, head_dim=8, e=8)
    try:
        check_sizes(args.seq, P, args.chunks, args.heads)
        check_chunks(args.chunks)
        check_host(P * host_peak(sizes.with_chunks(args.chunks)))
    except ValueError as error:
        parser.error(f"--seq {args.seq} --chunks {args.chunks} --heads {args.heads}: {error}")
    return run(args, demo)


if __name__ == "__main__":
    sys.exit(main())
