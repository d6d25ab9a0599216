"""Tokens on disk to micro-batches on a rank.

The corpus is one long row of tokens. It is split into windows of S tokens (plus one, the last label), which
are numbered in a random order, a new one for each epoch:

    sample 0  sample 1  sample 2  ...               the same numbering on every rank, from (seed, epoch)

    one step, dp = 2, micro-batch 2, accumulation 2:
    position ->  | rank 0: 0 1 | rank 1: 2 3 | rank 0: 4 5 | rank 1: 6 7 |  -> position + 8
                 |------- micro-batch 0 -----|------- micro-batch 1 -----|

The position counts samples over all ranks and micro-batches. It is the only state: restored from a
checkpoint, the run continues at exactly the next sample, with any number of ranks.

Several sources are mixed by their weights. Of each 1,024 samples every source has its share, in random order.
From this and the position follows how many samples of a source came before, so there is no further state.
"""

import json
import math
import os
import sysconfig
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import paths  # noqa: F401  finds the chapters below
import torch
from llama import IGNORE
from options import Config, UsageError
from packed_documents import places_in_documents
from sources import (
    BYTES,
    Meta,
    Tokenizer,
    as_numbers,
    check_width,
    crc_of_samples,
    encode_whole,
    in_words,
    load_tokenizer,
    map_file,
    read_meta,
    read_text,
    text_files,
)
from torch import Tensor

SCAN = 2**22  # tokens checked at once
MOST_TEXT = 10**8  # bytes of text that every process may encode for itself
ROUND = 1024  # samples, of which every source has its share


@dataclass(frozen=True)
class Row:
    """The tokens of one source, uint8, uint16 or uint32, and what is known of them."""

    tokens: Tensor
    weight: float = 1.0
    starts: Tensor | None = None  # where documents begin
    mask: Tensor | None = None  # 1 for each token that is to be predicted; None: all are

    def part(self, begin: int, end: int) -> "Row":
        starts = self.starts
        if starts is not None:
            starts = starts[(starts >= begin) & (starts < end)] - begin
        return Row(self.tokens[begin:end], self.weight, starts, None if self.mask is None else self.mask[begin:end])


@dataclass(frozen=True)
class Corpus:
    """Rows of tokens, one for each source, and how to decode them."""

    rows: tuple[Row, ...]  # to train on
    held_out: tuple[Row, ...]
    vocab_size: int
    decode: Callable[[list[int]], str]
    tokens_per_byte: float | None = None  # of the validation text; None where the text is not known
    messages: tuple[str, ...] = ()  # for the user
    tokenizer: Tokenizer | None = None  # None: tokens are numbers
    fingerprint: str = ""  # of a text, or of what prepare.py has written

    @property
    def train(self) -> Tensor:
        """The training tokens of the first source; `size` counts all."""
        return self.rows[0].tokens

    @property
    def val(self) -> Tensor:
        return self.held_out[0].tokens

    @property
    def size(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


def load_corpus(config: Config) -> Corpus:
    """Read what `--data` names. Raises UsageError if it is missing, empty, too short, or not tokens of the vocabulary.

    Text is read as bytes. Of many files every tenth is for validation, of a single one the last tenth of its text.
    A `.bin` (only token ids, as nanoGPT's) is mapped into memory, not read. A folder with train.bin and
    val.bin gives both, one with a mixture.json several such folders. Meta files of prepare.py are checked.
    """
    path = Path(config.data) if config.data else Path(sysconfig.get_paths()["stdlib"])
    if not path.exists():
        raise UsageError(f"--data {config.data} does not exist; give a text file, a folder or a .bin of tokens")
    parts = [(path, 1.0)]
    if (path / "mixture.json").exists():
        parts = read_mixture(path)
    try:
        if parts[0][0] != path or (path / "train.bin").exists() or (path.suffix == ".bin" and path.is_file()):
            corpus = load_ids(config, parts)
        else:
            corpus = load_text(config, path)
    except OSError as error:
        where = error.filename or path
        raise UsageError(f"--data {config.data}: {where} cannot be read ({os.strerror(error.errno or 0)})") from None
    check_corpus(corpus, config)
    return corpus


def read_mixture(path: Path) -> list[tuple[Path, float]]:
    """(folder, weight) of each source."""
    try:
        found = [
            (path / each["folder"], each["weight"])
            for each in json.loads((path / "mixture.json").read_text())["sources"]
        ]
        if not found or not all(type(weight) in (int, float) and 0 < weight < math.inf for _, weight in found):
            raise ValueError("a weight is not positive")
    except (ValueError, TypeError, KeyError):
        about = '{"sources": [{"folder": "web", "weight": 0.7}, ...]}, weights being positive'
        raise UsageError(f"--data {path}: mixture.json is not {about}") from None
    for (folder, weight), share in zip(found, shares([weight for _, weight in found]), strict=True):
        if not share:
            raise UsageError(f"--data {path}: weight {weight} of {folder.name} is less than 1 in {ROUND}; raise it")
    return found


def load_ids(config: Config, parts: list[tuple[Path, float]]) -> Corpus:
    """A .bin, or for each source a folder with a pair of them."""
    if config.tokenizer:
        raise UsageError(f"--tokenizer {config.tokenizer} reads text, but --data {config.data} is tokens already")
    rows = []
    held_out = []
    metas = []
    for path, weight in parts:
        files = [path] if path.is_file() else [path / "train.bin", path / "val.bin"]
        if missing := [file for file in files if not file.exists()]:
            has = "train.bin but no val.bin; add it, or name train.bin itself" if files[0].exists() else "no train.bin"
            raise UsageError(f"--data {missing[0].parent} holds {has}")
        about = [read_meta(file) for file in files]
        if len(files) == 2 and (about[0] is None) != (about[1] is None):
            raise UsageError(f"--data {path}: of train.json and val.json one is missing; prepare it again")
        found = [map_tokens(file, meta, weight, config) for file, meta in zip(files, about, strict=True)]
        end = len(found[0].tokens) - len(found[0].tokens) // 10
        rows.append(found[0].part(0, end) if len(files) == 1 else found[0])
        held_out.append(found[0].part(end, len(found[0].tokens)) if len(files) == 1 else found[1])
        metas.append([(file, meta) for file, meta in zip(files, about, strict=True) if meta])
    known = [pair for each in metas for pair in each]
    seen = [str(meta.fingerprint()) for _, meta in known]
    bare = [path for (path, _), each in zip(parts, metas, strict=True) if not each]
    seen += [str(crc_of_samples(path if path.is_file() else path / "train.bin")) for path in bare]
    if known or len(parts) > 1:
        seen += [str(weight) for _, weight in parts]
    fingerprint = f"{zlib.crc32(' '.join(seen).encode()):08x}"
    if not known:
        return Corpus(tuple(rows), tuple(held_out), config.vocab_size, as_numbers, fingerprint=fingerprint)
    tokenizer = common_tokenizer(known, config)
    rate = None
    if all(len(each) == 2 and not each[1][1].masked for each in metas):
        # Validation takes samples by weight, so a source counts by its share, not by its size.
        lengths = [each[1][1].text_bytes / max(1, each[1][1].tokens) for each in metas]  # bytes of a token
        counts = shares([weight for _, weight in parts])
        rate = ROUND / max(1, sum(n * length for n, length in zip(counts, lengths, strict=True)))
    size = config.vocab_size or tokenizer.vocab_size
    return Corpus(tuple(rows), tuple(held_out), size, tokenizer.decode, rate, (), tokenizer, fingerprint)


def common_tokenizer(known: list[tuple[Path, Meta]], config: Config) -> Tokenizer:
    """The tokenizer of these files. Raises UsageError if they have several, or options contradict them."""
    file, meta = known[0]
    for other, about in known[1:]:
        for name in ("vocab_size", "eos", "tokenizer"):
            mine = getattr(meta, name)
            theirs = getattr(about, name)
            if mine != theirs:
                raise UsageError(
                    f"--data {config.data}: {file} has {name} {mine} and {other} {theirs}; prepare them alike"
                )
    if 0 < config.vocab_size < meta.vocab_size:
        raise UsageError(
            f"--vocab-size {config.vocab_size}: {file} has {meta.vocab_size} tokens; use that many, or more"
        )
    if config.bin_dtype not in (Config.bin_dtype, meta.dtype):
        raise UsageError(f"--bin-dtype {config.bin_dtype}: {file} is {meta.dtype} by its meta file; leave it out")
    if meta.tokenizer == "bytes":
        return Tokenizer()
    tokenizer = load_tokenizer(str(file.parent / meta.tokenizer), f"--data {config.data}: the tokenizer")
    if tokenizer.vocab_size != meta.vocab_size:
        raise UsageError(
            f"--data {config.data}: its tokenizer has {tokenizer.vocab_size} tokens, not {meta.vocab_size}"
        )
    return tokenizer


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
        training = [(path, data[:end])]
        held_out = [(path, data[end:])]
    texts = [b"".join(text for _, text in some) for some in (training, held_out)]
    tokenizer = Tokenizer()
    if config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer)
        check_encoding([*training, *held_out], path, config.tokenizer)
        ids = [encode_whole(tokenizer, text.decode()) for text in texts]
        train, val = (torch.tensor(tokens, dtype=torch.int32) for tokens in ids)
    else:
        train, val = map(as_row, texts)
    rate = len(val) / len(texts[1]) if texts[1] else None
    size = config.vocab_size or tokenizer.vocab_size
    check = f"{zlib.crc32(texts[0]):08x}"
    if config.tokenizer:
        check = f"{zlib.crc32(array('I', ids[0]).tobytes()):08x}"
    return Corpus((Row(train),), (Row(val),), size, tokenizer.decode, rate, tuple(messages), tokenizer, check)


def check_encoding(files: list[tuple[Path, bytes]], path: Path, tokenizer: str) -> None:
    """Raise UsageError for text that a tokenizer cannot read, or too much text for each process to encode."""
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


def as_row(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def map_tokens(path: Path, meta: Meta | None, weight: float, config: Config) -> Row:
    """The tokens of a .bin, with starts and mask if it has a meta file."""
    if meta:
        starts = map_file(path.with_suffix(".starts"), "int64")
        mask = map_file(path.with_suffix(".mask"), "uint8") if meta.masked else None
        return Row(map_file(path, meta.dtype), weight, starts, mask)
    if not config.vocab_size:
        raise UsageError(f"--vocab-size is missing: {path.name} holds token ids; GPT-2's tokenizer has 50257")
    size = path.stat().st_size
    width = BYTES[config.bin_dtype]
    if size % width:
        raise UsageError(f"--data {path} has {size} bytes, not a multiple of {width}; check --bin-dtype or the file")
    tokens = map_file(path, config.bin_dtype)
    check_width(path, tokens, config.bin_dtype)
    return Row(tokens, weight)


def check_corpus(corpus: Corpus, config: Config) -> None:
    where = f"--data {config.data or '(the standard library)'}"
    every = [("training", row) for row in corpus.rows] + [("validation", row) for row in corpus.held_out]
    for name, row in every:
        tokens = row.tokens
        if len(tokens) <= config.seq_len:
            raise UsageError(
                f"{where} has {len(tokens)} {name} tokens, too few for one sample of --seq-len {config.seq_len} "
                f"and its last label; use more data or a shorter --seq-len"
            )
        # A file of billions of tokens is only sampled here; `Sampler.samples` checks the rest as it is used.
        stride = SCAN * max(1, len(tokens) // (64 * SCAN))
        largest = max(int(tokens[at : at + SCAN].long().max()) for at in range(0, len(tokens), stride))
        if largest >= corpus.vocab_size:
            raise UsageError(
                f"{where} has token id {largest}, beyond --vocab-size {corpus.vocab_size}; "
                f"use at least {largest + 1}, or check --bin-dtype {config.bin_dtype}"
            )
        if config.documents and row.starts is None:
            raise UsageError(f"--documents: {where} does not say where documents begin; make tokens with prepare.py")
    held_out = Sampler(corpus.held_out, config.seq_len, corpus.vocab_size, config.seed, config.documents)
    samples = held_out.held_out(config.eval_samples, 1, 0, 1)
    if all((labels == IGNORE).all() for _, labels, *_ in samples):
        what = f"the first {config.eval_samples} validation samples of {where} have no token to predict"
        raise UsageError(f"--eval-samples {config.eval_samples}: {what}; use more")


def shares(weights: Sequence[float]) -> list[int]:
    """How many of ROUND samples come from each source: in proportion, rounded so that they add up."""
    exact = [ROUND * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_rest[: ROUND - sum(counts)]:
        counts[i] += 1
    return counts


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


class BadToken(ValueError):
    """A token id that the model does not know. Only the rank that has read it knows of it."""


class Sampler:
    """Numbered samples of rows of tokens, and the position of the next sample to train on."""

    def __init__(
        self, rows: Tensor | Sequence[Row], seq_len: int, vocab_size: int, seed: int, documents: bool = False
    ) -> None:
        self.rows = [Row(rows)] if isinstance(rows, Tensor) else list(rows)
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.seed = seed
        self.documents = documents
        self.counts = [(len(row.tokens) - 1) // seq_len for row in self.rows]  # windows of each source
        self.firsts = [0, *accumulate(self.counts)]  # they are numbered one source after the other
        self.windows = self.firsts[-1]
        self.shares = shares([row.weight for row in self.rows])
        self.position = 0
        self._orders: dict[int, tuple[int, Tensor]] = {}
        self._round = -1
        self._mixed = (torch.empty(0), torch.empty(0))

    def window(self, sample: int) -> int:
        """The window of this sample. Each window of a source is used once before any is used again."""
        source, number = self.source_of(sample)
        epoch, place = divmod(number, self.counts[source])
        if self._orders.get(source, (-1,))[0] != epoch:
            # One source keeps the order that existing runs began with; several sources need their own orders.
            several = zlib.crc32(f"{self.seed} {source} {epoch}".encode())
            generator = seeded(self.seed * 1_000_003 + epoch if len(self.rows) == 1 else several)
            self._orders[source] = epoch, torch.randperm(self.counts[source], generator=generator)
        return self.firsts[source] + int(self._orders[source][1][place])

    def source_of(self, sample: int) -> tuple[int, int]:
        """The source of this sample, and how many samples of that source come before it."""
        if len(self.rows) == 1:
            return 0, sample
        number, at = divmod(sample, ROUND)
        if number != self._round:
            sources = torch.repeat_interleave(torch.arange(len(self.rows)), torch.tensor(self.shares))
            generator = seeded(zlib.crc32(f"{self.seed} mixture {number}".encode()))
            sources = sources[torch.randperm(ROUND, generator=generator)]
            before = torch.nn.functional.one_hot(sources, len(self.rows)).cumsum(0)[torch.arange(ROUND), sources] - 1
            self._round = number
            self._mixed = (sources, before)
        source, earlier = (int(each[at]) for each in self._mixed)
        return source, number * self.shares[source] + earlier

    def samples(self, windows: list[int]) -> tuple[Tensor, ...]:
        """Tokens and labels, each [len(windows), S]; with `documents` also each token's place in its document."""
        cut = []
        masks = []
        places = []
        for window in windows:
            source = bisect_right(self.firsts, window) - 1
            row = self.rows[source]
            begin = (window - self.firsts[source]) * self.seq_len
            end = begin + self.seq_len  # the token there is the last label
            cut.append(row.tokens[begin : end + 1].long())
            learned = torch.ones(self.seq_len, dtype=torch.bool)
            if row.mask is not None:
                learned &= row.mask[begin + 1 : end + 1].bool()
            if self.documents and row.starts is not None:
                first, last = torch.searchsorted(row.starts, torch.tensor([begin, end]), right=True).tolist()
                inside = row.starts[first:last] - begin
                learned[inside - 1] = False  # the label would be in the next document
                cu = [0, *inside[inside < self.seq_len].tolist(), self.seq_len]
                places.append(places_in_documents(torch.arange(self.seq_len), cu))
            masks.append(learned)
        whole = torch.stack(cut)
        if int(whole.max()) >= self.vocab_size:
            raise BadToken(f"token id {int(whole.max())} of the data is beyond the vocabulary of {self.vocab_size}")
        tokens = whole[:, :-1].contiguous()
        labels = whole[:, 1:].masked_fill(~torch.stack(masks), IGNORE)  # shifted before the sequence is split
        return (tokens, labels, torch.stack(places)) if self.documents else (tokens, labels)

    def step(self, micro_batch: int, accumulation: int, rank: int, dp: int) -> list[tuple[Tensor, ...]]:
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
    ) -> Iterator[tuple[Tensor, ...]]:
        """This rank's share of the first `samples` windows in their natural order: for validation.

        Every rank gets the same number of micro-batches, since a forward pass may contain collectives. All
        have one size, and their number is a multiple of `at_once`, as a pipeline needs. Missing samples are
        replaced by samples without any label.
        """
        count = min(samples, self.windows) if len(self.rows) == 1 else samples
        found = (self.source_of(sample) for sample in range(count))
        everybody = [self.firsts[source] + number for source, number in found if number < self.counts[source]]
        mine = everybody[rank::dp]
        most = len(everybody[::dp])
        whole = micro_batch * at_once
        for at in range(0, -(-most // whole) * whole, micro_batch):
            part = mine[at : at + micro_batch]
            tokens, labels, *places = self.samples(part + [0] * (micro_batch - len(part)))
            rows = torch.arange(micro_batch)[:, None]
            yield tokens, labels.masked_fill(rows >= len(part), IGNORE), *places
