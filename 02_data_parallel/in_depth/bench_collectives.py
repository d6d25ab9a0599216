"""Ring, tree and naive all-reduce against each other and against torch.distributed, for a small and a large message.

    python 02_data_parallel/in_depth/bench_collectives.py

Before any timing, every version must give the correct sum. The table has two predictions next to the
measurement, for a message so small that only rounds matter, and for one so large that only bytes matter:

    own links    every rank has its own link, as in a cluster: cost()
    one link     all messages share one link, as the memory and the few cores of this machine: the messages,
                 or the bytes, of all ranks together

Where Linux allows a network namespace, the operating system then counts the bytes that are sent.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import _wire
import torch
import torch.distributed as dist
from collectives import all_reduce_naive, all_reduce_ring, all_reduce_tree, cost
from harness.meter import communication
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import Ratio, option_given, paired, write_result

RANKS = 4
WIRE = 1_000_000  # elements, where the operating system counts
MESSAGES = {"1 KiB": 2**8, "16 MiB": 2**22}  # elements of float32
OURS = {"all_reduce_ring": all_reduce_ring, "all_reduce_tree": all_reduce_tree, "all_reduce_naive": all_reduce_naive}
GLOO = "torch.distributed on Gloo"


def verify(numel: int) -> dict[str, tuple[int, int]]:
    """Messages and bytes that this rank sends in each version, after a check of the sums."""
    sent_by = {}
    for name, all_reduce in (OURS | {GLOO: dist.all_reduce}).items():
        base = torch.arange(numel, dtype=torch.float32) % 97
        x = base + dist.get_rank()
        with communication() as sent:
            all_reduce(x, group=dist.group.WORLD)
        assert_same(x, base * RANKS + sum(range(RANKS)), 0.0, f"the sum of {numel} elements by {name}", dist.get_rank())
        sent_by[name] = (sent.calls["send"], sent.sent["send"])
    return sent_by


def measure(numel: int) -> dict[str, Ratio]:
    """On every rank: the ratio of each version's seconds to the ring's."""
    group, x = dist.group.WORLD, torch.zeros(numel)  # zeros stay zeros, however often they are summed
    versions = {name: run for name, run in (OURS | {GLOO: dist.all_reduce}).items() if run is not all_reduce_ring}
    return {
        name: paired(
            lambda run=run: run(x, group=group), lambda: all_reduce_ring(x, group), repeats=15, setup=dist.barrier
        )
        for name, run in versions.items()
    }


def count_bytes() -> None:
    """Bytes on the wire: a count and no timing, so it can also be called by itself."""
    if problem := _wire.why_not():
        print(f"bytes on the wire are not counted: {problem}")
        return
    formula, counted = 2 * (RANKS - 1) * 4 * WIRE, _wire.count(RANKS, WIRE)
    if not all(formula <= sent <= 1.05 * formula for sent in counted.values()):
        raise SystemExit(f"bytes on the wire {counted}; the formula says {formula}, and headers a little more")
    write_result(
        "02_wire",
        f"Bytes of all {RANKS} ranks in one all-reduce of 1,000,000 float32, as the operating system counts them",
        ["all-reduce", "on the loopback", "formula, 2 (P-1) n", "times the formula"],
        [
            [name if name != "torch" else GLOO, sent, formula, round(sent / formula, 4)]
            for name, sent in counted.items()
        ],
        "Counted in a network namespace of its own, headers of TCP and IP included. All ranks together send as much in "
        "one version as in another; in the ring each rank sends a P-th of it.",
    )


def main() -> None:
    rows = []
    sent = {message: run_ranks(RANKS, verify, numel) for message, numel in MESSAGES.items()}
    for term, (message, numel) in enumerate(MESSAGES.items()):  # term 0: rounds, messages; term 1: volume, bytes
        total = {name: sum(rank[name][term] for rank in sent[message]) for name in OURS}
        for name, ratio in run_ranks(RANKS, measure, numel, timeout=300)[0].items():
            own = cost(name, RANKS)[term] / cost("all_reduce_ring", RANKS)[term] if name in OURS else "-"
            one = total[name] / total["all_reduce_ring"] if name in OURS else "-"
            rows.append([message, f"{name} / all_reduce_ring", ratio, one, own])
    write_result(
        "02_collectives",
        f"All-reduce on {RANKS} ranks: seconds over those of the ring",
        ["message", "versions", "measured: median (quartiles)", "predicted, one link", "predicted, own links"],
        rows,
        "The ranks are processes of one machine, so all messages pass through one memory and a few cores. There the "
        "ring has nothing to gain: it sends as many bytes as the others in all, in more messages.",
    )
    count_bytes()


if __name__ == "__main__":
    option_given()
    main()
