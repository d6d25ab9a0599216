"""Rewrite a source in plain CUDA for the CPU emulator.

`cuda_on_cpu.h` can define CUDA's names, but C++ has no `<<<grid, block>>>`, and a plain pointer cannot report
accesses. So a few patterns are replaced, each within its line, to keep line numbers in errors:

    kernel<<<grid, block>>>(...)       LAUNCH(kernel, grid, block, ...)
    const float* __restrict__ A        global<const float> A, a pointer that counts loads (and stores)
    __shared__ float As[R][C];         the same array, accessed through counting rows
"""

import hashlib
import os
import re
from pathlib import Path

from _cuda import builds_folder

RULES = (
    (r"(\w+)<<<(.*)>>>\(", r"LAUNCH(\1, \2, "),
    (r"(const )?float\* __restrict__ ", lambda match: f"global<{match[1] or ''}float> "),
    (
        r"__shared__ float (\w+)\[(\w+)\]\[(\w+)\];",
        r"__shared__ float \1_memory[\2][\3]; "
        r"struct { float (*rows)[\3]; shared<float> operator[](int i) const { return rows[i]; } } \1{\1_memory};",
    ),
)


def for_cpu(program: Path) -> Path:
    """A copy of `program` for g++ and the emulator, which counts the memory requests of its kernels."""
    text = program.read_text()
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    file = builds_folder() / f"{program.stem}-cpu-{hashlib.sha256(text.encode()).hexdigest()[:20]}.cu"
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text)
    unfinished.rename(file)
    return file
