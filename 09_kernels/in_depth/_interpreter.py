"""Import Triton so that its kernels run on this machine: compiled on a GPU, interpreted on a CPU.

With TRITON_INTERPRET=1 Triton runs a kernel as Python, one program after another, with NumPy in place of the GPU: slow,
and the same arithmetic. It reads that variable when `@triton.jit` decorates a function. Some functions of
`triton.language` itself (`tl.max`, `tl.sum`, `tl.zeros`) are decorated while Triton is imported, and parts of PyTorch
import Triton before anybody here can set the variable. Those functions are decorated once more.

Adding through a tensor descriptor is missing from it; here it learns that. Two things it does not do: it knows no
bfloat16 (tl.dot on it returns garbage), and it has no registers or shared memory to run out of. Triton before 3.7 asks
NumPy for what it refuses from 2.4 on, an int from an array of one number: then the import says which NumPy will do.
TRITON_INTERPRET=0 keeps the compiler, which builds for a GPU that is not there. Without Triton a script ends here, in
one line.
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
        """What a descriptor's `atomic_add` is interpreted as: an addition at each address inside the tensor."""
        assert kind == ir.DESCRIPTOR_REDUCE_KIND.ADD, kind
        addresses, inside = descriptor.materialize_pointers(indices)
        relaxed, everyone = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        mask = TensorHandle(inside, tl.int1)
        interpreter_builder.create_atomic_rmw(ir.ATOMIC_OP.FADD, addresses, value, mask, relaxed, everyone)

    interpreter_builder.create_descriptor_reduce = create_descriptor_reduce

__all__ = ["INTERPRETED", "tl", "triton"]
