"""Pairs of DualPipe that take turns: the recorded order, the gradients, the time, and what happens after an error."""

import io
import os
import sys
import threading
from contextlib import redirect_stdout
from functools import cache, partial
from itertools import pairwise
from unittest.mock import patch

import overlapped_pair
import pytest
import torch
import torch.distributed as dist
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named
from overlapped_pair import Turns, pair_time, stage_of
from pipeline_executor import Pipeline
from schedule_simulator import BW, F, Times, blocks, simulate
from schedules import build
from split_backward import recomputed_once
from torch import nn
from torch.utils.checkpoint import checkpoint


class Waited:
    """A message that knows whether it was waited for."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(f"{self.name} waited for")


def chunk(turns, log, name, messages):
    def call():
        for i in range(messages):
            log.append(f"{name}{i}")
            turns.travel(lambda i=i: log.append(f"{name}{i} sent") or Waited(log, f"{name}{i}"))
        log.append(f"{name}{messages}")

    return call


def test_the_turn_passes_with_every_message_and_comes_back_before_it_is_waited_for():
    log, noted = [], []
    turns = Turns(lambda *event: noted.append(event))
    turns.overlap(chunk(turns, log, "f", 2), chunk(turns, log, "b", 2))
    assert log == [
        *("f0", "f0 sent", "b0", "b0 sent"),
        *("f0 waited for", "f1", "f1 sent", "b0 waited for", "b1", "b1 sent"),
        *("f1 waited for", "f2", "b1 waited for", "b2"),
    ]
    assert [event for event in noted if event[0] == "F"] == [
        ("F", event) for event in ("begins", "sends", "arrived", "sends", "arrived", "ends")
    ]


@pytest.mark.parametrize(("forward", "backward"), [(0, 3), (3, 0), (1, 4), (4, 1)])
def test_a_chunk_with_fewer_messages_leaves_the_rest_to_the_other(forward, backward):
    log = []
    turns = Turns()
    turns.overlap(chunk(turns, log, "f", forward), chunk(turns, log, "b", backward))
    for name, messages in (("f", forward), ("b", backward)):
        mine = [line for line in log if line[0] == name]
        assert len(mine) == 3 * messages + 1 and mine[-1] == f"{name}{messages}"


def test_without_a_partner_a_message_is_started_and_waited_for():
    log, noted = [], []
    turns = Turns(lambda *event: noted.append(event))
    chunk(turns, log, "x", 1)()
    assert log == ["x0", "x0 sent", "x0 waited for", "x1"]
    assert noted == [("", "sends"), ("", "arrived")]


@pytest.mark.parametrize("who", ["F", "BW"])
def test_an_error_in_one_chunk_ends_both_is_raised_and_leaves_turns_usable(who):
    log, threads = [], threading.active_count()
    turns = Turns()

    def fails():
        turns.travel(lambda: Waited(log, "one"))
        raise ZeroDivisionError("in the middle")

    calls = [fails, chunk(turns, log, "o", 2)]
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        turns.overlap(*(calls if who == "F" else calls[::-1]))
    assert "o2" in log, "the other one was not left hanging"
    assert threading.active_count() == threads
    log.clear()
    turns.overlap(chunk(turns, log, "f", 1), chunk(turns, log, "b", 1))
    assert log[-2:] == ["b0 waited for", "b1"]
    chunk(turns, log, "x", 1)()
    assert log[-1] == "x1", "and no turn is left over for a chunk that runs alone"
    with pytest.raises(SystemExit):
        turns.overlap(lambda: None, sys.exit)  # in a thread of its own it would end without a word


def test_a_backward_in_its_own_thread_recomputes_under_the_autocast_of_its_forward():
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(8, 16)
    found, modes = [], []
    for overlapped in (True, False):
        block.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = recomputed_once(block)(x.clone().requires_grad_())
            backward = y.float().square().sum().backward
            forward = lambda: modes.append(torch.is_autocast_enabled("cpu"))  # noqa: E731
            Turns().overlap(forward, backward) if overlapped else backward()
        found.append([p.grad for p in block.parameters()])
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
    assert modes == [True], "and F runs in the thread of the caller, in its modes"


class Sent(torch.autograd.Function):
    """Travels, as a layer's all-to-all does, in forward and in backward."""

    @staticmethod
    def forward(ctx, x, turns):
        ctx.turns = turns
        turns.travel(lambda: Waited([], ""))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return Sent.apply(grad, ctx.turns), None


def pair_with_dropout(overlapped, wrap, depth):
    """F of `depth` layers and BW of two: outputs, the numbers that are drawn behind them, and gradients."""
    torch.manual_seed(0)
    turns, layers, outputs = Turns(), [nn.Linear(8, 8).double() for _ in range(3)], []
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)

    def block(x, layers):
        for layer in layers:
            x = nn.functional.dropout(Sent.apply(nn.functional.dropout(layer(x), 0.5), turns), 0.5)
        return x

    def forward(x, layers):
        outputs.append(wrap(partial(block, layers=layers))(x))

    forward(x[0], layers[:2])
    calls = partial(forward, x[1], layers[:depth]), outputs[0].sum().backward
    turns.overlap(*calls) if overlapped else [call() for call in calls]
    behind = torch.rand(3)
    outputs[1].sum().backward()
    return {"F": outputs[1], "behind": behind, "x": x.grad} | {
        n: p.grad for n, p in nn.ModuleList(layers).named_parameters()
    }


@pytest.mark.parametrize(
    "wrap",
    [recomputed_once, lambda b: partial(checkpoint, b, use_reentrant=False)],
    ids=["recomputed once", "checkpoint"],
)
@pytest.mark.parametrize("depth", [1, 3])
def test_dropout_that_is_drawn_and_drawn_again_in_turns_is_that_of_one_after_the_other(wrap, depth):
    """With one layer F ends first, with three BW. What is drawn behind the pair is the same, too."""
    assert_same_named(pair_with_dropout(True, wrap, depth), pair_with_dropout(False, wrap, depth), 0)


def replay(events, part, message):
    """The clock of a rank that computes `part[chunk]` before each "sends" and "ends", by the recorded order alone."""
    now, there = 0.0, {}
    for name, event in events:
        if event in ("sends", "ends"):
            now += part[name]
        if event == "sends":
            there[name] = now + message
        if event == "arrived":
            now = max(now, there[name])
    return now


def test_the_time_of_a_pair_is_that_of_its_recorded_order():
    for messages, part, message in ((2, {"F": 1, "BW": 2}, 1), (3, {"F": 1, "BW": 2}, 5), (1, {"F": 4, "BW": 1}, 2)):
        noted = []
        turns = Turns(lambda *event, noted=noted: noted.append(event))
        turns.overlap(chunk(turns, [], "f", messages), chunk(turns, [], "b", messages))
        got = replay(noted, part, message)
        assert got == pair_time([part["F"]] * (messages + 1), [part["BW"]] * (messages + 1), message)
    assert pair_time([1, 1, 1], [2, 2, 2], 1) == 9, "all four messages beside the other's computing"
    assert pair_time([1, 1], [1, 1], 5) == 8, "two of three units of waiting are left: 1, 1, wait 4, 1, 1"
    assert pair_time([2], [3], 9) == 5
    assert pair_time([1, 1], [1, 1, 1, 1], 1) == 8, "nothing is left to compute beside the last two messages of BW"


def step(overlapped):
    """A step of DualPipeV on pipelines of two ranks, experts on two: its events, gradients, actions, peak and loss."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    group, experts = groups[rank % 2], groups[2 + rank // 2]
    schedule, events = build("dualpipe-v", 2, 6, 2), []
    turns = Turns(lambda *event: events.append(event))
    keys = schedule.stages_of(group.rank())
    stages = {(d, s): stage_of([2 * s, 2 * s + 1], 4, experts, turns, [experts.rank()]) for d, s in keys}
    x = torch.randn(2, 6, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[experts.rank()]
    hook = turns.overlap if overlapped else None
    pipeline = Pipeline(schedule, stages, group, loss=lambda y, _: (y**2).sum(), example=x[0], overlap=hook)
    total = pipeline.step(x, [None] * 6, broadcast=True)
    actions, peak, trained = tuple(action for action, _, _ in pipeline.timeline), pipeline.peak, list(events)
    assert_same(pipeline.forward_only(x, [None] * 6, broadcast=True), total, what="loss")
    assert all(name == "" for name, _ in events[len(trained) :]), "without backwards there are no pairs"
    gradients = [p.grad for key in sorted(stages) for p in stages[key].parameters()]
    return trained, gradients, actions, peak, total


@cache
def steps(overlapped):
    return run_ranks(4, step, overlapped)


def test_a_pair_of_the_schedule_runs_in_turns_and_gives_the_same_bits_as_one_after_the_other():
    plain, together = steps(False), steps(True)
    schedule = build("dualpipe-v", 2, 6, 2)
    for rank, ((alone, want, *before), (events, got, *after)) in enumerate(zip(plain, together, strict=True)):
        assert all(name == "" for name, _ in alone)
        for actions, peak, loss in (before, after):
            assert actions == schedule.actions[rank // 2]
            assert (peak, loss.item()) == (simulate(schedule).peak_activations[rank // 2], before[2].item())
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b), f"rank {rank}: taking turns changes no number"
        pairs = sum(len(block) == 2 for block in blocks(schedule.actions[rank // 2]))
        beside = [event for event in events if event[0]]
        assert beside.count(("F", "begins")) == beside.count(("BW", "ends")) == pairs > 4
        # two layers, there and back: four messages in F and four in BW, and after each the other one comes to compute
        one = [(name, event) for name, event in beside[: len(beside) // pairs]]
        sends = [name for name, event in one if event == "sends"]
        assert sends == ["F", "BW"] * 4
        assert beside == one * pairs, "the same order in every pair"
    assert together[0][0] == together[1][0] and together[2][0] == together[3][0], "and on every rank of the experts"


def test_the_recorded_order_takes_the_time_that_simulate_says():
    """Replayed with a clock of its own: parts of 1 in F and 2 in BW, messages of 1. No wall clock."""
    f, bw, message, parts = 1.0, 2.0, 1.0, 5
    pair = pair_time([f] * parts, [bw] * parts, message)
    alone = {F: parts * f + 4 * message, BW: parts * bw + 4 * message}
    schedule = build("dualpipe-v", 2, 6, 2)
    times = Times(alone[F], alone[BW] / 2, alone[BW] / 2, pair=pair)
    gained = simulate(schedule, times)
    for rank, (events, _, _, _, _) in enumerate(steps(True)):
        beside = [event for event in events if event[0]]
        starts = [i for i, event in enumerate(beside) if event == ("F", "begins")] + [len(beside)]
        replayed = [replay(beside[a:b], {"F": f, "BW": bw}, message) for a, b in pairwise(starts)]
        simulated = iter(blocks(schedule.actions[rank // 2]))
        ends = dict(zip(schedule.actions[rank // 2], gained.end[rank // 2], strict=True))
        begins = dict(zip(schedule.actions[rank // 2], gained.start[rank // 2], strict=True))
        for block in (block for block in simulated if len(block) == 2):
            assert ends[block[0]] - begins[block[0]] == replayed.pop(0) == pair
        assert replayed == []
    one_after_the_other = simulate(schedule, Times(times.f, times.b, times.w))
    assert gained.cost < 0.8 * one_after_the_other.cost


def demo(experts):
    return overlapped_pair.run(experts, torch.device("cpu"))


@pytest.mark.parametrize(("ranks", "experts"), [(1, 1), (2, 2), (2, 1)])
def test_the_demo_has_the_gradients_of_the_whole_model_and_hides_every_message_of_a_pair(ranks, experts):
    assert run_ranks(ranks, demo, experts) == [[]] * ranks


def test_a_message_that_nothing_is_computed_beside_is_not_called_hidden():
    events = [("F", "begins"), ("F", "sends"), ("F", "arrived"), ("BW", "begins"), ("BW", "sends"), ("F", "ends")]
    assert not overlapped_pair.covered(events, 1)
    assert overlapped_pair.covered([("F", "sends"), ("BW", "begins"), ("F", "arrived")], 0)


def test_bad_options_end_in_one_line_before_any_group_is_made():
    assert "--experts 2 does not divide 1 ranks" in refusal(overlapped_pair.main, "--experts 2")
    assert "--turns" in refusal(overlapped_pair.main, "--turns 3")
    assert "--experts 0 does not divide 1 ranks" in refusal(overlapped_pair.main, "--experts 0")
    with patch("torch.cuda.device_count", return_value=1), patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        assert "--nproc_per_node 2 is more than the GPUs here; use 1" in refusal(overlapped_pair.main, world_size=2)


def demo_with_a_wrong_rank(experts):
    class Spoiled(overlapped_pair.Pipeline):
        def step(self, *arguments, **options):
            super().step(*arguments, **options)
            if dist.get_rank() == 1:
                for stage in self.stages.values():
                    stage[-1].down.grad[0] = torch.nan

    alone = patch.object(overlapped_pair, "covered", lambda events, sent: dist.get_rank() == 0)
    with alone, patch.object(overlapped_pair, "Pipeline", Spoiled), redirect_stdout(io.StringIO()) as out:
        return demo(experts), " ".join(out.getvalue().split())


def test_a_nan_in_a_gradient_of_one_rank_is_no_pass():
    """Nor are messages of that rank that nothing was computed beside."""
    wrong = ["largest error against one process", "messages that nothing was computed beside"]
    (found, said), beside = run_ranks(2, demo_with_a_wrong_rank, 1)
    assert (found, "") == beside == (wrong, ""), "rank 0 alone prints"
    assert all(words in said for words in ("7 pairs", "1e-10 nan", "[56, 56] [56, 0]", "a pair 15 15")), said


@pytest.mark.parametrize("wrong", [[], ["one thing", "another"]], ids=["nothing", "two things"])
def test_the_script_ends_with_1_and_what_is_wrong_or_with_pass(wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["overlapped_pair.py"])
    monkeypatch.setenv("WORLD_SIZE", "4" if wrong else "3")  # experts on 2 of an even number, or else on 1
    monkeypatch.setattr(overlapped_pair, "run", lambda experts, _: wrong if experts == 1 + bool(wrong) else [experts])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *given, **options: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(SystemExit) as end:
        overlapped_pair.main()
    assert (end.value.code, capsys.readouterr().out) == ((1, "FAIL: one thing; another\n") if wrong else (0, "PASS\n"))


def exchanged_columns():
    x = torch.arange(8.0).view(2, 4).t()
    return torch.equal(overlapped_pair.AllToAll.apply(x, dist.group.WORLD, Turns()), x)


def test_a_tensor_that_is_transposed_arrives_as_it_was():
    assert run_ranks(1, exchanged_columns) == [True]
