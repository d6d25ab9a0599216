"""The ring and the three forms of gradient synchronization, against a model written a second time for this file."""

import contextlib
import io
import sys
import time
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise, product
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
    IGNORE_INDEX,
    broadcast_params,
    bucketed,
    build_buckets,
    build_model,
    count_valid_tokens,
    get_batch,
    grad_hooks,
    naive,
    overlapped,
    ring_all_reduce,
    train_step,
)
from harness.late import Late
from harness.meter import communication, held_bytes, peak_memory
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_named, assert_same_traces, sgd_trace

LIMIT = 15.0  # seconds until a run that hangs is a failure
FORMS = {"naive": naive, "overlapped": overlapped, "bucketed": partial(bucketed, bucket_bytes=64 * 1024)}


def seeded_model(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return build_model().to(dtype)


def local_batch(step, group=None):
    """Tokens and labels [M, B, S] of this rank; the labels lie in memory column by column."""
    tokens, labels = get_batch(step, dist.get_world_size(group))
    rank = dist.get_rank(group)
    return tokens[rank], labels[rank].mT.contiguous().mT


def reference_loss(params, tokens, labels):
    """The model once more, from its parameters by name, and the mean over valid tokens as PyTorch computes it."""
    x = params["0.weight"][tokens]
    for layer in (1, 2):
        w = {name.removeprefix(f"{layer}."): p for name, p in params.items() if name.startswith(f"{layer}.")}
        q, k, v = (rms_norm(x, w["attn_norm.weight"]) @ w["qkv_proj.weight"].T).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        x = x + (scores.softmax(-1) @ v) @ w["o_proj.weight"].T
        x = x + F.gelu(rms_norm(x, w["mlp_norm.weight"]) @ w["up_proj.weight"].T) @ w["down_proj.weight"].T
    logits = rms_norm(x, params["3.weight"]) @ params["0.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


def reference_trace(world_size) -> Trace:
    params = {name: p.detach().clone().requires_grad_() for name, p in seeded_model().named_parameters()}

    def backward(step):
        tokens, labels = get_batch(step, world_size)
        loss = reference_loss(params, tokens.flatten(0, 2), labels)
        loss.backward()
        return loss.item()

    return sgd_trace(params, backward)


def parallel_trace(grad_sync, group) -> Trace:
    model = seeded_model()

    def backward(step):
        return train_step(model, *local_batch(step, group), grad_sync, group).item()

    return sgd_trace(dict(model.named_parameters()), backward)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_no_gradients_overlap(params):
    """Two gradients that share an element would be clipped twice. A whole storage may be shared: that is a bucket."""
    spans = sorted((p.grad.data_ptr(), p.grad.data_ptr() + p.grad.nbytes) for p in params)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), spans


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
            expected = sum(values(r, numel, dtype) for r in range(len(ranks)))
            assert_same(x, expected, 1e-14 if dtype == torch.float64 else 0.0, f"the sum of {numel} {dtype}", rank)
            assert torch.equal(x, ranks[0][cases.index((numel, dtype))]), f"rank {rank} has other bits than rank 0"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ring_gives_every_rank_the_same_sum(world_size):
    cases = [(numel, torch.float64) for numel in (7, 0, 1, 2, 3, 64, 1001)]
    cases += [(7, torch.bfloat16), (7, torch.int64)]
    assert_are_sums(run_ranks(world_size, ring_sums, cases, timeout=LIMIT), cases)


def ring_bytes(numel):
    x = torch.ones(numel, dtype=torch.float64)
    with communication() as sent:
        ring_all_reduce(x, dist.group.WORLD)
    return dict(sent.calls), sent.sent["send"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ring_sends_the_bytes_of_its_formula(world_size):
    for calls, sent in run_ranks(world_size, ring_bytes, 999, timeout=LIMIT):
        steps = 2 * (world_size - 1)
        assert sent == steps * 8 * 999 // world_size
        assert calls == ({"send": steps, "recv": steps} if steps else {}), "the ring is made of send and receive"


def test_ring_sends_no_empty_chunk():
    results = run_ranks(4, ring_bytes, 2, timeout=LIMIT)  # fewer elements than ranks
    assert sum(sent for _, sent in results) == 2 * 3 * 8 * 2
    assert sum(calls.get("send", 0) for calls, _ in results) == 2 * 3 * 2


def ring_limits():
    """The scratch memory of the ring, and what it does with a tensor with gaps."""
    with pytest.raises(RuntimeError, match="view"):
        ring_all_reduce(torch.arange(6.0).view(2, 3).t(), dist.group.WORLD)
    peaks = []
    for _ in range(3):  # Gloo's threads may hold a buffer a little longer: the smallest of three is the ring's
        x = torch.ones(1000, dtype=torch.float64)
        with peak_memory() as memory:
            ring_all_reduce(x, dist.group.WORLD)
        peaks.append(memory.peak)
    return min(peaks)


def test_ring_refuses_gaps_and_needs_two_chunks_of_scratch():
    for rank, peak in enumerate(run_ranks(4, ring_limits, timeout=LIMIT)):
        assert 0 < peak <= 2 * 8 * 250, f"rank {rank} allocates {peak} bytes"


def rings_with_a_slow_rank(slow, cases):
    """One rank is late in every step, and many all-reduces of different sizes follow each other directly."""
    real = dist.batch_isend_irecv

    def late(*args):
        time.sleep(0.003 if dist.get_rank() == slow else 0)
        return real(*args)

    with patch.object(dist, "batch_isend_irecv", late):
        return ring_sums(cases)


@pytest.mark.parametrize("slow", [0, 2])
def test_ring_is_right_with_a_slow_rank(slow):
    cases = [(numel, torch.float64) for numel in (5, 17, 1, 6, 200)]
    assert_are_sums(run_ranks(3, rings_with_a_slow_rank, slow, cases, timeout=5), cases)


# ----------------------------------------------------------------------------------------------------- the reference


def all_forms():
    return {name: parallel_trace(grad_sync, dist.group.WORLD) for name, grad_sync in FORMS.items()}


@pytest.mark.always("3")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_gradients_and_parameters_match_the_reference(world_size):
    assert_same_traces(run_ranks(world_size, all_forms, timeout=LIMIT), reference_trace(world_size))


def sums_in_a_group(name):
    """Two parameters whose gradient is 10 ** rank; ranks 0 and 2 are a group, and rank 1 is one alone."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    params = {str(n): nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (5, 2)}
    with FORMS[name](list(params.values()), groups[rank % 2]):
        sum(10.0**rank * p.sum() for p in params.values()).backward()
    return {n: p.grad.clone() for n, p in params.items()}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_summed_over_the_given_group_only(name):
    for rank, grads in enumerate(run_ranks(3, sums_in_a_group, name, timeout=5)):
        total = 1.0 + 100.0 if rank % 2 == 0 else 10.0
        expected = {str(n): torch.full((n,), total, dtype=torch.float64) for n in (5, 2)}
        assert_same_named(grads, expected, what="gradient of the parameter of size", rank=rank)


def sums_of_a_transposed_weight():
    found, weighted = [], []
    for grad_sync in (overlapped, bucketed):  # the ring refuses a tensor that is not contiguous
        p = nn.Parameter(torch.ones(2, 3).T)
        with grad_sync([p], dist.group.WORLD):
            p.sum().backward()
        found.append(p.grad.unique().tolist())
        weights = [nn.Parameter(torch.ones(2, 3).T), nn.Parameter(torch.ones(2))]  # in one bucket
        with grad_sync(weights, dist.group.WORLD):
            ((weights[0] * torch.arange(6.0).view(3, 2)).sum() + weights[1].sum()).backward()
        weighted.append(weights[0].grad.tolist())
    return found, weighted


def test_the_sum_of_a_transposed_weight_arrives_in_its_gradient():
    sums, weighted = map(list, zip(*run_ranks(2, sums_of_a_transposed_weight), strict=True))
    assert sums == [[[2.0], [2.0]]] * 2
    assert weighted == [[[[0, 2], [4, 6], [8, 10]]] * 2] * 2, "each element stays in its place"


def error_of(model, exact):
    squares = [(p.grad.double() - exact[name]).square().sum() for name, p in model.named_parameters()]
    return torch.stack(squares).sum().sqrt().item()


def in_bfloat16():
    """Distance of bf16 gradients from those of float64: of this parallel run, and of one process with all batches."""
    tokens, labels = get_batch(0, dist.get_world_size())
    exact, dense, parallel = seeded_model(dtype=torch.bfloat16).double(), seeded_model(dtype=torch.bfloat16), {}
    for model in (exact, dense):
        for x, y in zip(tokens.flatten(0, 1), labels.flatten(0, 1), strict=True):
            (data_parallel.loss_sum(model(x), y) / (labels != IGNORE_INDEX).sum()).backward()
    expected = gradients(exact)
    for name, grad_sync in FORMS.items():
        model = seeded_model(dtype=torch.bfloat16)
        train_step(model, *local_batch(0), grad_sync, dist.group.WORLD)
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        parallel[name] = error_of(model, expected)
    return error_of(dense, expected), parallel


def test_bf16_gradients_are_as_close_to_float64_as_those_of_one_process():
    for dense, parallel in run_ranks(3, in_bfloat16, timeout=LIMIT):
        for name, error in parallel.items():
            assert error <= 1.5 * dense, f"{name}: {error:.3g}, one process {dense:.3g}"


# ---------------------------------------------------------------------------------------------------- the training step


def counts():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    labels = torch.tensor([[[rank, IGNORE_INDEX, 7]], [[IGNORE_INDEX, IGNORE_INDEX, 0]]])  # [M, B, S]
    if rank == 2:
        labels = torch.cat([labels, labels[:1]])
    before = labels.clone()
    asked = {"world": dist.group.WORLD, "group": groups[rank % 2]}
    found = {name: count_valid_tokens(labels, group) for name, group in asked.items()}
    with communication() as sent:
        found["none"] = count_valid_tokens(torch.full((2, 2, 2), IGNORE_INDEX), dist.group.WORLD)
    assert torch.equal(labels, before), "labels are read only"
    return {name: int(count) for name, count in found.items()}, dict(sent.payload)


def test_valid_tokens_are_counted_over_all_micro_batches_of_the_group():
    results = run_ranks(3, counts, timeout=LIMIT)
    for _, payload in results:
        assert payload == {"all_reduce": 8}, f"{payload}: one message of 8 bytes is enough"
    assert [numbers for numbers, _ in results] == [{"world": 11, "group": n, "none": 1} for n in (8, 3, 8)]


def one_step():
    model = seeded_model()
    tokens, labels = local_batch(0)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    with communication() as sent:
        loss = train_step(model, tokens, labels, FORMS["bucketed"], dist.group.WORLD)
    assert sent.calls["all_reduce"] == 3 + 2, "three buckets, num_valid and the loss, once for both micro-batches"
    assert_no_gradients_overlap(model.parameters())
    assert not loss.requires_grad, "the loss that is logged keeps the graphs of all micro-batches"
    unchanged = all(torch.equal(p, params[name]) for name, p in model.named_parameters())
    return loss.item(), gradients(model), (labels != IGNORE_INDEX).sum().item(), unchanged


def test_gradients_belong_to_the_returned_loss_even_if_a_rank_has_no_valid_token():
    expected, results = reference_trace(3), run_ranks(3, one_step, timeout=LIMIT)
    assert [num_valid for _, _, num_valid, _ in results] == [128, 64, 0], "the ranks must differ, or nothing is shown"
    for rank, (loss, grads, _, unchanged) in enumerate(results):
        assert_same(loss, expected.losses[0], what="the loss", rank=rank)
        assert_same_named(grads, expected.gradients[0], what="gradient of", rank=rank)
        assert unchanged, f"rank {rank}: a reduction changes gradients, and never parameters"


def test_every_sequence_is_another_one_and_the_label_of_a_token_is_the_token_after_it():
    deep = zip(*(pair for part in gradient_reducers.make_batch(1, 3) for pair in part), strict=True)
    for tokens, labels in (get_batch(1, 3), [torch.stack(tensors) for tensors in deep]):
        valid = labels[..., :-1] != IGNORE_INDEX
        assert torch.equal(labels[..., :-1][valid], tokens[..., 1:][valid])
        assert len(tokens.flatten(0, -2).unique(dim=0)) == 3 * 2 * 2
    assert not torch.equal(get_batch(0, 3)[0], get_batch(1, 3)[0]), "each step has a batch of its own"


def broadcast_in_a_group():
    rank = dist.get_rank()
    model = seeded_model(seed=rank)
    model[1].up_proj.weight.requires_grad_(False)
    model.register_buffer("positions", torch.tensor([rank, 7]), persistent=False)
    model.register_buffer("transposed", torch.full((3, 2), 1.0 * rank).t(), persistent=False)
    model[2].up_proj.weight = model[1].up_proj.weight
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    before = {name: t.clone() for name, t in tensors.items()}
    groups = [dist.new_group([0]), dist.new_group([1, 3]), dist.new_group([2])]
    with communication() as wire:
        broadcast_params(model, groups[0 if rank == 0 else 2 if rank == 2 else 1])
    assert rank != 1 or wire.sent["broadcast"] == sum(t.nbytes for t in tensors.values()), "each is sent once"
    return before, tensors


def test_broadcast_sends_parameters_frozen_ones_and_buffers_of_the_groups_first_rank():
    befores, afters = zip(*run_ranks(4, broadcast_in_a_group, timeout=LIMIT), strict=True)
    assert not torch.equal(befores[1]["1.up_proj.weight"], befores[3]["1.up_proj.weight"]), "or nothing is shown"
    for rank, root in ((0, 0), (1, 1), (2, 2), (3, 1)):
        assert_same_named(afters[rank], befores[root], tol=0, what="after the broadcast,", rank=rank)


# ------------------------------------------------------------------------------------------------------ order and waits


def step_on_a_late_network():
    """One step on a network that delivers at the wait: the order of gradients, launches and waits, and the sums."""
    results = {}
    for name in ("overlapped", "bucketed"):
        model, network = seeded_model(), Late(dist.all_reduce)
        params = list(model.parameters())
        note = partial(lambda events, _: events.append(("ready", 0)), network.events)
        with patch.object(dist, "all_reduce", network), grad_hooks(params, note):
            train_step(model, *local_batch(0), FORMS[name], dist.group.WORLD)
        last = len(params)  # the first micro-batch: its gradients stay here
        assert all(what == "ready" for what, _ in network.events[:last])
        results[name] = network.events[last:], gradients(model)
    return results


@cache
def steps_on_a_late_network():
    return run_ranks(2, step_on_a_late_network, timeout=LIMIT)


def test_every_all_reduce_is_waited_for():
    expected = reference_trace(2).gradients[0]
    for rank, results in enumerate(steps_on_a_late_network()):
        for name, (_, grads) in results.items():
            assert_same_named(grads, expected, what=f"{name}, gradient of", rank=rank)


def test_all_messages_but_the_last_are_launched_during_the_backward_pass():
    num_params = len(list(build_model().parameters()))
    num_buckets = len(build_buckets(list(seeded_model().parameters()), 64 * 1024))
    for results in steps_on_a_late_network():
        for name, messages in (("overlapped", num_params), ("bucketed", num_buckets)):
            events = [what for what, _ in results[name][0]]
            last_ready = len(events) - 1 - events[::-1].index("ready")
            counted = {what: events.count(what) for what in ("start", "wait")}
            assert counted == {"start": messages, "wait": messages}
            assert events[:last_ready].count("start") == messages - 1, f"{name}: {events}"
            assert events.index("wait") > last_ready, f"{name} waits during the backward pass: {events}"


def naive_order():
    model, recorder = seeded_model(), data_parallel.CommRecorder()
    with recorder, grad_hooks(list(model.parameters()), recorder.record_grad):
        train_step(model, *local_batch(0), naive, dist.group.WORLD)
    return [what for what, _ in recorder.events if what != "all-reduce"]  # of num_valid and of the loss


def test_naive_sends_nothing_during_the_backward_pass():
    for events in run_ranks(2, naive_order, timeout=LIMIT):
        # 14 parameters: two micro-batches, and two steps of the ring
        assert events == ["grad complete"] * 28 + ["send"] * 28


def another_order_on_each_rank():
    """Four parameters of one size; rank 0 uses them in one order, rank 1 in the other. The slow rank starts late."""
    rank = dist.get_rank()
    time.sleep(0.1 * rank)
    params = [nn.Parameter(torch.full((7,), 2.0**i)) for i in range(4)]
    x = torch.full((7,), rank + 1.0)
    for p in params if rank == 0 else params[::-1]:
        x = x * p
    with bucketed(params, dist.group.WORLD, bucket_bytes=28):
        x.sum().backward()
    return {str(i): p.grad.clone() for i, p in enumerate(params)}


def test_buckets_match_although_ranks_complete_gradients_in_different_orders():
    expected = {str(i): torch.full((7,), (1 + 2) * 64 / 2.0**i) for i in range(4)}
    for rank, grads in enumerate(run_ranks(2, another_order_on_each_rank, timeout=LIMIT)):
        assert_same_named(grads, expected, tol=1e-6, what="gradient", rank=rank)


def second_bucket_completes_first():
    """Parameters 3, 2, 1, 0 are one bucket each, in this order; backward completes 2 before 3, then 1, then 0."""
    params, network = [nn.Parameter(torch.ones(7)) for _ in range(4)], Late(dist.all_reduce)
    x = torch.ones(7)
    for i in (0, 1, 3, 2):
        x = x * params[i]
    numbers = {p: i for i, p in enumerate(params)}
    note = partial(lambda events, p: events.append(("ready", numbers[p])), network.events)
    with patch.object(dist, "all_reduce", network), grad_hooks(params, note):  # noqa: SIM117
        with bucketed(params, dist.group.WORLD, bucket_bytes=28):
            x.sum().backward()
    return [f"{what} {number}" for what, number in network.events if what != "wait"]


def test_buckets_are_launched_as_early_as_possible():
    expected = ["ready 2", "ready 3", "start 0", "start 1", "ready 1", "start 2", "ready 0", "start 3"]
    assert run_ranks(1, second_bucket_completes_first, timeout=LIMIT) == [expected]


def unused_on_one_rank(name):
    """Two branches: rank 0 uses one, rank 1 the other, no rank the third; twice, so that leftovers would show."""
    torch.manual_seed(0)
    branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double()
    for bucket_bytes in (100, 90):  # buckets across branches, and a bucket for each
        grad_sync = {"naive": naive, "bucketed": partial(bucketed, bucket_bytes=bucket_bytes)}[name]
        branches.zero_grad()
        with grad_sync(list(branches.parameters()), dist.group.WORLD):
            branches[dist.get_rank()](torch.ones(1, 3).double()).square().sum().backward()
    return gradients(branches)


@pytest.mark.parametrize("name", ["naive", "bucketed"])
def test_a_parameter_unused_on_one_rank_gets_the_sum_of_the_others(name):
    torch.manual_seed(0)
    branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double()
    for branch in branches[:2]:
        branch(torch.ones(1, 3).double()).square().sum().backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in branches.named_parameters()}
    for rank, grads in enumerate(run_ranks(2, unused_on_one_rank, name, timeout=5)):
        assert_same_named(grads, expected, what="gradient of", rank=rank)


def after_an_error():
    model, group = seeded_model(), dist.group.WORLD
    for grad_sync in FORMS.values():
        with contextlib.suppress(MemoryError), grad_sync(list(model.parameters()), group):
            raise MemoryError("as if forward had run out of memory, on all ranks")
    with communication() as sent:
        train_step(model, *local_batch(0), FORMS["bucketed"], group)
    return sent.calls["all_reduce"], gradients(model)


def test_the_step_after_an_error_is_right():
    expected = reference_trace(2).gradients[0]
    for rank, (calls, grads) in enumerate(run_ranks(2, after_an_error, timeout=LIMIT)):
        assert calls == 3 + 2, "buckets, num_valid and the loss: no hook of an earlier block launches once more"
        assert_same_named(grads, expected, what="gradient of", rank=rank)


# ----------------------------------------------------------------------------------------------------- bytes and memory


def bytes_of_steps():
    results = {}
    for (name, grad_sync), micro_batches in product(FORMS.items(), (1, 3)):
        model = seeded_model()
        with communication() as sent:
            for i in range(micro_batches):
                tokens, labels = local_batch(i)
                is_last = i == micro_batches - 1
                with grad_sync(list(model.parameters()), dist.group.WORLD) if is_last else nullcontext():
                    data_parallel.loss_sum(model(tokens[0]), labels[0]).backward()
        results[name, micro_batches] = dict(sent.calls), sent.total
    return results


@pytest.mark.always("2")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_sent_match_the_formula_for_any_number_of_micro_batches(world_size):
    grad_bytes = sum(p.nbytes for p in seeded_model().parameters())
    messages = {"overlapped": {"all_reduce": 14}, "bucketed": {"all_reduce": 3}}
    results = run_ranks(world_size, bytes_of_steps, timeout=LIMIT)
    for case in results[0]:
        assert round(sum(result[case][1] for result in results)) == 2 * (world_size - 1) * grad_bytes, case
        for calls, _ in (result[case] for result in results):
            assert case[0] == "naive" or calls == messages[case[0]]


def memory_of_bucketed(bucket_bytes):
    """Four parameters of 800 bytes in buckets: bytes of gradients after the step, the peak, and after zero_grad."""
    params, peaks = [nn.Parameter(torch.ones(100, dtype=torch.float64)) for _ in range(4)], []
    for _ in range(3):  # Gloo's threads may hold a buffer a little longer
        with peak_memory() as memory:
            with bucketed(params, dist.group.WORLD, bucket_bytes):
                sum(p.sum() for p in params).backward()
            grad_bytes, storages = held_bytes(params).gradients, {p.grad.untyped_storage().data_ptr() for p in params}
            views = all(p.grad._base is not None and p.grad.is_contiguous() for p in params)
            for p in params:
                p.grad = None
        peaks.append((memory.peak, memory.current))
    return grad_bytes, len(storages), views, min(peaks)


def test_gradients_are_views_of_their_bucket_and_the_peak_is_one_bucket_more():
    for grad_bytes, storages, views, (peak, left) in run_ranks(2, memory_of_bucketed, 1600, timeout=LIMIT):
        assert (grad_bytes, storages, views) == (3200, 2, True), "p.grad lives in the flat tensor that was sent"
        assert 3200 + 1600 <= peak < 3200 + 1600 + 100, peak  # a few scalars of the loss
        assert left <= 16, "zero_grad frees the buckets, so that the next forward pass has their memory"


def test_a_parameter_alone_in_its_bucket_is_not_copied():
    for grad_bytes, storages, _, (peak, left) in run_ranks(2, memory_of_bucketed, 800, timeout=LIMIT):
        assert (grad_bytes, storages) == (3200, 4)
        assert 3200 <= peak < 3200 + 100, peak  # a few scalars of the loss
        assert left <= 16


def buckets_of_both(size):
    model = seeded_model()
    names = {p: name for name, p in model.named_parameters()}
    reducer = gradient_reducers.BucketedReducer(model, dist.group.WORLD, bucket_bytes=size)
    both = build_buckets(list(names), size), reducer.buckets
    return [[[names[p] for p in bucket] for bucket in buckets] for buckets in both]


def test_buckets_equal_those_of_in_depth_hold_one_dtype_and_large_parameters_are_alone():
    for size in (1, 64 * 1024, 10**9):  # not 5000: in depth a parameter that large joins the open bucket
        core, deep = run_ranks(1, buckets_of_both, size, timeout=LIMIT)[0]
        assert core == deep
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    exact = build_buckets([nn.Parameter(torch.ones(4)) for _ in range(5)], 32)  # two of 16 bytes hold just that
    assert [len(bucket) for bucket in exact] == [2, 2, 1]
    alone = build_buckets([nn.Parameter(torch.ones(n)) for n in (4, 8, 4)], 32)  # the one of 32 bytes
    assert [len(bucket) for bucket in alone] == [1, 2]
    mixed = build_buckets([nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes], 10**6)
    assert [len(bucket) for bucket in mixed] == [2, 1]
    params = list(seeded_model().parameters())
    buckets = build_buckets(params, 5000)
    assert sorted(map(id, (p for bucket in buckets for p in bucket))) == sorted(map(id, params))
    assert all(len(bucket) == 1 for bucket in buckets if any(p.nbytes >= 5000 for p in bucket))
    place = {id(p): -i for i, p in enumerate(params)}
    last = [max(place[id(p)] for p in bucket) for bucket in buckets[:-1]]
    assert last == sorted(last), "a bucket is launched with its last gradient, so this is the order of all"


def frozen_and_tied():
    model = seeded_model()
    model[1].up_proj.weight.requires_grad_(False)
    with communication() as sent:
        train_step(model, *local_batch(0), overlapped, dist.group.WORLD)
    return sent.calls["all_reduce"], model[1].up_proj.weight.grad is None


def test_a_tied_parameter_is_sent_once_and_a_frozen_one_never():
    assert run_ranks(2, frozen_and_tied, timeout=LIMIT) == [(13 + 2, True)] * 2


# ----------------------------------------------------------------------------------------------------------- the script


def check_of_wrong_runs():
    """What the check says of parameters that are NaN and of a loss that is too small, on one rank, and of forms that
    send as they should, too late (on all ranks, or on the last), too much, and all at once; and what it prints."""
    real, rank = data_parallel.train_step, dist.get_rank()
    measure = data_parallel.train_next_to_reference

    def nan_on_one_rank(model, group):
        first = next(model.parameters()).detach().clone()
        broadcast_params(model, group)
        assert rank == 0 or not torch.equal(first, next(model.parameters())), "or no broadcast would be missed"
        next(model.parameters()).data[0, 0] = float("nan") if rank == 1 else 0.0

    @contextlib.contextmanager
    def late(params, group):
        yield
        for p in params:
            dist.all_reduce(p.grad, group=group)

    @contextlib.contextmanager
    def twice(params, group):
        with bucketed(params, group, 64 * 1024):
            yield
        for p in params:
            dist.all_reduce(p.grad.clone(), group=group)
            p.grad = torch.cat([p.grad.flatten()] * (1 + rank))[: p.numel()].view_as(p)

    def late_on_one_rank(*given):
        return measure(*given)._replace(num_early=2 - rank)

    said, asked = {}, (dist.group.WORLD, torch.device("cpu"))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for name, form in {"naive": naive, "late": late, "twice": twice}.items():
            said[name] = data_parallel.check(name, form, *asked)
        with patch.object(data_parallel, "broadcast_params", nan_on_one_rank):
            said["nan"] = data_parallel.check("nan", FORMS["bucketed"], *asked)
        with patch.object(data_parallel, "train_step", lambda *given: real(*given) - rank):
            said["small"] = data_parallel.check("small", FORMS["bucketed"], *asked)
        with patch.object(data_parallel, "train_next_to_reference", late_on_one_rank):
            said["last"] = data_parallel.check("last", FORMS["bucketed"], *asked)
        said["whole"] = data_parallel.check("whole", partial(bucketed, bucket_bytes=10**9), *asked)
    return said, [line.split() for line in out.getvalue().splitlines()[:3]]


def test_check_finds_nan_late_messages_and_too_many_bytes():
    for rank, (said, rows) in enumerate(run_ranks(3, check_of_wrong_runs, timeout=LIMIT)):
        messages = [(int(row[2]), int(row[3])) for row in rows]  # all, and the early ones
        assert said["naive"] == [] and messages == ([(2 * 2 * 14, 0), (14, 0), (3 + 14, 2)] if rank == 0 else [])
        assert said["small"] == ["small: largest error 2.0e+00"]
        assert said["nan"] == ["nan: largest error nan"]
        assert said["late"] == ["late: no message is launched during the backward pass"]
        assert said["twice"] == ["twice: 1,883,584 bytes sent", f"twice: {(1 + rank) * 235_440:,} bytes of gradients"]
        assert said["last"] == ["last: no message is launched during the backward pass"], "on rank 2"
        assert said["whole"] == [], "a single message has nothing to overlap with"
        assert rank or rows[2][4:] == ["1,883,584", "941,824", "235,440", "235,440"], "sent, stored, and by formula"


def test_the_script_cuts_buckets_by_its_option_and_one_failure_is_enough(capsys, monkeypatch):
    monkeypatch.setattr(data_parallel, "init_distributed", lambda: torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["data_parallel.py", "--bucket-kib", "1"])
    alone = {"get_rank": lambda: 0, "get_world_size": lambda: 1, "destroy_process_group": lambda: None}
    found = [["slow"], *[[]] * 5]
    with patch.multiple(dist, **alone), patch.object(data_parallel, "check", side_effect=found) as check:
        assert data_parallel.main() == 1 and capsys.readouterr().out.splitlines()[-1] == "FAIL: slow"
        monkeypatch.setattr(sys, "argv", ["data_parallel.py"])
        assert data_parallel.main() == 0 and capsys.readouterr().out.splitlines()[-1] == "PASS"
    assert [call.args[1].keywords["bucket_bytes"] for call in check.call_args_list[2::3]] == [1024, 64 * 1024]


@pytest.mark.parametrize("option", [["--bucket-kib", "0"], ["--bucket-kib", "nan"], ["--ring"]])
def test_a_bad_option_is_refused_in_one_line_before_any_process_group(option):
    assert option[0] in refusal(data_parallel.main, option)
