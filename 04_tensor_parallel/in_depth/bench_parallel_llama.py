"""The vocabulary-parallel loss against torch's loss_parallel, and against gathered logits: 4 ranks, one run.

    python 04_tensor_parallel/in_depth/bench_parallel_llama.py    4 processes on CPU (Gloo), or 4 GPUs (NCCL)

Losses and gradients of the logits are compared before any timing. A step is loss and backward.
Then Llama 3 70B on 1 to 64 ranks, by formulas that the tests compare with measurements.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tensor_parallel_bench import RANKS, must_be_same, options, run, whole
from harness.meter import communication, peak_memory
from harness.report import paired, write_result
from parallel_block import Config, kept_bytes
from parallel_llama import vocab_parallel_cross_entropy, weights_per_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

TOKENS = 512
LLAMA_70B = Config(128256, hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672)
SEQUENCE = 8192  # tokens of the one sequence that LLAMA_70B trains on


def degrees() -> list[list[int | str]]:
    """Memory of Llama 3 70B on one of t ranks, in GB."""
    rows: list[list[int | str]] = []
    for t in (1, 2, 4, 8, 16, 32, 64):
        weights = weights_per_rank(LLAMA_70B, t)
        layouts = [SimpleNamespace(size=t, sequence_parallel=split) for split in (False, True)]
        kept = [LLAMA_70B.layers * sum(kept_bytes(LLAMA_70B, 1, SEQUENCE, tp, 2).values()) for tp in layouts]  # type: ignore[arg-type]
        rows.append([t, *(f"{size / 1e9:.1f}" for size in (2 * weights, 16 * weights, *kept))])
    return rows


def gathered(logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
    """What the chapter avoids: all logits on every rank, and a gradient of which a rank uses its part."""
    pieces = [torch.empty_like(logits) for _ in range(RANKS)]
    dist.all_gather(pieces, logits.detach())
    pieces[dist.get_rank()] = logits
    return F.cross_entropy(torch.cat(pieces, -1), labels, reduction="sum")


@loss_parallel()  # concerns DTensors only
def worker(device: torch.device) -> None:
    group, rows = dist.group.WORLD, []
    mesh = init_device_mesh(device.type, (RANKS,))

    def by_torch(logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
        return F.cross_entropy(DTensor.from_local(logits, mesh, [Shard(1)]), labels, reduction="sum")

    def by_us(logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels, vocab, group)

    for vocab in (1024, 16384):
        generator = torch.Generator().manual_seed(0)
        full = torch.randn(TOKENS, vocab, generator=generator).to(device)
        labels = torch.randint(vocab, (TOKENS,), generator=generator).to(device)
        logits = full.chunk(RANKS, 1)[dist.get_rank()].clone().requires_grad_()

        def step(fn, logits=logits, labels=labels, vocab=vocab) -> Tensor:
            logits.grad = None
            loss = fn(logits, labels, vocab)
            loss.backward()
            return loss.detach()

        results, sent, peaks = {}, {}, {}
        for fn in (by_torch, by_us, gathered):
            results[fn] = whole(step(fn)), logits.grad.clone()
            with communication() as wire, peak_memory() as memory:
                step(fn)
            sent[fn] = wire.total
            peaks[fn] = memory.peak
        for fn, name in ((by_us, "vocab_parallel_cross_entropy"), (gathered, "gathered logits")):
            for got, want in zip(results[fn], results[by_torch], strict=True):
                must_be_same(got, want, f"{name}: the loss, or the gradient of the logits,")
            ratio = paired(lambda f=fn: step(f), lambda: step(by_torch), repeats=11, setup=dist.barrier)
            rows.append([vocab, name, sent[fn], sent[by_torch], peaks[fn], peaks[by_torch], ratio])
    if dist.get_rank() == 0:
        columns = ["V", "loss", "bytes sent", "torch's", "peak bytes", "torch's", "seconds / torch's (quartiles)"]
        title = f"The loss of a cut vocabulary against torch's loss_parallel, {RANKS} ranks, {TOKENS} tokens"
        write_result("04_parallel_llama", title, columns, rows, "Peak: bytes allocated at once beyond the logits.")
        columns = ["t", "weights", "weights, gradients, AdamW", "kept, tensor parallel", "kept, tensor + sequence"]
        note = (
            "GB of 1e9 bytes, not measured but by `weights_per_rank` and `kept_bytes`: bf16 weights; 16 bytes a weight "
            "with gradients, master weights and moments; what the 80 blocks keep, nothing recomputed."
        )
        title = f"Llama 3 70B on a rank of t, one sequence of {SEQUENCE:,} tokens, by the formulas"
        write_result("04_degrees", title, columns, degrees(), note, computed=True)


if __name__ == "__main__":
    options(__doc__)
    run(worker)
