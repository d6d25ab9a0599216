"""Optimizer steps that are looked at later: the same bits as waiting, no message under way, and what may be late."""

import argparse
import gc
import sys
import weakref

import post_validation
import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from harness.reference import assert_same
from post_validation import LatePipeline, LateStep, before_backward, clip_factor, demo, repeated, room
from schedule_simulator import F, Message, ScheduleError, Times, programs, simulate
from schedules import FOLDED, LOOPED, SCHEDULES, build
from torch import nn


def per_rank(name):
    return 2 if name in (*LOOPED, *FOLDED) else 1


def run_demo(name, m, rollback):
    schedule = build(name, dist.get_world_size(), m, per_rank(name))
    groups = [dist.group.WORLD, dist.new_group()]
    return demo(argparse.Namespace(rollback=rollback), schedule, groups, torch.device("cpu"))


@pytest.mark.always("2-zb-h2-3-copy", "2-zb-v-4-invert")
@pytest.mark.parametrize(
    ("ranks", "name", "m", "rollback"),
    [(1, "1f1b", 1, "copy"), (2, "zb-h2", 3, "copy"), (2, "zb-v", 4, "invert"), (4, "zb-h2", 5, "copy")],
)
def test_late_steps_are_those_of_one_process_and_with_copies_to_the_bit_those_of_waiting(ranks, name, m, rollback):
    assert run_ranks(ranks, run_demo, name, m, rollback) == [[]] * ranks


# ------------------------------------------------------------------------------------------------ one step, by itself


class Parts:
    """all_gather of a group in which the other rank's part is given, and is there only when it has been waited for."""

    def __init__(self, other):
        self.other = other

    def __call__(self, parts, mine, group, async_op):
        assert async_op, "nobody waits in `step`"
        parts.fill_(float("nan"))
        self.target, self.values = parts, torch.stack([mine[0], torch.tensor(self.other, dtype=torch.float64)])
        return self

    def wait(self):
        self.target.copy_(self.values)


class Two:
    def size(self):
        return 2


def optimizer_of(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    p = [nn.Parameter(torch.randn(3, 4, generator=generator, dtype=dtype)) for _ in range(2)]
    return p, torch.optim.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.01, weight_decay=0.1)


def gradients(parameters, seed, size):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    norm = sum(p.grad.double().square().sum() for p in parameters).sqrt().item()
    for p in parameters:
        p.grad *= size / norm


def everything(parameters, optimizer):
    return [t.clone() for p in parameters for t in (p.detach(), *optimizer.state.get(p, {}).values())]


CASES = [  # own norm, the other's norm, limit 1: what becomes of the step
    (0.5, 0.5, "kept"),
    (0.8, 0.8, "again"),
    (1.5, 0.1, "later"),
    (0.5, float("inf"), "taken back"),
    (0.5, float("nan"), "taken back"),
    (float("inf"), 0.5, "left out"),
    (float("nan"), 0.5, "left out"),
]


def check_step(own, other, outcome, first, monkeypatch):
    case = f"{outcome}, {'the first step' if first else 'a later step'}"
    ends = {}
    for late in (True, False):
        parameters, optimizer = optimizer_of()
        if not first:
            gradients(parameters, 1, 0.7)
            optimizer.step()
        start = everything(parameters, optimizer)
        gradients(parameters, 2, own)
        monkeypatch.setattr(post_validation, "all_gather", Parts(other**2))
        steps = LateStep(optimizer, Two(), 1.0, late=late)
        steps.step()
        if late:
            moved = any(not torch.equal(a, b) for a, b in zip(start, everything(parameters, optimizer), strict=False))
            assert moved == (outcome in ("kept", "again", "taken back")), (
                f"{case}: steps at once, unless it knows better"
            )
        assert steps.validate() == (not late or outcome == "kept"), case
        ends[late] = everything(parameters, optimizer)
        assert not late or steps.outcomes == [outcome], case
    for a, b in zip(ends[True], ends[False], strict=True):
        assert torch.equal(a, b), f"{case}: the same bits as waiting, weights, moments and counts of steps"
    parameters, optimizer = optimizer_of()  # and by hand, with torch's own AdamW
    if not first:
        gradients(parameters, 1, 0.7)
        optimizer.step()
    gradients(parameters, 2, own)
    norm = (own**2 + other**2) ** 0.5
    if norm < float("inf"):
        for p in parameters:
            p.grad *= min(1.0, 1.0 / (norm + 1e-6))
        optimizer.step()
    for i, (a, b) in enumerate(zip(ends[True], everything(parameters, optimizer), strict=True)):
        assert_same(a, b, 1e-12, f"{case}: tensor {i} of weights and states")
    untouched = all(torch.equal(a, b) for a, b in zip(start, ends[True], strict=False))
    assert untouched == (outcome in ("taken back", "left out")), case
    if outcome in ("taken back", "left out") and first:
        assert len(ends[True]) == len(parameters), f"{case}: no state, as before the first step"


def test_a_step_ends_as_if_all_norms_had_been_known_before_it(monkeypatch):
    for first in (True, False):
        for own, other, outcome in CASES:
            check_step(own, other, outcome, first, monkeypatch)


def test_a_step_made_again_or_later_is_made_with_the_options_it_had_and_one_turned_round_too(monkeypatch):
    """A scheduler moves on between `step` and the look: each step has its own learning rate and decay."""
    later = {"lr": 0.37, "weight_decay": 0.5}
    for rollback in ("copy", "invert"):
        for tensor in (False, True):
            for own, other, outcome in CASES:
                ends = {}
                for late in (True, False):
                    parameters, optimizer = optimizer_of()
                    given = optimizer.param_groups[1]
                    given["lr"] = torch.tensor(given["lr"], dtype=torch.float64) if tensor else given["lr"]
                    gradients(parameters, 1, 0.7)
                    optimizer.step()
                    gradients(parameters, 2, own)
                    monkeypatch.setattr(post_validation, "all_gather", Parts(other**2))
                    steps = LateStep(optimizer, Two(), 1.0, rollback, late)
                    steps.step()
                    rate = given["lr"].fill_(later["lr"]) if tensor else later["lr"]  # as torch's schedulers do
                    given.update(later, lr=rate)
                    steps.validate()
                    assert given["lr"] is rate and given["weight_decay"] == later["weight_decay"], "the next step's"
                    ends[late] = everything(parameters, optimizer)
                for i, (a, b) in enumerate(zip(ends[True], ends[False], strict=True)):
                    what = f"{outcome}, {rollback}: tensor {i} of weights and states"
                    assert_same(a, b, 1e-12 if rollback == "invert" else 0, what)


def test_clipping_is_torchs_and_a_norm_that_is_no_number_clips_to_nothing():
    for size in (0.3, 0.999999, 1.0, 1.7, 1e6):
        p = nn.Parameter(torch.zeros(3))
        p.grad = torch.tensor([0.0, 0.6, -0.8], dtype=torch.float32) * size
        squares, before = p.grad.double().square().sum(), p.grad.double().clone()
        torch.nn.utils.clip_grad_norm_([p], 1.0)
        assert_same(before * clip_factor(squares, 1.0), p.grad, 1e-6, f"a gradient of norm {size}")
    for number in (float("inf"), float("nan")):
        assert clip_factor(torch.tensor(number), 1.0) == 0


def test_squares_are_summed_in_float64_whatever_the_gradients_are(monkeypatch):
    parameters, optimizer = optimizer_of(torch.float32)
    gradients(parameters, 1, 1e25)  # its square is infinite in float32
    monkeypatch.setattr(post_validation, "all_gather", Parts(1.0))
    steps = LateStep(optimizer, Two(), 1.0)
    steps.step()
    assert steps.validate() is False and steps.outcomes == ["later"]


def test_a_copy_is_let_go_with_the_look_and_is_three_numbers_a_parameter(monkeypatch):
    parameters, optimizer = optimizer_of()
    gradients(parameters, 1, 0.5)
    optimizer.step()
    monkeypatch.setattr(post_validation, "all_gather", Parts(0.1))
    steps = LateStep(optimizer, Two(), 1.0)
    steps.step()
    copies = [weakref.ref(t) for value, state in steps.before for t in (value, *state.values())]
    assert steps.copied == 3 * 8 * 24 + 4 * 2 and all(ref() is not None for ref in copies)
    assert steps.validate()
    gc.collect()
    assert not any(ref() is not None for ref in copies)


def test_turning_adamw_round_gives_back_less_the_larger_the_gradient_was(monkeypatch):
    errors = []
    for size in (1.0, 1e5, 1e10):
        parameters, optimizer = optimizer_of()
        gradients(parameters, 1, 1.0)
        optimizer.step()
        start = everything(parameters, optimizer)
        gradients(parameters, 2, size)
        monkeypatch.setattr(post_validation, "all_gather", Parts(float("inf")))
        steps = LateStep(optimizer, Two(), 10 * size, rollback="invert")
        steps.step()
        assert steps.copied == 0 and not steps.validate() and steps.outcomes == ["taken back"]
        pairs = zip(everything(parameters, optimizer), start, strict=True)
        errors.append(max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs))
    assert errors[0] < 1e-13 < 1e-9 < errors[1] < errors[2], errors


# ------------------------------------------------------------------------------------------------ where the look lies


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "auto"])
def test_at_the_look_only_forwards_have_been_done_and_no_message_is_under_way(name):
    for p in (1, 2, 4):
        for m in (1, p, 2 * p + 2):
            try:
                schedule = build(name, p, m, per_rank(name))
            except ScheduleError:
                continue
            lists = programs(schedule)
            before = [program[: before_backward(schedule, program)] for program in lists]
            assert any(before), "some forward"
            for rank, items in enumerate(before):
                assert {item.kind for item in items} <= {F}, f"rank {rank}"
            for rank, items in enumerate(before):
                for message in (item for item in items if isinstance(item, Message)):
                    other = message.source + message.destination - rank
                    assert message in before[other], f"{message} is not on both sides of the look"


class Stage(nn.Module):
    """Its forward counts and draws."""

    def __init__(self, seed):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False).double()
        with torch.no_grad():
            self.inner.weight.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return nn.functional.dropout(torch.tanh(self.inner(x)), 0.5)


def actions_of(program):
    return [item for item in program if not isinstance(item, Message)]


def step_with_a_look(name, m, right):
    """One step; at the look the weights become other ones, if `right` is False. Otherwise they are so before it."""
    rank, p = dist.get_rank(), dist.get_world_size()
    schedule = build(name, p, m, per_rank(name))
    stages = {key: Stage(key[1]) for key in schedule.stages_of(rank)}
    x = torch.randn(m, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pipeline = LatePipeline(
        schedule, stages, dist.group.WORLD, loss=lambda y, _: y.square().sum(), example=x[0], batched=name == "1f1b"
    )

    def change():
        with torch.no_grad():
            for stage in stages.values():
                stage.inner.weight.mul_(0.5)
        return False

    if right:
        change()
    torch.manual_seed(rank)
    loss = pipeline.step(x, [None] * m, broadcast=True, validate=(lambda: True) if right else change)
    look = before_backward(schedule, pipeline.program)
    repeats = len(actions_of(pipeline.program[:look]))
    calls = sum(stage.calls for stage in stages.values()) - sum(item.kind == F for item in actions_of(pipeline.program))
    grads = [stages[key].inner.weight.grad for key in sorted(stages)]
    return loss, grads, calls, repeats, pipeline.peak, len(pipeline.timeline)


@pytest.mark.parametrize(("ranks", "name", "m"), [(2, "zb-h2", 4), (2, "zb-v", 4), (2, "dualpipe", 4), (3, "1f1b", 3)])
def test_forwards_before_a_bad_look_are_made_again_with_the_new_weights_and_the_same_random_numbers(ranks, name, m):
    good, bad = (run_ranks(ranks, step_with_a_look, name, m, right) for right in (True, False))
    for rank, ((loss, want, calls, _, peak, actions), (loss2, got, again, repeats, peak2, actions2)) in enumerate(
        zip(good, bad, strict=True)
    ):
        assert (calls, again) == (0, repeats), f"rank {rank} makes {repeats} forwards twice"
        assert torch.equal(loss, loss2) and (peak, actions) == (peak2, actions2), f"rank {rank}"
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b), f"rank {rank}: a gradient"


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_a_bad_look_costs_a_rank_as_many_forwards_as_the_formulas_say(p):
    for m in (2 * p, 4 * p):
        formulas = {"1f1b": p, "zb-h1": p, "zb-h2": p, "zb-v": 2 * p, "interleaved": 2 * p + 1, "afab": m}
        for name, most in formulas.items():
            schedule = build(name, p, m, per_rank(name))
            again = max(before_backward(schedule, list(actions)) for actions in schedule.actions)
            assert again == most, f"{name}, {p} ranks, {m} micro-batches"


# ------------------------------------------------------------------------------------------------------------ the time


def test_steps_that_nobody_waits_between_take_what_the_formula_says():
    for p in (2, 3, 4, 8):
        for times in (Times(), Times(3, 3, 3), Times(2, 2, 2, communication=0.25)):
            schedule = build("zb-h2", p, 2 * p)
            one, five = simulate(schedule, times), simulate(repeated(schedule, 5), times)
            if not times.communication:
                assert one.makespan - one.cost == (p - 1) * times.f
                assert five.makespan == 5 * one.cost + (one.makespan - one.cost) < 5 * one.makespan
                assert room(schedule, times) == times.f
            else:
                assert five.makespan < 5 * one.makespan
            flat = build("1f1b", p, 2 * p)
            assert simulate(repeated(flat, 5), times).makespan == 5 * simulate(flat, times).makespan, "rank 0 ends last"
            assert room(flat) == p


def test_a_schedule_whose_micro_batches_have_directions_cannot_be_repeated():
    with pytest.raises(ScheduleError, match="dualpipe"):
        repeated(build("dualpipe", 2, 4), 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--schedule", "dualpipe"],
        ["--schedule", "nothing"],
        ["--micro-batches", "0"],
        ["--micro-batches", "many"],
        ["--rollback", "none"],
        ["--steps", "3"],
    ],
)
def test_bad_options_end_in_one_line_before_any_group_is_made(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["post_validation.py", *arguments])
    monkeypatch.setenv("WORLD_SIZE", "2" if arguments[1] == "dualpipe" else "1")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        post_validation.main()
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1)
    assert arguments[0] in printed.err and not dist.is_initialized()
