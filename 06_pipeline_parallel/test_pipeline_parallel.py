"""The ground floor: every order gives what one process gives, keeps and sends what the formulas say, never hangs."""

import argparse
import contextlib
import io
import itertools
import math
import random
import sys
import time
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness.meter import communication, held_bytes, peak_memory, saved_activations
from harness.oracle import Trace, assert_same, assert_same_named, assert_same_trace, sgd_trace
from harness.ranks import run_ranks
from torch import nn

sys.path.insert(1, str(Path(__file__).resolve().parent / "in_depth"))  # the depth, which must agree

import pipeline_executor
import pipeline_parallel as pipe
from pipeline_parallel import IGNORE, ORDERS, Stage, batch_of, cut, timetable, whole_model
from schedule_simulator import simulate
from schedules import build

LIMIT = 20  # seconds: what deadlocks should not take a minute to say so
CASES = [(1, 2), (2, 1), (3, 0), (5, 1), (6, 3), (8, 2)]  # micro-batches, blocks beyond one for each stage


def kept(order, p, m, s):
    return {"naive": 1, "afab": m, "1f1b": min(p - s, m)}[order]


# --------------------------------------------------------------------- the whole model, written a second time: formulas


def dense_loss(w, blocks, tokens, labels):
    """The mean over valid tokens, from a dictionary of weights, in one piece."""
    x = w["0.weight"][tokens]
    size = x.shape[-1]
    later = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
    for i in range(1, blocks + 1):
        q, k, v = (norm(x, w[f"{i}.norm1.weight"]) @ w[f"{i}.qkv.weight"].T).split(size, -1)
        scores = (q @ k.mT / math.sqrt(size)).masked_fill(later, -math.inf)
        x = x + scores.softmax(-1) @ v @ w[f"{i}.out.weight"].T
        up = norm(x, w[f"{i}.norm2.weight"]) @ w[f"{i}.up.weight"].T
        x = x + (up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))) @ w[f"{i}.down.weight"].T
    logits = norm(x, w[f"{blocks + 1}.0.weight"]) @ w[f"{blocks + 1}.1.weight"].T
    valid = labels != IGNORE
    return -logits.log_softmax(-1)[valid].gather(-1, labels[valid][:, None]).mean()


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


@cache
def oracle(blocks, m, dtype=torch.float64, steps=3):
    model = whole_model(blocks).to(dtype)
    weights = dict(model.named_parameters())

    def backward(step):
        loss = dense_loss(weights, blocks, *batch_of(step, m))
        loss.backward()
        return loss.item()

    return sgd_trace(weights, backward, steps=steps)


def train(order, m, blocks, group, dtype=torch.float64, steps=3, change=None):
    """The trace of this rank's stage, and the stage."""
    stage = Stage(cut(whole_model(blocks), dist.get_rank(group), dist.get_world_size(group)).to(dtype), group)
    if change is not None:
        change(stage)
    weights = dict(stage.layers.named_parameters())
    run = partial(stage.step, ORDERS[order], m)
    return sgd_trace(weights, lambda step: run(*batch_of(step, m)).item(), steps=steps), stage


def traces(order, cases, group=None):
    """For each case what this rank's stage went through, the most it kept, and what it keeps after the last step."""
    group = group or dist.group.WORLD
    runs = [train(order, m, group.size() + more, group) for m, more in cases]
    return [(trace, stage.peak, sorted(stage.kept)) for trace, stage in runs]


def assert_like_one_process(order, cases, ranks):
    """`ranks`: what `traces` returned on each rank of a group."""
    p = len(ranks)
    for (m, more), *stages in zip(cases, *ranks, strict=True):
        want = oracle(p + more, m)
        for s, (trace, peak, left) in enumerate(stages):
            named = [{name: g for name, g in step.items() if name in trace.weights} for step in want.gradients]
            weights = {name: w for name, w in want.weights.items() if name in trace.weights}
            assert_same_trace(trace, Trace(want.losses, named, weights), rank=s)
            assert peak == kept(order, p, m, s), f"{order}, rank {s}: kept {peak} of {m}"
            assert not left, f"{order}, rank {s}: {left} are kept after the step"
        held = sorted(name for trace, *_ in stages for name in trace.weights)
        assert held == sorted(want.weights), "each weight lies on one rank"


@pytest.mark.always("naive-2", "afab-4", "1f1b-4")
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_loss_every_gradient_and_weights_are_those_of_one_process(order, p):
    cases = CASES if p < 4 else CASES[2:5]
    assert_like_one_process(order, cases, run_ranks(p, traces, order, cases, timeout=LIMIT))


def test_there_may_be_fewer_micro_batches_than_stages():
    cases = [(1, 1), (2, 0)]
    assert_like_one_process("1f1b", cases, run_ranks(4, traces, "1f1b", cases, timeout=LIMIT))


def in_slices(order):
    rank, groups = dist.get_rank(), [dist.new_group([1, 3]), dist.new_group([0, 2])]
    return traces(order, [(3, 1)], groups[0] if rank in (1, 3) else groups[1])


def test_a_group_may_be_a_slice_of_the_world():
    for order in ("1f1b", "naive"):
        ranks = run_ranks(4, in_slices, order, timeout=LIMIT)
        assert_like_one_process(order, [(3, 1)], ranks[1::2])
        assert_like_one_process(order, [(3, 1)], ranks[::2])


def test_layers_are_shared_out_evenly_and_the_ends_are_at_the_ends():
    for blocks in range(1, 12):
        for p in range(1, blocks + 1):
            stages = [list(cut(whole_model(blocks), s, p)._modules) for s in range(p)]
            assert [name for names in stages for name in names] == [str(i) for i in range(blocks + 2)]
            sizes = [len(names) - (s == 0) - (s == p - 1) for s, names in enumerate(stages)]
            assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1, (blocks, p, sizes)


# ------------------------------------------------------------------------------------------------------- the depth


def both_floors(order, m, blocks):
    group, p, s = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    tokens, labels = batch_of(0, m)
    valid = (labels != IGNORE).sum().item()
    stage = Stage(cut(whole_model(blocks), s, p), group)
    loss = stage.step(ORDERS[order], m, tokens, labels)
    other = cut(whole_model(blocks), s, p)
    runner = pipeline_executor.Pipeline(
        build(order, p, m, 1),
        {(0, s): other},
        group,
        loss=lambda logits, labels: pipe.loss_sum(logits, labels) / valid,
        example=stage.example,
    )
    theirs = runner.step(tokens.chunk(m), labels.chunk(m), broadcast=True)
    events = [(action.kind, action.micro_batch) for action, *_ in runner.timeline]
    grads = [{name: w.grad for name, w in layers.named_parameters()} for layers in (stage.layers, other)]
    return (loss, grads[0], stage.events, stage.peak), (theirs, grads[1], events, runner.peak)


@pytest.mark.parametrize("order", ORDERS)
def test_the_executor_of_the_depth_gives_the_same_in_the_same_order(order):
    for p, m, blocks in ((2, 5, 3), (4, 6, 5)):
        want = oracle(blocks, m, steps=1)
        for s, ((loss, grads, *rest), (other, others, *more)) in enumerate(
            run_ranks(p, both_floors, order, m, blocks, timeout=LIMIT)
        ):
            assert_same(loss, other, what="loss", rank=s)
            assert_same_named(grads, others, what="gradient of", rank=s)
            assert_same_named(grads, {name: want.gradients[0][name] for name in grads}, what="gradient of", rank=s)
            assert rest == more, f"rank {s}: {first_difference(*rest, *more)}"


def first_difference(actions, kept, others, depth_kept):
    names = ([f"{kind}{j}" for kind, j in row] for row in (actions, others))
    for turn, (mine, theirs) in enumerate(itertools.zip_longest(*names, fillvalue="nothing"), 1):
        if mine != theirs:
            return f"action {turn} is {mine}, but should be {theirs}"
    return f"{kept} micro-batches are kept, but should be {depth_kept}"


class Recorder:
    """A stage between two others which does nothing but write down what it is asked for."""

    s, p, previous, next = 1, 3, 0, 2

    def __init__(self):
        self.asked = []

    def forward(self, j, x):
        self.asked.append(f"F{j}")

    def backward(self, j, gradient):
        self.asked.append(f"BW{j}")

    def send(self, x, to):
        self.asked.append(f"send to {to}")

    def receive(self, source):
        self.asked.append(f"receive from {source}")


def asked_for(order, m):
    stage = Recorder()
    crossing = {"exchange": lambda stage, x, peer: stage.asked.append(f"exchange with {peer}")}
    ORDERS[order](stage, m, **(crossing if order == "1f1b" else {}))
    return stage.asked


@pytest.mark.parametrize("order", ["naive", "afab"])
def test_what_a_stage_has_made_leaves_before_it_makes_the_next(order):
    """Otherwise the next stage has nothing to do, although all numbers and the order of actions are right."""
    [asked] = run_ranks(1, asked_for, order, 3)
    for kind, source, to in (("F", 0, 2), ("BW", 2, 0)):
        for j in range(3):
            at = asked.index(f"{kind}{j}")
            around = asked[max(at - 1, 0) : at + 2]
            assert around == [f"receive from {source}", f"{kind}{j}", f"send to {to}"], f"{order}: {around}"


def test_what_crosses_in_1f1b_goes_through_the_exchange_that_is_given():
    [asked] = run_ranks(1, asked_for, "1f1b", 3)
    crossing = [words for words in asked if words.startswith("exchange")]
    assert crossing == ["exchange with 2", "exchange with 0", "exchange with 2"], asked


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (3, 2), (4, 4), (4, 10), (8, 20)])
def test_the_timetable_is_that_of_the_simulator(order, p, m):
    schedule = build(order, p, m, 1)
    timeline = simulate(schedule)  # F, B and W take 1 each
    rows = timetable([[(action.kind, action.micro_batch) for action in row] for row in schedule.actions])
    for s, row in enumerate(rows):
        assert [x[2] for x in row] == list(timeline.start[s]), f"rank {s} starts"
        assert [x[3] for x in row] == list(timeline.end[s]), f"rank {s} ends"
    idle = max(x[3] for row in rows for x in row) - 3 * m
    assert idle == 3 * (p - 1) * (m if order == "naive" else 1)


def test_the_drawings_in_the_docstring_are_what_is_drawn():
    for order in ORDERS:
        actions = [[(a.kind, a.micro_batch) for a in row] for row in build(order, 2, 3, 1).actions]
        for line in pipe.draw(timetable(actions)).splitlines():
            assert line.strip().replace("rank ", "").split(" ", 1)[1].strip() in pipe.__doc__, (order, line)
    long = pipe.draw(timetable([[("F", j) for j in range(64)]]))
    assert len(long) < 120 and long.endswith("...")


# ------------------------------------------------------------------------------------------------ bytes sent and held


def sent_bytes(order, m):
    p, s = dist.get_world_size(), dist.get_rank()
    stage = Stage(cut(whole_model(p + 1), s, p), dist.group.WORLD)
    batch = batch_of(0, m)
    with communication() as meter:
        stage.step(ORDERS[order], m, *batch)
    neighbours = (s > 0) + (s < p - 1)
    assert meter.calls["send"] == meter.calls["recv"] == m * neighbours, dict(meter.calls)
    assert meter.payload["send"] == stage.sent == m * neighbours * 2 * pipe.T * pipe.H * 8, f"rank {s}"
    assert meter.payload["all_reduce"] == 8 and set(meter.calls) <= {"send", "recv", "all_reduce"}, dict(meter.calls)
    return held_bytes(stage.layers).parameters


@pytest.mark.parametrize("order", ORDERS)
def test_each_neighbour_gets_one_message_of_n_bytes_for_each_micro_batch_and_no_more(order):
    held = run_ranks(4, sent_bytes, order, 6, timeout=LIMIT)
    assert sum(held) == held_bytes(whole_model(5)).parameters and max(held) < sum(held) / 2
    run_ranks(2, sent_bytes, order, 1, timeout=LIMIT)


def one_peak(order, m):
    """The most bytes that a second step allocates, gradients being there, and what is left of them."""
    p, s = dist.get_world_size(), dist.get_rank()
    stage, batch = Stage(cut(whole_model(p), s, p), dist.group.WORLD), batch_of(0, m)
    stage.step(ORDERS[order], m, *batch)
    dist.barrier()
    with peak_memory() as memory:
        stage.step(ORDERS[order], m, *batch)
        left = memory.current
    return memory.peak, left


def peaks(order, m):
    """gloo's threads may let go of a buffer late: the least of three."""
    runs = [one_peak(order, m) for _ in range(3)]
    return min(peak for peak, _ in runs), min(left for _, left in runs)


def bytes_of_one_forward():
    """What one micro-batch keeps on this rank between F and BW: what autograd saves, and the output itself."""
    p, s = dist.get_world_size(), dist.get_rank()
    layers = cut(whole_model(p), s, p)
    tokens, labels = batch_of(0, 1)
    x = tokens if s == 0 else torch.randn(*tokens.shape, pipe.H, dtype=torch.float64, requires_grad=True)
    with saved_activations(exclude=[*layers.parameters(), tokens, labels]) as saved:
        y = layers(x)
        if s == p - 1:
            y = pipe.loss_sum(y, labels) / 3
    assert y.requires_grad
    return saved.bytes + (y.nbytes if s < p - 1 else 0)


def test_memory_grows_with_every_micro_batch_in_afab_and_not_at_all_in_1f1b_or_naive():
    """Two ranks; peak bytes of everything that a step allocates."""
    one = run_ranks(2, bytes_of_one_forward)
    peak = {(order, m): run_ranks(2, peaks, order, m, timeout=LIMIT) for order in ORDERS for m in (4, 8)}
    for s in range(2):
        for order in ("naive", "1f1b"):
            assert peak[order, 8][s] == peak[order, 4][s], (
                f"{order}, rank {s}: {peak[order, 4][s]}, {peak[order, 8][s]}"
            )
        grows = peak["afab", 8][s][0] - peak["afab", 4][s][0]
        assert 4 * one[s] <= grows <= 4.02 * one[s], f"afab, rank {s}: {grows} bytes for 4 times {one[s]}"
        # What 1F1B keeps beyond naive is one micro-batch more on rank 0, and none on rank 1.
        more = peak["1f1b", 8][s][0] - peak["naive", 8][s][0]
        n = 2 * pipe.T * pipe.H * 8
        assert (1 - s) * one[s] - 2 * n <= more <= (1 - s) * one[s] + 2 * n, f"rank {s}: {more} bytes"


def left_after_steps(order):
    stage, batch = Stage(cut(whole_model(2), dist.get_rank(), 2), dist.group.WORLD), batch_of(0, 5)
    stage.step(ORDERS[order], 5, *batch)
    left = []
    with peak_memory() as memory:
        for _ in range(4):
            stage.step(ORDERS[order], 5, *batch)
            dist.barrier()
            left.append(memory.current)
    return left


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_leaves_no_activation_and_no_message_behind(order):
    for s, left in enumerate(run_ranks(2, left_after_steps, order, timeout=LIMIT)):
        small = 2 * pipe.T * pipe.H * 8 + 1024  # the example of a message, and the loss
        assert left[0] <= small and left[-1] <= left[0], f"rank {s}: {left} bytes"


# ----------------------------------------------------------------------------------------------------- order in time


def deadlocks_and_goes_on():
    began = time.monotonic()
    stuck = pipe.would_deadlock(dist.group.WORLD)
    took = time.monotonic() - began
    dist.barrier()  # the group of the job is as before
    return stuck, took, traces("1f1b", [(3, 1)])


@pytest.mark.parametrize("p", [1, 2, 4])
def test_sending_before_receiving_deadlocks_in_bounded_time_and_harms_nobody(p):
    ends = run_ranks(p, deadlocks_and_goes_on, timeout=40)
    stuck = [where for where, *_ in ends]
    assert_like_one_process("1f1b", [(3, 1)], [after for *_, after in ends])
    if p == 1:
        assert stuck == [""]
        return
    circle = [f"rank {p - 2} waits to send to rank {p - 1}", f"rank {p - 1} waits to send to rank {p - 2}"]
    assert stuck[-2:] == circle and stuck[:-2] == [f"rank {s} waits to receive from rank {s + 1}" for s in range(p - 2)]
    assert max(took for _, took, _ in ends) < 15


def with_delays(order, seed):
    """Every F and BW takes some time longer, now on this rank, now on that."""
    rank = dist.get_rank()
    dice = random.Random(100 * seed + rank)

    def change(stage):
        for name in ("forward", "backward"):
            plain = getattr(stage, name)
            slow = lambda *args, plain=plain: (time.sleep(dice.choice([0, 0, 0.003, 0.02])), plain(*args))[1]  # noqa: E731
            setattr(stage, name, slow)

    trace, _ = train(order, 6, 4, dist.group.WORLD, steps=1, change=change)
    want = oracle(4, 6, steps=1)
    assert_same_named(trace.gradients[0], {k: want.gradients[0][k] for k in trace.weights}, what="gradient", rank=rank)


@pytest.mark.parametrize("seed", range(3))
def test_no_delay_anywhere_makes_1f1b_hang_or_changes_a_gradient(seed):
    run_ranks(4, with_delays, "1f1b", seed, timeout=LIMIT)


def watched_exchanges():
    """[(kinds of the messages of a batch, how many of them are waited for when the exchange returns)]"""
    group, seen = dist.group.WORLD, []
    plain = dist.batch_isend_irecv

    def watching(ops):
        works = plain(ops)
        waited = set()
        seen.append((sorted(op.op.__name__ for op in ops), waited))

        class Watched:
            def __init__(self, i):
                self.i = i

            def wait(self, *args):
                waited.add(self.i)
                return works[self.i].wait(*args)

        return [Watched(i) for i in range(len(works))]

    stage = Stage(cut(whole_model(2), dist.get_rank(), 2), group)
    stage.example = torch.empty(2, 3, dtype=torch.float64)
    stage.sent = 0
    peer, x = 1 - stage.s, torch.full((3, 2), 1.0 + stage.s, dtype=torch.float64).t()  # a view: not one run of bytes
    dist.batch_isend_irecv = watching
    try:
        got = pipe.both_at_once(stage, x, peer)
    finally:
        dist.batch_isend_irecv = plain
    assert_same(got, torch.full((2, 3), 2.0 - stage.s, dtype=torch.float64), what="what came", rank=stage.s)
    assert stage.sent == 48
    assert pipe.both_at_once(stage, x, None) is None
    return [(kinds, len(waited)) for kinds, waited in seen]


def test_what_crosses_is_started_as_one_batch_and_both_messages_are_waited_for():
    assert run_ranks(2, watched_exchanges, timeout=8) == [[(["irecv", "isend"], 2)]] * 2


class Turned(nn.Module):
    """The same numbers in another order in memory."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x).transpose(0, 1).contiguous().transpose(0, 1)


def turned_stages(order):
    def change(stage):
        if stage.next is not None:
            stage.layers = Turned(stage.layers)

    trace, _ = train(order, 3, 4, dist.group.WORLD, steps=1, change=change)
    got = {name.removeprefix("inside."): g for name, g in trace.gradients[0].items()}
    want = oracle(4, 3, steps=1).gradients[0]
    assert_same_named(got, {name: want[name] for name in got}, what="gradient of", rank=dist.get_rank())


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_stage_returns_may_be_a_view_with_gaps(order):
    run_ranks(3, turned_stages, order, timeout=LIMIT)


def three_messages():
    stage = Stage(cut(whole_model(2), dist.get_rank(), 2), dist.group.WORLD)
    stage.example, stage.sent = torch.empty(2, 3, dtype=torch.float64), 0
    view = torch.arange(6.0, dtype=torch.float64).view(3, 2).t()
    if stage.s == 0:
        for x, to in ((view, 1), (2 * view, 1), (view, None)):
            stage.send(x, to)
        assert stage.receive(None) is None and stage.sent == 96
        return []
    got = [stage.receive(0), stage.receive(0), stage.example.zero_()]
    assert stage.sent == 0
    return got


def test_a_message_arrives_as_it_was_and_nobody_before_or_after_is_no_message():
    _, got = run_ranks(2, three_messages, timeout=LIMIT)
    for x, times in zip(got, (1, 2, 0), strict=True):
        assert_same(x, times * torch.arange(6.0, dtype=torch.float64).view(3, 2).t())


# -------------------------------------------------------------------------------------------------- modes, precision


def steps_without_zero_grad():
    stage, batch = Stage(cut(whole_model(3), dist.get_rank(), 2), dist.group.WORLD), batch_of(0, 4)
    losses = [stage.step(ORDERS["1f1b"], 4, *batch) for _ in range(2)]
    return losses, {name: w.grad for name, w in stage.layers.named_parameters()}


def test_gradients_add_up_over_steps_until_they_are_zeroed():
    want = oracle(3, 4)
    for s, (losses, gradients) in enumerate(run_ranks(2, steps_without_zero_grad, timeout=LIMIT)):
        assert_same(losses[0], want.losses[0], what="the loss of the first step", rank=s)
        assert_same(losses[1], want.losses[0], what="the loss of the second step", rank=s)
        twice = {name: 2 * want.gradients[0][name] for name in gradients}
        assert_same_named(gradients, twice, what="gradient of", rank=s)


def graphs_of_losses():
    stage = Stage(cut(whole_model(2), dist.get_rank(), 2), dist.group.WORLD)
    return {order: stage.step(ORDERS[order], 2, *batch_of(0, 2)).requires_grad for order in ORDERS}


def test_the_loss_that_is_told_has_no_graph():
    for s, graphs in enumerate(run_ranks(2, graphs_of_losses, timeout=LIMIT)):
        assert not any(graphs.values()), f"rank {s} returns a loss with the graph of its micro-batches: {graphs}"


def error_in_bf16(m):
    """(error of the pipeline, error of one process) of all gradients: both in bf16, both against float64."""
    trace, _ = train("1f1b", m, 3, dist.group.WORLD, torch.bfloat16, steps=1)
    right, dense = oracle(3, m).gradients[0], oracle(3, m, torch.bfloat16, 1).gradients[0]
    names = sorted(trace.weights)
    mine, plain, exact = (
        torch.cat([g[n].double().flatten() for n in names]) for g in (trace.gradients[0], dense, right)
    )
    return (mine - exact).norm().item(), (plain - exact).norm().item()


def test_in_bf16_the_pipeline_is_no_further_from_float64_than_one_process_is():
    errors = run_ranks(2, error_in_bf16, 2, timeout=LIMIT)
    for s, (mine, dense) in enumerate(errors):
        assert 0 < mine <= 1.5 * dense, f"rank {s}: {mine:.3g}, one process {dense:.3g}"


# ----------------------------------------------------------------------------------------------------------- the demo


def said_by_the_demo(order=None, micro_batches=6, layers=6, spoil=False):
    args = argparse.Namespace(order=order, micro_batches=micro_batches, layers=layers)
    plain, said = pipe.whole_model, io.StringIO()

    def perhaps_with_nan(blocks):
        model = plain(blocks)
        if spoil:
            model[1].up.weight.data[0, 0] = math.nan
        return model

    with contextlib.redirect_stdout(said), patch.object(pipe, "whole_model", perhaps_with_nan):
        wrong = pipe.demo(args, dist.group.WORLD, "cpu")
    return wrong, said.getvalue()


@pytest.mark.always("2")
@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_demo_passes_and_every_option_changes_what_it_says(p):
    (wrong, said), *others = run_ranks(p, said_by_the_demo, timeout=LIMIT)
    assert wrong == [] and said.endswith("\nPASS\n") and [text for _, text in others] == [""] * (p - 1)
    assert all(f"\n{order}   " in f"\n{said}" for order in ORDERS)
    if p == 2:
        (wrong, other), _ = run_ranks(p, said_by_the_demo, "1f1b", 3, 5, timeout=LIMIT)
        assert wrong == [] and "afab" not in other and "BW2" in other and "BW3" not in other
        weights = [sum(w.nbytes for w in cut(whole_model(5), s, 2).parameters()) for s in range(2)]
        assert f"by rank ({weights[0]}, {weights[1]})" in other


def test_the_demo_fails_on_nan():
    (wrong, said), _ = run_ranks(2, said_by_the_demo, "1f1b", spoil=True, timeout=10)
    assert any("off by nan" in line for line in wrong) and "FAIL" in said and "PASS" not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--order", "zb"], ["--order", "zb"]),
        (["--order", ""], ["--order", "''"]),
        (["--micro-batches", "0"], ["--micro-batches 0", "1 to 64"]),
        (["--micro-batches", "100000"], ["--micro-batches 100000", "1 to 64"]),
        (["--micro-batches", "nan"], ["--micro-batches", "nan"]),
        (["--micro-batches"], ["--micro-batches"]),
        (["--layers", "3"], ["--layers 3", "4 rank(s)", "4 to 64"]),
        (["--layers", "-1"], ["--layers -1"]),
        (["--layers", "2.5"], ["--layers", "2.5"]),
        (["--layer", "6"], ["--layer 6"]),
        (["7"], ["7"]),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2_before_any_process_group(options, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pipeline_parallel.py", *options])
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as end:
        pipe.main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and len(said.err.splitlines()) == 1
    assert all(word in said.err for word in words), said.err
    assert not dist.is_initialized()


def test_more_ranks_than_gpus_are_refused_and_do_not_fall_back_to_gloo(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pipeline_parallel.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as end:
        pipe.main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert said.err == "pipeline_parallel.py: --nproc_per_node 4: there are 2 GPUs here; use 2 or less\n"
