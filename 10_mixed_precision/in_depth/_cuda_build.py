"""The CUDA build and the CPU emulator, which live once, in chapter 09; beside this file where somebody copied them."""

import sys
from pathlib import Path

# Behind this folder's own modules, which go first.
sys.path.append(str(Path(__file__).resolve().parents[2] / "09_kernels" / "in_depth"))

from _cuda import FORWARD, REVERSE, CudaError, ahead, behind, call, library, racing, resources

__all__ = ["FORWARD", "REVERSE", "CudaError", "ahead", "behind", "call", "library", "racing", "resources"]
