"""Stage 3, its hybrid and its full state against torch's FSDP2 (`fully_shard`): same model and units, 4 ranks, one run.

    python 03_zero/in_depth/bench_zero3.py             4 processes on CPU (Gloo), or 4 GPUs (NCCL)

Before any measurement, the weights after two steps in float64 are compared, with AdamW and, for HSDP on 2
shards x 2 copies, with SGD, and then both full states. Both prefetch the next unit while one computes, and
keep the root gathered between forward and backward; ours also keeps the last unit.
"""

import gc
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, Ours, Torchs, after_two_steps, batch_of_rank, launch, must_be_equal, one_step
from harness.meter import communication
from harness.report import paired, write_result
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero3 import Zero3
from zero_hybrid import make_groups, make_hybrid
from zero_state import full_state_dict

SMALL, MIDDLE, LARGE = ({"hidden": h, "layers": n} for h, n in ((128, 4), (256, 4), (256, 8)))
SHARDS = 2
ADAMW, SGD = partial(torch.optim.AdamW, lr=1e-3), partial(torch.optim.SGD, lr=0.05)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def zero3(model: nn.Module) -> Zero3:
    return Zero3(model, ADAMW(model.parameters()), dist.group.WORLD, units=model.layers)


def full_states(device: torch.device, sizes: dict[str, int]) -> tuple[Any, Any]:
    """Two functions that gather the full state after a step in float64, ours and torch's."""
    ours, theirs = Ours(zero3, sizes, device, torch.float64), Torchs(sharded, ADAMW, sizes, device, torch.float64)
    for run in (ours, theirs):
        run.step(*batch_of_rank(device))
    options = StateDictOptions(full_state_dict=True)
    return partial(full_state_dict, ours.zero), partial(get_state_dict, theirs.model, theirs.optimizer, options=options)


def hybrid(groups: Any, optimizer: Any, model: nn.Module) -> Any:
    return make_hybrid(model, optimizer(model.parameters()), *groups, units=model.layers)


def verify(device: torch.device, groups: Any, mesh: Any) -> None:
    on = (device, torch.float64)
    for sizes in (SMALL, LARGE):
        ours, theirs = Ours(zero3, sizes, *on), Torchs(sharded, ADAMW, sizes, *on)
        got, want = (after_two_steps(run, *batch_of_rank(device)) for run in (ours, theirs))
        must_be_equal(got, want, f"stage 3, {sizes}")
    ours = Ours(partial(hybrid, groups, SGD), SMALL, *on)  # AdamW would hide a wrong factor
    theirs = Torchs(partial(sharded, mesh=mesh), SGD, SMALL, *on)
    must_be_equal(*(after_two_steps(run, *batch_of_rank(device)) for run in (ours, theirs)), "HSDP")
    for sizes in (SMALL, MIDDLE):
        save, torchs = full_states(device, sizes)
        mine, (weights, states) = save(), torchs()
        must_be_equal(mine["weights"], {key: value.cpu() for key, value in weights.items()}, f"weights, {sizes}")
        for kind in ("exp_avg", "exp_avg_sq"):
            want = {key: state[kind].cpu() for key, state in states["state"].items()}
            must_be_equal({key: state[kind] for key, state in mine["optimizer"].items()}, want, f"{kind}, {sizes}")
    gc.collect()


def steps_of(device: torch.device, ours: Ours, theirs: Torchs) -> list[Any]:
    """Ratios of seconds and of peaks, torch's peak, and the bytes sent by both."""
    batch = batch_of_rank(device)
    (peak, sent), (torchs_peak, sent_by_torch) = (one_step(run, *batch, device) for run in (ours, theirs))
    ratio = paired(partial(ours.step, *batch), partial(theirs.step, *batch), repeats=9, setup=dist.barrier)
    gc.collect()
    return [ratio, peak / torchs_peak, torchs_peak, sent, sent_by_torch]


def benchmark(device: torch.device) -> None:
    groups = make_groups(SHARDS)
    mesh = init_device_mesh(device.type, (RANKS // SHARDS, SHARDS), mesh_dim_names=("copies", "shards"))
    verify(device, groups, mesh)
    stage3, state = [], []
    for name, sizes in {"0.9M": SMALL, "6.4M": LARGE}.items():
        *cells, sent, by_torch = steps_of(device, Ours(zero3, sizes, device), Torchs(sharded, ADAMW, sizes, device))
        stage3.append([name, *cells, sent.total / by_torch.total])
    ours = Ours(partial(hybrid, groups, ADAMW), SMALL, device)
    theirs = Torchs(partial(sharded, mesh=mesh), ADAMW, SMALL, device)
    ratio, peaks, _, *both = steps_of(device, ours, theirs)
    inside = [wire.sent["all_gather"] + wire.sent["reduce_scatter"] for wire in both]
    across = [wire.sent["all_reduce"] for wire in both]
    hsdp = ["0.9M", ratio, peaks, inside[0] / inside[1], across[0] / across[1], round(across[0])]
    for name, sizes in {"0.9M": SMALL, "3.3M": MIDDLE}.items():
        save, torchs = full_states(device, sizes)
        with communication() as sent:
            save()
        with communication() as by_torch:
            torchs()
        ratio = paired(save, torchs, repeats=9, setup=dist.barrier)
        calls = [sent.calls["all_gather"], by_torch.calls["all_gather"]]
        state.append([name, ratio, *calls, sent.total / by_torch.total])
    if dist.get_rank() == 0:
        write(stage3, hsdp, state)


def write(stage3: list, hsdp: list, state: list) -> None:
    write_result(
        "03_zero3",
        f"Stage 3 against torch's FSDP2, {RANKS} ranks",
        [
            "parameters",
            "seconds of a step / FSDP2's (quartiles)",
            "peak bytes in a step / FSDP2's",
            "FSDP2's peak",
            "bytes sent / FSDP2's",
        ],
        stage3,
        "fp32, AdamW, each layer a unit, 2 x 64 tokens a rank. The weights after two steps in float64 were compared "
        "first. The peak is what a step needs beyond the shards that stay, on the rank with the largest. Bytes sent "
        "are payloads times the formula of a ring.",
    )
    write_result(
        "03_zero_hybrid",
        f"HSDP, {SHARDS} shards x {RANKS // SHARDS} copies, against torch's FSDP2 on the same mesh",
        [
            "parameters",
            "seconds of a step / torch's (quartiles)",
            "peak bytes in a step / torch's",
            "sent in the machine / torch's",
            "sent across / torch's",
            "sent across, bytes",
        ],
        [hsdp],
        "fp32, AdamW, each layer a unit, 2 x 64 tokens a rank. The weights after two steps of SGD in float64 were "
        "compared first. The peak is what a step needs beyond what stays. Bytes are payloads times formulas.",
    )
    write_result(
        "03_zero_state",
        f"Gathering weights and optimizer states of a stage 3 run, against torch's for FSDP2, {RANKS} ranks",
        ["parameters", "seconds / torch's (quartiles)", "all-gathers", "torch's all-gathers", "bytes sent / torch's"],
        state,
        "float64. We gather a bucket at a time, torch each parameter by itself. Both states were compared first.",
    )


if __name__ == "__main__":
    launch(benchmark)
