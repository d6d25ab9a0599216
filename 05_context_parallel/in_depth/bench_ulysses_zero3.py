"""ZeRO-3 over data x sequence, as the Ulysses paper trains: longer texts on more ranks, beside the paper's tables.

    python 05_context_parallel/in_depth/bench_ulysses_zero3.py

Chapter 1's model, chapter 3's ZeRO-3 over *all* ranks, and Ulysses among those that share a sequence. To ZeRO it is the
same whether the gradients of two ranks are of different sequences or of different parts of one: it shards over both,
and sums over both. First the weights after a step must be those of one process; only then is anything
measured. The paper (arXiv 2309.14509, tables 2 and 3) has 8 replicas on 64, 128 and 256 GPUs; here there are 2 on 2, 4
and 8 ranks. Efficiency is FLOPs for each GPU second, or CPU second of all ranks, over that of the first row.
"""

import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "01_single_gpu" / "in_depth"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "03_zero" / "in_depth"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accounting import step_flops
from bench_context_ring import cpu_seconds
from context_ring import IGNORE, layout_positions, next_token_labels, text
from context_ulysses import PAPER, ulysses
from harness.meter import peak_memory
from harness.oracle import assert_same
from harness.ranks import run_ranks
from harness.report import write_result
from llama import Llama, LlamaConfig, Parts
from zero3 import Zero3

CONFIG = LlamaConfig(vocab_size=256, hidden=128, layers=4, heads=8, kv_heads=4, intermediate=256)
REPLICAS, DEGREES, LENGTH = 2, (1, 2, 4), 256  # tokens of a rank in weak scaling


class Run:
    """One rank of dp x sp: neighbours share a sequence."""

    def __init__(self, sp: int, dtype: torch.dtype = torch.float32, config: LlamaConfig = CONFIG):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.sp, self.dp, self.data_rank, self.rank = sp, world // sp, rank // sp, rank % sp
        rows = [dist.new_group(list(range(first, first + sp))) for first in range(0, world, sp)]
        torch.manual_seed(0)
        self.model = Llama(config, replace(Parts(), attention=ulysses(rows[self.data_rank], together=True))).to(dtype)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.zero = Zero3(self.model, optimizer, dist.group.WORLD, units=self.model.model.layers)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step on whole sequences [dp, S]; returns the loss of all."""
        labels, where = next_token_labels(tokens), layout_positions("contiguous", tokens.shape[1], self.rank, self.sp)
        mine = slice(self.data_rank, self.data_rank + 1)  # one sequence for each replica
        self.zero.zero_grad()
        with self.zero.micro_batch(last=True):
            logits = self.model(tokens[mine, where], where)  # [1, S] -> [1, S/sp, V]
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels[mine, where].flatten(), ignore_index=IGNORE, reduction="sum"
            )
            loss = loss / (labels != IGNORE).sum()
            loss.backward()
        self.zero.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total


def alone(batches: list[torch.Tensor], config: LlamaConfig, dtype: torch.dtype) -> tuple[list, dict]:
    """The losses of one process, a step for each batch, and its weights afterwards."""
    torch.manual_seed(0)
    model, losses = Llama(config).to(dtype), []
    for tokens in batches:
        logits = model(tokens)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.detach())
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= 0.1 * g
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def verify(sp: int) -> None:
    tokens = text(REPLICAS, 64)
    run = Run(sp)
    loss = run.step(tokens)
    losses, weights = alone([tokens], CONFIG, torch.float32)
    assert_same(loss, losses[0], 1e-5, f"loss, sp = {sp}", dist.get_rank())
    for name, got in run.zero.full_weights().items():
        assert_same(got, weights[name], 1e-5, f"{name}, sp = {sp}", dist.get_rank())


def measure(sp: int, S: int) -> tuple[float, int, int]:
    """CPU seconds of all ranks for a step, this rank's peak in it, and what it holds between steps."""
    run, tokens = Run(sp), text(REPLICAS, S)
    for _ in range(2):
        run.step(tokens)
    seconds = statistics.median(cpu_seconds(lambda: run.step(tokens)) for _ in range(7))
    peaks = []
    for _ in range(3):  # gloo's threads may let go of a buffer late: the smallest of three counts
        with peak_memory() as memory:
            run.step(tokens)
        peaks.append(memory.peak)
    held = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for of in run.zero.held().values() for x in of}
    return seconds, min(peaks), sum(held.values())


def main() -> None:
    for sp in DEGREES:
        run_ranks(REPLICAS * sp, verify, sp, timeout=300)
    strong, weak = PAPER[:3], (PAPER[3], PAPER[1], PAPER[4])
    rows = []
    for scaling, paper in (("strong", strong), ("weak", weak)):
        first = 0.0
        for sp, (tokens, gpus, tflops) in zip(DEGREES, paper, strict=True):
            S = LENGTH * (max(DEGREES) if scaling == "strong" else sp)
            ranks = run_ranks(REPLICAS * sp, measure, sp, S, timeout=500)
            rate = step_flops(CONFIG, REPLICAS, S).model / ranks[0][0]
            first = first or rate
            peak, held = max(peak for _, peak, _ in ranks), max(held for *_, held in ranks)
            rows.append([scaling, tokens, gpus, tflops / paper[0][2], S, REPLICAS * sp, rate / first, held, peak])
    write_result(
        "05_ulysses_zero3",
        "ZeRO-3 over data x sequence with Ulysses: the paper's A100s (tables 2 and 3), and ranks of this machine",
        [
            "scaling",
            "paper: tokens",
            "GPUs",
            "efficiency",
            "here: tokens",
            "ranks",
            "efficiency here",
            "bytes held by a rank",
            "peak of a step",
        ],
        rows,
        f"Here: 2 replicas, {CONFIG.layers} layers of {CONFIG.hidden}, {CONFIG.heads} heads, float32. Efficiency "
        "is model FLOPs for each second of a GPU, or of a CPU, over the first row's; messages are CPU work here.",
    )


if __name__ == "__main__":
    main()
