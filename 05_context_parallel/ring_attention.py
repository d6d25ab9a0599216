"""Ring attention: train on a sequence that is too long for one GPU.

The sequence is split over cp ranks. Norms, linear layers and the loss look at one token at a time,
so nothing changes for them. Attention looks across tokens: a query needs the keys and values (K/V)
of all earlier tokens, and most of these are stored on other ranks.

A softmax can be computed block by block. Attention to some of the keys gives an output and the
logarithm of its denominator (log-sum-exp, LSE). Two such results merge, exactly, into attention to
the keys of both. So queries stay on their rank, and the K/V of each rank, a block, are sent once
round the ring:

    step     rank 0   rank 1   rank 2   rank 3
     0       K/V 0    K/V 1    K/V 2    K/V 3      each rank computes with the block that it has,
     1       K/V 3    K/V 0    K/V 1    K/V 2      while the next block is in flight to it
     2       K/V 2    K/V 3    K/V 0    K/V 1
     3       K/V 1    K/V 2    K/V 3    K/V 0

In the backward pass the blocks are sent round once more. The gradient of a block, dK/dV, follows it
one hop behind and collects the partial gradient of every rank. Block 0, for example, meets

    step 0   rank 0, which computes a partial gradient a and keeps it
    step 1   rank 1, which computes b and sends b
    step 2   rank 2, which computes c and sends b + c
    step 3   rank 3, which computes d and sends b + c + d to rank 0: complete after cp - 1 hops

Under a causal mask the last tokens have most of the work. The zigzag layout splits the sequence
into 2 cp chunks, an early and a late one for each rank. Of 8 chunks, 36 chunk pairs are visible:

    contiguous    chunks  0 1 | 2 3 | 4 5 | 6 7    pairs  3 |  7 | 11 | 15
    zigzag        chunks  0 7 | 1 6 | 2 5 | 3 4    pairs  9 |  9 |  9 |  9

Per layer and rank: s = S/cp tokens, `block` bytes of K/V, `dblock` of dK/dV in fp32 or better:

    bytes sent by a rank     forward pass (cp-1) block, whole step (cp-1) (2 block + dblock)
    saved for backward       q, K/V, out and LSE of the rank's own tokens
    stored of other ranks    at most 2 blocks: one in use, one in flight
    (query, key) pairs       contiguous s (s+1)/2 + rank s^2, zigzag S (S+1)/(2 cp)

Sources: Liu et al. 2023, arXiv 2310.01889 (ring); Dao 2023, 2307.08691, section 3.1 (LSE, backward
pass by blocks); Llama 3, 2407.21783, section 3.3.2 (2 cp chunks).

    python ring_attention.py                         one rank, 90 tokens; or --seq-len 1000
    torchrun --nproc_per_node 4 ring_attention.py    NCCL on GPUs, Gloo on CPUs

Each form trains next to a reference with the full sequence in one process. The last line is PASS if
losses, gradients and parameters of three steps agree to 1e-10 and bytes match the formulas.
"""

import argparse
import os
import sys
import tokenize
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# Shapes: B sequences, s tokens of this rank, t keys, N query heads of D elements, and N_kv heads of
# K/V, each of which is shared by G = N/N_kv query heads.


# -------------------------------------------------------------------------------------------------
# Attention to one block of keys, and the merge of two results
# -------------------------------------------------------------------------------------------------


def to_fp32(x: Tensor) -> Tensor:
    """Sums over many terms need fp32: bf16 and fp16 are converted, fp64 stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention_scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    """q [B, s, N, D], k [B, t, N_kv, D] -> q k^T / sqrt(D), [B, s, N_kv, G, t].

    `causal` hides what is above the diagonal; `mask` [s, t] is True where a query may see a key.
    K/V heads are never copied for the query heads that share them.
    """
    q = to_fp32(q).unflatten(2, (k.shape[2], -1))  # [B, s, N_kv, G, D]
    scores = torch.einsum("bshgd,bthd->bshgt", q, to_fp32(k)) / q.shape[-1] ** 0.5
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        # Not -inf: a query that sees no key would have LSE -inf, and -inf - (-inf) is NaN.
        scores = scores.masked_fill(~mask[:, None, None], -1e30)
    return scores


def attention_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None):
    """Attention to these keys only: out [B, s, N, D] and LSE [B, s, N], both in fp32 or better."""
    with torch.autocast(q.device.type, enabled=False):  # it would round fp32 to 16 bits
        scores = attention_scores(q, k, causal, mask)
        lse = scores.logsumexp(-1)  # [B, s, N_kv, G]
        probs = (scores - lse[..., None]).exp()
        out = torch.einsum("bshgt,bthd->bshgd", probs, to_fp32(v))
    return out.flatten(2, 3), lse.flatten(2, 3)


def merge_attention(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor):
    """Attention to the keys of both, from the attention to each.

    The denominators e^LSE add up, and each output is weighted by its part of the sum. Only
    differences are exponentiated: e^1000 overflows, e^(1000 - 1001) does not.
    """
    # --- exercise 5.1: merge two partial softmaxes ---
    new_lse = torch.logaddexp(lse, block_lse)
    weight = (lse - new_lse).exp()[..., None]
    block_weight = (block_lse - new_lse).exp()[..., None]
    return weight * out + block_weight * block_out, new_lse
    # --- end exercise ---


# -------------------------------------------------------------------------------------------------
# The simplest ring: autograd derives the backward pass
# -------------------------------------------------------------------------------------------------


class RingComm:
    """Sends to the next rank of the group and receives from the previous one."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.cp = dist.get_world_size(group)
        self.bytes_sent = 0

    def start_send_recv(self, send: Tensor, recv: Tensor, shift: int = 1) -> list[dist.Work]:
        """Start to send to rank + shift and to receive from rank - shift.

        One batch: if every rank sent first and received afterwards, all might block in their send.
        Until the wait `send` may be read but not changed, `recv` not even read, and neither freed.
        """
        dst = (self.rank + shift) % self.cp
        src = (self.rank - shift) % self.cp
        send_op = dist.P2POp(dist.isend, send, group=self.group, group_peer=dst)
        recv_op = dist.P2POp(dist.irecv, recv, group=self.group, group_peer=src)
        self.bytes_sent += send.nbytes
        return dist.batch_isend_irecv([send_op, recv_op])


def wait(reqs: list[dist.Work]) -> None:
    for req in reqs:
        req.wait()


class RingShift(torch.autograd.Function):
    """Every rank receives x of the previous rank. The gradient is sent the other way round."""

    @staticmethod
    def forward(ctx, x: Tensor, ring: RingComm, shift: int) -> Tensor:
        ctx.ring = ring
        ctx.shift = shift
        recv = torch.empty_like(x)
        wait(ring.start_send_recv(x, recv, shift))
        return recv

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return RingShift.apply(grad_output.contiguous(), ctx.ring, -ctx.shift), None, None


def simple_ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: RingComm) -> Tensor:
    """Ring attention of contiguous shards, q [B, s, N, D] and k, v [B, s, N_kv, D] -> [B, s, N, D].

    It is exact and has three faults. Autograd saves all cp blocks and all scores. Nothing is
    computed while a message is in flight. And hidden pairs are computed, too: if a rank skipped a
    hidden block, autograd would skip the backward pass of its RingShift, and the others would hang.
    """
    s = q.shape[1]
    tokens = torch.arange(s, device=q.device)
    q_positions = ring.rank * s + tokens
    kv = torch.stack((k, v))  # one message instead of two
    out = torch.zeros_like(to_fp32(q))
    lse = out.new_full(out.shape[:3], float("-inf"))  # no key seen yet: weight 0 in the first merge
    for step in range(ring.cp):
        owner = (ring.rank - step) % ring.cp  # the rank whose block this is
        k_positions = owner * s + tokens
        mask = k_positions <= q_positions[:, None]  # [s, t]
        block_out, block_lse = attention_block(q, kv[0], kv[1], causal=False, mask=mask)
        out, lse = merge_attention(out, lse, block_out, block_lse)
        if step < ring.cp - 1:
            kv = RingShift.apply(kv, ring, 1)
    return out.to(q.dtype)


# -------------------------------------------------------------------------------------------------
# The fast ring: balanced, overlapped, and only the rank's own tokens are saved
# -------------------------------------------------------------------------------------------------


def token_positions(layout: str, seq_len: int, rank: int, cp: int) -> Tensor:
    """Positions of this rank's tokens in the full sequence, ascending: [S/cp]. 2 cp divides S."""
    chunks = torch.arange(seq_len).chunk(2 * cp)
    if layout == "zigzag":
        return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))
    return torch.cat((chunks[2 * rank], chunks[2 * rank + 1]))


def visible_slices(layout: str, rank: int, owner: int, s: int):
    """The queries of `rank` that see keys of `owner`, these keys, and whether the mask is causal.

    What is visible is always a full rectangle or a causal square. Every attention kernel has both,
    so no mask is ever stored. None: no query sees a key.
    """
    everything = slice(None)
    if owner == rank:
        return everything, everything, True  # the rank's own tokens are in ascending order
    if layout == "contiguous":
        return (everything, everything, False) if owner < rank else None
    if owner < rank:
        return everything, slice(s // 2), False  # its late chunk comes after both of mine
    return slice(s // 2, None), everything, False  # both its chunks lie between mine


def attention_block_backward(dout, q, k, v, out, lse, causal: bool):
    """The partial dq, dk and dv of these queries and keys, all in fp32 or better.

    `out` and `lse` are those of *all* keys. So e^(score - LSE) is the probability in the full
    softmax, dout . out is the sum of probs * dprobs over all keys, and no other block is needed.
    """
    heads = (k.shape[2], -1)
    dout = to_fp32(dout).unflatten(2, heads)  # [B, s, N, D] -> [B, s, N_kv, G, D]
    out = to_fp32(out).unflatten(2, heads)
    lse = lse.unflatten(2, heads)  # [B, s, N] -> [B, s, N_kv, G]
    with torch.autocast(q.device.type, enabled=False):  # it would round fp32 to 16 bits
        probs = (attention_scores(q, k, causal) - lse[..., None]).exp()  # [B, s, N_kv, G, t]
        dprobs = torch.einsum("bshgd,bthd->bshgt", dout, to_fp32(v))
        delta = (dout * out).sum(-1, keepdim=True)  # the derivative of the softmax subtracts this
        dscores = probs * (dprobs - delta) / q.shape[-1] ** 0.5
        dq = torch.einsum("bshgt,bthd->bshgd", dscores, to_fp32(k)).flatten(2, 3)
        dk = torch.einsum("bshgt,bshgd->bthd", dscores, to_fp32(q).unflatten(2, heads))
        dv = torch.einsum("bshgt,bshgd->bthd", probs, dout)
    return dq, dk, dv


class RingAttention(torch.autograd.Function):
    """Causal attention over a ring. Both passes start a message before they compute."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, layout: str, ring: RingComm) -> Tensor:
        """q [B, s, N, D], k and v [B, s, N_kv, D] of this rank's tokens -> out [B, s, N, D]."""
        local_kv = torch.stack((k, v))  # one message instead of two: [2, B, s, N_kv, D]
        out = torch.zeros_like(to_fp32(q))
        lse = out.new_full(out.shape[:3], float("-inf"))
        # Two buffers alternate: one holds the block in use (and being sent), the other receives.
        recv_bufs = [torch.empty_like(local_kv) for _ in range(min(2, ring.cp - 1))]
        # --- exercise 5.2: the forward pass; compute while the next block is in flight ---
        kv = local_kv
        for step in range(ring.cp):
            if step < ring.cp - 1:
                next_kv = recv_bufs[step % 2]
                kv_reqs = ring.start_send_recv(kv, next_kv)
            owner = (ring.rank - step) % ring.cp
            visible = visible_slices(layout, ring.rank, owner, q.shape[1])
            if visible is not None:
                queries, keys, causal = visible
                block_k, block_v = kv[:, :, keys]
                block = attention_block(q[:, queries], block_k, block_v, causal)
                merged = merge_attention(out[:, queries], lse[:, queries], *block)
                out[:, queries], lse[:, queries] = merged
            if step < ring.cp - 1:  # even if the block is hidden here: the next rank needs it
                wait(kv_reqs)
                kv = next_kv
        # --- end exercise ---
        out = out.to(q.dtype)  # rounded once, after the last merge
        ctx.save_for_backward(q, local_kv, out, lse)
        ctx.layout = layout
        ctx.ring = ring
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        """dK/dV of a block are sent after the block, one hop behind: see the drawing on top."""
        q, local_kv, out, lse = ctx.saved_tensors
        ring = ctx.ring
        recv_bufs = [torch.empty_like(local_kv) for _ in range(min(2, ring.cp - 1))]
        dq = torch.zeros_like(to_fp32(q))
        recv_dkv = torch.zeros_like(to_fp32(local_kv))
        dkv_reqs = []
        # --- exercise 5.3: the backward pass; dK/dV follow their block in fp32 or better ---
        kv = local_kv
        for step in range(ring.cp):
            if step < ring.cp - 1:
                next_kv = recv_bufs[step % 2]
                kv_reqs = ring.start_send_recv(kv, next_kv)
            block_dkv = torch.zeros_like(recv_dkv)  # this rank's partial gradient
            owner = (ring.rank - step) % ring.cp
            visible = visible_slices(ctx.layout, ring.rank, owner, q.shape[1])
            if visible is not None:
                queries, keys, causal = visible
                block_k, block_v = kv[:, :, keys]
                block_dq, block_dk, block_dv = attention_block_backward(
                    dout[:, queries], q[:, queries], block_k, block_v,
                    out[:, queries], lse[:, queries], causal,
                )  # fmt: skip
                dq[:, queries] += block_dq
                block_dkv[0, :, keys] = block_dk
                block_dkv[1, :, keys] = block_dv
            if step == 0:
                local_dkv = block_dkv  # already on its owner; the sum of the others arrives last
            else:
                wait(dkv_reqs)  # in step 1 there is none, and recv_dkv is still zero
                send_dkv = block_dkv.add_(recv_dkv)
                dkv_reqs = ring.start_send_recv(send_dkv, recv_dkv)
            if step < ring.cp - 1:
                wait(kv_reqs)
                kv = next_kv
        wait(dkv_reqs)
        local_dkv += recv_dkv
        # --- end exercise ---
        dk, dv = local_dkv.to(local_kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None


# -------------------------------------------------------------------------------------------------
# The training step
# -------------------------------------------------------------------------------------------------


def shard_sequence(tokens: Tensor, layout: str, rank: int, cp: int):
    """This rank's tokens and labels, both [B, s], and their positions [s].

    Labels are shifted before the sequence is split: the label of a chunk's last token is in another
    chunk. The last chunk is padded with zeros, which have no labels and which no token sees.
    """
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
    padding = -tokens.shape[1] % (2 * cp)
    tokens = F.pad(tokens, (0, padding))
    labels = F.pad(labels, (0, padding), value=IGNORE_INDEX)
    positions = token_positions(layout, tokens.shape[1], rank, cp).to(tokens.device)
    return tokens[:, positions], labels[:, positions], positions


def forward_backward(model: nn.Module, shard: tuple, attention, group) -> Tensor:
    """Returns the loss of the full sequences; gradients are complete on every rank.

    Each rank sums the losses of its tokens and divides by the number of labels of *all* ranks. So
    the ranks hold parts of one loss, and their gradients are summed, not averaged.
    """
    tokens, labels, positions = shard
    num_labels = (labels != IGNORE_INDEX).sum()
    dist.all_reduce(num_labels, group=group)
    logits = run_model(model, tokens, positions, attention).flatten(0, 1)
    loss_sum = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    loss = loss_sum / num_labels.clamp(min=1)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
    loss = loss.detach()
    dist.all_reduce(loss, group=group)  # only for the log
    return loss


# -------------------------------------------------------------------------------------------------
# A small model, in float64, and text to train it on
# -------------------------------------------------------------------------------------------------

VOCAB = 256
HIDDEN = 32
N_HEADS = 4
N_KV_HEADS = 2
HEAD_DIM = 8
N_LAYERS = 2
BATCH = 2
IGNORE_INDEX = -100  # a label that is no target


class Block(nn.Module):  # without feed-forward layer, which looks at one token at a time
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.RMSNorm(HIDDEN)
        self.q_proj = nn.Linear(HIDDEN, N_HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, N_KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, N_KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(N_HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attention) -> Tensor:
        h = self.attn_norm(x)  # [B, s, H]
        q = self.q_proj(h).unflatten(-1, (N_HEADS, HEAD_DIM))  # [B, s, N, D]
        k = self.k_proj(h).unflatten(-1, (N_KV_HEADS, HEAD_DIM))
        v = self.v_proj(h).unflatten(-1, (N_KV_HEADS, HEAD_DIM))
        out = attention(apply_rotary(q, positions), apply_rotary(k, positions), v)
        return x + self.o_proj(out.flatten(2))


def build_model(device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)  # the same initial parameters on every rank
    embedding = nn.Embedding(VOCAB, HIDDEN)
    blocks = [Block() for _ in range(N_LAYERS)]
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    return nn.ModuleList([embedding, *blocks, head]).to(device, torch.float64)


def run_model(model: nn.ModuleList, tokens: Tensor, positions: Tensor, attention) -> Tensor:
    x = model[0](tokens)  # [B, s] -> [B, s, H]
    for block in model[1:-1]:
        x = block(x, positions, attention)
    return model[-1](x)


def apply_rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [B, s, heads, D] by the tokens' positions in the *full* sequence."""
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    inv_freq = 10000.0 ** (-torch.arange(half, dtype=dtype, device=x.device) / half)
    angle = positions[:, None, None] * inv_freq  # [s, 1, D/2]
    cos = angle.cos()
    sin = angle.sin()
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def get_batch(step: int, seq_len: int, device: torch.device) -> Tensor:
    """Tokens [B, S] of the full sequences: bytes of a module of the standard library."""
    text = torch.tensor(list(Path(tokenize.__file__).read_bytes()))
    index = torch.arange(BATCH * seq_len).view(BATCH, seq_len) + 700 * step
    return text[index % len(text)].to(device)


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's causal attention to the full sequence, which wants [B, N, S, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


# -------------------------------------------------------------------------------------------------
# The check: three steps next to a reference
# -------------------------------------------------------------------------------------------------


def train_next_to_reference(attention, layout: str, seq_len: int, group, device) -> float:
    """Three steps of both; returns the largest relative error of loss, gradients and parameters.

    The reference has the full sequences in one process and takes the mean over all labels. Both use
    plain SGD because Adam would hide a wrong scale.
    """
    model = build_model(device)
    reference = build_model(device)
    positions = torch.arange(seq_len, device=device)
    errors = []
    for step in range(3):
        tokens = get_batch(step, seq_len, device)
        shard = shard_sequence(tokens, layout, dist.get_rank(group), dist.get_world_size(group))
        loss = forward_backward(model, shard, attention, group)
        logits = run_model(reference, tokens, positions, reference_attention)
        expected_loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        expected_loss.backward()
        errors.append(relative_error(loss, expected_loss))
        for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
            errors.append(relative_error(p.grad, expected.grad))
            p.data -= 0.1 * p.grad
            expected.data -= 0.1 * expected.grad
            errors.append(relative_error(p, expected))
        model.zero_grad()
        reference.zero_grad()
    return torch.stack(errors).max().item()  # NaN if any error is NaN


def relative_error(x: Tensor, expected: Tensor) -> Tensor:
    return ((x - expected).abs().max() / expected.abs().max()).detach()


def expected_bytes(form: str, cp: int, seq_len: int) -> tuple[int, int]:
    """Sent and saved, by the table on top, in three steps; 8 bytes per element of float64."""
    s = -(-seq_len // (2 * cp)) * 2  # with padding
    calls = 3 * N_LAYERS
    block = 2 * BATCH * s * N_KV_HEADS * HEAD_DIM * 8
    q_out_lse = BATCH * s * N_HEADS * (2 * HEAD_DIM + 1) * 8
    messages = 2 if form == "simple" else 3  # the simple ring saves K/V and sends them only once
    return calls * (cp - 1) * messages * block, calls * (block + q_out_lse)


def check(form: str, layout: str, seq_len: int, group, device) -> list[str]:
    """Train with one form of the ring, print the result on rank 0, and return what is wrong."""
    ring = RingComm(group)
    saved_bytes = []

    def pack(x: Tensor) -> Tensor:  # autograd calls it with each tensor that it saves
        saved_bytes.append(x.nbytes)
        return x

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            if form == "simple":
                return simple_ring_attention(q, k, v, ring)
            return RingAttention.apply(q, k, v, layout, ring)

    error = train_next_to_reference(attention, layout, seq_len, group, device)
    sent = ring.bytes_sent
    saved = sum(saved_bytes)
    expected_sent, expected_saved = expected_bytes(form, ring.cp, seq_len)
    right = error <= 1e-10 and sent == expected_sent  # NaN fails
    name = f"{form} ring, {layout}"
    line = f"{name}: error {error:.1e}; bytes sent {sent:,}, expected {expected_sent:,}"
    if form == "fast":  # what autograd saves of the simple ring has no formula
        right = right and saved == expected_saved
        line += f"; bytes saved {saved:,}, expected {expected_saved:,}"
    results = [None] * ring.cp
    dist.all_gather_object(results, (right, line), group=group)
    if ring.rank == 0:
        print(line)
    return [f"rank {rank}: {line}" for rank, (right, line) in enumerate(results) if not right]


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
    parser = argparse.ArgumentParser(description="Ring attention in one file", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--seq-len", type=int, default=90, help="tokens per sequence")
    args = parser.parse_args()
    if not 2 <= args.seq_len <= 16384:  # a label is the next token; the reference has all scores
        parser.error(f"--seq-len {args.seq_len}: use 2 to 16384")

    device = init_distributed()
    failures = []
    for form, layout in (("simple", "contiguous"), ("fast", "contiguous"), ("fast", "zigzag")):
        failures += check(form, layout, args.seq_len, dist.group.WORLD, device)
    if dist.get_rank() == 0:
        print(f"FAIL: {'; '.join(failures)}" if failures else "PASS")
    dist.destroy_process_group()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
