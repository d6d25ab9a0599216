"""Claims about collectives.py: right results, exact bytes, no deadlock, one chunk of scratch, clear errors.

The reference is twofold: each collective's definition, written out in `definition` on what all ranks hold (exchanged by
torch.distributed), and torch.distributed's own collective, to which `collectives.compare` holds ours.
"""

import queue
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from unittest.mock import patch

import _wire
import collectives
import pytest
import torch
import torch.distributed as dist
from collectives import COLLECTIVES, bytes_sent, cost, place
from harness.meter import communication, peak_memory
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same

NUMELS = [0, 2, 7, 1000]
ALL_REDUCES = ["all_reduce_naive", "all_reduce_tree", "all_reduce_ring"]


def make(numel, dtype=torch.float64, seed=0):
    """Random values that differ between ranks; small whole numbers unless float64, so that every dtype is exact."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    if dtype == torch.float64:
        return torch.randn(numel, dtype=dtype, generator=generator)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def uneven(world, rank):
    """Splits of an all-to-all that are nothing like chunks: rank i sends (3i + 5j) mod 4 elements to rank j."""
    return [(3 * rank + 5 * to) % 4 for to in range(world)], [(3 * by + 5 * rank) % 4 for by in range(world)]


def ours(name, x, root, group, **op):
    """This rank's result of our collective, None where it gets none. An input that is not the output must survive."""
    rank, world = place(group)
    call, before = COLLECTIVES[name], x.clone()
    chunks, sizes = x.tensor_split(world), [chunk.numel() for chunk in x.tensor_split(world)]
    if name == "barrier":
        return call(group)
    if name.startswith(("broadcast", "reduce_naive", "reduce_tree")):
        call(x, root, group, **op)
        assert name != "reduce_naive" or rank == root or torch.equal(x, before), f"{name} changed x of rank {rank}"
        return x if name.startswith("broadcast") or rank == root else None
    if name.startswith("all_reduce"):
        call(x, group, **op)
        return x
    if name == "scatter":
        call(out := torch.empty_like(chunks[rank]), x if rank == root else None, root, group)
    elif name == "gather":
        call(out := torch.empty_like(x) if rank == root else None, chunks[rank], root, group)
    elif name == "all_gather":
        call(out := torch.empty_like(x), chunks[rank], group)
    elif name == "reduce_scatter":
        call(out := torch.empty_like(chunks[rank]), x, group, **op)
    elif name == "all_to_all":
        call(out := x.new_empty(world * sizes[rank]), x, group, [sizes[rank]] * world, sizes)
    assert torch.equal(x, before), f"{name} changed its input on rank {rank}"
    return out


def definition(name, everyone, rank, root, combine=sum):
    """What rank `rank` must hold, given what everyone holds."""
    pieces = [x.tensor_split(len(everyone)) for x in everyone]  # pieces[i][j]: chunk j of rank i
    total = combine(everyone)
    return {
        "broadcast": everyone[root],
        "reduce": total if rank == root else None,
        "scatter": pieces[root][rank],
        "gather": torch.cat([row[i] for i, row in enumerate(pieces)]) if rank == root else None,
        "all_gather": torch.cat([row[i] for i, row in enumerate(pieces)]),
        "reduce_scatter": total.tensor_split(len(everyone))[rank],
        "all_reduce": total,
        "all_to_all": torch.cat([row[rank] for row in pieces]),
        "barrier": None,
    }[name.removesuffix("_naive").removesuffix("_tree").removesuffix("_ring")]


def check_collective(name, x, root, group, tol, what=""):
    rank, world = place(group)
    everyone = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(everyone, x, group=group)
    want = definition(name, everyone, rank, root)
    assert_same(ours(name, x.clone(), root, group), want, tol, f"{name}{what}", dist.get_rank())
    off = collectives.compare(name, x, root, group)
    assert off <= tol, f"{name}{what} is off from torch.distributed by {off} on rank {dist.get_rank()}"


# ------------------------------------------------------------------------------------------------------------ results


def all_collectives():
    group = dist.group.WORLD
    cases = [(numel, torch.float64) for numel in NUMELS]
    cases += [(7, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)]
    for name in COLLECTIVES:
        for numel, dtype in cases:
            root = numel % dist.get_world_size()
            tol = 1e-10 if dtype == torch.float64 else 0.0
            check_collective(name, make(numel, dtype), root, group, tol, f" of {numel} {dtype} with root {root}")


def test_every_collective_equals_torch_distributed():
    run_ranks(3, all_collectives)


class Replay:
    """A world without processes: its ranks are threads, and a message waits in a queue, with a bit for each rank of
    which its sender has heard."""

    me = threading.local()

    def __init__(self, world):
        self.queues = [[queue.SimpleQueue() for _ in range(world)] for _ in range(world)]  # [from][to]
        self.heard = [1 << rank for rank in range(world)]

    def exchange(self, group, sends=(), receives=()):
        rank = self.me.rank
        for tensor, to in sends:
            self.queues[rank][to].put((tensor.clone(), self.heard[rank]))
        for into, by in receives:
            if into.numel():
                arrived, heard = self.queues[by][rank].get(timeout=20)
                into.copy_(arrived)
                self.heard[rank] |= heard


def replayed(pool, world, name, root):
    """What each rank has, and what it gets of a collective."""
    world_of_threads = Replay(world)

    def one_rank(rank):
        Replay.me.rank = rank
        x = make(world + 3)
        return x, ours(name, x.clone(), root, None)

    asked = {"get_rank": lambda _=None: Replay.me.rank, "get_world_size": lambda _=None: world}
    with patch.multiple(dist, **asked), patch.object(collectives, "exchange", world_of_threads.exchange):
        given, got = zip(*pool.map(one_rank, range(world)), strict=True)
    return given, got, world_of_threads.heard


@pytest.mark.always("to 17")
@pytest.mark.parametrize(
    "worlds", [(*range(1, 10), 12, 13, 16, 17), (10, 11, 14, 15, *range(18, 34), 64)], ids=["to 17", "to 64"]
)
def test_every_collective_is_right_for_any_number_of_ranks(worlds):
    with ThreadPoolExecutor(worlds[-1]) as pool:
        for world, name in product(worlds, COLLECTIVES):
            root = world // 3
            given, got, heard = replayed(pool, world, name, root)
            for rank in range(world):
                assert_same(got[rank], definition(name, given, rank, root), 1e-10, f"{name} of {world} ranks", rank)
            assert name != "barrier" or {*heard} == {2**world - 1}, f"of {world} ranks some have not heard of all"


def every_root():
    for root in range(dist.get_world_size()):
        for name in ("broadcast_naive", "broadcast_tree", "reduce_naive", "reduce_tree", "scatter", "gather"):
            check_collective(name, make(11), root, dist.group.WORLD, 1e-10, f" with root {root}")


def test_every_rank_can_be_the_root():
    run_ranks(5, every_root, timeout=10)


def written_wrong():
    rank = dist.get_rank()
    wrong = lambda out, *others: out is None or out.fill_(1e3)  # noqa: E731
    for name in [name for name in COLLECTIVES if name != "barrier"]:
        with patch.dict(COLLECTIVES, {name: wrong}):
            off = collectives.compare(name, make(7), 1, dist.group.WORLD)
        has_result = rank == 1 or not name.startswith(("reduce_naive", "reduce_tree", "gather"))
        assert (off > 100) == has_result, f"{name} that writes 1000 is said to be off by {off} on rank {rank}"


def test_a_collective_that_writes_something_else_is_found_by_the_demo_on_every_rank_with_a_result():
    run_ranks(2, written_wrong)


def slices():
    """Ranks [0, 2] and [1, 3] of 4 work at the same time, then [0, 1, 3] while rank 2 looks on."""
    even, odd, three = dist.new_group([0, 2]), dist.new_group([1, 3]), dist.new_group([0, 1, 3])
    mine = even if dist.get_rank() % 2 == 0 else odd
    for name in COLLECTIVES:
        check_collective(name, make(7), 1, mine, 1e-10, " in a slice")
        if dist.get_rank() != 2:
            check_collective(name, make(7), 2, three, 1e-10, " in a slice of three")
        else:
            with pytest.raises(ValueError, match="global rank 2 is not in this group"):
                ours(name, make(7), 0, three)


def test_every_collective_works_in_slices_of_the_world_whose_ranks_are_not_contiguous():
    run_ranks(4, slices)


def uneven_all_to_all():
    rank, world = place(dist.group.WORLD)
    sends, receives = uneven(world, rank)
    x = make(sum(sends))
    got, want = x.new_empty(sum(receives)), x.new_empty(sum(receives))
    with communication() as sent:
        collectives.all_to_all(got, x, dist.group.WORLD, receives, sends)
    dist.all_to_all_single(want, x, receives, sends)
    assert_same(got, want, 0.0, "all_to_all with uneven splits", rank)
    assert sent.sent["send"] == 8 * (sum(sends) - sends[rank])
    even, want = torch.empty(3 * world), torch.empty(3 * world)  # no splits: equal pieces
    collectives.all_to_all(even, make(3 * world, torch.float32), dist.group.WORLD)
    dist.all_to_all_single(want, make(3 * world, torch.float32))
    assert_same(even, want, 0.0, "all_to_all without splits", rank)


@pytest.mark.parametrize("world", [1, 3])
def test_all_to_all_sends_uneven_and_even_pieces(world):
    run_ranks(world, uneven_all_to_all)


def maximum():
    rank, world = place(dist.group.WORLD)
    x = make(7)
    everyone = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(everyone, x)
    for name in [*ALL_REDUCES, "reduce_naive", "reduce_tree", "reduce_scatter"]:
        want = definition(name, everyone, rank, 1, lambda tensors: torch.stack(tensors).amax(0))
        got = ours(name, x.clone(), 1, dist.group.WORLD, op=torch.maximum)
        assert_same(got, want, 0.0, f"the maximum by {name}", rank)


def test_reductions_take_another_operation_than_the_sum():
    run_ranks(3, maximum)


def random_float32():
    got = {}
    for name in ALL_REDUCES:
        x = torch.randn(8, 11, 13, generator=torch.Generator().manual_seed(dist.get_rank()))
        COLLECTIVES[name](x, dist.group.WORLD)
        got[name] = x
    return got


def test_all_ranks_end_an_all_reduce_with_the_same_bits():
    first, *others = run_ranks(4, random_float32)
    for name in ALL_REDUCES:
        for rank, got in enumerate(others, start=1):
            assert torch.equal(got[name], first[name]), f"{name}: rank {rank} has other bits than rank 0"


def parameters():
    rank = dist.get_rank()
    weight = torch.nn.Parameter(torch.full((3, 5), float(rank)))
    collectives.broadcast_tree(weight, 2, dist.group.WORLD)
    assert_same(weight, torch.full((3, 5), 2.0), 0.0, "the parameter", rank)
    collectives.all_reduce_ring(weight, dist.group.WORLD)
    assert_same(weight, torch.full((3, 5), 6.0), 0.0, "the sum of the parameters", rank)
    assert weight.requires_grad and weight.is_leaf


def test_a_parameter_keeps_its_shape_and_stays_a_leaf():
    run_ranks(3, parameters)


# ------------------------------------------------------------------------------------------------ bytes, rounds, memory


def count_bytes():
    rank, world = place(dist.group.WORLD)
    messages = {}
    for name in COLLECTIVES:
        for numel in NUMELS:
            x = make(numel, torch.bfloat16 if numel % 2 else torch.float64)
            root = 0 if "all_reduce" in name else numel % world
            with communication() as sent:
                ours(name, x, root, dist.group.WORLD)
            want, got = bytes_sent(name, numel, x.element_size(), world, rank, root), sent.sent["send"]
            assert got == want, f"{name} of {numel} {x.dtype}: rank {rank} sent {got} bytes, not {want}"
            assert set(sent.calls) <= {"send", "recv"}, f"{name} is not made of send and receive: {sent.calls}"
        messages[name] = sent.calls["send"]  # of the last case: 1000 elements, no chunk is empty
    return messages


@pytest.mark.always("3", "4")
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_every_rank_sends_exactly_the_bytes_of_the_formula_in_the_rounds_of_the_formula(world):
    ranks = run_ranks(world, count_bytes)
    for name in COLLECTIVES:
        rounds, _ = cost(name, world)
        # Into a root, one rank's messages are not the chain: count what the root receives. Down an all-reduce's tree
        # and through its root, half of the rounds are sent by the busiest rank and half are received.
        if name in ("reduce_naive", "gather"):
            assert sum(ranks[peer][name] for peer in range(world)) == rounds, name
        elif name == "reduce_tree":
            assert sum(ranks[peer][name] for peer in range(world)) == world - 1, name
        elif name in ("all_reduce_naive", "all_reduce_tree"):
            assert max(messages[name] for messages in ranks) == rounds // 2, name
        else:
            assert max(messages[name] for messages in ranks) == rounds, name


def test_the_formulas_give_the_papers_numbers():
    n = 4 * 1000
    assert [bytes_sent("all_reduce_ring", 1000, 4, 8, rank) for rank in range(8)] == [2 * 7 * n // 8] * 8
    assert [bytes_sent("broadcast_tree", 1000, 4, 8, rank) // n for rank in range(8)] == [3, 2, 1, 1, 0, 0, 0, 0]
    assert [bytes_sent("all_reduce_ring", 1, 4, 3, rank) // 4 for rank in range(3)] == [1, 2, 1]
    assert (cost("all_reduce_ring", 8), cost("all_reduce_tree", 8)) == ((14, 1.75), (6, 6))
    assert (cost("all_reduce_naive", 8), cost("barrier", 8)) == ((14, 14), (3, 0))
    assert cost("all_reduce_tree", 5) == (6, 6), "5 ranks take as many rounds as 8"
    for name in ("scatter", "all_gather", "reduce_scatter", "all_to_all", "broadcast_naive", "broadcast_tree"):
        busiest = max(bytes_sent(name, 1000, 4, 8, rank) for rank in range(8))
        assert cost({"scatter": "gather"}.get(name, name), 8)[1] * n == cost(name, 8)[1] * n == busiest, name
        assert "broadcast" not in name or cost(name.replace("broadcast", "reduce"), 8) == cost(name, 8)
    alpha, beta = 1e-5, 1e-10
    small, large = ({name: collectives.seconds(name, n, 8, alpha, beta) for name in ALL_REDUCES} for n in (100, 1e9))
    assert min(small, key=small.get) == "all_reduce_tree"
    assert min(large, key=large.get) == "all_reduce_ring"
    assert large["all_reduce_ring"] == pytest.approx(14 * alpha + 1.75 * 1e9 * beta)


@pytest.mark.prove
@pytest.mark.skipif(bool(_wire.why_not()), reason=f"counting real bytes: {_wire.why_not()}")
def test_the_operating_system_counts_the_bytes_of_the_formula_for_the_ring_and_for_torchs_all_reduce():
    counted, formula = _wire.count(3, 300_000), 2 * (3 - 1) * 4 * 300_000
    assert counted.keys() == {"all_reduce_ring", "all_reduce_tree", "all_reduce_naive", "torch"}
    for name, sent in counted.items():
        assert formula <= sent <= 1.05 * formula, f"{name}: {sent} bytes on the wire, {formula} by the formula"


def scratch():
    group, peaks = dist.group.WORLD, {}
    chunks = torch.zeros(1003, dtype=torch.float64).tensor_split(dist.get_world_size())
    for name in ("all_reduce_ring", "all_reduce_tree", "reduce_scatter", "all_gather", "broadcast_tree"):
        peaks[name] = []
        for _ in range(3):  # gloo's threads may hold a buffer a little longer: the smallest of three is ours
            x, mine = torch.ones(1003, dtype=torch.float64), torch.ones_like(chunks[dist.get_rank()])
            arguments = {
                "reduce_scatter": (mine, x, group),
                "all_gather": (x, mine, group),
                "broadcast_tree": (x, 0, group),
            }
            with peak_memory() as memory:
                COLLECTIVES[name](*arguments.get(name, (x, group)))
            peaks[name].append(memory.peak)
    return {name: min(peak) for name, peak in peaks.items()}


def test_the_ring_all_reduce_needs_one_chunk_of_scratch():
    chunk = 8 * 251  # the largest of 1003 elements in 4 chunks
    want = {"all_reduce_ring": chunk, "reduce_scatter": 2 * chunk, "all_gather": 0, "broadcast_tree": 0}
    for rank, peaks in enumerate(run_ranks(4, scratch)):
        assert {name: peaks[name] for name in want} == want, f"rank {rank}"
        assert peaks["all_reduce_tree"] == 8 * 1003
    assert run_ranks(1, scratch)[0] == dict.fromkeys(want, 0) | {"all_reduce_tree": 8 * 1003}


# ------------------------------------------------------------------------------------------------------------ deadlock


def rounds_of_the_ring():
    calls, exchange = Counter(), collectives.exchange

    def counted(group, sends=(), receives=()):
        calls[len(sends), len(receives)] += 1
        exchange(group, sends, receives)

    with patch.object(collectives, "exchange", counted):
        collectives.all_reduce_ring(make(64), dist.group.WORLD)
    return dict(calls)


def test_a_ring_step_posts_its_send_and_its_receive_together():
    assert run_ranks(4, rounds_of_the_ring, timeout=10) == [{(1, 1): 6}] * 4


def with_delays():
    """Random pauses before each round, and one rank that is always late; collectives follow each other directly."""
    rank, world = place(dist.group.WORLD)
    pauses, exchange = random.Random(rank), collectives.exchange

    def delayed(*args, **kwargs):
        time.sleep(pauses.random() * (0.006 if rank == 1 else 0.002))
        exchange(*args, **kwargs)

    order = random.Random(7).sample(sorted(COLLECTIVES) * 3, 3 * len(COLLECTIVES))  # the same on all ranks
    inputs = [make(10 * world + i % 3 - 1, seed=i) for i in range(len(order))]
    with patch.object(collectives, "exchange", delayed):
        got = [
            ours(name, x.clone(), i % world, dist.group.WORLD)
            for i, (name, x) in enumerate(zip(order, inputs, strict=True))
        ]
    for i, (name, x) in enumerate(zip(order, inputs, strict=True)):
        everyone = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(everyone, x)
        assert_same(got[i], definition(name, everyone, rank, i % world), what=f"{name}, number {i} in a row", rank=rank)


@pytest.mark.always("3")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_delays_neither_deadlock_nor_mix_up_collectives_that_follow_each_other(world):
    run_ranks(world, with_delays, timeout=30)


def late_arrivals():
    times = []
    for late in range(dist.get_world_size()):
        if dist.get_rank() == late:
            time.sleep(0.1)
        entered = time.monotonic()  # one clock for all processes of this machine
        collectives.barrier(dist.group.WORLD)
        times.append((entered, time.monotonic()))
    return times


def test_no_rank_leaves_a_barrier_before_the_last_one_has_entered():
    for late, times in enumerate(zip(*run_ranks(3, late_arrivals), strict=True)):
        entered, left = max(entered for entered, _ in times), min(left for _, left in times)
        assert left >= entered, f"a rank left {entered - left:.3f} s before rank {late} had entered"


def scatter_to_a_late_rank():
    rank, world = place(dist.group.WORLD)
    out, x = torch.empty(5), torch.arange(5.0 * world) if rank == 0 else None
    collectives.scatter(out, x, 0, dist.group.WORLD)  # ranks connect with their first message
    if rank == 1:
        time.sleep(0.5)
    entered = time.monotonic()
    collectives.scatter(out, x, 0, dist.group.WORLD)
    assert torch.equal(out, torch.arange(5.0) + 5 * rank)
    return entered, time.monotonic()


def test_a_scatter_posts_all_its_sends_so_that_a_late_rank_delays_no_other():
    times = run_ranks(4, scatter_to_a_late_rank)
    for rank in (2, 3):
        assert times[rank][1] < times[1][0], f"rank {rank} got its chunk after rank 1 had come at last"


# -------------------------------------------------------------------------------------------------------- bad arguments


def bad_arguments():
    group, rank = dist.group.WORLD, dist.get_rank()
    x, half = torch.zeros(6), torch.zeros(3)
    bad = {
        "root 2 is not a rank of a group of 2; use 0 to 1": lambda: collectives.broadcast_tree(x, 2, group),
        "root -1 is not a rank": lambda: collectives.reduce_naive(x, -1, group),
        "out has 6 elements": lambda: collectives.reduce_scatter(x.clone(), x, group),
        "tensor has 6 elements": lambda: collectives.all_gather(x.clone(), x, group),
        "torch.int32; it needs 3 of torch.float32": lambda: collectives.all_gather(x, half.int(), group),
        "5 elements do not divide among 2 ranks; give in_splits": lambda: collectives.all_to_all(x, x[:5], group),
        "in_splits .1, 2, 3. do not cut 6": lambda: collectives.all_to_all(x, x, group, None, [1, 2, 3]),
        "out_splits .5, 2. do not cut 6": lambda: collectives.all_to_all(x, x, group, [5, 2], [3, 3]),
        "in_splits .7, -1. do not cut 6": lambda: collectives.all_to_all(x, x, group, None, [7, -1]),
        "in_splits .. do not cut 6": lambda: collectives.all_to_all(x, x, group, None, []),
        "the piece of out from this rank": lambda: collectives.all_to_all(
            x, x, group, None, [4 - 2 * rank, 2 + 2 * rank]
        ),
    }
    if rank == 0:
        bad["out has 6 elements of"] = lambda: collectives.scatter(x.clone(), x, 0, group)
        bad["scatter needs the tensor, not None"] = lambda: collectives.scatter(half, None, 0, group)
        bad["gather needs a tensor to gather into"] = lambda: collectives.gather(None, half, 0, group)
        bad["tensor has 6 elements of"] = lambda: collectives.gather(x.clone(), x, 0, group)
    for message, call in bad.items():
        with communication() as sent, pytest.raises(ValueError, match=message) as error:
            call()
        assert not sent.calls, f"{message!r} was raised after something had been sent"
        assert "\n" not in str(error.value)


def test_bad_arguments_raise_one_clear_line_before_anything_is_sent():
    run_ranks(2, bad_arguments)


def not_contiguous():
    """The trap: reduce x.contiguous(), leave x as it was."""
    for name in [*ALL_REDUCES, "broadcast_naive", "broadcast_tree", "reduce_naive", "reduce_tree"]:
        x = torch.arange(6.0).view(2, 3).t()
        with pytest.raises(ValueError, match="not contiguous"):
            COLLECTIVES[name](x, *(() if name in ALL_REDUCES else (0,)), dist.group.WORLD)
        assert torch.equal(x, torch.arange(6.0).view(2, 3).t())
    whole = torch.zeros(12)
    others = [("scatter", whole, 0), ("all_gather", whole[:3]), ("reduce_scatter", whole), ("all_to_all", whole[:6])]
    others += [("gather", whole[:3], 0)] if dist.get_rank() == 0 else []  # its root, which refuses before it receives
    for name, *given in others:
        with pytest.raises(ValueError, match="not contiguous"):
            COLLECTIVES[name](torch.zeros(2, 3).t(), *given, dist.group.WORLD)


def test_a_tensor_that_is_not_contiguous_is_refused_not_silently_left_unreduced():
    run_ranks(2, not_contiguous)


# ----------------------------------------------------------------------------------------------------------- the script


@pytest.mark.parametrize("arguments", [["--numel", "-1"], ["--numel", "9" * 20], ["--numel", "x"], ["--nume", "3"]])
def test_a_bad_option_ends_with_one_line_before_any_process_group(arguments):
    assert arguments[0] in refusal(collectives.main, arguments)


def test_more_ranks_than_gpus_are_refused_and_do_not_fall_back_to_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert refusal(collectives.main) == "--nproc_per_node 4 is more than the 2 GPUs here"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: sys.exit(backend))
    for numel in (0, 10**9):  # neither is refused
        monkeypatch.setattr(sys, "argv", ["collectives.py", "--numel", str(numel)])
        with pytest.raises(SystemExit, match="^nccl$"):
            collectives.main()
