"""Pipeline parallelism: split the model between its layers, and keep every rank busy.

A model that is too deep for one GPU is split into p stages of consecutive layers; rank s stores
stage s. Activations are sent to the next rank and their gradients to the previous one, nothing
else. But a stage cannot start before the previous stage has ended. So the batch is split into m
micro-batches: while the next rank computes micro-batch 0, this rank computes micro-batch 1.

For each micro-batch i a rank has two actions: Fi, the forward pass of its layers, and BWi, their
backward pass. BW computes the gradients of the input and of the weights, each with one matmul per
weight matrix. F needs one, so F takes one unit of time and BW takes two. The order of a rank's
actions is called the schedule. With p = 2 and m = 3:

    naive: one micro-batch at a time, so one rank computes and the others are idle
        rank 0   F0          BW0-- F1          BW1-- F2          BW2--
        rank 1      F0 BW0--          F1 BW1--          F2 BW2--
    afab: all forward, all backward (GPipe); after the last F, m micro-batches are in flight
        rank 0   F0 F1 F2          BW0-- BW1-- BW2--
        rank 1      F0 F1 F2 BW0-- BW1-- BW2--
    1f1b: one forward, one backward; as fast as afab, with at most p micro-batches in flight
        rank 0   F0 F1       BW0-- F2 BW1--    BW2--
        rank 1      F0 BW0-- F1 BW1-- F2 BW2--

                                          naive     afab       1f1b
    idle time / compute time              p - 1     (p-1)/m    (p-1)/m    for equal stages
    micro-batches in flight on rank s     1         m          min(p - s, m)
    parameters stored by a rank           Ψ/p, if all stages are equal
    elements sent by a rank per step      m B S H to the next rank, m B S H to the previous one

Between its F and its BW a micro-batch is in flight: its activations are saved for the backward
pass. Ψ is the number of parameters; a micro-batch has B sequences of S tokens with H elements each.
Sources: Huang et al. 2018, arXiv 1811.06965 (GPipe); Narayanan et al. 2021, 2104.04473 (1F1B).

    python pipeline_parallel.py                                          one rank: one stage
    torchrun --nproc_per_node 4 pipeline_parallel.py --micro-batches 8   NCCL on GPUs, Gloo on CPUs
    torchrun --nproc_per_node 2 pipeline_parallel.py --schedule 1f1b --layers 5

Each schedule trains a small model for three steps next to a reference in one process. The last
line is PASS if losses, gradients and parameters agree to 1e-10, the formulas of the table hold, and
the run that must deadlock did; otherwise the exit code is 1.
"""

import argparse
import os
import sys
import tokenize
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Action = tuple[str, int]  # ("F", i) or ("BW", i): forward or backward of micro-batch i


# -------------------------------------------------------------------------------------------------
# One stage: what it computes, and its messages
# -------------------------------------------------------------------------------------------------


class Stage:
    """The layers of one rank, and the activations of its micro-batches in flight."""

    def __init__(self, layers: nn.Module, group: dist.ProcessGroup):
        self.layers = layers
        self.group = group
        self.rank = dist.get_rank(group)  # all ranks here are ranks of the group
        self.num_stages = dist.get_world_size(group)
        self.prev_rank = self.rank - 1 if self.rank > 0 else None
        self.next_rank = self.rank + 1 if self.rank < self.num_stages - 1 else None

    def start_step(self, tokens: Tensor, labels: Tensor, num_micro_batches: int) -> None:
        if len(tokens) % num_micro_batches:  # a receiver must know the shape of each
            raise ValueError(f"{len(tokens)} sequences: use a multiple of {num_micro_batches}")
        self.tokens = tokens.chunk(num_micro_batches)  # m of [B, S], used by the first stage
        self.labels = labels.chunk(num_micro_batches)  # used by the last stage
        self.num_valid = (labels != IGNORE_INDEX).sum().clamp(min=1)  # of the full batch; not 0/0
        self.loss = torch.zeros((), dtype=torch.float64, device=tokens.device)
        self.in_flight: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch -> input, output

    def forward(self, i: int, x: Tensor | None) -> Tensor:
        """F: activations of the previous rank, [B, S, H] -> activations for the next rank.

        The first stage receives None and starts from tokens. The last stage ends with the loss.
        """
        # --- exercise 6.1: the forward pass of one stage ---
        if x is None:
            x = self.tokens[i]
        else:
            x.requires_grad_()  # this rank's part of the autograd graph begins here
        y = self.layers(x)
        if self.next_rank is None:
            # A part of the full batch's mean, so losses and gradients of micro-batches add up.
            y = loss_sum(y, self.labels[i]) / self.num_valid
            self.loss += y.detach()
        self.in_flight[i] = x, y
        # --- end exercise ---
        return y.detach()  # values without a graph

    def backward(self, i: int, grad_output: Tensor | None) -> Tensor | None:
        """BW: the gradient of what `forward` returned -> the gradient of what it received.

        The last stage receives None and starts from the loss. The first stage returns None.
        """
        # --- exercise 6.2: the backward pass of one stage ---
        x, y = self.in_flight.pop(i)  # an entry left behind would keep both in memory
        y.backward(grad_output)  # adds to the gradient of each parameter
        return x.grad
        # --- end exercise ---

    def new_message(self) -> Tensor:  # [B, S, H]; a receiver must know the shape in advance
        return next(self.layers.parameters()).new_empty(*self.tokens[0].shape, HIDDEN)

    # --- exercise 6.3: one message ---
    def send(self, x: Tensor | None, to: int | None) -> None:
        """Wait until rank `to` has received x. Without such a rank, do nothing."""
        if to is not None:
            # A message is contiguous memory, and a stage may return a view with gaps.
            dist.send(x.contiguous(), group=self.group, group_dst=to)

    def recv(self, source: int | None) -> Tensor | None:
        """Wait for the next message of rank `source`."""
        if source is None:
            return None
        x = self.new_message()  # not a common buffer: an earlier input is saved for its BW
        dist.recv(x, group=self.group, group_src=source)
        return x

    # --- end exercise ---

    def send_recv(self, x: Tensor | None, peer: int | None) -> Tensor | None:
        """Send x to a rank and receive a message from the same rank, both at once.

        If two ranks first sent and then received, each would wait for the other to receive.
        """
        if peer is None:
            return None
        # --- exercise 6.4: two messages that cross ---
        x = x.contiguous()
        received = self.new_message()
        send = dist.P2POp(dist.isend, x, group=self.group, group_peer=peer)
        recv = dist.P2POp(dist.irecv, received, group=self.group, group_peer=peer)
        # One batch, since NCCL runs separate messages between two ranks one after the other.
        for work in dist.batch_isend_irecv([send, recv]):
            work.wait()  # both: x must stay as it is until it has been sent
        return received
        # --- end exercise ---


# -------------------------------------------------------------------------------------------------
# Three schedules
# -------------------------------------------------------------------------------------------------


def naive(rank: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """One micro-batch passes through all stages and back, then the next one."""
    actions = []
    for i in range(num_micro_batches):
        actions += [("F", i), ("BW", i)]
    return actions


def all_forward_all_backward(rank: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """The next micro-batch follows at once, and all of them turn around at the last stage."""
    forwards = [("F", i) for i in range(num_micro_batches)]
    backwards = [("BW", i) for i in range(num_micro_batches)]
    return forwards + backwards


def one_forward_one_backward(rank: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """A backward pass as soon as its gradient can be here: it frees what its forward pass saved.

    While micro-batch 0 passes through the later ranks and back, this rank computes one more F for
    each of them. With F0 these are the warm-up and the first F of the steady state.
    """
    # --- exercise 6.5: one forward, one backward ---
    # Warm-up
    num_warmup = min(num_stages - 1 - rank, num_micro_batches)
    actions = [("F", i) for i in range(num_warmup)]
    # Steady state
    for i in range(num_micro_batches - num_warmup):
        actions += [("F", num_warmup + i), ("BW", i)]
    # Cool-down
    for i in range(num_micro_batches - num_warmup, num_micro_batches):
        actions += [("BW", i)]
    return actions
    # --- end exercise ---


SCHEDULES = {"naive": naive, "afab": all_forward_all_backward, "1f1b": one_forward_one_backward}


# -------------------------------------------------------------------------------------------------
# Run a schedule
# -------------------------------------------------------------------------------------------------


def run_one_by_one(stage: Stage, actions: list[Action]) -> None:
    """The simplest form: receive, compute, send. It runs naive and afab and deadlocks on 1F1B.

    In the steady state of 1F1B two neighbours want to send at the same time, one an activation and
    the other a gradient. Each waits for the other to receive.
    """
    for kind, i in actions:
        if kind == "F":
            y = stage.forward(i, stage.recv(stage.prev_rank))
            stage.send(y, stage.next_rank)
        else:
            grad_input = stage.backward(i, stage.recv(stage.next_rank))
            stage.send(grad_input, stage.prev_rank)


def run_schedule(stage: Stage, actions: list[Action]) -> None:
    """The same without deadlock: send and receive in one batch if both are with the same rank."""
    # --- exercise 6.6: run any of the three schedules ---
    senders = {"F": stage.prev_rank, "BW": stage.next_rank, "end": None}  # of an input
    receivers = {"F": stage.next_rank, "BW": stage.prev_rank}  # of a result
    received = stage.recv(senders["F"])  # every schedule begins with a forward pass
    for (kind, i), (next_kind, _) in pairwise([*actions, ("end", 0)]):
        result = stage.forward(i, received) if kind == "F" else stage.backward(i, received)
        receiver = receivers[kind]
        sender = senders[next_kind]
        if sender == receiver:  # if both are None, nothing is sent or received
            received = stage.send_recv(result, receiver)
        else:
            stage.send(result, receiver)
            received = stage.recv(sender)
    # --- end exercise ---


def forward_backward(stage, actions: list[Action], tokens, labels, run=run_schedule) -> Tensor:
    """Add to the gradients of the stage. Returns the loss of the full batch, on every rank."""
    stage.start_step(tokens, labels, num_micro_batches=len(actions) // 2)
    run(stage, actions)
    dist.all_reduce(stage.loss, group=stage.group)  # zero on all ranks but the last
    return stage.loss


# -------------------------------------------------------------------------------------------------
# The time that a schedule takes
# -------------------------------------------------------------------------------------------------

DURATION = {"F": 1, "BW": 2}


def simulate(schedule: list[list[Action]]) -> list[list[tuple[str, int, int, int]]]:
    """Each rank's (kind, micro-batch, start, end), if messages take no time."""

    @cache
    def end_of(rank: int, index: int) -> int:
        if index < 0:  # before the first action
            return 0
        kind, i = schedule[rank][index]
        sender = rank - 1 if kind == "F" else rank + 1
        start = end_of(rank, index - 1)  # when this rank is free
        if 0 <= sender < len(schedule):  # and its input is there
            start = max(start, end_of(sender, schedule[sender].index((kind, i))))
        return start + DURATION[kind]

    timelines = [[] for _ in schedule]
    for rank, actions in enumerate(schedule):
        for index, (kind, i) in enumerate(actions):
            end = end_of(rank, index)
            timelines[rank].append((kind, i, end - DURATION[kind], end))
    return timelines


def render(timelines: list[list[tuple[str, int, int, int]]]) -> str:
    """One line per rank, three characters per unit of time; long lines are cut off."""
    lines = []
    for rank, timeline in enumerate(timelines):
        line = ""
        for kind, i, start, end in timeline:
            fill = "-" if kind == "BW" else " "
            line = line.ljust(3 * start) + f"{kind}{i}".ljust(3 * (end - start) - 1, fill)
        dots = "..." if len(line) > 87 else ""
        lines.append(f"    rank {rank}   {line[:87]}{dots}")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------
# A small model, in float64, and text to train it on
# -------------------------------------------------------------------------------------------------

VOCAB = 256
HIDDEN = 32
BATCH = 2  # sequences of a micro-batch
SEQ_LEN = 24
IGNORE_INDEX = -100  # a label that is no target


class Block(nn.Module):
    """A decoder layer with one head: [B, S, H] -> [B, S, H]."""

    def __init__(self):
        super().__init__()
        self.attn_norm = nn.RMSNorm(HIDDEN)
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp_norm = nn.RMSNorm(HIDDEN)
        self.up_proj = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attn_norm(x)
        q = self.q_proj(h)
        k = self.k_proj(h)
        v = self.v_proj(h)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x))))


def build_model(num_blocks: int) -> nn.Sequential:
    """Embedding, blocks and head, with the same initial parameters on every rank.

    Embedding and head are not tied: their gradient would be a sum over the first and last rank.
    """
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCAB, HIDDEN)
    blocks = [Block() for _ in range(num_blocks)]
    norm = nn.RMSNorm(HIDDEN)
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    return nn.Sequential(embedding, *blocks, nn.Sequential(norm, head)).double()


def build_stage(model: nn.Sequential, stage: int, num_stages: int) -> nn.Sequential:
    """Consecutive blocks; the first stage also has the embedding, the last stage the head."""
    num_blocks = len(model) - 2
    begin = 1 + stage * num_blocks // num_stages  # block 1 follows the embedding
    end = 1 + (stage + 1) * num_blocks // num_stages
    if stage == 0:
        begin = 0
    if stage == num_stages - 1:
        end = len(model)
    return model[begin:end]


def get_batch(step: int, num_micro_batches: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [m B, S]. Sequences differ in their number of valid labels.

    The last of several micro-batches has none, so its mean loss would be 0/0.
    """
    text = torch.tensor(list(Path(tokenize.__file__).read_bytes()))
    num_sequences = BATCH * num_micro_batches
    sequence = torch.arange(num_sequences)[:, None]
    start = (sequence + num_sequences * step) * 50 % 20000
    window = text[start + torch.arange(SEQ_LEN + 1)]  # [m B, S + 1]
    no_target = torch.arange(SEQ_LEN) < sequence % SEQ_LEN
    no_target |= sequence >= max(BATCH, num_sequences - BATCH)
    return window[:, :-1], window[:, 1:].masked_fill(no_target, IGNORE_INDEX)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum over tokens. The mean of each micro-batch would weigh their tokens differently."""
    logits = logits.flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


# -------------------------------------------------------------------------------------------------
# The check: three steps next to a reference, and a deadlock on purpose
# -------------------------------------------------------------------------------------------------


class RecordingStage(Stage):
    """A stage that records what it does."""

    def start_step(self, *args, **kwargs) -> None:
        super().start_step(*args, **kwargs)
        self.actions: list[Action] = []
        self.max_in_flight = 0
        self.bytes_sent = 0
        self.blocked_on = ""

    def forward(self, i: int, x: Tensor | None) -> Tensor:
        y = super().forward(i, x)
        self.actions.append(("F", i))
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        return y

    def backward(self, i: int, grad_output: Tensor | None) -> Tensor | None:
        self.actions.append(("BW", i))
        return super().backward(i, grad_output)

    def send(self, x: Tensor | None, to: int | None) -> None:
        self.blocked_on = f"send to rank {to}"
        self.bytes_sent += 0 if to is None else x.nbytes
        super().send(x, to)

    def recv(self, source: int | None) -> Tensor | None:
        self.blocked_on = f"receive from rank {source}"
        return super().recv(source)

    def send_recv(self, x: Tensor | None, peer: int | None) -> Tensor | None:
        self.bytes_sent += 0 if peer is None else x.nbytes
        return super().send_recv(x, peer)


def find_deadlock(group: dist.ProcessGroup) -> str:
    """Run 1F1B with `run_one_by_one`. Returns what this rank was blocked on, or "" if nothing."""
    rank = dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group)
    layers = build_stage(build_model(len(ranks)), rank, len(ranks))
    actions = one_forward_one_backward(rank, len(ranks), num_micro_batches=2)
    dist.barrier(group)  # a late rank would find that the others have given up
    # On CPUs even where there are GPUs: Gloo's timeout is an exception, NCCL's ends the process.
    doomed = dist.new_group(ranks, timedelta(seconds=2), "gloo", use_local_synchronization=True)
    stage = RecordingStage(layers, doomed)
    try:
        forward_backward(stage, actions, *get_batch(0, 2), run=run_one_by_one)
    except RuntimeError:  # the timeout
        return f"rank {rank} waits to {stage.blocked_on}"
    finally:
        dist.destroy_process_group(doomed)
    return ""


def reference_step(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The full model and the full batch in one process."""
    loss = loss_sum(model(tokens), labels) / (labels != IGNORE_INDEX).sum().clamp(min=1)
    loss.backward()
    return loss.detach()


def train(layers: nn.Module, compute_grads: Callable, num_micro_batches: int) -> dict[str, Tensor]:
    """Three steps of plain SGD; Adam would hide a wrong scale. Returns all results by name."""
    results = {}
    device = next(layers.parameters()).device
    for step in range(3):
        layers.zero_grad()
        tokens, labels = get_batch(step, num_micro_batches)
        results[f"loss {step}"] = compute_grads(tokens.to(device), labels.to(device))
        for name, p in layers.named_parameters():
            results[f"grad of {name}, step {step}"] = p.grad.clone()
            p.data -= 0.1 * p.grad
    for name, p in layers.named_parameters():
        results[name] = p.detach()
    return results


def expected_numbers(name: str, num_stages: int, num_micro_batches: int) -> tuple:
    """The table at the top: idle time, and for each rank micro-batches in flight and bytes sent."""
    idle = (num_stages - 1) / (1 if name == "naive" else num_micro_batches)
    in_flight = []
    bytes_sent = []
    for rank in range(num_stages):
        limit = {"naive": 1, "afab": num_micro_batches, "1f1b": num_stages - rank}[name]
        in_flight.append(min(limit, num_micro_batches))
        num_neighbours = (rank > 0) + (rank < num_stages - 1)
        bytes_sent.append(num_neighbours * num_micro_batches * BATCH * SEQ_LEN * HIDDEN * 8)
    return round(idle, 6), in_flight, bytes_sent


def check(name: str, model: nn.Module, reference: dict, num_micro_batches: int, group) -> list[str]:
    """Train with one schedule next to the reference. Rank 0 prints; all return what is wrong."""
    rank = dist.get_rank(group)
    num_stages = dist.get_world_size(group)
    stage = RecordingStage(build_stage(model, rank, num_stages), group)
    actions = SCHEDULES[name](rank, num_stages, num_micro_batches)
    results = train(stage.layers, partial(forward_backward, stage, actions), num_micro_batches)

    differences = [(tensor - reference[key]).abs().max() for key, tensor in results.items()]
    error = torch.stack(differences).max().item()  # NaN if any difference is NaN
    stored = sum(p.nbytes for p in stage.layers.parameters())
    found = (error, stored, stage.max_in_flight, stage.bytes_sent, stage.actions)
    gathered = [None] * num_stages
    dist.all_gather_object(gathered, found, group=group)
    errors, all_stored, in_flight, bytes_sent, schedule = map(list, zip(*gathered, strict=True))

    timelines = simulate(schedule)
    compute_time = 3 * num_micro_batches
    idle_time = max(timeline[-1][-1] for timeline in timelines) - compute_time
    full = sum(p.nbytes for p in model.parameters())
    measured = (round(idle_time / compute_time, 6), in_flight, bytes_sent, sum(all_stored))
    expected = (*expected_numbers(name, num_stages, num_micro_batches), full)
    quantities = ["idle time / compute time", "micro-batches in flight"]
    quantities += ["bytes sent per step", "bytes of parameters"]
    failures = [f"{name}: error {e:.1e}" for e in errors if not e <= 1e-10]  # also NaN
    lines = [f"{name}: largest error {torch.tensor(errors).max():.1e}", render(timelines)]
    for quantity, value, formula in zip(quantities, measured, expected, strict=True):
        lines.append(f"    {quantity:25}{value}, expected {formula}")
        if value != formula:
            failures.append(f"{name}: {quantity} {value}, not {formula}")
    if rank == 0:
        print("\n".join([*lines, f"    of which on each rank    {all_stored}"]))
    return failures


def fail(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
        print(f"{os.path.basename(__file__)}: {message}", file=sys.stderr)
    sys.exit(2)


def init_distributed() -> torch.device:
    """Start torchrun's process group, or one of this process alone. Returns this rank's device."""
    num_gpus = torch.cuda.device_count()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < num_gpus < num_local:
        fail(f"--nproc_per_node {num_local}: use at most {num_gpus}, one for each GPU here")
    device = None
    if num_gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)  # or all would use GPU 0
    single = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    # Without `device_id`, NCCL has one communicator for batches and others for single messages.
    # What one rank sends in a batch and the other receives alone would never arrive.
    backend = "nccl" if num_gpus else "gloo"
    timeout = timedelta(seconds=60)
    dist.init_process_group(backend, timeout=timeout, device_id=device, **single)
    return device or torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description="Pipeline in one file", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--schedule", choices=SCHEDULES, help="default: all three")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    num_stages = int(os.environ.get("WORLD_SIZE", 1))
    if not 1 <= args.micro_batches <= 64:
        parser.error(f"--micro-batches {args.micro_batches}: use 1 to 64")
    if not num_stages <= args.layers <= 64:
        parser.error(f"--layers {args.layers}: on {num_stages} rank(s) use {num_stages} to 64")
    device = init_distributed()
    model = build_model(args.layers).to(device)
    reference = train(model, partial(reference_step, model), args.micro_batches)
    failures = []
    for name in [args.schedule] if args.schedule else SCHEDULES:
        model = build_model(args.layers).to(device)
        failures += check(name, model, reference, args.micro_batches, dist.group.WORLD)
    blocked = [None] * dist.get_world_size()
    dist.all_gather_object(blocked, find_deadlock(dist.group.WORLD))
    if len(blocked) > 1 and not all(blocked):  # one rank has no messages
        failures.append("1f1b, one by one: no deadlock")
    if dist.get_rank() == 0:
        print("1f1b, one by one:", "; ".join(blocked) or "one rank sends no message")
        print(f"FAIL: {'; '.join(failures)}" if failures else "PASS")
    dist.destroy_process_group()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
