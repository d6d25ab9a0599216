"""Import Triton so that its kernels run on this machine: compiled on a GPU, interpreted on a CPU.

With TRITON_INTERPRET=1 Triton runs a kernel as Python, one program after another, with NumPy in place of the GPU: slow,
and the same arithmetic. It reads that variable when `@triton.jit` decorates a function. Some functions of
`triton.language` itself (`tl.max`, `tl.sum`, `tl.zeros`) are decorated while Triton is imported, and parts of PyTorch
import Triton before anybody here can set the variable. Those functions are decorated once more.

Two things the interpreter does not do: it knows no bfloat16 (tl.dot on it returns garbage), and it has no registers or
shared memory to run out of. TRITON_INTERPRET=0 keeps the compiler, which builds for a GPU that is not there.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

INTERPRETED = triton.knobs.runtime.interpret

if INTERPRETED:
    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            interpreted = triton.jit(function.fn)
            assert isinstance(interpreted, InterpretedFunction)
            setattr(tl.standard, name, interpreted)
            if getattr(tl, name, None) is function:
                setattr(tl, name, interpreted)

__all__ = ["INTERPRETED", "tl", "triton"]
