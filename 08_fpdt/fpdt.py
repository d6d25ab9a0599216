"""FPDT: train on a sequence that no GPU can hold, chunk by chunk, with help of the host's memory.

Ulysses (chapter 5) gives each of cp ranks all S tokens of some heads. At two million tokens even
these do not fit: queries, keys, values and output of a layer, and a gradient of each. But under a
causal mask a chunk of the sequence needs only its own keys and values (K/V) and those of earlier
chunks. So u chunks are computed one after another. Their K/V are copied to the host, whose memory
is several times larger, and back into a buffer on the device whenever a later chunk needs them. For
the backward pass, queries, output and log-sum-exp (LSE) of each chunk are stored there as well:

    compute  | q2.kv2 | q2.kv0 | q2.kv1 | q3.kv3 |        What makes it fast: the computation
    h2d      | kv0 | kv1 |              | kv0 | kv1 |     reads one buffer while a copy fills the
    d2h          | kv2 |                | q2 | out2 |     other. A third stream copies to the host.

The backward pass swaps the loops. The outer one is over K/V of chunk j, the inner one over the
queries of all chunks i >= j. Feed-forward layers and the loss look at one token at a time, so they
also run chunk by chunk, and again in the backward pass. On the device are some chunks, whatever S
is, and S/cp tokens of the residual stream and attention's output; `expected_bytes`: host, links.

Sources: Yao et al. 2024, arXiv 2408.16978, section 4 (FPDT); Luo et al. 2024, 2407.15892 (feed-
forward, loss); Dao 2023, 2307.08691, algorithms 1 and 2 (online softmax and its backward pass).

    python fpdt.py                                      one rank
    torchrun --nproc_per_node 4 fpdt.py --chunks 8      NCCL on GPUs, Gloo on CPUs

It trains a small model for three steps next to a reference in one process, in one chunk and in
several with one and two buffers. PASS at the end: losses, gradients and parameters agree to 1e-10,
and bytes copied, stored on the host and sent match the formulas.
"""

import argparse
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import chain

import torch
import torch._dynamo  # else imported late, by dispatch modes, and then it keeps the group alive
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Shapes: a sequence of S tokens on cp ranks has u chunks of c = S/u tokens, of which a rank stores
# s = c/cp. Of N query heads and N_kv K/V heads, with D elements each, it has n and m between the
# all-to-alls. The queries of the G = N/N_kv heads of a K/V head are one matrix of G c rows.


# --------------------------- Attention of a chunk: an online softmax over chunks of keys and values
def to_fp32(x: Tensor) -> Tensor:
    """Sums over many terms need fp32: bf16 and fp16 are converted, fp64 stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q [m, G c, D], k [m, c, D] -> q k^T / sqrt(D), [m, G c, c]."""
    scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
    if causal:  # queries and keys of the same chunk
        c = k.shape[1]
        hidden = torch.ones(c, c, dtype=torch.bool, device=q.device).triu_(1)
        scores.unflatten(1, (-1, c)).masked_fill_(hidden, -torch.inf)
    return scores


def chunk_attention(q: Tensor, kv_chunks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Queries of one chunk attend to its own K/V, which come first, and to any earlier ones.

    q [m, G c, D], each of kv_chunks [2, m, c, D] -> out [m, G c, D] and LSE [m, G c, 1]. The chunks
    may be on the host, if each is copied when the loop comes to it. This is simple and exact:

        out, lse = chunk_attention(q2, (kv.to(q2.device) for kv in (kv2, kv0, kv1)))

    But the computation waits for each copy, and autograd saves the probabilities of all pairs.
    """
    dtype = q.dtype
    q = to_fp32(q)
    acc = torch.zeros_like(q)
    l_i = torch.zeros_like(q[..., :1])
    m_i = torch.full_like(l_i, -torch.inf)
    for index, kv in enumerate(kv_chunks):
        k, v = to_fp32(kv)
        # --- exercise 8.1: online softmax ---
        scores = attention_scores(q, k, causal=index == 0)
        m_new = torch.maximum(m_i, scores.detach().amax(-1, keepdim=True))
        alpha = (m_i - m_new).exp()  # what was summed relative to a lower maximum counts less now
        p = scores.sub_(m_new).exp_()
        l_i = l_i * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ v
        m_i = m_new
        del scores, p  # before the next pair allocates its own
        # --- end exercise ---
    return (acc / l_i).to(dtype), l_i.log() + m_i


# --------------------------------------------- Host memory: two streams for copies, and two buffers
class HostOffloader:
    """Copies tensors to the host and back while the GPU computes, which takes pinned memory.

    Computation and copies in each direction ("h2d": host to device) have a stream of their own, a
    queue of work. Streams run side by side, and can wait for an event in another. Four waits:

        copy to the host      until the tensor has been computed              offload
        copy to the device    until the tensor has arrived on the host        start_h2d_copy
        copy to the device    until all readers are done with the buffer      start_h2d_copy
        computation           until the copy has filled the buffer            read
    """

    def __init__(self, device: torch.device, num_buffers: int = 2):
        self.device = device
        self.num_buffers = num_buffers
        self.device_module = torch.get_device_module(device)  # torch.cpu's streams do nothing
        self.streams = {name: self.device_module.Stream(device) for name in ("h2d", "d2h")}

    def record_event(self, stream: str):
        event = self.device_module.Event()
        event.record(self.streams.get(stream))  # None for "compute": the current stream
        return event

    def wait_event(self, event, reader: str, name: str) -> None:
        event.wait()  # the computation waits; a log can tell that `reader` reads tensor `name` next

    def start_copy(self, stream: str, dst: Tensor, src: Tensor, wait_for: list, name: str):
        """Start a copy after these events. Returns the event of its end."""
        with self.device_module.stream(self.streams[stream]):
            for event in wait_for:
                event.wait()
            dst.copy_(src, non_blocking=True)
        if src.is_cuda:  # Python may free it now, but its memory is in use until the copy ends
            src.record_stream(self.streams[stream])
        return self.record_event(stream)

    def empty_host(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=self.device.type == "cuda")

    def offload(self, host_tensors: dict[str, tuple], name: str, x: Tensor) -> None:
        """Start to copy x to the host. x must not be written to before the copy ends."""
        computed = self.record_event("compute")
        data = host_tensors[name][0] if name in host_tensors else self.empty_host(x)
        stored = self.start_copy("d2h", data, x, [computed], name)
        host_tensors[name] = (data, stored)  # and the event of its arrival

    def prefetch_iter(self, host_tensors, items, reader="", reader_streams=("compute",)):
        """Yields `items`, lists of names of host tensors, on the device. First copies start now.

        Ask for the next item only when `reader_streams` have been given all work on this one.
        """
        buffers = []
        for names in items[: self.num_buffers]:
            tensors = [host_tensors[name][0] for name in names]
            buffers.append([torch.empty_like(x, device=self.device) for x in tensors])
        ready_events = []  # of the items whose copies have started

        def start_h2d_copy() -> None:
            """Start to copy the next item into its buffer. Items use the buffers in turn."""
            # --- exercise 8.2: what must a copy wait for? ---
            # Also before a buffer's first use: its memory may still be read as an older tensor.
            free_events = [self.record_event(stream) for stream in reader_streams]
            names = items[len(ready_events)]
            for dst, name in zip(buffers[len(ready_events) % len(buffers)], names, strict=True):
                src, stored = host_tensors[name]
                ready = self.start_copy("h2d", dst, src, [*free_events, stored], name)
            ready_events.append(ready)  # a stream keeps its order, so the last copy ends last
            # --- end exercise ---

        def read() -> Iterator[list[Tensor]]:
            # --- exercise 8.3: double buffering ---
            for index, names in enumerate(items):
                self.wait_event(ready_events[index], reader, names[0])
                yield buffers[index % len(buffers)]
                if len(ready_events) < len(items):
                    start_h2d_copy()  # into the buffer just used; the next item is in flight
            # --- end exercise ---

        for _ in buffers:
            start_h2d_copy()
        return read()


# ----------------------------------------------------------------------------- Ulysses on one chunk
class AllToAllComm:
    """All-to-alls over one group, and the bytes that they send to other ranks."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.cp = dist.get_world_size(group)
        self.bytes_sent = 0

    def all_to_all(self, x: Tensor) -> Tensor:
        """x[r] is sent to rank r, and [r] of the result comes from rank r."""
        recv = x.new_empty(x.shape)  # empty_like would keep the strides of a transposed x
        dist.all_to_all_single(recv, x.contiguous(), group=self.group)
        self.bytes_sent += x.nbytes // self.cp * (self.cp - 1)
        return recv


def token_positions(seq_len: int, num_chunks: int, rank: int, cp: int) -> Tensor:
    """Positions of this rank's tokens in the sequence, [S/cp], in ascending order."""
    # --- exercise 8.4: which tokens does a rank store? ---
    # A part of every chunk: an all-to-all must give all tokens of one chunk, in order.
    return torch.arange(seq_len).view(num_chunks, cp, -1)[:, rank].flatten()
    # --- end exercise ---


def seq_to_heads(tensors: Iterable[Tensor], comm: AllToAllComm) -> list[Tensor]:
    """Some tokens, all heads -> all tokens, some heads: [s, heads, D] -> [heads/cp, c, D]."""
    # --- exercise 8.5: the all-to-all before attention ---
    rows = []
    for x in tensors:
        x = x.unflatten(1, (comm.cp, -1))  # [s, cp, heads/cp, D]
        rows.append(x.permute(1, 2, 0, 3))  # [cp, heads/cp, s, D]: what each rank gets
    x = comm.all_to_all(torch.cat(rows, dim=1))  # in one message -> what each rank has sent
    x = x.transpose(0, 1).flatten(1, 2)  # [sum of heads/cp, cp, s, D] -> [sum of heads/cp, c, D]
    return list(x.split([row.shape[1] for row in rows]))
    # --- end exercise ---


def heads_to_seq(tensors: list[Tensor], comm: AllToAllComm) -> list[Tensor]:
    """The way back, also in one message: each [heads/cp, c, D] -> [s, heads, D]."""
    x = torch.cat(tensors).unflatten(1, (comm.cp, -1))  # [sum of heads/cp, cp, s, D]
    x = comm.all_to_all(x.transpose(0, 1))  # [cp, sum of heads/cp, s, D] -> all-to-all
    x = x.permute(2, 0, 1, 3)  # [s, cp, sum of heads/cp, D]
    parts = x.split([len(tensor) for tensor in tensors], dim=2)
    return [part.flatten(1, 2) for part in parts]


# ---------------------------------------------------------------- FPDT: both passes over the chunks
def forward_chunk(i: int, x: Tensor, project_qkv, host_tensors, offloader, comm, save: bool):
    """Attention of chunk i, from x [s, H] to [s, N D]; `save` for the backward pass."""
    earlier = offloader.prefetch_iter(host_tensors, [[f"kv{j}"] for j in range(i)], f"q{i}")
    q, k, v = seq_to_heads(project_qkv(x), comm)  # [n, c, D], [m, c, D] twice
    shape = q.shape
    kv = torch.stack((k, v))  # [2, m, c, D]
    q = q.reshape(len(k), -1, q.shape[-1])  # [m, G c, D]
    offloader.offload(host_tensors, f"kv{i}", kv)
    out, lse = chunk_attention(q, chain([kv], (buffer for (buffer,) in earlier)))
    if save:
        for name, tensor in {"q": q, "out": out, "lse": lse}.items():
            offloader.offload(host_tensors, f"{name}{i}", tensor)
    (out,) = heads_to_seq([out.view(shape)], comm)
    return out.flatten(1)


def chunk_attention_backward(dq, dkv, q, kv, out, dout, lse, causal: bool) -> None:
    """Add the partial gradients of one pair of chunks to dq and dkv, in fp32 or better."""
    # `out` and `lse` are those of *all* keys. So e^(score - LSE) is the probability in the full
    # softmax, dout . out is the sum of p * dp over all keys, and no other pair is needed.
    q, out, dout = (to_fp32(x) for x in (q, out, dout))
    k, v = to_fp32(kv)
    p = attention_scores(q, k, causal).sub_(lse).exp_()  # [m, G c, c]
    dkv[1] += p.mT @ dout
    delta = (dout * out).sum(-1, keepdim=True)  # the derivative of the softmax subtracts this
    ds = (dout @ v.mT).sub_(delta).mul_(p).mul_(q.shape[-1] ** -0.5)
    dkv[0] += ds.mT @ q
    dq += ds @ k


def backward_row(j: int, kv: Tensor, host_tensors, num_chunks: int, offloader) -> list[Tensor]:
    """All pairs of chunk j's K/V [2, m, c, D]. Returns dq, dk and dv of chunk j, now complete."""
    # --- exercise 8.6: the inner loop of the backward pass ---
    order = range(num_chunks - 1, j - 1, -1)  # the chunk's own queries last: then dq is complete
    items = []
    for i in order:
        items.append([f"{name}{i}" for name in ("q", "out", "dout", "lse", "dq")])
    # dq leaves from the buffer into which it was copied, so copies to the host read it as well.
    queries = offloader.prefetch_iter(host_tensors, items, f"kv{j}", ("compute", "d2h"))
    dkv = torch.zeros_like(to_fp32(kv))
    for i, (q, out, dout, lse, dq) in zip(order, queries, strict=True):
        chunk_attention_backward(dq, dkv, q, kv, out, dout, lse, causal=i == j)
        if i > j:
            offloader.offload(host_tensors, f"dq{i}", dq)  # the next row adds to it
    dk, dv = dkv
    dq = dq.view(-1, *dk.shape[1:])  # [n, c, D]
    # --- end exercise ---
    return [dq, dk, dv]


class FPDTAttention(torch.autograd.Function):
    """x [S/cp, H] -> attention [S/cp, N D]; `project_qkv` maps [s, H] to q, k, v [s, heads, D]."""

    @staticmethod
    def forward(ctx, x, project_qkv, num_chunks: int, offloader, comm, save: bool, *params):
        host_tensors = {}  # by name: the tensor, and the event of its arrival on the host
        outs = []
        for i, x_chunk in enumerate(x.chunk(num_chunks)):
            out = forward_chunk(i, x_chunk, project_qkv, host_tensors, offloader, comm, save)
            outs.append(out)
        # Not as attributes of ctx: autograd frees what it has saved as soon as backward has run.
        ctx.save_for_backward(x, *[data for data, _ in host_tensors.values()])
        ctx.names = list(host_tensors)
        ctx.args = project_qkv, num_chunks, offloader, comm, params
        return torch.cat(outs)

    @staticmethod
    def backward(ctx, dout: Tensor):
        x, *saved = ctx.saved_tensors
        project_qkv, num_chunks, offloader, comm, params = ctx.args
        stored = offloader.record_event("d2h")  # later than all copies of the forward pass
        host_tensors = dict(zip(ctx.names, [(data, stored) for data in saved], strict=True))
        q_shape = host_tensors["q0"][0].shape  # [m, G c, D]
        dx, *param_grads = [torch.zeros_like(to_fp32(tensor)) for tensor in (x, *params)]
        for i, dout_chunk in enumerate(dout.chunk(num_chunks)):
            (dout_i,) = seq_to_heads([dout_chunk.unflatten(1, (-1, q_shape[-1]))], comm)
            offloader.offload(host_tensors, f"dout{i}", dout_i.reshape(q_shape))
            offloader.offload(host_tensors, f"dq{i}", dx.new_zeros(q_shape))
            del dout_i
        rows = offloader.prefetch_iter(host_tensors, [[f"kv{j}"] for j in range(num_chunks)])
        for j, (kv,) in enumerate(rows):
            dqkv = backward_row(j, kv, host_tensors, num_chunks, offloader)
            dqkv = heads_to_seq([grad.to(x.dtype) for grad in dqkv], comm)  # [s, heads, D]
            with torch.enable_grad():  # the projections again, to backpropagate through them
                x_chunk = x.chunk(num_chunks)[j].detach().requires_grad_()
                qkv = project_qkv(x_chunk)
            partial_grads = torch.autograd.grad(qkv, (x_chunk, *params), dqkv)
            sums = (dx.chunk(num_chunks)[j], *param_grads)
            for grad, partial_grad in zip(sums, partial_grads, strict=True):
                grad += partial_grad
            del dqkv, x_chunk, qkv, partial_grads, partial_grad  # before the next row allocates
        grads = [grad.to(x.dtype) for grad in (dx, *param_grads)]
        return grads[0], None, None, None, None, None, *grads[1:]


def fpdt_attention(x: Tensor, project_qkv, params, num_chunks: int, offloader, comm) -> Tensor:
    save = torch.is_grad_enabled()  # inside of apply it is always off, even in training
    return FPDTAttention.apply(x, project_qkv, num_chunks, offloader, comm, save, *params)


# -------------------------------------------------------------------------------- The training step
def checkpointed_chunks(f, num_chunks: int, *xs: Tensor) -> Tensor:
    """f looks at one token at a time: compute chunk by chunk, and again in the backward pass."""
    chunks = zip(*[x.chunk(num_chunks) for x in xs], strict=True)
    return torch.cat([checkpoint(f, *chunk, use_reentrant=False) for chunk in chunks])


def shard_sequence(tokens: Tensor, num_chunks: int, rank: int, cp: int):
    """This rank's tokens, their labels and their positions, all [S/cp]."""
    # Labels are shifted before the sequence is split: the label of a part's last token is on
    # another rank or in another chunk. Padding has no labels, and no token before it sees it.
    padding = -len(tokens) % (num_chunks * cp)
    labels = F.pad(tokens[1:], (0, 1 + padding), value=IGNORE_INDEX)
    tokens = F.pad(tokens, (0, padding))
    positions = token_positions(len(tokens), num_chunks, rank, cp).to(tokens.device)
    return tokens[positions], labels[positions], positions


def forward_backward(model: nn.ModuleList, shard, num_chunks: int, offloader, comm) -> Tensor:
    """Returns the loss of the full sequence; gradients are complete on every rank."""
    tokens, labels, positions = shard
    # The loss of a rank's tokens is divided by the labels of *all* ranks. So the ranks hold parts
    # of one loss, and their gradients are summed, not averaged.
    num_labels = (labels != IGNORE_INDEX).sum()
    dist.all_reduce(num_labels, group=comm.group)
    x = model[0](tokens) + model[1](positions)  # [S/cp, H]; positions in the *full* sequence
    for block in model[2:-1]:
        attn = fpdt_attention(x, block.project_qkv, block.qkv_params(), num_chunks, offloader, comm)
        x = checkpointed_chunks(block.after_attention, num_chunks, x, attn)

    def loss_sum(x: Tensor, labels: Tensor) -> Tensor:  # logits exist for one chunk at a time
        logits = model[-1](x)
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")[None]

    loss = checkpointed_chunks(loss_sum, num_chunks, x, labels).sum() / num_labels
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=comm.group)
    loss = loss.detach()
    dist.all_reduce(loss, group=comm.group)  # only for the log
    return loss


# ---------------------------------------------------------------------------- The model, in float64
VOCAB = 256
HIDDEN = 64
N_HEADS = 8
N_KV_HEADS = 4
HEAD_DIM = 8
N_LAYERS = 2
SEQ_LEN = 500
IGNORE_INDEX = -100  # a label that is no target


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.RMSNorm(HIDDEN)
        self.q_proj = nn.Linear(HIDDEN, N_HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, N_KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, N_KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(N_HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.mlp_norm = nn.RMSNorm(HIDDEN)
        self.up_proj = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def qkv_params(self) -> list[nn.Parameter]:
        return [m.weight for m in (self.attn_norm, self.q_proj, self.k_proj, self.v_proj)]

    def project_qkv(self, x: Tensor) -> list[Tensor]:  # [s, H] -> [s, N or N_kv, D]
        h = self.attn_norm(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return [proj(h).unflatten(1, (-1, HEAD_DIM)) for proj in projections]

    def after_attention(self, x: Tensor, attn: Tensor) -> Tensor:  # [s, H], [s, N D] -> [s, H]
        x = x + self.o_proj(attn)
        return x + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x))))


def build_model(device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)  # the same initial parameters on every rank
    model = nn.ModuleList()
    model.append(nn.Embedding(VOCAB, HIDDEN))  # tokens
    model.append(nn.Embedding(2 * SEQ_LEN, HIDDEN))  # positions, with some for padding
    model.extend(Block() for _ in range(N_LAYERS))
    model.append(nn.Linear(HIDDEN, VOCAB, bias=False))
    return model.to(device, torch.float64)


# ------------------------------------------------------- The check: three steps next to a reference
class CountingOffloader(HostOffloader):
    """Counts the bytes that are copied by each stream, and those that are alive on the host."""

    def __init__(self, device: torch.device, num_buffers: int = 2):
        super().__init__(device, num_buffers)
        self.bytes_copied = Counter[str]()
        self.host_storages = weakref.WeakValueDictionary()  # those that are alive
        self.max_host_bytes = 0

    def start_copy(self, stream: str, dst: Tensor, src: Tensor, wait_for: list, name: str):
        self.bytes_copied[stream] += src.nbytes
        return super().start_copy(stream, dst, src, wait_for, name)

    def empty_host(self, x: Tensor) -> Tensor:
        data = super().empty_host(x)
        self.host_storages[data.untyped_storage()._cdata] = data.untyped_storage()
        self.max_host_bytes = max(self.max_host_bytes, self.host_bytes())
        return data

    def host_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.host_storages.values())


def reference_loss(model: nn.ModuleList, tokens: Tensor) -> Tensor:
    """The mean over all labels, with the full sequence in one process and PyTorch's attention."""
    x = model[0](tokens) + model[1].weight[: len(tokens)]
    for block in model[2:-1]:
        q, k, v = (y.transpose(0, 1)[None] for y in block.project_qkv(x))  # [1, heads, S, D]
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = block.after_attention(x, attn[0].transpose(0, 1).flatten(1))
    return F.cross_entropy(model[-1](x)[:-1], tokens[1:])


def train_next_to_reference(num_chunks: int, seq_len: int, offloader, comm) -> float:
    """Three steps of both; returns the largest relative error of loss, gradients and parameters."""
    model = build_model(offloader.device)
    reference = build_model(offloader.device)
    pairs = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, [seq_len], generator=generator).to(offloader.device)
        shard = shard_sequence(tokens, num_chunks, comm.rank, comm.cp)
        loss = forward_backward(model, shard, num_chunks, offloader, comm)
        expected_loss = reference_loss(reference, tokens)
        expected_loss.backward()
        pairs.append((loss, expected_loss.detach()))
        for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
            p.data = p.data - 0.1 * p.grad  # plain SGD: Adam would hide a wrong scale
            expected.data = expected.data - 0.1 * expected.grad
            pairs += [(p.grad, expected.grad), (p.data, expected.data)]
            p.grad = None
            expected.grad = None
    errors = [(x - expected).abs().max() / expected.abs().max() for x, expected in pairs]
    return torch.stack(errors).max().item()  # NaN if any error is NaN


def expected_bytes(seq_len: int, cp: int, num_chunks: int, b: int = 8) -> dict[str, int]:
    """Bytes of a step, by the README's table with Q' = Q and L in b bytes, so for b >= 4."""
    u = num_chunks
    c = -(-seq_len // (u * cp)) * cp  # with padding
    Q = c * N_HEADS // cp * HEAD_DIM * b  # of a chunk: q, out, dout or dq
    K = 2 * c * N_KV_HEADS // cp * HEAD_DIM * b  # keys and values
    L = c * N_HEADS // cp * b  # log-sum-exp
    pairs = u * (u + 1) // 2
    return {
        "copied to the host": N_LAYERS * (u * (3 * Q + K + L) + pairs * Q),
        "copied to the device": N_LAYERS * pairs * (4 * Q + K + L),
        "stored on the host": u * (N_LAYERS * (2 * Q + K + L) + 2 * Q),
        "sent": N_LAYERS * u * (4 * Q + 2 * K) * (cp - 1) // cp,
    }


def check(num_chunks: int, num_buffers: int, seq_len: int, group, device) -> bool:
    """Train in chunks. True if everything agrees on all ranks."""
    offloader = CountingOffloader(device, num_buffers)
    comm = AllToAllComm(group)
    error = train_next_to_reference(num_chunks, seq_len, offloader, comm)
    counted = {
        "copied to the host": offloader.bytes_copied["d2h"] // 3,
        "copied to the device": offloader.bytes_copied["h2d"] // 3,
        "stored on the host": offloader.max_host_bytes,
        "sent": comm.bytes_sent // 3,
    }
    expected = expected_bytes(seq_len, comm.cp, num_chunks)
    passed = torch.tensor(error <= 1e-10 and counted == expected, device=device).int()  # NaN fails
    if comm.rank == 0 or not passed:
        print(f"chunks {num_chunks}, buffers {num_buffers}: largest error {error:.1e}")
        for what in expected:
            print(f"    bytes {what} per step {counted[what]:,}, by formula {expected[what]:,}")
    dist.all_reduce(passed, dist.ReduceOp.MIN, group=group)
    return bool(passed)


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
    parser = argparse.ArgumentParser(description="FPDT in one file", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--chunks", type=int, choices=range(1, 26), default=4, metavar="1..25")
    args = parser.parse_args()
    cp = int(os.environ.get("WORLD_SIZE", 1))
    if N_KV_HEADS % cp:
        fail(f"--nproc_per_node {cp}: must divide the {N_KV_HEADS} K/V heads")
    device = init_distributed()
    cases = ((1, 1), (args.chunks, 1), (args.chunks, 2))  # chunks, buffers
    passed = [check(*case, SEQ_LEN, dist.group.WORLD, device) for case in cases]
    if dist.get_rank() == 0:
        print("PASS" if all(passed) else "FAIL")
    dist.destroy_process_group()
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
