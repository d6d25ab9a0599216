"""The trainer's step next to other programs, on one process and on four; and every byte it sends, by axis.

    python 11_5d_trainer/bench/bench_train.py             CPU; about two minutes
    python 11_5d_trainer/bench/bench_train.py --figures   draw the figure again from results/

1 rank   next to transformers' Llama with torch's AdamW and clip_grad_norm_, the loop that one writes first
4 ranks  data 2 x pipeline 2 with 1F1B, next to torch's DistributedDataParallel around the stages of
         torch.distributed.pipelining. The stages are the same modules in both
16 ranks and fewer: bytes sent in a step on each axis, all ranks together, next to the chapters' formulas

First both sides of a comparison make five steps from the same weights on the same batches, and their losses
and norms must agree; every byte must be predicted. Only then is anything timed, in pairs. A ratio above 1
means that the trainer is faster. A CPU compares the work that is done, and says nothing about a GPU.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import math
from collections.abc import Callable
from typing import Any

import paths  # noqa: F401  finds the chapters below
import metrics
import step as one_rank
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
from data import Sampler
from full_state import full_state
from harness.figures import write_figure
from harness.ranks import run_ranks
from harness.report import Ratio, paired, write_result
from llama import IGNORE
from model import Stage
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from training_step import adamw

STEPS, LR, CLIP = 5, 3e-3, 1.0
OPTIONS = ["--device", "cpu", "--seq-len", "128", "--global-batch", "32", "--micro-batch", "8", "--lr", str(LR)]
LAYOUTS = [  # ranks, options: the last two are those of `make train-3d` and `make train-5d`
    (4, "--zero 1"),
    (4, "--zero 3"),
    (4, "--tp 2 --zero 2"),
    (4, "--tp 2 --sequence-parallel --zero 2"),
    (4, "--cp 4 --cp-kind zigzag"),
    (4, "--cp 4 --cp-kind ulysses"),
    (4, "--pp 4 --schedule 1f1b"),
    (4, "--experts 4 --ep 4"),
    (8, "--pp 2 --tp 2 --experts 4 --ep 2"),
    (16, "--pp 2 --cp 2 --tp 2 --sequence-parallel --experts 4 --ep 2 --zero 1"),
]


def prepared(options: str = "") -> tuple[one_rank.Trainer, list[list[one_rank.Batch]]]:
    """This rank's trainer with the preset tiny, and its batches of some steps."""
    plan = train.prepare([*OPTIONS, *options.split()], dist.get_world_size())
    me = one_rank.make_trainer(plan.config, plan.model, plan.device)
    sampler, dp = Sampler(plan.corpus.train, plan.config.seq_len, 256, 0), me.mesh.sizes["dp"]
    many = plan.config.accumulation(dp)
    return me, [sampler.step(plan.config.micro_batch, many, me.mesh.place["dp"], dp) for _ in range(STEPS)]


def check(step: int, ours: tuple[float, float], theirs: tuple[float, float], whom: str) -> None:
    for what, mine, other in zip(("loss", "gradient norm"), ours, theirs, strict=True):
        if not abs(mine - other) <= 2e-5 * abs(other):
            raise SystemExit(f"{what} of step {step + 1}: {mine:.6f}, but {whom} has {other:.6f}")


def verify(me: one_rank.Trainer, batches: list, their_step: Any, whom: str) -> None:
    """Compare five steps of both sides."""
    for parameters in (group for owner in me.owners for group in owner.param_groups):
        parameters["lr"] = LR
    for step, batch in enumerate(batches):
        check(step, one_rank.train_step(me, batch), their_step(batch), whom)


def compare(me: one_rank.Trainer, batches: list, their_step: Any, whom: str, repeats: int) -> Ratio:
    """Verify five steps, then time pairs of one."""
    verify(me, batches, their_step, whom)
    ours = lambda: one_rank.train_step(me, batches[0])  # noqa: E731
    return paired(lambda: their_step(batches[0]), ours, repeats=repeats, warmup=1, setup=dist.barrier)


# ---------------------------------------------------------------------------------------------------------- one rank


def transformers_step(me: one_rank.Trainer) -> Callable[[list], tuple[float, float]]:
    """A step of transformers' Llama with the weights of `me`."""
    import transformers

    sizes = me.model.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            rms_norm_eps=sizes.norm_eps,
            rope_theta=sizes.rope_theta,
            use_cache=False,
        )
    )
    theirs.load_state_dict(full_state(me.owners, me.model, me.mesh)["weights"])
    optimizer = adamw(theirs, LR)  # torch's AdamW in both, in its fused version

    def step(batch: list) -> tuple[float, float]:
        optimizer.zero_grad()
        valid = sum(int((labels != IGNORE).sum()) for _, labels in batch)
        total = 0.0
        for tokens, labels in batch:
            logits = theirs(tokens).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum") / valid
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)
        optimizer.step()
        return total, norm.item()

    return step


def beside_transformers(repeats: int) -> Ratio:
    me, batches = prepared()
    return compare(me, batches, transformers_step(me), "transformers", repeats)


# --------------------------------------------------------------------------------------------------------- four ranks


def torch_step(me: one_rank.Trainer, options: str) -> Callable[[list], tuple[float, float]]:
    """A step of DDP around the stages of torch.distributed.pipelining, on `me`'s groups and with its weights."""
    other, _ = prepared(options)  # for its weights and stages; its owners of gradients are not used
    model, mesh, pp = other.model, me.mesh, me.mesh.place["pp"]
    half, many = model.config.layers // 2, me.config.accumulation(me.mesh.sizes["dp"])
    module: Any = Stage(model, range(half * pp, half * (pp + 1)), other.positions)
    dp, dp_group, pp_group = mesh.sizes["dp"], mesh.groups["data"], mesh.groups["pp"]
    wrapped = DistributedDataParallel(module, process_group=dp_group, gradient_as_bucket_view=True)
    optimizer = adamw(module, LR)
    divisor = [1.0]

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return dp * total / divisor[0]  # DDP averages over its ranks, and a sum is needed

    stage = PipelineStage(wrapped, pp, 2, torch.device("cpu"), group=pp_group)
    schedule = Schedule1F1B(stage, many, loss_of, scale_grads=False)

    def step(batch: list) -> tuple[float, float]:
        optimizer.zero_grad()
        tokens, labels = (torch.cat(both) for both in zip(*batch, strict=True))
        valid = (labels != IGNORE).sum()
        dist.all_reduce(valid, group=dp_group)
        divisor[0] = valid.item()
        losses: list[torch.Tensor] = []
        # The stage tells DDP when the last backward runs. Without no_sync, DDP also prepares its reducer in
        # every forward, and fails when micro-batches overlap.
        with wrapped.no_sync():
            if pp == 0:
                schedule.step(tokens, return_outputs=False)
            else:
                schedule.step(target=labels, losses=losses, return_outputs=False)
        total = torch.tensor([sum(loss.item() for loss in losses) / dp, 0.0], dtype=torch.float64)
        total[1] = nn.utils.get_total_norm([p.grad for p in module.parameters()]) ** 2 / dp
        dist.all_reduce(total, group=mesh.groups["replica"])
        norm = math.sqrt(total[1])
        for p in module.parameters():
            p.grad.mul_(min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        return total[0].item(), norm

    return step


def beside_torch(repeats: int) -> Ratio:
    options = "--pp 2 --schedule 1f1b"
    me, batches = prepared(options)
    return compare(me, batches, torch_step(me, options), "DDP with torch's pipelining", repeats)


# -------------------------------------------------------------------------------------------------------------- bytes


def sent_in_a_step(layout: str) -> dict[str, list[float]]:
    me, batches = prepared(layout)
    meter = metrics.Watch(me, Path(), first=0)
    with meter.step(0):
        one_rank.train_step(me, batches[0])
    return meter.ranks[dist.get_rank()]["sent"]


def bytes_rows() -> list[list[Any]]:
    rows: list[list[Any]] = []
    for ranks, layout in LAYOUTS:
        everyone = run_ranks(ranks, sent_in_a_step, layout, timeout=300)
        for rank, sent in enumerate(everyone):
            for axis, (got, want) in sent.items():
                if not math.isclose(got, want, rel_tol=1e-12):
                    raise SystemExit(f"{layout}: rank {rank} sends {got:,.0f} bytes on {axis}; by formula {want:,.0f}")
        axes = {axis: [0.0, 0.0] for sent in everyone for axis in sent}
        for sent in everyone:
            for axis, pair in sent.items():
                axes[axis] = [total + value for total, value in zip(axes[axis], pair, strict=True)]
        small = ("batch", "replica", "world", "tokens", "all tokens")  # counts, losses and norms
        numbers = [sum(axes[axis][i] for axis in small if axis in axes) for i in range(2)]
        shown = {axis: pair for axis, pair in axes.items() if axis not in small and pair[0]}
        shown |= {"counts, losses, norms": numbers}
        shown |= {"all": [sum(pair[i] for pair in axes.values()) for i in range(2)]}
        for axis, (got, want) in shown.items():
            rows.append([ranks, f"`{layout}`", axis, f"{got:,.0f}", f"{want:,.0f}"])
    return rows


def draw(axes: Any, result: dict[str, Any]) -> None:
    """One bar per layout, stacked by axis."""
    layouts = list(dict.fromkeys(row[1] for row in result["rows"]))
    kinds = list(dict.fromkeys(row[2] for row in result["rows"] if row[2] not in ("all", "counts, losses, norms")))
    left = [0.0] * len(layouts)
    names = [layout.strip("`") for layout in layouts]
    for kind in kinds:
        sizes = [
            sum(float(row[3].replace(",", "")) for row in result["rows"] if (row[1], row[2]) == (layout, kind)) / 1e6
            for layout in layouts
        ]
        axes.barh(names, sizes, left=left, label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("MB sent in a step, all ranks together")
    axes.legend()
    axes.tick_params(axis="y", labelsize=6)


def measure_bytes() -> None:
    write_result(
        "11_bytes",
        "Bytes that all ranks together send in a step, by axis, and the sum of the chapters' formulas",
        ["ranks", "layout", "axis", "measured", "by formula"],
        bytes_rows(),
        "Preset tiny, 32 samples of 128 tokens in a step, fp32. Equal on each rank by itself: else the benchmark ends "
        "with the number that is off.",
    )


def measure_speed() -> None:
    one = run_ranks(1, beside_transformers, 9, timeout=300)[0]
    four = run_ranks(4, beside_torch, 9, timeout=300)[0]
    write_result(
        "11_speed",
        "Tokens per second of the trainer, divided by those of another program that trains the same model",
        ["ranks", "layout", "beside", "tokens/s of the trainer / of the other"],
        [
            [1, "1 rank", "transformers' Llama, torch's AdamW", one],
            [4, "dp 2 x pp 2, 1F1B", "torch's DDP and torch.distributed.pipelining, AdamW", four],
        ],
        "Preset tiny, 32 samples of 128 tokens in a step, fp32. A step is zero_grad, all micro-batches, the norm over "
        "all ranks, clipping and AdamW. Losses and norms of five steps were compared first. Medians of pairs, and "
        "quartiles.",
    )


def main() -> None:
    if "--figures" not in sys.argv:
        measure_bytes()
        measure_speed()
    write_figure("11_5d_trainer/figures/bytes.svg", ["11_bytes"], draw, size=(8, 4))


if __name__ == "__main__":
    main()
