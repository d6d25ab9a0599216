"""The formats against torch's own numbers: finfo, casts, and every bit pattern."""

import math
from pathlib import Path

import pytest
import torch
from formats import FORMATS, lost_updates, running_sum, share_of, stochastic_round, to_fp8
from harness.programs import refusal
from harness.ranks import run_ranks

WITH_DTYPE = [f for f in FORMATS.values() if f.dtype is not None]
by_name = pytest.mark.parametrize("form", WITH_DTYPE, ids=lambda f: f.name)


@by_name
def test_largest_smallest_and_epsilon_are_those_of_torch(form):
    info = torch.finfo(form.dtype)
    assert (form.max, form.smallest_normal, form.epsilon) == (info.max, info.smallest_normal, info.eps)
    assert form.bits == info.bits
    # Half of the smallest number is a tie with zero, which is even; a little more is not.
    tiny = torch.tensor([form.smallest / 2, form.smallest * 0.51], dtype=torch.float64)
    if form.name != "fp32":
        assert form.round(tiny).tolist() == [0.0, form.smallest]
        assert form.spacing(torch.zeros(1)).item() == form.smallest


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "fp16"])
def test_every_bit_pattern_is_the_number_that_torch_reads_in_it(name):
    form = FORMATS[name]
    kind = torch.uint8 if form.bits == 8 else torch.uint16
    patterns = range(2**form.bits)
    want = torch.tensor(list(patterns), dtype=kind).view(form.dtype).double().tolist()
    for pattern, value in zip(patterns, want, strict=True):
        got = form.value(pattern)
        assert got == value or (math.isnan(got) and math.isnan(value)), f"{name}: pattern {pattern:b}"


@by_name
def test_rounding_is_that_of_torch_also_at_ties_and_among_subnormals(form):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20_000, generator=generator) * torch.logspace(-8, 4, 20_000)
    odd = torch.arange(-999, 1000, dtype=torch.float32)  # ties: halves of steps, in all formats with few digits
    x = torch.cat((x, odd / 64, odd * form.smallest / 2 if form.name != "bf16" else odd, torch.zeros(2)))
    x = x[x.abs() <= form.max]
    assert torch.equal(form.round(x), x.to(form.dtype).double())


def test_out_of_range_is_infinite_in_ieee_formats_and_the_largest_number_in_e4m3():
    beyond = torch.tensor([1e6, -1e6])
    assert FORMATS["fp16"].round(beyond).tolist() == [math.inf, -math.inf]
    assert FORMATS["e4m3"].round(beyond).tolist() == [448, -448]
    assert FORMATS["bf16"].round(beyond).isfinite().all()
    assert FORMATS["fp16"].round(torch.tensor([65519.0, 65520.0])).tolist() == [65504, math.inf], "half a step above it"
    for name in ("fp16", "e4m3"):
        assert FORMATS[name].round(torch.tensor([math.nan])).isnan().all(), name


def test_tf32_has_the_range_of_fp32_and_the_resolution_of_fp16():
    tf32, single, half = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert (tf32.smallest_normal, tf32.epsilon) == (single.smallest_normal, half.epsilon)
    assert (tf32.bits, tf32.max) == (19, 2.0**128 - 2.0**117)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(tf32.round(x), half.round(x))  # no element is out of fp16's range here


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cast_to_8_bits_saturates_and_keeps_nan(dtype):
    largest = torch.finfo(dtype).max
    got = to_fp8(torch.tensor([1e9, -1e9, math.inf, 1.0, math.nan]), dtype).float()
    assert got[:4].tolist() == [largest, -largest, largest, 1.0] and got[4].isnan()


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3"])
def test_stochastic_rounding_takes_one_of_two_neighbours_and_is_right_on_average(name):
    form, generator = FORMATS[name], torch.Generator().manual_seed(0)
    for value in (1.3 * form.epsilon + 1, -2.1 * form.epsilon - 1, 0.3 * form.smallest, 5.0, 0.0):
        x = torch.full((20_000,), value, dtype=torch.float64)
        got = stochastic_round(x, form.dtype, generator).double()
        gap = form.spacing(x[:1]).item()
        down = math.floor(value / gap) * gap
        assert set(got.unique().tolist()) <= {down, down + gap}, f"{name}: {value} became {got.unique().tolist()}"
        assert abs(got.mean().item() - value) < 0.02 * gap, f"{name}: {value} on average {got.mean().item()}"
    edge = 448 if name == "e4m3" else math.inf
    assert stochastic_round(torch.tensor([math.inf, -math.inf]), form.dtype).float().tolist() == [edge, -edge]


def test_stochastic_rounding_draws_from_its_generator_and_leaves_the_global_one_alone():
    x = torch.linspace(1, 2, 1000)
    drawn = []
    with torch.random.fork_rng(devices=[]):
        for global_seed, seed in ((1, 0), (2, 0), (2, 5)):
            before = torch.manual_seed(global_seed).get_state()
            drawn.append(stochastic_round(x, torch.bfloat16, torch.Generator().manual_seed(seed)))
            assert torch.equal(torch.get_rng_state(), before), "the global generator has moved"
    assert {y.dtype for y in drawn} == {torch.bfloat16}
    assert torch.equal(drawn[0], drawn[1]), "another global seed, other bits"
    assert not torch.equal(drawn[1], drawn[2]), "another seed, the same bits"


@by_name
def test_stochastic_rounding_of_a_finite_number_is_finite(form):
    """Next to the largest number there is no neighbour above: an update must not make infinity or NaN of it."""
    largest = torch.full((200,), form.max, dtype=torch.float64)
    for factor in (1.0, 1 + form.epsilon / 8, 1 + form.epsilon / 2.1, 3.0):
        for x in (largest * factor, -largest * factor):
            got = stochastic_round(x, form.dtype, torch.Generator().manual_seed(0)).double()
            assert torch.equal(got, largest.copysign(x)), f"{form.name}: {x[0]:g} became {got.unique().tolist()}"
    assert stochastic_round(torch.tensor([math.nan]), form.dtype).double().isnan()


@pytest.mark.parametrize(("dtype", "stalls"), [(torch.float32, 5000), (torch.float16, 2048), (torch.bfloat16, 256)])
def test_an_accumulator_stalls_when_a_term_is_half_of_its_spacing(dtype, stalls):
    total = running_sum(torch.ones(5000), dtype)
    assert total.dtype == dtype and total.item() == stalls


def test_only_updates_that_were_asked_for_can_be_lost():
    before = torch.tensor([1.0, 1.0, 1.0, 2.0]).bfloat16()
    exact = torch.tensor([1.0, 1.001, 1.5, 2.001])  # the first asks for nothing
    assert lost_updates(before, exact, exact.bfloat16()).tolist() == [2, 3]
    assert lost_updates(before, before.float(), before).tolist() == [0, 0]


def test_the_share_of_lost_updates_counts_elements_and_not_tensors():
    norm, matrix = torch.ones(10), torch.ones(30, 30)
    counts = [lost_updates(norm, norm + 1, norm), lost_updates(matrix, matrix + 1, matrix + 1)]
    assert share_of(counts) == pytest.approx(10 / 910), "all of a small tensor, nothing of a large one"
    assert share_of([]) is None
    assert share_of([lost_updates(norm, norm, norm)]) == 0.0


def test_an_update_in_bf16_is_lost_below_a_512th_of_the_weight_and_arrives_above_a_256th():
    w = torch.linspace(1, 2, 129)[:-1].bfloat16()  # every number of bf16 between two powers of two
    moved = {part: w.double() * (1 + 1 / part) for part in (515, 300, 255)}
    shares = {part: share_of([lost_updates(w, exact, exact.bfloat16())]) for part, exact in moved.items()}
    assert shares[515] == 1 and 0.1 < shares[300] < 0.2 and shares[255] == 0, shares


REFUSED = [  # what a benchmark of this chapter cannot do, or would have to pass over in silence
    ("bench_mixed_precision.py", "--figurs", "--figurs"),
    ("bench_precision_policies.py", "--steps 3", "--steps"),
    ("bench_fp8.py", "--out x", "--out x is for --gpu"),
    ("bench_fp8.py", "--gpu --figures", "--figures has nothing to draw of --gpu"),
    ("bench_fp8.py", "--dry", "--dry is for --gpu, and needs --out"),
    ("bench_fp8_kernels.py", "--out x", "--out x is for --gpu"),
    ("bench_fp8_kernels.py", "--gpu --dry", "--dry is for --gpu, and needs --out"),
    ("bench_fp8_matmul.py", "--out x", "--out x is for --gpu"),
    ("bench_fp8_matmul.py", "--dry --out x", "--dry is for --gpu, and needs --out"),
    ("bench_fp8_recipes.py", "--keep x --figures", "--keep x is for runs"),
    ("bench_fp8_recipes.py", "--only rate", "--only"),
    ("bench_microscaling.py", "--only formats --figures", "--only formats has no figure"),
    ("bench_microscaling.py", "--only nan", "--only"),
    ("formats.py", "--figures", "--figures"),
    ("fp8.py", "block", "block"),
    ("fp8_kernels.py", "--gpu", "--gpu"),
    ("microscaling.py", "--only model", "--only"),
    ("precision_policies.py", "--policy fp4", "--policy"),
    ("precision_policies.py", "--pol fp16", "--pol"),
]


def what_is_said_of_refused() -> list[str]:
    """In a process of its own: benchmarks decide whether Triton interprets."""
    folders = [Path(__file__).parent, Path(__file__).parents[1]]
    scripts = [next(folder / name for folder in folders if (folder / name).exists()) for name, *_ in REFUSED]
    return [refusal(script, options) for script, (_, options, _) in zip(scripts, REFUSED, strict=True)]


@pytest.mark.prove
def test_bad_options_of_scripts_and_benchmarks_are_one_line_that_names_them_and_exit_code_2():
    [ends] = run_ranks(1, what_is_said_of_refused, timeout=300)
    for (name, options, words), said in zip(REFUSED, ends, strict=True):
        assert words in said, f"{name} {options}: {said}"


def test_more_ranks_than_gpus_are_refused_before_any_process_group(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert refusal(Path(__file__).with_name("formats.py")) == "--nproc_per_node 4: there are 2 GPUs here; use 2 or less"
