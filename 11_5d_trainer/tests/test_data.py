"""From tokens on disk to micro-batches on a rank: every sample once, the same samples in every layout."""

import bz2
import gzip
import lzma
import re
import sys

import pytest
import torch
import train
from data import Corpus, Row, Sampler, check_corpus, load_corpus
from options import Config, UsageError
from sources import as_bytes


def test_every_sample_once_per_epoch_and_ranks_see_disjoint_samples():
    tokens = torch.arange(16 * 24 + 1)  # 24 windows; window w starts with token 16 w
    epoch = []
    samplers = [Sampler(tokens, 16, 10_000, seed=3) for _ in range(3)]
    for _ in range(4):  # 4 steps of 2 micro-batches of 1 sample on 3 ranks: one epoch
        step = [s.step(micro_batch=1, accumulation=2, rank=r, dp=3) for r, s in enumerate(samplers)]
        epoch += [int(batches[micro][0][0, 0]) // 16 for micro in range(2) for batches in step]
    assert sorted(epoch) == list(range(24))
    assert epoch != list(range(24)), "samples come in the order of the text"
    assert {s.position for s in samplers} == {24}


def test_labels_are_the_next_tokens_also_over_the_edge_of_a_window():
    tokens, labels = Sampler(torch.arange(100), 16, 1000, seed=0).samples([0, 2])
    assert torch.equal(labels, tokens + 1)
    assert tokens[1, 0] == 32 and labels[1, -1] == 48


@pytest.mark.parametrize(("dtype", "ids"), [("uint16", 65_536), ("uint32", 200_000)])
def test_a_bin_of_tokens_is_mapped_and_read_as_written(dtype, ids, tmp_path):
    tokens = torch.arange(5003) * (ids // 5003)
    width = {"uint16": 2, "uint32": 4}[dtype]
    raw = b"".join(int(t).to_bytes(width, sys.byteorder) for t in tokens)
    (tmp_path / "train.bin").write_bytes(raw)
    (tmp_path / "val.bin").write_bytes(raw[: 100 * width])
    for path, lengths in ((tmp_path, (5003, 100)), (tmp_path / "train.bin", (4503, 500))):
        corpus = load_corpus(Config(data=str(path), bin_dtype=dtype, vocab_size=ids, seq_len=8))
        assert (len(corpus.train), len(corpus.val)) == lengths
        assert corpus.train.dtype == getattr(torch, dtype)
        assert torch.equal(corpus.train[:4503].long(), tokens[:4503])


def test_a_word_that_is_no_byte_is_shown_and_ends_nothing():
    """What an untrained model draws that knows more words than there are bytes."""
    assert as_bytes([100, 256, 31_999, 101, 102]) == "d\ufffd\ufffdef"


def test_a_folder_is_split_by_file_without_hidden_or_binary_files(tmp_path):
    for i in reversed(range(23)):
        (tmp_path / f"{i:02}.txt").write_text(chr(ord("a") + i) * 10)
    for folder in ("tests", ".git"):
        (tmp_path / folder).mkdir()
    (tmp_path / "22.txt").rename(tmp_path / "tests" / "22.txt")  # the last one, below
    (tmp_path / ".git" / "config").write_text("secret" * 10)
    (tmp_path / "nothing").touch()
    (tmp_path / ".hidden").write_text("secret" * 10)
    (tmp_path / "image").write_bytes(b"\0\1\2" * 10)
    (tmp_path / "late").write_bytes(b"text " * 20_000 + b"\0")
    (tmp_path / "chat.jsonl").write_text('{"text": "hello"}')
    corpus = load_corpus(Config(data=str(tmp_path), seq_len=4))
    assert bytes(corpus.val.tolist()) == b"j" * 10 + b"t" * 10
    assert bytes(corpus.train.tolist()) == b"".join(bytes([letter]) * 10 for letter in b"abcdefghiklmnopqrsuvw")
    assert corpus.messages == (
        f"--data {tmp_path}: 23 text files, 2 of them for validation (09.txt, 19.txt); skipped: "
        "1 JSON lines (chat.jsonl), 2 binary (image, late), 1 empty (nothing), 2 hidden (.git/config, .hidden)",
    )
    assert train.prepare(["--data", str(tmp_path), "--seq-len", "4"], 1).messages == list(corpus.messages)


def test_of_few_files_the_last_is_for_validation_and_not_trained_on(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name * 10)
    corpus = load_corpus(Config(data=str(tmp_path), seq_len=4))
    assert (bytes(corpus.train.tolist()), bytes(corpus.val.tolist())) == (b"a" * 10 + b"b" * 10, b"c" * 10)


NO_TEXT = {  # the first bytes of files that end well if they are trained on
    "a gzip archive": gzip.compress(b"text " * 500),
    "a bzip2 archive": bz2.compress(b"text " * 500),
    "an xz archive": lzma.compress(b"text " * 500),
    "a Parquet file": b"PAR1\x15\0" + b"text" * 500,
    "a PNG image": b"\x89PNG\r\n\x1a\n" + b"text" * 500,
    "a JPEG image": b"\xff\xd8\xff\xe0" + b"text" * 500,
    "a NumPy array": b"\x93NUMPY\1" + b"text" * 500,
    "a zip archive": b"PK\3\4" + b"text" * 500,
    "a PDF": b"%PDF-1.7\n" + b"text" * 500,
    "text in UTF-16": ("text" * 500).encode("utf-16"),
    "binary (byte 2000 is 0)": b"text" * 500 + b"\0",
    "JSON lines": b'{"text": "a"}\n' * 500,
}


@pytest.mark.parametrize("what", NO_TEXT)
def test_what_is_no_text_is_refused_by_its_name_whatever_the_file_is_called(what, tmp_path):
    (tmp_path / "text.txt").write_bytes(NO_TEXT[what])
    line = rf"^--data \S+/text.txt is {re.escape(what)}, no (plain )?text; [^\n]+$"
    with pytest.raises(UsageError, match=line) as refused:
        load_corpus(Config(data=str(tmp_path / "text.txt"), seq_len=4))
    assert str(refused.value).endswith("; unpack it first") == ("archive" in what)


def test_text_that_begins_like_something_else_is_text(tmp_path):
    beginnings = ("PAR1 is the magic of Parquet\n", "GIF89a is that of an image\n", "Grüße\n")
    for text in ('{"one": "object"}\nand text\n', *beginnings):
        (tmp_path / "text.txt").write_text(text * 20)
        assert len(load_corpus(Config(data=str(tmp_path / "text.txt"), seq_len=2)).train) > 0


def test_json_is_refused_by_its_name(tmp_path):
    (tmp_path / "a.json").write_text("[1, 2]\n" * 20)
    with pytest.raises(UsageError, match=r"^--data \S+a.json is JSON, whose braces would be trained on; "):
        load_corpus(Config(data=str(tmp_path / "a.json"), seq_len=2))


@pytest.mark.parametrize("vocabulary", [256, 50_257, 128_256])
@pytest.mark.parametrize(("written", "read"), [("int64", "uint16"), ("uint32", "uint16"), ("int64", "uint32")])
def test_token_ids_of_another_width_are_refused(written, read, vocabulary, tmp_path):
    """As uint16, an int64 is its token and three zeros: a loss that falls, and a model of zeros."""
    ids = torch.randint(vocabulary, (4000,), generator=torch.Generator().manual_seed(0))
    raw = b"".join(int(i).to_bytes(8 if written == "int64" else 4, sys.byteorder) for i in ids)
    (tmp_path / "ids.bin").write_bytes(raw)
    wider = {"uint16": "uint32 or int64", "uint32": "int64"}[read]
    with pytest.raises(UsageError, match=f"ids.bin is read as {read} but looks like {wider}; "):
        load_corpus(Config(data=str(tmp_path / "ids.bin"), bin_dtype=read, vocab_size=200_000, seq_len=8))


@pytest.mark.parametrize("contents", [b"text, or nothing but bytes " * 40, b"\x93NUMPY\1\0v\0{" + bytes(4001)])
def test_a_bin_of_something_else_is_refused(contents, tmp_path):
    (tmp_path / "ids.bin").write_bytes(contents)
    with pytest.raises(UsageError, match="is (text, or tokens of one byte|a NumPy array), no token ids of uint16"):
        load_corpus(Config(data=str(tmp_path / "ids.bin"), vocab_size=60_000, seq_len=8))


@pytest.mark.prove
def test_the_default_corpus_is_the_standard_library():
    corpus = load_corpus(Config())
    assert len(corpus.train) > 3_000_000 and len(corpus.val) > 100_000 and corpus.vocab_size == 256
    assert b"import " in bytes(corpus.train[:100_000].tolist())


def test_every_seed_and_epoch_has_an_order_of_its_own():
    orders = {}
    for seed in range(12):
        sampler = Sampler(torch.arange(4 * 40 + 1), 4, 200, seed)
        for epoch in range(12):
            orders[tuple(sampler.window(40 * epoch + i) for i in range(40))] = (seed, epoch)
    assert len(orders) == 144


def test_windows_of_any_length_of_text_end_with_its_last_label_at_most():
    for tokens in range(1, 17):
        row = Row(torch.arange(tokens))
        with pytest.raises(UsageError, match=f"has {tokens} training tokens, too few"):
            check_corpus(Corpus((row,), (row,), tokens, str), Config(seq_len=16))
    for tokens in range(17, 51):
        row = Row(torch.arange(tokens))
        check_corpus(Corpus((row,), (row,), tokens, str), Config(seq_len=16))
        with pytest.raises(UsageError, match=f"has token id {tokens - 1}, beyond --vocab-size {tokens - 1}"):
            check_corpus(Corpus((row,), (row,), tokens - 1, str), Config(seq_len=16))
        sampler = Sampler([row], 16, 51, seed=0)
        batch, labels = sampler.samples(list(range(sampler.windows)))
        assert batch.flatten().tolist() == list(range(16 * sampler.windows))
        assert labels[-1, -1] <= tokens - 1 < labels[-1, -1] + 16
