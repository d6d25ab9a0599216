"""Import Triton so that its kernels run on this machine: compiled on a GPU, interpreted on a CPU.

With TRITON_INTERPRET=1 Triton runs a kernel as Python, one program after another, with NumPy instead of the
GPU: slow, but the same arithmetic. It reads that variable when `@triton.jit` decorates a function. Some
functions of `triton.language` (`tl.max`, `tl.sum`, `tl.zeros`) are decorated while Triton is imported, and
parts of PyTorch import Triton before the variable can be set here. Those functions are decorated again.

The interpreter lacks addition through a tensor descriptor, which is added here. It has two limits: no
bfloat16 (tl.dot on it returns garbage), and no registers or shared memory that could run out. Triton before
3.7 converts an array of one element to an int, which NumPy rejects from 2.4 on: then the import names a NumPy
that works. TRITON_INTERPRET=0 keeps the compiler, which builds for an absent GPU. Without Triton a script
ends here, in one line.
"""

import os
import sys
from importlib.util import find_spec

import numpy
import torch

if find_spec("triton") is None:
    sys.exit("this needs Triton, which is not installed: it is for Linux, or WSL on Windows; macOS has none")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpretedFunction, TensorHandle, interpreter_builder
from triton.runtime.jit import JITFunction

INTERPRETED = triton.knobs.runtime.interpret

if INTERPRETED:
    of_triton, of_numpy = ([int(n) for n in v.split(".")[:2]] for v in (triton.__version__, numpy.__version__))
    if of_triton < [3, 7] and of_numpy >= [2, 4]:
        raise ImportError(
            f"Triton {triton.__version__}'s interpreter and NumPy {numpy.__version__} do not go together; "
            'with this Triton use an older NumPy: pip install "numpy<2.4"'
        )
    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            interpreted = triton.jit(function.fn)
            assert isinstance(interpreted, InterpretedFunction)
            setattr(tl.standard, name, interpreted)
            if getattr(tl, name, None) is function:
                setattr(tl, name, interpreted)

    def create_descriptor_reduce(kind, descriptor, value, indices) -> None:
        """The interpreter's `atomic_add` of a descriptor: an addition at each address inside the tensor."""
        assert kind == ir.DESCRIPTOR_REDUCE_KIND.ADD, kind
        addresses, inside = descriptor.materialize_pointers(indices)
        relaxed = ir.MEM_SEMANTIC.RELAXED
        everyone = ir.MEM_SYNC_SCOPE.GPU
        mask = TensorHandle(inside, tl.int1)
        interpreter_builder.create_atomic_rmw(ir.ATOMIC_OP.FADD, addresses, value, mask, relaxed, everyone)

    interpreter_builder.create_descriptor_reduce = create_descriptor_reduce

__all__ = ["INTERPRETED", "tl", "triton"]
