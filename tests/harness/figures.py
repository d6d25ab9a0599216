"""From a result to the figure in a README, without a keyboard in between.

A benchmark calls `write_figure` after `write_result`. `draw` gets matplotlib axes and the named results and draws only
from them, so that a figure can always be drawn again. The SVG file carries a digest of the rows it was drawn from;
`stale` lists the figures whose results have changed since, and a test demands that there are none.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .report import ROOT

# In every chapter the same colour is the same thing. All of them, and GREY for words and axes, can be read on white and
# on black, as the background is transparent.
COLOURS = {
    "weights": "#0072b2",
    "gradients": "#d55e00",
    "optimizer": "#009e73",  # moments, master weights
    "activations": "#cc79a7",
    "messages": "#e69f00",
    "compute": "#56b4e9",
    "idle": "#8c8c8c",
}
GREY = "#808080"
DRAWN_FROM = re.compile(r"<!-- drawn from (?P<sources>[^:]+): (?P<digest>[0-9a-f]{16}) -->")


def read_result(name: str, root: Path = ROOT) -> dict[str, Any]:
    """The result NAME, "columns" and "rows" among its keys: measured on a GPU if there is one, else on a CPU."""
    files = sorted((root / "results").glob(f"{name}.*.json"), key=lambda file: (file.name.endswith(".cpu.json"), file))
    if not files:
        raise FileNotFoundError(f"no result is called {name}; run its benchmark first")
    return json.loads(files[0].read_text())


def digest(sources: Sequence[str], root: Path = ROOT) -> str:
    """16 hex digits that change when a number in one of the results does."""
    data = [[result["columns"], result["rows"]] for result in (read_result(name, root) for name in sources)]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def write_figure(
    path: str | Path,
    sources: Sequence[str],
    draw: Callable[..., None],
    *,
    shape: tuple[int, int] = (1, 1),
    size: tuple[float, float] | None = None,
    root: Path = ROOT,
) -> Path:
    """Draw `draw(axes, *results)` into the SVG file `path`, relative to the repository.

    `shape` (rows, columns) above (1, 1) hands over an array of axes; `size` is in inches. The same results give the
    same file, byte for byte.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"svg.hashsalt": "figures", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    style |= {"text.color": GREY, "axes.labelcolor": GREY, "axes.titlecolor": GREY, "axes.edgecolor": GREY}
    style |= {"xtick.color": GREY, "ytick.color": GREY, "axes.facecolor": "none", "savefig.transparent": True}
    style |= {"legend.facecolor": "none", "legend.edgecolor": "none"}
    with plt.rc_context(style | {"grid.alpha": 0.3, "svg.fonttype": "none"}):
        width, height = size or (5.5 * shape[1], 3.6 * shape[0])
        figure, axes = plt.subplots(*shape, figsize=(width, height), layout="constrained")
        draw(axes, *(read_result(name, root) for name in sources))
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    text = "\n".join(line.rstrip() for line in file.read_text().splitlines())
    file.write_text(f"{text}\n<!-- drawn from {', '.join(sources)}: {digest(sources, root)} -->\n")
    return file


def stale(root: Path = ROOT) -> list[str]:
    """Figures that were drawn from other numbers than the results now hold, one line each."""
    found = []
    for file in sorted(root.glob("[01]*/figures/*.svg")):
        drawn = DRAWN_FROM.search(file.read_text())
        if drawn and digest(drawn["sources"].split(", "), root) != drawn["digest"]:
            found.append(f"{file.relative_to(root)} is older than {drawn['sources']}")
    return found
