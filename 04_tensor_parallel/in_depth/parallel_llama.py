"""Tensor and sequence parallelism, the full model: a sharded vocabulary, and an unsharded state dict.

Problem. The largest matrices of a small model, and the largest activation of any model, have the vocabulary
as a dimension: logits are [B, S, V], and V is 128 thousand in Llama 3. Gathering them would undo all savings.

Idea. Shard the vocabulary too. A rank looks up the words it stores, with zeros for all others; f* or g* sums
over the ranks. A rank computes the logits of its words, column parallel. From the other ranks'
logits the loss needs three values per token: the maximum, the sum of exponentials, and the one at the label.

    V = 10, 4 ranks     rank 0     rank 1     rank 2     rank 3
    rows                0  1  2    3  4  5    6  7  8    9  .  .      . is padding: 3 rows on each rank, 12 in all
    embedding of 4      0          row 4      0          0            -> f* (all-reduce) or g* (reduce-scatter) -> x
    logits              0  1  2    3  4  5    6  7  8    9  -  -      - is minus infinity; else padding would
                                                                      get probability in every softmax
    loss = log(sum of e^(logit - max)) - (logit of the label - max)   one all-reduce of maxima, one of two sums
                                                                      (1909.08053, section 3)

    tokens [B, S] -> embed_tokens -> x [B, S or S/t, H] -> L blocks -> norm -> f or g -> lm_head -> logits [B, S, V/t]

Formulas, e bytes per element, T = B S tokens, n = T H e:
    collectives in a step   embedding 1, blocks 4 L, lm_head 1 in backward, loss 2 (of T and of 2 T elements)
    sent by a rank          (4 L + 2) 2(t-1)/t n  +  (T + 2 T) 2(t-1)/t max(e, 4)    without sequence parallel
    logits on a rank        T V e / t: never gathered
    weights on a rank       2 ⌈V/t⌉ H + L ((2 H² + 3 H F) / t + 2 H D max(N_kv/t, 1) + 2 H) + H elements

Run it:
    python parallel_llama.py                                                     one rank, CPU or GPU
    torchrun --nproc_per_node 4 parallel_llama.py --kv-heads 2                   Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 parallel_llama.py --dropout 0.1 --recompute      the same masks in backward
Three steps of SGD, with and without sequence parallel, next to the model on one device. The last line is
PASS, or it exits with 1 and says which number is off.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tensor_parallel_demo import OneLineParser, Report, Wire, launch, tokens_of_text
from parallel_block import (
    Config,
    Norm,
    ParallelBlock,
    Parts,
    check_sizes,
    dropout,
    drops_of_all_ranks,
    head_dim_of,
    one_by_one,
    parallel_mlp,
    reference_block,
    rms_norm,
    rope_tables,
    sync_replicated_gradients,
)
from parallel_linear import (
    ColumnParallelLinear,
    Shard,
    TensorParallel,
    all_gather_single,
    f_star,
    g_star,
    init_weights,
    initial_weight,
    shards,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# Legend of shapes: B batch, S sequence, H hidden, V vocabulary, L layers, t ranks of the tensor group; V/t rounds up.
IGNORE = -100  # a label without a target

# --------------------------------------------------------------------------------------------- both ends of the model


def check_words(what: str, ids: Tensor, vocab_size: int, ignore: int | None = None) -> None:
    """ValueError for a token or a label outside the vocabulary, for which every rank would silently add zero.

    On a GPU a Python `if` would synchronize in every step. So the device asserts, as in torch's own
    embedding: it stops, and the next call that waits for it raises RuntimeError. That message cannot name the
    id; run the batch on a CPU to see it.
    """
    right = (ids >= 0) & (ids < vocab_size)
    if ignore is not None:
        right |= ids == ignore
    if ids.is_cuda:
        torch._assert_async(right.all(), f"a {what} is not in 0 .. {vocab_size - 1}")
    elif ids.device.type == "cpu" and not right.all():  # on the meta device there is nothing to check
        raise ValueError(f"{what} {ids[~right][0].item()} is not in 0 .. {vocab_size - 1}: the model has no such word")


class VocabParallelEmbedding(nn.Module):
    """tokens [B, S], the same on every rank -> [B, S, H], or a rank's [B, S/t, H]. A rank stores V/t rows."""

    def __init__(self, vocab_size: int, hidden: int, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        self.shard = Shard(vocab_size, 0, tp.size, tp.rank)
        self.weight = nn.Parameter(torch.empty(self.shard.length, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        check_words("token", tokens, self.shard.size)
        # --- exercise 4.28: look up the tokens that this rank has; the other ranks have the others ---
        row = tokens - self.shard.index * self.shard.length
        elsewhere = (row < 0) | (row >= self.shard.length)
        x = F.embedding(row.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0)
        # --- end exercise ---
        return g_star(x, self.tp.group) if self.tp.sequence_parallel else f_star(x, self.tp.group)


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
        shard = Shard(vocab_size, 0, dist.get_world_size(group), dist.get_rank(group))
        # --- exercise 4.29: the softmax of all logits, from the logits of this rank and three numbers per token ---
        start = shard.index * shard.length
        padding = start + torch.arange(shard.length, device=logits.device) >= vocab_size
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(padding, -torch.inf)  # a copy
        peak = wide.amax(-1)  # [B, S]
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        wide -= peak[..., None]
        column = labels - start
        here = (column >= 0) & (column < shard.length)  # never for IGNORE
        column = column.masked_fill(~here, 0)[..., None]
        at_label = wide.gather(-1, column)[..., 0].masked_fill(~here, 0)
        softmax = wide.exp_()
        sums = torch.stack((softmax.sum(-1), at_label))  # [2, B, S]: one message for both
        dist.all_reduce(sums, group=group)
        softmax /= sums[0][..., None]
        loss = (sums[0].log() - sums[1]).masked_fill(labels == IGNORE, 0).sum()
        # --- end exercise ---
        ctx.save_for_backward(softmax, column, here, labels)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        softmax, column, here, labels = ctx.saved_tensors
        weight = grad * (labels != IGNORE)  # [B, S]
        d_logits = softmax * weight[..., None]
        d_logits.scatter_add_(-1, column, -(weight * here)[..., None])  # softmax - 1 at a local label
        return d_logits.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """SUM of -log p(label) over valid labels, equal on all ranks, in fp32 or better.

    logits [B, S, V/t] of this rank's words, labels [B, S] with -100 for none. It is a sum: divide by the
    number of valid tokens in the global batch. Raises ValueError for a label outside the vocabulary, and for
    gathered logits: t copies would give a softmax over t V tokens, and a loss too large by log t.
    """
    length = Shard(vocab_size, 0, dist.get_world_size(group), 0).length
    if logits.shape[-1] != length:
        raise ValueError(f"logits of {logits.shape[-1]} words, but a rank holds {length}; do not gather them")
    check_words("label", labels, vocab_size, IGNORE)
    return VocabParallelCrossEntropy.apply(logits, labels, vocab_size, group)


# ------------------------------------------------------------------------------------------------------ the model


class ParallelDecoder(nn.Module):
    def __init__(
        self,
        config: Config,
        tp: TensorParallel,
        parts: Parts,
        feed_forward: Callable,
        wrap: Callable,
        through: Callable,
        p: float,
    ):
        super().__init__()
        self.config = config
        self.tp = tp
        self.wrap = wrap
        self.through = through
        self.p = p
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden, tp)
        self.layers = nn.ModuleList(ParallelBlock(config, tp, parts, feed_forward, p) for _ in range(config.layers))
        self.norm = Norm(config, tp, parts)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        c = self.config
        scaling = getattr(self.config, "rope_scaling", None)
        # For all S tokens, because attention is split by heads, not by S.
        cos, sin = rope_tables(positions, head_dim_of(c), c.rope_theta, scaling)
        x = self.embed_tokens(tokens)  # [B, S] -> [B, S, H] or [B, S/t, H]
        if self.p and self.training:
            x = dropout(x, self.p, self.tp, sharded=self.tp.sequence_parallel)
        x = self.through(x, [self.wrap(block) for block in self.layers], cos, sin)
        return self.norm(x)


class ParallelLlama(nn.Module):
    """Chapter 01's Llama on a tensor group, with Hugging Face's parameter names and weights of seed 0.

    config        sizes; parts: functions to replace. Chapter 01's config and parts work for both
    feed_forward  makes the second half of a block from (config, tp, parts)
    wrap          wraps each block, as chapter 01's `recomputed`; p: dropout rate
    through       runs all blocks: (x, blocks, cos, sin) -> x
    """

    def __init__(
        self,
        config: Config,
        tp: TensorParallel,
        parts: Parts | None = None,
        *,
        feed_forward: Callable[..., nn.Module] = parallel_mlp,
        wrap: Callable[[Callable], Callable] = lambda block: block,
        through: Callable[..., Tensor] = one_by_one,
        p: float = 0.0,
    ):
        super().__init__()
        check_sizes(config, tp.size)
        self.config = config
        self.tp = tp
        self.parts = parts or Parts()
        self.model = ParallelDecoder(config, tp, self.parts, feed_forward, wrap, through, p)
        self.lm_head = ColumnParallelLinear(config.hidden, config.vocab_size, tp, self.parts.linear)
        if config.tied:  # both are split by words, so a rank has the same rows of both
            self.lm_head.weight = self.model.embed_tokens.weight
        init_weights(self, config.layers, seed=0)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens [B, S] -> logits of this rank's part of the vocabulary, [B, S, V/t]."""
        return self.lm_head(self.model(tokens, positions))

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum over all valid labels, from this rank's logits; like chapter 01's `parts.cross_entropy`."""
        return vocab_parallel_cross_entropy(logits, labels, self.config.vocab_size, self.tp.group)


def recomputed(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Save only a block's inputs, and run it again in backward, collectives included.

    `checkpoint` restores the default generators, from which the keys of all masks are drawn.
    """

    return partial(checkpoint, block, use_reentrant=False)


# --------------------------------------------------------------------------------------------------- full state dict


@torch.no_grad()
def full_state_dict(
    model: nn.Module, group: dist.ProcessGroup, tensors: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Full tensors by name, on the CPU of every rank: the parameters, or `tensors` with names and shapes of
    parameters (gradients, optimizer states). One full tensor at a time on the device. All ranks call it."""
    state = {}
    for name, shard in shards(model).items():
        if tensors is not None and name not in tensors:
            continue
        tensor = (model.get_parameter(name) if tensors is None else tensors[name]).detach()
        if shard.pieces > 1:
            # --- exercise 4.30: put the pieces together, each of them once, without padding ---
            ranks = dist.get_world_size(group)
            everyone = tensor.new_empty(ranks * tensor.shape[0], *tensor.shape[1:])
            all_gather_single(everyone, tensor.contiguous(), group=group)
            by_rank = everyone.chunk(ranks)
            pieces = [by_rank[i * ranks // shard.pieces] for i in range(shard.pieces)]
            tensor = torch.cat(pieces, shard.dim).narrow(shard.dim, 0, shard.size)
            # --- end exercise ---
        state[name] = tensor.to("cpu", copy=True)
    return state


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy this rank's piece of each full tensor to the parameter of that name.

    Raises ValueError, and changes nothing, if `state` is of another model: a name is missing or unexpected,
    or a shape differs. A tied parameter has two names; one of them is enough, two must be equal.
    """
    held = shards(model)
    names_of: dict[int, list[str]] = {}
    for name in held:
        names_of.setdefault(id(model.get_parameter(name)), []).append(name)
    problems = [
        few("missing", [" or ".join(names) for names in names_of.values() if not state.keys() & set(names)]),
        few("unexpected", list(state.keys() - held.keys())),
        few("in no Shard", [name for name, _ in model.named_parameters() if name not in held]),
    ]
    shapes, differ = [], []
    for names in names_of.values():
        given = [name for name in names if name in state]
        for name in given:
            want = held[name].full_shape(model.get_parameter(name))
            if list(state[name].shape) != want:  # `cut` would accept a vocabulary of any size
                shapes.append(f"{name} {list(state[name].shape)}, not {want}")
        if len({tuple(state[name].shape) for name in given}) == 1:
            differ += [name for name in given[1:] if not torch.equal(state[name], state[given[0]])]
    problems += [few("of another shape", shapes), few("tied, but not equal", differ)]
    if any(problems):
        raise ValueError(f"the state is not that of this model; {'; '.join(filter(None, problems))}")
    for name, shard in held.items():
        if name in state:
            model.get_parameter(name).copy_(shard.cut(state[name]))


def few(what: str, names: Sequence[str]) -> str:
    """`what: a, b, c and 4 more`, for a message of one line; empty for no names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(sorted(names)[:3])}{more}" if names else ""


@torch.no_grad()
def squared_gradient_norm(model: nn.Module, group: dist.ProcessGroup) -> Tensor:
    """Sum of squares of the full gradient, each parameter once, for every rank to call after the sync."""
    held = shards(model)
    ranks = dist.get_world_size(group)
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for name, p in model.named_parameters():  # a tied parameter has one name here
        if p.grad is not None:
            total += p.grad.double().square().sum() * held[name].pieces / ranks  # on t / pieces ranks
    dist.all_reduce(total, group=group)
    return total


# ------------------------------------------------------------------------------------------------------------- demo


def reference_logits(w: dict[str, Tensor], tokens: Tensor, config: Config, drops: Callable | None = None) -> Tensor:
    """The reference: the model on one device, [B, S] -> [B, S, V], from full weights by name."""
    positions = torch.arange(tokens.shape[-1], device=tokens.device)
    cos, sin = rope_tables(positions, head_dim_of(config), config.rope_theta, config.rope_scaling)
    x = F.embedding(tokens, w["model.embed_tokens.weight"])
    x = drops(x, -2) if drops else x
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        block = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        x = reference_block(x, block, config, cos, sin, drops)
    return F.linear(rms_norm(x, w["model.norm.weight"], config.norm_eps), w["lm_head.weight"])


def weights_per_rank(config: Config, t: int) -> int:
    """Elements of the parameters on one rank, with lm_head not tied, without adapters."""
    H = config.hidden
    D = head_dim_of(config)
    q = config.heads * D
    kv = max(config.kv_heads // t, 1) * D
    matrices = (2 * H * q + 3 * H * config.intermediate) // t + 2 * H * kv
    matrices += config.qkv_bias * (q // t + 2 * kv) + config.qk_norm * 2 * D
    return 2 * -(-config.vocab_size // t) * H + config.layers * (matrices + 2 * H) + H


def demo(args: argparse.Namespace, config: Config, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Three steps of SGD next to the reference, with and without sequence parallel."""
    B = 2
    S = args.sequence
    t = dist.get_world_size(group)
    report = Report(group)
    for sequence in (False, True):
        tp = TensorParallel(group, sequence)
        wrap = recomputed if args.recompute else (lambda block: block)
        model = ParallelLlama(config, tp, wrap=wrap, p=args.dropout).to(device, torch.float64)
        names = full_state_dict(model, group)
        w = {n: initial_weight(n, v.shape, config.layers, seed=0).to(device, torch.float64) for n, v in names.items()}
        for step in range(3):
            tokens = (tokens_of_text(B, S + 1, start=step * B * S) % config.vocab_size).to(device)
            tokens, labels = tokens[:, :-1], tokens[:, 1:].clone()
            labels[0, : S // 2] = IGNORE
            valid = (labels != IGNORE).sum()

            w = {name: value.detach().requires_grad_() for name, value in w.items()}
            torch.manual_seed(step)
            logits = reference_logits(w, tokens, config, drops_of_all_ranks(args.dropout, t, sequence))
            want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
            want.backward()

            model.zero_grad()
            torch.manual_seed(step)
            with Wire(t) as wire:
                loss = model.cross_entropy(model(tokens), labels) / valid
                loss.backward()
            sync_replicated_gradients(model, group)
            report.compare(loss.detach(), want.detach())
            for name, shard in shards(model).items():
                p = model.get_parameter(name)
                report.compare(p.grad, shard.cut(w[name].grad))
                p.data -= 0.1 * p.grad
                w[name].data -= 0.1 * w[name].grad
        for name, value in full_state_dict(model, group).items():
            report.compare(value, w[name].detach().cpu())

        mode = f"dropout {args.dropout}{', recomputed' * args.recompute}"
        report.title(f"{t} rank(s), tensor parallel{' and sequence parallel' * sequence}, {mode}")
        report.add_errors("largest error of losses, gradients, weights")
        e = 8
        n = B * S * config.hidden * 8
        if not args.recompute:
            sent = ((8 + 2 * sequence) * config.layers + 4 + sequence) * n + 2 * (B * S + 2 * B * S) * e
            report.add("bytes sent by a rank", sent * (t - 1) // t, wire.bytes)
        report.add("bytes of weights", weights_per_rank(config, t) * e, sum(p.nbytes for p in model.parameters()))
        report.add("words in the logits of a rank", -(-config.vocab_size // t), model.lm_head.weight.shape[0])
        again = ParallelLlama(config, tp).to(device, torch.float64)
        load_full_state_dict(again, full_state_dict(model, group))
        differ = sum(not torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
        report.add("weights that differ after a full state dict", 0, differ)
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="A Llama on several ranks.", allow_abbrev=False)
    parser.add_argument("--vocab", type=int, default=251)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=48)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--recompute", action="store_true", help="run each block again in backward")
    args = parser.parse_args()
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout} is no rate; use 0 or more, and less than 1")
    for option in ("vocab", "layers", "hidden", "heads", "kv_heads", "intermediate", "sequence"):
        if not 1 <= getattr(args, option) <= 4096:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)} is not in 1 .. 4096")
    config = Config(args.vocab, args.hidden, args.layers, args.heads, args.kv_heads, args.intermediate)
    try:
        check_sizes(config, int(os.environ.get("WORLD_SIZE", "1")), args.sequence)
    except ValueError as error:
        parser.error(str(error))
    launch(lambda group, device: demo(args, config, group, device))


if __name__ == "__main__":
    main()
