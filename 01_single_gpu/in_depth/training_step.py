r"""Chapter 1: train a Llama on one device, and see what a training step stores in memory.

The problem. A training step is four lines: zero the gradients, forward, backward, optimizer. Nearly every
mistake of distributed training is already possible in them: a loss divided in the wrong place, a mean of
means, a label that is off by one, another device's peak FLOP/s. Here they are right, and can be checked.

The idea. A batch that does not fit is split into micro-batches, and gradients add up:

    global batch  = micro-batch x accumulation steps x data-parallel ranks      (samples; times S: tokens)
    loss          = sum over valid tokens of -log p(label) / valid tokens of the WHOLE global batch

    stored                                                          W: bytes of the weights, all in fp32
                                                      /\
                  /\                                /    \          peak of step 2 = peak of step 1 + 2 W
    4 W         /    \             _____          /        \____    weights, gradients, both AdamW states
    3 W       /        \          /     \________/                  weights and states
    2 W      /          \________/                                  weights and gradients
    1 W    _/                                                       weights
            forward backward optimizer zero_grad forward backward
            step 1                     step 2

AdamW makes its states at the END of step 1, so a job that survives step 1 can still run out of memory in step 2.
`--profile` draws the measured curve.

Model FLOPs utilisation (MFU) is the matmul FLOPs the model needs, 3 x forward, per second, over the device's
peak (PaLM, 2204.02311, appendix B). HFU also counts recomputed FLOPs (2205.05198, section 6). Both need the
peak of the actual device; on a CPU or an unknown device they are "n/a". The formulas are in accounting.py.

The text is the source of Python's standard library, as bytes: V = 256, no tokenizer, no download.

    python training_step.py                        train 0.6 million parameters, print a sample
    python training_step.py --recompute full       free the activations, recompute them in backward
    python training_step.py --profile profiles     also write profiles/trace.json (open it at https://ui.perfetto.dev)
                                                   and profiles/memory.csv, with matplotlib also memory.png
    python training_step.py --device cuda --bf16 --hidden 2048 --layers 16 --heads 16 --intermediate 5632 --seq 2048 \
                         --lr 3e-4                 0.7 billion parameters: a size at which MFU means something

The last line is PASS, or the process ends with status 1 and the number that is off. Shapes: see llama.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from accounting import GB, micro_steps, parameters, peak_flops, step_flops, utilization
from llama import IGNORE, TINY, Llama, LlamaConfig, OneLineParser, Report, init_weights
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from tqdm import tqdm

# ---------------------------------------------------------------------------------------------------------- data


TEXT = 2_000_000  # bytes of the standard library that are read, a small part of it


def stdlib_bytes(limit: int = TEXT) -> Tensor:
    """The first `limit` bytes of the source of Python's standard library, files in sorted order. uint8 [bytes]."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if len(text) >= limit:
            break
        if "packages" not in path.parent.name:  # site-packages and dist-packages are not the standard library
            text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def next_token_pairs(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Windows [B, S+1] to tokens [B, S] and labels [B, S], where label i is token i+1.

    The shift happens here, once, before any split: after a split over ranks, the label of a shard's last
    token would be in another rank's shard.
    """
    # --- exercise 1.25: the label of a token is the token after it ---
    windows = windows.long()
    return windows[:, :-1].clone(), windows[:, 1:].clone()  # copies: each owns its memory
    # --- end exercise ---


def random_batches(data: Tensor, micro_batch: int, seq: int, count: int, generator: torch.Generator) -> list:
    """`count` micro-batches (tokens, labels) of random windows into `data`."""
    starts = torch.randint(len(data) - seq, (count, micro_batch, 1), generator=generator)
    return [next_token_pairs(data[start + torch.arange(seq + 1)]) for start in starts]


# ------------------------------------------------------------------------------------------------------- training


Batches = Sequence[tuple[Tensor, Tensor]]  # micro-batches: (tokens [B, S], labels [B, S])


def accumulate(model: Llama, micro_batches: Batches, precision: AbstractContextManager | None = None) -> Tensor:
    """Add the gradient of the mean loss over all valid tokens of all micro-batches to .grad; return that loss.

    Only one micro-batch's activations are alive at a time, so the batch size is not limited by memory.
    `precision` is a context for the forward pass, such as torch.autocast; chapter 10 says more about it.
    """
    # --- exercise 1.26: the gradients of one big batch, one micro-batch at a time ---
    # The divisor is known before the first backward, because it depends on the labels only. With its own
    # count as divisor, a mostly padded micro-batch would give its tokens more weight than others.
    valid = torch.stack([(labels != IGNORE).sum() for _, labels in micro_batches]).sum()
    valid = valid.clamp(min=1)  # no valid token at all: loss 0 and gradients 0, not 0 / 0
    total = torch.zeros((), device=valid.device)
    for tokens, labels in micro_batches:
        with record_function("forward"), precision or nullcontext():
            loss = model.parts.cross_entropy(model(tokens), labels) / valid
        with record_function("backward"):
            loss.backward()  # the loss that is divided is the loss that is differentiated
        total = total + loss.detach()
    return total
    # --- end exercise ---


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth, then half a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


def train_step(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    micro_batches: Batches,
    precision: AbstractContextManager | None = None,
    max_norm: float = 1.0,
) -> Tensor:
    """One optimizer step on one global batch. Returns the loss before the step."""
    optimizer.zero_grad(set_to_none=True)  # frees the gradients, which the forward pass does not need
    loss = accumulate(model, micro_batches, precision)
    with record_function("optimizer"):
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return loss


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with the usual betas, and no weight decay on the norms' scales, which should not shrink to zero.
    Frozen weights are left out."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() > 1]
    scales = [p for p in trained if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def generate(model: Llama, prompt: Tensor, n: int, temperature: float, generator: torch.Generator) -> Tensor:
    """prompt [B, S] -> [B, S + n]. Temperature 0 takes the most likely token.

    Each token runs the full sequence again. A server would cache K and V, but a trainer samples rarely.
    """
    tokens = prompt
    for _ in range(n):
        logits = model(tokens)[:, -1].float()  # [B, S, V] -> [B, V]
        if temperature > 0:
            weights = (logits / temperature).softmax(-1)
            chosen = torch.multinomial(weights.cpu(), 1, generator=generator).to(tokens.device)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, chosen), dim=1)
    return tokens


# ------------------------------------------------------------------------------------------------------ profiling


def profile_first_steps(step: Callable[[], object], warm_up: Callable[[], object], folder: Path) -> Path:
    """Run `step` twice under torch.profiler and write folder/trace.json, which Chrome and Perfetto open.

    `warm_up` runs once before, unrecorded, because the first call of a kernel is slow. It must not touch the
    optimizer, or the recorded step would not be step 1.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    plan = schedule(wait=0, warmup=1, active=2, repeat=1)
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.json"
    with profile(
        activities=activities,
        schedule=plan,
        profile_memory=True,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
    ) as profiler:
        warm_up()
        profiler.step()
        for _ in range(2):
            step()
            profiler.step()
    return trace


Moment = tuple[float, int, str, int]  # (milliseconds since step 1 began, step, phase, bytes from then on)


def memory_timeline(trace: Path, start_bytes: int, device_type: int) -> list[Moment]:
    """Every allocation and release in a trace, in order.

    A trace has changes only, so bytes allocated before it began (the weights) are passed as `start_bytes`.
    device_type: 0 is the CPU, 1 is CUDA.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    ranges = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    steps = [e for e in ranges if e["name"].startswith("ProfilerStep#")]
    phases = [e for e in ranges if e["name"] in ("forward", "backward", "optimizer")]
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == device_type]
    held, timeline = start_bytes, []
    # --- exercise 1.27: replay the changes; note after each one the time, step, phase, and the bytes now held ---
    for event in sorted(changes, key=lambda e: e["ts"]):
        at = event["ts"]
        held += event["args"]["Bytes"]  # negative when memory is released
        step = sum(at >= e["ts"] for e in steps)
        phase = next((e["name"] for e in phases if e["ts"] <= at <= e["ts"] + e["dur"]), "between")
        timeline.append(((at - steps[0]["ts"]) / 1000, step, phase, held))
    # --- end exercise ---
    return timeline


def phase_summary(timeline: list[Moment]) -> dict[tuple[int, str], tuple[int, int]]:
    """(step, phase) -> (peak bytes in that phase, bytes when it ends)."""
    summary: dict[tuple[int, str], tuple[int, int]] = {}
    for _, step, phase, held in timeline:
        peak, _ = summary.get((step, phase), (0, 0))
        summary[step, phase] = (max(peak, held), held)
    return summary


def draw_timeline(timeline: list[Moment], png: Path) -> bool:
    """Draw bytes over time, coloured by phase. False if matplotlib, an optional extra, is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    # The time axis counts events, not milliseconds, which the optimizer's slow first call would dominate.
    events = range(len(timeline))
    held = [moment[3] / 2**20 for moment in timeline]
    for phase, color in {"forward": "#9ecae1", "backward": "#fdae6b", "optimizer": "#a1d99b"}.items():
        inside = [moment[2] == phase for moment in timeline]
        axes.fill_between(events, held, where=inside, step="post", color=color, label=phase)
    axes.step(events, held, where="post", color="black", linewidth=0.8)
    for step in (1, 2):
        begin = next(i for i, moment in enumerate(timeline) if moment[1] == step)
        peak = max(h for h, moment in zip(held, timeline, strict=True) if moment[1] == step)
        axes.axvline(begin, color="gray", linestyle=":")
        axes.text(begin, max(held) * 1.15, f" step {step}: peak {peak:.1f} MiB")
    axes.set(xlabel="allocations and releases, in order", ylabel="MiB held", ylim=(0, max(held) * 1.25))
    axes.legend(loc="upper right")
    figure.savefig(png, dpi=120)
    return True


def report_profile(report: Report, trace: Path, weights: int, device: torch.device) -> None:
    """Write memory.csv and memory.png next to the trace, and check that step 1 ends with two more states."""
    timeline = memory_timeline(trace, weights, device_type=int(device.type == "cuda"))
    with open(trace.with_name("memory.csv"), "w", newline="") as file:
        csv.writer(file).writerows([("milliseconds", "step", "phase", "bytes"), *timeline])
    if not draw_timeline(timeline, trace.with_name("memory.png")):
        print("no memory.png: `pip install matplotlib` draws it; the numbers are in memory.csv")
    summary = phase_summary(timeline)
    added = {step: summary[step, "optimizer"][1] - summary[step, "backward"][1] for step in (1, 2)}
    peak = {step: max(peak for (s, _), (peak, _) in summary.items() if s == step) for step in (1, 2)}
    close = 0.01 * weights + 4096  # AdamW's step counters, and an allocator that rounds up
    for step, expected in ((1, 2 * weights), (2, 0)):
        right = abs(added[step] - expected) < close
        report.add(f"profile: bytes the optimizer adds in step {step}", f"{expected:,}", f"{added[step]:,}", right)
    report.add("profile: peak bytes in step 1", f"< {peak[2]:,} of step 2", f"{peak[1]:,}", peak[1] < peak[2])


# ----------------------------------------------------------------------------------------------------------- demo


def accumulation_error() -> float:
    """Largest relative difference between accumulated gradients and one full batch's gradients, in float64.

    The three micro-batches have 14, 5 and 1 valid labels: a mean of means would be off by far more than rounding.
    """
    windows = torch.randint(TINY.vocab_size, (3, 2, 8), generator=torch.Generator().manual_seed(1))
    tokens, labels = next_token_pairs(windows.flatten(0, 1))  # [6, 7]: two samples in each micro-batch
    count = torch.tensor([7, 7, 5, 0, 1, 0])  # valid labels of each sample
    labels = labels.masked_fill(torch.arange(7) >= count[:, None], IGNORE)
    many = Llama(TINY).double()
    one = Llama(TINY).double()
    accumulate(many, list(zip(tokens.split(2), labels.split(2), strict=True)))
    accumulate(one, [(tokens, labels)])
    pairs = zip(many.parameters(), one.parameters(), strict=True)
    errors = [(a.grad - b.grad).abs().max() / b.grad.abs().max() for a, b in pairs]
    return torch.stack(errors).max().item()  # NaN if any error is NaN


def check(args: argparse.Namespace) -> None:
    """ValueError with one line that names the option, if the options cannot work."""
    if (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(f"WORLD_SIZE {world}: this chapter is one process; use 02_data_parallel")
    for name in ("seq", "steps", "micro_batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.seq >= TEXT:
        raise ValueError(f"--seq {args.seq} must be less than the text, {TEXT} bytes")
    if not 0 < args.lr < math.inf:  # also false for NaN
        raise ValueError(f"--lr {args.lr} must be a positive number")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed} must be 0 to 2^63 - 1")
    if args.profile and args.steps < 2:
        raise ValueError(f"--steps {args.steps}: --profile compares step 1 with step 2 and needs at least 2")
    if args.profile:
        there = next(path for path in (args.profile, *args.profile.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ValueError(f"--profile {args.profile}: no folder can be made there (see {there})")


def usable_device(name: str) -> torch.device:
    """ValueError for a device on which this script cannot train: meta has no values, mps is not covered."""
    device = torch.device(name)
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ValueError(f"--device {name}: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: PyTorch finds {torch.cuda.device_count()} GPU(s) here, counted from 0")
    return device


def memory_of(device: torch.device) -> int:
    """Total bytes of the device's memory, free or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(description="Train a Llama on the bytes of Python's standard library, on one device.")
    sizes = ("hidden", "layers", "heads", "kv_heads", "intermediate")
    for name in sizes:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(LlamaConfig, name))
    parser.add_argument("--tied", action="store_true", help="lm_head shares the embedding's weight")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sample")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples in a forward pass")
    parser.add_argument("--global-batch", type=int, default=8, help="samples in an optimizer step")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--bf16", action="store_true", help="matrix products in bf16 (autocast), weights in fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, metavar="DIR", help="profile the first two steps into DIR")
    args = parser.parse_args()
    from step_peak import peak  # here, because a trainer that imports this file has its own prediction

    try:
        check(args)
        args.accumulation = micro_steps(args.global_batch, args.micro_batch)
        args.config = LlamaConfig(tied=args.tied, **{name: getattr(args, name) for name in sizes})
        args.device = usable_device(args.device)
        precision = "bf16 autocast" if args.bf16 else "fp32"
        where, need = peak(args.config, args.micro_batch, args.seq, args.accumulation, precision, args.recompute)
        if args.accumulation == 1:
            need -= 4 * parameters(args.config)  # until the backward pass there are no gradients
        if need > (there := memory_of(args.device)):  # the purpose of the formula
            raise ValueError(
                f"--hidden {args.hidden} --layers {args.layers} --micro-batch {args.micro_batch} --seq {args.seq}: "
                f"a step needs {need / GB:,.1f} GB or more ({where}), and {args.device} has {there / GB:,.1f}"
            )
    except (ValueError, RuntimeError) as error:
        parser.error(str(error).splitlines()[0])
    return args


def main() -> int:
    args = parse_arguments()
    report = Report()
    config = args.config
    device = args.device
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # a second thread gains little for small matrices, and costs on a busy one
    precision = torch.autocast(device.type, torch.bfloat16) if args.bf16 else None
    model = Llama(config, recompute=args.recompute)
    init_weights(model, args.seed)
    optimizer = adamw(model.to(device), args.lr)
    data = stdlib_bytes()
    generator = torch.Generator().manual_seed(args.seed)
    losses: list[float] = []
    seconds: list[float] = []

    def step() -> None:
        batches = random_batches(data, args.micro_batch, args.seq, args.accumulation, generator)
        batches = [(tokens.to(device), labels.to(device)) for tokens, labels in batches]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(len(losses), args.steps, args.lr)
        begin = time.perf_counter()
        losses.append(train_step(model, optimizer, batches, precision).item())  # .item() waits for the device
        seconds.append(time.perf_counter() - begin)

    if args.profile:
        probe = torch.zeros(args.micro_batch, args.seq, dtype=torch.long, device=device)

        def warm_up() -> None:
            with torch.no_grad(), precision or nullcontext():
                model(probe)

        trace = profile_first_steps(step, warm_up, args.profile)
        report_profile(report, trace, sum(p.nbytes for p in model.parameters()), device)
    bar = tqdm(range(len(losses), args.steps), desc="train", leave=False)
    for _ in bar:
        step()
        bar.set_postfix(loss=f"{losses[-1]:.3f}")

    formula = parameters(config)
    built = sum(p.numel() for p in model.parameters())
    report.add("parameters: formula, built", f"{formula:,}", f"{built:,}", formula == built)
    error = accumulation_error()
    report.add("gradients: uneven micro-batches, one batch", "< 1e-10", f"{error:.1e}", error < 1e-10)
    per_step = f"{args.global_batch} samples, {args.global_batch * args.seq:,} tokens"
    report.add(f"global batch: {args.micro_batch} x {args.accumulation} x 1 rank", "", per_step)
    goal = 0.75 * math.log(config.vocab_size)  # ln V is the loss of uniform predictions
    judged = args.steps >= 40
    last = statistics.fmean(losses[-10:])  # the loss of a single batch is noisy
    expected = f"last < {goal:.2f}" if judged else "(judged from 40 steps on)"
    right = last < goal or (not judged and math.isfinite(last))
    report.add("loss, first step -> mean of the last ten", expected, f"{losses[0]:.3f} -> {last:.3f}", right)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    flops = step_flops(config, args.global_batch, args.seq, args.recompute)
    median = statistics.median(seconds)
    report.add("matmul FLOPs of a step: model, with recomputation", "", f"{flops.model:.3e}, {flops.hardware:.3e}")
    mfu, hfu = (utilization(f, median, peak_flops(name)) for f in (flops.model, flops.hardware))
    report.add(f"MFU, HFU of the bf16 peak of this device ({name})", "", f"{mfu}, {hfu}")

    prompt = torch.tensor([list(b"def ")], device=device)
    sample = generate(model, prompt, 160, 0.7, generator)[0]
    print("--- sample ---", bytes(sample.tolist()).decode(errors="replace"), "--------------", sep="\n")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
