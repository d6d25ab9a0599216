# ruff: noqa: E402 -- the harness and the trainer must be on the path before they are imported
"""The front page's picture of a run of `make train`: its loss curve, and the text that the model writes at the end.

    python book/train_figure.py runs/20261127-140901   takes a run into results/, then draws it
    python book/train_figure.py                        draws book/figures/train.svg again from results/

The run has to be a whole one of `make train` with its own options, and later than the commit that the result names.
Nothing that depends on the speed of the machine is taken.
"""

import json
import sys
from html import escape
from pathlib import Path
from statistics import fmean
from subprocess import run

from front_figure import DARK, GREY

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "11_5d_trainer")]
from harness.figures import read_result
from harness.report import write_result

PAGE = Path(__file__).parent / "figures" / "train.svg"
PROMPT = 32  # bytes of the validation text, which the model continues
EVERY = 50  # steps of training whose mean loss is a point
BLUE, RED, BRIGHT = "#0072b2", "#d55e00", "#56b4e9"  # training and the model's own text, validation; on a dark page
WIDE = 60  # characters of a line of the sample


def take(folder: Path) -> None:
    """Write what the figure needs of a run into results/. SystemExit with one line if it is another kind of run."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    config = json.loads((folder / "config.json").read_text())
    if config["preset"] != "tiny" or config["data"] or lines[-1]["step"] != config["steps"]:
        sys.exit(f"train_figure.py: {folder} is not a whole run of `make train` without options")
    commit = run(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"], capture_output=True, text=True, check=True)
    if (folder / "config.json").stat().st_mtime < int(commit.stdout):
        sys.exit(f"train_figure.py: {folder} is older than the last commit, and the result would name that one")
    (checkpoint,) = sorted((folder / "checkpoints").iterdir())[-1:]
    progress = json.loads((checkpoint / "manifest.json").read_text())["progress"]
    val = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    loss = {line["step"]: line["loss"] for line in lines if "loss" in line}
    rows = []
    for step in range(0, config["steps"] + 1, EVERY):
        before = [loss[n] for n in range(step - EVERY + 1, step + 1) if n in loss]
        rows.append([step, round(fmean(before), 4) if before else "", round(val[step], 4) if step in val else ""])
    title = f"`make train`, a model of {parameters(progress['sizes']):,} parameters on 2 CPU ranks"
    columns = ["step", f"loss, mean of {EVERY} steps", "validation loss"]
    write_result("front_train", title, columns, rows, "Nats per byte.")
    text = (folder / "sample.txt").read_text()
    row = [text[:PROMPT], text[PROMPT:], parameters(progress["sizes"])]
    write_result("front_sample", "What it writes", ["beginning", "continued", "parameters"], [row])


def parameters(sizes: dict[str, int]) -> int:
    from llama import LlamaConfig
    from model import full_shapes

    return sum(shape.numel() for shape in full_shapes(LlamaConfig(**sizes), None).values())


def wrapped(prompt: str, text: str) -> list[list[tuple[str, str]]]:
    """Lines of pieces: (colour, words). Lines of the text are broken where they are too long, and control characters
    are shown as dots."""
    lines: list[list[tuple[str, str]]] = [[]]
    for at, character in enumerate(prompt + text):
        if character == "\n" or sum(len(words) for _, words in lines[-1]) == WIDE:
            lines.append([])
        if character == "\n":
            continue
        colour = GREY if at < len(prompt) else BLUE
        shown = character if character.isprintable() else "·"
        if lines[-1] and lines[-1][-1][0] == colour:
            shown = lines[-1].pop()[1] + shown
        lines[-1].append((colour, shown))
    return lines


def drawing() -> str:
    rows = read_result("front_train")["rows"]
    prompt, text, num_params = read_result("front_sample")["rows"][0]
    lines = wrapped(prompt, text)
    left, right, top, bottom = 34, 320, 40, 210
    last, most = rows[-1][0], 6.0

    def place(step: int, loss: float) -> str:
        return f"{left + (right - left) * step / last:.1f},{bottom - (bottom - top) * loss / most:.1f}"

    training = " ".join(place(step, loss) for step, loss, _ in rows if loss != "")
    dots = [place(step, loss).split(",") for step, _, loss in rows if loss != ""]
    width, height = 840, max(bottom, 46 + 17 * len(lines)) + 26
    bright = f'[fill="{BLUE}"] {{ fill: {BRIGHT} }} [stroke="{BLUE}"] {{ stroke: {BRIGHT} }}'
    dark = DARK.replace("</style>", f"@media (prefers-color-scheme: dark) {{ {bright} }}</style>")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{GREY}">\n{dark}',
        f'<text x="{left}" y="18">loss of a model of {num_params:,} parameters, nats per byte</text>',
        f'<path d="M{left},{top} V{bottom} H{right}" fill="none" stroke="{GREY}"/>',
        *(
            f'<text x="{left - 6}" y="{bottom - (bottom - top) * n / most + 4:.0f}" text-anchor="end">{n}</text>'
            for n in (0, 2, 4, 6)
        ),
        f'<text x="{left}" y="{bottom + 18}">step 0</text>',
        f'<text x="{right}" y="{bottom + 18}" text-anchor="end">{last:,}</text>',
        f'<polyline points="{training}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>',
        *(f'<circle cx="{x}" cy="{y}" r="3" fill="{RED}"/>' for x, y in dots),
        f'<text x="{right}" y="{top + 14}" text-anchor="end">line: training loss, mean of {EVERY} steps</text>',
        f'<text x="{right}" y="{top + 32}" text-anchor="end">dots: validation loss, from {rows[0][2]:.2f} '
        f"to {rows[-1][2]:.2f}</text>",
        f'<text x="370" y="18">grey: prompt, {PROMPT} characters of a file not trained on; blue: generated</text>',
    ]
    for n, line in enumerate(lines):
        spans = "".join(f'<tspan fill="{colour}">{escape(words)}</tspan>' for colour, words in line)
        parts.append(f'<text x="370" y="{46 + 17 * n}" font-family="monospace" xml:space="preserve">{spans}</text>')
    parts.append(
        f'<text x="370" y="{height - 8}">each process stores {16 * num_params / 1e6:.1f} MB '
        f"and sends {4 * num_params / 1e6:.1f} MB of gradients a step</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take(Path(sys.argv[1]))
    PAGE.write_text(drawing())
