"""What a new run does that was asked for little: every machine and every number of ranks can do it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import paths  # noqa: F401  finds the chapters below
import checks
import pytest
import step as step_module
import train
from harness.report import ROOT
from options import Config, UsageError, fresh, learning_rate_for, parse, settle
from test_bad_input import refusal
from test_train import losses

BATCH, MICRO = "global_batch", "micro_batch"
DEFAULTS = [  # options, ranks, what they become, a word of what the user hears
    ("", 1, {"lr": 3e-3, "min_lr": 3e-4, "warmup": 30, BATCH: 32, MICRO: 8, "precision": "fp32", "zero": 0}, ""),
    ("", 4, {BATCH: 32, MICRO: 8}, ""),
    ("", 3, {BATCH: 48, MICRO: 8}, "--global-batch 48 and not 32: a multiple of 8 samples on each of 3 data-parallel"),
    ("", 6, {BATCH: 48, MICRO: 8}, "--global-batch 48 and not 32"),
    ("", 8, {BATCH: 64, MICRO: 8}, "--global-batch 64 and not 32"),
    ("", 16, {BATCH: 128, MICRO: 8}, "--global-batch 128 and not 32"),
    ("--tp 2 --pp 2", 16, {BATCH: 32, MICRO: 8}, ""),
    ("--micro-batch 3", 1, {BATCH: 33, MICRO: 3}, "--global-batch 33 and not 32"),
    ("--global-batch 4", 1, {BATCH: 4, MICRO: 4}, "--micro-batch 4 and not 8: a divisor of a rank's 4 samples"),
    ("--global-batch 30", 2, {BATCH: 30, MICRO: 5}, "--micro-batch 5 and not 8"),
    ("--steps 1", 1, {"warmup": 1}, ""),
    ("--steps 10", 1, {"warmup": 1}, ""),
    ("--steps 100", 1, {"warmup": 10}, ""),
    ("--steps 20000", 1, {"warmup": 200}, ""),
    ("--steps 10 --warmup 10", 1, {"warmup": 10}, ""),
    ("--lr 1e-5", 1, {"lr": 1e-5, "min_lr": 1e-6}, ""),
    ("--preset small", 1, {"lr": 1.4e-3, "min_lr": 1.4e-4}, "--lr 0.0014, as for 23,"),
    ("--preset small --min-lr 0", 1, {"lr": 1.4e-3, "min_lr": 0}, "--lr 0.0014"),
    ("--seq-len 127", 1, {"seq_len": 127}, ""),
    ("--seq-len 127 --pp 2", 2, {"seq_len": 127}, ""),
    ("--precision bf16-master", 1, {"zero": 1}, ""),
    ("--precision bf16-master --zero 2", 1, {"zero": 2}, ""),
    ("--experts 4 --ep 4 --cp 2", 4, {"ep": 4}, "--lr 0.002"),
    ("--cp-kind zigzag --top-k 2 --schedule 1f1b", 1, {"lr": 3e-3}, ""),
    ("--pp 2 --schedule dualpipe --zero 2 --zero-shards 2", 2, {"zero_shards": 2}, ""),  # of two that hold each stage
    ("--zero 2 --zero-shards 4 --cp 2", 4, {"zero_shards": 4}, ""),
]


def test_what_is_not_given_follows_from_what_is_and_the_user_hears_of_it(text):
    for line, ranks, wanted, said in DEFAULTS:
        plan = train.prepare(["--data", text, "--device", "cpu", *line.split()], ranks)
        assert {name: getattr(plan.config, name) for name in wanted} == wanted, (line, ranks)
        about = [message for message in plan.messages if message.startswith("--")]
        assert len(about) == bool(said) and all(message.startswith(said) for message in about), (line, ranks, about)
    triton = ["--kernels", "triton", "--precision", "fp16"]
    interpreted = train.prepare(["--data", text, "--device", "cpu", *triton], 1).messages[-1]
    assert interpreted.startswith("--kernels triton runs in Triton's interpreter on a CPU"), interpreted
    assert refusal(["--data", text, "--global-batch", "32"], 3).startswith("--global-batch and --micro-batch: ")


def test_the_learning_rate_falls_with_the_fourth_root_of_the_parameters():
    peaks = [learning_rate_for(count, False) for count in (10**5, 10**6, 16 * 10**6, 8 * 10**9, 70 * 10**9)]
    assert peaks == [3e-3, 3e-3, 1.5e-3, 3.2e-4, 1.8e-4]
    assert learning_rate_for(16 * 10**6, True) == 1.5e-4, "a model that was trained before"
    config, said = settle(Config(init="theirs"), {}, 10**6, 1, None)
    assert (config.lr, config.min_lr) == (3e-4, 3e-5)
    assert said == ["--lr 0.0003, as for 1,000,000 parameters that were trained before"]


PRECISIONS = [  # options, has the GPU bf16?, precision, ZeRO
    ("", None, "fp32", 0),
    ("", True, "bf16-master", 1),
    ("--zero 3", True, "bf16-master", 3),
    ("--zero 0", True, "bf16", 0),
    ("--zero 0 --fpdt-chunks 2", True, "fp32", 0),
    ("", False, "fp16", 0),
    ("--zero 2", False, "fp16", 2),
    ("--tp 2 --tp-overlap", False, "fp32", 0),
    ("--fpdt-chunks 2", False, "fp32", 0),
    ("--experts 4 --dispatch fixed", False, "fp32", 0),
    ("--precision fp64", True, "fp64", 0),
]


@pytest.mark.parametrize(("line", "bf16", "precision", "zero"), PRECISIONS, ids=lambda value: str(value) or "plain")
def test_a_gpu_computes_in_sixteen_bits_where_the_options_allow_it(line, bf16, precision, zero):
    given = parse(line.split())
    config, said = settle(fresh(given), given, 10**6, 2, bf16)
    assert (config.precision, config.zero) == (precision, zero)
    chosen = bf16 is not None and "precision" not in given
    told = f"--precision {precision} --zero {zero}, as on a GPU with{'' if bf16 else 'out'} bf16"
    assert said == [told] * chosen
    config.check_layout(train.PRESETS["tiny"], 2)  # it is one that the trainer takes


def test_kernels_are_fused_where_triton_is_and_every_gpu_has_bf16(monkeypatch):
    gpu, cpu = train.torch.device("cuda", 0), train.torch.device("cpu")
    older: list[tuple[int, int]] = [(9, 0), (8, 0)]
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: len(older))
    monkeypatch.setattr(train.torch.cuda, "get_device_capability", lambda i: older[i])
    monkeypatch.setattr(step_module, "has_triton", lambda: True)
    kernels_on = step_module.kernels_on
    assert (kernels_on(Config(), gpu), kernels_on(Config(), cpu)) == ("triton", "torch")
    assert kernels_on(Config(compile=True), gpu) == kernels_on(Config(precision="fp64"), gpu) == "torch"
    mine = [train.torch.nn.Parameter(train.torch.ones(1))]
    adamw, sgd = train.torch.optim.AdamW(mine), train.torch.optim.SGD(mine)
    fused = Config(kernels="triton")
    for given in ((Config(kernels="torch"), gpu, adamw), (fused, cpu, adamw), (fused, gpu, sgd)):
        assert step_module.fused_adamw(*given) is None
    assert step_module.fused_adamw(Config(kernels="triton", precision="fp64"), gpu, adamw) is None
    older.append((7, 5))
    assert kernels_on(Config(), gpu) == "torch"
    older.pop()
    monkeypatch.setattr(step_module, "has_triton", lambda: False)
    assert kernels_on(Config(), gpu) == "torch"


REFUSED = [  # options, has bf16?, has Triton?, device, the line
    (
        "--kernels triton",
        False,
        True,
        "cuda",
        "--kernels triton needs GPUs of compute capability 8.0, and this is T4; use",
    ),
    (
        "--kernels triton",
        True,
        False,
        "cuda",
        "--kernels triton needs Triton, which is not installed (it is for Linux)",
    ),
    ("--kernels triton", True, False, "cpu", "--kernels triton needs Triton, which is not installed (it is for Linux)"),
    ("--precision fp8-row", True, False, "cuda", "--precision fp8-row needs Triton, which is not installed (it is for"),
]


@pytest.mark.parametrize(("line", "bf16", "triton", "device", "said"), REFUSED)
def test_kernels_that_cannot_run_are_refused_in_one_line(line, bf16, triton, device, said, monkeypatch):
    for module in (checks, step_module):
        monkeypatch.setattr(module, "has_bf16", lambda: bf16)
        monkeypatch.setattr(module, "has_triton", lambda: triton)
    monkeypatch.setattr(train.torch.cuda, "get_device_name", lambda device: "T4")
    with pytest.raises(UsageError) as refused:
        checks.check_kernels(Config(**parse(line.split())), train.PRESETS["tiny"], train.torch.device(device))
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
    assert str(refused.value).endswith("; use bf16" if "fp8" in line else "; use --kernels torch")
    checks.check_kernels(Config(precision="fp8-row"), train.PRESETS["tiny"], train.torch.device("cpu"))  # is emulated


TRAINER = Path(train.__file__).parent


@pytest.mark.prove
def test_on_a_gpu_without_bf16_the_default_run_trains_in_fp16(text, tmp_path):
    path = os.pathsep.join(str(folder) for folder in (ROOT / "tests/fake_device", ROOT / "tests"))
    environment = os.environ | {"PYTHONPATH": path, "FAKE_GPUS": "1", "FAKE_KIND": "T4", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    small = "--hidden 32 --layers 1 --heads 2 --kv-heads 1 --intermediate 48 --seq-len 16 --global-batch 4 --steps 8"
    words = ["--data", text, *small.split(), "--eval-samples", "4", "--sample", "8", "--out", str(tmp_path / "run")]
    command = [sys.executable, str(TRAINER / "train.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--precision fp16 --zero 0, as on a GPU without bf16" in done.stdout, done.stdout
    assert json.loads((tmp_path / "run/config.json").read_text())["precision"] == "fp16"
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    first, *_, last = [loss for loss, _ in losses(log).values()]
    assert last < first - 0.05, "it does not learn"
