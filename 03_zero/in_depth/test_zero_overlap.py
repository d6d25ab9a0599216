"""Gathers that end in the next forward: same weights, same bytes, and nobody reads a weight before it is there."""

import gc
import math
import random
import time
import weakref
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _zero_demo import make_batch, train_step
from harness.meter import communication, peak_memory
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same_named, assert_same_traces
from test_zero_stages import (
    assert_clipped_as_by_torch,
    awkward,
    bytes_of_a_step,
    decoder,
    in_two_groups,
    mean_loss,
    mixed_steps,
    padded,
    reference_trace,
    sgd,
    sharded_steps,
    zero_trace,
)
from torch import Tensor, nn
from zero_overlap import Overlapped1, Travelling, main, make_overlapped
from zero_stages import Zero1, Zero2, all_gather
from zero_state import full_state_dict, load_full_state_dict

STAGES = [1, 2]
SMALL = 8_000  # bytes of a bucket: several of them


class Late:
    """A gather that is long under way: what others send is NaN until somebody waits, and it starts at another moment
    on each rank. Nobody may touch its buffer meanwhile: neither the part that is sent, nor with another gather.
    """

    chance = random.Random(0)

    def __init__(self, flat: Tensor, mine: Tensor, *, group: dist.ProcessGroup, async_op: bool):
        before = getattr(flat, "late", None)
        assert before is None or before.arrived is None, "a second gather into a buffer whose first is under way"
        time.sleep(self.chance.choice([0, 0, 0.002]) * dist.get_rank(group))
        rank, self.flat, self.mine, self.given = dist.get_rank(group), flat, mine, mine.clone()
        self.arrived = torch.empty_like(flat)
        all_gather(self.arrived, self.given, group=group)
        parts = flat.view(dist.get_world_size(group), -1)  # [N, S]
        parts[:rank].fill_(math.nan)
        parts[rank + 1 :].fill_(math.nan)
        flat.late = self

    def wait(self) -> None:
        assert torch.equal(self.mine, self.given), "what is being sent has been written"
        self.flat.copy_(self.arrived)
        self.arrived = None


def overlapped(stage: int, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, **options):
    return make_overlapped(stage, model, optimizer, group, **{"bucket_bytes": SMALL, "all_gather": Late, **options})


def traces(build=decoder, micro_batches: int = 2, **options) -> list[Trace]:
    world = dist.group.WORLD
    return [zero_trace(lambda *a, s=s: overlapped(s, *a, **options), world, build, 0, micro_batches) for s in STAGES]


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_losses_gradients_and_weights_are_those_of_the_unsharded_model_however_late_the_gathers(ranks):
    assert_same_traces(run_ranks(ranks, traces), reference_trace(ranks))


def test_the_same_with_collectives_that_really_travel():
    assert_same_traces(run_ranks(2, traces, decoder, 1, all_gather=all_gather), reference_trace(2, micro_batches=1))


def clipped_steps(stage: int):
    return sharded_steps(lambda *a: overlapped(stage, *a), in_two_groups, awkward(), 0.5)


@pytest.mark.always("2")
@pytest.mark.parametrize("stage", STAGES)
def test_four_clipped_steps_with_a_schedule_equal_those_of_torch(stage):
    assert_clipped_as_by_torch(run_ranks(3, clipped_steps, stage))


@pytest.mark.always("1")
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_with_master_weights_is_bit_equal_to_the_stage_that_waits(stage):
    want = run_ranks(2, mixed_steps, partial((Zero1, Zero2)[stage - 1], bucket_bytes=SMALL), 2)
    for rank, got in enumerate(run_ranks(2, mixed_steps, partial(overlapped, stage), 2)):
        for name in got:
            assert torch.equal(got[name], want[rank][name]), f"{name} on rank {rank}"


# ------------------------------------------------------------------------------------------ whoever comes first waits


class Cube(torch.autograd.Function):
    """A kernel of one's own: torch hands it the parameter as it is."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.detach() ** 3

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return 3 * weight**2 * gradient


USES = {
    "evaluation": lambda model: model(make_batch(9, 1, 1)[0][0][0]),
    "a weight by keyword": lambda model: F.linear(torch.ones(2, 23).double(), weight=model.layers[1].up.weight),
    "the state dict": lambda model: model.state_dict()["head.weight"],
    "a copy of the model": lambda model: deepcopy(model).layers[0].down.weight,
    ".data": lambda model: model.embed.weight.data,
    "a sum over parameters": lambda model: torch.stack([p.sum() for p in model.parameters()]),
    "parameters in a list": lambda model: torch.cat([model.head.weight, model.embed.weight]),
    "a function of one's own": lambda model: Cube.apply(model.norm.weight),
    "numbers": lambda model: torch.tensor(model.norm.weight.tolist()),
}


def used_after_a_step(stage: int) -> list[str]:
    wrong = []
    for use, call in USES.items():
        model = decoder()
        zero = overlapped(stage, model, sgd(model), dist.group.WORLD)
        train_step(model, zero, make_batch(0, dist.get_world_size())[dist.get_rank()])
        zero.step()
        with torch.no_grad():
            got = call(model)
            again = decoder()
            again.load_state_dict(zero.full_weights())
            want = call(again)
        wrong += [use] if not torch.equal(got, want) else []
    return wrong


@pytest.mark.always("1")
@pytest.mark.parametrize("stage", STAGES)
def test_whoever_reads_a_weight_after_a_step_reads_the_new_one(stage):
    for wrong in run_ranks(2, used_after_a_step, stage):
        assert wrong == []


def asked_without_values() -> tuple[int, list[tuple[str, object]], int]:
    model = decoder()
    zero = overlapped(1, model, sgd(model), dist.group.WORLD)
    train_step(model, zero, make_batch(0, dist.get_world_size())[dist.get_rank()])
    zero.step()
    zero.zero_grad()
    sum(p.numel() for p in model.parameters()), {p: p.shape for p in model.parameters()}, [p.grad for p in zero.names]
    assert all(flat.late.arrived is not None for flat in zero.flats), "no gather is late: nothing is shown in this file"
    travelling = sum(isinstance(p, Travelling) for p in model.parameters())
    waits = [event for event in zero.log if event[0] == "wait"]
    zero.arrive()
    return travelling, waits, len(list(model.parameters()))


def test_zero_grad_and_questions_about_shapes_wait_for_nothing():
    for travelling, waits, parameters in run_ranks(2, asked_without_values):
        assert travelling == parameters and waits == []


def stepped_twice() -> list[dict[str, Tensor]]:
    found = []
    for make in (Zero2, partial(overlapped, 2)):
        model = decoder()
        zero = make(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), dist.group.WORLD)
        train_step(model, zero, make_batch(0, dist.get_world_size())[dist.get_rank()])
        zero.step()
        zero.step()
        found.append(zero.full_weights())
    return found


def test_a_step_without_a_forward_in_between_waits_before_it_updates():
    for rank, (want, got) in enumerate(run_ranks(2, stepped_twice)):
        assert_same_named(got, want, 1e-10, "weight", rank)


def loaded_under_way() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = decoder()
    zero = overlapped(2, model, in_two_groups(model), dist.group.WORLD)
    train_step(model, zero, make_batch(0, dist.get_world_size())[dist.get_rank()])
    zero.step()
    saved = full_state_dict(zero)
    train_step(model, zero, make_batch(1, dist.get_world_size())[dist.get_rank()])
    zero.step()
    load_full_state_dict(zero, saved)  # while the weights of the second step travel
    return {name: p.detach().clone() for name, p in model.named_parameters()}, saved["weights"]


def test_a_state_that_is_loaded_while_weights_travel_is_what_is_there_afterwards():
    for rank, (got, want) in enumerate(run_ranks(2, loaded_under_way)):
        assert_same_named(got, want, 1e-12, "weight", rank)


# ------------------------------------------------------------------------------------------------------ order and bytes


def order_of_a_step(stage: int) -> tuple[list[tuple[str, object]], list[int], int]:
    model = decoder()
    zero = overlapped(stage, model, sgd(model), dist.group.WORLD, all_gather=all_gather)
    assert zero.stage == stage, "stage 1 keeps all gradients, stage 2 a shard"
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(lambda *_, name=name: zero.log.append(("forward", name)))
    batch = make_batch(0, dist.get_world_size(), 1)[dist.get_rank()]
    for _ in range(2):
        train_step(model, zero, batch)
        log = zero.log
        zero.step()
    zero.arrive()
    return log, list(range(len(zero.buckets))), zero.bucket_of[model.head.weight]


@pytest.mark.parametrize("stage", STAGES)
def test_buckets_leave_in_the_order_of_forward_and_each_is_waited_for_by_its_first_layer(stage):
    for log, buckets, last in run_ranks(2, order_of_a_step, stage):
        assert len(buckets) > 3
        assert [who for what, who in log if what == "update"] == buckets[::-1]
        waits = [who for what, who in log if what == "wait"]
        assert waits == buckets[::-1], "each once, the first layer's first"
        begins = log.index(("forward", "embed"))
        assert all(log.index(("gather", index)) < begins for index in buckets), "step() has sent all of them off"
        assert all(log.index(("wait", index)) > begins for index in buckets), "and has waited for none"
        assert log.index(("wait", last)) > log.index(("forward", "layers.1.down")), "the head's travels to the end"
        for index in buckets:  # an update while the bucket before travels
            assert index == 0 or log.index(("gather", index)) < log.index(("update", index - 1))


@pytest.mark.always("2-3")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_held_and_sent_are_those_of_the_stage_that_waits(stage, ranks):
    psi = padded(decoder(), ranks)
    times = {1: 2, 2: 3}[stage]  # two micro-batches, each reduced at stage 2, and one gather
    for got in run_ranks(ranks, one_step, stage):
        assert got["alive"] == {1: 4 * psi + 12 * psi // ranks, 2: 2 * psi + 14 * psi // ranks}[stage]
        assert got["sent"] == times * 2 * psi * (ranks - 1) // ranks


def one_step(stage: int) -> dict[str, float]:
    made = []

    def make(*of):
        made.append(overlapped(stage, *of, master=torch.float32, bucket_bytes=2**40, all_gather=all_gather))
        return made[-1]

    got = bytes_of_a_step(make)
    made.pop().arrive()
    return got


def peak_of_steps(stage: int, late: bool) -> tuple[int, float]:
    peaks, group = [], dist.group.WORLD
    model = decoder()
    kind = (Zero1, Zero2)[stage - 1]
    zero = overlapped(stage, model, sgd(model), group, all_gather=all_gather) if late else kind(
        model, sgd(model), group, bucket_bytes=SMALL
    )  # fmt: skip
    batch = make_batch(0, dist.get_world_size())[dist.get_rank()]
    train_step(model, zero, batch)
    zero.step()
    for _ in range(3):
        with peak_memory() as memory, communication() as sent:
            train_step(model, zero, batch)
            zero.step()
        peaks.append(memory.peak)
    if late:
        zero.arrive()
    return min(peaks), sent.sent["all_gather"]


@pytest.mark.prove
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_needs_no_more_memory_and_gathers_no_more_than_the_stage_that_waits(stage):
    waits, late = (run_ranks(2, peak_of_steps, stage, which) for which in (False, True))
    for (peak, gathered), (late_peak, late_gathered) in zip(waits, late, strict=True):
        assert late_peak <= peak and late_gathered == gathered


def dropped_under_way(stage: int) -> tuple[bool, bool]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    zero = make_overlapped(stage, model, torch.optim.AdamW(model.parameters()), dist.group.WORLD)
    zero.zero_grad()
    with zero.micro_batch(last=True):
        model[0](torch.ones(1, 3)).sum().backward()  # the second layer is never used, so nobody waits for it
    zero.step()
    references = weakref.ref(zero), weakref.ref(model)
    del zero
    gc.collect()
    freed = references[0]() is None
    assert torch.isfinite(model[1].weight).all()  # the weights still arrive without their owner
    del model
    gc.collect()
    return freed, references[1]() is None


@pytest.mark.parametrize("stage", STAGES)
def test_an_owner_that_is_no_longer_used_is_freed_and_its_weights_still_arrive(stage):
    assert run_ranks(1, dropped_under_way, stage) == [(True, True)]


# --------------------------------------------------------------------------------------------------------- bad input


def refused() -> list[str]:
    model, said = decoder(), []
    for stage in (0, 3, "1", True, 2.0):
        said.append(error_from(ValueError, make_overlapped, stage, model, sgd(model), dist.group.WORLD))
    zero = Overlapped1(model, sgd(model), dist.group.WORLD)
    mean_loss(model, *make_batch(0, 1)[0][0]).backward()
    said.append(error_from(RuntimeError, zero.step))
    model = decoder()
    zero = make_overlapped(1, model, sgd(model), dist.group.WORLD, units=model.layers)  # as `make_zero` takes them
    train_step(model, zero, make_batch(0, 1)[0])
    model.norm.float()
    return [*said, error_from(RuntimeError, zero.step)]


def test_a_stage_without_a_gather_in_its_step_a_forgotten_finish_and_a_moved_weight_are_refused():
    (said,) = run_ranks(1, refused)
    for message, stage in zip(said, (0, 3, "1", True, 2.0), strict=False):
        assert f"stage {stage!r} has no gather in its step; use 1 or 2" == message
    assert "call finish() after backward" in said[-2]
    assert "'norm.weight' was moved or cast" in said[-1]


@pytest.mark.parametrize("arguments", [["--stage", "3"], ["--stage", "x"], ["--stge", "1"], ["--stage"]])
def test_a_wrong_option_is_one_line_that_names_it(arguments):
    assert arguments[0] in refusal(main, arguments)
