"""The ground floor's three versions against torch's DistributedDataParallel and against in_depth, in one run.

    python 02_data_parallel/bench_data_parallel.py               4 processes on the CPU, gloo
    python 02_data_parallel/bench_data_parallel.py --figures     only draw the figures again

First every gradient of every version is compared with DDP's; only then is anything timed. A step is zero_grad, forward,
backward and the wait for the gradients. Two steps alternate in pairs, and the table gives the ratio of their seconds.
On a CPU that compares the cost of the machinery (hooks, copies, starts of messages): computing and sending share the
same cores, so overlap wins nothing there. Beside it stands the ratio of the processor's seconds, of all ranks and all
their threads: other programs on the machine cannot lengthen those. What overlap looks like is drawn from the times at
which things really happened.
"""

import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).with_name("in_depth")))

import data_parallel
import gradient_reducers
import torch
import torch.distributed as dist
from data_parallel import (
    bucketed,
    cut_into_buckets,
    hooked,
    loss_sum,
    make_batch,
    make_model,
    naive,
    overlapped,
    ring_all_reduce,
)
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication
from harness.ranks import run_ranks
from harness.report import Ratio, paired, ratio_of, write_result
from torch.nn.parallel import DistributedDataParallel

RANKS = 4
MODELS = {"1.0M": {"hidden": 128, "layers": 5}, "6.4M": {"hidden": 256, "layers": 8}}
MIB = 2**20  # of a bucket: small models, so that there are several. All sides get the same
VERSIONS = {"naive": naive, "overlapped": overlapped, "bucketed": partial(bucketed, bucket_bytes=MIB)}


def build(sizes):
    torch.manual_seed(0)
    return make_model(**sizes)


def check(ours, theirs, what):
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        error = ((p.grad - q.grad).abs().max() / q.grad.abs().max()).item()
        if not error <= 1e-5:
            raise SystemExit(f"{what}: the gradient of {name} differs from DDP's by {error:.1e}")


def processor_seconds(step) -> float:
    """Of all ranks together, and of gloo's threads."""
    dist.barrier()
    begin = time.process_time()
    step()
    dist.barrier()
    spent = torch.tensor(time.process_time() - begin, dtype=torch.float64)
    dist.all_reduce(spent)
    return spent.item()


def in_processor_seconds(a, b, repeats: int) -> Ratio:
    """Like `paired`: a and b one after the other, and the other way round in the next pair."""
    ratios = []
    for repeat in range(repeats):
        seconds = {fn: processor_seconds(fn) for fn in ((a, b) if repeat % 2 else (b, a))}
        ratios.append(seconds[a] / seconds[b])
    return ratio_of(ratios)


def step_of(model, version, tokens, valid):
    parameters = list(model.parameters())  # DDP walks the model once, too, and not in every step

    def step():
        model.zero_grad()
        with version(parameters, dist.group.WORLD):
            (loss_sum(model, tokens, tokens.roll(-1, 1)) / valid).backward()

    return step


def compare(name):
    """Rows of the table, from one rank: every version's messages, bytes and time, against DDP's and in_depth's."""
    group, rank, sizes = dist.group.WORLD, dist.get_rank(), MODELS[name]
    tokens = make_batch(0, RANKS)[rank][0][0].repeat(1, 2)  # every token counts: this is about time
    valid = tokens.numel() * RANKS
    ddp = DistributedDataParallel(build(sizes), bucket_cap_mb=1, gradient_as_bucket_view=True)
    deep = build(sizes)
    reducer = gradient_reducers.BucketedReducer(deep, group, bucket_bytes=MIB)

    def ddp_step():
        ddp.zero_grad()
        (RANKS * loss_sum(ddp, tokens, tokens.roll(-1, 1)) / valid).backward()  # DDP averages, so it needs the factor

    def deep_step():
        deep.zero_grad()
        (loss_sum(deep, tokens, tokens.roll(-1, 1)) / valid).backward()
        reducer.finish()

    for _ in range(2):  # in its second step DDP has rebuilt its buckets
        ddp_step()
        deep_step()
    check(deep, ddp.module, f"in_depth, {name} parameters")
    rows = []
    for what, version in VERSIONS.items():
        model = build(sizes)
        step = step_of(model, version, tokens, valid)
        step()
        check(model, ddp.module, f"{what}, {name} parameters")
        repeats = 21 if what == "bucketed" else 5  # the others are not close
        against = [paired(step, other, repeats=repeats, setup=dist.barrier) for other in (ddp_step, deep_step)]
        against.append(in_processor_seconds(step, ddp_step, repeats))
        sent = {}
        for key, run in (("ours", step), ("ddp", ddp_step)):
            with communication() as meter:
                run()
            sent[key] = meter.calls["all_reduce"] + meter.calls["send"], round(meter.total)
        rows.append([name, what, sent["ddp"][0], sent["ours"][0], sent["ours"][1], *against])
    return rows


def calls_in(step) -> int:
    """How many functions Python calls in a step, those of C included: none of them is work of DDP's reducer in C++."""
    count = 0

    def on_event(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def hooked_by_hand(sizes, copy, send):
    """The least that hooks in Python can do, in steps: nothing, copy into buckets, start the messages too."""
    model, views, last, works = build(sizes), {}, {}, []
    buckets = cut_into_buckets(list(model.parameters()), MIB)
    for bucket in buckets:
        flat = torch.zeros(sum(p.numel() for p in bucket))
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            views[p] = part.view_as(p)
        last[bucket[-1]] = flat

    def on_gradient(p):
        if copy:
            p.grad = views[p].copy_(p.grad)
        if send and p in last:
            works.append(dist.all_reduce(last[p], async_op=True))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(on_gradient)
    return model, works


def machinery(name):
    """[what, share, calls]: seconds of the thread that computes, beyond those of a step without any data parallelism,
    over these; and calls of functions, beyond those of such a step. One rank, so that every message is there at once:
    what is left are hooks, copies and starts. A short batch, so that they show."""
    sizes, tokens = MODELS[name], make_batch(0, RANKS)[0][0][0][:1, :8]
    valid, repeats = tokens.numel(), 60

    def backward(model):
        model.zero_grad()
        (loss_sum(model, tokens, tokens.roll(-1, 1)) / valid).backward()

    ddp = DistributedDataParallel(build(sizes), bucket_cap_mb=1, gradient_as_bucket_view=True)
    deep, plain = build(sizes), build(sizes)
    reducer = gradient_reducers.BucketedReducer(deep, dist.group.WORLD, bucket_bytes=MIB)

    def by_hand(model, works):
        backward(model)
        while works:
            works.pop().wait()

    steps = {
        "nothing": partial(backward, plain),
        "DDP": partial(backward, ddp),
        "hooks that do nothing": partial(by_hand, *hooked_by_hand(sizes, False, False)),
        "and copy into buckets": partial(by_hand, *hooked_by_hand(sizes, True, False)),
        "and start the messages": partial(by_hand, *hooked_by_hand(sizes, True, True)),
        "bucketed": step_of(build(sizes), VERSIONS["bucketed"], tokens, valid),
        "in_depth": lambda: (backward(deep), reducer.finish()),
    }
    spent, order = {what: [] for what in steps}, random.Random(0)
    for repeat in range(-3, repeats):
        for what in order.sample(list(steps), len(steps)):  # who came before leaves its traces in the caches
            begin = time.thread_time()
            steps[what]()
            if repeat >= 0:
                spent[what].append(time.thread_time() - begin)
    base, calls = statistics.median(spent.pop("nothing")), {what: calls_in(step) for what, step in steps.items()}
    return [
        [what, ratio_of([(s - base) / base for s in seconds]), calls[what] - calls["nothing"]]
        for what, seconds in spent.items()
    ]


def timeline(name):
    """[version, what, which, begin, end] on one rank: when gradients were complete, and what was under way when."""
    tokens = make_batch(0, dist.get_world_size())[dist.get_rank()][0][0].repeat(1, 2)
    rows, reduce, ring, clock = [], dist.all_reduce, ring_all_reduce, time.perf_counter
    versions = VERSIONS | {"bucketed": partial(bucketed, bucket_bytes=4 * MIB)}
    for what, version in versions.items():
        model, events, arrived = build(MODELS[name]), [], {}
        step = step_of(model, version, tokens, tokens.numel() * dist.get_world_size())

        def late_all_reduce(tensor, *args, events=events, arrived=arrived, **kwargs):
            number, begin = len(arrived), clock()
            arrived[number] = None
            work = reduce(tensor, *args, **kwargs)
            done = work.get_future().then(lambda future: arrived.__setitem__(number, clock()))
            events.append(["message", number, begin, done])
            return work

        def timed_ring(tensor, group, events=events):
            begin = clock()
            ring(tensor, group)
            events.append(["message", len(events), begin, clock()])

        step()
        events.clear()
        arrived.clear()
        dist.barrier()
        patches = (
            patch.object(dist, "all_reduce", late_all_reduce),
            patch.object(data_parallel, "ring_all_reduce", timed_ring),
        )
        with (
            patches[0],
            patches[1],
            hooked(list(model.parameters()), lambda p, e=events: e.append(["gradient", 0, clock(), clock()])),
        ):
            model.zero_grad()
            loss = loss_sum(model, tokens, tokens.roll(-1, 1)) / 1000
            begin = clock()
            with version(list(model.parameters()), dist.group.WORLD):
                loss.backward()
            end = clock()
        for kind, number, start, stop in events:
            if not isinstance(stop, float):
                stop.wait()
                stop = arrived[number]
            rows.append([what, kind, number, start - begin, stop - begin])
        rows.append([what, "step", 0, 0.0, end - begin])
    longest = max(stop for *_, stop in rows)
    return [[*row[:3], round(row[3] / longest, 4), round(row[4] / longest, 4)] for row in rows]


def ring_steps():
    """What each rank's chunks hold before every step of the ring and at its end: whose numbers are in the sum."""
    rank, ranks, real, states = dist.get_rank(), dist.get_world_size(), dist.batch_isend_irecv, []
    x = torch.full((ranks,), 2.0**rank)  # a bit for each rank: the sum says who is in it
    with patch.object(dist, "batch_isend_irecv", lambda messages: states.append(x.int().tolist()) or real(messages)):
        ring_all_reduce(x, dist.group.WORLD)
    return [*states, x.int().tolist()]


def draw_ring(axes, result):
    """Rows are ranks, columns chunks, one panel for each step; the darker, the more ranks are in the sum."""
    steps = sorted({row[0] for row in result["rows"]})
    for step, panel in zip(steps, axes, strict=True):
        for _, rank, chunk, members in (row for row in result["rows"] if row[0] == step):
            complete = len(members) == RANKS
            colour = COLOURS["gradients"] if complete else COLOURS["messages"]
            share = 1.0 if complete else 0.12 + 0.5 * (len(members) - 1) / (RANKS - 1)
            panel.bar(chunk + 0.5, 0.9, 0.94, bottom=rank + 0.03, color=colour, alpha=share)
            panel.text(
                chunk + 0.47,
                rank + 0.45,
                members,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if complete else GREY,
            )
        panel.set(xlim=(0, RANKS), ylim=(RANKS, 0), title="start" if step == 0 else f"step {step - 1}")
        panel.set(xticks=[i + 0.5 for i in range(RANKS)], xticklabels=range(RANKS), xlabel="chunk")
        panel.set(
            yticks=[i + 0.5 for i in range(RANKS)], yticklabels=[f"rank {i}" for i in range(RANKS)] if step == 0 else []
        )
        panel.grid(False)


def draw_timeline(axes, result):
    rows, versions = result["rows"], list(VERSIONS)
    for place, version in enumerate(versions):
        mine = [row for row in rows if row[0] == version]
        last = max(end for _, what, _, _, end in mine if what == "gradient")
        axes.barh(3 * place, last, 0.8, color=COLOURS["compute"])
        axes.plot(
            [end for _, what, _, _, end in mine if what == "gradient"],
            [3 * place] * sum(r[1] == "gradient" for r in mine),
            "|",
            color=COLOURS["gradients"],
            markersize=9,
        )
        for _, what, _, begin, end in mine:
            if what == "message":
                axes.barh(
                    3 * place + 1, end - begin, 0.8, left=begin, color=COLOURS["messages"], alpha=0.55, linewidth=0
                )
            if what == "step":
                axes.plot([end, end], [3 * place - 0.6, 3 * place + 1.6], color=GREY)
    labels = [words for version in versions for words in (f"{version}: backward", "under way")]
    axes.set(yticks=[y for i in range(3) for y in (3 * i, 3 * i + 1)], yticklabels=labels, ylim=(8, -1))
    axes.set(xlabel="time since backward began (1: the end of the longest step)")


def figures():
    chapter = "02_data_parallel/figures"
    write_figure(f"{chapter}/ring.svg", ["02_ring"], draw_ring, shape=(1, 2 * RANKS - 1), size=(11, 2.3))
    write_figure(f"{chapter}/timeline.svg", ["02_timeline"], draw_timeline, size=(8, 3.2))


def measure_machinery():
    write_result(
        "02_machinery",
        "What data parallelism adds to the seconds of the thread that computes, 6.4M parameters, 8 tokens",
        ["", "of a step without it (quartiles)", "calls of functions in Python"],
        run_ranks(1, machinery, "6.4M", timeout=400)[0],
        "One rank, on which every sum is there at once: this is the time of hooks, copies and starts only. "
        "Median of 60 steps in random order. Calls are those of one step, beyond those of a step without it.",
    )


def main():
    rows = [row for name in MODELS for row in run_ranks(RANKS, compare, name, timeout=300)[0]]  # gradients first
    measure_machinery()
    write_result(
        "02_ground",
        f"A step of each version against torch's DistributedDataParallel and in_depth, {RANKS} ranks, buckets of 1 MiB",
        [
            "parameters",
            "version",
            "messages of DDP",
            "messages",
            "bytes sent by a rank",
            "seconds / DDP",
            "seconds / in_depth",
            "processor seconds / DDP",
        ],
        rows,
        "A step is zero_grad, forward, backward and the wait for the sums; medians of pairs, and quartiles. Every "
        "gradient of every version was compared with DDP's first. The naive version's messages are the sends of its "
        "ring, and its bytes are counted; of the others, bytes are payload times the ring's formula. Processor seconds "
        "are those of all ranks and all their threads.",
    )
    states = run_ranks(RANKS, ring_steps)
    members = "abcd"
    write_result(
        "02_ring",
        f"Whose numbers are in each chunk of each rank, in a ring all-reduce on {RANKS} ranks",
        ["step", "rank", "chunk", "in the sum"],
        [
            [step, rank, chunk, "".join(m for i, m in enumerate(members) if value >> i & 1)]
            for rank, steps in enumerate(states)
            for step, chunks in enumerate(steps)
            for chunk, value in enumerate(chunks)
        ],
    )
    write_result(
        "02_timeline",
        "When gradients were complete and messages under way, on one of two ranks, 6.4M parameters",
        ["version", "what", "number", "begin", "end"],
        run_ranks(2, timeline, "6.4M", timeout=120)[0],
        "Times are shares of the longest of the three steps, from the moment that backward began.",
    )
    figures()


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--figures"]):
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: use nothing, or --figures", file=sys.stderr)
        sys.exit(2)
    figures() if sys.argv[1:] else main()
