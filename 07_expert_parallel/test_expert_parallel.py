"""The core file against a model that takes one token after the other, against in_depth, and against formulas."""

import contextlib
import gc
import io
import math
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path
from unittest.mock import Mock, patch

sys.path.append(str(Path(__file__).resolve().parent / "in_depth"))  # to compare with

import expert_parallel
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _moe_demo import HostWaits
from expert_parallel import (
    AUX_LOSS_COEF,
    EXPERT_WEIGHTS,
    FFN_HIDDEN,
    HIDDEN,
    IGNORE_INDEX,
    N_LAYERS,
    build_model,
    load_balancing_loss,
    moe,
    moe_dense,
    plan_dispatch,
    route,
    shard_experts,
)
from harness.meter import communication, saved_activations, storage_bytes
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named, error_between, numbers
from moe_layer import MoE, MoEConfig, set_loss_scale
from torch import Tensor

E = 8
SEQUENCES = {1: [2], 2: [2, 1], 4: [1, 1, 0, 2]}  # of each rank; the labels of rank 1 are all ignored
TOKENS = {1: [17], 2: [11, 6], 4: [6, 0, 9, 2]}  # of each rank, where a layer is tested by itself
LAYER_WEIGHTS = {"router": (E, HIDDEN), "w1": (E, FFN_HIDDEN, HIDDEN), "w3": (E, FFN_HIDDEN, HIDDEN)}
LAYER_WEIGHTS |= {"w2": (E, HIDDEN, FFN_HIDDEN)}


# --------------------------------------------------------- the reference: one token after the other, in one process


def room_for(ranks: list[int], top_k: int, capacity_factor: float | None) -> list[dict[int, int]]:
    """For each rank, how many rows each expert still takes."""
    rooms = [T if capacity_factor is None else math.ceil(capacity_factor * (top_k * T) / E) for T in ranks]
    return [dict.fromkeys(range(E), room) for room in rooms]


def slow_moe(x: Tensor, router, w1, w3, w2, top_k: int, ranks: list[int], capacity_factor=None) -> tuple:
    """Output [T, H] and load-balancing loss. `ranks`: how many of the tokens each rank has."""
    logits = x @ router.T
    probs = logits.exp() / logits.exp().sum(1, keepdim=True)
    chosen_by = [0] * E
    rooms, rows = room_for(ranks, top_k, capacity_factor), []
    rank_of = [rank for rank, T in enumerate(ranks) for _ in range(T)]
    for token, prob, rank in zip(x, probs, rank_of, strict=True):
        chosen = sorted(range(E), key=lambda e, prob=prob: -prob[e].item())[:top_k]
        divisor = sum(prob[e] for e in chosen) if top_k > 1 else 1.0
        y = torch.zeros_like(token)
        for e in chosen:
            chosen_by[e] += 1
            rooms[rank][e] -= 1
            if rooms[rank][e] >= 0:
                inner = w1[e] @ token
                y = y + prob[e] / divisor * (w2[e] @ (inner * inner.sigmoid() * (w3[e] @ token)))
        rows.append(y)
    f = torch.tensor(chosen_by, dtype=probs.dtype) * E / (top_k * len(x))
    return torch.stack(rows), (f * probs.mean(0)).sum()


def slow_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def slow_loss(w: dict[str, Tensor], tokens: Tensor, labels: Tensor, ranks: list[int], top_k: int, factor) -> Tensor:
    total, num_valid, aux_loss, x = 0.0, 0, 0.0, w["embed"][tokens]
    for i in range(N_LAYERS):
        q, k, v = (slow_norm(x) @ w[f"{i}.qkv_proj"].T).chunk(3, -1)
        visible = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
        probs = (q @ k.mT / HIDDEN**0.5).masked_fill(~visible, -torch.inf).softmax(-1)
        x = x + probs @ v @ w[f"{i}.o_proj"].T
        weights = [w[f"{i}.{name}"] for name in LAYER_WEIGHTS]
        y, layer_aux_loss = slow_moe(slow_norm(x).flatten(0, 1), *weights, top_k, ranks, factor)
        x, aux_loss = x + y.view_as(x), aux_loss + layer_aux_loss
    for logits, label in zip((slow_norm(x) @ w["head"].T).flatten(0, 1), labels.flatten().tolist(), strict=True):
        if label != IGNORE_INDEX:
            total, num_valid = total - logits.log_softmax(0)[label], num_valid + 1
    return total / num_valid + AUX_LOSS_COEF * aux_loss


def batch_of_rank(step: int, rank: int, ep: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    both = torch.randint(0, 12, (SEQUENCES[ep][rank], 6), generator=generator)  # few tokens, so that labels repeat
    return both[:, :-1], torch.full_like(both[:, 1:], IGNORE_INDEX) if rank == 1 else both[:, 1:]


@cache
def reference(ep: int, top_k: int, factor: float | None) -> dict:
    """Losses, gradients of each step and weights after three steps of SGD on the batches of all ranks."""
    w = {name: value.requires_grad_() for name, value in build_model(E, "cpu").items()}
    losses, grads, ranks = [], [], [5 * sequences for sequences in SEQUENCES[ep]]
    for step in range(3):
        tokens, labels = (torch.cat(x) for x in zip(*(batch_of_rank(step, r, ep) for r in range(ep)), strict=True))
        loss = slow_loss(w, tokens, labels, ranks, top_k, factor)
        grads.append(dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True)))
        losses.append(loss.detach())
        w = {name: (value - 0.1 * grads[-1][name]).detach().requires_grad_() for name, value in w.items()}
    return {"losses": losses, "grads": grads, "params": w}


def shard(name: str, full: Tensor, rank: int, ep: int) -> Tensor:
    return full.chunk(ep)[rank] if name.endswith(("w1", "w3", "w2")) else full


CASES = [(1, None), (2, 1.0)]  # top_k, capacity factor


def train(group: dist.ProcessGroup, cases=CASES) -> dict:
    ep, rank, results = dist.get_world_size(group), dist.get_rank(group), {}
    batches = [batch_of_rank(step, rank, ep) for step in range(3)]
    for top_k, factor in cases:
        params = shard_experts(build_model(E, "cpu"), rank, ep)
        layer = partial(moe, top_k=top_k, capacity_factor=factor, group=group)
        with communication() as wire:
            losses, grads, _ = expert_parallel.train(params, batches, layer, group)
        params = {name: weight.detach() for name, weight in params.items()}
        results[top_k, factor] = {"losses": losses, "grads": grads, "params": params}
        results[top_k, factor]["all-reduced"] = wire.payload["all_reduce"]
    return results


def train_in_the_world() -> dict:
    return train(dist.group.WORLD)


def check_training(results: dict, ep: int, rank: int) -> None:
    for case, got in results.items():
        expected, what = reference(ep, *case), f"K, capacity {case}"
        for step in range(3):
            assert_same(got["losses"][step], expected["losses"][step], 1e-10, f"{what}: loss of step {step}", rank)
            part = {name: shard(name, value, rank, ep) for name, value in expected["grads"][step].items()}
            assert_same_named(got["grads"][step], part, 1e-10, f"{what}, step {step}: gradient of", rank)
        part = {name: shard(name, value, rank, ep) for name, value in expected["params"].items()}
        assert_same_named(got["params"], part, 1e-10, f"{what}, after three steps:", rank)
        # A step sums all gradients but those of experts, the number of labels, the loss, and E counts in each layer.
        summed = 3 * (sum(w.nbytes for n, w in part.items() if not n.endswith(EXPERT_WEIGHTS)) + 16 + N_LAYERS * E * 8)
        bytes_ = got["all-reduced"]
        assert bytes_ <= summed, f"{what}: {bytes_} bytes were all-reduced, and all that has to be is {summed}"


@pytest.mark.always("4")
@pytest.mark.parametrize("ep", SEQUENCES)
def test_three_steps_match_reference(ep):
    for rank, results in enumerate(run_ranks(ep, train_in_the_world)):
        check_training(results, ep, rank)


def train_in_slices() -> tuple[dict, int]:
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]  # not contiguous, and not in the world's order
    group = groups[dist.get_rank() % 2]
    return train(group, [(2, 1.0)]), dist.get_rank(group)


@pytest.mark.prove
def test_two_slices_of_the_world_train_two_models():
    for results, rank in run_ranks(4, train_in_slices):
        check_training(results, 2, rank)


# -------------------------------------------------------------------------------------------------- a layer by itself


def layer_weights(num_used: int | None = None) -> dict[str, Tensor]:
    """num_used: only the first so many experts are ever chosen."""
    w = {name: numbers(*shape, seed=i) / shape[-1] ** 0.5 for i, (name, shape) in enumerate(LAYER_WEIGHTS.items())}
    if num_used:
        w["router"][num_used:, 0] -= 1e3  # the first element of every token is 1
    return w


def layer_input(ep: int) -> Tensor:
    x = numbers(sum(TOKENS[ep]), HIDDEN, seed=9)
    x[:, 0] = 1.0
    return x


def output_grad(ep: int) -> Tensor:
    return numbers(sum(TOKENS[ep]), HIDDEN, seed=8)


def run_layer(top_k: int, factor=None, num_used: int | None = None, aux: float = 0.1, dtype=torch.float64) -> dict:
    """Output, gradients, bytes sent and bytes saved for backward, of one layer on this rank."""
    group, rank, ep = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = layer_input(ep).split(TOKENS[ep])[rank].to(dtype).clone().requires_grad_()
    w = {n: shard(n, t, rank, ep).to(dtype).clone().requires_grad_() for n, t in layer_weights(num_used).items()}
    dy = output_grad(ep).split(TOKENS[ep])[rank].clone()
    with (
        communication() as wire,
        saved_activations(exclude=w.values()) as saved,
        expert_parallel.count_bytes_sent(group) as sent,
    ):
        y, aux_loss, _ = moe(x, *w.values(), top_k, factor, group)
        ((y * dy).sum() + aux * aux_loss).backward()
    with torch.no_grad():
        without_grad = moe(x, *w.values(), top_k, factor, group)
        experts = moe_dense(x, *w.values(), top_k, factor)[2]
    grads = {name: None if t.grad is None else t.grad.clone() for name, t in w.items()}
    if grads["router"] is not None:
        dist.all_reduce(grads["router"])
    return {
        "tensors": {"y": y.detach(), "x": x.grad, **grads},
        "aux_loss": aux_loss.detach(),
        "without_grad": [bool((a == b).all()) for a, b in zip(without_grad, (y, aux_loss, experts), strict=True)],
        "wire": wire.sent["all_to_all"],
        "sent": dict(sent),
        "saved": saved.bytes,
    }


def reference_layer(ep: int, top_k: int, factor=None, num_used: int | None = None) -> tuple[dict, Tensor]:
    x = layer_input(ep).requires_grad_()
    w = {name: t.requires_grad_() for name, t in layer_weights(num_used).items()}
    y, aux_loss = slow_moe(x, *w.values(), top_k, TOKENS[ep], factor)
    ((y * output_grad(ep)).sum() + 0.1 * aux_loss).backward()
    return {"y": y.detach(), "x": x.grad, **{name: t.grad for name, t in w.items()}}, aux_loss.detach()


def check_layer(results: list[dict], expected: dict, what: str) -> None:
    ep = len(results)
    for rank, got in enumerate(results):
        part = {n: shard(n, t, rank, ep) for n, t in expected.items()}
        part |= {n: expected[n].split(TOKENS[ep])[rank] for n in ("y", "x")}
        assert_same_named(got["tensors"], part, 1e-10, what, rank)


@pytest.mark.parametrize("ep", TOKENS)
@pytest.mark.parametrize(("top_k", "factor"), [(1, None), (E, None), (2, 0.4)])
def test_layer_matches_reference(ep, top_k, factor):
    expected, aux_loss = reference_layer(ep, top_k, factor)
    results = run_ranks(ep, run_layer, top_k, factor)
    check_layer(results, expected, f"K = {top_k}:")
    assert_same(sum(got["aux_loss"] for got in results), aux_loss, 1e-10, "sum of the load-balancing losses")
    for rank, got in enumerate(results):
        assert got["without_grad"] == [True] * 3, f"rank {rank}: output, loss or experts differ under no_grad"


@pytest.mark.parametrize("ep", TOKENS)
def test_experts_without_tokens_have_zero_gradients_and_no_rank_hangs(ep):
    expected, _ = reference_layer(ep, 1, num_used=2)
    results = run_ranks(ep, run_layer, 1, None, 2, timeout=20)
    check_layer(results, expected, "two of eight experts are chosen:")
    for name in EXPERT_WEIGHTS:
        assert expected[name].flatten(1).any(1).tolist() == [True] * 2 + [False] * 6, "two experts are chosen"


def test_an_expert_takes_rows_in_order_up_to_its_capacity():
    sizes = product((0.2, 0.9, 1.0, 1.1, 3.0), ((0, 2), (1, 1), (7, 2), (200, 1), (200, 3)))
    for factor, (T, top_k) in sizes:
        experts = numbers(T, E, seed=T).topk(top_k).indices
        room = room_for([T], top_k, factor)[0]
        expected = []
        for e in experts.flatten().tolist():
            room[e] -= 1
            expected.append(e if room[e] >= 0 else E)
        got = expert_parallel.drop_tokens(experts, E, factor).flatten().tolist()
        assert got == expected, f"capacity factor {factor}, T = {T}, K = {top_k}"
    layer = numbers(7, HIDDEN), *layer_weights().values(), 2
    for sizes in (None, [7], [3, 4], [0, 1, 6]):  # without sizes all tokens are of one rank
        expected, _ = slow_moe(*layer, sizes or [7], 0.4)
        assert_same(moe_dense(*layer, 0.4, sizes=sizes)[0], expected, 1e-10, f"tokens of ranks: {sizes}")


def router_gradients() -> dict[int, float]:
    largest = {}
    for top_k in range(1, E + 1):
        w = [t.clone().requires_grad_() for t in layer_weights().values()]
        y, *_ = moe(numbers(12, HIDDEN).requires_grad_(), *w, top_k, None, dist.group.WORLD)
        (y * numbers(12, HIDDEN, seed=1)).sum().backward()
        largest[top_k] = w[0].grad.abs().max().item()
    return largest


def test_router_gets_a_gradient_for_every_top_k():
    for top_k, largest in run_ranks(1, router_gradients)[0].items():
        assert largest > 1e-3, f"K = {top_k}: the largest entry of the router's gradient is {largest:.3f}"


def derivatives_of_all_to_all() -> None:
    x = numbers(2, HIDDEN).requires_grad_()
    expert_parallel.AllToAll.apply(x, [2], [2], dist.group.WORLD).sum().backward()
    assert (x.grad == 1).all(), "the gradient of a sum is one number, expanded"
    rows = expert_parallel.AllToAll.apply(x, [2], [2], dist.group.WORLD)
    (dx,) = torch.autograd.grad(rows.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # a second derivative
        dx.sum().backward()


def test_all_to_all_takes_an_expanded_gradient_and_refuses_a_second_derivative():
    run_ranks(1, derivatives_of_all_to_all)


# ---------------------------------------------------------------------------------- the plan, the load-balancing loss


def choices(ep: int) -> list[Tensor]:
    """experts [T, 2] of each rank; E in place of every seventh one, which is dropped."""
    experts = numbers(sum(TOKENS[ep]), E, seed=3).topk(2).indices
    experts.view(-1)[::7] = E
    return list(experts.split(TOKENS[ep]))


def plan_of_a_rank() -> dict:
    with communication() as wire:
        plan = plan_dispatch(choices(dist.get_world_size())[dist.get_rank()], E, dist.group.WORLD)
    named = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in plan._asdict().items()}
    return named | {"messages": dict(wire.payload)}


@pytest.mark.parametrize("ep", TOKENS)
def test_plan_matches_counting_one_row_after_the_other(ep):
    rows = [x.flatten().tolist() for x in choices(ep)]  # of each rank: the expert of each row
    count = [[rows_of_rank.count(e) for e in range(E)] for rows_of_rank in rows]  # [ep, E]
    for rank, got in enumerate(run_ranks(ep, plan_of_a_rank)):
        own = range(rank * E // ep, (rank + 1) * E // ep)  # experts
        received = [e for sender in range(ep) for e in own for _ in range(count[sender][e])]
        sent = [i for i, e in enumerate(rows[rank]) if e < E]
        expected = {
            "permutation": sorted(sent, key=lambda i: (rows[rank][i], i)),
            "input_splits": [sum(count[rank][r * E // ep : (r + 1) * E // ep]) for r in range(ep)],
            "output_splits": [sum(count[r][e] for e in own) for r in range(ep)],
            "by_expert": sorted(range(len(received)), key=lambda i: (received[i], i)),
            "num_tokens_per_expert": [sum(count[r][e] for r in range(ep)) for e in own],
            "messages": {"all_to_all": 8 * E},  # bytes
        }
        for name, value in expected.items():
            assert got[name] == value, f"rank {rank}: {name} is {got[name]}, not {value}"


def test_load_balancing_loss_is_1_for_an_even_load_and_e_for_a_single_expert():
    even = torch.arange(16).view(8, 2) % E
    assert_same(load_balancing_loss(torch.full((8, E), 1 / E), even, None), 1.0, 1e-6, "even load")
    probs = F.one_hot(torch.zeros(8, dtype=torch.int64), E).double()
    one_expert = torch.zeros(8, 1, dtype=torch.int64)
    assert_same(load_balancing_loss(probs, one_expert, None), float(E), 1e-12, "all to one")


def load_balancing_loss_of_a_rank() -> tuple[Tensor, Tensor, list]:
    ep, rank = dist.get_world_size(), dist.get_rank()
    probs = numbers(sum(TOKENS[ep]), E, seed=3).softmax(-1).split(TOKENS[ep])[rank].clone().requires_grad_()
    with communication() as wire:
        loss = load_balancing_loss(probs, probs.topk(2).indices, dist.group.WORLD)
    loss.backward()
    return loss.detach(), probs.grad, wire.events


@pytest.mark.parametrize("ep", TOKENS)
def test_load_balancing_losses_of_uneven_ranks_add_up(ep):
    probs = numbers(sum(TOKENS[ep]), E, seed=3).softmax(-1).requires_grad_()
    counts = F.one_hot(probs.topk(2).indices, E).sum((0, 1)).double()
    expected = (counts / counts.sum() * E * probs.mean(0)).sum()
    expected.backward()
    results = run_ranks(ep, load_balancing_loss_of_a_rank)
    assert_same(sum(loss for loss, *_ in results), expected.detach(), 1e-12, "load-balancing loss")
    for rank, ((_, grad, events), part) in enumerate(zip(results, probs.grad.split(TOKENS[ep]), strict=True)):
        assert_same(grad, part, 1e-12, "its gradient in the probabilities", rank)
        assert [(name, nbytes <= 8 * E) for name, nbytes, _ in events] == [("all_reduce", True)], (
            f"rank {rank}: one all-reduce of {E} counts is enough, and it sent {events}"
        )


def host_waits() -> list[str]:
    w = [shard(n, t, 0, 2).clone().requires_grad_() for n, t in layer_weights().items()]
    with HostWaits() as waits:
        y, aux_loss, _ = moe(numbers(7, HIDDEN), *w, 2, None, dist.group.WORLD)
        (y.sum() + aux_loss).backward()
    return waits.found


def test_the_host_waits_six_times_in_a_layer():
    expected = ["bincount", "bincount", "tolist", "tolist", "repeat_interleave", "tolist"]
    assert run_ranks(2, host_waits) == [expected, expected]


# ----------------------------------------------------------------------------------------------------------- in_depth


def core_and_depth(top_k: int) -> tuple[dict, dict]:
    group, rank, ep = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    core = run_layer(top_k)["tensors"]
    layer = MoE(MoEConfig(HIDDEN, FFN_HIDDEN, E, top_k, balance=0.1), group, group).double()
    params = {name.split(".")[-2].replace("gate", "router"): p for name, p in layer.named_parameters()}
    for name, value in layer_weights().items():
        params[name].data.copy_(shard(name, value, rank, ep))
    set_loss_scale(layer, 1.0)
    x = layer_input(ep).split(TOKENS[ep])[rank].clone().requires_grad_()
    y = layer(x)
    (y * output_grad(ep).split(TOKENS[ep])[rank]).sum().backward()
    dist.all_reduce(params["router"].grad)
    return core, {"y": y.detach(), "x": x.grad, **{name: params[name].grad for name in layer_weights()}}


@pytest.mark.parametrize("top_k", [1, 2])
def test_in_depth_gives_the_same_output_and_gradients(top_k):
    for rank, (core, depth) in enumerate(run_ranks(2, core_and_depth, top_k)):
        assert_same_named(core, depth, 1e-10, f"K = {top_k}:", rank)


# -------------------------------------------------------------------------------------------------------------- bytes


def dispatch_table(ep: int, top_k: int) -> Tensor:
    """[ep, E]: rows of each rank for each expert."""
    scores = (layer_input(ep) @ layer_weights()["router"].T).split(TOKENS[ep])
    return torch.stack([torch.bincount(s.topk(top_k).indices.flatten(), minlength=E) for s in scores])


@pytest.mark.always("dtype0-4-2", "dtype1-2-2")
@pytest.mark.parametrize(("ep", "top_k"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_sent_match_the_formula(ep, top_k, dtype):
    table = dispatch_table(ep, top_k).view(ep, ep, -1).sum(2)  # [from, to]
    for rank, got in enumerate(run_ranks(ep, run_layer, top_k, None, None, 0.0, dtype)):
        leave, arrive = (int(t.sum() - table[rank, rank]) for t in (table[rank], table[:, rank]))
        rows, counts = 2 * (leave + arrive) * HIDDEN * dtype.itemsize, (ep - 1) * E // ep * 8
        assert got["wire"] == rows + counts, f"rank {rank} sends {got['wire']} bytes; the formula: {rows} + {counts}"
        assert got["sent"] == {"rows": rows, "counts": counts}, f"rank {rank}: the file's own count"
        if dtype == torch.float64:
            tables = [dispatch_table(ep, top_k)] * 3  # of several layers and steps
            assert expert_parallel.expected_bytes(tables[:1], rank) == got["sent"], f"rank {rank}"
            assert expert_parallel.expected_bytes(tables, rank) == {"rows": 3 * rows, "counts": 3 * counts}


@pytest.mark.parametrize("ep", TOKENS)
def test_a_rank_stores_copies_of_its_experts_and_of_the_rest(ep):
    full = build_model(E, "cpu")
    rest = storage_bytes(t for name, t in full.items() if not name.endswith(EXPERT_WEIGHTS))
    for rank in range(ep):
        params = shard_experts(full, rank, ep)
        expected = rest + N_LAYERS * 3 * HIDDEN * FFN_HIDDEN * E // ep * 8
        assert storage_bytes(params.values()) == expected, f"rank {rank} of {ep}"
        assert not {t.data_ptr() for t in params.values()} & {t.data_ptr() for t in full.values()}, f"rank {rank}"


def test_recorded_gradients_are_copies():
    params = shard_experts(build_model(E, "cpu"), 0, 1)
    batches = [batch_of_rank(step, 0, 1) for step in range(3)]
    _, grads, _ = expert_parallel.train(params, batches, partial(moe_dense, top_k=1))
    for name, weight in params.items():
        pointers = {grad[name].data_ptr() for grad in grads}
        assert len(pointers) == 3 and weight.grad.data_ptr() not in pointers, f"recorded gradients of {name}"


def test_a_step_without_a_label_has_a_finite_loss():
    tokens, labels = batch_of_rank(0, 0, 1)
    unlabelled = [(tokens, torch.full_like(labels, IGNORE_INDEX))]
    params = shard_experts(build_model(E, "cpu"), 0, 1)
    [loss], *_ = expert_parallel.train(params, unlabelled, partial(moe_dense, top_k=1))
    assert loss.isfinite(), "only the load-balancing loss is left"


@pytest.mark.always("4")
@pytest.mark.parametrize("ep", TOKENS)
def test_bytes_saved_for_backward_match_the_formula(ep):
    top_k, table = 2, dispatch_table(ep, 2)
    for rank, got in enumerate(run_ranks(ep, run_layer, top_k)):
        T, arrived = TOKENS[ep][rank], int(table[:, rank * E // ep : (rank + 1) * E // ep].sum())
        at_experts = arrived * (HIDDEN + 4 * FFN_HIDDEN)  # x; w1 x, its silu, w3 x and the product of the two
        router = T * (HIDDEN + E + 2 * top_k + 1) + E + 1  # x, probabilities, the best and their sum, weights; load
        combine = T * top_k * HIDDEN  # the expert outputs
        indices = 3 * T * top_k + 2 * arrived  # which experts, which row goes where; about
        dy = T * HIDDEN  # what this test multiplies the output with
        expected = 8 * (at_experts + router + combine + indices + dy)
        # Other right solutions save other indices, or one more copy of the rows on both sides.
        fewer, more = 8 * indices, 8 * (HIDDEN + 5) * (T * top_k + arrived)
        assert expected - fewer <= got["saved"] <= expected + more, (
            f"rank {rank} saves {got['saved']} bytes; the formula: {expected}"
        )


# ---------------------------------------------------------------------------------------------------------- precision


def test_router_probs_are_float32_for_bf16_tokens_and_under_autocast():
    x, router = numbers(20, 64), numbers(E, 64, seed=1)
    for dtype, autocast in product((torch.bfloat16, torch.float16), (False, True)):
        half, low = x.to(dtype), router.to(dtype)
        expected = F.linear(half.double(), low.double()).softmax(-1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _, weights, probs = route(half, low, 2)
            _, _, full = route(half.float(), low.float(), 2)
        assert probs.dtype == weights.dtype == torch.float32
        for got in (probs, full):
            assert_same(got, expected, 1e-5, f"probabilities of {dtype}, autocast {autocast}")
    assert route(x, router, 2)[2].dtype == torch.float64


@pytest.mark.always("2")
@pytest.mark.parametrize("ep", TOKENS)
def test_bf16_is_as_close_to_float64_as_the_dense_layer(ep):
    rounded = {name: t.bfloat16().double() for name, t in layer_weights().items()}
    x, dy = layer_input(ep).bfloat16(), output_grad(ep)

    def dense(dtype: torch.dtype) -> dict[str, Tensor]:
        w = {name: t.to(dtype).clone().requires_grad_() for name, t in rounded.items()}
        rows = x.to(dtype).clone().requires_grad_()
        y, aux_loss, _ = moe_dense(rows, *w.values(), 2)
        ((y * dy).sum() + 0.1 * aux_loss).backward()
        return {"y": y.detach(), "x": rows.grad, **{name: t.grad for name, t in w.items()}}

    exact, in_bf16 = dense(torch.float64), dense(torch.bfloat16)
    results = run_ranks(ep, run_layer, 2, None, None, 0.1, torch.bfloat16)
    assert all(t.dtype == torch.bfloat16 for t in results[0]["tensors"].values())
    got = {n: torch.cat([r["tensors"][n] for r in results]) for n in exact if n != "router"}
    got["router"] = results[0]["tensors"]["router"]
    for name, expected in exact.items():
        error, own = error_between(got[name], expected), error_between(in_bf16[name], expected)
        assert error <= 1.5 * own, f"{name}: {error:.2e} from float64, where the dense layer in bf16 is {own:.2e}"


def bf16_combination() -> tuple[Tensor, ...]:
    x = numbers(40, HIDDEN, seed=9, dtype=torch.bfloat16)
    router, w1, w3, w2 = (t.bfloat16() for t in layer_weights().values())
    y, _, experts = moe(x, router, w1, w3, w2, 3, None, dist.group.WORLD)
    weights = route(x, router, 3)[1]
    outs = torch.stack([expert_parallel.expert_mlp(x, w1[e], w3[e], w2[e]) for e in range(E)], 1).double()  # [T, E, H]
    chosen = outs.gather(1, experts[..., None].expand(-1, -1, HIDDEN))
    x32 = x.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y32, *_ = moe(x32, router.float(), w1.float(), w3.float(), w2.float(), 3, None, dist.group.WORLD)
    y32.sum().backward()
    return y, moe_dense(x, router, w1, w3, w2, 3)[0], (chosen * weights[..., None]).sum(1), y32.detach(), x32.grad


def test_expert_outputs_are_weighted_and_added_in_float32():
    y, dense, expected, y32, gradient = run_ranks(1, bf16_combination)[0]
    different = max((form != expected.bfloat16()).float().mean().item() for form in (y, dense))
    assert different < 0.01, f"{100 * different:.0f} % of the outputs are not the rounded sum of the rounded parts"
    assert_same(y32, expected, 1e-2, "under autocast the experts compute in bf16, and their sum")
    assert y32.dtype == gradient.dtype == torch.float32 and gradient.isfinite().all()


# -------------------------------------------------------------------------------------------- modes, lifetimes, order


def micro_batches(order: list[int], rounds: int) -> tuple[dict, list[int]]:
    """Gradients of three forward passes whose backward passes come in this order; bytes alive after each round."""
    rank, ep, alive = dist.get_rank(), dist.get_world_size(), []
    w = {n: shard(n, t, rank, ep).clone().requires_grad_() for n, t in layer_weights().items()}
    layer = partial(moe, top_k=2, capacity_factor=None, group=dist.group.WORLD)
    for _ in range(rounds):
        for t in w.values():
            t.grad = None
        with torch.no_grad():
            layer(numbers(5, HIDDEN), *w.values())  # an evaluation in between changes nothing
        x = [numbers(6 + rank, HIDDEN, seed=s).requires_grad_() for s in range(3)]
        outs = [layer(rows, *w.values()) for rows in x]
        for i in order:
            (outs[i][0].square().sum() + outs[i][1]).backward()
        grads = {n: t.grad.clone() for n, t in w.items()} | {f"x{i}": rows.grad for i, rows in enumerate(x)}
        del outs, x, t
        gc.collect()
        alive.append(storage_bytes(t for t in gc.get_objects() if type(t) is Tensor))
    return grads, alive


def in_three_orders() -> list[tuple[dict, list[int]]]:
    return [micro_batches(order, rounds) for order, rounds in (([0, 1, 2], 1), ([1, 2, 0], 1), ([2, 1, 0], 8))]


def test_backward_passes_may_come_in_any_order_and_leave_nothing_behind():
    for rank, ((expected, _), *others) in enumerate(run_ranks(2, in_three_orders)):
        for grads, _ in others:
            assert_same_named(grads, expected, 1e-10, "backward in another order:", rank)
        # Gloo may free its last message a moment late; what a round leaves behind would be there 6 times
        alive, message = others[-1][1], 2 * (6 + 7) * HIDDEN * 8
        assert alive[7] - alive[1] <= 2 * message, f"rank {rank}: bytes alive after each round {alive}"


# --------------------------------------------------------------------------------------------------------- the script


def check_with_an_error(what: str) -> list[str]:
    def nan_in_the_head(*args) -> dict:
        params = build_model(*args)
        return params | {"head": params["head"] * torch.nan}

    def views(full, rank, ep) -> dict:
        return {n: (t if ep == 1 else shard(n, t, rank, ep)).detach().requires_grad_() for n, t in full.items()}

    def a_little_off(params, group, plain=expert_parallel.all_reduce_grads) -> None:
        plain(params, group)
        params["head"].grad.mul_(1 + 1e-6)

    spoiled = {
        "NaN": {"build_model": nan_in_the_head},
        "views": {"shard_experts": views},
        "small": {"all_reduce_grads": a_little_off, "expected_bytes": lambda *args: expert_parallel.Counter()},
    }
    with patch.multiple(expert_parallel, **spoiled[what]), contextlib.redirect_stdout(io.StringIO()):
        return expert_parallel.check(1, None, 8, dist.group.WORLD, torch.device("cpu"))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("NaN", "largest error nan"),
        ("views", "bytes stored"),
        ("small", "largest error"),
    ],
)
def test_check_names_the_error_and_the_rank(what, words):
    for failures in run_ranks(2, check_with_an_error, what):
        for rank in range(2):
            assert any(words in line and f"rank {rank}" in line for line in failures), failures
            assert what != "small" or any("bytes sent" in line and f"rank {rank}" in line for line in failures)


def check_with_capacity() -> list[str]:
    shown, counted = Mock(), Mock(wraps=expert_parallel.expected_bytes)
    made = Mock(wraps=expert_parallel.get_batch)
    with (
        patch.multiple(expert_parallel, print_table=shown, expected_bytes=counted, get_batch=made),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        failures = expert_parallel.check(2, 1.0, 4, dist.group.WORLD, torch.device("cpu"))
    tables = counted.call_args.args[0]
    assert all(call.args[0] is tables[0] for call in shown.call_args_list), "the table is that of layer 0 in step 0"
    assert [call.args[:2] for call in made.call_args_list] == list(product(range(3), range(2))), "of each step and rank"
    return failures


def test_check_finds_nothing_wrong_where_uneven_ranks_drop_rows():
    assert run_ranks(2, check_with_capacity) == [[], []]


def test_labels_are_the_next_tokens_and_rank_1_has_none():
    text = list(Path(expert_parallel.tokenize.__file__).read_bytes())
    for step, (rank, sequences) in product((0, 2), ((0, 3), (1, 1), (2, 2), (3, 2), (4, 3), (40, 3))):
        tokens, labels = expert_parallel.get_batch(step, rank, "cpu")
        start = (5000 * step + 300 * rank) % 15000
        windows = [text[start + 25 * i :][:25] for i in range(sequences)]
        assert tokens.tolist() == [window[:-1] for window in windows], f"step {step}, rank {rank}"
        assert labels.tolist() == [24 * [IGNORE_INDEX] if rank == 1 else window[1:] for window in windows]


def run_main(options: str, monkeypatch, capsys) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["expert_parallel.py", *options.split()])
    code = expert_parallel.main()
    return code, capsys.readouterr().out


def test_pass_is_the_last_line_and_a_failure_is_exit_code_1(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with patch.dict("os.environ"):
        code, said = run_main("--top-k 6 --experts 6 --capacity-factor 0.01", monkeypatch, capsys)  # room for one row
        assert code == 0 and said.splitlines()[-1] == "PASS"
        assert "K = 6" in said and "K = 1" not in said and "e5" in said and "e6" not in said
        assert f"rows dropped in three steps {3 * N_LAYERS * 6 * (3 * expert_parallel.SEQ_LEN - 1)}\n" in said
        expert_parallel.print_table(torch.arange(8).view(2, 4))
        assert " ".join(capsys.readouterr().out.split()).endswith("rank 1 | 4 5 | 6 7 sum | 4 6 | 8 10")
        monkeypatch.setattr(expert_parallel, "check", lambda *case: [f"{case[:2]}"])
        three = {f"--experts {n}": f"(1, None); ({k}, None); (1, 1.0)" for n, k in ((1, 1), (3, 2))}
        one = {"--capacity-factor 2": "(1, 2.0)", "--top-k 2": "(2, None)", "--top-k 2 --capacity-factor 1": "(2, 1.0)"}
        one["--experts 1024 --capacity-factor 1024"] = "(1, 1024.0)"  # the most that is allowed
        for options, failures in (three | one).items():
            assert run_main(options, monkeypatch, capsys) == (1, f"FAIL: {failures}\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--top-k 0", "--top-k 0 of 8 experts: use 1 to 8"),
        ("--top-k nan", "--top-k: invalid int value: 'nan'"),
        ("--experts 7", "--experts 7: use a multiple of 2"),
        ("--experts 0", "--experts 0: use"),
        ("--experts 1026", "--experts 1026: use a multiple of 2 (ranks), up to 1024"),
        ("--capacity-factor 1025", "--capacity-factor 1025.0: use more than 0, up to 1024"),
        ("--experts 2 --top-k 3", "--top-k 3 of 2 experts: use 1 to 2"),
        ("--capacity-factor 0", "--capacity-factor 0.0: use more than 0"),
        ("--capacity-factor nan", "--capacity-factor nan: use more than 0"),
        ("--expert 4", "unrecognized arguments: --expert 4"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_to_use(options, words):
    assert words in refusal(expert_parallel.main, options, world_size=2)
