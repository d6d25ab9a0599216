"""The ground floor against every expert on every token, and against in_depth; and the data of the chapter's figures.

    python 07_expert_parallel/bench_expert_parallel.py               4 ranks on the CPU: ratios, bytes, figures
    python 07_expert_parallel/bench_expert_parallel.py --figures     draw the figures again from the results

First the script's own check must find nothing wrong, and all three layers must agree, forward and backward, on output,
gradients and bytes; only then is anything timed.
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

import expert_parallel as ep
import torch
import torch.distributed as dist
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication, storage_bytes
from harness.oracle import assert_same_named
from harness.ranks import run_ranks
from harness.report import paired, write_result
from moe_layer import MoE, MoEConfig
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

P, E, T, H, FF = 4, 16, 512, 128, 256  # ranks, experts, tokens of a rank, hidden, inside an expert
BALANCE = 0.1  # factor of the balance loss, the same in all three
BUSY = 2048  # tokens of a rank in the timeline, so that its parts can be seen


def weights_of(P: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (E, H), "w1": (E, FF, H), "w3": (E, FF, H), "w2": (E, H, FF)}
    whole = {name: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return ep.my_weights(whole, rank, P)


def tokens_of(rank: int, count: int = T) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(10 + rank))


Step = Callable[[], dict[str, Tensor]]


def step_of(way: str, K: int, count: int = T) -> Step:
    """Forward and backward of one layer on this rank; returns output and gradients, those of the experts held here."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = tokens_of(rank, count).requires_grad_()
    w = weights_of(1 if way == "naive" else world, 0 if way == "naive" else rank)
    if way == "in_depth":
        layer = MoE(MoEConfig(H, FF, E, K, balance=BALANCE), group, group)
        parameters = {name.split(".")[-2]: p for name, p in layer.named_parameters()}
        for name, p in parameters.items():
            p.data.copy_(w[name])
        w = parameters

    def step() -> dict[str, Tensor]:
        for t in (x, *w.values()):
            t.grad = None
        if way == "in_depth":  # its balance loss is attached to its output
            y = layer(x)
            y.square().sum().backward()
        else:
            y, share, _ = {"naive": ep.moe_naive, "ground": ep.moe}[way](x, *w.values(), K, group)
            (y.square().sum() + BALANCE * share).backward()
        return {"y": y.detach(), "x": x.grad, **{name: t.grad for name, t in w.items()}}

    step.held = storage_bytes(t for name, t in w.items() if name != "gate")
    return step


def verify(K: int) -> None:
    """Raises unless the script's check is satisfied, and ground floor and in_depth equal the naive layer."""
    with contextlib.redirect_stdout(io.StringIO()):
        wrong = ep.check(K, 8, dist.group.WORLD, "cpu")
    if wrong:
        raise ValueError("; ".join(wrong))
    rank = dist.get_rank()
    want = step_of("naive", K)()
    for name in ep.EXPERTS:  # the naive way leaves a share of every expert's gradient on every rank
        dist.all_reduce(want[name])
        want[name] = want[name].chunk(P)[rank]
    for way in ("ground", "in_depth"):
        assert_same_named(step_of(way, K)(), want, 2e-5, f"{way}, K = {K}:", rank)


def measure(K: int) -> dict:
    """Of this rank: ratios of seconds; bytes; and multiplications, counted."""
    ways = {way: step_of(way, K) for way in ("naive", "ground", "in_depth")}
    found = {"held": {way: step.held for way, step in ways.items()}, "flops": {}, "sent": {}}
    for way, step in ways.items():
        with FlopCounterMode(display=False) as counter, communication() as wire:
            step()
        found["flops"][way], found["sent"][way] = counter.get_total_flops(), wire.sent["all_to_all"]
    others = ("naive", "in_depth")
    found |= {other: paired(ways["ground"], ways[other], repeats=9, setup=dist.barrier) for other in others}
    experts = ep.route(tokens_of(dist.get_rank()), weights_of(1, 0)["gate"], K)[0]
    found["leave"] = int((experts // (E // P) != dist.get_rank()).sum())
    found["arrive"] = sum(
        int((ep.route(tokens_of(r), weights_of(1, 0)["gate"], K)[0] // (E // P) == dist.get_rank()).sum())
        for r in range(P)
        if r != dist.get_rank()
    )
    return found


# -------------------------------------------------------------------------------------------------- data of figures


def holdings() -> tuple[list, list]:
    """[rank, expert, bytes] of every expert this rank holds a storage of, naive and expert parallel, layer 0."""
    rank, whole = dist.get_rank(), ep.whole_weights(8, "cpu")
    found = []
    for shards in (1, P):
        w = ep.my_weights(whole, rank if shards > 1 else 0, shards)
        held = [sum(w[f"0.{name}"][i].nbytes for name in ep.EXPERTS) for i in range(len(w["0.w1"]))]
        first = next(e for e in range(8) if torch.equal(whole["0.w1"][e], w["0.w1"][0]))
        found.append([[rank, first + i, size] for i, size in enumerate(held)])
    return tuple(found)


def dispatch_tables() -> list:
    """[K, rank, expert, rows] for this rank, as counted by the script in the first layer of its first step."""
    rank, rows = dist.get_rank(), []
    for K in (1, 2):
        kept, plain = [], ep.dispatch_table
        ep.dispatch_table = lambda *args, kept=kept, plain=plain: kept.append(plain(*args)) or kept[-1]
        w = ep.my_weights(ep.whole_weights(8, "cpu"), rank, P)
        ep.loss_of(w, *ep.text(0, rank, "cpu"), 1, partial(ep.moe, K=K, group=dist.group.WORLD))
        ep.dispatch_table = plain
        rows += [[K, rank, e, n] for e, n in enumerate(kept[0][1].flatten().tolist())]
    return rows


def timeline() -> list:
    """[what, start, end] in seconds of every part of a forward and backward pass on this rank, in order."""
    step, found = step_of("ground", 2, BUSY), []

    def timed(name: str) -> None:
        plain = getattr(ep, name)

        def run(*args):
            start = time.perf_counter()
            result = plain(*args)
            found.append([name, start, time.perf_counter()])
            return result

        setattr(ep, name, run)

    for name in ("route", "dispatch_table", "exchange_rows", "run_experts"):
        timed(name)
    for _ in range(5):  # the last one counts
        found.clear()
        dist.barrier()
        start = time.perf_counter()
        step()
        end = time.perf_counter()
    return [["step", start, end], *found]


def with_waiting(ranks: list[list]) -> list:
    """[rank, what, start, end] in milliseconds from the first start. A message begins when the last rank has come to
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
            if what in ("dispatch_table", "exchange_rows"):
                begin = min(max(a, everyone), b)
                message = "rows" if what == "exchange_rows" else "table"
                pieces += [["waiting", a, begin], [message, begin, b]]
            else:
                pieces.append([{"route": "router", "run_experts": "experts"}[what], a, b])
            at = b
        pieces.append(["sorting", at, end])
        rows += [[rank, what, round(1e3 * (a - zero), 3), round(1e3 * (b - zero), 3)] for what, a, b in pieces if b > a]
    return rows


# ----------------------------------------------------------------------------------------------------------- figures


def draw_holdings(axes, record: dict) -> None:
    titles = ("without: every rank, all experts", "expert parallel: each expert once")
    for ax, title, way in zip(axes, titles, ("naive", "expert parallel"), strict=True):
        for _, rank, expert, _ in (row for row in record["rows"] if row[0] == way):
            ax.barh(rank, 0.9, left=expert + 0.05, height=0.7, color=COLOURS["weights"])
            ax.text(expert + 0.5, rank, f"e{expert}", ha="center", va="center", color="white")
        total = sum(row[3] for row in record["rows"] if row[0] == way and row[1] == 0)
        ax.set(
            title=f"{title}\n{total:,} bytes on a rank", yticks=range(P), yticklabels=[f"rank {r}" for r in range(P)]
        )
        ax.set(xlim=(0, 8), xticks=[], ylim=(P - 0.4, -0.6))
        ax.grid(False)


def draw_tables(axes, record: dict) -> None:
    for ax, K in zip(axes, (1, 2), strict=True):
        rows = [row for row in record["rows"] if row[0] == K]
        most = max(row[3] for row in rows)
        for _, rank, expert, n in rows:
            home = expert // 2 == rank
            colour = COLOURS["compute"] if home else COLOURS["messages"]
            ax.barh(rank, 0.96, left=expert + 0.02, height=0.9, color=colour, alpha=0.15 + 0.85 * n / most)
            ax.text(expert + 0.5, rank, str(n), ha="center", va="center", color=GREY if n < most / 2 else "black")
        for border in (2, 4, 6):
            ax.axvline(border, color=GREY, linewidth=1.5)
        ax.set(title=f"K = {K}: rows to each expert (blue: they stay)", xlim=(0, 8), ylim=(P - 0.4, -0.6))
        ax.set(xticks=[e + 0.5 for e in range(8)], xticklabels=[f"e{e}" for e in range(8)])
        ax.set(yticks=range(P), yticklabels=[f"from rank {r}" for r in range(P)])
        ax.grid(False)


def draw_timeline(ax, record: dict) -> None:
    kinds = {  # colour, how strong, label
        "router": ("compute", 0.5, "router"),
        "table": ("messages", 0.5, "dispatch table: sort, count, exchange"),
        "rows": ("messages", 1.0, "rows travel"),
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
    ax.set(xlabel="milliseconds: forward and backward of one layer", title="What computes and what travels")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, labelcolor=GREY)
    ax.grid(False)


def figures() -> None:
    folder = "07_expert_parallel/figures"
    write_figure(f"{folder}/who_holds_what.svg", ["07_ground_held"], draw_holdings, shape=(1, 2), size=(10, 2.6))
    write_figure(f"{folder}/dispatch_table.svg", ["07_ground_table"], draw_tables, shape=(1, 2), size=(10, 2.8))
    write_figure(f"{folder}/timeline.svg", ["07_ground_timeline"], draw_timeline, size=(10, 3.6))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The ground floor of expert parallelism, measured.", allow_abbrev=False
    )
    parser.add_argument("--figures", action="store_true", help="only draw, from the results that are there")
    if parser.parse_args().figures:
        figures()
        return
    for K in (1, 2):
        run_ranks(P, verify, K, timeout=120)
    rows = []
    for K in (1, 2):
        ranks = run_ranks(P, measure, K, timeout=300)
        for rank, found in enumerate(ranks):
            bytes_sent = 2 * (found["leave"] + found["arrive"]) * H * 4 + (P - 1) * E // P * 8
            if found["sent"]["ground"] != bytes_sent:
                sys.exit(f"rank {rank} sends {found['sent']['ground']} bytes; the formula says {bytes_sent}")
            if found["held"]["ground"] * P != found["held"]["naive"]:
                sys.exit(f"rank {rank} holds {found['held']['ground']} of {found['held']['naive']} bytes of experts")
        total = {
            key: {way: sum(f[key][way] for f in ranks) for way in ("naive", "ground")} for key in ("held", "flops")
        }
        rows.append(
            [
                K,
                ranks[0]["naive"],
                ranks[0]["in_depth"],
                total["flops"]["ground"] / total["flops"]["naive"],
                total["held"]["ground"] / total["held"]["naive"],
                sum(f["leave"] for f in ranks) / (P * T),
                sum(f["sent"]["ground"] for f in ranks) / (P * T),
            ]
        )
    write_result(
        "07_ground",
        f"One layer of the ground floor, forward and backward, on {P} ranks",
        [
            "K",
            "seconds over naive",
            "seconds over in_depth",
            "multiplications over naive",
            "experts' bytes over naive",
            "rows that leave, per token",
            "bytes sent per token",
        ],
        rows,
        f"{E} experts, {T} tokens per rank, hidden size {H}, {FF} inside an expert, float32. Naive: every rank holds"
        " all experts and computes them on all of its tokens. in_depth: version pairs, loop. Seconds:"
        " median and quartiles of rank 0. Bytes equal the formula.",
    )
    before, after = zip(*run_ranks(P, holdings), strict=True)
    write_result(
        "07_ground_held",
        "Experts on each rank, layer 0 of the script's model",
        ["way", "rank", "expert", "bytes"],
        [["naive", *row] for part in before for row in part]
        + [["expert parallel", *row] for part in after for row in part],
    )
    write_result(
        "07_ground_table",
        "The dispatch table of the script's first layer in its first step",
        ["K", "rank", "expert", "rows"],
        sorted(row for part in run_ranks(P, dispatch_tables) for row in part),
    )
    write_result(
        "07_ground_timeline",
        "One layer on 2 ranks: what computes and what travels",
        ["rank", "what", "start ms", "end ms"],
        with_waiting(run_ranks(2, timeline)),
        f"2 of {E} experts, {BUSY} tokens per rank, otherwise as in the table of seconds.",
    )
    if all(
        (Path(__file__).resolve().parents[1] / "results" / f"07_ground_{name}.cpu.json").exists()
        for name in ("held", "table", "timeline")
    ):
        figures()


if __name__ == "__main__":
    main()
