"""Training runs for the benchmarks of this chapter: the same model, text and steps, in every policy and recipe."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
from _precision_demo import Decoder, OneLineParser, batch, loss_sum, stdlib_bytes
from fp8 import Fp8Linear
from harness.report import environment
from microscaling import MICRO, MicroLinear
from precision_policies import POLICIES, MixedAdamW, linear, make_scaler

# The runs represent this many data-parallel ranks with the same batch: each divides its loss by the number of
# tokens of all ranks, and the gradients of all are summed. That makes gradients as small as in a large run.
REPLICAS = 1024
STEPS, LR = 300, 2e-3


def gpu_options(*more: str) -> argparse.Namespace:
    """--gpu, --dry and --out of a benchmark, and those of `more` (--seconds, --figures)."""
    parser = OneLineParser(allow_abbrev=False)
    parser.add_argument("--gpu", action="store_true", help="verify and time on a GPU")
    parser.add_argument("--dry", action="store_true", help="with --gpu: tiny sizes on the CPU")
    parser.add_argument("--out", type=Path, help="folder for the results instead of results/")
    if "--seconds" in more:
        parser.add_argument("--seconds", type=float, help="about how long --gpu may take; default 400")
    if "--figures" in more:
        parser.add_argument("--figures", action="store_true", help="only draw the figures again")
    args = parser.parse_args()
    seconds = getattr(args, "seconds", None)
    figures = getattr(args, "figures", False)
    if args.dry and not (args.gpu and args.out):
        parser.error("--dry is for --gpu, and needs --out: its numbers must not be among the results")
    if args.out and not args.gpu:
        parser.error(f"--out {args.out} is for --gpu; leave it out")
    if seconds is not None and not (args.gpu and math.isfinite(seconds) and seconds > 0):
        parser.error(f"--seconds {seconds:g} is for --gpu, and a time to measure in, 60 or so")
    if args.gpu and figures:
        parser.error("--figures has nothing to draw of --gpu; leave one of them out")
    if args.gpu and not args.dry and not torch.cuda.is_available():
        parser.error("--gpu needs a CUDA GPU, and none is here; add --dry --out DIR to try it here")
    return args


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth of the steps, then half a cosine to a tenth of the peak."""
    warm = max(1, steps // 10)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def start(name: str) -> tuple[Decoder, MixedAdamW, Any, Callable[[], None]]:
    """Model, optimizer, scaler, and a call after each step. Names: POLICIES, "fp8-" + a recipe, MICRO."""
    group = dist.group.WORLD
    if name.startswith("fp8-") or name in MICRO:
        fp8 = MicroLinear(name) if name in MICRO else Fp8Linear(name.removeprefix("fp8-"))
        model = Decoder(fp8)
        optimizer = MixedAdamW(model.named_parameters(), POLICIES["bf16"], LR)
        return model, optimizer, make_scaler(POLICIES["bf16"], group), fp8.end_step
    policy = "fp32" if name == "fp32, nudged" else name
    model = Decoder(linear, head=linear)
    if name == "fp32, nudged":  # how far do runs diverge that differ in the last bit of a weight?
        for p in model.parameters():
            p.data *= 1 + 2**-22
    optimizer = MixedAdamW(model.named_parameters(), POLICIES[policy], LR)
    return model, optimizer, make_scaler(POLICIES[policy], group), lambda: None


@torch.no_grad()
def held_out(model: Decoder, data: torch.Tensor) -> float:
    """Mean loss of 8 batches that are not trained on."""
    total = sum(loss_sum(model, *batch(data, -1 - i, rows=16)).item() for i in range(8))
    return total / (8 * 16 * 64)


def curve(name: str, steps: int = STEPS, lr: float = LR, seed: int = 0) -> dict[str, Any]:
    """Train; losses of all steps, the held-out loss at the end, an error, if any. `seed`: of the batches."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer, scaler, end_step = start(name)
    data = stdlib_bytes()
    seen: dict[str, Any] = {"name": name, "losses": [], "lost": [], "died": "", "scale": []}
    for step in range(steps):
        optimizer.lr = learning_rate(step, steps, lr)
        tokens, labels = batch(data, 10_000 * seed + step)
        try:
            loss = loss_sum(model, tokens, labels) / labels.numel()
            scaler.scale(loss / REPLICAS).backward()
            optimizer.accumulate()
            for g in optimizer.gradients():
                g.mul_(REPLICAS)
            optimizer.step(scaler)
            end_step()
        except FloatingPointError as died:
            seen["died"] = f"step {step}: {died}"
            break
        seen["losses"].append(loss.item())
        seen["lost"].append(optimizer.lost)
        seen["scale"].append(scaler.value)
        if not math.isfinite(loss.item()):
            seen["died"] = f"step {step}: the loss is {loss.item()}"
            break
    seen["held_out"] = math.nan if seen["died"] else held_out(model, data)
    seen["skipped"] = scaler.skipped
    return seen


def curves(jobs: list[tuple], keep: Path | None = None) -> list[dict[str, Any]]:
    """`curve(*job)` for all jobs, a process per core. With a folder `keep`, finished runs are reused by the
    next call of the same commit, so that long work can be done in several calls."""
    os.environ["OMP_NUM_THREADS"] = "1"
    places: list[Path | None] = [None] * len(jobs)
    if keep:
        commit = environment()["commit"]
        if commit.endswith("-dirty"):
            sys.exit("--keep: the tree has changes that are not committed, and a run could not be told from another's")
        keep.mkdir(parents=True, exist_ok=True)
        places = [keep / f"{commit} {' '.join(map(str, job))}.json" for job in jobs]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        return list(pool.map(_run, jobs, places))


def _run(job: tuple, place: Path | None) -> dict[str, Any]:
    if place and place.exists():
        return json.loads(place.read_text())
    run = curve(*job)
    if place:
        half = place.with_suffix(".part")
        half.write_text(json.dumps(run))
        half.rename(place)  # complete, or not there
    return run
