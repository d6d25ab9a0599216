"""Shared by the demos of this chapter: counters of bytes and host waits, the table, the process group."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tokenize
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, with a group open, it would keep that group alive
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Wire(TorchDispatchMode):
    """Counts the bytes that this rank sends in all-to-alls to each rank of the world."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.to: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._opname == "alltoall_base_":
            group = dist.ProcessGroup.unbox(args[2])
            splits = args[4]
            size = group.size()
            rows = args[1].shape[0]
            splits = splits or [rows // size] * size
            for other, n in enumerate(splits):
                if other != group.rank() and n:
                    self.to[dist.get_global_rank(group, other)] += args[1].nbytes // rows * n
            self.bytes = self.to.total()
        return func(*args, **(kwargs or {}))


class HostWaits(TorchDispatchMode):
    """On any device, including CPUs: the operations in the block for which the host would wait for a GPU.

    These are: a value that Python reads (`item`, `tolist`, `int`, `bool`); an output whose size depends on
    data (`nonzero`, indexing with a mask, `unique`, `bincount`, `repeat_interleave` without `output_size`); a
    tensor made from Python numbers, copied from the host. On a GPU: torch.cuda.set_sync_debug_mode("error"), which
    lets a number pass that is written through a mask.
    """

    READS = ("tolist", "numpy", "cpu", "__array__")  # on a CPU these only read memory
    SIZES = ("nonzero", "_unique2", "unique_dim", "unique_consecutive", "bincount", "masked_select")
    WAITS = (*SIZES, "repeat_interleave", "_local_scalar_dense", "equal", "lift_fresh")  # the last: torch.tensor([...])

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.reads = _Reads(self.found)

    def __enter__(self):
        self.reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any):
        super().__exit__(*error)
        self.reads.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._opname
        known = name == "repeat_interleave" and kwargs.get("output_size") is not None
        if func.namespace == "aten" and name in self.WAITS and not known:
            self.found.append(name)
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            self.found += [f"{name} with a mask"] * bool(masks)
        return func(*args, **kwargs)


class _Reads(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (name := getattr(func, "__name__", "")) in HostWaits.READS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Report:
    """A table of what was predicted and what was measured, printed by rank 0."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.wrong = []
        self.rank = dist.get_rank(group)
        self.errors: list[float] = []

    def title(self, text: str) -> None:
        if self.rank == 0:
            print(f"{text}\n{'':60}{'predicted':>12}{'measured':>12}")

    def add(self, what: str, predicted: Any, measured: Any, right: bool | None = None) -> None:
        if not (predicted == measured if right is None else right):
            self.wrong.append(f"rank {self.rank}: {what} is {measured}, not {predicted}")
        if self.rank == 0:
            print(f"  {what:58}{predicted!s:>12}{measured!s:>12}")

    def compare(self, got: Tensor | None, want: Tensor) -> None:
        if got is None or got.shape != want.shape:
            self.errors.append(float("nan"))
        elif want.numel():
            self.errors.append(((got - want).abs().max() / (want.abs().max().item() or 1.0)).item())

    def add_errors(self, what: str, tolerance: float = 1e-10) -> None:
        right = all(error <= tolerance for error in self.errors)  # False for NaN, as required
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

    def check_range(self, args: argparse.Namespace, **limits: tuple[int, int]) -> None:
        for option, (low, high) in limits.items():
            if not low <= getattr(args, option) <= high:
                self.error(f"--{option.replace('_', '-')} {getattr(args, option)} is not in {low} .. {high}")


def launch(demo: Callable[[dist.ProcessGroup, torch.device], list[str]]) -> NoReturn:
    """Start the process group, run the demo, print PASS or the failures."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=60), **alone)
    rank = dist.get_rank()
    wrong = demo(dist.group.WORLD, device)
    gc.collect()  # cycles that refer to the group must not outlive it
    dist.destroy_process_group()
    if rank == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    sys.exit(1 if wrong else 0)


def text(rows: int, length: int, start: int = 0) -> Tensor:
    """[rows, length] bytes of the standard library's source, from byte `start`, wrapping at the end."""
    data = torch.frombuffer(bytearray(Path(tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    return data[(start + torch.arange(rows * length)) % len(data)].view(rows, length)


def check_gpus(parser: OneLineParser) -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if 0 < gpus < local:
        parser.error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")
