"""Run a function on N ranks, quickly, and report precisely which rank failed and why.

    losses = run_ranks(4, train_step, batch, timeout=30)      # [loss of rank 0, ..., loss of rank 3]

The function runs in N processes; in each the default process group (Gloo) is up, so `dist.get_rank()` works.
Starting Python and importing torch takes seconds, which `torchrun` needs for every run. Here the processes
are forks of a server that has already imported torch, and they are reused by the next call; only the process
group is new each time. So a distributed test takes about a tenth of a second.

    the test process                the ranks (persistent)
    ----------------                ----------------------
    job  ------------- pipe ------> init_process_group; result = fn(*args)
    wait <------------ pipe ------- "done" result | "raised" traceback           (until the deadline)
    all done?  ------- pipe ------> "release": destroy_process_group, wait for the next job

No rank leaves the group before all are done, so a fast rank never closes the connection of a slow one. After
any failure all processes are killed and replaced, so that no state of the failed function remains.

What a failure looks like:
- a rank raises:    RankFailure with that rank's own traceback. Its peers then usually report broken connections, which
                    are consequences; the first error that is not one is shown first.
- a rank hangs:     RankFailure at the deadline, with the Python stack of every rank that was still running.
- a rank is killed: RankFailure naming the rank and the signal.
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .module_cache import PRELOAD, forget_modules, functions, replaced

QUIET = 0.5  # seconds of a first preflight where nothing else runs, the fork server's imports not counted
GRACE = 1.0  # seconds that the other ranks get to report after the first failure


class RankFailure(AssertionError):
    """A rank raised, hung or died. `kind` is "raised", "hung" or "killed"; `ranks` are those it happened to first."""

    def __init__(self, kind: str, ranks: list[int], message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.ranks = ranks


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `world_size` ranks and return their results in rank order.

    `fn` must be a top-level function of an importable module; arguments and results are pickled (tensors by value).
    Raises RankFailure when a rank raises, dies, or is not done within `timeout` seconds.
    """
    return _pool.run(world_size, fn, args, kwargs, timeout)


def limit_timeouts(seconds: float) -> None:
    """From now on no call waits longer than this, with any `timeout`: for runs that are expected to fail."""
    _pool.limit = seconds


def use_fresh_modules() -> None:
    """From now on every call imports this repository's modules again, in case they change between calls."""
    _pool.fresh = True


def preflight() -> str:
    """Why ranks cannot communicate on this machine, in one line; "" if they can.

    Two of them exchange 4 MB. It also sets the unit of time, the slowdown of this exchange relative to a
    quiet machine. All deadlines are multiplied by it, so that tests do not fail on a slow machine.
    """
    _pool._start(2)  # the imports of the fork server are not timed
    began = time.monotonic()
    try:
        _pool.run(2, _exchange, (), {}, 60)
    except RankFailure as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if "Error" in line), lines[0])
        return f"two processes cannot exchange 4 MB over {_loopback()}, this machine's loopback, with gloo: {why[:200]}"
    _pool.unit = min(max((time.monotonic() - began) / QUIET, 1.0), 10.0)
    return ""


def _exchange() -> None:
    """Enough work, and enough bytes at a time, to see a slow or a broken machine."""
    for _ in range(4):
        x = torch.full((1 << 20,), float(dist.get_rank()))
        dist.all_reduce(x)
        if x.sum().item() != 1 << 20:
            raise ValueError(f"the sum of 0 and 1 arrived as {x.mean().item()}")
        for _ in range(4):
            torch.ones(256, 256) @ torch.ones(256, 256)


# ------------------------------------------------------------------------------------------------ inside a rank


def _serve(pipe: Connection, stack_file: str) -> None:
    """The loop of a worker process: take a job, run it, report, wait for release."""
    gc.freeze()  # objects inherited from the fork server are never garbage: do not scan (and copy) their pages
    gc.set_threshold(10_000, 20, 20)  # objects live as long as a call: collect garbage less often
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which then ends us
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    # Two ranks of a group connect when the first message between them is due: most groups of a mesh are never used.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    threading.Thread(target=_end_with_the_test_process, daemon=True).start()
    preloaded, known = set(sys.modules), 0
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        pipe.send_bytes(b"up")
        while True:
            try:
                fresh, *job = pickle.loads(pipe.recv_bytes())
            except EOFError:  # the test process has ended
                return
            pipe.send_bytes(pickle.dumps(_run_job(None if fresh else preloaded, *job)))
            pipe.recv_bytes()  # release
            # Any reference to a group (a work, a cache of a module) keeps its threads: collect, twice.
            if fresh:
                forget_modules(preloaded)
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
            if not fresh and len(sys.modules) > known:  # modules stay: later collections skip them
                known = len(sys.modules)
                gc.freeze()


def _end_with_the_test_process() -> None:
    """End this rank with the test process, which cannot stop its ranks when it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_job(
    stay: set[str] | None, rank: int, world_size: int, store: str, timeout: float, search_path: list[str], call: bytes
) -> tuple[str, Any]:
    """`stay` is None, or the modules from before the first job: later imports stay for the next job."""
    try:
        sys.path[:] = search_path
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            # Longer than the deadline of the test process, which asks for stacks before a rank times out.
            timeout=timedelta(seconds=2 * timeout + 10),
        )
        fn, args, kwargs = pickle.loads(call)
        before = functions(stay) if stay is not None else {}
        answer = pickle.dumps(fn(*args, **kwargs))
        if left := replaced(before, functions(stay) if stay is not None else {}):
            raise RuntimeError(f"patches that the next call would meet were not taken back: {', '.join(left)}")
        return "done", answer
    except BaseException:  # including SystemExit: any end of the function is reported
        return "raised", traceback.format_exc()


def _loopback() -> str:
    """The name of this machine's loopback interface: all ranks are local, so the host's name need not resolve."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


# ------------------------------------------------------------------------------------------ in the test process


class _Worker:
    def __init__(self, context: Any, folder: str, number: int) -> None:
        self.stack_file = f"{folder}/stack-{number}"
        self.pipe, child_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(child_end, self.stack_file), daemon=True)
        self.process.start()
        child_end.close()  # keep one end only, so that the death of the process reads as end-of-file

    def wait_until_up(self) -> None:
        """The first process waits for the fork server's imports, which must not count against a deadline."""
        if not self.pipe.poll(120):
            raise RuntimeError(f"a rank's process (pid {self.process.pid}) did not start within 120 s")
        self.pipe.recv_bytes()


class _Pool:
    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.count = 0  # of jobs and of workers: makes file names unique
        self.limit = float("inf")
        self.unit = float(os.environ.get("RANKS_UNIT", "1"))  # what `preflight` found; the deadlines scale with it
        self.fresh = bool(os.environ.get("FRESH_MODULES"))  # `make prove FRESH=1`: no reuse of imports

    def _start(self, world_size: int) -> str:
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        new = []
        while len(self.workers) < world_size:
            self.count += 1
            new.append(_Worker(context, self.folder.name, self.count))
            self.workers.append(new[-1])
        try:
            for worker in new:
                worker.wait_until_up()
        except (Exception, KeyboardInterrupt):  # a process that is not up cannot be given a job
            self.stop()
            raise
        self.count += 1
        return f"{self.folder.name}/store-{self.count}"

    def stop(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.pipe.close()
        self.workers = []

    def close(self) -> None:
        self.stop()
        if self.folder is not None:
            self.folder.cleanup()

    def run(self, world_size: int, fn: Callable[..., Any], args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        timeout = min(timeout, self.limit) * self.unit
        store = self._start(world_size)
        call = pickle.dumps((fn, args, kwargs))
        team = self.workers[:world_size]
        if ended := [rank for rank, worker in enumerate(team) if not worker.process.is_alive()]:
            ends = ", ".join(f"rank {rank} {_exit(team[rank].process.exitcode)}" for rank in ended)
            self.stop()
            raise RankFailure("killed", ended, f"since an earlier call, which left something behind, {ends}")
        for rank, worker in enumerate(team):
            # A worker that dies now is found below, as a closed pipe.
            with contextlib.suppress(BrokenPipeError):
                worker.pipe.send_bytes(
                    pickle.dumps((self.fresh, rank, world_size, store, timeout, list(sys.path), call))
                )
        answers = self._gather(team, timeout)
        failed = [rank for rank in range(world_size) if answers.get(rank, ("hung", None))[0] != "done"]
        if failed:
            self._fail(team, answers, timeout)
        for worker in team:
            with contextlib.suppress(BrokenPipeError):  # it died after its answer: the next call says so
                worker.pipe.send_bytes(b"release")
        Path(store).unlink(missing_ok=True)
        return [pickle.loads(answers[rank][1]) for rank in range(world_size)]

    def _gather(self, team: list[_Worker], timeout: float) -> dict[int, tuple[str, Any]]:
        """Answers by rank, until all are in, the deadline passes, or GRACE seconds after the first failure.

        A rank that died answers ("killed", exit code). A rank without an answer is stuck.
        """
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(team)}
        try:
            while waiting and (remaining := deadline - time.monotonic()) > 0:
                for pipe in wait(list(waiting), remaining):
                    rank = waiting.pop(pipe)
                    try:
                        answers[rank] = pickle.loads(team[rank].pipe.recv_bytes())
                    except (EOFError, ConnectionResetError):
                        team[rank].process.join(5)
                        answers[rank] = ("killed", team[rank].process.exitcode)
                    if answers[rank][0] != "done":
                        deadline = min(deadline, time.monotonic() + GRACE)
        except KeyboardInterrupt:
            self.stop()  # the ranks are in an unknown state and cannot be reused
            raise
        return answers

    def _fail(self, team: list[_Worker], answers: dict[int, tuple[str, Any]], timeout: float) -> NoReturn:
        size = len(team)
        killed = [rank for rank, (kind, _) in answers.items() if kind == "killed"]
        raised = [rank for rank, (kind, _) in answers.items() if kind == "raised"]  # in the order they arrived
        # A peer's death appears as a broken connection in Gloo's transport: a consequence, not a cause.
        causes = [rank for rank in raised if "gloo/transport" not in answers[rank][1]] or raised
        stuck = [rank for rank in range(size) if rank not in answers]
        stacks = self._stacks(team, stuck)
        self.stop()
        if killed:
            ends = ", ".join(f"rank {rank} of {size} {_exit(answers[rank][1])}" for rank in killed)
            kind, first, parts = "killed", killed, [ends]
            if causes:
                parts.append(f"rank {causes[0]} of {size} then raised:\n{answers[causes[0]][1]}")
        elif causes:
            kind, first, parts = "raised", causes[:1], [f"rank {causes[0]} of {size} raised:\n{answers[causes[0]][1]}"]
            others = [
                f"rank {rank}: {answers[rank][1].strip().splitlines()[-1]}" for rank in raised if rank != causes[0]
            ]
            if others:
                parts.append("the others:\n  " + "\n  ".join(others))
            if stuck:
                parts.append(f"ranks {stuck} were still running {GRACE:g} s later and were stopped")
        else:
            kind, first = "hung", stuck
            parts = [f"ranks {stuck} of {size} were still running after {timeout:g} s"]
            parts += [f"stack of rank {rank}:\n{stack}" for rank, stack in stacks.items()]
        raise RankFailure(kind, first, "\n\n".join(parts))

    @staticmethod
    def _stacks(team: list[_Worker], stuck: list[int]) -> dict[int, str]:
        """Ask every stuck rank for its Python stack; faulthandler answers even from inside a blocking C++ call."""
        for rank in stuck:
            pid = team[rank].process.pid
            if pid is not None and team[rank].process.is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5 if stuck else 0)
        return {rank: Path(team[rank].stack_file).read_text() or "(no answer)" for rank in stuck}


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended by itself with exit code {code}"


_pool = _Pool()
atexit.register(_pool.close)
