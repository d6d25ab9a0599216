"""The CUDA build and the CPU emulator, which are in chapter 09, or beside this file if they were copied."""

import sys
from pathlib import Path

# After this folder's own modules, which have priority.
sys.path.append(str(Path(__file__).resolve().parents[2] / "09_kernels" / "in_depth"))

from _cuda import FORWARD, REVERSE, CudaError, ahead, behind, call, library, racing, resources

__all__ = ["FORWARD", "REVERSE", "CudaError", "ahead", "behind", "call", "library", "racing", "resources"]
