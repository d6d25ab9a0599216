"""Models of any size: a Hugging Face config.json, single options, and the biases of Qwen2, which Llama has not."""

import functools
import json
import shutil

import paths  # noqa: F401  finds the chapters below
import hf
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
from model import alone
from options import Config, UsageError
from safetensors.torch import load_file
from test_hf import changed, new_model, read_by_ours
from test_train import TEXT, arguments, f64, losses, run

STEPS, CLIP, LR = 5, 0.5, 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The data, and a model of each kind that transformers wrote."""
    home = tmp_path_factory.mktemp("models")
    (home / "numbers.txt").write_text(TEXT)
    for kind in ("llama", "mistral", "qwen2", "mixtral"):
        new_model(home / kind, kind)
        changed(home / kind, initializer_range=0.02)
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
        if type(module).__name__ == "MixtralTopKRouter":
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


# Biases are cut with their columns (tp), held twice where K/V heads are (tp 4), summed over stages' micro-batches (pp),
# cut into shards (zero), and run in chunks (fpdt).
LAYOUTS = [
    ("qwen2", 1, ""),
    ("qwen2", 2, "--tp 2 --sequence-parallel --zero 2"),
    ("qwen2", 2, "--pp 2 --schedule zb-h1 --zero 1"),
    ("qwen2", 4, "--tp 4 --tp-overlap"),
    ("qwen2", 4, "--zero 3 --cp 2 --recompute full"),
    ("qwen2", 2, "--fpdt-chunks 2 --cp 2 --cp-kind ulysses"),
    ("mistral", 2, "--tp 2"),
]
LAYOUTS += [
    ("llama", ranks, layout)
    for ranks, layout in (
        (1, "--recompute selective"),
        (2, ""),
        (2, "--zero 2 --recompute full"),
        (2, "--zero 3"),
        (2, "--tp 2 --sequence-parallel"),
        (2, "--cp 2 --cp-kind ring"),
        (4, "--tp 2 --pp 2"),
        (4, "--cp 4 --cp-kind usp --zero 1"),
        (4, "--pp 2 --schedule zb-h2 --zero 2"),
        (8, "--pp 2 --schedule dualpipe --cp 2 --tp 2 --micro-batch 1 --zero 1"),
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


@pytest.mark.always("llama-2---tp 2 --sequence-parallel", "mixtral-2---ep 2 --zero 3 --balance 0")
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
    assert kind == "mixtral" or parameters(sizes[0]) == sum(weight.numel() for weight in weights.values())
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = read_by_ours(tmp_path / "out")(tokens)
        assert_same(theirs(tokens).logits, logits, 1e-10, "logits of the export")


# ------------------------------------------------------------------------------------------------ sizes, no weights


def planned(*words):
    plan = train.prepare([*words, "--device", "cpu"], 1)
    return plan.model, plan.config


def test_sizes_come_from_a_config_json_and_from_options_and_options_win(folder, tmp_path):
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
    new_model(tmp_path / "mixtral", "mixtral")
    changed(tmp_path / "mixtral", initializer_range=0.02)
    _, config = planned(*data, "--config", str(tmp_path / "mixtral"))
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


def test_what_transformers_assumes_where_a_file_is_silent_is_assumed_here(tmp_path):
    for kind, (_, _) in hf.KINDS.items():
        least = {"model_type": kind, "vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 1}
        least |= {"num_attention_heads": 32, "intermediate_size": 64}
        least |= {"sliding_window": None} if kind == "mistral" else {}
        (tmp_path / "config.json").write_text(json.dumps(least))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        sizes, experts = hf.read_sizes(str(tmp_path))
        for ours, name in hf.FIELDS.items():
            want = theirs.rope_parameters["rope_theta"] if ours == "rope_theta" else getattr(theirs, name)
            assert getattr(sizes, ours) == want, f"{name} of a {kind}"
        assert experts == ((8, 2) if kind == "mixtral" else (0, 0))
        theirs.save_pretrained(tmp_path)  # with all that transformers writes
        if kind != "mistral":
            assert hf.read_sizes(str(tmp_path)) == (sizes, experts)


def test_every_key_is_honoured_or_refused_by_its_name(folder, tmp_path):
    data = ["--data", str(folder / "numbers.txt"), "--seq-len", "16", "--device", "cpu"]

    def refusal(kind, *words, **changes):
        shutil.copy(folder / kind / "config.json", tmp_path)
        changed(tmp_path, **changes)
        with pytest.raises(UsageError) as error:
            train.prepare([*data, "--config", str(tmp_path), *words], 1)
        assert "\n" not in str(error.value)
        return str(error.value).removeprefix(f"--config {tmp_path} ")

    assert refusal("qwen2", use_sliding_window=True, sliding_window=8).startswith("has a sliding window of 8")
    assert refusal("qwen2", layer_types=["full_attention", "sliding_attention"]).startswith("has a sliding window")
    assert refusal("mistral", sliding_window=4096).startswith("has a sliding window of 4096")
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert refusal("llama", rope_parameters=half).startswith("has partial_rotary_factor = 0.5 for its RoPE")
    assert refusal("llama", is_causal=False) == "has is_causal = False, which means nothing here"
    assert refusal("llama", quantization_config={}) == "has quantization_config = {}, which means nothing here"
    assert refusal("llama", router_jitter_noise=0.1).startswith("has router_jitter_noise = 0.1; only 0.0")
    assert refusal("llama", initializer_range=0.3).startswith("has initializer_range = 0.3, but first weights")
    assert refusal("llama", num_hidden_layers="two").startswith("--config")
    assert refusal("llama", vocab_size=65).startswith("knows 65 tokens and the data has 256")
    assert refusal("llama", "--kv-heads", "3") == "--kv-heads 3: heads 4 is not a multiple of kv_heads 3"
    assert refusal("llama", "--preset", "base").startswith("--preset base cannot go with --config")
    init = ["--init", str(folder / "llama")]
    with pytest.raises(UsageError, match="--layers 3 cannot go with --init .*, which decides it; leave it out"):
        train.prepare([*data, *init, "--layers", "3"], 1)
    with pytest.raises(UsageError, match="--config nowhere holds no config.json; give the folder .* or its config"):
        train.prepare([*data, "--config", "nowhere"], 1)
