"""Measure the machine this runs on, and write a cluster file for the planner.

Matmuls of five sizes give the two constants of the planner's rule (peak x n / (n + half)), a copy the memory
bandwidth, and, with several ranks, all-reduces of a large and a small tensor bandwidth and latency. Ranks of
one CPU share its cores, so it also measures how much faster one rank is while the others wait.

    python 11_5d_trainer/planner/plan.py --calibrate my.json                          one rank: matmuls and copies
    torchrun --nproc_per_node 4 11_5d_trainer/planner/plan.py --calibrate my.json     collectives too; rank 0 writes
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int = 0, together: bool = True) -> float:
    """Mean time of a call, after two for warm-up: of `repeats` calls (collectives), or over 1/3 of a second.

    All ranks begin `together`. Where they share cores, each is interrupted now and then while the others
    compute. The mean includes that; a median would see only calls without an interruption.
    """
    for _ in range(2):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if together and dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    count = 0
    while count < repeats or (not repeats and time.perf_counter() - begin < 1 / 3):
        work()
        count += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / count


def rates(device: torch.device) -> dict[str, float]:
    """Rates of matmuls and copies."""
    gpu = device.type == "cuda"
    dtype, sizes = (torch.bfloat16, (512, 1024, 2048, 4096, 8192)) if gpu else (torch.float32, (32, 64, 128, 256, 512))
    measured: dict[float, float] = {}
    for n in sizes:
        a = torch.randn(4 * n, n, device=device).to(dtype)
        b = torch.randn(n, n, device=device).to(dtype)
        width = 1 / (1 / (4 * n) + 1 / n + 1 / n)  # as in plan_time.width_of
        measured[width] = 8 * n**3 / seconds_of(partial(torch.matmul, a, b), device)
    peak, half = peak_and_half(measured)
    elements = 2**28 if gpu else 2**22
    source = torch.zeros(elements, device=device)
    copied = seconds_of(lambda: source.clone(), device)
    return {"peak_tflops": peak / 1e12, "half": half, "memory_gb_per_s": 2 * 4 * elements / copied / 1e9}


def peak_and_half(measured: Mapping[float, float]) -> tuple[float, float]:
    """The rule r(n) = peak n / (n + half) through measured rates: 1 / r is a straight line in 1 / n.

    Least squares of the relative errors. If noise, or the launch time of a matmul, would put the peak below a
    measured rate, or at infinity, the largest rate is the peak.
    """
    x = torch.tensor([[1.0, 1 / n] for n in measured], dtype=torch.float64)
    r = torch.tensor(list(measured.values()), dtype=torch.float64)
    a, b = torch.linalg.lstsq(x * r[:, None], torch.ones(len(r), 1, dtype=torch.float64)).solution[:, 0].tolist()
    top = max(measured.values())
    if not 1 / (2 * top) <= a <= 1 / top or b <= 0:  # 1 / peak, and half / peak
        a = 1 / top
        per_n = r * x[:, 1]
        b = max(1e-3 * a, float(((1 - a * r) * per_n).sum() / (per_n * per_n).sum()))
    return 1 / a, b / a


def links(device: torch.device) -> tuple[float, float]:
    """GB/s sent in a large all-reduce, and microseconds per step of a small one."""
    P = dist.get_world_size()
    large = torch.zeros(2**26 if device.type == "cuda" else 2**20, device=device)
    small = torch.zeros(1, device=device)
    slow, fast = (seconds_of(partial(dist.all_reduce, x), device, repeats=10) for x in (large, small))
    return 2 * (P - 1) / P * large.nbytes / slow / 1e9, fast / (2 * (P - 1)) * 1e6


def alone() -> float:
    """How many times faster a large matmul is on rank 0 while the other ranks wait. All ranks call it."""
    a = torch.randn(512, 512)
    together = seconds_of(partial(torch.matmul, a, a), a.device)
    dist.barrier()
    faster = 1.0
    if dist.get_rank() == 0:
        faster = max(1.0, together / seconds_of(partial(torch.matmul, a, a), a.device, together=False))
    dist.barrier()
    return faster


def calibrate(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Write the cluster file. Under torchrun all ranks measure, and rank 0 writes."""
    gpu = torch.cuda.is_available()
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    ranks = 1
    bandwidth = 1.0
    latency = 10.0
    faster = 1.0
    if "RANK" in os.environ:
        if gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=120))
        ranks = dist.get_world_size()
        if ranks > 1:
            bandwidth, latency = links(device)
            faster = 1.0 if gpu else alone()
    found = rates(device)  # with all ranks at once: they share cores as in training
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = torch.cuda.get_device_properties(device).total_memory if gpu else host_memory() / local
    cluster = {
        "name": torch.cuda.get_device_name(device) if gpu else "CPU",
        "gpus_per_node": local,
        "nodes": max(1, ranks // local),
        "memory_gb": memory / 1e9,
        **found,
        "ceiling": 1.0,
        "inside_gb_per_s": bandwidth,
        "outside_gb_per_s": bandwidth,
        "latency_us": latency,
        "alone": faster,
        "source": f"measured on {ranks} rank(s), torch {torch.__version__}"
        + ("" if ranks > 1 else "; links not measured, start it with torchrun"),
    }
    if rank == 0:
        path.write_text(json.dumps(cluster, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return ([f"{key}: {value}" for key, value in cluster.items()] + [f"wrote {path}"] if rank == 0 else []), cluster


def host_memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
