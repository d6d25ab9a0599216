"""Build a .cu file of this folder, with nvcc for a GPU or with g++ for the CPU, and call it with PyTorch's tensors.

The file becomes a shared library with plain C functions, and ctypes calls them with the tensors' addresses: no headers
of PyTorch, so a build takes two seconds instead of thirty. Libraries are stored in the temporary folder, or
in the one of the environment variable CUDA_BUILDS. A library's name is a hash of all its inputs, so a changed
source is a new library and an old one is never used for it.

    python _cuda.py --build          every .cu file of the chapters, 12 at a time, for the local GPU or Hopper
    python _cuda.py --build sm_80    for another GPU, present or not
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
EMULATOR = "cuda_on_cpu.h"
AT_A_TIME = 12  # builds that run side by side
FORWARD, REVERSE = 0, 1  # orders of a block's threads on the CPU; up to a million: seeds of a shuffle


def ahead(warp: int) -> int:
    """The order in which this warp of each block runs as far ahead of the others as barriers allow."""
    return -1 - 2 * warp


def behind(warp: int) -> int:
    """The order in which this warp runs only when no other can."""
    return -2 - 2 * warp


def racing(seed: int) -> int:
    """Random orders: now one warp runs ahead, now another."""
    return 1_000_000 + seed


def uneven(threads: int, chosen: Sequence[int] = ()) -> list[int]:
    """For each warp of a block one order with it ahead, one with it behind; and two random orders.

    In a cluster the warps of the second block are numbered after the first block's. `chosen`: only these.
    """
    warps = chosen or range(-(-threads // 32))
    return [*map(ahead, warps), *map(behind, warps), racing(1), racing(2)]


class Parser(argparse.ArgumentParser):
    """Errors are one line and exit code 2; under torchrun only rank 0 prints it."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


class CudaError(RuntimeError):
    """A source that cannot be built here, or a launch that failed; the message is one line."""


@dataclass(frozen=True)
class Counters:
    """Counters of a launch on the CPU, as in a profiler. A request is one instruction of one warp."""

    load_sectors: int  # of 32 bytes, from global memory
    store_sectors: int
    load_requests: int
    bank_turns: int  # cycles of loads from shared memory,
    bank_turns_least: int  # and without conflicts
    paths: int  # `count_path`: paths taken by warps,
    path_requests: int  # and how often they reached a branch
    shared_requests: int  # loads from shared memory
    store_turns: int  # as bank_turns, for stores to shared memory
    store_turns_least: int


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel. `spills`: bytes spilled from registers to local memory."""

    registers: int
    spills: int
    shared: int  # bytes, without dynamic shared memory
    stack: int = 0  # bytes of local memory (DRAM): spills, and arrays with an index unknown at compile time


@dataclass(frozen=True)
class Loop:
    """The main loop of a kernel, by its machine code: instructions of one thread in one iteration."""

    instructions: int
    fmas: int  # multiply-adds in fp32, or (`mma`) of a tensor core
    shared_loads: int  # of any width,
    wide_loads: int  # and those of 16 bytes
    global_loads: int

    def per_fma(self) -> float:
        """Shared loads per multiply-add."""
        return self.shared_loads / self.fmas


def run_compiler(command: list[str], source: str) -> str:
    if not (found := shutil.which(command[0])):
        remedy = "the CUDA toolkit" if command[0] == "nvcc" else "g++, the GNU C++ compiler"
        raise CudaError(f"{source} needs {command[0]} to be built and it is not on the PATH; install {remedy}")
    done = subprocess.run([found, *command[1:]], capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line] or ["no message"]
        raise CudaError(f"{command[0]} cannot build {source}: {lines[0].strip()}")
    return done.stdout + done.stderr


def architecture(capability: tuple[int, int]) -> str:
    """nvcc's name of a GPU. 9.0 becomes sm_90a, the only name with wgmma."""
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")


def machine_code_for(arch: str) -> str:
    """nvcc's option for the machine code of only one GPU.

    With -arch=sm_90a some versions of nvcc also compile for plain sm_90, which has no wgmma.
    """
    return f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"


def included(source: Path) -> list[Path]:
    """A source and all files that it includes by name, also indirectly, from its folder or this one."""
    found: list[Path] = []
    new = [source]
    while new:
        file = new.pop()
        if file in found:
            continue
        found.append(file)
        for name in re.findall(r'^ *# *include "([^"]+)"', file.read_text(), re.MULTILINE):
            new += [place for place in (file.parent / name, HERE / name) if place.exists()][:1]
    return found


def builds_folder() -> Path:
    """The folder of all builds."""
    named = os.environ.get("CUDA_BUILDS")
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"chapter-09-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def built(source: Path, command: Sequence[str], suffix: str, also: Sequence[Path] = ()) -> Path:
    """The output of this command for a source, built if missing. `also`: further inputs."""
    parts = sorted({*included(source), *also}, key=lambda file: file.name)
    content = b"".join(file.read_bytes() for file in parts) + " ".join(command).encode()
    result = builds_folder() / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:20]}{suffix}"
    if not result.exists():
        half = result.with_suffix(f".{os.getpid()}")
        run_compiler([*command, f"-I{HERE}", str(source), "-o", str(half)], source.name)
        half.rename(result)  # atomically: other processes may build at the same time
    return result


def library_file(source: Path, arch: str) -> Path:
    """The library of a source, built if missing. `arch`: a GPU by nvcc's name, or "cpu"."""
    if arch != "cpu":
        command = ["nvcc", "-O3", machine_code_for(arch), "-shared", "-Xcompiler", "-fPIC"]
    else:  # fortified longjmp forbids jumps between stacks, as in fibers
        command = ["g++", "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-w"]
    return built(source, command, ".so")


def program_file(source: Path, arch: str) -> Path:
    """The program of a source with a `main`, with cuBLAS if nvcc has it. `arch` as in `library_file`."""
    if arch == "cpu":
        emulator = HERE / EMULATOR
        command = ["g++", "-x", "c++", "-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-include", str(emulator)]
        return built(source, command, "", [emulator])
    return built(source, ["nvcc", "-O3", machine_code_for(arch), *cublas()], "")


@cache
def cublas() -> tuple[str, ...]:
    """nvcc's options to link cuBLAS; none if the toolkit lacks it, since programs also run without."""
    with tempfile.TemporaryDirectory() as folder:
        asks = Path(folder) / "asks.cu"
        asks.write_text("#include <cublas_v2.h>\n")
        if not shutil.which("nvcc") or subprocess.run(["nvcc", "-E", str(asks)], capture_output=True).returncode:
            return ()
    toolkit = Path(shutil.which("nvcc") or "").resolve().parents[1]
    places = [toolkit / name for name in ("lib64", "targets/x86_64-linux/lib")]  # the loader may not look there
    return ("-lcublas", *(f"-Xlinker=-rpath={place}" for place in places if place.is_dir()))


@cache
def library(source: str | Path, device_type: str, capability: tuple[int, int]) -> ctypes.CDLL:
    """The library of a source, loaded."""
    arch = architecture(capability) if device_type == "cuda" else "cpu"
    return ctypes.CDLL(str(library_file(HERE / source, arch)))


def sources() -> list[Path]:
    """The .cu files of this folder, and of all chapters if this is a chapter's folder."""
    chapters = HERE.parents[1].glob("[01][0-9]_*") if re.match(r"[01]\d_", HERE.parent.name) else ()
    return sorted({*HERE.glob("*.cu"), *(file for folder in chapters for file in folder.glob("**/*.cu"))})


def build(source: Path, arch: str) -> str:
    """Build a source for `arch` in advance; returns a line about it."""
    start = time.monotonic()
    try:
        make = program_file if re.search(r"^int main\(", source.read_text(), re.MULTILINE) else library_file
        there = make(source, arch)
        return f"{source.name}: {time.monotonic() - start:.1f} s, {there}"
    except CudaError as error:
        return f"{source.name}: FAILED: {error}"


def build_all(files: Sequence[Path], arch: str) -> list[str]:
    """Build these in parallel, print a line for each, return the lines of failures; the others continue."""
    failed = []
    with ThreadPoolExecutor(AT_A_TIME) as workers:
        for line in workers.map(build, files, [arch] * len(files)):
            print(line, flush=True)
            if ": FAILED: " in line:
                failed.append(line)
    return failed


def call(
    source: str | Path, function: str, *arguments: Tensor | int | float, order: int = FORWARD, counting: bool = False
) -> Counters | None:
    """Run `function` of a .cu file on its tensors' device, in PyTorch's current stream. Counters if `counting`.

    Tensors must be contiguous. `order` and `counting` are for the CPU. Raises CudaError if the launch fails.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    device = tensors[0].device
    assert all(x.is_contiguous() and x.device == device for x in tensors)
    on_gpu = device.type == "cuda" and torch.version.cuda is not None  # a stand-in GPU (tests/fake_device) has no CUDA
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    lib = library(source, "cuda" if on_gpu else "cpu", capability)
    c_arguments: list = []
    for x in arguments:
        if isinstance(x, Tensor):
            c_arguments.append(ctypes.c_void_p(x.data_ptr()))
        else:
            c_arguments.append(ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int(x))
    run = getattr(lib, function)
    run.restype = ctypes.c_char_p
    if on_gpu:
        with torch.cuda.device(device):
            error = run(*c_arguments, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    else:
        lib.cuda_on_cpu_set(order, int(counting))
        error = run(*c_arguments, None)
    if error:
        raise CudaError(f"{Path(source).name}, {function}: {error.decode()}")
    return read_counters(lib) if counting and not on_gpu else None


def diary(
    source: str, function: str, *arguments: Tensor | int | float, order: int = FORWARD
) -> list[tuple[int, int, str]]:
    """The actions of the warps of block 0 in a launch on the CPU: (sweep, warp, deed).

    Deeds are "orders", "multiplies", "writes" and "waits". In a sweep all threads run, one after the other,
    until they have to wait for others. It is an order, not a time.
    """
    lib = library(source, "cpu", (0, 0))
    room = 1 << 16
    entries = (ctypes.c_int * (3 * room))()
    lib.cuda_on_cpu_diary(1, entries, 0)
    try:
        call(source, function, *arguments, order=order)
    finally:
        count = lib.cuda_on_cpu_diary(0, entries, room)
    assert count <= room
    deeds = ("orders", "multiplies", "writes", "waits")
    return [(entries[3 * i], entries[3 * i + 1], deeds[entries[3 * i + 2]]) for i in range(count)]


def read_counters(lib: ctypes.CDLL) -> Counters:
    numbers = (ctypes.c_int64 * 15)()  # 5 kinds of access: requests, then units, then the least number of units
    lib.cuda_on_cpu_counters(numbers)
    requests = numbers[0:5]
    units = numbers[5:10]
    least = numbers[10:15]
    return Counters(
        units[0], units[1], requests[0], units[2], least[2], units[4], requests[4], requests[2], units[3], least[3]
    )


def resources(source: str | Path, arch: str, cubin: Path | None = None) -> dict[str, Resources]:
    """Registers, spills and shared memory of each kernel, as nvcc reports them. A template: the maximum.

    Compiles for `arch`, which need not be present; `cubin`: optional file for the machine code.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-O3", machine_code_for(arch), "-cubin", "-Xptxas", "-v", f"-I{HERE}"]
        report = run_compiler([*command, str(HERE / source), "-o", str(cubin or f"{folder}/out.cubin")], str(source))
    found: dict[str, Resources] = {}
    for part in report.split("Compiling entry function")[1:]:
        mangled = re.search(r"'_Z(\d+)(\w+)'", part)
        assert mangled, part
        name = mangled[2][: int(mangled[1])]

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match[1]) if match else 0

        spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        stack = number(r"(\d+) bytes stack frame")
        new = Resources(number(r"Used (\d+) registers"), spills, number(r"(\d+) bytes smem"), stack)
        old = found.get(name, Resources(0, 0, 0))
        found[name] = Resources(*(max(pair) for pair in zip(vars(new).values(), vars(old).values(), strict=True)))
    return found


def functions(cubin: Path) -> list[str]:
    """The machine code of each function in a cubin file, as text that begins with its mangled name."""
    import triton

    beside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"  # part of triton
    tool = shutil.which("cuobjdump") or (str(beside) if beside.exists() else "")
    if not tool:
        raise CudaError("reading machine code needs cuobjdump; install triton or the CUDA toolkit")
    listing = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    return listing.split("Function : ")[1:]


def disassembled(cubin: Path) -> dict[str, str]:
    """The machine code of each kernel, by name; of a template that of the first variant."""
    found: dict[str, str] = {}
    for part in functions(cubin):
        mangled = re.match(r"_Z(\d+)(\w+)", part)
        if mangled:
            found.setdefault(mangled[2][: int(mangled[1])], part)
    return found


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*)([^;]*);")


def multiplying_loop(code: str) -> Loop:
    """The loop in a kernel's machine code with the most multiply-adds; of several, the innermost.

    A loop is the code between a backward branch and its target. The compiler merges and widens loads and
    unrolls loops, so only this code shows what a multiprocessor does per multiply-add.
    """
    rows = [(int(at, 16), name, rest) for at, name, rest in INSTRUCTION.findall(code)]
    loops = []
    for last, (at, name, rest) in enumerate(rows):
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
        if target and int(target[1], 16) < at:
            names = [row[1] for row in rows[: last + 1] if row[0] >= int(target[1], 16)]
            count = {
                kind: sum(re.match(kind, n) is not None for n in names) for kind in ("FFMA|HMMA|HGMMA", "LDS", "LDG")
            }
            wide = sum(n.startswith("LDS.128") for n in names)
            loops.append(Loop(len(names), count["FFMA|HMMA|HGMMA"], count["LDS"], wide, count["LDG"]))
    if not loops:
        raise CudaError("there is no loop in this machine code")
    return max(loops, key=lambda loop: (loop.fmas, -loop.instructions))


def program_inside(program: Path, functions: str, on_gpu: bool = False) -> str:
    """A source for `call`: a program with its own `main`, included unchanged, followed by C functions.

    On the CPU the emulator defines CUDA's names. For a GPU nvcc does, and cuBLAS is left out, because a
    library would have to find PyTorch's copy.
    """
    before = "#define HAS_CUBLAS 0" if on_gpu else f'#include "{EMULATOR}"'
    text = f'{before}\n#define main program_main\n#include "{program}"\n{functions}'
    file = builds_folder() / f"{program.stem}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.cu"
    half = file.with_suffix(f".{os.getpid()}")
    half.write_text(text)
    half.rename(file)
    return str(file)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build every .cu file of the chapters.", allow_abbrev=False)
    parser.add_argument("--build", nargs="?", const="", metavar="ARCH", required=True, help="sm_90a, or another GPU")
    arch = parser.parse_args().build
    if not arch:
        here = torch.cuda.is_available() and torch.version.cuda is not None
        arch = architecture(torch.cuda.get_device_capability()) if here else "sm_90a"
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        print(f"_cuda.py: --build {arch}: name a GPU as nvcc does, sm_90a for example", file=sys.stderr)
        return 2
    return int(bool(build_all(sources(), arch)))


if __name__ == "__main__":
    sys.exit(main())
