"""The core file of ZeRO against a model written a second time, against in_depth, and against the harness's meters."""

import argparse
import contextlib
import copy
import gc
import io
import math
import sys
import time
import weakref
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zero
from harness.late import Late
from harness.meter import communication, peak_memory
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_trace, assert_same_traces
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from zero import IGNORE_INDEX, STAGES, FlatParam, bytes_stored, expected_bytes, forward_backward, get_batch, main

# ---------------------------------------------------------------------- the reference: the full model, a second time


def reference_logits(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """[B, S] -> [B, S, V], from a dict of parameters: no module, no fused attention."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).rsqrt() * weight

    x = w["0.weight"][tokens]
    for i in ("1", "2"):
        h = norm(x, w[f"{i}.attn_norm.weight"])
        q, k, v = ((h @ w[f"{i}.{name}_proj.weight"].T).unflatten(-1, (zero.N_HEADS, -1)) for name in "qkv")
        future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        scores = torch.einsum("bind,bjnd->bnij", q, k) / math.sqrt(q.shape[-1])
        probs = scores.masked_fill(future, -math.inf).softmax(-1)
        x = x + torch.einsum("bnij,bjnd->bind", probs, v).flatten(2) @ w[f"{i}.o_proj.weight"].T
        h = norm(x, w[f"{i}.mlp_norm.weight"])
        gate = h @ w[f"{i}.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w[f"{i}.up_proj.weight"].T)) @ w[f"{i}.down_proj.weight"].T
    return norm(x, w["3.0.weight"]) @ w["3.1.weight"].T


def build_layers() -> list[nn.Module]:
    return zero.build_layers(torch.device("cpu"))


def initial_params(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    model = nn.Sequential(*build_layers())
    return {name: p.detach().to(dtype).clone().requires_grad_() for name, p in model.named_parameters()}


def reference_loss(w: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    logits = reference_logits(w, tokens.reshape(-1, tokens.shape[-1])).flatten(0, 1)
    valid = labels.flatten() != IGNORE_INDEX
    return -logits[valid].log_softmax(-1).gather(1, labels.flatten()[valid][:, None]).sum() / valid.sum()


def batch_of(step: int, dp: int, micro_batches: int) -> tuple[Tensor, Tensor]:
    """As the script's; in every third step the last rank has no label at all."""
    tokens, labels = get_batch(step, dp, micro_batches, "cpu")
    valid = labels[..., :-1] != IGNORE_INDEX
    assert torch.equal(labels[..., :-1][valid], tokens[..., 1:][valid]), "a label is the token after it"
    other = get_batch(step + 1, dp, micro_batches, "cpu")[0]
    assert (~valid).any() and not torch.equal(tokens, other), "some labels are missing, and each step has its own batch"
    if step % 3 == 1 and dp > 1:
        labels[-1] = IGNORE_INDEX
    return tokens, labels


def reference(dp: int, micro_batches: int = 2, optimizer=torch.optim.SGD, first: int = 0, **options) -> Trace:
    w, trace = initial_params(), Trace()
    optimizer = optimizer(w.values(), **({"lr": 0.1} | options))
    for step in range(first, first + 3):
        loss = reference_loss(w, *batch_of(step, dp, micro_batches))
        optimizer.zero_grad()
        loss.backward()
        trace.losses.append(loss.item())
        trace.gradients.append({name: x.grad.clone() for name, x in w.items()})
        optimizer.step()
    trace.weights = {name: x.detach() for name, x in w.items()}
    return trace


def options_of(prefetch: int | None) -> dict[str, int]:
    return {} if prefetch is None else {"prefetch": prefetch}


def shards_of(sharded) -> list[Tensor]:
    return [flat_param.shard for flat_param in sharded.flat_params]


def by_name(sharded, shards: list[Tensor]) -> dict[str, Tensor]:
    """Shards of all ranks, put together by plain collectives of the test."""
    names, tensors = list(dict(nn.Sequential(*build_layers()).named_parameters())), []
    for flat_param, shard in zip(sharded.flat_params, shards, strict=True):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(sharded.group))]
        dist.all_gather(parts, shard.detach().clone(), group=sharded.group)
        full = torch.cat(parts)
        for shape in flat_param.shapes.values():
            tensors.append(full[: shape.numel()].view(shape).clone())
            full = full[shape.numel() :]
        assert not full.any(), "the padding of a flat parameter is not zero any more"
    return dict(zip(names, tensors, strict=True))


def forward_with_nothing_in_flight(sharded, forward, x: Tensor) -> Tensor:
    in_flight = [each for each in sharded.flat_params if getattr(each, "in_flight", None)]
    assert not in_flight, "a full gradient lives on in the next forward pass"
    return forward(x)


def train(
    stage: str, group=None, micro_batches: int = 2, optimizer=torch.optim.SGD, prefetch=None, first: int = 0, **options
) -> Trace:
    group = group or dist.group.WORLD
    dp, rank, trace = dist.get_world_size(group), dist.get_rank(group), Trace()
    sharded = STAGES[stage](build_layers(), group, **options_of(prefetch))
    sharded.forward = partial(forward_with_nothing_in_flight, sharded, sharded.forward)
    shards = shards_of(sharded)
    optimizer = optimizer(shards, **({"lr": 0.1} | options))
    for step in range(first, first + 3):
        tokens, labels = batch_of(step, dp, micro_batches)
        trace.losses.append(forward_backward(sharded, tokens[rank], labels[rank]).item())
        trace.gradients.append(by_name(sharded, [shard.grad for shard in shards]))
        optimizer.step()
        sharded.gather_params()
        optimizer.zero_grad()
    if stage in "12":  # what the layers compute with is what the owners of the shards have
        for flat_param in sharded.flat_params:
            own = flat_param.full.detach().chunk(dp)[rank]
            assert_same(own, flat_param.shard, 0.0, "this rank's part of the full parameters", rank)
    trace.weights = by_name(sharded, shards)
    return trace


@pytest.mark.always("1-2", "3-4", "3-simple-2")
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_three_steps_match_reference(stage, dp):
    assert_same_traces(run_ranks(dp, train, stage), reference(dp))


@pytest.mark.always("2")
@pytest.mark.parametrize("stage", STAGES)
def test_three_micro_batches_on_three_ranks_match_reference(stage):
    assert_same_traces(run_ranks(3, train, stage, micro_batches=3), reference(3, 3))


@pytest.mark.always("3-simple", "1")
@pytest.mark.parametrize("stage", STAGES)
def test_adamw_with_weight_decay_matches_reference(stage):
    options = {"optimizer": torch.optim.AdamW, "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
    wants = reference(2, **options)
    assert_same_traces(run_ranks(2, train, stage, **options | {"optimizer": zero.OPTIMIZERS["adamw"]}), wants)


def train_in_slices(stage: str) -> Trace:
    groups = [dist.new_group([2, 0]), dist.new_group([3, 1])]  # not contiguous; torch sorts their ranks
    return train(stage, groups[dist.get_rank() % 2], first=30 * (dist.get_rank() % 2))  # each its own data


@pytest.mark.always("3")
@pytest.mark.parametrize("stage", STAGES)
def test_two_slices_of_the_world_train_two_models(stage):
    expected = [reference(2, first=first) for first in (0, 30)]
    for rank, got in enumerate(run_ranks(4, train_in_slices, stage)):
        assert_same_trace(got, expected[rank % 2], rank=rank)


# ------------------------------------------------------------------------------------------------------ order in time


def train_lazily(stage: str, prefetch: int | None) -> Trace:
    with patch.multiple(zero, all_gather=Late(zero.all_gather), reduce_scatter=Late(zero.reduce_scatter)):
        return train(stage, prefetch=prefetch)


@pytest.mark.always("3-0", "2-None")
@pytest.mark.parametrize(("stage", "prefetch"), [("1", None), ("2", None), ("3", 1), ("3", 0), ("3-simple", None)])
def test_no_result_is_used_before_its_wait(stage, prefetch):
    assert_same_traces(run_ranks(2, train_lazily, stage, prefetch), reference(2))


class Noted:
    """A collective in flight, and a list that says when it is waited for."""

    def __init__(self, work: dist.Work, name: str, events: list[tuple]):
        self.work, self.name, self.events = work, name, events

    def wait(self) -> None:
        self.events.append(("wait", self.name))
        self.work.wait()


def events_of(stage: str, prefetch: int | None) -> list[tuple]:
    sharded = STAGES[stage](build_layers(), dist.group.WORLD, **options_of(prefetch))
    tokens, labels = get_batch(0, 2, 1, "cpu")
    events = []

    def noted(name: str):
        collective = getattr(zero, name)
        return lambda *args, **options: Noted(collective(*args, **options), name, events)

    messages = {name: noted(name) for name in ("all_gather", "reduce_scatter")}
    with patch.multiple(zero, **messages), zero.recording(sharded, events, []):
        forward_backward(sharded, tokens[dist.get_rank()], labels[dist.get_rank()])
    return events


SHORT = {"start_all_gather": "gather", "run_layer": "run"}
SHORT |= {"start_reduce_scatter": "reduce", "wait_reduce_scatter": "sum"}
ORDERS = {
    ("1", None): "run0 run1 run2 run3 reduce0 reduce1 reduce2 reduce3 sum0 sum1 sum2 sum3",
    ("2", None): "run0 run1 run2 run3 reduce3 reduce2 sum3 reduce1 sum2 reduce0 sum1 sum0",
    ("3", 1): "gather0 gather1 run0 gather2 run1 gather3 run2 run3 "
    "gather3 gather2 run3 reduce3 gather1 run2 reduce2 sum3 gather0 run1 reduce1 sum2 run0 reduce0 sum1 sum0",
    ("3", 0): "gather0 run0 gather1 run1 gather2 run2 gather3 run3 "
    "gather3 run3 reduce3 sum3 gather2 run2 reduce2 sum2 gather1 run1 reduce1 sum1 gather0 run0 reduce0 sum0",
}
ORDERS["3", None] = ORDERS["3", 1]  # where no other is asked for


@pytest.mark.parametrize(("stage", "prefetch"), ORDERS)
def test_order_of_collectives_and_layers(stage, prefetch):
    for rank, events in enumerate(run_ranks(2, events_of, stage, prefetch)):
        order = [f"{SHORT[name]}{layer}" for name, layer in events if name != "wait"]
        assert order == ORDERS[stage, prefetch].split(), f"rank {rank}: {' '.join(order)}"
        if stage == "3":  # the k-th run of a layer waits for k all-gathers: only its own parameters have to be there
            for k, at in enumerate([at for at, (name, _) in enumerate(events) if name == "run_layer"], 1):
                assert events[:at].count(("wait", "all_gather")) == k, f"rank {rank}: waits before run {k}"
        done = sorted(events.index(("wait_reduce_scatter", layer)) for layer in range(4))
        for before, at in enumerate(done):  # nothing waits for a sum but `wait_reduce_scatter`
            waited = events[:at].count(("wait", "reduce_scatter"))
            assert waited == before, f"rank {rank}: {waited - before} sums are waited for too early"


# -------------------------------------------------------------------------------------------------------------- bytes


class FullTensors:
    """The most bytes of full parameters and full gradients that are alive when a collective starts."""

    def __init__(self):
        self.refs: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def watch(self, tensor: Tensor) -> None:
        self.refs[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        self.refs = {ref: nbytes for ref, nbytes in self.refs.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.refs.values()))

    def watched(self, name: str):
        collective, full = getattr(zero, name), {"all_gather": 0, "reduce_scatter": 1}[name]  # its output, its input

        def call(*tensors: Tensor, **options):
            self.watch(tensors[full])
            return collective(*tensors, **options)

        return call


def count_bytes(
    stage: str, micro_batches: int, prefetch: int | None, adam: bool, steps: int = 2
) -> tuple[int, int, int]:
    """Stored after the backward pass, sent per step, by the harness; and the peak of full tensors."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    with peak_memory() as memory:
        sharded = STAGES[stage](build_layers(), dist.group.WORLD, **options_of(prefetch))
        shards = shards_of(sharded)
        optimizer = torch.optim.AdamW(shards) if adam else torch.optim.SGD(shards)
        full = FullTensors()
        for flat_param in sharded.flat_params if stage in "12" else ():
            full.watch(flat_param.full)
        for step in range(steps):
            tokens, labels = (x[rank].clone() for x in get_batch(step, dp, micro_batches, "cpu"))
            watched = {name: full.watched(name) for name in ("all_gather", "reduce_scatter")}
            with communication() as wire, patch.multiple(zero, **watched):
                forward_backward(sharded, tokens, labels)
                stored = min(settled(memory) for _ in range(5)) - tokens.nbytes - labels.nbytes
                optimizer.step()
                sharded.gather_params()
            optimizer.zero_grad()
            del tokens, labels
    return stored, wire.sent["reduce_scatter"] + wire.sent["all_gather"], full.peak


def settled(memory: peak_memory) -> int:
    gc.collect()
    time.sleep(0.005)  # Gloo frees a buffer a little later
    return memory.current


def flat_sizes(dp: int) -> list[int]:
    """Bytes of each flat parameter."""
    return [8 * dp * -(-sum(x.numel() for x in layer.parameters()) // dp) for layer in build_layers()]


@pytest.mark.always("3-4", "2-2")
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_stored_and_sent_match_the_formulas(stage, dp):
    sizes = flat_sizes(dp)
    stored, sent = expected_bytes(int(stage[0]), sum(sizes) // 8, dp, 2, 3)
    grads = [sum(sizes[i : i + 2]) for i in range(4)]  # a layer's, and that of the layer above, in flight
    params = [sum(sizes[max(i - 1, 0) : i + 1]) for i in range(4)]  # a layer's, and those of the layer below
    peak = {"1": 2 * sum(sizes), "2": sum(sizes) + max(grads), "3": max(map(sum, zip(grads, params, strict=True)))}
    for rank, got in enumerate(run_ranks(dp, count_bytes, stage, 2, 1 if stage == "3" else None, True)):
        small = 16 * 4 + 64  # Adam's step counters, the loss
        assert 0 <= got[0] - stored <= small, f"rank {rank} stores {got[0]:,} bytes, by formula {stored:,}"
        assert got[1] == sent, f"rank {rank} sends {got[1]:,} bytes, by formula {sent:,}"
        if stage == "3-simple":
            assert got[2] <= 2 * max(sizes), f"rank {rank} has {got[2]:,} bytes of full tensors"
        else:
            assert got[2] == peak[stage], f"rank {rank} has {got[2]:,} bytes in full, by formula {peak[stage]:,}"


@pytest.mark.always("2-3-4")
@pytest.mark.parametrize(
    ("stage", "micro_batches", "times"), [("1", 3, 2), ("2", 3, 4), ("3", 3, 9), ("2", 1, 2), ("3", 1, 3)]
)
def test_bytes_sent_grow_with_micro_batches_by_the_stage(stage, micro_batches, times):
    [(_, sent, _), _] = run_ranks(2, count_bytes, stage, micro_batches, None, False, steps=1)
    assert sent == times * sum(flat_sizes(2)) // 2


def bytes_beyond_shards(stage: str) -> list[int]:
    """After each of three steps with a validation whose backward pass never comes."""
    before, counts, rank = bytes_stored(), [], dist.get_rank()
    sharded = STAGES[stage](build_layers(), dist.group.WORLD)
    optimizer = torch.optim.SGD(shards_of(sharded), lr=0.1)
    for step in range(3):
        tokens, labels = get_batch(step, 2, 2, "cpu")
        forward_backward(sharded, tokens[rank], labels[rank])
        optimizer.step()
        sharded.gather_params()
        optimizer.zero_grad()
        with torch.no_grad():
            sharded.forward(tokens[rank, 0])
        counts.append(min(bytes_stored() for _ in range(2)) - before)
    shards = sum(shard.nbytes for shard in shards_of(sharded))
    return [count - shards - (2 * shards if stage in "12" else 0) for count in counts]


@pytest.mark.always("3")
@pytest.mark.parametrize("stage", STAGES)
def test_no_step_and_no_validation_leaves_memory_behind(stage):
    for counts in run_ranks(2, bytes_beyond_shards, stage):
        assert counts == [0] * 3, f"bytes beyond the shards and, at stages 1 and 2, the parameters: {counts}"


# -------------------------------------------------------------------------------------------------------- modes, casts


def is_freed(stage: str) -> bool:
    sharded = STAGES[stage](build_layers(), dist.group.WORLD)
    tokens, labels = get_batch(0, 1, 1, "cpu")
    forward_backward(sharded, tokens[0], labels[0])
    reference = weakref.ref(sharded)
    del sharded
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("stage", STAGES)
def test_an_unused_model_is_freed_with_its_group(stage):
    assert run_ranks(1, is_freed, stage) == [True]


def logits_and_gradients(stage: str) -> tuple[Tensor, Tensor, bool]:
    """A forward pass without autograd, then two with it before their two backward passes."""
    sharded, rank = STAGES[stage](build_layers(), dist.group.WORLD), dist.get_rank()
    tokens, labels = get_batch(0, 2, 2, "cpu")
    with torch.no_grad():
        logits = sharded.forward(tokens[rank, 0])
    losses = [zero.loss_sum(sharded.forward(x), y) for x, y in zip(tokens[rank], labels[rank], strict=True)]
    for last, loss in enumerate(losses):
        loss.backward()
        sharded.finish_backward(last_micro_batch=bool(last))
    return logits, torch.cat([shard.grad for shard in shards_of(sharded)]), logits.requires_grad


@pytest.mark.parametrize("stage", STAGES)
def test_no_grad_and_two_forwards_before_their_backwards_match_reference(stage):
    w = initial_params()
    tokens, labels = get_batch(0, 2, 2, "cpu")
    (reference_loss(w, tokens, labels) * (labels != IGNORE_INDEX).sum()).backward()
    flats = [torch.cat([x.grad.flatten() for name, x in w.items() if name[0] == str(i)]) for i in range(4)]
    for rank, (logits, gradients, requires_grad) in enumerate(run_ranks(2, logits_and_gradients, stage)):
        assert not requires_grad
        assert_same(logits, reference_logits(w, tokens[rank, 0]).detach(), what="logits without autograd", rank=rank)
        own = [F.pad(flat, (0, len(flat) % 2)).chunk(2)[rank] for flat in flats]
        assert_same(gradients, torch.cat(own), what="gradients of two forwards", rank=rank)


def shards_of_small_layers() -> list[list[float]]:
    found = []
    for inputs in (1, 4):
        layer = nn.Linear(inputs, 1)
        layer.weight.data = torch.arange(1.0, inputs + 1)[None]
        layer.bias.data = torch.tensor([9.0])
        found.append(FlatParam(layer, dist.group.WORLD).shard.tolist())
    return found


def test_ranks_behind_the_last_parameter_of_a_layer_own_padding():
    """2 parameters on 4 ranks, and 5."""
    first, second, third, fourth = run_ranks(4, shards_of_small_layers)
    assert [first, second] == [[[1.0], [1.0, 2.0]], [[9.0], [3.0, 4.0]]]
    assert [third, fourth] == [[[0.0], [9.0, 0.0]], [[0.0], [0.0, 0.0]]]


def refuse_frozen() -> list[str]:
    said = []
    for what in ("q_proj", ""):  # one weight; a whole layer
        layers = build_layers()
        layers[1].get_submodule(what).requires_grad_(False)
        with pytest.raises(ValueError) as refusal:
            zero.Zero3(layers, dist.group.WORLD)
        said.append(str(refusal.value))
    return said


def test_a_frozen_parameter_is_refused_by_name():
    (messages,) = run_ranks(1, refuse_frozen)
    for message in messages:
        assert "q_proj.weight" in message and "frozen" in message and "\n" not in message


def without_labels() -> tuple[Tensor, list[Tensor]]:
    sharded, rank = zero.Zero3(build_layers(), dist.group.WORLD), dist.get_rank()
    tokens, labels = get_batch(0, 2, 2, "cpu")
    loss = forward_backward(sharded, tokens[rank], torch.full_like(labels[rank], IGNORE_INDEX))
    return loss, [shard.grad for shard in shards_of(sharded)]


def test_a_batch_without_labels_has_zero_loss_and_zero_gradients():
    for rank, (loss, gradients) in enumerate(run_ranks(2, without_labels)):
        assert loss == 0, f"rank {rank}: {loss}"
        for i, gradient in enumerate(gradients):
            assert_same(gradient, torch.zeros_like(gradient), 0.0, f"gradient of layer {i}'s shard", rank)


MANY = 32  # micro-batches, so that it matters in which dtype they are summed


def gradient_in_bf16(stage: str, micro_batches: int = MANY) -> list[Tensor]:
    layers = [layer.float() for layer in build_layers()]
    sharded = STAGES[stage](layers, dist.group.WORLD, param_dtype=torch.bfloat16)
    tokens, labels = get_batch(0, 2, micro_batches, "cpu")
    with communication() as wire:
        forward_backward(sharded, tokens[dist.get_rank()], labels[dist.get_rank()])
        sharded.gather_params()
    sent = wire.sent["reduce_scatter"] + wire.sent["all_gather"]
    formula = expected_bytes(int(stage[0]), sum(flat_sizes(2)) // 8, 2, micro_batches, 0)[1] // 4  # 2 bytes and not 8
    assert sent == formula, f"{sent:,} bytes are sent, by formula {formula:,}"
    for shard in shards_of(sharded):
        assert shard.dtype == shard.grad.dtype == torch.float32, "the master copy and its gradient are in fp32"
    return list(by_name(sharded, [shard.grad for shard in shards_of(sharded)]).values())


@pytest.mark.parametrize("stage", STAGES)
def test_with_parameters_in_bf16_messages_are_narrow_and_sums_of_micro_batches_wide(stage):
    for rank, gradients in enumerate(run_ranks(2, gradient_in_bf16, stage, 2)):
        wide = any(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
        assert wide == (stage != "1"), f"rank {rank}: digits beyond those of bf16: {wide}"


@cache
def gradients_of_one_process() -> tuple[Tensor, dict[bool, float]]:
    """In float64; and the error of bf16 whose micro-batches are summed in wide numbers, or where autograd does."""
    tokens, labels = get_batch(0, 2, MANY, "cpu")
    w = initial_params()
    reference_loss(w, tokens, labels).backward()
    expected = torch.cat([x.grad.flatten() for x in w.values()])
    dense = nn.Sequential(*build_layers()).to(torch.bfloat16)
    sums = {True: torch.zeros_like(expected), False: torch.zeros_like(expected, dtype=torch.bfloat16)}
    for x, y in zip(tokens.flatten(0, 1), labels.flatten(0, 1), strict=True):
        (zero.loss_sum(dense(x), y) / (labels != IGNORE_INDEX).sum()).backward()
        for total in sums.values():
            total += torch.cat([p.grad.flatten() for p in dense.parameters()])
        dense.zero_grad()
    return expected, {wide: ((x - expected).norm() / expected.norm()).item() for wide, x in sums.items()}


@pytest.mark.always("3-simple")
@pytest.mark.parametrize("stage", STAGES)
def test_a_bf16_gradient_is_as_close_to_float64_as_that_of_one_process(stage):
    expected, errors = gradients_of_one_process()
    own = errors[stage != "1"]  # stage 1 sums micro-batches where autograd does: in the gradient's own dtype
    for rank, gradients in enumerate(run_ranks(2, gradient_in_bf16, stage)):
        error = ((torch.cat([g.flatten().double() for g in gradients]) - expected).norm() / expected.norm()).item()
        assert error <= 1.5 * own, f"rank {rank}: {error:.2e} from float64, one process {own:.2e}"


# ---------------------------------------------------------------------------------------------------- in_depth, script


def train_in_depth(stage: int) -> Trace:
    sys.path.insert(0, str(Path(zero.__file__).parent / "in_depth"))
    from zero3 import make_zero

    rank, dp, trace = dist.get_rank(), dist.get_world_size(), Trace()
    model = nn.Sequential(*build_layers())
    deep = make_zero(stage, model, torch.optim.SGD(model.parameters(), lr=0.1), dist.group.WORLD, units=list(model))
    for step in range(3):
        tokens, labels = batch_of(step, dp, 2)
        loss = torch.zeros((), dtype=torch.float64)
        deep.zero_grad()
        for m in range(2):
            with deep.micro_batch(last=m == 1):
                part = zero.loss_sum(model(tokens[rank, m]), labels[rank, m]) / (labels != IGNORE_INDEX).sum()
                part.backward()
                loss += part.detach()
        dist.all_reduce(loss)
        trace.losses.append(loss.item())
        trace.gradients.append(deep.full_gradients())
        deep.step()
    trace.weights = deep.full_weights()
    return trace


@pytest.mark.always("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_depth_agrees(stage):
    deep = run_ranks(2, train_in_depth, stage)
    for rank, (got, expected) in enumerate(zip(run_ranks(2, train, str(stage)), deep, strict=True)):
        assert_same_trace(got, expected, rank=rank)


def run_main(*options: str) -> tuple[int, str]:
    """Exit code and output of the script's own main, in the ranks that are there already."""
    out = io.StringIO()
    keep_group = patch.multiple(dist, init_process_group=lambda *a, **k: None, destroy_process_group=lambda: None)
    with keep_group, contextlib.redirect_stdout(out), patch.object(sys, "argv", ["zero.py", *options]):
        return main(), out.getvalue()


def run_main_with_nan(stage: str) -> tuple[int, str]:
    """One rank's gradient turns into NaN."""
    run_layer = FlatParam.run_layer

    def run_with_nan(self, full: Tensor, x: Tensor) -> Tensor:
        y = run_layer(self, full, x)
        if dist.get_rank() == 1 and y.requires_grad:
            y.register_hook(lambda grad: grad * math.nan)  # the first loss stays what it should be
        return y

    with patch.object(FlatParam, "run_layer", run_with_nan):
        return run_main("--stage", stage)


@pytest.mark.always("1")
@pytest.mark.parametrize("stage", STAGES)
def test_nan_on_one_rank_fails_on_all(stage):
    for code, out in run_ranks(2, run_main_with_nan, stage):
        assert code == 1
        assert "PASS" not in out


def checks_next_to_wrong_references() -> list[bool]:
    """Of stage 1 with three micro-batches, next to a right reference and to others that are wrong on rank 1 alone."""
    args = argparse.Namespace(optimizer="sgd", micro_batches=3)
    rank, group, device = dist.get_rank(), dist.group.WORLD, torch.device("cpu")
    right, passed = zero.train_reference(args, group, device), []
    only_sent = lambda *of: (0, expected_bytes(*of)[1])  # noqa: E731
    only_errors = patch.multiple(zero, bytes_stored=lambda: 0, expected_bytes=only_sent)
    with only_errors, contextlib.redirect_stdout(io.StringIO()):
        for fault in ("none", "loss", "gradient", "parameter"):
            history = copy.deepcopy(right)
            loss, grads, params = history[1]
            grads[3][0] += 1e-6 * rank if fault == "gradient" else 0.0
            params[0][0] += 1e-6 * rank if fault == "parameter" else 0.0
            history[1] = (loss + (1e-6 * rank if fault == "loss" else 0.0), grads, params)
            passed.append(zero.check("1", history, args, group, device))
    return passed


def test_the_check_compares_losses_gradients_and_parameters_of_every_rank():
    assert run_ranks(2, checks_next_to_wrong_references) == [[True, False, False, False]] * 2


def run_main_with_a_stage_off() -> tuple[int, str]:
    """Of stages 2 and 3 the first stores a byte more than expected, on rank 1."""
    real = zero.expected_bytes
    off = lambda stage, *of: (real(stage, *of)[0] - (stage == 2) * dist.get_rank(), real(stage, *of)[1])  # noqa: E731
    with patch.multiple(zero, expected_bytes=off, STAGES={stage: STAGES[stage] for stage in "23"}):
        return run_main("--micro-batches", "3", "--optimizer", "adamw", "--prefetch", "0")


def test_a_stage_that_fails_on_one_rank_fails_the_script_on_all():
    (code, out), other = run_ranks(2, run_main_with_a_stage_off)
    assert (code, other[0]) == (1, 1) and out.splitlines()[-1] == "FAIL"
    shown = [line.replace(", by formula", "").split()[-2:] for line in out.splitlines() if "formula" in line]
    assert len(shown) == 4 and all(measured == formula for measured, formula in shown), out
    num_params = sum(flat_sizes(2)) // 8
    formulas = [number for stage in (2, 3) for number in expected_bytes(stage, num_params, 2, 3, 3)]
    assert [formula for _, formula in shown] == [f"{number:,}" for number in formulas], "of three micro-batches, AdamW"
    assert "start_all_gather 0, run_layer 0, start_all_gather 1" in out, "--prefetch 0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--stage 0", ["--stage", "0"]),
        ("--prefetch 2", ["--prefetch", "2"]),
        ("--micro-batches 0", ["--micro-batches", "0"]),
        (["--micro-batches", ""], ["--micro-batches", "''"]),
        ("--optimizer adam", ["--optimizer", "adam"]),
        ("--micro 2", ["--micro", "2"]),
        ("7", ["7"]),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(options, words):
    said = refusal(main, options)
    assert all(word in said for word in words), said


def test_only_the_stage_that_is_asked_for_is_checked():
    (code, out), _ = run_ranks(2, run_main, "--stage", "2")
    assert code == 0 and out.startswith("stage 2:") and out.count("stage ") == 1 and out.endswith("PASS\n")
