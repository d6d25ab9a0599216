"""What schedules.py claims: every list is valid, and its bubble and memory are exactly those that were published."""

import random
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import schedules
from harness.programs import refusal, run_script
from schedules import BW, SCHEDULES, Action, B, F, ScheduleError, Times, W, build, check, published, simulate

HERE = Path(__file__).parent
RANKS, MICRO_BATCHES, STAGES = range(1, 9), range(1, 17), range(1, 5)
ONE_STAGE = ("naive", "afab", "1f1b", "zb-h1", "zb-h2", "dualpipe", "auto")
LOOPED, FOLDED = ("interleaved", "breadth-first", "llama3"), ("zb-v", "v-half", "v-min", "dualpipe-v")


def cases(name):
    """Every (p, m, v) of the grid, and a few far beyond it, that the schedule accepts, by its own rule."""
    per_rank = STAGES if name in LOOPED else (2,) if name in FOLDED else (1,)
    far = () if name == "auto" else ((13, 26), (32, 64) if "dualpipe" in name else (64, 64))
    beyond = [(p, m, per_rank[0]) for p, m in far]
    for p, m, v in [*product(RANKS, MICRO_BATCHES, per_rank), *beyond]:
        fits = {
            "interleaved": m % p == 0,
            "dualpipe": p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
            "dualpipe-v": m >= 2 * p,
        }
        few = name == "auto" and m not in (1, 2, 5, 8, 16)  # it makes a dozen schedules for each
        if fits.get(name, True) and not few:
            yield p, m, v


def words(schedule, rank):
    return " ".join(f"{a.kind}{a.micro_batch}" for a in schedule.actions[rank])


SWEEP = list(
    product(
        [(1, 1, 1), (3, 5, 4), (3, 4, 2), (2, 3, 3), (4, 3, 1), (2, 2, 5), (5, 4, 3), (1, 2, 1)],
        *((2, 3, 4, 6, 8), (1, 2, 3), (0, 0.5, 1), ("p", "p + 1", "2p - 1", "2p")),
    )
)


def auto_is_cheaper(p, m, v, times, limit, by_hand):
    """Whether it is cheaper than all schedules drawn by hand that fit; none of them may be cheaper."""
    found = simulate(build("auto", p, m, v, times=times, limit=limit), times)
    assert max(found.peak_activations) <= limit
    least = float("inf")
    for name in by_hand:
        try:
            other = simulate(build(name, p, m, v), times)
        except ScheduleError:
            continue  # it takes other numbers of micro-batches
        if max(other.peak_activations) <= limit:
            least = min(least, other.cost)
    assert found.cost <= least, f"{p} ranks, {m} micro-batches, {times}, limit {limit}: {found.cost}, not {least}"
    return found.cost < least < float("inf")


def test_auto_is_zb_h1_where_that_is_the_best():
    case = simulate(build("auto", 6, 12, times=Times(3, 5, 4), limit=6), Times(3, 5, 4))
    assert case.bubble == simulate(build("zb-h1", 6, 12), Times(3, 5, 4)).bubble == 25


@pytest.mark.long
@pytest.mark.prove
def test_all_over_the_sweep_auto_is_never_dearer_than_what_was_drawn_by_hand_and_often_cheaper():
    assert len(SWEEP) == 1440
    cheaper, by_hand = 0, ("naive", "afab", "1f1b", "zb-h1", "zb-h2")
    for (f, b, w), p, rounds, communication, memory in random.Random(1).sample(SWEEP, 360):
        limit = {"p": p, "p + 1": p + 1, "2p - 1": 2 * p - 1, "2p": 2 * p}[memory]
        cheaper += auto_is_cheaper(p, p * rounds, 1, Times(f, b, w, communication=communication), limit, by_hand)
    assert cheaper > 75


def test_auto_may_hold_twice_the_ranks_unless_it_is_told_otherwise():
    times = Times(3, 4, 2, communication=1)
    assert auto_cost(4, 8, times) == auto_cost(4, 8, times, 8) < auto_cost(4, 8, times, 7) < auto_cost(4, 8, times, 4)


def test_the_limit_of_auto_is_for_every_rank():
    """Rank 0 of zb-v and v-min holds less than rank 1, and both are cheaper than what keeps to the limit."""
    for limit in (2, 3):
        assert max(simulate(build("auto", 2, 2, 2, limit=limit)).peak_activations) <= limit


def auto_cost(p, m, times, limit=None):
    return simulate(build("auto", p, m, times=times, limit=limit), times).cost


@pytest.mark.always("dualpipe-v")
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_list_up_to_8_ranks_16_micro_batches_4_stages_passes_the_checker_and_has_the_published_bubble(name):
    compared = Counter()
    for p, m, v in cases(name):
        schedule = build(name, p, m, v)
        assert (schedule.name, schedule.ranks, schedule.micro_batches) == (name, p, m)
        assert schedule.stages == (p if name == "dualpipe" else p * v)
        check(schedule)
        timeline = simulate(schedule)
        bubble, held = published(schedule, Times())
        if bubble is not None:
            assert timeline.bubble == bubble, f"bubble of {name} for p={p} m={m} v={v}"
            compared["bubble"] += 1
        if held is not None:
            assert timeline.peak_activations == held, f"activations of {name} for p={p} m={m} v={v}"
            compared["held"] += 1
    assert name == "auto" or min(compared["bubble"], compared["held"]) >= 16


def test_the_bubble_of_afab_and_1f1b_is_p_minus_1_over_m_of_the_ideal_time():
    for name, p, m in product(("afab", "1f1b"), RANKS, MICRO_BATCHES):
        assert simulate(build(name, p, m)).bubble_ratio == (p - 1) / m


def test_the_bubble_of_interleaved_schedules_is_p_minus_1_over_v_m():
    for name, p, v, rounds in product(LOOPED, (1, 2, 3, 5), (1, 2, 3), (1, 3)):
        timeline = simulate(build(name, p, rounds * p, v))
        assert timeline.bubble_ratio == (p - 1) / (v * rounds * p), f"{name} p={p} m={rounds * p} v={v}"


def test_the_long_warm_up_of_interleaving_hides_all_messages_but_those_of_the_first_and_last_micro_batch():
    for p, m, v, c in product((2, 4, 8), (8, 16), (2, 3), (0.25, 1)):
        schedule = build("interleaved", p, m, v)
        free, slow = simulate(schedule).cost, simulate(schedule, Times(communication=c)).cost
        assert slow - free == 2 * (v * p - 1) * c, f"p={p} m={m} v={v}, messages take {c}"


def test_1f1b_holds_p_minus_rank_micro_batches_and_afab_all_of_them():
    for p, m in product(RANKS, MICRO_BATCHES):
        assert simulate(build("1f1b", p, m)).peak_activations == tuple(min(m, p - r) for r in range(p))
        assert simulate(build("afab", p, m)).peak_activations == (m,) * p


@pytest.mark.prove
def test_the_bubbles_of_zb_h1_and_zb_h2_hold_for_unequal_times():
    for p, (f, b, w) in product((1, 2, 3, 5, 8), product((1, 2, 3, 4), repeat=3)):
        if w <= min(f, b):
            for m in (2 * p - 1, 2 * p, 3 * p + 1):
                h1, h2 = (simulate(build(name, p, m), Times(f, b, w)) for name in ("zb-h1", "zb-h2"))
                assert h1.bubble == (p - 1) * (f + b - w)
                assert h2.bubble == (p - 1) * (f + b - 2 * w)
                assert (max(h1.peak_activations), max(h2.peak_activations)) == (p, 2 * p - 1)


def test_zb_v_has_no_bubble_and_the_memory_of_1f1b():
    for p, m in product(RANKS, (15, 16, 24)):
        timeline = simulate(build("zb-v", p, m, 2))
        assert timeline.bubble == 0
        assert set(timeline.peak_activations) == {2 * p}  # halves of a stage: as much as 1F1B's p whole ones


def test_the_bubble_of_dualpipe_holds_for_every_time_of_a_pair():
    for p, (f, w) in product((2, 4, 6), ((1, 1), (3, 1), (3, 2), (4, 4))):
        for pair in range(f + w, 2 * f + w + 1):  # from "the forward is free" to "nothing gained"
            times = Times(f, f, w, pair=pair)
            for m in (2 * p, 2 * p + 2, 4 * p):
                both = simulate(build("dualpipe", p, m), times), simulate(build("dualpipe-v", p // 2, m // 2, 2), times)
                for timeline in both:
                    backward = f + w  # what the paper calls B is the whole backward
                    assert timeline.bubble == (p // 2 - 1) * (pair + backward - 3 * w)
                    assert published(timeline.schedule, times)[0] == timeline.bubble
                    for never in (Times(f, f, w, pair=f + w - 0.5), Times(f, f, w, pair=2 * f + w + 0.5)):
                        assert published(timeline.schedule, never)[0] is None, "below BW, or above both"
                    assert set(timeline.peak_activations) == {p + 1}


@pytest.mark.prove
def test_llama3_takes_any_number_of_micro_batches_in_flight():
    for p, m, v in product((1, 2, 3, 4), (1, 4, 5, 7, 10), (1, 2, 3)):
        smallest = min((n for n in range(p, m) if m % n == 0 or m % n >= p), default=m)  # the default
        assert build("llama3", p, m, v).actions == build("llama3", p, m, v, in_flight=smallest).actions, (p, m, v)
        peaks = []
        for group in range(1, m + 1):
            schedule = build("llama3", p, m, v, in_flight=group)
            check(schedule)
            peaks.append(max(simulate(schedule).peak_activations))
        assert peaks[p - 1 :] == sorted(peaks[p - 1 :]), f"p={p} m={m} v={v}: more in flight must not need less memory"
    depth_first = build("llama3", 4, 8, 2, in_flight=4)
    assert depth_first.actions == build("interleaved", 4, 8, 2).actions


def test_the_lists_of_1f1b_are_those_of_the_paper():
    schedule = build("1f1b", 4, 8)
    assert words(schedule, 0) == "F0 F1 F2 F3 BW0 F4 BW1 F5 BW2 F6 BW3 F7 BW4 BW5 BW6 BW7"
    assert words(schedule, 2) == "F0 F1 BW0 F2 BW1 F3 BW2 F4 BW3 F5 BW4 F6 BW5 F7 BW6 BW7"
    assert words(schedule, 3) == " ".join(f"F{i} BW{i}" for i in range(8))


def test_the_lists_of_the_interleaved_schedule_are_those_of_megatron():
    schedule = build("interleaved", 2, 4, 2)
    got = [f"{a.kind}{a.micro_batch}@{a.stage}" for a in schedule.actions[0]]
    want = "F0@0 F1@0 F0@2 F1@2 F2@0 BW0@2 F3@0 BW1@2 F2@2 BW0@0 F3@2 BW1@0 BW2@2 BW3@2 BW2@0 BW3@0"
    assert got == want.split()


def test_groups_of_micro_batches_pass_through_the_chunks_in_turn():
    assert schedules.order_of_chunks(4, 2, 2) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert schedules.order_of_chunks(5, 2, 3) == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert schedules.order_of_chunks(3, 3, 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert build("llama3", 3, 7, 2).actions == build("llama3", 3, 7, 2, in_flight=4).actions, "3 left is enough"


def test_a_formula_is_given_from_the_first_numbers_on_for_which_it_holds_and_for_no_others():
    for name, m, v, times, want in (
        ("zb-h1", 3, 1, Times(), None),
        ("zb-h1", 4, 1, Times(2, 1, 1), 3 * (2 + 1 - 1)),
        ("zb-h1", 4, 1, Times(1, 1, 2), None),
        ("zb-h2", 6, 1, Times(), None),
        ("zb-h2", 7, 1, Times(1, 2, 1), 3 * (1 + 2 - 2)),
        ("zb-v", 6, 2, Times(), None),
        ("zb-v", 7, 2, Times(2, 2, 2), 0),
        ("zb-v", 7, 2, Times(1, 2, 1), None),
        ("v-min", 4, 2, Times(), None),
        ("v-min", 5, 2, Times(2, 2, 2), 2 * (4 * 4 - 5)),
        ("breadth-first", 3, 2, Times(), None),
        ("1f1b", 4, 1, Times(communication=1), None),
        ("1f1b", 4, 1, Times([1, 1, 1, 1]), None),
    ):
        assert published(build(name, 4, m, v), times)[0] == want, f"{name}, m={m}, {times}"
    for name, m, v in (("afab", 2, 1), ("1f1b", 2, 1), ("zb-h1", 2, 1), ("zb-h2", 2, 1), ("llama3", 4, 2)):
        few = build(name, 4, m, v)
        assert published(few, Times())[1] == simulate(few).peak_activations, f"{name} holds all {m} micro-batches"
    assert published(build("llama3", 3, 7, 2, in_flight=5), Times()) == (None, None), "2 are left for 3 ranks"
    assert published(build("llama3", 3, 7, 2, in_flight=4), Times())[0] == 2 * 3, "and as many as ranks are enough"
    assert published(build("llama3", 3, 7, 2, in_flight=2), Times()) == (None, None)
    check(build("llama3", 4, 8, 2, in_flight=1))  # with the warm-up of larger groups ranks 0 and 3 wait for each other


def test_the_w_of_the_last_rank_waits_until_memory_is_full():
    assert words(build("zb-h1", 3, 5), 2) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4"
    assert words(build("zb-h1", 3, 5), 0) == "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4"
    assert words(build("zb-h2", 2, 4), 1) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


def test_a_folded_schedule_turns_on_the_last_rank_and_ends_where_it_began():
    for name in FOLDED:
        schedule = build(name, 4, 8, 2)
        assert schedule.placement == ((0, 1, 2, 3, 3, 2, 1, 0),)
        assert schedule.stages_of(0) == [(0, 0), (0, 7)]


def test_dualpipe_sends_half_the_micro_batches_the_other_way_and_both_halves_are_mirror_images():
    schedule = build("dualpipe", 4, 8)
    assert schedule.placement == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert [schedule.direction(i) for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert schedule.stages_of(1) == [(0, 1), (1, 2)]
    assert schedule.rank_of(0, 3) == 0 and schedule.rank_of(0, 4) == 3
    for rank in range(4):
        mirrored = [replace(a, micro_batch=(a.micro_batch + 4) % 8) for a in schedule.actions[rank]]
        assert tuple(mirrored) == schedule.actions[3 - rank]


def test_a_pair_is_a_forward_and_a_whole_backward_of_opposite_chunks():
    for name, p, m, v in (("dualpipe", 4, 10, 1), ("dualpipe-v", 3, 8, 2)):
        schedule = build(name, p, m, v)
        pairs = 0
        for row in schedule.actions:
            for first, second in pairwise(row):
                if second.overlapped:
                    assert (first.kind, second.kind, first.overlapped) == (F, BW, False)
                    assert first.stage != second.stage
                    pairs += 1
        assert pairs >= p * m / 2
    row = build("dualpipe-v", 3, 8, 2).actions[2]  # the rank where the V turns: its first BW is awaited at once
    assert [a.overlapped for a in row if a.kind == BW][:2] == [False, True]


def torch_lists(name, p, m, v, rank):
    """The list that torch.distributed.pipelining makes, as our actions; its own code, none of ours."""
    from torch.distributed.pipelining import schedules as referee

    if name == "interleaved":
        warm_up = min(m * v, (v - 1) * p + 2 * (p - 1 - rank))
        forward = lambda step: (step // p % v) * p + rank  # noqa: E731
        backward = lambda step: (v - 1 - (step - warm_up) // p % v) * p + rank  # noqa: E731
        steady = m * v - warm_up
        ops = referee._get_1f1b_rank_ops(v, p, warm_up, steady, m * v - steady, rank, forward, backward)
    else:
        kind = {"zb-v": referee.ScheduleZBVZeroBubble, "dualpipe-v": referee.ScheduleDualPipeV}[name]
        maker = object.__new__(kind)
        maker.pp_group_size, maker._num_stages, maker.num_stages, maker._n_microbatches = p, 2 * p, 2 * p, m
        ops = maker._calculate_single_rank_operations(rank)
    kinds = {"F": F, "I": B, "W": W, "B": BW}
    result = []
    for op in ops:
        if op is None:
            continue
        both = op.sub_actions if getattr(op, "sub_actions", None) else (op,)
        for i, one in enumerate(both):
            result.append(Action(kinds[one.computation_type.value], one.stage_index, one.microbatch_index, i == 1))
    return tuple(result)


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipe-v"])
def test_the_order_is_the_one_that_pytorch_runs(name):
    for p, m in ((2, 4), (3, 6), (4, 8), (4, 12), (5, 20)):
        schedule = build(name, p, m, 2)
        for rank in range(p):
            if name == "zb-v":  # which W comes first at the very end is free: the W's of both stages in any order
                got, want = schedule.actions[rank], torch_lists(name, p, m, 2, rank)
                assert [a for a in got if a.kind != W] == [a for a in want if a.kind != W]
                assert sorted(map(str, got)) == sorted(map(str, want))
                assert [a.kind for a in got] == [a.kind for a in want]
            else:
                assert schedule.actions[rank] == torch_lists(name, p, m, 2, rank), f"rank {rank} of {p}"


BAD = {
    ("1f1b-ish", 4, 8, 1): "'1f1b-ish' is no schedule; use one of naive, afab",
    ("1f1b", 0, 8, 1): "0 ranks; use 1 or more",
    ("1f1b", 4, 0, 1): "0 micro-batches; use 1 or more",
    ("1f1b", 4, 8, 2): "2 stages per rank; use 1, or one of interleaved",
    ("auto", 4, 8, 3): "3 stages per rank; use 1, or 2 in a V or in loops",
    ("v-min", 4, 8, 1): "1 stages per rank; use 2",
    ("interleaved", 4, 8, 0): "0 stages per rank; use 1 or more",
    ("interleaved", 4, 6, 2): "6 micro-batches are no multiple of 4 ranks; use 8, or llama3",
    ("zb-v", 4, 8, 1): "1 stages per rank; use 2",
    ("dualpipe-v", 4, 8, 3): "3 stages per rank; use 2",
    ("dualpipe-v", 4, 7, 2): "7 micro-batches are too few for 4 ranks; use at least 8",
    ("dualpipe", 3, 8, 1): "3 ranks; use an even number",
    ("dualpipe", 4, 6, 1): "6 micro-batches for 4 ranks; use an even number of at least 8",
    ("dualpipe", 4, 9, 1): "9 micro-batches for 4 ranks; use an even number of at least 8",
}


@pytest.mark.parametrize("given", BAD, ids=str)
def test_what_does_not_fit_is_one_line_that_names_the_rule(given):
    with pytest.raises(ScheduleError, match=re.escape(BAD[given])) as caught:
        build(*given)
    assert "\n" not in str(caught.value)


def run(*given):
    return run_script(HERE / "schedules.py", *given)


def test_the_demo_compares_every_schedule_with_its_formula_and_passes():
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "PASS"
    assert [line.split()[0] for line in lines[1:-1]] == list(SCHEDULES)
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert rows["1f1b"] == ["4", "8", "1", "9", "9", "0.375", "4", "4"]
    assert (rows["dualpipe"][2], *rows["dualpipe"][-2:]) == ("2", "5", "5"), "two stages on each rank"
    done = run("--schedule", "interleaved", "--stages-per-rank", "3", "--times", "2,3,1,1")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "PASS")
    done = run("--ranks", "3", "--micro-batches", "4", "--times", "0.3,0.3,0.1")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "PASS")
    assert "left out: dualpipe: 3 ranks; use an even number" in done.stdout


def test_one_stage_of_four_that_takes_a_quarter_longer_costs_what_the_readme_says():
    for m, percent in ((64, 23), (4, 7)):
        longer = [1, 1.25, 1, 1]
        spans = [simulate(build("1f1b", 4, m), times).makespan for times in (Times(longer, longer, longer), Times())]
        assert round(100 * (spans[0] / spans[1] - 1)) == percent


def test_in_the_table_auto_is_built_for_the_times_that_are_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["schedules.py", "--times", "1,1,1,5"])
    times = Times(1, 1, 1, communication=5)
    assert schedules.arguments().schedules[-1] == build("auto", 4, 8, times=times) != build("auto", 4, 8)
    cases = {"auto --limit 4": (1, {"limit": 4}), "llama3 --in-flight 5": (2, {"in_flight": 5})}
    for given, (v, options) in (cases | {"interleaved --stages-per-rank 3": (3, {})}).items():
        monkeypatch.setattr(sys, "argv", ["schedules.py", "--schedule", *given.split()])
        assert schedules.arguments().schedules == [build(given.split()[0], 4, 8, v, **options)], given


@pytest.mark.parametrize("formula", [(123.0, None), (None, (9, 9, 9, 9))])
def test_a_simulation_that_misses_its_formula_ends_the_demo_with_1_and_the_numbers(formula, monkeypatch, capsys):
    monkeypatch.setattr(schedules, "published", lambda schedule, times: formula)
    monkeypatch.setattr(sys, "argv", ["schedules.py", "--schedule", "1f1b"])
    assert schedules.main() == 1
    assert "1f1b: simulated and published differ" in capsys.readouterr().out.splitlines()[-1]


def test_a_wrong_option_is_one_line_with_option_value_and_remedy():
    for given, said in (
        (["--schedule", "gpipe"], "--schedule 'gpipe' is no schedule; use one of"),
        (["--schedule", ""], "--schedule '' is no schedule; use one of"),
        (["--draw-all", ""], "--draw-all: '': name a file or a folder"),
        (["--ranks", "3", "--schedule", "dualpipe"], "--schedule dualpipe: 3 ranks; use an even number"),
        (["--in-flight", "4"], "--in-flight 4 needs --schedule llama3"),
        (["--schedule", "llama3", "--in-flight", "0"], "0 micro-batches in flight; use 1 to 8"),
        (["--schedule", "llama3", "--in-flight", "9"], "9 micro-batches in flight; use 1 to 8"),
        (["--schedule", "1f1b", "--limit", "4"], "--limit 4 needs --schedule auto"),
        (["--schedule", "auto", "--limit", "0"], "--limit 0"),
        (["--stages-per-rank", "0"], "--stages-per-rank 0: use 1 to 256"),
        (["--times", "1,1"], "--times: '1,1': give F,B,W, all > 0, or F,B,W,C"),
        (["--times", "1,1,1,nan"], "--times: '1,1,1,nan': give F,B,W, all > 0, or F,B,W,C"),
        (["--times", "1,1,1,inf"], "--times: '1,1,1,inf': give F,B,W, all > 0, or F,B,W,C"),
        (["--times", "1,1,1,-1"], "--times: '1,1,1,-1': give F,B,W, all > 0, or F,B,W,C"),
        (["--times", "nan,1,1"], "--times: 'nan,1,1': give F,B,W, all > 0, or F,B,W,C"),
        (["--ranks", "100000"], "--ranks 100000: use 1 to 256"),
        (["--micro-batches", "0"], "--micro-batches 0: use 1 to 4096"),
        (
            ["--ranks", "64", "--micro-batches", "65"],
            "--ranks 64 --micro-batches 65: 4160 is too many; at most 4096 here",
        ),
        (["--schedule", "1f1b", "--ranks", "256", "--micro-batches", "257"], "65792 is too many; at most 65536"),
        (["--schedule", "auto", "--ranks", "33", "--micro-batches", "32", "--stages-per-rank", "2"], "at most 2048"),
        (["--stages-per-rank", "256"], "--ranks 4 --micro-batches 8 --stages-per-rank 256: 8192 is too many"),
        (
            ["--schedule", "interleaved", "--ranks", "256", "--micro-batches", "256", "--stages-per-rank", "256"],
            "--ranks 256 --micro-batches 256 --stages-per-rank 256: 16777216 is too many; at most 65536 here",
        ),
        (["--schedule", "1f1b", "--svg", "."], "--svg . is a folder"),
        (["--draw-all", __file__], "is a file; name a folder"),
        (["--draw-all", "x", "--ranks", "8"], "--draw-all draws with sizes and times of its own; leave out --ranks"),
        (["--draw-all", "x", "--micro-batches", "4"], "leave out --micro-batches"),
        (["--draw-all", "x", "--stages-per-rank", "3"], "leave out --stages-per-rank"),
        (["--draw-all", "x", "--times", "1,1,1,5"], "leave out --times"),
        (["--svg", "x.svg"], "--svg x.svg needs --schedule NAME"),
        (["--schedule", "1f1b", "--svg", "no/such/x.svg"], "there is no folder no/such"),
    ):
        assert said in refusal(schedules.main, given)
