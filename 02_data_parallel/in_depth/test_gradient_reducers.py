"""The three reducers against one reference: the unsharded model on the whole global batch, in one process."""

import gc
import itertools
import json
import shutil
import subprocess
import sys
import time
import weakref
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gradient_reducers import (
    IGNORE,
    VERSIONS,
    BucketedReducer,
    Decoder,
    Reducer,
    broadcast_parameters,
    cut_into_buckets,
    demo,
    global_valid_tokens,
    make_batch,
    make_reducer,
    parse_arguments,
    train_step,
)
from harness.late import Late
from harness.meter import communication, held_bytes, peak_memory
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_named, assert_same_trace, assert_same_traces, sgd_trace
from torch import Tensor, nn

LIMIT = 20.0  # seconds until a run that hangs is a failure


def decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(hidden=16, heads=2, layers=2).double()


def reducer_of(version: str, model: nn.Module, group: dist.ProcessGroup, **options) -> Reducer:
    if version == "bucketed":
        options.setdefault("bucket_bytes", 16 * 1024)
    return VERSIONS[version](model, group, **options)


def mean_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The reference's own loss: PyTorch's mean over valid tokens, not the sum and division of the script."""
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def reference_trace(ranks: int, seed: int = 0, first_step: int = 0, micro_batches: int = 2) -> Trace:
    model = decoder(seed)

    def backward(step: int) -> float:
        parts = [pair for part in make_batch(first_step + step, ranks, micro_batches) for pair in part]
        loss = mean_loss(model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        loss.backward()
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward)


def replica_trace(
    version: str, group: dist.ProcessGroup, seed: int = 0, first_step: int = 0, micro_batches: int = 2, **options
) -> Trace:
    model = decoder(seed)
    reducer = reducer_of(version, model, group, **options)

    def backward(step: int) -> float:
        batch = make_batch(first_step + step, dist.get_world_size(group), micro_batches)
        return train_step(model, reducer, batch[dist.get_rank(group)]).item()

    return sgd_trace(dict(model.named_parameters()), backward)


def of_each_version(what: Callable, *given) -> dict[str, Any]:
    return {version: what(version, *given) for version in VERSIONS}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def launches(reducer: Reducer) -> list[int]:
    return [bucket for what, bucket in reducer.events if what == "launch"]


# ---------------------------------------------------------------------------------------------- the one reference


def traces_in_the_world() -> dict[str, Trace]:
    return of_each_version(replica_trace, dist.group.WORLD)


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_loss_gradients_and_weights_after_three_steps_equal_the_unsharded_model(ranks):
    assert_same_traces(run_ranks(ranks, traces_in_the_world, timeout=LIMIT), reference_trace(ranks))
    targets = [sum(int((labels != IGNORE).sum()) for _, labels in part) for part in make_batch(0, 3)]
    assert targets == [256, 168, 42], "ranks have different numbers, or an average would be right"


def halves_of_each_sequence() -> dict[str, dict[str, Tensor | None]]:
    data_groups = [dist.new_group([0]), dist.new_group([1])]
    context = dist.new_group([0, 1])
    rank = dist.get_rank()
    assert dist.get_world_size(data_groups[rank]) == 1  # one data-parallel replica, whose sequences two ranks share
    tokens, labels = make_batch(0, ranks=1)[0][1]
    half = slice(32 * rank, 32 * rank + 32)
    results = {}
    for version in VERSIONS:
        model = token_wise()
        reducer = reducer_of(version, model, context)
        train_step(model, reducer, [(tokens[:, half], labels[:, half])])
        results[version] = gradients(model)
    return results


def token_wise() -> nn.Module:
    """A model without attention, so that half a sequence needs nothing of the other half."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 256)).double()


def test_a_context_group_is_reduced_although_the_data_group_has_one_rank():
    model = token_wise()
    mean_loss(model, *make_batch(0, ranks=1)[0][1]).backward()
    for rank, results in enumerate(run_ranks(2, halves_of_each_sequence, timeout=LIMIT)):
        for version, got in results.items():
            assert_same_named(got, gradients(model), what=f"{version}, gradient of", rank=rank)


# --------------------------------------------------------------------------------------- the loss is a sum over tokens


def step_of_three_micro_batches(version: str) -> tuple[float, dict, bool, int]:
    """Loss, gradients, whether the weights are as before, and collectives besides the buckets'."""
    model = decoder()
    before = {name: p.clone() for name, p in model.named_parameters()}
    batch = make_batch(0, dist.get_world_size(), micro_batches=3)[dist.get_rank()]
    reducer = reducer_of(version, model, dist.group.WORLD)
    with communication() as sent:
        loss = train_step(model, reducer, batch)
    untouched = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return loss.item(), gradients(model), untouched, sent.calls["all_reduce"] - len(reducer.buckets)


@cache
def steps_of_three_micro_batches() -> list[dict[str, tuple]]:
    return run_ranks(2, of_each_version, step_of_three_micro_batches, timeout=LIMIT)


def test_gradients_are_those_of_the_loss_that_is_logged():
    want = reference_trace(2, micro_batches=3)
    for rank, versions in enumerate(steps_of_three_micro_batches()):
        for loss, got, _, others in versions.values():
            assert_same(loss, want.losses[0], what="the loss", rank=rank)
            assert_same_named(got, want.gradients[0], what="gradient of", rank=rank)
            assert others == 2, "an accumulated step sends every bucket once, and two scalars: the divisor and the loss"


def test_reduction_changes_gradients_and_never_weights():
    for versions in steps_of_three_micro_batches():
        assert all(untouched for _, _, untouched, _ in versions.values())


def uneven_ranks() -> tuple[float, dict]:
    """Rank 0 has 128 valid tokens, rank 1 has 5, and rank 2 none at all."""
    model, rank = decoder(), dist.get_rank()
    loss = train_step(model, reducer_of("bucketed", model, dist.group.WORLD), [uneven_batch()[rank]])
    return loss.item(), gradients(model)


def uneven_batch() -> list[tuple[Tensor, Tensor]]:
    batch = [part[1] for part in make_batch(0, ranks=3)]
    tokens, labels = torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])
    labels[0] = tokens[0].roll(-1, dims=-1)
    labels[1:] = IGNORE
    labels[1, 0, :5] = tokens[1, 0, 1:6]
    return list(zip(tokens, labels, strict=True))


def test_every_token_weighs_the_same_on_ranks_with_different_numbers_of_them():
    model = decoder()
    loss = mean_loss(model, *(torch.cat(tensors) for tensors in zip(*uneven_batch(), strict=True)))
    loss.backward()
    for rank, (got_loss, got) in enumerate(run_ranks(3, uneven_ranks, timeout=LIMIT)):
        assert_same(got_loss, loss.item(), what="the loss", rank=rank)
        assert_same_named(got, gradients(model), what="gradient of", rank=rank)


def no_targets_anywhere() -> tuple[float, dict]:
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model = decoder()
    loss = train_step(model, reducer_of("bucketed", model, dist.group.WORLD), [(tokens, torch.full((1, 8), IGNORE))])
    return loss.item(), gradients(model)


def test_a_global_batch_without_a_valid_token_has_loss_and_gradients_zero():
    for loss, got in run_ranks(2, no_targets_anywhere, timeout=LIMIT):
        assert loss == 0 and all(g is not None and not g.any() for g in got.values())


def counts() -> tuple[int, ...]:
    rank, world = dist.get_rank(), dist.group.WORLD
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    labels = torch.tensor([[rank, IGNORE, 7], [IGNORE, IGNORE, 0]])[: 2 if rank == 2 else 1]
    mine = torch.tensor(10 + rank)
    valid = [global_valid_tokens(given, world) for given in (labels, 10 + rank, mine, mine)]
    return *(int(v) for v in valid), int(mine), int(global_valid_tokens(labels, groups[rank % 2]))


def test_valid_tokens_are_counted_over_the_given_group_and_not_in_the_callers_tensor():
    assert run_ranks(3, counts, timeout=LIMIT) == [
        (7, 33, 33, 33, 10 + rank, in_group) for rank, in_group in enumerate((5, 2, 5))
    ]


# ------------------------------------------------------------------------------------------------- the first weights


def broadcast_in_a_slice() -> tuple[dict, dict]:
    rank = dist.get_rank()
    model = decoder(seed=rank)
    model.blocks[1].up.weight.requires_grad_(False)  # a frozen weight is read by forward as well
    model.positions += rank
    model.register_buffer("mask", torch.tensor([rank % 2 == 0, True]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slices = [dist.new_group([0]), dist.new_group([3, 1]), dist.new_group([2])]
    broadcast_parameters(model, slices[0 if rank == 0 else 2 if rank == 2 else 1])
    return before, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_different_first_weights_and_buffers_are_healed_by_the_broadcast():
    befores, afters = zip(*run_ranks(4, broadcast_in_a_slice, timeout=LIMIT), strict=True)
    for name in ("positions", "blocks.0.qkv.weight", "blocks.1.up.weight"):
        assert not torch.equal(befores[1][name], befores[3][name]), "the ranks must differ before, or nothing is shown"
    root = 1 if all(torch.equal(afters[1][k], befores[1][k]) for k in befores[1]) else 3  # torch sorts a group's ranks
    for rank in (1, 3):
        assert_same_named(afters[rank], befores[root], tol=0, what="after the broadcast,", rank=rank)
    for rank in (0, 2):
        assert_same_named(afters[rank], befores[rank], tol=0, what="outside the slice,", rank=rank)


# ----------------------------------------------------------------------------------- bytes and messages, to the byte


def one_step_sent(version: str, micro_batches: int) -> tuple[dict, dict, int, int]:
    model = decoder()
    reducer = reducer_of(version, model, dist.group.WORLD)
    batch = make_batch(0, dist.get_world_size(), micro_batches)[dist.get_rank()]
    with communication() as sent:
        for i, (tokens, labels) in enumerate(batch):
            with reducer.no_sync() if i < len(batch) - 1 else nullcontext():
                F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum").backward()
        reducer.finish()
    return dict(sent.calls), dict(sent.sent), len(reducer.buckets), sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("ranks", [1, 3])
def test_bytes_sent_equal_two_times_p_minus_one_over_p_of_the_gradients(ranks):
    for micro_batches in (1, 3):
        for versions in run_ranks(ranks, of_each_version, one_step_sent, micro_batches, timeout=LIMIT):
            for version, buckets in {"naive": 14, "overlapped": 14, "bucketed": 4}.items():
                calls, sent, made, size = versions[version]
                assert calls == {"all_reduce": made} and made == buckets, "however many micro-batches"
                want = 2 * (ranks - 1) / ranks * size
                assert_same(float(sent["all_reduce"]), want, tol=1e-15, what=f"{version}, bytes")


def nested_no_sync() -> tuple[int, int]:
    model = decoder()
    reducer = reducer_of("bucketed", model, dist.group.WORLD)
    tokens, labels = make_batch(0, dist.get_world_size())[dist.get_rank()][1]
    with communication() as sent:
        with reducer.no_sync():
            with reducer.no_sync():
                mean_loss(model, tokens, labels.clamp(min=0)).backward()
            mean_loss(model, tokens, labels.clamp(min=0)).backward()  # the outer one is still there
        inside = sent.calls["all_reduce"]
        mean_loss(model, tokens, labels.clamp(min=0)).backward()
        reducer.finish()
    return inside, sent.calls["all_reduce"] - len(reducer.buckets)


def test_leaving_an_inner_no_sync_does_not_end_the_outer_one():
    assert run_ranks(2, nested_no_sync, timeout=LIMIT) == [(0, 0)] * 2


def ring_of_sends() -> tuple[dict, float, int]:
    model = decoder()
    reducer = make_reducer(Namespace(version="naive", all_reduce="ring"), model, dist.group.WORLD)
    tokens, labels = make_batch(0, dist.get_world_size())[dist.get_rank()][1]
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    with communication() as sent:
        (loss / 100).backward()
        reducer.finish()
    assert sent.calls["all_reduce"] == 0
    return gradients(model), sent.sent["send"], sum(p.nbytes for p in model.parameters())


def test_with_the_ring_of_collectives_the_ranks_send_two_times_p_minus_one_times_the_gradients():
    results = run_ranks(3, ring_of_sends, timeout=LIMIT)
    model = decoder()
    for part in make_batch(0, 3):
        tokens, labels = part[1]
        (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / 100).backward()
    for rank, (got, _, _) in enumerate(results):
        assert_same_named(got, gradients(model), what="gradient of", rank=rank)
    assert sum(sent for _, sent, _ in results) == 2 * (3 - 1) * results[0][2]


def memory_of_a_step() -> list[tuple[int, int, int]]:
    tokens, labels = make_batch(0, dist.get_world_size())[dist.get_rank()][1]
    found = []
    for set_to_none in (True, False):
        model = decoder()
        with peak_memory() as memory:
            reducer = reducer_of("bucketed", model, dist.group.WORLD)
            for _ in range(2):
                model.zero_grad(set_to_none=set_to_none)
                with reducer.no_sync():
                    mean_loss(model, tokens, labels.clamp(min=0)).backward()
                mean_loss(model, tokens, labels.clamp(min=0)).backward()
                reducer.finish()
        found.append((held_bytes(model).gradients, memory.current, sum(p.nbytes for p in model.parameters())))
    return found


def test_the_buckets_are_the_gradients_and_nothing_is_held_twice():
    for steps in run_ranks(2, memory_of_a_step, timeout=LIMIT):
        for held, alive, size in steps:
            assert held == size, "bytes of the storages behind p.grad"
            assert alive == size, "bytes of all tensors that a reducer and two steps leave alive"


# --------------------------------------------------------------------------------------------------------- overlap


def events_of_a_step(version: str) -> tuple[list, int]:
    model = decoder()
    reducer = reducer_of(version, model, dist.group.WORLD)
    train_step(model, reducer, make_batch(0, dist.get_world_size(), 3)[dist.get_rank()])
    return reducer.events, len(reducer.buckets)


@cache
def events_of_steps() -> list[dict[str, tuple[list, int]]]:
    return run_ranks(2, of_each_version, events_of_a_step, timeout=LIMIT)


@pytest.mark.parametrize("version", ["overlapped", "bucketed"])
def test_the_first_bucket_leaves_before_the_last_gradient_is_ready(version):
    for events, buckets in (versions[version] for versions in events_of_steps()):
        whats = [what for what, _ in events]
        assert "ready" in whats, "the last micro-batch announces its gradients as they become final"
        last_ready = len(whats) - 1 - whats[::-1].index("ready")
        assert whats.index("launch") < last_ready < whats.index("wait"), events
        assert whats[:last_ready].count("launch") == buckets - 1, "all buckets but the last leave during backward"
        assert sorted(name for what, name in events if what == "ready") == sorted(dict(decoder().named_parameters()))


def test_the_naive_version_sends_nothing_before_backward_has_ended():
    for events, buckets in (versions["naive"] for versions in events_of_steps()):
        assert [what for what, _ in events] == ["ready"] * buckets + ["launch", "wait"] * buckets


def on_a_late_network(version: str, late: int) -> Trace:
    """Three steps; the rank `late` also pauses before each of its launches."""
    network = Late(dist.all_reduce)

    def all_reduce(*args, **kwargs):
        time.sleep(0.002 if dist.get_rank() == late else 0)
        return network(*args, **kwargs)

    with patch.object(dist, "all_reduce", all_reduce):
        return replica_trace(version, dist.group.WORLD)


@pytest.mark.always("overlapped-2")
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("version", ["overlapped", "bucketed"])
def test_every_bucket_is_waited_for_and_left_alone_while_it_is_under_way(version, late):
    assert_same_traces(run_ranks(3, on_a_late_network, version, late, timeout=LIMIT), reference_trace(3))


def ready_in_two_orders(version: str) -> tuple[list[int], list[dict]]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(n)) for n in [7] * 4]  # all of a size: no collective can notice a swap
    options = {"bucket_bytes": 28} if version == "bucketed" else {}
    reducer = VERSIONS[version](parameters, dist.group.WORLD, hooks=False, **options)
    sums = []
    for missing in (False, True):  # in the second step rank 1 has no gradients
        for i, p in enumerate(parameters):
            p.grad = None if missing and rank == 1 else torch.full_like(p, 10.0**i * (rank + 1))
        for p in parameters if rank == 0 else reversed(parameters):
            reducer.start(p)
        reducer.finish()
        sums.append({str(i): p.grad.clone() for i, p in enumerate(parameters)})
    return launches(reducer), sums


def test_buckets_leave_in_index_order_whatever_order_gradients_become_ready_in():
    for rank, versions in enumerate(run_ranks(2, of_each_version, ready_in_two_orders, timeout=LIMIT)):
        for version, (order, sums) in versions.items():
            assert order == [0, 1, 2, 3], f"{version}: {order}"
            for got, times in zip(sums, (3, 1), strict=True):
                want = {str(i): torch.full((7,), 10.0**i * times) for i in range(4)}
                assert_same_named(got, want, tol=0, what=f"{version}, gradient", rank=rank)


# --------------------------------------------------------------------- buckets, and parameters that are not like others


class Odd(nn.Module):
    """A tied pair, a frozen parameter, two branches of which a rank may use one, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, bias=False)
        self.frozen = nn.Linear(6, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.nobody = nn.Linear(6, 5)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.branches[1].weight = nn.Parameter(self.branches[1].weight.detach().t())  # as its gradient: columns first
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, branches: list[int]) -> Tensor:
        x = self.frozen(self.first(x)).tanh()
        return self.last(x + sum(self.branches[b](x) for b in branches)).square().sum()


def data_of(rank: int) -> Tensor:
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def odd_step(version: str, find_unused: bool, used: list[list[list[int]]], groups=None) -> tuple[dict, dict, list]:
    """`used[rank][micro-batch]` are the branches used there. Two steps, so that stale buckets would show."""
    model = Odd()
    options = {"bucket_bytes": 700} if version == "bucketed" else {}
    made = [dist.new_group(ranks) for ranks in groups or []]
    group = made[dist.get_rank() % 2] if made else dist.group.WORLD
    reducer = VERSIONS[version](model, group, find_unused=find_unused, **options)
    mine = used[dist.get_rank()]
    for step in range(2):
        model.zero_grad()
        if step == 0:  # everything is used once, so that a bucket has something stale in it
            (model(data_of(9), [0, 1]) + model.nobody(data_of(9)).sum()).backward()
            reducer.finish()
            model.zero_grad()
        with communication() as sent:
            for i, branches in enumerate(mine):
                with reducer.no_sync() if i < len(mine) - 1 else nullcontext():
                    model(data_of(10 * i + dist.get_rank()), branches).backward()
            reducer.finish()
    return gradients(model), dict(sent.calls), [list(reducer.names.values()), len(reducer.buckets)]


def odd_reference(used: list[list[list[int]]], ranks: Sequence[int] | None = None) -> dict[str, Tensor | None]:
    model = Odd()
    for rank in range(len(used)) if ranks is None else ranks:
        for i, branches in enumerate(used[rank]):
            model(data_of(10 * i + rank), branches).backward()
    return gradients(model)


def test_a_parameter_that_one_rank_did_not_use_gets_the_sum_of_the_others_on_every_rank():
    used = [[[0]], [[1]]]
    want = odd_reference(used)
    for rank, versions in enumerate(run_ranks(2, of_each_version, odd_step, False, used, timeout=LIMIT)):
        for version, (got, calls, (names, buckets)) in versions.items():
            assert calls == {"all_reduce": buckets}
            assert names.count("first.weight") == 1 and "last.weight" not in names, "a tied one is reduced once"
            assert got["frozen.weight"] is None and not any("frozen" in name for name in names)
            assert not got.pop("nobody.weight").any() and not got.pop("nobody.bias").any()
            assert_same_named(got, {name: want[name] for name in got}, what=f"{version}, gradient of", rank=rank)


def test_a_parameter_nobody_used_ends_with_none_if_unused_ones_are_looked_for():
    used, groups = [[[0]], [[1]], [[0]], [[0]]], [[0, 2], [1, 3]]  # only the second group uses branch 1
    for rank, versions in enumerate(run_ranks(4, of_each_version, odd_step, True, used, groups, timeout=LIMIT)):
        want = odd_reference(used, groups[rank % 2])
        assert want["nobody.weight"] is None and (want["branches.1.weight"] is None) == (rank % 2 == 0)
        for version, (got, calls, (_, buckets)) in versions.items():
            assert_same_named(got, want, what=f"{version}, gradient of", rank=rank)
            assert calls == {"all_reduce": buckets + 1}, "one more for the flags"


def test_a_parameter_used_only_in_an_early_micro_batch_is_reduced():
    used = [[[0, 1], []], [[1], []]]
    want = odd_reference(used)
    for rank, versions in enumerate(run_ranks(2, of_each_version, odd_step, True, used, timeout=LIMIT)):
        for version, (got, *_) in versions.items():
            assert_same_named(got, want, what=f"{version}, gradient of", rank=rank)


def buckets_of(sizes: list[tuple[int, torch.dtype]], size: int, first: int | None = None) -> tuple[list, list[bool]]:
    parameters = [nn.Parameter(torch.ones(n, dtype=dtype)) for n, dtype in sizes]
    reducer = BucketedReducer(parameters, dist.group.WORLD, bucket_bytes=size, first_bytes=first)
    position = {p: i for i, p in enumerate(parameters)}
    flat_is_whole = [
        f.numel() == sum(p.numel() for p in b) for f, b in zip(reducer.flats, reducer.buckets, strict=True)
    ]
    return [[position[p] for p in bucket] for bucket in reducer.buckets], flat_is_whole


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "want"),
    [
        ([4, 4, 4, 4], 32, [[3, 2], [1, 0]]),
        ([4, 4, 4, 4], 33, [[3, 2, 1], [0]]),
        ([1, 100, 1, 1], 16, [[3, 2, 1], [0]]),  # one parameter alone is larger than a bucket
        ([4, 1, 4], 1, [[2], [1], [0]]),
        ([3, 1, 2], 10**6, [[2, 1, 0]]),
    ],
)
def test_buckets_fill_in_reverse_order_until_they_hold_their_size(sizes, bucket_bytes, want):
    for buckets, whole in run_ranks(1, buckets_of, [(n, torch.float32) for n in sizes], bucket_bytes, timeout=LIMIT):
        assert buckets == want and all(whole)


def test_each_dtype_has_its_own_buckets_in_the_order_backward_completes_them():
    half, full = torch.bfloat16, torch.float32
    sizes = [(4, half), (4, full), (4, half), (4, full), (4, full)]
    for buckets, _ in run_ranks(1, buckets_of, sizes, 32, timeout=LIMIT):
        assert buckets == [[4, 3], [1], [2, 0]]  # bucket [2, 0] was begun before [1], but is complete after it


@pytest.mark.parametrize(("asked", "kib"), [(3, 3), (None, 256)])
def test_the_script_cuts_buckets_of_the_size_that_it_is_given_or_else_of_256_kib(asked, kib):
    with patch("gradient_reducers.BucketedReducer") as made:
        make_reducer(Namespace(version="bucketed", bucket_kib=asked), decoder(), None)
    assert made.call_args.kwargs == {"bucket_bytes": kib * 1024}


def test_the_first_bucket_may_be_smaller_than_the_others():
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(6)]
    assert [len(bucket) for bucket in cut_into_buckets(parameters, 32)] == [2, 2, 2]
    assert [len(bucket) for bucket in cut_into_buckets(parameters, 32, first_bytes=16)] == [1, 2, 2, 1]
    assert [len(bucket) for bucket in cut_into_buckets(parameters, 32, first_bytes=0)] == [1, 2, 2, 1], "0 is a size"
    elsewhere = [nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "meta", "cpu")]
    assert cut_into_buckets(elsewhere, 32) == [[elsewhere[1]], [elsewhere[0], elsewhere[2]]], "one device each"
    [(buckets, _)] = run_ranks(1, buckets_of, [(4, torch.float32)] * 6, 32, 16, timeout=LIMIT)
    assert buckets == [[5], [4, 3], [2, 1], [0]]


def rebuilt_buckets(idle: int | None) -> tuple[list, list, list]:
    """Four parameters of one size. Rank 0 completes a, b, c, d in this order, and rank 1 b, a, d, c; the reducer, which
    goes by the order in which they were registered, expects d, c, b, a. Rank `idle` runs no backward at first."""
    model = nn.ParameterDict({name: nn.Parameter(torch.full((7,), 2.0**i).double()) for i, name in enumerate("abcd")})
    reducer = BucketedReducer(model, dist.group.WORLD, bucket_bytes=56, rebuild=True)
    cuts, early, sums, x0 = [], [], [], torch.full((7,), dist.get_rank() + 1.0).double()
    for step in range(3):
        model.zero_grad()
        if step or dist.get_rank() != idle:
            x = x0
            for name in "cdab" if dist.get_rank() else "dcba":
                x = x * model[name]
            x.sum().backward()
        reducer.finish()
        whats = [what for what, _ in reducer.events]
        last_ready = max((i for i, what in enumerate(whats) if what == "ready"), default=0)
        early.append(whats[:last_ready].count("launch"))
        cuts.append([[reducer.names[p] for p in bucket] for bucket in reducer.buckets])
        assert all(p.grad is reducer.views[p] for p in model.values())
        sums.append(gradients(model))
    return cuts, early, sums


@pytest.mark.parametrize(("idle", "order"), [(None, "abcd"), (0, "dcba"), (1, "abcd")])
def test_buckets_are_rebuilt_once_in_the_order_in_which_rank_0_completed_its_gradients(idle, order):
    results = run_ranks(2, rebuilt_buckets, idle, timeout=LIMIT)
    for rank, (cuts, _, sums) in enumerate(results):
        assert cuts == [[[name] for name in order]] * 3, "cut again after the first step, alike on all ranks"
        for step, got in enumerate(sums):
            share = 3 if step or idle is None else 2 - idle  # rank r multiplies by r + 1
            want = {name: torch.full((7,), share * 64 / 2.0**i).double() for i, name in enumerate("abcd")}
            assert_same_named(got, want, what=f"step {step}, gradient of", rank=rank)
    if idle is None:
        assert results[0][1] == [0, 3, 3], "before, all had to wait for d; after, only the last does"


def in_fp32(main_grads: bool) -> tuple[float, float, list]:
    """Distance of bf16 gradients from float64: of the sum over 16 micro-batches and all ranks, and of one in fp32."""
    model, group = decoder().bfloat16(), dist.group.WORLD
    exact, dense = deepcopy(model).double(), deepcopy(model)
    options = {"main_grads": True} if main_grads else {}
    reducer = reducer_of("bucketed", model, group, **options)
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in dense.parameters()}
    with communication() as sent:
        for _ in range(2):  # twice, so that what the first step left would show
            model.zero_grad()
            batch = make_batch(0, dist.get_world_size(), 16)
            for i, (tokens, labels) in enumerate(batch[dist.get_rank()]):
                with nullcontext() if i == 15 else reducer.no_sync():
                    mean_loss(model, tokens, labels.clamp(min=0)).backward()
            reducer.finish()
    for part in batch:
        for tokens, labels in part:
            mean_loss(exact, tokens, labels.clamp(min=0)).backward()
            dense.zero_grad()
            mean_loss(dense, tokens, labels.clamp(min=0)).backward()
            for p in dense.parameters():
                sums[p] += p.grad
    got = [p.main_grad if main_grads else p.grad for p in model.parameters()]
    want = [p.grad for p in exact.parameters()]
    errors = [
        sum((a.double() - b).square().sum() for a, b in zip(tensors, want, strict=True)).sqrt().item()
        for tensors in (got, list(sums.values()))
    ]
    state = [str(got[0].dtype), all(p.grad is None for p in model.parameters()), sent.payload["all_reduce"] // 2]
    return *errors, [*state, sum(p.numel() for p in model.parameters())]


@pytest.mark.prove
def test_main_grads_are_as_exact_as_sums_in_fp32_and_those_in_bf16_are_not():
    for error, dense, (dtype, no_grad, payload, numel) in run_ranks(2, in_fp32, True, timeout=LIMIT):
        assert (dtype, no_grad, payload) == ("torch.float32", True, 4 * numel), "what travels is fp32"
        assert error <= 1.1 * dense, f"{error:.3g}, sums in fp32 {dense:.3g}"
    for error, dense, (dtype, *_) in run_ranks(2, in_fp32, False, timeout=LIMIT):
        assert dtype == "torch.bfloat16" and error > 1.5 * dense, "or nothing is shown"


def unused_main_grads() -> dict[str, Tensor | None]:
    model, rank = Odd(), dist.get_rank()
    reducer = BucketedReducer(model, dist.group.WORLD, bucket_bytes=700, main_grads=True, find_unused=True)
    for first, last in (([], [0, 1]), ([rank], [1 - rank])):  # a branch of the first micro-batch, not of the last
        if first:
            with reducer.no_sync():
                model(data_of(rank), first).backward()
            assert all(p.grad is None for p in model.parameters()), "added at once, not first in the model's dtype"
        model(data_of(rank), last).backward()
        reducer.finish()
    return {name: p.main_grad for name, p in model.named_parameters() if p.requires_grad}


def test_main_grads_of_parameters_that_a_rank_did_not_use_hold_no_leftovers():
    model = Odd()
    for rank, used in itertools.product(range(2), range(2)):
        model(data_of(rank), [used]).backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for rank, got in enumerate(run_ranks(2, unused_main_grads, timeout=LIMIT)):
        assert got["nobody.weight"] is None and got["branches.0.weight"].dtype == torch.float32
        assert_same_named(got, want, tol=1e-5, what="sum of micro-batches and ranks of", rank=rank)


def own_all_reduce_and_early() -> str:
    return error_from(ValueError, BucketedReducer, nn.Linear(2, 2), dist.group.WORLD, all_reduce=dist.all_reduce)


def test_an_all_reduce_that_blocks_cannot_be_early():
    assert "early=False" in run_ranks(1, own_all_reduce_and_early, timeout=LIMIT)[0]


# ---------------------------------------------------------------------------------------------- more than one step


def zero_grads_in_turn() -> tuple[Trace, bool]:
    model = decoder()
    reducer = reducer_of("bucketed", model, dist.group.WORLD)
    trace, views = Trace(), True
    for step in range(3):
        batch = make_batch(step, dist.get_world_size())[dist.get_rank()]
        trace.losses.append(train_step(model, reducer, batch).item())
        trace.gradients.append(gradients(model))
        views = views and all(p.grad is reducer.views[p] for p in model.parameters())
        for p in model.parameters():
            p.data -= 0.1 * p.grad
        model.zero_grad(set_to_none=step == 1)
    trace.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trace, views


def test_zero_grad_to_zero_and_to_none_both_work():
    want = reference_trace(2)
    for rank, (got, views) in enumerate(run_ranks(2, zero_grads_in_turn, timeout=LIMIT)):
        assert_same_trace(got, want, rank=rank)
        assert views


def forget_to_finish(version: str, inside_no_sync: bool) -> str:
    model = decoder()
    reducer = reducer_of(version, model, dist.group.WORLD)
    tokens, labels = make_batch(0, dist.get_world_size())[dist.get_rank()][1]
    mean_loss(model, tokens, labels.clamp(min=0)).backward()

    def backward() -> None:
        with reducer.no_sync() if inside_no_sync else nullcontext():
            mean_loss(model, tokens, labels.clamp(min=0)).backward()

    message = error_from(RuntimeError, backward)
    reducer.finish()
    return message


@pytest.mark.parametrize("inside_no_sync", [False, True])
def test_a_second_backward_before_finish_is_an_error_that_names_the_remedy(inside_no_sync):
    for versions in run_ranks(2, of_each_version, forget_to_finish, inside_no_sync, timeout=LIMIT):
        for message in versions.values():
            assert "norm.weight" in message and "finish()" in message and "no_sync()" in message


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise MemoryError("as if out of memory")


def one_rank_raises(version: str) -> tuple[int, Trace, int]:
    model = decoder()
    reducer = reducer_of(version, model, dist.group.WORLD)
    hook = None
    if dist.get_rank() == 1:
        hook = model.blocks[0].register_forward_hook(lambda module, args, out: RaisesInBackward.apply(out))
    tokens, labels = make_batch(0, dist.get_world_size())[dist.get_rank()][1]
    raised = 0
    for context in (reducer.no_sync(), nullcontext()):
        try:
            with context:
                mean_loss(model, tokens, labels.clamp(min=0)).backward()
        except MemoryError:
            raised += 1
    reducer.finish()
    if hook is not None:
        hook.remove()

    def backward(step: int) -> float:
        return train_step(model, reducer, make_batch(step, dist.get_world_size())[dist.get_rank()]).item()

    trace = sgd_trace(dict(model.named_parameters()), backward)
    return raised, trace, sum(what == "ready" for what, _ in reducer.events)


def test_training_goes_on_after_a_backward_that_raised_on_one_rank():
    want = reference_trace(2)
    for rank, versions in enumerate(run_ranks(2, of_each_version, one_rank_raises, timeout=LIMIT)):
        for version, (raised, got, ready) in versions.items():
            assert raised == 2 * rank
            assert ready == len(got.weights), f"{version}, rank {rank}: the hooks announce every gradient, as before"
            assert_same_trace(got, want, rank=rank)


def explicit_starts(version: str) -> tuple[list, dict]:
    model = decoder()
    reducer = reducer_of(version, model, dist.group.WORLD, hooks=False)
    tokens, labels = make_batch(0, dist.get_world_size())[dist.get_rank()][1]
    (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / 100).backward()
    assert reducer.events == [], "without hooks nothing happens by itself"
    for p in reversed(list(model.parameters())):
        reducer.start(p)
    launched_before_finish = launches(reducer)
    reducer.finish()
    return launched_before_finish, gradients(model)


def test_without_hooks_start_says_which_gradient_is_final():
    model = decoder()
    for part in make_batch(0, 2):
        tokens, labels = part[1]
        (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / 100).backward()
    for rank, versions in enumerate(run_ranks(2, of_each_version, explicit_starts, timeout=LIMIT)):
        for version, (early, got) in versions.items():
            assert_same_named(got, gradients(model), what=f"{version}, gradient of", rank=rank)
            assert bool(early) == (version != "naive")


# ------------------------------------------------------------------------------------------------------- the script


@pytest.mark.prove
def test_copied_alone_the_script_passes_and_its_trace_shows_a_bucket_inside_backward(tmp_path):
    shutil.copy(Path(__file__).with_name("gradient_reducers.py"), tmp_path)
    command = [sys.executable, "gradient_reducers.py", "--profile", "traces"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "PASS"
    events = json.loads((tmp_path / "traces/rank0.json").read_text())["traceEvents"]
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"}
    backward, bucket = spans["backward"], spans["all-reduce of bucket 0"]
    assert backward[0] < bucket[0] and bucket[1] < backward[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--version", "fast"], ["--version", "'fast'", "bucketed"]),
        (["--bucket-kib", "0"], ["--bucket-kib", "0", "1 or more"]),
        (["--bucket-kib", "16", "--version", "naive"], ["--bucket-kib", "16", "naive"]),
        (["--all-reduce", "ring"], ["--all-reduce", "bucketed", "--version naive"]),
        (["--profile", f"{__file__}/traces"], ["--profile", f"{__file__}/traces", "folder"]),
        (["--profile", ""], ["--profile", "''", "folder"]),
    ],
)
def test_a_wrong_option_ends_with_one_line_that_names_it(argv, words):
    said = refusal(parse_arguments, argv)
    assert all(word in said for word in words), said


def demos() -> list[list[str]]:
    made = [Namespace(version=v, all_reduce=a, bucket_kib=None, profile=None) for v, a in DEMOS]
    found = [demo(args, dist.group.WORLD, torch.device("cpu")) for args in made]
    another = lambda model: Decoder().double()  # noqa: E731
    with patch("gradient_reducers.deepcopy", another if dist.get_rank() else deepcopy):  # a reference of rank 1 alone
        return [*found, demo(made[1], dist.group.WORLD, torch.device("cpu"))]


DEMOS = [("naive", "ring"), ("bucketed", "torch")]


def test_the_demo_finds_nothing_wrong_and_the_smallest_bucket_is_an_option(monkeypatch, tmp_path):
    assert run_ranks(2, demos, timeout=LIMIT) == [[[], [], ["rank 1: largest error against the reference"]]] * 2
    monkeypatch.setattr(sys, "argv", ["gradient_reducers.py", "--bucket-kib", "1", "--profile", str(tmp_path)])
    args = parse_arguments()
    assert (args.bucket_kib, args.profile, args.version) == (1, tmp_path, "bucketed")


def test_more_ranks_than_gpus_are_refused_and_as_many_are_not(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gradient_reducers.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert parse_arguments().version == "bucketed"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert refusal(parse_arguments) == "--nproc_per_node 5 is more than the GPUs here; use 4 or less"


def drop_a_reducer():
    model = nn.Linear(3, 2)
    reducer = BucketedReducer(model, dist.group.WORLD)
    assert reducer.bucket_bytes == 25 * 2**20, "unless another size is given"
    model(torch.ones(1, 3)).sum().backward()
    reducer.finish()
    reference = weakref.ref(reducer)
    del model, reducer
    gc.collect()
    return reference() is None


def test_a_reducer_that_is_no_longer_used_is_freed_with_its_buckets_and_its_group():
    assert run_ranks(1, drop_a_reducer) == [True]
