"""Checkpoints that are complete or not there, on torch.distributed.checkpoint, written while training goes on.

    RUN/checkpoints/step-000200/           complete: it got its name by one rename, after every file was written
        __0_0.distcp ... .metadata         weights and optimizer states, by parameter name, written by all ranks
        manifest.json                      steps done, data position, options, size and checksum of every file
    RUN/checkpoints/.writing-000300/       a save that is under way or was interrupted; the next save removes it

Weights and optimizer states are stored whole, by Hugging Face's names, so a checkpoint knows nothing of the layout that
wrote it and can be loaded in any other.
"""

import json
import os
import shutil
import warnings
import zlib
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from options import UsageError
from torch import Tensor


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    step: int  # steps done
    samples: int  # samples used, over all ranks and micro-batches: the position in the data
    tokens: int  # in the training data; with other data the position means nothing
    config: dict[str, Any]  # the run's options
    sizes: dict[str, Any]  # of the model: the fields of LlamaConfig
    loss_scale: float = 1.0
    good_steps: int = 0  # since the loss scale changed


class Saver:
    """Writes checkpoints of a run in the background. `group` needs a CPU back end (gloo) and belongs to this alone: in
    it the ranks agree on what each writes, while training goes on in the other groups."""

    def __init__(self, run: Path, group: dist.ProcessGroup, keep: int) -> None:
        self.run, self.group, self.keep = run, group, keep
        self.leader = dist.get_rank(group) == 0
        self.pending: Future | None = None

    def save(self, state: dict[str, Any], progress: Progress) -> None:
        """Begin to write the full state (engine.py). The tensors are copied first; afterwards they may change.

        Where several ranks hand in the same name, one of them writes it.
        """
        self.finish()
        writing = self.run / "checkpoints" / f".writing-{progress.step:06d}"
        if self.leader:
            writing.parent.mkdir(parents=True, exist_ok=True)
            for leftover in writing.parent.glob(".writing-*"):
                shutil.rmtree(leftover)
        dist.barrier(self.group)
        done = dcp.async_save(state, checkpoint_id=writing, process_group=self.group)
        assert isinstance(done, Future)
        self.pending = done
        self.complete = (writing, progress)

    def finish(self) -> None:
        """Wait until the checkpoint under way is complete on disk. Raises what went wrong when it was written."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        pending.result()  # on the leader: every rank has written
        if self.leader:
            publish(*self.complete, self.keep)
        dist.barrier(self.group)

    def busy(self) -> bool:
        """Whether this rank is still writing. When no rank is, `finish` does not wait."""
        return self.pending is not None and not self.pending.done()


def publish(writing: Path, progress: Progress, keep: int) -> None:
    """Give a checkpoint whose files are written its manifest and its name; keep only the newest `keep`."""
    files = {file.name: [file.stat().st_size, checksum(file)] for file in writing.iterdir()}
    with (writing / "manifest.json").open("w") as file:
        json.dump({"progress": asdict(progress), "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    final = writing.with_name(f"step-{progress.step:06d}")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(writing, final)
    for old in complete(writing.parent.parent)[:-keep]:
        shutil.rmtree(old)


def checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            value = zlib.crc32(block, value)
    return value


def complete(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = [path.parent for path in (run / "checkpoints").glob("step-*/manifest.json")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def set_aside_later(run: Path, step: int, group: dist.ProcessGroup) -> None:
    """Rename complete checkpoints of later steps: the run is about to go through those steps again."""
    if dist.get_rank(group) == 0:
        for path in complete(run):
            if int(path.name.removeprefix("step-")) > step:
                aside = path.with_name(f"superseded-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
    dist.barrier(group)


def find(resume: str) -> tuple[Path, Path, Progress, list[str]]:
    """The run folder, the checkpoint, its progress, and what to tell the user, for what `--resume` names.

    Of a run folder it is the newest complete checkpoint whose files have the size they were written with; newer ones
    that are damaged are passed over, with a message. Raises UsageError if there is none, or if the one checkpoint that
    was named is damaged.
    """
    path = Path(resume)
    if (path / "manifest.json").exists():
        if what := damage(path):
            raise UsageError(
                f"--resume {resume}: {what}; use --resume {path.parent.parent}, which takes the one before"
            )
        return path.parent.parent, path, progress_of(path), []
    messages: list[str] = []
    for candidate in reversed(complete(path)):
        if not (what := damage(candidate)):
            return path, candidate, progress_of(candidate), messages
        messages.append(f"{candidate.name} is passed over: {what}")
    if messages:
        raise UsageError(f"--resume {resume}: {messages[0]}; there is no other checkpoint; start a new run")
    raise UsageError(f"--resume {resume} holds no complete checkpoint; give a run folder or a checkpoint in it")


def progress_of(path: Path) -> Progress:
    return Progress(**json.loads((path / "manifest.json").read_text())["progress"])


def damage(path: Path, contents: bool = False) -> str:
    """What is wrong with a checkpoint: a file that is missing, of another size or, if asked, with other contents."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        progress_of(path)
    except (ValueError, KeyError, TypeError):
        return f"{path.name}/manifest.json is damaged"
    for name, (size, check) in files.items():
        file = path / name
        actual = file.stat().st_size if file.exists() else 0
        if actual != size:
            return f"{path.name}/{name} has {actual} bytes but was written with {size}"
        if contents and checksum(file) != check:
            return f"{path.name}/{name} has not the contents it was written with"
    return ""


def load_weights(path: Path, like: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights alone, on one process."""
    weights = {
        name: torch.empty(t.shape, dtype=dtype if t.is_floating_point() else t.dtype) for name, t in like.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is, on purpose
        dcp.load({"weights": weights}, checkpoint_id=path, no_dist=True)
    return weights


def load(path: Path, like: dict[str, Tensor], dtype: torch.dtype, group: dist.ProcessGroup) -> dict[str, Any]:
    """Weights and AdamW's states of the names in `like`, on the CPU; `like` has shapes, floating numbers get `dtype`.

    Weights of less than 32 bits have masters in fp32. Collective; each rank may ask for other names.
    """
    wide = torch.promote_types(dtype, torch.float32)
    kinds = ["exp_avg", "exp_avg_sq"] + (["master"] if wide != dtype else [])
    weights, optimizer = {}, {}
    for name, tensor in like.items():
        weights[name] = torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
        if tensor.is_floating_point():
            optimizer[name] = {kind: torch.empty(tensor.shape, dtype=wide) for kind in kinds}
            optimizer[name]["step"] = torch.tensor(0.0)
    state = {"weights": weights, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path, process_group=group)
    return state
