"""The rows of the table: bytes measured on a model, gradients of 8-bit weights, sums over ranks in few bits."""

import sys
from pathlib import Path

import fp8_recipes
import pytest
import torch
import torch.distributed as dist
from _precision_demo import Decoder, batch, loss_sum, stdlib_bytes
from fp8 import Fp8Linear, e4m3, quantize
from fp8_recipes import TABLE, Kept, KeptRoot, RecipeAdamW, RecipeLinear, make, train
from harness.programs import run_script
from harness.ranks import RankFailure, run_ranks
from harness.reference import assert_same, assert_same_named
from precision_policies import ITEMS, POLICIES, LossScaler, MixedAdamW

SIZES = dict(inner=128, layers=1)
PUBLISHED = {
    "bf16": (4, 4, 2, 2, 4, 4),
    "bf16-no-sums": (4, 0, 2, 2, 4, 4),
    "transformer-engine": (0, 0, 4, 4, 4, 4),
    "fp8-lm-o3": (2, 2, 1, 1, 1, 2),
    "deepseek-v3": (4, 4, 1, 2, 2, 2),
    "nanotron": (2, 4, 1, 1, 1, 1),
}


@pytest.fixture(autouse=True, scope="module")
def alone():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def backward(model: Decoder, rows: int = 2, length: int = 64) -> torch.Tensor:
    tokens, labels = batch(stdlib_bytes(20_000), 0, rows=rows, length=length)
    loss = loss_sum(model, tokens, labels) / labels.numel()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", TABLE)
def test_bytes_per_parameter_are_the_published_ones_item_by_item_measured_on_the_model(name):
    model, optimizer = make(name, dist.group.WORLD, **SIZES)
    assert TABLE[name].bytes() == dict(zip(ITEMS, PUBLISHED[name], strict=True))
    backward(model)
    held, scales = optimizer.held()
    size = sum(p.numel() for p in model.matrices().values())
    assert held == {item: kind * size for item, kind in zip(ITEMS, PUBLISHED[name], strict=True)}
    # The model's own parameters are what is called weights, not a view of something larger.
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.matrices().values()}
    assert sum(storages.values()) == held["weights"]
    matrices = len(model.matrices())
    per_tensor = {"fp8-lm-o3": 6, "nanotron": 4}.get(name, 0) * matrices  # items with few exponents
    assert scales == 4 * (size // 128**2 if name == "deepseek-v3" else per_tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, e4m3])
def test_what_is_kept_comes_back_within_half_a_step_and_in_the_same_place(dtype):
    kept = Kept(torch.zeros(200, 300), dtype)
    place = kept.values.data_ptr()
    for factor in (1.0, 1e-12, 1e6):  # out of the range of fp16 and fp8, were it not for the scale
        value = random(200, 300) * factor
        kept.write(value)
        half = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11, e4m3: 2**-4}[dtype]
        step = (value.abs() * half).clamp(min=value.abs().max() * 2**-20 if dtype != e4m3 else value.abs().max() / 4e5)
        assert ((kept.read() - value).abs() <= step * 1.001).all(), f"{dtype} at {factor}"
        assert kept.values.data_ptr() == place
    assert torch.equal(Kept(torch.zeros(2, 2), dtype).read(), torch.zeros(2, 2))


def test_with_a_generator_the_8_bit_mean_is_right():
    generator = torch.Generator().manual_seed(0)
    value = torch.full((300, 300), 0.31)
    value[0, 0] = 1.0
    got = Kept(value, e4m3, generator=generator).read()
    assert got[1:].mean().item() == pytest.approx(0.31, rel=1e-3)
    nearest = Kept(value, e4m3).read()
    assert abs(nearest[1:].mean().item() - 0.31) > 0.002


def test_an_8_bit_second_moment_is_never_zero_where_it_was_not():
    value = torch.logspace(-20, 0, 400).view(1, -1)
    value[0, 0] = 0
    got = KeptRoot(value, e4m3).read()
    assert got[0, 0] == 0 and (got[0, 1:] > 0).all()
    large = value > 1e-3
    assert ((got / value)[large] - 1).abs().max() < 0.14  # twice the relative error of the root


def sums(ranks: list[int], dtype: torch.dtype) -> torch.Tensor | None:
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    mine = dist.get_rank(group)
    value = random(64, 48, seed=mine) * 100.0**mine
    value[0, :8] = 1000 + 77.7 * torch.arange(8) * (mine + 1)  # all have their largest elements in the same place
    value[0, 8] = 1e6
    kept = Kept(value, dtype)
    kept.sum_over(group)
    return kept.read()


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 0]])
def test_tensors_with_different_scales_are_summed_with_a_common_one_and_nothing_overflows(ranks):
    for dtype, tolerance in ((torch.float16, 1e-3), (torch.float32, 1e-6)):
        want = torch.zeros(64, 48)
        for mine in range(len(ranks)):
            value = random(64, 48, seed=mine) * 100.0**mine
            value[0, :8] = 1000 + 77.7 * torch.arange(8) * (mine + 1)
            value[0, 8] = 1e6
            want += value
        for rank, got in enumerate(run_ranks(3, sums, ranks, dtype)):
            if rank in ranks:
                assert_same(got, want, tolerance, f"sum in {dtype}", rank)


def rounded_up() -> torch.Tensor:
    """The two largest fp16 numbers below the limit are 32 apart: 0.50025 of it rounds up on both ranks."""
    totals = []
    for share in torch.linspace(0.4, 0.6, 201).tolist():
        kept = Kept(torch.tensor([[share if dist.get_rank() else 1 - share, 0.1]]), torch.float16)
        kept.sum_over(dist.group.WORLD)
        totals.append(kept.read()[0, 0])
    return torch.stack(totals)


def test_a_sum_of_rounded_numbers_has_room_to_be_rounded_up():
    for rank, got in enumerate(run_ranks(2, rounded_up)):
        assert_same(got, torch.ones(201), 2e-3, "sums of two shares", rank)


def test_an_8_bit_weight_gets_the_gradient_of_the_numbers_it_stands_for():
    row = TABLE["deepseek-v3"]
    linear = RecipeLinear(row, None)
    model = Decoder(linear, **SIZES)
    optimizer = RecipeAdamW(model, row, linear, 1e-3)
    twin = Decoder(Fp8Linear("block"), **SIZES).bfloat16()  # with the same numbers, in bf16
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        items = optimizer.items.get(p)
        q.data = items["weights"].read() if items else p.data.clone()
        assert items is None or p.dtype == e4m3, name
    loss, want = backward(model), backward(twin)
    assert_same(loss, want, 1e-6, "loss")
    optimizer.accumulate()
    got = {optimizer.names[p]: optimizer.gradient(p) for p in optimizer.items}
    expected = {name: twin.get_parameter(name).grad.float() for name in got}
    assert all(p.grad is None for p in optimizer.items)
    # In bf16 on the way, as the row says; the twin's weights are fp32 and so are their gradients.
    assert_same_named(got, expected, 2**-8, "gradient")


def test_a_second_backward_before_accumulate_is_refused_and_after_it_adds_up():
    model, optimizer = make("deepseek-v3", dist.group.WORLD, **SIZES)
    backward(model)
    with pytest.raises(RuntimeError, match=r"blocks\.0.*second backward before accumulate"):
        backward(model)
    model, optimizer = make("deepseek-v3", dist.group.WORLD, **SIZES)
    once = {}
    for _ in range(2):
        backward(model)
        optimizer.accumulate()
        once = once or {name: optimizer.gradient(p) for p, name in optimizer.names.items()}
    twice = {name: optimizer.gradient(p) / 2 for p, name in optimizer.names.items()}
    assert_same_named(twice, once, 1e-6, "half of two")


def test_the_first_row_is_the_policy_of_the_same_name():
    """Two programs for the same arithmetic: weights after three steps are equal to the bit."""
    model, optimizer = make("bf16", dist.group.WORLD, **SIZES)
    twin = Decoder(**SIZES)
    other = MixedAdamW(twin.named_parameters(), POLICIES["bf16"], lr=2e-3)
    scaler = LossScaler(dist.group.WORLD, 1.0, dynamic=False)
    for _ in range(3):
        for m, o in ((model, optimizer), (twin, other)):
            backward(m)
            o.accumulate()
            assert o.step(scaler)
    assert_same_named(dict(model.named_parameters()), dict(twin.named_parameters()), 0.0, "weights")


@pytest.mark.parametrize("name", ["fp8-lm-o3", "deepseek-v3", "nanotron"])
def test_forward_uses_the_8_bit_weights_and_updates_reach_them_through_the_master(name):
    model, optimizer = make(name, dist.group.WORLD, **SIZES)
    p = model.blocks[0].gate
    items = optimizer.items[p]
    scaler = LossScaler(dist.group.WORLD, 1.0, dynamic=False)
    before = items["master"].read()
    for _ in range(4):
        backward(model)
        optimizer.accumulate()
        optimizer.step(scaler)
    after = items["master"].read()
    assert ((after - before).abs() > 0).float().mean() > 0.5
    assert p.data_ptr() == items["weights"].values.data_ptr()
    want = quantize(after, e4m3, items["weights"].block).dequantize()
    assert_same(items["weights"].read(), want, 0.0, "weights against the rounded master")
    assert all((kept.read() == 0).all() for kept in [items["accumulation"]]), "sums start at zero again"


@pytest.mark.parametrize("name", ["bf16-no-sums", "fp8-lm-o3"])
def test_a_skipped_step_leaves_nothing_behind(name):
    """Weights after an overflow and a good step are those of the good step alone."""
    weights = []
    for bad in (False, True):
        model, optimizer = make(name, dist.group.WORLD, **SIZES)
        scaler = LossScaler(dist.group.WORLD, 2.0)
        for overflows in [True, False] if bad else [False]:
            tokens, labels = batch(stdlib_bytes(20_000), 0, rows=2)
            scaler.scale(loss_sum(model, tokens, labels) / labels.numel()).backward()
            if overflows:
                sink = optimizer.items[model.blocks[0].gate].get("gradients")
                (sink.scale if sink else model.blocks[0].gate.grad).fill_(torch.inf)
            optimizer.accumulate()
            assert optimizer.step(scaler) == (not overflows)
        weights.append({label: p.detach().float() for label, p in model.named_parameters()})
    assert_same_named(weights[1], weights[0], 1e-2, "weight")  # one scale is half of the other: the last bit may differ


def test_the_amaxes_of_a_skipped_step_make_no_scale():
    model, optimizer = make("transformer-engine", dist.group.WORLD, **SIZES)
    scaler, fp8 = LossScaler(dist.group.WORLD, 2.0), optimizer.linear.fp8
    for good in (False, True):
        backward(model)
        if not good:
            model.blocks[0].gate.grad.fill_(torch.inf)
            fp8.bad.append(("a gradient", torch.tensor(torch.inf)))  # as a GPU notes it, to look at in the end
        optimizer.accumulate()
        assert optimizer.step(scaler) == good
        histories = [history for roles in fp8.histories.values() for history in roles.values()]
        assert len(histories) == 3 * len(model.matrices())
        assert all(history.now == 0 and history.steps == good for history in histories)


def three_recipes() -> list[dict]:
    names = ("fp8-lm-o3", "deepseek-v3", "nanotron")
    return [train(name, dist.group.WORLD, torch.device("cpu"), 3, 1) for name in names]


def test_ranks_end_with_the_same_bits_and_gradients_as_good_as_on_one_process():
    first, second = run_ranks(2, three_recipes)
    exact = Decoder(layers=1)
    tokens, labels = batch(stdlib_bytes(200_000), 0, rows=4)
    (loss_sum(exact, tokens, labels) / labels.numel()).backward()
    want = torch.cat([p.grad.flatten() for p in exact.matrices().values()])
    for got, other, name in zip(first, second, ("fp8-lm-o3", "deepseek-v3", "nanotron"), strict=True):
        assert torch.equal(got["weights"], other["weights"]), name
        own = train(name, dist.group.WORLD, torch.device("cpu"), 1, 2)["gradients"] - want
        assert (got["gradients"] - want).norm() <= 1.5 * own.norm(), name
        assert got["losses"][-1] < got["losses"][0]


def nan_on_rank_1() -> None:
    model, optimizer = make("nanotron", dist.group.WORLD, **SIZES)
    backward(model)
    if dist.get_rank() == 1:
        kept = next(iter(optimizer.items.values()))["gradients"]
        kept.scale.fill_(torch.nan)
    optimizer.accumulate()
    optimizer.reduce(dist.group.WORLD)
    optimizer.step(LossScaler(dist.group.WORLD, 1.0, dynamic=False))


def test_a_gradient_that_is_not_finite_ends_all_ranks():
    with pytest.raises(RankFailure, match="infinite or NaN"):
        run_ranks(2, nan_on_rank_1)


def test_a_gpu_before_hopper_is_refused_before_a_group_is_started_by_recipes_with_fp8_products_only(
    monkeypatch, capsys
):
    import fp8_kernels  # noqa: F401  while there is no GPU yet, or Triton would compile

    launched = []
    monkeypatch.setattr(fp8_recipes, "launch", launched.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")

    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fp8_recipes.py", *options])
        launched.clear()
        try:
            fp8_recipes.main()
        except SystemExit as ended:
            assert ended.code == 2
        return capsys.readouterr().err

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for name, row in [("", None), *TABLE.items()]:
        said = run("--recipe", name) if name else run()
        if row and row.product == "bf16":
            assert len(launched) == 1 and said == "", name
        else:
            assert not launched and len(said.splitlines()) == 1, f"{name or 'all of them'}: {said}"
            assert said.startswith("fp8_recipes.py: fp8 on A100: the kernels are for Hopper") and "not 8.0" in said
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert run() == "" and len(launched) == 1


def test_an_unknown_recipe_is_one_line(tmp_path):
    done = run_script(Path(__file__).with_name("fp8_recipes.py"), "--recipe", "o4", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "deepseek-v3" in done.stderr
