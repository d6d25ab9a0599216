"""The core file's three schedules: against torch and in_depth, by a clock, and by what each rank stores.

    python 06_pipeline_parallel/bench_pipeline_parallel.py                4 processes on a CPU (Gloo); under a minute
    python 06_pipeline_parallel/bench_pipeline_parallel.py --figures      draw again, from the results

First every gradient, of ours, of torch.distributed.pipelining and of the executor of in_depth, is compared with
one process before it is timed. Four processes on few cores cannot show what a pipeline gains, because their computation
shares the cores. So the bubble is measured with stages that sleep until an F has taken 40 ms and a BW 80. Schedule,
messages and waits are those of the core file; the timelines are what these runs recorded.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(1, str(Path(__file__).resolve().parent / "in_depth"))

import pipeline_parallel as pipe
import torch
import torch.distributed as dist
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import held_bytes, peak_memory
from harness.reference import error_between
from harness.report import paired, write_result
from harness.spawn import launch
from pipeline_executor import Pipeline
from pipeline_parallel import IGNORE_INDEX, SCHEDULES, RecordingStage, build_model, build_stage, get_batch
from schedules import build
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

RANKS, LAYERS, M = 4, 8, 8
UNIT = 0.040  # seconds of an F; a BW takes twice as long
TORCHS = {"afab": ScheduleGPipe, "1f1b": Schedule1F1B}
FOLDER = "06_pipeline_parallel/figures"


def new_stage(dtype: torch.dtype = torch.float32) -> RecordingStage:
    return RecordingStage(build_stage(build_model(LAYERS), dist.get_rank(), RANKS).to(dtype), dist.group.WORLD)


def step_of(stage: RecordingStage, name: str, m: int):
    actions = SCHEDULES[name](stage.rank, RANKS, m)
    return partial(pipe.forward_backward, stage, actions, *get_batch(0, m))


# ----------------------------------------------------------------------------------- three ways to run the same step


def steps_of(name: str) -> dict:
    """key -> (layers of this rank, a step without arguments), all with the same parameters and the same batch."""
    group, rank, (tokens, labels) = dist.group.WORLD, dist.get_rank(), get_batch(0, M)
    num_valid = (labels != IGNORE_INDEX).sum().item()

    def loss_of(logits, labels):
        return pipe.loss_sum(logits, labels) / num_valid

    stage = new_stage()
    ways = {"ours": (stage.layers, step_of(stage, name, M))}
    other = new_stage().layers
    example = torch.empty(pipe.BATCH, pipe.SEQ_LEN, pipe.HIDDEN)
    runner = Pipeline(build(name, RANKS, M, 1), {(0, rank): other}, group, loss=loss_of, example=example)
    ways["in depth"] = other, partial(runner.step, tokens.chunk(M), labels.chunk(M), broadcast=True)
    if name in TORCHS:
        theirs = new_stage().layers
        theirs_stage = pipelining.PipelineStage(theirs, rank, RANKS, torch.device("cpu"), group=group)
        schedule = TORCHS[name](theirs_stage, M, loss_fn=loss_of, scale_grads=False)
        given = (tokens,) if rank == 0 else ()
        ways["torch"] = theirs, partial(schedule.step, *given, target=labels if rank == RANKS - 1 else None)

    def from_zero(layers, step):
        layers.zero_grad()
        return step()

    return {key: (layers, partial(from_zero, layers, step)) for key, (layers, step) in ways.items()}


def compare(name: str) -> list:
    """Gradients of each way against one process; then seconds of ours over theirs, in pairs."""
    model, (tokens, labels) = build_model(LAYERS).float(), get_batch(0, M)
    pipe.reference_step(model, tokens, labels)
    expected, wrong = dict(model.named_parameters()), ""
    ways = steps_of(name)
    for key, (layers, step) in ways.items():
        step()
        for param, w in layers.named_parameters():
            error = error_between(w.grad, expected[param].grad)
            if not error <= 1e-4:
                wrong = f"{name}, {key}, rank {dist.get_rank()}: error {error:.1e} in the gradient of {param}"
    found = [None] * RANKS
    dist.all_gather_object(found, wrong)
    if any(found):
        raise SystemExit("; ".join(filter(None, found)))
    ratios = {
        key: paired(ways["ours"][1], ways[key][1], repeats=11, setup=dist.barrier)
        for key in ("torch", "in depth")
        if key in ways
    }
    theirs = TORCHS[name].__name__ if name in TORCHS else "none"
    return [name, theirs, ratios.get("torch", "-"), ratios["in depth"]]


# ------------------------------------------------------------------------------------------------ by a clock, by bytes


def timed(name: str, m: int) -> list[tuple[str, int, float, float]]:
    """(kind, micro-batch, start, end) of what this rank did in a step whose F takes one UNIT and whose BW two."""
    stage, events = new_stage(torch.float64), []

    def as_long_as(units: int, kind: str, plain, i: int, received):
        start = time.perf_counter()
        result = plain(i, received)
        time.sleep(max(0.0, start + units * UNIT - time.perf_counter()))
        events.append((kind, i, start, time.perf_counter()))
        return result

    stage.forward = partial(as_long_as, 1, "F", stage.forward)
    stage.backward = partial(as_long_as, 2, "BW", stage.backward)
    dist.barrier()
    step_of(stage, name, m)()
    return events


def on_all_ranks(value) -> list:
    found = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def bytes_of(layers, step) -> tuple[int, int, int]:
    """Parameters, gradients, and the most bytes that a step allocates besides: activations, logits, messages."""
    step()
    peak = []
    for _ in range(3):  # Gloo may free a buffer late
        with peak_memory() as memory:
            step()
        peak.append(memory.peak)
    held = held_bytes(layers)
    return held.parameters, held.gradients, min(peak)


def accumulate(layers, tokens, labels) -> None:
    """One process, one micro-batch after the other."""
    num_valid = (labels != IGNORE_INDEX).sum()
    for x, y in zip(tokens.chunk(M), labels.chunk(M), strict=True):
        (pipe.loss_sum(layers(x), y) / num_valid).backward()


def measure() -> tuple[list, list, list]:
    rank, schedules, timeline, stored = dist.get_rank(), [], [], []
    if rank == 0:
        model = build_model(LAYERS)
        stored.append(["one process", 0, *bytes_of(model, partial(accumulate, model, *get_batch(0, M))), 1])
    for name in SCHEDULES:
        stage = new_stage(torch.float64)
        bytes_ = bytes_of(stage.layers, step_of(stage, name, M))
        everyone = on_all_ranks((bytes_, stage.max_in_flight, stage.actions))
        stored += [[name, r, *row, in_flight] for r, (row, in_flight, _) in enumerate(everyone)]
        counted = (
            max(end for row in pipe.simulate([actions for *_, actions in everyone]) for *_, end in row) / (3 * M) - 1
        )
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
        in_flight, (_, limit, _) = [n for _, n, _ in everyone], pipe.expected_numbers(name, RANKS, M)
        if in_flight != limit:
            raise SystemExit(f"{name}: {in_flight} micro-batches in flight, not {limit}")
        schedules.append(
            [
                name,
                f"{formula:.3f}",
                f"{counted:.3f}",
                f"{measured:.3f}",
                ", ".join(map(str, limit)),
                ", ".join(map(str, in_flight)),
            ]
        )
        runs = on_all_ranks(timed(name, 6))
        start = min(b for run in runs for _, _, b, _ in run)
        timeline += [
            [name, r, kind, i, round((b - start) / UNIT, 2), round((e - start) / UNIT, 2)]
            for r, run in enumerate(runs)
            for kind, i, b, e in run
        ]
    return schedules, timeline, stored


def worker(device: torch.device) -> None:
    small = pipe.SEQ_LEN, pipe.HIDDEN
    pipe.SEQ_LEN, pipe.HIDDEN = 64, 128
    ratios = [compare(name) for name in SCHEDULES]
    pipe.SEQ_LEN, pipe.HIDDEN = small
    schedules, timeline, stored = measure()
    if dist.get_rank() == 0:
        write_result(
            "06_ground",
            f"Step time of the core file, {RANKS} ranks, {M} micro-batches",
            ["schedule", "torch's class", "seconds / torch's", "seconds / in_depth/pipeline_executor.py"],
            ratios,
            "zero_grad, forward and backward of all micro-batches; hidden 128, 64 tokens, 2 sequences, 8 layers. "
            "Medians of pairs, and quartiles, on rank 0. Every gradient was compared with one process first. Ours also "
            "sends the loss to all ranks.",
        )
        write_result(
            "06_ground_orders",
            f"Idle time / compute time, and micro-batches in flight, {RANKS} ranks, {M} micro-batches",
            [
                "schedule",
                "idle, formula",
                "recorded schedule, simulated",
                "by the clock",
                "in flight on ranks 0 to 3, formula",
                "counted",
            ],
            schedules,
            "By the clock: stages that sleep until an F has taken 40 ms and a BW 80; the shortest of three steps.",
        )
        write_result(
            "06_ground_timeline",
            "What each rank did when, 6 micro-batches, in units of one F, by the clock",
            ["schedule", "rank", "kind", "micro-batch", "start", "end"],
            timeline,
            "Stages that sleep until an F has taken 40 ms and a BW 80.",
        )
        write_result(
            "06_ground_held",
            f"Bytes stored, {RANKS} ranks, {M} micro-batches, {LAYERS} layers, float64",
            ["schedule", "rank", "parameters", "gradients", "at most besides", "micro-batches in flight"],
            stored,
            "Besides: the most that a step allocates at one time, that is activations, logits and messages. "
            "One process runs one micro-batch after the other.",
        )
        figures()


# ------------------------------------------------------------------------------------------------------------- figures


def draw_schedules(axes, result) -> None:
    """One time axis for all. Naive goes on to the right of it."""
    width = max(end for name, *_, end in result["rows"] if name != "naive")
    for axis, name in zip(axes, SCHEDULES, strict=True):
        rows = [row[1:] for row in result["rows"] if row[0] == name]
        last, m = max(end for *_, end in rows), 1 + max(i for _, _, i, *_ in rows)
        at = {}
        for r in range(RANKS):
            axis.barh(r, min(last, width), 0.8, color=COLOURS["idle"], alpha=0.2, linewidth=0)
        for r, kind, i, start, end in rows:
            at[r, kind, i] = start, end
            if end <= width:
                colour = COLOURS["compute" if kind == "F" else "gradients"]
                axis.barh(r, end - start, 0.8, left=start, color=colour, edgecolor="white", linewidth=0.6)
                axis.text((start + end) / 2, r, f"{kind}{i}", ha="center", va="center", color="black", fontsize=9)
        for r in range(RANKS - 1):  # the messages of micro-batch 0
            forth = [at[r, "F", 0][1], at[r + 1, "F", 0][0]]
            back = [at[r + 1, "BW", 0][1], at[r, "BW", 0][0]]
            axis.plot(forth, [r + 0.3, r + 0.7], color=COLOURS["messages"], linewidth=2.5)
            axis.plot(back, [r + 0.7, r + 0.3], color=COLOURS["messages"], linewidth=2.5)
        axis.set(yticks=range(RANKS), yticklabels=[f"rank {r}" for r in range(RANKS)], xlim=(0, width))
        more = f"; the step ends at {last:.0f}" if last > width else ""
        formula = pipe.expected_numbers(name, RANKS, m)[0]
        idle = f"{last / (3 * m) - 1:.2f}, by formula {formula:.2f}"
        axis.set_title(f"{name}: idle time / compute time = {idle}{more}", loc="left", fontsize=11)
        axis.invert_yaxis()
        axis.grid(False)
    axes[-1].set_xlabel("time, in units of one forward pass")
    names = {"F, forward": "compute", "BW, backward": "gradients", "message": "messages", "idle": "idle"}
    handles = [axes[0].plot([], [], color=COLOURS[key], linewidth=5, label=name)[0] for name, key in names.items()]
    handles[-1].set_alpha(0.2)  # as it is drawn
    axes[0].figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=10, frameon=False)


def draw_stored(axes, result) -> None:
    for axis, name in zip(axes, ["one process", *SCHEDULES], strict=True):
        rows = [row[1:] for row in result["rows"] if row[0] == name]
        for r, params, gradients, besides, in_flight in rows:
            bottom = 0
            for kind, size in {"weights": params, "gradients": gradients, "activations": besides}.items():
                label = "parameters" if kind == "weights" else kind
                axis.bar(r, size / 2**20, 0.7, bottom=bottom, color=COLOURS[kind], label=label if r == 0 else None)
                bottom += size / 2**20
            axis.text(r, bottom, f"{in_flight}", ha="center", va="bottom", color=GREY, fontsize=10)
        axis.set(title=name, xticks=range(len(rows)), xlim=(-0.6, len(rows) - 0.4))
        axis.set_xlabel("rank" if len(rows) > 1 else "")
        axis.grid(False, axis="x")
    top = max(sum(row[2:5]) for row in result["rows"]) / 2**20
    for axis in axes:
        axis.set_ylim(0, 1.12 * top)
    axes[0].set(ylabel="MiB", xticks=[])
    axes[1].legend(fontsize=10)


def figures() -> None:
    write_figure(f"{FOLDER}/schedules.svg", ["06_ground_timeline"], draw_schedules, shape=(3, 1), size=(10, 6))
    write_figure(f"{FOLDER}/who_stores_what.svg", ["06_ground_held"], draw_stored, shape=(1, 4), size=(10, 3.4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="only draw again")
    if parser.parse_args().figures:
        figures()
        return
    launch(worker, RANKS, gpus=False)


if __name__ == "__main__":
    main()
