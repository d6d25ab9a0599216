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
NAMES = (  # by name, because a folder beside them may be a copy of one
    "01_single_gpu 02_data_parallel 03_zero 04_tensor_parallel 05_context_parallel 06_pipeline_parallel "
    "07_expert_parallel 08_fpdt 09_kernels 10_mixed_precision"
)
CHAPTERS = [ROOT / name for name in NAMES.split()]
HOMES = {folder.name for folder in [*CHAPTERS, TRAINER]}
NOT_A_SCRIPT = re.compile(r"test_|bench_|conftest|_")
FOLDERS = ("", "in_depth", "tests", "bench", "planner")  # where a chapter or the trainer has Python files


def homes(root: Path) -> set[str]:
    """Names of the folders of chapters in a repository: of this one those above, of a test's the numbered ones."""
    return HOMES if root == ROOT else {folder.name for folder in root.glob("[01][0-9]_*")}


def files(pattern: str, folder: Path | None = None) -> list[Path]:
    """Files in all folders of a chapter or of the trainer, or of all of them: `files("bench_*.py")`."""
    places = [folder] if folder else [*CHAPTERS, TRAINER]
    return sorted(file for home in places for folder_ in FOLDERS for file in (home / folder_).glob(pattern))


def scripts(chapter: Path | None = None) -> list[Path]:
    """The scripts to run and read, of one chapter or all (the trainer is no chapter): the core file first."""
    places = [chapter] if chapter else CHAPTERS
    found = [file for home in places for depth in ("", "in_depth") for file in sorted((home / depth).glob("*.py"))]
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
