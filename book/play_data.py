"""What the pages to play with show: tables that the chapters' own code computed. JavaScript draws them.

schedules   every schedule of chapter 06 by its simulator, for p ranks, m micro-batches and four kinds of times
memory      the planner's bytes at the peak, part by part, for layouts of three models
ring        which block a rank of chapter 05's ring has in which round, and the pairs it computes
experts     where chapter 07's router sends the tokens of a small batch, and the dispatch table
planner     the pages that chapter 11's planner writes itself (`plan.py --html`), for two models
"""

import contextlib
import io
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLAYS = {
    "schedules": "Pipeline schedules",
    "memory": "Memory of a GPU",
    "ring": "Ring attention, round by round",
    "experts": "Tokens to their experts",
    "planner": "Which layout?",
}
PLANS = {
    "plan_8b_on_8": "--model llama3-8b --cluster h100x8 --tokens 1048576",
    "plan_70b_on_64": "--model llama3-70b --cluster h100-400g --nodes 8",
}

# ------------------------------------------------------------------------------------------------------- schedules

TIMES = {
    "F = B = W": (1, 1, 1, 0),
    "W a little shorter": (1, 1.2, 0.8, 0),
    "messages take a third of F": (1, 1, 1, 1 / 3),
    "attention is most: B = 2 F, W = F / 2": (1, 2, 0.5, 0),
}
RANKS, MICRO_BATCHES = (2, 4, 8), (2, 4, 8, 16, 32)


def path() -> None:
    """Put the chapters on the path: their core files, and by the trainer's own module their depths."""
    for folder in ("05_context_parallel", "07_expert_parallel", "11_5d_trainer", "11_5d_trainer/planner"):
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))


def schedule(name: str, p: int, m: int, times: tuple[float, ...]) -> dict[str, Any] | None:
    """Actions of every rank as [kind, stage, micro-batch, start, end]; None if there is no such schedule."""
    path()
    import paths  # noqa: F401
    from schedule_simulator import ScheduleError, Times, simulate
    from schedules import FOLDED, LOOPED, build

    stages = 2 if name in LOOPED + FOLDED else 1
    try:
        made = build(name, p, m, stages)
    except (ScheduleError, ValueError):
        return None
    f, b, w, message = (time / stages for time in times)  # a stage is thinner where a rank has two
    timeline = simulate(made, Times(f, b, w, message * stages))
    ranks = [
        [[a.kind, a.stage, a.micro_batch, round(s, 2), round(e, 2)] for a, s, e in zip(*rank, strict=True)]
        for rank in zip(made.actions, timeline.start, timeline.end, strict=True)
    ]
    held = [count / stages for count in timeline.peak_activations]
    summary = {
        "length": timeline.makespan,
        "bubble": timeline.bubble_ratio,  # of the compute time
        "held": held,
        "stages": made.stages,
    }
    return summary | {"ranks": ranks}


def schedules() -> dict[str, Any]:
    path()
    import paths  # noqa: F401
    from schedules import SCHEDULES

    names = [name for name in SCHEDULES if name != "auto"]
    found = {}
    for name, p, m, (kind, times) in product(names, RANKS, MICRO_BATCHES, TIMES.items()):
        if made := schedule(name, p, m, times):
            found[f"{name}|{p}|{m}|{kind}"] = made
    return {
        "choices": {"schedule": names, "ranks": RANKS, "micro-batches": MICRO_BATCHES, "times": [*TIMES]},
        "rows": found,
    }


# ---------------------------------------------------------------------------------------------------------- memory

LAYOUTS = {
    "model": ("llama3-8b", "llama3-70b", "smollm-1.7b"),
    "data": (1, 8, 64),
    "tensor": (1, 2, 4, 8),
    "pipeline": (1, 4, 8),
    "ZeRO": (1, 2, 3),
    "recomputation": ("none", "full"),
    "tokens": (4096, 16384),
}


def memory_of(model: str, dp: int, tp: int, pp: int, zero: int, recompute: str, tokens: int) -> dict[str, int] | None:
    """Bytes at the peak of the fullest rank, by part; None if the trainer would refuse the layout."""
    path()
    import paths  # noqa: F401
    from model import PRESETS
    from plan_memory import Layout, peak

    if zero == 3 and pp > 1:
        return None
    common = {"micro_batches": 8, "seq_len": tokens, "recompute": recompute, "precision": "bf16-master"}
    layout = Layout(dp=dp, tp=tp, sequence_parallel=tp > 1, pp=pp, zero=zero, **common)
    ranks = [
        peak(PRESETS[model], None, layout, rank) for rank in range(0, pp, max(pp - 1, 1))
    ]  # the ends are the fullest
    return {name: size for name, size in max(ranks, key=lambda parts: sum(parts.values())).items() if size}


def memory() -> dict[str, Any]:
    rows = {"|".join(map(str, values)): memory_of(*values) for values in product(*LAYOUTS.values())}
    return {"choices": LAYOUTS, "rows": {key: parts for key, parts in rows.items() if parts}}


# ------------------------------------------------------------------------------------------------------------ ring


def round_of(layout: str, P: int, number: int) -> list[dict[str, Any]]:
    """What each rank does in a round: whose block it has, and the pairs (query chunk, key chunk) that it computes."""
    path()
    from ring_attention import token_positions, visible_slices

    ranks = []
    for rank in range(P):
        owner = (rank - number) % P
        mine, theirs = (token_positions(layout, 2 * P, r, P).tolist() for r in (rank, owner))  # a token for each chunk
        what = visible_slices(layout, rank, owner, 2)
        pairs = []
        if what:
            queries, keys, triangle = what
            pairs = [[q, k] for q in mine[queries] for k in theirs[keys] if not triangle or k <= q]
        ranks.append({"owner": owner, "pairs": pairs})
    return ranks


def ring() -> dict[str, Any]:
    choices = {"layout": ("zigzag", "contiguous"), "ranks": (2, 3, 4, 6, 8)}
    rows = {
        f"{layout}|{P}": [round_of(layout, P, number) for number in range(P)]
        for layout, P in product(*choices.values())
    }
    return {"choices": choices, "rows": rows}


# --------------------------------------------------------------------------------------------------------- experts


def dispatch(P: int, K: int, load: str, tokens: int = 8, experts_of_a_rank: int = 2) -> dict[str, Any]:
    """The experts of every rank's tokens, by the chapter's router, and rows from each rank to each expert."""
    path()
    import torch
    from expert_parallel import route

    E, H = P * experts_of_a_rank, 16
    draw = torch.Generator().manual_seed(7)
    gate = torch.randn(E, H, generator=draw)
    ranks = []
    for _ in range(P):
        x = torch.randn(tokens, H, generator=draw)
        if load == "skewed":
            x = x + gate[1]  # every token looks like what expert 1 is for
        chosen, weights, _ = route(x, gate, K)
        table = torch.bincount(chosen.flatten(), minlength=E)
        ranks.append({"experts": chosen.tolist(), "weights": weights.tolist(), "table": table.tolist()})
    for rank in ranks:
        rank["weights"] = [[round(w, 2) for w in row] for row in rank["weights"]]
    return {"experts": E, "ranks": ranks}


def experts() -> dict[str, Any]:
    choices = {"ranks": (2, 4), "experts of a token": (1, 2), "load": ("by chance", "skewed")}
    rows = {f"{P}|{K}|{load}": dispatch(P, K, load) for P, K, load in product(*choices.values())}
    return {"choices": choices, "rows": rows}


def write_data(folder: Path) -> None:
    """As scripts: a page that was opened as a file may not read another file in any other way."""
    path()
    import plan

    for name, options in PLANS.items():
        with contextlib.redirect_stdout(io.StringIO()) as said:
            if plan.main([*options.split(), "--html", str(folder / f"{name}.html")]):
                raise ValueError(f"plan.py {options}: {said.getvalue()}")
    for name in PLAYS.keys() - {"planner"}:
        data = json.dumps(globals()[name](), separators=(",", ":"))
        (folder / f"{name}_data.js").write_text(f"const DATA = {data};\n")


if __name__ == "__main__":
    write_data(Path(sys.argv[1]))
