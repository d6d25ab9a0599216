"""The trainer's step on one GPU: tokens per second, MFU, memory, and where the time goes.

    python 11_5d_trainer/bench/bench_train_gpu.py                              what is expected of the step, and why
    python 11_5d_trainer/bench/bench_train_gpu.py --gpu [--out DIR] [--seconds 115]
    python 11_5d_trainer/bench/bench_train_gpu.py --gpu --dry --out DIR        the same program on the CPU, tiny

1. Verify. For each way to compute (kernels, precision, compiled or not) the gradients of a small model are held
   against those of fp32 on PyTorch's own kernels. They may be off by twice of what PyTorch's kernels are off in the
   same precision. What is wrong is left out, and the program ends with 1. Each way is verified right before it is
   timed: a kernel that breaks the whole process takes nothing with it that was measured before.
2. Time whole steps as the trainer takes them: batches from the host, forward, backward, norm, clipping, AdamW. Where
   the trainer launches a step before it has read the last one's loss, so does this. Two models at 4096 tokens: one of
   1.7 billion weights, and one with the widths of Llama-3 8B and as many layers as find room. Tokens are random, which
   changes nothing about the time. Both models are timed in the first way before either is in the second. Each row is
   written as it comes. No way is begun that would not end within --seconds, as far as can be told.
3. Profile the first way of each model that runs, and put beside each part of the step its floor: FLOPs over the rate
   of a matrix product, bytes over the bandwidth of a copy, both measured in the same run.

MFU is chapter 01's: the model's FLOPs, with attention as the full square, over the data sheet's bf16 rate. The column
beside it counts of attention only the half that a causal mask leaves.
"""

import argparse
import dataclasses
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


# The most valuable first: when the time is over, the rest is left out.
WAYS = (
    Way("triton", "bf16-master"),
    Way("torch", "bf16-master", compiled=True),
    Way("triton", "fp8-tensor"),
    Way("torch", "bf16-master"),
    Way("cuda", "bf16-master"),
    Way("triton", "fp8-block"),
)
SECONDS, COMPILING = 15.0, 45.0  # that a way takes at least: to build and verify it, and with torch.compile
DRY_WAYS = (Way("torch", "bf16-master"), Way("triton", "fp32"))  # the interpreter knows no bf16


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
        """Of a step: what stays, activations by chapter 01, and the gradient of the logits beside them."""
        held = BYTES_PER_WEIGHT * parameters(self.sizes)
        kept = sum(activations(self.sizes, self.micro_batch, self.seq, element=2).values())
        return held + kept + 4 * self.micro_batch * self.seq * self.sizes.vocab_size


def jobs(dry: bool, free: int) -> list[Job]:
    """The two models, cut down to what `free` bytes of memory allow."""
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
        # Two samples at a time: every micro-batch adds its gradients to the sum, 6 bytes a weight.
        job = Job(f"Llama-3 8B's widths, {layers} of {deep.layers} layers", sizes, 4096, 2, 4)
        if job.predicted_bytes() <= room:
            found.append(job)
            break
    return found


def draw_on(device: torch.device) -> None:
    """First weights from the device's own generator. Chapter 01 draws on the host, the same anywhere; for billions of
    weights that takes longer than all the measuring."""
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
        zero=1,  # on one rank nothing is sent: what it gives is the flat buffers
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


def gradients(way: Way, job: Job, device: torch.device) -> dict[str, torch.Tensor]:
    me = start(way, job, device)
    batches = [shard_batch(me, batch) for batch in random_batches(job)]
    zero_grad(me)
    forward_and_backward(me, batches, valid_tokens(me, batches))
    found = (pair for owner in me.owners for pair in owner.full_gradients().items())
    return {name: g.detach().float().clone() for name, g in found}


def verifier(device: torch.device, tiny: bool = True) -> Callable[[Way], str]:
    """A function that says what is wrong with a way; "" if nothing is. Each is tried once, when it is asked about."""
    job = Job("to verify", TINY if tiny else SMALL, 16 if tiny else 256, 1, 2)
    exact = gradients(Way("torch", "fp32"), job, device)
    own: dict[str, dict[str, float]] = {}  # by precision: what PyTorch's kernels are off by
    verdict: dict[Way, str] = {}

    def wrong(way: Way) -> str:
        if way in verdict:
            return verdict[way]
        try:
            if way.precision not in own:
                theirs = gradients(Way("torch", way.precision), job, device)
                own[way.precision] = {name: error_between(theirs[name], want) for name, want in exact.items()}
            got = gradients(way, job, device)
            off = {name: error_between(got[name], want) for name, want in exact.items()}
            bad = [name for name in off if not off[name] <= 2 * own[way.precision][name] + 1e-3]
            verdict[way] = f"gradient of {bad[0]} is off by {off[bad[0]]:.1e}" if bad else ""
        except Exception as error:  # one way may not run on this device; the others go on, and the end says so
            verdict[way] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
        print(f"verified {way}: {verdict[way] or 'right'}", flush=True)
        return verdict[way]

    return wrong


# ------------------------------------------------------------------------------------------------------------- measure


@dataclass
class Measured:
    seconds: Ratio
    peak: int
    losses: list[float]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def steps(me: Trainer, batches: list) -> Iterator[tuple[float, float]]:
    """Loss and seconds of one step after the other. Where the host reads late, the next one is under way by then."""
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
    way: Way, job: Job, device: torch.device, repeats: int, look: Callable | None = None, until: float = math.inf
) -> Measured:
    """Seconds of a step after two to warm up: `repeats` times, fewer (two at least) if by the clock it is `until`.

    `look(step)` gets the step, warm, before everything is let go.
    """
    me, batches = start(way, job, device), random_batches(job)
    seconds: list[float] = []
    losses: list[float] = []
    for loss, took in steps(me, batches):
        losses.append(loss)
        seconds += [took] if len(losses) > 2 else []
        if len(seconds) == repeats or (len(seconds) >= 2 and time.perf_counter() > until):
            break
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):  # the same batch again and again: it must be learnt
        raise ArithmeticError(
            f"the loss of one batch goes from {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps"
        )
    if look:
        step = launch_step if reads_late(me) else train_step
        look(lambda: step(me, batches))
    return Measured(ratio_of(seconds), peak, losses)


# The first pattern that fits the name of a GPU's kernel, or of an operation on the CPU, says what it belongs to.
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
    """Of a kernel in C++ the functions of PyTorch that it is made of: templates bury them."""
    words = re.findall(r"at::native::(?:\(anonymous namespace\)::)?(\w+)", name)
    return "/".join(dict.fromkeys(words))[:80] or name[:80]


def breakdown(
    step: Callable[[], Any], device: torch.device, steps: int = 2
) -> tuple[dict[str, float], list[str], float]:
    """Seconds of a step by part, the longest kernels that no pattern names, and the seconds of the step by the clock.

    On a GPU only kernels and copies are counted, from the trace: they follow each other on one stream. On the CPU each
    operation counts without those inside it.
    """
    on_gpu = device.type == "cuda" and torch.version.cuda is not None  # a stand-in GPU leaves no trace
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for i in range(steps):
            if i == 1:  # the first one also wakes the profiler up, and does not count for the clock
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

    Attention: the half that a causal mask leaves, and backward 2.5 times the forward (it computes the scores again).
    Element-wise parts read and write each of their tensors once, in bf16.
    """
    from fused import bytes_moved  # here: on a CPU the import turns Triton's interpreter on

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
    """The half of attention that a causal mask hides, forward and backward: MFU counts it, as is usual."""
    return 3 * forward_flops(job.sizes, job.samples, job.seq)["attention core"] / 2


COUNTED = "MFU counts attention as the full square; the column beside it, the half that a causal mask leaves."
BASIS = (
    "Predicted: the floors of all parts by the data sheet, 90 % of its bandwidth and 80 % of its rate; attention 50 %."
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


# What each change to the step should save, in bytes that are no longer moved and in seconds for which the device waited
# for the host. Written down before any of it was measured.


@dataclass(frozen=True)
class Saving:
    what: str
    nbytes: Callable[[Job], float]
    host: float  # seconds in which the device waited for Python
    falsified_by: str


def sizes_of(job: Job) -> tuple[int, int, int]:
    """Weights; elements of a hidden state of the step's tokens; layers."""
    return parameters(job.sizes), job.samples * job.seq * job.sizes.hidden, job.sizes.layers


def sum_of_sides(sizes: LlamaConfig) -> int:
    """In and out of all linear layers, added: what dW reads for each token."""
    attention = 2 * (sizes.hidden + sizes.heads * sizes.head_dim) + 2 * (sizes.hidden + sizes.kv_heads * sizes.head_dim)
    feed_forward = 3 * (sizes.hidden + sizes.intermediate)
    return sizes.layers * (attention + feed_forward) + sizes.hidden + sizes.vocab_size


SAVINGS = (
    Saving(
        "one AdamW kernel for each group of options (28 bytes per weight) instead of 98 buckets that Python casts, "
        "updates and copies, in about 350 microseconds each",
        lambda job: -28 * sizes_of(job)[0],
        98 * 350e-6,
        "`optimizer and clipping` above 1.3 times its floor",
    ),
    Saving(
        "the norm over two flat buffers in fp32 chunks: 2 bytes per weight instead of 18 (a float64 copy, read again)",
        lambda job: 16 * sizes_of(job)[0],
        0.0,
        "norm kernels above 2 ms, or more than ten of them in a step",
    ),
    Saving(
        "loss, norm and votes read one step late, batches from pinned memory: three times the host reaches the device "
        "with nothing queued, about 1.5 ms each",
        lambda job: 0.0,
        3 * 1.5e-3,
        "`nothing runs` above 1 % of the step",
    ),
    Saving(
        "the residual added by the norm after attention: 8 tensors of a hidden state moved instead of 11",
        lambda job: 3 * 2 * sizes_of(job)[1] * sizes_of(job)[2],
        0.0,
        "`other element by element` as long as without it (Parts.add_norm = None)",
    ),
    Saving(
        "one x for q, k, v and one for gate, up: of its 3 additional gradients in a layer each is read by the next "
        "product (1 tensor), and not added in a pass of its own (3)",
        lambda job: 3 * 2 * 2 * sizes_of(job)[1] * sizes_of(job)[2],
        0.0,
        "products that get slower by more than that (Parts.linears = None): cuBLAS may add worse than it multiplies",
    ),
    Saving(
        "output layer and loss in chunks: 6 GB of logits and their gradient less at the peak; 2 chunks add the "
        "weight's gradient in fp32 (16 bytes an element each) and round it (6)",
        lambda job: -(2 * 16 + 6) * job.sizes.vocab_size * job.sizes.hidden,
        0.0,
        "a peak that is less than 4 GiB lower, or a step more than 2 ms longer (Parts.linear_cross_entropy = None)",
    ),
    Saving(
        "in fp8-tensor alone: x of q, k, v and of gate, up quantised 2 times in a layer instead of 5, each time read "
        "for its amax (2 bytes), read again and written in 8 bits (3)",
        lambda job: 3 * 5 * sizes_of(job)[1] * sizes_of(job)[2],
        0.0,
        "`fp8 casts` less than that below what they take with Parts.linears = None",
    ),
    Saving(
        "in --kernels cuda alone: no copies of W, dy and x turned round for the products of backward (4 bytes an "
        "element, by PyTorch's copy at half the bandwidth)",
        lambda job: 2 * 4 * (sizes_of(job)[0] + job.samples * job.seq * sum_of_sides(job.sizes)),
        0.0,
        "a step above 930 ms, where it was 983 with the copies",
    ),
)


def expectations() -> list[str]:
    """Milliseconds of a step by each of SAVINGS, for the GPUs that this is meant for."""
    job = Job("1.7 billion (SmolLM)", PRESETS["smollm-1.7b"], 4096, 8, 1)
    gpus = [gpu for gpu in predictions.GPUS if gpu.name in ("H100", "H200")]
    names = ", ".join(gpu.name for gpu in reversed(gpus))
    lines = [f"ms of a step of {job.samples} x {job.seq} tokens that each change should save on {names}:"]
    for saving in SAVINGS:
        saved = [1e3 * (saving.host + saving.nbytes(job) / (predictions.COPIED * gpu.bandwidth)) for gpu in gpus]
        lines.append(f"{saved[1]:6.1f} {saved[0]:6.1f}  {saving.what}. Wrong if: {saving.falsified_by}.")
    return lines


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


def run(dry: bool, out: Path | None, limit: float) -> int:
    begun = time.perf_counter()
    device = device_here()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        draw_on(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=120),
    )
    wrong_with = verifier(device, tiny=dry)
    product = matmul_rate(device, 256 if dry else 8192).median
    copy = copy_bandwidth(device, 2**20 if dry else min(2 * GIB, free_bytes(device) // 8 // 4096 * 4096)).median
    free(device)
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    rows: list[list[Any]] = []
    parts: list[list[Any]] = []
    notes: list[str] = []
    wrong: list[str] = []
    room = free_bytes(device)
    planned = jobs(dry, room)
    if not dry and len(planned) < 2:
        notes.append(f"{room / GIB:.0f} GiB are free: too little for a model that is missing here.")
    first: dict[str, float] = {}  # by model: seconds of the first way that ran
    until = begun + limit

    def attempt(job: Job, way: Way) -> None:
        needed = 0.0 if not first else COMPILING if way.compiled else SECONDS
        if time.perf_counter() + needed > until:
            notes.append(f"{job.name}: {way} was not tried, for want of time.")
            return
        if off := wrong_with(way):
            left_out = f"{way} is left out: {off}."
            if left_out not in wrong:
                notes.append(left_out)
                wrong.append(left_out)
            return
        free(device)
        what: list[Any] = []
        look = None if job.name in first else lambda step: what.append(breakdown(step, device))
        try:
            got = measure(way, job, device, 3 if dry else 8, look, until)
        except (torch.OutOfMemoryError, RuntimeError, ArithmeticError) as error:
            notes.append(f"{job.name}, {way}: {type(error).__name__}, {str(error).splitlines()[0][:120]}.")
            wrong.extend([notes[-1]] if isinstance(error, ArithmeticError) else [])
            return
        seconds = got.seconds.median
        reached = step_flops(job.sizes, job.samples, job.seq).model / seconds
        halved = (step_flops(job.sizes, job.samples, job.seq).model - masked_flops(job)) / seconds
        rows.append(
            [
                f"{job.name}, {parameters(job.sizes) / 1e9:.2f} billion weights",
                str(way),
                f"{job.micro_batch} x {job.accumulation} x {job.seq}",
                Ratio(*(1e3 * s for s in (seconds, got.seconds.low, got.seconds.high))),
                round(job.samples * job.seq / seconds) if not dry else "n/a on CPU",
                round(first.setdefault(job.name, seconds) / seconds, 3),
                f"{reached / peak:.1%}" if peak else "n/a",
                f"{halved / peak:.1%}" if peak else "n/a",
                f"{reached / product:.1%}",
                round(got.peak / GIB, 1) if device.type == "cuda" else "n/a",
                round(job.predicted_bytes() / GIB, 1),
                *predictions.cells(predicted_step(job), seconds),
            ]
        )
        if what:
            parts.extend(breakdown_rows(job, way, what[0], copy, product))

    for way in DRY_WAYS if dry else WAYS:
        for job in planned:
            attempt(job, way)
            free(device)
            if rows:
                save(rows, parts, notes, copy, product, out)  # at once: whoever stops this keeps what there is
    dist.destroy_process_group()
    if not rows:
        print(f"bench_train_gpu.py: nothing could be measured; {' '.join(notes)}", file=sys.stderr)
        return 1
    if wrong:
        print(f"bench_train_gpu.py: {' '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def save(rows: list, parts: list, notes: list[str], copy: float, product: float, out: Path | None) -> None:
    against = (
        f"A matrix product reaches {product / 1e12:.3g} TFLOP/s and a copy {copy / 1e12:.3g} TB/s in the same run."
    )
    write_result(
        "11_train_gpu",
        "A training step of the trainer on one GPU",
        [
            "model",
            "kernels; precision",
            "samples x micro-batches x tokens",
            "ms: median (quartiles)",
            "tokens/s",
            "times as fast as the model's first row",
            "MFU",
            "MFU, half of attention",
            "of the matrix product",
            "peak GiB",
            "predicted GiB",
            *predictions.COLUMNS,
        ],
        rows,
        " ".join([against, "Gradients of each way were verified first. Goal: 60 % MFU.", COUNTED, BASIS, *notes]),
        folder=out,
    )
    write_result(
        "11_train_parts",
        "Where the time of a step goes, and the floor of each part",
        ["model", "kernels; precision", "part", "ms", "of the step", "floor, ms", "floor / time"],
        parts,
        f"From a trace of two steps. {against}",
        folder=out,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Time a training step of the trainer on one GPU.")
    parser.add_argument("--gpu", action="store_true", help="measure; without it there is nothing to do")
    parser.add_argument("--dry", action="store_true", help="with --gpu: the same on the CPU, tiny")
    parser.add_argument("--out", type=Path, help="folder for the results instead of results/")
    parser.add_argument("--seconds", type=float, default=115.0, help="about how long it may take")
    args = parser.parse_args()
    name = Path(__file__).name
    if args.dry and not (args.gpu and args.out):
        print(f"{name}: --dry goes with --gpu and --out DIR: its numbers are no results", file=sys.stderr)
        return 2
    if args.gpu and not args.dry and not torch.cuda.is_available():
        print(f"{name}: --gpu: PyTorch finds no GPU here; --gpu --dry --out DIR tries it on the CPU", file=sys.stderr)
        return 2
    if not args.gpu:
        print(f"{name}: absolute speed is only true on a GPU; there, use --gpu")
        print("\n".join(expectations()))
        return 0
    return run(args.dry, args.out, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
