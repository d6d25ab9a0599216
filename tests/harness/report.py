"""From a measurement to the table in a README, without manual steps.

A benchmark calls `paired` and `write_result`; that puts the result NAME into `results/DEVICE.json` with the device, the
versions and the commit. `make tables` (this file as a script) then fills every block of every README that reads

    <!-- results: NAME -->
    <!-- end results -->

with the tables of all results of that name, one for each device it was measured on, or with the table that
computed.py has of that name, without a measurement. `--check` changes nothing and exits with 1 if a README
differs from its results; a test does the same.

Between `<!-- files -->` and `<!-- end files -->` is, for each in-depth script of the chapter, a list of the
files to copy with it to run it elsewhere.

A block that begins with `<!-- gpu results: NAME -->` shows only results of GPUs, and is empty without them
(but gpu_run says so). A run of `make gpu` is a file of the same kind; `--take FILE` puts its results into results/.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<gpu>gpu )?results: (?P<name>[\w.-]+) -->\n)(?P<body>.*?)(?P<end><!-- end results -->)",
    re.DOTALL,
)
COMMIT = re.compile("[0-9a-f]{10,40}")
NOTHING = "\nNo GPU has measured anything yet, so these tables are still missing; `make gpu` prints what to run.\n\n"


@dataclass(frozen=True)
class Ratio:
    """The ratio of two times (or sizes): the median over pairs, and both quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def paired(
    a: Callable[[], Any],
    b: Callable[[], Any],
    *,
    repeats: int = 9,
    warmup: int = 2,
    setup: Callable[[], Any] | None = None,
) -> Ratio:
    """Ratio of the seconds of `a()` to those of `b()`, over `repeats` pairs measured one right after the other.

    The two alternate, also in their order, so that a temporary slowdown of the machine affects both. `setup`
    runs before each call and is not timed (on several ranks, pass a barrier).
    """
    if repeats < 3:
        raise ValueError(f"repeats={repeats}: a median with quartiles needs at least 3")
    ratios = []
    for repeat in range(-warmup, repeats):
        order = (a, b) if repeat % 2 else (b, a)
        seconds = {fn: _seconds(fn, setup) for fn in order}
        if repeat >= 0:
            ratios.append(seconds[a] / seconds[b])
    return ratio_of(ratios)


def processor_paired(a: Callable[[], Any], b: Callable[[], Any], repeats: int = 9) -> Ratio:
    """`paired` on ranks, in processor seconds of all of them and Gloo's threads: other programs do not add to it."""
    ratios = []
    for repeat in range(-2, repeats):  # two pairs to warm up
        seconds = {fn: processor_seconds(fn) for fn in ((a, b) if repeat % 2 else (b, a))}
        if repeat >= 0:
            ratios.append(seconds[a] / seconds[b])
    return ratio_of(ratios)


def processor_seconds(fn: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.process_time()
    fn()
    dist.barrier()
    spent = torch.tensor(time.process_time() - begin, dtype=torch.float64)
    dist.all_reduce(spent)
    return spent.item()


def median_seconds(fn: Callable[[], Any], repeats: int) -> float:
    """Median of the seconds of `fn()`, until the device is done, after two calls to warm up."""
    return statistics.median([_seconds(fn, None) for _ in range(repeats + 2)][2:])


def ratio_of(ratios: Sequence[float]) -> Ratio:
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def _seconds(fn: Callable[[], Any], setup: Callable[[], Any] | None) -> float:
    if setup is not None:
        setup()
    _synchronize()
    start = time.perf_counter()
    fn()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def option_given(*known: str) -> str:
    """The only option on a benchmark's command line, or "". Anything else ends it in one line, with status 2."""
    given = " ".join(sys.argv[1:])
    if given not in ("", *known):
        use = ", or ".join(("nothing", *known))
        print(f"{Path(sys.argv[0]).name}: {given}: use {use}", file=sys.stderr)
        sys.exit(2)
    return given


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"


def file_name(device: str) -> str:
    """The name of a device in file names."""
    return "cpu" if device.startswith("CPU") else re.sub(r"\W+", "-", device.lower()).strip("-")


def driver_version() -> str:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
        return lines[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown (no nvidia-smi)"


def environment() -> dict[str, str]:
    """Where, when and with what a result was measured. Without git, COMMIT in the environment names it."""
    about = {
        "device": device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit_of(ROOT),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    if torch.cuda.is_available():
        about |= {"driver": driver_version(), "cuda": str(torch.version.cuda), "triton": _version_of("triton")}
    return about


def commit_of(root: Path) -> str:
    """Ten digits, with "-dirty" if files have changed since; git has priority over COMMIT."""
    git, given = ["git", "-C", str(root)], os.environ.get("COMMIT", "")
    # Files that a benchmark or `make tables` has just written do not count.
    written = ("results", "*/figures/*", "*README.md", "*/planner/*.md")
    changes = [*git, "status", "--porcelain", "--", ".", *(f":!{each}" for each in written)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no checkout
        (top, named), dirty = (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            for command in ([*git, "rev-parse", "--show-toplevel", "--short=10", "HEAD"], changes)
        )
        if Path(top).samefile(root):  # a plain copy may be inside another checkout
            # Or the files of a commit were copied over an older checkout: then COMMIT names that commit.
            copied = dirty and COMMIT.fullmatch(given) and os.environ.get("CONTENTS") == contents_of(root)
            return given[:10] if copied else named + ("-dirty" if dirty else "")
    return given[:10] if COMMIT.fullmatch(given) else "unknown (no git checkout)"


def contents_of(root: Path) -> str:
    """A digest (16 digits) of the files of this checkout, except ignored ones, independent of the last
    commit. Raises CalledProcessError without a git checkout."""
    git = ["git", "-C", str(root)]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=True)
        run([*git, "add", "--all", "."])
        listed = run([*git, "ls-files", "--format=%(objectname) %(path)"]).stdout
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def write_result(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    notes: str = "",
    folder: Path | None = None,
    *,
    verified: bool = True,
    computed: bool = False,
) -> Path:
    """Put the result NAME into `results/DEVICE.json` and return the file. A cell is a string, a number or a Ratio.

    A benchmark verifies before it times, and writes nothing if that fails, so a written result is `verified`.
    A value that was not verified must be marked; a table in which nothing is measured is `computed`. Only a clean
    tree writes into results/, so that the named commit is the code that ran; any other only prints the table.
    """
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"result {name}: row {list(row)} has {len(row)} cells for {len(columns)} columns")
    path = (folder or ROOT / "results") / f"{file_name(device_name())}.json"
    about = environment()
    record = {
        "name": name,
        "title": title,
        "columns": list(columns),
        "rows": [[{"ratio": asdict(cell)} if isinstance(cell, Ratio) else cell for cell in row] for row in rows],
        "notes": notes,
        "verified": verified,
        "environment": about,
    } | ({"computed": True} if computed else {})
    if folder is None and about["commit"].endswith("-dirty"):
        print(f"{name} is not written, the tree has changes that are not committed\n\n{table(record)}")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    run = json.loads(path.read_text()) if path.exists() else {"results": {}}
    run["results"][name] = record
    save(run, path)
    print(f"wrote {name} into {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}\n\n{table(record)}")
    return path


def measured(name: str, results: Path) -> list[dict[str, Any]]:
    """The results of this name, that of a CPU first, then those of GPUs."""
    found = [_results_of(file).get(name) for file in sorted(results.glob("*.json"))]
    return [record for record in found if record is not None]


def _results_of(file: Path) -> dict[str, dict[str, Any]]:
    """The results of a device, by name."""
    known = file.stat()
    return _parsed(file, (known.st_ino, known.st_mtime_ns))  # `save` writes another file each time


@cache
def _parsed(file: Path, _version: tuple[int, int]) -> dict[str, dict[str, Any]]:
    return json.loads(file.read_text())["results"]


def on_cpu(record: dict[str, Any]) -> bool:
    return record["environment"]["device"].startswith("CPU")


def save(run: dict[str, Any], path: Path) -> None:
    """Write the results of a device, or the record of a run on it: as a whole, or the file stays as it was."""
    part = path.with_suffix(".part")
    part.write_text(in_rows(run))
    part.replace(path)


def in_rows(run: dict[str, Any]) -> str:
    """JSON with one row of a table per line."""
    by_name = dict(sorted(run["results"].items()))
    return _json(run | {"results": by_name}, 4) + "\n"


def _json(value: Any, depth: int, indent: str = "") -> str:
    """Lists and dictionaries down to `depth` have a line for each element, except lists of plain values."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not depth or not parts or (isinstance(value, list) and not any(isinstance(part, list | dict) for part in parts)):
        return json.dumps(value)
    inner = [_json(part, depth - 1, f"{indent} ") for part in parts]
    if isinstance(value, dict):
        inner = [f"{json.dumps(key)}: {text}" for key, text in zip(value, inner, strict=True)]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{indent} " + f",\n{indent} ".join(inner) + f"\n{indent}{end}"


def without_certificate(results: Path, commits: Container[str]) -> dict[str, str]:
    """What each result lacks of device, versions, date, `verified` and a commit of `commits`, by file and name.

    A commit is compared by the first ten digits of its hash, as `environment` writes it.
    """
    lacking = {}
    everything = [(file.name, *item) for file in sorted(results.glob("*.json")) for item in _results_of(file).items()]
    for file, name, record in everything:
        about = record.get("environment", {})
        lacks = [word for word in ("device", "torch", "python", "date") if not about.get(word)]
        lacks += [] if record.get("verified") in (True, False) else ["verified"]
        commit = about.get("commit", "")
        lacks += (
            [] if re.fullmatch("[0-9a-f]{10}", commit) and commit in commits else [f"a commit ({commit or 'none'})"]
        )
        if lacks:
            lacking[f"{name} in {file}"] = ", ".join(lacks)
    return lacking


def table(record: dict[str, Any]) -> str:
    """A result as Markdown: title, table, notes, and where it was measured."""
    lines = [f"**{record['title']}**", "", _row(record["columns"]), _row(["---"] * len(record["columns"]))]
    lines += [_row([_cell(cell) for cell in row]) for row in record["rows"]]
    if "environment" not in record:
        return "\n".join([*lines, "", f"{record['notes']} Computed, not measured.", ""])
    where = record["environment"]
    on_cpu = (
        " A CPU's ratios hold within this run and say nothing of speed on GPUs." if "CPU" in where["device"] else ""
    )
    about = f"{where['device']}; torch {where['torch']}, Python {where['python']}, commit {where['commit']}"
    if "driver" in where:  # older records and those of a CPU lack it
        about += f"; driver {where['driver']}, CUDA {where['cuda']}, Triton {where['triton']}; {where['date']}"
    warning = [] if record.get("verified", True) else ["**Not verified**: nothing was held against these numbers.", ""]
    notes = [record["notes"], ""] if record["notes"] else []
    if "computed" in record:
        return "\n".join([*lines, "", *warning, *notes, f"Computed, not measured here; commit {where['commit']}.", ""])
    return "\n".join([*lines, "", *warning, *notes, f"Measured on: {about}.{on_cpu}", ""])


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _cell(cell: Any) -> str:
    if isinstance(cell, dict):
        return str(Ratio(**cell["ratio"]))
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def fill(text: str, results: Path) -> str:
    """`text` with every results block filled: by computed.py, or from `results`. ValueError for an unknown name."""
    from harness.computed import TABLES

    def body(block: re.Match[str]) -> str:
        if block["name"] in TABLES:
            return block["begin"] + "\n" + table(TABLES[block["name"]]()) + "\n" + block["end"]
        records = measured(block["name"], results)
        if block["gpu"]:
            records = [record for record in records if not on_cpu(record)]
            if not records:  # reported once, in the table of the run
                return block["begin"] + (NOTHING if block["name"] == "gpu_run" else "") + block["end"]
        if not records:
            raise ValueError(f"results/ has no {block['name']}: run the benchmark first, or remove the block")
        return block["begin"] + "\n" + "\n".join(map(table, records)) + "\n" + block["end"]

    begun = re.findall(r"<!-- (?:gpu )?results: ([\w.-]+) -->\n", text)
    if len(begun) != len(BLOCK.findall(text)):  # it would reach to the end of the next, and erase what lies between
        raise ValueError(f"one of the blocks {', '.join(begun)} has no `<!-- end results -->`")
    return BLOCK.sub(body, text)


FILES = re.compile(r"(?P<begin><!-- files -->\n).*?(?P<end><!-- end files -->)", re.DOTALL)


def filled(readme: Path) -> str:
    """The text of a README with all its blocks filled."""
    text = fill(readme.read_text(), ROOT / "results")
    if not FILES.search(text):
        return text
    from harness.layout import scripts
    from harness.mutations import needed_by

    lines = [_row(["script in in_depth/", "copy with it"]), _row(["---"] * 2)]
    for script in scripts(readme.parent):
        if script.parent.name == "in_depth":
            others = " ".join(f"`{file.name}`" for file in needed_by(script)[1:])
            lines.append(_row([f"`{script.name}`", others or "nothing"]))
    return FILES.sub(lambda block: "\n".join([block["begin"], *lines, "", block["end"]]), text)


def take(file: Path, results: Path) -> list[str]:
    """Put the results of a whole GPU run, one file, into `results`; returns their names. Raises ValueError for others.

    The run's own record is included: it lists all sections and their status. Earlier results from that device
    stay, so that the files of several calls can be taken one after the other.
    """
    from harness.goals import overview

    run = json.loads(file.read_text())
    if not {"device", "dry", "sections", "results"} <= set(run):
        raise ValueError(f"--take {file}: this is not the record of a run of tests/gpu.py")
    if run["dry"]:
        raise ValueError(f"--take {file}: a dry run measures nothing; take the file of a run on a GPU")
    commits = {record["environment"]["commit"] for record in (run, *run["results"].values())}
    if unnamed := sorted(commit for commit in commits if not re.fullmatch("[0-9a-f]{10}", commit)):
        raise ValueError(f"--take {file}: no table can say which code was measured: commit {', '.join(unnamed)}")
    device = file_name(run["device"])
    results.mkdir(parents=True, exist_ok=True)
    before = results / f"{device}.json"
    if before.exists() and not before.samefile(file):
        old, again = json.loads(before.read_text()), {section["name"] for section in run["sections"]}
        kept = [section for section in old.get("sections", []) if section["name"] not in again]
        run["sections"] = kept + run["sections"]
        run["results"] = old["results"] | run["results"]
    run["results"] |= overview(run)  # a killed call may not have written it
    save(run, before)
    return list(run["results"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill the results tables of the READMEs.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a README is out of date")
    parser.add_argument("--take", type=Path, metavar="FILE", help="first put the results of this GPU run into results/")
    args = parser.parse_args()
    check, stale = args.check, []
    if args.take:
        try:
            print("taken: " + ", ".join(take(args.take, ROOT / "results")))
        except (OSError, ValueError) as error:
            print(f"report.py: {error}", file=sys.stderr)
            return 2
    for readme in [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), *ROOT.glob("*/planner/*.md")]:
        old = readme.read_text()
        try:
            new = filled(readme)
        except ValueError as error:
            print(f"report.py: {readme.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 2
        if new != old:
            stale.append(str(readme.relative_to(ROOT)))
            if not check:
                readme.write_text(new)
    print(("out of date: " if check else "filled: ") + (", ".join(stale) or "none"))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))  # where the harness is
    sys.exit(main())
