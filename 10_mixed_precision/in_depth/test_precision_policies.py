"""Policies: bytes, loss scaling shared by ranks, sums and updates in fp32, and how they go with chapters 02 and 03."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _precision_demo import Decoder, batch, loss_sum, stdlib_bytes
from harness.meter import communication, held_bytes
from harness.programs import error_from
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named
from precision_policies import (
    POLICIES,
    LossScaler,
    MixedAdamW,
    Policy,
    adamw_update,
    bf16,
    fp16,
    fp32,
    linear,
    make_scaler,
    train,
)
from torch import nn

sys.path += [
    str(Path(__file__).resolve().parents[2] / chapter / "in_depth") for chapter in ("02_data_parallel", "03_zero")
]
SIZES = dict(hidden=32, inner=64, layers=1)


@pytest.fixture(autouse=True, scope="module")
def alone():
    """A group of one, for what needs a group and no ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def scaler(**options) -> LossScaler:
    return LossScaler(dist.group.WORLD, **options)


# ------------------------------------------------------------------------------------------------ bytes, and the update


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_of_a_model_are_those_of_the_policy_item_by_item(name):
    policy, model = POLICIES[name], Decoder(linear, head=linear, **SIZES)
    optimizer = MixedAdamW(model.named_parameters(), policy, lr=1e-3)
    (loss_sum(model, *batch(stdlib_bytes(20_000), 0, rows=1)) / 64).backward()
    size = sum(p.numel() for p in model.parameters())
    held, by_harness = optimizer.held(), held_bytes(model)
    assert held == {item: kind * size for item, kind in policy.bytes().items()}
    assert (held["weights"], held["gradients"]) == (by_harness.parameters, by_harness.gradients)
    totals = {"fp32": 16, "bf16-pure": 8, "bf16-master": 16, "bf16": 20, "fp16": 20, "bf16-stochastic": 8}
    assert name not in totals or sum(policy.bytes().values()) == totals[name]


def test_the_update_is_that_of_torch_adamw():
    torch.manual_seed(0)
    w, m, v = torch.randn(50, dtype=torch.float64), *torch.zeros(2, 50, dtype=torch.float64)
    theirs = nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 6):
        theirs.grad = torch.randn(50, dtype=torch.float64)
        optimizer.step()
        adamw_update(w, theirs.grad, m, v, step, 0.01, 0.1)
    assert_same(w, theirs.detach(), 1e-13, "weight after 5 steps of AdamW")


def test_updates_below_the_spacing_of_bf16_arrive_by_a_master_and_on_average_by_stochastic_rounding():
    moved = {}
    for name in ("bf16-pure", "bf16", "bf16-stochastic"):
        p = nn.Parameter(torch.ones(4000))
        optimizer = MixedAdamW([("p", p)], POLICIES[name], lr=1e-3)  # bf16 has gaps of 0.0039 below 1
        for _ in range(20):
            p.grad = torch.ones_like(p)
            optimizer.accumulate()
            optimizer.step(scaler(scale=1.0, dynamic=False))
        state = optimizer.state[p]
        moved[name] = 1 - state.get("master", p).detach().float().mean().item()
        assert p.dtype == bf16
        if name == "bf16":
            assert_same(p.detach(), state["master"].to(bf16), 0.0, "weight against its master")
            assert optimizer.lost is None
        else:
            assert (optimizer.lost == 1.0) == (name == "bf16-pure")
            drawn = len(state["exp_avg"].unique()) > 1  # of 4000 equal gradients: moments are stored at random, too
            assert drawn == (name == "bf16-stochastic"), name
    assert moved["bf16-pure"] == 0
    assert moved["bf16"] == pytest.approx(0.02, abs=1e-4)
    assert moved["bf16-stochastic"] == pytest.approx(0.02, abs=1e-3)


def test_lost_updates_are_those_of_all_parameters_and_rounding_draws_from_the_seed():
    p, q, r = (nn.Parameter(torch.full((100,), size)) for size in (1.0, 1e-3, 1.0))
    optimizer = MixedAdamW([("p", p), ("q", q), ("r", r)], POLICIES["bf16-pure"], lr=1e-3, seed=5)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step(scaler(scale=1.0))
    assert optimizer.lost == 0.5 and optimizer.generator.initial_seed() == 5
    assert torch.equal(r.float(), torch.ones(100)) and r.grad is None, "it was not used, and has no gradient"


def test_the_master_keeps_the_digits_of_the_first_weight():
    p = nn.Parameter(torch.full((3,), 1.001))
    optimizer = MixedAdamW([("p", p)], POLICIES["bf16"], lr=1e-3)
    assert_same(optimizer.state[p]["master"], torch.full((3,), 1.001), 0.0, "master")
    assert_same(p.detach().float(), torch.ones(3), 0.0, "weight in bf16")


@pytest.mark.parametrize("name", ["bf16", "bf16-master", "fp16"])
def test_a_long_sum_of_micro_batches_is_exact_only_in_fp32(name):
    p = nn.Parameter(torch.zeros(3))
    optimizer = MixedAdamW([("p", p)], POLICIES[name], lr=1e-3)
    first = 2048 if name == "fp16" else 256  # a sum in 16 bits that stays where it is when 1 is added
    for gradient in (first, *[1] * 20):
        (p * torch.full((3,), gradient, dtype=p.dtype)).sum().backward()
        optimizer.accumulate()
    total = optimizer.gradients()[0].float().max().item()
    assert total == (256 if name == "bf16-master" else first + 20)
    assert p.grad is None or name == "bf16-master"  # one 16-bit gradient at a time


# --------------------------------------------------------------------------------------------------------- loss scaling


def test_the_scale_halves_after_an_overflow_and_doubles_after_a_quiet_interval():
    s = scaler(scale=1024.0, growth_interval=3)
    seen = []
    for finite in (True, True, True, False, True, True, False, True, True, True):
        s.update(finite)
        seen.append(s.value)
    assert seen == [1024, 1024, 2048, 1024, 1024, 1024, 512, 512, 512, 1024]
    assert s.skipped == 2


def test_training_does_not_go_on_by_skipping_steps():
    s = scaler(scale=8.0, floor=1.0)
    for _ in range(3):  # 4, 2, 1
        s.update(False)
    with pytest.raises(FloatingPointError, match=r"dynamic loss scale 1 \(floor 1\).* 4 step\(s\) skipped"):
        s.update(False)
    s = scaler(scale=8.0, dynamic=False, patience=2, growth_interval=1)  # a static scale does not grow either
    for finite in (False, False, True, False, False):  # two in a row at most
        s.update(finite)
    assert s.value == 8
    with pytest.raises(FloatingPointError, match="static loss scale 8"):
        s.update(False)
    with pytest.raises(ValueError, match=r"loss scale 0\.5 is below its floor 1"):
        scaler(scale=0.5)
    with pytest.raises(ValueError, match="use at least the floor, above 0"):
        scaler(scale=1.0, floor=0.0)
    for name, *want in (("bf16", 1.0, False, 0), ("fp16-static", 8.0, False, 8), ("fp16", 8.0, True, 8)):
        s = make_scaler(POLICIES[name], dist.group.WORLD, 8.0)
        assert [s.value, s.dynamic, s.patience] == want, name
    assert make_scaler(POLICIES["fp16"], dist.group.WORLD).value == scaler().value == 2.0**16


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-pure"])
def test_without_loss_scaling_a_nan_ends_the_run_at_once(name):
    p = nn.Parameter(torch.ones(3))
    optimizer = MixedAdamW([("p", p)], POLICIES[name], lr=1e-3)
    p.grad = torch.full_like(p, math.nan)
    optimizer.accumulate()
    with pytest.raises(FloatingPointError, match="NaN"):
        optimizer.step(make_scaler(POLICIES[name], dist.group.WORLD))
    assert torch.equal(p.detach().float(), torch.ones(3)), "the weights before the error"


def test_gradients_are_divided_by_the_scale_they_were_made_with():
    """The step at which the scale doubles is the one to look at."""
    weights = []
    for scale in (1.0, 1024.0):
        p = nn.Parameter(torch.ones(3))
        optimizer = MixedAdamW([("p", p)], POLICIES["fp16"], lr=0.1)
        s = scaler(scale=scale, growth_interval=2, dynamic=scale > 1)
        for factor in (1.0, 3.0, -2.0, 1.0, 5.0):  # a factor that is wrong at every step would be hidden by Adam
            s.scale((p * factor).sum()).backward()
            optimizer.accumulate()
            optimizer.step(s)
        weights.append(optimizer.state[p]["master"])
    assert_same(weights[1], weights[0], 1e-6, "master with a growing scale")


def test_scaling_saves_from_zero_what_fp16_cannot_hold():
    gradients = {}
    for scale in (1.0, 2.0**16):
        p = nn.Parameter(torch.ones(1000, dtype=fp16))
        s = scaler(scale=scale, dynamic=False)
        x = torch.full((1000,), 2e-4)
        s.scale((p.float() * x).sum() * 1e-4).backward()  # a gradient of 2e-8; fp16 ends at 6e-8
        gradients[scale] = p.grad.float() / scale
    assert (gradients[1.0] == 0).all()
    assert_same(gradients[2.0**16], torch.full((1000,), 2e-8), 1e-3, "unscaled gradient")


def weights_after(name: str, factors: list[float]) -> torch.Tensor:
    """Master (or weight) after one step for each factor; its gradient is the factor times the scale."""
    p = nn.Parameter(torch.ones(3))
    optimizer, s = MixedAdamW([("p", p)], POLICIES[name], lr=0.1), scaler(scale=64.0)
    for factor in factors:
        s.scale((p * factor).sum()).backward()
        optimizer.accumulate()
        assert optimizer.step(s) == math.isfinite(factor)
        assert all((g == 0).all() for g in optimizer.gradients()), f"{name}: gradients of {factor} are left"
    return optimizer.state[p].get("master", p.detach())


@pytest.mark.parametrize("name", ["fp16", "bf16-master", "bf16-pure"])
def test_a_skipped_step_leaves_nothing_behind_and_the_next_one_is_as_if_it_had_not_been(name):
    quiet = weights_after(name, [1.0, -3.0, 2.0])
    for bad in (math.inf, math.nan):
        assert_same(weights_after(name, [1.0, bad, -3.0, 2.0]), quiet, 1e-6, f"weight after a step with {bad}")


def test_matrices_decay_as_in_torch_adamw_and_norms_do_not():
    model, twin = (Decoder(linear, head=linear, **SIZES) for _ in range(2))
    ours = MixedAdamW(model.named_parameters(), POLICIES["fp32"], lr=0.01, weight_decay=0.5, betas=(0.8, 0.99))
    matrices, norms = ([p for p in twin.parameters() if (p.dim() > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": norms, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.99))
    for step in range(3):
        for model_, optimizer_step in ((model, lambda: ours.step(scaler(scale=1.0))), (twin, theirs.step)):
            model_.zero_grad()
            (loss_sum(model_, *batch(stdlib_bytes(20_000), step, rows=1)) / 64).backward()
            optimizer_step()
    assert len(norms) == 3
    assert_same_named(dict(model.named_parameters()), dict(twin.named_parameters()), 1e-5, "weight")


def overflow_on_one_rank(ranks: list[int]) -> list:
    """Ranks of a slice of the world; the last of them has an infinite gradient, the first none at all."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return []
    s = LossScaler(group, 8.0)
    mine = dist.get_rank(group)
    gradient = torch.tensor([1.0, math.inf if mine == len(ranks) - 1 else 2.0])
    seen = []
    with communication() as sent:
        finite = s.all_finite([] if mine == 0 else [torch.ones(2), gradient])
    s.update(finite)
    seen += [finite, s.value, sent.calls["all_reduce"]]
    finite = s.all_finite([torch.ones(2)])
    s.update(finite)
    return [*seen, finite, s.value]


@pytest.mark.parametrize("ranks", [[0, 1], [0, 2, 3]])
def test_an_overflow_on_one_rank_is_an_overflow_on_all_ranks_of_the_group_and_on_no_other(ranks):
    for rank, seen in enumerate(run_ranks(max(ranks) + 1, overflow_on_one_rank, ranks)):
        assert seen == ([False, 4.0, 1, True, 4.0] if rank in ranks else []), f"rank {rank}"


# ------------------------------------------------------------------------------------------------- together with others


def data_parallel_steps(ranks: list[int]) -> dict | None:
    """Three steps in float64, in a slice of the world: weights, and gradients of the last step."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    return float64_steps(group, dist.get_rank(group), len(ranks))


def float64_steps(group: dist.ProcessGroup, rank: int, ranks: int) -> dict:
    model, micro_batches = Decoder(linear, head=linear, **SIZES).double(), 4 // ranks
    double = Policy(torch.float64, torch.float64, accumulation=torch.float64)
    optimizer = MixedAdamW(model.named_parameters(), double, lr=1e-2)
    s, data, seen = LossScaler(group, 4.0, growth_interval=1), stdlib_bytes(20_000), {}
    for step in range(3):
        tokens, labels = batch(data, step, rows=4, length=16)
        labels[0, 5:] = -100  # not all ranks have the same number of valid tokens
        for i in range(micro_batches):
            mine = slice(rank * micro_batches + i, rank * micro_batches + i + 1)
            s.scale(loss_sum(model, tokens[mine], labels[mine]) / (labels != -100).sum()).backward()
            optimizer.accumulate()
        optimizer.reduce(group)
        for (name, _), g in zip(model.named_parameters(), optimizer.gradients(), strict=True):
            seen[f"gradient of {name}, step {step}"] = g * s.inverse
        optimizer.step(s)
    return seen | {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [[0], [0, 1], [1, 3], [0, 1, 2, 3]])
def test_gradients_and_weights_of_data_parallel_ranks_equal_one_process_to_1e_10(ranks):
    want = float64_steps(dist.group.WORLD, 0, 1)
    for rank, got in enumerate(run_ranks(max(ranks) + 1, data_parallel_steps, ranks)):
        assert (got is None) == (rank not in ranks)
        if got:
            assert_same_named(got, want, 1e-10, "data parallel", rank)


def two_policies() -> list:
    return [train(name, dist.group.WORLD, torch.device("cpu"), 3, 1, **SIZES) for name in ("fp16", "bf16-stochastic")]


def test_replicas_stay_equal_to_the_bit_also_when_they_round_at_random():
    first, second = run_ranks(2, two_policies)
    for got, want in zip(first, second, strict=True):
        assert torch.equal(got["weights"], want["weights"])
        assert got["losses"] == want["losses"] and got["losses"][-1] < got["losses"][0]


def test_the_gradients_of_a_policy_on_ranks_are_as_good_as_its_own_on_one_process():
    exact = train("fp32", dist.group.WORLD, torch.device("cpu"), 1, 2, **SIZES)["gradients"]
    own = train("fp16", dist.group.WORLD, torch.device("cpu"), 1, 2, **SIZES)["gradients"]
    got = run_ranks(2, two_policies)[0][0]["gradients"]
    assert (own - exact).norm() > 0  # it does run in fp16
    assert (got - exact).norm() <= 1.5 * (own - exact).norm()


def with_zero(overflow: bool) -> dict:
    """ZeRO-1 of chapter 03 over a bf16 model with fp32 masters, and the scaler of this chapter over the same group."""
    from zero_stages import Zero1

    group, rank = dist.group.WORLD, dist.get_rank()
    model = Decoder(linear, head=linear, **SIZES).to(bf16)
    zero = Zero1(model, torch.optim.AdamW(model.parameters(), lr=1e-3), group, master=fp32)
    s, data = LossScaler(group, 1024.0), stdlib_bytes(20_000)
    tokens, labels = batch(data, 0, rows=2, length=16)
    zero.zero_grad()
    with zero.micro_batch(last=True):
        s.scale(loss_sum(model, tokens[rank : rank + 1], labels[rank : rank + 1]) / labels.numel()).backward()
    shards = [zero.gradient_shard(i) for i in range(len(zero.buckets))]
    if overflow and rank == 1:
        shards[0][3] = math.inf  # in one rank's shard, where no other rank can see it
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    if finite := s.all_finite(shards):
        for shard in shards:
            shard.mul_(s.inverse)
        zero.step()
    s.update(finite)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    whole = zero.full_gradients() if finite else {}
    return {"moved": not torch.equal(before, after), "scale": s.value, "gradients": whole}


def test_with_zero_an_overflow_in_one_shard_skips_the_step_everywhere():
    for rank, seen in enumerate(run_ranks(2, with_zero, True)):
        assert (seen["moved"], seen["scale"]) == (False, 512.0), f"rank {rank}"
    model = Decoder(**SIZES)
    tokens, labels = batch(stdlib_bytes(20_000), 0, rows=2, length=16)
    (loss_sum(model, tokens, labels) / labels.numel()).backward()
    for rank, seen in enumerate(run_ranks(2, with_zero, False)):
        assert (seen["moved"], seen["scale"]) == (True, 1024.0), f"rank {rank}"
        for name, p in model.named_parameters():  # within the error of bf16 itself
            error = (seen["gradients"][name].float() - p.grad).norm() / p.grad.norm()
            assert error < 0.03, f"{name} on rank {rank}: {error:.3f}"


def reduced_by_buckets() -> dict:
    """The gradients of pure bf16, reduced by chapter 02 instead of by `reduce`."""
    from gradient_reducers import BucketedReducer

    model, group, rank = Decoder(linear, head=linear, **SIZES), dist.group.WORLD, dist.get_rank()
    optimizer = MixedAdamW(model.named_parameters(), POLICIES["bf16-pure"], lr=1e-3)
    reducer = BucketedReducer(model, group)
    tokens, labels = batch(stdlib_bytes(20_000), 0, rows=2, length=16)
    (loss_sum(model, tokens[rank : rank + 1], labels[rank : rank + 1]) / labels.numel()).backward()
    reducer.finish()
    optimizer.step(make_scaler(POLICIES["bf16-pure"], group))
    return {name: p.detach() for name, p in model.named_parameters()}


def test_gradients_may_be_reduced_by_the_buckets_of_chapter_02():
    first, second = run_ranks(2, reduced_by_buckets)
    assert_same_named(first, second, 0.0, "weights of the ranks")
    start = dict(Decoder(**SIZES).named_parameters())
    assert all(not torch.equal(first[name].float(), p.detach()) for name, p in start.items() if p.dim() > 1)


def one_parameter_each(name: str) -> list[list[float]]:
    own = [nn.Parameter(torch.zeros(2 + i)) for i in range(2)]
    optimizer = MixedAdamW([(str(i), p) for i, p in enumerate(own)], POLICIES[name], lr=1e-3)
    own[dist.get_rank()].sum().backward()  # this rank does not use the other one
    optimizer.accumulate()
    optimizer.reduce(dist.group.WORLD)
    return [g.tolist() for g in optimizer.gradients()]


@pytest.mark.parametrize("name", ["bf16", "bf16-master"])
def test_ranks_that_use_different_parameters_sum_the_same_ones(name):
    assert run_ranks(2, one_parameter_each, name) == [[[1.0] * 2, [1.0] * 3]] * 2


# ------------------------------------------------------------------------------------------------------------- the rest


def test_the_fp16_product_on_a_cpu_is_the_real_one_up_to_its_last_rounding():
    torch.manual_seed(0)
    x, weight, dy = torch.randn(16, 64).half(), torch.randn(32, 64).half(), torch.randn(16, 32).half()
    gradients = []
    for product in (linear, F.linear):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = product(a, b)
        y.backward(dy)
        assert y.dtype == a.grad.dtype == b.grad.dtype == fp16
        gradients.append((y.detach(), a.grad, b.grad))
    for what, got, want in zip(("y", "dx", "dW"), *gradients, strict=True):
        assert_same(got.float(), want.float(), 2 * torch.finfo(fp16).eps, what)


def test_frozen_parameters_get_the_format_of_the_others_and_stay():
    model = Decoder(linear, head=linear, **SIZES)
    model.embed.requires_grad_(False)
    before = model.embed.detach().to(bf16)
    optimizer = MixedAdamW(model.named_parameters(), POLICIES["bf16"], lr=1.0)
    (loss_sum(model, *batch(stdlib_bytes(20_000), 0, rows=1)) / 64).backward()
    optimizer.accumulate()
    optimizer.step(scaler(scale=1.0))
    assert_same(model.embed.detach(), before, 0.0, "frozen weight in bf16")


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        MixedAdamW([], POLICIES["bf16"], lr=1e-3)


def test_a_nan_on_one_rank_ends_all_ranks():
    for rank, said in enumerate(run_ranks(2, nan_on_one_rank)):
        assert "NaN" in said, f"rank {rank} goes on"


def nan_on_one_rank() -> str:
    p = nn.Parameter(torch.ones(3))
    optimizer = MixedAdamW([("p", p)], POLICIES["bf16"], lr=1e-3)
    p.grad = torch.full_like(p, math.nan if dist.get_rank() == 1 else 1.0)
    optimizer.accumulate()
    return error_from(FloatingPointError, optimizer.step, make_scaler(POLICIES["bf16"], dist.group.WORLD))
