"""A training step of this chapter against the same model in transformers, with the same AdamW, in the same run.

Verified first: from the same weights and batch, both give the same loss and the same gradients. Then the trace of one
step, by kind of operation. `--figures` only draws.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import transformers
from harness.figures import COLOURS, write_figure
from harness.reference import assert_same, assert_same_named
from harness.report import Ratio, paired, write_result
from llama import Llama, LlamaConfig
from training_step import adamw, profile_first_steps, random_batches, stdlib_bytes, train_step

SIZES = [LlamaConfig(hidden=h, layers=4, heads=4, intermediate=3 * h) for h in (128, 192)]
SAMPLES, SEQ = 4, 128
REPEATS = 15


def hugging_face(config: LlamaConfig) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            use_cache=False,
        )
    )


def measure(config: LlamaConfig) -> Ratio:
    ours, theirs = Llama(config), hugging_face(config)
    theirs.load_state_dict(ours.state_dict())
    optimizers = adamw(ours, 1e-4), adamw(theirs, 1e-4)
    batch = random_batches(stdlib_bytes(100_000), SAMPLES, SEQ, 1, torch.Generator().manual_seed(0))
    tokens, labels = batch[0]

    def our_step() -> torch.Tensor:
        return train_step(ours, optimizers[0], batch)

    def their_step() -> torch.Tensor:
        optimizers[1].zero_grad(set_to_none=True)
        loss = theirs(input_ids=tokens, shift_labels=labels, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizers[1].step()
        return loss

    assert_same(our_step(), their_step(), 1e-5, "loss")
    want = {name: p.grad for name, p in theirs.named_parameters()}
    assert_same_named({name: p.grad for name, p in ours.named_parameters()}, want, 1e-4, "gradient of")
    return paired(our_step, their_step, repeats=REPEATS, warmup=3)


PRODUCTS = ("aten::linear", "aten::mm")  # in the forward and in the backward pass
KINDS = ("matrix products", "attention", "norms, RoPE, SwiGLU, loss", "clip and update")


def kind_of(event: dict, phase: str) -> str:
    if event["name"] in PRODUCTS:
        return "matrix products"
    if "scaled_dot_product" in event["name"]:
        return "attention"
    return "clip and update" if phase == "optimizer" else "norms, RoPE, SwiGLU, loss"


def trace_of_a_step() -> list[list]:
    """[row, milliseconds since the step began, milliseconds] of the phases and operations in the second step."""
    config = LlamaConfig(hidden=128, layers=2, intermediate=344)
    model = Llama(config)
    optimizer = adamw(model, 1e-4)
    batch = random_batches(stdlib_bytes(100_000), 4, 256, 1, torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        trace = profile_first_steps(
            lambda: train_step(model, optimizer, batch), lambda: model(batch[0][0]), Path(folder)
        )
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    begin = max(e["ts"] for e in events if e["name"].startswith("ProfilerStep#"))  # of the last step
    phases = [e for e in events if e["name"] in ("forward", "backward", "optimizer") and e["ts"] >= begin]
    phases = [e for e in phases if e.get("cat") == "user_annotation"]
    rows = [[e["name"], (e["ts"] - begin) / 1000, e["dur"] / 1000] for e in phases]
    operations = sorted(
        (e for e in events if e.get("cat") == "cpu_op" and e["ts"] >= begin and e["name"].startswith("aten::")),
        key=lambda e: (e["ts"], -e["dur"]),
    )
    end = {}
    for e in operations:  # only the outermost of each thread, which contains its calls
        if e["ts"] < end.get(e["tid"], 0):
            continue
        inside = [p for p in phases if p["ts"] <= e["ts"] <= p["ts"] + p["dur"]]
        if inside:
            kind, at, long = kind_of(e, inside[0]["name"]), (e["ts"] - begin) / 1000, e["dur"] / 1000
            end[e["tid"]] = e["ts"] + e["dur"]
            if rows[-1][0] == kind and at - sum(rows[-1][1:]) < 0.02:
                rows[-1][2] = max(rows[-1][2], at + long - rows[-1][1])  # merge adjacent bars of one kind
            else:
                rows.append([kind, at, long])
    return rows


def draw(axes, trace) -> None:
    rows = ("phase", *KINDS)
    colours = dict(zip(KINDS, ("compute", "messages", "activations", "optimizer"), strict=True))
    colours |= {"forward": "activations", "backward": "gradients", "optimizer": "optimizer"}
    for name, at, long in trace["rows"]:
        height = len(rows) - 1 - rows.index(name if name in KINDS else "phase")
        axes.broken_barh([(at, long)], (height - 0.4, 0.8), color=COLOURS[colours[name]], linewidth=0)
        if name not in KINDS:
            axes.text(at + long / 2, height, name, ha="center", va="center", fontsize=7, color="black")
    axes.set_yticks(range(len(rows)), reversed(rows))
    axes.set(xlabel="milliseconds since the second step began")
    axes.grid(axis="y", visible=False)


def write_trace() -> None:
    torch.set_num_threads(1)
    write_result(
        "01_trace",
        "The second step of a small model, as torch.profiler sees it",
        ["what", "begins at, ms", "takes, ms"],
        min((trace_of_a_step() for _ in range(7)), key=lambda rows: max(at + long for _, at, long in rows)),
        notes="Outermost operations; neighbours of one kind are joined. 1 thread, the quickest of 7 runs.",
    )
    write_figure("01_single_gpu/figures/trace.svg", ["01_trace"], draw, size=(9.0, 2.6))


def main() -> int:
    if "--figures" in sys.argv:
        write_figure("01_single_gpu/figures/trace.svg", ["01_trace"], draw, size=(9.0, 2.6))
        return 0
    rows = []
    all_threads = torch.get_num_threads()
    for config in SIZES:
        for threads in dict.fromkeys((1, all_threads)):
            torch.set_num_threads(threads)
            size = f"{sum(p.numel() for p in Llama(config).parameters()) / 1e6:.1f}M, hidden {config.hidden}"
            rows.append([size, f"{threads} thread{'s' * (threads > 1)}, fp32", measure(config)])
            print(*rows[-1])
    write_result(
        "01_single_gpu",
        f"Seconds of a training step over those of transformers, {SAMPLES} samples of {SEQ} tokens",
        ["model", "with", "this chapter / transformers"],
        rows,
        notes=f"Both with AdamW (fused) and clipping; median of {REPEATS} pairs (quartiles). Below 1: this is faster.",
    )
    write_trace()
    slow = [row for row in rows if row[2].median > 1.05]
    if slow:
        print(f"slower than transformers: {slow}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
