"""Continue a text with the newest checkpoint of a run, on one process, whatever layout trained it.

    python 11_5d_trainer/generate.py runs/mine --prompt "def main(" --tokens 200 --temperature 0.8 --top-p 0.95

Each token runs through the model once: its keys and values stay in a cache. The text ends at the model's own
end of text, if it has one: a Hugging Face model's eos_token_id (one or several), or the tokenizer's. The
prompt is read as the data was: as bytes, or with the run's tokenizer; for a .bin it is token ids. The model
is chapter 01's Llama (or chapter 07's mixture) on one device: a checkpoint holds full weights.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Ctrl-C: no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import paths  # noqa: F401  finds the chapters below
import checkpoint
import torch
from hf_keys import TOKENS
from llama import Llama, LlamaConfig, at_least_fp32
from model import alone, full_shapes, give_memory, whole_names
from ops import WEIGHTS
from options import Config, OneLineParser, UsageError
from sources import Tokenizer, as_bytes, as_numbers, load_tokenizer
from torch import Tensor


def load_model(run: str, device: torch.device | str) -> tuple[Llama, Config, str, bool]:
    """The full model of a run's newest checkpoint, its options, the checkpoint's name; were data ids?"""
    return checkpoint.read_newest(run, partial(read_model, device))


def read_model(
    device: torch.device | str, home: Path, path: Path, progress: checkpoint.Progress
) -> tuple[Llama, Config, str, bool]:
    config = Config(**progress.config)
    sizes = LlamaConfig(**progress.sizes)
    moe = config.mixture(sizes)
    dtype = WEIGHTS.get(config.precision, torch.float32)
    moe = replace(moe, capacity=None) if moe else None  # capacity drops tokens of a batch; here is one token
    weights = checkpoint.load(path, full_shapes(sizes, moe), dtype)["weights"]
    model = alone(sizes, moe, "meta").to(dtype)
    give_memory(model, device, sizes.tied)
    for name, tensor in model.state_dict().items():
        names = whole_names(model, name)
        for each, part in zip(names, tensor if len(names) > 1 else [tensor], strict=True):
            if each in weights:  # a tied head is stored as the embedding
                part.copy_(weights[each])  # one is read at a time
    numbers = progress.numbers
    if numbers is None:  # an old checkpoint; its data may still exist
        numbers = Path(config.data).suffix == ".bin" or (Path(config.data) / "train.bin").exists()
    return model, config, path.name, numbers


class KVCache:
    """attention(q, k, v, *, causal) of one layer with the keys and values of the tokens before. The first
    call has the prompt, each later call one token, which sees the last `window` of them."""

    def __init__(self, attention: Callable[..., Tensor], length: int, window: int) -> None:
        self.attention = attention
        self.length = length
        self.window = window
        self.used = 0
        self.k = self.v = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        if not self.used:
            B, _, heads, D = k.shape
            self.k, self.v = k.new_empty(B, self.length, heads, D), v.new_empty(B, self.length, heads, D)
        new = slice(self.used, self.used + k.shape[1])
        self.k[:, new], self.v[:, new] = k, v
        first = not self.used
        self.used = new.stop
        seen = slice(0 if first else max(0, self.used - self.window), self.used)
        # The last token sees all of these, so no mask is needed.
        return self.attention(q, self.k[:, seen], self.v[:, seen], causal=causal and first)


@contextmanager
def with_caches(model: Llama, length: int, window: int) -> Iterator[None]:
    """Inside, layers cache keys and values of up to `length` tokens; a new token sees `window` of them."""
    layers = [block.self_attn for block in model.model.layers]
    parts = [layer.parts for layer in layers]
    try:
        for layer in layers:
            layer.parts = replace(layer.parts, attention=KVCache(layer.parts.attention, length, window))
        yield
    finally:
        for layer, before in zip(layers, parts, strict=True):
            layer.parts = before


@torch.no_grad()
def generate(
    model: Llama,
    prompt: Tensor,
    n: int,
    temperature: float,
    generator: torch.Generator,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Collection[int] = (),
    window: int | None = None,
) -> Tensor:
    """prompt [B, S] -> [B, S + n], or less: it ends as soon as the new token of every row is in `stop`.

    A new token sees the last `window` tokens (None: all); a model fails beyond the distances of its training.
    """
    tokens = prompt
    new = prompt if window is None else prompt[:, -window:]
    length = prompt.shape[1] + n
    with with_caches(model, length, window or length):
        for _ in range(n):
            positions = torch.arange(tokens.shape[1] - new.shape[1], tokens.shape[1], device=tokens.device)
            last = model.model(new, positions)[:, -1]  # [B, 1 or S, H] -> [B, H]: only its logits are needed
            new = choose(at_least_fp32(model.lm_head(last)), temperature, generator, top_k, top_p)
            tokens = torch.cat((tokens, new), dim=1)
            if stop and all(token in stop for token in new.flatten().tolist()):
                break
    return tokens


def trained_length(config: Config) -> int | None:
    """The sequence length of the training; None for a model from elsewhere, where it is not known."""
    return None if config.init else config.seq_len


def choose(logits: Tensor, temperature: float, generator: torch.Generator, top_k: int, top_p: float) -> Tensor:
    """[B, V] -> [B, 1]: a token of each row, drawn from the `top_k` likeliest (0: all), and of these from the
    fewest whose probabilities sum to at least `top_p`. Temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probs, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    if top_k:
        probs[:, top_k:] = 0
        probs /= probs.sum(-1, keepdim=True)
    probs[probs.cumsum(-1) - probs >= top_p] = 0
    probs = torch.zeros_like(probs).scatter(-1, order, probs)  # in the order of the vocabulary again
    return torch.multinomial(probs.cpu(), 1, generator=generator).to(logits.device)


def ends_of_text(run: Path, tokenizer: Tokenizer | None) -> set[int]:
    """Token ids at which the model ends a text, by the files of the model with which the run began, or else
    by its tokenizer."""
    for name in ("generation_config.json", "config.json"):
        file = run / "origin" / name
        try:
            found = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        except (ValueError, AttributeError):
            raise UsageError(f"{file} is not JSON; copy it again, or use --no-stop") from None
        if not TOKENS.fits(found):
            raise UsageError(f"{file} has eos_token_id = {found!r}; it must be {TOKENS.words}; or use --no-stop")
        if found is not None:
            return set(found) if isinstance(found, list) else {found}
    return {tokenizer.eos} if tokenizer and tokenizer.eos is not None else set()


def tokenizer_of(config: Config, kept: Path | None = None) -> Tokenizer | None:
    """The run's tokenizer: `kept` is in its folder, if the run is not too old. None: bytes, or ids."""
    own = str(kept) if kept and kept.exists() else config.tokenizer
    return load_tokenizer(own) if own else None


def read_prompt(prompt: str, config: Config, numbers: bool, tokenizer: Tokenizer | None) -> tuple[list[int], Any]:
    """Tokens of the prompt, and a function that decodes tokens. `numbers`: the run's data were token ids."""
    if tokenizer:
        return tokenizer.encode(prompt), tokenizer.decode
    if numbers:
        if not all(word.isdecimal() and int(word) < config.vocab_size for word in prompt.split()):
            raise UsageError(f"--prompt {prompt!r}: the run's data are token ids; give some below {config.vocab_size}")
        return [int(word) for word in prompt.split()], as_numbers
    return list(os.fsencode(prompt)), as_bytes  # also those that are no UTF-8


def main() -> int:
    parser = OneLineParser(
        "generate.py", description="Continue a text with the newest checkpoint of a run.", allow_abbrev=False
    )
    parser.add_argument("run", help="folder of a run, or one checkpoint in it")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many likeliest tokens; 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the fewest with this share together")
    parser.add_argument("--no-stop", action="store_true", help="go on behind the end of the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens} must be at least 1")
    if not (args.temperature == 0 or 1e-6 <= args.temperature < float("inf")):  # logits / 1e-40 are infinite
        parser.error(f"--temperature {args.temperature} must be 0 or a number of at least 1e-6")
    if args.top_k < 0:
        parser.error(f"--top-k {args.top_k} must not be negative")
    if not (0 < args.top_p <= 1):
        parser.error(f"--top-p {args.top_p} must be more than 0, and at most 1")
    if args.temperature == 0 and (args.top_k or args.top_p < 1):
        parser.error("--temperature 0 takes the likeliest token; leave out --top-k and --top-p, or use another")
    if not -(2**63) <= args.seed < 2**63:
        parser.error(f"--seed {args.seed} must be less than 2**63")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; use --device cpu")
    try:
        model, config, name, numbers = load_model(args.run, args.device)
        home = checkpoint.find(args.run)[0]
        tokenizer = tokenizer_of(config, home / "tokenizer")
        tokens, decode = read_prompt(args.prompt, config, numbers, tokenizer)
        ends = tokenizer or (None if numbers else Tokenizer())  # bytes have one as well
        stop = set() if args.no_stop else ends_of_text(home, ends)
    except UsageError as error:
        parser.error(str(error).replace("--resume", "run"))
    if not tokens:
        parser.error("--prompt is empty; give at least one token to continue")
    if max(tokens) >= model.config.vocab_size:
        parser.error(f"--prompt has token id {max(tokens)}, beyond the model's vocabulary of {model.config.vocab_size}")
    prompt = torch.tensor([tokens], device=args.device)
    generator = torch.Generator().manual_seed(args.seed)
    drawn = (args.tokens, args.temperature, generator, args.top_k, args.top_p, stop, trained_length(config))
    out = generate(model, prompt, *drawn)[0].tolist()
    if out[-1] in stop and len(out) > len(tokens):
        out.pop()
    print(f"--- {name} of {home.resolve().name}", file=sys.stderr)
    print(decode(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
