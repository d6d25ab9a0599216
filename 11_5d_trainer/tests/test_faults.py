"""When something goes wrong: the job ends or recovers in bounded time, and goes on to the losses it would have had.

test_ends.py has a rank that is killed or stuck from outside, and Ctrl-C, test_resume.py a single damaged checkpoint;
`make fuzz` has twenty deaths.
"""

import contextlib
import fcntl
import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import threading
import time
import zlib
from datetime import datetime
from itertools import permutations
from pathlib import Path
from unittest.mock import patch

import paths  # noqa: F401  finds the chapters below
import checkpoint
import fuzz
import generate
import hf
import pytest
import step as step_module
import torch.distributed as dist
import train
from harness.programs import error_from
from harness.ranks import RankFailure, run_ranks
from options import RunEnds, UsageError
from train import Stop


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """Losses and norms of twelve steps on two ranks, ZeRO stage 1, in which nothing happens."""
    words = [*fuzz.kill_options(text), "--out", str(tmp_path_factory.mktemp("undisturbed") / "run")]
    return fuzz.losses(run_ranks(2, fuzz.run, words)[0])


def names(folder):
    return [path.name for path in checkpoint.complete(folder)]


# ------------------------------------------------------------------------------------------------ killed and stuck


@pytest.mark.prove
@pytest.mark.parametrize("seed", [1, 2], ids=[fuzz.ENDS[1], fuzz.ENDS[2]])
def test_a_rank_that_dies_at_a_random_step_ends_the_job_and_the_same_command_recovers(
    seed, text, undisturbed, tmp_path
):
    done = fuzz.kill_and_go_on(seed, text, tmp_path / "run", undisturbed)
    assert fuzz.ENDS[seed] in done


PHASES = {  # what is under way -> the function in which a rank is killed, its call, and which ranks call it
    "a validation": ("train", "validate", 3, (0, 1)),
    "a vote": ("train", "any_rank", 8, (0, 1)),
    "a share of the state is put together": ("train", "share_of_state", 2, (0, 1)),
    "files are written": ("torch.distributed.checkpoint", "save", 2, (0, 1)),
    "a checkpoint gets its name": ("checkpoint", "publish", 2, (0,)),
}


def killed_inside(words, module, name, call, who):
    """Train; rank `who` is killed when it calls this function for the `call`-th time."""
    module = importlib.import_module(module)
    plain, calls = getattr(module, name), [0]

    def deadly(*args, **more):
        calls[0] += 1
        if dist.get_rank() == who and calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **more)

    with patch.object(module, name, deadly):
        fuzz.run(words)


def dies(words, who, *where):
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, killed_inside, words, *where, who, timeout=120)
    assert (failure.value.kind, failure.value.ranks) == ("killed", [who]), failure.value


@pytest.mark.prove
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_may_die_in_any_phase_of_a_run_and_the_same_command_recovers(phase, text, undisturbed, tmp_path):
    *where, ranks = PHASES[phase]
    for who in ranks:
        folder = tmp_path / str(who)
        words = [*fuzz.kill_options(text), "--eval-every", "2", "--out", str(folder), "--restart"]
        dies(words, who, *where)
        assert not any(checkpoint.damage(path, contents=True) for path in checkpoint.complete(folder))
        assert fuzz.losses(run_ranks(2, fuzz.run, words)[0]) == undisturbed, f"rank {who}"
        assert names(folder) == ["step-000009", "step-000012"]
        assert not list((folder / "checkpoints").glob(".writing-*"))


@pytest.mark.prove
@pytest.mark.parametrize("where", ["load_full_state", "make_trainer"])
def test_a_rank_may_die_while_a_run_goes_on_in_another_layout_and_the_checkpoint_is_as_it_was(
    where, text, undisturbed, tmp_path
):
    folder = tmp_path / "run"
    words = [*fuzz.kill_options(text), "--out", str(folder), "--restart"]
    dies(words, 1, "train", "train_step", 8)
    there = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    assert names(folder)[0] == "step-000003"
    for who in (0, 1):
        dies([*words, "--zero", "3"], who, "train", where, 1)
        assert {p: p.read_bytes() for p in (folder / "checkpoints").rglob("*") if p.is_file()} == there
    again = fuzz.losses(run_ranks(2, fuzz.run, [*words, "--zero", "3"])[0])
    for step, want in undisturbed.items():
        assert all(math.isclose(*pair, rel_tol=1e-9) for pair in zip(again[step], want, strict=True)), f"step {step}"


def stuck(words, who, step):
    """Train; rank `who` falls asleep in a step. Raises with the seconds until this rank noticed."""
    begin = []

    def look(number, me):
        begin.append(time.monotonic())
        if dist.get_rank() == who and number == step:
            time.sleep(60)

    try:
        with fuzz.before_each_step(look):
            fuzz.run(words)
    except RuntimeError as error:
        raise AssertionError(f"noticed after {time.monotonic() - begin[-1]:.0f} s: {error}") from error


@pytest.mark.prove
def test_a_rank_that_is_stuck_ends_the_others_after_the_timeout(text, tmp_path):
    words = [*fuzz.options(text, "--pp 2", timeout=3), "--out", str(tmp_path / "run")]
    with pytest.raises(RankFailure, match=r"noticed after \d s: .*(?i:timed out|timeout)") as failure:
        run_ranks(2, stuck, words, 1, 3, timeout=50)
    assert failure.value.ranks == [0]


# ------------------------------------------------------------------------------------------------ checkpoints


def with_a_full_disk(words, who, first, last):
    """Train; while these checkpoints are written, the system lets rank `who` write no file of more than 2000 bytes.
    Returns the losses, what ended the run, and what was said."""
    save, saves, say, said = checkpoint.Saver.save, [0], train.Logger.say, []

    def limited(self, *args):
        self.finish()
        saves[0] += 1
        if dist.get_rank() == who:
            most = 2000 if first <= saves[0] <= last else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        save(self, *args)

    def heard(self, text):
        said.append(text)
        say(self, text)

    with patch.object(checkpoint.Saver, "save", limited), patch.object(train.Logger, "say", heard):
        try:
            return fuzz.losses(fuzz.run(words)), "", said
        except RunEnds as error:
            return {}, str(error), said
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.prove
@pytest.mark.parametrize("who", [0, 1])
def test_a_disk_that_is_full_costs_that_checkpoint_and_not_the_run(who, text, undisturbed, tmp_path):
    words = [*fuzz.kill_options(text), "--out", str(tmp_path / "run"), "--restart"]
    (losses, ended, said), _ = run_ranks(2, with_a_full_disk, words, who, 2, 2)
    assert losses == undisturbed and not ended
    failure = f"the checkpoint of step 6 could not be written (rank {who}: "
    [told] = [line for line in said if failure in line]
    assert told.endswith("); step-000003 stays the newest, and the run goes on") and "\n" not in told, told
    assert (f"{tmp_path}/run/log.jsonl cannot be written (File too large); the run goes on without" in said) == (
        not who
    )
    assert names(tmp_path / "run") == ["step-000009", "step-000012"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".writing-*"))


@pytest.mark.prove
def test_a_last_checkpoint_that_cannot_be_written_ends_the_run_in_one_line_and_the_one_before_is_gone_on_from(
    text, undisturbed, tmp_path
):
    words = [*fuzz.kill_options(text), "--out", str(tmp_path / "run"), "--restart"]
    (_, ended, _), (_, again, _) = run_ranks(2, with_a_full_disk, words, 1, 2, 9)
    assert ended == again and ended.startswith("the checkpoint of step 12 could not be written (rank 1: ")
    assert "\n" not in ended and ended.endswith(f"make room: --resume {tmp_path}/run does its steps again"), ended
    assert names(tmp_path / "run") == ["step-000003"]
    assert fuzz.losses(run_ranks(2, fuzz.run, words)[0]) == undisturbed


def damage(folder, name, file, how):
    path = folder / "checkpoints" / name / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-100] if how == "truncated" else whole[:900] + bytes([whole[900] ^ 1]) + whole[901:])


@pytest.mark.prove
def test_of_several_damaged_checkpoints_each_is_passed_over_with_its_reason(text, undisturbed, tmp_path):
    words = [*fuzz.kill_options(text), "--keep", "9", "--out", str(tmp_path / "run")]
    run_ranks(2, fuzz.run, words)
    folder = tmp_path / "run"
    damage(folder, "step-000012", "__1_0.distcp", "truncated")
    damage(folder, "step-000009", "__0_0.distcp", "corrupted")
    (folder / "checkpoints" / "step-000006" / ".metadata").unlink()
    plans = run_ranks(2, agreed, ["--resume", str(folder)])
    assert [step for step, _ in plans] == [3, 3]
    first, second, third = plans[0][1]
    assert first.startswith("step-000012 is passed over: step-000012/__1_0.distcp has "), first
    assert second.startswith("step-000009 is passed over: step-000009/__0_0.distcp has not the contents"), second
    assert third.startswith("step-000006 is passed over: step-000006/.metadata has 0 bytes but was written"), third
    assert fuzz.losses(run_ranks(2, fuzz.run, ["--resume", str(folder)])[0]) == undisturbed


def agreed(words):
    plan, _ = train.agree(train.prepare(words, dist.get_world_size()))
    return plan.resume[2].step, plan.messages


def refused(words):
    return error_from(UsageError, agreed, words)


def test_a_damaged_checkpoint_gives_way_and_when_none_is_whole_the_run_ends_in_one_line(text, tmp_path):
    words = [*fuzz.options(text, "", steps=3, save_every=1, keep=9), "--out", str(tmp_path / "run")]
    run_ranks(1, fuzz.run, words)
    damage(tmp_path / "run", "step-000003", "__0_0.distcp", "corrupted")
    [(step, _)] = run_ranks(1, agreed, ["--resume", str(tmp_path / "run"), "--steps", "4"])
    assert step == 2, "the run goes on where the checkpoint before was written"
    for name in ("step-000002", "step-000001"):
        damage(tmp_path / "run", name, "__0_0.distcp", "corrupted")
    [said] = run_ranks(1, refused, ["--resume", str(tmp_path / "run"), "--steps", "4"])
    assert re.match(r"--resume .*: no checkpoint is whole: step-000003 is ", said), said


@pytest.mark.prove
def test_ranks_that_see_different_checkpoints_end_in_one_line(text, tmp_path):
    words = [*fuzz.options(text, "", steps=2), "--out", str(tmp_path / "run")]
    run_ranks(2, fuzz.run, words)
    folders = [str(tmp_path / "run"), str(tmp_path / "of another node")]
    for said in run_ranks(2, refused_in_own_folders, words[:-1], folders):
        assert re.match(r"--resume: rank 0 sees .*step-000002 and rank 1 sees no check", said), said


def refused_in_own_folders(words, folders):
    return refused([*words, folders[dist.get_rank()], "--restart", "--steps", "4"])


def read_again(words):
    """Train; returns the names of the files whose contents this rank has read for a checksum."""
    plain, read = checkpoint.checksum, []
    with patch.object(checkpoint, "checksum", lambda path: (read.append(path.name), plain(path))[1]):
        fuzz.run(words)
    return read


@pytest.mark.prove
def test_each_rank_sums_up_the_files_it_wrote_and_checks_a_part_of_them_when_the_run_goes_on(text, tmp_path):
    """One rank for all would need minutes for a large model, and longer than the others wait."""
    words = [*fuzz.options(text, "", steps=2, save_every=0), "--out", str(tmp_path / "run")]
    assert run_ranks(2, read_again, words) == [["__0_0.distcp", ".metadata"], ["__1_0.distcp"]]
    first, second = run_ranks(2, read_again, ["--resume", str(tmp_path / "run"), "--steps", "4"])
    assert first == [".metadata", "__1_0.distcp", "__0_0.distcp", ".metadata"]
    assert second == ["__0_0.distcp", "__1_0.distcp"]


def test_a_file_of_another_node_is_waited_for_and_if_it_never_comes_there_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LAG", 1.0)
    writing = tmp_path / "checkpoints" / ".writing-000002"
    writing.mkdir(parents=True)
    (writing / ".metadata").write_bytes(b"contents")
    progress, files = checkpoint.Progress(2, 8, 100, {}, {}), {"__1_0.distcp": [5, 0]}
    with pytest.raises(checkpoint.NotShared, match="__1_0.distcp, which rank 1 has written, .* all nodes share, and"):
        checkpoint.publish(writing, progress, dict(files), 2)
    assert names(tmp_path) == []
    later = threading.Timer(0.3, (writing / "__1_0.distcp").write_bytes, [b"whole"])
    later.start()
    checkpoint.publish(writing, progress, dict(files), 2)
    assert names(tmp_path) == ["step-000002"]
    assert checkpoint.damage(checkpoint.complete(tmp_path)[0]) == ""


def test_a_checksum_is_that_of_all_bytes_of_a_file(tmp_path):
    contents = b"weights" * 2**22
    (tmp_path / "file").write_bytes(contents)
    assert checkpoint.checksum(tmp_path / "file") == zlib.crc32(contents)


@pytest.mark.prove
def test_a_run_that_died_before_its_first_checkpoint_leaves_no_line_in_the_log_of_the_next(text, tmp_path):
    words = [*fuzz.options(text, "", steps=2), "--out", str(tmp_path / "run"), "--restart"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text(json.dumps({"step": 0, "val_loss": 99.0}) + "\n")
    [log] = run_ranks(1, fuzz.run, words)
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert logged == log and [line["step"] for line in logged if "val_loss" in line] == [0, 2]


def published(folder, step, loss=None, keep=1, keep_best=False):
    writing = folder / "checkpoints" / f".writing-{step:06d}"
    writing.mkdir(parents=True)
    for file in (".metadata", "__0_0.distcp"):
        (writing / file).write_bytes(b"contents" * 200)
    files = {"__0_0.distcp": checkpoint.entry(writing / "__0_0.distcp")}
    checkpoint.publish(writing, checkpoint.Progress(step, 8, 100, {}, {}, val_loss=loss), files, keep, keep_best)


def whole(folder):
    return [path.name for path in checkpoint.complete(folder) if not checkpoint.damage(path, contents=True)]


def test_the_newest_and_the_best_are_by_their_steps_and_finite_losses_and_every_file_is_checked(tmp_path):
    for losses in permutations((math.nan, 2.0, 3.0, None)):
        run = tmp_path / str(losses)
        for step, loss in enumerate(losses, 999_998):  # whose names do not sort
            published(run, step, loss, keep=2, keep_best=True)
        best, left = losses.index(2.0), [checkpoint.step_of(path) - 999_998 for path in checkpoint.complete(run)]
        assert left == sorted({best, 2, 3}), f"{losses}: {left} are left"
        assert checkpoint.find(str(run))[1].name == "step-1000001"
        assert checkpoint.step_of(checkpoint.find(f"{run}/best")[1]) == 999_998 + best, losses
    for step in (8, 9):
        published(tmp_path / "equal", step, 2.0, keep=2)
    assert checkpoint.best_of(tmp_path / "equal").name == "step-000008", "of equal ones the first"
    (tmp_path / "equal" / "checkpoints" / "step-000009" / "manifest.json").write_text("{}")
    assert checkpoint.best_of(tmp_path / "equal").name == "step-000008", "a damaged manifest ends nothing"
    for step, file, how in ((1_000_001, ".metadata", "truncated"), (1_000_000, "__0_0.distcp", "truncated")):
        assert checkpoint.find(str(run))[1].name == f"step-{step}"
        damage(run, f"step-{step}", file, how)
    shutil.copytree(run / "checkpoints" / "step-1000001", run / "checkpoints" / "step-1000001-good")  # a user's own
    published(run, 1_000_002)
    for file in (".metadata", "__0_0.distcp"):
        assert whole(run) == ["step-1000002"]
        damage(run, "step-1000002", file, "corrupted")
        assert whole(run) == []
        damage(run, "step-1000002", file, "corrupted")  # the same bit again
    damage(run, "step-1000002", ".metadata", "truncated")
    with pytest.raises(
        UsageError, match="/.metadata has 1500 bytes but was written with 1600; there is no other check"
    ):
        checkpoint.find(str(run))
    assert checkpoint.in_a_line(ValueError("first\nlast")) == "ValueError: last"


def evaluated_while_it_goes(words):
    plan, _ = train.agree(train.prepare(words, dist.get_world_size()))
    shutil.rmtree(plan.resume[1])
    with pytest.raises(RunEnds, match="step-000001 is not there any more: the run goes on and has removed it; try ag"):
        train.evaluate_alone(plan)


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_next(text, tmp_path, monkeypatch):
    run = f"{tmp_path}/run"
    words = fuzz.options(text, "--experts 4 --capacity 1", steps=3, save_every=1, keep=9)
    run_ranks(1, fuzz.run, [*words, "--out", run])
    load, left = checkpoint.load, []

    def removed(path, *args):
        if left:
            shutil.rmtree(left.pop())
        return load(path, *args)

    monkeypatch.setattr(checkpoint, "load", removed)
    left.append(checkpoint.complete(tmp_path / "run")[-1])
    model, _, name, _ = generate.load_model(run, "cpu")
    assert name == "step-000002"
    assert all(layer.config.capacity is None for layer in step_module.moe_layers(model)), "a prompt keeps its tokens"
    left.append(checkpoint.complete(tmp_path / "run")[-1])
    assert hf.export(run, f"{tmp_path}/model") == "step-000001"
    run_ranks(1, evaluated_while_it_goes, ["--resume", run, "--evaluate"])


RAISING = {  # what the system refuses -> whether the new checkpoint is complete nevertheless
    ("shutil", "rmtree"): True,  # as for a file that is still open on NFS
    ("pathlib.Path", "unlink"): True,
    ("os", "replace"): False,
    ("json", "dump"): False,
}


@pytest.mark.parametrize(("what", "there"), RAISING.items(), ids=[".".join(names) for names in RAISING])
def test_whatever_the_system_refuses_while_a_checkpoint_gets_its_name_one_is_complete(what, there, tmp_path):
    def refused(*args, ignore_errors=False, **more):
        if not ignore_errors:
            raise OSError(28, "No space left on device")

    published(tmp_path, 1)
    with patch(".".join(what), refused), contextlib.nullcontext() if there else pytest.raises(OSError):
        published(tmp_path, 2)
    assert whole(tmp_path)[-1] == ("step-000002" if there else "step-000001")
    assert checkpoint.complete(tmp_path)[-1].name == whole(tmp_path)[-1], "half a manifest makes no checkpoint"
    for leftover in (tmp_path / "checkpoints").glob(".writing-*"):
        shutil.rmtree(leftover)
    for name in ("step-000003", "superseded-step-000003"):  # what is left of one that was removed, and of one before
        (tmp_path / "checkpoints" / name / "more").mkdir(parents=True)
    published(tmp_path, 3)
    assert whole(tmp_path)[-1] == "step-000003"


# ------------------------------------------------------------------------------------------------ two jobs


def held_by_another(words, folder):
    """What a job says that begins while another one has the folder."""
    with (Path(folder) / "lock").open("a+") as file:  # another open file is another holder, in this process too
        fcntl.flock(file, fcntl.LOCK_EX)
        return refused(words)


def test_two_jobs_do_not_write_into_one_folder(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.1)
    monkeypatch.setattr(checkpoint, "LEASE", 0.2)
    words = [*fuzz.options(text, "", steps=2), "--out", str(tmp_path / "run")]
    lock = checkpoint.hold(fuzz.train.new_folder(str(tmp_path / "run")))
    one_line = f"{tmp_path}/run is being written by process {os.getpid()} on .*; wait for its end, or give this run an"
    with pytest.raises(UsageError, match=one_line):  # alike on every rank, before they connect
        train.prepare(words, 2)
    assert not capsys.readouterr().err
    with pytest.raises(UsageError, match=one_line):
        train.prepare([*words, "--restart"], 2)
    assert capsys.readouterr().err.endswith("; --restart waits 0.2 s, in case its machine is gone\n")
    with pytest.raises(UsageError, match=one_line):
        checkpoint.hold(tmp_path / "run")
    lock.close()
    with checkpoint.hold(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "lock").read_text().count("\n") == 1, "who held it before is gone"
    [said] = run_ranks(1, held_by_another, words, str(tmp_path / "run"))  # it came between looking and writing
    assert "/run is being written by " in said
    with patch.object(fcntl, "flock", side_effect=OSError(37, "No locks available")):  # of such a file system
        checkpoint.hold(tmp_path / "run").close()
        assert not checkpoint.check_free(tmp_path / "run")


@pytest.mark.parametrize("ends", ["while this one waits", "while this one reads its data"])
def test_a_job_that_waits_for_another_goes_on_from_what_that_one_has_written_last(ends, text, tmp_path, monkeypatch):
    words = [*fuzz.options(text, "", steps=2), "--out", str(tmp_path / "run"), "--restart"]
    run_ranks(1, fuzz.run, words)
    [last] = checkpoint.complete(tmp_path / "run")
    hidden = last.rename(last.with_name(".writing-000002"))
    lock = checkpoint.hold(tmp_path / "run")

    def end():
        if hidden.exists():
            hidden.rename(last)
            lock.close()

    with monkeypatch.context() as other:
        if ends == "while this one waits":
            other.setattr(checkpoint.time, "sleep", lambda seconds: end())
        else:
            read = train.read_data
            other.setattr(train, "read_data", lambda *given: (end(), read(*given))[1])
        resumed = train.prepare([*words, "--steps", "4"], 1).resume
    assert resumed and resumed[1] == last
    monkeypatch.setattr(checkpoint.socket, "gethostname", lambda: os.stat("no such file"))  # as if the disk were full
    with pytest.raises(UsageError, match="run cannot be written to"):
        checkpoint.hold(tmp_path / "run")


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "datetime", type("Still", (), {"now": lambda: datetime(2026, 1, 1)}))
    assert [str(train.new_folder("")) for _ in range(2)] == ["runs/20260101-000000", "runs/20260101-000000-2"]


# ------------------------------------------------------------------------------------------------ signals


def signalled(words, who, step, number):
    """Train as the command does; the signal reaches rank `who` alone in `step`. Returns the last step and the vote."""
    stop, steps = Stop(), []

    def look(at, me):
        steps.append(at)
        if dist.get_rank() == who and at == step:
            os.kill(os.getpid(), number)

    before = signal.signal(number, stop)
    try:
        with fuzz.before_each_step(look):
            plan, folder = train.agree(train.prepare(words, dist.get_world_size()))
            train.train(plan, folder, stop)
    finally:
        signal.signal(number, before)
    return steps[-1], stop.asked


@pytest.mark.always("SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_to_one_rank_makes_all_write_a_checkpoint_of_that_step_and_stop(number, text, tmp_path):
    words = [*fuzz.options(text, "--tp 2", steps=5, micro_batch=8), "--out", str(tmp_path / "run")]
    assert run_ranks(2, signalled, words, 1, 3, number) == [(3, False), (3, True)]
    assert names(tmp_path / "run") == ["step-000003"]
    logged = [json.loads(line)["step"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert logged == [0, 1, 2, 3]


@pytest.mark.prove
def test_a_signal_in_the_last_step_stops_nothing(text, tmp_path):
    words = [*fuzz.options(text, "", steps=3, save_every=0), "--out", str(tmp_path / "run")]
    assert run_ranks(2, signalled, words, 1, 3, signal.SIGTERM) == [(3, False), (3, True)]
    assert (tmp_path / "run" / "loss.svg").exists(), "the run has not ended as one that nobody disturbed"


# ------------------------------------------------------------------------------------------------ not a number


def counts_of_a_step_that_is_left_out(words):
    me, next_batches = fuzz.made(words, fuzz.SIZES)
    batches = next_batches()
    next(me.model.parameters()).register_hook(lambda g: g * math.nan)
    _, norm = step_module.train_step(me, batches)
    counts = [[layer.step_counts.sum().item() for layer in step_module.moe_layers(me.model)]]
    said = [step_module.who_is_not_finite(me, batches)]
    me.model.lm_head.weight.data.fill_(math.nan)
    said.append(step_module.who_is_not_finite(me, batches))
    assert [line.endswith(", from a loss that is not finite") for line in said] == [False, True], said
    return norm, [*counts, [layer.step_counts.sum().item() for layer in step_module.moe_layers(me.model)]]


def test_a_step_that_is_left_out_moves_no_experts_bias_later(text):
    words = [*fuzz.options(text, "--experts 4 --router sigmoid --bias-speed 0.01"), "--on-nan", "skip"]
    [(norm, counts)] = run_ranks(1, counts_of_a_step_that_is_left_out, words)
    assert math.isnan(norm) and counts[0] and not any(map(any, counts)), counts


def poisoned(words, step, layer, holder=0):
    """Train; in `step` the gradient of a layer is NaN on `holder`. Returns the steps left out, or what ends the run."""

    def hook(model):
        weight = model.get_parameter(f"model.layers.{layer}.input_layernorm.weight")
        return weight.register_hook(lambda g: g * math.nan)

    try:
        with fuzz.poisoned(holder, step, hook):
            log = fuzz.run(words)
    except step_module.NotFinite as error:
        return str(error)
    return [line["step"] for line in log if "loss" in line and not math.isfinite(line["grad_norm"])]


LAYOUTS = [  # (layout, the rank that holds layer 3 first, --on-nan)
    ("--tp 2 --sequence-parallel --zero 1", 0, "stop"),
    ("--pp 2 --zero 2", 2, "stop"),
    ("--cp 2 --cp-kind ring --experts 4 --ep 2 --zero 3", 0, "skip"),
    ("--tp 2 --zero 1 --precision bf16-master --accumulate-dtype fp32", 0, "stop"),  # p.grad is empty by then
    ("--pp 2 --zero 1 --precision fp16 --loss-scale 1", 2, "stop"),  # no smaller scale is left to try
]


def poisoned_in_turn(lines, holders):
    return [poisoned(words, 2, 3, holder) for words, holder in zip(lines, holders, strict=True)]


@pytest.mark.prove
def test_a_gradient_that_is_not_a_number_is_traced_to_its_rank_layer_and_step_in_every_kind_of_layout(text, tmp_path):
    lines = [
        [*fuzz.options(text, f"{layout} --micro-batch 1", steps=3), "--on-nan", action, "--out", str(tmp_path / str(i))]
        for i, (layout, _, action) in enumerate(LAYOUTS)
    ]
    for said in run_ranks(4, poisoned_in_turn, lines, [holder for _, holder, _ in LAYOUTS], timeout=120):
        for (layout, holder, action), outcome in zip(LAYOUTS, said, strict=True):
            where = f"step 2: rank {holder}: gradient of model.layers.3.input_layernorm.weight is not finite; the "
            if action == "stop":
                assert isinstance(outcome, str) and outcome.startswith(where), f"{layout}: {outcome}"
            else:
                assert outcome == [2], f"{layout}: steps {outcome} were left out"


def with_a_broken_validation(words):
    with patch.object(train, "validate", lambda *_: math.nan):
        try:
            return [line["step"] for line in fuzz.run(words) if "val_loss" in line]
        except step_module.NotFinite as error:
            return str(error)


def test_a_validation_that_is_not_finite_stops_the_run_unless_it_is_to_go_on(text, tmp_path):
    words = [*fuzz.options(text, "", steps=2), "--out", str(tmp_path / "run")]
    said = run_ranks(1, with_a_broken_validation, words)
    assert said == ["step 0: the validation loss is nan, though the weights are finite"]
    assert run_ranks(1, with_a_broken_validation, [*words, "--on-nan", "skip", "--restart"]) == [[0, 2]]


def test_weights_after_a_step_that_was_left_out_are_those_before_it(text, tmp_path):
    words = [*fuzz.options(text, "--zero 2", steps=4, eval_every=1), "--on-nan", "skip"]
    assert run_ranks(2, poisoned, [*words, "--out", str(tmp_path / "run")], 3, 1) == [[3], [3]]
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["val_loss"] for line in logged if "val_loss" in line]
    assert losses[3] == losses[2] and len({*losses}) == 4, losses


@pytest.mark.prove
@pytest.mark.parametrize("zero", [0, 2])
def test_a_checkpoint_from_before_the_first_step_that_was_taken_is_one_to_go_on_from(zero, text, tmp_path):
    words = [*fuzz.options(text, f"--zero {zero}", steps=3, save_every=1), "--keep", "9", "--on-nan", "skip"]
    assert run_ranks(2, poisoned, [*words, "--out", str(tmp_path / "run")], 1, 1) == [[1], [1]]
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    first = tmp_path / "run" / "checkpoints" / "step-000001"
    again = run_ranks(2, fuzz.run, ["--resume", str(first)])[0]
    assert [fuzz.losses(again)[step] for step in (2, 3)] == [fuzz.losses(logged)[step] for step in (2, 3)]
