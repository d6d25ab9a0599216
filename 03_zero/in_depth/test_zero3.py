"""Stage 3 against the reference of the other stages; and that weights are really not there when nobody uses them."""

import gc
import time
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _zero_demo import IGNORE, Block, Decoder, make_batch, token_loss_sum, train_step, valid_tokens
from harness.meter import communication, peak_memory, storage_bytes
from harness.programs import error_from
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_named, assert_same_trace, assert_same_traces
from test_zero_stages import (
    assert_clipped_as_by_torch,
    assert_reduced_by_hand,
    awkward,
    decoder,
    distance_from_float64,
    in_two_groups,
    loss_without_an_mlp,
    mean_loss,
    mixed_steps,
    one_process_in_bf16,
    reference_trace,
    sgd,
    sharded_steps,
    started_by_hand,
    unsharded_mixed_steps,
    whole_batch,
    with_momentum,
    zero_trace,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero3 import Dropped, Zero3, make_zero
from zero_stages import ExchangeAndSum, SendToAll


def zero3(model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, **options) -> Zero3:
    return Zero3(model, optimizer, group, units=model.layers, **options)


# ---------------------------------------------------------------------------------------------- the one reference


def trace(build: Callable[..., nn.Module] = decoder, micro_batches: int = 2, **options) -> Trace:
    return zero_trace(lambda *a: zero3(*a, **options), dist.group.WORLD, build, micro_batches=micro_batches)


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_loss_gradients_and_weights_after_three_steps_equal_the_unsharded_model(ranks):
    assert_same_traces(run_ranks(ranks, trace), reference_trace(ranks))


@pytest.mark.always("options0")
@pytest.mark.parametrize("options", [{"keep": False}, {"prefetch": False}])
def test_results_do_not_depend_on_what_is_kept_or_prefetched(options):
    assert_same_traces(run_ranks(2, trace, **options), reference_trace(2))


@pytest.mark.prove
def test_point_to_point_gives_what_the_collectives_give():
    want = reference_trace(3, micro_batches=3)
    options = {"reduce_scatter": ExchangeAndSum, "all_gather": SendToAll}
    for rank, got in enumerate(run_ranks(3, trace, decoder, 3, **options)):
        assert_same_trace(got, want, rank=rank)


def test_frozen_tied_unused_and_tiny_parameters_train_as_in_the_unsharded_model():
    assert_same_traces(run_ranks(3, trace, awkward, 3), reference_trace(3, awkward, micro_batches=3))


def two_slices() -> Trace:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    return zero_trace(zero3, groups[mine], seed=mine)


@pytest.mark.prove
def test_two_slices_of_the_world_train_two_models_at_the_same_time():
    want = [reference_trace(2, seed=mine) for mine in (0, 1)]
    for rank, got in enumerate(run_ranks(4, two_slices)):
        assert_same_trace(got, want[rank % 2], rank=rank)


class Recomputing(Decoder):
    """Every block is computed again in backward."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class RecomputingOldWay(Recomputing):
    reentrant = True


class BlockOfNested(Block):
    def forward(self, *, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": super().forward(inputs["x"])}


class Nested(Decoder):
    """A unit is given a tensor by keyword, in a dictionary, and returns another."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            layer.__class__ = BlockOfNested
            x = layer(inputs={"x": x})["x"]
        return self.head(self.norm(x))


class Looping(Decoder):
    """The stack of layers is used twice, with the same weights."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.head(self.norm(x))


def of_kind(kind: type[Decoder]) -> Callable[[int], nn.Module]:
    def build(seed: int = 0) -> nn.Module:
        model = decoder(seed)
        model.__class__ = kind
        return model

    return build


def trace_of_kind(kind: type[Decoder]) -> tuple[Trace, int]:
    with communication() as sent:
        got = trace(of_kind(kind))
    return got, sent.calls["all_gather"]


@pytest.mark.always("Recomputing")
@pytest.mark.parametrize("kind", [Recomputing, RecomputingOldWay])
def test_recomputation_finds_the_weights_gathered_and_gathers_nothing_twice(kind):
    want = reference_trace(2)
    plain = run_ranks(2, trace_of_kind, Decoder)[0][1]
    for rank, (got, gathers) in enumerate(run_ranks(2, trace_of_kind, kind)):
        assert_same_trace(got, want, rank=rank)
        # Under the old kind autograd sees no backward coming while it does forward, so the last unit is not kept.
        assert gathers == plain + (0 if kind is Recomputing else 3 * 2)


def test_a_unit_may_be_used_twice_in_a_forward():
    want = reference_trace(2, of_kind(Looping))
    for rank, (got, _) in enumerate(run_ranks(2, trace_of_kind, Looping)):
        assert_same_trace(got, want, rank=rank)


@pytest.mark.always("with_momentum")
@pytest.mark.parametrize("optimizer_of", [in_two_groups, with_momentum])
def test_four_clipped_steps_with_a_schedule_equal_those_of_torch(optimizer_of):
    assert_clipped_as_by_torch(run_ranks(3, clipped_steps, optimizer_of), optimizer_of)


def clipped_steps(optimizer_of: Callable) -> tuple[list[float], dict[str, Tensor]]:
    return sharded_steps(zero3, optimizer_of, awkward(), 0.5)


def test_bf16_with_master_weights_is_bit_equal_to_the_unsharded_run_where_the_order_of_sums_is():
    want = unsharded_mixed_steps(2)
    for got in run_ranks(2, mixed_steps, zero3, 1):
        for name in want:
            assert torch.equal(got[name], want[name]), name


# ------------------------------------------------------------------------------------ unused parameters, accumulation


class Skipping(Decoder):
    """Leaves the second half of layer 1 out when told to: its parameters then get no gradient on this rank."""

    skip = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))
        block = self.layers[1]
        if self.skip:
            block.forward = lambda x: x + block.out(block.norm1(x))
        elif "forward" in block.__dict__:
            del block.__dict__["forward"]
        return self.head(self.norm(block(x)))


def skipping_decoder() -> Skipping:
    model = decoder()
    model.__class__ = Skipping
    return model


def each_rank_skips_differently() -> tuple[dict[str, Tensor], list[str]]:
    model, rank = skipping_decoder(), dist.get_rank()
    zero = zero3(model, sgd(model), dist.group.WORLD)
    batch = make_batch(0, dist.get_world_size(), 2)[rank]
    valid = valid_tokens(batch, dist.group.WORLD)
    zero.zero_grad()
    with communication() as sent:
        for i, (x, y) in enumerate(batch):
            model.skip = (rank + i) % 2 == 1
            with zero.micro_batch(last=i == 1):
                (token_loss_sum(model, x, y) / valid).backward()
    return zero.full_gradients(), [name for name, _, _ in sent.events]


def test_ranks_that_use_different_parameters_still_call_the_same_collectives_in_the_same_order():
    model = skipping_decoder()
    batch = make_batch(0, 3, 2)
    valid = sum((y != IGNORE).sum() for part in batch for _, y in part)
    for rank, part in enumerate(batch):
        for i, (x, y) in enumerate(part):
            model.skip = (rank + i) % 2 == 1
            (token_loss_sum(model, x, y) / valid).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    results = run_ranks(3, each_rank_skips_differently)
    for rank, (got, calls) in enumerate(results):
        assert_same_named(got, want, what="gradient of", rank=rank)
        assert calls == results[0][1]


def accumulated_without_sending() -> tuple[dict[str, Tensor], int, int]:
    model, rank = decoder(), dist.get_rank()
    zero = zero3(model, sgd(model), dist.group.WORLD)
    batch = make_batch(0, dist.get_world_size(), 3)[rank]
    valid = valid_tokens(batch, dist.group.WORLD)
    zero.zero_grad()
    with communication() as sent:
        with zero.no_sync():
            for x, y in batch[:2]:
                (token_loss_sum(model, x, y) / valid).backward()
        held = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
        with zero.micro_batch(last=True):
            (token_loss_sum(model, *batch[2]) / valid).backward()
    return zero.full_gradients(), held, sent.calls["reduce_scatter"]


def test_no_sync_reduces_once_and_costs_whole_gradients():
    model = decoder()
    mean_loss(model, *whole_batch(0, 2, 3)).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for rank, (got, held, reductions) in enumerate(run_ranks(2, accumulated_without_sending)):
        assert_same_named(got, want, what="gradient of", rank=rank)
        assert held == 8 * sum(p.numel() for p in model.parameters())
        assert reductions == 3  # two layers and the root, once


# --------------------------------------------------------------------------------------------------- bytes, exactly


def padded_units(model: Decoder, ranks: int) -> list[int]:
    """Elements of each layer and, last, of what is in no layer; each padded."""
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    units = [*layers, sum(p.numel() for p in model.parameters()) - sum(layers)]
    return [-(-n // ranks) * ranks for n in units]


def bytes_of_a_step(keep: bool = True, checkpointed: bool = False) -> dict[str, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = make_batch(0, ranks)[rank]
    bell = torch.zeros(1)  # a barrier of torch 2.11 makes a tensor of one byte, and keeps it
    with peak_memory() as memory:
        model = decoder(dtype=torch.bfloat16)
        if checkpointed:
            model.__class__ = Recomputing
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zero3(model, optimizer, dist.group.WORLD, master=torch.float32, keep=keep)
        with communication() as sent:
            train_step(model, zero, batch)
            zero.step()
        dist.all_reduce(bell)
        time.sleep(0.2)  # gloo's threads may hold on to a buffer a little longer than its collective
        gc.collect()
        counters = sum(v.nbytes for state in zero.state.values() for v in state.values() if v.dim() == 0)
        alive = memory.current - counters
    return {
        "alive": alive,
        "full": storage_bytes(model.parameters()),
        "reduce_scatter": sent.sent["reduce_scatter"],
        "all_gather": sent.sent["all_gather"],
        "gathers": sent.calls["all_gather"],
    }


@cache
def bytes_of_steps(ranks: int, keep: bool) -> list[dict[str, float]]:
    return run_ranks(ranks, bytes_of_a_step, keep)


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_held_equal_sixteen_psi_over_n_exactly(ranks):
    psi = sum(padded_units(decoder(), ranks))
    for rank, got in enumerate(bytes_of_steps(ranks, True)):
        assert got["alive"] == 16 * psi // ranks, f"rank {rank}: {got}"
        assert got["full"] == 0


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_sent_equal_three_times_the_weights_and_less_for_what_is_kept(ranks):
    units = padded_units(decoder(), ranks)
    each = [2 * n * (ranks - 1) // ranks for n in units]
    for keep in (False, True):
        for got in bytes_of_steps(ranks, keep):  # two micro-batches
            assert got["reduce_scatter"] == 2 * sum(each)
            assert got["all_gather"] == 2 * (2 * sum(each) - keep * (each[-2] + each[-1]))


@pytest.mark.prove
def test_recomputation_sends_no_byte_more():
    plain, again = run_ranks(2, bytes_of_a_step)[0], run_ranks(2, bytes_of_a_step, checkpointed=True)[0]
    assert plain == again


SIZES = {"vocab": 16, "hidden": 96, "heads": 2, "layers": 6}


def peak_of_a_step(prefetch: bool) -> tuple[int, int]:
    """(peak beyond what is held, activations of one token) of forward and backward."""
    torch.manual_seed(0)
    model = Decoder(**SIZES)
    token = torch.zeros(1, 1, dtype=torch.long)
    with peak_memory() as activations:
        mean_loss(model, token, token)
    zero = zero3(model, sgd(model), dist.group.WORLD, prefetch=prefetch)
    peaks = []
    for _ in range(3):  # gloo's threads may give buffers back late
        zero.zero_grad()
        with peak_memory() as memory, zero.micro_batch(last=True):
            mean_loss(model, token, token).backward()
        peaks.append(memory.peak)
    return min(peaks), activations.peak


@pytest.mark.always("True")
@pytest.mark.parametrize("prefetch", [True, False])
def test_at_the_peak_there_are_two_units_and_the_root_and_as_much_of_gradients(prefetch):
    torch.manual_seed(0)
    model = Decoder(**SIZES)
    *units, root = (4 * n for n in padded_units(model, 2))
    largest = max(4 * p.numel() for p in model.parameters())
    whole = 4 * sum(p.numel() for p in model.parameters())
    for got, activations in run_ranks(2, peak_of_a_step, prefetch):
        weights = root + (2 if prefetch else 1) * units[0]
        gradients = root + 2 * units[0] + 2 * largest  # a buffer that fills, one on its way, what autograd makes
        assert got <= weights + gradients + 3 * activations
        assert got < whole + 3 * activations  # not even the weights alone are ever all there, or their gradients


def weights_after(what: str) -> int:
    """Bytes of gathered weights after forward, with autograd's saved tensors alive."""
    model = decoder()
    zero = zero3(model, sgd(model), dist.group.WORLD)
    tokens, labels = whole_batch(0, 1)
    if what == "inference":
        with torch.no_grad():
            mean_loss(model, tokens, labels)
    else:
        zero.finish()
        zero.in_backward = what == "error"  # as a backward leaves it that raises
        loss = mean_loss(model, tokens, labels)  # noqa: F841 - it keeps the graph alive
    if what == "update":
        zero.step()
    return storage_bytes(flat for unit in [*zero.units, zero.root] for flat in unit.flats)


def test_autograd_keeps_no_dropped_weight_alive():
    *units, root = padded_units(decoder(), 2)
    assert run_ranks(2, weights_after, "forward") == [8 * (units[-1] + root)] * 2  # what was kept on purpose
    assert run_ranks(2, weights_after, "error") == [8 * (units[-1] + root)] * 2, "it does not end with its error"
    assert run_ranks(2, weights_after, "inference") == [0, 0]
    assert run_ranks(2, weights_after, "update") == [0, 0], "what was gathered is out of date"


# ---------------------------------------------------------------------------------------------------- order of events


def events_of_a_step(kind: type[Decoder] = Decoder, **options) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    model = kind(hidden=16, heads=2, layers=4)
    zero = zero3(model, sgd(model), dist.group.WORLD, **options)
    train_step(model, zero, make_batch(0, dist.get_world_size(), 1)[dist.get_rank()])
    return [event for event in zero.events if event[0] != "ready"]


@pytest.mark.parametrize("kind", [Decoder, Recomputing, Nested])
def test_the_next_unit_is_requested_before_this_one_computes_in_forward_and_in_backward(kind):
    for events in run_ranks(2, events_of_a_step, kind):
        turn = events.index(("backward", "root"))
        forward, backward = events[:turn], events[turn:]
        for n in range(3):
            assert forward.index(("gather", f"unit {n + 1}")) < forward.index(("forward", f"unit {n}"))
            assert backward.index(("gather", f"unit {n}")) < backward.index(("backward", f"unit {n + 1}"))
            assert backward.index(("wait", f"unit {n}")) > backward.index(("backward done", f"unit {n + 1}"))
        assert ("gather", "unit 3") not in backward  # the last unit was kept
        for n in range(4):
            assert backward.index(("drop", f"unit {n}")) > backward.index(("backward done", f"unit {n}"))


@pytest.mark.parametrize("prefetch", [True, False])
def test_at_no_time_are_more_than_two_units_gathered_and_gradients_leave_during_backward(prefetch):
    for events in run_ranks(2, events_of_a_step, prefetch=prefetch):
        gathered: set[str] = set()
        for what, who in events:
            if who != "root" and what == "gather":
                gathered.add(who)
            if what == "drop":
                gathered.discard(who)
            assert len(gathered) <= 1 + prefetch, events
        reductions = [i for i, (what, _) in enumerate(events) if what == "reduce"]
        assert reductions[0] < events.index(("backward", "unit 2"))
        assert len(reductions) == 5


# --------------------------------------------------------------------------------------------------------- bad input


class Outside(nn.Module):
    """Uses a weight of its layer 0 after the layer has run."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers[1](self.layers[0](x)), self.layers[0].weight)


def with_ignored(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """One layer's two matrices are someone else's."""
    model, rank = decoder(), dist.get_rank()
    theirs = list(model.layers[0].up.parameters())
    mine = [p for p in model.parameters() if all(p is not other for other in theirs)]
    options = {"units": model.layers} if stage == 3 else {}
    group, own = dist.group.WORLD, torch.optim.SGD(mine, lr=0.1)
    zero = make_zero(stage, model, own, group, ignored=theirs, **options)
    train_step(model, zero, make_batch(0, 2, 1)[rank])
    raw = {"layers.0.up.weight": theirs[0].grad}
    return zero.full_gradients(), raw, len(zero.full_weights())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_ignored_parameter_is_left_to_its_owner(stage):
    model = decoder()
    mean_loss(model, *whole_batch(0, 2, 1)).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    results = run_ranks(2, with_ignored, stage)
    name = "layers.0.up.weight"
    assert_same(sum(raw[name] for _, raw, _ in results), want.pop(name), what="two local gradients together")
    for rank, (gradients, _, held) in enumerate(results):
        assert_same_named(gradients, want, what="gradient of", rank=rank)
        assert held == len(want)


def uses_outside() -> list[str]:
    """What is said to a weight that is used outside its unit, to one that is asked for its values, without the root."""
    outside, asked, parts = Outside(), decoder(), decoder()
    for model in (outside, asked, parts):
        zero = zero3(model, sgd(model), dist.group.WORLD)
    zero.zero_grad()
    weight = asked.layers[0].up.weight
    assert tuple(weight.shape) == (92, 23) and weight.requires_grad and isinstance(weight, Dropped)
    assert weight.grad is None
    mixed = Outside()  # a unit of two dtypes
    mixed.layers[0].bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    mixed.layers[1].bias.requires_grad_(False)
    dtypes = {name: p.dtype for name, p in mixed.named_parameters()}
    trained = torch.optim.SGD([p for p in mixed.parameters() if p.requires_grad], lr=0.1)  # without the frozen one
    held = zero3(mixed, trained, dist.group.WORLD).full_weights()
    assert dtypes == {name: weight.dtype for name, weight in held.items()}
    uses = [lambda: outside(torch.ones(2, 4)), asked.layers[1].down.weight.sum]
    uses.append(lambda: loss_without_an_mlp(parts, *whole_batch(0, 1), 0))
    return [error_from(RuntimeError, use) for use in uses]


def test_a_parameter_used_outside_its_unit_is_an_error_that_names_it():
    outside, asked, without_root = run_ranks(1, uses_outside)[0]
    assert "linear() needs parameter 'layers.0.weight' of unit 0 outside its unit" in outside
    assert "layers.1.down.weight" in asked and "'embed.weight' of root" in without_root


def shared_between_units() -> list[str]:
    messages = []
    for share in ("between units", "with the root"):
        model = decoder()
        if share == "between units":
            model.layers[1].up.weight = model.layers[0].up.weight
        else:
            model.extra = nn.Linear(23, 92, bias=False, dtype=torch.float64)
            model.extra.weight = model.layers[0].up.weight
        messages.append(error_from(ValueError, zero3, model, sgd(model), dist.group.WORLD))
    stranger = [nn.Linear(3, 2)]
    return [*messages, error_from(ValueError, Zero3, model, sgd(model), dist.group.WORLD, units=stranger)]


def test_a_parameter_of_two_units_or_of_another_model_is_refused_by_name():
    first, second, third = run_ranks(1, shared_between_units)[0]
    assert "'layers.0.up.weight'" in first and "unit 0" in first and "unit 1" in first
    assert "'layers.0.up.weight'" in second and "'extra'" in second
    assert "unit 0 has a parameter of shape [2, 3] that the module does not have" in third


def test_without_hooks_backward_reduces_nothing_and_finish_does():
    assert_reduced_by_hand(run_ranks(2, started_by_hand, zero3))


def forgotten() -> list[str]:
    model = decoder()
    zero = zero3(model, sgd(model), dist.group.WORLD)
    zero.zero_grad()
    mean_loss(model, *make_batch(0, dist.get_world_size(), 1)[dist.get_rank()][0]).backward()
    said = [error_from(RuntimeError, zero.step), error_from(RuntimeError, zero.clip_grad_norm, 1.0)]
    late = model.layers[0].up.weight
    late.grad = torch.zeros(late.shape, dtype=torch.float64)  # as if it came after all that its unit was given
    said.append(error_from(RuntimeError, zero.finish))
    zero.zero_grad()
    zero.finish()
    zero.step()
    return said


def test_step_and_clipping_refuse_while_gradients_are_not_summed():
    for *said, late in run_ranks(2, forgotten):
        assert all("stage 3" in line and "call finish()" in line for line in said), said
        assert "the gradient of 'layers.0.up.weight' came after" in late


NO_STAGES = ("2", True, 0, 2.0, 4)


def impossible() -> list[str]:
    model = decoder()
    asked = [(3, []), *((stage, model.layers) for stage in NO_STAGES)]
    return [error_from(ValueError, make_zero, s, model, sgd(model), dist.group.WORLD, units=u) for s, u in asked]


def test_a_stage_that_is_no_stage_and_a_stage_3_without_units_are_refused():
    [(first, *others)] = run_ranks(1, impossible)
    assert "units=model.layers" in first
    for said, stage in zip(others, NO_STAGES, strict=True):
        assert f"ZeRO stage {stage!r} does not exist; use 1, 2 or 3" in said


def gradient_in_bf16(wide: bool) -> tuple[dict[str, Tensor], int, float]:
    model = decoder(dtype=torch.bfloat16)
    options = dict(reduce_dtype=torch.float32, accumulate_dtype=torch.float32) if wide else {}
    zero = zero3(model, torch.optim.AdamW(model.parameters()), dist.group.WORLD, master=torch.float32, **options)
    with communication() as sent:
        train_step(model, zero, make_batch(0, dist.get_world_size(), 32, length=8)[dist.get_rank()])
    return zero.full_gradients(), storage_bytes(zero.gradients), sent.sent["reduce_scatter"]


@pytest.mark.prove
def test_sums_in_fp32_are_nearer_to_float64_keep_4_bytes_a_shard_and_send_4():
    want, _ = one_process_in_bf16([pair for part in make_batch(0, 2, 32, length=8) for pair in part])
    for wide, narrow in zip(*(run_ranks(2, gradient_in_bf16, w) for w in (True, False)), strict=True):
        near, far = distance_from_float64(wide[0], want), distance_from_float64(narrow[0], want)
        assert far > 1.5 * near, f"in bf16 {far:.2e}, in fp32 {near:.2e}"
        assert wide[1] == 2 * narrow[1] and wide[2] == 2 * narrow[2]
