"""Shared by this chapter's benchmarks: N ranks on one machine, Gloo on CPU or NCCL on GPUs."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import harness.spawn
import torch
import torch.distributed as dist
from _zero_demo import Decoder, make_batch, token_loss_sum
from harness.meter import communication, peak_memory
from harness.report import option_given
from torch import Tensor
from torch.distributed.tensor import DTensor

RANKS = 4


def launch(benchmark: Callable[[torch.device], None]) -> None:
    """Run `benchmark(device)` on every rank. The benchmarks here have no options."""
    option_given()
    harness.spawn.launch(benchmark, RANKS)


def must_be_equal(got: dict[str, Tensor], want: dict[str, Tensor], what: str, tol: float = 1e-8) -> None:
    """The check before any timing: a benchmark of a wrong result is worthless."""
    for name, tensor in want.items():
        error = ((got[name] - tensor).abs().max() / tensor.abs().max()).item()
        if not error <= tol:
            raise SystemExit(f"{what}: {name} is off by {error:.1e}")


def largest(value: float, device: torch.device) -> int:
    """The largest of all ranks' values."""
    tensor = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return round(tensor.item())


# ------------------------------------------------------------------------------- ours, and torch's to compare


class Ours:
    """A decoder that is trained by `make(model)`, one of ZeRO's stages."""

    def __init__(
        self,
        make: Callable[[torch.nn.Module], Any],
        sizes: dict[str, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        torch.manual_seed(0)
        self.model = Decoder(**sizes).to(device, dtype)
        self.zero = make(self.model)

    def step(self, tokens: Tensor, labels: Tensor, micro_batches: int = 1) -> None:
        self.zero.zero_grad()
        for i in range(micro_batches):
            with self.zero.micro_batch(last=i == micro_batches - 1):
                (token_loss_sum(self.model, tokens, labels.roll(i, 1)) / (labels.numel() * RANKS)).backward()
        self.zero.step()

    def weights(self) -> dict[str, Tensor]:
        return self.zero.full_weights()


class Torchs:
    """The same decoder and AdamW (or SGD), wrapped by torch: `wrap(model)` applies FSDP2 or DDP."""

    def __init__(
        self,
        wrap: Callable[[torch.nn.Module], torch.nn.Module],
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        sizes: dict[str, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        torch.manual_seed(0)
        self.plain = Decoder(**sizes).to(device, dtype)
        self.model = wrap(self.plain)
        self.optimizer = optimizer(self.model.parameters())

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        # FSDP2 and DDP average over the ranks, so each rank's loss must be the mean over its own tokens.
        (token_loss_sum(self.model, tokens, labels) / labels.numel()).backward()
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        named = self.plain.named_parameters()
        return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named}


def batch_of_rank(device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels of this rank, [2, 64] each."""
    tokens = make_batch(0, RANKS, 1, rows=2, length=64)[dist.get_rank()][0][0].to(device)
    return tokens, tokens.roll(-1, 1)


def after_two_steps(run: Any, tokens: Tensor, labels: Tensor, **how: int) -> dict[str, Tensor]:
    """The weights of `run`. Compare in float64: in fp32 Adam's division amplifies the rounding of sums."""
    for _ in range(2):
        run.step(tokens, labels, **how)
    return run.weights()


def one_step(run: Any, tokens: Tensor, labels: Tensor, device: torch.device) -> tuple[int, Any]:
    """The second step's peak, the largest of all ranks, and its bytes sent. The first makes the states."""
    run.step(tokens, labels)
    with peak_memory() as memory, communication() as wire:
        run.step(tokens, labels)
    return largest(memory.peak, device), wire
