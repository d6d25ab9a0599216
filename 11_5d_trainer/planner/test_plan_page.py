"""The planner's page in a real browser: its numbers are Python's, for every axis, and it needs nothing from outside."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from urllib.parse import quote

import planner_paths  # noqa: F401  finds the trainer and the chapters
import plan_page
import pytest
from llama import LlamaConfig
from moe_layer import MoEConfig
from plan_page import AXES, BYTES, drawing, layout_of, numbers, page
from plan_search import Task, room, rough_peak
from plan_time import read_cluster, step_time

MODEL = LlamaConfig(32000, 1024, 8, 8, 4, 2816)  # none of the presets
MOE = MoEConfig(hidden=1024, intermediate=2816, experts=4, top_k=2, balance=0.01)
TASK = Task(MODEL, MOE, read_cluster("h100-400g"), 16, 64, 4096, name="--config my/config.json")
CHOSEN = [
    (1, 1, 1, 1, 3, 1, "none"),
    (2, 1, 2, 2, 1, 2, "full"),
    (1, 4, 1, 4, 2, 1, "selective"),
    (4, 2, 2, 2, 1, 1, "none"),
]
REFUSED = (1, 1, 2, 1, 3, 1, "none")


@pytest.fixture(scope="module")
def browsed(tmp_path_factory):
    """The page as the browser leaves it once its script has run."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip(reason="no browser here to open the page in: apt-get install chromium")
    folder = tmp_path_factory.mktemp("page")
    start = layout_of(TASK, *CHOSEN[1])
    (folder / "plan.html").write_text(page(TASK, "the <ten> best", start))
    picks = quote(json.dumps([dict(zip(AXES, each, strict=True)) for each in [*CHOSEN, REFUSED]]))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --disable-dev-shm-usage"
    where = f"file://{folder}/plan.html#pick={picks}"
    command = [browser, *flags.split(), f"--user-data-dir={folder / 'profile'}", "--dump-dom", where]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.prove
def test_the_page_in_a_browser_gives_pythons_bytes_and_seconds_with_context_and_expert_ranks(browsed):
    answers = json.loads(unescape(re.search(r'<pre id="check">(.*?)</pre>', browsed, re.DOTALL).group(1)))
    for chosen, got in zip(CHOSEN, answers[:-1], strict=True):
        layout = layout_of(TASK, *chosen)
        want = numbers(TASK, layout)
        assert [*got["bytes"], *got["seconds"], got["mfu"]] == pytest.approx(want, rel=1e-3), chosen
        assert sum(got["bytes"]) == pytest.approx(rough_peak(TASK, layout), rel=1e-3), chosen
        assert got["options"] == layout.options()
    assert answers[-1] == {"reason": layout_of(TASK, *REFUSED)} == {"reason": "stage 3 does not go with a pipeline"}


def test_every_axis_that_is_chosen_reaches_the_layout_that_is_asked_for(monkeypatch, tmp_path):
    for tp, cp, pp, ep, zero, micro_batch, recompute in CHOSEN:
        layout = layout_of(TASK, tp, cp, pp, ep, zero, micro_batch, recompute)
        assert (layout.tp, layout.cp, layout.pp, layout.ep, layout.zero) == (tp, cp, pp, ep, zero)
        assert (layout.micro_batch, layout.recompute, layout.kernels) == (micro_batch, recompute, "triton")
        assert (layout.ranks, layout.global_batch) == (TASK.gpus, TASK.global_batch)
        *parts, mfu = numbers(TASK, layout)
        step = step_time(MODEL, MOE, layout, TASK.cluster, simulated=False)
        assert sum(parts[: len(BYTES)]) == pytest.approx(rough_peak(TASK, layout))
        blocks, ends, loss, block = room(TASK, layout)
        assert (*parts[4:6],) in ((blocks + ends, loss), (blocks * min(layout.pp, layout.micro_batches), block)), layout
        assert [*parts[len(BYTES) :], mfu] == [*step.parts.values(), step.mfu(layout, TASK.cluster)]
    for chosen, says in (
        ((3, 1, 1, 1, 1, 1, "none"), "tp x cp x pp does not divide"),
        ((16, 1, 1, 1, 1, 1, "none"), "tp does not divide the heads"),
        ((8, 1, 2, 4, 1, 1, "none"), "ep does not divide"),
        ((1, 1, 1, 1, 1, 8, "none"), "the batch does not divide"),
        ((1, 1, 1, 1, 0, 1, "none"), "bf16-master keeps"),
    ):
        assert layout_of(TASK, *chosen).startswith(says), chosen
    monkeypatch.setattr(plan_page, "table", lambda task: {"axes": plan_page.choices(task)})
    start = layout_of(TASK, *CHOSEN[1])
    for change, shown in (
        ({}, {}),
        ({"zero": 0}, {"zero": 0}),
        ({"micro_batch": 32}, {"micro-batch": 1}),  # the page has no row of 32
    ):
        plan_page.write_page(tmp_path / "plan.html", TASK, "the <ten> best", replace(start, **change))
        text = (tmp_path / "plan.html").read_text()
        assert f">my/config.json on 16 GPUs ({TASK.cluster.name}), 64 x 4096 tokens<" in text
        want = dict(zip(AXES, CHOSEN[1], strict=True)) | shown
        assert json.loads(re.search(r'"start":({.*?})', text).group(1)) == want and "the &lt;ten> best" in text


@pytest.mark.prove
def test_the_page_shows_the_task_bars_a_verdict_and_a_drawing_of_the_pipeline(browsed):
    seen = browsed.split("<script>")[0]
    assert len(re.findall(r"<rect ", seen)) == 2 * 2 * 4  # forward and backward of 4 micro-batches on 2 ranks
    assert len(re.findall(r'<div style="width', seen)) == len(BYTES) + 7  # parts of the memory and of the time
    assert "my/config.json on 16 GPUs" in seen and "the &lt;ten&gt; best" in seen
    for axis, value in zip(AXES, CHOSEN[1], strict=True):
        assert re.search(rf'id="in-{axis}">(?:<option>[^<]*</option>)*<option selected="">{value}<', seen), axis


def test_no_formula_of_the_planner_is_in_the_page_and_nothing_is_asked_for_from_outside():
    text = page(TASK)
    assert not re.search(r"https?://|src=|@import|fetch\(|XMLHttpRequest|<link", text)
    data = json.loads(re.search(r"const D = (.*), COLORS = ", text).group(1))
    layout = layout_of(TASK, *CHOSEN[1])
    *row, options = data["rows"][",".join(map(str, CHOSEN[1]))]
    assert row == pytest.approx(numbers(TASK, layout), rel=1e-3) and options == layout.options()
    assert data["reasons"][data["rows"][",".join(map(str, REFUSED))]] == layout_of(TASK, *REFUSED)
    assert data["start"] == dict(zip(AXES, (1, 1, 1, 1, 1, 1, "none"), strict=True)) and data["room"] == TASK.memory
    dense = plan_page.choices(replace(TASK, moe=None))["ep"]
    assert (data["axes"]["pp"], data["axes"]["ep"], dense, data["axes"]["tp"][-1]) == ([1, 2, 4, 8], [1, 2, 4], [1], 16)
    assert (data["tokens"], data["gpus"], data["gb"]) == (64 * 4096, 16, 1e9)
    rows = drawing(2, 2)
    assert len(rows) == 2 * 2 * 2 and max(begin + length for *_, begin, length in rows) == pytest.approx(1, abs=1e-3)
    assert {(back, length) for _, back, _, length in rows} == {(0, 0.1111), (1, 0.2222)}
    script = plan_page.PAGE.split("<script>")[1]
    assert not re.search(r"hidden|bandwidth|tflops|layers|latency|head_dim", script)
