"""The three forms of the core file against torch's DistributedDataParallel and against in_depth, in one run.

    python 02_data_parallel/bench_data_parallel.py               4 processes on the CPU, Gloo
    python 02_data_parallel/bench_data_parallel.py --figures     only draw the figures again

Every gradient of a form is compared with DDP's before the form is timed. A step is zero_grad, forward,
backward and the wait for the gradients. Two steps alternate in pairs, and the table gives the ratio of their seconds.
On a CPU that compares what hooks, copies and launches cost: computing and sending share the same cores, so overlap
gains nothing there. Beside it stands the ratio of processor seconds, of all ranks and all their threads, which other
programs on the machine cannot lengthen. The figure of overlap is drawn from the times at which things happened.
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
    build_buckets,
    build_model,
    get_batch,
    grad_hooks,
    loss_sum,
    naive,
    overlapped,
    ring_all_reduce,
)
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication
from harness.ranks import run_ranks
from harness.reference import FLOAT32, assert_same_named
from harness.report import option_given, paired, processor_paired, ratio_of, write_result
from torch.nn.parallel import DistributedDataParallel

RANKS = 4
MODELS = {"1.0M": {"hidden": 128, "n_layers": 5}, "6.4M": {"hidden": 256, "n_layers": 8}}
MIB = 2**20  # of a bucket: small models, so that there are several. All sides get the same
FORMS = {"naive": naive, "overlapped": overlapped, "bucketed": partial(bucketed, bucket_bytes=MIB)}


def build(sizes):
    torch.manual_seed(0)
    return build_model(**sizes)


def check(ours, theirs, what):
    got, want = ({name: p.grad for name, p in model.named_parameters()} for model in (ours, theirs))
    assert_same_named(got, want, FLOAT32, f"{what}: gradient of")


def mean_loss(model, tokens, num_valid):
    """With every token as the label of the one before it."""
    return loss_sum(model(tokens), tokens.roll(-1, 1)) / num_valid


def step_of(model, grad_sync, tokens, num_valid):
    params = list(model.parameters())  # DDP also walks the model once, and not in every step

    def step():
        model.zero_grad()
        with grad_sync(params, dist.group.WORLD):
            mean_loss(model, tokens, num_valid).backward()

    return step


def compare(name):
    """Rows of the table, from one rank: every form's messages, bytes and time, against DDP's and in_depth's."""
    group, sizes = dist.group.WORLD, MODELS[name]
    tokens = get_batch(0, RANKS)[0][dist.get_rank(), 0].repeat(1, 2)  # every token counts: this is about time
    num_valid = tokens.numel() * RANKS
    ddp = DistributedDataParallel(build(sizes), bucket_cap_mb=1, gradient_as_bucket_view=True)
    deep = build(sizes)
    reducer = gradient_reducers.BucketedReducer(deep, group, bucket_bytes=MIB)

    def ddp_step():
        ddp.zero_grad()
        (RANKS * mean_loss(ddp, tokens, num_valid)).backward()  # DDP averages, so it needs the factor

    def deep_step():
        deep.zero_grad()
        mean_loss(deep, tokens, num_valid).backward()
        reducer.finish()

    for _ in range(2):  # in its second step DDP has rebuilt its buckets
        ddp_step()
        deep_step()
    check(deep, ddp.module, f"in_depth, {name} parameters")
    rows = []
    for what, grad_sync in FORMS.items():
        model = build(sizes)
        step = step_of(model, grad_sync, tokens, num_valid)
        step()
        check(model, ddp.module, f"{what}, {name} parameters")
        with communication() as ours:
            step()
        with communication() as theirs:
            ddp_step()
        if ours.total != theirs.total:
            raise SystemExit(f"{what}, {name} parameters: {ours.total} bytes are sent, by DDP {theirs.total}")
        repeats = 21 if what == "bucketed" else 5  # the closest to 1
        against = [paired(step, other, repeats=repeats, setup=dist.barrier) for other in (ddp_step, deep_step)]
        against.append(processor_paired(step, ddp_step, repeats))
        messages = ours.calls["all_reduce"] + ours.calls["send"]
        rows.append([name, what, theirs.calls["all_reduce"], messages, round(ours.total), *against])
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
    """The least that hooks in Python can do, in steps: nothing, copy into buckets, also launch the messages."""
    model, views, last, works = build(sizes), {}, {}, []
    buckets = build_buckets(list(model.parameters()), MIB)
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
    what is left are hooks, copies and launches. A short batch, so that they show."""
    sizes, tokens = MODELS[name], get_batch(0, RANKS)[0][0, 0, :1, :8]
    num_valid, repeats = tokens.numel(), 60

    def backward(model):
        model.zero_grad()
        mean_loss(model, tokens, num_valid).backward()

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
        "and launch the messages": partial(by_hand, *hooked_by_hand(sizes, True, True)),
        "bucketed": step_of(build(sizes), FORMS["bucketed"], tokens, num_valid),
        "in_depth": lambda: (backward(deep), reducer.finish()),
    }
    spent, shuffled = {what: [] for what in steps}, random.Random(0)
    for repeat in range(-3, repeats):
        for what in shuffled.sample(list(steps), len(steps)):  # the step before leaves its traces in the caches
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
    """[form, what, number, begin, end] on one rank: when gradients were complete and messages in flight."""
    tokens = get_batch(0, dist.get_world_size())[0][dist.get_rank(), 0].repeat(1, 2)
    rows, reduce, ring, clock = [], dist.all_reduce, ring_all_reduce, time.perf_counter
    forms = FORMS | {"bucketed": partial(bucketed, bucket_bytes=4 * MIB)}
    for what, grad_sync in forms.items():
        model, events, done_at = build(MODELS[name]), [], {}
        params = list(model.parameters())
        step = step_of(model, grad_sync, tokens, tokens.numel() * dist.get_world_size())

        def timed_all_reduce(tensor, *args, events=events, done_at=done_at, **kwargs):
            number, begin = len(done_at), clock()
            done_at[number] = None
            work = reduce(tensor, *args, **kwargs)
            done = work.get_future().then(lambda future: done_at.__setitem__(number, clock()))
            events.append(["message", number, begin, done])
            return work

        def timed_ring(tensor, group, events=events):
            begin = clock()
            ring(tensor, group)
            events.append(["message", len(events), begin, clock()])

        step()
        events.clear()
        done_at.clear()
        dist.barrier()
        with (
            patch.object(dist, "all_reduce", timed_all_reduce),
            patch.object(data_parallel, "ring_all_reduce", timed_ring),
            grad_hooks(params, lambda p, e=events: e.append(["gradient", 0, clock(), clock()])),
        ):
            model.zero_grad()
            loss = mean_loss(model, tokens, 1000)
            begin = clock()
            with grad_sync(params, dist.group.WORLD):
                loss.backward()
            end = clock()
        for kind, number, start, stop in events:
            if not isinstance(stop, float):
                stop.wait()
                stop = done_at[number]
            rows.append([what, kind, number, start - begin, stop - begin])
        rows.append([what, "step", 0, 0.0, end - begin])
    longest = max(stop for *_, stop in rows)
    return [[*row[:3], round(row[3] / longest, 4), round(row[4] / longest, 4)] for row in rows]


def ring_steps():
    """The chunks of this rank before every step of the ring and at its end. Each rank adds a bit of its own."""
    real, states = dist.batch_isend_irecv, []
    x = torch.full((dist.get_world_size(),), 2.0 ** dist.get_rank())
    with patch.object(dist, "batch_isend_irecv", lambda ops: states.append(x.int().tolist()) or real(ops)):
        ring_all_reduce(x, dist.group.WORLD)
    return [*states, x.int().tolist()]


def draw_ring(axes, result):
    """One panel per step; rows are ranks, columns are chunks. The chunk that a rank has just received is framed."""
    held = {tuple(row[:3]): row[3] for row in result["rows"]}  # (step, rank, chunk) -> ranks in the sum
    panels = axes.flatten()
    for (step, rank, chunk), members in held.items():
        panel, complete = panels[step], len(members) == RANKS
        received = step > 0 and held[step - 1, rank, chunk] != members
        panel.bar(
            chunk + 0.5,
            0.86,
            0.9,
            bottom=rank + 0.07,
            color=COLOURS["gradients" if complete else "messages"],
            alpha=1.0 if complete else 0.1 + 0.3 * (len(members) - 1) / (RANKS - 1),
        )
        if received:
            panel.bar(chunk + 0.5, 0.86, 0.9, bottom=rank + 0.07, fill=False, edgecolor=COLOURS["weights"], linewidth=2)
        colour = "black" if complete else GREY
        panel.text(chunk + 0.5, rank + 0.5, members, ha="center", va="center", fontsize=10, color=colour)
    for step, panel in enumerate(panels[:-1]):
        half = "add" if step < RANKS else "copy"
        panel.set(xlim=(0, RANKS), ylim=(RANKS, 0), title="before" if step == 0 else f"step {step - 1}: {half}")
        panel.set(xticks=[i + 0.5 for i in range(RANKS)], xticklabels=range(RANKS), xlabel="chunk")
        panel.set(yticks=[i + 0.5 for i in range(RANKS)], yticklabels=[f"rank {i}" for i in range(RANKS)])
        panel.tick_params(length=0)
        panel.grid(False)
    legend = panels[-1]
    legend.set_axis_off()
    legend.set(xlim=(0, RANKS), ylim=(RANKS, 0))
    words = [
        "steps 0 to 2: reduce-scatter",
        "steps 3 to 5: all-gather",
        "",
        "framed: just received",
        "from the rank above",
    ]
    legend.text(0, 2, "\n".join([*words, "(rank 0: from rank 3)"]), va="center", fontsize=10)


def draw_timeline(axes, result):
    for place, form in enumerate(FORMS):
        mine = [row for row in result["rows"] if row[0] == form]
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
    labels = [words for form in FORMS for words in (f"{form}: backward pass", "messages in flight")]
    axes.set(yticks=[y for i in range(3) for y in (3 * i, 3 * i + 1)], yticklabels=labels, ylim=(8, -1))
    axes.set(xlabel="time since the backward pass began (1: the end of the longest step)")


def figures():
    chapter = "02_data_parallel/figures"
    write_figure(f"{chapter}/ring.svg", ["02_ring"], draw_ring, shape=(2, RANKS), size=(11, 5))
    write_figure(f"{chapter}/timeline.svg", ["02_timeline"], draw_timeline, size=(8, 3.2))


def measure_machinery():
    write_result(
        "02_machinery",
        "What data parallelism adds to the seconds of the thread that computes, 6.4M parameters, 8 tokens",
        ["", "of a step without it (quartiles)", "calls of functions in Python"],
        run_ranks(1, machinery, "6.4M", timeout=400)[0],
        "One rank, on which every sum is there at once: this is the time of hooks, copies and launches only. "
        "Median of 60 steps in random order. Calls are those of one step, beyond those of a step without it.",
    )


def main():
    rows = [row for name in MODELS for row in run_ranks(RANKS, compare, name, timeout=300)[0]]  # gradients first
    measure_machinery()
    write_result(
        "02_forms",
        f"A step of each form against torch's DistributedDataParallel and in_depth, {RANKS} ranks, buckets of 1 MiB",
        [
            "parameters",
            "form",
            "messages of DDP",
            "messages",
            "bytes sent by a rank",
            "seconds / DDP",
            "seconds / in_depth",
            "processor seconds / DDP",
        ],
        rows,
        "A step is zero_grad, forward, backward and the wait for the sums; medians of pairs, and quartiles. Every "
        "gradient of every form was compared with DDP's first. The messages of the naive form are the sends of its "
        "ring, and its bytes are counted; of the others, bytes are payload times the ring's formula. Processor seconds "
        "are those of all ranks and all their threads.",
    )
    states = run_ranks(RANKS, ring_steps)
    members = "abcd"
    write_result(
        "02_ring",
        f"Which ranks are in the sum, for each chunk of each rank, in a ring all-reduce on {RANKS} ranks",
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
        "When gradients were complete and messages in flight, one of two ranks, 6.4M parameters, buckets of 4 MiB",
        ["form", "what", "number", "begin", "end"],
        run_ranks(2, timeline, "6.4M", timeout=120)[0],
        "Times are shares of the longest of the three steps, from the moment that the backward pass began.",
    )
    figures()


if __name__ == "__main__":
    figures() if option_given("--figures") else main()
