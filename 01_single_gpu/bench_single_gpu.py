"""The step of the ground floor: its bytes from one change to the next, and its time against plain and in_depth.

Verified first: loss, gradients and weights are those of the plain form, and all bytes are those of the formulas.

    python bench_single_gpu.py            measure, write the results, draw the figures
    python bench_single_gpu.py --figures  draw the figures again
"""

import math
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import single_gpu
import torch
from harness.figures import COLOURS, write_figure
from harness.report import paired, write_result
from llama import Llama as LlamaInDepth
from llama import LlamaConfig
from single_gpu import Llama, Meter, Sizes, adamw, draw_batch, plain_attention
from training_step import adamw as adamw_in_depth
from training_step import train_step as train_step_in_depth

C, B, S, M = Sizes(H=128, L=4, N=4, K=2, F=344, D=32), 2, 256, 2
SEQUENCES = (64, 128, 256, 512, 1024)
POINTS, REPEATS = 150, 15


class Course(Meter):
    """Notes at every change what the gradients take and which phase the step is in."""

    def __init__(self, model: torch.nn.Module, there: list):
        self.weights, self.phase, self.rows, self.gradients = list(model.parameters()), "forward", [], 0
        super().__init__(there)

    def change(self, key: int, size: int) -> None:
        super().change(key, size)
        self.rows.append((self.phase, self.gradients, self.course[-1]))

    def __torch_dispatch__(self, *call):
        self.gradients = sum(w.grad.nbytes for w in self.weights if w.grad is not None)
        return super().__torch_dispatch__(*call)


def course_of_a_step(recompute: bool) -> list[tuple[str, int, int]]:
    """(phase, bytes of gradients, bytes of all) after each change in the second step."""
    model, batch = Llama(C, recompute=recompute), draw_batch(M, B, S, seed=0)
    optimizer = adamw(model, 1e-3)
    single_gpu.train_step(model, optimizer, batch)
    loss_sum, clip = single_gpu.loss_sum, torch.nn.utils.clip_grad_norm_
    with Course(model, [batch, list(optimizer.state.values()), [(w, w.grad) for w in model.parameters()]]) as meter:

        def forward_then_backward(*args):
            meter.phase = "forward"
            loss = loss_sum(*args)
            meter.phase = "backward"
            return loss

        def then_the_update(*args):
            meter.phase = "update"
            return clip(*args)

        begin = len(meter.rows)
        single_gpu.loss_sum, torch.nn.utils.clip_grad_norm_ = forward_then_backward, then_the_update
        try:
            single_gpu.train_step(model, optimizer, batch)
        finally:
            single_gpu.loss_sum, torch.nn.utils.clip_grad_norm_ = loss_sum, clip
        return meter.rows[begin:]


def thinned(rows: list) -> list:
    """About POINTS of the rows: the highest of each stretch, so that no peak is lost."""
    width = math.ceil(len(rows) / POINTS)
    return [max(rows[i : i + width], key=lambda row: row[-1]) for i in range(0, len(rows), width)]


def kept(attention, recompute: bool, seq: int) -> int:
    model, batch = Llama(C, attention, recompute), draw_batch(1, 1, seq, seed=0)
    with Meter([batch, list(model.parameters())]) as meter:
        before, loss = meter.course[-1], single_gpu.loss_sum(model, *batch[0])
        after = meter.course[-1]
    assert math.isfinite(loss.item())
    return after - before


def draw_steps(axes, steps) -> None:
    W, highest = 4 * single_gpu.weights(C), max(row[-1] for row in steps["rows"]) / 2**20
    for panel, (recompute, title) in enumerate(((False, "everything kept"), (True, "blocks recomputed"))):
        rows = [row[1:] for row in steps["rows"] if row[0] == recompute]
        ax, at = axes[panel], range(len(rows))
        gradients, everything = ([row[column] / 2**20 for row in rows] for column in (1, 2))
        fixed, moments = W / 2**20, 3 * W / 2**20
        held = [moments + g for g in gradients]
        ax.fill_between(at, 0, fixed, step="post", color=COLOURS["weights"], label="weights")
        ax.fill_between(at, fixed, moments, step="post", color=COLOURS["optimizer"], label="moments")
        ax.fill_between(at, moments, held, step="post", color=COLOURS["gradients"], label="gradients")
        ax.fill_between(at, held, everything, step="post", color=COLOURS["activations"], label="activations")
        begins = [i for i in at if i == 0 or rows[i][0] != rows[i - 1][0]]
        for i in begins:
            ax.axvline(i, color=COLOURS["idle"], linewidth=0.6, linestyle=":")
            ax.text(i + 1, 1.28 * highest, rows[i][0], fontsize=7, rotation=90, va="top")
        ax.set(
            title=title, xlabel="allocations and releases, in order", ylim=(0, 1.3 * highest), xlim=(0, len(rows) + 4)
        )
        top = max(range(len(rows)), key=lambda i: everything[i])
        ax.annotate(f"peak {everything[top]:.1f} MiB", (top, everything[top]), fontsize=8, ha="center", va="bottom")
    axes[0].set_ylabel("MiB held")
    axes[0].legend(fontsize=7, loc="lower center", ncols=4)


def draw_sequences(axes, sequences) -> None:
    rows = sequences["rows"]
    at = [row[0] for row in rows]
    lines = (("plain attention", "messages", "s"), ("fused attention", "activations", "o"))
    for column, (label, colour, mark) in enumerate((*lines, ("fused, blocks recomputed", "compute", "^")), 1):
        axes.plot(at, [row[column] / 2**20 for row in rows], marker=mark, color=COLOURS[colour], label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens in a sequence", ylabel="MiB kept for backward")
    axes.set_xticks(at, [str(x) for x in at])
    axes.minorticks_off()
    axes.legend(fontsize=8)


def figures() -> None:
    write_figure("01_single_gpu/figures/step.svg", ["01_ground_step"], draw_steps, shape=(1, 2), size=(9.5, 3.8))
    write_figure("01_single_gpu/figures/sequence.svg", ["01_ground_sequence"], draw_sequences)


def wrong() -> str:
    """What is not as it should be, or nothing."""
    pairs = zip(single_gpu.six_steps(Sizes(), False), single_gpu.six_steps(Sizes(), True), strict=True)
    error = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()
    if not error <= 1e-10:
        return f"six steps are off by {error:.1e}"
    for recompute in (False, True):
        course = max(row[-1] for row in course_of_a_step(recompute))
        if course != single_gpu.peak_bytes(C, B, S, M, recompute)[0]:
            return f"recompute={recompute}: the peak is {course}, not {single_gpu.peak_bytes(C, B, S, M, recompute)}"
    for seq in SEQUENCES:
        for attention, recompute, fused in WAYS:
            if kept(attention, recompute, seq) != single_gpu.kept_bytes(C, 1, seq, recompute, fused):
                return f"{seq} tokens: {attention.__name__}, recompute={recompute}: other bytes than the formula's"
    return ""


WAYS = (
    (plain_attention, False, False),
    (single_gpu.fused_attention, False, True),
    (single_gpu.fused_attention, True, True),
)


def main() -> int:
    if "--figures" in sys.argv:
        figures()
        return 0
    torch.set_num_threads(1)  # steadier on a CPU that others use too
    if complaint := wrong():
        print(f"bench_single_gpu.py: {complaint}", file=sys.stderr)
        return 1

    batch = draw_batch(M, B, S, seed=0)
    whole = [tuple(torch.cat(x) for x in zip(*batch, strict=True))]
    ground, again, plain = Llama(C), Llama(C, recompute=True), Llama(C, plain_attention)
    depth = LlamaInDepth(LlamaConfig(C.V, C.H, C.L, C.N, C.K, C.F))
    steps = {
        model: partial(step, model, optimizer, data)
        for model, optimizer, data, step in (
            (ground, adamw(ground, 1e-4), batch, single_gpu.train_step),
            (again, adamw(again, 1e-4), batch, single_gpu.train_step),
            (plain, adamw(plain, 1e-4), whole, single_gpu.train_step),
            (depth, adamw_in_depth(depth, 1e-4), batch, train_step_in_depth),
        )
    }
    rows = [
        ["plain attention, the whole batch at once", plain, single_gpu.kept_bytes(C, M * B, S, fused=False)],
        ["fused attention, two micro-batches", ground, single_gpu.kept_bytes(C, B, S)],
        ["the same, blocks recomputed", again, single_gpu.kept_bytes(C, B, S, True)],
        ["in_depth (fused AdamW)", depth, single_gpu.kept_bytes(C, B, S)],
    ]
    base = single_gpu.flops(C, B, S)
    write_result(
        "01_ground",
        f"A step of {M * B} sequences of {S} tokens; {single_gpu.weights(C) / 1e6:.1f} million weights",
        ["step", "seconds / two micro-batches", "FLOPs / two micro-batches", "bytes kept for backward"],
        [
            [
                what,
                1 if model is ground else paired(steps[model], steps[ground], repeats=REPEATS),
                single_gpu.flops(C, B, S, True) / base if model is again else 1,
                size,
            ]
            for what, model, size in rows
        ],
        notes=f"fp32, 1 CPU thread, AdamW and clipping; median of {REPEATS} pairs (quartiles). Bytes by the formula, "
        "which is checked against what is allocated.",
    )
    write_result(
        "01_ground_step",
        "Bytes over one step, the highest of every few changes",
        ["recomputed", "phase", "gradients", "all"],
        [[recompute, *row] for recompute in (False, True) for row in thinned(course_of_a_step(recompute))],
    )
    write_result(
        "01_ground_sequence",
        "Bytes kept for backward of one sequence, formula and measurement equal",
        ["tokens", "plain attention", "fused attention", "fused, blocks recomputed"],
        [[seq, *(kept(attention, again, seq) for attention, again, _ in WAYS)] for seq in SEQUENCES],
    )
    figures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
