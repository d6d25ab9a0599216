"""What is resumed goes on bit by bit, in any layout, and never from a checkpoint that is not whole.

test_checkpoint.py has what a checkpoint costs, test_faults.py what may happen to it.
"""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import checkpoint
import generate
import hf
import pytest
import torch
import torch.distributed as dist
import train
from harness.ranks import run_ranks
from harness.reference import assert_same
from llama import Llama
from model import full_shapes
from options import Config, RunEnds, UsageError, merge
from precision_policies import LossScaler
from test_train import SIZES, SMALL, arguments, f64, losses, run, train_on


@pytest.mark.always("2-True")
@pytest.mark.parametrize(("ranks", "tied"), [(1, False), (2, True), (4, False)])
def test_resuming_gives_bit_identical_losses(ranks, tied, text, tmp_path):
    biased = ["--tied", "--experts", "4", "--router", "sigmoid", "--bias-speed", "0.1"]  # the biases are no parameters
    whole = arguments(text, precision="fp32", steps=4, save_every=2, keep=9)
    whole += [*(biased if tied else []), "--out", str(tmp_path / "run")]
    undisturbed, folder = train_on(ranks, whole, tied=tied)
    past = Path(folder) / "log.jsonl"
    past.write_text(past.read_text().replace('"seconds": ', '"seconds": 1000'))
    resumed, same = train_on(ranks, ["--resume", f"{folder}/checkpoints/step-000002"], tied=tied)
    assert same == folder
    names = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000004", "superseded-step-000004"]
    assert checkpoint.find(folder)[2].samples == 4 * 8, "of every rank and micro-batch"
    windows = (len(train.load_corpus(Config(data=text, seq_len=16)).train) - 1) // 16
    samples = [(line["samples"], line["epoch"]) for line in resumed if "loss" in line]
    assert samples == [(n, n / windows) for n in (8, 16, 24, 32)]
    assert min(line["seconds"] for line in resumed if "loss" in line) > 1000, "it goes on, too"
    assert losses(resumed) == losses(undisturbed)  # the floats themselves, not approximately
    assert resumed[-1] == undisturbed[-1]  # the validation at the end sees the same weights
    on_disk = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    assert losses(on_disk) == losses(undisturbed)


@pytest.mark.prove
@pytest.mark.parametrize(("tied", "written_by"), [(False, ""), (True, "--tp 2 --cp 2 --zero 1")])
def test_resuming_in_another_layout_goes_on_with_the_same_losses(tied, written_by, text, tmp_path):
    words = [*arguments(text, keep=9), "--out", str(tmp_path / "run"), *(["--tied"] if tied else [])]
    log, folder = train_on(4, [*words, *written_by.split()], tied=tied)
    for ranks, layout in ((1, "--zero 0 --tp 1 --cp 1"), (2, "--zero 2 --tp 1 --cp 1"), (4, "--zero 0 --tp 4 --cp 1")):
        other, _ = train_on(ranks, ["--resume", f"{folder}/checkpoints/step-000004", *layout.split()], tied=tied)
        for step in range(5, 9):
            got, want = f64(losses(other)[step]), f64(losses(log)[step])
            assert_same(got, want, 1e-9, f"loss and norm of step {step} on {ranks} ranks {layout}")


def validated_as(values, words, sizes):
    with mock.patch.object(train, "validate", lambda *_: values.pop(0)):
        return run(words, sizes)


def test_the_newest_checkpoints_and_the_best_are_kept(text, tmp_path):
    words = [*arguments(text, eval_every=1, save_every=3, keep=2), "--keep-best", "--out", str(tmp_path / "run")]
    values = [1.0, 3.0, 2.0, 4.0, 3.0, 2.5, 5.0, 6.0, 7.0]  # that of step 0 does not count
    _, folder = run_ranks(1, validated_as, values, words, SMALL)[0]
    assert [checkpoint.step_of(path) for path in checkpoint.complete(Path(folder))] == [2, 6, 8]


@pytest.mark.prove
def test_a_resumed_run_knows_the_best_loss_of_before_on_every_rank(text, tmp_path):
    words = [*arguments(text, eval_every=1, save_every=0, keep=2), "--keep-best", "--out", str(tmp_path / "run")]
    values = [1.0, 5.0, 4.0, 2.0, 3.0, 2.0, 2.5, 9.0, 9.0]  # that of step 0 does not count
    _, folder = run_ranks(2, validated_as, values, words, SMALL)[0]
    run_ranks(2, validated_as, [3.0, 9.0], ["--resume", folder, "--steps", "10"], SMALL)
    steps = [checkpoint.step_of(path) for path in checkpoint.complete(Path(folder))]
    assert steps == [3, 8, 10], "3.0 in step 9 is no better than 2.0 in step 3, so nothing is saved"


def evaluated(words, sizes):
    plan = train.prepare(words, dist.get_world_size())
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, **sizes))
    return train.evaluate_alone(train.agree(plan)[0])


@pytest.mark.prove
def test_a_checkpoint_is_validated_alone_in_any_layout_and_nothing_is_written(text, tmp_path):
    log, folder = train_on(2, [*arguments(text), "--out", str(tmp_path / "run")])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for layout in ("--tp 2", "--zero 3"):
        said = run_ranks(2, evaluated, ["--resume", folder, "--evaluate", *layout.split()], SMALL)
        assert said[0].startswith(
            f"step-000008 of {folder}: validation loss {log[-1]['val_loss']:.6f} nats per token ("
        )
    other = Path(text).with_name("other.txt")
    other.write_text("another text altogether. " * 200)
    said = run_ranks(1, evaluated, ["--resume", folder, "--evaluate", "--data", str(other)], SMALL)
    assert float(said[0].split("loss ")[1].split()[0]) > log[-1]["val_loss"], said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    hf.export(folder, str(tmp_path / "exported"))
    said = run_ranks(1, evaluated, [*arguments(text), "--init", str(tmp_path / "exported"), "--evaluate"], SMALL)
    assert f"validation loss {log[-1]['val_loss']:.6f} nats" in said[0], said


def test_an_interrupted_save_leaves_the_last_complete_checkpoint_in_force(text, tmp_path):
    words = arguments(text, steps=2, save_every=1, keep=9)
    log, folder = train_on(1, [*words, "--out", str(tmp_path / "run")])
    path = Path(folder) / "checkpoints"
    (path / "step-000002" / "manifest.json").unlink()  # as if the machine went down before the rename
    (path / "step-000002").rename(path / ".writing-000002")
    assert checkpoint.find(folder)[1].name == "step-000001"
    again, _ = train_on(1, ["--resume", folder])
    assert losses(again) == losses(log)
    assert not list(path.glob(".writing-*"))


@pytest.mark.always("manifest.json")
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json"])
def test_a_truncated_checkpoint_is_passed_over_and_refused_if_it_was_named(file, text, tmp_path, monkeypatch, capsys):
    _, folder = train_on(1, [*arguments(text), "--out", str(tmp_path / "run")])
    monkeypatch.chdir(Path(folder) / "checkpoints")
    assert checkpoint.find("step-000008")[0].resolve() == Path(folder).resolve()
    damaged = Path(folder) / "checkpoints" / "step-000008" / file
    longer = damaged.with_name("__0_0.distcp")
    whole = longer.read_bytes()
    longer.write_bytes(whole + b"0")
    assert f"has {len(whole) + 1} bytes but was written with {len(whole)}" in checkpoint.damage(damaged.parent)
    longer.write_bytes(whole)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    before = (Path(folder) / "log.jsonl").read_bytes()
    with pytest.raises(UsageError) as refusal:
        train.prepare(["--resume", str(damaged.parent)], 1)
    ends = f"; use --resume {folder}, which takes the one before"
    assert file in str(refusal.value) and str(refusal.value).endswith(ends), refusal.value
    assert "\n" not in str(refusal.value)
    plan = train.prepare(["--resume", folder], 1)
    assert plan.resume is not None and plan.resume[2].step == 4
    assert len(plan.messages) == 1 and plan.messages[0].startswith("step-000008 is passed over: "), plan.messages
    assert (Path(folder) / "log.jsonl").read_bytes() == before
    for program in (lambda: generate.load_model(folder, "cpu"), lambda: hf.export(folder, str(tmp_path / "exported"))):
        program()
        assert capsys.readouterr().err.startswith("step-000008 is passed over: step-000008/")


def run_with_a_growing_scale(words, sizes):
    """The loss scale of fp16 grows every third step: it has two states to go on from, the scale and the count."""
    with mock.patch.dict(LossScaler.__init__.__kwdefaults__, growth_interval=3):
        return run(words, sizes)


@pytest.mark.always("bf16-master", "fp16")
@pytest.mark.parametrize("precision", ["bf16-master", "fp16"])
def test_a_resumed_run_in_low_precision_goes_on_bit_by_bit_and_notes_the_same_progress(precision, text, tmp_path):
    words = [*arguments(text, precision=precision, steps=5, keep=9, zero=2), "--out", str(tmp_path / "run")]
    undisturbed, folder = run_ranks(2, run_with_a_growing_scale, words, SMALL)[0]
    saved = Path(folder) / "checkpoints"
    resumed, _ = run_ranks(2, run_with_a_growing_scale, ["--resume", str(saved / "step-000004")], SMALL)[0]
    assert losses(resumed) == losses(undisturbed)
    want, got = (
        dataclasses.asdict(checkpoint.progress_of(saved / f"{name}step-000005")) for name in ("superseded-", "")
    )
    for progress in (want, got):
        progress["config"] = {k: v for k, v in progress["config"].items() if k not in ("out", "resume")}
    assert got == want
    assert precision != "fp16" or (got["loss_scale"], got["good_steps"]) == (2.0**17, 2)


def save_to_a_file(words, folder):
    plan = train.prepare(words, 1)
    model = Llama(SIZES)
    progress = checkpoint.Progress(1, 8, len(plan.corpus.train), dataclasses.asdict(plan.config), {})
    said = []
    saver = checkpoint.Saver(Path(folder), dist.group.WORLD, 2, said.append)
    saver.save({"weights": model.state_dict()}, progress)
    saver.finish()
    failure = saver.failure
    (Path(folder) / "checkpoints").rename(Path(folder) / "file")
    saver.save({"weights": model.state_dict()}, progress)
    saver.pending.result()
    assert not saver.busy(), "until the next save it would have no name"
    saver.finish()
    saver.save({"weights": model.state_dict()}, progress)
    with mock.patch.object(checkpoint, "publish", side_effect=checkpoint.NotShared("")), pytest.raises(RunEnds):
        saver.finish()
    return failure, said, saver.failure


def test_a_checkpoint_that_cannot_be_written_is_told_with_its_reason_until_one_can(text, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where a folder should be")
    [(failure, said, later)] = run_ranks(1, save_to_a_file, arguments(text), str(tmp_path / "run"))
    assert failure == "the checkpoint of step 1 could not be written (rank 0: Not a directory)"
    assert said == [f"{failure}; there is none yet, and the run goes on"] and later == ""
    assert (tmp_path / "run" / "file").read_text() == "a file where a folder should be"
    [path] = checkpoint.complete(tmp_path / "run")
    states = checkpoint.load(path, full_shapes(SIZES), torch.float32)["optimizer"]
    assert len(states) > 0 and not any(states.values()), "moments that nobody has saved"


def test_the_log_of_a_resumed_run_keeps_the_lines_before_its_checkpoint_and_no_half_of_a_line(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join([*lines, '{"step": 2, "lo']))
    train.Logger(tmp_path, Config(), 2, leader=True).file.close()
    assert file.read_text().splitlines() == lines[:2]
    train.Logger(tmp_path, Config(), 0, leader=True).file.close()
    assert file.read_text() == "", "a new run"


def test_a_run_that_began_with_restart_waits_for_nobody_when_it_is_resumed_without():
    stored = dataclasses.asdict(Config(out="run", restart=True))
    assert not merge(stored, {"resume": "run"}, "run").restart
    assert merge(stored, {"resume": "run", "restart": True}, "run").restart
    assert merge({"seq_len": 16}, {"seq_len": 16}, "run").seq_len == 16, "which is no other run"
    assert merge({"tokenizer": "old"}, {"tokenizer": "new"}, "run").tokenizer == "new"
