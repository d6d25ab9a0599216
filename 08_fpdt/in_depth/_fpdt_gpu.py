"""How far FPDT goes on one GPU: `python bench_fpdt_attention.py --gpu`. Without a GPU, --dry runs it on the CPU, tiny.

1. Verify. Every kernel against explicit attention, and a model in chunks against the full one, both in bf16
   and compared with float32. An error ends the program before anything is timed or written.
2. Measure the rates of the link and of attention, and take the chunk that fpdt_time.py recommends for them.
3. One step (forward, loss, backward) at growing lengths, three ways: FPDT; each block recomputed; each block
   recomputed with its input offloaded. All three split the loss, so only the block differs. A length runs as
   many layers as its time allows, at full width; the bytes of the others (weights, gradients, AdamW in fp32:
   16 bytes per parameter) are allocated meanwhile. MFU counts the layers that ran, and attention as the full
   square, as everywhere in these chapters (01). At these lengths it is nearly twice the MFU of the causal
   half, which stands beside it.
4. The longest sequence. Only memory limits it, so attention reads only a part of the keys: allocations and
   copies are as in a real step, the values are not. Inputs of layers that do not run are stored on the
   device; with offload only those that fit beside the working memory, the rest must fit on the host.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, with a group open, it would keep that group alive
from _fpdt_demo import Llama, LlamaBlock, dense_attention
from fpdt_attention import EXPLICIT, FUSED, Kernel, attend, attend_backward, merge
from fpdt_costs import Hardware, Sizes, model_host_peak
from fpdt_model import chunked_loss, fpdt_block, loss_sum, use_fpdt
from fpdt_store import DeviceMemory, Store, available_host_memory, machine_for
from fpdt_time import recommend
from harness import predictions
from harness.ceilings import Table, device_here
from harness.reference import error_between
from torch import Tensor
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten
WAYS = ("FPDT", "recomputed", "recomputed, input offloaded")


@dataclass(frozen=True)
class Plan:
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    layers: int
    lengths: tuple[int, ...]  # of the table
    longest: int  # the end of the search
    seconds: float  # for one step of the table
    memory: float  # for attention
    kernel_tokens: int  # a chunk to check and time kernels


REAL = Plan(2048, 16, 4, 8192, 128256, 16, (2**16, 2**17, 2**18, 2**19), 2**22, 5.0, 6e9, 2**14)  # 1.2 billion
TINY = Plan(64, 4, 2, 128, 256, 3, (256, 512), 1024, 5.0, 2e5, 64)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, c, heads, D] -> [B, heads, c, D]
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out.transpose(1, 2), lse.view(q.shape[:3])


def cudnn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool) -> Any:
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))  # [B, c, heads, D] -> [B, heads, c, D]
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # for a dropout of 0
    rest = (seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal)
    shares = aten._scaled_dot_product_cudnn_attention_backward(dout, q, k, v, out, lse[..., None], *rest)
    return [x.transpose(1, 2) for x in shares]


def a_part_of(kernel: Kernel) -> Kernel:
    """The same tensors for a fraction of the work: only the first keys. For memory, not for values."""

    def fewer(k: Tensor) -> Tensor:
        return k[:, : max(k.shape[1] // 32, 1)].contiguous()

    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Any:
        return kernel.forward(q, fewer(k), fewer(v), causal=False)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool) -> Any:
        dq, dk, dv = kernel.backward(dout, q, fewer(k), fewer(v), out, lse, causal=False)
        whole = [torch.zeros_like(k), torch.zeros_like(v)]
        for to, some in zip(whole, (dk, dv), strict=True):
            to[:, : some.shape[1]] = some
        return dq, *whole

    return Kernel(forward, backward)


def first_keys(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """The same for attention without chunks."""
    few = max(k.shape[1] // 32, 1)
    return dense_attention(q, k[:, :few], v[:, :few], causal=False)


# -------------------------------------------------------------------------------------------------------------- verify


def kernel_errors(kernel: Kernel, c: int, D: int, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Errors of out, dq, dk, dv of two chunks, merged through a common log-sum-exp, against float32."""
    found = []
    make = torch.Generator().manual_seed(0)
    q, k, v, k0, v0, dout = (torch.randn(1, c, n, D, generator=make).to(device) for n in (4, 2, 2, 2, 2, 4))
    for use, kind in ((EXPLICIT, torch.float32), (kernel, dtype)):
        a = [x.to(kind) for x in (q, k, v, k0, v0, dout)]
        out, lse = attend(use, *a[:3], causal=True)
        merge(out, lse, *attend(use, a[0], a[3], a[4], causal=False))
        dq, *dkv = (torch.zeros_like(x) for x in (q, k, v, k0, v0))
        given = (a[5], a[0], out.to(kind), lse)
        attend_backward(use, (dq, *dkv[:2]), given, a[1], a[2], causal=True)
        attend_backward(use, (dq, *dkv[2:]), given, a[3], a[4], causal=False)
        found.append([out, dq, *dkv])
    return [error_between(x.float(), want) for want, x in zip(*found, strict=True)]


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds, after one run to warm up."""
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose_kernel(plan: Plan, device: torch.device, dtype: torch.dtype) -> tuple[str, Kernel, float]:
    """The fastest correct kernel, and its FLOP/s forward."""
    candidates = {"FlashAttention-2": FUSED}
    if device.type == "cuda":
        candidates["cuDNN"] = Kernel(cudnn_forward, cudnn_backward)
    right: dict[str, tuple[float, Kernel]] = {}
    c = plan.kernel_tokens
    D = plan.hidden // plan.heads
    x = [torch.randn(1, c, plan.kv_heads, D, device=device, dtype=dtype) for _ in range(3)]
    for name, kernel in candidates.items():
        try:
            errors = kernel_errors(kernel, min(c, 1024), D, device, dtype)
            if not all(error < 0.03 for error in errors):
                print(f"{name} is wrong: errors {errors}")
                continue
            right[name] = (timed(lambda kernel=kernel: kernel.forward(*x, causal=False), device), kernel)
        except RuntimeError as error:
            print(f"{name} cannot be used: {str(error).splitlines()[0]}")
    if not right:
        sys.exit("no attention kernel gives the right numbers")
    name = min(right, key=lambda name: right[name][0])
    return name, right[name][1], 4 * c * c * plan.kv_heads * D / right[name][0]


def verify_model(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> None:
    """A model in chunks must be as near to float32 gradients as the full model in the same precision."""
    sizes = dict(hidden=256, heads=4, kv_heads=2, intermediate=256)
    tokens = torch.randint(256, (1, 513), generator=torch.Generator().manual_seed(0)).to(device)
    tokens, labels, positions = tokens[:, :-1], tokens[:, 1:], torch.arange(512, device=device)
    grads = {}
    for what, kind in (("exact", torch.float32), ("whole", dtype), ("chunks", dtype)):
        model = Llama(**sizes).to(device, kind)
        if what == "chunks":
            use_fpdt(model, 4, dist.group.WORLD, Store(machine_for(device)), kernel=kernel)
            loss = loss_sum(model, tokens, labels, positions, 4)
        else:
            loss = model.loss_sum(tokens, labels, positions)
        (loss / 512).backward()
        grads[what] = {name: p.grad.float() for name, p in model.named_parameters()}
    for name, want in grads["exact"].items():
        whole, chunks = (error_between(grads[what][name], want) for what in ("whole", "chunks"))
        if not chunks <= 2 * whole + 1e-3:
            sys.exit(f"gradient of {name}: error {chunks:.1e} in chunks, {whole:.1e} without")


def link_speed(device: torch.device) -> float:
    """Bytes/s from the host, pinned."""
    host = machine_for(device).host_empty(torch.Size([2**28 if device.type == "cuda" else 2**20]), torch.uint8)
    there = torch.empty_like(host, device=device)
    return host.nbytes / timed(lambda: there.copy_(host, non_blocking=True), device)


# ------------------------------------------------------------------------------------------------------------- measure


def flops(plan: Plan, S: int, layers: int, scores: float = 1.0) -> float:
    """FLOPs of one step, both passes, nothing twice: chapter 01's `step_flops`, with attention as the full
    square. `scores`: the counted part of the square; 0.5 for a causal mask."""
    block = 2 * plan.hidden**2 * (1 + plan.kv_heads / plan.heads) + 3 * plan.hidden * plan.intermediate
    return 3 * (layers * (2 * block * S + scores * 4 * S * S * plan.hidden) + 2 * S * plan.hidden * plan.vocab)


def held_beside(plan: Plan, way: str, z: Sizes, layers: int, block: int, head: int) -> int:
    """Bytes to allocate on a GPU beside a step of `layers` layers with `block` parameters each and an output
    layer of `head`: 16 bytes per parameter of the model, minus weights and gradients of what runs, plus the
    inputs of the layers that do not run. With offload only those that fit are on the device, the others on
    the host; MemoryError if they do not fit there."""
    ran = 2 * z.e * (layers * block + head)
    weights = 16 * (plan.layers * block + head) - ran
    x_bytes = z.S * plan.hidden * z.e
    waiting = (plan.layers - layers) * x_bytes
    if way == "recomputed":
        return weights + waiting
    working = 6 * x_bytes + plan.memory + 4 * head * z.e + 2**32  # x, y, dy, dx, two of the loss; attention; the rest
    room = torch.cuda.get_device_properties(0).total_memory - weights - ran - working
    on_device = min(waiting, max(0, int(room // x_bytes)) * x_bytes)
    on_host = waiting - on_device
    if way == "FPDT":
        on_host += model_host_peak(z, plan.hidden, layers, "input")
    if on_host > 0.95 * available_host_memory():
        raise MemoryError(f"the host would need {on_host / 1e9:.0f} GB")
    return weights + on_device


def step(
    plan: Plan,
    way: str,
    S: int,
    layers: int,
    u: int,
    device: torch.device,
    dtype: torch.dtype,
    kernel: Kernel,
    rehearse: bool = False,
) -> tuple[float, int]:
    """Seconds of one forward and backward, and the peak of the device in bytes, including other layers'. A
    rehearsal only tests memory, with a part of attention, untimed."""
    cuda = device.type == "cuda"
    D = plan.hidden // plan.heads
    sizes = (plan.hidden, plan.heads, plan.kv_heads, plan.intermediate)
    blocks = [LlamaBlock(*sizes).to(device, dtype) for _ in range(layers)]
    head = (torch.randn(plan.vocab, plan.hidden, device=device, dtype=dtype) * 0.02).requires_grad_()
    weights = [head, *(p for block in blocks for p in block.parameters())]
    angles = torch.arange(S, device=device)[:, None].float() / 10000 ** (torch.arange(0, D, 2, device=device) / D)
    cos = angles.cos()
    sin = angles.sin()
    labels = torch.randint(plan.vocab, (1, S), device=device)
    store = Store(machine_for(device), host_limit=available_host_memory() if cuda else None)
    others = 0  # on a CPU nothing else is allocated
    if cuda:
        z = Sizes(S, 1, u, plan.heads, plan.kv_heads, D, dtype.itemsize)
        others = held_beside(plan, way, z, layers, sum(p.numel() for p in blocks[0].parameters()), head.numel())
    if rehearse:
        kernel = a_part_of(kernel)
        for block in blocks:
            block.self_attn.parts.attention = first_keys

    def run(block: LlamaBlock, x: Tensor) -> Tensor:
        if way == "FPDT":
            finer = max(S // u // 8192, 1)
            return fpdt_block(block, u, dist.group.WORLD, store, finer=finer, kernel=kernel)(x, cos, sin)
        offload = torch.autograd.graph.save_on_cpu(pin_memory=cuda) if "offloaded" in way else contextlib.nullcontext()
        with offload:
            return checkpoint(block, x, cos, sin, use_reentrant=False)

    def once() -> None:
        y = torch.zeros(1, S, plan.hidden, device=device, dtype=dtype).normal_().requires_grad_()
        for block in blocks:
            y = run(block, y)
        (chunked_loss(y, head, labels, max(S // 8192, 1)) / S).backward()
        for p in weights:
            p.grad = None

    ballast = torch.empty(others, dtype=torch.uint8, device=device)
    if not cuda:
        with DeviceMemory() as meter:
            return timed(once, device), meter.peak
    torch.cuda.reset_peak_memory_stats(device)
    if rehearse:
        once()
        synchronize(device)
    seconds = float("nan") if rehearse else timed(once, device)
    del ballast
    return seconds, torch.cuda.max_memory_allocated(device)


def predicted_seconds(plan: Plan, S: int, layers: int, gpu: predictions.Gpu) -> float:
    """From the data sheet. Forward is computed twice, and attention's backward is 2.5 forwards. A score costs
    4 D FLOPs of matmuls and one exponential, which takes a multiprocessor as long as 256. Softmax runs
    after the matmuls, not beside them, which leaves D / (D + 64) of the rate."""
    rest = flops(plan, S, layers, 0.0)
    attention = flops(plan, S, layers, 0.5) - rest
    slower = 1 + 64 * plan.heads / plan.hidden
    return (rest * 4 / 3 + attention * 4.5 / 3 * slower) / (predictions.MULTIPLIED * gpu.bf16)


def no_memory(error: Exception) -> str:
    """What ran out; other errors are raised again. A host without pinnable memory is a plain RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return type(error).__name__
    if "out of memory" not in str(error):
        raise error
    return "no more pinned memory"


def free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        with contextlib.suppress(AttributeError):
            torch._C._host_emptyCache()  # also pinned memory


def chunks_for(plan: Plan, S: int, h: Hardware) -> int:
    best, _ = recommend(Sizes(S, 1, 1, plan.heads, plan.kv_heads, plan.hidden // plan.heads), h, plan.memory)
    return best.u if best else S // 64


COLUMNS = ["tokens", "way", "layers that ran", "tokens of a chunk", "seconds", "MFU", "MFU, half of attention"]
COLUMNS += ["peak, GB", "predicted, s"]
NOTES = (
    "MFU counts attention as the full square (the column beside it: the half that a causal mask leaves), and "
    "recomputation not at all. Predicted: what is computed, forward twice, at 80 % of the data sheet's rate, attention "
    "at D / (D + 64) of that. Host memory of all layers at"
)


class Bench:
    """The two tables, and what their rows need."""

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype, out: Path | None) -> None:
        self.plan = plan
        self.device = device
        self.dtype = dtype
        self.begun = time.perf_counter()
        name, self.kernel, self.reached = choose_kernel(plan, device, dtype)
        verify_model(self.kernel, device, dtype)
        self.h = Hardware(flops=self.reached, link=link_speed(device))
        where = f"{name}, {self.reached / 1e12:.3g} TFLOP/s forward; link {self.h.link / 1e9:.3g} GB/s."
        z = Sizes(plan.lengths[-1], 1, 1, plan.heads, plan.kv_heads, plan.hidden // plan.heads)
        host = model_host_peak(z, plan.hidden, plan.layers, "input") / 1e9
        title = f"One step of a Llama of hidden size {plan.hidden} and {plan.layers} layers; those that did not run are"
        notes = f"{where} {NOTES} {z.S:,} tokens: {host:.3g} GB."
        self.table = Table("08_fpdt_gpu", f"{title} held", COLUMNS, notes, out)
        title = "The longest sequence whose step fits, memory of all layers held"
        notes = "One layer runs, with the allocations and copies of a real step; its attention sees a part of the keys."
        columns = ["way", "tokens", "peak, GB", "ended by"]
        self.longest = Table("08_fpdt_longest", title, columns, f"{where} {notes}", out)

    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def one_step(self, S: int, way: str) -> bool:
        """Time a length; whether it fits."""
        plan = self.plan
        gpu = predictions.here()
        # 4.5/3 of the counted work: forward twice, and backward is 2.5 forwards
        one = 1.5 * flops(plan, S, 1, 0.5) / self.reached
        layers = max(1, min(plan.layers, int(plan.seconds / 2 / one)))
        u = chunks_for(plan, S, self.h)
        expected = f"{predicted_seconds(plan, S, layers, gpu):.3g}" if gpu else "-"
        try:
            seconds, peak = step(plan, way, S, layers, u, self.device, self.dtype, self.kernel)
        except (MemoryError, RuntimeError) as error:
            self.table.add(S, way, layers, "", "out of memory", "", "", no_memory(error), expected)
            return False
        finally:
            free(self.device)
        rates = [flops(plan, S, layers, share) / seconds for share in (1.0, 0.5)]
        mfu = [f"{rate / gpu.bf16:.1%}" if gpu else "n/a" for rate in rates]
        self.table.add(S, way, layers, S // u, round(seconds, 3), *mfu, round(peak / 1e9, 3), expected)
        return True

    def search(self, way: str, until: float, fits: int = 0) -> None:
        """Double the length until it does not fit, from `fits` on, which does. The row is updated with each
        length, and stays if this program is ended."""
        row = [way, fits, "", "the time was over"]
        self.longest.rows.append(row)
        self.longest.write()
        last = self.plan.longest
        S = 2 * fits or self.plan.lengths[1]
        while last >= S and self.seconds() < until:
            u = chunks_for(self.plan, S, self.h)
            try:
                _, peak = step(self.plan, way, S, 1, u, self.device, self.dtype, self.kernel, rehearse=True)
            except (MemoryError, RuntimeError) as error:
                row[3] = f"{no_memory(error)} at {S:,}"
                break
            finally:
                free(self.device)
            row[1:3] = [S, round(peak / 1e9, 3)]
            if last == S:
                row[3] = "the search ends here"
            self.longest.write()
            S *= 2
        self.longest.write()


def measure(dry: bool, out: Path | None, limit: float = 450.0) -> int:
    refused = ""
    if not dry and not torch.cuda.is_available():
        refused = "--gpu needs a GPU and there is none; add --dry --out DIR to try it on the CPU"
    elif dry and out is None:
        refused = "--dry writes nothing to results/; say where with --out DIR"
    if refused:
        print(f"bench_fpdt_attention.py: {refused}", file=sys.stderr)
        return 2
    device = device_here()
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **where)
    plan = TINY if dry else REAL
    bench = Bench(plan, device, torch.float32 if dry else torch.bfloat16, out)
    # A length that surely fits, the target length, then the limit of FPDT; the others for comparison.
    goals = [(plan.lengths[1], WAYS[0]), (plan.lengths[-1], WAYS[0])]
    ran = [S for S, way in goals if bench.one_step(S, way)]
    bench.search(WAYS[0], 0.7 * limit, max(ran, default=0))
    rest = [(S, way) for S in plan.lengths[::-1] for way in WAYS if (S, way) not in goals]
    for S, way in rest:
        if bench.seconds() < 0.8 * limit:
            bench.one_step(S, way)
    for way in WAYS[1:]:
        bench.search(way, 0.9 * limit)
    dist.destroy_process_group()
    return 0
