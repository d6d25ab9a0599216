"""Routers, losses, biases and capacity: against loops in plain Python, and on ranks against one process."""

import math
import sys

import pytest
import routing
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _slow_moe import queue_by_queue
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same
from routing import (
    balance_loss,
    bias_step,
    cannot_learn,
    capacity,
    check_routing,
    chosen_one_by_one,
    expert_counts,
    group_sum,
    limit_to_nodes,
    max_violation,
    route,
    router_logits,
    within_capacity,
    z_loss,
)
from torch import Tensor

E, K = 8, 2


def logits_of(tokens: int, experts: int = E, seed: int = 0) -> Tensor:
    return 2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------------------- the routers


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("K", "nodes", "M"), [(1, 1, 1), (2, 1, 1), (8, 1, 1), (2, 4, 2), (4, 4, 2), (3, 2, 1), (4, 4, 4)]
)
def test_the_chosen_experts_equal_a_choice_one_by_one(router, K, nodes, M):
    logits = logits_of(60)
    bias = 0.3 * torch.randn(E, generator=torch.Generator().manual_seed(1)).double() if router == "sigmoid" else None
    got = route(logits, K, router, bias, nodes, M).experts
    limited = (nodes, M) if nodes > M else (1, 1)
    want = chosen_one_by_one(logits, K, router, torch.zeros(E) if bias is None else bias, *limited)
    assert got.tolist() == want


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_weights_are_the_scores_of_the_chosen_divided_by_their_sum_also_in_backward(router):
    logits = logits_of(40).requires_grad_()
    routing = route(logits, 3, router)
    scores = logits.sigmoid() if router == "sigmoid" else logits.softmax(-1)
    picked = scores.gather(1, routing.experts)
    want = picked / picked.sum(1, keepdim=True)
    assert_same(routing.weights, want, 1e-12, "weights")
    assert_same(routing.probabilities, scores / scores.sum(1, keepdim=True), 1e-12, "probabilities")
    up = logits_of(40, 3, seed=5)
    (got_grad,) = torch.autograd.grad((routing.weights * up).sum(), logits, retain_graph=True)
    (want_grad,) = torch.autograd.grad((want * up).sum(), logits)
    assert_same(got_grad, want_grad, 1e-12, "gradient of the logits")


@pytest.mark.parametrize("normalise", [None, True, False])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_routers_gradient_is_alive_for_every_k_and_score_unless_it_is_said_that_it_cannot_learn(router, normalise):
    for experts in (1, E):
        for k in range(1, experts + 1):
            what = f"{k} of {experts} experts, {router}, normalise {normalise}"
            gate = (torch.randn(experts, 5, generator=torch.Generator().manual_seed(3)).double()).requires_grad_()
            x, up = logits_of(12, 5, seed=4), logits_of(12, k, seed=5)
            routing = route(router_logits(x, gate), k, router, normalise=normalise)
            (got,) = torch.autograd.grad((routing.weights * up).sum(), gate)
            scores = (x @ gate.T).sigmoid() if router == "sigmoid" else (x @ gate.T).softmax(-1)
            picked = scores.gather(1, routing.experts)
            want = picked / picked.sum(1, keepdim=True) if (k > 1 if normalise is None else normalise) else picked
            assert_same(routing.weights, want, 1e-12, f"weights of {what}")
            alive = got.abs().max().item()
            if cannot_learn(experts, k, router, normalise):
                assert alive <= 1e-12, f"{what}: said to be unable to learn, but its gradient is {alive}"
            else:
                assert_same(
                    got, torch.autograd.grad((want * up).sum(), gate)[0], 1e-10, f"the router's gradient, {what}"
                )
                assert alive > 1e-3, f"{what}: the router's gradient is {alive}, and nothing was said"


def test_a_router_that_cannot_learn_is_told_with_what_would_help():
    assert "use scores that are not normalised" in cannot_learn(E, 1, "sigmoid", True)
    assert "use the sigmoid router, or more experts" in cannot_learn(1, 1, "softmax")
    assert cannot_learn(E, 1) is None and cannot_learn(1, 1, "sigmoid") is None


def test_the_bias_decides_who_is_chosen_and_never_how_much_the_chosen_one_counts():
    logits = logits_of(50)
    bias = torch.zeros(E, dtype=torch.float64)
    bias[3] = 10.0
    routing = route(logits, K, "sigmoid", bias)
    assert (routing.experts[:, 0] == 3).all()
    s = logits.sigmoid().gather(1, routing.experts)
    assert_same(routing.weights, s / s.sum(1, keepdim=True), 1e-12, "weights")


def test_a_token_stays_on_the_m_nodes_whose_best_scores_have_the_largest_sum():
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.4, 0.4, 0.1, 0.0]])
    assert route(scores.logit(1e-9), 2, "sigmoid", None, 4, 1).experts.tolist() == [[2, 3]]  # 0.5 + 0.5 > 0.9 + 0.0
    allowed = limit_to_nodes(scores, 4, 4, 2).isfinite()[0]
    assert allowed.tolist() == [True, True, True, True, False, False, False, False]
    experts = route(logits_of(200, 16), 4, "softmax", None, 8, 2).experts
    assert max(len(set(row)) for row in (experts // 2).tolist()) == 2


def test_logits_are_computed_in_float32_for_bf16_inputs_and_under_autocast():
    x, gate = torch.randn(20, 64), torch.randn(E, 64)
    half = x.bfloat16()
    want = F.linear(half.double(), gate.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = router_logits(half, gate)
    for got in (inside, router_logits(half, gate)):
        assert got.dtype == torch.float32
        assert_same(got, want, 1e-5, "logits")
    assert router_logits(x.double(), gate.double()).dtype == torch.float64


def test_scores_that_underflow_still_give_weights():
    weights = route(torch.full((3, E), -2000.0), K, "sigmoid").weights
    assert_same(weights, torch.full((3, K), 0.5), 1e-6, "weights")


def test_given_experts_are_taken_and_only_weighed():
    logits, experts = logits_of(20), torch.arange(40).view(20, 2) % E
    routing = route(logits, K, "softmax", experts=experts)
    assert torch.equal(routing.experts, experts)
    assert_same(routing.weights, logits.gather(1, experts).softmax(-1), 1e-12, "weights")


# -------------------------------------------------------------------------------------------------- losses over ranks


def first_ranks(sizes: list[int]) -> dist.ProcessGroup | None:
    """As many of four ranks as there are sizes; the others are in no group."""
    group = dist.new_group(range(len(sizes)))
    return group if dist.get_rank() < len(sizes) else None


def losses_of_this_rank(sizes: list[int]) -> tuple | None:
    if (group := first_ranks(sizes)) is None:
        return None
    rank = dist.get_rank()
    logits = logits_of(sum(sizes)).split(sizes)[rank].clone().requires_grad_()
    routing = route(logits, K)
    before = expert_counts(routing.experts, E)
    kept_before = before.clone()
    counts = group_sum(before, group)
    total = balance_loss(routing.probabilities, counts, K) + 0.1 * z_loss(logits, counts, K)
    total.backward()
    with torch.no_grad():
        counts = group_sum(before, group)
        again = balance_loss(routing.probabilities, counts, K) + 0.1 * z_loss(logits, counts, K)
    assert torch.equal(again, total), "without gradients the losses are others"
    return total.detach(), logits.grad, counts, torch.equal(before, kept_before)


@pytest.mark.parametrize("sizes", [[13], [9, 4], [7, 0, 5, 12]])
def test_shares_of_the_losses_add_up_to_those_of_one_process_however_uneven_the_ranks(sizes):
    logits = logits_of(sum(sizes)).requires_grad_()
    s = logits.softmax(-1)
    f = torch.stack([(route(logits, K).experts == e).sum() for e in range(E)]).double() * E / (K * len(logits))
    want = (f * s.mean(0)).sum() + 0.1 * logits.exp().sum(1).log().square().mean()
    want.backward()
    results = run_ranks(4, losses_of_this_rank, sizes, timeout=20)[: len(sizes)]
    assert_same(sum(share for share, *_ in results), want.detach(), 1e-12, "loss")
    large = z_loss(logits.detach() + 1000, results[0][2], K)  # e^1000 is no float64
    assert_same(large, (logits.detach().logsumexp(1) + 1000).square().mean(), 1e-12, "z-loss of large logits")
    for rank, ((_, grad, counts, untouched), whole) in enumerate(zip(results, logits.grad.split(sizes), strict=True)):
        assert_same(grad, whole, 1e-12, "gradient of the logits", rank)
        assert counts.sum() == K * sum(sizes), rank
        assert untouched, f"rank {rank}: group_sum changed the counts that it was given"
    alone = torch.ones(3)
    assert group_sum(alone, None).data_ptr() != alone.data_ptr(), "a new tensor without a group too"


# ------------------------------------------------------------------------------------------------------------ capacity


def in_queues(experts: Tensor, factor: float) -> list[list[bool]]:
    return queue_by_queue(experts.tolist(), math.ceil(factor * experts.numel() / E), E)


def kept_on_ranks(sizes: list[int], factor: float) -> Tensor | None:
    group, experts = first_ranks(sizes), route(logits_of(sum(sizes)), 3).experts.split(sizes)
    return within_capacity(experts[dist.get_rank()], E, factor, group) if group else None


@pytest.mark.parametrize("factor", [0.3, 1.0, 8.0])
def test_capacity_drops_second_choices_and_late_tokens_first(factor):
    experts = route(logits_of(37), 3).experts
    assert within_capacity(experts, E, factor, None).tolist() == in_queues(experts, factor)
    assert within_capacity(experts[:0], E, factor, None).shape == (0, 3)


@pytest.mark.parametrize("sizes", [[37], [20, 17], [11, 0, 19, 7]])
def test_capacity_drops_the_same_choices_on_ranks_as_in_one_process(sizes):
    for factor in (0.5, 1.0):
        want = torch.tensor(in_queues(route(logits_of(37), 3).experts, factor))
        got = run_ranks(4, kept_on_ranks, sizes, factor, timeout=20)[: len(sizes)]
        for rank, (kept, mine) in enumerate(zip(got, want.split(sizes), strict=True)):
            assert torch.equal(kept, mine), f"rank {rank}: {(kept != mine).sum()} choices differ"


def test_the_capacity_is_rounded_up():
    assert [capacity(t, 8, 2, c) for t, c in ((16, 1.0), (17, 1.0), (16, 1.25), (1, 1.0))] == [4, 5, 5, 1]
    for T in range(1, 300):  # all to one expert: as many are kept as fit, whether T is a tensor or not
        for c in (0.7, 1.0, 1.1, 1.3):
            kept = within_capacity(torch.zeros(T, 1, dtype=torch.int64), 4, c, None)
            assert kept.sum() == min(T, capacity(T, 4, 1, c)), f"T = {T}, c = {c}"


# ---------------------------------------------------------------------------------------------------------- the bias


def test_a_step_of_the_bias_is_up_below_the_mean_down_above_and_none_at_it():
    assert bias_step(torch.tensor([1, 2, 3])).tolist() == [1, 0, -1]
    assert bias_step(torch.tensor([0, 0, 9])).tolist() == [1, 1, -1]
    assert bias_step(torch.tensor([5, 5])).dtype == torch.int64
    assert max_violation(torch.tensor([6, 2, 2, 2])) == 1 and max_violation(torch.tensor([5, 5])) == 0


def test_the_bias_evens_out_a_skewed_router_without_a_gradient():
    logits = logits_of(400) + torch.linspace(0, 2, E)
    steps = torch.zeros(E, dtype=torch.int64)
    first = max_violation(expert_counts(route(logits, K, "sigmoid").experts, E))
    for _ in range(150):
        steps += bias_step(expert_counts(route(logits, K, "sigmoid", 0.005 * steps).experts, E))
    last = max_violation(expert_counts(route(logits, K, "sigmoid", 0.005 * steps).experts, E))
    assert first > 0.4 and last < 0.1, (first, last)


def demo_says(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["routing.py", "--router", "sigmoid", *options.split()])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        routing.main()
    *_, row, last = capsys.readouterr().out.splitlines()
    assert "MaxVio after 100 steps" in row
    return ended.value.code, last, row


@pytest.mark.parametrize("options", ["--experts 64", "--top-k 8", "--tokens 1", "--experts 1 --top-k 1"])
def test_the_demo_shows_the_balance_and_judges_nothing_where_the_bias_need_not_help(options, monkeypatch, capsys):
    code, last, row = demo_says(options, monkeypatch, capsys)
    assert (code, last) == (0, "PASS") and " was " in row


@pytest.mark.parametrize("sign", [1, -1])
def test_the_demo_judges_the_balance_at_its_own_sizes(sign, monkeypatch, capsys):
    monkeypatch.setattr(routing, "bias_step", lambda counts: sign * bias_step(counts))
    code, last, row = demo_says("", monkeypatch, capsys)
    assert (code, last == "PASS") == ((0, True) if sign == 1 else (1, False)) and " < " in row


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--top-k 9", "top-k 9 of 8 experts is impossible; use 1 to 8"),
        ("--nodes 3", "nodes 3 do not divide 8 experts; use 1, 2, 4, 8"),
        ("--nodes 4 --max-nodes 5", "max-nodes 5 of 4 nodes is impossible; use 1 to 4"),
        ("--nodes 4 --max-nodes 2 --top-k 3", "max-nodes 2 cannot share top-k 3 evenly"),
        ("--nodes 4 --max-nodes 0", "max-nodes 0 of 4 nodes is impossible; use 1 to 4"),
        ("--nodes 4 --max-nodes 2 --top-k 6", "max-nodes 2 cannot share top-k 6 evenly over nodes of 2 experts; use 3"),
        ("--nodes 4 --max-nodes 3 --top-k 8", "over nodes of 2 experts; use no smaller number"),
        ("--capacity 0", "--capacity 0.0 leaves no room"),
        ("--capacity nan", "--capacity nan leaves no room"),
        ("--experts 0", "--experts 0 is not in 1 .. 1024"),
    ],
)
def test_bad_input_is_one_line_that_names_option_and_remedy(options, words):
    assert words in refusal(routing.main, options)


def test_check_routing_refuses_what_no_option_can_say():
    with pytest.raises(ValueError, match="router 'hash' is unknown; use softmax or sigmoid"):
        check_routing(8, 2, "hash")
    with pytest.raises(ValueError, match="top-k 0 of 8 experts is impossible; use 1 to 8"):
        check_routing(8, 0)
    with pytest.raises(ValueError, match="nodes 0 do not divide 8 experts; use 1, 2, 4, 8"):
        check_routing(8, 2, nodes=0)
    check_routing(8, 3, nodes=2, M=2)  # on all nodes there is no limit, and nothing to share evenly
