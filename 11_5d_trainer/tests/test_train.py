"""The trainer: equal to one process, exact in what it resumes, clear about what it refuses, over when it is over."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chapters  # noqa: F401  finds the chapters below
import checkpoint
import mesh
import model
import pytest
import rank
import torch
import torch.distributed as dist
import train
from data import Sampler, load_corpus
from harness.oracle import Trace, assert_same, assert_same_trace, sgd_trace
from harness.ranks import RankFailure, run_ranks
from llama import Llama, LlamaConfig
from model import PRESETS, full_shapes, gather_tensors
from moe_layer import moe_layers, set_loss_scale, update_biases
from moe_llama import gather_experts
from options import Config, UsageError
from state import full_state, whole_model
from training_step import accumulate

HERE = Path(__file__).resolve().parents[1]
SIZES = LlamaConfig(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48)
TEXT = "\n".join(f"{i} times {i} is {i * i}, and {i} plus {i} is {i + i}." for i in range(2000))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "numbers.txt"
    file.write_text(TEXT)
    return str(file)


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


def losses(log):
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in log if "loss" in line}


def f64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# ----------------------------------------------------------------------------------------- right by the oracle


def plain_sgd(model, lr):
    return torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 0.0}], lr=0.1)


def three_sgd_steps(words, sizes=SIZES):
    """The trainer's own step, with plain SGD, in some layout; and the same three global batches on this rank alone."""
    plan = train.prepare(words, dist.get_world_size())
    config, corpus = plan.config, plan.corpus
    me = rank.make_rank(config, sizes, torch.device("cpu"), plain_sgd)
    place, dp = me.mesh.place["dp"], me.mesh.sizes["dp"]

    def batches(place):
        """Unequal numbers of valid tokens: every rank and micro-batch loses others."""
        sampler = Sampler(corpus.train, config.seq_len, 256, config.seed)
        steps = [sampler.step(config.micro_batch, config.accumulation(dp), place, dp) for _ in range(3)]
        return [
            [(t, labels.masked_fill(t % (3 + i + place) == 0, -100)) for i, (t, labels) in enumerate(step)]
            for step in steps
        ]

    parallel = Trace()
    for step in batches(place):
        parallel.losses.append(rank.train_step(me, step)[0])
        parallel.gradients.append(full_gradients(me))
    parallel.weights = full_state(me.engine, me.model, me.mesh)["weights"]
    if dist.get_rank() > 1:  # two ranks compare; they hold different pieces of everything
        return
    alone = model.alone(sizes, config.mixture(sizes)).double()
    everybody = [batches(each) for each in range(dp)]

    def one_process(step):
        # Micro-batch by micro-batch, that of all ranks at once: experts are balanced within a micro-batch.
        together = [
            tuple(map(torch.cat, zip(*pairs, strict=True))) for pairs in zip(*(e[step] for e in everybody), strict=True)
        ]
        set_loss_scale(alone, 1 / len(together))
        loss = accumulate(alone, together).item()
        if moe_layers(alone):
            update_biases(alone, None)
        return loss

    oracle = sgd_trace(dict(alone.named_parameters()), one_process)
    oracle.gradients = [gather_experts(alone, gradients, None) for gradients in oracle.gradients]
    oracle.weights = gather_experts(alone, oracle.weights | model.state_buffers(alone), None)
    assert_same_trace(parallel, oracle, rank=dist.get_rank())


def full_gradients(me):
    mine = gather_tensors(me.model, me.engine.full_gradients(), me.mesh)
    return {name: gradient.clone() for name, gradient in whole_model(mine, me.mesh).items()}


# Every technique alone, with each earlier one, and all at once: (ranks, options).
LAYOUTS = [
    (1, ""),
    (2, ""),
    (4, ""),
    (3, "--global-batch 12 --zero 1"),
    (4, "--zero 1"),
    (4, "--zero 2"),
    (4, "--zero 3"),
    (3, "--global-batch 12 --zero 3"),
    (2, "--tp 2"),
    (4, "--tp 4"),
    (4, "--tp 4 --sequence-parallel"),
    (4, "--tp 2 --sequence-parallel"),
    (4, "--tp 2 --zero 1"),
    (4, "--tp 2 --sequence-parallel --zero 2"),
    (4, "--tp 2 --sequence-parallel --zero 3"),
    (2, "--cp 2 --cp-kind ring"),
    (4, "--cp 4 --cp-kind allgather"),
    (4, "--cp 4 --cp-kind ring"),
    (4, "--cp 4 --cp-kind zigzag"),
    (4, "--cp 4 --cp-kind ulysses"),
    (4, "--cp 4 --cp-kind usp"),
    (4, "--cp 2 --cp-kind zigzag"),
    (4, "--cp 2 --cp-kind zigzag --zero 1"),
    (4, "--cp 2 --cp-kind ulysses --zero 2"),
    (4, "--cp 2 --cp-kind ring --zero 3"),
    (4, "--cp 2 --cp-kind allgather --tp 2"),
    (4, "--cp 2 --cp-kind ulysses --tp 2 --sequence-parallel"),
    (4, "--cp 2 --cp-kind zigzag --tp 2 --sequence-parallel --zero 3"),
    (8, "--cp 2 --cp-kind zigzag --tp 2 --sequence-parallel --zero 2"),
    (2, "--pp 2"),
    (1, "--fpdt-chunks 2"),
    (2, "--cp 2 --cp-kind ulysses --fpdt-chunks 4 --tied"),
    (4, "--cp 2 --cp-kind ulysses --fpdt-chunks 2 --zero 2"),
    (4, "--cp 2 --cp-kind ulysses --fpdt-chunks 2 --zero 3"),
    (4, "--cp 4 --cp-kind ulysses --fpdt-chunks 2 --zero 1"),
]


@pytest.mark.turn(2)
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=lambda value: str(value) or "plain")
def test_loss_every_gradient_and_weights_equal_one_process_on_the_global_batch(ranks, layout, text):
    sizes = dataclasses.replace(SIZES, tied="--tied" in layout)
    run_ranks(ranks, three_sgd_steps, [*arguments(text, clip=0), *layout.split()], sizes)


DEEP = dataclasses.replace(SIZES, hidden=16, layers=7, intermediate=24)
FOUR_LAYERS = dataclasses.replace(SIZES, hidden=16, layers=4, intermediate=24)
PIPELINES = [
    (2, "--pp 2 --schedule naive"),
    (4, "--pp 4 --schedule afab"),
    (4, "--pp 4 --schedule 1f1b --micro-batch 4"),  # fewer micro-batches than stages
    (2, "--pp 2 --schedule interleaved --stages-per-rank 2"),  # 7 layers on 4 stages
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


@pytest.mark.turn(3)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(("ranks", "layout"), PIPELINES, ids=lambda value: str(value))
def test_every_schedule_gives_the_loss_gradients_and_weights_of_one_process(ranks, layout, tied, text):
    words = [*arguments(text, clip=0), *layout.split(), *(["--tied"] if tied else [])]
    run_ranks(ranks, three_sgd_steps, words, dataclasses.replace(DEEP, tied=tied))


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


@pytest.mark.turn(2)
@pytest.mark.parametrize(("ranks", "layout"), EXPERTS, ids=lambda value: str(value))
def test_experts_wherever_they_live_give_the_loss_gradients_and_weights_of_one_process(ranks, layout, text):
    run_ranks(ranks, three_sgd_steps, [*arguments(text, clip=0, balance=0.1), *layout.split()], FOUR_LAYERS)


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


@pytest.mark.turn(3)
@pytest.mark.parametrize(("ranks", "layout"), ADAMW_LAYOUTS, ids=lambda value: str(value) or "plain")
def test_clipped_adamw_steps_in_any_layout_give_the_losses_and_norms_of_one_rank(ranks, layout, text, tmp_path):
    words = arguments(text, steps=10)
    words += ["--tied"] if "--tied" in layout else []
    one = losses(train_on(1, [*words, "--out", str(tmp_path / "one")])[0])
    many = losses(train_on(ranks, [*words, "--out", str(tmp_path / "many"), *layout.split()])[0])
    assert one.keys() == many.keys() == set(range(1, 11))
    for step in one:
        assert_same(f64(many[step]), f64(one[step]), 1e-9, f"loss and norm of step {step}")


def numbers(ranks, words, out, **sizes):
    """Losses and norms of a run, as one tensor."""
    return f64(list(losses(train_on(ranks, [*words, "--out", str(out)], **sizes)[0]).values()))


KERNEL_LAYOUTS = [(1, ""), (2, "--tp 2 --sequence-parallel"), (2, "--cp 2 --cp-kind zigzag --experts 2 --ep 2")]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.turn(3)
@pytest.mark.parametrize(("ranks", "layout"), KERNEL_LAYOUTS, ids=lambda value: str(value) or "plain")
def test_fused_kernels_change_no_loss_beyond_the_last_digits_of_fp32(ranks, layout, text, tmp_path):
    words = [*arguments(text, steps=2, global_batch=4, eval_samples=1, precision="fp32", warmup=0), *layout.split()]
    plain = numbers(ranks, [*words, "--kernels", "torch"], tmp_path / "torch", hidden=128, layers=1)
    fused = numbers(ranks, [*words, "--kernels", "triton"], tmp_path / "triton", hidden=128, layers=1)
    assert not torch.equal(plain, fused), "the kernels did not run"
    assert_same(fused, plain, 1e-5, "losses and norms of two steps")


@pytest.mark.turn(3)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8-row", "bf16-master", "fp8-tensor", "fp8-block"])
def test_low_precision_in_a_layout_is_as_near_to_fp32_as_on_one_rank(precision, text, tmp_path):
    words = arguments(text, steps=6, zero=1)
    exact = numbers(1, [*words, "--precision", "fp64"], tmp_path / "exact")
    alone = numbers(1, [*words, "--precision", precision], tmp_path / "alone")
    error = ((alone - exact) / exact).abs().max()
    assert 1e-6 < error < 0.1, f"{precision} on one rank is {error:.1e} away from fp64"
    for name, layout in (("dp", ""), ("tp", "--tp 2 --sequence-parallel"), ("pp", "--pp 2 --schedule zb-h1")):
        many = numbers(2, [*words, "--precision", precision, *layout.split()], tmp_path / name)
        apart = ((many - exact) / exact).abs().max()
        # A tensor-parallel sum adds numbers that were rounded on each rank: one more rounding of the format.
        rounding = torch.finfo(torch.float16 if precision == "fp16" else torch.bfloat16).eps / 2
        assert apart < max(2 * error, rounding), f"{name}: {apart:.1e} away from fp64, on one rank {error:.1e}"


@pytest.mark.parametrize("precision", ["bf16-master", "fp16"])
def test_a_resumed_run_in_low_precision_goes_on_bit_by_bit(precision, text, tmp_path):
    words = [*arguments(text, precision=precision, keep=9, zero=2), "--out", str(tmp_path / "run")]
    undisturbed, folder = train_on(2, words)
    resumed, _ = train_on(2, ["--resume", f"{folder}/checkpoints/step-000004"])
    assert losses(resumed) == losses(undisturbed)


def test_in_fp16_a_step_that_overflows_is_left_out_on_all_ranks_and_the_scale_is_halved(text, tmp_path):
    words = arguments(text, precision="fp16", steps=6, loss_scale=2.0**40, micro_batch=4)
    log, _ = train_on(2, [*words, "--out", str(tmp_path / "run")])
    left_out = [not math.isfinite(norm) for _, norm in losses(log).values()]
    assert left_out[0], "a loss scale of 2^40 overflows fp16"
    scales = [line["loss_scale"] for line in log if "loss" in line]
    for before, after, skipped in zip(scales, scales[1:], left_out[1:], strict=False):
        assert after == (before / 2 if skipped else before)


def test_validation_does_not_depend_on_the_layout_also_when_ranks_have_unequal_shares(text, tmp_path):
    layouts = [(1, []), (2, []), (4, []), (4, ["--zero", "3"]), (4, ["--cp", "2", "--tp", "2"])]
    runs = [
        [*arguments(text, steps=2, eval_samples=9), "--out", str(tmp_path / str(i)), *layout]
        for i, (_, layout) in enumerate(layouts)
    ]
    values = [train_on(ranks, words)[0][0] for (ranks, _), words in zip(layouts, runs, strict=True)]
    assert all(abs(value["val_loss"] - values[0]["val_loss"]) < 1e-12 for value in values)


def test_recomputation_changes_no_loss(text, tmp_path):
    logs = [
        losses(train_on(2, [*arguments(text, steps=3, recompute=mode), "--out", str(tmp_path / mode)])[0])
        for mode in ("none", "selective", "full")
    ]
    assert logs[0] == logs[1] == logs[2]


def test_it_learns(text, tmp_path):
    log, _ = train_on(2, [*arguments(text, steps=60, lr=0.01, precision="fp32"), "--out", str(tmp_path / "run")])
    validations = [line["val_loss"] for line in log if "val_loss" in line]
    assert abs(validations[0] - math.log(256)) < 0.2
    assert validations[-1] < 2.6


# ----------------------------------------------------------------------------------------------- data


def test_every_sample_once_per_epoch_and_ranks_see_disjoint_samples():
    tokens = torch.arange(16 * 24 + 1)  # 24 windows; window w starts with token 16 w
    epoch = []
    samplers = [Sampler(tokens, 16, 10_000, seed=3) for _ in range(3)]
    for _ in range(4):  # 4 steps of 2 micro-batches of 1 sample on 3 ranks: one epoch
        step = [s.step(micro_batch=1, accumulation=2, rank=r, dp=3) for r, s in enumerate(samplers)]
        epoch += [int(batches[micro][0][0, 0]) // 16 for micro in range(2) for batches in step]
    assert sorted(epoch) == list(range(24))
    assert epoch != list(range(24)), "samples come in the order of the text"
    assert {s.position for s in samplers} == {24}


def test_the_global_batch_is_the_same_samples_for_every_number_of_ranks():
    tokens = torch.arange(16 * 50 + 1)

    def samples(dp, micro_batch):
        samplers = [Sampler(tokens, 16, 10_000, seed=0) for _ in range(dp)]
        batches = [s.step(micro_batch, 12 // (micro_batch * dp), r, dp) for r, s in enumerate(samplers)]
        return sorted(int(row[0]) for pairs in batches for t, _ in pairs for row in t)

    assert samples(1, 12) == samples(2, 3) == samples(4, 1) == samples(3, 2)


def test_labels_are_the_next_tokens_also_over_the_edge_of_a_window():
    tokens, labels = Sampler(torch.arange(100), 16, 1000, seed=0).samples([0, 2])
    assert torch.equal(labels, tokens + 1)
    assert tokens[1, 0] == 32 and labels[1, -1] == 48


@pytest.mark.parametrize(("dtype", "ids"), [("uint16", 65_536), ("uint32", 200_000)])
def test_a_bin_of_tokens_is_mapped_and_read_as_written(dtype, ids, tmp_path):
    tokens = torch.arange(5000) * (ids // 5000)
    width = {"uint16": 2, "uint32": 4}[dtype]
    raw = b"".join(int(t).to_bytes(width, sys.byteorder) for t in tokens)
    (tmp_path / "train.bin").write_bytes(raw)
    (tmp_path / "val.bin").write_bytes(raw[: 100 * width])
    for path, lengths in ((tmp_path, (5000, 100)), (tmp_path / "train.bin", (4500, 500))):
        corpus = load_corpus(Config(data=str(path), bin_dtype=dtype, vocab_size=ids, seq_len=8))
        assert (len(corpus.train), len(corpus.val)) == lengths
        assert corpus.train.dtype == getattr(torch, dtype)
        assert torch.equal(corpus.train[:4500].long(), tokens[:4500])


def test_a_folder_is_split_by_file_without_hidden_or_binary_files(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(chr(ord("a") + i) * 10)
    (tmp_path / ".hidden").write_text("secret" * 10)
    (tmp_path / "image").write_bytes(b"\0\1\2" * 10)
    corpus = load_corpus(Config(data=str(tmp_path), seq_len=4))
    assert bytes(corpus.val.tolist()) == b"j" * 10 + b"t" * 10
    assert len(corpus.train) == 180 and not set(b"jt") & set(corpus.train.tolist())


def test_the_default_corpus_is_the_standard_library():
    corpus = load_corpus(Config())
    assert len(corpus.train) > 3_000_000 and len(corpus.val) > 100_000 and corpus.vocab_size == 256
    assert b"import " in bytes(corpus.train[:100_000].tolist())


# ------------------------------------------------------------------------------------- checkpoint and resume


@pytest.mark.parametrize(("ranks", "tied"), [(1, False), (2, True), (4, False)])
def test_resuming_gives_bit_identical_losses(ranks, tied, text, tmp_path):
    whole = [*arguments(text, precision="fp32", keep=9), *(["--tied"] if tied else []), "--out", str(tmp_path / "run")]
    undisturbed, folder = train_on(ranks, whole, tied=tied)
    resumed, same = train_on(ranks, ["--resume", f"{folder}/checkpoints/step-000004"], tied=tied)
    assert same == folder
    names = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000008", "superseded-step-000008"]
    assert losses(resumed) == losses(undisturbed)  # the floats themselves, not approximately
    assert resumed[-1] == undisturbed[-1]  # the validation at the end sees the same weights
    on_disk = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    assert losses(on_disk) == losses(undisturbed)


@pytest.mark.turn(3)
@pytest.mark.parametrize("written_by", ["", "--zero 3", "--tp 2 --cp 2 --zero 1"])
@pytest.mark.parametrize("tied", [False, True])
def test_resuming_in_another_layout_goes_on_with_the_same_losses(written_by, tied, text, tmp_path):
    words = [*arguments(text, keep=9), "--out", str(tmp_path / "run"), *(["--tied"] if tied else [])]
    log, folder = train_on(4, [*words, *written_by.split()], tied=tied)
    for ranks, layout in ((1, "--zero 0 --tp 1 --cp 1"), (2, "--zero 2 --tp 1 --cp 1"), (4, "--zero 0 --tp 4 --cp 1")):
        other, _ = train_on(ranks, ["--resume", f"{folder}/checkpoints/step-000004", *layout.split()], tied=tied)
        for step in range(5, 9):
            got, want = f64(losses(other)[step]), f64(losses(log)[step])
            assert_same(got, want, 1e-9, f"loss and norm of step {step} on {ranks} ranks {layout}")


def test_the_data_position_counts_every_sample_of_every_rank_and_micro_batch(text, tmp_path):
    _, folder = train_on(2, [*arguments(text), "--out", str(tmp_path / "run")])  # 2 ranks x 2 micro-batches x 2
    assert checkpoint.find(folder)[2].samples == 8 * 8


def test_only_the_newest_checkpoints_are_kept(text, tmp_path):
    _, folder = train_on(1, [*arguments(text, save_every=1, keep=3), "--out", str(tmp_path / "run")])
    assert [path.name for path in checkpoint.complete(Path(folder))] == ["step-000006", "step-000007", "step-000008"]


def test_an_interrupted_save_leaves_the_last_complete_checkpoint_in_force(text, tmp_path):
    log, folder = train_on(1, [*arguments(text, keep=9), "--out", str(tmp_path / "run")])
    path = Path(folder) / "checkpoints"
    (path / "step-000008" / "manifest.json").unlink()  # as if the machine went down before the rename
    (path / "step-000008").rename(path / ".writing-000008")
    assert checkpoint.find(folder)[1].name == "step-000004"
    again, _ = train_on(1, ["--resume", folder])
    assert losses(again) == losses(log)
    assert not list(path.glob(".writing-*"))


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json"])
def test_a_truncated_checkpoint_is_passed_over_and_refused_if_it_was_named(file, text, tmp_path):
    _, folder = train_on(1, [*arguments(text), "--out", str(tmp_path / "run")])
    damaged = Path(folder) / "checkpoints" / "step-000008" / file
    damaged.write_bytes(damaged.read_bytes()[:-100])
    before = (Path(folder) / "log.jsonl").read_bytes()
    with pytest.raises(UsageError) as refusal:
        train.prepare(["--resume", str(damaged.parent)], 1)
    assert file in str(refusal.value) and str(refusal.value).endswith("which takes the one before"), refusal.value
    assert "\n" not in str(refusal.value)
    plan = train.prepare(["--resume", folder], 1)
    assert plan.resume is not None and plan.resume[2].step == 4
    assert len(plan.messages) == 1 and plan.messages[0].startswith("step-000008 is passed over: "), plan.messages
    assert (Path(folder) / "log.jsonl").read_bytes() == before


def test_other_contents_of_the_same_size_are_found_and_the_checkpoint_before_is_used(text, tmp_path):
    log, folder = train_on(1, [*arguments(text, keep=9, min_lr=3e-3), "--out", str(tmp_path / "run")])
    damaged = Path(folder) / "checkpoints" / "step-000008" / "__0_0.distcp"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    again, _ = train_on(2, ["--resume", folder, "--steps", "9"])
    assert (damaged.parents[1] / "superseded-step-000008").exists(), "it went on from the damaged one"
    assert losses(again).keys() == set(range(1, 10))
    for step in range(5, 9):
        assert_same(f64(losses(again)[step]), f64(losses(log)[step]), 1e-9, f"loss and norm of step {step}")


def save_to_a_file(words, folder):
    plan = train.prepare(words, 1)
    model = Llama(SIZES)
    progress = checkpoint.Progress(1, 8, len(plan.corpus.train), dataclasses.asdict(plan.config), {})
    saver = checkpoint.Saver(Path(folder), dist.group.WORLD, 2)
    saver.save({"weights": model.state_dict()}, progress)
    saver.finish()


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_reason(text, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(RankFailure, match=r"FileExistsError|NotADirectoryError"):
        run_ranks(1, save_to_a_file, arguments(text), str(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints").read_text() == "a file where a folder should be"


# ------------------------------------------------------------------------- bad input: test_bad_input.py has the rest


def command(words, rank=0, world_size=1, port=0, **more):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    environment |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, str(HERE / "train.py"), *words], env=environment, **pipes, **more)


def test_the_command_ends_with_code_2_and_exactly_one_line():
    process = command(["--stepz", "3"])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (out, err) == ("", "train.py: unrecognized arguments: --stepz 3; --help lists the options\n")
    second = command(["--stepz", "3"], rank=1, world_size=2)
    assert second.communicate(timeout=60) == ("", "") and second.returncode == 2


# ------------------------------------------------------------------------------------------- the end of a job


def free_port():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return store.port


def start_two(text, folder, timeout):
    """A long run on two processes, once its first checkpoint is there."""
    port = free_port()
    words = [*arguments(text, steps=100_000, save_every=3, timeout=timeout), "--out", str(folder)]
    processes = [command(words, rank, 2, port) for rank in range(2)]
    deadline = time.monotonic() + 60
    while not checkpoint.complete(folder):
        assert time.monotonic() < deadline and processes[0].poll() is None, "the run did not start"
        time.sleep(0.1)
    return processes


def finish(processes, seconds):
    """Exit codes and what was said, once all have ended; fails if one is still running after `seconds`."""
    try:
        return [(p.communicate(timeout=seconds)[1], p.returncode) for p in processes]
    finally:
        for process in processes:
            process.kill()


def test_ctrl_c_leaves_the_last_complete_checkpoint_usable(text, tmp_path):
    processes = start_two(text, tmp_path / "run", timeout=60)
    for process in processes:
        process.send_signal(signal.SIGINT)
    ended = finish(processes, 60)
    assert [code for _, code in ended] == [130, 130]
    assert "go on with --resume" in ended[0][0] and "Traceback" not in ended[0][0]
    plan = train.prepare(["--resume", str(tmp_path / "run")], 2)
    # Not the last one of those every third step: one was written before the run ended.
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert plan.resume is not None and plan.resume[2].step == logged[-1]["step"] >= 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stuck_rank_ends_the_others_in_bounded_time(how, text, tmp_path):
    processes = start_two(text, tmp_path / "run", timeout=5)
    processes[1].send_signal(how)
    [(said, code)] = finish(processes[:1], 60)
    processes[1].kill()
    processes[1].communicate()
    assert code not in (0, None)
    assert "train_step" in said or "save" in said, said  # its own traceback
    assert checkpoint.find(str(tmp_path / "run"))[2].step >= 3


def poisoned(words, on_rank, at_step):
    """Two ranks; the gradient of one weight is NaN on one of them in one step, and in its repetition."""
    plan = train.prepare(words, dist.get_world_size())
    plan = dataclasses.replace(plan, model=SIZES)
    plan, folder = train.agree(plan)
    steps, make = [0], train.make_rank

    def with_poison(*args, **options):
        me = make(*args, **options)
        if dist.get_rank() == on_rank:
            weight = me.model.get_parameter("model.layers.0.mlp.up_proj.weight")
            weight.register_hook(lambda g: g * math.nan if steps[0] == at_step else g)
        return me

    def counted(*args):
        steps[0] += 1
        return rank.train_step(*args)

    train.make_rank, train.train_step = with_poison, counted
    try:
        return train.train(plan, folder), None
    except rank.NotFinite as error:
        return None, str(error)
    finally:
        train.make_rank, train.train_step = make, rank.train_step


@pytest.mark.parametrize("zero", [0, 2])
def test_a_gradient_that_is_not_finite_is_named_and_the_run_stops_or_skips_as_asked(zero, text, tmp_path):
    words = arguments(text, zero=zero, micro_batch=4)
    for log, error in run_ranks(2, poisoned, [*words, "--out", str(tmp_path / "stop")], 1, 3):
        assert log is None
        assert error.startswith("step 3: rank 1: gradient of model.layers.0.mlp.up_proj.weight is not finite;"), error
    skip = [*words, "--out", str(tmp_path / "skip"), "--on-nan", "skip"]
    (log, error), _ = run_ranks(2, poisoned, skip, 1, 3)
    assert error is None
    assert [step for step, (_, norm) in losses(log).items() if not math.isfinite(norm)] == [3]
    assert all(math.isfinite(line["val_loss"]) for line in log if "val_loss" in line)


def test_the_groups_are_those_that_the_picture_shows(text, capsys):
    groups = {
        name: ranks.tolist()
        for name, ranks in mesh.members(dict(zip(mesh.AXES, (2, 2, 2, 1, 2), strict=True)), 2).items()
    }
    assert groups["tp"][2] == [4, 5] and [5, 7] in groups["ring"] and [5, 13] in groups["pp"]
    assert [1, 3, 5, 7] in groups["data"] and [1, 3] in groups["ep"] and [1, 5] in groups["experts"]
    mirrored = mesh.members(dict(zip(mesh.AXES, (4, 1, 1, 1, 1), strict=True)), mirrored=True)
    assert mirrored["data"].tolist() == [[0, 3], [1, 2]] and mirrored["ends"].tolist() == [[0, 3]]
    for name, lines in groups.items():
        if name != "ends":  # the middle of a pipeline is in none of these
            assert sorted(rank for line in lines for rank in line) == list(range(16)), (
                f"{name}: every rank is in exactly one group"
            )
    words = [*arguments(text), *["--pp", "2", "--cp", "2", "--tp", "2", "--experts", "4", "--ep", "2"]]
    shown = train.show_mesh(train.prepare(words, 16), 16)
    assert "pp 2 x dp 2 x ring 2 x ulysses 1 x tp 2 = 16 ranks" in shown
    assert "{1 3 5 7}" in shown and "[12 13] [14 15]" in shown


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
    assert round(counts["smollm-1.7b"] / 1e9, 2) == 1.71
