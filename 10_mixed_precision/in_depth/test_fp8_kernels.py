"""The Triton kernels against fp8.py, in Triton's interpreter; and compiled for sm_90, which needs no GPU.

Triton decides when it is imported whether it interprets or compiles, and other tests have imported it by now. So all
cases run in one process of their own, started once, and each test looks at what happened to its case.
"""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def run_in(mode: str, cases: list[str]) -> dict[str, str]:
    """Results of the cases, "" or a traceback; "interpret" or "compile"."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if mode == "interpret" else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"import test_fp8_kernels as t; t.run_cases({cases})"]
    paths = [str(HERE), str(HERE.parents[1] / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_cases(cases: list[str]) -> None:
    results = {}
    for name in cases:
        try:
            results[name] = globals()[name]() or ""
        except Exception as error:  # one case, of which its test then tells
            results[name] = "".join(traceback.format_exception(error))
    print(json.dumps(results))


@pytest.fixture(scope="module")
def interpreted(request):
    asked = {item.name for item in request.session.items}
    results = run_in("interpret", [case for test, case in CASES.items() if test in asked])
    return {test: results[case] for test, case in CASES.items() if test in asked}


# ------------------------------------------------------------------------------------------------------------- cases


def numbers(rows: int, columns: int, seed: int = 0):
    import torch

    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-4, 3, rows)[:, None] * torch.logspace(-2, 2, columns)


def interpret_amax() -> None:
    import fp8_kernels as k
    import torch

    for shape in ((3, 5), (100, 257)):
        x = numbers(*shape)
        assert k.amax(x).item() == x.abs().max().item()
        assert k.amax(x.half()).item() == x.half().abs().max().item()
        assert k.amax(x.T).item() == x.abs().max().item(), "a transposed view"
        for bad in (torch.nan, torch.inf, -torch.inf):
            x[1, 2] = bad
            assert k.amax(x).item() == torch.inf, f"{bad} was passed over"


def interpret_quantize() -> None:
    import fp8_kernels as k
    import torch
    from formats import FORMATS

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for block in k.MODES:
            x = numbers(200, 300)
            x[:128, 128:256] = 0  # a piece of zeros
            got, want = k.quantize(x, dtype, block), k.reference_quantize(x, dtype, block)
            assert got.block == block and torch.equal(got.scale, want.scale), f"scales of {block}"
            assert torch.equal(got.values.float(), want.values.float()), f"values of {block} in {dtype}"
    # Ties go to the even neighbour; subnormals, and what rounds up into the next power of two.
    e4m3 = FORMATS["e4m3"]
    x = torch.tensor([[124.1, 1.0625, 1.1875, 2**-10, 3 * 2**-10, 1e-9, -124.1, 448.0]]).repeat(16, 16)
    got = k.cast(x, torch.float8_e4m3fn, (0, 0), torch.tensor([[448.0]])).values
    assert torch.equal(got.double(), e4m3.round(x)), (got.double() - e4m3.round(x)).abs().max()


def interpret_saturation() -> None:
    import fp8_kernels as k
    import torch

    x = torch.tensor([[1.0, -1000.0, 3.0, 500.0]]).repeat(4, 8)
    got = k.cast(x, torch.float8_e4m3fn, (0, 0), torch.tensor([[2.0]])).dequantize()
    assert torch.equal(got, x.clamp(-2, 2)), got[0, :4]


def interpret_not_finite() -> None:
    import fp8_kernels as k
    import torch

    for block in k.MODES:
        for bad in (torch.nan, torch.inf):
            x = numbers(128, 256)
            x[5, 130] = bad
            scale = k.quantize(x, torch.float8_e4m3fn, block).scale
            assert (~torch.isfinite(scale)).sum() == 1, f"{bad} in {block} leaves no mark in the scales"


def interpret_layout() -> None:
    import fp8_kernels as k
    import torch

    x = numbers(256, 160)
    along, across, square = (k.quantize(x, torch.float8_e4m3fn, b) for b in ((1, 128), (128, 1), (128, 128)))
    assert along.values.is_contiguous() and square.values.is_contiguous()
    assert k.transpose(across).values.is_contiguous(), "what is summed along columns lies turned around"
    turned = k.rows_of(square.values.T)
    assert turned.is_contiguous() and torch.equal(turned.float(), square.values.float().T)


def interpret_both() -> None:
    import fp8_kernels as k
    import torch

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for block in ((1, 128), (1, 0)):
            for rows, columns in ((200, 300), (16, 130)):
                x = numbers(rows, columns)
                x[:128, 128:256] = 0  # a piece of zeros
                x[:, 3] = 0  # and a column
                for got, shape in zip(k.quantize_both(x, dtype, block), (block, block[::-1]), strict=True):
                    want = k.reference_quantize(x, dtype, shape)
                    assert got.block == shape and torch.equal(got.scale, want.scale), f"scales of {shape}"
                    assert torch.equal(got.values.float(), want.values.float()), f"values of {shape} in {dtype}"
    along, across = k.quantize_both(numbers(200, 300), torch.float8_e4m3fn, (1, 0))
    assert along.values.is_contiguous() and k.transpose(across).values.is_contiguous()
    for bad in (torch.nan, torch.inf):
        x = numbers(150, 140)
        x[5, 130] = bad
        for block in ((1, 128), (1, 0)):
            marks = [(~torch.isfinite(q.scale)).sum().item() for q in k.quantize_both(x, torch.float8_e4m3fn, block)]
            assert marks == [1, 1], f"{bad} in {block} leaves {marks} marks in the scales"


def interpret_bytes() -> str:
    """Bytes that the kernels read and write, counted by the interpreter itself, as JSON."""
    import fp8_kernels as k
    import torch
    from triton.runtime.interpreter import InterpreterBuilder

    moved = {"read": 0, "written": 0}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self, ptrs, mask, *more):
        moved["read"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(self, ptrs, mask, *more)

    def counted_store(self, ptrs, value, mask, *more):
        moved["written"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *more)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = counted_load, counted_store
    x, e4m3, found = numbers(256, 384).clamp(-6e4, 6e4).half(), torch.float8_e4m3fn, {}
    try:
        for name, run in (
            ("two calls", lambda: [k.quantize(x, e4m3, block) for block in ((1, 128), (128, 1))]),
            ("both, tiles", lambda: k.quantize_both(x, e4m3, (1, 128))),
            ("both, rows", lambda: k.quantize_both(x, e4m3, (1, 0))),
        ):
            moved.update(read=0, written=0)
            run()
            found[name] = [moved["read"], moved["written"]]
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
    return json.dumps(found)


def interpret_matmul() -> None:
    import fp8_kernels as k
    import torch
    from harness.oracle import assert_same

    e4m3 = torch.float8_e4m3fn
    for M, N, K in ((130, 200, 300), (128, 128, 128), (300, 40, 520)):
        a, b = numbers(M, K), numbers(N, K, seed=1)
        for block_b in ((128, 128), (1, 128)):
            x, w = k.quantize(a, e4m3, (1, 128)), k.quantize(b, e4m3, block_b)
            want = k.emulated_matmul(x, w, torch.float32)
            assert_same(k.scaled_matmul(x, w, torch.float32), want, 1e-5, f"{M} x {N} x {K}, {block_b}")
        # Wgrad: both operands turned around.
        x, dy = k.quantize(numbers(M, K), e4m3, (128, 1)), k.quantize(numbers(M, N), e4m3, (128, 1))
        got = k.scaled_matmul(k.transpose(dy), k.transpose(x), torch.float32)
        assert_same(got, k.emulated_matmul(k.transpose(dy), k.transpose(x), torch.float32), 1e-5, "Wgrad")


def as_the_gpu_wants_them(product, a, b, dtype):
    """A product that takes 16 numbers at a time, in each direction, as fp8 tensor cores do."""
    assert not any(size % 16 for q in (a, b) for size in q.values.shape), [[*q.values.shape] for q in (a, b)]
    return product(a, b, dtype)


def interpret_linear() -> None:
    """fp8.Fp8Linear with the kernels in place of its own arithmetic."""
    import fp8_kernels as k
    from fp8 import Fp8Linear
    from harness.oracle import assert_same

    for recipe in ("block", "row"):
        results = []
        for kernels in (None, k):
            x = (numbers(141, 160) * 1e-2).requires_grad_()  # as many rows as an expert may get: any number
            w = numbers(272, 160, seed=1).requires_grad_()
            linear = Fp8Linear(recipe)
            if kernels:
                linear.kernels = kernels
                # Whole rows are multiplied by cuBLAS on a GPU; here only their quantisation is the kernels'.
                product = kernels.scaled_matmul if recipe == "block" else kernels.emulated_matmul
                linear.matmul = functools.partial(as_the_gpu_wants_them, product)
            y = linear(x, w)
            y.backward(numbers(141, 272, seed=2))
            linear.end_step()
            results.append((y.detach(), x.grad, w.grad))
        for what, want, got in zip(("y", "dx", "dW"), *results, strict=True):
            assert_same(got, want, 1e-5, f"{recipe}: {what}")


def interpret_refusal() -> None:
    """main() with a GPU that says how old it is; `launch` would start the group."""
    import fp8_kernels as k
    import torch

    for have, fits in {(8, 0): False, (8, 9): False, (9, 0): True, (10, 0): True}.items():
        launched, said = [], io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
            patch.setattr(sys, "argv", ["fp8_kernels.py"])
            patch.setattr(k, "launch", launched.append)
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
            patch.setattr(torch.cuda, "get_device_capability", lambda device, have=have: have)
            try:
                code = k.main()
            except SystemExit as end:
                code = end.code
        assert fits or code == 2, f"{have}: ends with {code}"
        assert len(launched) == fits, f"with {have} a group is started {len(launched)} times"
        line, want = said.getvalue(), "fp8_kernels.py: fp8 on A100: the kernels are for Hopper (capability 9.0)"
        want += f" or later, not {have[0]}.{have[1]}; with CUDA_VISIBLE_DEVICES= "
        assert (line == "") if fits else (line.startswith(want) and line.count("\n") == 1), f"{have}: {line}"


def compile_for_sm_90() -> str:
    """What the compiler made, as JSON."""
    import _kernel_facts
    import fp8_kernels as k

    return json.dumps(_kernel_facts.facts(k))


# ------------------------------------------------------------------------------------------------------------- tests

CASES = {
    "test_the_kernel_finds_the_largest_element_and_calls_nan_infinite": "interpret_amax",
    "test_scales_and_values_of_the_kernel_are_those_of_the_recipe": "interpret_quantize",
    "test_a_given_scale_that_is_too_small_saturates": "interpret_saturation",
    "test_nan_and_infinity_leave_a_mark_in_the_scales": "interpret_not_finite",
    "test_operands_of_backward_lie_with_the_summed_dimension_contiguous": "interpret_layout",
    "test_both_forms_of_one_read_are_those_of_the_recipe_and_lie_as_backward_wants_them": "interpret_both",
    "test_both_forms_are_written_from_one_read_of_tiles_and_two_of_whole_rows": "interpret_bytes",
    "test_the_matmul_scales_each_128_terms_by_both_scales": "interpret_matmul",
    "test_recipes_on_kernels_are_the_emulated_ones": "interpret_linear",
    "test_a_gpu_before_hopper_is_refused_in_one_line_before_a_group_is_started": "interpret_refusal",
}


def assert_holds(results: dict[str, str], request) -> None:
    assert results[request.node.name] == "", results[request.node.name]


def test_the_kernel_finds_the_largest_element_and_calls_nan_infinite(interpreted, request):
    assert_holds(interpreted, request)


def test_scales_and_values_of_the_kernel_are_those_of_the_recipe(interpreted, request):
    assert_holds(interpreted, request)


def test_a_given_scale_that_is_too_small_saturates(interpreted, request):
    assert_holds(interpreted, request)


def test_nan_and_infinity_leave_a_mark_in_the_scales(interpreted, request):
    assert_holds(interpreted, request)


def test_operands_of_backward_lie_with_the_summed_dimension_contiguous(interpreted, request):
    assert_holds(interpreted, request)


def test_both_forms_of_one_read_are_those_of_the_recipe_and_lie_as_backward_wants_them(interpreted, request):
    assert_holds(interpreted, request)


def test_both_forms_are_written_from_one_read_of_tiles_and_two_of_whole_rows(interpreted, request):
    outcome = interpreted[request.node.name]
    assert outcome.startswith("{"), outcome
    x, tiles = 256 * 384, (2, 3)  # elements; pieces down and across
    scales = 4 * (256 * tiles[1] + tiles[0] * 384)  # one for each row or column of a piece
    want = {
        "two calls": [2 * 2 * x, 2 * x + scales],
        "both, tiles": [2 * x, 2 * x + scales],
        "both, rows": [2 * 2 * x + scales, 2 * x + scales],  # each piece's peaks are written, and its scales read
    }
    assert json.loads(outcome) == want


def test_the_matmul_scales_each_128_terms_by_both_scales(interpreted, request):
    assert_holds(interpreted, request)


def test_recipes_on_kernels_are_the_emulated_ones(interpreted, request):
    assert_holds(interpreted, request)


def test_a_gpu_before_hopper_is_refused_in_one_line_before_a_group_is_started(interpreted, request):
    assert_holds(interpreted, request)


@pytest.mark.prove
def test_the_kernels_compile_for_hopper_and_multiply_on_its_fp8_tensor_cores():
    outcome = run_in("compile", ["compile_for_sm_90"])["compile_for_sm_90"]
    assert outcome.startswith("{"), outcome
    facts = json.loads(outcome)
    assert facts["block_matmul"]["wgmma_e4m3"] > 0, facts
    assert all(fact["shared"] <= 232_448 for fact in facts.values()), facts  # what a block may have on sm_90
    assert facts["quantize 1 x 128"]["cvt_e4m3"] > 0, facts
    both = facts["both: 1 x 128 and 128 x 1"]["cvt_e4m3"]
    assert both == 2 * facts["quantize 1 x 128"]["cvt_e4m3"], facts  # two forms, each converted once
