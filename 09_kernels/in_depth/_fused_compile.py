"""Compile the kernels that a call would launch, for absent GPUs, and print the resources of the machine code.

    TRITON_INTERPRET=0 python _fused_compile.py fused.py fused_loss.py fused_adamw.py

A kernel's arguments decide what is compiled: their types, which of them are None, which are multiples of 16 (only then
may a thread load 16 bytes at once). So the Python functions are called on CPU tensors as on the GPU, but
launching a kernel is replaced by compiling it. Prints one JSON object per kernel and architecture.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _interpreter import INTERPRETED, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

ARCHITECTURES = (80, 90)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}
POINTERS[torch.int64] = "*i64"


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def source_of(kernel: JITFunction, args: tuple) -> ASTSource:
    """The source that Triton would compile for this call."""
    signature = {}
    constants = {}
    attributes = {}
    for index, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = type_of(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack, shared and local memory (spills) for each thread or block, as cuobjdump reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def compile_calls(calls: Any, architectures: Sequence[int] = ARCHITECTURES) -> list[dict[str, Any]]:
    """One record for each distinct kernel that `calls()` launches and each architecture."""
    launched: dict[str, tuple[JITFunction, tuple, dict]] = {}

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        args += tuple(options.pop(name) for name in kernel.arg_names[len(args) :])
        key = " ".join([kernel.fn.__name__, *(str(getattr(a, "dtype", a)) for a in args), str(options)])
        launched.setdefault(key, (kernel, args, options))

    original = JITFunction.run
    JITFunction.run = record
    try:
        calls()
    finally:
        JITFunction.run = original
    records = []
    for kernel, args, options in launched.values():
        for architecture in architectures:
            target = GPUTarget("cuda", architecture, 32)
            compiled = triton.compile(source_of(kernel, args), target=target, options=options)
            ptx = compiled.asm["ptx"]
            ttir = compiled.asm["ttir"]
            records.append(
                {
                    "kernel": kernel.fn.__name__,
                    "sm": architecture,
                    "dtypes": [str(a.dtype).removeprefix("torch.") for a in args if isinstance(a, torch.Tensor)],
                    "constants": [a for a in args if type(a) is int],
                    "warps": compiled.metadata.num_warps,
                    "shared_memory": compiled.metadata.shared,
                    "tf32": "tf32" in ptx,
                    "wgmma": "wgmma.mma_async" in ptx,
                    "loads_of_16_bytes": len(re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx)),
                    "products_of_32_bits": len(re.findall(r"arith\.muli .*: (?:i32|tensor<\S*xi32>)", ttir)),
                    **resources(compiled.asm["cubin"]),
                }
            )
    return records


def calls_of(script: str) -> Any:
    module = importlib.import_module(script)
    module.check = lambda **tensors: None  # it rejects CPU tensors without the interpreter

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=True)

    def fused() -> None:
        bf16 = torch.bfloat16
        fp32 = torch.float32
        for cols, dtype in ((4096, bf16), (8192, fp32), (16384, bf16), (16384, fp32)):
            x, r, w = (random(*shape, dtype=dtype) for shape in ((8, cols), (8, cols), (cols,)))
            module.rms_norm(x, w, 1e-5).sum().backward()
            torch.autograd.backward(module.add_rms_norm(x, r, w, 1e-5), [x.detach(), r.detach()])
            module.softmax(x).backward(x.detach())
        x = random(8, 14336)
        module.swiglu(x, random(8, 14336)).backward(x.detach())
        tables = torch.zeros(8, 64), torch.zeros(8, 64)
        for heads in (8, 32):
            x = random(1, 8, heads, 128)
            module.rope(x, *tables).backward(x.detach())

    def fused_loss() -> None:
        labels = torch.zeros(8, dtype=torch.int64)
        for vocab, dtype in ((128256, torch.bfloat16), (50257, torch.bfloat16), (128256, torch.float32)):
            module.cross_entropy(random(8, vocab, dtype=dtype), labels).backward()
        module.linear_cross_entropy(random(8, 16), random(128256, 16), labels).backward()

    def fused_adamw() -> None:
        p, g, m, v = (torch.zeros(4096) for _ in range(4))
        settings = dict(step=1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        module.adamw_(p, g, m, v, **settings)
        module.adamw_(p, g.bfloat16(), m, v, scale=torch.ones(()), copy=p.bfloat16(), **settings)

    return {"fused": fused, "fused_loss": fused_loss, "fused_adamw": fused_adamw}[module.__name__]


SCRIPTS = ("fused", "fused_loss", "fused_adamw")

if __name__ == "__main__":
    given = [Path(name).stem for name in sys.argv[1:]]
    if wrong := [name for name, stem in zip(sys.argv[1:], given, strict=True) if stem not in SCRIPTS] or given == []:
        said = f"{wrong[0]} is none of them" if given else "no script is named"
        print(f"_fused_compile.py: {said}; use {', '.join(f'{name}.py' for name in SCRIPTS)}", file=sys.stderr)
        sys.exit(2)
    if INTERPRETED:
        print("_fused_compile.py: set TRITON_INTERPRET=0, or there is nothing to compile", file=sys.stderr)
        sys.exit(2)
    for script in given:
        for row in compile_calls(calls_of(script)):
            print(json.dumps(row))
