"""Models of any size: a Hugging Face config.json, single options, and the biases of Qwen2, which Llama has not."""

import dataclasses
import functools
import itertools
import json
import math
import shutil
from pathlib import Path

import paths  # noqa: F401  finds the chapters below
import generate
import hf
import hf_keys
import pytest
import torch
import torch.nn.functional as F
import train
import transformers
from accounting import parameters
from data import Sampler, load_corpus
from harness.ranks import run_ranks
from harness.reference import assert_same
from llama import LlamaConfig
from model import alone, full_shapes
from options import Config, UsageError
from safetensors.torch import load_file, save_file
from test_bad_input import refusal
from test_hf import MODELS, STRETCHED, TOKENS, changed, mixture_of, new_model, read_by_ours
from test_train import TEXT, arguments, f64, losses, run

STEPS, CLIP, LR = 5, 0.5, 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The data, and a model of each kind that transformers wrote."""
    home = tmp_path_factory.mktemp("models")
    (home / "numbers.txt").write_text(TEXT)
    for kind in MODELS:
        new_model(home / kind, kind)
    return home


def in_float64(module, hidden):
    """transformers' RMSNorm without its cast to float32."""
    wide = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * wide


def routed_in_float64(module, hidden):
    """transformers' router of Mixtral without its cast to float32."""
    logits = F.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
    shares, chosen = logits.softmax(-1).topk(module.top_k)
    return logits, shares / shares.sum(-1, keepdim=True), chosen


def by_transformers(folder):
    """transformers' own model in float64, with norms and routers not rounded to float32, and torch's attention."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    config._experts_implementation = "eager"
    options = dict(dtype=torch.float64, attn_implementation="sdpa", local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(in_float64, module)
        if type(module).__name__ in ("MixtralTopKRouter", "Qwen3MoeTopKRouter"):
            module.forward = functools.partial(routed_in_float64, module)
    return model


@functools.cache
def trained_by_transformers(folder, data):
    """Losses and norms of five steps of torch's AdamW with clipping, and the weights after them."""
    model, found = by_transformers(folder), []
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    text = Sampler(load_corpus(Config(data=data, seq_len=16)).train, 16, 256, 0)
    for step in range(STEPS):
        tokens, labels = text.samples([text.window(8 * step + i) for i in range(8)])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return f64(found), {name: p.detach() for name, p in model.named_parameters()}


# Each technique that cuts or runs a model in its own way: biases, norms of q and k, and heads of their own size are cut
# with their columns (tp), held twice where K/V heads are (tp 4), summed over a stage's micro-batches (pp), cut (zero),
# and run in chunks (fpdt) or halves (domino).
TWELVE = [
    (1, "--recompute selective"),
    (2, "--zero 3"),
    (2, "--tp 2 --sequence-parallel --zero 2"),
    (2, "--pp 2 --schedule zb-h1 --zero 1"),
    (4, "--tp 4 --tp-overlap"),
    (4, "--zero 3 --cp 2 --recompute full"),
    (2, "--fpdt-chunks 2 --cp 2 --cp-kind ulysses"),
    (2, "--tp 2 --tp-overlap domino"),
    (2, "--cp 2 --cp-kind ring"),
    (4, "--cp 4 --cp-kind usp --zero 1"),
    (4, "--tp 2 --pp 2 --recompute full"),
    (8, "--pp 2 --schedule dualpipe --cp 2 --tp 2 --micro-batch 1 --zero 1"),
]
LAYOUTS = [(kind, *layout) for kind in ("llama3.2", "qwen2.5", "qwen3") for layout in TWELVE]
LAYOUTS += [("mistral", 2, "--tp 2"), ("qwen2", 4, "--tp 4"), ("llama", 2, "--tp 2 --sequence-parallel")]
LAYOUTS += [("llama", 2, "--zero 2 --recompute full"), ("llama", 4, "--pp 2 --schedule zb-h2 --zero 2")]
LAYOUTS += [
    ("qwen3_moe", ranks, f"{layout} --balance 0")
    for ranks, layout in (
        (2, "--ep 2 --zero 3"),
        (2, "--tp 2 --sequence-parallel"),
        (4, "--ep 2 --tp 2"),
        (4, "--ep 2 --pp 2 --schedule zb-h1 --zero 1"),
    )
]
LAYOUTS += [
    ("mixtral", ranks, f"{layout} --balance 0")
    for ranks, layout in (
        (1, ""),
        (1, "--recompute full"),
        (2, "--ep 2 --zero 1"),
        (2, "--ep 2 --zero 3"),
        (2, "--tp 2 --sequence-parallel"),
        (2, "--cp 2 --cp-kind ulysses --ep 2"),
        (4, "--ep 4 --zero 2"),
        (4, "--ep 2 --tp 2"),
        (4, "--ep 2 --pp 2 --schedule zb-h1 --zero 1"),
        (8, "--ep 2 --pp 2 --cp 2 --tp 2 --sequence-parallel"),
    )
]


@pytest.mark.prove
@pytest.mark.parametrize(("kind", "ranks", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_five_steps_of_a_folder_are_those_of_transformers_with_torchs_adamw_in_float64(
    kind, ranks, layout, folder, tmp_path
):
    data = str(folder / "numbers.txt")
    words = arguments(data, steps=STEPS, warmup=0, lr=LR, min_lr=LR, clip=CLIP)
    words += ["--init", str(folder / kind), "--out", str(tmp_path / "run"), *layout.split()]
    log, run_folder = run_ranks(ranks, run, words, {})[0]
    want, weights = trained_by_transformers(str(folder / kind), data)
    assert want[:, 1].min() > CLIP, f"norms are {want[:, 1]}"
    assert_same(f64(list(losses(log).values())), want, 1e-10, "losses and norms by step")
    hf.export(run_folder, str(tmp_path / "out"))
    theirs = by_transformers(tmp_path / "out")
    back = dict(theirs.named_parameters())
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        assert_same(back[name].detach(), weight, 1e-9, name)
    sizes = hf.read_sizes(str(folder / kind))
    assert hf.read_sizes(str(tmp_path / "out")) == sizes
    assert sizes[1] != (0, 0) or parameters(sizes[0]) == sum(weight.numel() for weight in weights.values())
    ours = read_by_ours(tmp_path / "out")
    with torch.no_grad():
        assert_same(theirs(TOKENS).logits, ours(TOKENS), 1e-10, "logits of the export")
    theirs.generation_config.eos_token_id = None
    greedy = theirs.generate(TOKENS, max_new_tokens=8, do_sample=False)
    assert torch.equal(generate.generate(ours, TOKENS, 8, 0, torch.Generator()), greedy), "tokens of the export"


# ------------------------------------------------------------------------------------------------ sizes, no weights


def planned(*words):
    plan = train.prepare([*words, "--device", "cpu"], 1)
    return plan.model, plan.config


def test_sizes_come_from_a_config_json_and_from_options_and_options_win(folder):
    data = ["--data", str(folder / "numbers.txt"), "--seq-len", "16"]
    theirs = LlamaConfig(256, 32, 2, 4, 2, 48, rope_theta=20000.0, norm_eps=1e-6, qkv_bias=True)
    assert planned(*data, "--config", str(folder / "qwen2" / "config.json"))[0] == theirs
    assert planned(*data, "--config", str(folder / "qwen2"))[0] == theirs  # a folder will do
    few = LlamaConfig(256, 32, 1, 4, 4, 48, rope_theta=20000.0, norm_eps=1e-6, qkv_bias=True)
    assert planned(*data, "--config", str(folder / "qwen2"), "--layers", "1", "--kv-heads", "4")[0] == few
    tiny = LlamaConfig(256, hidden=64, layers=1, heads=2, kv_heads=1, intermediate=96, tied=True)
    sizes = ["--hidden", "64", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--intermediate", "96", "--tied"]
    assert planned(*data, *sizes)[0] == tiny
    assert not planned(*data, *["--preset", "base", "--hidden", "48", "--layers", "1", "--no-tied"])[0].tied
    _, config = planned(*data, "--config", str(folder / "mixtral"))
    assert (config.experts, config.top_k) == (4, 2)


def test_a_run_from_a_config_json_alone_trains_new_weights_and_is_exported_as_that_kind(folder, tmp_path):
    file = tmp_path / "config.json"
    shutil.copy(folder / "qwen2" / "config.json", file)
    changed(tmp_path, vocab_size=300, max_position_embeddings=777)
    words = [*arguments(str(folder / "numbers.txt"), steps=1, warmup=0, lr=1e-30, min_lr=0), "--config", str(file)]
    _, run_folder = run_ranks(2, run, [*words, "--tp", "2", "--out", str(tmp_path / "run")], {})[0]
    file.unlink()
    hf.export(run_folder, str(tmp_path / "out"))
    back, first = load_file(tmp_path / "out" / "model.safetensors"), alone(hf.read_sizes(str(tmp_path / "out"))[0])
    for name, weight in first.state_dict().items():
        assert_same(back[name], weight.double(), 1e-12, name)
    assert back["model.layers.0.self_attn.q_proj.bias"].abs().max() < 1e-20, "a bias begins at zero"
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (about["model_type"], about["vocab_size"], about["max_position_embeddings"]) == ("qwen2", 300, 777)


def test_the_config_json_of_an_export_has_every_size_of_its_model(folder, tmp_path):
    read = [hf.read_sizes(str(folder / kind)) for kind in MODELS]
    read.append((dataclasses.replace(read[0][0], hidden=34, own_head_dim=8), (0, 0)))  # a Mistral; no Llama has it
    read.append((read[[*MODELS].index("mixtral")][0], (4, 4)))  # a token may use all experts
    kinds = set()
    for sizes, experts in read:
        about = hf.config_json(sizes, mixture_of(sizes, experts), "float32", 16, {})
        (tmp_path / "config.json").write_text(json.dumps(about))
        assert hf.read_sizes(str(tmp_path)) == (sizes, experts), about
        kinds.add(about["model_type"])
    assert kinds == {*hf_keys.KINDS}


def test_what_transformers_assumes_where_a_file_is_silent_is_assumed_here(tmp_path):
    for kind in hf_keys.KINDS:
        least = {"model_type": kind, "vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 1}
        least |= {"num_attention_heads": 32, "intermediate_size": 64}
        least |= {"sliding_window": None} if kind == "mistral" else {}
        least |= {"moe_intermediate_size": 64, "norm_topk_prob": True} if kind == "qwen3_moe" else {}
        (tmp_path / "config.json").write_text(json.dumps(least))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        sizes, experts = hf.read_sizes(str(tmp_path))
        for ours, name in hf.FIELDS.items():
            name = "moe_intermediate_size" if (kind, ours) == ("qwen3_moe", "intermediate") else name
            want = theirs.rope_parameters["rope_theta"] if ours == "rope_theta" else getattr(theirs, name)
            assert getattr(sizes, ours) == want, f"{name} of a {kind}"
        assert sizes.head_dim == (getattr(theirs, "head_dim", None) or 16), kind
        assert experts == {"mixtral": (8, 2), "qwen3_moe": (128, 8)}.get(kind, (0, 0))
        theirs.save_pretrained(tmp_path)  # with all that transformers writes
        if kind != "mistral":
            assert hf.read_sizes(str(tmp_path)) == (sizes, experts)
        if kind in hf_keys.KEYS["num_key_value_heads"].null:
            null = {"num_attention_heads": 16, "num_key_value_heads": None}
            (tmp_path / "config.json").write_text(json.dumps(least | null))
            theirs = transformers.AutoConfig.from_pretrained(tmp_path)
            assert hf.read_sizes(str(tmp_path))[0].kv_heads == theirs.num_key_value_heads == 16, kind


def test_every_key_is_honoured_or_refused_by_its_name(folder, tmp_path):
    data = ["--data", str(folder / "numbers.txt"), "--seq-len", "16", "--device", "cpu"]

    def said_of(kind, *words, **changes):
        shutil.copy(folder / kind / "config.json", tmp_path)
        changed(tmp_path, **changes)
        return refusal([*data, "--config", str(tmp_path), *words]).removeprefix(f"--config {tmp_path} ")

    past = "only null is trained here (attention sees the whole past)"
    assert said_of("qwen2", use_sliding_window=True).startswith("has use_sliding_window = True; only false is")
    assert said_of("qwen2", layer_types=["full_attention", "sliding_attention"]).startswith("has layer_types = [")
    assert said_of("mistral", sliding_window=4096) == f"has sliding_window = 4096; {past}"
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert said_of("llama", rope_parameters=half).startswith("has partial_rotary_factor = 0.5 for its RoPE")
    assert said_of("llama", is_causal=False) == "has is_causal = False, which means nothing here"
    assert said_of("llama", quantization_config={}) == "has quantization_config = {}, which means nothing here"
    assert said_of("llama", **{"a\nb": "x" * 99}) == f"has 'a\\nb' = '{'x' * 56}..., which means nothing here"
    for kind, dim in (("llama", 8), ("mistral", None)):
        assert said_of(kind, hidden_size=34, head_dim=dim).endswith(": hidden_size 34 is not a multiple of its heads")
    types = {"rope_type": "default", "type": "llama3"}
    assert said_of("llama", rope_parameters=types) == "has two types of RoPE, 'default' and 'llama3'; remove one"
    assert said_of("mixtral", num_experts_per_tok=5) == "gives each token 5 of 4 experts"
    assert said_of("mixtral", num_experts_per_tok=0).startswith(
        "has num_experts_per_tok = 0; it must be a whole number"
    )
    assert said_of("llama", num_experts=4) == "has num_experts = 4, which means nothing here"
    assert said_of("llama", router_jitter_noise=0.1).startswith("has router_jitter_noise = 0.1; only 0.0")
    eight = "has num_hidden_layers = 8.0; it must be a whole number from 1 to 1,024"
    assert said_of("llama", num_hidden_layers=8.0) == eight
    assert said_of("qwen3", head_dim=None) == "has head_dim = None; it must be a whole number from 1 to 16,777,216"
    assert said_of("llama", vocab_size=65).startswith("knows 65 tokens and the data has 256")
    assert said_of("llama", "--kv-heads", "3") == "--kv-heads 3: heads 4 is not a multiple of kv_heads 3"
    assert said_of("llama", "--preset", "base").startswith("--preset base cannot go with --config")
    two = "has two numbers of experts; remove num_experts or num_local_experts"
    assert said_of("qwen3_moe", num_experts=4, num_local_experts=8) == two
    plain = {"rope_type": "default", "rope_theta": 2e4}
    twice = "has two rope_theta, 100000.0 and 20000.0; remove one"
    assert said_of("llama", rope_theta=1e5, rope_parameters=plain) == twice
    older = plain | {"rope_theta": 1e4}
    said = said_of("llama", rope_parameters=plain, rope_scaling=older)
    assert said.startswith("has both rope_parameters and rope_scaling, and they differ")
    flat = STRETCHED | {"original_max_position_embeddings": 64, "high_freq_factor": 1.0}
    assert "its RoPE's high_freq_factor must be more than its low" in said_of("llama", rope_parameters=flat)
    assert "layer_types does not name each of 2 layers" in said_of("qwen2", layer_types=["full_attention"])
    assert said_of("mixtral", "--experts", "8").startswith("--experts 8 cannot go with --config")
    text = (folder / "llama" / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"vocab_size"', '"vocab_size": 9, "vocab_size"'))
    with pytest.raises(UsageError, match="config.json says 'vocab_size' twice; remove one$"):
        train.prepare([*data, "--config", str(tmp_path)], 1)
    init = ["--init", str(folder / "llama")]
    with pytest.raises(UsageError, match="--layers 3 cannot go with --init .*, which decides it; leave it out"):
        train.prepare([*data, *init, "--layers", "3"], 1)
    assert planned(*data, *init, "--layers", "2")[0].layers == 2
    with pytest.raises(UsageError, match="--config nowhere holds no config.json; give the folder .* or its config"):
        train.prepare([*data, "--config", "nowhere"], 1)


def test_a_value_at_the_limit_of_its_type_is_taken_and_one_beyond_or_of_another_type_is_not():
    for kind, good, bad in (
        (hf_keys.LAYERS, (1, 1024), (0, 1025, True, 8.0, "8", None)),
        (hf_keys.POSITIVE, (1e-9, 1, 10**18), (0, -1.0, 2e18, math.nan, True, "1e4")),
        (hf_keys.AT_LEAST_1, (1, 1e18), (0.99, 2e18, True)),
        (hf_keys.WINDOW, (None, 0, 2**31 - 1), (-1, 2**31, False)),
        (hf_keys.TOKENS, (None, 0, [], [0, 5]), (-1, True, [None], [1, True], "</s>")),
        (hf_keys.TOKEN, (None, 0), (-1, True, [0])),
        (hf_keys.FLAG, (True, False), (0, 1, None, "true")),
        (hf_keys.only(0.0), (0, 0.0), (False, None, 0.1)),
        (hf_keys.only(False), (False,), (0, None, True)),
        (hf_keys.FULL, ([], ["full_attention"]), ("full_attention", ["full_attention", "sliding_attention"])),
    ):
        assert all(kind.fits(value) for value in good) and not any(kind.fits(value) for value in bad), kind.words


# Values that a config.json may have by mistake, by hand or by another program.
ODD = [None, "false", "1e4", "", 0, 1, -1, 2, 8.0, 1.5, math.nan, math.inf, True, False, [], [1], {}, {"a": 1}, 10**30]


def odd_folders(kind):
    """(what is odd, changes of the config.json) for each key of the table, each part of its RoPE, and other keys."""
    keys = [*hf_keys.KEYS, "no_such_key", "model_type"]
    yield from ((f"{key} {value!r}", {key: value}) for key in keys for value in ODD)
    rope = {"rope_type": "llama3", "rope_theta": 2e4} | STRETCHED | {"original_max_position_embeddings": 64}
    if kind == "llama3.2":
        parts = [*rope, "type", "attention_factor", "partial_rotary_factor"]
        for name in ("rope_parameters", "rope_scaling"):
            other = {"rope_parameters": None} if name == "rope_scaling" else {}
            for key, value in itertools.product(parts, ODD):
                yield f"{name}: {key} {value!r}", other | {name: rope | {key: value}}
    yield "both names of its RoPE", {"rope_scaling": rope | {"factor": 2.0}, "rope_parameters": rope}
    yield "two rope_theta", {"rope_theta": 1e5, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}


@pytest.mark.prove
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("qwen2.5",)])
def test_odd_values_are_what_transformers_makes_of_them_or_are_refused_in_one_line(kind, folder, tmp_path, monkeypatch):
    """Each key with each odd value: a model is trained only if transformers makes the same of the file."""
    monkeypatch.setattr(transformers.logging, "warning_once", lambda *_: None)
    shutil.copytree(folder / kind, tmp_path / "odd")
    told = json.loads((tmp_path / "odd" / "config.json").read_text())
    refused = taken = 0
    made: dict = {}
    for what, changes in odd_folders(kind):
        (tmp_path / "odd" / "config.json").write_text(json.dumps(told | changes))
        try:
            sizes = hf.read_sizes(str(tmp_path / "odd"))
            moe = mixture_of(*sizes)
            hf.check_weights(str(tmp_path / "odd"), full_shapes(sizes[0], moe))
        except UsageError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, what
            refused += 1
            continue
        taken += 1
        if set(changes) & {"initializer_range", *hf.KEPT}:
            continue  # without an effect on the function
        if sizes not in made:
            made[sizes] = read_by_ours(tmp_path / "odd")
        try:
            theirs = by_transformers(tmp_path / "odd")
        except Exception as error:  # of many kinds
            assert "expected float, got int" in str(error), f"{kind}: {what}: {error}"
            continue
        with torch.no_grad():
            assert_same(made[sizes](TOKENS), theirs(TOKENS).logits, 1e-10, f"{kind}: {what}")
    assert refused > 500 and taken > 20


def test_the_index_decides_which_files_are_read(folder, tmp_path):
    whole = load_file(folder / "llama3.2" / "model.safetensors")
    other = {name: tensor + 1 for name, tensor in whole.items()}
    like = full_shapes(hf.read_sizes(str(folder / "llama3.2"))[0])

    def found(case, files, index=None, text=None):
        home = tmp_path / case
        home.mkdir()
        shutil.copy(folder / "llama3.2" / "config.json", home)
        for name, tensors in files.items():
            save_file(tensors, home / name)
        if index is not None:
            (home / hf.INDEX).write_text(text or json.dumps({"weight_map": index}))
        try:
            hf.check_weights(str(home), like)
        except UsageError as error:
            assert "\n" not in str(error)
            return str(error).removeprefix(f"--init {home}")
        return all(torch.equal(whole[name], tensor) for name, tensor in hf.read_weights(str(home), set(like)).items())

    a, b = ({name: whole[name] for name in sorted(whole)[half::2]} for half in (0, 1))
    parts = {"a.safetensors": a, "b.safetensors": b}
    index = {name: file for file, tensors in parts.items() for name in tensors}
    assert found("ema", {"model.safetensors": whole, "model_ema.safetensors": other}) is True
    assert found("old", parts | {"model-00001-of-00001.safetensors": other}, index) is True
    assert found("both", {"model.safetensors": whole}, index).startswith(" has both model.safetensors and model.safe")
    assert found("none", parts).startswith(" has no model.safetensors, nor model.safetensors.index.json; give")
    gone = "speaks of b.safetensors, which is not there; copy it again"
    assert found("gone", {"a.safetensors": a}, index).endswith(gone)
    assert found("away", parts, index | {"x": "../../etc/b.safetensors"}).endswith(gone)
    assert found("part", {"a.safetensors": a}, {"x": "a.safetensors"}).startswith(" has 1 *.safetensors, and in none")
    for text in ("{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": []}}'):
        assert found(f"text{len(text)}", parts, {}, text).endswith("is not an index of files; copy it again")
    head = {"lm_head.weight": whole["model.embed_tokens.weight"].clone()}
    assert found("tied", {"model.safetensors": whole | head}) is True
    head["lm_head.weight"][255] += 1
    tied = " ties the output layer to the embedding, but has another lm_head.weight"
    assert found("untied", {"model.safetensors": whole | head}) == tied
    wide = torch.arange(2.0**15 + 2).view(-1, 2)  # one row more than are compared at once
    save_file({hf.EMBEDDING: wide, "lm_head.weight": wide.clamp(max=2**15)}, tmp_path / "untied" / "model.safetensors")
    with pytest.raises(UsageError, match=f"{tied}$"):
        hf.check_weights(str(tmp_path / "untied"), {hf.EMBEDDING: wide})
    whole |= {n: whole[n].to(d) for n, d in zip(whole, (torch.double, torch.half, torch.bfloat16), strict=False)}
    assert found("dtypes", {"model.safetensors": whole}) is True
    whole["model.norm.weight"] = whole["model.norm.weight"].to(torch.int8)
    assert found("int8", {"model.safetensors": whole}) == " has model.norm.weight in I8; floating numbers are needed"


def test_a_name_on_the_hub_is_a_folder_that_is_fetched_or_one_line(folder, tmp_path, monkeypatch):
    def fetch(name, allow_patterns):
        if name == "owner/llama":
            return str(folder / "llama")
        raise OSError("no such model\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    data = ["--data", str(folder / "numbers.txt"), "--seq-len", "16"]
    assert planned(*data, "--init", "owner/llama")[0] == planned(*data, "--init", str(folder / "llama"))[0]
    hf.keep_origin("owner/llama", tmp_path)
    assert (tmp_path / "origin" / "config.json").exists()
    assert "model.norm.weight" in hf.read_weights("owner/llama", {"model.norm.weight"})
    with pytest.raises(UsageError, match="^--init owner/no is no folder, and cannot be fetched .*: no such model$"):
        planned(*data, "--init", "owner/no")
    with pytest.raises(UsageError, match="config.json has no model.safetensors, nor"):
        planned(*data, "--init", str(folder / "llama" / "config.json"))
    with pytest.raises(UsageError, match="^--init nowhere holds no config.json"):
        planned(*data, "--init", "nowhere")


def test_the_table_of_the_readme_is_the_one_that_is_read():
    readme = (Path(hf.__file__).parent / "README.md").read_text()
    assert hf_keys.table() in readme, "run `python 11_5d_trainer/hf_keys.py`, and put its table into the README"
