"""The command for borrowed GPUs, where there is none: that it runs, keeps what it has, and says what went wrong."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import gpu
import pytest
import torch
from gpu import Section, Step
from harness import ceilings
from harness.goals import GOALS, judge, number
from harness.layout import chapter_of, files, find
from harness.ranks import run_ranks
from harness.report import ROOT, Ratio, commit_of, contents_of, fill, measured, take, write_result
from test_ranks import alive, within

sys.path[:0] = [str(ROOT / "11_5d_trainer"), str(ROOT / "11_5d_trainer/bench"), str(ROOT / "01_single_gpu/in_depth")]
sys.path.append(str(ROOT / "08_fpdt/in_depth"))
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
HERE, BEFORE = "0123456789", "abcdefabcd"  # commits
ABOUT = {"device": "NVIDIA H200", "torch": "2.11.0", "python": "3.12", "commit": HERE, "date": "d"}
ABOUT |= {"driver": "580", "cuda": "13.0", "triton": "3.6.0"}

# ---------------------------------------------------------------------------------------------------- the whole of it


@pytest.fixture(scope="module")
def dry_folder(tmp_path_factory):
    """Where the dry runs of this module write; each section adds to one file, as the calls on a GPU do."""
    return tmp_path_factory.mktemp("dry")


CALLED = [name for names in gpu.CALLS.values() for name in names]
DRY = [["--section", "ceilings"], *([f"--{call}"] for call in gpu.CALLS)]
DRY += [["--section", name] for name in gpu.KNOWN if name not in (*CALLED, "chapters")]  # its scripts: below


@pytest.mark.prove
@pytest.mark.parametrize("what", DRY, ids=[what[-1].strip("-") for what in DRY])
def test_a_call_passes_on_the_stand_in_gpu_and_leaves_what_goals_and_readmes_look_for(dry_folder, what):
    command = [sys.executable, str(ROOT / "tests/gpu.py"), "--dry", *what, "--out", str(dry_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1900, cwd=dry_folder, env=NO_GPU)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("PASS (dry")
    record = json.loads((dry_folder / "dry.json").read_text())
    call = what[-1].strip("-")
    sections = gpu.CALLS.get(call, (call,))
    steps = [step for entry in record["sections"] if entry["name"] in sections for step in entry["steps"]]
    assert {step["step"] for step in steps if step["status"] != "passed"} <= {"failed"}, "of which there are none"
    measured = {Path(step["step"]).stem for step in steps if step["results"]}
    assert not measured or any(step.get("clocks") == "1700 MHz, 650 W" for step in steps)
    assert {name for name, (section, *_) in gpu.BENCHMARKS.items() if section in sections} <= measured
    with tarfile.open(dry_folder / f"{call if call in gpu.CALLS else 'sections'}.tar.gz") as archive:
        assert {"dry.json", "clocks.csv"} < set(archive.getnames())
    written = {name: record["results"][name] for step in steps for name in step["results"]}
    if call == "shared":  # a GPU is mostly lent alone: what its ranks can do over gloo is all that shows a layout there
        errors = dict(written["11_layouts_shared_gpu"]["rows"])
        assert [layout for layout, error in errors.items() if not error[0].isdigit()] == ["pipeline 1F1B"], errors
    readmes = "".join(file.read_text() for file in [ROOT / "README.md", *ROOT.glob("*/README.md")])
    for name, result in written.items():
        assert f"<!-- gpu results: {name} -->" in readmes
        assert result["verified"] is True, name
        assert result["environment"]["device"] == record["device"] == "stand-in for an NVIDIA H200", name
        for goal in GOALS:
            assert goal.result != name or goal.columns <= set(result["columns"]), f"{goal.what}: {goal.columns}"
        columns = " ".join(result["columns"])
        if re.search("ms|TFLOP|/s|seconds", columns):
            assert re.search("predicted|floor, ms", columns), f"{name} says nothing of what was expected: {columns}"


def with_streams(script):
    return re.search(r"Stream|non_blocking|pin_memory", script.read_text())


@pytest.mark.prove
@pytest.mark.parametrize(
    "script", [gpu.relative(s) for s in gpu.chapter_scripts() if s.parent == chapter_of(s) or with_streams(s)]
)
def test_a_script_of_a_chapter_passes_on_the_stand_in_gpu(tmp_path, script):
    """The core files, and what has streams or copies of its own: a GPU would refuse more than a CPU does."""
    environment = gpu.surroundings(True) | {"FAKE_GPUS": "1"}
    command = [sys.executable, str(ROOT / script)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stdout.strip().splitlines()[-1] == "PASS", (
        done.stdout[-1500:] + done.stderr[-1500:]
    )


# ------------------------------------------------------------------------------------------------------- what is asked


def test_both_calls_are_printed_with_their_seconds_and_fit_into_a_quarter_of_an_hour(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "commit_of", lambda root: HERE)
    assert gpu.main([]) == 0
    said = capsys.readouterr().out
    code = f"--commit {HERE} --contents {contents_of(ROOT)}"
    assert re.findall(rf"python3 tests/gpu.py --(\w+) {code} --out DIR +# (\d+) s", said) == [
        ("first", "540"),
        ("second", "180"),
    ]
    lines = re.findall(r"^ +(\d+) s  (\w+) ", said, re.MULTILINE)
    assert {name: float(seconds) for seconds, name in lines} == {name: s.seconds for name, s in gpu.KNOWN.items()}
    monkeypatch.setattr(gpu, "commit_of", lambda root: f"{HERE}-dirty")
    assert "Commit first" in gpu.plan() and "--commit COMMIT --out DIR" in gpu.plan()


def test_a_section_has_the_time_of_its_steps_and_each_step_what_it_needs(tmp_path):
    run = a_run(tmp_path, gpus=8)
    steps = {section.name: section.steps(run) for section in gpu.SECTIONS}
    for section in gpu.SECTIONS:
        seconds = sum(step.seconds for step in steps[section.name])
        assert section.together or seconds <= section.seconds or section.name == "several"
    starts = r"python \S*\b{}\.py --gpu"
    told = [file.stem for file in files("bench_*.py") if re.search(starts.format(file.stem), file.read_text())]
    assert set(told) == set(gpu.BENCHMARKS), "what its docstring starts with --gpu"
    core = "single_gpu data_parallel zero tensor_parallel ring_attention ulysses pipeline_parallel expert_parallel fpdt"
    core += " flash_attention mixed_precision five_d train"
    names = {step.name for step in steps["scripts"]}
    assert {gpu.relative(find(f"{name}.py")) for name in core.split()} | {"09_kernels/matmul.cu"} <= names
    needs = {Path(step.name).stem: step.needs for name in steps for step in steps[name] if name != "chapters"}
    assert needs["bench_elu"] == needs["matmul_ladder"] == ("nvcc",) and needs["zero"] == ()
    assert needs["bench_flash_attention_cuda"] == ("nvcc", "a Hopper GPU")
    assert needs["test_fused"] == ("pytest",) and "test_matmul" not in needs, "tests of an emulated GPU need none"
    assert {"tests/gpu_layouts.py", "torchrun 06_pipeline_parallel/pipeline_parallel.py"} <= {
        step.name for step in steps["several"]
    }
    assert gpu.several(a_run(tmp_path, gpus=1)) == []


@pytest.mark.parametrize(
    ("options", "whole", "sections"),
    [
        (["--second"], 180, [("failed", 40, 140, []), ("fpdt", 85, 55, []), ("profile", 55, 0, [])]),
        (
            ["--section", "fp8:25,train", "--step", "bench_fp8,x"],
            gpu.STARTING + 155,
            [("fp8", 25, 130, ["bench_fp8", "x"]), ("train", 130, 0, ["bench_fp8", "x"])],
        ),
        (["--dry", "--second"], gpu.DRY, [("failed", 40, 0, []), ("fpdt", 85, 0, []), ("profile", 55, 0, [])]),
    ],
)
def test_what_is_asked_runs_in_this_order_with_the_seconds_that_later_sections_leave(
    options, whole, sections, tmp_path, monkeypatch
):
    asked = []

    def section(run, section, later, only):
        left = run.deadline - time.monotonic()
        assert whole - 1.5 < left < whole - 0.5, "to look at the machine takes time of the call"
        asked.append((section.name, section.seconds, later, only))
        run.save()

    def slow(dry):
        time.sleep(0.5)
        return a_machine(dry=dry)

    monkeypatch.setattr(gpu, "commit_of", lambda root: HERE)
    monkeypatch.setattr(gpu, "probe", slow)
    monkeypatch.setattr(gpu.Run, "section", section)
    assert gpu.main([*options, "--out", str(tmp_path)]) == 1, "nothing has passed"
    assert asked == sections


@pytest.mark.parametrize(
    ("left", "own", "later", "seconds"),
    [(100, 60, 30, 70), (100, 60, 90, 60), (50, 60, 90, 50), (100, 60, 0, 100)],
)
def test_what_is_left_over_may_be_used_and_the_time_of_later_ones_may_not(left, own, later, seconds):
    assert gpu.allowed(left, own, later) == seconds


@pytest.mark.parametrize(
    ("options", "commit", "line"),
    [
        (["--section", "kernel"], HERE, "--section: kernel is none of scripts, ceilings, matmul, flash, train, "),
        (["--section", "fp8:x"], HERE, "--section: fp8:x is none of "),
        (["--first", "--second"], HERE, "argument --second: not allowed with argument --first"),
        (["--fast"], HERE, "unrecognized arguments: --fast; --help lists the options"),
        (["--first"], HERE, "PyTorch cannot use a GPU here ("),
        (["--dry", "--first", "--out", __file__], HERE, "test_gpu.py is a file; name a folder"),
        (["--first"], f"{HERE}-dirty", f"the commit of this tree is {HERE}-dirty; take --commit and --contents from"),
        (["--first"], "unknown (no git checkout)", "the commit of this tree is unknown (no git checkout); take --com"),
        (["--first", "--commit", "none"], f"{HERE}-dirty", "PyTorch cannot use a GPU here ("),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(options, commit, line, monkeypatch, capsys):
    for name in ("CUDA_VISIBLE_DEVICES", "COMMIT", "CONTENTS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(gpu, "commit_of", lambda root: commit)
    if "--commit" in options:  # what the probe says here is known from the case without
        monkeypatch.setattr(gpu, "PROBE", "raise RuntimeError")
    try:
        code = gpu.main(options)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("gpu.py: ") and line in said and said.count("\n") == 1


# -------------------------------------------------------------------------------------------------- what may go wrong


def a_machine(*, dry=False, gpus=1, about=ABOUT):
    return gpu.Machine(dry, about, gpus, frozenset({"pytest"}), gpu.surroundings(True))


RUNS = []


@pytest.fixture(autouse=True)
def stop_the_clocks():
    yield
    while RUNS:
        RUNS.pop().clocks.stop()


def a_run(folder, seconds=60.0, **machine):
    """A run on a machine that is made up: to look at a real one takes as long as PyTorch takes to be imported."""
    folder.mkdir(exist_ok=True)
    RUNS.append(gpu.Run(a_machine(**machine), folder, seconds))
    return RUNS[-1]


def section(name, *steps, seconds=60.0):
    return Section(name, f"about {name}", lambda run: list(steps), seconds)


def python(name, *programs, **options):
    return Step(name, [[sys.executable, "-c", code, "{out}"] for code in programs], **options)


WRITE = """
import json, pathlib, sys
environment = {"device": "CPU", "torch": "t", "python": "p", "commit": "c"}
about = {"title": "T", "columns": ["x"], "rows": [[1]], "notes": "", "verified": VERIFIED, "environment": environment}
pathlib.Path(sys.argv[1], "cpu.json").write_text(json.dumps({"results": {"NAME": {"name": "NAME"} | about}}))
THEN
"""


def writes(name, then="", verified=True):
    code = WRITE.replace("NAME", name).replace("VERIFIED", str(verified)).replace("THEN", then)
    return python(name, code, measures=True)


STEPS = [  # with the status, and how the reason begins
    (python("dies", "import sys; print('the reason'); sys.exit(3)"), "failed", "exit code 3: the reason"),
    (python("raises", "raise ValueError('off by 2')"), "failed", "exit code 1: ValueError: off by 2"),
    (python("says so", "print('PASS')", says_pass=True), "passed", ""),
    (python("warns", "import os; print('PASS'); os.write(2, b'a warning')", says_pass=True), "passed", ""),
    (python("denies", "print('off by 2')", says_pass=True), "failed", "its last line is not PASS, but: off by 2"),
    (python("chain", "print('one')", "print('two'); exit(4)", "print('three')"), "failed", "exit code 4: two"),
    (python("forgets", "pass", measures=True), "failed", "it wrote no result"),
    (writes("half", "raise MemoryError('no more')"), "failed", "exit code 1: MemoryError: no more"),
    (writes("doubtful", verified=False), "failed", "not verified: doubtful"),
    (python("wants", "pass", needs=("pytest", "nvcc")), "not run", "nvcc is not here"),
    (Step("idle", []), "not run", "there is nothing to do"),
    (python("long", "pass", least=90.0), "left out", "50 s are left, and it needs about 90; --section a"),
    (writes("good"), "passed", ""),
]


def test_a_step_that_fails_is_named_with_its_reason_and_the_next_ones_run(tmp_path, capsys):
    run = a_run(tmp_path)
    run.section(section("a", *(step for step, *_ in STEPS)))
    found = {step["step"]: (step["status"], step["reason"]) for step in run.record["sections"][0]["steps"]}
    found["long"] = (found["long"][0], re.sub(r"^\d+", "50", found["long"][1]))
    assert found == {step.name: (status, reason) for step, status, reason in STEPS}
    assert json.loads(run.path.read_text()) == run.record
    assert set(run.record["results"]) == {"half", "doubtful", "good"}, "what was written before a failure is kept"
    assert run.summary(["a"]) == 1
    said = capsys.readouterr().out
    assert "    | the reason" in said and said.endswith("FAIL\n")
    assert re.search(r"a +3 of 13 .*dies: failed, exit code 3: the reason; raises", said)
    run.pack("first")
    with tarfile.open(tmp_path / "first.tar.gz") as archive:
        assert archive.extractfile("chain.log").read().split() == [b"one", b"two"]
        assert archive.extractfile("warns.errors").read() == b"a warning"


def test_what_ran_before_stays_in_the_file_and_to_have_no_time_or_no_work_is_no_error(tmp_path):
    before = a_run(tmp_path)
    before.section(section("one", writes("first")))
    before.section(section("two", python("fails", "exit(1)")))
    run = a_run(tmp_path, seconds=20.0)
    run.section(section("two", writes("second"), python("b/c.py", "exit(1)")), only=["second"])
    run.section(section("three", python("long", "pass", least=30.0)))
    run.section(section("four"))
    found = {entry["name"]: [(s["step"], s["status"]) for s in entry["steps"]] for entry in run.record["sections"]}
    assert found == {
        "one": [("first", "passed")],
        "two": [("second", "passed")],
        "three": [("long", "left out")],
        "four": [("four", "not run")],
    }
    assert set(run.record["results"]) == {"first", "second"}
    assert [run.summary(names) for names in (["two", "three", "four"], ["three", "four"])] == [0, 1]


def gone(pid):
    """Whether a process ends within a minute."""
    return within(60, lambda: not alive(int(pid)))


@pytest.mark.always("True")
@pytest.mark.parametrize("together", [False, True])
def test_a_step_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, together):
    hangs = ["bash", "-c", f"sleep 600 & echo $! > {tmp_path / 'pid'}; wait"]
    run = a_run(tmp_path)
    steps = Step("hangs", [hangs], seconds=3.0), Step("behind it", [["true"]], seconds=55.0)
    run.section(dataclasses.replace(section("slow", *steps, seconds=4.0), together=together), later=57.0)
    hangs, behind = run.record["sections"][0]["steps"]
    assert (hangs["status"], hangs["reason"]) == ("too slow", "its time was over")
    assert (4.0 if together else 3.0) <= hangs["seconds"] < 30.0, "side by side each has all the time of the section"
    assert behind["status"] == ("passed" if together else "left out")
    assert run.summary(["slow"]) == 1
    assert gone((tmp_path / "pid").read_text().strip())


STARTED = """
import sys
sys.path.insert(0, TESTS)
import gpu, test_gpu as t
gpu.probe = lambda dry: t.a_machine(dry=dry)
grows = t.Step("grows", [[sys.executable, FILE, "{out}"]], measures=True)
gpu.KNOWN["fp8"] = t.section("fp8", grows)
gpu.KNOWN["more"] = t.section("more", t.writes("after"))
sys.exit(gpu.main(["--dry", "--section", "fp8,more", "--out", OUT]))
"""
GROWS = """
import os, pathlib, sys, time
sys.path.insert(0, TESTS)
from harness.ceilings import Table
table = Table("grows", "T", ["row"], folder=pathlib.Path(sys.argv[1]))
table.add(0)
table.add(1)
pathlib.Path(PID).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.always("step")
@pytest.mark.parametrize("killed", ["step", "SIGKILL", "SIGTERM"])
@pytest.mark.prove
def test_what_is_killed_leaves_every_row_it_had_measured(tmp_path, killed):
    """A table that grows; while its third row is computed, a signal to the step or to the whole call."""
    names = {"TESTS": ROOT / "tests", "FILE": tmp_path / "grows.py", "OUT": tmp_path, "PID": tmp_path / "pid"}
    define = "".join(f"{name} = {str(path)!r}\n" for name, path in names.items())
    (tmp_path / "grows.py").write_text(define + GROWS)
    child = subprocess.Popen([sys.executable, "-c", define + STARTED], env=NO_GPU, stdout=subprocess.PIPE, text=True)
    file, until = tmp_path / "dry.json", time.monotonic() + 120
    rows = []
    while len(rows) < 2 and time.monotonic() < until:
        time.sleep(0.2)
        if file.exists():
            rows = json.loads(file.read_text())["results"].get("grows", {"rows": []})["rows"]
    assert rows == [[0], [1]]
    pid = (tmp_path / "pid").read_text()
    if killed == "step":
        os.kill(int(pid), signal.SIGKILL)
    else:
        child.send_signal(getattr(signal, killed))
    child.communicate(timeout=60)
    assert gone(pid), "it would hold the GPU"
    record = json.loads(file.read_text())
    assert record["results"]["grows"]["rows"] == [[0], [1]]
    statuses = [step["status"] for entry in record["sections"] for step in entry["steps"]]
    assert statuses == (["failed", "passed"] if killed == "step" else ["cut off"])
    assert (tmp_path / "sections.tar.gz").exists() == (killed != "SIGKILL")


def test_the_second_call_runs_once_more_the_scripts_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)  # so that nothing is taken from results/
    run = a_run(tmp_path)
    assert gpu.failed_before(run) == []
    monkeypatch.undo()
    steps = [
        ("09_kernels/in_depth/bench_fused.py", "failed", "exit code 1: CUDA error: illegal"),
        ("03_zero/zero.py", "too slow", "its time was over"),
        ("09_kernels/in_depth/bench_fp8.py", "too slow", "its time was over"),
        ("tests/harness/ceilings.py", "too slow", "its time was over"),
        ("11_5d_trainer/train.py", "failed", "exit code 1: CUDA error: illegal"),
        ("11_5d_trainer/bench/bench_train_gpu.py", "failed", "exit code 1: CUDA error: illegal"),  # of no script
        ("02_data_parallel/data_parallel.py", "passed", ""),
    ]
    steps = [{"step": name, "status": status, "reason": reason} for name, status, reason in steps]
    other = {"step": "04_tensor_parallel/tensor_parallel.py", "status": "failed", "reason": "exit code 1"}
    run.record["sections"] = [{"name": "kernels", "steps": steps}, {"name": "several", "steps": [other]}]
    run.save()
    broken, core, train = gpu.failed_before(a_run(tmp_path))
    assert broken.commands[0][0] == "compute-sanitizer" and broken.commands[0][-1].endswith("/fused.py")
    assert core.name == "03_zero/zero.py" and core.says_pass
    assert train.name == "11_5d_trainer/train.py" and len(train.commands) == 3
    results = tmp_path / "results"
    results.mkdir()
    run.path.rename(results / run.path.name)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert "03_zero/zero.py" in a_run(tmp_path / "empty").failures(), "a borrowed machine may be empty again"


@pytest.mark.parametrize("to_device", [True, False])
def test_a_copy_over_the_link_that_copies_nothing_is_no_result(to_device, monkeypatch):
    cpu = torch.device("cpu")
    assert ceilings.link_bandwidth(cpu, 4096, to_device, repeats=2).median > 0
    monkeypatch.setattr(ceilings, "timer", lambda *_: lambda run: ceilings.Ratio(1.0, 1.0, 1.0))
    with pytest.raises(SystemExit, match="differs from its source"):
        ceilings.link_bandwidth(cpu, 4096, to_device)


def test_nothing_is_written_beside_the_sources():
    environment = gpu.surroundings(False)
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    for cache in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert not Path(environment[cache]).is_relative_to(ROOT), cache


@pytest.mark.prove
def test_on_a_gpu_a_call_finds_a_cache_that_was_flushed_by_reading_and_is_launched_while_the_device_sleeps():
    program = """
import time, torch
from harness.ceilings import CLOCK, paired_seconds
from torch.utils._python_dispatch import TorchDispatchMode

log = []
torch.cuda._sleep = lambda clocks: log.append(clocks)
record = torch.cuda.Event.record
torch.cuda.Event.record = lambda event: (log.append("event"), record(event))

class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        log.append("writes" if func._schema.is_mutable else "reads")
        return func(*args, **(kwargs or {}))

def slow():
    time.sleep(2e-3)
    log.append("slow")

with Operators():
    found = paired_seconds(torch.device("cuda"), {"slow": slow, "fast": lambda: log.append("fast")}, 4)
assert [len(seconds) for seconds in found.values()] == [4, 4] and min(found["slow"]) > 2e-3 > max(found["fast"])
log = log[next(i for i, word in enumerate(log) if word == "reads" and log[i + 1] not in ("reads", "writes")):]
rounds = [log[i : i + 5] for i in range(0, len(log), 5)]
assert [[r[0], r[2], r[4]] for r in rounds] == [["reads", "event", "event"]] * 8, rounds
assert [r[3] for r in rounds[:4]] == ["fast", "slow", "slow", "fast"], "they take turns, also in which comes first"
assert all(r[1] > CLOCK * (3e-3 if r[3] == "slow" else 0) for r in rounds), "as long as the launch takes, and half more"
"""
    environment = gpu.surroundings(True)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.prove
def test_an_image_that_allows_tf32_does_not_allow_it_here(monkeypatch):
    """Neither in what gpu.py starts, nor where fp32 is measured: there the result has to have the bits of fp32."""
    for name in gpu.TF32:
        monkeypatch.setenv(name, "1")
    assert not gpu.surroundings(False).keys() & set(gpu.TF32)
    program = """
import torch
from harness.ceilings import matmul_rate
assert torch.backends.cuda.matmul.allow_tf32, "by the environment"
device = torch.device("cuda")
matmul_rate(device, 128, torch.bfloat16, 2)
torch.backends.cuda.matmul.allow_tf32 = False
matmul_rate(device, 128, torch.float32, 2)
torch.backends.cuda.matmul.allow_tf32 = True
matmul_rate(device, 128, torch.float32, 2)
"""
    environment = gpu.surroundings(True) | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1 and done.stderr.startswith("ceilings.py: torch.float32 matrix product is off by "), (
        done.stderr[-1500:]
    )


# -------------------------------------------------------------------------------------------- from a run to the READMEs


RINGS = ("x", Ratio(2.0, 1.5, 2.5))


def a_gpu_run(folder, name="09_x_gpu", columns=("a", "b"), row=RINGS, commit=HERE, dry=False):
    """The file of a run on some GPU, as it would come back from there: a section and its result."""
    run = a_run(folder, dry=dry, about=ABOUT | {"commit": commit})
    run.section(section(f"makes {name}", python(name, "pass")))
    write_result(name, "Rings", columns, [row], folder=folder)
    (record,) = measured(name, folder)
    run.record["results"][name] = record | {"environment": ABOUT | {"commit": commit}}
    run.save()
    return run.path


def test_the_record_of_the_runs_so_far_gives_the_results_that_are_here(tmp_path):
    for file in (ROOT / "results").glob("nvidia-*.json"):
        assert take(file, tmp_path)
        assert json.loads((tmp_path / file.name).read_text()) == json.loads(file.read_text())


def test_a_run_on_a_gpu_fills_the_tables_with_device_driver_and_versions(tmp_path):
    text = "<!-- gpu results: 09_x_gpu -->\n<!-- end results -->"
    results = tmp_path / "results"
    results.mkdir()
    write_result("09_x_gpu", "Rings", ["a", "b"], [["x", 1]], folder=results)  # of a CPU
    assert fill(text, results) == text, "a CPU's numbers do not stand in for a GPU's"
    assert "No GPU has measured anything yet" in fill(text.replace("09_x_gpu", "gpu_run"), results)
    assert set(take(a_gpu_run(tmp_path), results)) == {"09_x_gpu", "gpu_run", "gpu_goals"}
    filled = fill(text, results)
    assert "| x | 2.00 (1.50 to 2.50) |" in filled
    assert f"NVIDIA H200; torch 2.11.0, Python 3.12, commit {HERE}; driver 580, CUDA 13.0, Triton 3.6.0; d." in filled


def test_calls_that_each_brought_a_file_are_taken_one_after_the_other(tmp_path):
    """A borrowed machine may be empty again at every call; the goals are judged on all that was taken."""
    results = tmp_path / "results"
    columns = ["kernels; precision", "MFU"]
    first = a_gpu_run(tmp_path / "first", "11_train_gpu", columns, ["bf16", "58.1%"], commit=BEFORE)
    for file in (first, a_gpu_run(tmp_path / "second")):
        names = take(file, results)
    assert set(names) == {"11_train_gpu", "09_x_gpu", "gpu_run", "gpu_goals"}
    whole = json.loads((results / "nvidia-h200.json").read_text())
    assert [row[:2] for row in whole["results"]["gpu_run"]["rows"]] == [
        [f"makes 11_train_gpu (commit {BEFORE})", "1 of 1"],
        ["makes 09_x_gpu", "1 of 1"],
    ]
    assert "0.581" in str(whole["results"]["gpu_goals"]["rows"])


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"dry": True}, "a dry run measures nothing"),
        ({"commit": f"{HERE}-dirty"}, f"no table can say which code was measured: commit {HERE}-dirty"),
        ({"commit": "unknown (no git checkout)"}, "no table can say which code was measured"),
    ],
)
def test_what_was_not_measured_or_what_no_commit_names_is_not_taken(tmp_path, about, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        take(a_gpu_run(tmp_path, **about), tmp_path / "results")
    assert not (tmp_path / "results").exists()


@pytest.mark.prove
def test_only_the_record_of_a_run_can_be_taken(tmp_path):
    file = write_result("09_z", "Rings", ["a"], [["x"]], folder=tmp_path)
    script = ROOT / "tests/harness/report.py"  # as `make results FROM=FILE` starts it
    done = subprocess.run([sys.executable, "-I", script, "--take", file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"report.py: --take {file}: this is not the record of a run of tests/gpu.py\n"


def test_a_plain_copy_is_at_the_commit_that_its_caller_names(tmp_path, monkeypatch):
    """Also where it lies in a checkout of something else, whose commit is of other files."""
    monkeypatch.delenv("COMMIT", raising=False)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "code.py").write_text("1")
    assert commit_of(copy) == "unknown (no git checkout)"
    monkeypatch.setenv("COMMIT", "0123456789abcdef0123456789abcdef01234567")
    assert commit_of(copy) == "0123456789"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "One"]):
        subprocess.run([*git, *words], check=True)
    around = commit_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{10}", around) and around != "0123456789", "a checkout knows better than its caller"
    assert commit_of(copy) == "0123456789"
    (copy / "code.py").write_text("2")
    assert commit_of(tmp_path) == f"{around}-dirty"
    monkeypatch.setenv("CONTENTS", contents_of(tmp_path))
    assert commit_of(tmp_path) == "0123456789", "the files of a newer commit, copied over an older checkout"
    (copy / "more.py").write_text("3")
    assert commit_of(tmp_path) == f"{around}-dirty", "and something that it did not have"
    monkeypatch.setenv("COMMIT", "of today")
    assert commit_of(copy) == "unknown (no git checkout)"


def test_what_is_not_verified_says_so_in_its_table(tmp_path):
    write_result("09_y", "Rings", ["a"], [["x"]], folder=tmp_path, verified=False)
    assert "**Not verified**" in fill("<!-- results: 09_y -->\n<!-- end results -->", tmp_path)


def test_a_goal_is_reached_missed_or_not_measured_and_a_missed_one_names_where_the_time_went():
    """How figures are found in real tables, the record of the runs so far shows above."""
    speed = {
        "columns": ["what", "times as fast: median (quartiles)"],
        "rows": [["linear", {"ratio": {"median": float("nan"), "low": 1.0, "high": 1.0}}], ["training step", "1.25"]],
    }
    train = {
        "columns": ["kernels; precision", "MFU"],
        "rows": [["triton; bf16-master", "58.1%"], ["triton; fp8-tensor", "75.0%"]],  # of the peak of bf16
    }
    parts = {
        "columns": ["model", "part", "ms", "floor, ms"],
        "rows": [["1.7B", "products", 100.0, "95"], ["1.7B", "attention", 60.0, "20"], ["1.7B", "step", 200.0, "130"]],
    }
    length = {"columns": ["way", "tokens"], "rows": [["FPDT", 2**20], ["recomputed", 2**22]]}
    results = {"10_fp8_speed": speed, "11_train_gpu": train, "11_train_parts": parts, "08_fpdt_longest": length}
    found = {row[1]: row[2:] for row in judge(results, "NVIDIA H200")}
    assert found["fp8 linear layer, times as fast as bf16"][2] == "missed", "NaN reaches nothing"
    assert found["fp8 training step, times as fast as bf16"] == ["at least 1.2", "1.25", "reached", "-"]
    mfu = found["MFU of a training step in bf16"]
    assert mfu[1:] == ["0.581", "missed", "attention, 1.7B: 40 ms above its floor"]
    assert found["FlashAttention forward, times cuDNN"][1:] == ["-", "not measured", "-"]
    assert found["tokens that FPDT fits"][::2] == ["at least 2,000,000", "missed"]
    found = {row[1]: row[2:] for row in judge(results, "NVIDIA H100 80GB HBM3")}
    assert found["tokens that FPDT fits"][::2] == ["at least 1,000,000", "reached"], "it has less memory"
    assert (number("93%"), number("n/a"), number(1.5), number("out of memory")) == (0.93, None, 1.5, None)


def test_memory_that_cannot_be_pinned_ends_a_length_and_another_error_the_program():
    import _fpdt_gpu as fpdt

    assert fpdt.no_memory(torch.OutOfMemoryError("CUDA out of memory. Tried")) == "OutOfMemoryError"
    assert fpdt.no_memory(RuntimeError("CUDA error: out of memory")) == "no more pinned memory"
    with pytest.raises(RuntimeError, match="illegal"):
        fpdt.no_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_fpdts_mfu_is_chapter_01s_and_its_goal_nine_tenths_of_the_formula():
    import _fpdt_gpu as fpdt
    from accounting import step_flops
    from harness.predictions import gpu_called
    from llama import LlamaConfig

    plan, S = fpdt.REAL, fpdt.REAL.lengths[-1]
    wide = dict(hidden=plan.hidden, heads=plan.heads, kv_heads=plan.kv_heads, intermediate=plan.intermediate)
    for layers in (1, 3):
        want = step_flops(LlamaConfig(plan.vocab, layers=layers, **wide), 1, S).model
        assert fpdt.flops(plan, S, layers) == pytest.approx(want, rel=1e-12)
        masked = 3 * layers * 2 * S * S * plan.hidden
        assert fpdt.flops(plan, S, layers, 0.5) == pytest.approx(want - masked, rel=1e-12)
    h200 = gpu_called("NVIDIA H200")
    formula = fpdt.flops(plan, S, 1) / fpdt.predicted_seconds(plan, S, 1, h200) / h200.bf16
    bound = next(goal.bound for goal in GOALS if goal.result == "08_fpdt_gpu")
    assert plan.hidden // plan.heads == 128 and 0.89 * formula < bound < 0.9 * formula


def test_every_goal_is_measured_by_some_section():
    source = "".join(find(f"{name}.py").read_text() for name in [*gpu.BENCHMARKS, "_fpdt_gpu"])
    assert [goal.what for goal in GOALS if f'"{goal.result}"' not in source] == []


# ---------------------------------------------------------------------------------------------- the trainer's benchmark


def test_kernels_of_a_gpu_are_counted_with_the_part_of_the_step_that_they_belong_to():
    import bench_train_gpu as bench

    names = {
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": "matrix products",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>": "matrix products",
        "forward_kernel": "attention, forward",
        "dkdv_kernel": "attention, backward",
        "void pytorch_flash::flash_fwd_kernel<...>": "attention, forward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention, backward",
        "rms_norm_backward_kernel": "norms",
        "rope_kernel": "RoPE",
        "swiglu_backward_kernel": "SwiGLU",
        "cross_entropy_kernel": "loss",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>": "optimizer and clipping",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
        "Memcpy DtoD (Device -> Device)": "copies, casts, fills",
        "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>": "copies, casts, fills",
        "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>": bench.REST,
    }
    assert {name: bench.part_of(name) for name in names} == names
    added = (
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std::array>(int)"
    )
    assert bench.short_name(added) == "vectorized_elementwise_kernel/CUDAFunctor_add"
    assert bench.short_name("triton_poi_fused_add_0") == "triton_poi_fused_add_0"


def test_the_floors_of_a_step_are_what_the_model_needs_with_the_causal_half_of_attention():
    import bench_train_gpu as bench
    from accounting import step_flops

    job = bench.Job("8B", bench.PRESETS["llama3-8b"], 4096, 2, 3)
    floors = bench.floors(job, copy=4e12, product=7e14)
    model = step_flops(job.sizes, job.samples, job.seq).model
    core = 3 * 4 * job.samples * job.seq**2 * job.sizes.hidden * job.sizes.layers
    assert floors["matrix products"] == pytest.approx((model - core) / 7e14)
    assert floors["attention, forward"] == pytest.approx(core / 6 / 7e14)
    assert floors["attention, backward"] == pytest.approx(core * 2.5 / 6 / 7e14), "3.5 forwards of it, not 3"
    assert bench.masked_flops(job) == core / 2, "what the second MFU leaves out"
    assert all(seconds > 0 for seconds in floors.values())


def test_models_shrink_to_the_memory_that_is_free():
    import bench_train_gpu as bench

    wide, deep = bench.jobs(False, 139 * 2**30)
    assert wide.sizes.layers == 24 and wide.micro_batch >= 4
    assert 8 < deep.sizes.layers < 32 and f"{deep.sizes.layers} of 32 layers" in deep.name
    less_wide, less_deep = bench.jobs(False, 60 * 2**30)
    assert less_wide.micro_batch < wide.micro_batch and less_wide.samples == 8
    assert less_deep.sizes.layers < deep.sizes.layers
    assert max(job.predicted_bytes() for job in (less_wide, less_deep)) < 60 * 2**30
    assert bench.jobs(False, 4 * 2**30) == []


def wrong_and_right_ways():
    import bench_train_gpu as bench

    right = bench.start

    def start(way, job, device):
        if way.kernels == "none":
            raise RuntimeError("no kernel image is available for this device")
        me = right(dataclasses.replace(way, compiled=False), job, device)  # compiling takes half a minute
        if way.compiled:  # stands for a kernel that is wrong by a per cent
            with torch.no_grad():
                me.model.lm_head.weight.mul_(1.1)
        return me

    bench.start = start
    try:
        ways = (bench.Way("torch", "bf16"), bench.Way("torch", "bf16", compiled=True), bench.Way("none", "bf16"))
        return [bench.wrong_with(way, torch.device("cpu"), True) for way in ways]
    finally:
        bench.start = right


def test_a_way_to_compute_that_is_wrong_is_not_timed():
    [(good, bad, missing)] = run_ranks(1, wrong_and_right_ways, timeout=120)
    assert good == ""
    assert re.match(r"gradient of \S+ is off by", bad)
    assert missing == "RuntimeError: no kernel image is available for this device"


@pytest.mark.prove
def test_a_way_that_breaks_the_process_or_finds_no_memory_takes_no_other_ways_row_with_it(tmp_path):
    """A kernel that reads where it must not leaves a CUDA process useless: what was measured before it is written."""
    program = f"""
import sys
sys.path[:0] = {[str(ROOT / "11_5d_trainer/bench"), str(ROOT / "tests")]!r}
from pathlib import Path
import torch, bench_train_gpu as bench

right, measure = bench.start, bench.measure
bench.DRY_WAYS = tuple(bench.Way(*how) for how in (("torch", "bf16"), ("torch", "bf16-master"), ("broken", "bf16")))

def start(way, job, device):
    if way.kernels == "broken":
        sys.exit("an illegal memory access was encountered")
    return right(way, job, device)

def full(way, *rest):
    if way.precision == "bf16":
        raise torch.OutOfMemoryError("CUDA out of memory")
    return measure(way, *rest)

bench.start, bench.measure = start, full
bench.run(True, Path({str(tmp_path)!r}), 100.0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=NO_GPU)
    assert done.returncode == 1 and "an illegal memory access" in done.stderr, done.stderr[-2000:]
    [rows], [parts] = (measured(f"11_train_{name}", tmp_path) for name in ("gpu", "parts"))
    assert [row[1] for row in rows["rows"]] == ["torch; bf16-master"] and "OutOfMemoryError" in rows["notes"]
    assert {row[1] for row in parts["rows"]} == {"torch; bf16-master"}, "the first that runs is the one looked into"
