"""The three stages of the core file against torch's own and against in_depth: one model, 4 ranks, one run.

    python 03_zero/bench_zero.py             4 processes on CPUs (Gloo), or 4 GPUs (NCCL); then the figures
    python 03_zero/bench_zero.py --figures   only draws, from what results/ has

The parameters after two steps of plain SGD in float64 are compared before anything is measured. Torch's own is, for
stages 1 and 2, DistributedDataParallel with ZeroRedundancyOptimizer, and for stage 3 FSDP2 with each layer recomputed,
since the core file also recomputes. On CPUs stages 1 and 2 are measured a second time with the point-to-point
collectives of in_depth in place of Gloo's, whose reduce-scatter is an all-reduce and two copies.
"""

import gc
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "in_depth"))

import torch
import torch.distributed as dist
import zero
from _launch import RANKS, largest, launch, must_be_equal
from harness.figures import COLOURS, GREY, write_figure
from harness.meter import communication, peak_memory, storage_bytes
from harness.report import option_given, paired, write_result
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from zero3 import make_zero
from zero_stages import ExchangeAndSum, SendToAll

# Six layers instead of the core file's four small ones: the same blocks, larger.
SIZES = {"VOCAB_SIZE": 512, "HIDDEN": 192, "N_HEADS": 6, "FFN_HIDDEN": 512}
vars(zero).update(SIZES)
BLOCKS, ROWS, LENGTH = 4, 2, 64
OWN = {"reduce_scatter": ExchangeAndSum, "all_gather": SendToAll}


def build_layers(device: torch.device, dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(zero.HIDDEN), nn.Linear(zero.HIDDEN, zero.VOCAB_SIZE, bias=False))
    layers = nn.Embedding(zero.VOCAB_SIZE, zero.HIDDEN), *(zero.Block() for _ in range(BLOCKS)), head
    return [layer.to(device, dtype) for layer in layers]


def sgd(dtype: torch.dtype) -> tuple[type, dict]:
    """Plain SGD in float64, to compare: AdamW would hide a wrong factor. AdamW to measure."""
    return (torch.optim.SGD, {"lr": 0.05}) if dtype == torch.float64 else (torch.optim.AdamW, {"lr": 1e-3})


def shards_of(sharded) -> list[nn.Parameter]:
    return [flat_param.shard for flat_param in sharded.flat_params]


class Core:
    def __init__(self, stage: int, device: torch.device, dtype: torch.dtype = torch.float32):
        self.layers = build_layers(device, dtype)
        self.names = list(dict(nn.Sequential(*self.layers).named_parameters()))
        self.zero = zero.STAGES[str(stage)](self.layers, dist.group.WORLD)
        optimizer, options = sgd(dtype)
        self.optimizer = optimizer(shards_of(self.zero), **options)

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        zero.forward_backward(self.zero, tokens[None], labels[None])
        self.optimizer.step()
        self.zero.gather_params()
        self.optimizer.zero_grad()

    def params(self) -> dict[str, Tensor]:
        tensors = []
        for flat_param in self.zero.flat_params:
            full = flat_param.shard.new_empty(RANKS * len(flat_param.shard))
            zero.all_gather(full, flat_param.shard.detach())
            for shape in flat_param.shapes.values():
                tensors.append(full[: shape.numel()].view(shape))
                full = full[shape.numel() :]
        return dict(zip(self.names, tensors, strict=True))


class CorePointToPoint(Core):
    def step(self, tokens: Tensor, labels: Tensor) -> None:
        with patch.multiple(zero, **OWN):
            super().step(tokens, labels)


class InDepth:
    def __init__(self, stage: int, device: torch.device, dtype: torch.dtype = torch.float32, own: dict | None = None):
        self.model = nn.Sequential(*build_layers(device, dtype))
        optimizer, options = sgd(dtype)
        optimizer = optimizer(self.model.parameters(), **options)
        self.zero = make_zero(stage, self.model, optimizer, dist.group.WORLD, units=list(self.model), **(own or {}))

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        self.zero.zero_grad()
        with self.zero.micro_batch(last=True):
            (zero.loss_sum(self.model(tokens), labels) / (labels.numel() * RANKS)).backward()
        self.zero.step()

    def params(self) -> dict[str, Tensor]:
        return self.zero.full_weights()


class Torchs:
    def __init__(self, stage: int, device: torch.device, dtype: torch.dtype = torch.float32):
        optimizer, options = sgd(dtype)
        if stage == 3:
            self.model = nn.Sequential(*(checkpoint_wrapper(layer) for layer in build_layers(device, dtype)))
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
            self.optimizer = optimizer(self.model.parameters(), **options)
        else:
            model = nn.Sequential(*build_layers(device, dtype))
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            self.optimizer = ZeroRedundancyOptimizer(
                self.model.parameters(), optimizer, parameters_as_bucket_view=True, **options
            )

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        # Both average over the ranks, so the mean over this rank's tokens is the right loss for them.
        (zero.loss_sum(self.model(tokens), labels) / labels.numel()).backward()
        self.optimizer.step()

    def params(self) -> dict[str, Tensor]:
        plain = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in self.model.named_parameters()}
        short = {name.replace("module.", "").replace("_checkpoint_wrapped_", ""): p for name, p in plain.items()}
        return {name: p.detach().clone() for name, p in short.items()}


def compare(device: torch.device, tokens: Tensor, labels: Tensor) -> None:
    """Everything is compared, in time only if equal; rank 0 writes `03_ground`."""
    rows, plain = [], {"torch": Torchs, "in_depth": InDepth, "core": Core}
    direct = plain | {"in_depth": partial(InDepth, own=OWN), "core": CorePointToPoint}
    for stage, makers in [(1, plain), (2, plain), (3, plain)] + [(1, direct), (2, direct)] * (device.type == "cpu"):
        peaks, sent, params, runs = {}, {}, {}, {}
        for who, make in makers.items():
            exact = make(stage, device, torch.float64)
            for _ in range(2):
                exact.step(tokens, labels)
            params[who] = exact.params()
            del exact
            gc.collect()
        for who in ("torch", "in_depth"):
            must_be_equal(params["core"], params[who], f"stage {stage} beside {who}")
        for who, make in makers.items():
            with peak_memory() as memory:
                runs[who] = make(stage, device)
                runs[who].step(tokens, labels)  # after it all that stays is there
                gc.collect()
                memory.peak = memory.current
                with communication() as wire:
                    runs[who].step(tokens, labels)
                gc.collect()
            peaks[who], sent[who] = largest(memory.peak, device), wire.total
        ratios = {
            who: paired(
                partial(runs["core"].step, tokens, labels),
                partial(runs[who].step, tokens, labels),
                setup=dist.barrier,
            )
            for who in ("torch", "in_depth")
        }
        theirs = "FSDP2, recomputing" if stage == 3 else "DDP + ZeroRedundancyOptimizer"
        rows.append(
            [
                f"stage {stage}" if makers is plain else f"stage {stage}, point to point",
                theirs,
                peaks["core"] / peaks["torch"],
                peaks["core"] / peaks["in_depth"],
                sent["core"] / sent["torch"],
                ratios["torch"],
                ratios["in_depth"],
            ]
        )
        del runs
        gc.collect()
    if dist.get_rank() == 0:
        million = round(sum(p.numel() for p in params["core"].values()) / 1e6, 1)
        write_result(
            "03_ground",
            f"The core file against torch's own and against in_depth, {RANKS} ranks",
            [
                "ours",
                "torch's own",
                "peak bytes / torch's",
                "peak bytes / in_depth's",
                "bytes sent / torch's",
                "seconds of a step / torch's (quartiles)",
                "seconds of a step / in_depth's (quartiles)",
            ],
            rows,
            f"{million}M parameters in fp32 with AdamW, {ROWS} x {LENGTH} tokens per rank. The parameters after two "
            "steps of SGD in float64 were compared first. The peak is all that is alive at once in a step. Bytes sent: "
            "payloads times the formula of a ring. in_depth's stage 3 does not recompute. Point to point, counted: "
            "ExchangeAndSum and SendToAll of zero_stages.py, in ours and in in_depth, in place of Gloo's collectives.",
        )


def count(device: torch.device, tokens: Tensor, labels: Tensor) -> None:
    """Bytes held in mixed precision, by kind, and their formula: `03_ground_bytes`."""
    rows = []
    for stage in (0, 1, 2, 3):
        layers = build_layers(device, torch.float32)
        if stage == 0:  # data parallelism: everything on every rank
            model = nn.Sequential(*layers)
            masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
            model.to(torch.bfloat16)
            optimizer = torch.optim.AdamW(masters)
            zero.loss_sum(model(tokens), labels).backward()
            for p, master in zip(model.parameters(), masters, strict=True):
                dist.all_reduce(p.grad)
                master.grad = p.grad.float()
            optimizer.step()
            weights, gradients = list(model.parameters()), [p.grad for p in model.parameters()]
        else:
            sharded = zero.STAGES[str(stage)](layers, dist.group.WORLD, torch.bfloat16)
            masters = shards_of(sharded)
            optimizer = torch.optim.AdamW(masters)
            zero.forward_backward(sharded, tokens[None], labels[None])
            optimizer.step()
            full = [flat_param.full for flat_param in sharded.flat_params] if stage < 3 else []
            weights = [tensor.detach() for tensor in full]
            gradients = [t.grad for t in (*masters, *full) if t.grad is not None]
        states = [s for state in optimizer.state.values() for s in state.values() if s.dim()]
        held = [storage_bytes(kind) for kind in (weights, gradients, [*masters, *states])]
        if stage == 0:
            everything = held
        per = sum(p.numel() for layer in build_layers(device, torch.float32) for p in layer.parameters())
        formula = [16, 4 + 16 / RANKS, 2 + 16 / RANKS, 16 / RANKS][stage] * per  # no layer needs padding here
        name = f"stage {stage}" if stage else "data parallelism"
        rows.append([name, *held, sum(held), round(formula)])
        if sum(held) != round(formula):
            raise SystemExit(f"{name} holds {sum(held):,} bytes, not {round(formula):,}")
    if dist.get_rank() == 0:
        write_result(
            "03_ground_bytes",
            f"Bytes on each of {RANKS} ranks when backward has ended, in bf16 with AdamW and a master copy in fp32",
            ["", "weights", "gradients", "master copy and moments", "together", "formula"],
            rows,
            f"{everything[0] // 2:,} parameters: 16 bytes each in data parallelism. w = g = 2; g' = 4, since sums of "
            "gradients are kept in the master copy's precision; K = 12.",
        )


def record(device: torch.device, tokens: Tensor, labels: Tensor) -> None:
    """What happens in a step of stage 3, in order, without and with prefetch: `03_ground_events`."""
    rows = []
    for prefetch in (0, 1):
        sharded = zero.Zero3(build_layers(device, torch.float32), dist.group.WORLD, prefetch=prefetch)
        events = []
        with zero.recording(sharded, events, []):
            zero.forward_backward(sharded, tokens[None], labels[None])
        rows += [[prefetch, name, layer] for name, layer in events]
    if dist.get_rank() == 0:
        columns = ["prefetch", "event", "layer"]
        write_result("03_ground_events", "Stage 3: what happens in a step, in order", columns, rows)


def benchmark(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(zero.VOCAB_SIZE, (RANKS, ROWS, LENGTH + 1), generator=generator)[dist.get_rank()].to(device)
    batch = text[..., :-1].contiguous(), text[..., 1:].contiguous()
    compare(device, *batch)
    count(device, *batch)
    record(device, *batch)


# -------------------------------------------------------------------------------------------------------------- figures


def draw_who_stores_what(axes, result) -> None:
    """Each rank's part of weights, gradients and optimizer states: the area is its memory."""
    whole = result["rows"][0][1:4]
    for panel, (name, *held, together, _) in zip(axes, result["rows"], strict=True):
        for rank in range(RANKS):
            top = rank
            for kind, has, all_of_it in zip(("weights", "gradients", "optimizer"), held, whole, strict=True):
                height = 0.86 * all_of_it / sum(whole)
                panel.barh(top, 1, height, align="edge", color="none", edgecolor=GREY, linewidth=0.5)
                part = min(has / all_of_it, 1)  # sums of gradients are wider than gradients: a shard at least
                shard = 1 / RANKS
                begin, width = (0, 1) if part >= 1 else (rank * shard, shard) if has else (0, 0)
                panel.barh(top, width, height, left=begin, align="edge", color=COLOURS[kind])
                top += height
        panel.set(title=f"{name}\n{together / 1e6:.1f} MB a rank", xlim=(0, 1), ylim=(RANKS, -0.1), xticks=[])
        panel.set_yticks([rank + 0.43 for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])
        panel.grid(False)
    for kind, label in (("weights", "parameters"), ("gradients", "gradients"), ("optimizer", "master copy, moments")):
        axes[0].barh(0, 0, color=COLOURS[kind], label=label)
    axes[0].figure.legend(loc="outside lower center", ncols=3, frameon=False)


def simulate(events: list[tuple[str, int]]) -> list[tuple[str, str, int, float, float]]:
    """(row, colour, layer, begin, width): one unit of time for a collective and for a forward pass, three for a
    backward pass that recomputes; one collective at a time on the network. The order is the recorded one."""
    now, free, bars, gathered, summed, runs = 0.0, 0.0, [], {}, {}, set()
    for name, layer in events:
        if name.startswith("start"):
            free = max(free, now) + 1
            gathers = name == "start_all_gather"
            (gathered if gathers else summed)[layer] = free
            bars.append(("network", "weights" if gathers else "gradients", layer, free - 1, 1))
        else:
            needed = summed[layer] if name == "wait_reduce_scatter" else gathered[layer]
            if needed > now:
                bars.append(("compute", "idle", -1, now, needed - now))
            now = max(now, needed)
            if name == "run_layer":
                width = 3 if layer in runs else 1  # the second run of a layer begins its backward pass
                runs.add(layer)
                bars.append(("compute", "compute", layer, now, width))
                now += width
    return bars


def draw_timeline(axes, result) -> None:
    ends = []
    for panel, prefetch in zip(axes, (0, 1), strict=True):
        bars = simulate([(name, layer) for p, name, layer in result["rows"] if p == prefetch])
        for row, colour, layer, begin, width in bars:
            y = {"compute": 0, "network": 1}[row]
            pale = {"hatch": "//", "alpha": 0.35} if colour == "idle" else {}
            panel.barh(y, width, 0.8, left=begin, color=COLOURS[colour], edgecolor="white", linewidth=0.6, **pale)
            if layer >= 0:
                ink = "white" if colour == "weights" else "black"
                panel.text(begin + width / 2, y, str(layer), ha="center", va="center", color=ink, fontsize=9)
        ends.append(max(begin + width for *_, begin, width in bars))
        panel.set(title="with prefetch" if prefetch else "without prefetch: every layer waits", yticks=[0, 1])
        panel.set_yticklabels(["compute", "network"])
        panel.grid(False, axis="y")
    for panel in axes:
        panel.set_xlim(0, max(ends))
    axes[1].set_xlabel("time: a collective 1, a forward pass 1, a backward pass with recomputation 3 (assumed)")
    labels = {"compute": "a layer computes", "weights": "all-gather", "gradients": "reduce-scatter"}
    for colour, label in labels.items():
        axes[1].barh(0, 0, color=COLOURS[colour], label=label)
    axes[1].barh(0, 0, color=COLOURS["idle"], hatch="//", alpha=0.35, label="idle")
    axes[0].figure.legend(loc="outside lower center", ncols=4, frameon=False)


def figures() -> None:
    folder = "03_zero/figures"
    write_figure(
        f"{folder}/who_stores_what.svg", ["03_ground_bytes"], draw_who_stores_what, shape=(1, 4), size=(10, 3.6)
    )
    write_figure(f"{folder}/timeline.svg", ["03_ground_events"], draw_timeline, shape=(2, 1), size=(10, 3.8))


if __name__ == "__main__":
    if not option_given("--figures"):
        launch(benchmark)
    figures()
