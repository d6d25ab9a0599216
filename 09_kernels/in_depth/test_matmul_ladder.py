"""The ladder against float64, predictions against counts, and the shim against kernels that are wrong on purpose."""

import re
import shutil
import sys
from pathlib import Path

import _cuda
import matmul_ladder
import pytest
import torch
import torch.nn.functional as F
from _cuda import FORWARD, REVERSE, CudaError, Resources, call
from harness.programs import assert_refused, printed_json, refusal
from matmul_ladder import (
    GPUS,
    INTERPRETED,
    LADDER,
    RUNGS,
    TRITON,
    Multiprocessor,
    error_ratio,
    occupancy,
    random_inputs,
)

HERE = Path(__file__).resolve().parent
README = (HERE.parent / "README.md").read_text()
DEVICE = "cpu" if INTERPRETED else "cuda"  # for Triton; the CUDA sources run on the CPU in these tests
NVCC = pytest.mark.skipif(not shutil.which("nvcc"), reason="without nvcc nothing can be compiled for a GPU")


def dtype_of(rung):
    return torch.float32 if rung == TRITON else RUNGS[rung].dtype


# --------------------------------------------------------------------------------------------------- right results


@pytest.mark.always("coarsened_2d", "tma_wgmma", "triton")
@pytest.mark.parametrize("rung", [*RUNGS, TRITON])
def test_every_rung_equals_float64_at_odd_sizes_and_in_every_order_of_its_threads(rung):
    for size in ((139, 263, 269), (1, 1, 1), (5, 300, 8), (128, 256, 136)):
        ratio, same = matmul_ladder.verify(rung, *size, DEVICE if rung == TRITON else "cpu")
        assert ratio <= 2, f"{rung} at {size}: its error is {ratio} times that of PyTorch's product"
        assert same, f"{rung} at {size}: the bits depend on the order in which the threads run"


# Blocks with more than one step of each kind: a stage of tma_wgmma is used again from the fifth step of 64 on.
# The last two have two tiles and more for a cluster, and one block of it that hangs over the edge. Rows of C are
# multiples of 16 bytes, so that the copy engine writes them.
SMALL = {"shared_tiles": (33, 35, 70), "coarsened_1d": (65, 66, 20), "mma_tiles": (128, 128, 320)}
LARGE = {"tma_wgmma": (128, 256, 384), "persistent": (200, 304, 384)}
CLUSTERS = {"multicast": (200, 304, 320), "ping_pong": (140, 264, 320)}
# Of a cluster's 24 warps: of each block the producer, and one of each group of consumers; of a block alone the same.
CHOSEN = {"multicast": (0, 5, 10, 12, 17, 22), "ping_pong": (0, 5, 10, 12, 17, 22), "persistent": (0, 4, 5, 8, 10)}


@pytest.mark.always("shared_tiles")
@pytest.mark.parametrize("rung", list(RUNGS)[2:])  # the first two have no barrier to forget
def test_the_bits_are_the_same_when_one_warp_runs_ahead_or_falls_behind_as_far_as_barriers_let_it(rung):
    size = (SMALL | LARGE | CLUSTERS).get(rung, (139, 130, 20))
    a, b = random_inputs(*size, RUNGS[rung].dtype, "cpu")
    first = matmul_ladder.matmul(a, b, rung)
    assert error_ratio(first, a, b) <= 2
    for order in _cuda.uneven(RUNGS[rung].threads, CHOSEN.get(rung, ())):
        try:
            same = torch.equal(first, matmul_ladder.matmul(a, b, rung, order=order))
        except CudaError as error:
            raise AssertionError(f"{rung}, order {order}: {error}") from None
        assert same, f"{rung}, order {order}: a warp that is ahead or behind gives other bits"


def test_in_ping_pong_one_warpgroup_multiplies_at_a_time_and_beside_it_the_other_writes():
    a, b = random_inputs(128, 1024, 320, torch.bfloat16, "cpu")  # four tiles for a cluster
    out = a.new_full((128, 1024), float("nan"))
    entries = _cuda.diary(*RUNGS["ping_pong"].call, 12, 128, 1024, 320, a, b.t().contiguous(), out, order=REVERSE)
    assert error_ratio(out, a, b) <= 2
    sweeps = {
        (warp, deed): {s for s, w, d in entries if (w, d) == (warp, deed)}
        for warp in (4, 8)
        for deed in ("multiplies", "writes")
    }
    assert not sweeps[4, "multiplies"] & sweeps[8, "multiplies"]
    assert sweeps[4, "writes"] & sweeps[8, "multiplies"] and sweeps[8, "writes"] & sweeps[4, "multiplies"]


@pytest.mark.parametrize("rung", [*RUNGS, TRITON])
def test_any_view_any_magnitude_and_empty_matrices(rung):
    device = DEVICE if rung == TRITON else "cpu"
    generator = torch.Generator().manual_seed(3)

    def wide(rows, cols):
        return torch.randn(rows, cols, generator=generator).to(device, dtype_of(rung))

    a, b = wide(70, 82)[::2, 1::2], wide(150, 41).t()[:, 3:]  # every second element from an odd one; a transpose, cut
    assert error_ratio(matmul_ladder.matmul(a, b, rung), a, b) <= 2
    one, two = wide(33, 40) * 1e15, wide(40, 35) * 1e15
    assert error_ratio(matmul_ladder.matmul(one, two, rung), one, two) <= 2
    one[7] *= 1e30  # infinite
    got = matmul_ladder.matmul(one, two, rung)
    assert not got[7].isfinite().any() and got[:7].isfinite().all() and got[8:].isfinite().all()
    assert matmul_ladder.matmul(wide(0, 5), wide(5, 3), rung).shape == (0, 3)
    assert torch.equal(
        matmul_ladder.matmul(wide(4, 0), wide(0, 3), rung), torch.zeros(4, 3, dtype=dtype_of(rung)).to(device)
    )


@pytest.mark.always("1-1")
@pytest.mark.parametrize(("a_across", "b_across"), [(0, 1), (1, 0), (1, 1)])
def test_multicast_reads_factors_that_lie_across_without_a_copy(a_across, b_across, monkeypatch):
    handed = []

    def spy(source, function, *arguments, **options):
        handed[:] = [x.data_ptr() for x in arguments if isinstance(x, torch.Tensor)]
        return call(source, function, *arguments, **options)

    monkeypatch.setattr(matmul_ladder, "call", spy)
    for size in ((200, 304, 320), (136, 264, 72)):  # two tiles for a cluster, and one that hangs over every edge
        a, b = (x.contiguous() for x in random_inputs(*size, torch.bfloat16, "cpu"))
        want = matmul_ladder.matmul(a, b.t().contiguous().t(), "multicast")
        a = a.t().contiguous().t() if a_across else a
        b = b if b_across else b.t().contiguous().t()
        for order in (FORWARD, REVERSE, _cuda.ahead(12), _cuda.behind(12)):
            got = matmul_ladder.matmul(a, b, "multicast", order=order)
            assert torch.equal(got, want), f"{size}, order {order}"
            assert handed == [a.data_ptr(), b.data_ptr(), got.data_ptr()], "a factor was copied"
    for rows, columns in ((40, 16), (36, 16), (40, 20), (1, 16)):  # only the first are multiples of 8
        across = torch.empty(columns * rows + 1, dtype=torch.bfloat16)
        assert matmul_ladder.lies_across(across[:-1].view(columns, rows).t()) == ((rows, columns) == (40, 16))
        assert not matmul_ladder.lies_across(across[1:].view(columns, rows).t()), "an address of 2 bytes"
    a, b = random_inputs(40, 48, 20, torch.bfloat16, "cpu")  # 20 numbers are no multiple of 16 bytes
    assert error_ratio(matmul_ladder.matmul(a.t().contiguous().t(), b.contiguous(), "multicast"), a, b) <= 2


def test_vector_addition_covers_a_length_that_is_no_multiple_of_the_block():
    for n in (1, 256, 1000):
        a, b = torch.randn(n), torch.randn(n)
        field = torch.full((n + 256,), float("nan"))  # room for the whole last block
        call("matmul_ladder.cu", "run_vector_add", n, *(F.pad(x, (0, 256)) for x in (a, b)), field)
        assert torch.equal(field[:n], a + b)
        assert field[n:].isnan().all(), "it wrote behind the end"


def test_triton_takes_fp16_and_sums_in_fp32():
    a, b = random_inputs(50, 70, 300, torch.float16, DEVICE)
    assert error_ratio(matmul_ladder.matmul(a, b, TRITON), a, b) <= 2


# ------------------------------------------------------------------------------------------------------ predictions


@pytest.mark.always("coalesced", "vectorised", "mma_tiles", "persistent", "multicast")
@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_sectors_and_bank_turns_are_those_predicted(rung):
    size = (128 * rung.cluster, 256, 64)
    got = matmul_ladder.count(rung, *size)
    assert got.load_sectors == rung.load_sectors(*size)
    if got.bank_turns_least:
        assert got.bank_turns == rung.bank_turns * got.bank_turns_least


def test_the_intensity_of_tiles_is_the_harmonic_mean_of_the_formula():
    for rung in LADDER:
        if rung.tile:
            BM, BN = rung.tile
            BM *= rung.cluster  # two tiles, one above the other, and a single fetch of B
            assert rung.intensity(512, 512, 512) == pytest.approx(2 / (rung.dtype.itemsize * (1 / BM + 1 / BN)))


def test_occupancy_is_decided_by_the_scarcest_resource():
    gpu = Multiprocessor(shared=228 * 1024, block_shared=227 * 1024)
    assert occupancy(Resources(32, 0, 0), 1024, gpu) == 1.0  # 2 blocks of 32 warps
    assert occupancy(Resources(128, 0, 16640), 256, gpu) == 16 / 64  # registers: 65536 / (128 · 256) = 2 blocks
    assert occupancy(Resources(33, 0, 0), 256, gpu) == 48 / 64  # 33 become 40: 6 blocks of 8 warps, and not 7
    assert occupancy(Resources(16, 0, 0), 32, gpu) == 32 / 64  # 32 blocks at most, however small
    assert occupancy(Resources(32, 0, 0), 256, gpu, dynamic_shared=100 * 1024) == 16 / 64  # 228 / (100 + 1) = 2 blocks
    assert occupancy(Resources(32, 0, 0), 64, gpu, dynamic_shared=7 * 1024) == 56 / 64  # 228 / (7 + 1) = 28 blocks
    assert occupancy(Resources(16, 0, 0), 768, gpu) == 48 / 64  # 64 warps hold two blocks of 24, and no part of a third
    assert occupancy(Resources(32, 0, 0), 33, gpu) == 1.0  # 32 blocks of two warps, of which the second has one thread


def test_a_table_of_resources_says_whether_each_kernel_fits(monkeypatch, capsys):
    for used, fits in (
        (Resources(32, 0, 0), True),
        (Resources(32, 0, 0, stack=8), False),
        (Resources(32, 0, 200 * 1024), False),  # more than a block may have
        (Resources(255, 0, 0), False),  # no block of 1024 threads
    ):
        monkeypatch.setattr(matmul_ladder, "resources", lambda *_, used=used: dict.fromkeys(RUNGS, used))
        for arch, rungs in (("sm_80", 8), ("sm_90a", 12)):
            assert matmul_ladder.print_resources(arch) == fits, f"{used} on {arch}"
            assert len(capsys.readouterr().out.splitlines()) == 1 + rungs


# --------------------------------------------------------------------------------------------------- compiled for GPUs


def test_one_command_builds_what_every_launch_on_a_gpu_loads(tmp_path, monkeypatch, capsys):
    """Nothing is compiled: the compiler writes its command down, and makes an empty file."""
    commands, loaded = [], []

    def compiler(command, source):
        if source == "elu.cu":
            raise CudaError("elu.cu: no")
        commands.append(command)
        Path(command[-1]).write_text("")

    monkeypatch.setattr(sys, "argv", ["_cuda.py", "--build"])
    monkeypatch.setenv("CUDA_BUILDS", str(tmp_path / "builds"))
    monkeypatch.setattr(_cuda, "cublas", lambda: ("-lcublas",))
    monkeypatch.setattr(_cuda, "run_compiler", compiler)
    monkeypatch.setattr(_cuda.ctypes, "CDLL", lambda file: loaded.append(file))
    assert _cuda.main() == 1, "one of them fails"
    lines = capsys.readouterr().out.splitlines()
    made = {line.split(":")[0] for line in lines}
    assert (
        made == {source.name for source in HERE.parents[1].glob("[01][0-9]_*/**/*.cu")} and len(made) == len(lines) >= 8
    )
    assert [line for line in lines if "FAILED" in line] == ["elu.cu: FAILED: elu.cu: no"]
    built = len(commands)
    assert built == len(made) - 1
    assert all("-gencode=arch=compute_90a,code=sm_90a" in command for command in commands)
    for source in sorted(made - {"elu.cu", "fp8_matmul.cu", "matmul.cu"}):
        _cuda.library.__wrapped__(source, "cuda", (9, 0))
    fp8 = HERE.parents[1] / "10_mixed_precision" / "in_depth" / "fp8_matmul.cu"
    _cuda.library.__wrapped__(fp8, "cuda", (9, 0))
    _cuda.program_file(HERE.parent / "matmul.cu", "sm_90a")
    assert len(commands) == built, f"built again: {commands[built:]}"
    assert {Path(file).parent for file in loaded} == {tmp_path / "builds"} and len(loaded) == len(made) - 2


def test_a_changed_header_is_a_new_library(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_BUILDS", str(tmp_path / "builds"))
    monkeypatch.setattr(_cuda, "run_compiler", lambda command, source: Path(command[-1]).write_text(""))
    (tmp_path / "a.cu").write_text('#include "near.h"\n')
    (tmp_path / "near.h").write_text('  #  include "far.h"\n#include "tiles.h"\n')
    (tmp_path / "far.h").write_text("1")
    first = _cuda.library_file(tmp_path / "a.cu", "sm_90a")
    assert _cuda.library_file(tmp_path / "a.cu", "sm_90a") == first
    assert {_cuda.HERE / "tiles.h", _cuda.HERE / "ptx.h"} <= set(_cuda.included(tmp_path / "a.cu"))
    assert _cuda.library_file(tmp_path / "a.cu", "sm_80") != first
    (tmp_path / "far.h").write_text("2")
    assert _cuda.library_file(tmp_path / "a.cu", "sm_90a") != first
    other = tmp_path / "other.h"  # which nobody includes by name
    other.write_text("1")
    first = _cuda.built(tmp_path / "a.cu", ["g++"], ".so", [other])
    other.write_text("2")
    assert _cuda.built(tmp_path / "a.cu", ["g++"], ".so", [other]) != first
    assert [_cuda.architecture(x) for x in ((8, 0), (9, 0), (10, 0))] == ["sm_80", "sm_90a", "sm_100"]


def test_a_source_that_does_not_compile_is_one_line_and_no_library(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_BUILDS", str(tmp_path / "builds"))
    (tmp_path / "bad.cu").write_text("#error no such thing\n#error nor this\n")
    with pytest.raises(CudaError, match=r"^g\+\+ cannot build bad.cu: .*no such thing$"):
        _cuda.library_file(tmp_path / "bad.cu", "cpu")
    assert not list((tmp_path / "builds").iterdir())


def test_of_a_template_the_largest_resources_count_and_of_loops_the_innermost_that_multiplies(monkeypatch):
    report = ""
    for stack, registers in ((8, 40), (16, 32)):
        report += f"Compiling entry function '_Z4sumsILi{registers}EEvPf' for 'sm_90a'\n {stack} bytes stack frame, "
        report += f"{stack} bytes spill stores, 4 bytes spill loads\n Used {registers} registers, 512 bytes smem\n"
    monkeypatch.setattr(_cuda, "run_compiler", lambda command, source: report)
    assert _cuda.resources("sums.cu", "sm_90a") == {"sums": Resources(40, 16 + 4, 512, 16)}
    code = ["MOV R1, R2", "LDS.128 R4, [R2]", "LDS R8, [R2]", "FFMA R1, R4, R8, R1", "@P0 BRA 0x10", "LDG R9, [R6]"]
    text = "".join(f"/*{16 * i:04x}*/  {word} ;\n" for i, word in enumerate([*code, "@!P1 BRA 0x0"]))
    assert _cuda.multiplying_loop(text) == _cuda.Loop(4, 1, 2, 1, 0)


def test_a_single_wrong_element_of_what_was_timed_is_an_objection():
    """Among millions it hardly changes the mean error."""
    import bench_matmul_ladder as bench

    given = bench.problem((300, 200, 64), torch.bfloat16, torch.device("cpu"))
    right = given.want.bfloat16()
    assert given.objection(right) == ""
    for value in (float("nan"), 1.05 * right[299, 199].item()):
        wrong = right.clone()
        wrong[299, 199] = value
        assert given.objection(wrong), value
    assert "its error is" in given.objection((given.a.half() @ given.b.half()).to(torch.float8_e4m3fn).bfloat16())


OUT = ("UTMASTG.2D", "UTMACMDFLUSH", "FENCE.VIEW.ASYNC")  # sums leave by the copy engine, behind a fence


@pytest.mark.prove
@NVCC
def test_kernels_have_no_stack_frame_and_fit_into_a_multiprocessor_and_use_the_units_they_are_about(tmp_path):
    cubin, other = tmp_path / "tensor_cores.cubin", tmp_path / "clusters.cubin"
    for arch, gpu in GPUS.items():
        found = _cuda.resources("matmul_ladder.cu", arch) | _cuda.resources("tensor_cores.cu", arch, cubin)
        found |= _cuda.resources("clusters.cu", arch, other) if arch == "sm_90a" else {}
        for rung in LADDER:
            if arch == "sm_80" and rung.capability > (8, 0):
                continue
            used = found[rung.name]
            assert used.stack == used.spills == 0, f"{rung.name}: {used.stack} bytes in local memory on {arch}"
            assert used.shared + rung.dynamic_shared <= gpu.block_shared
            assert occupancy(used, rung.threads, gpu, rung.dynamic_shared) > 0
        # Two blocks of warp_tiles on a multiprocessor: while one waits at its barrier, the other computes.
        assert occupancy(found["warp_tiles"], 256, gpu) >= 16 / 64
    # arch is sm_90a now. setmaxnreg moves registers between warps; it counts on an even split at the start.
    for name in ("persistent", "multicast", "ping_pong"):
        assert found[name].registers == 65536 // 384 // 8 * 8
    code = machine_code(cubin) | machine_code(other)
    for name, instructions in {
        "mma_tiles": ("HMMA.16816.F32.BF16", "LDGSTS", "LDSM"),  # mma, cp.async, ldmatrix
        "tma_wgmma": ("HGMMA.64x256x16.F32.BF16", "UTMALDG", "SYNCS", *OUT),  # wgmma, TMA, mbarriers
        "persistent": ("HGMMA.64x256x16.F32.BF16", "UTMALDG", "USETMAXREG", *OUT),
        "multicast": ("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D.MULTICAST", "SYNCS.ARRIVE.TRANS64.RED", *OUT),
        "multicast, b across": ("].tnspB,", "UTMALDG.2D.MULTICAST", *OUT),
        "multicast, a across": ("].tnspA,", "UTMALDG.2D.MULTICAST", *OUT),
        "multicast, a across, b across": ("].tnspA.tnspB,", "UTMALDG.2D.MULTICAST", *OUT),
        "ping_pong": ("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D.MULTICAST", "UCGABAR_ARV", "UCGABAR_WAIT", *OUT),
    }.items():
        for instruction in instructions:
            assert instruction in code[name], f"{name} has no {instruction}"
        assert not re.search(r"\b(LDL|STL)\b", code[name]), f"{name} uses local memory"
    for name in [name for name in code if name.startswith("multicast")] + [
        "ping_pong"
    ]:  # two barriers of the cluster, at the beginning and at the end
        assert code[name].count("MEMBAR.ALL.GPU") == 2, f"{name} waits for L2 in each step"
        assert code[name].count("CCTL.IVALL") == 2, f"{name} empties its L1 cache in each step"


@pytest.mark.prove
@NVCC
def test_the_shared_loads_in_machine_code_are_those_that_the_readme_names(tmp_path):
    cubin = tmp_path / "matmul_ladder.cubin"
    _cuda.resources("matmul_ladder.cu", "sm_90a", cubin)
    code = _cuda.disassembled(cubin)
    rows = {words[1]: row for row in README.splitlines() if (words := re.match(r"\| \d+ `(\w+)` \|", row))}
    for name in ("shared_tiles", "coarsened_1d", "coarsened_2d", "vectorised", "warp_tiles"):
        loop = _cuda.multiplying_loop(code[name])
        wide = f", {loop.wide_loads} of them of 16 bytes," if loop.wide_loads < loop.shared_loads else " of 16 bytes"
        says = f"{loop.shared_loads} shared loads{wide} for {loop.fmas} FMAs"
        assert says in rows[name], f"{name}: {says}, and not {rows[name]}"


def machine_code(cubin):
    """The disassembled kernels in bf16, by name, and by which factors they read across."""
    names = [rung.name for rung in LADDER if rung.dtype == torch.bfloat16]
    found = {}
    for part in _cuda.functions(cubin):
        mangled = part.split("\n")[0]
        across = re.search(r"ILb([01])ELb([01])EE", mangled)
        variant = "".join(
            f", {x} across" for x, bit in zip("ab", across.groups() if across else "", strict=False) if bit == "1"
        )
        found |= {name + variant: part for name in names if name in mangled}
    return found


COMPILE = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import matmul_ladder
names = matmul_ladder.tiled_kernel.arg_names
for arch, kind in ((80, "fp32"), (90, "fp32"), (90, "fp16")):
    types = [f"*{kind}"] * 3 + ["i32"] * 7 + ["constexpr"] * 3
    source = ASTSource(matmul_ladder.tiled_kernel, dict(zip(names, types)), {(10,): 64, (11,): 64, (12,): 32})
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    print(json.dumps([arch, kind, built.metadata.shared, "tf32" in built.asm["ptx"], "mma" in built.asm["ptx"]]))
"""


@pytest.mark.prove
def test_the_triton_rung_compiles_for_gpus_and_never_uses_tf32():
    rows = printed_json("-c", COMPILE, TRITON_INTERPRET="0", PYTHONPATH=str(HERE))
    assert [row[:2] for row in rows] == [[80, "fp32"], [90, "fp32"], [90, "fp16"]]
    for arch, kind, shared, tf32, tensor_cores in rows:
        assert shared <= 232448
        assert not tf32, f"on sm_{arch} the {kind} product is computed in TF32, with 10 bits of mantissa"
        assert tensor_cores == (kind == "fp16")


# ------------------------------------------------------------------------------------------------- the shim itself

STRANGE = """
#include "cuda_on_cpu.h"
__global__ void half_meets(global<float> out) {
    if (threadIdx.x < 32) __syncthreads();
    out[threadIdx.x] = 1;
}
__global__ void two_places(global<float> out) {
    if (threadIdx.x % 2) __syncthreads();
    else __syncthreads();
    out[threadIdx.x] = 1;
}
__global__ void reads_what_nobody_wrote(global<float> out) {
    __shared__ float never[64];
    out[threadIdx.x] = never[threadIdx.x];
}
__global__ void neighbour(global<float> out, int barrier) {
    __shared__ float mine[64];
    mine[threadIdx.x] = threadIdx.x;
    if (barrier) __syncthreads();
    out[threadIdx.x] = mine[(threadIdx.x + 1) % 64];
}
__global__ void sum_of_a_warp(global<float> out) {
    float v = threadIdx.x;
    for (int lanes = 16; lanes; lanes /= 2) v += __shfl_xor_sync(~0u, v, lanes);
    out[threadIdx.x] = v;
}
__global__ void diary(global<float> out) {
    for (int step = 0; step < 4; step++) {
        if (threadIdx.x % 32 == 0) {
            out[threadIdx.x + step] = float(out[100]);
            out[100] = out[100] + 1;
        }
        __syncwarp();
    }
}
__global__ void strided(global<const float> in, global<float> out, int stride) {
    __shared__ float storage[32 * 32];
    shared<float> s = storage;
    for (int i = 0; i < 32; i++) s[i * 32 + threadIdx.x] = in[i];
    out[threadIdx.x] = s[threadIdx.x * stride % 1024];
}
__global__ void four_from(global<const float> in, global<float> out, int i) { store4(out, i / 2, load4(in, i)); }
static dim3 one(1);
extern "C" const char* run_four_from(const float* i, float* o, int n, void* s) {
    return launch(four_from, one, one, 0, s, i, o, n);
}
extern "C" const char* run_cluster(float* o, void* s) {
    return launch_clusters(2, half_meets, dim3(2), dim3(64), 0, s, o);
}
extern "C" const char* run_half_meets(float* o, void* s) { return launch(half_meets, one, dim3(64), 0, s, o); }
extern "C" const char* run_two_places(float* o, void* s) { return launch(two_places, one, dim3(64), 0, s, o); }
extern "C" const char* run_unwritten(float* o, void* s) {
    return launch(reads_what_nobody_wrote, one, dim3(64), 0, s, o);
}
extern "C" const char* run_neighbour(float* o, int b, void* s) { return launch(neighbour, one, dim3(64), 0, s, o, b); }
extern "C" const char* run_warp_sum(float* o, void* s) { return launch(sum_of_a_warp, one, dim3(64), 0, s, o); }
extern "C" const char* run_diary(float* o, void* s) { return launch(diary, one, dim3(64), 0, s, o); }
extern "C" const char* run_strided(const float* i, float* o, int n, void* s) {
    return launch(strided, one, dim3(32), 0, s, i, o, n);
}
"""


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    source = tmp_path_factory.mktemp("cuda") / "strange.cu"
    source.write_text(STRANGE)
    return str(source)


def test_a_barrier_that_not_all_threads_reach_is_reported_and_the_next_launch_works(strange):
    out = torch.zeros(64)
    with pytest.raises(CudaError, match=r"32 threads wait at the barrier in line 4.*32 threads have ended"):
        call(strange, "run_half_meets", out)
    with pytest.raises(CudaError, match=r"barrier in line 8, the first is \(1,0,0\).*barrier in line 9"):
        call(strange, "run_two_places", out)
    call(strange, "run_warp_sum", out)
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_shared_memory_is_poisoned_before_every_block(strange):
    out = torch.zeros(64)
    call(strange, "run_unwritten", out)
    assert out.isnan().all()


def test_four_numbers_at_once_that_do_not_begin_at_a_multiple_of_16_bytes_are_reported(strange):
    call(strange, "run_four_from", torch.ones(20), out := torch.zeros(20), 8)
    assert out.tolist() == 4 * [0.0] + 4 * [1.0] + 12 * [0.0]
    for start in (1, 4):  # a load, a store
        with pytest.raises(CudaError, match="misaligned"):
            call(strange, "run_four_from", torch.ones(20), torch.zeros(20), start)


def test_a_missing_barrier_shows_and_shows_differently_in_another_order(strange):
    results = []
    for barrier in (1, 0):
        for order in (FORWARD, REVERSE, 5):
            out = torch.zeros(64)
            call(strange, "run_neighbour", out, barrier, order=order)
            results.append(out)
    right = torch.arange(1.0, 65) % 64
    assert all(torch.equal(out, right) for out in results[:3])
    assert all(out.isnan().any() for out in results[3:])
    assert not torch.equal(results[3].isnan(), results[4].isnan())


def test_a_warp_that_is_ahead_does_all_it_can_before_the_others_and_one_that_is_behind_after_them(strange):
    def diary(order):
        out = torch.zeros(128)
        call(strange, "run_diary", out, order=order)
        return out[:4].tolist(), out[32:36].tolist()

    first, second = [0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]
    assert diary(FORWARD) == ([0, 2, 4, 6], [1, 3, 5, 7]), "forward, warps keep step"
    assert diary(_cuda.ahead(0)) == diary(_cuda.behind(1)) == (first, second)
    assert diary(_cuda.ahead(1)) == diary(_cuda.behind(0)) == (second, first)
    races = [diary(_cuda.racing(seed)) for seed in range(20)]
    assert (first, second) in races and (second, first) in races
    assert len({str(race) for race in races}) > 2, "a race in which nobody is ever overtaken"
    assert diary(_cuda.racing(3)) == races[3], "not the same in every run"
    assert _cuda.uneven(33) == [_cuda.ahead(0), _cuda.ahead(1), _cuda.behind(0), _cuda.behind(1), 1_000_001, 1_000_002]
    assert _cuda.uneven(384, (5,)) == [-11, -12, 1_000_001, 1_000_002]


CLUSTER_OF_TWO = """
#include "clusters.h"
__global__ void signals_who_has_left(global<float> out) {
    DYNAMIC_SHARED(uint64_t, barrier);
    if (threadIdx.x == 0) barrier_init(barrier, 1);
    cluster_barrier();
    if (rank_in_cluster() == 0 && threadIdx.x == 0) arrive_at(barrier, 1);
}
__global__ void half_meets(global<float> out) {
    if (rank_in_cluster() == 0)
        cluster_barrier();
}
__global__ void writes_out(const CUtensorMap map, int says) {
    DYNAMIC_SHARED(bf16, tile);
    int row = threadIdx.x, rank = rank_in_cluster();
    for (int col = 0; col < TILE_K; col += 2) put_shared(tile + swizzled(row, col / 8) + col % 8, rank + 1, rank + 1);
    if (says) shared_is_written();
    __syncthreads();
    if (row == 0) {
        copy_tile_out(&map, rank * 32, 0, tile);
        out_commit();
        out_wait<0>();
    }
}
static dim3 two(2);
extern "C" const char* run_signals(float* o, void* s) {
    return launch_clusters(2, signals_who_has_left, two, dim3(32), 1024, s, o);
}
extern "C" const char* run_half(float* o, void* s) { return launch_clusters(2, half_meets, two, dim3(32), 0, s, o); }
extern "C" const char* run_out(bf16* C, int says, void* s) {
    return launch_clusters(2, writes_out, two, dim3(32), 4096, s, CUtensorMap{C, 60, 56, 32}, says);
}
extern "C" const char* run_odd(float* o, void* s) { return launch_clusters(2, half_meets, dim3(3), dim3(32), 0, s, o); }
"""


@pytest.mark.prove  # a second and a half to build its kernels
def test_what_goes_wrong_between_the_blocks_of_a_cluster_is_named(tmp_path, strange):
    source = tmp_path / "cluster_of_two.cu"
    source.write_text(CLUSTER_OF_TWO)
    with pytest.raises(CudaError, match=r"an arrival at a barrier of block 1 of the cluster, which has ended"):
        call(str(source), "run_signals", torch.zeros(1), order=_cuda.ahead(1))
    call(str(source), "run_signals", torch.zeros(1), order=_cuda.ahead(0))  # nothing wrong, where block 0 is first
    with pytest.raises(CudaError, match=r"32 threads wait at the barrier in line 11.*32 threads have ended"):
        call(str(source), "run_half", torch.zeros(1))
    with pytest.raises(CudaError, match="the grid is no whole number of clusters"):
        call(str(source), "run_odd", torch.zeros(1))
    with pytest.raises(CudaError, match="only dynamic shared memory is each block's own"):
        call(strange, "run_cluster", torch.zeros(64))
    # A tile of 32 x 64 from each block, cut at row 60 and column 56; and without the fence that shows it to the engine.
    for says in (1, 0):
        out = torch.zeros(61, 56, dtype=torch.bfloat16)
        call(str(source), "run_out", out, says)
        if says:
            assert out[:32].eq(1).all() and out[32:60].eq(2).all() and out[60].eq(0).all()
        else:
            assert out[:60].isnan().all()


@pytest.mark.parametrize(("stride", "turns"), [(1, 1), (2, 2), (8, 8), (32, 32), (33, 1)])
def test_bank_conflicts_are_counted_as_the_programming_guide_explains_them(strange, stride, turns):
    counted = call(strange, "run_strided", torch.zeros(32), torch.zeros(32), stride, counting=True)
    assert (counted.bank_turns, counted.bank_turns_least) == (turns, 1)
    assert counted.load_requests == 32 and counted.load_sectors == 32  # one address for all lanes: one sector
    assert counted.store_sectors == 4  # 32 neighbours


# ------------------------------------------------------------------------------------------------------------ bad input


def test_what_cannot_be_right_is_refused_in_one_line():
    x = torch.zeros(4, 4)
    far = torch.empty(1, 1).expand(65536, 40000)  # 2.6 billion elements in 4 bytes
    for message, arguments in {
        "rung 'fast' does not exist; there are naive": (x, x, "fast"),
        "is no product of matrices": (x, torch.zeros(3, 4), "naive"),
        "they must be alike": (x, x.half(), "naive"),
        "rung naive takes torch.float32, not torch.float64; cast": (x.double(), x.double(), "naive"),
        "rung mma_tiles takes torch.bfloat16, not torch.float32": (x, x, "mma_tiles"),
        "too far for 32-bit offsets; split it": (far, torch.empty(1, 1).expand(40000, 8), "warp_tiles"),
        "the product .* reaches over": (torch.empty(1, 1).expand(65536, 1), torch.empty(1, 1).expand(1, 32768), TRITON),
        "at most 65535 rows of tiles": (torch.empty(1, 1).expand(65535 * 32 + 1, 1), torch.zeros(1, 1), "naive"),
    }.items():
        assert_refused(message, matmul_ladder.matmul, *arguments)
    assert_refused("they must be alike", matmul_ladder.matmul, x, torch.zeros(4, 4, device="meta"), "naive")
    few_but_far = torch.empty(70000, 40000, device="meta")[::69999, :4]  # two rows, at both ends
    b = torch.empty(4, 4, device="meta")
    assert_refused(r"a \[2, 4\] reaches over 2\^31 elements", matmul_ladder.check_matmul, few_but_far, b, TRITON)
    few_rows = torch.empty(1, 7, device="meta"), torch.empty(7, 300_000_000, device="meta")
    few_columns = torch.empty(2_000_000, 1073, device="meta"), torch.empty(1073, 4, device="meta")
    for (a, b), message in {
        few_rows: r"b, with K padded, \[8, 300000000\] reaches over 2\^31 elements",
        few_columns: r"a, with K padded, \[2000000, 1080\] reaches over 2\^31 elements",
    }.items():
        matmul_ladder.check_matmul(a, b, "warp_tiles")  # in fp32 nothing is padded
        for rung in ("mma_tiles", "persistent", "ping_pong"):
            assert_refused(message, matmul_ladder.check_matmul, a.bfloat16(), b.bfloat16(), rung)
    for M, N in ((65535 * 32, 1), (65536, 32767)):  # both just fit
        matmul_ladder.check_matmul(torch.empty(1, 1).expand(M, 1), torch.empty(1, 1).expand(1, N), "naive")
    if INTERPRETED:
        assert_refused("cast a and b first", matmul_ladder.matmul, x.bfloat16(), x.bfloat16(), TRITON)


def test_a_place_for_the_product_that_no_kernel_could_write_to_is_refused():
    a, b = torch.ones(6, 4), torch.ones(4, 8)
    out = torch.empty(6, 8)
    assert matmul_ladder.matmul(a, b, "naive", out=out) is out and (out == 4).all()
    for wrong, says in (
        (out.double(), r"out is \[6, 8\] of torch.float64 on cpu; it has to be \[6, 8\] of torch.float32"),
        (out[:, :4], r"out is \[6, 4\]"),
        (out.t().contiguous().t(), "in rows from an address that is a multiple of 16"),
        (torch.empty(49)[1:].view(6, 8), "in rows from an address that is a multiple of 16"),
    ):
        assert_refused(says, matmul_ladder.matmul, a, b, "naive", out=wrong)


def test_an_old_gpu_is_refused_before_anything_is_built(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    x = torch.zeros(4, 4, dtype=torch.bfloat16).as_subclass(OnGpu)
    for have, refused in {
        (7, 5): ("mma_tiles", "persistent"),
        (8, 0): ("persistent",),
        (10, 0): ("tma_wgmma",),
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, have=have: have)
        for rung in refused:
            says = rf"{rung} needs compute capability .*, not {have[0]}\.{have[1]}"
            assert_refused(says, matmul_ladder.check_matmul, x, x, rung)
    matmul_ladder.check_matmul(x, x, "mma_tiles")


def test_a_wrong_option_is_one_line_and_exit_code_2(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, message in {
        "--size 3 0 4": "--size 3 0 4: M, N and K must be at least 1",
        "--resources sm_90a --rung naive": "--resources compiles all rungs and ends; leave out --rung",
        "--rung fastest": "argument --rung: invalid choice: 'fastest'",
        "--device cuda": "--device cuda: PyTorch finds no GPU here; use --device cpu",
    }.items():
        assert refusal(matmul_ladder.main, options).startswith(message)
    seen = []
    monkeypatch.setattr(matmul_ladder, "demo", lambda *given: seen.append(given) or 0)
    monkeypatch.setattr(sys, "argv", ["matmul_ladder.py", "--size", "1", "2", "3", "--rung", "naive"])
    assert matmul_ladder.main() == 0 and seen == [(["naive"], 1, 2, 3, "cpu")]


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(_cuda.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["matmul_ladder.py", "--resources", "sm_90a"])
    with pytest.raises(SystemExit) as ended:
        matmul_ladder.main()
    assert ended.value.code == 2
    assert re.fullmatch(
        r"matmul_ladder.py: matmul_ladder.cu needs nvcc .* install the CUDA toolkit\n", capsys.readouterr().err
    )


def test_nan_is_within_no_limit(monkeypatch, capsys):
    assert [matmul_ladder.within(ratio, 2) for ratio in (1.9, 2.1, float("nan"))] == [True, False, False]
    # It computes nothing: `out` stays poisoned.
    monkeypatch.setattr(matmul_ladder, "matmul", lambda a, b, rung, out, order: out)
    assert matmul_ladder.demo(["naive"], 8, 8, 8, "cpu") == 1
    assert "naive: its error is nan times PyTorch's" in capsys.readouterr().out


def test_the_error_is_measured_against_a_reference_without_tf32(monkeypatch):
    seen = []
    real = torch.Tensor.__matmul__

    def watched(a, b):
        seen.append((a.dtype, torch.backends.cuda.matmul.allow_tf32))
        return real(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        a, b = random_inputs(4, 4, 4, torch.float32, "cpu")
        assert error_ratio(matmul_ladder.matmul(a, b, "naive"), a, b) <= 2
        assert torch.backends.cuda.matmul.allow_tf32, "the setting of the caller is gone"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert (torch.float32, False) in seen and (torch.float32, True) not in seen
