"""Shared by this chapter's demos, not needed to read them: counters, a table, a process group's start."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: if first imported while a group exists, it would keep the group alive
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Wire(TorchDispatchMode):
    """Counts this rank's collectives and the bytes they send, for groups of `ranks` ranks."""

    OPERATORS = {  # noqa: RUF012  operator of torch.distributed: (name, argument with the full tensor, ring's factor)
        "allreduce_": ("all-reduce", 0, 2),
        "_allgather_base_": ("all-gather", 0, 1),
        "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    }

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._opname in self.OPERATORS:
            name, at, factor = self.OPERATORS[func._opname]
            full = sum(t.nbytes for t in (args[at] if isinstance(args[at], list) else [args[at]]))
            self.calls[name] += 1
            self.bytes += factor * (self.ranks - 1) * full // self.ranks
        elif func.namespace == "c10d" and func._opname == "send":
            self.calls["send"] += 1
            self.bytes += sum(t.nbytes for t in args[0])
        return func(*args, **(kwargs or {}))


def kept_for_backward(forward: Callable[[], Tensor], leave_out: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The result of `forward`, and the bytes that autograd saves: each storage once, without `leave_out`."""
    storages = {}

    def pack(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result = forward()
    for tensor in leave_out:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return result, sum(storage.nbytes() for storage in storages.values())


class Report:
    """A table of predicted and measured values, printed by rank 0."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.wrong = []
        self.rank = dist.get_rank(group)
        self.errors: list[float] = []

    def title(self, text: str) -> None:
        if self.rank == 0:
            print(f"{text}\n{'':52}{'predicted':>14}{'measured':>14}")

    def add(self, what: str, predicted: Any, measured: Any, right: bool | None = None) -> None:
        if not (predicted == measured if right is None else right):
            self.wrong.append(f"rank {self.rank}: {what} is {measured}, not {predicted}")
        if self.rank == 0:
            print(f"  {what:50}{predicted!s:>14}{measured!s:>14}")

    def compare(self, got: Tensor, want: Tensor) -> None:
        largest = want.abs().max().item() or 1.0  # tokens that do not occur have gradient zero
        self.errors.append((got - want).abs().max().item() / largest)

    def add_errors(self, what: str, tolerance: float = 1e-10) -> None:
        right = all(error <= tolerance for error in self.errors)  # False for NaN, as it should be
        worst = max(self.errors, key=lambda error: (error != error, error))
        self.add(what, f"<= {tolerance:g}", f"{worst:.1e}", right)
        self.errors = []

    def finish(self) -> list[str]:
        everyone: list[list[str]] = [[]] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, self.wrong, group=self.group)
        return [line for lines in everyone for line in lines]


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)


def launch(demo: Callable[[dist.ProcessGroup, torch.device], list[str]]) -> NoReturn:
    """Start the process group, run the demo, print PASS or what is wrong."""
    gpus = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < gpus < local:
        OneLineParser().error(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **alone)
    rank = dist.get_rank()
    wrong = demo(dist.group.WORLD, device)
    gc.collect()  # reference cycles must not keep the group alive
    dist.destroy_process_group()
    if rank == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    sys.exit(1 if wrong else 0)


def tokens_of_text(rows: int, length: int, start: int = 0) -> Tensor:
    """[rows, length] bytes of the standard library's source."""
    data = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    return data[start : start + rows * length].view(rows, length)
