"""Dispatch and experts: every version and every computation against all experts on all tokens, and the bytes."""

from functools import cache, partial
from types import SimpleNamespace

import expert_dispatch
import pytest
import torch
import torch.distributed as dist
from expert_dispatch import (
    COMPUTES,
    DISPATCH,
    RouterError,
    bytes_sent,
    experts_grouped,
    experts_loop,
    make_plan,
    reference,
    rows_that_leave,
)
from harness.meter import communication
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import assert_same_named, numbers
from routing import route, within_capacity
from torch import Tensor

H, F_ = 12, 8


# ------------------------------------------------------------------------------------------------- three computations


@pytest.mark.parametrize("compute", ["loop", "padded", "grouped"])
@pytest.mark.parametrize("counts", [[3, 5, 2], [0, 7, 0], [4, 0, 0], [0, 0, 0], [1, 1, 1]])
def test_each_computation_gives_every_row_its_expert_and_an_expert_without_rows_a_gradient_of_zero(compute, counts):
    dtype, tol = (torch.float32, 1e-5) if compute == "grouped" else (torch.float64, 1e-12)
    x = numbers(sum(counts), H, dtype=dtype).requires_grad_()
    w = {
        n: numbers(3, *s, seed=1 + i, dtype=dtype)
        for i, (n, s) in enumerate([("w1", (F_, H)), ("w3", (F_, H)), ("w2", (H, F_))])
    }
    w = {name: value.requires_grad_() for name, value in w.items()}
    up = numbers(sum(counts), H, seed=9, dtype=dtype)
    y = COMPUTES[compute](x, counts, **w)
    y.backward(up)
    got = {"y": y.detach(), "x": x.grad, **{name: value.grad for name, value in w.items()}}
    rows, want_y = x.detach().clone().requires_grad_(), []
    clean = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
    for i, e in enumerate(e for e, n in enumerate(counts) for _ in range(n)):
        gate = clean["w1"][e] @ rows[i]
        want_y.append(clean["w2"][e] @ (gate * gate.sigmoid() * (clean["w3"][e] @ rows[i])))
    want_y = torch.stack(want_y) if want_y else rows * 0 + sum(v.sum() * 0 for v in clean.values())
    want_y.backward(up)
    want = {"y": want_y.detach(), "x": rows.grad, **{name: value.grad for name, value in clean.items()}}
    assert_same_named(got, want, tol)
    for e, n in enumerate(counts):
        assert n or all(not value.grad[e].any() for value in w.values()), f"expert {e} had no rows"
    assert not COMPUTES[compute](x, counts, **w, act=lambda gate, up: 0 * gate).any(), "an activation of one's own"


def test_grouped_products_say_what_they_cannot_do():
    x, w = numbers(4, H), numbers(2, F_, H)
    with pytest.raises(ValueError, match="grouped products need no float64"):
        experts_grouped(x, [2, 2], w, w, w.transpose(1, 2))
    for dtype, f, h in ((torch.float32, 8, 3), (torch.float32, 3, 8), (torch.bfloat16, 8, 12)):
        up, down = numbers(2, f, h, dtype=dtype), numbers(2, h, f, dtype=dtype)
        with pytest.raises(ValueError, match="rows of 16 bytes"):
            experts_grouped(x[:, :h].to(dtype), [2, 2], up, up, down)


# ------------------------------------------------------------------------------------- dispatch: the one reference

SIZES = {1: [17], 2: [11, 6], 3: [5, 9, 3], 4: [6, 0, 9, 2]}  # tokens of each rank
CASES = {  # experts, top-k, capacity, biases on the logits of these experts
    "dropless": (12, 3, None, {}),
    "all experts": (12, 12, None, {}),
    "capacity": (12, 3, 0.8, {}),
    "experts 0 to 5 get nothing, so some ranks receive no token": (12, 2, None, dict.fromkeys(range(6), -1e4)),
    "top 1": (12, 1, None, {}),
}


def problem(case: str, tokens: int) -> dict:
    E, _, _, bias = CASES[case]
    logits = numbers(tokens, E, seed=3)
    for expert, value in bias.items():
        logits[:, expert] += value
    shapes = {"w1": (E, F_, H), "w3": (E, F_, H), "w2": (E, H, F_)}
    tensors = {name: numbers(*shape, seed=5 + i) / 2 for i, (name, shape) in enumerate(shapes.items())}
    return {"x": numbers(tokens, H, seed=4), "logits": logits, "up": numbers(tokens, H, seed=8)} | tensors


@cache
def one_process(case: str, tokens: int) -> dict[str, Tensor]:
    E, K, capacity, _ = CASES[case]
    p = {name: value.requires_grad_(name != "up") for name, value in problem(case, tokens).items()}
    routing = route(p["logits"], K)
    kept = within_capacity(routing.experts, E, capacity, None) if capacity else None
    y = reference(
        p["x"], routing.weights, make_plan("pairs", routing.experts, kept, E, None), p["w1"], p["w3"], p["w2"]
    )
    y.backward(p["up"])
    return {"y": y.detach()} | {name: value.grad for name, value in p.items() if name != "up"}


def on_ranks(version: str, group: dist.ProcessGroup | None, case: str, sizes: list[int], compute: str) -> dict:
    E, K, capacity, _ = CASES[case]
    rank, P = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    p = problem(case, sum(sizes))
    local = {name: value.split(sizes)[rank] for name, value in p.items() if name in ("x", "logits", "up")}
    local |= {name: p[name].chunk(P)[rank] for name in ("w1", "w3", "w2")}
    local = {name: value.clone().requires_grad_(name != "up") for name, value in local.items()}
    with communication() as sent:
        routing = route(local["logits"], K)
        kept = within_capacity(routing.experts, E, capacity, group) if capacity else None
        plan = make_plan(version, routing.experts, kept, E, group)
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in (plan.rows, plan.to)), "more is kept alive"
        experts = partial(COMPUTES[compute], w1=local["w1"], w3=local["w3"], w2=local["w2"])
        y = DISPATCH[version](local["x"], routing.weights, plan, experts, group)
        y.backward(local["up"])
    got = {"y": y.detach()} | {name: value.grad for name, value in local.items() if name != "up"}
    return {"got": got, "bytes": sent.sent["all_to_all"], "experts": routing.experts, "kept": kept}


def all_cases(sizes: list[int]) -> dict:
    group = dist.group.WORLD
    runs = [(case, version, "loop") for case in CASES for version in DISPATCH]
    runs += [(case, version, "padded") for case in list(CASES)[2:4] for version in DISPATCH]
    return {run: on_ranks(run[1], group, run[0], sizes, run[2]) for run in runs}


@cache
def results_of(P: int) -> list[dict]:
    return run_ranks(P, all_cases, SIZES[P])


def check(results: list[dict], case: str, sizes: list[int], what: str) -> None:
    want, P = one_process(case, sum(sizes)), len(sizes)
    for rank, result in enumerate(results):
        split = {n: v.split(sizes)[rank] if n in ("y", "x", "logits") else v.chunk(P)[rank] for n, v in want.items()}
        assert_same_named(result["got"], split, 1e-11, what, rank)


@pytest.mark.always("3")
@pytest.mark.parametrize("P", SIZES)
def test_outputs_and_every_gradient_equal_all_experts_on_all_tokens_however_uneven_the_ranks(P):
    results = results_of(P)
    for case, version, compute in results[0]:
        check([r[case, version, compute] for r in results], case, SIZES[P], f"{version}, {compute}, {case}:")


@pytest.mark.always("3")
@pytest.mark.parametrize("P", [2, 3, 4])
def test_bytes_sent_in_all_to_alls_equal_the_formula_from_the_routed_counts(P):
    results = results_of(P)
    for case, version, compute in results[0]:
        E = CASES[case][0]
        mine = [r[case, version, compute] for r in results]
        used = [torch.ones_like(r["experts"]).bool() if r["kept"] is None else r["kept"] for r in mine]
        rows = [
            rows_that_leave(version, r["experts"], u, E, P, i) for i, (r, u) in enumerate(zip(mine, used, strict=True))
        ]
        for rank, result in enumerate(mine):
            want = bytes_sent(version, rows, rank, H, E, 8, 8)
            assert result["bytes"] == want, f"{version}, {case}, rank {rank}: {result['bytes']} bytes, not {want}"


def beside_an_empty_rank() -> list[dict]:
    return [on_ranks(version, dist.group.WORLD, "capacity", [0, 17], "loop") for version in DISPATCH]


def test_a_rank_without_tokens_computes_for_the_others():
    for version, *results in zip(DISPATCH, *run_ranks(2, beside_an_empty_rank), strict=True):
        check(results, "capacity", [0, 17], version)


def test_one_process_without_a_group_sends_nothing():
    for version in DISPATCH:
        result = on_ranks(version, None, "dropless", [17], "loop")
        check([result], "dropless", [17], version)
        assert result["bytes"] == 0


# ----------------------------------------------------------------------------------------------- rows of version once


def test_once_sends_a_token_once_to_each_rank_and_node_limited_routing_bounds_how_often():
    logits = numbers(400, 16)
    free, limited = route(logits, 4).experts, route(logits, 4, "softmax", None, 4, 2).experts

    def rows(version: str, experts: Tensor) -> int:
        return sum(rows_that_leave(version, experts, torch.ones_like(experts).bool(), 16, 4, 0))

    assert rows("everywhere", free) == 3 * 400
    assert rows("once", limited) < rows("once", free) < min(rows("pairs", free), rows("everywhere", free))
    assert rows("once", limited) <= 2 * 400


def test_weights_are_sent_with_the_rows_and_in_their_own_dtype():
    rows = [[0, 3], [2, 0]]  # bytes of 5 rows of 12 elements there and back, of 5 tables of 4 / 2 weights, of counts
    assert bytes_sent("once", rows, 0, 12, 4, 2, 4) == 2 * 5 * 12 * 2 + 5 * 2 * 4 + 8 * (2 + 2)
    assert bytes_sent("pairs", rows, 0, 12, 4, 2, 4) == 2 * 5 * 12 * 2 + 8 * (2 + 1)


def weightless() -> Tensor:
    """Gradient of a weight that is exactly zero: its expert was chosen, and would be worth more than nothing."""
    weights = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    plan = make_plan("once", torch.tensor([[0, 3]]), None, 4, dist.group.WORLD)
    w = numbers(2, F_, H)
    compute = lambda rows, counts: experts_loop(rows, counts, w, w, w.transpose(1, 2).contiguous())  # noqa: E731
    DISPATCH["once"](numbers(1, H), weights, plan, compute, dist.group.WORLD).sum().backward()
    return weights.grad


def test_a_chosen_expert_of_weight_zero_still_gives_its_weight_a_gradient():
    for rank, grad in enumerate(run_ranks(2, weightless)):
        assert grad.abs().min() > 1e-3, f"rank {rank}: {grad}"


def demos() -> list[list[str]]:
    sizes = dict(experts=4, top_k=2, router="sigmoid", nodes=2, max_nodes=1, capacity=1.0, hidden=8, intermediate=12)
    versions = [("pairs", "grouped"), ("once", "padded")]
    given = [SimpleNamespace(**sizes, tokens=8, version=version, compute=compute) for version, compute in versions]
    return [expert_dispatch.demo(args, dist.group.WORLD, torch.device("cpu")) for args in given]


def test_the_demo_finds_nothing_wrong_in_float32_with_drops_either():
    assert run_ranks(2, demos) == [[[], []]] * 2


# --------------------------------------------------------------------------------------------------------- bad input


def one_ill_rank(version: str) -> str:
    bad = torch.tensor(3 if dist.get_rank() == 1 else 0)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    given = torch.zeros(5, 2, dtype=torch.int64), None, 4, groups[dist.get_rank() % 2], bad, "layer 7"
    return error_from(RouterError, make_plan, version, *given)


@pytest.mark.parametrize("version", ["pairs", "once"])
def test_logits_that_are_not_finite_end_all_ranks_of_the_group_with_the_same_line(version):
    want = "router logits of layer 7 are not finite: 3 tokens on rank 1"
    assert run_ranks(4, one_ill_rank, version) == ["", want, "", want]
    given = torch.zeros(5, 2, dtype=torch.int64), None, 4, None, torch.tensor(2), "layer 7"
    alone = error_from(RouterError, make_plan, version, *given)
    assert alone == "router logits of layer 7 are not finite: 2 tokens on rank 0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--top-k 9", "top-k 9 of 8 experts is impossible"),
        ("--nodes 3", "nodes 3 do not divide 8 experts"),
        ("--capacity 0", "--capacity 0.0 leaves no room"),
        ("--capacity inf", "--capacity inf leaves no room"),
        ("--compute grouped --hidden 10", "--compute grouped needs --hidden"),
        ("--compute grouped --intermediate 10", "--compute grouped needs --hidden"),
        ("--version never", "--version"),
    ],
)
def test_bad_input_is_one_line_that_names_option_and_remedy(options, words):
    assert words in refusal(expert_dispatch.main, options)


def test_the_world_must_divide_the_experts():
    said = refusal(expert_dispatch.main, "--experts 6 --top-k 2", world_size=4)
    assert "--experts 6 do not divide among 4 expert-parallel ranks; use 1, 2, 3, 6 ranks" in said
