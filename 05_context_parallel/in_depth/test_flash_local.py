"""Local attention without scores in memory: the same numbers, a bounded peak, and the right kernel for each tensor."""

import sys
from types import SimpleNamespace

import flash_local as script
import pytest
import torch
import torch.distributed as dist
from context_ring import (
    EXPLICIT,
    LAYOUTS,
    VERSIONS,
    LocalAttention,
    dense_attention,
    explicit_forward,
    layout_positions,
)
from context_ulysses import usp, usp_groups, usp_positions
from flash_local import FLASH, TILED, TORCH, chosen, tiled, tiles_of
from harness.attention import attention_results, random_qkv
from harness.meter import peak_memory
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same
from torch import Tensor

NAMES = ("out", "lse", "dq", "dk", "dv")


def autograds(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> list[Tensor]:
    """The readable forward, with the backward that autograd writes for it."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = explicit_forward(*leaves, causal=causal)
    out.backward(dout)
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def step_of(local: LocalAttention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> list[Tensor]:
    out, lse = local.forward(q, k, v, causal=causal)
    return [out, lse, *local.backward(dout, q, k, v, out, lse, causal=causal)]


@pytest.mark.parametrize(("s", "t", "causal"), [(17, 17, True), (17, 17, False), (5, 23, False), (16, 16, True)])
def test_tiles_and_pytorchs_kernels_are_exact_for_uneven_tiles_and_shared_heads(s, t, causal):
    for heads in ((4, 4), (4, 2), (4, 1)):
        given = random_qkv(heads, s, 8, kv_length=t)
        want = autograds(*given, causal)
        for name, local in (("tiled", tiled(6)), ("one tile", tiled(64)), ("torch", TORCH), ("flash", FLASH)):
            for what, got, expected in zip(NAMES, step_of(local, *given, causal), want, strict=True):
                assert got.shape == expected.shape
                assert_same(got, expected, what=f"{what} of {name}, {heads} heads")
        apart = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in given]  # the D elements of a head lie apart
        for what, got, expected in zip(NAMES, step_of(TORCH, *apart, causal), want, strict=True):
            assert_same(got, expected, what=f"{what} of torch, {heads} heads, elements that lie apart")


def test_tiles_above_the_diagonal_are_not_computed_and_each_other_pair_once():
    for s, tile in ((17, 6), (16, 4), (5, 8), (3, 1)):
        seen = torch.zeros(s, s, dtype=torch.int)
        for rows, columns in tiles_of(s, s, True, tile):
            for keys, triangle in columns:
                shape = torch.ones(len(range(s)[rows]), len(range(s)[keys]), dtype=torch.int)
                seen[rows, keys] += shape.tril() if triangle else shape
        assert torch.equal(seen, torch.ones(s, s, dtype=torch.int).tril())


def peak_of(local: LocalAttention, s: int, causal: bool) -> tuple[int, int]:
    """Peak bytes of forward, and of backward."""
    q, k, v, dout = (x.float() for x in random_qkv((2, 1), s, 8))
    with peak_memory() as forward:
        out, lse = local.forward(q, k, v, causal=causal)
    with peak_memory() as backward:
        local.backward(dout, q, k, v, out, lse, causal=causal)
    return forward.peak, backward.peak


@pytest.mark.prove
@pytest.mark.parametrize("causal", [True, False])
def test_the_peak_of_tiles_grows_with_the_tokens_where_that_of_explicit_grows_with_their_square(causal):
    B, N, D, tile = 2, 2, 8, 16
    token, square = 4 * B * N * D, 4 * B * N * tile * tile  # bytes of a token in fp32, and of a tile's scores
    for s in (64, 256):
        for written, blocks in zip(peak_of(EXPLICIT, s, causal), (2, 3), strict=True):
            assert written >= blocks * 4 * B * N * s * s, "all scores, and the weights"
        forward, backward = peak_of(tiled(tile), s, causal)
        # out or dq, dk, dv, and the LSE, of all tokens; scores and what is made of them, of one tile
        assert forward <= s * (token + 4 * B * N) + 8 * square, f"{s} tokens: {forward}"
        assert backward <= s * 2 * token + 12 * square, f"{s} tokens: {backward}"


def test_nothing_as_large_as_the_scores_exists_in_pytorchs_kernels_or_beside_a_tile():
    for peak in peak_of(TORCH, 256, True):
        assert peak < 4 * 2 * 2 * 256 * 256, "copies of q, k, v with the heads first, but no scores"
    for peak in peak_of(tiled(16), 64, False):
        assert peak < 2 * 4 * 2 * 2 * 64 * 64, "scores and weights of one tile, not of all tokens"


def test_a_bfloat16_block_is_summed_in_float32():
    q, k, v, dout = (x.bfloat16() for x in random_qkv((4, 2), 64, 8))
    exact = autograds(*(x.double() for x in (q, k, v, dout)), True)
    for local, autocast in ((tiled(8), False), (tiled(8), True), (EXPLICIT, True)):
        with torch.autocast("cpu", torch.bfloat16, autocast):
            results = step_of(local, q, k, v, dout, True)
        for what, got, want in zip(NAMES, results, exact, strict=True):
            assert got.dtype == torch.float32
            assert_same(got, want, 1e-5, what)
    *_, dk, dv = step_of(TORCH, q, k, v, dout, True)
    assert dk.dtype == dv.dtype == torch.float32, "the sum over the query heads that share a K/V head"


def on_ranks(which: str) -> list[tuple]:
    """(name, where, out and gradients) of each version on this rank."""
    group, rank, local = dist.group.WORLD, dist.get_rank(), {"flash": FLASH, "tiled": tiled(5)}[which]
    cases = [
        (f"{v} {x}", VERSIONS[v](group, x, local), layout_positions(x, 48, rank, 4)) for v in VERSIONS for x in LAYOUTS
    ]
    cases.append(
        ("usp", usp(*usp_groups(4, 2), "zigzag", local), usp_positions("zigzag", 48, rank // 2, 2, rank % 2, 2))
    )
    given, found = random_qkv((4, 2), 48, 8), []
    for name, attention, where in cases:
        shards = [x[:, where] for x in given]
        found.append((name, where, attention_results(attention, *shards, causal=True)))
    return found


@pytest.mark.always("flash")
@pytest.mark.parametrize("which", ["flash", "tiled"])
def test_plugged_into_ring_all_gather_and_mesh_it_is_exact(which):
    want = attention_results(dense_attention, *random_qkv((4, 2), 48, 8), causal=True)
    for rank, cases in enumerate(run_ranks(4, on_ranks, which)):
        for name, where, results in cases:
            for what, got, expected in zip(("out", "dq", "dk", "dv"), results, want, strict=True):
                assert_same(got, expected[:, where], what=f"{what} of {name}, rank {rank}")


# ------------------------------------------------------------------------------------------------ which kernel


def test_flash_takes_pytorchs_kernel_where_there_is_one_and_tiles_elsewhere():
    def of(device: str, dtype: torch.dtype, D: int = 64) -> LocalAttention:
        return chosen(torch.empty(1, 4, 2, D, dtype=dtype, device=device))

    assert of("cpu", torch.float64) == of("cpu", torch.bfloat16) == TORCH
    # "meta" has shapes and no numbers; it stands for any device that is not a CPU.
    assert of("meta", torch.bfloat16) == of("meta", torch.float16, 256) == TORCH
    assert of("meta", torch.float32) == of("meta", torch.bfloat16, 264) == of("meta", torch.bfloat16, 20) == TILED


@pytest.mark.parametrize(
    ("gpu", "tiles"),  # its compute capability; head dims of which PyTorch's backward raises
    [
        ((7, 5), {64, 192, 200, 208, 224, 232, 256}),
        *[((8, 0), set()), ((9, 0), set()), ((10, 0), set())],
        *[(gpu, {200, 208, 224}) for gpu in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))],
    ],
)
def test_flash_leaves_out_the_head_dims_whose_backward_raises_on_some_gpus(gpu, tiles, monkeypatch):
    """As PyTorch's own gate does: check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    for D in (64, 192, 200, 208, 224, 232, 256):
        q = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 4, 2, D))
        assert (chosen(q) == TILED) == (D in tiles), f"head dim {D} on sm_{gpu[0]}{gpu[1]}"


def test_what_the_gpu_kernels_are_given_fits_their_signatures():
    """Without a GPU: PyTorch's own shape functions of the two operators check every argument."""
    q, k = (torch.empty(1, 16, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    out, lse = FLASH.forward(q, k, k, causal=True)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, 8, 16), torch.float32)
    gradients = FLASH.backward(out, q, k, k, out, lse, causal=True)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


# ------------------------------------------------------------------------------------------------------ the script


def test_the_demo_finds_nothing_wrong_but_a_nan(monkeypatch, capsys):
    args = SimpleNamespace(tokens=20, tile=6, dtype="float64")
    assert script.demo(args, torch.device("cpu")) == []
    printed = capsys.readouterr().out
    assert printed.count(" 12,800 ") == printed.count(" 1,152 ") == 2, "bytes of 20 x 20 scores in fp64, and of 6 x 6"
    monkeypatch.setattr(script, "off", lambda got, want: torch.nan)
    assert len(script.demo(args, torch.device("cpu"))) == 6  # three kernels, causal or not
    monkeypatch.setattr(script, "demo", lambda args, device: ["wrong"] * (args.tokens == 2))
    for tokens in (2, 16384):  # neither is refused
        monkeypatch.setattr(sys, "argv", ["flash_local.py", "--tokens", str(tokens), "--tile", "1"])
        assert script.main() == (tokens == 2)


def test_tiles_of_no_tokens_are_refused():
    with pytest.raises(ValueError, match="tiles of 0 tokens"):
        tiled(0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tile", "0"], ["--tile 0", "1 or more"]),
        (["--tokens", "1"], ["--tokens 1", "2 to 16384"]),
        (["--tokens", "16385"], ["--tokens 16385", "2 to 16384"]),
        (["--dtype", "float16"], ["--dtype", "float16"]),
    ],
)
def test_a_wrong_option_ends_with_one_line_that_names_it(argv, words):
    said = refusal(script.main, argv)
    assert all(word in said for word in words), said
