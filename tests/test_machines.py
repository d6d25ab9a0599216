"""Machines that are not the one of the tests: without Triton, as macOS is."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from harness.layout import files
from harness.report import ROOT
from test_readme_commands import expanded, script_and_options, surroundings

WITHOUT_TRITON = """
import io, contextlib, json, runpy, sys
from pathlib import Path

sys.modules["triton"] = None  # every import of it fails, and importlib does not find it
import torch

root, scripts, commands = json.loads(sys.argv[1])
path = sys.path[:]

def run(script, *options):
    files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
    for name in [name for name, file in files.items() if file.startswith(root) and "site-packages" not in file]:
        del sys.modules[name]
    sys.argv, sys.path[:] = [script, *options], [str(Path(script).parent), *path]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_path(script, run_name="__main__")
            return 0, said.getvalue()
        except SystemExit as end:
            return end.code, said.getvalue()
        except BaseException as error:
            return repr(error), said.getvalue()

ends = [run(script, "--help") for script in scripts] + [run(*command) for command in commands]
print(json.dumps(ends))
"""


def test_the_notebook_starts_from_the_python_that_is_there():
    cells = json.loads((ROOT / "book/machines.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    commands = [line[1:] for cell in code for line in cell.splitlines() if line.startswith("!")]
    ran = [line for line in commands if "nvidia-smi" not in line]
    lines = [one.replace("python3 ", "python ") for line in ran for one in expanded(line)]
    asked = [found for line in lines if (found := script_and_options(line))]
    scripts = [script for script, _ in asked]
    assert scripts == ["02_data_parallel/data_parallel.py", "11_5d_trainer/train.py", "11_5d_trainer/generate.py"]
    for script, options in asked:
        known = (ROOT / script).read_text() + (ROOT / "11_5d_trainer/options.py").read_text()
        for word in (word for word in options if word.startswith("--")):
            assert word in known or word[2:].replace("-", "_") in known, f"{script} has no {word}"
    command = ["make", "-n", *shlex.split(next(line for line in ran if line.startswith("make")))[1:], "GPUS=2"]
    done = subprocess.run(command, cwd=ROOT, env=surroundings(), capture_output=True, text=True)
    assert done.returncode == 0 and "venv" not in done.stdout, done.stderr + done.stdout
    assert "python3 11_5d_trainer/launch.py --standalone --nproc_per_node 2 " in done.stdout


def test_on_macos_make_lets_ranks_meet_on_the_loopback(tmp_path):
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (tmp_path / "uname").chmod(0o755)
    for name, path in (("Darwin", f"{tmp_path}:{os.environ['PATH']}"), ("here", os.environ["PATH"])):
        environment = surroundings() | {"PATH": path}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        done = subprocess.run(["make", "-pn", "help"], cwd=ROOT, env=environment, capture_output=True, text=True)
        chosen = "GLOO_SOCKET_IFNAME = lo0" in done.stdout
        assert chosen == (name == "Darwin" or sys.platform == "darwin"), done.stderr


REHEARSED = ["--ranks", "2", "--seq-len", "64", "--global-batch", "4", "--micro-batch", "1"]


@pytest.mark.prove
def test_without_triton_every_script_helps_or_ends_in_one_line_and_a_run_is_rehearsed():
    programs = ("train.py", "launch.py", "generate.py", "hf.py", "five_d.py", "prepare.py", "planner/plan.py")
    scripts = [file for folder in ("09_kernels", "10_mixed_precision") for file in files("*.py", ROOT / folder)]
    scripts = [str(file) for file in scripts if not file.name.startswith("test_") and "__main__" in file.read_text()]
    scripts += [str(ROOT / "11_5d_trainer" / name) for name in programs]
    rehearse, train = (str(ROOT / "11_5d_trainer" / name) for name in ("planner/rehearse.py", "train.py"))
    commands = [[rehearse, *REHEARSED], [rehearse, *REHEARSED, "--kernels", "triton"]]
    commands += [[train, "--device", "cpu", "--kernels", "triton"]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", WITHOUT_TRITON, json.dumps([f"{ROOT}{os.sep}", scripts, commands])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    ends = json.loads(done.stdout.splitlines()[-1])
    wanting = [code for code, _ in ends[: len(scripts)] if code != 0]
    for script, (code, said) in zip(scripts, ends, strict=False):
        one_line = isinstance(code, str) and "needs Triton" in code and "\n" not in code
        assert code in (0, None) or one_line, f"{script}: {code} {said[-500:]}"
    assert len(wanting) >= 15, "Triton was there"
    assert not any(code for script, (code, _) in zip(scripts, ends, strict=False) if "11_5d_trainer" in script)
    (rehearsed, _), *refused = ends[len(scripts) :]
    assert rehearsed == 0
    for code, said in refused:
        assert code == 2 and said.count("--kernels triton needs Triton, which is not installed") == 1, said
        assert "Traceback" not in said
