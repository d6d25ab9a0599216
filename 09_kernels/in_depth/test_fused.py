"""fused.py: every kernel against float64, beside PyTorch in the same precision, on inputs that kernels get wrong."""

from pathlib import Path

import pytest
import torch
from _fused_demo import DEVICE, allowed, compare, inputs, outputs_and_gradients, worst
from fused import (
    FUSED,
    INTERPRETED,
    MAX_COLS,
    REFERENCE,
    add_rms_norm,
    bytes_kept,
    bytes_moved,
    rms_norm,
    rms_norm_reference,
    rope,
    rope_reference,
    softmax,
    softmax_reference,
    swiglu,
    swiglu_reference,
)
from harness.meter import peak_memory, saved_activations
from harness.programs import assert_refused, printed_json, refusal
from harness.reference import numbers

KERNELS = list(FUSED)
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty hands out NaN, so an element that no kernel writes cannot pass for a result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_as_good_as_torch(fused, reference, tensors, rest=(), dtypes=(torch.float64, torch.float32, torch.float16)):
    for dtype in dtypes:
        error, theirs, _, _ = compare(fused, reference, tensors, rest, dtype)
        assert error <= allowed(theirs, dtype), f"{dtype}: error {error:.2e}, PyTorch's own is {theirs:.2e}"


def test_memory_is_poisoned_in_these_tests():
    assert torch.empty(3).isnan().all()


@pytest.mark.always(
    "(1, 11, 257)-softmax",
    "(1, 11, 257)-rms_norm",
    "(1, 11, 257)-add_rms_norm",
    "(1, 11, 257)-rope",
    "(1, 11, 257)-swiglu",
)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sizes", [(2, 20, 37), (1, 11, 257), (1, 5, 1000)], ids=str)
def test_outputs_and_gradients_err_at_most_twice_as_much_as_pytorchs(name, sizes):
    tensors, rest = inputs(*sizes, seed=sum(sizes))[name]
    assert_as_good_as_torch(FUSED[name], REFERENCE[name], tensors, rest)


@pytest.mark.parametrize("name", KERNELS)
def test_one_row_and_one_column_are_a_tensor_too(name):
    for sizes in ((1, 1, 1), (1, 1, 64), (1, 3, 1)):
        error, _, _, _ = compare(FUSED[name], REFERENCE[name], *inputs(*sizes)[name], torch.float64)
        assert error <= 1e-8, f"{sizes}: {error:.1e}"  # not 1e-10: the norm of a single number is nearly constant


def test_rows_that_lie_apart_are_read_at_their_stride():
    wide, w = numbers(6, 3 * 37), 1 + 0.1 * numbers(37, seed=1)
    tables = inputs(1, 6, 1)["rope"][1]
    a, b, c = (x.to(DEVICE) for x in wide.chunk(3, dim=1))  # column slices: stride 111, 37 columns
    assert not a.is_contiguous()
    column = wide.T[:37].to(DEVICE)  # [37, 6], columns apart: stride (1, 111)
    weight = torch.stack((w, w), 1).to(DEVICE)[:, 0]  # every second number
    cases = {
        "softmax": (softmax, softmax_reference, [b], []),
        "softmax of columns": (softmax, softmax_reference, [column], []),
        "rms_norm": (rms_norm, rms_norm_reference, [b, weight], [0.1]),
        "add_rms_norm": (add_rms_norm, REFERENCE["add_rms_norm"], [c, a, weight], [0.1]),
        "swiglu": (swiglu, swiglu_reference, [b, c], []),
        "swiglu of one contiguous tensor": (swiglu, swiglu_reference, [b, c.contiguous()], []),
    }
    heads = numbers(2, 6, 5, 3 * 16, seed=2).to(DEVICE)  # [B, S, N, 3·D], as one product for q, k, v gives it
    q, k = heads[..., :16], heads[..., 16:32]
    moved = numbers(2, 5, 6, 16, seed=3).to(DEVICE).transpose(1, 2)  # [B, N, S, D] seen as [B, S, N, D]
    for label, x in {"a slice": k, "a transpose": moved, "odd columns": q.mT.contiguous().mT}.items():
        here = [t.to(DEVICE) for t in tables]
        cases[f"rope of {label}"] = (rope, rope_reference, [x], here)
    apart = [t.to(DEVICE).repeat(1, 2)[:, :8] for t in tables]
    cases["rope with tables that lie apart"] = (rope, rope_reference, [k], apart)
    long = numbers(3, 2 * 2050, seed=4).to(DEVICE)
    cases["swiglu of rows of more than one block"] = (swiglu, swiglu_reference, [long[:, :2050], long[:, 2050:]], [])
    for label, (fused, reference, tensors, rest) in cases.items():
        got, _ = outputs_and_gradients(fused, tensors, rest)
        exact = [t.cpu() if isinstance(t, torch.Tensor) else t for t in rest]
        want, _ = outputs_and_gradients(reference, [x.cpu() for x in tensors], exact)
        theirs, _ = outputs_and_gradients(reference, tensors, rest)
        assert worst(got, want) <= allowed(worst(theirs, want), torch.float64), label


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_with_any_strides_are_read_right(name):
    """`out.sum().backward()` hands over one element with stride 0; the gradient of a slice has rows that lie apart."""
    tensors, rest = inputs(1, 3, 37)[name]
    for kind in ("expanded", "slice"):
        found = []
        for function, device in ((FUSED[name], DEVICE), (REFERENCE[name], "cpu")):
            leaves = [x.to(device, copy=True).requires_grad_() for x in tensors]
            out = function(*leaves, *(x.to(device) if isinstance(x, torch.Tensor) else x for x in rest))
            outs = out if isinstance(out, tuple) else (out,)
            grads = []
            for i, y in enumerate(outs):  # of two outputs one gradient has strides of either kind
                wide = numbers(*y.shape[:-1], 2 * y.shape[-1], seed=7).to(device)
                sliced = (kind == "slice") == (i == 0)
                grads.append(wide[..., : y.shape[-1]] if sliced else wide.flatten()[0].expand(y.shape))
                assert not grads[-1].is_contiguous()
            found.append(torch.autograd.grad(outs, leaves, grads))
        for i, (got, expected) in enumerate(zip(*found, strict=True)):
            error = (got.cpu() - expected).abs().max().item()
            assert error <= 1e-10, f"{name}, {kind}: gradient of input {i} differs by {error:.1e}"


def test_large_numbers_overflow_nowhere():
    big = numbers(3, 37)
    assert_as_good_as_torch(softmax, softmax_reference, [1e4 * big])
    assert_as_good_as_torch(softmax, softmax_reference, [1e4 + big], dtypes=[torch.float64, torch.float32])
    w = torch.ones(37, dtype=torch.float64)
    assert_as_good_as_torch(rms_norm, rms_norm_reference, [1e4 * big, w], [1e-5])
    assert_as_good_as_torch(rms_norm, rms_norm_reference, [1e-4 * big, w], [1e-5], [torch.float64, torch.float32])
    # In float16 the result of 100 · 100 still fits, and exp(100) no longer does.
    assert_as_good_as_torch(swiglu, swiglu_reference, [100 * big / 4, 100 * big.flip(0) / 4])
    assert_as_good_as_torch(swiglu, swiglu_reference, [1e4 * big, big], dtypes=[torch.float64, torch.float32])


def test_a_norm_of_more_than_8192_columns_reads_its_weight_for_each_row():
    tensors = [numbers(2, 8200), 1 + 0.1 * numbers(8200, seed=1)]
    assert_as_good_as_torch(rms_norm, rms_norm_reference, tensors, [1e-5], [torch.float32])


def test_a_row_that_is_all_masked_gives_zeros_and_zero_gradients():
    x = numbers(4, 37)
    x[1] = -float("inf")
    x[2, 5:] = -float("inf")
    for dtype in (torch.float64, torch.float32, torch.float16):
        leaf = x.to(DEVICE, dtype, copy=True).requires_grad_()
        y = softmax(leaf)
        y.backward(numbers(4, 37, seed=1).to(DEVICE, dtype))
        assert (y[1] == 0).all() and (leaf.grad[1] == 0).all()
        assert not y.isnan().any() and not leaf.grad.isnan().any()
        want = softmax_reference(x.to(dtype).double())
        theirs = torch.softmax(x.to(dtype), -1)[[0, 2, 3]]
        assert worst([y.detach()], [want]) <= allowed(worst([theirs], [want[[0, 2, 3]]]), dtype)


def test_a_nan_in_a_row_stays_visible_and_stays_in_its_row():
    x, w = numbers(3, 37, dtype=torch.float32).to(DEVICE), torch.ones(37, device=DEVICE)
    x[1, 4] = float("nan")
    assert softmax(x).isnan().any(1).tolist() == [False, True, False]
    assert rms_norm(x, w, 1e-5).isnan().any(1).tolist() == [False, True, False]
    assert swiglu(x, x).isnan().sum() == 1


@pytest.mark.parametrize("name", KERNELS)
def test_bytes_kept_for_backward_are_as_predicted(name):
    for dtype in (torch.float32, torch.float16):
        tensors, rest = inputs(2, 5, 40)[name]
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in tensors]
        rest = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in rest]
        with saved_activations(exclude=[x for x in leaves if x.dim() == 1]) as saved:
            out = FUSED[name](*leaves, *rest)
        assert saved.bytes == bytes_kept(name, tuple(leaves[0].shape), dtype), name
        del out


@pytest.mark.parametrize("name", KERNELS)
def test_a_forward_pass_allocates_its_outputs_and_what_it_keeps_and_nothing_else(name):
    tensors, rest = inputs(2, 5, 40)[name]
    leaves = [x.to(DEVICE, torch.float32) for x in tensors]
    rest = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in rest]
    with peak_memory() as memory:
        out = FUSED[name](*leaves, *rest)
    expected = sum(y.nbytes for y in (out if isinstance(out, tuple) else (out,)))
    expected += 4 * 10 if name.endswith("rms_norm") else 0  # one number for each of 2 · 5 rows
    if INTERPRETED:  # it takes the inputs' storages into its hands, and the meter takes them for new
        expected += sum(x.nbytes for x in [*leaves, *rest] if isinstance(x, torch.Tensor))
    assert memory.peak == expected, f"{name}: {memory.peak} bytes, of which {expected} have a purpose"


def test_bytes_moved_count_every_input_and_output_once():
    x, w = numbers(2, 5, 40, dtype=torch.float32).to(DEVICE), torch.ones(40, device=DEVICE)
    n = x.nbytes
    assert bytes_moved("softmax", x.numel(), 4) == (n + n, 2 * n + n)
    assert bytes_moved("rms_norm", x.numel(), 4) == (n + n, 2 * n + n)  # x and dy in, dx out
    assert bytes_moved("rope", x.numel(), 4) == (n + n, n + n) and bytes_moved("add_rms_norm", x.numel(), 4)[1] == 4 * n
    assert bytes_moved("add_rms_norm", x.numel(), 4)[0] == sum(y.nbytes for y in (x, x, *add_rms_norm(x, x, w, 1e-5)))
    assert bytes_moved("swiglu", x.numel(), 2) == (3 * n // 2, 5 * n // 2)


def test_a_norm_of_which_only_one_output_was_used_has_the_gradients_of_that_one():
    x, r, w = numbers(5, 37), numbers(5, 37, seed=1), 1 + 0.1 * numbers(37, seed=2)
    dout = numbers(5, 37, seed=3)
    for which in (0, 1):
        grads = []
        for function, device in ((add_rms_norm, DEVICE), (REFERENCE["add_rms_norm"], "cpu")):
            leaves = [t.to(device).requires_grad_() for t in (x, r, w)]
            out = function(*leaves, 1e-5)[which]
            out = out if which else out.mul_(2.0)  # backward needs no y: it may be changed in place
            grads.append(torch.autograd.grad(out, leaves, dout.to(device), allow_unused=True))
        for g, e, name in zip(*grads, ("x", "residual", "weight"), strict=True):
            assert (g is None) == (e is None), f"output {which}: the gradient of {name} is {g}"
            assert g is None or worst([g], [e]) <= 1e-10, f"output {which}: the gradient of {name}"


def test_a_norm_with_float32_weights_on_float16_rows_gives_float32_as_multiplying_does():
    x, w = numbers(3, 37, dtype=torch.float16).to(DEVICE), (1 + 0.1 * numbers(37)).float().to(DEVICE)
    got, want = rms_norm(x, w, 1e-5), rms_norm_reference(x, w, 1e-5)
    assert got.dtype == want.dtype == torch.float32
    exact = rms_norm_reference(x.double().cpu(), w.double().cpu(), 1e-5)
    assert worst([got], [exact]) <= allowed(worst([want], [exact]), torch.float32)
    leaf, wide = w.clone().requires_grad_(), w.double().cpu().requires_grad_()
    rms_norm(x, leaf, 1e-5).sum().backward()
    rms_norm_reference(x.double().cpu(), wide, 1e-5).sum().backward()
    assert worst([leaf.grad], [wide.grad]) <= 1e-6, "the gradient of the weight has the digits of the rows"


def test_the_gradient_of_a_norms_weight_in_fp16_is_added_up_in_fp32_and_rounded_once():
    x, w = numbers(64, 37).to(DEVICE, torch.float16), numbers(37, seed=1).to(DEVICE, torch.float16)
    leaf, exact = w.clone().requires_grad_(), w.double().cpu().requires_grad_()
    rms_norm(x, leaf, 1e-5).sum().backward()
    rms_norm_reference(x.double().cpu(), exact, 1e-5).sum().backward()
    rounding = (exact.grad.half() - exact.grad).norm()
    assert (leaf.grad.cpu() - exact.grad).norm() <= 1.1 * rounding


def test_what_is_normalised_is_the_sum_as_it_is_stored():
    """Backward reads the stored sum, rounded to 16 bits, and what goes on past the norm is that sum, too. With float32
    weights the output has float32's digits, so that 1e-6 tells the norm of the one from the norm of the other."""
    x, r = (numbers(5, 300, seed=seed, dtype=torch.float16).to(DEVICE) for seed in (0, 1))
    w = (1 + 0.1 * numbers(300, seed=2)).float().to(DEVICE)
    y, total = add_rms_norm(x, r, w, 1e-5)
    assert total.dtype == torch.float16 and y.dtype == torch.float32
    assert torch.equal(total, x + r)
    error = worst([y], [rms_norm_reference(total.double().cpu(), w.double().cpu(), 1e-5)])
    assert error <= 1e-6, f"off by {error:.1e} from the norm of the sum that was stored"


def test_angles_may_differ_between_samples_as_they_do_with_positions_of_a_shard():
    x = numbers(2, 5, 3, 16)
    angle = torch.rand(2, 5, 8, generator=torch.Generator().manual_seed(1))
    for shape in ((2, 5, 8), (1, 5, 8), (5, 8)):
        part = angle[0] if len(shape) == 2 else angle[: shape[0]]
        assert_as_good_as_torch(rope, rope_reference, [x], [part.cos(), part.sin()], [torch.float64])


def test_no_head_is_left_unturned_when_they_do_not_fit_into_one_program():
    x = numbers(1, 2, 40, 512, dtype=torch.float32)  # 16 heads of 256 pairs for a program: 2.5 programs
    angle = torch.rand(2, 256, generator=torch.Generator().manual_seed(1))
    assert_as_good_as_torch(rope, rope_reference, [x], [angle.cos(), angle.sin()], [torch.float32])


def test_empty_tensors_pass_through():
    assert softmax(torch.empty(0, 5, device=DEVICE)).shape == (0, 5)
    x = torch.empty(0, 5, device=DEVICE, requires_grad=True)
    w = torch.ones(5, device=DEVICE, requires_grad=True)
    assert softmax(torch.ones(1, MAX_COLS, device=DEVICE))[0, -1] == 1 / MAX_COLS, "the longest row"
    rms_norm(x, w, 1e-5).sum().backward()
    assert x.grad.shape == (0, 5) and (w.grad == 0).all()
    assert swiglu(x, x).shape == (0, 5)
    for y in (softmax(x), swiglu(x, x)):
        y.sum().backward()


def test_what_the_kernels_cannot_do_is_refused_in_one_line():
    x, w = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    cases = {
        "int64": lambda: softmax(torch.ones(2, 8, dtype=torch.int64)),
        f"weight is on meta but x on {x.device}": lambda: rms_norm(x, w.to("meta"), 1e-5),
        f"{MAX_COLS + 1} columns": lambda: softmax(torch.ones(1, MAX_COLS + 1)),
        "RMSNorm over 0 columns": lambda: rms_norm(x[:, :0], w[:0], 1e-5),
        "head dim 7 must be even": lambda: rope(torch.ones(1, 2, 1, 7), torch.ones(2, 3), torch.ones(2, 3)),
        r"cos \[3, 4\]": lambda: rope(torch.ones(1, 2, 1, 8), torch.ones(3, 4), torch.ones(3, 4)),
        r"sin \[3, 4\] must be": lambda: rope(torch.ones(1, 2, 1, 8), torch.ones(2, 4), torch.ones(3, 4)),
        "head dim 514": lambda: rope(torch.ones(1, 2, 1, 514), torch.ones(2, 257), torch.ones(2, 257)),
        "differ": lambda: swiglu(x, x.half()),
        r"up \[1, 8\] torch.float32 differ": lambda: swiglu(x, x[:1]),
        r"x \[2, 8\]": lambda: add_rms_norm(x, x[:1], w, 1e-5),
        r"residual \[2, 8\] torch.float16 differ": lambda: add_rms_norm(x, x.half(), w, 1e-5),
        r"weight \[4\]": lambda: rms_norm(x, w[:4], 1e-5),
    }
    if INTERPRETED:
        cases["bfloat16"] = lambda: swiglu(x.bfloat16(), x.bfloat16())
    for words, call in cases.items():
        with torch.device(DEVICE):
            assert_refused(words, call)


@pytest.mark.always("fused.py-arguments1-'int8'")
@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("fused.py", ["--hidden", "20000"], "--hidden 20000"),
        ("fused.py", ["--dtype", "int8"], "'int8'"),
        ("fused_loss.py", ["--chunk", "0"], "--chunk 0"),
        ("fused_adamw.py", ["--dtype", "float16"], "--dtype"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(script, arguments, words):
    assert words in refusal(HERE / script, arguments)


@pytest.fixture(scope="module")
def machine_code():
    return printed_json(HERE / "_fused_compile.py", "fused.py", TRITON_INTERPRET="0")


@pytest.mark.prove
def test_every_kernel_compiles_for_ampere_and_hopper_without_spills_and_within_shared_memory(machine_code):
    names = {row["kernel"] for row in machine_code}
    assert len(names) == 7 and {row["sm"] for row in machine_code} == {80, 90}
    for row in machine_code:
        assert row["stack"] == 0 and row["local"] == 0, f"registers are spilled: {row}"
        assert row["shared_memory"] <= 166912, f"more than an A100 has: {row}"
        assert row["reg"] * row["warps"] * 32 <= 65536, row


@pytest.mark.prove
def test_no_offset_is_a_product_of_32_bit_numbers(machine_code):
    """A tensor may have more than 2^31 elements; row times stride would wrap around and read somewhere else."""
    for row in machine_code:
        assert row["products_of_32_bits"] == 0, row


@pytest.mark.prove
def test_rows_are_read_sixteen_bytes_at_a_time(machine_code):
    for row in machine_code:
        if row["kernel"] != "rms_norm_backward_kernel":  # which copies its rows to shared memory ahead of time
            assert row["loads_of_16_bytes"] >= 2, row
