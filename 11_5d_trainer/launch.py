"""torchrun, with two habits it does not have: bad options end in one line, and a long save is waited for.

    python 11_5d_trainer/launch.py --nproc_per_node 4 11_5d_trainer/train.py --tp 2        torchrun's own command line

Options. Under torchrun each rank finds out by itself that an option is wrong, and torchrun reports their deaths in half
a hundred lines and ends with 1. Here they are checked for the whole world before any rank is started: one line, code 2.

Signals. torchrun passes SIGTERM on, and kills after 30 seconds whoever has not ended. A step and a checkpoint of a
large model take longer. Here it is ten minutes, unless --shutdown-timeout says otherwise (torch 2.13 has it).

Ends with the code of the first rank that failed, or 128 + n if signal n killed that rank, or ended this run (143).
"""

import os
import sys
from argparse import Namespace
from typing import Any, NoReturn

import paths  # noqa: F401  finds the chapters below
import train
from options import NothingLeft, UsageError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SAVING = 600  # seconds for the step under way and a checkpoint


def arguments(words: list[str]) -> Namespace:
    """torchrun's. Raises UsageError."""
    parser: Any = torchrun.get_args_parser()

    def error(message: str) -> NoReturn:
        raise UsageError(f"{message}; `torchrun --help` lists the options, the script comes after them")

    parser.error = error
    args = parser.parse_args(words)
    if getattr(args, "shutdown_timeout", SAVING) is None:  # older versions have no such option
        args.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVING))
    return args


def check(args: Namespace) -> None:
    """Raise UsageError if the ranks would. Elastic, the world may be smaller: it is checked at its largest."""
    asked = f"--nnodes {args.nnodes} --nproc_per_node {args.nproc_per_node}"
    try:
        _, nodes = torchrun.parse_min_max_nnodes(args.nnodes)
        here = torchrun.determine_local_world_size(args.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{asked}: {error}") from None
    if nodes < 1 or here < 1:
        raise UsageError(f"{asked}: there must be at least 1 rank")
    os.environ["LOCAL_WORLD_SIZE"] = str(here)  # they share this machine's memory; torchrun sets it for them
    train.prepare(args.training_script_args, nodes * here, here - 1)


def main(words: list[str]) -> int:
    try:
        args = arguments(words)
        check(args)
    except UsageError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return 0 if isinstance(error, NothingLeft) else 2
    # When ranks are started again, torchrun gives them its old store, with the addresses of those that have died, and
    # each node counts its starts for itself. So a new store for each start.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"launch.py: rank {rank} ended first, with {failure.exitcode}; what it said is above", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as signal:
        return 128 + int(signal.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
