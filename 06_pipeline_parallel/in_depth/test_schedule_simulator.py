"""What schedule_simulator.py claims: the checker finds every fault, simulated times are right, nothing deadlocks."""

import random
import re
import sys
from dataclasses import replace

import pytest
import schedule_simulator
from schedule_simulator import (
    BW,
    Action,
    B,
    F,
    Message,
    Schedule,
    ScheduleError,
    Times,
    W,
    check,
    check_programs,
    crossings,
    needs,
    peak_activations,
    programs,
    simulate,
)


def by_hand(*rows: str, ranks: int | None = None, v: int = 1) -> Schedule:
    """A schedule from words like "F0@0 BW0@0"; "+" before a word: it overlaps with the one before it."""
    lists = []
    for row in rows:
        words = re.findall(r"(\+?)([A-Z]+)(\d+)@(\d+)", row)
        lists.append(tuple(Action(kind, int(s), int(i), plus == "+") for plus, kind, i, s in words))
    p = len(rows)
    m = 1 + max(action.micro_batch for row in lists for action in row)
    return Schedule("by hand", p, p * v, m, (tuple(s % p for s in range(p * v)),), tuple(lists))


GOOD = by_hand("F0@0 F1@0 BW0@0 BW1@0", "F0@1 BW0@1 F1@1 B1@1 W1@1")
STEADY = by_hand("F0@0 F1@0 BW0@0 F2@0 BW1@0 F3@0 BW2@0 BW3@0", "F0@1 BW0@1 F1@1 BW1@1 F2@1 BW2@1 F3@1 BW3@1")  # 1F1B
LOOP = by_hand("F0@0 F1@0 F0@2 BW0@2 F1@2 BW1@2 BW0@0 BW1@0", "F0@1 F1@1 F0@3 BW0@3 F1@3 BW1@3 BW0@1 BW1@1", v=2)


def dependencies(schedule):
    """Written again, apart from the script: the (rank, index) pairs that each (rank, index) waits for."""
    where = {}
    for rank, row in enumerate(schedule.actions):
        for i, action in enumerate(row):
            for letter in action.kind:
                where[letter, action.stage, action.micro_batch] = (rank, i)
    result = {}
    for rank, row in enumerate(schedule.actions):
        for i, a in enumerate(row):
            wanted = [(rank, i - 1)] if i else []
            if "F" in a.kind and a.stage > 0:
                wanted.append(where["F", a.stage - 1, a.micro_batch])
            if "B" in a.kind:
                wanted.append(where["F", a.stage, a.micro_batch])
                if a.stage < schedule.stages - 1:
                    wanted.append(where["B", a.stage + 1, a.micro_batch])
            if a.kind == "W":
                wanted.append(where["B", a.stage, a.micro_batch])
            result[rank, i] = wanted
    return result


def longest_paths(schedule, times):
    """End of each action, by relaxing all dependencies until nothing changes; None if that never ends."""
    waits = dependencies(schedule)
    end = dict.fromkeys(waits, 0.0)
    for _ in range(len(waits) + 1):
        changed = False
        for (rank, i), wanted in waits.items():
            begin = max((end[n] + (times.communication if n[0] != rank else 0) for n in wanted), default=0.0)
            new = begin + times.of(schedule.actions[rank][i])
            changed |= new != end[rank, i]
            end[rank, i] = new
        if not changed:
            return end
    return None


def swapped(schedule, rng):
    rank = rng.randrange(schedule.ranks)
    row = list(schedule.actions[rank])
    i, j = rng.sample(range(len(row)), 2)
    row[i], row[j] = row[j], row[i]
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))


def test_an_action_starts_when_its_rank_is_free_and_what_it_needs_has_arrived():
    timeline = simulate(GOOD, Times(2, 3, 4, communication=1))
    assert timeline.start == ((0, 2, 13, 20), (3, 5, 12, 14, 17))
    assert timeline.end == ((2, 4, 20, 27), (5, 12, 14, 17, 21))
    assert (timeline.makespan, timeline.cost, timeline.work) == (27, 27, (18, 18))


@pytest.mark.parametrize("seed", range(3))  # LOOP, GOOD, GOOD
def test_simulated_times_are_the_longest_paths_through_the_dependencies(seed):
    rng = random.Random(seed)
    schedule = rng.choice([GOOD, LOOP])
    stages = schedule.stages
    f, b, w = ([rng.randint(1, 5) for _ in range(stages)] for _ in range(3))
    times = Times(f, b, w, communication=rng.randint(0, 3))
    want = longest_paths(schedule, times)
    timeline = simulate(schedule, times)
    for (rank, i), end in want.items():
        assert timeline.end[rank][i] == end, f"{schedule.actions[rank][i]} on rank {rank}"


def test_the_bubble_is_the_idle_time_of_the_rank_that_idles_most():
    timeline = simulate(GOOD, Times([1, 2], [1, 2], [1, 2]))  # rank 0 computes 6 units, rank 1 computes 12
    assert timeline.work == (6, 12)
    assert timeline.cost == 13
    assert timeline.bubble == 7
    assert timeline.bubble_ratio == 7 / 6


def test_a_rank_that_starts_late_is_not_idle_before_its_first_action():
    late = by_hand("F0@0 F1@0 B0@0 W0@0 B1@0 W1@0", "F0@1 B0@1 F1@1 B1@1 W0@1 W1@1")
    timeline = simulate(late, Times(1, 1, [1, 1.5]))
    assert (timeline.start[0][0], timeline.end[0][-1]) == (0, 7)
    assert (timeline.start[1][0], timeline.end[1][-1]) == (1, 8)
    assert (timeline.makespan, timeline.cost, timeline.bubble) == (8, 7, 1)


def test_an_activation_is_held_from_its_f_until_its_weight_gradient_is_done():
    assert simulate(GOOD).peak_activations == (2, 1)
    row = by_hand("F0@0 F1@0 B0@0 F2@0 B1@0 W0@0 W1@0 B2@0 W2@0").actions[0]
    assert peak_activations(row) == 3  # B0 alone frees nothing
    row = by_hand("F0@0 F1@0 BW0@0 F2@0 BW1@0 BW2@0").actions[0]
    assert peak_activations(row) == 2


def test_a_pair_starts_when_both_halves_can_and_takes_its_own_time():
    pair = by_hand("F0@0 F1@0 +BW0@0 BW1@0")
    timeline = simulate(pair, Times(2, 3, 4, pair=7))
    assert timeline.start == ((0, 2, 2, 9),)
    assert timeline.end == ((2, 9, 9, 16),)
    assert simulate(pair, Times(2, 3, 4)).end == ((2, 11, 11, 18),)  # nothing gained: 2 + 3 + 4
    assert simulate(pair, Times(2, 3, 4, pair=0)).end == ((2, 2, 2, 9),), "a time of 0 is a time"
    late = by_hand("F0@0 F1@0 F2@0 +BW0@0 BW1@0 BW2@0", "F0@1 BW0@1 F1@1 BW1@1 F2@1 BW2@1")
    assert simulate(late).start[0][2:4] == (4, 4)  # F2 could start at 2, but its partner waits for rank 1


def test_the_checker_accepts_what_is_complete_and_in_order():
    for schedule in (GOOD, LOOP, by_hand("F0@0 F1@0 +BW0@0 BW1@0")):
        check(schedule)
    idle = Schedule("one of two", 2, 1, 1, ((0,),), (by_hand("F0@0 BW0@0").actions[0], ()))
    check(idle)
    assert (simulate(idle).makespan, simulate(idle).cost) == (3, 3), "a rank may have nothing to do"


FAULTS = {  # what is wrong: (schedule, what the message must say)
    "an action twice": (by_hand("F0@0 BW0@0 BW0@0"), "BW0@0: its B is done twice"),
    "weights twice": (by_hand("F0@0 BW0@0 W0@0"), "W0@0: its W is done twice"),
    "no weight gradient": (by_hand("F0@0 B0@0 F1@0 BW1@0"), "W0@0 is missing"),
    "a missing micro-batch": (replace(GOOD, micro_batches=3), "rank 0: F2@0 is missing"),
    "backward before forward": (by_hand("F0@0 BW1@0 BW0@0 F1@0"), "BW1@0 comes before F1@0"),
    "weights before input": (by_hand("F0@0 W0@0 B0@0"), "W0@0 comes before B0@0"),
    "a stage of another rank": (by_hand("F0@0 F0@1 BW0@0", "BW0@1"), "rank 0: F0@1: that stage lies on rank 1"),
    "a stage that does not exist": (by_hand("F0@0 BW0@0 F0@1"), "F0@1: there are 1 stages and 1 micro-batches"),
    "a stage below zero": (replace(GOOD, actions=((Action(F, -1, 0),), ())), "F0@-1: there are 2 stages"),
    "a micro-batch below zero": (replace(GOOD, actions=((Action(F, 0, -1),), ())), "F-1@0: there are 2 stages"),
    "a micro-batch that does not exist": (replace(GOOD, micro_batches=1), "F1@0: there are 2 stages and 1 micro-"),
    "an unknown kind": (by_hand("F0@0 BW0@0 X0@0"), "'X'"),
    "a circle": (by_hand("F0@0 BW0@0 F1@0 BW1@0", "F0@1 F1@1 BW0@1 BW1@1"), "rank 1 waits at F1@1 for F1@0"),
    "too few lists": (replace(GOOD, actions=GOOD.actions[:1]), "1 lists of actions for 2 ranks"),
    "too many lists": (replace(GOOD, actions=(*GOOD.actions, ())), "3 lists of actions for 2 ranks"),
    "a rank that does not exist": (replace(GOOD, placement=((0, 2),)), "placement[0]"),
    "a stage that no rank holds": (replace(GOOD, placement=((0,),)), "placement[0]"),
    "more stages than there are": (replace(GOOD, placement=((0, 1, 1),)), "placement[0]"),
    "no such rank in the other direction": (replace(GOOD, placement=((0, 1), (1, 2))), "placement[1]"),
    "a pair at the beginning": (by_hand("+F0@0 BW0@0"), "F0@0 overlaps with an action before it, but is the first"),
    "a pair of two forwards": (by_hand("F0@0 +F1@0 BW0@0 BW1@0"), "F1@0 overlaps with F0@0"),
    "a pair that begins with its backward": (by_hand("F0@0 BW0@0 +F1@0 BW1@0"), "F1@0 overlaps with BW0@0"),
    "a pair with itself": (by_hand("F0@0 +BW0@0"), "BW0@0 overlaps with F0@0"),
    "a pair of three": (by_hand("F0@0 F1@0 +BW0@0 +BW1@0"), "BW1@0 overlaps with F1@0"),
    "a pair of F and W": (by_hand("F0@0 B0@0 F1@0 +W0@0 BW1@0"), "W0@0 overlaps with F1@0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_names_the_offending_action_in_one_line(fault):
    schedule, message = FAULTS[fault]
    with pytest.raises(ScheduleError, match=re.escape(message)) as caught:
        check(schedule)
    assert "\n" not in str(caught.value)


def test_a_schedule_with_two_actions_swapped_is_rejected_or_still_valid_and_never_hangs():
    rng, rejected = random.Random(0), 0
    for _ in range(400):
        schedule = swapped(rng.choice([GOOD, LOOP]), rng)
        ends = longest_paths(schedule, Times())
        if ends is None:  # the lists wait for each other in a circle
            rejected += 1
            with pytest.raises(ScheduleError, match=r"[FBW]\d@\d"):
                check(schedule)
        else:
            check(schedule)
            assert simulate(schedule).makespan == max(ends.values())
    assert 100 < rejected < 400


def test_both_ends_have_every_message_once_and_in_the_same_order():
    for schedule in (GOOD, LOOP):
        given = programs(schedule)
        links = {}
        for rank, program in enumerate(given):
            actions = [step for step in program if isinstance(step, Action)]
            assert tuple(actions) == schedule.actions[rank]
            for step in program:
                if isinstance(step, Message):
                    low, high = sorted((step.source, step.destination))
                    assert rank in (low, high)
                    links.setdefault((low, high, rank), []).append(step)
        for (low, high, rank), sequence in links.items():
            assert len(set(sequence)) == len(sequence)
            assert sequence == links[low, high, low + high - rank]
        sent = {message for sequence in links.values() for message in sequence}
        crossing = [n for row in schedule.actions for a in row for n in needs(schedule, a) if n[0] != W]
        want = {
            (kind, stage, i)
            for kind, stage, i in crossing
            if (kind == F and stage + 1 < schedule.stages) or (kind == B and stage > 0)
        }
        assert {(message.kind, message.stage, message.micro_batch) for message in sent} == want


def with_crossings_together(schedule):
    """The programs, with every message of a crossing where its last one stands."""
    crossing = crossings(schedule)
    result = []
    for program in programs(schedule):
        row = []
        for item in program:
            together = crossing.get(item, (item,)) if isinstance(item, Message) else (item,)
            row += together if item == together[-1] else ()
        result.append(row)
    return result


def test_what_crosses_goes_both_ways_between_two_ranks_and_can_wait_for_its_last_message():
    found = 0
    for schedule in (GOOD, LOOP, STEADY):
        for message, together in crossings(schedule).items():
            assert message in together
            assert {frozenset((m.source, m.destination)) for m in together} == {
                frozenset((message.source, message.destination))
            }
            assert len({m.source for m in together}) == 2
            found += 1
        check_programs(schedule, with_crossings_together(schedule))
    assert found >= 4
    f1, b0 = Message(F, 0, 2, 0, 1), Message(B, 1, 1, 1, 0)  # in 1F1B an activation meets the gradient two behind it
    assert crossings(STEADY)[f1] == crossings(STEADY)[b0] == (f1, b0)


def run_with_delays(schedule, rng):
    """A runtime in miniature: one thread a rank computes, one carries messages, in order, unbuffered; random times."""
    given = programs(schedule)
    compute = [[step for step in program if isinstance(step, Action)] for program in given]
    carry = [[step for step in program if isinstance(step, Message)] for program in given]
    done = set()
    while any(compute) or any(carry):
        able = []
        for rank in range(schedule.ranks):
            if compute[rank]:
                step = compute[rank][0]
                keys = [
                    (*key, "sent") if schedule.rank_of(key[1], key[2]) != rank else key for key in needs(schedule, step)
                ]
                if done.issuperset(keys):
                    able.append((rank, None))
            if carry[rank]:
                message = carry[rank][0]
                produced = (message.kind, message.stage, message.micro_batch) in done
                if message.source == rank and produced and carry[message.destination][0] == message:
                    able.append((rank, message))
        assert able, f"deadlock: {[row[:1] for row in compute]} {[row[:1] for row in carry]}"
        rank, message = rng.choice(able)  # whoever happens to be faster
        if message is None:
            done.update(compute[rank].pop(0).yields())
        else:
            done.add((message.kind, message.stage, message.micro_batch, "sent"))
            carry[message.source].pop(0)
            carry[message.destination].pop(0)


def test_asynchronous_unbuffered_messages_in_this_order_pass_whatever_the_timing():
    rng = random.Random(3)
    for _ in range(50):
        for schedule in (GOOD, LOOP):
            run_with_delays(schedule, rng)


def test_messages_in_another_order_deadlock_and_are_named():
    given = programs(LOOP)
    check_programs(LOOP, given)
    first = [i for i, step in enumerate(given[0]) if isinstance(step, Message)]
    i, j = first[0], first[1]
    given[0][i], given[0][j] = given[0][j], given[0][i]  # rank 0 sends its first two activations in the other order
    with pytest.raises(ScheduleError, match=r"deadlock under unbuffered sends: rank 0 at the activation of F1@0"):
        check_programs(LOOP, given)
    given = programs(GOOD)
    given[1].insert(0, given[1].pop(given[1].index(GOOD.actions[1][0])))  # F0 before the message of its input
    with pytest.raises(ScheduleError, match="rank 1 at F0@1"):
        check_programs(GOOD, given)


def test_two_ranks_that_both_send_before_they_receive_deadlock():
    schedule = by_hand("F0@0 F1@0 BW0@0 BW1@0", "F0@1 BW0@1 F1@1 BW1@1")
    f1 = Message(F, 0, 1, 0, 1)
    b0 = Message(B, 1, 0, 1, 0)
    f0, b1 = Message(F, 0, 0, 0, 1), Message(B, 1, 1, 1, 0)
    a, z = schedule.actions
    first = [a[0], f0, a[1], f1, b0, a[2], b1, a[3]]
    second = [f0, z[0], z[1], b0, f1, z[2], z[3], b1]  # 1F1B with plain send and recv: F1 and B0 block each other
    with pytest.raises(ScheduleError, match="deadlock under unbuffered sends"):
        check_programs(schedule, [first, second])
    second[3:5] = [f1, b0]
    check_programs(schedule, [first, second])


def test_bw_yields_both_results_and_its_time_is_their_sum():
    action = Action(BW, 3, 5)
    assert action.yields() == [(B, 3, 5), (W, 3, 5)]
    assert str(action) == "BW5@3"
    assert Times(1, [0, 0, 0, 2], (0, 0, 0, 4)).of(action) == 6
    assert schedule_simulator.parse_times("3,4,2,0") == schedule_simulator.parse_times("3,4,2") == Times(3, 4, 2)


def test_the_demo_prints_what_the_checker_says_and_fails_without_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["schedule_simulator.py"])
    schedule_simulator.main()
    good, bad, last = capsys.readouterr().out.splitlines()
    assert (good, last) == ("good: 9 units of time, bubble 3, held (2, 1)", "PASS")
    assert bad == "bad: by hand: deadlock: rank 0 waits at BW0@0 for B0@1; rank 1 waits at F1@1 for F1@0"
    monkeypatch.setenv("RANK", "1")
    schedule_simulator.main()
    with pytest.raises(SystemExit):
        schedule_simulator.OneLineParser().error("no")
    assert capsys.readouterr() == ("", ""), "rank 0 alone prints"
    monkeypatch.setattr(schedule_simulator, "check", lambda schedule: None)
    with pytest.raises(SystemExit, match="let a deadlock pass"):
        schedule_simulator.main()
