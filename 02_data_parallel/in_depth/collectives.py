"""The collectives, implemented with send and receive.

Problem. P ranks each have a tensor, and every rank needs a result from all of them: the sum of the gradients,
the slices of a weight, the tokens of its expert. A network only sends bytes from one rank to one other. In
the naive program one root sends everything: P-1 ranks wait for its single link.

Idea. Schedule the messages so that every link is busy in every round. Two patterns do nearly everything:

    tree   0>1                     A rank with the data becomes a sender, so the number of senders doubles:
           0>2 1>3                 ⌈log2 P⌉ rounds, the fewest possible. Good for small messages, where only
           0>4 1>5 2>6 3>7         latency matters. But every message is the full tensor.

    ring   0 ──> 1 ──> 2           Split the tensor into P chunks. In every round each rank sends one chunk to
           ^           │           the right and receives another from the left. It takes many rounds, but all
           └──── 3 <───┘           links are always busy: good for large messages, where bytes matter.
                                   No all-reduce among ranks sends fewer.

Results for P = 2, the tensors [a0 a1] on rank 0 and [b0 b1] on rank 1, and rank 0 as the root:

    collective     rank 0 after     rank 1 after          collective        rank 0 after     rank 1 after
    broadcast      a0 a1            a0 a1                 all-gather        a0 b1            a0 b1
    reduce         a0+b0 a1+b1      -                     reduce-scatter    a0+b0            a1+b1
    scatter        a0               a1                    all-reduce        a0+b0 a1+b1      a0+b0 a1+b1
    gather         a0 b1            -                     all-to-all        a0 b0            a1 b1
    (before a gather or all-gather, rank 0 has only a0 and rank 1 only b1)

Formulas. A message of m bytes takes α + mβ seconds (Hockney 1994); a rank can send one and receive one at the
same time. `cost` gives each collective's time as rounds·α + volume·nβ, where n is the bytes of the full
tensor (Thakur, Rabenseifner & Gropp 2005), and `bytes_sent` the exact bytes that each rank sends. The ring
all-reduce takes 2(P-1)α + 2(P-1)/P·nβ, and Patarasuk & Yuan 2009 prove that its volume is the least possible.

    python collectives.py                                   one rank: nothing has to be sent
    torchrun --nproc_per_node 4 collectives.py              Gloo on CPUs; NCCL on GPUs, one for each rank
    torchrun --nproc_per_node 4 collectives.py --numel 3    fewer elements than ranks

Each is compared with torch.distributed's own and its bytes are counted, on every rank. The last line is PASS.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Legend: P = world = ranks in the group; n = bytes of the full tensor; chunk i = the i-th of its P pieces.
# All ranks and roots below are ranks *within the group*, so that the group may be any slice of the world.
Group = dist.ProcessGroup
Message = tuple[Tensor, int]  # a tensor, and the destination or source rank
Op = Callable[..., Tensor]  # torch.add, torch.maximum, ...: op(a, b, out=c)


# ------------------------------------------------------------------------------------- a round of messages, and chunks


def exchange(group: Group, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> None:
    """One round: start all messages at once; return when this rank's part of them is done.

    Every collective below is a sequence of such rounds and communicates nowhere else. A step's send and
    receive start together: if all ranks of a ring sent before they received, each would wait for a neighbour
    that does not receive yet. An empty tensor is neither sent nor waited for, since both sides know its size.
    Messages between two ranks arrive in the order of their sends, so no round needs a tag or a barrier.
    """
    messages = [dist.P2POp(dist.isend, tensor, group=group, group_peer=to) for tensor, to in sends if tensor.numel()]
    messages += [dist.P2POp(dist.irecv, into, group=group, group_peer=by) for into, by in receives if into.numel()]
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()


def place(group: Group, root: int = 0) -> tuple[int, int]:
    """(my rank in the group, number of its ranks). ValueError if I am not in it, or if the root is not."""
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"global rank {dist.get_rank()} is not in this group, so it cannot take part")
    if not 0 <= root < world:
        raise ValueError(f"root {root} is not a rank of a group of {world}; use 0 to {world - 1}")
    return rank, world


def flat(tensor: Tensor) -> Tensor:
    """The same memory in one dimension. ValueError for a tensor with gaps: `tensor.contiguous()` would be a
    copy, which would get the result, and the caller would use the old values."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} is not contiguous; pass a copy and copy it back")
    return tensor.detach().view(-1)


def chunks_of(tensor: Tensor, world: int) -> list[Tensor]:
    """P views of the tensor. The first numel % P are one element longer; with numel < P the last ones are empty."""
    return list(flat(tensor).tensor_split(world))


def check(name: str, tensor: Tensor, numel: int, like: Tensor) -> None:
    """ValueError unless the tensor has this many elements, of the other's dtype."""
    if (tensor.numel(), tensor.dtype) != (numel, like.dtype):
        raise ValueError(f"{name} has {tensor.numel()} elements of {tensor.dtype}; it needs {numel} of {like.dtype}")


def doublings(world: int) -> int:
    """⌈log2 P⌉: how often 1 must double to reach P."""
    return (world - 1).bit_length()


# ----------------------------------------------------------------------- one to all, all to one: full tensors


def broadcast_naive(tensor: Tensor, root: int, group: Group) -> None:
    """Root's tensor to all ranks, in place. The root sends it P-1 times, over its one link: (P-1)(α + nβ)."""
    rank, world = place(group, root)
    data = flat(tensor)
    # --- exercise 2.21: the root sends to every other rank; they receive ---
    if rank == root:
        exchange(group, sends=[(data, peer) for peer in range(world) if peer != root])
    else:
        exchange(group, receives=[(data, root)])
    # --- end exercise ---


def broadcast_tree(tensor: Tensor, root: int, group: Group) -> None:
    """Root's tensor to all ranks, in place, along a binomial tree: ⌈log2 P⌉(α + nβ).

    P = 8, root 0. After each round twice as many ranks have the tensor. (Seats are counted from the root.)

        distance 1:   0>1
        distance 2:   0>2  1>3
        distance 4:   0>4  1>5  2>6  3>7
    """
    rank, world = place(group, root)
    data = flat(tensor)
    seat = (rank - root) % world
    for k in range(doublings(world)):
        distance = 2**k
        # --- exercise 2.22: seats below `distance` have the tensor; which send to which in this round? ---
        if seat < distance and seat + distance < world:
            exchange(group, sends=[(data, (rank + distance) % world)])
        elif distance <= seat < 2 * distance:
            exchange(group, receives=[(data, (rank - distance) % world)])
        # --- end exercise ---


def reduce_naive(tensor: Tensor, root: int, group: Group, op: Op = torch.add) -> None:
    """The sum of all tensors into the root's, in place; other ranks' tensors do not change: (P-1)(α + nβ).

    The ranks send to the root one after the other, so that the root has to buffer one tensor, not P-1.
    """
    rank, world = place(group, root)
    data = flat(tensor)
    if rank != root:
        exchange(group, sends=[(data, root)])
        return
    arrived = torch.empty_like(data)
    for peer in range(world):
        if peer != root:
            exchange(group, receives=[(arrived, peer)])
            op(data, arrived, out=data)


def reduce_tree(tensor: Tensor, root: int, group: Group, op: Op = torch.add) -> None:
    """The sum of all tensors into the root's, in place: broadcast_tree in reverse, ⌈log2 P⌉(α + nβ).

    The other ranks' tensors are overwritten with partial sums. P = 8, root 0:

        distance 4:   4>0  5>1  6>2  7>3      0 has 0+4, 1 has 1+5, 2 has 2+6, 3 has 3+7
        distance 2:   2>0  3>1                0 has 0+4+2+6, 1 has 1+5+3+7
        distance 1:   1>0                     0 has all eight
    """
    rank, world = place(group, root)
    data = flat(tensor)
    seat = (rank - root) % world
    arrived = torch.empty_like(data)
    for k in reversed(range(doublings(world))):
        distance = 2**k
        if distance <= seat < 2 * distance:
            exchange(group, sends=[(data, (rank - distance) % world)])
        elif seat < distance and seat + distance < world:
            exchange(group, receives=[(arrived, (rank + distance) % world)])
            op(data, arrived, out=data)


# ---------------------------------------------------------------------------- one to all, all to one: a chunk for each


def scatter(out: Tensor, tensor: Tensor | None, root: int, group: Group) -> None:
    """Chunk i of the root's tensor into `out` of rank i; elsewhere `tensor` is None: (P-1)α + (P-1)/P·nβ.

    [t0 t1 t2 t3] on the root becomes t0 on rank 0, t1 on rank 1, ... The root must send all other chunks, so
    no algorithm has a smaller volume. (A tree has only ⌈log2 P⌉ rounds: half of the chunks, a quarter, ...)
    """
    rank, world = place(group, root)
    mine = flat(out)
    if rank != root:
        exchange(group, receives=[(mine, root)])
        return
    if tensor is None:
        raise ValueError("the root of a scatter needs the tensor, not None")
    chunks = chunks_of(tensor, world)
    check("out", out, chunks[rank].numel(), tensor)
    exchange(group, sends=[(chunks[peer], peer) for peer in range(world) if peer != root])
    mine.copy_(chunks[rank])


def gather(out: Tensor | None, tensor: Tensor, root: int, group: Group) -> None:
    """Rank i's tensor into chunk i of the root's `out` (None elsewhere): scatter reversed, at equal cost."""
    rank, world = place(group, root)
    mine = flat(tensor)
    if rank != root:
        exchange(group, sends=[(mine, root)])
        return
    if out is None:
        raise ValueError("the root of a gather needs a tensor to gather into, not None")
    chunks = chunks_of(out, world)
    check("tensor", tensor, chunks[rank].numel(), out)
    exchange(group, receives=[(chunks[peer], peer) for peer in range(world) if peer != root])
    chunks[rank].copy_(mine)


# ------------------------------------------------------------------------------------------------ all to all: the ring


def all_gather(out: Tensor, tensor: Tensor, group: Group) -> None:
    """Rank i's tensor into chunk i of every rank's `out`, around a ring: (P-1)α + (P-1)/P·nβ."""
    rank, world = place(group)
    chunks = chunks_of(out, world)
    check("tensor", tensor, chunks[rank].numel(), out)
    chunks[rank].copy_(flat(tensor))
    ring_gather(chunks, group)


def ring_gather(chunks: list[Tensor], group: Group) -> None:
    """Before: rank i has chunk i. After: every rank has every chunk.

    Each rank sends the chunk that it received last. P = 4:

                 start      step 0     step 1     step 2
        rank 0   A . . .    A . . D    A . C D    A B C D
        rank 1   . B . .    A B . .    A B . D    A B C D
        rank 2   . . C .    . B C .    A B C .    A B C D
        rank 3   . . . D    . . C D    . B C D    A B C D
    """
    rank, world = place(group)
    left = (rank - 1) % world
    right = (rank + 1) % world
    for step in range(world - 1):
        # --- exercise 2.23: which chunk goes to the right in this step, and which one comes from the left? ---
        going = (rank - step) % world
        coming = (rank - step - 1) % world
        exchange(group, sends=[(chunks[going], right)], receives=[(chunks[coming], left)])
        # --- end exercise ---


def reduce_scatter(out: Tensor, tensor: Tensor, group: Group, op: Op = torch.add) -> None:
    """Chunk i of the sum of all tensors into `out` of rank i, around a ring: (P-1)α + (P-1)/P·nβ.

    `tensor` does not change. A partial sum is needed for one step only, so all share one buffer of a chunk.
    """
    rank, world = place(group)
    chunks = chunks_of(tensor, world)
    check("out", out, chunks[rank].numel(), tensor)
    if world == 1:
        flat(out).copy_(chunks[0])
        return
    partial = torch.empty_like(chunks[0])  # chunk 0 is the largest
    sums = [partial[: chunk.numel()] for chunk in chunks]
    sums[rank] = flat(out)
    ring_reduce(chunks, sums, group, op)


def ring_reduce(chunks: list[Tensor], sums: list[Tensor], group: Group, op: Op) -> None:
    """`sums[rank]` becomes this rank's chunk of the sum; the others are partial sums, sent to the right.

    Chunk i starts on rank i+1, every rank adds to it, and it ends on rank i. P = 4; a, b, c, d are the values
    of ranks 0 to 3. Each step shows only the sums that were just received and added to:

        chunk    0  1  2  3      0   1   2   3       0    1    2    3       0     1     2     3
        rank 0   a  a  a  a      .   .  da   .       .   cda   .    .     bcda    .     .     .
        rank 1   b  b  b  b      .   .   .  ab       .    .   dab   .       .   cdab    .     .
        rank 2   c  c  c  c     bc   .   .   .       .    .    .   abc      .     .   dabc    .
        rank 3   d  d  d  d      .  cd   .   .      bcd   .    .    .       .     .     .   abcd
                    start          step 0               step 1                    step 2
    """
    rank, world = place(group)
    left = (rank - 1) % world
    right = (rank + 1) % world
    scratch = torch.empty_like(chunks[0])
    for step in range(world - 1):
        # --- exercise 2.24: send the partial sum of the last step, receive another, and add my values to it ---
        going = (rank - step - 1) % world
        coming = (rank - step - 2) % world
        outgoing = chunks[going] if step == 0 else sums[going]
        arrived = scratch[: chunks[coming].numel()]
        exchange(group, sends=[(outgoing, right)], receives=[(arrived, left)])
        op(arrived, chunks[coming], out=sums[coming])
        # --- end exercise ---


def all_reduce_naive(tensor: Tensor, group: Group, op: Op = torch.add) -> None:
    """The sum of all tensors, in place on every rank, over rank 0's one link: 2(P-1)(α + nβ)."""
    reduce_naive(tensor, 0, group, op)
    broadcast_naive(tensor, 0, group)


def all_reduce_tree(tensor: Tensor, group: Group, op: Op = torch.add) -> None:
    """The sum of all tensors, in place on every rank, up a tree and down again: 2⌈log2 P⌉(α + nβ)."""
    reduce_tree(tensor, 0, group, op)
    broadcast_tree(tensor, 0, group)


def all_reduce_ring(tensor: Tensor, group: Group, op: Op = torch.add) -> None:
    """The sum of all tensors, in place on every rank: 2(P-1)α + 2(P-1)/P·nβ (Patarasuk & Yuan 2009).

    A reduce-scatter and an all-gather of the same chunks, with one chunk of scratch: partial sums overwrite
    the tensor. No rank sends more than 2n, for any number of ranks.

    A floating-point sum depends on its order, and chunk i is summed in the order of ranks i+1, i+2, ..., i.
    But it is summed once, and then copied: all ranks get the same bits, and equal replicas stay equal.
    """
    _, world = place(group)
    chunks = chunks_of(tensor, world)
    if world > 1:  # on one rank the scratch would be as large as the full tensor
        ring_reduce(chunks, chunks, group, op)
        ring_gather(chunks, group)


# ----------------------------------------------------- all to all: a piece for each; and the barrier, which sends none


def all_to_all(
    out: Tensor, tensor: Tensor, group: Group, out_splits: list[int] | None = None, in_splits: list[int] | None = None
) -> None:
    """Piece j of my tensor to rank j, which stores pieces in the order of senders: (P-1)α + (P-1)/P·nβ.

        rank 0   a0 a1 a2          a0 b0 c0
        rank 1   b0 b1 b2   ──>    a1 b1 c1
        rank 2   c0 c1 c2          a2 b2 c2

    in_splits[j] elements are sent to rank j, out_splits[j] received from it; None: all pieces are equal. It
    is a pairwise exchange: in a round all ranks send equally far to the right, so each rank has one sender.
    """
    rank, world = place(group)
    going = pieces_of("in_splits", tensor, in_splits, world)
    coming = pieces_of("out_splits", out, out_splits, world)
    check("the piece of out from this rank itself", coming[rank], going[rank].numel(), tensor)
    coming[rank].copy_(going[rank])
    for step in range(1, world):
        right = (rank + step) % world
        left = (rank - step) % world
        exchange(group, sends=[(going[right], right)], receives=[(coming[left], left)])


def pieces_of(name: str, tensor: Tensor, sizes: list[int] | None, world: int) -> list[Tensor]:
    if sizes is None and tensor.numel() % world:
        raise ValueError(f"{tensor.numel()} elements do not divide among {world} ranks; give {name}")
    sizes = [tensor.numel() // world] * world if sizes is None else sizes
    if len(sizes) != world or min(sizes) < 0 or sum(sizes) != tensor.numel():
        raise ValueError(f"{name} {sizes} do not cut {tensor.numel()} elements into {world} pieces")
    return list(flat(tensor).split(sizes))


def barrier(group: Group, device: torch.device | str = "cpu") -> None:
    """Return only after every rank has called it: ⌈log2 P⌉α, by dissemination (Hensgen, Finkel & Manber 1988).

    A byte means "I have arrived, and so have all ranks that I know of". Rank 0 of 8 then knows of:

        distance 1, from 7:   7
        distance 2, from 6:   7  6 5           6 knew of 5 before
        distance 4, from 4:   7  6 5  4 3 2 1
    """
    rank, world = place(group)
    token, heard = torch.zeros(2, 1, dtype=torch.uint8, device=device)
    for k in range(doublings(world)):
        exchange(group, sends=[(token, (rank + 2**k) % world)], receives=[(heard, (rank - 2**k) % world)])
    heard.item()  # NCCL's wait() blocks the GPU's stream but not the host; reading the byte blocks both


FUNCTIONS: tuple[Callable[..., None], ...] = (
    *(broadcast_naive, broadcast_tree, reduce_naive, reduce_tree, scatter, gather, all_gather, reduce_scatter),
    *(all_reduce_naive, all_reduce_tree, all_reduce_ring, all_to_all, barrier),
)
COLLECTIVES = {function.__name__: function for function in FUNCTIONS}


# ------------------------------------------------------------------------------------ cost of the collectives


def cost(name: str, world: int) -> tuple[int, float]:
    """(rounds, volume): the collective takes rounds·α + volume·nβ seconds (Thakur, Rabenseifner & Gropp 2005).

    The cost is the longest chain of messages that wait for each other, for a link or for their content, not
    the bytes of one rank: in reduce_tree no rank sends more than n, but ⌈log2 P⌉ such messages follow each
    other. The additions are left out.
    """
    others = world - 1
    log2 = doublings(world)
    ring = (world - 1) / world
    return {
        "broadcast_naive": (others, others),
        "broadcast_tree": (log2, log2),
        "reduce_naive": (others, others),
        "reduce_tree": (log2, log2),
        "scatter": (others, ring),
        "gather": (others, ring),
        "all_gather": (others, ring),
        "reduce_scatter": (others, ring),
        "all_reduce_naive": (2 * others, 2 * others),
        "all_reduce_tree": (2 * log2, 2 * log2),
        "all_reduce_ring": (2 * others, 2 * ring),
        "all_to_all": (others, ring),
        "barrier": (log2, 0),
    }[name]


def seconds(name: str, n: int, world: int, alpha: float, beta: float) -> float:
    """Predicted time for a tensor of n bytes; alpha in seconds per message, beta in seconds per byte."""
    rounds, volume = cost(name, world)
    return rounds * alpha + volume * n * beta


def bytes_sent(name: str, numel: int, element_size: int, world: int, rank: int, root: int = 0) -> int:
    """The exact bytes that this rank sends, for a full tensor of any number of elements, `numel`.

    The full tensor of a gather or all-gather is `out`. An all-to-all must split like `chunks_of`.
    """
    size = [numel // world + (i < numel % world) for i in range(world)]
    mine = size[rank]
    next_one = size[(rank + 1) % world]
    seat = (rank - root) % world
    up = int(seat > 0)  # every rank but the root sends once towards the root
    down = sum(seat < 2**k and seat + 2**k < world for k in range(doublings(world)))  # children in the tree
    elements = {
        "broadcast_naive": (1 - up) * (world - 1) * numel,
        "broadcast_tree": down * numel,
        "reduce_naive": up * numel,
        "reduce_tree": up * numel,
        "scatter": (1 - up) * (numel - mine),
        "gather": up * mine,
        "all_gather": numel - next_one,  # every chunk but the last one received
        "reduce_scatter": numel - mine,  # every chunk but the one that ends here
        "all_reduce_naive": up * numel + (1 - up) * (world - 1) * numel,
        "all_reduce_tree": (up + down) * numel,
        "all_reduce_ring": 2 * numel - mine - next_one,  # 2(P-1)/P·numel if P divides it
        "all_to_all": numel - mine,
    }
    return doublings(world) if name == "barrier" else elements[name] * element_size


# --------------------------------------------------------------------------- the demo: all against torch.distributed


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank passes to point-to-point sends."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.send.default:
            self.total += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def compare(name: str, x: Tensor, root: int, group: Group) -> float:
    """Run a collective and torch.distributed's on this rank's x, [n]; return the largest difference of their results.

    A gather or all-gather starts from x's chunk `rank`. torch.distributed needs equal chunks, so pad them.
    """
    rank, world = place(group)
    call = COLLECTIVES[name]
    chunks = chunks_of(x, world)
    is_root = rank == root
    sizes = [chunk.numel() for chunk in chunks]
    padded = [torch.cat([chunk, x.new_zeros(sizes[0] - chunk.numel())]) for chunk in chunks]
    got = x.clone()
    want = x.clone()
    rows = [torch.empty_like(chunk) for chunk in padded]
    row = torch.empty_like(padded[0])
    if name == "barrier":
        call(group, x.device)
    elif name.startswith("broadcast"):
        call(got, root, group)
        dist.broadcast(want, group_src=root, group=group)
    elif name in ("reduce_naive", "reduce_tree"):
        call(got, root, group)
        dist.reduce(want, group_dst=root, group=group)
        got, want = (got, want) if is_root else (x, x)  # other ranks get no result
    elif name.startswith("all_reduce"):
        call(got, group)
        dist.all_reduce(want, group=group)
    elif name in ("scatter", "reduce_scatter"):
        got = torch.empty_like(chunks[rank])
        if name == "scatter":
            call(got, x if is_root else None, root, group)
            dist.scatter(row, padded if is_root else None, group_src=root, group=group)
        else:
            call(got, x, group)
            dist.reduce_scatter(row, padded, group=group)
        want = row[: sizes[rank]]
    elif name in ("gather", "all_gather"):
        if name == "gather":
            call(got if is_root else None, chunks[rank], root, group)
            dist.gather(padded[rank], rows if is_root else None, group_dst=root, group=group)
        else:
            call(got, chunks[rank], group)
            dist.all_gather(rows, padded[rank], group=group)
        want = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
        got, want = (got, want) if is_root or name == "all_gather" else (x, x)
    elif name == "all_to_all":
        got, want = x.new_empty(2, world * sizes[rank])
        call(got, x, group, [sizes[rank]] * world, sizes)
        dist.all_to_all_single(want, x, [sizes[rank]] * world, sizes, group=group)
    return (got - want).abs().max().item() if want.numel() else 0.0


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    parser = Parser(prog="collectives.py", description="Collectives from send and receive.", allow_abbrev=False)
    parser.add_argument("--numel", type=int, default=100_003, help="elements of the whole tensor; default %(default)s")
    numel = parser.parse_args().numel
    if not 0 <= numel <= 10**9:
        parser.error(f"--numel {numel}: use 0 to 1000000000")

    gpus = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < gpus < local:
        parser.error(f"--nproc_per_node {local} is more than the {gpus} GPUs here")
    on_gpu = gpus > 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    options: dict = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if on_gpu:
        torch.cuda.set_device(device)
        options["device_id"] = device  # open NCCL's communicator now, with all ranks: a round may have 2
    # torch.distributed.nn is imported above, or SentBytes would import it. Imported while a group exists, it
    # would keep the group alive after destroy_process_group, and Gloo's threads could abort the exit.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60), **options)
    group = dist.group.WORLD
    assert group is not None
    rank, world = place(group)
    root = world // 2  # not 0, or an ignored root would go unnoticed

    x = torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).to(device)
    if rank == 0:
        print(f"{world} ranks on {device.type}, root {root}, {numel} float64 elements: n = {x.nbytes} bytes")
        print(f"{'collective':16}  {'time':>15}  busiest rank sends:  predicted  measured  off from torch by")
    failures = []
    for name in COLLECTIVES:
        with SentBytes() as sent:  # torch's own collectives do not go through send
            error = compare(name, x, root, group)
        predicted = bytes_sent(name, numel, x.element_size(), world, rank, 0 if "all_reduce" in name else root)
        table: list = [None] * world
        dist.all_gather_object(table, (predicted, sent.total, error))
        for peer, (want, measured, off) in enumerate(table):
            if want != measured:
                failures.append(f"{name}: rank {peer} sent {measured} bytes; the formula says {want}")
            if not off <= 1e-10:  # in this form NaN fails as well
                failures.append(f"{name}: rank {peer} is off from torch.distributed by {off:.1e}")
        if rank == 0:
            rounds, volume = cost(name, world)
            most = [max(column) for column in zip(*table, strict=True)]
            print(f"{name:16}  {f'{rounds}α + {volume:.2f}nβ':>15}  {most[0]:30}  {most[1]:8}  {most[2]:17.1e}")
    gc.collect()  # reference cycles must not keep the group alive
    dist.destroy_process_group()
    if failures:
        sys.exit("\n".join(failures) if rank == 0 else 1)
    if rank == 0:
        print("PASS")


if __name__ == "__main__":
    main()
