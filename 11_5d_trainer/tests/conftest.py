"""The trainer's modules are one folder up, and the planner's below them; fuzz.py and layouts.py, which the
tests share with `make fuzz`, are here.

Layouts of more than four ranks are for `make prove`; of test_five_d.py `always` says which.
"""

import sys
from pathlib import Path

import pytest

TRAINER = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TRAINER), str(TRAINER / "planner")]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file to train on."""
    from fuzz import write_text

    return write_text(tmp_path_factory.mktemp("data"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:  # of all folders
        mine = item.path.parent == Path(__file__).parent and hasattr(item, "callspec")
        if mine and item.callspec.params.get("ranks", 0) > 4:
            item.add_marker("prove")
