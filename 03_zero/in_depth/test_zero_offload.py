"""The optimizer on the host, beside the unsharded model: bytes on either side and on the link; who waits for whom."""

import gc
import math
import random
import time
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _zero_demo import make_batch, train_step
from harness.meter import communication, peak_memory, storage_bytes
from harness.programs import error_from, on_stand_in_gpus, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same_traces
from test_zero_stages import (
    AdamWInOneGo,
    assert_clipped_as_by_torch,
    awkward,
    decoder,
    distance_from_float64,
    in_two_groups,
    mean_loss,
    one_process_in_bf16,
    padded,
    reference_trace,
    sgd,
    sharded_steps,
    zero_trace,
)
from test_zero_state import compare, run
from torch import Tensor, nn
from zero3 import make_zero
from zero_hybrid import ShardThenCopies, make_groups
from zero_memory import bytes_per_parameter, bytes_sent
from zero_offload import Link, Offload2, Offload3, bytes_apart, bytes_over_the_link, main, make_offloaded, paper_table

HERE = Path(__file__).parent
STAGES = [2, 3]
SMALL = 8_000  # bytes of a bucket: several of them


class LateLink(Link):
    """Copies that take their time: what they write is NaN until they have arrived, and what they read must stay.

    As on a GPU, the host is not stopped when the device waits for what goes down. A slot may not be used again before
    the host has waited for what it carries.
    """

    chance = random.Random(0)

    def __init__(self, device):
        super().__init__(device)
        self.busy: set[int] = set()

    def start(self, way, to, source):
        slot = (to if way == "down" else source).data_ptr()
        assert slot not in self.busy, "a slot is used again before what it carries has arrived"
        self.busy.add(slot)
        to.fill_(math.nan)
        crossing = super().start(way, to, source)
        waits = crossing.wait_on_host
        crossing.wait_on_host = lambda: (waits(), self.busy.discard(slot))
        if way == "down":
            crossing.wait_on_device = lambda: None
        return crossing

    def carry(self, to, source):
        time.sleep(self.chance.choice([0.001, 0.001, 0.003]))
        super().carry(to, source)


def with_link(make_link, kind):
    return type(kind.__name__, (kind,), {"make_link": lambda self, device: make_link(device)})


def offloaded(stage: int, model: nn.Module, optimizer: torch.optim.Optimizer, group, late: bool = False, **options):
    kind = {2: Offload2, 3: Offload3}[stage]
    kind = with_link(LateLink, kind) if late else kind
    options |= {"bucket_bytes": SMALL} if stage == 2 else {"units": model.layers}
    return kind(model, optimizer, group, **options)


def traces(build=decoder, micro_batches: int = 2, late: bool = False) -> list[Trace]:
    world = dist.group.WORLD
    return [zero_trace(lambda *a, s=s: offloaded(s, *a, late), world, build, 0, micro_batches) for s in STAGES]


# ---------------------------------------------------------------------------------------------- the one reference


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_losses_gradients_and_weights_are_those_of_the_unsharded_model(ranks):
    assert_same_traces(run_ranks(ranks, traces), reference_trace(ranks))


@pytest.mark.always("1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_three_micro_batches_add_up_on_the_host_however_late_the_copies_arrive(ranks):
    assert_same_traces(run_ranks(ranks, traces, decoder, 3, late=True), reference_trace(ranks, micro_batches=3))


def sums_after_a_copy_that_was_left() -> list[Tensor]:
    model = decoder()
    zero = offloaded(2, model, sgd(model), dist.group.WORLD, late=True)
    zero.zero_grad()
    zero.send_down(0, torch.ones_like(zero.gradients[0]))  # a backward that raises leaves it under way
    zero.zero_grad()
    return zero.gradients


def test_what_a_failed_backward_has_left_is_not_added_to_the_next_sums():
    assert not any(gradient.any() for gradient in run_ranks(1, sums_after_a_copy_that_was_left)[0])


def bytes_of_slots() -> list[int]:
    """A bucket of 3 elements in bf16 is made first, then one of 90 in fp32; with sums in float64 both are as
    wide; sums in bf16 do not make the weights that go up narrower."""
    found = []
    for wide in (None, torch.float64, torch.bfloat16):
        model = nn.ModuleList([nn.Linear(9, 9), nn.Linear(2, 1, dtype=torch.bfloat16)])
        zero = Offload2(model, sgd(model), dist.group.WORLD, reduce_dtype=wide)
        found += [slot.nbytes for slot in zero.slots]
    return found


def test_a_slot_holds_the_longest_shard_of_any_dtype():
    assert run_ranks(1, bytes_of_slots) == [[360, 360, 720, 720, 360, 360]]


def shards_and_copies(stage: int) -> Trace:
    row, column = make_groups(2)
    options = {"reduce_scatter": partial(ShardThenCopies, copies=column)}

    def make(model, optimizer, everyone):
        return offloaded(stage, model, optimizer, row, late=True, **options)

    return zero_trace(make, dist.group.WORLD, lambda seed: decoder())  # of columns nobody sends the first weights


@pytest.mark.always("2")
@pytest.mark.parametrize("stage", STAGES)
def test_each_copy_of_a_shard_has_its_own_host_and_all_stay_alike(stage):
    assert_same_traces(run_ranks(4, shards_and_copies, stage), reference_trace(4))


def clipped_steps(stage: int, fused: bool):
    options = {"fused": AdamWInOneGo()} if fused else {}
    return sharded_steps(lambda *a: offloaded(stage, *a, late=True, **options), in_two_groups, awkward(), 0.5)


@pytest.mark.always("3")
@pytest.mark.parametrize("stage", STAGES)
def test_four_clipped_steps_with_a_schedule_equal_those_of_torch(stage):
    for fused in (False, True):
        assert_clipped_as_by_torch(run_ranks(3, clipped_steps, stage, fused))


def mixed_steps(stage: int, host: bool, wide: bool) -> dict[str, Tensor]:
    model, rank, ranks = decoder(dtype=torch.bfloat16), dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = dict(reduce_dtype=torch.float32, accumulate_dtype=torch.float32) if wide else {}
    if host:
        zero = offloaded(stage, model, optimizer, dist.group.WORLD, late=True, master=torch.float32, **options)
    else:
        options |= {"bucket_bytes": SMALL} if stage == 2 else {"units": model.layers}
        zero = make_zero(stage, model, optimizer, dist.group.WORLD, master=torch.float32, **options)
    for step in range(3):
        train_step(model, zero, make_batch(step, ranks, 3)[rank])
        zero.step()
    return zero.full_weights()


@pytest.mark.always("2-fp32 sums")
@pytest.mark.parametrize("wide", [False, True], ids=["bf16 sums", "fp32 sums"])
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_with_master_weights_is_bit_equal_to_the_stage_that_is_not_offloaded(stage, wide):
    want = run_ranks(2, mixed_steps, stage, False, wide)
    for rank, got in enumerate(run_ranks(2, mixed_steps, stage, True, wide)):
        for name in got:
            assert torch.equal(got[name], want[rank][name]), f"{name} on rank {rank}"


MANY = 64  # micro-batches


def gradient_of_many(**options) -> dict[str, Tensor]:
    model = decoder(dtype=torch.bfloat16)
    zero = offloaded(2, model, torch.optim.AdamW(model.parameters()), dist.group.WORLD, master=torch.float32, **options)
    train_step(model, zero, make_batch(0, 1, MANY, length=8)[0])
    return zero.full_gradients()


@pytest.mark.prove
def test_sums_on_the_host_in_fp32_are_as_near_to_float64_as_one_process_and_in_bf16_are_not():
    (parts,) = make_batch(0, 1, MANY, length=8)
    want, best = one_process_in_bf16(parts)
    (wide,) = run_ranks(1, gradient_of_many, accumulate_dtype=torch.float32)
    (narrow,) = run_ranks(1, gradient_of_many)
    assert distance_from_float64(wide, want) <= 1.5 * best
    assert distance_from_float64(narrow, want) > 1.5 * distance_from_float64(wide, want)


# ------------------------------------------------------------------------------------------------------------- bytes


def bytes_of_a_step(stage: int, dtype: torch.dtype, micro_batches: int) -> dict[str, float]:
    """What one AdamW step leaves in memory, seen from outside, and sends."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = make_batch(0, ranks, micro_batches)[rank]
    options = {"bucket_bytes": 2**40} if stage == 2 else {"keep": False}
    with peak_memory() as memory:
        model = decoder(dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        master = torch.float32 if dtype == torch.bfloat16 else None
        zero = make_offloaded(
            stage, model, optimizer, dist.group.WORLD, units=model.layers, master=master, **options
        )  # fmt: skip
        with communication() as sent:
            train_step(model, zero, batch)
            zero.step()
        zero.land_all()
        gc.collect()
        counters = sum(v.nbytes for state in zero.state.values() for v in state.values() if v.dim() == 0)
        alive = memory.current - counters
    device, host = ([t for t in ts if t.dim()] for ts in (zero.on_device(), zero.on_host()))
    shared = {t.untyped_storage()._cdata for t in device} & {t.untyped_storage()._cdata for t in host}
    return {
        "psi": sum(bucket.padded for bucket in zero.buckets),
        "alive": alive - sum(slot.nbytes for slot in zero.slots),
        "slots": sum(slot.nbytes for slot in zero.slots),
        "longest": max(bucket.shard_numel for bucket in zero.buckets),
        "device": storage_bytes(device),
        "host": storage_bytes(host),
        "shared": len(shared),
        "sent": sent.sent["reduce_scatter"] + sent.sent["all_gather"],
    } | zero.link.bytes


@pytest.mark.always("2-3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_on_the_device_on_the_host_and_on_the_link_are_those_of_the_paper(stage, ranks):
    """2 Psi on the device, 14 Psi / N on the host, 2 Psi / N down a micro-batch, 2 Psi / N up: all that lives."""
    for got in run_ranks(ranks, bytes_of_a_step, stage, torch.bfloat16, 3):
        psi = got["psi"]
        assert got["device"] == (2 * psi if stage == 2 else 2 * psi // ranks)
        assert got["host"] == 14 * psi // ranks and got["shared"] == 0
        assert got["alive"] == got["device"] + got["host"], "something offloaded is alive on the device as well"
        assert got["slots"] == 2 * 2 * got["longest"]
        assert (got["down"], got["up"]) == (3 * 2 * psi // ranks, 2 * psi // ranks)
        assert (got["device"], got["host"]) == pytest.approx([psi * each for each in bytes_apart(stage, ranks)])
        assert (got["down"], got["up"]) == bytes_over_the_link(ranks, 2 * psi, 2 * psi, 3)
        assert got["sent"] == pytest.approx(bytes_sent(stage, ranks, 2 * psi, micro_batches=3), abs=1e-6)


def test_without_master_weights_the_host_has_a_copy_of_its_own():
    psi = padded(decoder(), 3)
    for got in run_ranks(3, bytes_of_a_step, 2, torch.float32, 1):
        assert got["device"] == 4 * psi and got["host"] == (12 + 4) * psi // 3 and got["shared"] == 0
        assert got["alive"] == got["device"] + got["host"]
        assert (got["device"], got["host"]) == pytest.approx([psi * each for each in bytes_apart(2, 3, 12, 4, 4)])


def test_table_1_of_the_paper_and_the_same_bytes_on_the_link_for_any_number_of_ranks():
    assert [bytes_per_parameter(2, 1), sum(bytes_apart(2, 1)), bytes_apart(2, 1)[0]] == [16, 16, 2]  # 16 M, 2 M
    for ranks in (1, 2, 64):
        assert sum(bytes_over_the_link(ranks, 2, 2)) * ranks == 4  # 4 M
    assert bytes_over_the_link(2, 200, 100, 4) == (400, 50)
    assert [line.split()[2:] for line in paper_table()[2:6:3]] == [["2B", "16B", "16B"], ["14.4B", "16B", "1024B"]]
    for stage in (0, 1, 4):
        with pytest.raises(ValueError, match=f"stage {stage} is not offloaded"):
            bytes_apart(stage, 2)


# --------------------------------------------------------------------------------------------------------- lifetimes


class Watched(Link):
    """What is on its way down, and for how long the device keeps it."""

    def __init__(self, device):
        super().__init__(device)
        self.pieces: list[weakref.ref] = []
        self.most, self.sizes = 0, Counter()

    def alive(self) -> int:
        return sum(storage() is not None for storage in self.pieces)

    def start(self, way, to, source):
        if way == "down":
            storage = source.untyped_storage()
            self.sizes[storage.nbytes()] += 1
            self.pieces.append(weakref.ref(storage))
            self.most = max(self.most, self.alive())
            del storage
        return super().start(way, to, source)


def watched_steps(stage: int) -> tuple[int, int, list[int], list[int], bool]:
    model, rank, ranks = decoder(), dist.get_rank(), dist.get_world_size()
    kind = with_link(Watched, {2: Offload2, 3: Offload3}[stage])
    options = {"bucket_bytes": SMALL} if stage == 2 else {"units": model.layers}
    zero = kind(model, torch.optim.AdamW(model.parameters()), dist.group.WORLD, **options)
    left, current = [], []
    train_step(model, zero, make_batch(0, ranks)[rank])  # Adam's moments are made in the first step
    zero.step()
    with peak_memory() as memory:
        for step in range(3):
            train_step(model, zero, make_batch(step, ranks)[rank])
            left.append(zero.link.alive())
            zero.step()
            zero.land_all()
            gc.collect()
            time.sleep(0.05)  # gloo's threads may hold on to a buffer a little longer than its collective
            current.append(memory.current)
    shards = sorted({8 * bucket.shard_numel for bucket in zero.buckets})
    return zero.link.most, len(zero.buckets), left, current, sorted(zero.link.sizes) == shards


@pytest.mark.always("3")
@pytest.mark.parametrize("stage", STAGES)
def test_an_offloaded_piece_leaves_the_device_and_is_never_more_than_a_shard(stage):
    for most, buckets, left, current, only_shards in run_ranks(2, watched_steps, stage):
        assert buckets >= {2: 4, 3: 3}[stage] and most <= 3  # two under way, and the one that is about to be
        assert left == [0, 0, 0], "gradients that have arrived are still on the device"
        assert only_shards, "a view keeps the bucket of all ranks alive"
        assert current[0] == current[1] == current[2] <= 0, "memory grows with every step"


# -------------------------------------------------------------------------------------------------- order and devices


def events_of_a_step() -> tuple[list[tuple[str, object]], int]:
    model = decoder()
    zero = offloaded(2, model, sgd(model), dist.group.WORLD)
    train_step(model, zero, make_batch(0, dist.get_world_size(), 1)[dist.get_rank()])
    zero.step()
    return zero.events, len(zero.buckets)


def test_gradients_go_down_during_backward_and_weights_go_up_before_the_next_update():
    for events, buckets in run_ranks(2, events_of_a_step):
        last_ready = max(i for i, (what, _) in enumerate(events) if what == "ready")
        early = [i for i, (what, _) in enumerate(events) if what == "down" and i < last_ready]
        assert buckets > 3 and len(early) >= buckets - 3
        for index in range(buckets):
            assert events.index(("update", index)) < events.index(("up", index)) < events.index(("gather", index))
            assert index == buckets - 1 or events.index(("gather", index)) < events.index(("update", index + 1))


@pytest.mark.prove
@pytest.mark.parametrize("stage", STAGES)
def test_on_a_stand_in_gpu_host_and_device_are_apart_and_each_waits_for_the_other(stage):
    """It refuses what a GPU does not forgive: a slot that is read before its copy has arrived, or written before."""
    done = on_stand_in_gpus(HERE, str(HERE / "zero_offload.py"), "--stage", str(stage))
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "PASS", done.stdout[-900:] + done.stderr[-900:]
    assert "on 1 cuda rank(s)" in done.stdout
    assert stage == 3 or "bytes allocated on the device" in done.stdout  # by the device's own count


STATE = """
import torch
from _zero_demo import Decoder, make_batch, train_step, world
from zero_offload import make_offloaded
from zero_state import full_state_dict, load_full_state_dict
with world() as (group, device):
    for stage in (2, 3):
        model = Decoder().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        zero = make_offloaded(stage, model, optimizer, group, units=model.layers)
        for step in range(2):
            train_step(model, zero, [(x.to(device), y.to(device)) for x, y in make_batch(step, 1)[0]], max_norm=0.1)
            zero.step()
            state = full_state_dict(zero)
            load_full_state_dict(zero, state)
            assert all(t.device.type == "cpu" for t in zero.on_host())
            assert all(t.device.type == "cuda" for t in zero.on_device())
print("PASS")
"""


@pytest.mark.prove
def test_on_a_stand_in_gpu_clipping_saving_and_loading_know_where_things_are():
    done = on_stand_in_gpus(HERE, "-c", STATE)
    assert done.stdout.splitlines()[-1:] == ["PASS"], done.stdout[-900:] + done.stderr[-900:]


# ------------------------------------------------------------------------------------------------ the state, by name


@pytest.mark.always("first1-then1")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, make_zero), (3, make_offloaded)),
        ((2, make_offloaded), (1, make_zero)),
        ((3, make_offloaded), (2, make_offloaded)),
    ],
)
def test_a_run_goes_on_with_or_without_offloading_as_if_nothing_had_happened(first, then):
    straight = run_ranks(1, run, 2, range(4))[0]
    saved = run_ranks(2, run, first[0], range(2), make=first[1])[0]
    for resumed in run_ranks(2, run, then[0], range(2, 4), saved, make=then[1]):
        for state in resumed["optimizer"].values():
            state.pop("master", None)  # the copy that the host updates: the weights are compared
        compare(resumed, straight)


# --------------------------------------------------------------------------------------------------------- bad input


def refused() -> list[str]:
    model, said = decoder(), []
    for stage, units in ((1, ()), (4, ()), ("2", ()), (True, ()), (3, ())):
        said.append(error_from(ValueError, make_offloaded, stage, model, sgd(model), dist.group.WORLD, units=units))
    zero = offloaded(2, model, sgd(model), dist.group.WORLD)
    mean_loss(model, *make_batch(0, 1)[0][0]).backward()
    return [*said, error_from(RuntimeError, zero.step), error_from(RuntimeError, zero.clip_grad_norm, 1.0)]


def test_a_stage_that_is_not_offloaded_a_stage_3_without_units_and_a_forgotten_finish_are_refused():
    (said,) = run_ranks(1, refused)
    for message, stage in zip(said[:4], (1, 4, "2", True), strict=True):
        assert message == f"stage {stage!r} is not offloaded; use 2 or 3"
    assert "give units=model.layers" in said[4]
    assert all("call finish() after backward" in message for message in said[5:]) and len(said) == 7


@pytest.mark.parametrize("arguments", [["--stage", "1"], ["--stage", "x"], ["--stge", "2"], ["--stage"]])
def test_a_wrong_option_is_one_line_that_names_it(arguments):
    assert arguments[0] in refusal(main, arguments)
