"""What `make test` and `make prove` run, and in which order.

make test              all but the tests marked `prove`; of a test marked `always` the parameters that the mark names,
                       so one planted mistake
make test FOR=changed  of these the tests that import what differs from main, and those about its chapters
make prove             everything, but no mistake that .pytest_cache/verdicts knows to be caught
make prove CH=03       everything about one chapter
make prove FRESH=1     everything, whatever is known, and every call of a rank imports the chapters' modules afresh
"""

import gc
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
sys.path.append(str(ROOT / "tests"))  # which pyproject.toml does, too, if it is the one in use
from harness.layout import HOMES  # noqa: E402

collect_ignore = [folder.name for folder in ROOT.glob("[01]*_*") if folder.name not in HOMES]  # copies of a chapter
TRITON = find_spec("triton") is not None
PREFLIGHT = """
import json
from multiprocessing import forkserver
forkserver.set_forkserver_preload(["torch"])
forkserver.ensure_running()  # it imports torch while this process does
from harness import ranks
print(json.dumps([ranks.preflight(), ranks._pool.unit]))
"""


def pytest_addoption(parser):
    parser.addoption("--prove", action="store_true", help="everything that can be proven")
    parser.addoption("--fresh", action="store_true", help="trust no cache: plant all, import modules for each call")
    parser.addoption("--for", choices=["changed"], help="the tests that the files reach which differ from main")
    parser.addoption("--chapter", default="", metavar="CH", help="only what is about this chapter: 03")


def pytest_configure(config):
    chapter = config.getoption("--chapter")
    if chapter and chapter not in {name[:2] for name in HOMES}:
        known = " ".join(sorted(name[:2] for name in HOMES))
        pytest.exit(f"there is no chapter {chapter!r}; CH is one of {known}", returncode=2)
    if config.getoption("--prove"):
        os.environ["PROVE"] = "1"
    if config.getoption("--fresh"):
        os.environ["FRESH_MODULES"] = "1"
    # Everything that all workers have to agree on is decided here, before they are started.
    if config.getoption("--for") and not hasattr(config, "workerinput"):
        from harness.mutations import changed_files, tests_for

        try:
            changed = changed_files()
        except LookupError as error:
            pytest.exit(f"--for changed: {error}", returncode=2)
        chapters = {file.relative_to(ROOT).parts[0][:2] for file in changed}
        os.environ["FOR"] = json.dumps([sorted(map(str, tests_for(changed))), sorted(chapters)])
    if "RANKS_UNIT" not in os.environ and not config.getoption("--collect-only"):
        environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
        done = subprocess.run([sys.executable, "-c", PREFLIGHT], env=environment, capture_output=True, text=True)
        unwell, unit = json.loads(done.stdout) if done.returncode == 0 else (done.stderr.strip()[-200:], 1)
        if unwell:
            pytest.exit(unwell, returncode=2)
        os.environ["RANKS_UNIT"] = str(unit)


def pytest_collection(session):
    """Begin in another place than the other workers. In a fresh clone pytest compiles each module of tests when it is
    first imported: so each worker compiles a part, and finds the others."""
    if worker := getattr(session.config, "workerinput", None):
        folders = session.config.args
        first = len(folders) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        session.config.args = folders[first:] + folders[:first]


def pytest_collection_modifyitems(config, items):
    """Leave out what was not asked for, and start what takes long first, so that no worker is alone at the end."""
    chapter = config.getoption("--chapter")
    prove = config.getoption("--prove") or any("::" in word for word in config.args)  # one by name is meant
    chosen, left = [], []
    tests, chapters = json.loads(os.environ["FOR"]) if config.getoption("--for") else ([], [])
    missing: dict[tuple, set[str]] = {}  # of each test the parameters that `always` names and that it does not have
    for item in items:
        own = item.callspec.id if hasattr(item, "callspec") else ""
        about = [mark.args[0] for mark in item.iter_markers("chapter")] + re.findall(r"^([01]\d)_", own)
        wanted = not chapter or item.path.relative_to(ROOT).parts[0][:2] == chapter or chapter in about
        if config.getoption("--for"):
            wanted = wanted and (str(item.path) in tests or not {*chapters}.isdisjoint(about))
        plain = not item.get_closest_marker("prove")
        if mark := item.get_closest_marker("always"):
            missing.setdefault((item.path, item.originalname), set(mark.args)).discard(own)
            plain = plain and own in mark.args
        wanted = wanted and (prove or plain)
        (chosen if wanted else left).append(item)
    if wrong := [f"{name}: {sorted(ids)}" for (_, name), ids in missing.items() if ids and not prove]:
        raise pytest.UsageError(f"no such parameters as `always` names: {', '.join(wrong)}")
    config.hook.pytest_deselected(items=left)
    order = {
        item: (not item.get_closest_marker("long"), item.path.parent.name != "tests", item.path) for item in chosen
    }
    items[:] = sorted(chosen, key=order.__getitem__)


def skip_for_want_of_triton(error):
    """Skip what fails where Triton is not installed because of that: it is for Linux, and macOS has none."""
    if not TRITON and re.search(r"needs Triton|No module named 'triton'", str(error)):
        pytest.skip("needs Triton, which is not installed", allow_module_level=True)


class Module(pytest.Module):
    def collect(self):
        try:
            return super().collect()
        except (self.CollectError, SystemExit) as error:
            skip_for_want_of_triton(error)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    try:
        return (yield)
    except (Exception, SystemExit) as error:
        skip_for_want_of_triton(error)
        raise


pytest_pyfunc_call = pytest_runtest_setup  # a fixture may fail for want of it, or the test itself


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # thousands of tests and their modules, which stay: no later collection has to look at them again
