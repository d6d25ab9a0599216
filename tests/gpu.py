"""Everything that only a GPU can show: verify, measure, record. A GPU is often borrowed, for a quarter of an hour.

    python tests/gpu.py                                 prints the two calls below with their seconds; runs nothing
    python tests/gpu.py --first --commit C --out DIR    540 s: what the chapters' claims rest on, on one Hopper GPU
    python tests/gpu.py --second --commit C --out DIR   180 s: what failed, once more; FPDT; a profile
    python tests/gpu.py --section flash,train:60        some sections, in this order, with their own seconds or these
    python tests/gpu.py --section fp8 --step bench_fp8  of them, the steps with these names only
    python tests/gpu.py --dry --first                   the same program at tiny sizes on a stand-in GPU (fake_device/)

A call consists of sections, a section of steps, and a step is a process with a deadline. A step writes its result anew
with every row, and this program puts what it finds into DIR/DEVICE.json at once. So whatever ends a call, a SIGKILL as
well, leaves what had been measured. A step that fails does not keep the next one from running. What the time does not
allow is left out by name. At the end the logs of all steps and the GPU's clocks are packed into an archive.

A section may use its own seconds and those that earlier ones left over. The next call with the same --out adds to the
same file; the files of two folders are put together later, by taking one after the other.

DEVICE.json holds device, driver, versions, commit and date, the outcome of every step, and every result with its spread
and its prediction. `make results FROM=DEVICE.json` puts them into results/ and fills the tables of the READMEs.

It needs Python, torch, triton and tqdm. Steps that need nvcc, a profiler, pytest or a Hopper GPU are "not run" without.
Nothing is installed, and nothing is written into the tree except --out, by default runs/gpu (ignored by git). Exit
code: 0 if something ran and all of it is right, 1 if not, 2 if nothing could be started.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.goals import overview
from harness.layout import ROOT, chapter_of, files, find, scripts
from harness.report import COMMIT, commit_of, contents_of, file_name, save

PASSED = "passed"
FAILED = "failed"
TOO_SLOW = "too slow"
NOT_RUN = "not run"
LEFT_OUT = "left out"
CUT_OFF = "cut off"  # what a step is called until it has ended
NOT_ENDED = {"status": CUT_OFF, "seconds": 0.0, "reason": "the call ended before it did", "results": [], "output": ""}

# ---------------------------------------------------------------------------------------------------------- the steps


@dataclass(frozen=True)
class Step:
    """Commands that follow each other as long as each ends with 0."""

    name: str
    commands: Sequence[Sequence[str]]  # "{out}" becomes the folder for results, "{seconds}" the time that is left
    seconds: float = 10.0  # that it may take, besides those that are left over
    least: float = 3.0  # seconds without which it is not begun
    measures: bool = False  # it must leave a result in {out}
    says_pass: bool = False  # the last line of its output must be PASS
    needs: tuple[str, ...] = ()  # of `tools`


# A benchmark that is started with --gpu: its section, the seconds that it may take, the fewest with which it is worth
# starting (it has to compile and to verify first), and what it needs. In a section the most valuable is first.
BENCHMARKS: dict[str, tuple[str, float, float, tuple[str, ...]]] = {
    "bench_matmul_ladder": ("matmul", 30, 20, ("nvcc",)),
    "bench_matmul": ("matmul", 30, 10, ("nvcc",)),
    "bench_flash_kernels": ("flash", 45, 30, ()),
    "bench_flash_attention_cuda": ("flash", 15, 15, ("nvcc", "a Hopper GPU")),
    "bench_train_gpu": ("train", 130, 40, ()),
    "bench_fused": ("kernels", 90, 20, ()),
    "bench_fused_loss": ("kernels", 40, 15, ()),
    "bench_fp8_matmul": ("fp8", 12, 15, ("nvcc", "a Hopper GPU")),
    "bench_flash_attention_fp8": ("fp8", 15, 15, ("nvcc", "a Hopper GPU")),
    "bench_fpdt_store": ("fp8", 13, 8, ()),
    "bench_fp8": ("fp8", 30, 15, ()),
    "bench_fpdt_attention": ("fpdt", 85, 60, ()),
    "bench_profile": ("profile", 55, 20, ("nvcc", "ncu")),
    "bench_flash_attention": ("more", 40, 20, ()),
    "bench_fused_adamw": ("more", 40, 15, ()),
    "bench_elu": ("more", 30, 15, ("nvcc",)),
    "bench_fp8_kernels": ("more", 60, 20, ()),
    "bench_expert_dispatch": ("more", 40, 15, ()),
    "bench_split_backward": ("more", 30, 10, ()),
}
KERNELS = ["matmul_ladder", "elu", "flash_kernels", "flash_attention_cuda", "flash_attention_fp8"]
KERNELS += ["fused", "fused_loss", "fused_adamw", "fp8_kernels", "fp8_matmul"]
BROKEN = re.compile(r"CUDA error|illegal|misaligned|exit code -\d", re.IGNORECASE)


def relative(script: Path) -> str:
    return str(script.relative_to(ROOT))


def python(script: Path, *options: str) -> list[str]:
    return [sys.executable, str(script), *options]


def measuring(script: Path, dry: bool, seconds: float, least: float = 3.0, needs: tuple[str, ...] = ()) -> Step:
    """A benchmark, which verifies on the device before it times."""
    options = ["--gpu", "--out", "{out}"]
    if dry:
        options.append("--dry")
    if '"--seconds"' in script.read_text():
        options += ["--seconds", "{seconds}"]
    return Step(relative(script), [python(script, *options)], seconds, least, measures=True, needs=needs)


def benchmarks(section: str) -> Callable[[Run], list[Step]]:
    def steps(run: Run) -> list[Step]:
        rows = [(find(f"{name}.py"), row) for name, row in BENCHMARKS.items() if row[0] == section]
        return [measuring(script, run.dry, seconds, least, needs) for script, (_, seconds, least, needs) in rows]

    return steps


def ceilings(run: Run) -> list[Step]:
    return [measuring(find("ceilings.py"), run.dry, 15.0)]


def passes(script: Path, *needs: str) -> Step:
    """A script of a chapter, which ends with PASS."""
    return Step(relative(script), [python(script)], 70.0, says_pass=True, needs=needs)


def trains(dry: bool) -> Step:
    """30 steps with a checkpoint in the middle, from which the second command goes on; the third samples."""
    train = find("train.py")
    folder = "{out}/run"
    first, last = ("2", "3") if dry else ("20", "30")
    options = ["--steps", first, "--save-every", first, "--warmup", "2", "--eval-samples", "4"]
    if dry:
        options += ["--kernels", "torch", "--micro-batch", "1", "--global-batch", "1", "--seq-len", "32"]
    commands = [
        python(train, *options, "--out", folder),
        python(train, "--resume", folder, "--steps", last),
        python(find("generate.py"), folder, "--tokens", "20"),
    ]
    return Step(relative(train), commands, 70.0)


def matmul_cu() -> Step:
    """The core file that is no Python: built and run as its first lines say."""
    source = ROOT / "09_kernels/matmul.cu"
    program = "{out}/matmul"
    build = ["nvcc", "-O3", "-arch=native", "-o", program, str(source), "-lcublas"]
    return Step(relative(source), [build, [program]], 70.0, says_pass=True, needs=("nvcc",))


def chapter_scripts() -> list[Path]:
    """The scripts of chapters 01 to 10 that one runs: the same that tests/test_folders.py runs on the CPU."""
    return [script for script in scripts() if "__main__" in script.read_text()]


def first_scripts(run: Run) -> list[Step]:
    """Core files, trainer and kernels: do they run, and are they right?"""
    if run.dry:  # two that end soon
        return [trains(True), passes(find("ulysses.py")), passes(find("fused_adamw.py"))]
    core = [script for script in chapter_scripts() if script.parent == chapter_of(script)]
    kernels = [find(f"{name}.py") for name in KERNELS]
    in_cuda = [script for script in kernels if "_cuda" in script.read_text()]
    return [
        Step("build the .cu files", [python(find("_cuda.py"), "--build")], 70.0, needs=("nvcc",)),
        trains(False),
        *(passes(script) for script in [*core, find("five_d.py")]),
        matmul_cu(),
        *(passes(script, "nvcc") for script in in_cuda),
        *(passes(script) for script in kernels if script not in in_cuda),
    ]


def failed_before(run: Run) -> list[Step]:
    """The scripts that failed in an earlier call, once more. After an error of CUDA, a script, or the script of a
    benchmark (its sizes are small), runs under compute-sanitizer."""
    steps = []
    for name, why in run.failures().items():
        failed = ROOT / name
        script = failed.with_name(failed.name.removeprefix("bench_"))
        if script.suffix != ".py" or not script.exists() or name.startswith("tests/"):
            continue
        if script.name == "train.py":
            steps.append(trains(run.dry))
        elif BROKEN.search(why):
            check = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "3"]
            steps.append(Step(relative(script), [check + python(script)], 60.0, needs=("compute-sanitizer",)))
        elif script == failed:
            steps.append(passes(script))
    return steps


def kernel_tests(run: Run) -> list[Step]:
    """The tests of chapter 09 whose tensors are on the device. Those of an emulated GPU, some 400 s, are for a CPU."""
    tests = [file for file in files("test_*.py", ROOT / "09_kernels") if re.search(r"\bDEVICE\b", file.read_text())]
    tests = [file for file in tests if file.stem != "test_matmul_ladder"]  # its CUDA sources are emulated as well
    chosen = "not compile"
    if run.dry:
        tests = [find("test_fused.py")]
        chosen = "swiglu"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    return [Step(relative(file), [[*pytest, str(file)]], 60.0, needs=("pytest",)) for file in tests]


def all_chapters(run: Run) -> list[Step]:
    chosen = [*chapter_scripts(), find("five_d.py")]
    if run.dry:
        chosen = [find("gradient_reducers.py"), find("formats.py"), find("fpdt_store.py")]
    return [*(passes(script) for script in chosen), trains(run.dry)]


def layouts(run: Run, *options: str) -> Step:
    if run.dry:
        options = (*options, "--dry")
    script = ROOT / "tests/gpu_layouts.py"
    name = " ".join([relative(script), *options])
    return Step(name, [python(script, *options, "--out", "{out}")], 90.0, measures=True)


def shared(run: Run) -> list[Step]:
    return [layouts(run, "--share")]


def several(run: Run) -> list[Step]:
    """On one GPU there is nothing to do."""
    if run.machine.gpus < 2:
        return []
    ranks = "2" if run.machine.gpus < 4 else "4"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    chosen = [find("collectives.py")]
    if not run.dry:
        parallel = [script for script in chapter_scripts() if "02" <= chapter_of(script).name[:2] <= "08"]
        chosen = [script for script in parallel if "init_process_group" in script.read_text()]
    runs = [Step(f"torchrun {relative(script)}", [[*torchrun, str(script)]], says_pass=True) for script in chosen]
    return [layouts(run), *runs]


@dataclass(frozen=True)
class Section:
    name: str
    about: str
    steps: Callable[[Run], list[Step]]
    seconds: float  # that it may take, besides those that earlier ones left over
    together: bool = False  # its steps measure no time, and may run side by side


SECTIONS = (
    Section("scripts", "core files, trainer and kernels: do they run, and are they right?", first_scripts, 75, True),
    Section("ceilings", "what the device can do at most", ceilings, 15),
    Section("matmul", "the ladder of matrix products against cuBLAS", benchmarks("matmul"), 60),
    Section("flash", "FlashAttention against PyTorch's kernels", benchmarks("flash"), 60),
    Section("train", "a training step: MFU and where the time goes", benchmarks("train"), 130),
    Section("kernels", "fused kernels against the copy bandwidth", benchmarks("kernels"), 130),
    Section("fp8", "fp8 against bf16, and FPDT's store", benchmarks("fp8"), 70),
    Section("failed", "what failed before, once more", failed_before, 40, True),
    Section("fpdt", "FPDT: a step, and the longest sequence", benchmarks("fpdt"), 85),
    Section("profile", "five kernels under Nsight Compute", benchmarks("profile"), 55),
    Section("more", "experts, split backward, and what else is measured", benchmarks("more"), 320),
    Section("correct", "the tests of chapter 09 on the device", kernel_tests, 200, True),
    Section("chapters", "the scripts of all chapters on the device", all_chapters, 400, True),
    Section("shared", "several ranks share the GPU, over gloo", shared, 90),
    Section("several", "several ranks, a GPU each, over NCCL", several, 400),
)
KNOWN = {section.name: section for section in SECTIONS}
CALLS = {  # of at most 600 s each
    "first": ("scripts", "ceilings", "matmul", "flash", "train", "kernels", "fp8"),
    "second": ("failed", "fpdt", "profile"),
}
STARTING = 60.0  # seconds, until PyTorch is imported on a machine that has just been started
DRY = 1800.0  # seconds of a dry run, whose sections have no limits of their own


def seconds_of(names: Sequence[str]) -> float:
    return sum(KNOWN[name].seconds for name in names)


def plan() -> str:
    """The two calls with their sections and seconds, and what else there is."""

    def line(section: Section) -> str:
        return f"  {section.seconds:4.0f} s  {section.name:9} {section.about}"

    commit = commit_of(ROOT)
    lines = []
    if COMMIT.fullmatch(commit):
        code = f"--commit {commit} --contents {contents_of(ROOT)}"
    else:
        code = "--commit COMMIT"
        lines += ["Commit first, or name what this tree is: a GPU's time is not spent on what no commit names.", ""]
    for call, names in CALLS.items():
        lines += [f"python3 tests/gpu.py --{call} {code} --out DIR   # {seconds_of(names):.0f} s", ""]
        lines += [line(KNOWN[name]) for name in names]
        lines.append("")
    lines += ["Where there is more time, --section NAMES runs others, in the order asked:", ""]
    called = CALLS["first"] + CALLS["second"]
    lines += [line(section) for section in SECTIONS if section.name not in called]
    lines += ["", "Nothing was run. `make results FROM=DIR/DEVICE.json` fills the tables from what a call has written."]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------- processes

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Between fork and exec: a SIGKILL of this program must not leave a benchmark behind that holds the GPU."""
    if LIBC is not None:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Running:
    """A step that is running. Each command leads a process group, so that what it starts ends with it."""

    def __init__(
        self, step: Step, outcome: dict[str, Any], seconds: float, environment: dict[str, str], work: str
    ) -> None:
        self.step = step
        self.outcome = outcome  # its entry in the record
        self.environment = environment
        self.folder = Path(tempfile.mkdtemp(dir=work))
        self.log = self.folder / "log"
        self.errors = self.folder / "log.errors"  # apart: libraries warn while a process ends, after its last line
        self.first_clock = 0  # how many lines of clocks there were before
        spare = max(5.0, seconds - 5.0)  # to end by itself rather than to be ended
        self.words = {"{out}": str(self.folder), "{seconds}": f"{spare:.0f}"}
        self.commands = list(step.commands)
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
        self.code: int | None = None  # the exit code; None as long as it runs, and if its time was over
        self.start()

    def start(self) -> None:
        command = list(self.commands.pop(0))
        for word, value in self.words.items():
            command = [part.replace(word, value) for part in command]
        with self.log.open("ab") as output, self.errors.open("ab") as errors:
            self.child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def has_ended(self) -> bool:
        code = self.child.poll()
        if code is None and time.monotonic() < self.deadline:
            return False
        self.end()
        if code == 0 and self.commands:
            self.start()
            return False
        self.code = code
        return True

    def end(self) -> None:
        """End the command and all that it started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.child.pid, sign)
                self.child.wait(timeout=5.0)


class Clocks:
    """What nvidia-smi says once a second, in clocks.csv: a time means little without the clock behind it."""

    def __init__(self, file: Path, environment: dict[str, str]) -> None:
        self.file = file
        command = "exec nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu"
        command += " --format=csv,noheader,nounits --loop=1 --id=0"
        with file.open("w") as lines:  # by a shell, which says so where there is no nvidia-smi
            self.child = subprocess.Popen(
                command, shell=True, stdout=lines, env=environment, preexec_fn=end_with_parent
            )

    def lines(self) -> list[str]:
        return self.file.read_text().splitlines()

    def medians(self, first: int) -> str:
        """Clock and power in the lines from `first` on; "" where they hold no numbers."""
        rows = re.findall(r"^.*, ([\d.]+), [\d.]+, ([\d.]+), \d+$", "\n".join(self.lines()[first:]), re.MULTILINE)
        if not rows:
            return ""
        clock = statistics.median(float(clock) for clock, _ in rows)
        power = statistics.median(float(power) for _, power in rows)
        return f"{clock:.0f} MHz, {power:.0f} W"

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()


# --------------------------------------------------------------------------------------------------------- the record


def verdict(step: Step, code: int | None, said: str, errors: str, results: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What a step that has ended is called, and why."""
    last = said.splitlines()[-1] if said else "no output"
    unsure = [result["name"] for result in results if not result["verified"]]
    if code is None:
        return TOO_SLOW, "its time was over"
    if code != 0:
        why = errors.splitlines()[-1] if errors else last
        return FAILED, f"exit code {code}: {why[:200]}"
    if step.says_pass and last != "PASS":
        return FAILED, f"its last line is not PASS, but: {last[:160]}"
    if step.measures and not results:
        return FAILED, "it wrote no result"
    if unsure:
        return FAILED, f"not verified: {', '.join(unsure)}"
    return PASSED, ""


def allowed(left: float, own: float, later: float) -> float:
    """Of the seconds that are left: those that later ones do not expect, but its own at least."""
    return max(left - later, min(left, own))


class Run:
    """One call of this program: what it may use, and the file that it writes whenever something has changed."""

    def __init__(self, machine: Machine, out: Path, seconds: float) -> None:
        self.machine = machine
        self.dry = machine.dry
        self.out = out
        self.deadline = time.monotonic() + seconds
        self.work = tempfile.TemporaryDirectory(prefix="gpu-run-")  # removed with this object
        self.logs: dict[str, Path] = {}
        self.path = out / ("dry.json" if self.dry else f"{file_name(machine.about['device'])}.json")
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.record: dict[str, Any] = {
            "device": machine.about["device"],
            "dry": self.dry,
            "environment": machine.about,
            "sections": before.get("sections", []),
            "results": before.get("results", {}),
        }
        self.clocks = Clocks(out / "clocks.csv", machine.environment)

    def failures(self) -> dict[str, str]:
        """The steps of the first call that went wrong, and why: by this folder's record, else by results/'s."""
        sections = self.record["sections"]
        taken = ROOT / "results" / self.path.name
        if not sections and taken.exists():
            sections = json.loads(taken.read_text()).get("sections", [])
        found: dict[str, str] = {}
        for section in sections:
            if section["name"] in CALLS["first"]:
                wrong = [step for step in section["steps"] if step["status"] in (FAILED, TOO_SLOW)]
                found |= {step["step"]: step["reason"] for step in wrong}
        return found

    def save(self) -> None:
        save(self.record, self.path)

    def collect(self, folder: Path) -> list[dict[str, Any]]:
        """The results that a step has written so far. Those of a step that fails later count: each was verified."""
        files = [json.loads(file.read_text()) for file in folder.glob("*.json")]
        found = [result for file in files for result in file["results"].values()]
        known = self.record["results"]
        for result in found:
            if json.dumps(known.get(result["name"])) != json.dumps(result):
                known[result["name"]] = result
                self.save()
        return found

    def section(self, section: Section, later: float = 0.0, only: Sequence[str] = ()) -> None:
        """Run a section's steps, those of the names in `only` if there are any. `later`: seconds that the sections
        behind it expect."""
        print(f"{section.name}: {section.about}", flush=True)
        steps = [step for step in section.steps(self) if not only or Path(step.name).stem in only]
        steps = steps or [Step(section.name, [])]
        deadline = time.monotonic() + allowed(self.deadline - time.monotonic(), section.seconds, later)
        at_once = min(12, os.cpu_count() or 1) if section.together or self.dry else 1
        outcomes: list[dict[str, Any]] = [{"step": step.name, **NOT_ENDED} for step in steps]
        commit = self.machine.about["commit"]
        entry = {"name": section.name, "about": section.about, "commit": commit, "steps": outcomes}
        others = [other for other in self.record["sections"] if other["name"] != section.name]
        self.record["sections"] = [*others, entry]
        self.save()
        waiting = list(zip(steps, outcomes, strict=True))
        running: list[Running] = []
        try:
            while waiting or running:
                if waiting and len(running) < at_once:
                    step, outcome = waiting.pop(0)
                    behind = 0.0 if at_once > 1 else sum(other.seconds for other, _ in waiting)
                    seconds = allowed(deadline - time.monotonic(), step.seconds, behind)
                    if self.can_begin(step, outcome, seconds, section.name):
                        process = Running(step, outcome, seconds, self.machine.environment, self.work.name)
                        process.first_clock = len(self.clocks.lines())
                        self.logs[step.name] = process.log
                        running.append(process)
                for process in list(running):
                    self.collect(process.folder)
                    if process.has_ended():
                        running.remove(process)
                        self.note(process, section.together)
                time.sleep(0.1)
        finally:
            for process in running:
                process.end()

    def can_begin(self, step: Step, outcome: dict[str, Any], seconds: float, section: str) -> bool:
        missing = [name for name in step.needs if name not in self.machine.tools]
        if not step.commands:
            outcome |= {"status": NOT_RUN, "reason": "there is nothing to do"}
        elif missing:
            outcome |= {"status": NOT_RUN, "reason": f"{missing[0]} is not here"}
        elif seconds < step.least:
            left = f"{max(seconds, 0):.0f} s are left, and it needs about {step.least:.0f}"
            outcome |= {"status": LEFT_OUT, "reason": f"{left}; --section {section}"}
        else:
            return True
        self.say(outcome)
        return False

    def note(self, process: Running, together: bool) -> None:
        """Add to the record what became of a step."""
        step = process.step
        said = process.log.read_text(errors="replace").strip()
        errors = process.errors.read_text(errors="replace").strip()
        results = self.collect(process.folder)
        outcome = process.outcome
        outcome["status"], outcome["reason"] = verdict(step, process.code, said, errors, results)
        outcome["seconds"] = round(time.monotonic() - process.begun, 1)
        outcome["results"] = [result["name"] for result in results]
        if outcome["status"] != PASSED:
            outcome["output"] = f"{said[-2000:]}\n{errors[-2000:]}".strip()
        if not together:
            outcome["clocks"] = self.clocks.medians(process.first_clock)
        self.say(outcome)

    def say(self, outcome: dict[str, Any]) -> None:
        self.save()
        why = f" ({outcome['reason']})" if outcome["reason"] else ""
        print(f"  {outcome['status']:9} {outcome['seconds']:6.1f} s  {outcome['step']}{why}", flush=True)
        for line in outcome["output"].splitlines()[-12:]:
            print(f"    | {line}", flush=True)

    def pack(self, name: str) -> None:
        """Logs, clocks and record in one file, because few files come back from a borrowed machine."""
        with tarfile.open(self.out / f"{name}.tar.gz", "w:gz") as archive:
            for step, log in self.logs.items():
                plain = re.sub(r"[^A-Za-z0-9._-]+", "_", step)
                archive.add(log, f"{plain}.log")
                archive.add(log.with_suffix(".errors"), f"{plain}.errors")
            for file in (self.path, self.clocks.file):
                archive.add(file, file.name)

    def summary(self, names: Sequence[str]) -> int:
        """Print the last table and the goals, and give the exit code."""
        tables = overview(self.record)
        print(f"\n{'section':10} {'passed':>10} {'seconds':>9}  the others")
        for name, passed, seconds, _, others in tables["gpu_run"]["rows"]:
            print(f"{name:10} {passed:>10} {seconds:9.1f}  {others[:200]}")
        print()
        for chapter, goal, asked, reached, status, _ in tables["gpu_goals"]["rows"]:
            print(f"chapter {chapter}: {goal}: {asked}; {reached}, {status}")
        found: set[str] = set()
        for section in self.record["sections"]:
            if section["name"] in names:
                found |= {step["status"] for step in section["steps"]}
        right = PASSED in found and not found & {FAILED, TOO_SLOW, CUT_OFF}
        print(f"\n{self.record['device']}; {self.path}")
        print(("PASS" if right else "FAIL") + (" (dry: nothing was measured)" if self.dry else ""))
        return 0 if right else 1


# -------------------------------------------------------------------------------------------------------- the machine

# Some images set these: then PyTorch and cuBLAS round fp32 to 10 bits unasked, where it is the reference as well.
TF32 = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
STAND_IN = str(ROOT / "tests/fake_device")  # for a GPU, and for nvidia-smi and ncu


@dataclass(frozen=True)
class Machine:
    dry: bool
    about: dict[str, str]  # device, versions, commit, date
    gpus: int
    tools: frozenset[str]
    environment: dict[str, str]  # of every step


def surroundings(dry: bool) -> dict[str, str]:
    """The environment of every step: nothing is written into the tree, or into a home that may not be there."""
    environment = {name: value for name, value in os.environ.items() if name not in TF32}
    modules = [str(ROOT / "tests"), *filter(None, [environment.get("PYTHONPATH")])]
    usual = [Path("/usr/local/cuda/bin"), *Path("/opt/nvidia/nsight-compute").glob("*")]  # often not on the PATH
    programs = [environment.get("PATH", os.defpath), *map(str, usual)]
    if dry:
        modules.insert(0, STAND_IN)
        programs.insert(0, STAND_IN)
        environment |= {"FAKE_GPUS": "2", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(modules), "PATH": os.pathsep.join(programs)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("RANKS_UNIT", "4")  # tests need not find out, each for itself, how slow this machine is
    kernels = f"{tempfile.gettempdir()}/gpu-kernels-{os.getuid()}"  # kept from one call to the next
    environment.setdefault("TRITON_CACHE_DIR", f"{kernels}/triton")
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{kernels}/inductor")
    return environment


PROBE = """
import json, torch
from harness.report import environment
torch.zeros(1, device="cuda").item()  # a GPU may be listed and still refuse to work
hopper = torch.cuda.get_device_capability() == (9, 0)
print(json.dumps([environment(), torch.cuda.device_count(), ["a Hopper GPU"] if hopper else []]))
"""


def probe(dry: bool) -> Machine:
    """In a process of its own, so that this one never holds memory of the GPU. Raises RuntimeError without a GPU."""
    environment = surroundings(dry)
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1][:200]
        raise RuntimeError(f"PyTorch cannot use a GPU here ({reason}); --dry tries the program on the CPU")
    about, gpus, tools = json.loads(done.stdout.splitlines()[-1])
    programs = ("nvcc", "g++", "ncu", "compute-sanitizer")
    tools += [name for name in programs if shutil.which(name, path=environment["PATH"])]
    tools += [name for name in ("pytest",) if importlib.util.find_spec(name)]
    if dry and "g++" in tools:
        tools.append("nvcc")  # a dry run emulates what is written in CUDA
    return Machine(dry, about, gpus, frozenset(tools), environment)


# ---------------------------------------------------------------------------------------------------- the command line


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would print the whole usage as well
        self.exit(2, f"gpu.py: {message}; --help lists the options\n")


def some_sections(text: str) -> list[Section]:
    """What `--section train:60,fp8` asks for."""
    chosen = []
    for word in text.split(","):
        asked = re.fullmatch(r"(\w+)(?::(\d+))?", word)
        if not asked or asked[1] not in KNOWN:
            raise argparse.ArgumentTypeError(f"{word} is none of {', '.join(KNOWN)}, or of these with :SECONDS")
        section = KNOWN[asked[1]]
        chosen.append(replace(section, seconds=float(asked[2] or section.seconds)))
    return chosen


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser("gpu.py", allow_abbrev=False, description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    for call, names in CALLS.items():
        about = f"this call of {seconds_of(names):.0f} s"
        what.add_argument(f"--{call}", dest="call", action="store_const", const=call, help=about)
    what.add_argument("--section", type=some_sections, default=[], help=f"some of {', '.join(KNOWN)}; NAME:SECONDS")
    parser.add_argument("--step", help="of the sections, the steps with these names only, with commas")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a stand-in GPU: proves this command")
    parser.add_argument("--out", type=Path, help="folder to write to; default: runs/gpu, with --dry a temporary one")
    parser.add_argument("--commit", default="", help="what this tree is, where there is no git; or none, for a trial")
    parser.add_argument("--contents", default="", help="digits of its files, where git knows an older commit only")
    args = parser.parse_args(arguments)
    if args.call:
        args.section = [KNOWN[name] for name in CALLS[args.call]]
    args.step = args.step.split(",") if args.step else []
    args.out = (args.out or (Path(tempfile.mkdtemp(prefix="gpu-dry-")) if args.dry else ROOT / "runs/gpu")).resolve()
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    args = parse(arguments)
    if not args.section:
        print(plan())
        return 0
    if args.commit:
        os.environ |= {"COMMIT": args.commit, "CONTENTS": args.contents}
    commit = commit_of(ROOT)
    try:
        if not (args.dry or args.commit == "none" or COMMIT.fullmatch(commit)):
            why = f"no table could say which code was measured: the commit of this tree is {commit}"
            raise RuntimeError(f"{why}; take --commit and --contents from `make gpu`, or try with --commit none")
        if args.out.exists() and not args.out.is_dir():
            raise RuntimeError(f"--out {args.out} is a file; name a folder")
        machine = probe(args.dry)
    except RuntimeError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{key} {value}" for key, value in machine.about.items()), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    seconds = [section.seconds for section in args.section]
    whole = DRY if args.dry else sum(seconds) + (0.0 if args.call else STARTING)
    run = Run(machine, args.out, begun + whole - time.monotonic())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: keep what there is
    try:
        for place, section in enumerate(args.section):
            run.section(section, 0.0 if args.dry else sum(seconds[place + 1 :]), args.step)
    except KeyboardInterrupt:
        print("\nstopped; what was measured is kept", file=sys.stderr)
    run.clocks.stop()
    run.pack(args.call or "sections")
    return run.summary([section.name for section in args.section])


if __name__ == "__main__":
    sys.exit(main())
