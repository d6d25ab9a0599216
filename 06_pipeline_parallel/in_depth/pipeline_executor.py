"""Pipeline parallelism: one executor that runs any schedule, because the schedule is data.

Problem. A model too large for one GPU is split into stages: stage 0 has the first layers, the last stage the
loss. Each rank must know, at any moment, which micro-batch to work on, what to wait for and what to send.

Idea. A schedule (schedules.py) lists the actions of each rank; `programs` puts the messages between them, in an order
that cannot deadlock. Then the executor is a loop over a list:

    rank 0   F0 >  F1 >  > BW0    > BW1          >   a message: an activation forward, a gradient back
    rank 1      > F0 BW0 >  > F1 BW1 >               time goes to the right

    F    take the input, run the stage, pass on the output (on the last stage: the loss), keep the graph
    BW   take the gradient of the output, run backward, pass on the gradient of the input, free the graph
    B    the same for the input only; keep the graph     W    the weights' gradients; free it (split_backward)

Memory, on p ranks: each rank stores 1/p of the layers (DualPipe: 2/p), and from F to W or BW the activations
of a stage and micro-batch. Each rank counts them while it runs, and the count equals the one of `simulate`.

Why no division. The loss is sum over tokens / valid tokens in the full global batch. So the losses of the m
micro-batches add up to the loss, and their gradients, summed in `.grad`, to its gradient. A stage never needs
m. (An engine that divides only the printed loss has gradients that much too large: torchtitan #2972.)

Formulas, n bytes of activations between two stages, v stages on each rank, m micro-batches:
    sent by all ranks    2 m n (v p - 1), forward and backward; nothing on one rank;
                          2 m n (2p - 2) in a V (ZB-V, DualPipeV); 2 m n (p - 1) in DualPipe
    bubble, activations  as in `simulate`: arXiv 1811.06965, 2104.04473, 2401.10241, 2405.15362, 2412.19437
    also sent G bytes per rank of DualPipe (gradients of its two stages), a tied weight by both ends

Run it:
    python pipeline_executor.py                                                      one rank, CPU or GPU
    torchrun --nproc_per_node 2 pipeline_executor.py --schedule zb-h1                Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 4 pipeline_executor.py --schedule interleaved --stages-per-rank 2 --micro-batches 8
Three steps of SGD next to the full model on one process. The last line is PASS, or the script exits with 1
and says which number is wrong.
"""

import argparse
import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, with a group open, it would keep that group alive
from _pipeline_model import IGNORE, SentBytes, Sizes, Stage, make_batch, token_loss_sum
from schedule_simulator import (
    BW,
    Action,
    B,
    F,
    Message,
    OneLineParser,
    Program,
    Schedule,
    ScheduleError,
    W,
    blocks,
    check,
    crossings,
    programs,
    simulate,
)
from schedules import FOLDED, LOOPED, SCHEDULES, build
from split_backward import WeightPart, backward_for_input
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]

# Legend of shapes: B batch, S sequence, H hidden; p ranks, m micro-batches. The executor uses no dimension.
Result = tuple[str, int, int]  # (F: activation, or B: gradient; the stage that made it; micro-batch)


def layers_of(stage: int, stages: int, layers: int) -> range:
    """Which layers a stage holds. Stages in the middle take the remainder, because the ends also have the
    embedding and the head. Raises ValueError for fewer layers than stages."""
    if layers < stages:
        raise ValueError(f"{layers} layers are fewer than {stages} stages; use at least one layer for each stage")
    # --- exercise 6.29: contiguous, every layer once, sizes that differ by at most one ---
    few, more = divmod(layers, stages)
    first_long = (stages - more + 1) // 2  # the number of short stages before the long ones
    start = stage * few + min(max(stage - first_long, 0), more)
    return range(start, start + few + (first_long <= stage < first_long + more))
    # --- end exercise ---


# ------------------------------------------------------------------------------------------------------- messages


class Mailbox:
    """The messages of one rank in one step: sends without a wait, and receives that are posted early.

    Messages between two ranks are matched by their order alone (NCCL has no tags), so both sides must start
    them in the same order, that of the program. `reach` starts only the next message in the queue of a peer.

    NCCL: a message occupies a CUDA stream until the peer receives it. In a group made with `device_id`,
    messages that are started one by one share one stream, even to different peers. Without it, every pair of
    ranks has its own. In both cases an activation blocks the gradient that comes from the same peer. So with
    `crossings` (of schedule_simulator.py, {} if there are none) all messages are in *one* queue, in program
    order, and a crossing is one batch, sent both ways at once. On Gloo no message blocks another.
    """

    def __init__(
        self,
        program: Iterable[Action | Message],
        rank: int,
        group: dist.ProcessGroup,
        example: Tensor,
        crossings: dict[Message, tuple[Message, ...]] | None = None,
    ):
        self.rank = rank
        self.group = group
        self.example = example
        self.batched = crossings is not None
        self.batch: dict[Message, tuple[Message, ...]] = {}  # a crossing, by its first send here
        self.stands_for: dict[Message, Message | None] = {}  # last: that send; others: None
        self.here: dict[Result, Tensor] = {}  # made on this rank, not yet used or sent
        self.coming: dict[Result, tuple[dist.Work, Tensor, int]] = {}  # receives in flight, and the peer
        self.going: dict[int, deque[tuple[dist.Work, Tensor]]] = {}  # sends in flight, per peer
        self.line: dict[int, deque[Message]] = {}  # not yet started, per peer
        for item in program:
            if isinstance(item, Message):
                if together := (crossings or {}).get(item):
                    self.stands_for[item] = None
                    if item != together[-1]:
                        continue
                    send = next(message for message in together if message.source == self.rank)
                    self.stands_for[item] = send
                    self.batch[send] = together
                    item = send
                self.line.setdefault(self.lane(item), deque()).append(item)
                self.going.setdefault(self.lane(item), deque())

    def peer(self, message: Message) -> int:
        return message.destination if message.source == self.rank else message.source

    def lane(self, message: Message) -> int:
        """The key of the queue of a message: one queue per peer, or one for all."""
        return 0 if self.batched else self.peer(message)

    def put(self, result: Result, tensor: Tensor) -> None:
        self.here[result] = tensor

    def take(self, result: Result) -> Tensor:
        """Wait for a result: made here, or its receive is in flight, since its message precedes its use."""
        if result in self.here:
            return self.here.pop(result)
        work, tensor, _ = self.coming.pop(result)
        work.wait()
        return tensor

    def reach(self, message: Message) -> None:
        """The program has reached this message: start it, unless it was started early."""
        due = self.stands_for.get(message, message)
        if due is not None and (line := self.line[self.lane(due)]) and line[0] == due:
            self.start(line.popleft())

    def start_early(self) -> None:
        """Start the next receive from each peer early, if it is the next in the queue and none is in flight.

        The sender then finds its receiver ready. One receive ahead suffices for that; each costs a buffer.
        """
        # --- exercise 6.30: receives ahead of the program, without leaving the line ---
        under_way = {peer for _, _, peer in self.coming.values()}
        for peer, line in self.line.items():
            if line and line[0].destination == self.rank and peer not in under_way:
                self.start(line.popleft())
        # --- end exercise ---

    def start(self, message: Message) -> None:
        if self.batched:
            self.start_together(self.batch.get(message, (message,)))
            return
        result = (message.kind, message.stage, message.micro_batch)
        peer = self.peer(message)
        if message.source == self.rank:
            tensor = self.here.pop(result)
            going = self.going[peer]
            going.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))  # keep until sent
            if len(going) > 2 * self.group.size():  # complete, or safe to wait for: see `programs`
                going.popleft()[0].wait()
        else:
            tensor = torch.empty_like(self.example)
            self.coming[result] = dist.irecv(tensor, group=self.group, group_src=peer), tensor, peer

    def start_together(self, messages: tuple[Message, ...]) -> None:
        """One message, or a crossing, as a batch: NCCL starts it all at once, Gloo one after the other."""
        peer = self.peer(messages[0])
        tensors = []
        operations = []
        for message in messages:
            mine = message.source == self.rank
            result = (message.kind, message.stage, message.micro_batch)
            tensors.append(self.here.pop(result) if mine else torch.empty_like(self.example))
            what = dist.isend if mine else dist.irecv
            operations.append(dist.P2POp(what, tensors[-1], group=self.group, group_peer=peer))
        works = dist.batch_isend_irecv(operations)
        works = works if len(works) == len(messages) else works * len(messages)  # NCCL: one per batch
        for message, tensor, work in zip(messages, tensors, works, strict=True):
            if message.source == self.rank:
                self.going[0].append((work, tensor))
            else:
                self.coming[message.kind, message.stage, message.micro_batch] = work, tensor, 0
        while len(self.going[0]) > 2 * self.group.size():
            self.going[0].popleft()[0].wait()

    def finish(self) -> None:
        for going in self.going.values():
            while going:
                going.popleft()[0].wait()


# ------------------------------------------------------------------------------------------------------- executor


@dataclass
class Held:
    """What a rank stores for one micro-batch in one stage, from its F until its BW or W."""

    output: GradientEdge | None  # the output's node in the graph; its data can be freed once sent
    inputs: list[GradientEdge]  # the edges at which B stops
    x: Tensor | None  # the input, whose `.grad` BW fills
    grad: Tensor | None  # of the loss with respect to itself: 1. None unless this is the last stage
    weights: WeightPart | None = None  # from B until W


class Pipeline:
    """Runs a schedule on a group; `step` leaves the gradients of all micro-batches, summed, in `.grad`.

    schedule        of schedules.py, or any other that its checker accepts
    stages          {(direction, stage): module} for schedule.stages_of(my rank). A stage maps one tensor to
                    one: `inputs[m]`, or the output of the stage before. Each also gets `**extras[m]`
    group           its rank r is rank r of the schedule
    loss            (output of the last stage, targets[m]) -> scalar: a SUM over tokens, divided by the valid
                    tokens of the full global batch. Losses and gradients of micro-batches are added up
    example         a tensor with the shape, dtype and device of what stages pass on
    on_stage_done   called with a stage's module once the gradients of its weights are complete on this rank,
                    often before its last action. Their reduction over data-parallel ranks can start here
    overlap         called with two functions, forward() and backward(), for each F&B pair of the schedule (DualPipe's);
                    it runs both, in any way: see overlapped_pair.py. Without it they run in sequence
    batched         all messages in one queue, crossings as one batch: see `Mailbox`. The default on NCCL

    Stages may recompute, and contain collectives such as those of tensor parallelism if all ranks of that
    group run the same actions in the same order. Raises ValueError (ScheduleError for an invalid schedule).
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: dict[tuple[int, int], nn.Module],
        group: dist.ProcessGroup,
        *,
        loss: Callable[[Tensor, Any], Tensor],
        example: Tensor,
        on_stage_done: Callable[[nn.Module], None] | None = None,
        overlap: Callable[[Callable[[], None], Callable[[], None]], None] | None = None,
        batched: bool | None = None,
    ):
        check(schedule)
        if group.size() != schedule.ranks:
            raise ValueError(f"{schedule.name} for {schedule.ranks} ranks cannot run on a group of {group.size()}")
        self.schedule = schedule
        self.stages = stages
        self.group = group
        self.rank = group.rank()
        if set(stages) != set(schedule.stages_of(self.rank)):
            raise ValueError(f"rank {self.rank} has stages {schedule.stages_of(self.rank)}, not {sorted(stages)}")
        self.loss = loss
        self.example = example.contiguous()  # buffers are made like it
        self.on_stage_done = on_stage_done
        self.overlap = overlap
        self.directions = [schedule.direction(m) for m in range(schedule.micro_batches)]
        self.program = programs(schedule)[self.rank]
        together = dist.get_backend(group) == "nccl" if batched is None else batched
        self.crossings = crossings(schedule) if together else None
        self.partner = {block[0]: block[1] for block in blocks(schedule.actions[self.rank]) if overlap and block[1:]}
        self.splits = any(action.kind == W for action in schedule.actions[self.rank])
        # --- exercise 6.35: after which action are the gradients of a stage's weights complete on this rank? ---
        last: dict[tuple[int, int], Action] = {}
        for action in schedule.actions[self.rank]:
            if action.kind in (W, BW):  # a later one takes the place of an earlier one
                last[schedule.direction(action.micro_batch), action.stage] = action
        self.completing = set(last.values())
        # --- end exercise ---
        self.peak = 0  # of the latest step: the most pairs of stage and micro-batch held at once,
        self.timeline: list[tuple[Action, float, float]] = []  # and each action's start and end in host time
        self.meet()

    def meet(self) -> None:
        """Exchange one small message with each peer, and compare the examples.

        The first message between two ranks opens a connection, for which NCCL blocks both. So all ranks take
        their pairs in one order, (0, 1), (0, 2), (1, 2) ...: the lowest open pair can always proceed. A group
        must not begin with a batch of some of its ranks, so all ranks begin with a collective.
        """
        if self.crossings is not None:
            dist.all_reduce(torch.zeros(1, device=self.example.device), group=self.group)
        kind = DTYPES.index(self.example.dtype)  # bf16 and fp16 have the same size
        mine = torch.full((9,), -1, dtype=torch.int64)  # -1: no such dimension
        for i, size in enumerate([kind, *self.example.shape][:9]):
            mine[i] = size
        mine = mine.to(self.example.device)
        for peer in sorted({m.source + m.destination - self.rank for m in self.program if isinstance(m, Message)}):
            if not torch.equal(mine, theirs := exchange(mine, peer, self.group)):
                # each without the padding of -1
                here, there = (f"{DTYPES[x[0]]} {[n for n in x[1:].tolist() if n >= 0]}" for x in (mine, theirs))
                who = f"rank {self.rank} has {here}, rank {peer} {there}"
                raise ValueError(f"example: {who}; stages must hand on tensors of one shape and dtype")

    def step(
        self, inputs: Sequence, targets: Sequence, extras: Sequence[dict] | None = None, *, broadcast=False
    ) -> Tensor:
        """Forward and backward of all micro-batches; m inputs, m targets, m dictionaries of extras.

        Returns the loss on ranks with a last stage (in DualPipe a part on each of two), 0 on others; with
        `broadcast` the full loss on all. `inputs` are for first stages, `targets` for last ones.
        """
        if not torch.is_grad_enabled():
            raise ValueError("a step under no_grad can have no gradients; call forward_only instead")
        return self.run(self.program, inputs, targets, extras, broadcast)

    @torch.no_grad()
    def forward_only(
        self, inputs: Sequence, targets: Sequence, extras: Sequence[dict] | None = None, *, broadcast=False
    ) -> Tensor:
        """The loss as `step` returns it, without gradients: the forwards of the same schedule, in their order."""
        return self.run([item for item in self.program if item.kind == F], inputs, targets, extras, broadcast)

    def run(self, program: Program, inputs: Sequence, targets: Sequence, extras, broadcast: bool) -> Tensor:
        training = torch.is_grad_enabled()
        extras = [{}] * self.schedule.micro_batches if extras is None else extras
        self.check_batch(inputs, targets, extras)
        crossing = self.crossings if training or self.crossings is None else {}  # forward only: one by one
        self.mail = Mailbox(program, self.rank, self.group, self.example, crossing)
        self.inputs = inputs
        self.targets = targets
        self.extras = extras
        self.held: dict[tuple[int, int], Held] = {}  # by stage and micro-batch
        self.total = torch.zeros((), dtype=torch.float64, device=self.example.device)
        self.peak, self.timeline = 0, []
        do = {F: self.forward, BW: self.backward, B: self.backward_for_input, W: self.backward_for_weights}
        partner = self.partner if training else {}  # no pairs without backwards
        done = set(partner.values())  # run together with the action before them
        for item in program:
            if isinstance(item, Message):
                self.mail.reach(item)
            elif item not in done:
                pair = [item, partner[item]] if item in partner else [item]
                calls = [partial(do[action.kind], action, self.wait_for(action)) for action in pair]
                self.mail.start_early()  # the next message is in flight during the action
                begin = time.perf_counter()
                if self.overlap is not None and len(calls) == 2:
                    self.overlap(*calls)
                else:
                    calls[0]()
                self.timeline += [(action, begin, time.perf_counter()) for action in pair]
        self.mail.finish()
        if broadcast:
            dist.all_reduce(self.total, group=self.group)
        return self.total

    def check_batch(self, inputs: Sequence, targets: Sequence, extras: Sequence[dict]) -> None:
        """ValueError unless all that this rank reads has one entry for each micro-batch."""
        held = {stage for _, stage in self.stages}
        m = self.schedule.micro_batches
        read = {"extras": extras}
        read |= {"inputs": inputs} if 0 in held else {}
        read |= {"targets": targets} if self.schedule.stages - 1 in held else {}
        for name, given in read.items():
            if len(given) != m:  # more than m would be left out without a word
                raise ValueError(f"{len(given)} {name} for the {m} micro-batches of {self.schedule.name}; give {m}")

    def wait_for(self, action: Action) -> Any:
        """Return what the action needs: an input, a gradient, or nothing."""
        stage = action.stage
        m = action.micro_batch
        if action.kind == F:
            return self.inputs[m] if stage == 0 else self.mail.take((F, stage - 1, m))
        if action.kind == W or stage == self.schedule.stages - 1:
            return None
        return self.mail.take((B, stage + 1, m))

    def forward(self, action: Action, x: Any) -> None:
        stage = action.stage
        m = action.micro_batch
        module = self.stages[self.directions[m], stage]
        inputs: list[GradientEdge] = []
        # --- exercise 6.36: the input as the start of a graph, the output to be sent, only the rest kept ---
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.detach().requires_grad_(torch.is_grad_enabled() and (stage > 0 or self.splits))
            output = module(x, **self.extras[m])
            if x.requires_grad:
                inputs.append(get_gradient_edge(x))
        else:  # tokens have no gradient: B stops at the first activation made from them
            with first_activation(module, inputs) if self.splits else nullcontext():
                output = module(x, **self.extras[m])
        last = stage == self.schedule.stages - 1
        if last:
            output = self.loss(output, self.targets[m])
            self.total += output.detach()
        else:
            self.check_output(output, stage)
            self.mail.put((F, stage, m), output.detach().contiguous())
        if torch.is_grad_enabled():
            place = get_gradient_edge(output) if output.requires_grad else None
            leaf = x if isinstance(x, Tensor) and x.requires_grad else None
            self.held[stage, m] = Held(place, inputs, leaf, torch.ones_like(output) if last else None)
        # --- end exercise ---
        self.peak = max(self.peak, len(self.held))

    def check_output(self, output: Any, stage: int) -> None:
        if describe(output) != describe(self.example):
            raise ValueError(
                f"stage {stage} returned {describe(output)} where stages hand on {describe(self.example)}; "
                "every stage but the last must return a tensor like `example`"
            )

    def backward(self, action: Action, grad: Tensor | None) -> None:
        """BW: gradients of input and weights in one backward pass."""
        held = self.held[action.stage, action.micro_batch]
        if held.output is not None:
            torch.autograd.backward([held.output], [grad if held.grad is None else held.grad])
        self.hand_down(action, None if held.x is None else held.x.grad)
        self.let_go(action)

    def backward_for_input(self, action: Action, grad: Tensor | None) -> None:
        held = self.held[action.stage, action.micro_batch]
        found: list[Tensor | None] = [None]
        if held.output is not None:
            grad = grad if held.grad is None else held.grad
            found, held.weights = backward_for_input(held.output, grad, held.inputs)
        held.output, held.inputs = None, []  # from now on only `weights` keeps the graph alive
        self.hand_down(action, found[0] if found else None)

    def backward_for_weights(self, action: Action, _: None) -> None:
        part = self.held[action.stage, action.micro_batch].weights
        if part is not None:
            part.run()
        self.let_go(action)

    def hand_down(self, action: Action, grad: Tensor | None) -> None:
        """Pass the gradient of the input to the stage below, which waits for it even if it is zero."""
        if action.stage > 0:
            grad = torch.zeros_like(self.example) if grad is None else grad.contiguous()
            self.mail.put((B, action.stage, action.micro_batch), grad)

    def let_go(self, action: Action) -> None:
        """Free these activations. If the gradients of their stage are now complete, call the hook."""
        del self.held[action.stage, action.micro_batch]
        if action in self.completing and self.on_stage_done is not None:
            self.on_stage_done(self.stages[self.directions[action.micro_batch], action.stage])


def describe(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@contextmanager
def first_activation(module: nn.Module, found: list[GradientEdge]) -> Iterator[None]:
    """Put into `found` the edge of the first activation, the first output computed from integers."""

    def hook(_, args, output) -> None:
        integers = any(isinstance(x, Tensor) and not x.is_floating_point() for x in args)
        if not found and integers and isinstance(output, Tensor) and output.requires_grad:
            found.append(get_gradient_edge(output))

    handles = [part.register_forward_hook(hook) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --------------------------------------------------------------------------------- weights that exist more than once


def exchange(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    """Send a tensor and return the peer's, of the same shape. One batch: NCCL sends both ways at once."""
    theirs = torch.empty_like(tensor)
    both = [dist.P2POp(way, t, group=group, group_peer=peer) for way, t in ((dist.isend, tensor), (dist.irecv, theirs))]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return theirs


def set_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(piece.view_as(p))  # in place: it may be a view of a bucket


def flat_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """All gradients concatenated; zeros for None."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def sum_mirrored(schedule: Schedule, stages: dict[tuple[int, int], nn.Module], group: dist.ProcessGroup) -> None:
    """Sum the gradients of DualPipe's two copies of each stage; each copy has seen half the micro-batches.

    Call after `step`, before the optimizer; a no-op in other schedules. One message of G bytes each way. Both
    orders of a sum have equal bits, so copies stay equal. A data-parallel sum may precede or follow.
    """
    trains = any(p.requires_grad for module in stages.values() for p in module.parameters())
    if len(schedule.placement) == 1 or not trains:  # the partner has the same stages, so it does not send either
        return
    (partner,) = {schedule.placement[1 - direction][stage] for direction, stage in stages}
    # --- exercise 6.37: both ranks add the same pairs of gradients, so they must list them in the same order ---
    by_stage = sorted(stages, key=lambda key: key[1])  # (direction, stage): only directions differ
    parameters = [p for key in by_stage for p in stages[key].parameters() if p.requires_grad]
    flat = flat_gradients(parameters)
    set_gradients(parameters, flat + exchange(flat, partner, group))
    # --- end exercise ---


def sum_tied(schedule: Schedule, copies: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of a weight that the first and the last stage share (embedding and head), on both.

    copies: this rank's, none, one or two, with equal values. In a V-shape both ends lie on one rank. In
    DualPipe each of two ranks has both ends, and `sum_mirrored` must come first. A sum over other ranks may
    precede or follow if it leaves full gradients; a reduce-scatter (ZeRO), which shards them, must follow.
    A frozen weight is left as it is, without a gradient.
    """
    ends = {rank for row in schedule.placement for rank in (row[0], row[-1])}
    if group.rank() not in ends or not any(copy.requires_grad for copy in copies):
        return
    # --- exercise 6.38: each end's part counts once ---
    total = flat_gradients(copies[:1])
    for copy in copies[1:]:
        total = total + flat_gradients([copy])
    if len(ends) == 2 and len(schedule.placement) == 1:
        (partner,) = ends - {group.rank()}
        total = total + exchange(total, partner, group)
    for copy in copies:
        set_gradients([copy], total)
    # --- end exercise ---


# ------------------------------------------------------------------------------------------------------------- demo


def parse_arguments() -> tuple[argparse.Namespace, Schedule]:
    parser = OneLineParser(description="Run any pipeline schedule beside the whole model.", allow_abbrev=False)
    parser.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--stages-per-rank", type=int, default=None, help="default: what the schedule needs")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--untied", action="store_true", help="embedding and head are two weights")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for option, most in (("micro_batches", 4096), ("layers", 1024), ("stages_per_rank", 64)):
        if (given := getattr(args, option)) is not None and not 1 <= given <= most:
            parser.error(f"--{option.replace('_', '-')} {given}: use 1 to {most}")
    default = 2 if args.schedule in (*LOOPED, *FOLDED) else 1
    per_rank = default if args.stages_per_rank is None else args.stages_per_rank
    try:
        schedule = build(args.schedule, ranks, args.micro_batches, per_rank)
    except ScheduleError as error:
        parser.error(f"--schedule {args.schedule}: {error}")
    if args.layers < schedule.stages:
        parser.error(
            f"--layers {args.layers} is fewer than the {schedule.stages} stages; use {schedule.stages} or more"
        )
    return args, schedule


def demo(args: argparse.Namespace, schedule: Schedule, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Three steps next to the reference. Prints the table on rank 0 and returns the failures."""
    rank = group.rank()
    m = schedule.micro_batches
    tied = not args.untied
    double = torch.float64
    sizes = Sizes(layers=args.layers)

    def make(stage: int, stages: int) -> Stage:
        layers = layers_of(stage, stages, sizes.layers)
        return Stage(sizes, layers, first=stage == 0, last=stage == stages - 1, tied=tied).to(device, double)

    stages = {(d, s): make(s, schedule.stages) for d, s in schedule.stages_of(rank)}
    reference = make(0, 1)
    copies = [w for key in sorted(stages) for w in stages[key].tied_weights()] if tied else []
    tokens, labels = make_batch(0, m)
    valid = (labels != IGNORE).sum().item()  # of all micro-batches
    example = torch.empty(*tokens.shape[1:], sizes.hidden, dtype=double, device=device)  # [B, S, H]

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss_sum(logits, labels) / valid

    pipeline = Pipeline(schedule, stages, group, loss=loss_of, example=example)
    extras = [{"positions": torch.arange(tokens.shape[-1], device=device)}] * m
    errors = list[Tensor]()
    sent = SentBytes()

    def compare(got: Tensor, want: Tensor) -> None:
        errors.append((got - want).abs().max() / want.abs().max())

    for step in range(3):
        tokens, labels = (x.to(device) for x in make_batch(step, m))
        valid = (labels != IGNORE).sum().item()
        for module in (reference, *stages.values()):
            module.zero_grad()
        with sent if step == 0 else nullcontext():
            loss = pipeline.step(tokens, labels, extras, broadcast=True)
        sum_mirrored(schedule, stages, group)
        if tied:
            sum_tied(schedule, copies, group)
        want = sum(loss_of(reference(x, **extras[0]), y) for x, y in zip(tokens, labels, strict=True))
        want.backward()
        compare(loss, want.detach())
        whole = dict(reference.named_parameters(remove_duplicate=False))
        for module in stages.values():
            for name, p in module.named_parameters():
                compare(p.grad, whole[name].grad)
                p.data -= 0.1 * p.grad  # plain SGD: a wrong scale shows, where Adam would hide it
                compare(p.data, whole[name].data - 0.1 * whole[name].grad)
        for p in reference.parameters():
            p.data -= 0.1 * p.grad

    timeline = simulate(schedule)
    messages = sum(isinstance(x, Message) and x.source == rank for x in pipeline.program)
    worst = torch.stack(errors).max().item()
    mine = (worst, pipeline.peak, timeline.peak_activations[rank], sent.bytes, messages * example.nbytes)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    error = max((row[0] for row in everyone), key=lambda e: (e != e, e))  # a NaN counts as the largest
    measured = [[row[i] for row in everyone] for i in (1, 3)]
    predicted = [[row[i] for row in everyone] for i in (2, 4)]
    rows = [  # what, predicted, measured, is it right?
        ("largest error against the reference", "<= 1e-10", f"{error:.1e}", all(row[0] <= 1e-10 for row in everyone)),
        ("activations held at most, by rank", predicted[0], measured[0], predicted[0] == measured[0]),
        ("bytes sent in a step, by rank", predicted[1], measured[1], predicted[1] == measured[1]),
    ]
    if rank == 0:
        where = f"{schedule.name} on {schedule.ranks} rank(s), {device.type}"
        ratio = f"bubble / work with F = B = W: {timeline.bubble_ratio:.3f}"
        print(f"{where}; {schedule.stages} stages, {m} micro-batches; {ratio}")
        for what, want, got, _ in [("", "predicted", "measured", True), *rows]:
            print(f"{what:36}{want!s:>36}{got!s:>36}")
    return [what for what, _, _, right in rows if not right]


def launch(demo: Callable[[torch.device], list[str]]) -> NoReturn:
    """Start the process group, run the demo, print PASS or what is wrong."""
    gpus = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < gpus < local:
        OneLineParser().error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **alone)
    rank = dist.get_rank()
    wrong = demo(device)
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    sys.exit(1 if wrong else 0)


def main() -> None:
    args, schedule = parse_arguments()
    launch(lambda device: demo(args, schedule, dist.group.WORLD, device))


if __name__ == "__main__":
    main()
