"""matmul.cu on the CPU, against float64, in_depth and its own formulas; and the machine code that nvcc makes of it.

The program is built as its first lines say, and run. Its kernels are also called one by one with torch's tensors, in
another process, so that a wrong kernel cannot damage the process that compares. For that, `for_cpu` makes their
accesses countable, and a few C functions (`INSIDE`) are added.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

sys.path.append(str(Path(__file__).with_name("in_depth")))
import _cuda
import matmul_ladder
from _cuda import FORWARD, REVERSE, CudaError
from _plain_cuda import for_cpu
from harness.ranks import run_ranks

PROGRAM = Path(__file__).with_name("matmul.cu")
KERNELS = {"naive": 1, "coalesced": 2, "shared_tiles": 3, "register_tiles": 4}
SIZES = ((139, 263, 77), (1, 1, 1), (5, 300, 8), (33, 31, 130))  # no multiples of a tile; less than one; more than one
NVCC = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on the PATH: nothing can be compiled for a GPU")

INSIDE = """
static const char* ended() {
    static std::string error;
    error = std::move(cuda_on_cpu::launch_error);
    cuda_on_cpu::launch_error.clear();
    return error.empty() ? nullptr : error.c_str();
}
extern "C" const char* run_matmul(int kernel, int M, int N, int K, const float* A, const float* B, float* C, void*) {
    matmul(kernel, M, N, K, A, B, C);
    return ended();
}
extern "C" const char* run_vector_add(int n, const float* a, const float* b, float* c, void*) {
    launch_vector_add(n, a, b, c);
    return ended();
}
extern "C" const char* run_elements(int* rows, int* cols, void*) {  // of the 64 elements of each thread
    for (int t = 0; t < THREADS; t++)
        for (int i = 0; i < 8; i++) rows[8 * t + i] = thread_row(t, i), cols[8 * t + i] = thread_col(t, i);
    return nullptr;
}
extern "C" const char* run_max_error(int M, int N, int K, int count, const float* A, const float* B, const float* C,
                                     float* result, void*) {  // C: with its margins
    result[0] = max_error({C, C + count}, {A, A + M * K}, {B, B + K * N}, M, N, K);
    result[1] = is_right(result[0]);
    return nullptr;
}
"""


@pytest.fixture(scope="module")
def inside():
    return _cuda.program_inside(for_cpu(PROGRAM), INSIDE)


def on_a_rank(*arguments, **options):
    counters = _cuda.call(*arguments, **options)
    return counters, [x for x in arguments if isinstance(x, torch.Tensor)]


def call(*arguments, **options):
    """`_cuda.call` in another process: what it wrote, into its tensors or beside them, is then here, too."""
    [(counters, written)] = run_ranks(1, on_a_rank, *arguments, **options)
    for mine, theirs in zip((x for x in arguments if isinstance(x, torch.Tensor)), written, strict=True):
        mine.untyped_storage().copy_(theirs.untyped_storage())
    return counters


def run_kernel(inside, kernel, a, b, order=FORWARD, counting=False, call=call):
    """C, in a field of NaN of which nothing beside C may have changed."""
    M, N, K = a.shape[0], b.shape[1], a.shape[1]
    field = torch.full((M * N + 512,), float("nan"))
    c = field[256 : 256 + M * N].view(M, N)
    counters = call(inside, "run_matmul", KERNELS[kernel], M, N, K, a, b, c, order=order, counting=counting)
    assert field[:256].isnan().all() and field[256 + M * N :].isnan().all(), f"{kernel} writes beside C"
    return counters if counting else c


# ------------------------------------------------------------------------------------------------------ right results


@pytest.mark.parametrize("kernel", KERNELS)
def test_result_matches_float64_at_uneven_sizes(inside, kernel):
    for M, N, K in SIZES:
        a, b = matmul_ladder.random_inputs(M, N, K, torch.float32, "cpu")  # inside fields of NaN
        error = matmul_ladder.error_ratio(run_kernel(inside, kernel, a, b), a, b)
        assert error <= 2, f"{kernel} at {M} x {N} x {K}: its error is {error} times that of torch's product"


@pytest.mark.always("register_tiles")
@pytest.mark.parametrize("kernel", KERNELS)
def test_result_does_not_depend_on_the_order_of_threads(inside, kernel):
    threads = 256 if kernel == "register_tiles" else 1024
    for size, orders in (((139, 130, 77), (REVERSE, 7)), ((33, 31, 70), _cuda.uneven(threads))):
        a, b = matmul_ladder.random_inputs(*size, torch.float32, "cpu")
        first = run_kernel(inside, kernel, a, b)
        for order in orders:
            other = run_kernel(inside, kernel, a, b, order)
            assert torch.equal(first, other), f"{kernel}, order {order}: off by {float((first - other).abs().max())}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_result_equals_the_rung_in_depth(inside, kernel):
    rung = kernel.replace("register_tiles", "coarsened_2d")
    a, b = matmul_ladder.random_inputs(139, 130, 77, torch.float32, "cpu")
    assert torch.equal(run_kernel(inside, kernel, a, b), matmul_ladder.matmul(a, b, rung))  # both add k = 0, 1, 2, ...


def test_vector_add_writes_every_element_and_nothing_else(inside):
    for n in (1, 256, 1000):
        a, b, field = torch.randn(n + 256), torch.randn(n + 256), torch.full((n + 256,), float("nan"))
        call(inside, "run_vector_add", n, a, b, field)
        assert torch.equal(field[:n], a[:n] + b[:n])
        assert field[n:].isnan().all(), "it wrote past the end"


def test_infinity_stays_in_its_row(inside):
    a, b = torch.randn(40, 50), torch.randn(50, 40)
    a[7, 3] = float("inf")
    for kernel in KERNELS:
        c = run_kernel(inside, kernel, a, b)
        assert not c[7].isfinite().any() and c[:7].isfinite().all() and c[8:].isfinite().all(), kernel


# ----------------------------------------------------------------------------------------- what it asks of the memory

COUNTED = (128, 256, 64)  # whole tiles of every kernel


def predicted(kernel):
    """Sectors loaded and stored, shared loads of a warp, wavefronts per shared load and per shared store."""
    M, N, K = COUNTED
    loaded = {
        "naive": M * N * K * 33 // 32,
        "coalesced": M * N * K * 5 // 32,
        "shared_tiles": M * N * K * (1 / 32 + 1 / 32) * 4 / 32,
        "register_tiles": M * N * K * (1 / 128 + 1 / 128) * 4 / 32,
    }[kernel]
    shared = {"shared_tiles": M * N * K * 2 // 32, "register_tiles": M * N * K * 16 // 64 // 32}.get(kernel, 0)
    return loaded, M * N if kernel == "naive" else M * N // 8, shared, 1.0, 1.0


@pytest.mark.always("naive", "coalesced", "register_tiles")
@pytest.mark.parametrize("kernel", KERNELS)
def test_sectors_and_wavefronts_match_the_formulas(inside, kernel):
    M, N, K = COUNTED
    got = run_kernel(inside, kernel, torch.randn(M, K), torch.randn(K, N), counting=True)
    wavefronts = [
        taken / least if least else 1.0
        for taken, least in ((got.bank_turns, got.bank_turns_least), (got.store_turns, got.store_turns_least))
    ]
    found = got.load_sectors, got.store_sectors, got.shared_requests, *wavefronts
    names = "sectors loaded", "sectors stored", "shared loads", "wavefronts per load", "wavefronts per store"
    assert dict(zip(names, found, strict=True)) == dict(zip(names, predicted(kernel), strict=True))


def test_threads_of_register_tiles_own_each_element_once(inside):
    rows, cols = torch.zeros(256, 8, dtype=torch.int32), torch.zeros(256, 8, dtype=torch.int32)
    call(inside, "run_elements", rows, cols)
    owned = (rows[:, :, None] * 128 + cols[:, None, :]).flatten()
    assert torch.equal(owned.sort().values, torch.arange(128 * 128, dtype=torch.int32))
    warp = (rows[:32, :, None] * 128 + cols[:32, None, :]).flatten()
    assert torch.equal(warp.unique() // 128 * 64 + warp.unique() % 128, torch.arange(32 * 64, dtype=torch.int32))


# ------------------------------------------------------------------------------------------------- the program itself


def build(folder, source):
    """By the command in the first lines of matmul.cu, in a folder with the header and nothing else."""
    (folder / "in_depth").mkdir()
    shutil.copy(_cuda.HERE / "cuda_on_cpu.h", folder / "in_depth")
    (folder / "matmul.cu").write_text(source)
    command = re.sub(r"\n//", "", re.search(r"sed -E .*? -o matmul -", PROGRAM.read_text(), re.DOTALL)[0])
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "matmul"


@pytest.fixture(scope="module")
def program():
    """By the same command, from what is kept of earlier runs."""
    return _cuda.program_file(for_cpu(PROGRAM), "cpu")


def run(program, *options):
    return subprocess.run([str(program), *options], capture_output=True, text=True, timeout=60)


@pytest.mark.prove
def test_program_builds_alone_in_a_folder_and_passes(tmp_path):
    done = run(build(tmp_path, PROGRAM.read_text()))
    assert done.returncode == 0 and done.stderr == ""
    title, *rows, last = done.stdout.splitlines()
    assert title.split() == ["kernel", "M", "N", "K", "error"] and last == "PASS"
    assert [row.split()[0] for row in rows] == ["vector_add", *KERNELS, *KERNELS]
    assert all(float(row.split()[-1]) <= 1e-6 for row in rows)


def test_size_option_sets_the_size_of_every_matmul(program):
    done = run(program, "--size", "3", "70", "5")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "PASS"
    assert [row.split()[:4] for row in done.stdout.splitlines()[1:-1]] == [[k, "3", "70", "5"] for k in KERNELS]


def test_wrong_option_is_one_line_and_exit_code_2(program):
    sizes = ("1 2", "1 2 3.5", "1 0 2", "nan 1 1", "32769 1 1", "-4 2 3", "12x 3 4", "1 2 3 4", "1 2  --size")
    others = (["--no-such-option", "7"], ["7"], [""], ["--size"])
    for options in (*others, *(f"--size {size}".split(" ") for size in sizes)):
        done = run(program, *options)
        assert done.returncode == 2 and done.stdout == "", options
        assert re.fullmatch(r"matmul: .*--size M N K: three whole numbers from 1 to 32768\n", done.stderr), done.stderr


@pytest.mark.prove
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("col < N) C[row * N + col] = sum;\n}", "col < N && row) C[row * N + col] = sum;\n}", "WRONG"),
        ("int k = 0; k < K; k++) sum += A", "int k = 1; k < K; k++) sum += A", "WRONG"),
        ("__syncthreads();  // no thread reads", "if (x) __syncthreads();  // no thread reads", "deadlock"),
        ("    if (i < n) c[i] = ", "    c[i] = ", "WRONG"),
    ],
    ids=["not_written", "a_term_is_missing", "not_all_come_to_the_barrier", "beyond_the_end"],
)
def test_program_with_a_wrong_kernel_fails(tmp_path, old, new, says):
    text = PROGRAM.read_text()
    assert old in text
    done = run(build(tmp_path, text.replace(old, new)))
    assert done.returncode == 1 and "PASS" not in done.stdout and says in done.stdout


def test_max_error_notices_nan_low_precision_and_writes_outside(inside):
    M, N, K = 6, 5, 40
    a, b = torch.randn(M, K), torch.randn(K, N)
    field = torch.full((M * N + 2048,), float("nan"))
    field[1024 : 1024 + M * N] = (a.double() @ b.double()).float().flatten()

    def accepted(changed):
        out = torch.zeros(2)
        call(inside, "run_max_error", M, N, K, len(changed), a, b, changed, out)
        return bool(out[1])

    assert accepted(field)
    for at, value in ((1024, float("nan")), (1024 + M * N - 1, float("nan")), (0, 1.0), (1024 + M * N, 0.0)):
        changed = field.clone()
        changed[at] = value
        assert not accepted(changed), f"element {at - 1024} of C may be {value}"
    rounded = field.clone()
    rounded[1024 : 1024 + M * N] = (a.bfloat16().float() @ b.bfloat16().float()).flatten()
    assert not accepted(rounded), "inputs of 8 bits pass for fp32"
    for error in (5e-7, 2e-6):
        off = field + torch.nn.functional.pad(error * (a.abs() @ b.abs()).flatten(), (1024, 1024))
        assert accepted(off) == (error < 1e-6), f"of an error of {error}"
    # Of a large matrix a part is checked: of every row and of every column.
    M, N, K = 260, 272, 1
    a, b = torch.randn(M, K), torch.randn(K, N)
    for wrong in [*((slice(None), i) for i in range(0, N, 37)), *((i, slice(None)) for i in range(0, M, 37))]:
        c = a @ b
        c[wrong] += 1
        whole = torch.nn.functional.pad(c.flatten(), (1024, 1024), value=float("nan"))
        assert not accepted(whole), f"all of C[{wrong}] may be wrong"


def test_deadlock_is_an_error_and_the_next_launch_works(inside, tmp_path):
    broken = tmp_path / "matmul.cu"
    text = PROGRAM.read_text()
    broken.write_text(text.replace("__syncthreads();  // no thread reads", "if (x) __syncthreads();  //"))
    source = _cuda.program_inside(for_cpu(broken), INSIDE)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(CudaError, match="deadlock in block"):
        run_kernel(source, "shared_tiles", a, b, call=_cuda.call)
    assert torch.allclose(run_kernel(source, "naive", a, b, call=_cuda.call), a @ b, atol=1e-5)


# -------------------------------------------------------------------------------------------------- compiled for a GPU


@pytest.mark.prove
@NVCC
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_use_no_stack_and_two_blocks_of_register_tiles_fit(arch):
    found = _cuda.resources(str(PROGRAM), arch)
    assert found.keys() == {"vector_add", *KERNELS}
    for kernel, used in found.items():
        assert used.spills == used.stack == 0, f"{kernel} keeps {used.stack} bytes of each thread in local memory"
    assert found["register_tiles"].registers <= 128


@pytest.mark.prove
@NVCC
def test_machine_code_has_the_predicted_loads_and_fmas(tmp_path):
    cubin = tmp_path / "matmul.cubin"
    _cuda.resources(str(PROGRAM), "sm_90", cubin)
    loops = {name: _cuda.multiplying_loop(code) for name, code in _cuda.disassembled(cubin).items() if name in KERNELS}
    counts = {name: (loop.fmas, loop.shared_loads, loop.wide_loads, loop.global_loads) for name, loop in loops.items()}
    assert counts["naive"] == counts["coalesced"] == (16, 0, 0, 32)  # the same code: what differs is who is who
    assert counts["shared_tiles"] == (32, 40, 8, 2)  # the row of As comes in 8 loads of 4 numbers
    assert counts["register_tiles"] == (64, 16, 0, 0)


@pytest.mark.prove
@NVCC
def test_nvcc_builds_the_program(tmp_path):
    shutil.copy(PROGRAM, tmp_path)
    here = ["-arch=native"] if torch.cuda.is_available() else []
    command = ["nvcc", "-O3", *here, "-o", "matmul", "matmul.cu", *_cuda.cublas()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    done = run(tmp_path / "matmul", "--size", "64", "64", "64")
    if not torch.cuda.is_available():
        assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("cannot allocate memory on a GPU: ")
    else:
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "PASS", done.stdout
    assert run(tmp_path / "matmul", "--size", "x").returncode == 2


def test_benchmark_reads_rows_while_the_program_runs_and_needs_pass(tmp_path):
    import bench_matmul

    program, goes_on = tmp_path / "program", tmp_path / "goes_on"
    program.write_text(f"#!/bin/sh\necho naive 1\nuntil [ -e {goes_on} ]; do sleep 0.02; done\necho $0\necho PASS\n")
    program.chmod(0o700)
    rows = bench_matmul.passing_rows(program)
    assert next(rows) == ["naive", "1"]
    goes_on.touch()  # so far it waited
    assert list(rows) == [[str(program)], ["PASS"]]
    for end in ("echo 2 of these are WRONG", "echo PASS; exit 3", "kill -9 $$"):
        program.write_text(f"#!/bin/sh\necho naive 1\n{end}\n")
        with pytest.raises(SystemExit, match="matmul: "):
            list(bench_matmul.passing_rows(program))


def test_benchmark_leaves_out_a_kernel_whose_last_result_is_another_one(monkeypatch):
    import bench_matmul

    table = Mock()
    monkeypatch.setattr(bench_matmul, "Table", lambda *_: table)
    monkeypatch.setattr(bench_matmul, "call", lambda inside, name, number, *given: given[-1].normal_())
    monkeypatch.setattr(bench_matmul.bench_matmul_ladder, "problem", lambda *_: Mock(objection=lambda out: ""))
    monkeypatch.setattr(bench_matmul, "paired_seconds", lambda device, runs, times: runs["ours"]())
    with pytest.raises(SystemExit, match="naive at 128 cubed: its last call has another result than its first"):
        bench_matmul.time_on_gpu(True, None, 0)
    assert not table.add.called
