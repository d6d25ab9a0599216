"""The loss is NaN: which operation made the first one, and with which inputs.

A NaN spreads. By the time the loss shows it, every weight has it, and the cause is steps and layers away.
Four causes, each of which begins in another place:

    mask      a row of attention with nothing to attend to: softmax of -inf everywhere is 0 / 0
    norm      x / |x| of a row of zeros: forward divides by a small eps and is fine, the gradient of |x| at 0 is not
    half      fp16 ends at 65504: a product of queries and keys exceeds it: inf, and inf - inf in softmax is NaN
    rate      a learning rate that makes the weights grow in every step, until they exceed the range of fp32

The tool is a check after every operation: is this the first result that is not finite? `FirstNotFinite`
checks forward and backward, and names line, step and operation. (`torch.autograd.detect_anomaly()` checks
only backward, and only for NaN: inf, which comes first, is not found.)

    python not_a_number.py --cause mask             says where, exit code 1
    python not_a_number.py --cause mask --fixed    PASS
"""

import argparse
import os
import sys
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOKENS, WIDTH, STEPS = 8, 16, 60
MEANT = ("aten.masked_fill", "aten.full", "aten.scalar_tensor", "aten.log")  # may hold -inf on purpose
UNWRITTEN = ("aten.empty", "aten.new_empty")  # may hold anything
LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.__file__), "<")  # torch's lines, and Python's


class FirstNotFinite(TorchDispatchMode):
    """Raises FloatingPointError at the first operation that gets finite numbers and returns one that is not.

    A mask of -inf may be passed on, by `triu` or `where`; it is a mistake only where it becomes NaN or +inf.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(UNWRITTEN):
            return func(*args, **(kwargs or {}))
        given = [numbers(value) for value in tree_leaves((args, kwargs)) if is_float(value)]
        masked, wrong = not all(map(finite, given)), any(map(spoiled, given))  # before it changes them in place
        largest = max((t.abs().max().item() for t in given if t.numel()), default=0.0)
        out = func(*args, **(kwargs or {}))
        made = [numbers(value) for value in tree_leaves(out) if is_float(value)]
        meant = str(func).startswith(MEANT) and not any(map(spoiled, made))  # -inf alone
        handed_on = meant or (masked and not any(map(spoiled, made)))
        if not all(map(finite, made)) and not wrong and not handed_on:
            stands = where(traceback.extract_stack(), ("__torch_dispatch__",))
            raise FloatingPointError(
                f"step {self.step}, {stands}\n"
                f"{func} made the first number that is not finite; the largest that it got was {largest:g}"
            )
        return out


def where(stack: traceback.StackSummary, inside: tuple[str, ...]) -> str:
    """The innermost line that is neither torch's nor Python's, nor in one of these functions; also where this file is
    imported. On a GPU backward runs in a thread of torch's, which has no such line."""
    for frame in reversed(stack):
        if not frame.filename.startswith(LIBRARIES) and frame.name not in inside:
            file = "" if frame.filename == __file__ else f" of {os.path.basename(frame.filename)}"
            return f"line {frame.lineno}, in {frame.name}{file}: {frame.line}"
    return "a thread of torch's"


def is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.itemsize == 1 else tensor  # torch compares no numbers of 8 bits


def finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def spoiled(tensor: torch.Tensor) -> bool:
    """Is it wrong already? A -inf alone is a mask, which is a valid input of many operations."""
    return bool((tensor.isnan() | (tensor == torch.inf)).any())


def attention(x: torch.Tensor, weight: torch.Tensor, cause: str, fixed: bool) -> torch.Tensor:
    """One head over the tokens, [T, H] -> [T, H]; each token sees those before it."""
    scores = x @ weight @ x.T / WIDTH**0.5  # [T, T]
    if cause == "half" and fixed:
        scores = (x * 75 / WIDTH**0.25).half() @ (x * 75 / WIDTH**0.25).half().T  # [T, T] scaled before the product
    elif cause == "half":
        scores = (x * 75).half() @ (x * 75).half().T / WIDTH**0.5  # [T, T] and here after it, which is too late
    before = torch.ones(TOKENS, TOKENS).tril(diagonal=-1 if cause == "mask" else 0).bool()
    scores = scores.float().masked_fill(~before, -torch.inf)
    if cause == "mask" and fixed:
        scores = scores.masked_fill(~before.any(1, keepdim=True), 0.0)  # a row without keys: finite values
        return (scores.softmax(1) * before.any(1, keepdim=True)) @ x  # which are not used
    return scores.softmax(1) @ x  # [T, H]


def normalised(x: torch.Tensor, cause: str, fixed: bool) -> torch.Tensor:
    if cause != "norm":
        return x
    if fixed:
        return x / (x.square().sum(1, keepdim=True) + 1e-12).sqrt()  # eps inside the root
    return x / (x.square().sum(1, keepdim=True).sqrt() + 1e-6)  # eps outside: d sqrt(s) / ds at 0 is infinite


def train(cause: str, fixed: bool, watch: FirstNotFinite) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    x[3] = 0.0 if cause == "norm" else x[3]  # padding
    target = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = (torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH).requires_grad_()
    out = torch.eye(WIDTH).requires_grad_()
    rate = 3.0 if cause == "rate" and not fixed else 0.1
    for watch.step in range(STEPS):
        hidden = attention(normalised(x @ out, cause, fixed), weight, cause, fixed)
        loss = (hidden @ out - target).square().mean()
        loss.backward()
        for parameter in (weight, out):
            if parameter.grad is not None:
                parameter.data -= rate * parameter.grad
            parameter.grad = None
    return loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cause", choices=("mask", "norm", "half", "rate"), required=True)
    parser.add_argument("--fixed", action="store_true", help="the same model, with the repair")
    options = parser.parse_args()
    watch = FirstNotFinite()
    try:
        with watch:
            loss = train(options.cause, options.fixed, watch)
    except FloatingPointError as error:
        print(error)
        return 1
    print(f"loss after {STEPS} steps: {loss:.4f}")
    ok = loss == loss and abs(loss) < float("inf")
    print("PASS" if ok else "not finite, and nothing noticed")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
