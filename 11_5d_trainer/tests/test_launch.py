"""Under torchrun itself: bad options in one line, a rank that dies and comes back, saves that take long, Slurm."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest import mock

import paths  # noqa: F401  finds the chapters below
import checkpoint
import fuzz
import launch
import pytest
import torch
import torch.distributed as dist
import train
from harness.ranks import run_ranks
from options import Config, parse
from test_ends import free_port

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "11_5d_trainer"


BAD = [
    (
        "--nproc_per_node 4 train.py --tp 3",
        "--pp 1 x --tp 3 x --cp 1 does not divide the 4 ranks of this run; the prod",
    ),
    ("--nnodes 2 --nproc_per_node 4 train.py --tp 3", "--pp 1 x --tp 3 x --cp 1 does not divide the 8 ranks of this"),
    ("--nnodes 1:4 --nproc_per_node 2 train.py --tp 3", "--pp 1 x --tp 3 x --cp 1 does not divide the 8 ranks of this"),
    ("--nproc_per_node 2 train.py --stepz 3", "unrecognized arguments: --stepz 3; --help lists the options"),
    ("--nproc_per_node two train.py", "--nnodes 1:1 --nproc_per_node two: Unsupported nproc_per_node value: two"),
    ("--nproc_per_node 0 train.py", "--nnodes 1:1 --nproc_per_node 0: there must be at least 1 rank"),
    ("--nproc_per_node 2 --nnodes 0 train.py", "--nnodes 0 --nproc_per_node 2: there must be at least 1 rank"),
    (
        "--nproc_per_node 2",
        "the following arguments are required: training_script, training_script_args; `torchrun --he",
    ),
]


def test_bad_options_end_in_one_line_and_code_2_before_any_rank_is_started(text, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # main sets it
    monkeypatch.setattr(launch.torchrun, "run", lambda args: pytest.fail("ranks were started"))
    for line, start in BAD:
        words = [*line.replace("train.py", str(HERE / "train.py")).split()]
        words += ["--data", text] if "train.py" in line else []
        assert launch.main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"launch.py: {start}") and err.count("\n") == 1, err
        share = re.search(r"nproc_per_node ([1-9]) train.py", line)  # of this machine's memory
        assert not share or os.environ["LOCAL_WORLD_SIZE"] == share[1]


def test_ranks_have_ten_minutes_to_save_or_what_was_asked_for(monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    words = ["--nproc_per_node", "2", "train.py"]
    if not hasattr(launch.torchrun.get_args_parser().parse_args(words), "shutdown_timeout"):
        pytest.skip(reason="this torchrun always kills after 30 seconds")
    assert launch.arguments(words).shutdown_timeout == 600
    assert launch.arguments(["--shutdown-timeout", "7", *words]).shutdown_timeout == 7
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "540")
    assert launch.arguments(words).shutdown_timeout == 540


def test_ranks_that_start_again_do_not_find_what_the_dead_have_written_into_torchruns_store(monkeypatch):
    given, agents = [], dist.HashStore()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(train, "rendezvous", lambda *_, **__: iter([(agents, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, timeout, **__: given.append(store))
    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        train.connect(torch.device("cpu"), 60.0)
    given[0].set("address", "of one who dies")
    assert given[0].check(["address"]) and not given[1].check(["address"]) and agents.timeout.total_seconds() == 60


SCRIPT = """
import os, signal, sys, time
sys.path[:0] = {folders}
import paths, checkpoint, fuzz, step, train
from model import PRESETS
PRESETS["tiny"] = fuzz.SIZES
{change}
if __name__ == "__main__":
    sys.exit(train.main())
"""
DIES = """
steps, step = [0], step.train_step
def deadly(*args):
    steps[0] += 1
    if (steps[0], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (8, "1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args)
train.train_step = deadly
"""
SIGNALLED_AT_THE_END = """
steps, step = [0], step.train_step
def signalled(*args):
    steps[0] += 1
    if steps[0] == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*args)
train.train_step = signalled
"""
ONE_DIES_AND_ONE_HANGS = """
steps, step, me = [0], step.train_step, os.environ["RANK"]
here = os.path.dirname(os.path.abspath(__file__))
mark, other = (os.path.join(here, "fell " + who) for who in (me, "0"))
with open(os.path.join(here, "starts"), "a") as starts:  # of two ranks, two each, unless they do not meet
    starts.write(me)
store = os.path.join(here, "store " + me + " " + os.environ["MASTER_PORT"])
if os.path.exists(store):
    sys.exit("ranks that start again meet in the old store")
open(store, "w").close()
def deadly(*args):
    steps[0] += 1
    if steps[0] == 8 and not os.path.exists(mark):
        open(mark, "w").close()
        while me == "1":  # once rank 0 hangs: in a collective it would see that it is alone, and fall, too
            if os.path.exists(other):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        time.sleep(600)
    return step(*args)
train.train_step = deadly
"""
SLOW = """
save, step = checkpoint.dcp.save, step.train_step
def slow(*args, **more):
    time.sleep(33)
    return save(*args, **more)
checkpoint.dcp.save = slow
def counted(*args):
    time.sleep(0.05)
    return step(*args)
train.train_step = counted
"""


def start(tmp_path, change, words, ranks=2, nodes=(), inside=(), script=None):
    own, script = tmp_path / "script.py", script or tmp_path / "script.py"
    own.write_text(SCRIPT.format(folders=[str(HERE), str(HERE / "tests"), str(ROOT / "tests")], change=change))
    command = [*inside, sys.executable, str(HERE / "launch.py")]
    command += nodes or ["--standalone", "--nproc_per_node", str(ranks), "--max-restarts", "1"]
    command += [str(script), *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_ELASTIC")}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, **pipes)


@pytest.mark.prove
def test_any_script_is_started_and_one_that_has_said_why_it_ends_is_not_started_again(tmp_path):
    script = tmp_path / "any.py"
    script.write_text("import sys\nopen(sys.argv[1], 'a').write('.')\nsys.exit('--code' in sys.argv and 3)\n")
    for words, code in (([], 0), (["--code"], 3)):
        starts = tmp_path / f"starts {code}"
        process = start(tmp_path, "", [str(starts), *words], ranks=1, script=script)  # with --max-restarts 1
        said, _ = process.communicate(timeout=100)
        assert (process.returncode, starts.read_text()) == (code, "."), said
        assert said.count("\n") == bool(code) and f"exitcode: {code}" in said + "exitcode: 0", said  # torchrun's line


def test_the_last_line_names_the_rank_that_was_killed_and_blames_none_that_waited():
    def line(**each):
        failures = {int(rank[1:]): types.SimpleNamespace(exitcode=code) for rank, code in each.items()}
        first = next(iter(failures.items()))
        return launch.how_it_ended(types.SimpleNamespace(failures=failures, get_first_failure=lambda: first))

    assert line(r1=4, r0=-9)[0] == 4 and line(r1=3, r0=-15) == (3, "")  # torchrun has ended rank 0
    assert line(r3=-9, r0=1) == (137, "rank 3 was ended by SIGKILL; out of memory? The kernel's log says so then")
    assert line(r0=-11) == (139, "rank 0 was ended by SIGSEGV")
    assert line(r2=-6)[1].startswith("rank 2 was ended by SIGABRT; NCCL's watchdog does that to ranks that have waited")
    assert line(r0=4, r1=4) == (4, "rank 0 and others waited for ranks that did not answer: the line above names these")
    assert line(r1=1) == (1, "rank 1 ended first, with 1; what it said is above")
    assert line(r0=3) == (3, "")


def test_however_torchrun_or_the_check_ends_there_is_a_code_for_it(monkeypatch, capsys):
    store, words = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", ["--nproc_per_node", "1", "any.py"]
    monkeypatch.setenv(store, "")
    monkeypatch.delenv(store)
    monkeypatch.setattr(launch.elastic, "LocalElasticAgent", launch.LocalElasticAgent)  # main sets both
    monkeypatch.setattr(launch.torchrun, "run", mock.Mock())
    assert launch.main(words) == 0
    assert (os.environ[store], launch.elastic.LocalElasticAgent) == ("1", launch.Agent)
    killed = launch.ChildFailedError.__new__(launch.ChildFailedError)
    killed.failures = {1: types.SimpleNamespace(exitcode=-9, timestamp=0)}
    for error, code in ((killed, 137), (launch.SignalException("ended", signal.SIGTERM), 143)):
        launch.torchrun.run.side_effect = error
        assert launch.main(words) == code
    assert capsys.readouterr().err.startswith("launch.py: rank 1 was ended by SIGKILL")
    for error, code in ((launch.NothingLeft("all is done"), 0), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr(launch, "check", mock.Mock(side_effect=error))
        assert launch.main(words) == code


def test_ranks_that_have_said_why_they_end_are_not_started_again(monkeypatch):
    agent = object.__new__(launch.Agent)
    for codes, left in (((), 3), ((1,), 3), ((-9, 4), 3), ((-15, 3), 0), ((2,), 0)):
        failures = {rank: types.SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}
        found = types.SimpleNamespace(failures=failures or None)
        monkeypatch.setattr(launch.LocalElasticAgent, "_monitor_workers", lambda *_, found=found: found)
        agent._remaining_restarts = 3
        assert agent._monitor_workers(None) is found and agent._remaining_restarts == left, codes


def said_by_two_nodes(tmp_path, change, words, more=()):
    """Train on two nodes of one rank, in a folder that both see, as on a cluster; both end well, and this is said."""
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_id", "two"]
    nodes = ["--nnodes", "2", "--nproc_per_node", "1", *meeting, "--local_addr", "127.0.0.1", *more]
    words = [*words, "--out", str(tmp_path / "run")]
    agents = [start(tmp_path, change, words, nodes=nodes) for _ in range(2)]
    deadline = time.monotonic() + 300
    starts = tmp_path / "starts"
    while any(agent.poll() is None for agent in agents) and not any(agent.poll() for agent in agents):
        if time.monotonic() > deadline or (starts.exists() and starts.stat().st_size > 4):
            break
        time.sleep(0.1)
    for agent in agents:  # one alone would wait for the other; its ranks, which have its pipe, have to end with it
        agent.terminate()
    said = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    return said


def steps_of(folder):
    file = folder / "log.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return fuzz.losses(lines)


def until(condition, process, what):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, f"{what}: {process.communicate()[0][-3000:]}"
        time.sleep(0.1)


@pytest.mark.prove
def test_torchrun_starts_all_ranks_again_when_one_dies_and_the_losses_are_those_of_an_undisturbed_run(text, tmp_path):
    words = fuzz.kill_options(text)
    undisturbed = fuzz.losses(run_ranks(2, fuzz.run, [*words, "--out", str(tmp_path / "undisturbed")])[0])
    process = start(tmp_path, DIES, [*words, "--out", str(tmp_path / "run"), "--restart"])
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert steps_of(tmp_path / "run") == undisturbed
    assert "exitcode: -9" in said, said


@pytest.mark.prove
def test_a_signal_in_the_last_step_is_no_failure_and_a_run_that_is_done_has_nothing_left_to_do(text, tmp_path):
    words = [*fuzz.options(text, "", steps=3), "--out", str(tmp_path / "run"), "--restart"]
    process = start(tmp_path, SIGNALLED_AT_THE_END, words, ranks=1)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "stopped" not in said and "validation loss" in said, said
    process = start(tmp_path, "", words, ranks=1, script=HERE / "train.py")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and said.count("\n") == 1, said
    assert said.startswith("launch.py: --restart: ") and said.endswith("nothing is left to do\n")


@pytest.mark.prove
def test_two_nodes_meet_at_one_of_them_and_train_as_one_machine_with_all_their_ranks(text, tmp_path):
    words = [*fuzz.options(text, "", steps=3, timeout=120), "--zero", "1"]
    one_machine = fuzz.losses(run_ranks(2, fuzz.run, [*words, "--out", str(tmp_path / "one")])[0])
    said = said_by_two_nodes(tmp_path, "", words)
    assert steps_of(tmp_path / "run") == one_machine
    assert sorted("validation loss" in text for text in said) == [False, True], "the leader alone speaks"


@pytest.mark.prove
def test_nodes_that_count_their_restarts_differently_meet_again(text, tmp_path):
    """The node whose rank dies counts a restart; that of the other, which hangs, joins it and counts none."""
    words = ["--nproc_per_node", "1", "train.py"]
    if not hasattr(launch.torchrun.get_args_parser().parse_args(words), "shutdown_timeout"):
        pytest.skip(reason="this torchrun waits for 30 seconds for a rank that hangs")
    words = fuzz.kill_options(text)
    more = ["--max-restarts", "1", "--shutdown-timeout", "2"]
    said_by_two_nodes(tmp_path, ONE_DIES_AND_ONE_HANGS, [*words, "--restart", "--timeout", "15"], more)
    undisturbed = fuzz.losses(run_ranks(2, fuzz.run, [*words, "--out", str(tmp_path / "undisturbed")])[0])
    assert (tmp_path / "fell 0").exists() and (tmp_path / "fell 1").exists()
    assert steps_of(tmp_path / "run") == undisturbed


@pytest.mark.prove
def test_a_save_of_more_than_half_a_minute_is_waited_for_after_sigterm(text, tmp_path):
    words = fuzz.options(text, "", steps=100_000, save_every=0, timeout=120)
    process = start(tmp_path, SLOW, [*words, "--out", str(tmp_path / "run")])
    until(lambda: len(steps_of(tmp_path / "run")) > 2, process, "the run did not start")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, said
    [saved] = checkpoint.complete(tmp_path / "run")
    assert checkpoint.step_of(saved) == max(steps_of(tmp_path / "run"))


@pytest.mark.prove
def test_a_slurm_job_saves_before_its_time_is_up_queues_again_and_goes_on(text, tmp_path):
    stubs = {
        "scontrol": f'[ "$1" = show ] && echo localhost || echo "$@" >> {tmp_path}/queued',
        "srun": f'cd {tmp_path}; echo "$SRUN_CPUS_PER_TASK" > cpus; echo $$ > pid; echo "$@" >> words; exec "$@"',
        "scancel": f'[ "$*" = "--signal=TERM 77" ] && kill -TERM $(cat {tmp_path}/pid)',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    slurm = dict(SLURM_JOB_ID="77", SLURM_NNODES="1", SLURM_JOB_NODELIST="here", SLURM_CPUS_PER_TASK="3")
    slurm |= {"OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"} | slurm
    words = fuzz.options(text, "", steps=100_000, save_every=0, timeout=120)
    (tmp_path / "11_5d_trainer").symlink_to(HERE)  # it writes into runs/ beside this
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tmp_path / ".venv" / "bin" / "python").chmod(stat.S_IRWXU)
    folder, done = tmp_path / "runs" / "77", []
    for gpus in ({"SLURM_GPUS_ON_NODE": "2"}, {"SLURM_GPUS_PER_NODE": "h100:2"}):  # the second time it goes on
        command = ["bash", str(HERE / "train.sbatch"), *words]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        process = subprocess.Popen(command, env=environment | gpus, cwd=tmp_path, **pipes)
        before = max(done, default=0)
        until(lambda before=before: max(steps_of(folder), default=0) > before + 2, process, "the job did not start")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 128 + signal.SIGTERM, said
        done.append(checkpoint.step_of(checkpoint.complete(folder)[-1]))
        assert done[-1] == max(steps_of(folder)) > before
    assert (tmp_path / "queued").read_text() == "requeue 77\nrequeue 77\n"
    assert (tmp_path / "cpus").read_text() == "3\n"
    asked = (tmp_path / "words").read_text()
    assert asked.count("--nproc_per_node 2 ") == 2 and asked.count("--rdzv_endpoint localhost:20077 ") == 2, asked


def test_make_train_takes_a_batch_that_any_number_of_gpus_can_share():
    outer = ("MAKE", "MFLAGS", "ARGS", "NPROC")  # of a make that runs this test
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    for gpus in range(1, 17):
        show = ["make", "-n", "-o", ".venv/.ready", "train", f"GPUS={gpus}"]
        said = subprocess.run(show, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
        before, _, options = next(line for line in said.splitlines() if "train.py" in line).partition("train.py")
        words = subprocess.run(["sh", "-c", f"echo {options}"], capture_output=True, text=True).stdout.split()
        config = Config(**parse(words))
        assert f"--nproc_per_node {gpus} " in before
        assert 32 <= config.global_batch < 32 + config.micro_batch * gpus
        assert config.global_batch % (config.micro_batch * gpus) == 0, f"{gpus} GPUs: {words}"
