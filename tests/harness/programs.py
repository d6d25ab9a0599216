"""Run a script as `python SCRIPT OPTIONS` would, without the seconds that importing torch takes.

    done = run_script(folder / "zero3.py", "--ranks", "3")     # a subprocess.CompletedProcess with text
    said = refusal(zero3.main, "--stage 3")                    # what it says in one line, where it has to refuse

`run_script` starts a new process: a fork of the server that also starts the ranks (ranks.py) and has imported torch.
Nothing of this repository is imported there or on its search path, so a copied script finds only files beside
it. It does not test the start of Python: PYTHONPATH and sitecustomize, or the import of torch itself.
"""

import inspect
import io
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from . import ranks
from .module_cache import forget_modules


def run_script(
    script: str | Path,
    *options: str,
    cwd: str | Path | None = None,
    timeout: float = 120,
    python: str = sys.executable,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """TimeoutExpired if it takes longer than `timeout` seconds (of a quiet machine). What it started ends with it.

    `python` starts the ranks of torch.multiprocessing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(ranks.PRELOAD)
    arguments = [str(script), *map(str, options)]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        where = str(cwd or Path(script).parent)
        process = context.Process(target=_run, args=(arguments, where, variables, folder, python))
        process.start()
        try:
            process.join(timeout * ranks._pool.unit)
            late = process.is_alive()
        finally:
            process.kill()
            with suppress(ProcessLookupError):
                os.killpg(process.ident, signal.SIGKILL)  # type: ignore[arg-type]  # None only before the start
            process.join()
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        out, err = (file.read_text() if file.exists() else "" for file in said)
    if late:
        raise subprocess.TimeoutExpired(arguments, timeout, out, err)
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, out, err)


def _run(arguments: list[str], where: str, environment: dict[str, str], folder: str, python: str) -> None:
    """Runs in the new process. `multiprocessing` reports SystemExit or an exception as Python does."""
    os.setsid()  # its processes are a group, which can be ended as one
    threading.Thread(target=ranks._end_with_the_test_process, daemon=True).start()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(where)
    installed = [path for path in sys.path if "-packages" in path or path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [str(Path(arguments[0]).resolve().parent), *installed]
    sys.argv[:] = arguments
    multiprocessing.set_executable(python)
    forget_modules(set())
    runpy.run_path(arguments[0], run_name="__main__")


def printed_json(*words: str | Path, **environment: str) -> list[Any]:
    """What `python WORDS` prints, a JSON value in each line, in an environment that differs in these variables.

    With TRITON_INTERPRET="0" it compiles Triton's kernels, where this process may have begun to interpret them.
    """
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def refusal(main: Callable[[], object] | Path, options: str | Sequence[str] = "", world_size: int | str = 1) -> str:
    """What a script says to options that it refuses, behind its name.

    It says so in one line, prints nothing else and ends with status 2, before any process group. `main` is the script,
    or of an imported one its `main`, or what reads its options.
    """
    script = main if isinstance(main, Path) else Path(inspect.getfile(main))
    status: int | str | None = None
    words = options.split() if isinstance(options, str) else options
    out, err = io.StringIO(), io.StringIO()
    started = AssertionError(f"{script.name} {words}: a process group was started")
    with (
        mock.patch.object(sys, "argv", [str(script), *words]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        mock.patch.dict(os.environ, WORLD_SIZE=str(world_size)),
        mock.patch("torch.distributed.init_process_group", side_effect=started),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        os.environ.pop("RANK", None)
        try:
            ended = runpy.run_path(str(script), run_name="__main__") if isinstance(main, Path) else main()
            status = ended if isinstance(ended, int) else None
        except SystemExit as end:
            status = end.code
    assert (status, out.getvalue()) == (2, ""), f"{script.name} {words} ends with {status}: {out.getvalue()[-900:]}"
    said = err.getvalue()
    assert said.startswith(f"{script.name}: ") and said.count("\n") == 1, f"{script.name} {words} says: {said}"
    return said.removeprefix(f"{script.name}: ").rstrip("\n")


def on_stand_in_gpus(folder: Path, *words: str, gpus: int = 1) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, which imports from `folder`, where torch seems to have GPUs: tests/fake_device stands in."""
    stand_in = Path(__file__).parents[1] / "fake_device"
    if not stand_in.exists():
        import pytest

        pytest.skip("an exercise is checked without a stand-in GPU")
    path = f"{stand_in}{os.pathsep}{folder}"
    environment = os.environ | {"PYTHONPATH": path, "FAKE_GPUS": str(gpus), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120)


def assert_refused(words: str, call: Callable[..., object], *given: object, **options: object) -> None:
    """The call raises a ValueError of one line in which the regular expression `words` is found."""
    said = error_from(ValueError, call, *given, **options)
    assert re.search(words, said) and "\n" not in said, f"{words!r} is not what it says: {said!r}"


def error_from(kind: type[Exception], call: Callable[..., object], *given: object, **options: object) -> str:
    """The text of the error that a call ends with, also of one on a rank; "" without one."""
    try:
        call(*given, **options)
    except kind as error:
        return str(error)
    return ""
