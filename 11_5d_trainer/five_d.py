"""Five axes of parallelism in one file: data, tensor (with sequence), context, pipeline and expert; and ZeRO-1.

A large model has all problems at once: too many layers, too large matrices, too long sequences, too many experts, too
much data. Each technique cuts something else, and knows only its own group. So lay the ranks out on a grid: each group
is a line or a slab of it, and is given to its technique. The mistakes that are left lie between the techniques.

    axis  chapter  cuts                    sends                                                        in a step
    dp    02, 03   the batch               gradients: reduce-scatter; weights: all-gather (ZeRO-1)      once
    tp    04       matrices, and tokens    activations: all-gather in, reduce-scatter out, and back     M times a layer
    cp    05       a sequence, in zigzag   keys and values: once round a ring; their gradients back     M times a layer
    pp    06       the layers              activations to the next stage, gradients to the one before   M times
    ep    07       the experts             tokens to their experts and back: all-to-all                 M times a layer

    16 ranks on a grid [pp 2, dp 2, cp 2, tp 2]                  rank 5 (stage 0, dp 1, cp 0, tp 1) has
                    cp 0    cp 1                cp 0    cp 1     layers 0 and 1, of their matrices the second half;
    stage 0   dp 0  0  1    2  3     stage 1    8  9   10 11     the second half of the samples; chunks 0 and 3 of their
              dp 1  4  5    6  7               12 13   14 15     4 chunks (zigzag), outside the matrices half of these

ep needs no ranks of its own. Between the matrices all ranks of a stage hold different tokens, and any of them can be
where an expert lives: ep neighbours together hold all experts of a layer. For the same reason one table says who sums
which gradient: those who hold the same weights, and have used them for other tokens.

    weight                          cut into       summed over               because
    q, k, v, o, gate, up, down      tp pieces      dp x cp                   tp ranks hold other pieces
    norms, router, embed, head      nothing        stage = dp x cp x tp      all of the stage saw other tokens
    w1, w3, w2 (experts)            ep pieces      same experts of a stage   their neighbours' tokens came to them

Nothing is averaged: the loss is a sum over tokens, divided by the labels of the whole global batch. ZeRO-1 cuts each of
the three sums into shards, which their owners update. Every number of the model is then owned by one rank of the world,
so the norm of the gradient is a sum over all ranks, in which nothing counts twice.

    python five_d.py                                                                one rank, gloo or nccl
    torchrun --nproc_per_node 16 five_d.py --pp 2 --cp 2 --tp 2 --ep 2              dp is what remains: 2
    torchrun --nproc_per_node 4 five_d.py --tp 2 --ep 2 --train 300                 learns, and writes a sample
Ends with PASS when losses, gradients, norms and weights of three steps are those of one process to 1e-10, bytes those
of the formulas. Left out: balance of experts (07), words cut by tp (04). Sources: arXiv 2104.04473 and 2407.21783.
"""

import argparse
import math
import os
import sys
import tokenize
import zlib
from collections import Counter, deque, namedtuple
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch._dynamo  # and torch; torch.optim imports it: while a group is up, that would keep it to the end
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

# S tokens of a sequence (with zeros at the end, a multiple of 2 cp tp), s = S / cp on a context rank; b sequences
# in each of M micro-batches. H hidden size, N query and N_kv key/value heads of D numbers; E experts, of which a token
# uses K; V words. Activations are [s / tp, b, H]: what a tp group gathers lies end to end. Lines [n P], shards [P].
V, IGNORE = 256, -100  # bytes; a label that is no target
Config = namedtuple("Config", "layers hidden heads kv_heads inner experts top_k length batch micro_batches dtype")
TINY = Config(4, 32, 8, 4, 24, 4, 2, 45, 32, 4, torch.float64)  # dtype: what is computed with
MODEL = Config(4, 128, 8, 4, 352, 4, 2, 128, 32, 4, torch.float32)  # for --train
COLUMNS, ROWS, EXPERTS = ("q", "k", "v", "gate", "up"), ("o", "down"), ("w1", "w3", "w2")  # of experts: gate, up, down
Weights, LIMIT = dict[str, Tensor], timedelta(seconds=120)  # of a collective; new groups, unless told, wait 30 minutes
sent: Counter[str] = Counter()  # bytes that have left this rank, by what their group is called
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ----------------------------------------------------------------------------------------- 01: the model, and the whole
def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))  # bf16 to fp32, in which long sums are safe


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))  # kept in fp32: so gradients add up in fp32 over the micro-batches, too


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return (weight * wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [s, b, n, D] by the tokens' places in the whole sequence, whoever holds them; angles in fp32."""
    exponent, (a, b) = torch.arange(0, x.shape[-1], 2, device=x.device).float() / x.shape[-1], x.chunk(2, -1)
    angle = positions[:, None, None, None].float() * (1.0 / 10000.0**exponent)  # [s, 1, 1, D/2]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).to(x.dtype)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def whole_weights(config: Config) -> Weights:
    """Each drawn from its own name: the same model in every layout."""
    H, FF, E, kv = config.hidden, config.inner, config.experts, config.kv_heads * config.hidden // config.heads
    layer = {"norm1": (H,), "norm2": (H,), "q": (H, H), "k": (kv, H), "v": (kv, H), "o": (H, H)}
    layer |= {"router": (E, H), "w1": (E, FF, H), "w3": (E, FF, H), "w2": (E, H, FF)} if E else {}
    layer |= {} if E else {"gate": (FF, H), "up": (FF, H), "down": (H, FF)}
    shapes = {"embed": (V, H), "norm": (H,), "head": (V, H)}
    shapes |= {f"{i}.{name}": shape for i in range(config.layers) for name, shape in layer.items()}
    seeds = {name: torch.Generator().manual_seed(zlib.crc32(name.encode())) for name in shapes}
    drawn = {name: torch.randn(s, generator=seeds[name]).double() / math.sqrt(s[-1]) for name, s in shapes.items()}
    return {name: 1 + x if "norm" in name else x for name, x in drawn.items()}


# ----------------------------------------------------------------------- the grid of ranks, and what each of them holds
class Mesh:
    """The sizes of the axes, this rank's place on each, and its groups. `ranks` may be a part of the world."""

    def __init__(self, ranks: list[int], pp: int, cp: int, tp: int, ep: int):
        # --- exercise 11.1: the grid of ranks, and all groups of each kind ---
        grid = torch.tensor(ranks).view(pp, -1, cp, tp)  # neighbours in the last axis, which sends most often
        stages = grid.flatten(1)  # [pp, dp cp tp]
        rows = stages.unflatten(1, (-1, ep))  # [pp, rows, ep]
        lines = {  # [groups of this kind, ranks of each]
            "tp": grid.flatten(0, 2),
            "cp": grid.movedim(2, 3).flatten(0, 2),
            "pp": stages.T,
            "ep": rows.flatten(0, 1),
            "dp x cp": grid.flatten(1, 2).mT.flatten(0, 1),  # [pp, dp cp, tp] -> [pp tp, dp cp]
            "stage": stages,
            "same experts": rows.mT.flatten(0, 1),  # one of each row
            "all": grid.view(1, -1),
        }
        # --- end exercise ---
        (self.pp, self.dp, self.cp, self.tp), self.ep, me = grid.shape, ep, dist.get_rank()
        self.stage, self.dp_rank, self.cp_rank, self.tp_rank = (grid == me).nonzero()[0].tolist()
        self.group: dict[str, dist.ProcessGroup] = {}
        for name, groups in lines.items():
            mine = next(line for line in groups.tolist() if me in line)
            self.group[name] = dist.new_group(mine, LIMIT, use_local_synchronization=True, group_desc=name)


def layers_of(stage: int, config: Config, mesh: Mesh) -> range:
    return range(stage * config.layers // mesh.pp, (stage + 1) * config.layers // mesh.pp)


def place_of(name: str, config: Config, mesh: Mesh) -> tuple[int, int, int] | None:
    """(pieces, piece, dim): what this rank holds of a weight is `whole.chunk(pieces, dim)[piece]`. None: nothing."""
    layer, _, kind = name.rpartition(".")
    i = int(layer or (0 if kind == "embed" else config.layers - 1))  # norm and head are with the last layer
    if i not in layers_of(mesh.stage, config, mesh):
        return None
    if kind in COLUMNS or kind in ROWS:  # [out, in]: columns, and so heads, are cut in dim 0
        return mesh.tp, mesh.tp_rank, int(kind in ROWS)
    return (mesh.ep, mesh.group["ep"].rank(), 0) if kind in EXPERTS else (1, 0, 0)


def my_pieces(whole: Weights, config: Config, mesh: Mesh) -> Weights:
    places = {name: place for name in whole if (place := place_of(name, config, mesh)) is not None}
    return {name: whole[name].chunk(pieces, dim)[piece] for name, (pieces, piece, dim) in places.items()}


def gather_whole(mine: Weights, config: Config, mesh: Mesh) -> Weights:
    """The way back, on every rank: from everyone's pieces to whole tensors, in host memory."""
    everyone, found = [{}] * mesh.group["all"].size(), {}
    placed = {(n, *place_of(n, config, mesh)): w.detach().to("cpu", copy=True) for n, w in mine.items()}
    dist.all_gather_object(everyone, placed, group=mesh.group["all"])
    pieces = {place: piece for each in everyone for place, piece in each.items()}  # replicas are equal
    for name, _, index, dim in sorted(pieces):
        found.setdefault((name, dim), []).append(pieces[name, _, index, dim])
    return {name: torch.cat(pieces, dim) for (name, dim), pieces in found.items()}


# -------------------------------------------------------------------------------------- messages that have a derivative
class Message(torch.autograd.Function):  # `there` carries x, `back` the gradient of what arrived to where it came from
    @staticmethod
    def forward(ctx, x: Tensor, there, back) -> Tensor:
        ctx.back = back
        return there(x.contiguous())

    @staticmethod
    def backward(ctx, g: Tensor):
        return ctx.back(g.contiguous()), None, None


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """04, g: before columns, all tokens of the tp group. Every rank's products used them, so backward is `summed`."""
    whole = x.new_empty(group.size() * len(x), *x.shape[1:])
    all_gather_single(whole, x, group=group)  # [s/tp, b, H] -> all-gather -> [s, b, H]
    sent[group.group_desc] += whole.nbytes - x.nbytes  # as a ring sends it
    return whole


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """04, g*: behind rows, a rank has a share of a sum; its own tokens' sums remain. It goes back by `gathered`."""
    mine = x.new_empty(len(x) // group.size(), *x.shape[1:])
    reduce_scatter_single(mine, x, group=group)  # [s, b, H] -> reduce-scatter -> [s/tp, b, H]
    sent[group.group_desc] += x.nbytes - mine.nbytes
    return mine


def swapped(x: Tensor | None, to: int, got: Tensor | None, source: int, group: dist.ProcessGroup) -> Tensor | None:
    """Send x to one rank and receive `got` from another, at once: if all sent first, nobody would listen."""
    both = [(f, y, peer) for f, y, peer in ((dist.isend, x, to), (dist.irecv, got, source)) if y is not None]
    works = [dist.P2POp(f, y, group=group, group_peer=peer) for f, y, peer in both if 0 <= peer < group.size()]
    for work in dist.batch_isend_irecv(works) if works else []:
        work.wait()
    sent[group.group_desc] += x.nbytes if x is not None and 0 <= to < group.size() else 0
    return got if 0 <= source < group.size() else None  # before the first stage and after the last there is nobody


def rotated(x: Tensor, group: dist.ProcessGroup, step: int) -> Tensor:
    """05: to the next rank of the ring, from the one before. It goes back the other way round."""
    (rank, c), got = (group.rank(), group.size()), torch.empty_like(x)
    return swapped(x, (rank + step) % c, got, (rank - step) % c, group)


def exchanged(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """07: the first send[0] rows of x to rank 0 of the group, and so on. Back by the same, send and receive swapped."""
    y = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(y, x, receive, send, group=group)  # [n, H] -> all-to-all -> [n', H]
    sent[group.group_desc] += x.nbytes - x[: send[group.rank()]].nbytes  # what a rank keeps does not leave it
    return y


# ------------------------------------------------------------------------------- 05: context parallel, a ring in zigzag
def piece(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention to some keys: out [s, b, N, D] and the log of its denominators [s, b, N], in fp32 or better."""
    k, v = (wide(x).repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))  # here only, and never sent
    scores = torch.einsum("sbnd,tbnd->sbnt", wide(q), k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores + torch.full_like(scores[:, 0, 0], -math.inf).triu(1)[:, None, None]
    lse = scores.logsumexp(-1)
    return torch.einsum("sbnt,tbnd->sbnd", (scores - lse[..., None]).exp(), v), lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both, exactly: the denominators e^LSE add, and each output weighs with its share."""
    total = torch.logaddexp(lse, more_lse)
    return (lse - total).exp()[..., None] * out + (more_lse - total).exp()[..., None] * more, total


def ring(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Causal attention of tokens in zigzag: this rank has an early chunk and a late one. All ranks' K/V come by."""
    rank, half, kv = group.rank(), len(q) // 2, torch.stack((k, v))
    # --- exercise 11.2: keys and values go round; what do my two chunks see of each other rank's two? ---
    out, lse = piece(q, *kv, causal=True)
    for t in range(1, group.size()):
        kv = Message.apply(kv, partial(rotated, group=group, step=1), partial(rotated, group=group, step=-1))
        if rank >= t:  # of an earlier rank: its early chunk is before both of mine, its late one after them
            out, lse = merge(out, lse, *piece(q, *kv[:, :half], causal=False))
        else:  # of a later rank: both its chunks are between mine
            late = merge(out[half:], lse[half:], *piece(q[half:], *kv, causal=False))
            out, lse = (torch.cat((x[:half], new)) for x, new in zip((out, lse), late, strict=True))
    # --- end exercise ---
    return out.to(q.dtype)


def positions_of(length: int, mesh: Mesh) -> Tensor:
    """Where in the sequence the tokens of this rank's tp group stand: [s], a chunk and its mirror image of 2 cp."""
    chunks = torch.arange(length + -length % (2 * mesh.cp * mesh.tp)).chunk(2 * mesh.cp)
    return torch.cat((chunks[mesh.cp_rank], chunks[2 * mesh.cp - 1 - mesh.cp_rank]))


def cut(tokens: Tensor, labels: Tensor, config: Config, mesh: Mesh) -> list[tuple[Tensor, Tensor]]:
    """The global batch [batch, length], its labels already shifted -> M micro-batches of this rank, [s/tp, b] each."""
    # --- exercise 11.3: my samples, and of each of them my tokens ---
    positions, mine = positions_of(config.length, mesh).to(tokens.device), []
    for x, zero in ((tokens, 0), (labels, IGNORE)):
        x = x.chunk(mesh.dp)[mesh.dp_rank]  # dp: some samples
        x = F.pad(x, (0, len(positions) * mesh.cp - config.length), value=zero)[:, positions]  # cp: -> [., s]
        x = x.chunk(mesh.tp, 1)[mesh.tp_rank]  # tp: [., s] -> [., s/tp]
        mine.append(x.T.chunk(config.micro_batches, 1))  # M of [s/tp, b]
    return list(zip(*mine, strict=True))
    # --- end exercise ---


# ----------------------------------------------------------------------------- a layer, and what a stage of layers does
def moe(x: Tensor, w: Weights, i: int, config: Config, group: dist.ProcessGroup) -> Tensor:
    """07: x [T, H] of this rank -> the same. w1, w3, w2 are those of its E/ep experts, the router is whole."""
    K, ep, each = config.top_k, group.size(), config.experts // group.size()
    best, experts = F.linear(wide(x), w[f"{i}.router"]).softmax(-1).topk(K)  # [T, K]; in bf16, experts would tie
    share = best / best.sum(-1, keepdim=True) if K > 1 else best  # of 1 it is 1: no gradient for the router
    order = experts.flatten().argsort(stable=True)  # pairs of token and expert, by expert and hence by rank, too
    send = torch.bincount(experts.flatten(), minlength=config.experts)  # [E]
    receive = exchanged(send, [each] * ep, [each] * ep, group).view(ep, each)  # from each rank, for each of my experts
    out, back = send.view(ep, each).sum(1).tolist(), receive.sum(1).tolist()  # rows for each rank, and from each
    sent["rows"] += sum(out) + sum(back) - 2 * out[group.rank()]  # a row, or its answer, leaves this rank
    there, home = (partial(exchanged, send=a, receive=b, group=group) for a, b in ((out, back), (back, out)))
    rows = Message.apply(x[order // K], there, home)  # [T K, H] -> [n', H], by sender, then by expert
    by_expert = torch.arange(each, device=x.device).repeat(ep).repeat_interleave(receive.flatten()).argsort(stable=True)
    parts = zip(rows[by_expert].split(receive.sum(0).tolist()), *(w[f"{i}.{n}"] for n in EXPERTS), strict=True)
    answers = torch.cat([swiglu(*part) for part in parts])  # zero rows have a gradient, too: zero, and not None
    answers = Message.apply(answers[by_expert.argsort()], home, there)  # [n', H] -> [T K, H]
    pairs = answers[order.argsort()].view(-1, K, x.shape[1])  # [T, K, H]
    return (pairs * share[..., None]).sum(1).to(x.dtype)


def run_stage(x: Tensor, w: Weights, config: Config, mesh: Mesh) -> Tensor:
    """Tokens [s/tp, b] on the first stage, else [s/tp, b, H] -> the same, or logits [s/tp, b, V] on the last."""
    gather, scatter = (partial(f, group=mesh.group["tp"]) for f in (gathered, summed))
    positions, D = positions_of(config.length, mesh).to(x.device), config.hidden // config.heads
    x = w["embed"][x].to(config.dtype) if mesh.stage == 0 else x
    for i in layers_of(mesh.stage, config, mesh):
        y = Message.apply(norm(x, w[f"{i}.norm1"]), gather, scatter)  # [s/tp, b, H] -> [s, b, H]
        q, k, v = (linear(y, w[f"{i}.{name}"]).unflatten(-1, (-1, D)) for name in "qkv")  # [s, b, N/tp or N_kv/tp, D]
        y = ring(rope(q, positions), rope(k, positions), v, mesh.group["cp"])  # [s, b, N/tp, D]
        x = x + Message.apply(linear(y.flatten(2), w[f"{i}.o"]), scatter, gather)  # [s, b, H] -> [s/tp, b, H]
        y = norm(x, w[f"{i}.norm2"])
        if config.experts:
            x = x + moe(y.flatten(0, 1), w, i, config, mesh.group["ep"]).view_as(x)  # to experts a token is a token
        else:
            y = swiglu(Message.apply(y, gather, scatter), *(w[f"{i}.{name}"] for name in ("gate", "up", "down")))
            x = x + Message.apply(y, scatter, gather)
    return linear(norm(x, w["norm"]), w["head"]) if mesh.stage == mesh.pp - 1 else x


# ----------------------------------------------------------------------------------------------- 06: the pipeline, 1F1B
def forward_backward(batch: list, targets: Tensor, w: Weights, config: Config, mesh: Mesh) -> Tensor:
    """Adds to all gradients, returns this rank's part of the loss. In turn j: forward of j, backward of j - ahead."""
    group, M, kept, loss = mesh.group["pp"], len(batch), deque(), torch.zeros_like(targets, dtype=torch.float64)
    ahead, before, after = min(mesh.pp - 1 - mesh.stage, M), mesh.stage - 1, mesh.stage + 1
    message = partial(torch.empty, *batch[0][0].shape, config.hidden, dtype=config.dtype, device=targets.device)
    x = swapped(None, before, message(), before, group)
    for j in range(M + ahead):
        y = dx = None
        if j < M:
            x = batch[j][0] if x is None else x.requires_grad_()  # the graph of this rank begins here
            y = run_stage(x, w, config, mesh)
            if after == mesh.pp:
                y = F.cross_entropy(wide(y).flatten(0, 1), batch[j][1].flatten(), ignore_index=IGNORE, reduction="sum")
                y = y / targets  # before backward, and by the labels of the whole batch: what remains are sums
                loss += y.detach()
            kept.append((x, y))
            y = y.detach().contiguous()
        gradient = swapped(y, after, message() if j >= ahead else None, after, group)
        if j >= ahead:
            x, y = kept.popleft()
            y.backward(gradient)
            dx = None if x.grad is None else x.grad.contiguous()
        x = swapped(dx, before, message() if j + 1 < M else None, before, group)
    return loss


# ---------------------------------------------------------------- 02, 03: who sums which gradient; ZeRO-1; the clipping
def summed_over(name: str) -> str:
    """Which group sums the gradient of a weight: the table on top."""
    kind = name.rpartition(".")[2]
    # --- exercise 11.4: who sums which gradient ---
    if kind in COLUMNS or kind in ROWS:
        return "dp x cp"
    if kind in EXPERTS:
        return "same experts"
    return "stage"
    # --- end exercise ---


class Line:
    """03: weights whose gradients the same group sums, end to end: n equal shards, one of them mine. `w` are views."""

    def __init__(self, pieces: Weights, group: dist.ProcessGroup):
        self.group, self.shapes = group, {name: p.shape for name, p in pieces.items()}
        self.weights = self.lay(pieces)  # [n P]
        self.gradients = torch.zeros_like(self.weights)
        self.shard = self.weights.chunk(group.size())[group.rank()]  # [P], a view: what is updated are the weights
        self.shard.grad = torch.zeros_like(self.shard)
        self.w, gradients = self.named(self.weights), self.named(self.gradients)
        for name, p in self.w.items():
            p.requires_grad_().grad = gradients[name]  # backward adds to it, micro-batch after micro-batch

    def lay(self, tensors: Weights) -> Tensor:
        line = torch.cat([tensors[name].flatten() for name in self.shapes])
        return F.pad(line, (0, -len(line) % self.group.size()))  # with zeros, which stay zero

    def named(self, line: Tensor) -> Weights:
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), line[: sum(sizes)].split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}


def make_lines(pieces: Weights, mesh: Mesh) -> list[Line]:
    overs = sorted({summed_over(name) for name in pieces})  # in one order on all ranks
    return [Line({n: x for n, x in pieces.items() if summed_over(n) == over}, mesh.group[over]) for over in overs]


def train_step(batch: list, lines: list[Line], optimizer, limit: float, config: Config, mesh: Mesh) -> tuple:
    """Loss and gradient norm of the global batch. The clipped gradient stays in the shards until the next step."""
    targets = torch.stack([(labels != IGNORE).sum() for _, labels in batch]).sum()
    dist.all_reduce(targets, group=mesh.group["stage"])  # 02: of all ranks that see other tokens
    loss = forward_backward(batch, targets.clamp(min=1), {n: p for x in lines for n, p in x.w.items()}, config, mesh)
    dist.all_reduce(loss, group=mesh.group["all"])  # only to show it: each rank of the last stage has a part
    # --- exercise 11.5: sum each gradient, and leave its shard to its owner ---
    works = []
    for line in lines:  # all on their way; then a wait for each
        works.append(reduce_scatter_single(line.shard.grad, line.gradients, group=line.group, async_op=True))  # [n P]
    for work in works:
        work.wait()  # -> [P], the sum
    # --- end exercise ---
    # --- exercise 11.6: clip by a norm over all axes, in which each number counts once ---
    square = torch.stack([line.shard.grad.double().square().sum() for line in lines]).sum()  # of what only I own
    dist.all_reduce(square, group=mesh.group["all"])  # all stages, all pieces, all experts
    norm = square.sqrt()
    for line in lines:
        line.shard.grad.mul_((limit / (norm + 1e-6)).clamp(max=1))  # as torch does it: never up
    # --- end exercise ---
    optimizer.step()  # of my shards
    for line in lines:
        all_gather_single(line.weights, line.shard.clone(), group=line.group)  # [P] -> all-gather -> [n P]
        line.gradients.zero_()
        sent["zero"] += 2 * (line.weights.nbytes - line.shard.nbytes)  # by rings, there and back
    return loss.item(), norm.item()


# ------------------------------------------------------------------------------------------------------------ the proof
def batch_of(data: Tensor, seed: int, config: Config, prompts: bool) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a global batch, [batch, length]. `prompts`: the later a sample, the fewer labels it has."""
    begin = torch.randint(len(data) - config.length, (config.batch, 1), generator=torch.Generator().manual_seed(seed))
    both, ahead = data[begin + torch.arange(config.length + 1)], torch.arange(config.batch)[:, None] * config.length
    prompt = torch.arange(config.length) * max(config.batch - 4, 1) < ahead * prompts
    return both[:, :-1], both[:, 1:].masked_fill(prompt, IGNORE)


def formulas(lines: list[Line], config: Config, mesh: Mesh, states: int, rows: int) -> dict[str, int]:
    """Bytes held, with `states` numbers of the optimizer a weight, and sent in a step, `rows` rows of it to experts."""
    layers, M, e = len(layers_of(mesh.stage, config, mesh)), config.micro_batches, config.dtype.itemsize
    x = len(positions_of(config.length, mesh)) * config.batch // (mesh.dp * M) * config.hidden * e  # [s, b, H]
    kv = 2 * x * config.kv_heads // (config.heads * mesh.tp)  # K and V of this rank's heads
    whole, own = (sum(x.nbytes for x in part) for part in zip(*((n.weights, n.shard) for n in lines), strict=True))
    return {
        "held": 2 * whole + (1 + states) * own,  # weights, gradients; sums of gradients, optimizer
        "tp": 4 * (1 if config.experts else 2) * layers * M * x * (mesh.tp - 1) // mesh.tp,  # x gathered, and scattered
        "cp": 2 * layers * M * (mesh.cp - 1) * kv,  # K/V once round, their gradients back
        "pp": ((mesh.stage > 0) + (mesh.stage < mesh.pp - 1)) * M * x // mesh.tp,
        "ep": 2 * rows * config.hidden * e
        + layers * M * (mesh.ep - 1) * config.experts // mesh.ep * 8,  # rows, as routed; counts
        "zero": 2 * (whole - own),
    }


def check(config: Config, mesh: Mesh, device: torch.device, data: Tensor) -> list[str]:
    """Three steps of plain SGD, one of them clipped, beside one process: the same on a mesh of this rank alone."""
    alone, whole = Mesh([dist.get_rank()], 1, 1, 1, 1), {n: x.to(device) for n, x in whole_weights(config).items()}
    lines, right = make_lines(my_pieces(whole, config, mesh), mesh), make_lines(whole, alone)
    optimizer, reference = (torch.optim.SGD([line.shard for line in x], lr=0.1) for x in (lines, right))
    everyone, errors, losses = [([], [])] * mesh.group["all"].size(), {}, []
    for step, limit in enumerate((math.inf, 0.5, math.inf)):
        batch = [x.to(device) for x in batch_of(data, step, config, prompts=True)]
        want_loss, want_norm = train_step(cut(*batch, config, alone), right, reference, limit, config, alone)
        sent.clear()
        loss, norm = train_step(cut(*batch, config, mesh), lines, optimizer, limit, config, mesh)
        errors |= {f"loss {step}": abs(loss - want_loss), f"norm {step}": abs(norm - want_norm)}
        losses.append(f"{loss:.6f}")
        want = my_pieces({n: x for line in right for n, x in line.named(line.shard.grad).items()}, config, mesh)
        for line in lines:
            error = line.shard.grad - line.lay(want).chunk(line.group.size())[line.group.rank()]
            errors[f"gradient summed over {line.group.group_desc}, step {step}"] = error.abs().max().item()
    want = my_pieces({n: x.detach() for line in right for n, x in line.w.items()}, config, mesh)
    errors |= {n: (x.detach() - want[n]).abs().max().item() for line in lines for n, x in line.w.items()}
    wrong = [f"{what} is off by {error:.1e}" for what, error in errors.items() if not error <= 1e-10]  # so NaN is
    kept = [x for line in lines for p in (*line.w.values(), line.shard) for x in (p, p.grad)]
    held = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())
    got, want = Counter(sent, held=held), formulas(lines, config, mesh, 0, sent["rows"])
    wrong += [f"bytes of {what} {got[what]:,}, not {n:,}" for what, n in want.items() if got[what] != n]
    mine = list(errors.values()), [f"rank {dist.get_rank()}: {words}" for words in wrong]
    dist.all_gather_object(everyone, mine, group=mesh.group["all"])
    if mesh.group["all"].rank() == 0:
        worst = max((e for theirs, _ in everyone for e in theirs), key=lambda e: (e != e, e))  # a NaN is the worst
        print(f"losses {' '.join(losses)}; largest error {worst:.1e}; bytes of rank 0:")
        for title, row in (("", {what: what for what in want}), ("measured", got), ("by formula", want)):
            print(f"{title:12}" + "".join(f"{row[what]:>12}" for what in want), flush=True)
    return [words for _, theirs in everyone for words in theirs]


def train(config: Config, mesh: Mesh, device: torch.device, data: Tensor, steps: int) -> list[str]:
    """AdamW; no decay for norms, router, embedding, head. Ends with a sample, by rank 0 with the weights of all."""
    first = mesh.group["all"].rank() == 0
    whole = {name: x.to(device, torch.float32) for name, x in whole_weights(config).items()}
    lines = make_lines(my_pieces(whole, config, mesh), mesh)
    groups = [{"params": [x.shard], "weight_decay": 0.1 * (x.group.group_desc != "stage")} for x in lines]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=3e-4)
    for step in (bar := tqdm(range(steps), disable=not first, mininterval=1)):
        batch = (x.to(device) for x in batch_of(data, step, config, prompts=False))
        loss, norm = train_step(cut(*batch, config, mesh), lines, optimizer, 1.0, config, mesh)
        rate.step()
        bar.set_postfix(loss=f"{loss:.3f}", norm=f"{norm:.2f}")
        if not math.isfinite(norm):  # the same number on every rank: all leave
            return [f"in step {step} the loss is {loss} and the norm of its gradient {norm}"]
    whole = gather_whole({name: p for line in lines for name, p in line.w.items()}, config, mesh)
    if first:
        whole, alone = {name: p.to(device) for name, p in whole.items()}, Mesh([dist.get_rank()], 1, 1, 1, 1)
        text = data[: config.length, None].to(device)
        for _ in range(300):  # the last token of `length`, over and over
            logits = run_stage(text[-config.length :], whole, config, alone)[-1, 0].float()
            text = torch.cat((text, torch.multinomial((logits / 0.7).softmax(-1), 1)[None]))
        print(f"loss {loss:.3f}. It writes:\n\n{bytes(text[config.length :, 0].tolist()).decode(errors='replace')}")
    return []


def parse(words: list[str] | None, world: int) -> tuple[argparse.Namespace, Config]:
    """Options and sizes. What does not fit is refused here, in one line, before there is a process group."""
    parser = argparse.ArgumentParser(description="Five axes of parallelism in one file", allow_abbrev=False)
    line = "five_d.py: {}\n" if os.environ.get("RANK", "0") == "0" else ""  # one, and not one from each rank
    parser.error = lambda words: parser.exit(2, line.format(words))
    whats = {"pp": "stages; dp is what remains", "cp": "ranks that share a sequence", "tp": "ranks that share a matrix"}
    whats |= {"ep": "ranks that share the experts", "experts": "in a layer; 0: dense", "micro-batches": "of each rank"}
    for option, what in whats.items():
        parser.add_argument(f"--{option}", type=int, default=1 if len(option) == 2 else 4, help=what)
    parser.add_argument("--train", type=int, nargs="?", const=300, metavar="STEPS", help="learn text in so many steps")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="with --train (default fp32)")
    args = parser.parse_args(words)
    for name, value in vars(args).items():
        if isinstance(value, int) and value < (least := int(name != "experts")):
            parser.error(f"--{name.replace('_', '-')} {value} is too small; use {least} or more")
    if args.precision and not args.train:
        parser.error(f"--precision {args.precision} is for --train; without it there are three steps in float64")
    config = MODEL._replace(dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32) if args.train else TINY
    config = config._replace(experts=args.experts, top_k=min(2, args.experts), micro_batches=args.micro_batches)
    if args.pp > config.layers:
        parser.error(f"--pp {args.pp} is more than the {config.layers} layers; use 1 to {config.layers}")
    ranks = args.pp * args.cp * args.tp
    dp, stage, samples = world // ranks, world // args.pp, config.batch // max(world // ranks, 1)
    for option, value, n, what in (
        ("tp", args.tp, config.kv_heads, f"{config.kv_heads} key/value heads"),
        ("pp x --cp x --tp", ranks, world, f"{world} ranks"),
        ("nproc_per_node: dp", dp, config.batch, f"{config.batch} samples"),
        ("micro-batches", args.micro_batches, samples, f"{samples} samples of a rank"),
        ("ep", args.ep, math.gcd(config.experts or 1, stage), f"{config.experts} experts and {stage} ranks of a stage"),
    ):
        if n % value:
            right = " or ".join(str(i) for i in range(1, n + 1) if n % i == 0)
            parser.error(f"--{option} {value} does not divide {what}; use {right}")
    if 0 < (gpus := torch.cuda.device_count()) < (local := int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
        parser.error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")
    return args, config


def main() -> int:
    args, config = parse(None, int(os.environ.get("WORLD_SIZE", 1)))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=LIMIT, **alone)
    mesh = Mesh(list(range(dist.get_world_size())), args.pp, args.cp, args.tp, args.ep)
    if dist.get_rank() == 0:
        print(f"pp {mesh.pp} x dp {mesh.dp} x cp {mesh.cp} x tp {mesh.tp}, ep {mesh.ep}, on {device.type}")
    files = sorted(Path(tokenize.__file__).parent.glob("*.py"))  # the source of Python's standard library, as bytes
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    wrong = (partial(train, steps=args.train) if args.train else check)(config, mesh, device, data)
    if dist.get_rank() == 0 and (wrong or not args.train):
        print(f"FAIL: {'; '.join(wrong[:5])}" if wrong else "PASS")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
