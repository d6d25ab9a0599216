# ruff: noqa: E501 -- the page below is HTML and JavaScript
"""The planner as one HTML file: sliders for model, cluster and layout; bars for memory and time; the pipeline, drawn.

The page needs no server and no network. Its formulas are those of plan_memory.py and plan_time.py written once more, in
JavaScript, for layouts of data, tensor, sequence and pipeline parallelism with ZeRO; its constants (clusters, models, the
five fitted numbers) are put in by `page` from the Python side. That both say the same is tested in a real browser:
the page, opened with #check=[...], answers with its numbers for the given layouts (test_plan_page.py).

    python 11_5d_trainer/planner/plan.py --html plan.html
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import above  # noqa: F401  finds the trainer and the chapters
from llama import LLAMA3_405B
from model import EXPERTS, PRESETS
from plan_memory import Layout, widths
from plan_search import GB, RESERVED, Task, rough_peak
from plan_time import CLUSTERS, read_cluster, rough_states, step_time

MODELS = {name: sizes for name, sizes in (PRESETS | {"llama3-405b": LLAMA3_405B}).items() if name not in EXPERTS}


def page_numbers(model: str, cluster: str, layout: Layout) -> dict[str, Any]:
    """What the page shall say about a layout: bytes of states and at the peak, seconds by part."""
    sizes, machine = MODELS[model], read_cluster(cluster)
    task = Task(sizes, None, machine, layout.ranks, layout.global_batch, layout.seq_len, layout.precision)
    step = step_time(sizes, None, layout, machine, simulated=False)
    return {"states": rough_states(sizes, None, layout), "peak": rough_peak(task, layout), "parts": step.parts}


def machine(name: str) -> dict[str, Any]:
    """A cluster as the page knows it: with the size that follows from two of its fields."""
    return asdict(read_cluster(name)) | {"narrow": read_cluster(name).narrow}


def page() -> str:
    constants = {
        "models": {name: asdict(sizes) for name, sizes in MODELS.items()},
        "clusters": {file.stem: machine(file.stem) for file in sorted(CLUSTERS.glob("*.json"))},
        "reserved": RESERVED,
        "gb": GB,
        "widths": asdict(widths("bf16-master")),
        "bucket": Layout.bucket_bytes,
    }
    return PAGE.replace("/*CONSTANTS*/", json.dumps(constants))


def write_page(path: Path) -> tuple[list[str], dict[str, Any]]:
    path.write_text(page())
    return [f"wrote {path}; open it in a browser"], {"file": str(path)}


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Which layout?</title>
<style>
body { font: 15px system-ui, sans-serif; max-width: 62rem; margin: 1rem auto; padding: 0 1rem; color: #222 }
label { display: inline-block; margin: .2rem 1rem .2rem 0 } output { font-weight: 600 }
.bar { display: flex; height: 2rem; background: #eee; margin: .3rem 0; overflow: hidden }
.bar div { height: 100%; font-size: 11px; overflow: hidden; white-space: nowrap; color: #fff; padding: .2rem }
.over { outline: 3px solid #c0392b } svg { width: 100%; background: #fafafa }
</style>
<h1>Which layout?</h1>
<p>Move a slider. The first bar is the memory of the fullest GPU, the second the time of one step, the drawing the
pipeline: forwards in blue, backwards in orange, one row for each rank; what is white is the bubble.</p>
<form id="form"></form>
<h2>Memory <output id="memory-total"></output></h2><div class="bar" id="memory"></div>
<h2>Time <output id="time-total"></output></h2><div class="bar" id="time"></div>
<h2>Pipeline <output id="bubble"></output></h2><svg id="pipeline" viewBox="0 0 1000 160"></svg>
<pre id="check"></pre>
<script>
const C = /*CONSTANTS*/;
const W = C.widths, e = W.activation, w = Math.max(e, 4);
const COLORS = ["#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b7791f", "#4a5568", "#97266d"];

// ---- memory: plan_memory.py
function block(m, x, mode) {
  const T = x.mb * x.seq, outer = x.sp ? T / x.tp : T, H = m.hidden, D = H / m.heads;
  if (mode === "full") return outer * H * e;
  const norms = 2 * outer * (H * w + 2 * H * e + w), kv = m.kv_heads / Math.min(m.kv_heads, x.tp);
  const core = 2 * T * H / x.tp * e + 2 * T * kv * D * e + (mode === "none" ? T * m.heads / x.tp * w : 0);
  return norms + core + 4 * T * m.intermediate / x.tp * e;
}
function ends(m, x) {
  const T = x.mb * x.seq, outer = x.sp ? T / x.tp : T, H = m.hidden;
  return x.seq * (H / m.heads) * 4 + (x.tp > 1 ? T * 9 : 0) + outer * (H * w + 2 * H * e + w)
    + T * Math.ceil(m.vocab_size / x.tp) * w + (x.tp > 1 ? T * 9 : w);
}
function working(m, x) {
  const T = x.mb * x.seq, outer = x.sp ? T / x.tp : T, H = m.hidden, V = Math.ceil(m.vocab_size / x.tp);
  const stream = outer * H * e;
  let one = stream + 2 * T * m.intermediate / x.tp * e;
  let loss = T * V * w * (x.tp === 1 ? 2 : 1) + T * V * e;
  if (x.sp) { loss = Math.max(loss, 3 * T * H * e + V * H * e + stream); one += T * H * e; }
  if (x.recompute === "full") one += block(m, x, "none") - outer * H * w;
  return [loss, one];
}
function inside(m, x) {
  const H = m.hidden, pieces = Math.min(m.kv_heads, x.tp), kv = m.kv_heads * (H / m.heads) / pieces * H;
  return 2 * H + 2 * H * H / x.tp + 2 * kv + 3 * H * m.intermediate / x.tp;
}
function outside(m, x) { return Math.ceil(m.vocab_size / x.tp) * m.hidden * (m.tied ? 1 : 2) + m.hidden; }
function parameters(m, x) { return m.layers / x.pp * inside(m, x) + outside(m, x) / (x.pp === 1 ? 1 : 2); }
function states(m, x) {
  const z = x.zero, N = x.dp, each = W.weight / (z === 3 ? N : 1) + W.weight / (z >= 2 ? N : 1);
  return parameters(m, x) * (each + (2 * W.state + W.master) / (z ? N : 1));
}
function memory(m, x) {
  const p = x.pp, v = x.v, held = states(m, x), one = m.layers / p * block(m, x, x.recompute);
  const flight = p === 1 ? 1 : v > 1 ? Math.min(x.m, ((v - 1) * p + 2 * p - 1) / v) : Math.min(x.m, p);
  const late = p > 1 && (x.zero === 0 || x.zero === 2) ? held / 8 : 0, work = working(m, x), at = [0, 1].map(block => ({
    "weights, gradients, states": held,
    "on the way": x.zero < 3 ? late : W.weight * (outside(m, x) * (block ? 1.5 : 1) + inside(m, x) * (block ? 2.5 : 1)),
    "activations": block ? one * flight : one + ends(m, x), "working set": work[block] }));
  const sum = parts => Object.values(parts).reduce((a, b) => a + b);
  return sum(at[0]) > sum(at[1]) ? at[0] : at[1];
}

// ---- time: plan_time.py
function product(c, flops, n) { return flops / (c.peak_tflops * 1e12 * c.ceiling * n / (n + c.narrow)); }
function attention(c, flops, D) { return product(c, flops, c.attention * D); }
function elementwise(c, bytes) { return bytes / (c.memory_gb_per_s * 1e9); }
function onNodes(table, nodes) {
  const at = Object.entries(table).map(([n, s]) => [+n, s]).sort((a, b) => a[0] - b[0]);
  for (let i = 0; i + 1 < at.length; i++) {
    const [n0, s0] = at[i], [n1, s1] = at[i + 1];
    if (n0 <= nodes && nodes <= n1) return s0 + (s1 - s0) * Math.log(nodes / n0) / Math.log(n1 / n0);
  }
  return nodes > at[at.length - 1][0] ? at[at.length - 1][1] : at[0][1];
}
function send(c, kind, payload, P, stride) {
  if (P === 1) return 0;
  const share = (P - 1) / P, wire = { all_reduce: 2 * share, half: share }[kind] * payload;
  const steps = { all_reduce: Math.min(2 * (P - 1), 2 * Math.log2(P)), half: P - 1 }[kind];
  const nodes = Math.ceil(((P - 1) * stride + 1) / c.gpus_per_node), crosses = nodes > 1;
  let speed = c.inside_gb_per_s;
  if (crosses) {
    const near = Math.max(1, Math.floor(c.gpus_per_node / stride)), table = c.all_reduce_gb_per_s;
    speed = Math.min(speed, table ? onNodes(table, nodes) * near / c.gpus_per_node : c.outside_gb_per_s * near);
  }
  return wire / (speed * 1e9) + steps * c.latency_us * 1e-6;
}
function hop(c, message, P, stride) {
  const out = Math.min(P - 1, Math.floor((P - 1) * stride / c.gpus_per_node)) / (P - 1);
  return message * (out / c.outside_gb_per_s + (1 - out) / c.inside_gb_per_s) / 1e9 + c.latency_us * 1e-6;
}
function time(m, c, x) {
  const t = x.tp, p = x.pp, T = x.mb * x.seq, H = m.hidden, n = Math.min(H / t, T), D = H / m.heads;
  const layer = (2 * T * (2 * H * H + 2 * H * m.kv_heads * D) + 6 * T * H * m.intermediate) / t;
  const core = 4 * x.mb * x.seq * x.seq * H / 2 / t, head = 2 * T * H * m.vocab_size / t;
  const between = attention(c, core, D), kept = elementwise(c, 2 * c.passes * block(m, x, "none"));
  const forward = product(c, layer, n) + between + kept, backward = 2 * forward;
  const again = { none: 0, selective: between, full: forward }[x.recompute], full = x.recompute === "full";
  const bytes = T * H * e, half = send(c, "half", bytes, t, 1), whole = send(c, "all_reduce", bytes, t, 1);
  const tp = x.sp ? half * (10 + 3 * full) : whole * (4 + full);
  const around = (x.sp ? half * ((p === 1 ? 2 : 0) + 3) : whole * ((p === 1 ? 1 : 0) + 1))
    + send(c, "all_reduce", 3 * T * w, t, 1);
  const vocabulary = 3 * product(c, head, n) + elementwise(c, 6 * T * m.vocab_size / t * 4);
  const layers = m.layers / p, one = forward + backward + again + tp;
  const message = p > 1 ? hop(c, (x.sp ? T / t : T) * H * e, p, t * x.dp) : 0;
  const waits = x.v > 1 ? 2 * (p * x.v - 1) : Math.max(2 * (p - 1), 2 * (p - 1) * x.m / p + 2 * (p - 2));
  const bubble = p > 1 ? (p - 1) * layers / x.v * one + waits * message : 0;
  return { "products and elementwise": x.m * layers * (forward + backward) + x.m * vocabulary,
    "recomputation": x.m * layers * again, "tensor parallel": x.m * (layers * tp + around),
    "context and experts": 0, "pipeline bubble": bubble, "data parallel": data(m, c, x, layers * forward, layers * (backward + again)),
    "update": elementwise(c, 2 * states(m, x)) };
}
function data(m, c, x, ahead, behind) {
  if (x.dp === 1) return 0;
  const bytes = parameters(m, x) * W.weight, times = x.pp > 1 ? 1 : x.m;
  const portions = x.zero === 3 ? m.layers / x.pp + 1 : Math.max(1, bytes / C.bucket);
  const [one, whole] = ["half", "all_reduce"].map(kind => portions * send(c, kind, bytes / portions, x.dp, x.tp));
  const [total, shelter, bare] = x.zero === 3 ? [3 * x.m * one, x.m * (behind + ahead), 0]
    : x.zero === 2 ? [times * one, behind * times, one] : x.zero === 1 ? [one, behind, one] : [whole, behind, 0];
  const hidden = c.alone < 1.2 ? Math.min(total, shelter) : 0;
  return total - hidden + c.slowed * hidden + bare;
}

// ---- the pipeline: one forward, one backward (chapter 06), each action as soon as what it needs is there
function pipeline(p, m) {
  const lists = [], done = {}, clock = Array(p).fill(0), drawn = [];
  for (let r = 0; r < p; r++) {
    const warm = Math.min(m, p - 1 - r), list = [];
    let f = 0, b = 0;
    while (f < warm) list.push(["F", f++]);
    while (b < m) { if (f < m) list.push(["F", f++]); list.push(["B", b++]); }
    lists.push(list);
  }
  for (let moved = true; moved;) {
    moved = false;
    for (let r = 0; r < p; r++) while (lists[r].length) {
      const [kind, i] = lists[r][0], need = kind === "F" ? (r ? ["F" + i + "@" + (r - 1)] : [])
        : ["F" + i + "@" + r].concat(r < p - 1 ? ["B" + i + "@" + (r + 1)] : []);
      if (need.some(k => !(k in done))) break;
      const start = Math.max(clock[r], ...need.map(k => done[k])), length = kind === "F" ? 1 : 2;
      clock[r] = done[kind + i + "@" + r] = start + length;
      drawn.push([r, kind, start, length]); lists[r].shift(); moved = true;
    }
  }
  return { drawn, length: Math.max(...clock) };
}

// ---- what one sees
const CONTROLS = { model: Object.keys(C.models), cluster: Object.keys(C.clusters), dp: 9, tp: 4, pp: 6, sp: ["no", "yes"],
  zero: ["0", "1", "2", "3"], recompute: ["none", "selective", "full"], mb: 4, m: 8, v: 3, seq: 17 };
const START = { model: "llama3-8b", cluster: "h100-400g", dp: 3, tp: 1, pp: 1, sp: "yes", zero: "1", recompute: "none",
  mb: 0, m: 4, v: 0, seq: 13 };
function bars(id, parts, scale, show) {
  document.getElementById(id).innerHTML = Object.entries(parts).map(([what, size], i) =>
    `<div style="width:${100 * size / scale}%;background:${COLORS[i]}" title="${what}: ${show(size)}">${what}</div>`).join("");
}
function read() {
  const x = {};
  for (const name in CONTROLS) {
    const field = document.getElementById("in-" + name);
    x[name] = typeof CONTROLS[name] === "number" ? 2 ** +field.value : field.value;
    if (field.nextElementSibling) field.nextElementSibling.value = x[name];
  }
  x.zero = +x.zero; x.sp = x.sp === "yes" && x.tp > 1;
  if (x.pp === 1) x.v = 1;
  return x;
}
function show() {
  const x = read(), m = C.models[x.model], c = C.clusters[x.cluster], parts = memory(m, x), seconds = time(m, c, x);
  const room = c.memory_gb * C.gb * (1 - C.reserved), total = Object.values(parts).reduce((a, b) => a + b);
  const all = Object.values(seconds).reduce((a, b) => a + b), ranks = x.dp * x.tp * x.pp;
  const problem = m.heads % x.tp ? "tp does not divide the heads" : x.pp * x.v > m.layers ? "more stages than layers"
    : x.zero === 3 && x.pp > 1 ? "stage 3 does not go with a pipeline" : total > room ? "does not fit" : "fits";
  document.getElementById("memory-total").value =
    `${(total / C.gb).toFixed(2)} of ${(room / C.gb).toFixed(2)} GB on each of ${ranks} GPUs: ${problem}`;
  document.getElementById("memory").className = total > room ? "bar over" : "bar";
  bars("memory", parts, Math.max(total, room), s => (s / C.gb).toFixed(2) + " GB");
  document.getElementById("time-total").value =
    `${all.toFixed(3)} s, ${Math.round(x.dp * x.mb * x.m * x.seq / all).toLocaleString("en")} tokens/s`;
  bars("time", seconds, all, s => (1e3 * s).toFixed(1) + " ms");
  document.getElementById("bubble").value = `bubble ${(100 * seconds["pipeline bubble"] / all).toFixed(1)} % of the step`;
  const rows = Math.min(x.pp, 16), { drawn, length } = pipeline(rows, Math.min(x.m, 32)), high = 160 / rows;
  document.getElementById("pipeline").innerHTML = drawn.map(([r, kind, at, long]) =>
    `<rect x="${1000 * at / length}" y="${r * high}" width="${1000 * long / length}" height="${high - 1}" ` +
    `stroke="#fff" fill="${kind === "F" ? "#2b6cb0" : "#dd6b20"}"/>`).join("");
}
document.getElementById("form").innerHTML = Object.entries(CONTROLS).map(([name, of]) => typeof of === "number"
  ? `<label>${name} <input type="range" id="in-${name}" min="0" max="${of}" value="${START[name]}"><output></output></label>`
  : `<label>${name} <select id="in-${name}">${of.map(o => `<option${o === START[name] ? " selected" : ""}>${o}</option>`).join("")}</select></label>`
).join("");
document.getElementById("form").addEventListener("input", show);
show();
if (location.hash.startsWith("#check=")) {
  const cases = JSON.parse(decodeURIComponent(location.hash.slice(7)));
  document.getElementById("check").textContent = JSON.stringify(cases.map(x => {
    const m = C.models[x.model], parts = memory(m, x);
    return { states: states(m, x), peak: Object.values(parts).reduce((a, b) => a + b), parts: time(m, C.clusters[x.cluster], x) };
  }));
}
</script></html>
"""
