"""FPDT: a sequence that no GPU can hold, in chunks that wait in the memory of the host.

Ulysses (chapter 5) gives each of P ranks all S tokens of some heads. At two million tokens not even these fit: queries,
keys, values and outputs of one layer, and a gradient of each. But under a causal mask a chunk of the sequence needs, of
all others, only the keys and values of those before it, and the host, with ten times the memory, can keep these:

    device   q2 kv2   attend to kv2, then to | kv0 | kv1 |, fetched in turn into two slots        chunk 2 of u = 4
    host     kv0 kv1 kv2, and for backward q0 q1 q2, out0 out1 out2, the log-sum-exps lse0 lse1 lse2

    compute  | q2.kv2 | q2.kv0 | q2.kv1 | q3.kv3 |       what makes it fast: while the computation reads one slot,
    fetch    | kv0 | kv1 |              | kv0 | kv1 |    the other one is filled, by a stream of its own;
    offload           | kv2 |           | q2 out2 |      a third stream takes to the host what is done

Backward turns the loops round: outer over the keys and values of chunk j, inner over the queries of all chunks i >= j.
All else looks at one token at a time: feed-forward and loss go chunk by chunk, and are computed again in backward.

Bytes of a chunk: Q its queries (or output, or a gradient of these), K its keys and values, L its log-sum-exps. A layer:
    offloaded   u (2 Q + K + L) forward,  u Q + u(u+1)/2 Q backward       sent  u (4 Q + 2 K) (P-1)/P, for any u
    fetched     u(u-1)/2 K forward,  u K + u(u+1)/2 (4 Q + L) backward    on the host  u (2 Q + K + L), then 2 u Q more
    on the device a few chunks, whatever S is (`predicted`), beside S/P tokens of the residual stream
Yao et al. 2024, arXiv 2408.16978, section 4. Chunked feed-forward and loss: Luo et al. 2024, 2407.15892.

    python fpdt.py                                      one rank
    torchrun --nproc_per_node 4 fpdt.py --chunks 8      four: gloo on CPUs, nccl on GPUs
Ends with PASS when losses, gradients and weights are those of one process, to 1e-10, and bytes those of the formulas.
"""

import argparse
import os
import sys
import time
import weakref
from collections import Counter
from datetime import timedelta
from itertools import chain

import torch._dynamo  # and torch; dispatch modes import it: while a group is up, that would keep it to the end
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

# One sequence of S tokens on P ranks in u chunks; c = S/u tokens in a chunk, s = c/P of them on this rank. H numbers a
# token. N query heads of D numbers, N_kv heads of keys and values; n and m of them on this rank.
count, on_host = Counter[str](), weakref.WeakValueDictionary()  # bytes in a step; storages on the host while they live


def scores_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q [m, r, D], k [m, c, D] -> [m, r, c]. r: the queries of all r/c heads that share this head of keys."""
    scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
    if causal:
        later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu_(1)
        scores.unflatten(1, (-1, k.shape[1])).masked_fill_(later, -torch.inf)
    return scores


def attend(q: Tensor, kvs) -> tuple[Tensor, Tensor]:
    """A chunk of queries [m, r, D] to its own keys and values [2, m, c, D], the first of `kvs`, and to those of earlier
    chunks: output [m, r, D] and log-sum-exp [m, r, 1]. If `kvs` is a list, this is the simplest form, on the device."""
    wide = torch.promote_types(q.dtype, torch.float32)  # for all sums
    out, dtype, q = torch.zeros_like(q, dtype=wide), q.dtype, q.to(wide)
    total, top = torch.zeros_like(out[..., :1]), torch.full_like(out[..., :1], -torch.inf)
    for number, kv in enumerate(kvs):
        k, v = kv.to(wide)
        # --- exercise 8.1: online softmax ---
        scores = scores_of(q, k, causal=number == 0)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        fade = top.sub_(higher).exp_()  # what was summed under a lower top weighs less under the new one
        weights = scores.sub_(higher).exp_()
        total.mul_(fade).add_(weights.sum(-1, keepdim=True))
        out.mul_(fade).add_(weights @ v)
        top.copy_(higher)
        del scores, weights, higher, fade  # before the next pair makes its own
        # --- end exercise ---
    return out.div_(total).to(dtype), total.log_().add_(top)


def attend_backward(dq: Tensor, dkv: Tensor, given, kv: Tensor, causal: bool) -> None:
    """Add a pair of chunks' share to dq and dkv; given = q, out, dout, lse. With the log-sum-exp of *all* keys,
    exp(score - lse) are the final weights, so a pair needs no other one (FlashAttention-2, 2307.08691, algorithm 2)."""
    (q, out, dout, lse), (k, v) = (x.to(dq.dtype) for x in given), kv.to(dq.dtype)
    weights = scores_of(q, k, causal).sub_(lse).exp_()
    dkv[1].add_(weights.mT @ dout)
    delta = (dout * out).sum(-1, keepdim=True)
    dscores = (dout @ v.mT).sub_(delta).mul_(weights).mul_(q.shape[-1] ** -0.5)
    dkv[0].add_(dscores.mT @ q)
    dq.add_(dscores @ k)


def places_of(S: int, u: int, rank: int, P: int) -> Tensor:
    """The places in the sequence of this rank's tokens [S/P]: an all-to-all must bring what is next to each other."""
    # --- exercise 8.2: which tokens does a rank hold? ---
    return torch.arange(S).view(u, P, -1)[:, rank].flatten()  # a part of every chunk, not a part of the sequence
    # --- end exercise ---


def exchange(x: Tensor, order: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """x[r] goes to rank r; what comes from rank r is [r] of the result, whose dimensions are put in another order."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    count["sent"] += x.nbytes // group.size() * (group.size() - 1)
    here = received.permute(order).clone(memory_format=torch.contiguous_format)
    for message in (x, received):  # gloo's threads forget a message some time after the call; its memory is free now
        message.untyped_storage().resize_(0)
    return here


def to_heads(*tensors: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Some tokens of a chunk, all heads -> all its tokens, some heads: each [s, heads, D] -> [heads/P, c, D]."""
    # --- exercise 8.3: from tokens to heads ---
    rows = [x.unflatten(1, (group.size(), -1)).permute(1, 2, 0, 3) for x in tensors]  # [P, heads/P, s, D]: to each rank
    x = exchange(torch.cat(rows, 1), (1, 0, 2, 3), group)  # -> all_to_all -> [all heads/P, P, s, D]: from each rank
    return x.flatten(1, 2)  # [all heads/P, c, D]
    # --- end exercise ---


def to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """And back: [heads/P, c, D] -> [P, heads/P, s, D] -> all_to_all -> [s, P, heads/P, D]."""
    x = x.unflatten(1, (group.size(), -1)).transpose(0, 1)
    return exchange(x.clone(memory_format=torch.contiguous_format), (2, 0, 1, 3), group)


class Host:
    """Memory where tensors wait, and three queues of work: compute, fetch (to the device), offload (to the host). On a
    GPU these are CUDA's streams and events. A CPU does all in the order of the program, and writes down in `ops` what
    each operation would have waited for: its events are the numbers of operations."""

    def __init__(self, device: str, u: int, slots: int):
        self.device, self.u, self.slots, self.last = device, u, slots, Counter[str]()
        self.cuda = {s: torch.cuda.Stream(device) for s in ("fetch", "offload")} if "cuda" in device else {}
        self.ops: list[tuple] = []  # (stream, name, bytes, the events that it comes after)

    def event(self, stream: str) -> int | torch.cuda.Event:  # it comes when the stream has done all it was given so far
        return (self.cuda.get(stream) or torch.cuda.current_stream()).record_event() if self.cuda else self.last[stream]

    def put(self, stream: str, name: str, after: list = (), to: Tensor | None = None, source: Tensor | None = None):
        """Give a stream a copy to do after these events, or say what the computation does next; returns its end."""
        self.ops.append((stream, name, source.nbytes if to is not None else 0, after))
        self.last[stream], count[stream] = len(self.ops), count[stream] + self.ops[-1][2]
        with torch.cuda.stream(self.cuda.get(stream)):  # of None: as if it were not there
            for event in after if self.cuda else ():
                event.wait()
            if to is not None:
                to.copy_(source, non_blocking=True)
        if to is not None and source.is_cuda:  # what Python frees from now on is given away only after the copy
            source.record_stream(self.cuda[stream])
        return self.event(stream)

    def offload(self, stored: dict, i: int, **tensors: Tensor) -> None:
        """Start to copy tensors to their places in `stored`, old or new. Nobody writes to one before its copy ends."""
        for name, x in tensors.items():
            data, _ = stored.get(f"{name}{i}", (None, None))
            if data is None:
                with _disable_current_modes():  # no meter of the device counts it. Unpinned, no copy runs beside work
                    data = torch.empty(x.shape, dtype=x.dtype, pin_memory=bool(self.cuda))
                on_host[data.untyped_storage()._cdata] = data.untyped_storage()
                count["host"] = max(count["host"], sum(storage.nbytes() for storage in on_host.values()))
            stored[f"{name}{i}"] = data, self.put("offload", f"{name}{i}", [self.event("compute")], data, x)

    def fetched(self, stored: dict, items: list, user: str = "", readers: tuple = ("compute",)):
        """The tensors of one item after the other, on the device; the next are on their way while some are used. To ask
        for the next item is to be done with this one, but for what the streams `readers` still have to do with it."""
        full: list = []
        buffers = [[torch.empty_like(stored[x][0], device=self.device) for x in names] for names in items[: self.slots]]

        def fetch() -> None:
            # --- exercise 8.4: what must a fetch wait for? ---
            free, slot = [self.event(stream) for stream in readers], buffers[len(full) % self.slots]
            copies = zip(slot, items[len(full)], strict=True)
            full.append([self.put("fetch", x, [*free, stored[x][1]], to, stored[x][0]) for to, x in copies][-1])
            # --- end exercise ---

        def use():
            # --- exercise 8.5: double buffering ---
            for turn, names in enumerate(items):
                self.put("compute", user + names[0], [full[turn]])
                yield buffers[turn % self.slots]
                if len(full) < len(items):
                    fetch()  # into the slot just used. The next item is under way, or has arrived
            # --- end exercise ---

        for _ in buffers:  # now, and not when somebody asks for the first
            fetch()
        return use()


class FPDT(torch.autograd.Function):
    """x [S/P, H] -> what attention gives for it, [S/P, N D]. `project`: x [s, H] -> q, k, v [s, heads, D]."""

    @staticmethod
    def forward(ctx, x: Tensor, project, host: Host, group, keep: bool, *weights: Tensor) -> Tensor:
        outs, stored, m = [], {}, N_KV // group.size()
        for i, rows in enumerate(x.chunk(host.u)):
            earlier = host.fetched(stored, [[f"kv{j}"] for j in range(i)], f"q{i}.")
            host.put("compute", f"q{i}.kv{i}")
            qkv = to_heads(*project(rows), group=group)  # [n + 2 m, c, D]
            q, kv = qkv[: -2 * m].view(m, -1, D), qkv[-2 * m :].unflatten(0, (2, m))
            host.offload(stored, i, kv=kv)
            out, lse = attend(q, chain([kv], (kv for (kv,) in earlier)))
            if keep:  # for backward
                host.offload(stored, i, q=q, out=out, lse=lse)
            outs.append(to_tokens(out.view(-1, *kv.shape[2:]), group).flatten(1))  # [s, N D]
            del earlier, qkv, q, kv, out, lse
        ctx.save_for_backward(x, *(data for data, _ in stored.values()))  # what backward has used, autograd lets go
        ctx.rest = project, host, group, weights, list(stored)
        return torch.cat(outs)

    @staticmethod
    def backward(ctx, dout: Tensor):
        (x, *kept), (project, host, group, weights, names) = ctx.saved_tensors, ctx.rest
        stored = {name: (data, host.event("offload")) for name, data in zip(names, kept, strict=True)}
        wide, u = torch.promote_types(x.dtype, torch.float32), host.u
        dx, *sums = (torch.zeros_like(y, dtype=wide) for y in (x, *weights))
        for i, rows in enumerate(dout.chunk(u)):
            do, like = rows.unflatten(1, (N, D)), kept[1].shape  # [s, N, D]; of q: [m, r, D]
            host.offload(stored, i, dout=to_heads(do, group=group).view(like), dq=dx.new_zeros(like))
        for j, (kv,) in enumerate(host.fetched(stored, [[f"kv{j}"] for j in range(u)])):
            # --- exercise 8.6: the inner loop of the backward ---
            order, dkv = range(u - 1, j - 1, -1), torch.zeros_like(kv, dtype=wide)  # chunk j's own queries last
            items = [[f"{name}{i}" for name in ("q", "out", "dout", "lse", "dq")] for i in order]
            queries = host.fetched(stored, items, f"kv{j}.", ("compute", "offload"))
            for (*given, dq), i in zip(queries, order, strict=True):
                attend_backward(dq, dkv, given, kv, causal=i == j)
                if i > j:
                    host.offload(stored, i, dq=dq)  # for the next j
            dqkv = torch.cat((dq.view(-1, *kv.shape[2:]), dkv.flatten(0, 1))).to(x.dtype)  # [n + 2 m, c, D], complete
            # --- end exercise ---
            with torch.enable_grad():  # the projections again, to go back through them
                qkv = project(rows := x.chunk(u)[j].detach().requires_grad_())
            dqkv = to_tokens(dqkv, group).split([y.shape[1] // group.size() for y in qkv], 2)  # [s, P, heads/P, D]
            shares = torch.autograd.grad(qkv, (rows, *weights), [y.flatten(1, 2) for y in dqkv])
            for total, share in zip((dx.chunk(u)[j], *sums), shares, strict=True):
                total.add_(share)
            del given, dq, dkv, dqkv, rows, qkv, shares, share
        return dx.to(x.dtype), None, None, None, None, *(y.to(x.dtype) for y in sums)


def in_chunks(f, u: int, *xs: Tensor) -> Tensor:
    """f looks at one token at a time: do a chunk, forget what happened inside, do it again in backward."""
    return torch.cat([checkpoint(f, *y, use_reentrant=False) for y in zip(*[x.chunk(u) for x in xs], strict=True)])


N, N_KV, D, H, V, LAYERS, S = 8, 4, 8, 64, 256, 2, 500


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.RMSNorm(H), nn.Linear(H, (N + 2 * N_KV) * D), nn.Linear(N * D, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:  # [s, H] -> [s, N or N_kv, D]
        return self.qkv(self.norm1(x)).unflatten(1, (-1, D)).split((N, N_KV, N_KV), 1)

    def attention(self, x: Tensor, host: Host | None, group) -> Tensor:  # [S/P, H] -> [S/P, N D]
        if host:
            weights = (*self.norm1.parameters(), *self.qkv.parameters())
            return FPDT.apply(x, self.project, host, group, torch.is_grad_enabled(), *weights)  # in apply it is off
        q, k, v = (y.transpose(0, 1)[None] for y in self.project(x))  # [1, heads, S, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        return (x := x + self.out(attended)) + self.down(F.gelu(self.up(x)))


def train(S: int, host: Host | None, group, device: str) -> list[Tensor]:
    """Three steps of SGD: losses, gradients, weights. With no host it is the oracle: all tokens; torch's attention."""
    P, rank, u = (group.size(), group.rank(), host.u) if host else (1, 0, 1)
    torch.manual_seed(0)  # the same weights and tokens on every rank
    model = nn.ModuleList([nn.Embedding(V, H), *(Layer() for _ in range(LAYERS)), nn.Linear(H, V)])
    weights, results = list(model.to(device, torch.float64).parameters()), []
    for _ in range(3):
        count.clear()
        start, tokens = time.perf_counter(), torch.randint(V, (S,)).to(device)
        more = -S % (u * P)  # tokens at the end that make chunks equal: no labels, and nobody before sees them
        labels, tokens = F.pad(tokens[1:], (0, 1 + more), value=-100), F.pad(tokens, (0, more))  # shifted, then cut
        where = places_of(S + more, u, rank, P).to(device)  # in the sequence, not on the rank
        angle = where[:, None] * 10000.0 ** (-torch.arange(0, H, 2, device=device).double() / H)
        x = model[0](tokens[where]) + torch.cat((angle.sin(), angle.cos()), 1)  # [S/P, H]
        for layer in model[1:-1]:
            x = in_chunks(layer.rest, u, x, layer.attention(x, host, group))
        losses = in_chunks(lambda x, y: F.cross_entropy(model[-1](x), y, reduction="sum")[None], u, x, labels[where])
        loss = losses.sum() / (S - 1)  # the labels of all ranks: an average of averages would be another number
        loss.backward()
        results += [loss.detach(), *(p.grad for p in weights)]
        for tensor in results[-len(weights) - 1 :] if host else ():
            dist.all_reduce(tensor, group=group)  # each rank used all weights, for its tokens: a sum
        for p in weights:
            p.data, p.grad = p.data - 0.1 * p.grad, None
        count["tokens/s"] = int(S / (time.perf_counter() - start))
    return results + [p.detach() for p in weights]


def predicted(S: int, P: int, u: int, slots: int, b: int = 8) -> tuple[dict[str, int], int]:
    """Bytes of a step on a rank, numbers of b >= 4 bytes; and on the device at most, in one layer's attention, if pairs
    of chunks take most of it (c >= 10 D): x, dx, dout; weights and their gradients; slots; dkv; what a pair makes."""
    S += -S % (u * P)
    c, n, m, pairs = S // u, N // P, N_KV // P, u * (u - 1) // 2
    Q, K, L, A = c * n * D * b, 2 * c * m * D * b, c * n * b, c * c * n * b  # A: the scores of a pair of chunks
    R, W = S // P * H * b, (H + (H + 1) * (N + 2 * N_KV) * D) * b  # residual stream; weights of norm and projections
    offload = LAYERS * (u * (4 * Q + K + L) + pairs * Q)
    fetch = LAYERS * (pairs * K + u * K + (pairs + u) * (4 * Q + L))
    host, sent = u * (LAYERS * (2 * Q + K + L) + 2 * Q), LAYERS * u * (4 * Q + 2 * K) * (P - 1) // P
    device = 3 * R + 2 * W + min(slots, u) * (K + 4 * Q + L) + K + 2 * A + Q + L  # in backward, with the first keys
    return {"offload": offload, "fetch": fetch, "host": host, "sent": sent}, device


def check(S: int, ways: list[tuple[int, int]], group: dist.ProcessGroup, device: str) -> list[str]:
    """Each way (chunks, slots) beside one process. Rank 0 prints what was counted, which must be what was predicted."""
    (P, rank), wrong, right = (group.size(), group.rank()), [], train(S, None, group, device)
    lines = [f"{P} rank(s) on {device}, {S} tokens, {LAYERS} layers, {N} heads, {N_KV} of K/V. Bytes of rank 0:"]
    lines += ["chunks slots   error    offload      fetch       host       sent   tokens/s   device, by the formula"]
    for u, slots in ways:
        found, (want, most) = [None] * P, predicted(S, P, u, slots)
        got = train(S, Host(device, u, slots), group, device)
        error = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(got, right, strict=True)]).max().item()
        bad = [f"error {error:.1e}"] * (not error <= 1e-10)  # "not", so that NaN is wrong
        bad += [f"{x} {count[x]:,} bytes, not {want[x]:,}" for x in want if count[x] != want[x]]
        dist.all_gather_object(found, [f"{u} chunks, {slots} slots, rank {rank}: {x}" for x in bad], group=group)
        wrong += chain(*found)
        numbers = (*(count[x] for x in (*want, "tokens/s")), most if S // u >= 10 * D else "-")
        lines += [f"{u:6}{slots:6}{error:8.1e}" + "".join(f"{x:>11}" for x in numbers)]
    if rank == 0:
        print("\n".join([*lines, f"FAIL: {'; '.join(wrong)}" if wrong else "PASS"]))
    return wrong


def main() -> int:
    parser, lead = argparse.ArgumentParser(description="FPDT", allow_abbrev=False), os.environ.get("RANK", "0") == "0"
    parser.error = lambda text: sys.exit((lead and print(f"{parser.prog}: {text}", file=sys.stderr)) or 2)
    parser.add_argument("--chunks", type=int, default=4, help=f"of the {S} tokens; default %(default)s")
    args, P, gpus, device = parser.parse_args(), int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.device_count(), "cpu"
    if not 1 <= args.chunks <= S // 20:
        parser.error(f"--chunks {args.chunks}: a chunk of {S} tokens has 20 or more; use 1 to {S // 20}")
    if N_KV % P:
        parser.error(f"--nproc_per_node {P} does not divide {N_KV} heads of keys and values; use 1, 2 or 4")
    if 0 < gpus < (local := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        parser.error(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    if gpus:
        torch.cuda.set_device(device := f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **alone)
    wrong = check(S, [(1, 1), (args.chunks, 1), (args.chunks, 2)], dist.group.WORLD, device)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
