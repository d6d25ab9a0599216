"""Packed documents against one reference: the same model on the whole sequence, with a mask made pair by pair."""

import random
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_ring import EXPLICIT, Model, counting, ring_attention, text, train_step
from context_ulysses import ulysses, usp_groups
from harness.attention import random_qkv
from harness.meter import communication
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same_trace, sgd_trace
from packed_documents import (
    PACKED_LAYOUTS,
    TRANSPORTS,
    boundaries,
    check_documents,
    in_documents,
    packed_attention,
    packed_blocks,
    packed_labels,
    packed_pairs,
    packed_positions,
    packed_step,
    parse_arguments,
    places_in_documents,
)
from test_context_ring import run_demo
from torch import Tensor

HEADS = (8, 2)
S = 48
# Documents of one token, across several chunks, and ending where a chunk does; for "each" 2P divides them.
CU = {layout: (0, 8, 32, 48) if layout == "each" else (0, 1, 6, 23, 24, 41, 48) for layout in PACKED_LAYOUTS}
CASES = [(version, layout) for version in TRANSPORTS for layout in PACKED_LAYOUTS]


def model_of() -> Model:
    torch.manual_seed(0)
    return Model(*HEADS, head_dim=4, vocab=128).double()


def document_of(token: int, cu: tuple[int, ...]) -> int:
    return sum(begin <= token for begin in cu) - 1


def mask_of(cu: tuple[int, ...]) -> Tensor:
    """Block-diagonal and causal, pair by pair."""
    n = cu[-1]
    same = [[document_of(i, cu) == document_of(j, cu) and j <= i for j in range(n)] for i in range(n)]
    return torch.tensor(same)


def reference_attention(cu: tuple[int, ...]) -> Callable[..., Tensor]:
    mask = mask_of(cu)

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return attention


@cache
def reference_trace(cu: tuple[int, ...]) -> Trace:
    """The unsharded model. Places, and which token is whose label, are found token by token."""
    model, attention = model_of(), reference_attention(cu)
    places = torch.tensor([i - cu[document_of(i, cu)] for i in range(S)])
    labelled = [i for i in range(S - 1) if document_of(i, cu) == document_of(i + 1, cu)]

    def backward(step: int) -> float:
        tokens = text(2, S, step)
        logits = model(tokens, places, attention)[:, labelled]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, [i + 1 for i in labelled]].flatten())
        loss.backward()
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward)


def trace_of(attention: Callable, where: Tensor, cu: tuple[int, ...], group) -> Trace:
    model = model_of()

    def backward(step: int) -> float:
        return packed_step(model, text(2, S, step), where, cu, attention, group).item()

    return sgd_trace(dict(model.named_parameters()), backward)


def traces(cases: list) -> list[Trace]:
    """All-gather and ring in these layouts, then Ulysses."""
    group, rank, P, found = dist.group.WORLD, dist.get_rank(), dist.get_world_size(), []
    for version, layout in cases:
        attention = packed_attention(group, CU[layout], layout, version)
        found.append(trace_of(attention, packed_positions(layout, CU[layout], rank, P), CU[layout], group))
    cu = CU["contiguous"]
    attention = ulysses(group, in_documents(cu))
    return [*found, trace_of(attention, packed_positions("contiguous", cu, rank, P), cu, group)]


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_documents_train_as_with_a_block_diagonal_mask_in_ring_all_gather_and_ulysses(ranks):
    cases = CASES if ranks == 4 else [("ring", "zigzag"), ("allgather", "each")]
    want = [reference_trace(CU[layout]) for _, layout in cases] + [reference_trace(CU["contiguous"])]
    for rank, found in enumerate(run_ranks(ranks, traces, cases)):
        for got, expected in zip(found, want, strict=True):
            assert_same_trace(got, expected, rank=rank)


def mesh_trace() -> Trace:
    """Ulysses x ring: the documents are laid out over the ring, and what a ring rank holds is cut in U parts."""
    rank, cu = dist.get_rank(), CU["each"]
    row, column = usp_groups(4, 2)
    attention = ulysses(row, packed_attention(column, cu, "each"))
    return trace_of(attention, packed_positions("each", cu, rank // 2, 2).chunk(2)[rank % 2], cu, dist.group.WORLD)


def test_packed_documents_train_the_same_on_a_mesh_of_ulysses_and_ring():
    for rank, got in enumerate(run_ranks(4, mesh_trace)):
        assert_same_trace(got, reference_trace(CU["each"]), rank=rank)


# ------------------------------------------------------------------------------------------------- who sees what


def computed_pairs(layout: str, cu: tuple[int, ...], P: int, causal: bool) -> Tensor:
    """How often each (query, key) pair of the whole sequence is computed, by the blocks of all ranks."""
    where = [packed_positions(layout, cu, rank, P) for rank in range(P)]
    computed = torch.zeros(cu[-1], cu[-1], dtype=torch.int)
    for rank, owner in product(range(P), range(P)):
        for block in packed_blocks(layout, cu, rank, owner, P, causal):
            rows, columns = where[rank][block.rows], where[owner][block.columns]
            assert len(rows) and len(columns), "an empty block is no block"
            shape = torch.ones(len(rows), len(columns), dtype=torch.int)
            if block.causal:
                assert len(rows) == len(columns), "the triangle of a kernel is that of a square"
                shape = shape.tril()
            computed[rows[:, None], columns[None]] += shape
    return computed


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_the_blocks_of_all_ranks_hold_every_pair_of_a_document_once_and_no_other(layout):
    choose = random.Random(0)
    for P in (1, 2, 3, 4):
        for _ in range(4):
            if layout == "each":
                cu = tuple(boundaries([2 * P * choose.randint(1, 3) for _ in range(choose.randint(1, 4))]))
            else:
                cu = (0, *sorted(choose.sample(range(1, 12 * P), choose.randint(0, 8))), 12 * P)
            mask = mask_of(cu).int()
            for causal, want in ((True, mask), (False, mask | mask.T)):
                assert torch.equal(computed_pairs(layout, cu, P, causal), want), f"{layout}, {P} ranks, {cu}"


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_every_token_has_one_rank_and_they_rise(layout):
    where = [packed_positions(layout, CU[layout], rank, 4) for rank in range(4)]
    assert sorted(torch.cat(where).tolist()) == list(range(S))
    assert all(torch.equal(x, x.sort().values) and len(x) == S // 4 for x in where)


def test_zigzag_of_each_document_is_balanced_where_zigzag_of_the_whole_sequence_need_not_be():
    cu = boundaries([64, 8, 16, 40])  # 2P = 8 divides them all
    whole = sum(n * (n + 1) // 2 for n in (64, 8, 16, 40))
    pairs = {layout: [packed_pairs(layout, cu, rank, 4) for rank in range(4)] for layout in PACKED_LAYOUTS}
    assert all(sum(of) == whole for of in pairs.values())
    assert pairs["each"] == [whole // 4] * 4
    assert max(pairs["zigzag"]) > 1.25 * whole / 4, "two chunks of the whole sequence say nothing of documents"
    assert max(pairs["contiguous"]) > 1.6 * whole / 4
    assert [packed_pairs("zigzag", [0, 128], rank, 4) for rank in range(4)] == [128 * 129 // 8] * 4, "one document"


def test_a_token_is_placed_in_its_document_and_the_last_of_a_document_has_no_label():
    cu = (0, 3, 4, 8)
    assert places_in_documents(torch.tensor([1, 2, 3, 5, 7]), cu).tolist() == [1, 2, 0, 1, 3]
    tokens = torch.arange(10, 18)[None]
    assert packed_labels(tokens, cu).tolist() == [[11, 12, -100, -100, 15, 16, 17, -100]]


# ---------------------------------------------------------------------------------- work, bytes, precision, no leaks


def pairs_and_bytes() -> list[tuple]:
    """In bf16, for every version: pairs computed, bytes sent."""
    group, rank, P, found = dist.group.WORLD, dist.get_rank(), dist.get_world_size(), []
    for version, layout in CASES:
        count, where = [0], packed_positions(layout, CU[layout], rank, P)
        attention = packed_attention(group, CU[layout], layout, version, counting(EXPLICIT, count))
        q, k, v, dout = (x.bfloat16()[:, where].requires_grad_() for x in random_qkv(HEADS, S, 4))
        with communication() as sent:
            attention(q, k, v, causal=True).backward(dout)
        found.append((count[0], sent.total))
    return found


def test_it_computes_the_pairs_of_the_formula_and_sends_what_one_document_would():
    kv = 2 * 2 * S * HEADS[1] * 4 * 2  # K and V of two sequences, bf16; in backward again, and dK/dV in fp32
    for rank, found in enumerate(run_ranks(2, pairs_and_bytes)):
        for (_, layout), numbers in zip(CASES, found, strict=True):
            assert numbers == (packed_pairs(layout, CU[layout], rank, 2), (kv + kv + 2 * kv) // 2), layout


def under_autocast() -> list[tuple[Tensor, Tensor]]:
    """With every transport: results of float32 q and k beside a v of bf16, and of three in bf16; no second derivative.
    Without any label a loss is 0, and not 0/0."""
    group, found = dist.group.WORLD, []
    q, k, v, _ = (x.float() for x in random_qkv(HEADS, S, 4))
    plus = lambda q, k, v, *, causal: q + (k + v).repeat_interleave(4, 2)  # noqa: E731
    for attention in (
        ring_attention(group),
        packed_attention(group, (0, S)),
        ulysses(group, plus),
        ulysses(group, plus, together=True),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            got = attention(q, k, v.bfloat16(), causal=True)
        found.append((got, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True)))
        leaf = q.clone().requires_grad_()
        (dq,) = torch.autograd.grad(attention(leaf, k, v, causal=True).square().sum(), leaf, create_graph=True)
        assert "once_differentiable" in error_from(RuntimeError, dq.sum().backward)
    where, each = torch.arange(S), tuple(range(S + 1))
    assert packed_step(model_of(), text(2, S), where, each, in_documents(each), group) == 0
    narrow = packed_step(model_of().bfloat16(), text(2, S), where, (0, S), in_documents((0, S)), group)
    assert narrow.dtype == torch.float32, "the cross entropy of bf16 logits"
    assert train_step(model_of(), text(2, 1), where[:1], ring_attention(group, "striped"), group) == 0
    return found


def gradients_of_two_steps():
    """Of each kind of step twice on one model: a gradient after the first, and after the second."""
    group, where, found = dist.group.WORLD, torch.arange(S), []
    for packed in (False, True):
        model = model_of()
        for _ in range(2):
            if packed:
                packed_step(model, text(2, S), where, (0, S), in_documents((0, S)), group)
            else:
                train_step(model, text(2, S), where, ring_attention(group, "striped"), group)
            found.append(model.up.weight.grad.clone())
    return found


def test_a_step_does_not_add_to_the_gradients_of_the_one_before():
    once, again, packed, packed_again = run_ranks(1, gradients_of_two_steps)[0]
    assert torch.equal(once, again) and torch.equal(packed, packed_again)


def test_autocast_casts_what_a_norm_has_widened_and_a_second_derivative_is_refused():
    assert all(torch.equal(got, want) and got.dtype == want.dtype for got, want in run_ranks(1, under_autocast)[0])


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("cu", "layout", "words"),
    [
        ((0,), "zigzag", ["[0]", "rise from 0"]),
        ((1, 8), "zigzag", ["[1, 8]"]),
        ((0, 4, 4, 8), "zigzag", ["[0, 4, 4, 8]"]),
        ((0, 4, 10), "zigzag", ["10 tokens", "2P = 8"]),
        ((0, 4, 10), "striped", ["10 tokens", "P = 4"]),
        ((0, 8, 20), "each", ["document of 12 tokens", "fill it up to 16"]),
    ],
)
def test_boundaries_that_no_rank_could_use_are_refused_in_one_line(cu, layout, words):
    with pytest.raises(ValueError) as error:
        check_documents(cu, layout, 4)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), error.value


def errors() -> list[str]:
    x, group = torch.zeros(1, 8, 2, 4), dist.group.WORLD
    calls = (
        lambda: packed_attention(group, (0, 8), "diagonal"),
        lambda: packed_attention(group, (0, 8), version="tree"),
        lambda: packed_attention(group, torch.tensor([0, 3, 16]))(x, x, x, causal=True),
        lambda: packed_attention(group, (0, 3, 8))(x, x[:, :4], x[:, :4], causal=False),  # of other keys
        lambda: in_documents((0, 3, 9))(x, x, x, causal=True),
        lambda: in_documents((0, 3, 8))(x, x[:, :4], x[:, :4], causal=False),
    )
    return [error_from(ValueError, call) for call in calls]


def test_what_does_not_fit_is_said_in_one_line():
    layout, version, tokens, keys, whole, fewer = run_ranks(1, errors)[0]
    assert "'diagonal'" in layout and "each" in layout
    assert "'tree'" in version and "allgather, ring" in version
    assert tokens.endswith("and k [1, 8, 2, 4]: of the 16 tokens of cu_seqlens each of 1 ranks has 16")
    assert keys.startswith("q [1, 8, 2, 4] and k [1, 4, 2, 4]: of the 8 tokens")
    assert "8 queries" in whole and "9 tokens" in whole and "4 keys" in fewer
    assert all("\n" not in message for message in (layout, version, tokens, keys, whole))


@pytest.mark.always("2-3-1")
@pytest.mark.parametrize(("P", "N", "N_kv"), [(2, "3", "1"), (4, "6", "3")])
def test_the_demo_knows_that_a_rank_of_ulysses_may_have_a_head_more_than_another(P, N, N_kv):
    argv = ["--documents", "4", "12", "8", "--heads", N, "--kv-heads", N_kv, "--version", "ulysses"]
    assert run_ranks(P, run_demo, "packed_documents", argv) == [[]] * P


@pytest.mark.parametrize("options", ["4 12 8 --layout each", "3 1 --layout striped"])
def test_the_demo_knows_pairs_and_bytes_of_all_gather_and_ring(options):
    """Also of the shortest documents that it takes."""
    assert run_ranks(2, run_demo, "packed_documents", ["--documents", *options.split()]) == [[], []]


def test_the_demo_compares_the_pairs_and_bytes_of_every_rank():
    argv = ["--documents", "3", "1", "--version", "ring", "--layout", "striped"]
    for found in run_ranks(2, run_demo, "packed_documents", argv, nan=True):
        assert [line.split()[2] for line in found] == ["sent", "pairs"], found


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seq", "64"], ["--seq 64", "--documents"]),
        (["--documents", "8", "8", "--seq", "20"], ["16 tokens", "--seq is 20"]),
        (["--documents", "0", "8"], ["--documents 0 8", "1 token"]),
        (["--documents", "2", "2"], ["--documents 2 2", "3 or more"]),
        (["--documents", "12", "12", "--layout", "each"], ["--documents 12 12", "fill it up to 16"]),
        (["--documents", "9", "8"], ["--documents 9 8", "17 tokens"]),
        (["--documents", "x"], ["--documents", "'x'"]),
        (["--heads", "3", "--kv-heads", "3"], ["--heads 3", "4 ranks"]),
        (["--version", "ulysses", "--layout", "each"], ["--layout each", "leave it out"]),
    ],
)
def test_a_wrong_option_ends_with_one_line_that_names_it(argv, words):
    said = refusal(parse_arguments, argv, world_size=4)
    assert all(word in said for word in words), said
