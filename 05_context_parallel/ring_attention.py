"""Ring attention: train on a sequence that is too long for one GPU.

A batch can be cut until each rank has one sequence. To go further, cut the sequence. Norms, matrices and the loss look
at one token at a time and do not notice. Attention does: a query needs the keys and values (K/V) of all earlier
tokens, and most of them are on other ranks.

One idea is enough: a softmax can be taken in pieces. Attention to some of the keys gives an output and the logarithm
of its denominator (LSE); two such results merge, exactly, into attention to the keys of both. So queries stay where
they are, and the K/V of each rank (a block) travel once round the ring:

    round     rank 0   rank 1   rank 2   rank 3
      0        K/V 0    K/V 1    K/V 2    K/V 3        each rank computes with the block that it has,
      1        K/V 3    K/V 0    K/V 1    K/V 2        while the next one is on its way to it
      2        K/V 2    K/V 3    K/V 0    K/V 1
      3        K/V 1    K/V 2    K/V 3    K/V 0        backward: once more, and dK/dV travel behind, to their owners

Under a causal mask the last tokens have most of the work. Zigzag cuts the sequence in 2P chunks and gives each rank an
early and a late one. Of the 36 (chunk of queries, chunk of keys) pairs of 8 chunks the 4 ranks then compute
    contiguous   0 1 | 2 3 | 4 5 | 6 7    3,  7, 11, 15         zigzag   0 7 | 1 6 | 2 5 | 3 4    9, 9, 9, 9

With P ranks, s = S/P tokens on each, K/V of a rank in `block` bytes, gradients dK/dV (fp32 or better) in `dblock`:
    sent by a rank        forward (P-1) block                  forward and backward (P-1) (2 block + dblock)
    held of other ranks   2 blocks: the one in use and the one that arrives; fewer with fewer than 3 ranks
    (query, key) pairs    contiguous s(s+1)/2 + r s^2 on rank r, zigzag S(S+1)/2P on every rank; for each head
Ring: Liu et al. 2023, arXiv 2310.01889. LSE, backward: FlashAttention-2, 2307.08691. Zigzag: Llama 3, 2407.21783.

    python ring_attention.py                                  one rank
    torchrun --nproc_per_node 4 ring_attention.py             four: gloo on CPUs, nccl on GPUs; or --tokens 1000
Ends with PASS when losses, gradients and weights are those of one process, to 1e-10, and bytes those of the formulas.
"""

import argparse
import os
import sys
import time
import tokenize
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# P ranks; S tokens in a sequence, s = S/P of them on this rank; B sequences. N query heads of D numbers share N_kv
# heads of keys and values, G = N/N_kv to one. s queries meet t keys. V words, H = N D numbers for a token.
count: Counter[str] = Counter()  # of a step on this rank: bytes sent and kept, (query, key) pairs of all heads


# ------------------------------------------------------------------------------------------------- the first ring


def wide(x: Tensor) -> Tensor:
    """bf16 and fp16 become fp32, in which sums over many terms are safe; fp32 and fp64 stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scores_of(q: Tensor, k: Tensor, mask: Tensor | bool) -> Tensor:
    """q [B, s, N, D], k [B, t, N_kv, D] -> q k^T / sqrt(D), [B, s, N_kv, G, t]. K is not copied for its G query heads.
    `mask` [s, t] says who sees whom; True stands for the lower triangle of a square, False for everything."""
    scores = torch.einsum("bshgd,bthd->bshgt", wide(q).unflatten(2, (k.shape[2], -1)), wide(k)) / q.shape[-1] ** 0.5
    if mask is True:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    # Not -inf: a query that sees nothing of a block would have LSE -inf, and -inf - (-inf) is NaN.
    return scores if mask is False else scores.masked_fill(~mask[:, None, None], -1e30)


def piece(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | bool) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone: out [B, s, N, D] and the LSE of its scores [B, s, N], both in fp32 or better."""
    pairs = q.shape[1] * (q.shape[1] + 1) // 2 if mask is True else q.shape[1] * k.shape[1]
    count["pairs"] += pairs * q.shape[2]  # above the diagonal kernels compute nothing
    lse = (scores := scores_of(q, k, mask)).logsumexp(-1)  # [B, s, N_kv, G]
    out = torch.einsum("bshgt,bthd->bshgd", (scores - lse[..., None]).exp(), wide(v))
    return out.flatten(2, 3), lse.flatten(2, 3)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both, from attention to each. The denominators e^LSE add; each output weighs with its
    share of the sum. Only differences are exponentiated: e^1000 overflows, e^(1000 - 1001) does not."""
    # --- exercise 5.1: merge two partial softmaxes ---
    total = torch.logaddexp(lse, more_lse)
    out = (lse - total).exp()[..., None] * out + (more_lse - total).exp()[..., None] * more
    return out, total
    # --- end exercise ---


def post(block: Tensor, into: Tensor, group: dist.ProcessGroup, step: int = 1) -> list[dist.Work]:
    """Start to send `block` to the next rank and to receive `into` from the previous one, both together: if all ranks
    first sent and then received, all might wait. Whoever posts keeps both tensors until it has waited."""
    rank, P = group.rank(), group.size()
    count["sent, step"] += block.nbytes
    send = dist.P2POp(dist.isend, block, group=group, group_peer=(rank + step) % P)
    receive = dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - step) % P)
    return dist.batch_isend_irecv([send, receive])


def wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, step: int) -> Tensor:  # the derivative turns the other way
        ctx.args, received = (group, -step), torch.empty_like(x)
        wait(post(x, received, group, step))
        return received

    @staticmethod
    def backward(ctx, dx: Tensor):
        return Rotate.apply(dx.contiguous(), *ctx.args), None, None


def first_ring(q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
    """The simplest ring; autograd writes its backward. It is right, and has three faults: autograd keeps all P blocks
    and all scores; nothing is computed while a message is on its way; and pairs that the mask hides are computed."""
    rank, P, s = group.rank(), group.size(), q.shape[1]
    tokens = [positions_of(layout, P * s, r, P).to(q.device) for r in range(P)]
    kv, out = torch.stack((k, v)), 0.0
    lse = torch.tensor(float("-inf"), device=q.device)  # nothing seen: weighs nothing
    for t in range(P):
        mask = tokens[(rank - t) % P] <= tokens[rank][:, None]  # [s, t]: keys that are not later than the query
        out, lse = merge(out, lse, *piece(q, *kv, mask))
        if t + 1 < P:
            kv = Rotate.apply(kv, group, 1)
    return out.to(q.dtype)


# -------------------------------------------------------------------------------------------- the ring, in two loops


def positions_of(layout: str, S: int, rank: int, P: int) -> Tensor:
    """Where in the sequence the tokens of `rank` stand, in rising order: [S/P]. S is a multiple of 2P."""
    chunks = torch.arange(S).chunk(2 * P)
    pair = (rank, 2 * P - 1 - rank) if layout == "zigzag" else (2 * rank, 2 * rank + 1)
    return torch.cat([chunks[i] for i in pair])


def seen(layout: str, rank: int, owner: int, s: int) -> tuple[slice, slice, bool] | None:
    """My queries that see keys of `owner`, those keys, and whether they see the lower triangle only. It is always a
    rectangle or a triangle; any kernel offers these, and no mask has to be in memory."""
    everything, first, second = slice(None), slice(s // 2), slice(s // 2, None)
    if owner == rank:
        return everything, everything, True  # my own tokens are in rising order
    if layout == "contiguous":
        return (everything, everything, False) if owner < rank else None
    # Zigzag. The late chunk of an earlier rank comes after both of mine; of a later rank's, both lie between mine.
    return (everything, first, False) if owner < rank else (second, everything, False)


def piece_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: bool):
    """The share of these keys in dq, and their dk and dv, in fp32 or better. `out` and `lse` are those of *all* keys:
    e^(score - LSE) is then the weight in the whole softmax, and a block needs to know nothing else of the others."""
    heads = (k.shape[2], -1)
    dout, out = wide(dout).unflatten(2, heads), wide(out).unflatten(2, heads)  # [B, s, N, D] -> [B, s, N_kv, G, D]
    weights = (scores_of(q, k, mask) - lse.unflatten(2, heads)[..., None]).exp()  # [B, s, N_kv, G, t]
    dweights = torch.einsum("bshgd,bthd->bshgt", dout, wide(v))
    dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    dq = torch.einsum("bshgt,bthd->bshgd", dscores, wide(k)).flatten(2, 3)
    dk = torch.einsum("bshgt,bshgd->bthd", dscores, wide(q).unflatten(2, heads))
    return dq, dk, torch.einsum("bshgt,bshgd->bthd", weights, dout)


class Ring(torch.autograd.Function):
    """For backward a rank keeps what belongs to its own tokens. The blocks of the others come round once more."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> Tensor:
        """q [B, s, N, D], k and v [B, s, N_kv, D] of this rank's tokens in `layout` -> [B, s, N, D]. Causal."""
        rank, P, s = group.rank(), group.size(), q.shape[1]
        kv, out = torch.stack((k, v)), torch.zeros_like(wide(q))  # K and V are one message: [2, B, s, N_kv, D]
        lse = out.new_full(out.shape[:3], float("-inf"))  # nothing seen: weighs 0 in the first merge
        # Two buffers in turn: what arrives in round t may lie where the block of round t - 1 lay, which is sent by now.
        buffers = [torch.empty_like(kv) for _ in range(min(2, P - 1))]
        # --- exercise 5.2: the rounds of the forward; compute while the next block is on its way ---
        block = kv
        for t in range(P):
            if t + 1 < P:
                arriving = buffers[t % 2]
                under_way = post(block, arriving, group)
            if (part := seen(layout, rank, (rank - t) % P, s)) is not None:
                queries, keys, mask = part
                more = piece(q[:, queries], *block[:, :, keys], mask)
                out[:, queries], lse[:, queries] = merge(out[:, queries], lse[:, queries], *more)
            if t + 1 < P:  # a block of which nothing is seen travels on all the same: others wait for it
                wait(under_way)
                block = arriving
        # --- end exercise ---
        out = out.to(q.dtype)  # rounded once, when all is merged
        ctx.save_for_backward(q, kv, out, lse)
        count["kept"] += q.nbytes + kv.nbytes + out.nbytes + lse.nbytes
        ctx.args = layout, group
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        (q, kv, out, lse), (layout, group) = ctx.saved_tensors, ctx.args
        rank, P, s = group.rank(), group.size(), q.shape[1]
        dq, returning, sum_so_far = torch.zeros_like(wide(q)), [], torch.zeros_like(wide(kv))
        buffers, block = [torch.empty_like(kv) for _ in range(min(2, P - 1))], kv
        # --- exercise 5.3: the rounds of the backward; dK/dV travel one rank behind their block ---
        for t in range(P):
            if t + 1 < P:
                arriving = buffers[t % 2]
                under_way = post(block, arriving, group)
            dkv = torch.zeros_like(wide(kv))  # my share of the gradient of this block, in fp32 or better
            if (part := seen(layout, rank, (rank - t) % P, s)) is not None:
                queries, keys, mask = part
                dout_, q_, out_, lse_ = (x[:, queries] for x in (dout, q, out, lse))
                share = piece_backward(dout_, q_, *block[:, :, keys], out_, lse_, mask)
                dq[:, queries] += share[0]
                dkv[0, :, keys], dkv[1, :, keys] = share[1:]
            if t == 0:
                home = dkv  # of my own block; what the others find for it comes home last
            else:
                wait(returning)
                dkv += sum_so_far  # what the ranks before me found for this block: nothing yet in round 1
                leaving = dkv
                returning = post(leaving, sum_so_far, group)
            if t + 1 < P:
                wait(under_way)
                block = arriving
        wait(returning)
        home += sum_so_far
        # --- end exercise ---
        return dq.to(q.dtype), *home.to(kv.dtype), None, None


# ----------------------------------------------------------------------------------------- a small model, and the proof

B, N, N_KV, D, H, V, LAYERS, IGNORE = 2, 4, 2, 8, 32, 256, 2, -100  # H = N D


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [B, s, n, D] by the tokens' places in the whole sequence, whoever holds them; angles in fp32."""
    angle = positions[:, None, None] * 10000.0 ** (-torch.arange(0, D, 2, device=x.device) / D)  # [s, 1, D/2]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(H), nn.Linear(H, (N + 2 * N_KV) * D), nn.Linear(H, H)

    def forward(self, x: Tensor, positions: Tensor, attention) -> Tensor:  # [B, s, H] -> [B, s, H]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, D)).split((N, N_KV, N_KV), 2)  # [B, s, N or N_kv, D]
        return x + F.gelu(self.out(attention(rope(q, positions), rope(k, positions), v).flatten(2)))


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, N, D] -> [B, N, S, D]: torch's, for the oracle
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def cut(tokens: Tensor, layout: str, rank: int, P: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens [B, s], labels [B, s], positions [s]. Labels are shifted before the cut, as the label of a
    chunk's last token is in another chunk. Zeros fill up the last chunk; they have no labels, and nobody sees them."""
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    tokens, labels = (F.pad(x, (0, -x.shape[1] % (2 * P)), value=v) for x, v in ((tokens, 0), (labels, IGNORE)))
    where = positions_of(layout, tokens.shape[1], rank, P).to(tokens.device)
    return tokens[:, where], labels[:, where], where


def train(attention, layout: str, S: int, group: dist.ProcessGroup | None, device: str) -> list[Tensor]:
    """Three steps of SGD: losses, gradients and weights. Without a group it is the oracle: it has all tokens."""
    rank, P = (group.rank(), group.size()) if group else (0, 1)
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.ModuleList([nn.Embedding(V, H), *(Layer() for _ in range(LAYERS)), nn.Linear(H, V)])
    weights, results = list(model.to(device, torch.float64).parameters()), []
    text = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(3):
        count.clear()
        start = time.perf_counter()
        tokens = text[(torch.arange(B * S) + step * 700) % len(text)].view(B, S)
        mine, labels, positions = cut(tokens.to(device), layout, rank, P)
        x = model[0](mine)  # [B, s] -> [B, s, H]
        for layer in model[1:-1]:
            x = layer(x, positions, attention)
        loss = F.cross_entropy(model[-1](x).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        loss = loss / (B * (S - 1))  # the labels of all ranks: an average of averages would be another number
        count["sent, forward"] = count["sent, step"]
        loss.backward()
        results += [loss.detach(), *(p.grad for p in weights)]
        for tensor in results[-len(weights) - 1 :] if group else ():
            dist.all_reduce(tensor, group=group)  # each rank used all weights, for its tokens: a sum, not an average
        for p in weights:
            p.data, p.grad = p.data - 0.1 * p.grad, None
        count["tokens/s"] = int(B * S / (time.perf_counter() - start))
    return results + [p.detach() for p in weights]


def check(S: int, group: dist.ProcessGroup, device: str) -> list[str]:
    """Every version beside one process. Rank 0 prints what it counted, which must be what the formulas say."""
    rank, P, wrong, right = group.rank(), group.size(), [], train(dense, "contiguous", S, None, device)
    s, columns = (S + -S % (2 * P)) // P, ("sent, forward", "sent, step", "kept", "pairs")
    block, hops = 2 * B * s * N_KV * D * 8, LAYERS * (P - 1)  # 8 bytes a float64; dK/dV are as large as K/V
    if rank == 0:
        print(f"{P} rank(s) on {device}, {B} x {S} tokens, {LAYERS} layers, {N} heads, {N_KV} of K/V. Rank 0, a step:")
        print(f"{'':24}{'error':>8}" + "".join(f"{x:>15}" for x in (*columns[:3], "tokens/s")) + "  pairs of all ranks")
    for version, layout in ((first_ring, "contiguous"), (Ring.apply, "contiguous"), (Ring.apply, "zigzag")):
        got = train(lambda *qkv, f=version, a=layout: f(*qkv, a, group), layout, S, group, device)
        error = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(got, right, strict=True)]).max().item()
        pairs = s * (P * s + 1) // 2 if layout == "zigzag" else s * (s + 1) // 2 + rank * s * s
        kept = block + B * s * (2 * N * D + N) * 8  # of its own tokens K/V, q, out and LSE
        want = [hops * block, 3 * hops * block, LAYERS * kept, LAYERS * N * pairs]
        if version is first_ring:  # K/V go round once only, as autograd keeps them all; how much that is, a test says
            want = [hops * block, 2 * hops * block, 0, LAYERS * N * P * s * s]
        bad = [f"error {error:.1e}"] * (not error <= 1e-10)  # "not", so that NaN is wrong
        bad += [f"{x} {count[x]:,}, not {w:,}" for x, w in zip(columns, want, strict=True) if count[x] != w]
        name, found = f"{'first ' if version is first_ring else ''}ring, {layout}", [None] * P
        dist.all_gather_object(found, (count["pairs"], [f"{name}, rank {rank}: {x}" for x in bad]), group=group)
        wrong += [x for _, all_bad in found for x in all_bad]
        if rank == 0:
            row = "".join(f"{count[x] or '-':>15}" for x in (*columns[:3], "tokens/s"))
            print(f"{name:24}{error:8.1e}{row}  {' '.join(str(n) for n, _ in found)}")
    return wrong


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n" if os.environ.get("RANK", "0") == "0" else None)


def main() -> int:
    parser = Parser(description="Ring attention in one file", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=90, help="of the sequence; default %(default)s")
    if not 2 <= (S := parser.parse_args().tokens) <= 16384:  # a label is the next token; one process has all scores
        parser.error(f"--tokens {S}: use 2 to 16384")
    device, gpus, local = "cpu", torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < gpus < local:
        parser.error(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    if gpus:
        torch.cuda.set_device(device := f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=60), **alone)
    wrong = check(S, dist.group.WORLD, device)
    if dist.get_rank() == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
