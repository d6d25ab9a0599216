"""Five axes of parallelism in one file: data, tensor, context, pipeline and expert; with ZeRO-1.

Each technique splits something else, and is given only a group of ranks. So the ranks are laid out
on a grid with one axis per technique, and each technique runs in the groups along its own axis.

    axis  chapter  splits               what a rank sends                                times
    dp    02, 03   the batch            gradients: reduce-scatter; weights: all-gather   1
    tp    04       matrices and tokens  activations: all-gather, then reduce-scatter     M per layer
    cp    05       the sequence         K/V round a ring; their gradients back           M per layer
    pp    06       the layers           activations to the next stage; gradients back    M
    ep    07       the experts          tokens to their experts and back: all-to-all     M per layer

A step has M micro-batches. Each forward message but token counts has one like it on the way back.

    16 ranks with --pp 2 --cp 2 --tp 2; dp is what remains: 2
                  cp 0   cp 1               cp 0    cp 1     rank 5: stage 0, dp 1, cp 0, tp 1
    stage 0 dp 0  0  1   2  3   stage 1     8  9   10 11     layers 0 and 1; of their matrices the
            dp 1  4  5   6  7              12 13   14 15     second half. Of the batch the second
                                                             half; of 4 chunks of each sequence 0
                                                             and 3, and between matrices only 3

ep needs no ranks of its own: ep neighbours of a stage store all experts among them. A gradient is
summed over the ranks that store the same weight and used it for different tokens.

    weight                       split into   gradient summed over   because
    q, k, v, o, gate, up, down   tp shards    dp x cp                tp ranks store other shards
    norms, router, embed, head   -            stage: dp x cp x tp    all its ranks saw other tokens
    w1, w3, w2 (of experts)      ep shards    same experts           neighbours sent their tokens

Nothing is averaged, because the loss is a sum over tokens, divided by the number of labels in the
global batch. ZeRO-1 ends each sum in shards, and the owner of a shard updates it.

    python five_d.py                                                    one rank
    torchrun --nproc_per_node 16 five_d.py --pp 2 --cp 2 --tp 2 --ep 2  NCCL on GPUs, Gloo on CPUs
    torchrun --nproc_per_node 4 five_d.py --tp 2 --ep 2 --train 300     learns, and writes a sample

Three steps run next to a reference in one process. The last line is PASS if losses, gradients,
norms and weights agree to 1e-10 and all bytes match the formulas. Left out: a load-balancing loss
(07) and a vocabulary split over tp (04). Sources: Narayanan et al. 2021, arXiv 2104.04473, section
3; Llama 3, 2407.21783, section 3.3.2.
"""

import argparse
import math
import os
import sys
import tokenize
import zlib
from collections import Counter
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # else imported late, by torch.optim, and then it keeps the group alive
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Params = dict[str, Tensor]  # by name, such as "0.q_proj": of layer 0
TIMEOUT = timedelta(seconds=120)  # each new group needs it, or it waits 10 minutes (30 with Gloo)
VOCAB_SIZE = 256  # bytes
IGNORE_INDEX = -100  # the loss ignores it
sent = Counter[str]()  # bytes that have left this rank, by the name of the group; for the check


class ModelConfig(NamedTuple):
    n_layers: int
    hidden: int  # H
    n_heads: int  # N, of queries
    n_kv_heads: int  # N_kv, of keys and values; a head has D = H / N elements
    ffn_hidden: int  # F
    num_experts: int  # E in each layer; 0: one feed-forward layer in place of experts
    top_k: int  # K, experts per token
    seq_len: int  # S
    batch: int  # sequences of the global batch
    num_micro_batches: int  # M, on each rank
    dtype: torch.dtype  # of the computation


TINY = ModelConfig(4, 32, 8, 4, 24, 4, 2, 45, 32, 4, torch.float64)
SMALL = ModelConfig(4, 128, 8, 4, 352, 4, 2, 128, 32, 4, torch.float32)  # with --train

# Shapes: s = S/cp tokens of a context rank, S padded to a multiple of 2 cp tp; b sequences of a
# micro-batch. Tokens are the first dimension, so an all-gather puts them one after the other.


# ----------------------------------------------------------------- The grid of ranks and its groups
class Mesh:
    """The sizes of the axes, this rank's place on each of them, and its groups."""

    def __init__(self, ranks: list[int], pp: int, cp: int, tp: int, ep: int):
        # --- exercise 11.1: the grid of ranks, and the groups of each kind ---
        grid = torch.tensor(ranks).view(pp, -1, cp, tp)  # [pp, dp, cp, tp]: tp sends most often
        stages = grid.flatten(1)  # [pp, dp cp tp]
        by_experts = stages.unflatten(1, (-1, ep))  # [pp, dp cp tp / ep, ep]
        groups = {  # [number of groups, ranks of each]
            "tp": grid.flatten(0, 2),
            "cp": grid.movedim(2, 3).flatten(0, 2),
            "pp": stages.T,
            "ep": by_experts.flatten(0, 1),
            "dp x cp": grid.flatten(1, 2).mT.flatten(0, 1),  # [pp, dp cp, tp] -> [pp tp, dp cp]
            "stage": stages,
            "same experts": by_experts.mT.flatten(0, 1),
            "all": grid.view(1, -1),
        }
        # --- end exercise ---
        self.pp, self.dp, self.cp, self.tp = grid.shape
        self.ep = ep
        place = (grid == dist.get_rank()).nonzero()[0]
        self.stage, self.dp_rank, self.cp_rank, self.tp_rank = place.tolist()
        self.groups: dict[str, dist.ProcessGroup] = {}
        for name, all_groups in groups.items():
            (mine,) = [ranks for ranks in all_groups.tolist() if dist.get_rank() in ranks]
            group = dist.new_group(mine, TIMEOUT, use_local_synchronization=True, group_desc=name)
            self.groups[name] = group
        self.ep_rank = dist.get_rank(self.groups["ep"])


# ------------------------ The model: what a stage computes. Its messages follow in the next section
def run_stage(x: Tensor, params: Params, config: ModelConfig, mesh: Mesh) -> Tensor:
    """Activations [s/tp, b, H] -> the same; the first stage embeds tokens, the last has logits."""
    if mesh.stage == 0:
        x = params["embed"][x].to(config.dtype)  # [s/tp, b] -> [s/tp, b, H]
    for i in layers_of_stage(config, mesh):
        h = rms_norm(x, params[f"{i}.attn_norm"])
        x = x + attention(h, params, i, config, mesh)
        h = rms_norm(x, params[f"{i}.mlp_norm"])
        x = x + feed_forward(h, params, i, config, mesh)
    if mesh.stage == mesh.pp - 1:
        x = linear(rms_norm(x, params["norm"]), params["head"])  # -> [s/tp, b, V]
    return x


def layers_of_stage(config: ModelConfig, mesh: Mesh) -> range:
    begin = mesh.stage * config.n_layers // mesh.pp
    end = (mesh.stage + 1) * config.n_layers // mesh.pp
    return range(begin, end)


def attention(x: Tensor, params: Params, i: int, config: ModelConfig, mesh: Mesh) -> Tensor:
    """Chapters 04 and 05: heads are split over tp, and a sequence over cp."""
    head_dim = config.hidden // config.n_heads
    positions = token_positions(config.seq_len, mesh).to(x.device)  # [s]
    x = gather_from_sp(x, mesh.groups["tp"])  # [s/tp, b, H] -> all-gather -> [s, b, H]
    q = linear(x, params[f"{i}.q_proj"]).unflatten(-1, (-1, head_dim))  # [s, b, N/tp, D]
    k = linear(x, params[f"{i}.k_proj"]).unflatten(-1, (-1, head_dim))  # [s, b, N_kv/tp, D]
    v = linear(x, params[f"{i}.v_proj"]).unflatten(-1, (-1, head_dim))
    q = apply_rotary(q, positions)
    k = apply_rotary(k, positions)
    out = ring_attention(q, k, v, mesh.groups["cp"])  # [s, b, N/tp, D]; K/V of all cp ranks pass
    partial_sum = linear(out.flatten(2), params[f"{i}.o_proj"])  # [s, b, H], of N/tp heads
    return reduce_scatter_to_sp(partial_sum, mesh.groups["tp"])  # -> reduce-scatter -> [s/tp, b, H]


def feed_forward(x: Tensor, params: Params, i: int, config: ModelConfig, mesh: Mesh) -> Tensor:
    """Chapter 07's experts, or chapter 04's pair of column- and row-parallel matrices."""
    if config.num_experts:
        tokens = x.flatten(0, 1)  # [s/tp, b, H] -> [T, H]: to an expert all tokens are alike
        return moe(tokens, params, i, config, mesh.groups["ep"]).view_as(x)
    weights = [params[f"{i}.{name}"] for name in ("gate_proj", "up_proj", "down_proj")]
    x = gather_from_sp(x, mesh.groups["tp"])  # [s/tp, b, H] -> all-gather -> [s, b, H]
    partial_sum = swiglu(x, *weights)  # [s, b, H], of F/tp inner elements
    return reduce_scatter_to_sp(partial_sum, mesh.groups["tp"])  # -> reduce-scatter -> [s/tp, b, H]


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Weights stay in fp32 when x is in bf16, so that their gradients add up in fp32."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(to_fp32(x), weight.shape, weight, eps=1e-5).to(x.dtype)


def to_fp32(x: Tensor) -> Tensor:
    """Sums over many terms need fp32: bf16 is converted, fp64 stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def apply_rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [s, b, heads, D] by the tokens' positions in the *full* sequence."""
    exponent = torch.arange(0, x.shape[-1], 2, device=x.device).float() / x.shape[-1]
    inv_freq = 1.0 / 10000.0**exponent
    angle = positions[:, None, None, None].float() * inv_freq  # [s, 1, 1, D/2], always in fp32
    cos = angle.cos()
    sin = angle.sin()
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


# -------------------------------------------------------- Messages, then messages with a derivative
def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[s/tp, ...] of every rank -> all tokens [s, ...], those of rank 0 first"""
    full = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    all_gather_single(full, x, group=group)
    sent[group.group_desc] += full.nbytes - x.nbytes  # as a ring sends it
    return full


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[s, ...] of every rank -> this rank's tokens of their sum [s/tp, ...]"""
    shard = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter_single(shard, x, group=group)
    sent[group.group_desc] += x.nbytes - shard.nbytes
    return shard


def send_recv(x: Tensor | None, dst, recv: Tensor | None, src, group) -> Tensor | None:
    """Send x to rank `dst` and receive `recv` from rank `src`, as far as they are not None."""
    ops = []  # both at once: if two ranks sent first, each would wait for the other to receive
    if x is not None and dst is not None:
        ops.append(dist.P2POp(dist.isend, x, group=group, group_peer=dst))
        sent[group.group_desc] += x.nbytes
    if recv is not None and src is not None:
        ops.append(dist.P2POp(dist.irecv, recv, group=group, group_peer=src))
    # A batch even if there is one message: NCCL has other communicators for single messages.
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return None if src is None else recv


def all_to_all_rows(x: Tensor, input_splits: list[int], output_splits: list[int], group) -> Tensor:
    """Send input_splits[r] rows of x to rank r, in this order; receive output_splits[r] from it."""
    output = x.new_empty(sum(output_splits), *x.shape[1:])
    dist.all_to_all_single(output, x, output_splits, input_splits, group=group)
    own = x.split(input_splits)[dist.get_rank(group)]  # does not leave this rank
    sent[group.group_desc] += x.nbytes - own.nbytes
    return output


class CommFunction(torch.autograd.Function):
    """A message in the forward pass, and its conjugate in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, group, forward_comm, backward_comm) -> Tensor:
        ctx.group = group
        ctx.backward_comm = backward_comm
        return forward_comm(x.contiguous(), group=group)

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        grad = ctx.backward_comm(grad_output.contiguous(), group=ctx.group)
        return grad, None, None, None


def gather_from_sp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """04, before column-parallel matrices: each rank's matmuls use all tokens, so gradients add."""
    return CommFunction.apply(x, group, all_gather, reduce_scatter)


def reduce_scatter_to_sp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """04, after row-parallel matrices: each rank has a partial sum for all tokens."""
    return CommFunction.apply(x, group, reduce_scatter, all_gather)


def ring_shift(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """05: every rank receives x of the previous rank. The gradient is sent the other way round."""
    return CommFunction.apply(x, group, partial(shift_by, hops=1), partial(shift_by, hops=-1))


def shift_by(x: Tensor, group: dist.ProcessGroup, hops: int) -> Tensor:
    rank = dist.get_rank(group)
    cp = dist.get_world_size(group)
    return send_recv(x, (rank + hops) % cp, torch.empty_like(x), (rank - hops) % cp, group)


def all_to_all(x: Tensor, input_splits: list[int], output_splits: list[int], group) -> Tensor:
    """07: `all_to_all_rows`. The gradient of a row goes back to the rank that sent the row."""
    there = partial(all_to_all_rows, input_splits=input_splits, output_splits=output_splits)
    back = partial(all_to_all_rows, input_splits=output_splits, output_splits=input_splits)
    return CommFunction.apply(x, group, there, back)


# ------------------------------------------------------------- 05: attention over a ring, in zigzag
def attention_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention to these keys only, k and v [t, b, N_kv, D]: out [s, b, N, D] and LSE [s, b, N]."""
    q = to_fp32(q).unflatten(2, (k.shape[2], -1))  # [s, b, N_kv, N/N_kv, D]; k is not repeated
    scores = torch.einsum("sbhgd,tbhd->bhgst", q, to_fp32(k)) / math.sqrt(q.shape[-1])
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    lse = scores.logsumexp(-1)  # [b, N_kv, G, s]
    probs = (scores - lse[..., None]).exp()
    out = torch.einsum("bhgst,tbhd->sbhgd", probs, to_fp32(v))
    return out.flatten(2, 3), lse.flatten(1, 2).movedim(-1, 0)


def merge_attention(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor):
    """Attention to the keys of both: denominators e^LSE add up, and weight the two outputs."""
    new_lse = torch.logaddexp(lse, block_lse)
    weight = (lse - new_lse).exp()[..., None]
    block_weight = (block_lse - new_lse).exp()[..., None]
    return weight * out + block_weight * block_out, new_lse


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Causal attention from this rank's two chunks; K/V are sent once round the ring."""
    rank = dist.get_rank(group)
    half = len(q) // 2
    kv = torch.stack((k, v))  # one message instead of two
    # --- exercise 11.2: what do this rank's two chunks see of the two of each other rank? ---
    out, lse = attention_block(q, k, v, causal=True)  # positions are ascending
    for step in range(1, dist.get_world_size(group)):
        kv = ring_shift(kv, group)  # now the block of rank - step
        if step <= rank:  # an earlier rank: its late chunk comes after both of mine
            block = attention_block(q, kv[0, :half], kv[1, :half], causal=False)
            out, lse = merge_attention(out, lse, *block)
        else:  # a later rank: both its chunks lie between mine
            block = attention_block(q[half:], kv[0], kv[1], causal=False)
            late_out, late_lse = merge_attention(out[half:], lse[half:], *block)
            out = torch.cat((out[:half], late_out))
            lse = torch.cat((lse[:half], late_lse))
    # --- end exercise ---
    return out.to(q.dtype)


# ---------------------------------------- 02, 04, 05: the samples of a rank, and the tokens of each
def token_positions(seq_len: int, mesh: Mesh) -> Tensor:
    """Positions [s] of this rank's tp group: an early chunk and its mirror image (zigzag)."""
    padding = -seq_len % (2 * mesh.cp * mesh.tp)
    chunks = torch.arange(seq_len + padding).chunk(2 * mesh.cp)
    return torch.cat((chunks[mesh.cp_rank], chunks[2 * mesh.cp - 1 - mesh.cp_rank]))


def shard_batch(tokens: Tensor, labels: Tensor, config: ModelConfig, mesh: Mesh) -> list:
    """The global batch [batch, S] -> M micro-batches (tokens, labels) of [s/tp, b] each."""
    # --- exercise 11.3: this rank's samples, and its tokens of each sample ---
    positions = token_positions(config.seq_len, mesh).to(tokens.device)
    padding = len(positions) * mesh.cp - config.seq_len
    micro_batches = []
    for ids, pad_value in ((tokens, 0), (labels, IGNORE_INDEX)):
        ids = ids.chunk(mesh.dp)[mesh.dp_rank]  # dp: samples, [batch/dp, S]
        ids = F.pad(ids, (0, padding), value=pad_value)[:, positions]  # cp: two chunks, [., s]
        ids = ids.chunk(mesh.tp, dim=1)[mesh.tp_rank]  # tp: neighbouring tokens, [., s/tp]
        micro_batches.append(ids.T.chunk(config.num_micro_batches, dim=1))  # M of [s/tp, b]
    return list(zip(*micro_batches, strict=True))
    # --- end exercise ---


# -------------------------------------------- 07: a mixture of experts, each of them on one ep rank
def moe(x: Tensor, params: Params, i: int, config: ModelConfig, group) -> Tensor:
    """x [T, H] -> [T, H]. w1, w3 [E/ep, F, H] and w2 [E/ep, H, F] are of this rank's experts.

    A row is what is sent for one token and one of its K experts. Row t K + k: token t, k-th expert.
    """
    # Route, in fp32 or better: in bf16, experts would tie
    router_probs = F.linear(to_fp32(x), params[f"{i}.router"]).softmax(-1)  # [T, E]
    gate_weights, experts = router_probs.topk(config.top_k)  # [T, K]
    if config.top_k > 1:  # one probability divided by itself is 1: the router would get no gradient
        gate_weights = gate_weights / gate_weights.sum(-1, keepdim=True)
    # Plan: how many rows go to each expert, and how many come from each rank?
    ep = dist.get_world_size(group)
    num_local = config.num_experts // ep
    send_counts = torch.bincount(experts.flatten(), minlength=config.num_experts)  # [E]
    recv_counts = all_to_all_rows(send_counts, [num_local] * ep, [num_local] * ep, group)
    recv_counts = recv_counts.view(ep, num_local)  # from each rank, for each expert of this rank
    input_splits = send_counts.view(ep, num_local).sum(1).tolist()
    output_splits = recv_counts.sum(1).tolist()
    sent["rows"] += sum(input_splits) + sum(output_splits) - 2 * input_splits[dist.get_rank(group)]
    # Dispatch: rows sorted by expert are sorted by rank. They arrive sorted by sender.
    permutation = experts.flatten().argsort(stable=True)
    rows = x[permutation // config.top_k]  # [T, H] -> [T K, H]
    rows = all_to_all(rows, input_splits, output_splits, group)  # [T K, H] -> [n', H]
    local_experts = torch.arange(num_local, device=x.device).repeat(ep)  # 0 1 .. of each sender
    by_expert = local_experts.repeat_interleave(recv_counts.flatten()).argsort(stable=True)
    expert_rows = rows[by_expert].split(recv_counts.sum(0).tolist())
    # Run the experts. One without rows computes zero rows: its gradient is zero and not None.
    weights = [params[f"{i}.{name}"] for name in EXPERT_WEIGHTS]
    outs = [swiglu(*each) for each in zip(expert_rows, *weights, strict=True)]
    # Combine: back to the senders, and a weighted sum over the K experts of a token
    rows = torch.cat(outs)[by_expert.argsort()]
    rows = all_to_all(rows, output_splits, input_splits, group)  # [n', H] -> [T K, H]
    rows = rows[permutation.argsort()].unflatten(0, gate_weights.shape)  # -> [T, K, H]
    return (rows * gate_weights[..., None]).sum(1).to(x.dtype)


# ------------------------------------------------------ 06: the pipeline, one forward, one backward
def forward_backward(batch: list, num_valid: Tensor, params: Params, config, mesh: Mesh) -> Tensor:
    """Add to the gradients of all params by 1F1B. Returns this rank's part of the loss."""
    num_micro_batches = len(batch)
    group = mesh.groups["pp"]
    prev_stage = mesh.stage - 1 if mesh.stage > 0 else None
    next_stage = mesh.stage + 1 if mesh.stage < mesh.pp - 1 else None
    loss = torch.zeros((), dtype=torch.float64, device=num_valid.device)
    in_flight: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch -> input, output

    def forward(i: int, x: Tensor | None) -> Tensor:
        """Activations of the previous stage -> activations for the next one, [s/tp, b, H]."""
        tokens, labels = batch[i]
        x = tokens if x is None else x.requires_grad_()  # this rank's autograd graph begins here
        y = run_stage(x, params, config, mesh)
        if next_stage is None:
            y = to_fp32(y).flatten(0, 1)  # [s/tp b, V]
            y = F.cross_entropy(y, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
            y = y / num_valid  # before the backward pass, and by all labels: what remains are sums
            loss.add_(y.detach())
        in_flight[i] = x, y
        return y.detach().contiguous()

    def backward(i: int, grad_output: Tensor | None) -> Tensor | None:
        """The gradient of what `forward` returned -> the gradient of what it received."""
        x, y = in_flight.pop(i)
        y.backward(grad_output)  # adds to the gradient of each parameter
        return None if x.grad is None else x.grad.contiguous()

    def new_message() -> Tensor:  # a receiver must know the shape in advance
        size = (*batch[0][0].shape, config.hidden)
        return torch.empty(size, dtype=config.dtype, device=num_valid.device)

    # Warm-up: one forward pass for each later stage
    num_warmup = min(mesh.pp - 1 - mesh.stage, num_micro_batches)
    num_steady = num_micro_batches - num_warmup
    for i in range(num_warmup):
        x = send_recv(None, None, new_message(), prev_stage, group)
        y = forward(i, x)
        send_recv(y, next_stage, None, None, group)
    # Steady state: one forward, one backward
    if num_steady > 0:
        x = send_recv(None, None, new_message(), prev_stage, group)
    for i in range(num_steady):
        y = forward(num_warmup + i, x)
        grad_output = send_recv(y, next_stage, new_message(), next_stage, group)
        grad_input = backward(i, grad_output)
        next_x = new_message() if i + 1 < num_steady else None
        x = send_recv(grad_input, prev_stage, next_x, prev_stage, group)
    # Cool-down: the backward passes that are left
    for i in range(num_steady, num_micro_batches):
        grad_output = send_recv(None, None, new_message(), next_stage, group)
        grad_input = backward(i, grad_output)
        send_recv(grad_input, prev_stage, None, None, group)
    return loss


# -------------------------- Which shard of a weight a rank stores, and which ranks sum its gradient
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")
EXPERT_WEIGHTS = ("w1", "w3", "w2")


def shard_spec(name: str, config: ModelConfig, mesh: Mesh) -> tuple[int, int, int] | None:
    """(n, index, dim): this rank stores `full.chunk(n, dim)[index]`. None: another stage has it."""
    layer, _, kind = name.rpartition(".")
    if kind == "embed":
        layer = 0
    elif kind in ("norm", "head"):
        layer = config.n_layers - 1
    if int(layer) not in layers_of_stage(config, mesh):
        return None
    if kind in COLUMN_PARALLEL:  # weights are [out, in]; so heads are split along dimension 0
        return mesh.tp, mesh.tp_rank, 0
    if kind in ROW_PARALLEL:
        return mesh.tp, mesh.tp_rank, 1
    if kind in EXPERT_WEIGHTS:
        return mesh.ep, mesh.ep_rank, 0
    return 1, 0, 0


def shard_weights(full: Params, config: ModelConfig, mesh: Mesh) -> Params:
    """What this rank stores, as views of the full weights."""
    shards = {}
    for name, weight in full.items():
        spec = shard_spec(name, config, mesh)
        if spec is not None:
            num_shards, index, dim = spec
            shards[name] = weight.chunk(num_shards, dim)[index]
    return shards


def gather_full_weights(shards: Params, config: ModelConfig, mesh: Mesh) -> Params:
    """The inverse, on every rank: from all ranks' shards to full weights."""
    weights = build_model(config)
    sizes = [weight.numel() for weight in weights.values()]
    flat = next(iter(shards.values())).new_full((sum(sizes),), -math.inf)
    pieces = zip(weights.items(), flat.split(sizes), strict=True)
    full = {name: piece.view_as(weight) for (name, weight), piece in pieces}
    for name, shard in shard_weights(full, config, mesh).items():
        shard.copy_(shards[name].detach())
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=mesh.groups["all"])  # others: -inf, or the same
    return full


def grad_reduce_group(name: str) -> str:
    """The group that sums the gradient of a weight: the second table at the top."""
    kind = name.rpartition(".")[2]
    # --- exercise 11.4: which ranks sum a gradient? ---
    if kind in COLUMN_PARALLEL or kind in ROW_PARALLEL:
        return "dp x cp"
    if kind in EXPERT_WEIGHTS:
        return "same experts"
    return "stage"
    # --- end exercise ---


class FlatParam:
    """03: weights whose gradients the same group sums, flattened, padded and split into shards."""

    def __init__(self, weights: Params, group: dist.ProcessGroup):
        self.group = group
        self.group_size = dist.get_world_size(group)
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.full = self.flatten(weights)  # [n]
        self.full_grad = torch.zeros_like(self.full)  # [n]
        self.shard = self.shard_of(self.full)  # [n/ranks], a view: updating it updates the weights
        self.shard.grad = torch.zeros_like(self.shard)
        self.params = self.views_of(self.full)  # [n] -> name -> a view with the weight's shape
        grads = self.views_of(self.full_grad)
        for name, p in self.params.items():
            p.requires_grad_()
            p.grad = grads[name]  # the backward pass of each micro-batch adds to it

    def flatten(self, tensors: Params) -> Tensor:
        flat = torch.cat([tensors[name].flatten() for name in self.shapes])
        return F.pad(flat, (0, -len(flat) % self.group_size))  # zeros, with gradient zero

    def shard_of(self, flat: Tensor) -> Tensor:
        return flat.chunk(self.group_size)[dist.get_rank(self.group)]

    def views_of(self, flat: Tensor) -> Params:
        views = {}
        offset = 0
        for name, shape in self.shapes.items():
            views[name] = flat[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()
        return views


def all_params(flat_params: list[FlatParam]) -> Params:
    params = {}
    for flat_param in flat_params:
        params |= flat_param.params
    return params


def build_flat_params(shards: Params, mesh: Mesh) -> list[FlatParam]:
    """One for each group that sums gradients, in the same order on all ranks."""
    flat_params = []
    for group in sorted({grad_reduce_group(name) for name in shards}):
        weights = {name: x for name, x in shards.items() if grad_reduce_group(name) == group}
        flat_params.append(FlatParam(weights, mesh.groups[group]))
    return flat_params


# -------------------------------------------------------------------------------- The training step
def train_step(batch, flat_params: list[FlatParam], optimizer, max_norm: float, config, mesh):
    """One step on this rank's micro-batches. Returns loss and gradient norm of the global batch."""
    params = all_params(flat_params)
    num_valid = count_valid_tokens(batch, mesh)
    loss = forward_backward(batch, num_valid, params, config, mesh)
    reduce_scatter_grads(flat_params)
    grad_norm = clip_grads(flat_params, max_norm, mesh)
    optimizer.step()  # on the shards: the optimizer has seen nothing else
    all_gather_params(flat_params)
    for flat_param in flat_params:
        flat_param.full_grad.zero_()  # the clipped shards of the sum stay for the check
    dist.all_reduce(loss, group=mesh.groups["all"])  # only for the log
    return loss.item(), grad_norm.item()


def count_valid_tokens(batch: list, mesh: Mesh) -> Tensor:
    """Labels of the global batch, at least 1. All ranks of a stage have different tokens."""
    num_valid = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batch]).sum()
    dist.all_reduce(num_valid, group=mesh.groups["stage"])
    return num_valid.clamp(min=1)


def reduce_scatter_grads(flat_params: list[FlatParam]) -> None:
    """Sum each gradient over the group of its weight; the owner of a shard gets the shard's sum."""
    # --- exercise 11.5: start all sums, then wait for each ---
    works = []
    for x in flat_params:  # [n] -> reduce-scatter -> [n/ranks]
        work = reduce_scatter_single(x.shard.grad, x.full_grad, group=x.group, async_op=True)
        works.append(work)
    for work in works:
        work.wait()
    # --- end exercise ---


def clip_grads(flat_params: list[FlatParam], max_norm: float, mesh: Mesh) -> Tensor:
    """Returns the norm of the gradient over all axes; scales the gradient down to `max_norm`."""
    # --- exercise 11.6: a norm over all axes, in which each element counts once ---
    squares = [flat_param.shard.grad.double().square().sum() for flat_param in flat_params]
    total = torch.stack(squares).sum()  # of the elements that this rank owns
    dist.all_reduce(total, group=mesh.groups["all"])  # over stages, tp shards and experts
    grad_norm = total.sqrt()
    scale = (max_norm / (grad_norm + 1e-6)).clamp(max=1)  # as torch does it: never up
    for flat_param in flat_params:
        flat_param.shard.grad.mul_(scale)
    # --- end exercise ---
    return grad_norm


def all_gather_params(flat_params: list[FlatParam]) -> None:
    for flat_param in flat_params:
        shard = flat_param.shard.clone()  # [n/ranks] -> all-gather -> [n]
        all_gather_single(flat_param.full, shard, group=flat_param.group)
        sent["zero"] += 2 * (flat_param.full.nbytes - shard.nbytes)  # with the reduce-scatter


# ------------------------------------------------------------------ Weights, and text to learn from
def build_model(config: ModelConfig) -> Params:
    """The full weights, each drawn from a seed of its own name: the same model in every layout."""
    hidden = config.hidden
    kv_hidden = config.n_kv_heads * hidden // config.n_heads
    experts = (config.num_experts,) if config.num_experts else ()
    up = (*experts, config.ffn_hidden, hidden)  # [E, out, in]; without experts [out, in]
    down = (*experts, hidden, config.ffn_hidden)
    layer = {"attn_norm": (hidden,), "mlp_norm": (hidden,)}
    layer |= {"q_proj": (hidden, hidden), "o_proj": (hidden, hidden)}
    layer |= {"k_proj": (kv_hidden, hidden), "v_proj": (kv_hidden, hidden)}
    if experts:
        layer |= {"router": (*experts, hidden), "w1": up, "w3": up, "w2": down}
    else:
        layer |= {"gate_proj": up, "up_proj": up, "down_proj": down}
    shapes = {"embed": (VOCAB_SIZE, hidden), "norm": (hidden,), "head": (VOCAB_SIZE, hidden)}
    for i in range(config.n_layers):
        shapes |= {f"{i}.{kind}": shape for kind, shape in layer.items()}
    full = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator).double() / math.sqrt(shape[-1])
        full[name] = 1 + values if "norm" in name else values
    return full


def load_text() -> Tensor:
    """The source of Python's standard library, as bytes."""
    files = sorted(Path(tokenize.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def get_batch(text: Tensor, step: int, config: ModelConfig, masked: bool):
    """Tokens and labels of the global batch, [batch, S]. `masked` removes some labels."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - config.seq_len, (config.batch, 1), generator=generator)
    window = text[starts + torch.arange(config.seq_len + 1)]  # [batch, S + 1]
    labels = window[:, 1:]  # shifted here: the label of a chunk's last token is in another chunk
    if masked:  # a prompt, longer in each sample; the last four samples have no label at all
        sample = torch.arange(config.batch)[:, None]
        prompt_len = sample * config.seq_len / max(config.batch - 4, 1)
        labels = labels.masked_fill(torch.arange(config.seq_len) < prompt_len, IGNORE_INDEX)
    return window[:, :-1], labels


# ------------------------------------------------------- The check: three steps next to a reference
def expected_bytes(flat_params, config, mesh: Mesh, states_per_param: int, rows: int) -> dict:
    """Bytes stored, and sent per step by axis, if `rows` rows leave for experts or come back."""
    M = config.num_micro_batches
    calls = len(layers_of_stage(config, mesh)) * M
    num_tokens = len(token_positions(config.seq_len, mesh)) * config.batch // (mesh.dp * M)  # s b
    row = config.hidden * config.dtype.itemsize  # of one token
    x = num_tokens * row  # [s, b, H]
    kv = 2 * x * config.n_kv_heads // (config.n_heads * mesh.tp)  # of this rank's heads
    pairs = 1 if config.num_experts else 2  # of column- and row-parallel matrices per layer
    num_neighbours = (mesh.stage > 0) + (mesh.stage < mesh.pp - 1)
    counts = 8 * calls * (mesh.ep - 1) * config.num_experts // mesh.ep  # int64, forward only
    full = sum(flat_param.full.nbytes for flat_param in flat_params)
    shards = sum(flat_param.shard.nbytes for flat_param in flat_params)
    return {
        "stored": 2 * full + (1 + states_per_param) * shards,  # weights, gradients; sums, optimizer
        "tp": 4 * pairs * calls * x * (mesh.tp - 1) // mesh.tp,  # two collectives in each direction
        "cp": 2 * calls * (mesh.cp - 1) * kv,  # K/V round the ring, their gradients back
        "pp": num_neighbours * M * x // mesh.tp,
        "ep": 2 * rows * row + counts,  # rows forward, and their gradients
        "zero": 2 * (full - shards),  # reduce-scatter and all-gather
    }


def check(config: ModelConfig, mesh: Mesh, device: torch.device, text: Tensor) -> list[str]:
    """Three steps of SGD (Adam would hide a wrong scale), one clipped. Returns what is wrong."""
    ref_mesh = Mesh([dist.get_rank()], pp=1, cp=1, tp=1, ep=1)  # the reference: this rank alone
    full = {name: weight.to(device) for name, weight in build_model(config).items()}
    flat_params = build_flat_params(shard_weights(full, config, mesh), mesh)
    ref = FlatParam(full, ref_mesh.groups["all"])  # all weights, and its shard is all of it
    optimizer = torch.optim.SGD([x.shard for x in flat_params], lr=0.1)
    ref_optimizer = torch.optim.SGD([ref.shard], lr=0.1)
    losses = []
    errors = {}
    for step, max_norm in enumerate((math.inf, 0.5, math.inf)):
        tokens, labels = (x.to(device) for x in get_batch(text, step, config, masked=True))
        batch = shard_batch(tokens, labels, config, ref_mesh)
        expected = train_step(batch, [ref], ref_optimizer, max_norm, config, ref_mesh)
        batch = shard_batch(tokens, labels, config, mesh)
        sent.clear()
        loss, grad_norm = train_step(batch, flat_params, optimizer, max_norm, config, mesh)
        losses.append(f"{loss:.6f}")
        errors[f"loss {step}"] = abs(loss - expected[0])
        errors[f"norm {step}"] = abs(grad_norm - expected[1])
        ref_grads = shard_weights(ref.views_of(ref.shard.grad), config, mesh)
        ref_params = shard_weights(ref.params, config, mesh)
        for x in flat_params:
            what = f"summed over {x.group.group_desc}, step {step}"
            error = x.shard.grad - x.shard_of(x.flatten(ref_grads))
            errors[f"gradient {what}"] = error.abs().max().item()
            error = x.full - x.flatten(ref_params)
            errors[f"weights with gradient {what}"] = error.abs().max().item()
    rank = dist.get_rank(mesh.groups["all"])
    storages = {}
    for flat_param in flat_params:
        for x in (flat_param.full, flat_param.full_grad, flat_param.shard, flat_param.shard.grad):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    measured = Counter(sent, stored=sum(storages.values()))
    expected = expected_bytes(flat_params, config, mesh, states_per_param=0, rows=sent["rows"])
    failures = []
    for what, error in errors.items():
        if not error <= 1e-10:  # or NaN
            failures.append(f"rank {rank}: {what}: error {error:.1e}")
    for what, count in expected.items():
        if measured[what] != count:
            failures.append(f"rank {rank}: bytes {what}: {measured[what]:,}, by formula {count:,}")
    error = torch.tensor(list(errors.values())).max().item()  # NaN if one of them is NaN
    by_rank = [None] * dist.get_world_size(mesh.groups["all"])
    dist.all_gather_object(by_rank, (error, failures), group=mesh.groups["all"])
    if rank == 0:
        error = torch.tensor([error for error, _ in by_rank]).max()
        print(f"losses {' '.join(losses)}; largest error {error:.1e}; bytes of rank 0:")
        print(f"{'':12}" + "".join(f"{what:>12}" for what in expected))
        print(f"{'measured':12}" + "".join(f"{measured[what]:>12}" for what in expected))
        print(f"{'by formula':12}" + "".join(f"{count:>12}" for count in expected.values()))
    return list(chain(*(failures for _, failures in by_rank)))


# --------------------------------------------------------------------------------- Learn, and write
def train(config: ModelConfig, mesh: Mesh, device, text: Tensor, num_steps: int) -> list[str]:
    """AdamW with a cosine schedule. Ends with a sample by rank 0."""
    is_rank0 = dist.get_rank(mesh.groups["all"]) == 0
    full = {name: x.to(device, torch.float32) for name, x in build_model(config).items()}
    flat_params = build_flat_params(shard_weights(full, config, mesh), mesh)
    optimizer = torch.optim.AdamW([x.shard for x in flat_params], lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps, eta_min=3e-4)
    progress = tqdm(range(num_steps), disable=not is_rank0, mininterval=1)
    for step in progress:
        tokens, labels = (x.to(device) for x in get_batch(text, step, config, masked=False))
        batch = shard_batch(tokens, labels, config, mesh)
        loss, grad_norm = train_step(batch, flat_params, optimizer, 1.0, config, mesh)
        schedule.step()
        progress.set_postfix(loss=f"{loss:.3f}", norm=f"{grad_norm:.2f}")
        if not math.isfinite(grad_norm):  # the same value on every rank, so all of them stop
            return [f"step {step}: loss {loss}, gradient norm {grad_norm}"]
    full = gather_full_weights(all_params(flat_params), config, mesh)
    if is_rank0:
        sample = generate(full, text[: config.seq_len].to(device), 300, config)
        print(f"loss {loss:.3f}. It writes:\n\n{sample}")
    return []


def generate(full: Params, prompt: Tensor, num_tokens: int, config: ModelConfig) -> str:
    """Continue the prompt [S] on this rank alone, each token from the S tokens before it."""
    mesh = Mesh([dist.get_rank()], pp=1, cp=1, tp=1, ep=1)
    text = prompt[:, None]  # [S, 1]
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = run_stage(text[-config.seq_len :], full, config, mesh)[-1, 0].float()
            token = torch.multinomial((logits / 0.7).softmax(-1), 1)
            text = torch.cat((text, token[None]))
    return bytes(text[len(prompt) :, 0].tolist()).decode(errors="replace")


# ------------------------------------------------------------------- Options, and the process group
def fail(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
        print(f"{os.path.basename(__file__)}: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args(words: list[str] | None, world_size: int) -> tuple[argparse.Namespace, ModelConfig]:
    """Options and sizes. What does not fit is refused before the process group starts."""
    parser = argparse.ArgumentParser(description="Five axes in one file", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--pp", type=int, default=1, help="stages; dp is what remains")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a matrix")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--experts", type=int, default=4, help="per layer; 0: dense")
    parser.add_argument("--micro-batches", type=int, default=4, help="of each rank")
    parser.add_argument("--train", type=int, nargs="?", const=300, metavar="STEPS", help="learn")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="with --train (fp32)")
    args = parser.parse_args(words)
    for name, value in vars(args).items():
        least = 0 if name == "experts" else 1
        if isinstance(value, int) and value < least:
            fail(f"--{name.replace('_', '-')} {value} is too small; use {least} or more")
    if args.precision and not args.train:
        fail(f"--precision {args.precision} is for --train; the check runs in float64")
    config = SMALL if args.train else TINY
    config = config._replace(num_experts=args.experts, top_k=min(2, args.experts))
    config = config._replace(num_micro_batches=args.micro_batches)
    if args.precision == "bf16":
        config = config._replace(dtype=torch.bfloat16)
    ranks = args.pp * args.cp * args.tp
    dp = max(world_size // ranks, 1)
    stage = world_size // args.pp
    samples = config.batch // dp
    expert_ranks = math.gcd(args.experts or 1, stage)
    if args.pp > config.n_layers:
        fail(f"--pp {args.pp}: there are {config.n_layers} layers; use 1 to {config.n_layers}")
    must_divide = [
        ("--tp", args.tp, config.n_kv_heads, f"{config.n_kv_heads} key/value heads"),
        ("--pp x --cp x --tp", ranks, world_size, f"{world_size} ranks"),
        ("--nproc_per_node: dp", dp, config.batch, f"{config.batch} samples"),
        ("--micro-batches", args.micro_batches, samples, f"{samples} samples of a rank"),
        ("--ep", args.ep, expert_ranks, f"{args.experts} experts and {stage} ranks of a stage"),
    ]
    for option, value, total, what in must_divide:
        if total % value:
            divisors = " or ".join(str(i) for i in range(1, total + 1) if total % i == 0)
            fail(f"{option} {value} does not divide {what}; use {divisors}")
    return args, config


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
    args, config = parse_args(None, int(os.environ.get("WORLD_SIZE", 1)))
    device = init_distributed()
    mesh = Mesh(list(range(dist.get_world_size())), args.pp, args.cp, args.tp, args.ep)
    if dist.get_rank() == 0:
        sizes = f"pp {mesh.pp} x dp {mesh.dp} x cp {mesh.cp} x tp {mesh.tp}, ep {mesh.ep}"
        print(f"{sizes}, on {device.type}", flush=True)
    run = partial(train, num_steps=args.train) if args.train else check
    failures = run(config, mesh, device, load_text())
    if dist.get_rank() == 0 and (failures or not args.train):
        print(f"FAIL: {'; '.join(failures[:5])}" if failures else "PASS")
    dist.destroy_process_group()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
