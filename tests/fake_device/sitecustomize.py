"""Found by Python at its start if this folder is on PYTHONPATH: with FAKE_GPUS=N, torch gets N stand-in GPUs.

It waits until torch is imported, by the program itself and by every process that it starts, and then installs
fake_device.py; Triton's interpreter gets a GPU's division in the same way, and its compiler a driver. Without the
variable nothing is touched.
"""

import importlib.abc
import importlib.machinery
import os
import sys

WAITING = {
    "torch": "install",
    "triton.runtime.interpreter": "install_division",
    "triton.runtime.driver": "install_compiler",
}


class After(importlib.abc.MetaPathFinder):
    """Lets a module be found as always, and calls a function of fake_device.py once it has been executed."""

    def find_spec(self, name, path=None, target=None):
        if name not in WAITING:
            return None
        call = WAITING.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def then_call(module):
                execute(module)
                import fake_device

                getattr(fake_device, call)(module)

            spec.loader.exec_module = then_call
        return spec


if os.environ.get("FAKE_GPUS", "0") not in ("", "0"):
    sys.meta_path.insert(0, After())
