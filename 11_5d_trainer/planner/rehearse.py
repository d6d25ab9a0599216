"""The whole run before the run: the trainer's own code for every distinct rank of 16,384, on a laptop.

    python 11_5d_trainer/planner/rehearse.py --ranks 8 --tp 2 --pp 2 --zero 1        any options of train.py
    python 11_5d_trainer/planner/rehearse.py --model llama3-70b --ranks 512 --plan   the layout that plan.py proposes
    ... --all-ranks         run every rank, and assume nothing
    ... --backend gloo      as on CPU ranks, where the trainer reduces gradients by sends; otherwise nccl
    ... --processes 2       ranks at the same time

Problem. A plan says that a layout fits, and train.py's checks say that it divides. Neither has called a
collective. On ten thousand GPUs the first step is the first time that all ranks run together. If one calls
two collectives in another order, the only sign is a timeout that names neither of them.

Idea. The program of a rank does not depend on the values of its tensors, only on their shapes. So each
distinct rank runs alone, in one process, without memory and network, and records what it would send, to which
rank, and when it would wait (rehearse_rank.py). Then the recorded programs are matched (rehearse_match.py):

    does it run?    every collective matches the same one on all ranks of its group, every send a receive, and
                    no ranks wait in a cycle. If not: which ranks, and the lines of code on both sides
    does it fit?    bytes at the peak of the step, equal to the meter's count on ranks that really run; beside
                    it the planner's formula
    what is sent?   bytes sent by collective, beside the planner's

    rank                       0        1        ...     16383           16,384 ranks as 8 x 128 x 16 (tp, dp, pp)
    runs the program of        0        0        ...     15 x 1024       16 programs: data and tensor ranks are twins

Ranks with different programs: pipeline stages; with `--cp-kind ring` positions in the ring, which see
different parts of the causal mask; and Ulysses ranks if neither of their number and the K/V heads divides the
other. All other ranks of a stage run the same program on other data.

Without --plan and --precision the rehearsal is in fp32; on GPUs the trainer uses bf16-master and --zero 1 if
they have bf16. The last line is PASS; or the finding, with exit code 1. Wrong options: one line, exit code 2.
"""

import argparse
import dataclasses
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import planner_paths  # noqa: F401  finds the trainer and the chapters
import plan
import torch
from llama import LlamaConfig
from mesh import AXES
from options import SIZES, Config, UsageError, flag
from options import parse as parse_trainer
from plan_memory import SAME, Layout, check_planned, peak
from plan_search import Task, search
from plan_time import Cluster, Step, read_cluster, step_time
from plan_traffic import by_collective, flows
from rehearse_match import Finding, check_twins, match
from rehearse_rank import Recorded, check, run_rank
from rehearse_time import Timeline, on_the_clock, write_trace
from step import has_triton

GIB = 2**30
PLANNED = {"cp", "cp_kind", "global_batch"} | {*SAME} - {"seq_len", "precision", "tp_overlap"}  # options of a layout


@dataclasses.dataclass
class Rehearsal:
    """A rehearsed run: what its distinct ranks did, and what would go wrong, if anything."""

    config: Config
    sizes: LlamaConfig
    ranks: int
    backend: str
    runs: dict[int, Recorded]
    finding: Finding | None
    seconds: float
    timeline: Timeline | None = None  # with a cluster, and without a finding
    step: Step | None = None  # the planner's


def twins(config: Config, sizes: LlamaConfig, ranks: int) -> Callable[[int], int]:
    """rank -> the rank whose program it runs: the first with the same stage (and the same place in a plain
    ring, or in Ulysses if its ranks need different numbers of K/V heads)."""
    axes = config.layout(sizes, ranks)[0]
    keep = {"pp"} | ({"ring"} if config.cp_kind == "ring" else set())
    kv_heads = max(sizes.kv_heads // config.tp, 1)
    all_to_all = axes["ulysses"]
    if kv_heads % all_to_all and all_to_all % kv_heads:
        keep |= {"ulysses"}
    stride = {axis: math.prod(axes[inner] for inner in AXES[i + 1 :]) for i, axis in enumerate(AXES)}

    def twin(rank: int) -> int:
        return sum(rank // stride[axis] % axes[axis] * stride[axis] for axis in keep)

    return twin


def rehearse(
    config: Config,
    sizes: LlamaConfig,
    ranks: int,
    *,
    backend: str = "nccl",
    all_ranks: bool = False,
    processes: int = 1,
    cluster: Cluster | None = None,
    before: Callable[[int], Any] = nullcontext,
) -> Rehearsal:
    """Run every distinct rank of `ranks`, and match what they did. Raises UsageError for what cannot be rehearsed.

    cluster  whose clock times the step
    before   called with each rank before it runs; returns a context for it. The tests plant mistakes with it.
    """
    begin = time.perf_counter()
    config = check(config, sizes, ranks, backend)
    twin = (lambda rank: rank) if all_ranks else twins(config, sizes, ranks)
    distinct = sorted({twin(rank) for rank in range(ranks)})
    runs: dict[int, Recorded] = {}
    if processes > 1 and len(distinct) > 1:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            given = [(config, sizes, rank, ranks, backend, cluster) for rank in distinct]
            runs = dict(zip(distinct, pool.map(run_rank, *zip(*given, strict=True)), strict=True))
    else:
        for rank in distinct:
            with before(rank):
                runs[rank] = run_rank(config, sizes, rank, ranks, backend, cluster)
    if why := check_twins(runs, twin):
        raise UsageError(f"--ranks {ranks} cannot be folded: {why}; use --all-ranks")
    finding = match(runs, twin, backend)
    timeline, step = None, None
    if cluster is not None and finding is None:
        timeline = on_the_clock(runs, twin, backend, cluster)
        if not unplanned(config, sizes, ranks, timed=True):
            step = step_time(sizes, config.mixture(sizes), Layout.of(config, sizes, ranks), cluster)
    return Rehearsal(config, sizes, ranks, backend, runs, finding, time.perf_counter() - begin, timeline, step)


# ------------------------------------------------------------------------------------------------------- the report


def table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def unplanned(config: Config, sizes: LlamaConfig, ranks: int, timed: bool = False) -> str:
    """Why the planner has no bytes to compare, and if `timed` no seconds; empty if it has."""
    try:
        check_planned(config, sizes, ranks, timed)
    except UsageError as error:
        return str(error)
    return ""


def planned(done: Rehearsal, run: Recorded) -> tuple[int, dict[str, float]]:
    """Peak bytes and bytes sent of this rank by the planner's formulas."""
    layout = Layout.of(done.config, done.sizes, done.ranks)
    moe = done.config.mixture(done.sizes)
    place = run.place["pp"]
    sent = by_collective(flows(done.sizes, moe, layout, place, p2p_reduce=done.backend == "gloo"))
    return sum(peak(done.sizes, moe, layout, place).values()), dict(sent)


def report(done: Rehearsal) -> list[str]:
    operations = sum(len(run.ops) for run in done.runs.values())
    lines = [
        f"{done.ranks:,} ranks, {len(done.runs)} distinct program(s), {operations:,} collectives and messages, "
        f"{done.seconds:.1f} s",
        f"computed in {done.config.precision}, with --kernels {done.config.kernels}",
        "",
    ]
    if done.backend == "nccl" and not has_triton():
        lines[2:2] = ["Triton is not installed, so the chapters' fused kernels are not, and more is kept"]
    alone = unplanned(done.config, done.sizes, done.ranks)
    formulas = {rank: None if alone else planned(done, run) for rank, run in done.runs.items()}
    rows = [["rank", "pp", "weights", "gradients", "states", "activations", "peak GiB", "planner", "off"]]
    for rank, run in done.runs.items():
        total = sum(run.bytes.values())
        formula = formulas[rank]
        cells = [f"{size / GIB:.3f}" for size in run.bytes.values()]
        beside = [f"{formula[0] / GIB:.3f}", f"{100 * (formula[0] / total - 1):+.2f} %"] if formula else ["-", "-"]
        rows.append([str(rank), str(run.place["pp"]), *cells, f"{total / GIB:.3f}", *beside])
    lines += [*table(rows), ""]
    rows = [["rank", "collective", "calls", "bytes sent", "planner"]]
    for rank, run in done.runs.items():
        formula = formulas[rank]
        sent = run.sent()
        formula_sent = formula[1] if formula else {}
        calls = Counter(op.name for op in run.ops[run.step_from :])
        for name in sorted(sent.keys() | formula_sent.keys()):
            there = f"{formula_sent.get(name, 0):,.0f}" if formula else "-"
            rows.append([str(rank), name, f"{calls[name]:,}", f"{sent.get(name, 0):,.0f}", there])
    lines += [*table(rows), *(["", f"the planner has no numbers: {alone}"] if alone else [])]
    return [*lines, *(clock_lines(done.timeline, done.step) if done.timeline else [])]


def clock_lines(timeline: Timeline, step: Step | None) -> list[str]:
    """Seconds of the step on each rank that was run: computing, and waiting by group."""
    groups = sorted({group for waits in timeline.exposed.values() for group in waits})
    rows = [["rank", "computes", *(f"waits: {group}" for group in groups)]]
    for rank, waits in timeline.exposed.items():
        rows.append([str(rank), f"{timeline.compute[rank]:.3f}", *(f"{waits.get(group, 0):.3f}" for group in groups)])
    beside = f"; the planner says {step.seconds:.3f} s" if step else ""
    return ["", f"a step takes {timeline.seconds:.3f} s on the clock{beside}", "", *table(rows)]


# ------------------------------------------------------------------------------------------------------ command line


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def arguments(given: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OneLineParser("rehearse.py", description="Rehearse a training run.", allow_abbrev=False)
    parser.add_argument("--model", default="tiny", help="one of the trainer's presets, or llama3-405b")
    parser.add_argument("--ranks", type=int, default=8, help="GPUs of the run")
    parser.add_argument("--plan", action="store_true", help="take the layout that the planner proposes")
    parser.add_argument("--cluster", default="h100-400g", help="name in clusters/, or a .json file like those")
    parser.add_argument("--tokens", type=int, help=f"for --plan: tokens of a global batch, by default {4 * 2**20}")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--trace", metavar="FILE", help="write the step on the clock as a Chrome trace")
    parser.add_argument("--all-ranks", action="store_true", help="run every rank, not one of each kind")
    parser.add_argument("--processes", type=int, default=1, help="ranks that run side by side")
    args, rest = parser.parse_known_args(given)
    if args.model not in plan.MODELS:
        raise UsageError(f"--model {args.model} is unknown; use {', '.join(plan.MODELS)}")
    if args.tokens is not None and not args.plan:
        raise UsageError("--tokens is for --plan; without it, --global-batch and --seq-len say what a step takes")
    args.tokens = 4 * 2**20 if args.tokens is None else args.tokens
    for name in ("ranks", "tokens", "processes"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} must be at least 1")
    return args, rest


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The cluster, with as many nodes as the ranks need. Raises UsageError."""
    cluster = read_cluster(args.cluster)
    return dataclasses.replace(cluster, nodes=max(cluster.nodes, -(-args.ranks // cluster.gpus_per_node)))


def check_trace(file: str) -> None:
    """Raise UsageError unless the trace can be written, before anything takes time."""
    new = not Path(file).exists()
    try:
        with open(file, "a"):
            pass
    except OSError as error:
        raise UsageError(f"--trace {file} cannot be written to ({os.strerror(error.errno or 0)})") from None
    if new:
        Path(file).unlink()  # later checks may refuse the other options


def config_of(args: argparse.Namespace, rest: list[str]) -> tuple[Config, LlamaConfig]:
    """The run to rehearse, from the command line. Raises UsageError."""
    words: dict[str, Any] = {"steps": 300}
    words |= {"preset": args.model} if args.model in plan.PRESETS else {}
    words |= parse_trainer(rest)
    if words.get("preset", args.model) != args.model and args.model in plan.PRESETS:
        raise UsageError(f"--preset {words['preset']} is not --model {args.model}; leave --preset out")
    if barred := next((option for option in ("config", "init") if option in words), ""):
        raise UsageError(f"{flag(barred)}: --model decides what the model is; leave it out")
    own = {name: words[name] for name in (*SIZES, "tied", "vocab_size") if words.get(name)}
    try:
        sizes = dataclasses.replace(plan.MODELS[args.model], **own)
    except ValueError as error:
        raise UsageError(f"{', '.join(f'{flag(name)} {value}' for name, value in own.items())}: {error}") from None
    if args.plan:
        if barred := next((name for name in words if name in PLANNED), ""):
            raise UsageError(f"{flag(barred)}: with --plan the planner decides the layout; leave one of them out")
        cluster = cluster_of(args)
        seq_len = words.get("seq_len", 8192)
        batch, rest = divmod(args.tokens, seq_len)
        if rest:
            right = max(1, batch) * seq_len
            raise UsageError(f"--tokens {args.tokens} is no multiple of --seq-len {seq_len}; use {right}")
        moe = Config(**words).mixture(sizes)
        precision = words.get("precision", "")
        kernels = words.get("kernels", "auto")
        kernels = "" if kernels == "auto" else kernels
        task = Task(sizes, moe, cluster, args.ranks, batch, seq_len, precision, kernels=kernels)
        found = search(task, top=1)
        if not found.best:
            raise UsageError(f"--plan: {plan.does_not_fit(task, found)}")
        proposal = f"--seq-len {seq_len} {found.best[0].layout.options()}"
        print(f"the planner proposes {proposal}")
        words |= parse_trainer(proposal.split())
    return Config(**words), sizes


def main(given: list[str] | None = None) -> int:
    try:
        args, rest = arguments(sys.argv[1:] if given is None else given)
        if args.trace:
            check_trace(args.trace)
        config, sizes = config_of(args, rest)
        how = {"backend": args.backend, "all_ranks": args.all_ranks, "processes": args.processes}
        done = rehearse(config, sizes, args.ranks, cluster=cluster_of(args), **how)
    except UsageError as error:
        print(f"rehearse.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(done)))
    if done.finding:
        print(f"\nFAIL  {done.finding.kind}: {done.finding.text}", file=sys.stderr)
        return 1
    if args.trace and done.timeline:
        write_trace(done.timeline, done.runs, Path(args.trace))
        print(f"\nwrote {args.trace}, for https://ui.perfetto.dev")
    print("\nevery collective meets its like, every message its other side, and no ranks wait in a circle\nPASS")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
