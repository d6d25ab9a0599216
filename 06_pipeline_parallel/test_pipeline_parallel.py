"""The core file of the pipeline against one process, in_depth's schedules, and the harness's meters."""

import contextlib
import io
import math
import os
import random
import re
import sys
import time
from functools import cache, partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from harness.meter import communication, held_bytes, peak_memory, saved_activations
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_named, assert_same_trace, sgd_trace

sys.path.insert(1, str(Path(__file__).resolve().parent / "in_depth"))  # whose schedules must be the same

import pipeline_parallel as pipe
import schedule_simulator
from pipeline_parallel import IGNORE_INDEX, SCHEDULES, RecordingStage, build_model, build_stage, get_batch
from schedules import build

TIMEOUT = 20  # seconds: a deadlock should not take a minute to be found
CASES = [(1, 2), (3, 0), (6, 3)]  # micro-batches, blocks beyond one for each stage
MESSAGE = (pipe.BATCH, pipe.SEQ_LEN, pipe.HIDDEN)
MESSAGE_BYTES = 8 * math.prod(MESSAGE)


# ---------------------------------------------------------------------- the reference: the full model, a second time


def reference_loss(w, num_blocks, tokens, labels):
    """The mean over valid tokens, from a dict of parameters, in one piece."""
    x = w["0.weight"][tokens]
    future = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
    for i in range(1, num_blocks + 1):
        h = norm(x, w[f"{i}.attn_norm.weight"])
        q, k, v = (h @ w[f"{i}.{name}_proj.weight"].T for name in "qkv")
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
        x = x + scores.softmax(-1) @ v @ w[f"{i}.o_proj.weight"].T
        up = norm(x, w[f"{i}.mlp_norm.weight"]) @ w[f"{i}.up_proj.weight"].T
        x = x + (up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))) @ w[f"{i}.down_proj.weight"].T
    logits = norm(x, w[f"{num_blocks + 1}.0.weight"]) @ w[f"{num_blocks + 1}.1.weight"].T
    valid = labels != IGNORE_INDEX
    return -logits.log_softmax(-1)[valid].gather(-1, labels[valid][:, None]).mean()


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


@cache
def reference(num_blocks, m, dtype=torch.float64, steps=3):
    params = dict(build_model(num_blocks).to(dtype).named_parameters())

    def backward(step):
        loss = reference_loss(params, num_blocks, *get_batch(step, m))
        loss.backward()
        return loss.item()

    return sgd_trace(params, backward, steps=steps)


def new_stage(num_blocks, group=None, dtype=torch.float64):
    group = group or dist.group.WORLD
    model = build_model(num_blocks).to(dtype)
    return RecordingStage(build_stage(model, dist.get_rank(group), dist.get_world_size(group)), group)


def run_step(stage, name, m, batch=None):
    actions = SCHEDULES[name](stage.rank, stage.num_stages, m)
    return pipe.forward_backward(stage, actions, *(batch or get_batch(0, m)))


def train(name, m, num_blocks, group=None, dtype=torch.float64, steps=3, change=None):
    """The trace of this rank's stage, and the stage."""
    stage = new_stage(num_blocks, group, dtype)
    if change is not None:
        change(stage)
    params = dict(stage.layers.named_parameters())
    return sgd_trace(params, lambda step: run_step(stage, name, m, get_batch(step, m)).item(), steps=steps), stage


def traces(name, cases, group=None):
    """For each case the trace of this rank's stage, its most micro-batches in flight, and those left at the end."""
    p = dist.get_world_size(group)
    runs = [train(name, m, p + more, group) for m, more in cases]
    return [(trace, stage.max_in_flight, sorted(stage.in_flight)) for trace, stage in runs]


def assert_match_reference(name, cases, ranks):
    """`ranks`: what `traces` returned on each rank of a group."""
    p = len(ranks)
    for (m, more), *stages in zip(cases, *ranks, strict=True):
        expected = reference(p + more, m)
        for rank, (trace, in_flight, left) in enumerate(stages):
            named = [{name: g for name, g in step.items() if name in trace.weights} for step in expected.gradients]
            params = {name: w for name, w in expected.weights.items() if name in trace.weights}
            assert_same_trace(trace, Trace(expected.losses, named, params), rank=rank)
            limit = pipe.expected_numbers(name, p, m)[1][rank]
            assert in_flight == limit, f"{name}, rank {rank}: {in_flight} micro-batches in flight, not {limit}"
            assert not left, f"{name}, rank {rank}: {left} are in flight after the step"
        names = sorted(name for trace, *_ in stages for name in trace.weights)
        assert names == sorted(expected.weights), "each parameter is on one rank"


@pytest.mark.always("naive-2")
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_three_steps_match_reference(name, p):
    assert_match_reference(name, CASES, run_ranks(p, traces, name, CASES, timeout=TIMEOUT))


def test_fewer_micro_batches_than_stages():
    cases = [(1, 1), (2, 0)]
    assert_match_reference("1f1b", cases, run_ranks(4, traces, "1f1b", cases, timeout=TIMEOUT))


def in_slices():
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    return traces("1f1b", [(4, 1)], groups[0] if dist.get_rank() in (1, 3) else groups[1])


def test_two_slices_of_the_world_train_two_models():
    ranks = run_ranks(4, in_slices, timeout=TIMEOUT)
    assert_match_reference("1f1b", [(4, 1)], ranks[1::2])
    assert_match_reference("1f1b", [(4, 1)], ranks[::2])


def test_every_layer_is_in_one_stage_and_stages_differ_by_one_block_at_most():
    for num_blocks in range(1, 12):
        model = build_model(num_blocks)
        for p in range(1, num_blocks + 1):
            stages = [list(build_stage(model, s, p)._modules) for s in range(p)]
            assert [name for names in stages for name in names] == [str(i) for i in range(num_blocks + 2)]
            sizes = [len(names) - (s == 0) - (s == p - 1) for s, names in enumerate(stages)]
            assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1, (num_blocks, p, sizes)


def test_labels_are_the_next_tokens_and_the_last_of_several_micro_batches_has_none():
    text = list(Path(pipe.tokenize.__file__).read_bytes())
    for step, m in ((0, 1), (2, 1), (0, 2), (2, 3), (0, 14)):
        tokens, labels = get_batch(step, m)
        assert len(tokens) == len(labels) == 2 * m
        for i in range(2 * m):
            start = 50 * (2 * m * step + i)
            ignored = 24 if m > 1 and i >= 2 * m - 2 else i % 24  # the first i labels of sequence i are
            assert tokens[i].tolist() == text[start : start + 24]
            targets = [IGNORE_INDEX] * ignored + text[start + 1 + ignored : start + 25]
            assert labels[i].tolist() == targets, f"step {step}, sequence {i} of {m} micro-batches"


# ------------------------------------------------------------------------------- schedules and messages, without ranks


class MessageRecorder:
    """A stage that computes nothing and writes down what it is asked for."""

    def __init__(self, rank, num_stages):
        self.prev_rank = rank - 1 if rank > 0 else None
        self.next_rank = rank + 1 if rank < num_stages - 1 else None
        self.calls = []

    def forward(self, i, x):
        self.calls.append(("F", i))

    def backward(self, i, grad_output):
        self.calls.append(("BW", i))

    def send(self, x, to):
        self.calls += [("send", to)] if to is not None else []

    def recv(self, source):
        self.calls += [("recv", source)] if source is not None else []

    def send_recv(self, x, peer):
        self.calls += [("send_recv", peer)] if peer is not None else []


SIZES = [(p, m) for p in (1, 2, 3, 4, 8, 13) for m in (1, 2, 3, 7, 20)]


def calls_of_all_stages(run, name):
    """By size: for each rank its list of actions, and what the executor asked of the stage."""
    calls = {}
    for p, m in SIZES:
        stages = [MessageRecorder(rank, p) for rank in range(p)]
        schedule = [SCHEDULES[name](rank, p, m) for rank in range(p)]
        for stage, actions in zip(stages, schedule, strict=True):
            run(stage, actions)
        calls[p, m] = schedule, [stage.calls for stage in stages]
    return calls


def replay(calls):
    """Run the calls with sends that block until they are received. Returns what each rank is blocked on, or fails."""
    p = len(calls)
    position = [0] * p
    last = [None] * p  # what each rank has computed last
    received = [[] for _ in range(p)]
    halves = [set() for _ in range(p)]  # what is left of a rank's call: "send", "recv" or both, with the peer
    moved = True
    while moved:
        moved = False
        for rank in range(p):
            while not halves[rank] and position[rank] < len(calls[rank]):
                kind, value = calls[rank][position[rank]]
                position[rank] += 1
                moved = True
                if kind in ("F", "BW"):
                    sender = rank - 1 if kind == "F" else rank + 1
                    got = received[rank].pop() if 0 <= sender < p else (kind, value)
                    assert got == (kind, value), f"rank {rank} has received {got} and computes {kind}{value}"
                    assert not received[rank], f"rank {rank} received {received[rank]} for nothing"
                    last[rank] = kind, value
                else:
                    halves[rank] = {(half, value) for half in kind.split("_")}
            for half, peer in list(halves[rank]):
                if half == "send" and ("recv", rank) in halves[peer]:
                    halves[rank].remove(("send", peer))
                    halves[peer].remove(("recv", rank))
                    received[peer].append(last[rank])
                    moved = True
    return [sorted(left) for left in halves]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_size_deadlocks_and_every_action_has_the_right_input(name):
    [calls] = run_ranks(1, calls_of_all_stages, pipe.run_schedule, name)
    for (p, m), (schedule, calls_of) in calls.items():
        assert replay(calls_of) == [[]] * p, f"{name}: deadlock with {p} stages and {m} micro-batches"
        for rank, actions in enumerate(schedule):
            made = [call for call in calls_of[rank] if call[0] in ("F", "BW")]
            deep = [(a.kind, a.micro_batch) for a in build(name, p, m, 1).actions[rank]]
            assert made == actions, f"rank {rank} of {p}, {m} micro-batches: of {actions} it runs {made}"
            assert actions == deep, f"rank {rank} of {p}, {m} micro-batches: {actions}, in depth {deep}"
            for call, after in zip(calls_of[rank], [*calls_of[rank][1:], ("end", None)], strict=True):
                receiver = {"F": rank + 1, "BW": rank - 1}.get(call[0], -1)
                sends = after[0].startswith("send") and after[1] == receiver
                assert sends or not 0 <= receiver < p, f"{call} is not sent at once, but followed by {after}"
    for rank, actions in enumerate(build(name, 64, 64, 1).actions):
        assert SCHEDULES[name](rank, 64, 64) == [(a.kind, a.micro_batch) for a in actions], f"rank {rank} of 64"


def test_one_by_one_runs_all_but_1f1b():
    for name in SCHEDULES:
        [calls] = run_ranks(1, calls_of_all_stages, pipe.run_one_by_one, name)
        for (p, m), (_, calls_of) in calls.items():
            blocked = replay(calls_of)
            crosses = name == "1f1b" and p > 1 and m > 1
            assert (blocked != [[]] * p) == crosses, f"{name}, {p} stages, {m} micro-batches: {blocked}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulate_gives_the_formulas_and_agrees_with_in_depth(name):
    for p, m in [(1, 3), (2, 1), (3, 2), (4, 4), (4, 10), (8, 20)]:
        schedule = build(name, p, m, 1)
        expected = schedule_simulator.simulate(schedule)  # F, B and W take 1 each
        timelines = pipe.simulate([SCHEDULES[name](rank, p, m) for rank in range(p)])
        for rank, timeline in enumerate(timelines):
            assert [start for *_, start, _ in timeline] == list(expected.start[rank]), f"rank {rank} starts"
            assert [end for *_, end in timeline] == list(expected.end[rank]), f"rank {rank} ends"
        idle = max(end for timeline in timelines for *_, end in timeline) - 3 * m
        assert idle == 3 * (p - 1) * (m if name == "naive" else 1)
        assert pipe.expected_numbers(name, p, m)[0] == round(idle / (3 * m), 6)


def test_the_drawings_in_the_docstring_are_what_is_drawn():
    for name in SCHEDULES:
        drawing = pipe.render(pipe.simulate([SCHEDULES[name](rank, 2, 3) for rank in range(2)]))
        assert all(line.strip() in pipe.__doc__ for line in drawing.splitlines()), drawing
    long = pipe.render(pipe.simulate([[("F", i) for i in range(64)]]))
    assert len(long) < 110 and long.endswith("...")
    fits = pipe.render(pipe.simulate([[("F", i) for i in range(29)]]))  # 29 units of 3 characters
    assert fits.endswith("F28"), fits


# ------------------------------------------------------------------------------------------- bytes sent and stored


def bytes_of_a_step(m):
    """For each schedule the messages of a step, their bytes, and the script's own count; and bytes stored."""
    found = []
    for name in SCHEDULES:
        stage = new_stage(dist.get_world_size() + 1)
        with communication() as meter:
            run_step(stage, name, m)
        found.append((name, dict(meter.calls), dict(meter.payload), stage.bytes_sent))
    return found, held_bytes(stage.layers).parameters


def test_bytes_stored_and_sent_match_the_formulas():
    for p, m in ((4, 4), (2, 1)):
        ranks = run_ranks(p, bytes_of_a_step, m, timeout=TIMEOUT)
        for rank, (found, _) in enumerate(ranks):
            n = m * ((rank > 0) + (rank < p - 1))
            sent = {"send": n * MESSAGE_BYTES, "recv": n * MESSAGE_BYTES, "all_reduce": 8}
            for name, calls, payload, by_itself in found:
                where = f"{name}, rank {rank} of {p}"
                assert calls == {"send": n, "recv": n, "all_reduce": 1}, f"{where}: messages {calls}"
                assert payload == sent and by_itself == sent["send"], f"{where}: bytes {payload}, not {sent}"
                assert pipe.expected_numbers(name, p, m)[2][rank] == sent["send"], f"{where}: by the script's formula"
        stored = [parameters for _, parameters in ranks]
        assert sum(stored) == held_bytes(build_model(p + 1)).parameters and (p == 2 or max(stored) < sum(stored) / 2)


def memory_of_steps(name, m):
    """The most bytes that a step allocates when gradients are there, and what is left after it: the least of two.

    A thread of Gloo may free a buffer late.
    """
    stage, batch = new_stage(dist.get_world_size()), get_batch(0, m)
    run_step(stage, name, m, batch)
    peaks, left = [], []
    for _ in range(2):
        dist.barrier()
        with peak_memory() as memory:
            run_step(stage, name, m, batch)
            left.append(memory.current)
        peaks.append(memory.peak)
    return min(peaks), min(left)


def memory_of_all():
    return {(name, m): memory_of_steps(name, m) for name in SCHEDULES for m in (2, 4)}, bytes_of_one_forward()


def bytes_of_one_forward():
    """What one micro-batch has in memory between F and BW: what autograd saves, and the output itself."""
    stage = new_stage(dist.get_world_size())
    tokens, labels = get_batch(0, 1)
    x = tokens
    if stage.rank > 0:
        x = torch.randn(MESSAGE, dtype=torch.float64, requires_grad=True)
    with saved_activations(exclude=[*stage.layers.parameters(), tokens, labels]) as saved:
        y = stage.layers(x)
        if stage.next_rank is None:
            y = pipe.loss_sum(y, labels) / 3
    assert y.requires_grad
    return saved.bytes + (y.nbytes if stage.next_rank is not None else 0)


def test_memory_grows_with_every_micro_batch_in_afab_and_not_at_all_in_1f1b_or_naive():
    """Two ranks; peak bytes of everything that a step allocates, and nothing but a loss is left of it."""
    for rank, (memory, one) in enumerate(run_ranks(2, memory_of_all, timeout=TIMEOUT)):
        peak = {key: most for key, (most, _) in memory.items()}
        for name in ("naive", "1f1b"):
            assert peak[name, 4] == peak[name, 2], f"{name}, rank {rank}: {peak[name, 2]}, {peak[name, 4]}"
        grows = peak["afab", 4] - peak["afab", 2]
        assert 2 * one <= grows <= 2.02 * one, f"afab, rank {rank}: {grows} bytes for 2 times {one}"
        # 1F1B has one micro-batch more in flight than naive on rank 0, and as many on rank 1.
        more = peak["1f1b", 4] - peak["naive", 4]
        assert abs(more - (1 - rank) * one) <= 2 * MESSAGE_BYTES, f"rank {rank}: {more} bytes"
        for key, (_, left) in memory.items():
            assert left <= 1024, f"{key}, rank {rank}: {left} bytes are left after a step"


# ---------------------------------------------------------------------------------------------------- order in time


def deadlock_and_train():
    began = time.monotonic()
    with patch.object(dist, "new_group", wraps=dist.new_group) as made:
        blocked = pipe.find_deadlock(dist.group.WORLD)
    assert "gloo" in made.call_args.args  # of the default, NCCL, the timeout ends the process
    assert made.call_args.kwargs["use_local_synchronization"], "a rank of another slice of the world makes no group"
    took = time.monotonic() - began
    dist.barrier()  # the group of the job is as before
    return blocked, took, traces("1f1b", [(3, 1)])


@pytest.mark.always("2")
@pytest.mark.parametrize("p", [1, 2, 4])
def test_1f1b_one_by_one_deadlocks_in_bounded_time_and_the_job_goes_on(p):
    ends = run_ranks(p, deadlock_and_train, timeout=15)
    blocked = [where for where, *_ in ends]
    assert_match_reference("1f1b", [(3, 1)], [after for *_, after in ends])
    if p == 1:
        assert blocked == [""]
        return
    circle = [f"rank {p - 2} waits to send to rank {p - 1}", f"rank {p - 1} waits to send to rank {p - 2}"]
    others = [f"rank {rank} waits to receive from rank {rank + 1}" for rank in range(p - 2)]
    assert blocked == others + circle
    assert max(took for _, took, _ in ends) < 10


def with_delays(name, seed):
    """Every F and BW takes some time longer, now on this rank, now on that."""
    dice = random.Random(100 * seed + dist.get_rank())

    def change(stage):
        def slow(plain, *args):
            time.sleep(dice.choice([0, 0, 0.003, 0.02]))
            return plain(*args)

        stage.forward = partial(slow, stage.forward)
        stage.backward = partial(slow, stage.backward)

    trace, _ = train(name, 6, 4, steps=1, change=change)
    expected = reference(4, 6, steps=1).gradients[0]
    assert_same_named(trace.gradients[0], {name: expected[name] for name in trace.weights}, rank=dist.get_rank())


@pytest.mark.always("0")
@pytest.mark.parametrize("seed", range(3))
def test_random_delays_do_not_change_a_gradient_or_deadlock(seed):
    run_ranks(4, with_delays, "1f1b", seed, timeout=TIMEOUT)


def view_with_gaps(factor):
    return factor * torch.arange(math.prod(MESSAGE), dtype=torch.float64).view(MESSAGE[::-1]).permute(2, 1, 0)


def crossing_messages():
    """[(kinds of the messages of a batch, how many of them are waited for when send_recv returns)]"""
    batches = []
    plain = dist.batch_isend_irecv

    def watch(ops):
        works = [Mock(wraps=work) for work in plain(ops)]
        batches.append((sorted(op.op.__name__ for op in ops), works))
        return works

    stage = new_stage(2)
    stage.start_step(*get_batch(0, 1), 1)
    with patch.object(dist, "batch_isend_irecv", watch):
        received = stage.send_recv(view_with_gaps(1.0 + stage.rank), 1 - stage.rank)
    assert_same(received, view_with_gaps(2.0 - stage.rank), what="what was received", rank=stage.rank)
    assert stage.bytes_sent == MESSAGE_BYTES
    assert stage.send_recv(received, None) is None
    return [(kinds, sum(work.wait.called for work in works)) for kinds, works in batches]


def test_crossing_messages_are_one_batch_and_both_are_waited_for():
    assert run_ranks(2, crossing_messages, timeout=8) == [[(["irecv", "isend"], 2)]] * 2


def three_messages():
    stage = new_stage(2)
    stage.start_step(*get_batch(0, 1), 1)
    if stage.rank == 0:
        for factor, to in ((1, 1), (2, 1), (3, None)):
            stage.send(view_with_gaps(factor), to)
        assert stage.recv(None) is None
        return []
    received = [stage.recv(0), stage.recv(0)]
    assert stage.blocked_on == "receive from rank 0"
    return received


def test_messages_arrive_as_they_were_sent():
    _, received = run_ranks(2, three_messages, timeout=TIMEOUT)
    for factor, x in enumerate(received, 1):
        assert_same(x, view_with_gaps(factor))


# ------------------------------------------------------------------------------------------------- modes, precision


def steps_without_zero_grad():
    stage, batch = new_stage(3), get_batch(0, 4)
    losses = [run_step(stage, "1f1b", 4, batch) for _ in range(2)]
    grads = {name: w.grad.clone() for name, w in stage.layers.named_parameters()}
    with_graph = [name for name in SCHEDULES if run_step(stage, name, 4, batch).requires_grad]
    tokens, labels = batch
    stage.in_flight[4] = (tokens, tokens)  # as a step leaves it that was broken off
    nothing = run_step(stage, "1f1b", 2, (tokens[:, :9], torch.full_like(labels[:, :9], IGNORE_INDEX))).item()
    assert not stage.in_flight
    with pytest.raises(ValueError, match="7 sequences: use a multiple of 4"):
        run_step(stage, "1f1b", 4, (tokens[:7], labels[:7]))
    return losses, grads, with_graph, nothing


def test_gradients_accumulate_over_steps_and_the_loss_has_no_graph():
    expected = reference(3, 4)
    everywhere = [run_ranks(ranks, steps_without_zero_grad, timeout=TIMEOUT) for ranks in (2, 1)]  # 1: first and last
    for rank, found in (each for ranks in everywhere for each in enumerate(ranks)):
        losses, grads, with_graph, nothing = found
        assert_same(losses[0], expected.losses[0], what="the loss of the first step", rank=rank)
        assert_same(losses[1], expected.losses[0], what="the loss of the second step", rank=rank)
        twice = {name: 2 * expected.gradients[0][name] for name in grads}
        assert_same_named(grads, twice, what="gradient of", rank=rank)
        assert not with_graph, f"rank {rank} returns a loss with the graph of its micro-batches: {with_graph}"
        assert nothing == 0, f"without a valid label the loss is {nothing}"


def error_in_bf16(m):
    """Error of the pipeline and of one process in all gradients: both in bf16, both against float64."""
    trace, stage = train("1f1b", m, 3, dtype=torch.bfloat16, steps=1)
    assert stage.loss.dtype == torch.float64, f"losses of micro-batches add up in {stage.loss.dtype}"
    runs = (trace, reference(3, m, torch.bfloat16, 1), reference(3, m))
    names = sorted(trace.weights)
    got, dense, exact = (torch.cat([run.gradients[0][n].double().flatten() for n in names]) for run in runs)
    return (got - exact).norm().item(), (dense - exact).norm().item()


def test_in_bf16_the_pipeline_is_at_most_half_again_as_far_from_float64_as_one_process():
    for rank, (error, dense) in enumerate(run_ranks(2, error_in_bf16, 2, timeout=TIMEOUT)):
        assert 0 < error <= 1.5 * dense, f"rank {rank}: {error:.3g}, one process {dense:.3g}"


# ------------------------------------------------------------------------------------------------------- the script


def run_main(*options):
    """Exit code, stdout, stderr of the script's own main, in the ranks that are there already."""
    out, err = io.StringIO(), io.StringIO()
    keep_group = patch.multiple(dist, init_process_group=lambda *a, **k: None, destroy_process_group=destroy_subgroup)
    ranks = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())} if dist.is_initialized() else {}
    said = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    arguments = patch.object(sys, "argv", ["pipeline_parallel.py", *options])
    with keep_group, said[0], said[1], arguments, patch.dict(os.environ, ranks):
        try:
            code = pipe.main()
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


def destroy_subgroup(group=None, destroy=dist.destroy_process_group):
    if group is not None:
        destroy(group)


def run_main_twice():
    return run_main(), run_main("--schedule", "1f1b", "--micro-batches", "3", "--layers", "5")


@pytest.mark.prove
@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_script_passes_and_every_option_changes_what_it_prints(p):
    ends = run_ranks(p, run_main_twice, timeout=40)
    (code, out, err), (other_code, other, _) = ends[0]
    assert (code, other_code, err) == (0, 0, ""), out + other
    assert out.endswith("\nPASS\n") and all(f"\n{name}: " in f"\n{out}" for name in SCHEDULES)
    assert "afab" not in other and "BW2" in other and "BW3" not in other
    assert str([held_bytes(build_stage(build_model(5), stage, p)).parameters for stage in range(p)]) in other
    assert [said for one in ends[1:] for _, *said in one] == [["", ""]] * (2 * (p - 1))


def run_main_with(fault):
    """A parameter is NaN, gradients are a little off, formulas and what is run differ, or rank 1 is not blocked."""
    plain, plain_step = pipe.build_model, pipe.forward_backward

    def step_with_an_error(stage, *args):
        loss = plain_step(stage, *args)
        for p in stage.layers.parameters():
            p.grad *= 1 + 1e-6
        return loss

    def naive(stage, actions, *batch):
        return plain_step(stage, SCHEDULES["naive"](0, 2, 6), *batch)

    def build_with_nan(num_blocks):
        model = plain(num_blocks)
        model[1].up_proj.weight.data[0, 0] = math.nan
        return model

    faults = {"find_deadlock": lambda group: "" if fault == "no deadlock" and dist.get_rank() else "blocked"}
    faults |= {"build_model": build_with_nan} if fault == "error nan" else {}
    faults |= {"expected_numbers": lambda *sizes: (9, [], [])} if fault == "idle time" else {}
    faults["forward_backward"] = {"error": step_with_an_error, "idle time": naive}.get(fault, plain_step)
    with patch.multiple(pipe, **faults):
        return run_main("--schedule", "1f1b")


# The last line: what is wrong, and nothing else; two ranks send 6 micro-batches of 12,288 bytes to each other
FAULTS = {
    "error nan": "1f1b: error nan; 1f1b: error nan",
    "error": r"1f1b: error \d\.\de-\d\d; 1f1b: error \d\.\de-\d\d",
    "idle time": r"1f1b: idle.*1.0, not 9; 1f1b: micro.* \[1, 1\], not ..; 1f1b: bytes.* \[73728, 73728\], not ..",
    "no deadlock": "1f1b, one by one: no deadlock",
}


@pytest.mark.parametrize("fault", FAULTS, ids=["nan", "small", "formula", "deadlock"])
def test_nan_another_number_than_the_formula_and_no_deadlock_fail(fault):
    (code, out, _), (other_code, nothing, _) = run_ranks(2, run_main_with, fault, timeout=10)
    assert (code, other_code, nothing) == (1, 1, "") and "PASS" not in out
    assert re.search(f"\n1f1b, one by one: blocked; (blocked)?\nFAIL: {FAULTS[fault]}\n$", out), out
    assert str([held_bytes(build_stage(build_model(6), stage, 2)).parameters for stage in range(2)]) in out


def run_main_without_checks():
    """The check of a schedule says with which sizes it was called, if there is more than one micro-batch."""
    checks = {"find_deadlock": lambda group: ""}
    checks["check"] = lambda name, model, reference, m, group: [f"{name} {len(model) - 2} {m}"] * (m > 1)
    with patch.multiple(pipe, **checks):
        some = run_main("--schedule", "afab", "--micro-batches", "3", "--layers", "5")
        return run_main(), some, run_main("--micro-batches", "1", "--layers", "1")


def test_main_checks_all_schedules_or_the_named_one_in_the_sizes_of_its_options():
    codes, outs, errors = zip(*run_ranks(1, run_main_without_checks)[0], strict=True)
    assert codes == (1, 1, 0) and errors == ("", "", "")
    last = ["FAIL: naive 6 6; afab 6 6; 1f1b 6 6", "FAIL: afab 5 3", "PASS"]
    assert list(outs) == [f"1f1b, one by one: one rank sends no message\n{line}\n" for line in last]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--schedule", "zb"], ["--schedule", "zb"]),
        (["--micro-batches", "0"], ["--micro-batches 0", "1 to 64"]),
        (["--micro-batches", "65"], ["--micro-batches 65", "1 to 64"]),
        (["--layers", "3"], ["--layers 3", "4 rank(s)", "4 to 64"]),
        (["--layers", "65"], ["--layers 65", "4 to 64"]),
        (["--layers", "64", "--micro-batches", "64"], ["allowed"]),
        (["--layers", "4", "--micro-batches", "1"], ["allowed"]),
        (["--layer", "6"], ["--layer 6"]),
        (["7"], ["7"]),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2_before_any_process_group(options, words, monkeypatch):
    monkeypatch.setattr(pipe, "init_distributed", lambda: pipe.fail("allowed"))
    said = refusal(pipe.main, options, world_size=4)
    assert all(word in said for word in words), said


def test_ranks_and_gpus(monkeypatch):
    """More ranks than GPUs are refused. Else a rank starts NCCL on its own GPU, with one communicator."""
    started = {}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: started.update(gpu=device))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **k: started.update(k, backend=backend) or sys.exit(7)
    )
    monkeypatch.setattr(sys, "argv", ["pipeline_parallel.py"])
    for ranks, code in (("4", 2), ("2", 7)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(io.StringIO()) as err:
            pipe.main()
        refused = "pipeline_parallel.py: --nproc_per_node 4: use at most 2, one for each GPU here\n"
        assert (end.value.code, err.getvalue()) == (code, refused if code == 2 else "")
        assert bool(started) == (code == 7), "a process group was started"
    gpu = torch.device("cuda", 1)
    assert (started["backend"], started["gpu"], started["device_id"]) == ("nccl", gpu, gpu)
