"""The planner's bytes, held against the trainer's meter: what is held and sent exactly, what is kept and the peak."""

import dataclasses
from collections import Counter
from itertools import product

import planner_paths  # noqa: F401  finds the trainer and the chapters
import plan_memory as pm
import plan_traffic
import pytest
from _plan_meter import measured
from accounting import activations
from context_ulysses import sent_per_layer
from fpdt_costs import Sizes, network_bytes
from harness.meter import bytes_on_the_wire
from harness.ranks import run_ranks
from llama import LLAMA3_8B, LLAMA3_70B, LlamaConfig
from moe_layer import MoEConfig
from options import Config, parse
from zero_memory import bytes_sent

SIZES = LlamaConfig(vocab_size=256, hidden=64, layers=4, heads=8, kv_heads=4, intermediate=192)
QWEN3 = dataclasses.replace(SIZES, own_head_dim=12, qk_norm=True, qkv_bias=True)  # and with Qwen2's biases
BASE = {"seq_len": 64, "global_batch": 16, "micro_batch": 4, "device": "cpu", "preset": "tiny"}
SP = {"sequence_parallel": True}
LAYOUTS = {
    1: [
        {},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"precision": "fp64"},
        {"micro_batch": 16},
        {"experts": 4},
        {"experts": 8, "top_k": 3},
        {"fpdt_chunks": 4},
        {"zero": 1, "precision": "bf16-master"},
    ],
    2: [
        {"zero": 1},
        {"zero": 2},
        {"zero": 3},
        {"tp": 2},
        {"tp": 2, **SP},
        {"tp": 2, "recompute": "full"},
        {"tp": 2, "recompute": "full", **SP},
        {"cp": 2, "cp_kind": "ring"},
        {"cp": 2, "cp_kind": "ulysses"},
        {"cp": 2, "cp_kind": "allgather"},
        {"cp": 2, "cp_kind": "zigzag", "recompute": "full"},
        {"pp": 2},
        {"pp": 2, "schedule": "afab"},
        {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2},
        {"pp": 2, "recompute": "full"},
        {"pp": 2, "schedule": "zb-h1"},
        {"pp": 2, "schedule": "zb-v", "stages_per_rank": 2},
        {"zero": 1, "bucket_mib": 0.1},
        {"zero": 2, "recompute": "full"},
        {"experts": 4, "ep": 2},
        {"experts": 4, "ep": 2, "zero": 2, "recompute": "full"},
        {"cp": 2, "cp_kind": "ulysses", "fpdt_chunks": 4, "zero": 1},
    ],
    4: [
        {"tp": 4, **SP},
        {"tp": 2, "zero": 2, **SP},
        {"zero": 3},
        {"zero": 2, "precision": "bf16-master"},
        {"zero": 3, "recompute": "full"},
        {"cp": 4, "cp_kind": "ulysses", "recompute": "selective"},
        {"cp": 4, "cp_kind": "ring", "recompute": "selective"},
        {"cp": 4, "cp_kind": "usp", "zero": 3},
        {"cp": 2, "cp_kind": "zigzag", "tp": 2, "zero": 1},
        {"pp": 2, "tp": 2, "zero": 1, **SP},
        {"pp": 4},
        {"pp": 2, "schedule": "dualpipe", "micro_batch": 2},
        {"pp": 2, "cp": 2, "cp_kind": "ring", "zero": 2},
        {"experts": 4, "zero": 1},
        {"experts": 4, "ep": 4, "zero": 1},
        {"experts": 4, "ep": 2, "zero": 3},
        {"experts": 4, "ep": 2, "tp": 2, "zero": 1, **SP},
        {"experts": 4, "ep": 2, "pp": 2},
        {"experts": 8, "ep": 2, "cp": 2, "cp_kind": "ring", "zero": 2},
    ],
}
WITH_QWEN3 = {
    1: [{}],
    2: [{"tp": 2}, {"cp": 2, "cp_kind": "ring"}],
    4: [{"pp": 2, "tp": 2, "zero": 1, **SP}, {"zero": 3}],
}
HELD = ("weights", "gradients", "optimizer states")


def all_of(options, sizes):
    return [measured(words, sizes) for words in options]


CASES = {"every day": {1: LAYOUTS[1][:1], 2: [{"zero": 1}, {"tp": 2, "micro_batch": 8, **SP}]}, "qwen3": WITH_QWEN3}
CASES |= {str(part): {ranks: layouts[part::22] for ranks, layouts in LAYOUTS.items()} for part in range(22)}


@pytest.mark.always("every day")
@pytest.mark.parametrize("case", CASES)
def test_bytes_held_sent_and_saved_for_backward_are_exact_and_the_peak_is_within_5_percent(case):
    model = QWEN3 if case == "qwen3" else SIZES
    for ranks, layouts in CASES[case].items():
        options = [BASE | layout for layout in layouts]
        results = run_ranks(ranks, all_of, options, model, timeout=300.0)
        for i, words in enumerate(options):
            config = Config(**words)
            layout, moe = pm.Layout.of(config, model, ranks), config.mixture(model)
            for meter in {results[rank][i]["rank"]: results[rank][i] for rank in range(ranks)}.values():
                check_layout(f"{ranks} ranks {layouts[i]}", model, layout, moe, meter)


def check_layout(name, model, layout, moe, meter):
    """Beside what the meter says of one pipeline place of a layout."""
    place = meter["rank"]
    name += f", pipeline place {place}"
    assert pm.held(model, moe, layout, place) == {what: meter[what] for what in HELD}, name
    found = plan_traffic.flows(model, moe, layout, place, p2p_reduce=True)
    sent = {what: pytest.approx(count, abs=0.5) for what, count in meter["sent"].items()}
    assert plan_traffic.by_collective(found) == sent, name
    if not layout.fpdt_chunks:  # else they are on the host, and come one by one
        stages = pm.stage_layers(layout, model.layers, place)
        for layers, want in zip(stages, meter["activations"], strict=True):
            got = sum(pm.activations(model, moe, layout, layers).values())
            assert got == want, f"{name}, {layers}"
    assert sum(pm.peak(model, moe, layout, place).values()) == pytest.approx(meter["peak"], rel=0.05), name


@pytest.mark.prove
def test_with_products_in_sixteen_bits_the_peak_is_within_5_percent_too():
    options = [BASE | {"precision": "fp16", "micro_batch": 8}, BASE | {"precision": "fp16", "recompute": "full"}]
    for words, meter in zip(options, run_ranks(1, all_of, options, SIZES)[0], strict=True):
        layout = pm.Layout.of(Config(**words), SIZES, 1)
        assert sum(pm.peak(SIZES, None, layout).values()) == pytest.approx(meter["peak"], rel=0.05), words


def test_zero_divides_what_the_paper_says_it_divides():
    """16 bytes per parameter of which stage 1 divides 12, stage 2 14, stage 3 all (1910.02054, figure 1)."""
    N, total = 64, {}
    for stage in (0, 1, 2, 3):
        layout = pm.Layout(dp=N, zero=stage, precision="bf16-master", seq_len=128)
        total[stage] = sum(pm.held(LLAMA3_8B, None, layout).values())
    psi = sum(weight.numel for weight in pm.weights_of(LLAMA3_8B, None, pm.Layout()))
    for stage, each in {0: 16, 1: 4 + 12 / N, 2: 2 + 14 / N, 3: 16 / N}.items():
        assert total[stage] == pytest.approx(each * psi, rel=1e-4)


def test_a_pipeline_of_70_billion_parameters_holds_every_weight_once():
    layout = pm.Layout(pp=8, tp=8, micro_batches=16, seq_len=8192)
    every = [weight.numel for rank in range(8) for weight in pm.weights_of(LLAMA3_70B, None, layout, rank)]
    whole = sum(weight.numel for weight in pm.weights_of(LLAMA3_70B, None, pm.Layout()))
    norms = (2 * 80 + 1) * 8192  # each tensor rank holds these whole
    assert 8 * (sum(every) - norms) + norms == whole


def test_a_tied_embedding_is_held_at_both_ends_and_its_gradient_summed_over_the_two_ranks():
    tied = dataclasses.replace(SIZES, vocab_size=255, tied=True)
    apart = dataclasses.replace(tied, tied=False)
    matrix = 128 * 64  # a tensor rank's half of the rows, of which the last may have padding
    whole, two = (sum(w.numel for w in pm.weights_of(each, None, pm.Layout(tp=2))) for each in (tied, apart))
    assert two - whole == matrix
    layout = pm.Layout(pp=4, tp=2, micro_batches=4)
    for rank in range(4):
        assert pm.held(tied, None, layout, rank) == pm.held(apart, None, layout, rank), rank
        sent = [f.wire for f in plan_traffic.flows(tied, None, layout, rank) if f.what == "tied embedding"]
        assert sent == ([4 * matrix] if rank in (0, 3) else []), rank
    v = pm.Layout(pp=2, stages_per_rank=2, schedule="zb-v", micro_batches=4)  # its first rank holds both ends
    assert not [f for rank in (0, 1) for f in plan_traffic.flows(tied, None, v, rank) if f.what == "tied embedding"]


def test_biases_and_norms_of_heads_are_held_and_the_inputs_of_these_norms_kept():
    block = 2 * 64 + 2 * 96 * 64 + 2 * 48 * 64 + 96 + 2 * 48 + 2 * 12 + 3 * 64 * 192
    assert pm.held(QWEN3, None, pm.Layout())["weights"] == 4 * (4 * block + 2 * 256 * 64 + 64)
    plain = dataclasses.replace(QWEN3, qk_norm=False)
    for precision, kernels, each in (("fp32", "torch", 8), ("bf16-master", "torch", 6), ("bf16-master", "triton", 2)):
        layout = pm.Layout(seq_len=32, precision=precision, kernels=kernels)
        more = pm.block_activations(QWEN3, None, layout) - pm.block_activations(plain, None, layout)
        assert more == 32 * ((96 + 48) * each + (8 + 4) * 4), (precision, kernels)
    few = dataclasses.replace(QWEN3, kv_heads=2)  # one of them on two tensor ranks each
    layout = pm.Layout(tp=4, micro_batches=3)
    [shares] = [flow for flow in plan_traffic.flows(few, None, layout) if flow.what == "shares of gradients"]
    assert (shares.payload, shares.times) == (4 * 4 * (2 * 2 * 12 * (64 + 1) + 2 * 12), 3)
    assert pm.block_activations(few, None, layout) == pm.block_activations(QWEN3, None, layout)


ROUND_TRIPS = [
    (4, {"tp": 2, "zero": 1}),
    (8, {"cp": 4, "cp_kind": "usp", "zero": 3, "micro_batch": 2}),
    (2, {"cp": 2, "cp_kind": "allgather", "recompute": "selective"}),
    (2, {"cp": 2, "cp_kind": "ulysses", "fpdt_chunks": 4, "zero": 1}),
    (2, {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2}),
    (4, {"ep": 2, "zero": 2, "recompute": "full"}),
]


@pytest.mark.parametrize(("ranks", "words"), ROUND_TRIPS)
def test_the_options_of_a_layout_give_the_layout_again(ranks, words):
    base = BASE | ({"experts": 4} if "ep" in words else {})
    layout = pm.Layout.of(Config(**base | words), SIZES, ranks)
    again = Config(**base | parse(layout.options().split()))
    assert pm.Layout.of(again, SIZES, ranks) == layout and layout.gather_kv == ("allgather" in words.values())
    assert pm.Layout.of(Config(**base | words | {"bucket_mib": 0.1}), SIZES, ranks).bucket_bytes == 104857


# ------------------------------------------------------------------- the same formulas as in the chapters, and by hand


def test_on_one_rank_activations_are_chapter_01s_formula():
    for mode in ("none", "selective", "full"):
        for precision, element in (("fp32", 4), ("bf16-master", 2), ("fp64", 8)):
            layout = pm.Layout(micro_batch=2, seq_len=32, recompute=mode, precision=precision)
            want = activations(SIZES, 2, 32, element, "fused", mode)
            got = sum(pm.activations(SIZES, None, layout, range(SIZES.layers)).values())
            assert got == sum(want.values()) - want["tokens, labels (int64)"], (mode, precision)
            assert sum(pm.held(SIZES, None, layout).values()) == 229952 * max(16, 4 * element), (mode, precision)
    half, bf16 = (pm.Layout(micro_batch=2, seq_len=32, precision=each) for each in ("fp16", "bf16-master"))
    some, less = (sum(pm.activations(SIZES, None, each, range(4)).values()) for each in (half, bf16))
    assert (some - less, pm.peak(SIZES, None, half)["weights in 16 bits"]) == (9 * 64 * 64 * 6, 2 * 229952)
    for words, want in (({}, 2 * 64 + 4 * 256), ({"pp": 2}, 2 * 256 + 8), ({"tp": 2}, 4 * 128 + 9)):  # of 64 tokens
        at = dataclasses.replace(bf16, kernels="triton", **words)
        assert pm.around(SIZES, at, False, True)["log-probabilities"] == 64 * want, words
    for words, want in (({}, [131072, 114688, 32768, 0]), ({"tp": 2, "ring": 2, **SP}, [61440, 36864, 36864, 16384])):
        work = pm.working_set(SIZES, None, pm.Layout(micro_batch=2, seq_len=32, **words))
        assert [*work.values()] == want, words
    several = pm.Layout(ring=2, micro_batch=2, micro_batches=3, seq_len=32)
    assert pm.peak(SIZES, None, several)["tokens and labels"] == 3 * 2 * 32 * 8


def test_ulysses_keeps_the_output_twice_and_a_ring_does_not():
    base = {"micro_batch": 2, "seq_len": 32}
    ring, swap = (
        pm.block_activations(SIZES, None, pm.Layout(**base, **axis)) for axis in ({"ring": 2}, {"ulysses": 2})
    )
    assert swap - ring == 2 * 16 * SIZES.hidden * 4


def test_ranks_of_ulysses_are_counted_with_the_kv_heads_that_they_need():
    few = dataclasses.replace(SIZES, hidden=96, heads=12, kv_heads=4)  # on 6 ranks 1, 2, 1, 1, 2, 1 of the K/V heads
    layout = pm.Layout(ulysses=6, micro_batch=2, seq_len=48)
    each = [2 * sent_per_layer("ulysses", 48, 96, 6, 12, 4, rank) * 2 * 4 for rank in range(6)]  # 2 samples, fp32
    got = sum(flow.wire for flow in plan_traffic.flows(few, None, layout) if flow.axis == "ulysses")
    assert got == pytest.approx(few.layers * sum(each) / 6, rel=1e-12)
    for recompute, times in (("none", 6), ("selective", 8), ("full", 9)):  # q, and as much of k and v; out
        again = pm.Layout(ulysses=2, tp=2, micro_batch=2, seq_len=32, recompute=recompute)
        got = sum(flow.wire for flow in plan_traffic.flows(SIZES, None, again) if flow.axis == "ulysses")
        assert got == pytest.approx(times * 4 * 32 * 32 * 4 / 2), recompute
    whole = pm.block_activations(few, None, pm.Layout(ulysses=4, micro_batch=2, seq_len=32))  # 1 each, T as before
    assert pm.block_activations(few, None, layout) - whole == 2 * layout.tokens * (6 * 2 - 4) * 8 * 4


def test_buckets_close_as_soon_as_they_are_full_from_the_last_weight_backwards():
    weights = [pm.Weight(numel, 0) for numel in (7, 3, 2, 4, 1)]
    assert pm.size_buckets(weights, 5 * 4, 4) == [5, 5, 7]
    assert pm.size_buckets(weights, 10**9, 4) == [17]


def test_experts_are_shared_out_and_routers_and_the_rest_are_not():
    moe = MoEConfig(hidden=64, intermediate=192, experts=8, top_k=2)
    whole, shared = (pm.held(SIZES, moe, pm.Layout(dp=4, ep=ep))["weights"] for ep in (1, 4))
    experts = SIZES.layers * 3 * 8 * 64 * 192 * 4
    assert whole - shared == experts * 3 // 4
    found = plan_traffic.flows(SIZES, moe, pm.Layout(dp=4, ep=2, zero=1))
    assert sum(flow.wire for flow in found if flow.axis == "experts") == experts // 2, "there and back, of two ranks"


def test_rows_of_experts_go_there_and_back_and_twice_more_when_a_block_is_recomputed():
    moe = MoEConfig(hidden=64, intermediate=192, experts=8, top_k=2)
    for recompute, times in (("none", 4), ("selective", 4), ("full", 6)):
        layout = pm.Layout(dp=4, ep=4, micro_batch=2, seq_len=32, recompute=recompute)
        got = sum(f.wire for f in plan_traffic.flows(SIZES, moe, layout) if f.what == "rows of experts")
        assert got == times * SIZES.layers * 2 * 64 * 64 * 4 * 3 / 4, recompute
    found = plan_traffic.flows(SIZES, dataclasses.replace(moe, balance=1.0), pm.Layout(dp=2, ring=2, tp=2, ep=2))
    assert [(f.ranks, f.times * f.payload) for f in found if "counts" in f.what] == [(4, 256), (2, 4 * 80), (4, 256)]


def test_what_a_recomputed_mixture_of_experts_keeps_is_its_input_and_where_its_tokens_went():
    moe = MoEConfig(hidden=64, intermediate=192, experts=8, top_k=2)
    layout = pm.Layout(micro_batch=4, tp=2, seq_len=32, recompute="full", **SP)  # 64 tokens between the regions
    assert pm.block_activations(SIZES, moe, layout) == 64 * 64 * 4 + 3 * 2 * 64 * 8 + 8 * 8 + 8
    fused = dataclasses.replace(layout, precision="bf16-master", kernels="triton")
    assert pm.expert_activations(SIZES, moe, fused) == 64 * 19 * 4 + 4 * 128 * 8 + 52 + 128 * 832 * 2 + 64 * 64 * 2


def test_with_fpdt_twice_the_tokens_in_twice_the_chunks_add_nothing_but_two_rows_of_hidden_states():
    short, long = (
        pm.fpdt_working_set(LLAMA3_8B, pm.Layout(ulysses=4, seq_len=n * 2**17, fpdt_chunks=n)) for n in (8, 16)
    )
    assert short["block"]["working set"] == long["block"]["working set"]
    T = 8 * 2**17 // 4
    assert long["block"]["residual stream"] - short["block"]["residual stream"] == 2 * T * 4096 * 4


def test_with_fpdt_heads_travel_three_times_whatever_the_number_of_chunks():
    for chunks in (2, 4):
        layout = pm.Layout(ulysses=4, seq_len=256, fpdt_chunks=chunks, micro_batch=2, micro_batches=3)
        got = sum(flow.wire for flow in plan_traffic.flows(SIZES, None, layout) if flow.axis == "ulysses")
        assert got == pytest.approx(3 * 3 * SIZES.layers * 2 * network_bytes(Sizes(256, 4, chunks, 8, 4, 8, 4)))
        one = dataclasses.replace(layout, micro_batch=1)
        assert pm.fpdt_host(SIZES, layout) == 2 * pm.fpdt_host(SIZES, one), "two sequences are on the host at once"
    narrow = dataclasses.replace(SIZES, intermediate=8)  # in four chunks; its peak is in attention, and not in the MLP
    sets = [pm.fpdt_working_set(each, layout)["block"]["working set"] for each in (SIZES, narrow)]
    assert sets == [2 * 84000 + 64 * 192 * 4, 2 * (56576 + 4096)], "of two sequences"


def test_a_long_pipelines_memory_is_that_of_its_first_and_last_rounds():
    sizes = dataclasses.replace(SIZES, layers=8)
    for schedule, v in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
        layout = pm.Layout(pp=4, micro_batches=32, schedule=schedule, stages_per_rank=v, seq_len=64)
        few = pm.steady(layout)
        assert few.micro_batches == 16
        for rank in (0, 3):
            long, short = (
                max(sum(each[0].values()) + each[1] for each in pm.climbs(sizes, None, which, rank))
                for which in (dataclasses.replace(layout, micro_batches=20), few)
            )
            assert long == short, (schedule, rank)
    assert pm.steady(pm.Layout(pp=4, micro_batches=32, schedule="afab")).micro_batches == 32


def test_padding_is_held_by_every_rank_that_holds_a_shard():
    owner = pm.Buckets(4, 2, (10, 3))
    assert owner.shards == [3, 1] and owner.padded == 16


HEADS_OF_32 = LlamaConfig(vocab_size=256, hidden=64, layers=1, heads=2, kv_heads=1, intermediate=96)
INTERPRETED = {"seq_len": 16, "global_batch": 1, "micro_batch": 1, "device": "cpu", "preset": "tiny"}


@pytest.mark.prove  # Triton's interpreter is slow; test_rehearse.py has the peak of larger models with the same kernels
@pytest.mark.parametrize(("ranks", "words"), [(1, {}), (2, {"cp": 2, "cp_kind": "zigzag"})])
def test_with_fused_kernels_a_step_in_tritons_interpreter_keeps_what_was_planned(ranks, words):
    options = INTERPRETED | words | {"kernels": "triton"}
    layout = pm.Layout.of(Config(**options), HEADS_OF_32, ranks)
    planned = sum(pm.activations(HEADS_OF_32, None, layout, range(1)).values())
    eager = dataclasses.replace(layout, kernels="torch")
    copied = 3 * HEADS_OF_32.hidden * 4 + layout.tokens * 8  # the interpreter copies the norms' weights and the labels
    for meter in run_ranks(ranks, measured, options, HEADS_OF_32, timeout=300.0):
        assert meter["activations"][0] == planned + copied, words
    block = [pm.block_activations(HEADS_OF_32, None, each) for each in (eager, layout)]
    assert block[0] > 1.2 * block[1]  # the loss keeps two gradients, which are most in so small a model


def test_tensor_parallel_sends_what_chapter_04_says():
    t, layers = 4, SIZES.layers
    mixture = MoEConfig(hidden=64, intermediate=192, experts=8, top_k=2)  # then only attention is shared
    for split, recompute, moe in product((False, True), ("none", "full"), (None, mixture)):
        layout = pm.Layout(tp=t, sequence_parallel=split, micro_batch=2, seq_len=32, recompute=recompute)
        n = layout.tokens * SIZES.hidden * 4
        again = recompute == "full"  # all inputs, and the sum after attention
        block = 4 + split + 2 * again if moe else 8 + 2 * split + (2 + split) * again
        want = (block * layers + 4 + split) * n * (t - 1) / t + 2 * 3 * layout.tokens * 4 * (t - 1) / t
        what = ("products", "embedding", "output", "softmax")
        got = sum(f.wire for f in plan_traffic.flows(SIZES, moe, layout) if any(word in f.what for word in what))
        assert got == pytest.approx(want), (split, recompute, moe)
    split = (pm.Layout(tp=t, tp_overlap=each, **SP) for each in ("none", "domino"))
    found = [flow for each in split for flow in plan_traffic.flows(SIZES, None, each) if flow.what == "into products"]
    assert [flow.times for flow in found] == [6 * layers, 4 * layers], "domino keeps the inputs"


def test_zero_sends_what_chapter_03_says_and_stage_3_keeps_the_root_and_the_last_layer():
    for stage, by_sends in product((0, 1, 2, 3), (False, True)):
        layout = pm.Layout(dp=4, zero=stage, precision="fp16", micro_batches=3, seq_len=32)
        weights = pm.weights_of(SIZES, None, layout)
        total = 4 * sum(weight.numel for weight in weights)
        block = 4 * sum(weight.numel for weight in weights if weight.layer == 0)
        kept = total - SIZES.layers * block + block
        what = ("gradients", "weights", "new weights")
        found = plan_traffic.flows(SIZES, None, layout, p2p_reduce=by_sends)
        got = sum(flow.wire for flow in found if flow.what in what)
        assert got == bytes_sent(stage, 4, total, kept, 3 if stage >= 2 else 1), (stage, by_sends)
    deep = pm.Layout(dp=4, pp=2, zero=2, micro_batches=3, seq_len=32)
    mine = 4 * sum(weight.numel for weight in pm.weights_of(SIZES, None, deep))
    got = sum(flow.wire for flow in plan_traffic.flows(SIZES, None, deep) if flow.what in what)
    assert got == 2 * mine * 3 / 4, "a pipeline reduces once, whatever the number of micro-batches"


def test_a_ring_sends_kv_once_forward_and_with_its_gradient_backward():
    for gather, recompute, (precision, e), axes in product(
        (False, True), ("none", "selective"), (("fp32", 4), ("bf16-master", 2)), ({}, {"tp": 2, "ulysses": 2})
    ):
        layout = pm.Layout(
            ring=4, micro_batch=2, seq_len=32, gather_kv=gather, recompute=recompute, precision=precision, **axes
        )
        kv = 2 * layout.tokens * SIZES.kv_heads // layout.tp * SIZES.head_dim
        got = sum(flow.wire for flow in plan_traffic.flows(SIZES, None, layout) if flow.axis == "ring")
        times = 2 + (recompute == "selective")
        assert got == pytest.approx(SIZES.layers * 3 * kv * (times * e + 4)), layout  # gradients are summed in fp32


def test_a_pipeline_sends_every_micro_batch_on_and_to_tensor_ranks_once_more_for_its_w():
    for schedule, rank in product(("1f1b", "zb-h1"), (0, 1)):
        layout = pm.Layout(pp=2, tp=2, schedule=schedule, micro_batches=4, seq_len=64, **SP)
        n = layout.tokens * SIZES.hidden * 4
        sent: Counter[str] = Counter()
        for flow in plan_traffic.flows(SIZES, None, layout, rank):
            sent[flow.what] += flow.wire
        products = 2 * 2 + rank  # two that are cut by columns in a layer, and the output layer
        assert sent["between stages"] == 4 * n / 2
        assert sent["once more for W"] == (4 * products * 2 * n / 2 if schedule == "zb-h1" else 0)
        assert sent["shares of gradients"] == 4 * (2 * 2 + rank) * 64, "once, whatever the number of micro-batches"


def test_the_ring_formulas_of_collectives_are_those_of_the_meter():
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        own = 30 if collective == "all_to_all" else 0
        want = bytes_on_the_wire(collective, 120, 4, own=own)
        assert plan_traffic.Flow(collective, "data", 120, 4).wire == want, collective
