"""DualPipe's pair, a forward and a backward at once: one computes while the other's tokens are sent.

Problem. A mixture-of-experts layer sends its tokens to their experts and back, an all-to-all each way.
Meanwhile the processor waits, because one chunk has nothing else to compute. DualPipe (arXiv 2412.19437,
3.2.1) pairs an F of one micro-batch with an independent BW of another. But how do the two alternate?

Idea. Both are ordinary calls, `module(x)` and `backward()`. Run each in its own thread, but only one at a
time, the one with the *turn*. A chunk that starts a message passes the turn until the other starts one:

    F     compute ── send ·············· arrived, compute ── send ·············· arrived, compute
    BW                 compute ── send ·············· arrived, compute ── send ·············· arrived, compute
    turn  F            BW                F                   BW                F                   BW

The two threads never run at once, so no locks are needed, and the order is the same on every rank and in
every run. That matters because all-to-alls of F and BW use the same group, where messages are matched by
order. The random number generator is shared, and a BW that recomputes a dropout resets it. So each chunk
finds the generator as it left it, and after the pair it is in the state in which F left it.

How a runtime offers it. `Pipeline(overlap=hook)` calls hook(forward, backward) for each pair of the schedule.
torch's pipelining has a function for OVERLAP_F_B, DeepSeek's DualPipe `overlapped_forward_backward` of the
module. `Turns.overlap` is such a hook; a hand-written interleaving can replace it.

Formulas. F of parts f0, f1, ..., BW of parts b0, b1, ..., a message of time t after each but the last:
    one after the other     sum f + sum b + t (number of messages)
    as a pair               pair_time(f, b, t), for Times(pair=...): sum f + sum b if both have n parts,
                            each of which takes t or more

On a GPU a host thread only launches kernels, in one stream for both chunks. The other chunk's kernels are
launched before the `wait`, so they run while the all-to-all is in flight on NCCL's stream.

Run it:
    python overlapped_pair.py                             one rank, one expert
    torchrun --nproc_per_node 4 overlapped_pair.py        pipelines of 2 ranks, experts on 2; Gloo or NCCL
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, with a group open, it would keep that group alive
from pipeline_executor import Pipeline, launch
from schedule_simulator import OneLineParser
from schedules import build
from torch import Tensor, nn

# Legend of shapes: T tokens of one micro-batch on one rank, H hidden, e ranks of the expert group, one expert on each.


@contextmanager
def random_numbers_of_its_own() -> Iterator[None]:
    """Restore the random state afterwards, whatever the other chunk has drawn or reset meanwhile."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        yield


class Turns:
    """Two calls that take turns: a call that starts a message lets the other compute until it starts one.

    `note(chunk, event)` is called for each event in order: chunk is "F" or "BW", event is "begins", "sends",
    "arrived" or "ends". Outside a pair, a message is started and waited for under the chunk "".
    """

    def __init__(self, note: Callable[[str, str], None] | None = None):
        self.note = note or (lambda chunk, event: None)
        self.turn = ""  # the chunk with the turn
        self.running = set()  # the unfinished chunks
        self.changed = threading.Condition()

    def overlap(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both, the forward first. Raises the error of either one, after both have ended."""
        self.turn = "F"
        self.running = {"F", "BW"}
        raised: list[BaseException] = []
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run(chunk: str, call: Callable[[], None]) -> None:
            try:
                self.wait_for_turn(chunk)
                self.note(chunk, "begins")
                call()
                self.note(chunk, "ends")
            except BaseException as error:
                raised.append(error)
            finally:
                self.running.discard(chunk)

        def second() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread begins on device 0
            run("BW", backward)
            self.give_turn("BW")

        thread = threading.Thread(target=second)
        thread.start()
        run("F", forward)  # in this thread, for the caller's grad mode, autocast and counters
        with random_numbers_of_its_own():
            self.give_turn("F")
            thread.join()
        self.turn = ""
        if raised:
            raise raised[0]

    def wait_for_turn(self, chunk: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == chunk)

    def give_turn(self, chunk: str) -> None:
        """Pass the turn to the other chunk, if it is not done."""
        with self.changed:
            self.turn = next(iter(self.running - {chunk}), chunk)
            self.changed.notify_all()

    @random_numbers_of_its_own()
    def travel(self, start: Callable[[], dist.Work]) -> None:
        """Start a message, let the other chunk compute, and return when the message has arrived."""
        chunk = self.turn  # the caller has the turn; on a GPU, backward calls from an autograd thread
        # --- exercise 6.40: start, give the turn away, get it back, wait ---
        work = start()
        self.note(chunk, "sends")
        if self.running - {chunk}:
            self.give_turn(chunk)
            self.wait_for_turn(chunk)
        work.wait()
        # --- end exercise ---
        self.note(chunk, "arrived")


class AllToAll(torch.autograd.Function):
    """Row block i of x is sent to rank i of the group; its gradient is sent back."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, turns: Turns) -> Tensor:
        ctx.group, ctx.turns = group, turns
        x = x.contiguous()
        y = torch.empty_like(x)  # [e T/e, H] -> all_to_all -> [e T/e, H]
        turns.travel(lambda: dist.all_to_all_single(y, x, group=group, async_op=True))
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        return AllToAll.apply(grad, ctx.group, ctx.turns), None, None


def pair_time(forward: Sequence[float], backward: Sequence[float], message: float) -> float:
    """The time of two chunks in turns: their parts in order, a message after each part but the last."""
    parts = {"F": deque(forward), "BW": deque(backward)}
    there = {"F": 0.0, "BW": 0.0}  # when the message of the chunk arrives
    now = 0.0
    turn = "F"
    other = "BW"
    while parts[turn]:
        now = max(now, there[turn]) + parts[turn].popleft()
        there[turn] = now + message
        if parts[other]:
            turn, other = other, turn
    return now


# ---------------------------------------------------------------------------------------------------------- the demo


class Expert(nn.Module):
    """A layer with remote experts: of each e consecutive tokens, token i is sent to the expert of rank i."""

    def __init__(self, hidden: int, layer: int, group: dist.ProcessGroup | None, turns: Turns, experts: Sequence[int]):
        super().__init__()
        self.group, self.turns = group, turns
        draw = [torch.Generator().manual_seed(100 * layer + i) for i in experts]
        self.up = nn.Parameter(torch.stack([torch.randn(hidden, 2 * hidden, generator=g) for g in draw]).double())
        self.down = nn.Parameter(torch.stack([torch.randn(2 * hidden, hidden, generator=g) for g in draw]).double() / 8)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]"""
        e = len(self.up) if self.group is None else self.group.size()
        rows = x.unflatten(0, (-1, e)).transpose(0, 1)  # [T, H] -> [e, T/e, H], by expert
        if self.group is not None:  # T/e rows from each of e ranks for the expert here
            rows = AllToAll.apply(rows.flatten(0, 1), self.group, self.turns).unsqueeze(0)  # [1, T, H]
        rows = torch.tanh(rows @ self.up) @ self.down
        if self.group is not None:
            rows = AllToAll.apply(rows.squeeze(0), self.group, self.turns).unflatten(0, (e, -1))  # [e, T/e, H]
        return x + rows.transpose(0, 1).flatten(0, 1)


def stage_of(layers: Sequence[int], hidden: int, group, turns: Turns, experts: Sequence[int]) -> nn.Module:
    return nn.Sequential(*(Expert(hidden, layer, group, turns, experts) for layer in layers))


def demo(experts: int, group: dist.ProcessGroup, expert_group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """One step of DualPipeV next to the full model. Rank 0 of the world prints the table."""
    p = group.size()
    hidden = 8
    tokens = 4 * experts
    depth = 2
    m = 2 * p + 2
    mine = expert_group.rank()
    schedule = build("dualpipe-v", p, m, 2)
    events: list[tuple[str, str]] = []
    turns = Turns(lambda chunk, event: events.append((chunk, event)))
    layers = [range(depth * stage, depth * (stage + 1)) for stage in range(2 * p)]
    stages = {
        (0, s): stage_of(layers[s], hidden, expert_group, turns, [mine]) for _, s in schedule.stages_of(group.rank())
    }
    whole = stage_of(range(2 * p * depth), hidden, None, turns, range(experts))
    whole = whole.to(device)
    _ = [stage.to(device) for stage in stages.values()]
    text = torch.randn(experts, m, tokens, hidden, generator=torch.Generator().manual_seed(1)).double().to(device)

    def loss(y: Tensor, _) -> Tensor:
        return (y**2).sum() / tokens

    pipeline = Pipeline(schedule, stages, group, loss=loss, example=text[0, 0], overlap=turns.overlap)
    pipeline.step(text[mine], [None] * m)
    sum(loss(whole(x), None) for part in text for x in part).backward()
    errors = []
    for (_, s), stage in stages.items():
        for layer, ours in zip(layers[s], stage, strict=True):
            for got, want in ((ours.up.grad, whole[layer].up.grad), (ours.down.grad, whole[layer].down.grad)):
                errors.append((got[0] - want[mine]).abs().max() / want.abs().max())
    pairs = sum(action.overlapped for action in schedule.actions[group.rank()])
    beside = [event for event in events if event[0]]
    hidden_messages = sum(covered(beside, i) for i, event in enumerate(beside) if event[1] == "sends")
    messages = 2 * 2 * depth * pairs  # F and BW, dispatch and combine, in each layer
    found = (torch.stack(errors).max().item(), messages, hidden_messages)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    error = max((row[0] for row in everyone), key=lambda e: (e != e, e))  # a NaN counts as the largest
    rows = [
        ("largest error against one process", "<= 1e-10", f"{error:.1e}"),
        ("messages in pairs, by rank", str([row[1] for row in everyone]), ""),
        ("  beside the other's computing", str([row[1] for row in everyone]), str([row[2] for row in everyone])),
    ]
    parts = [1.0] * (2 * depth + 1)
    ends = [2.0] * (2 * depth + 1)
    rows.append(
        ("F, BW, message 1, 2, 1 a part: a pair", f"{sum(parts) + sum(ends):g}", f"{pair_time(parts, ends, 1):g}")
    )
    if dist.get_rank() == 0:
        print(f"dualpipe-v on {p} rank(s), {experts} expert rank(s), {device.type}; {m} micro-batches, {pairs} pairs")
        for what, want, got in [("", "predicted", "found"), *rows]:
            print(f"{what:40}{want:>24}{got:>24}")
    wrong = [] if all(row[0] <= 1e-10 for row in everyone) else [rows[0][0]]
    wrong += [] if all(row[1] == row[2] for row in everyone) else ["messages that nothing was computed beside"]
    return wrong


def covered(events: Sequence[tuple[str, str]], sent: int) -> bool:
    """Does the other chunk compute between this message's start and its arrival?"""
    chunk = events[sent][0]
    arrived = next(i for i in range(sent + 1, len(events)) if events[i] == (chunk, "arrived"))
    return any(name != chunk and event in ("begins", "arrived") for name, event in events[sent:arrived])


def main() -> None:
    parser = OneLineParser(description="A forward and a backward at once, with all-to-alls.", allow_abbrev=False)
    parser.add_argument("--experts", type=int, default=None, help="ranks of an expert group; default: 2 if it fits")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    experts = args.experts
    if experts is None:
        experts = 2 if ranks % 2 == 0 else 1
    if experts < 1 or ranks % experts:
        parser.error(f"--experts {experts} does not divide {ranks} ranks; use a divisor")
    launch(lambda device: run(experts, device))


def run(experts: int, device: torch.device) -> list[str]:
    """Make expert groups (0, 1), (2, 3), ... and pipelines (0, 2, ...), (1, 3, ...)."""
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    limit = timedelta(seconds=60)
    pipelines = [dist.new_group(range(i, ranks, experts), timeout=limit) for i in range(experts)]
    neighbours = [dist.new_group(range(i, i + experts), timeout=limit) for i in range(0, ranks, experts)]
    return demo(experts, pipelines[rank % experts], neighbours[rank // experts], device)


if __name__ == "__main__":
    main()
