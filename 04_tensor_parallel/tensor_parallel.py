"""Tensor parallelism: split every matrix of a layer over tp ranks, and then the activations.

When a layer is too large for one GPU, or too slow on it, its matrices have to be split. There are
two ways to split a matmul, and they fit together:

    y = x A, by columns   x [A1 A2] = [x A1, x A2]          a rank reads x, has some columns of y
    z = y B, by rows      [y1 y2] [B1; B2] = y1 B1 + y2 B2  it reads these, has a partial sum of z

Nothing is sent between A and B; an all-reduce adds the partial sums. In the backward pass the
gradient of x needs an all-reduce as well, since x entered the matmuls of all ranks. Sequence
parallelism splits each all-reduce into a reduce-scatter and an all-gather. Between the two, a rank
has 1/tp of the tokens, so the norms and the residual stream are split as well.

                                     each rank stores               each rank sends per block
                                     parameters   activations       (forward and backward, by rings)
    tensor parallel                  Ψ/tp         X + Y/tp           8 T H (tp-1)/tp
    tensor + sequence parallel       Ψ/tp         (X' + Y)/tp + 2TH  8 T H (tp-1)/tp
    the same, overlapped             Ψ/tp         (X + Y)/tp        10 T H (tp-1)/tp

Ψ is the number of parameters in matrices, T the number of tokens, H the hidden size. For its
backward pass a block saves X = 6 T H + 2 T elements outside of the pairs (A, B), and Y inside them;
X' = X - 2 T H. Sources: Shoeybi et al. 2019, arXiv 1909.08053, section 3 (tensor parallelism);
Korthikanti et al. 2022, arXiv 2205.05198, section 4 (sequence parallelism).

    python tensor_parallel.py                        one rank
    torchrun --nproc_per_node 4 tensor_parallel.py   NCCL on GPUs, Gloo on CPUs

Each form trains a small model for three steps next to a reference on one rank. The last line is
PASS if losses, gradients and parameters agree to 1e-10 and all bytes match the formulas.
"""

import argparse
import math
import os
import sys
from datetime import timedelta
from typing import NamedTuple

import torch
import torch._dynamo  # CommCounter would import it late, and that would keep the group alive
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Params = dict[str, Tensor]  # by name, such as "0.q_proj.weight": of block 0
IGNORE_INDEX = -100  # a label that does not count


class ModelConfig(NamedTuple):
    vocab_size: int  # V
    hidden: int  # H
    n_layers: int
    n_heads: int  # N, of queries
    n_kv_heads: int  # N_kv, of keys and values; a head has D = H / N elements
    ffn_hidden: int  # F
    batch: int  # B
    seq_len: int  # S; T = B S tokens


class TPContext:
    """The tp ranks that share every matrix, and how."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool, column_linear=None):
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.sequence_parallel = sequence_parallel
        self.column_linear = column_linear or column_parallel_linear  # or the overlapped form


# ------------------------------------------------------------------------------- The four operators
class CommFunction(torch.autograd.Function):
    """One collective in the forward pass, and its conjugate in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, group, forward_comm, backward_comm) -> Tensor:
        ctx.group = group
        ctx.backward_comm = backward_comm
        return forward_comm(x, group)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return ctx.backward_comm(grad_output, ctx.group), None, None, None


def identity(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


# --- exercise 4.1: three collectives, and the four operators that are made of them ---
def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, H] of every rank -> their sum [T, H]"""
    total = x.clone(memory_format=torch.contiguous_format)  # autograd may have saved x itself
    dist.all_reduce(total, group=group)  # in place
    return total


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T/tp, H] of every rank -> all tokens [T, H], those of rank 0 first"""
    full = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    all_gather_single(full, x.contiguous(), group=group)
    return full


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, H] of every rank -> this rank's tokens of their sum [T/tp, H]"""
    shard = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter_single(shard, x.contiguous(), group=group)
    return shard


def copy_to_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Before A. x enters the matmuls of tp ranks, so its gradient is a sum. (f of 1909.08053)"""
    return CommFunction.apply(x, group, identity, all_reduce)


def reduce_from_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """After B. z is a sum, and its derivative by each term is 1. (g of 1909.08053)

    `torch.distributed.nn.all_reduce` sums in the backward pass too, for ranks with losses of their
    own. Here all compute the same loss, and gradients would become tp times too large.
    """
    return CommFunction.apply(x, group, all_reduce, identity)


def gather_from_sp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`copy_to_tp` of an x of which each rank has T/tp tokens. (g of 2205.05198)"""
    return CommFunction.apply(x, group, all_gather, reduce_scatter)


def reduce_scatter_to_sp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`reduce_from_tp` to T/tp tokens of z on each rank. (conjugate of 2205.05198's g)"""
    return CommFunction.apply(x, group, reduce_scatter, all_gather)


# --- end exercise ---
# ------------------------------------------------- Linear layers in pairs: by columns, then by rows
# --- exercise 4.2: which operator stands before A, and which one after B? ---
def column_parallel_linear(x: Tensor, weights: list, biases: list, tp: TPContext) -> tuple:
    """Linear layers that read the same x. [T, H], or [T/tp, H] -> [T, out/tp] for each weight.

    q, k and v come together, so that one collective in each direction serves all three. Weights are
    [out, in], as in nn.Linear, so A is split along dimension 0, and B along dimension 1.
    """
    full_x = gather_from_sp(x, tp.group) if tp.sequence_parallel else copy_to_tp(x, tp.group)
    return tuple(F.linear(full_x, w, bias) for w, bias in zip(weights, biases, strict=True))


def row_parallel_linear(y: Tensor, weight: Tensor, bias: Tensor, tp: TPContext) -> Tensor:
    """[T, in/tp] -> [T, H], or [T/tp, H]"""
    partial_sum = F.linear(y, weight)  # [T, H]
    return sum_over_tp(partial_sum, tp) + bias  # after the sum, which would add it tp times


def sum_over_tp(partial_sum: Tensor, tp: TPContext) -> Tensor:
    """[T, H] -> all-reduce -> [T, H], or reduce-scatter -> [T/tp, H]"""
    operator = reduce_scatter_to_sp if tp.sequence_parallel else reduce_from_tp
    return operator(partial_sum, tp.group)


# --- end exercise ---
# ------------------------------------------------------ Embedding and loss: the vocabulary is split
def vocab_parallel_embedding(tokens: Tensor, weight: Tensor, tp: TPContext) -> Tensor:
    """tokens [T] -> [T, H], or [T/tp, H]: the rank that has a token adds its row, the others 0."""
    index = tokens - tp.rank * len(weight)
    in_local_vocab = (index >= 0) & (index < len(weight))
    rows = F.embedding(index.where(in_local_vocab, 0), weight)  # [T] -> [T, H]
    return sum_over_tp(rows.masked_fill(~in_local_vocab[:, None], 0), tp)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, tp: TPContext):
    """Logits [T, V/tp], labels [T] -> the sum of -log p(label), the same on every rank.

    -log p = log(sum of exp(logit - max)) - (logit of the label - max): three values per token.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # --- exercise 4.3: a softmax over V tokens, of which this rank has V/tp ---
    local_vocab_size = logits.shape[1]
    first_id = tp.rank * local_vocab_size
    vocab_ids = first_id + torch.arange(local_vocab_size, device=logits.device)
    # Padding rows of the weight give logits too. At minus infinity they have probability 0.
    logits = logits.masked_fill(vocab_ids >= vocab_size, -math.inf)
    max_logit = logits.detach().amax(dim=1, keepdim=True)
    dist.all_reduce(max_logit, dist.ReduceOp.MAX, group=tp.group)  # [T, 1]
    logits = logits - max_logit
    index = labels - first_id
    in_local_vocab = (index >= 0) & (index < local_vocab_size)  # never for IGNORE_INDEX
    label_logit = logits.gather(1, index.where(in_local_vocab, 0)[:, None]).squeeze(1)
    label_logit = label_logit.masked_fill(~in_local_vocab, 0)
    sum_exp = logits.exp().sum(dim=1)
    # Not sum_over_tp: every rank needs the sums of all tokens, to compute the same loss.
    sums = reduce_from_tp(torch.stack((sum_exp, label_logit)), tp.group)  # [2, T], one message
    token_loss = sums[0].log() - sums[1]
    return token_loss.masked_fill(labels == IGNORE_INDEX, 0).sum()
    # --- end exercise ---


# ---------------------- Which shard of a weight a rank stores, and which gradients are partial sums
COLUMN_PARALLEL = ("q_proj", "gate_proj", "up_proj")
KEY_VALUE = ("k_proj", "v_proj")  # also by columns, but never less than one head
ROW_PARALLEL = ("o_proj", "down_proj")
VOCAB_PARALLEL = ("embed", "head")
NORMS = ("attn_norm", "mlp_norm", "norm")


def shard_weight(name: str, full: Tensor, config: ModelConfig, tp: TPContext) -> Tensor:
    """What this rank stores of a weight or bias.

    Every rank draws the full weight from the same seed, then takes its shard. If it drew only a
    shard from that seed, all ranks would store the same one.
    """
    *_, layer, kind = name.split(".")
    # --- exercise 4.4: by columns, heads, rows or tokens, or in full? ---
    if layer in COLUMN_PARALLEL:
        shard = full.chunk(tp.size)[tp.rank]
    elif layer in KEY_VALUE:  # with fewer heads than ranks, neighbours store the same head
        num_shards = min(config.n_kv_heads, tp.size)
        shard = full.chunk(num_shards)[tp.rank * num_shards // tp.size]
    elif layer in ROW_PARALLEL and kind == "weight":
        shard = full.chunk(tp.size, dim=1)[tp.rank]
    elif layer in VOCAB_PARALLEL:
        padded = F.pad(full, (0, 0, 0, -len(full) % tp.size))  # else shards differ in length
        shard = padded.chunk(tp.size)[tp.rank]
    else:  # norms, and biases that are added after the sum
        shard = full
    return shard.clone()  # a view would keep the full weight alive
    # --- end exercise ---


def all_reduce_partial_grads(params: Params, config: ModelConfig, tp: TPContext) -> None:
    """Call after the backward pass. Partial sums of a gradient are added, and never averaged.

    Most gradients are complete already: all T tokens went through this rank's shard. To sum them
    again would make them tp times too large.
    """
    for name, p in params.items():
        *_, layer, kind = name.split(".")
        # --- exercise 4.5: whose gradient is a partial sum, and over which ranks? ---
        is_replicated = layer in NORMS or (layer in ROW_PARALLEL and kind == "bias")
        if tp.sequence_parallel and is_replicated:
            dist.all_reduce(p.grad, group=tp.group)  # each rank saw T/tp of the tokens
        if layer in KEY_VALUE and config.n_kv_heads < tp.size:
            # Ranks with the same head add their gradients: each used it for its own query heads.
            # They need no group of their own, because each head has a slot in one message.
            slots = p.grad.new_zeros(config.n_kv_heads, *p.grad.shape)
            own_slot = slots[tp.rank * config.n_kv_heads // tp.size]
            own_slot.copy_(p.grad)
            dist.all_reduce(slots, group=tp.group)  # [N_kv, D, H]
            p.grad.copy_(own_slot)
        # --- end exercise ---


# -------------------------------------------------- A transformer block: two pairs of linear layers
def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm. It looks at one token at a time, so the tokens may be split."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [B, N, S, D]. It mixes tokens but never heads, so the heads may be split."""
    queries_per_kv = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(queries_per_kv, dim=1)  # [B, N_kv, S, D] -> [B, N, S, D]
    v = v.repeat_interleave(queries_per_kv, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # [B, N, S, S]
    scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)
    probs = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    return probs.to(q.dtype) @ v


def block(x: Tensor, params: Params, i: int, config: ModelConfig, tp: TPContext) -> Tensor:
    """Block i, without RoPE. [T, H] -> [T, H], or [T/tp, H] -> [T/tp, H]"""

    def columns(h: Tensor, *layers: str) -> tuple[Tensor, ...]:
        weights = [params[f"{i}.{layer}.weight"] for layer in layers]
        biases = [params[f"{i}.{layer}.bias"] for layer in layers]
        return tp.column_linear(h, weights, biases, tp)

    def rows(h: Tensor, layer: str) -> Tensor:
        weight = params[f"{i}.{layer}.weight"]
        return row_parallel_linear(h, weight, params[f"{i}.{layer}.bias"], tp)

    def split_heads(h: Tensor) -> Tensor:  # [T, n D] -> [B, n, S, D] with n local heads
        head_dim = config.hidden // config.n_heads
        return h.view(config.batch, config.seq_len, -1, head_dim).transpose(1, 2)

    h = norm(x, params[f"{i}.attn_norm.weight"])
    q, k, v = columns(h, "q_proj", "k_proj", "v_proj")  # [T, N/tp D], and [T, N_kv/tp D] twice
    attn = attention(split_heads(q), split_heads(k), split_heads(v))  # [B, N/tp, S, D]
    attn = attn.transpose(1, 2).flatten(2).flatten(0, 1)  # -> [B, S, N/tp D] -> [T, N/tp D]
    x = x + rows(attn, "o_proj")
    h = norm(x, params[f"{i}.mlp_norm.weight"])
    gate, up = columns(h, "gate_proj", "up_proj")  # [T, F/tp]: the same columns of both
    return x + rows(F.silu(gate) * up, "down_proj")


# ------- The overlapped form: collectives in flight while the gradients of the weights are computed
def overlapped_column_parallel_linear(x: Tensor, weights: list, biases: list, tp: TPContext):
    """The same results as `column_parallel_linear`, up to rounding, with less waiting.

    grad_x is needed first, by the layers before this one. It is summed while grad_W is computed:

        plain        compute   grad_W = dyᵀ x, grad_x = dy W |                | layers before
                     network                                 | sum grad_x     |
        overlapped   compute   grad_x = dy W | grad_W = dyᵀ x | layers before
                     network   all-gather x  | sum grad_x     |

    With sequence parallelism it saves T/tp tokens of x, and gathers all again (2205.05198, 4.2.2).
    """
    return OverlappedColumnLinear.apply(x, tp, len(weights), *weights, *biases)


class OverlappedColumnLinear(torch.autograd.Function):
    """One function from x to all outputs, so that its backward pass can choose the order."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: TPContext, num_layers: int, *params: Tensor | None):
        weights = params[:num_layers]
        biases = params[num_layers:]
        x = x.contiguous()
        ctx.tp = tp
        ctx.save_for_backward(x, *weights)  # before the all-gather: T/tp tokens
        full_x = all_gather(x, tp.group) if tp.sequence_parallel else x
        return tuple(F.linear(full_x, w, bias) for w, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):  # [T, out/tp] for each weight
        x, *weights = ctx.saved_tensors
        tp = ctx.tp
        # --- exercise 4.6: no wait without a matmul before it ---
        if tp.sequence_parallel:
            full_x = x.new_empty(tp.size * len(x), x.shape[1])
            gather_work = all_gather_single(full_x, x, group=tp.group, async_op=True)
        # In the order in which autograd would add: last layer first.
        partial_sum = grad_outputs[-1] @ weights[-1]  # [T, out/tp] @ [out/tp, H] -> [T, H]
        for dy, w in zip(grad_outputs[-2::-1], weights[-2::-1], strict=True):
            partial_sum.addmm_(dy, w)
        if tp.sequence_parallel:
            grad_x = torch.empty_like(x)  # [T, H] -> reduce-scatter -> [T/tp, H]
            reduce_work = reduce_scatter_single(grad_x, partial_sum, group=tp.group, async_op=True)
            gather_work.wait()
        else:
            full_x = x
            grad_x = partial_sum  # [T, H] -> all-reduce -> [T, H], in place
            reduce_work = dist.all_reduce(grad_x, group=tp.group, async_op=True)
        grad_weights = [dy.T @ full_x for dy in grad_outputs]  # [out/tp, T] @ [T, H]
        reduce_work.wait()
        # --- end exercise ---
        has_bias = zip(grad_outputs, ctx.needs_input_grad[-len(weights) :], strict=True)
        grad_biases = [dy.sum(0) if has else None for dy, has in has_bias]
        return grad_x, None, None, *grad_weights, *grad_biases


# -------------------------------------------------------------------------------- The training step
def loss_sum(params: Params, tokens, labels, config: ModelConfig, tp: TPContext) -> Tensor:
    """tokens, labels [B, S], the same on every rank -> the sum of the losses, the same as well."""
    # An id beyond the vocabulary is on no rank: all would add 0 and the loss look plausible.
    for what, ids in (("token", tokens), ("label", labels[labels != IGNORE_INDEX])):
        if ids.numel() and not 0 <= ids.min() <= ids.max() < config.vocab_size:
            raise ValueError(f"{what}s {ids.min()}..{ids.max()}: use 0 to {config.vocab_size - 1}")
    x = vocab_parallel_embedding(tokens.flatten(), params["embed.weight"], tp)
    for i in range(config.n_layers):
        x = block(x, params, i, config, tp)
    h = norm(x, params["norm.weight"])
    (logits,) = tp.column_linear(h, [params["head.weight"]], [None], tp)  # [T, V/tp]
    return vocab_parallel_cross_entropy(logits, labels.flatten(), config.vocab_size, tp)


def train(config: ModelConfig, tp: TPContext, device="cpu") -> tuple[list[Tensor], list[Params]]:
    """Losses of three steps; gradients of each step and, as a fourth entry, the parameters."""
    params = {}
    for name, full in full_params(config).items():
        params[name] = shard_weight(name, full, config, tp).to(device).requires_grad_()
    losses = []
    history = []
    for step in range(3):
        tokens, labels = get_batch(step, config, device)
        # Every rank computes the loss of all tokens, so nothing is averaged over the ranks.
        loss = loss_sum(params, tokens, labels, config, tp) / (labels != IGNORE_INDEX).sum()
        loss.backward()
        all_reduce_partial_grads(params, config, tp)
        losses.append(loss.detach())
        history.append({name: p.grad for name, p in params.items()})
        for p in params.values():
            p.data -= 0.1 * p.grad  # SGD: Adam would hide gradients that are tp times too large
            p.grad = None
    return losses, [*history, params]


# ----------------------------------------------------------------------- Model and data, in float64
TINY = ModelConfig(257, 64, 2, 8, 2, 96, batch=2, seq_len=32)  # 257: the shards need padding


def full_params(config: ModelConfig) -> Params:
    """The unsharded model, the same on every rank and whatever tp is."""
    hidden = config.hidden
    kv_hidden = config.n_kv_heads * hidden // config.n_heads
    layers = {"q_proj": (hidden, hidden), "o_proj": (hidden, hidden)}  # [out, in]
    layers |= {"k_proj": (kv_hidden, hidden), "v_proj": (kv_hidden, hidden)}
    layers |= {"gate_proj": (config.ffn_hidden, hidden), "up_proj": (config.ffn_hidden, hidden)}
    layers |= {"down_proj": (hidden, config.ffn_hidden)}
    vocab = (config.vocab_size, hidden)
    shapes = {"embed.weight": vocab, "head.weight": vocab, "norm.weight": (hidden,)}
    for i in range(config.n_layers):
        shapes |= {f"{i}.attn_norm.weight": (hidden,), f"{i}.mlp_norm.weight": (hidden,)}
        for layer, shape in layers.items():
            shapes |= {f"{i}.{layer}.weight": shape, f"{i}.{layer}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(0)
    params = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).double() / math.sqrt(shape[-1])
        params[name] = values + 1 if "norm" in name else values
    return params


def get_batch(step: int, config: ModelConfig, device="cpu") -> tuple[Tensor, Tensor]:
    """Random tokens, the next tokens as labels [B, S]. A row's first label does not count."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(config.vocab_size, (config.batch, config.seq_len + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[:, 0] = IGNORE_INDEX
    return text[:, :-1].to(device), labels.to(device)


# ----------------------------- The check: three steps next to a reference, and the bytes of a block
class CommCounter(TorchDispatchMode):
    """Bytes of collectives' full tensors: the larger of output and input, twice if all-reduced."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sizes = [arg.nbytes for arg in tree_leaves(args) if isinstance(arg, Tensor)]
            self.num_bytes += max(sizes) * (2 if func._opname == "allreduce_" else 1)
        return func(*args, **(kwargs or {}))


def expected_bytes(config, tp: int, sequence_parallel: bool, overlapped: bool, e=8) -> list[int]:
    """Bytes stored by the model, saved and sent by a block: the table at the top times e bytes."""
    hidden = config.hidden
    num_tokens = config.batch * config.seq_len
    kv_hidden = max(config.n_kv_heads // tp, 1) * hidden // config.n_heads  # of a rank
    attn = (2 * hidden * hidden + hidden) // tp + 2 * kv_hidden * (hidden + 1)
    mlp = (3 * hidden + 2) * config.ffn_hidden // tp
    vocab = 2 * -(-config.vocab_size // tp) * hidden
    # Two norms and two biases of each block, and the last norm, are stored in full.
    stored = vocab + config.n_layers * (attn + mlp + 4 * hidden) + hidden
    # Between A and B: q, repeated k and v, output and probabilities; gate, silu, up, product.
    per_token = 4 * hidden + config.n_heads * config.seq_len + 4 * config.ffn_hidden
    saved = per_token * num_tokens // tp
    # Of the two norms: the input, the input / RMS and 1 / RMS. Their outputs are the inputs of A.
    saved += (4 * hidden + 2) * num_tokens // (tp if sequence_parallel else 1)
    saved += 2 * hidden * num_tokens // (tp if sequence_parallel and overlapped else 1)
    sent = (10 if sequence_parallel and overlapped else 8) * num_tokens * hidden * (tp - 1) // tp
    return [e * stored, e * saved, e * sent]


def measured_bytes(params: Params, config: ModelConfig, tp: TPContext) -> list[int]:
    """The same of this rank, in one forward and backward pass of block 0."""
    num_rows = config.batch * config.seq_len // (tp.size if tp.sequence_parallel else 1)
    x = torch.randn(num_rows, config.hidden).to(params["norm.weight"]).requires_grad_()
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    counter = CommCounter()
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        z = block(x, params, 0, config, tp)
        z.backward(torch.ones_like(z))
    for p in params.values():
        storages.pop(p.untyped_storage().data_ptr(), None)
    stored = sum(p.nbytes for p in params.values())
    return [stored, sum(storages.values()), counter.num_bytes * (tp.size - 1) // tp.size]


def check(name: str, config: ModelConfig, tp: TPContext, reference: tuple, device) -> bool:
    """Compare with the reference on every rank, and print what was found."""
    losses, history = train(config, tp, device)
    ref_losses, ref_history = reference
    errors = [(a - b).abs() for a, b in zip(losses, ref_losses, strict=True)]
    for tensors, ref_tensors in zip(history, ref_history, strict=True):
        shards = {key: shard_weight(key, x, config, tp) for key, x in ref_tensors.items()}
        errors += [(tensors[key] - shards[key]).abs().max() for key in shards]
    error = torch.stack(errors).max().nan_to_num(math.inf).item()  # MAX over ranks may lose NaN
    measured = measured_bytes(history[-1], config, tp)
    overlapped = tp.column_linear is overlapped_column_parallel_linear
    expected = expected_bytes(config, tp.size, tp.sequence_parallel, overlapped)
    passed = error <= 1e-10 and measured == expected  # NaN fails
    worst = torch.tensor([error, not passed], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=tp.group)
    if tp.rank == 0:
        print(f"{name}: largest error {worst[0]:.1e}")
        for i, kind in enumerate(("stored", "saved", "sent")):
            print(f"    bytes {kind:6} {measured[i]:9,}, expected {expected[i]:9,}")
    return not worst[1]


def fail(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
        print(f"{os.path.basename(__file__)}: {message}", file=sys.stderr)
    sys.exit(2)


def init_distributed() -> torch.device:
    """Start torchrun's process group, or one of this process alone. Returns this rank's device."""
    num_gpus = torch.cuda.device_count()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < num_gpus < num_local:
        fail(f"--nproc_per_node {num_local}: use at most {num_gpus}, one for each GPU here")
    if num_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # or all would use GPU 0
    single = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if num_gpus else "gloo", timeout=timedelta(seconds=60), **single)
    return torch.device("cuda" if num_gpus else "cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description="Tensor parallelism", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--layout", choices=("tensor", "sequence"), help="default: both")
    parser.add_argument("--kv-heads", type=int, choices=(1, 2, 4, 8), default=2)
    args = parser.parse_args()
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size not in ("1", "2", "4", "8"):
        parser.error(f"--nproc_per_node {world_size} must divide 8 query heads: 1, 2, 4 or 8")
    device = init_distributed()
    config = TINY._replace(n_kv_heads=args.kv_heads)
    # The reference runs in a group of this rank only, where every shard is the full weight.
    self_group, _ = dist.new_subgroups(group_size=1, timeout=timedelta(seconds=60))
    reference = train(config, TPContext(self_group, sequence_parallel=False), device)
    passed = True
    for layout in (args.layout,) if args.layout else ("tensor", "sequence"):
        for column_linear in (column_parallel_linear, overlapped_column_parallel_linear):
            tp = TPContext(dist.group.WORLD, layout == "sequence", column_linear)
            name = f"{layout} parallel, {column_linear.__name__}"
            passed = check(name, config, tp, reference, device) and passed
    if dist.get_rank() == 0:
        print("PASS" if passed else "FAIL")
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
