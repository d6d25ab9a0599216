"""How a run ends: in one line if an option is wrong, by Ctrl-C, because a rank died, or because a gradient did."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint
import pytest
import step as step_module
import torch.distributed as dist
import train
from harness.ranks import run_ranks
from test_train import SIZES, arguments, losses

HERE = Path(__file__).resolve().parents[1]

# ------------------------------------------------------------------------- bad input: test_bad_input.py has the rest


def command(words, rank=0, world_size=1, port=0, **more):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    environment |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, str(HERE / "train.py"), *words], env=environment, **pipes, **more)


@pytest.mark.prove
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


@pytest.mark.prove
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


@pytest.mark.always("9")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stuck_rank_ends_the_others_in_bounded_time(how, text, tmp_path):
    processes = start_two(text, tmp_path / "run", timeout=10)  # also how long one waits for the other to start
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
        return step_module.train_step(*args)

    train.make_rank, train.train_step = with_poison, counted
    try:
        return train.train(plan, folder), None
    except step_module.NotFinite as error:
        return None, str(error)
    finally:
        train.make_rank, train.train_step = make, step_module.train_step


@pytest.mark.parametrize("zero", [0, 2])
def test_a_gradient_that_is_not_finite_is_named_and_the_run_stops_or_skips_as_asked(zero, text, tmp_path):
    words = arguments(text, zero=zero, micro_batch=4, save_every=2)
    for log, error in run_ranks(2, poisoned, [*words, "--out", str(tmp_path / "stop")], 1, 3):
        assert log is None
        assert error.startswith("step 3: rank 1: gradient of model.layers.0.mlp.up_proj.weight is not finite;"), error
    assert [path.name for path in checkpoint.complete(tmp_path / "stop")] == ["step-000002"], "what was being saved"
    skip = [*words, "--out", str(tmp_path / "skip"), "--on-nan", "skip"]
    (log, error), _ = run_ranks(2, poisoned, skip, 1, 3)
    assert error is None
    assert [step for step, (_, norm) in losses(log).items() if not math.isfinite(norm)] == [3]
    assert all(math.isfinite(line["val_loss"]) for line in log if "val_loss" in line)
