"""The same steps by other means: fused kernels, low precision, CUDA on a stand-in for a GPU, torch.compile."""

import math
import sys

import pytest
import torch
from harness.oracle import assert_same
from test_train import arguments, f64, losses, train_on


def numbers(ranks, words, out, **sizes):
    """Losses and norms of a run, as one tensor."""
    return f64(list(losses(train_on(ranks, [*words, "--out", str(out)], **sizes)[0]).values()))


KERNEL_LAYOUTS = [(1, ""), (2, "--tp 2 --sequence-parallel"), (2, "--cp 2 --cp-kind zigzag --experts 2 --ep 2")]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.turn(3)
@pytest.mark.parametrize(("ranks", "layout"), KERNEL_LAYOUTS, ids=lambda value: str(value) or "plain")
def test_fused_kernels_change_no_loss_beyond_the_last_digits_of_fp32(ranks, layout, text, tmp_path):
    words = [*arguments(text, steps=2, global_batch=4, eval_samples=1, precision="fp32", warmup=0), *layout.split()]
    plain = numbers(ranks, [*words, "--kernels", "torch"], tmp_path / "torch", hidden=128, layers=1)
    fused = numbers(ranks, [*words, "--kernels", "triton"], tmp_path / "triton", hidden=128, layers=1)
    assert not torch.equal(plain, fused), "the kernels did not run"
    assert_same(fused, plain, 1e-5, "losses and norms of two steps")


@pytest.mark.turn(3)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8-row", "bf16-master", "fp8-tensor", "fp8-block"])
def test_low_precision_in_a_layout_is_as_near_to_fp32_as_on_one_rank(precision, text, tmp_path):
    words = arguments(text, steps=6, zero=1)
    exact = numbers(1, [*words, "--precision", "fp64"], tmp_path / "exact")
    alone = numbers(1, [*words, "--precision", precision], tmp_path / "alone")
    error = ((alone - exact) / exact).abs().max()
    assert 1e-6 < error < 0.1, f"{precision} on one rank is {error:.1e} away from fp64"
    for name, layout in (("dp", ""), ("tp", "--tp 2 --sequence-parallel"), ("pp", "--pp 2 --schedule zb-h1")):
        many = numbers(2, [*words, "--precision", precision, *layout.split()], tmp_path / name)
        apart = ((many - exact) / exact).abs().max()
        # A tensor-parallel sum adds numbers that were rounded on each rank: one more rounding of the format.
        rounding = torch.finfo(torch.float16 if precision == "fp16" else torch.bfloat16).eps / 2
        assert apart < max(2 * error, rounding), f"{name}: {apart:.1e} away from fp64, on one rank {error:.1e}"


def test_in_fp16_a_step_that_overflows_is_left_out_on_all_ranks_and_the_scale_is_halved(text, tmp_path):
    words = arguments(text, precision="fp16", steps=6, loss_scale=2.0**40, micro_batch=4)
    log, _ = train_on(2, [*words, "--out", str(tmp_path / "run")])
    left_out = [not math.isfinite(norm) for _, norm in losses(log).values()]
    assert left_out[0], "a loss scale of 2^40 overflows fp16"
    scales = [line["loss_scale"] for line in log if "loss" in line]
    for before, after, skipped in zip(scales, scales[1:], left_out[1:], strict=False):
        assert after == (before / 2 if skipped else before)
