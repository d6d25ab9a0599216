"""The ground floor: formats against torch, a model in float64 written differently, in_depth, and each repair alone."""

import math
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parent / "in_depth"))  # to compare with

import mixed_precision as mp
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from formats import FORMATS as DEPTH
from fp8 import Fp8Linear
from harness.meter import communication
from harness.oracle import assert_same
from harness.programs import run_script
from harness.ranks import run_ranks
from torch import Tensor

TRAINS = {**mp.EXACT, **mp.POLICIES}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("name", mp.FORMATS)
def test_every_bit_pattern_has_the_value_that_torch_reads(name):
    form, bits = mp.FORMATS[name], 1 + mp.FORMATS[name].E + mp.FORMATS[name].M
    patterns = torch.arange(2**bits)
    raw = patterns.to(torch.uint8) if bits == 8 else patterns.to(torch.int32).to(torch.int16)
    [got], want = run_ranks(1, form.decode, patterns), raw.view(form.dtype).double()
    assert torch.equal(got.isnan(), want.isnan()), name
    assert torch.equal(got.nan_to_num(0, math.inf, -math.inf), want.nan_to_num(0, math.inf, -math.inf)), name
    assert [form.decode(patterns[i : i + 1]).item() for i in (1, 77)] == [DEPTH[name].value(1), DEPTH[name].value(77)]
    assert mp.unlike_torch(form) == 0


@pytest.mark.parametrize("name", mp.FORMATS)
def test_rounding_is_that_of_torch_and_of_the_depth(name):
    form = mp.FORMATS[name]
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 5000)
    assert_same(form.nearest(x), x.to(form.dtype).double(), 0.0, name)
    assert_same(form.nearest(x), DEPTH[name].round(x), 0.0, name)
    free = form.nearest(x * 2.0**-60, limits=False)
    assert_same(free * 2.0**60, form.nearest(x, limits=False), 0.0, f"{name} without limits")


# ------------------------------------------------------------------------ the oracle: whole batch, one process, float64


def slow_loss(w: dict, tokens: Tensor, labels: Tensor) -> Tensor:
    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    x, length = w["embed"][tokens], tokens.shape[1]
    for i in range(mp.LAYERS):
        q, k, v = (norm(x, w[f"{i}.norm1"]) @ w[f"{i}.qkv"].T).chunk(3, -1)
        seen = torch.ones(length, length).tril().bool()
        x = x + (q @ k.mT / mp.H**0.5).masked_fill(~seen, -math.inf).softmax(-1) @ v @ w[f"{i}.out"].T
        h = norm(x, w[f"{i}.norm2"])
        g = h @ w[f"{i}.gate"].T
        x = x + (g * g.sigmoid() * (h @ w[f"{i}.value"].T)) @ w[f"{i}.down"].T
    logs = (norm(x, w["norm"]) @ w["head"].T).log_softmax(-1)
    chosen = logs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -chosen[labels != mp.IGNORE].sum() / (labels != mp.IGNORE).sum()


@cache
def oracle() -> dict:
    w = {name: t.requires_grad_() for name, t in mp.first_weights("cpu").items()}
    losses, gradients, states = [], [], [mp.flat(w)]
    for step in range(mp.STEPS):
        tokens, labels = (t.flatten(0, 1) for t in mp.text(step, "cpu"))
        loss = slow_loss(w, tokens, labels)
        found = torch.autograd.grad(loss, list(w.values()))
        gradients.append(torch.cat([g.flatten() for g in found]))
        w = {n: (p - mp.LR * g).detach().requires_grad_() for (n, p), g in zip(w.items(), found, strict=True)}
        losses.append(loss.detach())
        states.append(mp.flat(w))
    return {"losses": torch.stack(losses), "gradients": torch.stack(gradients), "states": torch.stack(states)}


def run_of(name: str, ranks: list[int]) -> dict | None:
    group = dist.new_group(ranks)
    return mp.train(TRAINS[name], group, "cpu") if dist.get_rank() in ranks else None


@cache
def runs(name: str, ranks: tuple[int, ...]) -> list[dict]:
    return [run for run in run_ranks(max(ranks) + 1, run_of, name, list(ranks)) if run]


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (0, 1, 2, 3), (1, 3), (0, 1, 2)])
def test_losses_gradients_and_weights_equal_a_model_of_one_process_to_1e_10(ranks):
    for rank, run in enumerate(runs("fp64", ranks)):
        for what, want in oracle().items():
            assert_same(run[what], want, 1e-10, what, rank)


@pytest.mark.always("ranks1")
@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3), (2, 0)])
def test_ranks_round_to_8_bits_as_one_process_does(ranks):
    """Sums are float64 here, so that only a scale of one's own could make a difference."""
    one = mp.train(TRAINS["fp8 summed in fp64"], dist.group.WORLD, "cpu")
    for rank, run in enumerate(runs("fp8 summed in fp64", ranks)):
        for what in ("losses", "gradients", "states"):
            assert_same(run[what], one[what], 1e-10, what, rank)


@pytest.mark.always("fp8-mended")
@pytest.mark.parametrize("name", ["fp16-mended", "bf16-mended", "fp8-mended"])
def test_a_mended_run_is_as_far_from_float64_as_rounding_must_be(name):
    must = mp.distance(mp.train(mp.MUST[name.split("-")[0]], dist.group.WORLD, "cpu"), oracle())
    for rank, run in enumerate(runs(name, (0, 1))):
        error = mp.distance(run, oracle())
        assert must / 3 <= error <= 1.5 * must, f"{name}, rank {rank}: {error:.5f}, rounding alone {must:.5f}"
    first, second = runs(name, (0, 1))
    assert torch.equal(first["states"], second["states"]), "ranks have different weights"


@pytest.mark.parametrize(("name", "least"), [("fp16", 0.3), ("fp16-masters", 0.3), ("bf16", 0.1), ("fp8", 0.5)])
def test_without_its_repair_a_run_fails(name, least):
    assert mp.distance(mp.train(mp.POLICIES[name], dist.group.WORLD, "cpu"), oracle()) > least


@pytest.mark.parametrize("name", mp.POLICIES)
def test_bytes_held_and_sent_are_those_of_the_policy(name):
    policy, P = mp.POLICIES[name], oracle()["states"].shape[1]
    with communication() as wire:
        run = mp.train(policy, dist.group.WORLD, "cpu", scale=1024.0)
    each = {"fp32": 8, "fp16": 4, "bf16": 4, "fp16-masters": 8, "fp16-scaling": 8}.get(name, 10)
    assert run["held"] == each * P
    wide = 2 if name in ("fp16", "bf16", "fp16-masters", "fp16-scaling") else 4
    want = {"gradients": wide * P, "overflow": 4, "loss": 8} | ({"amax": 960} if name == "fp8-mended" else {})
    assert run["sent"] == want
    assert wire.calls["all_reduce"] == mp.STEPS * (len(mp.first_weights("cpu")) + 2 + (240 if "amax" in want else 0))


# ---------------------------------------------------------------------------------------------------- each repair alone


def add_up_4000_ones(dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    sums = {}
    for _ in range(4000):
        weight = SimpleNamespace(grad=torch.ones(3, dtype=torch.float16 if dtype == mp.fp32 else dtype))
        mp.add_up(sums, {"w": weight}, dtype)
    return sums["w"], weight.grad


def test_a_sum_in_fp32_does_not_stall_and_lets_the_gradient_go():
    for dtype, want in ((torch.float16, 2048), (torch.bfloat16, 256), (torch.float32, 4000)):
        [(total, left)] = run_ranks(1, add_up_4000_ones, dtype)
        assert total.dtype == dtype and total.tolist() == [want] * 3
        assert left is None


def test_a_weight_in_fp32_gives_away_its_gradient_and_not_a_share_of_it():
    weight, sums = SimpleNamespace(grad=torch.ones(3)), {}
    mp.add_up(sums, {"w": weight}, torch.float32)
    weight.grad = torch.ones(3)
    mp.add_up(sums, {"w": weight}, torch.float32)
    assert weight.grad is None and sums["w"].tolist() == [2, 2, 2]


def one_rank_overflows(ranks: list[int], bad: float) -> bool | None:
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        return mp.overflow({"a": torch.ones(2), "b": torch.tensor([1.0, bad])}, group, "cpu")
    return None


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("ranks", [[0, 1], [1, 3, 0]])
def test_an_overflow_that_one_rank_sees_is_one_on_all_ranks_of_the_group(ranks, bad):
    for rank, answer in enumerate(run_ranks(4, one_rank_overflows, ranks, bad)):
        assert answer is (True if rank in ranks else None), f"rank {rank}"
    assert not any(run_ranks(2, one_rank_overflows, [0, 1], 65504.0))


def test_the_scale_halves_until_nothing_overflows_and_changes_nothing_else():
    high, fits = (mp.train(mp.POLICIES["fp16-mended"], dist.group.WORLD, "cpu", scale) for scale in (2.0**36, 2.0**30))
    assert high["skipped"] > 3 and fits["skipped"] == 0 and high["scale"] == 2.0**36 / 2 ** high["skipped"]
    assert mp.distance(high, fits) < 2e-3, "powers of two only move the exponent"


def test_masters_start_with_all_their_digits_and_weights_are_their_rounded_copies():
    run = mp.train(mp.POLICIES["bf16-mended"], dist.group.WORLD, "cpu")
    assert_same(run["states"][0], mp.flat(mp.first_weights("cpu")), 1e-7, "master")
    assert ((run["states"].diff(dim=0) == 0)[run["gradients"] != 0]).double().mean() < 1e-3


# ------------------------------------------------------------------------------------------------------------------ fp8


def products_of(linear, M=24, K=40, N=32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, K, generator=generator, dtype=torch.float64).requires_grad_() for n in (M, N))
    y = linear(x, w)
    y.backward(torch.randn(M, N, generator=generator, dtype=torch.float64) * 1e-6)
    return [y.detach(), x.grad, w.grad]


def products_on_a_rank() -> list[Tensor]:
    return products_of(lambda x, w: mp.Fp8Linear.apply(x, w, "scaled", dist.group.WORLD))


def test_the_three_products_are_those_of_the_depth():
    [ours] = run_ranks(1, products_on_a_rank)
    for what, got, want in zip(("y", "dx", "dW"), ours, products_of(Fp8Linear("tensor")), strict=True):
        assert_same(got, want, 1e-6, what)  # its scales are fp32, ours fp64 here
    for what, got, want in zip(("y", "dx", "dW"), ours, products_of(F.linear), strict=True):
        assert 0.001 < (got - want).norm() / want.norm() < 0.1, what


def test_scaling_puts_the_largest_on_the_largest_and_zeros_nan_and_no_tokens_are_no_trouble():
    for form in (mp.FORMATS["e4m3"], mp.FORMATS["e5m2"]):
        q, scale = mp.quantize(torch.tensor([-7.0, 3.0, 0.0]), form, "scaled", dist.group.WORLD)
        assert q.dtype == form.dtype and q[0].float() == -form.largest and scale == 7 / form.largest
        q, scale = mp.quantize(torch.zeros(3), form, "scaled", dist.group.WORLD)
        assert scale == 1 and q.float().tolist() == [0, 0, 0]
        q, scale = mp.quantize(torch.zeros(0, 4), form, "scaled", dist.group.WORLD)
        assert scale == 1 and q.shape == (0, 4)
        q, scale = mp.quantize(torch.tensor([math.nan, 1.0]), form, "scaled", dist.group.WORLD)
        assert scale.isnan() and q.float().isnan().all()


def scale_here() -> float:
    return mp.quantize(torch.full((3,), 1.0 + 9 * dist.get_rank()), mp.FORMATS["e4m3"], "scaled", dist.group.WORLD)[1]


def test_ranks_share_the_largest_amax():
    assert [float(s) for s in run_ranks(2, scale_here)] == [pytest.approx(10 / 448)] * 2


def test_backward_keeps_8_bit_numbers_only():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        mp.Fp8Linear.apply(x, w, "scaled", dist.group.WORLD)
    assert sum(t.nbytes for t in kept) == 4 * 8 + 6 * 8 + 2 * 4


# ------------------------------------------------------------------------------------------------------- the whole file


@pytest.mark.parametrize(("what", "value"), [("losses", math.nan), ("states", 1e-3)])
def test_the_check_says_what_is_off_and_nan_is(what, value, monkeypatch, capsys):
    plain, calls = mp.train, []

    def spoiled(policy, group, device, **more):
        run = plain(policy, group, device, **more)
        calls.append(policy)
        if len(calls) == 1:
            run[what][0] += value
        return run

    monkeypatch.setattr(mp, "train", spoiled)
    monkeypatch.setattr(mp, "POLICIES", {})
    assert any("is off" in line for line in mp.check(dist.group.WORLD, "cpu"))


def test_an_update_that_is_taken_back_is_counted_as_lost_also_where_there_are_masters(monkeypatch, capsys):
    plain = mp.train

    def taken_back(policy, group, device, **more):
        run = plain(policy, group, device, **more)
        if policy.masters:  # the last update of every other weight: all but a thousandth of it
            before, after = run["states"][-2:, ::2]
            after += 0.999 * (before - after)
        return run

    monkeypatch.setattr(mp, "train", taken_back)
    monkeypatch.setattr(mp, "POLICIES", {"bf16-mended": mp.POLICIES["bf16-mended"]})
    monkeypatch.setattr(mp, "EXACT", {"fp64": mp.EXACT["fp64"]})
    monkeypatch.setattr(mp, "FORMATS", {})
    mp.check(dist.group.WORLD, "cpu")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bf16-mended")]
    assert line.split()[4] == "17%", f"of three updates one, of half the weights, is a sixth: {line}"


def test_an_unknown_option_is_one_line_and_exit_code_2(tmp_path):
    done = run_script(mp.__file__, "--policy", "fp4", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert "--policy" in done.stderr


def test_more_ranks_than_gpus_are_refused_and_do_not_fall_back_to_gloo(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mixed_precision.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as end:
        mp.main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert said.err == "mixed_precision.py: --nproc_per_node 4: there are 2 GPUs here; use 2 or less\n"
