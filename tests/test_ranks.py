"""The rank pool: that it runs what it should, and that each way to fail is seen, named and over in time."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import ranks, warm_python
from harness.programs import run_script
from harness.ranks import RankFailure, run_ranks


def sum_of_ranks(scale):
    x = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item()


def raise_on(bad_rank):
    if dist.get_rank() == bad_rank:
        raise ValueError("the batch is upside down")
    dist.all_reduce(torch.ones(1))  # the others wait for a rank that will not come


def hang_on(bad_rank):
    if dist.get_rank() == bad_rank:
        lost_in_thought()
    return "fine"


def lost_in_thought():
    time.sleep(600)


def wait_for_a_message_that_nobody_sends():
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    return "fine"


def die_on(bad_rank, how):
    if dist.get_rank() == bad_rank:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def pids_and_state():
    run_count = getattr(torch, "_harness_test_mark", 0)
    torch._harness_test_mark = run_count + 1
    return os.getpid(), run_count


def exit_quietly():
    raise SystemExit(0)


def return_something_unpicklable():
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 4])
def test_results_come_back_in_rank_order_from_one_group(world_size):
    expected = 10.0 * sum(range(world_size))
    assert run_ranks(world_size, sum_of_ranks, 10) == [(rank, world_size, expected) for rank in range(world_size)]


def test_a_rank_that_raises_shows_its_own_traceback_not_its_peers_broken_connections():
    with pytest.raises(RankFailure) as failure:
        run_ranks(3, raise_on, 1)
    assert failure.value.kind == "raised"
    assert failure.value.ranks == [1]
    assert "rank 1 of 3 raised" in str(failure.value)
    assert "in raise_on" in str(failure.value)
    assert "ValueError: the batch is upside down" in str(failure.value).split("the others:")[0]


def leave_first_and_say_why_later():
    dist.all_reduce(torch.ones(1))  # all are connected from here on
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        time.sleep(0.5)
        raise ValueError("the batch is upside down")
    dist.all_reduce(torch.ones(1))


def test_a_cause_is_shown_before_its_consequences_though_it_is_reported_after_them():
    with pytest.raises(RankFailure) as failure:
        run_ranks(3, leave_first_and_say_why_later)
    assert failure.value.ranks == [1], failure.value
    assert "ValueError: the batch is upside down" in str(failure.value).split("the others:")[0]


def test_a_rank_that_hangs_fails_at_the_deadline_and_every_stuck_rank_shows_its_stack():
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(3, hang_on, 2, timeout=4)
    assert time.monotonic() - start < 60
    assert failure.value.kind == "hung"
    assert failure.value.ranks == [2]
    assert "stack of rank 2" in str(failure.value)
    assert "lost_in_thought" in str(failure.value)


@pytest.mark.prove
def test_a_rank_stuck_in_a_collective_shows_the_line_that_waits():
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, wait_for_a_message_that_nobody_sends, timeout=4)
    assert failure.value.ranks == [0]
    assert "in wait_for_a_message_that_nobody_sends" in str(failure.value)


@pytest.mark.always("signal-was killed by SIGKILL")
@pytest.mark.parametrize(("how", "words"), [("signal", "was killed by SIGKILL"), ("exit", "exit code 7")])
def test_a_rank_that_is_killed_is_named(how, words):
    with pytest.raises(RankFailure) as failure:
        run_ranks(3, die_on, 2, how)
    assert failure.value.kind == "killed"
    assert failure.value.ranks == [2]
    assert "rank 2 of 3" in str(failure.value)
    assert words in str(failure.value)


def end_later():
    threading.Timer(0.5, os._exit, [3]).start()


def test_a_rank_that_ends_between_two_calls_is_no_fault_of_the_later_one():
    run_ranks(2, end_later)
    for worker in ranks._pool.workers[:2]:
        worker.process.join(10)
    with pytest.raises(RankFailure, match="since an earlier call.* rank 0 ended by itself with exit code 3, rank 1"):
        run_ranks(2, sum_of_ranks, 1)
    assert run_ranks(2, sum_of_ranks, 1)[1] == (1, 2, 1.0)


def test_a_rank_that_leaves_by_sys_exit_zero_is_a_failure():
    with pytest.raises(RankFailure, match="SystemExit: 0"):
        run_ranks(2, exit_quietly)


def test_a_result_that_cannot_be_pickled_is_reported():
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(1, return_something_unpicklable)


def test_processes_are_kept_between_calls_and_replaced_after_a_failure():
    first = run_ranks(2, pids_and_state)
    second = run_ranks(2, pids_and_state)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert second[0][1] == first[0][1] + 1
    with pytest.raises(RankFailure):
        run_ranks(2, raise_on, 0)
    third = run_ranks(2, pids_and_state)
    assert not {pid for pid, _ in third} & {pid for pid, _ in first}
    assert third[0][1] == 0, "state of the failed processes survived"


def count_imports(folder):
    sys.path.insert(0, folder)
    import counted  # type: ignore[import-not-found]

    counted.COUNT += 1
    return counted.COUNT


def test_modules_stay_between_two_calls_unless_every_call_is_to_have_its_own(tmp_path, pool):
    (tmp_path / "counted.py").write_text("COUNT = 0\n")
    pool.fresh = False
    assert [run_ranks(1, count_imports, str(tmp_path)) for _ in range(3)] == [[1], [2], [3]]
    pool.fresh = True
    run_ranks(1, count_imports, str(tmp_path))  # the call after which they are unloaded
    assert [run_ranks(1, count_imports, str(tmp_path)) for _ in range(2)] == [[1], [1]]


def patch_and_leave(folder, what):
    sys.path.insert(0, folder)
    import counted

    if what == "a method":
        counted.Counted.count = lambda self: 2
    if what == "a function":
        counted.count = lambda: 2
    if what == "a collective":
        dist.all_reduce = lambda *args: None
    with patch.object(counted, "other", lambda: 3):
        return counted.count(), counted.other()


PATCHED = {"a method": "counted.Counted.count", "a function": "counted.count", "a collective": "all_reduce"}


@pytest.mark.always("a collective-all_reduce")
@pytest.mark.parametrize(("what", "name"), PATCHED.items())
def test_a_patch_that_the_next_call_would_meet_fails_and_is_named(what, name, tmp_path, pool):
    text = "class Counted:\n    def count(self):\n        return 1\n\n\ndef count():\n    return 1\n\n\nother = count\n"
    (tmp_path / "counted.py").write_text(text)
    pool.fresh = False
    for _ in range(2):
        assert run_ranks(1, patch_and_leave, str(tmp_path), "") == [(1, 3)]
    with pytest.raises(RankFailure, match=rf"not taken back: \S*{name}\n"):
        run_ranks(1, patch_and_leave, str(tmp_path), what)
    assert run_ranks(1, patch_and_leave, str(tmp_path), "") == [(1, 3)]


@pytest.fixture
def pool():
    """A pool of this test's own, with processes that no other test has used."""
    before, ranks._pool = ranks._pool, ranks._Pool()
    yield ranks._pool
    ranks._pool.close()
    ranks._pool = before


@pytest.mark.prove
def test_deadlines_scale_with_the_unit_of_a_slow_machine_and_not_beyond_a_limit(pool):
    pool.unit, pool.limit = 3.0, 60.0
    began = time.monotonic()
    with pytest.raises(RankFailure, match="after 3 s"):
        run_ranks(1, lost_in_thought, timeout=1)
    assert 3 <= time.monotonic() - began < 20
    ranks.limit_timeouts(0.5)
    with pytest.raises(RankFailure, match="after 1.5 s"):
        run_ranks(1, lost_in_thought, timeout=1)


def test_the_preflight_of_a_machine_that_is_well_says_nothing_and_measures_the_unit(pool, monkeypatch):
    pool.unit = 2.0
    monkeypatch.setattr(ranks, "QUIET", 1e-3)
    assert ranks.preflight() == "" and pool.unit == 10.0
    monkeypatch.setattr(ranks, "QUIET", 1e3)
    assert ranks.preflight() == "" and pool.unit == 1.0


@pytest.mark.prove
def test_a_machine_without_a_working_loopback_is_told_in_one_line():
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    say = "from harness import ranks; print(ranks.preflight())"
    alone = ["unshare", "--net", "--map-root-user", sys.executable, "-c", say]
    if subprocess.run([*alone[:3], "true"], capture_output=True).returncode:
        pytest.skip("reason: this Linux machine allows no network namespaces")
    done = subprocess.run(alone, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("two processes cannot exchange 4 MB over lo") and done.stdout.count("\n") == 1


KEPT = []


def make_groups():
    KEPT.extend(dist.new_group([0, 1]) for _ in range(5))
    dist.all_reduce(torch.ones(1), group=KEPT[-1])


def threads_of_groups():
    dist.barrier()  # a thread that has just begun may not have its name yet
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return sum("gloo_runloop" in name for name in names)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc, which only Linux has")
def test_the_groups_of_a_job_are_gone_in_the_next_though_its_module_kept_them(pool):
    pool.fresh = True
    before = max(run_ranks(2, threads_of_groups))
    run_ranks(2, make_groups)
    assert max(run_ranks(2, threads_of_groups)) <= before + 1  # the five would be five more


KILLED = """
import os, sys, time
from harness.programs import run_script
from harness.ranks import run_ranks

def wait_long(folder):
    open(f"{folder}/{os.getpid()}.rank", "w").close()
    time.sleep(600)

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import killed
    run_ranks(2, killed.wait_long, sys.argv[1], timeout=300)
"""


@pytest.mark.prove
def test_ranks_end_with_a_test_process_that_is_killed(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    tests = os.path.dirname(__file__)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "killed.py", tmp_path], env={**os.environ, "PYTHONPATH": tests}
    )
    assert within(120, lambda: len(list(tmp_path.glob("*.rank"))) == 2)
    process.kill()
    process.wait()
    pids = [int(file.stem) for file in tmp_path.glob("*.rank")]
    assert within(20, lambda: not any(map(alive, pids)))


def within(seconds, condition):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z")  # dead, not yet buried


# -------------------------------------------------------------------------------------------------------- run_script


SAYS = """import os, sys
import beside
print(beside.WORD, sys.argv[1:], os.environ["WORD"], os.path.basename(os.getcwd()), __name__, os.getenv("PYTHONPATH"))
try:
    import harness
except ImportError:
    sys.exit(beside.END)
"""


def test_a_script_runs_as_python_would_run_it_and_finds_only_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script, elsewhere = tmp_path / "alone" / "says.py", tmp_path / "elsewhere"
    script.parent.mkdir()
    elsewhere.mkdir()
    script.write_text(SAYS)
    for end, code, complaint in ((3, 3, ""), ("no", 1, "no\n"), (None, 0, "")):
        # Of another length each time: a module of the same length and second would come from its old bytecode.
        (script.parent / "beside.py").write_text(f"WORD = 'one'\nEND = {end!r}{'#' * code}\n")
        done = run_script(script, "--two", "3", cwd=elsewhere, WORD="four")
        assert done.stdout == "one ['--two', '3'] four elsewhere __main__ None\n"
        assert (done.returncode, done.stderr) == (code, complaint)
    script.write_text("1 / 0")
    done = run_script(script)
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")
    # Fork and exec are all that a plain subprocess is; the whole of it takes longer than this test.
    script.write_text("import os, time\nprint(os.getpid(), os.fork() or os.getpid(), flush=True)\ntime.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run_script(script, timeout=0.5)
    pids = [int(word) for word in late.value.stdout.split()]
    assert within(20, lambda: not any(map(alive, pids)))


# ------------------------------------------------------------------------------------------------------- warm_python


WARM = """
import os, signal, subprocess, sys
import torch.multiprocessing
if __name__ == "__main__":
    if sys.argv[1:] == ["wait"]:
        print(os.getpid(), flush=True)
        signal.pause()
    torch.multiprocessing.spawn(print, ("rank", sys.executable), nprocs=2)
    print(sys.argv, os.environ["WORD"], os.getcwd(), sys.stdin.read(), sys.path[0])
    subprocess.run([sys.executable, "-c", "import sys; print(sys.argv)", "9"])
    os.kill(os.getpid(), signal.SIGSEGV) if "killed" in sys.argv else sys.exit("the end")
"""


@pytest.mark.prove
def test_a_warm_python_runs_and_ends_as_python_does(tmp_path):
    (tmp_path / "s.py").write_text(WARM)
    said = {}
    for python in (sys.executable, f"{warm_python.folder()}/python"):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment |= {"OMP_NUM_THREADS": "1", "WORD": "w", "PYTHONUNBUFFERED": "1"}
        given = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "input": "in"}
        ends = [subprocess.run([python, "s.py", *words], **given) for words in (["a b"], ["killed"])]
        said[python] = [
            (end.returncode, sorted(end.stdout.replace(python, "PYTHON").splitlines()), end.stderr) for end in ends
        ]
    real, warm = said.values()
    assert real == warm and [end[0] for end in warm] == [1, -signal.SIGSEGV]


@pytest.mark.prove
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_warm_python_that_is_killed_leaves_nothing_running(how, tmp_path):
    (tmp_path / "s.py").write_text(WARM)
    words = [f"{warm_python.folder()}/python", "s.py", "wait"]
    client = subprocess.Popen(words, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
    fork = int(client.stdout.readline())
    assert fork != client.pid
    client.send_signal(how)
    assert client.wait(10 * ranks._pool.unit) == -how
    assert within(10 * ranks._pool.unit, lambda: not alive(fork))
