"""Continue a text with the newest checkpoint of a run, on one process, whatever layout trained it.

    python 11_5d_trainer/generate.py runs/mine --prompt "def main(" --tokens 200 --temperature 0.8

The prompt is read as the training data was: as bytes, or with the run's tokenizer; for a .bin of tokens it is their
numbers. The model is chapter 01's Llama (or chapter 07's mixture) on one device: a checkpoint holds whole weights.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

import paths  # noqa: F401  finds the chapters below
import checkpoint
import torch
from llama import Llama, LlamaConfig
from model import alone, full_shapes, give_memory, whole_names
from ops import WEIGHTS
from options import Config, UsageError
from sources import as_bytes, as_numbers, load_tokenizer
from training_step import generate


def load_model(run: str, device: torch.device | str) -> tuple[Llama, Config, str, bool]:
    """The whole model of a run's newest checkpoint, its options, the checkpoint's name; were its data token ids?"""
    _, path, progress = checkpoint.find_aloud(run)
    config, sizes = Config(**progress.config), LlamaConfig(**progress.sizes)
    moe, dtype = config.mixture(sizes), WEIGHTS.get(config.precision, torch.float32)
    weights = checkpoint.load(path, full_shapes(sizes, moe), dtype)["weights"]
    model = alone(sizes, moe, "meta").to(dtype)
    give_memory(model, device, sizes.tied)
    for name, tensor in model.state_dict().items():
        names = whole_names(model, name)
        for each, part in zip(names, tensor if len(names) > 1 else [tensor], strict=True):
            if each in weights:  # a tied head is in there as the embedding
                part.copy_(weights[each])  # one is read at a time
    numbers = progress.numbers
    if numbers is None:  # an old checkpoint; its data may still lie there
        numbers = Path(config.data).suffix == ".bin" or (Path(config.data) / "train.bin").exists()
    return model, config, path.name, numbers


def read_prompt(prompt: str, config: Config, numbers: bool, kept: Path | None = None) -> tuple[list[int], Any]:
    """Tokens of the prompt, and what turns tokens into text again. `numbers`: the run's data were token ids. `kept`:
    the tokenizer in the run's folder, where an older run has none."""
    own = str(kept) if kept and kept.exists() else config.tokenizer
    if own:
        tokenizer = load_tokenizer(own)
        return tokenizer.encode(prompt), tokenizer.decode
    if numbers:
        if not all(word.isdigit() and int(word) < config.vocab_size for word in prompt.split()):
            raise UsageError(f"--prompt {prompt!r}: the run's data are token ids; give some below {config.vocab_size}")
        return [int(word) for word in prompt.split()], as_numbers
    return list(prompt.encode()), as_bytes


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"generate.py: {message}\n")


def main() -> int:
    parser = OneLineParser(description="Continue a text with the newest checkpoint of a run.", allow_abbrev=False)
    parser.add_argument("run", help="folder of a run, or one checkpoint in it")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens} must be at least 1")
    if not (0 <= args.temperature < float("inf")):
        parser.error(f"--temperature {args.temperature} must be 0 or a positive number")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; use --device cpu")
    try:
        model, config, name, numbers = load_model(args.run, args.device)
        kept = checkpoint.find(args.run)[0] / "tokenizer"
        tokens, decode = read_prompt(args.prompt, config, numbers, kept)
    except UsageError as error:
        parser.error(str(error).replace("--resume", "run"))
    if not tokens:
        parser.error("--prompt is empty; give at least one token to continue")
    prompt = torch.tensor([tokens], device=args.device)
    generator = torch.Generator().manual_seed(args.seed)
    out = generate(model, prompt, args.tokens, args.temperature, generator)[0].tolist()
    print(f"--- {name} of {Path(args.run).name}", file=sys.stderr)
    print(decode(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
