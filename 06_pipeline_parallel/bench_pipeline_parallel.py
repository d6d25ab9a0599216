"""The ground floor's three orders: against torch and the depth in one run, by a clock, and by what each rank holds.

    python 06_pipeline_parallel/bench_pipeline_parallel.py                4 processes on a CPU (gloo); under a minute
    python 06_pipeline_parallel/bench_pipeline_parallel.py --figures      draw again, from the results

First every gradient is compared with that of one process, of torch.distributed.pipelining and of the depth's executor;
only then is anything timed. Four processes on few cores cannot show what a pipeline gains, for their work shares the
cores. So the bubble is measured with stages that sleep until an F has taken 40 ms and a BW 80, and everything else
(order, messages, waits) is as it is; the timelines are what these runs recorded.
"""

import argparse
import gc
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(1, str(Path(__file__).resolve().parent / "in_depth"))

import pipeline_parallel as pipe
import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
import torch.multiprocessing as mp
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import held_bytes, peak_memory
from harness.oracle import error_between
from harness.report import paired, write_result
from pipeline_executor import Pipeline
from pipeline_parallel import ORDERS, Stage, batch_of, cut, whole_model
from schedules import build
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

RANKS, LAYERS, M = 4, 8, 8
UNIT = 0.040  # seconds of an F; a BW takes twice as long
TORCHS = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B}
FOLDER = "06_pipeline_parallel/figures"


def stage_of(dtype: torch.dtype = torch.float32) -> Stage:
    return Stage(cut(whole_model(LAYERS), dist.get_rank(), RANKS).to(dtype), dist.group.WORLD)


# ----------------------------------------------------------------------------------- three ways to run the same step


def steps_of(order: str) -> dict:
    """name -> (layers of this rank, a step without arguments), all with the same weights and the same batch."""
    group, rank, (tokens, labels) = dist.group.WORLD, dist.get_rank(), batch_of(0, M)
    valid = (labels != pipe.IGNORE).sum().item()

    def loss_of(logits, labels):
        return pipe.loss_sum(logits, labels) / valid

    stage = stage_of()
    ways = {"ours": (stage.layers, partial(stage.step, ORDERS[order], M, tokens, labels))}
    other = stage_of().layers
    example = torch.empty(2, pipe.T, pipe.H)
    runner = Pipeline(build(order, RANKS, M, 1), {(0, rank): other}, group, loss=loss_of, example=example)
    ways["depth"] = other, partial(runner.step, tokens.chunk(M), labels.chunk(M), broadcast=True)
    if order in TORCHS:
        theirs = stage_of().layers
        theirs_stage = pipelining.PipelineStage(theirs, rank, RANKS, torch.device("cpu"), group=group)
        schedule = TORCHS[order](theirs_stage, M, loss_fn=loss_of, scale_grads=False)
        given = (tokens,) if rank == 0 else ()
        ways["torch"] = theirs, partial(schedule.step, *given, target=labels if rank == RANKS - 1 else None)

    def from_zero(layers, step):
        layers.zero_grad()
        return step()

    return {name: (layers, partial(from_zero, layers, step)) for name, (layers, step) in ways.items()}


def compare(order: str) -> list:
    """Gradients of each way against one process; then seconds of ours over theirs, in pairs."""
    alone, (tokens, labels) = whole_model(LAYERS), batch_of(0, M)
    (pipe.loss_sum(alone(tokens), labels) / (labels != pipe.IGNORE).sum()).backward()
    right, wrong = dict(alone.named_parameters()), ""
    ways = steps_of(order)
    for name, (layers, step) in ways.items():
        step()
        for key, w in layers.named_parameters():
            error = error_between(w.grad, right[key].grad)
            if not error <= 1e-4:
                wrong = f"{order}, {name}, rank {dist.get_rank()}: the gradient of {key} is off by {error:.1e}"
    found = [None] * RANKS
    dist.all_gather_object(found, wrong)
    if any(found):
        raise SystemExit("; ".join(filter(None, found)))
    ratios = {
        name: paired(ways["ours"][1], ways[name][1], repeats=11, setup=dist.barrier)
        for name in ("torch", "depth")
        if name in ways
    }
    theirs = TORCHS[order].__name__ if order in TORCHS else "none"
    return [order, theirs, ratios.get("torch", "-"), ratios["depth"]]


# ------------------------------------------------------------------------------------------------ by a clock, by bytes


def timed(order: str, m: int) -> list[tuple[str, int, float, float]]:
    """(kind, micro-batch, begin, end) of what this rank did in a step whose F takes one UNIT and whose BW two."""
    stage, events = stage_of(torch.float64), []

    def as_long_as(units: int, kind: str, plain, j: int, given):
        begin = time.perf_counter()
        result = plain(j, given)
        time.sleep(max(0.0, begin + units * UNIT - time.perf_counter()))
        events.append((kind, j, begin, time.perf_counter()))
        return result

    stage.forward = partial(as_long_as, 1, "F", stage.forward)
    stage.backward = partial(as_long_as, 2, "BW", stage.backward)
    dist.barrier()
    stage.step(ORDERS[order], m, *batch_of(0, m))
    return events


def on_all_ranks(value) -> list:
    found = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def bytes_of(stage: Stage | None, step) -> tuple[int, int, int]:
    """Weights, gradients, and the most bytes that a step holds besides: activations, logits, messages."""
    layers = stage.layers if stage else step.args[0]
    step()
    peak = []
    for _ in range(3):  # gloo may let go of a buffer late
        with peak_memory() as memory:
            step()
        peak.append(memory.peak)
    held = held_bytes(layers)
    return held.parameters, held.gradients, min(peak)


def accumulate(layers, tokens, labels) -> None:
    """One process, one micro-batch after the other."""
    valid = (labels != pipe.IGNORE).sum()
    for x, y in zip(tokens.chunk(M), labels.chunk(M), strict=True):
        (pipe.loss_sum(layers(x), y) / valid).backward()


def measure() -> tuple[list, list, list]:
    rank, orders, timeline, held = dist.get_rank(), [], [], []
    if rank == 0:
        alone = partial(accumulate, whole_model(LAYERS).double(), *batch_of(0, M))
        held.append(["one process", 0, *bytes_of(None, alone), 1])
    for name, order in ORDERS.items():
        stage = stage_of(torch.float64)
        bytes_ = bytes_of(stage, partial(stage.step, order, M, *batch_of(0, M)))
        everyone = on_all_ranks((bytes_, stage.peak, stage.events))
        held += [[name, r, *row, kept] for r, (row, kept, _) in enumerate(everyone)]
        counted = max(end for row in pipe.timetable([e for *_, e in everyone]) for *_, end in row) / (3 * M) - 1
        formula = (RANKS - 1) / (1 if name == "naive" else M)
        clock = []
        for _ in range(3):
            runs = on_all_ranks(timed(name, M))
            span = max(e for run in runs for *_, e in run) - min(b for run in runs for _, _, b, _ in run)
            clock.append(span / (3 * M * UNIT) - 1)
        measured = min(clock)  # whatever else runs on the machine only adds to it
        if not (abs(counted - formula) <= 1e-9 and abs(measured - formula) <= 0.1 * (1 + formula)):
            raise SystemExit(
                f"{name}: bubble {measured:.3f} by the clock, {counted:.3f} counted, {formula:.3f} by formula"
            )
        kept, limit = [k for _, k, _ in everyone], {"naive": [1] * 4, "afab": [M] * 4, "1f1b": [4, 3, 2, 1]}[name]
        if kept != limit:
            raise SystemExit(f"{name}: ranks keep {kept} micro-batches, not {limit}")
        orders.append(
            [
                name,
                f"{formula:.3f}",
                f"{counted:.3f}",
                f"{measured:.3f}",
                ", ".join(map(str, limit)),
                ", ".join(map(str, kept)),
            ]
        )
        runs = on_all_ranks(timed(name, 6))
        start = min(b for run in runs for _, _, b, _ in run)
        timeline += [
            [name, r, kind, j, round((b - start) / UNIT, 2), round((e - start) / UNIT, 2)]
            for r, run in enumerate(runs)
            for kind, j, b, e in run
        ]
    return orders, timeline, held


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store, limit = dist.FileStore(f"{folder}/store", RANKS), timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    small = pipe.T, pipe.H
    pipe.T, pipe.H = 64, 128
    ratios = [compare(order) for order in ORDERS]
    pipe.T, pipe.H = small
    orders, timeline, held = measure()
    if rank == 0:
        write_result(
            "06_ground",
            f"Step time of the ground floor, {RANKS} ranks, {M} micro-batches",
            ["order", "torch's class", "seconds / torch's", "seconds / those of in_depth/pipeline_executor.py"],
            ratios,
            "zero_grad, forward and backward of all micro-batches; hidden 128, 64 tokens, 2 sequences, 8 layers. "
            "Medians of pairs, and quartiles, on rank 0. Every gradient was compared with one process first. Ours also "
            "sends the loss to all ranks.",
        )
        write_result(
            "06_ground_orders",
            f"Idle time / time of the work, and micro-batches kept, {RANKS} ranks, {M} micro-batches",
            [
                "order",
                "idle, formula",
                "in the recorded order",
                "by the clock",
                "kept by ranks 0 to 3, formula",
                "counted",
            ],
            orders,
            "By the clock: stages that sleep until an F has taken 40 ms and a BW 80; the shortest of three steps.",
        )
        write_result(
            "06_ground_timeline",
            "What each rank did when, 6 micro-batches, in units of one F, by the clock",
            ["order", "rank", "kind", "micro-batch", "start", "end"],
            timeline,
            "Stages that sleep until an F has taken 40 ms and a BW 80.",
        )
        write_result(
            "06_ground_held",
            f"Bytes held, {RANKS} ranks, {M} micro-batches, {LAYERS} layers, float64",
            ["order", "rank", "weights", "gradients", "at most besides", "micro-batches kept"],
            held,
            "Besides: the most that a step allocates at one time, that is activations, logits and messages. "
            "One process runs one micro-batch after the other.",
        )
        figures()
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- figures


def draw_timelines(axes, result) -> None:
    for axis, order in zip(axes, ORDERS, strict=True):
        rows = [row[1:] for row in result["rows"] if row[0] == order]
        last = max(end for *_, end in rows)
        for r in range(RANKS):
            axis.barh(r, last, 0.8, color=COLOURS["idle"], alpha=0.2, linewidth=0)
        at = {}
        for r, kind, j, start, end in rows:
            colour = COLOURS["compute" if kind == "F" else "gradients"]
            axis.barh(r, end - start, 0.8, left=start, color=colour, edgecolor="white", linewidth=0.6)
            axis.text((start + end) / 2, r, str(j), ha="center", va="center", color="black", fontsize=7)
            at[r, kind, j] = start, end
        for r in range(RANKS - 1):  # the messages of the first and the last micro-batch
            for j in (0, 5):
                down = [at[r, "F", j][1], at[r + 1, "F", j][0]]
                up = [at[r + 1, "BW", j][1], at[r, "BW", j][0]]
                axis.plot(down, [r + 0.3, r + 0.7], color=COLOURS["messages"], linewidth=1.6)
                axis.plot(up, [r + 0.7, r + 0.3], color=COLOURS["messages"], linewidth=1.6)
        axis.set(yticks=range(RANKS), yticklabels=[f"rank {r}" for r in range(RANKS)], xlim=(0, last))
        axis.set_title(order, loc="left")
        axis.invert_yaxis()
        axis.grid(False)
    axes[-1].set_xlabel("time, in units of one forward")
    names = {"F, forward": "compute", "BW, backward": "gradients", "message": "messages", "idle": "idle"}
    handles = [axes[0].plot([], [], color=COLOURS[key], linewidth=5, label=name)[0] for name, key in names.items()]
    axes[0].legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=4, fontsize=8, frameon=False)


def draw_held(axes, result) -> None:
    for axis, order in zip(axes, ["one process", *ORDERS], strict=True):
        rows = [row[1:] for row in result["rows"] if row[0] == order]
        for r, weights, gradients, besides, kept in rows:
            bottom = 0
            parts = {"weights": weights, "gradients": gradients, "activations": besides}
            for kind, size in parts.items():
                axis.bar(r, size / 2**20, 0.7, bottom=bottom, color=COLOURS[kind], label=kind if r == 0 else None)
                bottom += size / 2**20
            axis.text(r, bottom, f"{kept}", ha="center", va="bottom", color=GREY, fontsize=9)
        axis.set(title=order, xticks=range(len(rows)), xlim=(-0.6, len(rows) - 0.4))
        axis.set_xlabel("rank" if len(rows) > 1 else "")
        axis.margins(y=0.12)
        axis.grid(False, axis="x")
    top = max(sum(row[2:5]) for row in result["rows"]) / 2**20
    for axis in axes:
        axis.set_ylim(0, 1.12 * top)
    axes[0].set(ylabel="MiB", xticks=[])
    axes[1].legend(fontsize=8)


def figures() -> None:
    write_figure(f"{FOLDER}/orders.svg", ["06_ground_timeline"], draw_timelines, shape=(3, 1), size=(9, 5.6))
    write_figure(f"{FOLDER}/holds.svg", ["06_ground_held"], draw_held, shape=(1, 4), size=(9, 3.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="only draw again")
    if parser.parse_args().figures:
        figures()
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(folder,), nprocs=RANKS)


if __name__ == "__main__":
    main()
