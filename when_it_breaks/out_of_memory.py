"""It runs out of memory: what holds the bytes, found by the line of code that allocated them.

Three causes that look the same from outside, a step that worked yesterday and does not today:

    losses    a validation adds up its losses without `no_grad`: each is the end of a graph, which holds all its
              activations
    outputs   the logits of every batch stored in a list, for a metric at the end of the epoch
    logits    nothing is stored too long: the vocabulary is large, and all tokens' scores, their softmax and the
              gradient of both are alive at once. This one grows with the batch, not with the steps

The first question is therefore: does it grow from step to step? The second: which line allocated it? On a GPU
`torch.cuda.memory._record_memory_history()` and `_dump_snapshot("file.pickle")` answer both, with a page that draws
them (pytorch.org/memory_viz). Here `Budget` does the same on a CPU, and stops the run at its limit as a GPU would.

    python out_of_memory.py --cause losses             "out of memory", a table, exit code 1
    python out_of_memory.py --cause losses --fixed    PASS
"""

import argparse
import os
import sys
import traceback
import weakref
from collections import Counter

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, WORDS, STEPS = 256, 64, 4096, 6
LIMIT = 6_000_000  # bytes of this "device"
LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.__file__), "<")  # torch's lines, and Python's


class Budget(TorchDispatchMode):
    """Counts the storages that operators make while they are alive, by line of the run; refuses more than `limit`."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.alive, self.peak = limit, 0, 0
        self.lines: Counter[str] = Counter()  # "line 71, in step: ..." -> bytes alive
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):  # a view of older memory, such as weights, is not new
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or not size:
            return
        line = where(traceback.extract_stack(), ("__torch_dispatch__", "count"))
        self.known.add(key)
        self.alive += size
        self.lines[line] += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self.forget, key, size, line)
        if self.alive > self.limit:
            raise MemoryError(f"tried to hold {self.alive:,} bytes of {self.limit:,}")

    def forget(self, key: int, size: int, line: str) -> None:
        self.known.discard(key)
        self.alive -= size
        self.lines[line] -= size


def where(stack: traceback.StackSummary, inside: tuple[str, ...]) -> str:
    """The innermost line that is neither torch's nor Python's, nor in one of these functions; also where this file is
    imported. On a GPU backward runs in a thread of torch's, which has no such line."""
    for frame in reversed(stack):
        if not frame.filename.startswith(LIBRARIES) and frame.name not in inside:
            file = "" if frame.filename == __file__ else f" of {os.path.basename(frame.filename)}"
            return f"line {frame.lineno}, in {frame.name}{file}: {frame.line}"
    return "a thread of torch's"


def loss_of(hidden: torch.Tensor, embedding: torch.Tensor, labels: torch.Tensor, chunks: int) -> torch.Tensor:
    """Cross entropy, summed. hidden [T, H], embedding [V, H], labels [T]; the logits of T/chunks tokens at a time."""
    total = hidden.new_zeros(())
    for h, y in zip(hidden.chunk(chunks), labels.chunk(chunks), strict=True):
        part = lambda h, y: F.cross_entropy(h @ embedding.T, y, reduction="sum")  # noqa: E731 [T/chunks, V] -> []
        total = total + (checkpoint(part, h, y, use_reentrant=False) if chunks > 1 else part(h, y))
    return total


def train(cause: str, fixed: bool, budget: Budget) -> list[int]:
    """Bytes alive before each step."""
    generator = torch.Generator().manual_seed(0)
    tokens = TOKENS // {"logits": 1, "losses": 4, "outputs": 8}[cause]
    embedding = (torch.randn(WORDS, WIDTH, generator=generator) / WIDTH**0.5).requires_grad_()
    weight = torch.eye(WIDTH).requires_grad_()
    mean, outputs, after = 0.0, [], []
    for _ in range(STEPS):
        after.append(budget.alive)
        words = torch.randint(WORDS, (tokens,), generator=generator)  # [T]
        hidden = torch.tanh(embedding[words] @ weight)  # [T, H]
        loss = loss_of(hidden, embedding, words, chunks=8 if cause == "logits" and fixed else 1) / tokens
        if cause == "losses":
            mean = mean + (loss.detach() if fixed else loss)  # `no_grad` around all of it is better still
            continue
        loss.backward()
        if cause == "outputs":
            scores = hidden.detach() @ embedding.T.detach()  # [T, V]
            outputs.append((scores.argmax(1) == words).sum() if fixed else scores)
        for parameter in (embedding, weight):
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
        loss = hidden = scores = None  # or they would live until the next step replaces them
    return after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cause", choices=("losses", "outputs", "logits"), required=True)
    parser.add_argument("--fixed", action="store_true", help="the same loop, with the repair")
    options = parser.parse_args()
    budget = Budget(LIMIT)
    try:
        with budget:
            after = train(options.cause, options.fixed, budget)
    except MemoryError as error:
        print(f"out of memory: {error}; alive, by the line that made it:")
        for line, size in budget.lines.most_common(3):
            print(f"{size:>12,}  {line}")
        return 1
    growth = after[-1] - after[1]
    print(f"alive before each step: {', '.join(f'{size:,}' for size in after)}; peak {budget.peak:,}")
    print("PASS" if growth < 1000 else f"it grows: {growth:,} bytes in {STEPS - 2} steps")
    return int(growth >= 1000)


if __name__ == "__main__":
    sys.exit(main())
