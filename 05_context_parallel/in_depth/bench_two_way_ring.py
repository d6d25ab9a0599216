"""The ring in two directions beside the ring in one, on 4 ranks: what each link carries, and in how many messages.

    python 05_context_parallel/in_depth/bench_two_way_ring.py

First both must give the output and the gradients of dense attention; only then is anything counted. Ranks of one
machine have no links, so what a second direction saves in time is not measured here.
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch.distributed as dist
from bench_context_ring import HEADS, RANKS, D, S, inputs, step_of
from context_ring import dense_attention, layout_positions, ring_attention
from flash_local import FLASH
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import write_result
from two_way_ring import two_way_ring

VERSIONS = {"one direction": ring_attention, "two directions": two_way_ring}


def verify() -> dict[str, tuple[int, int, int]]:
    """Bytes to the next rank and to the one before, and messages, once the results are right."""
    group, rank, found = dist.group.WORLD, dist.get_rank(), {}
    where, plain = layout_positions("zigzag", S, rank, RANKS), dist.batch_isend_irecv
    shards, want = [x[:, where].contiguous() for x in inputs()], step_of(dense_attention, *inputs())
    for name, make in VERSIONS.items():
        sent: Counter[int] = Counter()
        messages: Counter[int] = Counter()

        def batch(posted, sent=sent, messages=messages):
            for message in posted:
                if message.op is dist.isend:
                    sent[message.group_peer] += message.tensor.nbytes
                    messages[message.group_peer] += 1
            return plain(posted)

        dist.batch_isend_irecv = batch
        try:
            got = step_of(make(group, "zigzag", FLASH), *shards)
        finally:
            dist.batch_isend_irecv = plain
        for what, x, expected in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, expected[:, where], 1e-5, f"{what} of {name}", rank)
        found[name] = sent[(rank + 1) % RANKS], sent[(rank - 1) % RANKS], messages.total()
    return found


def main() -> None:
    found = run_ranks(RANKS, verify, timeout=300)[0]
    write_result(
        "05_two_way_ring",
        f"Forward and backward of causal attention on {RANKS} ranks in zigzag: a ring in one direction, and in two",
        ["ring", "bytes to the next rank", "bytes to the one before", "messages of a rank"],
        [[name, *counts] for name, counts in found.items()],
        f"{S} tokens, {HEADS} heads of {D}, float32. Counted.",
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: it has no options; use nothing", file=sys.stderr)
        sys.exit(2)
    main()
