"""The ring and the three versions against a model that knows nothing of ranks, written a second time for this file."""

import contextlib
import importlib.util
import io
import shutil
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).with_name("in_depth")))

import data_parallel
import gradient_reducers
from data_parallel import (
    IGNORE,
    broadcast_weights,
    bucketed,
    count_targets,
    cut_into_buckets,
    hooked,
    make_batch,
    make_model,
    naive,
    overlapped,
    ring_all_reduce,
    train_step,
)
from harness.meter import communication, held_bytes, peak_memory
from harness.oracle import Trace, assert_same, assert_same_named, assert_same_trace, sgd_trace
from harness.ranks import run_ranks

LIMIT = 15.0  # seconds until a run that hangs is a failure
VERSIONS = {"naive": naive, "overlapped": overlapped, "bucketed": partial(bucketed, bucket_bytes=64 * 1024)}


def model_of(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return make_model().to(dtype)


def unsharded_loss(weights, tokens, labels):
    """The model once more, from its weights by name, and the mean over targets as PyTorch computes it."""
    x = weights["0.weight"][tokens]
    for layer in (1, 2):
        w = {name.removeprefix(f"{layer}."): p for name, p in weights.items() if name.startswith(f"{layer}.")}
        q, k, v = (norm(x, w["norm1.weight"]) @ w["qkv.weight"].T).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        x = x + (scores.softmax(-1) @ v) @ w["out.weight"].T
        x = x + F.gelu(norm(x, w["norm2.weight"]) @ w["up.weight"].T) @ w["down.weight"].T
    logits = norm(x, weights["3.weight"]) @ weights["0.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


def oracle_trace(ranks, seed=0, first_step=0):
    weights = {name: p.detach().clone().requires_grad_() for name, p in model_of(seed).named_parameters()}

    def backward(step):
        pairs = [pair for part in make_batch(first_step + step, ranks) for pair in part]
        loss = unsharded_loss(weights, *(torch.cat([pair[i] for pair in pairs]) for i in (0, 1)))
        loss.backward()
        return loss.item()

    return sgd_trace(weights, backward)


def replica_trace(version, group, seed=0, first_step=0) -> Trace:
    model = model_of(seed)

    def backward(step):
        batch = make_batch(first_step + step, dist.get_world_size(group))[dist.get_rank(group)]
        return train_step(model, batch, version, group).item()

    return sgd_trace(dict(model.named_parameters()), backward)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


class LateNetwork:
    """Stands in for dist.all_reduce. A sum appears when it is waited for, and not a moment earlier; until then its
    tensor holds NaN, so that whoever looks at it, or forgets to wait, is found out. Records what was asked for."""

    def __init__(self):
        self.events, self.real = [], dist.all_reduce

    def __call__(self, tensor, *args, async_op=False, **kwargs):
        if not async_op:
            return self.real(tensor, *args, **kwargs)
        number, under_way = sum(what == "launch" for what, _ in self.events), tensor.clone()
        self.events.append(("launch", number))
        work = self.real(under_way, *args, async_op=True, **kwargs)
        tensor.fill_(float("nan"))

        class Work:
            def wait(_):
                work.wait()
                tensor.copy_(under_way)
                self.events.append(("wait", number))

        return Work()


# ------------------------------------------------------------------------------------------------------------- the ring


def values(rank, numel, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.float64:
        return torch.randn(numel, dtype=dtype, generator=generator)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def ring_sums(cases):
    tensors = [values(dist.get_rank(), numel, dtype) for numel, dtype in cases]
    for x in tensors:
        ring_all_reduce(x, dist.group.WORLD)
    return tensors


def assert_are_sums(ranks, cases):
    for rank, tensors in enumerate(ranks):
        for (numel, dtype), x in zip(cases, tensors, strict=True):
            want = sum(values(r, numel, dtype) for r in range(len(ranks)))
            assert_same(x, want, 1e-14 if dtype == torch.float64 else 0.0, f"the sum of {numel} {dtype}", rank)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_ring_gives_every_rank_the_sum_of_any_number_of_elements(ranks):
    cases = [(numel, torch.float64) for numel in (0, 1, 2, 3, 7, 64, 1001)]
    cases += [(7, torch.bfloat16), (7, torch.int64)]
    assert_are_sums(run_ranks(ranks, ring_sums, cases, timeout=LIMIT), cases)


def ring_bytes(numel):
    x = torch.ones(numel, dtype=torch.float64)
    with communication() as sent:
        ring_all_reduce(x, dist.group.WORLD)
    return dict(sent.calls), sent.sent["send"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_sends_two_times_p_minus_one_over_p_of_its_tensor_in_as_many_messages(ranks):
    for calls, sent in run_ranks(ranks, ring_bytes, 1000, timeout=LIMIT):
        rounds = 2 * (ranks - 1)
        assert sent == rounds * 8 * 1000 // ranks
        assert calls == ({"send": rounds, "recv": rounds} if rounds else {}), "the ring is made of send and receive"


def test_with_fewer_elements_than_ranks_the_ring_sends_no_empty_message():
    results = run_ranks(4, ring_bytes, 2, timeout=LIMIT)
    assert sum(sent for _, sent in results) == 2 * 3 * 8 * 2
    assert sum(calls.get("send", 0) for calls, _ in results) == 2 * 3 * 2


def same_bits():
    x = torch.randn(1003, generator=torch.Generator().manual_seed(dist.get_rank()))
    ring_all_reduce(x, dist.group.WORLD)
    return x


def test_all_ranks_end_with_the_same_bits():
    first, *others = run_ranks(4, same_bits, timeout=LIMIT)
    for rank, got in enumerate(others, 1):
        assert torch.equal(got, first), f"rank {rank} has other bits than rank 0: replicas would drift apart"


def ring_with_gaps():
    x = torch.arange(6.0).view(2, 3).t()
    with pytest.raises(RuntimeError, match="view"):
        ring_all_reduce(x, dist.group.WORLD)


def test_a_tensor_with_gaps_is_refused_and_not_silently_left_unreduced():
    run_ranks(2, ring_with_gaps, timeout=LIMIT)


def ring_scratch():
    peaks = []
    for _ in range(3):  # gloo's threads may hold a buffer a little longer: the smallest of three is ours
        x = torch.ones(1000, dtype=torch.float64)
        with peak_memory() as memory:
            ring_all_reduce(x, dist.group.WORLD)
        peaks.append(memory.peak)
    return min(peaks)


def test_the_ring_needs_two_chunks_of_scratch_and_never_a_second_tensor():
    for rank, peak in enumerate(run_ranks(4, ring_scratch, timeout=LIMIT)):
        assert 0 < peak <= 2 * 8 * 250, f"rank {rank} allocates {peak} bytes"


def rings_with_a_late_rank(late, cases):
    """One rank is late in every round, and many all-reduces of different sizes follow each other directly."""
    real = dist.batch_isend_irecv

    def slow(*args):
        time.sleep(0.003 if dist.get_rank() == late else 0)
        return real(*args)

    with patch.object(dist, "batch_isend_irecv", slow):
        return ring_sums(cases)


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_is_late_in_every_round_mixes_up_nothing(late):
    cases = [(numel, torch.float64) for numel in (5, 17, 1, 5, 200)]
    assert_are_sums(run_ranks(3, rings_with_a_late_rank, late, cases, timeout=5), cases)


# ----------------------------------------------------------------------------------------------------------- the oracle


def all_versions():
    return {name: replica_trace(version, dist.group.WORLD) for name, version in VERSIONS.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_loss_gradients_and_weights_after_three_steps_equal_the_unsharded_model(ranks):
    want = oracle_trace(ranks)
    for rank, traces in enumerate(run_ranks(ranks, all_versions, timeout=LIMIT)):
        for got in traces.values():
            assert_same_trace(got, want, rank=rank)


def two_trainings():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    return {n: replica_trace(v, groups[mine], seed=mine, first_step=3 * mine) for n, v in VERSIONS.items()}


def test_two_slices_of_the_world_train_two_models_at_the_same_time():
    want = [oracle_trace(2, seed=mine, first_step=3 * mine) for mine in (0, 1)]
    for rank, traces in enumerate(run_ranks(4, two_trainings, timeout=LIMIT)):
        for got in traces.values():
            assert_same_trace(got, want[rank % 2], rank=rank)


def sums_in_a_slice(name):
    """Two parameters whose gradient is 10 ** rank, in the groups 0, 2 and 1."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    parameters = {str(n): nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (5, 2)}
    with VERSIONS[name](list(parameters.values()), groups[rank % 2]):
        sum(10.0**rank * p.sum() for p in parameters.values()).backward()
    return {n: p.grad.clone() for n, p in parameters.items()}


@pytest.mark.parametrize("name", VERSIONS)
def test_every_version_sums_over_the_given_group_only(name):
    for rank, got in enumerate(run_ranks(3, sums_in_a_slice, name, timeout=5)):
        total = 1.0 + 100.0 if rank % 2 == 0 else 10.0
        want = {str(n): torch.full((n,), total, dtype=torch.float64) for n in (5, 2)}
        assert_same_named(got, want, what="gradient of the parameter of size", rank=rank)


def beside_in_depth():
    group, batch = dist.group.WORLD, make_batch(0, dist.get_world_size())[dist.get_rank()]
    options = {"bucketed": {"bucket_bytes": 64 * 1024}}
    results = {}
    for name, version in VERSIONS.items():
        here, there = model_of(), model_of()
        reducer = gradient_reducers.VERSIONS[name](there, group, **options.get(name, {}))
        losses = train_step(here, batch, version, group), gradient_reducers.train_step(there, reducer, batch)
        results[name] = (*(loss.item() for loss in losses), gradients(here), gradients(there))
    return results


def test_the_ground_floor_and_in_depth_agree_on_loss_and_every_gradient():
    for rank, results in enumerate(run_ranks(3, beside_in_depth, timeout=LIMIT)):
        for name, (loss, their_loss, got, theirs) in results.items():
            assert_same(loss, their_loss, 1e-13, f"{name}, the loss", rank)
            assert_same_named(got, theirs, 1e-13, f"{name}, gradient of", rank)


def error_of(model, exact):
    squares = [(p.grad.double() - exact[name]).square().sum() for name, p in model.named_parameters()]
    return torch.stack(squares).sum().sqrt().item()


def in_bfloat16():
    """Distance of bf16 gradients from those of float64: of this parallel run, and of one process with all batches."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    batch = make_batch(0, ranks)
    exact, dense, parallel = model_of(dtype=torch.bfloat16).double(), model_of(dtype=torch.bfloat16), {}
    for model in (exact, dense):
        for tokens, labels in (pair for part in batch for pair in part):
            targets = sum((labels != IGNORE).sum() for part in batch for _, labels in part)
            (data_parallel.loss_sum(model, tokens, labels) / targets).backward()
    want = gradients(exact)
    for name, version in VERSIONS.items():
        model = model_of(dtype=torch.bfloat16)
        train_step(model, batch[dist.get_rank()], version, group)
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        parallel[name] = error_of(model, want)
    return error_of(dense, want), parallel


def test_bfloat16_gradients_are_at_most_half_as_far_again_from_float64_as_those_of_one_process():
    for dense, parallel in run_ranks(4, in_bfloat16, timeout=LIMIT):
        for name, error in parallel.items():
            assert error <= 1.5 * dense, f"{name}: {error:.3g}, one process {dense:.3g}"


# ---------------------------------------------------------------------------------------------- the loss, and the start


def counts():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    labels = torch.tensor([[rank, IGNORE, 7], [IGNORE, IGNORE, 0]])
    batch = [(labels, labels[:1]), (labels, labels)] if rank == 2 else [(labels, labels[:1])]
    before = labels.clone()
    numbers = int(count_targets(batch, dist.group.WORLD)), int(count_targets(batch, groups[rank % 2]))
    with communication() as sent:
        none = count_targets([(labels, torch.full((2, 2), IGNORE))], dist.group.WORLD)
    assert dict(sent.payload) == {"all_reduce": 8}, f"{dict(sent.payload)}: one message of 8 bytes is enough"
    assert torch.equal(labels, before), "labels are read only"
    return *numbers, int(none)


def test_targets_are_counted_over_all_micro_batches_and_over_the_given_group_only():
    assert run_ranks(3, counts, timeout=LIMIT) == [(9, 7, 1), (9, 2, 1), (9, 7, 1)]


def one_step():
    model, ranks = model_of(), dist.get_world_size()
    batch = make_batch(0, ranks)[dist.get_rank()]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = train_step(model, batch, VERSIONS["bucketed"], dist.group.WORLD).item()
    untouched = all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    return loss, gradients(model), sum((labels != IGNORE).sum().item() for _, labels in batch), untouched


def test_the_gradients_are_those_of_the_loss_that_is_returned_and_a_rank_without_a_target_gives_no_nan():
    want, results = oracle_trace(3), run_ranks(3, one_step, timeout=LIMIT)
    assert [targets for _, _, targets, _ in results] == [128, 64, 0], "the ranks must differ, or nothing is shown"
    for rank, (loss, got, _, untouched) in enumerate(results):
        assert_same(loss, want.losses[0], what="the loss", rank=rank)
        assert_same_named(got, want.gradients[0], what="gradient of", rank=rank)
        assert untouched, f"rank {rank}: a reduction changes gradients, and never weights"


def broadcast_in_a_slice():
    rank = dist.get_rank()
    model = model_of(seed=rank)
    model[1].up.weight.requires_grad_(False)
    model.register_buffer("places", torch.tensor([rank, 7]))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    slices = [dist.new_group([0]), dist.new_group([1, 3]), dist.new_group([2])]
    broadcast_weights(model, slices[0 if rank == 0 else 2 if rank == 2 else 1])
    return before, {name: t.clone() for name, t in model.state_dict().items()}


def test_other_first_weights_buffers_and_frozen_weights_are_healed_by_the_broadcast():
    befores, afters = zip(*run_ranks(4, broadcast_in_a_slice, timeout=LIMIT), strict=True)
    assert not torch.equal(befores[1]["1.up.weight"], befores[3]["1.up.weight"]), "or nothing is shown"
    for rank, root in ((0, 0), (1, 1), (2, 2), (3, 1)):
        assert_same_named(afters[rank], befores[root], tol=0, what="after the broadcast,", rank=rank)


# ------------------------------------------------------------------------------------------------------ order and waits


def late_network():
    """One step on a network that delivers at the wait: the order of gradients, launches and waits, and the sums."""
    results = {}
    for name in ("overlapped", "bucketed"):
        model, network = model_of(), LateNetwork()
        parameters = list(model.parameters())
        note = partial(lambda events, _: events.append(("ready", 0)), network.events)
        with patch.object(dist, "all_reduce", network), hooked(parameters, note):
            batch = make_batch(0, dist.get_world_size())[dist.get_rank()]
            train_step(model, batch, VERSIONS[name], dist.group.WORLD)
        last = len(parameters)  # the first micro-batch: its gradients stay here
        assert all(what == "ready" for what, _ in network.events[:last])
        results[name] = network.events[last:], gradients(model)
    return results


def test_a_sum_that_arrives_only_when_it_is_waited_for_is_there_after_the_step():
    want = oracle_trace(2).gradients[0]
    for rank, results in enumerate(run_ranks(2, late_network, timeout=LIMIT)):
        for name, (_, got) in results.items():
            assert_same_named(got, want, what=f"{name}, gradient of", rank=rank)


def test_every_message_but_the_last_leaves_before_backward_has_ended():
    sizes = {name: p.nbytes for name, p in model_of().named_parameters()}
    buckets = cut_into_buckets(list(model_of().parameters()), 64 * 1024)
    for results in run_ranks(2, late_network, timeout=LIMIT):
        for name, messages in (("overlapped", len(sizes)), ("bucketed", len(buckets))):
            whats = [what for what, _ in results[name][0]]
            last_ready = len(whats) - 1 - whats[::-1].index("ready")
            assert whats.count("launch") == messages == whats.count("wait")
            assert whats[:last_ready].count("launch") == messages - 1, f"{name}: {whats}"
            assert whats.index("wait") > last_ready, f"{name} waits while backward could go on: {whats}"


def naive_order():
    model, watch = model_of(), data_parallel.Watch()
    with watch, hooked(list(model.parameters()), lambda _: watch.events.append(("ready", 0))):
        train_step(model, make_batch(0, 2)[dist.get_rank()], naive, dist.group.WORLD)
    return [what for what, _ in watch.events if what != "all-reduce"]  # of N and of the loss


def test_naive_sends_nothing_before_backward_has_ended():
    for events in run_ranks(2, naive_order, timeout=LIMIT):
        assert events == ["ready"] * 28 + ["send"] * 28  # 14 parameters: two micro-batches; two rounds on two ranks


def another_order_on_each_rank():
    """Four parameters of one size; rank 0 uses them in one order, rank 1 in the other. The slow rank starts late."""
    rank = dist.get_rank()
    time.sleep(0.1 * rank)
    parameters = [nn.Parameter(torch.full((7,), 2.0**i)) for i in range(4)]
    used = parameters if rank == 0 else parameters[::-1]
    x = torch.full((7,), rank + 1.0)
    for p in used:
        x = x * p
    with bucketed(parameters, dist.group.WORLD, bucket_bytes=28):
        x.sum().backward()
    return {str(i): p.grad.clone() for i, p in enumerate(parameters)}


def test_buckets_of_one_size_are_not_mixed_up_when_ranks_complete_their_gradients_in_different_orders():
    product = 1.0 * 2 * 4 * 8
    want = {str(i): torch.full((7,), (1 + 2) * product / 2.0**i) for i in range(4)}
    for rank, got in enumerate(run_ranks(2, another_order_on_each_rank, timeout=LIMIT)):
        assert_same_named(got, want, tol=1e-6, what="gradient", rank=rank)


def the_second_bucket_is_full_first():
    """Parameters 3, 2, 1, 0 are one bucket each, in this order; backward completes 2 before 3, then 1, then 0."""
    parameters, network = [nn.Parameter(torch.ones(7)) for _ in range(4)], LateNetwork()
    x = torch.ones(7)
    for i in (0, 1, 3, 2):
        x = x * parameters[i]
    note = partial(lambda events, numbers, p: events.append(("ready", numbers[p])), network.events)
    numbers = {p: i for i, p in enumerate(parameters)}
    with patch.object(dist, "all_reduce", network), hooked(parameters, partial(note, numbers)):  # noqa: SIM117
        with bucketed(parameters, dist.group.WORLD, bucket_bytes=28):
            x.sum().backward()
    return [f"{what} {number}" for what, number in network.events if what != "wait"]


def test_every_bucket_that_may_leave_leaves_at_once():
    want = ["ready 2", "ready 3", "launch 0", "launch 1", "ready 1", "launch 2", "ready 0", "launch 3"]
    assert run_ranks(1, the_second_bucket_is_full_first, timeout=LIMIT) == [want]


def unused_on_one_rank(name):
    """Two branches: rank 0 uses one, rank 1 the other, nobody the third; twice, so that leftovers would show."""
    torch.manual_seed(0)
    branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double()
    version = {"naive": naive, "bucketed": partial(bucketed, bucket_bytes=100)}[name]
    for _ in range(2):
        branches.zero_grad()
        with version(list(branches.parameters()), dist.group.WORLD):
            branches[dist.get_rank()](torch.ones(1, 3).double()).square().sum().backward()
    return gradients(branches)


@pytest.mark.parametrize("name", ["naive", "bucketed"])
def test_a_parameter_that_a_rank_did_not_use_gets_the_sum_of_the_others(name):
    torch.manual_seed(0)
    branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double()
    for branch in branches[:2]:
        branch(torch.ones(1, 3).double()).square().sum().backward()
    want = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in branches.named_parameters()}
    for rank, got in enumerate(run_ranks(2, unused_on_one_rank, name, timeout=5)):
        assert_same_named(got, want, what="gradient of", rank=rank)


def after_an_error():
    model, group = model_of(), dist.group.WORLD
    parameters = list(model.parameters())
    for version in VERSIONS.values():
        with contextlib.suppress(MemoryError), version(parameters, group):
            raise MemoryError("as if forward had run out of memory, on all ranks")
    with communication() as sent:
        train_step(model, make_batch(0, 2)[dist.get_rank()], VERSIONS["bucketed"], group)
    return sent.calls["all_reduce"], gradients(model)


def test_after_an_error_nothing_is_left_behind_and_the_next_step_is_right():
    want = oracle_trace(2).gradients[0]
    for rank, (calls, got) in enumerate(run_ranks(2, after_an_error, timeout=LIMIT)):
        assert calls == 3 + 2, "three buckets, N and the loss: no hook of an earlier block sends a second time"
        assert_same_named(got, want, what="gradient of", rank=rank)


# ----------------------------------------------------------------------------------------------------- bytes and memory


def bytes_of_a_step(micro_batches):
    results = {}
    for name, version in VERSIONS.items():
        model = model_of()
        with communication() as sent:
            for i in range(micro_batches):
                tokens, labels = make_batch(i, dist.get_world_size())[dist.get_rank()][0]
                with version(list(model.parameters()), dist.group.WORLD) if i == micro_batches - 1 else nullcontext():
                    data_parallel.loss_sum(model, tokens, labels).backward()
        results[name] = dict(sent.calls), sent.total
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_sent_equal_the_formula_and_do_not_depend_on_the_number_of_micro_batches(ranks):
    size = sum(p.nbytes for p in model_of().parameters())
    messages = {"overlapped": {"all_reduce": 14}, "bucketed": {"all_reduce": 3}}
    for micro_batches in (1, 3):
        results = run_ranks(ranks, bytes_of_a_step, micro_batches, timeout=LIMIT)
        for name in VERSIONS:
            assert round(sum(result[name][1] for result in results)) == 2 * (ranks - 1) * size, name
            for calls, _ in (result[name] for result in results):
                assert name == "naive" or calls == messages[name]


def watched_train_step():
    model = model_of()
    with communication() as sent:
        train_step(model, make_batch(0, 2)[dist.get_rank()], VERSIONS["bucketed"], dist.group.WORLD)
    return sent.calls["all_reduce"]


def test_a_step_of_two_micro_batches_sends_its_gradients_once():
    assert run_ranks(2, watched_train_step, timeout=LIMIT) == [3 + 2] * 2  # three buckets, N and the loss


def memory_of_bucketed(bucket_bytes):
    """Four parameters of 800 bytes in buckets: gradients held after the step, the peak, and after zero_grad."""
    parameters, peaks = [nn.Parameter(torch.ones(100, dtype=torch.float64)) for _ in range(4)], []
    for _ in range(3):  # gloo's threads may hold a buffer a little longer
        with peak_memory() as memory:
            with bucketed(parameters, dist.group.WORLD, bucket_bytes):
                sum(p.sum() for p in parameters).backward()
            held, storages = held_bytes(parameters).gradients, {p.grad.untyped_storage().data_ptr() for p in parameters}
            views = all(p.grad._base is not None and p.grad.is_contiguous() for p in parameters)
            for p in parameters:
                p.grad = None
        peaks.append((memory.peak, memory.current))
    return held, len(storages), views, min(peaks)


def test_the_gradients_are_views_of_their_buckets_and_one_bucket_more_is_the_peak():
    for held, storages, views, (peak, left) in run_ranks(2, memory_of_bucketed, 1600, timeout=LIMIT):
        assert (held, storages, views) == (3200, 2, True), "p.grad lives in the flat tensor that was sent"
        assert 3200 + 1600 <= peak < 3200 + 1600 + 100, peak  # a few scalars of the loss
        assert left <= 16, "zero_grad frees the buckets: nobody else may hold them during the next forward"


def test_a_parameter_that_is_a_bucket_of_its_own_is_sent_without_a_copy():
    for held, storages, _, (peak, left) in run_ranks(2, memory_of_bucketed, 800, timeout=LIMIT):
        assert (held, storages) == (3200, 4)
        assert 3200 <= peak < 3200 + 100, peak  # a few scalars of the loss
        assert left <= 16


def test_buckets_are_cut_like_those_of_in_depth_hold_one_dtype_and_large_parameters_are_alone():
    parameters = list(model_of().parameters())
    for size in (1, 64 * 1024, 10**9):  # a parameter of 5000 bytes is alone here, and not there
        got = run_ranks(1, cuts_of_both, size, timeout=LIMIT)[0]
        assert got[0] == got[1]
    half = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)]
    assert [len(bucket) for bucket in cut_into_buckets(half, 10**6)] == [2, 1]
    buckets = cut_into_buckets(parameters, 5000)
    assert sorted(map(id, (p for bucket in buckets for p in bucket))) == sorted(map(id, parameters))
    assert all(len(bucket) == 1 for bucket in buckets if any(p.nbytes >= 5000 for p in bucket))
    place = {id(p): -i for i, p in enumerate(parameters)}
    last = [max(place[id(p)] for p in bucket) for bucket in buckets[:-1]]
    assert last == sorted(last), "a bucket leaves when its last gradient is there, so this is the order of all"


def cuts_of_both(size):
    model = model_of()
    names = {p: name for name, p in model.named_parameters()}
    reducer = gradient_reducers.BucketedReducer(model, dist.group.WORLD, bucket_bytes=size)
    return [
        [[names[p] for p in bucket] for bucket in buckets]
        for buckets in (cut_into_buckets(list(names), size), reducer.buckets)
    ]


def frozen_and_tied():
    model = model_of()
    model[1].up.weight.requires_grad_(False)
    with communication() as sent:
        train_step(model, make_batch(0, 2)[dist.get_rank()], overlapped, dist.group.WORLD)
    return sent.calls["all_reduce"], model[1].up.weight.grad is None


def test_a_tied_parameter_is_sent_once_and_a_frozen_one_never():
    assert run_ranks(2, frozen_and_tied, timeout=LIMIT) == [(13 + 2, True)] * 2


# ----------------------------------------------------------------------------------------------------------- the script


def alone(folder):
    """The script, imported from a folder where nothing else lies, with nothing of this repository on the path."""
    repository = str(Path(__file__).resolve().parents[1])
    sys.path[:] = [folder, *(p for p in sys.path if not p.startswith(repository) or "site-packages" in p)]
    spec = importlib.util.spec_from_file_location("copied", f"{folder}/data_parallel.py")
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    said, versions = io.StringIO(), (copied.naive, copied.overlapped, partial(copied.bucketed, bucket_bytes=64 * 1024))
    with contextlib.redirect_stdout(said):
        wrong = [copied.prove(version, dist.group.WORLD, torch.device("cpu")) for version in versions]
    return wrong, [line.split()[0] for line in said.getvalue().splitlines()]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_copied_alone_it_proves_all_three_versions(ranks, tmp_path):
    shutil.copy(Path(__file__).with_name("data_parallel.py"), tmp_path)
    for rank, (wrong, rows) in enumerate(run_ranks(ranks, alone, str(tmp_path), timeout=2 * LIMIT)):
        assert wrong == [[], [], []]
        assert rows == (list(VERSIONS) if rank == 0 else [])


def nan_in_the_weights():
    def broken(model, group):
        next(model.parameters()).data[0, 0] = float("nan")

    with patch.object(data_parallel, "broadcast_weights", broken), contextlib.redirect_stdout(io.StringIO()):
        return data_parallel.prove(VERSIONS["bucketed"], dist.group.WORLD, torch.device("cpu"))


def test_nan_is_not_a_pass():
    for wrong in run_ranks(2, nan_in_the_weights, timeout=LIMIT):
        assert any("off by nan" in line for line in wrong)


@pytest.mark.parametrize("option", [["--bucket-kib", "0"], ["--bucket-kib", "-3"], ["--bucket-kib", "nan"], ["--ring"]])
def test_a_bad_option_is_one_line_that_names_it_before_any_process_group(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["data_parallel.py", *option])
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as end:
        data_parallel.main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert said.err.startswith("data_parallel.py: ") and said.err.count("\n") == 1 and option[0] in said.err


def test_more_ranks_than_gpus_are_refused_and_do_not_fall_back_to_gloo(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["data_parallel.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as end:
        data_parallel.main()
    assert end.value.code == 2 and "--nproc_per_node 4: there are 2 GPUs here; use 2 or less" in capsys.readouterr().err
