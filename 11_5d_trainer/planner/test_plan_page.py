# ruff: noqa: E501 -- one line for each case
"""The planner's page in a real browser: its formulas are Python's, and it needs nothing from outside."""

import json
import re
import shutil
import subprocess
from html import unescape
from urllib.parse import quote

import above  # noqa: F401  finds the trainer and the chapters
import pytest
from plan_memory import Layout
from plan_page import page, page_numbers

CASES = [
    dict(model="llama3-8b", cluster="h100-400g", dp=8, tp=1, pp=1, sp=False, zero=3, recompute="none", mb=1, m=4, v=1),
    dict(model="llama3-8b", cluster="h100-400g", dp=8, tp=2, pp=2, sp=True, zero=1, recompute="full", mb=2, m=8, v=1),
    dict(model="llama3-70b", cluster="h100-playbook", dp=4, tp=8, pp=4, sp=True, zero=2, recompute="none", mb=1, m=8, v=2),
    dict(model="llama3-405b", cluster="a100-dgx", dp=2, tp=16, pp=9, sp=False, zero=0, recompute="selective", mb=1, m=9, v=1),
]  # fmt: skip


def layout_of(case):
    return Layout(
        dp=case["dp"], tp=case["tp"], pp=case["pp"], sequence_parallel=case["sp"], zero=case["zero"], seq_len=4096,
        recompute=case["recompute"], micro_batch=case["mb"], micro_batches=case["m"], stages_per_rank=case["v"],
        schedule="interleaved" if case["v"] > 1 else "1f1b", precision="bf16-master",
    )  # fmt: skip


@pytest.fixture(scope="module")
def browsed(tmp_path_factory):
    """The page as the browser leaves it once its script has run."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser:
        pytest.skip(reason="no browser here to open the page in: apt-get install chromium")
    folder = tmp_path_factory.mktemp("page")
    (folder / "plan.html").write_text(page())
    cases = quote(json.dumps([case | {"seq": 4096} for case in CASES]))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --disable-dev-shm-usage"
    done = subprocess.run(
        [browser, *flags.split(), f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{folder}/plan.html#check={cases}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout


def test_the_page_in_a_browser_gives_pythons_bytes_and_seconds(browsed):
    answers = json.loads(unescape(re.search(r'<pre id="check">(.*?)</pre>', browsed, re.DOTALL).group(1)))
    for case, got in zip(CASES, answers, strict=True):
        want = page_numbers(case["model"], case["cluster"], layout_of(case))
        assert got["states"] == pytest.approx(want["states"], rel=1e-9), case
        assert got["peak"] == pytest.approx(want["peak"], rel=1e-9), case
        assert got["parts"] == pytest.approx(want["parts"], rel=1e-9), case


def test_the_page_shows_bars_a_verdict_and_a_drawing_of_the_pipeline(browsed):
    seen = browsed.split("<script>")[0]
    assert len(re.findall(r"<rect ", seen)) == 2 * 2 * 16  # forward and backward of 16 micro-batches on 2 ranks
    assert len(re.findall(r'<div style="width', seen)) == 4 + 7  # parts of the memory and of the time


def test_the_page_asks_for_nothing_from_outside():
    text = page()
    assert not re.search(r"https?://|src=|@import|fetch\(|XMLHttpRequest|<link", text)
