"""Ulysses and Ulysses x ring against one reference: the same model on the whole sequence, in one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

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
    shard_sequence,
    text,
)
from context_ulysses import (
    KINDS,
    PAPER,
    Machine,
    block_sparse,
    check_enough_heads,
    check_heads,
    cost_model,
    every_other_key,
    kv_heads_of,
    masked,
    parse_arguments,
    print_cost_model,
    query_heads_of,
    repeated_kv_heads,
    sent_per_layer,
    sliding_window,
    step_flops,
    step_seconds,
    to_heads,
    to_tokens,
    ulysses,
    usp,
    usp_groups,
    usp_positions,
)
from harness.attention import attention_results, random_qkv
from harness.meter import communication, saved_activations
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_trace
from test_context_ring import run_demo, trace_on_ranks, whole_trace
from torch import Tensor

HEADS = [(8, 8), (8, 2), (8, 1)]  # query heads, key/value heads
S = 48  # tokens of a test's sequence
NAMES = ("out", "dq", "dk", "dv")


def model_of(heads: tuple[int, int], kind: str, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model(*heads, head_dim=4, vocab=128, causal=kind in ("causal", "window", "sparse")).to(dtype)


def reference_attention(kind: str) -> Callable[..., Tensor]:
    """Each kind written out once more, with a mask made by a loop over pairs."""

    def seen(i: int, j: int) -> bool:
        return {
            "causal": j <= i,
            "full": True,
            "window": i - 10 < j <= i,
            "sparse": j <= i and (i // 4 == j // 4 or j // 4 % 3 == 0),
            "cross": j % 2 == 0,
        }[kind]

    mask = torch.tensor([[seen(i, j) for j in range(S)] for i in range(S)])

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return attention


@cache
def reference_trace(heads: tuple[int, int], kind: str, dtype: torch.dtype = torch.float64) -> Trace:
    return whole_trace(model_of(heads, kind, dtype), reference_attention(kind))


def trace_of(attention, positions, group, heads, kind, dtype=torch.float64) -> Trace:
    attention = every_other_key(attention) if kind == "cross" else attention
    return trace_on_ranks(model_of(heads, kind, dtype), attention, positions, group)


def ulysses_trace(group, heads, kind, dtype=torch.float64, together: bool = False) -> Trace:
    positions = layout_positions("contiguous", S, group.rank(), group.size())
    return trace_of(ulysses(group, KINDS[kind], together=together), positions, group, heads, kind, dtype)


# ---------------------------------------------------------------------------------------------------- the one reference

CASES = [(heads, kind) for heads in HEADS for kind in KINDS if kind == "causal" or heads == (8, 2)]


def ulysses_traces(dtype: torch.dtype = torch.float64) -> list[Trace]:
    return [ulysses_trace(dist.group.WORLD, heads, kind, dtype) for heads, kind in CASES]


@pytest.mark.always("2-float64-1e-10")
@pytest.mark.parametrize(
    ("ranks", "dtype", "tol"),
    [(1, "float64", 1e-10), (2, "float64", 1e-10), (4, "float64", 1e-10), (4, "float32", 1e-5)],
)
def test_loss_every_gradient_and_weights_equal_the_unsharded_block_for_every_kind_of_attention(ranks, dtype, tol):
    dtype = getattr(torch, dtype)
    want = [reference_trace(heads, kind, dtype) for heads, kind in CASES]
    for rank, traces in enumerate(run_ranks(ranks, ulysses_traces, dtype)):
        for got, expected in zip(traces, want, strict=True):
            assert_same_trace(got, expected, tol, rank=rank)


def odd_kv_heads(heads: tuple[int, int]) -> list[Trace]:
    group = dist.group.WORLD
    return [ulysses_trace(group, heads, "causal"), ulysses_trace(group, heads, "cross", together=True)]


@pytest.mark.always("2-heads0")
@pytest.mark.parametrize(("ranks", "heads"), [(2, (6, 3)), (6, (12, 4))])
def test_kv_heads_that_neither_divide_the_ranks_nor_are_divided_by_them_work(ranks, heads):
    for rank, traces in enumerate(run_ranks(ranks, odd_kv_heads, heads)):
        for kind, got in zip(("causal", "cross"), traces, strict=True):
            assert_same_trace(got, reference_trace(heads, kind), rank=rank)


TOGETHER = [((8, 2), "causal"), ((8, 2), "cross"), ((6, 2), "causal"), ((6, 3), "cross"), ((7, 1), "causal")]


def together_traces() -> list[Trace]:
    return [ulysses_trace(dist.group.WORLD, *case, together=True) for case in TOGETHER]


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [2, 4])
def test_q_k_and_v_in_one_message_are_exact_for_any_number_of_heads(ranks):
    for rank, traces in enumerate(run_ranks(ranks, together_traces)):
        for case, got in zip(TOGETHER, traces, strict=True):
            assert_same_trace(got, reference_trace(*case), rank=rank)


def test_ranks_get_all_query_heads_between_them_also_if_they_cannot_get_equally_many():
    for N, P, want in [(8, 4, [2, 2, 2, 2]), (6, 4, [1, 2, 1, 2]), (7, 4, [1, 2, 2, 2]), (5, 5, [1] * 5)]:
        heads = [query_heads_of(rank, P, N) for rank in range(P)]
        assert [len(of) for of in heads] == want
        assert [head for of in heads for head in of] == list(range(N))


def copies_come_home() -> Tensor:
    """The gradient of one K head that four ranks use; rank 0 finds 1, the others 2^-9 each: too little for bf16, beside
    1, and enough together."""
    group = dist.group.WORLD
    x = torch.zeros(1, 1, 4, 2, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    share = 1.0 if group.rank() == 0 else 2**-9

    def attention(q, k, v, *, causal):
        return share * k.expand_as(q)

    ulysses(group, attention, together=True)(x, k, k.detach(), causal=True).backward(torch.ones_like(x))
    return k.grad


def test_gradients_of_a_head_that_went_to_several_ranks_are_summed_in_float32():
    want = torch.tensor(1 + 3 * 2**-9).bfloat16()
    assert want > 1
    for grad in run_ranks(4, copies_come_home):
        assert torch.equal(grad, want.expand_as(grad)), grad.unique().tolist()


USP_CASES = [(heads, "causal") for heads in ((8, 8), (8, 2), (8, 1), (2, 1), (6, 3))] + [((8, 2), "full")]


def usp_traces(U: int) -> list[Trace]:
    P, rank = dist.get_world_size(), dist.get_rank()
    ulysses_group, ring_group = usp_groups(P, U)
    results = []
    for layout in LAYOUTS:
        positions = usp_positions(layout, S, rank // U, P // U, rank % U, U)
        attention = usp(ulysses_group, ring_group, layout)
        results += [trace_of(attention, positions, dist.group.WORLD, *case) for case in USP_CASES]
        assert (ulysses_group.size(), ring_group.size()) == (U, P // U)
    return results


@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "U"), [(4, 2), (1, 1), (2, 1), (2, 2)])
def test_ulysses_times_ring_is_exact_in_every_layout_on_a_rectangle_and_on_one_row_or_column(ranks, U):
    """On 2 x 2 ranks also with fewer heads than ranks."""
    want = [reference_trace(*case) for _ in LAYOUTS for case in USP_CASES]
    for rank, traces in enumerate(run_ranks(ranks, usp_traces, U)):
        for got, expected in zip(traces, want, strict=True):
            assert_same_trace(got, expected, rank=rank)


def seconds_of_groups() -> list[float]:
    backends = [group._get_backend(torch.device("cpu")) for group in usp_groups(4, 2)]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_the_groups_of_usp_wait_a_minute_like_the_world_and_not_half_an_hour():
    assert run_ranks(4, seconds_of_groups) == [[60.0, 60.0]] * 4


# ------------------------------------------------------------------- beside ZeRO-3, and beside tensor parallelism


def zero3_trains(sp: int) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Three steps of chapter 1's model by chapter 3's ZeRO-3 over data x sequence; bytes of weights held after."""
    from bench_ulysses_zero3 import Run
    from llama import TINY

    run = Run(sp, torch.float64, TINY)
    losses = [run.step(text(run.dp, 32, step) % 64) for step in range(3)]
    return losses, run.zero.full_weights(), sum(x.untyped_storage().nbytes() for x in run.zero.held()["weights"])


@pytest.mark.parametrize("sp", [2, 4])
def test_zero3_over_data_times_sequence_trains_as_one_process_and_holds_a_share_of_all_ranks(sp):
    from bench_ulysses_zero3 import alone
    from llama import TINY

    losses, weights = alone([text(4 // sp, 32, step) % 64 for step in range(3)], TINY, torch.float64)
    whole = 8 * sum(p.numel() for p in weights.values())
    for rank, (got, full, held) in enumerate(run_ranks(4, zero3_trains, sp)):
        for step, (ours, theirs) in enumerate(zip(got, losses, strict=True)):
            assert_same(ours, theirs, what=f"loss of step {step}", rank=rank)
        for name, p in weights.items():
            assert_same(full[name], p, what=name, rank=rank)
        assert whole / 4 <= held <= whole / 4 + 8 * 4 * 3, "a quarter, with at most 4 numbers of padding in each unit"


def tensor_and_context() -> list[Tensor]:
    """2 tensor-parallel ranks with half of the heads each, and 2 of Ulysses for each half: 2 x 2 of 4 heads."""
    rank, results = dist.get_rank(), []
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # neighbours are the tensor group, as in the trainer
    tp, sp = rank % 2, rank // 2
    mine = layout_positions("contiguous", S, sp, 2)
    for heads in ((4, 4), (4, 2)):
        shards = [x.chunk(2, 2)[tp][:, mine] for x in random_qkv(heads, S, 4)]
        results.append(attention_results(ulysses(groups[tp]), *shards, causal=True))
    return results


def test_tensor_parallelism_cuts_the_heads_first_and_ulysses_what_is_left():
    of_ranks = run_ranks(4, tensor_and_context)
    for i, heads in enumerate(((4, 4), (4, 2))):
        want = attention_results(dense_attention, *random_qkv(heads, S, 4), causal=True)
        for rank, results in enumerate(of_ranks):
            where = layout_positions("contiguous", S, rank // 2, 2)
            for name, got, whole in zip(NAMES, results[i], want, strict=True):
                assert_same(got, whole.chunk(2, 2)[rank % 2][:, where], what=f"{name}, {heads}", rank=rank)
    # 32 heads that share 8: with TP over 8 ranks 4 query heads and one K/V head are left, which Ulysses copies to each.
    assert [len(kv_heads_of(r, 4, 32 // 8, 1)) for r in range(4)] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="4 query heads are not enough for 8 ranks .*; use 4 or fewer ranks, or USP"):
        check_enough_heads(32 // 8, 8)


# --------------------------------------------------------------------------------------------------------- the swap


def there_and_back() -> tuple[Tensor, bool]:
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, 6, 5, generator=generator)
    mine = shard_sequence(x, "contiguous", group.rank(), 3)
    heads = to_heads(mine, group)
    return heads, torch.equal(to_tokens(heads, group), mine)


def test_all_tokens_of_some_heads_arrive_in_order_and_the_way_back_is_the_inverse():
    x = torch.randn(2, 12, 6, 5, generator=torch.Generator().manual_seed(0))
    for rank, (heads, inverse) in enumerate(run_ranks(3, there_and_back)):
        assert torch.equal(heads, x[:, :, 2 * rank : 2 * rank + 2]), f"rank {rank}"
        assert inverse, f"rank {rank}"


def test_every_rank_gets_the_kv_heads_that_its_query_heads_use_and_no_other():
    for N, N_kv, P, copies in [(8, 8, 4, 8), (8, 2, 4, 4), (8, 1, 4, 4), (6, 3, 2, 4), (8, 2, 1, 2), (12, 4, 6, 8)]:
        heads = [kv_heads_of(rank, P, N, N_kv) for rank in range(P)]
        for rank, mine in enumerate(heads):
            queries = list(range(N))[rank * N // P :][: N // P]
            assert mine == sorted({head // (N // N_kv) for head in queries}), f"{N}, {N_kv}: rank {rank} of {P}"
        assert sum(len(mine) for mine in heads) == copies
    # Of four query heads three use one K/V head: a kernel, given two, would take them for two and two.
    assert [repeated_kv_heads(rank, 3, 12, 4) for rank in range(3)] == [[0, 0, 0, 1], None, [0, 1, 1, 1]]


def calls_of_the_kernel() -> list[int]:
    calls = [0, 0]

    def forward(*args, **kwargs):
        calls[0] += 1
        return EXPLICIT.forward(*args, **kwargs)

    def backward(*args, **kwargs):
        calls[1] += 1
        return EXPLICIT.backward(*args, **kwargs)

    x = torch.ones(1, 4, 4, 4, requires_grad=True)
    usp(*usp_groups(4, 2), "contiguous", LocalAttention(forward, backward))(x, x, x, causal=True).sum().backward()
    return calls


def test_ulysses_times_ring_computes_with_the_kernel_that_it_is_given():
    want = [[1, 1], [1, 1], [2, 2], [2, 2]]  # the first half sees itself only, the second both, forward and backward
    assert run_ranks(4, calls_of_the_kernel) == want, "in the layout and with the kernel that were given"


# -------------------------------------------------------------------------------------------------- kinds of attention


def test_each_kind_sees_what_its_name_says():
    eye = torch.eye(12).view(1, 12, 1, 12)

    def seen(attention: Callable[..., Tensor], causal: bool) -> Tensor:
        """Which keys have a weight: the values are unit vectors, so the output is the row of weights."""
        return attention(torch.ones_like(eye), torch.zeros_like(eye), eye, causal=causal)[0, :, 0] > 0

    i, j = torch.arange(12)[:, None], torch.arange(12)[None]
    assert torch.equal(seen(sliding_window(3), True), (i - j >= 0) & (i - j < 3))
    assert torch.equal(seen(sliding_window(3), False), (i - j).abs() < 3)
    assert torch.equal(seen(block_sparse(2, 3), False), (i // 2 == j // 2) | (j // 2 == 0) | (j // 2 == 3))
    assert torch.equal(seen(masked(lambda i, j: j == 0), True), (j == 0).expand(12, 12))


# ----------------------------------------------------------------------------------------------- what it costs: bytes


def sent_by_ulysses(heads: tuple[int, int], length: int = S, together: bool = False) -> tuple[dict, dict, dict]:
    P = dist.get_world_size()
    q, k, v = (torch.ones(1, length // P, n, 4, requires_grad=True) for n in (*heads, heads[1]))
    with communication() as forward:
        out = ulysses(dist.group.WORLD, together=together)(q, k, v, causal=True)
    with communication() as backward:
        out.sum().backward()
    return dict(forward.sent), dict(backward.sent), dict(forward.calls)


def test_q_k_and_v_in_one_message_are_two_all_to_alls_of_as_many_bytes():
    for got, plain in zip(
        run_ranks(4, sent_by_ulysses, (8, 2), S, True), run_ranks(4, sent_by_ulysses, (8, 2)), strict=True
    ):
        assert got[:2] == plain[:2] and got[2] == {"all_to_all": 2}
    head = S // 4 * 4 * 4  # bytes of one head of one rank's tokens, float32
    for rank, (forward, backward, calls) in enumerate(run_ranks(4, sent_by_ulysses, (6, 3))):
        n, m, C = (1, 2, 1, 2)[rank], (1, 2, 1, 1)[rank], 5
        assert calls == {"all_to_all": 2}
        assert forward == {"all_to_all": (6 - n + 2 * (C - m) + 3 * n) * head}, f"rank {rank}"
        assert forward["all_to_all"] == 4 * sent_per_layer("ulysses", S, 24, 4, 6, 3, rank)
        assert backward == {"all_to_all": ((n + 2 * m) * 3 + 6 - n) * head}, f"rank {rank}"


@pytest.mark.parametrize(("P", "heads"), [(4, (8, 8)), (4, (8, 2)), (4, (8, 1)), (2, (6, 3))])
def test_four_all_to_alls_send_exactly_the_formula_and_backward_the_same(P, heads):
    N, N_kv = heads
    hidden = 4 * N
    for forward, backward, calls in run_ranks(P, sent_by_ulysses, heads):
        want = 4 * sent_per_layer("ulysses", S, hidden, P, N, N_kv)  # float32
        assert calls == {"all_to_all": 4}
        assert forward == backward == {"all_to_all": want}
        if N_kv == N:
            assert want == 4 * (4 * S * hidden / P) * (P - 1) / P, "the paper's 4 N h / P, less what stays"


def test_of_12_heads_that_share_4_on_6_ranks_8_copies_are_sent_and_not_12():
    head = S // 6 * 4 * 4  # bytes of one head of one rank's tokens, float32
    for rank, (forward, backward, _) in enumerate(run_ranks(6, sent_by_ulysses, (12, 4))):
        m = (1, 2, 1, 1, 2, 1)[rank]
        assert forward == {"all_to_all": (2 * 10 + 2 * (8 - m)) * head}, f"rank {rank}"
        assert forward["all_to_all"] == 4 * sent_per_layer("ulysses", S, 48, 6, 12, 4, rank)
        assert backward == {"all_to_all": (2 * 10 + 2 * 5 * m) * head}, f"rank {rank}"


def test_on_8_ranks_the_ring_sends_half_as_much_in_forward_and_nearly_as_much_in_a_step_of_bfloat16():
    """128 heads that share 8, as the README says. K/V twice; dK/dV are as many numbers, in fp32, which count double."""
    per_M = {kind: sent_per_layer(kind, 4096, 16384, 8, 128, 8) / (4096 * 16384) for kind in ("ring", "ulysses")}
    assert per_M["ring"] == pytest.approx(0.109, abs=5e-4) and per_M["ulysses"] == pytest.approx(0.232, abs=5e-4)
    step = {"ring": per_M["ring"] * (1 + 1 + 2), "ulysses": 2 * per_M["ulysses"]}
    assert step["ring"] == pytest.approx(0.438, abs=6e-4) and step["ulysses"] == pytest.approx(0.465, abs=5e-4)
    assert per_M["ring"] / per_M["ulysses"] == pytest.approx(0.47, abs=5e-3)
    assert step["ring"] / step["ulysses"] == pytest.approx(0.94, abs=5e-3)


def sent_by_megatron(length: int) -> float:
    """The collectives of one layer's forward under tensor and sequence parallelism, on [S, H] of float32."""
    P = dist.get_world_size()
    whole, part = torch.zeros(length, 32), torch.zeros(length // P, 32)
    with communication() as sent:
        for _ in ("attention", "mlp"):
            dist.all_gather(list(whole.chunk(P)), part)
            dist.reduce_scatter(part, list(whole.chunk(P)))
    return sent.total


def sent_by_ring(length: int) -> float:
    from context_ring import ring_attention

    x = torch.zeros(1, length // dist.get_world_size(), 8, 4)
    with communication() as sent:
        ring_attention(dist.group.WORLD)(x, x, x, causal=True)
    return sent.total


def test_as_sequence_and_ranks_grow_together_ulysses_stays_below_its_constant_and_the_others_grow_linearly():
    sent = {}
    for P in (2, 4):
        length = 16 * P
        sent["ulysses", P] = run_ranks(P, sent_by_ulysses, (8, 8), length)[0][0]["all_to_all"]
        sent["megatron", P] = run_ranks(P, sent_by_megatron, length)[0]
        sent["ring", P] = run_ranks(P, sent_by_ring, length)[0]
        for kind in ("ulysses", "megatron", "ring"):
            assert sent[kind, P] == 4 * sent_per_layer(kind, length, 32, P, 8, 8), f"{kind} on {P} ranks"
    far = {
        kind: [sent_per_layer(kind, 16 * P, 32, P, 64, 64) for P in (32, 64)]
        for kind in ("ulysses", "megatron", "ring")
    }
    first, second = (elements / (4 * 16 * 32) for elements in far["ulysses"])
    assert first > 0.95 and first < second < 1
    assert far["megatron"][1] / far["megatron"][0] == pytest.approx(2 * (63 / 64) / (31 / 32))
    assert far["ring"][1] / far["ring"][0] == pytest.approx(2 * (63 / 64) / (31 / 32))


def sent_by_usp() -> tuple[dict, dict]:
    x = torch.ones(1, S // 4, 8, 4, requires_grad=True)
    attention = usp(*usp_groups(4, 2))
    with communication() as forward:
        out = attention(x, x, x, causal=True)
    with communication() as backward:
        out.sum().backward()
    return dict(forward.sent), dict(backward.sent)


def test_usp_sends_half_of_the_heads_round_a_ring_of_half_the_ranks():
    U = R = 2
    P = U * R
    message = S // P * 32 * 4  # bytes of q, k, v or out on one rank
    kv = 2 * message  # after the all-to-all: twice the tokens, half the heads
    for forward, backward in run_ranks(4, sent_by_usp):
        assert forward == {"all_to_all": 4 * message // U, "send": (R - 1) * kv, "recv": 0}
        assert backward == {"all_to_all": 4 * message // U, "send": 2 * (R - 1) * kv, "recv": 0}


def saved_by_ulysses() -> int:
    q, k, v = (torch.ones(1, S // 4, 8, 4, requires_grad=True) for _ in range(3))
    with saved_activations() as saved:
        ulysses(dist.group.WORLD)(q, k, v, causal=True)
    return saved.bytes


def test_a_rank_saves_no_more_than_its_share():
    share = S // 4 * 8 * 4 * 4
    for saved in run_ranks(4, saved_by_ulysses):
        assert 4 * share <= saved <= 4 * share + S * 2 * 4 + 64, "q, k, v, out of S tokens and N/P heads, the LSE"


# ------------------------------------------------------------------------------------------------ what it costs: time


def test_the_flops_formula_and_the_published_seconds_give_the_published_tflops():
    for tokens, gpus, seconds, tflops in [
        (131072, 64, 32.432, 165.53),
        (131072, 128, 17.0525, 157.41),
        (131072, 256, 9.8867, 136.09),
    ]:
        assert step_flops(tokens, Machine()) / gpus / seconds / 1e12 == pytest.approx(tflops, rel=3e-3)


def test_the_cost_model_meets_its_two_calibrated_rows_and_predicts_the_other_three_within_9_percent():
    rows = cost_model(Machine())
    assert [(tokens, gpus, published) for tokens, gpus, published, _, _ in rows] == list(PAPER)
    deviations = [abs(deviation) for *_, deviation in rows]
    assert deviations[0] < 0.5 and deviations[2] < 0.5, "the calibrated rows"
    assert max(deviations) < 9
    predicted = {(tokens, gpus): tflops for tokens, gpus, _, tflops, _ in rows}
    assert predicted[131072, 64] > predicted[131072, 128] > predicted[131072, 256], "strong scaling loses"
    assert predicted[65536, 64] > predicted[262144, 256], "weak scaling loses too"


def test_what_a_rank_keeps_for_itself_takes_no_time():
    machine = Machine()
    assert step_seconds(65536, machine.batch, machine)["all-to-all"] == 0, "one rank has nobody to send to"
    message = 2 * 65536 * machine.hidden / 8  # bf16, 8 ranks in one node: a rank sends 7 of the 8 parts of a message
    want = 12 * machine.layers * message * 7 / 8 / machine.inside
    assert step_seconds(65536, 8 * machine.batch, machine)["all-to-all"] == pytest.approx(want)


def test_a_network_twice_as_slow_costs_time_only_where_messages_leave_the_node():
    fast, slow = Machine(), replace(Machine(), outside=Machine().outside / 2)
    inside, outside = (65536, 64), (131072, 128)  # 8 ranks of Ulysses, one node; and 16, two nodes
    assert step_seconds(*inside, fast)["all-to-all"] == step_seconds(*inside, slow)["all-to-all"]
    assert step_seconds(*outside, fast)["all-to-all"] < step_seconds(*outside, slow)["all-to-all"]
    assert step_seconds(*outside, fast)["compute"] == step_seconds(*outside, slow)["compute"]


# ------------------------------------------------------------------------------------------------------------ bad input


def errors() -> list[str]:
    x, y = torch.zeros(1, 4, 3, 4), torch.zeros(2, 4, 2, 8)
    calls = (
        lambda: ulysses(dist.group.WORLD)(x[:, :, :1], x[:, :, :1], x[:, :, :1], causal=True),
        lambda: ulysses(dist.group.WORLD)(x[:, :, :2], x[:, :2, :2], x[:, :2, :2], causal=True),
        lambda: ulysses(dist.group.WORLD)(*(x[:, :, :2].to(torch.float8_e5m2) for _ in range(3)), causal=False),
        lambda: usp(dist.group.WORLD, dist.group.WORLD)(x[:, :, :2], x[:, :2, :2], x[:, :2, :2], causal=True),
        lambda: ulysses(dist.group.WORLD)(y, y[:1], y[:1], causal=True),
        lambda: ulysses(dist.group.WORLD)(y, y[..., :4], y[..., :4], causal=True),
        lambda: usp_groups(4, 3),
        lambda: usp_groups(4, 0),
        lambda: usp_positions("striped", 6, 0, 2, 0, 2),
    )
    return [error_from(ValueError, call) for call in calls]


def test_what_ulysses_cannot_do_is_said_in_one_line():
    for heads, cross, fp8, ring, batch, dim, three, none, run in run_ranks(2, errors):
        assert "batch 2" in batch and "head dim 8" in dim
        assert "4 ranks" in three and "rows of 3" in three and "1, 2, 4" in three
        assert "rows of 0" in none and "3 tokens of a ring rank do not divide among 2" in run
        assert "1 query heads" in heads and "2 ranks" in heads and "or USP" in heads
        assert "cross attention" in cross and "causal=False" in cross
        assert "cross attention" in ring and "causal=False" in ring
        assert "float8_e5m2" in fp8
        assert all("\n" not in message for message in (heads, cross, fp8, ring, batch, dim, three, none))


# ----------------------------------------------------------------------------------------------------------- the script


def test_check_heads_takes_only_numbers_of_ranks_that_divide_the_heads():
    check_heads(6, 3)
    with pytest.raises(ValueError, match="3 query heads do not divide among 2 ranks .* use 1, 3 ranks, or USP"):
        check_heads(3, 2)


@pytest.mark.always("3-argv1", "4-argv2", "2-argv3")
@pytest.mark.parametrize(
    ("ranks", "argv"),
    [
        (4, ["--attention", "causal", "--seq", "100", "--dtype", "float32"]),  # 25 tokens on a rank cannot be halved
        (3, ["--version", "ulysses", "--attention", "full", "--heads", "6", "--kv-heads", "2", "--seq", "93"]),
        (4, ["--version", "usp", "--attention", "causal", "--heads", "6", "--kv-heads", "3", "--seq", "16"]),
        (2, ["--attention", "cross", "--seq", "16", "--ulysses-size", "1"]),
    ],
)
def test_a_length_is_refused_only_by_what_was_asked_for(ranks, argv):
    assert run_ranks(ranks, run_demo, "context_ulysses", argv) == [[]] * ranks


def test_the_cost_model_is_printed_with_its_assumptions_and_its_deviations(capsys):
    print_cost_model(Machine())
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("assumptions", "calibrated", "deviation", "165.5", "147.4", "-8.3%"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--heads", "3", "--kv-heads", "1"], ["--heads 3", "4 ranks", "use 3 or fewer ranks, or USP"]),
        (["--version", "usp", "--heads", "1", "--kv-heads", "1"], ["--heads 1", "2 ranks", "use --ulysses-size 1\n"]),
        (["--version", "usp", "--heads", "3", "--kv-heads", "1", "--ulysses-size", "4"], ["--ulysses-size 1, 2\n"]),
        (["--seq", "98"], ["--seq 98", "P = 4", "96 or 100"]),
        (["--seq", "100"], ["--seq 100", "25 tokens", "cross", "multiple of 8"]),
        (["--attention", "cross", "--seq", "100"], ["--seq 100", "25 tokens", "cross", "multiple of 8"]),
        (["--version", "usp", "--attention", "window"], ["--attention window", "ring", "--version ulysses"]),
        (["--ulysses-size", "3"], ["--ulysses-size 3", "4 ranks"]),
        (["--ulysses-size", "0"], ["--ulysses-size 0", "4 ranks"]),
        (["--version", "ulysses", "--layout", "striped"], ["--layout striped", "--version usp"]),
        (["--version", "ulysses", "--ulysses-size", "2"], ["--ulysses-size 2", "--version usp"]),
        (["--cost-model", "--seq", "96"], ["--seq", "--cost-model", "leave it out"]),
        (["--kv-heads", "3"], ["--kv-heads 3", "--heads 4"]),
        (["--version", "usp", "--ulysses-size", "1", "--seq", "100"], ["2P = 8", "zigzag", "96 or 104"]),  # by default
        (["--version", "usp", "--ulysses-size", "4", "--seq", "98"], ["--seq 98", "96 or 100"]),  # 4 heads are enough
    ],
)
def test_a_wrong_option_ends_with_one_line_that_names_it(argv, words):
    said = refusal(parse_arguments, argv, world_size=4) + "\n"
    assert all(word in said for word in words), said
