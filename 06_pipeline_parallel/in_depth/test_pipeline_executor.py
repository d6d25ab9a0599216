"""The executor: every schedule gives the gradients of the whole model, holds what `simulate` says, and never hangs."""

import io
import random
import re
import time
import weakref
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache, partial, partialmethod
from unittest.mock import patch

import pipeline_executor
import pytest
import torch
import torch.distributed as dist
from _pipeline_model import IGNORE, Sizes, Stage, make_batch, token_loss_sum
from harness.meter import communication
from harness.programs import refusal
from harness.ranks import RankFailure, run_ranks
from harness.reference import Trace, assert_same, assert_same_trace, sgd_trace
from pipeline_executor import Mailbox, Pipeline, layers_of, parse_arguments, sum_mirrored, sum_tied
from schedule_simulator import Action, Message, ScheduleError, Times, check, crossings, simulate
from schedules import FOLDED, LOOPED, SCHEDULES, build
from split_backward import flops, recomputed_once
from torch import nn
from torch.utils.checkpoint import checkpoint

LENGTH, HIDDEN = 8, 8
POSITIONS = torch.arange(LENGTH)
DOUBLE = torch.float64


def v_of(name):
    return 2 if name in (*LOOPED, *FOLDED) else 1


def squares(y, target):
    return (y**2).sum()


def one_step(schedule, stages, x, loss=squares, **options):
    """The pipeline of the whole world, after a step on x, which has no targets."""
    options = {"example": x[0]} | options
    pipeline = Pipeline(schedule, stages, dist.group.WORLD, loss=loss, **options)
    pipeline.step(x, [None] * len(x))
    return pipeline


# --------------------------------------------------------------------------------------- training beside the reference


def make_stage(sizes, stage, stages, tied):
    layers = layers_of(stage, stages, sizes.layers)
    return Stage(sizes, layers, first=stage == 0, last=stage == stages - 1, tied=tied).double()


def global_batch(step, m, parts):
    """Tokens and labels [part][micro-batch, B, S], and the valid tokens of the whole global batch."""
    tokens, labels = make_batch(step, m * parts, rows=1, length=LENGTH)
    return tokens.unflatten(0, (parts, m)), labels.unflatten(0, (parts, m)), (labels != IGNORE).sum().item()


@cache
def reference(sizes, m, parts, tied, steps):
    """The whole model in one piece, the whole global batch at once."""
    model = make_stage(sizes, 0, 1, tied)

    def backward(step):
        tokens, labels, valid = global_batch(step, m, parts)
        loss = token_loss_sum(model(tokens.flatten(0, 2), POSITIONS), labels.flatten(0, 2)) / valid
        loss.backward()
        return loss.item()

    trace = sgd_trace(dict(model.named_parameters()), backward, steps=steps)
    if tied:  # one weight under two names
        for named in (*trace.gradients, trace.weights):
            named["head.weight"] = named["embed.weight"]
    return trace


def select(named, key):
    """The entries of one stage, under the names they have in the whole model."""
    return {name: value for (at, name), value in named.items() if at == key}


def train_beside_the_reference(schedule, group, *, tied=True, steps=1, wrap=None, data_group=None, batched=None):
    """Loss, every gradient (raw, at every step) and the weights of each stage must be the whole model's."""
    m, rank, sizes = schedule.micro_batches, group.rank(), Sizes(hidden=HIDDEN, layers=schedule.stages + 1)
    part, parts = (0, 1) if data_group is None else (data_group.rank(), data_group.size())
    stages = {(d, s): make_stage(sizes, s, schedule.stages, tied) for d, s in schedule.stages_of(rank)}
    copies = [w for key in sorted(stages) for w in stages[key].tied_weights()] if tied else []
    valid, works = 0, []
    for module in stages.values():
        module.wrap = wrap or module.wrap

    def start_reduction(module):  # as the trainer does it: in the middle of the step
        works.extend(dist.all_reduce(p.grad, group=data_group, async_op=True) for p in module.parameters())

    pipeline = Pipeline(
        schedule,
        stages,
        group,
        loss=lambda logits, labels: token_loss_sum(logits, labels) / valid,
        example=torch.empty(1, LENGTH, HIDDEN, dtype=DOUBLE),
        on_stage_done=start_reduction if data_group is not None else None,
        batched=batched,
    )

    def backward(step):
        nonlocal valid
        tokens, labels, valid = global_batch(step, m, parts)
        loss = pipeline.step(tokens[part], labels[part], [{"positions": POSITIONS}] * m, broadcast=True)
        while works:
            works.pop().wait()
        sum_mirrored(schedule, stages, group)
        if tied:
            sum_tied(schedule, copies, group)
        if data_group is not None:
            dist.all_reduce(loss, group=data_group)
        return loss.item()

    parameters = {(key, name): p for key, module in stages.items() for name, p in module.named_parameters()}
    got, want = sgd_trace(parameters, backward, steps=steps), reference(sizes, m, parts, tied, steps)
    for key in stages:
        mine = Trace(got.losses, [select(step, key) for step in got.gradients], select(got.weights, key))
        theirs = [{name: step[name] for name in mine.weights} for step in want.gradients]
        assert_same_trace(mine, Trace(want.losses, theirs, {n: want.weights[n] for n in mine.weights}), rank=rank)
    assert pipeline.peak == simulate(schedule).peak_activations[rank], (schedule.name, m, pipeline.peak)
    mail = pipeline.mail
    assert not (pipeline.held or mail.here or mail.coming or any(mail.going.values())), "a step leaves nothing behind"
    return pipeline


def train_all(cases):
    """Each case (name, m, v, tied, steps) that the schedule allows; returns those that ran."""
    ran = []
    for name, m, v, tied, steps in cases:
        try:
            schedule = build(name, dist.get_world_size(), m, v)
        except ScheduleError:
            continue
        batched = m == 3  # and one by one with other numbers of micro-batches
        train_beside_the_reference(schedule, dist.group.WORLD, tied=tied, steps=steps, batched=batched)
        ran.append((name, m, v))
    return ran


def must_run(name, p, m):
    return {
        "dualpipe": p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
        "dualpipe-v": m >= 2 * p,
        "interleaved": m % p == 0,
    }.get(name, True)


@pytest.mark.always("2")
@pytest.mark.parametrize("p", [1, 2, 4])
def test_every_schedule_gives_the_gradients_of_the_whole_model(p):
    counts = sorted({1, 3, 2 * p})
    cases = [(name, m, v_of(name), True, 3 if m == 2 * p else 1) for name in SCHEDULES for m in counts]
    ran = run_ranks(p, train_all, cases, timeout=180)[0]
    assert ran == [(name, m, v) for name, m, v, _, _ in cases if must_run(name, p, m)]


@pytest.mark.prove
def test_many_micro_batches_three_stages_a_rank_and_untied_weights():
    cases = [(name, 17, v_of(name), True, 1) for name in ("1f1b", "llama3", "zb-v", "dualpipe-v")]
    cases += [(name, m, 3, False, 1) for name, m in (("interleaved", 8), ("breadth-first", 4), ("llama3", 6))]
    assert len(run_ranks(4, train_all, cases, timeout=180)[0]) == 7


def two_by_two():
    """Four ranks as 2 x 2: pipelines (0, 2) and (1, 3), whose ranks are not contiguous; other axis (0, 1), (2, 3)."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    rank = dist.get_rank()
    return groups[rank % 2], groups[2 + rank // 2]


def with_data_parallel(cases):
    group, data_group = two_by_two()
    for name, m in cases:
        train_beside_the_reference(build(name, 2, m, v_of(name)), group, data_group=data_group, steps=3)


@pytest.mark.prove
def test_with_data_parallel_gradients_are_those_of_all_micro_batches_of_all_replicas():
    run_ranks(4, with_data_parallel, [("1f1b", 3), ("zb-v", 4), ("interleaved", 2), ("dualpipe", 4)])


def with_recomputation():
    plain = partial(checkpoint, use_reentrant=False)
    for name, wrap in (("1f1b", recomputed_once), ("zb-h1", recomputed_once), ("zb-h1", lambda b: partial(plain, b))):
        train_beside_the_reference(build(name, 2, 4), dist.group.WORLD, wrap=wrap)


def test_blocks_may_be_recomputed_in_two_ways():
    run_ranks(2, with_recomputation)


def recomputed_above_what_needs_no_gradient():
    """The first stage gets numbers, or tokens for an embedding that is not trained, like all of the stage or not:
    recomputed, and as it is."""
    rank = dist.get_rank()
    for name in ("1f1b", "zb-h1"):
        for frozen in ("nothing", "embedding", "stage"):
            x = torch.randn(4, 3, HIDDEN, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
            inputs = x if frozen == "nothing" else torch.arange(12).view(4, 3)
            found = []
            for wrap in (recomputed_once, lambda block: block):
                torch.manual_seed(0)
                embedding, *layers = nn.Embedding(12, HIDDEN), *(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
                stage = nn.Sequential(*layers[2 * rank : 2 * rank + 2]).double()
                for layer in stage:
                    layer.forward = wrap(layer.forward)
                if frozen != "nothing" and rank == 0:
                    stage.insert(0, embedding.double().requires_grad_(False))
                if frozen == "stage" and rank == 0:
                    stage.requires_grad_(False)
                one_step(build(name, 2, 4), {(0, rank): stage}, inputs, example=x[0])
                found.append({n: p.grad for n, p in stage.named_parameters()})
            for key, want in found[1].items():
                assert_same(found[0][key], want, what=f"{name}: gradient of {key}", rank=rank)


def test_a_first_stage_of_recomputed_blocks_has_its_gradients_although_its_input_needs_none():
    run_ranks(2, recomputed_above_what_needs_no_gradient)


class Copied(torch.autograd.Function):
    """f of Megatron-LM: the input of column-parallel weights; its gradient is a sum over the tensor group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """g: the output of row-parallel weights is a sum over the tensor group."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelMLP(nn.Module):
    def __init__(self, stage, group, whole=False):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        up = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator, dtype=DOUBLE)
        pieces = (0, 1) if whole else (group.rank(), 2)
        start, size = pieces[0] * 2 * HIDDEN // pieces[1], 2 * HIDDEN // pieces[1]
        self.up = nn.Parameter(up[:, start : start + size].clone())
        self.down = nn.Parameter(up.t()[start : start + size].clone() / HIDDEN)
        self.group = None if whole else group

    def forward(self, x):
        if self.group is None:
            return x + torch.tanh(x @ self.up) @ self.down
        return x + Summed.apply(torch.tanh(Copied.apply(x, self.group) @ self.up) @ self.down, self.group)


def with_tensor_parallel(names):
    group, tensor_group = two_by_two()
    for name in names:
        schedule = build(name, 2, 4, v_of(name))
        stages = {(d, s): ParallelMLP(s, tensor_group) for d, s in schedule.stages_of(group.rank())}
        x = torch.randn(4, 3, HIDDEN, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
        pipeline = Pipeline(schedule, stages, group, loss=squares, example=x[0])
        loss = pipeline.step(x, [None] * 4, broadcast=True)
        whole = nn.Sequential(*(ParallelMLP(s, tensor_group, whole=True) for s in range(schedule.stages)))
        want = (whole(x) ** 2).sum()
        want.backward()
        assert_same(loss, want.detach(), what="loss")
        for (_, s), module in stages.items():
            columns = slice(tensor_group.rank() * HIDDEN, (tensor_group.rank() + 1) * HIDDEN)
            assert_same(module.up.grad, whole[s].up.grad[:, columns], what=f"up of stage {s}", rank=dist.get_rank())
            assert_same(module.down.grad, whole[s].down.grad[columns], what=f"down of stage {s}", rank=dist.get_rank())


def test_stages_may_hold_collectives_in_forward_and_backward():
    run_ranks(4, with_tensor_parallel, ["1f1b", "zb-h1", "zb-v"])


# ----------------------------------------------------------------------------------------- weights that exist twice


@contextmanager
def own_gradients(parameters):
    """What is inside writes gradients where they are (views of a bucket), and no two share memory: clipped twice."""
    before = [None if p.grad is None else p.grad.data_ptr() for p in parameters]
    yield
    after = [p.grad.data_ptr() for p in parameters]
    assert all(old in (None, new) for old, new in zip(before, after, strict=True)), "a gradient has moved"
    assert len({p.grad.untyped_storage().data_ptr() for p in parameters}) == len(parameters), "gradients share memory"


def copies_of_dualpipe():
    schedule, group = build("dualpipe", 4, 8), dist.group.WORLD
    rank, sizes = group.rank(), Sizes(hidden=HIDDEN, layers=4)
    stages = {(d, s): make_stage(sizes, s, 4, False) for d, s in schedule.stages_of(rank)}
    example = torch.empty(1, LENGTH, HIDDEN, dtype=DOUBLE)
    tokens, labels, _ = global_batch(0, 8, 1)
    pipeline = Pipeline(schedule, stages, group, loss=token_loss_sum, example=example)
    pipeline.step(tokens[0], labels[0], [{"positions": POSITIONS}] * 8)
    before = {s: [p.grad.clone() for p in stages[d, s].parameters()] for d, s in stages}
    parameters = [p for module in stages.values() for p in module.parameters()]
    with communication() as sent, own_gradients(parameters):
        sum_mirrored(schedule, stages, group)
    gradients = sum(p.grad.nbytes for module in stages.values() for p in module.parameters())
    assert sent.payload["send"] == gradients, "one message with the gradients of both stages"
    after = {s: [p.grad.clone() for p in stages[d, s].parameters()] for d, s in stages}
    for trained in ("norm1", "nothing"):
        for name, p in (named for module in stages.values() for named in module.named_parameters()):
            p.requires_grad_(trained in name)
        sum_mirrored(schedule, stages, group)
    for (_, s), module in stages.items():
        for (name, p), q in zip(module.named_parameters(), after[s], strict=True):
            assert torch.equal(p.grad, 2 * q if "norm1" in name else q), "only what is trained is summed"
    return before, after


def test_mirrored_copies_differ_before_they_are_summed_and_not_in_one_bit_after():
    by_rank = run_ranks(4, copies_of_dualpipe)
    for rank in (0, 1):
        for stage, gradients in by_rank[rank][0].items():
            pairs = zip(gradients, by_rank[3 - rank][0][stage], strict=True)
            assert any((a - b).abs().max() > 1e-3 for a, b in pairs), "each copy has seen other micro-batches"
            for a, b in zip(by_rank[rank][1][stage], by_rank[3 - rank][1][stage], strict=True):
                assert torch.equal(a, b)


def tied_by_hand():
    one_way, v, both = build("1f1b", 3, 3), build("zb-v", 3, 5, 2), build("dualpipe", 2, 4)
    two_ranks = dist.new_group([0, 2])
    rank, got = dist.get_rank(), []
    for schedule, group, held in (
        (one_way, dist.group.WORLD, {0: [1.0], 1: [], 2: [10.0]}),
        (v, dist.group.WORLD, {0: [1.0, 10.0], 1: [], 2: []}),
        (both, two_ranks, {0: [1.0, 10.0], 2: [10.0, 1.0]}),  # after sum_mirrored: both ranks have both
        (one_way, dist.group.WORLD, {0: [1.0], 1: [], 2: [None]}),  # an end that got no gradient
        (v, dist.group.WORLD, {0: [None, None], 1: [], 2: []}),  # none at all: zeros
        (one_way, dist.group.WORLD, {0: ["frozen"], 1: [], 2: ["frozen"]}),
    ):
        copies = [nn.Parameter(torch.zeros(2), value != "frozen") for value in held.get(rank, [])]
        for copy, value in zip(copies, held.get(rank, []), strict=True):
            copy.grad = torch.full((2,), value) if isinstance(value, float) else None
        if rank in held:
            with own_gradients([copy for copy in copies if copy.requires_grad]):
                sum_tied(schedule, copies, group)
        got.append([copy.grad.tolist() if copy.requires_grad else copy.grad for copy in copies])
    return got


def test_a_tied_weight_gets_the_gradient_of_both_its_ends_once():
    first, middle, last = run_ranks(3, tied_by_hand)
    eleven = [11.0, 11.0]
    assert first == [[eleven], [eleven, eleven], [eleven, eleven], [[1.0, 1.0]], [[0.0, 0.0]] * 2, [None]]
    assert middle == [[]] * 6
    assert last == [[eleven], [], [eleven, eleven], [[1.0, 1.0]], [], [None]]


# ------------------------------------------------------------------------------------------------------- small stages


class Sleep(torch.autograd.Function):
    """Nothing, slowly. `seconds()` is asked again at each use."""

    @staticmethod
    def forward(ctx, x, in_forward, in_backward):
        ctx.seconds = in_backward
        time.sleep(in_forward())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds())
        return grad, None, None


def never():
    return 0.0


class Sleepy(nn.Module):
    """Sleeps f in F, b in B and w in W: what lies between the weight and its first use runs in W only."""

    def __init__(self, f, b, w):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 1.1, dtype=DOUBLE))
        self.f, self.b, self.w = f, b, w

    def forward(self, x):
        return Sleep.apply(x, self.f, self.b) * Sleep.apply(self.weight, never, self.w)


def run_sleepy(schedule, group, seconds, batched=None):
    """One step; `seconds(stage)` gives the three functions f, b, w. Returns the pipeline and its gradients."""
    stages = {(d, s): Sleepy(*seconds(s)) for d, s in schedule.stages_of(group.rank())}
    x = torch.arange(1.0, 2 * schedule.micro_batches + 1, dtype=DOUBLE).view(-1, 2)
    pipeline = Pipeline(schedule, stages, group, loss=lambda y, _: y.sum(), example=x[0], batched=batched)
    dist.barrier(group)
    pipeline.step(x, [None] * len(x))
    return pipeline, [stages[key].weight.grad for key in sorted(stages)]


def random_delays(runs):
    """The same steps as without delays, to the bit, whatever the timing."""
    rank, group, wanted = dist.get_rank(), dist.group.WORLD, {}
    names = list(SCHEDULES)
    chance = random.Random(rank)

    def delay():
        return chance.choice((0.0, 0.0, 0.0005, 0.002))

    for run in range(runs):
        name = names[run % len(names)]
        schedule = build(name, 4, 8 if "dual" in name else 4, v_of(name))
        if name not in wanted:
            wanted[name] = run_sleepy(schedule, group, lambda _: (never,) * 3)[1]
        got = run_sleepy(schedule, group, lambda _: (delay,) * 3, batched=run // len(names) % 2 == 1)[1]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted[name], strict=True)), (name, run)
    return runs


@pytest.mark.prove
def test_many_runs_with_random_delays_on_all_ranks_neither_hang_nor_differ():
    assert run_ranks(4, random_delays, 200, timeout=240) == [200] * 4


def timed(name, m, f, b, w):
    schedule = build(name, 4, m, v_of(name))

    def seconds(stage):
        return [partial(float, times[stage % len(times)]) for times in (f, b, w)]

    pipeline, _ = run_sleepy(schedule, dist.group.WORLD, seconds)
    return pipeline.timeline[0][1], pipeline.timeline[-1][2]


@pytest.mark.always("1f1b-4")
@pytest.mark.parametrize(("name", "m"), [("afab", 4), ("1f1b", 4), ("zb-h1", 4), ("zb-v", 3)])
def test_a_step_of_stages_that_sleep_takes_the_simulated_time(name, m):
    measured = []
    for attempt in range(5):
        # Another process may take the core away: it matters less the longer the stages sleep. A wrong order stays slow.
        unit = 0.03 * 2**attempt
        f, b, w = [unit, 1.5 * unit, unit, unit], [unit, 2 * unit, unit, unit], [unit]  # rank 1's stages cost more
        schedule = build(name, 4, m, v_of(name))
        times = [[t[s % len(t)] for s in range(schedule.stages)] for t in (f, b, w)]
        predicted = simulate(schedule, Times(*times)).makespan
        spans = run_ranks(4, timed, name, m, f, b, w)
        measured.append((max(end for _, end in spans) - min(start for start, _ in spans)) / predicted)
        if abs(measured[-1] - 1) <= 0.05:
            return
    raise AssertionError(f"{name}: measured over predicted time, with longer and longer stages: {measured}")


def swapped(seeds):
    """A schedule with two actions of a rank swapped is rejected, or runs and gives the same gradients."""
    group, ran = dist.group.WORLD, 0
    plain = build("zb-h1", 2, 4)
    want = run_sleepy(plain, group, lambda _: (never,) * 3)[1]
    for seed in range(seeds):
        chance = random.Random(seed)  # the same on all ranks
        rows = [list(row) for row in plain.actions]
        row = chance.choice(rows)
        i, j = chance.sample(range(len(row)), 2)
        row[i], row[j] = row[j], row[i]
        changed = replace(plain, actions=tuple(map(tuple, rows)))
        try:
            check(changed)
        except ScheduleError:
            with pytest.raises(ScheduleError):
                Pipeline(changed, {}, group, loss=torch.sum, example=torch.empty(2))
            continue
        ran += 1
        for a, b in zip(run_sleepy(changed, group, lambda _: (never,) * 3)[1], want, strict=True):
            assert_same(a, b, what=f"weight's gradient after swap {seed}")
    return ran


def test_a_schedule_with_two_actions_swapped_is_rejected_or_gives_the_same_gradients():
    assert 5 <= run_ranks(2, swapped, 60)[0] < 60


def operations():
    """Floating-point operations of each B and each W of this rank."""
    schedule, rank, counts = build("zb-h1", 2, 3), dist.get_rank(), {"B": set(), "W": set()}
    stages = {(0, rank): make_stage(Sizes(hidden=HIDDEN, layers=4), rank, 2, True)}
    tokens, labels = (both[0] for both in global_batch(0, 3, 1)[:2])
    example = torch.empty(1, LENGTH, HIDDEN, dtype=DOUBLE)
    pipeline = Pipeline(schedule, stages, dist.group.WORLD, loss=token_loss_sum, example=example)

    def counted(action, given, do):
        counts[action.kind].add(flops(lambda: do(action, given))[0])

    pipeline.backward_for_input = partial(counted, do=pipeline.backward_for_input)
    pipeline.backward_for_weights = partial(counted, do=pipeline.backward_for_weights)
    given = (tokens, []) if rank == 0 else ([], labels)  # a rank needs only what its stages read
    pipeline.step(*given, [{"positions": POSITIONS}] * 3)
    return counts["B"], counts["W"]


def test_the_two_parts_cost_the_same_on_every_stage_although_tokens_have_no_gradient():
    linear = 2 * (2 * LENGTH * HIDDEN * 12 * HIDDEN)  # two layers of 12 H² weights; attention is not counted on CPU
    head = 2 * LENGTH * HIDDEN * 256
    assert run_ranks(2, operations) == [({linear}, {linear}), ({linear + head}, {linear + head})]


# ------------------------------------------------------------------------------------------ memory, messages, order


class Boxes(nn.Module):
    """A module that counts the bytes which its graph keeps alive, in `bytes[0]`, and the most there were, in `[1]`."""

    def __init__(self, inner, count):
        super().__init__()
        self.inner, self.count = inner, count

    def forward(self, x):
        class Box:
            def __init__(self, tensor):
                self.tensor = tensor

        def pack(tensor):
            if isinstance(tensor, nn.Parameter) or (
                tensor._base is not None and isinstance(tensor._base, nn.Parameter)
            ):
                return tensor
            box = Box(tensor.detach())  # an output with its graph would hold itself
            self.count[0] += tensor.nbytes
            self.count[1] = max(self.count)
            weakref.finalize(box, self.freed, tensor.nbytes)
            return box

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: getattr(box, "tensor", box)):
            return self.inner(x)

    def freed(self, size):
        self.count[0] -= size


def live_bytes(m):
    found = []
    for name in SCHEDULES:
        schedule, count = build(name, 2, m, v_of(name)), [0, 0]
        stages = {}
        for key in schedule.stages_of(dist.get_rank()):
            inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
            stages[key] = Boxes(inner, count)
        x = torch.randn(m, 3, 8, dtype=DOUBLE)
        pipeline = one_step(schedule, stages, x)
        assert count[0] == 0, "all graphs are gone after a step"
        one = 3 * x[0].nbytes  # what each of the three modules keeps: a linear layer its input, tanh its output
        found.append((count[1] / one, pipeline.peak))
    return found


def test_bytes_of_live_activations_peak_where_the_simulator_says():
    for rank, found in enumerate(run_ranks(2, live_bytes, 6)):
        for name, (by_bytes, by_count) in zip(SCHEDULES, found, strict=True):
            predicted = simulate(build(name, 2, 6, v_of(name))).peak_activations[rank]
            assert (by_bytes, by_count) == (predicted, predicted), f"{name}, rank {rank}"


def started(cases):
    """The messages of this rank, its F and its BW, in the order in which it starts them."""
    events, plain_start, plain = [], Mailbox.start, {name: getattr(Pipeline, name) for name in ("forward", "backward")}

    def start(mail, message):
        events.append(message)
        plain_start(mail, message)

    def work(pipeline, action, given, name):
        events.append(action)
        plain[name](pipeline, action, given)

    watched = {name: partialmethod(work, name=name) for name in plain}
    with patch.object(Mailbox, "start", start), patch.multiple(Pipeline, **watched):
        result = []
        for name, m in cases:
            events.clear()
            schedule = build(name, 4, m, v_of(name))
            run_sleepy(schedule, dist.group.WORLD, lambda _: (never,) * 3)
            result.append(list(events))
    return result


@pytest.mark.prove
def test_both_ends_of_a_pair_start_their_messages_in_the_same_order_and_none_is_forgotten():
    cases = [(name, 8) for name in SCHEDULES]
    by_rank = run_ranks(4, started, cases)
    for case, (name, m) in enumerate(cases):
        lists = [[e for e in events[case] if isinstance(e, Message)] for events in by_rank]
        for a in range(4):
            for b in range(a):
                between = [[e for e in lists[rank] if {e.source, e.destination} == {a, b}] for rank in (a, b)]
                assert between[0] == between[1], f"{name}: ranks {a} and {b}"
        borders = (7 if v_of(name) == 2 else 3) - (name in FOLDED)  # the turning point of a V lies on one rank
        assert sum(len(messages) for messages in lists) == 2 * 2 * m * borders, f"{name}: each message, at both ends"


def test_the_next_receive_is_posted_before_the_work_that_comes_before_its_use():
    events = run_ranks(4, started, [("afab", 4)])[0][0]
    for m in range(1, 4):
        before = events.index(Action("BW", 0, m - 1))
        assert events.index(Message("B", 1, m, 1, 0)) < before, f"gradient {m} could not arrive during the work before"


def in_batches(cases):
    """One line for all messages, crossings as one: gradients beside the reference, and what was started, in order."""
    started, plain = [], Mailbox.start_together

    def start(mail, messages):
        started.append(messages)
        plain(mail, messages)

    with patch.object(Mailbox, "start_together", start):
        found = []
        for name, m in cases:
            started.clear()
            pipeline = train_beside_the_reference(build(name, 4, m, v_of(name)), dist.group.WORLD, batched=True)
            found.append((list(started), [item for item in pipeline.program if isinstance(item, Message)]))
    return found


@pytest.mark.prove
def test_in_one_line_with_crossings_as_one_batch_both_ends_start_the_same_batches_in_the_order_of_the_program():
    cases = [(name, 8) for name in ("1f1b", "interleaved", "zb-h1", "v-half", "dualpipe", "dualpipe-v")]
    by_rank = run_ranks(4, in_batches, cases)
    for case, (name, m) in enumerate(cases):
        crossing = crossings(build(name, 4, m, v_of(name)))
        for a in range(4):
            batches, program = by_rank[a][case]
            want = [crossing.get(x, (x,)) for x in program if x == crossing.get(x, (x,))[-1]]
            assert batches == want, f"{name}: rank {a} starts each message once, where the last of its crossing stands"
            for b in range(a):
                both = [[x for x in by_rank[r][case][0] if {x[0].source, x[0].destination} == {a, b}] for r in (a, b)]
                assert both[0] == both[1], f"{name}: ranks {a} and {b}"
        assert max(len(batch) for batch in by_rank[1][case][0]) >= 2, f"{name}: something crosses"


def default_and_asked_for():
    schedule, x = build("1f1b", 1, 2), torch.ones(2, 4)
    stages = {(0, 0): nn.Identity()}
    made = [Pipeline(schedule, stages, dist.group.WORLD, loss=torch.sum, example=x, batched=b) for b in (None, True)]
    return tuple(pipeline.crossings for pipeline in made)


def test_on_gloo_nothing_is_batched_unless_it_is_asked_for():
    assert run_ranks(1, default_and_asked_for) == [(None, {})]


def kept_messages(batched):
    """The most sends kept, the most receives that one call starts early from a peer, and whether one was under way."""
    sends, early, jumps = [0], [0], [0]
    plain = {name: getattr(Mailbox, name) for name in ("start_early", "put")}

    def start_early(mail):
        before = {result: lane for result, (_, _, lane) in mail.coming.items()}
        plain["start_early"](mail)
        new = [lane for result, (_, _, lane) in mail.coming.items() if result not in before]
        early.append(max(map(new.count, new), default=0))
        jumps.append(len(set(new) & set(before.values())))

    def put(mail, result, tensor):
        sends.append(max(map(len, mail.going.values()), default=0))
        plain["put"](mail, result, tensor)

    with patch.multiple(Mailbox, start_early=start_early, put=put):
        for name in ("afab", "1f1b"):
            run_sleepy(build(name, 2, 24), dist.group.WORLD, lambda _: (never,) * 3, batched=batched)
    return max(sends), max(early), max(jumps)


@pytest.mark.parametrize("batched", [False, True])
def test_a_rank_keeps_few_sends_and_starts_one_receive_early_from_each_peer(batched):
    for sends, early, jumps in run_ranks(2, kept_messages, batched):
        assert 2 <= sends <= 2 * 2, "of 24 micro-batches"
        assert (early <= 1 if batched else early == 1) and jumps == 0


def overlap(name):
    """After how many actions each stage was done, and how many there are."""
    schedule, rank, done = build(name, 2, 4, v_of(name)), dist.get_rank(), []
    stages = {(d, s): Sleepy(never, never, never) for d, s in schedule.stages_of(rank)}
    x = torch.ones(4, 2, dtype=DOUBLE)

    def on_done(module):
        done.append((len(pipeline.timeline), module, module.weight.grad.clone()))

    pipeline = Pipeline(
        schedule, stages, dist.group.WORLD, loss=lambda y, _: y.sum(), example=x[0], on_stage_done=on_done
    )
    pipeline.step(x, [None] * 4)
    assert {module for _, module, _ in done} == {*stages.values()} and len(done) == 2, "each once"
    assert all(torch.equal(module.weight.grad, then) for _, module, then in done)
    return [at for at, _, _ in done], len(schedule.actions[rank])


def test_a_stage_is_reported_done_once_when_its_gradient_is_final_and_others_still_work():
    run_ranks(2, overlap, "dualpipe")  # of two directions
    for (first, last), actions in run_ranks(2, overlap, "breadth-first"):
        assert last == actions - 1, "called inside the last action"
        assert first == actions - 1 - 4, "the four backwards of the other stage are still to come"


# ---------------------------------------------------------------------------------------------- what stages may return


class Returns(nn.Module):
    """A stage whose output is a view, not contiguous, its input itself, or independent of its input."""

    def __init__(self, how):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.full((4,), 0.5, dtype=DOUBLE))

    def forward(self, x):
        return {
            "a view of a larger tensor": lambda: torch.cat((x * self.weight, x))[: len(x)],
            "not contiguous": lambda: (x.sum(0) * self.weight).expand(len(x), -1),  # nor is the gradient of x
            "the input": lambda: x,
            "a view of the input": lambda: x.reshape(-1).view(x.shape),
            "weights alone": lambda: self.weight.expand_as(x) * 2,
        }[self.how]()


HOW = ["a view of a larger tensor", "not contiguous", "the input", "a view of the input", "weights alone"]


def odd_outputs(how):
    for first, second in [(a, how[(i + k) % 5]) for i, a in enumerate(how) for k in (0, 2)]:
        for name in ("1f1b", "zb-h1"):
            rank, kinds = dist.get_rank(), [first, second, "a view of a larger tensor"]
            whole = nn.Sequential(*map(Returns, kinds))
            x = torch.arange(24.0, dtype=DOUBLE).view(3, 2, 4)
            mine = Returns(kinds[rank])
            one_step(build(name, 3, 3), {(0, rank): mine}, list(x), example=x[0].T.contiguous().T)
            sum((whole(part) ** 2).sum() for part in x).backward()
            got, want = mine.weight.grad, whole[rank].weight.grad
            if want is None and got is not None:  # a stage above ignores its input, so the gradient sent down is zero
                want = torch.zeros_like(got)
            assert_same(got, want, what=f"{name}: {kinds}, weight", rank=rank)


def test_stage_outputs_may_be_views_or_not_contiguous_or_the_input_itself():
    run_ranks(3, odd_outputs, HOW)


def validate():
    results = []
    for name in ("1f1b", "zb-v", "dualpipe"):
        schedule, group = build(name, 2, 4, v_of(name)), dist.group.WORLD
        sizes = Sizes(hidden=HIDDEN, layers=schedule.stages)
        stages = {(d, s): make_stage(sizes, s, schedule.stages, True) for d, s in schedule.stages_of(group.rank())}
        tokens, labels = (both[0] for both in global_batch(0, 4, 1)[:2])
        example = torch.empty(1, LENGTH, HIDDEN, dtype=DOUBLE)
        batched = name == "zb-v"  # there forwards cross, too
        pipeline = Pipeline(schedule, stages, group, loss=token_loss_sum, example=example, batched=batched)
        extras = [{"positions": POSITIONS}] * 4
        without = pipeline.forward_only(tokens, labels, extras, broadcast=True)
        assert pipeline.peak == 0
        assert all(p.grad is None for module in stages.values() for p in module.parameters())
        mine = pipeline.step(tokens, labels, extras)
        results.append((without.item(), pipeline.step(tokens, labels, extras, broadcast=True).item(), mine.item()))
        assert pipeline.peak > 0
        pipeline.forward_only(tokens, labels, extras)
        assert pipeline.peak == 0, "of the latest step"
    return results


def test_forward_only_gives_the_same_loss_and_keeps_nothing():
    first, second = run_ranks(2, validate)
    for i in range(3):
        without, with_backward, mine = first[i]
        assert without == with_backward == second[i][0]
        assert_same(mine + second[i][2], without, what="sum of what the ranks return")
    assert first[0][2] == 0 and second[1][2] == 0, "0 where there is no last stage"


class Scaled(nn.Module):
    def forward(self, x, factor):
        return x * factor


def losses_of_three():
    """Of three micro-batches in bf16 the losses are 256, 1 and 1: bf16 has no 257."""
    x = torch.tensor([[1.0, 0.0]] * 3).bfloat16()
    stages = {(0, dist.get_rank()): Scaled()}
    schedule = build("1f1b", 2, 3)
    pipeline = Pipeline(schedule, stages, dist.group.WORLD, loss=lambda y, _: y.sum(), example=x[0])
    return pipeline.forward_only(x, [None] * 3, [{"factor": f} for f in (16, 1, 1)], broadcast=True).item()


def test_each_micro_batch_has_its_own_extras_and_the_losses_are_added_up_wider_than_bf16():
    assert run_ranks(2, losses_of_three) == [258.0] * 2


# ---------------------------------------------------------------------------------------------------------- bad input


def wrong_shape():
    rank = dist.get_rank()
    one_step(build("1f1b", 2, 2), {(0, rank): nn.Linear(4, 3 if rank == 0 else 4)}, torch.ones(2, 2, 4))


def test_a_stage_of_the_wrong_shape_ends_all_ranks_in_one_line_that_names_the_rule():
    with pytest.raises(RankFailure, match=r"stage 0 returned \[2, 3\] torch.float32 where stages hand on \[2, 4\]"):
        run_ranks(2, wrong_shape)


def refusals():
    group, two = dist.group.WORLD, build("1f1b", 2, 2)
    one = build("1f1b", 1, 2)
    row = one.actions[0]
    broken = replace(one, actions=((row[1], row[0], *row[2:]),))
    for schedule, stages, words in (
        (two, {(0, 0): nn.Identity()}, "1f1b for 2 ranks cannot run on a group of 1"),
        (one, {}, r"rank 0 has stages \[\(0, 0\)\], not \[\]"),
        (broken, {(0, 0): nn.Identity()}, "which it needs"),
    ):
        with pytest.raises(ValueError, match=words):
            Pipeline(schedule, stages, group, loss=torch.sum, example=torch.ones(2))
    pipeline = Pipeline(one, {(0, 0): nn.Linear(2, 2)}, group, loss=lambda y, _: y.sum(), example=torch.ones(2))
    two, three = torch.ones(2, 2), torch.ones(3, 2)
    for given, words in (
        ((three, two), "3 inputs for the 2 micro-batches of 1f1b; give 2"),
        ((two, three), "3 targets for"),
        ((two, two, [{}]), "1 extras for"),
        ((two, two, []), "0 extras for"),
    ):
        for run in (pipeline.step, pipeline.forward_only):
            with pytest.raises(ValueError, match=words):
                run(*given)
    with torch.no_grad(), pytest.raises(ValueError, match="step under no_grad .* forward_only"):
        pipeline.step(two, two)
    stages = {(0, s): Returns("weights alone") for s in range(2)}  # in float64
    with pytest.raises(ValueError, match=r"stage 0 returned \[3, 4\] torch.float64 where .* \[3, 4\] torch.float32"):
        one_step(build("interleaved", 1, 2, 2), stages, torch.ones(2, 3, 4))


def test_a_schedule_batch_or_output_that_does_not_fit_is_refused_by_name():
    run_ranks(1, refusals)


def different_examples(examples):
    schedule, rank = build("1f1b", 2, 2), dist.get_rank()
    mine, theirs = (f"{examples[r].dtype} {list(examples[r].shape)}" for r in (rank, 1 - rank))
    said = re.escape(f"example: rank {rank} has {mine}, rank {1 - rank} {theirs}; stages must hand on")
    with pytest.raises(ValueError, match=said + " tensors of one shape and dtype"):
        Pipeline(schedule, {(0, rank): nn.Identity()}, dist.group.WORLD, loss=torch.sum, example=examples[rank])


@pytest.mark.parametrize("other", [torch.ones(2, 5), torch.ones(2, 4).half(), torch.ones(2, 4, 1)])
def test_ranks_that_expect_different_tensors_find_out_at_once(other):
    """Also two dtypes of equally many bytes."""
    run_ranks(2, different_examples, [torch.ones(2, 4).bfloat16(), other])


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (4, "--layers 3", "--layers 3 is fewer than the 4 stages; use 4 or more"),
        (2, "--schedule zb-v --layers 3", "--layers 3 is fewer than the 4 stages"),
        (3, "--schedule dualpipe", "--schedule dualpipe: dualpipe: 3 ranks"),
        (4, "--schedule dualpipe --micro-batches 6", "dualpipe: 6 micro-batches for 4 ranks; use"),
        (2, "--schedule zigzag", "--schedule zigzag"),
        (2, "--stages-per-rank 0", "--stages-per-rank 0: use 1 to 64"),
        (2, "--micro-batches 0", "--micro-batches 0: use 1 to"),
        (2, "--layers 9999999", "--layers 9999999: use 1 to"),
    ],
)
def test_bad_options_end_in_one_line_before_any_group_is_made(ranks, options, words):
    assert words in refusal(parse_arguments, options, ranks)


def test_layers_are_contiguous_all_there_and_never_differ_by_more_than_one():
    for stages in range(1, 9):
        for layers in range(stages, 20):
            cut = [layers_of(s, stages, layers) for s in range(stages)]
            assert [layer for part in cut for layer in part] == list(range(layers))
            sizes = [len(part) for part in cut]
            assert max(sizes) - min(sizes) <= 1
            if layers % stages and stages > 2 and layers % stages <= stages - 2:
                assert sizes[0] == sizes[-1] == min(sizes), "the ends have the embedding and the head besides"
    with pytest.raises(ValueError, match="3 layers are fewer than 4 stages"):
        layers_of(0, 4, 3)
    assert make_batch(2, 4096)[0].shape == (4096, 2, 16), "the most micro-batches have tokens"


def demo_with_a_nan():
    def spoiled(schedule, stages, group):
        sum_mirrored(schedule, stages, group)
        if group.rank() == 1:
            next(stages[0, 1].parameters()).grad[0] = torch.nan

    words = "x --schedule interleaved --stages-per-rank 1 --micro-batches 2 --layers 2 --untied"  # which is 1f1b
    with patch("sys.argv", words.split()), patch.dict("os.environ", WORLD_SIZE="2"):
        args, schedule = parse_arguments()
    with patch.object(pipeline_executor, "sum_mirrored", spoiled), redirect_stdout(io.StringIO()) as out:
        wrong = pipeline_executor.demo(args, schedule, dist.group.WORLD, torch.device("cpu"))
    return wrong, " ".join(out.getvalue().split())


def test_a_nan_in_one_gradient_of_one_rank_is_no_pass():
    (found, said), beside = run_ranks(2, demo_with_a_nan)
    assert (found, "") == beside == (["largest error against the reference"], ""), "rank 0 alone prints"
    assert re.search(r"1e-10 nan .* \[2, 1\] \[2, 1\] bytes .* \[16384, 16384\] \[16384, 16384\]$", said), said
