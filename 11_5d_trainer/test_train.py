"""The trainer: equal to one process, exact in what it resumes, clear about what it refuses, over when it is over."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chapters  # noqa: F401  finds the chapters below
import checkpoint
import pytest
import torch
import torch.distributed as dist
import train
from data import Sampler, load_corpus
from engine import Replicated, full_state
from harness.oracle import Trace, assert_same, assert_same_trace, sgd_trace
from harness.ranks import RankFailure, run_ranks
from llama import Llama, LlamaConfig
from model import PRESETS, full_shapes, gather_tensors
from options import Config, UsageError
from single_gpu import accumulate

HERE = Path(__file__).parent
SIZES = LlamaConfig(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48)
TEXT = "\n".join(f"{i} times {i} is {i * i}, and {i} plus {i} is {i + i}." for i in range(2000))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "numbers.txt"
    file.write_text(TEXT)
    return str(file)


def arguments(text, **changes):
    """A small run: 8 steps of 8 samples of 16 tokens, in float64."""
    options = dict(data=text, seq_len=16, steps=8, warmup=2, global_batch=8, micro_batch=2, precision="fp64")
    options |= dict(save_every=4, eval_every=0, eval_samples=9, sample=0, device="cpu") | changes
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def run(words, sizes):
    plan = train.prepare(words, dist.get_world_size())
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, **sizes))
    folder = train.agree_on_folder(plan)
    return train.train(plan, folder), str(folder)


SMALL = {f.name: getattr(SIZES, f.name) for f in dataclasses.fields(LlamaConfig) if f.name != "tied"}


def train_on(ranks, words, **sizes):
    """The log and the run folder of a run on `ranks` ranks."""
    return run_ranks(ranks, run, words, SMALL | sizes)[0]


def losses(log):
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in log if "loss" in line}


def f64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# ----------------------------------------------------------------------------------------- right by the oracle


def plain_sgd(model, lr):
    return torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 0.0}], lr=0.1)


def three_sgd_steps(words):
    """The trainer's own step, with plain SGD, in some layout; and the same three global batches on this rank alone."""
    plan = train.prepare(words, dist.get_world_size())
    config, corpus = plan.config, plan.corpus
    plan = dataclasses.replace(plan, model=SIZES)
    me = train.make_rank(plan, plain_sgd)
    place, dp = me.mesh.place["dp"], me.mesh.sizes["dp"]

    def batches(rank):
        """Unequal numbers of valid tokens: every rank and micro-batch loses others."""
        sampler = Sampler(corpus.train, config.seq_len, 256, config.seed)
        steps = [sampler.step(config.micro_batch, config.accumulation(dp), rank, dp) for _ in range(3)]
        return [
            [(t, labels.masked_fill(t % (3 + i + rank) == 0, -100)) for i, (t, labels) in enumerate(step)]
            for step in steps
        ]

    parallel = Trace()
    for step in batches(place):
        parallel.losses.append(train.train_step(me, step)[0])
        parallel.gradients.append(full_gradients(me))
    parallel.weights = full_state(me.engine, me.model, me.mesh)["weights"]
    if dist.get_rank() > 1:  # two ranks compare; they hold different pieces of everything
        return
    alone = Llama(SIZES).double()
    everybody = [batches(rank) for rank in range(dp)]
    oracle = sgd_trace(
        dict(alone.named_parameters()),
        lambda step: accumulate(alone, [pair for rank in everybody for pair in rank[step]]).item(),
    )
    assert_same_trace(parallel, oracle, rank=dist.get_rank())


def full_gradients(me):
    if isinstance(me.engine, Replicated):
        mine = {name: p.grad for p, name in me.engine.names.items()}
    else:
        mine = me.engine.full_gradients()
    return {name: gradient.clone() for name, gradient in gather_tensors(me.model, mine, me.mesh).items()}


# Every technique alone, with each earlier one, and all at once: (ranks, options).
LAYOUTS = [
    (1, ""),
    (2, ""),
    (4, ""),
    (3, "--global-batch 12 --zero 1"),
    (4, "--zero 1"),
    (4, "--zero 2"),
    (4, "--zero 3"),
    (3, "--global-batch 12 --zero 3"),
    (2, "--tp 2"),
    (4, "--tp 4"),
    (4, "--tp 4 --sequence-parallel"),
    (4, "--tp 2 --sequence-parallel"),
    (4, "--tp 2 --zero 1"),
    (4, "--tp 2 --sequence-parallel --zero 2"),
    (4, "--tp 2 --sequence-parallel --zero 3"),
    (2, "--cp 2 --cp-kind ring"),
    (4, "--cp 4 --cp-kind allgather"),
    (4, "--cp 4 --cp-kind ring"),
    (4, "--cp 4 --cp-kind zigzag"),
    (4, "--cp 4 --cp-kind ulysses"),
    (4, "--cp 4 --cp-kind usp"),
    (4, "--cp 2 --cp-kind zigzag"),
    (4, "--cp 2 --cp-kind zigzag --zero 1"),
    (4, "--cp 2 --cp-kind ulysses --zero 2"),
    (4, "--cp 2 --cp-kind ring --zero 3"),
    (4, "--cp 2 --cp-kind allgather --tp 2"),
    (4, "--cp 2 --cp-kind ulysses --tp 2 --sequence-parallel"),
    (4, "--cp 2 --cp-kind zigzag --tp 2 --sequence-parallel --zero 3"),
    (8, "--cp 2 --cp-kind zigzag --tp 2 --sequence-parallel --zero 2"),
]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=lambda value: str(value) or "plain")
def test_loss_every_gradient_and_weights_equal_one_process_on_the_global_batch(ranks, layout, text):
    run_ranks(ranks, three_sgd_steps, [*arguments(text, clip=0), *layout.split()])


ADAMW_LAYOUTS = [
    (2, ""),
    (4, "--tp 2 --zero 1"),
    (4, "--zero 3"),
    (4, "--tp 4 --sequence-parallel"),  # 2 K/V heads on 4 ranks
    (4, "--cp 4 --cp-kind usp"),
    (4, "--cp 2 --tp 2 --sequence-parallel --zero 2"),
]


@pytest.mark.parametrize(("ranks", "layout"), ADAMW_LAYOUTS, ids=lambda value: str(value) or "plain")
def test_clipped_adamw_steps_in_any_layout_give_the_losses_and_norms_of_one_rank(ranks, layout, text, tmp_path):
    words = arguments(text, steps=10)
    one = losses(train_on(1, [*words, "--out", str(tmp_path / "one")])[0])
    many = losses(train_on(ranks, [*words, "--out", str(tmp_path / "many"), *layout.split()])[0])
    assert one.keys() == many.keys() == set(range(1, 11))
    for step in one:
        assert_same(f64(many[step]), f64(one[step]), 1e-9, f"loss and norm of step {step}")


def test_validation_does_not_depend_on_the_layout_also_when_ranks_have_unequal_shares(text, tmp_path):
    layouts = [(1, []), (2, []), (4, []), (4, ["--zero", "3"]), (4, ["--cp", "2", "--tp", "2"])]
    runs = [
        [*arguments(text, steps=2, eval_samples=9), "--out", str(tmp_path / str(i)), *layout]
        for i, (_, layout) in enumerate(layouts)
    ]
    values = [train_on(ranks, words)[0][0] for (ranks, _), words in zip(layouts, runs, strict=True)]
    assert all(abs(value["val_loss"] - values[0]["val_loss"]) < 1e-12 for value in values)


def test_recomputation_changes_no_loss(text, tmp_path):
    logs = [
        losses(train_on(2, [*arguments(text, steps=3, recompute=mode), "--out", str(tmp_path / mode)])[0])
        for mode in ("none", "selective", "full")
    ]
    assert logs[0] == logs[1] == logs[2]


def test_it_learns(text, tmp_path):
    log, _ = train_on(2, [*arguments(text, steps=60, lr=0.01, precision="fp32"), "--out", str(tmp_path / "run")])
    validations = [line["val_loss"] for line in log if "val_loss" in line]
    assert abs(validations[0] - math.log(256)) < 0.2
    assert validations[-1] < 2.6


# ----------------------------------------------------------------------------------------------- data


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


# ------------------------------------------------------------------------------------- checkpoint and resume


@pytest.mark.parametrize(("ranks", "tied"), [(1, False), (2, True), (4, False)])
def test_resuming_gives_bit_identical_losses(ranks, tied, text, tmp_path):
    whole = [*arguments(text, precision="fp32", keep=9), *(["--tied"] if tied else []), "--out", str(tmp_path / "run")]
    undisturbed, folder = train_on(ranks, whole, tied=tied)
    resumed, same = train_on(ranks, ["--resume", f"{folder}/checkpoints/step-000004"], tied=tied)
    assert same == folder
    names = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000008", "superseded-step-000008"]
    assert losses(resumed) == losses(undisturbed)  # the floats themselves, not approximately
    assert resumed[-1] == undisturbed[-1]  # the validation at the end sees the same weights
    on_disk = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    assert losses(on_disk) == losses(undisturbed)


@pytest.mark.parametrize("written_by", ["", "--zero 3", "--tp 2 --cp 2 --zero 1"])
@pytest.mark.parametrize("tied", [False, True])
def test_resuming_in_another_layout_goes_on_with_the_same_losses(written_by, tied, text, tmp_path):
    words = [*arguments(text, keep=9), "--out", str(tmp_path / "run"), *(["--tied"] if tied else [])]
    log, folder = train_on(4, [*words, *written_by.split()], tied=tied)
    for ranks, layout in ((1, "--zero 0 --tp 1 --cp 1"), (2, "--zero 2 --tp 1 --cp 1"), (4, "--zero 0 --tp 4 --cp 1")):
        other, _ = train_on(ranks, ["--resume", f"{folder}/checkpoints/step-000004", *layout.split()], tied=tied)
        for step in range(5, 9):
            got, want = f64(losses(other)[step]), f64(losses(log)[step])
            assert_same(got, want, 1e-9, f"loss and norm of step {step} on {ranks} ranks {layout}")


def test_the_data_position_counts_every_sample_of_every_rank_and_micro_batch(text, tmp_path):
    _, folder = train_on(2, [*arguments(text), "--out", str(tmp_path / "run")])  # 2 ranks x 2 micro-batches x 2
    assert checkpoint.find(folder)[2].samples == 8 * 8


def test_only_the_newest_checkpoints_are_kept(text, tmp_path):
    _, folder = train_on(1, [*arguments(text, save_every=1, keep=3), "--out", str(tmp_path / "run")])
    assert [path.name for path in checkpoint.complete(Path(folder))] == ["step-000006", "step-000007", "step-000008"]


def test_an_interrupted_save_leaves_the_last_complete_checkpoint_in_force(text, tmp_path):
    log, folder = train_on(1, [*arguments(text, keep=9), "--out", str(tmp_path / "run")])
    path = Path(folder) / "checkpoints"
    (path / "step-000008" / "manifest.json").unlink()  # as if the machine went down before the rename
    (path / "step-000008").rename(path / ".writing-000008")
    assert checkpoint.find(folder)[1].name == "step-000004"
    again, _ = train_on(1, ["--resume", folder])
    assert losses(again) == losses(log)
    assert not list(path.glob(".writing-*"))


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json"])
def test_a_truncated_checkpoint_is_refused_in_one_line_that_names_the_one_to_use(file, text, tmp_path):
    _, folder = train_on(1, [*arguments(text), "--out", str(tmp_path / "run")])
    damaged = Path(folder) / "checkpoints" / "step-000008" / file
    damaged.write_bytes(damaged.read_bytes()[:-100])
    before = (Path(folder) / "log.jsonl").read_bytes()
    with pytest.raises(UsageError) as refusal:
        train.prepare(["--resume", folder], 1)
    assert file in str(refusal.value) and str(refusal.value).endswith("step-000004"), refusal.value
    assert "\n" not in str(refusal.value)
    assert (Path(folder) / "log.jsonl").read_bytes() == before


def save_to_a_file(words, folder):
    plan = train.prepare(words, 1)
    model = Llama(SIZES)
    progress = checkpoint.Progress(1, 8, len(plan.corpus.train), dataclasses.asdict(plan.config))
    checkpoint.save(Path(folder), {"weights": model.state_dict()}, progress, dist.group.WORLD, 2)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_reason(text, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(RankFailure, match=r"FileExistsError|NotADirectoryError"):
        run_ranks(1, save_to_a_file, arguments(text), str(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints").read_text() == "a file where a folder should be"


# ------------------------------------------------------------------------------------------------- bad input


def bad_inputs(folder, text):
    """(words, start of the one line, ranks)"""
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("only a few words")
    (folder / "odd.bin").write_bytes(b"abc")
    (folder / "ids.bin").write_bytes(bytes([1, 0] * 5000 + [255, 255]))
    (folder / "folder").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "log.jsonl").write_text("")
    (folder / "half").mkdir()
    (folder / "half" / "train.bin").write_bytes(bytes(100))
    d = f"{folder}/"
    return [
        (["--stepz", "3"], "unrecognized arguments: --stepz 3; --help lists the options", 1),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'; --help lists the options", 1),
        (["--preset", "huge"], "argument --preset: invalid choice: 'huge'", 1),
        (["--data", d + "none"], f"--data {d}none does not exist; give a text file, a folder or a .bin of tokens", 1),
        (["--data", d + "empty.txt"], f"--data {d}empty.txt has 0 training tokens, too few for one sample of", 1),
        (["--data", d + "short.txt"], f"--data {d}short.txt has 15 training tokens, too few for one sample of", 1),
        (
            ["--data", text, "--seq-len", "20000"],
            f"--data {text} has 10554 validation tokens, too few for one sample",
            1,
        ),
        (["--data", d + "folder"], f"--data {d}folder holds 0 text files; a folder needs two or more", 1),
        (["--data", d + "half"], f"--data {d}half holds train.bin but no val.bin; add it, or name train.bin itself", 1),
        (["--data", d + "ids.bin"], "--vocab-size is missing: ids.bin holds token ids; GPT-2's tokenizer has 50257", 1),
        (["--data", d + "odd.bin", "--vocab-size", "9"], f"--data {d}odd.bin has 3 bytes, not a multiple of 2;", 1),
        (
            ["--data", d + "ids.bin", "--vocab-size", "50257"],
            f"--data {d}ids.bin has token id 65535, beyond --vocab-size 50257; use at least 65536",
            1,
        ),
        (["--data", text, "--vocab-size", "65"], f"--data {text} has token id 117, beyond --vocab-size 65;", 1),
        (
            ["--global-batch", "30", "--micro-batch", "8"],
            "--global-batch and --micro-batch: global batch 30 is not a multiple of micro-batch 8 x 4",
            4,
        ),
        (["--global-batch", "32"], "--global-batch and --micro-batch: global batch 32 is not a multiple", 3),
        (["--tp", "3"], "--tp 3 x --cp 1 does not divide the 4 ranks of this run; the product may be 1, 2, 4", 4),
        (["--tp", "8"], "--tp 8: 8 tensor-parallel ranks do not divide heads 4; use 1, 2, 4 ranks", 8),
        (["--cp", "3", "--global-batch", "8"], "--cp 3 --cp-kind zigzag: a sequence of 128 tokens does not divide", 3),
        (["--cp", "8", "--cp-kind", "ulysses"], "--cp 8 --cp-kind ulysses: 4 query heads do not divide among 8", 8),
        (["--sequence-parallel"], "--sequence-parallel cuts over tensor-parallel ranks, and --tp is 1; use --tp 2", 1),
        (
            ["--tp", "2", "--sequence-parallel", "--seq-len", "65"],
            "--tp 2: 2 tensor-parallel ranks do not divide sequence 65",
            2,
        ),
        (["--zero", "4"], "argument --zero: invalid choice: 4", 1),
        (["--cp-kind", "star"], "argument --cp-kind: invalid choice: 'star'", 1),
        (["--micro-batch", "0"], "--micro-batch 0 must be at least 1", 1),
        (["--steps", "-1"], "--steps -1 must be at least 1", 1),
        (["--lr", "nan"], "--lr nan must be a positive number", 1),
        (["--lr", "0"], "--lr 0.0 must be a positive number", 1),
        (["--clip", "-1"], "--clip -1.0 must not be negative", 1),
        (["--timeout", "inf"], "--timeout inf must be a positive number", 1),
        (["--min-lr", "1"], "--min-lr 1 is more than --lr 0.003; use at most that", 1),
        (["--steps", "5", "--warmup", "9"], "--warmup 9 is more than --steps 5; use at most 5", 1),
        (["--device", "cuda"], "--device cuda: there is no GPU here; use --device cpu", 1),
        (["--out", d + "run"], f"--out {d}run holds a run already; use --resume {d}run, or another folder", 1),
        (["--out", d + "empty.txt/x"], f"--out {d}empty.txt/x cannot be written to (Not a directory)", 1),
        (["--resume", d + "none"], f"--resume {d}none holds no complete checkpoint;", 1),
    ]


def test_bad_input_is_refused_in_one_line_before_any_process_group(tmp_path, text):
    cases = bad_inputs(tmp_path, text)
    if torch.cuda.is_available():
        cases = [case for case in cases if case[0][0] != "--device"]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for words, line, ranks in cases:
        with pytest.raises(UsageError) as refusal:
            train.prepare(words, ranks)
        said = str(refusal.value)
        assert said.startswith(line), f"{words}: {said}"
        assert "\n" not in said
        assert not dist.is_initialized()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_options_that_would_make_it_another_run_are_refused_on_resume(text, tmp_path):
    _, folder = train_on(1, [*arguments(text), "--out", str(tmp_path / "run")])
    for words in (["--seq-len", "8"], ["--global-batch", "4"], ["--preset", "small"], ["--seed", "1"]):
        with pytest.raises(
            UsageError, match=rf"{words[0]} {words[1]} does not fit .*step-000008, which was trained with"
        ):
            train.prepare(["--resume", folder, "--steps", "12", *words], 1)
    with pytest.raises(UsageError, match=r"--steps 8: .*step-000008 has done 8 already; ask for more"):
        train.prepare(["--resume", folder], 1)
    with pytest.raises(UsageError, match="--out x cannot go with --resume: a resumed run goes on in its own folder"):
        train.prepare(["--resume", folder, "--steps", "12", "--out", "x"], 1)
    assert train.prepare(["--resume", folder, "--steps", "12"], 1).config.steps == 12


def test_other_data_under_the_same_name_is_refused_on_resume(tmp_path):
    data = tmp_path / "data.txt"
    data.write_text(TEXT)
    _, folder = train_on(1, [*arguments(str(data)), "--out", str(tmp_path / "run")])
    data.write_text(TEXT + "one more line\n")
    with pytest.raises(UsageError, match=r"was trained on 94,987 tokens, but --data .*data\.txt now has 95,000"):
        train.prepare(["--resume", folder, "--steps", "12"], 1)


def command(words, rank=0, world_size=1, port=0, **more):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    environment |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, str(HERE / "train.py"), *words], env=environment, **pipes, **more)


def test_the_command_ends_with_code_2_and_exactly_one_line():
    process = command(["--stepz", "3"])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (out, err) == ("", "train.py: unrecognized arguments: --stepz 3; --help lists the options\n")
    second = command(["--stepz", "3"], rank=1, world_size=2)
    assert second.communicate(timeout=60) == ("", "") and second.returncode == 2


# ------------------------------------------------------------------------------------------- the end of a job


def free_port():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return store.port


def start_two(text, folder, timeout):
    """A long run on two processes, once its first checkpoint is there."""
    port = free_port()
    words = [*arguments(text, steps=100_000, save_every=3, timeout=timeout), "--out", str(folder)]
    processes = [command(words, rank, 2, port) for rank in range(2)]
    deadline = time.monotonic() + 60
    while not checkpoint.complete(folder):
        assert time.monotonic() < deadline and processes[0].poll() is None, "the run did not start"
        time.sleep(0.1)
    return processes


def finish(processes, seconds):
    """Exit codes and what was said, once all have ended; fails if one is still running after `seconds`."""
    try:
        return [(p.communicate(timeout=seconds)[1], p.returncode) for p in processes]
    finally:
        for process in processes:
            process.kill()


def test_ctrl_c_leaves_the_last_complete_checkpoint_usable(text, tmp_path):
    processes = start_two(text, tmp_path / "run", timeout=60)
    for process in processes:
        process.send_signal(signal.SIGINT)
    ended = finish(processes, 60)
    assert [code for _, code in ended] == [130, 130]
    assert "go on with --resume" in ended[0][0] and "Traceback" not in ended[0][0]
    plan = train.prepare(["--resume", str(tmp_path / "run")], 2)
    assert plan.resume is not None and plan.resume[2].step >= 3 and plan.resume[2].step % 3 == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stuck_rank_ends_the_others_in_bounded_time(how, text, tmp_path):
    processes = start_two(text, tmp_path / "run", timeout=5)
    processes[1].send_signal(how)
    [(said, code)] = finish(processes[:1], 60)
    processes[1].kill()
    processes[1].communicate()
    assert code not in (0, None)
    assert "train_step" in said or "save" in said, said  # its own traceback
    assert checkpoint.find(str(tmp_path / "run"))[2].step >= 3


def limits_of_all_groups():
    mesh = train.make_mesh(2, 1, 1, 2, timeout=7.0)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in mesh.groups.values()]


def test_every_group_of_the_mesh_has_the_timeout_not_the_default_of_half_an_hour():
    assert run_ranks(4, limits_of_all_groups) == [[7.0] * 4] * 4


def test_presets_have_the_sizes_they_are_named_after():
    counts = {name: sum(shape.numel() for shape in full_shapes(config).values()) for name, config in PRESETS.items()}
    assert 0.5e6 < counts["tiny"] < 0.9e6
    assert counts["llama3-8b"] == 8_030_261_248 and counts["llama3-70b"] == 70_553_706_496
    assert round(counts["smollm-1.7b"] / 1e9, 2) == 1.71
