"""Plant a mistake in a copy of the repository and see whether the test that should catch it does.

`exercises/mistakes/SCRIPT.toml` lists mistakes: a few lines of SCRIPT.py, what a student or a real project wrote in
their place, the test that must turn red, and a hint for whoever made it (`elu.cu.toml` is about elu.cu).
tests/test_mistakes.py plants every one.

A pytest process costs seconds to start, so one `Runner` process runs all of them, one after another, in fresh copies;
between two runs it forgets all modules of the repository (`forget_modules`), as the ranks do.
"""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness.house import ROOT, find

NOT_COPIED = shutil.ignore_patterns(".*", "*.pyc.*", "runs", "profiles", "results", "student", "*.egg-info")


@dataclass(frozen=True)
class Mistake:
    script: Path  # relative to the repository
    name: str
    exercise: str  # "2.3", or "" outside the exercises
    old: str
    new: str
    caught_by: str  # "test_file.py::test_name"
    hint: str
    source: str
    spoils: str = ""  # the benchmarks that have to notice it: "bench_zero bench_zero3"

    @property
    def test(self) -> str:
        """The test's node id, relative to the repository."""
        file, _, name = self.caught_by.partition("::")
        return f"{find(file).relative_to(ROOT)}::{name}"


def all_mistakes(folder: Path = ROOT / "exercises" / "mistakes") -> list[Mistake]:
    mistakes = []
    for file in sorted(folder.glob("*.toml")):
        name = file.stem if "." in file.stem else f"{file.stem}.py"
        entries = tomllib.loads(file.read_text())["mistake"]
        mistakes += [Mistake(find(name).relative_to(ROOT), **entry) for entry in entries]
    return mistakes


def copy_repository(to: Path) -> Path:
    """With the compiled modules: files keep their times, so these stay valid, and are not made again in every copy."""
    return Path(shutil.copytree(ROOT, to, ignore=NOT_COPIED))


def plant(mistake: Mistake, copy: Path) -> None:
    """Replace `old` by `new` in the copy. ValueError unless `old` occurs exactly once, inside the named exercise."""
    script = copy / mistake.script
    text = script.read_text()
    if text.count(mistake.old) != 1:
        raise ValueError(
            f"mistake {mistake.name}: its `old` occurs {text.count(mistake.old)} times in {mistake.script}"
        )
    before = text[: text.index(mistake.old)]
    fences = re.findall(r"^ *# --- (?:exercise ([\d.]+)|(end) exercise)", before, re.MULTILINE)
    inside = fences[-1][0] if fences and not fences[-1][1] else ""
    if inside != mistake.exercise:
        raise ValueError(f"mistake {mistake.name}: says exercise {mistake.exercise!r} but lies in {inside!r}")
    script.write_text(text.replace(mistake.old, mistake.new))
    for compiled in script.parent.glob(f"__pycache__/{script.stem}.*"):
        compiled.unlink()


class Runner:
    """A process that runs single tests of a copy of the repository and reports what became of them."""

    def __init__(self, harness: Path = ROOT / "tests" / "harness") -> None:
        command = [sys.executable, str(harness / "plant.py")]
        environment = os.environ | {"PYTHONPATH": str(harness.parent)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )

    def run(self, copy: Path, test: str, timeout: float = 120.0) -> dict[str, Any]:
        """{"outcome": "passed", "failed" or "broken", "message": ...}; "broken" is a test that could not be run."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([str(copy), test]), file=self.process.stdin)
        if not wait([self.process.stdout.fileno()], timeout):
            self.close()
            return {"outcome": "broken", "message": f"{test} was still running after {timeout:g} s"}
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"outcome": "broken", "message": "the runner died"}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # it ends by itself and takes its ranks with it, unless it is stuck
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Recorder:
    """A pytest plugin that keeps what failed and how."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.broken: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            (self.failed if report.when == "call" else self.broken).append(report.longreprtext)
        elif report.when == "call" and report.passed:
            self.passed += 1

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken.append(report.longreprtext)


def _run_test(copy: str, test: str) -> dict[str, Any]:
    import pytest

    os.chdir(copy)
    recorder = _Recorder()
    options = ["-x", "-p", "no:cacheprovider", "-c", f"{copy}/pyproject.toml", "--rootdir", copy]
    pytest.main([*options, f"{copy}/{test}"], plugins=[recorder])
    if recorder.broken or not (recorder.failed or recorder.passed):
        return {"outcome": "broken", "message": "\n".join(recorder.broken) or f"no such test: {test}"}
    return {"outcome": "failed" if recorder.failed else "passed", "message": "\n".join(recorder.failed)}


def _serve() -> None:
    import torch
    import torch.distributed.nn
    import torch.distributed.tensor

    from harness.ranks import forget_modules, limit_timeouts

    limit_timeouts(60)
    torch.set_num_threads(1)
    gc.freeze()  # what is imported by now is never garbage, and pytest collects garbage often
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # the answers have the pipe for themselves
        os.dup2(nowhere.fileno(), 2)
    modules, search_path = set(sys.modules), list(sys.path)
    for line in sys.stdin:
        print(json.dumps(_run_test(*json.loads(line))), file=answers)
        sys.path[:] = search_path
        forget_modules(modules)


if __name__ == "__main__":
    _serve()
