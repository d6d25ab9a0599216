"""Run a script as `python SCRIPT OPTIONS` would, without the seconds that importing torch takes.

    done = run_script(folder / "zero3.py", "--ranks", "3")     # a subprocess.CompletedProcess with text

A new process for each run: a fork of the server that also starts the ranks (ranks.py) and has imported torch.
Nothing of this repository is imported there or on its search path, so a copied script finds only files beside
it. It does not test the start of Python: PYTHONPATH and sitecustomize, or the import of torch itself.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from . import ranks
from .module_cache import forget_modules


def run_script(
    script: str | Path, *options: str, cwd: str | Path | None = None, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """TimeoutExpired if it takes longer than `timeout` seconds (of a quiet machine)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(ranks.PRELOAD)
    arguments = [str(script), *map(str, options)]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        where = str(cwd or Path(script).parent)
        process = context.Process(target=_run, args=(arguments, where, variables, folder))
        process.start()
        process.join(timeout * ranks._pool.unit)
        late = process.is_alive()
        process.kill()
        process.join()
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        out, err = (file.read_text() if file.exists() else "" for file in said)
    if late:
        raise subprocess.TimeoutExpired(arguments, timeout, out, err)
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, out, err)


def _run(arguments: list[str], where: str, environment: dict[str, str], folder: str) -> None:
    """Runs in the new process. `multiprocessing` reports SystemExit or an exception as Python does."""
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
    forget_modules(set())
    runpy.run_path(arguments[0], run_name="__main__")
