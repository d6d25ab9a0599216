"""Expert parallelism: store the experts of a layer on different ranks, send each token to its own.

A mixture of experts (MoE) replaces one feed-forward layer by E small ones, the experts, of which
each token uses K. Parameters grow with E, computation with K. Two problems follow. A router must
choose the K experts of a token, in a way that can be trained. And E experts are too many for one
GPU, so each of ep ranks stores E/ep of them. An all-to-all sends tokens to their experts, another
one sends the results back. How many tokens go where is known only after the router has chosen.

Four experts, K = 1, two ranks with four tokens each:

                                    rank 0: experts 0, 1       rank 1: experts 2, 3
    1. route: choose                a>2  b>0  c>2  d>1         p>0  q>3  r>0  s>0
    2. plan_dispatch: sort          b d | a c                  p r s | q
       all-to-all of the counts     1 1 | 2 0                  3 0 | 0 1
    3. dispatch: all-to-all         b d p r s                  a c q
       sort by expert               b p r s | d                a c | q
    4. run_experts                  expert 0 | expert 1        expert 2 | expert 3
    5. combine: sort, all-to-all    b d | a c                  p r s | q
       sort, weight and add         a b c d                    p q r s

A rank stores consecutive experts, so rows that are sorted by expert are also sorted by rank.

                      stored on       gradient                sent by a layer, in elements
    experts           one rank each   complete as it is       2 H R forward, 2 H R backward
    everything else   every rank      summed over the ranks   only the gradients to be summed

A row is what is sent for one token and one of its experts, H elements. R rows leave their rank, all
ranks together. One expert has 3 H F elements.
Sources: Lepikhin et al. 2020, GShard, arXiv 2006.16668; Fedus et al. 2021, Switch Transformer,
2101.03961 (K = 1, capacity, load-balancing loss); Jiang et al. 2024, Mixtral, 2401.04088 (K = 2).

    python expert_parallel.py                                  one rank
    torchrun --nproc_per_node 4 expert_parallel.py             NCCL on GPUs, Gloo on CPUs
    torchrun --nproc_per_node 2 expert_parallel.py --top-k 3 --experts 6
    torchrun --nproc_per_node 2 expert_parallel.py --top-k 2 --capacity-factor 1.25

By default there are three cases: K = 1, K = 2, and K = 1 with a capacity factor of 1. Each trains a
small model for three steps next to a reference: one process that has all tokens and lets every
expert compute all of them. The last line is PASS if losses, gradients and parameters agree to 1e-10
and the bytes stored and sent match the formulas; otherwise the exit code is 1.
"""

import argparse
import math
import os
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Shapes: T tokens of this rank, H hidden, F ffn_hidden, E experts, K experts per token (top_k).


# ------------------------- The mixture of experts in one process: every expert computes every token
def route(x: Tensor, router_weight: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Step 1: x [T, H], router_weight [E, H] -> experts, gate_weights [T, K], router_probs [T, E].

    The choice has no gradient. The gate weights have one: through them the loss trains the router.
    """
    # --- exercise 7.1: probabilities in float32 or better, the K best experts, their weights ---
    # The choice compares numbers. With bf16's two to three digits, experts would tie.
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):  # it would cast both factors to bf16 again
        router_probs = F.linear(x.to(dtype), router_weight.to(dtype)).softmax(-1)
    gate_weights, experts = router_probs.topk(top_k)
    if top_k > 1:  # a single probability divided by itself is 1: the router would get no gradient
        gate_weights = gate_weights / gate_weights.sum(-1, keepdim=True)
    return experts, gate_weights, router_probs
    # --- end exercise ---


def expert_mlp(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """One expert, a SwiGLU layer: [n, H] -> [n, F] -> [n, H]."""
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def moe_dense(x, router_weight, w1, w3, w2, top_k, capacity_factor=None, group=None, sizes=None):
    """The simplest correct form: E/K times the work, and all experts in one process.

    Every expert computes every token, and the tokens that did not choose it give it the weight 0.
    In the parallel form each rank drops its own rows: `sizes`, the tokens of each (None: one rank).
    """
    num_experts = len(router_weight)
    experts, gate_weights, router_probs = route(x, router_weight, top_k)
    aux_loss = load_balancing_loss(router_probs, experts, group)
    if capacity_factor is not None:
        by_rank = experts.split(sizes or len(experts))
        experts = torch.cat([drop_tokens(e, num_experts, capacity_factor) for e in by_rank])
    y = torch.zeros_like(x, dtype=gate_weights.dtype)
    for e, expert_weights in enumerate(zip(w1, w3, w2, strict=True)):
        gate = (gate_weights * (experts == e)).sum(-1, keepdim=True)  # [T, 1], 0 if not chosen
        y = y + gate * expert_mlp(x, *expert_weights)
    return y.to(x.dtype), aux_loss, experts


def load_balancing_loss(router_probs: Tensor, experts: Tensor, group) -> Tensor:
    """This rank's part of  sum over e of f_e P_e.  The parts of the group's ranks add up to it.

    f_e is how often expert e was chosen, divided by K T/E, its part of an even load. P_e is the
    mean of its router probability. T counts the tokens of all ranks. An even load gives 1. f has no
    gradient. P has one, which lowers the probability of busy experts. Without that, an expert that
    is chosen more often learns more and is then chosen still more often.
    """
    num_experts = router_probs.shape[1]
    top_k = experts.shape[1]
    # --- exercise 7.2: f from the counts of all ranks, P as this rank's part of a mean ---
    counts = torch.bincount(experts.flatten(), minlength=num_experts)  # [E]
    if group is not None:
        # With its own counts each rank would balance its own few tokens, which is another loss.
        dist.all_reduce(counts, group=group)  # [E], summed
    counts = counts.to(router_probs.dtype)  # torch divides integers in float32
    num_tokens = counts.sum() / top_k  # of all ranks
    load = counts * num_experts / (top_k * num_tokens)  # f
    return (load * router_probs.sum(0)).sum() / num_tokens
    # --- end exercise ---


def drop_tokens(experts: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    """experts [T, K] of one rank -> the same, with E in place of an expert that is full.

    An expert takes at most C = ceil(capacity_factor K T/E) rows from each rank, in the order of the
    tokens. That bounds memory and time. No rank stores an expert E, so a dropped row is not sent
    and adds nothing. The gate weights of the token's other rows do not change. If all K rows of a
    token are dropped, only its residual connection remains.
    """
    capacity = math.ceil(capacity_factor * experts.numel() / num_experts)
    chosen = F.one_hot(experts.flatten(), num_experts)  # [T K, E]
    position = (chosen.cumsum(0) * chosen).sum(1)  # 1 for the first row of an expert, 2, 3, ...
    return experts.masked_fill(position.view_as(experts) > capacity, num_experts)


# -------------------- Expert parallel: each expert computes the tokens that chose it, and no others
def all_to_all_rows(x: Tensor, input_splits: list[int], output_splits: list[int], group) -> Tensor:
    """Send the first input_splits[0] rows of x to rank 0, the next input_splits[1] to rank 1, ...

    Returns the rows that this rank receives, output_splits[r] of them from rank r, in this order.
    """
    output = x.new_empty(sum(output_splits), x.shape[1])
    x = x.contiguous()
    dist.all_to_all_single(output, x, output_splits, input_splits, group=group)
    return output  # [n, H] -> all-to-all -> [n', H]


class AllToAll(torch.autograd.Function):
    """`all_to_all_rows` with a backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, input_splits: list[int], output_splits: list[int], group) -> Tensor:
        ctx.input_splits = input_splits
        ctx.output_splits = output_splits
        ctx.group = group
        return all_to_all_rows(x, input_splits, output_splits, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output: Tensor):
        # --- exercise 7.3: rows were moved and nothing was added; where do their gradients go? ---
        # Back to the rank that sent the row, times 1: a factor ep or 1/ep has no place here.
        grad = all_to_all_rows(grad_output, ctx.output_splits, ctx.input_splits, ctx.group)
        return grad, None, None, None
        # --- end exercise ---


class DispatchPlan(NamedTuple):
    """Which n rows this rank sends, and the n' it receives. Row t K + k: token t, k-th expert."""

    permutation: Tensor  # [n], indices of the rows to send, sorted by expert and so by rank
    input_splits: list[int]  # rows to send to each rank
    output_splits: list[int]  # rows to receive from each rank
    by_expert: Tensor  # [n'], indices of the received rows, sorted by expert
    num_tokens_per_expert: list[int]  # received rows for each of this rank's E/ep experts


def plan_dispatch(experts: Tensor, num_experts: int, group: dist.ProcessGroup) -> DispatchPlan:
    """Step 2: from experts [T, K] of this rank's tokens to a plan; one all-to-all of counts."""
    ep = dist.get_world_size(group)
    # --- exercise 7.4: sort the rows, count them, tell every rank what to expect, sort again ---
    flat = experts.flatten()  # [T K]
    counts = torch.bincount(flat, minlength=num_experts + 1)  # [E + 1], the last one: dropped
    send_counts = counts[:num_experts].view(ep, -1)  # [ep, E/ep]: rows for each expert of each rank
    recv_counts = torch.empty_like(send_counts)  # [ep, E/ep]: from each rank, for each own expert
    dist.all_to_all_single(recv_counts, send_counts, group=group)  # row r goes to rank r
    input_splits = send_counts.sum(1).tolist()
    output_splits = recv_counts.sum(1).tolist()
    permutation = flat.argsort(stable=True)[: sum(input_splits)]  # without the dropped ones
    # Received rows are sorted by sender, then by expert: 0 1 .. of rank 0, 0 1 .. of rank 1, ...
    local_experts = torch.arange(num_experts // ep, device=flat.device).repeat(ep)  # [E]
    by_expert = local_experts.repeat_interleave(recv_counts.flatten()).argsort(stable=True)
    num_tokens_per_expert = recv_counts.sum(0).tolist()
    # --- end exercise ---
    return DispatchPlan(permutation, input_splits, output_splits, by_expert, num_tokens_per_expert)


# --- exercise 7.5: to the experts, through them, and back ---
def dispatch(x: Tensor, plan: DispatchPlan, top_k: int, group: dist.ProcessGroup) -> Tensor:
    """Step 3: x [T, H] of this rank's tokens -> rows [n', H] for its experts, sorted by expert."""
    rows = x[plan.permutation // top_k]  # [T, H] -> [n, H]
    rows = AllToAll.apply(rows, plan.input_splits, plan.output_splits, group)  # -> [n', H]
    return rows[plan.by_expert]


def run_experts(rows: Tensor, num_tokens_per_expert: list[int], w1, w3, w2) -> Tensor:
    """Step 4: each of this rank's experts computes its own rows, [n', H] -> [n', H].

    An expert without rows computes zero rows: its gradient is zero and not None. A rank that
    skipped all of its experts would miss the all-to-alls of the backward pass, and the others
    would wait for it.
    """
    outs = []
    split_rows = rows.split(num_tokens_per_expert)
    for expert_rows, *expert_weights in zip(split_rows, w1, w3, w2, strict=True):
        outs.append(expert_mlp(expert_rows, *expert_weights))
    return torch.cat(outs)


def combine(expert_out: Tensor, gate_weights: Tensor, plan: DispatchPlan, group) -> Tensor:
    """Step 5: expert_out [n', H], sorted by expert -> y [T, H], a weighted sum over K."""
    rows = expert_out[plan.by_expert.argsort()]  # the inverse permutation: sorted by sender again
    rows = AllToAll.apply(rows, plan.output_splits, plan.input_splits, group)  # [n', H] -> [n, H]
    num_tokens, top_k = gate_weights.shape
    unsorted = rows.new_zeros(num_tokens * top_k, rows.shape[1])  # a dropped row stays zero
    unsorted[plan.permutation] = rows
    unsorted = unsorted.view(num_tokens, top_k, rows.shape[1])  # [T K, H] -> [T, K, H]
    return (unsorted * gate_weights[..., None]).sum(1)  # in float32 or better, like gate_weights


# --- end exercise ---


def moe(x, router_weight, w1, w3, w2, top_k, capacity_factor, group):
    """The same results as `moe_dense`, from the E/ep experts that this rank stores.

    x [T, H] of this rank, router_weight [E, H], w1, w3 [E/ep, F, H], w2 [E/ep, H, F] -> y [T, H],
    this rank's part of the load-balancing loss, and experts [T, K].
    """
    num_experts = len(router_weight)
    experts, gate_weights, router_probs = route(x, router_weight, top_k)  # step 1
    aux_loss = load_balancing_loss(router_probs, experts, group)  # before anything is dropped
    if capacity_factor is not None:
        experts = drop_tokens(experts, num_experts, capacity_factor)
    plan = plan_dispatch(experts, num_experts, group)  # step 2
    rows = dispatch(x, plan, top_k, group)  # step 3
    expert_out = run_experts(rows, plan.num_tokens_per_expert, w1, w3, w2)  # step 4
    y = combine(expert_out, gate_weights, plan, group)  # step 5
    return y.to(x.dtype), aux_loss, experts


# -------------------------------------------------------------------------------- The training step
IGNORE_INDEX = -100  # a label without a target
AUX_LOSS_COEF = 0.02
EXPERT_WEIGHTS = ("w1", "w3", "w2")  # sharded over the ranks; every rank stores all other weights
Params = dict[str, Tensor]


def shard_experts(params: Params, rank: int, ep: int) -> Params:
    """What one rank stores: E/ep experts of each layer, and all other weights."""
    shards = {}
    for name, weight in params.items():
        shard = weight.chunk(ep)[rank] if name.endswith(EXPERT_WEIGHTS) else weight
        shards[name] = shard.clone().requires_grad_()  # a view would keep all experts in memory
    return shards


def all_reduce_grads(params: Params, group: dist.ProcessGroup) -> None:
    """After the backward pass: complete the gradients that come from this rank's tokens alone."""
    for name, weight in params.items():
        # --- exercise 7.6: which gradients are not complete yet? ---
        # An expert has computed tokens of all ranks. Other ranks store other experts by that name.
        if not name.endswith(EXPERT_WEIGHTS):
            dist.all_reduce(weight.grad, group=group)  # summed: the loss is divided already
        # --- end exercise ---


def train_step(params: Params, tokens: Tensor, labels: Tensor, moe_layer: Callable, group):
    """Forward and backward. Returns the loss of all ranks' tokens, and experts [T, K] by layer.

    A rank's loss is a sum over its own tokens, divided by a number that is counted on all ranks.
    So the losses and gradients of the ranks only have to be added. A group of None: one process.
    """
    num_valid = (labels != IGNORE_INDEX).sum()
    if group is not None:
        dist.all_reduce(num_valid, group=group)
    logits, aux_loss, experts = run_model(params, tokens, moe_layer)
    logits = logits.flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    loss = loss / num_valid.clamp(min=1) + AUX_LOSS_COEF * aux_loss
    loss.backward()
    loss = loss.detach()
    if group is not None:
        all_reduce_grads(params, group)
        dist.all_reduce(loss, group=group)  # only for the log
    return loss, experts


# ----------------------------------------------- A small model, in float64, and text to train it on
N_LAYERS = 2
HIDDEN = 32
FFN_HIDDEN = 24  # of one expert
VOCAB_SIZE = 256
SEQ_LEN = 24
BATCH_OF_RANK = (3, 1, 2, 2)  # uneven on purpose; rank 4 has 3 again


def build_model(num_experts: int, device) -> Params:
    """The unsharded weights, the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def init(*shape: int) -> Tensor:
        weight = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (weight / shape[-1] ** 0.5).to(device)

    params = {"embed": init(VOCAB_SIZE, HIDDEN), "head": init(VOCAB_SIZE, HIDDEN)}
    for i in range(N_LAYERS):
        params[f"{i}.qkv_proj"] = init(3 * HIDDEN, HIDDEN)
        params[f"{i}.o_proj"] = init(HIDDEN, HIDDEN)
        params[f"{i}.router"] = init(num_experts, HIDDEN)
        params[f"{i}.w1"] = init(num_experts, FFN_HIDDEN, HIDDEN)
        params[f"{i}.w3"] = init(num_experts, FFN_HIDDEN, HIDDEN)
        params[f"{i}.w2"] = init(num_experts, HIDDEN, FFN_HIDDEN)
    return params


def run_model(params: Params, tokens: Tensor, moe_layer: Callable):
    """tokens [B, S] -> logits [B, S, V]; the aux losses of all layers; experts [T, K] by layer."""
    x = params["embed"][tokens]
    aux_loss = 0.0
    experts_by_layer = []
    for i in range(N_LAYERS):
        h = F.rms_norm(x, (HIDDEN,))
        q, k, v = F.linear(h, params[f"{i}.qkv_proj"]).chunk(3, dim=-1)  # one head
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(attn, params[f"{i}.o_proj"])
        h = F.rms_norm(x, (HIDDEN,)).flatten(0, 1)  # [B, S, H] -> [T, H]: experts know no sequence
        weights = [params[f"{i}.{name}"] for name in ("router", *EXPERT_WEIGHTS)]
        y, layer_aux_loss, experts = moe_layer(h, *weights)
        x = x + y.view_as(x)
        aux_loss = aux_loss + layer_aux_loss
        experts_by_layer.append(experts)
    return F.linear(F.rms_norm(x, (HIDDEN,)), params["head"]), aux_loss, experts_by_layer


def get_batch(step: int, rank: int, device) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, S] of one rank. B differs between ranks; rank 1 has no valid label."""
    text = torch.tensor(list(Path(tokenize.__file__).read_bytes()))  # Python source; token = byte
    batch = BATCH_OF_RANK[rank % len(BATCH_OF_RANK)]
    start = (5000 * step + 300 * rank) % 15000
    text = text[start : start + batch * (SEQ_LEN + 1)].view(batch, SEQ_LEN + 1).to(device)
    tokens = text[:, :-1]
    labels = text[:, 1:].clone()
    if rank == 1:
        labels[:] = IGNORE_INDEX
    return tokens, labels


# ------------------------------------------------------- The check: three steps next to a reference
@contextmanager
def count_bytes_sent(group: dist.ProcessGroup) -> Iterator[Counter]:
    """Count the bytes that this rank's all-to-alls send to other ranks: "rows" and "counts"."""
    sent = Counter(rows=0, counts=0)
    all_to_all = dist.all_to_all_single
    rank = dist.get_rank(group)
    ep = dist.get_world_size(group)

    def counted(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
        parts = input.split(input_split_sizes or len(input) // ep)
        name = "rows" if input.is_floating_point() else "counts"
        sent[name] += input.nbytes - parts[rank].nbytes  # a rank's own part does not leave it
        return all_to_all(output, input, output_split_sizes, input_split_sizes, group=group)

    with patch.object(dist, "all_to_all_single", counted):
        yield sent


def expected_bytes(tables: list[Tensor], rank: int) -> Counter:
    """The bytes that a rank sends. Each table has the rows of each rank for each expert, [ep, E].

    In the forward pass a rank sends its rows, and the outputs of the rows that it received. In the
    backward pass it sends as many gradients. An element and a count have 8 bytes.
    """
    table = sum(tables)  # over layers and steps
    ep, num_experts = table.shape
    table = table.view(ep, ep, -1).sum(2)  # [ep, E] -> [from rank, to rank]
    leave = table[rank].sum() - table[rank, rank]
    arrive = table[:, rank].sum() - table[rank, rank]
    rows = 2 * (leave + arrive).item()
    counts = len(tables) * (ep - 1) * num_experts // ep
    return Counter(rows=8 * rows * HIDDEN, counts=8 * counts)


def train(params: Params, batches: list, moe_layer: Callable, group=None):
    """Three steps of plain SGD -> losses and gradients by step, experts by step and layer.

    SGD, because Adam would hide a wrong scale of the gradients.
    """
    losses = []
    grads = []
    experts_by_layer = []
    for tokens, labels in batches:
        for weight in params.values():
            weight.grad = None
        loss, experts = train_step(params, tokens, labels, moe_layer, group)
        losses.append(loss)
        experts_by_layer += experts
        grads.append({name: weight.grad.clone() for name, weight in params.items()})
        with torch.no_grad():
            for weight in params.values():
                weight -= 0.1 * weight.grad
    return losses, grads, experts_by_layer


def check(top_k: int, capacity_factor: float | None, num_experts: int, group, device) -> list[str]:
    """Train on the ranks and in one process, print the result, return what is wrong on any."""
    ep = dist.get_world_size(group)
    rank = dist.get_rank(group)
    full_params = build_model(num_experts, device)
    batches = []  # of each step: the batches of all ranks
    for step in range(3):
        batches.append([get_batch(step, r, device) for r in range(ep)])

    params = shard_experts(full_params, rank, ep)
    layer = partial(moe, top_k=top_k, capacity_factor=capacity_factor, group=group)
    with count_bytes_sent(group) as sent:
        losses, grads, _ = train(params, [by_rank[rank] for by_rank in batches], layer, group)

    reference = shard_experts(full_params, 0, 1)
    sizes = [tokens.numel() for tokens, _ in batches[0]]  # tokens of each rank
    layer = partial(moe_dense, top_k=top_k, capacity_factor=capacity_factor, sizes=sizes)
    full_batches = []
    for by_rank in batches:
        tokens, labels = zip(*by_rank, strict=True)
        full_batches.append((torch.cat(tokens), torch.cat(labels)))
    ref_losses, ref_grads, experts_by_layer = train(reference, full_batches, layer)

    errors = [(a - b).abs() for a, b in zip(losses, ref_losses, strict=True)]
    for got, expected in zip([*grads, params], [*ref_grads, reference], strict=True):
        expected = shard_experts(expected, rank, ep)
        errors += [(got[name] - expected[name]).detach().abs().max() for name in params]
    error = torch.stack(errors).max().item()  # NaN if any error is NaN

    tables = []
    for experts in experts_by_layer:
        counts = [e.flatten().bincount(minlength=num_experts + 1) for e in experts.split(sizes)]
        tables.append(torch.stack(counts)[:, :num_experts])  # without the dropped ones
    expected_sent = expected_bytes(tables, rank)
    sharded = [weight for name, weight in params.items() if name.endswith(EXPERT_WEIGHTS)]
    stored = sum(weight.untyped_storage().nbytes() for weight in sharded)
    expected_stored = 8 * N_LAYERS * 3 * HIDDEN * FFN_HIDDEN * num_experts // ep

    if rank == 0:
        num_dropped = sum((experts == num_experts).sum().item() for experts in experts_by_layer)
        router_grad = min(grads[0][f"{i}.router"].abs().max().item() for i in range(N_LAYERS))
        print(f"K = {top_k}, capacity factor {capacity_factor}: rows by rank and expert, layer 0")
        print_table(tables[0])
        print(f"largest error {error:.1e}; gradients of the routers reach {router_grad:.1e}")
        print(f"bytes of experts stored {stored:,}, by formula {expected_stored:,}")
        print(f"bytes sent in three steps {dict(sent)}, by formula {dict(expected_sent)}")
        print(f"rows dropped in three steps {num_dropped}\n")
    failures = {
        f"largest error {error:.1e}": not error <= 1e-10,  # NaN fails
        f"{stored} bytes stored, by formula {expected_stored}": stored != expected_stored,
        f"bytes sent {dict(sent)}, by formula {dict(expected_sent)}": sent != expected_sent,
    }
    failures = [f"K = {top_k}, rank {rank}: {what}" for what, wrong in failures.items() if wrong]
    by_rank = [None] * ep
    dist.all_gather_object(by_rank, failures, group=group)
    return list(chain(*by_rank))  # a failure on one rank fails all


def print_table(table: Tensor) -> None:
    """The rows of each rank for each expert, [ep, E], with a bar before each rank's experts."""
    ep, num_experts = table.shape
    lines = {"": [f"e{e}" for e in range(num_experts)]}
    lines |= {f"rank {r}": table[r].tolist() for r in range(ep)}
    lines["sum"] = table.sum(0).tolist()
    for name, cells in lines.items():
        line = f"{name:7}"
        for e, cell in enumerate(cells):
            bar = " |" if e % (num_experts // ep) == 0 else ""
            line += f"{bar}{cell:>5}"
        print(line)


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
    parser = argparse.ArgumentParser(description="Expert parallelism", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--experts", type=int, default=8, help="in each layer")
    parser.add_argument("--top-k", type=int, help="experts per token (default: 1)")
    parser.add_argument("--capacity-factor", type=float, help="default: no limit")
    args = parser.parse_args()
    ep = int(os.environ.get("WORLD_SIZE", 1))
    if not 1 <= args.experts <= 1024 or args.experts % ep:
        parser.error(f"--experts {args.experts}: use a multiple of {ep} (ranks), up to 1024")
    if args.top_k is not None and not 1 <= args.top_k <= args.experts:
        parser.error(f"--top-k {args.top_k} of {args.experts} experts: use 1 to {args.experts}")
    if args.capacity_factor is not None and not 0 < args.capacity_factor <= 1024:  # NaN fails
        parser.error(f"--capacity-factor {args.capacity_factor}: use more than 0, up to 1024")

    device = init_distributed()
    cases = [(args.top_k or 1, args.capacity_factor)]
    if args.top_k is None and args.capacity_factor is None:
        cases = [(1, None), (min(2, args.experts), None), (1, 1.0)]
    failures = []
    for top_k, capacity_factor in cases:
        failures += check(top_k, capacity_factor, args.experts, dist.group.WORLD, device)
    if dist.get_rank() == 0:
        print(f"FAIL: {'; '.join(failures)}" if failures else "PASS")
    dist.destroy_process_group()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
