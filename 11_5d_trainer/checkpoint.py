"""Checkpoints that are complete or not there, on torch.distributed.checkpoint.

    RUN/checkpoints/step-000200/           complete: it got its name by one rename, after every file was written
        __0_0.distcp ... .metadata         weights and optimizer states, by parameter name, written by all ranks
        manifest.json                      steps done, data position, options, and the size of every file
    RUN/checkpoints/.writing-000300/       a save that was interrupted; ignored, and removed by the next save

Weights and optimizer states are stored whole, by Hugging Face's names, so a checkpoint knows nothing of the layout that
wrote it and can be loaded in any other.
"""

import json
import os
import shutil
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


def save(run: Path, state: dict[str, Any], progress: Progress, group: dist.ProcessGroup, keep: int) -> Path:
    """Write a checkpoint of the full state (engine.py), which all ranks of the group hold alike and write together.

    Afterwards only the newest `keep` remain.
    """
    folder = run / "checkpoints"
    final, writing = folder / f"step-{progress.step:06d}", folder / f".writing-{progress.step:06d}"
    leader = dist.get_rank(group) == 0
    if leader:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".writing-*"):
            shutil.rmtree(leftover)
    dist.barrier(group)
    dcp.save(state, checkpoint_id=writing, process_group=group)
    if leader:
        sizes = {file.name: file.stat().st_size for file in writing.iterdir()}
        manifest = {"progress": asdict(progress), "files": sizes}
        with (writing / "manifest.json").open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(writing, final)
        for old in complete(run)[:-keep]:
            shutil.rmtree(old)
    dist.barrier(group)
    return final


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


def find(resume: str) -> tuple[Path, Path, Progress]:
    """The run folder, the checkpoint and its progress, for what `--resume` names.

    Raises UsageError if there is no complete checkpoint, or if a file of it is missing or has another size than when
    it was written.
    """
    path = Path(resume)
    if (path / "manifest.json").exists():
        run, chosen = path.parent.parent, path
    else:
        run, found = path, complete(path)
        if not found:
            raise UsageError(f"--resume {resume} holds no complete checkpoint; give a run folder or a checkpoint in it")
        chosen = found[-1]
    try:
        manifest = json.loads((chosen / "manifest.json").read_text())
        sizes = manifest["files"]
        progress = Progress(**manifest["progress"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"--resume {resume}: {chosen.name}/manifest.json is damaged; {_other(run, chosen)}") from None
    for name, size in sizes.items():
        actual = (chosen / name).stat().st_size if (chosen / name).exists() else 0
        if actual != size:
            raise UsageError(
                f"--resume {resume}: {chosen.name}/{name} has {actual} bytes but was written with {size}; "
                f"{_other(run, chosen)}"
            )
    return run, chosen, progress


def _other(run: Path, damaged: Path) -> str:
    others = [path for path in complete(run) if path != damaged]
    return f"use --resume {others[-1]}" if others else "there is no other checkpoint; start a new run"


def load(path: Path, shapes: dict[str, torch.Size], dtype: torch.dtype, group: dist.ProcessGroup) -> dict[str, Any]:
    """The full state in a checkpoint, on the CPU of every rank of the group, for a model of these weights and AdamW."""

    def moments(shape: torch.Size) -> dict[str, Tensor]:
        kinds = {"exp_avg": torch.empty(shape, dtype=dtype), "exp_avg_sq": torch.empty(shape, dtype=dtype)}
        return kinds | {"step": torch.tensor(0.0)}

    weights = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    state = {"weights": weights, "optimizer": {name: moments(shape) for name, shape in shapes.items()}}
    dcp.load(state, checkpoint_id=path, process_group=group)
    return state
