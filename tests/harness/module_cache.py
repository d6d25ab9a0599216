"""Modules of this repository in a persistent process: unload them, or check that no run has changed them."""

import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

# Imported once by the server that ranks are forked from, so that no rank imports them again.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.nn",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.utils.checkpoint",
]


def forget_modules(keep: Iterable[str]) -> None:
    """Unload the modules of this repository that were imported since `keep`, names of modules, was recorded.

    A test module and its chapter are then imported again, so no change by a run affects the next, and a
    changed copy of a chapter is really the one that runs. Installed packages stay, and what `keep` has begun.
    """
    for name in _ours(keep):
        del sys.modules[name]


def functions(keep: Iterable[str]) -> dict[str, Any]:
    """Functions, classes and methods of the modules that `forget_modules(keep)` would unload, and of torch.distributed.

    From two such dictionaries, before and after a run, `replaced` lists what the run has patched.
    """
    found = {}
    for name, module in (_ours(keep) | {"torch.distributed": sys.modules["torch.distributed"]}).items():
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = value
            if issubclass(type(value), type) and value.__module__ == name:
                found |= {f"{name}.{key}.{method}": it for method, it in vars(value).items() if callable(it)}
    return found


def replaced(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names whose object has changed: patches that were not undone."""
    return sorted(name for name, value in before.items() if after.get(name, value) is not value)


def _ours(keep: Iterable[str]) -> dict[str, ModuleType]:
    keep = keep if isinstance(keep, set) else set(keep)
    found = {}
    for name in sys.modules.keys() - _not_ours:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) or ""
        installed = "site-packages" in file or "dist-packages" in file or file.startswith(os.path.dirname(os.__file__))
        if installed:
            _not_ours.add(name)
        elif module and file and name.partition(".")[0] not in keep:
            found[name] = module
    return found


_not_ours: set[str] = set()  # modules of installed packages: thousands, checked in every run
