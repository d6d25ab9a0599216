"""Unload modules of this repository, so that the next run of a process that stays imports its own versions."""

import os
import sys
from collections.abc import Iterable


def forget_modules(keep: Iterable[str]) -> None:
    """Unload the modules of this repository that were imported since `keep`, names of modules, was recorded.

    A test module and its chapter are then imported afresh, so nothing that a run changed in them reaches the next, and
    a changed copy of a chapter is really the one that runs. Installed packages stay, and what `keep` has begun.
    """
    packages = {name.partition(".")[0] for name in keep}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        installed = "site-packages" in file or "dist-packages" in file or file.startswith(os.path.dirname(os.__file__))
        if file and not installed and name.partition(".")[0] not in packages:
            del sys.modules[name]
