"""The trainer in every layout: losses, gradients and weights of one process; and its grid of ranks.

test_kernels.py has other kernels and precisions, test_data.py the data, test_resume.py what is resumed, test_ends.py
how a run ends. Most of them take their small runs from here.
"""

import dataclasses
import math

import paths  # noqa: F401  finds the chapters below
import fuzz
import mesh
import pytest
import torch
import torch.distributed as dist
import train
from harness.ranks import run_ranks
from harness.reference import assert_same
from layouts import Layout
from llama import LlamaConfig
from model import PRESETS, full_shapes, my_positions
from options import Config, parse

SIZES = LlamaConfig(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48)
TEXT = "\n".join(f"{i} times {i} is {i * i}, and {i} plus {i} is {i + i}." for i in range(2000))


def arguments(text, **changes):
    """A small run: 8 steps of 8 samples of 16 tokens, in float64."""
    options = dict(data=text, seq_len=16, steps=8, warmup=2, global_batch=8, micro_batch=2, precision="fp64")
    options |= dict(save_every=4, eval_every=0, eval_samples=9, sample=0, device="cpu") | changes
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def run(words, sizes):
    plan = train.prepare(words, dist.get_world_size())
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, **sizes))
    plan, folder = train.agree(plan)
    return train.train(plan, folder), str(folder)


SMALL = {f.name: getattr(SIZES, f.name) for f in dataclasses.fields(LlamaConfig) if f.name != "tied"}


def train_on(ranks, words, **sizes):
    """The log and the run folder of a run on `ranks` ranks."""
    return run_ranks(ranks, run, words, SMALL | sizes)[0]


def run_in_turn(lines, sizes):
    return [run(words, sizes) for words in lines]


def losses(log):
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in log if "loss" in line}


def f64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# ----------------------------------------------------------------------------------------- right by the reference


# Every technique alone, with each earlier one, and all at once: (ranks, options).
LAYOUTS = [
    (1, ""),
    (2, ""),
    (3, "--global-batch 12 --zero 1"),
    (4, "--zero 2"),
    (3, "--global-batch 12 --zero 3"),
    (4, "--tp 4"),
    (4, "--tp 4 --sequence-parallel"),
    (4, "--tp 2 --sequence-parallel"),
    (4, "--tp 2 --zero 1"),
    (4, "--tp 2 --sequence-parallel --zero 2"),
    (4, "--tp 2 --sequence-parallel --zero 3"),
    (4, "--cp 4 --cp-kind allgather"),
    (4, "--cp 4 --cp-kind ring"),
    (4, "--cp 4 --cp-kind zigzag"),
    (4, "--cp 4 --cp-kind ulysses"),
    (4, "--cp 4 --cp-kind usp"),
    (4, "--cp 2 --cp-kind zigzag --zero 1"),
    (4, "--cp 2 --cp-kind ulysses --zero 2"),
    (4, "--cp 2 --cp-kind ring --zero 3"),
    (4, "--cp 2 --cp-kind allgather --tp 2"),
    (4, "--cp 2 --cp-kind ulysses --tp 2 --sequence-parallel"),
    (4, "--cp 2 --cp-kind zigzag --tp 2 --sequence-parallel --zero 3"),
    (8, "--cp 2 --cp-kind zigzag --tp 2 --sequence-parallel --zero 2"),
    (2, "--seq-len 15"),  # odd: no rank shares its sequences
    (1, "--fpdt-chunks 2"),
    (2, "--cp 2 --cp-kind ulysses --fpdt-chunks 4 --tied"),
    (4, "--cp 2 --cp-kind ulysses --fpdt-chunks 2 --zero 2"),
    (4, "--cp 2 --cp-kind ulysses --fpdt-chunks 2 --zero 3"),
    (4, "--cp 4 --cp-kind ulysses --fpdt-chunks 2 --zero 1"),
]


def two_micro_batches(ranks, layout):
    """The options of a layout in which a data-parallel rank adds up two micro-batches."""
    samples = {1: 4, 2: 2, 3: 2, 4: 1}[Config(**parse(layout.split())).dp(ranks)]
    return f"--micro-batch {samples} {layout}"


@pytest.mark.always("3---global-batch 12 --zero 3", "4---cp 2 --cp-kind zigzag --tp 2 --sequence-parallel --zero 3")
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=lambda value: str(value) or "plain")
def test_loss_every_gradient_and_weights_equal_one_process_on_the_global_batch(ranks, layout, text):
    assert fuzz.verify([Layout(ranks, two_micro_batches(ranks, layout))], text, SIZES) == 1


TWO_LAYERS = dataclasses.replace(SIZES, hidden=16, layers=2, intermediate=24)
FOUR_LAYERS = dataclasses.replace(TWO_LAYERS, layers=4)
PIPELINES = [  # 3 layers on 2 stages, 7 on 4
    (2, "--pp 2 --schedule naive"),
    (4, "--pp 4 --schedule afab"),
    (4, "--pp 4 --schedule 1f1b --micro-batch 4"),  # fewer micro-batches than stages
    (2, "--pp 2 --schedule interleaved --stages-per-rank 2"),
    (2, "--pp 2 --schedule breadth-first --stages-per-rank 2"),
    (2, "--pp 2 --schedule llama3 --stages-per-rank 2"),
    (4, "--pp 2 --schedule zb-h1 --tp 2 --sequence-parallel"),
    (4, "--pp 2 --schedule zb-h2 --zero 1"),
    (4, "--pp 2 --schedule zb-v --stages-per-rank 2 --zero 2"),
    (4, "--pp 2 --schedule dualpipe --micro-batch 1"),
    (4, "--pp 2 --schedule dualpipe --micro-batch 1 --zero 2"),
    (4, "--pp 2 --schedule dualpipe-v --stages-per-rank 2 --micro-batch 1 --cp 2 --cp-kind ulysses"),
    (4, "--pp 2 --schedule auto --cp 2 --cp-kind zigzag"),
    (4, "--pp 2 --schedule zb-h1 --recompute full --zero 1"),
    (8, "--pp 2 --schedule zb-h1 --cp 2 --cp-kind ring --tp 2 --zero 2"),
]


@pytest.mark.always("4---pp 2 --schedule dualpipe --micro-batch 1 --zero 2-")
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(("ranks", "layout"), PIPELINES, ids=lambda value: str(value))
def test_every_schedule_gives_the_loss_gradients_and_weights_of_one_process(ranks, layout, tied, text):
    four_stages = "--pp 4" in layout or "--stages-per-rank" in layout
    sizes = dataclasses.replace(TWO_LAYERS, layers=7 if four_stages else 3)
    assert fuzz.verify([Layout(ranks, f"{layout} --tied" if tied else layout)], text, sizes) == 1


EXPERTS = [
    (1, "--experts 4"),
    (2, "--experts 4 --ep 2"),
    (4, "--experts 4 --ep 2 --zero 1"),
    (4, "--experts 4 --ep 4 --router sigmoid --bias-speed 0.01 --zero 2"),
    (4, "--experts 4 --ep 2 --zero 3 --recompute full"),
    (4, "--experts 4 --ep 2 --capacity 1.0"),
    (4, "--experts 4 --ep 2 --tp 2"),
    (4, "--experts 4 --ep 2 --tp 2 --sequence-parallel --router sigmoid --bias-speed 0.01 --zero 2"),
    (4, "--experts 4 --ep 4 --cp 2 --cp-kind zigzag"),
    (4, "--experts 4 --ep 2 --cp 2 --cp-kind ulysses --zero 1 --recompute selective"),
    (4, "--experts 4 --ep 2 --pp 2 --schedule 1f1b"),
    (4, "--experts 4 --ep 2 --pp 2 --schedule zb-h1 --recompute full --zero 1"),
    (4, "--experts 4 --ep 2 --pp 2 --schedule dualpipe --micro-batch 1 --router sigmoid --bias-speed 0.01"),
    (8, "--experts 4 --ep 2 --pp 2 --schedule zb-v --stages-per-rank 2 --tp 2 --sequence-parallel --zero 2"),
]


@pytest.mark.always("4---experts 4 --ep 2 --tp 2 --sequence-parallel --router sigmoid --bias-speed 0.01 --zero 2")
@pytest.mark.parametrize(("ranks", "layout"), EXPERTS, ids=lambda value: str(value))
def test_experts_wherever_they_live_give_the_loss_gradients_and_weights_of_one_process(ranks, layout, text):
    words = layout if "--pp" in layout else two_micro_batches(ranks, layout)
    assert fuzz.verify([Layout(ranks, words)], text, FOUR_LAYERS if "--pp" in layout else TWO_LAYERS) == 1


ADAMW_LAYOUTS = [
    (2, ""),
    (4, "--tp 2 --zero 1"),
    (4, "--zero 3"),
    (4, "--tp 4 --sequence-parallel"),  # 2 K/V heads on 4 ranks
    (4, "--cp 4 --cp-kind usp"),
    (4, "--cp 2 --tp 2 --sequence-parallel --zero 2"),
    (4, "--pp 2 --schedule zb-h1 --zero 1 --tied"),
    (4, "--pp 2 --schedule dualpipe --micro-batch 1 --tied"),
]


@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "layout"), ADAMW_LAYOUTS, ids=lambda value: str(value) or "plain")
def test_clipped_adamw_steps_in_any_layout_give_the_losses_and_norms_of_one_rank(ranks, layout, text, tmp_path):
    words = arguments(text, steps=10)
    words += ["--tied"] if "--tied" in layout else []
    one = losses(train_on(1, [*words, "--out", str(tmp_path / "one")])[0])
    many = losses(train_on(ranks, [*words, "--out", str(tmp_path / "many"), *layout.split()])[0])
    assert one.keys() == many.keys() == set(range(1, 11))
    for step in one:
        assert_same(f64(many[step]), f64(one[step]), 1e-9, f"loss and norm of step {step}")


@pytest.mark.always("--pp 2")
@pytest.mark.parametrize("layout", ["", "--pp 2"])
def test_a_run_that_is_validated_after_every_step_trains_as_one_that_is_not(layout, text, tmp_path):
    """What a layer notes for the end of a step, as how many tokens came to each expert, is noted of training alone."""
    words = arguments(text, steps=3, micro_batch=4, save_every=0, experts=4, router="sigmoid", bias_speed=0.1)
    lines = [[*words, *layout.split(), "--eval-every", n, "--out", str(tmp_path / n)] for n in ("0", "1")]
    logs = [log for log, _ in run_ranks(2, run_in_turn, lines, SMALL)[0]]
    assert losses(logs[0]) == losses(logs[1])
    assert abs(logs[0][0]["val_loss"] - math.log(256)) < 0.2, "of all stages together"


@pytest.mark.prove
def test_validation_does_not_depend_on_the_layout_also_when_ranks_have_unequal_shares(text, tmp_path):
    layouts = [(1, []), (2, []), (4, []), (4, ["--zero", "3"]), (4, ["--cp", "2", "--tp", "2"])]
    runs = [
        [*arguments(text, steps=2, eval_samples=9), "--out", str(tmp_path / str(i)), *layout]
        for i, (_, layout) in enumerate(layouts)
    ]
    values = [train_on(ranks, words)[0][0] for (ranks, _), words in zip(layouts, runs, strict=True)]
    assert all(abs(value["val_loss"] - values[0]["val_loss"]) < 1e-12 for value in values)


def test_the_groups_are_those_that_the_picture_shows(text):
    groups = {
        name: ranks.tolist()
        for name, ranks in mesh.members(dict(zip(mesh.AXES, (2, 2, 2, 1, 2), strict=True)), 2).items()
    }
    assert groups["tp"][2] == [4, 5] and [5, 7] in groups["ring"] and [5, 13] in groups["pp"]
    assert [1, 3, 5, 7] in groups["data"] and [1, 3] in groups["ep"] and [1, 5] in groups["experts"]
    mirrored = mesh.members(dict(zip(mesh.AXES, (4, 1, 1, 1, 1), strict=True)), mirrored=True)
    for name in ("data", "experts", "all tokens"):
        assert mirrored[name].tolist() == [[0, 3], [1, 2]], name
    assert mirrored["ends"].tolist() == [[0, 3]]
    folded = mesh.members(dict(zip(mesh.AXES, (4, 2, 1, 1, 1), strict=True)), 2, mirrored=True, shards=2)
    assert folded["data"].tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert folded["experts"].tolist() == folded["copies"].tolist() == [[0, 6], [1, 7], [2, 4], [3, 5]]
    both = mesh.members(dict(zip(mesh.AXES, (2, 1, 2, 2, 2), strict=True)), split_tokens=True)
    assert (both["ring"][0].tolist(), both["ulysses"][0].tolist()) == ([0, 4], [0, 2])
    assert both["batch"][1].tolist() == [1, 3, 5, 7] and both["replica"][1].tolist() == [*range(1, 16, 2)]
    assert both["tokens"].tolist() == both["all tokens"].tolist() == both["stage"].tolist()
    assert both["stage"].tolist() == [[*range(8)], [*range(8, 16)]], "tensor ranks have tokens of their own"
    for cp, tp, grid in ((4, 4, (4, 1)), (4, 1, (2, 2)), (2, 1, (2, 1))):
        assert Config(cp=cp, tp=tp, cp_kind="usp").ring_and_ulysses(SIZES) == grid, "by the heads of a tensor rank"
    assert Config(cp=4, cp_kind="ulysses").ring_and_ulysses(SIZES) == (1, 4)
    for name, lines in groups.items():
        if name != "ends":  # the middle of a pipeline is in none of these
            assert sorted(rank for line in lines for rank in line) == list(range(16)), (
                f"{name}: every rank is in exactly one group"
            )
    words = [*arguments(text), *["--pp", "2", "--cp", "2", "--tp", "2", "--experts", "4", "--ep", "2"]]
    shown = train.show_mesh(train.prepare(words, 16), 16)
    assert "pp 2 x dp 2 x ring 2 x ulysses 1 x tp 2 = 16 ranks" in shown
    assert "{1 3 5 7}" in shown and "[12 13] [14 15]" in shown and "  dp 1  [ 4  5] [ 6  7]" in shown


def test_a_rank_has_the_positions_that_its_place_on_ring_and_ulysses_gives_it():
    sizes = {"ring": 2, "ulysses": 4}
    ranks = [mesh.Mesh(sizes, {"ring": ring, "ulysses": other}, {}) for ring in range(2) for other in range(4)]
    assert [(rank.cp_rank, rank.cp) for rank in ranks] == [(number, 8) for number in range(8)]
    held = [my_positions(16, rank, "usp").tolist() for rank in ranks]
    assert held[:4] == [[0, 1], [2, 3], [12, 13], [14, 15]] and held[4:] == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert [my_positions(16, rank, "ring").tolist() for rank in ranks] == [[2 * n, 2 * n + 1] for n in range(8)]
    assert my_positions(16, ranks[3], "zigzag").tolist() == [3, 12]


def limits_of_all_groups():
    made = mesh.make_mesh({"dp": 2, "tp": 2}, timeout=7.0)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in made.groups.values()]


def test_every_group_of_the_mesh_has_the_timeout_not_the_default_of_half_an_hour():
    for limits in run_ranks(4, limits_of_all_groups):
        assert len(limits) > 10 and set(limits) == {7.0}


def test_presets_have_the_sizes_they_are_named_after():
    counts = {name: sum(shape.numel() for shape in full_shapes(config).values()) for name, config in PRESETS.items()}
    assert 0.5e6 < counts["tiny"] < 0.9e6
    assert counts["llama3-8b"] == 8_030_261_248 and counts["llama3-70b"] == 70_553_706_496
    assert round(counts["smollm-1.7b"] / 1e9, 2) == 1.71 and round(counts["base"] / 1e6) == 124
    assert (PRESETS["smollm-1.7b"].rope_theta, PRESETS["mixtral-8x7b"].rope_theta) == (130_000, 1_000_000)
    sparse = train.elements_of(PRESETS["mixtral-8x7b"], Config(preset="mixtral-8x7b"))
    assert sum(sparse.values()) == 46_702_792_704
    assert Config(preset="mixtral-8x7b").mixture(PRESETS["mixtral-8x7b"]).top_k == 2
