"""What a run costs, next to the chapters' formulas: bytes held, bytes sent on each axis, traces, summary.

    --meter        after the first step: bytes of this run beside those of the formulas, on the screen and, rank by
                   rank, in meter.json
    --profile N    communication and compute of N steps on one time line for each rank, in trace-rank0.json and so on;
                   open them in ui.perfetto.dev
    --tensorboard  write the values of log.jsonl for TensorBoard too
    --wandb NAME   send them to Weights & Biases

The first step is always counted, for the summary. A dispatch mode sees every communication operator and its
group; each axis has groups of its own (mesh.py), so the group gives the axis. A collective sends what its
bandwidth-optimal algorithm sends for its tensor, as in chapter 02. The formula beside it has two parts: what
the options decide, which plan_traffic.py knows without a model, and what only a built model decides, the
buckets, heads and rows of this rank. test_metrics.py also checks the planner against these.

    axis         what is sent                                   where the formula comes from
    tp           activations within layers, norms' shares       the planner's `of_layers`, `of_ends`; chapter 04
    ring         keys and values, and their gradients           chapter 05: (P-1)/P KV, and (P-1)/P (KV + dKV)
    ulysses      heads exchanged for tokens, and back           chapter 05: `sent_per_layer`
    pp, ends     activations between stages; a tied embedding   the planner's `of_pipeline`; chapter 06
    data         gradients, and with ZeRO weights               chapters 02 and 03: `bytes_sent`
    shards       the same, with --zero-shards                   chapter 03: `bytes_sent`
    copies       a shard's gradients, over the copies           chapter 03: `bytes_across`
    ep, experts  rows to experts and back; experts' gradients   chapter 07: `bytes_sent`, from the rows that were routed
    the others   scalars: counts, losses, norms                 the planner's `everyone`

With --zero-offload the table also has what "crossed" between device and host, down and up (chapter 03:
`bytes_over_the_link`), and says what is held on the host.

Formulas are for fp32, fp64 and bf16-master. The table has none

    under autocast           for axes that send activations: autocast decides their dtype operator by operator
    with --recompute full    for tensor ranks in a pipeline, where a block is recomputed to its end, not to
                             the last tensor that backward needs; for experts with a --dispatch but pairs, or
                             with a schedule that splits the backward, which recomputes their block each time
"""

import dataclasses
import importlib
import math
import resource
import secrets
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import paths  # noqa: F401  finds the chapters below
import expert_dispatch
import fixed_dispatch
import torch
import torch.distributed as dist
import torch.distributed.nn  # a dispatch mode imports it; imported while a group is up, it would keep that group alive
from context_ulysses import kv_heads_of, repeated_kv_heads, sent_per_layer
from gradients import Replicated, copies_of
from mesh import Mesh
from moe_layer import moe_layers
from ops import AUTOCAST
from options import UsageError
from plan_memory import Layout
from plan_traffic import flows, passes_of
from schedule_simulator import W
from step import Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zero_hybrid import bytes_across
from zero_memory import bytes_per_parameter, bytes_sent
from zero_offload import Offload2, bytes_apart, bytes_over_the_link

Bytes = dict[str, float]
Rows = list[tuple[list[int], list[int]]]  # per call of an expert layer: sent to each rank, received from each
TRAVELLING = ("tp", "ring", "ulysses", "pp", "ep")  # axes that send activations
BUILT = ("ring", "ulysses", "data", "experts", "ep")  # what these send depends on the rank, or on the data


# ------------------------------------------------------------------------------------------------------ measured


class Wire(TorchDispatchMode):
    """Bytes that this rank sends, by the name of the mesh's group. `unknown`: operators that could not be counted."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.names = {group.group_name: name for name, group in mesh.groups.items()}
        self.sent: defaultdict[str, float] = defaultdict(float)
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func.name().partition(".")[0]
        if operator.startswith("c10d::"):
            self.count(operator.removeprefix("c10d::"), func, args)
        elif operator.startswith("_c10d_functional::"):  # nothing in the trainer uses these
            self.unknown.add(operator)
        return func(*args, **(kwargs or {}))

    def count(self, operator: str, func: Any, args: Any) -> None:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        group = dist.ProcessGroup.unbox(given["process_group"])
        P = group.size()
        rank = group.rank()

        def full(tensors: Any) -> int:
            return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))

        if operator == "allreduce_":  # a reduce-scatter and an all-gather
            sent = 2 * (P - 1) / P * full(args[0])
        elif operator in ("_allgather_base_", "allgather_"):
            sent = (P - 1) / P * full(args[0])
        elif operator == "_reduce_scatter_base_":
            sent = (P - 1) / P * full(args[1])
        elif operator == "alltoall_base_":
            splits = given.get("input_split_sizes") or [1] * P
            rows = sum(splits)
            sent = full(args[1]) * (rows - splits[rank]) / max(rows, 1)  # the rank's own rows are not sent
        elif operator == "send":
            sent = full(args[0])
        elif operator in ("recv_", "barrier"):
            sent = 0.0
        else:
            self.unknown.add(operator)
            sent = 0.0
        self.sent[self.names.get(group.group_name, "other")] += sent


@contextmanager
def routed_rows(model: Any) -> Iterator[Rows]:
    """For each call of an expert layer inside: the rows that this rank sends to and gets from each rank."""
    rows: Rows = []
    layers = moe_layers(model)
    for layer in layers:

        def decide(tape: Any, *given: Any, plain: Callable = layer.decide) -> None:
            plain(tape, *given)
            rows.append((tape.plan.send, tape.plan.receive))

        layer.decide = decide  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        for layer in layers:
            del layer.decide


def held(me: Trainer) -> Bytes:
    """Bytes that stay on this rank between two steps, by what they are for. A storage counts once."""
    found: dict[str, dict[int, int]] = {"weights": {}, "gradients": {}, "optimizer": {}}
    tensors: dict[str, list[Any]]
    for owner in me.owners:
        if isinstance(owner, Replicated):
            states = [value for state in owner.optimizer.state.values() for value in state.values()]
            tensors = {"weights": [*owner.names], "gradients": [p.grad for p in owner.names], "optimizer": states}
        else:
            tensors = owner.held()
            tensors["optimizer"] = tensors.pop("optimizer states")
        for kind, several in tensors.items():
            storages = [t.untyped_storage() for t in several if isinstance(t, Tensor) and t.dim()]
            found[kind] |= {storage._cdata: storage.nbytes() for storage in storages}
    where = ", host" if offloaded(me) else ""
    return {kind + where * (kind != "weights"): sum(sizes.values()) for kind, sizes in found.items()}


# ----------------------------------------------------------------------------------------------------- predicted


def held_by_formula(me: Trainer) -> Bytes:
    """Weights, gradients and AdamW's moments: chapter 03's division by the ranks of the group, for each owner."""
    total: defaultdict[str, float] = defaultdict(float)
    for owner in me.owners:
        if isinstance(owner, Replicated):
            stage, P = 0, 1
            sizes = [(p.numel(), p.element_size()) for p in owner.names]
        else:
            stage = owner.stage
            P = dist.get_world_size(owner.group)
            sizes = [(b.padded, b.params[0].element_size()) for b in owner.buckets]
        for numel, e in sizes:
            k = 12 if me.config.precision == "bf16-master" else 2 * e
            g = 4 if me.config.accumulate_dtype == "fp32" else e
            if offloaded(me):  # the optimizer's own copy of the weights is there at every precision
                k += 0 if me.config.precision == "bf16-master" else e
                total["weights"] += numel * bytes_apart(stage, P, k, e, g)[0]
                for kind, (states, gradient) in {"gradients": (0, g), "optimizer": (k, 0)}.items():
                    total[f"{kind}, host"] += numel * bytes_apart(stage, P, states, e, gradient)[1]
                continue
            total["weights"] += numel * bytes_per_parameter(stage, P, 0, e, 0)
            total["gradients"] += numel * bytes_per_parameter(stage, P, 0, 0, g)
            total["optimizer"] += numel * bytes_per_parameter(stage, P, k, 0, 0)
    return dict(total)


def offloaded(me: Trainer) -> list[Any]:
    """The owners whose optimizer is on the host."""
    return [owner for owner in me.owners if isinstance(owner, Offload2)]


def crossed(me: Trainer) -> dict[str, int]:
    """Bytes that went between device and host so far, down and up."""
    return {way: sum(owner.link.bytes[way] for owner in offloaded(me)) for way in ("down", "up")}


def crossed_by_formula(me: Trainer) -> Bytes:
    """In one step, by chapter 03's formula for each owner."""
    m = 1 if me.pipeline else me.config.accumulation(me.mesh.sizes["dp"])
    total = {"down": 0.0, "up": 0.0}
    for owner in offloaded(me):
        weights = sum(b.padded * weight_of(b) for b in owner.buckets)
        gradients = sum(b.padded * sent_width(me.config, owner, b) for b in owner.buckets)
        down, up = bytes_over_the_link(dist.get_world_size(owner.group), gradients, weights, m)
        total = {"down": total["down"] + down, "up": total["up"] + up}
    return total


def sent_by_formula(me: Trainer, rows: Rows) -> dict[str, float | None]:
    """Bytes that this rank sends in a step, by axis; None where there is no formula.

    What the options decide comes from the planner, which needs no model. Its mean over ranks or routings is
    not exact for the axes in BUILT; there this rank's own heads, buckets and rows are counted.
    """
    c = me.config
    mesh = me.mesh
    sizes = me.model.config
    moe = me.config.mixture(me.model.config)
    layout = Layout.of(c, sizes, mesh.size("world"))
    sent = defaultdict[str, float](float)
    built = {*BUILT} - ({"ulysses"} if c.fpdt_chunks else set())  # Ulysses ranks send equal chunks
    for flow in flows(sizes, moe, layout, mesh.place["pp"]):
        sent[flow.axis] += flow.wire if flow.axis not in built else 0
    calls = sum(len(layers) * times for _, layers, times in passes_of(sizes, layout, mesh.place["pp"]))
    more = [*sent_for_context(me, layout, calls), *sent_for_gradients(me, layout), *sent_to_experts(me, rows)]
    for axis, size in more:
        sent[axis] += size
    if moe and moe.capacity and c.dispatch != "fixed":  # with fixed slots each rank drops on its own
        sent["tokens"] += calls * 8 * moe.experts * moe.top_k * (mesh.size("tokens") - 1)
    unsure: tuple[str, ...] = (*TRAVELLING, "stage", "tokens", "world") if c.precision in AUTOCAST else ()
    if c.recompute == "full" and moe:
        unsure += TRAVELLING * splits_backward(me) + ("ep",) * (c.dispatch != "pairs")
    elif c.recompute == "full" and me.pipeline:
        unsure += ("tp",)
    return {axis: None if axis in unsure and mesh.size(axis) > 1 else value for axis, value in sent.items()}


def sent_for_context(me: Trainer, layout: Layout, calls: int) -> Iterator[tuple[str, float]]:
    """Chapter 05's formulas, per layer. `sent_per_layer` counts elements of a batch of 1."""
    c = me.config
    mesh = me.mesh
    sizes = me.model.config
    e = next(me.model.parameters()).element_size()
    R = mesh.sizes["ring"]
    U = mesh.sizes["ulysses"]
    place = mesh.place["ulysses"]
    B = c.micro_batch
    S = c.seq_len
    width = sizes.attention_width // layout.tp
    N = sizes.heads // layout.tp
    kv = max(sizes.kv_heads // layout.tp, 1)  # heads of this rank
    heads = len(kv_heads_of(place, U, N, kv))  # K/V heads that this rank needs
    swap = sent_per_layer("ulysses", S // R, width, U, N, kv, place)
    head = S // R // U * sizes.head_dim
    back = 2 * (N - N // U + (U - 1) * heads) * head  # gradients of what it received
    again = {"none": 0, "selective": swap - (N - N // U) * head, "full": swap}[c.recompute]  # selective: q, k and v
    if not c.fpdt_chunks:
        yield "ulysses", calls * B * (swap + back + again) * e
    if repeated_kv_heads(place, U, N, kv):
        heads = N // U
    turn = sent_per_layer("ring", S, width // U, R, N // U, heads) if R > 1 else 0
    yield "ring", calls * B * turn * ((2 + (c.recompute != "none")) * e + max(e, 4))  # sums are in fp32 at least


def sent_for_gradients(me: Trainer, layout: Layout) -> Iterator[tuple[str, float]]:
    """The formulas of chapters 02 and 03, for each owner."""
    c = me.config
    mesh = me.mesh
    for axis, owner in zip(("data", "experts"), me.owners, strict=False):
        axis = "shards" if owner.group is mesh.groups.get("shards") else axis
        if isinstance(owner, Replicated):
            whole = sum(p.nbytes for p in owner.names)
            yield axis, bytes_sent(0, mesh.size(axis), whole, 0, 1, whole)
            continue
        kept = 0
        whole = sum(b.padded * weight_of(b) for b in owner.buckets)
        summed = sum(b.padded * sent_width(c, owner, b) for b in owner.buckets)
        if owner.stage == 3:  # the last unit and the root stay unsharded until backward
            kept = sum(b.padded * weight_of(b) for unit in (owner.units[-1], owner.root) for b in unit.buckets)
        times = 1 if me.pipeline else layout.micro_batches
        yield axis, bytes_sent(owner.stage, mesh.size(axis), summed, kept, times, whole)
        if copies_of(owner, mesh) > 1:
            yield (
                "copies",
                bytes_across(mesh.size("shards"), copies_of(owner, mesh), summed, times if owner.stage > 1 else 1),
            )


def sent_to_experts(me: Trainer, rows: Rows) -> Iterator[tuple[str, float]]:
    """Chapter 07's formula, which needs only the number of rows from the routing."""
    c = me.config
    hidden = me.model.config.hidden
    moe = me.config.mixture(me.model.config)
    experts = moe.experts if moe else 0
    rank = dist.get_rank(me.mesh.groups["ep"])
    P = me.mesh.size("ep")
    e = next(me.model.parameters()).element_size()
    for send, receive in rows:
        matrix = [[receive[i] if j == rank else 0 for j in range(P)] for i in range(P)]
        matrix[rank] = [0 if j == rank else send[j] for j in range(P)]
        if c.dispatch == "fixed":
            C = send[0] * P // experts
            yield "ep", fixed_dispatch.bytes_sent_fixed(P, experts, C, hidden, e)
        else:
            yield "ep", expert_dispatch.bytes_sent(c.dispatch, matrix, rank, hidden, experts, e, max(e, 4))
        if c.recompute == "full":  # dispatch and combine again, as in forward
            yield "ep", (sum(send) + sum(receive) - 2 * send[rank]) * hidden * e


def splits_backward(me: Trainer) -> bool:
    actions = me.pipeline.schedule.actions if me.pipeline else ()
    return any(action.kind == W for mine in actions for action in mine)


def weight_of(bucket: Any) -> int:
    return bucket.params[0].element_size()


def sent_width(config: Any, owner: Any, bucket: Any) -> int:
    """Bytes per element of a gradient as it is sent; stage 1 sends the sum over the micro-batches."""
    wide = config.reduce_dtype == "fp32" or (config.accumulate_dtype == "fp32" and owner.stage == 1)
    return 4 if wide else weight_of(bucket)


# -------------------------------------------------------------------------------------------------------- a run


class Watch:
    """Measures the steps of a run: `with watch.step(step): train_step(...)`. All methods are collective."""

    def __init__(self, me: Trainer, run: Path, first: int) -> None:
        self.me = me
        self.run = run
        self.first = first
        self.ranks: list[dict[str, Any]] = []  # of all ranks: what was held and sent in the first step
        self.profiler: Any = None
        self.boards = boards(me.config, run) if dist.get_rank() == 0 else []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        traced = range(self.first + 1, self.first + 1 + self.me.config.profile)  # after the first, which warms up
        if step in traced and self.profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.me.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
        with ExitStack() as stack:
            if step == self.first:
                before = crossed(self.me)
                wire = stack.enter_context(Wire(self.me.mesh))
                rows = stack.enter_context(routed_rows(self.me.model))
            stack.enter_context(torch.profiler.record_function(f"step {step + 1}"))
            yield
        if step == self.first:
            self.gather(wire, rows, {way: size - before[way] for way, size in crossed(self.me).items()})
        if traced and step == traced[-1]:
            self.end_trace()

    def gather(self, wire: Wire, rows: Rows, crossing: dict[str, int]) -> None:
        formula = sent_by_formula(self.me, rows)
        axes = [axis for axis in self.me.mesh.groups if self.me.mesh.size(axis) > 1 or wire.sent[axis]]
        mine = {
            "held": {kind: [size, held_by_formula(self.me)[kind]] for kind, size in held(self.me).items()},
            "sent": {axis: [wire.sent[axis], formula.get(axis, 0.0)] for axis in [*axes, "other"]},
            "crossed": {way: [crossing[way], want] for way, want in crossed_by_formula(self.me).items()},
            "groups": {axis: self.me.mesh.size(axis) for axis in axes},
            "not counted": sorted(wire.unknown),
        }
        self.ranks = [{}] * dist.get_world_size()
        dist.all_gather_object(self.ranks, mine)

    def report(self) -> str:
        """The table of `--meter`; meter.json has it rank by rank. "Measured" is the maximum over ranks."""
        lines = [f"{'bytes of a rank':30} {'measured':>15} {'formula':>15} {'all ranks, measured':>20}"]
        for what in ("held", "sent", "crossed"):
            for kind in self.ranks[0][what]:
                pairs = [rank[what].get(kind, [0, 0]) for rank in self.ranks]
                most = max(pairs, key=lambda pair: pair[0])
                if what != "held" and not most[0] and not most[1]:
                    continue
                size = f" (groups of {self.ranks[0]['groups'].get(kind, 1)})" if what == "sent" else ""
                known = all(want is not None for _, want in pairs)
                right = known and all(math.isclose(got, want, rel_tol=1e-12) for got, want in pairs)
                unequal = "≠" if known else ""
                sign = "=" if right else unequal
                want = f"{most[1]:,.0f}" if known else "no formula"
                total = sum(got for got, _ in pairs)
                lines.append(f"{what} {kind + size:25} {most[0]:15,.0f} {sign:1}{want:>14} {total:20,.0f}")
        if unknown := self.ranks[0]["not counted"]:
            lines.append(f"not counted: {', '.join(unknown)}")
        return "\n".join(lines)

    def note(self, line: dict[str, Any]) -> None:
        """A line of the log, for TensorBoard and Weights & Biases."""
        numbers = {name: value for name, value in line.items() if name != "step" and value is not None}
        for board in self.boards:
            board.note(line["step"], numbers)

    def end_trace(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.run / f"trace-rank{dist.get_rank()}.json"))
            self.profiler = None

    def end(self) -> None:
        """Write the trace, also if the run ended before the last traced step."""
        self.end_trace()
        for board in self.boards:
            board.end()

    def summary(self, lines: list[dict[str, Any]]) -> str:
        """The summary of a run: loss, speed, memory, and bytes sent on each axis."""
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak_memory(self.me.device))
        trained = [line for line in lines if "loss" in line]
        steps = [line for line in trained if line["step"] > self.first + 1] or trained[-1:]  # the first warms up
        speeds = [line["tokens_per_s"] for line in steps if "tokens_per_s" in line]
        mfu = [line["mfu"] for line in steps if line.get("mfu") is not None]
        rows = {
            "loss": f"{steps[-1]['loss']:.4f} at the last step",
            "speed": f"{statistics.median(speeds):,.0f} tokens/s (median), MFU "
            + (f"{statistics.median(mfu):.1%}" if mfu else "n/a")
            if speeds
            else "n/a",
            "peak memory": f"{max(peaks) / 2**20:,.0f} MiB on the rank with most"
            + ("" if self.me.device.type == "cuda" else " (the whole process, Python and torch included)"),
        }
        if self.ranks:
            most = {axis: max(rank["sent"].get(axis, [0])[0] for rank in self.ranks) for axis in self.ranks[0]["sent"]}
            rows["sent in a step"] = ", ".join(f"{axis} {text(size)}" for axis, size in most.items() if size) or "0"
        return "\n".join(f"{name:15} {value}" for name, value in rows.items())


def text(size: float) -> str:
    return f"{size / 1e6:,.2f} MB" if size >= 1e4 else f"{size:,.0f} B"


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU; on the CPU, of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class TensorBoard:
    """Writes into the folder of the run."""

    def __init__(self, config: Any, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run))

    def note(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def end(self) -> None:
        self.writer.flush()


class WeightsAndBiases:
    """A resumed run keeps its first id."""

    def __init__(self, config: Any, run: Path) -> None:
        import wandb

        known = run / "wandb-id"
        if not known.exists():
            known.write_text(secrets.token_hex(4))
        about = {"id": known.read_text(), "name": run.name, "dir": str(run), "config": dataclasses.asdict(config)}
        self.writer = wandb.init(project=config.wandb, resume="allow", **about)
        self.writer.define_metric("*", step_metric="step")  # steps that are done again are drawn again

    def note(self, step: int, numbers: dict[str, float]) -> None:
        self.writer.log({"step": step, **numbers})

    def end(self) -> None:
        self.writer.finish()


def check_boards(config: Any) -> None:
    """Raise UsageError if a requested one is not installed."""
    for asked, name, module in (
        (config.tensorboard, "tensorboard", "torch.utils.tensorboard"),
        (config.wandb, "wandb", "wandb"),
    ):
        try:
            if asked:
                importlib.import_module(module)
        except ModuleNotFoundError:
            raise UsageError(f"--{name} needs {name}; pip install {name}, or leave it out") from None


def boards(config: Any, run: Path) -> list[Any]:
    """The requested boards. One that fails to start, say without a network, does not end the run."""
    found: list[Any] = []
    for asked, kind in ((config.tensorboard, TensorBoard), (config.wandb, WeightsAndBiases)):
        try:
            found += [kind(config, run)] if asked else []
        except Exception as error:
            print(f"{kind.__name__} does not begin ({error}); the run goes on without it", file=sys.stderr)
    return found
