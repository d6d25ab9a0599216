"""How a run ends: in one line if an option is wrong, by Ctrl-C, because a rank died, or because a gradient did."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest import mock

import checkpoint
import data
import fuzz
import pytest
import torch.distributed as dist
import train
from harness.ranks import run_ranks
from options import Config
from test_train import SIZES, arguments, losses

HERE = Path(__file__).resolve().parents[1]

# ------------------------------------------------------------------------- bad input: test_bad_input.py has the rest


def command(words, rank=0, world_size=1, port=0, **more):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    environment |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | more
    return subprocess.Popen([sys.executable, str(HERE / "train.py"), *words], env=environment, **pipes)


@pytest.mark.prove
def test_the_command_ends_with_code_2_and_exactly_one_line():
    process = command(["--stepz", "3"])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (out, err) == ("", "train.py: unrecognized arguments: --stepz 3; --help lists the options\n")
    second = command(["--stepz", "3"], rank=1, world_size=2)
    assert second.communicate(timeout=60) == ("", "") and second.returncode == 2


@pytest.mark.prove
def test_a_run_goes_on_when_nothing_can_be_printed_any_more(text, tmp_path):
    with open("/dev/full", "w") as full:
        words = [*arguments(text, steps=2, micro_batch=8), "--out", str(tmp_path / "run")]
        process = command(words, port=free_port(), stdout=full)
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    assert checkpoint.find(str(tmp_path / "run"))[2].step == 2


# ------------------------------------------------------------------------------------------- the end of a job


def free_port():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return store.port


def start(text, folder, timeout, ranks=2):
    """A long run on some processes, once its first checkpoint is there."""
    port = free_port()
    more = dict(steps=100_000, save_every=3, timeout=timeout, global_batch=4 * ranks)
    words = [*arguments(text, **more), "--out", str(folder)]
    processes = [command(words, rank, ranks, port) for rank in range(ranks)]
    deadline = time.monotonic() + 60 * float(os.environ.get("RANKS_UNIT", "1"))
    while not checkpoint.complete(folder):
        if time.monotonic() > deadline or processes[0].poll() is not None:
            for process in processes:
                process.kill()
            pytest.fail(f"the run did not start: {processes[0].communicate()[1]}")
        time.sleep(0.1)
    return processes


def finish(processes, seconds):
    """Exit codes and what was said, once all have ended; fails if one is still running after `seconds`."""
    try:
        return [(p.communicate(timeout=seconds)[1], p.returncode) for p in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.prove
def test_ctrl_c_leaves_the_last_complete_checkpoint_usable(text, tmp_path):
    processes = start(text, tmp_path / "run", timeout=60)
    for process in processes:
        process.send_signal(signal.SIGINT)
    ended = finish(processes, 60)
    assert [code for _, code in ended] == [130, 130]
    assert "go on with --resume" in ended[0][0] and "Traceback" not in ended[0][0]
    plan = train.prepare(["--resume", str(tmp_path / "run")], 2)
    # Not the last one of those every third step: one was written before the run ended.
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert plan.resume is not None and plan.resume[2].step == logged[-1]["step"] >= 3


@pytest.mark.prove
@pytest.mark.parametrize(
    ("how", "who"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGKILL, 0), (signal.SIGSTOP, 0)]
)
def test_a_dead_or_stuck_rank_ends_the_others_in_bounded_time_and_one_line(how, who, text, tmp_path):
    processes = start(text, tmp_path / "run", timeout=10, ranks=3)  # also how long one waits for the others to start
    processes[who].send_signal(how)
    others = [process for rank, process in enumerate(processes) if rank != who]
    try:
        ended = finish(others, 60)
    finally:
        processes[who].kill()
        processes[who].communicate()
    assert [code for _, code in ended] == [4, 4]
    said = "".join(said for said, _ in ended).splitlines()
    if (how, who) == (signal.SIGKILL, 0):  # it has the store in which they find one another, and torchrun names it
        assert not said
    else:
        assert len(said) == 1, said
        speaker, which = ("1", "0, and perhaps more") if who == 0 else ("0", "1(, 2)?")  # 2 may have waited for 0 only
        words = rf"train.py: rank {speaker} has waited in \w+ \(\w+\.py:\d+\) for ranks that do not answer, "
        assert re.match(rf"{words}stuck or dead: {which} \(", said[0]), said
    assert checkpoint.find(str(tmp_path / "run"))[2].step >= 3


def poisoned(words, on_rank, at_step):
    """How a run ends in which one rank has NaN in one step: the code, the lines that are said, and the log."""
    plan = dataclasses.replace(train.prepare(words, dist.get_world_size()), model=SIZES)
    plan, folder = train.agree(plan)
    said = io.StringIO()

    def hook(model):
        layer = model.get_submodule("model.layers.0.mlp.up_proj")  # earlier layers get it too
        return layer.register_full_backward_pre_hook(lambda _, g: (g[0] * math.nan,))

    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said), fuzz.poisoned(on_rank, at_step, hook):
        code = train.run_to_its_end(plan, folder, train.Stop())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return code, [line for line in said.getvalue().splitlines() if re.search("^train.py: |step left out", line)], log


@pytest.mark.always("2")
@pytest.mark.parametrize("zero", [0, 2])
def test_a_gradient_that_is_not_finite_is_named_and_the_run_stops_or_skips_as_asked(zero, text, tmp_path):
    words = arguments(text, zero=zero, micro_batch=4, save_every=2, steps=4)
    ended = run_ranks(2, poisoned, [*words, "--out", str(tmp_path / "stop")], 1, 3)
    assert [code for code, *_ in ended] == [3, 3]
    [line], others = ended[0][1], ended[1][1]  # one line in all
    what = "step 3: rank 1: gradient of model.layers.0.mlp.up_proj.weight is not finite; "
    assert line == f"train.py: {what}the weights are those of step 2; --on-nan skip leaves such steps out"
    assert not others
    assert [path.name for path in checkpoint.complete(tmp_path / "stop")] == ["step-000002"], "what was being saved"
    skip = [*words, "--out", str(tmp_path / "skip"), "--on-nan", "skip"]
    (code, said, log), _ = run_ranks(2, poisoned, skip, 1, 3)
    assert (code, said) == (0, [f"{what}step left out"])
    assert [step for step, (_, norm) in losses(log).items() if not math.isfinite(norm)] == [3]
    assert all(math.isfinite(line["val_loss"]) for line in log if "val_loss" in line)


def ended(runs):
    """Codes and errors of runs that a rank ends by itself. Few of their tokens are looked at before (SCAN)."""
    for words in runs:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            with mock.patch.object(data, "SCAN", 1):
                plan, folder = train.agree(train.prepare(words, dist.get_world_size()))
            yield train.run_to_its_end(plan, folder, train.Stop()), said.getvalue()


def list_of_ended(runs):
    return [*ended(runs)]


def test_fp8_that_diverges_and_an_unknown_token_end_a_run_in_one_line(text, tmp_path):
    ids = tmp_path / "ids.bin"
    ids.write_bytes(bytes([1, 0] * 10 + [2, 0] + [1, 0] * 3000))
    runs = [arguments(text, precision="fp8-row", lr=1e30, micro_batch=8)]
    runs += [arguments(str(ids), vocab_size=2, micro_batch=8, steps=50)]
    runs = [[*words, "--out", str(tmp_path / str(i))] for i, words in enumerate(runs)]
    [endings] = run_ranks(1, list_of_ended, runs)
    lines = ["fp8: .* has an infinity or NaN, .*", "token id 2 of the data is beyond the vocabulary of 2"]
    for (code, said), line in zip(endings, lines, strict=True):
        assert code == 3 and re.fullmatch(rf"train.py: rank 0: {line}\n", said), said


def test_a_run_that_was_stopped_early_ends_with_130_on_every_rank_and_one_says_how_to_go_on(monkeypatch, capsys):
    plan = types.SimpleNamespace(config=Config(steps=5))
    for done, rank, code, said in ((5, 0, 0, ""), (3, 1, 130, ""), (3, 0, 130, "\nstopped; go on with --resume run\n")):
        monkeypatch.setattr(train.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(train, "train", lambda *_, done=done: [{"step": 1}, {"step": done}])
        assert train.run_to_its_end(plan, Path("run"), train.Stop()) == code
        assert capsys.readouterr().err == said
    stop, at_once = train.Stop(), mock.Mock()
    monkeypatch.setattr(train.os, "_exit", at_once)
    assert [(stop(number, None), at_once.call_count)[1] for number in (2, 15, 2)] == [0, 0, 1], "the second Ctrl-C"


@pytest.mark.parametrize("evaluate", [False, True])
def test_a_rank_that_meets_no_other_ends_in_one_line_and_a_validation_at_a_signal(evaluate, monkeypatch, capsys):
    handlers, asked = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}, []

    def alone(*_):
        asked.extend(signal.getsignal(number) for number in handlers)
        raise dist.DistNetworkError("nobody answers\nC++ CapturedTraceback:")

    plan = types.SimpleNamespace(config=Config(evaluate=evaluate), device=None)
    monkeypatch.setattr(train, "prepare", lambda *_: plan)
    monkeypatch.setattr(train, "connect", alone)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "there"), ("MASTER_PORT", "7")):
        monkeypatch.setenv(name, value)
    try:
        assert train.main() == 4
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == "train.py: rank 1 cannot meet the others at there:7 (nobody answers)\n"
    assert [handler == signal.SIG_DFL for handler in asked] == [evaluate, evaluate], "a validation has no step to end"


@pytest.mark.parametrize("script", ["train.py", "launch.py", "prepare.py", "generate.py", "hf.py"])
def test_ctrl_c_during_the_imports_says_nothing(script, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, str(HERE / script)], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")
