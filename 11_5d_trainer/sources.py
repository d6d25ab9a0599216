"""Files on disk: text or something else, token ids with or without a meta file, and tokenizers.

prepare.py writes this folder, or several of them and a mixture.json that names them:

    train.bin  val.bin        token ids, uint16 or uint32, and nothing else
    train.json  val.json      what they are: dtype, vocabulary, tokenizer, end of a document, counts, checksums
    train.starts  val.starts  int64: the index of the first token of each document
    train.mask  val.mask      only for chats: a byte per token, 1 where it is to be predicted
    tokenizer/                unless a token is a byte

Files that are no text are refused by name, since training on them as text would succeed and mean nothing.
"""

import json
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import paths  # noqa: F401  finds the chapters below
import torch
from options import UsageError
from torch import Tensor

BYTES = {"uint16": 2, "uint32": 4}
MAGIC = {
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a gzip archive",
    b"PK\3\4": "a zip archive",
    b"BZh91AY&SY": "a bzip2 archive",
    b"\xfd7zXZ\0": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x93NUMPY": "a NumPy array",
    b"ARROW1\0": "an Arrow file",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF-": "a PDF",
    b"\x7fELF": "a program",
    b"SQLite format 3\0": "an SQLite database",
    b"\x80\x02": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
WORDS = (b"PAR1", b"GIF8")  # text may begin with these, but has no byte 0
JSON_LINES = (".jsonl", ".ndjson")
ONE_JSON = "JSON, whose braces would be trained on; write an object a line into a .jsonl, for prepare.py"
PIECE = 2**20  # bytes of text that are encoded at once
BLOCK = 2**26  # bytes per checksum
CHECKED = 16  # how many of these blocks are read when a run starts


# ------------------------------------------------------------------------------------------------- is it text?


def not_text(data: bytes) -> str:
    """What a file with these contents is if it is no text that can be trained on; else ""."""
    zero = data.find(b"\0")
    for magic, name in MAGIC.items():
        if data.startswith(magic) and (zero >= 0 or magic not in WORDS):
            return name
    return f"binary (byte {zero} is 0)" if zero >= 0 else ""


def is_json_lines(path: Path, data: bytes) -> bool:
    """By its name, or because each of its first two lines is a JSON object."""
    lines = data[:PIECE].split(b"\n", 2)[:2]
    return path.suffix in JSON_LINES or (len(lines) == 2 and all(map(is_object, lines)))


def is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def refused(path: Path, data: bytes) -> str:
    """Why a file is not read as text, and what to do about it; "" if it is."""
    if what := not_text(data):
        return what
    return "JSON lines" if is_json_lines(path, data) else ""


def read_text(path: Path, option: str) -> bytes:
    """The text of a file. Raises UsageError, which begins with `option`, if it is none."""
    data = path.read_bytes()
    what = refused(path, data)
    if not what and path.suffix == ".json":
        raise UsageError(f"{option} {path} is {ONE_JSON}")
    if what in ("JSON lines", "a Parquet file"):
        how = f"python 11_5d_trainer/prepare.py {path} --field text --out FOLDER"
        raise UsageError(f"{option} {path} is {what}, no plain text; make tokens of one of its fields: {how}")
    if what:
        todo = "unpack it first" if "archive" in what else "give a text file, a folder or a .bin of tokens"
        raise UsageError(f"{option} {path} is {what}, no text; {todo}")
    return data


def text_files(folder: Path, pattern: str, keep: bool = True) -> tuple[list[tuple[Path, bytes]], dict[str, list[str]]]:
    """Every text file below `folder`, sorted, without hidden files, caches and installed packages; and the
    names of the others, by reason. With `keep` each file is read completely, otherwise only its beginning."""
    skipped = {"__pycache__", "site-packages", "dist-packages", "test", "tests"} if pattern == "*.py" else set()
    found: list[tuple[Path, bytes]] = []
    others: dict[str, list[str]] = {}
    for path in sorted(folder.rglob(pattern)):
        parts = path.relative_to(folder).parts
        if not path.is_file() or any(part in skipped for part in parts):
            continue
        data = b""
        why = "hidden" if any(part.startswith(".") for part in parts) else ""
        if not why:
            with path.open("rb") as file:
                data = file.read(2**16)
                why = refused(path, data)
                data += file.read() if keep and not why else b""
                why = (why or refused(path, data)) if data else "empty"
        if why:
            others.setdefault(why.split(" (")[0], []).append(str(path.relative_to(folder)))
        else:
            found.append((path, data if keep else b""))
    return found, others


def in_words(others: dict[str, list[str]]) -> str:
    """What was skipped, in a few words; "" if nothing was."""
    said = [f"{len(n)} {why} ({', '.join(n[:3])}{', ...' if len(n) > 3 else ''})" for why, n in sorted(others.items())]
    return "; skipped: " + ", ".join(said) if said else ""


# ------------------------------------------------------------------------------------------------ token ids


@dataclass(frozen=True)
class Meta:
    """What a .bin of prepare.py is."""

    dtype: str
    byteorder: str
    vocab_size: int
    tokenizer: str  # "bytes", or a folder, relative to the file's
    eos: int  # the token that ends a document
    tokens: int
    documents: int
    text_bytes: int  # of the text it was made of
    masked: bool  # whether only some tokens are to be predicted
    checksums: dict[str, list[int]]  # by suffix, of each 64 MiB of the file

    def fingerprint(self) -> int:
        return zlib.crc32(json.dumps(asdict(self), sort_keys=True).encode())


def read_meta(path: Path) -> Meta | None:
    """The meta file of a .bin, or None without one. Raises UsageError if it does not describe the file."""
    file = path.with_suffix(".json")
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text())
        meta = Meta(**found)
        numbers = [meta.vocab_size, meta.eos, meta.tokens, meta.documents, meta.text_bytes]
        if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(meta.tokenizer, str):
            raise ValueError("a count is no number")
        sizes = {".bin": meta.tokens * BYTES[meta.dtype], ".starts": 8 * meta.documents}
        sizes |= {".mask": meta.tokens} if meta.masked else {}
        checksums = {suffix: list(meta.checksums[suffix]) for suffix in sizes}
    except (ValueError, TypeError, KeyError, AttributeError):
        names = ", ".join(field.name for field in fields(Meta))
        raise UsageError(f"--data {path}: {file.name} is no meta file of prepare.py, which has {names}") from None
    if meta.byteorder != sys.byteorder:
        raise UsageError(f"--data {path}: its numbers are {meta.byteorder}-endian, those of this machine are not")
    for suffix, size in sizes.items():
        part = path.with_suffix(suffix)
        actual = part.stat().st_size if part.exists() else -1
        if actual != size:
            there = f"has {actual} bytes" if actual >= 0 else "is not there"
            raise UsageError(f"--data {path}: {part.name} {there}, and {file.name} says {size}; prepare it again")
        count = len(checksums[suffix])
        some = range(count) if count <= CHECKED else range(0, count, -(-count // CHECKED))
        whole = count == -(-size // BLOCK)
        if not whole or any(checksum(part, block) != checksums[suffix][block] for block in some):
            raise UsageError(f"--data {path}: {part.name} is not as prepare.py wrote it; prepare it again")
    return meta


def checksum(path: Path, block: int) -> int:
    with path.open("rb") as file:
        file.seek(block * BLOCK)
        return zlib.crc32(file.read(BLOCK))


def crc_of_samples(path: Path) -> int:
    """Checksum of 16 pieces of 1 MiB, evenly spread: enough to recognize a file, and fast."""
    size = path.stat().st_size
    check = 0
    with path.open("rb") as file:
        for i in range(16):
            file.seek(i * size // 16)
            check = zlib.crc32(file.read(2**20), check)
    return check


def checksums(path: Path) -> list[int]:
    return [checksum(path, block) for block in range(-(-path.stat().st_size // BLOCK))]


def map_file(path: Path, dtype: str) -> Tensor:
    """A file as a tensor whose pages are read when they are used."""
    kind: torch.dtype = getattr(torch, dtype)
    size = path.stat().st_size // kind.itemsize
    return torch.from_file(str(path), shared=False, size=size, dtype=kind) if size else torch.empty(0, dtype=kind)


def check_width(path: Path, tokens: Tensor, dtype: str) -> None:
    """Raise UsageError for a .bin without a meta file that holds something else, also read as tokens."""
    with path.open("rb") as file:
        head = file.read(2**16)
    what = next((name for magic, name in MAGIC.items() if len(magic) > 3 and head.startswith(magic)), "")
    if not what and len(head) >= 64 and b"\0" not in head:
        try:
            head.decode()
            broken = len(head)
        except UnicodeDecodeError as error:
            broken = error.start
        what = "text, or tokens of one byte" if broken > len(head) - 4 else ""  # a character may be cut
    if what:
        raise UsageError(f"--data {path} is {what}, no token ids of {dtype}; check the file")
    some = tokens[: 2**16].long()
    low = some[0::2]
    high = some[1::2]
    # A wider number reads as a small number and zeros. Half of an int64's low halves are also zeros.
    if len(high) >= 32 and high.max() < 32 and (low > high.max()).float().mean() >= 0.25:
        wider = "uint32 or int64" if dtype == "uint16" else "int64"
        convert = f"tokens.astype('{dtype if dtype == 'uint32' else 'uint16'}').tofile(...)"
        use = "use --bin-dtype uint32 if it is that, or " if dtype == "uint16" else ""
        raise UsageError(f"--data {path} is read as {dtype} but looks like {wider}; {use}write it again: {convert}")


# ------------------------------------------------------------------------------------------------ tokenizers


def as_bytes(tokens: list[int]) -> str:
    """A model may have more tokens than there are bytes; those above 255 are shown as invalid text."""
    return bytes(token if token < 256 else 0xFF for token in tokens).decode(errors="replace")


def as_numbers(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


@dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back. The default: a token is a byte, and 0, which is in no text, ends a document."""

    encode: Callable[[str], list[int]] = lambda text: list(text.encode())
    decode: Callable[[list[int]], str] = as_bytes
    vocab_size: int = 256
    id_of: Callable[[str], int | None] = lambda token: None  # of a token given by its text
    save: Callable[[Path], Any] = lambda folder: None
    eos: int | None = 0
    name: str = "bytes"


# Ends of a document, where a bare tokenizer.json does not say its own.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
KEPT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def load_tokenizer(name: str, option: str = "--tokenizer") -> Tokenizer:
    """A tokenizer.json, a folder with one, or a name on the Hub. Raises UsageError, in one line."""
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    where = f"{option} {name}"
    if path.is_dir() and not file.exists():
        raise UsageError(f"{where} cannot be loaded: the folder holds no tokenizer.json")
    if not file.exists() and path.suffix == ".json":
        raise UsageError(f"{where} cannot be loaded: there is no such file")
    library = "tokenizers" if file.exists() else "transformers"
    save: Callable[[Path], Any]
    try:
        if file.exists():
            from tokenizers import Tokenizer as Loaded

            loaded: Any = Loaded.from_file(str(file))
            own = own_end(file)
            save = partial(copy_tokenizer, file)
        else:
            from transformers import AutoTokenizer

            whole = AutoTokenizer.from_pretrained(name)
            loaded = whole.backend_tokenizer
            own = whole.eos_token
            save = whole.save_pretrained
    except ModuleNotFoundError as error:
        if error.name not in ("tokenizers", "transformers"):
            raise
        raise UsageError(f"{where} needs {library}; pip install {library}") from None
    except Exception as error:  # many reasons, some of them long
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"{where} cannot be loaded: {reason}") from None
    loaded.no_truncation()  # a file may ask for it, and the rest of each text would be lost
    loaded.no_padding()
    words = loaded.get_vocab(with_added_tokens=True)
    eos = own or next((end for end in ENDS if end in words), None)
    return Tokenizer(
        # No token is added at the beginning of a text: it would appear once in the whole corpus.
        encode=lambda text: loaded.encode(text, add_special_tokens=False).ids,
        decode=lambda tokens: loaded.decode(tokens, skip_special_tokens=False),
        vocab_size=max(words.values()) + 1,
        id_of=loaded.token_to_id,
        save=save,
        eos=words.get(eos),
        name=name,
    )


def own_end(file: Path) -> str | None:
    """The end of a document by the tokenizer_config.json beside a tokenizer.json."""
    about = file.with_name("tokenizer_config.json")
    try:
        found = json.loads(about.read_text()).get("eos_token") if about.exists() else None
    except (ValueError, AttributeError):
        return None
    return found.get("content") if isinstance(found, dict) else found


def set_own_end(folder: Path, eos: str) -> None:
    """Set it in a copy whose documents end with another token, so that its readers stop there."""
    about = folder / "tokenizer_config.json"
    try:
        found = json.loads(about.read_text()) if about.exists() else {}
    except ValueError:
        found = {}
    about.write_text(json.dumps(found | {"eos_token": eos}, indent=1) + "\n")


def copy_tokenizer(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, folder / "tokenizer.json")
    for name in KEPT[1:]:
        if file.name == "tokenizer.json" and file.with_name(name).exists():
            shutil.copy(file.with_name(name), folder)


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces, which are encoded one by one, since at once it would take gigabytes. A piece
    ends where tokens do, after a line break between two non-empty lines; where there is none, anywhere."""
    begin = 0
    while len(text) - begin > PIECE:
        found = LINE_END.search(text, begin + PIECE, begin + 2 * PIECE)
        end = found.end() if found else begin + PIECE
        yield text[begin:end]
        begin = end
    yield text[begin:]


LINE_END = re.compile(r"(?<=\S)\n(?=\S)")


def encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return [token for piece in pieces(text) for token in tokenizer.encode(piece)]
