"""Which layout for this model on this cluster, and why: before a single GPU is rented.

    python 11_5d_trainer/plan.py --model llama3-70b --cluster h100-400g --nodes 64 --seq-len 8192 --tokens 4194304
    python 11_5d_trainer/plan.py --model llama3-8b --cluster h100x8 --explain "--tp 2 --zero 1 --micro-batch 1"
    python 11_5d_trainer/plan.py --facts                       published measurements, and how far off the planner is
    python 11_5d_trainer/plan.py --calibrate my.json           measure this machine, write a cluster file
    python 11_5d_trainer/plan.py --html plan.html              a page with sliders, for any browser, without a network
    ... --figure bars.svg                                      bytes and seconds of the ten layouts, drawn
    ... --json                                                 the same answers for a program

The first prints the ten fastest layouts that fit, as options of train.py, with the reason why each beats the next; why
the obvious other layouts lose; and how many layouts were looked at, and why the others were not. `--explain` takes the
trainer's own options and prints the budget of that one layout line by line: bytes on the fullest rank, what is sent,
seconds. What is in it:

    plan_memory.py    bytes held, kept and at the peak       exact, or within 5 %: test_plan_memory.py
    plan_traffic.py   bytes sent, by collective              exact: same test
    plan_time.py      seconds on a cluster                   two fitted constants: plan_facts.py
    plan_search.py    millions of layouts in seconds

What it does not know: the holes of an allocator beyond a fixed reserve, a slow node, an uneven load of experts. MFU
counts the whole square of attention, as papers do; a causal kernel skips half of it, so that with very long sequences
it passes 100 %.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import chapters  # noqa: F401  finds the chapters below
import plan_facts
import plan_figures
from llama import LLAMA3_405B
from model import EXPERTS, PRESETS
from moe_layer import MoEConfig
from options import Config, UsageError
from options import parse as parse_trainer
from plan_memory import Layout, fpdt_host, peak
from plan_search import GB, Candidate, Found, Task, alternatives, because, name, search, three_steps
from plan_time import read_cluster, step_time
from plan_traffic import by_collective, flows

MODELS = PRESETS | {"llama3-405b": LLAMA3_405B}


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"plan.py: {message}", file=sys.stderr)
        sys.exit(2)


def arguments(given: list[str]) -> argparse.Namespace:
    parser = OneLineParser("plan.py", description="Plan the layout of a training run.", allow_abbrev=False)
    parser.add_argument("--model", default="llama3-8b", help="one of the trainer's presets, or llama3-405b")
    parser.add_argument("--cluster", default="h100-400g", help="name in clusters/, or a .json file like those")
    parser.add_argument("--nodes", type=int, default=0, help="how many of its nodes; default: all")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4 * 2**20, help="of a global batch")
    parser.add_argument("--precision", default="bf16-master", choices=("bf16-master", "fp32"))
    parser.add_argument(
        "--explain", metavar="LAYOUT", help="the trainer's options, in quotes: the budget of one layout"
    )
    parser.add_argument("--facts", action="store_true", help="compare with published measurements")
    parser.add_argument("--calibrate", metavar="FILE", help="measure this machine and write a cluster file")
    parser.add_argument("--html", metavar="FILE", help="write the interactive page")
    parser.add_argument("--figure", metavar="FILE", help="draw bytes and seconds of the fastest layouts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(given)
    if args.model not in MODELS:
        parser.error(f"--model {args.model} is unknown; use {', '.join(MODELS)}")
    for option, least in (("nodes", 0), ("seq_len", 1), ("tokens", 1)):
        if getattr(args, option) < least:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)} must be at least 1")
    if args.tokens % args.seq_len:
        multiple = max(1, args.tokens // args.seq_len) * args.seq_len
        parser.error(f"--tokens {args.tokens} is no multiple of --seq-len {args.seq_len}; use {multiple}")
    return args


def task_of(args: argparse.Namespace) -> Task:
    """What the options ask for. Raises UsageError."""
    cluster = read_cluster(args.cluster)
    nodes = args.nodes or cluster.nodes
    if nodes > cluster.nodes:
        raise UsageError(f"--nodes {nodes} is more than the {cluster.nodes} of {args.cluster}; use {cluster.nodes}")
    model = MODELS[args.model]
    batch = args.tokens // args.seq_len
    return Task(model, mixture(args.model), cluster, nodes * cluster.gpus_per_node, batch, args.seq_len, args.precision)


def mixture(model: str) -> MoEConfig | None:
    if model not in EXPERTS:
        return None
    sizes, (experts, top_k) = MODELS[model], EXPERTS[model]
    return MoEConfig(hidden=sizes.hidden, intermediate=sizes.intermediate, experts=experts, top_k=top_k, balance=0.01)


def whole(task: Task) -> str:
    c = task.model
    machine = f"{task.gpus} GPUs ({task.cluster.name})"
    return f"{c.layers} layers of {c.hidden}, {machine}, {task.global_batch} x {task.seq_len} tokens"


# ----------------------------------------------------------------------------------------------------- three answers


def answer(task: Task, figure: str | None = None) -> tuple[list[str], dict[str, Any]]:
    """The search as text and as data, and as a figure if a file is named.

    Raises UsageError if nothing fits, with what is closest.
    """
    begin = time.perf_counter()
    found = search(task)
    seconds = time.perf_counter() - begin
    if not found.best:
        raise UsageError(does_not_fit(task, found))
    lines = [whole(task), "", f"{'s/step':>9} {'MFU':>6} {'GB':>6}  layout"]
    for i, each in enumerate(found.best):
        lines.append(row(task, each))
        if i + 1 < len(found.best):
            lines.append(f"{'':25}the next: {because(each.step, found.best[i + 1].step)}")
    best = found.best[0]
    lines += ["", "as options of train.py:", f"  --seq-len {task.seq_len} {best.layout.options()}"]
    lines += ["", "why not"]
    others = alternatives(task, best)
    lines += [f"  {what}: {why}" for what, why in others]
    lines += ["", "the three steps of the playbook"]
    steps = three_steps(task)
    lines += [f"  {what}\n{row(task, each)}" for what, each in steps]
    lines += ["", f"{found.counted:,} layouts, {found.timed:,} timed, in {seconds:.1f} s; the others:"]
    lines += [f"  {count:>12,}  {reason}" for reason, count in found.pruned.most_common() if count]
    if figure:
        plan_figures.write_bars(Path(figure), plan_figures.bar_rows(task, found.best))
        lines += ["", f"wrote {figure}"]
    data = {
        "best": [record(task, each) for each in found.best],
        "alternatives": [{"layout": what, "reason": why} for what, why in others],
        "layouts": found.counted,
        "timed": found.timed,
        "pruned": dict(found.pruned),
    }
    return lines, data


def row(task: Task, each: Candidate) -> str:
    mfu = each.step.mfu(each.layout, task.cluster)
    return f"{each.step.seconds:9.3f} {100 * mfu:5.1f}% {each.peak / GB:6.1f}  {name(each.layout)}"


def record(task: Task, each: Candidate) -> dict[str, Any]:
    return {
        "layout": dataclasses.asdict(each.layout),
        "options": each.layout.options(),
        "seconds": each.step.seconds,
        "parts": each.step.parts,
        "mfu": each.step.mfu(each.layout, task.cluster),
        "peak_bytes": each.peak,
        "largest": each.largest,
    }


def does_not_fit(task: Task, found: Found) -> str:
    """One line: what is closest, what most of it is, and what would make it fit."""
    closest = found.closest
    if closest is None:
        return f"--nodes: no layout divides {task.global_batch} samples over {task.gpus} GPUs; use another --tokens"
    room, node = task.memory, task.cluster.gpus_per_node
    gpus = task.gpus
    for _ in range(8):
        gpus *= 2
        if search(dataclasses.replace(task, gpus=gpus), top=1).best:
            fits = f"it fits on --nodes {gpus // node}" + (
                f" (the cluster file says {task.cluster.nodes})" if gpus > task.cluster.gpus else ""
            )
            break
    else:
        fits = "it would fit on no number of such GPUs; use a shorter --seq-len"
    largest = f"{closest.peak / GB:.1f} GB of {room / GB:.1f}, mostly {closest.largest}"
    machine = f"{task.gpus} GPU(s) of {task.cluster.memory_gb:g} GB"
    return f"--model on {machine} fits nowhere; closest is {name(closest.layout)} with {largest}; {fits}"


def explain(task: Task, given: str) -> tuple[list[str], dict[str, Any]]:
    """The budget of one layout. Raises UsageError for options that the trainer would refuse."""
    words = parse_trainer(given.split())
    words = {"seq_len": task.seq_len, "global_batch": task.global_batch, "micro_batch": 1} | words
    everything: dict[str, Any] = {"precision": task.precision, "steps": 300} | words
    config = Config(**everything)
    if config.precision == "bf16-master" and not config.zero and "precision" not in words:
        config = dataclasses.replace(config, precision="fp32")
    layout = Layout.of(config, task.model, task.gpus)
    every = [peak(task.model, task.moe, layout, place) for place in sorted({0, layout.pp - 1})]
    fullest = max(every, key=lambda each: sum(each.values()))
    step = step_time(task.model, task.moe, layout, task.cluster)
    total, sent = sum(fullest.values()), by_collective(flows(task.model, task.moe, layout))
    room = task.memory
    verdict = "fits" if total <= room else f"does not fit: {(total - room) / GB:.2f} GB too much"
    lines = [whole(task), name(layout), "", f"bytes on the fullest rank: {total:,} of {room:,.0f}; {verdict}"]
    ranked = sorted(fullest.items(), key=lambda item: -item[1])
    lines += [f"  {size:>20,}  {what}" for what, size in ranked]
    lines += [f"largest: {ranked[0][0]}"]
    host = fpdt_host(task.model, layout) if layout.fpdt_chunks else 0
    if host:
        lines.append(f"bytes on the host: {host:,} of {task.cluster.host_memory_gb * GB:,.0f} for each GPU")
    lines += ["", "bytes that rank 0 sends in a step"]
    lines += [f"  {size:>20,.0f}  {what}" for what, size in sorted(sent.items(), key=lambda item: -item[1])]
    lines += ["", f"seconds of a step: {step.seconds:.4f}, MFU {100 * step.mfu(layout, task.cluster):.1f} %"]
    lines += [f"  {seconds:>20.4f}  {what}" for what, seconds in step.parts.items() if seconds]
    lines += [f"  {seconds:>20.4f}  {what}, hidden" for what, seconds in step.hidden.items() if seconds]
    data = {"layout": dataclasses.asdict(layout), "bytes": fullest, "fits": total <= room, "sent": sent, "host": host}
    return lines, data | {"seconds": step.seconds, "parts": step.parts, "hidden": step.hidden}


def facts() -> tuple[list[str], dict[str, Any]]:
    lines, data = [], {}
    for title, columns, rows in plan_facts.tables():
        sizes = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
        lines += [title]
        lines += [
            "  " + "  ".join(cell.ljust(size) for cell, size in zip(line, sizes, strict=True))
            for line in [columns, *rows]
        ]
        lines.append("")
        data[title] = [dict(zip(columns, line, strict=True)) for line in rows]
    return lines, data


def main(given: list[str] | None = None) -> int:
    args = arguments(sys.argv[1:] if given is None else given)
    try:
        if args.calibrate:
            from plan_calibrate import calibrate

            lines, data = calibrate(Path(args.calibrate))
        elif args.html:
            from plan_page import write_page

            lines, data = write_page(Path(args.html))
        elif args.facts:
            lines, data = facts()
        else:
            task = task_of(args)
            lines, data = explain(task, args.explain) if args.explain is not None else answer(task, args.figure)
    except (UsageError, OSError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(data, indent=1) if args.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
