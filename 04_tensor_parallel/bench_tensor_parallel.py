"""A block of the core file against torch's DTensor plan of the same block, and against in_depth: 4 ranks, one run.

    python 04_tensor_parallel/bench_tensor_parallel.py              4 processes on CPU (Gloo), or 4 GPUs (NCCL)
    python 04_tensor_parallel/bench_tensor_parallel.py --figures    draw the figures again from the results

First output and parameters' gradients are compared; only then is it timed. A step is forward, backward and the sum of
partial gradients. All three use the same norm and the same attention. The core file's form is the overlapped one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import tensor_parallel
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tensor_parallel_bench import RANKS, must_be_same, options, run, whole
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication, peak_memory, saved_activations
from harness.report import paired, write_result
from harness.spawn import LIMIT
from parallel_block import Config, ParallelBlock, Parts, sync_replicated_gradients
from parallel_linear import TensorParallel as Deep
from parallel_llama import load_full_state_dict
from tensor_parallel import (
    ModelConfig,
    TPContext,
    all_reduce_partial_grads,
    attention,
    block,
    expected_bytes,
    full_params,
    norm,
    overlapped_column_parallel_linear,
    shard_weight,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

CONFIG = ModelConfig(256, 256, 1, 8, 4, 704, batch=2, seq_len=128)
LAYOUTS = {"tensor": False, "tensor + sequence": True}
PARTS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
PARTS |= {f"{n}_proj": f"self_attn.{n}_proj" for n in "qkvo"} | {
    f"{n}_proj": f"mlp.{n}_proj" for n in ("gate", "up", "down")
}


def context(group: dist.ProcessGroup, sequence_parallel: bool) -> TPContext:
    return TPContext(group, sequence_parallel, overlapped_column_parallel_linear)


# ---------------------------------------------------------------------------------- the same block, by torch's DTensor


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CONFIG.hidden))

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        H, kv = CONFIG.hidden, CONFIG.n_kv_heads * CONFIG.hidden // CONFIG.n_heads
        self.q_proj, self.o_proj = nn.Linear(H, H), nn.Linear(H, H)
        self.k_proj, self.v_proj = nn.Linear(H, kv), nn.Linear(H, kv)

    def forward(self, x: Tensor) -> Tensor:
        S, D = CONFIG.seq_len, CONFIG.hidden // CONFIG.n_heads
        projections = (self.q_proj, self.k_proj, self.v_proj)
        mixed = attention(*(p(x).view(CONFIG.batch, S, -1, D).transpose(1, 2) for p in projections))
        return self.o_proj(mixed.transpose(1, 2).flatten(2).flatten(0, 1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(CONFIG.hidden, CONFIG.ffn_hidden) for _ in range(2))
        self.down_proj = nn.Linear(CONFIG.ffn_hidden, CONFIG.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Rows are tokens, as in the core file: x [T, H]."""

    def __init__(self):
        super().__init__()
        self.attn_norm, self.mlp_norm, self.attn, self.mlp = Norm(), Norm(), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def named(self) -> dict[str, Tensor]:
        return {n.removeprefix("attn.").removeprefix("mlp."): p for n, p in self.named_parameters()}


def by_torch(full: dict[str, Tensor], device: torch.device, sequence: bool) -> Block:
    model = Block()
    with torch.no_grad():
        for name, p in model.named().items():
            p.copy_(full[f"0.{name}"])
    outside = Shard(0) if sequence else Replicate()
    gather = {n: PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate()) for n in ("attn", "mlp")}
    plan: dict = gather
    plan |= {f"attn.{n}_proj": ColwiseParallel() for n in "qkv"}
    plan |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
    plan |= {n: RowwiseParallel(output_layouts=outside) for n in ("attn.o_proj", "mlp.down_proj")}
    if sequence:
        plan |= {n: SequenceParallel(sequence_dim=0) for n in ("attn_norm", "mlp_norm")}
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (RANKS,))
    return parallelize_module(model.to(device), mesh, plan)


# ------------------------------------------------------------------------------------------------------------ measuring


def step_of_the_core_file(x: Tensor, w: dict[str, Tensor], tp: TPContext) -> Tensor:
    for p in w.values():
        p.grad = None
    x.grad = None
    z = block(x, w, 0, CONFIG, tp)
    z.backward(z.detach())
    all_reduce_partial_grads(w, CONFIG, tp)
    return z.detach()


def step_of_a_module(x: Tensor, model: nn.Module, finish) -> Tensor:
    model.zero_grad()
    x.grad = None
    z = model(x)
    z.backward(z.detach())
    finish()
    return z.detach()


def sum_torchs_norms(model: Block) -> None:
    for name, p in model.named().items():
        if "norm" in name or name in ("o_proj.bias", "down_proj.bias"):
            whole(p.grad)  # torch's gradients of these are partial sums, too


def about(step, x: Tensor, leave_out: list[Tensor]) -> list[int]:
    """[bytes sent, bytes saved for the backward pass, peak of allocated bytes] of one step."""
    with communication() as wire, saved_activations(leave_out) as saved:
        step(x)
    peaks = []
    for _ in range(3):  # gloo may drop a buffer late: the least is the step's own
        with peak_memory() as memory:
            step(x)
        peaks.append(memory.peak)
    return [wire.total, saved.bytes, min(peaks)]


def compare(device: torch.device) -> None:
    group, rows, t = dist.group.WORLD, [], RANKS
    full = {n: x.float() for n, x in full_params(CONFIG).items() if n.startswith("0.")}
    config = Config(CONFIG.vocab_size, CONFIG.hidden, 1, CONFIG.n_heads, CONFIG.n_kv_heads, CONFIG.ffn_hidden)
    parts = Parts(
        attention=lambda q, k, v, *, causal: attention(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2),
        rope=lambda x, cos, sin: x,
        norm=lambda x, weight, eps: norm(x, weight),
    )
    T, cos = CONFIG.batch * CONFIG.seq_len, torch.zeros(1, device=device)
    for layout, sequence in LAYOUTS.items():
        tp = context(group, sequence)
        x = torch.randn(T, CONFIG.hidden, generator=torch.Generator().manual_seed(0)).to(device)
        mine = (x.chunk(t)[tp.rank] if sequence else x).clone().requires_grad_()
        for other in ("torch's DTensor", "in_depth"):
            weights = full if other[0] == "t" else {n: x * (not n.endswith("bias")) for n, x in full.items()}
            w = {n: shard_weight(n, x, CONFIG, tp).to(device).requires_grad_() for n, x in weights.items()}
            ours = partial(step_of_the_core_file, w=w, tp=tp)
            if other == "in_depth":  # it has no biases, and cuts S, not T: one sequence of B S tokens would mix them
                deep = ParallelBlock(config, Deep(group, sequence), parts).to(device)
                named = {f"{long}.weight": weights[f"0.{n}.weight"].to(device) for n, long in PARTS.items()}
                load_full_state_dict(deep, named)
                order = x.view(CONFIG.batch, t, -1, CONFIG.hidden).transpose(0, 1) if sequence else x  # [t, B, S/t, H]
                theirs_x = order.reshape(t, -1, CONFIG.hidden)[tp.rank] if sequence else x
                theirs_x = theirs_x.view(CONFIG.batch, -1, CONFIG.hidden).clone().requires_grad_()
                model = type("", (nn.Module,), {"forward": lambda self, x, d=deep: d(x, cos, cos)})()
                model.deep = deep
                theirs = partial(step_of_a_module, model=model, finish=partial(sync_replicated_gradients, deep, group))
                gradients = {f"{n}.weight": deep.get_parameter(f"{long}.weight") for n, long in PARTS.items()}
            else:
                model, theirs_x = by_torch(full, device, sequence), mine.detach().clone().requires_grad_()
                theirs = partial(step_of_a_module, model=model, finish=partial(sum_torchs_norms, model))
                gradients = model.named()
            z, their_z = ours(mine), theirs(theirs_x)
            if not (sequence and other == "in_depth"):  # there, the rows of a rank are other tokens
                must_be_same(z, whole(their_z).view_as(z), f"the output, {layout} parallel")
            for name, p in gradients.items():
                got, want = w[f"0.{name}"].grad, whole(p.grad)
                want = want if other == "in_depth" else shard_weight(f"0.{name}", want, CONFIG, tp)
                if name != "k_proj.bias":  # zero: what is added to all keys moves all scores of a query alike
                    must_be_same(got, want, f"the gradient of {name}, {layout} parallel, {other}")
            a, b = about(ours, mine, list(w.values())), about(theirs, theirs_x, [*model.parameters(), cos])
            ratio = paired(partial(ours, mine), partial(theirs, theirs_x), repeats=11, setup=dist.barrier)
            pairs = [number for pair in zip(a, b, strict=True) for number in pair]
            rows.append([layout, other, *pairs, ratio])
    if dist.get_rank() == 0:
        columns = ["layout", "compared with", "bytes sent, ours", "theirs", "bytes saved, ours", "theirs"]
        columns += ["peak bytes, ours", "theirs", "seconds of a step, ours / theirs (quartiles)"]
        note = (
            f"A step is forward, backward and the sum of partial gradients, {CONFIG.batch} x {CONFIG.seq_len} "
            f"tokens, hidden {CONFIG.hidden}, float32. Peak: beyond weights and x. Only in_depth has no biases."
        )
        write_result("04_ground", f"A block of the core file on {RANKS} ranks", columns, rows, note)


def activations(device: torch.device) -> None:
    """What autograd saves of a block on tp ranks, measured in groups of this world."""
    rows, T = [], CONFIG.batch * CONFIG.seq_len
    full = {n: x.float() for n, x in full_params(CONFIG).items()}
    groups = {}
    for t in (1, 2, 4):
        slices = [list(range(first, first + t)) for first in range(0, RANKS, t)]
        groups[t] = dist.new_subgroups_by_enumeration(slices, timeout=LIMIT)[0]
    for t in (1, 2, 4):
        tensor, both = (expected_bytes(CONFIG, 2, sequence, True, 4)[1] for sequence in (False, True))
        outside = 2 * (tensor - both)  # on one rank
        for layout, sequence in LAYOUTS.items():
            tp = context(groups[t], sequence)
            w = {n: shard_weight(n, x, CONFIG, tp).to(device).requires_grad_() for n, x in full.items()}
            stored, saved, _ = tensor_parallel.measured_bytes(w, CONFIG, tp)
            want_stored, want, _ = expected_bytes(CONFIG, t, sequence, True, 4)
            if (stored, saved) != (want_stored, want):
                raise SystemExit(f"{layout}, {t} ranks: {stored} and {saved} bytes, not {want_stored} and {want}")
            out = outside // (t if sequence else 1)
            rows.append([t, layout, out, want - out, want, saved])
    if dist.get_rank() == 0:
        columns = ["tp", "layout", "saved outside the pairs", "inside", "formula", "bytes saved, measured"]
        note = f"One block, {T} tokens, hidden {CONFIG.hidden}, {CONFIG.n_heads} heads, float32."
        write_result("04_ground_activations", "Bytes that autograd saves of a block", columns, rows, note)


@contextmanager
def watched(tp: TPContext, around: Callable) -> Iterator[None]:
    """In the block, `around(part, function, arguments)` runs each norm, attention and linear layer in its place."""
    names = iter(("norm", "q, k, v", "attention", "o", "norm", "gate, up", "down"))

    def wrapped(function: Callable) -> Callable:
        return lambda *arguments: around(next(names), function, arguments)

    functions = {name: getattr(tensor_parallel, name) for name in ("norm", "attention", "row_parallel_linear")}
    column = mock.patch.object(tp, "column_linear", wrapped(tp.column_linear))
    with mock.patch.multiple(tensor_parallel, **{name: wrapped(f) for name, f in functions.items()}), column:
        yield


def regions(device: torch.device) -> None:
    """Each part of a block in order, forward: which part of tokens and features of its result a rank has."""
    rows, T, H = [], CONFIG.batch * CONFIG.seq_len, CONFIG.hidden
    for layout, sequence in LAYOUTS.items():
        tp, log = context(dist.group.WORLD, sequence), []
        full = {n: x.float() for n, x in full_params(CONFIG).items()}
        w = {n: shard_weight(n, x, CONFIG, tp).to(device).requires_grad_() for n, x in full.items()}

        def logged(part: str, function: Callable, arguments: tuple, log=log):
            with communication() as wire:
                out = function(*arguments)
            first = out[0] if isinstance(out, tuple) else out
            sent = [[name.replace("_", "-"), "sends", 1.0, 1.0, size] for name, size, _ in wire.events]
            if part == "attention":  # [B, N/tp, S, D]
                log.append([part, "computes", 1.0, first.shape[1] / CONFIG.n_heads, 0])
            elif part == "norm":
                log.append([part, "computes", len(first) / T, 1.0, 0])
            elif part in ("o", "down"):  # a partial sum of all rows; its collective; the rows that x is added to
                log += [[part, "computes", 1.0, 1.0, 0], *sent, ["x + ...", "computes", len(first) / T, 1.0, 0]]
            else:
                width = H if part == "q, k, v" else CONFIG.ffn_hidden
                log += [*sent, [part, "computes", len(first) / T, first.shape[1] / width, 0]]
            return out

        with watched(tp, logged):
            x = torch.randn(T // (tp.size if sequence else 1), H, device=device)
            tensor_parallel.block(x, w, 0, CONFIG, tp)
        rows += [[layout, *entry] for entry in log]
    if dist.get_rank() == 0:
        columns = ["layout", "what", "computes or sends", "fraction of the tokens", "of the features", "payload"]
        note = "In order, forward. A payload is the full tensor; of a partial sum every rank has all rows."
        write_result("04_ground_regions", "What one of 4 ranks has inside a block", columns, rows, note)


class Alive(peak_memory):
    """The meter, which notes the bytes that are alive after each operator that changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[list] = []

    def note(self, direction: str, what: str) -> None:
        self.log.append([direction, what, self.current])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before, out = self.current, super().__torch_dispatch__(func, types, args, kwargs)
        if self.current != before:
            direction = "backward" if torch._C._current_autograd_node() is not None else "forward"
            self.note(direction, func._opname)
        return out


def alive(device: torch.device) -> None:
    """Bytes alive after each operator of a block, forward and backward, beyond weights and what comes in."""
    rows, T, H = [], CONFIG.batch * CONFIG.seq_len, CONFIG.hidden
    full = {n: x.float() for n, x in full_params(CONFIG).items() if n.startswith("0.")}
    for layout, sequence in LAYOUTS.items():
        tp = context(dist.group.WORLD, sequence)
        w = {n: shard_weight(n, x, CONFIG, tp).to(device).requires_grad_() for n, x in full.items()}
        for p in w.values():
            p.grad = torch.zeros_like(p)  # there already: only what a step needs in addition is counted
        x = torch.randn(T // (tp.size if sequence else 1), H, device=device).requires_grad_()
        dz = torch.randn_like(x)
        with Alive() as meter:

            def marked(part: str, function: Callable, arguments: tuple, meter=meter):
                if part != "attention":
                    meter.note("part", part)
                return function(*arguments)

            with watched(tp, marked):
                z = tensor_parallel.block(x, w, 0, CONFIG, tp)
            z.backward(dz)
            del z
        rows += [[layout, *entry] for entry in meter.log]
    if dist.get_rank() == 0:
        columns = ["layout", "direction", "operator", "bytes alive after it"]
        note = "Beyond weights, their gradients and x. A `part` marks where a named part of the block begins."
        write_result(
            "04_ground_alive", f"Bytes alive per operator of a block, one of {RANKS} ranks", columns, rows, note
        )


def worker(device: torch.device) -> None:
    compare(device)
    activations(device)
    regions(device)
    alive(device)


# -------------------------------------------------------------------------------------------------------------- figures


def draw_regions(axes, result) -> None:
    for axis, layout in zip(axes, LAYOUTS, strict=True):
        entries = [row[1:] for row in result["rows"] if row[0] == layout]
        for i, (what, kind, tokens, features, _) in enumerate(entries):
            if kind == "sends":
                axis.add_patch(_box(i + 0.25, 0.0, 0.5, 1.0, COLOURS["messages"], 0.9))
            else:
                axis.add_patch(_box(i + 0.08, 0.0, 0.84, 1.0, COLOURS["idle"], 0.3))
                axis.add_patch(_box(i + 0.08, 1 - tokens, 0.84 * features, tokens, COLOURS["activations"], 0.9))
            axis.text(i + 0.5, -0.06, what, ha="right", va="top", rotation=35, fontsize=8, color=GREY)
        axis.set(xlim=(0, len(entries)), ylim=(0, 1), xticks=[], yticks=[0, 1], yticklabels=["last", "first token"])
        axis.set_title(f"{layout} parallel: what one of 4 ranks has of each result", fontsize=10)
        axis.grid(False)
    for what, colour, alpha in (
        ("stored on this rank", "activations", 0.9),
        ("stored on the others", "idle", 0.3),
        ("a collective", "messages", 0.9),
    ):
        axes[0].bar(0, 0, color=COLOURS[colour], alpha=alpha, label=what)
    axes[0].figure.legend(loc="outside lower center", ncols=3, fontsize=9)


def _box(x: float, y: float, width: float, height: float, colour: str, alpha: float):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, alpha=alpha, edgecolor="none")


def draw_activations(axes, result) -> None:
    labels = []
    for i, (t, layout, outside, inside, _, measured) in enumerate(result["rows"]):
        at = i + (i // 2) * 0.5
        parts = (
            (0, inside, "inside the pairs: q, k, v, attention, MLP", 0.95),
            (inside, outside, "outside: norms and their outputs", 0.45),
        )
        for bottom, height, part, alpha in parts:
            label = part if i == 0 else None
            axes.bar(at, height / 1e6, bottom=bottom / 1e6, color=COLOURS["activations"], alpha=alpha, label=label)
        axes.plot([at], [measured / 1e6], "_", color=GREY, ms=22, label="measured" if i == 0 else None)
        labels.append((at, f"tp = {t}\n{'TP + SP' if '+' in layout else 'TP'}"))
    axes.set_xticks([at for at, _ in labels], [words for _, words in labels], fontsize=8)
    axes.set_ylabel("MB saved for the backward pass of a block")
    axes.set_title("Tensor parallel against tensor + sequence parallel", fontsize=10)
    axes.legend(fontsize=8)


def draw_alive(axes, result) -> None:
    most = max(row[3] for row in result["rows"]) / 1e6
    for panel, layout in zip(axes, LAYOUTS, strict=True):
        entries = [row[1:] for row in result["rows"] if row[0] == layout]
        bytes_alive = [size / 1e6 for _, _, size in entries]
        places = range(len(entries))
        panel.fill_between(places, bytes_alive, step="post", color=COLOURS["activations"], alpha=0.6)
        for place, (direction, what, _) in zip(places, entries, strict=True):
            if direction == "part":
                panel.axvline(place, color=GREY, linewidth=0.5, alpha=0.6)
                panel.text(place + 0.5, 1.14 * most, what, rotation=90, va="top", fontsize=8, color=GREY)
        turn = next(place for place, entry in zip(places, entries, strict=True) if entry[0] == "backward")
        panel.axvline(turn, color=GREY, linewidth=1.2, linestyle=":")
        panel.text(turn + 0.5, 1.14 * most, "backward", va="top", fontsize=8, color=GREY)
        panel.set(xlim=(0, len(entries) - 1), ylim=(0, 1.18 * most), xticks=[], ylabel="MB alive")
        panel.set_title(f"{layout} parallel: at most {max(bytes_alive):.2f} MB", fontsize=10)
        panel.grid(False, axis="x")
    axes[-1].set_xlabel("operators that allocate or free, in order")


def draw() -> None:
    folder = "04_tensor_parallel/figures"
    write_figure(f"{folder}/regions.svg", ["04_ground_regions"], draw_regions, shape=(2, 1), size=(7.5, 5.2))
    write_figure(f"{folder}/activations.svg", ["04_ground_activations"], draw_activations, size=(7.0, 3.8))
    write_figure(f"{folder}/alive.svg", ["04_ground_alive"], draw_alive, shape=(2, 1), size=(8.0, 5.6))


if __name__ == "__main__":
    if not options(__doc__, figures=True).figures:
        run(worker)
    draw()
