"""The command line of this chapter's benchmarks. Invalid or unused options end them: one line, code 2."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

import torch
from _interpreter import INTERPRETED

HELP = {
    "--gpu": "verify and time on a GPU",
    "--dry": "with --gpu and --out: the same program at tiny sizes on the CPU, no results",
    "--out": "folder for the results, instead of results/",
    "--figures": "only draw, from what results/ has",
    "--seconds": "about how long --gpu may take; default 400",
    "--build": "only compile what --gpu times, side by side",
}


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would also print the usage
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def bench_options(
    about: str, *names: str, counts_into_out: bool = False, triton: bool = False, hopper: bool = False
) -> argparse.Namespace:
    """The options of these names; the others exist, but are off. Call it before any computation.

    `counts_into_out`: counts without a GPU may also go to another folder. `triton`: with TRITON_INTERPRET=1 a
    GPU is ignored. `hopper`: the kernel is only for sm_90.
    """
    parser = OneLineParser(prog=Path(sys.argv[0]).name, description=about, allow_abbrev=False)
    for name in names:
        kind = {"--out": dict(type=str), "--seconds": dict(type=float)}.get(name, dict(action="store_true"))
        parser.add_argument(name, help=HELP[name], **kind)
    parser.set_defaults(**dict(gpu=False, dry=False, out=None, figures=False, seconds=None, build=False))
    given = parser.parse_args()
    if given.figures and (given.gpu or given.dry or given.out is not None):
        parser.error("--figures only draws, from results/; leave out the other options, or --figures")
    if given.build and (given.gpu or given.dry or given.out is not None or given.seconds is not None):
        parser.error("--build only compiles; leave out the other options, or --build")
    if given.dry and not given.gpu:
        parser.error("--dry is a way to try --gpu; use both, or neither")
    if given.dry and given.out is None:
        parser.error("--dry needs --out DIR: its numbers are no results")
    if given.dry and triton and not INTERPRETED:
        parser.error("--dry is for a machine without a GPU; set TRITON_INTERPRET=1, or leave it out")
    if given.out is not None:
        if not given.out or (Path(given.out).exists() and not Path(given.out).is_dir()):
            parser.error(f"--out {given.out!r} is no folder; name one, or a new one")
        if not (given.gpu or counts_into_out):
            parser.error(f"--out {given.out} is where --gpu writes; use both, or neither")
        given.out = Path(given.out)
    if given.seconds is not None and not (math.isfinite(given.seconds) and given.seconds > 0):
        parser.error(f"--seconds {given.seconds:g} is no time to measure in; use a number above 0")
    if given.seconds is not None and not given.gpu:
        parser.error(f"--seconds {given.seconds:g} is the time of --gpu; use both, or neither")
    given.seconds = 400.0 if given.seconds is None else given.seconds
    if (given.gpu and not given.dry) or given.build:
        option = "--gpu" if given.gpu else "--build"
        if not torch.cuda.is_available() or (triton and INTERPRETED):
            parser.error(f"{option} finds no GPU here; --gpu --dry --out DIR tries the program on the CPU")
        if hopper and torch.cuda.get_device_capability() != (9, 0):
            parser.error(f"{option}: {torch.cuda.get_device_name()} is no sm_90, and the kernel is for nothing else")
    return given
