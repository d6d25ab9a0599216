"""FPDT: a sequence that does not fit on the device, in chunks that wait on the host.

The activations of a million tokens fill any GPU. P ranks that share the sequence out hold 1/P each, and then? The host
has ten times the memory, behind a link that is fifty times slower. FPDT (Fully Pipelined Distributed Transformer) cuts
the sequence into u chunks, works on one, has one or two more on the device, and keeps all others on the host. Why that
works: under a causal mask a chunk needs only those before it. And attention of c tokens to c others takes time like c^2
but fetching them like c: from some c on, the next chunk arrives while the device computes with this one.

    sequence   |   chunk 0   |   chunk 1   |   chunk 2   |     Of every chunk rank r holds the r-th part. So chunk i of
    rank       | 0  1  2  3  | 0  1  2  3  | 0  1  2  3  |     all ranks together is c tokens in a row.

    chunk 2, forward                                                host -> device       device -> host
      x_2 -> q_2, kv_2        all-to-all: c tokens, 1/P of heads                         kv_2
      q_2 attends to kv_2     its own chunk, with the mask          kv_0
      q_2 attends to kv_0     merge by log-sum-exp                  kv_1
      q_2 attends to kv_1     merge by log-sum-exp                  x_3
      out_2 -> y_2            all-to-all back, feed-forward                              q_2, out_2, lse_2, y_2
    backward: outer loop over chunks j of keys and values, inner loop over chunks i >= j of queries; dq_i comes and goes

X bytes: one chunk of a rank's x, or of its q, k, v, out, dq. L: its log-sum-exp. A = n c^2 e: scores of two chunks, n
heads of a rank, e bytes a number. With u chunks and pairs = u (u - 1) / 2, a layer moves in a step
    device -> host    u (8 X + 2 L) + pairs X                 q k v out lse y, dh dout delta dx; dq
    host -> device    u (10 X + 2 L) + pairs (5 X + 2 L)      x, x out dy, k v x dh, q lse dout delta; a pair
    rank -> ranks     u (8 X + L) (P - 1) / P                 q k v, out, dout delta, dq dk dv: for any u
and the device has at most 3 A + 35 X + 8 L beyond weights, of chunks of 64 tokens or more. Yao et al. 2024, 2408.16978.

    python fpdt.py                                                    one rank: 1, 2, 4, 8 chunks, one buffer and two
    torchrun --nproc_per_node 4 fpdt.py --tokens 250 --chunks 6       gloo on CPUs, nccl on GPUs
Ends with PASS when loss, gradients and weights are those of one process to 1e-10, and bytes are those of the formulas.
"""

import argparse
import os
import sys
import time
import tokenize
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# S tokens in u chunks of c, of which each of P ranks holds s = c/P. H hidden size, N heads of D, V words. After an
# all-to-all a rank has n = N/P heads. Logits exist for PIECE tokens at a time.
N, D, V, LAYERS, IGNORE, PIECE = 4, 8, 128, 2, -100, 8
H, WIDE = N * D, {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return x @ layer.weight.to(x.dtype).T  # weights, and the sums of their gradients, are wide whatever x is


class Layer(nn.Module):
    """All that looks at one token at a time: what comes before attention, and what comes after it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)
        self.up, self.down = nn.Linear(H, 4 * H, bias=False), nn.Linear(4 * H, H, bias=False)

    def before(self, x: Tensor) -> Tensor:  # [s, H] -> [s, N, 3, D]: q, k, v of each head
        return linear(nnf.rms_norm(x, (H,)), self.qkv).unflatten(-1, (N, 3, D))

    def after(self, x: Tensor, out: Tensor) -> Tensor:  # [s, H], [s, N, D] -> [s, H]
        x = x + linear(out.flatten(1), self.out)
        return x + linear(nnf.gelu(linear(nnf.rms_norm(x, (H,)), self.up)), self.down)


def make_model(device: str = "cpu", dtype: torch.dtype = torch.float64) -> nn.ModuleList:
    torch.manual_seed(0)  # the same on every rank
    parts = [nn.Embedding(V, H), *(Layer() for _ in range(LAYERS)), nn.Linear(H, V, bias=False)]
    return nn.ModuleList(parts).to(device, dtype)


def embed(model: nn.ModuleList, tokens: Tensor, where: Tensor, dtype: torch.dtype) -> Tensor:
    """[s] -> [s, H]. Adds sines of each token's place in the whole sequence, whoever holds it."""
    return (model[0](tokens) + torch.sin(where[:, None] / 1.5 ** torch.arange(H, device=where.device))).to(dtype)


def loss_sum(head: nn.Linear, labels: Tensor, x: Tensor) -> Tensor:
    """A sum over tokens, to be divided by all valid ones: an average of averages is another number."""
    logits = linear(nnf.rms_norm(x, (H,)), head).to(WIDE[x.dtype])
    return nnf.cross_entropy(logits, labels.to(x.device), ignore_index=IGNORE, reduction="sum")


def dense_loss(model: nn.ModuleList, tokens: Tensor, labels: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The whole sequence on one device, every layer at once: what FPDT must equal."""
    x = embed(model, tokens, torch.arange(len(tokens), device=tokens.device), dtype)
    for layer in model[1:-1]:
        q, k, v = layer.before(x).permute(2, 1, 0, 3)[:, None]  # [1, N, S, D] each
        out = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = layer.after(x, out[0].transpose(0, 1))
    return loss_sum(model[-1], labels, x) / (labels != IGNORE).sum()


def batch_of(step: int, S: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, [S] each. Labels are shifted here, as the label of a part's last token is in another part."""
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long() % V
    text = data[(torch.arange(S + 1) + 777 * step) % len(data)]
    return text[:-1], text[1:].masked_fill(torch.arange(S) < S // 5, IGNORE)  # a prompt that is not learned


# ------------------------------------------------------------------------ who holds which tokens, and who which heads


def positions(S: int, rank: int, P: int, u: int) -> Tensor:
    """[u, s]: the places in the sequence of what a rank holds of each chunk. S is a multiple of u P."""
    # --- exercise 8.1: which tokens a rank holds ---
    return torch.arange(S).view(u, P, -1)[:, rank]
    # --- end exercise ---


# --------------------------------------------------------------------------------------------- attention of two chunks


def attend(q: Tensor, kv: Tensor, causal: bool, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q [n, c, D] to the keys and values of one chunk, kv [n, 2, c, D] -> out [n, c, D], lse [n, c, 1]. lse is the log
    of what the weights are divided by; backward gives that of ALL keys, and gets the sum of these weights in its place.
    """
    scores = q @ kv[:, 0].mT / D**0.5  # [n, c, c]
    if causal:
        scores = scores + torch.full(scores.shape[1:], -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    if lse is None:
        lse = scores.logsumexp(-1, keepdim=True)
        return (scores - lse).exp() @ kv[:, 1], lse
    weights = (scores - lse).exp()
    return weights @ kv[:, 1], weights.sum(-1, keepdim=True)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to some keys and attention to others -> attention to all of them."""
    # --- exercise 8.3: merge by log-sum-exp ---
    both = torch.logaddexp(lse, more_lse)
    return (lse - both).exp() * out + (more_lse - both).exp() * more, both
    # --- end exercise ---


@torch.enable_grad()
def back(function: Callable, dys: list[Tensor], *inputs: Tensor) -> list[Tensor]:
    """Gradients of the inputs of a function. It runs again, as nothing inside it was kept. The gradients of weights add
    up over the chunks, in the wide dtype of the weights."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.backward(function(*inputs), dys)
    return [x.grad for x in inputs]


# ------------------------------------------------------------------------------------------------------- a step of FPDT


class FPDT:
    """A model whose sequence is on the host, as lists of u tensors: `link.away(x)` takes one there, `link.walk(...)`
    brings them back, a few at a time. On the device are the weights and what belongs to two or three chunks."""

    def __init__(self, model: nn.ModuleList, u: int, group: dist.ProcessGroup, link: "Link", dtype=torch.float64):
        self.model, self.u, self.link, self.dtype = model, u, link, dtype
        self.group, self.P, self.sent, self.buffers = group, group.size(), 0, {}

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [P, ...]: part r goes to rank r. Returns the parts that came, in a buffer that the next call may reuse."""
        key = x.numel(), x.dtype
        if key not in self.buffers:  # they stay: the library may look at them as long as it likes
            self.buffers[key] = x.new_empty(x.numel()), x.new_empty(x.numel())
        out, into = (buffer.view(x.shape) for buffer in self.buffers[key])
        # --- exercise 8.2: tokens for heads, as in Ulysses ---
        out.copy_(x)  # whatever the order of x in memory: a message lies in one run of bytes
        dist.all_to_all_single(into, out, group=self.group)
        self.sent += out.nbytes * (self.P - 1) // self.P  # my own part stays here
        return into

    def to_heads(self, x: Tensor) -> Tensor:
        """Some tokens of all heads -> all tokens of some heads: [s, N, ..., D] -> [n, ..., c, D]."""
        x = self.all_to_all(x.unflatten(1, (self.P, -1)).transpose(0, 1))  # -> [P, s, n, ..., D]
        return x.flatten(0, 1).movedim(0, -2).clone(memory_format=torch.contiguous_format)  # out of the buffer

    def to_tokens(self, x: Tensor) -> Tensor:
        """And back: [n, ..., c, D] -> [s, N, ..., D]."""
        x = self.all_to_all(x.movedim(-2, 0).unflatten(0, (self.P, -1)))  # -> [P, s, n, ..., D]
        return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(1, 2)
        # --- end exercise ---

    @torch.no_grad()
    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Adds the gradient of the whole sequence to each `.grad`; all ranks get the loss. Tokens are on the host."""
        end, valid = -len(tokens) % (self.u * self.P), (labels != IGNORE).sum().item()
        # Zeros fill up the last chunk: they have no labels, and under the mask nobody sees them.
        where = positions(len(tokens) + end, self.group.rank(), self.P, self.u)  # [u, s]
        tokens, labels = nnf.pad(tokens, (0, end))[where], nnf.pad(labels, (0, end), value=IGNORE)[where]
        device, link, kept = self.link.device, self.link, []
        xs = [
            link.away(embed(self.model, t.to(device), w.to(device), self.dtype))
            for t, w in zip(tokens, where, strict=True)
        ]
        for layer in self.model[1:-1]:
            xs = self.forward(layer, xs, kept)
        loss, dxs = self.loss(xs, labels, valid)
        for layer in reversed(self.model[1:-1]):
            xs, qs, kvs, outs, lses = kept.pop()
            dxs = self.back_through_attention(layer, *self.back_to_attention(layer, dxs, xs, outs), xs, qs, kvs, lses)
        for mine, (dx,) in zip(tokens, link.walk(zip(dxs)), strict=True):
            self.model[0].weight.grad.index_add_(0, mine.to(device), dx.to(loss.dtype))
        for tensor in [loss, *(w.grad for w in self.model.parameters())]:
            dist.all_reduce(tensor, group=self.group)  # each rank used all weights, for its tokens: a sum
        return loss

    def loss(self, xs: list[Tensor], labels: Tensor, valid: int) -> tuple[Tensor, list[Tensor]]:
        """This rank's share of the loss, and dx_i on the host."""
        total, dxs = torch.zeros((), dtype=WIDE[self.dtype], device=self.link.device), []
        for (x,), wanted in zip(self.link.walk(zip(xs)), labels, strict=True):
            # --- exercise 8.6: a loss without all logits ---
            dx = torch.empty_like(x)
            for at in range(0, len(x), PIECE):
                piece = x[at : at + PIECE].detach().requires_grad_()
                with torch.enable_grad():
                    loss = loss_sum(self.model[-1], wanted[at : at + PIECE], piece) / valid
                    loss.backward()  # at once: the logits of this piece are gone before there are others
                dx[at : at + PIECE], total = piece.grad, total + loss.detach()
            # --- end exercise ---
            dxs.append(self.link.away(dx))
        return total, dxs

    def forward(self, layer: Layer, xs: list[Tensor], kept: list[tuple]) -> list[Tensor]:
        """x_i -> y_i of a layer. Appends to `kept` what its backward will ask for. All of it waits on the host."""
        ys, qs, kvs, outs, lses, away = [], [], [], [], [], self.link.away
        kept.append((xs, qs, kvs, outs, lses))
        # --- exercise 8.4: a row of chunks ---
        earlier = self.link.walk([kvs[j]] for i in range(self.u) for j in range(i))
        for i, (x,) in enumerate(self.link.walk(zip(xs))):
            q, kv = self.to_heads(layer.before(x)).split((1, 2), 1)  # [n, 1, c, D], [n, 2, c, D]
            kvs.append(away(kv))
            q, kv = q[:, 0].to(WIDE[x.dtype]), kv.to(WIDE[x.dtype])
            self.link.compute(f"{i}, {i}", 2 * q.numel() * q.shape[1])  # half of the square
            out, lse = attend(q, kv, causal=True)  # to its own chunk first: that is here
            for j in range(i):
                (kv,) = next(earlier)
                self.link.compute(f"{i}, {j}", 4 * q.numel() * q.shape[1])
                out, lse = merge(out, lse, *attend(q, kv.to(q.dtype), causal=False))
            qs.append(away(q.to(x.dtype)))
            lses.append(away(lse))
            out = self.to_tokens(out.to(x.dtype))  # -> [s, N, D]
            outs.append(away(out))
            ys.append(away(layer.after(x, out)))
        # --- end exercise ---
        return ys

    def back_to_attention(self, layer: Layer, dys: list, xs: list, outs: list) -> tuple[list[Tensor], list[Tensor]]:
        """The first half of backward, chunk by chunk: dy_i -> dh_i of the residual stream, and dout_i."""
        dhs, douts = [], []
        for x, out, dy in self.link.walk(zip(xs, outs, dys, strict=True)):
            dh, dout = back(layer.after, [dy], x, out)
            dhs.append(self.link.away(dh))
            dout = dout.to(WIDE[x.dtype])
            delta = (dout * out).sum(-1, keepdim=True)  # of attention to all keys: no pair of chunks could say
            douts.append(self.link.away(self.to_heads(torch.cat((dout, delta), -1))))  # [n, c, D + 1]
        return dhs, douts

    def back_through_attention(self, layer: Layer, dhs: list, douts: list, xs: list, qs: list, kvs: list, lses: list):
        """The second half, the nested loop -> dx_i. Queries go from the last chunk down to j. Going up, j = u-2 would
        end with dq_{u-1} and j = u-1 begin with it: its fetch would be under way before it had left."""
        # --- exercise 8.5: the nested loop ---
        u, walk, dxs, dqs = self.u, self.link.walk, [], [[] for _ in xs]  # dq_i on the host, as far as it is
        pairs = walk([qs[i], lses[i], douts[i], *dqs[i]] for j in range(u) for i in reversed(range(j, u)))
        for j, (kv, x, dh) in enumerate(walk(zip(kvs, xs, dhs, strict=True))):
            kv, dkv = kv.to(WIDE[x.dtype]), 0
            for i in reversed(range(j, u)):
                q, lse, dout, *dq = next(pairs)
                self.link.compute(f"{i}, {j}", (5 if i == j else 10) * q.numel() * q.shape[1])
                dout, delta = dout.split((D, 1), -1)
                more, more_kv = back(partial(attend, causal=i == j, lse=lse), [dout, -delta], q.to(kv.dtype), kv)
                dq, dkv = sum(dq, more), dkv + more_kv
                dqs[i] = [self.link.away(dq)] if i > j else []  # dq_j has met all its keys, as dkv_j all its queries
            dqkv = self.to_tokens(torch.cat((dq[:, None], dkv), 1).to(x.dtype))  # -> [s, N, 3, D]
            dxs.append(self.link.away(dh + back(layer.before, [dqkv], x)[0]))
        # --- end exercise ---
        return dxs


# ------------------------------------------------------------------------------------------------- the link to the host


class Link:
    """Copies to the host and back beside the computation, each direction on a stream (a queue of work) of its own. With
    one buffer a chunk is fetched when the computation has read the one before. With two, the next one arrives in one
    buffer while the computation reads the other: the one idea that makes it fast.

    Streams know nothing of each other: `wait` holds one back until another has come as far as an event. On a CPU all is
    done at once, in the order of the program, and `timeline` notes when three streams would have done it on a device of
    FLOPS and a link of BYTES a second. The two are those of a toy, for which 32 tokens are as 20,000 for a GPU."""

    FLOPS, BYTES = 8e9, 1e9

    def __init__(self, device: str = "cpu", buffers: int = 2):
        self.device, self.buffers, self.out, self.back, self.held, self.most = device, buffers, 0, 0, 0, 0
        self.timeline, self.clock = [], {"compute": 0.0, "to host": 0.0, "from host": 0.0}
        self.cuda = {s: torch.cuda.Stream(device) for s in ("to host", "from host")} if device != "cpu" else {}

    def note(self, stream: str, name: str, seconds: float) -> None:
        self.timeline.append((stream, name, self.clock[stream], self.clock[stream] + seconds))
        self.clock[stream] += seconds

    def compute(self, pair: str, flops: float) -> None:
        self.note("compute", pair, flops / self.FLOPS)  # attention only, of chunk i to chunk j: "i, j"

    def event(self, stream: str) -> tuple:
        """All that the stream has been given so far."""
        return self.clock[stream], self.cuda and self.cuda.get(stream, torch.cuda.current_stream()).record_event()

    def wait(self, stream: str, event: tuple) -> None:
        self.clock[stream] = max(self.clock[stream], event[0])
        if self.cuda:
            self.cuda.get(stream, torch.cuda.current_stream()).wait_event(event[1])

    def copy(self, stream: str, to: Tensor, source: Tensor) -> None:
        self.note(stream, stream, to.nbytes / self.BYTES)
        with torch.cuda.stream(self.cuda.get(stream)):  # on a CPU of None: nothing
            to.copy_(source, non_blocking=True)
        if self.cuda:  # the device's memory is not given to others before this copy is over
            (to if to.is_cuda else source).record_stream(self.cuda[stream])

    def freed(self, size: int) -> None:
        self.held -= size

    def away(self, x: Tensor) -> Tensor:
        """The copy of x on the host, which may still be under way."""
        with _disable_current_modes():  # a meter of the device's memory does not see the host's, on a CPU either
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)  # pinned: a GPU can copy it by itself
        self.out, self.held, self.most = self.out + x.nbytes, self.held + x.nbytes, max(self.most, self.held + x.nbytes)
        weakref.finalize(host, self.freed, host.nbytes).atexit = False
        # --- exercise 8.7: two buffers ---
        self.wait("to host", self.event("compute"))  # else it stores what was in x before
        self.copy("to host", host, x)
        host.stored = self.event("to host")
        return host

    def walk(self, wanted: Iterable) -> Iterator[list[Tensor]]:
        """For each group of host tensors the same on the device, until the caller asks for the next group."""
        wanted, coming, slots = iter(wanted), [], [[] for _ in range(self.buffers)]
        while True:
            while len(coming) < self.buffers and (hosts := next(wanted, None)) is not None:
                here = slots[0]  # a place for each tensor; memory is taken when it is first needed, and stays
                here += [torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in hosts[len(here) :]]
                self.wait("from host", self.event("compute"))  # else it overwrites what is still being read
                for host, slot in zip(hosts, here, strict=False):
                    self.wait("from host", host.stored)  # else it fetches what is not there yet
                    self.copy("from host", slot, host)
                    self.back += host.nbytes
                coming.append((here[: len(hosts)], self.event("from host")))
                slots.append(slots.pop(0))  # round and round
            if not coming:
                return
            here, arrived = coming.pop(0)
            self.wait("compute", arrived)  # else it reads the chunk before
            yield here
        # --- end exercise ---


# ------------------------------------------------------------------------------------------------------------ the proof


class DeviceMemory(TorchDispatchMode):
    """`most` bytes of tensors that were made inside the block."""

    def __init__(self):
        super().__init__()
        self.sizes, self.most = weakref.WeakKeyDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]
        new = {x.untyped_storage() for x in made} - given
        self.sizes.update({storage: storage.nbytes() for storage in new})
        self.most = max(self.most, sum(self.sizes.values()))
        return result


def three_steps(model: nn.ModuleList, step: Callable, S: int) -> list[Tensor]:
    """Plain SGD, which forgives no wrong scale: losses, gradients and weights."""
    results = []
    for number in range(3):
        for w in model.parameters():
            w.grad = torch.zeros_like(w)
        results += [step(*batch_of(number, S)), *(w.grad.clone() for w in model.parameters())]
        for w in model.parameters():
            w.data -= 0.1 * w.grad
    return results + [w.data for w in model.parameters()]


def formulas(S: int, P: int, u: int, e: int = 8) -> tuple[int, int, int, int, int]:
    """Of a step, in bytes: device at most (of three chunks or more), host at most, to the host, from there, sent.
    Beside the layers, x_0 and dx of the loss leave, and come back."""
    c, pairs = -(-S // (u * P)) * P, u * (u - 1) // 2
    X, A = c // P * H * e, N // P * c * c * e
    L = X // D
    host = u * (LAYERS * (5 * X + L) + 4 * X + L) + (X if u > 1 else 0)
    out = LAYERS * (u * (8 * X + 2 * L) + pairs * X) + 2 * u * X
    back = LAYERS * (u * (10 * X + 2 * L) + pairs * (5 * X + 2 * L)) + 2 * u * X
    return 3 * A + 35 * X + 8 * L, host, out, back, LAYERS * u * (8 * X + L) * (P - 1) // P


def check(S: int, chunks: list[int], group: dist.ProcessGroup, device: str) -> list[str]:
    """Each number of chunks beside one process. Rank 0 prints; every rank returns what is wrong."""
    P, wrong, alone = group.size(), [], make_model(device)

    def dense(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = dense_loss(alone, tokens.to(device), labels.to(device))
        loss.backward()
        return loss.detach()

    titles = ["device at most", "host at most", "to the host", "from the host", "sent"]
    right = three_steps(alone, dense, S)
    say = print if group.rank() == 0 else lambda line: None
    say(f"{P} rank(s) on {device}, {S} tokens; bytes of rank 0 in a step, measured, * if equal to the formula")
    say(
        f"{'chunks':>6} {'buffers':>7} {'error':>8}" + "".join(f"{title:>16}" for title in titles) + "  idle   tokens/s"
    )
    for u, buffers in [(u, 2) for u in chunks] + [(chunks[-1], 1)]:
        link, model = Link(device, buffers), make_model(device)
        fpdt, start = FPDT(model, u, group, link), time.perf_counter()
        got, speed = three_steps(model, fpdt.step, S), 3 * S / (time.perf_counter() - start)
        error = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(got, right, strict=True)]).max().item()
        bad = [f"error {error:.1e}"] * (not error <= 1e-10)  # "not", so that NaN is wrong
        link, batch = Link(device, buffers), batch_of(0, S)
        fpdt = FPDT(model, u, group, link)
        with DeviceMemory() as memory:
            fpdt.step(*batch)
        counts, line = (memory.most, link.most, link.out, link.back, fpdt.sent), ""
        for title, count, formula in zip(titles, counts, formulas(S, P, u), strict=True):
            exact = title != "device at most" or (buffers == 2 and u > 2 and 64 * u <= S)
            bad += [f"{title} {count:,}, not {formula:,}"] * (exact and count != formula)
            line += f"{count:>15,}{'*' if count == formula else ' '}"
        idle = 1 - sum(b - a for stream, _, a, b in link.timeline if stream == "compute") / max(link.clock.values())
        found = [None] * P
        dist.all_gather_object(found, bad, group=group)
        wrong += [f"{u} chunks, {buffers} buffers, rank {r}: {x}" for r, some in enumerate(found) for x in some]
        say(f"{u:>6} {buffers:>7} {error:>8.1e}{line}  {idle:4.0%} {speed:>10,.0f}")
    return wrong


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def main() -> int:
    parser = OneLineParser(description="FPDT in one file", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=500, help="of the sequence; default %(default)s")
    parser.add_argument("--chunks", type=int, help="default: 1, 2, 4 and 8")
    args, P = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1"))
    if N % P:
        parser.error(f"--nproc_per_node {P} does not divide {N} heads; use 1, 2 or 4")
    if not 1 <= args.tokens <= 4096:
        parser.error(f"--tokens {args.tokens}: use 1 to 4096")
    if args.chunks is not None and not 1 <= args.chunks <= args.tokens:
        parser.error(f"--chunks {args.chunks}: use 1 to {args.tokens}, the number of tokens")
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=60), **alone)
    wrong = check(args.tokens, [args.chunks] if args.chunks else [1, 2, 4, 8], dist.group.WORLD, device)
    if dist.get_rank() == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
