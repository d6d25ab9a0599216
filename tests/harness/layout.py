"""The layout of this repository: the chapters, their folders, and their files.

    03_zero/zero.py            the core file: it needs no other file; with test_zero.py and bench_zero.py
    03_zero/in_depth/*.py      the same technique at full strength, with its tests and benchmarks
    11_5d_trainer/             the trainer; its tests and benchmarks are in tests/ and bench/

No two modules have the same name, so that a name is enough to find a file.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "11_5d_trainer"
CHAPTERS = sorted(folder for folder in ROOT.glob("[01][0-9]_*") if folder != TRAINER)
NOT_A_SCRIPT = re.compile(r"test_|bench_|conftest|_")
FOLDERS = ("", "in_depth", "tests", "bench", "planner")  # where a chapter or the trainer has Python files


def files(pattern: str, folder: Path | None = None) -> list[Path]:
    """Files in all folders of a chapter or of the trainer, or of all of them: `files("bench_*.py")`."""
    homes = [folder] if folder else [*CHAPTERS, TRAINER]
    return sorted(file for home in homes for folder_ in FOLDERS for file in (home / folder_).glob(pattern))


def scripts(chapter: Path | None = None) -> list[Path]:
    """The scripts to run and read, of one chapter or all (the trainer is no chapter): the core file first."""
    homes = [chapter] if chapter else CHAPTERS
    found = [file for home in homes for depth in ("", "in_depth") for file in sorted((home / depth).glob("*.py"))]
    return [file for file in found if not NOT_A_SCRIPT.match(file.name)]


def chapter_of(file: Path) -> Path:
    """The chapter (or the trainer) that a file belongs to."""
    return ROOT / file.resolve().relative_to(ROOT).parts[0]


def find(name: str) -> Path:
    """The one file of this name in chapters, trainer, tests and harness. ValueError unless there is exactly one."""
    found = [*files(name), *(ROOT / "tests").glob(name), *(ROOT / "tests" / "harness").glob(name)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} files are called {name}")
    return found[0]
