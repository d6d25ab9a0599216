"""From tokens on disk to micro-batches on a rank: every sample once, the same samples in every layout."""

import sys

import pytest
import torch
from data import Sampler, as_bytes, load_corpus
from options import Config


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


def test_the_global_batch_is_the_same_samples_for_every_number_of_ranks():
    tokens = torch.arange(16 * 50 + 1)

    def samples(dp, micro_batch):
        samplers = [Sampler(tokens, 16, 10_000, seed=0) for _ in range(dp)]
        batches = [s.step(micro_batch, 12 // (micro_batch * dp), r, dp) for r, s in enumerate(samplers)]
        return sorted(int(row[0]) for pairs in batches for t, _ in pairs for row in t)

    assert samples(1, 12) == samples(2, 3) == samples(4, 1) == samples(3, 2)


def test_labels_are_the_next_tokens_also_over_the_edge_of_a_window():
    tokens, labels = Sampler(torch.arange(100), 16, 1000, seed=0).samples([0, 2])
    assert torch.equal(labels, tokens + 1)
    assert tokens[1, 0] == 32 and labels[1, -1] == 48


@pytest.mark.parametrize(("dtype", "ids"), [("uint16", 65_536), ("uint32", 200_000)])
def test_a_bin_of_tokens_is_mapped_and_read_as_written(dtype, ids, tmp_path):
    tokens = torch.arange(5000) * (ids // 5000)
    width = {"uint16": 2, "uint32": 4}[dtype]
    raw = b"".join(int(t).to_bytes(width, sys.byteorder) for t in tokens)
    (tmp_path / "train.bin").write_bytes(raw)
    (tmp_path / "val.bin").write_bytes(raw[: 100 * width])
    for path, lengths in ((tmp_path, (5000, 100)), (tmp_path / "train.bin", (4500, 500))):
        corpus = load_corpus(Config(data=str(path), bin_dtype=dtype, vocab_size=ids, seq_len=8))
        assert (len(corpus.train), len(corpus.val)) == lengths
        assert corpus.train.dtype == getattr(torch, dtype)
        assert torch.equal(corpus.train[:4500].long(), tokens[:4500])


def test_a_word_that_is_no_byte_is_shown_and_ends_nothing():
    """What an untrained model draws that knows more words than there are bytes."""
    assert as_bytes([100, 31_999, 101, 102]) == "d\ufffdef"


def test_a_folder_is_split_by_file_without_hidden_or_binary_files(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(chr(ord("a") + i) * 10)
    (tmp_path / ".hidden").write_text("secret" * 10)
    (tmp_path / "image").write_bytes(b"\0\1\2" * 10)
    corpus = load_corpus(Config(data=str(tmp_path), seq_len=4))
    assert bytes(corpus.val.tolist()) == b"j" * 10 + b"t" * 10
    assert len(corpus.train) == 180 and not set(b"jt") & set(corpus.train.tolist())


def test_the_default_corpus_is_the_standard_library():
    corpus = load_corpus(Config())
    assert len(corpus.train) > 3_000_000 and len(corpus.val) > 100_000 and corpus.vocab_size == 256
    assert b"import " in bytes(corpus.train[:100_000].tolist())
