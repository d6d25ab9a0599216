"""five_d.py beside the trainer, which is built from the chapters' depths: the same weights, batches, losses, norms."""

import chapters  # noqa: F401  finds the chapters below
import five_d
import model
import pytest
import rank as trainer
import torch
import torch.distributed as dist
import train
from harness.ranks import run_ranks
from harness.reference import assert_same
from llama import LlamaConfig
from test_five_d import Layout, batch_of, mesh_of, name, sizes_of, their_name

OPTIONS = "--seq-len 16 --global-batch 8 --micro-batch 2 --precision fp64 --steps 8 --warmup 1 --device cpu --balance 0"
TRAINED = [
    (Layout(2, cp=2, experts=0), "--cp 2 --cp-kind zigzag"),
    (Layout(4, tp=2, experts=0), "--tp 2 --sequence-parallel --zero 1"),
    (Layout(4, pp=2, cp=2, experts=0, micro_batches=4), "--pp 2 --cp 2 --cp-kind zigzag --zero 1"),
    (Layout(4, pp=2, tp=2, experts=0, micro_batches=4), "--pp 2 --tp 2 --sequence-parallel"),
    (Layout(4, cp=2, ep=2), "--cp 2 --cp-kind zigzag --experts 4 --ep 2 --zero 1"),
    (Layout(4, pp=2, ep=2), "--pp 2 --experts 4 --ep 2"),
]


def sgd(model, lr):
    return torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 0.0}], lr=0.1)


def trainer_and_five_d(words, layout):
    """Losses and norms of both, from the trainer's own first weights, on the same global batches; clipped at 1."""
    c = sizes_of(layout, length=16, batch=8)
    sizes = LlamaConfig(256, c.hidden, c.layers, c.heads, c.kv_heads, c.inner)
    options = train.prepare(words, dist.get_world_size()).config
    me = trainer.make_rank(options, sizes, torch.device("cpu"), sgd)
    first = dict(model.alone(sizes, options.mixture(sizes)).double().named_parameters())
    mesh = mesh_of(layout)
    whole = {name: first[their_name(name)].detach() for name in five_d.whole_weights(c)}
    lines = five_d.make_lines(five_d.my_pieces(whole, c, mesh), mesh)
    optimizer, both = torch.optim.SGD([line.shard for line in lines], lr=0.1), []
    for step in range(3):
        tokens, labels = batch_of(step, c)
        mine = (x.chunk(me.mesh.sizes["dp"])[me.mesh.place["dp"]].chunk(c.micro_batches) for x in (tokens, labels))
        theirs = trainer.train_step(me, list(zip(*mine, strict=True)))
        ours = five_d.train_step(five_d.cut(tokens, labels, c, mesh), lines, optimizer, 1.0, c, mesh)
        both.append((ours, theirs))
    return both


@pytest.mark.always(
    "ranks4-pp2-cp1-tp2-ep1-experts0-micro_batches4-", "ranks4-pp1-cp2-tp1-ep2-experts4-micro_batches2-"
)
@pytest.mark.parametrize(("layout", "words"), TRAINED, ids=lambda x: name(x) if isinstance(x, Layout) else "")
def test_the_trainer_has_the_same_losses_and_norms_from_the_same_weights(layout, words, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} and {i * i}. " for i in range(2000)))
    words = f"{OPTIONS} --data {text} {words}".split()
    for rank, steps in enumerate(run_ranks(layout.ranks, trainer_and_five_d, words, layout)):
        for step, (ours, theirs) in enumerate(steps):
            assert_same(ours[0], theirs[0], what=f"loss of step {step}", rank=rank)
            assert_same(ours[1], theirs[1], what=f"norm of step {step}", rank=rank)
