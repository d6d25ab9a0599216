# ruff: noqa: E501 -- the page below is HTML and JavaScript
"""The planner as one HTML file: for one model on one cluster, a choice for every axis, and what each choice costs.

Problem. A table of the ten best says little about the neighbours of the best. One wants to change one axis.

Idea. The page computes nothing. Every layout that it can show was evaluated in Python when the page was
written: bytes by `rough_held` and the search's formulas, seconds by `step_time`. They are one table in the
page, a row for each combination of the axes, and the page looks a row up. So it cannot disagree with the
planner, and covers the same cases: experts, context parallelism, any config.json, any cluster file.

    python 11_5d_trainer/planner/plan.py --model mixtral-8x7b --nodes 4 --html plan.html

The page needs no server and no network. Opened with #pick=[...] it shows its values for these rows, which
test_plan_page.py reads in a real browser.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import planner_paths  # noqa: F401  finds the trainer and the chapters
from plan_memory import Layout, schedule_of
from plan_search import GB, RECOMPUTE, Task, divisors, in_flight, powers, refused, room, stays
from plan_time import rough_held, step_time
from schedule_simulator import F, Times, simulate

AXES = ("tp", "cp", "pp", "ep", "zero", "micro-batch", "recompute")
BYTES = ("weights", "gradients", "optimizer states", "unsharded for a while", "activations", "working set")
DRAWN = 16  # micro-batches of the drawn pipeline, at most


def choices(task: Task) -> dict[str, list[Any]]:
    """The choices of each axis. Other axes (Ulysses, other schedules) are only in the search."""
    pp = [p for p in divisors(task.gpus) if p <= min(task.model.layers, 16)]
    ep = powers(task.moe.experts, 64) if task.moe else [1]
    every = (powers(task.gpus, 16), powers(task.gpus, 16), pp, ep, [0, 1, 2, 3], [1, 2, 4, 8], list(RECOMPUTE))
    return dict(zip(AXES, every, strict=True))


def layout_of(
    task: Task, tp: int, cp: int, pp: int, ep: int, zero: int, micro_batch: int, recompute: str
) -> Layout | str:
    """The layout of a choice, or why there is none."""
    if task.gpus % (tp * cp * pp):
        return "tp x cp x pp does not divide the GPUs"
    shape = replace(task.base, dp=task.gpus // tp // cp // pp, tp=tp, sequence_parallel=tp > 1, ring=cp, pp=pp)
    shape = replace(shape, ep=ep, zero=zero, recompute=recompute)
    if reason := refused(task, shape):
        return reason
    if shape.dp * shape.cp % ep:
        return "ep does not divide the ranks that hold the same weights"
    if task.global_batch // shape.dp % micro_batch:
        return "the batch does not divide by the micro-batch"
    if zero == 3 and pp > 1:
        return "stage 3 does not go with a pipeline"
    if zero == 0 and task.precision == "bf16-master":
        return "bf16-master keeps its fp32 weights in ZeRO's shards"
    return replace(shape, micro_batch=micro_batch, micro_batches=task.global_batch // shape.dp // micro_batch)


def bytes_of(task: Task, layout: Layout) -> list[float]:
    """By BYTES, at the higher of the search's two moments: the loss on the last rank, a block's backward on the first."""
    held = rough_held(task.model, task.moe, layout)
    states = stays(task, layout)
    blocks, ends, loss, block = room(task, layout)
    flight = in_flight(layout.schedule, layout.pp, layout.micro_batches, layout.stages_per_rank)
    moments = [(states[0], blocks + ends, loss), (states[1], blocks * flight, block)]
    all_states, kept, work = max(moments, key=sum)
    return [*held.values(), all_states - sum(held.values()), kept, work]


def numbers(task: Task, layout: Layout) -> list[float]:
    """A row of the table: bytes, then seconds."""
    step = step_time(task.model, task.moe, layout, task.cluster, simulated=False)
    return [*bytes_of(task, layout), *step.parts.values(), step.mfu(layout, task.cluster)]


def drawing(pp: int, m: int) -> list[list[float]]:
    """[rank, 0 forward or 1 backward, begin, length] of 1F1B by chapter 06's simulator, over the length of the step."""
    schedule = schedule_of(Layout(pp=pp, micro_batches=m))
    run = simulate(schedule, Times(1.0, 1.0, 1.0))
    rows = []
    for rank, (actions, begins, ends) in enumerate(zip(schedule.actions, run.start, run.end, strict=True)):
        for action, begin, end in zip(actions, begins, ends, strict=True):
            rows.append(
                [rank, int(action.kind != F), round(begin / run.makespan, 4), round((end - begin) / run.makespan, 4)]
            )
    return rows


def table(task: Task) -> dict[str, Any]:
    """All data of the page. Values have four digits: enough for a bar, and a tenth of the bytes."""
    rows: dict[str, Any] = {}
    parts: list[str] = []
    for chosen in product(*choices(task).values()):
        layout = layout_of(task, *chosen)
        if isinstance(layout, str):
            rows[",".join(map(str, chosen))] = layout
            continue
        parts = parts or list(step_time(task.model, task.moe, layout, task.cluster, simulated=False).parts)
        rows[",".join(map(str, chosen))] = [float(f"{each:.4g}") for each in numbers(task, layout)] + [layout.options()]
    reasons = sorted({row for row in rows.values() if isinstance(row, str)})
    short = {key: reasons.index(row) if isinstance(row, str) else row for key, row in rows.items()}
    pipelines = {p: drawing(p, min(DRAWN, 2 * p)) for p in choices(task)["pp"]}
    return {
        "axes": choices(task), "rows": short, "reasons": reasons, "bytes": BYTES, "seconds": parts, "gb": GB, "room": task.memory,
        "gpus": task.gpus, "tokens": task.global_batch * task.seq_len, "drawings": pipelines,
    }  # fmt: skip


def page(task: Task, best: str = "", start: Layout | None = None) -> str:
    """`best`: the output of plan.py for this task. `start`: the layout that is shown first."""
    what = f"{task.name.replace('--model ', '').replace('--config ', '')} on {task.gpus} GPUs ({task.cluster.name}), {task.global_batch} x {task.seq_len} tokens"
    data = table(task)
    x = start or task.base
    zero = x.zero if start else 1
    first = dict(zip(AXES, (x.tp, x.cp, x.pp, x.ep, zero, x.micro_batch, x.recompute), strict=True))
    data["start"] = {
        axis: value if value in data["axes"][axis] else data["axes"][axis][0] for axis, value in first.items()
    }
    text = PAGE.replace("/*DATA*/", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
    for mark, words in (("<!--TASK-->", what), ("<!--BEST-->", best)):
        text = text.replace(mark, words.replace("&", "&amp;").replace("<", "&lt;"))
    return text


def write_page(path: Path, task: Task, best: str = "", start: Layout | None = None) -> tuple[list[str], dict[str, Any]]:
    path.write_text(page(task, best, start))
    return [f"wrote {path}; open it in a browser"], {"file": str(path)}


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>Which layout?</title>
<style>
:root { color-scheme: light dark } body { font: 15px/1.6 sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 1rem auto; padding: 0 1rem }
form { display: flex; flex-wrap: wrap; gap: .4rem 1rem } .bar { display: flex; height: 2rem; background: #8883; margin: .3rem 0; overflow: hidden }
.bar div { height: 100%; box-sizing: border-box; font-size: 11px; overflow: hidden; white-space: nowrap; color: #fff }
.over { outline: 3px solid #c0392b } svg { width: 100%; height: 10rem; background: #8881 } pre { overflow-x: auto; font-size: 12px }
.legend span { display: inline-block; margin-right: 1rem; font-size: 12px } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em }
h1 { font-size: 1.5rem } h2 { font-size: 1rem; margin: 1rem 0 .3rem } .held :is(h1, body) { margin-top: 0 } .held h1 { display: none }
select { font: inherit; padding: .15rem .3rem; border: 1px solid #8888; border-radius: .2rem; background: Canvas; color: CanvasText }
@media (prefers-color-scheme: dark) { body { background: #0b0c0f; color: #c4c4c6 } } #command { white-space: pre-wrap; overflow-wrap: anywhere }
</style>
<h1>Which layout?</h1>
<p id="task"><!--TASK--></p>
<p>Choose a value for each axis; what remains of the GPUs is data parallel. The first bar is the memory of the fullest GPU,
the second the time of one step. Every number was computed by plan.py when this page was written.</p>
<form id="form"></form>
<h2>Memory <output id="memory-total"></output></h2><div class="bar" id="memory"></div><div class="legend" id="memory-legend"></div>
<h2>Time <output id="time-total"></output></h2><div class="bar" id="time"></div><div class="legend" id="time-legend"></div>
<h2>Pipeline</h2><p id="stages"></p>
<svg id="pipeline" viewBox="0 0 1000 160" preserveAspectRatio="none" role="img" aria-label="the pipeline's forwards and backwards by rank"></svg>
<h2>Options of the trainer</h2><pre id="command"></pre>
<details><summary>What plan.py says: the ten fastest, and why the others lose</summary><pre><!--BEST--></pre></details>
<pre id="check"></pre>
<script>
const D = /*DATA*/, COLORS = ["#0072b2", "#d55e00", "#009e73", "#f0e442", "#cc79a7", "#8c8c8c", "#56b4e9", "#e69f00"];
const byId = id => document.getElementById(id);
function look(chosen) {  // the row of a choice, or why there is none
  const row = D.rows[Object.keys(D.axes).map(axis => chosen[axis]).join(",")];
  return typeof row === "number" ? { reason: D.reasons[row] }
    : { bytes: row.slice(0, D.bytes.length), seconds: row.slice(D.bytes.length, D.bytes.length + D.seconds.length), mfu: row[row.length - 2], options: row[row.length - 1] };
}
const sum = list => list.reduce((a, b) => a + b, 0);
function bars(id, names, sizes, scale, show) {
  byId(id).innerHTML = sizes.map((size, i) => `<div style="width:${100 * size / scale}%;background:${COLORS[i]}" title="${names[i]}: ${show(size)}"></div>`).join("");
  byId(id + "-legend").innerHTML = sizes.map((size, i) => size ? `<span><i style="background:${COLORS[i]}"></i>${names[i]} ${show(size)}</span>` : "").join("");
}
function show() {
  const chosen = Object.fromEntries(Object.keys(D.axes).map(axis => [axis, byId("in-" + axis).value])), row = look(chosen);
  const none = row.reason !== undefined, total = none ? 0 : sum(row.bytes), seconds = none ? 0 : sum(row.seconds), gb = size => (size / D.gb).toFixed(2) + " GB";
  byId("memory-total").value = none ? row.reason : `${gb(total)} of ${gb(D.room)} on each of ${D.gpus} GPUs: ${total > D.room ? "does not fit" : "fits"}`;
  byId("memory").className = total > D.room ? "bar over" : "bar";
  bars("memory", D.bytes, none ? [] : row.bytes, Math.max(total, D.room), gb);
  byId("time-total").value = none ? "" : `${seconds.toFixed(3)} s, ${Math.round(D.tokens / seconds).toLocaleString("en")} tokens/s, MFU ${(100 * row.mfu).toFixed(1)} %`;
  bars("time", D.seconds, none ? [] : row.seconds, seconds, s => (1e3 * s).toFixed(1) + " ms");
  byId("command").textContent = none ? "" : row.options;
  const high = 160 / chosen.pp;
  byId("pipeline").innerHTML = D.drawings[chosen.pp].map(([rank, back, begin, long]) =>
    `<rect x="${1000 * begin}" y="${rank * high}" width="${1000 * long}" height="${high - 1}" stroke="#fff" stroke-width=".5" fill="${back ? "#e69f00" : "#56b4e9"}"/>`).join("");
  const one = +chosen.pp === 1;
  byId("pipeline").style.display = one ? "none" : "";
  byId("stages").textContent = one ? "pp = 1: there is no pipeline, and so no bubble."
    : "1F1B, a row for each rank: forward in blue, backward in orange, and what is empty is the bubble.";
}
if (self !== top) document.documentElement.className = "held";  // in a page with a heading of its own
byId("form").innerHTML = Object.entries(D.axes).map(([axis, values]) => `<label>${axis} <select id="in-${axis}">` +
  values.map(v => `<option${v === D.start[axis] ? " selected" : ""}>${v}</option>`).join("") + "</select></label>").join("");
byId("form").addEventListener("input", show);
show();
if (location.hash.startsWith("#pick="))
  byId("check").textContent = JSON.stringify(JSON.parse(decodeURIComponent(location.hash.slice(6))).map(look));
</script></html>
"""
