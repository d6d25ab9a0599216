"""The time of each recomputation policy, and the curve of bytes against FLOPs.

Verified first: gradients equal those without recomputation, bytes match the formulas. `--figures` only draws.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from accounting import GB, forward_flops
from harness.figures import COLOURS, write_figure
from harness.reference import assert_same_named
from harness.report import paired, write_result
from llama import LLAMA3_8B, Llama, LlamaConfig, next_token_loss
from recompute_policy import POLICIES, block_flops, curve, kept, predicted, with_policies

CONFIG, BATCH, SEQ, REPEATS = LlamaConfig(hidden=192, layers=4, intermediate=512), 2, 256, 15


def draw(axes, points) -> None:
    for name, colour, mark in (("whole blocks", "idle", "s"), ("by operations", "compute", "o")):
        rows = [(row[2], row[1]) for row in points["rows"] if row[0] == name]  # from all to nothing saved
        axes.plot(*zip(*rows, strict=True), marker=mark, markersize=3, color=COLOURS[colour], label=name)
    axes.set(xlabel="matrix FLOPs done again, % of a step", ylabel="GB saved by all blocks", ylim=(0, None))
    axes.legend()


def main() -> int:
    if "--figures" not in sys.argv:
        torch.set_num_threads(1)  # steadier on a shared CPU
        tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
        models = {policy: with_policies(Llama(CONFIG), [policy] * CONFIG.layers) for policy in POLICIES}

        def step(policy: str) -> None:
            models[policy].zero_grad()
            next_token_loss(models[policy], tokens).backward()

        rows, whole = [], 3 * sum(forward_flops(CONFIG, BATCH, SEQ).values())
        for policy, model in models.items():
            size, measured = predicted(CONFIG, BATCH, SEQ, [policy] * CONFIG.layers), kept(model, tokens)[0]
            if size != measured:
                print(f"{policy}: keeps {measured} bytes, predicted {size}", file=sys.stderr)
                return 1
            step(policy)
            want = {name: p.grad for name, p in models["keep"].named_parameters()}
            assert_same_named({n: p.grad for n, p in model.named_parameters()}, want, 1e-5, f"{policy}: gradient of")
            times = 1 if policy == "keep" else paired(partial(step, policy), partial(step, "keep"), repeats=REPEATS)
            flops = 1 + CONFIG.layers * block_flops(CONFIG, BATCH, SEQ, policy) / whole
            rows.append([policy, size, measured, flops, times])
        write_result(
            "01_policies",
            f"Recomputation by policy: {CONFIG.layers} layers, hidden {CONFIG.hidden}, {BATCH} x {SEQ} tokens",
            ["policy", "bytes predicted", "bytes measured", "FLOPs / keep", "seconds / keep"],
            rows,
            notes=f"fp32, fused attention, 1 CPU thread, forward and backward; median of {REPEATS} pairs (quartiles).",
        )
        step_8b = 3 * sum(forward_flops(LLAMA3_8B, 1, 8192).values())
        write_result(
            "01_policy_curve",
            "Llama-3 8B, 8192 tokens, fp32: bytes of all blocks against FLOPs done again, by formula",
            ["mixture", "GB saved by blocks", "% of a step's FLOPs again"],
            [[name, size / GB, 100 * flops / step_8b] for name, size, flops in curve(LLAMA3_8B, 1, 8192)],
            notes="By the formulas that the test holds against the meter and torch's counter; nothing this large ran.",
            computed=True,
        )
    write_figure("01_single_gpu/figures/policies.svg", ["01_policy_curve"], draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
