"""Data parallelism: train P copies of a model, each on its own part of the batch.

One GPU is too slow. So P ranks store the same parameters and work on different sequences. After
the backward pass each rank has the gradient of its own sequences only, but all must step with the
sum over all ranks: a message as large as the model, in every step.

There are three ways to sum, each of which adds one idea to the one before:

    naive       After the backward pass, all-reduce one gradient after the other. The all-reduce is
                a ring, so a rank sends less than twice the tensor, however many ranks there are.
    overlapped  The backward pass completes the gradients of the last layer first. All-reduce each
                one as soon as it is complete, while the backward pass goes on.
    bucketed    Every message pays a latency (dots), so small gradients share one: a bucket.

    backward     ---h---g---f---e---d---c---b---a       h, ..., a: the parameters, last one first
    naive                                        ···hh···gg···ff···ee···dd···cc···bb···aa| step
    overlapped       ···hh···gg···ff···ee···dd···cc···bb···aa| step
    bucketed                 ···hhggff   ···eeddcc···bbaa| step

                  each rank stores      each rank sends    messages per step
                  params    gradients   per step
    naive         Ψ         Ψ           2 Ψ (P-1)/P        2 (P-1) per parameter
    overlapped    Ψ         Ψ           2 Ψ (P-1)/P        one all-reduce per parameter
    bucketed      Ψ         Ψ           2 Ψ (P-1)/P        one all-reduce per bucket

Ψ is the number of parameters; the table counts elements.
Sources: Patarasuk and Yuan 2009 (ring); Li et al. 2020, arXiv 2006.15704, section 3.2 (buckets).

    python data_parallel.py                                        one rank
    torchrun --nproc_per_node 4 data_parallel.py                   NCCL on GPUs, Gloo on CPUs
    torchrun --nproc_per_node 4 data_parallel.py --bucket-kib 16   more and smaller messages

Each form trains a small model for three steps next to a reference that sees the full batch in one
process. The last line is PASS if all losses, gradients and parameters agree to 1e-10 and the bytes
stored and sent match the table; otherwise the exit code is 1.
"""

import argparse
import inspect
import os
import sys
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch._dynamo  # imported late, by CommRecorder, it would keep the process group alive
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Params = list[nn.Parameter]


# -------------------------------------------------------------------------------------------------
# The naive form: after the backward pass, a ring all-reduce for each gradient
# -------------------------------------------------------------------------------------------------

# Each of the three forms is a context manager, a `grad_sync`. Exactly one backward pass runs inside
# its block. After the block every p.grad is the sum over the ranks of the group.


@contextmanager
def naive(params: Params, group: dist.ProcessGroup) -> Iterator[None]:
    """First the GPU computes and the network is idle, then the other way round."""
    yield  # the backward pass
    # --- exercise 2.1: sum every gradient over the group ---
    for p in reversed(params):
        ring_all_reduce(grad_or_zeros(p), group)
    # --- end exercise ---


def grad_or_zeros(p: nn.Parameter) -> Tensor:
    """The gradient of p, or zeros if this rank did not use p: other ranks may have used it."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Replace the tensor of each rank by the sum over all ranks, in place.

    Three ranks with the tensors a, b and c, each split into three chunks:

                  rank 0              rank 1              rank 2
        before    a0   a1   a2        b0   b1   b2        c0   c1   c2
        step 0    a0   a1   ca2       ab0  b1   b2        c0   bc1  c2      rank 0 has sent a0
        step 1    a0   bca1 ca2       ab0  b1   cab2      abc0 bc1  c2      rank 0 has sent ca2
        step 2    abc0 bca1 ca2       ab0  bca1 cab2      abc0 bc1  cab2    rank 0 has sent bca1
        step 3    abc0 bca1 cab2      abc0 bca1 cab2      abc0 bca1 cab2    rank 0 has sent abc0

    In every step each rank sends one chunk to its right neighbour and receives another one from its
    left neighbour, so no link is idle. The first P-1 steps add: each chunk visits all ranks, and
    the last rank has its sum (a reduce-scatter). The other P-1 steps copy the sums to all ranks (an
    all-gather). In 2 (P-1) steps of n/P elements each rank sends 2 n (P-1)/P.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    # view() refuses a tensor with gaps: the sum would land in a contiguous copy of it, and the
    # caller's tensor would stay as it was.
    chunks = tensor.view(-1).tensor_split(world_size)  # [n] -> P views [n/P], some longer by one
    for step in range(2 * (world_size - 1)):
        # --- exercise 2.2: one step of the ring ---
        # Step 0 sends this rank's own chunk, every other step the chunk that was received last.
        send_chunk = chunks[(rank - step) % world_size]
        recv_chunk = chunks[(rank - step - 1) % world_size]
        recv_buf = torch.empty_like(recv_chunk)
        # Both at once: if every rank first completed its send, each would wait for a neighbour that
        # does not receive yet.
        send = dist.P2POp(dist.isend, send_chunk, group=group, group_peer=right)
        recv = dist.P2POp(dist.irecv, recv_buf, group=group, group_peer=left)
        ops = [op for op in (send, recv) if op.tensor.numel() > 0]  # if n < P, some are empty
        works = dist.batch_isend_irecv(ops) if ops else []
        for work in works:
            work.wait()
        if step < world_size - 1:
            recv_chunk += recv_buf  # a partial sum; the next step sends it on to the right
        else:
            # A complete sum. It is copied and never computed again, so all ranks have the same
            # bits and their parameters never drift apart.
            recv_chunk.copy_(recv_buf)
        # --- end exercise ---


# -------------------------------------------------------------------------------------------------
# The overlapped form: all-reduce each gradient as soon as it is complete
# -------------------------------------------------------------------------------------------------


@contextmanager
def overlapped(params: Params, group: dist.ProcessGroup) -> Iterator[None]:
    """All-reduces are in flight while the backward pass computes the gradients below.

    With `async_op=True` a thread of Gloo or a stream of NCCL does the work, and the call returns at
    once. Until `work.wait()` has returned, nothing may read or write the tensor. Collectives are
    matched by their order alone. So here every rank must complete its gradients in the same order
    and use every parameter; the bucketed form needs neither.
    """
    # --- exercise 2.3: launch in the hook, wait after the backward pass ---
    works = []

    def launch_all_reduce(p: nn.Parameter) -> None:
        works.append(dist.all_reduce(p.grad, group=group, async_op=True))  # [shape of p], summed

    with grad_hooks(params, launch_all_reduce):
        yield
    for work in works:  # each of them: that the last one is done says nothing about the others
        work.wait()
    # --- end exercise ---


@contextmanager
def grad_hooks(params: Params, on_grad: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """In the block, call `on_grad(p)` in the backward pass as soon as p.grad is complete.

    The gradient of a tied parameter is complete after its last use. The hook receives the
    parameter, not the gradient: an all-reduce of its argument would sum parameters.
    """
    handles = [p.register_post_accumulate_grad_hook(on_grad) for p in params]
    try:
        yield
    finally:  # also after an error, else the next block would launch everything twice
        for handle in handles:
            handle.remove()


# -------------------------------------------------------------------------------------------------
# The bucketed form: one message for many small gradients
# -------------------------------------------------------------------------------------------------


def build_buckets(params: Params, bucket_bytes: int) -> list[Params]:
    """Split the parameters into buckets, last parameter first.

    This is roughly the order in which the backward pass completes them. A bucket is closed once it
    holds `bucket_bytes`. A parameter of that size is a bucket of its own, which needs no copy. Each
    dtype has buckets of its own, because a flat tensor has one dtype.
    """
    buckets = []
    open_buckets: dict[torch.dtype, Params] = {}
    for p in reversed(params):
        if p.nbytes >= bucket_bytes:
            buckets.append([p])
            continue
        open_bucket = open_buckets.setdefault(p.dtype, [])
        open_bucket.append(p)
        if sum(q.nbytes for q in open_bucket) >= bucket_bytes:
            buckets.append(open_buckets.pop(p.dtype))
    return [*buckets, *open_buckets.values()]


@contextmanager
def bucketed(params: Params, group: dist.ProcessGroup, bucket_bytes=25 * 2**20) -> Iterator[None]:
    """The gradients of a bucket are all-reduced as one flat tensor.

    The flat tensor becomes their storage: each p.grad is made a view of it, so nothing is copied
    back, and the separate gradients are freed. `zero_grad()` at the end of the step frees the flat
    tensors as well, and the next forward pass has their memory.
    """
    buckets = build_buckets(params, bucket_bytes)
    bucket_of = {}
    for i, bucket in enumerate(buckets):
        for p in bucket:
            bucket_of[p] = i
    pending = [len(bucket) for bucket in buckets]  # gradients that each bucket still waits for
    works = []  # of buckets 0, 1, ..., in this order

    def launch_all_reduce(bucket: Params) -> None:
        # --- exercise 2.4: the gradients of a bucket become views of one flat tensor ---
        grads = [grad_or_zeros(p).flatten() for p in bucket]
        flat = torch.cat(grads) if len(grads) > 1 else grads[0]  # [n]; a single one is not copied
        pieces = flat.split([p.numel() for p in bucket])
        for p, piece in zip(bucket, pieces, strict=True):
            p.grad = piece.view_as(p)  # the memory of flat, in the shape of p
        works.append(dist.all_reduce(flat, group=group, async_op=True))  # [n], summed
        # --- end exercise ---

    def on_grad(p: nn.Parameter) -> None:
        # --- exercise 2.5: which buckets can be launched now? ---
        # Gradients may be completed in another order on each rank, but messages must be launched in
        # one order, else two buckets of equal size are added to each other. So bucket 1 waits for
        # bucket 0, even if it is complete.
        pending[bucket_of[p]] -= 1
        while len(works) < len(buckets) and pending[len(works)] == 0:
            launch_all_reduce(buckets[len(works)])
        # --- end exercise ---

    with grad_hooks(params, on_grad):
        yield
    for bucket in buckets[len(works) :]:  # left over, as this rank did not use some parameter
        launch_all_reduce(bucket)
    for work in works:
        work.wait()


# -------------------------------------------------------------------------------------------------
# The training step
# -------------------------------------------------------------------------------------------------


def broadcast_params(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the parameters and buffers of rank 0, frozen parameters included.

    Equal gradients keep equal parameters equal, but never make them equal.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), group_src=0, group=group)


def count_valid_tokens(labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The number of labels that count, in all micro-batches of all ranks. Labels [M, B, S] -> [].

    The loss is a sum over tokens, divided by this number. If every rank divides its own sum by it,
    losses and gradients of the ranks only have to be added; nothing is averaged. Ranks differ in
    their number of valid tokens (padding, prompts), and one may have none. The average of the
    ranks' means would weigh a token by the rank that it is on, and the 0/0 of one rank would be NaN
    on all.
    """
    # --- exercise 2.6: the number that every rank divides its loss by ---
    num_valid = (labels != IGNORE_INDEX).sum()
    dist.all_reduce(num_valid, group=group)  # [], the sum over the ranks
    return num_valid.clamp(min=1)  # without any valid token the loss is 0, not 0/0
    # --- end exercise ---


def train_step(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    grad_sync: Callable,
    group: dist.ProcessGroup,
) -> Tensor:
    """Forward and backward of this rank's micro-batches [M, B, S]. Returns the global loss.

    Gradients of the micro-batches accumulate in p.grad on each rank. Only the last backward pass
    runs inside `grad_sync`: a sum after each of them would sum again what is summed already.
    """
    params = [p for p in model.parameters() if p.requires_grad]  # a tied one only once
    num_valid = count_valid_tokens(labels, group)
    loss = torch.zeros((), device=tokens.device)
    for m in range(len(tokens)):
        # Divided before backward, so the loss that is logged is the loss that is trained.
        micro_loss = loss_sum(model(tokens[m]), labels[m]) / num_valid
        is_last = m == len(tokens) - 1
        with grad_sync(params, group) if is_last else nullcontext():
            micro_loss.backward()
        loss = loss + micro_loss.detach()
    dist.all_reduce(loss, group=group)  # only for the log: gradients are summed already
    return loss


# -------------------------------------------------------------------------------------------------
# A small model, and text to train it on
# -------------------------------------------------------------------------------------------------

VOCAB_SIZE = 256  # bytes
HIDDEN = 30
N_LAYERS = 2
MICRO_BATCHES = 2
BATCH = 2
SEQ_LEN = 32
IGNORE_INDEX = -100  # a label that does not count: padding, a prompt


class Block(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.attn_norm = nn.RMSNorm(hidden)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.up_proj = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down_proj = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H] -> [B, S, H]
        q, k, v = self.qkv_proj(self.attn_norm(x)).chunk(3, dim=-1)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))  # one head
        return x + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x))))


def build_model(hidden: int = HIDDEN, n_layers: int = N_LAYERS) -> nn.Module:
    """Tokens [B, S] -> logits [B, S, V]."""
    embedding = nn.Embedding(VOCAB_SIZE, hidden)
    head = nn.Linear(hidden, VOCAB_SIZE, bias=False)
    head.weight = embedding.weight  # tied: used first and last, so its gradient is complete last
    blocks = [Block(hidden) for _ in range(n_layers)]
    final_norm = nn.RMSNorm(hidden)
    return nn.Sequential(embedding, *blocks, final_norm, head)


def get_batch(step: int, world_size: int, device="cpu") -> tuple[Tensor, Tensor]:
    """Tokens and labels of all ranks, [P, M, B, S]. All labels of rank 0 count, none of the last.

    Every rank reads the same text and takes its own part, so nothing has to be sent.
    """
    data = torch.tensor(list(inspect.getsource(tokenize).encode()))
    start = step * 1000 + torch.arange(world_size * MICRO_BATCHES * BATCH) * (SEQ_LEN + 1)
    start = start % (len(data) - SEQ_LEN)
    text = data[start[:, None] + torch.arange(SEQ_LEN + 1)].to(device)  # [P M B, S + 1]
    text = text.view(world_size, MICRO_BATCHES, BATCH, SEQ_LEN + 1)
    tokens = text[..., :-1]
    labels = text[..., 1:].clone()
    for rank in range(1, world_size):
        num_valid = SEQ_LEN * (world_size - 1 - rank) // (world_size - 1)
        labels[rank, ..., num_valid:] = IGNORE_INDEX
    return tokens, labels


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum, not the mean, of the cross entropy: 0 and not NaN if no label counts."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


# -------------------------------------------------------------------------------------------------
# The check: three steps next to a reference
# -------------------------------------------------------------------------------------------------


class CommRecorder(TorchDispatchMode):
    """What torch.distributed was asked for and which gradients were complete, in order.

    The order shows overlap. A clock cannot show it on a CPU, where the same cores compute and send.
    """

    def __init__(self):
        super().__init__()
        self.events: list[tuple[str, int]] = []  # name and bytes

    def record_grad(self, p: nn.Parameter) -> None:
        self.events.append(("grad complete", 0))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = {"allreduce_": "all-reduce", "send": "send"}.get(func._opname)
        if func.namespace == "c10d" and name:
            self.events.append((name, sum(tensor.nbytes for tensor in args[0])))
        return func(*args, **(kwargs or {}))

    def summary(self, world_size: int) -> tuple[int, int, float]:
        """The number of messages of gradients, the number of early ones, and all bytes sent."""
        names = [name for name, _ in self.events]
        names = names[names.index("grad complete") : -1]  # without num_valid and the loss
        num_messages = len(names) - names.count("grad complete")
        last_grad = len(names) - 1 - names[::-1].index("grad complete")
        num_early = names[:last_grad].count("all-reduce")
        # The sends of the ring above are counted. Of torch's all-reduce only the input is known;
        # by the formula of the ring it sends 2 (P-1)/P times as much.
        bytes_sent = 0.0
        for name, size in self.events:
            bytes_sent += size if name == "send" else size * 2 * (world_size - 1) / world_size
        return num_messages, num_early, bytes_sent


class Result(NamedTuple):
    """What one rank has measured: the error in three steps, the rest in the last one."""

    error: float  # the largest
    num_messages: int
    num_early: int  # messages launched before the last gradient was complete
    bytes_sent: float
    grad_bytes: int


def train_next_to_reference(grad_sync: Callable, group: dist.ProcessGroup, device) -> Result:
    """Three steps of data parallelism, and of one process that trains on the full batch.

    The optimizer is plain SGD because Adam would hide gradients that are P times too large.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    torch.manual_seed(rank)  # other parameters on every rank, which the broadcast must correct
    model = build_model().to(device, torch.float64)
    broadcast_params(model, group)
    torch.manual_seed(0)
    reference = build_model().to(device, torch.float64)
    params = list(model.parameters())
    errors = []
    for step in range(3):
        tokens, labels = get_batch(step, world_size, device)  # [P, M, B, S]
        recorder = CommRecorder()
        with recorder, grad_hooks(params, recorder.record_grad):
            loss = train_step(model, tokens[rank], labels[rank], grad_sync, group)
        num_valid = (labels != IGNORE_INDEX).sum()
        expected_loss = loss_sum(reference(tokens.flatten(0, 2)), labels) / num_valid
        expected_loss.backward()
        storages = [p.grad.untyped_storage() for p in params]
        grad_bytes = sum({s.data_ptr(): s.nbytes() for s in storages}.values())

        errors.append((loss - expected_loss).abs())
        for p, expected in zip(params, reference.parameters(), strict=True):
            errors.append((p.grad - expected.grad).abs().max() / expected.grad.abs().max())
            p.data -= 0.1 * p.grad
            expected.data -= 0.1 * expected.grad
            errors.append((p - expected).abs().max())
        model.zero_grad()
        reference.zero_grad()
    error = torch.stack(errors).max().item()  # NaN if any error is NaN
    return Result(error, *recorder.summary(world_size), grad_bytes)


def check(name: str, grad_sync: Callable, group: dist.ProcessGroup, device) -> list[str]:
    """Train with one form, print its row on rank 0, and return what is wrong."""
    world_size = dist.get_world_size(group)
    results: list[Result] = [None] * world_size
    result = train_next_to_reference(grad_sync, group, device)
    dist.all_gather_object(results, result, group=group)
    error = torch.tensor([r.error for r in results], dtype=torch.float64).max().item()
    num_early = min(r.num_early for r in results)
    bytes_sent = round(sum(r.bytes_sent for r in results))
    # All parameters in float64; all ranks together; 16 bytes are num_valid and the loss.
    expected_grad_bytes = 8 * sum(p.numel() for p in build_model().parameters())
    expected_sent = 2 * (world_size - 1) * (expected_grad_bytes + 16)
    if dist.get_rank(group) == 0:
        print(
            f"{name:11}{error:9.1e}{result.num_messages:10}{num_early:7}"
            f"{bytes_sent:13,}{expected_sent:12,}{result.grad_bytes:12,}{expected_grad_bytes:10,}"
        )
    grad_bytes = {r.grad_bytes for r in results}  # the same on all ranks
    overlaps = name == "naive" or result.num_messages == 1 or num_early > 0
    failures = {
        f"largest error {error:.1e}": not error <= 1e-10,  # NaN fails
        f"{bytes_sent:,} bytes sent": bytes_sent != expected_sent,
        f"{result.grad_bytes:,} bytes of gradients": grad_bytes != {expected_grad_bytes},
        "no message is launched during the backward pass": not overlaps,
    }
    return [f"{name}: {failure}" for failure, happened in failures.items() if happened]


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
    parser = argparse.ArgumentParser(description="Data parallelism in one file", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--bucket-kib", type=int, default=64, help="close a bucket at this size")
    args = parser.parse_args()
    if args.bucket_kib < 1:
        parser.error(f"--bucket-kib {args.bucket_kib} is too small; use 1 or more")

    device = init_distributed()
    forms = {
        "naive": naive,
        "overlapped": overlapped,
        "bucketed": partial(bucketed, bucket_bytes=args.bucket_kib * 1024),
    }
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {device.type}; bytes sent are those of all ranks")
        print(f"{'':15}error  messages  early   bytes sent    expected  grad bytes  expected")
    failures = []
    for name, grad_sync in forms.items():
        failures += check(name, grad_sync, dist.group.WORLD, device)
    if dist.get_rank() == 0:
        print(f"FAIL: {'; '.join(failures)}" if failures else "PASS")
    dist.destroy_process_group()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
