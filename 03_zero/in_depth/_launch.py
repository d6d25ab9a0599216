"""What the benchmarks of this chapter share: N ranks on one machine, gloo on CPU or nccl on GPUs."""

import gc
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
import torch.multiprocessing as mp
from torch import Tensor

RANKS = 4


def _worker(rank: int, folder: str, benchmark: Callable[[torch.device], None]) -> None:
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", RANKS)
    limit = timedelta(seconds=300)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    benchmark(device)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def launch(benchmark: Callable[[torch.device], None]) -> None:
    """Run `benchmark(device)` on every rank. No benchmark has options of its own here."""
    if sys.argv[1:]:
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: it has no options; use nothing", file=sys.stderr)
        sys.exit(2)
    if 0 < torch.cuda.device_count() < RANKS:
        sys.exit(f"{Path(sys.argv[0]).name}: {torch.cuda.device_count()} GPUs; use {RANKS}, or none")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(folder, benchmark), nprocs=RANKS)


def must_be_equal(got: dict[str, Tensor], want: dict[str, Tensor], what: str, tol: float = 1e-8) -> None:
    """Nothing is timed before this: a benchmark of a wrong result is worth nothing."""
    for name, tensor in want.items():
        error = ((got[name] - tensor).abs().max() / tensor.abs().max()).item()
        if not error <= tol:
            raise SystemExit(f"{what}: {name} is off by {error:.1e}")


def largest(value: float, device: torch.device) -> int:
    """The largest of all ranks' values."""
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return round(tensor.item())


def processor_seconds(step: Callable[[], object]) -> float:
    """Of all ranks together, gloo's threads included: other programs on the machine cannot lengthen them."""
    dist.barrier()
    begin = time.process_time()
    step()
    dist.barrier()
    spent = torch.tensor(time.process_time() - begin, dtype=torch.float64)
    dist.all_reduce(spent)
    return spent.item()


def processor_ratios(a: Callable[[], object], b: Callable[[], object], repeats: int = 9) -> list[float]:
    """What a costs the processor over what b does, in pairs; who is first alternates."""
    ratios = []
    for repeat in range(repeats):
        seconds = {fn: processor_seconds(fn) for fn in ((a, b) if repeat % 2 else (b, a))}
        ratios.append(seconds[a] / seconds[b])
    return ratios
