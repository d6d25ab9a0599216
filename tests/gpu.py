"""Everything that only a GPU can show: verify, measure, record. A GPU is often borrowed, for a quarter of an hour.

    python tests/gpu.py                                 prints the two calls below with their seconds; runs nothing
    python tests/gpu.py --first --commit C --out DIR    540 s: what the chapters' claims rest on, on one Hopper GPU
    python tests/gpu.py --second --commit C --out DIR   180 s: what failed, once more; FPDT; a profile
    python tests/gpu.py --section flash,train:60        some sections (or `all`), in the order in which they are asked,
                                                        with their own seconds or with these
    python tests/gpu.py --section fp8 --step bench_fp8  of them, the steps with these names only
    python tests/gpu.py --dry --first                   the same program at tiny sizes on a stand-in GPU

Nothing waits for the end. Every step is a process with a deadline of its own; it writes its result anew with every row,
and this program looks once a second and puts what it finds into DEVICE.json. So whatever ends a call, also a SIGKILL,
leaves what had been measured; what goes wrong in one step does not keep the next from running. What the time does not
allow is left out, and named. At the end the logs of all steps and the clocks of the GPU are packed into one archive.

A section may use its own seconds and those that earlier ones left over. The next call with the same --out goes on in
the same file; where it finds the folder empty, the files are put together later, by taking one after the other.

DEVICE.json holds the device, driver, versions, commit and date, the outcome of every step, and every result with its
spread and with what was predicted (harness/predictions.py). `make results FROM=DEVICE.json` puts them into results/ and
fills the tables. Written straight into results/ (the default), they are there already.

It needs Python, torch and triton. Without tqdm a stand-in of a few lines is used; without pytest, nvcc, a profiler, or
on a GPU that is not a Hopper, the steps that need one are "not run". Nothing is installed, and nothing is written into
the tree but the results. A dry run has a GPU that is not there (fake_device/): it refuses what CUDA and NCCL refuse.

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
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.goals import overview
from harness.layout import ROOT, chapter_of, files, find, scripts
from harness.report import COMMIT, commit_of, contents_of, file_name, in_rows

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
    hopper: bool = True
    tools: frozenset[str] = frozenset()  # of nvcc, g++, ncu, compute-sanitizer, pytest, tqdm

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
    found["hopper"] = torch.cuda.get_device_capability(0) == (9, 0)
print(json.dumps(found))
"""
# Of a dry run: importing this refuses a Triton whose interpreter does not go together with the NumPy that is here.
INTERPRETS = f"import sys; sys.path.append({str(ROOT / '09_kernels/in_depth')!r}); import _interpreter\n"


class CannotStart(RuntimeError):
    """Why nothing can be run, in one line."""


def tools(path: str | None) -> frozenset[str]:
    programs = {name for name in ("nvcc", "g++", "ncu", "compute-sanitizer") if shutil.which(name, path=path)}
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
    return Machine(dry=dry, tools=tools(environment.get("PATH")), **found)


def must_be_named(trial: bool) -> None:
    """Raises CannotStart where a table could not say which code it measured, and this is no trial outside results/."""
    commit = commit_of(ROOT)
    if trial or COMMIT.fullmatch(commit):
        return
    if commit.endswith("-dirty"):
        why = "this tree has changes that are not committed: commit them, take --contents from `make gpu`"
    else:
        why = "there is no git to ask for the commit: name it with --commit (`git rev-parse HEAD`)"
    raise CannotStart(f"{why}, or try with --commit none --out DIR what no table will show")


# --------------------------------------------------------------------------------------------------------- what to do


@dataclass(frozen=True)
class Step:
    """One process, or a few that follow each other."""

    name: str
    command: tuple[str, ...]  # "{out}" becomes the folder for its results, "{seconds}" the time it has
    then: tuple[tuple[str, ...], ...] = ()  # more commands, if this one ends well
    measures: bool = False  # it must leave a result in {out}
    ends_with: str = ""  # the last line of its output
    needs: tuple[str, ...] = ()  # of Machine.tools, and "Hopper"
    gib: float = 0.0  # of free GPU memory
    seconds: float = 10.0  # that it may take, besides those that are left over
    least: float = 3.0  # seconds without which it is not begun


@dataclass(frozen=True)
class Section:
    name: str
    about: str
    steps: Callable[[Run], list[Step]]
    seconds: float  # that it may take, besides those that earlier ones left over: an estimate until a GPU has been seen
    least: float  # seconds without which it is not begun
    together: bool = False  # its steps measure no time, and may run side by side


# A benchmark that is started with --gpu: its section, the seconds that it may take, the GiB that its sizes need, and
# the fewest seconds with which it is worth starting (it has to compile and to verify first). In a section the most
# valuable is first. One that is not named here comes last in `layers`.
BENCHMARKS = {
    "bench_matmul_ladder": ("matmul", 30, 4, 20),
    "bench_matmul": ("matmul", 30, 4, 10),
    "bench_flash_kernels": ("flash", 45, 8, 30),
    "bench_flash_attention_cuda": ("flash", 15, 8, 15),
    "bench_train_gpu": ("train", 130, 30, 40),
    "bench_fused": ("kernels", 90, 30, 20),
    "bench_fused_loss": ("kernels", 40, 40, 15),
    "bench_fp8_matmul": ("fp8", 12, 6, 15),
    "bench_flash_attention_fp8": ("fp8", 15, 8, 15),
    "bench_fpdt_store": ("fp8", 13, 4, 8),
    "bench_fp8": ("fp8", 30, 30, 15),
    "bench_fpdt_attention": ("fpdt", 85, 40, 60),
    "bench_profile": ("profile", 55, 8, 20),
    "bench_flash_attention": ("more", 40, 8, 20),
    "bench_fused_adamw": ("more", 40, 20, 15),
    "bench_elu": ("more", 30, 8, 15),
    "bench_fp8_kernels": ("more", 60, 6, 20),
    "bench_expert_dispatch": ("more", 40, 8, 15),
    "bench_split_backward": ("more", 30, 8, 10),
}
OTHER = ("more", 60, 4, 10)
# These also build .cu files; those for one kind of GPU need it.
SOURCES = {"bench_matmul_ladder", "bench_matmul", "bench_elu", "bench_profile"}
HOPPER = {"bench_flash_attention_cuda", "bench_flash_attention_fp8", "bench_fp8_matmul"}


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


def core_files() -> list[Path]:
    """One for each technique, and the one that has them all."""
    return [*(script for script in chapter_scripts() if script.parent == chapter_of(script)), find("five_d.py")]


def relative(script: Path) -> str:
    return str(script.relative_to(ROOT))


def compiler(machine: Machine) -> str:
    """For .cu files. A dry run emulates them."""
    return "g++" if machine.dry else "nvcc"


def measuring(machine: Machine, script: Path) -> Step:
    """A benchmark, which verifies on the device before it times."""
    command = [sys.executable, str(script), "--gpu", *(["--dry"] if machine.dry else []), "--out", "{out}"]
    if '"--seconds"' in script.read_text():
        command += ["--seconds", "{seconds}"]
    _, seconds, gib, least = BENCHMARKS.get(script.stem, OTHER)
    needs = [compiler(machine)] * (script.stem in SOURCES | HOPPER) + ["Hopper"] * (script.stem in HOPPER)
    return Step(
        relative(script),
        tuple(command),
        measures=True,
        needs=tuple(needs + ["ncu"] * (script.stem == "bench_profile")),
        gib=gib,
        seconds=seconds,
        least=3.0 if machine.dry else least,
    )


def benchmarks(section: str) -> Callable[[Run], list[Step]]:
    return lambda run: [measuring(run.machine, script) for script in gpu_benchmarks().get(section, [])]


def ceilings(run: Run) -> list[Step]:
    return [replace(measuring(run.machine, ROOT / "tests/harness/ceilings.py"), seconds=15.0)]


KERNELS = (
    *("matmul_ladder", "elu", "flash_kernels", "flash_attention_cuda", "flash_attention_fp8"),
    *("fused", "fused_loss", "fused_adamw", "fp8_kernels", "fp8_matmul"),
)


def passes(script: Path, *needs: str) -> Step:
    return Step(relative(script), (sys.executable, str(script)), ends_with="PASS", needs=needs, gib=2.0, seconds=70.0)


def first_scripts(run: Run) -> list[Step]:
    """The core files, the trainer, and the scripts of the kernels: do they run, and are they right?"""
    machine = run.machine
    core, depth = core_files(), [find(f"{name}.py") for name in KERNELS]
    if machine.dry:
        core, depth = [find("ulysses.py")], [find("fused_adamw.py")]  # two that are done soon
    nvcc = {script: (compiler(machine),) for script in depth if "_cuda" in script.read_text()}
    return [
        *([] if machine.dry else [Step("build the .cu files", BUILD, needs=("nvcc",), seconds=70.0)]),
        trains(machine),
        *(passes(script) for script in core),
        matmul_cu(machine),
        *(passes(script, *nvcc.get(script, ())) for script in depth),
    ]


BUILD = (sys.executable, str(ROOT / "09_kernels/in_depth/_cuda.py"), "--build")


def trains(machine: Machine) -> Step:
    """30 steps with a checkpoint in the middle, from which the second command goes on; the third samples."""
    train, run = (sys.executable, str(ROOT / "11_5d_trainer/train.py")), "{out}/run"
    first, all_steps = "20", "30"
    few: tuple[str, ...] = ()
    if machine.dry:
        first, all_steps = "2", "3"
        few = ("--kernels", "torch", "--micro-batch", "1", "--global-batch", "1", "--seq-len", "32")
    options = ("--steps", first, "--save-every", first, "--warmup", "2", "--eval-samples", "4", *few)
    return Step(
        "11_5d_trainer/train.py",
        (*train, *options, "--out", run),
        then=(
            (*train, "--resume", run, "--steps", all_steps),
            (sys.executable, str(ROOT / "11_5d_trainer/generate.py"), run, "--tokens", "20"),
        ),
        gib=4.0,
        seconds=70.0,
    )


def matmul_cu(machine: Machine) -> Step:
    """The core file that is no Python: built and run as its first lines say."""
    source = ROOT / "09_kernels/matmul.cu"
    header = source.parent / "in_depth/cuda_on_cpu.h"
    launches = r"s/(\w+)<<<(.*)>>>\(/LAUNCH(\1, \2, /"  # which g++ does not know
    cpu = f"g++ -x c++ -std=c++17 -O1 -U_FORTIFY_SOURCE -include '{header}' -o \"$0\" -"
    dry = ("bash", "-c", f"sed -E '{launches}' '{source}' | {cpu}", "{out}/matmul")
    real = ("nvcc", "-O3", "-arch=native", "-o", "{out}/matmul", str(source), "-lcublas")
    return Step(
        relative(source),
        dry if machine.dry else real,
        then=(("{out}/matmul",),),
        ends_with="PASS",
        needs=(compiler(machine),),
        seconds=70.0,
    )


def failed_before(run: Run) -> list[Step]:
    """The scripts that failed in an earlier call, once more, side by side; what ended with an error of CUDA, under
    compute-sanitizer: of a benchmark its script, whose sizes are small."""
    steps = []
    for name, why in run.failed_before().items():
        script, bench = ROOT / name, Path(name).name.startswith("bench_")
        if script.suffix != ".py" or not script.exists():
            continue
        if BROKEN.search(why):
            script = script.with_name(script.name.removeprefix("bench_"))
            check = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "3")
            command = (*check, sys.executable, str(script))
            steps.append(Step(relative(script), command, needs=("compute-sanitizer",), seconds=60.0))
        elif script.name == "train.py":
            steps.append(trains(run.machine))
        elif not bench and "tests" not in script.relative_to(ROOT).parts:
            steps.append(passes(script))
    return steps


BROKEN = re.compile(r"CUDA error|illegal|misaligned|exit code -\d", re.IGNORECASE)


def kernel_tests(run: Run) -> list[Step]:
    """The tests of chapter 09 whose tensors are on the device. Those of an emulated GPU, some 400 s, are for a CPU."""
    few = "swiglu" if run.machine.dry else "not compile"
    tests = [file for file in files("test_*.py", ROOT / "09_kernels") if re.search(r"\bDEVICE\b", file.read_text())]
    tests = [file for file in tests if file.stem != "test_matmul_ladder"]  # its CUDA sources are emulated there, too
    tests = [file for file in tests if file.stem == "test_fused"] if run.machine.dry else tests
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", few)
    return [Step(relative(file), (*pytest, str(file)), needs=("pytest",), gib=2.0, seconds=60.0) for file in tests]


def chapters(run: Run) -> list[Step]:
    chosen = [*chapter_scripts(), find("five_d.py")]
    if run.machine.dry:
        chosen = [script for script in chosen if script.stem in ("gradient_reducers", "formats", "fpdt_store")]
    return [*(passes(script) for script in chosen), trains(run.machine)]


def sharing(run: Run) -> list[Step]:
    return [layouts(run.machine, "--share")]


def layouts(machine: Machine, *options: str) -> Step:
    options = (*options, "--dry") if machine.dry else options
    command = (sys.executable, str(ROOT / "tests/gpu_layouts.py"), *options, "--out", "{out}")
    return Step(f"tests/gpu_layouts.py {' '.join(options)}".strip(), command, measures=True, gib=4.0, seconds=90.0)


def several(run: Run) -> list[Step]:
    """On one GPU there is nothing to do. A dry run goes through the motions with two CPU ranks."""
    machine = run.machine
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
    Section(
        "scripts", "core files, trainer and kernels: do they run, and are they right?", first_scripts, 75, 10, True
    ),
    Section("ceilings", "what the device can do at most", ceilings, 15, 10),
    Section("matmul", "the ladder of matrix products against cuBLAS", benchmarks("matmul"), 60, 20),
    Section("flash", "FlashAttention against PyTorch's kernels", benchmarks("flash"), 60, 30),
    Section("train", "a training step: MFU and where the time goes", benchmarks("train"), 130, 40),
    Section("kernels", "fused kernels against the copy bandwidth", benchmarks("kernels"), 130, 20),
    Section("fp8", "fp8 against bf16, and FPDT's store", benchmarks("fp8"), 70, 20),
    Section("failed", "what failed before, once more", failed_before, 40, 20, True),
    Section("fpdt", "FPDT: a step, and the longest sequence", benchmarks("fpdt"), 85, 60),
    Section("profile", "five kernels under Nsight Compute", benchmarks("profile"), 55, 20),
    Section("more", "experts, split backward, and what else is measured", benchmarks("more"), 320, 15),
    Section("correct", "the tests of chapter 09 on the device", kernel_tests, 200, 30, True),
    Section("chapters", "the scripts of all chapters on the device", chapters, 400, 30, True),
    Section("shared", "several ranks share the GPU, over gloo", sharing, 90, 20),
    Section("several", "several ranks, a GPU each, over NCCL", several, 400, 30),
)
CALLS = {  # of at most 600 s each: their sections, and their seconds
    "first": (("scripts", "ceilings", "matmul", "flash", "train", "kernels", "fp8"), 540.0),
    "second": (("failed", "fpdt", "profile"), 180.0),
}


def plan_text(sections: Sequence[Section]) -> str:
    """The two calls, with their sections and seconds, and what else there is."""
    commit = commit_of(ROOT)
    named = COMMIT.fullmatch(commit) is not None  # there is git, and nothing has changed
    lines = (
        []
        if named
        else ["Commit first, or name what this tree is: a GPU's time is not spent on what no commit names.", ""]
    )
    about = f"--commit {commit} --contents {contents_of(ROOT)}" if named else "--commit COMMIT"
    known = {section.name: section for section in sections}
    for call, (names, seconds) in CALLS.items():
        lines += [
            f"python3 tests/gpu.py --{call} {about} --out DIR   # {seconds:.0f} s",
            "",
        ]
        lines += [f"  {known[name].seconds:4.0f} s  {name:9} {known[name].about}" for name in names] + [""]
    rest = [section for section in sections if not any(section.name in names for names, _ in CALLS.values())]
    lines += ["Where there is more time, --section NAMES runs others, in the order asked:", ""]
    lines += [f"  {section.seconds:4.0f} s  {section.name:9} {section.about}" for section in rest]
    lines += ["", "Nothing was run. `make results FROM=DIR/DEVICE.json` fills the tables from what a call has written."]
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
    clocks: str = ""  # of the GPU while it ran: the median clock of the multiprocessors, and power


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
        with log.open("ab") as output, log.with_suffix(".errors").open("ab") as errors:
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


class Clocks:
    """What nvidia-smi says once a second, in clocks.csv: a time means little without the clock behind it."""

    FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"

    def __init__(self, file: Path) -> None:
        self.file = file
        self.samples: list[tuple[float, float, float]] = []  # seconds of time.monotonic(), MHz, W
        self.child: subprocess.Popen | None = None

    def start(self, environment: dict[str, str]) -> None:
        command = ["nvidia-smi", f"--query-gpu={self.FIELDS}", "--format=csv,noheader,nounits", "--loop=1", "--id=0"]
        try:
            self.child = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
                preexec_fn=die_with_parent,
            )
        except OSError:
            print("nvidia-smi is not here: nothing says at which clocks was measured", flush=True)
            return
        threading.Thread(target=self.read, args=(self.child,), daemon=True).start()

    def read(self, child: subprocess.Popen) -> None:
        begun = time.monotonic()
        with self.file.open("w", buffering=1) as file:
            file.write(f"seconds,{self.FIELDS}\n")
            for line in child.stdout or ():
                now, words = time.monotonic(), line.replace(",", " ").split()
                file.write(",".join([f"{now - begun:.1f}", *words]) + "\n")
                try:
                    self.samples.append((now, float(words[0]), float(words[2])))
                except (IndexError, ValueError):  # "[N/A]"
                    continue

    def between(self, begin: float, end: float) -> str:
        """The medians in a span of time; "" if nothing was read."""
        mine = [sample for sample in list(self.samples) if begin <= sample[0] <= end]
        if not mine:
            return ""
        return f"{statistics.median(s[1] for s in mine):.0f} MHz, {statistics.median(s[2] for s in mine):.0f} W"

    def stop(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()


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
        self.clocks = Clocks(out / "clocks.csv")
        self.logs: list[tuple[str, Path]] = []
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

    def failed_before(self) -> dict[str, str]:
        """The steps that went wrong in an earlier call, and why: by this folder's record, else by results/'s."""
        record, taken = self.record, ROOT / "results" / self.path.name
        if not record["sections"] and taken.exists():
            record = json.loads(taken.read_text())
        steps = [
            step for section in record["sections"] if section["name"] in CALLS["first"][0] for step in section["steps"]
        ]
        return {step["step"]: step["reason"] for step in steps if step["status"] in (FAILED, TOO_SLOW)}

    def pack(self, name: str) -> None:
        """The logs of all steps, the clocks and the record in one file: few files come back from a borrowed machine."""
        with tarfile.open(self.out / f"{name}.tar.gz", "w:gz") as archive:
            for step, log in self.logs:
                for file in (log, log.with_suffix(".errors")):
                    if file.exists() and file.stat().st_size:
                        archive.add(file, f"{re.sub(r'[^A-Za-z0-9._-]+', '_', step)}{file.suffix or '.log'}")
            for file in (self.path, self.clocks.file):
                if file.exists():
                    archive.add(file, file.name)

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.begun)

    def save(self) -> None:
        half = self.path.with_suffix(".part")
        half.write_text(in_rows(self.record))
        half.replace(self.path)  # whole, or as it was

    def step(self, section: Section, step: Step, deadline: float) -> Outcome:
        machine = self.machine
        if "Hopper" in step.needs and not machine.hopper:
            return Outcome(step.name, NOT_RUN, reason=f"it is for a Hopper GPU, and this is {machine.device}")
        if missing := [name for name in step.needs if name not in machine.tools | {"Hopper"}]:
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
        begun = time.monotonic()
        code: int | None = 0
        for command in (step.command, *step.then):
            words = [part.replace("{out}", str(place)).replace("{seconds}", f"{spare:.0f}") for part in command]
            still = seconds - (time.monotonic() - begun)
            code = self.children.run(words, self.environment, log, still, look=lambda: self.look(place))
            if code != 0:
                break
        took = round(time.monotonic() - begun, 1)
        self.logs.append((step.name, log))
        said, errors = (f.read_text(errors="replace").strip() for f in (log, log.with_suffix(".errors")))
        with self.lock:
            outcome = Outcome(step.name, PASSED, took, results=self.collect(place))
        outcome.clocks = self.clocks.between(begun, time.monotonic())
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

    def section(self, section: Section, behind: float = 0.0, only: Container[str] = ()) -> list[Outcome]:
        """Run a section's steps, and record each of them at once. `behind`: seconds that those behind it expect.
        `only`: names of the steps to run; all if empty."""
        steps = [step for step in section.steps(self) if not only or Path(step.name).stem in only]
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
            note(slice(None), Outcome(section.name, NOT_RUN, reason=f"{self.machine.gpus} GPU; nothing to do"))
            return found
        if left < section.least and not self.machine.dry:
            reason = f"{left:.0f} s are left, and it needs about {section.least:.0f}; --section {section.name}"
            note(slice(None), Outcome(section.name, LEFT_OUT, reason=reason))
            return found
        deadline = time.monotonic() + (left if self.machine.dry else max(left - behind, min(left, section.seconds)))
        cores = os.cpu_count() or 2
        together = min(12, max(2, cores)) if section.together else 2 if self.machine.dry else 1

        def one(place: int) -> None:
            later = 0.0 if together > 1 else sum(step.seconds for step in steps[place + 1 :])
            now = time.monotonic()
            until = max(deadline - later, min(deadline, now + steps[place].seconds))
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
    for name, passed, seconds, _, others in tables["gpu_run"]["rows"]:
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
        programs = str(ROOT / "tests/fake_device")  # stand-ins for nvidia-smi and ncu
        environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", os.defpath)])
        environment |= {"FAKE_GPUS": "2", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return environment


def find_tools() -> None:
    """The toolkit is often installed and not on the PATH."""
    for usual in (Path("/usr/local/cuda/bin"), *sorted(Path("/opt/nvidia/nsight-compute").glob("*"))):
        if usual.is_dir():
            os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{usual}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would print the whole usage as well
        self.exit(2, f"gpu.py: {message}; --help lists the options\n")


def parse(arguments: Sequence[str] | None, sections: Sequence[Section]) -> argparse.Namespace:
    parser = _Parser("gpu.py", allow_abbrev=False, description="Verify, measure and record what only a GPU can show.")
    names = [section.name for section in sections]
    what = parser.add_mutually_exclusive_group()
    for call, (_, seconds) in CALLS.items():
        what.add_argument(
            f"--{call}", dest="call", action="store_const", const=call, help=f"this call of {seconds:.0f} s"
        )
    what.add_argument("--section", default="", help=f"some of {', '.join(names)}, with commas, or all; NAME:SECONDS")
    parser.add_argument("--step", default="", help="of the sections, the steps of these names only, with commas")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a stand-in GPU: proves this command")
    parser.add_argument("--out", type=Path, help="folder to write to; default: results/, or a temporary one with --dry")
    parser.add_argument("--budget", type=float, help="seconds that it may take (default: the call's; else 520)")
    parser.add_argument("--commit", default="", help="what this tree is, where there is no git to ask; or none")
    parser.add_argument("--contents", default="", help="digits of its files, where git knows an older commit only")
    args = parser.parse_args(arguments)
    words = [re.fullmatch(r"([^:]+)(?::(\d+))?", word) for word in re.split(r"[,\s]+", args.section) if word]
    if None in words:
        parser.error(f"--section {args.section} is no list of NAME or NAME:SECONDS")
    args.seconds = {word[1]: float(word[2]) for word in words if word and word[2]}
    asked = [word[1] for word in words if word]
    if args.call:
        asked = [name for name in CALLS[args.call][0] if name in names]
    args.section = names if asked == ["all"] or (args.dry and not asked) else asked
    if args.budget is None:
        args.budget = CALLS[args.call][1] if args.call else 520.0
    for name in args.section:
        if name not in names:
            parser.error(f"--section {name} is unknown; use all, {', '.join(names)}")
    args.step = [name for name in re.split(r"[,\s]+", args.step) if name]
    if args.commit not in ("", "none") and not COMMIT.fullmatch(args.commit):
        parser.error(f"--commit {args.commit} must be 10 to 40 digits of what `git rev-parse HEAD` says, or none")
    if not 0 < args.budget < float("inf"):
        parser.error(f"--budget {args.budget:g} must be a positive number of seconds")
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
    sections = [replace(section, seconds=args.seconds.get(section.name, section.seconds)) for section in sections]
    if args.commit:
        os.environ |= {"COMMIT": args.commit, "CONTENTS": args.contents}
    if not args.section:
        print(plan_text(sections))
        return 0
    find_tools()
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as folder:
        environment = surroundings(args.dry, Path(folder), bool(importlib.util.find_spec("tqdm")))
        try:
            if not args.dry:
                must_be_named(trial=args.commit == "none" and args.out != ROOT / "results")
            machine = probe(args.dry, environment)
        except CannotStart as error:
            print(f"gpu.py: {error}", file=sys.stderr)
            return 2
        run = Run(machine, args.out, args.budget, environment, Path(folder), begun)
        print(", ".join(f"{key} {value}" for key, value in machine.environment.items()))
        if not machine.dry:
            print(f"{machine.gpus} GPU(s), {machine.free_gib:.0f} of {machine.total_gib:.0f} GiB free")
            if machine.free_gib < 0.8 * machine.total_gib:
                print("another process holds memory of this GPU: sizes shrink, and times are not to be trusted")
        known = {section.name: section for section in sections}
        chosen = [known[name] for name in args.section]
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: keep what there is
        try:
            for place, section in enumerate(chosen):
                if run.clocks.child is None and not section.together:
                    run.clocks.start(environment)
                run.section(section, sum(later.seconds for later in chosen[place + 1 :]), args.step)
            code = summary(run, args.section)
        except KeyboardInterrupt:
            print("\nstopped; what was measured is kept", file=sys.stderr)
            summary(run, args.section)
            code = 130
        finally:
            signal.signal(signal.SIGTERM, before)
            run.clocks.stop()
        run.pack(args.call or "sections")
        return code


if __name__ == "__main__":
    sys.exit(main())
