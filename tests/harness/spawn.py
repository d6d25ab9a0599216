"""Start the ranks of a benchmark: separate processes, on a CPU with Gloo, or with a GPU each and NCCL."""

import gc
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
import torch.multiprocessing as mp

LIMIT = timedelta(seconds=300)


def launch(worker: Callable[[torch.device], object], ranks: int, gpus: bool = True) -> None:
    """`worker(device)` on every rank, one thread each; without `gpus` on the CPU wherever it is."""
    here = torch.cuda.device_count() if gpus else 0
    if 0 < here < ranks:
        sys.exit(f"{Path(sys.argv[0]).name}: {here} GPUs; use {ranks}, or none (CUDA_VISIBLE_DEVICES=)")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_start, args=(f"{folder}/store", worker, ranks, here > 0), nprocs=ranks)


def _start(rank: int, store: str, worker: Callable[[torch.device], object], ranks: int, gpu: bool) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    meet = dist.FileStore(store, ranks)
    dist.init_process_group("nccl" if gpu else "gloo", store=meet, rank=rank, world_size=ranks, timeout=LIMIT)
    worker(device)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
