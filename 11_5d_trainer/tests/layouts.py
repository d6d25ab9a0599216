"""Layouts to test: random ones, and a small set that covers all combinations.

Seven choices decide what each rank holds and which ranks communicate: data, tensor, context and pipeline
parallel, experts, ZeRO, recomputation. The options in `AXES` combine in 26,208 ways, too many to test. But a
mistake between two techniques shows wherever both are used. So `covering` finds few layouts in which

    every two options occur together             ring attention, zigzag, with schedule zb-v
    every three kinds of option do               any ring, any schedule that splits the backward, with ZeRO 2

and lists those that cannot, with the trainer's reason. fuzz.py compares the layouts with one process.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import paths  # noqa: F401  finds the chapters below
import torch.distributed as dist
from llama import LlamaConfig
from model import join_pieces
from moe_llama import gather_experts
from options import Config, UsageError, parse

SIZES = LlamaConfig(hidden=16, layers=4, heads=4, kv_heads=2, intermediate=24, rope_scaling=(2.0, 1.0, 4.0, 64))
FULL = [  # every axis above 1, on 16 ranks
    "--pp 2 --schedule 1f1b --cp 2 --cp-kind zigzag --tp 2 --sequence-parallel --experts 4 --ep 2 --zero 2",
    "--pp 2 --schedule zb-h1 --cp 2 --cp-kind ulysses --tp 2 --zero 1 --recompute full",
    "--pp 2 --schedule dualpipe --cp 2 --cp-kind ring --tp 2 --sequence-parallel --experts 4 --ep 4 --zero 1",
    "--pp 2 --schedule interleaved --stages-per-rank 2 --cp 4 --cp-kind usp --tp 2 --tied",
]


def options(data: str, layout: str, **changes: Any) -> list[str]:
    """The command line of a small run: samples of 16 tokens, 8 in a step, in float64."""
    words: dict[str, Any] = dict(data=data, seq_len=16, steps=20, warmup=2, global_batch=8, micro_batch=2)
    words |= dict(precision="fp64", clip=0, balance=0.1, sample=0, eval_every=0, eval_samples=8, device="cpu")
    words |= dict(timeout=120) | changes
    return [w for name, value in words.items() for w in (f"--{name.replace('_', '-')}", str(value))] + layout.split()


def whole_gradients(me: Any) -> dict[str, Any]:
    """Every gradient of the full model after a step, on every rank, in host memory. Collective."""
    own = {name: gradient for owner in me.owners for name, gradient in owner.full_gradients().items()}
    joined = {name: join_pieces(me.model, name, gradient, me.mesh) for name, gradient in own.items()}
    stages: list[Any] = [None] * me.mesh.size("pp")
    mine = {name: gradient.cpu() for name, gradient in gather_experts(me.model, joined, me.mesh.groups["ep"]).items()}
    dist.all_gather_object(stages, mine, group=me.mesh.groups["pp"])
    return {name: gradient for stage in stages for name, gradient in stage.items()}


@dataclasses.dataclass(frozen=True)
class Layout:
    ranks: int
    words: str

    def refusal(self, sizes: LlamaConfig = SIZES) -> str:
        """Why the trainer refuses it; empty if it does not."""
        try:
            config = Config(**parse(options("", self.words)))
            config.check()
            config.check_layout(sizes, self.ranks)
        except UsageError as error:
            return str(error)
        return ""


# ---------------------------------------------------------------------------------------- random layouts


def random_layouts(seed: int, most: int = 8, sizes: LlamaConfig = SIZES) -> Iterator[Layout]:
    """An endless iterator of layouts that the trainer accepts, with sizes that the covering set leaves out:
    four tensor ranks, four stages, three data-parallel ranks, one micro-batch or eight."""
    draw = random.Random(seed)
    while True:
        tp, cp, pp, dp = (draw.choice(sizes) for sizes in ((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4), (1, 2, 2, 3, 4)))
        ranks = tp * cp * pp * dp
        if ranks > most:
            continue
        words = [f"--micro-batch {draw.choice((1, 2, 4))}", f"--zero {draw.choice((0, 0, 1, 2, 3))}"]
        words += [f"--recompute {draw.choice(('none', 'none', 'selective', 'full'))}"]
        words += ["--global-batch 12"] if dp == 3 else []
        words += [f"--tp {tp}", *["--sequence-parallel"] * draw.randrange(2)] if tp > 1 else []
        words += [f"--cp {cp} --cp-kind {draw.choice(KINDS_OF_CONTEXT)}"] if cp > 1 else []
        words += [f"--pp {pp} {draw.choice(SCHEDULES)}"] if pp > 1 else []
        words += [f"--fpdt-chunks {draw.choice((2, 4))}"] if draw.random() < 0.1 else []
        words += ["--tied"] if draw.random() < 0.3 else []
        if draw.random() < 0.4:
            words += [f"--experts {draw.choice((4, 8))} --ep {draw.choice((1, 2, 4))} --top-k {draw.choice((1, 2))}"]
            words += ["--router sigmoid --bias-speed 0.01"] if draw.random() < 0.4 else []
        words += [f"--bucket-mib {draw.choice((0.001, 0.01, 25))}"]
        layout = Layout(ranks, " ".join(words))
        if not layout.refusal(sizes):
            yield layout


# ---------------------------------------------------------------------------------------- the covering set

KINDS_OF_CONTEXT = ("allgather", "ring", "zigzag", "ulysses", "usp")
WHOLE = ["naive", "afab", "1f1b", "interleaved", "breadth-first", "llama3"]
SPLIT = ["zb-h1", "zb-h2", "zb-v", "auto"]
BOTH_WAYS = ["dualpipe", "dualpipe-v"]
TWO_STAGES = ("interleaved", "breadth-first", "llama3", "zb-v", "dualpipe-v")
SCHEDULES = [
    f"--schedule {name}" + " --stages-per-rank 2" * (name in TWO_STAGES) for name in [*WHOLE, *SPLIT, *BOTH_WAYS]
]

# Axis -> kind -> the options of this kind. "" is the default of the axis.
AXES: dict[str, dict[str, list[str]]] = {
    "data": {"": [""], "dp": ["dp 2"]},
    "tensor": {"": [""], "tp": ["--tp 2"], "tp+sp": ["--tp 2 --sequence-parallel"]},
    "context": {
        "": [""],
        "ring": [f"--cp 2 --cp-kind {kind}" for kind in ("allgather", "ring", "zigzag")],
        "all-to-all": ["--cp 2 --cp-kind ulysses", "--cp 4 --cp-kind usp"],
        "fpdt": ["--cp 2 --cp-kind ulysses --fpdt-chunks 2"],
    },
    "pipeline": {
        "": [""],
        "whole backward": [f"--pp 2 {words}" for words in SCHEDULES[:6]],
        "split backward": [f"--pp 2 {words}" for words in SCHEDULES[6:10]],
        "both ways": [f"--pp 2 {words}" for words in SCHEDULES[10:]],
    },
    "experts": {
        "": [""],
        "experts": [
            "--experts 4",
            "--experts 4 --ep 2",
            "--experts 4 --ep 2 --router sigmoid --bias-speed 0.01",
        ],
    },
    "zero": {"": [""], **{f"zero {stage}": [f"--zero {stage}"] for stage in (1, 2, 3)}},
    "recompute": {"": [""], "selective": ["--recompute selective"], "full": ["--recompute full"]},
}
Choice = tuple[str, ...]  # for each axis in turn, an option (or a kind)
Meeting = frozenset[tuple[int, str]]  # some axes, and their options
Refusals = dict[Meeting, str]

LEVELS = [[option for kind in kinds.values() for option in kind] for kinds in AXES.values()]
KIND = [{option: name for name, kind in kinds.items() for option in kind} for kinds in AXES.values()]


def layout_of(choice: Choice) -> Layout:
    """The layout with these options, always with 4 micro-batches per rank, which every schedule accepts."""
    words = " ".join(option for option in choice if option and not option.startswith("dp"))
    dp, tp, pp = (2 if choice[axis] else 1 for axis in (0, 1, 3))
    cp = int(choice[2].split()[1]) if choice[2] else 1
    return Layout(dp * tp * cp * pp, f"--micro-batch {2 // dp} {words}".strip())


@functools.cache
def refused(choice: Choice) -> str:
    return layout_of(choice).refusal()


def meetings(choice: Choice, pairs: bool, triples: bool) -> set[Meeting]:
    """The pairs of options and the triples of kinds (pairs without `pairs`) that a layout has."""
    kinds = tuple(KIND[axis][option] for axis, option in enumerate(choice))
    found: set[Meeting] = set()
    for what, number in ((choice if pairs else kinds, 2), *([(kinds, 3)] if triples else [])):
        found |= {frozenset(some) for some in itertools.combinations(enumerate(what), number)}
    return found


def smallest(meeting: Meeting) -> Iterator[Choice]:
    """Layouts with this combination and nothing else; with and without a second data- or context-parallel
    rank, which experts may need. If all are refused, so is every layout that contains the combination."""
    fixed = dict(meeting)
    ways: list[Iterable[str]] = []
    for axis, kinds in enumerate(AXES.values()):
        at = fixed.get(axis)
        alone = {0: LEVELS[0], 2: LEVELS[2][:2]}.get(axis, [""])
        ways.append(alone if at is None else kinds.get(at, [at]))
    return itertools.product(*ways)


def all_meetings(pairs: bool, triples: bool) -> list[Meeting]:
    """All combinations that some layout must have."""
    kinds = [list(kind) for kind in AXES.values()]
    found = []
    for what, number in ((LEVELS if pairs else kinds, 2), *([(kinds, 3)] if triples else [])):
        for axes in itertools.combinations(range(len(AXES)), number):
            found += [
                frozenset(zip(axes, some, strict=True)) for some in itertools.product(*(what[axis] for axis in axes))
            ]
    return found


def covering(pairs: bool = True, triples: bool = True, most: int = 8, seed: int = 0) -> tuple[list[Layout], Refusals]:
    """Few layouts with all possible combinations, and the impossible ones, with the trainer's reason.

    Greedy, after AETG (Cohen et al. 1997): several times take a combination that is missing, choose the other
    options axis by axis so that they add the most new combinations, and keep the best of these layouts.
    """
    draw = random.Random(seed)
    impossible: Refusals = {}
    missing: dict[Meeting, None] = {}
    wanted = dict.fromkeys(all_meetings(pairs, triples))
    for meeting in [*all_meetings(False, False), *wanted]:  # two kinds first
        if any(smaller <= meeting | kinds_of(meeting) for smaller in impossible):
            continue  # a pair is impossible, so the triple is
        tries = [choice for choice in smallest(meeting) if layout_of(choice).ranks <= most]
        reasons = [refused(choice) for choice in tries]
        if tries and all(reasons):
            impossible[meeting] = reasons[-1]
        elif tries and meeting in wanted:
            missing[meeting] = None
    chosen: list[Layout] = []
    while missing:
        first = next(iter(missing))
        candidates = [extend(first, missing, impossible, draw, pairs, triples) for _ in range(20)]
        candidates = [c for c in candidates if layout_of(c).ranks <= most and not refused(c)]
        candidates = candidates or [c for c in smallest(first) if layout_of(c).ranks <= most and not refused(c)]
        best = max(candidates, key=lambda choice: len(meetings(choice, pairs, triples) & missing.keys()))
        chosen.append(layout_of(best))
        for meeting in meetings(best, pairs, triples):
            missing.pop(meeting, None)
    return chosen, impossible


def kinds_of(meeting: Meeting) -> Meeting:
    return frozenset((axis, KIND[axis].get(what, what)) for axis, what in meeting)


def extend(
    first: Meeting, missing: dict[Meeting, None], impossible: Refusals, draw: random.Random, pairs: bool, triples: bool
) -> Choice:
    """A layout with `first`, whose other axes are chosen one by one, each for the most new combinations with
    those chosen before it and for no impossible one."""
    fixed: dict[int, str] = {}
    for axis, what in first:
        fixed[axis] = what if what in LEVELS[axis] else draw.choice(list(AXES.values())[axis][what])

    def new(axis: int, option: str) -> int:
        kinds = {(a, KIND[a][o]) for a, o in fixed.items()}
        here = set(fixed.items()) if pairs else kinds
        me = (axis, option)
        my_kind = (axis, KIND[axis][option])
        if any(bad <= kinds | set(fixed.items()) | {me, my_kind} for bad in impossible if me in bad or my_kind in bad):
            return -1
        found = sum(frozenset((other, me if pairs else my_kind)) in missing for other in here)
        if triples:
            found += sum(frozenset((*two, my_kind)) in missing for two in itertools.combinations(kinds, 2))
        return found

    rest = [axis for axis in range(len(AXES)) if axis not in fixed]
    for axis in draw.sample(rest, len(rest)):
        options = draw.sample(LEVELS[axis], len(LEVELS[axis]))
        fixed[axis] = max(options, key=lambda option: new(axis, option))
    return tuple(fixed[axis] for axis in range(len(AXES)))
