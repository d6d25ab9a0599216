"""The command for borrowed GPUs, where there is none: that it runs, keeps what it has, and says what went wrong."""

import contextlib
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
from harness.goals import GOALS, judge, number
from harness.layout import find
from harness.ranks import run_ranks
from harness.report import ROOT, Ratio, commit_of, contents_of, fill, take, write_result

sys.path[:0] = [str(ROOT / "11_5d_trainer"), str(ROOT / "11_5d_trainer/bench"), str(ROOT / "01_single_gpu/in_depth")]
sys.path.append(str(ROOT / "08_fpdt/in_depth"))
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def a_clean_tree(monkeypatch):
    monkeypatch.setattr(gpu, "commit_of", lambda root: HERE)


# ---------------------------------------------------------------------------------------------------- the whole of it


@pytest.fixture(scope="module")
def dry_folder(tmp_path_factory):
    """Where the dry runs of this module write; each section adds to one file, as the calls on a GPU do."""
    return tmp_path_factory.mktemp("dry")


def dry_run(folder, *what):
    """What such a call prints and writes, on the stand-in GPU."""
    command = [sys.executable, str(ROOT / "tests/gpu.py"), "--dry", *what, "--out", str(folder)]
    done = subprocess.run(
        [*command, "--budget", "400"], capture_output=True, text=True, timeout=450, cwd=folder, env=NO_GPU
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout, json.loads((folder / "dry.json").read_text())


IN_NO_CALL = [s.name for s in gpu.SECTIONS if not any(s.name in names for names, _ in gpu.CALLS.values())]
DRY = [["--section", "ceilings"], *([f"--{call}"] for call in gpu.CALLS)]
DRY += [["--section", name] for name in IN_NO_CALL if name != "chapters"]  # whose scripts run one by one, below


@pytest.mark.parametrize(
    "what",  # the cheapest line in `make test`, all of them in `make prove`
    [pytest.param(what, marks=[pytest.mark.prove] * (what[-1] != "ceilings"), id=what[-1].strip("-")) for what in DRY],
)
def test_a_call_passes_on_the_stand_in_gpu_and_leaves_what_goals_and_readmes_look_for(dry_folder, what):
    before = {file: file.stat().st_mtime_ns for file in (ROOT / "results").iterdir()}
    said, record = dry_run(dry_folder, *what)
    assert said.strip().splitlines()[-1].startswith("PASS (dry")
    name = what[-1].strip("-")
    asked = gpu.CALLS[name][0] if name in gpu.CALLS else [name]
    steps = []
    for entry in record["sections"]:
        if entry["name"] in asked:
            quiet = entry["name"] == "failed"  # nothing has
            assert all(step["status"] == ("not run" if quiet else "passed") for step in entry["steps"]), entry
            benches = [] if quiet else gpu.gpu_benchmarks().get(entry["name"], [])
            assert {gpu.relative(s) for s in benches} <= {s["step"] for s in entry["steps"] if s["results"]}
            steps += entry["steps"]
    assert steps and any(step["clocks"] == "1700 MHz, 650 W" for step in steps)
    with tarfile.open(dry_folder / f"{'sections' if name not in gpu.CALLS else name}.tar.gz") as archive:
        assert {"dry.json", "clocks.csv"} < set(archive.getnames())
    written = {result: record["results"][result] for step in steps for result in step["results"]}
    if name == "shared":  # a GPU is mostly lent alone: what its ranks can do over gloo is all that shows a layout there
        errors = dict(written["11_layouts_shared_gpu"]["rows"])
        assert [layout for layout, error in errors.items() if not error[0].isdigit()] == ["pipeline 1F1B"], errors
    readmes = "".join(file.read_text() for file in [ROOT / "README.md", *ROOT.glob("*/README.md")])
    shown = set(re.findall(r"<!-- gpu results: ([\w.-]+) -->", readmes))
    assert set(written) <= shown, f"no README shows {sorted(set(written) - shown)}"
    for result, about in written.items():
        assert about["verified"] is True, result
        assert about["environment"]["device"] == record["device"] == "stand-in for an NVIDIA H200", result
        assert {"torch", "python", "commit", "date"} <= set(about["environment"]), result
        for goal in GOALS:
            assert goal.result != result or goal.columns <= set(about["columns"]), f"{goal.what}: {goal.columns}"
        if any(word in " ".join(about["columns"]) for word in ("ms", "TFLOP", "/s", "seconds")):
            foreseen = [column for column in about["columns"] if "predicted" in column or column == "floor, ms"]
            assert foreseen, f"{result} says nothing of what was expected: {about['columns']}"
    after = {file: file.stat().st_mtime_ns for file in (ROOT / "results").iterdir()}
    changed = [file.name for file in before.keys() | after.keys() if before.get(file) != after.get(file)]
    assert not [file for file in changed if file.split(".")[0] in written], "a dry run wrote into results/"


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
    source = "".join(script.read_text() for benches in gpu.gpu_benchmarks().values() for script in benches)
    source += (ROOT / "08_fpdt/in_depth/_fpdt_gpu.py").read_text()
    for goal in GOALS:
        assert f'"{goal.result}"' in source, goal.what


@pytest.mark.prove
@pytest.mark.parametrize("script", [gpu.relative(script) for script in gpu.chapter_scripts()])
def test_a_script_of_a_chapter_passes_on_the_stand_in_gpu(tmp_path, script):
    """What `--section chapters` runs on a GPU, which would refuse more than a CPU does."""
    environment = gpu.surroundings(True, tmp_path, True) | {"FAKE_GPUS": "1"}
    command = [sys.executable, str(ROOT / script)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stdout.strip().splitlines()[-1] == "PASS", (
        done.stdout[-1500:] + done.stderr[-1500:]
    )


def test_a_dry_run_cannot_be_taken_for_results(tmp_path):
    go(tmp_path, section("one", writes("first")))
    file = tmp_path / "dry.json"
    with pytest.raises(ValueError, match="a dry run measures nothing"):
        take(file, tmp_path / "results")
    assert not (tmp_path / "results").exists()


# ------------------------------------------------------------------------------------------------ what may go wrong

WRITE = """
import json, pathlib, sys
environment = {"device": "CPU", "torch": "t", "python": "p", "commit": "c"}
about = {"title": "T", "columns": ["x"], "rows": [[1]], "notes": "", "verified": VERIFIED, "environment": environment}
pathlib.Path(sys.argv[1], "NAME.cpu.json").write_text(json.dumps({"name": "NAME"} | about))
THEN
"""


def python(code, *arguments, **options):
    return Step(options.pop("name", code[:30]), (sys.executable, "-c", code, *arguments), **options)


def writes(name, then="", verified=True):
    code = WRITE.replace("NAME", name).replace("VERIFIED", str(verified)).replace("THEN", then)
    return python(code, "{out}", name=name, measures=True)


def section(name, *steps, expected=60.0, least=0.0):
    return Section(name, f"about {name}", lambda machine: list(steps), expected, least)


def dry_machine(dry=True, environment=None):
    return gpu.Machine(True, {"device": "CPU, 2 cores", "torch": "t", "python": "p", "commit": "c"})


def go(tmp_path, *sections, options=()):
    """A run of these sections. The machine is made up: to look at it takes as long as PyTorch takes to be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "probe", dry_machine)
        code = gpu.main(["--dry", "--out", str(tmp_path), *options], sections)
    record = json.loads((tmp_path / "dry.json").read_text())
    return code, {entry["name"]: entry["steps"] for entry in record["sections"]}, record["results"]


def test_a_section_that_fails_is_reported_and_the_rest_still_runs(tmp_path, capsys):
    sections = [
        section("first", python("import sys; print('the reason'); sys.exit(3)", name="dies")),
        section(
            "second",
            python("print('PASS')", name="says so", ends_with="PASS"),
            python("import sys; print('PASS'); print('a warning', file=sys.stderr)", name="warns", ends_with="PASS"),
        ),
        section(
            "third",
            python("print('FAIL: off by 2')", name="denies", ends_with="PASS"),
            python("pass", name="forgets", measures=True),
            writes("half", "raise MemoryError('CUDA out of memory')"),
            writes("doubtful", verified=False),
            python("pass", name="wants", needs=("no-such-compiler",)),
        ),
        section("fourth", writes("good")),
    ]
    code, steps, results = go(tmp_path, *sections)
    assert code == 1
    said = capsys.readouterr().out
    assert said.strip().splitlines()[-1] == "FAIL"
    found = {step["step"]: step for entry in steps.values() for step in entry}
    assert {name: step["status"] for name, step in found.items()} == {
        "dies": "failed",
        "says so": "passed",
        "warns": "passed",
        "denies": "failed",
        "forgets": "failed",
        "half": "failed",
        "doubtful": "failed",
        "wants": "not run",
        "good": "passed",
    }
    assert "exit code 3: the reason" in found["dies"]["reason"] and "the reason" in found["dies"]["output"]
    assert "off by 2" in found["denies"]["reason"]
    assert found["forgets"]["reason"] == "it wrote no result"
    assert "out of memory" in found["half"]["reason"]
    assert "not verified: doubtful" in found["doubtful"]["reason"]
    assert "no-such-compiler is not here" in found["wants"]["reason"]
    assert {"half", "doubtful", "good"} <= set(results), "what was written before a failure is kept"
    table = said[said.rindex("section ") :]
    assert re.search(r"first +0 of 1 .*dies: failed, exit code 3", table)
    assert re.search(r"fourth +1 of 1", table)


HERE, BEFORE = "0123456789", "abcdefabcd"


def machine(**about):
    environment = {"device": "NVIDIA H200", "torch": "2.11.0", "python": "3.12", "commit": HERE, "date": "d"}
    environment |= {"driver": "580", "cuda": "13.0", "triton": "3.6.0"}
    return gpu.Machine(**(dict(dry=False, environment=environment, gpus=1, total_gib=139.0, free_gib=130.0) | about))


def start(tmp_path, budget=60.0, **about):
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    return gpu.Run(machine(**about), out, budget, gpu.surroundings(True, work, True), work)


@pytest.mark.prove
def test_a_step_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    note = tmp_path / "pid"
    parent = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(note)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    run = start(tmp_path, budget=8.0)
    steps = python(parent, name="hangs"), python("pass", name="behind it")
    hangs, behind = run.section(section("slow", *steps))
    assert (hangs.status, behind.status) == ("too slow", "left out")
    assert hangs.reason.startswith("ended after") and behind.reason.endswith("it needs about 3; --section slow")
    assert gpu.summary(run, ["slow"]) == 1
    grandchild, until = Path("/proc", note.read_text()), time.monotonic() + 20
    while grandchild.exists() and "Z" not in (grandchild / "stat").read_text().split()[2] and time.monotonic() < until:
        time.sleep(0.2)
    assert not grandchild.exists() or (grandchild / "stat").read_text().split()[2] == "Z"


def test_what_does_not_fit_into_the_time_is_left_out_by_name(tmp_path):
    run = start(tmp_path, budget=30.0)
    [outcome] = run.section(section("long", python("pass"), least=40.0))
    assert outcome.status == "left out"
    assert re.fullmatch(r"(29|30) s are left, and it needs about 40; --section long", outcome.reason)
    [outcome] = run.section(section("short", python("pass"), least=2.0))
    assert outcome.status == "passed"
    assert gpu.summary(run, ["long", "short"]) == 0, "to have no time is no error"


def test_to_look_at_the_machine_takes_time_of_the_call(tmp_path, monkeypatch):
    """On a machine that has just been started, PyTorch's first import may take a minute; the call ends all the same."""

    def slow(dry, environment):
        time.sleep(1.5)
        return machine()

    monkeypatch.setattr(gpu, "probe", slow)
    options = ["--section", "all", "--out", str(tmp_path), "--budget", "4"]
    assert gpu.main(options, [section("one", python("pass"), least=3.0)]) == 0
    [[step]] = [entry["steps"] for entry in json.loads((tmp_path / "nvidia-h200.json").read_text())["sections"]]
    assert step["status"] == "left out" and step["reason"].startswith("2 s are left"), "the probe had the others"


def test_too_little_memory_is_named_with_what_is_needed(tmp_path):
    run = start(tmp_path, free_gib=10.0)
    [outcome] = run.section(section("large", python("pass", gib=30.0)))
    assert outcome.status == "not run"
    assert outcome.reason == "needs 30 GiB of GPU memory, and 10 of 139 GiB were free"


def test_a_gpu_that_is_not_a_hopper_runs_what_is_not_for_one(tmp_path):
    environment = machine().environment | {"device": "NVIDIA A100"}
    run = start(tmp_path, hopper=False, environment=environment)
    wgmma, other = run.section(section("two", python("pass", needs=("Hopper",)), python("pass")))
    assert (wgmma.status, other.status) == ("not run", "passed")
    assert wgmma.reason == "it is for a Hopper GPU, and this is NVIDIA A100"


def test_commands_of_a_step_follow_each_other_until_one_fails(tmp_path):
    note = tmp_path / "note"
    first, second, third = (
        (sys.executable, "-c", f"open({str(note)!r}, 'a').write({word!r}); print({word!r}); exit({code})")
        for word, code in (("one ", 0), ("two ", 3), ("three", 0))
    )
    run = start(tmp_path)
    [outcome] = run.section(section("a", gpu.Step("chain", first, then=(second, third))))
    assert note.read_text() == "one two " and outcome.reason.startswith("exit code 3: two")
    run.pack("first")
    with tarfile.open(run.out / "first.tar.gz") as archive:
        assert archive.extractfile("chain.log").read().split() == [b"one", b"two"]


def test_the_second_call_runs_once_more_the_scripts_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)  # so that nothing is taken from results/
    run = start(tmp_path)
    assert gpu.failed_before(run) == [] and run.failed_before() == {}
    monkeypatch.undo()
    steps = [
        {
            "step": "09_kernels/in_depth/bench_fused.py",
            "status": "failed",
            "reason": "exit code 1: CUDA error: illegal",
        },
        {"step": "03_zero/zero.py", "status": "too slow", "reason": "ended after 50 s"},
        {"step": "09_kernels/in_depth/bench_fp8.py", "status": "too slow", "reason": "ended after 30 s"},
        {"step": "tests/harness/ceilings.py", "status": "too slow", "reason": "ended after 20 s"},
        {"step": "11_5d_trainer/train.py", "status": "failed", "reason": "exit code 1"},
        {"step": "x", "status": "passed", "reason": ""},
    ]
    run.record["sections"] = [{"name": "kernels", "steps": steps}, {"name": "correct", "steps": steps[:1]}]
    run.save()
    broken, core, train = gpu.failed_before(start(tmp_path))
    assert broken.command[0] == "compute-sanitizer" and broken.command[-1].endswith("/fused.py")
    assert core.name == "03_zero/zero.py" and core.ends_with == "PASS"
    assert train.name == "11_5d_trainer/train.py" and len(train.then) == 2


def test_of_a_section_some_steps_can_be_asked_for_by_name(tmp_path):
    steps = [gpu.Step(name, (sys.executable, "-c", "print('PASS')"), ends_with="PASS") for name in ("a/one.py", "two")]
    run = start(tmp_path)
    assert [outcome.step for outcome in run.section(section("s", *steps), only=["one"])] == ["a/one.py"]
    args = gpu.parse(["--dry", "--section", "fp8:25,train", "--step", "one, two"], gpu.SECTIONS)
    assert (args.step, args.section, args.seconds) == (["one", "two"], ["fp8", "train"], {"fp8": 25.0})


def on(patch, tmp_path, machine_there, *sections):
    patch.setattr(gpu, "probe", lambda dry, environment: machine_there)
    return gpu.main(["--section", "all", "--out", str(tmp_path)], sections)


def test_a_gpu_that_another_process_fills_ends_in_one_line_and_keeps_the_record(tmp_path, monkeypatch, capsys):
    steps = section("large", python("pass", name="large", gib=30.0)), section("small", python("pass", gib=4.0))
    assert on(monkeypatch, tmp_path, machine(free_gib=2.0), *steps) == 2
    said = capsys.readouterr()
    assert said.err == "gpu.py: nothing could be run: large: needs 30 GiB of GPU memory, and 2 of 139 GiB were free\n"
    assert "another process holds memory of this GPU" in said.out
    assert len(json.loads((tmp_path / "nvidia-h200.json").read_text())["sections"]) == 2


def test_a_gpu_without_a_byte_left_ends_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PROBE", "raise RuntimeError('CUDA error: out of memory')")
    assert gpu.main(["--section", "ceilings", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        "gpu.py: PyTorch cannot use this device (RuntimeError: CUDA error: out of memory); --dry tries"
    )


@pytest.mark.prove
def test_a_triton_that_cannot_interpret_with_the_numpy_that_is_here_ends_a_dry_run_in_one_line(
    tmp_path, monkeypatch, capsys
):
    pair = "import torch, numpy, triton; triton.__version__, numpy.__version__ = '3.6.0', '2.5.2'\n"
    monkeypatch.setattr(gpu, "INTERPRETS", pair + gpu.INTERPRETS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main(["--dry", "--section", "flash", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.out == "" and not list(tmp_path.iterdir()), "nothing ran"
    why = 'do not go together; with this Triton use an older NumPy: pip install "numpy<2.4"'
    assert said.err.startswith("gpu.py: a dry run cannot start here (ImportError: Triton 3.6.0's interpreter and ")
    assert f"NumPy 2.5.2 {why})" in said.err
    assert gpu.main(["--section", "flash", "--out", str(tmp_path)]) == 2
    assert "PyTorch finds no CUDA GPU here" in capsys.readouterr().err, "on a GPU nothing is interpreted"


@pytest.mark.prove
def test_the_interpreter_is_refused_with_the_versions_that_fail_and_with_no_others():
    program = """
import importlib, numpy, triton, _interpreter
for pair in (("3.6.0", "2.4.0"), ("3.6.0", "2.3.5"), ("3.7.1", "2.5.2"), ("4.0.0", "3.0.1"), ("3.6.1+git", "2.10.0")):
    triton.__version__, numpy.__version__ = pair
    try:
        importlib.reload(_interpreter)
        print(*pair, "go together")
    except ImportError:
        print(*pair, "do not")
"""
    environment = NO_GPU | {"PYTHONPATH": str(find("_interpreter.py").parent), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "3.6.0 2.4.0 do not",
        "3.6.0 2.3.5 go together",
        "3.7.1 2.5.2 go together",
        "4.0.0 3.0.1 go together",
        "3.6.1+git 2.10.0 do not",
    ], done.stderr[-1500:]


def test_without_nvcc_only_what_is_written_in_cuda_is_not_run(tmp_path):
    run = start(tmp_path)
    ladder, other = run.section(section("a", python("pass", needs=("nvcc",)), python("pass")))
    assert (ladder.status, ladder.reason, other.status) == ("not run", "nvcc is not here", "passed")


def test_without_a_section_both_calls_are_printed_with_their_seconds_and_nothing_runs(capsys):
    assert gpu.main([]) == 0
    said = capsys.readouterr().out
    for call, seconds in (("first", 540), ("second", 180)):
        line = f"python3 tests/gpu.py --{call} --commit {HERE} --contents {contents_of(ROOT)} --out DIR   # {seconds} s"
        assert line in said and len(line) < 2000
    lines = re.findall(r"^ +(\d+) s  (\w+) ", said, re.MULTILINE)
    assert {name for _, name in lines} == {section.name for section in gpu.SECTIONS}
    known = {stem for stem, (name, *_) in gpu.BENCHMARKS.items()}
    assert known == {script.stem for benches in gpu.gpu_benchmarks().values() for script in benches}


def test_the_lines_of_each_call_add_up_to_its_seconds_and_both_calls_fit_into_a_quarter_of_an_hour(tmp_path):
    seconds = {section.name: section.seconds for section in gpu.SECTIONS}
    first, second = (sum(seconds[name] for name in names) for names, _ in gpu.CALLS.values())
    assert first == gpu.CALLS["first"][1] and 90 + first + 30 + gpu.CALLS["second"][1] <= 840
    assert second == gpu.CALLS["second"][1]
    run = start(tmp_path)
    for section in gpu.SECTIONS:
        steps = [step.seconds for step in section.steps(run)]
        assert section.together or sum(steps) <= section.seconds, f"{section.name} has less time than its steps"


def test_the_first_call_runs_every_core_file_and_the_trainer(tmp_path):
    names = {step.name for step in gpu.first_scripts(start(tmp_path))}
    core = "single_gpu data_parallel zero tensor_parallel ring_attention ulysses pipeline_parallel expert_parallel fpdt"
    core += " flash_attention mixed_precision five_d train"
    assert {gpu.relative(find(f"{name}.py")) for name in core.split()} | {"09_kernels/matmul.cu"} <= names


@pytest.mark.prove
def test_a_section_leaves_the_time_that_those_behind_it_expect(tmp_path):
    run = start(tmp_path, budget=12.0)
    [first] = run.section(section("first", python("import time; time.sleep(60)"), expected=5.0), behind=8.0)
    assert first.status == "too slow" and 4.0 <= first.seconds < 9.0


def test_one_gpu_says_that_the_section_for_several_is_not_run(tmp_path):
    [several] = [section for section in gpu.SECTIONS if section.name == "several"]
    [outcome] = start(tmp_path).section(several)
    assert (outcome.status, outcome.reason) == ("not run", "1 GPU; nothing to do")
    names = [step.name for step in several.steps(start(tmp_path, gpus=8))]
    assert names[0] == "tests/gpu_layouts.py" and any("pipeline_executor.py" in name for name in names)


def test_nvcc_pytest_and_a_hopper_gpu_are_asked_of_the_steps_that_need_them(tmp_path):
    run = start(tmp_path)
    wants = {step.name: step.needs for s in gpu.SECTIONS for step in s.steps(run) if step.needs}
    assert wants["09_kernels/in_depth/bench_matmul_ladder.py"] == wants["09_kernels/in_depth/bench_elu.py"] == ("nvcc",)
    assert wants["09_kernels/in_depth/bench_flash_attention_cuda.py"] == ("nvcc", "Hopper")
    assert wants["09_kernels/in_depth/test_fused.py"] == ("pytest",)
    assert not [name for name in wants if "test_matmul" in name], "tests of an emulated GPU need none"
    assert not any(step.needs for step in gpu.chapters(run))


def test_sections_run_in_the_order_in_which_they_were_asked(tmp_path):
    go(tmp_path, section("one", python("pass")), section("two", python("pass")), options=["--section", "two,one"])
    record = json.loads((tmp_path / "dry.json").read_text())
    assert [entry["name"] for entry in record["sections"]] == ["two", "one"]


def started(tmp_path, *sections):
    """A run of these sections (as source text) in a process of its own, on a machine that is made up."""
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}]; import gpu, test_gpu as t; gpu.probe = t.dry_machine;"
        f"sys.exit(gpu.main(['--dry', '--out', {str(tmp_path)!r}], [{', '.join(sections)}]))"
    )
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.Popen([sys.executable, "-c", program], text=True, env=NO_GPU, **pipes)


@pytest.mark.prove
def test_a_stopped_run_keeps_what_it_measured(tmp_path):
    sleeps = "t.section('b', t.python('import time; time.sleep(600)', name='sleeps'))"
    child = started(tmp_path, "t.section('a', t.writes('kept'))", sleeps)
    for line in child.stdout:
        if line.startswith("b: "):
            break
    time.sleep(1.0)
    child.send_signal(signal.SIGTERM)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 130 and "what was measured is kept" in said
    record = json.loads((tmp_path / "dry.json").read_text())
    assert "kept" in record["results"]
    assert record["sections"][1]["steps"][0]["reason"] == "stopped"


@pytest.mark.always("the step")
@pytest.mark.parametrize("who", ["the step", "the whole run"])
@pytest.mark.prove
def test_a_section_that_is_killed_leaves_every_row_it_had_measured(tmp_path, who):
    """A table that grows; SIGKILL while its third row is computed, to the benchmark or to all of it."""
    rows = f"""
import pathlib, sys, time
sys.path.insert(0, {str(ROOT / "tests")!r})
from harness.ceilings import Table
table = Table("grows", "T", ["row"], folder=pathlib.Path(sys.argv[1]))
for row in range(2):
    table.add(row)
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(__import__("os").getpid()))
time.sleep(600)
"""
    (tmp_path / "grows.py").write_text(rows)
    step = f"t.Step('grows', (sys.executable, {str(tmp_path / 'grows.py')!r}, '{{out}}'), measures=True)"
    child = started(tmp_path, f"t.section('a', {step})", "t.section('b', t.writes('after'))")
    file, until = tmp_path / "dry.json", time.monotonic() + 60
    try:
        while time.monotonic() < until:
            if file.exists() and len(json.loads(file.read_text())["results"].get("grows", {"rows": []})["rows"]) == 2:
                break
            time.sleep(0.2)
        if who == "the whole run":
            child.kill()
            child.wait(timeout=20)
            mine, until = Path("/proc", (tmp_path / "pid").read_text()), time.monotonic() + 20
            while mine.exists() and "Z" not in (mine / "stat").read_text().split()[2] and time.monotonic() < until:
                time.sleep(0.1)
            assert not mine.exists() or "Z" in (mine / "stat").read_text().split()[2], "it would hold the GPU"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    child.communicate(timeout=60)
    record = json.loads(file.read_text())
    assert record["results"]["grows"]["rows"] == [[0], [1]]
    if who == "the whole run":
        [section] = record["sections"]
        assert [step["status"] for step in section["steps"]] == ["cut off"], "the file names what it does not have"
    if who == "the step":
        assert child.returncode == 1 and "after" in record["results"], "the next section runs all the same"
        assert record["sections"][0]["steps"][0]["status"] == "failed"


def test_sections_that_ran_before_stay_in_the_file(tmp_path):
    go(tmp_path, section("one", writes("first")))
    code, steps, results = go(tmp_path, section("two", writes("second")))
    assert code == 0 and set(steps) == {"one", "two"} and {"first", "second"} <= set(results)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--section", "kernel"],
            "--section kernel is unknown; use all, scripts, ceilings, matmul, flash, train, kernels, fp8, ",
        ),
        (["--first", "--second"], "argument --second: not allowed with argument --first"),
        (["--commit", "HEAD"], "--commit HEAD must be 10 to 40 digits of what `git rev-parse HEAD` says, or none"),
        (["--budget", "0"], "--budget 0 must be a positive number of seconds"),
        (["--budget", "nan"], "--budget nan must be a positive number of seconds"),
        (["--dry", "--out", "results"], "a dry run measures nothing, and must not write there; name another folder"),
        (["--dry", "--out", "/dev/null/x"], "--out /dev/null/x cannot be written to"),
        (["--fast"], "unrecognized arguments: --fast; --help lists the options"),
        (["--section", "all"], "PyTorch finds no CUDA GPU here; --dry tries the whole program on the CPU"),
    ],
)
def test_bad_input_ends_in_one_line(options, line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    try:
        code = gpu.main(options)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr().err
    assert code == 2 and len(said.splitlines()) == 1
    assert said.startswith("gpu.py: ") and line in said


def test_without_tqdm_the_scripts_get_a_stand_in_with_the_same_calls(tmp_path):
    environment = gpu.surroundings(True, tmp_path, have_tqdm=False)
    program = """
from tqdm import tqdm
assert "Stands in" in __import__("tqdm").__doc__
for i in (bar := tqdm(range(3), desc="train", leave=False)):
    bar.set_postfix_str("loss 1", refresh=False)
with tqdm(total=3, unit=" pairs") as bar:
    bar.update(1)
tqdm.write("PASS")
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "PASS\n", done.stderr


def test_nothing_is_written_beside_the_sources(tmp_path):
    environment = gpu.surroundings(False, tmp_path, have_tqdm=True)
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert not Path(environment["TRITON_CACHE_DIR"]).is_relative_to(ROOT)
    assert "RANK" not in gpu.surroundings(False, tmp_path, True)


@pytest.mark.prove
def test_on_a_gpu_a_call_finds_a_cache_that_was_flushed_by_reading_and_is_launched_while_the_device_sleeps(tmp_path):
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
    environment = gpu.surroundings(True, tmp_path, True)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.prove
def test_an_image_that_allows_tf32_does_not_allow_it_here(tmp_path, monkeypatch):
    """Neither in what gpu.py starts, nor where fp32 is measured: there the result has to have the bits of fp32."""
    for name in gpu.TF32:
        monkeypatch.setenv(name, "1")
    assert not gpu.surroundings(False, tmp_path, True).keys() & set(gpu.TF32)
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
    environment = gpu.surroundings(True, tmp_path, True) | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1 and done.stderr.startswith("ceilings.py: torch.float32 matrix product is off by "), (
        done.stderr[-1500:]
    )


# -------------------------------------------------------------------------------------------- from a run to the READMEs


RINGS = ("x", Ratio(2.0, 1.5, 2.5))


def a_gpu_run(tmp_path, name="09_x_gpu", columns=("a", "b"), row=RINGS, commit=HERE):
    """The file of a run on some GPU, as it would come back from there: a section and its result."""
    tmp_path.mkdir(exist_ok=True)
    run = start(tmp_path, environment=machine().environment | {"commit": commit})
    run.section(section(f"makes {name}", python("pass", name=name)))
    record = json.loads(write_result(name, "Rings", columns, [row], folder=tmp_path).read_text())
    run.record["results"][name] = record | {"environment": run.machine.environment}
    assert gpu.summary(run, []) == 0
    return run.path


def test_a_run_on_a_gpu_fills_the_tables_with_device_driver_and_versions(tmp_path):
    text = "<!-- gpu results: 09_x_gpu -->\n<!-- end results -->"
    results = tmp_path / "results"
    results.mkdir()
    write_result("09_x_gpu", "Rings", ["a", "b"], [["x", 1]], folder=results)  # of a CPU
    waiting = fill(text, results)
    assert waiting == text, "a CPU's numbers do not stand in for a GPU's"
    assert "No GPU has measured anything yet" in fill(text.replace("09_x_gpu", "gpu_run"), results)
    file = a_gpu_run(tmp_path)
    assert file.name == "nvidia-h200.json"
    assert set(take(file, results)) == {"09_x_gpu", "gpu_run", "gpu_goals"}
    filled = fill(text, results)
    assert "| x | 2.00 (1.50 to 2.50) |" in filled
    assert (
        "NVIDIA H200; torch 2.11.0, Python 3.12, commit 0123456789; driver 580, CUDA 13.0, Triton 3.6.0; d." in filled
    )
    assert fill(filled, results) == filled
    assert "| 11 | MFU of a training step in bf16 | at least 0.6 | - | not measured | - |" in fill(
        "<!-- gpu results: gpu_goals -->\n<!-- end results -->", results
    )


def test_calls_that_each_brought_a_file_are_taken_one_after_the_other(tmp_path):
    """A borrowed machine may be empty again at every call; the goals are judged on all that was taken."""
    results = tmp_path / "results"
    take(
        a_gpu_run(tmp_path / "first", "11_train_gpu", ["kernels; precision", "MFU"], ["bf16", "58.1%"], commit=BEFORE),
        results,
    )
    killed = a_gpu_run(tmp_path / "second")
    record = json.loads(killed.read_text())
    record["results"] = {"09_x_gpu": record["results"]["09_x_gpu"]}  # it did not come to its summary
    killed.write_text(json.dumps(record))
    assert set(take(killed, results)) == {"11_train_gpu", "09_x_gpu", "gpu_run", "gpu_goals"}
    ran, goals, whole = (
        json.loads((results / f"{name}nvidia-h200.json").read_text()) for name in ("gpu_run.", "gpu_goals.", "")
    )
    assert [row[:2] for row in ran["rows"]] == [
        [f"makes 11_train_gpu (commit {BEFORE})", "1 of 1"],
        ["makes 09_x_gpu", "1 of 1"],
    ]
    assert "58.1" in str(goals["rows"]) or "0.581" in str(goals["rows"])
    assert [s["name"] for s in whole["sections"]] == ["makes 11_train_gpu", "makes 09_x_gpu"]
    assert take(results / "nvidia-h200.json", results), "what lies in results/ already may be taken again"


@pytest.mark.parametrize("commit", ["unknown (no git checkout)", f"{HERE}-dirty"])
def test_what_no_commit_names_is_not_taken(tmp_path, commit):
    with pytest.raises(ValueError, match="no table can say which code was measured"):
        take(a_gpu_run(tmp_path, commit=commit), tmp_path / "results")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("commit", "line"),
    [
        ("unknown (no git checkout)", "there is no git to ask for the commit: name it with --commit"),
        (
            f"{HERE}-dirty",
            "this tree has changes that are not committed: commit them, take --contents from `make gpu`, or try",
        ),
    ],
)
def test_the_time_of_a_gpu_is_not_spent_on_what_no_commit_names(tmp_path, commit, line, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "commit_of", lambda root: commit)
    monkeypatch.setattr(gpu, "probe", lambda dry, environment: pytest.fail("asked before the GPU is looked at"))
    assert gpu.main(["--section", "all", "--out", str(tmp_path)], [section("one", python("pass"))]) == 2
    assert line in capsys.readouterr().err and not list(tmp_path.iterdir())
    monkeypatch.setattr(gpu, "probe", lambda dry, environment: machine())
    trial = ["--section", "all", "--commit", "none"]
    assert gpu.main([*trial, "--out", str(tmp_path)], [section("one", python("pass"))]) == 0
    assert gpu.main(trial, [section("one", python("pass"))]) == 2, "into results/ not even then"


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


@pytest.mark.prove
def test_only_the_record_of_a_run_can_be_taken(tmp_path):
    file = write_result("09_z", "Rings", ["a"], [["x"]], folder=tmp_path)
    with pytest.raises(ValueError, match=r"is not the record of a run of tests/gpu\.py"):
        take(file, tmp_path / "results")
    script = Path(__file__).parent / "harness" / "report.py"  # as `make results FROM=FILE` starts it
    done = subprocess.run([sys.executable, "-I", script, "--take", file], capture_output=True, text=True)
    code, lines = done.returncode, done.stderr.splitlines()
    assert (code, len(lines), done.stdout) == (2, 1, "")
    assert lines == [f"report.py: --take {file}: this is not the record of a run of tests/gpu.py"]


def test_a_goal_is_reached_missed_or_not_measured_and_a_missed_one_names_where_the_time_went():
    def record(columns, *rows):
        return {"columns": columns, "rows": [list(row) for row in rows]}

    results = {
        "09_flash_speed": record(
            ["pass", "shape", "times flash", "times cuDNN"],
            ["forward", "8192 tokens, D 128, causal", "1.25", "n/a"],
            ["forward", "8192 tokens, D 128, full", "0.50", "0.95"],
            ["backward", "8192 tokens, D 128, causal", "1.05", "0.95"],
        ),
        "09_matmul_gpu": record(
            ["rung", "precision", "shape", "of cuBLAS"],
            ["multicast", "bfloat16", "8192 x 8192 x 8192", 0.95],
            ["ping_pong", "bfloat16", "8192 x 8192 x 8192", 0.85],
            ["ping_pong", "bfloat16", "8192 x 8192 x 1024", 0.88],
            ["warp_tiles", "float32", "4096 x 4096 x 4096", 0.94],
        ),
        "09_fused_loss_gpu": record(
            ["version", "time / PyTorch", "peak / PyTorch"],
            ["PyTorch", 1.0, 1.0],
            ["fused, 1024 tokens at a time", 0.98, 0.10],
            ["fused, 8192 tokens at a time", 0.90, 0.30],
        ),
        "10_fp8_speed": record(
            ["what", "times as fast: median (quartiles)"],
            ["linear 4096 x 4096", {"ratio": {"median": float("nan"), "low": 1.0, "high": 1.0}}],
        ),
        "11_train_gpu": record(
            ["model", "kernels; precision", "MFU"],
            ["1.7B", "triton; bf16-master", "58.1%"],
            ["8B", "torch; bf16-master", "55.0%"],
            ["8B", "triton; fp8-tensor", "75.0%"],  # of the peak of bf16, which does not bind it
        ),
        "11_train_parts": record(
            ["model", "part", "ms", "floor, ms"],
            ["1.7B", "matrix products", 100.0, "95"],
            ["1.7B", "attention", 60.0, "20"],
            ["1.7B", "step", 200.0, "130"],
        ),
    }
    found = {row[1]: row for row in judge(results, "NVIDIA H200")}
    assert found["FlashAttention forward, times SDPA's flash"][3:] == ["1.25", "reached", "-"]
    assert found["FlashAttention backward, times SDPA's flash"][3:] == ["1.05", "missed", "-"]
    assert found["FlashAttention forward, times cuDNN"][3:] == ["-", "not measured", "-"]
    rungs = [
        found[f"best {what}, share of cuBLAS"][3:5] for what in ("bf16 rung at 8192 cubed", "bf16 rung with K 1024")
    ]
    assert rungs == [["0.95", "reached"], ["0.88", "missed"]], "whichever rung is the best"
    loss = found["fused output layer and loss in under 15 % of the memory, time against PyTorch"]
    assert loss[2:5] == ["at most 1", "0.98", "reached"]
    assert found["fp8 linear layer, times as fast as bf16"][4] == "missed", "NaN reaches nothing"
    mfu = found["MFU of a training step in bf16"]
    assert mfu[3:] == ["0.581", "missed", "attention, 1.7B: 40 ms above its floor"]
    assert found["tokens that FPDT fits"][2:5] == ["at least 2,000,000", "-", "not measured"]
    [fits] = [row for row in judge(results, "NVIDIA H100 80GB HBM3") if row[1] == "tokens that FPDT fits"]
    assert fits[2] == "at least 1,000,000", "which has not the memory for 2 million"
    assert (number("93%"), number("n/a"), number(1.5), number("out of memory")) == (0.93, None, 1.5, None)


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
    rows, parts = (json.loads(next(tmp_path.glob(f"11_train_{name}.*")).read_text()) for name in ("gpu", "parts"))
    assert [row[1] for row in rows["rows"]] == ["torch; bf16-master"] and "OutOfMemoryError" in rows["notes"]
    assert {row[1] for row in parts["rows"]} == {"torch; bf16-master"}, "the first that runs is the one looked into"
