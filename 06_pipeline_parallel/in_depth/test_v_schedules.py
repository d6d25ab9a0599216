"""What v_schedules.py claims: blocks that never meet, the memory chosen beforehand, and orders near the optimum."""

import random
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import v_schedules
from harness.programs import refusal, run_script
from schedule_search import Exhaustive, exhaustive
from schedule_simulator import Action, B, F, Schedule, ScheduleError, Times, W, check, simulate
from schedules import FOLDED, LOOPED, build, compare
from test_schedules import auto_is_cheaper
from v_schedules import ORDERS, WAYS, automatic_v, block, greedy_v, predicted, starts, v_half, v_min, v_shape

HERE = Path(__file__).parent


def of_the_paper(name, p, r):
    """The starts of F, F, B, B on rank r as arXiv 2405.15362 gives them, by cases of p."""
    if name == "v-min":
        late = 2 if p % 3 == 0 else 0
        return r, 2 * p - 1 - r, 2 * p + late + r, 4 * p + late - 1 - r
    late = 3 if p % 2 == 0 else 0
    return 2 * r, 3 * p - r - 2, 3 * p + late + 2 * r - 1, 6 * p + late - r - 2


def test_the_shortest_pauses_are_those_of_the_paper():
    for name, p in product(WAYS, range(2, 20)):
        assert block(p, WAYS[name]) == [of_the_paper(name, p, r) for r in range(p)], f"{name} on {p} ranks"


def test_a_way_through_the_v_takes_its_steps_and_its_pauses():
    assert starts(3, (1, 1, 1, 1), (0, 2, 0)) == [(0, 5, 8, 13), (1, 4, 9, 12), (2, 3, 10, 11)]
    assert starts(2, (2, 1, 3, 1), (4, 0, 1)) == [(0, 8, 9, 15), (2, 7, 12, 14)]


def test_ways_that_always_meet_are_refused():
    with pytest.raises(ScheduleError, match="meet on some of 6 ranks, whatever the pauses"):
        block(6, (2, 2, 1, 1))


def test_what_is_held_and_the_bubble_are_those_predicted():
    for (name, make), p in product((("v-min", v_min), ("v-half", v_half)), range(1, 11)):
        for m in (p + 1, 2 * p + 3) if p < 8 else (p + 1,):
            schedule = make(p, m)
            check(schedule)
            timeline = simulate(schedule)
            assert (timeline.bubble, timeline.peak_activations) == predicted(name, p), f"{name} p={p} m={m}"
    assert compare(build("v-min", 5, 6, 2), Times())[0][-2:] == ["6", "6"], "on other ranks; rank 0 holds 4"


def test_v_min_holds_a_third_and_v_half_a_half_of_what_1f1b_holds():
    for name, share in (("v-min", 1 / 3), ("v-half", 1 / 2)):
        shares = [max(simulate(build(name, p, p + 1, 2)).peak_activations) / (2 * p) for p in (6, 12, 24)]
        for p, got in zip((6, 12, 24), shares, strict=True):
            assert share < got <= share + 2 / p, f"{name} holds {got} of 1F1B's on {p} ranks"
        assert shares == sorted(shares, reverse=True)


def test_unequal_times_cost_v_min_more_with_each_micro_batch_and_v_half_nothing():
    times = Times(3, 4, 2)
    bubbles = {name: [simulate(build(name, 4, m, 2), times).bubble for m in (8, 16, 32)] for name in WAYS}
    assert bubbles["v-half"][0] == bubbles["v-half"][1] == bubbles["v-half"][2]
    assert bubbles["v-min"][1] - bubbles["v-min"][0] >= 8
    assert bubbles["v-min"][2] - bubbles["v-min"][1] >= 16


def test_the_automatic_v_is_valid_and_keeps_its_limit_down_to_two():
    rng = random.Random(0)
    for _ in range(12):
        p, m, limit = rng.randint(1, 4), rng.randint(1, 6), rng.randint(2, 9)
        times = Times(*([rng.randint(1, 6) for _ in range(2 * p)] for _ in range(3)), communication=rng.randint(0, 2))
        schedule = automatic_v(p, m, times, limit)
        check(schedule)
        assert schedule.placement == (v_shape(p),)
        assert max(simulate(schedule, times).peak_activations) <= limit
    with pytest.raises(ScheduleError, match="a limit of 1: in a V each micro-batch holds two"):
        automatic_v(2, 2, Times(), 1)


def test_the_automatic_v_has_the_simulators_clock():
    """On one rank nothing is sent, and that takes no time. A rank that is not patient never idles with a W to do."""
    rng = random.Random(0)
    for order, _ in product(ORDERS, range(8)):
        p, m, limit = rng.randint(1, 4), rng.randint(1, 6), rng.randint(3, 9)
        work = [[rng.randint(1, 6) for _ in range(2 * p)] for _ in range(3)]
        times, at_once = Times(*work, communication=rng.randint(1, 5)), Times(*work)
        greedy = partial(greedy_v, p, m, limit=limit, caps=(limit - 1,) * p, order=order)
        if p == 1:
            assert greedy(times, patient=True).actions == greedy(at_once, patient=True).actions
        timeline = simulate(greedy(times, patient=False), times)
        for actions, began, ends in zip(timeline.schedule.actions, timeline.start, timeline.end, strict=True):
            left = 0  # W's to do
            for action, start, free in zip(actions, began, (0, *ends), strict=False):
                assert start == free or left == 0, f"{action} is waited for with {left} W's to do"
                left += {B: 1, W: -1}.get(action.kind, 0)
    for w, patient, turn in ((3, True, B), (3, False, W), (2, True, W)):  # at 7, and a gradient comes to rank 0 at 9
        case = greedy_v(2, 2, Times(1, [1, 3, 1, 1], w), 4, (3, 3), ORDERS[0], patient)
        assert case.actions[0][6].kind == turn, f"W takes {w}, patient: {patient}"


def test_more_memory_buys_less_bubble():
    costs = [simulate(automatic_v(4, 8, Times(), limit)).bubble for limit in (2, 4, 6)]
    assert costs[0] > 3 * costs[1] and costs[2] < costs[1]


ONE_BY_ONE = ((F, 0), (F, 1), (B, 1), (W, 1), (B, 0), (W, 0))  # kind and chunk


def one_by_one(p, m):
    """One micro-batch down, up, down and up before the next: it fits everywhere and is as slow as can be."""
    lists = [
        tuple(Action(kind, (r, 2 * p - 1 - r)[chunk], i) for i in range(m) for kind, chunk in ONE_BY_ONE)
        for r in range(p)
    ]
    return Schedule("one by one", p, 2 * p, m, (v_shape(p),), tuple(lists))


def test_without_a_limit_a_rank_of_the_automatic_v_may_hold_4p_half_stages(monkeypatch):
    limits = set()
    monkeypatch.setattr(v_schedules, "greedy_v", lambda p, m, times, limit, *_: limits.add(limit) or one_by_one(p, m))
    automatic_v(3, 2)
    build("auto", 3, 2, 2)
    assert limits == {12}


@pytest.mark.prove
def test_the_search_proves_how_far_the_v_schedules_are_from_the_best():
    gaps = {}
    for p, m, times, limit in product((2,), (2, 3), (Times(), Times(2, 3, 3), Times(3, 4, 2)), (2, 3, 4)):
        if m == 3 and (limit > 2 or times.f > 1):
            continue  # seconds each
        start = one_by_one(p, m)
        best, optimum, _ = exhaustive(p, m, times, limit, start)
        check(best)
        assert best.placement == (v_shape(p),)
        assert simulate(best, times).cost == optimum <= simulate(start, times).cost
        assert max(simulate(best, times).peak_activations) <= limit
        found = simulate(build("auto", p, m, 2, times=times, limit=limit), times).cost
        gaps[m, times.f, limit] = found / optimum - 1
        for name in ("v-min", "v-half", "zb-v"):
            by_hand = simulate(build(name, p, m, 2), times)
            assert by_hand.cost >= optimum or max(by_hand.peak_activations) > limit
    assert min(gaps.values()) >= 0 and max(gaps.values()) <= 0.2, gaps
    assert sum(gap == 0 for gap in gaps.values()) >= 3


def test_in_a_v_the_search_finds_what_trying_every_order_finds():
    """One micro-batch on two ranks: 20 orders on each of them, with both its chunks."""

    def orders(r):
        kinds = [Action(kind, stage, 0) for stage in (r, 3 - r) for kind in (F, B, W)]

        def grow(row, left):
            if not left:
                yield row
            for action in left:
                before = {F: (), B: (F,), W: (B,)}[action.kind]
                if all(Action(kind, action.stage, 0) in row for kind in before):
                    yield from grow((*row, action), [other for other in left if other != action])

        return list(grow((), kinds))

    assert len(orders(0)) == 20
    for times in (Times(1, 2, 3, communication=1), Times([1, 2, 3, 4], [4, 1, 1, 2], [2, 5, 1, 3])):
        best = float("inf")
        for lists in product(orders(0), orders(1)):
            try:
                best = min(best, simulate(Schedule("any", 2, 4, 1, (v_shape(2),), lists), times).cost)
            except ScheduleError:
                continue
        assert Exhaustive(2, 1, times, 2, v_shape(2)).run(one_by_one(2, 1), float("inf"))[1] == best
        assert exhaustive(2, 1, times, 2, one_by_one(2, 1))[1] == best, "it has the placement of its start"


def test_in_a_v_of_unequal_stages_the_bound_cuts_off_no_best_schedule():
    drawn = random.Random(0)
    for _ in range(40):
        times = Times(*([drawn.choice((1, 2, 6)) for _ in range(4)] for _ in (F, B, W)))
        search, slow = (Exhaustive(2, 2, times, 2, v_shape(2)) for _ in range(2))
        slow.bound = lambda counts, free, first: max(b - (a or 0.0) for a, b in zip(first, free, strict=True))
        found, best = (each.run(one_by_one(2, 2), float("inf"))[1] for each in (search, slow))
        assert found == best, f"{times}: {found}, not {best}"


SWEEP = [
    (times, p, rounds, communication, memory)
    for times, (p, rounds), communication, memory in product(
        [(1, 1, 1), (3, 5, 4), (3, 4, 2), (2, 3, 3), (4, 3, 1), (2, 2, 5)],
        ((2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (6, 1)),
        (0, 1),
        ("2p/3", "p", "2p", "3p"),
    )
]


@pytest.mark.prove
def test_with_two_stages_a_rank_auto_is_never_dearer_than_what_was_drawn_by_hand_and_often_cheaper():
    assert len(SWEEP) == 288
    cheaper = 0
    for (f, b, w), p, rounds, communication, memory in SWEEP:
        m, times = p * rounds + (rounds == 2), Times(f, b, w, communication=communication)
        limit = {"2p/3": 2 * ((p + 1) // 3) + 2, "p": p + 2, "2p": 2 * p, "3p": 3 * p}[memory]
        cheaper += auto_is_cheaper(p, m, 2, times, limit, (*FOLDED, *LOOPED))
    assert cheaper > 100


def test_the_limit_of_auto_counts_half_stages_in_a_v():
    assert max(simulate(build("auto", 4, 8, 2, limit=4)).peak_activations) <= 4
    assert simulate(build("auto", 4, 8, 2)).bubble == 0
    with pytest.raises(ScheduleError, match="a limit of 1 activations; use 2 or more, one for each stage"):
        build("auto", 4, 8, 2, limit=1)


def run(*given):
    return run_script(HERE / "v_schedules.py", *given)


def test_the_demo_passes_and_a_wrong_option_is_one_line():
    done = run("--ranks", "6")
    rows = [line.split() for line in done.stdout.splitlines()[1:3]]
    assert rows == [["v-min", "21", "21", "6", "6", "0.50"], ["v-half", "19", "19", "8", "8", "0.67"]]
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "PASS")
    for given in (
        ["--ranks", "0"],
        ["--ranks", "65"],
        ["--micro-batches", "4"],
        ["--micro-batches", "257"],
        ["--micro-batches", "x"],
        ["--limit", "3"],
    ):
        said = refusal(HERE / "v_schedules.py", given)
        assert given[0] in said and given[1] in said


@pytest.mark.parametrize(("options", "m"), [([], 14), (["--micro-batches", "9"], 9), (["--micro-batches", "7"], 7)])
def test_a_prediction_that_misses_ends_the_demo_with_1_and_the_numbers(options, m, monkeypatch, capsys):
    sizes = []
    monkeypatch.setattr(v_schedules, "v_min", lambda p, m: sizes.append((p, m)) or v_min(p, m))
    monkeypatch.setattr(v_schedules, "predicted", lambda name, p: (19, (8,) * p))  # right for V-Half
    monkeypatch.setattr(sys, "argv", ["v_schedules.py", "--ranks", "6", *options])
    assert v_schedules.main() == 1
    assert sizes == [(6, m)]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "v-min: bubble 21, holds (6, 6, 6, 6, 6, 6); not 19, (8, 8, 8, 8, 8, 8)"
