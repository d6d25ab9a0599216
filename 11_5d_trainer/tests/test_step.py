"""A whole run beside a loop of PyTorch's own: AdamW, clip_grad_norm_, and the schedule by its formula."""

import dataclasses
import functools
import math
import random
import re
import sys
import types
from pathlib import Path
from unittest import mock

import paths  # noqa: F401  finds the chapters below
import fuzz
import gradients
import model
import options
import pytest
import step as step_module
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
from accounting import step_flops
from data import Sampler, load_corpus
from fp8 import Fp8Linear
from full_state import full_state, share_of_state
from harness.ranks import run_ranks
from harness.reference import assert_same
from llama import Linear
from ops import AUTOCAST, FP8
from options import Config, parse
from step import make_trainer
from test_train import SIZES, SMALL, arguments, f64, losses, run

STEPS, WARMUP, LR, MIN_LR, DECAY = 7, 2, 3e-2, 2e-3, 0.4
BETAS = (0.8, 0.9)


def rate(step):
    """Reaches LR in step WARMUP - 1 and MIN_LR in the last."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - 1 - WARMUP)
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * done)) / 2


def by_torch(text, clip, precision, loss_scale):
    """Losses, norms and the last weights of a loop that is written down once more, on one process."""
    dtype = {"fp64": torch.float64, "bf16-master": torch.bfloat16}.get(precision, torch.float32)
    low = AUTOCAST.get(precision)
    llama = model.alone(SIZES).to(dtype)
    if precision in FP8:
        eight_bits = Fp8Linear(FP8[precision])
        for name, module in llama.named_modules():
            if isinstance(module, Linear) and name != "lm_head":
                module.parts = dataclasses.replace(module.parts, linear=eight_bits)
    weights = list(llama.parameters())
    masters = [p.detach().float().requires_grad_() for p in weights] if precision == "bf16-master" else weights
    matrices, scales = ([p for p in masters if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=1e-8)
    scaler = torch.amp.GradScaler("cpu", loss_scale, growth_interval=2**31 - 1, enabled=precision == "fp16")
    data = Sampler(load_corpus(Config(data=text, seq_len=16)).train, 16, SIZES.vocab_size, 0)
    found = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        tokens, labels = data.samples([data.window(8 * step + i) for i in range(8)])
        llama.zero_grad()
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            logits = llama(tokens)
        loss = F.cross_entropy(
            logits.flatten(0, 1).to(max(dtype, torch.float32, key=lambda d: d.itemsize)), labels.flatten()
        )
        scaler.scale(loss).backward()
        if masters is not weights:
            for master, p in zip(masters, weights, strict=True):
                master.grad = p.grad.float()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(masters, clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        if precision in FP8:
            eight_bits.end_step()
        if masters is not weights:
            for master, p in zip(masters, weights, strict=True):
                p.data.copy_(master)
        found.append((loss.item(), norm.item()))
    return f64(found), {name: p.detach() for name, p in llama.named_parameters()}


def weights_of_a_run(words):
    """The log, and the weights at its end."""
    ranks = []
    with fuzz.before_each_step(lambda _, me: ranks.append(me)):
        log, _ = run(words, SMALL)
    return losses(log), full_state(ranks[-1].owners, ranks[-1].model, ranks[-1].mesh)["weights"]


CLIP = {0.05: "always clipped", 0.9: "clipped at times", 0.0: "never clipped"}


@pytest.mark.always("fp64-clipped at times", "fp16-clipped at times")
@pytest.mark.parametrize("clip", CLIP, ids=CLIP.get)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "bf16-master", "fp16", "fp8-row"])
def test_losses_norms_and_weights_are_those_of_torchs_adamw_clipping_and_schedule(precision, clip, text, tmp_path):
    limit = {"fp64": 1e-9, "fp32": 2e-5}.get(precision, 2e-2)
    words = arguments(text, steps=STEPS, warmup=WARMUP, lr=LR, min_lr=MIN_LR, weight_decay=DECAY, clip=clip)
    words += [f"--beta{i + 1}={beta}" for i, beta in enumerate(BETAS)]
    words += ["--precision", precision, "--micro-batch", "8", "--kernels", "torch", "--out", str(tmp_path / "run")]
    words += ["--zero", "1"] if precision == "bf16-master" else []
    got, weights = run_ranks(1, weights_of_a_run, words)[0]
    want, expected = by_torch(text, clip, precision, 2.0**16)
    norms = want[:, 1]
    assert {0.05: norms.min() > 0.05, 0.9: norms.min() < 0.9 < norms.max(), 0.0: True}[clip], f"norms are {norms}"
    assert_same(f64(list(got.values())), want, limit, "losses and norms by step")
    for name, weight in expected.items():
        assert_same(weights[name], weight, 10 * limit, name)


def test_steps_that_overflow_fp16_are_left_out_as_torchs_scaler_leaves_them_out(text, tmp_path):
    words = arguments(text, steps=STEPS, warmup=WARMUP, lr=LR, min_lr=MIN_LR, weight_decay=DECAY, clip=0.9)
    words += [f"--beta{i + 1}={beta}" for i, beta in enumerate(BETAS)]
    words += ["--precision", "fp16", "--loss-scale", str(2.0**21), "--micro-batch", "8", "--out", str(tmp_path / "run")]
    got, weights = run_ranks(1, weights_of_a_run, words)[0]
    want, expected = by_torch(text, 0.9, "fp16", 2.0**21)
    got = f64(list(got.values()))
    taken = want[:, 1].isfinite()
    assert torch.equal(got[:, 1].isfinite(), taken) and 0 < taken.sum() < STEPS, (
        f"norms are {got[:, 1]}, not {want[:, 1]}"
    )
    assert_same(got[taken], want[taken], 2e-2, "losses and norms of the steps that were taken")
    for name, weight in expected.items():
        assert_same(weights[name], weight, 0.2, name)


def gradients_by_scale(layouts, text):
    """Of each layout: the unscaled gradient of a step with a loss scale of 1, of 1024, and without balance loss."""
    found = []
    for layout in layouts:
        kinds = []
        for scale, balance in ((1.0, 10), (1024.0, 10), (1.0, 0)):
            words = [*arguments(text, clip=0, balance=balance), *layout.split()]
            me, batches = fuzz.made(words, SIZES)
            me.scaler.value = scale
            step_module.gradient_step(me, batches())
            kinds.append({name: g.clone() for own in me.owners for name, g in own.full_gradients().items()})
        found.append(kinds)
    return found


SCALED = ("--experts 4 --ep 2 --zero 2", "--pp 2 --experts 4 --micro-batch 4", "--fpdt-chunks 2 --micro-batch 4")


def test_a_loss_scale_multiplies_every_term_of_the_loss(text):
    """1024 is a power of two, so unscaled gradients in float64 are the same bits."""
    for ranks in run_ranks(2, gradients_by_scale, SCALED, text):
        for layout, (plain, scaled, unbalanced) in zip(SCALED, ranks, strict=True):
            for name, gradient in plain.items():
                assert torch.equal(gradient, scaled[name]), f"{layout}: {name}"
            routers = [name for name in plain if "gate.weight" in name]
            assert bool(routers) == ("--experts" in layout)
            for name in routers:
                assert not torch.equal(plain[name], unbalanced[name]), f"{layout}: {name} hears of no balance"


def passed_on_by_the_pipeline(layout, text):
    """This rank's own gradients of a step, and each gradient at the moment when its owner gets it."""
    me, batches = fuzz.made([*arguments(text), *layout.split()], SIZES)
    step = [step_module.shard_batch(me, batch) for batch in batches()]
    valid = step_module.valid_tokens(me, step)
    step_module.zero_grad(me)
    step_module.forward_and_backward(me, step, valid, send=False)
    names = {p: name for name, p in me.model.named_parameters()}
    own = {name: step_module.local_gradient(me.owners, p).clone() for p, name in names.items()}
    step_module.zero_grad(me)
    passed = []
    for owner in me.owners:
        start = owner.start
        owner.start = lambda p, start=start: (passed.append((names[p], p.grad.clone())), start(p))
    step_module.forward_and_backward(me, step, valid)
    return own, passed, [*share_of_state(me.owners, me.model, me.mesh)["weights"]]


@pytest.mark.parametrize("layout", ["--tied", "--schedule zb-h1 --zero 2"])
def test_a_pipeline_passes_each_gradient_on_once_and_when_it_is_complete(layout, text):
    found = run_ranks(4, passed_on_by_the_pipeline, f"--pp 2 --micro-batch 2 {layout}", text)
    for own, passed, _ in found:
        assert sorted(name for name, _ in passed) == sorted(own)
        for name, gradient in passed:
            assert torch.equal(gradient, own[name]), f"{name} was passed on too early"
    saved = [name for *_, names in found for name in names]
    assert len(saved) == len({*saved}), "a tied weight is on two stages, and saved by one"


def speedometer(world, **changes):
    config = Config(seq_len=16, global_batch=8, micro_batch=2, **changes)
    plan = types.SimpleNamespace(config=config, model=SIZES)
    cpu = types.SimpleNamespace(device=torch.device("cpu"))
    with mock.patch.object(train.dist, "get_world_size", lambda: world):
        made = train.Speedometer(plan, cpu)
    made.peak = 1e9
    return made


def test_mfu_is_the_model_flops_of_one_rank_and_of_the_experts_that_a_token_uses():
    flops = functools.partial(step_flops, batch=8, seq=16)
    dense = flops(SIZES).model
    assert speedometer(4).of_step(0.5) == {"tokens_per_s": 256, "mfu": pytest.approx(dense / 4 / 0.5 / 1e9)}
    three = flops(dataclasses.replace(SIZES, intermediate=3 * SIZES.intermediate)).model
    assert speedometer(2, experts=8, top_k=3).of_step(2.0)["mfu"] == pytest.approx(three / 2 / 2.0 / 1e9)
    again = speedometer(1, recompute="full").of_step(1.0)["mfu"]
    assert again == pytest.approx(dense / 1e9), "what is computed twice counts once"


def test_runs_of_gradients_have_the_squares_of_their_pieces_each_by_its_holders():
    draw = random.Random(0)
    for _ in range(50):  # buffers with gaps, in which some pieces are matrices, and some are read backwards
        buffer, at, pieces = torch.randn(200, dtype=torch.float64), 0, []
        while at < 150:
            at, numel = at + draw.choice([0, 0, 0, 4]), draw.choice([0, 4, 8, 12])
            piece = buffer[at : at + numel]
            pieces.append((str(len(pieces)), draw.choice([piece, piece, piece.view(2, -1), piece.view(2, -1).t()])))
            at += numel
        holders = {name: draw.choice([1, 1, 3]) for name, _ in pieces}
        runs = list(gradients.runs(pieces, holders))
        got, want = (sum(x.square().sum() / holders[name] for name, x in each) for each in (runs, pieces))
        assert_same(got, want, 1e-12)
        assert len(runs) < len(pieces)
    x = torch.zeros(8)
    assert gradients.adjacent(x[:4], x[4:]) and not gradients.adjacent(x[:4], torch.zeros(8)[4:]), "another buffer"
    assert not gradients.adjacent(x[:4], x.view(torch.int32)[4:])
    piece = torch.randn(1000).bfloat16()
    assert_same(gradients.norm_of(piece), piece.double().norm(), 1e-12)
    on_gpu = type("OnGpu", (torch.Tensor,), {"is_cuda": True})
    piece = torch.randn(gradients.CHUNK + 30_000).bfloat16()
    assert float(gradients.norm_of(piece.as_subclass(on_gpu))) == pytest.approx(float(piece.double().norm()), rel=1e-4)


def test_a_gradient_that_is_summed_in_a_wider_buffer_is_looked_for_there():
    narrow, wide, frozen = (torch.nn.Parameter(torch.zeros(2), requires_grad=i < 2) for i in range(3))
    narrow.grad = torch.ones(2)
    owner = types.SimpleNamespace(names={narrow: "a", wide: "b", frozen: "c"}, views={wide: torch.full((2,), 3.0)})
    found = [gradients.local_gradient([owner], p) for p in (narrow, wide, frozen)]
    assert found[0] is narrow.grad and found[1] is owner.views[wide] and found[2] is None


def test_a_step_is_read_late_on_a_gpu_alone_and_if_nothing_on_the_host_depends_on_its_norm():
    def late(device="cuda", dynamic=False, fused=(True, True), moe=None, **options):
        me = types.SimpleNamespace(config=Config(**options), model=model.alone(SIZES, moe, "meta"))
        me.device = torch.device(device)
        me.scaler = types.SimpleNamespace(dynamic=dynamic)
        me.owners = [types.SimpleNamespace(fused=abs if each else None) for each in fused]
        return step_module.reads_late(me)

    assert late() and late(precision="bf16-master")
    assert not late(device="cpu") and not late(fused=(True, False)) and not late(dynamic=True)
    assert not late(on_nan="skip") and not late(precision="fp8-row")
    assert not late(moe=Config(experts=4).mixture(SIZES))
    me = types.SimpleNamespace(broken=None, owners=[mock.Mock()])
    steps = [(f64(0.5), f64(norm)) for norm in (1.0, math.nan, 2.0)]
    with mock.patch.multiple(step_module, gradient_step=mock.Mock(side_effect=steps), update_weights=mock.Mock()):
        assert [step_module.launch_step(me, [], mock.Mock()).values() for _ in steps][2] == [0.5, 2.0]
    assert [call.args[0].item() for call in me.owners[0].leave_out_if.call_args_list] == [False, True, True]


def test_wsd_is_constant_and_falls_as_one_minus_a_square_root_in_the_last_steps():
    config = Config(steps=20, warmup=4, lr=1.0, min_lr=0.2, lr_schedule="wsd", decay_steps=4)
    rates = [train.learning_rate(step, config) for step in range(20)]
    falling = [0.2 + 0.8 * (1 - math.sqrt(done / 4)) for done in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 13, *falling])
    whole = dataclasses.replace(config, decay_steps=0)  # a fifth of the steps
    assert [train.learning_rate(step, whole) for step in range(20)] == rates
    warm = dataclasses.replace(whole, warmup=18)  # which leaves less than a fifth
    rates = [train.learning_rate(step, warm) for step in (17, 18, 19)]
    assert rates == pytest.approx([1.0, 0.2 + 0.8 * (1 - math.sqrt(0.5)), 0.2])
    assert train.learning_rate(2, dataclasses.replace(whole, steps=3, warmup=0)) == 0.2, "a fifth of 3 is no step"


def test_the_only_step_of_a_run_has_a_loss_in_the_summary(text, tmp_path):
    words = [*arguments(text, steps=1, warmup=0, sample=4), "--out", str(tmp_path / "run")]
    words += ["--experts", "4", "--router", "sigmoid", "--bias-speed", "0.1", "--seed", "3"]  # biases: no parameters
    said = run_ranks(1, said_by_a_run, words)[0]
    assert "loss            5." in said and "nan" not in said, said
    llama = model.alone(SIZES, Config(**parse(words)).mixture(SIZES), "meta")
    assert f"\n{sum(p.numel() for p in llama.parameters()):,} parameters; " in said, said
    assert "no sample: the full model does not fit on this GPU beside the run; try generate.py " in said, said


def said_by_a_run(words):
    lines = []
    no_memory = mock.Mock(side_effect=torch.OutOfMemoryError)
    with (
        mock.patch.object(train.Logger, "say", lambda self, text: lines.append(text)),
        mock.patch.multiple(train, load_model=no_memory, Stop=lambda: types.SimpleNamespace(asked=True)),  # at its end
        mock.patch.object(train, "Sampler", mock.Mock(wraps=train.Sampler)) as samplers,
    ):
        weights_of_a_run(words)
    assert {call.args[3] for call in samplers.call_args_list} == {3}, "of the seed"
    return "\n".join(lines)


def test_help_names_every_option_in_one_of_four_groups(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    said = capsys.readouterr().out
    for title in options.GROUPS.values():
        assert f"\n{title}:\n" in said
    first = said.index(f"\n{options.GROUPS['preset']}:")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    assert capsys.readouterr().out == "", "once is enough"
    assert all(said.index(f"\n  {options.flag(f.name)}", first) > first for f in dataclasses.fields(Config))


def test_help_says_no_default_twice_and_none_that_means_something_else(capsys):
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    paragraphs = capsys.readouterr().out.split("\n  --")[1:]
    assert len(paragraphs) == len(dataclasses.fields(Config)) + 1  # --options
    for text in paragraphs:
        assert text.count("default:") <= 1, text
        assert "''" not in text and ("(default: 0)" not in text or text.startswith("seed")), text


def files_that_a_micro_batch_passes(words):
    """From where it is taken to where its gradient is complete: files of this repository whose functions are called."""
    passed, root = {"train.py"}, Path(train.__file__).parents[1]

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(root) and file.relative_to(root).parts[0][:2].isdigit():
            passed.add(file.name)

    def watched(function):
        def call(*given):
            sys.setprofile(note)
            try:
                return function(*given)
            finally:
                sys.setprofile(None)

        return call

    config = Config(**parse(words))
    me, corpus = make_trainer(config, SIZES, torch.device("cpu")), load_corpus(config)
    take = watched(Sampler(corpus.train, config.seq_len, 256, 0).step)
    with mock.patch.object(step_module, "forward_and_backward", watched(step_module.forward_and_backward)):
        step_module.train_step(me, take(config.micro_batch, config.accumulation(1), 0, 1))
    return passed


def test_a_micro_batch_passes_at_most_eight_files_and_the_readme_lists_them(text):
    readme = (Path(train.__file__).parent / "README.md").read_text().partition("### The way of a micro-batch")[2]
    told = re.findall(r"^\d\. `(\w+\.py)`", readme.partition("\n### ")[0], re.MULTILINE)
    piped, plain, sharded = (
        run_ranks(2, files_that_a_micro_batch_passes, [*arguments(text, lr=0.1, min_lr=0.01), *layout.split()])[0]
        for layout in ("--pp 2", "--global-batch 4", "--zero 3")
    )
    assert len(told) <= 8 and set(told) == piped
    assert plain == piped - {"pipeline_executor.py"}
    assert sharded == plain - {"gradients.py", "gradient_reducers.py"} | {"zero_stages.py", "zero3.py"}


def computed_by(layouts, text):
    """Of each layout: how often attention is computed in a step. For --compile, whether each block is compiled; in
    fp8, whether the output layer is and another one."""
    found, core = [], F.scaled_dot_product_attention
    for layout in layouts:
        me, batches = fuzz.made([*arguments(text, micro_batch=4), *layout.split()], SIZES)
        blocks = me.model.model.layers
        if me.config.compile:
            found.append([block._compiled_call_impl is not None for block in blocks])
            continue
        if me.config.precision in FP8:
            layers = (me.model.lm_head, blocks[0].mlp.up_proj)
            linears = [getattr(layer, "linear", None) or layer.parts.linear for layer in layers]
            found.append([isinstance(linear, Fp8Linear) for linear in linears])
            continue
        with mock.patch.object(F, "scaled_dot_product_attention", mock.Mock(wraps=core)) as attention:
            step_module.gradient_step(me, batches())
        found.append(attention.call_count)
    return found


COMPUTED = {  # 1 micro-batch in 2 layers on two data ranks, 2 in 1 layer on two stages
    "": 2,
    "--recompute selective": 4,
    "--recompute full": 4,
    "--recompute full --experts 4": 4,
    "--recompute full --pp 2": 4,
    "--compile": [True, True],
    "--precision fp8-row": [False, True],
    "--precision fp8-row --tp 2": [False, True],
}


def test_layers_are_recomputed_compiled_and_in_fp8_as_asked(text):
    for found in run_ranks(2, computed_by, [*COMPUTED], text):
        assert dict(zip(COMPUTED, found, strict=True)) == COMPUTED


def described(words):
    plan = train.prepare(words, dist.get_world_size())
    return train.describe(plan, make_trainer(plan.config, plan.model, torch.device("cpu"))), plan.config.seq_len


def test_what_is_said_of_a_run_is_its_batch_its_tokens_and_its_parameters(text):
    [said, seq_len], _ = run_ranks(2, described, arguments(text, seq_len=12))
    numbers = {what: int(n.replace(",", "")) for n, what in re.findall(r"([\d,]+) (dp =|[\w-]+(?: tokens)?)", said)}
    samples = numbers["micro-batch"] * numbers["accumulation"] * numbers["dp ="]
    assert numbers["samples"] == samples == 8 and numbers["tokens"] == samples * seq_len, said
    assert numbers["training tokens"] == math.ceil(0.9 * Path(text).stat().st_size), said
    assert numbers["parameters"] == sum(p.numel() for p in model.alone(options.PRESETS["tiny"]).parameters()), said


def dtypes_of_new_memory(words):
    """Of all weights, when they get it; and whether autocast keeps what it has cast to the end of forward."""
    seen, give = set(), model.give_memory

    def watched(made, *arguments, **more):
        give(made, *arguments, **more)
        seen.update(p.dtype for p in made.parameters())

    with mock.patch.object(model, "give_memory", watched):
        me = make_trainer(Config(**parse(words)), SIZES, torch.device("cpu"))
    for _ in range(99):
        me.scaler.update(False)  # without fp16 no number of left-out steps ends a run
    assert me.scaler.value == 1, "a loss scale is for fp16"
    with step_module.precision(me):
        return seen, torch.is_autocast_cache_enabled()


def number_of_buckets(words):
    me = make_trainer(Config(**parse(words)), SIZES, torch.device("cpu"))
    return len(me.owners[0].buckets)


def test_a_bucket_may_be_smaller_than_a_mebibyte(text):
    for mib, buckets in ((25, 1), (0.05, 2)):
        words = arguments(text, precision="bf16", zero=1, bucket_mib=mib)
        assert run_ranks(1, number_of_buckets, words) == [buckets]


def kept_by_another_seed(words):
    configs = [Config(**parse([*words, "--seed", seed])) for seed in "01"]
    one, other = (make_trainer(config, SIZES, torch.device("cpu")).model for config in configs)
    return [name for name, p in one.named_parameters() if p.dim() > 1 and p.equal(other.get_parameter(name))]


@pytest.mark.parametrize("layout", ["--experts 4", "--tp 2"])
def test_another_seed_draws_each_matrix_anew(layout, text):
    assert run_ranks(2, kept_by_another_seed, [*arguments(text), *layout.split()]) == [[], []]


def test_weights_get_their_memory_in_the_dtype_they_stay_in(text):
    for precision, dtype in (("bf16-master", torch.bfloat16), ("bf16", torch.float32), ("fp64", torch.float64)):
        seen, _ = run_ranks(1, dtypes_of_new_memory, arguments(text, precision=precision, zero=1))[0]
        assert seen == {dtype}, precision


@pytest.mark.parametrize("zero", [2, 3])
def test_under_zero_3_autocast_keeps_no_copy_of_weights_to_the_end_of_forward(zero, text):
    _, kept = run_ranks(1, dtypes_of_new_memory, arguments(text, precision="bf16", zero=zero))[0]
    assert kept == (zero < 3)
