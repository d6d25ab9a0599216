"""To and from Hugging Face: a folder with config.json and *.safetensors, of a Llama, a Mistral, a Qwen2 or a Mixtral.

    python 11_5d_trainer/hf.py runs/mine exported/           the newest checkpoint of a run, as a Hugging Face model
    torchrun ... 11_5d_trainer/train.py --init folder/       start from such a folder instead of from random weights
    torchrun ... 11_5d_trainer/train.py --config file.json   the sizes of such a model, and random weights

The names and layouts of all tensors are the same there and here, so nothing is converted. A Mistral without its sliding
window is a Llama, and is exported as one. safetensors is needed for weights, and installed with transformers; without
it, `pip install safetensors`. A config.json alone needs neither.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import paths  # noqa: F401  finds the chapters below
import checkpoint
import torch
from llama import LlamaConfig
from model import Lazy, full_shapes
from moe_layer import MoEConfig
from ops import WEIGHTS
from options import Config, UsageError
from torch import Tensor

# Ours -> Hugging Face's, in config.json.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
# What transformers assumes where a file of this kind does not say it; for all of them see `read_sizes`.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rms_norm_eps": 1e-6, "rope_theta": 1e4}),
    "mistral": (
        "MistralForCausalLM",
        {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_key_value_heads": 32}),
    "mixtral": (
        "MixtralForCausalLM",
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}
# Keys that change the model, so that only one value can be trained here; a file may leave them out.
ONLY: dict[str, Any] = {
    "attention_dropout": 0.0,
    "chunk_size_feed_forward": 0,
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "router_jitter_noise": 0.0,
}
# Keys that change nothing about the function that is trained: names, what happens after training, and what `--balance`
# decides here. Any other key is refused by its name.
NOTHING = {
    *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "bos_token_id"),
    *("dtype", "eos_token_id", "id2label", "is_llama_config", "label2id", "max_position_embeddings", "model_type"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp"),
    *("problem_type", "return_dict", "router_aux_loss_coef", "torch_dtype", "transformers.js_config"),
    *("transformers_version", "use_cache"),
}
# Keys that `read_sizes` looks at, besides those of FIELDS and ONLY.
READ = {
    *("attention_bias", "head_dim", "initializer_range", "layer_types", "max_window_layers", "num_experts_per_tok"),
    *("num_local_experts", "rope_parameters", "rope_scaling", "sliding_window", "use_sliding_window"),
}
KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # and exported as they came


def safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise UsageError("safetensors is not installed; pip install safetensors") from None
    return safetensors


def read_sizes(path: str, option: str = "--init") -> tuple[LlamaConfig, tuple[int, int]]:
    """Sizes of the model in a folder or a config.json, and (experts, experts per token), (0, 0) for a dense one.

    Every key is honoured, or changes nothing, or is refused by name in a UsageError: a key that is not read is another
    model, with losses that look plausible.
    """
    where, file = f"{option} {path}", Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        what = "the folder of a Hugging Face model" + " or its config.json" * (option == "--config")
        raise UsageError(f"{where} holds no config.json; give {what}")
    try:
        found = json.loads(file.read_text())
    except ValueError:
        raise UsageError(f"{where}: config.json is not JSON; copy it again") from None
    kind = found.get("model_type") if isinstance(found, dict) else None
    if kind not in KINDS:
        raise UsageError(f"{where} is a {kind!r}, but only {', '.join(KINDS)} can be trained here")
    # Newer files keep what belongs to RoPE in a part of its own; older ones call the kind of stretching "type".
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UsageError(f"{where} says of its RoPE {rope!r}, which means nothing here")
    stretched = rope.get("rope_type", rope.get("type", "default"))
    if stretched != "default":
        raise UsageError(f"{where} stretches its RoPE ({stretched}), which is not done here")
    if turned := [key for key in rope if key not in ("rope_type", "type", "rope_theta")]:
        raise UsageError(f"{where} has {turned[0]} = {rope[turned[0]]!r} for its RoPE, which means nothing here")
    turns = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    given = {key: value for key, value in found.items() if value is not None or key == "sliding_window"}
    every_head = kind == "llama" or "num_key_value_heads" in found  # has its own key and value: said to be null
    found = {"tie_word_embeddings": False} | KINDS[kind][1] | turns | given
    if every_head and "num_attention_heads" in given:
        found["num_key_value_heads"] = given.get("num_key_value_heads", given["num_attention_heads"])
    check_keys(where, kind, found)
    if missing := [theirs for theirs in FIELDS.values() if theirs not in found]:
        raise UsageError(f"{where}: config.json has no {missing[0]}; copy it again")
    head_dim = found.get("head_dim")
    if head_dim and head_dim * found["num_attention_heads"] != found["hidden_size"]:
        raise UsageError(f"{where} has heads of {head_dim}, not of hidden size / heads, which is not done here")
    if option == "--config" and found.get("initializer_range", 0.02) != 0.02:
        what = f"initializer_range = {found['initializer_range']}"
        raise UsageError(f"{where} has {what}, but first weights are drawn with 0.02 here; remove the key")
    try:
        numbers = {ours: found[theirs] for ours, theirs in FIELDS.items()}
        sizes = LlamaConfig(**numbers, qkv_bias=kind == "qwen2")
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where}: {error}") from None
    mixed = kind == "mixtral"
    return sizes, (found["num_local_experts"], found["num_experts_per_tok"]) if mixed else (0, 0)


def check_keys(where: str, kind: str, found: dict[str, Any]) -> None:
    """Raise UsageError for a key that would be another model than the one that is built here."""
    windows = found.get("use_sliding_window") if kind == "qwen2" else found.get("sliding_window")
    if windows or set(found.get("layer_types", ())) - {"full_attention"}:
        raise UsageError(f"{where} has a sliding window of {found.get('sliding_window')}; attention here sees all")
    if found.get("num_experts_per_tok") == 1 and kind == "mixtral":
        raise UsageError(f"{where} gives each token one expert, weighed by 1: its router would learn nothing")
    if (found.get("attention_bias") and kind != "qwen2") or found.get("mlp_bias"):
        raise UsageError(f"{where} has biases, which only q, k and v of a Qwen2 have here")
    if found.get("hidden_act", "silu") != "silu":
        raise UsageError(f"{where} uses {found['hidden_act']} in its MLPs; only silu is known here")
    if other := [key for key, only in ONLY.items() if found.get(key, only) != only]:
        raise UsageError(f"{where} has {other[0]} = {found[other[0]]!r}; only {ONLY[other[0]]} is trained here")
    if unknown := found.keys() - NOTHING - READ - ONLY.keys() - set(FIELDS.values()):
        key = min(unknown)
        raise UsageError(f"{where} has {key} = {found[key]!r}, which means nothing here")


def open_files(folder: str) -> dict[str, Any]:
    """Tensor name -> the open file that has it. No tensor is read yet."""
    found: dict[str, Any] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            tensors = safetensors().safe_open(file, framework="pt")
        except safetensors().SafetensorError as error:
            raise UsageError(f"--init {folder}: {file.name} cannot be read ({error}); copy it again") from None
        found |= dict.fromkeys(tensors.keys(), tensors)
    return found


def check_weights(folder: str, like: dict[str, Tensor]) -> None:
    """Raise UsageError unless the folder has every tensor of `like` in its shape. Reads only what files say of them."""
    found = open_files(folder)
    if missing := sorted(like.keys() - found.keys()):
        files = len(list(Path(folder).glob("*.safetensors")))
        raise UsageError(f"--init {folder} has {files} *.safetensors, and in none of them {missing[0]}")
    for name, tensor in like.items():
        shape, want = found[name].get_slice(name).get_shape(), list(tensor.shape)
        if shape != want:
            raise UsageError(f"--init {folder} has {name} of shape {shape}, but its config.json asks for {want}")


def read_weights(folder: str, names: set[str]) -> Mapping[str, Tensor]:
    """These tensors, which `check_weights` has seen. Each is read when it is asked for."""
    found = open_files(folder)
    return Lazy(sorted(names), lambda name: found[name].get_tensor(name))


def keep_origin(path: str, run: Path) -> None:
    """Copy what training does not use and an export gives back: the run may outlive the folder it began with."""
    (run / "origin").mkdir(exist_ok=True)
    if Path(path).is_file():
        shutil.copy(path, run / "origin" / "config.json")
    for name in ("config.json", "generation_config.json"):
        if (Path(path) / name).exists():
            shutil.copy(Path(path) / name, run / "origin")


def config_json(
    sizes: LlamaConfig, moe: MoEConfig | None, dtype: str, seq_len: int, origin: dict[str, Any]
) -> dict[str, Any]:
    """`origin` is the config.json that the run began with; positions are those it had, or those of the training."""
    kind = "mixtral" if moe else "qwen2" if sizes.qkv_bias else "llama"
    about = {theirs: getattr(sizes, ours) for ours, theirs in FIELDS.items()}
    about |= {"model_type": kind, "architectures": [KINDS[kind][0]], "hidden_act": "silu", "torch_dtype": dtype}
    about |= {"head_dim": sizes.head_dim}
    about |= {"use_sliding_window": False} if sizes.qkv_bias else {"attention_bias": False, "mlp_bias": False}
    about |= {"max_position_embeddings": seq_len} | {key: origin[key] for key in KEPT if key in origin}
    if moe:
        about |= {"num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k}
    return about


def in_files(sizes: dict[str, int], most: int) -> dict[str, list[str]]:
    """File -> its tensors: in their order, as many as fit into `most` bytes. Several files are numbered."""
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and sum(sizes[other] for other in groups[-1]) + size > most:
            groups.append([])
        groups[-1].append(name)
    count = len(groups)
    if count == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{count:05}.safetensors": names for i, names in enumerate(groups, 1)}


def export(run: str, folder: str, dtype: torch.dtype | None = None, file_bytes: int = 5 * 10**9) -> str:
    """Write the newest whole checkpoint of a run as a Hugging Face model. Returns the checkpoint's name.

    Large models become several files of at most `file_bytes`; one of them is in memory at a time. In fp32, a run of
    bf16-master gives its masters. Raises UsageError where there is no checkpoint, or a run in `folder`.
    """
    home, path, progress = checkpoint.find_aloud(run)
    config = Config(**progress.config)
    sizes = LlamaConfig(**progress.sizes)
    moe = config.mixture(sizes)
    if moe and (moe.router != "softmax" or moe.shared):
        raise UsageError(f"{run} has a router {moe.router}; a Mixtral has softmax and no shared experts")
    if moe and moe.top_k == 1:
        raise UsageError(f"{run} weighs its one expert per token by its score; a Mixtral would weigh it by 1")
    if moe and sizes.qkv_bias:
        raise UsageError(f"{run} has experts and biases of q, k and v; a Mixtral has no biases")
    dtype = dtype or WEIGHTS.get(config.precision, torch.float32)
    like = full_shapes(sizes, moe)
    weights = checkpoint.load(path, like, dtype)["weights"]
    if config.precision == "bf16-master" and dtype == torch.float32:
        states = checkpoint.load(path, like, torch.bfloat16)["optimizer"]
        weights = Lazy(like, lambda name: states[name]["master"])
    out = Path(folder)
    if (out / "checkpoints").exists() or (out / "log.jsonl").exists():
        raise UsageError(f"{folder} holds a run, whose config.json would be lost; export to another folder")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model*.safetensors*"):  # of an export before this one: a reader would mix them
        old.unlink()
    files = in_files({name: t.numel() * dtype.itemsize for name, t in like.items()}, file_bytes)
    for file, names in files.items():
        safetensors().torch.save_file({n: weights[n] for n in names}, out / file, metadata={"format": "pt"})
    if len(files) > 1:
        size = sum(t.numel() for t in like.values()) * dtype.itemsize
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    kind = str(dtype).removeprefix("torch.")
    origin = home / "origin" / "config.json"
    came = json.loads(origin.read_text()) if origin.exists() else {}
    about = config_json(sizes, moe, kind, config.seq_len, came)
    (out / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    if (home / "tokenizer").exists():
        shutil.copytree(home / "tokenizer", out, dirs_exist_ok=True)
    if (home / "origin" / "generation_config.json").exists():
        shutil.copy(home / "origin" / "generation_config.json", out)
    return path.name


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"hf.py: {message}\n")


def main() -> None:
    parser = OneLineParser(description="Write the newest checkpoint of a run as a Hugging Face model.")
    parser.add_argument("run", help="folder of a run, or one checkpoint in it")
    parser.add_argument("folder", help="where to write config.json and *.safetensors")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as in the checkpoint")
    args = parser.parse_args()
    try:
        name = export(args.run, args.folder, getattr(torch, args.dtype) if args.dtype else None)
    except UsageError as error:
        parser.error(str(error))
    print(f"{name} of {args.run} written to {args.folder}")


if __name__ == "__main__":
    main()
