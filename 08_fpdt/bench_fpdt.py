"""The ground floor beside torch's attention, plain chunks and in_depth; its three streams; who holds what.

    python 08_fpdt/bench_fpdt.py             verify, measure, write results and the figures
    python 08_fpdt/bench_fpdt.py --figures   only draw

Output and gradients of each way must be those of torch's attention in float64 before anything is measured. A CPU copies
when it should compute, so the streams are drawn from what the file wrote down: who waited for whom.
"""

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import fpdt as script
import torch
import torch.distributed as dist
from fpdt_attention import EXPLICIT, fpdt_attention
from fpdt_store import Store, machine_for
from harness.figures import COLOURS, write_figure
from harness.meter import peak_memory
from harness.oracle import assert_same
from harness.ranks import run_ranks
from harness.report import paired, write_result
from torch import Tensor

S, CHUNKS = 2048, 8
BASE = f"FPDT, {CHUNKS} chunks"


def ways() -> dict:
    """Each takes (layer, x) and gives attention's output; `host` of the last run is what it counted."""
    group = dist.group.WORLD

    def plain(layer, x: Tensor) -> Tensor:
        """`attend` over lists on the device; autograd writes the backward, and keeps what it needs."""
        q, k, v = (y.transpose(0, 1) for y in layer.project(x))
        kvs, outs = torch.stack((k, v)).chunk(CHUNKS, 2), []
        for i, part in enumerate(q.chunk(CHUNKS, 1)):
            q_i = part.reshape(script.N_KV, -1, script.D)
            outs.append(_attend(q_i, [kvs[i], *kvs[:i]]).view(part.shape).transpose(0, 1).flatten(1))
        return torch.cat(outs)

    def deep(layer, x: Tensor) -> Tensor:
        attention = fpdt_attention(group, CHUNKS, STORES[-1], EXPLICIT)
        return attention(*(y[None] for y in layer.project(x)), causal=True)[0].flatten(1)

    def ours(u: int, slots: int):
        return lambda layer, x: layer.attention(x, script.Host("cpu", u, slots), group)

    return {
        "torch's attention, all on the device": lambda layer, x: layer.attention(x, None, None),
        "chunks on the device, autograd": plain,
        "FPDT, 1 chunk": ours(1, 2),
        f"FPDT, {CHUNKS} chunks, one slot": ours(CHUNKS, 1),
        BASE: ours(CHUNKS, 2),
        f"FPDT, {2 * CHUNKS} chunks": ours(2 * CHUNKS, 2),
        f"in_depth, {CHUNKS} chunks": deep,
    }


STORES: list[Store] = []


def _attend(q: Tensor, kvs: list[Tensor]) -> Tensor:
    """Online softmax once more, out of place, so that autograd can go back through it."""
    top, total, out = torch.full_like(q[..., :1], -torch.inf), torch.zeros_like(q[..., :1]), torch.zeros_like(q)
    for number, (k, v) in enumerate(kvs):
        scores = script.scores_of(q, k, causal=number == 0)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True)).detach()
        weights, fade = (scores - higher).exp(), (top - higher).exp()
        top, total, out = higher, total * fade + weights.sum(-1, keepdim=True), out * fade + weights @ v
    return out / total


def one(way, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    layer = script.Layer().to(dtype)
    x = torch.randn(tokens, script.H, dtype=dtype, requires_grad=True)
    STORES.append(Store(machine_for(torch.device("cpu"))))
    out = way(layer, x)
    return [out.detach(), *torch.autograd.grad(out, (x, *layer.norm1.parameters(), *layer.qkv.parameters()), out)]


def measured() -> list[list]:
    made = ways()
    want = one(made["torch's attention, all on the device"], 320, torch.float64)
    for name, way in made.items():
        for at, (x, y) in enumerate(zip(one(way, 320, torch.float64), want, strict=True)):
            assert_same(x, y, what=f"{name}: number {at} of out, dx and gradients of weights")
    rows = []
    for name, way in made.items():
        script.count.clear()
        with peak_memory() as memory:
            one(way, S, torch.float32)
        host, link = script.count["host"], script.count["offload"] + script.count["fetch"]
        if name.startswith("in_depth"):
            host, link = STORES[-1].host_peak, STORES[-1].offloaded + STORES[-1].fetched
        ratio = 1
        if name != BASE:
            ratio = paired(
                lambda way=way: one(way, S, torch.float32), lambda: one(made[BASE], S, torch.float32), repeats=5
            )
        rows.append([name, memory.peak, host, link, ratio])
        STORES.clear()
    return rows


# ------------------------------------------------------------------------------------------------------- the streams


def recorded(u: int, slots: int) -> tuple[list[tuple], list[tuple]]:
    """The operations of one layer's attention: forward, and backward. Events of before count as over in backward."""
    host, layer = script.Host("cpu", u, slots), script.Layer()
    out = layer.attention(torch.randn(16 * u, script.H, requires_grad=True), host, dist.group.WORLD)
    split = len(host.ops)
    out.sum().backward()
    back = [(*op[:3], [event - split for event in op[3] if event > split]) for op in host.ops[split:]]
    return host.ops[:split], back


def timeline(ops: list[tuple], seconds) -> list[list]:
    """[stream, name, start, end] of every operation that takes time: each stream does one at a time, in its order, and
    each operation waits for its events."""
    ends, free, rows = [0.0], Counter(), []
    for stream, name, size, after in ops:
        start = max([free[stream], *(ends[event] for event in after)])
        ends.append(start + seconds(stream, name, size))
        free[stream] = ends[-1]
        if ends[-1] > start:
            rows.append([stream, name, start, ends[-1]])
    return rows


def speed(fetch: float):
    """A pair of chunks takes 1 forward, 2.5 backward, with five matrix products where two were; a chunk with itself
    half of that; a copy of a chunk's queries, or of its keys and values, `fetch`. Projections are left out."""
    Q = 16 * script.N * script.D * 4

    def seconds(stream: str, name: str, size: int) -> float:
        if stream != "compute":
            return size / Q * fetch
        if "." not in name:
            return 0.0
        first, second = name.split(".")
        own = first.lstrip("qkv") == second.lstrip("qkv")
        return (1.0 if first[0] == "q" else 2.5) * (0.5 if own else 1.0)

    return seconds


def idle(rows: list[list]) -> float:
    """Per cent of its work that the computation waits, up to its end."""
    spans = [row[2:] for row in rows if row[0] == "compute"]
    work = sum(end - start for start, end in spans)
    return 100 * (max(end for _, end in spans) / work - 1)


def streams() -> tuple[list[list], list[list]]:
    drawn, idles = [], []
    for slots in (1, 2):
        ops, _ = recorded(4, slots)
        drawn += [[f"{slots} slot{'s' * (slots > 1)}", *row] for row in timeline(ops, speed(0.75))]
    for fetch in (0.25, 0.5, 0.75, 1.0, 2.0):
        cells = [
            round(idle(timeline(ops, speed(fetch))), 1)
            for way in (0, 1)
            for ops in (recorded(8, 1)[way], recorded(8, 2)[way])
        ]
        idles.append([fetch, *cells])
    return drawn, idles


def holdings() -> list[list]:
    """For each pair of the forward, from the record: keys and values on the device and on the host, or on their way."""
    ops, rows = recorded(4, 2)[0], []
    stored: list[str] = []
    slots: list[str] = []
    for stream, name, _, _ in ops:
        if stream == "offload" and name.startswith("kv"):
            stored.append(name)
        elif stream == "fetch":
            slots = [*slots, name][-2:]
        elif "." in name:
            query, keys = name.split(".")
            if query[1:] == keys[2:]:  # a new row begins, and its first fetches have been given out already
                slots = slots[-min(2, int(query[1:])) :] if query != "q0" else []
            own = "kv" + query[1:]
            on_device = sorted({own, *slots})
            rows.append([name, " ".join(on_device), " ".join(sorted({*stored, own}))])
    return rows


# ------------------------------------------------------------------------------------------------------- the figures


def draw_streams(axes, result):
    names, lanes = ("1 slot", "2 slots"), ("compute", "fetch", "offload")
    colour = {"compute": COLOURS["compute"], "fetch": COLOURS["messages"], "offload": COLOURS["activations"]}
    longest = max(row[4] for row in result["rows"])
    for panel, which in zip(axes, names, strict=True):
        rows = [row[1:] for row in result["rows"] if row[0] == which]
        for stream, name, start, end in rows:
            panel.barh(
                lanes.index(stream), end - start, left=start, height=0.8, color=colour[stream], edgecolor="white"
            )
            if end - start >= 0.6:
                label = name.replace(".", "\n") if stream == "compute" else name
                panel.text(
                    (start + end) / 2, lanes.index(stream), label, ha="center", va="center", color="black", size=7
                )
        spans = sorted((start, end) for stream, _, start, end in rows if stream == "compute")
        for (_, end), (start, _) in pairwise(spans):
            if start > end + 1e-9:
                panel.barh(0, start - end, left=end, height=0.8, color=COLOURS["idle"], alpha=0.4)
        panel.set(yticks=range(3), yticklabels=lanes, title=which, xlim=(0, longest), xlabel="pairs of chunks")
        panel.invert_yaxis()
        panel.grid(False)


def draw_holdings(axes, result):
    pairs = [row[0] for row in result["rows"]]
    for panel, place, at in zip(axes, ("device", "host"), (1, 2), strict=True):
        for x, row in enumerate(result["rows"]):
            for name in row[at].split():
                own = name == "kv" + row[0].split(".")[0][1:]
                shade = 0.9 if name == row[0].split(".")[1] and place == "device" else 0.45 if not own else 0.65
                panel.barh(int(name[2:]), 0.9, left=x + 0.05, height=0.85, color=COLOURS["activations"], alpha=shade)
        panel.set(yticks=range(4), yticklabels=[f"kv{i}" for i in range(4)], title=f"keys and values on the {place}")
        panel.set(xticks=[x + 0.5 for x in range(len(pairs))], xlim=(0, len(pairs)))
        panel.set_xticklabels([p.replace(".", "\n") for p in pairs], fontsize=7)
        panel.invert_yaxis()
        panel.grid(False)


def figures() -> None:
    write_figure("08_fpdt/figures/streams.svg", ["08_ground_streams"], draw_streams, shape=(2, 1), size=(9, 4.6))
    write_figure(
        "08_fpdt/figures/who_holds_what.svg", ["08_ground_holds"], draw_holdings, shape=(1, 2), size=(9.5, 2.8)
    )


def main() -> None:
    if "--figures" in sys.argv[1:]:
        figures()
        return
    rows = run_ranks(1, measured, timeout=300)[0]
    drawn, idles = run_ranks(1, streams)[0]
    held = run_ranks(1, holdings)[0]
    write_result(
        "08_ground",
        "Attention of one layer, forward and backward, on one process",
        ["way", "bytes on the device at most", "bytes on the host at most", "bytes over the link", "time over " + BASE],
        rows,
        f"{S} tokens, {script.N} query heads and {script.N_KV} of keys and values of {script.D}, float32. The device's "
        "bytes are beyond x and the weights; all are counted. in_depth gets q, k and v of all tokens, computes pairs "
        "with its readable kernel, and keeps the same on the host. A CPU's copies take time from its work.",
    )
    write_result(
        "08_ground_idle",
        "How long the computation waits, in % of its work: 8 chunks, from the record of who waits for whom",
        ["fetch of a chunk / pair", "forward, 1 slot", "forward, 2 slots", "backward, 1 slot", "backward, 2 slots"],
        idles,
        "Computed from the operations that fpdt.py wrote down, with pairs that take 1 forward and 2.5 backward, half "
        "of it for a chunk with itself, and nothing for projections.",
    )
    write_result(
        "08_ground_streams",
        "The three streams of a forward, 4 chunks: when what runs",
        ["slots", "stream", "operation", "start", "end"],
        drawn,
        "Computed from the record, in pairs of chunks; a fetch takes 0.75.",
    )
    write_result(
        "08_ground_holds",
        "Which keys and values are where, pair by pair, in a forward of 4 chunks",
        ["pair", "on the device", "on the host"],
        held,
        "From the record: on the device, or on the way to it; on the host, or on the way to it.",
    )
    figures()


if __name__ == "__main__":
    main()
