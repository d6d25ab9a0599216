"""ZeRO-3 over data x sequence as in the Ulysses paper: longer texts on more ranks, with the paper's tables.

    python 05_context_parallel/in_depth/bench_ulysses_zero3.py            memory counted, work timed
    python 05_context_parallel/in_depth/bench_ulysses_zero3.py --counts   only the memory

Chapter 1's model, chapter 3's ZeRO-3 over *all* ranks, and Ulysses among the ranks of one sequence. ZeRO
treats gradients of different sequences and of different parts of one sequence alike: it shards and sums over
both. Before any measurement, the weights after a step must match those of one process. The paper (arXiv
2309.14509, tables 2 and 3) has 8 replicas on 64, 128 and 256 GPUs; here there are 2 on 2, 4 and 8 ranks.
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
from context_ring import IGNORE, layout_positions, next_token_labels, text
from context_ulysses import PAPER, ulysses
from harness.meter import peak_memory, storage_bytes
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.report import option_given, processor_seconds, write_result
from llama import Llama, LlamaConfig, Parts
from zero3 import Zero3

CONFIG = LlamaConfig(vocab_size=256, hidden=128, layers=4, heads=8, kv_heads=4, intermediate=256)
REPLICAS, DEGREES, LENGTH = 2, (1, 2, 4), 256  # tokens of a rank in weak scaling


class Run:
    """One rank of dp x sp: consecutive ranks share a sequence."""

    def __init__(self, sp: int, dtype: torch.dtype = torch.float32, config: LlamaConfig = CONFIG):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.sp, self.dp, self.data_rank, self.rank = sp, world // sp, rank // sp, rank % sp
        rows = [dist.new_group(list(range(first, first + sp))) for first in range(0, world, sp)]
        torch.manual_seed(0)
        self.model = Llama(config, replace(Parts(), attention=ulysses(rows[self.data_rank], together=True))).to(dtype)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.zero = Zero3(self.model, optimizer, dist.group.WORLD, units=self.model.model.layers)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step on full sequences [dp, S]; returns the loss of all."""
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
    """The losses of one process, one step per batch, and its weights afterwards."""
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


def held_and_peak(sp: int, S: int) -> tuple[int, int]:
    """Bytes that this rank stores between steps, and its peak in a step."""
    run, tokens, peaks = Run(sp), text(REPLICAS, S), []
    run.step(tokens)
    for _ in range(3):  # Gloo's threads may free a buffer late: the smallest of three counts
        with peak_memory() as memory:
            run.step(tokens)
        peaks.append(memory.peak)
    return storage_bytes(x for of in run.zero.held().values() for x in of), min(peaks)


def work(sp: int, S: int) -> float:
    """CPU seconds of all ranks for a step."""
    run, tokens = Run(sp), text(REPLICAS, S)
    for _ in range(2):
        run.step(tokens)
    return statistics.median(processor_seconds(lambda: run.step(tokens)) for _ in range(7))


def main() -> None:
    only_counts = option_given("--counts")
    for sp in DEGREES:
        run_ranks(REPLICAS * sp, verify, sp, timeout=300)
    rows, speed = [], []
    for scaling, paper in (("strong", PAPER[:3]), ("weak", (PAPER[3], PAPER[1], PAPER[4]))):
        rates = []
        for sp, (tokens, gpus, tflops) in zip(DEGREES, paper, strict=True):
            S, ranks = LENGTH * (max(DEGREES) if scaling == "strong" else sp), REPLICAS * sp
            held, peak = (max(x) for x in zip(*run_ranks(ranks, held_and_peak, sp, S, timeout=300), strict=True))
            rows.append([scaling, tokens, gpus, tflops, S, ranks, held, peak])
            if not only_counts:
                rates.append(step_flops(CONFIG, REPLICAS, S).model / run_ranks(ranks, work, sp, S, timeout=500)[0])
                speed.append([scaling, tokens, gpus, tflops / paper[0][2], S, ranks, rates[-1] / rates[0]])
    sizes = f"2 replicas, {CONFIG.layers} layers of {CONFIG.hidden}, {CONFIG.heads} heads, float32"
    write_result(
        "05_ulysses_zero3",
        "ZeRO-3 over data x sequence: the paper's A100s (2309.14509, tables 2 and 3), and ranks of this machine",
        [
            "scaling",
            "paper: tokens",
            "GPUs",
            "TFLOPs a GPU",
            "here: tokens",
            "ranks",
            "held by a rank",
            "peak of a step",
        ],
        rows,
        f"Here: {sizes}. Bytes, counted.",
    )
    if speed:
        write_result(
            "05_ulysses_zero3_speed",
            "The same in throughput, over the first row of each",
            ["scaling", "paper: tokens", "GPUs", "FLOPs a GPU second", "here: tokens", "ranks", "FLOPs a CPU second"],
            speed,
            f"Here: {sizes}. Messages are work of a CPU here.",
        )


if __name__ == "__main__":
    main()
