"""The warp-specialised forward pass against the definition in float64, with the cases of test_flash_kernels.py; and
what the compiler makes of it for a GPU that need not be there.

In the interpreter the kernel's numbers are checked, and on a Hopper GPU the kernel itself. Whether the labour is
divided among warps can only be read from the binary.
"""

import json
import math

import flash_attention_hopper
import pytest
import torch
from _flash_launch import Tiles
from _interpreter import INTERPRETED
from flash_attention_hopper import SPECIALISED, specialised_forward
from flash_kernels import flash_attention, triton_backward, triton_forward
from harness.reference import assert_same
from test_flash_kernels import (
    CASES,
    DEVICE,
    HOPPER,
    check_against_the_definition,
    check_binary,
    compiled,
    inputs,
)

on_hopper = pytest.mark.skipif(not HOPPER, reason="the warp-specialised kernel is for sm_90")
HALF = torch.float16
if why_not := flash_attention_hopper.refusal():
    pytest.skip(f"another Triton is needed: {why_not}", allow_module_level=True)


def test_a_compiler_that_was_seen_to_be_wrong_is_refused_in_one_line(monkeypatch):
    q = torch.zeros(1, 16, 1, 32, dtype=torch.float16)
    monkeypatch.setattr(flash_attention_hopper, "INTERPRETED", False)
    monkeypatch.setattr(flash_attention_hopper, "OLD", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(ValueError, match=r"Triton .* divides the warps wrongly; use 3\.7 or later") as error:
        specialised_forward(q, q, q, causal=True)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(flash_attention_hopper, "OLD", False)
    assert flash_attention_hopper.refusal() == ""


@on_hopper
def test_the_warp_specialised_forward_is_as_exact():
    check_against_the_definition(specialised_forward, triton_backward, CASES, HALF)
    check_against_the_definition(specialised_forward, triton_backward, CASES[2:3], HALF, strided=True)


@on_hopper
def test_output_and_log_sum_exp_are_those_of_the_plain_kernel():
    for *sizes, causal, window, offset in (CASES[0], CASES[5]):
        q, k, v, _ = inputs(*sizes, HALF)
        mask = dict(causal=causal, window=window, offset=offset)
        for name, x, y in zip(
            ("out", "lse"), specialised_forward(q, k, v, **mask), triton_forward(q, k, v, **mask), strict=True
        ):
            assert_same(x, y, 2e-3, f"{name} of {sizes} {mask}")


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's tiles are larger, and have one size that the compiler understands")
def test_it_makes_no_difference_how_the_sequence_is_cut_into_tiles():
    q, k, v, _ = inputs(64, 64, 2, 1, 32)
    want = specialised_forward(q, k, v, causal=True)
    for tiles in (Tiles(16, 32), Tiles(64, 64), Tiles(16, 16)):
        for name, x, y in zip(
            ("out", "lse"), specialised_forward(q, k, v, causal=True, tiles=tiles), want, strict=True
        ):
            assert_same(x, y, 1e-5, f"{name} in tiles of {tiles.rows} x {tiles.columns}")


@on_hopper
def test_a_model_can_take_it_as_its_attention_and_gets_gradients():
    got, want = [], []
    for found, version in ((got, dict(version=SPECIALISED)), (want, {})):
        q, k, v, dout = inputs(40, 40, 4, 2, 32, HALF)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        flash_attention(*leaves, causal=True, **version).backward(dout)
        found += [x.grad for x in leaves]
    for name, x, y in zip("qkv", got, want, strict=True):
        assert_same(x, y, 4e-3, f"gradient of {name}")


@on_hopper
def test_a_query_without_keys_has_output_zero_and_lse_minus_infinity():
    q, k, v, _ = inputs(40, 40, 2, 1, 32, HALF)
    out, lse = specialised_forward(q, k, v, causal=True, offset=-10)
    assert (out[:, :10] == 0).all() and (lse[..., :10] == -math.inf).all()
    assert out.isfinite().all() and lse[..., 10:].isfinite().all()


@on_hopper
def test_a_nan_stays_in_its_sequence_and_its_head():
    """Ragged lengths: a tile that ran on into the next sequence or head would bring the NaN along, as 0 · NaN."""
    q, k, v, _ = inputs(37, 37, 2, 2, 48, HALF, B=2)
    for x in (q, k, v):
        x[1], x[0, :, 1] = math.nan, math.nan
    out, lse = specialised_forward(q, k, v, causal=False)
    assert out[0, :, 0].isfinite().all() and lse[0, 0].isfinite().all()
    assert out[1].isnan().all() and out[0, :, 1].isnan().all()


@pytest.mark.skipif(not INTERPRETED, reason="the tiles of a GPU are larger than this test's")
def test_tiles_of_keys_that_no_query_sees_are_never_loaded():
    q, k, v, _ = inputs(64, 160, 2, 1, 32)
    k[:, :32], v[:, :32], k[:, 128:], v[:, 128:] = math.nan, math.nan, math.nan, math.nan
    out, lse = specialised_forward(q, k, v, causal=True, window=33, offset=64)  # keys 32..127 are seen
    assert out.isfinite().all() and lse.isfinite().all()


@on_hopper
def test_every_number_is_written_and_two_runs_give_the_same_bits():
    """PyTorch fills what is allocated and not written with NaN, if asked to."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        q, k, v, _ = inputs(37, 71, 2, 1, 48, HALF)
        first, second = (specialised_forward(q, k, v, causal=False) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for x, y in zip(first, second, strict=True):
        assert not x.isnan().any() and torch.equal(x, y)


def test_what_the_kernel_cannot_do_is_refused_in_one_line():
    def tensors(D):
        return [torch.empty(1, 8, heads, D, dtype=HALF, device="meta") for heads in (4, 2, 2)]

    refused = {"head dim 256 does not fit": tensors(256), "head dim 40": tensors(40)}
    for words, given in refused.items():
        with pytest.raises(ValueError, match=words) as error:
            specialised_forward(*given, causal=True)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("capability", "words"), [((9, 0), "float32 has no"), ((8, 0), "A chip is no sm_90")], ids=str)
def test_on_a_gpu_float32_and_older_chips_are_refused(capability, words, monkeypatch):
    monkeypatch.setattr("flash_attention_hopper.INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "A chip")
    with pytest.raises(ValueError, match=words):
        specialised_forward(*inputs(32, 32, 2, 1, 32)[:3], causal=True)


@pytest.mark.prove
def test_the_compiler_makes_twelve_warps_of_four_within_the_limits_of_the_chip():
    out, err = compiled(90, "float16", "64", "bfloat16", "128", "--only", "specialised").communicate(timeout=300)
    kernels = [json.loads(line) for line in out.splitlines()]
    assert [kernel["kernel"] for kernel in kernels] == 2 * ["specialised"], err[-2000:]
    for kernel in kernels:
        check_binary(kernel)
        assert kernel["warps"] == 12 and kernel["specialized"] and kernel["wgmma"] and kernel["tma"], kernel
        assert kernel["spilled"] == 0, kernel
