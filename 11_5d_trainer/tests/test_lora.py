"""Adapters (LoRA): in any layout as in one process, from a folder of Hugging Face and back to one, merged."""

import dataclasses
import json
import re
import shutil

import checkpoint
import fuzz
import hf
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
from data import Sampler, load_corpus
from full_state import full_state, load_full_state
from harness.ranks import run_ranks
from harness.reference import assert_same
from layouts import SIZES, Layout
from llama import initial_weight
from options import Config
from safetensors.torch import load_file
from test_bad_input import refusal
from test_hf import TOKENS, new_model, read_by_ours
from test_sizes import CLIP, LR, by_transformers
from test_train import arguments, f64, losses, run
from torch.func import functional_call

ADAPTED = dataclasses.replace(SIZES, layers=2, lora_rank=3, lora_scale=2.5, qk_norm=True, qkv_bias=True, own_head_dim=6)
LAYOUTS = [
    (1, "--recompute full"),
    (2, "--zero 1"),
    (2, "--tp 2"),
    (2, "--pp 2 --schedule zb-h1 --tied"),
    (2, "--pp 2 --schedule zb-v --stages-per-rank 2 --recompute full"),
    (4, "--tp 4 --zero 2"),
    (4, "--zero 3 --cp 2 --cp-kind zigzag"),
    (4, "--tp 2 --sequence-parallel --zero 3"),
    (4, "--pp 2 --schedule 1f1b --tp 2 --sequence-parallel --recompute selective"),
    (4, "--pp 2 --schedule dualpipe --cp 2 --cp-kind ulysses"),
    (4, "--pp 2 --schedule interleaved --stages-per-rank 2 --zero 2"),
    (4, "--zero 2 --zero-shards 2 --micro-batch 1"),
    (2, "--zero 2 --zero-offload"),
    (2, "--zero 1 --zero-late-gather --tied"),
    (8, "--pp 2 --schedule zb-h2 --tp 2 --cp 2 --cp-kind ring --zero 1"),
]


@pytest.mark.always("2---tp 2", "2---pp 2 --schedule zb-h1 --tied")
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_loss_gradients_and_weights_of_adapters_in_a_layout_are_those_of_one_process(ranks, layout, text):
    sizes = dataclasses.replace(ADAPTED, layers=4) if "--stages-per-rank" in layout else ADAPTED
    assert fuzz.verify([Layout(ranks, f"--micro-batch 2 {layout}")], text, sizes) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("models") / "base", "llama3.2")


STEPS, RANK, ALPHA = 5, 4, 6.0


def adapted(text, folder, *words, **changes):
    options = dict(steps=STEPS, warmup=0, lr=LR, min_lr=LR, clip=CLIP, eval_samples=8, keep=9) | changes
    return [*arguments(text, **options), "--init", folder, "--lora-rank", str(RANK), "--lora-alpha", str(ALPHA), *words]


def by_transformers_and_torch(folder, text):
    """Losses and norms of five steps of torch's AdamW over the adapters of transformers' own model, whose weights are
    made of the two factors at each step; and the merged weights after them."""
    model = by_transformers(folder)
    base = {name: p.detach() for name, p in model.named_parameters()}
    factors = {}
    for name, weight in base.items():
        if "_proj.weight" in name:
            layer, (out, width) = name.removesuffix(".weight"), weight.shape
            for factor, shape in (("A", (RANK, width)), ("B", (out, RANK))):
                full = f"{layer}.lora_{factor}.weight"
                factors[full] = initial_weight(full, shape, 2, 0).double().requires_grad_()
    optimizer = torch.optim.AdamW(factors.values(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def merged():
        weights = dict(base)
        for name in base:
            A, B = (factors.get(name.replace("weight", f"lora_{factor}.weight")) for factor in "AB")
            weights[name] = base[name] if A is None else base[name] + ALPHA / RANK * B @ A
        return weights

    sampler, found = Sampler(load_corpus(Config(data=text, seq_len=16)).train, 16, 256, 0), []
    for step in range(STEPS):
        tokens, labels = sampler.samples([sampler.window(8 * step + i) for i in range(8)])
        optimizer.zero_grad()
        weights = merged()
        loss = F.cross_entropy(functional_call(model, weights, (tokens,)).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(factors.values(), CLIP)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return f64(found), {name: weight.detach() for name, weight in merged().items()}


@pytest.mark.prove
@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, ""), (4, "--tp 2 --sequence-parallel --zero 3"), (2, "--pp 2 --zero 1")]
)
def test_adapters_of_a_folder_learn_as_with_transformers_and_come_back_merged(ranks, layout, folder, text, tmp_path):
    words = adapted(text, folder, *layout.split(), "--out", str(tmp_path / "run"))
    log, home = run_ranks(ranks, run, words, {})[0]
    want, weights = by_transformers_and_torch(folder, text)
    assert_same(f64(list(losses(log).values())), want, 1e-10, "losses and norms by step")
    hf.export(home, str(tmp_path / "out"))
    theirs = by_transformers(tmp_path / "out")
    for name, weight in theirs.named_parameters():
        assert_same(weight.detach(), weights[name], 1e-10, name)
    with torch.no_grad():
        assert_same(read_by_ours(tmp_path / "out")(TOKENS), theirs(TOKENS).logits, 1e-10, "logits of the export")
    assert hf.read_sizes(str(tmp_path / "out")) == hf.read_sizes(folder)


@pytest.mark.prove
def test_a_run_of_adapters_goes_on_in_another_layout_without_its_folder(folder, text, tmp_path):
    mine = shutil.copytree(folder, tmp_path / "base")
    words = adapted(text, str(mine), "--out", str(tmp_path / "run"), save_every=2)
    log, home = run_ranks(2, run, [*words, "--zero", "3"], {})[0]
    shutil.rmtree(mine)
    path = tmp_path / "run" / "checkpoints" / "step-000002"
    saved = checkpoint.reader(path)[1]
    kinds = {name.rpartition(".")[2] for name in saved if name.startswith("optimizer.")}
    assert kinds == {"step", "exp_avg", "exp_avg_sq"}
    assert all(".lora_" in name for name in saved if name.startswith("optimizer.")), "frozen weights have no moments"
    again, _ = run_ranks(4, run, ["--resume", str(path), "--zero", "2", "--tp", "2"], {})[0]
    for step in range(3, STEPS + 1):
        assert_same(losses(again)[step][0], losses(log)[step][0], 1e-10, f"loss of step {step}")
    first = load_file(f"{folder}/model.safetensors")
    hf.export(home, str(tmp_path / "out"))
    last = load_file(tmp_path / "out" / "model.safetensors")
    same = {name for name in first if torch.equal(first[name].double(), last[name].double())}
    assert same == {name for name in first if "_proj" not in name}


@pytest.mark.prove
def test_bf16_adapters_have_masters_and_the_base_has_none(folder, text, tmp_path):
    words = adapted(text, folder, "--zero", "1", "--out", str(tmp_path / "run"), precision="bf16-master")
    _, home = run_ranks(2, run, words, {})[0]
    hf.export(home, str(tmp_path / "wide"), torch.float32)
    hf.export(home, str(tmp_path / "narrow"))
    base = load_file(f"{folder}/model.safetensors")
    wide, narrow = (load_file(tmp_path / name / "model.safetensors") for name in ("wide", "narrow"))
    norm, query = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(wide[norm], base[norm].bfloat16().float()) and torch.equal(narrow[norm], base[norm].bfloat16())
    assert not torch.equal(wide[query], wide[query].bfloat16().float()), "an adapter that was rounded to 16 bits"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["lora_rank"] == RANK


def first_weights(words):
    plan = train.prepare(words, dist.get_world_size())
    me = train.make_trainer(plan.config, plan.model, plan.device, start_from=plan.start_from)
    full = full_state(me.owners, me.model, me.mesh)
    for p in me.model.parameters():
        p.data.zero_()
    nothing = {key: {} for key in full["weights"]}  # no moments yet
    load_full_state(me.owners, me.model, me.mesh, full | {"optimizer": nothing})
    return full_state(me.owners, me.model, me.mesh)["weights"]


def test_a_run_of_adapters_begins_with_the_weights_of_its_folder(folder, text):
    sent = load_file(f"{folder}/model.safetensors")
    for weights in run_ranks(2, first_weights, adapted(text, folder, "--tp", "2", "--zero", "1")):
        assert sent.keys() == {name for name in weights if ".lora_" not in name}
        assert all(torch.equal(weights[name], weight.double()) for name, weight in sent.items())
        assert not any(weight.any() for name, weight in weights.items() if ".lora_B" in name), "W x at first"


def test_a_merged_weight_is_the_weight_and_the_scaled_product_of_its_factors():
    weight, A, B = torch.randn(5, 3), torch.randn(2, 3), torch.randn(5, 2)
    weights = {"q.weight": weight, "q.lora_A.weight": A, "q.lora_B.weight": B, "k.weight": weight}
    assert_same(hf.merged(weights, 2.5, "q.weight"), weight + 2.5 * B @ A, 1e-6)
    assert torch.equal(hf.merged(weights, 2.5, "k.weight"), weight)
    low = {name: tensor.bfloat16() for name, tensor in weights.items()}
    wide = weight.bfloat16().float() + 2.5 * (B.bfloat16().float() @ A.bfloat16().float())
    assert torch.equal(hf.merged(low, 2.5, "q.weight"), wide.bfloat16()), "rounded once"


def test_options_that_cannot_go_with_adapters_are_refused_in_one_line(folder, text):
    words = [*arguments(text), "--init", folder]
    cases = [
        ("--lora-rank -1", r"^--lora-rank -1 must not be negative$"),
        ("--lora-rank 25", r"^--lora-rank 25 is more than the 24 of a linear layer's side; use at most"),
        ("--lora-rank 2 --lora-alpha nan", r"^--lora-alpha nan must be a \w+ number$"),
        ("--lora-rank 2 --lora-alpha 0", r"^--lora-alpha 0.0 must be a positive number$"),
        ("--lora-rank 2 --precision fp8-tensor", "^--lora-rank 2 cannot go with --precision fp8-tensor"),
    ]
    for other in ("--tp-overlap --tp 2", "--fpdt-chunks 2", "--compile", "--meter", "--kernels cuda"):
        cases.append((f"--lora-rank 2 {other}", rf"^--lora-rank 2 cannot go with {other.split()[0]}"))
    train.prepare([*words, "--lora-rank", "24"], 1)
    scaled = train.prepare([*words, "--lora-rank", "4", "--lora-alpha", "6"], 1).model
    assert (scaled.lora_rank, scaled.lora_scale) == (4, 1.5)
    for more, line in cases:
        assert re.search(line, refusal([*words, *more.split()], 2 if "--tp" in more else 1))
