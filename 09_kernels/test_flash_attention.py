"""flash_attention.py against the definition in float64, the kernels in depth and its own formulas; compiled for sm_90.

Without a GPU the interpreter checks the arithmetic. What decides an exercise runs in another process and is compared
here. As a script, in a process that compiles instead of interpreting, this file prints the resources of each kernel.
"""

import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for when this file is run as a script
sys.path.append(str(Path(__file__).with_name("in_depth")))

import flash_attention as script
from _flash_verify import poisoned
from _interpreted_bf16 import bfloat16
from harness.meter import peak_memory, saved_activations
from harness.programs import assert_refused, printed_json, refusal, run_script
from harness.ranks import run_ranks
from harness.reference import assert_same

tl, triton, INTERPRETED = script.tl, script.triton, script.INTERPRETED.value
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F64 = torch.float64
NAMES = ("out", "dq", "dk", "dv")


def definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """out and LSE, written out with nothing of the script, a head after the other."""
    outs, lses = [], []
    S, G = q.shape[1], q.shape[2] // k.shape[2]
    hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1) & causal
    for n in range(q.shape[2]):
        scores = q[:, :, n] @ k[:, :, n // G].transpose(1, 2) / math.sqrt(q.shape[-1])  # [B, S, S]
        scores = scores.masked_fill(hidden, -math.inf)
        lses.append(scores.logsumexp(-1))
        outs.append((scores - lses[-1][..., None]).exp() @ v[:, :, n // G])
    return torch.stack(outs, 2), torch.stack(lses, 1)


def inputs(B: int, S: int, N: int, N_kv: int, D: int, dtype: torch.dtype = F64) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, S, n, D) for n in (N, N_kv, N_kv, N)]
    return [torch.randn(shape, generator=generator, dtype=F64).to(DEVICE, dtype) for shape in shapes]


def results(attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def wanted(given: list[Tensor], causal: bool) -> list[Tensor]:
    return results(lambda *x: definition(*x, causal)[0], *(x.double() for x in given))


def flash(causal: bool, blocks: tuple = ()):
    return lambda *x: script.flash_attention(*x, causal=causal, blocks=blocks)


# -------------------------------------------------------------------------------------------------- a row of softmax


@pytest.mark.always("block-None", "block-16")
@pytest.mark.parametrize("block", [None, 16, 64], ids=lambda b: f"block-{b}")
def test_softmax_matches_torch(block):
    generator = torch.Generator().manual_seed(0)
    for length in (1, 15, 16, 33, 70):
        x = 30 * torch.randn(4, length, generator=generator, dtype=F64)
        x[1], x[2] = x[1].sort().values, x[2].sort(descending=True).values  # a new maximum in every block, and in none
        x[3] = torch.linspace(5000, 2000, length)  # e^5000 is no number, and neither is e^(5000 - 4000)
        x[0, : min(length, block or length) - 1] = -math.inf  # the first maximum too; one number of the block is left
        [got] = run_ranks(1, script.softmax, x.to(DEVICE), block)
        assert_same(got, x.softmax(-1), 1e-12, f"rows of {length}")
    x = torch.randn(3, 40, generator=generator, dtype=F64).to(DEVICE)
    assert_same(script.softmax(x.T, block), x.T.softmax(-1), 1e-12, "rows that are columns elsewhere")


def softmax_traffic(x: Tensor, block: int | None) -> int:
    with script.count_traffic() as count:
        script.softmax(x, block)
    return count[0]


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter counts")
def test_softmax_moves_each_element_twice_or_three_times():
    x = torch.randn(5, 70)
    for block, trips in ((None, 2), (16, 3)):
        [moved] = run_ranks(1, softmax_traffic, x, block)
        assert moved == trips * x.nbytes + (5 * 4 if block else 0), "in blocks: and the first maximum of each row"


# ------------------------------------------------------------------------------------------------ attention is exact

CASES = [  # B, S, N, N_kv, D, causal, blocks
    (1, 32, 1, 1, 16, True, (16, 16)),  # tiles divide the sequence
    (1, 37, 2, 1, 16, True, (16, 32)),
    (2, 9, 4, 2, 16, True, (16, 32)),  # two query heads share each of two K/V heads, in two sequences
    (1, 37, 1, 1, 32, False, (16, 32)),
    (1, 20, 3, 1, 16, False, (32, 16)),
    (1, 9, 2, 1, 16, True, (32, 16)),  # less than a tile
    (1, 1, 1, 1, 16, True, ()),
]


def on_a_rank(cases: list[tuple]) -> list[list[Tensor]]:
    """out, dq, dk, dv and LSE of each (given, causal, blocks)."""
    found = []
    for (*given, dout), causal, blocks in cases:
        q, k, v = (x.detach().requires_grad_() for x in given)
        out, lse = script.FlashAttention.apply(q, k, v, causal, *(blocks or script.block_sizes(q)))
        found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), dout), lse])
    return found


def test_output_lse_and_gradients_match_the_definition():
    cases = [(inputs(*sizes), causal, blocks) for *sizes, causal, blocks in CASES]
    [found] = run_ranks(1, on_a_rank, cases)
    for (*sizes, causal, blocks), (given, *_), got in zip(CASES, cases, found, strict=True):
        want = [*wanted(given, causal), definition(*given[:3], causal)[1]]
        for name, x, y in zip((*NAMES, "LSE"), got, want, strict=True):
            assert_same(x, y, 1e-10, f"{name} of {sizes}, causal {causal}, blocks {blocks}")
        dense = results(lambda *x, c=causal: script.dense_attention(*x, causal=c), *given)
        for name, x, y in zip(NAMES, dense, want[:4], strict=True):
            assert_same(x, y, 1e-10, f"the script's dense attention: {name} of {sizes}, causal {causal}")


def test_large_scores_do_not_overflow():
    q, *rest = inputs(1, 20, 1, 1, 16)
    given = [100 * q, *rest]
    for name, x, y in zip(NAMES, results(flash(True, (16, 16)), *given), wanted(given, True), strict=True):
        assert_same(x, y, 1e-9, name)


def test_three_training_steps_match_the_definition():
    found = []
    for attention in (flash(True), lambda *x: definition(*x, True)[0]):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Embedding(20, 32), nn.Linear(32, 64), nn.Linear(32, 20)]).to(DEVICE, F64)
        losses = []
        for step in range(3):
            tokens = (torch.arange(34, device=DEVICE) * (step + 3) % 20).view(2, 17)
            x = model[0](tokens[:, :-1])
            q, k, v = model[1](x).unflatten(-1, (4, 16)).split((2, 1, 1), 2)  # [B, S, heads, D]: slices, not contiguous
            logits = model[2](x + attention(q, k, v).flatten(2))
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            losses.append(loss.detach())
            for p in model.parameters():
                p.data, p.grad = p.data - 0.5 * p.grad, None
        found.append([torch.stack(losses), *(p.detach() for p in model.parameters())])
    for at, (x, y) in enumerate(zip(*found, strict=True)):
        assert_same(x, y, 1e-10, "the losses" if not at else f"weight {at}")


@pytest.mark.prove
def test_agrees_with_the_kernels_in_depth():
    import flash_kernels

    for dtype, limit, causal in ((torch.float32, 2e-6, True), (torch.float16, 2e-3, False)):
        given = inputs(1, 37, 2, 1, 32, dtype)
        other = results(lambda *x, c=causal: flash_kernels.flash_attention(*x, causal=c), *given)
        for name, x, y in zip(NAMES, results(flash(causal), *given), other, strict=True):
            assert_same(x, y, limit, f"{name} in {dtype}, causal {causal}")
        mine = script.FlashAttention.apply(*given[:3], causal, 32, 16)[1]
        assert_same(mine, flash_kernels.triton_forward(*given[:3], causal=causal)[1], 2e-6, f"LSE in {dtype}")


# ------------------------------------------------------------------------------------------------------------ 16 bits


@pytest.mark.always("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_error_in_16_bits_is_at_most_1_5_times_that_of_dense_attention(dtype):
    for causal in (True, False):
        given = inputs(1, 50, 2, 1, 32, dtype)
        want = wanted(given, causal)
        dense = results(lambda *x, c=causal: script.dense_attention(*x, causal=c), *given)
        with bfloat16():
            got = results(flash(causal), *given)
        for name, x, y, z in zip(NAMES, got, want, dense, strict=True):
            error, allowed = ((a.double() - y).norm().item() for a in (x, z))
            assert x.dtype == dtype
            what = f"{name}, causal {causal}"
            assert error <= 1.5 * allowed, f"{what}: off by {error:.2e}, dense attention by {allowed:.2e}"
        alone = results(flash(causal), *given)[0]  # as the script runs it: the interpreter truncates to bf16
        assert (alone.double() - want[0]).norm() <= 2 * (dense[0].double() - want[0]).norm()


def test_lse_and_sums_over_tiles_are_in_float32():
    """A tile that gives much and then three that give little: in fp16, 16 + 0.0075 is 16, and three times."""
    S, D = 64, 16
    zero = torch.zeros(1, S, 1, D, dtype=torch.float16, device=DEVICE)
    little = zero + 0.03
    little[:, :16] = 64
    sign = zero + 1
    sign[:, ::2] = -1
    along_keys, along_queries = (64, 16), (16, 64)
    cases = {  # scores are all 0, so each weight is 1/64
        "dq": ([zero, little * sign, sign, zero + 1], False, along_keys),
        "dk": ([little, zero, sign, zero + 1], False, along_queries),
        "dv": ([zero, zero, sign, little], False, along_queries),
        "out": ([zero, zero, little, sign], False, along_keys),
    }
    [found] = run_ranks(1, on_a_rank, list(cases.values()))
    for (what, (given, *_)), got in zip(cases.items(), found, strict=True):
        at = NAMES.index(what)
        assert_same(got[at].double(), wanted(given, False)[at], 7e-4, what)
    lse = script.FlashAttention.apply(zero, zero, zero, False, *along_keys)[1]
    assert lse.dtype == torch.float32
    assert_same(lse, torch.full_like(lse, math.log(S)), 1e-6, "LSE")


# ----------------------------------------------------------------------------------------------------- edges and modes


@pytest.mark.prove
def test_nan_stays_in_its_sequence_and_head():
    """A tile that ran on into the next sequence or head would bring the NaN along, as 0 · NaN."""
    for causal in (True, False):
        q, k, v, dout = inputs(2, 37, 2, 2, 16)
        for x in (q, k, v, dout):
            x[1], x[0, :, 1] = math.nan, math.nan
        for name, x in zip(NAMES, results(flash(causal), q, k, v, dout), strict=True):
            assert x[0, :, 0].isfinite().all(), f"{name}, causal {causal}"
            assert x[1].isnan().all(), f"{name}, causal {causal}"


def test_masked_tiles_are_not_loaded():
    """NaN in keys that no query of a tile sees, and in queries that see none of its keys: 0 · NaN would be NaN."""
    q, k, v, dout = inputs(1, 64, 1, 1, 16)
    late = [x.index_fill(1, torch.arange(32, 64, device=DEVICE), math.nan) for x in (k, v)]
    early = [x.index_fill(1, torch.arange(32, device=DEVICE), math.nan) for x in (q, dout)]
    cases = [([q, *late, dout], True, (16, 32)), ([early[0], k, v, early[1]], True, (32, 16))]
    [((out, dq, *_), (_, _, dk, dv, _))] = run_ranks(1, on_a_rank, cases)
    assert out[:, :32].isfinite().all() and dq[:, :32].isfinite().all()
    assert dk[:, 32:].isfinite().all() and dv[:, 32:].isfinite().all()


@pytest.mark.prove
def test_every_element_is_written():
    """PyTorch fills what is allocated and not written with NaN, if asked to."""
    with poisoned():
        assert torch.empty(3, device=DEVICE).isnan().all()
        for *sizes, causal, blocks in CASES[1:4]:
            given = inputs(*sizes)
            got = [*results(flash(causal, blocks), *given), script.FlashAttention.apply(*given[:3], causal, *blocks)[1]]
            assert not any(x.isnan().any() for x in got), f"{sizes}, causal {causal}"


def test_strided_inputs_and_second_backward():
    B, S, N, D = 2, 9, 2, 16
    whole = torch.randn(B, S, 3 * N + 1, D, dtype=F64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    q, k, v = whole[:, :, 1:].split(N, 2)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    dout = torch.full((), 0.5, dtype=F64, device=DEVICE).expand(B, S, N, D)  # what the gradient of a sum looks like
    for name, x, y in zip(NAMES, results(flash(True), q, k, v, dout), wanted([q, k, v, dout], True), strict=True):
        assert_same(x, y, 1e-10, name)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = script.flash_attention(q, k, v)
    first, second = (torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), "two runs give the same bits"
    with torch.no_grad():
        assert torch.equal(script.flash_attention(q, k, v), out) and not script.flash_attention(q, k, v).requires_grad


def test_missing_gradients_are_refused():
    q, k, v, dout = inputs(1, 8, 1, 1, 16)
    out, lse = script.FlashAttention.apply(q.requires_grad_(), k, v, True, 16, 16)
    assert not lse.requires_grad, "backward ignores what comes from the LSE"
    dq = torch.autograd.grad(out, q, dout.requires_grad_(), create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@triton.jit
def offsets_kernel(offsets_ptr, start, batch, head, seq_len, n_heads, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    tokens = start + tl.arange(0, BLOCK)
    offsets = script.tile_offsets(tokens, batch, head, seq_len, n_heads, HEAD_DIM)
    places = tl.arange(0, BLOCK)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(offsets_ptr + places, offsets)


def test_offsets_beyond_2_to_the_31_elements():
    S, N, D, BLOCK = 2**20 - 5, 64, 128, 16
    offsets = torch.zeros(BLOCK, D, dtype=torch.int64, device=DEVICE)
    start = 2**20 - 16
    offsets_kernel[(1,)](offsets, start, 3, 7, S, N, BLOCK=BLOCK, HEAD_DIM=D)  # sequence 3, head 7
    t, d = torch.arange(BLOCK, device=DEVICE)[:, None] + start, torch.arange(D, device=DEVICE)
    assert torch.equal(offsets, ((3 * S + t) * N + 7) * D + d) and offsets.min() > 3 * 2**32


def test_unsupported_shapes_are_refused_in_one_line():
    q, k, v, _ = inputs(1, 8, 4, 2, 16)
    for words, given in {
        **{rf"q \[1, 8, 1, {D}\].* D must be 16": inputs(1, 8, 1, 1, D)[:3] for D in (8, 24, 48, 256)},
        "N_kv must divide N": [q[:, :, :3], k, v],
        r"k \[1, 4, 2, 16\]": [q, k[:, :4], v[:, :4]],
        r"v \[1, 8, 1, 16\]": [q, k, v[:, :, :1]],
        r"k \[2, 8, 2, 16\]": [q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)],
        "q is torch.float32, .* convert them": [q.float(), k, v],
        "k torch.float32 and v torch.float64: convert them": [q, k.float(), v],
        "v torch.float32: convert them": [q, k, v.float()],
    }.items():
        assert_refused(words, script.flash_attention, *given)
    for D in (64, 128):
        given = inputs(1, 3, 2, 2, D)[:3]
        assert_same(script.flash_attention(*given), definition(*given, True)[0], 1e-10, f"causal by default, D = {D}")


# --------------------------------------------------------------------------------------------------- bytes and memory


@pytest.mark.always("causal")
@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter counts")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_bytes_moved_match_the_formula(causal):
    for B, S, N, N_kv, D, blocks, dtype in (
        (1, 41, 2, 1, 16, (16, 32), torch.float32),
        (2, 37, 1, 1, 32, (32, 16), torch.float16),
        (1, 32, 3, 1, 16, (16, 16), F64),
    ):
        block_m, block_n = blocks
        given = inputs(B, S, N, N_kv, D, dtype)
        e, wide = dtype.itemsize, max(4, dtype.itemsize)
        rows = [range(i, min(i + block_m, S)) for i in range(0, S, block_m)]
        columns = [range(j, min(j + block_n, S)) for j in range(0, S, block_n)]
        meet = [(i, j) for i in rows for j in columns if not causal or j[0] <= i[-1]]  # tiles with anything visible
        keys, queries = sum(len(j) for _, j in meet), sum(len(i) for i, _ in meet)
        forward = B * N * (S * (2 * D * e + wide) + keys * 2 * D * e)  # q, out, LSE; k and v of each tile
        dq = B * N * (S * (4 * D * e + 2 * wide) + keys * 2 * D * e)  # q, dout, out, dq, LSE and delta
        dkdv = B * N_kv * S * 4 * D * e + B * N * queries * (2 * D * e + 2 * wide)  # k, v, dk, dv; q, dout, LSE, delta
        assert script.bytes_moved(*given[:2], causal, *blocks) == (forward, dq + dkdv), f"formula, {S} tokens, {blocks}"
        _, (there, back, _) = script.run_attention(script.flash_attention, *given, causal=causal, blocks=blocks)
        assert (there, back) == (forward, dq + dkdv), (
            f"{S} tokens, blocks {blocks}: forward moves {there} bytes, not {forward}, backward {back}, not {dq + dkdv}"
        )


def test_saved_bytes_and_peak_memory_grow_linearly():
    peaks = []
    for S in (16, 32):
        q, k, v, dout = inputs(1, S, 2, 1, 16, torch.float16)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        with saved_activations() as saved, peak_memory() as forward:
            out = script.flash_attention(q, k, v)
        single = 2 * S * 4  # LSE, or delta
        assert saved.bytes == q.nbytes + k.nbytes + v.nbytes + out.nbytes + single
        with peak_memory() as backward:
            out.backward(dout)
        peaks.append((forward.peak, backward.peak))
        if not INTERPRETED:  # the interpreter works on copies of its arguments
            assert forward.peak == out.nbytes + single
            # dq, dk, dv; delta, and the zeros that autograd hands in for the LSE's gradient
            assert backward.peak == q.nbytes + k.nbytes + v.nbytes + 2 * single
    assert saved.bytes == script.run_attention(script.flash_attention, q, k, v, dout)[1][2]
    assert peaks[1] == tuple(2 * peak for peak in peaks[0])


# ----------------------------------------------------------------------------------------------------- the script


@pytest.mark.prove
def test_script_passes_with_the_fewest_tokens(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flash_attention.py", "--tokens", "6", "--kv-heads", "1"])
    assert script.main() == 0 and capsys.readouterr().out.splitlines()[-1] == "PASS"


@pytest.mark.always("nan", "dv")
@pytest.mark.parametrize("spoil", ["nan", "dv", "bytes"])
def test_check_notices_nan_and_bytes(spoil, monkeypatch):
    sizes = []

    def without_dv(q, k, v, causal, blocks):
        sizes.append((*k.shape[1:3], blocks[0]))
        return script.dense_attention(q, k, v - (v - v.detach()) * {2: 1, 4: 2e-5, 8: 2e-10}[v.itemsize], causal=causal)

    if spoil == "nan":
        monkeypatch.setattr(
            script, "flash_attention", lambda q, k, v, **how: script.dense_attention(q, k, v) * math.nan
        )
        monkeypatch.setattr(script, "softmax", lambda x, block: x * math.nan)
    elif spoil == "dv":
        monkeypatch.setattr(script, "flash_attention", without_dv)
    else:
        plain = script.bytes_moved
        monkeypatch.setattr(script, "bytes_moved", lambda *x: (plain(*x)[0] + 2, plain(*x)[1]))
    wrong = script.check(12, 2, 64 if spoil == "dv" else None, DEVICE)
    if spoil == "nan":
        assert any("softmax, online: error nan" in line for line in wrong)
        assert any(line.startswith("full, 12 tokens, float64: errors [nan") for line in wrong)
        moved = {"softmax, at once": 3840, "softmax, online": 5920, "full, 12 tokens, float64": 49536}
        assert not INTERPRETED or {f"{what}: 0 bytes, expected {size}" for what, size in moved.items()} <= {*wrong}
    elif spoil == "dv":
        assert sum(": errors [" in line for line in wrong) == 6, "one wrong gradient of four is enough"
        assert {*sizes} == {(12, 2, 64), (24, 2, 64)}, "tokens, K/V heads, queries per tile"
    elif INTERPRETED:
        assert any(re.match(r"causal, 12 tokens, float32: \d+ bytes, expected \d+", line) for line in wrong)


def test_options_reach_the_check(monkeypatch, capsys):
    monkeypatch.setattr(script, "check", lambda *given: [str(given)])
    for options, given in (("", (50, 2, None)), ("--tokens 6 --kv-heads 1 --block-m 16", (6, 1, 16))):
        monkeypatch.setattr(sys, "argv", ["flash_attention.py", *options.split()])
        assert script.main() == 1 and capsys.readouterr().out == f"FAIL: {(*given, DEVICE)}\n"


def test_wrong_option_is_one_line_that_names_it(monkeypatch):
    for argv in ("--tokens 5", "--tokens nan", "--tokens ", "--kv-heads 3", "--block-m 0", "--block 16"):
        assert argv.split()[0] in refusal(script.main, argv.split(" "))
    monkeypatch.setattr(script, "INTERPRETED", tl.constexpr(False))
    half, wide = torch.empty(64, dtype=torch.half), torch.empty(64)
    assert [*map(script.block_sizes, (half, half.repeat(2), wide))] == [(64, 64), (64, 32), (16, 16)], "compiled"
    done = run_script(script.__file__, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")  # which the script leaves alone
    assert (done.returncode, done.stderr) == (2, "flash_attention.py: TRITON_INTERPRET=0 needs a GPU\n")


# ------------------------------------------------------------------------------------------------------- compiled


def launch(dtype: torch.dtype, D: int) -> None:
    """Every kernel that takes numbers of this dtype."""
    q, k, v, dout = inputs(1, 33, 6, 3, D, dtype)
    results(flash(True), q, k, v, dout)
    if dtype.itemsize > 2:
        for block in (None, 1024):
            script.softmax(torch.ones(2, 1000, dtype=dtype), block)


@pytest.mark.prove
def test_kernels_compile_for_sm_90_without_stack_or_tf32():
    kernels = printed_json(__file__, "bfloat16 64", "bfloat16 128", "float32 32", "float64 32", TRITON_INTERPRET="0")
    assert len(kernels) == 3 + 3 + 5 + 5
    for kernel in kernels:
        narrow = kernel["dtypes"][0] == "bfloat16"
        assert kernel["stack"] + kernel["local"] <= (0 if narrow else 8), kernel  # 8: in dkdv
        assert kernel["shared_memory"] <= 227 * 1024 and kernel["reg"] * kernel["warps"] * 32 <= 65536, kernel
        assert kernel["wgmma"] == narrow, kernel
        assert not kernel["tf32"], kernel


def test_the_benchmark_divides_the_others_seconds_by_its_own(monkeypatch):
    import bench_flash_attention as bench

    table = Mock()
    monkeypatch.setattr(bench, "Table", lambda *_: table)
    monkeypatch.setattr(bench, "failures", lambda *_: [])  # of a kernel that only compiles
    monkeypatch.setattr(bench, "SHAPES", [(1, 40, 2, 32, True)])
    monkeypatch.setattr(bench, "paired_seconds", lambda *_: {"mine": [1.0] * 2, "sdpa": [2.0] * 2, "depth": [4.0] * 2})
    bench.time_on_gpu(None)
    assert [[x.median for x in call.args[2:5]] for call in table.add.call_args_list] == [[1000, 2, 4]] * 2


if __name__ == "__main__":
    from _fused_compile import compile_calls

    with script.count_traffic() as nothing:  # a GPU's way through the script, as far as it goes without one
        script.run_attention(script.dense_attention, *inputs(1, 4, 2, 1, 16))
    assert nothing == [None]
    for dtype, D in (shape.split() for shape in sys.argv[1:]):
        for row in compile_calls(partial(launch, getattr(torch, dtype), int(D)), [90]):
            print(json.dumps(row))
