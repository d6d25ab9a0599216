"""Everything that only a GPU can show: verify, measure, record. A GPU is often borrowed, for calls of ten minutes.

    python tests/gpu.py                            prints the calls to make, the most valuable first; runs nothing
    python tests/gpu.py --section flash,train      runs some sections (or `all`) in under nine minutes
    python tests/gpu.py --dry --section flash      the same program at tiny sizes on a stand-in GPU (default: all)
    python tests/gpu.py --section fp8 --out DIR --budget 300     where to write, and how long it may take in all

Nothing waits for the end. Every step is a process of its own with a deadline; it writes its result anew with every row,
and this program looks once a second and puts what it finds into DEVICE.json. So whatever ends a call, also a SIGKILL,
leaves what had been measured; what goes wrong in one step does not keep the next from running. What the time does not
allow is left out, and named. The next call with the same --out goes on in the same file; where it finds the folder
empty, the files are put together later, by taking one after the other. A copy without git is told its commit by
--commit (or COMMIT in the environment): what no commit names can be tried, and not taken.

DEVICE.json holds the device, driver, versions, commit and date, the outcome of every step, and every result with its
spread and with what was predicted (harness/predictions.py). `make results FROM=DEVICE.json` puts them into results/ and
fills the tables of the READMEs. Written straight into results/ (the default), they are there already.

It needs Python, torch and triton. Without tqdm a stand-in of a few lines is used; without pytest, nvcc or a C++
compiler the steps that need them are "not run". Nothing is installed, and nothing is written into the tree but the
results. A dry run has a GPU that is not there (fake_device/): it refuses what CUDA and nccl refuse.

Exit code: 0 if all that ran is right, 1 if a step failed or was too slow, 2 if nothing could be started.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.goals import overview
from harness.house import ROOT, chapter_of, files, scripts
from harness.report import COMMIT, commit_of, file_name, in_rows

PASSED, FAILED, TOO_SLOW, NOT_RUN, LEFT_OUT = "passed", "failed", "too slow", "not run", "left out"
CUT_OFF = "cut off"  # what a step is called until it has ended

# ------------------------------------------------------------------------------------------------------ what there is


@dataclass(frozen=True)
class Machine:
    """What the probe found: in a process of its own, so that this one never holds memory of the GPU."""

    dry: bool
    environment: dict[str, str]
    gpus: int = 0
    total_gib: float = 0.0
    free_gib: float = 0.0
    tools: frozenset[str] = frozenset()  # of nvcc, g++, pytest, tqdm

    @property
    def device(self) -> str:
        return self.environment["device"]


PROBE = """
import json, torch
from harness.report import environment
found = {"environment": environment(), "gpus": torch.cuda.device_count()}
if found["gpus"]:
    free, total = torch.cuda.mem_get_info(0)
    torch.zeros(1, device="cuda").item()  # a GPU may be listed and still refuse to work
    found |= {"free_gib": free / 2**30, "total_gib": total / 2**30}
print(json.dumps(found))
"""
# Of a dry run: importing this refuses a Triton whose interpreter does not go together with the NumPy that is here.
INTERPRETS = f"import sys; sys.path.append({str(ROOT / '09_kernels/in_depth')!r}); import _interpreter\n"


class CannotStart(RuntimeError):
    """Why nothing can be run, in one line."""


def tools() -> frozenset[str]:
    programs = {name for name in ("nvcc", "g++") if shutil.which(name)}
    return frozenset(programs | {name for name in ("pytest", "tqdm") if importlib.util.find_spec(name)})


def probe(dry: bool, environment: dict[str, str]) -> Machine:
    """Raises CannotStart where there is no GPU and the run is not dry."""
    command = [sys.executable, "-c", INTERPRETS * dry + PROBE]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise CannotStart("the GPU does not answer within two minutes; is another program using it?") from None
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1][:200]
        if dry:
            raise CannotStart(f"a dry run cannot start here ({reason})")
        raise CannotStart(f"PyTorch cannot use this device ({reason}); --dry tries the program on the CPU")
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["gpus"] and not dry:
        raise CannotStart("PyTorch finds no CUDA GPU here; --dry tries the whole program on the CPU")
    return Machine(dry=dry, tools=tools(), **found)


def must_be_named(commit: str, trial: bool) -> None:
    """Raises CannotStart where a table could not say which code it measured, and this is no trial outside results/."""
    if trial or COMMIT.fullmatch(commit):
        return
    if commit.endswith("-dirty"):
        why = "this tree has changes that are not committed: commit them"
    else:
        why = "there is no git to ask for the commit: name it with --commit (`git rev-parse HEAD`)"
    raise CannotStart(f"{why}, or try with --commit none --out DIR what no table will show")


# --------------------------------------------------------------------------------------------------------- what to do


@dataclass(frozen=True)
class Step:
    """One process."""

    name: str
    command: tuple[str, ...]  # "{out}" becomes the folder for its results, "{seconds}" the time it has
    measures: bool = False  # it must leave a result in {out}
    ends_with: str = ""  # the last line of its output
    needs: tuple[str, ...] = ()  # of Machine.tools
    gib: float = 0.0  # of free GPU memory
    expected: float = 10.0  # seconds, about; what the steps behind it may count on
    least: float = 3.0  # seconds without which it is not begun


@dataclass(frozen=True)
class Section:
    name: str
    about: str
    steps: Callable[[Machine], list[Step]]
    expected: float  # seconds, about: an estimate until a GPU has shown better
    least: float  # seconds without which it is not begun
    together: bool = False  # its steps measure no time, and may run side by side


# A benchmark that is started with --gpu: its section, about how many seconds it takes, the GiB that its sizes need, and
# the fewest seconds with which it is worth starting (it has to compile and to verify first). In a section the most
# valuable is first. One that is not named here comes last in `layers`.
BENCHMARKS = {
    "bench_flash_kernels": ("flash", 330, 8, 60),
    "bench_flash_attention_hopper": ("flash", 60, 8, 20),
    "bench_flash_attention": ("flash", 40, 8, 20),
    "bench_flash_attention_cuda": ("flash", 50, 8, 20),
    "bench_flash_attention_fp8": ("fp8", 50, 8, 20),
    "bench_train_gpu": ("train", 240, 8, 60),
    "bench_fused": ("kernels", 130, 30, 40),
    "bench_fused_loss": ("kernels", 110, 60, 40),
    "bench_fused_adamw": ("kernels", 40, 20, 15),
    "bench_elu": ("kernels", 50, 8, 20),
    "bench_matmul_ladder": ("matmul", 120, 4, 30),
    "bench_matmul": ("matmul", 40, 4, 15),
    "bench_fp8": ("fp8", 120, 30, 30),
    "bench_fp8_kernels": ("fp8", 60, 6, 20),
    "bench_fp8_matmul": ("fp8", 60, 6, 30),
    "bench_fpdt_attention": ("fpdt", 450, 40, 120),
    "bench_fpdt_store": ("layers", 60, 4, 15),
    "bench_expert_dispatch": ("layers", 40, 8, 15),
    "bench_split_backward": ("layers", 30, 8, 10),
}
OTHER = ("layers", 60, 4, 10)
SOURCES = {
    "bench_matmul_ladder",
    "bench_matmul",
    "bench_elu",
    "bench_flash_attention_cuda",
    "bench_flash_attention_fp8",
    "bench_fp8_matmul",
}  # these also build .cu files


def gpu_benchmarks() -> dict[str, list[Path]]:
    """By section, the benchmarks whose docstring says that they are started with --gpu."""
    found: dict[str, list[Path]] = {}
    for script in files("bench_*.py"):
        if re.search(rf"python \S*\b{script.stem}\.py --gpu", script.read_text()):
            found.setdefault(BENCHMARKS.get(script.stem, OTHER)[0], []).append(script)
    order = list(BENCHMARKS)
    for benches in found.values():
        benches.sort(key=lambda script: (order.index(script.stem) if script.stem in order else len(order), script.stem))
    return found


def chapter_scripts() -> list[Path]:
    """The scripts of chapters 01 to 10 that one runs: the same that tests/test_folders.py runs on the CPU."""
    return [script for script in scripts() if "__main__" in script.read_text()]


def relative(script: Path) -> str:
    return str(script.relative_to(ROOT))


def measuring(machine: Machine, script: Path, expected: float = 0.0) -> Step:
    """A benchmark, which verifies on the device before it times."""
    command = [sys.executable, str(script), "--gpu", *(["--dry"] if machine.dry else []), "--out", "{out}"]
    if '"--seconds"' in script.read_text():
        command += ["--seconds", "{seconds}"]
    compiler = "g++" if machine.dry else "nvcc"
    _, about, gib, least = BENCHMARKS.get(script.stem, OTHER)
    return Step(
        relative(script),
        tuple(command),
        measures=True,
        needs=(compiler,) if script.stem in SOURCES else (),
        gib=gib,
        expected=expected or about,
        least=3.0 if machine.dry else least,
    )


def benchmarks(section: str) -> Callable[[Machine], list[Step]]:
    return lambda machine: [measuring(machine, script) for script in gpu_benchmarks().get(section, [])]


def ceilings(machine: Machine) -> list[Step]:
    return [measuring(machine, ROOT / "tests/harness/ceilings.py", expected=25.0)]


def kernel_tests(machine: Machine) -> list[Step]:
    """The tests of chapter 09 find the GPU themselves. A dry run takes a few: `make test` has them all."""
    few = ["-k", "swiglu"] if machine.dry else []
    tests = files("test_*.py", ROOT / "09_kernels")
    tests = [file for file in tests if file.stem == "test_fused"] if machine.dry else tests
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    return [Step(relative(file), (*pytest, str(file), *few), needs=("pytest",), gib=2.0) for file in tests]


def chapters(machine: Machine) -> list[Step]:
    chosen = chapter_scripts()
    if machine.dry:
        chosen = [script for script in chosen if script.stem in ("gradient_reducers", "formats", "fpdt_store")]
    return [Step(relative(s), (sys.executable, str(s)), ends_with="PASS", gib=2.0) for s in chosen]


def sharing(machine: Machine) -> list[Step]:
    return [layouts(machine, "--share")]


def layouts(machine: Machine, *options: str) -> Step:
    options = (*options, "--dry") if machine.dry else options
    command = (sys.executable, str(ROOT / "tests/gpu_layouts.py"), *options, "--out", "{out}")
    return Step(f"tests/gpu_layouts.py {' '.join(options)}".strip(), command, measures=True, gib=4.0)


def several(machine: Machine) -> list[Step]:
    """On one GPU there is nothing to do. A dry run goes through the motions with two CPU ranks."""
    if machine.gpus < 2 and not machine.dry:
        return []
    ranks = 2 if machine.gpus < 4 else 4
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))
    chosen = [s for s in chapter_scripts() if "02" <= chapter_of(s).name[:2] <= "08"]
    chosen = [s for s in chosen if "init_process_group" in s.read_text()]
    if machine.dry:
        chosen = [script for script in chosen if script.stem == "collectives"]
    return [
        layouts(machine),
        *(Step(f"torchrun {relative(s)}", (*torchrun, str(s)), ends_with="PASS", gib=2.0) for s in chosen),
    ]


SECTIONS = (
    Section("flash", "FlashAttention against PyTorch's kernels", benchmarks("flash"), 480, 60),
    Section("ceilings", "what the device can do at most", ceilings, 30, 10),
    Section("train", "a training step: MFU and where the time goes", benchmarks("train"), 250, 60),
    Section("matmul", "the ladder of matrix products against cuBLAS", benchmarks("matmul"), 165, 30),
    Section("kernels", "fused kernels against the copy bandwidth", benchmarks("kernels"), 340, 40),
    Section("fp8", "fp8 against bf16", benchmarks("fp8"), 300, 30),
    Section("fpdt", "FPDT: a step, and the longest sequence", benchmarks("fpdt"), 460, 120),
    Section("layers", "host link, experts, split backward", benchmarks("layers"), 140, 15),
    Section("correct", "the tests of chapter 09 on the device", kernel_tests, 400, 30, together=True),
    Section("chapters", "the scripts of all chapters on the device", chapters, 400, 30, together=True),
    Section("shared", "several ranks share the GPU, over gloo", sharing, 90, 20),
    Section("several", "several ranks, a GPU each, over nccl", several, 400, 30),
)
CALL = 520.0  # seconds of a call of at most ten minutes, less what starting takes


def calls(sections: Sequence[Section], budget: float) -> list[list[Section]]:
    """Neighbours that fit into one call, in order."""
    groups: list[list[Section]] = []
    for section in sections:
        if groups and sum(s.expected for s in groups[-1]) + section.expected <= budget:
            groups[-1].append(section)
        else:
            groups.append([section])
    return groups


def plan_text(sections: Sequence[Section], budget: float) -> str:
    """The calls to make, with their expected seconds."""
    commit = commit_of(ROOT)
    named = COMMIT.fullmatch(commit) is not None  # there is git, and nothing has changed
    rest = f" COMMIT={commit}" if named else ""
    lines = [] if named else ["Commit first, or give COMMIT=: a GPU's time is not spent on what no commit names.", ""]
    lines += ["No section was named, so nothing was run. One call for each section, the most valuable first:", ""]
    names = [f"make gpu SECTION={section.name}{rest}" for section in sections]
    for name, section in zip(names, sections, strict=True):
        lines.append(f"  {name:{max(map(len, names))}}  # about {section.expected:3.0f} s: {section.about}")
    lines += ["", f"To start a machine costs a minute. Together, in calls of at most {budget:.0f} s:", ""]
    before = 0.0
    for group in calls(sections, budget):
        total = sum(section.expected for section in group)
        before += total
        names = ",".join(section.name for section in group)
        lines.append(f"  make gpu SECTION={names}{rest}  # about {total:.0f} s; {before:.0f} s with those above")
    lines += [
        "",
        "OUT=DIR writes one file, DIR/DEVICE.json, and every call adds to it; without OUT they go to results/. The",
        "seconds are estimates. A section that has more to do than time measures the goals' shapes first. Where there",
        "is no make: python3 tests/gpu.py --section NAMES --commit COMMIT --out DIR.",
    ]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- doing


@dataclass
class Outcome:
    step: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    results: list[str] = field(default_factory=list)
    output: str = ""  # its end, if something went wrong


LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Between fork and exec: SIGKILL to this program shall not leave a benchmark behind that holds the GPU."""
    if LIBC is not None:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Children:
    """The processes that are running: each leads a group of its own, so that what it started ends with it."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen] = set()
        self.lock, self.stopped = threading.Lock(), False

    def run(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        seconds: float,
        look: Callable[[], None] = lambda: None,
    ) -> int | None:
        """The exit code; None if it was ended because the time was over. `look` is called about once a second.

        Errors go to a file beside the log: nccl and torch warn while a process ends, after its last line.
        """
        with log.open("wb") as output, log.with_suffix(".errors").open("wb") as errors:
            with self.lock:
                if self.stopped:
                    return None
                child = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=errors,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
                self.running.add(child)
            until = time.monotonic() + max(seconds, 1.0)
            try:
                while (left := until - time.monotonic()) > 0:
                    try:
                        code = child.wait(timeout=min(left, 1.0))
                        return None if self.stopped else code
                    except subprocess.TimeoutExpired:
                        look()
                return None
            finally:
                end(child)
                with self.lock:
                    self.running.discard(child)

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for child in self.running:
                end(child)


def end(child: subprocess.Popen) -> None:
    """End a process and all that it started; those that are gone already are no error."""
    for sign, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            return
        try:
            child.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue


class Run:
    """One call of this program: what it may use, and the file that it writes after every step."""

    def __init__(
        self,
        machine: Machine,
        out: Path,
        budget: float,
        environment: dict[str, str],
        work: Path,
        begun: float | None = None,
    ) -> None:
        self.machine, self.out, self.environment, self.work = machine, out, environment, work
        self.begun, self.budget = time.monotonic() if begun is None else begun, budget
        self.children = Children()
        self.lock, self.seen = threading.RLock(), {}  # type: ignore[var-annotated]
        self.path = out / ("dry.json" if machine.dry else f"{file_name(machine.device)}.json")
        self.record: dict[str, Any] = {
            "device": machine.device,
            "dry": machine.dry,
            "environment": machine.environment,
            "gpus": machine.gpus,
            "memory_gib": {"total": round(machine.total_gib, 1), "free at the start": round(machine.free_gib, 1)},
            "sections": [],
            "results": {},
        }
        if self.path.exists():  # sections that were run before, on this device, stay
            before = json.loads(self.path.read_text())
            self.record |= {name: before[name] for name in ("sections", "results")}

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.begun)

    def save(self) -> None:
        half = self.path.with_suffix(".part")
        half.write_text(in_rows(self.record))
        half.replace(self.path)  # whole, or as it was

    def step(self, section: Section, step: Step, deadline: float) -> Outcome:
        machine = self.machine
        if missing := [name for name in step.needs if name not in machine.tools]:
            return Outcome(step.name, NOT_RUN, reason=f"{missing[0]} is not here")
        if not machine.dry and step.gib > machine.free_gib:
            free = f"{machine.free_gib:.0f} of {machine.total_gib:.0f} GiB were free"
            return Outcome(step.name, NOT_RUN, reason=f"needs {step.gib:.0f} GiB of GPU memory, and {free}")
        seconds = deadline - time.monotonic()
        if seconds < step.least:
            rest = f"{max(seconds, 0):.0f} s are left, and it needs about {step.least:.0f}; --section {section.name}"
            return Outcome(step.name, LEFT_OUT, reason=rest)
        place = Path(tempfile.mkdtemp(dir=self.work))
        log = place / "log"
        spare = max(5.0, seconds - 5.0)  # to end by itself rather than to be ended
        command = [part.replace("{out}", str(place)).replace("{seconds}", f"{spare:.0f}") for part in step.command]
        begun = time.monotonic()
        code = self.children.run(command, self.environment, log, seconds, look=lambda: self.look(place))
        took = round(time.monotonic() - begun, 1)
        said, errors = (f.read_text(errors="replace").strip() for f in (log, log.with_suffix(".errors")))
        with self.lock:
            outcome = Outcome(step.name, PASSED, took, results=self.collect(place))
        last = said.splitlines()[-1] if said else "no output"
        output = f"{said[-2000:]}\n{errors[-2000:]}".strip()
        if code is None:
            outcome.status = TOO_SLOW
            outcome.reason = "stopped" if self.children.stopped else f"ended after {took:.0f} s"
        elif code != 0:
            why = errors.splitlines()[-1] if errors else last
            outcome.status, outcome.reason = FAILED, f"exit code {code}: {why[:200]}"
        elif step.ends_with and last != step.ends_with:
            outcome.status, outcome.reason = FAILED, f"its last line is not {step.ends_with}, but: {last[:160]}"
        elif step.measures and not outcome.results:
            outcome.status, outcome.reason = FAILED, "it wrote no result"
        elif unsure := [name for name in outcome.results if not self.record["results"][name].get("verified", True)]:
            outcome.status, outcome.reason = FAILED, f"not verified: {', '.join(unsure)}"
        if outcome.status != PASSED:
            outcome.output = output
            if "out of memory" in (said + errors).lower():
                outcome.reason += f"; out of memory, {machine.free_gib:.0f} GiB were free at the start"
        return outcome

    def look(self, place: Path) -> None:
        """Keep what a running step has written so far: nobody knows whether this program sees its end."""
        changed = {file: file.stat().st_mtime_ns for file in place.glob("*.json")}
        with self.lock:
            if changed and changed != self.seen.get(place):
                self.seen[place] = changed
                self.collect(place)
                self.save()

    def collect(self, place: Path) -> list[str]:
        """Take over the results in a folder; also of a step that failed later: it had verified what it wrote."""
        names = []
        for file in sorted(place.glob("*.json")):
            try:
                record = json.loads(file.read_text())
            except json.JSONDecodeError:  # half written: the next look finds the whole
                continue
            self.record["results"][record["name"]] = record
            names.append(record["name"])
            if not self.machine.dry and self.out == ROOT / "results":
                shutil.copy(file, self.out / file.name)
        return names

    def section(self, section: Section, behind: float = 0.0) -> list[Outcome]:
        """Run a section's steps, and record each of them at once. `behind`: seconds that those behind it expect."""
        steps = section.steps(self.machine)
        # Whoever reads the file of a run that was killed shall see which steps there were.
        found = [Outcome(step.name, CUT_OFF, reason="the call ended before it did") for step in steps]
        entry: dict[str, Any] = {"name": section.name, "about": section.about}
        entry |= {"commit": self.machine.environment["commit"], "steps": [asdict(outcome) for outcome in found]}
        others = [other for other in self.record["sections"] if other["name"] != section.name]
        self.record["sections"] = [*others, entry]
        self.save()

        def note(place: slice, outcome: Outcome) -> None:
            found[place], entry["steps"][place] = [outcome], [asdict(outcome)]
            self.save()
            why = f" ({outcome.reason})" if outcome.reason else ""
            print(f"  {outcome.status:9} {outcome.seconds:6.1f} s  {outcome.step}{why}", flush=True)
            if outcome.output:
                print("    | " + "\n    | ".join(outcome.output.splitlines()[-12:]), flush=True)

        print(f"{section.name}: {section.about}", flush=True)
        left = self.left()
        if not steps:
            note(slice(None), Outcome(section.name, NOT_RUN, reason=f"{self.machine.gpus} GPU; nothing to do for it"))
            return found
        if left < section.least and not self.machine.dry:
            reason = f"{left:.0f} s are left, and it needs about {section.least:.0f}; --section {section.name}"
            note(slice(None), Outcome(section.name, LEFT_OUT, reason=reason))
            return found
        deadline = time.monotonic() + (left if self.machine.dry else max(left - behind, min(left, section.expected)))
        cores = os.cpu_count() or 2
        together = min(8, max(2, cores // 2)) if section.together else 2 if self.machine.dry else 1

        def one(place: int) -> None:
            later = 0.0 if together > 1 else sum(step.expected for step in steps[place + 1 :])
            now = time.monotonic()
            until = max(deadline - later, min(deadline, now + steps[place].expected))
            outcome = self.step(section, steps[place], until)
            with self.lock:
                note(slice(place, place + 1), outcome)

        with ThreadPoolExecutor(together) as pool:
            try:
                list(pool.map(one, range(len(steps))))
            except KeyboardInterrupt:
                self.children.stop()  # before the pool waits for its threads, which wait for them
                raise
        return found


def summary(run: Run, names: Sequence[str]) -> int:
    """Print the last table, add it and the goals to the record, and give the exit code."""
    mine = [step for entry in run.record["sections"] if entry["name"] in names for step in entry["steps"]]
    wrong = any(step["status"] in (FAILED, TOO_SLOW) for step in mine)
    tables = overview(run.record)
    run.record["results"] |= tables
    if not run.machine.dry and run.out == ROOT / "results":
        for name, record in tables.items():
            (run.out / f"{name}.{file_name(run.machine.device)}.json").write_text(in_rows(record))
    run.save()
    print(f"\n{'section':10} {'passed':>10} {'seconds':>9}  the others")
    for name, passed, seconds, others in tables["gpu_run"]["rows"]:
        print(f"{name:10} {passed:>10} {seconds:9.1f}  {others[:200]}")
    if not run.machine.dry:
        print()
        for chapter, goal, asked, reached, verdict, _ in tables["gpu_goals"]["rows"]:
            print(f"chapter {chapter}: {goal}: {asked}; {reached}, {verdict}")
    print(f"\n{run.budget - run.left():.0f} s of {run.budget:.0f}; {run.machine.device}; {run.path}")
    print("FAIL" if wrong else "PASS" + (" (dry: this proves the command, and measures nothing)" * run.machine.dry))
    if mine and all(step["status"] == NOT_RUN for step in mine):
        print(f"gpu.py: nothing could be run: {mine[0]['step']}: {mine[0]['reason']}", file=sys.stderr)
        return 2
    return 1 if wrong else 0


# ------------------------------------------------------------------------------------------------------------ the rest

# Some images set these: then PyTorch and cuBLAS round fp32 to 10 bits unasked, also where it is the referee.
TF32 = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
TQDM = '''"""Stands in for tqdm, which is not installed: the same calls, and no bar."""

import sys


class tqdm:
    def __init__(self, iterable=None, **options):
        self.iterable = iterable

    def __iter__(self):
        return iter(self.iterable)

    def __len__(self):
        return len(self.iterable)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def __getattr__(self, name):  # update, set_postfix, set_postfix_str, set_description, refresh, close, ...
        return lambda *arguments, **options: None

    @staticmethod
    def write(text, file=None, end="\\n"):
        print(text, file=file or sys.stdout, end=end)


def trange(*arguments, **options):
    return tqdm(range(*arguments), **options)
'''


def surroundings(dry: bool, work: Path, have_tqdm: bool) -> dict[str, str]:
    """The environment of every step: nothing is written into the tree or into a home that is not there."""
    environment = dict(os.environ)
    paths = [str(ROOT / "tests/fake_device")] * dry + [str(ROOT / "tests")]
    if not have_tqdm:
        (work / "stand-in" / "tqdm").mkdir(parents=True, exist_ok=True)
        (work / "stand-in" / "tqdm" / "__init__.py").write_text(TQDM)
        paths.append(str(work / "stand-in"))
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("RANKS_UNIT", "4")  # tests need not find out, each for itself, how slow this machine is
    # Compiled kernels are kept from one call to the next, so that a second one spends its minutes on measuring.
    cache = Path(tempfile.gettempdir()) / f"gpu-kernels-{os.getuid()}"
    environment.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *TF32):
        environment.pop(name, None)
    if dry:
        environment |= {"FAKE_GPUS": "2", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return environment


def find_nvcc() -> None:
    """The toolkit is often installed and not on the PATH."""
    usual = Path("/usr/local/cuda/bin")
    if not shutil.which("nvcc") and (usual / "nvcc").exists():
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{usual}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would print the whole usage as well
        self.exit(2, f"gpu.py: {message}; --help lists the options\n")


def parse(arguments: Sequence[str] | None, sections: Sequence[Section]) -> argparse.Namespace:
    parser = _Parser("gpu.py", allow_abbrev=False, description="Verify, measure and record what only a GPU can show.")
    names = [section.name for section in sections]
    parser.add_argument("--section", default="", help=f"some of {', '.join(names)}, with commas, or all")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a stand-in GPU: proves this command")
    parser.add_argument("--out", type=Path, help="folder to write to; default: results/, or a temporary one with --dry")
    parser.add_argument("--budget", type=float, default=CALL, help="seconds that it may take (default: %(default)s)")
    parser.add_argument("--commit", default="", help="what this tree is, where there is no git to ask; or none")
    args = parser.parse_args(arguments)
    asked = [name for name in re.split(r"[,\s]+", args.section) if name]
    args.section = names if asked == ["all"] or (args.dry and not asked) else asked
    for name in args.section:
        if name not in names:
            parser.error(f"--section {name} is unknown; use all, {', '.join(names)}")
    if args.commit not in ("", "none") and not COMMIT.fullmatch(args.commit):
        parser.error(f"--commit {args.commit} must be 10 to 40 digits of what `git rev-parse HEAD` says, or none")
    if not 0 < args.budget < float("inf"):
        parser.error(f"--budget {args.budget:g} must be a positive number of seconds")
    least = {section.name: section.least for section in sections if section.name in args.section}
    if least and not args.dry and args.budget < min(least.values()):
        smallest = min(least, key=least.__getitem__)
        parser.error(f"--budget {args.budget:g} is too small: the least, {smallest}, needs {least[smallest]:.0f} s")
    args.out = (args.out or (Path(tempfile.mkdtemp(prefix="gpu-dry-")) if args.dry else ROOT / "results")).resolve()
    if args.dry and args.out == ROOT / "results":
        parser.error(f"--out {args.out}: a dry run measures nothing, and must not write there; name another folder")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.out):
            pass
    except OSError as error:
        parser.error(f"--out {args.out} cannot be written to ({os.strerror(error.errno or 0)})")
    return args


def main(arguments: Sequence[str] | None = None, sections: Sequence[Section] = SECTIONS) -> int:
    begun, args = time.monotonic(), parse(arguments, sections)
    if args.commit:
        os.environ["COMMIT"] = args.commit
    if not args.section:
        print(plan_text(sections, args.budget))
        return 0
    find_nvcc()
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as folder:
        environment = surroundings(args.dry, Path(folder), bool(importlib.util.find_spec("tqdm")))
        try:
            machine = probe(args.dry, environment)
            if not args.dry:
                trial = args.commit == "none" and args.out != ROOT / "results"
                must_be_named(machine.environment["commit"], trial)
        except CannotStart as error:
            print(f"gpu.py: {error}", file=sys.stderr)
            return 2
        run = Run(machine, args.out, args.budget, environment, Path(folder), begun)
        print(", ".join(f"{key} {value}" for key, value in machine.environment.items()))
        if not machine.dry:
            print(f"{machine.gpus} GPU(s), {machine.free_gib:.0f} of {machine.total_gib:.0f} GiB free")
            if machine.free_gib < 0.8 * machine.total_gib:
                print("another process holds memory of this GPU: sizes shrink, and times are not to be trusted")
        chosen = [section for section in sections if section.name in args.section]
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: keep what there is
        try:
            for place, section in enumerate(chosen):
                run.section(section, behind=sum(later.expected for later in chosen[place + 1 :]))
        except KeyboardInterrupt:
            print("\nstopped; what was measured is kept", file=sys.stderr)
            summary(run, args.section)
            return 130
        finally:
            signal.signal(signal.SIGTERM, before)
        return summary(run, args.section)


if __name__ == "__main__":
    sys.exit(main())
