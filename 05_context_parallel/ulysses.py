"""Ulysses: ranks swap tokens for heads, so that each of them has all tokens of some heads.

A sequence is cut over P ranks, as it is too long for one. In ring attention the keys and values (K/V) of all ranks pass
by every rank, and what a rank sends grows with the sequence. Ulysses swaps instead. Heads do not know of each other, so
whoever has *all* tokens of *some* heads can run any attention that there is for one device. One all-to-all brings this
about, and a second one brings the outputs back to the tokens:

    before: rank r has some tokens, all heads             between: rank r has all tokens, some heads
              q0 q1 q2 q3 q4 q5   kv0 kv1                           q0 q1   q2 q3     q4    q5     and kv
    tokens A   0  0  0  0  0  0    0   0                  A          0  0    1  1      2     3
    tokens B   1  1  1  1  1  1    1   1   all-to-all     B          0  0    1  1      2     3     rank 0: kv0
    tokens C   2  2  2  2  2  2    2   2   ---------->    C          0  0    1  1      2     3     rank 1: kv0 kv1
    tokens D   3  3  3  3  3  3    3   3   <----------    D          0  0    1  1      2     3     ranks 2, 3: kv1

G = N/N_kv query heads share a K/V head. A rank that gets n query heads needs only the m K/V heads that these share;
a K/V head that several ranks need goes to each of them once. Above, the 4 ranks need 1 + 2 + 1 + 1 = 5 of them.

No more ranks can swap than there are heads. For more, put P = R x U ranks in a mesh of R rows: the U ranks of a row
swap, and the R ranks of a column form a ring (ring_attention.py), in which K/V of all tokens go round, of m heads.

With s = S/P tokens on a rank, C the K/V heads that the U ranks of a row get together, b bytes in a number:
    sent by a rank      there  B s D b (N - n + 2 (C - m))        back  B s D b n (U - 1)
          in backward   home   B s D b (n + 2 m) (U - 1)          and   B s D b (N - n)
                               as many bytes as in forward, where all ranks have the same n and m
    kept for backward   B S/R D b (2 n + 2 m) + B S/R n b         q, k, v, out and the LSE, of all tokens of its row
    pairs               n S(S+1)/2R, all heads together           the same on all ranks, if U divides N
Jacobs et al. 2023, arXiv 2309.14509, section 3. The mesh: Fang & Zhao 2024 (USP), 2405.07719.

    python ulysses.py                                  one rank
    torchrun --nproc_per_node 4 ulysses.py             four: Ulysses, and Ulysses x ring on a mesh of 2 x 2
PASS at the end: losses, gradients and weights are one process's, to 1e-10; bytes (kept: on a CPU) are the formulas'.
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

# P = R x U ranks: R in a ring, U in a swap. S tokens in a sequence, s = S/P on this rank; B sequences. N query heads of
# D numbers, N_kv heads of keys and values; after the swap n and m of them. V words, H = N D numbers for a token.
count: Counter[str] = Counter()  # of a step on this rank: bytes sent and kept, (query, key) pairs of all heads


# ------------------------------------------------------------------------------------------------------ the swap


class AllToAll(torch.autograd.Function):
    """Rows of x for each rank, one rank after the other -> rows from each rank. Nothing is computed, rows only move; so
    the derivative moves their gradients home."""

    @staticmethod
    def forward(ctx, x: Tensor, to: list[int], of: list[int], group: dist.ProcessGroup) -> Tensor:
        """x [sum(to), ...] -> [sum(of), ...]: `to` [r] rows go to rank r, `of` [r] come from it."""
        ctx.args = of, to, group
        received = x.new_empty(sum(of), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), of, to, group=group)
        count["sent, step"] += (sum(to) - to[group.rank()]) * x[0].nbytes
        return received

    @staticmethod
    def backward(ctx, dx: Tensor):
        return AllToAll.apply(dx, *ctx.args), None, None, None


def heads_of(rank: int, U: int, N: int, N_kv: int) -> tuple[list[int], list[int]]:
    """The query heads of `rank`, and the K/V heads that these need. U need not divide N, nor N_kv."""
    # --- exercise 5.4: which heads does a rank get? ---
    queries = torch.arange(N).tensor_split(U)[rank].tolist()
    return queries, sorted({head * N_kv // N for head in queries})
    # --- end exercise ---


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Some tokens of all heads -> all tokens of some heads: q [B, s, N, D] -> [B, U s, n, D]; k, v: m heads then.

    One message, whose rows are heads of q, of k, of v. Indexing copies a head for each rank that needs it; its
    derivative sums the gradients of the copies."""
    U, N, N_kv = group.size(), q.shape[2], k.shape[2]
    # --- exercise 5.5: one all-to-all, from tokens to heads ---
    heads = [heads_of(r, U, N, N_kv) for r in range(U)]
    rows = [[*queries, *(N + h for h in kv), *(N + N_kv + h for h in kv)] for queries, kv in heads]  # of each rank
    x = torch.cat((q, k, v), 2).movedim(2, 0)  # [N + 2 N_kv, B, s, D]
    sizes = [len(r) for r in rows]  # n + 2 m of each rank
    mine = sizes[group.rank()]
    x = AllToAll.apply(x[[i for r in rows for i in r]], sizes, [mine] * U, group)  # -> [U (n + 2 m), B, s, D]
    x = x.unflatten(0, (U, mine)).permute(2, 0, 3, 1, 4).flatten(1, 2)  # -> [B, U, s, ...] -> [B, U s, n + 2 m, D]
    n, m = (len(h) for h in heads[group.rank()])
    return x.split((n, m, m), 2)
    # --- end exercise ---


def to_tokens(out: Tensor, N: int, group: dist.ProcessGroup) -> Tensor:
    """And back: all tokens of some heads -> some tokens of all heads, [B, U s, n, D] -> [B, s, N, D]."""
    U = group.size()
    each = [len(heads_of(r, U, N, 1)[0]) for r in range(U)]
    x = out.unflatten(1, (U, -1)).permute(1, 3, 0, 2, 4)  # [B, U, s, n, D] -> [U, n, B, s, D]: the tokens of each rank
    x = AllToAll.apply(x.flatten(0, 1), [out.shape[2]] * U, each, group)  # -> [N, B, s, D]: ranks hold heads in order
    return x.movedim(0, 2)


def ulysses(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, attention) -> Tensor:
    """`attention(q, k, v)` is any attention on one device, [B, S, heads, D]. Here it meets all tokens of some heads."""
    N, N_kv = q.shape[2], k.shape[2]
    queries, kv = heads_of(group.rank(), group.size(), N, N_kv)
    q, k, v = to_heads(q, k, v, group)
    uses = [kv.index(h * N_kv // N) for h in queries]  # which of my K/V heads each of my query heads uses: 0 0 1 1, say
    equal = [i * len(kv) // len(queries) for i in range(len(queries))]
    if len(queries) % len(kv) or uses != equal:  # 0 0 1 or 0 1 1: no kernel takes that; so copy
        k, v = k[:, :, uses], v[:, :, uses]
    return to_tokens(attention(q, k, v), N, group)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention on one device: torch's. Also the oracle's."""
    S, heads = q.shape[1:3]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, N, D] -> [B, N, S, D]
    count["pairs"] += heads * S * (S + 1) // 2
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


# ------------------------------------------------------------------------------------------------ Ulysses x ring


class Rotate(torch.autograd.Function):
    """x from the previous rank of the ring. The derivative turns the ring the other way."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, step: int) -> Tensor:
        (rank, R), received = (group.rank(), group.size()), torch.empty_like(x)
        ctx.args = group, -step
        send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + step) % R)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - step) % R)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        count["sent, step"] += x.nbytes
        return received

    @staticmethod
    def backward(ctx, dx: Tensor):
        return Rotate.apply(dx.contiguous(), *ctx.args), None, None


def piece(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention to some keys: out [B, s, n, D] and the log of its denominators [B, s, n], in fp32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    pairs = q.shape[1] * (q.shape[1] + 1) // 2 if causal else q.shape[1] * k.shape[1]
    count["pairs"] += pairs * q.shape[2]  # above the diagonal kernels compute nothing
    k, v = (x.to(wide).repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))  # here only, and never sent
    scores = torch.einsum("bsnd,btnd->bsnt", q.to(wide), k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores + torch.full(scores.shape[1::2], -torch.inf, dtype=wide, device=q.device).triu(1)[:, None]
    lse = scores.logsumexp(-1)
    return torch.einsum("bsnt,btnd->bsnd", (scores - lse[..., None]).exp(), v), lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, more_lse)
    return (lse - total).exp()[..., None] * out + (more_lse - total).exp()[..., None] * more, total


def ring(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of tokens that lie in zigzag over `group`. In its simplest form: autograd writes the backward
    and keeps all blocks. `Ring` of ring_attention.py keeps none, and may take its place."""
    rank, R, half, kv = group.rank(), group.size(), q.shape[1] // 2, torch.stack((k, v))
    out, lse = piece(q, *kv, causal=True)
    for t in range(1, R):
        kv = Rotate.apply(kv, group, 1)
        if rank >= t:  # of an earlier rank: its early chunk is before both of mine, its late one after them
            out, lse = merge(out, lse, *piece(q, *kv[:, :, :half], causal=False))
        else:  # of a later rank: both its chunks are between mine
            late = merge(out[:, half:], lse[:, half:], *piece(q[:, half:], *kv, causal=False))
            out, lse = (torch.cat((x[:, :half], new), 1) for x, new in zip((out, lse), late, strict=True))
    return out.to(q.dtype)


def mesh(R: int, U: int, ranks: list[int]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """My (row, column) when `ranks` are laid out as R rows of U: who swaps with me, and who is in a ring with me.

    Neighbours swap: inside a node links are fast, and a swap cannot hide behind computation as a ring can."""
    # --- exercise 5.6: Ulysses x ring ---
    grid = torch.tensor(ranks).view(R, U)
    groups = {}
    for axis, lines in (("row", grid), ("column", grid.T)):
        for line in lines.tolist():  # every rank makes every group, in the same order
            group = dist.new_group(line, timeout=timedelta(seconds=60))  # a group does not inherit the world's
            if dist.get_rank() in line:
                groups[axis] = group
    return groups["row"], groups["column"]
    # --- end exercise ---


def positions_of(S: int, row: int, R: int, column: int, U: int) -> Tensor:
    """The places of a rank's tokens in the sequence: [S/P]. First 2R chunks are dealt to the rows in zigzag, then those
    of a row are cut in U parts. The swap puts these end to end again, and the ring meets its own layout."""
    chunks = torch.arange(S).chunk(2 * R)
    return torch.cat((chunks[row], chunks[2 * R - 1 - row])).chunk(U)[column]


# ----------------------------------------------------------------------------------------- a small model, and the proof

B, N, N_KV, D, H, V, LAYERS, IGNORE = 2, 6, 2, 8, 48, 256, 2, -100


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


def cut(tokens: Tensor, R: int, U: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens [B, s], labels [B, s], positions [s]. Labels are shifted before the cut, as the label of a
    part's last token is in another part. Zeros fill up the last one; they have no labels, and nobody sees them."""
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    tokens, labels = (F.pad(x, (0, -x.shape[1] % (2 * R * U)), value=v) for x, v in ((tokens, 0), (labels, IGNORE)))
    where = positions_of(tokens.shape[1], rank // U, R, rank % U, U).to(tokens.device)
    return tokens[:, where], labels[:, where], where


def train(attention, R: int, U: int, S: int, group: dist.ProcessGroup | None, device: str) -> list[Tensor]:
    """Three steps of SGD: losses, gradients and weights. Without a group it is the oracle: it has all tokens."""
    rank = group.rank() if group else 0
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.ModuleList([nn.Embedding(V, H), *(Layer() for _ in range(LAYERS)), nn.Linear(H, V)])
    weights, results = list(model.to(device, torch.float64).parameters()), []
    text = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    for step in range(3):
        count.clear()
        start = time.perf_counter()
        tokens = text[(torch.arange(B * S) + step * 700) % len(text)].view(B, S)
        mine, labels, positions = cut(tokens.to(device), R, U, rank)
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


def watched(attention):
    """The same attention, which also counts the bytes of the numbers that autograd keeps of it for backward."""

    def run(*qkv: Tensor) -> Tensor:
        kept: dict[int, int] = {}  # by address, so that what is kept twice counts once

        def keep(x: Tensor) -> Tensor:
            if x.is_floating_point():
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = attention(*qkv)
        count["kept"] += sum(kept.values())
        return out

    return run


def check(S: int, meshes: list[tuple[int, int]], group: dist.ProcessGroup, device: str) -> list[str]:
    """Every mesh (R, U) beside one process. Rank 0 prints what it counted, which must be what the formulas say."""
    rank, P, wrong, right = group.rank(), group.size(), [], train(watched(dense), 1, 1, S, None, device)
    S_, columns = S + -S % (2 * P), ("sent, forward", "sent, step", "kept", "pairs")  # S_ with the zeros at the end
    if rank == 0:
        print(f"{P} rank(s) on {device}, {B} x {S} tokens, {LAYERS} layers, {N} heads, {N_KV} of K/V. Rank 0, a step:")
        print(f"{'':24}{'error':>8}" + "".join(f"{x:>15}" for x in (*columns[:3], "tokens/s")) + "  pairs of all ranks")
        print(f"{'one process':32}{'-':>15}{'-':>15}{count['kept']:>15}{count['tokens/s']:>15}  {count['pairs']}")
    for R, U in meshes:
        row, column = mesh(R, U, dist.get_process_group_ranks(group))
        inner = dense if R == 1 else lambda q, k, v, c=column: ring(q, k, v, c)
        got = train(watched(lambda *x, g=row, f=inner: ulysses(*x, g, f)), R, U, S, group, device)
        error = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(got, right, strict=True)]).max().item()
        sizes = [[len(x) for x in heads_of(r, U, N, N_KV)] for r in range(U)]
        n, m = sizes[rank % U]
        C, token = sum(m for _, m in sizes), B * S_ // P * D * 8  # 8 bytes a float64
        forward = LAYERS * token * (N - n + 2 * (C - m) + n * (U - 1))
        backward = LAYERS * token * ((n + 2 * m) * (U - 1) + N - n)
        hops = LAYERS * (R - 1) * 2 * U * token * m  # K/V of m heads; dK/dV are as large
        want = [forward + hops, forward + backward + 2 * hops, count["kept"], LAYERS * n * (S_ // R * (S_ + 1) // 2)]
        if R == 1 and device == "cpu":  # a ring in its simplest form has no formula, nor has float64 on a GPU: no flash
            want[2] = LAYERS * B * S_ * 8 * (D * (2 * n + 2 * m) + n)
        bad = [f"error {error:.1e}"] * (not error <= 1e-10)  # "not", so that NaN is wrong
        bad += [f"{x} {count[x]:,}, not {w:,}" for x, w in zip(columns, want, strict=True) if count[x] != w]
        name, found = "Ulysses" if R == 1 else f"Ulysses x ring, {U} x {R}", [None] * P
        dist.all_gather_object(found, (count["pairs"], [f"{name}, rank {rank}: {x}" for x in bad]), group=group)
        wrong += [x for _, all_bad in found for x in all_bad]
        if rank == 0:
            figures = "".join(f"{count[x] or '-':>15}" for x in (*columns[:3], "tokens/s"))
            print(f"{name:24}{error:8.1e}{figures}  {' '.join(str(n) for n, _ in found)}")
    return wrong


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n" if os.environ.get("RANK", "0") == "0" else None)


def main() -> int:
    parser = Parser(description="Ulysses in one file", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=90, help="of the sequence; default %(default)s")
    parser.add_argument("--ring", type=int, help="rows of the mesh; default: 1, then 2")
    args, P = parser.parse_args(), int(os.environ.get("WORLD_SIZE", 1))
    if not 2 <= args.tokens <= 16384:  # a label is the next token; and one process computes all scores
        parser.error(f"--tokens {args.tokens}: use 2 to 16384")
    fit = [R for R in range(1, P + 1) if P % R == 0 and P // R <= N]
    if args.ring is not None and args.ring not in fit:
        parser.error(f"--ring {args.ring} does not cut {P} ranks in rows of at most {N}, the heads; use one of {fit}")
    meshes = [(R, P // R) for R in ([args.ring] if args.ring else [R for R in fit if R <= 2] or fit[:1])]
    device, gpus, local = "cpu", torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < gpus < local:
        parser.error(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    if gpus:
        torch.cuda.set_device(device := f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=60), **alone)
    wrong = check(args.tokens, meshes, dist.group.WORLD, device)
    if dist.get_rank() == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
