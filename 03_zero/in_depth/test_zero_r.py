"""Partitioned and offloaded checkpoints: same gradients as the unsharded model, 1/N of the bytes, 1/12 more traffic."""

import gc
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _zero_demo import IGNORE, Decoder, make_batch, token_loss_sum
from harness.meter import communication, peak_memory, saved_activations
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_trace, sgd_trace
from torch import Tensor, nn
from zero_memory import GB
from zero_r import (
    CONFIGURATIONS,
    Arena,
    BestFit,
    CopyEngine,
    Offloaded,
    OutOfMemoryInHeap,
    ParallelDecoder,
    Partitioned,
    Recorder,
    Replicated,
    _FromParallel,
    _ToParallel,
    all_reduce_fused,
    all_reduce_through,
    configuration_table,
    heap_needed,
    main,
    most_alive,
    my_part,
    recompute,
    recorded_step,
    replay,
    training_step,
)

HEADS, HIDDEN, LAYERS = 12, 24, 3
TOKENS = 2 * 24  # B S
KEEPERS = ["replicated", "P_a", "P_a and M_D", "P_a+cpu"]


def full_decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(hidden=HIDDEN, heads=HEADS, layers=LAYERS).double()


def piece_of(ranks: int) -> int:
    return -(-TOKENS * HIDDEN // ranks)


def keeper_of(kind: str, group: dist.ProcessGroup):
    piece = piece_of(dist.get_world_size(group))
    if kind == "replicated":
        return Replicated()
    if kind == "P_a+cpu":
        return Offloaded(group, LAYERS, piece, torch.float64)
    return Partitioned(group, Arena(LAYERS * piece, torch.float64) if "M_D" in kind else None)


def text(step: int) -> tuple[Tensor, Tensor]:
    return make_batch(step, 1, 1, rows=2)[0][0]


def divided_loss(model: nn.Module, step: int) -> Tensor:
    tokens, labels = text(step)
    return token_loss_sum(model, tokens, labels) / (labels != IGNORE).sum()


# ---------------------------------------------------------------------------------------------- the one reference


def reference_trace(seed: int = 0) -> Trace:
    model = full_decoder(seed)

    def backward(step: int) -> float:
        tokens, labels = text(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward)


def part_of_trace(full: Trace, rank: int, ranks: int) -> Trace:
    """The reference's trace, cut and named as in the parallel model."""

    def cut(tensors: dict) -> dict:
        parts = {}
        for name, tensor in tensors.items():
            if name.startswith("layers."):
                name = name.removesuffix(".weight")
                parts[name] = my_part(name.split(".")[2], tensor, HEADS, rank, ranks)
            else:
                parts[name] = tensor
        return parts

    return Trace(full.losses, [cut(g) for g in full.gradients], cut(full.weights))


def parallel_trace(kind: str, group: dist.ProcessGroup, seed: int = 0) -> Trace:
    keeper = keeper_of(kind, group)
    model = ParallelDecoder(full_decoder(seed), group, keeper)

    def backward(step: int) -> float:
        loss = divided_loss(model, step)
        loss.backward()
        if getattr(keeper, "arena", None):
            keeper.arena.reset()
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward)


def all_keepers() -> list[Trace]:
    return [parallel_trace(kind, dist.group.WORLD) for kind in KEEPERS]


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_loss_gradients_and_weights_after_three_steps_equal_the_unsharded_model(ranks):
    want = reference_trace()
    for rank, results in enumerate(run_ranks(ranks, all_keepers)):
        for got in results:
            assert_same_trace(got, part_of_trace(want, rank, ranks), rank=rank)


def two_slices() -> list[Trace]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    return [parallel_trace(kind, groups[mine], seed=mine) for kind in ("P_a", "P_a+cpu")]


@pytest.mark.prove
def test_two_slices_of_the_world_keep_their_own_checkpoints():
    want = [reference_trace(seed) for seed in (0, 1)]
    for rank, results in enumerate(run_ranks(4, two_slices)):
        for got in results:
            assert_same_trace(got, part_of_trace(want[rank % 2], rank // 2, 2), rank=rank)


def uneven() -> list[list[Tensor]]:
    group, found = dist.group.WORLD, []
    checkpoints = [torch.arange(numel, dtype=torch.float64).view(1, -1) for numel in UNEVEN]
    for keeper in (Partitioned(group), Offloaded(group, 3, 3, torch.float64)):
        kept = [keeper.keep(x) for x in checkpoints]
        found.append([keeper.restore(*one) for one in reversed(kept)][::-1])
    return found


UNEVEN = (7, 1, 6)  # the first two do not divide by 3 ranks


def test_a_checkpoint_that_the_ranks_do_not_divide_comes_back_whole():
    for found in (one for keepers in run_ranks(3, uneven) for one in keepers):
        for numel, got in zip(UNEVEN, found, strict=True):
            assert_same(got, torch.arange(numel, dtype=torch.float64).view(1, -1), 0.0)


# --------------------------------------------------------------------------------------------------- bytes, exactly


def bytes_of_a_step(kind: str) -> dict[str, float]:
    keeper = keeper_of(kind, dist.group.WORLD)
    model = ParallelDecoder(full_decoder(), dist.group.WORLD, keeper)
    x = model.embed(text(0)[0])
    with communication() as sent:
        with saved_activations() as saved:
            for layer in model.layers:
                x = recompute(layer, x, keeper)
        kept = saved.bytes
        x.sum().backward()
    host = keeper.host.nbytes if kind == "P_a+cpu" else 0
    return {"kept": kept, "reduce": sent.sent["all_reduce"], "gather": sent.sent["all_gather"], "host": host}


def bytes_of_all_keepers() -> dict[str, dict[str, float]]:
    return {kind: bytes_of_a_step(kind) for kind in KEEPERS}


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_p_a_keeps_one_nth_of_each_checkpoint_offloaded_none_and_adds_a_twelfth_to_the_traffic(ranks):
    message, piece = 8 * TOKENS * HIDDEN, 8 * piece_of(ranks)
    for keepers in run_ranks(ranks, bytes_of_all_keepers):
        for kind, got in keepers.items():
            if kind == "replicated":
                assert (got["kept"], got["host"], got["gather"]) == (LAYERS * message, 0, 0)
            elif kind == "P_a+cpu":
                assert (got["kept"], got["host"]) == (0, LAYERS * piece)
            else:  # with M_D in one storage: the arena
                assert (got["kept"], got["host"]) == (LAYERS * piece, 0)
            assert got["reduce"] == LAYERS * 12 * message * (ranks - 1) / ranks
            assert kind == "replicated" or got["gather"] == got["reduce"] / 12


# ------------------------------------------------------------------------------------------------------- recomputation


def with_dropout(kind: str) -> list[Tensor]:
    torch.manual_seed(5)
    keeper = keeper_of(kind, dist.group.WORLD)
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

    def layer(y: Tensor) -> Tensor:
        return F.dropout(y * weight, 0.5)

    out = recompute(layer, recompute(layer, x, keeper), keeper)
    out.sum().backward()
    return [out.detach(), x.grad, weight.grad]


def test_the_second_forward_draws_the_dropout_mask_of_the_first():
    for out, grad, weight_grad in run_ranks(2, with_dropout, "P_a"):
        assert set(out.unique().tolist()) == {0.0, 4.0}
        assert torch.equal(grad, out)  # d out / d x is the mask, times 2 for each layer
        assert_same(weight_grad, 2 * out.sum(0))


def test_recomputation_leaves_the_stream_of_random_numbers_where_it_was():
    drawn = run_ranks(1, random_after_backward)
    assert drawn[0][0] == drawn[0][1]


def random_after_backward() -> tuple[float, float]:
    values = []
    for kind in ("replicated", "none"):
        torch.manual_seed(1)
        x = torch.ones(4, requires_grad=True)
        y = recompute(F.dropout, x, Replicated()) if kind == "replicated" else F.dropout(x)
        F.dropout(y).sum().backward()  # random numbers are drawn between the first forward and the second
        values.append(torch.rand(()).item())
    return values[0], values[1]


def autocast_gradients(recomputed: bool, outside: bool, then: bool, low: torch.dtype) -> list[Tensor]:
    """Forward with autocast on, or off if `outside`; backward with autocast on if `then`."""
    torch.manual_seed(0)
    layer, keeper = nn.Sequential(nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN)), Replicated()
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", low, enabled=not outside):
        y = recompute(layer, x, keeper) if recomputed else layer(x)
    with torch.autocast("cpu", low, enabled=then):
        y.float().square().sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize(("outside", "then"), [(False, False), (True, True)])
def test_the_second_forward_is_under_the_autocast_of_the_first(outside, then):
    for low in (torch.bfloat16, torch.float16):  # the first is what a CPU does if it is not told
        got, want = (autocast_gradients(recomputed, outside, then, low) for recomputed in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_input_without_gradient_is_refused_since_the_weights_would_get_none():
    with pytest.raises(ValueError, match="must require a gradient"):
        recompute(lambda x: x, torch.ones(2), Replicated())
    with torch.no_grad():
        assert recompute(lambda x: 2 * x, torch.ones(2), Replicated()).tolist() == [2.0, 2.0]


def second_derivatives() -> list[str]:
    x, dy, group, found = torch.ones(4, requires_grad=True), torch.ones(4), dist.group.WORLD, []
    for y in (recompute(torch.exp, x, Replicated()), _ToParallel.apply(x, group), _FromParallel.apply(x, group)):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(error_from(RuntimeError, dx.sum().backward))
    _ToParallel.apply(x, group).backward(dy)
    assert x.tolist() == dy.tolist() == [1.0] * 4, "a sum has overwritten what it was given"
    return found


def test_a_second_derivative_is_refused():
    assert all("once_differentiable" in said for said in run_ranks(2, second_derivatives)[0])


# ----------------------------------------------------------------------------------------------------------- offloading


class SlowEngine(CopyEngine):
    """Each copy begins late, so whoever does not wait for it reads or overwrites the wrong bytes."""

    def work(self, to: Tensor, source: Tensor) -> None:
        time.sleep(0.03)
        super().work(to, source)


def with_slow_copies() -> tuple[list[Tensor], list[Tensor], list[tuple[str, int]], int]:
    results = []
    for slow in (True, False):
        keeper = keeper_of("P_a+cpu", dist.group.WORLD)
        keeper.host.fill_(float("nan"))  # whoever reads too early gets this
        if slow:
            keeper.engine = SlowEngine(torch.device("cpu"))
        model = ParallelDecoder(full_decoder(), dist.group.WORLD, keeper)
        for step in range(2):  # in the second step each slot is written again
            model.zero_grad()
            divided_loss(model, step).backward()
        results.append([p.grad for p in model.parameters()])
        free, events = len(keeper.free), keeper.events
    return results[0], results[1], events, free


def test_slow_copies_change_nothing_and_every_slot_is_free_afterwards():
    for slow, fast, events, free in run_ranks(2, with_slow_copies):
        for a, b in zip(slow, fast, strict=True):
            assert_same(a, b, 0.0)
        assert free == LAYERS
        ways, slots = zip(*events, strict=True)
        assert ways == ("out",) * LAYERS + ("in",) * LAYERS
        assert slots[LAYERS:] == slots[:LAYERS][::-1], "last in, first out"


def events_of_three_steps() -> list[int]:
    keeper = keeper_of("P_a+cpu", dist.group.WORLD)
    model = ParallelDecoder(full_decoder(), dist.group.WORLD, keeper)
    counts = []
    for step in range(3):
        divided_loss(model, step).backward()
        counts.append(len(keeper.events))
    return counts


def test_the_record_of_copies_does_not_grow_from_step_to_step():
    assert run_ranks(2, events_of_three_steps) == [[2 * LAYERS] * 3] * 2


def slot_while_copying_back() -> bool:
    """Is the slot of a checkpoint still taken while its way back has only been asked for?"""
    keeper = keeper_of("P_a+cpu", dist.group.WORLD)
    keeper.engine = SlowEngine(torch.device("cpu"))
    a, b = torch.ones(TOKENS, HIDDEN, dtype=torch.float64), torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    tickets = [keeper.keep(a)[1], keeper.keep(b)[1]]
    keeper.restore(None, tickets[1])  # asks for the other one, too
    assert tickets[0].wait_in is not None
    return tickets[0].slot not in keeper.free and tickets[1].slot in keeper.free


def test_a_slot_is_not_reused_before_its_way_back_has_ended():
    assert run_ranks(1, slot_while_copying_back) == [True]


def thrown_away() -> tuple[int, int]:
    keeper, layer = Offloaded(dist.group.WORLD, 1, 4, torch.float32), nn.Linear(4, 4)
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        y = recompute(layer, x, keeper)
        y = y.detach()  # no backward will come
    after = len(keeper.free)
    recompute(layer, x, keeper).sum().backward()
    return after, len(keeper.free)


def test_a_forward_that_is_thrown_away_gives_its_slots_back():
    assert run_ranks(1, thrown_away) == [(1, 1)]


def two_graphs(keeper) -> list[Tensor]:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(4, 4), [torch.full((4,), n).requires_grad_() for n in (1.0, 2.0)]
    outputs = [recompute(layer, recompute(layer, x, keeper).sin(), keeper) for x in inputs]
    for y in outputs:  # not the last in that is the first out
        y.square().sum().backward()
    return [*(x.grad for x in inputs), layer.weight.grad]


def of_two_keepers() -> list[list[Tensor]]:
    return [two_graphs(keeper) for keeper in (Replicated(), Offloaded(dist.group.WORLD, 4, 4, torch.float32))]


def test_of_two_forwards_the_first_may_go_back_first():
    for want, got in zip(*run_ranks(1, of_two_keepers)[0], strict=True):
        assert_same(got, want, 0.0)


# ------------------------------------------------------------------------------------------------------ configurations


def test_the_configurations_are_those_of_the_papers_table_3():
    got = {name: (c.stage, c.partitioned, c.offloaded) for name, c in CONFIGURATIONS.items()}
    no, yes = False, True
    assert got == {"C1": (1, no, no), "C2": (1, yes, no), "C3": (2, no, no), "C4": (2, yes, no), "C5": (2, yes, yes)}


def test_checkpoints_shrink_by_the_tensor_parallel_degree_and_vanish_with_offloading():
    layers, message = 125, 16 * 1024 * 8192
    replicated = CONFIGURATIONS["C3"].checkpoints(layers, message, 16)
    assert replicated == 2 * layers * message
    assert CONFIGURATIONS["C4"].checkpoints(layers, message, 16) == replicated / 16
    assert CONFIGURATIONS["C5"].checkpoints(layers, message, 16) == 0
    assert CONFIGURATIONS["C1"].states(1e9, 16, 8) == 1e9 / 16 * (4 + 12 / 8)


def test_the_largest_model_grows_from_c1_to_c2_to_c4_to_c5():
    lines = configuration_table(8192, 16, 1024, 16, 8, 32 * GB)
    size = {line.split()[0]: int(line.split()[-1].removesuffix("B")) for line in lines if line.startswith("C")}
    assert size["C1"] < size["C3"] < size["C2"] < size["C4"] < size["C5"]
    said = "GB per rank: 100 layers of H = 8192, batch 16, sequence 1024, 16 tensor-parallel x 8 data-parallel ranks; "
    assert lines[0] == said + "and the largest model of such layers in 32 GB"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("C")}
    assert rows["C1"] == ["P_os", "27.68", "26.84", "54.53", "47B"]  # by hand, as the others
    assert rows["C4"] == ["P_os+g", "P_a", "18.87", "1.68", "20.55", "125B"]
    assert rows["C5"] == ["P_os+g", "P_a+cpu", "18.87", "0.00", "18.87", "136B"]


@pytest.mark.parametrize(
    ("arguments", "ranks", "words"),
    [(["--tabel"], "1", ["--tabel"]), ([], "5", ["--nproc_per_node 5", "12 attention heads", "1, 2, 3, 4, 6 or 12"])],
)
def test_bad_input_is_one_line_that_names_it(arguments, ranks, words):
    said = refusal(main, arguments, ranks)
    assert all(word in said for word in words), said


class ManyHands(CopyEngine):
    """Copies do not wait for each other here, and those to the host are late: only `wait_out` keeps the order."""

    def __init__(self):
        self.threads = ThreadPoolExecutor(max_workers=2)
        self.delays = [0.2, 0.0]  # of the way out and of the way back

    def copy(self, to: Tensor, source: Tensor):
        delay = self.delays.pop(0)
        return self.threads.submit(lambda: (time.sleep(delay), to.copy_(source))).result


def back_at_once() -> list[float]:
    keeper = Offloaded(dist.group.WORLD, 1, 4, torch.float32)
    keeper.host.fill_(-1.0)
    keeper.engine = ManyHands()
    _, ticket = keeper.keep(torch.ones(4))
    return keeper.restore(None, ticket).tolist()


def test_the_way_back_begins_after_the_way_out_has_ended():
    assert run_ranks(1, back_at_once) == [[1.0] * 4]


def left_on_the_device() -> int:
    keeper = keeper_of("P_a+cpu", dist.group.WORLD)
    with peak_memory() as memory:
        for _ in range(LAYERS):
            keeper.keep(torch.ones(TOKENS, HIDDEN, dtype=torch.float64))
        for ticket in keeper.order:
            ticket.wait_out()
        gc.collect()
        return memory.current


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_offloaded_piece_leaves_the_device_when_its_copy_has_been_made(ranks):
    for left in run_ranks(ranks, left_on_the_device):
        assert left <= 8 * piece_of(ranks), "more than the piece whose copy was the last to be started"


# ------------------------------------------------------------------------------------------------------------- C_B


SIZES = (1000, 3, 0, 4097, 256, 1)  # elements of each tensor
BUFFERS = (256, 5357, 10_000)  # elements: smaller than a tensor, as large as all of them, larger


def reduced() -> list[tuple[list[Tensor], list[Tensor], int, int, float]]:
    group, rank, found = dist.group.WORLD, dist.get_rank(), []
    for numel in BUFFERS:
        torch.manual_seed(rank)
        through = [torch.randn(n, dtype=torch.float64) for n in SIZES]
        whole = [t.clone() for t in through]
        buffer = torch.empty(numel, dtype=torch.float64)
        with communication() as sent, peak_memory() as memory:
            messages = all_reduce_through(buffer, iter(through), group)
        assert sent.calls["all_reduce"] == messages
        assert all_reduce_fused(iter(whole), group) == 1
        found.append((through, whole, messages, memory.peak, sent.total))
    return found


def test_a_constant_buffer_gives_the_sums_of_one_large_message_in_the_fewest_messages():
    total = sum(SIZES)
    for found in run_ranks(3, reduced):
        for numel, (through, whole, messages, peak, sent) in zip(BUFFERS, found, strict=True):
            for got, want in zip(through, whole, strict=True):
                assert_same(got, want, 1e-12)
            assert messages == -(-total // numel)
            assert peak == 0  # nothing but the buffer, which was there before
            assert sent == pytest.approx(2 * 2 / 3 * 8 * total, rel=1e-12)


def fused_peak(numel: int) -> int:
    tensors = [torch.ones(numel), torch.ones(numel)]
    with peak_memory() as memory:
        all_reduce_fused(tensors, dist.group.WORLD)
    return memory.peak


def test_the_fused_version_needs_a_buffer_as_large_as_the_model():
    assert run_ranks(1, fused_peak, 5000)[0] >= 40_000


def what_is_refused() -> dict[str, str]:
    """By the words that have to be in what is said."""
    group, gaps = dist.group.WORLD, torch.ones(4, 4).t()[:, :2]
    keeper, narrow = (Offloaded(group, 1, 4, dtype) for dtype in (torch.float32, torch.bfloat16))
    mixture = [torch.ones(2), torch.ones(2, dtype=torch.int64)]
    said = {
        "too small for a checkpoint of 5": error_from(ValueError, keeper.keep, torch.ones(5)),
        "host buffer is torch.bfloat16, the tensor torch.float32": error_from(ValueError, narrow.keep, torch.ones(4)),
        "view": error_from(RuntimeError, all_reduce_through, torch.empty(8), [gaps], group),
        "copying would round": error_from(ValueError, all_reduce_fused, mixture, group),
    }
    keeper.keep(torch.ones(4))
    full = "host buffer of 1 checkpoints is full; give it one slot for each layer"
    said[full] = error_from(ValueError, keeper.keep, torch.ones(4))
    for buffer, dtype in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.int64),
        (torch.float32, torch.float64),
    ):
        large = 2**24 + 1 if dtype == torch.int64 else 1
        kept = [torch.full((3,), 257, dtype=dtype), torch.full((2,), large, dtype=dtype)]
        before = [t.clone() for t in kept]
        message = error_from(ValueError, all_reduce_through, torch.empty(4, dtype=buffer), kept, group)
        assert str(buffer) in message and str(dtype) in message
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True)), "refused, but changed before"
    said["a buffer of 0 elements"] = error_from(ValueError, all_reduce_through, torch.empty(0), [torch.ones(3)], group)
    return said


def test_what_would_round_has_gaps_or_no_room_is_refused_before_anything_is_sent():
    (said,) = run_ranks(1, what_is_refused, timeout=20)
    for words, message in said.items():
        assert words in message, f"{words}: {message}"


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
    for _ in range(2):  # the second step uses the arenas once more
        model.zero_grad()
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
    assert heap.allocate(5) == 0 and heap.free_blocks == [(5, 25)] and heap.top == 100


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


def test_an_arena_that_would_round_is_refused():
    arena = Arena(10, torch.bfloat16)
    with pytest.raises(ValueError, match="arena is torch.bfloat16, the tensor torch.float32: copying would round"):
        arena.hold(torch.ones(2))
    assert arena.used == 0
