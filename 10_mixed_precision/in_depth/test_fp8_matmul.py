"""The product in CUDA, emulated on the CPU: against its definition in float64 with sums of 14 bits, at every edge and
in any order of its warps; and what nvcc makes of it.
"""

import re
import shutil
import sys
from pathlib import Path

import fp8_matmul  # which finds chapter 09's build
import pytest
import torch
import torch.nn.functional as F
from formats import TILE, Quantized, e4m3, emulated_matmul, quantize, transpose
from fp8 import Fp8Linear, tensor_core_matmul
from fp8_matmul import (
    FORWARD,
    PRODUCTS,
    REVERSE,
    THREADS,
    CudaError,
    accumulator,
    ahead,
    behind,
    cuda_matmul,
    error,
    lines,
    operands,
    racing,
)
from harness.programs import assert_refused, refusal

_cuda = sys.modules["_cuda"]
e5m2 = torch.float8_e5m2
HERE = Path(__file__).resolve().parent
NVCC = pytest.mark.skipif(not shutil.which("nvcc"), reason="without nvcc nothing can be compiled for a GPU")


def in_powers_of_two(M, N, K, product="Fprop", seed=0):
    """Operands whose scales are powers of two and whose numbers are few: fp32 sums of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    form = e5m2 if product == "Dgrad, e5m2" else e4m3

    def drawn(rows, block, dtype):
        values = torch.randint(-6, 7, (rows, K), generator=generator).float().to(dtype)
        down, across = torch.arange(-(-rows // block[0])), torch.arange(-(-K // block[1]))
        scale = 2.0 ** ((down[:, None] + across) % 3 - 1)  # neighbours differ, and rows 8, 64 or 128 apart
        return Quantized(values, scale, block)

    return drawn(M, (1, TILE), form), drawn(N, (1, TILE) if product == "Wgrad" else (TILE, TILE), e4m3)


@pytest.mark.prove
def test_the_numbers_of_the_two_formats_are_those_of_their_bits():
    patterns = torch.arange(256, dtype=torch.uint8)
    one = Quantized(torch.eye(16, 256)[:1].to(e4m3), torch.ones(1, 2), (1, TILE))
    for dtype in (e4m3, e5m2):
        values = patterns.view(dtype)
        finite = torch.where(values.float().isfinite(), values.float(), torch.zeros(256)).to(dtype)
        # Each number stands in a row of its own, beside zeros, and is multiplied by 1.
        a = torch.zeros(256, 16).to(dtype)
        a[:, 0] = finite
        got = cuda_matmul(
            Quantized(a, torch.ones(256, 1), (1, TILE)),
            Quantized(one.values[:, :16].contiguous(), torch.ones(1, 1), (TILE, TILE)),
            torch.float32,
        )
        assert torch.equal(got[:, 0], finite.float()), dtype


# M, N, K. Of a cluster's tile, 256 x 256: one element, less than all, all, and a bit more than a block's; of its steps:
# part of one, one, more than stages.
EDGES = {
    "one element": (1, 1, 16),
    "whole tiles": (256, 256, 256),
    "one row and column more": (129, 129, 144),
    "an odd number of columns": (65, 127, 240),
    "all stages twice": (40, 30, 1104),
    "tiles of two blocks of weights": (3, 257, 128),
}


@pytest.mark.always(
    "tiles of two blocks of weights", "one row and column more", "an odd number of columns", "one element"
)
@pytest.mark.parametrize("name", EDGES)
def test_every_edge_is_exact_where_sums_are(name):
    M, N, K = EDGES[name]
    for product in PRODUCTS:
        a, b = in_powers_of_two(M, N, K, product)
        want = tensor_core_matmul(a, b, torch.float32)
        assert torch.equal(want.double(), emulated_matmul(a, b, torch.float64)), "the case is not exact"
        got = cuda_matmul(a, b, torch.float32)
        assert got.shape == (M, N) and torch.equal(got, want), f"{product}: {(got != want).sum()} of {M * N} differ"


def definition(a, b):
    """In float64, but for the sums of 14 bits: tensor_core_matmul with one step's terms at a time, and no scales. A
    last step that lacks terms has zeros: those instructions, too, cut the sum to 14 bits."""
    lacking = -a.values.shape[1] % TILE
    a, b = (q._replace(values=F.pad(q.values.float(), (0, lacking)).to(q.values.dtype)) for q in (a, b))
    total = torch.zeros(len(a.values), len(b.values), dtype=torch.float64)
    for s in range(a.scale.shape[1]):
        ones = torch.ones(1, 1)
        part = [Quantized(q.values[:, s * TILE : (s + 1) * TILE], ones, (0, 0)) for q in (a, b)]
        scales = [q.scale[:, s].double().repeat_interleave(q.block[0])[: len(q.values)] for q in (a, b)]
        total += tensor_core_matmul(*part, torch.float64, promote=0) * scales[0][:, None] * scales[1]
    return total


@pytest.mark.parametrize("product", PRODUCTS)
def test_it_is_the_definition_with_sums_of_14_bits(product):
    a, b = operands(20, 140, 400, product, "cpu")
    got, want = cuda_matmul(a, b, torch.float32), definition(a, b)
    sizes = definition(*(q._replace(values=q.values.float().abs().to(q.values.dtype)) for q in (a, b)))
    off = ((got - want).abs() / sizes).max().item()
    assert off <= 8 * 2**-24, f"{product}: off by {off:.1e} of the terms, where 4 steps are rounded to fp32 twice each"
    # And 14 bits are what makes the difference to the exact product: with fp32 sums there is none to speak of.
    with accumulator(0):
        assert error(cuda_matmul(a, b, torch.float32), a, b) <= 1e-6
    with pytest.raises(KeyError), accumulator(18):
        raise KeyError
    assert torch.equal(cuda_matmul(a, b, torch.float32), got), "the bits are not set back"
    for bits in (-1, 19):
        with pytest.raises(ValueError, match=f"an accumulator of {bits} bits"), accumulator(bits):
            pass
    assert 1e-5 <= error(got, a, b) <= 1e-3


def test_promotion_keeps_long_sums_from_stalling():
    values = torch.rand(2, 16, 2048, generator=torch.Generator().manual_seed(0)) + 0.5
    a, b = (quantize(x, e4m3, (1, TILE)) for x in values)  # all of one sign
    off = error(cuda_matmul(a, b, torch.float32), a, b)
    whole = [Quantized(q.values, torch.ones(1, 1), (0, 0)) for q in (a, b)]
    never = error(tensor_core_matmul(*whole, torch.float32, promote=0), *whole)
    assert off <= 2e-3 and never >= 10 * off, f"off by {off:.1e}, never promoted {never:.1e}"


def test_bf16_is_the_rounded_fp32_result_and_nothing_beside_it_is_written():
    for N in (2, 5, 131):
        a, b = operands(3, N, 32, "Fprop", "cpu")
        want = cuda_matmul(a, b, torch.float32)
        assert torch.equal(cuda_matmul(a, b, torch.bfloat16), want.bfloat16()), N
        assert cuda_matmul(a, b, torch.float64).dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16):
        field = torch.full((64,), 7.0, dtype=dtype)
        kinds = (0, 1, int(dtype == torch.bfloat16))
        sizes = (3, 5, 32, lines(a).shape[1], 1)
        b5 = operands(3, 5, 32, "Fprop", "cpu")[1]
        arguments = (*kinds, *sizes, a.values, b5.values, lines(a), lines(b5), field)
        _cuda.call(fp8_matmul.SOURCE, "run_fp8_matmul", *arguments)
        assert (field[15:] == 7).all() and (field[:15] != 7).all(), dtype


def test_a_nan_marks_its_row_and_column_and_no_others():
    a, b = in_powers_of_two(20, 20, 160)
    a.values[3, 150], b.values[7, 1] = torch.nan, torch.nan
    out = cuda_matmul(a, b, torch.float32)
    marked = torch.zeros(20, 20, dtype=torch.bool)
    marked[3], marked[:, 7] = True, True
    assert torch.equal(out.isnan(), marked)


def test_scales_of_a_step_lie_in_one_line_of_whole_tiles():
    q = Quantized(torch.zeros(130, 300).to(e4m3), torch.arange(390.0).view(130, 3), (1, TILE))
    few = q._replace(values=q.values[:100], scale=q.scale[:100])
    assert lines(few).shape == (3, 256), "a cluster of two blocks of 128 rows takes all of its line"
    made = lines(q)
    assert made.shape == (3, 256) and made.is_contiguous() and made.dtype == torch.float32
    assert torch.equal(made[:, :130], q.scale.T) and made.isfinite().all(), "what is behind them must not be NaN"
    square = Quantized(q.values, torch.arange(6.0).view(2, 3), (TILE, TILE))
    assert torch.equal(lines(square), square.scale.T) and lines(square).is_contiguous()
    turned = transpose(Quantized(torch.zeros(300, 130).to(e4m3), torch.arange(390.0).view(3, 130), (TILE, 1)))
    assert torch.equal(lines(turned)[:, :130], turned.scale.T)
    written = torch.ones(3, 256)  # as the kernels of fp8_kernels.py leave scales, of rows or of columns
    assert lines(Quantized(torch.zeros(256, 300).to(e4m3), written.T, (1, TILE))).data_ptr() == written.data_ptr()


# ------------------------------------------------------------------------------------------------- orders of the warps

# 11 steps, so that the four stages are in their third round; rows of both blocks, and both halves of the columns.
RACE = (200, 150, 1296, "Wgrad")
CHOSEN = (0, 5, 10, 12, 17, 22)  # of a cluster's 24 warps: of each block the producer, and one of each consumer
ORDERS = {"in reverse": REVERSE, "shuffled": 9, "shuffled again": 11, "racing": racing(2)}
ORDERS |= {f"warp {w} {f.__name__}": f(w) for w in (0, 4, 12, 16) for f in (ahead, behind)}


@pytest.fixture(scope="module")
def forward():
    a, b = operands(*RACE, "cpu")
    return a, b, cuda_matmul(a, b, torch.float32, order=FORWARD)


@pytest.mark.always("racing")
@pytest.mark.parametrize("name", ORDERS)
def test_the_bits_are_the_same_in_this_order_of_the_warps(name, forward):
    assert_same_bits(forward, {name: ORDERS[name]})


@pytest.mark.prove
def test_the_bits_are_the_same_when_any_warp_is_ahead_or_behind(forward):
    both = 2 * THREADS  # of a cluster
    assert_same_bits(forward, {order: order for order in [*_cuda.uneven(both, CHOSEN), *map(racing, range(3, 8))]})
    a, b = operands(300, 300, 160, "Fprop", "cpu")  # four tiles for one cluster
    again = (a, b, cuda_matmul(a, b, torch.float32))
    assert_same_bits(again, {order: order for order in [*_cuda.uneven(both, CHOSEN), REVERSE]})


def assert_same_bits(forward, orders):
    a, b, want = forward
    assert error(want, a, b) <= 1e-3
    for name, order in orders.items():
        try:
            got = cuda_matmul(a, b, torch.float32, order=order)
        except CudaError as failed:
            raise AssertionError(f"{name}: {failed}") from None
        assert torch.equal(got, want), f"{name}: {(got != want).sum()} numbers are others than forward"


def test_every_tile_is_computed_once_by_blocks_that_stay():
    for M, N in ((300, 300), (2100, 20)):  # 2 x 2 tiles and 9 x 1, where a stripe of 8 rows ends, for a single cluster
        a, b = in_powers_of_two(M, N, 16)
        assert torch.equal(cuda_matmul(a, b, torch.float32), emulated_matmul(a, b, torch.float32)), (M, N)


# ------------------------------------------------------------------------------------------------- in the linear layer


def test_a_linear_layer_of_recipe_block_has_its_three_products_from_the_kernel():
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((48, 144), (160, 144), (48, 160)))
    made = {}
    for name, matmul in (("ours", cuda_matmul), ("emulated", emulated_matmul)):
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = Fp8Linear("block", matmul=matmul)(leaf, weight)
        y.backward(dy)
        made[name] = {"y": y.detach(), "dx": leaf.grad, "dW": weight.grad}
    for what, want in made["emulated"].items():
        off = ((made["ours"][what] - want).norm() / want.norm()).item()
        assert off <= 5e-4, f"{what} is off by {off:.1e}, more than sums of 14 bits explain"


def test_the_argument_is_refused_in_one_line_where_it_cannot_hold(monkeypatch):
    def refused(words, *arguments, **options):
        assert_refused(words, Fp8Linear, *arguments, **options)

    refused("product 'cuda' on cpu: it needs a Hopper GPU", "block", product="cuda")
    refused("product 'nvcc' is unknown; use triton, cuda", "block", product="nvcc")
    refused("product 'cuda' multiplies by recipe block only, not 'row'", "row", product="cuda", device="cuda")
    refused("matmul and product 'cuda'", "block", product="cuda", matmul=emulated_matmul)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    refused("on A100: the kernels are for Hopper .* not 8.0; use bf16", "block", product="cuda", device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    refused("on A100: no sm_90", "block", product="cuda", device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refused("nvcc, which builds it, is not on the PATH", "block", product="cuda", device="cuda")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/nvcc")
    assert Fp8Linear("block", product="cuda", device="cuda").matmul is cuda_matmul
    assert Fp8Linear("block", device="cuda").matmul is not cuda_matmul


def test_what_the_kernel_cannot_multiply_is_refused_in_one_line():
    a, b = in_powers_of_two(4, 4, 32)
    narrow = Quantized(a.values[:, :24], a.scale, a.block)
    for words, left, right in (
        ("of torch.float32 and torch.float8_e4m3fn", a._replace(values=a.values.float()), b),
        ("of torch.float8_e4m3fn and torch.float8_e5m2", a, b._replace(values=b.values.to(e5m2))),
        (r"scales of \(0, 0\)", a._replace(block=(0, 0)), b),
        (r"scales of \(128, 128\)", a._replace(block=(TILE, TILE)), b),
        (r"scales of \(1, 128\) and \(1, 0\)", a, b._replace(block=(1, 0))),
        ("K has to be equal", a, b._replace(values=b.values[:, :16])),
        ("K = 24: no multiple of 16; pad it with zeros to 32", narrow, b._replace(values=b.values[:, :24])),
        ("an empty tensor has no tile", a._replace(values=a.values[:0]), b),
        ("an empty tensor has no tile", a, b._replace(values=b.values[:0])),
        ("cpu and meta; move them", a, b._replace(values=b.values.to("meta"))),
        ("on meta: it needs a Hopper GPU", *(q._replace(values=q.values.to("meta")) for q in (a, b))),
    ):
        assert_refused(words, cuda_matmul, left, right, torch.float32)


def test_numbers_that_the_copy_engine_cannot_read_are_copied_first():
    a, b = in_powers_of_two(9, 9, 32)
    want = cuda_matmul(a, b, torch.float32)
    odd = torch.cat((torch.zeros(1), a.values.float().flatten())).to(e4m3)[1:].view(9, 32)  # an odd address
    turned = b.values.T.contiguous().T
    assert fp8_matmul.rows_of(a.values) is a.values and fp8_matmul.rows_of(odd).data_ptr() % 16 == 0
    assert torch.equal(cuda_matmul(a._replace(values=odd), b._replace(values=turned), torch.float32), want)


def test_a_wrong_option_is_one_line_and_exit_code_2(monkeypatch):
    for options, message in {
        "--rows 0": "--rows 0 is out of range; use 1 to 65536",
        "--columns -1": "--columns -1 is out of range; use 1 to 65536",
        "--columns 65537": "--columns 65537 is out of range; use 1 to 65536",
        "--terms 24": "--terms 24 is no multiple of 16, as the copy engine's rows are; use one",
        "--terms nan": "argument --terms: invalid int value: 'nan'",
        "--rows ": "argument --rows: invalid int value: ''",
        "--resources --terms 32": "--terms 32 changes nothing about --resources; leave one of them out",
    }.items():
        assert refusal(fp8_matmul.main, options.split(" ")) == message
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fp8_matmul, "launch", lambda work: seen.append(work.keywords["args"]))
    monkeypatch.setattr(sys, "argv", ["fp8_matmul.py", "--rows", "1", "--columns", "65536", "--terms", "16"])
    fp8_matmul.main()
    assert [(args.rows, args.columns, args.terms) for args in seen] == [(1, 65536, 16)]


def test_a_kernel_that_writes_nothing_does_not_pass(monkeypatch):
    monkeypatch.setattr(fp8_matmul, "cuda_matmul", lambda a, b, *_, **__: torch.full((8, 8), torch.nan))
    options = fp8_matmul.argparse.Namespace(rows=8, columns=8, terms=16)
    wrong = fp8_matmul.demo(None, torch.device("cpu"), options)
    assert len([line for line in wrong if "nan" in line]) == 6, wrong


# --------------------------------------------------------------------------------------------------- compiled for GPUs


@pytest.mark.prove
@NVCC
def test_no_stack_frame_no_spill_and_products_that_are_not_put_in_a_row(tmp_path):
    cubin, source = tmp_path / "product.cubin", HERE / fp8_matmul.SOURCE
    options = [_cuda.machine_code_for("sm_90a"), f"-I{_cuda.HERE}", "-cubin", "-Xptxas", "-v"]
    command = ["nvcc", "-O3", *options, str(source), "-o", str(cubin)]
    said = _cuda.run_compiler(command, fp8_matmul.SOURCE)
    assert "serialized" not in said, said  # what ptxas says where it waits for every product at once
    assert said.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 4, said
    # setmaxnreg moves registers between warps, and counts on an even split.
    assert {int(n) for n in re.findall(r"Used (\d+) registers", said)} == {65536 // THREADS // 8 * 8}, said
    stages = int(re.search(r"STAGES = (\d+)", source.read_text())[1])
    assert "bytes smem" not in said, "what a cluster's blocks share is dynamic"
    assert stages * (3 * TILE * TILE + 3 * TILE * 4 + 16) <= 227 * 1024, "A [128], B [256] and their scales, barriers"
    codes = _cuda.functions(cubin)
    assert len(codes) == 4
    for code in codes:
        # For each half of the columns four instructions for 128 terms, one wait for all of them, and the promotion.
        assert len(re.findall(r"QGMMA\.64x128x32\.F32\.E[45]M[23]\.E4M3", code)) == 8, "twice four wgmma of 8 bits"
        assert "UTMALDG.2D.MULTICAST" in code and "UBLKCP" in code and "USETMAXREG" in code
        assert not re.search(r"\b(LDL|STL)\b", code), "numbers in local memory"
        assert code.count("MEMBAR.ALL.GPU") == code.count("CCTL.IVALL") == 2, "a step waits for L2, or empties L1"
        after = code[code.rindex("QGMMA") :]
        assert len(re.findall(r"\bFFMA\b", after)) >= 64, "64 results of a thread are added in fp32"


def test_the_left_operand_is_in_e4m3_or_in_e5m2_by_the_product():
    for product, dtype in (("Fprop", e4m3), ("Dgrad, e5m2", e5m2)):
        a, _ = operands(4, 4, 32, product, "cpu")
        assert a.values.dtype == dtype, product
