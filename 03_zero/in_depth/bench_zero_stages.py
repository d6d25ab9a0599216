"""Stages 1 and 2 against torch's DistributedDataParallel with ZeroRedundancyOptimizer: same model, 4 ranks, one run.

    python 03_zero/in_depth/bench_zero_stages.py              4 processes on CPU (Gloo), or 4 GPUs (NCCL)

Before any measurement, the weights after two steps in float64 are compared, for every stage and for gathers
during the next forward (zero_overlap.py). A step is zero_grad, forward, backward with its communication, and
the update. Peaks count every tensor since the model was built, on the rank with the largest peak.

On a CPU two more tables show the cost of Gloo's reduce-scatter against its all-reduce, and each stage's bytes
per step on the wire, as the operating system counts them on the loopback interface. As root, the processes
get their own network; in any case the smallest of five windows counts, since other traffic only adds.
"""

import ctypes
import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import (
    RANKS,
    Ours,
    Torchs,
    after_two_steps,
    batch_of_rank,
    largest,
    launch,
    must_be_equal,
    one_step,
)
from harness.meter import communication, loopback_bytes, peak_memory
from harness.report import paired, processor_paired, write_result
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from zero3 import make_zero
from zero_overlap import make_overlapped
from zero_stages import ExchangeAndSum, SendToAll, reduce_scatter

SMALL, LARGE = {"hidden": 128, "layers": 4}, {"hidden": 256, "layers": 4}
MIB = 2**20
BUCKET, LATE_BUCKET = 4, 2  # MiB, of both sides; LATE_BUCKET where gathers travel in the next forward
ON_CPU = not torch.cuda.is_available()
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
# Gloo's reduce-scatter is an all-reduce inside, so on a CPU it is measured next to point-to-point sends.
DIRECT = {"reduce_scatter": ExchangeAndSum, "all_gather": SendToAll}
WAYS = {"": {}, ", point to point": DIRECT} if ON_CPU else {"": {}}
OURS = {f"stage {stage}{how}": (stage, own) for how, own in WAYS.items() for stage in (1, 2)}
LATE = DIRECT if ON_CPU else {}

ddp = partial(DistributedDataParallel, gradient_as_bucket_view=True)
zero_optimizer = partial(
    ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3
)
torchs = partial(Torchs, partial(ddp, bucket_cap_mb=BUCKET), zero_optimizer)


def zero(make: Any, stage: int, model: nn.Module, mib: int = BUCKET, **own: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return make(stage, model, optimizer, dist.group.WORLD, bucket_bytes=mib * MIB, **own)


def ours(stage: int, own: dict, *run: Any) -> Ours:
    return Ours(lambda model: zero(make_zero, stage, model, **own), *run)


def gathers(make: Any, stage: int, *run: Any) -> Ours:
    """Stage 1 or 2 with its gathers in the step, or in the next forward."""
    return Ours(lambda model: zero(make, stage, model, LATE_BUCKET, **LATE), *run)


def on_the_wire(stage: int, own: dict, *run: Any) -> Ours:
    def make(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return make_zero(stage, model, optimizer, dist.group.WORLD, units=model.layers, **own)

    return Ours(make, *run)


WIRE = {("DDP + ZeroRedundancyOptimizer", "gloo's"): partial(Torchs, ddp, zero_optimizer)}
for stage in (1, 2, 3):
    for how, own in {"gloo's": {}, "point to point": DIRECT}.items():
        WIRE[f"stage {stage}", how] = partial(on_the_wire, stage, own)


def verify(device: torch.device) -> None:
    batch, on = batch_of_rank(device), (device, torch.float64)
    for sizes in (SMALL, LARGE):
        want = after_two_steps(torchs(sizes, *on), *batch)
        for who, (stage, own) in OURS.items():
            must_be_equal(after_two_steps(ours(stage, own, sizes, *on), *batch), want, f"{who}, {sizes}")
    for stage in (1, 2):
        run = gathers(make_overlapped, stage, LARGE, *on)
        for _ in range(2):
            run.step(*batch)
        got = {name: p.detach().clone() for name, p in run.model.named_parameters()}  # the read waits
        must_be_equal(got, want, f"stage {stage}, gathers in forward")
    want = after_two_steps(torchs(SMALL, *on), *batch)
    for (what, how), make in WIRE.items() if ON_CPU else ():
        must_be_equal(after_two_steps(make(SMALL, *on), *batch), want, f"{what}, {how}")
    gc.collect()


def compare_steps(device: torch.device) -> list[list]:
    rows, batch = [], batch_of_rank(device)
    for name, sizes in {"0.9M": SMALL, "3.3M": LARGE}.items():
        runs = {who: partial(ours, stage, own, sizes, device) for who, (stage, own) in OURS.items()}
        peaks = {}
        for who, make in {"torch": partial(torchs, sizes, device), **runs}.items():
            with peak_memory() as memory:
                one = make()
                for _ in range(2):
                    one.step(*batch)
            peaks[who] = largest(memory.peak, device)
            del one
            gc.collect()
        theirs = torchs(sizes, device)
        for who, make in runs.items():
            steps = (partial(make().step, *batch), partial(theirs.step, *batch))
            ratio = paired(*steps, repeats=15, setup=dist.barrier)
            processor = [processor_paired(*steps, repeats=15)] if ON_CPU else []
            rows.append([name, who, ratio, *processor, peaks[who] / peaks["torch"], peaks["torch"]])
    return rows


def travelling_in_forward(run: Ours, tokens: Tensor, labels: Tensor) -> tuple[int, int]:
    """(buckets without a wait when the first block began to compute, buckets)."""
    run.step(tokens, labels)
    log = run.zero.log
    handle = run.model.layers[0].qkv.register_forward_pre_hook(lambda *_: log.append(("forward", 0)))
    run.step(tokens, labels)
    handle.remove()
    waited = {who for what, who in log[: log.index(("forward", 0))] if what == "wait"}
    return len(run.zero.buckets) - len(waited), len(run.zero.buckets)


def compare_gathers(device: torch.device) -> list[list]:
    rows, batch = [], batch_of_rank(device)
    for stage in (1, 2):
        runs = {
            "torch": Torchs(partial(ddp, bucket_cap_mb=LATE_BUCKET), zero_optimizer, LARGE, device),
            "waits": gathers(make_zero, stage, LARGE, device),
            "late": gathers(make_overlapped, stage, LARGE, device),
        }
        peaks, sent = {}, {}
        for who, run in runs.items():
            peaks[who], sent[who] = one_step(run, *batch, device)
        left, buckets = travelling_in_forward(runs["late"], *batch)
        step = {who: partial(run.step, *batch) for who, run in runs.items()}
        ratios = [paired(step["late"], step[who], repeats=9, setup=dist.barrier) for who in ("waits", "torch")]
        bytes_sent = sent["late"].total / sent["waits"].total
        rows.append([f"stage {stage}", f"{left} of {buckets}", *ratios, peaks["late"] / peaks["waits"], bytes_sent])
        runs["late"].zero.arrive()
        del runs, step
        gc.collect()
    return rows


def compare_reductions(device: torch.device) -> list[list]:
    """Gloo's reduce-scatter, and `ExchangeAndSum`, against its all-reduce, on the same buffer of a bucket."""
    numel, group, rows = BUCKET * MIB // 4, dist.group.WORLD, []
    flat, mine = torch.ones(numel, device=device), torch.empty(numel // RANKS, device=device)
    whole = torch.zeros(numel)  # zeros stay zeros, however often they are summed
    all_reduce = partial(dist.all_reduce, whole, group=group)
    for what, way in {
        "gloo's reduce-scatter": partial(reduce_scatter, mine, flat, group=group),
        "ExchangeAndSum": partial(ExchangeAndSum, mine, flat, group=group, async_op=False),
    }.items():
        way()
        if not (mine == RANKS).all():
            raise SystemExit(f"{what}: a sum of {RANKS} ones is not {mine[0].item()}")
        seconds = paired(way, all_reduce, repeats=31, setup=dist.barrier)
        rows.append([what, seconds, processor_paired(way, all_reduce, repeats=31)])
    return rows


def network_of_our_own() -> bool:
    if os.geteuid() or ctypes.CDLL(None).unshare(NEW_NETWORK):
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


def count_on_the_wire(device: torch.device) -> list[list]:
    rows, batch = [], batch_of_rank(device)
    for (what, how), make in WIRE.items():
        run, windows = make(SMALL, device), []
        run.step(*batch)  # DDP rebuilds its buckets in the first step, and broadcasts them
        for _ in range(5):
            dist.barrier()  # no rank sends before all ranks are here
            before = loopback_bytes()
            dist.barrier()
            with communication() as sent:
                run.step(*batch)
            dist.barrier()
            windows.append(loopback_bytes() - before)
        formula = torch.tensor(float(sent.total), dtype=torch.float64)
        dist.all_reduce(formula)  # the wire carries the bytes of all ranks
        rows.append([what, how, round(formula.item()), min(windows), min(windows) / formula.item()])
    return rows


def benchmark(device: torch.device) -> None:
    verify(device)
    steps, late = compare_steps(device), compare_gathers(device)
    on_cpu = [compare_reductions(device), count_on_the_wire(device)] if ON_CPU else []
    if dist.get_rank() == 0:
        write(steps, late, *on_cpu)


def write(steps: list[list], late: list[list], reductions: list[list] = (), wire: list[list] = ()) -> None:
    write_result(
        "03_zero",
        f"Stages 1 and 2 against DistributedDataParallel with ZeroRedundancyOptimizer, {RANKS} ranks",
        [
            "parameters",
            "ours",
            "seconds of a step / torch's (quartiles)",
            *(["processor seconds / torch's"] if ON_CPU else []),
            "peak bytes / torch's",
            "torch's peak",
        ],
        steps,
        f"fp32, AdamW, buckets of {BUCKET} MiB, 2 x 64 tokens a rank. The weights after two steps in float64 were "
        "compared first. A peak is that of building the model and two steps, on the rank where it is largest. "
        "Processor seconds are those of all ranks and all their threads.",
    )
    write_result(
        "03_zero_overlap",
        f"Gathers during the next forward, {RANKS} ranks",
        [
            "",
            "buckets that travel when the first block computes",
            "seconds of a step / with gathers in the step (quartiles)",
            "seconds of a step / torch's (quartiles)",
            "peak bytes in a step / with gathers in the step",
            "bytes sent / with gathers in the step",
        ],
        late,
        f"3.3M parameters, fp32, AdamW, buckets of {LATE_BUCKET} MiB, 2 x 64 tokens a rank; torch's is "
        "DistributedDataParallel with ZeroRedundancyOptimizer. The weights after two steps in float64 were compared "
        "first. On a CPU ours send from rank to rank, and messages take time from the computation that they hide "
        "behind.",
    )
    if not ON_CPU:
        return
    write_result(
        "03_zero_gloo",
        f"Ways to sum a bucket of {BUCKET} MiB into shards, {RANKS} ranks, against gloo's all-reduce of it",
        ["", "seconds / all-reduce", "processor seconds / all-reduce"],
        reductions,
        "Medians of pairs, and quartiles; processor seconds are those of all ranks and all their threads.",
    )
    write_result(
        "03_zero_wire",
        f"Bytes that a step sends, {RANKS} ranks together: payloads times formula, and on the wire",
        ["", "collectives", "payloads x formula", "on the wire", "wire / formula"],
        wire,
        "0.9M parameters in fp32, one micro-batch. The weights after two steps in float64 were compared first. On "
        "the wire is what the operating system counts on the loopback interface, headers of TCP and IP included.",
    )


if __name__ == "__main__":
    if ON_CPU and not sys.argv[1:] and network_of_our_own():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    launch(benchmark)
