"""The rehearsal held against ranks that really run, and against mistakes that it has to find and name."""

import dataclasses
import gc
import json
import re
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import planner_paths  # noqa: F401  finds the trainer and the chapters
import context_ring
import gradient_reducers
import mesh as mesh_module
import parallel_linear
import pipeline_executor
import plan_memory
import pytest
import rehearse as rehearse_module
import rehearse_rank
import step as step_module
import torch
import torch.distributed as dist
from _plan_meter import even_load, held, made
from harness.meter import communication, peak_memory
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from llama import LLAMA3_70B, LlamaConfig
from options import Config, UsageError
from plan_memory import Layout
from plan_time import Cluster, read_cluster, width_of
from plan_traffic import by_collective, flows
from rehearse import main, rehearse, report, twins
from rehearse_match import Finding, check_twins, differ, few, match, nth
from rehearse_rank import Op, Recorded
from rehearse_time import Slice, on_the_clock, tracks, write_trace
from split_backward import python_nodes_own_their_graph

SIZES = LlamaConfig(vocab_size=256, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48)
BASE = {"seq_len": 16, "global_batch": 8, "micro_batch": 2, "device": "cpu", "preset": "tiny", "kernels": "torch"}
EVEN = dataclasses.replace(SIZES, vocab_size=2, hidden=64, intermediate=256, layers=4)  # next to nothing at the ends
SP = {"sequence_parallel": True}


def config(**words):
    return Config(**BASE | words)


# ------------------------------------------------------------------------------------- beside the planner, as on GPUs

# Sizes whose heads FlashAttention takes; `auto` is the trainer's default, and means chapter 09's kernels on a GPU.
WIDE = LlamaConfig(vocab_size=2048, hidden=256, layers=8, heads=8, kv_heads=4, intermediate=768)
FUSED = {"seq_len": 512, "global_batch": 16, "micro_batch": 2, "precision": "bf16-master", "zero": 1, "kernels": "auto"}
AS_PLANNED = [
    (1, {}, 1e-4),
    (2, {"recompute": "full", "micro_batch": 8}, 1e-3),
    (2, {"zero": 3, "recompute": "selective"}, 1e-4),
    (4, {"tp": 2, "cp": 2, "cp_kind": "zigzag", "zero": 3, **SP}, 1e-3),
    (2, {"experts": 4, "ep": 2}, 1e-3),
    (2, {"pp": 2, "zero": 2}, 0.02),  # messages: in small models they weigh more
    (4, {"pp": 2, "tp": 2, "schedule": "zb-v", "stages_per_rank": 2, "zero": 2, "micro_batch": 1, **SP}, 0.015),
    (4, {"pp": 2, "cp": 2, "cp_kind": "zigzag", "schedule": "zb-v", "stages_per_rank": 2, "zero": 2, "micro_batch": 1,
         "seq_len": 1024, "experts": 4, "ep": 2}, 0.01),
    (2, {"pp": 2, "schedule": "zb-h1", "zero": 1, "micro_batch": 1, "recompute": "full"}, 0.01),
    (4, {"pp": 2, "schedule": "zb-h1", "zero": 2, "micro_batch": 1, "experts": 4, "ep": 2}, 0.01),
]  # fmt: skip


@pytest.mark.always("2-words5-0.02")
@pytest.mark.parametrize(("ranks", "words", "near"), AS_PLANNED)
@pytest.mark.skipif(not step_module.has_triton(), reason="needs Triton, which is not installed")
def test_with_fused_kernels_the_planners_peak_is_the_rehearsed_one(ranks, words, near):
    options = Config(**{"preset": "tiny"} | FUSED | words)
    done = rehearse(options, WIDE, ranks)
    layout, moe = Layout.of(options, WIDE, ranks), options.mixture(WIDE)
    assert done.finding is None and layout.kernels == "triton"
    if "zb" in options.schedule and not python_nodes_own_their_graph():  # in torch 2.11 W holds a block's graph to its
        near += 0.01  # end, and not only what it has still to do
    for run in done.runs.values():
        kept = plan_memory.held(WIDE, moe, layout, run.place["pp"])
        assert kept == {what: run.bytes[what] for what in kept}
        got, want = sum(plan_memory.peak(WIDE, moe, layout, run.place["pp"]).values()), sum(run.bytes.values())
        sent = by_collective(flows(WIDE, moe, layout, run.place["pp"]))
        assert run.sent() == pytest.approx(sent, rel=1e-9), f"{words}, stage {run.place['pp']}"
        assert abs(got / want - 1) <= near, f"{words}, stage {run.place['pp']}: {got:,} planned, {want:,} rehearsed"


def test_a_product_on_the_clock_takes_what_the_planner_says_of_its_three_sides():
    cluster = read_cluster("h100-400g")
    a, b = (torch.empty(shape, device="meta") for shape in ((8192, 4096), (4096, 512)))
    seconds = cluster.product(2 * 8192 * 4096 * 512, width_of([(8192, 4096, 512)]))
    one, many = ((torch.ops.aten.mm, (a, b), 1), (torch.ops.aten.bmm, (a.expand(3, -1, -1), b.expand(3, -1, -1)), 3))
    for operator, given, times in (one, many):
        assert rehearse_rank.seconds_of(operator.default, given, None, cluster) == pytest.approx(times * seconds)
    q, k = (torch.empty(2, heads, tokens, 64, device="meta") for heads, tokens in ((4, 16), (2, 48)))
    for name, given, products in (("", (q, k, k), 2), ("_backward", (q, q, k, k), 5)):
        flash = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{name}").default
        core = cluster.core(products * 2 * 4 * 16 * 48 * 64, 64)  # half of the pairs
        assert rehearse_rank.seconds_of(flash, given, None, cluster) == pytest.approx(core)


@pytest.mark.prove
@pytest.mark.skipif(not step_module.has_triton(), reason="needs Triton, which is not installed")
def test_with_fused_kernels_less_is_kept_and_the_clock_counts_their_flops():
    cluster = read_cluster("h100-400g")
    plain, fused = (
        rehearse(Config(**{"preset": "tiny"} | FUSED | {"kernels": each}), WIDE, 1, cluster=cluster)
        for each in ("torch", "triton")
    )
    (a,), (b,) = plain.runs.values(), fused.runs.values()
    assert b.bytes["activations and buffers"] < 0.8 * a.bytes["activations and buffers"]
    assert a.sent() == b.sent() and 0 < fused.timeline.seconds < plain.timeline.seconds
    slow = dataclasses.replace(cluster, attention=1e-3 * cluster.attention)  # the core of attention, a thousand times
    assert on_the_clock(fused.runs, lambda rank: rank, "nccl", slow).seconds == pytest.approx(fused.timeline.seconds)
    (c,) = rehearse(Config(**{"preset": "tiny"} | FUSED), WIDE, 1, cluster=slow).runs.values()
    pairs = 16 * 512 * 512 / 2  # of query and key, in 16 samples
    core = (2 + 5) * 2 * 8 * pairs * WIDE.hidden  # products of forward and of backward in 8 layers
    more = slow.core(core, WIDE.head_dim) - cluster.core(core, WIDE.head_dim)
    assert sum(c.busy) - sum(b.busy) == pytest.approx(more, rel=1e-6)


def test_the_clock_counts_half_of_the_pairs_under_a_mask_and_all_without():
    cluster = read_cluster("h100-400g")
    q, k = (torch.empty(2, tokens, 4, 64, device="meta") for tokens in (16, 48))
    for last, pairs in ((0, 16 * 48 / 2), (48, 16 * 48)):  # of a ring, a block of earlier tokens has no mask
        seconds = rehearse_rank.seconds_of_kernel("forward_kernel", ((q,), (k,), last, 1.0), cluster)
        assert seconds == cluster.core(2 * 2 * 2 * 4 * pairs * 64, 64)
    q, k = (torch.empty(2, tokens, 4, 64, device="meta") for tokens in (16, 16))
    for kernel, dq, products in (("dq_kernel", None, 3), ("dkdv_kernel", None, 4), ("dkdv_kernel", (q,), 5)):
        given = ((q,), (k,), *[None] * 6, dq, 0, 1.0)
        seconds = rehearse_rank.seconds_of_kernel(kernel, given, cluster)
        assert seconds == cluster.core(2 * products * 2 * 4 * 16 * 16 / 2 * 64, 64), (kernel, dq)
    assert rehearse_rank.seconds_of_kernel("norm", ((q, 16), k, 3), cluster) == cluster.elementwise(2 * q.nbytes)


def test_an_operator_on_the_clock_takes_the_bytes_that_it_reads_and_writes_and_a_view_none():
    x = torch.empty(8, 4, device="meta")  # 128 bytes
    aten = torch.ops.aten
    for operator, given, moved in (
        (aten.add.Tensor, (x, x), 3), (aten.add_.Tensor, (x, x), 2), (aten.cat.default, ([x, x],), 4),
        (aten.view.default, (x, [32]), 0), (aten.sort.default, (x,), 4),  # whose places are int64
    ):  # fmt: skip
        out = operator(*given)
        rehearse_rank.FRESH[operator] = rehearse_rank.returns_new_tensors(operator)
        assert rehearse_rank.seconds_of(operator, given, out, cluster()) == pytest.approx(128 * moved), operator
    assert len({rehearse_rank.described((value,)) for value in (1, 1.0, True)}) == 3


def test_what_a_rank_sends_of_a_broadcast_and_of_an_all_to_all_depends_on_its_place():
    line = dataclasses.replace(op("broadcast", (4, 5, 6, 7)), detail="root 1")
    assert [rehearse_rank.wire(line, rank) for rank in (4, 5, 6, 7)] == [0, 16, 16, 16]
    uneven = op("all_to_all", (4, 5), splits=([1, 3], [2, 2]))
    assert [rehearse_rank.wire(uneven, rank) for rank in (4, 5)] == [12, 4]
    others = [rehearse_rank.wire(op(name, (4, 5), peer=1), 4) for name in ("send", "recv", "barrier")]
    assert others == [16, 0, 0] and rehearse_rank.wire(op("all_reduce", (0, 1, 2, 3)), 0) == 24
    six, four = (torch.empty(rows, 2, device="meta") for rows in (6, 4))
    cut = {"input": six, "output": four, "input_split_sizes": [2, 4], "output_split_sizes": [1, 3]}
    assert rehearse_rank.splits_of(cut, 2) == ([4, 8], [2, 6])
    assert rehearse_rank.splits_of({"input": six, "output": six[:0]}, 2) == ([6, 6], [0, 0])


# ----------------------------------------------------------------------------------------- beside ranks that really run

REAL = [
    (1, {"recompute": "full"}),
    (1, {"experts": 4, "micro_batch": 4}),
    (2, {"zero": 2}),
    (2, {"zero": 3}),
    (2, {"tp": 2, **SP}),
    (2, {"cp": 2, "cp_kind": "zigzag"}),
    (2, {"cp": 2, "cp_kind": "ulysses", "recompute": "selective"}),
    (2, {"pp": 2, "schedule": "zb-h1"}),
    (2, {"experts": 4, "ep": 2}),
    (4, {"zero": 2, "precision": "bf16-master"}),
    (4, {"pp": 2, "tp": 2, "zero": 1, **SP}),
    (4, {"pp": 2, "schedule": "dualpipe", "micro_batch": 1}),
]


def test_options_that_change_the_model_are_rehearsed_and_not_forgotten():
    args, rest = rehearse_module.arguments(
        ["--model", "tiny", "--ranks", "2", "--layers", "1", "--hidden", "64", "--tied", "--vocab-size", "512"]
    )
    _, sizes = rehearse_module.config_of(args, rest)
    assert (sizes.layers, sizes.hidden, sizes.tied, sizes.vocab_size) == (1, 64, True, 512)
    refused = {"--heads 3": "--heads 3: ", "--config my/config.json": "--config: --model decides"}
    refused["--plan --seq-len 24 --tokens 100"] = "--tokens 100 is no multiple of --seq-len 24; use 96"
    refused["--plan --tp 2"] = "--tp: with --plan the planner decides the layout; leave one of them out"
    refused["--plan --seq-len 240 --tokens 100"] = "--tokens 100 is no multiple of --seq-len 240; use 240"
    for words, says in refused.items():
        with pytest.raises(UsageError, match=f"^{says}"):
            rehearse_module.config_of(*rehearse_module.arguments(["--model", "tiny", "--ranks", "2", *words.split()]))
    planned = ["--plan", "--experts", "4", "--cluster", "v100-dgx2", "--seq-len", "128", "--tokens", "8192"]
    planned += ["--kernels", "torch"]
    with patch.object(rehearse_module, "search", side_effect=UsageError("asked")) as search:
        assert error_from(UsageError, rehearse_module.config_of, *rehearse_module.arguments(planned)) == "asked"
    assert (search.call_args[0][0].moe.experts, search.call_args[0][0].precision) == (4, "fp16")
    asked = search.call_args[0][0]
    assert (asked.gpus, asked.global_batch, asked.seq_len, asked.kernels) == (8, 64, 128, "torch")
    with patch.object(rehearse_module, "search") as search:
        search.return_value.best[0].layout.options.return_value = "--zero 2"
        chosen, _ = rehearse_module.config_of(*rehearse_module.arguments(["--plan", "--precision", "fp32"]))
    assert (chosen.seq_len, chosen.zero, search.call_args[0][0].precision) == (8192, 2, "fp32")
    assert rehearse_rank.check(config(kernels="auto"), SIZES, 1, "gloo").kernels == "torch"
    assert rehearse_rank.check(config(kernels="auto", precision="fp64"), SIZES, 1).kernels == "torch"


def really(words):
    """(events of a step, bytes sent, bytes held, peak of a step) of this rank, on gloo, by the harness's meter."""
    with even_load():
        me, batches = made(words, SIZES)
        step_module.train_step(me, batches)  # makes the optimizer's states
        with communication() as sent:
            step_module.train_step(me, batches)
        peaks = []
        for _ in range(5):  # gloo may hold a message a moment longer, which only adds: the least is the trainer's own
            step_module.zero_grad(me)
            gc.collect()
            with peak_memory() as memory:
                step_module.train_step(me, batches)
            peaks.append(memory.peak)
    return sent.events, {name: count for name, count in sent.sent.items() if count}, held(me), min(peaks)


def compared(ranks, words):
    """What ranks measure that really run, and the rehearsal, in which everything is the same."""
    measured = run_ranks(ranks, really, BASE | words, timeout=200.0)
    done = rehearse(config(**words), SIZES, ranks, backend="gloo", all_ranks=True)
    assert done.finding is None, done.finding
    for rank, (events, sent, kept, peak) in enumerate(measured):
        run = done.runs[rank]
        mine = [(op.name, op.bytes, len(op.group[1])) for op in run.ops[run.step_from :]]
        for k, (a, b) in enumerate(zip(mine, events, strict=False)):
            assert a == b, f"rank {rank}, collective {k} of the step: rehearsed {a}, the meter saw {b}"
        assert len(mine) == len(events), f"rank {rank}: {len(mine)} collectives rehearsed, {len(events)} seen"
        assert dict(run.sent()) == sent, f"rank {rank}"
        bytes_ = dict(run.bytes)
        assert bytes_.pop("activations and buffers") == peak, f"rank {rank}: the peak of a step"
        assert bytes_ == kept, f"rank {rank}"
    return measured, done


@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "words"), REAL)
def test_collectives_and_bytes_are_those_of_ranks_that_really_run(ranks, words):
    compared(ranks, words)


# ---------------------------------------------------------------------------------------------- mistakes that are found


def leave_out(call, when):
    """`call`, but not the time that is numbered `when`."""
    count = iter(range(10**6))

    def wrapped(x, *rest, **more):
        return x.clone() if next(count) == when else call(x, *rest, **more)

    return wrapped


def with_group(name, other):
    plain = mesh_module.make_mesh

    def make(*given, **more):
        mesh = plain(*given, **more)
        return dataclasses.replace(mesh, groups=mesh.groups | {name: mesh.groups[other]})

    return make


def first_receive(self, tensor):
    received = torch.empty_like(tensor)
    dist.irecv(received, group=self.group, group_src=(self.rank - 1) % self.size).wait()
    return [dist.isend(tensor, group=self.group, group_dst=(self.rank + 1) % self.size)], tensor, received


def backwards(self, tensor):
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank - 1) % self.size)
    receive = dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank + 1) % self.size)
    return dist.batch_isend_irecv([send, receive]), tensor, received


def send_first(tensor, peer, group):
    theirs = torch.empty_like(tensor)
    works = [dist.isend(tensor, group=group, group_dst=peer), dist.irecv(theirs, group=group, group_src=peer)]
    for work in works:
        work.wait()
    return theirs


def one_sum_more(owners, model, mesh, *given):
    dist.all_reduce(torch.zeros(1, device="meta"), group=mesh.groups["data"], async_op=True)
    return PLAIN_CLIP(owners, model, mesh, *given)


PLAIN_CLIP, PLAIN_BUILD, PLAIN_OWNERS = step_module.clip_gradients, step_module.build, step_module.make_owners
PLAIN_CUT, PLAIN_MEMBERS, PLAIN_BROADCAST = gradient_reducers.cut_into_buckets, mesh_module.members, dist.broadcast
PLAIN_PASS, PLAIN_COUNT, PLAIN_P2POP = step_module.forward_and_backward, Config.accumulation, dist.P2POp
ONE, LAST, ALL = {1}, {3}, {0, 1, 2, 3}


def narrower(operation, tensor, **more):
    """A message of half the width, where a stage hands on what it computed."""
    half = operation is dist.isend and tensor.dim() > 1
    return PLAIN_P2POP(operation, tensor.bfloat16() if half else tensor, **more)


# what: ranks, layout, backend, (ranks that do it, where, what, by what), kind of finding, words that it must have
PLANTED = {
    "a rank skips a sum": (
        2, {"tp": 2}, "nccl",
        (ONE, parallel_linear, "all_reduce", lambda: leave_out(parallel_linear.all_reduce, 2)),
        ("mismatch", "deadlock"), r"parallel_linear\.py:\d+ in all_reduce",
    ),
    "a rank leaves out the last sum": (
        2, {}, "nccl", (ONE, step_module, "clip_gradients", lambda: lambda *_: 1.0),
        ("deadlock",), r"rank 0 waits in all_reduce.*gradients\.py:\d+ in clip_gradients.*rank 1 has ended without it",
    ),
    "buckets leave in another order": (
        2, {"bucket_mib": 0.01}, "nccl",
        (ONE, gradient_reducers, "cut_into_buckets", lambda: lambda *given: PLAIN_CUT(*given)[::-1]),
        ("mismatch", "deadlock"), r"gradient_reducers\.py:\d+ in (launch|finish)",
    ),
    "another group": (
        4, {"tp": 2}, "nccl", (LAST, step_module, "make_mesh", lambda: with_group("replica", "world")),
        ("deadlock",), r"a circle of.*rank 3 waits in all_reduce.*in (world|replica)",
    ),
    "another dtype": (
        2, {}, "nccl",
        (ONE, step_module, "forward_and_backward", lambda: lambda *given: PLAIN_PASS(*given).float()),
        ("mismatch",), r"dtypes differ.*1 x float64.*gradient_step.*1 x float32.*gradient_step",
    ),
    "one micro-batch more": (
        2, {"tp": 2}, "nccl", (ONE, Config, "accumulation", lambda: lambda me, dp: PLAIN_COUNT(me, dp) + 1),
        ("deadlock",), r"a circle of 2.*clip_gradients.*all_reduce.*parallel_linear\.py:\d+ in all_reduce",
    ),
    "one micro-batch more in a pipeline": (
        2, {"pp": 2}, "nccl", (ONE, Config, "accumulation", lambda: lambda me, dp: PLAIN_COUNT(me, dp) + 1),
        ("deadlock",), r"rank 1 waits in recv.*pipeline_executor\.py:\d+.*for rank 0",
    ),
    "every rank receives before it sends": (
        4, {"cp": 4, "cp_kind": "ring"}, "gloo", (ALL, context_ring.Ring, "post", lambda: first_receive),
        ("deadlock",), r"a circle of 4 rank\(s\).*rank 0 waits in recv.*from rank 3",
    ),
    "a rank sends the other way round": (
        4, {"cp": 4, "cp_kind": "ring"}, "nccl", (LAST, context_ring.Ring, "post", lambda: backwards),
        ("deadlock",), r"rank \d waits in (recv|send).*context_ring\.py",
    ),
    "groups are made in another order": (
        2, {"tp": 2}, "nccl",
        (ONE, mesh_module, "members", lambda: lambda *given: dict(reversed(PLAIN_MEMBERS(*given).items()))),
        ("groups",), r"group that is made is not the same.*mesh\.py:\d+ in make_mesh",
    ),
    "rows that no expert expects": (
        2, {"experts": 4, "ep": 2}, "nccl",
        (ONE, rehearse_rank, "in_turn", lambda: lambda tokens, top_k, experts: torch.zeros(tokens, top_k).long()),
        ("mismatch",), r"sent for.*all_to_all.*expert_dispatch\.py:\d+ in exchange_rows",
    ),
    "buckets of another size": (
        2, {"zero": 1}, "nccl",
        (ONE, step_module, "make_owners",
         lambda: lambda config, *given: PLAIN_OWNERS(dataclasses.replace(config, bucket_mib=0.01), *given)),
        ("mismatch",), r"sizes differ.*broadcast.*zero_stages\.py:\d+ in flatten",
    ),
    "one rank recomputes": (
        2, {"tp": 2}, "nccl",
        (ONE, step_module, "build",
         lambda: lambda config, *given: PLAIN_BUILD(dataclasses.replace(config, recompute="full"), *given)),
        ("mismatch", "deadlock"), r"parted at the.*parallel_linear\.py",
    ),
    "both send first to each other": (
        2, {"pp": 2}, "nccl", (ONE, pipeline_executor, "exchange", lambda: send_first),
        ("deadlock",), r"on nccl.*pipeline_executor\.py:\d+ in exchange",
    ),
    "a narrower message": (
        2, {"pp": 2}, "nccl",
        ({0}, dist, "P2POp", lambda: narrower),
        ("mismatch",), r"not what is received.*send of [\d,]+ x bfloat16.*recv of [\d,]+ x float32",
    ),
    "another root": (
        2, {}, "nccl",
        (ONE, dist, "broadcast", lambda: lambda x, **m: PLAIN_BROADCAST(x, **m | {"group_src": 1})),
        ("mismatch",), r"broadcast \(root 0\).*broadcast \(root 1\)",
    ),
    "a sum without a wait": (
        2, {}, "nccl", (ONE, step_module, "clip_gradients", lambda: one_sum_more),
        ("left over",), r"rank 1 all_reduce \(sum\) of 1 x float32 in data.*rank 0 never calls it; its last",
    ),
}  # fmt: skip


def with_planted(what):
    ranks, words, backend, (who, where, name, by), *_ = PLANTED[what]

    def before(rank):
        stack = ExitStack()
        if rank in who:
            stack.enter_context(patch.object(where, name, by()))
        return stack

    return rehearse(config(**words), SIZES, ranks, backend=backend, all_ranks=True, before=before)


@pytest.mark.always("a rank skips a sum")
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_found_and_both_sides_are_named(what):
    *_, kinds, words = PLANTED[what]
    finding = with_planted(what).finding
    assert finding is not None, what
    assert finding.kind in kinds, finding
    assert re.search(words, finding.text, re.DOTALL), finding.text
    assert len(re.findall(r"\w+\.py:\d+ in \w+", finding.text)) >= 2, finding.text


def test_where_nccl_waits_in_a_circle_gloo_goes_on():
    ranks, words, _, (_, where, name, by), *_ = PLANTED["both send first to each other"]
    with patch.object(where, name, by()):
        assert rehearse(config(**words), SIZES, ranks, backend="gloo", all_ranks=True).finding is None


# ---------------------------------------------------------------------------------------------------------------- twins


def programs_of(run):
    return [(op.name, op.numel, op.dtype, op.detail, len(op.group[1]), op.lines) for op in run.ops], run.program


@pytest.mark.always("words1")
@pytest.mark.parametrize(
    "words",
    [
        {"pp": 2, "tp": 2, "zero": 1, **SP},
        {"cp": 2, "cp_kind": "zigzag", "tp": 2, "zero": 2},
        {"cp": 2, "cp_kind": "ring", "zero": 3},
        {"experts": 4, "ep": 4, "zero": 1, "micro_batch": 1},
        {"cp": 4, "cp_kind": "ulysses"},  # its ranks need one of three K/V heads, or two
    ],
)
def test_a_rank_does_what_its_twin_does(words):
    sizes = dataclasses.replace(SIZES, hidden=48, heads=12, kv_heads=3) if "ulysses" in words.values() else SIZES
    done = rehearse(config(**words), sizes, 8, all_ranks=True)
    few = rehearse(config(**words), sizes, 8)
    twin = twins(config(**words), sizes, 8)
    assert few.runs.keys() == {twin(rank) for rank in range(8)}
    assert done.finding is None
    assert few.finding is None
    for rank, run in done.runs.items():
        assert programs_of(run) == programs_of(few.runs[twin(rank)]), f"rank {rank} and rank {twin(rank)}"
        assert run.bytes == few.runs[twin(rank)].bytes, f"rank {rank} and rank {twin(rank)}"


def test_every_stage_is_run_and_of_a_ring_every_place():
    words = {"pp": 2, "cp": 2, "tp": 2}
    for kind, want in (("zigzag", {0, 8}), ("ulysses", {0, 8}), ("ring", {0, 2, 8, 10})):
        twin = twins(config(**words, cp_kind=kind), SIZES, 16)
        assert {twin(rank) for rank in range(16)} == want, kind
        assert all(twin(twin(rank)) == twin(rank) for rank in range(16))
    sizes = dataclasses.replace(SIZES, hidden=48, heads=12, kv_heads=12)  # tp leaves 6 K/V heads for 4 ranks
    twin = twins(config(cp=4, tp=2, cp_kind="ulysses"), sizes, 8)
    assert {twin(rank) for rank in range(8)} == {0, 2, 4, 6}


# --------------------------------------------------------------------------------------------------- the match, by hand


def op(name, ranks, numel=4, peer=None, dtype=torch.float32, splits=None):
    return Op(name, (1, ranks), numel, dtype, "", peer, splits, (("a.py", 1, "f"), None))


def run_of(rank, *steps):
    """A rank that starts and waits for each of these in turn; in a tuple, it starts all before it waits for one."""
    ops, program = [], []
    for step in steps:
        some = step if isinstance(step, tuple) else (step,)
        program += [(True, len(ops) + i) for i in range(len(some))] + [(False, len(ops) + i) for i in range(len(some))]
        ops += some
    return Recorded(rank, {"pp": 0}, {}, [], ops, program, {})


def test_two_ranks_that_each_wait_for_the_others_group_are_a_circle_and_started_both_they_are_not():
    a, b = op("all_reduce", (0, 1)), dataclasses.replace(op("all_reduce", (0, 1)), group=(2, (0, 1)))
    crossed = match({0: run_of(0, a, b), 1: run_of(1, b, a)})
    assert crossed is not None
    assert crossed.kind == "deadlock"
    assert "a circle of 2" in crossed.text
    assert match({0: run_of(0, (a, b)), 1: run_of(1, (b, a))}) is None
    c, d = (dataclasses.replace(op("all_reduce", (1, 2)), group=(index, (1, 2))) for index in (2, 3))
    beside = match({0: run_of(0, a), 1: run_of(1, c, d, a), 2: run_of(2, d, c)}).text  # rank 0 waits for the circle
    assert beside.startswith("a circle of 2 rank(s), each waiting for the next\nrank 1 waits in all_reduce")


def test_the_last_of_three_ranks_that_calls_something_else_is_found():
    a = op("all_reduce", (0, 1, 2))
    for change, says in (
        ({"name": "all_gather"}, "two different collectives meet"),
        ({"dtype": torch.bfloat16}, "their dtypes differ"),
        ({"detail": "max"}, "one is not the other's"),
        ({"numel": 5}, "their sizes differ"),
    ):
        found = match({0: run_of(0, a), 1: run_of(1, a), 2: run_of(2, dataclasses.replace(a, **change))})
        assert found is not None and found.kind == "mismatch" and found.text.startswith(says), change
    short = match({0: run_of(0, a, a), 1: run_of(1, a, a), 2: run_of(2, a)})
    assert short is not None and short.kind == "deadlock" and "rank 2 has ended without it" in short.text
    assert "all_reduce of 4 x float32 in a group (0, 1, 2), the 2nd there" in short.text
    lines = ("b.py", 2, "g"), ("c.py", 3, "h")
    steps = [[a, a], [a, a], [dataclasses.replace(a, lines=lines), dataclasses.replace(a, numel=5)]]
    parted = match({rank: run_of(rank, *each) for rank, each in enumerate(steps)}).text
    assert "parted at the 1st, with the same sizes:\n    rank 0 at a.py:1 in f\n    rank 2 at b.py:2 in g, " in parted
    assert "in g, called at c.py:3 in h" in parted
    assert [nth(k - 1) for k in (1, 2, 3, 4, 11, 13)] == ["1st", "2nd", "3rd", "4th", "11th", "13th"]
    assert [nth(k - 1) for k in (21, 112)] == ["21st", "112th"]
    assert [few(range(n)) for n in (8, 9)] == ["(0, 1, 2, 3, 4, 5, 6, 7)", "(0, 1, 2 ... 8: 9 ranks)"]


def test_ranks_that_were_run_stand_for_others_only_inside_of_every_group():
    apart = check_twins({0: run_of(0, op("all_reduce", (0, 3))), 2: run_of(2)}, lambda rank: rank - rank % 2)
    assert "rank 3 is in the group (0, 3), and rank 2" in apart
    assert "rank 1 was run, and it stands for no rank" in check_twins({1: run_of(1)}, lambda rank: 0)


def test_messages_between_two_ranks_are_matched_in_order_and_a_batch_has_none():
    pair = (0, 1)
    send, receive = (lambda n, peer: op("send", pair, n, peer)), (lambda n, peer: op("recv", pair, n, peer))
    assert match({0: run_of(0, send(3, 1), send(5, 1)), 1: run_of(1, receive(3, 0), receive(5, 0))}) is None
    swapped = match({0: run_of(0, send(3, 1), send(5, 1)), 1: run_of(1, receive(5, 0), receive(3, 0))})
    assert swapped is not None
    assert swapped.kind == "mismatch"
    narrow = {0: run_of(0, op("send", pair, 3, 1, torch.bfloat16)), 1: run_of(1, receive(3, 0))}
    assert match(narrow).kind == "mismatch"
    both = [run_of(rank, (send(4, 1 - rank), receive(4, 1 - rank))) for rank in (0, 1)]
    assert match(dict(enumerate(both)), backend="gloo") is None
    assert match(dict(enumerate(both)), backend="nccl").kind == "deadlock"
    for run in both:
        for each in run.ops:
            each.batch = 1
    assert match(dict(enumerate(both)), backend="nccl") is None


def test_two_ranks_that_wait_for_their_sends_before_they_receive_are_a_circle():
    """gloo may take small messages at once; whoever counts on it waits for good when they are large, or on nccl."""
    both = {r: run_of(r, op("send", (0, 1), peer=1 - r), op("recv", (0, 1), peer=1 - r)) for r in (0, 1)}
    assert match(both, backend="gloo").kind == "deadlock"


def test_groups_have_to_be_made_in_the_same_order_by_all():
    a, b = (((0, 1), ("mesh.py", 1, "f")), ((0,), ("mesh.py", 2, "f")))
    runs = {rank: run_of(rank) for rank in (0, 1)}
    runs[0].made, runs[1].made = [a, b], [a, b]
    assert match(runs) is None
    runs[1].made = [b, a]
    assert match(runs).kind == "groups"
    for fewer, more in ((0, 1), (1, 0)):
        runs[fewer].made, runs[more].made = [a], [a, b]
        assert "no more groups" in match(runs).text


def test_a_message_to_a_rank_that_was_not_run_meets_the_one_of_its_twin():
    ring = tuple(range(8))

    def turn(step, back):
        return run_of(0, (op("send", ring, peer=step % 8), op("recv", ring, peer=-back % 8)))

    assert match({0: turn(1, 1)}, lambda rank: 0, "gloo") is None
    assert match({0: turn(1, 3)}, lambda rank: 0, "gloo").kind == "deadlock"


def test_an_all_to_all_compares_what_each_pair_sends_and_takes():
    a = op("all_to_all", (0, 1), splits=([1, 3], [1, 2]))
    assert differ(a, op("all_to_all", (0, 1), splits=([2, 5], [3, 5])), 0, 1) == ""
    assert "3 sent for 4" in differ(a, op("all_to_all", (0, 1), splits=([2, 5], [4, 5])), 0, 1)
    assert differ(a, op("all_to_all", (0, 1), splits=([1, 5], [3, 5])), 0, 1)


def test_a_collective_that_a_rank_starts_and_never_waits_for_is_left_over():
    lonely = run_of(0, op("all_reduce", (0, 1)))
    lonely.program.pop()
    found = match({0: lonely, 1: run_of(1)})
    assert found is not None
    assert found.kind == "left over"
    unread = run_of(2, op("send", (2, 3), peer=1))
    unread.program.pop()
    assert re.search("to rank 3 in .*whose other side never comes", match({2: unread, 3: run_of(3)}).text, re.DOTALL)
    twice = run_of(0, op("all_reduce", (0, 1)), op("all_reduce", (0, 1)))
    twice.program.pop()
    left = match({0: twice, 1: run_of(1, op("all_reduce", (0, 1)))}).text
    assert "rank 1 never calls it; its last there is\n  all_reduce of 4 x float32 in a group (0, 1), the 1st" in left


# ------------------------------------------------------------------------------------------------------- the clock


def cluster(**more):
    """One GPU a node, a byte or FLOP a second, no latency: times by hand."""
    words = dict(name="", gpus_per_node=1, nodes=9, memory_gb=1, peak_tflops=1e-12, memory_gb_per_s=1e-9)
    words |= dict(inside_gb_per_s=1e-9, outside_gb_per_s=1e-9, latency_us=0, source="", ceiling=1.0, half=0.0)
    return Cluster(**words | more)


def timed(rank, *entries):
    """A rank whose program is [seconds of compute, op or index of the op to wait for]."""
    ops, program = [], []
    for _, entry in entries:
        program.append((isinstance(entry, Op), entry if not isinstance(entry, Op) else len(ops)))
        ops += [entry] if isinstance(entry, Op) else []
    return Recorded(rank, {"pp": 0}, {}, [], ops, program, {}, busy=[seconds for seconds, _ in entries])


def test_a_collective_hides_behind_what_is_computed_before_its_wait_and_the_rest_is_exposed(tmp_path):
    """An all-reduce of 8 bytes on 2 ranks sends 8 bytes: 8 seconds. Rank 1 starts it last, at 5."""
    ranks = {
        0: timed(0, (3, op("all_reduce", (0, 1), numel=2)), (1, 0)),
        1: timed(1, (5, op("all_reduce", (0, 1), numel=2)), (6, 0)),
    }
    for run in ranks.values():
        run.names[1, (0, 1)] = "tp"
    timeline = on_the_clock(ranks, lambda rank: rank, "nccl", cluster())
    assert timeline.seconds == 13
    assert timeline.compute == {0: 4, 1: 11}
    assert timeline.exposed == {0: {"tp": 13 - 4}, 1: {"tp": 13 - 11}}
    sums = [(piece.begin, piece.end) for piece in timeline.slices if piece.name == "all_reduce"]
    assert sums == [(5, 13), (5, 13)]
    write_trace(timeline, ranks, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    traced = {(e["ts"], e["dur"], e["args"]["note"]) for e in events if e["ph"] == "X" and e["name"] == "all_reduce"}
    assert traced == {(5e6, 8e6, "8 bytes, a.py:1 in f")}, "microseconds"
    built = {rank: dataclasses.replace(run, step_from=1) for rank, run in ranks.items()}
    assert on_the_clock(built, lambda rank: rank, "nccl", cluster()).seconds == 11, "before the step no time passes"
    ranks[1].busy.append(2)  # after its last wait
    assert on_the_clock(ranks, lambda rank: rank, "nccl", cluster()).seconds == 15
    with pytest.raises(ValueError, match="has ended without it"):
        on_the_clock({0: ranks[0], 1: timed(1)}, lambda rank: rank, "nccl", cluster())


@pytest.mark.parametrize(("ranks", "seconds"), [((6, 7), 1), ((0, 8), 2)])
def test_a_message_is_as_far_as_its_ranks_in_the_world(ranks, seconds):
    """8 bytes, 8 or 4 a second; a node has ranks 0 to 7."""
    near = cluster(gpus_per_node=8, inside_gb_per_s=8e-9, outside_gb_per_s=4e-9)
    both = {
        rank: timed(rank, (0, op(name, ranks, numel=2, peer=peer)), (0, 0))
        for rank, name, peer in zip(ranks, ("send", "recv"), (1, 0), strict=True)
    }
    assert on_the_clock(both, lambda rank: rank, "nccl", near).seconds == seconds
    sums = {rank: timed(rank, (0, op("all_reduce", ranks, numel=2)), (0, 0)) for rank in ranks}
    assert on_the_clock(sums, lambda rank: rank, "nccl", near).seconds == seconds


def test_collectives_of_one_group_come_one_after_the_other_and_of_two_groups_at_once():
    a = op("all_reduce", (0, 1), numel=2)
    b = dataclasses.replace(a, group=(2, (0, 1)))
    for second, seconds in ((dataclasses.replace(a), 16), (b, 8)):
        both = {rank: timed(rank, (0, a), (0, second), (0, 0), (0, 1)) for rank in (0, 1)}
        assert on_the_clock(both, lambda rank: rank, "nccl", cluster()).seconds == seconds
    pairs = {  # messages share no line: both are under way at once
        rank: timed(rank, *[(0, op(name, (0, 1), numel=2, peer=1 - rank)) for _ in range(2)], (0, 0), (0, 1))
        for rank, name in enumerate(("send", "recv"))
    }
    assert on_the_clock(pairs, lambda rank: rank, "nccl", cluster()).seconds == 8
    spans = [(0, "pp", 0, 2), (0, "pp", 1, 3), (0, "pp", 2, 4), (0, "tp", 1, 2), (1, "pp", 1, 2)]
    assert tracks([Slice(rank, lane, "", begin, end) for rank, lane, begin, end in spans]) == [0, 1, 0, 0, 0]


def test_with_free_messages_the_bubble_of_1f1b_is_that_of_its_formula():
    """p = 4 stages that take equally long, m = 8 micro-batches: (m + p - 1) / m of what one rank computes."""
    done = rehearse(
        config(pp=4, micro_batch=1, seq_len=64), EVEN, 4, cluster=cluster(inside_gb_per_s=1e9, outside_gb_per_s=1e9)
    )
    busiest = max(done.timeline.compute.values())
    assert done.timeline.seconds / busiest == pytest.approx((8 + 3) / 8, rel=0.06)


def test_the_trace_has_a_slice_for_every_collective_that_takes_time(tmp_path, capsys):
    given = ["--ranks", "4", "--seq-len", "16", "--micro-batch", "1", "--global-batch", "4", "--pp", "2"]
    assert main([*given, "--trace", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 2}
    sends = [event for event in slices if lanes[event["pid"], event["tid"]] in ("pp", "pp 2")]
    assert Counter(event["name"] for event in sends) == {"send": 4, "recv": 4}  # 2 micro-batches, there and back
    capsys.readouterr()
    assert main([*given, "--trace", str(tmp_path / "no" / "t.json")]) == 2
    assert re.fullmatch(r"rehearse.py: --trace .*t.json cannot be written to .*\n", capsys.readouterr().err)
    assert main([*given, "--cp", "7", "--trace", str(tmp_path / "refused.json")]) == 2
    assert not (tmp_path / "refused.json").exists()
    kept = (tmp_path / "t.json").read_text()
    assert main([*given, "--cp", "7", "--trace", str(tmp_path / "t.json")]) == 2
    assert (tmp_path / "t.json").read_text() == kept


def test_a_viewer_can_draw_the_trace(tmp_path):
    """The rules of the Trace Event Format, read on their own: known phases, a name for every process and thread, events
    in the order of time, nothing that overlaps on a thread, and arrows with two ends, each inside a slice."""
    given = ["--ranks", "8", "--seq-len", "16", "--micro-batch", "1", "--global-batch", "6", "--pp", "4", "--tp", "2"]
    assert main([*given, "--trace", str(tmp_path / "t.json")]) == 0
    trace = json.loads((tmp_path / "t.json").read_text())
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] in ("ms", "ns") and {event["ph"] for event in events} == set("MXsf")
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(threads.values())) < len(threads) == len({(pid, name) for (pid, _), name in threads.items()})
    timed = [event for event in events if event["ph"] != "M"]
    assert {event["pid"] for event in timed} == processes == {0, 2, 4, 6}
    assert {(event["pid"], event["tid"]) for event in timed} == set(threads)
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    free: dict[tuple[int, int], float] = {}
    for event in (event for event in timed if event["ph"] == "X"):
        assert event["dur"] > 0 and event["ts"] >= free.get((event["pid"], event["tid"]), 0.0) - 1e-6, event
        free[event["pid"], event["tid"]] = event["ts"] + event["dur"]
    arrows: dict[int, dict[str, dict]] = {}
    for event in (event for event in timed if event["ph"] in "sf"):
        assert event["ph"] not in arrows.setdefault(event["id"], {}), f"arrow {event['id']} has two ends of a kind"
        arrows[event["id"]][event["ph"]] = event
        inside = [e for e in timed if e["ph"] == "X" and (e["pid"], e["tid"]) == (event["pid"], event["tid"])]
        (around,) = [e for e in inside if e["ts"] <= event["ts"] < e["ts"] + e["dur"]]
        assert around["name"] == ("send" if event["ph"] == "s" else "recv")
    assert len(arrows) == 2 * 3 * 6  # forward and backward, three times from stage to stage, six micro-batches
    for ends in arrows.values():
        assert ends["s"]["pid"] != ends["f"]["pid"] and ends["s"]["ts"] <= ends["f"]["ts"]


@pytest.mark.prove
def test_domino_sends_what_it_sent_before_and_hides_it_behind_the_other_half():
    words = FUSED | {"preset": "tiny", "tp": 2, "global_batch": 4, **SP}
    machine = cluster(inside_gb_per_s=20.0)
    plain, domino = (
        rehearse(Config(**words | {"tp_overlap": how}), WIDE, 2, cluster=machine) for how in ("none", "domino")
    )
    assert plain.finding is None and domino.finding is None
    assert plain.step is not None and domino.step is None, "the planner has no formula for --tp-overlap"
    (a,), (b,) = plain.runs.values(), domino.runs.values()
    assert a.sent()["reduce_scatter"] == b.sent()["reduce_scatter"]
    assert domino.timeline.exposed[0]["tp"] < 0.5 * plain.timeline.exposed[0]["tp"]
    said = "\n".join(report(domino))
    assert "the planner has no numbers: --tp-overlap domino cannot be planned" in said


# -------------------------------------------------------------------------------------------------------- large and bad


def test_memory_of_attention_grows_with_the_sequence_and_not_with_its_square():
    peaks = [
        rehearse(config(seq_len=length, global_batch=2), SIZES, 1).runs[0].bytes["activations and buffers"]
        for length in (256, 512)
    ]
    assert peaks[1] < 2.1 * peaks[0]
    recorder, old = rehearse_rank.Recorder(0), torch.empty(4, device="meta").untyped_storage()
    recorder.watch(old)
    recorder.begin_step()
    for size in (0, 16, 24, 0):  # as stage 3 of ZeRO gathers and frees; what was there before the step is not its own
        old.resize_(size)
        recorder.watch(old)
    assert (recorder.current, recorder.peak) == (0, 24)


@pytest.mark.prove
def test_70b_on_512_ranks_sends_what_the_planner_says_and_nothing_is_allocated():
    words = dict(seq_len=8192, global_batch=64, micro_batch=1, tp=8, pp=4, zero=1, precision="bf16-master", **SP)
    given = Config(**words)
    done = rehearse(given, LLAMA3_70B, 512)
    assert done.finding is None
    assert len(done.runs) == 4
    layout = Layout.of(given, LLAMA3_70B, 512)
    for run in done.runs.values():
        want = by_collective(flows(LLAMA3_70B, None, layout, run.place["pp"]))
        assert dict(run.sent()) == {what: pytest.approx(count, abs=0.5) for what, count in want.items()}


def test_the_command_prints_the_table_and_pass(capsys):
    code = main(["--ranks", "4", "--seq-len", "16", "--micro-batch", "1", "--global-batch", "4", "--tp", "2"])
    said = capsys.readouterr().out
    assert code == 0
    assert "1 distinct program(s)" in said.splitlines()[0]
    assert said.splitlines()[1].startswith("computed in fp32, with --kernels t")
    assert said.splitlines()[-1] == "PASS"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_planner_sends_as_the_backend_does_and_has_no_seconds_for_a_plain_ring(backend):
    done = rehearse(config(zero=1), SIZES, 2, backend=backend, cluster=cluster())
    (run,) = done.runs.values()
    most, sent = rehearse_module.planned(done, run)
    assert dict(run.sent()) == pytest.approx(sent) and ("send" in sent) == (backend == "gloo")
    assert any(line.endswith(f"; the planner says {done.step.seconds:.3f} s") for line in report(done))
    off = f"{100 * (most / sum(run.bytes.values()) - 1):+.2f} %"
    assert any(line.endswith(off) for line in report(done))
    assert report(done)[-1].split()[1] == f"{done.timeline.compute[0]:.3f}"
    ring = rehearse(config(cp=2, cp_kind="ring"), SIZES, 2, backend=backend, cluster=cluster())
    ends = ring.runs[0]
    assert ends.busy[len(ends.program)] > 0, "the update of a step without ZeRO follows its last collective"
    said = "\n".join(report(ring))
    assert ring.step is None and " %" in said and "the planner" not in said.split("a step takes")[1]
    mixed = rehearse(config(experts=4, ep=2), SIZES, 2, backend=backend)
    kept = plan_memory.held(SIZES, mixed.config.mixture(SIZES), Layout.of(mixed.config, SIZES, 2))
    assert mixed.runs[0].bytes.items() >= kept.items()
    assert dict(mixed.runs[0].sent()) == pytest.approx(rehearse_module.planned(mixed, mixed.runs[0])[1])
    deep = dataclasses.replace(done, config=config(pp=2))
    most, _ = rehearse_module.planned(deep, dataclasses.replace(run, place={"pp": 1}))
    assert most == sum(plan_memory.peak(SIZES, None, Layout.of(deep.config, SIZES, 2), 1).values())


@pytest.mark.parametrize(("ranks", "nodes"), [(8, 1), (9, 2), (16, 2)])
def test_a_cluster_has_as_many_nodes_as_the_ranks_need(ranks, nodes):
    args, _ = rehearse_module.arguments(["--ranks", str(ranks), "--cluster", "h100x8"])
    assert rehearse_module.cluster_of(args).nodes == nodes


def test_a_finding_is_printed_and_the_exit_code_is_1(capsys):
    with patch.object(rehearse_module, "match", lambda *_: Finding("deadlock", "rank 0 waits for rank 1")):
        assert main(["--ranks", "1", "--seq-len", "16", "--global-batch", "8"]) == 1
    printed = capsys.readouterr()
    assert "deadlock: rank 0 waits for rank 1" in printed.err
    assert "PASS" not in printed.out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--tp 3", "--tp 3 does not divide|--tp 3 x"),
        ("--precision bf16 --micro-batch 1", "--precision bf16 cannot be rehearsed"),
        ("--fpdt-chunks 2 --micro-batch 1", "--fpdt-chunks 2 cannot be rehearsed"),
        ("--zero 2 --zero-offload --micro-batch 1", "--zero-offload cannot be rehearsed"),
        ("--experts 4 --capacity 1.5 --micro-batch 1", "--capacity 1.5 cannot be rehearsed"),
        ("--kernels triton --precision fp64 --micro-batch 1", "--kernels triton cannot be rehearsed"),
        ("--kernels cuda --zero 1 --precision bf16-master --micro-batch 1", "--kernels cuda cannot be rehearsed"),
        ("--compile --micro-batch 1", "--compile cannot be rehearsed"),
        ("--documents --micro-batch 1", "--documents cannot be rehearsed"),
        ("--experts 4 --dispatch once --micro-batch 1", "--dispatch once cannot be rehearsed"),
        ("--model gpt-9", "--model gpt-9 is unknown"),
        ("--ranks 0", "--ranks 0 must be at least 1"),
        ("--plan --tokens 0", "--tokens 0 must be at least 1"),
        ("--processes 0", "--processes 0 must be at least 1"),
        ("--tokens 8192", "--tokens is for --plan"),
        ("--no-such-option 7", "--no-such-option"),
        ("--backend mpi", "--backend"),
        ("--model llama3-8b --preset tiny", "--preset tiny is not --model llama3-8b"),
        ("--plan --cluster nowhere", "--cluster nowhere is no file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(given, words):
    assert re.search(words, refusal(main, given))


def test_what_was_put_in_place_of_something_is_taken_away_again_also_after_an_error():
    before = [dist.new_group, dist.get_backend, torch.autocast, torch.UntypedStorage.resize_, step_module.train_step]
    with patch.object(step_module, "train_step", side_effect=KeyError), pytest.raises(KeyError):
        rehearse(config(), SIZES, 2)
    now = [dist.new_group, dist.get_backend, torch.autocast, torch.UntypedStorage.resize_, step_module.train_step]
    assert now == before
    assert not dist.is_initialized()
    with pytest.raises(UsageError):
        rehearse(config(precision="bf16"), SIZES, 2)
