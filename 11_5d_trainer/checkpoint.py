"""Checkpoints that are complete or not there, on torch.distributed.checkpoint, written while training goes on.

    RUN/checkpoints/step-000200/           complete: it got its name by one rename, after every file was written
        __0_0.distcp ... .metadata         weights and optimizer states, by parameter name, written by all ranks
        manifest.json                      steps done, data position, options, size and checksum of every file
    RUN/checkpoints/.writing-000300/       a save that is pending or was interrupted; the next save removes it
    RUN/lock                               held by the job that writes into RUN; released when that job ends

Weights and optimizer states are stored unsharded, by Hugging Face's names, so a checkpoint does not depend on
the layout that wrote it and can be loaded in any other. No rank ever holds all of it: each rank writes its
part (full_state.py) and reads one tensor at a time.
"""

import contextlib
import json
import math
import os
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import Lazy
from options import RunEnds, UsageError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

LAG = 60.0  # seconds after which a file that one node has written is seen by all, on file systems like NFS
PATIENCE = 2.0  # seconds to wait for the lock of a job that is just ending
LEASE = 120.0  # for the lock of a machine that is gone: NFS releases it after 90


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    step: int  # steps done
    samples: int  # samples used, over all ranks and micro-batches: the position in the data
    tokens: int  # in the training data; with other data the position means nothing
    config: dict[str, Any]  # the run's options
    sizes: dict[str, Any]  # of the model: the fields of LlamaConfig
    loss_scale: float = 1.0
    good_steps: int = 0  # since the loss scale changed
    numbers: bool | None = None  # whether the data were token ids, not text; None: not noted yet
    data: str = ""  # fingerprint of the data; "": they have none, or it was not noted yet
    val_loss: float | None = None  # of a validation after this very step


class NotShared(RunEnds):
    """A file that a rank has written is not visible to rank 0."""


class Saver:
    """Writes checkpoints of a run in the background. `group` needs a CPU backend (Gloo) and is used by the
    saver alone. The ranks agree in it on what each writes, while training goes on in the other groups.

    A checkpoint that cannot be written, say because the disk is full, does not end the run. `failure` is the
    reason, on all ranks, until a checkpoint is written again, and `say` tells the user.
    """

    def __init__(
        self,
        run: Path,
        group: dist.ProcessGroup,
        keep: int,
        say: Callable[[str], None] = print,
        keep_best: bool = False,
    ) -> None:
        self.run = run
        self.group = group
        self.keep = keep
        self.say = say
        self.keep_best = keep_best
        self.failure = ""
        self.leader = dist.get_rank(group) == 0
        self.background = ThreadPoolExecutor(1)
        self.pending: Future[Any] | None = None

    def save(self, state: dict[str, Any], progress: Progress) -> None:
        """Start to write all ranks' shares (full_state.py), each name once. The saver owns them now."""
        self.finish()
        writing = self.run / "checkpoints" / f".writing-{progress.step:06d}"
        if self.leader:
            with contextlib.suppress(OSError):  # without the folder `write` fails and reports why
                writing.parent.mkdir(parents=True, exist_ok=True)
            for leftover in writing.parent.glob(".writing-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        dist.barrier(self.group)
        # Not async_save, which would copy the share once more before it begins.
        self.pending = self.background.submit(self.write, state, writing)
        self.complete = (writing, progress)

    def write(self, state: dict[str, Any], writing: Path) -> tuple[dict[str, list[int]], str]:
        """Runs in the background. Returns size and checksum of every file, and why they could not be written,
        the same on all ranks. Each rank reads its own files again."""
        mine: dict[str, list[int]] = {}
        failure = ""
        try:
            files = dcp.FileSystemWriter(writing, per_thread_copy_ahead=0)  # nothing is copied from a GPU
            dcp.save(state, storage_writer=files, process_group=self.group)
            mine = {file.name: entry(file) for file in writing.glob(f"__{dist.get_rank(self.group)}_*")}
        except CheckpointException as error:  # raised on all ranks if one fails
            causes = [f"rank {rank}: {in_a_line(cause)}" for rank, (cause, _) in sorted(error.failures.items())]
            failure = causes[0] if causes else "torch.distributed.checkpoint does not say why"
        except OSError as error:
            failure = f"rank {dist.get_rank(self.group)}: {in_a_line(error)}"
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, (mine, failure), group=self.group)
        written = {name: entry for files, _ in everyone for name, entry in files.items()}
        return written, next((failure for _, failure in everyone if failure), "")

    def finish(self) -> None:
        """Wait until the pending save is complete on disk, or given up. Raises NotShared on all ranks."""
        if self.pending is None:
            return
        pending = self.pending
        self.pending = None
        files, failure = pending.result()  # of all ranks
        writing, progress = self.complete
        outcome: list[Any] = [failure]
        if self.leader and not failure:
            try:
                publish(writing, progress, files, self.keep, self.keep_best)
            except NotShared as error:
                outcome = [error]
            except OSError as error:
                outcome = [in_a_line(error)]
        dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if isinstance(outcome[0], NotShared):
            raise outcome[0]
        self.failure = (
            f"the checkpoint of step {progress.step} could not be written ({outcome[0]})" if outcome[0] else ""
        )
        if self.leader and self.failure:
            shutil.rmtree(writing, ignore_errors=True)  # a part takes the space that the next needs
            newest = complete(self.run)[-1:]
            left = f"{newest[0].name} stays the newest" if newest else "there is none yet"
            self.say(f"{self.failure}; {left}, and the run goes on")

    def busy(self) -> bool:
        """Whether this rank is still writing. If no rank is, `finish` waits only for manifest and rename."""
        return self.pending is not None and not self.pending.done()


def publish(writing: Path, progress: Progress, files: dict[str, list[int]], keep: int, keep_best: bool = False) -> None:
    """Write the manifest of a checkpoint and rename it; keep only the newest `keep` checkpoints and the best.

    Raises NotShared if a file that a rank has written is not visible here.
    """
    deadline = time.monotonic() + LAG
    while unseen := [name for name, (size, _) in files.items() if size_of(writing / name) != size]:
        if time.monotonic() > deadline:
            by = unseen[0].removeprefix("__").split("_")[0]
            raise NotShared(
                f"{writing}/{unseen[0]}, which rank {by} has written, is not there for rank 0 after {LAG:.0f} s; "
                "--out must be a folder that all nodes share, and nothing else may remove files in it"
            )
        time.sleep(0.1)
    files[".metadata"] = entry(writing / ".metadata")  # the leader's
    with (writing / "manifest.json").open("w") as file:
        json.dump({"progress": asdict(progress), "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    final = writing.with_name(f"step-{progress.step:06d}")
    if final.exists():  # remains of one that was removed
        set_aside(final)
    os.replace(writing, final)
    best = best_of(writing.parent.parent) if keep_best else None
    for old in complete(writing.parent.parent)[:-keep]:
        if old == best:
            continue
        with contextlib.suppress(OSError):  # a file that is still read may stay: the new one is complete
            (old / "manifest.json").unlink()  # first: from here on it is no checkpoint any more
            shutil.rmtree(old)


def in_a_line(error: BaseException) -> str:
    """An error in one line: the text of a system error, or the type and last line of another."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else 'no words'}"


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def entry(path: Path) -> list[int]:
    return [path.stat().st_size, checksum(path)]


def checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            value = zlib.crc32(block, value)
    return value


def complete(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first. A copy with a name of its own, step-000200-good, is none."""
    found = (path.parent for path in (run / "checkpoints").glob("step-*/manifest.json"))
    return sorted((path for path in found if path.name.removeprefix("step-").isdecimal()), key=step_of)


def best_of(run: Path) -> Path | None:
    """The complete checkpoint with the lowest validation loss, the first of equal ones; None if none was validated."""
    losses = {}
    for path in complete(run):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a damaged manifest
            loss = progress_of(path).val_loss
            if loss is not None and math.isfinite(loss):
                losses[path] = loss
    return min(losses, key=lambda path: losses[path], default=None)


def step_of(path: Path) -> int:
    """The step of a finished checkpoint. Names do not sort: step-1000000 comes before step-999999."""
    return int(path.name.removeprefix("step-"))


def set_aside_later(run: Path, step: int, group: dist.ProcessGroup) -> None:
    """Rename complete checkpoints of later steps, because the run will do those steps again."""
    if dist.get_rank(group) == 0:
        for path in complete(run):
            if step_of(path) > step:
                set_aside(path)
    dist.barrier(group)


def set_aside(path: Path) -> None:
    aside = path.with_name(f"superseded-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)


def hold(run: Path) -> IO[str] | None:
    """The lock of a run's folder, held as long as the returned file is open: by this process, until it ends.

    Raises UsageError if another job holds it. None on a file system that has no locks.
    """
    try:
        file = (run / "lock").open("a+")
        if not locked(file, exclusive=True, patience=PATIENCE):
            raise in_use(run)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except OSError as error:
        raise UsageError(f"{run} cannot be written to ({in_a_line(error)})") from None
    return file


def check_free(run: Path, restart: bool = False) -> bool:
    """Raise UsageError if another job holds the lock of this folder. It does not take the lock; `hold` does.
    With `restart` the holder may be the same job, on a machine that is gone. Returns True if the lock was held at
    first, so that there may be a new checkpoint now."""
    if not (run / "lock").exists():
        return False
    with (run / "lock").open() as file:
        if locked(file, exclusive=False, patience=0):
            return False
        if locked(file, exclusive=False, patience=PATIENCE):
            return True
        if restart:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                waits = f"--restart waits {LEASE:g} s, in case its machine is gone"
                print(f"{run} is being written by {holder(run)}; {waits}", file=sys.stderr)
            if locked(file, exclusive=False, patience=LEASE):
                return True
    raise in_use(run)


def in_use(run: Path) -> UsageError:
    return UsageError(f"{run} is being written by {holder(run)}; wait for its end, or give this run another --out")


def holder(run: Path) -> str:
    return (run / "lock").read_text().strip() or "another job"


def locked(file: IO[str], exclusive: bool, patience: float) -> bool:
    """Whether this file has the lock now. Processes that only check share it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        except OSError:  # there are no locks on this file system
            return True


def find(resume: str) -> tuple[Path, Path, Progress, list[str]]:
    """The run folder, the checkpoint, its progress, and what to tell the user, for what `--resume` names.

    For a run folder it is the newest complete checkpoint whose files have the size they were written with.
    Newer ones that are damaged are skipped, with a message. Raises UsageError if there is none, or if the one
    checkpoint that was named is damaged.
    """
    path = Path(resume)
    if path.name == "best" and not path.exists():
        run = path.parent
        best = best_of(path.parent)
        if best is None:
            raise UsageError(f"--resume {resume}: no checkpoint of {run} was validated; use --resume {run}, the newest")
        path = best
    if (path / "manifest.json").exists():
        run = Path(os.path.normpath(path / ".." / ".."))  # also for a path relative to the run folder
        if what := damage(path):
            raise UsageError(f"--resume {resume}: {what}; use --resume {run}, which takes the one before")
        return run, path, progress_of(path), []
    messages: list[str] = []
    candidates = complete(path)
    for candidate in reversed(candidates):
        if not (what := damage(candidate)):
            return path, candidate, progress_of(candidate), messages
        messages.append(f"{candidate.name} is passed over: {what}")
    if complete(path) != candidates:  # the run goes on: it has written one, and removed these
        return find(resume)
    if messages:
        raise UsageError(f"--resume {resume}: {messages[0]}; there is no other checkpoint; start a new run")
    raise UsageError(f"--resume {resume} holds no complete checkpoint; give a run folder or a checkpoint in it")


def read_newest(run: str, read: Callable[[Path, Path, Progress], Any]) -> Any:
    """Return `read(run folder, checkpoint, progress)` of the newest checkpoint. If the run, which goes on, removes it
    meanwhile, the next one is read. Messages are printed to stderr. Raises UsageError.
    """
    for _ in range(3):
        home, path, progress, messages = find(run)
        for message in messages:
            print(message, file=sys.stderr)
        try:
            return read(home, path, progress)
        except FileNotFoundError:
            if (path / "manifest.json").exists():
                raise
    raise UsageError(f"{run} removes its checkpoints faster than they can be read; copy one, and name the copy")


def progress_of(path: Path) -> Progress:
    return Progress(**json.loads((path / "manifest.json").read_text())["progress"])


def damage(path: Path, contents: bool = False, part: slice = slice(None)) -> str:
    """What is wrong with a checkpoint: a file that is missing, of another size or, if asked, with other contents.

    `part`: which of its files to look at, in the order of their names. "" if nothing is wrong.
    """
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        progress_of(path)
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path.name}/manifest.json is damaged"
    for name, (size, check) in sorted(files.items())[part]:
        file = path / name
        actual = size_of(file)
        if actual != size:
            return f"{path.name}/{name} has {actual} bytes but was written with {size}"
        if contents and checksum(file) != check:
            return f"{path.name}/{name} has not the contents it was written with"
    return ""


# ------------------------------------------------------------------------------------------------------- reading


def reader(path: Path) -> tuple[Callable[[str, Sequence[int], torch.dtype], Tensor], Container[str]]:
    """A function that reads one tensor, by its name in the files, in the given shape, and the names that
    exist. Not collective."""
    files = dcp.FileSystemReader(path)
    index = files.read_metadata()  # read once: the place of each of thousands of tensors
    files.set_up_storage_reader(index, is_coordinator=False)

    def read(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: tensor}, index)
        files.read_data(planner.create_local_plan(), planner).wait()
        return tensor

    return read, index.state_dict_metadata


def load(path: Path, like: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Mapping[str, Any]]:
    """Weights and AdamW's states: {"weights": {name: tensor}, "optimizer": {name: {kind: tensor}}}, on the CPU.

    Each tensor is read on access, so a rank reads only what it needs. `like` has names and shapes;
    floating-point tensors get `dtype`. Weights of less than 32 bits have master weights in fp32. Moments are
    missing if every step so far was left out; an optimizer then starts without them.
    """
    read, saved = reader(path)
    wide = torch.promote_types(dtype, torch.float32)
    kinds = ["step", "exp_avg", "exp_avg_sq"] + (["master"] if wide != dtype else [])
    learned = {name: tensor for name, tensor in like.items() if tensor.is_floating_point()}

    def weight(name: str) -> Tensor:
        return read(f"weights.{name}", like[name].shape, dtype if name in learned else like[name].dtype)

    def states(name: str) -> Mapping[str, Tensor]:
        return Lazy((kind for kind in kinds if f"optimizer.{name}.{kind}" in saved), partial(state, name))

    def state(name: str, kind: str) -> Tensor:
        shape = like[name].shape
        one = kind == "step"
        return read(f"optimizer.{name}.{kind}", [] if one else shape, torch.float32 if one else wide)

    return {"weights": Lazy(like, weight), "optimizer": Lazy(learned, states)}
