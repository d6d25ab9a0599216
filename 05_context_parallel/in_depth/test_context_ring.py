"""All-gather and ring attention against one reference: the same model on the whole sequence, in one process."""

import importlib
import math
import os
import sys
import weakref
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import context_ring as script
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_ring import (
    EXPLICIT,
    LAYOUTS,
    VERSIONS,
    LocalAttention,
    Model,
    block_of,
    counting,
    dense_attention,
    explicit_backward,
    explicit_forward,
    layout_positions,
    merge,
    next_token_labels,
    pairs_of,
    parse_arguments,
    shard_sequence,
    text,
    train_step,
)
from harness.attention import attention_results, random_qkv
from harness.meter import communication, peak_memory, saved_activations
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_trace, sgd_trace
from torch import Tensor

CHAPTERS = Path(__file__).resolve().parents[2]
HEADS = [(8, 8), (8, 2), (8, 1)]  # query heads, key/value heads
NAMES = ("out", "dq", "dk", "dv")
S = 48  # tokens of a test's sequence: it divides into 2P chunks for 1, 2, 3 and 4 ranks
CASES = [(version, layout) for version in VERSIONS for layout in LAYOUTS]


def model_of(heads: tuple[int, int]) -> Model:
    torch.manual_seed(0)
    return Model(*heads, head_dim=4, vocab=128).double()


def whole_trace(model: Model, attention: Callable) -> Trace:
    """The unsharded model with PyTorch's mean loss: not the sum and division of the script."""

    def backward(step: int) -> float:
        tokens = text(2, S, step)
        logits = model(tokens, torch.arange(S), attention)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward)


def trace_on_ranks(model: Model, attention: Callable, positions: Tensor, group: dist.ProcessGroup) -> Trace:
    def backward(step: int) -> float:
        return train_step(model, text(2, S, step), positions, attention, group).item()

    return sgd_trace(dict(model.named_parameters()), backward)


@cache
def reference_trace(heads: tuple[int, int]) -> Trace:
    return whole_trace(model_of(heads), dense_attention)


def context_trace(version, layout, heads, group) -> Trace:
    positions = layout_positions(layout, S, group.rank(), group.size())
    return trace_on_ranks(model_of(heads), VERSIONS[version](group, layout), positions, group)


# ---------------------------------------------------------------------------------------------- the one reference


def traces_of(heads: list, cases: list) -> list[Trace]:
    group = dist.group.WORLD
    return [context_trace(v, lay, h, group) for h in heads for v, lay in cases]


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_loss_every_gradient_and_weights_equal_the_unsharded_block(ranks):
    heads = HEADS if ranks in (1, 4) else HEADS[1:2]
    cases = CASES if ranks != 3 else [("ring", "zigzag"), ("ring", "striped"), ("allgather", "contiguous")]
    want = [reference_trace(h) for h in heads for _ in cases]
    for rank, traces in enumerate(run_ranks(ranks, traces_of, heads, cases)):
        for got, expected in zip(traces, want, strict=True):
            assert_same_trace(got, expected, rank=rank)


def chapter_one_and_two() -> Trace:
    """The trainer's way: chapter 1's model, chapter 2's reducer, data parallel 1 or 2 and context parallel 2."""
    sys.path[:0] = [str(CHAPTERS / "01_single_gpu" / "in_depth"), str(CHAPTERS / "02_data_parallel" / "in_depth")]
    from dataclasses import replace

    from gradient_reducers import BucketedReducer, global_valid_tokens
    from llama import TINY, Llama, Parts

    world = dist.get_world_size()
    data_rank, rank = divmod(dist.get_rank(), 2)
    contexts = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    attention = script.ring_attention(contexts[data_rank], "zigzag")
    model = Llama(TINY, replace(Parts(), attention=attention), recompute="selective").double()
    reducer = BucketedReducer(model, dist.group.WORLD)  # data x context

    def backward(step: int) -> float:
        tokens = text(2, S, step).remainder(64).chunk(world // 2)[data_rank]
        labels = shard_sequence(next_token_labels(tokens), "zigzag", rank, 2)
        positions = layout_positions("zigzag", S, rank, 2)
        valid = global_valid_tokens(labels, dist.group.WORLD)
        loss = model.parts.cross_entropy(model(tokens[:, positions], positions), labels) / valid
        loss.backward()
        reducer.finish()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()

    return sgd_trace(dict(model.named_parameters()), backward)


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_it_trains_chapter_1s_model_with_chapter_2s_reducer_on_one_data_rank_and_on_two(ranks):
    sys.path[:0] = [str(CHAPTERS / "01_single_gpu" / "in_depth")]
    from llama import TINY, Llama

    model = Llama(TINY).double()

    def backward(step: int) -> float:
        tokens = text(2, S, step).remainder(64)
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.item()

    want = sgd_trace(dict(model.named_parameters()), backward)
    for rank, got in enumerate(run_ranks(ranks, chapter_one_and_two)):
        assert_same_trace(got, want, rank=rank)


# ---------------------------------------------------------------------------------------------------- low precision


def results_of_all(heads: tuple[int, int], dtype: torch.dtype, scale: float = 1.0) -> list:
    """For every version and layout: this rank's part of out, dq, dk, dv."""
    group = dist.group.WORLD
    results = []
    for version, layout in CASES:
        attention = VERSIONS[version](group, layout)
        given = (scale * x.to(dtype) for x in random_qkv(heads, S, 4))
        shards = [shard_sequence(x, layout, group.rank(), group.size()) for x in given]
        results.append(attention_results(attention, *shards, causal=True))
    return results


def unshard(parts: list[Tensor], layout: str) -> Tensor:
    """Inverse of `shard_sequence`: the parts of all ranks, in rank order, P of [B, S/P, ...] -> [B, S, ...]."""
    P, S = len(parts), sum(part.shape[1] for part in parts)
    order = torch.cat([layout_positions(layout, S, rank, P) for rank in range(P)])
    return torch.cat(parts, 1)[:, order.argsort()]


def whole(results: list[list[list[Tensor]]], case: int) -> list[Tensor]:
    layout = CASES[case][1]
    return [unshard([results[rank][case][i] for rank in range(len(results))], layout) for i in range(4)]


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def test_bfloat16_errs_at_most_one_and_a_half_times_as_much_as_dense_bfloat16_attention():
    given = random_qkv((8, 8), S, 4)
    exact = attention_results(dense_attention, *(x.bfloat16().double() for x in given), causal=True)
    dense = attention_results(dense_attention, *(x.bfloat16() for x in given), causal=True)
    results = run_ranks(4, results_of_all, (8, 8), torch.bfloat16)
    for case in range(len(CASES)):
        for name, got, low, want in zip(NAMES, whole(results, case), dense, exact, strict=True):
            assert got.dtype == torch.bfloat16
            ours, theirs = (rms(x - want) for x in (got, low))
            assert ours <= 1.5 * theirs, f"{CASES[case]} {name}: error {ours:.2e}, dense bf16 {theirs:.2e}"


def sums_over_the_rounds() -> list[list[Tensor]]:
    """out, dq, dk, dv of a kernel whose results show every rounding. Of 4 rounds the first gives 1, each other a little
    more (out; all have the same weight) or a little (gradients): too little for bf16, beside 1, and enough together."""
    group, results = dist.group.WORLD, []
    for version in VERSIONS:
        calls = {"forward": 0, "backward": 0}

        def share(x: Tensor, first: float, later: float, which: str, calls=calls) -> Tensor:
            return torch.full(x.shape, later if calls[which] else first)

        def forward(q, k, v, *, causal, share=share, calls=calls):
            out = share(q, 1.0, 1 + 2**-7, "forward")
            calls["forward"] += 1
            return out, torch.zeros(q.shape[0], q.shape[2], q.shape[1])

        def backward(dout, q, k, v, out, lse, *, causal, share=share, calls=calls):
            shares = [share(x, 1.0, 2**-9, "backward") for x in (q, k, v)]
            calls["backward"] += 1
            return tuple(shares)

        x = torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)
        attention = VERSIONS[version](group, "contiguous", LocalAttention(forward, backward))
        results.append(attention_results(attention, x, x, x, x, causal=False))
    return results


def test_what_is_summed_over_the_rounds_is_rounded_once_at_the_end():
    want = torch.tensor(1 + 0.75 * 2**-7).bfloat16()  # 1 + 2^-7; rounded in every round it would stay 1
    assert want > 1
    for rank, versions in enumerate(run_ranks(4, sums_over_the_rounds)):
        for version, results in zip(VERSIONS, versions, strict=True):
            # All-gather begins with the block of rank 0, to which all ranks then give 1: no sum to look at there.
            for name, x in list(zip(NAMES, results, strict=True))[: 4 if version == "ring" else 2]:
                assert torch.equal(x, want.expand_as(x)), f"{version}, rank {rank}: {name} is {x.unique().tolist()}"


def test_cross_entropy_of_a_bfloat16_model_is_computed_in_float32():
    logits = (10 * torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(0))).bfloat16()
    labels = next_token_labels(text(2, 16) % 128)
    loss = script.loss_sum(lambda *_: logits, labels, labels, torch.arange(16), dense_attention)
    kept = labels != script.IGNORE
    want = -logits.double().log_softmax(-1)[kept].gather(-1, labels[kept][:, None]).sum()
    assert loss.dtype == torch.float32
    assert_same(loss, want, 1e-6, "the loss of bf16 logits")


def test_scores_of_several_hundred_do_not_overflow():
    exact = attention_results(dense_attention, *(30 * x for x in random_qkv((8, 2), S, 4)), causal=True)
    results = run_ranks(2, results_of_all, (8, 2), torch.float64, 30.0)
    for case in range(len(CASES)):
        for name, got, want in zip(NAMES, whole(results, case), exact, strict=True):
            assert_same(got, want, what=f"{CASES[case]} {name}")


def test_positions_1000_and_1001_are_rotated_differently_in_bfloat16():
    x, model = torch.ones(1, 2, 1, 64), Model(1, 1, head_dim=64)
    low = model.rope(x.bfloat16(), torch.tensor([1000, 1001]))
    assert low.dtype == torch.bfloat16
    assert_same(low, model.rope(x, torch.tensor([1000, 1001])), 1e-2, "what RoPE makes of bf16")


# ---------------------------------------------------------------------------------------------------- merge and blocks


def parts_and_whole(dtype: torch.dtype, scale: float) -> tuple[tuple, tuple]:
    """Attention of 5 queries to 3 and to 4 keys, and to all 7 of them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, 8, generator=generator, dtype=torch.float64).to(dtype) for n in (5, 7, 7))
    q = q * scale
    left = explicit_forward(q, k[:, :3], v[:, :3], causal=False)
    right = explicit_forward(q, k[:, 3:], v[:, 3:], causal=False)
    return (*left, *right), explicit_forward(q, k, v, causal=False)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_two_partial_softmaxes_merge_into_the_softmax_of_all_keys(scale):
    parts, want = parts_and_whole(torch.float64, scale)
    got = merge(*parts)
    assert_same(got[0], want[0], what="out")
    assert_same(got[1], want[1], what="lse")


def test_a_merge_of_bfloat16_parts_is_computed_in_float32():
    parts, want = parts_and_whole(torch.float32, 1.0)
    low = [x.bfloat16() for x in parts]
    out, lse = merge(low[0], parts[1], low[2], parts[3])
    assert out.dtype == lse.dtype == torch.float32
    exact, _ = merge(low[0].double(), parts[1].double(), low[2].double(), parts[3].double())
    assert_same(out, exact, 1e-6, "out")
    assert_same(lse, want[1], 1e-6, "lse")


def test_rows_that_saw_no_key_merge_without_a_nan():
    out, lse = explicit_forward(*(x.float() for x in random_qkv((4, 4), 3, 4)[:3]), causal=True)
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for got in (merge(*nothing, out, lse), merge(out, lse, *nothing)):
        assert_same(got[0], out, 1e-6, "out")
        assert_same(got[1], lse, 1e-6, "lse")
    none = merge(*nothing, *nothing)
    assert torch.equal(none[0], nothing[0]) and torch.equal(none[1], nothing[1])


@pytest.mark.parametrize(("layout", "P"), list(product(LAYOUTS, [1, 2, 5])))
def test_every_token_has_one_rank_and_unshard_inverts_shard(layout, P):
    x = torch.randn(2, 20 * P, 3)
    positions = [layout_positions(layout, 20 * P, rank, P) for rank in range(P)]
    assert sorted(torch.cat(positions).tolist()) == list(range(20 * P))
    assert all(torch.equal(p, p.sort().values) and len(p) == 20 for p in positions)
    assert torch.equal(unshard([shard_sequence(x, layout, rank, P) for rank in range(P)], layout), x)
    tokens_first = shard_sequence(x.movedim(1, 0), layout, P - 1, P, dim=0)
    assert torch.equal(tokens_first, shard_sequence(x, layout, P - 1, P).movedim(1, 0))


def mask_of_blocks(layout: str, length: int, P: int) -> Tensor:
    """How often each (query, key) pair of the whole sequence is computed, by the blocks of all ranks."""
    where = [layout_positions(layout, length * P, rank, P) for rank in range(P)]
    computed = torch.zeros(length * P, length * P, dtype=torch.int)
    for rank, owner in product(range(P), range(P)):
        block = block_of(layout, rank, owner, length, causal=True)
        if block is not None:
            rows, columns = where[rank][block.rows], where[owner][block.columns]
            shape = torch.ones(len(rows), len(columns), dtype=torch.int)
            if block.causal:
                assert len(rows) == len(columns), "the triangle of a kernel is that of a square"
                shape = shape.tril()
            computed[rows[:, None], columns[None]] += shape
    return computed


@pytest.mark.parametrize(("layout", "P"), list(product(LAYOUTS, [1, 2, 3, 4])))
def test_the_blocks_of_all_ranks_hold_every_causal_pair_once_and_no_other(layout, P):
    for length in (1, 2, 6) if layout == "striped" else (2, 6):  # one token per rank is enough for it
        causal = torch.ones(length * P, length * P, dtype=torch.int).tril()
        assert torch.equal(mask_of_blocks(layout, length, P), causal)


# ------------------------------------------------------------------------------------------------- work, bytes, memory


def counted_pairs() -> list[int]:
    group, results = dist.group.WORLD, []
    for version, layout in CASES:
        count = [0]
        attention = VERSIONS[version](group, layout, counting(EXPLICIT, count))
        attention(*(shard_sequence(x, layout, group.rank(), 4) for x in random_qkv((2, 1), S, 4)[:3]), causal=True)
        results.append(count[0])
    return results


def test_zigzag_computes_the_same_pairs_on_every_rank_and_contiguous_is_as_unbalanced_as_predicted():
    results = run_ranks(4, counted_pairs)
    for case, (_, layout) in enumerate(CASES):
        pairs = [results[rank][case] for rank in range(4)]
        assert sum(pairs) == S * (S + 1) // 2, "no pair is computed twice, and none that is masked"
        assert pairs == [pairs_of(layout, S, rank, 4, True) for rank in range(4)]
        if layout == "zigzag":
            assert len(set(pairs)) == 1
        if layout == "contiguous":
            assert pairs == [78, 78 + 144, 78 + 288, 78 + 432]
        if layout == "striped":
            assert max(pairs) - min(pairs) == 3 * S // 4


def sent_bytes(heads: tuple[int, int], dtype: torch.dtype) -> list:
    group, results = dist.group.WORLD, []
    for version, layout in CASES:
        attention = VERSIONS[version](group, layout)
        shards = [shard_sequence(x.to(dtype), layout, group.rank(), group.size()) for x in random_qkv(heads, S, 4)]
        q, k, v = (x.requires_grad_() for x in shards[:3])
        with communication() as forward:
            out = attention(q, k, v, causal=True)
        with communication() as backward:
            out.backward(shards[3])
        results.append([(dict(c.sent), dict(c.calls), c.total) for c in (forward, backward)])
    return results


@pytest.mark.always("3-heads1-float32")
@pytest.mark.parametrize(
    ("P", "heads", "dtype"), [(2, (8, 8), "float64"), (3, (8, 2), "float32"), (4, (8, 1), "bfloat16")]
)
def test_bytes_sent_equal_the_formula_with_kv_heads_unexpanded_and_gradients_in_fp32(P, heads, dtype):
    dtype = getattr(torch, dtype)
    elements = 2 * 2 * S * heads[1] * 4  # K and V of B = 2 sequences
    kv, dkv = elements * dtype.itemsize, elements * max(4, dtype.itemsize)
    for results in run_ranks(P, sent_bytes, heads, dtype):
        for (version, _), (forward, backward) in zip(CASES, results, strict=True):
            assert forward[2] == (P - 1) * kv // P
            assert backward[2] == (P - 1) * (kv + dkv) // P
            if version == "ring":
                assert forward[1] == {"send": P - 1, "recv": P - 1}, "P - 1 rounds of one message"
                assert backward[1] == {"send": 2 * (P - 1), "recv": 2 * (P - 1)}
            else:
                assert forward[1] == {"all_gather": 1}
                assert backward[0] == {"all_gather": (P - 1) * kv // P, "reduce_scatter": (P - 1) * dkv // P}


def no_work(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """A local attention that needs no memory beyond its results, so that the peak is that of the K/V."""
    return q.new_zeros(q.shape), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])


def no_work_backward(dout, q, k, v, out, lse, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


def peaks() -> dict[str, tuple[int, ...]]:
    """Peak bytes of forward and of backward, and the bytes saved between them, also in bf16, of each version."""
    group, results = dist.group.WORLD, {}
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(1, 64, 1, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, 64, 1, 8, generator=generator) for _ in range(2))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    for version in VERSIONS:
        attention = VERSIONS[version](group, "contiguous", LocalAttention(no_work, no_work_backward))
        forward, backward = [], []
        for _ in range(3):  # gloo's threads may release a buffer late: the smallest of three counts
            with saved_activations() as saved, peak_memory() as memory:
                out = attention(q, k, v, causal=False)
            forward.append(memory.peak)
            with peak_memory() as memory:
                out.backward(dout)
            backward.append(memory.peak)
        with saved_activations() as narrow:
            attention(*(x.detach().bfloat16().requires_grad_() for x in (q, k, v)), causal=False)
        results[version] = min(forward), min(backward), saved.bytes, narrow.bytes
    return results


def test_the_ring_holds_two_blocks_where_all_gather_holds_all_and_both_save_only_their_own():
    P, shard = 4, 64 * 8 * 4  # bytes of one rank's q, k, v or out; a block is K and V
    for results in run_ranks(P, peaks):
        for version in VERSIONS:
            assert results[version][2] == 4 * shard + 64 * 4, f"{version} saves q, k, v, out and the LSE of its tokens"
            assert results[version][3] == 2 * shard + 64 * 4, f"{version} saves all but the LSE in bf16"
        block = 2 * shard
        # Forward: own copy + all P blocks, against the block in use and the one that arrives.
        assert results["allgather"][0] - results["ring"][0] == (P + 1 - 2) * block
        # Backward: K/V as before; and own part + P contributions + result, against own part, own sum, what travels and
        # what arrives. With two ranks it is the same; from there the difference grows by two blocks a rank.
        assert results["allgather"][1] - results["ring"][1] == ((P + 1 + P + 1) - (2 + 4)) * block


def alive_at_each_post(layout: str, causal: bool) -> list[list[int]]:
    """Whenever a message is posted: how many blocks of K/V, and how many of dK/dV, are alive on this rank.

    In bf16, so that a block of dK/dV, in fp32, is twice as large as one of K/V; with 5 query heads, nothing else is as
    large as either. gloo's threads may let go late: the smallest of several counts."""
    group, plain, counts = dist.group.WORLD, dist.batch_isend_irecv, []
    q, dout = (torch.ones(1, 64, 5, 8, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.ones(1, 64, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    block = 2 * k.nbytes
    attention = script.ring_attention(group, layout, LocalAttention(no_work, no_work_backward))
    for _ in range(3):
        seen = []
        with peak_memory() as memory:

            def batch(messages, memory=memory, seen=seen):
                sizes = list(memory._sizes.values())
                seen.append((sizes.count(block), sizes.count(2 * block)))
                return plain(messages)

            with patch.object(dist, "batch_isend_irecv", batch):
                attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), causal=causal).backward(dout)
        counts.append(seen)
    return [[min(x) for x in zip(*at, strict=True)] for at in zip(*counts, strict=True)]


@pytest.mark.always("striped-False")
@pytest.mark.parametrize(("layout", "causal"), [("zigzag", True), ("contiguous", True), ("striped", False)])
def test_whenever_a_message_is_posted_two_blocks_are_alive_and_no_third(layout, causal):
    for rank, counts in enumerate(run_ranks(4, alive_at_each_post, layout, causal)):
        forward, backward = counts[:3], counts[3:]
        assert [kv for kv, _ in forward] == [2, 2, 2], f"rank {rank}: the block in use and the one that arrives"
        assert len(backward) == 6 and all(kv <= 2 for kv, _ in backward), f"rank {rank}, backward: {backward}"
        # This round's share, the own sum at home, what leaves and what arrives.
        assert max(dkv for _, dkv in backward) == 4, f"rank {rank}, backward: {backward}"


def alive_until_waited_for() -> tuple[bool, bool]:
    """Is what `post` sends alive while the message is under way, if the works do not hold it? And afterwards?"""
    with patch.object(dist, "batch_isend_irecv", lambda messages: []):
        tensor = torch.ones(4)
        sent = weakref.ref(tensor)
        parcel = script.Ring(dist.group.WORLD).post(tensor)
        del tensor
        meanwhile = sent() is not None
        script.Ring(dist.group.WORLD).wait(parcel)
        del parcel
        return meanwhile, sent() is not None


def test_what_is_sent_stays_alive_until_it_was_waited_for():
    assert run_ranks(2, alive_until_waited_for) == [(True, False)] * 2


# ------------------------------------------------------------------------------------------------------------- overlap


class Recorded:
    def __init__(self, work, events: list, what: str):
        self.work, self.events, self.what = work, events, what

    def wait(self):
        self.events.append(("wait", self.what))
        return self.work.wait()


def order_of_events(layout: str) -> tuple[list, list]:
    """What really happens on this rank, seen from outside: messages posted, blocks computed, waits."""
    events: list[tuple[str, str]] = []
    plain = dist.batch_isend_irecv
    k_bytes = 2 * 2 * S // dist.get_world_size() * 1 * 4 * 4  # bf16 K and V; their gradients are twice as large

    def batch(messages):
        what = "K/V" if messages[0].tensor.nbytes == k_bytes // 2 else "dK/dV"
        kinds = sorted(message.op.__name__ for message in messages)
        assert kinds == ["irecv", "isend"], "a round posts its send and its receive together"
        events.append(("post", what))
        return [Recorded(work, events, what) for work in plain(messages)]

    def forward(*args, **kwargs):
        events.append(("compute", ""))
        return explicit_forward(*args, **kwargs)

    def backward(*args, **kwargs):
        events.append(("compute", ""))
        return explicit_backward(*args, **kwargs)

    group = dist.group.WORLD
    attention = script.ring_attention(group, layout, LocalAttention(forward, backward))
    shards = [shard_sequence(x.bfloat16(), layout, group.rank(), group.size()) for x in random_qkv((2, 1), S, 4)]
    q, k, v = (x.requires_grad_() for x in shards[:3])
    with patch.object(dist, "batch_isend_irecv", batch):
        out = attention(q, k, v, causal=True)
        in_forward = list(events)
        events.clear()
        out.backward(shards[3])
    return in_forward, events


def under_way(events: list, what: str) -> list[int]:
    """At each computation: how many rounds of messages `what` are posted and not waited for."""
    posted, waits, counts = 0, 0, []
    for event, kind in events:
        posted += event == "post" and kind == what
        waits += event == "wait" and kind == what
        if event == "compute":
            counts.append(posted - waits // 2)  # a round has two works
    return counts


def test_each_block_is_computed_while_the_next_is_on_its_way():
    for forward, backward in run_ranks(4, order_of_events, "zigzag"):
        assert forward[0] == ("post", "K/V"), "the first message leaves before the first computation"
        assert under_way(forward, "K/V") == [1, 1, 1, 0]
        assert under_way(backward, "K/V") == [1, 1, 1, 0]
        assert under_way(backward, "dK/dV") == [0, 0, 1, 1], "a gradient travels while the next block is computed"


def test_masked_blocks_are_not_computed_but_travel_on():
    results = run_ranks(4, order_of_events, "contiguous")
    for rank, (forward, backward) in enumerate(results):
        for events in (forward, backward):
            assert sum(event == "compute" for event, _ in events) == rank + 1
            assert sum(event == ("post", "K/V") for event in events) == 3


# ------------------------------------------------------------------------------------------------------------ bad input


def error_of(q_shape, k_shape, dtype=torch.float32, causal=True, layout="zigzag", v_shape=None, v_dtype=None) -> str:
    attention = script.ring_attention(dist.group.WORLD, layout)
    q, k, v = (torch.zeros(shape).to(dtype) for shape in (q_shape, k_shape, v_shape or k_shape))
    v = v.to(v_dtype or dtype)
    return error_from(ValueError, attention, q, k, v, causal=causal)


def errors() -> list[str]:
    return [
        error_of((1, 8, 4, 4), (1, 16, 4, 4)),
        error_of((1, 8, 4, 4), (1, 8, 4, 4), dtype=torch.float8_e4m3fn),
        error_of((1, 8, 4, 4), (1, 8, 3, 4)),
        error_of((1, 7, 4, 4), (1, 7, 4, 4)),
        error_of((1, 8, 4, 4), (1, 8, 4, 4), v_shape=(1, 8, 4, 2)),
        error_of((2, 8, 4, 4), (1, 8, 4, 4)),
        error_of((1, 8, 4, 4), (1, 8, 4, 8)),
        error_of((1, 8, 4), (1, 8, 4)),
        error_of((1, 8, 4, 4), (1, 0, 4, 4), causal=False),
        error_of((1, 8, 4, 4), (1, 8, 4, 4), v_dtype=torch.bfloat16),
        error_of((1, 8, 4, 4), (1, 16, 4, 4), causal=False),
        error_of((1, 7, 4, 4), (1, 7, 4, 4), causal=False),
        error_from(ValueError, script.ring_attention, dist.group.WORLD, "spiral"),
        error_from(ValueError, layout_positions, "spiral", 8, 0, 2),
    ]


def test_what_a_ring_cannot_do_is_said_in_one_line():
    cross, fp8, heads, odd, shapes, batch, dim, three, none, dtypes, allowed, uncut, *spirals = run_ranks(1, errors)[0]
    assert "batch 2" in batch and "have 1" in batch
    assert "head dim 4" in dim and "have 8" in dim
    assert "q is [1, 8, 4]" in three and "head dim" in three
    assert "k is [1, 0, 4, 4]" in none
    assert "v is torch.bfloat16" in dtypes and "q is torch.float32" in dtypes
    assert "8 queries" in cross and "16 keys" in cross and "cross attention" in cross and "causal=False" in cross
    assert "float8_e4m3fn" in fp8 and "bfloat16" in fp8
    assert "4 query heads" in heads and "3 K/V heads" in heads
    assert "7 tokens" in odd and "zigzag" in odd and "even" in odd
    assert "[1, 8, 4, 2]" in shapes
    assert all("\n" not in message for message in (cross, fp8, heads, odd, shapes, batch, dim, three, none, dtypes))
    assert allowed == "", "cross attention without a causal order is fine"
    assert uncut == "", "without a mask no layout has chunks"
    assert all("'spiral' is unknown; use one of contiguous, zigzag, striped" in said for said in spirals), spirals


@pytest.mark.parametrize(("layout", "near"), [("zigzag", "96 or 104"), ("striped", "96 or 100")])
def test_a_sequence_that_does_not_divide_is_refused_with_the_next_ones_that_do(layout, near):
    with pytest.raises(ValueError, match=near) as error:
        layout_positions(layout, 98 if layout == "zigzag" else 97, 0, 4)
    assert layout in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="a sequence of 0 tokens .*; use [48]$"):
        layout_positions(layout, 0, 0, 4)


# ----------------------------------------------------------------------------------------------------------- the script


def run_demo(name: str, argv: list[str], nan: bool = False) -> list[str]:
    """What the demo of a script of this folder finds wrong. `nan`: rank 1 has one (of context_ring.py), and pairs and
    bytes that are off by 1 (of this script and of packed_documents.py)."""
    module, plain = importlib.import_module(name), dist.all_gather_object
    sys.argv = [f"{name}.py", *argv]

    def step(model: Model, *args, **options) -> Tensor:
        loss = train_step(model, *args, **options)
        if nan and dist.get_rank() == 1:
            model.up.weight.grad[0] = math.nan
        return loss

    def gather(found: list, mine: tuple, **options) -> None:
        plain(found, (mine[0], *(number + (nan and dist.get_rank()) for number in mine[1:])), **options)

    patches = patch.object(script, "train_step", step), patch.object(dist, "all_gather_object", gather)
    with patch.dict(os.environ, WORLD_SIZE=str(dist.get_world_size())), patches[0], patches[1]:
        return module.demo(module.parse_arguments(), dist.group.WORLD, torch.device("cpu"))


def test_the_demo_without_a_mask_finds_nothing_wrong_but_a_nan():
    argv = ["--attention", "full", "--seq", "8", "--kv-heads", "1"]
    for found in run_ranks(2, run_demo, "context_ring", argv, nan=True):  # after a step both ranks have it
        said = [sum(word in line for line in found) for word in ("off by nan", ": pairs", ": sent", "")]
        assert said == [2 * len(CASES), len(CASES), len(CASES), 4 * len(CASES)], found
    assert text(2, 16384, 2).shape == (2, 16384), "the longest is there"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seq", "100"], ["--seq 100", "2P = 8", "zigzag", "96 or 104"]),
        (["--seq", "2"], ["--seq 2", "3 or more"]),
        (["--seq", "3", "--layout", "striped"], ["--seq 3", "use 4"]),
        (["--kv-heads", "3"], ["--kv-heads 3", "--heads 4", "divisor"]),
        (["--kv-heads", "0"], ["--kv-heads 0", "divisor"]),
        (["--seq", "16385"], ["--seq 16385", "16384 or less"]),
        (["--heads", "1025", "--kv-heads", "1"], ["--heads 1025", "1 to 1024"]),
        (["--heads", "0", "--kv-heads", "1"], ["--heads 0", "1 to 1024"]),
        (["--dtype", "float8_e4m3fn"], ["--dtype", "float8_e4m3fn", "float32"]),
        (["--attention", "cross"], ["--attention", "cross", "causal", "full"]),
    ],
)
def test_a_wrong_option_ends_with_one_line_that_names_it(argv, words):
    said = refusal(parse_arguments, argv, world_size=4)
    assert all(word in said for word in words), said


def test_the_largest_sizes_are_taken(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["context_ring.py", "--seq", "16384", "--heads", "1024", "--kv-heads", "1024"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = parse_arguments()
    assert (args.seq, args.heads, args.kv_heads) == (16384, 1024, 1024)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert refusal(parse_arguments) == "--nproc_per_node 3 is more than the GPUs here; use 2 or less"
