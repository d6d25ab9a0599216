"""ELU four ways, against float64; what divergence and fusion cost, counted."""

from pathlib import Path

import elu as chapter
import pytest
import torch
import torch.nn.functional as F
from _cuda import FORWARD, REVERSE
from _interpreter import INTERPRETED
from elu import elu, errors
from harness.programs import assert_refused, printed_json, refusal

HERE = Path(__file__).resolve().parent
DEVICE = "cpu" if INTERPRETED else "cuda"
OURS = ("eager", "triton", "cuda")


def inputs(n=5003, scale=4.0, device=DEVICE):
    return (scale * torch.randn(n, generator=torch.Generator().manual_seed(n))).to(device)


@pytest.mark.parametrize("version", OURS)
def test_output_and_gradient_are_as_exact_as_those_of_pytorch(version):
    cases = (5003, 4.0, 1.0), (1, 1.0, 1.0), (1027, 1e-3, 1.7), (1024, 100.0, 0.3), (258, 1e30, 1.0), (9, 4.0, 0.0)
    for n, scale, alpha in cases:
        y_error, dx_error = errors(inputs(n, scale), alpha, lambda x, a=alpha: elu(x, a, version))
        assert y_error <= 2 and dx_error <= 2, f"{version}, {n} elements times {scale}: {y_error}, {dx_error}"


@pytest.mark.parametrize("version", OURS)
def test_infinities_nan_and_zero_behave_as_in_pytorch(version):
    values = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 1e-40], device=DEVICE)
    got, want = values.clone().requires_grad_(), values.clone().requires_grad_()
    y, expected = elu(got, 1.5, version), F.elu(want, 1.5)
    assert torch.allclose(y, expected, equal_nan=True)
    assert torch.equal(y[:2].signbit(), expected[:2].signbit()), "0.0 and -0.0"
    y.sum().backward()
    expected.sum().backward()
    at_zero = values == 0  # the derivative jumps there, from alpha to 1
    plain = ~at_zero & ~values.isnan()
    assert torch.allclose(got.grad[plain], want.grad[plain])
    assert torch.isin(got.grad[at_zero], torch.tensor([1.0, 1.5], device=DEVICE)).all()


@pytest.mark.parametrize("version", ["triton", "cuda"])
def test_views_empty_tensors_and_gradients_with_strides_of_zero(version):
    x = inputs(4000).view(40, 100).t()[::3, 1:]  # neither contiguous nor aligned
    leaf = x.clone().requires_grad_()
    y = elu(leaf.t()[1:], 1.0, version)
    assert torch.allclose(y, F.elu(x.t()[1:]), atol=1e-6)
    y.sum().backward()
    assert torch.allclose(leaf.grad[:, 1:], torch.where(x > 0, 1.0, x.exp())[:, 1:], atol=1e-6)
    assert (leaf.grad[:, 0] == 0).all()
    odd = inputs(9)[1:].requires_grad_()  # contiguous, from an address that is no multiple of 16
    assert torch.allclose(elu(odd, 1.0, version), F.elu(odd), atol=1e-6)
    dy = inputs(9)[1:]  # and so is this gradient
    (dx,) = torch.autograd.grad(elu(odd, 1.0, version), odd, dy)
    assert torch.allclose(dx, torch.where(odd > 0, dy, dy * odd.exp()), atol=1e-5)
    assert torch.equal(elu(odd, 2, version), elu(odd, 2.0, version))
    empty = torch.zeros(0, 3, device=DEVICE, requires_grad=True)
    elu(empty, 1.0, version).sum().backward()
    assert empty.grad.shape == (0, 3)
    (dx,) = torch.autograd.grad(elu(odd, 1.0, version).square().sum(), odd, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # and not a second derivative that lacks a term
        dx.square().sum().backward()


@pytest.mark.parametrize("version", ["triton", "cuda"])
def test_only_the_output_is_kept_for_backward(version):
    x = inputs(100).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = elu(x, 1.0, version)
    assert [t.data_ptr() for t in kept] == [y.data_ptr()]


def test_nothing_is_written_behind_the_end_and_the_order_of_threads_does_not_matter():
    for n in (1, 4, 1025, 1026, 1027):
        results = []
        for order in (FORWARD, REVERSE, 3):
            x, field = inputs(n, device="cpu"), torch.full((n + 1024,), float("nan"))
            chapter.call("elu.cu", "run_elu_forward", n, 1.0, x, field, order=order)
            assert field[n:].isnan().all() and field[:n].isfinite().all()
            results.append(field[:n])
            back = torch.full_like(field, float("nan"))
            chapter.call("elu.cu", "run_elu_backward", n, 1.0, x, x, back, order=order)
            assert back[n:].isnan().all() and back[:n].isfinite().all()
        assert all(torch.equal(results[0], other) for other in results)
    x, field = inputs(1500), torch.full((2048,), float("nan"), device=DEVICE)
    chapter.forward_kernel[(2,)](x, field, 1500, 1.0, BLOCK=1024)
    assert field[1500:].isnan().all() and field[:1500].isfinite().all()
    field.fill_(float("nan"))
    chapter.backward_kernel[(2,)](x, x, field, 1500, 1.0, BLOCK=1024)
    assert field[1500:].isnan().all() and field[:1500].isfinite().all()


def test_fp16_is_computed_in_fp32():
    y_error, dx_error = errors(inputs(3000).half(), 1.2, lambda x: elu(x, 1.2, "triton"))
    assert y_error <= 2 and dx_error <= 2


@pytest.mark.prove
def test_torch_compile_gives_the_same_numbers():
    x = inputs(2000)
    with torch.no_grad():  # forward alone: a compilation takes seconds
        assert torch.allclose(elu(x, 1.1, "compile"), F.elu(x, 1.1), atol=1e-6)


# ----------------------------------------------------------------------------------------------- divergence and fusion


def test_a_warp_goes_every_path_that_one_of_its_lanes_takes():
    counted = chapter.divergence(2048)
    alternate, agree = counted["lanes alternate"], counted["warps alternate"]
    assert alternate.paths == 2 * alternate.path_requests
    assert agree.paths == agree.path_requests
    assert alternate.load_sectors == agree.load_sectors  # the same work on the same bytes


def test_fusing_bias_and_gelu_moves_2n_numbers_instead_of_7n():
    x, bias = torch.randn(32, 64), torch.randn(64)
    want = F.gelu(x.double() + bias)
    for run, kernels, moved in ((chapter.gelu_in_three, 3, 7), (chapter.gelu_in_one, 1, 2)):
        y, counted = run(x, bias, counting=True)
        assert chapter.rms(y - want) <= 2 * chapter.rms(F.gelu(x + bias) - want) + 1e-7
        assert len(counted) == kernels
        assert chapter.numbers_moved(counted, x.numel()) == moved
        y, _ = run(x[:5, :60].contiguous(), bias[:60], counting=True)  # 300 numbers: a block and a part of one
        assert chapter.rms(y - want[:5, :60]) <= 1e-6


def test_eager_moves_42_bytes_per_element_and_one_kernel_8():
    x = inputs(1000)
    with chapter.Traffic() as traffic, torch.no_grad():
        chapter.elu_eager(x)
    assert traffic.bytes == 42 * 1000
    x, y = inputs(1024, device="cpu"), torch.empty(1024)
    counted = chapter.call("elu.cu", "run_elu_forward", 1024, 1.0, x, y, counting=True)
    assert (counted.load_sectors + counted.store_sectors) * 32 == 8 * 1024


COMPILE = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import elu
for arch in (80, 90):
    for kernel, pointers in ((elu.forward_kernel, 2), (elu.backward_kernel, 3)):
        types = dict(zip(kernel.arg_names, ["*bf16"] * pointers + ["i32", "fp32", "constexpr"]))
        built = triton.compile(ASTSource(kernel, types, {(pointers + 2,): 1024}), target=GPUTarget("cuda", arch, 32))
        print(json.dumps([arch, len(built.asm["cubin"]) > 0]))
"""


@pytest.mark.prove
def test_the_triton_kernels_compile_for_gpus():
    found = printed_json("-c", COMPILE, TRITON_INTERPRET="0", PYTHONPATH=str(HERE))
    assert found == [[80, True]] * 2 + [[90, True]] * 2


# ------------------------------------------------------------------------------------------------------------ bad input


def test_what_cannot_be_right_is_refused_in_one_line():
    x = torch.zeros(4)
    far = torch.empty(1).expand(2**31 - 1024)
    for message, arguments in {
        "version 'fast' does not exist; there are eager": (x, 1.0, "fast"),
        "alpha -1.0 must be 0 or more": (x, -1.0, "triton"),
        "alpha nan must be 0 or more": (x, float("nan"), "cuda"),
        "version cuda takes torch.float32, not torch.float16; cast x first": (x.half(), 1.0, "cuda"),
        "version triton takes .*, not torch.int64": (x.long(), 1.0, "triton"),
        "elu.cu counts them in 32 bits; split x": (far, 1.0, "cuda"),
    }.items():
        assert_refused(message, elu, *arguments)
    chapter.check_elu(far[1:], 1.0, "cuda")
    chapter.check_elu(far, 1.0, "triton")
    if INTERPRETED:
        assert_refused(r"not torch\.bfloat16", elu, x.bfloat16(), 1.0, "triton")


def test_a_wrong_option_is_one_line_and_exit_code_2(monkeypatch):
    for options, message in {
        "--size 0": "--size 0 must be at least 1",
        "--alpha -2": "--alpha -2.0 must be 0 or more, and finite in float32",
        "--alpha 1e31": "--alpha 1e+31 must be 0 or more, and finite in float32",
        "--alpha inf": "--alpha inf must be 0 or more, and finite in float32",
        "--alpha nan": "--alpha nan must be 0 or more, and finite in float32",
        "--show --size 7": "--show prints the code and ends; leave out --size",
        "--show --alpha 2 --compile": "--show prints the code and ends; leave out --alpha --compile",
    }.items():
        assert refusal(chapter.main, options) == message
    seen = []
    monkeypatch.setattr(chapter, "demo", lambda *given: seen.append(given) or 0)
    for options in ("--size 1 --alpha 0", "--alpha 1e30 --compile"):  # what is just let through
        monkeypatch.setattr("sys.argv", ["elu.py", *options.split()])
        assert chapter.main() == 0
    assert [given[:2] for given in seen] == [(1, 0.0), (5003, 1e30)] and seen[1][3], seen


def test_a_version_that_computes_nothing_does_not_pass(monkeypatch, capsys):
    monkeypatch.setattr(chapter, "elu", lambda x, **_: x * float("nan"))
    monkeypatch.setattr(chapter, "divergence", dict)
    assert chapter.demo(8, 1.0, DEVICE, False) == 1
    said = capsys.readouterr().out
    assert "triton: error of y over F.elu's is nan" in said and "PASS" not in said
