"""Run tests of a copy of the repository in a process that is not trusted, within limits of time, memory and more.

    judge = Judge(files, Limits())                # files: {"02_data_parallel/in_depth/collectives.py": bytes, ...}
    outcome = judge.run({"02_data_parallel/in_depth/collectives.py": what the student wrote}, tests)

The copy is written from memory, once; for a run the changed files are replaced, and restored. `judge.py` runs
in its own session. This process checks it and all its descendants a few times a second, and ends all of them
when a limit is exceeded. Nothing of one run can affect the next: the copy is compared with what was written,
and a judge that misbehaved is replaced, together with its copy.

On Linux all of this runs in a cell (`cell.sh`): namespaces of its own, with a Python, this copy to read, a
folder to write, no network but loopback, and neither the repository nor anything else of the machine.
`no_cell` returns the reason if there is none.

With `trusted=True` the same code plants mistakes (tests/test_mistakes.py): that code is not hostile, so
nothing is compared, and compiled modules are not compiled again.
"""

import contextlib
import ctypes
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "*.pyc.*", "runs", "profiles", "results", "student", "*.egg-info")
CELL = Path(__file__).with_name("cell.sh")
MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")
PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT")  # from the environment


@dataclass(frozen=True)
class Limits:
    """What one submission may use. Every limit is far above what any correct solution needs."""

    test_seconds: float = 120  # between two answers of the judge
    test_cpu_seconds: float = 60  # of CPU time, by all processes together, between two answers
    hang: float = 20  # a call of run_ranks that takes longer has failed
    processes: int = 40  # 8 ranks and their servers are about 12
    memory: int = 8192 * MIB  # all processes together
    disk: int = 256 * MIB  # all files
    file: int = 64 * MIB  # one file
    all_seconds: float = 3600  # the whole submission


@dataclass(frozen=True)
class Result:
    test: str  # "test_collectives.py::test_every_rank_can_be_the_root"
    passed: bool
    message: str
    broken: bool = False  # it could not be run at all: its file, or what it needs, failed
    seconds: float = 0.0


@dataclass
class Outcome:
    """The results of a run. `ended`: why it was cut short, or ""; `foul`: why it cannot be trusted, or ""."""

    results: list[Result] = field(default_factory=list)
    ended: str = ""
    foul: str = ""


class Judge:
    def __init__(self, files: Mapping[str, bytes], limits: Limits | None = None, trusted: bool = False) -> None:
        self.files, self.limits, self.trusted = dict(files), limits or Limits(), trusted
        self.cell = not trusted and not no_cell()
        self.folder = Path(tempfile.mkdtemp(prefix="exercises-"))
        self.deadline = time.monotonic() + self.limits.all_seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False  # it has said that it can judge
        self.used_before = 0  # bytes of files, before the current run
        self.pending = b""  # the judge's output after its last complete line
        self.mine: set[int] = set()  # without a cell: children of this process that are not the judge's

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ one run

    def run(
        self,
        changes: Mapping[str, str],
        tests: Sequence[str],
        enough: int = 3,
        in_ranks: bool = False,
        few: Sequence[str] = (),
        heard: Callable[[Result], None] = lambda result: None,
    ) -> Outcome:
        """Run `tests` (paths from the root of the repository) in a copy in which `changes` replace files.

        After `enough` failed tests the rest is left out, as are a test's parameters after three that failed. Of
        the tests in `few` only the first and the last parameters run.
        With `in_ranks` only the ranks that tests start see the changes; a CUDA file is built and called only
        by ranks, so it is in the copy. `heard` is called with each result as soon as it arrives.
        """
        self.start()
        self._wait_until_ready()
        if self.trusted:  # hundreds of runs in the same processes: each may write as much as a submission
            self.used_before = self._used(self.descendants())
        copy, theirs = self.folder / "copy", self.folder / "theirs"
        changed = {name: text.encode() for name, text in changes.items()}
        if in_ranks:  # module names are unique: a folder before the others is enough
            theirs.mkdir()  # empty for CUDA: a rank caches that a folder on its path is missing
            scripts = {name: content for name, content in changed.items() if name.endswith(".py")}
            write_files({Path(name).name: content for name, content in scripts.items()}, theirs)
            changed = {name: content for name, content in changed.items() if name not in scripts}
        write_files(changed, copy)
        nonce = secrets.token_hex(16)
        request = {"nonce": nonce, "copy": str(copy), "tests": list(tests), "hang": self.limits.hang}
        request |= {"few": list(few), "enough": enough, "theirs": str(theirs) if in_ranks else ""}
        outcome = self._converse(json.dumps(request), nonce, heard)
        shutil.rmtree(theirs, ignore_errors=True)
        if not self.trusted and not self.cell and not outcome.foul:  # in the cell it can only be read
            outcome.foul = self._edited(changed, copy)
        if outcome.foul or outcome.ended:
            self.stop()
        else:
            write_files({name: self.files[name] for name in changed}, copy)
            for name in changed if self.trusted else ():
                shutil.copystat(ROOT / name, copy / name)  # so that its compiled module is valid again
        return outcome

    def _edited(self, changed: Mapping[str, bytes], copy: Path) -> str:
        """How the run changed its copy, "" if not: every file unchanged, none added, no folder removed."""
        written = self.files | changed
        there = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_symlink() or path.is_file()}
        edited = [name for name, content in written.items() if not _holds(copy / name, content)]
        edited += sorted(there - written.keys())
        return f"it changed {edited[0]} of the copy it ran in" if edited else ""

    def _converse(self, request: str, nonce: str, heard: Callable[[Result], None]) -> Outcome:
        assert self.process is not None and self.process.stdin is not None
        outcome = Outcome()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(request.encode() + b"\n")
            self.process.stdin.flush()
        try:
            while True:
                words = json.loads(self._line(self.limits.test_seconds))
                if words["nonce"] != nonce:
                    raise ValueError("not of this run")
                if words.get("done"):
                    outcome.foul = f"it changed {words['foul'][0]}, which judges it" if words["foul"] else ""
                    return outcome
                test, how = str(words["test"]), words["outcome"]
                message = str(words["message"]).replace(str(self.folder), "")
                seconds = float(words["seconds"])
                outcome.results.append(Result(test, how == "passed", message, how == "broken", seconds))
                heard(outcome.results[-1])
        except Ended as why:
            outcome.ended = str(why)
        except (ValueError, KeyError, TypeError):
            outcome.foul = "it wrote results itself, in place of the judge"
        return outcome

    def _line(self, seconds: float) -> bytes:
        """The next line of the judge. Raises Ended if a limit is passed meanwhile."""
        assert self.process is not None and self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        deadline, cpu_before = time.monotonic() + seconds, sum(p.cpu for p in self.descendants())
        while b"\n" not in self.pending:
            if wait([pipe], 0.2) and time.monotonic() < deadline:  # also of a line that comes byte by byte
                data = os.read(pipe, 65536)
                if not data:
                    raise Ended("its process ended in the middle of a test")
                self.pending += data
                if len(self.pending) > MIB:
                    raise Ended("it wrote more than 1 MiB to the pipe of the results")
            else:
                self._limits_hold(deadline, cpu_before)
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def _used(self, processes: "Sequence[Process]") -> int:
        return max(_bytes_under(self.folder), sum(p.written for p in processes))

    def _limits_hold(self, deadline: float, cpu_before: float) -> None:
        limits, processes = self.limits, self.descendants()
        if time.monotonic() > self.deadline and not self.trusted:
            raise Ended(f"the whole submission took more than {limits.all_seconds:g} s")
        if time.monotonic() > deadline:
            raise Ended(f"still running after {limits.test_seconds:g} s")
        if sum(p.cpu for p in processes) - cpu_before > limits.test_cpu_seconds:
            raise Ended(f"still computing after {limits.test_cpu_seconds:g} s of processor time")
        if len(processes) > limits.processes:
            raise Ended(f"more than {limits.processes} processes at a time")
        if sum(p.memory for p in processes) > limits.memory:
            raise Ended(f"more than {limits.memory // MIB} MiB of memory")
        if self._used(processes) - self.used_before > limits.disk:
            raise Ended(f"more than {limits.disk // MIB} MiB on disk")

    # ---------------------------------------------------------------------------------- the process and its children

    def start(self) -> None:
        """Start it in the background, if it is not running: it takes seconds until it can judge."""
        if self.process is not None:
            return
        base, copy = self.folder / "judge", self.folder / "copy"
        write_files({name: content for name, content in self.files.items() if name.startswith("tests/")}, base)
        base.mkdir(exist_ok=True)
        for part in (Path(__file__).with_name("judge.py"), ROOT / "tests" / "harness" / "module_cache.py"):
            shutil.copy(part, base / part.name)
        scratch = self.folder / "tmp"
        for name in ("tmp", "cell"):
            (self.folder / name).mkdir(exist_ok=True)
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "PYTHONPATH": str(base / "tests"),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "RANKS_UNIT": os.environ.get("RANKS_UNIT", "1"),
            "CUDA_VISIBLE_DEVICES": "",  # the exercises are for the CPU, and give the same result everywhere
        }
        limits = {"file_bytes": self.limits.file, "data_bytes": self.limits.memory, "cpu_seconds": 3600}
        limits |= {"threads": 20 * self.limits.processes if self.cell else 0, "trusted": self.trusted}
        command = [sys.executable, str(base / "judge.py"), json.dumps(limits)]
        if not self.cell:  # in a cell an orphan is a child of its first process
            self.mine = _children(os.getpid())
            _adopt_orphans(True)
        self.pending = b""
        self.process = subprocess.Popen(
            in_cell(self.folder, command) if self.cell else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            env=environment,
            start_new_session=True,
        )
        # The judge's imports take longer than writing these files.
        if self.trusted:  # files keep their times, so that the copied compiled modules are valid
            shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        write_files({name: c for name, c in self.files.items() if not _holds(copy / name, c)}, copy)

    def _wait_until_ready(self) -> None:
        if self.ready:
            return
        try:
            why = json.loads(self._line(300))["unwell"]
        except Ended as end:
            why = str(end)
        if why:
            self.stop()
            raise JudgeError(f"the judge did not start: {why}")
        self.ready = True

    def descendants(self) -> "list[Process]":
        """All descendants of the judge. A process whose parent has died becomes our child, and counts."""
        if self.process is None:
            return []
        table = _processes()
        ours = {p.pid for p in table.values() if p.parent == os.getpid() and p.pid not in self.mine}
        roots = set() if self.cell else ours
        found: dict[int, Process] = {}
        new = [table[pid] for pid in roots | {self.process.pid} if pid in table]
        while new:
            found |= {p.pid: p for p in new}
            new = [p for p in table.values() if p.parent in {q.pid for q in new} and p.pid not in found]
        return [p for p in found.values() if p.state != "Z"]

    def stop(self) -> None:
        """End the judge and everything it started, in any session."""
        if self.process is None:
            return
        seen: set[int] = set()  # a process whose parent died first is no descendant, but may still run
        for _ in range(200):
            seen |= {process.pid for process in self.descendants()}
            table = _processes()
            seen = {pid for pid in seen if pid in table and table[pid].state != "Z"}
            if not seen:
                break
            for what in (signal.SIGSTOP, signal.SIGKILL):  # first stop all, so that none can fork
                for pid in seen:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, what)
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):  # without /proc, at least the session
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in set() if self.cell else _children(os.getpid()) - self.mine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.process, self.ready = None, False
        if not self.cell:
            _adopt_orphans(False)
        for name in ("tmp", "judge", "copy"):  # nothing of this run is left for the next
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def in_cell(folder: Path, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in a cell, with this Python; it may write in folder/tmp."""
    python = {sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("-packages"))}
    seen = sorted(python | {os.path.realpath(path) for path in python})
    new = [f"--{name}" for name in ("user", "mount", "pid", "net", "ipc", "uts")]
    unshare = ["unshare", "--map-root-user", *new, "--fork", "--kill-child", "--"]
    return [*unshare, "sh", str(CELL), str(folder / "cell"), str(folder), *seen, "--", *command]


@functools.cache
def no_cell() -> str:
    """Why a cell is not possible on this machine, in one line; "" if it is."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    with tempfile.TemporaryDirectory(prefix="exercises-") as name:
        folder = Path(name)
        for part in ("tmp", "cell"):
            (folder / part).mkdir()
        try:
            done = subprocess.run(
                in_cell(folder, [sys.executable, "-c", ""]), capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        said = done.stderr.strip().splitlines()
        return (said or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


class JudgeError(RuntimeError):
    """The judge could not be started, so there is no result for the submission."""


class Ended(Exception):
    """Why a run was cut short."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str
    cpu: float  # seconds
    memory: int  # bytes, private
    written: int  # bytes, to disks


def _processes() -> dict[int, Process]:
    """All processes of this machine; none where there is no /proc."""
    table: dict[int, Process] = {}
    for entry in Path("/proc").glob("[0-9]*") if Path("/proc/self").exists() else ():
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            pages = (entry / "statm").read_text().split()
            parent, cpu = int(words[1]), (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
            memory = (int(pages[1]) - int(pages[2])) * PAGE
            table[int(entry.name)] = Process(int(entry.name), parent, words[0], cpu, memory, _written(entry))
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
    return table


def _written(entry: Path) -> int:
    with contextlib.suppress(OSError):  # a process of another user
        for line in (entry / "io").read_text().splitlines():
            if line.startswith("write_bytes:"):
                return int(line.split()[1])
    return 0


def _children(parent: int) -> set[int]:
    return {p.pid for p in _processes().values() if p.parent == parent}


def _adopt_orphans(on: bool) -> None:
    """From now on a process whose parent dies becomes our child, not init's: prctl(PR_SET_CHILD_SUBREAPER). Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, int(on), 0, 0, 0)


def _bytes_under(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total


def _holds(path: Path, content: bytes) -> bool:
    try:
        return not path.is_symlink() and path.stat().st_size == len(content) and path.read_bytes() == content
    except OSError:
        return False


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_files(root: Path, own: set[str]) -> dict[str, bytes]:
    """All files of a repository that a copy needs, by their path in it, without the exercises' answers. `own`: the
    folders that tests of exercises use; others may be submissions, or data."""
    files: dict[str, bytes] = {}
    for where, folders, names in os.walk(root):
        left_out = NOT_COPIED(where, [*folders, *names]) | {"__pycache__", "exercises", "mistakes.toml"}
        known = [name for name in folders if Path(where) != root or name in own]
        folders[:] = [name for name in known if name not in left_out]
        for name in names:
            path = Path(where) / name
            if name not in left_out and path.is_file() and path.stat().st_size < 4 * MIB:
                files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files
