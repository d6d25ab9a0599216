"""A checkpoint is whole on disk and in shares in memory: what each rank holds of it while it saves and loads.

test_resume.py has what is in it (a resumed run goes on bit by bit, in any layout), test_faults.py what may happen to
it.
"""

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from unittest import mock

import paths  # noqa: F401  finds the chapters below
import checkpoint
import fuzz
import generate
import pytest
import step as step_module
import torch
import train
from full_state import full_state, load_full_state, share_of_state
from gradients import Replicated
from harness.meter import peak_memory, storage_bytes
from harness.ranks import run_ranks
from llama import LlamaConfig
from model import full_shapes
from step import weight_dtype
from test_train import arguments

SIZES = LlamaConfig(hidden=32, layers=4, heads=4, kv_heads=2, intermediate=48)


def by_key(state):
    """(kind, name) -> tensor."""
    found = {("weight", name): tensor for name, tensor in state["weights"].items()}
    return found | {(kind, n): t for n, kinds in state["optimizer"].items() for kind, t in kinds.items()}


def bytes_on_disk(config, sizes):
    """What a whole state has to hold, from the shapes of the model alone: (kind, name) -> bytes."""
    dtype = weight_dtype(config)
    wide = torch.promote_types(dtype, torch.float32)
    expected = {}
    for name, tensor in full_shapes(sizes, config.mixture(sizes)).items():
        learned = tensor.is_floating_point()
        expected["weight", name] = tensor.numel() * (dtype if learned else tensor.dtype).itemsize
        if learned:
            kinds = ["exp_avg", "exp_avg_sq"] + ["master"] * (config.precision == "bf16-master")
            expected |= {(kind, name): tensor.numel() * wide.itemsize for kind in kinds}
            expected["step", name] = 4
    return expected


def largest_at_once(me):
    """Bytes of the largest thing that has to be together for a moment: a parameter of all tensor ranks, a bucket."""
    tp, biggest = me.mesh.sizes["tp"], 0
    for owner in me.owners:
        buckets = [[p] for p in owner.names] if isinstance(owner, Replicated) else [b.params for b in owner.buckets]
        biggest = max(biggest, *(sum(p.numel() for p in params) for params in buckets))
    return biggest * tp * torch.promote_types(weight_dtype(me.config), torch.float32).itemsize


LAYOUTS = [
    (1, ""),
    (4, ""),
    (3, "--global-batch 12 --zero 1"),
    (4, "--zero 2"),
    (4, "--zero 3"),
    (2, "--zero 2 --precision bf16-master"),
    (2, "--tp 2"),
    (4, "--tp 4 --sequence-parallel"),  # 2 K/V heads on 4 ranks
    (4, "--tp 2 --sequence-parallel --zero 1"),
    (4, "--pp 2 --tied"),
    (4, "--pp 2 --schedule dualpipe --micro-batch 1 --tied"),
    (4, "--experts 4 --ep 2"),
    (4, "--experts 4 --ep 2 --pp 2 --schedule dualpipe --micro-batch 1"),
    (4, "--experts 4 --ep 2 --zero 3 --router sigmoid --bias-speed 0.01"),
    (8, "--pp 2 --cp 2 --cp-kind zigzag --tp 2 --experts 4 --ep 2 --zero 2 --tied"),
]
each_layout = pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=lambda value: str(value) or "plain")


def words_for(text, layout):
    return [*arguments(text, bucket_mib=0.01), *layout.split()]


def shares(words):
    """Of this rank: bytes of each tensor of its share, bytes that these keep alive, peak while it was made, the layers
    it has, the bytes on disk that the shapes promise, the largest thing at once."""
    me, batches = fuzz.made(words, SIZES)
    step_module.train_step(me, batches())
    with peak_memory() as memory:
        share = by_key(share_of_state(me.owners, me.model, me.mesh))
    live = {p.untyped_storage().data_ptr() for p in me.model.parameters()}
    assert live.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in share.values()), "the next step changes it"
    kept = {key: tensor.nbytes for key, tensor in share.items()}
    layers = tuple(sorted(me.model.model.layers._modules))
    alive, expected = storage_bytes(share.values()), bytes_on_disk(me.config, me.model.config)
    return kept, alive, memory.peak, layers, expected, largest_at_once(me)


@pytest.mark.always("4---experts 4 --ep 2 --pp 2 --schedule dualpipe --micro-batch 1")
@each_layout
def test_each_tensor_is_kept_whole_by_one_rank_and_all_ranks_of_a_stage_keep_about_as_much(ranks, layout, text):
    results = run_ranks(ranks, shares, words_for(text, layout))
    expected = results[0][4]
    times = Counter(key for kept, *_ in results for key in kept)
    assert times == dict.fromkeys(expected, 1), "not exactly once: " + str(
        {key: times[key] for key in times.keys() | expected.keys() if times[key] != 1 or key not in expected}
    )
    assert {key: size for kept, *_ in results for key, size in kept.items()} == expected
    for who, (kept, alive, peak, layers, _, largest) in enumerate(results):
        stage = [sum(other.values()) for other, *_, theirs, _, _ in results if theirs == layers]
        most = sum(stage) / len(stage) + max(expected.values())
        assert sum(kept.values()) <= most, f"rank {who} keeps {sum(kept.values()):,} bytes of {sum(stage):,}"
        assert alive == sum(kept.values()), f"rank {who}: {alive:,} bytes are alive for {sum(kept.values()):,}"
        # While it saves, what comes by is there as pieces of all ranks, put together, in host memory, and in the copy
        # that is kept; and gloo may still have a buffer or two.
        assert peak <= alive + 6 * largest, f"rank {who}: {peak:,} bytes for a share of {alive:,}"


def saved_while_training(words, folder):
    """Hand over the share, and train on while it may not have been written yet. Returns what was there to be saved."""
    me, batches = fuzz.made(words, SIZES)
    step_module.train_step(me, batches())
    before = full_state(me.owners, me.model, me.mesh)
    share = share_of_state(me.owners, me.model, me.mesh)
    step_module.train_step(me, batches())
    progress = checkpoint.Progress(1, 8, 1, dataclasses.asdict(me.config), dataclasses.asdict(me.model.config))
    saver = checkpoint.Saver(Path(folder), me.mesh.groups["saving"], 2)
    saver.save(share, progress)
    saver.finish()
    return before


@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "layout"), [(2, ""), (2, "--experts 4 --ep 2")])
def test_the_share_is_a_copy_that_the_next_step_does_not_change(ranks, layout, text, tmp_path):
    before = run_ranks(ranks, saved_while_training, words_for(text, layout), str(tmp_path))[0]
    _, path, progress, _ = checkpoint.find(str(tmp_path))
    config = train.Config(**progress.config)
    found = checkpoint.load(path, full_shapes(SIZES, config.mixture(SIZES)), torch.float64)
    got, want = by_key(found), by_key(before)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key


# ------------------------------------------------------------------------------------------------------- loading


def loaded(words, folder):
    """Load a checkpoint and gather it again. Returns that, how often each tensor was read and the table of contents,
    the peak over what is held afterwards, the buckets, and the largest thing at once."""
    me, _ = fuzz.made(words, SIZES)
    read_from, read_index, asked, opened = checkpoint.reader, checkpoint.dcp.FileSystemReader.read_metadata, [], []

    def counting(path):
        read, saved = read_from(path)
        return lambda name, *of: (asked.append(name), read(name, *of))[1], saved

    def read_and_count(self, *args, **more):
        opened.append(self)
        return read_index(self, *args, **more)

    like = full_shapes(me.model.config, me.config.mixture(me.model.config))
    readers = mock.patch.object(checkpoint, "reader", counting)
    indices = mock.patch.object(checkpoint.dcp.FileSystemReader, "read_metadata", read_and_count)
    with readers, indices, peak_memory() as memory:
        full = checkpoint.load(checkpoint.find(folder)[1], like, weight_dtype(me.config))
        load_full_state(me.owners, me.model, me.mesh, full)
    above = memory.peak - memory.current
    buckets = sum(len(owner.buckets) for owner in me.owners if not isinstance(owner, Replicated))
    again = by_key(full_state(me.owners, me.model, me.mesh))
    return again, Counter(asked), len(opened), above, buckets, largest_at_once(me)


KINDS = ("--tied", "--experts 4", "--router sigmoid --bias-speed 0.01", "--precision bf16-master")  # of models


@pytest.fixture(scope="module")
def written(text, tmp_path_factory):
    """The folder of a checkpoint of a layout's kind of model, from two ranks at ZeRO stage 1; and what is in it."""

    @functools.cache
    def write(kinds):
        folder = str(tmp_path_factory.mktemp("run"))
        words = words_for(text, " ".join([*kinds, "--zero 1"]))
        return folder, by_key(run_ranks(2, saved_while_training, words, folder)[0])

    return lambda layout: write(tuple(kind for kind in KINDS if kind in layout))


@pytest.mark.always("4---tp 4 --sequence-parallel")
@each_layout
def test_what_two_ranks_saved_any_layout_loads_reading_each_tensor_at_most_once_and_one_at_a_time(
    ranks, layout, text, written
):
    folder, want = written(layout)
    results = run_ranks(ranks, loaded, words_for(text, layout), folder)
    for who, (again, asked, opened, above, _, largest) in enumerate(results):
        assert again.keys() == want.keys()
        for key, tensor in want.items():
            assert torch.equal(again[key], tensor), f"rank {who}: {key}"
        assert max(asked.values()) == 1, f"rank {who} reads {asked.most_common(1)}"
        assert opened == 1, f"rank {who} reads the table of contents {opened} times"
        assert above <= 6 * largest, f"rank {who} holds {above:,} bytes more for a moment than when it is done"


@pytest.mark.always("3")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_with_zero_a_rank_reads_the_tensors_that_its_shards_lie_in(zero, text, written):
    folder, want = written("")
    results = run_ranks(4, loaded, words_for(text, f"--zero {zero}"), folder)
    for again, *_ in results:
        assert all(torch.equal(again[key], tensor) for key, tensor in want.items())
    names = len(full_shapes(SIZES))
    for kind in ("weights.", "exp_avg", "exp_avg_sq"):
        read = [sum(name.startswith(kind) or name.endswith("." + kind) for name in asked) for _, asked, *_ in results]
        shared = 3 * results[0][4]  # a bucket has three borders between four ranks, each perhaps inside a tensor
        assert names <= sum(read) <= names + shared and max(read) < names, f"{kind}: {read} of {names} tensors"


@pytest.mark.prove
def test_the_whole_model_on_one_process_is_read_one_tensor_at_a_time(written):
    run = written("--experts 4")[0]  # who is the first to ask trains it, and that is not what is measured
    with peak_memory() as memory:
        model, config, *_ = generate.load_model(run, "cpu")
    like = full_shapes(SIZES, config.mixture(SIZES))
    largest = max(tensor.numel() for tensor in like.values()) * 8
    assert storage_bytes(model.parameters()) == sum(t.numel() for t in like.values()) * 8
    assert memory.peak <= memory.current + 3 * largest
