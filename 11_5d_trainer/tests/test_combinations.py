"""Techniques together: what may be combined trains as one rank does, and any layout goes on where another one stopped.

The layouts come from layouts.py; `make fuzz` tries many more of them than there is time for here.
"""

import dataclasses
import itertools
import shutil
import traceback
from pathlib import Path

import paths  # noqa: F401  finds the chapters below
import fuzz
import pytest
import torch
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same
from layouts import AXES, BOTH_WAYS, FULL, SIZES, SPLIT, WHOLE, Layout, covering, options, random_layouts
from options import Config, parse

# ----------------------------------------------------------------------------- losses, gradients, weights: SGD


def kinds(layout):
    """Which kind of each axis a layout has, from its options."""
    config = Config(**parse(layout.words.split()))
    context = {1: "", 2: "all-to-all" if config.cp_kind == "ulysses" else "ring", 4: "all-to-all"}[config.cp]
    schedule = next(
        kind
        for kind, names in {
            "whole backward": WHOLE,
            "split backward": SPLIT,
            "both ways": BOTH_WAYS,
        }.items()
        if config.schedule in names
    )
    return (
        "dp" if config.dp(layout.ranks) > 1 else "",
        ("tp+sp" if config.sequence_parallel else "tp") if config.tp > 1 else "",
        "fpdt" if config.fpdt_chunks else context,
        schedule if config.pp > 1 else "",
        "experts" if config.experts else "",
        f"zero {config.zero}" if config.zero else "",
        config.recompute if config.recompute != "none" else "",
    )


@pytest.mark.prove
@pytest.mark.parametrize("number", [2, 3])
def test_in_the_covering_set_all_kinds_meet_by_twos_and_by_threes_or_are_refused_with_a_reason(number):
    layouts, refused = covering(pairs=False, triples=number == 3)
    met = {frozenset(some) for one in layouts for some in itertools.combinations(enumerate(kinds(one)), number)}
    assert all(not one.refusal() and one.ranks <= 8 for one in layouts)
    for axes in itertools.combinations(enumerate(AXES.values()), number):
        for names in itertools.product(*(axis for _, axis in axes)):
            meeting = frozenset((place, name) for (place, _), name in zip(axes, names, strict=True))
            reason = next((reason for two, reason in refused.items() if two <= meeting), "")
            assert bool(reason) != (meeting in met), f"{names}: refused because {reason!r}, met: {meeting in met}"


@pytest.mark.prove
@pytest.mark.parametrize("part", range(6))
def test_every_two_kinds_of_parallelism_together_give_the_loss_gradients_and_weights_of_one_process(part, text):
    layouts, _ = covering(pairs=False, triples=False, most=8)
    assert fuzz.verify(layouts[part::6], text) == len(layouts[part::6]) < 10
    assert max(one.ranks for one in layouts) == 8


@pytest.mark.prove
def test_all_five_axes_on_sixteen_ranks_give_the_loss_gradients_and_weights_of_one_process(text):
    experts_and_dense = [Layout(16, f"--micro-batch 1 {words}") for words in FULL[:2]]
    assert fuzz.verify(experts_and_dense, text) == 2


@pytest.mark.prove
def test_six_random_layouts_give_the_loss_gradients_and_weights_of_one_process(text):
    assert fuzz.verify(itertools.islice(random_layouts(seed=2026, most=4), 6), text) == 6


def test_random_layouts_depend_on_the_seed_alone_and_have_many_numbers_of_ranks():
    first, again, other = (list(itertools.islice(random_layouts(seed), 30)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({one.ranks for one in first}) > 3


def test_a_layout_that_differs_is_named_with_its_rank_and_tensor(text):
    words = options(text, "--tp 2", micro_batch=8)
    want = fuzz.reference(words, 2)
    name = "model.layers.2.mlp.up_proj.weight"
    gradients = [one | {name: one[name] * (1 + 1e-7)} for one in want.gradients]
    wrong = dataclasses.replace(want, gradients=gradients)
    for said in run_ranks(2, said_of_a_difference, words, wrong):
        assert name in said and "on rank" in said
        assert "in the layout: " in said and "--tp 2" in said


def said_of_a_difference(words, wrong):
    try:
        fuzz.compare_on_ranks([words], [wrong], SIZES, False)
    except AssertionError as error:
        return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--rounds 3", "unrecognized arguments: --rounds 3"),
        ("--runs 0", "--runs 0 must be at least 1"),
        ("--ranks 4 --layout=--tp=3", "--layout is refused: --pp 1 x --tp 3 x --cp 1 does not divide the 4 "),
    ],
)
def test_wrong_options_of_the_fuzzer_end_in_one_line(words, line):
    assert refusal(fuzz.arguments, words).startswith(line)


# ---------------------------------------------------------------------------- saved in one layout, resumed in others

ALONE = (
    "--tp 1 --no-sequence-parallel --cp 1 --pp 1 --schedule 1f1b --stages-per-rank 1 --ep 1 --zero 0 --recompute none"
)
DENSE = [
    (1, ""),
    (2, "--zero 1"),
    (2, "--pp 2 --schedule zb-v --stages-per-rank 2"),
    (2, "--fpdt-chunks 4"),
    (2, "--cp 2 --cp-kind ulysses --fpdt-chunks 2"),
    (2, "--tp 2"),
    (4, "--zero 3"),
    (4, "--tp 4 --sequence-parallel"),
    (4, "--cp 4 --cp-kind usp --zero 2"),
    (4, "--cp 2 --cp-kind allgather --zero 3"),
    (4, "--pp 4 --schedule zb-h1"),
    (4, "--pp 2 --schedule dualpipe --tp 2 --sequence-parallel"),
    (4, "--pp 2 --schedule interleaved --stages-per-rank 2 --cp 2 --cp-kind ring --recompute full"),
    (4, "--pp 2 --zero 2"),
]
SPARSE = [
    (1, ""),
    (2, "--ep 2"),
    (2, "--pp 2"),
    (2, "--cp 2 --cp-kind ulysses --ep 2 --zero 3"),
    (4, "--ep 4 --cp 2 --cp-kind zigzag --zero 2"),
    (4, "--ep 2 --cp 2 --cp-kind allgather --zero 3 --recompute full"),
    (4, "--ep 2 --tp 2 --sequence-parallel --zero 1"),
    (4, "--tp 4"),
    (4, "--pp 2 --schedule dualpipe --ep 2"),
    (4, "--pp 2 --schedule zb-h2 --cp 2 --cp-kind zigzag --ep 2 --zero 1"),
]
SAVED = {  # by four ranks, in the most complicated layouts
    "dense": "--micro-batch 2 --pp 2 --schedule 1f1b --tp 2 --sequence-parallel --zero 1",
    "sparse": "--micro-batch 1 --tp 2 --sequence-parallel --experts 4 --ep 2 --zero 2",
}


def losses_of_runs(lines):
    """Losses and gradient norms of one run after the other, [steps, 2] each."""
    return [torch.tensor(list(fuzz.losses(fuzz.run(words)).values()), dtype=torch.float64) for words in lines]


@pytest.mark.prove
def test_a_run_saved_in_one_layout_goes_on_in_24_others_with_the_same_losses(text, tmp_path):
    words = {
        name: [*options(text, layout, clip=1, steps=6, save_every=4, keep=9), "--out", str(tmp_path / name)]
        for name, layout in SAVED.items()
    }
    undisturbed = dict(zip(words, run_ranks(4, losses_of_runs, list(words.values()), timeout=180)[0], strict=True))
    cases = [("dense", *case) for case in DENSE] + [("sparse", *case) for case in SPARSE]
    assert len(cases) >= 20
    for ranks in (1, 2, 4):
        chosen, lines = [case for case in cases if case[1] == ranks], []
        for i, (name, _, layout) in enumerate(chosen):
            saved = Path("checkpoints") / "step-000004"
            shutil.copytree(tmp_path / name / saved, tmp_path / f"{ranks}-{i}" / saved)
            dp = Config(**parse(layout.split())).dp(ranks)
            assert dp <= 2 or name == "dense", "experts are balanced within a micro-batch: there must be four as before"
            micro_batch = 2 // dp or 1
            again = ["--resume", str(tmp_path / f"{ranks}-{i}" / saved), "--micro-batch", str(micro_batch)]
            lines.append([*again, *ALONE.split(), *layout.split()])
        for (name, _, layout), got in zip(chosen, run_ranks(ranks, losses_of_runs, lines, timeout=300)[0], strict=True):
            want = undisturbed[name][4:]
            assert_same(got, want, 1e-9, f"losses and norms after going on on {ranks} ranks {layout}")
