"""Gathering the full state at stage 3, against torch's full state dict of an FSDP2 model: 4 ranks, one run.

    python 03_zero/in_depth/bench_zero_state.py        4 processes on CPU (gloo), or 4 GPUs (nccl)

First both states are compared, weights and both moments; only then is anything measured.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, launch, must_be_equal
from _zero_demo import make_batch
from bench_zero3 import Ours, Torchs
from harness.meter import communication
from harness.report import paired, write_result
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from zero_state import full_state_dict

MODELS = {"0.9M": {"hidden": 128, "layers": 4}, "3.3M": {"hidden": 256, "layers": 4}}


def benchmark(device: torch.device) -> None:
    rows = []
    tokens = make_batch(0, RANKS, 1, rows=2, length=64)[dist.get_rank()][0][0].to(device)
    options = StateDictOptions(full_state_dict=True)
    for name, sizes in MODELS.items():
        ours, theirs = Ours(sizes, device, torch.float64), Torchs(sizes, device, torch.float64)
        for one in (ours, theirs):
            one.step(tokens, tokens.roll(-1, 1))
        save = partial(full_state_dict, ours.zero)
        torchs = partial(get_state_dict, theirs.model, theirs.optimizer, options=options)
        with communication() as sent:
            mine = save()
        with communication() as sent_by_torch:
            weights, states = torchs()
        must_be_equal(mine["weights"], {key: value.cpu() for key, value in weights.items()}, f"weights, {name}")
        for kind in ("exp_avg", "exp_avg_sq"):
            want = {key: state[kind].cpu() for key, state in states["state"].items()}
            must_be_equal({key: state[kind] for key, state in mine["optimizer"].items()}, want, f"{kind}, {name}")
        ratio = paired(save, torchs, repeats=9, setup=dist.barrier)
        calls = [sent.calls["all_gather"], sent_by_torch.calls["all_gather"]]
        rows.append([name, ratio, *calls, sent.total / sent_by_torch.total])
    if dist.get_rank() == 0:
        write_result(
            "03_zero_state",
            f"Gathering weights and optimizer states of a stage 3 run, against torch's for FSDP2, {RANKS} ranks",
            [
                "parameters",
                "seconds / torch's (quartiles)",
                "all-gathers",
                "torch's all-gathers",
                "bytes sent / torch's",
            ],
            rows,
            "float64. We gather a bucket at a time, torch each parameter by itself. Both states were compared first.",
        )


if __name__ == "__main__":
    launch(benchmark)
