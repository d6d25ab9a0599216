"""The loss curve of a run, drawn from its log: in the terminal, and as loss.svg in the run's folder.

    python 11_5d_trainer/curve.py runs/mine                  the curve of a run, also while it runs

The horizontal axis is the step, the vertical axis the loss per token in nats. A training step has the loss of
its few samples, so the points scatter; validation uses the same samples every time. Both are drawn
unsmoothed. The vertical axis begins at the smallest loss of the run, not at zero.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from xml.sax.saxutils import escape

Point = tuple[float, float]  # step, loss


def points(lines: Sequence[dict[str, Any]]) -> tuple[list[Point], list[Point]]:
    """Losses of training and of validation by step. Values that are not finite are left out."""
    found = [
        [(line["step"], line[key]) for line in lines if math.isfinite(line.get(key, math.nan))]
        for key in ("loss", "val_loss")
    ]
    return found[0], found[1]


def bounds(every: Sequence[Point]) -> tuple[float, float, float, float]:
    """First and last step, smallest and largest loss; the two of a pair always differ."""
    steps = [step for step, _ in every]
    losses = [loss for _, loss in every]
    return min(steps), max(max(steps), min(steps) + 1), min(losses), max(max(losses), min(losses) + 1e-9)


def in_terminal(lines: Sequence[dict[str, Any]], width: int = 72, height: int = 15) -> str:
    """The curve in plain characters, which every terminal and every log file can show."""
    training, validation = points(lines)
    if not (training or validation):
        return "no loss to draw"
    left, right, low, high = bounds([*training, *validation])
    rows = [[" "] * width for _ in range(height)]
    for mark, drawn in ((".", training), ("o", validation)):  # validation is drawn over training
        for step, loss in drawn:
            column = round((step - left) / (right - left) * (width - 1))
            row = round((high - loss) / (high - low) * (height - 1))
            rows[row][column] = mark
    labels = {0: f"{high:7.3f}", height - 1: f"{low:7.3f}"}
    drawing = [f"{labels.get(i, ''):7} |{''.join(row).rstrip()}" for i, row in enumerate(rows)]
    ends = f"{left}{f'step {right}':>{width - len(f'{left}')}}"
    legend = ". training   o validation   (nats per token)"
    return "\n".join([*drawing, f"{'':7} +{'-' * width}", f"{'':9}{ends}", f"{'':9}{legend}"])


# Readable on a white page and on a black one: the page's own colour for text, two colours of middling lightness.
STYLE = """text { font: 12px sans-serif; fill: #444 } .axis { stroke: #888; fill: none }
.training { stroke: #4a90d9; fill: none; stroke-width: 1 } .validation { fill: #d9534a }
@media (prefers-color-scheme: dark) { text { fill: #bbb } }"""


def as_svg(lines: Sequence[dict[str, Any]], title: str, width: int = 720, height: int = 360) -> str:
    """The curve as SVG."""
    training, validation = points(lines)
    if not (training or validation):
        return ""
    left, right, low, high = bounds([*training, *validation])
    edge = 56  # room for numbers
    foot = 34
    top = 34

    def place(point: Point) -> tuple[float, float]:
        step, loss = point
        x = edge + (step - left) / (right - left) * (width - edge - 16)
        y = top + (high - loss) / (high - low) * (height - top - foot)
        return round(x, 1), round(y, 1)

    line = " ".join(f"{x},{y}" for x, y in map(place, training))
    dots = "".join(f'<circle class="validation" cx="{x}" cy="{y}" r="3"/>' for x, y in map(place, validation))
    bottom = height - foot
    last = f"{validation[-1][1]:.3f}" if validation else f"{training[-1][1]:.3f}"
    first = min([*training, *validation])[1]
    said = escape(f"{title}: loss from {first:.3f} to {last} nats per token in {right} steps", {'"': "&quot;"})
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{said}">
<style>{STYLE}</style>
<path class="axis" d="M{edge},{top} V{bottom} H{width - 16}"/>
<text x="{edge}" y="20">{said}</text>
<text x="{edge - 6}" y="{top + 4}" text-anchor="end">{high:.2f}</text>
<text x="{edge - 6}" y="{bottom}" text-anchor="end">{low:.2f}</text>
<text x="{edge}" y="{height - 12}">{left}</text>
<text x="{width - 16}" y="{height - 12}" text-anchor="end">step {right}</text>
<text x="{width / 2}" y="{height - 12}" text-anchor="middle">line: training, dots: validation</text>
<polyline class="training" points="{line}"/>
{dots}
</svg>
"""


def bits_per_byte(nats_per_token: float, tokens_per_byte: float) -> float:
    """The loss in a unit that compares models of different vocabularies: a token of more bytes costs more."""
    return nats_per_token * tokens_per_byte / math.log(2)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"curve.py: {message}\n")


def main() -> None:
    parser = OneLineParser(description="Draw the loss curve of a run.")
    parser.add_argument("run", type=Path, help="its folder")
    run = parser.parse_args().run
    try:
        text = (run / "log.jsonl").read_text().splitlines()
    except OSError:
        parser.error(f"{run} holds no log.jsonl; give the folder of a run")
    lines = [json.loads(line) for line in text if line.endswith("}")]  # the last may be half written
    print(in_terminal(lines))
    try:
        (run / "loss.svg").write_text(as_svg(lines, run.name))
    except OSError as error:
        parser.error(f"{run / 'loss.svg'} cannot be written ({error.strerror})")


if __name__ == "__main__":
    main()
