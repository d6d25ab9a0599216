"""Two hops: against all experts on all tokens, bytes by link, the limit to nodes, and the order of events."""

import time
from contextlib import nullcontext
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import two_hops
from _moe_demo import HostWaits, Wire
from expert_dispatch import Exchange, dispatch_rows, experts_loop, make_plan, reference
from harness.meter import communication
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same_named, numbers
from routing import route
from torch import Tensor
from two_hops import (
    EVENTS,
    Arrive,
    Depart,
    Trip,
    answer,
    bytes_by_link,
    dispatch_two_hops,
    hop,
    node_groups,
    weight_table,
)

E, K, H, F_ = 16, 4, 12, 8
SIZES = {1: [17], 2: [11, 6], 4: [6, 0, 9, 2]}  # tokens of each rank
LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 2), (4, 2, 2), (4, 2, 1), (4, 4, 2)]  # ranks, nodes, nodes of a token


def problem(tokens: int) -> dict[str, Tensor]:
    shapes = {"w1": (E, F_, H), "w3": (E, F_, H), "w2": (E, H, F_), "shared": (H, H)}
    tensors = {name: numbers(*shape, seed=5 + i) / 2 for i, (name, shape) in enumerate(shapes.items())}
    return {
        "x": numbers(tokens, H, seed=4),
        "logits": numbers(tokens, E, seed=3),
        "up": numbers(tokens, H, seed=8),
    } | tensors


@cache
def one_process(tokens: int, nodes: int, M: int) -> tuple[dict[str, Tensor], Tensor]:
    p = {name: value.requires_grad_(name != "up") for name, value in problem(tokens).items()}
    routing = route(p["logits"], K, "softmax", None, nodes, M)
    plan = make_plan("pairs", routing.experts, None, E, None)
    y = reference(p["x"], routing.weights, plan, p["w1"], p["w3"], p["w2"]) + p["x"] @ p["shared"]
    y.backward(p["up"])
    return {"y": y.detach()} | {n: v.grad for n, v in p.items() if n != "up"}, routing.experts


def of_rank(whole: dict[str, Tensor], sizes: list[int], rank: int) -> dict[str, Tensor]:
    mine = {n: v.split(sizes)[rank] for n, v in whole.items() if n in ("x", "y", "logits", "up")}
    return mine | {n: v.chunk(len(sizes))[rank] for n, v in whole.items() if n[0] == "w"}


def rows_leave_late(seconds: float):
    """Everything that this rank sends without waiting leaves so much later: rows and gradients, not the counts."""
    plain = dist.all_to_all_single

    def send(*args, async_op: bool = False, **kwargs):
        time.sleep(seconds * async_op)
        return plain(*args, async_op=async_op, **kwargs)

    return patch.object(dist, "all_to_all_single", send) if seconds else nullcontext()


def on_rank(sizes: list[int], rank: int, nodes: int, M: int, inside, across, late: float = 0.0) -> dict:
    local = of_rank(problem(sum(sizes)), sizes, rank) | {"shared": problem(1)["shared"]}
    local = {name: value.clone().requires_grad_(name != "up") for name, value in local.items()}
    compute = partial(experts_loop, w1=local["w1"], w3=local["w3"], w2=local["w2"])
    events: list[str] = []

    def shared() -> Tensor:
        events.append("shared expert")
        out = local["x"] @ local["shared"]
        out.register_hook(lambda gradient: events.append("shared expert, backward"))
        return out

    with communication() as sent, Wire() as wire, HostWaits() as waits:
        routing = route(local["logits"], K, "softmax", None, nodes, M)
        table = weight_table(routing.experts, routing.weights, E)
        with rows_leave_late(late):
            y = dispatch_two_hops(local["x"], table, compute, inside, across, shared, events.append)
            y.backward(local["up"])
    got = {"y": y.detach()} | {name: value.grad for name, value in local.items() if name != "up"}
    found = {"got": got, "events": events, "waits": waits.found, "experts": routing.experts, "to": dict(wire.to)}
    return found | {"bytes": sent.sent["all_to_all"]}


def in_the_world(sizes: list[int], nodes: int, M: int, late: float = 0.0) -> dict:
    groups, rank = node_groups(list(range(dist.get_world_size())), nodes), dist.get_rank()
    return on_rank(sizes, rank, nodes, M, *groups, late=late * (rank == dist.get_world_size() - 1))


@cache
def results_of(P: int, nodes: int, M: int) -> list[dict]:
    return run_ranks(P, in_the_world, SIZES[P], nodes, M)


def check(results: list[dict], sizes: list[int], nodes: int, M: int, what: str) -> None:
    want, experts = one_process(sum(sizes), nodes, M)
    for rank, result in enumerate(results):
        got = {name: value for name, value in result["got"].items() if name != "shared"}
        assert_same_named(got, of_rank(want, sizes, rank), 1e-11, what, rank)
        assert torch.equal(result["experts"], experts.split(sizes)[rank])
    total = sum(result["got"]["shared"] for result in results)
    assert_same_named({"shared": total}, {"shared": want["shared"]}, 1e-11, what)


@pytest.mark.always("4-2-2", "4-2-1")
@pytest.mark.parametrize(("P", "nodes", "M"), LAYOUTS)
def test_outputs_and_every_gradient_equal_all_experts_on_all_tokens_however_the_nodes_lie(P, nodes, M):
    check(results_of(P, nodes, M), SIZES[P], nodes, M, f"{P} ranks on {nodes} nodes, {M} of a token:")


@pytest.mark.always("4-2-2", "4-4-2")
@pytest.mark.parametrize(("P", "nodes", "M"), LAYOUTS)
def test_bytes_over_the_slow_link_and_inside_the_node_equal_their_formulas(P, nodes, M):
    results = results_of(P, nodes, M)
    for rank, result in enumerate(results):
        node_of = lambda r: r // (P // nodes)  # noqa: E731
        slow = sum(n for to, n in result["to"].items() if node_of(to) != node_of(rank))
        want = bytes_by_link([r["experts"] for r in results], rank, nodes, E, H, 8)
        assert (slow, result["bytes"] - slow) == want, f"rank {rank} of {P} on {nodes} nodes"
    experts = [torch.tensor([[0, 2]]), torch.tensor([[3, 2]])]  # one of two tokens has an expert on the other rank
    for nodes, want in ((2, (26 * 2 + 24, 0)), (1, (0, 26 * 2 + 24))):
        assert bytes_by_link(experts, 0, nodes, 4, 12, 2) == want, "a row and two weights, there and back, in bf16"


def rows_over_the_slow_link() -> dict[tuple[int, str], int]:
    """At 4 ranks on 2 nodes with 40 tokens each: rows that leave for the other node in forward, counted on the wire."""
    rank, group, found = dist.get_rank(), dist.group.WORLD, {}
    _, across = node_groups([0, 1, 2, 3], 2)
    for M in (1, 2):
        routing = route(numbers(40, E, seed=rank), K, "softmax", None, 2, M)
        table = weight_table(routing.experts, routing.weights, E)
        for way, among in (("two hops", across), ("one hop", group)):
            with Wire() as wire:
                hop(numbers(40, 1024), table, lambda rows, table, counts: torch.zeros_like(rows), among)
            bytes_ = sum(n for to, n in wire.to.items() if to // 2 != rank // 2)
            found[M, way] = bytes_ // (1024 * 8)  # tables and counts of all of them are less than a row
    return found


def test_a_token_crosses_the_slow_link_once_for_each_node_that_it_needs_and_the_limit_bounds_how_many():
    by_rank = run_ranks(4, rows_over_the_slow_link)
    sums = {key: sum(found[key] for found in by_rank) for key in by_rank[0]}
    for M in (1, 2):
        chosen = [route(numbers(40, E, seed=r), K, "softmax", None, 2, M).experts for r in range(4)]
        needed = sum(int((experts // (E // 2) != r // 2).any(1).sum()) for r, experts in enumerate(chosen))
        assert sums[M, "two hops"] == 2 * needed, M  # there, and the answers back
        assert sums[M, "two hops"] < sums[M, "one hop"], M
    assert sums[1, "two hops"] < sums[2, "two hops"] <= 2 * 4 * 40


@pytest.mark.always("4-2-2")
@pytest.mark.parametrize(("P", "nodes", "M"), LAYOUTS)
def test_the_shared_expert_is_computed_while_rows_travel_and_backward_while_their_gradients_do(P, nodes, M):
    """The host waits once in each hop."""
    for rank, result in enumerate(results_of(P, nodes, M)):
        assert result["events"] == EVENTS, f"rank {rank}: {result['events']}"
        assert result["waits"] == ["tolist"] * 2, f"rank {rank}: {result['waits']}"


class Watched:
    """A collective under way, that says when somebody waits for it."""

    def __init__(self, work: dist.Work, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("waited for")
        self.work.wait()


def calls_of_torch() -> list[str]:
    """When torch is asked to send without waiting, when somebody waits for it, and the shared expert between them."""
    groups, events, send = node_groups([0, 1], 2), [], dist.all_to_all_single
    x, w = numbers(5, H).requires_grad_(), numbers(H, H).requires_grad_()
    experts = torch.arange(10).view(5, 2) % 4
    table = weight_table(experts, torch.full((5, 2), 0.5, dtype=torch.float64), 4)

    def watched(*args, async_op: bool = False, **kwargs):
        work = send(*args, async_op=async_op, **kwargs)
        events.extend(["sent"] * async_op)
        return Watched(work, events) if async_op else work

    def shared() -> Tensor:
        events.append("computed")
        out = x @ w
        out.register_hook(lambda gradient: events.append("computed"))
        return out

    with patch.object(dist, "all_to_all_single", watched):
        y = dispatch_two_hops(x, table, lambda rows, counts: 2 * rows, *groups, shared)
        events.append("forward is done")
        y.sum().backward()
    return events


def test_torch_is_asked_to_send_without_waiting_and_waited_for_when_the_shared_expert_is_done():
    one_way = ["sent", "computed", "waited for"]  # the second hop has one rank, which sends nothing
    for rank, events in enumerate(run_ranks(2, calls_of_torch)):
        assert events == [*one_way, "forward is done", *one_way], f"rank {rank}: {events}"


def test_rows_of_a_rank_that_is_late_are_waited_for_forward_and_backward():
    check(run_ranks(2, in_the_world, SIZES[2], 2, 2, 0.1), SIZES[2], 2, 2, "the last rank is late:")


def two_slices() -> tuple[dict, list]:
    groups = [node_groups(ranks, 2) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    return on_rank(SIZES[2], dist.get_rank() // 2, 2, 2, *groups), [dist.get_process_group_ranks(g) for g in groups]


def test_two_slices_of_the_world_hop_among_themselves():
    results = run_ranks(4, two_slices)
    for ranks in ([0, 2], [1, 3]):
        check([results[r][0] for r in ranks], SIZES[2], 2, 2, f"ranks {ranks}:")
        assert all(results[r][1] == [[r], ranks] for r in ranks), results


def groups_of_four() -> dict[int, list[list[int]]]:
    return {n: [dist.get_process_group_ranks(g) for g in node_groups([0, 1, 2, 3], n)] for n in (1, 2, 4)}


def test_a_rank_is_in_its_node_and_with_those_of_its_place_in_the_others():
    for nodes in (0, 2, 6):
        with pytest.raises(ValueError, match=f"{nodes} nodes cannot share 5 ranks evenly; use 1, 5"):
            node_groups([0, 1, 2, 3, 4], nodes)
    for rank, found in enumerate(run_ranks(4, groups_of_four)):
        for nodes, (inside, across) in found.items():
            size = 4 // nodes
            assert inside == [r for r in range(4) if r // size == rank // size], f"rank {rank}, {nodes} nodes: {inside}"
            assert across == [r for r in range(4) if r % size == rank % size], f"rank {rank}, {nodes} nodes: {across}"


def weightless() -> Tensor:
    weights = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    table = weight_table(torch.tensor([[0, 3]]), weights, 4)
    inside, across = node_groups([0, 1], 2)
    w = numbers(2, F_, H)
    compute = lambda rows, counts: experts_loop(rows, counts, w, w, w.transpose(1, 2).contiguous())  # noqa: E731
    dispatch_two_hops(numbers(1, H), table, compute, inside, across).sum().backward()
    return weights.grad


def test_a_chosen_expert_of_weight_zero_still_gives_its_weight_a_gradient():
    for rank, grad in enumerate(run_ranks(2, weightless)):
        assert grad.abs().min() > 1e-3, f"rank {rank}: {grad}"


def in_bf16() -> tuple[float, float]:
    """Distance from float64 of two hops, and of version once in one."""
    rank, group = dist.get_rank(), dist.group.WORLD
    p = of_rank(problem(40), [10] * 4, rank)
    routing = route(p["logits"], K)
    inside, across = node_groups([0, 1, 2, 3], 2)
    outs = []
    for dtype in (torch.float64, torch.bfloat16):
        x, *w = (p[name].to(dtype) for name in ("x", "w1", "w3", "w2"))
        compute = partial(experts_loop, w1=w[0], w3=w[1], w2=w[2])
        table = weight_table(routing.experts, routing.weights, E)
        plan = make_plan("once", routing.experts, None, E, group)
        two = dispatch_two_hops(x, table, compute, inside, across)
        one = dispatch_rows(x, routing.weights, plan, compute, group)
        assert two.dtype == one.dtype == dtype, f"{two.dtype} of rows in {dtype}"
        outs.append((two.double(), one.double()))
    return tuple((half - whole).norm().item() for whole, half in zip(*outs, strict=True))


def test_in_bf16_two_hops_are_as_far_from_float64_as_one():
    for rank, (two, one) in enumerate(run_ranks(4, in_bf16)):
        assert two <= 1.5 * one, f"rank {rank}: {two} against {one}"


def test_a_rank_without_any_row_answers_with_none():
    w = numbers(2, F_, H).requires_grad_()
    compute = lambda rows, counts: experts_loop(rows, counts, w, w, w.transpose(1, 2))  # noqa: E731
    y = answer(torch.zeros(0, H).double(), torch.zeros(0, 2).double(), [0, 0], compute)
    y.sum().backward()
    assert y.shape == (0, H) and not w.grad.any()


def test_a_second_derivative_is_refused():
    x, trip = numbers(2, H).requires_grad_(), Trip([2], [2], None, lambda event: None)
    for y in (Exchange.apply(x, [2], [2], None), Arrive.apply(Depart.apply(x, trip), trip)):
        assert trip.under_way is None, "what has arrived is kept alive until backward"
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nodes 3", "--nodes 3 cannot share 4 ranks evenly; use 1, 2, 4"),
        ("--nodes 0", "--nodes 0 is not in 1 .. 1024"),
        ("--nodes 2 --max-nodes 3", "--max-nodes 3 of 2 nodes is impossible; use 1 to 2"),
        ("--nodes 2 --max-nodes 0", "--max-nodes 0 of 2 nodes is impossible; use 1 to 2"),
        ("--nodes 4 --max-nodes 3", "--max-nodes 3 cannot share top-k 4 evenly"),
        ("--top-k 17", "--top-k 17 of 16 experts is impossible"),
        ("--experts 6", "--experts 6 do not divide among 4"),
        ("--tokens 0", "--tokens 0 is not in 1 .. 4096"),
    ],
)
def test_bad_input_is_one_line_that_names_option_and_remedy(options, words):
    assert words in refusal(two_hops.main, options, world_size=4)


def test_without_a_limit_a_token_may_use_all_nodes(monkeypatch):
    found = []
    monkeypatch.setattr(two_hops, "demo", lambda args, *_: found.append((args.nodes, args.max_nodes)))
    monkeypatch.setattr(two_hops, "launch", lambda demo: demo(None, None))
    monkeypatch.setenv("WORLD_SIZE", "4")
    for options in ("--nodes 4", "--nodes 4 --max-nodes 2"):
        monkeypatch.setattr("sys.argv", ["two_hops.py", *options.split()])
        two_hops.main()
    assert found == [(4, 4), (4, 2)]
