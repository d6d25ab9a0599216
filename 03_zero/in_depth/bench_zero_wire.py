"""What a step of each stage puts on the wire, counted by the operating system, beside payloads times a ring's formula.

    python 03_zero/in_depth/bench_zero_wire.py         4 processes on CPU (gloo): the loopback interface is the wire

As root, the processes get a network of their own, in which nobody else sends; otherwise the smallest of five windows is
theirs, since others only add. First the weights after two steps in float64 are compared; only then is anything counted.
"""

import ctypes
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from _launch import RANKS, launch, must_be_equal
from _zero_demo import Decoder, make_batch, token_loss_sum
from harness.meter import communication
from harness.report import write_result
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from zero3 import make_zero
from zero_stages import ExchangeAndSum, SendToAll

SIZES = {"hidden": 128, "layers": 4}
DIRECT = {"reduce_scatter": ExchangeAndSum, "all_gather": SendToAll}
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h


def received() -> int:
    """Bytes that have come over the loopback interface, those of TCP's and IP's headers included."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def network_of_our_own() -> bool:
    if os.geteuid() or ctypes.CDLL(None).unshare(NEW_NETWORK):
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


class Run:
    def __init__(self, stage: int, options: dict, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.model = Decoder(**SIZES).to(dtype)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.zero = make_zero(stage, self.model, optimizer, dist.group.WORLD, units=self.model.layers, **options)

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        self.zero.zero_grad()
        with self.zero.micro_batch(last=True):
            (token_loss_sum(self.model, tokens, labels) / (labels.numel() * RANKS)).backward()
        self.zero.step()

    def weights(self) -> dict[str, Tensor]:
        return self.zero.full_weights()


class Torchs:
    """What stage 1 is measured against: DistributedDataParallel, and broadcasts by ZeroRedundancyOptimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Decoder(**SIZES).to(dtype), gradient_as_bucket_view=True)
        parameters = self.model.parameters()
        self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3)

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        (token_loss_sum(self.model, tokens, labels) / labels.numel()).backward()  # DDP averages over the ranks
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.module.named_parameters()}


def benchmark(device: torch.device) -> None:
    rows: list[list[str | float]] = []
    tokens = make_batch(0, RANKS, 1, rows=2, length=64)[dist.get_rank()][0][0]
    labels = tokens.roll(-1, 1)
    right: dict[str, Tensor] = {}
    runs = {("DDP + ZeroRedundancyOptimizer", "gloo's"): Torchs}
    for stage in (1, 2, 3):
        for how, options in {"gloo's": {}, "point to point": DIRECT}.items():
            runs[f"stage {stage}", how] = partial(Run, stage, options)
    for (what, how), make in runs.items():
        exact = make(dtype=torch.float64)
        for _ in range(2):
            exact.step(tokens, labels)
        right = right or exact.weights()
        must_be_equal(exact.weights(), right, f"{what}, {how}")
        run, windows = make(), []
        run.step(tokens, labels)  # DDP's first step cuts its buckets anew, and says so to all
        for _ in range(5):
            dist.barrier()  # nobody sends before everybody is here
            before = received()
            dist.barrier()
            with communication() as sent:
                run.step(tokens, labels)
            dist.barrier()
            windows.append(received() - before)
        formula = torch.tensor(float(sent.total), dtype=torch.float64)
        dist.all_reduce(formula)  # the wire has what all ranks send
        rows.append([what, how, round(formula.item()), min(windows), min(windows) / formula.item()])
    if dist.get_rank() == 0:
        write_result(
            "03_zero_wire",
            f"Bytes that a step sends, {RANKS} ranks together: payloads times formula, and on the wire",
            ["", "collectives", "payloads x formula", "on the wire", "wire / formula"],
            rows,
            "0.9M parameters in fp32, one micro-batch. The weights after two steps in float64 were compared first. On "
            "the wire is what the operating system counts on the loopback interface, headers of TCP and IP included.",
        )


def main() -> None:
    if torch.cuda.is_available():
        sys.exit("bench_zero_wire.py: counts what gloo sends; with GPUs, nccl does not send over the loopback")
    if network_of_our_own():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    launch(benchmark)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"{Path(sys.argv[0]).name}: {' '.join(sys.argv[1:])}: it has no options; use nothing", file=sys.stderr)
        sys.exit(2)
    main()
