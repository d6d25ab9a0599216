"""To and from Hugging Face: transformers reads what the trainer wrote, and the trainer starts from what it wrote."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import checkpoint
import data
import hf
import hf_keys
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
import transformers
from data import Sampler, load_corpus
from harness.meter import peak_memory
from harness.ranks import run_ranks
from harness.reference import assert_same
from model import alone, full_shapes
from moe_layer import MoEConfig
from moe_llama import cut_experts
from options import Config, UsageError
from safetensors.torch import load_file, save_file
from test_bad_input import refusal
from test_train import SMALL, TEXT, arguments, losses, run, train_on

TOKENS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
STRETCHED = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
MODELS = {  # a class of transformers, and how the model differs from a plain Llama
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", dict(sliding_window=None, head_dim=8)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2": ("Qwen2Config", {}),
    # Of the six angles of a head one is kept, one mixed and four are slowed down.
    "llama3.2": (
        "LlamaConfig",
        dict(head_dim=12, tie_word_embeddings=True, max_position_embeddings=256)
        | dict(rope_parameters=STRETCHED | dict(original_max_position_embeddings=64)),
    ),
    "qwen2.5": ("Qwen2Config", dict(use_mrope=False, tie_word_embeddings=True, max_window_layers=1)),
    "qwen3": ("Qwen3Config", dict(head_dim=12)),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True),
    ),
}


def read_by_transformers(folder):
    """In float64. Its norms and softmaxes round to float32 all the same, so 1e-6 is as near as it and ours can be."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    config._experts_implementation = "eager"
    options = dict(dtype=torch.float64, attn_implementation="eager", local_files_only=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, **options).eval()


def mixture_of(sizes, experts):
    return MoEConfig(sizes.hidden, sizes.intermediate, *experts) if experts[0] else None


def read_by_ours(folder):
    sizes, experts = hf.read_sizes(str(folder))
    moe = mixture_of(sizes, experts)
    model = alone(sizes, moe).double()
    weights = hf.read_weights(str(folder), set(full_shapes(sizes, moe)))
    model.load_state_dict(cut_experts(model, weights, None), strict=False)
    return model


@torch.no_grad()
def loss_by_transformers(model, samples):
    tokens, labels = samples
    return F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten()).item()


def new_model(folder, kind="llama", tied=False, **saving):
    """A folder that transformers wrote, with lively weights."""
    torch.manual_seed(1)
    sizes = SIZES | dict(vocab_size=256, tie_word_embeddings=tied, initializer_range=0.3, rope_theta=20000.0)
    name, changes = MODELS[kind]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes | changes))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder, **saving)
    return str(folder)


# ------------------------------------------------------------------------------------------------------------ export

# What is exported does not depend on the layout that trained it, so each kind of model comes from another layout.
EXPORTS = {
    "llama": (2, "--tp 2 --sequence-parallel --zero 1"),
    "tied": (2, "--pp 2 --tied"),
    "mixtral": (4, "--experts 4 --ep 2 --pp 2 --balance 0"),
}


@pytest.mark.prove
@pytest.mark.parametrize("kind", EXPORTS)
def test_transformers_gives_the_logits_and_the_validation_loss_of_an_exported_run(kind, text, tmp_path):
    ranks, layout = EXPORTS[kind]
    words = [*arguments(text, steps=3, warmup=0, lr=0.1, clip=0, eval_samples=8), *layout.split()]
    log, folder = train_on(ranks, [*words, "--out", str(tmp_path / "run")], tied=kind == "tied")
    assert hf.export(folder, str(tmp_path / "out")) == "step-000003"
    theirs = read_by_transformers(tmp_path / "out")
    assert type(theirs).__name__ == hf_keys.KINDS["mixtral" if kind == "mixtral" else "llama"][0]
    assert theirs.config.tie_word_embeddings == (kind == "tied")
    with torch.no_grad():
        assert_same(read_by_ours(tmp_path / "out")(TOKENS), theirs(TOKENS).logits, 1e-6, "logits")
    held_out = Sampler(load_corpus(Config(data=text, seq_len=16)).val, 16, 256, 0)
    want = loss_by_transformers(theirs, held_out.samples(list(range(8))))
    assert_same(log[-1]["val_loss"], want, 1e-6, "validation loss at the end of the run")


@pytest.mark.prove
def test_a_large_model_is_exported_in_several_files_of_which_one_is_in_memory_at_a_time(text, tmp_path):
    _, folder = train_on(2, [*arguments(text, steps=1, warmup=0), "--tp", "2", "--out", str(tmp_path / "run")])
    out, file_bytes = tmp_path / "out", 70_000
    hf.export(folder, str(out))
    whole = load_file(out / "model.safetensors")
    with peak_memory() as memory:
        hf.export(folder, str(out), file_bytes=file_bytes)  # into the same folder: the one file must go
    files = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    assert len(files) > 3 and all(sum(t.nbytes for t in tensors.values()) <= file_bytes for tensors in files.values())
    sizes = [tensor.nbytes for tensor in whole.values()]
    assert memory.peak <= file_bytes + max(sizes) < sum(sizes) / 1.5
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(sizes)
    hf.export(folder, str(tmp_path / "twice"), file_bytes=file_bytes)
    (tmp_path / "twice" / "tokenizer.json").write_text("another one's")
    hf.export(folder, str(tmp_path / "twice"))  # and the other way round
    assert sorted(file.name for file in (tmp_path / "twice").iterdir()) == ["config.json", "model.safetensors"]
    again = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert again.keys() == whole.keys() and all(torch.equal(again[name], whole[name]) for name in whole)
    with torch.no_grad():
        assert_same(read_by_transformers(out)(TOKENS).logits, read_by_ours(out)(TOKENS), 1e-6, "logits")


# ------------------------------------------------------------------------------------------------------------ import

IMPORTS = [  # more layouts, and five steps: test_sizes.py; here a validation before the first
    ("tied", 2, "--zero 3"),
    ("mixtral", 4, "--ep 2 --pp 2 --zero 2"),
]


@pytest.mark.prove
@pytest.mark.parametrize(("kind", "ranks", "layout"), IMPORTS, ids=lambda value: str(value))
def test_a_run_from_a_hugging_face_folder_starts_with_the_losses_of_transformers(kind, ranks, layout, text, tmp_path):
    folder = new_model(tmp_path / "model", "mixtral" if kind == "mixtral" else "llama", tied=kind == "tied")
    words = [*arguments(text, steps=1, warmup=0, micro_batch=4, eval_samples=8), *layout.split(), "--init", folder]
    log, _ = run_ranks(ranks, run, [*words, "--out", str(tmp_path / "run")], {})[0]
    theirs, corpus = read_by_transformers(folder), load_corpus(Config(data=text, seq_len=16))
    held_out, training = (Sampler(tokens, 16, 256, 0) for tokens in (corpus.val, corpus.train))
    want = loss_by_transformers(theirs, held_out.samples(list(range(8))))
    assert_same(log[0]["val_loss"], want, 1e-6, "validation loss before the first step")
    first = [training.window(i) for i in range(8)]
    assert_same(losses(log)[1][0], loss_by_transformers(theirs, training.samples(first)), 1e-6, "first loss")


def evaluated(words):
    return train.evaluate_alone(train.agree(train.prepare([*words, "--evaluate"], dist.get_world_size()))[0])


def test_a_model_in_several_files_is_read_and_comes_back_bit_by_bit(text, tmp_path):
    folder = new_model(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    words = [*arguments(text, steps=1, warmup=0, precision="fp32", lr=1e-30, min_lr=0), "--init", folder]
    log, run_folder = run_ranks(2, run, [*words, "--tp", "2", "--out", str(tmp_path / "run")], {})[0]
    sent = {n: t for file in (tmp_path / "model").glob("*.safetensors") for n, t in load_file(file).items()}
    said = run_ranks(2, evaluated, words)  # 5 samples on one, 4 on the other
    shutil.rmtree(folder)
    said += run_ranks(1, evaluated, ["--resume", run_folder, "--tp", "1"])
    assert [float(line.split("loss ")[1].split()[0]) for line in said] == pytest.approx(
        [log[-1]["val_loss"]] * 3, abs=1e-5
    )
    hf.export(run_folder, str(tmp_path / "out"))
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == sent.keys()
    assert all(torch.equal(back[name], sent[name]) for name in sent)
    hf.export(run_folder, str(tmp_path / "out"), file_bytes=20_000)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    again = hf.read_weights(str(tmp_path / "out"), set(sent))
    assert all(torch.equal(again[name], sent[name]) for name in sent)
    index = json.loads((tmp_path / "out" / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in sent.values())


def test_files_are_filled_to_the_last_byte_and_a_tensor_that_is_larger_has_its_own():
    assert hf.in_files({"a": 4, "b": 4}, 8) == {"model.safetensors": ["a", "b"]}
    several = [*hf.in_files({"a": 4, "b": 4, "c": 9, "d": 1}, 8).items()]
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert several == [*zip(names, (["a", "b"], ["c"], ["d"]), strict=True)]


@pytest.mark.always("llama3.2", "qwen3_moe")
@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_goes_through_a_run_with_every_size_it_came_with(kind, text, tmp_path):
    folder = new_model(tmp_path / "model", kind)
    words = [*arguments(text, steps=1, warmup=0), "--init", folder, "--out", str(tmp_path / "run")]
    _, run_folder = run_ranks(1, run, words, {})[0]
    hf.export(run_folder, str(tmp_path / "out"))
    assert hf.read_sizes(str(tmp_path / "out")) == hf.read_sizes(folder)
    assert hf.read_sizes(folder)[0].rope_theta in (10000.0, 20000.0)
    for home in (folder, tmp_path / "out"):
        with torch.no_grad():
            got, want = read_by_ours(home)(TOKENS), read_by_transformers(home)(TOKENS).logits
        assert_same(got, want, 1e-5, f"logits of {home}")
    hf.export(run_folder, str(tmp_path / "parts"), file_bytes=20_000)
    index = json.loads((tmp_path / "parts" / hf.INDEX).read_text())
    assert index["weight_map"].keys() == load_file(tmp_path / "out" / "model.safetensors").keys(), "their names"


def changed(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folders_that_cannot_be_trained_are_refused_in_one_line_before_any_process_group(text, tmp_path):
    good = tmp_path / "good"
    new_model(good)
    weights = load_file(good / "model.safetensors")
    words, bias = arguments(text), "model.layers.0.self_attn.o_proj.bias"

    def said_of(name, **changes):
        folder = tmp_path / name
        shutil.copytree(good, folder)
        changed(folder, **changes)
        if name == "missing":
            save_file({n: t for n, t in weights.items() if "layers.1.mlp.up" not in n}, folder / "model.safetensors")
        if name == "other":
            save_file(weights | {"model.norm.weight": torch.ones(7)}, folder / "model.safetensors")
        if name == "more":
            save_file(weights | {bias: torch.ones(4)}, folder / "model.safetensors")
        if name == "none":
            (folder / "model.safetensors").unlink()
        if name == "cut":
            file = folder / "model.safetensors"
            file.write_bytes(file.read_bytes()[:1000])
        return refusal([*words, "--init", str(folder)]).removeprefix(f"--init {folder} ")

    up = "model.layers.1.mlp.up_proj.weight"
    assert said_of("missing") == f"has 1 *.safetensors, and in none of them {up}"
    assert said_of("more") == f"has {bias}, which the model of its config.json does not have"
    assert said_of("none").startswith("has no model.safetensors, nor model.safetensors.index.json")
    assert said_of("other") == "has model.norm.weight of shape [7], but its config.json asks for [32]"
    assert said_of("deeper", num_hidden_layers=3).startswith("has 1 *.safetensors, and in none of them model.layers.2.")
    query = "model.layers.0.self_attn.q_proj.weight"
    assert said_of("wide", head_dim=16) == f"has {query} of shape [32, 32], but its config.json asks for [64, 32]"
    assert said_of("biased", attention_bias=True).startswith("has attention_bias = True; only false is trained here")
    assert said_of("gelu", hidden_act="gelu").startswith("has hidden_act = 'gelu'; only \"silu\" is trained here")
    yarn = {"rope_type": "yarn", "factor": 8.0}
    assert said_of("long", rope_parameters=yarn).startswith("stretches its RoPE (yarn), but only as Llama 3 does")
    half = {"rope_type": "llama3", "factor": 8.0}
    assert said_of("half", rope_parameters=half) == "has a RoPE of type llama3 without low_freq_factor; copy it again"
    old = {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert said_of("odd", rope_parameters="linear") == "says of its RoPE 'linear', which means nothing here"
    assert said_of("older", **old).startswith("stretches its RoPE (linear)")
    assert (
        said_of("dropping", attention_dropout=0.1)
        == "has attention_dropout = 0.1; only 0.0 is trained here (no dropout)"
    )
    assert said_of("scaled", logit_scale=2.0).startswith("has logit_scale = 2.0")
    assert said_of("window", sliding_window=16).startswith("has sliding_window = 16; only null is trained here")
    one = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1}
    assert said_of("switch", **one).startswith("gives each token one expert")
    assert "cannot be read" in said_of("cut")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # which old files hold as well
    save_file(weights | old, good / "model.safetensors")
    train.prepare([*words, "--init", str(good)], 1)
    narrow = ["--kernels", "triton", "--precision", "fp32"]
    head = "--kernels triton: head dim 8 is no multiple of 16 from 32 to 256.*--kernels"
    assert re.search(head, refusal([*words, *narrow, "--init", str(good)]))
    nothing = "holds no config.json; give the folder of a Hugging Face model"
    assert nothing in refusal([*words, "--init", str(tmp_path)])


@pytest.mark.always("1---zero 1")
@pytest.mark.parametrize(("ranks", "layout"), [(1, "--zero 1"), (2, "--zero 3"), (4, "--tp 2 --zero 2")])
def test_the_masters_of_a_bf16_run_begin_and_end_in_fp32(ranks, layout, text, tmp_path):
    folder = new_model(tmp_path / "model")
    sent = load_file(tmp_path / "model" / "model.safetensors")
    words = [*arguments(text, steps=1, warmup=0, precision="bf16-master", lr=1e-30, min_lr=0), "--init", folder]
    words += ["--bucket-mib", "0.01"]  # several buckets
    _, run_folder = run_ranks(ranks, run, [*words, *layout.split(), "--out", str(tmp_path / "run")], {})[0]
    hf.export(run_folder, str(tmp_path / "out"), torch.float32)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == sent.keys()
    assert all(torch.equal(back[name], sent[name]) for name in sent)
    hf.export(run_folder, str(tmp_path / "out"))  # in the run's own precision
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(back[name], sent[name].bfloat16()) for name in sent)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    half, found = Config(precision="bf16-master"), {"weights": {"b": 2}, "optimizer": {"a": {"master": 1}, "b": {}}}
    with mock.patch.object(checkpoint, "load", lambda *_: found):
        assert dict(hf.read_checkpoint(tmp_path, {"a": 0, "b": 0}, torch.float32, half)) == {"a": 1, "b": 2}


def test_what_training_does_not_use_comes_back_as_it_was(text, tmp_path):
    folder = new_model(tmp_path / "model")
    changed(tmp_path / "model", max_position_embeddings=777, bos_token_id=3, eos_token_id=[7, 8], pad_token_id=0)
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.25}')
    words = [*arguments(text, steps=1, warmup=0), "--init", folder, "--out", str(tmp_path / "run")]
    with pytest.raises(UsageError, match=f"--out {folder} is --init {folder}, whose config.json would be lost; use "):
        train.prepare([*words[:-1], folder], 1)
    (tmp_path / "run" / "meter.json").mkdir(parents=True)  # so it cannot be written, which ends nothing
    _, run_folder = run_ranks(1, run, [*words, "--meter"], {})[0]
    shutil.rmtree(folder)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "chat_template.jinja").touch()  # of another export
    hf.export(run_folder, str(tmp_path / "out"), file_bytes=20_000)
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [about.get(key) for key in hf.KEPT] == [777, 3, [7, 8], 0]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"temperature": 0.25}
    _, own = train_on(1, [*arguments(text, steps=1, warmup=0), "--out", str(tmp_path / "own")])
    hf.export(own, str(tmp_path / "out"))
    assert not {"generation_config.json", hf.INDEX} & {file.name for file in (tmp_path / "out").iterdir()}
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [about[key] for key in ("max_position_embeddings", "bos_token_id", "eos_token_id")] == [16, None, 0]
    for target in (own, run_folder):
        before = (tmp_path / "own" / "config.json").read_text()
        with pytest.raises(UsageError, match="holds a run, whose config.json would be lost; export to another folder"):
            hf.export(own, target)
        assert (tmp_path / "own" / "config.json").read_text() == before


def test_the_command_exports_in_the_dtype_that_was_asked_for_and_says_what_it_wrote_or_why_not(monkeypatch, capsys):
    export = mock.Mock(return_value="step-000001")
    monkeypatch.setattr(hf, "export", export)
    for words, dtype in (([], None), (["--dtype", "bfloat16"], torch.bfloat16)):
        monkeypatch.setattr(sys, "argv", ["hf.py", "run", "out", *words])
        hf.main()
        assert export.call_args == mock.call("run", "out", dtype)
        assert capsys.readouterr() == ("step-000001 of run written to out\n", "")
    full = OSError(28, "No space left on device", "out/model.safetensors")
    why = "out/model.safetensors cannot be written (No space left on device); the export is not complete"
    for error, line in ((full, why), (UsageError("run holds no checkpoint"), "run holds no checkpoint")):
        export.side_effect = error
        with pytest.raises(SystemExit, match="2"):
            hf.main()
        assert capsys.readouterr().err == f"hf.py: {line}\n"


def test_a_mixture_that_no_mixtral_is_is_not_exported(tmp_path):
    tiny = train.PRESETS["tiny"]
    for config, sizes, line in (
        (Config(experts=4, router="sigmoid"), tiny, "run has a router sigmoid; a Mixtral has softmax"),
        (Config(experts=4, top_k=1), tiny, "run weighs its one expert per token by its score"),
        (Config(experts=4), dataclasses.replace(tiny, qkv_bias=True), "run has experts and biases of q, k and v"),
    ):
        progress = checkpoint.Progress(1, 8, 1, dataclasses.asdict(config), dataclasses.asdict(sizes))
        with pytest.raises(UsageError, match=f"^{line}"):
            hf.write_model("run", tmp_path / "out", None, 1, tmp_path, tmp_path, progress)


def test_a_run_without_a_tokenizer_of_its_own_ends_its_texts_only_if_they_are_bytes(tmp_path):
    for numbers, name, end in ((False, "", 0), (True, "", None), (None, "", None), (False, "theirs", None)):
        config = dataclasses.asdict(Config(tokenizer=name))
        assert hf.end_of_text(tmp_path, checkpoint.Progress(1, 8, 1, config, {}, numbers=numbers)) == end


# --------------------------------------------------------------------------------------------------------- tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-pair tokenizer of 300 tokens, trained on the test's own text, with a token that begins a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>").save_pretrained(folder)
    return str(folder)


@pytest.mark.prove
def test_a_hugging_face_tokenizer_reads_the_text_and_gives_it_back(text, tokenizer, tmp_path):
    corpus = load_corpus(Config(data=text, tokenizer=tokenizer, seq_len=16))
    assert corpus.vocab_size == 300 and len(corpus.train) < 0.6 * 0.9 * len(TEXT)
    assert corpus.decode(corpus.train.tolist()) + corpus.decode(corpus.val.tolist()) == TEXT
    words = [*arguments(text, tokenizer=tokenizer, steps=4, sample=8), "--out", str(tmp_path / "run")]
    log, _ = run_ranks(2, run, [*words, "--tp", "2"], SMALL | {"vocab_size": 300})[0]
    assert abs(log[0]["val_loss"] - torch.tensor(300.0).log().item()) < 0.2
    prompt = corpus.decode(corpus.val[:16].tolist())
    assert (tmp_path / "run" / "sample.txt").read_text().startswith(prompt)


def test_tokenizers_that_do_not_fit_are_refused_in_one_line(text, tokenizer, tmp_path, monkeypatch):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Grüße ".encode("latin-1") * 100)
    cases = [
        (["--data", text, "--tokenizer", str(tmp_path)], "cannot be loaded: "),
        (["--data", str(latin), "--tokenizer", tokenizer], r"latin.txt is not UTF-8 \(at byte 2\); convert it$"),
        (["--data", text, "--tokenizer", tokenizer, "--init", new_model(tmp_path / "m")], "--init .* the data has 300"),
    ]
    for words, line in cases:
        assert re.search(line, refusal(words))
    size = Path(text).stat().st_size
    monkeypatch.setattr(data, "MOST_TEXT", size)
    load_corpus(Config(data=text, tokenizer=tokenizer, seq_len=16))
    monkeypatch.setattr(data, "MOST_TEXT", size - 1)
    assert "which every process would encode for itself" in refusal(["--data", text, "--tokenizer", tokenizer])
