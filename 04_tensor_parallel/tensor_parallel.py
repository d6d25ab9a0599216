"""Tensor and sequence parallelism: a layer whose matrices lie on t ranks, none of which has to hold them whole.

Data parallelism cuts the batch, and every rank still computes every layer. When a layer is too large for one device, or
too slow on it, the matrices have to be cut. By columns, x [A1 A2] = [x A1, x A2]: a rank needs all of x and makes some
columns of y. By rows, [y1 y2] [B1; B2] = y1 B1 + y2 B2: it needs these very columns, and makes a share of a sum.

    x = [1 2]    A = [1 3]    B = [1 0]      rank 0: y = x [1; 2] = 5      y [1 0] = [ 5  0]
                     [2 4]        [2 1]      rank 1: y = x [3; 4] = 11     y [2 1] = [22 11]     sum: [27 11] = x A B
    backward from dz = [1 1]:    rank 0: dy = 1, dy [1 2] = [1 2]     rank 1: dy = 3, dy [3 4] = [9 12]     sum: [10 14]

x goes into both products: the sum at the end (f*) has a partner at the beginning (f), which sums in backward. Between
two such pairs every rank has the same x, normalises the same tokens and keeps the same bytes. Sequence parallelism ends
that: an all-reduce is a reduce-scatter and an all-gather, and between these each rank can go on with 1/t of the tokens.

         forward          backward          where
    f    nothing          all-reduce        before A     tensor parallel: 1909.08053, section 3
    f*   all-reduce       nothing           behind B     (Shoeybi et al. 2019)
    g    all-gather       reduce-scatter    before A     and sequence parallel: 2205.05198, section 4.2.2
    g*   reduce-scatter   all-gather        behind B     (Korthikanti et al. 2022)

    rank 1 of 4 holds                            tensor        tensor + sequence
    columns of q, gate, up; rows of o, down      --##----      --##----      k, v: heads, copies if N_kv < t
    embedding, head, logits: words               --##----      --##----
    x between the products: tokens               ########      --##----      which is what backward keeps
    sent in a block, times (t-1)/t bytes of x       8             8 + 2      2 to gather again what was not kept

    python tensor_parallel.py                                      one rank
    torchrun --nproc_per_node 4 tensor_parallel.py                 four: gloo on CPUs, nccl on GPUs
    torchrun --nproc_per_node 2 tensor_parallel.py --kv-heads 1    both ranks hold the same key/value head
Ends with PASS when losses, gradients and weights are those of one process to 1e-10, and bytes those of the formulas.
"""

import argparse
import math
import os
import sys
import time
import tokenize
import zlib
from collections import namedtuple
from datetime import timedelta
from pathlib import Path

import torch._dynamo  # and torch; dispatch modes import it: while a group is up, that would keep it to the end
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, inf
from torch.utils._python_dispatch import TorchDispatchMode

# B sequences of S tokens, T = B S rows of x. H hidden, N query heads and N_kv key/value heads of D numbers, V words,
# t ranks. Weights are [out, in] as in nn.Linear: to cut A by columns is to cut its weight in dim 0, and B's in dim 1.
IGNORE = -100  # a label that is no target
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Sizes = namedtuple("Sizes", "vocab hidden layers heads kv_heads intermediate batch sequence")
TINY = Sizes(257, 64, 2, 8, 2, 96, 2, 32)  # 256 bytes and an end of text: an odd vocabulary, padded where t > 1


class TensorParallel:
    def __init__(self, group: dist.ProcessGroup, sequence: bool):
        self.group, self.sequence = group, sequence
        self.t, self.rank = dist.get_world_size(group), dist.get_rank(group)


class Products(torch.autograd.Function):
    """f or g, and behind it some columns of each weight: x [T, H], or [T/t, H] -> [T, out/t] for each weight.

    One function, so that backward may keep T/t rows of x and gather the others again, and send the gradient of x while
    it computes those of the weights, for which nobody waits."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.tp = tp
        # --- exercise 4.1: all tokens for the products, one's own for backward ---
        ctx.save_for_backward(x, *weights)
        if tp.sequence:  # g; f does nothing
            whole = x.new_empty(tp.t * len(x), x.shape[1])
            all_gather_single(whole, x.contiguous(), group=tp.group)  # [T/t, H] -> all-gather -> [T, H]
            x = whole
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        # --- end exercise ---

    @staticmethod
    def backward(ctx, *dys: Tensor):
        (x, *weights), tp = ctx.saved_tensors, ctx.tp
        # --- exercise 4.2: x went into t ranks' products: its gradient, on its way while those of weights are made ---
        if tp.sequence:
            whole = x.new_empty(tp.t * len(x), x.shape[1])
            gathering = all_gather_single(whole, x.contiguous(), group=tp.group, async_op=True)
        dx = dys[0] @ weights[0]  # [T, out/t] [out/t, H]: this rank's share
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            dx.addmm_(dy, weight)
        if tp.sequence:  # g: [T, H] -> reduce-scatter -> [T/t, H]
            total = torch.empty_like(x)
            sending = reduce_scatter_single(total, dx, group=tp.group, async_op=True)
            gathering.wait()
        else:  # f: [T, H] -> all-reduce -> [T, H]
            total, whole = dx, x
            sending = dist.all_reduce(total, group=tp.group, async_op=True)
        products = [dy.T @ whole for dy in dys]  # [out/t, T] [T, H]
        sending.wait()
        # --- end exercise ---
        biases = (dy.sum(0) if ctx.needs_input_grad[-len(dys) + i] else None for i, dy in enumerate(dys))
        return total, None, *products, *biases


class Sum(torch.autograd.Function):
    """f* or g*: the shares [T, H] of all ranks -> their sum [T, H], or T/t rows of it. Backward of f* does nothing: the
    ranks compute one loss. (torch.distributed.nn.all_reduce is made for t of them, and sums there as well.)"""

    @staticmethod
    def forward(ctx, share: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        # --- exercise 4.3: the sum of the shares, whole or by rows ---
        if tp.sequence:  # g*: [T, H] -> reduce-scatter -> [T/t, H]
            mine = share.new_empty(len(share) // tp.t, *share.shape[1:])
            reduce_scatter_single(mine, share.contiguous(), group=tp.group)
            return mine
        total = share.contiguous().clone()  # the collective overwrites what it is given; autograd may have kept that
        dist.all_reduce(total, group=tp.group)
        return total
        # --- end exercise ---

    @staticmethod
    def backward(ctx, dz: Tensor):
        if not ctx.tp.sequence:
            return dz, None
        whole = dz.new_empty(ctx.tp.t * len(dz), *dz.shape[1:])
        all_gather_single(whole, dz.contiguous(), group=ctx.tp.group)  # g*: [T/t, H] -> all-gather -> [T, H]
        return whole, None


def column(x: Tensor, w: dict[str, Tensor], names: list[str], tp: TensorParallel | None) -> tuple[Tensor, ...]:
    """The products of one x, which share one f or g. Without `tp`, here and below: on one process, as the oracle."""
    weights, biases = [w[name] for name in names], [w.get(f"{name}_bias") for name in names]
    if tp is None:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return Products.apply(x, tp, *weights, *biases)


def row(y: Tensor, w: dict[str, Tensor], name: str, tp: TensorParallel | None) -> Tensor:
    share = F.linear(y, w[name])  # [T, in/t] -> [T, H]
    return (share if tp is None else Sum.apply(share, tp)) + w[f"{name}_bias"]  # once: t ranks would add t biases


def embed(tokens: Tensor, rows: Tensor, tp: TensorParallel | None) -> Tensor:
    """tokens [T] -> [T, H], or [T/t, H]: a sum, to which the rank with the word adds its row, and the others zero."""
    if tp is None:
        return F.embedding(tokens, rows)
    index = tokens - tp.rank * len(rows)
    here = (index >= 0) & (index < len(rows))
    return Sum.apply(F.embedding(index.where(here, 0), rows).masked_fill(~here[:, None], 0), tp)


def cross_entropy(logits: Tensor, labels: Tensor, vocab: int, tp: TensorParallel | None) -> Tensor:
    """Logits [T, V/t] of this rank's words, labels [T] -> the SUM of -log p(label), alike on every rank. Of the other
    ranks' logits it takes three numbers a token: the maximum, the sum of exponentials, the logit of the label."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if tp is None:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    # --- exercise 4.4: a softmax over V words, of which this rank has V/t ---
    words = tp.rank * logits.shape[1] + torch.arange(logits.shape[1], device=logits.device)
    logits = logits.masked_fill(words >= vocab, -torch.inf)  # a word that does not exist has no probability
    peak = logits.detach().amax(1, keepdim=True)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=tp.group)  # [T, 1]
    index = labels - words[0]
    here = (index >= 0) & (index < len(words))  # never for IGNORE
    logits = logits - peak
    of_label = logits.gather(1, index.where(here, 0)[:, None])[:, 0].masked_fill(~here, 0)
    sums = torch.stack((logits.exp().sum(1), of_label))  # [2, T]: one message, and f*, since all ranks need all of it
    sums = Sum.apply(sums, TensorParallel(tp.group, sequence=False))
    return (sums[0].log() - sums[1]).masked_fill(labels == IGNORE, 0).sum()
    # --- end exercise ---


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal. q [B, N, S, D], k and v [B, N_kv, S, D] -> like q. It mixes tokens but no heads: these are dealt out."""
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # [B, N, S, S]
    scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v


def block(x: Tensor, w: dict[str, Tensor], i: int, sizes: Sizes, tp: TensorParallel | None) -> Tensor:
    """[T, H], or [T/t, H] -> the same. RoPE is left to the depth: it turns each head by itself, on every rank alike."""
    S, D = sizes.sequence, sizes.hidden // sizes.heads
    heads = column(norm(x, w[f"{i}.norm1"]), w, [f"{i}.q", f"{i}.k", f"{i}.v"], tp)  # [T, N/t D], and N_kv/t, or 1
    mixed = attention(*(y.view(-1, S, y.shape[1] // D, D).transpose(1, 2) for y in heads))
    x = x + row(mixed.transpose(1, 2).flatten(2).flatten(0, 1), w, f"{i}.o", tp)  # [T, N/t D] -> [T, H], or [T/t, H]
    gate, up = column(norm(x, w[f"{i}.norm2"]), w, [f"{i}.gate", f"{i}.up"], tp)  # the same columns of both
    return x + row(F.silu(gate) * up, w, f"{i}.down", tp)


def loss_sum(w: dict, tokens: Tensor, labels: Tensor, sizes: Sizes, tp: TensorParallel | None) -> Tensor:
    """tokens, labels [B, S] -> the sum of the losses. All three alike on every rank."""
    for what, ids in (("token", tokens), ("label", labels[labels != IGNORE])):
        if ids.numel() and not 0 <= ids.min() <= ids.max() < sizes.vocab:  # no rank has it: a zero, and no error
            raise ValueError(f"{what}s from {ids.min()} to {ids.max()}, but words are 0 to {sizes.vocab - 1}")
    x = embed(tokens.flatten(), w["embed"], tp)
    for i in range(sizes.layers):
        x = block(x, w, i, sizes, tp)
    (logits,) = column(norm(x, w["norm"]), w, ["head"], tp)  # [T, V/t], and never more
    return cross_entropy(logits, labels.flatten(), sizes.vocab, tp)


def whole_weights(sizes: Sizes) -> dict[str, Tensor]:
    """Each drawn from its own name: the same model, however many ranks share it."""
    H, inner, kv = sizes.hidden, sizes.intermediate, sizes.kv_heads * sizes.hidden // sizes.heads
    shapes = {"embed": (sizes.vocab, H), "head": (sizes.vocab, H), "norm": (H,)}
    mlp = {"gate": (inner, H), "up": (inner, H), "down": (H, inner)}
    matrices = {"q": (H, H), "k": (kv, H), "v": (kv, H), "o": (H, H)} | mlp
    for i in range(sizes.layers):
        shapes |= {f"{i}.norm1": (H,), f"{i}.norm2": (H,)} | {f"{i}.{name}": s for name, s in matrices.items()}
        shapes |= {f"{i}.{name}_bias": shape[:1] for name, shape in matrices.items()}
    seeds = {name: torch.Generator().manual_seed(zlib.crc32(name.encode())) for name in shapes}
    drawn = {name: torch.randn(s, generator=seeds[name]).double() / math.sqrt(s[-1]) for name, s in shapes.items()}
    return {name: x + ("norm" in name) for name, x in drawn.items()}


def piece_of(name: str, whole: Tensor, sizes: Sizes, tp: TensorParallel) -> Tensor:
    """What this rank holds of a weight. (If each drew its piece from the common seed, all would hold the same one.)"""
    kind, pieces, piece, dim = name.rpartition(".")[2], tp.t, tp.rank, 0
    # --- exercise 4.5: columns, rows, heads, words; and what everyone has whole ---
    if kind.removesuffix("_bias") in ("k", "v"):  # whole heads: with fewer than t, neighbours hold the same one
        pieces = min(sizes.kv_heads, tp.t)
        piece = tp.rank * pieces // tp.t
    elif kind in ("o", "down"):
        dim = 1
    elif kind in ("embed", "head"):
        whole = F.pad(whole, (0, 0, 0, -len(whole) % tp.t))
    elif kind.removesuffix("_bias") not in ("q", "gate", "up"):  # norms, and biases behind a sum
        pieces, piece = 1, 0
    return whole.chunk(pieces, dim)[piece].clone()  # a view would keep all of it alive
    # --- end exercise ---


def sum_shares(w: dict[str, Tensor], sizes: Sizes, tp: TensorParallel) -> None:
    """After backward. Where a rank's gradient is a share of one, the shares are summed, and never averaged."""
    for name, p in w.items():
        kind = name.rpartition(".")[2]
        # --- exercise 4.6: whose gradient is a share, and over whom is it summed? ---
        if tp.sequence and kind in ("norm", "norm1", "norm2", "o_bias", "down_bias"):
            dist.all_reduce(p.grad, group=tp.group)  # each rank saw T/t of the tokens
        if kind.removesuffix("_bias") in ("k", "v") and sizes.kv_heads < tp.t:
            slots = p.grad.new_zeros(sizes.kv_heads, *p.grad.shape)  # [N_kv, D, H]: a sum for each head
            mine = slots[tp.rank * sizes.kv_heads // tp.t]
            mine.copy_(p.grad)  # this head, as far as this rank's query heads used it
            dist.all_reduce(slots, group=tp.group)
            p.grad.copy_(mine)
        # --- end exercise ---


def formulas(sizes: Sizes, t: int, sequence: bool, e: int = 8) -> tuple[int, int, int]:
    """Bytes on a rank: of weights; kept for backward of a block; sent in forward and backward of a block."""
    H, inner, T, N = sizes.hidden, sizes.intermediate, sizes.batch * sizes.sequence, sizes.heads
    kv, h = max(sizes.kv_heads // t, 1) * H // N, t if sequence else 1
    layer = (2 * H * H + 3 * H * inner + H + 2 * inner) // t + 2 * kv * (H + 1) + 4 * H
    # 2205.05198, section 4.1, for RMSNorm and SwiGLU. Outside, twice: the norm's input, normalised, its output, 1/rms.
    # Inside: q, k and v (repeated), the output and the N S shares of attention; gate, silu(gate), up, product.
    kept = (6 * T * H + 2 * T) // h + (4 * T * H + N * T * sizes.sequence + 4 * T * inner) // t
    sent = (10 if sequence else 8) * (t - 1) * T * H // t  # by rings: an all-reduce sends 2 (t-1)/t of its payload
    return (2 * -(-sizes.vocab // t) * H + sizes.layers * layer + H) * e, kept * e, sent * e


class Wire(TorchDispatchMode):
    sent, ring = 0, {"allreduce_": (0, 2), "_allgather_base_": (0, 1), "_reduce_scatter_base_": (1, 1)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            at, times = self.ring[func._opname]  # which argument is the whole payload
            self.sent += times * (args[at][0] if isinstance(args[at], list) else args[at]).nbytes
        return func(*args, **(kwargs or {}))


def measure(w: dict[str, Tensor], sizes: Sizes, tp: TensorParallel) -> tuple[int, int, int]:
    """The three numbers of `formulas`, of this rank."""
    rows, saved = sizes.batch * sizes.sequence // (tp.t if tp.sequence else 1), []
    x = torch.randn(rows, sizes.hidden).to(w["norm"])
    with Wire() as wire, torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y) or y, lambda y: y):
        z = block(x.requires_grad_(), w, 0, sizes, tp)
        z.backward(torch.ones_like(z))
    storages = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in saved}
    kept = sum(storages.values()) - sum(storages.get(p.untyped_storage().data_ptr(), 0) for p in w.values())
    return sum(p.nbytes for p in w.values()), kept, wire.sent * (tp.t - 1) // tp.t


def three_steps(w: dict, sizes: Sizes, tp: TensorParallel | None) -> list[dict[str, Tensor]]:
    """Plain SGD on bytes of the source of Python's tokenizer. Returns gradients and loss of each step, and weights."""
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long() % sizes.vocab
    seen = []
    for step in range(3):
        text = data[step * 500 :][: sizes.batch * (sizes.sequence + 1)].view(sizes.batch, -1).to(w["norm"].device)
        tokens, labels = text[:, :-1], text[:, 1:].clone()
        labels[:, 0] = IGNORE
        loss = loss_sum(w, tokens, labels, sizes, tp) / (labels != IGNORE).sum()
        loss.backward()
        if tp is not None:
            sum_shares(w, sizes, tp)
        seen.append({name: p.grad for name, p in w.items()} | {"loss": loss.detach().view(1)})
        for p in w.values():
            p.data.sub_(0.1 * p.grad)
            p.grad = None
    return [*seen, {name: p.detach() for name, p in w.items()}]


def main() -> int:
    parser = argparse.ArgumentParser(description="tensor and sequence parallelism in one file", allow_abbrev=False)
    parser.add_argument("--layout", choices=("tensor", "sequence"), help="default: one after the other")
    parser.add_argument("--kv-heads", type=int, default=2, choices=(1, 2, 4, 8))
    say = print if os.environ.get("RANK", "0") == "0" else lambda *_, **__: None  # one line, and not one for each rank
    parser.error = lambda words: (say(f"{parser.prog}: {words}", file=sys.stderr), sys.exit(2))
    args, t, gpus = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count()
    if t not in (1, 2, 4, 8):
        parser.error(f"--nproc_per_node {t} does not divide 8 query heads; use 1, 2, 4 or 8")
    if 0 < gpus < (local := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        parser.error(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    device, sizes, wrong = "cuda" if gpus else "cpu", TINY._replace(kv_heads=args.kv_heads), []
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **alone)
    for layout in [args.layout] if args.layout else ["tensor", "sequence"]:
        tp = TensorParallel(dist.group.WORLD, layout == "sequence")
        whole = {name: x.to(device) for name, x in whole_weights(sizes).items()}
        w = {name: piece_of(name, x, sizes, tp).requires_grad_() for name, x in whole.items()}
        start, mine = time.perf_counter(), three_steps(w, sizes, tp)
        rate = 3 * sizes.batch * sizes.sequence / (time.perf_counter() - start)
        oracle = three_steps({name: x.requires_grad_() for name, x in whole.items()}, sizes, None)
        errors = [x - piece_of(n, right[n], sizes, tp) for i, right in enumerate(oracle) for n, x in mine[i].items()]
        dist.all_reduce(worst := torch.stack([e.abs().max() for e in errors]).max().nan_to_num(inf), dist.ReduceOp.MAX)
        wrong += [] if (error := worst.item()) <= 1e-10 else [f"{layout} is off by {error:.1e}"]  # inf: MAX loses NaN
        what = ("weights held", "kept of a block", "sent by a block")
        table = list(zip(what, formulas(sizes, t, tp.sequence), measure(w, sizes, tp), strict=True))
        wrong += [f"{layout}: bytes {name} {got:,}, not {want:,}" for name, want, got in table if got != want]
        say(f"{layout} parallel on {t} rank(s): largest error {error:.1e}, {rate:,.0f} tokens/s")
        say(*(f"    bytes {what:16} formula {a:>9,}   measured {b:>9,}" for what, a, b in table), sep="\n")
    dist.all_gather_object(everyone := [None] * t, wrong)
    say("; ".join(wrong := sorted({words for theirs in everyone for words in theirs})) or "PASS")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
