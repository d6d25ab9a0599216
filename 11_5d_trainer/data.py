"""Tokens on disk to micro-batches on a rank.

The corpus is one long row of tokens. It is cut into windows of S tokens (plus one, the last label), which are numbered
in a random order, another for each epoch:

    sample 0  sample 1  sample 2  ...               the same numbering on every rank, from (seed, epoch)

    one step, dp = 2, micro-batch 2, accumulation 2:
    position ->  | rank 0: 0 1 | rank 1: 2 3 | rank 0: 4 5 | rank 1: 6 7 |  -> position + 8
                 |------- micro-batch 0 -----|------- micro-batch 1 -----|

The position counts samples over all ranks and micro-batches. It is all the state there is: saved with a checkpoint, it
continues at exactly the next sample, with any number of ranks.
"""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chapters  # noqa: F401  finds the chapters below
import torch
from llama import IGNORE
from options import Config, UsageError
from torch import Tensor
from training_step import next_token_pairs

BYTES = {"uint16": 2, "uint32": 4}
SCAN = 2**22  # tokens looked at in one go


@dataclass(frozen=True)
class Corpus:
    """Two rows of tokens, uint8, uint16 or uint32, and how to read a list of them."""

    train: Tensor
    val: Tensor
    vocab_size: int
    decode: Callable[[list[int]], str]
    tokens_per_byte: float | None = None  # of the validation text; None where the text is not known


def load_corpus(config: Config) -> Corpus:
    """Read what `--data` names. Raises UsageError if it is missing, empty, too short, or not tokens of the vocabulary.

    Text is read as bytes. Of many files every tenth is for validation, of a single one the last tenth of its text.
    A `.bin` (nanoGPT's layout: token ids and nothing else) is mapped into memory, not read; a folder that holds
    train.bin and val.bin gives both.
    """
    path = Path(config.data) if config.data else Path(sysconfig.get_paths()["stdlib"])
    if not path.exists():
        raise UsageError(f"--data {config.data} does not exist; give a text file, a folder or a .bin of tokens")
    vocab_size, decode, text_bytes = config.vocab_size or 256, as_bytes, 0
    if path.is_dir() and (path / "train.bin").exists():
        if not (path / "val.bin").exists():
            raise UsageError(f"--data {path} holds train.bin but no val.bin; add it, or name train.bin itself")
        train, val, decode = map_tokens(path / "train.bin", config), map_tokens(path / "val.bin", config), as_numbers
    elif path.suffix == ".bin" and path.is_file():
        train, val = split(map_tokens(path, config))
        decode = as_numbers
    elif path.is_dir():
        files = text_files(path, "*.py" if not config.data else "*")
        if len(files) < 2:
            raise UsageError(f"--data {path} holds {len(files)} text files; a folder needs two or more")
        train, val = read_bytes([f for i, f in enumerate(files) if i % 10 != 9]), read_bytes(files[9::10] or files[-1:])
    else:
        train, val = split(read_bytes([path]))
    if config.tokenizer:
        if decode is as_numbers:
            raise UsageError(f"--tokenizer {config.tokenizer} reads text, but --data {config.data} is tokens already")
        tokenizer = load_tokenizer(config.tokenizer)
        # A token that begins each text would appear once in the whole corpus: none is added.
        options = {"add_special_tokens": False, "verbose": False}
        texts, text_bytes = [as_bytes(t.tolist()) for t in (train, val)], len(val)
        train, val = (torch.tensor(tokenizer.encode(text, **options), dtype=torch.int32) for text in texts)
        vocab_size, decode = config.vocab_size or len(tokenizer), tokenizer.decode
    elif decode is as_bytes:
        text_bytes = len(val)  # a token is a byte
    known = decode is not as_numbers and text_bytes > 0
    corpus = Corpus(train, val, vocab_size, decode, len(val) / text_bytes if known else None)
    check_corpus(corpus, config)
    return corpus


def as_bytes(tokens: list[int]) -> str:
    """A model may know more words than there are bytes, and say one: that is shown as what is no text."""
    return bytes(token if token < 256 else 0xFF for token in tokens).decode(errors="replace")


def as_numbers(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def load_tokenizer(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise UsageError(f"--tokenizer {name} needs transformers; pip install transformers") from None
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # its reasons are many, and long
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"--tokenizer {name} cannot be loaded: {reason}") from None


def split(tokens: Tensor) -> tuple[Tensor, Tensor]:
    end = len(tokens) - len(tokens) // 10
    return tokens[:end], tokens[end:]


def text_files(folder: Path, pattern: str) -> list[Path]:
    """Every text file below `folder`, sorted, without hidden ones, caches, installed packages and binaries."""
    skipped = {"__pycache__", "site-packages", "dist-packages", "test", "tests"} if pattern == "*.py" else set()
    files = []
    for path in sorted(folder.rglob(pattern)):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part in skipped for part in parts)
        if not hidden and path.is_file() and path.stat().st_size > 0:
            with path.open("rb") as file:
                if b"\0" not in file.read(8192):
                    files.append(path)
    return files


def read_bytes(files: list[Path]) -> Tensor:
    text = bytearray()
    for file in files:
        text += file.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def map_tokens(path: Path, config: Config) -> Tensor:
    """The tokens of a .bin as a tensor whose pages are read when they are used."""
    if not config.vocab_size:
        raise UsageError(f"--vocab-size is missing: {path.name} holds token ids; GPT-2's tokenizer has 50257")
    size, width = path.stat().st_size, BYTES[config.bin_dtype]
    if size % width:
        raise UsageError(f"--data {path} has {size} bytes, not a multiple of {width}; check --bin-dtype or the file")
    dtype = getattr(torch, config.bin_dtype)
    if not size:
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=size // width, dtype=dtype)


def check_corpus(corpus: Corpus, config: Config) -> None:
    where = f"--data {config.data or '(the standard library)'}"
    for name, tokens in (("training", corpus.train), ("validation", corpus.val)):
        if len(tokens) <= config.seq_len:
            raise UsageError(
                f"{where} has {len(tokens)} {name} tokens, too few for one sample of --seq-len {config.seq_len} "
                f"and its last label; use more data or a shorter --seq-len"
            )
        # A file of billions of tokens is sampled here; `Sampler.samples` checks the rest as it is used.
        stride = SCAN * max(1, len(tokens) // (64 * SCAN))
        largest = max(int(tokens[at : at + SCAN].long().max()) for at in range(0, len(tokens), stride))
        if largest >= corpus.vocab_size:
            raise UsageError(
                f"{where} has token id {largest}, beyond --vocab-size {corpus.vocab_size}; "
                f"use at least {largest + 1}, or check --bin-dtype {config.bin_dtype}"
            )


class Sampler:
    """Numbered samples of a row of tokens, and the position of the next one to be trained on."""

    def __init__(self, tokens: Tensor, seq_len: int, vocab_size: int, seed: int) -> None:
        self.tokens, self.seq_len, self.vocab_size, self.seed = tokens, seq_len, vocab_size, seed
        self.windows = (len(tokens) - 1) // seq_len
        self.position = 0
        self._epoch, self._order = -1, torch.empty(0)

    def window(self, sample: int) -> int:
        """Which window of the text is this sample? Each window once per epoch."""
        epoch, place = divmod(sample, self.windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.windows, generator=generator)
        return int(self._order[place])

    def samples(self, windows: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens and labels, each [len(windows), S]."""
        cut = [self.tokens[w * self.seq_len : (w + 1) * self.seq_len + 1] for w in windows]
        tokens = torch.stack(cut).long()
        if int(tokens.max()) >= self.vocab_size:
            raise ValueError(f"token id {int(tokens.max())} is beyond the vocabulary of {self.vocab_size}")
        return next_token_pairs(tokens)

    def step(self, micro_batch: int, accumulation: int, rank: int, dp: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of the next step; moves the position past the samples of all ranks."""
        # --- exercise 11.32: which samples are mine in this step, and where does the next one begin? ---
        batches = []
        for micro in range(accumulation):
            first = self.position + (micro * dp + rank) * micro_batch
            batches.append(self.samples([self.window(first + i) for i in range(micro_batch)]))
        self.position += accumulation * dp * micro_batch
        # --- end exercise ---
        return batches

    def held_out(
        self, samples: int, micro_batch: int, rank: int, dp: int, at_once: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the first `samples` windows in their natural order: for validation.

        Every rank gets as many micro-batches as the others, since a forward pass may contain collectives, and all of
        one size and a multiple of `at_once`, as a pipeline needs them. Where the samples do not suffice they are filled
        up with samples without any label.
        """
        everybody = list(range(min(samples, self.windows)))
        mine, most = everybody[rank::dp], len(everybody[::dp])
        whole = micro_batch * at_once
        for at in range(0, -(-most // whole) * whole, micro_batch):
            part = mine[at : at + micro_batch]
            tokens, labels = self.samples(part + [0] * (micro_batch - len(part)))
            rows = torch.arange(micro_batch)[:, None]
            yield tokens, labels.masked_fill(rows >= len(part), IGNORE)
