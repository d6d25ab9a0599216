"""The rules of thumb: each way keeps its word and is judged at its best; a rule is the simplest of what is as fast."""

import planner_paths  # noqa: F401  finds the trainer and the chapters
import plan
import plan_rules
import pytest
from plan_memory import Layout
from plan_search import Candidate, Counter, Found, exact
from plan_time import Step, read_cluster

CLUSTER = read_cluster("h100-400g")


@pytest.mark.parametrize(
    "way", ["ZeRO-3", "tensor parallel of 8", "tp 8 and a pipeline", "tp 8, ZeRO-2 and a pipeline"]
)
def test_a_way_of_the_playbook_is_tried_as_it_says_and_fits(way):
    task = plan_rules.task_of("8B", 16, CLUSTER)
    tp, deep, zero = plan_rules.WAYS[way]
    found = plan_rules.fastest(task, plan_rules.WAYS[way])
    layout = found.layout
    assert (layout.tp, layout.pp > 1, layout.zero, layout.cp, layout.recompute) == (tp, deep, zero, 1, "none")
    assert layout.ranks == 16 and layout.global_batch == plan_rules.BATCH
    assert found.peak <= task.memory and exact(task, layout).step.seconds == found.step.seconds


def test_a_way_is_beside_the_fastest_and_a_rule_may_be_a_way_that_the_search_has_not_kept(monkeypatch):
    def candidate(seconds, **axes):
        return Candidate(Layout(**axes), Step({"update": seconds}, {}, 1.0), 0, "")

    deep, plain, slow = candidate(1.0, dp=4, pp=2), candidate(1.04, dp=8), candidate(1.5, tp=8)
    ways = {(1, False, 3): plain, (8, False, 1): slow}
    monkeypatch.setattr(plan_rules, "search", lambda task: Found([deep], 0, 0, Counter(), None))
    monkeypatch.setattr(plan_rules, "fastest", lambda task, way: ways.get(way))
    case = ("< 10B", 8, ("8B",), ("ZeRO-3", "tensor parallel of 8", "tp 8 and ZeRO-3"))
    rows = plan_rules.rows(CLUSTER, (case,))
    assert {tuple(row[:5]) for row in rows} == {("< 10B", 8, "8B", "data parallel", "dp8 mb1x1 recompute-none")}
    assert [row[5:7] + row[8:] for row in rows] == [
        [1.04, "ZeRO-3", 1.04], [1.04, "tensor parallel of 8", 1.5], [1.04, "tp 8 and ZeRO-3", ""]
    ]  # fmt: skip
    assert [row[7] for row in rows] == [rows[0][4], "dp1 tp8 mb1x1 recompute-none", plan_rules.NONE]


@pytest.mark.prove
def test_a_rule_is_the_simplest_layout_that_is_as_fast_as_one_can_tell():
    for row in plan_rules.rows(CLUSTER, plan_rules.CASES[:1]):
        axes, simplest, best = plan_rules.rule(plan_rules.task_of(row[2], row[1], CLUSTER))
        assert row[3] == axes == "data parallel", "below ten billion parameters one technique does, as they say"
        assert simplest.step.seconds <= (1 + plan.TIE) * best.step.seconds
        assert row[8] >= 0.99, "no way of the playbook is faster than the fastest"
        assert row[8] <= 1.05 if row[6] == "ZeRO-3" else row[8] > 1.3, row


@pytest.mark.prove
def test_zero_3_alone_is_no_rule_for_70b_from_512_gpus_on_and_is_one_on_64():
    for gpus, is_one in ((64, True), (512, False)):
        axes, _, best = plan_rules.rule(task := plan_rules.task_of("70B", gpus, CLUSTER))
        alone = plan_rules.fastest(task, plan_rules.WAYS["ZeRO-3"])
        assert (alone.step.seconds <= (1 + plan.TIE) * best.step.seconds) == is_one
        assert (axes == "data parallel") == is_one
