"""Constant buffers, arenas, and an allocator whose every address can be checked by hand."""

import random
import sys

import pytest
import torch
import torch.distributed as dist
from _zero_demo import Decoder, make_batch
from harness.meter import communication, peak_memory
from harness.ranks import run_ranks
from harness.reference import assert_same
from torch import Tensor
from zero_buffers import (
    Arena,
    BestFit,
    OutOfMemoryInHeap,
    Recorder,
    all_reduce_fused,
    all_reduce_through,
    heap_needed,
    main,
    most_alive,
    recorded_step,
    replay,
    training_step,
)

SIZES = (1000, 3, 0, 4097, 256, 1)

# ------------------------------------------------------------------------------------------------------------- C_B


def reduced(numel: int) -> tuple[list[Tensor], list[Tensor], int, int, float]:
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(rank)
    through = [torch.randn(n, dtype=torch.float64) for n in SIZES]
    whole = [t.clone() for t in through]
    buffer = torch.empty(numel, dtype=torch.float64)
    with communication() as sent, peak_memory() as memory:
        messages = all_reduce_through(buffer, through, group)
    assert sent.calls["all_reduce"] == messages
    all_reduce_fused(whole, group)
    return through, whole, messages, memory.peak, sent.total


@pytest.mark.always("256", "10000")
@pytest.mark.parametrize("numel", [7, 256, 5357, 10_000])
def test_a_constant_buffer_gives_the_sums_of_one_large_message_in_the_fewest_messages(numel):
    total = sum(SIZES)
    for through, whole, messages, peak, sent in run_ranks(3, reduced, numel):
        for got, want in zip(through, whole, strict=True):
            assert_same(got, want, 1e-12)
        assert messages == -(-total // numel)
        assert peak == 0  # nothing but the buffer, which was there before
        assert sent == pytest.approx(2 * 2 / 3 * 8 * total, rel=1e-12)


def one_by_one() -> tuple[list[float], int]:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    messages = all_reduce_through(torch.empty(1), tensors, dist.group.WORLD)
    return [x for t in tensors for x in t.tolist()], messages


def test_a_buffer_of_one_element_still_gets_everything_through():
    assert run_ranks(2, one_by_one) == [([2.0, 4.0, 6.0], 3)] * 2


def fused_peak(numel: int) -> int:
    tensors = [torch.ones(numel), torch.ones(numel)]
    with peak_memory() as memory:
        all_reduce_fused(tensors, dist.group.WORLD)
    return memory.peak


def test_the_fused_version_needs_a_buffer_as_large_as_the_model():
    assert run_ranks(1, fused_peak, 5000)[0] >= 40_000


def with_gaps() -> None:
    all_reduce_through(torch.empty(8), [torch.ones(4, 4).t()[:, :2]], dist.group.WORLD)


def test_a_tensor_with_gaps_is_refused_instead_of_reducing_a_copy_of_it():
    with pytest.raises(AssertionError, match="view"):
        run_ranks(1, with_gaps)


# ------------------------------------------------------------------------------------------------------------- M_D


def test_the_arena_holds_copies_end_to_end_and_says_when_it_is_full():
    arena = Arena(10, torch.float32)
    first, second = arena.hold(torch.ones(2, 3)), arena.hold(torch.full((4,), 2.0))
    assert first.shape == (2, 3) and arena.memory.tolist() == [1.0] * 6 + [2.0] * 4
    assert second.untyped_storage().data_ptr() == arena.memory.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="arena of 10 elements is full: 1 more after 10"):
        arena.hold(torch.ones(1))
    arena.reset()
    arena.hold(torch.full((10,), 3.0))
    assert first.tolist() == [[3.0] * 3] * 2  # given back means given back


def test_a_later_piece_does_not_make_autograd_think_an_earlier_one_was_changed():
    arena = Arena(4, torch.float32)
    weight = torch.ones(2, requires_grad=True)
    product = weight * arena.hold(torch.tensor([2.0, 3.0]))  # saves the piece for backward
    arena.hold(torch.ones(2))
    product.sum().backward()
    assert weight.grad.tolist() == [2.0, 3.0]


def gradients_of_a_step(with_arenas: bool) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model = Decoder(hidden=16, layers=3).double()
    batch = [pair for length in (8, 24, 16) for pair in make_batch(0, 1, 1, rows=2, length=length)[0]]
    checkpoints = Arena(3 * 2 * 24 * 16, torch.float64) if with_arenas else None
    gradients = Arena(sum(p.numel() for p in model.parameters()), torch.float64) if with_arenas else None
    training_step(model, batch, checkpoints, gradients)
    return [p.grad.clone() for p in model.parameters()], checkpoints.used if checkpoints else 0


def test_a_step_in_arenas_has_the_same_gradients_and_its_checkpoints_are_the_layers_inputs():
    (want, _), (got, used) = gradients_of_a_step(False), gradients_of_a_step(True)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b, 1e-12)
    assert used == 3 * 2 * 16 * 16  # three layers, the last micro-batch of 2 x 16 tokens


# -------------------------------------------------------------------------------------------------------- the heap


def test_best_fit_takes_the_hole_that_leaves_least_over():
    heap = BestFit(100)
    a, b, c, d, _ = (heap.allocate(size) for size in (30, 10, 20, 10, 30))
    assert (a, b, c, d) == (0, 30, 40, 60)
    heap.free(a)
    heap.free(c)
    assert heap.allocate(20) == 40  # not the hole of 30 at address 0
    assert heap.allocate(5) == 0 and heap.free_blocks == [(5, 25)]


def test_freed_neighbours_become_one_hole():
    heap = BestFit(60)
    blocks = [heap.allocate(20) for _ in range(3)]
    for at in (0, 2, 1):
        heap.free(blocks[at])
    assert heap.free_blocks == [(0, 60)]


def test_out_of_memory_although_enough_is_free():
    heap = BestFit(100)
    blocks = [heap.allocate(20) for _ in range(5)]
    heap.free(blocks[1])
    heap.free(blocks[3])
    with pytest.raises(OutOfMemoryInHeap, match="30 bytes asked for; 40 are free, but only 20 in a row"):
        heap.allocate(30)


def test_no_two_blocks_ever_overlap_and_no_byte_is_lost():
    heap, chance = BestFit(10_000), random.Random(0)
    for _ in range(3000):
        if heap.used and chance.random() < 0.5:
            heap.free(chance.choice(list(heap.used)))
        else:
            try:
                heap.allocate(chance.randint(1, 700))
            except OutOfMemoryInHeap:
                heap.free(next(iter(heap.used)))
        blocks = sorted([*heap.free_blocks, *heap.used.items()])
        assert [address for address, _ in blocks] == [sum(size for _, size in blocks[:i]) for i in range(len(blocks))]
        assert sum(size for _, size in blocks) == 10_000
        free = [address + size for address, size in heap.free_blocks]
        assert not {address for address, _ in heap.free_blocks} & set(free)  # no two holes touch


def test_the_recorder_sees_what_lives_and_when_it_dies():
    with Recorder() as recorder:
        a = torch.ones(10)
        b = a + 1
        b.add_(1)  # in place: no allocation
        view = b[:5]
        del b
        c = view * 2
        del view, c
    sizes = [size for _, size in recorder.trace]
    assert sizes == [40, 40, 20, 0, 0] and most_alive(recorder.trace) == 100
    assert len(a) == 10


@pytest.fixture(scope="module")
def steps():
    return recorded_step(False), recorded_step(True)


@pytest.mark.prove
def test_a_real_step_needs_more_heap_than_it_has_bytes_alive_and_with_arenas_it_does_not(steps):
    (plain, none), (moved, arenas) = steps
    assert none == 0 and arenas > 0
    assert heap_needed(plain) > 1.05 * most_alive(plain)
    assert heap_needed(moved) < 1.01 * most_alive(moved)
    assert heap_needed(moved) + arenas < heap_needed(plain)


def test_on_the_same_device_the_step_runs_with_arenas_and_dies_without(steps):
    (plain, _), (moved, arenas) = steps
    size = (heap_needed(plain) + heap_needed(moved) + arenas) // 2
    replay(moved, BestFit(size - arenas))
    heap = BestFit(size)
    with pytest.raises(OutOfMemoryInHeap):
        replay(plain, heap)
    assert most_alive(plain) <= size  # it was not for want of bytes


@pytest.mark.prove
def test_the_demo_ends_with_pass(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zero_buffers.py"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0 and capsys.readouterr().out.splitlines()[-1] == "PASS"


# ---------------------------------------------------------------------------------------------------------- bad input


def a_buffer_without_room() -> None:
    all_reduce_through(torch.empty(0), [torch.ones(3)], dist.group.WORLD)


def test_a_buffer_without_room_is_refused_and_does_not_run_for_ever():
    with pytest.raises(AssertionError, match="a buffer of 0 elements"):
        run_ranks(1, a_buffer_without_room, timeout=20)


def through_a_narrow_one(buffer: torch.dtype, tensor: torch.dtype) -> list[Tensor]:
    kept = [torch.full((3,), 257, dtype=tensor), torch.full((2,), 2**24 + 1 if tensor == torch.int64 else 1).to(tensor)]
    before = [t.clone() for t in kept]
    try:
        all_reduce_through(torch.empty(4, dtype=buffer), kept, dist.group.WORLD)
    except ValueError as error:
        assert str(buffer) in str(error) and str(tensor) in str(error)
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True)), "refused, but changed before"
        return kept
    raise AssertionError("not refused")


@pytest.mark.parametrize(
    ("buffer", "tensor"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.int64), (torch.float32, torch.float64)],
)
def test_a_buffer_that_would_round_is_refused_before_anything_is_sent(buffer, tensor):
    run_ranks(1, through_a_narrow_one, buffer, tensor)


def test_an_arena_that_would_round_is_refused():
    arena = Arena(10, torch.bfloat16)
    with pytest.raises(ValueError, match="arena is torch.bfloat16, the tensor torch.float32: copying would round"):
        arena.hold(torch.ones(2))
    assert arena.used == 0


def mixed() -> None:
    all_reduce_fused([torch.ones(2), torch.ones(2, dtype=torch.int64)], dist.group.WORLD)


def test_the_fused_version_refuses_a_mixture_that_it_would_round():
    with pytest.raises(AssertionError, match="copying would round"):
        run_ranks(1, mixed)
