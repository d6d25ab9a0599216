"""Fixed shapes: the layer that waits with the same pairs dropped, a queue in plain Python, waits, shapes, bytes."""

import io
from contextlib import redirect_stdout
from functools import cache, partial
from types import SimpleNamespace

import fixed_dispatch
import pytest
import torch
import torch.distributed as dist
from _moe_demo import HostWaits
from _slow_moe import queue_by_queue
from expert_dispatch import dispatch_pairs, experts_loop, make_plan
from fixed_dispatch import bytes_sent_fixed, moe_fixed, room, slots_of
from harness.meter import communication
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named, numbers
from routing import balance_loss, expert_counts, group_sum, route, router_logits
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

E, K, H, F_ = 12, 3, 8, 6
SIZES = {1: [17], 2: [11, 6], 4: [6, 0, 9, 2]}  # tokens of each rank
RUNS = [("softmax", 17), ("sigmoid", 17), ("softmax", 2), ("softmax", 1)]  # (router, slots); 17 drop nothing


def leaves(sizes: list[int], rank: int) -> dict[str, Tensor]:
    P = len(sizes)
    whole = {"x": numbers(sum(sizes), H), "gate": numbers(E, H, seed=1)}
    whole |= {"w1": numbers(E, F_, H, seed=2), "w3": numbers(E, F_, H, seed=3), "w2": numbers(E, H, F_, seed=4)}
    mine = {n: v.chunk(P)[rank] if n in ("w1", "w3", "w2") else v for n, v in whole.items()}
    mine["x"] = whole["x"].split(sizes)[rank]
    return {n: v.clone().requires_grad_() for n, v in mine.items()}


def eager(x, gate, w1, w3, w2, C: int, group, router: str) -> tuple[Tensor, Tensor, Tensor]:
    routing = route(router_logits(x, gate), K, router)
    kept = torch.tensor(queue_by_queue(routing.experts.tolist(), C, E), dtype=torch.bool).view(-1, K)
    plan = make_plan("pairs", routing.experts, kept, E, group)
    y = dispatch_pairs(x, routing.weights, plan, partial(experts_loop, w1=w1, w3=w3, w2=w2), group)
    counts = group_sum(expert_counts(routing.experts, E), group)
    return y, balance_loss(routing.probabilities, counts, K), (~kept).sum()


def fixed(x, gate, w1, w3, w2, C: int, group, router: str) -> tuple[Tensor, Tensor, Tensor]:
    y, balance, seen = moe_fixed(x, gate, w1, w3, w2, K, C, group, router)
    return y, balance, seen.dropped


def results(layer, sizes: list[int], router: str, C: int, group) -> dict:
    tensors = leaves(sizes, dist.get_rank(group) if group else 0)
    with communication() as sent, HostWaits() as waits:
        y, balance, dropped = layer(*tensors.values(), C, group, router)
        ((y * y.detach().cos()).sum() + balance).backward()
    got = {"y": y.detach(), "balance": balance.detach()} | {n: v.grad for n, v in tensors.items()}
    return {"got": got, "dropped": int(dropped), "bytes": sent.sent["all_to_all"], "waits": waits.found}


def both(sizes: list[int]) -> dict:
    group = dist.group.WORLD
    seen = moe_fixed(*leaves(sizes, dist.get_rank()).values(), K, 17, group)[2]
    assert seen.counts.sum() == K * sum(sizes), "not the counts of all ranks"
    plan = fixed_dispatch.plan_fixed(torch.zeros(4, K, dtype=torch.int64), E, 1.0, group)
    assert plan.send == plan.receive == [E // len(sizes)] * len(sizes), "a slot of each expert there"
    return {(router, C): [results(f, sizes, router, C, group) for f in (fixed, eager)] for router, C in RUNS}


@cache
def on_ranks(P: int) -> list[dict]:
    return run_ranks(P, both, SIZES[P])


@pytest.mark.parametrize("P", SIZES)
def test_outputs_losses_and_every_gradient_equal_those_of_the_layer_that_waits_with_the_same_pairs_dropped(P):
    for rank, found in enumerate(on_ranks(P)):
        for run, (got, want) in found.items():
            assert_same_named(got["got"], want["got"], 1e-10, f"{run}:", rank)
            assert got["dropped"] == want["dropped"], f"rank {rank}, {run}: {got['dropped']} dropped"
            assert run[1] < 17 or got["dropped"] == 0, f"rank {rank}, {run}"
    assert P == 4 or all(found["softmax", 1][0]["dropped"] for found in on_ranks(P)), "nothing was ever dropped"


@pytest.mark.parametrize("P", SIZES)
def test_the_host_waits_for_nothing_forward_or_backward(P):
    for rank, found in enumerate(on_ranks(P)):
        for run, (got, _) in found.items():
            assert got["waits"] == [], f"rank {rank}, {run}: the host waits for {got['waits']}"


@pytest.mark.parametrize("P", SIZES)
def test_bytes_sent_equal_the_formula_whatever_was_chosen(P):
    for rank, found in enumerate(on_ranks(P)):
        for run, (got, _) in found.items():
            want = bytes_sent_fixed(P, E, run[1], H, 8)
            assert got["bytes"] == want, f"rank {rank}, {run}: {got['bytes']} bytes, not {want}"
    assert bytes_sent_fixed(2, 4, 3, 5, 2) == 2 * 2 * (2 * 3 * 5) * 2, "bf16: of two experts three slots each"


def test_a_pair_gets_the_next_slot_of_its_expert_first_choices_first_and_the_dropped_get_none():
    experts = torch.tensor([[2, 0], [2, 1], [0, 2]])
    assert slots_of(experts, 3, 2).tolist() == [[4, 1], [5, 2], [0, 6]]  # the second choice of the last token: none
    assert slots_of(experts, 3, 1).tolist() == [[2, 3], [3, 1], [0, 3]]
    assert [room(8, 4, 2, factor) for factor in (None, 1.0, 2.0, 9.0)] == [8, 4, 8, 8], "never more slots than tokens"
    many = route(numbers(40, E, seed=7), K).experts
    for C in (1, 3, 40):
        slots = slots_of(many, E, C)
        assert (slots < E * C).tolist() == queue_by_queue(many.tolist(), C, E)
        used = slots[slots < E * C]
        assert len(used.unique()) == len(used), "two pairs in one slot"
        assert torch.equal(used // C, many[slots < E * C]), "a pair in a slot of another expert"


class Shapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outs = out if isinstance(out, (tuple, list)) else [out]
        self.seen.append((func._opname, *[tuple(t.shape) for t in outs if isinstance(t, Tensor)]))
        return out


def test_every_operation_has_the_same_shapes_whatever_the_tokens_choose_and_those_of_the_other_layer_have_not():
    def shapes(layer, seed: int) -> list[tuple]:
        tensors = leaves([17], 0)
        tensors["x"] = numbers(17, H, seed=seed).requires_grad_()
        with Shapes() as mode:
            layer(*tensors.values(), 3, None, "softmax")[0].sum().backward()
        return mode.seen

    assert shapes(fixed, 10) == shapes(fixed, 11)
    assert shapes(eager, 10) != shapes(eager, 11)


def test_forward_and_backward_recorded_with_one_batch_are_right_for_another():
    """What a CUDA graph does: the operations are written down once, and repeated on other numbers."""

    def step(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> list[Tensor]:
        given = [t.detach().requires_grad_() for t in (x, gate, w1, w3, w2)]
        y, balance, dropped = fixed(*given, 2, None, "softmax")
        return [y, dropped, *torch.autograd.grad(y.square().sum() + balance, given)]

    tensors = [t.detach() for t in leaves([17], 0).values()]
    recorded = make_fx(step)(*tensors)
    tensors[0] = numbers(17, H, seed=50)
    for i, (got, want) in enumerate(zip(recorded(*tensors), step(*tensors), strict=True)):
        assert_same(got.double(), want.double(), 1e-12, f"result {i}")


def test_ill_tokens_are_counted_on_the_device():
    tensors = leaves([17], 0)
    seen = moe_fixed(*tensors.values(), K, 17, None)[2]
    assert (int(seen.ill), seen.counts.sum().item()) == (0, 17 * K)
    tensors["x"].data[[3, 9], 1] = float("nan")
    assert int(moe_fixed(*tensors.values(), K, 17, None)[2].ill) == 2
    tensors = leaves([17], 0)
    tensors["gate"].data[5, 1] = float("inf")  # of each token one logit
    assert int(moe_fixed(*tensors.values(), K, 17, None)[2].ill) == 17


def test_in_bf16_it_is_as_far_from_float64_as_the_layer_that_waits():
    want = fixed(*leaves([17], 0).values(), 17, None, "softmax")[0]
    half = [t.detach().bfloat16() for t in leaves([17], 0).values()]
    outs = [f(*half, 17, None, "softmax")[0] for f in (fixed, eager)]
    assert [y.dtype for y in outs] == [torch.bfloat16] * 2
    errors = [(y.double() - want).norm() for y in outs]
    assert errors[0] <= 1.5 * errors[1], errors


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks a GPU")
def test_a_gpu_says_too_that_nobody_waits():
    tensors = [t.detach().cuda().requires_grad_() for t in leaves([17], 0).values()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, balance, _ = fixed(*tensors, 2, None, "softmax")
        (y.square().sum() + balance).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(y.cpu(), fixed(*leaves([17], 0).values(), 2, None, "softmax")[0], 1e-10, "outputs")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--top-k 9", "--top-k 9 of 8 experts is impossible; use 1 to 8"),
        ("--experts 6 --top-k 2", "--experts 6 do not divide among 4 expert-parallel ranks"),
        ("--capacity nan", "--capacity nan leaves no room"),
        ("--capacity 0", "--capacity 0.0 leaves no room"),
        ("--capacity inf", "--capacity inf leaves no room"),
        ("--tokens 0", "--tokens 0 is not in 1 .. 4096"),
        ("--router hash", "--router"),
    ],
)
def test_bad_input_is_one_line_that_names_option_and_remedy(options, words):
    assert words in refusal(fixed_dispatch.main, options, world_size=4)


def demos() -> list[list[str]]:
    """What the demo finds wrong: as it is, and beside a layer whose outputs are NaN."""
    args, plain = SimpleNamespace(experts=4, top_k=2, tokens=8, capacity=1.0, router="sigmoid"), fixed_dispatch.eager
    with redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        found = [fixed_dispatch.demo(args, dist.group.WORLD, torch.device("cpu"))]
        patch.setattr(fixed_dispatch, "eager", lambda *given: [x * float("nan") for x in plain(*given)])
        return [*found, fixed_dispatch.demo(args, dist.group.WORLD, torch.device("cpu"))]


def test_the_demo_finds_nothing_wrong_and_says_of_nan_that_it_is():
    for right, wrong in run_ranks(2, demos):
        assert right == [] and len(wrong) == 2 and all("gradients" in line and "nan" in line for line in wrong)
