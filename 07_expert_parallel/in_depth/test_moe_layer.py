"""The layer: against a token-by-token mixture whose losses are added in the open; recomputed, accumulated, in bf16."""

import warnings
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import moe_layer
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _moe_demo import HostWaits
from _slow_moe import SlowMoE
from expert_dispatch import DISPATCH, RouterError
from harness.meter import communication, saved_activations
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named, error_between, numbers
from moe_layer import MoE, MoEConfig, moe_layers, recomputed, set_loss_scale, take_losses, update_biases
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SMALL = MoEConfig(16, 8, experts=4, top_k=2, balance=0.2, z=0.05)
CONFIGS = {
    "softmax, both losses": SMALL,
    "sigmoid, bias, shared experts": replace(SMALL, router="sigmoid", bias_speed=0.05, shared=2, balance=0.0, z=0.0),
    "sigmoid, balance loss": replace(SMALL, router="sigmoid", z=0.0),
    "capacity": replace(SMALL, capacity=0.75),
    "top 1": replace(SMALL, top_k=1),
    "top 1, sigmoid, z-loss": replace(SMALL, top_k=1, router="sigmoid", balance=0.0),
    "2 experts, not normalised": replace(SMALL, normalise=False),
    "2 of 4 nodes": replace(SMALL, experts=8, top_k=4, nodes=4, max_nodes=2),
}
SIZES = {1: [8], 2: [7, 1], 4: [2, 0, 5, 1]}  # tokens of each rank in a micro-batch
EVEN = {P: [8 // P] * P for P in SIZES}  # as fixed shapes need them
MICRO_BATCHES, STEPS = 2, 2


def lively(layer: nn.Module, experts: int, rank: int = 0, P: int = 1) -> nn.Module:
    """Weights large enough for every mistake to show, the same whatever P is."""
    layer.double()
    for i, (name, p) in enumerate(sorted(layer.named_parameters())):
        stacked = name.startswith("experts.")
        full = numbers(experts if stacked else p.shape[0], *p.shape[1:], seed=i) / p.shape[-1] ** 0.5
        p.data.copy_(full.chunk(P)[rank] if stacked else 2 * full)
    return layer


def inputs(step: int, micro_batch: int) -> Tensor:
    return numbers(8, SMALL.hidden, seed=100 + 10 * step + micro_batch)


def gradients_of(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters()}


@cache
def one_process(case: str) -> list[dict]:
    """Of each step: gradients, that of the first micro-batch's x, the sum of losses, counts, and biases after it."""
    c = CONFIGS[case]
    slow, steps = lively(SlowMoE(c), c.experts), []
    for step in range(STEPS):
        slow.zero_grad()
        slow.counts.zero_()
        extra, dx = 0.0, []
        for i in range(MICRO_BATCHES):
            x = inputs(step, i).requires_grad_()
            y = slow(x)
            ((y * y.detach().cos()).sum() / 16 + slow.extra / MICRO_BATCHES).backward()
            extra += slow.extra.item() / MICRO_BATCHES
            dx.append(x.grad)
        if c.bias_speed:
            slow.steps += torch.sign(slow.counts.double().mean() - slow.counts).long()
        step_of = {"gradients": gradients_of(slow), "dx": dx[0], "extra": extra}
        steps.append(step_of | {"counts": slow.counts.clone(), "steps": slow.steps.clone()})
    return steps


def on_ranks(case: str, version: str, recompute: bool, group: dist.ProcessGroup | None) -> list[dict]:
    c = CONFIGS[case]
    rank, P = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    layer = lively(MoE(c, group, group, version=version), c.experts, rank, P)
    run, steps = recomputed(layer) if recompute else layer, []
    for step in range(STEPS):
        layer.zero_grad()
        set_loss_scale(layer, 1 / MICRO_BATCHES)
        dx = []
        for i in range(MICRO_BATCHES):
            x = inputs(step, i).split((EVEN if version == "fixed" else SIZES)[P])[rank].clone().requires_grad_()
            y = run(x[None])  # [1, T, H]
            ((y * y.detach().cos()).sum() / 16).backward()
            dx.append(x.grad)
        for name, p in layer.named_parameters():
            if group and not name.startswith("experts."):
                dist.all_reduce(p.grad, group=group)
        losses = take_losses(layer, group)
        extra = c.balance * losses.get("balance", 0.0) + c.z * losses.get("z", 0.0)
        step_of = {"gradients": gradients_of(layer), "dx": dx[0], "extra": extra}
        steps.append(step_of | {"counts": update_biases(layer, group)[0], "steps": layer.bias_steps.clone()})
    return steps


def all_cases() -> dict:
    runs = [(case, version, False) for case in CONFIGS for version in ("pairs", "once")]
    runs += [(case, "pairs", True) for case in CONFIGS]
    return {run: on_ranks(*run, dist.group.WORLD) for run in runs}


def check(results: list[list[dict]], case: str, what: str, sizes: dict = SIZES) -> None:
    P = len(results)
    for rank, steps in enumerate(results):
        for step, (got, want) in enumerate(zip(steps, one_process(case), strict=True)):
            local = {n: g.chunk(P)[rank] if n.startswith("experts.") else g for n, g in want["gradients"].items()}
            where = f"{what}, step {step}"
            assert_same_named(got["gradients"], local, 1e-10, f"{where}, gradient of", rank)
            assert_same(got["dx"], want["dx"].split(sizes[P])[rank], 1e-10, f"{where}, gradient of x", rank)
            assert_same(got["extra"], want["extra"], 1e-10, f"{where}, logged losses", rank)
            assert torch.equal(got["counts"], want["counts"]), f"{where}, counts on rank {rank}: {got['counts']}"
            assert torch.equal(got["steps"], want["steps"]), f"{where}, biases on rank {rank}: {got['steps']}"


@pytest.mark.prove
@pytest.mark.parametrize("P", SIZES)
def test_gradients_losses_counts_and_biases_equal_a_token_by_token_mixture_over_micro_batches(P):
    results = run_ranks(P, all_cases)
    for run in results[0]:
        check([r[run] for r in results], run[0], f"{run}")


def in_fixed_shapes() -> dict:
    runs = [(case, "fixed", case == "softmax, both losses") for case in CONFIGS if not CONFIGS[case].capacity]
    return {run: on_ranks(*run, dist.group.WORLD) for run in runs}


@pytest.mark.always("2")
@pytest.mark.parametrize("P", SIZES)
def test_with_fixed_shapes_they_are_the_same_if_all_ranks_have_as_many_tokens(P):
    results = run_ranks(P, in_fixed_shapes)
    for run in results[0]:
        check([r[run] for r in results], run[0], f"{run}", EVEN)


def test_with_fixed_shapes_a_capacity_is_room_in_slots_for_each_rank():
    x, c = numbers(8, 16), replace(SMALL, capacity=0.5)  # two slots for each of four experts, and 16 choices
    layer = lively(MoE(c, None, None, version="fixed"), 4)
    tape = moe_layer.Tape()
    layer.tape = tape
    layer(x)
    assert tape.plan.C == 2
    wanted = tape.plan.experts.flatten().bincount(minlength=4)
    assert (tape.plan.slots == 8).sum() == (wanted - 2).clamp(min=0).sum() > 0, "what finds no slot"


def kept_on_a_rank() -> Tensor:
    """Each rank has all experts, and half of the tokens that are counted."""
    layer = lively(MoE(CONFIGS["capacity"], None, dist.group.WORLD), 4)
    layer.tape = tape = moe_layer.Tape()
    layer(inputs(0, 0).chunk(2)[dist.get_rank()])
    return tape.plan.kept


def test_a_capacity_counts_the_tokens_of_its_count_group():
    layer = lively(MoE(CONFIGS["capacity"], None, None), 4)
    layer.tape = tape = moe_layer.Tape()
    layer(inputs(0, 0))
    assert torch.equal(torch.cat(run_ranks(2, kept_on_a_rank)), tape.plan.kept)


def test_a_layer_whose_router_cannot_learn_warns_and_no_other_does():
    def said(c: MoEConfig) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            MoE(c, None, None)
        return [str(one.message) for one in caught]

    [warning] = said(replace(SMALL, top_k=1, normalise=True))
    assert "a score divided by itself is 1; use scores that are not normalised" in warning
    for k in (1, 2, 4):
        assert said(replace(SMALL, top_k=k)) == [], f"top-k {k}"


def test_a_process_without_a_group_is_a_whole_layer():
    for case in CONFIGS:
        check([on_ranks(case, "pairs", False, None)], case, case)


# ----------------------------------------------------------------------------------------------------- the balance loss


def test_an_attached_loss_changes_no_output_and_needs_none_to_carry_it():
    layers = [lively(MoE(c, None, None), 4) for c in (SMALL, replace(SMALL, balance=0.0, z=0.0))]
    x = numbers(8, 16)
    assert torch.equal(layers[0](x), layers[1](x))
    layers[0](x.requires_grad_()).sum().mul(0.0).backward()  # nothing but the attached losses gives a gradient
    assert layers[0].gate.weight.grad.abs().max() > 1e-3
    assert not layers[0].experts["w1"].weight.grad.any()


def test_no_loss_is_counted_in_evaluation_or_without_gradients():
    layer = lively(MoE(SMALL, None, None), 4)
    with torch.no_grad():
        layer(numbers(8, 16))
    layer.eval()
    layer(numbers(8, 16))
    assert layer.losses == {} and take_losses(layer, None) == {}


def test_evaluation_counts_no_choice_and_moves_no_bias():
    layer = lively(MoE(CONFIGS["sigmoid, bias, shared experts"], None, None), 4)
    layer(numbers(8, 16))
    before = update_biases(layer, None)
    biases = layer.bias_steps.clone()
    assert before.sum() == 16 and biases.any(), "training has to count, or this test sees nothing"
    layer.eval()
    with torch.no_grad():
        layer(numbers(8, 16, seed=1))
    layer(numbers(8, 16, seed=1))
    assert not update_biases(layer, None).any() and torch.equal(layer.bias_steps, biases)


# ------------------------------------------------------------------------------------------------------ recomputation


class Flipping:
    """The router's logits, with two experts in a tie that another last digit decides at each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        self.calls += 1
        return x @ gate.T + 1e-13 * (-1) ** self.calls * torch.tensor([1.0, -1.0, 0.0, 0.0]).double()


def with_a_flipping_router(wrap) -> tuple[dict, list]:
    layer = lively(MoE(replace(SMALL, top_k=1), None, None), 4)
    layer.gate.weight.data[1] = layer.gate.weight.data[0]
    router, x = Flipping(), numbers(8, 16).requires_grad_()
    with patch.object(moe_layer, "router_logits", router):
        y = wrap(nn.Sequential(layer, nn.SiLU()))(x)  # something behind it, or recomputation would end inside it
        (y * y.detach().cos()).sum().backward()
    assert layer.tape is None, "a tape that stays would be replayed by the next call"
    assert not any(loss.requires_grad for loss in layer.losses.values()), "the log keeps no graph alive"
    return gradients_of(layer) | {"x": x.grad}, [router.calls, layer.step_counts.sum().item(), layer.losses]


def test_recomputation_reuses_the_routing_of_the_first_call_even_if_the_router_would_choose_again():
    want, (calls, counted, losses) = with_a_flipping_router(lambda layer: layer)
    got, (calls_again, counted_again, losses_again) = with_a_flipping_router(recomputed)
    assert (calls, calls_again) == (1, 2), "the layer was not recomputed"
    assert_same_named(got, want, 1e-10, "gradient of")
    assert counted_again == counted == 8, "a recomputed call is counted once"
    assert_same_named(losses_again, losses, 1e-10, "logged loss")


def test_recomputation_without_the_routing_is_refused_and_not_silently_wrong():
    with pytest.raises(RuntimeError, match="recomputed without its routing; wrap its block in `recomputed`"):
        with_a_flipping_router(lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_micro_batches_may_go_backward_in_any_order(order):
    def run(recompute: bool, in_flight: bool) -> dict:
        layer = lively(MoE(SMALL, None, None), 4)
        call = recomputed(layer) if recompute else layer
        ys = []
        for seed in range(3):
            set_loss_scale(layer, 1.0 + seed)  # of the next call, whenever its backward comes
            ys.append(call(numbers(8, 16, seed=seed).requires_grad_()))
            if not in_flight:
                (ys[seed] * ys[seed].detach().cos()).sum().backward()
        for i in order if in_flight else ():
            (ys[i] * ys[i].detach().cos()).sum().backward()
        return gradients_of(layer)

    want = run(False, False)
    for recompute in (False, True):
        assert_same_named(run(recompute, True), want, 1e-10, "gradient of")


def test_a_recomputed_layer_keeps_its_input_and_no_activations():
    layer, x = lively(MoE(SMALL, None, None), 4), numbers(8, 16).requires_grad_()
    with saved_activations(exclude=layer.parameters()) as plain:
        layer(x)
    with saved_activations(exclude=layer.parameters()) as kept:
        recomputed(layer)(x)
    assert kept.bytes <= x.nbytes < plain.bytes / 4


def collectives(recompute: bool) -> dict:
    layer = lively(MoE(SMALL, dist.group.WORLD, dist.group.WORLD), 4, dist.get_rank(), 2)
    with communication() as sent:
        y = (recomputed(layer) if recompute else layer)(numbers(8, 16).requires_grad_())
        y.sum().backward()
    return dict(sent.calls)


def test_the_recomputed_call_repeats_the_all_to_alls_of_tokens_and_no_other_collective():
    plain = {"all_to_all": 5, "all_reduce": 1}  # counts; tokens and answers, twice; counts of the losses
    assert run_ranks(2, collectives, False) == [plain] * 2
    assert run_ranks(2, collectives, True) == [plain | {"all_to_all": 7}] * 2


# --------------------------------------------------------------------------------------------------------- host waits


@pytest.mark.parametrize(
    ("what", "wait"),
    [
        ("item", lambda x: x.sum().item()),
        ("tolist", lambda x: x.tolist()),
        ("bool", lambda x: bool(x.any())),
        ("cpu", lambda x: x.cpu()),
        ("nonzero", lambda x: x.nonzero()),
        ("where", lambda x: torch.where(x > 1)),
        ("mask", lambda x: x[x > 1]),
        ("mask of what is written", lambda x: x.clone().index_put_((x > 1,), torch.zeros((), dtype=torch.int64))),
        ("unique", lambda x: x.unique()),
        ("bincount", lambda x: torch.bincount(x, minlength=5)),
        ("repeat_interleave", lambda x: x.repeat_interleave(x)),
        ("numbers from Python", lambda x: torch.tensor([1, 2])),
    ],
)
def test_whatever_makes_a_host_wait_is_noticed_on_the_cpu_too(what, wait):
    x = torch.tensor([2, 0, 3])
    with HostWaits() as waits:
        wait(x)
    assert waits.found, f"{what} was not noticed"


def test_what_lets_a_host_go_on_is_not_taken_for_a_wait():
    x = torch.tensor([2, 0, 3])
    y = x.double().requires_grad_()
    with HostWaits() as waits:
        x.repeat_interleave(x, output_size=5)
        y[x.argsort()].topk(2).values.softmax(0).sum().backward()
        torch.zeros(4).scatter_add_(0, x, torch.full((3,), 2.0))
    assert waits.found == []


def waits_of_layers(P: int) -> dict:
    found = {}
    cases = ("softmax, both losses", "sigmoid, bias, shared experts", "capacity", "2 of 4 nodes")
    runs = [(case, version, "loop", False) for case in cases for version in DISPATCH]
    runs += [(case, "pairs", "loop", True) for case in cases]
    for case, version, compute, again in [*runs, ("softmax, both losses", "pairs", "padded", False)]:
        c, group = CONFIGS[case], dist.group.WORLD
        layer = lively(MoE(c, group, group, version=version, compute=compute), c.experts, dist.get_rank(), P)
        call, x = recomputed(layer) if again else layer, numbers(5, 16, seed=dist.get_rank()).requires_grad_()
        with HostWaits() as waits:
            call(x).sum().backward()
        found[case, version, compute, again] = waits.found
    return found


def test_the_host_waits_once_in_a_layer_for_the_counts_forward_and_backward_whatever_the_version():
    for rank, found in enumerate(run_ranks(2, waits_of_layers, 2)):
        for run, waits in found.items():
            assert waits == ["tolist"], f"rank {rank}, {run}: the host waits for {waits}"


def waits_in_fixed_shapes() -> list:
    found = []
    for case in ("softmax, both losses", "sigmoid, bias, shared experts", "capacity"):
        layer = lively(MoE(CONFIGS[case], dist.group.WORLD, dist.group.WORLD, version="fixed"), 4, dist.get_rank(), 2)
        for call in (layer, recomputed(layer)):
            with HostWaits() as waits:
                call(numbers(5, 16, seed=dist.get_rank()).requires_grad_()).sum().backward()
            found += waits.found
    return found


def test_with_fixed_shapes_the_host_waits_for_nothing_in_the_whole_layer():
    assert run_ranks(2, waits_in_fixed_shapes) == [[], []]


# ---------------------------------------------------------------------------------------------------------- precision


def test_the_bias_is_exact_in_bf16_saved_with_the_weights_and_counts_are_not():
    c = CONFIGS["sigmoid, bias, shared experts"]
    layer = lively(MoE(c, None, None), 4)
    layer.bias_steps += torch.tensor([1, -257, 300, 0])
    layer.to(torch.bfloat16)
    assert layer.bias_steps.tolist() == [1, -257, 300, 0]
    state = layer.state_dict()
    assert "bias_steps" in state and "step_counts" not in state
    assert "bias_steps" not in MoE(SMALL, None, None).state_dict()


def autocast_bytes() -> tuple:
    layer = lively(MoE(SMALL, dist.group.WORLD, dist.group.WORLD), 4, dist.get_rank(), 2).float()
    x = numbers(8, 16).float().requires_grad_()
    outs = []
    for enabled in (False, True):
        with communication() as sent, torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = layer(x)
        outs.append((y, sent.sent["all_to_all"], sent.payload["all_to_all"]))
    outs[1][0].float().sum().backward()
    return outs[0][0].detach(), outs[1][0].detach(), outs[0][1], outs[1][1], layer.gate.weight.grad.dtype, x.grad


def test_under_autocast_tokens_travel_in_bf16_and_the_router_stays_in_float32():
    for rank, (full, half, sent, sent_half, gate, dx) in enumerate(run_ranks(2, autocast_bytes)):
        counts = 8 * 3  # of the message with the counts, which is int64
        assert sent_half - counts == (sent - counts) / 2, f"rank {rank}"
        assert error_between(half, full) < 0.03 and half.dtype == torch.bfloat16
        assert gate == torch.float32 and dx.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert lively(MoE(SMALL, None, None), 4)(numbers(8, 16)).dtype == torch.float64, "autocast leaves it alone"


def demos() -> list[list[str]]:
    plain = SimpleNamespace(experts=8, top_k=2, router="softmax", version="pairs", normalise="no", recompute=False)
    again = SimpleNamespace(experts=8, top_k=2, router="sigmoid", version="once", normalise=None, recompute=True)
    return [moe_layer.demo(args, dist.group.WORLD, torch.device("cpu")) for args in (plain, again)]


def test_the_demo_finds_nothing_wrong_on_two_ranks():
    assert run_ranks(2, demos) == [[[], []]] * 2


# ---------------------------------------------------------------------------------------------------------- bad input


def test_logits_that_are_not_finite_are_named_with_their_layer():
    block = nn.Sequential(MoE(SMALL, None, None))
    moe_layers(block)[0].name = "model.layers.3.mlp"
    moe_layers(block.double())[0].gate.weight.data.fill_(1.0)
    for value in (float("nan"), 1e308):  # the sum of sixteen such is infinite
        x = numbers(8, 16)
        x[2] = value
        with pytest.raises(RouterError, match="router logits of model.layers.3.mlp are not finite: 1 tokens on rank 0"):
            block(x)


def test_a_linear_of_ones_own_multiplies_as_its_docstring_says_or_is_refused():
    c, x = CONFIGS["sigmoid, bias, shared experts"], numbers(8, 16)
    for version, products in (("pairs", 3 * 4 + 3), ("fixed", 3)):
        called: list[int] = []
        parts = SimpleNamespace(linear=lambda x, w, called=called: called.append(1) or F.linear(x, w))
        parts.swiglu = lambda gate, up, called=called: called.append(100) or F.silu(gate) * up
        lively(MoE(c, None, None, version=version, parts=parts), 4)(x)
        gates = {"pairs": 4 + 1, "fixed": 2}[version]  # of each expert, or of all at once; and of the shared ones
        assert sum(called) == products + 100 * gates, f"{version}: {called}"
    for compute in ("padded", "grouped"):
        MoE(c, None, None, compute=compute, parts=SimpleNamespace(linear=F.linear))
        MoE(c, None, None, version="fixed", compute=compute, parts=parts)  # it does not use `compute`
        with pytest.raises(ValueError, match=f"compute '{compute}' multiplies all experts at once.*use loop"):
            MoE(c, None, None, compute=compute, parts=parts)


@pytest.mark.parametrize("sequence", [False, True])
def test_every_weight_says_whether_its_gradient_is_a_partial_sum(sequence):
    layer = MoE(replace(SMALL, shared=1), None, None, sequence_parallel=sequence)
    shards = [(m.shard, m.weight) for m in layer.modules() if isinstance(m, moe_layer.Weight)]
    assert len(shards) == 1 + 3 + 3
    assert all(shard.partial == sequence and shard.size == len(weight) for shard, weight in shards)


def test_a_bias_needs_the_sigmoid_router_and_a_capacity_room():
    for change, words in (
        ({"bias_speed": 0.1}, "bias-speed needs the sigmoid router"),
        ({"capacity": 0.0}, "capacity 0.0 leaves no room; use a positive number, or None"),
        ({"capacity": float("nan")}, "capacity nan leaves no room"),
        ({"capacity": float("inf")}, "capacity inf leaves no room"),
    ):
        with pytest.raises(ValueError, match=words):
            MoE(replace(SMALL, **change), None, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [("--top-k 9", "--top-k 9 of 8 experts"), ("--experts 3 --top-k 2", "--experts 3 do not divide among 2")],
)
def test_bad_input_is_one_line_that_names_option_and_remedy(options, words):
    assert words in refusal(moe_layer.main, options, world_size=2)
