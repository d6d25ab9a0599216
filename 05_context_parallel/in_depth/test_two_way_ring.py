"""The ring in two directions against the same reference as the ring in one: the model on the whole sequence."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_ring import (
    EXPLICIT,
    LAYOUTS,
    LocalAttention,
    Model,
    dense_attention,
    layout_positions,
    ring_attention,
    shard_sequence,
    text,
    train_step,
)
from harness.meter import communication
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same_trace, sgd_trace
from torch import Tensor
from two_way_ring import demo, halves_of, parse_arguments, two_way_ring

S = 48
HEADS = [(4, 4), (6, 3)]  # of 3 K/V heads one goes one way, and two the other


def model_of(heads: tuple[int, int], seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(*heads, head_dim=4, vocab=128).double()


@cache
def reference_trace(heads: tuple[int, int], seed: int = 0) -> Trace:
    model = model_of(heads, seed)

    def backward(step: int) -> float:
        tokens = text(2, S, seed + step)
        logits = model(tokens, torch.arange(S), dense_attention)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward)


def trace_of(heads: tuple[int, int], layout: str, group, seed: int = 0) -> Trace:
    model, positions = model_of(heads, seed), layout_positions(layout, S, group.rank(), group.size())
    attention = two_way_ring(group, layout)

    def backward(step: int) -> float:
        return train_step(model, text(2, S, seed + step), positions, attention, group).item()

    return sgd_trace(dict(model.named_parameters()), backward)


def traces() -> list[Trace]:
    return [trace_of(HEADS[i % 2], layout, dist.group.WORLD) for i, layout in enumerate(LAYOUTS)]


@pytest.mark.parametrize("ranks", [3, 4])
def test_loss_every_gradient_and_weights_equal_the_unsharded_block(ranks):
    for rank, found in enumerate(run_ranks(ranks, traces)):
        for i, got in enumerate(found):
            assert_same_trace(got, reference_trace(HEADS[i % 2]), rank=rank)


def two_slices() -> Trace:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    return trace_of(HEADS[1], "zigzag", groups[mine], mine)


def test_two_slices_of_the_world_train_two_models_at_the_same_time():
    for rank, got in enumerate(run_ranks(4, two_slices)):
        assert_same_trace(got, reference_trace(HEADS[1], rank % 2), rank=rank)


def random_qkv(heads: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, S, n, 4, generator=generator, dtype=torch.float64) for n in (*heads, heads[1], heads[0])]


def results_of(attention: Callable, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, causal=True)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def bfloat16_results() -> list[Tensor]:
    group = dist.group.WORLD
    shards = [shard_sequence(x.bfloat16(), "zigzag", group.rank(), 4) for x in random_qkv((4, 2))]
    return results_of(two_way_ring(group), *shards)


def test_bfloat16_errs_at_most_one_and_a_half_times_as_much_as_dense_bfloat16_attention():
    given = [x.bfloat16() for x in random_qkv((4, 2))]
    exact, dense = results_of(dense_attention, *(x.double() for x in given)), results_of(dense_attention, *given)
    found = run_ranks(4, bfloat16_results)
    order = torch.cat([layout_positions("zigzag", S, rank, 4) for rank in range(4)]).argsort()
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        got = torch.cat([results[i] for results in found], 1)[:, order]
        ours, theirs = ((x.double() - exact[i]).square().mean().sqrt().item() for x in (got, dense[i]))
        assert ours <= 1.5 * theirs, f"{name}: error {ours:.2e}, dense bf16 {theirs:.2e}"


def sums_over_the_rounds() -> list[Tensor]:
    """dq, dk, dv of a kernel whose shares are 0 for the own block, then 1, then a little twice: each too little for
    beside 1, both together enough."""
    calls = [0]

    def forward(q, k, v, *, causal):
        return torch.zeros(q.shape), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(dout, q, k, v, out, lse, *, causal):
        calls[0] += 1
        share = (0.0, 1.0, 1.5 * 2**-9, 1.5 * 2**-9)[(calls[0] - 1) // 2]  # two halves a round
        return tuple(torch.full(x.shape, share) for x in (q, k, v))

    x = torch.ones(1, 2, 2, 4, dtype=torch.bfloat16)
    attention = two_way_ring(dist.group.WORLD, "contiguous", LocalAttention(forward, backward))
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    attention(q, k, v, causal=False).backward(x)
    return [q.grad, k.grad, v.grad]


def test_what_is_summed_over_the_rounds_is_rounded_once_at_the_end():
    want = torch.tensor(1 + 3 * 2**-9).bfloat16()
    assert want > 1
    for rank, results in enumerate(run_ranks(4, sums_over_the_rounds)):
        for name, x in zip(("dq", "dk", "dv"), results, strict=True):
            assert torch.equal(x, want.expand_as(x)), f"rank {rank}: {name} is {x.unique().tolist()}"


# ------------------------------------------------------------------------------------------- links, order, balance


def links(way: str) -> tuple[dict, float, int]:
    """Bytes that this rank sends to each neighbour in forward and backward, seen from outside; all it sends."""
    group, plain, sent = dist.group.WORLD, dist.batch_isend_irecv, Counter()

    def batch(messages):
        for message in messages:
            if message.op is dist.isend:
                sent[message.group_peer] += message.tensor.nbytes
        return plain(messages)

    attention = {"one": ring_attention, "two": two_way_ring}[way](group, "zigzag")
    shards = [shard_sequence(x.bfloat16(), "zigzag", group.rank(), 4) for x in random_qkv((4, 2))]
    dist.batch_isend_irecv = batch
    try:
        with communication() as counted:
            results_of(attention, *shards)
    finally:
        dist.batch_isend_irecv = plain
    return dict(sent), counted.total, counted.calls["send"]


def test_each_direction_carries_half_of_what_a_ring_in_one_direction_carries():
    block = 2 * 2 * S // 4 * 2 * 4 * 2  # bytes of K and V of a rank's tokens of two sequences, bf16
    step = 3 * (2 * block + 2 * block)  # K/V twice, dK/dV in fp32; 3 hops
    for rank, (one, two) in enumerate(zip(run_ranks(4, links, "one"), run_ranks(4, links, "two"), strict=True)):
        after, before = (rank + 1) % 4, (rank - 1) % 4
        assert one == ({after: step}, step, 9)
        assert two == ({after: step // 2, before: step // 2}, step, 18)


def order_of_events() -> list[list[tuple]]:
    """Messages posted, pairs computed, waits: forward, then backward."""
    events: list[tuple] = []
    plain, group = dist.batch_isend_irecv, dist.group.WORLD

    class Recorded:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append(("wait",))
            return self.work.wait()

    def batch(messages):
        events.append(("post", len(messages)))
        return [Recorded(work) for work in plain(messages)]

    def counted(kernel):
        def run(*args, causal):
            q, k = args[:2] if kernel is EXPLICIT.forward else args[1:3]
            s, t = q.shape[1], k.shape[1]
            events.append(("compute", q.shape[2] * (s * (s + 1) // 2 if causal else s * t)))
            return kernel(*args, causal=causal)

        return run

    attention = two_way_ring(group, "zigzag", LocalAttention(counted(EXPLICIT.forward), counted(EXPLICIT.backward)))
    shards = [shard_sequence(x, "zigzag", group.rank(), 4) for x in random_qkv((4, 2))]
    dist.batch_isend_irecv = batch
    try:
        results_of(attention, *shards)
    finally:
        dist.batch_isend_irecv = plain
    return events


def test_both_halves_travel_while_both_are_computed_and_every_round_costs_every_rank_the_same():
    s = S // 4
    for events in run_ranks(4, order_of_events):
        forward = events[: [i for i, e in enumerate(events) if e[0] == "compute"][7] + 1]
        assert forward[0] == ("post", 4), "both ways in one batch, before anything is computed"
        rounds, open_messages = [], 0
        for event in forward:
            if event[0] == "post":
                open_messages += 4
                rounds.append([])
            elif event[0] == "wait":
                open_messages -= 1
            else:
                rounds[-1].append((event[1], open_messages))
        # Two heads go each way. In the last round nothing is under way, and no post begins it: it is with the third.
        assert rounds[0] == [(2 * s * (s + 1) // 2, 4)] * 2
        assert rounds[1] == [(2 * s * s // 2, 4)] * 2
        assert rounds[2] == [(2 * s * s // 2, 4)] * 2 + [(2 * s * s // 2, 0)] * 2
        assert [e for e in events if e[0] == "post"] == [("post", 4)] * 9, "3 rounds of K/V, and again, and of dK/dV"


# ------------------------------------------------------------------------------------------------ bad input, the script


def test_every_head_goes_one_way_and_takes_its_queries_with_it():
    for N, N_kv in [(4, 4), (6, 3), (8, 2), (10, 5)]:
        (first, first_q), (second, second_q) = halves_of(N, N_kv)
        kv, queries = list(range(N_kv)), list(range(N))
        assert kv[first] + kv[second] == kv and queries[first_q] + queries[second_q] == queries
        assert abs(len(kv[first]) - len(kv[second])) <= 1
        assert {q // (N // N_kv) for q in queries[first_q]} == set(kv[first])


def errors() -> list[str]:
    x, messages = torch.zeros(1, 8, 2, 4), []
    for call in (
        lambda: two_way_ring(dist.group.WORLD)(x, x[:, :, :1], x[:, :, :1], causal=True),
        lambda: two_way_ring(dist.group.WORLD, "diagonal"),
        lambda: two_way_ring(dist.group.WORLD)(x[:, :7], x[:, :7], x[:, :7], causal=True),
    ):
        try:
            call()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_two_ways_cannot_do_is_said_in_one_line():
    heads, layout, odd = run_ranks(1, errors)[0]
    assert "1 K/V head cannot be halved" in heads and "ring_attention" in heads
    assert "'diagonal'" in layout and "7 tokens" in odd


def run_demo(argv: list[str]) -> list[str]:
    sys.argv = ["two_way_ring.py", *argv]
    with patch.dict(os.environ, WORLD_SIZE=str(dist.get_world_size())):
        args = parse_arguments()
    return demo(args, dist.group.WORLD, torch.device("cpu"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_demo_finds_nothing_wrong(ranks):
    argv = ["--layout", "zigzag", "--heads", "6", "--kv-heads", "3"]
    assert run_ranks(ranks, run_demo, argv) == [[]] * ranks


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-heads", "1"], ["--kv-heads 1", "2 or more"]),
        (["--kv-heads", "3"], ["--kv-heads 3", "--heads 4"]),
        (["--seq", "2"], ["--seq 2", "3 or more"]),
        (["--seq", "100"], ["--seq 100", "2P = 8", "96 or 104"]),
        (["--layout", "diagonal"], ["--layout", "diagonal"]),
        (["--workers", "3"], ["--workers"]),
    ],
)
def test_a_wrong_option_ends_with_one_line_that_names_it(argv, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["two_way_ring.py", *argv])
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as stop:
        parse_arguments()
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and printed.count("\n") == 1
    assert all(word in printed for word in ["two_way_ring.py: ", *words]), printed
