"""Variants of chapters 03, 04 and 07 in the trainer: offloaded, late, in copies, in wider sums, overlapped, dispatched.

Each gives the loss, every gradient and the weights of one process with another axis; each goes on from a
checkpoint as if nothing had happened, in its own layout or another; and each is really there. test_metrics.py counts
what they hold and send, test_bad_input.py has what is refused.
"""

import dataclasses
from unittest import mock

import paths  # noqa: F401  finds the chapters below
import domino
import fuzz
import metrics
import pytest
import step as step_module
import torch
import torch.distributed as dist
import train
from full_state import full_state
from harness.ranks import run_ranks
from harness.reference import assert_same
from layouts import Layout, whole_gradients
from moe_layer import moe_layers
from options import merge, parse
from overlap import column_overlapped
from parallel_linear import ColumnParallelLinear
from test_train import SIZES, arguments, f64, losses, train_on
from zero_overlap import Travelling
from zero_stages import ExchangeAndSum

VARIANTS = [
    (4, "--zero 3 --zero-offload --tp 2 --sequence-parallel"),
    (4, "--zero 2 --zero-offload --pp 2 --schedule 1f1b --tied"),
    (4, "--zero 3 --zero-offload --experts 4 --ep 2"),
    (4, "--zero 2 --zero-late-gather --cp 2 --cp-kind zigzag"),
    (4, "--zero 1 --zero-late-gather --pp 2 --schedule zb-h1"),
    (4, "--zero 1 --zero-late-gather --tp 2 --tp-overlap"),
    (4, "--zero 2 --zero-late-gather --experts 4 --ep 2 --recompute full"),
    (4, "--zero 3 --zero-shards 2 --cp 2 --cp-kind ulysses"),
    (4, "--zero 2 --zero-shards 2 --pp 2 --schedule dualpipe"),
    (4, "--zero 1 --zero-shards 1 --tp 2 --sequence-parallel"),
    (4, "--pp 2 --schedule zb-h1 --tp 2 --tp-overlap"),
    (4, "--pp 2 --schedule zb-v --stages-per-rank 2 --tp 2 --sequence-parallel --tp-overlap"),
    (4, "--tp 2 --tp-overlap --experts 4 --ep 2"),
    (4, "--tp 2 --sequence-parallel --tp-overlap domino"),  # beside data parallel
    (4, "--tp 2 --sequence-parallel --tp-overlap domino --zero 1 --zero-shards 1"),
    (4, "--tp 2 --tp-overlap domino --zero 2 --recompute selective"),
    (4, "--tp 2 --sequence-parallel --tp-overlap domino --zero 3"),
    (4, "--tp 2 --tp-overlap domino --cp 2 --cp-kind zigzag"),
    (4, "--tp 2 --sequence-parallel --tp-overlap domino --cp 2 --cp-kind ulysses"),
    (4, "--tp 2 --sequence-parallel --tp-overlap domino --pp 2 --schedule 1f1b --tied"),
    (4, "--tp 2 --tp-overlap domino --pp 2 --schedule interleaved --stages-per-rank 2"),
    (4, "--experts 4 --ep 4 --dispatch fixed --recompute full --zero 2"),
    (4, "--experts 4 --ep 2 --dispatch fixed --pp 2 --schedule zb-h1 --router sigmoid --bias-speed 0.01"),
    (4, "--experts 4 --ep 2 --dispatch once --tp 2 --sequence-parallel"),
    (2, "--experts 4 --ep 2 --dispatch everywhere"),
]
EVERY = [
    Layout(ranks, f"--micro-batch {1 if '--pp' in words and 'domino' not in words else 2} {words}")
    for ranks, words in VARIANTS
]


@pytest.mark.prove
@pytest.mark.parametrize("part", range(6))
def test_every_variant_with_another_axis_gives_the_loss_gradients_and_weights_of_one_process(part, text):
    assert fuzz.verify(EVERY[part::6], text) == len(EVERY[part::6])


# ------------------------------------------------------------------------------------ stopped, and gone on elsewhere

RESUMED = [
    (2, "--zero 2 --zero-offload", "--zero 1 --no-zero-offload"),
    (2, "--zero 2 --zero-late-gather", "--zero 3 --no-zero-late-gather"),
    (4, "--zero 3 --zero-shards 2", "--zero 2 --zero-shards 0 --zero-offload"),
    (2, "--tp 2 --tp-overlap", "--tp 1 --tp-overlap none --zero 1 --zero-late-gather"),
    (2, "--tp 2 --tp-overlap domino", "--sequence-parallel --tp-overlap none"),
]


@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "layout", "other"), RESUMED, ids=lambda value: str(value))
def test_clipped_steps_are_those_of_plain_ranks_and_a_resumed_run_goes_on_bit_by_bit_here_and_nearly_elsewhere(
    ranks,
    layout,
    other,
    text,
    tmp_path,
):
    words = arguments(text, steps=6, keep=9)
    log, folder = train_on(ranks, [*words, "--out", str(tmp_path / "run"), *layout.split()])
    plain, _ = train_on(1, [*words, "--out", str(tmp_path / "plain")])
    assert_same(f64([*losses(log).values()]), f64([*losses(plain).values()]), 1e-9, "losses and norms of six steps")
    resumed, _ = train_on(ranks, ["--resume", f"{folder}/checkpoints/step-000004"])
    assert losses(resumed) == losses(log)
    elsewhere, _ = train_on(ranks, ["--resume", f"{folder}/checkpoints/step-000004", *other.split()])
    assert_same(f64([*losses(elsewhere).values()]), f64([*losses(log).values()]), 1e-9, f"losses and norms, {other}")


@pytest.mark.prove
@pytest.mark.parametrize("more", ["--zero-offload", "--accumulate-dtype fp32 --reduce-dtype fp32"])
def test_with_masters_a_resumed_run_goes_on_bit_by_bit_and_offloading_changes_no_bit(more, text, tmp_path):
    words = arguments(text, steps=6, keep=9, precision="bf16-master", zero=2)
    log, folder = train_on(2, [*words, "--out", str(tmp_path / "run"), *more.split()])
    resumed, _ = train_on(2, ["--resume", f"{folder}/checkpoints/step-000004"])
    assert losses(resumed) == losses(log)
    plain, _ = train_on(2, [*words, "--out", str(tmp_path / "plain")])
    assert (losses(plain) == losses(log)) == (more == "--zero-offload")


# -------------------------------------------------------------------------------------------------- really there


def dispatched(words):
    """The versions of the layers of experts, and the rows that a rank sent in each call."""
    me, batches = fuzz.made(words, SIZES)
    with metrics.routed_rows(me.model) as rows:
        step_module.train_step(me, batches())
    plain = metrics.sent_by_formula(me, [])["tokens"]
    me.config = dataclasses.replace(me.config, capacity=1.0, recompute="full", dispatch="once")
    found = metrics.sent_by_formula(me, [])
    counts = 2 * 2 * 4 * 2  # layers, micro-batches, experts, and places of a token among them
    assert (found["tokens"] - plain, found["ep"]) == (8 * counts, None)
    return {layer.version for layer in moe_layers(me.model)}, {tuple(send) for send, _ in rows}


def test_tokens_go_to_their_experts_as_asked(text):
    words = [*arguments(text), "--experts", "4", "--ep", "2", "--dispatch"]
    for version, rows in run_ranks(2, dispatched, [*words, "fixed"]):
        assert version == {"fixed"} and len(rows) == 1, "the same number of rows in every layer and micro-batch"
    for version, _ in run_ranks(2, dispatched, [*words, "once"]):
        assert version == {"once"}


def travelling_weights(words):
    """How many weights are on their way after a step, after the next forward, and when the run says so."""
    me, batches = fuzz.made(words, SIZES)

    def count():
        return sum(type(p) is Travelling for p in me.model.parameters())

    step_module.train_step(me, batches())
    begin = count()
    step_module.loss_sum(me, *step_module.shard_batch(me, batches()[0]))
    after = count()
    step_module.train_step(me, batches())
    step_module.wait_for_weights(me)
    assert me.owners[0].reduce_scatter is ExchangeAndSum, "on Gloo, whose own sends all of the sum to all"
    waiting = sum(len(arrival.works) for owner in me.owners for arrival in owner.arrivals.values())
    return len([*me.model.parameters()]), begin, after, waiting


def test_late_weights_travel_when_the_step_is_over_and_have_come_when_forward_is(text):
    for every, begin, after, waiting in run_ranks(2, travelling_weights, [*arguments(text), *LATE]):
        assert (begin, after, waiting) == (every, 0, 0)


LATE = ["--zero", "2", "--zero-late-gather"]


def test_copies_that_share_sequences_a_tied_pipeline_and_replicated_or_cut_ranks_of_experts_train_as_one_process(text):
    words = ("--micro-batch 2 --zero 2 --zero-shards 2 --cp 2 --cp-kind ulysses --fpdt-chunks 2",)
    words += ("--micro-batch 4 --pp 2 --tp 2 --sequence-parallel --tied --zero 1",)
    words += tuple(f"--micro-batch 1 --experts 4 --ep 2 {how}" for how in ("", "--zero 3 --recompute full"))
    sizes = dataclasses.replace(SIZES, rope_theta=5000.0, rope_scaling=(2.0, 1.0, 4.0, 64))
    assert fuzz.verify([Layout(4, layout) for layout in words], text, sizes) == len(words)


def crossed_in_its_first_step(words):
    plan, folder = train.agree(train.prepare(words, dist.get_world_size()))
    with mock.patch.object(train.Logger, "say", lambda logger, words: said.extend(words.splitlines())):
        said: list[str] = []
        train.train(plan, folder)
    return [line.split() for line in said if line.startswith("crossed")]


@pytest.mark.prove
def test_a_resumed_offloaded_run_counts_its_step_alone(text, tmp_path):
    words = [*arguments(text, steps=2, save_every=1, keep=9, zero=2), "--zero-offload"]
    _, folder = train_on(2, [*words, "--out", str(tmp_path / "run")])
    rows = run_ranks(2, crossed_in_its_first_step, ["--resume", f"{folder}/checkpoints/step-000001", "--meter"])[0]
    assert [row[1] for row in rows] == ["down", "up"] and all("=" in row for row in rows), rows


def versions_of_columns(words):
    me, _ = fuzz.made(words, SIZES)
    return [layer.tp.column for layer in me.model.modules() if isinstance(layer, ColumnParallelLinear)]


@pytest.mark.parametrize("overlap", [True, False])
def test_all_products_by_columns_overlap_if_asked(overlap, text):
    words = [*arguments(text), "--tp", "2", *["--tp-overlap"] * overlap]
    for versions in run_ranks(2, versions_of_columns, words):
        assert len(versions) >= 10 and {version is column_overlapped for version in versions} == {overlap}


def blocks_in_halves(words):
    """How many blocks the halves go through at once, each time, in a step."""
    me, batches = fuzz.made(words, SIZES)
    seen, real = [], domino.through

    def counted(x, blocks, *more):
        seen.append(len(blocks))
        return real(x, blocks, *more)

    with mock.patch.object(domino, "through", counted):
        step_module.train_step(me, batches())
    return seen


@pytest.mark.parametrize(("more", "at_once"), [("", 2), ("--zero 3", 1)], ids=["plain", "zero 3"])
def test_dominos_halves_go_through_all_blocks_at_once_unless_somebody_waits_at_each(more, at_once, text):
    words = [*arguments(text, micro_batch=4), "--tp", "2", "--tp-overlap", "domino", *more.split()]
    for seen in run_ranks(2, blocks_in_halves, words):
        assert seen == [at_once] * (2 // at_once) * 2, "two blocks, two micro-batches"


def test_dominos_halves_with_cut_sequences_train_as_one_process(text):
    assert fuzz.verify([Layout(2, "--micro-batch 4 --tp 2 --sequence-parallel --tp-overlap domino")], text, SIZES) == 1


def test_a_run_from_before_there_was_domino_goes_on_as_it_was():
    for stored, now in ((True, "backward"), (False, "none"), ("domino", "domino")):
        assert merge({"tp_overlap": stored}, {}, "a checkpoint").tp_overlap == now
    assert parse(["--tp-overlap", "--tp", "2"]) == {"tp_overlap": "backward", "tp": 2}


def gradients(words):
    me, batches = fuzz.made(words, SIZES)
    step_module.train_step(me, batches())
    return whole_gradients(me)


@pytest.mark.prove
def test_sums_in_fp32_are_nearer_to_fp64_over_ranks_and_over_micro_batches(text):
    def error(*more):
        got = run_ranks(4, gradients, [*words, *more])[0]
        parts = [(got[name].double() - want).flatten() for name, want in exact.items()]
        return torch.cat(parts).norm() / torch.cat([want.flatten() for want in exact.values()]).norm()

    words = arguments(text, global_batch=64, micro_batch=1, zero=2, clip=0)  # 16 micro-batches on each of 4 ranks
    exact = {name: g.double() for name, g in run_ranks(4, gradients, words)[0].items()}
    words += ["--precision", "bf16-master"]
    narrow = error()
    ranks_only = error("--reduce-dtype", "fp32")
    both = error("--reduce-dtype", "fp32", "--accumulate-dtype", "fp32")
    assert both < ranks_only < narrow and both < 0.8 * narrow, (narrow, ranks_only, both)


@pytest.mark.prove
def test_in_bf16_halves_are_as_near_to_fp64_as_whole_batches(text):
    def error(*more):
        got = run_ranks(2, gradients, [*words, "--precision", "bf16", *more])[0]
        return max((got[name].double() - want).norm() / want.norm() for name, want in exact.items())

    words = arguments(text, clip=0)
    exact = {name: g.double() for name, g in run_ranks(2, gradients, words)[0].items()}
    plain = error("--tp", "2")
    assert 0 < plain < 0.1
    for layout in ((), ("--sequence-parallel",)):
        assert error("--tp", "2", "--tp-overlap", "domino", *layout) <= 1.5 * plain


def test_a_checkpoint_of_an_offloaded_run_has_no_second_copy_of_the_weights(text):
    for state in run_ranks(2, kinds_of_state, [*arguments(text), "--zero", "2", "--zero-offload"]):
        assert state == {"step", "exp_avg", "exp_avg_sq"}


def kinds_of_state(words):
    me, batches = fuzz.made(words, SIZES)
    step_module.train_step(me, batches())
    state = full_state(me.owners, me.model, me.mesh)
    return {kind for kinds in state["optimizer"].values() for kind in kinds}


def test_the_picture_of_the_mesh_shows_shards_and_copies(text):
    words = [*arguments(text, micro_batch=1), "--zero", "3", "--zero-shards", "2", "--show-mesh"]
    shown = train.show_mesh(train.prepare(words, 8), 8)
    assert "shards   {0 1}  {2 3}  {4 5}  {6 7}" in shown and "copies   {0 2 4 6}  {1 3 5 7}" in shown, shown
