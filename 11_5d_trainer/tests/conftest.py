"""The trainer's modules lie one folder up. Layouts of more than four ranks are for `make prove`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:  # of all folders
        mine = item.path.parent == Path(__file__).parent and hasattr(item, "callspec")
        if mine and item.callspec.params.get("ranks", 0) > 4:
            item.add_marker("prove")
