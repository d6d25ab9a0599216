"""torchrun with three changes: wrong options end in one line, a long save may finish, and a run that would
fail in the same way again is not restarted.

    python 11_5d_trainer/launch.py --nproc_per_node 4 11_5d_trainer/train.py --tp 2        torchrun's own command line
    python 11_5d_trainer/launch.py --nproc_per_node 4 any_script.py                        without the check of options

Options. Under torchrun each rank finds a wrong option by itself, and torchrun reports the failed ranks in
some fifty lines and ends with 1. Here the options of train.py are checked for the whole world before any rank
is started: one line, code 2.

Signals. torchrun passes SIGTERM on and kills ranks that have not ended after 30 seconds. A step and a
checkpoint of a large model take longer. Here it is ten minutes, or --shutdown-timeout, from torch 2.13 on.

Restarts. A rank that ends with code 2 or 3 has said why in one line (a wrong option, a gradient that is not finite),
and --max-restarts does not apply.

Ends with the code of the first rank that failed, or 128 + n if signal n killed that rank, or ended this run (143).
"""

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # Ctrl-C during the slow imports below prints no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import paths  # noqa: F401  finds the chapters below
import train
from options import NothingLeft, UsageError
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as elastic

if __name__ == "__main__":  # from here on main handles Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

SAVING = 600  # seconds for the current step and a checkpoint
SAID = {2, 3}  # exit codes of train.py after a one-line message


def arguments(words: list[str]) -> Namespace:
    """torchrun's arguments. Raises UsageError."""
    parser: Any = torchrun.get_args_parser()

    def error(message: str) -> NoReturn:
        raise UsageError(f"{message}; `torchrun --help` lists the options, the script comes after them")

    parser.error = error
    args = parser.parse_args(words)
    if getattr(args, "shutdown_timeout", SAVING) is None:  # older versions have no such option
        args.shutdown_timeout = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVING))
    return args


def check(args: Namespace) -> None:
    """Raise UsageError if the ranks would. A world that may shrink (elastic) is checked at its largest."""
    asked = f"--nnodes {args.nnodes} --nproc_per_node {args.nproc_per_node}"
    try:
        _, nodes = torchrun.parse_min_max_nnodes(args.nnodes)
        here = torchrun.determine_local_world_size(args.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{asked}: {error}") from None
    if nodes < 1 or here < 1:
        raise UsageError(f"{asked}: there must be at least 1 rank")
    if Path(args.training_script).resolve() == Path(train.__file__).resolve():
        os.environ["LOCAL_WORLD_SIZE"] = str(here)  # they share this machine's memory; torchrun sets it for them
        train.prepare(args.training_script_args, nodes * here, here - 1)


class Agent(LocalElasticAgent):
    """torchrun's agent, except that it restarts ranks only if that could help."""

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if any(failure.exitcode in SAID for failure in (result.failures or {}).values()):
            self._remaining_restarts = 0
        return result


def how_it_ended(error: ChildFailedError) -> tuple[int, str]:
    """Exit code and a line, of the rank that ended first; torchrun ends the others, also by signals."""
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    if code in SAID:
        return code, ""
    if code == 4:
        return code, f"rank {rank} and others waited for ranks that did not answer: the line above names these"
    if code >= 0:
        return code, f"rank {rank} ended first, with {code}; what it said is above"
    name = signal.Signals(-code).name
    guess = {"SIGKILL": "; out of memory? The kernel's log says so then", "SIGABRT": "; NCCL's watchdog does that to "}
    guess["SIGABRT"] += "ranks that have waited --timeout for another one"
    return 128 - code, f"rank {rank} was ended by {name}{guess.get(name, '')}"


def main(words: list[str]) -> int:
    try:
        args = arguments(words)
        check(args)
    except UsageError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return 0 if isinstance(error, NothingLeft) else 2
    except KeyboardInterrupt:
        return 130
    # On a restart torchrun would reuse its old store, which has the addresses of dead ranks, and each node
    # counts its own restarts. So each start gets a new store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    elastic.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        code, line = how_it_ended(error)
        if line:
            print(f"launch.py: {line}", file=sys.stderr)
        return code
    except SignalException as signal_:
        return 128 + int(signal_.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
