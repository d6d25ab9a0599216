"""Any layout trains as one rank does: random layouts, a few that cover all (layouts.py), and ranks that die.

Each technique works by itself; its chapter has shown that. The remaining mistakes are between two or three of
them: a gradient that the tensor group has already summed and the pipeline sums again, or a ZeRO shard that is
made before the experts are split.

A layout passes if three plain SGD steps give the loss, every gradient and the weights of one process on the same
global batch, to 1e-10 in float64. In that batch some tokens have no label, different ones for each sample, and
some samples have none at all: ranks and micro-batches have unequal numbers of valid tokens, down to none.

    python 11_5d_trainer/tests/fuzz.py                 100 random layouts; stops at the first that differs
    python 11_5d_trainer/tests/fuzz.py --runs 20 --seed 7
    python 11_5d_trainer/tests/fuzz.py --ranks 4 --layout "--tp 2 --pp 2 --schedule zb-h1"      this layout
    python 11_5d_trainer/tests/fuzz.py --table         the covering set, and layouts on 16 ranks; writes results/
    python 11_5d_trainer/tests/fuzz.py --kills 20      a rank dies at a random step, and the run is started again

The last line is PASS, or the process ends with 1; after a random layout with the command that repeats it.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import random
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import paths  # noqa: F401  finds the chapters below
import checkpoint
import step as step_module
import torch
import torch.distributed as dist
import train
from data import Sampler, load_corpus
from full_state import full_state
from harness.ranks import RankFailure, run_ranks
from harness.reference import Trace, assert_same, assert_same_trace, sgd_trace
from harness.report import write_result
from layouts import AXES, FULL, SIZES, Layout, Refusals, covering, options, random_layouts, whole_gradients
from llama import LlamaConfig
from mesh import Mesh
from model import alone, state_buffers
from moe_layer import moe_layers, set_loss_scale, update_biases
from moe_llama import gather_experts
from options import Config, OneLineParser, parse
from training_step import accumulate


def write_text(folder: Path) -> str:
    """A file to train on: small, so that every rank reads it at once."""
    file = folder / "numbers.txt"
    file.write_text("\n".join(f"{i} times {i} is {i * i}, and {i} plus {i} is {i + i}." for i in range(2000)))
    return str(file)


# ------------------------------------------------------------------------------------------------ one layout, one rank


def batches(config: Config, corpus: Any, micro_batch: int, place: int, dp: int) -> list[list[step_module.Batch]]:
    """The micro-batches of data-parallel rank `place` in three steps. The valid labels depend only on the
    sample, so the global batch is the same in every layout."""
    sampler = Sampler(corpus.train, config.seq_len, corpus.vocab_size, config.seed)
    count = config.global_batch // micro_batch // dp
    steps = [sampler.step(micro_batch, count, place, dp) for _ in range(3)]

    def thinned(tokens: torch.Tensor, labels: torch.Tensor) -> step_module.Batch:
        first = tokens[:, :1]
        return tokens, labels.masked_fill((tokens % (3 + first % 4) == 0) | (first % 9 == 0), -100)

    return [[thinned(*batch) for batch in step] for step in steps]


def made(words: list[str], sizes: LlamaConfig, *optimizer: Any) -> tuple[Any, Callable[[], list[step_module.Batch]]]:
    """This rank of a layout before the first step, and what gives the batches of the next step at each call."""
    config = Config(**parse(words))
    config.check_layout(sizes, dist.get_world_size())
    sizes = dataclasses.replace(sizes, tied=config.tied)
    me = step_module.make_trainer(config, sizes, torch.device("cpu"), *optimizer)
    sampler = Sampler(load_corpus(config).train, config.seq_len, sizes.vocab_size, config.seed)
    place, dp = me.mesh.place["dp"], me.mesh.sizes["dp"]
    return me, lambda: sampler.step(config.micro_batch, config.accumulation(dp), place, dp)


def in_layout(words: list[str], sizes: LlamaConfig) -> Trace:
    """Three SGD steps by the trainer's own step, on all ranks. Every rank returns the full model's values."""
    me, _ = made(words, sizes, plain_sgd)
    config = me.config
    trace = Trace()
    for step in batches(config, load_corpus(config), config.micro_batch, me.mesh.place["dp"], me.mesh.sizes["dp"]):
        loss, norm = step_module.train_step(me, step)
        trace.losses.append(loss)
        trace.gradients.append(whole_gradients(me))
        whole = torch.cat([g.flatten() for g in trace.gradients[-1].values() if g is not None])
        assert_same(norm, whole.norm(), what="norm of the gradient", rank=dist.get_rank())
    trace.weights = full_state(me.owners, me.model, me.mesh)["weights"]
    leave(me.mesh)
    return trace


def plain_sgd(model: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 0.0}], lr=0.1)


def leave(mesh: Mesh) -> None:
    """Close the groups of a mesh when every rank is done with it: the next layout makes others."""
    dist.barrier()
    for group in {id(group): group for group in mesh.groups.values()}.values():
        dist.destroy_process_group(group)


@functools.cache
def in_one_process(words: tuple[str, ...], sizes: LlamaConfig, micro_batches: int) -> Trace:
    """The same three steps of the full model, without a process group. The number of micro-batches matters
    only to experts, which are balanced within one."""
    config = Config(**parse(list(words)))
    corpus = load_corpus(config)
    model = alone(sizes, config.mixture(sizes)).double()
    steps = batches(config, corpus, config.global_batch // micro_batches, 0, 1)

    def backward(step: int) -> float:
        set_loss_scale(model, 1 / micro_batches)
        loss = accumulate(model, steps[step]).item()
        if moe_layers(model):
            update_biases(model, None)
        return loss

    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    trace = sgd_trace({name: p for name, p in model.named_parameters() if p.requires_grad}, backward)
    trace.gradients = [gather_experts(model, gradients, None) for gradients in trace.gradients]
    trace.weights = gather_experts(model, trace.weights | frozen | state_buffers(model), None)
    return trace


ABOUT_THE_MODEL = (
    "data",
    "seq_len",
    "global_batch",
    "precision",
    "balance",
    "experts",
    "top_k",
    "capacity",
    "router",
    "bias_speed",
)


def reference(words: list[str], ranks: int, sizes: LlamaConfig = SIZES) -> Trace:
    """The expected result of `in_layout`."""
    config = Config(**parse(words))
    sizes = dataclasses.replace(sizes, tied=config.tied)
    kept = [w for name in ABOUT_THE_MODEL for w in (f"--{name.replace('_', '-')}", str(getattr(config, name)))]
    return in_one_process(tuple(kept), sizes, config.accumulation(config.dp(ranks)))


def compare_on_ranks(layouts: list[list[str]], wants: list[Trace], sizes: LlamaConfig, show: bool) -> None:
    """Every layout on the ranks of this world, one after the other, each compared with one process."""
    for words, want in zip(layouts, wants, strict=True):
        try:
            assert_same_trace(in_layout(words, sizes), want, rank=dist.get_rank())
        except Exception as error:
            error.add_note(f"in the layout: {shlex.join(words)}")
            raise
        if show and dist.get_rank() == 0:
            layout = shlex.join(words[words.index("--timeout") + 2 :])
            print(f"  same  {dist.get_world_size():2} ranks  {layout}", flush=True)


def verify(layouts: Iterable[Layout], data: str, sizes: LlamaConfig = SIZES, show: bool = False) -> int:
    """How many layouts equal one process: all, or RankFailure. Those on equally many ranks share processes."""
    done = 0
    for ranks, some in itertools.groupby(sorted(layouts, key=lambda one: one.ranks), key=lambda one: one.ranks):
        words = [options(data, one.words) for one in some]
        wants = [reference(line, ranks, sizes) for line in words]
        for at in range(0, len(words), 25):  # fresh processes now and then
            now = slice(at, at + 25)
            run_ranks(ranks, compare_on_ranks, words[now], wants[now], sizes, show, timeout=120 + 30 * 25)
        done += len(words)
    return done


def write_tables(layouts: list[Layout], impossible: Refusals) -> None:
    """The tested combinations, and what is refused, for the README."""
    columns = ["ranks", "dp", "tp", "cp", "pp, schedule", "experts, ep", "ZeRO", "recompute"]
    rows = []
    for one in layouts:
        config = Config(**parse(one.words.split()))
        sp = " + sequence" if config.sequence_parallel else ""
        kind = f" {config.cp_kind}" + (f", {config.fpdt_chunks} chunks" if config.fpdt_chunks else "")
        experts = f"{config.experts}, ep {config.ep}" + (" sigmoid, bias" if config.router == "sigmoid" else "")
        rows.append(
            [
                one.ranks,
                config.dp(one.ranks),
                f"{config.tp}{sp}" if config.tp > 1 else "",
                f"{config.cp}{kind}" if config.cp > 1 else "",
                f"{config.pp}, {config.schedule}" if config.pp > 1 else "",
                experts if config.experts else "",
                config.zero,
                config.recompute if config.recompute != "none" else "",
            ]
        )
    rows.sort(key=lambda row: (row[0], [str(cell) for cell in row]))
    notes = (
        f"Each of these {len(rows)} layouts gave the loss, every gradient and the weights of one process after three "
        "SGD steps, to 1e-10 in float64. Every two options that may be combined meet in one of them, and every three "
        "kinds of option."
    )
    write_result("11_together", "Layouts tested against one process", columns, rows, notes)
    axes = list(AXES)
    refusals = {
        " with ".join(f"{axes[axis]} ({what})" for axis, what in sorted(one)): why for one, why in impossible.items()
    }
    write_result(
        "11_refused", "Refused", ["together", "what the trainer says"], [list(one) for one in refusals.items()]
    )


# ------------------------------------------------------------------------------------------------ ranks that die

ENDS = ("before a step", "in backward", "while a checkpoint is written")


@contextlib.contextmanager
def before_each_step(look: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `look(number of the step, this rank)` before each step of a run."""
    plain, numbers = train.train_step, itertools.count(1)

    def watched(me: Any, *args: Any) -> Any:
        look(next(numbers), me)
        return plain(me, *args)

    with mock.patch.object(train, "train_step", watched):
        yield


def doomed(words: list[str], who: int, step: int, how: str) -> None:
    """Train, but kill rank `who` at `step`, as the out-of-memory killer of an operating system does."""
    save, reached = checkpoint.Saver.save, [0]

    def die(*_: Any) -> Any:
        if dist.get_rank() == who and reached[0] >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    def look(number: int, me: Any) -> None:
        reached[0] = number
        if how == "before a step":
            die()
        if how == "in backward" and number == 1:
            next(me.model.parameters()).register_hook(die)

    def saved(self: Any, *args: Any) -> None:
        save(self, *args)
        if how == "while a checkpoint is written":
            die()

    with before_each_step(look), mock.patch.object(checkpoint.Saver, "save", saved):
        run(words)


def poisoned(rank: int, step: int, hook: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """In this step, and where it is repeated, a rank's model has a hook, which makes NaN in the backward pass."""
    hooks: list[Any] = []

    def look(number: int, me: Any) -> None:
        while hooks:
            hooks.pop().remove()
        if number == step and dist.get_rank() == rank:
            hooks.append(hook(me.model))

    return before_each_step(look)


def run(words: list[str], sizes: LlamaConfig = SIZES) -> list[train.Log]:
    """Train as the command does, with a smaller model and without output; returns the log."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run_aloud(words, sizes)


def run_aloud(words: list[str], sizes: LlamaConfig) -> list[train.Log]:
    plan = train.prepare(words, dist.get_world_size())
    plan, folder = train.agree(dataclasses.replace(plan, model=dataclasses.replace(sizes, tied=plan.config.tied)))
    return train.train(plan, folder)


def losses(log: list[train.Log]) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in log if "loss" in line}


def kill_and_go_on(seed: int, data: str, folder: Path, undisturbed: dict[int, tuple[float, float]]) -> str:
    """Kill one rank of two at a random step and start the same command again, which must end with the losses
    of the undisturbed run, bit by bit. Returns what was done."""
    draw = random.Random(seed)
    who = draw.randrange(2)
    step = draw.randint(1, 12)
    how = ENDS[seed % len(ENDS)]
    words = [*kill_options(data), "--out", str(folder), "--restart"]
    what = f"rank {who} dies {how}, step {step}"
    try:
        run_ranks(2, doomed, words, who, step, how)
    except RankFailure as failure:
        if failure.kind != "killed" or failure.ranks != [who]:
            raise
    else:
        raise AssertionError(f"{what}: the job did not notice")
    left = [path.name for path in checkpoint.complete(folder)]
    again = losses(run_ranks(2, run, words)[0])
    if again != undisturbed:
        step = next(step for step in undisturbed if again.get(step) != undisturbed[step])
        raise AssertionError(f"{what}: step {step} is {again.get(step)} afterwards, without it {undisturbed[step]}")
    on_disk = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert losses(on_disk) == undisturbed, f"{what}: the log on disk is not that of the undisturbed run"
    return f"{what}; went on from {left[-1] if left else 'the beginning'}"


def kill_options(data: str) -> list[str]:
    return options(data, "--zero 1", steps=12, clip=1, save_every=3, timeout=20)


# ------------------------------------------------------------------------------------------------ the command


def arguments() -> argparse.Namespace:
    parser = OneLineParser("fuzz.py", description="Compare layouts of the trainer with one process.")
    parser.add_argument("--runs", type=int, default=100, help="random layouts")
    parser.add_argument("--seed", type=int, default=0, help="of the random layouts or kills")
    parser.add_argument("--most", type=int, default=8, help="ranks of a random layout")
    parser.add_argument("--layout", help="compare this one")
    parser.add_argument("--ranks", type=int, default=1, help="on so many ranks")
    parser.add_argument("--table", action="store_true", help="the covering set; writes results/")
    parser.add_argument("--kills", type=int, default=0, help="so many runs in which a rank dies")
    args = parser.parse_args()
    for name in ("runs", "most", "ranks"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.layout is not None and (reason := Layout(args.ranks, args.layout).refusal()):
        parser.error(f"--layout is refused: {reason}")
    return args


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        data = write_text(Path(temporary))
        work: Callable[[], str] = functools.partial(fuzz, args, data, Path(temporary))
        try:
            print(work())
        except (RankFailure, AssertionError) as failure:
            print(failure, file=sys.stderr)
            return 1
    print("PASS")
    return 0


def fuzz(args: argparse.Namespace, data: str, folder: Path) -> str:
    if args.layout is not None:
        verify([Layout(args.ranks, args.layout)], data, show=True)
        return "the same as one process"
    if args.table:
        layouts, impossible = covering()
        layouts += [Layout(16, f"--micro-batch 1 {words}") for words in FULL]
        print(f"{len(layouts)} layouts")
        verify(layouts, data, show=True)
        write_tables(layouts, impossible)
        return f"{len(layouts)} layouts, all the same as one process"
    if args.kills:
        undisturbed = losses(run_ranks(2, run, [*kill_options(data), "--out", str(folder / "undisturbed")])[0])
        for seed in range(args.seed, args.seed + args.kills):
            print(f"  seed {seed}: {kill_and_go_on(seed, data, folder / str(seed), undisturbed)}", flush=True)
        return f"{args.kills} deaths, and each time the losses of the undisturbed run"
    for number, layout in enumerate(itertools.islice(random_layouts(args.seed, args.most), args.runs)):
        print(f"{number:4}  {layout.ranks} ranks  {layout.words}", flush=True)
        try:
            verify([layout], data)
        except RankFailure:
            print(f"again: python 11_5d_trainer/tests/fuzz.py --ranks {layout.ranks} --layout '{layout.words}'")
            raise
    return f"{args.runs} random layouts, all the same as one process"


if __name__ == "__main__":
    sys.exit(main())
