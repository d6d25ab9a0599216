"""Overlapped versions of a block against the one without overlap: same weights and input, 4 ranks, one run.

    python 04_tensor_parallel/in_depth/bench_overlap.py              4 processes on CPU (Gloo), or 4 GPUs (NCCL)
    python 04_tensor_parallel/in_depth/bench_overlap.py --figures    draw the figures again from the results

Output and gradients are compared before any timing. A step is forward and backward. On a CPU the ranks and
their messages share the cores, so nothing can be hidden, and a ratio near 1 means that the schedule costs
nothing. The recorded order of products and messages shows what could be hidden elsewhere. The cost model,
with bandwidths and latencies measured on this machine, is compared with measured seconds.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import domino
import overlap
import parallel_linear
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tensor_parallel_bench import RANKS, must_be_same, options, run, step
from domino import HalvedBlock, in_halves, one_by_one
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import bytes_on_the_wire, communication
from harness.report import paired, write_result
from harness.spawn import LIMIT
from overlap import LLAMA_70B, VERSIONS, Cluster, block_time
from parallel_block import Config, ParallelBlock, Parts, rope_tables
from parallel_linear import TensorParallel, init_weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

CONFIG = Config(hidden=512, heads=8, kv_heads=4, intermediate=1408)
ROWS, SEQUENCE = 2, 256
LAYOUTS = {"tensor parallel": False, "sequence parallel": True}
BASE = {False: "simple", True: "gather-again"}
OTHERS = {False: ["overlapped", "halves"], True: ["overlapped", "ring", "halves"]}


def block_of(version: str, group: dist.ProcessGroup, sequence: bool, config: Config = CONFIG) -> ParallelBlock:
    if version == "halves":
        return HalvedBlock(config, group, sequence, Parts())
    return ParallelBlock(config, TensorParallel(group, sequence, *VERSIONS[version]), Parts())


def compare(x: Tensor, tables: tuple[Tensor, Tensor]) -> None:
    group, rows = dist.group.WORLD, []
    for layout, sequence in LAYOUTS.items():
        mine = (x.chunk(RANKS, 1)[dist.get_rank()] if sequence else x).clone().requires_grad_()
        base, blocks = BASE[sequence], {}
        for version in ("simple", base, *OTHERS[sequence]):
            blocks[version] = block_of(version, group, sequence).to(x.device)
            init_weights(blocks[version], layers=1, seed=0)
        want = [step(blocks[base], mine, *tables), mine.grad, *(p.grad for p in blocks[base].parameters())]
        wires = {}
        for version, block in blocks.items():
            with communication() as wires[version]:
                z = step(block, mine, *tables)
            got = [z, mine.grad, *(p.grad for p in block.parameters())]
            for a, b in zip(got, want, strict=True):
                must_be_same(a, b, f"{version}: a tensor")
        for version in OTHERS[sequence]:
            other = "simple" if version == "halves" else base  # keeps as much for backward, and sends as many bytes
            steps = [partial(step, blocks[name], mine, *tables) for name in (version, other)]
            ratio = paired(*steps, repeats=11, setup=dist.barrier)
            wire = wires[version]
            rows.append([layout, f"{version} / {other}", sum(wire.calls.values()), wire.total, ratio])
    if dist.get_rank() == 0:
        columns = ["layout", "versions", "messages", "bytes sent in a step", "ratio of seconds (quartiles)"]
        note = f"Forward and backward of a block, H {CONFIG.hidden}, {ROWS} x {SEQUENCE} tokens."
        write_result(
            "04_overlap", f"Versions that wait less against those that wait, {RANKS} ranks", columns, rows, note
        )


# ------------------------------------------------------------------------------------------------- the order of events


class Recorder(TorchDispatchMode):
    """The calls to torch: ["product", -1, flops], ["start", message, bytes sent], ["wait", message, 0]."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[list[Any]] = []
        self.messages = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._opname in ("mm", "bmm"):
            self.events.append(["product", -1, 2 * args[0].numel() * args[1].shape[-1]])
        elif "scaled_dot_product" in func._opname:  # [B, N, S, D]: q kT and weights v, half of them masked
            backward = "backward" in func._opname
            q = args[1 if backward else 0]
            self.events.append(["product", -1, 2 * q.numel() * q.shape[2] * (2 if backward else 1)])
        return result

    def start(self, real: Callable, called: str, *args: Any, **how: Any) -> Any:
        number, self.messages = self.messages, self.messages + 1
        if called == "send":
            sent = args[0][0].tensor.nbytes
        else:
            payload = args[1 if called == "reduce_scatter" else 0].nbytes
            sent = int(bytes_on_the_wire(called, payload, dist.get_world_size(how["group"])))
        self.events.append(["start", number, sent])
        works = real(*args, **how)
        if works is None:  # the call was synchronous
            self.events.append(["wait", number, 0])
            return None
        return (
            [Handle(work, self, number) for work in works] if isinstance(works, list) else Handle(works, self, number)
        )


class Handle:
    def __init__(self, work: dist.Work, recorder: Recorder, number: int) -> None:
        self.work, self.recorder, self.number = work, recorder, number

    def wait(self) -> None:
        if ["wait", self.number, 0] not in self.recorder.events:  # a send and a receive are one message
            self.recorder.events.append(["wait", self.number, 0])
        self.work.wait()


@contextmanager
def recording() -> Iterator[Recorder]:
    places = [(dist, "all_reduce", "all_reduce"), (dist, "batch_isend_irecv", "send")]
    for module in (parallel_linear, overlap, domino):
        places += [(module, "all_gather_single", "all_gather"), (module, "reduce_scatter_single", "reduce_scatter")]
    with ExitStack() as patches:
        recorder = patches.enter_context(Recorder())
        for place, name, called in places:
            patches.enter_context(mock.patch.object(place, name, partial(recorder.start, getattr(place, name), called)))
        yield recorder


def orders(x: Tensor, tables: tuple[Tensor, Tensor]) -> None:
    rows = []
    for layout, sequence in LAYOUTS.items():
        mine = (x.chunk(RANKS, 1)[dist.get_rank()] if sequence else x).clone().requires_grad_()
        for version in (BASE[sequence], *OTHERS[sequence]):
            blocks = nn.ModuleList(block_of(version, dist.group.WORLD, sequence) for _ in range(2)).to(x.device)
            init_weights(blocks, layers=2, seed=0)
            with recording() as recorder:
                z = (in_halves if version == "halves" else one_by_one)(mine, list(blocks), *tables)
                recorder.events.append(["backward", -1, 0])
                z.backward(z.detach())
            rows += [[layout, version, *event] for event in recorder.events]
    if dist.get_rank() == 0:
        columns = ["layout", "version", "event", "message", "flops of a product, bytes sent of a message"]
        note = "Forward and backward of two blocks on rank 0, in the order in which torch was asked."
        write_result("04_overlap_order", f"Products and messages in order, {RANKS} ranks", columns, rows, note)


# -------------------------------------------------------------------- the cost model against measured seconds


def seconds(function: Callable[[], Any], times: int = 1, repeats: int = 7) -> float:
    """The median over repeats, until all ranks are done, because they share cores and links."""
    taken = []
    for repeat in range(repeats + 2):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        if repeat >= 2:
            taken.append((time.perf_counter() - begin) / times)
    return statistics.median(taken)


def cost_model(x: Tensor, tables: tuple[Tensor, Tensor]) -> None:
    rows, H = [], CONFIG.hidden
    tokens = ROWS * SEQUENCE
    for t in (1, 2, 4):
        slices = [list(range(first, first + t)) for first in range(0, RANKS, t)]
        group = dist.new_subgroups_by_enumeration(slices, timeout=LIMIT)[0]
        weight = torch.randn(CONFIG.intermediate // t, H, device=x.device)
        flops = 2 * tokens * weight.numel() / seconds(partial(F.linear, x, weight), times=10)
        latency, bandwidth = 0.0, float("inf")
        if t > 1:
            one, all_of_x = (
                seconds(partial(dist.all_reduce, y, group=group), times=10) / (2 * (t - 1))
                for y in (x[0, 0, :t].clone(), x.clone())
            )
            latency, bandwidth = one, x.nbytes / t / max(all_of_x - one, 1e-9)
        block = ParallelBlock(CONFIG, TensorParallel(group, False, *VERSIONS["simple"]), Parts()).to(x.device)
        init_weights(block, layers=1, seed=0)
        mine = x.clone().requires_grad_()
        z = step(block, mine, *tables)
        if t == 1:
            want = z
        must_be_same(z, want, f"the output of {t} ranks")
        cluster = Cluster(RANKS, bandwidth, bandwidth, latency, flops)
        compute, send = block_time(CONFIG, tokens, SEQUENCE, t, cluster, "one", e=4)
        clock = seconds(partial(step, block, mine, *tables))
        model = [1e3 * compute, 1e3 * send, 1e3 * (compute + send)]
        rows.append([t, flops / 1e9, 1e6 * latency, bandwidth / 1e9, *model, 1e3 * clock, clock / (compute + send)])
    for row in rows:
        row[3] = row[3] if row[0] > 1 else "-"
    if dist.get_rank() == 0:
        columns = ["t", "GFLOP/s of a product", "µs of a ring's step", "GB/s", "products, ms", "messages, ms"]
        columns += ["model, ms", "measured, ms", "measured / model"]
        note = (
            f"Forward and backward of a block (`simple`), H {H}, {ROWS} x {SEQUENCE} tokens, float32; {RANKS} "
            "processes at once, in groups of t. The first three numbers are measured alone and put into `block_time`; "
            "the model counts products and messages, and nothing else."
        )
        write_result("04_cost_model", "The cost model beside the clock, on this machine", columns, rows, note)


def worker(device: torch.device) -> None:
    tables = rope_tables(torch.arange(SEQUENCE, device=device), CONFIG.hidden // CONFIG.heads, 10000.0)
    x = torch.randn(ROWS, SEQUENCE, CONFIG.hidden, generator=torch.Generator().manual_seed(0)).to(device)
    compare(x, tables)
    orders(x, tables)
    cost_model(x, tables)


# -------------------------------------------------------------------------------------------------------------- figures


def clock(events: list[list[Any]], per_flop: float, per_byte: float) -> tuple[list[tuple[str, float, float]], float]:
    """(what, begin, length) of each bar, and when backward begins. Products run one by one, messages too."""
    now, free, bars, arrives, middle = 0.0, 0.0, [], {}, 0.0
    for what, number, amount in events:
        if what == "product":
            bars.append(("compute", now, amount * per_flop))
            now += amount * per_flop
        elif what == "start":
            begin = max(now, free)
            free = arrives[number] = begin + amount * per_byte
            bars.append(("messages", begin, amount * per_byte))
        elif what == "wait":
            if arrives[number] > now:
                bars.append(("idle", now, arrives[number] - now))
            now = max(now, arrives[number])
        else:
            middle = now
    return [*bars, ("end", now, 0.0)], middle


def draw_orders(axes, result, layout: str) -> None:
    cluster = Cluster(8, 450e9, 50e9, 10e-6, 400e12)
    compute, send = block_time(LLAMA_70B, 8192, 8192, 8, cluster, "one")
    by_version: dict[str, list[list[Any]]] = {}
    simple = [row[2:] for row in result["rows"] if row[:2] == ["tensor parallel", "simple"]]
    for where, version, *event in result["rows"]:
        if where == layout:
            by_version.setdefault(version, []).append(event)
    per_flop = compute / sum(amount for what, _, amount in simple if what == "product")
    per_byte = send / sum(amount for what, _, amount in simple if what == "start")
    ends = {}
    for panel, (version, events) in zip(axes, by_version.items(), strict=True):
        bars, middle = clock(events, per_flop, per_byte)
        ends[version] = bars[-1][1]
        for what, begin, length in bars[:-1]:
            y = 1 if what == "messages" else 0
            how = {"edgecolor": "white", "linewidth": 0.4}
            pale = {"hatch": "////", "alpha": 0.35} if what == "idle" else {}
            panel.barh(y, length, 0.8, left=begin, color=COLOURS[what], **how, **pale)
        panel.axvline(middle, color=GREY, linewidth=1, linestyle=":")
        base = next(iter(ends.values()))
        share = f": {ends[version] / base:.2f} of the time" if len(ends) > 1 else ": 1"
        panel.set(yticks=[0, 1], yticklabels=["computes", "sends"], xticks=[])
        panel.set_title(f"{version}{share}", fontsize=10, loc="left")
        panel.grid(False)
    for panel in axes:
        panel.set_xlim(0, 1.01 * max(ends.values()))
    axes[-1].set_xlabel(
        "time, two blocks, forward | backward; products to messages as block_time has them for Llama 3 70B on 8 GPUs"
    )
    axes[-1].xaxis.label.set_fontsize(8)
    for colour, label in (("compute", "product"), ("messages", "message"), ("idle", "waits")):
        pale = {"hatch": "////", "alpha": 0.35} if colour == "idle" else {}
        axes[0].barh(0, 0, color=COLOURS[colour], label=label, **pale)
    axes[0].figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=8)


def draw_tensor(axes, result) -> None:
    draw_orders(axes, result, "tensor parallel")


def draw_sequence(axes, result) -> None:
    draw_orders(axes, result, "sequence parallel")


def draw() -> None:
    folder, source = "04_tensor_parallel/figures", ["04_overlap_order"]
    write_figure(f"{folder}/overlap_tensor.svg", source, draw_tensor, shape=(3, 1), size=(9, 4.2))
    write_figure(f"{folder}/overlap_sequence.svg", source, draw_sequence, shape=(4, 1), size=(9, 5.2))


if __name__ == "__main__":
    if not options(__doc__, figures=True).figures:
        run(worker)
    draw()
