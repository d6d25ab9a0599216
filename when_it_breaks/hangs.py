"""It hangs: three ways in which ranks wait for one another for ever, and how to find them.

A collective runs only when all ranks of its group have called it. So a rank that does not call it, calls
another one, or has ended keeps all others waiting, without a message. Three common ways:

    branch     `if rank == 0: print(mean loss of all ranks)`: only rank 0 calls the all-gather inside the `if`
    batches    one rank has a batch fewer than the others and leaves the loop; the others wait for its gradients
    order      two collectives in one order on some ranks and in the other order on others

If the two had the same kind and size, nothing would hang: they would match, and sum tensors that do not
belong together. `losses_differ.py` would show wrong gradients.

From outside all look the same (no output, GPUs at 100 %, since waiting is a kernel); they differ in where
each rank waits. So every rank needs an alarm: `Alarm` prints the line of code in which the rank waits, and,
from the flight recorder that torch has for every process group, how many collectives it has called in each
group and which was the last. With NCCL a collective returns at once: there the line is where the rank first
needs a result, and the recorder tells which collective hangs.

    torchrun --nproc_per_node 2 hangs.py --cause branch            says where each rank waits, exit code 1
    torchrun --nproc_per_node 2 hangs.py --cause branch --fixed   PASS
"""

import argparse
import os
import pickle
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")  # how many collectives the flight recorder keeps
LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.__file__), "<")  # torch's lines, and Python's


class Alarm:
    """Unless it is set again within `seconds`, prints where this rank waits, and ends it."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds, self.main = rank, seconds, threading.get_ident()
        self.timer: threading.Timer | None = None

    def set(self) -> None:
        self.stop()
        self.timer = threading.Timer(self.seconds, self.ring)
        self.timer.daemon = True
        self.timer.start()

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def ring(self) -> None:
        stands = where(traceback.extract_stack(sys._current_frames()[self.main]))
        lines = [f"rank {self.rank} {what}\n" for what in (f"waits at {stands}", *called())]
        os.write(2, "".join(lines).encode())  # one call, so that two ranks' reports do not mix
        time.sleep(self.seconds)  # the other ranks' alarms print meanwhile; when one exits, all are ended
        os._exit(1)


def where(stack: traceback.StackSummary) -> str:
    """The innermost line that is neither torch's nor Python's, also where this file is imported."""
    for frame in reversed(stack):
        if not frame.filename.startswith(LIBRARIES):
            file = "" if frame.filename == __file__ else f" of {os.path.basename(frame.filename)}"
            return f"line {frame.lineno}, in {frame.name}{file}: {frame.line}"
    return "no line of the run"


def called() -> list[str]:
    """For each group: how many collectives this rank has called in it, and the last. It is the group's count,
    as the recorder drops old entries; and per group, since other groups rightly have other counts."""
    last = {":".join(entry["process_group"]): entry for entry in flight_recorder()}
    return [
        f"has called {entry['collective_seq_id']} collectives in {group}, last {entry['profiling_name']} of "
        f"{entry['input_sizes']}"
        for group, entry in last.items()
    ] or ["has called no collective"]


def flight_recorder() -> list[dict]:
    """What torch has recorded of this process's collectives, oldest first."""
    c10d = torch._C._distributed_c10d  # no public names so far
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]  # NCCL has its own
    return [entry for dump in dumps if dump for entry in pickle.loads(dump()).get("entries", [])]


def train(rank: int, cause: str, fixed: bool, alarm: Alarm) -> None:
    world, steps = dist.get_world_size(), 4
    batches = steps - 1 if cause == "batches" and rank == world - 1 else steps
    if fixed and cause == "batches":
        fewest = torch.tensor(batches)
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN)  # [] all ranks stop when the first has no batch left
        batches = int(fewest)
    for step in range(batches):
        alarm.set()
        loss, weight, stop = torch.tensor(1.0 + rank), torch.full((8,), 1.0 + rank), torch.tensor(step == steps)
        meetings = [
            lambda weight=weight: dist.all_reduce(weight),  # [8]
            lambda stop=stop: dist.broadcast(stop, 0),  # []
        ]
        if cause == "order" and not fixed and rank % 2:
            meetings.reverse()  # in real code: a dict filled, or hooks fired, in another order on another rank
        for meet in meetings:
            meet()
        losses = [torch.empty(()) for _ in range(world)]
        if cause == "branch" and fixed:
            dist.all_gather(losses, loss)  # world x [] all ranks call it, only rank 0 prints
        if cause == "branch" and rank == 0:
            if not fixed:
                dist.all_gather(losses, loss)  # world x [] only rank 0: the others are in the next step
            print(f"step {step}: loss {torch.stack(losses).mean():.2f}", flush=True)
    alarm.set()
    dist.barrier()
    alarm.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cause", choices=("branch", "batches", "order"), required=True)
    parser.add_argument("--fixed", action="store_true", help="the same loop, with the repair")
    parser.add_argument("--seconds", type=float, default=3.0, help="patience of each rank")
    options = parser.parse_args()
    if not 0 < options.seconds <= 3600:
        parser.error("--seconds is the patience of a rank, above 0 and at most 3600")
    if "RANK" not in os.environ:
        parser.error("it needs ranks; start it with torchrun --nproc_per_node 2")
    dist.init_process_group("gloo")
    alarm = Alarm(dist.get_rank(), options.seconds)
    train(dist.get_rank(), options.cause, options.fixed, alarm)
    if dist.get_rank() == 0:
        print("PASS")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
