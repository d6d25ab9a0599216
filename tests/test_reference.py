"""The reference: that it passes what is the same, and that every kind of difference fails and is named."""

import math

import pytest
import torch
from harness.reference import assert_same, assert_same_named, assert_same_trace, error_between, sgd_trace
from torch import nn


def trace_of(scale=1.0, steps=3):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    bucket = {p: torch.empty_like(p) for p in model.parameters()}  # as reducers have it: each step overwrites the last

    def backward(step):
        loss = (model(x) ** 2).sum()
        (loss * scale).backward()
        for p, view in bucket.items():
            p.grad = view.copy_(p.grad)
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward, steps=steps, lr=0.01)


def test_equal_traces_pass():
    assert_same_trace(trace_of(), trace_of())


def test_the_trace_is_that_of_plain_sgd():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    got = trace_of()
    for step in range(3):
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        assert_same_named(got.gradients[step], {name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
    assert_same_named(got.weights, dict(model.named_parameters()))


def test_gradients_that_are_four_times_too_large_fail_and_the_factor_is_said():
    with pytest.raises(AssertionError, match=r"step 0, gradient of weight.*everything is 4 times"):
        assert_same_trace(trace_of(scale=4.0), trace_of())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["got", "want", "both"])
def test_nan_and_infinity_never_pass(bad, side):
    good, poisoned = torch.ones(4), torch.tensor([1.0, bad, 1.0, 1.0])
    got, want = {"got": (poisoned, good), "want": (good, poisoned), "both": (poisoned, poisoned)}[side]
    with pytest.raises(AssertionError, match="the logits on rank 2"):
        assert_same(got, want, tol=1e30, what="the logits", rank=2)


def test_a_nan_loss_fails():
    got, want = trace_of(), trace_of()
    got.losses[1] = math.nan
    with pytest.raises(AssertionError, match="loss of step 1 on rank 3: 1 NaN"):
        assert_same_trace(got, want, rank=3)


def test_tolerance_is_relative_to_the_largest_element_so_a_small_gradient_cannot_hide():
    want = torch.full((8,), 1e-12, dtype=torch.float64)
    with pytest.raises(AssertionError, match="everything is 2 times"):
        assert_same(2 * want, want, tol=1e-10)
    assert_same(want * (1 + 1e-12), want, tol=1e-10)


def test_a_zero_tensor_is_compared_absolutely():
    assert_same(torch.zeros(3), torch.zeros(3))
    assert_same(torch.full((3,), 1e-11), torch.zeros(3))
    with pytest.raises(AssertionError, match="largest difference"):
        assert_same(torch.full((3,), 1e-3), torch.zeros(3))


def test_shape_and_none_must_match():
    with pytest.raises(AssertionError, match=r"shape \[1, 3\], but should be \[3\]"):
        assert_same(torch.zeros(1, 3), torch.zeros(3))
    for got, want in ((torch.zeros(1), torch.zeros(3)), (torch.ones(1), torch.zeros(0))):
        with pytest.raises(ValueError, match="cannot be compared"):
            error_between(got, want)
    with pytest.raises(AssertionError, match="gradient of w: None, but should be a tensor"):
        assert_same(None, torch.zeros(3), what="gradient of w")
    with pytest.raises(AssertionError, match="a tensor, but should be None"):
        assert_same(torch.zeros(3), None)
    assert_same(None, None)


def test_a_missing_or_extra_name_fails():
    one = torch.ones(1)
    for got, want, message in (
        ("ac", "ab", r"\['b'\], .*\['c'\]"),
        ("a", "ab", r"\['b'\]"),
        ("ac", "a", r"\[\], .*\['c'\]"),
    ):
        with pytest.raises(AssertionError, match=f"missing {message}"):
            assert_same_named(dict.fromkeys(got, one), dict.fromkeys(want, one))


def test_the_worst_tensor_is_named_first_with_rank_and_values():
    want = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    got = {"a": torch.ones(2), "b": torch.tensor([1.0, 1.5]), "c": torch.tensor([3.0, 1.0])}
    with pytest.raises(AssertionError) as failure:
        assert_same_named(got, want, what="weight", rank=1)
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("weight c on rank 1: largest difference 2 (relative): 3, but should be 1")
    assert lines[1].startswith("weight b on rank 1")
    assert lines[2] == "(2 of 3 differ)"


def test_a_run_of_fewer_steps_fails():
    with pytest.raises(AssertionError, match="2 steps, but should be 3"):
        assert_same_trace(trace_of(steps=2), trace_of())


def test_losses_given_as_numbers_are_compared_in_double_precision():
    assert_same(1.0 + 1e-12, 1.0)
    with pytest.raises(AssertionError, match="largest difference 1e-09"):
        assert_same(1.0 + 1e-9, 1.0)
    got, want = trace_of(), trace_of()
    got.losses[2] *= 1 + 1e-9
    with pytest.raises(AssertionError, match="loss of step 2"):
        assert_same_trace(got, want)


def test_weights_are_compared_too():
    got, want = trace_of(), trace_of()
    got.weights["bias"][0] += 1e-6
    with pytest.raises(AssertionError, match="after 3 steps, weight bias"):
        assert_same_trace(got, want)
