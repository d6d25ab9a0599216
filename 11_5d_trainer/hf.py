"""To and from Hugging Face: a folder with config.json and *.safetensors, of a Llama or a Mixtral.

    python 11_5d_trainer/hf.py runs/mine exported/           the newest checkpoint of a run, as a Hugging Face model
    torchrun ... 11_5d_trainer/train.py --init folder/       start from such a folder instead of from random weights

The names and layouts of all tensors are the same there and here, so nothing is converted. safetensors is needed for
both, and installed with transformers; without it, `pip install safetensors`.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import chapters  # noqa: F401  finds the chapters below
import checkpoint
import torch
from llama import LlamaConfig
from model import Lazy, full_shapes
from moe_layer import MoEConfig
from options import Config, UsageError
from parts import WEIGHTS
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
# What else may stand in a config.json: it changes nothing about the function that is trained, or is looked at below.
KNOWN = {
    *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_bias"),
    *("bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act", "initializer_range"),
    *("max_position_embeddings", "mlp_bias", "model_type", "num_experts_per_tok", "num_local_experts", "pad_token_id"),
    *("pretraining_tp", "rope_parameters", "rope_scaling", "router_aux_loss_coef", "sliding_window", "torch_dtype"),
    *("transformers_version", "use_cache"),
}
KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # and exported as they came
KINDS = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}


def safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise UsageError("safetensors is not installed; pip install safetensors") from None
    return safetensors


def read_sizes(folder: str) -> tuple[LlamaConfig, tuple[int, int]]:
    """Sizes of the model in a folder, and (experts, experts per token), (0, 0) for a Llama."""
    file = Path(folder) / "config.json"
    if not file.exists():
        raise UsageError(f"--init {folder} holds no config.json; give the folder of a Hugging Face Llama or Mixtral")
    try:
        found = json.loads(file.read_text())
    except ValueError:
        raise UsageError(f"--init {folder}: config.json is not JSON; copy it again") from None
    kind = found.get("model_type")
    if kind not in KINDS:
        raise UsageError(f"--init {folder} is a {kind!r}, but only {' and '.join(KINDS)} can be trained here")
    # Newer files keep what belongs to RoPE in a part of its own.
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    stretched = rope.get("rope_type", rope.get("type", "default"))  # older files call it "type"
    if stretched != "default":
        raise UsageError(f"--init {folder} stretches its RoPE ({stretched}), which is not done here")
    if found.get("sliding_window"):
        raise UsageError(f"--init {folder} has a sliding window of {found['sliding_window']}; attention here sees all")
    if kind == "mixtral" and found.get("num_experts_per_tok") == 1:
        raise UsageError(f"--init {folder} gives each token one expert, weighed by 1: its router would learn nothing")
    found = {"rope_theta": rope.get("rope_theta", 10000.0), "tie_word_embeddings": False} | found
    if kind == "llama":  # what transformers assumes where a file does not say it
        heads = found.get("num_key_value_heads") or found.get("num_attention_heads")
        found = {"rms_norm_eps": 1e-6} | found | ({"num_key_value_heads": heads} if heads else {})
    if missing := [theirs for theirs in FIELDS.values() if theirs not in found]:
        raise UsageError(f"--init {folder}: config.json has no {missing[0]}; copy it again")
    head_dim = found.get("head_dim")
    if head_dim and head_dim * found["num_attention_heads"] != found["hidden_size"]:
        raise UsageError(f"--init {folder} has heads of {head_dim}, not of hidden size / heads, which is not done here")
    if found.get("attention_bias") or found.get("mlp_bias"):
        raise UsageError(f"--init {folder} has biases, which no layer has here")
    if unknown := [key for key in found if found[key] and key not in KNOWN and key not in FIELDS.values()]:
        raise UsageError(f"--init {folder} has {unknown[0]} = {found[unknown[0]]!r}, which means nothing here")
    if found.get("hidden_act", "silu") != "silu":
        raise UsageError(f"--init {folder} uses {found['hidden_act']} in its MLPs; only silu is known here")
    try:
        sizes = LlamaConfig(**{ours: found[theirs] for ours, theirs in FIELDS.items()})
    except ValueError as error:
        raise UsageError(f"--init {folder}: {error}") from None
    return sizes, (found.get("num_local_experts", 0), found.get("num_experts_per_tok", 0))


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


def keep_origin(folder: str, run: Path) -> None:
    """Copy what training does not use and an export gives back: the run may outlive the folder it began with."""
    (run / "origin").mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        if (Path(folder) / name).exists():
            shutil.copy(Path(folder) / name, run / "origin")


def config_json(
    sizes: LlamaConfig, moe: MoEConfig | None, dtype: str, seq_len: int, origin: dict[str, Any]
) -> dict[str, Any]:
    """`origin` is the config.json that the run began with; positions are those it had, or those of the training."""
    kind = "mixtral" if moe else "llama"
    about = {theirs: getattr(sizes, ours) for ours, theirs in FIELDS.items()}
    about |= {"model_type": kind, "architectures": [KINDS[kind]], "hidden_act": "silu", "torch_dtype": dtype}
    about |= {"head_dim": sizes.head_dim, "attention_bias": False, "mlp_bias": False}
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
    home, path, progress, _ = checkpoint.find(run)
    config = Config(**progress.config)
    sizes = LlamaConfig(**progress.sizes)
    moe = config.mixture(sizes)
    if moe and (moe.router != "softmax" or moe.shared):
        raise UsageError(f"{run} has a router {moe.router}; a Mixtral has softmax and no shared experts")
    if moe and moe.top_k == 1:
        raise UsageError(f"{run} weighs its one expert per token by its score; a Mixtral would weigh it by 1")
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
