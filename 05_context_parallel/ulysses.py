"""Ulysses: split the sequence over ranks, and inside attention split the heads.

Each of cp ranks has some tokens of each sequence. Attention needs all tokens, but heads do not see
each other. So one all-to-all turns some tokens of all heads into all tokens of some heads. Then any
attention for one device runs, and a second all-to-all turns its output back. In the drawing, of 4
ranks, 6 query heads and 2 heads of keys and values (K/V), a digit is a rank that stores the tokens:

              q0 q1 q2 q3 q4 q5   kv0 kv1                    q0 q1 q2 q3 q4 q5   kv0    kv1
    tokens 0   0  0  0  0  0  0    0   0                      0  0  1  1  2  3   0 1   1 2 3
    tokens 1   1  1  1  1  1  1    1   1     all-to-all       0  0  1  1  2  3   0 1   1 2 3
    tokens 2   2  2  2  2  2  2    2   2    ----------->      0  0  1  1  2  3   0 1   1 2 3
    tokens 3   3  3  3  3  3  3    3   3                      0  0  1  1  2  3   0 1   1 2 3

N query heads share N_kv K/V heads: each K/V head serves N/N_kv query heads. A rank with n query
heads needs only the m K/V heads that they use. A K/V head that several ranks need is sent once to
each of them. C is the sum of m over all ranks: above, C = 1 + 2 + 1 + 1 = 5.

Per layer and sequence, with s = S/cp tokens on each rank and heads of D elements; in elements:

    sent in the forward pass     s D (N - n + 2 (C - m)) before, s D n (cp - 1) after attention
    sent in the backward pass    s D (n + 2 m) (cp - 1), and s D (N - n)
    saved for backward           S D (2 n + 2 m) + S n: q, K/V, out and log-sum-exp

With more ranks each of them sends less, while in a ring it sends as much as before. But there can
be no more ranks than query heads.
Source: Jacobs et al. 2023, arXiv 2309.14509, section 3.

    python ulysses.py                         one rank, 90 tokens; or --seq-len 1000
    torchrun --nproc_per_node 4 ulysses.py    NCCL on GPUs, Gloo on CPUs

It trains a small model for three steps next to a reference with the full sequence in one process.
The last line is PASS if losses, gradients and parameters agree to 1e-10 and bytes match the
formulas. Bytes saved are checked on CPUs only: for float64 on a GPU, PyTorch saves the scores.
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

# Shapes: B sequences, s of S tokens on this rank, N query heads of D elements and N_kv K/V heads;
# between the all-to-alls this rank has n and m of them.


# -------------------------------------------------------------------------------------------------
# The all-to-all
# -------------------------------------------------------------------------------------------------


class AllToAllComm:
    """All-to-alls over one group, and the bytes that they send to other ranks."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.cp = dist.get_world_size(group)
        self.bytes_sent = 0

    def all_to_all(self, x: Tensor, input_splits: list[int], output_splits: list[int]) -> Tensor:
        """The first input_splits[0] rows of x are sent to rank 0, the next ones to rank 1.

        The result has output_splits[0] rows from rank 0, then output_splits[1] from rank 1.
        """
        x = x.contiguous()
        output = x.new_empty(sum(output_splits), *x.shape[1:])
        dist.all_to_all_single(output, x, output_splits, input_splits, group=self.group)
        self.bytes_sent += (len(x) - input_splits[self.rank]) * x[0].nbytes
        return output


class AllToAll(torch.autograd.Function):
    """Rows are only moved, so the backward pass sends each gradient back to where its row was."""

    @staticmethod
    def forward(ctx, x: Tensor, input_splits, output_splits, comm: AllToAllComm) -> Tensor:
        ctx.input_splits = input_splits
        ctx.output_splits = output_splits
        ctx.comm = comm
        return comm.all_to_all(x, input_splits, output_splits)

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx = AllToAll.apply(grad, ctx.output_splits, ctx.input_splits, ctx.comm)
        return dx, None, None, None


# -------------------------------------------------------------------------------------------------
# Ulysses
# -------------------------------------------------------------------------------------------------


def local_heads(rank: int, cp: int, n_heads: int, n_kv_heads: int) -> tuple[list[int], list[int]]:
    """The query heads of `rank` and the K/V heads that they use. cp need not divide either.

    Query head i uses K/V head i // (N/N_kv), so query heads that share one are neighbours.
    """
    # --- exercise 5.4: which heads does a rank get? ---
    q_heads = torch.arange(n_heads).tensor_split(cp)[rank].tolist()
    kv_heads = sorted({head * n_kv_heads // n_heads for head in q_heads})
    return q_heads, kv_heads
    # --- end exercise ---


def seq_to_heads(q: Tensor, k: Tensor, v: Tensor, comm: AllToAllComm):
    """Some tokens of all heads -> all tokens of some heads, in one all-to-all.

    q [B, s, N, D] -> [B, S, n, D]; k and v [B, s, N_kv, D] -> [B, S, m, D].
    """
    n_heads = q.shape[2]
    n_kv_heads = k.shape[2]
    # --- exercise 5.5: the all-to-all before attention ---
    rows = []
    input_splits = []
    for rank in range(comm.cp):
        q_heads, kv_heads = local_heads(rank, comm.cp, n_heads, n_kv_heads)
        rows += q_heads
        rows += [n_heads + head for head in kv_heads]  # of k
        rows += [n_heads + n_kv_heads + head for head in kv_heads]  # of v
        input_splits.append(len(q_heads) + 2 * len(kv_heads))
    x = torch.cat((q, k, v), dim=2)  # [B, s, N + 2 N_kv, D]
    x = x.movedim(2, 0)  # [N + 2 N_kv, B, s, D]
    # Indexing copies a K/V head for each rank that needs it, and sums the gradients of the copies.
    x = x[rows]  # [sum of all n + 2 m, B, s, D]
    num_rows = input_splits[comm.rank]
    x = AllToAll.apply(x, input_splits, [num_rows] * comm.cp, comm)  # -> [cp (n + 2 m), B, s, D]
    x = x.unflatten(0, (comm.cp, num_rows))  # [cp, n + 2 m, B, s, D]
    x = x.permute(2, 0, 3, 1, 4)  # [B, cp, s, n + 2 m, D]
    x = x.flatten(1, 2)  # [B, S, n + 2 m, D]
    q_heads, kv_heads = local_heads(comm.rank, comm.cp, n_heads, n_kv_heads)
    return x.split((len(q_heads), len(kv_heads), len(kv_heads)), dim=2)
    # --- end exercise ---


def heads_to_seq(out: Tensor, n_heads: int, comm: AllToAllComm) -> Tensor:
    """All tokens of some heads -> some tokens of all heads: [B, S, n, D] -> [B, s, N, D]."""
    # --- exercise 5.6: the all-to-all after attention ---
    output_splits = []
    for rank in range(comm.cp):
        q_heads, _ = local_heads(rank, comm.cp, n_heads, n_kv_heads=1)  # K/V do not return
        output_splits.append(len(q_heads))
    n = out.shape[2]
    x = out.unflatten(1, (comm.cp, -1))  # [B, cp, s, n, D]: the tokens of each rank
    x = x.permute(1, 3, 0, 2, 4)  # [cp, n, B, s, D]
    x = x.flatten(0, 1)  # [cp n, B, s, D]
    x = AllToAll.apply(x, [n] * comm.cp, output_splits, comm)  # -> all-to-all -> [N, B, s, D]
    return x.movedim(0, 2)  # [B, s, N, D]: the ranks have the heads in order
    # --- end exercise ---


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, attention, comm: AllToAllComm) -> Tensor:
    """q [B, s, N, D], k and v [B, s, N_kv, D] of this rank's tokens -> out [B, s, N, D].

    `attention(q, k, v)` is any attention for one device, [B, S, heads, D].
    """
    n_heads = q.shape[2]
    n_kv_heads = k.shape[2]
    q_heads, kv_heads = local_heads(comm.rank, comm.cp, n_heads, n_kv_heads)
    q, k, v = seq_to_heads(q, k, v, comm)
    # For each query head, the index of its K/V head on this rank. Kernels support 0 0 1 1, with
    # groups of equal size. An uneven split may give 0 0 1 or 0 1 1 1: then K/V are copied.
    used = [kv_heads.index(head * n_kv_heads // n_heads) for head in q_heads]
    group_size = len(q_heads) // len(kv_heads)
    if used != [i // group_size for i in range(len(q_heads))]:
        k = k[:, :, used]
        v = v[:, :, used]
    return heads_to_seq(attention(q, k, v), n_heads, comm)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention for one device, which wants [B, heads, S, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


# -------------------------------------------------------------------------------------------------
# The training step
# -------------------------------------------------------------------------------------------------


def shard_sequence(tokens: Tensor, rank: int, cp: int):
    """This rank's tokens and labels, both [B, s], and their positions [s].

    Labels are shifted before the sequence is split: the label of a shard's last token is on the
    next rank. The last shard is padded with zeros, which have no labels and which no token sees.
    """
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
    padding = -tokens.shape[1] % cp
    tokens = F.pad(tokens, (0, padding))
    labels = F.pad(labels, (0, padding), value=IGNORE_INDEX)
    positions = torch.arange(tokens.shape[1], device=tokens.device).chunk(cp)[rank]
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
HIDDEN = 48
N_HEADS = 6
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


# -------------------------------------------------------------------------------------------------
# The check: three steps next to a reference
# -------------------------------------------------------------------------------------------------


def train_next_to_reference(attention, seq_len: int, group, device) -> float:
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
        shard = shard_sequence(tokens, dist.get_rank(group), dist.get_world_size(group))
        loss = forward_backward(model, shard, attention, group)
        logits = run_model(reference, tokens, positions, causal_attention)
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


def expected_bytes(rank: int, cp: int, seq_len: int) -> tuple[int, int]:
    """Sent and saved, by the table on top, in three steps; 8 bytes per element of float64."""
    s = -(-seq_len // cp)  # with padding
    heads = [local_heads(r, cp, N_HEADS, N_KV_HEADS) for r in range(cp)]
    n = len(heads[rank][0])
    m = len(heads[rank][1])
    all_kv = sum(len(kv_heads) for _, kv_heads in heads)
    forward = N_HEADS - n + 2 * (all_kv - m) + n * (cp - 1)
    backward = (n + 2 * m) * (cp - 1) + N_HEADS - n
    saved = HEAD_DIM * (2 * n + 2 * m) + n
    calls = 3 * N_LAYERS * BATCH * 8
    return calls * s * HEAD_DIM * (forward + backward), calls * s * cp * saved


def check(seq_len: int, group, device) -> list[str]:
    """Train with Ulysses, print the result on rank 0, and return what is wrong."""
    comm = AllToAllComm(group)
    saved_bytes = []

    def pack(x: Tensor) -> Tensor:  # autograd calls it with each tensor that it saves
        if x.is_floating_point():
            saved_bytes.append(x.nbytes)
        return x

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return ulysses_attention(q, k, v, causal_attention, comm)

    error = train_next_to_reference(attention, seq_len, group, device)
    sent = comm.bytes_sent
    saved = sum(saved_bytes)
    expected_sent, expected_saved = expected_bytes(comm.rank, comm.cp, seq_len)
    right = error <= 1e-10 and sent == expected_sent  # NaN fails
    line = f"Ulysses: error {error:.1e}; bytes sent {sent:,}, expected {expected_sent:,}"
    if device.type == "cpu":  # on a GPU, PyTorch saves the scores
        right = right and saved == expected_saved
        line += f"; bytes saved {saved:,}, expected {expected_saved:,}"
    results = [None] * comm.cp
    dist.all_gather_object(results, (right, line), group=group)
    if comm.rank == 0:
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
    parser = argparse.ArgumentParser(description="Ulysses in one file", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--seq-len", type=int, default=90, help="tokens per sequence")
    args = parser.parse_args()
    if not 2 <= args.seq_len <= 16384:  # a label is the next token; the reference has all scores
        parser.error(f"--seq-len {args.seq_len}: use 2 to 16384")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > N_HEADS:
        parser.error(f"--nproc_per_node {world_size}: use {N_HEADS} or less, one for each head")

    device = init_distributed()
    failures = check(args.seq_len, dist.group.WORLD, device)
    if dist.get_rank() == 0:
        print(f"FAIL: {'; '.join(failures)}" if failures else "PASS")
    dist.destroy_process_group()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
