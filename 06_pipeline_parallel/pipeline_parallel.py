"""Pipeline parallelism: cut the model between its layers, and keep every rank busy.

A model too deep for one GPU is cut into p stages, one behind the other; rank s holds stage s. Only one activation
crosses each cut, and its gradient on the way back. But a stage must wait for the one before it. So the batch is cut
into m micro-batches that follow one another, and all depends on the order in which each rank does what it has to do.

For one micro-batch j, a stage runs its forward, F. The backward has two parts: B towards its input, which the stage
before waits for, and W towards its weights, which only the optimizer needs. `y.backward()` does both: BW. Each of F, B
and W costs about one multiplication by each weight matrix, so they are drawn equally long, and BW is twice an F.

    naive    rank 0   F0          BW0-- F1          BW1-- F2          BW2--      one micro-batch at a time: one rank
             rank 1      F0 BW0--          F1 BW1--          F2 BW2--            works, the others wait
    afab     rank 0   F0 F1 F2          BW0-- BW1-- BW2--      all forward, all backward (GPipe): all work, but at the
             rank 1      F0 F1 F2 BW0-- BW1-- BW2--            turn each rank keeps what m backwards will need
    1f1b     rank 0   F0 F1       BW0-- F2 BW1--    BW2--      one forward, one backward: takes as long as afab, and a
             rank 1      F0 BW0-- F1 BW1-- F2 BW2--            rank keeps no more than p micro-batches

                                    naive      afab       1f1b
    idle time / time of the work    p - 1      (p-1)/m    (p-1)/m          the bubble, for stages of equal length
    micro-batches kept by rank s    1          m          min(p - s, m)
    bytes sent by a rank            m n to the next (activations, n bytes each), m n to the one before (gradients)

Huang et al. 2018, arXiv 1811.06965 (GPipe); Narayanan et al. 2021, 2104.04473, section 2.2 (1F1B).

    python pipeline_parallel.py                                                 one rank: gradient accumulation
    torchrun --nproc_per_node 4 pipeline_parallel.py --micro-batches 8          4 stages; gloo on CPUs, nccl on GPUs
Ends with PASS when loss, gradients and weights are those of one process to 1e-10, the numbers of each order are those
of this table, and an order of messages that has to deadlock did.
"""

import argparse
import os
import sys
import time
import tokenize
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn

# p stages on p ranks, s one of them; m micro-batches, j one of them; F, B, W, BW as above.
# b sequences in a micro-batch, T tokens in each, H numbers for a token (hidden size), V entries of the vocabulary.
T, H, V, IGNORE = 24, 32, 256, -100


class Block(nn.Module):
    """A layer of the decoder, with one head: [b, T, H] -> [b, T, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(H), nn.RMSNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)
        self.up, self.down = nn.Linear(H, 4 * H, bias=False), nn.Linear(4 * H, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)  # [b, T, H] each
        x = x + self.out(nnf.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nnf.gelu(self.up(self.norm2(x))))


def whole_model(blocks: int) -> nn.Sequential:
    """The same in every process. Embedding and head are not tied: one matrix on two stages would need a sum of both."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(H), nn.Linear(H, V, bias=False))
    return nn.Sequential(nn.Embedding(V, H), *(Block() for _ in range(blocks)), head).double()


def cut(model: nn.Sequential, s: int, p: int) -> nn.Sequential:
    """Stage s of p: its share of the blocks; the first also has the embedding, the last the head. Names are kept."""
    begin, end = (1 + i * (len(model) - 2) // p for i in (s, s + 1))  # of the blocks, between embedding and head
    return model[0 if s == 0 else begin : len(model) if s == p - 1 else end]


def batch_of(step: int, m: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [2m, T]. Not every label is valid, and in the last of several micro-batches none is."""
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    row = torch.arange(2 * m)[:, None]
    text = data[(row + 2 * m * step) * 50 % 20000 + torch.arange(T + 1)]
    labels = text[:, 1:].masked_fill((torch.arange(T) < row % T) | (row >= max(2, 2 * m - 2)), IGNORE)
    return text[:, :-1], labels


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum over tokens, to be divided by the number of all valid ones: an average of averages is another number."""
    return nnf.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


# ------------------------------------------------------------------------------------------------ what one stage does


class Stage:
    """One rank's layers, its messages, and what it keeps of the micro-batches that are under way."""

    def __init__(self, layers: nn.Module, group: dist.ProcessGroup):
        self.layers, self.group, self.s, self.p = layers, group, dist.get_rank(group), dist.get_world_size(group)
        self.previous = self.s - 1 if self.s > 0 else None  # before the first stage and after the last there is nobody
        self.next = self.s + 1 if self.s < self.p - 1 else None

    def step(self, order: Callable, m: int, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward of a batch in m equal micro-batches. Adds to each `.grad`; all ranks get the loss."""
        self.tokens, self.labels = tokens.tensor_split(m), labels.tensor_split(m)  # m of [b, T]
        self.example = next(self.layers.parameters()).new_empty(*self.tokens[0].shape, H)  # every message is [b, T, H]
        self.valid = (labels != IGNORE).sum().item()
        self.loss = torch.zeros((), dtype=torch.float64, device=tokens.device)
        self.kept, self.peak, self.sent, self.waits_to, self.events = {}, 0, 0, "", []
        order(self, m)
        dist.all_reduce(self.loss, group=self.group)  # 0 but on the last rank: now everyone knows it
        return self.loss

    # --- exercise 6.1: one message ---
    def send(self, x: Tensor, to: int | None) -> None:
        """Blocks until the other side has taken it. What is sent must lie in one run of bytes."""
        if to is not None:
            self.waits_to, x = f"send to rank {to}", x.contiguous()
            dist.send(x, group=self.group, group_dst=to)
            self.sent += x.nbytes

    def receive(self, source: int | None) -> Tensor | None:
        """Waits for the activation, or the gradient, of the next micro-batch. None where there is nobody to send it."""
        if source is None:
            return None
        self.waits_to, x = f"receive from rank {source}", torch.empty_like(self.example)
        dist.recv(x, group=self.group, group_src=source)
        return x

    # --- end exercise ---

    def forward(self, j: int, x: Tensor | None) -> Tensor:
        """F: what the stage before sent -> what goes to the next. The first stage gets None: it has tokens."""
        # --- exercise 6.2: forward of one stage: where its graph begins, where it ends, and what is kept ---
        x = self.tokens[j] if x is None else x.requires_grad_()  # the graph of this rank begins here
        y = self.layers(x)
        if self.next is None:
            y = loss_sum(y, self.labels[j]) / self.valid  # by the number of the whole batch, so that sums remain
            self.loss += y.detach()
        self.kept[j] = x, y
        # --- end exercise ---
        self.peak = max(self.peak, len(self.kept))
        self.events.append(("F", j))
        return y.detach()

    def backward(self, j: int, gradient: Tensor | None) -> Tensor | None:
        """BW: the gradient of what forward returned -> that of what it got. The last stage has a loss and gets None."""
        # --- exercise 6.3: backward of one stage ---
        x, y = self.kept.pop(j)  # and with x and y goes the graph between them
        y.backward(gradient)  # adds to the gradients of the weights, micro-batch after micro-batch
        # --- end exercise ---
        self.events.append(("BW", j))
        return x.grad


# ----------------------------------------------------------------------------------------------------- three orders


def naive(stage: Stage, m: int) -> None:
    """One micro-batch goes down through all stages and comes up again; then the next one."""
    for j in range(m):
        y = stage.forward(j, stage.receive(stage.previous))
        stage.send(y, stage.next)
        dx = stage.backward(j, stage.receive(stage.next))
        stage.send(dx, stage.previous)


def all_forward_all_backward(stage: Stage, m: int) -> None:
    """The same lines in two loops: while micro-batch j is with the next stage, j + 1 is here."""
    # --- exercise 6.4: two loops ---
    for j in range(m):
        y = stage.forward(j, stage.receive(stage.previous))
        stage.send(y, stage.next)
    for j in range(m):
        dx = stage.backward(j, stage.receive(stage.next))
        stage.send(dx, stage.previous)
    # --- end exercise ---


def send_then_receive(stage: Stage, x: Tensor, peer: int | None) -> Tensor | None:
    """Deadlocks. In 1F1B two neighbours come to this line together, and each waits for the other to receive."""
    stage.send(x, peer)
    return stage.receive(peer)


def both_at_once(stage: Stage, x: Tensor, peer: int | None) -> Tensor | None:
    """The message for the peer and the one from it, started as one: neither has to come first."""
    if peer is None:
        return None
    # --- exercise 6.5: two messages that cross ---
    x, got = x.contiguous(), torch.empty_like(stage.example)
    there = dist.P2POp(dist.isend, x, group=stage.group, group_peer=peer)
    back = dist.P2POp(dist.irecv, got, group=stage.group, group_peer=peer)
    for work in dist.batch_isend_irecv([there, back]):  # on nccl, too: what is started one by one runs one by one
        work.wait()  # for both: `got` is not there before, and x must not be touched before it has left
    stage.sent += x.nbytes
    return got
    # --- end exercise ---


def one_forward_one_backward(stage: Stage, m: int, exchange: Callable = both_at_once) -> None:
    """When the first gradient reaches stage s, p - 1 - s newer micro-batches are on their way through the stages after
    it: so many forwards come first. Then each forward is followed by the backward of a micro-batch that many older,
    which frees what it kept; between two stages, what goes down and what comes up cross."""
    # --- exercise 6.6: 1F1B ---
    ahead = min(stage.p - 1 - stage.s, m)
    for j in range(ahead):  # warm-up
        y = stage.forward(j, stage.receive(stage.previous))
        stage.send(y, stage.next)
    x = stage.receive(stage.previous) if ahead < m else None
    for j in range(m - ahead):  # steady: forward of j + ahead, backward of j
        y = stage.forward(j + ahead, x)
        gradient = exchange(stage, y, stage.next)
        dx = stage.backward(j, gradient)
        if j + ahead + 1 < m:
            x = exchange(stage, dx, stage.previous)
        else:
            stage.send(dx, stage.previous)
    for j in range(m - ahead, m):  # the rest comes back
        dx = stage.backward(j, stage.receive(stage.next))
        stage.send(dx, stage.previous)
    # --- end exercise ---


ORDERS = {"naive": naive, "afab": all_forward_all_backward, "1f1b": one_forward_one_backward}


def would_deadlock(group: dist.ProcessGroup) -> str:
    """Run 1F1B with `send_then_receive`. Returns where this rank was stuck, or ""."""
    dist.barrier(group)  # so that all ranks enter together a group whose messages give up after two seconds
    limit, ranks = timedelta(seconds=2), dist.get_process_group_ranks(group)
    doomed = dist.new_group(ranks, backend="gloo", timeout=limit, use_local_synchronization=True)
    stage = Stage(cut(whole_model(len(ranks)), dist.get_rank(group), len(ranks)), doomed)
    try:
        stage.step(partial(one_forward_one_backward, exchange=send_then_receive), 2, *batch_of(0, 2))
        return ""
    except RuntimeError:
        return f"rank {stage.s} waits to {stage.waits_to}"
    finally:
        dist.destroy_process_group(doomed)


def timetable(orders: list[list[tuple[str, int]]]) -> list[list[tuple[str, int, int, int]]]:
    """(kind, j, start, end) of what each rank did, in its recorded order, if F took 1, BW 2 and a message no time: it
    starts when the rank is free and what it needs is there, F of the stage before or BW of the next."""
    length = {"F": 1, "BW": 2}

    @cache
    def end(s: int, i: int) -> int:  # when action i of rank s is done
        kind, j = orders[s][i]
        peer = s - 1 if kind == "F" else s + 1
        there = end(peer, orders[peer].index((kind, j))) if 0 <= peer < len(orders) else 0
        return max(there, end(s, i - 1) if i > 0 else 0) + length[kind]

    return [[(*x, end(s, i) - length[x[0]], end(s, i)) for i, x in enumerate(row)] for s, row in enumerate(orders)]


def draw(rows: list[list[tuple[str, int, int, int]]]) -> str:
    """Three characters for a unit of time; what is longer than a line of the terminal is cut off."""
    lines = [""] * len(rows)
    for s, row in enumerate(rows):
        for kind, j, start, end in row:
            box = f"{kind}{j}".ljust(3 * (end - start) - 1, "-" if kind == "BW" else " ")
            lines[s] = lines[s].ljust(3 * start) + box + " "
    return "\n".join(f"    rank {s}   {line[:100]}{'...' * (len(line) > 100)}" for s, line in enumerate(lines))


# ------------------------------------------------------------------------------------------------------- the proof


def three_steps(layers: nn.Module, step_of: Callable, m: int, device: str) -> dict[str, Tensor]:
    """Plain SGD, which forgives no wrong scale. Losses, the last gradients and the weights, by name."""
    result = {}
    for step in range(3):
        layers.zero_grad()
        loss = step_of(*(x.to(device) for x in batch_of(step, m)))
        if loss.requires_grad:  # the pipeline has done its backward
            loss.backward()
        result[f"loss {step}"] = loss.detach()
        for w in layers.parameters():
            w.data -= 0.1 * w.grad
    for name, w in layers.named_parameters():
        result |= {f"gradient of {name}": w.grad, name: w.data}
    return result


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: str) -> list[str]:
    """Each order beside one process. Rank 0 prints; every rank returns what is wrong."""
    s, p, m, wrong = dist.get_rank(group), dist.get_world_size(group), args.micro_batches, []
    alone, everyone, say = whole_model(args.layers).to(device), [None] * p, print if s == 0 else lambda line: None
    right = three_steps(alone, lambda x, y: loss_sum(alone(x), y) / (y != IGNORE).sum(), m, device)
    for name in [args.order] if args.order else ORDERS:
        stage, began = Stage(cut(whole_model(args.layers), s, p).to(device), group), time.perf_counter()
        mine = three_steps(stage.layers, partial(stage.step, ORDERS[name], m), m, device)
        speed = 3 * 2 * m * T / (time.perf_counter() - began)
        error = torch.stack([(x - right[key]).abs().max() for key, x in mine.items()]).max().item()  # NaN stays NaN
        weights = sum(w.nbytes for w in stage.layers.parameters())
        dist.all_gather_object(everyone, (error, stage.peak, stage.sent, weights, stage.events), group=group)
        errors, peaks, sent, weights, events = zip(*everyone, strict=True)
        rows = timetable(events)
        say(f"{name}   {speed:,.0f} tokens/s; bytes of weights by rank {weights}\n{draw(rows)}")
        idle = max(end for row in rows for *_, end in row) - 3 * m  # the work of each rank takes 3 m
        keeps = tuple({"naive": 1, "afab": m, "1f1b": min(p - r, m)}[name] for r in range(p))
        sends = tuple(m * (2 * T * H * 8) * ((r > 0) + (r < p - 1)) for r in range(p))
        bubble = (p - 1) / (1 if name == "naive" else m)
        for what, got, formula in (
            ("idle time / time of the work", round(idle / (3 * m), 6), round(bubble, 6)),
            ("micro-batches kept, by rank", peaks, keeps),
            ("bytes sent in a step, by rank", sent, sends),
        ):
            say(f"    {what:32} {got}   by formula {formula}")
            wrong += [f"{name}: {what} {got}, not {formula}"] if got != formula else []
        say(f"    {'largest error':32} {max(errors):.1e}   at most 1e-10\n")
        wrong += [f"{name}: rank {r} is off by {e:.1e}" for r, e in enumerate(errors) if not e <= 1e-10]
    dist.all_gather_object(everyone, would_deadlock(group), group=group)
    say(f"1f1b, sending before it receives: {'; '.join(everyone) if p > 1 else 'one rank sends nothing'}")
    wrong += ["1f1b did not deadlock when it sent before it received"] if p > 1 and not all(everyone) else []
    say("FAIL: " + "; ".join(wrong) if wrong else "PASS")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Three orders of a pipeline, in one file.", allow_abbrev=False)
    say = print if os.environ.get("RANK", "0") == "0" else lambda *_, **__: None  # one line, and not one for each rank
    parser.error = lambda words: (say(f"{parser.prog}: {words}", file=sys.stderr), sys.exit(2))
    parser.add_argument("--order", choices=list(ORDERS), help="default: all three")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--layers", type=int, default=6)
    args, p, gpus = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count()
    for name, lowest in (("micro_batches", 1), ("layers", p)):
        if not lowest <= (value := getattr(args, name)) <= 64:
            parser.error(f"--{name.replace('_', '-')} {value}: on {p} rank(s) use {lowest} to 64")
    if 0 < gpus < (local := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        parser.error(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    device, backend = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if gpus else "cpu", {"backend": "gloo"}
    if gpus:
        torch.cuda.set_device(device)
        backend = {"backend": "nccl", "device_id": torch.device(device)}
    one = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**backend, **one, timeout=timedelta(seconds=60))
    wrong = demo(args, dist.group.WORLD, device)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
