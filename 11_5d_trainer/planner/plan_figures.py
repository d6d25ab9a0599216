"""The planner's figures: where the bytes and the seconds of the fastest layouts go, and the best layout by model and
number of nodes. bench_plan.py draws them from results/; plan.py --figure draws the first for any question.

    python 11_5d_trainer/planner/plan.py --model llama3-70b --nodes 64 --figure bars.svg
"""

from pathlib import Path
from typing import Any

import planner_paths  # noqa: F401  finds the trainer and the chapters
from llama import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, LlamaConfig
from options import UsageError
from plan_memory import Layout, full_places, peak
from plan_search import GB, Candidate, Task, name, search
from plan_time import Cluster

SIZES = {
    "1B": LlamaConfig(128256, 2048, 16, 32, 8, 8192, tied=True),
    "3B": LlamaConfig(128256, 3072, 28, 24, 8, 8192, tied=True),
    "8B": LLAMA3_8B,
    "13B": LlamaConfig(32000, 5120, 40, 40, 40, 13824),
    "70B": LLAMA3_70B,
    "175B": LlamaConfig(51200, 12288, 96, 96, 96, 32768),
    "405B": LLAMA3_405B,
}
NODES = tuple(2**i for i in range(10))
NOTHING = "does not fit"
ACTIVATIONS = {"blocks", "last norm", "log-probabilities", "embedding", "RoPE tables"}  # the rest is "other"
STATES = ("weights", "gradients", "optimizer states")


def short(layout: Layout) -> str:
    """The axes in use."""
    axes = {"dp": layout.dp, "tp": layout.tp, "cp": layout.cp, "pp": layout.pp}
    words = [f"{axis}{size}" for axis, size in axes.items() if size > 1]
    return " ".join([*words, f"z{layout.zero}"])


def heatmap_rows(cluster: Cluster, global_batch: int, seq_len: int) -> list[list[Any]]:
    """[model, nodes, best layout or "does not fit", its predicted MFU in %, its seconds]."""
    rows: list[list[Any]] = []
    for model, sizes in SIZES.items():
        for nodes in NODES:
            task = Task(sizes, None, cluster, nodes * cluster.gpus_per_node, global_batch, seq_len)
            best = search(task, top=1).best
            if not best:
                rows.append([model, nodes, NOTHING, 0.0, 0.0])
                continue
            mfu = 100 * best[0].step.mfu(best[0].layout, cluster)
            rows.append([model, nodes, short(best[0].layout), round(mfu, 1), round(best[0].step.seconds, 3)])
    return rows


def bar_rows(task: Task, candidates: list[Candidate]) -> list[list[Any]]:
    """[layout, "GB" or "s", what, how much], from the fastest layout down."""
    rows: list[list[Any]] = []
    for each in candidates:
        every = [peak(task.model, task.moe, each.layout, place) for place in full_places(task.model, each.layout)]
        parts = dict.fromkeys((*STATES, "activations", "other"), 0)
        for what, size in max(every, key=lambda bytes_: sum(bytes_.values())).items():
            part = "activations" if what in ACTIVATIONS else "other"
            parts[what if what in STATES else part] += size
        rows += [[name(each.layout), "GB", what, round(size / GB, 2)] for what, size in parts.items()]
        rows += [[name(each.layout), "s", what, round(seconds, 4)] for what, seconds in each.step.parts.items()]
    return rows


def draw_heatmap(axes: Any, result: dict[str, Any]) -> None:
    """Colour: MFU. Text: the layout."""
    import matplotlib

    cells = {(model, nodes): (layout, mfu) for model, nodes, layout, mfu, _ in result["rows"]}
    models = list(dict.fromkeys(model for model, _ in cells))
    nodes = list(dict.fromkeys(count for _, count in cells))
    most = max(mfu for _, mfu in cells.values())
    axes.set(xlim=(-0.5, len(nodes) - 0.5), ylim=(len(models) - 0.5, -0.5))
    image = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, most), "viridis")
    for y, model in enumerate(models):
        for x, count in enumerate(nodes):
            layout, mfu = cells[model, count]
            text = layout.replace(" ", "\n") if layout == NOTHING else f"{layout.replace(' ', chr(10))}\n{mfu:.0f} %"
            if layout == NOTHING:
                axes.text(x, y, text, ha="center", va="center", fontsize=6)
                continue
            axes.barh(y, 1, left=x - 0.5, height=1, color=image.to_rgba(mfu))
            ink = "white" if mfu < 0.45 * most else "black"
            axes.text(x, y, text, ha="center", va="center", fontsize=6, color=ink)
    axes.set_xticks(range(len(nodes)), [str(n) for n in nodes])
    axes.set_yticks(range(len(models)), models)
    axes.set(xlabel="nodes of 8 GPUs", ylabel="model")
    axes.grid(False)
    axes.figure.colorbar(image, ax=axes, label="predicted MFU, %")


def draw_bars(axes: Any, result: dict[str, Any]) -> None:
    """Two axes: bytes and seconds of each layout, stacked by purpose."""
    layouts = list(dict.fromkeys(row[0] for row in result["rows"]))
    for panel, unit, label in ((axes[0], "GB", "GB on the fullest GPU"), (axes[1], "s", "seconds of a step")):
        rows = [row for row in result["rows"] if row[1] == unit]
        ends = dict.fromkeys(layouts, 0.0)
        for what in dict.fromkeys(row[2] for row in rows):
            sizes = {layout: size for layout, _, part, size in rows if part == what}
            if any(sizes.values()):
                panel.barh(layouts, list(sizes.values()), left=[ends[layout] for layout in sizes], label=what)
            ends = {layout: ends[layout] + sizes[layout] for layout in sizes}
        panel.invert_yaxis()
        panel.set(xlabel=label)
        panel.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    axes[0].tick_params(axis="y", labelsize=7)
    axes[1].set_yticklabels([])


def write_bars(path: Path, rows: list[list[Any]]) -> None:
    """Raises UsageError without matplotlib, or for a file type that it cannot write."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(f"--figure {path} needs matplotlib, which is not installed; pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    draw_bars(axes, {"rows": rows})
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UsageError(f"--figure {path}: {str(error).splitlines()[0]}; use a name that ends in .svg") from None
    finally:
        plt.close(figure)
