"""The core file against torch, a model written a second time in float64, in_depth; and each repair alone."""

import contextlib
import io
import math
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parent / "in_depth"))  # to compare with

import bench_mixed_precision as bench
import mixed_precision as mp
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from formats import FORMATS as DEPTH
from fp8 import Fp8Linear
from harness.meter import communication
from harness.ranks import run_ranks
from harness.reference import assert_same
from torch import Tensor, nn

ALL = {**mp.EXACT, **mp.RECIPES}
HISTORY = ("losses", "grads", "weights")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(name: str, **options) -> mp.Run:
    return mp.train(ALL[name], dist.group.WORLD, torch.device("cpu"), **options)


def build_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    return mp.Transformer(F.linear).to(dtype)


# ------------------------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize("name", mp.FORMATS)
def test_every_bit_pattern_has_the_value_of_torch(name):
    fmt, dtype = mp.FORMATS[name], getattr(mp, name)
    patterns = torch.arange(256**dtype.itemsize)
    raw = patterns.to(torch.uint8) if dtype.itemsize == 1 else patterns.to(torch.int32).to(torch.int16)
    [got], expected = run_ranks(1, mp.decode, patterns, *fmt), raw.view(dtype).double()
    both = enumerate(zip(got.tolist(), expected.tolist(), strict=True))
    different = [f"pattern {i} is {a}, but should be {b}" for i, (a, b) in both if repr(a) != repr(b)]  # tells -0.0
    assert not different, f"{name}: {len(different)} of {len(patterns)} patterns differ: {different[0]}"
    assert [got[i].item() for i in (1, 77)] == [DEPTH[name].value(1), DEPTH[name].value(77)]


@pytest.mark.parametrize("fmt", [(3, 4, True), (4, 3, True), (6, 7, True), (2, 3, False)])
def test_bit_patterns_of_formats_that_torch_lacks_have_their_values(fmt):
    """By fractions of integers, with no table and no dtype of torch."""
    exp_bits, man_bits, has_inf = fmt
    [got] = run_ranks(1, mp.decode, torch.arange(2 ** (1 + exp_bits + man_bits)), *fmt)
    for pattern, value in enumerate(got.tolist()):
        sign, e, f = pattern >> exp_bits + man_bits, (pattern >> man_bits) % 2**exp_bits, pattern % 2**man_bits
        power = Fraction(2) ** (max(e, 1) - (2 ** (exp_bits - 1) - 1))
        expected = (-1) ** sign * float(power * (Fraction(f, 2**man_bits) + (e > 0)))
        if e == 2**exp_bits - 1 and (has_inf or f == 2**man_bits - 1):
            expected = (-1) ** sign * math.inf if has_inf and f == 0 else math.nan
        what = f"{exp_bits} + {man_bits} bits, pattern {pattern:b}"
        assert value == expected or (math.isnan(value) and math.isnan(expected)), f"{what}: {value}, not {expected}"


def test_rounding_matches_torch_and_in_depth_and_has_no_range():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator).sign() * 2 ** (torch.rand(5000, generator=generator) * 13 - 5)
    for name, (_, man_bits, _) in mp.FORMATS.items():
        dtype = getattr(mp, name)
        nearest = x.to(dtype).double()
        ties = (nearest + 2.0 ** (torch.frexp(nearest).exponent - 2 - man_bits)).float()
        for values in (x, ties[ties.abs() < 256]):
            rounded = bench.round_to_nearest(values, man_bits)
            assert_same(rounded, values.to(dtype).double(), 0.0, name)
            assert_same(rounded, DEPTH[name].round(values), 0.0, name)
        tiny = bench.round_to_nearest(x.double() * 2.0**-600, man_bits)
        assert_same(tiny * 2.0**600, nearest, 0.0, f"{name} without underflow")


# -------------------------------------------------------------------- the reference: full batch, one process, float64


def reference_loss(w: dict, tokens: Tensor, labels: Tensor) -> Tensor:
    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    x, length = w["embed"][tokens], tokens.shape[1]
    for i in range(mp.N_LAYERS):
        block = {name.rpartition(".")[2]: p for name, p in w.items() if name.startswith(f"blocks.{i}.")}
        q, k, v = (norm(x, block["attn_norm"]) @ block["qkv_proj"].T).chunk(3, -1)
        visible = torch.ones(length, length).tril().bool()
        probs = (q @ k.mT / mp.HIDDEN**0.5).masked_fill(~visible, -math.inf).softmax(-1)
        x = x + probs @ v @ block["o_proj"].T
        h = norm(x, block["mlp_norm"])
        gate = h @ block["gate_proj"].T
        x = x + (gate * gate.sigmoid() * (h @ block["up_proj"].T)) @ block["down_proj"].T
    logs = (norm(x, w["norm"]) @ w["head"].T).log_softmax(-1)
    chosen = logs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -chosen[labels != mp.IGNORE_INDEX].sum() / (labels != mp.IGNORE_INDEX).sum()


@cache
def reference() -> mp.Run:
    w = {name: p.detach().requires_grad_() for name, p in build_model().named_parameters()}
    losses, all_grads, weights = [], [], [mp.flatten(w.values())]
    for step in range(mp.STEPS):
        micro_batches = mp.get_batch(step, dist.group.WORLD, "cpu").micro_batches
        tokens, labels = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        text = torch.tensor(list(Path(mp.argparse.__file__).read_bytes()))[1000 * step :][: 32 * 33].view(32, 33)
        assert tokens.equal(text[:, :-1]) and labels.where(labels >= 0, text[:, 1:]).equal(text[:, 1:]), step
        loss = reference_loss(w, tokens, labels)
        grads = torch.autograd.grad(loss, list(w.values()))
        all_grads.append(mp.flatten(grads))
        w = {n: (p - mp.LR * g).detach().requires_grad_() for (n, p), g in zip(w.items(), grads, strict=True)}
        losses.append(loss.detach())
        weights.append(mp.flatten(w.values()))
    return mp.Run(torch.stack(losses), torch.stack(all_grads), torch.stack(weights), 0, 0, 0)


def train_in(name: str, ranks: list[int]) -> mp.Run | None:
    group = dist.new_group(ranks)
    return mp.train(ALL[name], group, torch.device("cpu")) if dist.get_rank() in ranks else None


@cache
def runs(name: str, ranks: tuple[int, ...]) -> list[mp.Run]:
    return [run for run in run_ranks(max(ranks) + 1, train_in, name, list(ranks), timeout=60) if run]


@pytest.mark.always("ranks4")
@pytest.mark.parametrize("ranks", [(0,), (0, 1), (0, 1, 2, 3), (1, 3), (0, 2, 3)])
def test_three_steps_match_reference(ranks):
    for rank, run in enumerate(runs("fp64", ranks)):
        for what in HISTORY:
            assert_same(getattr(run, what), getattr(reference(), what), 1e-10, what, rank)


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3), (2, 0)])
def test_fp8_on_ranks_equals_one_process(ranks):
    """Sums are float64 here, so only a scale of a rank's own could make a difference."""
    one = train("fp8 in fp64")
    for rank, run in enumerate(runs("fp8 in fp64", ranks)):
        for what in HISTORY:
            assert_same(getattr(run, what), getattr(one, what), 1e-10, what, rank)


def updated() -> tuple[Tensor, Tensor, Tensor]:
    """Four updates, each below half of the gap of bf16, which together are one gap."""
    param, master = nn.Parameter(torch.full((2,), 2.0, dtype=torch.bfloat16)), torch.full((2,), 2.0)
    grad = torch.ones(2)
    for _ in range(4):
        mp.update_master(param, master, grad, 2.0**-9)
    return master, param.detach(), grad


def test_updates_add_up_in_the_master_and_leave_the_gradient_as_it_was():
    [(master, param, grad)] = run_ranks(1, updated)
    assert {"master": master.dtype, "parameter": param.dtype} == {"master": torch.float32, "parameter": torch.bfloat16}
    master, param = (((2 - x.float()) * 2**9).tolist() for x in (master, param))
    found = {"updates in the master": master, "in the parameter": param, "gradient": grad.tolist()}
    assert found == {"updates in the master": [4, 4], "in the parameter": [4, 4], "gradient": [1, 1]}


@pytest.mark.prove
@pytest.mark.parametrize("name", ["fp16-scaled", "bf16-master", "fp8-scaled"])
def test_a_repaired_run_is_at_the_rounding_floor(name):
    floor = mp.relative_error(bench.rounding_floor(name, dist.group.WORLD, torch.device("cpu")), reference())
    assert mp.RECIPES[name].floor == pytest.approx(floor, rel=0.05)
    first, second = runs(name, (0, 1))
    for rank, run in enumerate((first, second)):
        error = mp.relative_error(run, reference())
        assert floor / 3 <= error <= 1.5 * floor, f"{name}, rank {rank}: {error:.5f}, rounding alone {floor:.5f}"
    assert torch.equal(first.weights, second.weights), "ranks have different weights"


@pytest.mark.always("fp16-scaled", "bf16-master")
@pytest.mark.parametrize("name", mp.RECIPES)
def test_bytes_stored_and_sent_match_the_formulas(name):
    """And, of what is repaired, how far it is from float64; the scale is too large in the first step."""
    num_params = reference().weights.shape[1]
    with communication() as wire:
        run = train(name, scale=2.0**32)
    extra = {"fp16-scaled": 4, "fp8-scaled": 960}  # bytes of found_inf, of amaxes
    for each, recipe in mp.RECIPES.items():
        stored = {"fp32": 8, "fp16": 4, "bf16": 4}.get(each, 10)
        formula = stored * num_params, (2 if stored == 4 else 4) * num_params + extra.get(each, 0)
        assert mp.expected_bytes(recipe, num_params) == formula, f"the script's formula of {each}"
        assert each != name or (run.bytes_stored, run.bytes_sent) == formula
    calls = len(list(build_model().parameters())) + extra.get(name, 0) // 4
    assert wire.calls["all_reduce"] == mp.STEPS * (calls + 1) + run.skipped * calls
    assert run.skipped == (name == "fp16-scaled")
    if name not in ("fp32", *mp.FAILING):
        floor = mp.RECIPES[name].floor
        assert floor / 3 <= mp.relative_error(run, reference()) <= 1.5 * floor
        assert_same(run.losses, reference().losses, floor, "losses")
        assert_same(run.grads, reference().grads, 0.3, "gradients, without the scale")


# --------------------------------------------------------------------------------------------------- each repair alone


def add_up(dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    main_grad = torch.zeros(3, dtype=dtype)
    for _ in range(4000):
        p = SimpleNamespace(grad=torch.ones(3, dtype=torch.float16 if dtype == torch.float32 else dtype))
        mp.accumulate_grads([p], [main_grad])
    return main_grad, p.grad


def test_a_sum_in_fp32_does_not_stall_and_the_gradient_is_freed():
    for dtype, expected in ((torch.float16, 2048), (torch.bfloat16, 256), (torch.float32, 4000)):
        [(total, left)] = run_ranks(1, add_up, dtype)
        assert total.dtype == dtype and total.tolist() == [expected] * 3
        assert left is None
    assert mp.check_sums()
    with patch.object(mp, "accumulate_grads", lambda params, main_grads: main_grads[0].fill_(4096)):
        assert not mp.check_sums(), "no sum stalls"


def one_rank_overflows(ranks: list[int], value: float) -> tuple | None:
    """What a rank of the group is told, and its messages. Of the last rank's three gradients the second has `value`."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    last = len(ranks) - 1
    grads = [torch.ones(2) for _ in range(3 * len(ranks))]
    if dist.get_rank(group) == last:
        grads[len(ranks) + last][1] = value
    with communication() as wire:
        answer = mp.found_inf_on_any_rank(grads, group)
    return answer, [(name, nbytes <= 4) for name, nbytes, _ in wire.events]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("ranks", [[0, 1], [1, 3, 0]])
def test_all_ranks_of_the_group_learn_of_an_overflow(ranks, value):
    for rank, answer in enumerate(run_ranks(max(ranks) + 1, one_rank_overflows, ranks, value)):
        told = (True, [("all_reduce", True)]) if rank in ranks else None
        assert answer == told, f"{value} on rank {rank}: found_inf and messages (of 4 bytes) {answer}, not {told}"
    assert [found for found, _ in run_ranks(2, one_rank_overflows, [0, 1], 65504.0)] == [False, False]


def single_gradient(value: float) -> bool:
    return mp.found_inf_on_any_rank([torch.tensor([value])], dist.group.WORLD)


def test_more_ranks_than_gradients_learn_of_an_overflow():
    assert run_ranks(2, single_gradient, math.nan, timeout=10) == [True, True], "rank 1 has no gradient to look at"


def grads_that_are_checked(ranks: list[int]) -> list[Tensor]:
    """Those of a step in fp16, times the scale, and those of a step in bf16."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return []
    model, checked = build_model(torch.float16), []
    state = [p.detach().float() for p in model.parameters()]
    batch = mp.get_batch(0, group, "cpu")
    with patch.object(mp, "found_inf_on_any_rank", lambda grads, group: checked.extend(g.clone() for g in grads)):
        mp.scaled_step(model, state, mp.LossScaler(2.0**30), batch, 0.0, group)
    return checked + mp.master_step(model.bfloat16(), state, batch, 0.0, group)[1]


def test_infinities_are_looked_for_after_the_sum():
    """Two finite halves can have an infinite sum. Before the sum the ranks have different gradients."""
    first, _, second = run_ranks(3, grads_that_are_checked, [0, 2], timeout=20)
    assert len(first) == len(second) > 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for got, want in zip(first, grads_that_are_checked([0]), strict=True):
        assert_same(got, want, 0.1, "a sum over ranks, beside one process")


def test_the_loss_scale_follows_grad_scaler():
    ours = mp.LossScaler(2.0**10, growth_interval=3)
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    for value in [1, 1, math.inf, 1, 1, 1, 1, 1, math.nan, math.inf, 1, 1, 1, 1, 1, 1, 1]:
        torchs.scale(torch.zeros(()))
        p.grad = torch.full((1,), float(value))
        torchs.step(optimizer)
        torchs.update()
        ours.update(found_inf=not math.isfinite(value))
        assert ours.scale == torchs.get_scale()
    with pytest.raises(FloatingPointError, match="loss scale of 1"):
        for _ in range(12):
            ours.update(found_inf=True)
    last = mp.LossScaler(2.0)
    last.update(found_inf=True)
    assert last.scale == 1, "which is still allowed"
    ours, torchs = mp.LossScaler(), torch.amp.GradScaler("cpu")
    assert (ours.scale, ours.growth_interval) == (torchs.get_scale(), torchs.get_growth_interval())


def test_a_step_leaves_nothing_to_the_next_one_and_a_skipped_step_nothing_at_all():
    """The third step of a model equals the first one of a new model with the same weights."""
    group, lr = dist.group.WORLD, mp.LR * mp.REPLICAS

    def plain(model, master, batch, scaler):
        return mp.plain_step(model, batch, lr, group)[1]

    def master(model, master, batch, scaler):
        return mp.master_step(model, master, batch, lr, group)[1]

    def scaled(model, master, batch, scaler):
        return mp.scaled_step(model, master, scaler, batch, lr, group)[1]

    for step in (plain, master, scaled):
        model, new = build_model(torch.float16), build_model(torch.float16)
        state = [p.detach().float() for p in model.parameters()]
        batches = [mp.get_batch(number, group, "cpu") for number in range(3)]
        batches = [batch._replace(micro_batches=batch.micro_batches[:2]) for batch in batches]
        for batch in batches[:2]:
            step(model, state, batch, mp.LossScaler(2.0**30))
        dtypes = {p.dtype for p in model.parameters()}
        assert dtypes == {torch.float16}, f"{step.__name__}: parameters in float16 have become {dtypes}"
        tensors = [*state, *model.parameters()]
        new.load_state_dict(model.state_dict())
        new_state, before = [t.clone() for t in state], [t.clone() for t in tensors]
        if step is scaled:
            assert step(model, state, batches[2], mp.LossScaler(2.0**40)) is None
            assert all(torch.equal(t, old) for t, old in zip(tensors, before, strict=True))
        grads = step(model, state, batches[2], mp.LossScaler(2.0**30, growth_interval=1))  # it grows after the step
        expected = step(new, new_state, batches[2], mp.LossScaler(2.0**30))
        for got, want in zip([*grads, *tensors], [*expected, *new_state, *new.parameters()], strict=True):
            assert torch.equal(got, want), step.__name__
        masters = state if step is not plain else model.parameters()
        for p, weight in zip(model.parameters(), masters, strict=True):
            assert torch.equal(p, weight.to(p.dtype)), step.__name__
        assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads), "gradients share memory"


def test_master_weights_start_with_all_their_digits_and_arrive():
    [run] = runs("bf16-master", (0,))
    assert_same(run.weights[0], mp.flatten(build_model().parameters()), 1e-7, "master")
    assert ((run.weights.diff(dim=0) == 0)[run.grads != 0]).double().mean() < 1e-3


# ----------------------------------------------------------------------------------------------------------------- fp8


def matmuls_of(linear, B=2, S=12, K=40, N=32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, w, grad_y = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in ((B, S, K), (N, K), (B, S, N)))
    y = linear(x.requires_grad_(), w.requires_grad_())
    y.backward(grad_y * 1e-6)
    return [y.detach(), x.grad, w.grad]


def matmuls_on_a_rank() -> list[Tensor]:
    return matmuls_of(lambda x, w: mp.Fp8Linear.apply(x, w, mp.quantize_scaled, dist.group.WORLD))


def test_the_three_matmuls_match_in_depth():
    [ours] = run_ranks(1, matmuls_on_a_rank)
    for what, got, expected in zip(("y", "grad_x", "grad_weight"), ours, matmuls_of(Fp8Linear("tensor")), strict=True):
        assert_same(got, expected, 1e-6, what)  # its scales are fp32, ours fp64 here
    for what, got, expected in zip(("y", "grad_x", "grad_weight"), ours, matmuls_of(F.linear), strict=True):
        assert 0.001 < (got - expected).norm() / expected.norm() < 0.1, what


def test_the_largest_value_is_scaled_to_the_largest_of_the_format():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(dtype).max
        values, scale = mp.quantize_scaled(torch.tensor([-7.0, 3.0, 0.0]), dtype, dist.group.WORLD)
        assert values.dtype == dtype and values[0].float() == -largest and scale == 7 / largest
        values, scale = mp.quantize_unscaled(torch.tensor([1e9, -1e9]), dtype, dist.group.WORLD)
        assert values.float().tolist() == [largest, -largest] and scale == 1, "without a scale: saturated, and no NaN"
        values, scale = mp.quantize_scaled(torch.zeros(3), dtype, dist.group.WORLD)
        assert scale == 1 and values.float().tolist() == [0, 0, 0]
        values, scale = mp.quantize_scaled(torch.zeros(0, 4), dtype, dist.group.WORLD)
        assert scale == 1 and values.shape == (0, 4)
        for amax in (1.2, 1.4, 1.6, 2.4):  # times the smallest fp32 number, to which such a scale is rounded up or down
            x = torch.tensor([amax * largest * 2.0**-149, 0.0])
            values, scale = mp.quantize_scaled(x, dtype, dist.group.WORLD)
            assert values.float().isfinite().all() and scale.isfinite(), "a scale below the smallest normal value"
        values, scale = mp.quantize_scaled(torch.tensor([math.nan, 1.0]), dtype, dist.group.WORLD)
        assert scale.isnan() and values.float().isnan().all()


def scale_of_rank() -> tuple[float, list]:
    rank = dist.get_rank()
    x = torch.full((0 if rank == 3 else 3,), 1.0 + 9 * rank)  # rank 3 has no tokens
    groups = [dist.new_group([0, 1, 3]), dist.new_group([2])]
    group = groups[rank == 2]
    with communication() as wire:
        _, scale = mp.quantize_scaled(x, torch.float8_e4m3fn, group)
        weight = torch.ones(2, 1, requires_grad=True)
        mp.Fp8Linear.apply(x[:, None], weight, mp.quantize_scaled, group).sum().backward()
    return float(scale), wire.events


def test_ranks_share_the_largest_amax():
    for rank, (scale, events) in enumerate(run_ranks(4, scale_of_rank, timeout=10)):
        assert scale == pytest.approx((19 if rank == 2 else 10) / 448), f"rank {rank}: the scale is {scale}"
        once = [("all_reduce", 4, 1 if rank == 2 else 3)]
        assert events == 4 * once, f"rank {rank}: one message of 4 bytes for each tensor is enough, it sent {events}"


def test_only_fp8_values_and_scales_are_saved_for_backward():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        mp.Fp8Linear.apply(x, w, mp.quantize_scaled, dist.group.WORLD)
    assert sum(t.nbytes for t in saved) == 4 * 8 + 6 * 8 + 2 * 4


def test_a_second_derivative_is_refused():
    """The saved values lead back to no weight."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    y = mp.Fp8Linear.apply(x, w, mp.quantize_scaled, dist.group.WORLD)
    grad_x = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_x.sum().backward()


# ------------------------------------------------------------------------------------------------------ the whole file


@pytest.mark.prove
@pytest.mark.parametrize(("what", "value"), [("losses", math.nan)])
def test_the_check_fails_on_nan_in_a_loss(what, value, monkeypatch):
    original, calls = mp.train, []
    monkeypatch.setattr(mp, "RECIPES", {})
    assert mp.check(dist.group.WORLD, torch.device("cpu"))

    def spoiled(*args, **options):
        run = original(*args, **options)
        calls.append(args)
        if len(calls) == 1:
            getattr(run, what)[0] += value
        return run

    monkeypatch.setattr(mp, "train", spoiled)
    assert not mp.check(dist.group.WORLD, torch.device("cpu"))


def test_the_check_fails_if_ranks_differ_in_anything_or_one_part_fails(monkeypatch):
    groups = []

    def passes(at: int = 0, value: float = 0.0, sums: bool = True, failing: str = "") -> bool:
        runs = [mp.Run(*torch.ones(3, 2, 2, dtype=torch.float64), 0, 0, 0) for _ in range(4)]
        runs[2][at][1, 1] += value  # of the second recipe; its reference is the fourth run
        left = iter(runs)
        monkeypatch.setattr(mp, "train", lambda recipe, group, _: groups.append(group) or next(left))
        monkeypatch.setattr(mp, "check_sums", lambda: sums)
        monkeypatch.setattr(mp, "check_recipe", lambda name, *_: name != failing)
        return mp.check(dist.group.WORLD, torch.device("cpu"))

    assert passes()
    assert [group is dist.group.WORLD for group in groups] == [True, False] * 2, "beside one process: of each recipe"
    assert not any(passes(at, value) for at, value in ((0, 1e-9), (1, math.nan), (2, 1e-9)))
    assert not passes(sums=False) and not passes(failing="bf16-master")


def test_a_recipe_passes_by_its_error_and_by_its_bytes(monkeypatch):
    cases = [("fp32", 1.4e-4, 8, 4, True), ("fp32", 1.6e-4, 8, 4, False), ("fp32", math.nan, 8, 4, False)]
    cases += [("fp32", 0.0, 7, 4, False), ("fp32", 0.0, 8, 5, False), ("fp16", 1.0, 4, 4, False)]
    cases += [("fp16", 0.0061, 4, 2, True), ("fp16", 0.0058, 4, 2, False), ("fp16", math.nan, 4, 2, False)]
    for name, error, *measured, passes in cases:
        right, weights = (torch.tensor([[2.0], [3.0 + x]], dtype=torch.float64) for x in (0.0, error))
        monkeypatch.setattr(mp, "train", lambda *_, w=weights, m=measured: mp.Run(w, w, w, *m, 0))
        expected = mp.Run(right, right, right, 0, 0, 0)
        assert mp.check_recipe(name, expected, dist.group.WORLD, "cpu") == passes, (name, error, measured)


def end_of_main(failing: int | None) -> tuple[int, str]:
    printed = io.StringIO()
    changed = {"init_distributed": lambda: torch.device("cpu"), "check": lambda *_: dist.get_rank() != failing}
    stay = patch.object(dist, "destroy_process_group", lambda: None)
    argv = patch.object(sys, "argv", ["mixed_precision.py"])
    with patch.multiple(mp, **changed), stay, argv, contextlib.redirect_stdout(printed):
        return mp.main(), printed.getvalue()


def test_the_script_fails_on_all_ranks_if_it_fails_on_one():
    assert run_ranks(2, end_of_main, None) == [(0, "PASS\n")] * 2
    assert run_ranks(2, end_of_main, 1) == [(1, "FAIL\n")] * 2


def test_an_update_that_is_taken_back_counts_as_lost():
    [run] = runs("bf16-master", (0,))
    run = run._replace(weights=run.weights.clone())
    before, after = run.weights[-2:, ::2]
    after += 0.999 * (before - after)  # the last update of every other weight: all but a thousandth of it
    assert bench.shares(run, reference())[1] == pytest.approx(1 / 6, abs=0.01), (
        "of three updates one, of half the weights"
    )
