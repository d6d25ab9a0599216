"""Recomputation by operation and by a budget: gradients as without it, bytes and FLOPs of the formulas."""

import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import recompute_policy
import torch
from harness.meter import peak_memory
from harness.reference import assert_same_named, assert_same_trace, sgd_trace
from llama import LLAMA3_8B, MLP, TINY, Llama, LlamaConfig, Parts, attention_math, next_token_loss
from recompute_policy import HOST, POLICIES, Host, by_budget, with_policies
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)  # on tensors this small a second thread only waits
ODD = LlamaConfig(vocab_size=100, hidden=48, layers=3, heads=6, kv_heads=3, intermediate=70, own_head_dim=10)
PLANS = [[p] * 3 for p in (*POLICIES, HOST)] + [["full", "products", "keep"], ["products", "host", "full"]]


def tokens_for(config, batch=2, seq=11):
    return torch.randint(config.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(0))


def planned(model, plan):
    """(`model` with this plan, the host that takes what leaves the device)"""
    host = Host(model)
    return with_policies(model, plan, host), host


def trace_of(model, tokens):
    def backward(step):
        loss = next_token_loss(model, tokens) / tokens.numel()
        loss.backward()
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward)


@pytest.mark.parametrize("plan", PLANS, ids="-".join)
def test_loss_gradients_and_weights_are_those_without_recomputation(plan):
    want = trace_of(Llama(ODD).double(), tokens_for(ODD))
    assert_same_trace(trace_of(planned(Llama(ODD).double(), plan)[0], tokens_for(ODD)), want)


@pytest.mark.parametrize("plan", PLANS, ids="-".join)
@pytest.mark.parametrize("batch, seq", [(1, 9), (3, 17)])
def test_the_bytes_that_stay_alive_after_forward_are_those_of_the_formula(plan, batch, seq):
    (model, host), tokens = planned(Llama(ODD), plan), tokens_for(ODD, batch, seq)
    with peak_memory() as memory:
        loss = next_token_loss(model, tokens)
        alive, away = memory.current - host.bytes, host.bytes
    assert loss.requires_grad
    assert away == recompute_policy.predicted_on_host(ODD, batch, seq, plan)
    numbers_that_stand_alone = 2 * 4  # the loss, the sum of the labels' weights
    assert alive == recompute_policy.predicted(ODD, batch, seq, plan) + numbers_that_stand_alone


@pytest.mark.parametrize("plan", PLANS, ids="-".join)
def test_flops_are_those_that_torch_counts_and_products_are_never_done_again(plan):
    model, _ = planned(Llama(ODD, replace(Parts(), attention=attention_math)), plan)
    with FlopCounterMode(display=False) as counter:
        next_token_loss(model, tokens_for(ODD)).backward()
    step = 3 * sum(recompute_policy.forward_flops(ODD, 2, 11).values())
    again = sum(recompute_policy.block_flops(ODD, 2, 11, policy) for policy in plan)
    assert counter.get_total_flops() == step + again
    assert (again == 0) == ("full" not in plan)


@pytest.mark.prove
def test_everything_is_released_after_backward_also_over_several_steps():
    for plan in PLANS:
        (model, host), tokens = planned(Llama(ODD), plan), tokens_for(ODD)
        for _ in range(3):
            with peak_memory() as memory:
                next_token_loss(model, tokens).backward()
                model.zero_grad()
            assert memory.current == host.bytes == len(host.copies) == 0, plan


def test_a_forward_whose_backward_never_comes_leaves_nothing_on_the_host():
    model, host = planned(Llama(ODD), [HOST] * 3)
    loss = next_token_loss(model, tokens_for(ODD))
    assert host.bytes > 0
    del loss
    assert host.bytes == 0
    with torch.no_grad():
        next_token_loss(model, tokens_for(ODD))
    assert host.bytes == 0


def test_what_comes_back_from_the_host_equals_any_view_that_was_packed():
    host, rng = Host(Llama(TINY)), random.Random(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        base = torch.arange(360).to(dtype).view(6, 5, 12)
        for _ in range(10):
            view = base.permute(*rng.sample(range(3), 3))  # then from somewhere, with a step, in each dimension
            for dim in range(3):
                start = rng.randrange(view.shape[dim])
                view = view.narrow(dim, start, rng.randint(1, view.shape[dim] - start))[..., :: rng.randint(1, 2)]
            packed = host.pack(view)
            assert packed[0].bytes.data_ptr() != base.data_ptr(), "the host has a copy, also of what is on a CPU"
            back = host.unpack(packed)
            assert torch.equal(back, view) and back.stride() == view.stride() and back.dtype == dtype
            assert back.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
            assert host.unpack(packed).data_ptr() != back.data_ptr(), "two that saved it may each change what they get"
            del packed
            assert host.bytes == 0, "a copy that is dropped is still counted"


def test_a_policy_can_be_changed_and_leaves_the_names_of_the_weights_alone():
    model = Llama(ODD)
    names = list(model.state_dict())
    for plan in (["full"] * 3, ["keep"] * 3):
        assert list(with_policies(model, plan).state_dict()) == names
    tokens = tokens_for(ODD)
    with peak_memory() as memory:
        loss = next_token_loss(model, tokens)
        alive = memory.current
    assert loss.requires_grad and alive == recompute_policy.predicted(ODD, 2, 11, ["keep"] * 3) + 8


def test_without_gradients_nothing_is_kept():
    model, tokens = with_policies(Llama(ODD), ["products"] * 3), tokens_for(ODD)
    with peak_memory() as memory, torch.no_grad():
        loss = next_token_loss(model, tokens)
        assert memory.current == loss.nbytes


class Dropped(MLP):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


@pytest.mark.parametrize("what", ["dropout", "autocast"])
def test_the_second_run_draws_the_masks_of_the_first_and_is_under_its_autocast(what):
    gradients = []
    for policy in (*POLICIES, HOST):
        model = Llama(ODD, feed_forward=Dropped).double() if what == "dropout" else Llama(ODD)
        model, _ = planned(model, [policy] * 3)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
            loss = next_token_loss(model, tokens_for(ODD))
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for policy, got in zip((*POLICIES, HOST)[1:], gradients[1:], strict=True):
        assert_same_named(got, gradients[0], 1e-10 if what == "dropout" else 0.0, f"{policy}: gradient of")


# ------------------------------------------------------------------------------------------------- the budget


def cost(plan, f):
    return sum(f(ODD, 2, 11, policy) for policy in plan)


@pytest.mark.parametrize("share", [1.0, 0.99, 0.8, 0.6, 0.5, 0.3, 0.12])
def test_a_budget_gets_the_fewest_flops_and_without_any_the_most_blocks_left_whole(share):
    most = cost(["keep"] * 3, recompute_policy.block_bytes)
    budget = int(share * most)
    plan = by_budget(ODD, 2, 11, budget)
    assert cost(plan, recompute_policy.block_bytes) <= budget
    every = list(itertools.product(POLICIES, repeat=3))
    fit = [p for p in every if cost(p, recompute_policy.block_bytes) <= budget]
    fewest = min(cost(p, recompute_policy.block_flops) for p in fit)
    assert cost(plan, recompute_policy.block_flops) == fewest
    if fewest == 0:  # norms and SwiGLU cost time, too, though no matrix FLOPs: as few blocks as can be do them again
        equal = [p for p in fit if cost(p, recompute_policy.block_flops) == 0]
        assert plan.count("keep") == max(p.count("keep") for p in equal)


def test_blocks_in_front_recompute_more():
    order = {policy: i for i, policy in enumerate(POLICIES)}
    for share in (0.9, 0.7, 0.5, 0.3):
        plan = by_budget(ODD, 2, 11, int(share * cost(["keep"] * 3, recompute_policy.block_bytes)))
        assert [order[p] for p in plan] == sorted((order[p] for p in plan), reverse=True)


def test_a_budget_below_full_recomputation_is_refused():
    least = cost(["full"] * 3, recompute_policy.block_bytes)
    assert by_budget(ODD, 2, 11, least) == ["full"] * 3
    with pytest.raises(ValueError, match=f"budget {least - 1} is below {least}"):
        by_budget(ODD, 2, 11, least - 1)


def test_by_operations_is_never_above_whole_blocks():
    points = recompute_policy.curve(LLAMA3_8B, 1, 8192)
    ours, theirs = ([(b, f) for name, b, f in points if name == of] for of in ("by operations", "whole blocks"))
    for size, flops in theirs:
        assert min(f for b, f in ours if b <= size) <= flops
    assert min(f for b, f in ours if b <= 0.6 * theirs[0][0]) == 0  # and with 56 % of the bytes no product runs again
    assert min(f for b, f in theirs if b <= 0.6 * theirs[0][0]) > 0


def test_wrong_policies_are_named():
    with pytest.raises(ValueError, match="2 policies for 3 blocks"):
        with_policies(Llama(ODD), ["keep"] * 2)
    with pytest.raises(ValueError, match="policy 'some' must be one of keep, products, full, host"):
        with_policies(Llama(TINY), ["some"] * TINY.layers)
    with pytest.raises(ValueError, match="policy 'host' needs a Host"):
        with_policies(Llama(TINY), ["host"] * TINY.layers)


# --------------------------------------------------------------------------------------------------- the script


@pytest.mark.prove
def test_the_demo_fails_when_a_formula_is_off(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recompute_policy.py"])
    monkeypatch.setattr(recompute_policy, "kept", lambda *args: (1, 1))
    assert recompute_policy.main() == 1
    captured = capsys.readouterr()
    assert "PASS" not in captured.out and "bytes kept" in captured.err


def test_the_table_of_the_readme_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recompute_policy.py", "--tables"])
    assert recompute_policy.main() == 0
    assert capsys.readouterr().out.strip() in (Path(recompute_policy.__file__).parents[1] / "README.md").read_text()
