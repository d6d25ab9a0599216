"""Where the CPU seconds of a step go, in the trainer and in another program, and how many are unavoidable.

    python 11_5d_trainer/bench/bench_seconds.py         CPU; about four minutes

Each operation that PyTorch runs, forward and backward, is timed by the CPU seconds of its thread. They do not
grow when other programs use the cores, as a profiler's do. The clock's cost is measured and subtracted. The
process's other threads send messages (Gloo); time outside all operations is Python and autograd.

The floor: the same matmuls and cores of attention of the step, on the same operands, run again by themselves.
A program that does nothing else would take this long.

First five steps are compared with the other program (bench_train.py). With tensor parallelism there is none.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import paths  # noqa: F401  finds the chapters below
import step as one_rank
import torch
import torch.distributed as dist
from bench_train import prepared, torch_step, transformers_step, verify
from harness.ranks import run_ranks
from harness.report import write_result
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = "--hidden 256 --layers 8 --heads 8 --kv-heads 4 --intermediate 1024 --seq-len 256 --micro-batch 2"
PIPELINE = "--pp 2 --schedule 1f1b"
ROUNDS = 5
PRODUCTS, ATTENTION, UPDATE = "matrix products", "core of attention", "norm, clipping, AdamW"
MESSAGES, ELEMENTWISE, REST = "messages", "all other arithmetic: gate, RoPE, norms, sums, loss", "Python, autograd"
KINDS = (PRODUCTS, ATTENTION, ELEMENTWISE, UPDATE, MESSAGES, REST)
UPDATES = ("_fused_adamw_", "linalg_vector_norm", "_foreach_norm", "mul_", "_foreach_mul_")
VIEWS = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "detach",
    "slice",
    "split",
    "unsqueeze",
    "expand",
    "alias",
    "permute",
)


def kind_of(operation: Any) -> str:
    name = operation.name().partition("::")[2].partition(".")[0]
    if operation.namespace == "c10d":
        return MESSAGES
    if name in ("mm", "bmm", "addmm"):
        return PRODUCTS
    if "scaled_dot_product" in name:
        return ATTENTION
    if name in UPDATES:
        return UPDATE
    return REST if name in VIEWS else ELEMENTWISE


class Clock(TorchDispatchMode):
    """CPU seconds of this thread in each kind of operation, and the calls of the two kinds in the floor."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.operands: dict[Any, tuple[Any, tuple, dict]] = {}
        self.again: Counter[Any] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        start = time.thread_time()
        result = operation(*args, **kwargs)
        kind = kind_of(operation)
        self.seconds[kind] += time.thread_time() - start
        self.calls[kind] += 1
        if kind in (PRODUCTS, ATTENTION):
            signature = operation, *((tuple(x.shape), x.stride()) for x in args if isinstance(x, torch.Tensor))
            self.operands.setdefault(signature, (operation, args, kwargs))
            self.again[signature] += 1
        return result


def cost_of_the_clock(times: int = 2000) -> float:
    """Seconds that the clock adds to an operation, by a small one with and without it."""
    x, inside = torch.ones(8), Clock()
    with inside:
        for _ in range(times):
            x.add(1.0)
    start = time.thread_time()
    for _ in range(times):
        x.add(1.0)
    return (inside.seconds[ELEMENTWISE] - (time.thread_time() - start)) / times


def floor(clock: Clock) -> float:
    """CPU seconds of the matmuls and the attention that the clock has recorded, by themselves."""
    start = time.thread_time()
    for signature, count in clock.again.items():
        operation, args, kwargs = clock.operands[signature]
        for _ in range(count):
            operation(*args, **kwargs)
    return time.thread_time() - start


def seconds_of(step: Callable[[], Any]) -> dict[str, float]:
    """CPU seconds of one step: by kind, in total, and of its floor. Medians of some rounds."""
    cost, rounds = cost_of_the_clock(), []
    for _ in range(ROUNDS):
        dist.barrier()
        process, thread = time.process_time(), time.thread_time()
        step()
        process, thread = time.process_time() - process, time.thread_time() - thread
        clock = Clock()
        with clock:
            step()
        found = {kind: max(0.0, clock.seconds[kind] - clock.calls[kind] * cost) for kind in KINDS if kind != REST}
        found[REST] = thread - sum(found.values())
        found[MESSAGES] += process - thread
        with torch.no_grad():
            rounds.append(found | {"all": process, "floor": floor(clock)})
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def of_a_rank(options: str, other: str = "") -> list[dict[str, float]]:
    """The trainer's step, and the other program's if one is named."""
    me, batches = prepared(f"{SIZES} {options}")
    ours = partial(one_rank.train_step, me, batches[0])
    if not other:
        ours(), ours()
        return [seconds_of(ours)]
    theirs = transformers_step(me) if other == "transformers" else torch_step(me, f"{SIZES} {options}")
    verify(me, batches, theirs, other)
    return [seconds_of(ours), seconds_of(partial(theirs, batches[0]))]


def measure(ranks: int, options: str, other: str = "") -> list[dict[str, float]]:
    """Means over the ranks."""
    everyone = run_ranks(ranks, of_a_rank, options, other, timeout=300)
    return [{k: statistics.fmean(r[i][k] for r in everyone) for k in one} for i, one in enumerate(everyone[0])]


def main() -> None:
    columns = ["CPU seconds of a step on a rank"]
    shown: list[dict[str, float]] = []
    for ranks, options, what, other in (
        (1, "--global-batch 8", "1 rank", "transformers"),
        (4, f"{PIPELINE} --global-batch 16", "dp 2 x pp 2", "torch's DDP and pipelining"),
        (8, f"{PIPELINE} --tp 2 --global-batch 16", "dp 2 x tp 2 x pp 2", ""),
    ):
        found = measure(ranks, options, other)
        shown += found
        columns += [f"{what}: {program}" for program in ("the trainer", other)[: len(found)]]
    rows = [[kind, *(f"{each[kind]:.3f} ({each[kind] / each['all']:.0%})" for each in shown)] for kind in KINDS]
    rows.append(["all", *(f"{each['all']:.3f}" for each in shown)])
    rows.append(["floor: its products and attention alone", *(f"{each['floor']:.3f}" for each in shown)])
    rows.append(["all / floor", *(f"{each['all'] / each['floor']:.2f}" for each in shown)])
    write_result(
        "11_seconds",
        "Where the CPU seconds of a step go, and the floor",
        columns,
        rows,
        "8.0 million parameters: 8 layers, hidden size 256, 8 heads, 4 key/value heads; 4 micro-batches of 2 x 256 "
        f"tokens on a data rank, fp32, 1F1B. Medians of {ROUNDS} steps, means over the ranks. In the last row: how "
        "many times as fast a step could be at most, if nothing remained but its products and the core of attention.",
    )


if __name__ == "__main__":
    main()
