"""Context parallelism III: documents packed end to end in one sequence, without attention between them.

Problem. Documents are shorter than the sequence, so several are packed in one. A query may see only the keys
of its own document. A mask could express this, but it has S x S entries, and FlashAttention takes none.

Idea. No mask is needed. Split the sequence into chunks, as every layout does. In (queries of chunk i) x (keys
of chunk j) the visible part of each document is one rectangle, or if i = j a triangle. So each part of
attention is still an ordinary call of an ordinary kernel; there are only more calls, of smaller size:

      keys    chunk 0   chunk 1   chunk 2   chunk 3        documents a (5 tokens), b (6) and c (5)
              a a a a   a b b b   b b b c   c c c c        0: a visible (query, key) pair
      a       0
      a       0 0
      ...
      a       0 0 0 0 | 0                                  chunk 1 x chunk 1: triangles of a and of b
      b                 . 0                                chunk 2 x chunk 1: one rectangle, of b
      b                 . 0 0                              chunk 3 x chunk 0: nothing
      b                 . 0 0 0
      b                 . 0 0 0 | 0

Two different chunks share at most one document, because it has to fill everything between them.

The boundaries are given as kernels expect them: cu_seqlens, 0 5 11 16 above, with S as the last value.

Work per rank, for documents of L_1, L_2, ... tokens, in (query, key) pairs of a head:
    all ranks together   sum of L (L + 1)/2                              instead of S (S + 1)/2
    contiguous, zigzag   depends on the rank, S/P or more                (zigzag balances only one document)
    each                 sum of L (L + 1)/2P on every rank               every document in zigzag by itself
    Ulysses              sum of L (L + 1)/2 for each of its heads        (in USP: as the ring's layout)
"each" requires that 2P divides the length of every document, so the packing must pad them. Ulysses is
balanced for all documents if P divides N; if not, some ranks have one head more. The bytes sent do not depend
on documents, because every block is sent all the way round. `cu_seqlens`: FlashAttention's varlen kernels.
Zigzag document by document: Transformer Engine's `thd` format, ring-flash-attention's zigzag varlen. Masks
across documents in long-context training: Llama 3, 2407.21783, section 3.2.

Run it:
    python packed_documents.py                                               one rank, CPU or GPU
    torchrun --nproc_per_node 4 packed_documents.py                          Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 packed_documents.py --documents 8 24 16 --layout each
The last line is PASS, or the script exits with 1 and says which number is off.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_ring import (
    EXPLICIT,
    IGNORE,
    LAYOUTS,
    AllGather,
    Attention,
    Block,
    LocalAttention,
    Model,
    OneLineParser,
    Ring,
    Wire,
    add_model_options,
    against_reference,
    at_least_fp32,
    attention_over,
    block_of,
    check_layout,
    check_model_options,
    counting,
    dense_attention,
    layout_positions,
    next_token_labels,
    run,
)
from context_ulysses import check_enough_heads, query_heads_of, ulysses
from torch import Tensor

# Shapes: B batch, packed alike; S sequence, N query heads, D head dim; S/P is S sharded over the group.
PACKED_LAYOUTS = (*LAYOUTS, "each")
TRANSPORTS = {"allgather": AllGather, "ring": Ring}


def boundaries(lengths: Sequence[int]) -> list[int]:
    """cu_seqlens of documents of these lengths: 0, L_1, L_1 + L_2, ..., S."""
    return [0, *accumulate(lengths)]


def check_documents(cu_seqlens: Sequence[int], layout: str, P: int) -> list[int]:
    """cu_seqlens as a list of ints. ValueError unless they are boundaries that `layout` can shard over P."""
    cu = [int(x) for x in cu_seqlens]
    if len(cu) < 2 or cu[0] != 0 or any(begin >= end for begin, end in pairwise(cu)):
        raise ValueError(
            f"cu_seqlens {cu} does not rise from 0 to the number of tokens; give where each document begins"
        )
    if layout != "each":
        check_layout(layout, cu[-1], P)
    for begin, end in pairwise(cu) if layout == "each" else ():
        if (end - begin) % (2 * P):
            full = -(-(end - begin) // (2 * P)) * 2 * P
            raise ValueError(f"a document of {end - begin} tokens is not 2P = {2 * P} chunks; fill it up to {full}")
    return cu


# ----------------------------------------------------------------------- tokens and visible keys of each rank


def packed_positions(layout: str, cu: Sequence[int], rank: int, P: int) -> Tensor:
    """Places in the full sequence of the tokens on `rank` of P, ascending: int64 [S/P]."""
    cu = check_documents(cu, layout, P)
    # --- exercise 5.31: every document in zigzag by itself ---
    if layout == "each":
        parts = [begin + layout_positions("zigzag", end - begin, rank, P) for begin, end in pairwise(cu)]
        return torch.cat(parts)
    # --- end exercise ---
    return layout_positions(layout, cu[-1], rank, P)


def places_in_documents(where: Tensor, cu: Sequence[int]) -> Tensor:
    """Positions of tokens in their documents, which RoPE uses: [S/P] like `where`."""
    begins = torch.tensor(list(cu[:-1]), device=where.device)
    return where - begins[torch.searchsorted(begins, where.contiguous(), right=True) - 1]


def packed_labels(tokens: Tensor, cu: Sequence[int]) -> Tensor:
    """The label of a token is the next token of its document [B, S]. A document's last token has none,
    because the next token starts another document."""
    labels = next_token_labels(tokens)
    labels[:, [end - 1 for end in cu[1:]]] = IGNORE
    return labels


def between_chunks(i: int, j: int, length: int, cu: Sequence[int], causal: bool) -> list[Block]:
    """The visible blocks of (queries of chunk i) x (keys of chunk j), for chunks of `length` tokens, with
    indices within the chunk. If causal and i = j, each block is the lower triangle of a square."""
    # --- exercise 5.32: a rectangle or a triangle for each document ---
    blocks = []
    for begin, end in pairwise(cu):
        rows, columns = ((max(begin - c * length, 0), min(end - c * length, length)) for c in (i, j))
        if rows[0] < rows[1] and columns[0] < columns[1] and (j <= i or not causal):
            blocks.append(Block(slice(*rows), slice(*columns), causal and i == j))
    return blocks
    # --- end exercise ---


def between_stripes(rank: int, owner: int, P: int, cu: Sequence[int], causal: bool) -> list[Block]:
    """The same if `rank` has tokens rank, rank + P, ... A document's tokens are contiguous there too, and its
    visible part is a triangle, without the diagonal if the owner's tokens come after mine."""
    blocks = []
    for begin, end in pairwise(cu):
        (first, last), (start, stop) = ((-((r - begin) // P), -((r - end) // P)) for r in (rank, owner))
        if causal:  # my token i sees the owner's j <= i, or j < i
            later = int(owner > rank)
            first, last, stop = start + later, last, last - later
        if first < last and start < stop:
            blocks.append(Block(slice(first, last), slice(start, stop), causal))
    return blocks


def shifted(block: Block, length: int, down: int, right: int) -> Block:
    """A block within a part of `length` tokens, shifted to the beginnings of its queries and of its keys."""
    rows = range(down, down + length)[block.rows]
    columns = range(right, right + length)[block.columns]
    return Block(slice(rows.start, rows.stop), slice(columns.start, columns.stop), block.causal)


def packed_blocks(layout: str, cu: Sequence[int], rank: int, owner: int, P: int, causal: bool = True) -> list[Block]:
    """The visible blocks of the keys of `owner` for the queries of `rank`."""
    if layout == "striped":
        return between_stripes(rank, owner, P, cu, causal)
    if layout == "each":  # the blocks of context_ring.py for one sequence, for each document
        blocks = []
        for begin, end in pairwise(cu):
            length = (end - begin) // P
            block = block_of("zigzag", rank, owner, length, causal)
            blocks += [shifted(block, length, begin // P, begin // P)] if block else []
        return blocks
    chunks = {r: (r, 2 * P - 1 - r) if layout == "zigzag" else (r,) for r in (rank, owner)}
    length = cu[-1] // P // len(chunks[rank])
    blocks = []
    for a, i in enumerate(chunks[rank]):
        for b, j in enumerate(chunks[owner]):
            visible = between_chunks(i, j, length, cu, causal)
            blocks += [shifted(block, length, a * length, b * length) for block in visible]
    return blocks


def packed_pairs(layout: str, cu: Sequence[int], rank: int, P: int) -> int:
    """(query, key) pairs that `rank` computes for one head of causal attention."""
    pairs = 0
    for owner in range(P):
        for rows, columns, triangle in packed_blocks(layout, cu, rank, owner, P):
            n = rows.stop - rows.start
            t = columns.stop - columns.start
            pairs += n * (n + 1) // 2 if triangle else n * t
    return pairs


# ------------------------------------------------------------------------------------------------- the techniques


def packed_attention(
    group: dist.ProcessGroup,
    cu_seqlens: Sequence[int],
    layout: str = "zigzag",
    version: str = "ring",
    local: LocalAttention = EXPLICIT,
) -> Attention:
    """All-gather or ring over packed documents, a drop-in for `attention(q, k, v, *, causal)`.

    `cu_seqlens` of the full sequence is the same on all ranks; `packed_positions` shards the tokens."""
    if version not in TRANSPORTS:
        raise ValueError(f"version {version!r} is unknown; use one of {', '.join(TRANSPORTS)}")
    if layout not in PACKED_LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use one of {', '.join(PACKED_LAYOUTS)}")
    cu = check_documents(cu_seqlens, layout, group.size())

    here = cu[-1] // group.size()

    def plan_of(_: str, rank: int, P: int, length: int, causal: bool) -> list[list[Block]]:
        return [packed_blocks(layout, cu, rank, owner, P, causal) for owner in range(P)]

    over_blocks = attention_over(TRANSPORTS[version], group, "contiguous", local, plan_of)

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        if not q.shape[1:2] == k.shape[1:2] == (here,):
            sizes = f"q {list(q.shape)} and k {list(k.shape)}"
            raise ValueError(f"{sizes}: of the {cu[-1]} tokens of cu_seqlens each of {group.size()} ranks has {here}")
        return over_blocks(q, k, v, causal=causal)

    return attention


def in_documents(cu_seqlens: Sequence[int], attention: Attention = dense_attention) -> Attention:
    """Any attention for one device, once for each document, as in `ulysses(group, in_documents(cu_seqlens))`.
    A kernel with cu_seqlens does the same in one call."""
    cu = check_documents(cu_seqlens, "contiguous", 1)

    def separate(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        if not q.shape[1] == k.shape[1] == cu[-1]:
            raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys are not the {cu[-1]} tokens of cu_seqlens")
        parts = [[x[:, begin:end] for x in (q, k, v)] for begin, end in pairwise(cu)]
        return torch.cat([attention(*part, causal=causal) for part in parts], 1)

    return separate


def packed_step(
    model: Model, tokens: Tensor, where: Tensor, cu: Sequence[int], attention: Attention, group: dist.ProcessGroup
) -> Tensor:
    """`train_step` of context_ring.py for packed documents: positions and labels are per document."""
    model.zero_grad()
    labels = packed_labels(tokens, cu)
    valid = (labels != IGNORE).sum().clamp(min=1)  # of the full sequences: every rank has all tokens of the demo
    logits = model(tokens[:, where], places_in_documents(where, cu), attention)
    loss = F.cross_entropy(
        at_least_fp32(logits).flatten(0, 1), labels[:, where].flatten(), ignore_index=IGNORE, reduction="sum"
    )
    loss = loss / valid
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total


# ------------------------------------------------------------------------------------------------------------- demo


def masked_attention(cu: Sequence[int]) -> Attention:
    """The reference's attention: PyTorch's with an explicit mask, block-diagonal and causal."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        of = torch.repeat_interleave(torch.arange(len(cu) - 1), torch.tensor(cu).diff()).to(q.device)
        mask = of[:, None] == of[None]  # [S, S]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, N, D] -> [B, N, S, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.tril() if causal else mask, enable_gqa=True)
        return out.transpose(1, 2)

    return attention


def counting_heads(attention: Attention, count: list[int]) -> Attention:
    """The same causal attention, which also adds its (query, key) pairs, of all heads, to count[0]."""

    def counted(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        count[0] += q.shape[2] * q.shape[1] * (q.shape[1] + 1) // 2
        return attention(q, k, v, causal=causal)

    return counted


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description="Packed documents over many ranks.", allow_abbrev=False)
    parser.add_argument("--version", choices=["all", *TRANSPORTS, "ulysses"], default="all")
    parser.add_argument("--layout", choices=["all", *PACKED_LAYOUTS], default="all", help="of all-gather and ring")
    parser.add_argument(
        "--documents", type=int, nargs="+", metavar="L", help="their lengths; default 8 40 16 32, which add up to --seq"
    )
    add_model_options(parser)
    parser.set_defaults(seq=None)
    args = parser.parse_args()
    P = int(os.environ.get("WORLD_SIZE", "1"))
    if args.version == "ulysses" and args.layout != "all":
        parser.error(f"--layout {args.layout} is of all-gather and ring; leave it out, or use another --version")
    if args.documents is None and args.seq is not None:
        parser.error(f"--seq {args.seq} needs --documents, the lengths of which add up to it")
    args.documents = args.documents or [8, 40, 16, 32]
    lengths = " ".join(map(str, args.documents))
    if min(args.documents) < 1 or max(args.documents) < 3:  # of 2 tokens only one has a label, and sees itself alone
        parser.error(f"--documents {lengths}: use 1 token or more for each, 3 or more for one of them")
    args.seq = sum(args.documents) if args.seq is None else args.seq
    if sum(args.documents) != args.seq:
        parser.error(f"--documents add up to {sum(args.documents)} tokens, --seq is {args.seq}; leave --seq out")
    check_model_options(parser, args)
    layouts = PACKED_LAYOUTS if args.layout == "all" else (args.layout,)
    try:
        for layout in layouts if args.version != "ulysses" else ("contiguous",):
            check_documents(boundaries(args.documents), layout, P)
    except ValueError as error:
        parser.error(f"--documents {lengths}: {error}")
    try:
        if args.version in ("all", "ulysses"):
            check_enough_heads(args.heads, P)
    except ValueError as error:
        parser.error(f"--heads {args.heads}: {error}")
    return args


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Every requested version next to the reference; prints the table on rank 0 and returns what is wrong."""
    rank = dist.get_rank(group)
    P = dist.get_world_size(group)
    cu = boundaries(args.documents)
    S, dtype, tolerance = cu[-1], *((torch.float64, 1e-10) if args.dtype == "float64" else (torch.float32, 1e-5))
    torch.manual_seed(0)
    start = Model(args.heads, args.kv_heads).to(device, dtype)
    kv = 2 * 2 * S * args.kv_heads * start.head_dim * dtype.itemsize  # K and V of 2 sequences; gradients too
    versions = [v for v in (*TRANSPORTS, "ulysses") if args.version in ("all", v)]
    cases = [(v, x) for v in versions for x in PACKED_LAYOUTS if v != "ulysses" and args.layout in ("all", x)]
    if "ulysses" in versions:
        cases.append(("ulysses", "contiguous"))
    whole = args.heads * sum(n * (n + 1) // 2 for n in args.documents)
    wrong = []
    everywhere = places_in_documents(torch.arange(S, device=device), cu)
    if rank == 0:
        print(f"{P} rank(s) on {device.type}, documents of {args.documents} tokens, {args.heads}/{args.kv_heads} heads")
        print(f"{whole} (query, key) pairs of all heads; {args.heads * S * (S + 1) // 2} if it were one document")
        print(f"{'':20} {'error':>8} {'pairs of a rank':>16} {'bytes sent':>11}")
    for version, layout in cases:
        count = [0]
        if version == "ulysses":
            attention = ulysses(group, in_documents(cu, counting_heads(dense_attention, count)))
        else:
            attention = packed_attention(group, cu, layout, version, counting(EXPLICIT, count))
        where = packed_positions(layout, cu, rank, P).to(device)
        step = partial(packed_step, where=where, cu=cu, attention=attention, group=group)
        with Wire(P) as wire:
            error = against_reference(
                deepcopy(start), step, S, masked_attention(cu), partial(packed_labels, cu=cu), everywhere
            )
        found: list = [None] * P
        heads = 1 if version == "ulysses" else args.heads
        dist.all_gather_object(found, (error, count[0] * heads // 3, wire.bytes // 3), group=group)  # of one step
        errors, pairs, sent = zip(*found, strict=True)
        name = f"{version} {layout}" if version != "ulysses" else version
        want = tuple(packed_pairs(layout, cu, r, P) * args.heads for r in range(P))
        if version == "ulysses":
            want = tuple(whole // args.heads * len(query_heads_of(r, P, args.heads)) for r in range(P))
        else:
            predicted = 3 * kv * (P - 1) // P  # forward KV, backward KV + dKV; independent of boundaries
            if set(sent) != {predicted}:
                wrong.append(f"{name}: sent {sent}, predicted {predicted}")
        wrong += [f"{name}: rank {r} off by {e:.1e}" for r, e in enumerate(errors) if not e <= tolerance]
        if pairs != want or sum(pairs) != whole:
            wrong.append(f"{name}: pairs {pairs}, predicted {want}")
        if rank == 0:
            print(f"{name:20} {max(errors):8.1e} {f'{min(pairs)} to {max(pairs)}':>16} {max(sent):11}")
    return wrong


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(run(arguments, demo))
