"""Packed documents on 4 ranks: who computes how much, and who sends how much, beside one long document.

    python 05_context_parallel/in_depth/bench_packed_documents.py

First every version must give the output and the gradients of attention with a block-diagonal causal mask; only then is
anything measured.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch.distributed as dist
from bench_context_ring import HEADS, RANKS, D, S, inputs, step_of
from context_ring import ring_attention
from context_ulysses import ulysses
from flash_local import FLASH
from harness.meter import communication
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import write_result
from packed_documents import (
    boundaries,
    in_documents,
    masked_attention,
    packed_attention,
    packed_pairs,
    packed_positions,
)
from torch import Tensor

LENGTHS = [1024, 64, 256, 128, 64, 512]  # one long document and several short ones: 2048 tokens
CU, ONE = boundaries(LENGTHS), [0, S]
assert CU[-1] == S
BASE = "one document, ring, zigzag"
CASES = {
    BASE: ("ring", "zigzag", ONE),
    "ring, contiguous": ("ring", "contiguous", CU),
    "ring, zigzag": ("ring", "zigzag", CU),
    "ring, striped": ("ring", "striped", CU),
    "ring, each document in zigzag": ("ring", "each", CU),
    "all-gather, each document in zigzag": ("allgather", "each", CU),
    "Ulysses": ("ulysses", "contiguous", CU),
}


def steps() -> dict[str, tuple[Tensor, list[int], Callable[[], list[Tensor]]]]:
    """Every version on this rank: where its tokens are, its documents, and its forward and backward."""
    group, rank, made = dist.group.WORLD, dist.get_rank(), {}
    for name, (version, layout, cu) in CASES.items():
        if version == "ulysses":
            attention = ulysses(group, in_documents(cu))
        elif name == BASE:
            attention = ring_attention(group, layout, FLASH)
        else:
            attention = packed_attention(group, cu, layout, version, FLASH)
        where = packed_positions(layout, cu, rank, RANKS)
        shards = [x[:, where].contiguous() for x in inputs()]
        made[name] = where, cu, lambda attention=attention, shards=shards: step_of(attention, *shards)
    return made


def verify() -> dict[str, float]:
    """Bytes that this rank sends in each version, once each has given the right results."""
    sent_by = {}
    for name, (where, cu, step) in steps().items():
        want = step_of(masked_attention(cu), *inputs())
        with communication() as sent:
            got = step()
        for what, x, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, expected[:, where], 1e-5, f"{what} of {name}", dist.get_rank())
        sent_by[name] = sent.total
    return sent_by


def main() -> None:
    sent = run_ranks(RANKS, verify, timeout=300)
    whole, one = (sum(n * (n + 1) // 2 for n in of) for of in (LENGTHS, [S]))
    rows = []
    for name, (version, layout, cu) in CASES.items():
        pairs = [packed_pairs(layout, cu, rank, RANKS) for rank in range(RANKS)]
        total = one if cu is ONE else whole
        busiest = 1 if version == "ulysses" else max(pairs) * RANKS / total
        rows.append([name, total / one, busiest, max(s[name] for s in sent) / max(s[BASE] for s in sent)])
    write_result(
        "05_packed",
        f"Documents of {', '.join(map(str, LENGTHS))} tokens packed in one sequence, on {RANKS} ranks",
        ["version", "pairs of all ranks", "busiest rank over average", "bytes sent"],
        rows,
        f"Causal attention, {HEADS} heads of {D}, float32; pairs of forward, bytes of both passes, both over one "
        "document of as many tokens. Counted.",
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: it has no options; use nothing", file=sys.stderr)
        sys.exit(2)
    main()
