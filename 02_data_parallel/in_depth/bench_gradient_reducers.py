"""The three reducers against torch's DistributedDataParallel: same model, same batch, same buckets, 4 ranks, one run.

    python 02_data_parallel/in_depth/bench_gradient_reducers.py              4 processes on CPU (Gloo), or 4 GPUs (NCCL)

Before any timing, every gradient of every version is compared with DDP's. A step is zero_grad, forward,
backward, and the wait for the gradients. Our and DDP's steps alternate in pairs; the table gives the ratio of
their seconds, which should be at or below 1 within its quartiles for the bucketed version. On CPU that ratio
compares the overhead (hooks, copies, launches), because compute and communication share the same cores and
overlap gains nothing.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from gradient_reducers import VERSIONS, BucketedReducer, Decoder, Reducer, make_batch, token_loss_sum
from harness.meter import communication
from harness.report import Ratio, paired, processor_paired, write_result
from harness.spawn import launch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 4
MODELS = {"1.1M": {"hidden": 128, "layers": 5}, "6.6M": {"hidden": 256, "layers": 8}}
BUCKET_MIB = 1  # small models, so that there are several buckets; both sides get the same


def build(sizes: dict[str, int], device: torch.device) -> Decoder:
    torch.manual_seed(0)
    return Decoder(heads=4, **sizes).to(device)


def check(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        error = ((p.grad - q.grad).abs().max() / q.grad.abs().max()).item()
        if not error <= 1e-5:
            raise SystemExit(f"{what}: the gradient of {name} differs from DDP's by {error:.1e}")


def compare(name: str, sizes: dict[str, int]) -> list[list[str | int | Ratio]]:
    group = dist.group.WORLD
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    tokens = make_batch(0, RANKS)[rank][1][0].to(device)
    labels = tokens.roll(-1, dims=1)  # every token is a target, because only time is measured
    valid = labels.numel() * RANKS

    theirs = DistributedDataParallel(build(sizes, device), bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True)
    models = {version: build(sizes, device) for version in VERSIONS}
    reducers: dict[str, Reducer] = {v: make(models[v], group) for v, make in VERSIONS.items() if v != "bucketed"}
    reducers["bucketed"] = BucketedReducer(models["bucketed"], group, bucket_bytes=BUCKET_MIB * 2**20)

    def ddp_step() -> None:
        theirs.zero_grad()
        (RANKS * token_loss_sum(theirs, tokens, labels) / valid).backward()  # DDP averages, so it needs the factor

    def our_step(version: str) -> None:
        models[version].zero_grad()
        (token_loss_sum(models[version], tokens, labels) / valid).backward()
        reducers[version].finish()

    rows: list[list[str | int | Ratio]] = []
    for version in VERSIONS:
        for _ in range(2):  # DDP has rebuilt its buckets by its second step
            ddp_step()
            our_step(version)
        check(models[version], theirs.module, f"{version}, {name} parameters")
    for version in VERSIONS:
        repeats = 31 if version == "bucketed" else 9  # the other ratios are not close to 1
        step = partial(our_step, version)
        ratio = paired(step, ddp_step, repeats=repeats, setup=lambda: dist.barrier(group))
        processor = [] if device.type == "cuda" else [processor_paired(step, ddp_step, repeats)]
        with communication() as sent:
            ddp_step()
        rows.append([name, version, sent.calls["all_reduce"], len(reducers[version].buckets), ratio, *processor])
    return rows


def worker(device: torch.device) -> None:
    rows = [row for name, sizes in MODELS.items() for row in compare(name, sizes)]
    if dist.get_rank() == 0:
        write_result(
            "02_data_parallel",
            f"Step time against torch's DistributedDataParallel, {RANKS} ranks, buckets of {BUCKET_MIB} MiB",
            [
                "parameters",
                "version",
                "all-reduces of DDP",
                "of this version",
                "seconds of this version / of DDP",
                *([] if device.type == "cuda" else ["processor seconds / of DDP"]),
            ],
            rows,
            "A step is zero_grad, forward, backward and the wait for the summed gradients; DDP runs with "
            "`gradient_as_bucket_view=True`. The gradients of all versions were compared with DDP's first. Medians of "
            "pairs, and quartiles. Processor seconds are those of all ranks and all their threads.",
        )


if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: it has no options; use nothing", file=sys.stderr)
        sys.exit(2)
    launch(worker, RANKS)
