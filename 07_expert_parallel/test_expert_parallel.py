"""The ground floor: against a model that takes one token after the other, against in_depth, and bytes by formula."""

import gc
import random as dice
import runpy
import shutil
import sys
import time
from functools import cache, partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "in_depth"))  # to compare with

import expert_parallel as ep
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _moe_demo import HostWaits
from harness.meter import communication, saved_activations, storage_bytes
from harness.oracle import assert_same, assert_same_named, error_between
from harness.ranks import run_ranks
from moe_layer import MoE, MoEConfig, set_loss_scale
from torch import Tensor

E, H, FF = 8, ep.H, ep.FF
SIZES = {1: [2], 2: [2, 1], 4: [1, 1, 0, 2]}  # sequences of each rank; the labels of rank 1 are all ignored
TOKENS = {1: [17], 2: [11, 6], 4: [6, 0, 9, 2]}  # of each rank, where a layer is tested alone


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------- the oracle: one token after the other, one process


def slow_moe(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Output [T, H] and balance loss. Nothing is sorted, nothing is multiplied by zero."""
    logits = x @ gate.T
    scores = logits.exp() / logits.exp().sum(1, keepdim=True)
    often, rows = [0] * len(gate), []
    for token, row in zip(x, scores, strict=True):
        chosen = sorted(range(len(gate)), key=lambda e, row=row: -row[e].item())[:K]
        divisor = sum(row[e] for e in chosen) if K > 1 else 1.0
        y = torch.zeros_like(token)
        for e in chosen:
            often[e] += 1
            inner = w1[e] @ token
            y = y + row[e] / divisor * (w2[e] @ (inner * inner.sigmoid() * (w3[e] @ token)))
        rows.append(y)
    f = torch.tensor(often, dtype=scores.dtype) * len(gate) / (K * len(x))
    return torch.stack(rows), (f * scores.mean(0)).sum()


def slow_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def slow_loss(w: dict[str, Tensor], tokens: Tensor, labels: Tensor, K: int) -> Tensor:
    total, valid, balance, x = 0.0, 0, 0.0, w["embed"][tokens]
    for i in range(ep.LAYERS):
        q, k, v = (slow_norm(x) @ w[f"{i}.qkv"].T).chunk(3, -1)
        seen = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
        attention = (q @ k.mT / H**0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v
        x = x + attention @ w[f"{i}.out"].T
        y, extra = slow_moe(slow_norm(x).flatten(0, 1), *(w[f"{i}.{n}"] for n in ("gate", "w1", "w3", "w2")), K)
        x, balance = x + y.view_as(x), balance + extra
    for logits, label in zip((slow_norm(x) @ w["head"].T).flatten(0, 1), labels.flatten().tolist(), strict=True):
        if label != ep.IGNORE:
            total, valid = total - logits.log_softmax(0)[label], valid + 1
    return total / valid + ep.BALANCE * balance


def batch_of_rank(step: int, rank: int, P: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    both = torch.randint(0, 12, (SIZES[P][rank], 6), generator=generator)  # a few words only, or all labels are rare
    return both[:, :-1], torch.full_like(both[:, 1:], ep.IGNORE) if rank == 1 else both[:, 1:]


@cache
def one_process(P: int, K: int) -> dict:
    """Losses, gradients of each step and weights after three steps of SGD on the batches of P ranks."""
    w = {name: value.requires_grad_() for name, value in ep.whole_weights(E, "cpu").items()}
    losses, gradients = [], []
    for step in range(3):
        tokens, labels = (torch.cat(x) for x in zip(*(batch_of_rank(step, r, P) for r in range(P)), strict=True))
        loss = slow_loss(w, tokens, labels, K)
        gradients.append(dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True)))
        losses.append(loss.detach())
        w = {name: (value - 0.1 * gradients[-1][name]).detach().requires_grad_() for name, value in w.items()}
    return {"losses": losses, "gradients": gradients, "weights": w}


def mine_of(name: str, whole: Tensor, rank: int, P: int) -> Tensor:
    return whole.chunk(P)[rank] if name.endswith(("w1", "w3", "w2")) else whole


def training(K: int, group: dist.ProcessGroup) -> dict:
    P, rank = dist.get_world_size(group), dist.get_rank(group)
    w = ep.my_weights(ep.whole_weights(E, "cpu"), rank, P)
    valid = [sum(int((batch_of_rank(s, r, P)[1] != ep.IGNORE).sum()) for r in range(P)) for s in range(3)]
    batches = [batch_of_rank(step, rank, P) for step in range(3)]
    losses, gradients, _ = ep.train(w, batches, valid, partial(ep.moe, K=K, group=group), group)
    return {"losses": losses, "gradients": gradients, "weights": {name: t.detach() for name, t in w.items()}}


def train_all(ways: tuple[int, ...]) -> dict[int, dict]:
    return {K: training(K, dist.group.WORLD) for K in ways}


def check_training(got: dict, P: int, K: int, rank: int) -> None:
    want = one_process(P, K)
    for step in range(3):
        assert_same(got["losses"][step], want["losses"][step], 1e-10, f"K = {K}: loss of step {step}", rank)
        part = {name: mine_of(name, value, rank, P) for name, value in want["gradients"][step].items()}
        assert_same_named(got["gradients"][step], part, 1e-10, f"K = {K}, step {step}: gradient of", rank)
    part = {name: mine_of(name, value, rank, P) for name, value in want["weights"].items()}
    assert_same_named(got["weights"], part, 1e-10, f"K = {K}, after three steps: weight", rank)


@pytest.mark.parametrize("P", SIZES)
def test_losses_gradients_and_weights_equal_a_model_that_takes_one_token_after_the_other(P):
    ways = (1, 2, 3)
    for rank, results in enumerate(run_ranks(P, train_all, ways)):
        for K in ways:
            check_training(results[K], P, K, rank)


def train_in_two_slices() -> tuple[dict, int]:
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = groups[dist.get_rank() % 2]
    return training(2, mine), dist.get_rank(mine)


def test_two_slices_of_the_world_train_two_models_at_once():
    for got, rank in run_ranks(4, train_in_two_slices):
        check_training(got, 2, 2, rank)


# -------------------------------------------------------------------------------------------------- a layer, by itself


def layer_weights(favourites: int | None = None) -> dict[str, Tensor]:
    """favourites: only the first so many experts are ever chosen."""
    shapes = {"gate": (E, H), "w1": (E, FF, H), "w3": (E, FF, H), "w2": (E, H, FF)}
    w = {name: random(*shape, seed=i) / shape[-1] ** 0.5 for i, (name, shape) in enumerate(shapes.items())}
    if favourites:
        w["gate"][favourites:, 0] -= 1e3  # the first number of every token is 1
    return w


def layer_tokens(P: int) -> Tensor:
    x = random(sum(TOKENS[P]), H, seed=9)
    x[:, 0] = 1.0
    return x


def layer_on_a_rank(K: int, favourites: int | None = None, balance: float = 0.1, dtype=torch.float64) -> dict:
    """Output, gradients, bytes of the wire and of what backward keeps, of one layer."""
    group, rank, P = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = layer_tokens(P).split(TOKENS[P])[rank].to(dtype).clone().requires_grad_()
    w = {n: mine_of(n, t, rank, P).to(dtype).clone().requires_grad_() for n, t in layer_weights(favourites).items()}
    up = random(sum(TOKENS[P]), H, seed=8).split(TOKENS[P])[rank].clone()
    ep.sent.clear()
    with communication() as wire, saved_activations(exclude=w.values()) as saved:
        y, share, _ = ep.moe(x, *w.values(), K=K, group=group)
        ((y * up).sum() + balance * share).backward()
    gradients = {name: None if t.grad is None else t.grad.clone() for name, t in w.items()}
    if gradients["gate"] is not None:
        dist.all_reduce(gradients["gate"])
    return {
        "tensors": {"y": y.detach(), "x": x.grad, **gradients},
        "share": share.detach(),
        "wire": wire.sent["all_to_all"],
        "sent": dict(ep.sent),
        "saved": saved.bytes,
    }


def layer_in_one_process(P: int, K: int, favourites: int | None = None, balance: float = 0.1) -> tuple[dict, Tensor]:
    x = layer_tokens(P).requires_grad_()
    w = {name: t.requires_grad_() for name, t in layer_weights(favourites).items()}
    y, extra = slow_moe(x, *w.values(), K)
    ((y * random(len(x), H, seed=8)).sum() + balance * extra).backward()
    return {"y": y.detach(), "x": x.grad, **{name: t.grad for name, t in w.items()}}, extra.detach()


def check_layer(results: list[dict], want: dict, what: str, tolerance: float = 1e-10) -> None:
    P = len(results)
    for rank, got in enumerate(results):
        part = {n: mine_of(n, t, rank, P) for n, t in want.items()}
        part |= {n: want[n].split(TOKENS[P])[rank] for n in ("y", "x")}
        assert_same_named(got["tensors"], part, tolerance, what, rank)


@pytest.mark.parametrize("P", TOKENS)
@pytest.mark.parametrize("K", [1, 2, E])
def test_a_layer_equals_one_token_after_the_other_also_on_a_rank_without_a_token(P, K):
    want, extra = layer_in_one_process(P, K)
    results = run_ranks(P, layer_on_a_rank, K)
    check_layer(results, want, f"K = {K}:")
    assert_same(sum(got["share"] for got in results), extra, 1e-10, "sum of the shares of the balance loss")


@pytest.mark.parametrize("P", TOKENS)
def test_experts_without_tokens_have_gradients_of_zero_and_ranks_without_rows_wait_for_nobody(P):
    want, _ = layer_in_one_process(P, 1, favourites=2)
    results = run_ranks(P, layer_on_a_rank, 1, 2, timeout=20)
    check_layer(results, want, "two experts of eight are chosen:")
    for rank, got in enumerate(results):
        for e in range(E // P):
            idle = rank * E // P + e >= 2
            for name in ep.EXPERTS:
                gradient = got["tensors"][name]
                assert gradient is not None, f"rank {rank}: the gradient of {name} is None, and should be zero"
                assert gradient[e].any() != idle, f"rank {rank}, expert {e}: its gradient of {name}"


def router_gradient(K: int, experts: int) -> float:
    x, w = random(12, H), [t[:experts].clone().requires_grad_() for t in layer_weights().values()]
    y, *_ = ep.moe(x.requires_grad_(), *w, K=K, group=dist.group.WORLD)
    (y * random(12, H, seed=1)).sum().backward()
    return w[0].grad.abs().max().item()


def router_gradients() -> dict[int, float]:
    return {K: router_gradient(K, E) for K in range(1, E + 1)}


def test_the_routers_gradient_is_alive_for_every_k_without_a_balance_loss():
    for K, largest in run_ranks(1, router_gradients)[0].items():
        most = f"{largest:.3f}"  # what is only rounding says nothing
        assert largest > 1e-3, f"K = {K}: the largest entry of the router's gradient is {most}"


# ------------------------------------------------------------------------------------------ the dispatch table, balance


def tables(K: int) -> tuple:
    P, rank = dist.get_world_size(), dist.get_rank()
    experts = random(sum(TOKENS[P]), E, seed=3).topk(K).indices
    order, send, receive = ep.dispatch_table(experts.split(TOKENS[P])[rank], E, dist.group.WORLD)
    return order.tolist(), send.tolist(), receive.tolist()


@pytest.mark.parametrize("P", TOKENS)
def test_every_rank_knows_what_it_sends_and_what_comes_for_which_expert(P):
    whole = random(sum(TOKENS[P]), E, seed=3).topk(2).indices.split(TOKENS[P])
    count = [[part.flatten().tolist().count(e) for e in range(E)] for part in whole]  # [P, E]
    each = E // P
    for rank, (order, send, receive) in enumerate(run_ranks(P, tables, 2)):
        pairs = whole[rank].flatten().tolist()
        assert order == sorted(range(len(pairs)), key=lambda pair: (pairs[pair], pair)), f"rank {rank}: order {order}"
        rows = [count[rank][r * each : (r + 1) * each] for r in range(P)]
        assert send == rows, f"rank {rank}: rows to send {send}, not {rows}"
        rows = [count[r][rank * each : (rank + 1) * each] for r in range(P)]
        assert receive == rows, f"rank {rank}: rows to come {receive}, not {rows}"


def test_the_balance_loss_is_one_for_an_even_load_and_e_if_all_tokens_want_the_same_expert():
    even = torch.arange(16).view(8, 2) % E
    assert_same(ep.balance_loss(torch.full((8, E), 1 / E), even, None), 1.0, 1e-6, "even load")
    scores = F.one_hot(torch.zeros(8, dtype=torch.int64), E).double()
    assert_same(ep.balance_loss(scores, torch.zeros(8, 1, dtype=torch.int64), None), float(E), 1e-12, "all to one")


def shares_of_the_balance_loss() -> tuple[Tensor, Tensor]:
    P, rank = dist.get_world_size(), dist.get_rank()
    scores = random(sum(TOKENS[P]), E, seed=3).softmax(-1).split(TOKENS[P])[rank].clone().requires_grad_()
    share = ep.balance_loss(scores, scores.topk(2).indices, dist.group.WORLD)
    share.backward()
    return share.detach(), scores.grad


@pytest.mark.parametrize("P", TOKENS)
def test_shares_of_the_balance_loss_add_up_to_that_of_all_tokens_however_uneven_the_ranks(P):
    scores = random(sum(TOKENS[P]), E, seed=3).softmax(-1).requires_grad_()
    often = F.one_hot(scores.topk(2).indices, E).sum((0, 1)).double()
    want = (often / often.sum() * E * scores.mean(0)).sum()
    want.backward()
    results = run_ranks(P, shares_of_the_balance_loss)
    assert_same(sum(share for share, _ in results), want.detach(), 1e-12, "balance loss")
    for rank, ((_, grad), part) in enumerate(zip(results, scores.grad.split(TOKENS[P]), strict=True)):
        assert_same(grad, part, 1e-12, "its gradient in the scores", rank)


def host_waits() -> list[str]:
    w1, w3, w2 = (random(E // 2, *shape, seed=2).requires_grad_() for shape in ((FF, H), (FF, H), (H, FF)))
    with HostWaits() as waits:
        y, share, _ = ep.moe(random(7, H), random(E, H, seed=1).requires_grad_(), w1, w3, w2, 2, dist.group.WORLD)
        (y.sum() + share).backward()
    return waits.found


def test_the_host_waits_six_times_in_a_layer_as_the_readme_says():
    want = ["bincount", "tolist", "tolist", "repeat_interleave", "tolist", "bincount"]
    assert run_ranks(2, host_waits) == [want, want]


# -------------------------------------------------------------------------------------------------------- in_depth


def ground_and_depth(K: int) -> tuple[dict, dict]:
    group, rank, P = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    found = layer_on_a_rank(K)["tensors"]
    layer = MoE(MoEConfig(H, FF, E, K, balance=0.1), group, group).double()
    parameters = {name.split(".")[-2]: p for name, p in layer.named_parameters()}
    for name, value in layer_weights().items():
        parameters[name].data.copy_(mine_of(name, value, rank, P))
    set_loss_scale(layer, 1.0)
    x = layer_tokens(P).split(TOKENS[P])[rank].clone().requires_grad_()
    y = layer(x)
    (y * random(sum(TOKENS[P]), H, seed=8).split(TOKENS[P])[rank]).sum().backward()
    dist.all_reduce(parameters["gate"].grad)
    return found, {"y": y.detach(), "x": x.grad, **{name: parameters[name].grad for name in layer_weights()}}


@pytest.mark.parametrize("K", [1, 2])
def test_in_depth_gives_the_same_output_and_gradients_from_the_same_weights(K):
    for rank, (ground, depth) in enumerate(run_ranks(2, ground_and_depth, K)):
        assert_same_named(ground, depth, 1e-10, f"K = {K}:", rank)


# ------------------------------------------------------------------------------------------------------------- bytes


def rows_of(P: int, K: int) -> Tensor:
    """[P, E]: rows of each rank for each expert, from a loop over the tokens."""
    scores = (layer_tokens(P) @ layer_weights()["gate"].T).split(TOKENS[P])
    return torch.stack([torch.bincount(s.topk(K).indices.flatten(), minlength=E) for s in scores])


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_leaves_a_rank_is_its_rows_there_and_back_and_a_table_of_counts(P, K, dtype):
    table = rows_of(P, K).view(P, P, -1).sum(2)  # [from, to]
    for rank, got in enumerate(run_ranks(P, layer_on_a_rank, K, None, 0.0, dtype)):
        leave, arrive = (int(t.sum() - table[rank, rank]) for t in (table[rank], table[:, rank]))
        rows, counts = 2 * (leave + arrive) * H * dtype.itemsize, (P - 1) * E // P * 8
        assert got["wire"] == rows + counts, f"rank {rank} sends {got['wire']} bytes; the formula: {rows} + {counts}"
        assert got["sent"] == {"rows": rows, "counts": counts}, f"rank {rank}: the file's own count"
        if dtype == torch.float64:
            assert ep.expected_bytes([rows_of(P, K)], rank) == {"rows": rows, "counts": counts}, f"rank {rank}"


@pytest.mark.parametrize("P", TOKENS)
def test_a_rank_holds_e_over_p_experts_and_a_router_and_nothing_of_the_others(P):
    whole = ep.whole_weights(E, "cpu")
    for rank in range(P):
        held = storage_bytes(ep.my_weights(whole, rank, P).values())
        rest = storage_bytes(t for name, t in whole.items() if not name.endswith(ep.EXPERTS))
        assert held == rest + ep.LAYERS * 3 * H * FF * E // P * 8, f"rank {rank} of {P}"


def test_weights_of_a_rank_are_copies_and_training_leaves_the_whole_alone():
    whole = ep.whole_weights(E, "cpu")
    w = ep.my_weights(whole, 0, 1)
    for name in whole:
        assert w[name].data_ptr() != whole[name].data_ptr(), name
    batch = [batch_of_rank(step, 0, 1) for step in range(3)]
    _, gradients, _ = ep.train(w, batch, [20] * 3, partial(ep.moe_naive, K=1))
    for name in whole:
        assert torch.equal(whole[name], ep.whole_weights(E, "cpu")[name]), f"{name} of the whole model was trained"
        pointers = {gradient[name].data_ptr() for gradient in gradients}
        assert len(pointers) == 3 and w[name].grad.data_ptr() not in pointers, f"recorded gradients of {name}"


@pytest.mark.parametrize("P", TOKENS)
def test_backward_keeps_what_its_rows_need_by_formula_and_nothing_of_rows_elsewhere(P):
    K, table = 2, rows_of(P, 2)
    for rank, got in enumerate(run_ranks(P, layer_on_a_rank, K)):
        T, arrived = TOKENS[P][rank], int(table[:, rank * E // P : (rank + 1) * E // P].sum())
        at_experts = arrived * (H + 4 * FF)  # x; w1 x, its silu, w3 x and the product of the two
        router = T * (H + E + 2 * K + 1) + E + 1  # x, scores, the best and their sum, weights; f, and what divides it
        at_home = T * K * H  # the answers
        indices = 3 * T * K + 2 * arrived  # who was chosen, which row goes where, at home and at the experts; about
        up = T * H  # what this test multiplies the output with
        want = 8 * (at_experts + router + at_home + indices + up)
        # Other right solutions keep other indices, or a copy more of the rows at home and at the experts.
        fewer, more = 8 * indices, 8 * (H + 5) * (T * K + arrived)
        assert want - fewer <= got["saved"] <= want + more, (
            f"rank {rank} keeps {got['saved']} bytes; the formula: {want}"
        )


# --------------------------------------------------------------------------------------------------------- precision


def test_scores_are_computed_in_float32_for_bf16_tokens_and_under_autocast():
    x, gate = random(20, 64), random(E, 64, seed=1)
    half = x.bfloat16()
    want = F.linear(half.double(), gate.bfloat16().double()).softmax(-1)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _, weights, scores = ep.route(half, gate.bfloat16(), 2)
            _, _, full = ep.route(half.float(), gate.bfloat16().float(), 2)
        assert scores.dtype == weights.dtype == torch.float32
        for got in (scores, full):
            assert_same(got, want, 1e-5, f"scores, autocast {autocast}")
    assert ep.route(x, gate, 2)[2].dtype == torch.float64


@pytest.mark.parametrize("P", TOKENS)
def test_in_bf16_no_tensor_is_further_from_float64_than_one_and_a_half_times_the_naive_layer(P):
    rounded = {name: t.bfloat16().double() for name, t in layer_weights().items()}
    x, up = layer_tokens(P).bfloat16(), random(sum(TOKENS[P]), H, seed=8)

    def naive(dtype: torch.dtype) -> dict[str, Tensor]:
        w = {name: t.to(dtype).clone().requires_grad_() for name, t in rounded.items()}
        rows = x.to(dtype).clone().requires_grad_()
        y, share, _ = ep.moe_naive(rows, *w.values(), K=2)
        ((y * up).sum() + 0.1 * share).backward()
        return {"y": y.detach(), "x": rows.grad, **{name: t.grad for name, t in w.items()}}

    exact, plain = naive(torch.float64), naive(torch.bfloat16)
    results = run_ranks(P, layer_on_a_rank, 2, None, 0.1, torch.bfloat16)
    assert all(t.dtype == torch.bfloat16 for t in results[0]["tensors"].values())
    got = {n: torch.cat([r["tensors"][n] for r in results]) for n in exact if n != "gate"}
    got["gate"] = results[0]["tensors"]["gate"]
    for name, want in exact.items():
        error, own = error_between(got[name], want), error_between(plain[name], want)
        assert error <= 1.5 * own, f"{name}: {error:.2e} from float64, where the naive layer in bf16 is {own:.2e}"


def bf16_combination() -> tuple[Tensor, Tensor]:
    x = random(40, H, seed=9, dtype=torch.bfloat16)
    gate, w1, w3, w2 = (t.bfloat16() for t in layer_weights().values())
    y, _, experts = ep.moe(x, gate, w1, w3, w2, K=3, group=dist.group.WORLD)
    weights = ep.route(x, gate, 3)[1]
    every = torch.stack([ep.expert(x, w1[e], w3[e], w2[e]) for e in range(E)], 1).double()  # [T, E, H]
    picked = every.gather(1, experts[..., None].expand(-1, -1, H))
    return y, (picked * weights[..., None].double()).sum(1)


def test_answers_are_weighed_and_added_in_float32_and_rounded_once():
    y, want = run_ranks(1, bf16_combination)[0]
    different = (y != want.bfloat16()).float().mean().item()
    assert different < 0.01, f"{100 * different:.0f} % of the outputs are not the rounded sum of the rounded answers"


# ------------------------------------------------------------------------------------------- modes, lifetimes, order


def micro_batches(order: list[int]) -> tuple[dict, list[int]]:
    """Gradients of three forward passes whose backward passes come in this order; bytes alive after each round."""
    rank, P, alive = dist.get_rank(), dist.get_world_size(), []
    w = {n: mine_of(n, t, rank, P).clone().requires_grad_() for n, t in layer_weights().items()}
    for _ in range(8):
        for t in w.values():
            t.grad = None
        with torch.no_grad():
            ep.moe(random(5, H), *w.values(), K=2, group=dist.group.WORLD)  # a look at it in between changes nothing
        x = [random(6 + rank, H, seed=s).requires_grad_() for s in range(3)]
        outs = [ep.moe(rows, *w.values(), K=2, group=dist.group.WORLD) for rows in x]
        for i in order:
            (outs[i][0].square().sum() + outs[i][1]).backward()
        gradients = {n: t.grad.clone() for n, t in w.items()} | {f"x{i}": rows.grad for i, rows in enumerate(x)}
        del outs, x, t
        gc.collect()
        alive.append(storage_bytes(t for t in gc.get_objects() if type(t) is Tensor))
    return gradients, alive


def test_forward_passes_may_go_backward_in_any_order_and_leave_nothing_behind():
    want = run_ranks(2, micro_batches, [0, 1, 2])
    for order in ([2, 1, 0], [1, 2, 0]):
        for rank, ((got, alive), (right, _)) in enumerate(zip(run_ranks(2, micro_batches, order), want, strict=True)):
            assert_same_named(got, right, 1e-10, f"backward in order {order}:", rank)
            # gloo may let go of its last message a moment late; what a round leaves behind would be there 6 times
            message = 2 * (6 + 7) * H * 8
            assert alive[7] - alive[1] <= 2 * message, f"rank {rank}: bytes alive after each round {alive}"


def layer_with_delays(K: int) -> dict:
    luck, plain = dice.Random(dist.get_rank()), dist.all_to_all_single

    def slow(*args, **kwargs):
        time.sleep(luck.choice([0.0, 0.0, 0.05]))
        return plain(*args, **kwargs)

    ep.dist.all_to_all_single = slow
    try:
        return layer_on_a_rank(K)
    finally:
        ep.dist.all_to_all_single = plain


def test_slow_ranks_change_nothing():
    check_layer(run_ranks(4, layer_with_delays, 2), layer_in_one_process(4, 2)[0], "with delays:")


# ---------------------------------------------------------------------------------------------------------- the script


def run_copy(path: str, device: str) -> tuple[list[list[str]], str]:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        script = runpy.run_path(path)
        wrong = [script["check"](K, 8, dist.group.WORLD, device) for K in (1, 2)]
    return wrong, said.getvalue()


@pytest.mark.parametrize("P", SIZES)
def test_the_file_alone_in_an_empty_folder_finds_nothing_wrong_and_rank_0_prints_the_table(P, tmp_path):
    copy = shutil.copy(ep.__file__, tmp_path)
    for rank, (wrong, said) in enumerate(run_ranks(P, run_copy, copy, "cpu")):
        assert wrong == [[], []], f"rank {rank}: {wrong}"
        assert (f"rank {P - 1}" in said and "together" in said) == (rank == 0), f"rank {rank} says: {said}"


def check_of_a_spoiled_model(what: str) -> list[str]:
    plain, cut, total = ep.whole_weights, ep.my_weights, ep.sum_gradients
    if what == "NaN":
        ep.whole_weights = lambda *a: {n: t * (torch.nan if n == "head" else 1) for n, t in plain(*a).items()}
    elif what == "views":
        ep.my_weights = lambda whole, rank, P: {
            n: (t if P == 1 else mine_of(n, t, rank, P)).detach().requires_grad_() for n, t in whole.items()
        }
    else:
        ep.sum_gradients = lambda *a: None
    try:
        return ep.check(1, 8, dist.group.WORLD, "cpu")
    finally:
        ep.whole_weights, ep.my_weights, ep.sum_gradients = plain, cut, total


@pytest.mark.parametrize(("what", "words"), [("NaN", "is off by nan"), ("views", "holds"), ("no sum", "is off by")])
def test_the_check_says_what_is_off_and_nan_is(what, words):
    for rank, wrong in enumerate(run_ranks(2, check_of_a_spoiled_model, what)):
        assert any(words in line and f"rank {rank}" in line for line in wrong), f"rank {rank}: {wrong}"


def run_main(options: str, monkeypatch, capsys) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["expert_parallel.py", *options.split()])
    code = ep.main()
    return code, capsys.readouterr().out


def test_pass_is_the_last_line_and_a_number_that_is_off_is_exit_code_1(monkeypatch, capsys):
    code, said = run_main("--top-k 3 --experts 6", monkeypatch, capsys)
    assert code == 0 and said.splitlines()[-1] == "PASS"
    assert "K = 3" in said and "K = 1" not in said and "e5" in said and "e6" not in said
    monkeypatch.setattr(ep, "check", lambda K, *rest: [f"K = {K} is off"])
    code, said = run_main("", monkeypatch, capsys)
    assert code == 1 and said == "FAIL: K = 1 is off; K = 2 is off\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--top-k 0", "--top-k 0 of 8 experts is impossible; use 1 to 8"),
        ("--top-k 9", "--top-k 9 of 8 experts is impossible; use 1 to 8"),
        ("--top-k nan", "--top-k: invalid int value: 'nan'"),
        ("--experts 7", "--experts 7 cannot be shared evenly by 2 ranks; use a multiple of 2 up to 1024"),
        ("--experts 0", "--experts 0 cannot be shared"),
        ("--experts 2048", "--experts 2048 cannot be shared"),
        ("--experts 2 --top-k 3", "--top-k 3 of 2 experts is impossible"),
        ("--expert 4", "unrecognized arguments: --expert 4"),
    ],
)
def test_bad_input_is_one_line_that_names_option_and_remedy(options, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["expert_parallel.py", *options.split()])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        ep.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and words in said.err and len(said.err.splitlines()) == 1, said.err
    assert said.out == "" and not dist.is_initialized()


def test_the_file_is_read_in_one_sitting():
    assert 150 <= len(Path(ep.__file__).read_text().splitlines()) <= 350
