"""For tests: bfloat16 in Triton's interpreter as on a GPU, so that a 16-bit reference needs no GPU.

The interpreter stores bfloat16 as 16-bit integers. It truncates where a GPU rounds, and `tl.dot` multiplies
these integers. Inside `bfloat16()` it rounds to nearest and multiplies in float32, where a product of two
8-bit mantissas is exact. Any other operation on a bfloat16 without a cast to float32 stays integer arithmetic,
which is obviously wrong: compute sums and statistics in float32.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
from _interpreter import INTERPRETED, tl
from triton.runtime import interpreter


@contextmanager
def bfloat16(*checks: str) -> Iterator[None]:
    """`checks`: the functions ("fused.check") that reject bfloat16 in the interpreter, to be disabled."""
    if not INTERPRETED:
        yield
        return
    convert = interpreter._convert_float
    multiply = interpreter.InterpreterBuilder.create_dot

    def rounded(x, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        exact = torch.from_numpy(np.ascontiguousarray(x)).reshape(x.shape)
        return exact.bfloat16().view(torch.int16).numpy().view("uint16")

    def product(builder, a, b, *rest):
        return multiply(builder, *(wide(builder, x) for x in (a, b)), *rest)

    def wide(builder, x):
        return builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    with ExitStack() as changed:
        changed.enter_context(patch.object(interpreter, "_convert_float", rounded))
        changed.enter_context(patch.object(interpreter.InterpreterBuilder, "create_dot", product))
        for name in checks:
            changed.enter_context(patch(name, lambda *_, **__: None))
        yield
