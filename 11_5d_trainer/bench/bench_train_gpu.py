"""The trainer's step on one GPU: tokens per second, MFU, memory, and where the time goes.

    python 11_5d_trainer/bench/bench_train_gpu.py --gpu [--out DIR] [--seconds 115]
    python 11_5d_trainer/bench/bench_train_gpu.py --gpu --dry --out DIR        the same program on the CPU, tiny

1. Verify. For each way to compute (kernels, precision, compiled or not) the gradients of a small model are
   compared with fp32 on PyTorch's own kernels. The error may be twice that of PyTorch's kernels in the same
   precision. A wrong way is left out, and the program ends with 1. Each way is verified right before it is
   timed, so a kernel that crashes the process loses no earlier measurement.
2. Time full steps as the trainer runs them: batches from the host, forward, backward, norm, clipping, AdamW.
   Where the trainer launches a step before it has read the last one's loss, so does this. Two models at 4096
   tokens: one of 1.7 billion weights, and one with the widths of Llama-3 8B and as many layers as fit. Tokens
   are random, which does not change the time. Both models are timed in the first way before either is in the
   second. Each row is written at once. A way that would not end within --seconds by estimate is not started.
3. Profile the first way of each model that runs, and compare each part of the step with its floor: FLOPs over
   the rate of a matmul, bytes over the bandwidth of a copy, both measured in the same run.

MFU is chapter 01's: the model's FLOPs, with attention as the full square, over the data sheet's bf16 rate.
The column beside it counts only the half of attention that a causal mask leaves.
"""

import argparse
import dataclasses
import functools
import gc
import json
import math
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paths  # noqa: F401  finds the chapters below
import llama
import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
from accounting import activations, forward_flops, parameters, peak_flops, step_flops
from harness import predictions
from harness.ceilings import GIB, copy_bandwidth, device_here, free_bytes, matmul_rate
from harness.reference import error_between
from harness.report import Ratio, ratio_of, write_result
from llama import LlamaConfig
from model import PRESETS
from options import Config
from step import (
    Trainer,
    forward_and_backward,
    launch_step,
    make_trainer,
    reads_late,
    shard_batch,
    train_step,
    valid_tokens,
    zero_grad,
)
from torch.profiler import ProfilerActivity, profile

BYTES_PER_WEIGHT = 16  # bf16 weight and gradient, fp32 master weight, two moments
SMALL = LlamaConfig(vocab_size=1024, hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512)
TINY = LlamaConfig(vocab_size=256, hidden=64, layers=1, heads=2, kv_heads=1, intermediate=128)


@dataclass(frozen=True)
class Way:
    """How a step is computed."""

    kernels: str
    precision: str
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.kernels}{', compiled' if self.compiled else ''}; {self.precision}"


# The most valuable first: when the time is used up, the rest is left out.
WAYS = (
    Way("triton", "bf16-master"),
    Way("torch", "bf16-master", compiled=True),
    Way("triton", "fp8-tensor"),
    Way("torch", "bf16-master"),
    Way("cuda", "bf16-master"),
    Way("triton", "fp8-block"),
)
SECONDS, COMPILING = 15.0, 45.0  # at least, to build and verify a way, and with torch.compile
DRY_WAYS = (Way("torch", "bf16-master"), Way("triton", "fp32"))  # the interpreter has no bf16


@dataclass(frozen=True)
class Job:
    """A model and a batch."""

    name: str
    sizes: LlamaConfig
    seq: int
    micro_batch: int
    accumulation: int
    lr: float = 3e-5  # small enough that a model without warm-up learns from the first step on

    @property
    def samples(self) -> int:
        return self.micro_batch * self.accumulation

    def predicted_bytes(self) -> float:
        """Of a step: permanent bytes, activations by chapter 01, and the gradient of the logits."""
        held = BYTES_PER_WEIGHT * parameters(self.sizes)
        kept = sum(activations(self.sizes, self.micro_batch, self.seq, element=2).values())
        return held + kept + 4 * self.micro_batch * self.seq * self.sizes.vocab_size


def jobs(dry: bool, free: int) -> list[Job]:
    """The two models, reduced to what `free` bytes of memory allow."""
    if dry:
        return [Job("tiny", TINY, 16, 1, 1, lr=1e-3)]
    room, found = 0.9 * free, []
    wide, deep = PRESETS["smollm-1.7b"], PRESETS["llama3-8b"]
    for micro_batch in (8, 4, 2, 1):
        job = Job("1.7 billion (SmolLM)", wide, 4096, micro_batch, 8 // micro_batch)
        if job.predicted_bytes() <= room:
            found.append(job)
            break
    for layers in range(deep.layers, 0, -1):
        sizes = dataclasses.replace(deep, layers=layers)
        # Two samples at a time: every micro-batch adds its gradients to the sum, 6 bytes per weight.
        job = Job(f"Llama-3 8B's widths, {layers} of {deep.layers} layers", sizes, 4096, 2, 4)
        if job.predicted_bytes() <= room:
            found.append(job)
            break
    return found


def draw_on(device: torch.device) -> None:
    """Initial weights from the device's own generator. Chapter 01 draws on the host, for the same values
    anywhere; for billions of weights that takes longer than all measurements."""
    on_host = llama.initial_weight

    def draw(name: str, shape: Any, layers: int, seed: int) -> torch.Tensor:
        if len(shape) == 1:
            return on_host(name, shape, layers, seed)
        generator = torch.Generator(device).manual_seed(len(name) + sum(map(ord, name)))
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * layers) if residual else 0.02
        return torch.randn(*shape, generator=generator, device=device) * std

    llama.initial_weight = draw


def start(way: Way, job: Job, device: torch.device) -> Trainer:
    config = Config(
        precision=way.precision,
        kernels=way.kernels,
        zero=1,  # on one rank nothing is sent; it is used for the flat buffers
        seq_len=job.seq,
        micro_batch=job.micro_batch,
        global_batch=job.samples,
        lr=job.lr,
        min_lr=0.0,
        compile=way.compiled,
    )
    config.check()
    config.check_layout(job.sizes, 1)
    return make_trainer(config, job.sizes, device)


def random_batches(job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (job.accumulation, job.micro_batch, job.seq + 1)
    tokens = torch.randint(job.sizes.vocab_size, shape, generator=generator)
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


@functools.cache
def gradients(way: Way, device: torch.device, tiny: bool) -> dict[str, torch.Tensor]:
    job = Job("to verify", TINY if tiny else SMALL, 16 if tiny else 256, 1, 2)
    me = start(way, job, device)
    batches = [shard_batch(me, batch) for batch in random_batches(job)]
    zero_grad(me)
    forward_and_backward(me, batches, valid_tokens(me, batches))
    return {name: g.detach().float().clone() for owner in me.owners for name, g in owner.full_gradients().items()}


def wrong_with(way: Way, device: torch.device, tiny: bool) -> str:
    """What is wrong with the gradients of a way; "" if nothing is."""
    try:
        exact = gradients(Way("torch", "fp32"), device, tiny)
        pytorch = gradients(Way("torch", way.precision), device, tiny)
        found = gradients(way, device, tiny)
    except Exception as error:  # a way may not run on this device; it is reported at the end
        return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:160]}"
    for name, want in exact.items():
        error = error_between(found[name], want)
        if not error <= 2 * error_between(pytorch[name], want) + 1e-3:
            return f"gradient of {name} is off by {error:.1e}"
    return ""


# ------------------------------------------------------------------------------------------------------------- measure


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def steps(me: Trainer, batches: list) -> Iterator[tuple[float, float]]:
    """Loss and seconds of each step. Where the host reads late, the next step is launched by then."""
    if not reads_late(me):
        while True:
            synchronize(me.device)
            begin = time.perf_counter()
            loss, _ = train_step(me, batches)
            synchronize(me.device)
            yield loss, time.perf_counter() - begin
    under_way = launch_step(me, batches)
    while True:
        last, under_way = under_way, launch_step(me, batches, since=under_way.done)
        yield last.values()[0], last.seconds()


def measure(
    way: Way, job: Job, device: torch.device, repeats: int, until: float = math.inf, look: Callable | None = None
) -> tuple[Ratio, int]:
    """Seconds of a step after two for warm-up, and the peak of memory. `repeats` times, fewer (two at least)
    after the time `until`. `look(step)` gets the step, warm, before everything is freed."""
    me = start(way, job, device)
    batches = random_batches(job)
    seconds: list[float] = []
    losses: list[float] = []
    for loss, took in steps(me, batches):
        losses.append(loss)
        if len(losses) > 2:
            seconds.append(took)
        if len(seconds) == repeats or (len(seconds) >= 2 and time.perf_counter() > until):
            break
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):  # same batch each time: it must fall
        raise ArithmeticError(f"the loss of one batch goes from {losses[0]:.4f} to {losses[-1]:.4f}")
    if look:
        step = launch_step if reads_late(me) else train_step
        look(lambda: step(me, batches))
    return ratio_of(seconds), peak


# The first pattern that matches the name of a GPU kernel, or of a CPU operation, gives its part.
PARTS = (
    ("attention, backward", r"delta_kernel|dq_kernel|dkdv_kernel|(flash|fmha|sdp|attention).*(bwd|bprop|backward)"),
    ("attention, forward", r"\bforward_kernel|flash|fmha|sdp|attention"),
    ("norms", r"rms_norm"),
    ("RoPE", r"rope"),
    ("SwiGLU", r"swiglu"),
    ("loss", r"cross_entropy|log_softmax|nll_loss"),
    ("communication", r"nccl|c10d|gloo"),
    ("optimizer and clipping", r"multi_tensor|adam|foreach|norm_kernel|NormTwoOps|linalg_vector_norm"),
    ("fp8 casts", r"quantize|amax_kernel|peaks_kernel|both_kernel|transpose_kernel"),
    ("matrix products", r"nvjet|gemm|cutlass|xmma|cublas|splitk|block_matmul|::mm$|::addmm$|::matmul$|::bmm$"),
    ("embedding", r"embedding|index"),
    ("copies, casts, fills", r"memcpy|memset|copy|fill|zero_|catarray|::cat$|::to$"),
)
REST = "other element by element"


def part_of(name: str) -> str:
    return next((part for part, pattern in PARTS if re.search(pattern, name, re.IGNORECASE)), REST)


def short_name(name: str) -> str:
    """The PyTorch functions in the name of a C++ kernel, without its templates."""
    words = re.findall(r"at::native::(?:\(anonymous namespace\)::)?(\w+)", name)
    return "/".join(dict.fromkeys(words))[:80] or name[:80]


def breakdown(
    step: Callable[[], Any], device: torch.device, steps: int = 2
) -> tuple[dict[str, float], list[str], float]:
    """Seconds of a step by part, the longest kernels without a part, and the step's seconds by the clock.

    On a GPU only kernels and copies are counted, from the trace: they run one after the other on one stream.
    On the CPU each operation counts without those inside it.
    """
    on_gpu = device.type == "cuda" and torch.version.cuda is not None  # a stand-in GPU leaves no trace
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for i in range(steps):
            if i == 1:  # the first also starts the profiler up, and is not timed
                synchronize(device)
                begin = time.perf_counter()
            step()
        synchronize(device)
        wall = (time.perf_counter() - begin) / (steps - 1)
    spent: dict[str, float] = defaultdict(float)
    unnamed: dict[str, float] = defaultdict(float)
    if on_gpu:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            seen.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
        named = [(e["name"], e["dur"] * 1e-6) for e in events if e.get("cat") in kinds and "dur" in e]
    else:
        named = [(e.key, e.self_cpu_time_total * 1e-6) for e in seen.key_averages()]
    for name, seconds in named:
        spent[part_of(name)] += seconds / steps
        if part_of(name) == REST:
            unnamed[short_name(name)] += seconds / steps
    return dict(spent), sorted(unnamed, key=lambda name: -unnamed[name])[:3], wall


def floors(job: Job, copy: float, product: float) -> dict[str, float]:
    """Seconds below which no kernel computes a part of the step: bytes over bandwidth, FLOPs over rate.

    Attention: the half that a causal mask leaves, and backward 2.5 times the forward (it recomputes the
    scores). Element-wise parts read and write each of their tensors once, in bf16.
    """
    from fused import bytes_moved  # not at the top: on a CPU the import turns Triton's interpreter on

    c, T = job.sizes, job.micro_batch * job.seq
    forward = forward_flops(c, job.micro_batch, job.seq)
    dense = sum(flops for what, flops in forward.items() if what != "attention core")
    per_micro_batch = {
        "matrix products": 3 * dense / product,
        "attention, forward": forward["attention core"] / 2 / product,
        "attention, backward": 2.5 * forward["attention core"] / 2 / product,
        "norms": (2 * c.layers + 1) * sum(bytes_moved("rms_norm", T * c.hidden, 2)) / copy,
        "RoPE": c.layers * sum(bytes_moved("rope", T * (c.heads + c.kv_heads) * c.head_dim, 2)) / copy,
        "SwiGLU": c.layers * sum(bytes_moved("swiglu", T * c.intermediate, 2)) / copy,
        "loss": 3 * T * c.vocab_size * 2 / copy,  # logits read; read again and their gradient written
    }
    least = {what: job.accumulation * seconds for what, seconds in per_micro_batch.items()}
    # The gradient in bf16, read for the norm and for the step; weight and moments in fp32, read and written; the bf16
    # weight, written.
    return least | {"optimizer and clipping": parameters(c) * (2 + 2 + 2 * 12 + 2) / copy}


def masked_flops(job: Job) -> float:
    """FLOPs of the half of attention that a causal mask hides, in both passes: MFU counts it, as usual."""
    return 3 * forward_flops(job.sizes, job.samples, job.seq)["attention core"] / 2


COUNTED = "MFU (of the bf16 rate, in fp8 too) counts attention's full square; beside it, the half that a mask leaves."
BASIS = (
    "Predicted, for fp8 too in bf16: floors by 90 % of the data sheet's bandwidth, 80 % of its rate; attention 50 %."
)


def predicted_step(job: Job) -> float | None:
    """Seconds of a step, before anything is measured."""
    gpu = predictions.here()
    if gpu is None:
        return None
    least = floors(job, predictions.COPIED * gpu.bandwidth, predictions.MULTIPLIED * gpu.bf16)
    attention = least["attention, forward"] + least["attention, backward"]
    softmax = attention * (predictions.MULTIPLIED / 0.5 - 1)  # by the SASS of chapter 09's kernels
    return sum(least.values()) + softmax


def breakdown_rows(job: Job, way: Way, found: tuple, copy: float, product: float) -> list[list[Any]]:
    spent, unnamed, wall = found
    least = floors(job, copy, product)
    rows = []
    for part in sorted(spent, key=lambda part: -spent[part]):
        floor = least.get(part)
        about = f"{part} ({', '.join(unnamed)})" if part == REST and unnamed else part
        cells = [f"{1e3 * floor:.3g}", f"{floor / spent[part]:.0%}"] if floor else ["-", "-"]
        rows.append([job.name, str(way), about, 1e3 * spent[part], f"{spent[part] / wall:.1%}", *cells])
    idle = max(0.0, wall - sum(spent.values()))
    rows.append([job.name, str(way), "nothing runs", 1e3 * idle, f"{idle / wall:.1%}", "0", "-"])
    whole = sum(least.values())
    return [*rows, [job.name, str(way), "step", 1e3 * wall, "100.0%", f"{1e3 * whole:.3g}", f"{whole / wall:.0%}"]]


COLUMNS = ["model", "kernels; precision", "samples x micro-batches x tokens", "ms: median (quartiles)", "tokens/s"]
COLUMNS += ["times as fast as the model's first row", "MFU", "MFU, half of attention", "of the matrix product"]
COLUMNS += ["peak GiB", "predicted GiB", *predictions.COLUMNS]
PARTS_COLUMNS = ["model", "kernels; precision", "part", "ms", "of the step", "floor, ms", "floor / time"]


class Bench:
    """The measurements so far, and their references."""

    def __init__(self, device: torch.device, dry: bool, out: Path | None, limit: float) -> None:
        self.device, self.dry, self.out = device, dry, out
        self.until = time.perf_counter() + limit
        nbytes = 2**20 if dry else min(2 * GIB, free_bytes(device) // 8 // 4096 * 4096)
        self.product = matmul_rate(device, 256 if dry else 8192).median
        self.copy = copy_bandwidth(device, nbytes).median
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.rows: list[list[Any]] = []
        self.parts: list[list[Any]] = []
        self.notes: list[str] = []
        self.wrong: list[str] = []
        self.first: dict[str, float] = {}  # by model: seconds of the first way that ran

    def has_time(self, way: Way, what: str) -> bool:
        needed = COMPILING if way.compiled else SECONDS
        if not self.rows or time.perf_counter() + needed <= self.until:
            return True
        self.notes.append(f"{what} was not tried, for want of time.")
        return False

    def verify_and_time(self, way: Way, models: list[Job]) -> None:
        """A way that is wrong, or for which there is no time, becomes a note."""
        if not self.has_time(way, str(way)):
            return
        error = wrong_with(way, self.device, self.dry)
        print(f"verified {way}: {error or 'right'}", flush=True)
        if error:
            self.wrong.append(f"{way} is left out: {error}.")
            self.notes.append(self.wrong[-1])
            return
        for job in models:
            if self.has_time(way, f"{job.name}: {way}"):
                self.time_step(way, job)
            free(self.device)
            if self.rows:
                self.save()  # at once, so that a crash loses no earlier rows

    def time_step(self, way: Way, job: Job) -> None:
        found: list[Any] = []
        look = None if job.name in self.first else lambda step: found.append(breakdown(step, self.device))
        try:
            seconds, peak = measure(way, job, self.device, 3 if self.dry else 8, self.until, look)
        except (torch.OutOfMemoryError, RuntimeError, ArithmeticError) as error:
            self.notes.append(f"{job.name}, {way}: {type(error).__name__}, {str(error).splitlines()[0][:120]}.")
            if isinstance(error, ArithmeticError):
                self.wrong.append(self.notes[-1])
            return
        self.first.setdefault(job.name, seconds.median)
        self.rows.append(self.row(job, way, seconds, peak))
        if found:
            self.parts += breakdown_rows(job, way, found[0], self.copy, self.product)

    def row(self, job: Job, way: Way, seconds: Ratio, peak: int) -> list[Any]:
        model = step_flops(job.sizes, job.samples, job.seq).model
        reached = model / seconds.median
        halved = (model - masked_flops(job)) / seconds.median
        return [
            f"{job.name}, {parameters(job.sizes) / 1e9:.2f} billion weights",
            str(way),
            f"{job.micro_batch} x {job.accumulation} x {job.seq}",
            Ratio(1e3 * seconds.median, 1e3 * seconds.low, 1e3 * seconds.high),
            round(job.samples * job.seq / seconds.median),
            round(self.first[job.name] / seconds.median, 3),
            f"{reached / self.peak:.1%}" if self.peak else "n/a",
            f"{halved / self.peak:.1%}" if self.peak else "n/a",
            f"{reached / self.product:.1%}",
            round(peak / GIB, 1),
            round(job.predicted_bytes() / GIB, 1),
            *predictions.cells(predicted_step(job), seconds.median),
        ]

    def save(self) -> None:
        rates = f"{self.product / 1e12:.3g} TFLOP/s and a copy {self.copy / 1e12:.3g} TB/s"
        against = f"A matrix product reaches {rates} in the same run."
        verified = "Gradients of each way were verified first."
        notes = " ".join([against, verified, COUNTED, BASIS, *self.notes])
        title = "A training step of the trainer on one GPU"
        write_result("11_train_gpu", title, COLUMNS, self.rows, notes, self.out)
        title = "Where the time of a step goes, and the floor of each part"
        notes = f"From a trace of two steps. {against}"
        write_result("11_train_parts", title, PARTS_COLUMNS, self.parts, notes, self.out)


def run(dry: bool, out: Path | None, limit: float) -> int:
    device = device_here()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        draw_on(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=120))
    bench = Bench(device, dry, out, limit)
    free(device)
    models = jobs(dry, free_bytes(device))
    if not dry and len(models) < 2:
        bench.notes.append("Too little memory is free for a model that is missing here.")
    for way in DRY_WAYS if dry else WAYS:
        bench.verify_and_time(way, models)
    dist.destroy_process_group()
    failures = bench.wrong if bench.rows else ["nothing could be measured;", *bench.notes]
    if failures:
        print(f"bench_train_gpu.py: {' '.join(failures)}", file=sys.stderr)
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Time a training step of the trainer on one GPU.")
    parser.add_argument("--gpu", action="store_true", help="measure; without it there is nothing to do")
    parser.add_argument("--dry", action="store_true", help="with --gpu: the same on the CPU, tiny")
    parser.add_argument("--out", type=Path, help="folder for the results instead of results/")
    parser.add_argument("--seconds", type=float, default=115.0, help="about how long it may take")
    args = parser.parse_args()
    if not args.gpu:
        print("bench_train_gpu.py: absolute speed is only true on a GPU; there, use --gpu")
        return 0
    if args.dry and not args.out:
        print("bench_train_gpu.py: --dry measures nothing worth keeping; add --out DIR", file=sys.stderr)
        return 2
    if not args.dry and not torch.cuda.is_available():
        print(
            "bench_train_gpu.py: PyTorch finds no GPU here; --gpu --dry --out DIR tries it on the CPU", file=sys.stderr
        )
        return 2
    return run(args.dry, args.out, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
