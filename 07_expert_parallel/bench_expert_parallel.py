"""The core file against every expert on every token, and against in_depth; and the data of the chapter's figures.

    python 07_expert_parallel/bench_expert_parallel.py               4 ranks on the CPU: ratios, bytes, figures
    python 07_expert_parallel/bench_expert_parallel.py --figures     draw the figures again from the results

First the script's own check must find no failure, and all three layers must agree on output and gradients; only then
is anything timed. Bytes must equal the formula before anything is written.
"""

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import expert_parallel as core
import torch
import torch.distributed as dist
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication, storage_bytes
from harness.ranks import run_ranks
from harness.reference import assert_same_named
from harness.report import measured, paired, write_result
from moe_layer import MoE, MoEConfig
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

EP, E, T, HIDDEN, FFN_HIDDEN = 4, 16, 512, 128, 256  # ranks, experts, tokens of a rank, sizes
AUX_LOSS_COEF = 0.1  # the same in all three
BUSY = 2048  # tokens of a rank in the timeline, so that its parts can be seen


def weights_of(ep: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"router": (E, HIDDEN), "w1": (E, FFN_HIDDEN, HIDDEN), "w3": (E, FFN_HIDDEN, HIDDEN)}
    shapes |= {"w2": (E, HIDDEN, FFN_HIDDEN)}
    full = {name: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return core.shard_experts(full, rank, ep)


def tokens_of(rank: int, count: int = T) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(10 + rank))


Step = Callable[[], dict[str, Tensor]]


def step_of(form: str, top_k: int, count: int = T) -> Step:
    """Forward and backward of one layer on this rank; returns output and gradients, those of the experts stored."""
    rank, ep, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = tokens_of(rank, count).requires_grad_()
    w = weights_of(1 if form == "dense" else ep, 0 if form == "dense" else rank)
    if form == "in_depth":
        layer = MoE(MoEConfig(HIDDEN, FFN_HIDDEN, E, top_k, balance=AUX_LOSS_COEF), group, group)
        parameters = {name.split(".")[-2].replace("gate", "router"): p for name, p in layer.named_parameters()}
        for name, p in parameters.items():
            p.data.copy_(w[name])
        w = parameters

    def step() -> dict[str, Tensor]:
        for t in (x, *w.values()):
            t.grad = None
        if form == "in_depth":  # its loss is attached to its output
            y = layer(x)
            y.square().sum().backward()
        else:
            y, aux_loss, _ = {"dense": core.moe_dense, "core": core.moe}[form](x, *w.values(), top_k, None, group)
            (y.square().sum() + AUX_LOSS_COEF * aux_loss).backward()
        return {"y": y.detach(), "x": x.grad, **{name: t.grad for name, t in w.items()}}

    step.stored = storage_bytes(t for name, t in w.items() if name != "router")
    return step


def verify(top_k: int) -> None:
    """Raises unless the script's check finds no failure, and core file and in_depth equal the dense layer."""
    with contextlib.redirect_stdout(io.StringIO()):
        failures = core.check(top_k, None, 8, dist.group.WORLD, torch.device("cpu"))
    if failures:
        raise ValueError("; ".join(failures))
    rank = dist.get_rank()
    expected = step_of("dense", top_k)()
    for name in core.EXPERT_WEIGHTS:  # in the dense form every rank has a part of every expert's gradient
        dist.all_reduce(expected[name])
        expected[name] = expected[name].chunk(EP)[rank]
    for form in ("core", "in_depth"):
        assert_same_named(step_of(form, top_k)(), expected, 2e-5, f"{form}, K = {top_k}:", rank)


def rows_between(sender: int, receiver: int, top_k: int) -> int:
    experts, _, _ = core.route(tokens_of(sender), weights_of(1, 0)["router"], top_k)
    return int((experts // (E // EP) == receiver).sum())


def measure(top_k: int) -> dict:
    """Of this rank: ratios of seconds; bytes; and multiplications, counted."""
    forms = {form: step_of(form, top_k) for form in ("dense", "core", "in_depth")}
    found = {"stored": {form: step.stored for form, step in forms.items()}, "flops": {}, "sent": {}}
    for form, step in forms.items():
        with FlopCounterMode(display=False) as counter, communication() as wire:
            step()
        found["flops"][form], found["sent"][form] = counter.get_total_flops(), wire.sent["all_to_all"]
    for other in ("dense", "in_depth"):
        found[other] = paired(forms["core"], forms[other], repeats=9, setup=dist.barrier)
    rank = dist.get_rank()
    others = [r for r in range(EP) if r != rank]
    found["leave"] = sum(rows_between(rank, r, top_k) for r in others)
    found["arrive"] = sum(rows_between(r, rank, top_k) for r in others)
    return found


# -------------------------------------------------------------------------------------------------- data of figures


def dispatch_tables() -> list:
    """[K, rank, expert, rows] of this rank, in the first layer of the script's first step."""
    rank, rows = dist.get_rank(), []
    params = core.shard_experts(core.build_model(8, "cpu"), rank, EP)
    for top_k in (1, 2):
        layer = partial(core.moe, top_k=top_k, capacity_factor=None, group=dist.group.WORLD)
        _, _, experts = core.run_model(params, core.get_batch(0, rank, "cpu")[0], layer)
        rows += [[top_k, rank, e, n] for e, n in enumerate(experts[0].flatten().bincount(minlength=8).tolist())]
    return rows


def timeline() -> list:
    """[what, start, end] in seconds of every part of a forward and backward pass on this rank, in order."""
    step, found = step_of("core", 2, BUSY), []

    def timed(name: str) -> None:
        function = getattr(core, name)

        def run(*args):
            start = time.perf_counter()
            result = function(*args)
            found.append([name, start, time.perf_counter()])
            return result

        setattr(core, name, run)

    for name in ("route", "plan_dispatch", "all_to_all_rows", "run_experts"):
        timed(name)
    for _ in range(5):  # the last one counts
        found.clear()
        dist.barrier()
        start = time.perf_counter()
        step()
        end = time.perf_counter()
    return [["step", start, end], *found]


def with_waiting(ranks: list[list]) -> list:
    """[rank, what, start, end] in milliseconds from the first start. A message begins when the last rank has reached
    it; until then a rank waits. Between the parts that have a name lie sorting and indexing, and, between the last two
    messages, backward of the experts."""
    zero = min(parts[0][1] for parts in ranks)
    last = [max(part[1] for part in same) for same in zip(*(parts[1:] for parts in ranks), strict=True)]
    rows = []
    for rank, parts in enumerate(ranks):
        [_, at, end], named = parts[0], parts[1:]
        pieces = []
        for i, ((what, a, b), everyone) in enumerate(zip(named, last, strict=True), 1):
            pieces.append(["backward" if i == len(named) else "sorting", at, a])
            if what in ("plan_dispatch", "all_to_all_rows"):
                begin = min(max(a, everyone), b)
                message = "rows" if what == "all_to_all_rows" else "table"
                pieces += [["waiting", a, begin], [message, begin, b]]
            else:
                pieces.append([{"route": "router", "run_experts": "experts"}[what], a, b])
            at = b
        pieces.append(["sorting", at, end])
        rows += [[rank, what, round(1e3 * (a - zero), 3), round(1e3 * (b - zero), 3)] for what, a, b in pieces if b > a]
    return rows


# ----------------------------------------------------------------------------------------------------------- figures


def draw_tables(axes, record: dict) -> None:
    for ax, K in zip(axes, (1, 2), strict=True):
        rows = [row for row in record["rows"] if row[0] == K]
        most = max(row[3] for row in rows)
        for _, rank, expert, n in rows:
            colour = COLOURS["compute"] if expert // 2 == rank else COLOURS["messages"]
            ax.barh(rank, 0.96, left=expert + 0.02, height=0.9, color=colour, alpha=0.05 + 0.35 * n / most)
            ax.text(expert + 0.5, rank, str(n), ha="center", va="center", color=GREY)
        for border in (2, 4, 6):
            ax.axvline(border, color=GREY, linewidth=1.5)
        ax.set(title=f"K = {K}: rows for each expert (blue: not sent)", xlim=(0, 8), ylim=(EP - 0.4, -0.6))
        ax.set(xticks=[e + 0.5 for e in range(8)], xticklabels=[f"e{e}" for e in range(8)])
        ax.set(yticks=range(EP), yticklabels=[f"from rank {r}" for r in range(EP)])
        ax.grid(False)


def draw_timeline(ax, record: dict) -> None:
    kinds = {  # colour, how strong, label
        "router": ("compute", 0.5, "router"),
        "table": ("messages", 0.5, "plan: sort, all-to-all of counts"),
        "rows": ("messages", 1.0, "all-to-all of rows"),
        "experts": ("compute", 1.0, "experts"),
        "backward": ("gradients", 1.0, "experts, backward"),
        "sorting": ("activations", 1.0, "sorting, and what is left of backward"),
        "waiting": ("idle", 1.0, "waiting for the other rank"),
    }
    seen = set()
    for rank, what, start, end in record["rows"]:
        colour, alpha, label = kinds[what]
        label = None if what in seen else label
        ax.barh(rank, end - start, left=start, height=0.6, color=COLOURS[colour], alpha=alpha, label=label)
        seen.add(what)
    ranks = sorted({row[0] for row in record["rows"]})
    ax.set(yticks=ranks, yticklabels=[f"rank {r}" for r in ranks], ylim=(max(ranks) + 0.6, -0.6))
    ax.set(xlabel="milliseconds: forward and backward of one layer", title="What computes and what is sent")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, labelcolor=GREY)
    ax.grid(False)


def figures() -> None:
    folder = "07_expert_parallel/figures"
    write_figure(f"{folder}/dispatch_table.svg", ["07_ground_table"], draw_tables, shape=(1, 2), size=(10, 2.8))
    write_figure(f"{folder}/timeline.svg", ["07_ground_timeline"], draw_timeline, size=(10, 3.6))


def main() -> None:
    parser = argparse.ArgumentParser(description="The core file of chapter 07, measured.", allow_abbrev=False)
    parser.add_argument("--figures", action="store_true", help="only draw, from the results that are there")
    if parser.parse_args().figures:
        figures()
        return
    for top_k in (1, 2):
        run_ranks(EP, verify, top_k, timeout=120)
    rows = []
    for top_k in (1, 2):
        ranks = run_ranks(EP, measure, top_k, timeout=300)
        for rank, found in enumerate(ranks):
            bytes_sent = 2 * (found["leave"] + found["arrive"]) * HIDDEN * 4 + (EP - 1) * E // EP * 8
            if found["sent"]["core"] != bytes_sent:
                sys.exit(f"rank {rank} sends {found['sent']['core']} bytes; the formula says {bytes_sent}")
            if found["stored"]["core"] * EP != found["stored"]["dense"]:
                sys.exit(f"rank {rank} stores {found['stored']['core']} of {found['stored']['dense']} bytes of experts")
        flops = {form: sum(f["flops"][form] for f in ranks) for form in ("dense", "core")}
        rows.append(
            [
                top_k,
                ranks[0]["dense"],
                ranks[0]["in_depth"],
                flops["core"] / flops["dense"],
                sum(f["leave"] for f in ranks) / (EP * T),
                sum(f["sent"]["core"] for f in ranks) / (EP * T),
            ]
        )
    write_result(
        "07_ground",
        f"One layer of the core file, forward and backward, on {EP} ranks",
        [
            "K",
            "seconds / dense",
            "seconds / in_depth",
            "multiplications / dense",
            "rows sent per token",
            "bytes sent per token",
        ],
        rows,
        f"{E} experts, {T} tokens per rank, hidden size {HIDDEN}, {FFN_HIDDEN} inside an expert, float32. Dense: every"
        " rank stores all experts and computes them on all of its tokens. in_depth: version pairs, loop. Seconds:"
        " median and quartiles of rank 0. Bytes equal the formula.",
    )
    write_result(
        "07_ground_table",
        "The dispatch table of the script's first layer in its first step",
        ["K", "rank", "expert", "rows"],
        sorted(row for part in run_ranks(EP, dispatch_tables) for row in part),
    )
    write_result(
        "07_ground_timeline",
        "One layer on 2 ranks: what computes and what is sent",
        ["rank", "what", "start ms", "end ms"],
        with_waiting(run_ranks(2, timeline)),
        f"2 of {E} experts, {BUSY} tokens per rank, otherwise as in the table of seconds.",
    )
    results = Path(__file__).resolve().parents[1] / "results"
    if all(measured(f"07_ground_{name}", results) for name in ("table", "timeline")):
        figures()


if __name__ == "__main__":
    main()
