"""To and from Hugging Face: a folder with config.json and *.safetensors (Llama, Mistral, Qwen2, 3, Mixtral).

    python 11_5d_trainer/hf.py runs/mine exported/           the newest checkpoint of a run, as a Hugging Face model
    torchrun ... 11_5d_trainer/train.py --init folder/       start from such a folder (or owner/model on the Hub)
    torchrun ... 11_5d_trainer/train.py --config file.json   the sizes of such a model, and random weights

The names and layouts of all tensors are the same there and here, so nothing is converted; only the experts of a Qwen3
have other names (hf_keys.py: what each key of a config.json does). A Mistral without its sliding window is a Llama, and
is exported as one. safetensors is needed for weights, and installed with transformers; without
it, `pip install safetensors`. A config.json alone needs neither.
"""

import json
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Ctrl-C: no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import paths  # noqa: F401  finds the chapters below
import checkpoint
import hf_keys
import torch
from llama import LlamaConfig
from model import Lazy, full_shapes
from moe_layer import MoEConfig
from ops import WEIGHTS
from options import Config, OneLineParser, UsageError
from sources import KEPT as TOKENIZER_FILES
from sources import Tokenizer, load_tokenizer
from torch import Tensor

# Our name -> Hugging Face's, in config.json; hf_keys.py has all keys of a file.
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
KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # exported unchanged


def safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise UsageError("safetensors is not installed; pip install safetensors") from None
    return safetensors


@lru_cache
def folder_of(name: str) -> Path:
    """The folder of --init, or of a name on the Hub, as owner/model, whose files are downloaded once."""
    path = Path(name)
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise UsageError(f"--init {name} is no folder; to fetch it from the Hub, pip install huggingface_hub") from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # many reasons, some of them long
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"--init {name} is no folder, and cannot be fetched from the Hub: {reason}") from None


def read_sizes(path: str, option: str = "--init") -> tuple[LlamaConfig, tuple[int, int]]:
    """Sizes of the model in a folder or a config.json, and (experts, experts per token), (0, 0) for a dense one.

    Every key is honoured, or changes nothing, or is refused by name in a UsageError (hf_keys.py).
    """
    where = f"{option} {path}"
    file = folder_of(path) if option == "--init" else Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        what = "the folder of a Hugging Face model" + " or its config.json" * (option == "--config")
        raise UsageError(f"{where} holds no config.json; give {what}")
    try:
        text = file.read_text()
    except (OSError, ValueError):
        raise UsageError(f"{where}: config.json cannot be read; copy it again") from None
    kind, found = hf_keys.checked(where, hf_keys.parsed(where, text))
    numbers = {ours: found[theirs] for ours, theirs in FIELDS.items() if theirs != "intermediate_size"}
    numbers["intermediate"] = found["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"]
    if found["head_dim"] * found["num_attention_heads"] != found["hidden_size"]:
        numbers["own_head_dim"] = found["head_dim"]
    numbers["rope_scaling"] = found["rope_scaling"]
    try:
        sizes = LlamaConfig(**numbers, qkv_bias=kind == "qwen2", qk_norm=kind in ("qwen3", "qwen3_moe"))
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if kind not in hf_keys.MIXTURES:
        return sizes, (0, 0)
    return sizes, (found[EXPERTS[kind]], found["num_experts_per_tok"])


EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
INDEX = "model.safetensors.index.json"


def files_of(folder: str) -> list[Path]:
    """The files that hold the model: model.safetensors, or those that the index names. Other files beside
    them (an older export, a moving average) are not its weights."""
    home = folder_of(folder)
    one = home / "model.safetensors"
    index = home / INDEX
    if one.exists() and index.exists():
        raise UsageError(f"--init {folder} has both {one.name} and {INDEX}; remove the one that is old")
    if one.exists():
        return [one]
    if not index.exists():
        raise UsageError(f"--init {folder} has no model.safetensors, nor {INDEX}; give the folder of a whole model")
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [home / name for name in sorted(names)]
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        raise UsageError(f"--init {folder}: {INDEX} is not an index of files; copy it again") from None
    for file in files:
        if file.parent != home or not file.is_file():
            raise UsageError(f"--init {folder}: {INDEX} speaks of {file.name}, which is not there; copy it again")
    return files


def open_files(folder: str) -> dict[str, Any]:
    """Our name of a tensor -> (the open file that has it, its name there). No tensor is read yet."""
    found: dict[str, Any] = {}
    files = files_of(folder)
    kind = json.loads((folder_of(folder) / "config.json").read_text())["model_type"]
    for file in files:
        try:
            tensors = safetensors().safe_open(file, framework="pt")
        except safetensors().SafetensorError as error:
            reason = str(error).split("\n")[0]
            raise UsageError(f"--init {folder}: {file.name} cannot be read ({reason}); copy it again") from None
        found |= {our_name(kind, name): (tensors, name) for name in tensors.keys()}  # noqa: SIM118  no dictionary
    return found


# Parts of the names of an expert's tensors: Mixtral's, which are ours, and Qwen3's.
QWEN3_MOE = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def their_name(kind: str, name: str) -> str:
    """From our name of a tensor to its name in a file of this kind."""
    if kind != "qwen3_moe":
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(\.experts\.\d+)\.(w\d)\.", lambda found: f"{found[1]}.{QWEN3_MOE[found[2]]}.", name)


def our_name(kind: str, name: str) -> str:
    if kind != "qwen3_moe":
        return name
    ours = {theirs: ours for ours, theirs in QWEN3_MOE.items()}
    name = re.sub(r"(\.experts\.\d+)\.(\w+_proj)\.", lambda found: f"{found[1]}.{ours[found[2]]}.", name)
    return re.sub(r"\.mlp\.(gate|experts)\.", r".block_sparse_moe.\1.", name)


def check_weights(folder: str, like: dict[str, Tensor]) -> None:
    """Raise UsageError unless the folder has every tensor of `like` in its shape, and no other. Reads only
    the files' headers, and the output layer where the model ties it to the embedding."""
    found = open_files(folder)
    if missing := sorted(like.keys() - found.keys()):
        raise UsageError(f"--init {folder} has {len(files_of(folder))} *.safetensors, and in none of them {missing[0]}")
    extra = {name for name in found.keys() - like.keys() if not name.endswith(COMPUTED)} - {"lm_head.weight"}
    if extra:
        raise UsageError(f"--init {folder} has {min(extra)}, which the model of its config.json does not have")
    for name, tensor in like.items():
        file, theirs = found[name]
        header = file.get_slice(theirs)
        shape = header.get_shape()
        want = list(tensor.shape)
        if shape != want:
            raise UsageError(f"--init {folder} has {theirs} of shape {shape}, but its config.json asks for {want}")
        if header.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise UsageError(f"--init {folder} has {theirs} in {header.get_dtype()}; floating numbers are needed")
    if "lm_head.weight" in found.keys() - like.keys():
        head, embedding = (file.get_slice(name) for file, name in (found["lm_head.weight"], found[EMBEDDING]))
        same = head.get_shape() == embedding.get_shape()
        rows = range(0, embedding.get_shape()[0], 2**14)
        if not same or any(not torch.equal(head[i : i + 2**14], embedding[i : i + 2**14]) for i in rows):
            raise UsageError(f"--init {folder} ties the output layer to the embedding, but has another lm_head.weight")


EMBEDDING = "model.embed_tokens.weight"
COMPUTED = ".rotary_emb.inv_freq"  # RoPE's frequencies, which old files also have


def read_weights(folder: str, names: set[str]) -> Mapping[str, Tensor]:
    """These tensors, which `check_weights` has checked. Each is read on access."""
    found = open_files(folder)

    def read(name: str) -> Tensor:
        file, theirs = found[name]
        return file.get_tensor(theirs)

    return Lazy(sorted(names), read)


def keep_origin(path: str, run: Path) -> None:
    """Copy what training does not use but an export needs: the run may outlive the folder it began with."""
    (run / "origin").mkdir(exist_ok=True)
    if Path(path).is_file():
        shutil.copy(path, run / "origin" / "config.json")
    for name in ("config.json", "generation_config.json"):
        if (folder_of(path) / name).exists():
            shutil.copy(folder_of(path) / name, run / "origin")


def config_json(
    sizes: LlamaConfig, moe: MoEConfig | None, dtype: str, seq_len: int, origin: dict[str, Any]
) -> dict[str, Any]:
    """`origin` is the config.json that the run began with; positions are its own, or the training's."""
    kind = kind_of(sizes, moe)
    about = {theirs: getattr(sizes, ours) for ours, theirs in FIELDS.items()}
    about |= {"model_type": kind, "architectures": [hf_keys.KINDS[kind][0]], "hidden_act": "silu"}
    about |= {"head_dim": sizes.head_dim, "torch_dtype": dtype}
    about |= {"use_sliding_window": False} if kind in hf_keys.QWENS else {}
    about |= {"sliding_window": None} if kind in ("mistral", "mixtral") else {}
    about |= {"attention_bias": False, "mlp_bias": False} if kind == "llama" else {}
    about |= {"max_position_embeddings": seq_len} | {key: origin[key] for key in KEPT if key in origin}
    if sizes.rope_scaling:
        scaling = dict(zip(hf_keys.SCALING, sizes.rope_scaling, strict=True))
        about |= {"rope_scaling": {"rope_type": "llama3", "rope_theta": sizes.rope_theta} | scaling}
    if moe:
        about |= {EXPERTS[kind]: moe.experts, "num_experts_per_tok": moe.top_k}
    if kind == "qwen3_moe":
        about |= {"moe_intermediate_size": sizes.intermediate, "norm_topk_prob": True}
    return about


def kind_of(sizes: LlamaConfig, moe: MoEConfig | None) -> str:
    """The model_type of an export."""
    if sizes.qk_norm:
        return "qwen3_moe" if moe else "qwen3"
    if moe:
        return "mixtral"
    if sizes.qkv_bias:
        return "qwen2"
    return "mistral" if sizes.hidden % sizes.heads else "llama"  # a Llama's heads divide the hidden size


def read_checkpoint(path: Path, like: dict[str, Tensor], dtype: torch.dtype, config: Config) -> Mapping[str, Tensor]:
    """The weights, each read on access. In fp32, a run of bf16-master gives its master weights where it has
    them: weights that are not trained have none."""
    weights = checkpoint.load(path, like, dtype)["weights"]
    if config.precision != "bf16-master" or dtype != torch.float32:
        return weights
    states = checkpoint.load(path, like, torch.bfloat16)["optimizer"]
    return Lazy(like, lambda name: states[name]["master"] if "master" in states[name] else weights[name])


def merged(weights: Mapping[str, Tensor], scale: float, name: str) -> Tensor:
    """A weight and its adapter as one: W + scale · B A."""
    weight = weights[name]
    layer = name.removesuffix(".weight")
    if f"{layer}.lora_A.weight" not in weights:
        return weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    A, B = (weights[f"{layer}.lora_{factor}.weight"].to(wide) for factor in "AB")
    return (weight.to(wide) + scale * (B @ A)).to(weight.dtype)


def in_files(sizes: dict[str, int], most: int) -> dict[str, list[str]]:
    """File -> its tensors, in order, as many as fit into `most` bytes. Several files are numbered."""
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
    """Write the newest complete checkpoint of a run as a Hugging Face model. Returns the checkpoint's name.

    Large models become several files of at most `file_bytes`; one of them is in memory at a time. In fp32, a run of
    bf16-master gives its master weights. Raises UsageError without a checkpoint, or if `folder` holds a run.
    """
    return checkpoint.read_newest(run, partial(write_model, run, Path(folder), dtype, file_bytes))


def end_of_text(home: Path, progress: checkpoint.Progress) -> int | None:
    """The token that ends a text, by the run's own tokenizer; None where there is none, or it is not known."""
    kept = home / "tokenizer"
    if kept.exists():
        return load_tokenizer(str(kept)).eos
    return Tokenizer().eos if progress.numbers is False and not progress.config["tokenizer"] else None


def write_model(
    run: str,
    out: Path,
    dtype: torch.dtype | None,
    file_bytes: int,
    home: Path,
    path: Path,
    progress: checkpoint.Progress,
) -> str:
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
    weights = read_checkpoint(path, full_shapes(sizes, moe), dtype, config)
    like = full_shapes(replace(sizes, lora_rank=0), moe)
    if sizes.lora_rank:
        weights = Lazy(like, partial(merged, weights, sizes.lora_scale))
    if (out / "checkpoints").exists() or (out / "log.jsonl").exists():
        raise UsageError(f"{out} holds a run, whose config.json would be lost; export to another folder")
    save_file = safetensors().torch.save_file  # before anything is removed
    out.mkdir(parents=True, exist_ok=True)
    for pattern in ("model*.safetensors*", "config.json", "generation_config.json", *TOKENIZER_FILES):
        for old in out.glob(pattern):  # of an earlier export: a reader would mix them
            old.unlink()
    kind = kind_of(sizes, moe)
    files = in_files({name: t.numel() * dtype.itemsize for name, t in like.items()}, file_bytes)
    for file, names in files.items():
        tensors = {their_name(kind, name): weights[name] for name in names}
        save_file(tensors, out / file, metadata={"format": "pt"})
        del tensors  # before the next file's are read
    if len(files) > 1:
        size = sum(t.numel() for t in like.values()) * dtype.itemsize
        where = {their_name(kind, name): file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (out / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    origin = home / "origin" / "config.json"
    own = {"bos_token_id": None, "eos_token_id": end_of_text(home, progress)}  # else transformers takes 1 and 2
    came = json.loads(origin.read_text()) if origin.exists() else own
    about = config_json(sizes, moe, str(dtype).removeprefix("torch."), config.seq_len, came)
    (out / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    if (home / "tokenizer").exists():
        shutil.copytree(home / "tokenizer", out, dirs_exist_ok=True)
    if (home / "origin" / "generation_config.json").exists():
        shutil.copy(home / "origin" / "generation_config.json", out)
    return path.name


def main() -> None:
    parser = OneLineParser("hf.py", description="Write the newest checkpoint of a run as a Hugging Face model.")
    parser.add_argument("run", help="folder of a run, or one checkpoint in it")
    parser.add_argument("folder", help="where to write config.json and *.safetensors")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as in the checkpoint")
    args = parser.parse_args()
    try:
        name = export(args.run, args.folder, getattr(torch, args.dtype) if args.dtype else None)
    except UsageError as error:
        parser.error(str(error))
    except (OSError, safetensors().SafetensorError) as error:
        where = getattr(error, "filename", None) or args.folder
        why = getattr(error, "strerror", None) or error
        parser.error(f"{where} cannot be written ({why}); the export is not complete")
    print(f"{name} of {args.run} written to {args.folder}")


if __name__ == "__main__":
    main()
