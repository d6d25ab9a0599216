"""The Triton kernels against fp8.py, in Triton's interpreter; and compiled for sm_90, which needs no GPU."""

import contextlib
import functools
import io
import os
import sys
from pathlib import Path
from unittest.mock import patch

import _cuda_build  # noqa: F401  which finds chapter 09
import fp8_kernels as k
import pytest
import torch
from _interpreter import INTERPRETED
from formats import FORMATS
from fp8 import RECIPES, Fp8Linear
from harness.meter import saved_activations
from harness.programs import printed_json
from harness.reference import assert_same
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import interpreter_builder

HERE = Path(__file__).resolve().parent
E4M3 = torch.float8_e4m3fn
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity / infinity
on_cpu = pytest.mark.skipif(not INTERPRETED, reason="Triton compiles here, and these tensors are on the CPU")


def numbers(rows: int, columns: int, seed: int = 0):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-4, 3, rows)[:, None] * torch.logspace(-2, 2, columns)


@on_cpu
def test_the_kernel_finds_the_largest_element_and_calls_nan_infinite():
    for shape in ((3, 5), (100, 257)):
        x = numbers(*shape)
        assert k.amax(x).item() == x.abs().max().item()
        assert k.amax(x.half()).item() == x.half().abs().max().item()
        assert k.amax(x.T).item() == x.abs().max().item(), "a transposed view"
        assert k.amax(x.flip(0)).item() == x.abs().max().item(), "the largest comes first"
        for bad in (torch.nan, torch.inf, -torch.inf):
            x[1, 2] = bad
            assert k.amax(x).item() == torch.inf, f"{bad} was passed over"


@on_cpu
def test_scales_and_values_of_the_kernel_are_those_of_the_recipe():
    for dtype in (E4M3, torch.float8_e5m2):
        for block in k.MODES:
            x = numbers(200, 300)
            x[:128, 128:256] = 0  # a piece of zeros
            x[128:, 256:] = 1e-39  # and one whose amax over the largest number is no normal fp32 number
            got, want = k.quantize(x, dtype, block), k.reference_quantize(x, dtype, block)
            assert got.block == block and torch.equal(got.scale, want.scale), f"scales of {block}"
            assert torch.equal(got.values.float(), want.values.float()), f"values of {block} in {dtype}"
    # Ties go to the even neighbour; subnormals, and what rounds up into the next power of two.
    x = torch.tensor([[124.1, 1.0625, 1.1875, 2**-10, 3 * 2**-10, 1e-9, -124.1, 448.0]]).repeat(16, 16)
    got, turned = (q.values for q in k.cast(x, E4M3, torch.tensor([[448.0]])))
    rounded = FORMATS["e4m3"].round(x)
    assert torch.equal(got.double(), rounded), (got.double() - rounded).abs().max()
    assert torch.equal(got.double(), turned.double()) and turned.T.is_contiguous()


@on_cpu
def test_a_given_scale_that_is_too_small_saturates():
    x = torch.tensor([[1.0, -1000.0, 3.0, 500.0]]).repeat(4, 8)
    for got in k.cast(x, E4M3, torch.tensor([[2.0]])):
        assert torch.equal(got.dequantize(), x.clamp(-2, 2)), got.dequantize()[0, :4]
    assert k.cast(x, E4M3, torch.zeros(1, 1))[0].scale.item() == 1, "nothing is divided by zero"
    assert k.cast(x, E4M3, torch.full((1, 1), 1e-40))[0].scale.item() == torch.finfo(torch.float32).tiny, "nor by less"


@on_cpu
def test_nan_and_infinity_leave_a_mark_in_the_scales():
    for block in k.MODES:
        for bad in (torch.nan, torch.inf):
            x = numbers(128, 256)
            x[5, 130] = bad
            scale = k.quantize(x, E4M3, block).scale
            assert (~torch.isfinite(scale)).sum() == 1, f"{bad} in {block} leaves no mark in the scales"


@on_cpu
def test_operands_of_backward_lie_with_the_summed_dimension_contiguous():
    x = numbers(256, 160)
    along, across, square = (k.quantize(x, E4M3, b) for b in ((1, 128), (128, 1), (128, 128)))
    assert along.values.is_contiguous() and square.values.is_contiguous()
    assert k.transpose(across).values.is_contiguous(), "what is summed along columns lies turned around"
    turned = k.rows_of(square.values.T)
    assert turned.is_contiguous() and torch.equal(turned.float(), square.values.float().T)
    odd = k.rows_of(square.values[:, ::2])
    assert odd.is_contiguous() and torch.equal(odd.float(), square.values.float()[:, ::2])
    x, w = (k.quantize(numbers(n, 16), E4M3, (1, 128)) for n in (1100, 130))  # more than a group of rows
    got, want = (product(x, w, torch.float32) for product in (k.scaled_matmul, k.emulated_matmul))
    assert_same(got, want, 1e-5, "a product of nine rows of tiles")


@on_cpu
def test_both_forms_of_one_read_are_those_of_the_recipe_and_lie_as_backward_wants_them():
    for dtype, rows, columns in ((E4M3, 200, 300), (torch.float8_e5m2, 16, 130)):
        for block in ((1, 128), (1, 0), (128, 128)):
            x, note = numbers(rows, columns).flip(0, 1), torch.full((1, 1), 1e-3)  # the largest come first
            x[:128, 128:256] = 0  # a piece of zeros
            x[128:, 256:] = 1e-39
            x[:, 3] = 0  # and a column
            both = k.quantize_both(x, dtype, block, note)
            assert note.item() == x.abs().max(), f"{block}: the largest element is said to be {note.item()}"
            for got, shape in zip(both, (block, block[::-1]), strict=True):
                want = k.reference_quantize(x, dtype, shape)
                assert got.block == shape and torch.equal(got.scale, want.scale), f"scales of {shape}"
                assert torch.equal(got.values.float(), want.values.float()), f"values of {shape} in {dtype}"
    for block in ((1, 128), (1, 0), (128, 128)):
        note = torch.full((1, 1), 1e9)
        along, across = k.quantize_both(numbers(200, 300), E4M3, block, note)
        assert note.item() == 1e9, f"{block}: what was larger before is forgotten"
        assert along.values.is_contiguous() and k.transpose(across).values.is_contiguous()
        for bad in (torch.nan, torch.inf):
            x, note = numbers(150, 140), torch.zeros(1, 1)
            x[5, 130] = bad
            both = k.quantize_both(x, E4M3, block, note)
            marks = [(~torch.isfinite(q.scale)).sum().item() for q in both]
            assert marks == [1, 1], f"{bad} in {block} leaves {marks} marks in the scales"
            assert note.item() == torch.inf, f"{bad} in {block} is not noted"
    for before, after in ((1e-3, x[torch.isfinite(x)].abs().max().item()), (1e9, 1e9)):
        note = torch.full((1, 1), before)
        k.cast(x.nan_to_num(0, 0, 0), E4M3, torch.ones(1, 1), note)
        assert note.item() == after, "a step's maximum is that of all its tensors"
    # As the kernel in CUDA reads them, in whole lines: [tiles, R].
    scale = k.quantize_both(numbers(256, 300), E4M3, (1, 128))[0].scale
    assert scale.shape == (256, 3) and scale.T.is_contiguous()
    with pytest.raises(ValueError, match=r"block \(128, 1\) has no second orientation"):
        k.quantize_both(numbers(16, 16), E4M3, (128, 1))
    x = numbers(130, 140).clamp(-6e4, 6e4).half()
    for block in ((1, 128), (1, 0), (128, 128)):
        for got, shape in zip(k.quantize_both(x, E4M3, block), (block, block[::-1]), strict=True):
            want = k.reference_quantize(x, E4M3, shape)
            assert torch.equal(got.dequantize(), want.dequantize()), f"{shape} of numbers in fp16"


@on_cpu
def test_both_forms_are_written_from_one_read_of_tiles_and_two_of_whole_rows():
    """Counted by the interpreter itself."""
    moved = {"read": 0, "written": 0, "joined": 0}
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store
    atomic = interpreter_builder.create_atomic_rmw

    def counted_load(ptrs, mask, *more):
        moved["read"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(ptrs, mask, *more)

    def counted_store(ptrs, value, mask, *more):
        moved["written"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(ptrs, value, mask, *more)

    def counted_atomic(op, ptr, value, mask, *more):
        moved["joined"] += int(mask.data.sum()) * 4
        return atomic(op, ptr, value, mask, *more)

    counted = dict(create_masked_load=counted_load, create_masked_store=counted_store, create_atomic_rmw=counted_atomic)
    x, found = numbers(256, 384).clamp(-6e4, 6e4).half(), {}
    for name, run in (
        ("two calls", lambda: [k.quantize(x, E4M3, block) for block in ((1, 128), (128, 1))]),
        ("both, tiles", lambda: k.quantize_both(x, E4M3, (1, 128))),
        ("both, rows", lambda: k.quantize_both(x, E4M3, (1, 0))),
        ("both, one scale", lambda: k.cast(x, E4M3, k.amax(x))),
        ("both, a scale of steps before", lambda: k.cast(x, E4M3, torch.ones(1, 1), torch.zeros(1, 1))),
    ):
        moved.update(read=0, written=0, joined=0)
        with patch.multiple(interpreter_builder, **counted):
            run()
        found[name] = [*moved.values()]
    elements, tiles = 256 * 384, (2, 3)  # pieces down and across
    scales = 4 * (256 * tiles[1] + tiles[0] * 384)  # one for each row or column of a piece
    assert found == {
        "two calls": [2 * 2 * elements, 2 * elements + scales, 0],
        "both, tiles": [2 * elements, 2 * elements + scales, 0],
        "both, rows": [2 * 2 * elements + scales, 2 * elements + 4 * (256 + 384), scales],  # each piece joins its peaks
        "both, one scale": [2 * 2 * elements + 4 * 6, 2 * elements + 4, 4 * 12],
        "both, a scale of steps before": [2 * elements + 4 * 6, 2 * elements + 4, 4 * 6],
    }


@pytest.mark.prove
@on_cpu
def test_the_matmul_scales_each_128_terms_by_both_scales():
    for M, N, K in ((130, 200, 300), (128, 128, 128), (300, 40, 520)):
        a, b = numbers(M, K), numbers(N, K, seed=1)
        for block_b in ((128, 128), (1, 128)):
            x, w = k.quantize(a, E4M3, (1, 128)), k.quantize(b, E4M3, block_b)
            want = k.emulated_matmul(x, w, torch.float32)
            assert_same(k.scaled_matmul(x, w, torch.float32), want, 1e-5, f"{M} x {N} x {K}, {block_b}")
        # Wgrad: both operands turned around.
        x, dy = k.quantize(numbers(M, K), E4M3, (128, 1)), k.quantize(numbers(M, N), E4M3, (128, 1))
        got = k.scaled_matmul(k.transpose(dy), k.transpose(x), torch.float32)
        assert_same(got, k.emulated_matmul(k.transpose(dy), k.transpose(x), torch.float32), 1e-5, "Wgrad")


def as_the_gpu_wants_them(product, a, b, dtype):
    """A product that takes 16 numbers at a time, in each direction, as fp8 tensor cores do."""
    assert not any(size % 16 for q in (a, b) for size in q.values.shape), [[*q.values.shape] for q in (a, b)]
    return product(a, b, dtype)


def by_columns(x):
    """x whose columns are contiguous: a kernel that takes it for rows reads it wrong."""
    return x.T.contiguous().T


def results_of(linear, device: str, K: int = 144, N: int = 160) -> list:
    """y, dx and dW, in fp32, since the interpreter has no bf16. With a history of two steps of two micro-batches."""
    w = by_columns(numbers(N, K, seed=1).to(device)).requires_grad_()
    results, times = [], 2 if linear.recipe.history else 1
    for step in range(times):
        for part in range(times):
            # As many rows as an expert may get, any number; and a second step that needs other scales.
            x = by_columns((numbers(141, K, seed=part) * 10.0 ** (step - 2)).to(device)).requires_grad_()
            y = linear(x, w)
            y.backward(by_columns(numbers(141, N, seed=2 + part).to(device)))
            results += [y.detach(), x.grad, w.grad]
            w.grad = None
        linear.end_step()
    return results


@on_cpu
def test_recipes_on_kernels_are_the_emulated_ones():
    """fp8.Fp8Linear with the kernels in place of its own arithmetic."""
    for recipe in RECIPES:
        results = []
        for kernels in (None, k):
            linear = Fp8Linear(recipe)
            if kernels:
                linear.kernels = kernels
                # cuBLAS multiplies one scale and whole rows on a GPU; here only the quantisation is the kernels'.
                product = kernels.scaled_matmul if recipe == "block" else kernels.emulated_matmul
                linear.matmul = functools.partial(as_the_gpu_wants_them, product)
            results.append(results_of(linear, "cpu"))
        for i, (want, got) in enumerate(zip(*results, strict=True)):
            assert_same(got, want, 1e-5, f"{recipe}: result {i}")
        for bad in (torch.nan, torch.inf):
            x = numbers(32, 128)
            x[3, 5] = bad
            with pytest.raises(FloatingPointError, match="an input of .* infinity or NaN"):
                linear(x, numbers(16, 128))
                linear.end_step()
        with pytest.raises(ValueError, match="17 outputs: no multiple of 16"):
            linear(numbers(32, 144), numbers(17, 144))
    linear, weight = Fp8Linear("tensor-delayed"), numbers(16, 144)
    linear.kernels = k
    linear(numbers(32, 144), weight)
    linear.end_step()
    with torch.no_grad():
        linear(numbers(32, 144), weight)
    assert not linear.now.any(), "a validation counts as a part of the step"


def stand_in_host() -> dict:
    """What the host starts for a layer in a step, and what it keeps, counted, by recipe."""
    launches, operations, views = [], [], []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            (views if func.is_view or func.overloadpacket == torch.ops.aten.detach else operations).append(str(func))
            return func(*args, **(kwargs or {}))

    class Counted:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(k, name)

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                launches.append(self.name)
                before = len(operations), len(views)
                self.kernel[grid](*arguments, **options)
                del operations[before[0] :], views[before[1] :]  # the interpreter's own

            return launch

    for name in [name for name in vars(k) if name.endswith("_kernel")]:
        setattr(k, name, Counted(name))

    def multiplied(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        """cuBLAS, as one operation. It takes nothing but rows of the left and columns of the right."""
        assert a.is_contiguous() and b.T.is_contiguous() and scale_a.is_contiguous() and scale_b.is_contiguous()
        operations.append("_scaled_mm")
        before = len(operations), len(views)
        out = (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)
        del operations[before[0] :], views[before[1] :]
        return out

    torch._scaled_mm = multiplied
    found = {}
    for recipe in RECIPES:
        linear = Fp8Linear(recipe, device="cuda")
        if recipe in ("tensor", "row"):  # the others' products are looked at without a stand-in
            want = results_of(Fp8Linear(recipe), "cpu")
            for i, (a, b) in enumerate(zip(results_of(linear, "cuda"), want, strict=True)):
                # A GPU's division, and so a few numbers, are off in the last place; whole rows give 16 bits.
                assert_same(a.cpu(), b, 2e-2, f"{recipe}: result {i}")
        M, K, N = 32, 144, 128
        dy = torch.ones(2, M // 2, N, device="cuda")
        weights = [torch.ones(N, K, device="cuda", requires_grad=True) for _ in range(2)]
        for _ in range(2):
            xs = [torch.ones(2, M // 2, K, device="cuda", requires_grad=True) for _ in weights]
            for count in (launches, operations, views):
                count.clear()
            with Operations(), saved_activations() as saved:
                for x, w in zip(xs, weights, strict=True):
                    w.grad = None
                    linear(x, w).backward(dy)
                layers = [len(launches), len(operations), len(views)]
                linear.end_step()
            end = [len(launches), len(operations), len(views)]
        scales = {"row": K + K, "block": K + 2}.get(recipe, 1 + 1)  # of M there is one tile, and of K there are two
        assert saved.bytes == 2 * (M * K + N * K + 4 * scales), f"{recipe}: {saved.bytes} bytes are kept"
        bad = torch.full((M, K), torch.inf, device="cuda")
        linear(bad, weights[0])
        with pytest.raises(FloatingPointError, match="an input of .* infinity or NaN"):
            linear.end_step()
        linear.leave_out_step()
        with torch.no_grad():
            linear(bad, weights[0])
        linear.end_step()
        found[recipe] = [*layers, *(b - a for a, b in zip(layers, end, strict=True))]
    return found


def test_a_gpu_before_hopper_is_refused_in_one_line_before_a_group_is_started():
    """main() with a GPU that says how old it is; `launch` would start the group."""
    for have, fits in {(8, 0): False, (8, 9): False, (9, 0): True, (10, 0): True}.items():
        launched, said = [], io.StringIO()
        with pytest.MonkeyPatch.context() as changed, contextlib.redirect_stderr(said):
            changed.setattr(sys, "argv", ["fp8_kernels.py"])
            changed.setattr(k, "launch", launched.append)
            changed.setattr(torch.cuda, "is_available", lambda: True)
            changed.setattr(torch.cuda, "get_device_name", lambda device: "A100")
            changed.setattr(torch.cuda, "get_device_capability", lambda device, have=have: have)
            try:
                code = k.main()
            except SystemExit as end:
                code = end.code
        assert fits or code == 2, f"{have}: ends with {code}"
        assert len(launched) == fits, f"with {have} a group is started {len(launched)} times"
        line, want = said.getvalue(), "fp8_kernels.py: fp8 on A100: the kernels are for Hopper (capability 9.0)"
        want += f" or later, not {have[0]}.{have[1]}; with CUDA_VISIBLE_DEVICES= "
        assert (line == "") if fits else (line.startswith(want) and line.count("\n") == 1), f"{have}: {line}"


def compile_for_sm_90() -> dict:
    """What the compiler made."""
    import _kernel_facts

    return _kernel_facts.facts(k)


# -------------------------------------------------------------------------------------------- in processes of their own


def outcome_of(function: str, *folders: str, **environment: str) -> dict:
    """What a function of this file returns in a process of its own."""
    path = os.pathsep.join(str(HERE.parents[1] / folder) for folder in (*folders, "tests", HERE))
    code = f"import json, test_fp8_kernels as t; print(json.dumps(t.{function}()))"
    return printed_json("-c", code, PYTHONPATH=path, **environment)[-1]


# Of a layer, forward and backward: kernels of Triton, other operations that are no views; and of the end of a step,
# whatever the number of layers: kernels, operations.
STARTED = {"tensor": (6, 15, 0, 9), "tensor-delayed": (3, 12, 0, 12), "row": (6, 23, 0, 9), "block": (6, 16, 0, 9)}


@pytest.mark.prove
def test_a_layer_starts_few_kernels_and_operations_and_the_end_of_a_step_is_not_more_for_more_layers():
    fake = dict(FAKE_GPUS="1", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    found = outcome_of("stand_in_host", "tests/fake_device", **fake)
    for recipe, (launches, operations, views, *end) in found.items():
        most = STARTED[recipe]
        assert launches == 2 * most[0] and end[0] == most[2], f"{recipe}: {launches} kernels in 2 layers"
        assert operations <= 2 * most[1], f"{recipe}: {operations} operations in 2 layers"
        assert views <= 2 * 30 and end[1] <= most[3], f"{recipe}: {views} views, and at the end of a step {end}"


@pytest.mark.prove
def test_the_kernels_compile_for_hopper_and_multiply_on_its_fp8_tensor_cores():
    facts = outcome_of("compile_for_sm_90", TRITON_INTERPRET="0")
    assert facts["block_matmul"]["wgmma_e4m3"] > 0, facts
    assert all(fact["shared"] <= 232_448 for fact in facts.values()), facts  # what a block may have on sm_90
    assert facts["quantize 1 x 128"]["cvt_e4m3"] > 0, facts
    both = facts["both: 1 x 128 and 128 x 1"]["cvt_e4m3"]
    assert both == 2 * facts["quantize 1 x 128"]["cvt_e4m3"], facts  # two forms, each converted once
