"""Attention in e4m3, emulated on the CPU: against its formula in float64, in any order of its warps; what the layouts,
the scales, the lifted weights and the sums outside the tensor core are good for; and what nvcc makes of it."""

import math
import re
import shutil

import _cuda
import flash_attention_fp8 as fp8
import pytest
import torch
from _cuda import FORWARD, REVERSE, CudaError
from flash_attention_cuda import KEYS, THREADS, cuda_forward, inputs, turns
from flash_attention_fp8 import E4M3, accumulator_bits, across, fp8_forward, in_float64, off_by, prepare, to_e4m3
from flash_tiles import band, explicit_attention
from harness.programs import assert_refused, refusal

NVCC = pytest.mark.skipif(not shutil.which("nvcc"), reason="without nvcc nothing can be compiled for a GPU")
CASES = {  # B, S_q, S_k, N, N_kv, D, causal, offset
    "one row": (1, 1, 1, 1, 1, 64, True, 0),
    "one query, many keys": (1, 1, 150, 2, 2, 64, False, 0),
    "uneven, three heads a group, two sequences": (2, 70, 70, 3, 1, 64, True, 0),
    "three tiles of keys": (1, 40, 300, 1, 1, 64, False, 0),
    "a later chunk of a ring": (1, 65, 270, 2, 1, 64, True, 205),
    "more queries than keys, the first without any": (1, 200, 90, 1, 1, 64, True, -110),
    "four heads on two": (1, 30, 20, 4, 2, 64, False, 0),
    "whole tiles": (1, 128, 128, 1, 1, 128, True, 0),
    "heads of 128, uneven": (1, 129, 131, 2, 2, 128, True, 2),
}


def check(case, order=FORWARD):
    """With tensor cores that add exactly, what is left is a rounding of out to bf16, and a weight here and there that
    lies so near the middle of two numbers of e4m3 that the last bit of its exponential decides."""
    *sizes, causal, offset = case
    given = inputs(*sizes, "cpu")
    with accumulator_bits(0):
        out, lse = fp8_forward(*given, causal=causal, offset=offset, order=order)
    want, want_lse = in_float64(*given, causal=causal, offset=offset)
    off = ((out.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
    assert off <= 2**-8, f"{case}: out is off by {off:.1e} of its largest element"
    far = (lse - want_lse).abs().masked_fill(lse == want_lse, 0.0).max()  # -inf - -inf would be NaN
    assert far <= 1e-5, f"{case}: the LSE is off by {far:.1e}"
    return out, lse


@pytest.mark.always("uneven, three heads a group, two sequences", "a later chunk of a ring", "heads of 128, uneven")
@pytest.mark.parametrize("name", CASES)
def test_output_and_lse_are_those_of_the_formula_in_float64(name):
    check(CASES[name])


def test_rows_without_keys_have_output_zero_and_lse_minus_infinity():
    out, lse = check(CASES["more queries than keys, the first without any"])
    assert (out[:, :110] == 0).all() and (lse[..., :110] == -math.inf).all() and lse[..., 110:].isfinite().all()


@pytest.mark.prove
def test_two_tiles_of_queries_and_three_of_keys_in_two_sequences_and_four_heads():
    check((2, 130, 270, 4, 2, 64, True, 140))


def dense(q, k, v, causal):
    """Attention in one piece in float64, from q, k, v and weights in e4m3: the error of that precision itself."""
    q, k, v = ((x.double() * scale.double()[:, None, :, None]) for x, scale in map(to_e4m3, (q, k, v)))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bind,bjnd->bnij", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = (weights * 256).float().to(E4M3).double() / 256
    return torch.einsum("bnij,bjnd->bind", rounded / weights.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("D", [64, 128])
def test_errors_are_at_most_one_and_a_half_times_those_of_dense_attention_in_e4m3(D):
    """With sums of 14 bits, as on a GPU. And both are far above those of bf16: that is what 8 bits cost."""
    given = inputs(1, 140, 140, 2, 1, D, "cpu")
    want = explicit_attention(*(x.double() for x in given), causal=True)
    ours, theirs = (off_by(x, want) for x in (fp8_forward(*given, causal=True)[0], dense(*given, True)))
    assert ours <= 1.5 * theirs, f"off by {ours:.1e}, dense attention in e4m3 by {theirs:.1e}"
    sixteen = off_by(cuda_forward(*given, causal=True)[0], want)
    assert 5 * sixteen < ours < 0.1, f"off by {ours:.1e}, in bf16 by {sixteen:.1e}"


def test_a_nan_stays_in_its_sequence_and_its_head():
    assert_a_nan_stays(fp8_forward)


def assert_a_nan_stays(forward):
    q, k, v = inputs(2, 20, 37, 2, 2, 64, "cpu")
    for x in (q, k, v):
        x[1], x[0, :, 1] = math.nan, math.nan
    out, lse = forward(q, k, v, causal=False)
    assert out[0, :, 0].isfinite().all() and lse[0, 0].isfinite().all()
    assert out[1].isnan().all() and out[0, :, 1].isnan().all()
    assert lse[1].isnan().all() and lse[0, 1].isnan().all()  # -inf would say that there is no key


def test_scores_in_the_thousands_do_not_overflow():
    q, k, v = inputs(1, 40, 140, 1, 1, 64, "cpu")
    out, lse = fp8_forward(q * 40, k * 40, v, causal=False)
    assert out.isfinite().all() and lse.max() > 3000


# ------------------------------------------------------------------------------------------------ numbers and layouts


def test_the_emulators_e4m3_is_torchs_for_all_256_patterns_and_all_values_between():
    lib = _cuda.library(fp8.SOURCE, "cpu", (0, 0))
    lib.value_of_e4m3.restype, lib.round_to_e4m3.argtypes = _cuda.ctypes.c_float, [_cuda.ctypes.c_float]
    patterns = torch.arange(256).to(torch.uint8).view(E4M3).float()
    mine = torch.tensor([lib.value_of_e4m3(p) for p in range(256)])
    assert torch.equal(mine.nan_to_num(1e9), patterns.nan_to_num(1e9))
    finite = patterns[:127].double()
    middles = (finite[1:] + finite[:-1]) / 2  # ties go to the even one
    for x in torch.cat((finite, middles, middles * (1 - 1e-6), middles * (1 + 1e-6))).float():
        for signed in (x.item(), -x.item()):
            want = torch.tensor(signed).to(E4M3).view(torch.uint8).item()
            assert lib.round_to_e4m3(signed) == want, f"{signed} becomes {lib.round_to_e4m3(signed)}, not {want}"
    assert [lib.round_to_e4m3(x) for x in (1e4, -1e4, math.nan)] == [0x7E, 0xFE, 0x7F]  # it saturates


def test_v_is_handed_over_with_its_keys_in_the_order_in_which_weights_come():
    S, D = 150, 64
    v = (torch.arange(S)[None, :, None, None] % 100 + torch.zeros(1, 1, 2, D)).to(E4M3)
    turned = across(v)
    assert turned.shape == (1, 2, D, 256) and turned.is_contiguous()
    lanes = [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    order = torch.tensor([16 * g + key for g in range(16) for lane in lanes for key in lane])
    want = torch.cat((v[0, :, 1, 5].float(), torch.zeros(106)))[order]
    assert torch.equal(turned[0, 1, 5].float(), want)


def test_tensors_in_another_layout_give_the_same_bits():
    given = inputs(1, 20, 37, 4, 2, 64, "cpu")
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    found = [fp8_forward(*each, causal=True, offset=17) for each in (given, turned)]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_a_scale_brings_the_largest_number_of_each_head_to_448():
    x = inputs(2, 30, 30, 3, 3, 64, "cpu")[0] * torch.tensor([1.0, 100.0, 0.01])[:, None].bfloat16()
    x[1, :, 2] = 0
    values, scale = to_e4m3(x)
    largest = values.float().abs().amax((1, 3))
    assert scale.shape == (2, 3) and torch.equal(largest, torch.tensor([[448.0, 448.0, 448.0], [448.0, 448.0, 0.0]]))
    near = (values.float() * scale[:, None, :, None] - x.float()).abs()
    assert (near <= x.float().abs() * 2**-4 + scale[:, None, :, None] * 2**-10).all()
    one = to_e4m3(x, per_head=False)[1]
    assert one.shape == (2, 3) and (one == one[0, 0]).all() and one[0, 0] == scale[:, 1].max()


def test_a_scale_for_each_head_where_heads_differ_by_more_than_e4m3_can():
    q, k, v = inputs(1, 60, 140, 2, 2, 64, "cpu")
    v[:, :, 1] *= 1e6  # beside these, the numbers of head 0 are 0 in e4m3
    want = explicit_attention(*(x.double() for x in (q, k, v)), causal=False)[:, :, 0]
    apart, one = (off_by(fp8_forward(q, k, v, causal=False, per_head=p)[0][:, :, 0], want) for p in (True, False))
    assert apart < 0.1 and one > 0.9, f"off by {apart:.1e}, with one scale for all by {one:.1e}"


def test_a_rotation_where_a_column_stands_out_in_q_and_in_k():
    q, k, v = inputs(1, 100, 100, 1, 1, 128, "cpu")
    q, k = (fp8.with_outliers(x, "column") for x in (q, k))
    want = explicit_attention(*(x.double() for x in (q, k, v)), causal=False)
    plain, spread = (off_by(fp8_forward(q, k, v, causal=False, spread=s)[0], want) for s in (False, True))
    assert spread < 0.6 * plain, f"with a rotation off by {spread:.1e}, without one by {plain:.1e}"
    assert 0 < (fp8.with_outliers(q, "rare") != q).float().mean() < 2e-3
    assert not torch.equal(fp8.with_outliers(q, "rare"), fp8.with_outliers(q, "rare", 1)), "q and k have their own"


def test_a_rotation_changes_no_product():
    q, k, _ = (x.double() for x in inputs(1, 20, 30, 1, 1, 128, "cpu"))
    M, again = fp8.spread_out(torch.eye(128)[None, :, None], torch.eye(128)[None, :, None])
    assert torch.allclose(M[0, :, 0] @ M[0, :, 0].T, torch.eye(128), atol=1e-6) and torch.equal(M, again)
    assert M[0, :, 0].sum(0).abs().max() < 6, "a row of ones is spread, too: in one column it would be 11.3"
    turned = torch.einsum("bind,bjnd->bij", *(x.double() for x in fp8.spread_out(q, k)))
    assert torch.allclose(turned, torch.einsum("bind,bjnd->bij", q, k), atol=1e-4)


def test_small_weights_keep_their_bits():
    """A key with the weight 1 and 127 keys with 2^-11 each, which e4m3 takes for 0 unless weights are lifted."""
    q, k, v = (torch.zeros(1, n, 1, 64, dtype=torch.bfloat16) for n in (1, 128, 128))
    q[..., 0], k[:, 0, :, 0], v[:, 1:] = 8.0, 11 * math.log(2), 1.0
    out, _ = fp8_forward(q, k, v, causal=False)
    want = 127 * 2**-11 / (1 + 127 * 2**-11)
    assert ((out - want).abs() <= 0.05 * want).all(), f"{out.flatten()[0]} and not {want}"


def test_sums_over_many_tiles_are_kept_outside_the_tensor_core():
    """One value of 448 and 639 of 1/64, all with one weight: beside the first, 14 bits of a sum have no digits for
    1/64. In the tile that holds 448 they are lost; in the four tiles behind it they must not be."""
    q, k, v = (torch.zeros(1, n, 1, 64, dtype=torch.bfloat16) for n in (1, 640, 640))
    v[:] = 1 / 64
    v[:, 0] = 448
    out, _ = fp8_forward(q, k, v, causal=False)
    least = (448 + 512 / 64) / 640
    assert (out >= least * (1 - 2**-8)).all(), f"{out.flatten()[0]}; the last four tiles alone make it {least}"
    with accumulator_bits(0):
        exact, _ = fp8_forward(q, k, v, causal=False)
    assert (out < exact).all(), "nothing was lost in the first tile: these are no sums of 14 bits"
    with pytest.raises(KeyError), accumulator_bits(0):
        raise KeyError
    assert torch.equal(fp8_forward(q, k, v, causal=False)[0], out), "the sums stay exact behind the block"


# ------------------------------------------------------------------------------------------------ orders of the warps

RACE = (1, 70, 560, 1, 1, 64, True, 455)  # both stages in their second round, and a tile without a visible key
ORDERS = {"racing": _cuda.racing(4), "warp 0 ahead": _cuda.ahead(0), "warp 4 ahead": _cuda.ahead(4)}


@pytest.mark.parametrize("name", ORDERS)
def test_the_bits_are_the_same_in_this_order_of_the_warps(name):
    assert_same_bits(check, RACE, {name: ORDERS[name]})


@pytest.mark.prove
def test_the_bits_are_the_same_when_any_warp_is_ahead_or_behind():
    for case in (RACE, (1, 129, 400, 1, 1, 128, True, 271)):
        orders = [REVERSE, *_cuda.uneven(THREADS), *map(_cuda.racing, range(2, 8))]
        assert_same_bits(check, case, {order: order for order in orders})


def assert_same_bits(check, case, orders):
    first = check(case)
    for name, order in orders.items():
        try:
            again = check(case, order)
        except CudaError as error:
            raise AssertionError(f"{case}, {name}: {error}") from None
        for what, x, y in zip(("out", "LSE"), first, again, strict=True):
            assert torch.equal(x, y), f"{case}, {name}: {what} has other bits than forward"


@pytest.mark.parametrize("order", [FORWARD, _cuda.ahead(4), _cuda.ahead(8)])
def test_the_two_consumers_take_turns_at_the_tensor_cores(order):
    given = inputs(1, 100, 300, 1, 1, 64, "cpu")  # one block; three tiles of keys are four turns
    fp8_forward(*given, causal=False, order=order)
    assert turns(fp8.SOURCE) == [0, 1] * 4


def test_sectors_asked_for_are_those_predicted():
    for causal in (True, False):
        for B, S_q, S_k, N, N_kv, D in ((1, 200, 260, 2, 1, 64), (2, 20, 150, 1, 1, 128)):
            predicted = fp8.sectors(B, S_q, S_k, N, D, band(S_q, S_k, causal)[1])
            counted = fp8.count(prepare(*inputs(B, S_q, S_k, N, N_kv, D, "cpu")), S_k, causal, 0)
            assert counted == predicted, f"causal {causal}: {counted} sectors, {predicted} predicted"
    tiles = 200 + 128 + 200 + 128 + 256  # by hand: q; k of 1 and of 2 tiles, where there are 200; v in whole tiles
    assert fp8.sectors(1, 200, 200, 1, 64, 0) == tiles * 64 // 32
    given = prepare(*inputs(1, 200, 260, 1, 1, 64, "cpu"))  # of two tiles of queries the first sees no key
    assert fp8.sectors(1, 200, 260, 1, 64, -130) == fp8.count(given, 260, True, -130) == (72 + 128 + 128) * 64 // 32


# --------------------------------------------------------------------------------------------------- compiled for GPUs


def machine_code(cubin, D):
    """The SASS of the kernel for head dim D."""
    return next(part for part in _cuda.functions(cubin) if f"ILi{D}E" in part.split("\n")[0])


def assert_a_loop_has_its_exponentials_between_its_waits(code):
    """A wait that leaves one group, 64 weights and 2 factors, a wait that leaves none. No mask in the way."""
    words = re.findall(r"DEPBAR\.LE gsb0, 0x[01]|MUFU\.EX2", code)
    at = words.index("DEPBAR.LE gsb0, 0x1")
    between = words[at + 1 : at + 1 + words[at + 1 :].index("DEPBAR.LE gsb0, 0x0")]
    assert len(between) == 66, f"{len(between)} exponentials run beside the product of the values, and not 66"


@pytest.mark.prove
@NVCC
def test_no_stack_frame_and_exponentials_lie_between_the_two_waits(tmp_path):
    cubin = tmp_path / "attention.cubin"
    used = _cuda.resources(fp8.SOURCE, "sm_90a", cubin)["attention_fp8"]
    assert used.stack == used.spills == 0, f"{used.stack} bytes in local memory"
    # setmaxnreg moves registers between warps and counts on an even split
    assert used.registers == 65536 // THREADS // 8 * 8
    assert 128 * 128 + 4 * KEYS * 128 + used.shared <= 227 * 1024
    for code, product in ((machine_code(cubin, 128), "64x128x32"), (machine_code(cubin, 64), "64x64x32")):
        assert "QGMMA.64x128x32.F32.E4M3.E4M3" in code
        assert re.search(rf"QGMMA.{product}\S+ R\d+, R\d+, gdesc", code), "the weights come from registers"
        assert "UTMALDG.4D" in code and "F2FP.SATFINITE.E4M3" in code and not re.search(r"\b(LDL|STL)\b", code)
        assert max(map(int, re.findall(r"\bR(\d+)\b", code))) < 240
        assert_a_loop_has_its_exponentials_between_its_waits(code)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_what_the_kernel_cannot_do_is_refused_in_one_line():
    q, k, v = inputs(1, 8, 8, 4, 2, 64, "cpu")
    for words, given in (
        ("q is torch.float32; the CUDA kernel takes bfloat16", [q.float(), k, v]),
        ("do not fit", [q, k, v[:, :4]]),
        ("an empty tensor has no tile", [q, k[:, :0], v[:, :0]]),
        ("at most 65535", [x.expand(65536, -1, -1, -1) for x in (q, k, v)]),
        ("at most 65535", [q[:, :, :1].expand(-1, -1, 65536, -1), k, v]),
        *(("has no backward pass", [x.clone().requires_grad_(x is y) for x in (q, k, v)]) for y in (q, k, v)),
    ):
        assert_refused(words, fp8_forward, *given, causal=True)
    with torch.no_grad():
        fp8_forward(q.clone().requires_grad_(), k, v, causal=True)


def test_a_wrong_option_is_one_line_and_exit_code_2():
    for options, message in {
        "--seq 0": "--seq 0 is too small; use 1 or more",
        "--keys -3": "--keys -3 is too small; use 1 or more",
        "--kv-heads 0": "--kv-heads 0 is too small; use 1 or more",
        "--heads 3 --kv-heads 2": "--kv-heads 2 does not divide --heads 3; use a divisor of it",
        "--resources --spread": "--resources says what nvcc makes of the kernel and ends; leave out --spread",
        "--head-dim 96": "argument --head-dim: invalid choice: 96",
        "--head-dim nan": "argument --head-dim: invalid int value: 'nan'",
        "--per": "unrecognized arguments: --per",
    }.items():
        assert refusal(fp8.main, options).startswith(message)


def test_a_kernel_that_writes_nothing_does_not_pass(monkeypatch):
    monkeypatch.setattr(fp8, "attend", lambda given, *_, **__: (torch.full(given.q.shape, math.nan), None))
    monkeypatch.setattr(fp8, "cuda_forward", lambda q, *_, **__: (q, None))
    made = []
    monkeypatch.setattr(fp8, "prepare", lambda *given, **how: made.append(how) or prepare(*given, **how))
    words = ["--seq", "8", "--keys", "8", "--per-tensor", "--spread"]
    wrong = fp8.demo(fp8.parse(words)[1], "cpu")
    assert any(": nan from the formula" in line for line in wrong), wrong
    assert made and all(how == {"per_head": False, "spread": True} for how in made), made
