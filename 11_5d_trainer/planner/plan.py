"""Which layout for this model on this cluster, and why: before a single GPU is rented.

    P=11_5d_trainer/planner/plan.py
    python $P --model llama3-70b --cluster h100-400g --nodes 64 --seq-len 8192 --tokens 4194304
    python $P --model llama3-8b --cluster h100x8 --explain "--tp 2 --zero 1 --micro-batch 1"
    python $P --config my/config.json        any model of Hugging Face that the trainer reads
    python $P --facts                        published measurements, and how far off the planner is
    python $P --calibrate my.json            measure this machine, write a cluster file
    python $P --after runs/x --cluster my.json           measured beside predicted
    python $P --after runs/x --cluster my.json --write   and write what was measured into the file
    python $P --html plan.html               the same for a browser: change one axis, see what it costs
    ... --figure bars.svg                    bytes and seconds of the ten layouts, drawn
    ... --json                               the same answers for a program

The first prints the ten fastest layouts that fit, and after the ties why each beats the next. It prints the
command that starts the simplest of those whose time cannot be told from the fastest, why the obvious other
layouts lose, how many layouts were evaluated, and why the others were not. `--explain` takes the trainer's
own options and prints the budget of that one layout line by line: bytes on the fullest rank, what is sent,
seconds. The files:

    ../plan_memory.py    bytes stored, saved and at the peak exact, or within 5 %: test_plan_memory.py
    ../plan_traffic.py   bytes sent, by collective           exact: same test
    plan_time.py         seconds on a cluster                five fitted constants: plan_published.py
    plan_search.py       millions of layouts in seconds

It does not model fragmentation of the allocator beyond a fixed reserve, a slow node, or an uneven load of
experts. MFU counts the full square of attention, as papers do. A causal kernel skips half of it, so with very
long sequences MFU exceeds 100 %.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import planner_paths  # noqa: F401  finds the trainer and the chapters
import plan_facts
import plan_figures
from hf import read_sizes
from hf_keys import KINDS
from llama import LLAMA3_405B, LlamaConfig
from model import EXPERTS, PRESETS
from moe_layer import MoEConfig
from options import SIZES, OneLineParser, UsageError, flag, fresh, learning_rate_for
from options import parse as parse_trainer
from plan_memory import Layout, check_planned, fpdt_host, full_places, peak, weights_of
from plan_published import error_bar
from plan_search import GB, Candidate, Found, Task, alternatives, because, name, search, three_steps
from plan_time import read_cluster, step_time
from plan_traffic import by_collective, flows

TIE = 0.05  # layouts of one family published further apart than this are nearly always ranked correctly
TOKENS = 20  # per parameter: about the best use of a given number of FLOPs (Chinchilla, 2203.15556)
MODELS = PRESETS | {"llama3-405b": LLAMA3_405B}
OF_THE_MODEL = ("preset", "config", "init", *SIZES, "tied", "vocab_size")  # options of the trainer that change it


def arguments(given: list[str]) -> argparse.Namespace:
    parser = OneLineParser("plan.py", description="Plan the layout of a training run.", allow_abbrev=False)
    parser.add_argument("--model", default="llama3-8b", help="one of the trainer's presets, or llama3-405b")
    parser.add_argument(
        "--config", metavar="FILE", help=f"config.json of Hugging Face, not --model: {', '.join(KINDS)}"
    )
    parser.add_argument("--cluster", default="h100-400g", help="name in clusters/, or a .json file like those")
    parser.add_argument("--nodes", type=int, default=0, help="how many of its nodes; default: all")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4 * 2**20, help="of a global batch")
    parser.add_argument(
        "--precision", default="", choices=("bf16-master", "fp16", "fp32"), help="default: what the trainer takes there"
    )
    parser.add_argument(
        "--kernels", default="", choices=("torch", "triton"), help="default: what the trainer takes on a GPU"
    )
    answers = parser.add_mutually_exclusive_group()
    answers.add_argument(
        "--explain", metavar="LAYOUT", help="the trainer's options, in quotes: the budget of one layout"
    )
    answers.add_argument("--facts", action="store_true", help="compare with published measurements")
    answers.add_argument("--calibrate", metavar="FILE", help="measure this machine and write a cluster file")
    answers.add_argument("--after", metavar="RUN", help="a run's folder: measured beside predicted, on its --cluster")
    answers.add_argument("--html", metavar="FILE", help="write the interactive page")
    answers.add_argument("--figure", metavar="FILE", help="draw bytes and seconds of the fastest layouts")
    parser.add_argument("--write", action="store_true", help="with --after: write the measured ceiling into --cluster")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(given)
    if args.model not in MODELS:
        parser.error(f"--model {args.model} is unknown; use {', '.join(MODELS)}")
    for option, least in (("nodes", 0), ("seq_len", 1), ("tokens", 1)):
        if getattr(args, option) < least:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)} must be at least 1")
    if args.write and not args.after:
        parser.error("--write needs --after RUN, whose speed it writes down")
    if args.tokens % args.seq_len:
        multiple = max(1, args.tokens // args.seq_len) * args.seq_len
        parser.error(f"--tokens {args.tokens} is no multiple of --seq-len {args.seq_len}; use {multiple}")
    return args


def task_of(args: argparse.Namespace) -> Task:
    """The task that the options describe. Raises UsageError."""
    cluster = read_cluster(args.cluster)
    nodes = args.nodes or cluster.nodes
    if nodes > cluster.nodes:
        raise UsageError(f"--nodes {nodes} is more than the {cluster.nodes} of {args.cluster}; use {cluster.nodes}")
    model, moe = (MODELS[args.model], mixture(args.model)) if not args.config else of_config(args.config)
    name = f"--config {args.config}" if args.config else f"--model {args.model}"
    batch = args.tokens // args.seq_len
    gpus = nodes * cluster.gpus_per_node
    task = Task(model, moe, cluster, gpus, batch, args.seq_len, args.precision, name, args.kernels)
    check_kernels(task, args.kernels)
    return task


def check_kernels(task: Task, kernels: str) -> None:
    """As the trainer's, for the GPUs of the cluster. Raises UsageError."""
    if kernels == "triton" and task.no_kernels:
        raise UsageError(f"--kernels triton {task.no_kernels}; use --kernels torch")


def mixture(model: str) -> MoEConfig | None:
    if model not in EXPERTS:
        return None
    return mixture_of(MODELS[model], *EXPERTS[model])


def of_config(file: str) -> tuple[LlamaConfig, MoEConfig | None]:
    """The model of a Hugging Face config.json, in its folder or anywhere. Raises UsageError."""
    option = "--init" if Path(file).is_dir() else "--config"  # as in `commands`: a file alone has no weights
    try:
        sizes, (experts, top_k) = read_sizes(file, option)
    except UsageError as error:
        raise UsageError(str(error).replace(f"{option} {file}", f"--config {file}")) from None
    except (UnicodeDecodeError, AttributeError, TypeError):  # no text, no object, or a bad size
        raise UsageError(f"--config {file} is not the config.json of a model; copy it again") from None
    return sizes, mixture_of(sizes, experts, top_k) if experts else None


def mixture_of(sizes: LlamaConfig, experts: int, top_k: int) -> MoEConfig:
    return MoEConfig(hidden=sizes.hidden, intermediate=sizes.intermediate, experts=experts, top_k=top_k, balance=0.01)


def whole(task: Task) -> str:
    c = task.model
    machine = f"{task.gpus} GPUs ({task.cluster.name})"
    what = task.name.partition(" ")[2] or "a model"
    return f"{what}: {c.layers} layers of {c.hidden}, {machine}, {task.global_batch} x {task.seq_len} tokens"


# ----------------------------------------------------------------------------------------------------- three answers


def answer(task: Task, figure: str | None = None) -> tuple[list[str], dict[str, Any]]:
    """The search as text and as data, and as a figure if a file is named.

    Raises UsageError, with the closest layout, if nothing fits.
    """
    begin = time.perf_counter()
    found = search(task)
    seconds = time.perf_counter() - begin
    if not found.best:
        raise UsageError(does_not_fit(task, found))
    every, ties = by_simplicity(found.best)
    low, high = error_bar()
    lines = [whole(task), "", HEAD]
    for i, each in enumerate(every):
        if i < ties and (not i or family(each.layout) != family(every[i - 1].layout)):
            lines.append(f"{'':38}{family(each.layout)}:")
        lines.append(row(task, each))
        if ties <= i + 1 < len(every):
            lines.append(f"{'':38}the next: {because(each.step, every[i + 1].step)}")
    lines += [
        "",
        f"The first {ties} are as fast as one can tell ({TIE:.0%}): by the axes that they use, the simplest first.",
        f"From, to: of the published runs that are not fitted, nine in ten took {low:.2f} to {high:.2f} times as long.",
    ]
    best = every[0]
    lines += ["", *commands(task, best.layout)]
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
        "best": [record(task, each) for each in every],
        "commands": commands(task, best.layout)[1::3],
        "alternatives": [{"layout": what, "reason": why} for what, why in others],
        "layouts": found.counted,
        "timed": found.timed,
        "pruned": dict(found.pruned),
    }
    return lines, data


HEAD = f"{'s/step':>9} {'from':>8} {'to':>8} {'MFU':>6} {'GB':>6}  layout"


def row(task: Task, each: Candidate) -> str:
    """Seconds of a step, the interval for nine runs in ten, and the layout."""
    mfu = each.step.mfu(each.layout, task.cluster)
    seconds = each.step.seconds
    low, high = (seconds * share for share in error_bar())
    return f"{seconds:9.3f} {low:8.3f} {high:8.3f} {100 * mfu:5.1f}% {each.peak / GB:6.1f}  {name(each.layout)}"


def family(layout: Layout) -> str:
    """The axes that a layout uses."""
    axes = {"tensor": layout.tp, "context": layout.cp, "pipeline": layout.pp, "expert": layout.ep}
    words = ["data", *(axis for axis, ranks in axes.items() if ranks > 1)]
    return f"{' + '.join(words)} parallel" + " with chunks" * (layout.fpdt_chunks > 0)


def by_simplicity(best: list[Candidate]) -> tuple[list[Candidate], int]:
    """Layouts as fast as the fastest within the clock's accuracy, family by family, the simplest first; then
    the others, by their time. And how many there are of the first kind."""
    fastest = min(each.step.seconds for each in best)
    close = [each for each in best if each.step.seconds <= fastest * (1 + TIE)]
    least: dict[str, int] = {}
    for each in close:
        kin = family(each.layout)
        least[kin] = min(least.get(kin, effort(each.layout)), effort(each.layout))

    def place(each: Candidate) -> tuple[int, str, int, float]:
        kin = family(each.layout)
        return least[kin], kin, effort(each.layout), each.step.seconds

    return sorted(close, key=place) + best[len(close) :], len(close)


def effort(layout: Layout) -> int:
    """How many features of the trainer a layout needs: axes in use, and what goes beyond 1F1B."""
    axes = (layout.tp > 1) + (layout.cp > 1) + (layout.pp > 1) + (layout.ep > 1)
    beyond = (layout.schedule != "1f1b") + (layout.stages_per_rank > 1) + (layout.ring > 1 and layout.ulysses > 1)
    return 2 * axes + beyond + (layout.fpdt_chunks > 0) + (layout.recompute != "none") + layout.gather_kv


def commands(task: Task, layout: Layout) -> list[str]:
    """The commands that start it: under torchrun on every node, and under Slurm."""
    what = task.name or "--model tiny"
    node = task.cluster.gpus_per_node
    nodes = max(1, task.gpus // node)
    given = what.split(" ", 1)[1]
    model = f"--preset {given}"
    if what.startswith("--config"):  # a file alone has no weights
        model = f"--config {given}" if given.endswith(".json") else f"--init {given}"
    if what.startswith("--model") and given not in PRESETS:
        model = f"--init FOLDER_OF_{given.upper().replace('-', '_')}"  # not a preset: needs its weights
    parameters = sum(w.numel for w in weights_of(task.model, task.moe, Layout()))
    trained = model.startswith("--init")
    options = f"{model} --seq-len {task.seq_len} {layout.options()} --lr {learning_rate_for(parameters, trained):g}"
    options += f" --steps {max(1, TOKENS * parameters // (task.global_batch * task.seq_len))} --data TOKENS"
    meet = f'--nnodes {nodes} --nproc_per_node {min(node, task.gpus)} --rdzv_backend c10d --rdzv_endpoint "$HEAD:29500"'
    return [
        "on every node, HEAD being the name of one of them, TOKENS what prepare.py made of your data; the steps see "
        f"{TOKENS} tokens for each parameter:",
        f"torchrun {meet} 11_5d_trainer/train.py {options}",
        "",
        "or with Slurm:",
        f"sbatch --nodes={nodes} --gpus-per-node={min(node, task.gpus)} 11_5d_trainer/train.sbatch {options}",
    ]


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
    """One line: the closest layout, its largest part, and what would make it fit."""
    closest = found.closest
    if closest is None:
        what = f"the model and {task.global_batch} samples over {task.gpus} GPUs"
        return f"--nodes: no layout divides {what}; use another --nodes or --tokens"
    room = task.memory
    node = task.cluster.gpus_per_node
    gpus = task.gpus
    for _ in range(8):
        gpus *= 2
        if search(dataclasses.replace(task, gpus=gpus), top=1).best:
            fits = f"it fits on --nodes {gpus // node}" + (
                f" (the cluster file says {task.cluster.nodes})" if gpus > task.cluster.gpus else ""
            )
            break
    else:
        fits = f"nor does it fit on up to {gpus // node} nodes; use a shorter --seq-len, or more --tokens"
    largest = f"{closest.peak / GB:.1f} GB of {room / GB:.1f}, mostly {closest.largest}"
    machine = f"{task.gpus} GPU(s) of {task.cluster.memory_gb:g} GB"
    return (
        f"{task.name or '--model'} on {machine} fits nowhere; closest is {name(closest.layout)} with {largest}; {fits}"
    )


def explain(task: Task, given: str) -> tuple[list[str], dict[str, Any]]:
    """The budget of one layout. Raises UsageError for options that the trainer would refuse."""
    words = parse_trainer(given.split())
    experts = {"experts": task.moe.experts, "top_k": task.moe.top_k} if task.moe else {}
    others = [option for option in ("experts", "top_k") if option in words and words[option] != experts.get(option)]
    if barred := next((option for option in (*OF_THE_MODEL, *others) if option in words), ""):
        raise UsageError(f"--explain {flag(barred)}: --model or --config decides what the model is; leave it out")
    words = {"seq_len": task.seq_len, "global_batch": task.global_batch, "micro_batch": 1} | words
    words |= experts
    check_kernels(task, words.get("kernels", ""))
    everything: dict[str, Any] = {"precision": task.precision, "steps": 300} | words
    if words.get("kernels", "auto") == "auto" and task.base.kernels == "torch":
        everything["kernels"] = "torch"
    config = fresh(everything)
    if config.precision == "bf16-master" and not config.zero and "precision" not in words:
        config = dataclasses.replace(config, precision="fp32")
    layout = Layout.of(config, task.model, task.gpus)
    moe = config.mixture(task.model)
    check_planned(config, task.model, task.gpus)
    every = [peak(task.model, moe, layout, place) for place in full_places(task.model, layout)]
    fullest = max(every, key=lambda each: sum(each.values()))
    step = step_time(task.model, moe, layout, task.cluster)
    total = sum(fullest.values())
    sent = by_collective(flows(task.model, moe, layout))
    room = task.memory
    host = fpdt_host(task.model, layout) if layout.fpdt_chunks else 0
    beyond = host - task.cluster.host_memory_gb * GB
    verdict = "fits"
    if total > room:
        verdict = f"does not fit: {(total - room) / GB:.2f} GB too much"
    elif beyond > 0:
        verdict = f"but the host is {beyond / GB:.2f} GB too small"
    lines = [whole(task), name(layout), "", f"bytes on the fullest rank: {total:,} of {room:,.0f}; {verdict}"]
    ranked = sorted(fullest.items(), key=lambda item: -item[1])
    lines += [f"  {size:>20,}  {what}" for what, size in ranked]
    lines += [f"largest: {ranked[0][0]}"]
    if host:
        lines.append(f"bytes on the host: {host:,} of {task.cluster.host_memory_gb * GB:,.0f} for each GPU")
    lines += ["", "bytes that rank 0 sends in a step"]
    lines += [f"  {size:>20,.0f}  {what}" for what, size in sorted(sent.items(), key=lambda item: -item[1])]
    lines += ["", f"seconds of a step: {step.seconds:.4f}, MFU {100 * step.mfu(layout, task.cluster):.1f} %"]
    lines += [f"  {seconds:>20.4f}  {what}" for what, seconds in step.parts.items() if seconds]
    lines += [f"  {seconds:>20.4f}  {what}, hidden" for what, seconds in step.hidden.items() if seconds]
    data = {"layout": dataclasses.asdict(layout), "bytes": fullest, "fits": verdict == "fits", "sent": sent}
    return lines, data | {"host": host, "seconds": step.seconds, "parts": step.parts, "hidden": step.hidden}


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

            task = task_of(args)
            said, found = answer(task)
            start = Layout(**found["best"][0]["layout"])
            lines, data = write_page(Path(args.html), task, "\n".join(said), start)
        elif args.facts:
            lines, data = facts()
        elif args.after:
            from plan_after import after

            lines, data = after(Path(args.after), args.cluster, args.nodes, args.write)
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
