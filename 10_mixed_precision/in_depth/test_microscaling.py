"""MXFP8, MXFP4 and NVFP4 against their definitions, written out again in integers, and against torch's own types."""

import math

import pytest
import torch
import torch.distributed as dist
from formats import e4m3
from harness.meter import communication
from harness.programs import error_from
from harness.ranks import run_ranks
from harness.reference import assert_same
from microscaling import (
    E2M1,
    E4M3,
    E5M2,
    MICRO,
    Micro,
    MicroLinear,
    Microscaled,
    decode,
    encode,
    encode_e8m0,
)
from torch import nn

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # of e2m1, from the table of the MX specification, section 5.3.3
FORMS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
ALL = torch.arange(256, dtype=torch.uint8)


def random(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def values_of(name: str) -> torch.Tensor:
    """Every pattern of an element format, read without the chapter's code."""
    if name == "e2m1":
        return torch.tensor([*MAGNITUDES, *(-float(m) for m in MAGNITUDES)], dtype=torch.float64)
    return ALL.view(FORMS[name].dtype).double()


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())


# --------------------------------------------------------------------------------------------------------- bit patterns


@pytest.mark.parametrize("name", MICRO)
def test_every_element_with_every_scale_is_the_product_of_what_the_two_patterns_stand_for(name):
    kind = MICRO[name]
    elements = values_of(kind.element.name)
    scales = ALL.view(e4m3 if kind.two_levels else torch.float8_e8m0fnu).double()
    outer = torch.tensor([[0.37]]) if kind.two_levels else None
    elements = elements.repeat(-(-kind.size // len(elements)))  # at least a block
    codes = (torch.arange(len(elements)) % 2**kind.element.bits).to(torch.uint8)[None].repeat(256, 1)
    stored = Microscaled(codes, ALL[:, None].repeat(1, len(elements) // kind.size), outer, kind)
    want = elements[None] * (scales * (outer.double().item() if kind.two_levels else 1))[:, None]
    right = same(stored.dequantize(torch.float64), want)
    assert right.all(), f"{name}: scale and element {(~right).nonzero()[:3].tolist()}"


@pytest.mark.parametrize("name", FORMS)
def test_every_fp16_number_becomes_the_nearest_element_and_the_even_one_at_a_tie(name):
    form, x = FORMS[name], torch.arange(65536).to(torch.uint16).view(torch.float16).float()
    if form is E2M1:  # torch does not cast to it
        x = x[~x.isnan()]
        distance = (x.double().abs()[:, None] - torch.tensor(MAGNITUDES, dtype=torch.float64)).abs()
        distance[x.isinf()] = torch.tensor([1.0] * 7 + [0.0], dtype=torch.float64)
        odd = torch.arange(8) % 2 * 1e-9  # far less than two distances differ, unless they are equal
        want = torch.tensor(MAGNITUDES, dtype=torch.float64)[(distance + odd).argmin(1)].copysign(x.double())
    else:
        want = x.clamp(-form.max, form.max).to(form.dtype).double()
    got = decode(encode(x, form), form)
    right = same(got, want)
    assert right.all(), f"{name}: {x[~right][:4].tolist()} became {got[~right][:4].tolist()}"
    assert encode(torch.tensor([math.nan]), form).item() == 2**form.bits - 1, "the pattern of NaN is all ones"


def scale_by_definition(amax: float, largest: int, up: bool) -> int:
    """The code of the scale, in integers alone."""
    if not math.isfinite(amax):
        return 255
    if amax == 0:
        return 0
    over, under = amax.as_integer_ratio()  # `under` is a power of two
    shared = over.bit_length() - under.bit_length() - (largest.bit_length() - 1)
    if up and over << max(-shared, 0) > largest * under << max(shared, 0):
        shared += 1
    return min(max(shared, -127), 127) + 127


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize(("name", "largest"), [("e4m3", 448), ("e5m2", 57344), ("e2m1", 6)])
def test_every_bf16_amax_gets_the_scale_of_the_definition(name, largest, up):
    """Zero, subnormal, infinite and NaN ones, too."""
    amax = torch.arange(32768).to(torch.uint16).view(torch.bfloat16)  # all that are not negative
    got = encode_e8m0(amax.float(), FORMS[name], up).tolist()
    for value, code in zip(amax.tolist(), got, strict=True):
        want = scale_by_definition(value, largest, up)
        assert code == want, f"{name}: amax {value:g} has code {code}, not {want}"


@pytest.mark.parametrize("name", MICRO)
def test_what_a_block_stands_for_becomes_the_same_block_again(name):
    """Every scale, and in each block every element: quantising twice is quantising once."""
    kind = MICRO[name]
    elements = values_of(kind.element.name)
    elements = elements[elements.isfinite()]
    if kind.two_levels:
        scales = ALL[1:127].view(e4m3).double()  # all above zero; with 448 among them the scale of the tensor is 1
    else:
        top = 254 - int(math.log2(kind.element.max))  # beyond it x is no fp32 number
        scales = ALL[: top + 1].view(torch.float8_e8m0fnu).double()
    rows, blocks = [], -(-len(elements) // kind.size)
    for block in elements.tensor_split(blocks):
        block = torch.cat((block, torch.full((kind.size - len(block),), kind.element.max)))
        block[-1] = kind.element.max  # whose largest element says which scale it is
        rows.append(scales[:, None] * block)
    x = torch.cat(rows, dim=1)
    q = kind.quantize(x)
    again = kind.quantize(q.dequantize(torch.float64))
    assert same(q.dequantize(torch.float64), x).all(), name
    assert torch.equal(q.codes, again.codes) and torch.equal(q.scales, again.scales)
    assert q.outer is None or q.outer.item() == 1


OF_MX = [("mxfp8", 8.25), ("mxfp8-up", 8.25), ("mxfp8-e5m2", 8.25), ("mxfp4", 4.25)]


@pytest.mark.parametrize(("name", "bits"), [*OF_MX, ("nvfp4", 4.5)])
def test_a_number_takes_the_bits_of_its_element_and_its_share_of_the_scale(name, bits):
    outer = 32 if name == "nvfp4" else 0
    assert MICRO[name].quantize(random(64, 96)).bits() == bits * 64 * 96 + outer


# --------------------------------------------------------------------------------------------------------------- scales


def nvfp4_by_the_equations(x: torch.Tensor) -> torch.Tensor:
    """2509.25149, appendix B, with torch's casts to e4m3 and a search in the table of e2m1. x [R, 16 n]."""
    s_enc = torch.tensor(6 * 448.0) / x.abs().max()
    s_dec = 1 / s_enc
    blocks = x.unflatten(1, (-1, 16))
    s_b = (blocks.abs().amax(-1, keepdim=True) / 6 * s_enc).clamp(max=448).to(e4m3).float()
    scaled = (blocks * (1 / (s_b * s_dec))).double().nan_to_num(0)
    table = torch.tensor(MAGNITUDES, dtype=torch.float64)
    nearest = table[((scaled.abs()[..., None] - table).abs() + torch.arange(8) % 2 * 1e-12).argmin(-1)]
    return (nearest.copysign(scaled) * s_b.double() * s_dec.double()).flatten(1)


@pytest.mark.parametrize("size", [1e-20, 1.0, 3e7, 1e30])
def test_nvfp4_is_what_its_equations_say(size):
    x = random(64, 256) * size * torch.logspace(-5, 0, 16).repeat_interleave(16)  # blocks of very different sizes
    x[3, 32:48] = 0
    got = MICRO["nvfp4"].quantize(x).dequantize(torch.float64)
    assert_same(got, nvfp4_by_the_equations(x), 1e-12, f"nvfp4 of numbers about {size:g}")
    assert torch.equal(got[3, 32:48], torch.zeros(16, dtype=torch.float64))


@pytest.mark.parametrize("name", MICRO)
def test_without_their_patterns_the_numbers_are_the_same(name):
    """Halves between two neighbours of e2m1 in all blocks, and numbers of very different sizes."""
    ties = torch.tensor([6, *(m + 0.25 for m in (0, 0.5, 1, 1.5)), 2.5, 3.5, 5, 7, 0, *[-0.75] * 6] * 2)[None]
    wild = random(8, 96) * torch.logspace(-30, 30, 8)[:, None]
    wild[3, 5], wild[4, :32] = math.nan, 0
    for x, amax in ((ties, None), (wild[:3], None), (wild, None), (ties, torch.tensor([[40.0]]))):
        got, want = MICRO[name].plain(x, amax), MICRO[name].quantize(x, amax)
        assert same(got.dequantize(torch.float64), want.dequantize(torch.float64)).all(), name
    assert want.outer is None or want.outer.item() == pytest.approx(40 / (6 * 448)), "of the amax that is given"


def test_a_power_of_two_as_the_specification_has_it_saturates_and_the_next_one_does_not():
    x = torch.linspace(1, 2, 400)[:-1, None].repeat(1, 32)
    for name, worst in (("mxfp8", 1 - 448 / 512), ("mxfp8-up", 1 / 17), ("mxfp4", 1 - 6 / 8), ("mxfp4-up", 1 / 5)):
        kind = MICRO.get(name, Micro(E2M1, 32, up=True))
        error = (kind.quantize(x).dequantize() / x - 1).abs().max().item()
        assert error == pytest.approx(worst, rel=0.04), name  # without saturation half a step, at a tie just above 2^k


def test_a_block_whose_amax_is_2_to_the_minus_19_of_the_tensors_is_zero_in_nvfp4_and_not_in_mx():
    x = torch.ones(2, 32)
    x[0, 16:], x[1, 16:] = 2**-18, 2**-19
    got = MICRO["nvfp4"].quantize(x).dequantize()
    assert got[0, 16:].min() > 0 and torch.equal(got[1, 16:], torch.zeros(16))
    assert (Micro(E2M1, 16).quantize(x).dequantize()[1, 16:] > 0).all()


@pytest.mark.parametrize("name", MICRO)
def test_zeros_ragged_rows_and_no_numbers_at_all_are_no_trouble(name):
    kind = MICRO[name]
    assert torch.equal(kind.quantize(torch.zeros(3, 40)).dequantize(), torch.zeros(3, 40))
    assert kind.quantize(torch.zeros(0, 64)).dequantize().shape == (0, 64)
    x = random(5, 100)
    padded = kind.quantize(torch.cat((x, torch.zeros(5, 28)), 1)).dequantize()[:, :100]
    assert torch.equal(kind.quantize(x).dequantize(), padded), "the last block of a row"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", MICRO)
def test_nan_and_infinity_make_nan_of_all_that_share_a_scale(name, bad):
    x = random(4, 128)
    x[2, 70] = bad
    got = MICRO[name].quantize(x).dequantize()
    block = slice(64, 96)
    if MICRO[name].two_levels:
        assert got.isnan().all()
    else:
        assert got[2, block].isnan().all() and got.isnan().sum() == 32


@pytest.mark.parametrize("size", [2.0**-149, 2.0**-126, 1e-38, 1e38])
@pytest.mark.parametrize("name", MICRO)
def test_the_smallest_and_the_largest_numbers_of_fp32_are_finite_and_not_larger_than_they_were(name, size):
    x = torch.tensor([[size, -size / 2, *[0.0] * 62]])
    got = MICRO[name].quantize(x).dequantize()
    assert got.isfinite().all() and got.abs().max() <= size * 1.07, got[0, :2].tolist()


# --------------------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize("name", MICRO)
def test_the_three_products_have_operands_in_blocks_along_their_sums(name):
    x, weight = random(64, 96, dtype=torch.float64), random(48, 96, seed=1, dtype=torch.float64)
    dy = random(64, 48, seed=2, dtype=torch.float64) * 1e-6
    along = lambda t: MICRO[name].quantize(t).dequantize(torch.float64)  # noqa: E731
    a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = MicroLinear(name)(a.view(4, 16, 96), w)
    y.backward(dy.view(4, 16, 48))
    for what, got, want, exact in (
        ("y", y.detach().flatten(0, 1), along(x) @ along(weight).T, x @ weight.T),
        ("dx", a.grad, along(dy) @ along(weight.T).T, dy @ weight),
        ("dW", w.grad, along(dy.T) @ along(x.T).T, dy.T @ x),
    ):
        assert_same(got, want, 1e-12, f"{name}: {what}")
        off = ((got - exact).norm() / exact.norm()).item()
        assert 0.01 < off < (0.25 if "fp4" in name else 0.1), f"{name}: {what} is {off:.3f} off"


def nvfp4_of(rows: slice, ranks: int, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dx of these rows of the batch that so many ranks share."""
    size = torch.logspace(0, 2, 16 * ranks)[:, None]
    x = (random(16 * ranks, 32, dtype=torch.float64) * size)[rows].requires_grad_()
    y = MicroLinear("nvfp4", group)(x, random(16, 32, seed=1, dtype=torch.float64))
    y.backward((random(16 * ranks, 16, seed=2, dtype=torch.float64) * size)[rows])
    return y.detach(), x.grad


def nvfp4_on_ranks(ranks: list[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    mine = dist.get_rank(group)
    with communication() as sent:
        MicroLinear("mxfp8", group)(random(16, 32), random(16, 32, seed=1))
    assert not sent.calls, "MX needs no message"
    return nvfp4_of(slice(16 * mine, 16 * mine + 16), len(ranks), group)


@pytest.mark.parametrize("ranks", [[0, 1], [2, 0, 1]])
def test_ranks_with_pieces_of_a_batch_round_to_4_bits_as_one_process_does(ranks):
    whole = nvfp4_of(slice(None), len(ranks))
    got = run_ranks(max(ranks) + 1, nvfp4_on_ranks, ranks)
    for place, rank in enumerate(sorted(ranks)):
        for what, mine, want in zip(("y", "dx"), got[rank], whole, strict=True):
            assert_same(mine, want[16 * place : 16 * place + 16], 1e-10, what, rank)


def one_rank_has_infinity() -> str:
    x = random(16, 32)
    x[3, 5] = math.inf if dist.get_rank() else 1
    return error_from(FloatingPointError, MicroLinear("nvfp4", dist.group.WORLD), x, random(16, 32))


def test_what_is_not_finite_on_one_rank_ends_all_that_share_the_scale_of_the_tensor():
    for rank, line in enumerate(run_ranks(2, one_rank_has_infinity, timeout=15)):
        assert "an input of shape [16, 32] has an infinity or NaN" in line, f"rank {rank}: {line}"


def test_what_is_not_finite_is_named_and_no_tokens_are_no_error():
    for name in MICRO:
        linear, weight = MicroLinear(name), nn.Parameter(random(16, 32))
        x = random(16, 32)
        x[3, 5] = math.inf
        with pytest.raises(FloatingPointError, match=r"an input of shape \[16, 32\]"):
            linear(x, weight)
        linear(torch.empty(0, 32), weight).sum().backward()
        assert torch.equal(weight.grad, torch.zeros(16, 32))
    with pytest.raises(ValueError, match="'fp4' is unknown; use mxfp8"):
        MicroLinear("fp4")
