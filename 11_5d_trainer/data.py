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

import chapters  # noqa: F401  finds the chapters below
import torch
from llama import IGNORE
from options import Config, UsageError
from sources import (
    BYTES,
    as_bytes,
    as_numbers,
    check_width,
    encode_whole,
    in_words,
    load_tokenizer,
    map_file,
    read_text,
    text_files,
)
from torch import Tensor
from training_step import next_token_pairs

SCAN = 2**22  # tokens looked at in one go
MOST_TEXT = 10**8  # bytes of text that every process may encode for itself


@dataclass(frozen=True)
class Corpus:
    """Two rows of tokens, uint8, uint16 or uint32, and how to read a list of them."""

    train: Tensor
    val: Tensor
    vocab_size: int
    decode: Callable[[list[int]], str]
    tokens_per_byte: float | None = None  # of the validation text; None where the text is not known
    messages: tuple[str, ...] = ()  # for the user


def load_corpus(config: Config) -> Corpus:
    """Read what `--data` names. Raises UsageError if it is missing, empty, too short, or not tokens of the vocabulary.

    Text is read as bytes. Of many files every tenth is for validation, of a single one the last tenth of its text.
    A `.bin` (nanoGPT's layout: token ids and nothing else) is mapped into memory, not read; a folder that holds
    train.bin and val.bin gives both.
    """
    path = Path(config.data) if config.data else Path(sysconfig.get_paths()["stdlib"])
    if not path.exists():
        raise UsageError(f"--data {config.data} does not exist; give a text file, a folder or a .bin of tokens")
    pair = path.is_dir() and (path / "train.bin").exists()
    if pair and not (path / "val.bin").exists():
        raise UsageError(f"--data {path} holds train.bin but no val.bin; add it, or name train.bin itself")
    corpus = load_ids(config, path, pair) if pair or (path.suffix == ".bin" and path.is_file()) else None
    corpus = corpus or load_text(config, path)
    check_corpus(corpus, config)
    return corpus


def load_ids(config: Config, path: Path, pair: bool) -> Corpus:
    """A .bin, or a pair of them in a folder."""
    if config.tokenizer:
        raise UsageError(f"--tokenizer {config.tokenizer} reads text, but --data {config.data} is tokens already")
    rows = [map_tokens(path / f"{name}.bin", config) for name in ("train", "val")] if pair else []
    train, val = rows or split(map_tokens(path, config))
    return Corpus(train, val, config.vocab_size, as_numbers)


def load_text(config: Config, path: Path) -> Corpus:
    messages: list[str] = []
    if path.is_dir():
        files, others = text_files(path, "*.py" if not config.data else "*")
        if len(files) < 2:
            what = f"{len(files)} text files{in_words(others)}"
            raise UsageError(f"--data {path} holds {what}; a folder needs two or more")
        held_out = files[9::10] or files[-1:]
        training = [file for i, file in enumerate(files[: None if files[9:] else -1]) if i % 10 != 9]
        if config.data:
            names = [str(file.relative_to(path)) for file, _ in held_out]
            which = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
            used = f"{len(files)} text files, {len(held_out)} of them for validation ({which})"
            messages.append(f"--data {path}: {used}{in_words(others)}")
    else:
        data = read_text(path, "--data")
        end = len(data) - len(data) // 10
        while config.tokenizer and end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1  # not within a character
        training, held_out = [(path, data[:end])], [(path, data[end:])]
    texts = [b"".join(text for _, text in some) for some in (training, held_out)]
    vocab_size = 256
    decode: Callable[[list[int]], str] = as_bytes
    if config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer)
        check_encoding([*training, *held_out], path, config.tokenizer)
        ids = [encode_whole(tokenizer, text.decode()) for text in texts]
        train, val = (torch.tensor(tokens, dtype=torch.int32) for tokens in ids)
        vocab_size, decode = tokenizer.vocab_size, tokenizer.decode
    else:
        train, val = map(as_row, texts)
    rate = len(val) / len(texts[1]) if texts[1] else None
    return Corpus(train, val, config.vocab_size or vocab_size, decode, rate, tuple(messages))


def check_encoding(files: list[tuple[Path, bytes]], path: Path, tokenizer: str) -> None:
    """Raise UsageError for text that a tokenizer cannot read, or that is too much for each process to encode."""
    if (size := sum(len(text) for _, text in files)) > MOST_TEXT:
        what = f"{size / 1e6:,.0f} MB, which every process would encode for itself"
        how = f"python 11_5d_trainer/prepare.py {path} --tokenizer {tokenizer} --out FOLDER"
        raise UsageError(f"--tokenizer {tokenizer}: --data {path} has {what}; encode it once: {how}")
    for file, text in files:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            what = f"{file} is not UTF-8 (at byte {error.start})"
            raise UsageError(f"--tokenizer {tokenizer} reads UTF-8, but --data {what}; convert it") from None


def split(tokens: Tensor) -> tuple[Tensor, Tensor]:
    end = len(tokens) - len(tokens) // 10
    return tokens[:end], tokens[end:]


def as_row(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def map_tokens(path: Path, config: Config) -> Tensor:
    """The tokens of a .bin that says nothing of itself."""
    if not config.vocab_size:
        raise UsageError(f"--vocab-size is missing: {path.name} holds token ids; GPT-2's tokenizer has 50257")
    size, width = path.stat().st_size, BYTES[config.bin_dtype]
    if size % width:
        raise UsageError(f"--data {path} has {size} bytes, not a multiple of {width}; check --bin-dtype or the file")
    tokens = map_file(path, config.bin_dtype)
    check_width(path, tokens, config.bin_dtype)
    return tokens


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
