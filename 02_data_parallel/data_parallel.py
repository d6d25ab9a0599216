"""Data parallelism: P copies of a model, each on its own part of the batch, and one sum that keeps them equal.

Problem. One GPU is too slow. So P ranks hold the same weights and work on different sequences. After backward they hold
P different gradients, and each needs the sum of all P before it may step: a message as large as the model, every time.

Idea. First the sum: an all-reduce that goes around a ring, so that no rank sends more than twice what it holds, however
many ranks there are. Then the waiting: backward completes the gradients of the last layer first, and they can travel
while it works on the layers below. Last the small messages: each costs a start (dots), so they share one: buckets.

    backward     ---h---g---f---e---d---c---b---a           h, ..., a: the parameters, last one first
    naive                                        ···hh···gg···ff···ee···dd···cc···bb···aa| step
    overlapped       ···hh···gg···ff···ee···dd···cc···bb···aa| step
    bucketed                 ···hhggff   ···eeddcc···bbaa| step

    rank r of P holds    all weights, and the gradients of its own part of the batch; after the sum, everyone's
    sent by each rank    2 (P-1)/P G bytes for gradients of G bytes    Patarasuk and Yuan 2009
    messages             one per parameter, or one per bucket          Li et al. 2020, arXiv 2006.15704, section 3.2

    python data_parallel.py                                        one rank
    torchrun --nproc_per_node 4 data_parallel.py                   four: gloo on CPUs, nccl on GPUs
    torchrun --nproc_per_node 4 data_parallel.py --bucket-kib 16
Ends with PASS when the loss, every gradient and the weights of each version are those of one process, to 1e-10.
"""

import argparse
import os
import sys
import time
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # Watch's base imports it; while a group is up, that would keep the group to the end
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Legend. P ranks; n numbers in a tensor.   B sequences of S tokens, H hidden size, V size of the vocabulary.
IGNORE = -100  # a label that is no target: padding, a prompt
Parameters = list[nn.Parameter]
MicroBatch = tuple[Tensor, Tensor]  # tokens and labels, both [B, S]


# -------------------------------------------------------------------------------------- the sum, from send and receive


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's tensor becomes the sum of them all, in place. Three ranks, with the tensors a, b and c:

                  rank 0              rank 1              rank 2
        start     a0   a1   a2        b0   b1   b2        c0   c1   c2      cut into P chunks
        step 0    a0   a1   ca2       ab0  b1   b2        c0   bc1  c2      0 has sent a0, 1 has sent b1, 2 has sent c2
        step 1    a0   bca1 ca2       ab0  b1   cab2      abc0 bc1  c2      each sent on what it had just added up
        step 2    abc0 bca1 ca2       ab0  bca1 cab2      abc0 bc1  cab2    complete sums go round: keep a copy
        step 3    abc0 bca1 cab2      abc0 bca1 cab2      abc0 bca1 cab2    all have all

    In every step each rank sends one chunk to its right and receives another from its left: no link is ever idle. After
    P-1 steps each chunk has visited all ranks and one of them knows its sum (a reduce-scatter); P-1 more carry the sums
    to everyone (an all-gather). 2 (P-1) steps of n/P numbers: each rank sends 2 (P-1)/P n.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    # view() refuses a tensor with gaps: the sum would land in a contiguous *copy*, and the caller would never see it.
    chunks = tensor.view(-1).tensor_split(ranks)  # [n] -> P views [n/P], the first ones longer by one if need be
    for step in range(2 * (ranks - 1)):
        # --- exercise 2.1: one step of the ring ---
        # Step 0 sends my own chunk, every other step what the one before has brought.
        going, coming = chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks]
        arrived = torch.empty_like(coming)
        # Both at once: if all ranks sent first and received afterwards, each would wait for one that does not listen.
        send = dist.P2POp(dist.isend, going, group=group, group_peer=right)  # [n/P] to the right
        receive = dist.P2POp(dist.irecv, arrived, group=group, group_peer=left)  # [n/P] from the left
        messages = [message for message in (send, receive) if message.tensor.numel()]  # n < P: some chunks are empty
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        if step < ranks - 1:
            coming += arrived  # a partial sum: it goes on to the right in the next step
        else:
            coming.copy_(arrived)  # a complete one. All ranks copy the same bits, so their weights never drift apart
        # --- end exercise ---


def broadcast_weights(model: nn.Module, group: dist.ProcessGroup) -> None:
    """All start from rank 0's, frozen ones too: equal gradients keep equal weights equal, and never make them equal."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), group_src=0, group=group)


def count_targets(micro_batches: list[MicroBatch], group: dist.ProcessGroup) -> Tensor:
    """N: how many labels are targets, in all micro-batches of all ranks. The loss is (sum over all targets) / N.

    If each rank divides its own sum by this N, then losses and gradients only have to be *added*: no average anywhere.
    Ranks have different numbers of targets (padding, prompts), and one may have none. An average of the ranks' means
    would weigh a token by the rank it happens to be on, and the 0/0 of one rank would be NaN on all.
    """
    # --- exercise 2.2: the number that every rank divides by ---
    count = torch.stack([(labels != IGNORE).sum() for _, labels in micro_batches]).sum()  # []
    dist.all_reduce(count, group=group)  # [], the sum over the ranks
    return count.clamp(min=1)  # no target anywhere: the loss is 0, not 0/0
    # --- end exercise ---


# ------------------------------------------------------------------------------------------------------ three versions
# Put one around the last backward of a step, and it leaves the sum over the group in every p.grad: see train_step.


def gradient(p: nn.Parameter) -> Tensor:
    """A parameter that this rank did not use has none; the others wait for its message all the same: zeros."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


@contextmanager
def naive(parameters: Parameters, group: dist.ProcessGroup) -> Iterator[None]:
    """Version 1: after backward, one gradient after the other. First the network idles, then everything else does."""
    yield
    # --- exercise 2.3: sum every gradient over the group ---
    for p in reversed(parameters):
        ring_all_reduce(gradient(p), group)
    # --- end exercise ---


@contextmanager
def hooked(parameters: Parameters, on_gradient: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Inside, backward calls `on_gradient(p)` once for each p, as soon as p.grad is complete (a tied weight's after its
    second use). The hook is handed the *parameter*: whoever reduces that averages weights, not gradients."""
    hooks = [p.register_post_accumulate_grad_hook(on_gradient) for p in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def overlapped(parameters: Parameters, group: dist.ProcessGroup) -> Iterator[None]:
    """Version 2: a gradient leaves as soon as it is complete, while backward goes on below it.

    `async_op=True` hands the tensor to a thread of gloo or a stream of nccl, and returns at once with a `work` whose
    wait() returns when the sum is there. Until then nobody may read or write the tensor. Messages are matched by their
    order alone, so all ranks must complete their gradients in the same order; version 3 need not.
    """
    # --- exercise 2.4: send in the hook, wait after backward ---
    works = []

    def send(p: nn.Parameter) -> None:
        works.append(dist.all_reduce(p.grad, group=group, async_op=True))  # in p's shape, the sum over the ranks

    with hooked(parameters, send):
        yield
    for work in works:  # for each of them: that the last one is done says nothing about the others
        work.wait()
    # --- end exercise ---


def cut_into_buckets(parameters: Parameters, bucket_bytes: int) -> list[Parameters]:
    """Last parameter first, roughly as backward completes them. One of `bucket_bytes` or more is a bucket of its own,
    which needs no copy; smaller ones share one until it holds so much, each dtype by itself: a flat tensor has one."""
    buckets, filling = [], {}
    for p in reversed(parameters):
        bucket = [] if p.nbytes >= bucket_bytes else filling.setdefault(p.dtype, [])
        bucket.append(p)
        if sum(q.nbytes for q in bucket) >= bucket_bytes:
            buckets.append(bucket if p.nbytes >= bucket_bytes else filling.pop(p.dtype))
    return [*buckets, *filling.values()]


@contextmanager
def bucketed(parameters: Parameters, group: dist.ProcessGroup, bucket_bytes: int = 25 * 2**20) -> Iterator[None]:
    """Version 3: neighbours travel together, in one flat tensor.

    It *becomes* their gradients: each p.grad is made a view of it, so nothing is copied back, and the single gradients
    are freed. `zero_grad()` at the end of the step frees the buckets, too, and the next forward has their memory.
    """
    buckets = cut_into_buckets(parameters, bucket_bytes)
    bucket_of = {p: index for index, bucket in enumerate(buckets) for p in bucket}
    works, missing = [], [len(bucket) for bucket in buckets]  # gradients that each bucket still waits for

    def send(bucket: Parameters) -> None:
        # --- exercise 2.5: the gradients of a bucket become views of one message ---
        parts = [gradient(p).flatten() for p in bucket]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]  # all shapes -> [n]; one alone needs no copy
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view_as(p)  # the memory of flat, in the shape of p
        works.append(dist.all_reduce(flat, group=group, async_op=True))  # [n], the sum over the ranks
        # --- end exercise ---

    def on_gradient(p: nn.Parameter) -> None:
        # --- exercise 2.6: which buckets may leave now? ---
        # Gradients may come in another order on every rank, messages must not, or two buckets of equal size are added
        # to each other. So bucket 1, full or not, waits until bucket 0 has left.
        missing[bucket_of[p]] -= 1
        while len(works) < len(buckets) and missing[len(works)] == 0:
            send(buckets[len(works)])
        # --- end exercise ---

    with hooked(parameters, on_gradient):
        yield
    for bucket in buckets[len(works) :]:  # on this rank some gradient of theirs never came
        send(bucket)
    for work in works:
        work.wait()


def train_step(model: nn.Module, batch: list[MicroBatch], version: Callable, group: dist.ProcessGroup) -> Tensor:
    """Returns the loss of the global batch, and leaves its gradient in every p.grad, on every rank."""
    parameters = [p for p in model.parameters() if p.requires_grad]  # a tied one stands here once
    targets, total = count_targets(batch, group), 0.0
    for i, (tokens, labels) in enumerate(batch):
        loss = loss_sum(model, tokens, labels) / targets  # divided before backward: we print the loss that we train
        with version(parameters, group) if i == len(batch) - 1 else nullcontext():
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total, group=group)  # [], only to print it: each rank knows its own part of the loss
    return total


# ----------------------------------------------------------------------------------------------- a model, and the proof


class Block(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H] -> [B, S, H]
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_model(hidden: int = 30, layers: int = 2) -> nn.Module:  # [B, S] -> [B, S, V], for bytes: V = 256
    embed, head = nn.Embedding(256, hidden), nn.Linear(hidden, 256, bias=False)
    head.weight = embed.weight  # tied: one parameter, used first and last, so its gradient is complete at the very end
    return nn.Sequential(embed, *(Block(hidden) for _ in range(layers)), nn.RMSNorm(hidden), head)


def loss_sum(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Sum, not mean, of the cross entropy over the targets: 0, and not NaN, where there is none."""
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def make_batch(step: int, ranks: int, device: torch.device | str = "cpu") -> list[list[MicroBatch]]:
    """The global batch, [rank][micro-batch], of Python's own source. Rank 0 keeps all of its labels, the last none."""
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    text = data[step * 1000 :][: ranks * 2 * 2 * 33].view(ranks, 2, 2, 33).to(device)  # two micro-batches a rank
    tokens, labels = text[..., :-1], text[..., 1:].clone()  # [P, 2, B, S]: B 2, S 32
    for rank in range(1, ranks):
        labels[rank, ..., 32 * (ranks - 1 - rank) // (ranks - 1) :] = IGNORE
    return [list(zip(*part, strict=True)) for part in zip(tokens, labels, strict=True)]


class Watch(TorchDispatchMode):
    """What torch.distributed is asked for, in order, with bytes. The order proves overlap; a CPU's clock cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        what = {"allreduce_": "all-reduce", "send": "send"}.get(func._opname)
        if func.namespace == "c10d" and what:
            self.events.append((what, sum(tensor.nbytes for tensor in args[0])))
        return func(*args, **(kwargs or {}))


def prove(version: Callable, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Three steps of plain SGD beside one process that has the whole batch. Prints a row, returns what is wrong."""
    rank, ranks, name = dist.get_rank(group), dist.get_world_size(group), getattr(version, "func", version).__name__
    torch.manual_seed(rank)  # other weights on every rank, on purpose: broadcast_weights heals it
    model = make_model().to(device, torch.float64)
    broadcast_weights(model, group)
    oracle, parameters, errors = deepcopy(model), list(model.parameters()), []
    for step in range(3):
        batch, watch, start = make_batch(step, ranks, device), Watch(), time.perf_counter()
        with watch, hooked(parameters, lambda _, events=watch.events: events.append(("ready", 0))):
            loss = train_step(model, batch[rank], version, group).item()
        seconds = time.perf_counter() - start
        tokens, labels = (torch.cat([pair[i] for part in batch for pair in part]) for i in (0, 1))  # [P * 2 * B, S]
        want = loss_sum(oracle, tokens, labels) / (labels != IGNORE).sum()
        want.backward()
        errors += [abs(loss - want.item())]
        held = sum({s.data_ptr(): s.nbytes() for p in parameters for s in [p.grad.untyped_storage()]}.values())
        for p, q in zip(parameters, oracle.parameters(), strict=True):
            errors += [((p.grad - q.grad).abs().max() / q.grad.abs().max()).item()]
            p.data -= 0.1 * p.grad  # plain SGD: Adam would forgive gradients that are P times too large
            q.data -= 0.1 * q.grad
            errors += [(p - q).abs().max().item()]
            p.grad = q.grad = None

    # What our ring sends is counted. Of torch's all-reduce we know what it was given: times the formula of the ring.
    sent = sum(size if what == "send" else size * 2 * (ranks - 1) / ranks for what, size in watch.events)
    whats = [what for what, _ in watch.events]  # of the last step; the first event is the all-reduce of N
    early = whats[1 : len(whats) - whats[::-1].index("ready")].count("all-reduce")  # before the last gradient was ready
    dist.all_gather_object(table := [()] * ranks, (errors, sent, early, held), group=group)
    worst = max((e for row in table for e in row[0]), key=lambda e: (e != e, e))  # a NaN is the worst
    sent, size = round(sum(row[1] for row in table)), sum(p.nbytes for p in parameters)
    # Of all ranks; the 16 bytes are N and the loss, which are all-reduced, too.
    formula, messages = 2 * (ranks - 1) * (size + 16), len(whats) - whats.count("ready") - 2  # all but N and the loss
    if rank == 0:
        line = f"{name:11}{worst:9.1e}{messages:10}{early:7}{sent:14,}{formula:12,}{held:11,}{size:11,}"
        print(f"{line}{labels.numel() / seconds:11,.0f}")
    wrong = [] if worst <= 1e-10 else [f"{name} is off by {worst:.1e}"]  # so written, NaN is wrong
    wrong += [] if sent == formula else [f"{name} sends {sent:,} bytes, not {formula:,}"]
    wrong += [] if all(row[3] == size for row in table) else [f"{name} does not hold {size:,} bytes of gradients"]
    early = name == "naive" or messages == 1 or all(row[2] for row in table)
    return wrong + ([] if early else [f"{name} sends nothing before backward ends"])


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{Path(sys.argv[0]).name}: {message}\n" if os.environ.get("RANK", "0") == "0" else None)


def main() -> None:
    parser = OneLineParser(description="Data parallelism in three versions.", allow_abbrev=False)
    parser.add_argument("--bucket-kib", type=int, default=64, help="a bucket is closed once it holds this much")
    kib, gpus, local = parser.parse_args().bucket_kib, torch.cuda.device_count(), os.environ.get("LOCAL_WORLD_SIZE", 1)
    if kib < 1:
        parser.error(f"--bucket-kib {kib} is too small; use 1 or more")
    if 0 < gpus < int(local):
        parser.error(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # one alone
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **alone)
    rank, wrong = dist.get_rank(), []
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, {device.type}. Sent: bytes of all ranks. Held: one rank's gradients.")
        print("version        error  messages  early          sent     formula       held    formula   tokens/s")
    for version in (naive, overlapped, partial(bucketed, bucket_bytes=kib * 1024)):
        wrong += prove(version, dist.group.WORLD, device)
    dist.destroy_process_group()
    if rank == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
