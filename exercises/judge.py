"""The part of the checker that runs students' code. `sandbox.py` starts it, limits it and reads its results.

A request is one line of JSON on standard input: {"nonce", "copy", "tests"}. The tests are run by pytest in that copy of
the repository; the answer is one line of JSON per test, as soon as it is done, and a last one with "done". Each repeats
the nonce of its request. The pipe has only answers: all printed output goes to /dev/null.

This process and the ranks it starts execute code that is not trusted, so its answers are not trusted by
themselves: see "What the checker can be trusted with" in exercises/README.md. With "theirs", a folder, only
the ranks run the student's script in it, and this process, in which the tests compare, runs the chapter's.
"""

import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import importlib
import io
import json
import os
import pickle
import re
import resource
import select
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import pytest
from module_cache import PRELOAD, forget_modules  # sandbox.py copies it beside this file

LONGEST_MESSAGE = 4000  # characters of a failure that are passed on
LONGEST_VALUE = 320  # characters of each value in a comparison: both are in what `told` of checking.py shows
MOST_OF_A_CLAIM = 3  # failed parameters of one test, after which its others are skipped
TOOLS = ("__main__.", "pytest.", "_pytest.", "harness.", "torch.testing.")  # these decide on a pass
PLAIN = {  # what a rank may send besides numbers, texts and plain classes
    *(f"builtins.{name}" for name in ("bytearray", "complex", "frozenset", "range", "set", "slice")),
    *(f"collections.{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")),
    *(f"torch._utils._rebuild_{what}" for what in ("parameter", "tensor_v2", "meta_tensor_no_storage")),
    *("torch.Size", "torch.device", "torch.serialization._get_layout"),
}


class Recorder:
    """A pytest plugin that reports each test and stops the run when more tests are of no use."""

    def __init__(self, answer: Any, hang: float, enough: int, few: set[str]) -> None:
        self.answer, self.hang, self.enough, self.few = answer, hang, enough, few
        self.began = 0.0
        self.failures: Counter[str] = Counter()  # by claim: a test without its parameters
        self.session: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        claims = [item.nodeid.partition("[")[0] for item in items]
        last = {claim: at for at, claim in enumerate(claims)}
        first = {claim: at for at, claim in reversed([*enumerate(claims)])}
        kept = [at for at, claim in enumerate(claims) if claim not in self.few or at in (first[claim], last[claim])]
        items[:] = [items[at] for at in kept]

    def pytest_collection_finish(self, session: Any) -> None:
        ranks = sys.modules.get("harness.ranks")  # imported by the tests that need it
        if ranks is not None:
            ranks.limit_timeouts(self.hang)  # type: ignore[attr-defined]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.began = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        if self.failures[item.nodeid.partition("[")[0]] == MOST_OF_A_CLAIM:
            pytest.skip("its other parameters say enough")

    @pytest.hookimpl(wrapper=True)
    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> Iterator[None]:
        """Where pytest cuts the values of a comparison to 30 characters, show more of both. Its own option for
        this, verbosity_assertions=2, would add a diff, which takes minutes for lists of thousands."""
        explanations: Any = yield
        texts = [repr(value) for value in (left, right)]
        shown = [text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..." for text in texts]
        for lines in explanations:
            lines[:1] = [f"{shown[0]} {op} {shown[1]}"] if "..." in lines[0] else lines[:1]
        return explanations

    def pytest_runtest_logreport(self, report: Any) -> None:
        claim = report.nodeid.partition("[")[0]
        done = report.when == "call" or (report.when == "setup" and not report.passed)
        broken = report.when == "teardown" and report.failed
        if not (done or broken) or self.failures[claim] == MOST_OF_A_CLAIM:
            return
        seconds = time.monotonic() - self.began
        passed = report.passed and not hasattr(report, "wasxfail")  # a skipped test has not passed
        file, _, name = report.nodeid.partition("::")
        test = f"{Path(file).name}::{name}"  # from any folder
        outcome = "passed" if passed else "failed" if report.when == "call" else "broken"
        self.answer(test=test, outcome=outcome, message=message_of(report), seconds=seconds)
        if not passed:
            self.failures[claim] += 1
            if len(self.failures) == self.enough or seconds > 0.5 * self.hang:
                self.session.shouldstop = "that is enough to know"

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed or report.skipped:
            self.answer(test="", outcome="broken", message=message_of(report), seconds=0.0)


def message_of(report: Any) -> str:
    """The exception's own message. For an error in a rank, the rank's."""
    if report.passed:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    skipped = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""  # file, line, "Skipped: and why"
    text = crash.message if crash else skipped or str(report.longrepr)
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", [])
    lines = entries[-1].lines if entries else []
    begin = next((n for n, line in enumerate(lines) if line.startswith(">")), len(lines))
    end = next((n for n, line in enumerate(lines) if line.startswith("E") and n > begin), len(lines))
    shown = [re.sub(r"  # .*", "", line.lstrip("> ")).strip(" ^") for line in lines[begin:end]]
    source = " ".join(filter(None, shown))
    if raised := text.partition("Traceback (most recent call last):\n")[2]:
        last = [m.start() for m in re.finditer(r"^[\w.]+(?:: |$)", raised, re.MULTILINE)]
        shown = re.findall(r"^ +(assert .*)$", raised[: last[0]], re.MULTILINE) if last else []
        source = shown[-1] if shown else ""
        text = raised[last[0] :].split("\n\nthe others")[0].split("\n\nranks [")[0] if last else text
    return text[:LONGEST_MESSAGE] + f"\nsource: {source}" * source.startswith("assert ")


class Plain(pickle.Unpickler):
    """Reads data without running code, since a rank's messages may come from the student's code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):  # a nested pickle
            return lambda data: sys.modules["torch"].load(io.BytesIO(data), weights_only=True)
        value: Any = sys.modules.get(module)
        for part in name.split("."):
            value = getattr(value, part, None)
        record = isinstance(value, type) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields"))
        if f"{module}.{name}" in PLAIN or record or type(value).__name__ == "dtype":
            return value
        raise pickle.UnpicklingError(f"a rank sent {module}.{name}, which is no plain value")


def run_theirs(folder: str, call: bytes) -> Any:
    """In a rank: run the test's function, with the student's script in place of the chapter's."""
    sys.path.insert(0, folder)
    for script in Path(folder).glob("*.py"):  # now, before the test's module puts its folders first
        importlib.import_module(script.stem)
    fn, args, kwargs = pickle.loads(call)
    return fn(*args, **kwargs)


@contextlib.contextmanager
def theirs_in_ranks(folder: str) -> Iterator[None]:
    """Inside, the ranks run the script of `folder`, and this process accepts only plain values from them."""
    ranks: Any = sys.modules.get("harness.ranks")
    if not folder or ranks is None:
        yield
        return
    run = ranks._pool.run

    def call(world_size: int, fn: Any, args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        try:
            return run(world_size, run_theirs, (folder, pickle.dumps((fn, args, kwargs))), {}, timeout)
        except BaseException:  # a refused message leaves ranks that wait for an answer
            ranks._pool.stop()
            raise

    ranks._pool.run = call
    ranks.pickle = types.SimpleNamespace(dumps=pickle.dumps, loads=lambda data: Plain(io.BytesIO(data)).load())
    try:
        yield
    finally:
        ranks.pickle = pickle
        del ranks._pool.run


def tools() -> dict[str, str]:
    """A fingerprint of each function and class that decides whether a test passes, the same in every process.

    If a submission replaces or changes code while it runs, the fingerprint differs.
    """
    prints: dict[str, str] = {}
    for module_name, module in list(sys.modules.items()):
        if f"{module_name}.".startswith(TOOLS):
            for name, value in list(vars(module).items()):
                prints |= _fingerprints(f"{module_name}.{name}", value)
    return prints


def _fingerprints(name: str, value: Any) -> dict[str, str]:
    value = getattr(value, "__func__", value)  # of a classmethod or staticmethod
    if isinstance(value, types.FunctionType):
        code, defaults = value.__code__, [d for d in value.__defaults__ or () if isinstance(d, (int, float, str))]
        words = f"{value.__module__} {value.__qualname__} {code.co_names} {code.co_varnames} {defaults}"
        return {name: hashlib.sha256(code.co_code + words.encode()).hexdigest()[:16]}
    if isinstance(value, type):
        members = (_fingerprints(f"{name}.{k}", v) for k, v in list(vars(value).items()) if not isinstance(v, type))
        return {k: v for member in members for k, v in member.items()} | {name: f"{value.__module__}.{value.__name__}"}
    if name.startswith("harness.") and "__" not in name and isinstance(value, (int, float)):  # tolerances
        return {name: repr(value)}
    return {}


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names whose code has changed; later imports are not changes."""
    return sorted(name for name, was in before.items() if after.get(name) != was)


def limit(file_bytes: int, data_bytes: int, cpu_seconds: int, threads: int) -> None:
    """Set limits for this process and all its children. They cannot raise them again (unless they are root).

    `threads` is for all processes of this user together: 0, no limit, if the user has other processes.
    """
    for kind, most in (
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_DATA, data_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_CORE, 0),
        *([(resource.RLIMIT_NPROC, threads)] if threads else []),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard),) * 2)


def fork(_path: str, arguments: list[str], keep: list[int]) -> int:
    """Like `util.spawnv_passfds` for `python -c CODE`, but in a fork of this process with all its imports.

    So these imports are done once, and neither the server of the ranks nor a rank repeats them.
    """
    if pid := os.fork():
        return pid
    try:
        for fd in set(range(3, 256)) - set(keep):  # especially the pipe of the results
            with contextlib.suppress(OSError):
                os.close(fd)
        exec(arguments[-1])
    finally:
        os._exit(0)


def end_with(pipe: int) -> None:
    """End this process, and its cell, when the other end of this pipe is closed, because the checker was killed."""
    waiting = select.poll()
    waiting.register(pipe, 0)
    waiting.poll()
    os._exit(1)


def main() -> None:
    options = json.loads(sys.argv[1])
    trusted = options.pop("trusted")
    limit(**options)
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    requests = os.fdopen(os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)

    unwell = ""
    if Path("../judge/tests/harness/ranks.py").exists():
        # Ranks are forked from a server. With the harness in it, no rank imports the harness from the copy of
        # the run that started it, which no longer exists when a later run needs another of its modules.
        preload = [*PRELOAD, "harness.meter", "harness.reference", "harness.ranks"]
        for name in preload:
            importlib.import_module(name)
        forkserver.set_forkserver_preload(preload)
        resource_tracker.ensure_running()
        util.spawnv_passfds, spawn = fork, util.spawnv_passfds
        forkserver.ensure_running()
        util.spawnv_passfds = spawn
        import harness.ranks
        import torch

        torch.set_num_threads(1)
        harness.ranks.use_fresh_modules()
        unwell = "" if trusted else harness.ranks.preflight()
    if sys.platform == "linux":  # no rank can access this process's memory or pipe: PR_SET_DUMPABLE
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    gc.freeze()  # imported modules are never garbage: pytest's collections after each run skip them
    search_path, modules = list(sys.path), set(sys.modules)
    before = {} if trusted else tools()
    threading.Thread(target=end_with, args=(requests.fileno(),), daemon=True).start()
    print(json.dumps({"unwell": unwell}), file=pipe)
    for line in requests:
        request = json.loads(line)

        def answer(nonce: str = request["nonce"], **values: Any) -> None:
            print(json.dumps({"nonce": nonce, **values}), file=pipe)

        copy = request["copy"]
        os.chdir(copy)
        arguments = ["-p", "no:cacheprovider", "-c", f"{copy}/pyproject.toml", "--rootdir", copy, "--durations=0"]
        arguments += ["-o", "truncation_limit_chars=0"]  # LONGEST_VALUE is the limit
        recorder = Recorder(answer, request["hang"], request["enough"], set(request["few"]))
        with theirs_in_ranks(request["theirs"]):
            pytest.main([*arguments, *(f"{copy}/{test}" for test in request["tests"])], plugins=[recorder])
        sys.path[:] = search_path
        forget_modules(modules)
        shared = before and not request["theirs"]  # the student's lines may have changed the judge
        foul = changed(before, tools()) if shared else []
        pool = getattr(sys.modules.get("harness.ranks"), "_pool", None) if shared else None
        for theirs in pool.run(len(pool.workers), tools, (), {}, 30) if pool and pool.workers else ():
            foul += changed({name: was for name, was in before.items() if name in theirs and name[:2] != "__"}, theirs)
        answer(done=True, foul=sorted(set(foul))[:5])


if __name__ == "__main__":
    main()
