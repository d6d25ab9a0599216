"""The benchmarks' command lines: what cannot be, or would be ignored, is one line that names it, before any work."""

import os
import subprocess
import sys
from pathlib import Path

import bench_profile
import pytest
import torch
from _bench_options import bench_options
from harness.programs import refusal

CHAPTER = Path(__file__).resolve().parents[1]
BENCHMARKS = {file.stem: file for file in sorted([*CHAPTER.glob("bench_*.py"), *CHAPTER.glob("in_depth/bench_*.py")])}


@pytest.mark.parametrize("script", BENCHMARKS)
def test_a_wrong_option_of_a_benchmark_is_one_line_that_names_it_and_nothing_is_done(script, tmp_path):
    """What else is wrong is refused in the same place, by `bench_options`. An option that is not there is unknown."""
    for options in ("--no-such-option 7", f"--dry --out {tmp_path}/new", "--fig"):
        assert options.split()[0] in refusal(BENCHMARKS[script], options), options
        assert not (tmp_path / "new").exists(), options


ALL = ("--gpu", "--dry", "--out", "--figures", "--seconds", "--build")


def chosen(monkeypatch, given, *names, **how):
    monkeypatch.setattr(sys, "argv", ["bench_x.py", *("" if word == "EMPTY" else word for word in given.split())])
    return bench_options("A benchmark.", *(names or ALL), **how)


def test_what_is_allowed_is_handed_over_and_what_is_not_asked_for_is_off(monkeypatch, tmp_path):
    nothing = chosen(monkeypatch, "", "--gpu")
    assert (nothing.gpu, nothing.dry, nothing.out, nothing.figures, nothing.seconds) == (False, False, None, False, 400)
    dry = chosen(monkeypatch, f"--gpu --dry --out {tmp_path} --seconds 60")
    assert (dry.gpu, dry.dry, dry.out, dry.seconds) == (True, True, tmp_path, 60)
    assert chosen(monkeypatch, "--figures").figures
    assert chosen(monkeypatch, "--out new", counts_into_out=True).out == Path("new")


@pytest.mark.parametrize(
    ("given", "how", "message"),
    [
        ("--dry --out x", {}, "--dry is a way to try --gpu"),
        ("--gpu --dry", {}, "--dry needs --out DIR"),
        ("--out x", {}, "--out x is where --gpu writes"),
        ("--figures --out x", {"counts_into_out": True}, "--figures only draws"),
        (f"--gpu --dry --out {__file__}", {}, "is no folder"),
        ("--gpu --dry --out x --seconds nan", {}, "--seconds nan is no time"),
        ("--gpu --dry --out x --seconds inf", {}, "--seconds inf is no time"),
        ("--gpu --dry --out x --seconds 0", {}, "--seconds 0 is no time"),
        ("--seconds 60", {}, "--seconds 60 is the time of --gpu"),
        ("--figures --gpu", {}, "--figures only draws"),
        ("--gpu --dry --out EMPTY", {}, "--out '' is no folder"),
        ("--out", {}, "argument --out: expected one argument"),
        ("--build --gpu", {}, "--build only compiles"),
        ("--fig", {}, "unrecognized arguments: --fig"),
        ("7", {}, "unrecognized arguments: 7"),
        *(() if torch.cuda.is_available() else (("--gpu", {}, "--gpu finds no"), ("--build", {}, "--build finds no"))),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(monkeypatch, capsys, given, how, message):
    with pytest.raises(SystemExit) as ended:
        chosen(monkeypatch, given, **how)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_gpu_that_is_not_the_kernels_is_refused_before_anything_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert chosen(monkeypatch, "--gpu").gpu
    with pytest.raises(SystemExit):
        chosen(monkeypatch, "--gpu", hopper=True)
    assert "--gpu: NVIDIA A100 is no sm_90" in capsys.readouterr().err


TOOLS = {  # what compiles for GPUs that are not there, with what is wrong about its arguments
    "_flash_compile.py": {
        "": "compute capability '' is none of 80, 90",
        "99 float16 64": "compute capability '99' is none of",
        "80": "nothing is no list of dtypes and head dims",
        "80 float16": "float16 is no list of dtypes and head dims",
        "80 float64 64": "dtype float64 is none of",
        "80 float16 40": "head dim 40 is no multiple of 16",
        "80 float16 nan": "head dim nan is no multiple of 16",
    },
    "_fused_compile.py": {"": "no script is named", "elu.py": "elu.py is none of them; use fused.py, "},
}


@pytest.mark.prove
@pytest.mark.parametrize(("tool", "given"), [(tool, given) for tool in TOOLS for given in TOOLS[tool]])
def test_a_wrong_argument_of_the_compiling_tools_is_one_line(tool, given):
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, CHAPTER / "in_depth" / tool, *given.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"{tool}: {TOOLS[tool][given]}"), done.stderr


def test_what_nsight_compute_measured_is_shown_in_three_digits_and_what_it_could_not_as_it_says():
    told = (("hz", "1,557,211,323.15"), ("%", "81.23"), ("cycle", "0.4983"), ("", "n/a"))
    assert [bench_profile.readable(*each) for each in told] == ["1.56 GHz", "81.2 %", "0.498 cycle", "n/a"]
