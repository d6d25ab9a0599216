"""The same steps by other means: fused kernels, low precision, CUDA on a stand-in for a GPU, torch.compile."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import checks
import fuzz
import ops
import pytest
import step as step_module
import torch
import train
from harness.ranks import run_ranks
from harness.reference import assert_same
from harness.reference import numbers as drawn
from harness.report import ROOT
from layouts import options, whole_gradients
from llama import LlamaConfig
from ops import make_parts
from options import Config, UsageError, parse
from test_train import SIZES, arguments, f64, losses, train_on

TRAINER = Path(train.__file__).parent
ONE_HEAD = {"kv_heads": 1, "intermediate": 16}


def numbers(ranks, words, out, **sizes):
    """Losses and norms of a run, as one tensor."""
    return f64(list(losses(train_on(ranks, [*words, "--out", str(out)], **sizes)[0]).values()))


KERNEL_LAYOUTS = [(1, ""), (2, "--tp 2 --sequence-parallel"), (2, "--cp 2 --cp-kind zigzag --experts 2 --ep 2")]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "layout"), KERNEL_LAYOUTS, ids=lambda value: str(value) or "plain")
def test_fused_kernels_change_no_loss_beyond_the_last_digits_of_fp32(ranks, layout, text, tmp_path):
    words = [*arguments(text, steps=2, global_batch=4, eval_samples=1, precision="fp32", warmup=0), *layout.split()]
    plain = numbers(ranks, [*words, "--kernels", "torch"], tmp_path / "torch", hidden=128, layers=1)
    fused = numbers(ranks, [*words, "--kernels", "triton"], tmp_path / "triton", hidden=128, layers=1)
    assert not torch.equal(plain, fused), "the kernels did not run"
    assert_same(fused, plain, 1e-5, "losses and norms of two steps")


SEVERAL = {  # kernels, precision, tp, pp -> which functions stand for several
    ("triton", "fp32", 1, 1): {"linears", "add_norm", "linear_cross_entropy"},
    ("triton", "bf16-master", 1, 1): {"linears", "add_norm", "linear_cross_entropy"},
    ("triton", "bf16", 1, 1): {"linears", "linear_cross_entropy"},  # the stream of residuals is wider than a branch
    ("triton", "fp8-tensor", 1, 1): {"linears", "linear_cross_entropy"},
    ("triton", "fp16", 1, 1): set(),
    ("triton", "fp32", 2, 1): set(),
    ("triton", "fp32", 1, 2): set(),
    ("torch", "fp8-tensor", 1, 1): {"linears"},
    ("torch", "fp8-tensor", 2, 1): set(),
    ("torch", "bf16-master", 1, 1): set(),
}


def several_in_one():
    found = {}
    for kernels, precision, tp, pp in SEVERAL:
        mesh = types.SimpleNamespace(sizes={"tp": tp, "pp": pp}, groups={"stage": None}, cp=1)
        how = dict(kernels=kernels, precision=precision, cp_kind="ring", recompute="none", device="cpu")
        made = make_parts(mesh, **how)
        names = ("linears", "add_norm", "linear_cross_entropy")
        found[kernels, precision, tp, pp] = {name for name in names if getattr(made, name) is not None}
        assert (made.linear is ops.linear_fp16) == (precision == "fp16"), precision
        assert getattr(made.linear, "recipe", None) is ops.RECIPES.get(ops.FP8.get(precision)), precision
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_functions_that_stand_for_several_are_used_by_the_rule_that_ops_py_states():
    assert run_ranks(1, several_in_one) == [SEVERAL]


def test_each_kind_of_context_parallel_gets_its_groups_its_layout_and_its_attention(monkeypatch):
    for name in ("usp", "ulysses", "ring_attention", "allgather_attention"):
        monkeypatch.setattr(ops, name, lambda *given, name=name: (name, *given))
    mesh = types.SimpleNamespace(groups={"ring": "R", "ulysses": "U"}, cp=2)
    assert {kind: ops.attention_over_ranks(mesh, kind, "local", "whole") for kind in ops.LAYOUTS} == {
        "allgather": ("allgather_attention", "R", "zigzag", "local"),
        "ring": ("ring_attention", "R", "contiguous", "local"),
        "zigzag": ("ring_attention", "R", "zigzag", "local"),
        "ulysses": ("ulysses", "U", "whole"),
        "usp": ("usp", "U", "R", "zigzag", "local"),
    }
    assert ops.attention_over_ranks(mesh, "ulysses", "local", None) == ("ulysses", "U")
    monkeypatch.setattr(ops, "packed_attention", lambda *given: given)
    kinds = (("allgather", "zigzag", "allgather"), ("ring", "contiguous", "ring"), ("zigzag", "zigzag", "ring"))
    for kind, layout, version in kinds:
        packed = ops.attention_in_documents(mesh, kind, "local", "whole", [0, 9])
        assert packed == ("R", [0, 9], layout, version, "local"), kind
    monkeypatch.setattr(ops, "in_documents", lambda *given: given)
    whole = ops.attention_in_documents(mesh, "ulysses", "local", "whole", [0, 9])
    assert whole == ("ulysses", "U", ([0, 9], "whole"))


def test_fp8_hears_of_a_step_that_is_taken_and_of_one_that_is_left_out():
    linear = mock.Mock(spec=ops.Fp8Linear)
    ops.leave_out_step(ops.Parts(linear=linear))
    ops.end_step(ops.Parts(linear=linear))
    assert [name for name, *_ in linear.method_calls] == ["leave_out_step", "end_step"]


def with_torchs_products_in_cuda_parts():
    """A linear layer of cuda_parts.py whose products torch computes, with both sides trained or one of them frozen."""
    import cuda_parts

    products, each_one = [], (cuda_parts.RUNG, torch.bfloat16, torch.bfloat16)

    def product(a, b, rung):
        products.append((rung, a.dtype, b.dtype))
        return (a.float() @ b.float()).bfloat16()

    x, weight, dy = (drawn(*shape, seed=len(shape), dtype=torch.float32) for shape in ((2, 3, 8), (4, 8), (2, 3, 4)))
    X, W, DY = (each.bfloat16().double() for each in (x, weight, dy))
    want = (X @ W.t(), DY @ W, DY.flatten(0, 1).t() @ X.flatten(0, 1))
    with mock.patch.multiple(cuda_parts, matmul=product, flash_attention=lambda *qkv, **how: (qkv, how)):
        for trained in ((True, True), (True, False), (False, True)):
            products.clear()
            given = [each.clone().requires_grad_(wanted) for each, wanted in zip((x, weight), trained, strict=True)]
            y = cuda_parts.linear(*given)
            y.backward(dy.bfloat16())
            assert y.dtype == torch.bfloat16 and products == [each_one] * (1 + sum(trained))
            assert_same(y, want[0], 1e-2, "output")
            for each, gradient, wanted in zip(given, want[1:], trained, strict=True):
                assert_same(each.grad, gradient if wanted else None, 1e-2, f"gradient, trained {trained}")
        qkv, how = cuda_parts.attention(x, 2 * x, 3 * x, causal=False)
    assert {x.dtype for x in qkv} == {torch.bfloat16} and how == {"causal": False, "version": cuda_parts.CUDA}
    assert all(torch.equal(each, (n * x).bfloat16()) for n, each in enumerate(qkv, 1)), "q, k and v in their order"


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_a_linear_layer_in_cuda_has_the_gradients_of_torchs_and_makes_no_product_for_a_frozen_side():
    run_ranks(1, with_torchs_products_in_cuda_parts)


def with_several_in_one(words, want):
    """Three SGD steps against one process: PyTorch's functions in float64, with those that stand for several."""
    from fused import add_rms_norm
    from fused_loss import linear_cross_entropy
    from llama import linears_of_one_input

    plain = {"linears": linears_of_one_input, "add_norm": add_rms_norm, "linear_cross_entropy": linear_cross_entropy}
    several = {name: mock.Mock(wraps=function) for name, function in plain.items()}
    made = step_module.make_parts

    def with_several(*given, **options):
        return dataclasses.replace(made(*given, **options), **several)

    with mock.patch.object(step_module, "make_parts", with_several):
        fuzz.compare_on_ranks([words], [want], SIZES, show=False)
    return [function.call_count for function in several.values()]


SEVERAL_LAYOUTS = [
    (1, "--tied --zero 1"),
    (2, "--zero 3 --recompute full"),
    (2, "--zero 2 --zero-late-gather --cp 2 --cp-kind zigzag --recompute selective"),
    (2, "--experts 4 --ep 2"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "layout"), SEVERAL_LAYOUTS, ids=["tied", "zero 3", "late gather", "experts"])
def test_functions_that_stand_for_several_give_the_loss_gradients_and_weights_of_one_process(ranks, layout, text):
    words = options(text, layout, global_batch=4, micro_batch=1, seq_len=8)
    want = fuzz.reference(words, ranks, SIZES)
    for calls in run_ranks(ranks, with_several_in_one, words, want, timeout=200):
        assert all(calls), f"not all were used: {calls}"


# With the stand-in's clock: a host that reads what the device may still write is refused, and so is one that waits.
LATE = """
import contextlib, dataclasses, json, math, sys
import paths, step as step_module, torch, train

words, clean, poisoned = json.loads(sys.argv[1]), *sys.argv[2:]
launch, clip, launches = train.launch_step, step_module.clip_gradients, [0]
seen = []

@contextlib.contextmanager
def nobody_waits():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")

def watched(me, *arguments, **options):
    launches[0] += 1
    with nobody_waits():
        found = launch(me, *arguments, **options)
    owner = me.owners[0]
    states = [x for state in owner.state.values() for kind, x in state.items() if kind != "step"]
    seen.append([x.clone() for x in (*owner.flats, *states)])
    return found

def with_a_nan(owners, *rest):
    if launches[0] == 3:
        owners[0].gradient_shard(0)[7:8].fill_(math.nan)
    return clip(owners, *rest)

def run(folder, *more):
    launches[0] = 0
    seen.clear()
    plan = train.prepare([*words, *more, "--out", folder], 1)
    if not torch.distributed.is_initialized():
        train.connect(plan.device, 60)
    return train.train(*train.agree(plan))

train.launch_step = watched
log = run(clean)
assert len(seen[0]) == 6, "weights and two moments of two groups: a kernel for each"
step_module.clip_gradients = with_a_nan
try:
    run(poisoned, "--eval-every", "0")
    said = "nothing"
except step_module.NotFinite as error:
    said = str(error)
same = [all(torch.equal(a, b) for a, b in zip(seen[1], later)) for later in seen]
print(json.dumps([log, said, same]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.prove
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_on_a_gpu_nobody_waits_for_a_step_whose_numbers_come_late_and_a_nan_gets_into_no_weight(text, tmp_path):
    words = arguments(
        text, steps=4, global_batch=2, micro_batch=1, save_every=0, eval_every=2, eval_samples=1, precision="fp32"
    )
    words += ["--clip", "1.0", "--preset", "tiny", "--hidden", "32", "--layers", "1"]
    words += ["--heads", "1", "--kv-heads", "1", "--intermediate", "16"]
    plain = numbers(1, [*words, "--kernels", "torch"], tmp_path / "cpu", hidden=32, layers=1, heads=1, **ONE_HEAD)
    words[words.index("--device") + 1] = "cuda"
    path = os.pathsep.join(str(folder) for folder in (ROOT / "tests/fake_device", TRAINER, ROOT / "tests"))
    environment = os.environ | {"PYTHONPATH": path, "FAKE_GPUS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", LATE, json.dumps([*words, "--zero", "1", "--kernels", "triton"])]
    done = subprocess.run(
        [*program, str(tmp_path / "clean"), str(tmp_path / "poisoned")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    log, said, same = json.loads(done.stdout.splitlines()[-1])
    steps = losses(log)
    assert list(steps) == [1, 2, 3, 4] and all(line.get("tokens_per_s", 1) for line in log)
    assert_same(f64(list(steps.values())), plain, 1e-5, "losses and norms by step")
    order = [(line["step"], "val_loss" in line) for line in log]
    assert order == [(0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
    assert said.startswith("step 3: ") and "the weights are those of step 2" in said, said
    assert same == [False, True, True, True], "step 4 was launched before the host heard of step 3, and took no step"


@pytest.mark.prove
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8-row", "bf16-master", "fp8-tensor", "fp8-block"])
def test_low_precision_in_a_layout_is_as_near_to_fp32_as_on_one_rank(precision, text, tmp_path):
    words = arguments(text, steps=6, zero=1)
    exact = numbers(1, [*words, "--precision", "fp64"], tmp_path / "exact")
    alone = numbers(1, [*words, "--precision", precision], tmp_path / "alone")
    error = ((alone - exact) / exact).abs().max()
    assert 1e-6 < error < 0.1, f"{precision} on one rank is {error:.1e} away from fp64"
    for name, layout in (("dp", ""), ("tp", "--tp 2 --sequence-parallel"), ("pp", "--pp 2 --schedule zb-h1")):
        many = numbers(2, [*words, "--precision", precision, *layout.split()], tmp_path / name)
        apart = ((many - exact) / exact).abs().max()
        # A tensor-parallel sum adds numbers that were rounded on each rank: one more rounding of the format.
        rounding = torch.finfo(torch.float16 if precision == "fp16" else torch.bfloat16).eps / 2
        assert apart < max(2 * error, rounding), f"{name}: {apart:.1e} away from fp64, on one rank {error:.1e}"


def test_in_fp16_a_step_that_overflows_is_left_out_on_all_ranks_and_the_scale_is_halved(text, tmp_path):
    words = arguments(text, precision="fp16", steps=6, loss_scale=2.0**40, micro_batch=4, eval_every=4)
    log, _ = train_on(2, [*words, "--out", str(tmp_path / "run")])
    left_out = [not math.isfinite(norm) for _, norm in losses(log).values()]
    assert left_out[0], "a loss scale of 2^40 overflows fp16"
    assert [line["step"] for line in log if "val_loss" in line] == [0, 4, 6]
    scales = [line["loss_scale"] for line in log if "loss" in line]
    for before, after, skipped in zip(scales, scales[1:], left_out[1:], strict=False):
        assert after == (before / 2 if skipped else before)


# ------------------------------------------------------------------------------------- CUDA, on a stand-in for a GPU

# The least that the CUDA attention takes: heads of 64. Two experts of which a token uses both, so that rounding cannot
# send it to another one.
ONE_LAYER = LlamaConfig(hidden=128, layers=1, heads=2, kv_heads=1, intermediate=64)
CUDA_LAYOUTS = [
    (1, "--precision bf16", 24, 1),  # three products for each of 7 matrices and the output layer
    (1, "--precision bf16-master --zero 1", 24, 1),
    (2, "--precision bf16 --tp 2 --sequence-parallel", 24, 1),
    (2, "--precision bf16 --cp 2 --cp-kind ulysses --zero 3 --recompute full", 31, 2),  # 7 again in backward
    (2, "--precision bf16 --cp 2 --cp-kind zigzag", 24, 0),  # a ring merges its blocks in fp32, which is not CUDA's
    (2, "--precision bf16 --experts 2 --ep 2", 24, 1),  # one expert each
]


def gradients_by(kernels, words):
    """Every gradient of one step, whole, and how often the CUDA sources were called."""
    import cuda_parts
    import flash_attention_cuda
    import matmul_ladder

    with (
        mock.patch.object(cuda_parts, "matmul", wraps=cuda_parts.matmul) as product,
        mock.patch.object(flash_attention_cuda, "call", wraps=flash_attention_cuda.call) as attention,
        mock.patch.object(matmul_ladder, "call", wraps=matmul_ladder.call) as launch,
    ):
        me, batches = fuzz.made([*words, "--kernels", kernels], ONE_LAYER, fuzz.plain_sgd)
        step_module.train_step(me, batches())
        found = {name: g.double() for name, g in whole_gradients(me).items()}
    across = sum(call.args[1] == "run_matmul_across" for call in launch.call_args_list)
    return found, {"product": product.call_count, "across": across, "attention": attention.call_count}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "layout", "products", "attentions"), CUDA_LAYOUTS, ids=lambda value: str(value))
def test_with_chapter_09s_cuda_every_gradient_is_as_near_to_float64_as_with_torchs_bf16(
    ranks, layout, products, attentions, text
):
    words = [*arguments(text, global_batch=4, micro_batch=4 // ranks, clip=0, balance=0), *layout.split()]
    words += ["--micro-batch", "4"] if "--tp" in layout or "--cp" in layout else []
    got, calls = run_ranks(ranks, gradients_by, "cuda", words)[0]
    across = 16  # dx and dW of each of 8 matrices: read as they lie, without a copy
    assert calls == {"product": products, "across": across, "attention": attentions}
    theirs, calls = run_ranks(ranks, gradients_by, "torch", words)[0]
    assert not any(calls.values())
    want, _ = run_ranks(ranks, gradients_by, "torch", [*words, "--precision", "fp64"])[0]
    assert got.keys() == theirs.keys() == want.keys()

    def apart(found, name):
        return ((found[name] - want[name]).norm() / want[name].norm()).item()

    for name in want:
        assert 1e-4 < apart(got, name) <= 1.5 * apart(theirs, name), (
            f"{name}: {apart(got, name):.2e} away from float64, torch's bf16 {apart(theirs, name):.2e}"
        )


def test_cuda_is_refused_on_an_older_gpu_and_without_nvcc(tmp_path, monkeypatch):
    config, gpu = Config(kernels="cuda", precision="bf16"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(UsageError, match=r"needs a Hopper GPU \(sm_90a\), and this is A100; use --kernels triton"):
        checks.check_cuda(config, 64, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="is built by nvcc, which is not on the PATH"):
        checks.check_cuda(config, 64, gpu)
    (tmp_path / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    checks.check_cuda(config, 64, gpu)


# ----------------------------------------------------------------------------------------------------- torch.compile

COMPILED = [(1, ""), (2, "--zero 2"), (2, "--pp 2 --schedule 1f1b --zero 1 --tied")]


def with_blocks_compiled(backend, words, want):
    """Three SGD steps against one process, and the number of blocks that were compiled; "" is torch's own backend."""
    compiled, plain = [], torch.nn.Module.compile

    def compile(block):
        compiled.append(block)
        plain(block, **({"backend": backend} if backend else {}))

    torch.nn.Module.compile = compile
    try:
        fuzz.compare_on_ranks([words], [want], SIZES, show=False)
        return len(compiled)
    finally:
        torch.nn.Module.compile = plain
        torch._dynamo.reset()


# "aot_eager" traces blocks and their backwards and runs them op by op: no C++ to wait for.
@pytest.mark.prove
@pytest.mark.parametrize(
    ("ranks", "layout", "backend"),
    [
        (*COMPILED[-1], "aot_eager"),
        *((*one, "") for one in COMPILED),
    ],
)
def test_compiled_blocks_give_the_loss_gradients_and_weights_of_one_process(ranks, layout, backend, text):
    words = options(text, f"--compile {layout}")
    counts = run_ranks(ranks, with_blocks_compiled, backend, words, fuzz.reference(words, ranks, SIZES), timeout=300)
    assert sum(counts) == SIZES.layers * (1 if "--pp" in layout else ranks)


def test_compile_without_a_compiler_is_refused(text, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match="--compile needs a C.. compiler, and no-such-compiler is not on the PATH"):
        train.prepare(["--data", text, "--device", "cpu", "--compile"], 1)
    monkeypatch.setenv("CXX", "sh")
    train.prepare(["--data", text, "--device", "cpu", "--compile", "--pp", "2"], 2)  # 1F1B runs a backward as one


def test_tiles_in_fp8_are_multiplied_in_cuda_where_that_can_be(monkeypatch):
    import fp8_matmul
    from ops import fp8_product

    for recipe, device, why, product in (
        ("block", "cuda", "", "cuda"),
        ("block", "cuda", "no nvcc", "triton"),
        ("block", "cpu", "", "triton"),
        ("tensor", "cuda", "", "triton"),
    ):
        monkeypatch.setattr(fp8_matmul, "refusal", lambda device, why=why: why)
        assert fp8_product(recipe, torch.device(device)) == product, (recipe, device, why)


def test_fp8_is_refused_in_one_line_before_hopper_and_for_widths_that_no_product_takes(text, monkeypatch):
    gpu = torch.device("cuda", 0)
    config = Config(**parse(["--data", text, "--precision", "fp8-block", "--kernels", "torch"]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UsageError, match=r"^--precision fp8-block: fp8 on A100: .* not 8.0; use bf16$"):
        checks.check_kernels(config, SIZES, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    checks.check_kernels(config, dataclasses.replace(SIZES, hidden=64, intermediate=96), gpu)
    line = "feed-forward of a rank: 100 is not a multiple of 16, which fp8 matmuls need; use bf16"
    with pytest.raises(UsageError, match=f"^--precision fp8-block: {line}$"):
        checks.check_kernels(config, dataclasses.replace(SIZES, hidden=64, intermediate=100), gpu)
    tp = dataclasses.replace(config, tp=2)
    thin, wide, narrow = dict(own_head_dim=12), dict(intermediate=96, own_head_dim=24), dict(intermediate=48)
    for sizes, line in ((thin, "query heads"), (wide, "key/value heads"), (narrow, "feed-forward")):
        with pytest.raises(UsageError, match=f"^--precision fp8-block: {line} of a rank: 24 is not a mul"):
            checks.check_kernels(tp, dataclasses.replace(SIZES, hidden=64, **sizes), gpu)
    few = dataclasses.replace(SIZES, hidden=64, heads=8, own_head_dim=24, intermediate=192)  # 2 K/V heads on 4 ranks
    with pytest.raises(UsageError, match="^--precision fp8-block: key/value heads of a rank: 24 is not"):
        checks.check_kernels(dataclasses.replace(config, tp=4), few, gpu)
    experts = dataclasses.replace(tp, experts=2)  # which tensor ranks do not cut
    checks.check_kernels(experts, dataclasses.replace(SIZES, hidden=64, **narrow), gpu)
