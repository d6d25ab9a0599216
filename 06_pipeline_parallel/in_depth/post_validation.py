"""The optimizer step that waits for nobody: taken at once, looked at later, and taken back if it was wrong.

Problem. ZB-H2 has no bubble, if a rank may begin its next step when it is through with this one. But a step ends with
two numbers that belong to all ranks: the norm of the whole gradient, by which it is clipped, and whether all of it is
finite. Whoever waits for them waits for the last rank, and the bubble is back.

Idea. Nearly always nothing is clipped and all is finite. So take the step as if that were known (Zero Bubble, arXiv
2401.10241, section 4, "post-validation"), and let the sums of squares travel meanwhile, one number from each rank.
When they are here, before the first backward of the next step, look:

                 step k                 step k + 1
    rank 0   ... W  step | F  F  F  F ? B              |  rank 0 is through, p - 1 units before rank 3
    rank 1     ... W  step | F  F  F  ? B              ?  all sums are there: was the step of k right?
    rank 2       ... W  step | F  F  ? B                  yes, nothing was clipped: go on, nobody has waited
    rank 3         ... W  step | F  ? B                   no: back to the weights before, clip, step, and these F again

Two things must hold. *Back* means the same bits, or ranks and restarts drift apart; so weights and both moments are
copied first. (Turning AdamW's formulas round needs no copy, and gives back almost what was there: `take_back`.) And no
message may be under way at the look, or a void activation would be taken for a right one: so the look lies at one
point of the common order of all ranks (`programs`), before the first action that is no forward, on every rank.

A rank whose own part is too large already knows that it would be wrong, and waits with its step for the look.

Who holds what: besides its stage's weights, gradients and states, a rank with copies has three numbers more for each
of its parameters, from its step to the look; the gradients stay until then, too.

Formulas, F, B, W the times of a stage, n steps, makespan and cost as in schedule_simulator.py
    everyone waits        n makespan                           ZB-H2: makespan = cost + (p - 1) F
    nobody waits          n cost + (makespan - cost)           where steps fit into one another, as ZB-H2's do
    the sums may take     `room`, without any rank waiting     ZB-H2: one F; 1F1B: p F
    a step taken back     a second optimizer step, and the F's before the look again. If m is 2p or more, at most p on
                          a rank (1F1B, ZB-H1, ZB-H2), 2p (ZB-V), 2p + 1 (interleaved, v = 2), m (AFAB)

Run it:
    python post_validation.py                                         one rank, CPU or GPU
    torchrun --nproc_per_node 4 post_validation.py                    gloo on CPU, nccl on GPU
    torchrun --nproc_per_node 2 post_validation.py --schedule zb-v --rollback invert
Six AdamW steps: two are clipped, one is left out. The last line is PASS, or the script exits with 1 and says which
number is off.
"""

import argparse
import copy
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # first imported while a group is up, it would keep that group until the end
from _pipeline_model import IGNORE, OneLineParser, Sizes, Stage, make_batch, token_loss_sum
from pipeline_executor import Pipeline, layers_of
from schedule_simulator import B, Program, Schedule, ScheduleError, Times, simulate
from schedules import FOLDED, LOOPED, SCHEDULES, build
from torch import Tensor

# Legend: p ranks, m micro-batches; B batch, S sequence, H hidden. A part is the sum of squares of a rank's gradients.
ROLLBACKS = ("copy", "invert")
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


# --------------------------------------------------------------------------------------------------- the optimizer


def clip_factor(squares: Tensor, max_norm: float) -> float:
    """By what a gradient with this sum of squares is multiplied: 1 if it is short enough, 0 if it is not finite."""
    norm = squares.sqrt().item()
    if not norm < float("inf"):  # also for NaN
        return 0.0
    return min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does


class LateStep:
    """`step` when this rank's gradients are complete, `validate` before anything is added to the next ones.

    optimizer   a torch.optim.AdamW over the parameters of this rank, each of which counts once in the norm
    group       all ranks of the pipeline. Not the group of its messages: on nccl they would stand in line behind a
                gathering that is over only when the last rank is through
    rollback    "copy": back to the same bits; "invert": AdamW backwards, without memory
    late        False: everyone waits in `step`, as without all this
    """

    def __init__(
        self, optimizer: torch.optim.AdamW, group: dist.ProcessGroup, max_norm: float, rollback="copy", late=True
    ):
        self.optimizer, self.group, self.max_norm, self.rollback, self.late = optimizer, group, max_norm, rollback, late
        self.parameters = [p for given in optimizer.param_groups for p in given["params"]]
        self.pending: tuple[dist.Work, Tensor] | None = None  # the parts, under way
        self.before: list[tuple[Tensor, dict]] = []  # weights and states as they were before the step
        self.copied = 0  # bytes of these
        self.options: list[dict] = []  # of each group, as they were in `step`: learning rate, weight decay
        self.outcomes: list[str] = []  # of each step: kept, again, later, taken back or left out

    @torch.no_grad()
    def step(self) -> None:
        mine = torch.zeros(1, dtype=torch.float64, device=self.parameters[0].device)
        for p in self.parameters:
            mine += 0 if p.grad is None else p.grad.double().square().sum()
        parts = mine.new_empty(self.group.size())
        groups = self.optimizer.param_groups
        self.options = [{n: copy.deepcopy(x) for n, x in given.items() if n != "params"} for given in groups]
        # --- exercise 6.41: the parts set out; step as if this rank were all, unless it knows better ---
        work = all_gather(parts, mine, group=self.group, async_op=True)  # [1] -> all_gather -> [p]
        self.pending = work, parts
        self.stepped = self.late and clip_factor(mine[0], self.max_norm) == 1
        if self.stepped:
            if self.rollback == "copy":
                self.before = [(p.clone(), copy.deepcopy(self.optimizer.state.get(p, {}))) for p in self.parameters]
            self.optimizer.step()
        # --- end exercise ---
        self.copied = sum(p.nbytes + sum(s.nbytes for s in state.values()) for p, state in self.before)
        if not self.late:
            self.look()

    def validate(self) -> bool:
        """Have all ranks used the right weights since `step`? The answer is the same on all of them."""
        return self.look() if self.late and self.pending else True

    @torch.no_grad()
    def look(self) -> bool:
        """Wait for the parts; keep the step, or take it back and make the right one, if there is one."""
        assert self.pending is not None
        work, parts = self.pending
        later = [dict(given) for given in self.optimizer.param_groups]  # a scheduler may have moved on since `step`
        self.use(self.options)
        # --- exercise 6.42: all parts are here; leave weights and states as if they had been known before the step ---
        work.wait()
        factor = clip_factor(parts.sum(), self.max_norm)  # gathered, not reduced: all add in one order, to one number
        right = self.stepped and factor == 1
        if self.stepped and not right:
            self.take_back()
        if not right and factor > 0:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad *= factor
            self.optimizer.step()
        # --- end exercise ---
        self.use(later)
        done = {True: ("taken back", "again"), False: ("left out", "later")}[self.stepped][factor > 0]
        self.outcomes.append("kept" if right else done)
        self.pending, self.before = None, []
        return factor == 1

    def use(self, options: Sequence[dict]) -> None:
        for given, new in zip(self.optimizer.param_groups, options, strict=True):
            given.update(new)

    def take_back(self) -> None:
        if self.rollback == "copy":
            for p, (value, state) in zip(self.parameters, self.before, strict=True):
                p.copy_(value)
                self.optimizer.state[p] = state
            return
        for given in self.optimizer.param_groups:
            (beta1, beta2), lr = given["betas"], given["lr"]
            for p in (p for p in given["params"] if p.grad is not None):
                state = self.optimizer.state[p]
                m, v, t = state["exp_avg"], state["exp_avg_sq"], state["step"].item()
                m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
                p.add_(lr * m_hat / (v_hat.sqrt() + given["eps"])).div_(1 - lr * given["weight_decay"])
                # What was small beside the gradient was rounded away when it was added, and does not come back.
                m.sub_(p.grad, alpha=1 - beta1).div_(beta1)
                v.sub_((1 - beta2) * p.grad.square()).div_(beta2).clamp_(min=0)
                state["step"] -= 1


# ---------------------------------------------------------------------------------------------------- the pipeline


def before_backward(schedule: Schedule, program: Program) -> int:
    """Where the look lies in a rank's program: before all that ends when the first backward of any rank ends, or later.

    A message stands where the action that made it ends. So those before the look are received before it, on the other
    rank: none is under way. And only forwards are made again.
    """
    timeline, ends = simulate(schedule), {}
    for actions, end in zip(schedule.actions, timeline.end, strict=True):
        ends |= {key: when for action, when in zip(actions, end, strict=True) for key in action.yields()}
    first = min(when for (kind, _, _), when in ends.items() if kind == B)
    return next(i for i, item in enumerate(program) if ends[item.kind[0], item.stage, item.micro_batch] >= first)


class LatePipeline(Pipeline):
    """A Pipeline whose step stops for a look: validate() after the first forwards, which are made again if it is False.

    A forward that counts something (tokens of an expert) counts twice then; its random numbers are drawn once.
    """

    def step(
        self,
        inputs: Sequence,
        targets: Sequence,
        extras: Sequence[dict] | None = None,
        *,
        broadcast=False,
        validate: Callable[[], bool] = lambda: True,
    ) -> Tensor:
        look = before_backward(self.schedule, self.program)
        cuda = self.example.is_cuda
        random = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
        self.run(self.program[:look], inputs, targets, extras, False)
        if not validate():
            for work, _, _ in self.mail.coming.values():  # void, but it must have arrived before the next one comes
                work.wait()
            torch.set_rng_state(random[0])
            if cuda:
                torch.cuda.set_rng_state(random[1])
            self.run(self.program[:look], inputs, targets, extras, False)
        return self.run(self.program[look:], inputs, targets, extras, broadcast, begun=True)


# -------------------------------------------------------------------------------------------------------- the time


def repeated(schedule: Schedule, steps: int) -> Schedule:
    """So many steps as one: each rank goes on with the next as soon as it is through. Micro-batches are numbered on."""
    if len(schedule.placement) > 1:
        raise ScheduleError(
            f"{schedule.name}: the direction of a micro-batch hangs on its number; it cannot be repeated"
        )
    m, every = schedule.micro_batches, range(steps)
    actions = tuple(
        tuple(replace(a, micro_batch=a.micro_batch + k * m) for k in every for a in mine) for mine in schedule.actions
    )
    return replace(schedule, micro_batches=m * steps, actions=actions)


def room(schedule: Schedule, times: Times | None = None) -> float:
    """How long the parts may travel after the last rank's step, until the first rank would wait for them."""
    two = simulate(repeated(schedule, 2), times)
    count = [len(actions) for actions in schedule.actions]
    looks = [before_backward(schedule, list(actions)) for actions in schedule.actions]
    through = max(end[n - 1] for end, n in zip(two.end, count, strict=True))
    return min(start[n + look] for start, n, look in zip(two.start, count, looks, strict=True)) - through


# ------------------------------------------------------------------------------------------------------------ demo

TARGETS = (None, 1.02, None, 1000, None, None)  # the norm over the limit, where the loss is multiplied to have it so
INFINITE = 4  # in this step one gradient of the last stage is infinite


def demo(args: argparse.Namespace, schedule: Schedule, groups: Sequence[dist.ProcessGroup], device) -> list[str]:
    """Late, waiting, and one process; the table on rank 0, and what is wrong."""
    group, rank, m, double = groups[0], groups[0].rank(), schedule.micro_batches, torch.float64
    sizes = Sizes(layers=max(4, schedule.stages))

    def make(stage: int, stages: int) -> Stage:
        layers = layers_of(stage, stages, sizes.layers)
        return Stage(sizes, layers, first=stage == 0, last=stage == stages - 1, tied=False).to(device, double)

    def adamw(modules) -> torch.optim.AdamW:
        return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-2, weight_decay=0.1)

    extras = [{"positions": torch.arange(16, device=device)}] * m
    batches = [[x.to(device) for x in make_batch(step, m)] for step in range(len(TARGETS))]
    weight = 1.0

    def schedule_rate(optimizer: torch.optim.AdamW, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)  # set before the step before is looked at

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return weight * token_loss_sum(logits, labels) / valid

    whole, parts_of, limit, weights = make(0, 1), [], float("nan"), []
    optimizer, name = adamw([whole]), "norm.weight"  # of the last stage
    for step, (tokens, labels) in enumerate(batches):
        weight, valid = 1.0, (labels != IGNORE).sum().item()
        schedule_rate(optimizer, step)
        optimizer.zero_grad()
        sum(loss_of(whole(x, **extras[0]), y) for x, y in zip(tokens, labels, strict=True)).backward()
        named = dict(whole.named_parameters())
        norm = torch.stack([p.grad.square().sum() for p in named.values()]).sum().sqrt().item()
        limit = limit if step else 1.5 * norm
        weights.append(1.0 if TARGETS[step] is None else TARGETS[step] * limit / norm)
        if step == INFINITE:
            named[name].grad[0] = float("inf")
        for p in named.values():
            p.grad *= weights[step]
        parts_of.append({n: p.grad.square().sum() for n, p in named.items()})
        if torch.nn.utils.clip_grad_norm_(whole.parameters(), limit).isfinite():
            optimizer.step()

    def train(late: bool) -> tuple[dict[str, Tensor], LateStep]:
        nonlocal weight, valid
        stages = {key: make(key[1], schedule.stages) for key in schedule.stages_of(rank)}
        optimizer = adamw(stages.values())
        steps = LateStep(optimizer, groups[1], limit, args.rollback, late)
        example = torch.empty(*batches[0][0].shape[1:], sizes.hidden, dtype=double, device=device)  # [B, S, H]
        pipeline = LatePipeline(schedule, stages, group, loss=loss_of, example=example)

        def validate() -> bool:
            right = steps.validate()
            optimizer.zero_grad()  # until here they were needed: a step that is made again is made with them
            return right

        for step, (tokens, labels) in enumerate(batches):
            weight, valid = weights[step], (labels != IGNORE).sum().item()
            schedule_rate(optimizer, step)
            pipeline.step(tokens, labels, extras, validate=validate)
            for (_, stage), module in stages.items():
                if step == INFINITE and stage == schedule.stages - 1:
                    module.get_parameter(name).grad[0] = float("inf")
            steps.step()
        steps.validate()
        tensors = {}
        for module in stages.values():
            for n, p in module.named_parameters():
                tensors[n] = p.detach()
                tensors |= {f"{n} {kind}": optimizer.state[p][kind] for kind in ("exp_avg", "exp_avg_sq")}
        return tensors, steps

    (got, late), (waited, _) = train(True), train(False)
    want = {n: p.detach() for n, p in whole.named_parameters()}
    states = {f"{n} {k}": optimizer.state[p][k] for n, p in whole.named_parameters() for k in ("exp_avg", "exp_avg_sq")}
    errors = [((got[n] - w).abs().max() / w.abs().max()).item() for n, w in (want | states).items() if n in got]
    differ = sum((got[n] != waited[n]).sum().item() for n in got)
    numbers, held = sum(got[n].numel() for n in want if n in got), [n for n in want if n in got]
    copied = (3 * 8 * numbers + 4 * len(held)) * (args.rollback == "copy")  # and each AdamW's count of steps, 4 bytes
    expected = [outcome([parts[n] for n in held], list(parts.values()), limit) for parts in parts_of]
    everyone: list = [None] * group.size()
    dist.all_gather_object(everyone, (errors, differ, copied, late.copied, expected, late.outcomes), group=group)
    exact = args.rollback == "copy"
    rows = [  # what, predicted, measured, is it right?
        (
            "largest error against one process",
            "<= 1e-10",
            f"{max(e for row in everyone for e in row[0]):.1e}",
            all(e <= 1e-10 for row in everyone for e in row[0]),
        ),
        (
            "numbers unlike those of waiting",
            "0" if exact else "",
            str([row[1] for row in everyone]),
            not exact or not any(row[1] for row in everyone),
        ),
        (
            "bytes of copies, by rank",
            str([row[2] for row in everyone]),
            str([row[3] for row in everyone]),
            all(row[2] == row[3] for row in everyone),
        ),
    ]
    for i, row in enumerate(everyone):
        rows.append((f"steps of rank {i}", ", ".join(row[4]), ", ".join(row[5]), row[4] == row[5]))
    if rank == 0:
        print(
            f"{schedule.name} on {schedule.ranks} rank(s), {device.type}; {m} micro-batches; rollback: {args.rollback}"
        )
        one, n = simulate(schedule), len(TARGETS)
        print(f"{n} steps, F = B = W = 1: {n * one.makespan:g} if all wait,", end=" ")
        print(f"{simulate(repeated(schedule, n)).makespan:g} if nobody does and none is taken back;", end=" ")
        print(f"the sums may take {room(schedule):g}")
        for what, predicted, measured, _ in [("", "predicted", "measured", True), *rows]:
            print(f"{what:36}{predicted:>46}{measured:>46}")
    return [what for what, _, _, right in rows if not right]


def outcome(mine: Sequence[Tensor], all_parts: Sequence[Tensor], limit: float) -> str:
    """What becomes of a step, by the sums of squares of one process."""
    own, factor = (clip_factor(torch.stack(list(parts)).sum(), limit) for parts in (mine, all_parts))
    if own == 1:
        return "kept" if factor == 1 else "again" if factor else "taken back"
    return "later" if factor else "left out"


def main() -> None:
    parser = OneLineParser(description="Optimizer steps that are validated later.", allow_abbrev=False)
    parser.add_argument("--schedule", default="zb-h2", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--micro-batches", type=int, default=None, help="default: twice the ranks")
    parser.add_argument("--rollback", choices=ROLLBACKS, default="copy")
    args, ranks = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1"))
    m = 2 * ranks if args.micro_batches is None else args.micro_batches
    if not 1 <= m <= 4096:
        parser.error(f"--micro-batches {m}: use 1 to 4096")
    try:
        schedule = build(args.schedule, ranks, m, 2 if args.schedule in (*LOOPED, *FOLDED) else 1)
        repeated(schedule, 1)
    except ScheduleError as error:
        parser.error(f"--schedule {args.schedule}: {error}")
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < gpus < local:
        parser.error(f"--nproc_per_node {local} is more than the GPUs here; use {gpus} or less")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=60), **alone)
    groups = [dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=60))]
    rank, wrong = dist.get_rank(), demo(args, schedule, groups, device)
    del groups
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
