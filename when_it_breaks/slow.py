"""It is slow: where a step's time goes, rank by rank, and which rank the others wait for.

    loader      the next batch is made when it is needed: meanwhile no rank computes
    straggler   one rank is slower (a hot GPU, a longer document, a busy machine): all the others wait for it in the
                all-reduce, so the profile of a *fast* rank says "communication", and the network is innocent
    messages    an all-reduce for each parameter: each pays the latency of a message, however small

So a profile of one rank misleads. Compare ranks: all others wait for the rank that waits *least* in a
collective. A barrier before the collective, for the measurement only, separates waiting from sending. The
table has, for each rank and step, the milliseconds of making data, computing, waiting (for that barrier) and
sending, and the number of messages. On a GPU the kernels run asynchronously: put events around the parts, or
read a trace of torch.profiler, of two ranks side by side.

    torchrun --nproc_per_node 2 slow.py --cause straggler             the table and what it points to, exit code 1
    torchrun --nproc_per_node 2 slow.py --cause straggler --fixed    the table without the cause, PASS
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

LAYERS, WIDTH, STEPS = 16, 64, 8
DELAY = 0.1  # seconds that the cause takes, in a step
PARTS = ("data", "compute", "wait", "send")


class Clock:
    """Seconds of each part of a step, summed over the steps; and a count of messages."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.messages = 0
        self.now = time.perf_counter()

    def end(self, part: str) -> None:
        """Add the time since the last call to `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self.now
        self.now = now


def batches(slow: bool, ahead: bool) -> Iterator[torch.Tensor]:
    """[8, WIDTH] a step. `ahead`: another thread makes the next one while this one is used."""

    def make(step: int) -> torch.Tensor:
        if slow:
            time.sleep(DELAY)  # reading, decompressing, tokenizing
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(make, 0)
        for step in range(STEPS):
            batch = following.result()
            if ahead:
                following = pool.submit(make, step + 1)
            yield batch
            if not ahead and step + 1 < STEPS:
                following = pool.submit(make, step + 1)


def train(cause: str, fixed: bool) -> Clock:
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    weights = [(torch.randn(WIDTH, WIDTH, generator=generator) / 8).requires_grad_() for _ in range(LAYERS)]
    clock = Clock()
    for batch in batches(cause == "loader", ahead=fixed):
        clock.end("data")
        x = batch
        for weight in weights:
            x = torch.tanh(x @ weight)  # [8, WIDTH]
        x.square().mean().backward()
        if cause in ("straggler", "loader") and (cause == "loader" or (rank == world - 1 and not fixed)):
            time.sleep(DELAY)  # loader: a step long enough to overlap with the next batch
        grads = [weight.grad for weight in weights]
        flat = torch.cat([grad.flatten() for grad in grads])  # [LAYERS * WIDTH^2]
        clock.end("compute")
        dist.barrier()  # not in a real step: it makes the waiting visible
        clock.end("wait")
        for message in grads if cause == "messages" and not fixed else [flat]:
            dist.all_reduce(message)  # [WIDTH, WIDTH], or [LAYERS * WIDTH^2]
            clock.messages += 1
        clock.end("send")
    return clock


def diagnosis(table: torch.Tensor, messages: int) -> str:
    """The cause that the table [ranks, parts] of seconds shows; "" if none."""
    data, _, wait, _ = table.unbind(1)
    enough = 0.4 * DELAY * STEPS  # seconds above which a rank is suspect
    if data.min() > enough:
        return "every rank waits for its data: make the next batch while this one is computed"
    if wait.max() > 3 * wait.min() and wait.max() > enough:
        return f"rank {wait.argmin()} waits least: it is the one that the others wait for"
    if messages > 4 * STEPS:
        return f"{messages // STEPS} messages a step: put the gradients of several parameters into one"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cause", choices=("loader", "straggler", "messages"), required=True)
    parser.add_argument("--fixed", action="store_true", help="the same step without the cause")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("it needs ranks; start it with torchrun --nproc_per_node 2")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    clock = train(options.cause, options.fixed)
    mine = torch.tensor([clock.seconds[part] for part in PARTS])
    table = [torch.empty(len(PARTS)) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)  # ranks x [parts]
    found = diagnosis(torch.stack(table), clock.messages)
    if dist.get_rank() == 0:
        print("ms a step" + "".join(f"{part:>9}" for part in PARTS) + "  messages")
        for rank, row in enumerate(table):
            times = "".join(f"{1000 * s / STEPS:9.1f}" for s in row.tolist())
            print(f"rank {rank:<4}{times}{clock.messages // STEPS:10}")
        print(found or "PASS")
    dist.destroy_process_group()
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
