"""Attention in CUDA for Hopper, emulated on the CPU: against the definition in float64, in every order of its warps;
who has the tensor cores when; and what nvcc makes of it for a GPU that need not be there."""

import math
import re

import _cuda
import flash_attention_cuda as cuda
import pytest
import torch
from _cuda import FORWARD, REVERSE
from _interpreter import INTERPRETED
from flash_attention_cuda import CUDA, THREADS, cuda_forward, errors, inputs, sectors, turns
from flash_kernels import flash_attention, triton_forward
from flash_tiles import band, explicit_attention, step
from harness.programs import assert_refused, refusal
from harness.reference import assert_same
from test_flash_attention_fp8 import CASES as CASES_IN_FP8
from test_flash_attention_fp8 import (
    NVCC,
    assert_a_loop_has_its_exponentials_between_its_waits,
    assert_a_nan_stays,
    assert_same_bits,
    machine_code,
)

MORE = (1, 530, 300, 1, 1, 64, True, -230)  # the first of its tiles of queries sees no key
CASES = CASES_IN_FP8 | {"five tiles of queries, for two blocks": MORE}


def check(case, order=FORWARD):
    *sizes, causal, offset = case
    given = inputs(*sizes, "cpu")
    out, lse = cuda_forward(*given, causal=causal, offset=offset, order=order)
    off, of_lse = errors(out, lse, *given, causal, offset)
    # Weights are rounded to bf16 before the product, and the result after it: two roundings of 2^-9 of the largest.
    assert off <= 2 * 2**-9 + 2**-12, f"{case}: out is off by {off:.1e} of its largest element"
    assert of_lse <= 1e-5, f"{case}: the LSE is off by {of_lse:.1e}"
    return out, lse


@pytest.mark.always("uneven, three heads a group, two sequences", "a later chunk of a ring", "heads of 128, uneven")
@pytest.mark.parametrize("name", CASES)
def test_output_and_lse_are_those_of_the_definition_in_float64(name):
    check(CASES[name])


def test_rows_without_keys_have_output_zero_and_lse_minus_infinity():
    out, lse = check(CASES["more queries than keys, the first without any"])
    assert (out[:, :110] == 0).all() and (lse[..., :110] == -math.inf).all()
    assert lse[..., 110:].isfinite().all()
    given = inputs(1, 10, 10, 1, 1, 64, "cpu")  # a block in which nobody sees a key: no tile is ordered
    out, lse = cuda_forward(*given, causal=True, offset=-10)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_errors_are_at_most_one_and_a_half_times_those_of_plain_attention_in_bf16():
    given = inputs(1, 140, 140, 2, 1, 64, "cpu")
    want = explicit_attention(*(x.double() for x in given), causal=True)
    theirs = (explicit_attention(*given, causal=True).double() - want).square().mean().sqrt()
    ours = (cuda_forward(*given, causal=True)[0].double() - want).square().mean().sqrt()
    assert ours <= 1.5 * theirs, f"off by {ours:.1e}, attention in bf16 by {theirs:.1e}"


def test_scores_in_the_thousands_do_not_overflow_and_the_lse_is_theirs():
    q, k, v = inputs(1, 40, 140, 1, 1, 64, "cpu")
    q, k = q * 40, k * 40
    out, lse = cuda_forward(q, k, v, causal=False)
    scores = torch.einsum("bsnd,btnd->bnst", q.double(), k.double()) / 8
    assert scores.max() > 3000 and out.isfinite().all()
    off = (lse - scores.logsumexp(-1)).abs() / scores.abs().amax(-1)
    assert off.max() <= 1e-6, f"the LSE is off by {off.max():.1e} of the largest score"


@pytest.mark.skipif(not INTERPRETED, reason="flash_kernels.py runs on a GPU there, and these tensors are on the CPU")
def test_it_agrees_with_the_triton_kernel():
    q, k, v = inputs(1, 20, 50, 2, 1, 64, "cpu")
    out, lse = cuda_forward(q, k, v, causal=True, offset=30)
    want, want_lse = triton_forward(q.float(), k.float(), v.float(), causal=True, offset=30)
    assert_same(out.float(), want, 8e-3, "out")
    assert_same(lse, want_lse, 1e-5, "lse")


def test_a_nan_stays_in_its_sequence_and_its_head():
    assert_a_nan_stays(cuda_forward)


# Two heads of three tiles of queries: a block takes the first and the last of a head, then the middle one of the other.
# Both stages come to their second round, and in the first consumer a last tile has no visible key.
RACE = (1, 330, 300, 2, 1, 64, True, -35)
ORDERS = {"in reverse": REVERSE, "shuffled": 7, "racing": _cuda.racing(4)}
ORDERS |= {f"warp {w} {f.__name__}": f(w) for w in (0, 4, 8) for f in (_cuda.ahead, _cuda.behind)}


@pytest.mark.always("racing", "in reverse")
@pytest.mark.parametrize("name", ORDERS)
def test_the_bits_are_the_same_in_this_order_of_the_warps(name):
    assert_same_bits(check, RACE, {name: ORDERS[name]})


@pytest.mark.prove
def test_the_bits_are_the_same_when_any_warp_is_ahead_or_behind():
    for case in (RACE, (1, 70, 560, 1, 1, 64, True, 455), (1, 129, 400, 1, 1, 128, True, 271)):
        orders = [*_cuda.uneven(THREADS), *map(_cuda.racing, range(2, 8))]
        assert_same_bits(check, case, {order: order for order in orders})


@pytest.mark.parametrize("order", [FORWARD, REVERSE, _cuda.ahead(4), _cuda.ahead(8), _cuda.racing(3)])
def test_the_two_consumers_take_turns_at_the_tensor_cores(order):
    given = inputs(1, 200, 300, 1, 1, 64, "cpu")  # one block, two tiles of queries; three tiles of keys are four turns
    cuda_forward(*given, causal=False, order=order)
    assert turns() == [0, 1] * 8


def test_a_block_takes_its_tiles_of_queries_in_pairs_that_cost_the_same():
    """The order of `Work`, read from the tiles of keys that a block walks along between two tiles of queries."""
    for S, first, second in ((640, [5, 1, 3], [4, 2]), (1024, [8, 1, 6, 3], [7, 2, 5, 4])):
        given = inputs(1, S, S, 1, 1, 64, "cpu")
        cuda_forward(*given, causal=True)  # the emulation runs two blocks, one after the other
        assert cuda.tiles_taken() == first + second, f"{S} tokens"


def test_sectors_asked_for_are_those_predicted_and_tiles_beyond_the_diagonal_are_not():
    for B, S_q, S_k, N, N_kv, D in ((1, 200, 260, 2, 1, 64), (2, 20, 150, 1, 1, 128)):
        for causal in (True, False):
            last = band(S_q, S_k, causal)[1]
            predicted = sectors(B, S_q, S_k, N, D, last)
            assert cuda.count(inputs(B, S_q, S_k, N, N_kv, D, "cpu"), last) == predicted, f"causal {causal}"
    assert sectors(1, 200, 260, 1, 64, 0) == (200 + 2 * 128 + 2 * 256) * 64 * 2 // 32  # by hand: 1 and 2 tiles of keys
    by_hand = (72 + 2 * 128) * 64 * 2 // 32  # of two tiles of queries the first sees no key, and loads nothing
    assert cuda.tiles_of_keys(384, 128, -300) == [0, 0, 1], "none, however far ahead the first key is"
    assert sectors(1, 200, 260, 1, 64, -130) == cuda.count(inputs(1, 200, 260, 1, 1, 64, "cpu"), -130) == by_hand


@pytest.mark.skipif(not INTERPRETED, reason="its backward is flash_kernels.py's, and these tensors are on the CPU")
def test_a_model_can_take_it_as_its_attention_and_gets_gradients():
    q, k, v = inputs(1, 40, 40, 2, 1, 64, "cpu")
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = step(lambda q, k, v: explicit_attention(q, k, v, causal=True), *(x.double() for x in (q, k, v, dout)))
    got = step(lambda q, k, v: flash_attention(q, k, v, causal=True, version=CUDA), q, k, v, dout)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert x.dtype == torch.bfloat16
        assert_same(x.double(), y, 5e-3, name)


def test_tensors_that_the_copy_engine_cannot_read_are_copied_first():
    q, k, v = inputs(1, 30, 30, 2, 2, 64, "cpu")
    want = cuda_forward(q, k, v, causal=True)
    odd = torch.cat((torch.zeros(1), q.flatten().float())).bfloat16()[1:].view(q.shape)  # an address of 2 bytes
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.cat((v, v), -1)[..., :64]
    assert cuda.fit(q) is q and cuda.fit(odd).data_ptr() % 16 == 0 and cuda.fit(turned).is_contiguous()
    for x, y in zip(cuda_forward(odd, turned, apart, causal=True), want, strict=True):
        assert torch.equal(x, y)


# --------------------------------------------------------------------------------------------------- compiled for GPUs


@pytest.mark.prove
@NVCC
def test_no_stack_frame_and_exponentials_lie_between_the_two_waits(tmp_path):
    cubin = tmp_path / "attention.cubin"
    used = _cuda.resources(cuda.SOURCE, "sm_90a", cubin)["attention_forward"]
    assert used.stack == used.spills == 0, f"{used.stack} bytes in local memory"
    # setmaxnreg moves registers between warps and counts on an even split
    assert used.registers == 65536 // THREADS // 8 * 8
    assert (2 * cuda.ROWS + 4 * cuda.KEYS) * 128 * 2 + used.shared <= 227 * 1024
    for code, product in ((machine_code(cubin, 128), "64x128x16"), (machine_code(cubin, 64), "64x64x16")):
        assert "HGMMA.64x128x16.F32.BF16" in code and re.search(rf"HGMMA.{product}\S+ R\d+, R\d+, gdesc\S+tnspB", code)
        assert "UTMALDG.4D" in code and "UTMASTG.4D" in code and not re.search(r"\b(LDL|STL)\b", code)
        assert highest_register_after(code, "USETMAXREG.DEALLOC") < 40, "the producer keeps 40 registers"
        assert_a_loop_has_its_exponentials_between_its_waits(code)


def highest_register_after(code, instruction):
    """Of the instructions that can run after this one: the largest number of a register."""
    rows = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", code)]
    places, todo, seen = {at: i for i, (at, _) in enumerate(rows)}, [], set()
    todo.append(next(i for i, (_, text) in enumerate(rows) if instruction in text))
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        text = rows[i][1]
        if "BRA" in text:
            todo.append(places[int(re.findall(r"0x[0-9a-f]+", text)[-1], 16)])
        if not re.match(r"(BRA\S* 0x|EXIT)", text):  # with a condition, it may also go on
            todo.append(i + 1)
    return max(int(number) for i in seen for number in re.findall(r"\bR(\d+)", rows[i][1]))


# ------------------------------------------------------------------------------------------------------------ bad input


def test_what_the_kernel_cannot_do_is_refused_in_one_line():
    def tensors(D=64, S=8, N=4, N_kv=2, dtype=torch.bfloat16):
        kv = torch.empty(1, S, N_kv, D, dtype=dtype)
        return [torch.empty(1, S, N, D, dtype=dtype), kv, kv]

    q, k, v = tensors()
    for words, given, options in (
        ("q is torch.float16; the CUDA kernel takes bfloat16", tensors(dtype=torch.float16), {}),
        ("v is torch.float32", [q, k, v.float()], {}),
        ("head dim 96 is not among", tensors(D=96), {}),
        ("do not fit", [q, k, v[:, :4]], {}),
        ("do not fit", [q, *tensors(D=128)[1:]], {}),
        ("do not fit", [torch.cat((q, q)), k, v], {}),
        ("pass 32 bits", [q[:, :1].expand(-1, 2**29, -1, -1), k, v], {}),
        ("pass 32 bits", [q, *(x[:, :1].expand(-1, 2**29, -1, -1) for x in (k, v))], {}),
        ("pass 32 bits", [x.expand(2**28, -1, -1, -1) for x in (q, k, v)], {}),
        ("an empty tensor has no tile", tensors(S=0), {}),
        ("4 query heads do not divide among 3", tensors(N_kv=3), {}),
        ("window 4: the CUDA kernel knows causal and offset only", [q, k, v], {"window": 4}),
        ("dtype None: the CUDA kernel writes bfloat16", [q, k, v], {"dtype": None}),
        ("q is on cpu and k on meta", [q, k.to("meta"), v.to("meta")], {}),
        ("q is on meta; the CUDA kernel runs on a GPU, or emulated", [x.to("meta") for x in (q, k, v)], {}),
    ):
        assert_refused(words, cuda_forward, *given, causal=True, **options)
    for given in ([x.expand(2**28 - 1, -1, -1, -1) for x in (q, k, v)], [q[:, :1].expand(-1, 2**29 - 1, -1, -1), k, v]):
        cuda.check(*given, None, torch.bfloat16)  # these just fit


def test_a_wrong_option_is_one_line_and_exit_code_2():
    for options, message in {
        "--seq 0": "--seq 0 is too small; use 1 or more",
        "--keys -3": "--keys -3 is too small; use 1 or more",
        "--kv-heads 0": "--kv-heads 0 is too small; use 1 or more",
        "--heads 3 --kv-heads 2": "--kv-heads 2 does not divide --heads 3; use a divisor of it",
        "--resources --seq 9": "--resources says what nvcc makes of the kernel and ends; leave out --seq",
        "--head-dim 96": "argument --head-dim: invalid choice: 96",
        "--head-dim nan": "argument --head-dim: invalid int value: 'nan'",
    }.items():
        assert refusal(cuda.main, options).startswith(message)


def test_a_kernel_that_writes_nothing_does_not_pass(monkeypatch):
    def nothing(q, k, v, **mask):
        return torch.full_like(q, math.nan), torch.full((1, q.shape[2], q.shape[1]), math.nan)

    monkeypatch.setattr(cuda, "cuda_forward", nothing)
    options = cuda.argparse.Namespace(seq=8, keys=8, heads=1, kv_heads=1, head_dim=64)
    wrong = cuda.demo(options, "cpu")
    assert any(": off by nan" in line for line in wrong), wrong
