"""Convert your own data to token ids on disk, once and on all cores, for train.py to map into memory.

    python 11_5d_trainer/prepare.py my_text/ --out tokens                        a folder of text: a file is a document
    python 11_5d_trainer/prepare.py web.jsonl --field text --tokenizer SmolLM/ --out tokens
    python 11_5d_trainer/prepare.py web.parquet:0.7 code/:0.3 --out tokens       two sources, mixed by these weights
    python 11_5d_trainer/prepare.py talks.jsonl --chat --out tokens               conversations: train on answers only

Sources are split into units of some megabytes at line breaks, which processes read and encode. The order is
the source's for any number of processes. A document ends with its own token. sources.py describes the files.

Every tenth document is for validation (`--val-every`); of a single text file, its last tenth. A line of a chat is
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, written as ChatML:

    <|im_start|>user\\nwhat was asked<|im_end|>\\n<|im_start|>assistant\\nthe answer<|im_end|>\\n
                                                                       -------------------- is learned
"""

import argparse
import array
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # Ctrl-C ends the imports below, and each process, without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import paths  # noqa: F401  finds the chapters below
from options import OneLineParser, UsageError
from sources import (
    ONE_JSON,
    Meta,
    Tokenizer,
    checksums,
    encode_whole,
    in_words,
    load_tokenizer,
    refused,
    set_own_end,
    text_files,
)
from tqdm import tqdm

if __name__ == "__main__":  # from here on, main has an end for it
    signal.signal(signal.SIGINT, signal.default_int_handler)

UNIT = 2**22  # bytes of text that a process encodes at once
START, END = "<|im_start|>", "<|im_end|>"
Document = tuple[bytes, bytes, int]  # token ids; whether each is learned, if only some are; bytes of text


@dataclass(frozen=True)
class Unit:
    """A part of a source: bytes of a file from line break to line break, or a row group of a Parquet file."""

    path: Path
    kind: str  # "text", "lines" or "parquet"
    begin: int
    end: int
    ends: bool = True  # whether the unit ends its last document
    split: str = ""  # "train" or "val", where that is known before documents are counted


# ------------------------------------------------------------------------------------------------ what to read


def units_of(source: Path, every: int) -> tuple[list[Unit], str]:
    """The units of a source, and what was skipped. Raises UsageError for what cannot be read."""
    if not source.exists():
        raise UsageError(f"{source} does not exist; give text, JSON lines or Parquet files, or a folder of text")
    if source.is_dir():
        files, others = text_files(source, "*", keep=False)
        if len(files) < every:
            what = f"{len(files)} text files{in_words(others)}"
            raise UsageError(f"{source} holds {what}; with --val-every {every} it needs {every} or more")
        return [unit for file, _ in files for unit in of_text(file)], in_words(others)
    if source.suffix == ".parquet":
        groups = parquet(source).num_row_groups
        return [Unit(source, "parquet", i, i + 1) for i in range(groups)], ""
    with source.open("rb") as file:
        what = refused(source, file.read(2**16))
    if not what and source.suffix == ".json":
        raise UsageError(f"{source} is {ONE_JSON}")
    if what and what != "JSON lines":
        raise UsageError(f"{source} is {what}; give text, JSON lines, Parquet files (*.parquet), or a folder of text")
    if what:
        cuts = [0, *(after_line(source, at) for at in range(UNIT, source.stat().st_size, UNIT))]
        cuts = sorted({*cuts, source.stat().st_size})
        return [Unit(source, "lines", a, b) for a, b in pairwise(cuts)], ""
    size = source.stat().st_size
    border = cut_text(source, size - size // 10)
    return [*of_text(source, 0, border, "train"), *of_text(source, border, size, "val")], ""


def of_text(file: Path, begin: int = 0, end: int | None = None, split: str = "") -> list[Unit]:
    """The units of one document."""
    end = file.stat().st_size if end is None else end
    cuts = sorted({begin, end, *(min(end, cut_text(file, at)) for at in range(begin + UNIT, end, UNIT))})
    return [Unit(file, "text", a, b, b == end, split) for a, b in pairwise(cuts)]


def after_line(path: Path, at: int) -> int:
    with path.open("rb") as file:
        file.seek(at)
        file.readline()
        return file.tell()


def cut_text(path: Path, at: int) -> int:
    """A place near `at` where tokens also end: after a line break between two non-empty lines. Where there is
    none, before any character."""
    with path.open("rb") as file:
        file.seek(at)
        near = file.read(2**16)
    if found := re.search(rb"(?<=\S)\n(?=\S)", near):
        return at + found.end()
    return at + next((i for i, byte in enumerate(near[:4]) if byte & 0xC0 != 0x80), 0)


def parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UsageError(f"{path} needs pyarrow; pip install pyarrow") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


# ------------------------------------------------------------------------------------------- one process, one unit


class Encoder:
    """Converts units to documents; one in each process."""

    def __init__(self, tokenizer: Tokenizer, field: str, chat: bool) -> None:
        self.tokenizer = tokenizer
        self.field = field
        self.chat = chat
        self.code = "H" if tokenizer.vocab_size <= 2**16 else "I"

    def documents(self, unit: Unit) -> list[Document]:
        if unit.kind == "text":
            text = read_part(unit).decode()
            if "\0" in text:
                raise UsageError(f"{unit.path} is binary (a byte is 0), no text")
            return [self.plain(text, str(unit.path))]
        found = []
        for where, record in records(unit, "messages" if self.chat else self.field):
            document = self.conversation(record, where) if self.chat else self.plain(record, where)
            found += [document] if document[0] else []
        return found

    def plain(self, text: Any, where: str) -> Document:
        if not isinstance(text, str):
            raise UsageError(f"{where}: {self.field} is {str(text)[:30]!r}, no text; name another --field")
        if self.tokenizer.name == "bytes" and "\0" in text:
            raise UsageError(f"{where}: a character is 0, which ends a document here; take it out")
        return self.packed(encode_whole(self.tokenizer, text)), b"", len(text.encode())

    def packed(self, ids: Iterable[int]) -> bytes:
        return array.array(self.code, ids).tobytes()

    def conversation(self, messages: Any, where: str) -> Document:
        """ChatML, and which of its tokens are learned: answers, and where they end."""
        ids = array.array(self.code)
        learned = bytearray()
        size = 0
        shaped = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
        if not shaped or not all(isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
            raise UsageError(f'{where}: "messages" is no list of objects with "role" and "content", both text')
        for message in messages:
            role = message["role"]
            content = message["content"]
            if any(mark in text for mark in (START, END, "\0") for text in (role, content)):
                raise UsageError(
                    f"{where}: a message contains {START}, {END} or a 0, which mark its borders; remove it"
                )
            mine = role == "assistant"
            for text, learn in ((f"{START}{role}\n", False), (f"{content}{END}", mine), ("\n", False)):
                part = self.tokenizer.encode(text)
                ids.extend(part)
                learned += bytes([learn]) * len(part)
                size += len(text.encode())
        if not any(learned):
            raise UsageError(f"{where}: no message is the assistant's, so there is nothing to learn")
        return ids.tobytes(), bytes(learned), size


def read_part(unit: Unit) -> bytes:
    with unit.path.open("rb") as file:
        file.seek(unit.begin)
        data = file.read(unit.end - unit.begin)
    return data.removeprefix(b"\xef\xbb\xbf") if unit.begin == 0 else data


def records(unit: Unit, field: str) -> Iterator[tuple[str, Any]]:
    """(position, value of the field) of each record."""
    if unit.kind == "parquet":
        file = parquet(unit.path)
        if field not in file.schema_arrow.names:
            raise UsageError(f"{unit.path} has no field {field}; it has {', '.join(file.schema_arrow.names)}")
        column = file.read_row_group(unit.begin, columns=[field]).column(0).to_pylist()
        yield from ((f"{unit.path}, row {i} of group {unit.begin}", value) for i, value in enumerate(column))
        return
    at = unit.begin
    for line in read_part(unit).split(b"\n"):
        where = f"{unit.path}, line at byte {at}"
        at += len(line) + 1
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            raise UsageError(f"{where}, is not JSON: {line[:30]!r}") from None
        if not isinstance(record, dict) or field not in record:
            has = f"it has {', '.join(map(str, record))}" if isinstance(record, dict) else "it is no object"
            raise UsageError(f"{where}, has no field {field}; {has}")
        yield where, record[field]


encoder: Encoder


def begin(tokenizer: str, field: str, chat: bool) -> None:
    """Initializes each process."""
    global encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are parallel enough
    encoder = Encoder(load_tokenizer(tokenizer) if tokenizer else Tokenizer(), field, chat)


def encode(unit: Unit) -> list[Document]:
    try:
        return encoder.documents(unit)
    except UnicodeError:
        raise UsageError(f"{unit.path} is not UTF-8 between bytes {unit.begin} and {unit.end}; convert it") from None


# ------------------------------------------------------------------------------------------------ what is written


class Writer:
    """Writes train.bin or val.bin, and the files beside it."""

    def __init__(self, folder: Path, name: str, code: str, eos: int, masked: bool, stack: ExitStack) -> None:
        self.path = folder / f"{name}.bin"
        suffixes = (".bin", ".starts", ".mask") if masked else (".bin", ".starts")
        self.files = {suffix: stack.enter_context(self.path.with_suffix(suffix).open("wb")) for suffix in suffixes}
        self.end = array.array(code, [eos]).tobytes()
        self.tokens = self.documents = self.text_bytes = 0
        self.inside = False  # of a document

    def write(self, document: Document, ends: bool) -> None:
        ids, learned, size = document
        if not self.inside:
            self.files[".starts"].write(array.array("q", [self.tokens]).tobytes())
            self.documents += 1
        whole = ids + self.end if ends else ids
        count = len(whole) // len(self.end)
        self.files[".bin"].write(whole)
        if ".mask" in self.files:
            self.files[".mask"].write(learned + bytes(count - len(learned)))
        self.tokens += count
        self.text_bytes += size
        self.inside = not ends

    def meta(self, tokenizer: Tokenizer, folder: str) -> None:
        sums = {suffix: checksums(self.path.with_suffix(suffix)) for suffix in self.files}
        dtype = "uint16" if len(self.end) == 2 else "uint32"
        counts = dict(tokens=self.tokens, documents=self.documents, text_bytes=self.text_bytes)
        about = dict(dtype=dtype, byteorder=sys.byteorder, vocab_size=tokenizer.vocab_size, tokenizer=folder)
        meta = Meta(**about, **counts, eos=tokenizer.eos, masked=".mask" in self.files, checksums=sums)  # type: ignore
        self.path.with_suffix(".json").write_text(json.dumps(asdict(meta), indent=1) + "\n")


def write_source(
    units: list[Unit], encoded: Iterator[list[Document]], folder: Path, tokenizer: Tokenizer, args: Any, bar: tqdm
) -> list[Writer]:
    """Write one source into a folder."""
    folder.mkdir(parents=True)
    code = "H" if tokenizer.vocab_size <= 2**16 else "I"
    seen = 0
    with ExitStack() as stack:
        train, val = (Writer(folder, name, code, tokenizer.eos or 0, args.chat, stack) for name in ("train", "val"))
        for unit, documents in zip(units, encoded, strict=True):
            for document in documents:
                ends = unit.ends or document is not documents[-1]
                chosen = unit.split or ("val" if seen % args.val_every == args.val_every - 1 else "train")
                (val if chosen == "val" else train).write(document, ends)
                seen += ends
            bar.update(unit.end - unit.begin)
    if not (train.tokens and val.tokens):
        what = f"{seen} documents, of which with --val-every {args.val_every} none is for"
        what = f"{what} {'validation' if train.tokens else 'training'}; use another --val-every"
        raise UsageError(f"{units[0].path}: {what if seen else 'there is no text in it'}")
    return [train, val]


def prepare_all(args: argparse.Namespace) -> list[str]:
    """Write everything, under another name until it is complete. Returns messages for the user."""
    sources = [source_and_weight(word) for word in args.sources]
    out = Path(args.out)
    weights = [weight for _, weight in sources]
    if any(weights) and not all(weights):
        raise UsageError("some sources have a weight and some have none; give all of them one, as in web.jsonl:0.7")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} is there already and not empty; give another folder")
    if not out.name:
        raise UsageError(f"--out {out} is no new folder; give it a name")
    part = out.with_name(f"{out.name}.part")
    if part.exists():
        raise UsageError(f"--out {out}: {part} is left over from a run that did not end, or still goes on; remove it")
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else Tokenizer()
    eos = tokenizer.id_of(args.eos) if args.eos else tokenizer.eos
    if eos is None:
        which = f"--eos {args.eos} is no token of it" if args.eos else "it names no end of a document; give --eos TOKEN"
        raise UsageError(f"--tokenizer {args.tokenizer or 'bytes'}: {which}")
    tokenizer = replace(tokenizer, eos=eos)
    found = [units_of(path, args.val_every) for path, _ in sources]
    if args.chat and (wrong := next((units[0].path for units, _ in found if units and units[0].kind == "text"), None)):
        raise UsageError(f"--chat reads JSON lines or Parquet, and {wrong} is text")
    if empty := next((path for (path, _), (units, _) in zip(sources, found, strict=True) if not units), None):
        raise UsageError(f"{empty} is empty; there is no text in it")
    said, mixed = [], []
    size = sum(unit.end - unit.begin for units, _ in found for unit in units)
    rows = any(unit.kind == "parquet" for units, _ in found for unit in units)
    scale: dict[str, Any] = {"unit": " parts"} if rows else {"unit": "B", "unit_scale": True}
    settings = (args.tokenizer, args.field, args.chat)
    workers = min(args.workers or os.cpu_count() or 1, sum(len(units) for units, _ in found))
    try:
        with ExitStack() as stack:
            if workers > 1 and size > 2 * UNIT:  # a process takes seconds to start
                pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(workers, begin, settings))
                run: Any = pool.imap
            else:
                begin(*settings)
                run = map
            bar = stack.enter_context(tqdm(total=size, desc="encode", dynamic_ncols=True, **scale))
            for i, ((path, weight), (units, skipped)) in enumerate(zip(sources, found, strict=True)):
                name = f"{i}-{path.stem or path.resolve().name}" if len(sources) > 1 else "."
                writers = write_source(units, run(encode, units), part / name, tokenizer, args, bar)
                for writer in writers:
                    folder = "tokenizer" if len(sources) == 1 else "../tokenizer"
                    writer.meta(tokenizer, folder if args.tokenizer else "bytes")
                tokens, documents = (sum(getattr(w, what) for w in writers) for what in ("tokens", "documents"))
                mixed.append({"folder": name, "weight": weight or tokens})
                said.append(f"{path}: {documents:,} documents, {tokens:,} tokens{skipped}")
        if args.tokenizer:
            tokenizer.save(part / "tokenizer")
        if args.tokenizer and args.eos:
            set_own_end(part / "tokenizer", args.eos)
        if len(sources) > 1:
            (part / "mixture.json").write_text(json.dumps({"sources": mixed}, indent=1) + "\n")
        part.replace(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return [*said, f"written to {out}; train with --data {out}"]


def source_and_weight(word: str) -> tuple[Path, float]:
    path, colon, weight = word.rpartition(":")
    if not colon or Path(word).exists():
        return Path(word), 0.0
    try:
        number = float(weight)
    except ValueError:
        return Path(word), 0.0
    if not 0 < number < math.inf:
        raise UsageError(f"{word}: a weight must be a positive number")
    return Path(path), number


def main() -> int:
    parser = OneLineParser("prepare.py", description="Your own data to token ids on disk.", allow_abbrev=False)
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE[:WEIGHT]", help="text, *.jsonl, *.parquet, or a folder of text"
    )
    parser.add_argument("--out", required=True, help="folder to write, for train.py's --data")
    parser.add_argument("--field", default="text", help="of JSON lines and Parquet: which one is the text")
    parser.add_argument("--chat", action="store_true", help='the field "messages" of each line is a conversation')
    parser.add_argument("--tokenizer", default="", help="tokenizer.json, a folder with one, or a name; default: bytes")
    parser.add_argument("--eos", default="", help="token that ends a document; default: the tokenizer's own")
    parser.add_argument("--val-every", type=int, default=10, help="which document is for validation: every tenth")
    parser.add_argument("--workers", type=int, default=0, help="processes; default: as many as there are cores")
    args = parser.parse_args()
    if args.val_every < 2:
        parser.error(f"--val-every {args.val_every} must be at least 2")
    if args.workers < 0:
        parser.error(f"--workers {args.workers} must not be negative")
    try:
        said = prepare_all(args)
    except UsageError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename or args.out}: {error.strerror or error}")
    except KeyboardInterrupt:  # what was written is removed
        return 130
    print("\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
