"""The Triton kernels against the definition in float64: in the interpreter, or on the GPU if there is one; and what the
compiler makes of them for GPUs that need not be there."""

import contextlib
import math
import runpy
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import flash_kernels
import numpy
import pytest
import torch
import torch.nn.functional as F
from _flash_launch import Plan, Tiles, check_inputs, fit, plan_for, plan_of
from _flash_verify import poisoned
from _interpreter import INTERPRETED, tl, triton
from flash_kernels import (
    REPEATABLE,
    TRITON,
    flash_attention,
    flash_attention_with_lse,
    runs_of_tiles,
    triton_backward,
    triton_forward,
)
from flash_tiles import Version, explicit_attention, step, tiled_backward, tiled_forward, torch_attention
from harness.meter import peak_memory, saved_activations
from harness.programs import assert_refused, error_from, printed_json, refusal
from harness.ranks import run_ranks
from harness.reference import assert_same

HERE = Path(__file__).parent
DEVICE = "cpu" if INTERPRETED else "cuda"
HOPPER = INTERPRETED or torch.cuda.get_device_capability()[0] == 9
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
CASES = {  # S_q, S_k, N, N_kv, D, causal, window, offset
    "causal": (36, 36, 4, 2, 32, True, None, 0),
    "whole_tiles": (64, 64, 1, 1, 64, False, None, 0),
    "cross_attention": (20, 41, 9, 9, 48, False, None, 0),  # D is no power of two; heads beyond a group of eight
    "causal_window": (71, 71, 2, 1, 32, True, 20, 0),
    "window": (60, 40, 2, 1, 32, False, 9, 0),
    "later_chunk_of_a_ring": (33, 66, 3, 1, 32, True, None, 33),  # three query heads a group
    "rows_without_keys": (66, 33, 2, 1, 32, True, 24, -17),  # the first and the last ones
}


def inputs(S_q, S_k, N, N_kv, D, dtype=torch.float32, B=1):
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S_q, N, D), (B, S_k, N_kv, D), (B, S_k, N_kv, D), (B, S_q, N, D))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def relative(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def check_against_the_definition(case, dtype, strided=False, plan=None):
    """Errors of out, dq, dk and dv are at most twice those of PyTorch's kernel, where that one has an answer."""
    *sizes, causal, window, offset = case
    mask = dict(causal=causal, window=window, offset=offset)
    given = inputs(*sizes, dtype, B=2 if sizes[2] == 4 else 1)
    if strided:
        given = strange_strides(*given)
    q, k, v, dout = given
    want = step(partial(explicit_attention, **mask), *(x.double() for x in given))
    theirs = step(partial(torch_attention, **mask), *given)
    out, lse = triton_forward(q, k, v, **mask, dtype=dtype, plan=plan)
    got = [out, *triton_backward(dout, q, k, v, out, lse, **mask, dtype=dtype, plan=plan)]
    for name, x, y, z in zip(("out", "dq", "dk", "dv"), got, want, theirs, strict=True):
        # Where PyTorch's is lucky (its error may be half a rounding), a few roundings are allowed.
        floor = (8 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps
        error, allowed = relative(x, y), max(2 * relative(z, y), floor)
        assert error <= allowed, f"{name} of {sizes} {mask} {dtype}: off by {error:.1e}, allowed {allowed:.1e}"


def strange_strides(q, k, v, dout):
    """q out of a fused projection that begins in the middle of a storage, k transposed, v in rows of odd length, and a
    gradient that is one number."""
    B, S, N, D = q.shape
    fused = torch.empty(B, S, 2 * N + 1, D, dtype=q.dtype, device=DEVICE)
    fused[:, :, 1 : N + 1] = q
    odd = torch.empty(B, *v.shape[1:3], D + 3, dtype=v.dtype, device=DEVICE)
    odd[..., 1 : D + 1] = v
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    return (
        fused[:, :, 1 : N + 1],
        k,
        odd[..., 1 : D + 1],
        torch.full((), 0.5, dtype=q.dtype, device=DEVICE).expand_as(q),
    )


def plans(dtype):
    """The plan of this device, and one without the copy engine and with other tiles."""
    plan = plan_of(torch.empty(1, 1, 1, 32, dtype=dtype, device=DEVICE))
    return [plan, Plan(Tiles(16, 32), Tiles(16, 32), Tiles(32, 16), tma=False)]


@pytest.mark.always("causal-torch.float16", "cross_attention-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_errors_are_at_most_twice_those_of_pytorchs_kernel_for_output_and_gradients(case, dtype):
    check_against_the_definition(case, dtype)


@pytest.mark.prove
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "addresses"])
def test_slices_transposes_odd_strides_and_expanded_gradients_are_read_right(tma):
    plan = plans(torch.float16)[0 if tma else 1]
    for case in (CASES["causal"], CASES["rows_without_keys"]):
        check_against_the_definition(case, torch.float16, strided=True, plan=plan)


def test_strides_are_those_of_the_caller_also_of_the_lse_and_queries_may_be_the_last_of_the_keys():
    q, k, v, dout = strange_strides(*inputs(9, 12, 2, 2, 32, B=2))
    mask = dict(causal=True, window=None, offset=3)
    want = step(partial(explicit_attention, **mask), *(x.double() for x in (q, k, v, dout)))
    for plan in plans(torch.float32):
        out, lse = triton_forward(q, k, v, **mask, plan=plan)
        lse = lse.mT.contiguous().mT  # [B, N, S], in memory as [B, S, N]
        got = [out, *triton_backward(dout, q, k, v, out, lse, **mask, plan=plan)]
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x.double(), y, 1e-5, f"{name}, {'descriptors' if plan.tma else 'addresses'}")


@pytest.mark.prove
def test_every_number_of_the_results_is_written():
    """PyTorch fills what is allocated and not written with NaN, if asked to."""
    for *sizes, causal, window, offset in (CASES["cross_attention"], CASES["rows_without_keys"]):
        mask = dict(causal=causal, window=window, offset=offset)
        q, k, v, dout = inputs(*sizes)
        with poisoned():
            out, lse = triton_forward(q, k, v, **mask)
            for repeatable in (False, True):
                gradients = triton_backward(dout, q, k, v, out, lse, **mask, repeatable=repeatable)
                assert not any(x.isnan().any() for x in (out, lse, *gradients)), f"{sizes} {mask}"


def test_a_row_without_keys_has_output_zero_lse_minus_infinity_and_gradient_zero():
    q, k, v, dout = inputs(40, 40, 2, 1, 32)
    mask = dict(causal=True, window=None, offset=-10)
    out, lse = triton_forward(q, k, v, **mask)
    assert (out[:, :10] == 0).all() and (lse[..., :10] == -math.inf).all()
    assert lse[..., 10:].isfinite().all()
    dq, dk, dv = triton_backward(dout, q, k, v, out, lse, **mask)
    assert (dq[:, :10] == 0).all() and (dk[:, 30:] == 0).all() and (dv[:, 30:] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.prove
def test_a_nan_in_one_sequence_stays_there():
    """Ragged lengths: a tile that ran on into the next sequence or head would bring the NaN along, as 0 · NaN."""
    for plan in plans(torch.float32):
        q, k, v, dout = inputs(37, 37, 2, 2, 48, B=2)
        for x in (q, k, v, dout):
            x[1], x[0, :, 1] = math.nan, math.nan
        out, lse = triton_forward(q, k, v, causal=False, plan=plan)
        clean = [out, lse.transpose(1, 2), *triton_backward(dout, q, k, v, out, lse, causal=False, plan=plan)]
        assert all(x[0, :, 0].isfinite().all() and x[1].isnan().all() for x in clean)


@pytest.mark.prove
def test_tiles_that_no_query_sees_are_never_loaded():
    """Keys and values that would spoil everything they touch, in tiles that lie outside the band."""
    q, k, v, dout = inputs(64, 160, 2, 1, 32)
    mask = dict(causal=True, window=33, offset=64)  # keys 32..127 are seen
    k[:, :32], v[:, :32], k[:, 128:], v[:, 128:] = math.nan, math.nan, math.nan, math.nan
    if not INTERPRETED:
        pytest.skip("the tiles of a GPU's plan are larger than this test's")
    out, lse = triton_forward(q, k, v, **mask)
    assert out.isfinite().all() and lse.isfinite().all()
    dq, dk, dv = triton_backward(dout, q, k, v, out, lse, **mask)
    assert dq.isfinite().all() and dk[:, 32:128].isfinite().all() and dv[:, 32:128].isfinite().all()


def test_scores_of_ten_thousand_are_as_exact_as_pytorchs():
    q, k, v, dout = inputs(50, 50, 2, 1, 32)
    q, k = q * 60, k * 60
    want = explicit_attention(q.double(), k.double(), v.double(), causal=True)
    theirs = torch_attention(q, k, v, causal=True, window=None, offset=0)
    out, lse = triton_forward(q, k, v, causal=True)
    assert relative(out, want) <= 2 * relative(theirs, want) + 1e-6
    assert all(x.isfinite().all() for x in triton_backward(dout, q, k, v, out, lse, causal=True))


@triton.jit
def runs_kernel(into, start, stop, first, last, length, STEP: tl.constexpr):
    begin, whole, cut, end = runs_of_tiles(start, stop, first, last, length, STEP)
    tl.store(into, begin)
    tl.store(into + 1, whole)
    tl.store(into + 2, cut)
    tl.store(into + 3, end)


def test_the_runs_hold_every_visible_pair_and_whole_tiles_no_hidden_one():
    into = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for start, stop in ((0, 8), (8, 13)):
        for first in (-40, -9, -3, 2, 30):
            for last in (-30, -8, 0, 3, 40):
                if last < first:
                    continue
                for length in (5, 16):
                    runs_kernel[(1,)](into, start, stop, first, last, length, STEP=4)
                    begin, whole, cut, end = into.tolist()
                    assert begin <= whole <= cut <= end and begin % 4 == 0
                    assert whole == cut or whole % 4 == cut % 4 == 0  # whole tiles end before `length` does
                    pairs = [(i, j) for i in range(start, stop) for j in range(length) if first <= j - i <= last]
                    assert all(begin <= j < end for _, j in pairs), (start, stop, first, last, length)
                    assert all((i, j) in pairs for i in range(start, stop) for j in range(whole, cut))
                    assert end - begin <= 4 * len({j // 4 for _, j in pairs}) or not pairs  # and no tile in vain


@pytest.mark.prove
def test_blocks_of_keys_give_their_shares_of_the_gradients_from_the_lse_of_all_keys():
    q, k, v, dout = inputs(40, 40, 4, 2, 32)
    out, lse = triton_forward(q, k, v, causal=True)
    whole = tiled_backward(dout, q, k, v, *tiled_forward(q, k, v, causal=True), causal=True)
    first, second = (
        triton_backward(dout, q, k[:, a:b], v[:, a:b], out, lse, causal=True, offset=-a) for a, b in ((0, 17), (17, 40))
    )
    assert_same(first[0] + second[0], whole[0], 1e-5, "dq")
    assert_same(torch.cat((first[1], second[1]), 1), whole[1], 1e-5, "dk")
    assert_same(torch.cat((first[2], second[2]), 1), whole[2], 1e-5, "dv")


def test_parts_merged_under_autograd_have_the_gradients_of_the_whole():
    q, k, v, dout = inputs(30, 30, 2, 1, 32)
    want = step(lambda q, k, v: explicit_attention(q, k, v, causal=False), *(x.double() for x in (q, k, v, dout)))

    def merged(q, k, v):
        (a, lse_a), (b, lse_b) = (
            flash_attention_with_lse(q, k[:, part], v[:, part], causal=False) for part in (slice(13), slice(13, None))
        )
        share = torch.sigmoid(lse_a - lse_b).transpose(1, 2)[..., None]  # e^a / (e^a + e^b), [B, N, S] -> [B, S, N, 1]
        return share * a + (1 - share) * b

    for name, got, y in zip(("out", "dq", "dk", "dv"), step(merged, q, k, v, dout), want, strict=True):
        assert_same(got.double(), y, 1e-5, name)


@pytest.mark.prove
def test_saved_are_inputs_output_and_lse_to_the_byte_and_no_allocation_grows_with_the_square_of_s():
    peaks = []
    for S in (64, 128):
        q, k, v, dout = inputs(S, S, 4, 2, 32, torch.float16)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        with saved_activations() as saved, peak_memory() as forward:
            out, lse = flash_attention_with_lse(q, k, v)
        assert saved.bytes == q.nbytes + k.nbytes + v.nbytes + out.nbytes + lse.nbytes
        with peak_memory() as backward:
            out.backward(dout)
        peaks.append((forward.peak, backward.peak))
        if not INTERPRETED:  # the interpreter works on copies of its arguments
            assert forward.peak == out.nbytes + lse.nbytes
            assert backward.peak == 3 * q.nbytes + k.nbytes + v.nbytes + lse.nbytes  # dq in fp32 and fp16, delta
    assert peaks[1] == tuple(2 * peak for peak in peaks[0])


@pytest.mark.prove
def test_two_runs_of_the_repeatable_backward_give_the_same_bits():
    q, k, v, dout = inputs(40, 40, 4, 2, 32, torch.float16)
    attention = partial(flash_attention, version=REPEATABLE)
    first, second = (step(attention, q, k, v, dout) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.always("five")
@pytest.mark.parametrize("repeatable", [False, True], ids=["five", "seven"])
def test_dq_dk_and_dv_are_summed_over_tiles_in_32_bits(repeatable):
    """A tile that gives much and then three that give little: in fp16, 90 + 0.03 is 90, and three times."""
    S, D = 64, 32
    zero = torch.zeros(1, S, 1, D, dtype=torch.float16, device=DEVICE)
    little, sign = zero + 0.02, zero + 1
    little[:, :16], sign[:, ::2] = 64, -1
    down, across = Tiles(16, 64), Tiles(64, 16)
    for what, tiles, q, k, v, dout in (  # scores are all 0, so each weight is 1/64
        ("dq", across, zero, little * sign, sign, zero + 1),
        ("dk", down, little, zero, sign, zero + 1),
        ("dv", down, zero, zero, sign, little),
    ):
        at = ("dq", "dk", "dv").index(what)
        plan = Plan(tiles, tiles, tiles, tma=HOPPER)
        want = step(partial(explicit_attention, causal=False), *(x.double() for x in (q, k, v, dout)))[1:][at]
        out, lse = triton_forward(q, k, v, causal=False)
        for dtype, limit in ((None, 1e-6), (torch.float16, 7e-4)):
            how = dict(causal=False, plan=plan, dtype=dtype, repeatable=repeatable)
            got = triton_backward(dout, q, k, v, out, lse, **how)[at]
            assert out.dtype == torch.float32 and got.dtype == (dtype or torch.float32)
            assert_same(got.double(), want, limit, f"{what} as {dtype}")


def test_keys_beyond_the_end_of_a_tile_add_nothing_to_dq_however_low_the_scores():
    """Scores of -566: the weight of a key that is not there would be e^(0 + 566), and infinity times its 0 is NaN."""
    q, k, v, dout = inputs(37, 37, 2, 1, 32)
    q, k = 10 + 0.1 * q, -10 + 0.1 * k
    want = step(partial(explicit_attention, causal=False), *(x.double() for x in (q, k, v, dout)))
    out, lse = triton_forward(q, k, v, causal=False)
    assert lse.max() < -400
    for plan in plans(torch.float32):
        got = triton_backward(dout, q, k, v, out, lse, causal=False, plan=plan)
        for name, x, y in zip(("dq", "dk", "dv"), got, want[1:], strict=True):
            # Rounded scores of 566 err by 1e-4, on each machine differently, and so do weights. Their sum should be 1:
            # what it lacks counts a hundred times in dq, since keys are -10 and a hundredth of that.
            limit = 2e-2 if name == "dq" else 2e-4
            assert_same(x.double(), y, limit, f"{name}, {'descriptors' if plan.tma else 'addresses'}")


def test_a_window_of_many_tiles_has_whole_tiles_between_cut_ones():
    """Tiles of 16 and a window of 34: a program walks along cut tiles, a whole one, and a cut one."""
    q, k, v, dout = inputs(64, 64, 1, 1, 32)
    mask = dict(causal=True, window=34, offset=0)
    want = step(partial(explicit_attention, **mask), *(x.double() for x in (q, k, v, dout)))
    tiles = Tiles(16, 16, *([] if INTERPRETED else [4, 1]))
    plan = Plan(tiles, tiles, tiles, tma=False)
    out, lse = triton_forward(q, k, v, **mask, plan=plan)
    for repeatable in (False, True):
        got = triton_backward(dout, q, k, v, out, lse, **mask, plan=plan, repeatable=repeatable)
        for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *got), want, strict=True):
            assert_same(x.double(), y, 1e-5, name)


@contextmanager
def additions():
    """Of each addition in memory: how many numbers it adds."""
    found, machine = [], triton.runtime.interpreter.interpreter_builder
    plain = machine.create_atomic_rmw

    def counted(kind, address, value, mask, *rest):
        found.append(int(mask.data.sum()))
        return plain(kind, address, value, mask, *rest)

    machine.create_atomic_rmw = counted
    try:
        yield found
    finally:
        del machine.create_atomic_rmw


@pytest.mark.prove
@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter counts")
def test_each_tile_of_keys_adds_once_to_each_dq_that_sees_it_and_deterministic_algorithms_add_nothing():
    q, k, v, dout = inputs(40, 50, 2, 1, 32)
    out, lse = triton_forward(q, k, v, causal=True, offset=10)
    for plan in plans(torch.float32):
        R, C = plan.dkdv.rows, plan.dkdv.columns
        how = dict(causal=True, offset=10, plan=plan)
        with additions() as found:
            triton_backward(dout, q, k, v, out, lse, **how)
        tiles = [(i, j) for j in range(0, 50, C) for i in range(0, 40, R) if j <= min(i + R, 40) - 1 + 10]
        assert len(found) == 2 * len(tiles), "an addition for each tile of each query head"
        assert sum(found) == 2 * 32 * sum(min(R, 40 - i) for i, _ in tiles)
        torch.use_deterministic_algorithms(True)
        try:
            with additions() as found:
                triton_backward(dout, q, k, v, out, lse, **how)
        finally:
            torch.use_deterministic_algorithms(False)
        assert not found, "PyTorch was told to be deterministic"


@pytest.mark.parametrize("version", ["five", "seven"])
def test_the_option_version_chooses_the_backward_pass(version, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flash_kernels.py", "--version", version])
    chosen = flash_kernels.VERSIONS[flash_kernels.parse_arguments().version]
    q, k, v, dout = inputs(10, 10, 1, 1, 32)
    out, lse = chosen.forward(q, k, v, causal=True)
    with additions() if INTERPRETED else contextlib.nullcontext([]) as found:
        chosen.backward(dout, q, k, v, out, lse, causal=True)
    assert sum(found) == (10 * 32 if version == "five" else 0) or not INTERPRETED  # and nothing behind the ten queries
    for plan, told in ((None, poisoned()), (plan_of(q)._replace(five=False), contextlib.nullcontext())):
        with told, additions() if INTERPRETED else contextlib.nullcontext([]) as found:
            chosen.backward(dout, q, k, v, out, lse, causal=True, plan=plan)
        assert not found, "PyTorch was told to be deterministic, or five products do not fit"


@pytest.mark.skipif(not INTERPRETED, reason="a compiler needs no NumPy")
def test_a_numpy_that_tritons_interpreter_does_not_go_with_is_named(monkeypatch):
    monkeypatch.setattr(triton.runtime.interpreter.interpreter_builder, "create_descriptor_reduce", None)
    pairs = {("3.6.0", "2.4.1"): False, ("3.6.0", "2.3.5"): True, ("3.7.0", "2.4.0"): True, ("3.10.0", "2.10.0"): True}
    for (of_triton, of_numpy), fits in pairs.items():
        monkeypatch.setattr(triton, "__version__", of_triton)
        monkeypatch.setattr(numpy, "__version__", of_numpy)
        said = error_from(ImportError, runpy.run_path, str(HERE / "_interpreter.py"))
        assert (said == "") == fits and ('pip install "numpy<2.4"' in said) != fits, (of_triton, of_numpy)


def ring_of_chapter_5():
    """Errors of chapter 5's ring with these kernels inside, against attention over the whole sequence."""
    sys.path.insert(0, str(HERE.parents[1] / "05_context_parallel" / "in_depth"))
    import torch.distributed as dist
    from context_ring import dense_attention, layout_positions, ring_attention, shard_sequence

    group, rank, P = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 48, heads, 32, generator=generator) for heads in (4, 2, 2, 4)]
    want = step(lambda q, k, v: dense_attention(q, k, v, causal=True), *given)
    errors = {}
    for layout in ("contiguous", "zigzag", "striped"):
        attention = ring_attention(group, layout, TRITON)
        shards = [shard_sequence(x, layout, rank, P).contiguous() for x in given]
        got = step(lambda q, k, v, attention=attention: attention(q, k, v, causal=True), *shards)
        mine = layout_positions(layout, 48, rank, P)
        found = [relative(x, y[:, mine].double()) for x, y in zip(got, want, strict=True)]
        errors[layout] = max(found, key=lambda e: (e != e, e))  # a NaN is the worst
    return errors


@pytest.mark.prove
def test_the_ring_of_chapter_5_runs_on_these_kernels_in_every_layout():
    for rank, errors in enumerate(run_ranks(3 if not torch.cuda.is_available() else 1, ring_of_chapter_5, timeout=120)):
        for layout, error in errors.items():
            assert error <= 1e-5, f"rank {rank}, {layout}: off by {error:.1e}"


def test_a_model_of_chapter_1_can_take_it_as_its_attention():
    q, k, v, _ = inputs(24, 24, 4, 2, 32)
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    assert_same(flash_attention(q, k, v, causal=True), want.transpose(1, 2), 1e-5)
    for attention in (flash_attention, lambda *given, **mask: flash_attention_with_lse(*given, **mask)[0]):
        assert_same(attention(q, k, v), want.transpose(1, 2), 1e-5, "causal, unless told otherwise")
        nothing = Version(lambda q, k, v, **how: (q * 0, q[..., 0].mT * 0), None)
        assert (attention(q, k, v, version=nothing) == 0).all(), "another version than the one that is given"
        mask = dict(causal=True, window=7, offset=3)
        assert_same(attention(q, k, v, **mask), explicit_attention(q, k, v, **mask), 1e-5, str(mask))


def test_what_the_kernels_cannot_do_is_refused_in_one_line():
    def tensors(D=32, S=8, N=4, N_kv=2, dtype=torch.float16, B=1):
        q = torch.empty(B, S, N, D, dtype=dtype, device="meta")
        kv = torch.empty(B, S, N_kv, D, dtype=dtype, device="meta")
        return [q, kv, kv]

    q, k, v = tensors()
    refused = {
        "float64": tensors(dtype=torch.float64),
        "head dim 40": tensors(D=40),
        "head dim 16": tensors(D=16),
        "head dim 512": tensors(D=512),
        "4 query heads do not divide among 3": tensors(N_kv=3),
        "q is on meta and k on cpu": [q, torch.empty(1, 8, 2, 32, dtype=torch.float16), v],
        "q is torch.float16 and v torch.float32": [q, k, v.float()],
        "do not fit": [q, k[..., :16], v],
        "empty": tensors(S=0),
        "pass 32 bits": tensors(S=2**30),
        "split the batch": tensors(B=2**20, N=2**9, S=512),
        **({"bfloat16 is wrong in Triton's interpreter": tensors(dtype=torch.bfloat16)} if INTERPRETED else {}),
    }
    refused = {words: (*given, None) for words, given in refused.items()} | {"window 0": (q, k, v, 0)}
    for words, given in refused.items():
        assert_refused(words, check_inputs, *given)
    said = refusal(flash_kernels.parse_arguments, "--head-dim 40")
    assert said.startswith("--dtype float32 --head-dim 40: head dim 40")


def test_addresses_beyond_2_to_the_31_are_reached():
    """A batch and a token stride of over 2^31 elements: 64-bit sums. The memory between them is never touched."""
    D, far = 32, 2**31 + 16
    whole = torch.empty(far + 40 * D, dtype=torch.float16, device="meta")
    x = torch.as_strided(whole, (2, 40, 1, D), (far, D, D, 1))
    assert fit(x, 32, tma=False)[2] == far
    x = torch.as_strided(whole, (1, 40, 1, D), (0, 2**28, D, 1))  # 32 rows of a tile would pass 2^31 within the tile
    assert fit(x, 32, tma=False)[3] == D  # copied


def test_the_copy_engine_gets_addresses_and_strides_of_16_bytes_and_what_has_them_is_not_copied():
    whole = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    shape = (2, 10, 3, 32)
    straight = whole[8:1928].view(shape)
    fits = {"as it is": straight, "a slice of heads": straight[:, :, 1:], "a transpose": straight.transpose(1, 2)}
    unfit = {
        "an address of 2 bytes": whole[1:1921].view(shape),
        "an address of 8 bytes": whole[4:1924].view(shape),
        "rows of odd length": torch.as_strided(whole, shape, (1300, 105, 33, 1)),
        "tokens apart by 8 bytes": torch.as_strided(whole, shape, (1600, 100, 32, 1)),
        "one number": whole[0].expand(shape),
        "columns apart": whole[:3840].view(2, 10, 3, 64)[..., ::2],
    }
    for name, x in (fits | unfit).items():
        base, D, *strides = fit(x, 32, tma=True)
        assert base.data_ptr() % 16 == 0, name
        assert all(stride > 0 and stride * x.itemsize % 16 == 0 for stride in strides), f"{name}: {strides}"
        assert torch.equal(torch.as_strided(base, x.shape, (*strides, 1), base.storage_offset()), x), name
        assert D == 32 and (base is x) == (name in fits), f"{name}: copied or not"
    for name in ("an address of 2 bytes", "rows of odd length"):  # without the engine any address and stride will do
        assert fit(unfit[name], 32, tma=False)[0] is unfit[name], name


def test_only_hopper_and_its_like_get_tiles_for_227_kib(monkeypatch):
    q = SimpleNamespace(device=torch.device("cuda", 0), shape=(1, 1, 1, 128), dtype=torch.bfloat16)
    for have, large in (((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, have=have: have)
        assert plan_of(q) == plan_for(128, torch.bfloat16, large), have


def compiled(*wanted):
    """What `_flash_compile.py` says of each kernel, from a process that compiles instead of interpreting."""
    return printed_json(HERE / "_flash_compile.py", *wanted, TRITON_INTERPRET="0")


def check_binary(kernel):
    """One kernel against the limits of its chip, and the instructions that it should consist of."""
    assert kernel["shared"] <= kernel["shared_limit"], kernel
    assert kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel
    hopper_128 = (kernel["kernel"], kernel["capability"], kernel["D"]) == ("forward", 90, 128) and kernel["tma"]
    assert kernel["spilled"] <= 128 * hopper_128, kernel  # bytes of stack included; plan_for says why these may be
    assert kernel["adds"] == (kernel["kernel"] == "dkdvdq"), kernel
    sixteen, multiplies = kernel["dtype"] != "float32", kernel["kernel"] != "delta"
    assert kernel["wgmma"] == (sixteen and multiplies and kernel["capability"] == 90), kernel
    narrow = (kernel["kernel"], kernel["D"]) == ("dkdvdq", 32)  # its share of dq: the compiler takes the old one too
    assert kernel["mma"] == (sixteen and multiplies and (kernel["capability"] == 80 or narrow)), kernel
    assert kernel["tma"] == (sixteen and kernel["capability"] == 90), kernel


@pytest.mark.prove
def test_products_of_float32_tiles_are_not_rounded_to_tf32():
    kernels = compiled("90", "float32", "32")
    assert len(kernels) == 5
    for kernel in kernels:
        assert not kernel["tf32"], "TF32 keeps 10 of the 23 bits of a float32"
        check_binary(kernel)


DIMS = ("32", "64", "128", "256")


@pytest.mark.prove
@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize("capability", ["80", "90"])
def test_in_float32_no_kernel_has_a_stack_frame(capability, D):
    kernels = compiled(capability, "float32", D)
    assert len(kernels) == 5
    for kernel in kernels:
        check_binary(kernel)


@pytest.mark.prove
@pytest.mark.parametrize("target", ["80 float16 64", *(f"{sm} bfloat16 {D}" for sm in (80, 90) for D in DIMS)])
def test_in_16_bits_only_the_forward_of_heads_of_128_on_hopper_has_a_stack_frame(target):
    """With the Triton that is here: before 3.7 it needs more registers, and the plan has other tiles for it."""
    capability, dtype, D = target.split()
    kernels = compiled(capability, dtype, D)
    assert len(kernels) == 5 - (capability == "80" and int(D) > 64)  # without dkdvdq
    for kernel in kernels:
        check_binary(kernel)
