"""The time of forward and backward: the loops, their schedule played, and the sums that the advice rests on."""

import itertools
import math
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from fpdt_attention import ChunkedAttention
from fpdt_costs import Hardware, Sizes, attention_peak, idle_forward, idle_time, network_bytes, pair_seconds, simulate
from fpdt_store import CpuMachine, Op, Store
from fpdt_time import (
    LONG,
    attention_seconds,
    backward_times,
    drawn,
    forward_times,
    main,
    message_seconds,
    recommend,
    schedule,
    seconds_of,
    seconds_table,
    smallest_hidden_chunk,
    steady,
    timeline,
)
from harness.programs import refusal
from harness.ranks import run_ranks

WAYS = ("forward", "backward")
LLAMA = Sizes(S=2**19, P=1, u=1, heads=32, kv_heads=8, head_dim=64)
# Of 24 tokens: pairs and copies of about a second, links from far too slow to far too fast, and costs to start.
SLOW = [
    Hardware(flops, link, start, sharing, network)
    for flops, (link, sharing), (start, network) in itertools.product(
        (3e3, 3e4), ((2e2, 1), (2e3, 4), (2e4, 1)), ((0.0, 1e3), (0.2, 1e4))
    )
]


def real_loops(cases: list[tuple[Sizes, int]]) -> list[dict[str, list[Op]]]:
    """What the loops of fpdt_attention.py gave to the streams, forward and backward."""
    group, found = dist.group.WORLD, []
    for z, slots in cases:
        s, machine = z.c // z.P, CpuMachine(record=True)
        *qkv, dout = [torch.randn(1, z.S // z.P, n, z.head_dim) for n in (z.heads, z.kv_heads, z.kv_heads, z.heads)]
        core = ChunkedAttention(group, z.u, Store(machine), slots=slots)
        rows = [[x[:, i * s : (i + 1) * s] for x in qkv] for i in range(z.u)]
        kept = core.forward(rows.__getitem__, lambda *out: None, dout.device, True)
        forward = list(machine.ops)
        whole = torch.randn(1, z.S, z.n, z.head_dim)
        away = [core.store.offload(chunk) for chunk in whole.split(z.c, 1)]
        before = [Op(op.stream, "before", 0, op.after) for op in machine.ops]
        core.backward(kept, away, lambda *grads: None, dout.device)
        found.append({"forward": forward, "backward": [*before, *machine.ops[len(before) :]]})
    return found


def cases_on(P: int) -> list[tuple[Sizes, int]]:
    return [(Sizes(24, P, u, 4, 2, 4, 4), slots) for u in (1, 2, 3, 6) for slots in (1, 2)]


@cache
def recorded(P: int) -> list[dict[str, list[Op]]]:
    return run_ranks(P, real_loops, cases_on(P))[0]


@pytest.mark.always("1")
@pytest.mark.parametrize("P", [1, 2])
def test_the_idle_time_of_the_advice_is_that_of_the_loops_forward_and_backward(P):
    for (z, slots), ops in zip(cases_on(P), recorded(P), strict=True):
        for h, way in itertools.product(SLOW, WAYS):
            total, idle = attention_seconds(z, h, way, slots)
            spans = simulate(ops[way], lambda op, z=z, h=h: seconds_of(op, z, h))
            end = max(span[1] for op, span in zip(ops[way], spans, strict=True) if op.stream == "compute")
            played = idle_time(ops[way], lambda op, z=z, h=h: seconds_of(op, z, h))
            where = f"{way}, {z.u} chunks, {slots} slots, {P} ranks, {h}"
            assert (total, idle) == pytest.approx((end, played), abs=1e-9), where


def test_a_way_to_the_host_that_is_slower_than_the_way_back_holds_up_the_slots_that_dq_leaves_from():
    for (z, slots), ops in zip(cases_on(1), recorded(1), strict=True):
        for h in SLOW:
            x = seconds_table(z, h, "backward")
            _, idle = backward_times(z.u, replace(x, dq_out=20 * x.dq_out), slots)
            twenty = {id(op): 20 if op.stream == "offload" else 1 for op in ops["backward"]}
            played = idle_time(ops["backward"], lambda op, z=z, h=h, t=twenty: t[id(op)] * seconds_of(op, z, h))
            assert idle == pytest.approx(played, abs=1e-9), (z.u, slots, h)


@pytest.mark.parametrize("P", [1, 2])
def test_the_schedule_that_is_played_and_drawn_is_the_one_of_the_loops(P):
    for (z, slots), ops in zip(cases_on(P), recorded(P), strict=True):
        for way in WAYS:
            h = SLOW[5]
            spans = simulate(ops[way], lambda op, z=z, h=h: seconds_of(op, z, h))
            real = [
                (op.stream, op.name, *span) for op, span in zip(ops[way], spans, strict=True) if op.name != "before"
            ]
            real = [row for row in real if row[2] < row[3]]
            got = timeline(z, h, way, slots)
            assert [row[:2] for row in got] == [row[:2] for row in real], (z, slots, way)
            pairs = sum(op.amount for op in ops[way] if op.name.startswith("attend"))
            assert pairs == z.S * (z.S + 1) / 2, (z, slots, way)
            for a, b in zip(got, real, strict=True):
                assert a[2:] == pytest.approx(b[2:], abs=1e-9), (z, slots, way, a, b)


def test_without_stores_and_messages_a_forward_waits_as_the_closed_form_says():
    for u, f in itertools.product((1, 2, 3, 8), (0.2, 0.9, 1.3, 2.5)):
        x = seconds_table(LLAMA, Hardware(), "forward")
        x = type(x)(own=0.5, pair=1.0, kv=f / 2, q=0.0, lse=0.0, dq=0.0, dq_out=0.0, before=0.9, after=0.2)
        assert forward_times(u, x)[1] == pytest.approx(idle_forward(u, 1.6, 1.0, f), abs=1e-9), (u, f)


def test_a_second_slot_never_waits_longer_and_hides_what_is_shorter_than_a_pair():
    z = Sizes(2**19, 1, 16, 32, 8, 64)
    for way in WAYS:
        one, two = (attention_seconds(z, Hardware(), way, slots)[1] for slots in (1, 2))
        x = seconds_table(z, Hardware(), way)
        assert two < 0.01 * x.pair * z.u * (z.u - 1) / 2
        rest = (z.u - 1) * (z.u - 2) / 2  # pairs but the first of each row, which the row's own work may hide
        assert one > (2 * x.kv if way == "forward" else 3 * x.q) * rest


def test_gpus_that_share_a_link_wait_as_if_each_had_its_share_of_it():
    for z, way in itertools.product((LLAMA.with_chunks(64), LLAMA.with_chunks(4)), WAYS):
        shared, slower = Hardware(link=64e9, sharing=8), Hardware(link=8e9)
        assert attention_seconds(z, shared, way) == pytest.approx(attention_seconds(z, slower, way))
        assert smallest_hidden_chunk(z, shared, way) == 8 * smallest_hidden_chunk(z, Hardware(link=64e9), way)
        assert pair_seconds(z, shared) == pytest.approx(pair_seconds(z, slower))


def test_messages_of_all_chunks_are_what_ulysses_sends():
    for P, u in itertools.product((1, 2, 8), (1, 4)):
        z, h = Sizes(2**16, P, u, 32, 4, 64), Hardware(start=0.0, network=1.0)
        kv_heads = z.n_kv * P
        sent = u * sum(message_seconds(z, h, heads) for heads in (z.heads, kv_heads, kv_heads, z.heads))
        assert sent == network_bytes(z), (P, u)
        back = seconds_table(z, h, "backward")
        assert u * (back.before + back.after) + u * message_seconds(z, h, z.heads) == network_bytes(z)


def test_to_start_a_kernel_or_a_copy_takes_its_time_backward_too():
    """With endless speeds only the starts are left."""
    h = Hardware(flops=math.inf, link=math.inf, start=1.0, network=math.inf)
    x = seconds_table(LLAMA, h, "backward")
    assert (x.pair, x.own, x.kv, x.q, x.lse, x.dq, x.dq_out) == (1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert (x.before, x.after) == (1.0, 2.0), "one message for dq, two for dk and dv"


def test_from_the_smallest_hidden_chunk_on_fetches_take_no_longer_than_their_pair():
    h = Hardware(start=0.0)
    other = replace(LLAMA, P=16, e=4)  # two ranks for each K/V head
    for z, way, u in itertools.product((LLAMA, other), WAYS, (2**n for n in range(12))):
        x, c = seconds_table(z.with_chunks(u), h, way), smallest_hidden_chunk(z, h, way)
        fetch = 2 * x.kv if way == "forward" else 3 * x.q + x.lse + x.dq
        assert (x.pair >= fetch) == (z.S / u >= c), (z, way, u)
    assert smallest_hidden_chunk(LLAMA, h, "backward") > 4 * smallest_hidden_chunk(LLAMA, h)


def test_the_recommended_chunk_is_within_1_percent_of_the_fastest_that_fits_and_both_sides_are_worse():
    for memory in (40e9, 4e9, 1e9):
        best, rows = recommend(LLAMA, Hardware(), memory)
        fastest = min(forward + backward for _, forward, backward, peak in rows if peak <= memory)
        assert sum(attention_seconds(best, Hardware(), way)[0] for way in WAYS) <= 1.01 * fastest
        smaller = [forward + backward for z, forward, backward, _ in rows if z.u >= 8 * best.u]
        assert min(smaller) > 1.01 * fastest, "smaller chunks wait for the link"
        mine = max(attention_peak(best, way) for way in WAYS)
        assert all(peak > mine for z, *_, peak in rows if z.u < best.u), "larger chunks take more memory"
    least = min(peak for *_, peak in rows)
    assert rows[-1][0].c == 64 and recommend(LLAMA, Hardware(), least)[0] is not None, "exactly as many bytes"
    assert recommend(LLAMA, Hardware(), least - 1)[0] is None


def test_with_one_slot_the_advice_counts_fewer_bytes_and_more_seconds():
    z = Sizes(2**13, 4, 1, 32, 8, 64)
    (_, one), (_, two) = (recommend(z, Hardware(link=5e9), 40e9, slots) for slots in (1, 2))
    assert one[0] == two[0] and [row[0].c for row in one] == [8192, 4096, 2048, 1024, 512, 256]
    assert all(less[3] < more[3] for less, more in zip(one[2:], two[2:], strict=True))
    assert one[-1][1] > two[-1][1] and one[-1][2] > two[-1][2]


def test_a_drawing_shows_each_stream_and_even_the_shortest_copy():
    rows = [("compute", "attend back", 0, 2), ("compute", "dq to tokens", 2, 3), ("fetch", "fetch", 0, 1)]
    rows += [("fetch", "fetch", 2, 2.01), ("offload", "offload", 3, 4)]
    assert drawn(rows, 8) == ["compute  |####xx..|", "fetch    |<<..<...|", "offload  |......>>|"]


def test_advice_that_looks_at_forward_alone_would_leave_backward_idle():
    """At the chunk that just hides the fetches of a forward, backward waits more than twice as long as it works."""
    h = Hardware(start=0.0)
    z = Sizes(2**17, 1, 64, 32, 8, 64)  # of 2048 tokens
    assert smallest_hidden_chunk(z, h) <= z.c < 1.1 * smallest_hidden_chunk(z, h)
    (forward, waits), (backward, waits_back) = (attention_seconds(z, h, way) for way in WAYS)
    assert waits / (forward - waits) < 0.06 and waits_back / (backward - waits_back) > 2
    best, rows = recommend(LLAMA, h, 40e9)
    assert best.c >= smallest_hidden_chunk(LLAMA, h, "backward"), rows


def test_what_is_said_of_very_many_chunks_is_what_the_sums_say_to_2_percent(monkeypatch):
    both = zip(WAYS, (forward_times, backward_times), strict=True)
    for slots, link, (way, times) in itertools.product((1, 2), (5e9, 50e9, 500e9), both):
        z = LLAMA.with_chunks(LONG)
        x = seconds_table(z, Hardware(link=link), way)
        rough, (exact, waits) = steady(z.u, x, way, slots), times(z.u, x, slots)
        assert abs(rough / exact - 1) < 0.02, (slots, way, link, rough, exact)
        monkeypatch.setattr("fpdt_time.LONG", LONG - 1)
        total, idle = attention_seconds(z, Hardware(link=link), way, slots)
        monkeypatch.undo()
        assert total == rough and total - idle == pytest.approx(exact - waits), "the rest is work"


def test_a_slower_or_a_shared_link_asks_for_larger_chunks_and_less_memory_for_smaller_ones():
    own, slow, shared = (recommend(LLAMA, h, 40e9)[0] for h in (Hardware(), Hardware(link=5e9), Hardware(sharing=8)))
    assert slow.c > own.c and shared.c > own.c
    assert recommend(LLAMA, Hardware(sharing=8), 1e9)[0].c < shared.c


def test_the_loops_take_one_slot_or_two():
    for slots in (0, 3):
        with pytest.raises(ValueError, match=f"{slots} slots for what comes from the host; use 1 or 2"):
            ChunkedAttention(None, 4, Store(CpuMachine()), slots=slots)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seq", "10"],
        ["--seq", "12"],
        ["--seq", "128", "--ranks", "4"],
        ["--kv-heads", "3"],
        ["--ranks", "3"],
        ["--slots", "3"],
        ["--sharing", "0"],
        ["--tflops", "1e-320"],
        ["--tflops", "nan"],
        ["--link-gb", "inf"],
        ["--network-gb", "-1"],
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(arguments):
    assert arguments[0] in refusal(main, arguments)


def test_the_demo_ends_with_pass_and_every_option_changes_what_it_prints(monkeypatch, capsys):
    seen = []
    changed = "--timeline; --slots 1; --sharing 4; --ranks 4; --ranks 4 --network-gb 1; --tflops 90; --link-gb 9"
    changed += "; --heads 64; --kv-heads 4; --head-dim 128; --memory-gb 0.004; --seq 8192; --seq 64"
    for more in ["", *changed.split("; ")]:
        monkeypatch.setattr(sys, "argv", ["fpdt_time.py", "--seq", "4096", *more.split()])
        assert main() == 0, more
        seen.append(capsys.readouterr().out)
        assert seen[-1].splitlines()[-1] == "PASS"
    assert len(set(seen)) == len(seen)
    assert "use 0.004 or more" in refusal(main, ["--seq", "4096", "--memory-gb", "0.001"])


def test_a_schedule_that_does_not_fit_the_sums_fails_the_demo(monkeypatch, capsys):
    monkeypatch.setattr("fpdt_time.schedule", lambda z, way, slots: schedule(z, way, 1))
    monkeypatch.setattr(sys, "argv", ["fpdt_time.py", "--seq", "16384"])
    assert main() == 1 and capsys.readouterr().out.splitlines()[-1].startswith("FAIL: ")
