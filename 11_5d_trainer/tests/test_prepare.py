"""Own data to tokens on disk and into the trainer: nothing lost, nothing invented, and what does not fit is refused."""

import importlib.util
import json
import shutil
import sys
from itertools import pairwise, product
from unittest import mock

import fuzz
import generate
import hf
import prepare
import pytest
import torch
import torch.distributed as dist
import train
from data import ROUND, Row, Sampler, load_corpus, shares
from harness.ranks import run_ranks
from harness.reference import assert_same
from layouts import whole_gradients
from llama import IGNORE, Llama
from options import Config, UsageError
from sources import checksums, map_file
from test_train import SIZES, arguments, f64, losses, run, train_on

STORIES = [f"Story {i}: " + "\n".join(f"{i} and {j} is {i + j}." for j in range(3 + i % 17)) for i in range(60)]


@pytest.fixture
def stories(tmp_path):
    """60 documents, as a folder of text and as JSON lines."""
    (tmp_path / "stories").mkdir()
    for i, story in enumerate(STORIES):
        (tmp_path / "stories" / f"{i:02}.txt").write_text(story)
    lines = [json.dumps({"id": i, "story": story}) for i, story in enumerate(STORIES)]
    (tmp_path / "stories.jsonl").write_text("\n".join(lines) + "\n\n")
    return tmp_path


def prepared(capsys, *words):
    """What the command says, on stdout and on stderr; ends with 0."""
    code, out, err = command(capsys, *words)
    assert code == 0, err
    return out


def command(capsys, *words):
    with mock.patch.object(sys, "argv", ["prepare.py", *map(str, words)]):
        try:
            code = prepare.main()
        except SystemExit as end:
            code = end.code
    return code, *capsys.readouterr()


def documents(row, eos=0):
    """The documents of a row of tokens, without the token that ends each."""
    borders = [*row.starts.tolist(), len(row.tokens)]
    assert all(row.tokens[end - 1] == eos for end in borders[1:])
    return [row.tokens[a : b - 1].tolist() for a, b in pairwise(borders)]


@pytest.mark.parametrize("source", ["stories", "stories.jsonl"])
def test_every_document_is_there_once_in_its_order_and_every_tenth_for_validation(source, stories, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "UNIT", 150)  # a document is several units, or a unit several documents
    (stories / "out").mkdir()  # empty
    said = prepared(capsys, stories / source, "--field", "story", "--workers", 1, "--out", stories / "out")
    assert said.startswith(f"{stories / source}: 60 documents, {sum(map(len, STORIES)) + 60:,} tokens")
    corpus = load_corpus(Config(data=str(stories / "out"), seq_len=16))
    texts = [[bytes(d).decode() for d in documents(rows[0])] for rows in (corpus.rows, corpus.held_out)]
    assert texts[1] == STORIES[9::10]
    assert texts[0] == [story for i, story in enumerate(STORIES) if i % 10 != 9]
    assert corpus.vocab_size == 256 and corpus.decode([104, 105]) == "hi"
    assert corpus.tokens_per_byte == pytest.approx(1 + 6 / sum(map(len, STORIES[9::10])))
    one = load_corpus(Config(data=str(stories / "out" / "train.bin"), seq_len=16))  # cut in two like any file
    end = len(one.train)
    assert torch.equal(one.held_out[0].starts + end, corpus.rows[0].starts[corpus.rows[0].starts >= end])


@pytest.mark.prove
def test_the_tokens_do_not_depend_on_processes_or_units(stories, capsys, monkeypatch):
    whole = "\n".join(STORIES)
    (stories / "all.txt").write_text(whole)
    for source in ("all.txt", "stories.jsonl"):
        prepared(capsys, stories / source, "--field", "story", "--out", stories / f"{source}-1")
        with monkeypatch.context() as small:
            small.setattr(prepare, "UNIT", 1500)
            assert len(prepare.units_of(stories / source, 10)[0]) > 3
            workers = 2 if source == "all.txt" else 1
            prepared(capsys, stories / source, "--field", "story", "--workers", workers, "--out", stories / source[:-2])
        for name in ("train.bin", "train.starts", "train.json", "val.bin", "val.starts", "val.json"):
            assert (stories / f"{source}-1" / name).read_bytes() == (stories / source[:-2] / name).read_bytes(), name
    corpus = load_corpus(Config(data=str(stories / "all.txt-1"), seq_len=16))
    [train], [val] = (documents(rows[0]) for rows in (corpus.rows, corpus.held_out))
    assert bytes(train + val).decode() == whole and 0.05 < len(val) / len(whole) <= 0.1


def test_a_text_is_cut_before_a_character_however_many_bytes_it_has(tokenizer, tmp_path):
    file = tmp_path / "text.txt"
    for before, character in product(range(4), "aé€𝄞"):
        file.write_text("a" * before + character * 207)
        assert all(file.read_bytes()[: prepare.cut_text(file, at)].decode() for at in range(4, 20))
        corpus = load_corpus(Config(data=str(file), tokenizer=str(tokenizer), seq_len=2))
        assert corpus.tokens_per_byte == len(corpus.val) / len(corpus.decode(corpus.val.tolist()).encode())
    bare = load_corpus(Config(data=str(file), seq_len=2))
    assert bare.fingerprint != corpus.fingerprint and bare.tokens_per_byte == 1


# ------------------------------------------------------------------------------------------------------- refused

BAD = [  # (the file's contents, options, what is said)
    ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', "", "a.jsonl, line at byte 14: text is '3', no text; name another"),
    ("a.jsonl", b'{"body": "a"}\n', "", "a.jsonl, line at byte 0, has no field text; it has body"),
    ("a.jsonl", b'{"text": "a"}\n["b"]\n', "", "a.jsonl, line at byte 14, has no field text; it is no object"),
    ("a.jsonl", b'{"text": "a"}\n{"text"\n', "", "a.jsonl, line at byte 14, is not JSON: "),
    ("a.jsonl", b'{"text": "a\\u0000b"}\n' * 20, "", "a.jsonl, line at byte 0: a character is 0, which ends a"),
    ("a.jsonl", b'{"text": "a\\ud800b"}\n' * 20, "", "a.jsonl is not UTF-8 between bytes 0 and 420; convert it"),
    ("a.jsonl", b'{"text": "a"}\n' * 9, "", "a.jsonl: 9 documents, of which with --val-every 10 none is for valid"),
    ("a.jsonl", b"\n\n", "", "a.jsonl: there is no text in it"),
    ("a.txt", b"", "", "a.txt is empty; there is no text in it"),
    ("a.txt", "Grüße\n".encode("latin-1") * 100, "", "a.txt is not UTF-8 between bytes "),
    ("a.txt", b"text" * 20_000 + b"\0" + b"text" * 20_000, "", "a.txt is binary (a byte is 0), no text"),
    ("a.txt", b"\x1f\x8btext", "", "a.txt is a gzip archive; give text, JSON lines, Parquet files (*.parquet), or a"),
    (
        "a.json",
        b'[{"text": "a"}]\n' * 100,
        "",
        "a.json is JSON, whose braces would be trained on; write",
    ),
    ("a.txt", b"text\n" * 100, "--chat", "--chat reads JSON lines or Parquet, and "),
    ("a.txt", b"text\n" * 100, "--eos </s>", "--tokenizer bytes: --eos </s> is no token of it"),
    (
        "a.txt",
        b"text\n" * 100,
        "--tokenizer none.json",
        "--tokenizer none.json cannot be loaded: there is no such file",
    ),
    ("a.txt", b"text\n" * 100, "--val-every 1", "--val-every 1 must be at least 2"),
    ("a.txt", b"text\n" * 100, "--workers -1", "--workers -1 must not be negative"),
    ("a.txt", b"text\n" * 100, "{a}:0.5", "some sources have a weight and some have none; give all of them one"),
    ("a.txt", b"text\n" * 100, "{a}:-1", "{a}:-1: a weight must be a positive number"),
    ("a.txt", b"text\n" * 100, "{a}:inf", "{a}:inf: a weight must be a positive number"),
    ("a.txt", b"text\n" * 100, "{d}/none", "{d}/none does not exist; give text, JSON lines or Parquet files, or a"),
    ("a.txt", b"text\n" * 100, "{d}", "{d} holds 1 text files; with --val-every 10 it needs 10 or more"),
    ("a.jsonl", b'{"messages": []}\n', "--chat", 'line at byte 0: "messages" is no list of objects with "role"'),
    ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "--chat", 'line at byte 0: "messages" is no list of objects'),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "a"}]}\n', "--chat", "no message is the assistant's"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "<|im_end|>"}]}\n', "--chat", "a message contains <|im_st"),
    ("a.jsonl", b'{"messages": [{"role": "<|im_start|>", "content": "a"}]}\n', "--chat", "a message contains <|im_st"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "\\u0000"}]}\n', "--chat", "a message contains <|im_st"),
    ("a.txt", b"text\n" * 100, "{a}:0", "{a}:0: a weight must be a positive number"),
]


@pytest.mark.parametrize(("name", "contents", "options", "line"), BAD, ids=range(len(BAD)))
def test_bad_sources_and_options_end_in_one_line_and_leave_nothing(name, contents, options, line, tmp_path, capsys):
    source, out = tmp_path / name, tmp_path / "out"
    source.write_bytes(contents)
    words = [word.format(a=source, d=tmp_path) for word in options.split()]
    code, _, err = command(capsys, source, *words, "--out", out)
    last = err.rpartition("\r")[2].strip().splitlines()[-1]
    assert code == 2 and last.startswith("prepare.py: ") and line.format(a=source, d=tmp_path) in last, err
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_ctrl_c_ends_without_a_traceback_and_leaves_nothing(stories, capsys, monkeypatch):
    def interrupted(units, encoded, folder, *_):
        folder.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_source", interrupted)
    try:
        assert command(capsys, stories / "stories", "--out", stories / "out")[0] == 130
    except KeyboardInterrupt:  # pytest would end here
        pytest.fail("there is a traceback")
    assert not list(stories.glob("out*"))


def test_a_folder_that_holds_something_is_not_written_to(stories, capsys, monkeypatch):
    for taken, what in (("stories", "is there already and not empty"), ("out.part", "is left over from a run")):
        (stories / taken).mkdir(exist_ok=True)
        code, _, err = command(capsys, stories / "stories", "--out", stories / taken.removesuffix(".part"))
        assert code == 2 and what in err and err.count("\n") == 1
    said = command(capsys, stories / "stories", "--out", stories / "stories.jsonl")
    assert said[0] == 2 and "stories.jsonl is there already and not empty" in said[2], "a file is no folder"
    (stories / "here").mkdir()
    monkeypatch.chdir(stories / "here")  # a user in it would not see the folder that takes its place
    code, _, err = command(capsys, stories / "stories", "--out", ".")
    assert (code, err) == (2, "prepare.py: --out . is no new folder; give it a name\n")


def change_json(name, **changes):
    def change(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def flip_a_bit(name):
    def change(folder):
        raw = bytearray((folder / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / name).write_bytes(raw)

    return change


SPOILED = {
    "is not as prepare.py wrote it; prepare it again": flip_a_bit("train.bin"),
    "train.starts is not as prepare.py wrote it": flip_a_bit("train.starts"),
    "val.bin has 10 bytes, and val.json says": lambda folder: (folder / "val.bin").write_bytes(bytes(10)),
    "train.starts is not there, and train.json says": lambda folder: (folder / "train.starts").unlink(),
    "holds train.bin but no val.bin": lambda folder: (folder / "val.bin").unlink(),
    "of train.json and val.json one is missing": lambda folder: (folder / "val.json").unlink(),
    "train.json is no meta file of prepare.py": lambda folder: (folder / "train.json").write_text("{"),
    "train.json is no meta file": change_json("train.json", dtype="int64"),
    "train.json is no meta file of": change_json("train.json", vocab_size="256"),
    "its numbers are big-endian": change_json("train.json", byteorder="big"),
    "has vocab_size 256 and .* 300; prepare them alike": change_json("val.json", vocab_size=300),
    "has eos 1 and .* 0; prepare them alike": change_json("train.json", eos=1),
    "has tokenizer x and .* bytes; prepare them alike": change_json("train.json", tokenizer="x"),
    "the tokenizer .* cannot be loaded: there is no": lambda folder: [
        change_json(f"{name}.json", tokenizer="t.json")(folder) for name in ("train", "val")
    ],
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "a.txt").write_text("\n".join(STORIES))
    with mock.patch.object(sys, "argv", ["prepare.py", str(folder / "a.txt"), "--out", str(folder / "out")]):
        prepare.main()
    return folder / "out"


@pytest.mark.parametrize("line", SPOILED)
def test_files_that_are_not_what_their_meta_file_says_are_refused(line, tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "out")
    SPOILED[line](tmp_path / "out")
    with pytest.raises(UsageError, match=line) as refused:
        load_corpus(Config(data=str(tmp_path / "out"), seq_len=16))
    assert "\n" not in str(refused.value)


def test_options_that_contradict_the_meta_file_are_refused(tokens):
    cases = [
        (dict(vocab_size=200), f"--vocab-size 200: {tokens}/train.bin has 256 tokens; use that many, or more"),
        (dict(bin_dtype="uint32"), f"--bin-dtype uint32: {tokens}/train.bin is uint16 by its meta file; leave it out"),
        (dict(tokenizer="t"), f"--tokenizer t reads text, but --data {tokens} is tokens already"),
    ]
    for options, line in cases:
        with pytest.raises(UsageError) as refused:
            load_corpus(Config(data=str(tokens), seq_len=16, **options))
        assert str(refused.value) == line
    for size in (256, 320):
        assert load_corpus(Config(data=str(tokens), seq_len=16, vocab_size=size)).vocab_size == size


def test_of_large_files_some_blocks_are_checked(tokens, tmp_path, monkeypatch):
    import sources

    monkeypatch.setattr(sources, "BLOCK", 100)
    shutil.copytree(tokens, tmp_path / "out")
    for name in ("train", "val"):
        found = {s: checksums(tmp_path / "out" / f"{name}{s}") for s in (".bin", ".starts")}
        change_json(f"{name}.json", checksums=found)(tmp_path / "out")
    read = []
    real = sources.checksum
    monkeypatch.setattr(sources, "checksum", lambda path, block: read.append(block) or real(path, block))
    load_corpus(Config(data=str(tmp_path / "out"), seq_len=16))
    assert 0 in read and max(read) > 50 and len(read) <= 4 * sources.CHECKED
    assert len({*checksums(tmp_path / "out" / "train.bin")}) > 50, "each of a block of its own"
    change_json("val.json", checksums={suffix: sums[:-1] for suffix, sums in found.items()})(tmp_path / "out")
    with pytest.raises(UsageError, match="not as prepare.py wrote it"):
        load_corpus(Config(data=str(tmp_path / "out"), seq_len=16))
    (tmp_path / "large").write_bytes(bytes(2**22))
    first = sources.crc_of_samples(tmp_path / "large")
    (tmp_path / "large").write_bytes(bytes(2**22 - 1) + b"1")
    assert sources.crc_of_samples(tmp_path / "large") != first, "its end, too"
    for names, said in (("abc", "a, b, c"), ("abcd", "a, b, c, ...")):
        assert sources.in_words({"hidden": list(names)}) == f"; skipped: {len(names)} hidden ({said})"


# ----------------------------------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-pair tokenizer.json of 300 tokens, which asks for 8 tokens of each text at most."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(
        STORIES, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    made.enable_truncation(8)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(file))
    return file


def test_the_vocabulary_of_a_tokenizer_reaches_to_its_largest_token_and_nothing_is_added_to_a_text(tmp_path):
    import sources
    from tokenizers import Tokenizer, models, processors

    file = tmp_path / "tokenizer.json"
    made = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    made.post_processor = processors.TemplateProcessing(single="a $A", special_tokens=[("a", 0)])
    made.enable_padding(length=5)
    made.save(str(file))
    loaded = sources.load_tokenizer(str(file))
    assert loaded.vocab_size == 8
    assert loaded.encode("b") == [7], "neither a token at the beginning nor padding at the end"


def test_tokens_of_a_tokenizer_are_decoded_by_the_run_and_its_export_though_all_else_is_gone(
    tokenizer, stories, capsys, monkeypatch
):
    own = ["--tokenizer", tokenizer, "--eos", "<|im_start|>"]
    prepared(capsys, stories / "stories", *own, "--out", stories / "out")
    corpus = load_corpus(Config(data=str(stories / "out"), seq_len=16))
    assert [corpus.decode(tokens) for tokens in documents(corpus.held_out[0], 1)] == STORIES[9::10]
    assert corpus.vocab_size == 300 and corpus.size < 0.6 * sum(map(len, STORIES))
    words = [*arguments(str(stories / "out"), steps=2, sample=8), "--documents", "--out", str(stories / "run")]
    run_ranks(1, run, words, {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48})
    assert (stories / "run" / "sample.txt").read_text().startswith(corpus.decode(corpus.val[:16].tolist()))
    (stories / "out").rename(stories / "moved")
    plan = train.prepare(["--resume", str(stories / "run"), "--steps", "4", "--data", str(stories / "moved")], 1)
    assert plan.corpus.fingerprint == corpus.fingerprint
    prepared(capsys, stories / "stories", "--out", stories / "bytes")
    with pytest.raises(UsageError, match="bytes was not made with the tokenizer of "):
        train.prepare(["--resume", str(stories / "run"), "--evaluate", "--data", str(stories / "bytes")], 1)
    shutil.rmtree(stories / "moved")
    monkeypatch.setattr(sys, "argv", ["generate.py", str(stories / "run"), "--prompt", "Story 7: 7", "--tokens", "3"])
    assert generate.main() == 0
    assert capsys.readouterr().out.startswith("Story 7: 7")
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("safetensors"):
        import transformers

        hf.export(str(stories / "run"), str(stories / "exported"))
        theirs = transformers.AutoTokenizer.from_pretrained(stories / "exported")
        assert theirs.decode(theirs.encode(STORIES[0], add_special_tokens=False)) == STORIES[0]
        assert json.loads((stories / "exported" / "config.json").read_text())["eos_token_id"] == 1


@pytest.mark.prove
def test_a_resumed_run_reads_its_text_with_its_own_copy_of_the_tokenizer(tokenizer, text, tmp_path):
    mine = shutil.copy(tokenizer, tmp_path / "mine.json")
    words = [*arguments(text, steps=1, warmup=0, tokenizer=mine), "--out", str(tmp_path / "run")]
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}
    run_ranks(1, run, words, sizes)
    mine.unlink()
    again = train.prepare(["--resume", str(tmp_path / "run"), "--steps", "4"], 1)
    moved = train.prepare(["--resume", str(tmp_path / "run"), "--steps", "4", "--tokenizer", str(tokenizer)], 1)
    assert again.corpus.vocab_size == moved.corpus.vocab_size == 300
    about = json.loads(tokenizer.read_text())
    about["normalizer"] = {"type": "Replace", "pattern": {"String": "times"}, "content": "plus"}
    mine.write_text(json.dumps(about))
    with pytest.raises(UsageError, match="it was trained on .* tokens, but|has other contents or weights"):
        train.prepare(["--resume", str(tmp_path / "run"), "--steps", "4", "--tokenizer", str(mine)], 1)


def test_the_end_of_a_document_is_the_tokenizers_own_or_what_is_asked_for(tokenizer, stories, capsys, monkeypatch):
    import sources

    (stories / "folder").mkdir()
    shutil.copy(tokenizer, stories / "folder")
    about = stories / "folder" / "tokenizer_config.json"
    about.write_text('{"eos_token": {"content": "<|im_end|>"}, "more": 1}')
    for name, option, eos in ((tokenizer, [], 0), (stories / "folder", [], 2), (tokenizer, ["--eos", "a"], None)):
        out = stories / f"out-{eos}"
        prepared(capsys, stories / "stories", "--tokenizer", name, *option, "--out", out)
        corpus = load_corpus(Config(data=str(out), seq_len=16))
        eos = sources.load_tokenizer(str(tokenizer)).id_of("a") if eos is None else eos
        assert [corpus.decode(tokens) for tokens in documents(corpus.held_out[0], eos)] == STORIES[9::10]
        corpus.tokenizer.save(stories / f"run-{eos}" / "tokenizer")
        again = generate.tokenizer_of(Config(), stories / f"run-{eos}" / "tokenizer")
        assert generate.tokenizer_of(Config(tokenizer=str(name)), stories / "old").encode("7") == again.encode("7")
        assert generate.ends_of_text(stories, again) == {eos}
    sources.set_own_end(stories / "folder", "a")
    assert json.loads(about.read_text()) == {"eos_token": "a", "more": 1}
    both = [stories / "stories", stories / "stories.jsonl", "--field", "story", "--tokenizer", tokenizer]
    prepared(capsys, *both, "--out", stories / "both")
    rows = load_corpus(Config(data=str(stories / "both"), seq_len=16))  # whose sources share a tokenizer
    assert rows.size == sum(len(row.tokens) for row in rows.rows) > len(rows.train)
    assert [[rows.decode(tokens) for tokens in documents(row)] for row in rows.held_out] == [STORIES[9::10]] * 2
    monkeypatch.setattr("data.load_tokenizer", lambda *_: sources.Tokenizer())
    with pytest.raises(UsageError, match="its tokenizer has 256 tokens, not 300$"):
        load_corpus(Config(data=str(stories / "both"), seq_len=16))
    made = sources.load_tokenizer(str(tokenizer))
    assert made.decode([2, 400, 2]) == "<|im_end|><|im_end|>"  # a model may have more words than its tokenizer
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    hub = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(tokenizer)), eos_token="b")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: hub)
    named = sources.load_tokenizer("on/the-hub")
    named.save(stories / "saved")
    again = sources.load_tokenizer(str(stories / "saved"))
    assert named.eos == again.eos == named.id_of("b") and named.encode(STORIES[5]) == again.encode(STORIES[5])
    assert again.decode(again.encode(STORIES[5])) == STORIES[5]


def test_a_long_text_is_encoded_in_pieces_with_the_same_tokens(tokenizer, monkeypatch):
    import sources

    loaded = sources.load_tokenizer(str(tokenizer))
    text = "\n".join(STORIES)
    whole = loaded.encode(text)
    assert loaded.decode(whole) == text  # and is not cut off after 8 tokens
    monkeypatch.setattr(sources, "PIECE", 300)
    assert len(list(sources.pieces(text))) > 20 and sources.encode_whole(loaded, text) == whole
    assert "".join(sources.pieces("x" * 1000)) == "x" * 1000


# ------------------------------------------------------------------------------------------------------------ chat

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}] * 2


@pytest.mark.parametrize("kind", ["bytes", "tokenizer"])
def test_of_a_chat_only_answers_and_their_ends_are_learned(kind, tokenizer, tmp_path, capsys):
    lines = [json.dumps({"messages": [{"role": "system", "content": f"No. {i}"}, *CHAT]}) for i in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    own = ["--tokenizer", tokenizer] if kind == "tokenizer" else []
    prepared(capsys, tmp_path / "chat.jsonl", "--chat", *own, "--out", tmp_path / "out")
    corpus = load_corpus(Config(data=str(tmp_path / "out"), seq_len=64))
    [row] = corpus.rows
    turn = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4.<|im_end|>\n"
    assert corpus.decode(documents(row)[3]) == f"<|im_start|>system\nNo. 3<|im_end|>\n{turn}{turn}"
    sampler = Sampler(corpus.rows, 64, corpus.vocab_size, 0)
    _, labels = sampler.samples(list(range(sampler.windows)))
    learned = labels.flatten()[labels.flatten() != IGNORE].tolist()
    answers = corpus.decode(learned).split("<|im_end|>")
    assert len(answers) > 60 and set(answers[1:-1]) == {"4."}
    assert torch.equal(row.tokens[1 : 1 + labels.numel()][labels.flatten() != IGNORE].long(), f64(learned).long())
    [one] = load_corpus(Config(data=str(tmp_path / "out" / "train.bin"), seq_len=64)).held_out
    assert torch.equal(one.mask, row.mask[-len(one.tokens) :])
    with pytest.raises(UsageError, match="^--eval-samples 1: the first 1 validation samples .* no token to predict; "):
        load_corpus(Config(data=str(tmp_path / "out"), seq_len=4, eval_samples=1))
    if kind == "tokenizer":
        assert (row.tokens == 2).sum() == (row.tokens == 1).sum() == 5 * 36  # marks are tokens of their own
        assert corpus.tokens_per_byte is None
    flip_a_bit("train.mask")(tmp_path / "out")
    with pytest.raises(UsageError, match="train.mask is not as prepare.py wrote it"):
        load_corpus(Config(data=str(tmp_path / "out"), seq_len=64))


# --------------------------------------------------------------------------------------------------------- mixture


def sources_of(*lengths, weights):
    firsts = [1000 * i for i in range(len(lengths))]
    return [Row(torch.arange(n) + first, w) for n, first, w in zip(lengths, firsts, weights, strict=True)]


def test_each_source_has_its_share_and_its_windows_come_once_an_epoch():
    sampler = Sampler(sources_of(4 * 64 + 1, 4 * 20 + 1, weights=(3, 1)), 4, 2000, seed=5)
    assert sampler.shares == [768, 256]
    seen = [sampler.window(n) for n in range(2 * ROUND)]
    for begin in (0, ROUND):
        assert sum(window >= 64 for window in seen[begin : begin + ROUND]) == 256
    assert [window >= 64 for window in seen[:ROUND]] != [window >= 64 for window in seen[ROUND:]]
    first, second = [w for w in seen if w < 64], [w - 64 for w in seen if w >= 64]
    mixed = list(map(Sampler(sources_of(257, 257, weights=(3, 1)), 4, 2000, seed=6).window, range(ROUND)))
    orders = [[w % 64 for w in mixed if (w >= 64) == late][:64] for late in (False, True)]
    assert [w >= 64 for w in mixed] != [w >= 64 for w in seen[:ROUND]] and first[:64] != orders[0] != orders[1]
    for windows, count in ((first, 64), (second, 20)):
        epochs = [windows[i : i + count] for i in range(0, len(windows) - count + 1, count)]
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert [sampler.window(n) for n in (1500, 3, 1024, 0)] == [seen[n] for n in (1500, 3, 1024, 0)]
    tokens, _ = sampler.samples([63, 64])
    assert tokens.tolist() == [[252, 253, 254, 255], [1000, 1001, 1002, 1003]]


def test_shares_add_up_and_are_in_proportion():
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 12):
        weights = (torch.rand(count, generator=generator) + 0.01).tolist()
        got = shares(weights)
        assert sum(got) == ROUND
        assert all(abs(n - ROUND * w / sum(weights)) < 1 for n, w in zip(got, weights, strict=True))


def test_a_mixture_gives_the_same_batches_in_every_layout_wherever_it_is_resumed():
    rows = sources_of(16 * 33 + 1, 16 * 50 + 9, 16 * 7 + 1, weights=(0.5, 0.3, 0.2))

    def steps(dp, micro_batch, position, count):
        samplers = [Sampler(rows, 16, 4000, seed=1) for _ in range(dp)]
        for sampler in samplers:
            sampler.position = position
        batch = []
        for _ in range(count):
            each = [s.step(micro_batch, 12 // (micro_batch * dp), r, dp) for r, s in enumerate(samplers)]
            micro = [pair for pairs in zip(*each, strict=True) for pair in pairs]  # in the order of their numbers
            batch.append([torch.cat(tensors) for tensors in zip(*micro, strict=True)])
        return batch

    whole = steps(1, 12, 0, 100)
    for dp, micro_batch, at in ((2, 3, 40), (4, 1, 85), (3, 2, 86), (1, 4, 1)):
        for got, want in zip(steps(dp, micro_batch, 12 * at, 100 - at), whole[at:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_held_out_samples_of_a_mixture_are_those_of_its_sources_once_each():
    sampler = Sampler(sources_of(4 * 30 + 1, 4 * 5 + 1, weights=(1, 1)), 4, 2000, seed=0)
    tokens = torch.cat([t[(y != IGNORE).any(1)] for t, y in sampler.held_out(40, 3, 0, 1)])
    firsts = tokens[:, 0].tolist()
    assert len(set(firsts)) == len(firsts) and sorted(n for n in firsts if n >= 1000) == [1000, 1004, 1008, 1012, 1016]
    assert abs(sum(n < 1000 for n in firsts) - 20) <= 6
    dp = len(firsts) - 1  # one sample more than ranks: a rank with fewer micro-batches would keep the others waiting
    shared = [[*sampler.held_out(40, 1, rank, dp)] for rank in range(dp)]
    assert {len(batches) for batches in shared} == {2}
    found = [tokens[0, 0].item() for batches in shared for tokens, labels in batches if (labels != IGNORE).any()]
    assert sorted(found) == sorted(firsts)
    shared = [[*sampler.held_out(40, 2, rank, 3, at_once=7)] for rank in range(3)]
    assert {(len(batches), *batches[-1][0].shape) for batches in shared} == {(7, 2, 4)}, "as many as a pipeline needs"
    pairs = [pair for batches in shared for pair in batches]
    assert sorted(n for t, y in pairs for n in t[(y != IGNORE).any(1), 0].tolist()) == sorted(firsts)


def test_sources_without_weights_are_mixed_by_their_tokens(stories, capsys):
    (stories / "one.txt").write_text("\ufeff" + "a word " * 99, encoding="utf-8")
    (stories / "stories" / "image").write_bytes(b"\0")
    assert len(prepare.units_of(stories / "stories", 60)[0]) == 60, "one of them for validation"
    border = (stories / "stories.jsonl").read_text().index("\n") + 1
    where, story = next(prepare.records(prepare.Unit(stories / "stories.jsonl", "lines", border, 10**6), "story"))
    assert where.endswith(f", line at byte {border}") and story == STORIES[1]
    said = prepared(capsys, stories / "stories", stories / "one.txt", "--out", stories / "out")
    assert " tokens; skipped: 1 binary (image)\n" in said
    sources = json.loads((stories / "out" / "mixture.json").read_text())["sources"]
    assert [source["weight"] for source in sources] == [sum(map(len, STORIES)) + 60, 7 * 99 + 2]  # its parts end, too
    assert json.loads((stories / "out" / "1-one" / "val.json").read_text())["tokens"] == 70, "its last tenth"
    (stories / "a:0.5").touch()
    for word, path, weight in ((f"{stories}/a:0.5", stories / "a:0.5", 0.0), ("a:b", prepare.Path("a:b"), 0.0)):
        assert prepare.source_and_weight(word) == (path, weight), "a colon may be a part of a name"


def test_token_ids_take_two_bytes_as_long_as_they_fit_and_then_four(stories, capsys, monkeypatch):
    for size, dtype in ((2**16, "uint16"), (2**16 + 1, "uint32")):
        about = dict(vocab_size=size, eos=1, name="large")
        made = prepare.Tokenizer(encode=lambda text, last=size - 1: [last] * len(text), **about)
        monkeypatch.setattr(prepare, "load_tokenizer", lambda name, made=made: made)
        words = ["--tokenizer", "large", "--workers", 1, "--val-every", 2, "--out", stories / dtype]
        prepared(capsys, stories / "stories", *words)
        for name, count in (("train", 30), ("val", 30)):
            about = json.loads((stories / dtype / f"{name}.json").read_text())
            assert (about["dtype"], about["documents"]) == (dtype, count)
            tokens = map_file(stories / dtype / f"{name}.bin", dtype)
            assert len(tokens) == about["tokens"] and {*tokens.tolist()} == {1, size - 1}


@pytest.fixture
def mixture(stories, capsys):
    prepared(capsys, f"{stories}/stories:3", f"{stories}/stories.jsonl:1", "--field", "story", "--out", stories / "out")
    return stories / "out"


@pytest.mark.prove
def test_a_run_on_a_mixture_resumes_in_another_layout_and_not_with_other_weights(mixture):
    words = [*arguments(str(mixture), keep=9), "--documents", "--out", str(mixture.parent / "run")]
    log, folder = train_on(2, words)
    other, _ = train_on(1, ["--resume", f"{folder}/checkpoints/step-000004"])
    assert len(losses(log)) == 8
    for step in range(5, 9):
        assert_same(f64(losses(other)[step]), f64(losses(log)[step]), 1e-9, f"loss and norm of step {step}")
    for change, line in (
        (lambda text: text.replace("3.0", "2.0"), "has other contents or weights than it had then"),
        (lambda text: text.replace("3.0", "3000.0"), "weight 1.0 of 1-stories is less than 1 in 1024; raise it"),
        (lambda text: text.replace("3.0", "-3.0"), "mixture.json is not "),
        (lambda text: text[:-4], "mixture.json is not "),
        (lambda text: text.replace("0-", "7-"), "7-stories holds no train.bin"),
    ):
        before = (mixture / "mixture.json").read_text()
        (mixture / "mixture.json").write_text(change(before))
        with pytest.raises(UsageError, match=line) as refused:
            train.prepare(["--resume", folder, "--steps", "12"], 1)
        assert "\n" not in str(refused.value)
        (mixture / "mixture.json").write_text(before)
    assert train.prepare(["--resume", folder, "--steps", "12"], 1).corpus.size > 0


def test_a_mixture_is_known_by_its_weights_and_contents_also_without_meta_files(tokens, tmp_path):
    def fingerprint():
        return load_corpus(Config(data=str(tmp_path), vocab_size=256, seq_len=16)).fingerprint

    shutil.copytree(tokens, tmp_path / "prepared")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for part in ("train", "val"):
            shutil.copy(tokens / f"{part}.bin", tmp_path / name)
    for other in ("two", "prepared"):
        seen = set()
        for first, change in ((1, 0), (2, 0), (2, 1)):
            sources = [{"folder": "one", "weight": first}, {"folder": other, "weight": 1}]
            (tmp_path / "mixture.json").write_text(json.dumps({"sources": sources}))
            raw = bytearray((tmp_path / "one" / "train.bin").read_bytes())
            raw[100] ^= change
            (tmp_path / "one" / "train.bin").write_bytes(raw)
            seen.add(fingerprint())
        assert len(seen) == 3, other
    one = {"folder": "one", "weight": 1}
    bad = [[], *([one, {"folder": "two", "weight": weight}] for weight in (0, True, float("inf"), 5000))]
    for sources in bad:
        (tmp_path / "mixture.json").write_text(json.dumps({"sources": sources}))
        line = "weight 1 of one is less than 1 in 1024; raise it" if "5000" in str(sources) else "mixture.json is not "
        with pytest.raises(UsageError, match=line):
            fingerprint()


def test_bits_per_byte_of_a_mixture_weigh_its_sources_as_the_validation_does(mixture):
    for name, length in (("0-stories", 4), ("1-stories", 1)):
        count = json.loads((mixture / name / "val.json").read_text())["tokens"]
        change_json("val.json", text_bytes=length * count)(mixture / name)
    rate = load_corpus(Config(data=str(mixture), seq_len=16)).tokens_per_byte
    assert rate == pytest.approx(1 / (0.75 * 4 + 0.25 * 1))


# -------------------------------------------------------------------------------------------------------- documents


def test_labels_end_and_places_begin_again_with_each_document():
    rows = [Row(torch.arange(100), starts=torch.tensor([0, 3, 20, 32, 33, 90]))]
    tokens, labels, places = Sampler(rows, 16, 1000, 0, documents=True).samples([0, 1, 2])
    want = tokens + 1
    for row, column in ((0, 2), (1, 3), (1, 15), (2, 0)):  # before tokens 3, 20, 32 and 33
        want[row, column] = IGNORE
    assert torch.equal(labels, want)
    assert places.tolist() == [[0, 1, 2, *range(13)], [0, 1, 2, 3, *range(12)], [0, *range(15)]]
    assert torch.equal(Sampler(rows, 16, 1000, 0).samples([0, 1, 2])[1], tokens + 1), "without --documents"
    assert rows[0].part(20, 33).starts.tolist() == [0, 12]


def gradients_in_documents(words, layouts):
    for layout in layouts:
        gradients_in_one_layout([*words, *layout.split()])


def gradients_in_one_layout(words):
    """Two steps of the trainer in a layout; and of each document by itself, on one process."""
    plan = train.prepare(words, dist.get_world_size())
    config = plan.config
    me = train.make_trainer(config, SIZES, torch.device("cpu"), fuzz.plain_sgd)
    place, dp = me.mesh.place["dp"], me.mesh.sizes["dp"]
    alone = Llama(SIZES).double()
    sampler = Sampler(plan.corpus.rows, config.seq_len, 256, config.seed, documents=True)
    everybody = Sampler(plan.corpus.rows, config.seq_len, 256, config.seed, documents=True)
    for _ in range(2):
        loss, _ = train.train_step(me, sampler.step(config.micro_batch, config.accumulation(dp), place, dp))
        mine = whole_gradients(me)
        alone.zero_grad()
        [(tokens, labels, places)] = everybody.step(config.global_batch, 1, 0, 1)
        valid, total = (labels != IGNORE).sum(), 0.0
        for row, where in enumerate(places):
            borders = [*(where == 0).nonzero().flatten().tolist(), len(where)]
            for a, b in pairwise(borders):
                part = alone(tokens[row : row + 1, a:b], labels=labels[row : row + 1, a:b]) / valid
                part.backward()
                total += part.item()
        assert abs(loss - total) < 1e-10
        for name, p in alone.named_parameters():
            assert_same(mine[name], p.grad, 1e-10, f"gradient of {name}", dist.get_rank())
        with torch.no_grad():
            for p in alone.parameters():
                p -= 0.1 * p.grad
    assert len(borders) > 1


IN_DOCUMENTS = {
    "alone": (1, "", "--recompute selective", "--recompute full"),
    "tensor and context": (2, "--tp 2 --sequence-parallel", *(f"--cp 2 --cp-kind {k}" for k in ("zigzag", "ulysses"))),
    "others": (2, "--zero 2", "--cp 2 --cp-kind ring", "--cp 2 --cp-kind allgather --recompute full"),
}


@pytest.mark.always("tensor and context")
@pytest.mark.parametrize("which", IN_DOCUMENTS)
def test_documents_in_any_layout_are_those_that_one_process_sees_one_by_one(which, stories, capsys):
    prepared(capsys, stories / "stories", "--out", stories / "out")
    ranks, *layouts = IN_DOCUMENTS[which]
    words = [*arguments(str(stories / "out"), clip=0, seq_len=64, micro_batch=4), "--documents"]
    run_ranks(ranks, gradients_in_documents, words, layouts)


# ---------------------------------------------------------------------------------------------------------- Parquet


def test_parquet_without_pyarrow_says_what_it_needs(stories, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (stories / "a.parquet").write_bytes(b"PAR1")
    code, _, err = command(capsys, stories / "a.parquet", "--out", stories / "out")
    assert (code, err) == (2, f"prepare.py: {stories}/a.parquet needs pyarrow; pip install pyarrow\n")


def test_parquet_is_read_by_pyarrow(stories, capsys):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"story": STORIES, "id": list(range(60))})
    pyarrow.parquet.write_table(table, stories / "a.parquet", row_group_size=7)
    prepared(capsys, stories / "a.parquet", "--field", "story", "--out", stories / "a")
    prepared(capsys, stories / "stories.jsonl", "--field", "story", "--out", stories / "b")
    assert (stories / "a" / "train.bin").read_bytes() == (stories / "b" / "train.bin").read_bytes()
    for options, line in ((["--field", "id"], "id is '0', no text"), ([], "has no field text; it has story, id")):
        code, _, err = command(capsys, stories / "a.parquet", *options, "--out", stories / "c")
        assert code == 2 and line in err
    (stories / "torn.parquet").write_bytes((stories / "a.parquet").read_bytes()[:-50])
    code, _, err = command(capsys, stories / "torn.parquet", "--out", stories / "c")
    assert code == 2 and "torn.parquet cannot be read: " in err and err.count("\n") == 1
