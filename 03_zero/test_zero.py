"""The ground floor of ZeRO beside a model written a second time, beside in_depth, beside the harness's counters."""

import contextlib
import io
import math
import random
import sys
import time
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zero
from harness.meter import communication, held_bytes, peak_memory
from harness.oracle import Trace, assert_same, assert_same_trace
from harness.ranks import run_ranks
from torch import Tensor, nn
from zero import NO_LABEL, Zero1, Zero2, Zero3, bytes_kept, formulas, forward_backward, main, make_batch, make_layers

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}

# --------------------------------------------------------------------------- the unsharded model, written a second time


def llama(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """[B, T] -> [B, T, V], from a dict of weights: no module, no fused attention, RoPE as complex numbers."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt() * weight

    def turned(x: Tensor) -> Tensor:  # [B, heads, T, D]
        half = zero.D // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequency)
        z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1).to(x.dtype)

    x = w["0.weight"][tokens]
    for i in ("1", "2"):
        y = norm(x, w[f"{i}.norm1.weight"])
        q, k, v = ((y @ w[f"{i}.{name}.weight"].T).unflatten(-1, (-1, zero.D)).transpose(1, 2) for name in "qkv")
        group = zero.HEADS // zero.KV
        q, k, v = turned(q), turned(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        mixed = ((q @ k.mT) / math.sqrt(zero.D)).masked_fill(later, -math.inf).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ w[f"{i}.out.weight"].T
        y = norm(x, w[f"{i}.norm2.weight"])
        gate = y @ w[f"{i}.gate.weight"].T
        x = x + (gate * gate.sigmoid() * (y @ w[f"{i}.up.weight"].T)) @ w[f"{i}.down.weight"].T
    return norm(x, w["3.0.weight"]) @ w["3.1.weight"].T


def first_weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    model = nn.Sequential(*make_layers())
    return {name: p.detach().to(dtype).clone().requires_grad_() for name, p in model.named_parameters()}


def unsharded_loss(w: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    logits = llama(w, tokens.reshape(-1, tokens.shape[-1])).flatten(0, 1)
    wanted = labels.flatten() != NO_LABEL
    return -logits[wanted].log_softmax(-1).gather(1, labels.flatten()[wanted][:, None]).sum() / wanted.sum()


def batch_of(step: int, ranks: int, micro_batches: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """As the script's, from step `first` on; in step 1 the last rank has no label at all."""
    tokens, labels = make_batch(first + step, ranks, micro_batches)
    if step == 1 and ranks > 1:
        labels[-1] = NO_LABEL
    return tokens, labels


def oracle(ranks: int, micro_batches: int = 2, optimizer=torch.optim.SGD, first: int = 0, **options) -> Trace:
    w, trace = first_weights(), Trace()
    optimizer = optimizer(w.values(), **({"lr": 0.1} | options))
    for step in range(3):
        loss = unsharded_loss(w, *batch_of(step, ranks, micro_batches, first))
        optimizer.zero_grad()
        loss.backward()
        trace.losses.append(loss.item())
        trace.gradients.append({name: x.grad.clone() for name, x in w.items()})
        optimizer.step()
    trace.weights = {name: x.detach() for name, x in w.items()}
    return trace


def by_name(sharded: Zero1, shards: list[Tensor]) -> dict[str, Tensor]:
    """Shards of all ranks, put together by plain collectives of the test."""
    names, tensors = list(dict(nn.Sequential(*make_layers()).named_parameters())), []
    for unit, shard in zip(sharded.units, shards, strict=True):
        parts = [torch.empty_like(shard) for _ in range(sharded.n)]
        dist.all_gather(parts, shard.detach().clone(), group=sharded.group)
        line = torch.cat(parts)
        for shape in unit.shapes.values():
            tensors.append(line[: shape.numel()].view(shape).clone())
            line = line[shape.numel() :]
        assert not line.any(), "the zeros at the end of a line are zeros no more"
    return dict(zip(names, tensors, strict=True))


def trained(
    stage: int,
    group=None,
    micro_batches: int = 2,
    optimizer=torch.optim.SGD,
    ahead: int = 1,
    first: int = 0,
    **options,
) -> Trace:
    group = group or dist.group.WORLD
    rank, trace = dist.get_rank(group), Trace()
    sharded = STAGES[stage](make_layers(), group, ahead=ahead)
    shards = [unit.shard for unit in sharded.units]
    optimizer = optimizer(shards, **({"lr": 0.1} | options))
    for step in range(3):
        tokens, labels = batch_of(step, sharded.n, micro_batches, first)
        loss = torch.as_tensor(forward_backward(sharded, tokens[rank], labels[rank]))
        dist.all_reduce(loss, group=group)
        trace.losses.append(loss.item())
        trace.gradients.append(by_name(sharded, [shard.grad for shard in shards]))
        optimizer.step()
        sharded.publish()
        optimizer.zero_grad()
        assert not sharded.sums and not sharded.asked, "something is still on its way after the step"
    if stage < 3:  # what the layers compute with is what the owners of the shards have
        for unit in sharded.units:
            mine = unit.line.detach().chunk(sharded.n)[rank]
            assert_same(mine, unit.shard, 0.0, "my part of the whole weights", rank)
        trace.weights = by_name(sharded, [unit.line.detach().chunk(sharded.n)[rank] for unit in sharded.units])
    trace.weights = by_name(sharded, shards)
    return trace


@pytest.mark.always("1-2", "2-4", "3-4")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_gradients_and_weights_of_three_steps_are_those_of_the_unsharded_model(stage, ranks):
    want = oracle(ranks)
    for rank, got in enumerate(run_ranks(ranks, trained, stage)):
        assert_same_trace(got, want, rank=rank)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_three_micro_batches_count_as_one_batch_on_three_ranks_that_no_layer_divides(stage):
    want = oracle(3, 3)
    for rank, got in enumerate(run_ranks(3, trained, stage, micro_batches=3)):
        assert_same_trace(got, want, rank=rank)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adamw_with_weight_decay_is_that_of_the_unsharded_model(stage):
    options = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
    want = oracle(2, optimizer=torch.optim.AdamW, **options)
    for rank, got in enumerate(run_ranks(2, trained, stage, optimizer=torch.optim.AdamW, **options)):
        assert_same_trace(got, want, rank=rank)


def in_slices(stage: int) -> Trace:
    groups = [dist.new_group([2, 0]), dist.new_group([3, 1])]  # not contiguous, and not in the world's order
    return trained(stage, groups[dist.get_rank() % 2], first=50 * (dist.get_rank() % 2))  # other text, too


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_slices_of_the_world_train_two_models_at_the_same_time(stage):
    want = [oracle(2, first=first) for first in (0, 50)]
    for rank, got in enumerate(run_ranks(4, in_slices, stage)):
        assert_same_trace(got, want[rank % 2], rank=rank)


# -------------------------------------------------------------------------------------------------------- order in time


def slowly(collective, seed: int):
    """The same collective after a pause, of another length on each rank and for each call."""
    chance = random.Random(seed)

    def late(*args, **kwargs):
        time.sleep(chance.choice([0, 0.002, 0.01]))
        return collective(*args, **kwargs)

    return late


def with_delays(stage: int, ahead: int) -> Trace:
    late = slowly(zero.all_gather, dist.get_rank()), slowly(zero.reduce_scatter, 10 + dist.get_rank())
    with patch.multiple(zero, all_gather=late[0], reduce_scatter=late[1]):
        return trained(stage, ahead=ahead)


@pytest.mark.always("1-1", "3-0")
@pytest.mark.parametrize(("stage", "ahead"), [(1, 1), (2, 1), (2, 0), (3, 1), (3, 0)])
def test_ranks_that_come_late_change_nothing(stage, ahead):
    want = oracle(2)
    for rank, got in enumerate(run_ranks(2, with_delays, stage, ahead)):
        assert_same_trace(got, want, rank=rank)


class Lazily:
    """A collective whose result is NaN until somebody waits for it."""

    def __init__(self, collective):
        self.collective = collective

    def __call__(self, out: Tensor, given: Tensor, group: dist.ProcessGroup, async_op: bool = False):
        self.out, self.arrived = out, torch.empty_like(out)
        self.collective(self.arrived, given, group=group)
        out.fill_(math.nan)
        work = Lazily(self.collective)
        work.out, work.arrived = out, self.arrived
        return work

    def wait(self) -> None:
        self.out.copy_(self.arrived)


def lazily(stage: int, ahead: int) -> Trace:
    with patch.multiple(zero, all_gather=Lazily(zero.all_gather), reduce_scatter=Lazily(zero.reduce_scatter)):
        return trained(stage, ahead=ahead)


@pytest.mark.parametrize(("stage", "ahead"), [(1, 1), (2, 1), (2, 0), (3, 1), (3, 0)])
def test_nothing_is_used_before_somebody_has_waited_for_it(stage, ahead):
    want = oracle(2)
    for rank, got in enumerate(run_ranks(2, lazily, stage, ahead)):
        assert_same_trace(got, want, rank=rank)


def events_of(stage: int, ahead: int) -> list[tuple[str, int]]:
    sharded = STAGES[stage](make_layers(), dist.group.WORLD, ahead=ahead)
    tokens, labels = make_batch(0, sharded.n, 1)
    forward_backward(sharded, tokens[dist.get_rank()], labels[dist.get_rank()])
    return sharded.events


def test_the_next_layer_is_asked_for_before_this_one_computes_in_forward_and_in_backward():
    for events in run_ranks(2, events_of, 3, 1):
        assert [event for event in events if event[0] == "ask"] == [("ask", i) for i in (0, 1, 2, 3, 3, 2, 1, 0)]
        backward = events.index(("backward", 3)) - 2  # ask 3, ask 2, backward 3
        for i in (0, 1, 2):
            assert events.index(("ask", i + 1)) < events.index(("forward", i)), f"layer {i + 1} is asked for too late"
        for i in (3, 2, 1):
            assert events.index(("ask", i - 1), backward) < events.index(("backward", i)), f"layer {i - 1} in backward"
        # ... and not earlier than one layer ahead, or more than two would be whole.
        for i in (0, 1):
            assert events.index(("ask", i + 2)) > events.index(("forward", i))
        for i in (3, 2):
            assert events.index(("ask", i - 2), backward) > events.index(("backward", i))


def test_without_prefetch_a_layer_is_asked_for_when_it_is_needed():
    for events in run_ranks(2, events_of, 3, 0):
        asked = [events[at + 1] for at, event in enumerate(events) if event[0] == "ask"]
        assert asked == [("forward", i) for i in range(4)] + [("backward", i) for i in (3, 2, 1, 0)]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_leaves_while_backward_goes_on_and_at_most_one_is_on_its_way(stage):
    for events in run_ranks(2, events_of, stage, 1):
        moves = [event for event in events if event[0] in ("send", "sum")]
        assert moves == [
            *[("send", 3), ("send", 2), ("sum", 3), ("send", 1), ("sum", 2), ("send", 0), ("sum", 1), ("sum", 0)]
        ]
        if stage == 3:
            assert events.index(("send", 3)) < events.index(("backward", 2)) < events.index(("sum", 3))


class Noted:
    """A message, and a list that says when somebody waits for it."""

    def __init__(self, work: dist.Work, what: str, events: list[tuple]):
        self.work, self.what, self.events = work, what, events

    def wait(self) -> None:
        self.events.append(("wait", self.what))
        self.work.wait()


def waits_of(stage: int) -> list[tuple]:
    sharded = STAGES[stage](make_layers(), dist.group.WORLD)

    def noted(collective, what: str):
        return lambda *args, **options: Noted(collective(*args, **options), what, sharded.events)

    messages = {"all_gather": noted(zero.all_gather, "weights"), "reduce_scatter": noted(zero.reduce_scatter, "sum")}
    tokens, labels = make_batch(0, sharded.n, 1)
    with patch.multiple(zero, **messages):
        forward_backward(sharded, tokens[dist.get_rank()], labels[dist.get_rank()])
    return sharded.events


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_message_is_under_way_until_what_it_brings_is_needed(stage):
    for rank, events in enumerate(run_ranks(2, waits_of, stage)):

        def waited(event: tuple[str, int], what: str, events=events) -> int:
            return events[: events.index(event)].count(("wait", what))

        for i in (3, 2, 1, 0):  # when layer i's gradient leaves, that of layer i + 1 is still on its way
            early = waited(("send", i), "sum") - max(0, 2 - i)
            assert early == 0, f"rank {rank}: {early} sums are waited for too early when layer {i} sends"
            if stage == 3:  # only the weights of the layer that computes are here, those of the next one are not
                early = waited(("forward", i), "weights") - (i + 1)
                assert early == 0, f"rank {rank}: {early} layers are waited for too early in forward {i}"
                early = waited(("backward", i), "weights") - (8 - i)
                assert early == 0, f"rank {rank}: {early} layers are waited for too early in backward {i}"


# ---------------------------------------------------------------------------------------------------------------- bytes


def counted(stage: int, micro_batches: int, ahead: int, adam: bool) -> tuple[list[int], list[int], list[int], int]:
    """[bytes kept, whole at most, sent] by the harness, by the script, by formula; and the peak of everything."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    peaks, wholes = [], []
    with peak_memory() as memory:
        sharded = STAGES[stage](make_layers(), dist.group.WORLD, ahead=ahead)
        gc_collect()
        shards = [unit.shard for unit in sharded.units]
        optimizer = torch.optim.AdamW(shards) if adam else torch.optim.SGD(shards)
        for step in range(3):
            tokens, labels = (x[rank].clone() for x in make_batch(step, ranks, micro_batches))
            sharded.sent = sharded.most = memory.peak = 0
            with communication() as wire:
                forward_backward(sharded, tokens, labels)
                batch = tokens.nbytes + labels.nbytes
                kept = min(settled(memory) for _ in range(5)) - batch  # gloo lets go of a buffer late
                optimizer.step()
                sharded.publish()
            peaks.append(memory.peak)
            wholes.append(sharded.most)
            optimizer.zero_grad()
            del tokens, labels
    sent = wire.sent["reduce_scatter"] + wire.sent["all_gather"]
    want = formulas(sharded, stage, micro_batches, 3 if adam else 1)
    held = held_bytes(shards, optimizer)
    assert held.parameters + held.optimizer == (3 if adam else 1) * sum(shard.nbytes for shard in shards)
    counters = 16 * len(shards) + 64  # Adam's step counters, the loss
    assert 0 <= kept - want[0] <= counters, f"stage {stage} on rank {rank} keeps {kept:,} bytes, not {want[0]:,}"
    return [want[0], min(wholes), sent], [want[0], sharded.most, sharded.sent], want, min(peaks)


def settled(memory: peak_memory) -> int:
    gc_collect()
    time.sleep(0.005)
    return memory.current


def gc_collect() -> None:
    import gc

    gc.collect()


@pytest.mark.always("1-4", "2-2", "3-4")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_kept_whole_and_sent_are_those_of_the_formulas(stage, ranks):
    for rank, (harness, script, want, _) in enumerate(run_ranks(ranks, counted, stage, 2, 1, True)):
        for name, a, b, c in zip(("kept", "whole at most", "sent"), harness, script, want, strict=True):
            assert a == b == c, f"stage {stage}, rank {rank}, bytes {name}: {a:,} counted, {b:,} said, {c:,} by formula"


@pytest.mark.always("2-3-4", "3-1-3")
@pytest.mark.parametrize(("stage", "micro_batches", "times"), [(1, 3, 2), (2, 3, 4), (3, 3, 9), (2, 1, 2), (3, 1, 3)])
def test_a_further_micro_batch_costs_stage_1_nothing_stage_2_one_more_and_stage_3_three(stage, micro_batches, times):
    [(harness, *_), _] = run_ranks(2, counted, stage, micro_batches, 0, False)
    p = sum(2 * -(-sum(x.numel() for x in layer.parameters()) // 2) for layer in make_layers())
    assert harness[2] == times * 8 * p // 2


def test_the_peak_of_everything_falls_from_stage_to_stage():
    peaks = [[rank[3] for rank in run_ranks(4, counted, stage, 2, 1, True)] for stage in (1, 2, 3)]
    for one, two, three in zip(*peaks, strict=True):
        # Stage 1 has all gradients at once, stage 2 two layers' of four; stage 3 also two layers' weights of four.
        assert two < 0.95 * one and three < 0.8 * two, peaks


def alive_after_steps(stage: int) -> list[int]:
    before, sharded, counts = bytes_kept(), STAGES[stage](make_layers(), dist.group.WORLD), []
    optimizer = torch.optim.SGD([unit.shard for unit in sharded.units], lr=0.1)
    rank = dist.get_rank()
    for step in range(5):
        tokens, labels = make_batch(step, sharded.n, 2)
        forward_backward(sharded, tokens[rank], labels[rank])
        optimizer.step()
        sharded.publish()
        optimizer.zero_grad()
        with torch.no_grad():  # a validation between two steps, whose backward never comes
            sharded.forward(tokens[rank, 0])
        counts.append(min(bytes_kept() for _ in range(2)) - before)
    p = sum(unit.shard.nbytes for unit in sharded.units)
    return [count - p - (p * sharded.n if stage < 3 else 0) for count in counts]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_step_and_no_validation_leaves_anything_behind(stage):
    for counts in run_ranks(2, alive_after_steps, stage):
        assert counts == [0] * 5, f"bytes beyond the shards and, at stages 1 and 2, the weights: {counts}"


# --------------------------------------------------------------------------------------------------------- modes, casts


def forgotten(stage: int) -> bool:
    sharded = STAGES[stage](make_layers(), dist.group.WORLD)
    tokens, labels = make_batch(0, sharded.n, 1)
    forward_backward(sharded, tokens[dist.get_rank()], labels[dist.get_rank()])
    reference = weakref.ref(sharded)
    del sharded
    gc_collect()
    return reference() is None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_who_is_no_longer_used_is_freed_and_does_not_keep_its_group(stage):
    assert run_ranks(1, forgotten, stage) == [True]


def logits_and_gradients(stage: int) -> tuple[Tensor, Tensor, bool]:
    """A forward without gradient, one with, two forwards before their two backwards."""
    sharded = STAGES[stage](make_layers(), dist.group.WORLD)
    tokens, labels = make_batch(0, sharded.n, 2)
    mine = tokens[dist.get_rank()], labels[dist.get_rank()]
    with torch.no_grad():
        quiet = sharded.forward(mine[0][0])
    parts = [zero.loss_sum(sharded.forward(x), y) for x, y in zip(*mine, strict=True)]
    for last, part in enumerate(parts):
        part.backward()
        sharded.finish(last=bool(last))
    return quiet, torch.cat([unit.shard.grad for unit in sharded.units]), quiet.requires_grad


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_without_gradient_and_two_forwards_before_their_backwards_are_those_of_the_unsharded_model(stage):
    w = first_weights()
    tokens, labels = make_batch(0, 2, 2)
    (unsharded_loss(w, tokens, labels) * (labels != NO_LABEL).sum()).backward()
    lines = [[], [], [], []]
    for name, x in w.items():
        lines[int(name[0])].append(x.grad.flatten())
    for rank, (quiet, gradients, required) in enumerate(run_ranks(2, logits_and_gradients, stage)):
        assert not required
        assert_same(quiet, llama(w, tokens[rank, 0]).detach(), what="logits without gradient", rank=rank)
        mine = [F.pad(line := torch.cat(parts), (0, len(line) % 2)).chunk(2)[rank] for parts in lines]
        assert_same(gradients, torch.cat(mine), what="gradients of two forwards", rank=rank)


def refused_when_frozen(stage: int) -> str:
    layers = make_layers()
    layers[1].q.weight.requires_grad_(False)
    with pytest.raises(ValueError) as refusal:
        STAGES[stage](layers, dist.group.WORLD)
    return str(refusal.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_frozen_parameter_is_refused_by_name_and_not_trained(stage):
    (message,) = run_ranks(1, refused_when_frozen, stage)
    assert message.startswith("q.weight is frozen") and "\n" not in message


def without_labels(stage: int) -> tuple[Tensor, list[Tensor]]:
    sharded = STAGES[stage](make_layers(), dist.group.WORLD)
    tokens, labels = make_batch(0, sharded.n, 2)
    loss = forward_backward(sharded, tokens[dist.get_rank()], torch.full_like(labels[dist.get_rank()], NO_LABEL))
    return loss, [unit.shard.grad for unit in sharded.units]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_batch_without_any_label_on_any_rank_has_loss_zero_and_gradients_zero(stage):
    for rank, (loss, gradients) in enumerate(run_ranks(2, without_labels, stage)):
        assert loss == 0, f"rank {rank}: {loss}"
        for i, gradient in enumerate(gradients):
            assert_same(gradient, torch.zeros_like(gradient), 0.0, f"gradient of layer {i}'s shard", rank)


def test_rope_computes_its_angles_in_float32_at_least():
    x = torch.randn(1, 500, 2, zero.D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for dtype, rounding in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 1e-4)):
        given = x.to(dtype)
        error = (zero.rope(given).double() - zero.rope(given.double())).abs().max().item()
        assert error <= 1.5 * rounding * given.abs().max().item(), f"{dtype}: {error:.2e}"


MANY = 16  # micro-batches, so that where they are summed makes a difference


def gradient_in_bf16(stage: int) -> list[Tensor]:
    layers = [layer.float() for layer in make_layers()]
    sharded = STAGES[stage](layers, dist.group.WORLD, compute=torch.bfloat16)
    tokens, labels = make_batch(0, sharded.n, MANY)
    forward_backward(sharded, tokens[dist.get_rank()], labels[dist.get_rank()])
    for unit in sharded.units:
        assert unit.shard.dtype == unit.shard.grad.dtype == torch.float32, "the master copy and its gradient are wide"
    return list(by_name(sharded, [unit.shard.grad for unit in sharded.units]).values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_bf16_the_gradient_is_as_near_to_float64_as_that_of_one_process(stage):
    tokens, labels = make_batch(0, 2, MANY)
    w = first_weights()
    unsharded_loss(w, tokens, labels).backward()
    want = torch.cat([x.grad.flatten() for x in w.values()])
    dense, total = nn.Sequential(*make_layers()).to(torch.bfloat16), torch.zeros_like(want)
    for x, y in zip(tokens.flatten(0, 1), labels.flatten(0, 1), strict=True):  # one process, micro-batch by micro-batch
        (zero.loss_sum(dense(x), y) / (labels != NO_LABEL).sum()).backward()
        if stage > 1:  # stage 1 sums micro-batches where autograd does: in the gradient's own dtype
            total += torch.cat([p.grad.flatten() for p in dense.parameters()])
            dense.zero_grad()
    if stage == 1:
        total += torch.cat([p.grad.flatten() for p in dense.parameters()])
    own = ((total - want).norm() / want.norm()).item()
    for rank, gradients in enumerate(run_ranks(2, gradient_in_bf16, stage)):
        error = ((torch.cat([g.flatten().double() for g in gradients]) - want).norm() / want.norm()).item()
        assert error <= 1.5 * own, f"rank {rank}: {error:.2e} from float64, one process {own:.2e}"


# ----------------------------------------------------------------------------------------------------- in_depth, script


def in_depth_trace(stage: int) -> Trace:
    sys.path.insert(0, str(Path(zero.__file__).parent / "in_depth"))
    from zero3 import make_zero

    rank, ranks, trace = dist.get_rank(), dist.get_world_size(), Trace()
    model = nn.Sequential(*make_layers())
    deep = make_zero(stage, model, torch.optim.SGD(model.parameters(), lr=0.1), dist.group.WORLD, units=list(model))
    for step in range(3):
        tokens, labels = batch_of(step, ranks, 2)
        loss = torch.zeros((), dtype=torch.float64)
        deep.zero_grad()
        for m in range(2):
            with deep.micro_batch(last=m == 1):
                part = zero.loss_sum(model(tokens[rank, m]), labels[rank, m]) / (labels != NO_LABEL).sum()
                part.backward()
                loss += part.detach()
        dist.all_reduce(loss)
        trace.losses.append(loss.item())
        trace.gradients.append(deep.full_gradients())
        deep.step()
    trace.weights = deep.full_weights()
    return trace


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_depth_gives_the_same_losses_gradients_and_weights(stage):
    for rank, (got, want) in enumerate(
        zip(run_ranks(2, trained, stage), run_ranks(2, in_depth_trace, stage), strict=True)
    ):
        assert_same_trace(got, want, rank=rank)


def said_by_main(*options: str) -> tuple[int | str | None, str, str]:
    """Exit code, stdout, stderr of the script's own main, in the ranks that are there already."""
    said, complained = io.StringIO(), io.StringIO()
    up_and_down = dist.init_process_group, dist.destroy_process_group
    sys.argv = ["zero.py", *options]
    dist.init_process_group, dist.destroy_process_group = (lambda *a, **k: None), (lambda: None)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            code = main()
    except SystemExit as end:
        code = end.code
    finally:
        dist.init_process_group, dist.destroy_process_group = up_and_down
    return code, said.getvalue(), complained.getvalue()


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_script_ends_with_pass_on_any_number_of_ranks(ranks):
    ends = run_ranks(ranks, said_by_main, "--optimizer", "adamw")
    assert [code for code, *_ in ends] == [0] * ranks, ends
    assert ends[0][1].splitlines()[-1] == "PASS"
    assert all(said == "" for _, said, _ in ends[1:])


def with_a_nan(option: str) -> tuple[int | str | None, str, str]:
    """One rank's shard of the gradient turns into NaN."""
    plain = Zero1.receive

    def receive(self, left: int) -> None:
        plain(self, left)
        if dist.get_rank() == 1 and self.units[0].shard.grad is not None:
            self.units[0].shard.grad[0] = math.nan

    with patch.object(Zero1, "receive", receive):
        return said_by_main(*option.split())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_nan_on_one_rank_is_no_pass_on_any(stage):
    for code, said, _ in run_ranks(2, with_a_nan, f"--stage {stage}"):
        assert code == 1
        assert "PASS" not in said


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (("--stage", "0"), "--stage", "0"),
        (("--stage", "two"), "--stage", "two"),
        (("--ahead", "2"), "--ahead", "2"),
        (("--ahead", "nan"), "--ahead", "nan"),
        (("--micro-batches", "0"), "--micro-batches", "0"),
        (("--micro-batches", ""), "--micro-batches", "''"),
        (("--optimizer", "adam"), "--optimizer", "adam"),
        (("--micro", "2"), "--micro", "2"),
        (("7",), "7", "7"),
    ],
)
def test_a_bad_option_is_one_line_that_names_it_and_exit_code_2_before_any_group(options, name, value):
    [(code, said, complained)] = run_ranks(1, said_by_main, *options)
    assert (code, said, len(complained.splitlines())) == (2, "", 1), complained
    assert name in complained and value in complained


def test_more_ranks_than_gpus_are_refused_and_do_not_fall_back_to_gloo(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zero.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert said.err == "zero.py: --nproc_per_node 4: there are 2 GPUs here; use 2 or less\n"


def test_ranks_wait_a_minute_for_each_other_and_not_half_an_hour(monkeypatch):
    given = {}
    monkeypatch.setattr(sys, "argv", ["zero.py"])
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: given.update(options) or sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        main()
    assert given["timeout"].total_seconds() == 60


@pytest.mark.prove
def test_every_option_changes_what_is_printed():
    plain = run_ranks(2, said_by_main)[0][1]
    for options in (("--ahead", "0"), ("--micro-batches", "3"), ("--optimizer", "adamw"), ("--stage", "2")):
        code, said, _ = run_ranks(2, said_by_main, *options)[0]
        assert code == 0, said
        without_speed = [[line for line in text.splitlines() if "tokens/s" not in line] for text in (plain, said)]
        assert [x.split("bytes")[-1] for x in without_speed[0]] != [x.split("bytes")[-1] for x in without_speed[1]]
