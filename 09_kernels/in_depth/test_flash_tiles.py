"""FlashAttention in plain PyTorch against the definition, in float64."""

import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from flash_tiles import (
    TILED,
    Attention,
    Version,
    add_options,
    band,
    check_options,
    compare,
    explicit_attention,
    step,
    tiled_backward,
    tiled_forward,
    visible,
)
from harness.meter import peak_memory, saved_activations
from harness.programs import refusal
from harness.reference import assert_same

HERE = Path(__file__).parent
README = " ".join((HERE.parent / "README.md").read_text().split())
CASES = [  # S_q, S_k, N, N_kv, causal, window, offset
    (32, 32, 2, 2, True, None, 0),
    (33, 33, 4, 2, True, None, 0),  # no multiple of the tile
    (20, 45, 4, 1, False, None, 0),  # cross attention
    (45, 45, 2, 1, True, 7, 0),
    (45, 30, 2, 2, False, 5, 0),  # a window to both sides
    (16, 40, 2, 1, True, None, 24),  # a later chunk of a ring
    (40, 16, 2, 1, True, 9, -11),  # the first rows see no key, the last ones neither
    (5, 3, 1, 1, True, None, -100),  # nobody sees anything
]


def inputs(S_q, S_k, N, N_kv, D=8, dtype=torch.float64, seed=0):
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, S_q, N, D), (2, S_k, N_kv, D), (2, S_k, N_kv, D), (2, S_q, N, D))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def explicit_lse(q, k, *, causal, window, offset):
    rows = q.unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bshgd,bthd->bhgst", rows, k) / math.sqrt(q.shape[-1])
    seen = visible(
        torch.arange(q.shape[1]), torch.arange(k.shape[1]), *band(q.shape[1], k.shape[1], causal, window, offset)
    )
    return scores.masked_fill(~seen, -math.inf).logsumexp(-1).flatten(1, 2)


def assert_same_lse(got, want, tol=1e-10, what="LSE"):
    """-inf where it should be, and the same elsewhere."""
    assert torch.equal(got == -math.inf, want == -math.inf), f"{what}: rows without keys"
    assert_same(got.masked_fill(got == -math.inf, 0.0), want.masked_fill(want == -math.inf, 0.0), tol, what)


def test_a_band_is_what_causal_window_and_offset_say():
    for causal in (True, False):
        for window in (None, 1, 3):
            for offset in (-9, -2, 0, 2, 9):
                first, last = band(5, 6, causal, window, offset)
                for i in range(5):
                    for j in range(6):
                        distance = i + offset - j  # how far back the key is
                        want = not (causal and distance < 0) and (window is None or abs(distance) < window)
                        assert (first <= j - i <= last) == want, (causal, window, offset, i, j)
    assert band(5, 6, True, 3, 2**40) == (11, 11) and band(5, 6, False, 3, -(2**40)) == (-11, -11)  # 32 bits are enough


@pytest.mark.always("7", "16", "64")
@pytest.mark.parametrize("tile", [1, 7, 16, 64])
def test_output_lse_and_every_gradient_equal_the_definition_to_1e_10(tile):
    for *sizes, causal, window, offset in CASES if tile > 1 else CASES[2:4]:
        mask = dict(causal=causal, window=window, offset=offset)
        q, k, v, dout = inputs(*sizes)
        out, lse = tiled_forward(q, k, v, **mask, tile=tile)
        want = step(lambda q, k, v, mask=mask: explicit_attention(q, k, v, **mask), q, k, v, dout)
        got = [out, *tiled_backward(dout, q, k, v, out, lse, **mask, tile=tile)]
        assert_same_lse(lse, explicit_lse(q, k, **mask), what=f"LSE of {sizes} {mask}")
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert_same(x, y, what=f"{name} of {sizes} {mask}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_once_also_under_autocast(dtype):
    given = inputs(40, 40, 4, 2, dtype=dtype)
    want = step(lambda q, k, v: explicit_attention(q, k, v, causal=True), *(x.double() for x in given))
    for enabled in (False, True):
        with torch.autocast("cpu", dtype, enabled=enabled):
            got = step(lambda q, k, v: Attention.apply(q, k, v, TILED, True, None, 0)[0], *given)
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            error = ((x.double() - y).norm() / y.norm()).item()
            assert x.dtype == dtype and error < 0.4 * torch.finfo(dtype).eps, f"{name}, autocast {enabled}: {error:.1e}"
    out, lse = tiled_forward(*given[:3], causal=True)  # for a merge, or a sum of parts
    found = (out, lse, *tiled_backward(given[3], *given[:3], out, lse, causal=True))
    assert {x.dtype for x in found} == {torch.float32}


def test_a_row_without_keys_has_output_zero_lse_minus_infinity_and_gradient_zero():
    q, k, v, dout = inputs(12, 12, 2, 1)
    q.requires_grad_()
    out, lse = Attention.apply(q, k, v, TILED, True, None, -5)
    out.backward(dout)
    assert (out[:, :5] == 0).all() and (q.grad[:, :5] == 0).all()
    assert (lse[..., :5] == -math.inf).all() and lse[..., 5:].isfinite().all()
    assert q.grad[:, 6:].abs().min() > 0  # a row that sees one key has no gradient either: its weight is 1


def test_scores_of_a_million_neither_overflow_nor_turn_into_nan():
    q, k, v, dout = inputs(20, 20, 2, 1)
    q, k = q * 1e3, k * 1e3
    out, lse = tiled_forward(q, k, v, causal=True, tile=8)
    assert_same(out, explicit_attention(q, k, v, causal=True))
    for x in tiled_backward(dout, q, k, v, out, lse, causal=True, tile=8):
        assert x.isfinite().all()


def test_blocks_of_keys_give_their_shares_of_the_gradients_from_the_lse_of_all_keys():
    q, k, v, dout = inputs(20, 20, 4, 2)
    out, lse = tiled_forward(q, k, v, causal=True)
    whole = tiled_backward(dout, q, k, v, out, lse, causal=True)
    blocks = [
        tiled_backward(dout, q, k[:, a:b], v[:, a:b], out, lse, causal=True, offset=-a) for a, b in ((0, 7), (7, 20))
    ]
    assert_same(blocks[0][0] + blocks[1][0], whole[0], what="dq")
    for index, name in ((1, "dk"), (2, "dv")):
        assert_same(torch.cat([block[index] for block in blocks], 1), whole[index], what=name)


def test_the_lse_has_a_gradient_of_its_own():
    q, k, v, dout = inputs(10, 10, 2, 1)
    weight = torch.rand(2, 2, 10, dtype=torch.float64)
    mask = dict(causal=True, window=None, offset=0)
    gradients = []
    for ours in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = Attention.apply(*leaves, TILED, *mask.values()) if ours else (
            explicit_attention(*leaves, **mask), explicit_lse(*leaves[:2], **mask)
        )  # fmt: skip
        ((out * dout).sum() + (lse * weight).sum()).backward()
        gradients.append([x.grad for x in leaves])
    for name, got, want in zip("qkv", *gradients, strict=True):
        assert_same(got, want, what=f"d{name}")
    lse = Attention.apply(*leaves, TILED, *mask.values())[1]
    *found, dv = torch.autograd.grad((lse * weight).sum(), leaves)  # nobody used the output
    exact = torch.autograd.grad((explicit_lse(*leaves[:2], **mask) * weight).sum(), leaves[:2])
    for got, want in zip(found, exact, strict=True):
        assert_same(got, want)
    assert (dv == 0).all()


@pytest.mark.parametrize("S", [96, 192])
def test_saved_are_inputs_output_and_lse_and_no_tensor_grows_with_the_square_of_s(S):
    q, k, v, dout = (x.float() for x in inputs(S, S, 4, 2))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with saved_activations() as saved, peak_memory() as forward:
        out, lse = Attention.apply(q, k, v, TILED, True, None, 0)
    assert saved.bytes == q.nbytes + k.nbytes + v.nbytes + out.nbytes + lse.nbytes
    with peak_memory() as backward:
        out.backward(dout)
    tiles = 40 * q[:, :32].nbytes + 8 * 2 * 4 * 32 * 32 * 4  # what a step holds of tiles of 32: the same for any S
    assert forward.peak <= out.nbytes + lse.nbytes + tiles
    assert backward.peak <= 3 * (q.nbytes + k.nbytes + v.nbytes) + tiles


def test_bytes_and_operations_in_the_readme_are_what_its_formulas_give():
    S, R, e = 8192, 128, 2
    keys = [min(i + R, S) for i in range(0, S, R)]  # that pass by each tile of queries under a causal mask
    mean = sum(keys) / len(keys)
    assert mean == (S + R) / 2
    dense, tiles = 4 * e * (S * 64 + S * S), 2 * e * S * 64 * (1 + mean / R)
    written = f"{dense / 1e6:.0f} MB if the scores are written, and {tiles / 1e6:.0f} MB with 128 queries per tile"
    assert written in README
    D, C, heads = 128, 128, 2 * 16  # backward: dq of a head by a walk of its own, or by additions
    again, added = 2 * e * S * D * S // R, 4 * S * D * S // C
    assert again == added and f"{added / 1e6:.0f} MB for D = 128" in README
    more = heads * S * D * (4 + 4 + e - 3 * e)  # zeros before, dq in fp32 read once to be rounded; no q and do again
    assert f"{more / 1e9:.2f} GB more, {more / 3.35e12 * 1e6:.0f} µs at 3.35 TB/s" in README
    saved = 2 * heads * 2 * S * S * D // 2  # two products of 2 S² D, half of it under a causal mask
    assert f"are {saved / 1e12:.2f} TFLOP, {saved / 989e12 * 1e6:.0f} µs at the peak rate" in README


def without_numbers(*given, **mask):
    out, lse = tiled_forward(*given, **mask)
    return out.fill_(math.nan), lse


@pytest.mark.parametrize(("seq", "head_dim", "window"), [(1, 32, 20), (9, 4, 1)])
def test_the_demo_passes_where_gradients_are_zero_and_where_a_tile_is_the_largest_tensor(seq, head_dim, window):
    sizes = dict(seq=seq, heads=2, kv_heads=1, head_dim=head_dim, window=window, dtype="float64")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert compare(TILED, Namespace(**sizes), dist.group.WORLD, torch.device("cpu")) == []
        spoiled = Version(without_numbers, tiled_backward)
        wrong = compare(spoiled, Namespace(**sizes), dist.group.WORLD, torch.device("cpu"))
        assert len(wrong) == 4 and all("off by nan" in line for line in wrong), wrong
    finally:
        dist.destroy_process_group()


def test_an_option_that_does_not_fit_is_one_line(monkeypatch):
    def read():
        return check_options(add_options("", ["float64"]))

    for option in ("--seq", "--heads", "--kv-heads", "--head-dim", "--window"):
        assert refusal(read, f"{option} 0") == f"{option} 0 is too small; use 1 or more"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert refusal(read) == "--nproc_per_node 3 is more than the GPUs here; use 2 or less"


BAD_OPTIONS = [
    ("flash_tiles.py", ["--kv-heads", "3"], ["--kv-heads 3", "4"]),
    ("flash_kernels.py", ["--head-dim", "40"], ["head dim 40", "16"]),
]


@pytest.mark.prove
def test_a_bad_option_is_one_line_that_names_it_and_a_remedy():
    for script, options, words in BAD_OPTIONS:
        said = refusal(HERE / script, options)
        assert all(word in said for word in words), said
