"""A step of single_gpu.py: its bytes from one change to the next, and its time against naive attention and in_depth.

Verified first: the core file's losses, gradients and parameters match the reference, its bytes the formulas, and a
step of in_depth from the same weights has its loss and its gradients.

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
from harness.reference import FLOAT32, assert_same
from harness.report import paired, write_result
from llama import Llama as LlamaInDepth
from llama import LlamaConfig
from single_gpu import Llama, MemoryTracker, ModelConfig, adamw, fused_attention, get_batch, naive_attention
from training_step import adamw as adamw_in_depth
from training_step import train_step as train_step_in_depth

CONFIG = ModelConfig(hidden=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden=344)
B, S, M = 2, 256, 2
SEQUENCES = (64, 128, 256, 512, 1024)
POINTS, REPEATS = 150, 15


class PhaseTracker(MemoryTracker):
    """Also records, at every change, the bytes of the gradients and the phase of the step."""

    def __init__(self, model: torch.nn.Module, existing: list):
        self.params, self.phase, self.rows, self.gradients = list(model.parameters()), "forward", [], 0
        super().__init__(existing)

    def record(self, num_bytes: int) -> None:
        super().record(num_bytes)
        self.rows.append((self.phase, self.gradients, self.timeline[-1]))

    def __torch_dispatch__(self, *call):
        self.gradients = sum(p.grad.nbytes for p in self.params if p.grad is not None)
        return super().__torch_dispatch__(*call)


def timeline_of_a_step(recompute: bool) -> list[tuple[str, int, int]]:
    """(phase, bytes of gradients, bytes of all) after each change in the second step."""
    model, batch = Llama(CONFIG, recompute=recompute), get_batch(M, B, S, seed=0)
    optimizer = adamw(model, 1e-3)
    single_gpu.train_step(model, optimizer, batch)
    loss_sum, clip = single_gpu.loss_sum, torch.nn.utils.clip_grad_norm_
    with PhaseTracker(
        model, [batch, list(optimizer.state.values()), [(p, p.grad) for p in model.parameters()]]
    ) as seen:

        def forward_then_backward(*args):
            seen.phase = "forward"
            loss = loss_sum(*args)
            seen.phase = "backward"
            return loss

        def then_the_update(*args):
            seen.phase = "update"
            return clip(*args)

        start = len(seen.rows)
        single_gpu.loss_sum, torch.nn.utils.clip_grad_norm_ = forward_then_backward, then_the_update
        try:
            single_gpu.train_step(model, optimizer, batch)
        finally:
            single_gpu.loss_sum, torch.nn.utils.clip_grad_norm_ = loss_sum, clip
        return seen.rows[start:]


def thinned(rows: list) -> list:
    """About POINTS of the rows: the highest of each stretch, so that no peak is lost."""
    width = math.ceil(len(rows) / POINTS)
    return [max(rows[i : i + width], key=lambda row: row[-1]) for i in range(0, len(rows), width)]


def saved_bytes(attention, recompute: bool, seq_len: int) -> int:
    model, batch = Llama(CONFIG, attention, recompute), get_batch(1, 1, seq_len, seed=0)
    with MemoryTracker([batch, list(model.parameters())]) as tracker:
        before, loss = tracker.timeline[-1], single_gpu.loss_sum(model, *batch[0])
        after = tracker.timeline[-1]
    assert math.isfinite(loss.item())
    return after - before


def draw_steps(axes, steps) -> None:
    params, highest = 4 * single_gpu.num_params(CONFIG) / 2**20, max(row[-1] for row in steps["rows"]) / 2**20
    panels = ((False, "all activations saved"), (True, "activations recomputed"))
    for ax, (recompute, title) in zip(axes, panels, strict=True):
        rows = [row[1:] for row in steps["rows"] if row[0] == recompute]
        at = range(len(rows))
        gradients, everything = ([row[column] / 2**20 for row in rows] for column in (1, 2))
        stored = [3 * params + g for g in gradients]
        ax.fill_between(at, 0, params, step="post", color=COLOURS["weights"], label="parameters")
        ax.fill_between(at, params, 3 * params, step="post", color=COLOURS["optimizer"], label="moments")
        ax.fill_between(at, 3 * params, stored, step="post", color=COLOURS["gradients"], label="gradients")
        ax.fill_between(
            at, stored, everything, step="post", color=COLOURS["activations"], label="activations, temporaries"
        )
        starts = [i for i in at if i == 0 or rows[i][0] != rows[i - 1][0]]
        for i, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            ax.axvline(i, color=COLOURS["idle"], linewidth=0.8, linestyle=":")
            update = rows[i][0] == "update"
            where, turn = ((i + end) / 2, 90) if update else ((i + end) / 2, 0)
            ax.text(where, 1.3 * highest, rows[i][0], fontsize=8.5, rotation=turn, ha="center", va="top")
        ax.set(title=title, xlabel="allocations and releases, in order", ylim=(0, 1.32 * highest), xlim=(0, len(rows)))
        top = max(at, key=lambda i: everything[i])
        side = {"ha": "left"} if top < len(rows) / 2 else {"ha": "center"}
        ax.annotate(f"peak {everything[top]:.1f} MiB", (top, everything[top] * 1.02), fontsize=9, va="bottom", **side)
    axes[0].set_ylabel("MiB alive")
    axes[1].legend(fontsize=9, loc="center", bbox_to_anchor=(0.5, 0.72), ncols=2)  # where nothing is drawn


def draw_sequences(axes, sequences) -> None:
    rows = sequences["rows"]
    at = [row[0] for row in rows]
    lines = (("naive attention", "messages", "s"), ("fused attention", "activations", "o"))
    for column, (label, colour, mark) in enumerate((*lines, ("fused, blocks recomputed", "compute", "^")), 1):
        axes.plot(at, [row[column] / 2**20 for row in rows], marker=mark, color=COLOURS[colour], label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens in a sequence", ylabel="MiB saved for the backward pass")
    axes.set_xticks(at, [str(x) for x in at])
    axes.minorticks_off()
    axes.legend(fontsize=9)


def figures() -> None:
    write_figure("01_single_gpu/figures/step.svg", ["01_ground_step"], draw_steps, shape=(1, 2), size=(9.5, 3.8))
    write_figure("01_single_gpu/figures/sequence.svg", ["01_ground_sequence"], draw_sequences)


def failure() -> str:
    """What does not match, or nothing."""
    error = single_gpu.largest_error(ModelConfig())
    if not error <= 1e-10:
        return f"six steps are off by {error:.1e}"
    for recompute in (False, True):
        peak = max(row[-1] for row in timeline_of_a_step(recompute))
        formula, _ = single_gpu.peak_bytes(CONFIG, B, S, M, recompute)
        if peak != formula:
            return f"recompute={recompute}: the peak is {peak}, not {formula}"
    for seq_len in SEQUENCES:
        for attention, recompute in VARIANTS:
            formula = single_gpu.saved_activation_bytes(CONFIG, 1, seq_len, recompute, attention is fused_attention)
            if saved_bytes(attention, recompute, seq_len) != formula:
                return f"{seq_len} tokens: {attention.__name__}, recompute={recompute}: other bytes than the formula's"
    return ""


VARIANTS = ((naive_attention, False), (fused_attention, False), (fused_attention, True))


def main() -> int:
    if "--figures" in sys.argv:
        figures()
        return 0
    torch.set_num_threads(1)  # steadier on a CPU that others use too
    if complaint := failure():
        print(f"bench_single_gpu.py: {complaint}", file=sys.stderr)
        return 1

    batch = get_batch(M, B, S, seed=0)
    full = [tuple(torch.cat(x) for x in zip(*batch, strict=True))]
    core, recomputed, naive = Llama(CONFIG), Llama(CONFIG, recompute=True), Llama(CONFIG, naive_attention)
    depth = LlamaInDepth(LlamaConfig(256, 128, 4, 4, 2, 344))
    steps = {
        model: partial(step, model, optimizer, data)
        for model, optimizer, data, step in (
            (core, adamw(core, 1e-4), batch, single_gpu.train_step),
            (recomputed, adamw(recomputed, 1e-4), batch, single_gpu.train_step),
            (naive, adamw(naive, 1e-4), full, single_gpu.train_step),
            (depth, adamw_in_depth(depth, 1e-4), batch, train_step_in_depth),
        )
    }
    pairs = list(zip(depth.parameters(), core.parameters(), strict=True))  # both in the same order
    with torch.no_grad():
        for p, q in pairs:
            p.copy_(q)
    assert_same(steps[depth](), steps[core](), FLOAT32, "the loss of in_depth")
    for p, q in pairs:
        assert_same(p.grad, q.grad, FLOAT32, "a gradient of in_depth")
    saved = single_gpu.saved_activation_bytes
    rows = [
        ["naive attention, the full batch at once", naive, saved(CONFIG, M * B, S, fused=False)],
        ["fused attention, two micro-batches", core, saved(CONFIG, B, S)],
        ["the same, blocks recomputed", recomputed, saved(CONFIG, B, S, True)],
        ["in_depth (fused AdamW)", depth, saved(CONFIG, B, S)],
    ]
    base = single_gpu.flops(CONFIG, B, S)
    write_result(
        "01_ground",
        f"A step of {M * B} sequences of {S} tokens; {single_gpu.num_params(CONFIG) / 1e6:.1f} million parameters",
        ["step", "seconds / two micro-batches", "FLOPs / two micro-batches", "bytes saved for the backward pass"],
        [
            [
                what,
                1 if model is core else paired(steps[model], steps[core], repeats=REPEATS),
                single_gpu.flops(CONFIG, B, S, True) / base if model is recomputed else 1,
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
        [[recompute, *row] for recompute in (False, True) for row in thinned(timeline_of_a_step(recompute))],
    )
    write_result(
        "01_ground_sequence",
        "Bytes saved for the backward pass of one sequence, formula and measurement equal",
        ["tokens", "naive attention", "fused attention", "fused, blocks recomputed"],
        [[seq_len, *(saved_bytes(*variant, seq_len) for variant in VARIANTS)] for seq_len in SEQUENCES],
    )
    figures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
