"""The numbers expected of a GPU: that they are what their formulas say, and that the binaries are what was counted."""

import os
import re
import shutil
import sys

import pytest
from harness import predictions
from harness.layout import find
from harness.predictions import (
    LADDER,
    LOOPS,
    START,
    TENSOR,
    attention,
    cells,
    gpu_called,
    installed_loops,
    ladder,
    moved,
    product,
)
from harness.programs import printed_json

H200 = gpu_called("NVIDIA H200")


def test_a_gpu_is_found_by_its_name_and_an_unknown_one_predicts_nothing():
    assert H200.bandwidth == 4.8e12 and gpu_called("NVIDIA H100 80GB HBM3").bandwidth == 3.35e12
    assert gpu_called("NVIDIA A100-SXM4-80GB").fp8 is None and gpu_called("NVIDIA H100 PCIe").processors == 114
    assert gpu_called("GeForce GT 710") is None
    assert moved(None, 1e9) is None and attention(None, "forward", 1, 1, 1, 64, True) is None
    assert product(gpu_called("A100"), 1e12, "fp8") is None and cells(None, 1.0) == ["-", "-"]


def test_bytes_and_operations_over_the_rates_of_the_data_sheet():
    assert moved(H200, 4.8e12 * 0.9) == pytest.approx(1.0, abs=1e-5)
    assert product(H200, 989.4e12 * 0.8) == pytest.approx(1.0, abs=1e-5)
    assert cells(2e-3, 3e-3) == ["2", "1.50"]
    assert H200.tensor == pytest.approx(4096, rel=0.01), "a multiprocessor of Hopper: 4096 FLOPs of bf16 in a clock"


def test_attention_by_hand():
    """One score at D = 128: 512 FLOPs take 1/8 of a clock; 632 instructions of 128 threads for 128 x 64 scores, of
    which 128 start in a clock, 0.077 more."""
    loop = LOOPS["forward", 128]
    assert loop.clocks(H200, 128, masked=False) == pytest.approx(512 / 4096 + 632 * 128 / 8192 / 128, rel=0.01)
    full = attention(H200, "forward", 2, 8192, 16, 128, causal=False)
    assert full == pytest.approx(2 * 16 * 8192**2 * 0.2021 / (0.8 * 132 * 1.83e9), rel=0.01)
    causal = attention(H200, "forward", 2, 8192, 16, 128, causal=True)
    assert 0.5 * full < causal < 0.55 * full


def test_attention_asks_l2_for_less_than_it_gives_unless_tiles_are_small():
    """At D = 128 a program of 128 queries asks for 4 bytes a score: 132 of them for 132 · 4 / 0.2 clocks, 2,613."""
    for (kernel, D), loop in LOOPS.items():
        asked = H200.processors * loop.l2_bytes(kernel, D) / loop.clocks(H200, D, masked=False)
        assert asked < predictions.L2_BYTES, f"{kernel}, D {D}: {asked:.0f} bytes a clock"
    assert LOOPS["forward", 128].l2_bytes("forward", 128) == 4
    assert LOOPS["dkdvdq", 128].l2_bytes("dkdvdq", 128) == 8, "q, dout, and what is added to dq"
    starved = predictions.Loop(2, 1, 1, 1, (16, 128), 256)
    assert H200.processors * starved.l2_bytes("forward", 128) / starved.clocks(H200, 128, False) > predictions.L2_BYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOOPS, ("forward", 128), starved)
        found = attention(H200, "forward", 2, 8192, 16, 128, causal=False)
    assert found == pytest.approx(START + 32 * 8192**2 * 32 / (predictions.L2_BYTES * H200.clock))


def test_overlapped_attention_by_hand():
    """2^31 scores, all keys: at D = 128 products are the most, at D = 64 exponentials are as many clocks."""

    def seconds(D, kind, causal=False):
        return predictions.overlapped_attention(H200, 2, 8192, 16, D, causal, kind)

    assert seconds(128, "bf16") == pytest.approx(product(H200, 512 * 2**31))
    assert seconds(64, "fp8") == pytest.approx(START + 2**31 / (16 * H200.clocks))
    assert seconds(128, "bf16", causal=True) == pytest.approx(START + (seconds(128, "bf16") - START) * 8320 / 16384)
    assert predictions.overlapped_attention(gpu_called("A100"), 2, 8192, 16, 64, True, "fp8") is None


def test_what_is_expected_of_attention_at_the_goals_shape():
    """2 x 8192 tokens, 16 heads of 128, causal, on an H100, in ms; once with the tiles of Triton 3.6."""
    gpu, shape = gpu_called("NVIDIA H100 80GB HBM3"), (2, 8192, 16, 128, True)
    with pytest.MonkeyPatch.context() as patch:
        for loops, kernel, expected in (
            (LOOPS, "forward", 1.15),  # 477 TFLOP/s. Wrong below 0.98, products and softmax overlap after all
            (LOOPS, "dkdvdq", 2.71),  # and delta and dq's rounding. Wrong above 3.5, the additions to dq are not free
            (LOOPS | predictions.BEFORE_3_7, "dkdvdq", 3.27),
        ):
            patch.setattr(predictions, "installed_loops", lambda loops=loops: loops)
            assert 1e3 * attention(gpu, kernel, *shape) == pytest.approx(expected, rel=0.02), kernel
    for kind, expected in (("bf16", 0.71), ("fp8", 0.36)):
        assert 1e3 * predictions.overlapped_attention(gpu, *shape, kind) == pytest.approx(expected, rel=0.02), kind


def test_the_core_files_kernels_mask_every_tile_and_compute_some_products_twice():
    """One score at D = 64: 3 products of 128 FLOPs, and 653 instructions of 256 threads for 64 x 64 scores."""
    loop = LOOPS["ground forward", 64]
    one = 3 * 128 / H200.tensor + 653 * 256 / 4096 / 128
    assert loop.clocks(H200, 64, masked=True) == pytest.approx(one)
    causal = attention(H200, "ground forward", 2, 8192, 16, 64, causal=True)
    assert causal == pytest.approx(2 * 16 * 8192 * (8192 + 64) / 2 * one / H200.clocks + START)
    assert causal > attention(H200, "forward", 2, 8192, 16, 64, causal=True)


def cubed(name, size):
    return ladder(H200, name, size, size, size)


def test_each_rung_of_the_ladder_is_expected_where_its_instructions_and_its_bytes_of_l2_put_it():
    fp32 = [cubed(name, 4096) for name in ("naive", "coalesced", "shared_tiles", "coarsened_1d", "coarsened_2d")]
    assert [*fp32, cubed("vectorised", 4096)] == sorted([*fp32, cubed("vectorised", 4096)], reverse=True)
    assert cubed("warp_tiles", 4096) >= product(H200, 2 * 4096**3, "fp32")
    rate = 2e-12 * 4096**3 / cubed("coarsened_1d", 4096)
    assert 18 < rate < 20, f"{rate} TFLOP/s: 167 instructions for 64 multiply-adds, without copies that never run"
    bf16 = [cubed(name, 8192) for name in ("mma_tiles", "tma_wgmma", "persistent", "multicast")]
    assert bf16 == sorted(bf16, reverse=True)
    assert ladder(H200, "triton", 1, 1, 1) is None and ladder(None, "naive", 1, 1, 1) is None
    assert ladder(gpu_called("A100"), "fp8_product", 1, 1, 1) is None
    assert all(predictions.refuted(name) not in ("", "-") for name in (*LADDER, *TENSOR))


def test_a_tile_by_hand():
    """128 x 256 x 8192 on each of 132: 128 clocks a term, 48 bytes a clock from L2, 4,224 for two blocks that share B.

    Half of the store of 64 KB, by 132 blocks at one time, is 845 clocks of L2. Alone a block asks for 6,336 bytes.
    """
    multicast = TENSOR["multicast"]
    assert multicast.products(H200) == pytest.approx(16, rel=0.01)
    assert multicast.asks(H200) == pytest.approx(4224, rel=0.01)
    assert TENSOR["persistent"].asks(H200) == pytest.approx(6336, rel=0.01) == TENSOR["ping_pong"].asks(H200)
    assert TENSOR["fp8_product"].asks(H200) == pytest.approx(4224, rel=0.01)
    waves = 16  # 1,024 pairs of tiles on 66 clusters
    clocks = waves * (8192 * 16 + 845)
    assert cubed("multicast", 8192) == pytest.approx(clocks / (0.8 * 1.83e9), rel=0.01)
    alone = waves * (8192 * 16 * 6336 / 5120 + 845)
    assert cubed("persistent", 8192) == pytest.approx(alone / (0.8 * 1.83e9), rel=0.01)
    short = ladder(H200, "ping_pong", 8192, 8192, 1024)
    assert short == pytest.approx(2 * waves * 1024 * 8 * 6336 / 5120 / (0.8 * 1.83e9), rel=0.03), "stores cost nothing"
    # Where the copies in and out of HBM are all there is: 2 M N bytes and hardly a product.
    wide = ladder(H200, "ping_pong", 65536, 65536, 8)
    assert wide == pytest.approx(2 * 65536**2 / (0.9 * 4.8e12), rel=0.01)


# ---------------------------------------------------------------------------------------------- counted in the binaries

COUNT = r"""
import json, os, re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
import _flash_compile as compiled
import flash_attention as core
from _flash_launch import plan_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def loops(sass):
    lines = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?(.*?);", sass, re.M)
    code = [(int(at, 16), text) for at, text in lines]
    for at, text in code:
        back = re.match(r"BRA\S*\s+.*?(0x[0-9a-f]+)", text)
        if back and int(back[1], 16) <= at:
            yield [t for a, t in code if int(back[1], 16) <= a <= at]

def inner(sass, least):
    "Loops with products and 2^x and no loop inside: plain and masked, the shorter first."
    found = [b for b in loops(sass) if sum("HGMMA" in t for t in b) and sum("MUFU.EX2" in t for t in b) >= least]
    return sorted([b for b in found if sum(t.startswith("BRA") for t in b) < 9], key=len)[:2]

def sass_of(source, **options):
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        return subprocess.run([compiled.CUOBJDUMP, "-sass", file.name], capture_output=True, text=True).stdout

def products(body, threads):
    "FLOPs of the tensor cores in a loop, over 2: by the shapes in the names of the instructions."
    shapes = [re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", t) for t in body]
    wide = sum(int(m[1]) * int(m[2]) * int(m[3]) for m in shapes if m) * threads // 128
    return wide, sum(t.startswith("HMMA.16816") for t in body) * 16 * 8 * 16 * threads // 32

out = {}
for D, R, C in ((64, 64, 64), (128, 64, 32)):  # the tiles of the core file on a GPU, 8 warps
    for name in ("forward", "dq", "dkdv"):
        kernel = getattr(core, name + "_kernel")
        bodies = []
        for causal in (False, True):
            known = dict(CAUSAL=causal, BLOCK_M=R, BLOCK_N=C, HEAD_DIM=D)
            sizes = dict.fromkeys(("seq_len", "n_heads", "group"), "i32")
            kinds = sizes | dict(lse_ptr="*fp32", delta_ptr="*fp32") | dict.fromkeys(known, "constexpr")
            signature = {key: kinds.get(key, "*bf16") for key in kernel.arg_names}
            places = {key: (place,) for place, key in enumerate(signature)}
            aligned = {places[key]: [["tt.divisibility", 16]] for key in signature if key not in (*known, *sizes)}
            source = ASTSource(kernel, signature, {places[key]: value for key, value in known.items()}, aligned)
            found = [b for b in loops(sass_of(source, num_warps=8)) if any("MUFU.EX2" in t for t in b)]
            bodies.append(min(found, key=len))
        wide, old = products(bodies[0], 256)
        counts = [len(b) for b in bodies] + [sum(t.startswith("MUFU") for t in bodies[0])]
        out[f"ground {name} {D}"] = [*counts, wide / (R * C * D), old / (R * C * D)]
for D in (64, 128):
    plan = plan_for(D, torch.bfloat16, True)
    for name, kernel, signature, constants, warps, stages in compiled.sources(torch.bfloat16, D, plan, False):
        if name == "delta":
            continue
        source = compiled.source_of(kernel, signature, constants, D)
        bodies = inner(sass_of(source, num_warps=warps, num_stages=stages), 16)
        out[f"{name} {D}"] = [len(b) for b in bodies] + [sum(t.startswith("MUFU") for t in bodies[0])]
print(json.dumps(out))
"""


@pytest.mark.prove
def test_the_loops_of_the_kernels_have_as_many_instructions_as_were_counted():
    """With the Triton that is here; another version may compile a little differently, and 15 % may go unsaid."""
    pytest.importorskip("triton")
    paths = find("_flash_compile.py").parent, find("flash_attention.py").parent
    [counted] = printed_json("-c", COUNT, TRITON_INTERPRET="0", PYTHONPATH=os.pathsep.join(map(str, paths)))
    for (name, D), loop in installed_loops().items():
        instructions, masked, special, *tensor = counted[f"{name} {D}"]
        if tensor:
            assert tensor[0] + tensor[1] / predictions.MMA_SYNC == loop.products, f"{name}, D {D}: {tensor} products"
        for what, want, got in (
            ("instructions", loop.instructions, instructions),
            ("masked", loop.masked, masked),
            ("2^x", loop.special, special),
        ):
            assert abs(got - want) <= 0.15 * want, f"{name}, D {D}: {what} {got}, and {want} in predictions.py"


# Of a step along K in the fp32 rungs: stores to shared memory and loads from global memory that a thread of a whole
# tile makes, by the source, and how often the loop inside is run (1: unrolled). None: whatever the machine code has.
STEPS = {
    "naive": (None, None, 1),
    "coalesced": (None, None, 1),
    "shared_tiles": (2, 2, 1),
    "coarsened_1d": (2 * 64 * 8 // 512, 2 * 64 * 8 // 512, 1),
    "coarsened_2d": (2 * 128 * 8 // 256, 2 * 128 * 8 // 256, 8),
    "register_tiles": (2 * 128 * 8 // 256, 2 * 128 * 8 // 256, 8),
    "vectorised": (5, 2, 1),
    "warp_tiles": (5, 2, 1),
}


def issued(code, stores, loads, repeats):
    """(instructions, multiply-adds) that a warp issues in one step: of all ways through the outer loop of the machine
    code the longest one that makes as many stores and loads, with the loop inside run so often."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(@!?U?P\w+ +)?([^;]*);", code)
    rows = [(int(at, 16), bool(guard), text) for at, guard, text in lines]
    index = {at: i for i, (at, _, _) in enumerate(rows)}
    branches = {}  # place -> (target, is it always taken?)
    for at, guard, text in rows:
        if branch := re.match(r"BRA\S*\s+(\S*?)(?:, )?(0x[0-9a-f]+)", text):
            branches[at] = int(branch[2], 16), not guard and not branch[1]

    def fmas(first, last):
        return sum(text.startswith("FFMA") for at, _, text in rows if first <= at <= last)

    loops = [(target, at) for at, (target, _) in branches.items() if target < at and fmas(target, at)]
    most = max(fmas(*loop) for loop in loops)
    nested = sorted((loop for loop in loops if fmas(*loop) == most), key=lambda loop: loop[1] - loop[0])
    first, last = nested[-1]
    ways, found, seen = [(index[first], 0, 0, 0)], set(), set()
    while ways:
        i, length, stored, loaded = way = ways.pop()
        if way in seen:
            continue
        seen.add(way)
        at, _, text = rows[i]
        counts = length + 1, stored + text.startswith("STS"), loaded + text.startswith("LDG")
        if at == last:
            found.add(counts)
            continue
        target, always = branches.get(at, (0, False))
        if at < target <= last:
            ways.append((index[target], *counts))
        if not always:
            ways.append((i + 1, *counts))
    fits = [n for n, stored, loaded in found if stores in (None, stored) and loads in (None, loaded)]
    inner = 0 if len(nested) == 1 else index[nested[0][1]] - index[nested[0][0]] + 1
    return max(fits) + (repeats - 1) * inner, most * repeats


@pytest.mark.prove
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on the PATH")
def test_the_rungs_in_fp32_issue_as_many_instructions_as_were_counted(tmp_path):
    """What nvcc has unrolled for loops that are longer than these is in the machine code, and does not count."""
    sys.path.append(str(find("_cuda.py").parent))
    import _cuda

    codes = []
    for source in (find("_cuda.py").with_name("matmul_ladder.cu"), find("bench_matmul.py").with_name("matmul.cu")):
        _cuda.resources(str(source), "sm_90a", tmp_path / f"{source.stem}.cubin")
        codes += _cuda.functions(tmp_path / f"{source.stem}.cubin")
    for name, rung in LADDER.items():
        whole = re.compile(rf"_Z\d+{name}(iii|ILb1E)")  # of a template the variant for whole tiles
        code = next(code for code in codes if whole.match(code))
        instructions, fmas = issued(code, *STEPS[name])
        counted = instructions / fmas
        assert counted == pytest.approx(rung.instructions, rel=0.05), f"{name}: {instructions} for {fmas} multiply-adds"


def test_every_rung_with_a_prediction_is_a_rung():
    source = find("matmul_ladder.py").read_text()
    names = set(re.findall(r"Rung\(\d+, \"(\w+)\"", source))
    assert set(LADDER) - {"register_tiles"} <= names and set(TENSOR) - {"fp8_product"} <= names
