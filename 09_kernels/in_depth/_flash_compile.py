"""Compile the kernels of flash_kernels.py for a GPU that need not be present, and read their resources.

    python _flash_compile.py 90 float16 128          compute capability; dtype and head dim, as often as you like

Prints one JSON object per kernel: registers per thread, bytes of stack or spilled, shared memory per program,
and whether it has tensor-core instructions (wgmma, mma), TF32, bulk copies (tma) and additions in memory.
`dkdvdq` is the kernel of five matmuls, `dkdv` and `dq` those of seven.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

os.environ["TRITON_INTERPRET"] = "0"

import flash_kernels as flash
import torch
import triton
from _flash_launch import Plan, plan_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # limit per program: CUDA programming guide
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def sources(dtype: torch.dtype, D: int, plan: Plan, window: bool):
    """(name, kernel, its arguments' types, compile-time arguments, warps, stages) of every kernel."""
    element = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[str(dtype)[6:]]
    W = triton.next_power_of_2(D)

    def tile(tokens: int, element: str = element):
        numbers = ("i32", "i32", "i32", "i32")  # D and three strides
        return f"tensordesc<{element}[1, 1, {tokens}, {W}]>" if plan.tma else (f"*{element}", *numbers)

    numbers = dict.fromkeys(("S_q", "S_k", "N", "G", "first", "last"), "i32") | {"scale": "fp32"}
    for name, kernel in (("forward", "forward"), ("dq", "dq"), ("dkdv", "dkdv"), ("dkdvdq", "dkdv")):
        if name == "dkdvdq" and not plan.five:
            continue
        R, C, warps, stages = getattr(plan, kernel)
        single = {"dout": tile(R), "lse": "*fp32", "delta": "*fp32"}
        left = {
            "forward": {"out": tile(R), "lse": "*fp32"},
            "dq": single | {"dq": tile(R)},
            "dkdv": single | {"dk": tile(C), "dv": tile(C)},
            "dkdvdq": single | {"dk": tile(C), "dv": tile(C), "dq": tile(R, "fp32")},
        }[name]
        signature = {"q": tile(R), "k": tile(C), "v": tile(C)} | left | numbers
        constants = dict(WINDOW=window, R=R, C=C, W=W) | ({"dq": None} if name == "dkdv" else {})
        if name == "dkdv":  # the position of the argument that is None
            signature = {key: signature[key] for key in signature if key not in numbers} | {"dq": "constexpr"} | numbers
        yield name, getattr(flash, f"{kernel}_kernel"), signature, constants, warps, stages
    signature = {"dout": tile(32), "out": tile(32), "delta": "*fp32", "S_q": "i32", "N": "i32"}
    yield "delta", flash.delta_kernel, signature, {"R": 32, "W": W}, 4, 2


def source_of(kernel, signature: dict, constants: dict, D: int) -> ASTSource:
    """With what a launch finds in the arguments: addresses, strides and head dims that 16 divides."""
    signature = signature | dict.fromkeys(constants, "constexpr")
    aligned = {}
    for place, (key, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            parts = [(place, part) for part in range(len(kind)) if part != 1 or D % 16 == 0]
            aligned |= {part: [["tt.divisibility", 16]] for part in parts}
        elif key in ("lse", "delta"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    known = {(list(signature).index(name),): value for name, value in constants.items()}
    return ASTSource(kernel, signature, known, aligned)


def compile_plan(capability: int, dtype: torch.dtype, D: int, plan: Plan | None = None, window: bool = False):
    """The resources of each kernel: a list of dictionaries."""
    plan = plan or plan_for(D, dtype, capability >= 90)
    found = []
    for name, kernel, signature, constants, warps, stages in sources(dtype, D, plan, window):
        source = source_of(kernel, signature, constants, D)
        options = dict(num_warps=warps, num_stages=stages)
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        ptx = built.asm["ptx"]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(built.asm["cubin"])
            usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True)
        numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
        found.append(
            dict(
                kernel=name,
                capability=capability,
                dtype=str(dtype)[6:],
                D=D,
                registers=numbers["REG"],
                spilled=numbers["STACK"] + numbers["LOCAL"],
                shared=built.metadata.shared,
                shared_limit=SHARED[capability],
                wgmma="wgmma.mma_async" in ptx,
                mma="mma.sync" in ptx,
                tma="cp.async.bulk.tensor" in ptx,
                tf32="tf32" in ptx,
                adds=bool(re.search(r"cp\.reduce\.async\.bulk|(red|atom)\.\S*\.add", ptx)),
                warps=built.metadata.num_warps,
            )
        )
    return found


def parse(words: list[str]) -> tuple[int, list[tuple[torch.dtype, int]]]:
    """Capability, (dtype, head dim) of each request; or one line and exit code 2."""

    def refuse(why: str) -> NoReturn:
        print(f"_flash_compile.py: {why}", file=sys.stderr)
        sys.exit(2)

    target, *shapes = words or [""]
    if target not in map(str, SHARED):
        refuse(f"compute capability {target!r} is none of {', '.join(map(str, SHARED))}")
    if not shapes or len(shapes) % 2:
        refuse(f"{' '.join(shapes) or 'nothing'} is no list of dtypes and head dims; use for example float16 128")
    for dtype, D in zip(shapes[::2], shapes[1::2], strict=True):
        if dtype not in ("float16", "bfloat16", "float32"):
            refuse(f"dtype {dtype} is none of float16, bfloat16, float32")
        if not D.isdecimal() or not 32 <= int(D) <= 256 or int(D) % 16:
            refuse(f"head dim {D} is no multiple of 16 from 32 to 256")
    return int(target), [(getattr(torch, dtype), int(D)) for dtype, D in zip(shapes[::2], shapes[1::2], strict=True)]


if __name__ == "__main__":
    capability, requests = parse(sys.argv[1:])
    for dtype, D in requests:
        for entry in compile_plan(capability, dtype, D):
            print(json.dumps(entry), flush=True)
