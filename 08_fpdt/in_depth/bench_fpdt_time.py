"""How large a chunk should be, and what the streams do when: what fpdt_time.py says.

    python 08_fpdt/in_depth/bench_fpdt_time.py   writes results/08_fpdt_chunk_size*, 08_fpdt_shared*,
        08_fpdt_timelines* and both figures
    python 08_fpdt/in_depth/bench_fpdt_time.py --figures       only draws the figures again

All of it is computed, so first the sums have to be true: the computation must wait for as long as it does when the
schedule is played, forward and backward, with one slot and two, at many speeds. If one number is off, nothing is
written. (That the schedule is the one of the loops, test_fpdt_time.py says.)
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fpdt_costs import Hardware, Sizes, idle_time
from fpdt_time import (
    attention_seconds,
    recommend,
    schedule,
    seconds_of,
    seconds_table,
    smallest_hidden_chunk,
    timeline,
)
from harness.figures import COLOURS, write_figure
from harness.report import write_result


def verify() -> None:
    """The sums against the schedule."""
    for u, P, slots, sharing in itertools.product((1, 2, 3, 6), (1, 4), (1, 2), (1, 16)):
        z, h = Sizes(2**14 // 12 * 12 * u, P, u, 32, 8, 64), Hardware(sharing=sharing)
        for way in ("forward", "backward"):
            want = idle_time(schedule(z, way, slots), lambda op, z=z, h=h: seconds_of(op, z, h))
            got = attention_seconds(z, h, way, slots)[1]
            if not abs(got - want) <= 1e-9 * (1 + want):
                sys.exit(f"{z}, {h}, {slots} slots: {way} waits {want} s when played, {got} s by the sums")


def sweep_rows() -> list[list]:
    """Attention of one layer of a 1.2-billion Llama at 512k tokens, by size of a chunk."""
    z, h = Sizes(2**19, 1, 1, 32, 8, 64), Hardware()
    best, rows = recommend(z, h, 2e9)
    table = []
    for now, forward, backward, peak in rows:
        x, y = (seconds_table(now, h, way) for way in ("forward", "backward"))
        cells = [1e3 * seconds for seconds in (x.pair, 2 * x.kv, y.pair, 3 * y.q + y.lse + y.dq)]
        table.append([now.c, *cells, forward, backward, peak / 1e9, "recommended" if now == best else ""])
    return table


def shared_rows() -> list[list]:
    """2 million tokens of the same layer on 8 GPUs whose host's link is shared by 1 to 8 of them."""
    table = []
    for sharing in (1, 2, 4, 8):
        z, h = Sizes(2**21, 8, 1, 32, 8, 64), Hardware(sharing=sharing)
        hidden = round(smallest_hidden_chunk(z, h, "backward"))
        best, _ = recommend(z, h, 40e9)
        waits = []
        for c, slots in ((2**14, 2), (2**16, 1), (2**16, 2)):
            for way in ("forward", "backward"):
                total, idle = attention_seconds(z.with_chunks(z.S // c), h, way, slots)
                waits.append(f"{idle / (total - idle):.1%}")
        table.append([sharing, hidden, best.c, *waits])
    return table


def timeline_rows() -> list[list]:
    """Of 4 chunks of 16k tokens on one of 4 GPUs: [case, stream, what, start, end], in ms."""
    z, rows = Sizes(2**16, 4, 4, 32, 8, 64), []
    for way in ("forward", "backward"):
        for sharing, slots in ((1, 1), (1, 2), (4, 2)) if way == "backward" else ((4, 2),):
            case = f"{way}, {slots} slot{'s' * (slots > 1)}, link {'shared by 4' if sharing > 1 else 'of its own'}"
            for stream, name, start, end in timeline(z, Hardware(sharing=sharing), way, slots):
                rows.append([case, stream, name, 1e3 * start, 1e3 * end])
    return rows


def draw_timelines(axes, result) -> None:
    cases = list(dict.fromkeys(row[0] for row in result["rows"]))
    lanes = ("compute", "fetch", "offload")
    longest = max(row[4] for row in result["rows"])
    for panel, case in zip(axes, cases, strict=True):
        for _, stream, name, start, end in (row for row in result["rows"] if row[0] == case):
            message = stream == "compute" and not name.startswith("attend")
            kind = "messages" if message or stream == "fetch" else {"offload": "activations"}.get(stream, stream)
            panel.barh(lanes.index(stream), end - start, left=start, height=0.8, color=COLOURS[kind])
        spans = sorted(row[3:] for row in result["rows"] if row[0] == case and row[1] == "compute")
        for (_, end), (start, _) in itertools.pairwise([(0, 0), *spans]):
            if start > end + 1e-6:
                panel.barh(0, start - end, left=end, height=0.8, color=COLOURS["idle"], alpha=0.4)
        panel.set(yticks=range(3), yticklabels=lanes, title=case, xlim=(0, longest), xlabel="ms")
        panel.invert_yaxis()
        panel.grid(False)


def draw(axes, result) -> None:
    chunk, forward, backward, peak = ([row[n] for row in result["rows"]] for n in (0, 5, 6, 7))
    axes.loglog(chunk, forward, "o-", label="seconds, forward")
    axes.loglog(chunk, backward, "^-", label="seconds, backward")
    axes.loglog(chunk, peak, "s--", label="GB at most, backward")
    [best] = [row[0] for row in result["rows"] if row[8]]
    axes.axvline(best, color="gray", linestyle=":")
    axes.set(xlabel="tokens of a chunk", title="Too small waits for the link, too large fills the memory")
    axes.legend()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="only draw the figures again")
    if not parser.parse_args().figures:
        verify()
        write_result(
            "08_fpdt_chunk_size",
            "Attention of one layer of a 1.2-billion Llama, 512k tokens on one GPU, by size of a chunk (computed)",
            [
                "tokens of a chunk",
                "a pair, ms",
                "its fetch, ms",
                "back, ms",
                "its fetches, ms",
                "forward, s",
                "backward, s",
                "peak, GB",
                "",
            ],
            sweep_rows(),
            f"Computed, not measured, for {Hardware()} and 2 GB for attention.",
        )
        write_result(
            "08_fpdt_shared",
            "Attention of the same layer, 2M tokens on 8 GPUs, whose link to the host is shared (computed)",
            [
                "GPUs that share the link",
                "c* of the backward",
                "recommended chunk",
                "16k: forward waits",
                "16k: backward",
                "64k, one slot: forward",
                "64k, one slot: backward",
                "64k, two slots: forward",
                "64k, two slots: backward",
            ],
            shared_rows(),
            f"In % of what the computation works, all-to-alls included. Computed for {Hardware()}, with enough memory.",
        )
        write_result(
            "08_fpdt_timelines",
            "The streams of one of 4 GPUs, in ms: attention of one layer, 64k tokens in 4 chunks (computed)",
            ["case", "stream", "what", "start", "end"],
            timeline_rows(),
            f"From the schedule of the loops, played with {Hardware()}. An all-to-all is on the computation's stream.",
        )
    write_figure("08_fpdt/figures/chunk_size.svg", ["08_fpdt_chunk_size"], draw)
    write_figure("08_fpdt/figures/timelines.svg", ["08_fpdt_timelines"], draw_timelines, shape=(4, 1), size=(9, 8))
    return 0


if __name__ == "__main__":
    sys.exit(main())
