"""five_d.py next to the trainer, which imports the chapters' in-depth code: same weights, batches, losses, norms."""

from functools import partial

import paths  # noqa: F401  finds the chapters below
import five_d
import model
import pytest
import step as trainer
import torch
import torch.distributed as dist
import train
from fuzz import plain_sgd
from harness.ranks import run_ranks
from harness.reference import assert_same
from llama import LlamaConfig
from test_five_d import Layout, get_batch, mesh_of, name_in_llama, name_of, shards_of, sizes_of

OPTIONS = "--seq-len 16 --global-batch 8 --micro-batch 2 --precision fp64 --steps 8 --warmup 1 --device cpu --balance 0"
TRAINED = [
    (Layout(2, cp=2, experts=0), "--cp 2 --cp-kind zigzag"),
    (Layout(4, tp=2, experts=0), "--tp 2 --sequence-parallel --zero 1"),
    (Layout(4, pp=2, cp=2, experts=0, micro_batches=4), "--pp 2 --cp 2 --cp-kind zigzag --zero 1"),
    (Layout(4, pp=2, tp=2, experts=0, micro_batches=4), "--pp 2 --tp 2 --sequence-parallel"),
    (Layout(4, cp=2, ep=2), "--cp 2 --cp-kind zigzag --experts 4 --ep 2 --zero 1"),
    (Layout(4, pp=2, ep=2), "--pp 2 --experts 4 --ep 2"),
]


def side_by_side(c, mesh, words):
    """What gives for a batch a step of five_d.py and one of the trainer, both from the trainer's own first weights."""
    sizes = LlamaConfig(256, c.hidden, c.n_layers, c.n_heads, c.n_kv_heads, c.ffn_hidden)
    options = train.prepare(words, dist.get_world_size()).config
    me = trainer.make_trainer(options, sizes, torch.device("cpu"), plain_sgd)
    first = dict(model.alone(sizes, options.mixture(sizes)).double().named_parameters())
    full = {name: first[name_in_llama(name)].detach() for name in five_d.build_model(c)}
    flat_params = five_d.build_flat_params(five_d.shard_weights(full, c, mesh), mesh)
    optimizer = torch.optim.SGD(shards_of(flat_params), lr=0.1)

    def steps_on(tokens, labels):
        own = (x.chunk(mesh.dp)[mesh.dp_rank].chunk(c.num_micro_batches) for x in (tokens, labels))
        batch = five_d.shard_batch(tokens, labels, c, mesh)
        run_ours = partial(five_d.train_step, batch, flat_params, optimizer, 1.0, c, mesh)
        return run_ours, partial(trainer.train_step, me, list(zip(*own, strict=True)))

    return steps_on


def trainer_and_five_d(words, layout):
    """Losses and norms of both on the same global batches; clipped at 1."""
    c = sizes_of(layout, seq_len=16, batch=8)
    steps_on = side_by_side(c, mesh_of(layout), words)
    return [[run() for run in steps_on(*get_batch(step, c))] for step in range(3)]


@pytest.mark.prove
@pytest.mark.parametrize(("layout", "words"), [pytest.param(*each, id=name_of(each[0])) for each in TRAINED])
def test_losses_and_norms_match_the_trainer(layout, words, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} and {i * i}. " for i in range(2000)))
    words = f"{OPTIONS} --data {text} {words}".split()
    for rank, steps in enumerate(run_ranks(layout.ranks, trainer_and_five_d, words, layout)):
        for step, (ours, theirs) in enumerate(steps):
            assert_same(ours[0], theirs[0], what=f"loss of step {step}", rank=rank)
            assert_same(ours[1], theirs[1], what=f"norm of step {step}", rank=rank)
