"""From a result to the figure in a README, without manual steps.

A benchmark calls `write_figure` after `write_result`. `draw` gets matplotlib axes and the named results and
draws only from them, so that a figure can always be drawn again. The SVG file has a digest of the rows it was
drawn from, and of the code that drew it; `stale` lists the figures for which one of the two has changed
since, and a test requires that there are none. It has two decimals and one line per element: `compact`.
"""

import ast
import hashlib
import json
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import ROOT, measured, on_cpu

# A colour means the same in every chapter. All are distinguishable on white and on black, as the background
# is transparent. GREY, for text and axes, changes on a dark page: no grey has enough contrast on both.
COLOURS = {
    "weights": "#0072b2",
    "gradients": "#d55e00",
    "optimizer": "#009e73",  # moments, master weights
    "activations": "#cc79a7",
    "messages": "#e69f00",
    "compute": "#56b4e9",
    "idle": "#8c8c8c",
}
GREY = "#444444"
DARK = """@media (prefers-color-scheme: dark) {
[style*="fill: #444444"] { fill: #c8c8c8 !important } [style*="stroke: #444444"] { stroke: #c8c8c8 !important }
}"""
DRAWN_FROM = re.compile(
    r"<!-- drawn from (?P<sources>[^:]+): (?P<digest>[0-9a-f]{16}); "
    r"by (?P<file>\S+) (?P<name>\w+) (?P<shape>\d+x\d+) (?P<size>[\d.]+x[\d.]+): (?P<code>[0-9a-f]{16}) -->"
)


def read_result(name: str, root: Path = ROOT) -> dict[str, Any]:
    """The result NAME, "columns" and "rows" among its keys: computed, else of a GPU if there is one, else of a CPU."""
    from harness.computed import TABLES

    if name in TABLES:
        return TABLES[name]()
    records = sorted(measured(name, root / "results"), key=on_cpu)
    if not records:
        raise FileNotFoundError(f"no result is called {name}; run its benchmark first")
    return records[0]


def digest(sources: Sequence[str], root: Path = ROOT) -> str:
    """16 hex digits that change when a value in one of the results does."""
    data = [[result["columns"], result["rows"]] for result in (read_result(name, root) for name in sources)]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def faults(figure: Any) -> list[str]:
    """Faults of a figure: axes in which nothing is drawn, text outside of the picture."""
    found = [f"axes {i} are empty" for i, axes in enumerate(figure.axes) if not (axes.has_data() or axes.texts)]
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    # Tick labels beyond the ends of an axis exist but are not drawn; the layout makes room for the others.
    axles = [axle for axes in figure.axes for axle in (axes.xaxis, axes.yaxis)]
    ticks = [tick for axle in axles for tick in (*axle.get_major_ticks(), *axle.get_minor_ticks())]
    passed = {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    for text in figure.findobj(lambda artist: hasattr(artist, "get_text") and artist.get_visible()):
        box = text.get_window_extent()
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        if text.get_text().strip() and id(text) not in passed and not inside:
            found.append(f"{text.get_text()!r} is cut off")
    return found


def code_digest(file: Path, name: str) -> str:
    """16 hex digits of the function `name`, of all in its file that it uses, and of the style that all figures share.

    Only the program counts, not comments and layout.
    """
    mine, style = _definitions(file), _definitions(Path(__file__))
    words = [*_used(mine, name), *_used(style, "write_figure")]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _definitions(file: Path) -> dict[str, ast.stmt]:
    """What a file defines at its top level, by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id: node for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def _used(definitions: dict[str, ast.stmt], name: str) -> list[str]:
    """The text of a definition and of those that it uses, directly or not."""
    names, new = {name}, {name}
    while new:
        inner = {n.id for one in new for n in ast.walk(definitions[one]) if isinstance(n, ast.Name)}
        new = inner & definitions.keys() - names
        names |= new
    return [ast.unparse(definitions[one]) for one in sorted(names)]


def compact(svg: str) -> str:
    """The same picture in less text: two decimals, one line per element, and no unused ids."""
    svg = re.sub("<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    referred = set(re.findall(r"#(\w+)", svg))

    def tag(found: re.Match[str]) -> str:
        text = " ".join(found[0].split()).replace(' "', '"')
        text = re.sub(r' id="([\w.-]+)"', lambda name: name[0] if name[1] in referred else "", text)
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{round(float(number[0]), 2) + 0:g}", text)

    parts, open_groups = [], []
    svg = re.sub("<g/>", "", re.sub("<(?!!)[^>]*>", tag, svg))
    for part in re.split(r"(<g\b[^>]*(?<!/)>|</g>)", svg):
        if part.startswith("<g") and not part.endswith("/>"):
            open_groups.append(part)
        group = open_groups.pop() if part == "</g>" else part
        parts.append("" if group == "<g>" else part)
    text = "\n".join(line.strip() for line in "".join(parts).splitlines() if line.strip())
    return re.sub(r"(<(?:g|defs|clipPath)\b[^>]*(?<!/)>)\n|\n(?=</(?:g|defs|clipPath)>)", r"\1", text)


def write_figure(
    path: str | Path,
    sources: Sequence[str],
    draw: types.FunctionType,
    *,
    shape: tuple[int, int] = (1, 1),
    size: tuple[float, float] | None = None,
    root: Path = ROOT,
) -> Path:
    """Draw `draw(axes, *results)` into the SVG file `path`, relative to the repository. ValueError if it has `faults`.

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
        if wrong := faults(figure):
            raise ValueError(f"{path}: {'; '.join(wrong)}")
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    text = compact(file.read_text()).replace("</style>", f"\n{DARK}</style>", 1)
    code = Path(draw.__code__.co_filename).resolve()
    by = f"{code.relative_to(root.resolve()).as_posix()} {draw.__name__}"
    by += f" {shape[0]}x{shape[1]} {width:g}x{height:g}: {code_digest(code, draw.__name__)}"
    file.write_text(f"{text}\n<!-- drawn from {', '.join(sources)}: {digest(sources, root)}; by {by} -->\n")
    return file


def stale(root: Path = ROOT) -> list[str]:
    """Figures whose results or code have changed since they were drawn, one line each."""
    found = []
    for file in sorted(root.glob("[01]*/figures/*.svg")):
        text = file.read_text()
        drawn = DRAWN_FROM.search(text)
        if "<!-- drawn from" in text and not drawn:
            found.append(f"{file.relative_to(root)} does not say by which code it was drawn")
        if not drawn:  # a drawing without results; its chapter tests it
            continue
        if digest(drawn["sources"].split(", "), root) != drawn["digest"]:
            found.append(f"{file.relative_to(root)} is older than {drawn['sources']}")
        code = root / drawn["file"]
        if not code.exists() or drawn["name"] not in _definitions(code):
            found.append(f"{file.relative_to(root)} was drawn by {drawn['name']} of {drawn['file']}, which is gone")
        elif code_digest(code, drawn["name"]) != drawn["code"]:
            found.append(f"{file.relative_to(root)} was drawn by another {drawn['name']} than that of {drawn['file']}")
    return found
