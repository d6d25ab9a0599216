"""Build a .cu file of this folder, with nvcc for a GPU or with g++ for the CPU, and call it with PyTorch's tensors.

The file becomes a shared library with plain C functions, and ctypes calls them with the tensors' addresses: no headers
of PyTorch, so a build takes two seconds instead of thirty. Libraries are kept in the temporary folder under a name made
from everything that went into them, so a changed source is a new library and an old one is never used for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
HEADERS = ("cuda_on_cpu.h", "ptx.h")
FORWARD, REVERSE = 0, 1  # orders in which the CPU runs the threads of a block; a number above is the seed of a shuffle


class CudaError(RuntimeError):
    """A source that cannot be built here, or a launch that failed; the message is one line."""


@dataclass(frozen=True)
class Counters:
    """What a launch on the CPU did, as a profiler would count it. A request is one instruction of one warp."""

    load_sectors: int  # of 32 bytes, from global memory
    store_sectors: int
    load_requests: int
    bank_turns: int  # that loads from shared memory took,
    bank_turns_least: int  # and would take without conflicts
    paths: int  # `count_path`: paths that warps went,
    path_requests: int  # and how often they came to a fork


@dataclass(frozen=True)
class Resources:
    """What the compiler gave a kernel. `spills`: bytes that did not fit into registers and went to local memory."""

    registers: int
    spills: int
    shared: int  # bytes, without what is asked for at the launch


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
    """nvcc's name of a GPU. 9.0 becomes sm_90a: TMA and wgmma with all their options exist under this name only."""
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")


@cache
def library(source: str, device_type: str, capability: tuple[int, int]) -> ctypes.CDLL:
    """The library of a source, built if it is not there yet."""
    if device_type == "cuda":
        command = ["nvcc", "-O3", f"-arch={architecture(capability)}", "-shared", "-Xcompiler", "-fPIC"]
    else:  # fortified longjmp forbids the jumps between stacks that fibers consist of
        command = ["g++", "-x", "c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-w"]
    content = b"".join((HERE / name).read_bytes() for name in (source, *HEADERS)) + " ".join(command).encode()
    folder = Path(tempfile.gettempdir()) / f"chapter-09-kernels-{os.getuid()}"
    built = folder / f"{Path(source).stem}-{hashlib.sha256(content).hexdigest()[:20]}.so"
    if not built.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        half = built.with_suffix(f".{os.getpid()}")
        run_compiler([*command, f"-I{HERE}", str(HERE / source), "-o", str(half)], source)
        half.rename(built)  # whole, or not at all: others may build at the same time
    return ctypes.CDLL(str(built))


def call(source: str, function: str, *arguments: Tensor | int | float, order: int = FORWARD, counting: bool = False):
    """Run `function` of a .cu file on its tensors' device, in PyTorch's current stream. Counters if `counting`.

    Tensors must be contiguous. `order` and `counting` concern the CPU. Raises CudaError if the launch fails.
    """
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    device = tensors[0].device
    assert all(x.is_contiguous() and x.device == device for x in tensors)
    on_gpu = device.type == "cuda" and torch.version.cuda is not None  # a stand-in GPU (tests/fake_device) has no CUDA
    lib = library(source, "cuda" if on_gpu else "cpu", torch.cuda.get_device_capability(device) if on_gpu else (0, 0))
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
        raise CudaError(f"{source}, {function}: {error.decode()}")
    return read_counters(lib) if counting and not on_gpu else None


def read_counters(lib: ctypes.CDLL) -> Counters:
    numbers = (ctypes.c_int64 * 15)()  # 5 kinds of access: requests, then units, then the least number of units
    lib.cuda_on_cpu_counters(numbers)
    requests, units, least = numbers[0:5], numbers[5:10], numbers[10:15]
    return Counters(units[0], units[1], requests[0], units[2], least[2], units[4], requests[4])


def resources(source: str, arch: str, cubin: Path | None = None) -> dict[str, Resources]:
    """Registers, spills and shared memory of each kernel, as nvcc reports them. A template: its most demanding one.

    Compiles for `arch`, which need not be there; `cubin` is where to leave the machine code, if anybody wants it.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-O3", f"-arch={arch}", "-cubin", "-Xptxas", "-v", str(HERE / source)]
        report = run_compiler([*command, "-o", str(cubin or f"{folder}/out.cubin")], source)
    found: dict[str, Resources] = {}
    for part in report.split("Compiling entry function")[1:]:
        mangled = re.search(r"'_Z(\d+)(\w+)'", part)
        assert mangled, part
        name = mangled[2][: int(mangled[1])]

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match[1]) if match else 0

        spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        new = Resources(number(r"Used (\d+) registers"), spills, number(r"(\d+) bytes smem"))
        old = found.get(name, Resources(0, 0, 0))
        found[name] = Resources(*(max(pair) for pair in zip(vars(new).values(), vars(old).values(), strict=True)))
    return found
