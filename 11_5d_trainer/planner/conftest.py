"""The planner's modules lie here, the trainer's one folder up. Layouts of more than four ranks are for `make prove`."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:  # of all folders
        mine = item.path.parent == HERE and hasattr(item, "callspec")
        if mine and item.callspec.params.get("ranks", 0) > 4:
            item.add_marker("prove")
