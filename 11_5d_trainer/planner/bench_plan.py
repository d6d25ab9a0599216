"""The planner against measurements: bytes by the trainer's meter, seconds of small layouts on this CPU.

    python 11_5d_trainer/planner/bench_plan.py   verifies, measures, writes the results 11_plan_* and the figures
    python 11_5d_trainer/planner/bench_plan.py --predict    only predictions, without a measurement, and draws
    python 11_5d_trainer/planner/bench_plan.py --published  of these only those with published values
    python 11_5d_trainer/planner/bench_plan.py --memory     only the bytes, which are the same on a busy machine
    python 11_5d_trainer/planner/bench_plan.py --ranking    only the order of layouts, after a few bytes
    python 11_5d_trainer/planner/bench_plan.py --figures    only draws

First the bytes: if bytes stored or sent are not exact, or a peak is off by more than 5 %, it ends with exit
code 1 and writes nothing. Then the predictions, and a ranking: layouts of one small model on 4 and on 8 ranks are
timed, beside the planner's order, with the rates that `plan.py --calibrate` measures on as many ranks just before.
Times are ratios to the fastest.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import planner_paths  # noqa: E402, F401  finds the trainer and the chapters
import plan  # noqa: E402
import plan_facts  # noqa: E402
import plan_figures  # noqa: E402
import plan_memory as pm  # noqa: E402
import plan_published  # noqa: E402
import plan_rules  # noqa: E402
import plan_search  # noqa: E402
import plan_time  # noqa: E402
from harness.figures import write_figure  # noqa: E402
from harness.ranks import run_ranks  # noqa: E402
from harness.report import write_result  # noqa: E402
from llama import LlamaConfig  # noqa: E402
from options import Config  # noqa: E402
from test_plan_memory import BASE, LAYOUTS, SIZES, all_of, check_layout  # noqa: E402

# Large enough that its matmuls, not the interpreter, take the time.
RANKED_SIZES = LlamaConfig(vocab_size=256, hidden=256, layers=4, heads=8, kv_heads=4, intermediate=704)
RANKED_BASE = BASE | {"seq_len": 128, "global_batch": 16, "micro_batch": 2}
RANKED = [
    {},
    {"zero": 1},
    {"zero": 3},
    {"recompute": "full"},
    {"micro_batch": 1},
    {"tp": 2},
    {"tp": 4},
    {"tp": 4, "sequence_parallel": True, "recompute": "full"},
    {"cp": 4, "cp_kind": "ring"},
    {"pp": 2},
    {"pp": 4},
    {"pp": 4, "schedule": "naive"},
]


def seconds(words: dict[str, Any], sizes: Any) -> float:
    """A step's time on this rank: the median of three means of two."""
    import step as step_module
    import torch.distributed as dist
    from _plan_meter import made

    me, batches = made(words, sizes)
    times = []
    for steps in (1, 2, 2, 2):  # the first is not counted
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step_module.train_step(me, batches)
        dist.barrier()
        times.append((time.perf_counter() - begin) / steps)
    return sorted(times[1:])[1]


def memory_rows(chosen: dict[int, list[dict[str, Any]]] = LAYOUTS) -> list[list[Any]]:
    """[layout, predicted peak, measured peak, deviation in %]. Exits with 1 if a value is off."""
    rows = []
    for ranks, layouts in chosen.items():
        options = [BASE | layout for layout in layouts]
        results = run_ranks(ranks, all_of, options, SIZES, timeout=300.0)
        for i, words in enumerate(options):
            config, meter = Config(**words), results[0][i]
            layout, moe = pm.Layout.of(config, SIZES, ranks), config.mixture(SIZES)
            check_layout(f"{ranks} ranks {layouts[i]}", SIZES, layout, moe, meter)
            got, want = sum(pm.peak(SIZES, moe, layout, meter["rank"]).values()), meter["peak"]
            name = ", ".join(f"{key} {value}" for key, value in layouts[i].items()) or "plain"
            rows.append([f"{ranks} ranks: {name}", got, want, round(100 * (got / want - 1), 2) or 0.0])
    return rows


def ranks_of(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    return [order.index(i) for i in range(len(values))]


def calibrated(ranks: int) -> plan_time.Cluster:
    """This machine as a cluster, calibrated with so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/machine.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        script = str(ROOT / "11_5d_trainer" / "planner" / "plan.py")
        subprocess.run([*launch, script, "--calibrate", file], check=True, stdout=subprocess.DEVNULL)
        return plan_time.read_cluster(file)


def ranking_rows(P: int) -> tuple[list[list[Any]], float]:
    """[ranks, layout, measured, predicted], both over their fastest, and Spearman's rank correlation."""
    cluster, options = calibrated(P), [RANKED_BASE | layout for layout in RANKED]
    # One call each: the groups of a layout, and their threads, are destroyed before the next.
    measured = [max(run_ranks(P, seconds, words, RANKED_SIZES, timeout=300.0)) for words in options]
    layouts = [pm.Layout.of(Config(**words), RANKED_SIZES, P) for words in options]
    predicted = [plan_time.step_time(RANKED_SIZES, None, layout, cluster).seconds for layout in layouts]
    n = len(RANKED)
    gaps = zip(ranks_of(measured), ranks_of(predicted), strict=True)
    correlation = 1 - 6 * sum((a - b) ** 2 for a, b in gaps) / (n * (n * n - 1))
    rows = [
        [P, plan_search.name(layout), round(m / min(measured), 2), round(p / min(predicted), 2)]
        for layout, m, p in sorted(zip(layouts, measured, predicted, strict=True), key=lambda row: row[1])
    ]
    return rows, correlation


def all_facts() -> list[plan_facts.Table]:
    """The tables of plan.py --facts, those with a published number in each row as one."""
    *several, activations, fits = plan_facts.tables()
    rows = [[title, *row] for title, _, rows in several for row in rows]
    return [("Published numbers", ["source", *several[0][1]], rows), activations, fits]


def draw_memory(axes: Any, result: dict[str, Any]) -> None:
    predicted, measured = [row[1] / 1e6 for row in result["rows"]], [row[2] / 1e6 for row in result["rows"]]
    top = max(measured) * 1.05
    axes.plot([0, top], [0, top], color="0.6", linewidth=1)
    axes.plot(measured, predicted, "o", markersize=4)
    axes.set(xlabel="measured peak, MB", ylabel="predicted peak, MB", xlim=(0, top), ylim=(0, top))


def figures() -> None:
    folder = "11_5d_trainer/figures"
    write_figure(f"{folder}/plan_memory.svg", ["11_plan_memory"], draw_memory)
    write_figure(f"{folder}/plan_layouts.svg", ["11_plan_layouts"], plan_figures.draw_heatmap, size=(9.5, 6.5))
    write_figure(f"{folder}/plan_bars.svg", ["11_plan_bars"], plan_figures.draw_bars, shape=(1, 2), size=(11, 4.2))


def predictions() -> None:
    """Results without a measurement: the best layouts by model and nodes, bytes and seconds of ten of them by
    purpose, and published values."""
    for name, (title, columns, rows) in zip(("numbers", "activations", "fits"), all_facts(), strict=True):
        write_result(f"11_plan_facts_{name}", title, columns, rows, "Assumptions: plan_facts.py.", computed=True)
    low, high = plan_published.error_bar()
    note = f"Throughput of a GPU; the clock's constants are {', '.join(f'{n} {v:g}' for n, v in constants())}. "
    note += f"Nine in ten held-out runs took {low:.2f} to {high:.2f} times the predicted seconds."
    title = "The planner's clock against published runs, by family"
    write_result("11_plan_published", title, *plan_published.summary(), note, computed=True)
    note = "Tokens per second and GPU, or the share of the family's first row. Sources and assumptions: published.json."
    write_result("11_plan_published_rows", "Every published run", *plan_published.rows(), note, computed=True)


def layouts() -> None:
    cluster = plan_time.read_cluster("h100-400g")
    batch, seq = 512, 8192
    note = (
        f"{cluster.name}, {batch} sequences of {seq} tokens a step. Predicted: nothing here was run on such a cluster."
    )
    rows = plan_figures.heatmap_rows(cluster, batch, seq)
    columns = ["model", "nodes", "layout", "predicted MFU, %", "predicted s"]
    write_result("11_plan_layouts", "The best layout by model and number of nodes", columns, rows, note, computed=True)
    rules(cluster, note)
    task = plan_search.Task(plan_figures.SIZES["70B"], None, cluster, 64 * cluster.gpus_per_node, batch, seq)
    rows = plan_figures.bar_rows(task, plan_search.search(task).best)
    title = "Bytes and seconds of the ten fastest layouts of 70B on 64 nodes"
    write_result("11_plan_bars", title, ["layout", "unit", "what", "predicted"], rows, note, computed=True)


def rules(cluster: plan_time.Cluster, note: str) -> None:
    title = "Rules of thumb: the planner's, and the playbook's ways beside its fastest layout"
    note += f' "The planner\'s rule" is the simplest layout within {100 * plan.TIE:g} % of the fastest; the last '
    note += "column is relative to the fastest itself, which may be another one."
    write_result("11_plan_rules", title, plan_rules.COLUMNS, plan_rules.rows(cluster), note, computed=True)


def constants() -> list[tuple[str, float]]:
    return list(zip(plan_published.CONSTANTS, plan_published.now(), strict=True))


def ranking() -> None:
    (on_4, four), (on_8, eight) = ranking_rows(4), ranking_rows(8)
    note = f"Rank correlation {four:.2f} on 4 ranks and {eight:.2f} on 8. Ratios of one run, to the fastest layout."
    columns = ["ranks", "layout", "measured", "predicted"]
    write_result("11_plan_ranking", "Order of layouts on 4 and 8 CPU ranks", columns, on_4 + on_8, note)
    print(note)


def write_memory(rows: list[list[Any]]) -> None:
    columns = ["layout", "predicted peak, bytes", "measured peak, bytes", "off, %"]
    write_result("11_plan_memory", "The planner's peak against the trainer's", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    only = parser.add_mutually_exclusive_group()
    for what in ("predict", "published", "memory", "ranking", "figures"):
        only.add_argument(f"--{what}", action="store_true")
    args = parser.parse_args()
    if args.figures:
        figures()
        return
    if args.memory:
        write_memory(memory_rows())
        return
    if args.ranking:
        memory_rows({2: LAYOUTS[2][:4]})
        ranking()
        return
    everything = not (args.predict or args.published)
    if everything:
        write_memory(memory_rows())
    predictions()
    if args.published:
        return
    layouts()
    if everything:
        ranking()
    figures()


if __name__ == "__main__":
    main()
