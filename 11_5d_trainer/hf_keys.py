"""What each key of a Hugging Face config.json does here: one table for the parser, its errors and the README.

    python 11_5d_trainer/hf_keys.py      prints the README's table

A key that is ignored may mean another model, with losses that look plausible. So each key is honoured, or
must have the one value that is trained here, or does not change the function. Any other key is refused by
name, and so is a value of the wrong type: transformers would also refuse it, or make another model of it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from options import UsageError

# model_type -> its class in transformers, and transformers' defaults for missing keys. HEADS: as many as
# num_attention_heads; SPLIT: hidden_size / num_attention_heads.
HEADS, SPLIT = "num_attention_heads", "hidden_size / num_attention_heads"
ALIKE = {"tie_word_embeddings": False}
QWEN = ALIKE | {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "use_sliding_window": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        ALIKE | {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_key_value_heads": HEADS, "head_dim": SPLIT},
    ),
    "mistral": (
        "MistralForCausalLM",
        ALIKE
        | {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_key_value_heads": 8, "head_dim": SPLIT}
        | {"sliding_window": 4096},
    ),
    "qwen2": ("Qwen2ForCausalLM", QWEN | {"num_key_value_heads": 32, "head_dim": SPLIT}),
    "qwen3": ("Qwen3ForCausalLM", QWEN | {"num_key_value_heads": 32, "head_dim": 128}),
    "mixtral": (
        "MixtralForCausalLM",
        ALIKE
        | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "head_dim": SPLIT}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        QWEN
        | {"num_key_value_heads": 4, "head_dim": SPLIT, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": False},
    ),
}
QWENS = ("qwen2", "qwen3", "qwen3_moe")
MIXTURES = ("mixtral", "qwen3_moe")


@dataclass(frozen=True)
class Type:
    words: str
    fits: Callable[[Any], bool]


def whole(most: int) -> Type:
    return Type(f"a whole number from 1 to {most:,}", lambda value: type(value) is int and 1 <= value <= most)


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def only(value: Any) -> Type:
    def fits(given: Any) -> bool:
        if is_number(value):
            return is_number(given) and given == value
        return type(given) is type(value) and given == value

    return Type(f"only {json.dumps(value)}", fits)


def is_token(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


SIZE = whole(2**24)
LAYERS = whole(1024)
# Up to 1e18: torch takes no larger integers.
POSITIVE = Type("a positive number up to 1e18", lambda value: is_number(value) and 0 < value <= 1e18)
AT_LEAST_1 = Type("a number from 1 to 1e18", lambda value: is_number(value) and 1 <= value <= 1e18)
FLAG = Type("true or false", lambda value: type(value) is bool)
PART = Type("an object of keys", lambda value: isinstance(value, dict))
FROM_0 = Type("a whole number", lambda value: type(value) is int and 0 <= value < 2**31)
WINDOW = Type("a whole number or null", lambda value: value is None or FROM_0.fits(value))
TOKEN = Type("a token id or null", is_token)
TOKENS = Type(
    "a token id, a list of them or null",
    lambda value: is_token(value) or (isinstance(value, list) and all(map(is_token, value)) and None not in value),
)
FULL = Type(
    "full_attention in each layer", lambda v: isinstance(v, list) and all(each == "full_attention" for each in v)
)


@dataclass(frozen=True)
class Key:
    """`kinds` have the key (empty: all kinds). In the kinds of `free` it changes nothing and may be any `of`;
    in those of `null` a null means that the file does not set it."""

    type: Type
    here: str  # what it does, for the README
    kinds: tuple[str, ...] = ()
    null: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    of: Type | None = None
    required: bool = False

    def type_in(self, kind: str) -> Type:
        return self.of if self.of and kind in self.free else self.type


ALL = tuple(KINDS)
PAST = "attention sees the whole past"
KEYS = {
    "vocab_size": Key(SIZE, "honoured", required=True),
    "hidden_size": Key(SIZE, "honoured", required=True),
    "num_hidden_layers": Key(LAYERS, "honoured", required=True),
    "num_attention_heads": Key(SIZE, "honoured", required=True),
    "num_key_value_heads": Key(SIZE, "honoured", null=("llama", "qwen2", "qwen3")),
    "head_dim": Key(SIZE, "honoured; even", null=("llama", "mistral", "mixtral")),
    "intermediate_size": Key(SIZE, "honoured", free=("qwen3_moe",), of=SIZE, required=True),
    "moe_intermediate_size": Key(SIZE, "honoured: the width of an expert", ("qwen3_moe",), required=True),
    "num_local_experts": Key(LAYERS, "honoured", MIXTURES),
    "num_experts": Key(LAYERS, "honoured", ("qwen3_moe",)),
    "num_experts_per_tok": Key(
        LAYERS, "honoured; from 2, since the router would learn nothing from one weight of 1", MIXTURES
    ),
    "rms_norm_eps": Key(POSITIVE, "honoured"),
    "rope_theta": Key(POSITIVE, "honoured; also in rope_parameters"),
    "rope_parameters": Key(PART, "honoured, see below", null=ALL),
    "rope_scaling": Key(PART, "the older name of rope_parameters", null=ALL),
    "tie_word_embeddings": Key(FLAG, "honoured"),
    "norm_topk_prob": Key(only(True), "the weights of a token's experts add up to 1", ("qwen3_moe",)),
    "decoder_sparse_step": Key(only(1), "experts in each layer", ("qwen3_moe",)),
    "mlp_only_layers": Key(only([]), "experts in each layer", ("qwen3_moe",), null=("qwen3_moe",)),
    "hidden_act": Key(only("silu"), "the SwiGLU of chapter 01"),
    "attention_bias": Key(only(False), "only q, k and v of a Qwen2 have biases, always", free=("qwen2",), of=FLAG),
    "mlp_bias": Key(only(False), "only q, k and v of a Qwen2 have biases, always"),
    "use_sliding_window": Key(only(False), PAST),
    "sliding_window": Key(only(None), PAST, free=QWENS, of=WINDOW),
    "layer_types": Key(FULL, PAST, null=tuple(kind for kind in KINDS if kind != "mistral")),
    "max_window_layers": Key(FROM_0, "nothing, without a window"),
    "use_mrope": Key(only(False), "one position per token"),
    "attention_dropout": Key(only(0.0), "no dropout"),
    "router_jitter_noise": Key(only(0.0), "no noise"),
    "rope_interleaved": Key(only(False), "the pairs of chapter 01"),
    "is_encoder_decoder": Key(only(False), "decoders alone"),
    "chunk_size_feed_forward": Key(only(0), "nothing is cut"),
    "initializer_range": Key(
        Type("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1),
        "nothing: new weights are drawn with 0.02, as in chapter 01",
    ),
    "max_position_embeddings": Key(whole(2**31), "nothing; an export gives it back"),
    "bos_token_id": Key(TOKENS, "nothing; an export gives it back"),
    "eos_token_id": Key(TOKENS, "`generate.py` stops there; an export gives it back, or the tokenizer's"),
    "pad_token_id": Key(TOKEN, "nothing; an export gives it back"),
}
# In rope_parameters, by rope_type. "type" is its older name.
ROPE = {
    "default": {"rope_theta": POSITIVE, "partial_rotary_factor": only(1.0)},
    "llama3": {
        "rope_theta": POSITIVE,
        "partial_rotary_factor": only(1.0),
        "factor": AT_LEAST_1,
        "low_freq_factor": POSITIVE,
        "high_freq_factor": POSITIVE,
        "original_max_position_embeddings": whole(2**31),
    },
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Names, settings after training, and what `--balance` decides here: none of these changes the function.
NOTHING = {
    *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "dtype", "id2label"),
    *("is_llama_config", "label2id", "model_type", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef", "torch_dtype"),
    *("transformers.js_config", "transformers_version", "use_cache"),
}


def shown(key: str, value: Any) -> str:
    """key = value, in one line of a bounded length."""
    text = repr(value)
    return f"{key if key.isprintable() else repr(key)} = {text if len(text) <= 60 else text[:57] + '...'}"


def parsed(where: str, text: str) -> dict[str, Any]:
    """A config.json, in which each key may occur only once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"{where}: config.json says {twice!r} twice; remove one")
        return values

    try:
        return json.loads(text, object_pairs_hook=once)
    except UsageError:
        raise
    except (ValueError, RecursionError):
        raise UsageError(f"{where}: config.json is not JSON; copy it again") from None


def checked(where: str, found: Any) -> tuple[str, dict[str, Any]]:
    """model_type, and the value of each key that is honoured: the file's, or transformers' default. Raises
    UsageError, in one line, for a key or a value that means another model than the one that is built here."""
    kind = found.get("model_type") if isinstance(found, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise UsageError(f"{where} is a {kind!r}, but only {', '.join(KINDS)} can be trained here")
    for name in found:
        if name not in NOTHING and (name not in KEYS or (KEYS[name].kinds and kind not in KEYS[name].kinds)):
            raise UsageError(f"{where} has {shown(name, found[name])}, which means nothing here")
    said = {n: v for n, v in found.items() if n in KEYS and not (v is None and kind in KEYS[n].null)}
    if "num_local_experts" in said and kind == "qwen3_moe":  # transformers knows both names
        if said.get("num_experts", said["num_local_experts"]) != said["num_local_experts"]:
            raise UsageError(f"{where} has two numbers of experts; remove num_experts or num_local_experts")
        said["num_experts"] = said.pop("num_local_experts")
    rope = rope_of(where, said)
    for name, key in KEYS.items():
        if key.required and name not in said and kind not in key.free and kind in (key.kinds or ALL):
            raise UsageError(f"{where}: config.json has no {name}; copy it again")
    values = KINDS[kind][1] | said
    if kind in KEYS["num_key_value_heads"].null and found.get("num_key_value_heads", 1) is None:
        values["num_key_value_heads"] = HEADS
    for name, value in values.items():
        derived = isinstance(value, str) and value in (HEADS, SPLIT) and name not in said
        if not derived and not KEYS[name].type_in(kind).fits(value):
            raise UsageError(refusal(where, name, value, KEYS[name].type_in(kind), KEYS[name].here))
    if values["num_key_value_heads"] == HEADS:
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= rope
    if kind == "llama" and values["hidden_size"] % values["num_attention_heads"]:
        raise UsageError(f"{where}: hidden_size {values['hidden_size']} is not a multiple of its heads")
    if len(values.get("layer_types", [0] * values["num_hidden_layers"])) != values["num_hidden_layers"]:
        raise UsageError(f"{where}: layer_types does not name each of {values['num_hidden_layers']} layers")
    if values["head_dim"] == SPLIT:
        if values["hidden_size"] % values["num_attention_heads"]:
            raise UsageError(f"{where}: hidden_size {values['hidden_size']} is not a multiple of its heads")
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if kind in MIXTURES:
        experts = values["num_experts" if kind == "qwen3_moe" else "num_local_experts"]
        if values["num_experts_per_tok"] == 1:
            raise UsageError(f"{where} gives each token one expert, weighed by 1: its router would learn nothing")
        if values["num_experts_per_tok"] > experts:
            raise UsageError(f"{where} gives each token {values['num_experts_per_tok']} of {experts} experts")
    return kind, values


def refusal(where: str, name: str, value: Any, of: Type, why: str) -> str:
    if of.words.startswith("only "):
        return f"{where} has {shown(name, value)}; {of.words} is trained here ({why})"
    return f"{where} has {shown(name, value)}; it must be {of.words}"


def rope_of(where: str, said: dict[str, Any]) -> dict[str, Any]:
    """The file's RoPE: rope_theta, if the file has it, and rope_scaling: None, or Llama 3's four values."""
    for name in ("rope_parameters", "rope_scaling"):
        if not PART.fits(said.get(name, {})):
            raise UsageError(f"{where} says of its RoPE {said[name]!r}, which means nothing here")
    parts = list(filter(None, [said.pop("rope_parameters", None), said.pop("rope_scaling", None)]))
    if len(parts) == 2 and parts[0] != parts[1]:
        raise UsageError(f"{where} has both rope_parameters and rope_scaling, and they differ; remove one")
    rope = parts[0] if parts else {}
    names = [rope[name] for name in ("rope_type", "type") if name in rope] or ["default"]
    for name in names:
        if not isinstance(name, str) or name not in ROPE:
            raise UsageError(f"{where} stretches its RoPE ({name}), but only as Llama 3 does is known here")
    if names[0] != names[-1]:
        raise UsageError(f"{where} has two types of RoPE, {names[0]!r} and {names[1]!r}; remove one")
    types = ROPE[names[0]]
    for name, value in rope.items():
        if name in ("rope_type", "type"):
            continue
        if name not in types:
            raise UsageError(f"{where} has {shown(name, value)} for its RoPE, which means nothing here")
        if not types[name].fits(value):
            raise UsageError(f"{where} has {shown(name, value)} for its RoPE; it must be {types[name].words}")
    if said.get("rope_theta", theta := rope.get("rope_theta")) != theta and theta is not None:
        raise UsageError(f"{where} has two rope_theta, {said['rope_theta']!r} and {theta!r}; remove one")
    values: dict[str, Any] = {"rope_scaling": None} | ({"rope_theta": theta} if theta is not None else {})
    if names[0] == "llama3":
        if missing := [name for name in SCALING if name not in rope]:
            raise UsageError(f"{where} has a RoPE of type llama3 without {missing[0]}; copy it again")
        if rope["high_freq_factor"] <= rope["low_freq_factor"]:
            raise UsageError(f"{where}: its RoPE's high_freq_factor must be more than its low_freq_factor")
        values["rope_scaling"] = tuple(rope[name] for name in SCALING)
    return values


# ------------------------------------------------------------------------------------------------ the README's table


def silent(name: str) -> str:
    """The default where a file does not have the key, by kind."""
    if KEYS[name].required:
        return "refused"
    by_value: dict[str, list[str]] = {}
    for kind, (_, defaults) in KINDS.items():
        if name in defaults:
            value = defaults[name]
            by_value.setdefault(value if isinstance(value, str) else f"{json.dumps(value)}", []).append(kind)
    if len(by_value) == 1 and len(next(iter(by_value.values()))) == len(KEYS[name].kinds or KINDS):
        return next(iter(by_value))
    return "; ".join(f"{value} ({', '.join(kinds)})" for value, kinds in by_value.items())


def table() -> str:
    """The README's table, in Markdown."""
    lines = ["| key | value | where the file is silent | here |", "|---|---|---|---|"]
    for name, key in KEYS.items():
        value = key.type.words
        if key.of:
            other = f"{key.of.words} " if key.of != key.type else ""
            value += f"; {other}of no effect in {', '.join(key.free)}"
        value += "; null as if silent" + (f" ({', '.join(key.null)})" if key.null != ALL else "") if key.null else ""
        where = f" ({', '.join(key.kinds)} alone)" if key.kinds else ""
        lines.append(f"| `{name}`{where} | {value} | {silent(name)} | {key.here} |")
    for kind, types in ROPE.items():
        for name, what in types.items():
            if name not in KEYS and (kind == "default" or name not in ROPE["default"]):
                in_kind = f", rope_type {kind}" if kind != "default" else ""
                needed = "refused" if name in SCALING else ""
                lines.append(f"| `{name}` (in rope_parameters{in_kind}) | {what.words} | {needed} | honoured |")
    lines.append(f"| {', '.join(f'`{name}`' for name in sorted(NOTHING))} | any | | nothing |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
