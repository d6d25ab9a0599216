"""What the pages to play with show is what the chapters compute: known numbers, by hand or from their formulas."""

import json
from pathlib import Path

import play_data
import pytest


@pytest.mark.parametrize(("name", "p", "m"), [("afab", 4, 8), ("1f1b", 4, 8), ("naive", 2, 4)])
def test_a_schedule_has_every_action_once_and_the_published_bubble(name, p, m):
    made = play_data.schedule(name, p, m, (1, 1, 1, 0))
    idle = 3 * (p - 1) * (m if name == "naive" else 1)
    assert made["bubble"] == pytest.approx(idle / (3 * m))
    for rank, actions in enumerate(made["ranks"]):
        assert sorted(a[2] for a in actions if a[0] == "F") == list(range(m))
        assert all(end > start for *_, start, end in actions)
        assert made["held"][rank] == {"afab": m, "1f1b": min(m, p - rank), "naive": 1}[name]


def test_thin_stages_take_half_as_long_and_hold_half_as_much():
    made = play_data.schedule("zb-v", 4, 8, (1, 1, 1, 0))
    assert made["bubble"] == 0
    assert made["length"] == pytest.approx(3 * 8 + 3 * 0.5)  # the last rank begins three thin stages later
    assert made["held"] == [4.0] * 4  # whole stages: what 1F1B holds at most
    assert play_data.schedule("dualpipe", 3, 8, (1, 1, 1, 0)) is None


def test_memory_is_the_planners_and_falls_with_each_stage_of_zero():
    totals = [sum(play_data.memory_of("llama3-8b", 8, 4, 1, zero, "full", 4096).values()) for zero in (1, 2, 3)]
    assert totals[0] > totals[1] > totals[2] > 0
    assert play_data.memory_of("llama3-8b", 8, 4, 4, 3, "full", 4096) is None
    parts = play_data.memory_of("llama3-8b", 1, 1, 1, 1, "full", 4096)
    assert parts["optimizer states"] == 12 * 8_030_261_248  # Llama 3's 8B, on one rank: 4 + 4 + 4 bytes each


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("P", [2, 4])
def test_the_rounds_of_a_ring_compute_every_causal_pair_once(layout, P):
    rounds = [play_data.round_of(layout, P, number) for number in range(P)]
    pairs = [tuple(pair) for ranks in rounds for rank in ranks for pair in rank["pairs"]]
    assert sorted(pairs) == [(q, k) for q in range(2 * P) for k in range(q + 1)]
    assert [rank["owner"] for rank in rounds[1]] == [P - 1, *range(P - 1)]  # each block has gone to the next rank
    work = [sum(len(ranks[r]["pairs"]) for ranks in rounds) for r in range(P)]
    assert (len(set(work)) == 1) == (layout == "zigzag")
    assert [sorted(rank["owner"] for rank in ranks) for ranks in rounds] == [list(range(P))] * P


def test_tokens_go_to_as_many_experts_as_they_use_and_a_skewed_load_is_skewed():
    for load in ("by chance", "skewed"):
        made = play_data.dispatch(2, 2, load)
        for rank in made["ranks"]:
            counts = [sum(e in chosen for chosen in rank["experts"]) for e in range(4)]
            assert rank["table"] == counts
            assert sum(counts) == 8 * 2
            assert all(sum(w) == pytest.approx(1, abs=0.011) for w in rank["weights"])
    busiest = max(sum(rank["table"][e] for rank in made["ranks"]) for e in range(4))
    assert busiest == 16  # all of 2 x 8 tokens want expert 1


def test_every_page_has_its_text_its_script_and_data_that_fit_its_controls():
    here = Path(play_data.__file__).parent
    for name in play_data.PLAYS.keys() - {"planner"}:
        text = (here / "play" / f"{name}.md").read_text()
        for script in (f"assets/{name}_data.js", "assets/play.js", f"assets/{name}.js"):
            assert f'<script src="{script}"></script>' in text
        assert 'id="controls"' in text and 'aria-live="polite"' in text
    held = (here / "play" / "planner.md").read_text()
    assert all(f'<iframe class="plan" src="assets/{name}.html" title=' in held for name in play_data.PLANS)
    data = play_data.ring()
    assert len(data["rows"]) == 10 and f"zigzag|{data['choices']['ranks'][0]}" in data["rows"]
    json.dumps(play_data.experts())
