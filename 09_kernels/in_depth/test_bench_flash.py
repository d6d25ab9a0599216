"""FlashAttention's benchmarks: that nothing wrong is timed, and that what was built is what runs."""

import os
import subprocess
import sys
from pathlib import Path

import bench_flash_kernels as bench
import pytest
import torch
from _flash_verify import Yardstick, in_float64, of_pytorch, poisoned
from _interpreter import INTERPRETED
from flash_tiles import explicit_attention, step
from harness.reference import assert_same
from harness.report import ROOT

HERE = Path(__file__).parent
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the shapes of a GPU take a GPU")


@pytest.fixture
def given():
    return bench.inputs(2, 70, 4, 2, 32, DTYPE)


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_of_a_head_is_that_of_the_definition(given, causal):
    want = step(lambda q, k, v: explicit_attention(q, k, v, causal=causal), *(x[:1, :, :1].double() for x in given))
    got = in_float64(*(x[0, :, 0] for x in given), causal)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert_same(x, y[0, :, 0], 1e-12, name)


def test_results_as_exact_as_pytorchs_pass_and_others_do_not(given):
    yardstick, right = Yardstick(given, causal=True), of_pytorch(given, causal=True)
    assert yardstick.failures(right) == [] == yardstick.failures(right[:1])

    def spoiled(at, change):
        got = [x.clone() for x in right]
        change(got[at])
        return yardstick.failures(got)

    for at, name in enumerate(("out", "dq", "dk", "dv")):
        for where in ((0, 3, 0), (1, 69, 1), (0, 69, 1)):  # of the last one no exact value is known
            (line,) = spoiled(at, lambda x, where=where: x[where].fill_(torch.nan))
            assert line.startswith(f"{name} is off from") and "nan" in line, line
        assert spoiled(at, lambda x: x[0, 64:, 0].zero_()), "a tile of a head that is known was not written"
        assert spoiled(at, lambda x: x[0, :, 1].mul_(1.01)), "a head of which no exact value is known is off"
        exact = torch.stack(yardstick.exact[at])
        twice = right[at].double()
        for place, (b, kv) in enumerate(yardstick.places):
            width = exact.shape[2]
            heads = slice(kv * width, (kv + 1) * width)
            twice[b, :, heads] += twice[b, :, heads] - exact[place]
        got = [*right[:at], twice, *right[at + 1 :]]
        assert len(yardstick.failures(got)) == 1, f"{name} with twice the error"
        assert yardstick.failures(got, further=2.5) == []


def test_what_nobody_writes_is_nan_and_only_there():
    with poisoned():
        assert torch.empty(3, device=bench.DEVICE).isnan().all()
        assert torch.empty_like(torch.zeros(3, dtype=DTYPE, device=bench.DEVICE)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@interpreted
def test_a_wrong_result_gets_a_row_that_says_so_and_is_not_timed(monkeypatch):
    def off(*arguments, **options):
        dq, dk, dv = real(*arguments, **options)
        return dq, dk * (1.0 if options["repeatable"] else 1.1), dv

    real = bench.triton_backward
    monkeypatch.setattr(bench, "triton_backward", off)
    timed = []

    def times(ours, *rest):
        timed.extend(ours)
        return {name: [1.0] * 3 for name in (*ours, "matmul")}

    monkeypatch.setattr(bench, "with_theirs", times)
    rows = bench.Measurement(bench.TINY[0]._replace(S=20), DTYPE).rows(bench.Matmul(DTYPE))
    assert timed == ["forward", bench.SEVEN]
    wrong = [row for row in rows if str(row[2]).startswith("wrong: dk is off from")]
    assert [row[0] for row in wrong] == ["backward"] and all(len(row) == len(bench.SPEED_COLUMNS) for row in rows)


BUILT = """
import os, sys, torch
sys.path[:0] = [{depth!r}, {chapter!r}]
import bench_flash_kernels as bench, flash_attention
assert not bench.INTERPRETED
def run(B, S, N, N_kv, causal):
    one = bench.Measurement(bench.Shape(B, S, N, N_kv, 64, causal), torch.bfloat16)
    for call in one.kernels():
        call()
    if N == N_kv:  # the core file's kernels are made for one size of group
        flash_attention.flash_attention(*(x.requires_grad_() for x in one.given[:3])).backward(one.given[3])
kept = lambda: len(os.listdir(os.environ["TRITON_CACHE_DIR"]))
run(1, 256, 16, 16, True)
built = kept()
for shape in ((2, 1, 1, 1), (1, 500, 3, 3), (1, 500, 6, 2), (2, 1024, 32, 32)):
    run(*shape, True)
print(built, kept())
"""


@pytest.mark.prove
def test_one_binary_serves_all_lengths_and_numbers_of_heads(tmp_path):
    """The launches of tests/fake_device compile what a GPU's would, for sm_90, and run nothing."""
    environment = os.environ | {"FAKE_GPUS": "1", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment |= {"PYTHONPATH": str(ROOT / "tests/fake_device"), "OMP_NUM_THREADS": "1"}
    code = BUILT.format(depth=str(HERE), chapter=str(HERE.parent))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    built, kept = map(int, done.stdout.split())
    assert built == kept == 8, "5 kernels, and 3 of the core file"
