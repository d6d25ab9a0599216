"""What schedule_search.py claims: the heuristic is valid and near the optimum, and the search finds that optimum."""

import random
import sys
from itertools import permutations, product
from pathlib import Path

import pytest
import schedule_search
from harness.programs import refusal, run_script
from schedule_drawings import text
from schedule_search import Exhaustive, automatic, cheapest, exhaustive, greedy, schedule_of
from schedule_simulator import ScheduleError, Times, check, peak_activations, simulate

HERE = Path(__file__).parent


def words_of(m):
    """Every order of one rank: m F's, B's and W's, in which the k-th B follows the k-th F, the k-th W the k-th B."""

    def grow(word, f, b, w):
        if w == m:
            yield word
        if f < m:
            yield from grow([*word, "F"], f + 1, b, w)
        if b < f:
            yield from grow([*word, "B"], f, b + 1, w)
        if w < b:
            yield from grow([*word, "W"], f, b, w + 1)

    return list(grow([], 0, 0, 0))


def best_of_all(p, m, times, limit):
    """The optimum by trying everything; no pruning."""
    best = float("inf")
    for words in product(words_of(m), repeat=p):
        schedule = schedule_of(list(words), m)
        if max(peak_activations(row) for row in schedule.actions) <= limit:
            try:
                best = min(best, simulate(schedule, times).cost)
            except ScheduleError:
                continue  # a deadlock
    return best


CASES = [
    (2, 3, Times(3, 4, 2, communication=1), 3),
    (2, 3, Times(2, 3, 3), 1),
    (2, 3, Times([1, 3], [2, 1], [3, 2], communication=2), 2),
    (3, 2, Times(2, 5, 1, communication=1), 2),
    (3, 2, Times([1, 2, 4], [3, 1, 2], [2, 2, 1]), 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_search_finds_what_trying_every_order_finds(case):
    p, m, times, limit = case
    best, cost, _ = exhaustive(p, m, times, limit)
    check(best)
    assert cost == simulate(best, times).cost == best_of_all(p, m, times, limit)


def test_the_search_finds_the_optimum_from_a_bad_start_as_well():
    for p, m, times, limit in [*CASES, (2, 4, Times(), 3), (3, 4, Times(), 5), (3, 3, Times(3, 4, 2), 2)]:
        start = schedule_of([["F", "B", "W"] * m] * p, m)  # one micro-batch at a time
        search = Exhaustive(p, m, times, limit)
        found, cost = search.run(start, float("inf"))
        assert search.nodes < 20_000, "the bound of a partial schedule is too low"
        assert max(simulate(found, times).peak_activations) <= limit
        assert cost == exhaustive(p, m, times, limit)[1] == simulate(found, times).cost


def test_a_search_that_gives_up_says_so_and_returns_something_that_fits():
    times, limit = Times(3, 4, 2, communication=1), 4
    start = automatic(4, 6, times, limit)
    search = Exhaustive(4, 6, times, limit, most=200)
    found, cost = search.run(start, simulate(start, times).cost)
    assert (search.nodes, search.proven) == (200, False)
    check(found)
    assert max(simulate(found, times).peak_activations) <= limit
    assert cost == simulate(found, times).cost
    whole = Exhaustive(2, 2, times, limit, most=200)
    whole.run(schedule_of([["F", "B", "W"] * 2] * 2, 2), float("inf"))
    assert whole.proven and whole.nodes < 200


def test_the_demo_gives_a_case_up_that_is_too_large_and_calls_nothing_proven(monkeypatch, capsys):
    monkeypatch.setattr(schedule_search, "MOST", 500)
    argv = ["schedule_search.py", "--ranks", "4", "--micro-batches", "6", "--times", "3,4,2,1", "--limit", "4"]
    monkeypatch.setattr(sys, "argv", argv)
    assert schedule_search.main() == 0
    row, last = capsys.readouterr().out.splitlines()[1:]
    assert "<= " in row and "unknown" in row and row.endswith("500, gave up") and last == "PASS"
    assert row.split()[:4] == ["4", "6", "3,4,2,1", "4"], "the case that was asked for"


def test_the_heuristic_finds_the_schedule_that_is_drawn_above_it():
    times = Times(2, 2, 1, communication=1)
    for line in text(simulate(automatic(2, 4, times, 3), times)).splitlines()[1:3]:
        assert line[: line.rindex("|") + 1] in schedule_search.__doc__


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        ("FBWFBW FBWFBW", [], "with equal times the heuristic costs 10, the optimum is 7 (2 2 1,1,1,0 4 10 7 42.9% "),
        ("FFBWBW FBFBWW", ["--limit", "1"], "a schedule holds more than 1 (2 2 1,1,1,0 1 7 7 0.0% "),
    ],
)
def test_a_heuristic_that_misses_the_optimum_or_the_limit_is_no_pass(words, options, said, monkeypatch, capsys):
    monkeypatch.setattr(schedule_search, "automatic", lambda *case: schedule_of(words.split(), 2))
    monkeypatch.setattr(sys, "argv", ["schedule_search.py", "--ranks", "2", "--micro-batches", "2", *options])
    assert schedule_search.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(said)


def test_a_search_that_miscounts_or_is_dearer_than_the_heuristic_is_no_pass(monkeypatch):
    good, slow = (schedule_of(words.split(), 2) for words in ("FFBWBW FBFBWW", "FBWFBW FBWFBW"))
    monkeypatch.setattr(schedule_search, "automatic", lambda *case: good)
    for found, cost, measured in ((good, 6, 7), (slow, 10, 10)):
        monkeypatch.setattr(schedule_search, "exhaustive", lambda *_, most, it=(found, cost): (*it, most))
        said = f"the search says {cost}, its schedule costs {measured}, the heuristic's 7"
        assert schedule_search.compare(2, 2, Times(), 2)[1] == said


def test_micro_batches_may_keep_their_order_on_every_rank():
    times, best = Times(2, 1, 3, communication=1), float("inf")
    rows = []
    for word in words_of(2):
        for order in product(permutations(range(2)), repeat=3):  # who is the k-th F, B, W
            count = dict(F=0, B=0, W=0)
            row = []
            for kind in word:
                row.append((kind, order["FBW".index(kind)][count[kind]]))
                count[kind] += 1
            rows.append(row)
    for pair in product(rows, repeat=2):
        schedule = schedule_of([[kind for kind, _ in row] for row in pair], 2)
        lists = tuple(
            tuple(type(a)(a.kind, a.stage, i) for a, (_, i) in zip(row, named, strict=True))
            for row, named in zip(schedule.actions, pair, strict=True)
        )
        schedule = type(schedule)("any", 2, 2, 2, ((0, 1),), lists)
        try:
            best = min(best, simulate(schedule, times).cost)
        except ScheduleError:
            continue
    assert exhaustive(2, 2, times, 2)[1] == best


def test_the_heuristic_is_valid_and_keeps_its_memory_limit():
    rng = random.Random(0)
    for _ in range(30):
        p, m, limit = rng.randint(1, 6), rng.randint(1, 10), rng.randint(1, 12)
        times = Times(*([rng.randint(1, 6) for _ in range(p)] for _ in range(3)), communication=rng.randint(0, 2))
        schedule = automatic(p, m, times, limit)
        check(schedule)
        assert max(simulate(schedule, times).peak_activations) <= limit


@pytest.mark.always("4")
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8])
def test_with_equal_times_the_heuristic_reaches_zb_h1_and_zb_h2(p):
    for m in (2 * p, 3 * p + 1):
        assert simulate(automatic(p, m, limit=p)).bubble == p - 1
        assert simulate(automatic(p, m, limit=2 * p - 1)).bubble == 0


def test_a_rank_whose_gradient_is_late_may_run_ahead():
    times = Times(3, 4, 6, communication=1)
    waits = simulate(greedy(6, 8, times, [3] * 6, eager=False, ahead=False), times).cost
    assert simulate(automatic(6, 8, times, 3), times).cost < 0.7 * waits


def test_a_w_fills_a_gap_only_if_it_is_over_before_the_next_gradient_comes():
    times = Times(5, 6, 8, communication=1)  # on rank 1 the gap before B1 is longer than an F and shorter than a W
    schedule = greedy(4, 6, times, [4] * 4, eager=False, ahead=True)
    row = [f"{action.kind}{action.micro_batch}" for action in schedule.actions[1]]
    assert row[:9] == ["F0", "F1", "F2", "F3", "B0", "W0", "B1", "B2", "F4"]
    assert simulate(schedule, times).cost == 140


def test_the_cheapest_is_what_occupies_a_rank_least_though_another_ends_earlier():
    times = Times(2, 2, 5)
    cheap, early = (schedule_of(words.split(), 2) for words in ("FBFWBW FBFBWW FBFBWW", "FFBBWW FBFBWW FBWFBW"))
    measured = [(simulate(each, times).cost, simulate(each, times).makespan) for each in (cheap, early)]
    assert measured == [(30, 32), (31, 31)]
    assert cheapest([early, cheap], times) == cheap


@pytest.mark.prove
def test_the_heuristic_is_within_12_percent_of_the_proven_optimum():
    gaps = []
    for p, m in ((2, 4), (3, 3), (3, 4)):
        for times in (Times(1, 1, 1), Times(3, 4, 2, communication=1), Times(2, 3, 3), Times(4, 4, 1), Times(2, 2, 5)):
            for limit in (p, 2 * p - 1):
                schedule = automatic(p, m, times, limit)
                gaps.append(simulate(schedule, times).cost / exhaustive(p, m, times, limit)[1] - 1)
    assert min(gaps) >= 0
    assert max(gaps) <= 0.12
    assert sum(gap == 0 for gap in gaps) >= 0.8 * len(gaps)


def test_more_memory_never_makes_the_optimum_worse():
    for times in (Times(3, 4, 2, communication=1), Times(2, 3, 3)):
        costs = [exhaustive(3, 3, times, limit)[1] for limit in (1, 2, 3, 5)]
        assert costs == sorted(costs, reverse=True)
        assert costs[0] > costs[-1]
    times = Times(3, 4, 2, communication=1)
    assert automatic(4, 8, times) == automatic(4, 8, times, 8) != automatic(4, 8, times, 7), "without a limit 2p"
    assert exhaustive(2, 3)[1] == 9 and exhaustive(2, 3, limit=2)[1] == 10


@pytest.mark.prove
def test_the_demo_passes():
    done = run_script(HERE / "schedule_search.py", "--ranks", "2")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "PASS")


def test_a_case_out_of_reach_is_one_line():
    for given in (
        ["--ranks", "1"],
        ["--ranks", "5"],
        ["--micro-batches", "0"],
        ["--micro-batches", "7"],
        ["--limit", "0", "--ranks", "2"],
        ["--times", "1,2"],
        ["--times", "0,1,1"],
        ["--times", "1,1,0"],
        ["--times", "1,1,1,1,1"],
        ["--limit", "3"],  # without --ranks, which the grid would ignore, too
        ["--micro-batches", "3"],  # the grid of all cases would ignore it
    ):
        said = refusal(schedule_search.main, given)
        assert given[0] in said and (given[1] in said or "needs --ranks" in said)
