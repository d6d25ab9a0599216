"""The rehearsal against ranks that really run, against planted mistakes, and for the planner's proposals.

    python 11_5d_trainer/planner/bench_rehearse.py    verifies, rehearses, writes the results 11_rehearse_*
    python 11_5d_trainer/planner/bench_rehearse.py --small      only the small layouts and the planted mistakes
    python 11_5d_trainer/planner/bench_rehearse.py --large      only the four plans, overlap and timeline
    python 11_5d_trainer/planner/bench_rehearse.py --figures    only draws

First the small layouts of test_rehearse.py, on CPU ranks: if collectives or bytes sent, stored or at the peak
differ, it ends with exit code 1 and writes nothing. Then the planted mistakes, each of which must be found.
Then the planner's proposals for four models, up to 16,384 ranks, each in less than two minutes of one core.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import planner_paths  # noqa: E402, F401  finds the trainer and the chapters
import plan_search  # noqa: E402
from harness.figures import COLOURS, write_figure  # noqa: E402
from harness.report import write_result  # noqa: E402
from plan_memory import Layout  # noqa: E402
from rehearse import GIB, arguments, cluster_of, config_of, planned, rehearse  # noqa: E402
from test_rehearse import PLANTED, REAL, compared, with_planted  # noqa: E402

LARGE = {
    "Llama-3 8B": "--model llama3-8b --ranks 64 --plan",
    "Llama-3 70B": "--model llama3-70b --ranks 512 --plan",
    "Mixtral 8x7B": "--model mixtral-8x7b --ranks 256 --plan",
    "Llama-3 405B": "--model llama3-405b --ranks 16384 --plan --tokens 16777216",
}
DRAWN = "--model llama3-70b --ranks 512 --seq-len 8192 --micro-batch 1 --global-batch 512 --tp 8 --sequence-parallel"
DRAWN += " --pp 4 --zero 1 --precision bf16-master"
LIMIT = 120.0  # seconds of one core


def small_rows() -> list[list[Any]]:
    """[ranks, layout, collectives and messages, bytes sent, peak by the meter, peak rehearsed], of the fullest rank."""
    rows = []
    for ranks, words in REAL:
        measured, done = compared(ranks, words)
        rank = max(range(ranks), key=lambda r: sum(done.runs[r].bytes.values()))
        events, sent, kept, peak = measured[rank]
        here, there = sum(kept.values()) + peak, sum(done.runs[rank].bytes.values())
        layout = ", ".join(f"{name} {value}" for name, value in words.items())
        rows.append([ranks, layout, len(events), round(sum(sent.values())), here, there])
    return rows


def planted_rows() -> list[list[Any]]:
    """[mistake, kind of the finding, the first two lines of code that it names]"""
    rows = []
    for what in PLANTED:
        finding = with_planted(what).finding
        if finding is None:
            sys.exit(f"bench_rehearse.py: {what!r} was planted, and nothing was found")
        lines = [line.strip().removeprefix("at ") for line in finding.text.splitlines() if ".py:" in line]
        rows.append([what, finding.kind, " / ".join(line.partition(",")[0] for line in lines[:2])])
    return rows


def large_rows() -> list[list[Any]]:
    """[model, ranks, layout, programs, collectives, GiB at the peak of the fullest rank, planner's, off in %,
    GB sent, seconds of a step on the clock, planner's]"""
    rows = []
    for name, given in LARGE.items():
        args, rest = arguments(given.split())
        one, sizes = config_of(args, rest)
        begin = time.process_time()
        done = rehearse(one, sizes, args.ranks, cluster=cluster_of(args))
        seconds = time.process_time() - begin
        if done.finding or not seconds <= LIMIT:
            sys.exit(f"bench_rehearse.py: {name} in {seconds:.0f} s of {LIMIT:.0f}: {done.finding}")
        for run in done.runs.values():
            sent, formula = run.sent(), planned(done, run)[1]
            if any(not abs(sent[what] - formula.get(what, 0)) <= 1 for what in sent.keys() | formula.keys()):
                sys.exit(f"bench_rehearse.py: {name}, rank {run.rank} sends {dict(sent)}, planned was {formula}")
        fullest = max(done.runs.values(), key=lambda run: sum(run.bytes.values()))
        here, there = sum(fullest.bytes.values()), planned(done, fullest)[0]
        count, off = sum(len(run.ops) for run in done.runs.values()), round(100 * (there / here - 1), 2) or 0.0
        if not abs(off) <= 1:
            sys.exit(f"bench_rehearse.py: {name}, rank {fullest.rank}: {there:,} bytes planned, {here:,} rehearsed")
        total = round(sum(fullest.sent().values()) / 1e9, 2)
        layout = plan_search.name(Layout.of(done.config, sizes, args.ranks))
        cells = [name, args.ranks, layout, len(done.runs), count]
        assert done.timeline and done.step
        clock = [round(done.timeline.seconds, 2), round(done.step.seconds, 2)]
        rows.append([*cells, round(here / GIB, 2), round(there / GIB, 2), off, total, *clock])
    return rows


def timeline_rows() -> list[list[Any]]:
    """[pipeline rank, what, from, to] in seconds: the whole step, and the waits in it of a millisecond or more."""
    args, rest = arguments(DRAWN.split())
    done = rehearse(*config_of(args, rest), args.ranks, cluster=cluster_of(args))
    assert done.timeline
    stage = {rank: run.place["pp"] for rank, run in done.runs.items()}
    rows = [[place, "step", 0.0, round(done.timeline.seconds, 4)] for place in stage.values()]
    for piece in done.timeline.slices:
        if piece.lane == "waits" and piece.name != "tp" and piece.end - piece.begin >= 1e-3:
            what = "gradients and weights" if piece.name == "data" else "other stages"
            rows.append([stage[piece.rank], what, round(piece.begin, 4), round(piece.end, 4)])
    return rows


OVERLAP = "--model llama3-8b --ranks 8 --seq-len 4096 --micro-batch 2 --global-batch 4 --tp 4 --sequence-parallel"
OVERLAP += " --zero 1 --precision bf16-master --tp-overlap"


def overlap_rows() -> list[list[Any]]:
    """[--tp-overlap, seconds of a step on the clock, of which rank 0 waits for its tensor group, GiB at its peak]"""
    rows = []
    for how in ("none", "backward", "domino"):
        args, rest = arguments(f"{OVERLAP} {how}".split())
        done = rehearse(*config_of(args, rest), args.ranks, cluster=cluster_of(args))
        if done.finding:
            sys.exit(f"bench_rehearse.py: --tp-overlap {how}: {done.finding}")
        assert done.timeline
        waits, peak = done.timeline.exposed[0].get("tp", 0.0), sum(done.runs[0].bytes.values())
        rows.append([how, round(done.timeline.seconds, 4), round(waits, 4), round(peak / GIB, 2)])
    return rows


def draw_timeline(axes: Any, result: dict[str, Any]) -> None:
    """A bar for each stage: blue where it computes, the other colours where it waits."""
    colours = {
        "step": COLOURS["compute"],
        "other stages": COLOURS["idle"],
        "gradients and weights": COLOURS["messages"],
    }
    words = {"step": "computes, and exchanges with its tensor group", "other stages": "waits for other stages"}
    words["gradients and weights"] = "waits for gradients and new weights"
    for what, colour in colours.items():
        rows = [row for row in result["rows"] if row[1] == what]
        for place in sorted({row[0] for row in rows}):
            pieces = [(begin, end - begin) for at, _, begin, end in rows if at == place]
            label = words[what] if place == rows[0][0] else None
            axes.broken_barh(pieces, (place - 0.4, 0.8), facecolors=colour, label=label)
    stages = sorted({row[0] for row in result["rows"]})
    axes.set(yticks=stages, yticklabels=[f"stage {place}" for place in stages], xlabel="seconds of the step")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.28), ncols=3, frameon=False, fontsize=8)


def figures() -> None:
    write_figure("11_5d_trainer/figures/rehearsal.svg", ["11_rehearse_timeline"], draw_timeline, size=(9.5, 3.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    only = parser.add_mutually_exclusive_group()
    for what in ("small", "large", "figures"):
        only.add_argument(f"--{what}", action="store_true")
    args = parser.parse_args()
    if args.figures:
        figures()
        return
    if not args.large:
        write_small(small_rows(), planted_rows())
    if not args.small:
        write_large(large_rows())
    figures()


def write_small(small: list[list[Any]], planted: list[list[Any]]) -> None:
    note = "A step on CPU ranks over gloo, by the meter of the tests, against the same step rehearsed; fullest rank."
    columns = ["ranks", "layout", "collectives and messages", "bytes sent", "peak by the meter", "peak rehearsed"]
    write_result("11_rehearse_small", "A step that really runs, and its rehearsal", columns, small, note)
    note = "Planted by test_rehearse.py into one rank (or all) of 2 or 4."
    columns = ["mistake", "found as", "lines that are named"]
    write_result("11_rehearse_planted", "Planted deadlocks and mismatches", columns, planted, note)


def write_large(large: list[list[Any]]) -> None:
    note = (
        "The layouts that plan.py proposes for nodes of 8 H100, bf16 weights, 8192 tokens. Counted by the rehearsal, "
        "not measured on GPUs. Bytes sent by each program equal the planner's, collective by collective; each "
        f"rehearsal took less than {LIMIT:.0f} s of one core."
    )
    columns = [
        *("model", "ranks", "layout", "programs run", "collectives and messages"),
        *("peak rehearsed, GiB", "peak planned, GiB", "plan off, %", "sent a step, GB"),
        *("s a step on the clock", "s a step planned"),
    ]
    write_result("11_rehearse_large", "Four plans, rehearsed", columns, large, note, computed=True)
    note = f"Rehearsed, not measured: {OVERLAP} ..., on nodes of 8 H100."
    columns = ["--tp-overlap", "s a step on the clock", "s of waiting for tensor ranks", "peak, GiB"]
    title = "Tensor parallelism that hides, rehearsed"
    write_result("11_rehearse_overlap", title, columns, overlap_rows(), note, computed=True)
    note = f"Rehearsed, not measured: {DRAWN}"
    columns = ["pipeline rank", "what", "from, s", "to, s"]
    title = "A step of 70B on 512 ranks on the clock"
    write_result("11_rehearse_timeline", title, columns, timeline_rows(), note, computed=True)


if __name__ == "__main__":
    main()
