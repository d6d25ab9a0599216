"""Idle time of a forward against a simulation, the paper's table. Bytes are held against meters by
test_fpdt_attention.py and test_fpdt_model.py."""

import itertools
import math
import sys

import pytest
from fpdt_costs import (
    PAPER,
    Hardware,
    Sizes,
    attention_peak,
    host_peak,
    idle_forward,
    idle_time,
    link_bytes,
    main,
    network_bytes,
    pair_seconds,
    paper_table,
    record_forward,
    simulate,
)
from fpdt_store import CpuMachine, Op, Prefetch, Store
from harness.programs import refusal

LLAMA = Sizes(S=2**19, P=1, u=1, heads=32, kv_heads=8, head_dim=64)


def test_an_operation_starts_when_its_stream_is_free_and_its_events_have_happened():
    ops = [
        Op("compute", "a", 3, {"compute": 0, "fetch": 0}),
        Op("fetch", "b", 1, {"compute": 0, "fetch": 0}),
        Op("fetch", "c", 1, {"compute": 1, "fetch": 1}),
        Op("compute", "d", 2, {"compute": 1, "fetch": 1}),
        Op("compute", "e", 1, {"compute": 2, "fetch": 2}),
    ]
    times = simulate(ops, lambda op: op.amount)
    assert times == [(0, 3), (0, 1), (3, 4), (3, 5), (5, 6)]
    assert idle_time(ops, lambda op: op.amount) == 0
    assert idle_time(ops, lambda op: 10 if op.name == "c" else op.amount) == 13 - 5


GRID = list(itertools.product((1, 2, 3, 4, 7), (0.4, 1.2, 3.0), (0.1, 0.9, 1.0, 1.3, 2.2, 3.5)))


def test_idle_time_of_the_schedule_equals_the_closed_form_whatever_compute_and_fetch_cost():
    for u, a, f in GRID:
        own = min(0.5, a / 2)  # of `a`, attention of the chunk to itself; the rest is projecting and finishing
        if f / 2 > a + own:
            continue  # then storing the first k̂ is late, which the formula leaves out
        costs = {"project": (a - own) / 2, "finish": (a - own) / 2, "fetch": f / 2, "offload": f / 2}

        def seconds(op: Op, costs=costs, own=own) -> float:
            return costs.get(op.name, {1: own, 2: 1.0}.get(op.amount, 0.0))

        got, want = idle_time(record_forward(u), seconds), idle_forward(u, a, 1.0, f)
        assert abs(got - want) < 1e-9, f"{u} chunks, a = {a}, f = {f}: simulated {got}, formula {want}"


def idle_of(sets: int, t: float, f: float, count: int = 12) -> float:
    import torch

    store = Store(CpuMachine(record=True))
    hosts = [store.offload(torch.zeros(1)) for _ in range(count)]
    prefetch = Prefetch(store, range(count), lambda n: [hosts[n]], torch.device("cpu"), sets)
    for _ in range(count):
        store.compute("use", 1, reads=prefetch.take())
        prefetch.done()
    return idle_time(store.machine.ops, lambda op: {"use": t, "fetch": f}.get(op.name, 0.0))


def test_on_a_walk_of_equal_steps_one_buffer_waits_for_every_fetch_two_for_the_first_and_a_third_gains_nothing():
    for t, f in ((1.0, 0.5), (1.0, 1.0), (1.0, 2.5)):
        assert idle_of(1, t, f) == pytest.approx(12 * f)
        assert idle_of(2, t, f) == pytest.approx(f + 11 * max(0.0, f - t))
        assert idle_of(3, t, f) == pytest.approx(idle_of(2, t, f))


@pytest.mark.parametrize(("fetch", "two", "three"), [(1.0, 1.0, 1.0), (1.25, 5.0, 1.6), (2.0, 21.8, 21.8)])
def test_a_third_slot_gains_something_where_a_fetch_takes_a_little_longer_than_a_pair(fetch, two, three):
    """While a row of 8 chunks does its own work, 1.2 pairs long, three slots can fill."""
    costs = {"project": 0.5, "finish": 0.2, "fetch": fetch / 2, "offload": fetch / 2}
    for sets, want in ((2, two), (3, three)):
        got = idle_time(record_forward(8, sets), lambda op: costs.get(op.name, op.amount / 2))
        assert got == pytest.approx(want), f"{sets} slots, fetches of {fetch}: idle for {got} pairs"


def test_to_start_a_kernel_or_a_copy_takes_its_time_too():
    """With endless speeds only the starts are left: one kernel, and a copy each of the keys and of the values."""
    h = Hardware(flops=math.inf, link=math.inf, start=1.0)
    assert pair_seconds(LLAMA, h) == (1.0, 2.0)


def test_bytes_on_the_network_are_those_of_whole_heads_for_any_ranks_and_kv_heads_whatever_the_chunks():
    """A K/V head is repeated until all ranks have as many. Of its tokens' heads a rank keeps one P-th."""
    for P, kv_heads, u in itertools.product(range(1, 9), range(1, 9), (1, 4)):
        repeated = next(n for n in itertools.count(kv_heads, kv_heads) if n % P == 0)
        of_a_rank = 2 * P * kv_heads // P + 2 * repeated // P  # q and output; k and v
        z = Sizes(16 * P, P, u, heads=P * kv_heads, kv_heads=kv_heads, head_dim=3)
        assert z.n_kv * P == repeated, z
        assert network_bytes(z) == (P - 1) * of_a_rank * 16 * 3 * 2, z


def test_the_table_beside_published_totals_takes_half_of_14_tensors_off_and_says_how_many_would_be_exact():
    """Only the arithmetic is held here. That there are 14 is an assumption, made with the second column in sight."""
    for row, (model, one, two, formula, exact) in zip(PAPER, paper_table(), strict=True):
        tensor = 262_144 * row.hidden * 2 / 1e9  # GB: 256K tokens in bf16
        assert (model, one, two) == (row.model, row.one, row.two)
        assert formula == pytest.approx(one - 14 * tensor / 2)
        assert two == pytest.approx(one - exact * tensor / 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seq", "0"],
        ["--kv-heads", "3"],
        ["--memory-gb", "2"],
        ["--heads", "64", "--paper"],
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(arguments):
    assert arguments[0] in refusal(main, arguments)


def test_the_demo_ends_with_pass_its_table_holds_the_formulas_and_nan_fails_it(monkeypatch, capsys):
    z = LLAMA.with_chunks(4)
    link = [sum(both) for both in zip(link_bytes(z, "forward, kept"), link_bytes(z, "backward"), strict=True)]
    want = [attention_peak(z, "forward"), attention_peak(z, "backward"), host_peak(z), *link]
    ones = ["--seq", "1", "--heads", "1", "--kv-heads", "1", "--head-dim", "1"]  # the least that is let through
    for arguments in (["--paper"], ones, []):
        monkeypatch.setattr(sys, "argv", ["fpdt_costs.py", *arguments])
        assert main() == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "PASS"
    assert ["4", "131,072", *(f"{x / 1e9:.4g}" for x in want)] in [line.split() for line in lines]
    monkeypatch.setattr("fpdt_costs.idle_forward", lambda *given: math.nan)
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: idle time at fetch 0.25: predicted nan")
