"""five_d.py against a model that is not its own: chapter 01's Llama, with chapter 07's experts, on one process.

SIZES        a model and a batch in which nothing is a multiple of anything that it need not be
Layout       ranks, pp, cp, tp, ep, experts, micro-batches
trained      three steps of SGD on some ranks: losses, norms, all gradients and weights, put together whole
unsharded    the same by chapter 01's module, torch's own autograd, clip_grad_norm_ and SGD
"""

import contextlib
import functools
import io
import itertools
import math
import pickle
import random
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import chapters  # noqa: F401  finds the chapters below
import five_d
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from five_d import IGNORE, Config, Mesh
from harness.meter import communication, held_bytes
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named
from llama import Llama, LlamaConfig
from moe_layer import MoE, MoEConfig

SIZES = Config(4, 16, 4, 2, 12, 4, 2, 21, 16, 2, torch.float64)
Layout = namedtuple("Layout", "ranks pp cp tp ep experts micro_batches", defaults=(1, 1, 1, 1, 4, 2))
LIMITS = (math.inf, 0.5, math.inf)  # of the gradient's norm, in three steps


def sizes_of(layout, **changes):
    experts = layout.experts
    return SIZES._replace(experts=experts, top_k=min(2, experts), micro_batches=layout.micro_batches, **changes)


def batch_of(step, config):
    """Samples with very unequal numbers of labels; in step 1 most of them, and so most ranks, have none."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (config.batch, config.length + 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.rand(config.batch, config.length, generator=generator) < 0.4, IGNORE)
    labels[2 if step == 1 else max(2, config.batch - 2) :] = IGNORE
    return tokens[:, :-1], labels


# ------------------------------------------------------------------------------------------------- one process


def their_name(name):
    """A weight of five_d.py by the name that chapter 01 and chapter 07 give it."""
    layer, _, kind = name.rpartition(".")
    if not layer:
        return {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}[kind] + ".weight"
    inside = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "router": "mlp.gate"}
    inside |= {x: f"self_attn.{x}_proj" for x in "qkvo"} | {x: f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    inside |= {x: f"mlp.experts.{x}" for x in ("w1", "w2", "w3")}
    return f"model.layers.{layer}.{inside[kind]}.weight"


def llama_of(config, whole):
    c = config
    moe = MoEConfig(c.hidden, c.inner, c.experts, c.top_k) if c.experts else None
    own = {"feed_forward": lambda _, parts: MoE(moe, None, None, parts=parts)} if moe else {}
    llama = Llama(LlamaConfig(256, c.hidden, c.layers, c.heads, c.kv_heads, c.inner), **own).double()
    parameters = dict(llama.named_parameters())
    assert sorted(parameters) == sorted(map(their_name, whole))
    for name, x in whole.items():
        parameters[their_name(name)].data.copy_(x)
    return llama, {name: parameters[their_name(name)] for name in whole}


def loss_of(llama, tokens, labels):
    wanted = labels.flatten() != IGNORE
    logits = llama(tokens).flatten(0, 1)[wanted]
    return -logits.log_softmax(-1).gather(1, labels.flatten()[wanted][:, None]).sum() / wanted.sum()


@functools.cache
def unsharded(config, limits=LIMITS, optimizer=torch.optim.SGD):
    llama, w = llama_of(config, five_d.whole_weights(config))
    step_of, losses, norms, gradients = optimizer(w.values(), lr=0.1), [], [], []
    for step, limit in enumerate(limits):
        step_of.zero_grad()
        loss = loss_of(llama, *batch_of(step, config))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(w.values(), limit).item())
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in w.items()})
        step_of.step()
    return losses, norms, gradients, {name: p.detach() for name, p in w.items()}


# -------------------------------------------------------------------------------------------------- on ranks


def mesh_of(layout, ranks=None):
    return Mesh(ranks or list(range(layout.ranks)), layout.pp, layout.cp, layout.tp, layout.ep)


def whole_gradients(lines, config, mesh):
    """From the shards of all ranks, by plain collectives of the test."""
    found = {}
    for line in lines:
        parts = [torch.empty_like(line.shard) for _ in range(line.group.size())]
        dist.all_gather(parts, line.shard.grad.clone(), group=line.group)
        found |= line.named(torch.cat(parts))
    return five_d.gather_whole(found, config, mesh)


def sent_by_gather_whole(config):
    """Bytes of what a rank gives away, and of its weights."""
    mesh, given, gather = mesh_of(Layout(1)), [], dist.all_gather_object
    lines = five_d.make_lines(five_d.my_pieces(five_d.whole_weights(config), config, mesh), mesh)
    mine = {name: p for line in lines for name, p in line.w.items()}

    def weighed(into, x, group):
        given.append(len(pickle.dumps(x)))
        gather(into, x, group=group)

    dist.all_gather_object = weighed
    try:
        five_d.gather_whole(mine, config, mesh)
    finally:
        dist.all_gather_object = gather
    return given[0], sum(p.nbytes for p in mine.values())


def test_whole_weights_are_put_together_from_pieces_and_not_from_the_lines_they_lie_in():
    [(sent, weights)] = run_ranks(1, sent_by_gather_whole, five_d.TINY)
    assert weights <= sent <= 1.5 * weights, f"{sent:,} bytes for {weights:,} of weights"


def trained(config, layout, ranks=None, limits=LIMITS, optimizer=torch.optim.SGD, **more):
    mesh = mesh_of(layout, ranks)
    lines = five_d.make_lines(five_d.my_pieces(five_d.whole_weights(config), config, mesh), mesh)
    step_of = optimizer([line.shard for line in lines], lr=0.1)
    losses, norms, gradients = [], [], []
    for step, limit in enumerate(limits):
        batch = five_d.cut(*batch_of(step, config), config, mesh)
        loss, norm = five_d.train_step(batch, lines, step_of, limit, config, mesh)
        losses, norms = [*losses, loss], [*norms, norm]
        gradients.append(whole_gradients(lines, config, mesh))
        assert not any(line.gradients.any() for line in lines), "gradients of the last step are still there"
    mine = {name: p.detach() for line in lines for name, p in line.w.items()}
    weights = five_d.gather_whole(mine, config, mesh)
    assert_same_named(mine, five_d.my_pieces(weights, config, mesh), 0.0, "replica", dist.get_rank())
    return losses, norms, gradients, weights


def assert_is_one_process(layout, config=None, trained=trained, ranks=None, **more):
    config = config or sizes_of(layout)
    want = unsharded(config, **more)
    for rank, got in enumerate(run_ranks(ranks or layout.ranks, trained, config, layout, **more)):
        for step in range(len(want[0])):
            assert_same(got[0][step], want[0][step], what=f"loss of step {step}", rank=rank)
            assert_same(got[1][step], want[1][step], what=f"norm of step {step}", rank=rank)
            assert_same_named(got[2][step], want[2][step], what=f"step {step}, gradient of", rank=rank)
        assert_same_named(got[3], want[3], what="after three steps, weight", rank=rank)


def name(layout):
    return "-".join(f"{axis}{size}" for axis, size in zip(layout._fields, layout, strict=True))


ALONE = [Layout(1), Layout(1, experts=0), Layout(1, experts=1)]
SINGLE = [Layout(2), Layout(2, pp=2), Layout(2, cp=2), Layout(2, tp=2), Layout(2, ep=2)]
SINGLE += [Layout(4, pp=4, micro_batches=4), Layout(4, cp=4), Layout(4, ep=4), Layout(3, pp=3), Layout(3, cp=3)]
SINGLE += [Layout(2, tp=2, experts=0), Layout(2, cp=2, experts=0)]
TWO = ("pp", "cp", "tp", "ep")
PAIRS = [Layout(4, **dict.fromkeys(pair, 2)) for pair in itertools.combinations(TWO, 2)]
PAIRS += [Layout(4, **{axis: 2}) for axis in TWO]  # with dp
PAIRS += [Layout(4, tp=2, cp=2, experts=0), Layout(4, tp=2, pp=2, experts=0)]
EIGHT = [Layout(8, pp=2, cp=2, tp=2, ep=2), Layout(8, cp=2, tp=2, ep=4), Layout(8, micro_batches=1)]
SIXTEEN = [Layout(16, pp=2, cp=2, tp=2, ep=2), Layout(16, pp=4, cp=2, tp=2, ep=4, micro_batches=8)]
SIXTEEN += [Layout(16, pp=2, cp=2, tp=2, experts=0), Layout(16, pp=2, tp=2, ep=4)]


@pytest.mark.always(
    "ranks1-pp1-cp1-tp1-ep1-experts4-micro_batches2",
    "ranks2-pp1-cp1-tp1-ep1-experts4-micro_batches2",
    "ranks2-pp1-cp1-tp2-ep1-experts4-micro_batches2",
    "ranks2-pp1-cp1-tp1-ep2-experts4-micro_batches2",
    "ranks3-pp3-cp1-tp1-ep1-experts4-micro_batches2",
    "ranks3-pp1-cp3-tp1-ep1-experts4-micro_batches2",
    "ranks2-pp1-cp2-tp1-ep1-experts0-micro_batches2",
)
@pytest.mark.parametrize("layout", ALONE + SINGLE, ids=name)
def test_each_axis_alone_is_one_process(layout):
    assert_is_one_process(layout)


@pytest.mark.always(
    "ranks4-pp2-cp2-tp1-ep1-experts4-micro_batches2",
    "ranks4-pp1-cp1-tp2-ep2-experts4-micro_batches2",
    "ranks4-pp2-cp1-tp2-ep1-experts0-micro_batches2",
)
@pytest.mark.parametrize("layout", PAIRS, ids=name)
def test_two_axes_together_are_one_process(layout):
    assert_is_one_process(layout)


@pytest.mark.parametrize("layout", EIGHT[:1] + [pytest.param(x, marks=pytest.mark.prove) for x in EIGHT[1:]], ids=name)
def test_eight_ranks_are_one_process(layout):
    assert_is_one_process(layout)


@pytest.mark.prove
@pytest.mark.parametrize("layout", SIXTEEN, ids=name)
def test_sixteen_ranks_are_one_process(layout):
    assert_is_one_process(layout)


def random_layout(seed):
    """A layout of up to 8 ranks, and sizes for which it is right: layers, heads, lengths that few numbers divide."""
    chance = random.Random(seed)
    while True:
        pp, cp, tp, dp = (chance.choice(x) for x in ((1, 1, 2, 3, 4), (1, 1, 2, 3), (1, 1, 2), (1, 1, 2, 3)))
        experts, ep, M = chance.choice((0, 1, 2, 3, 4, 6)), chance.choice((1, 1, 2, 3, 4, 6)), chance.choice((1, 2, 3))
        if pp * cp * tp * dp <= 8 and math.gcd(experts, dp * cp * tp) % ep == 0:
            layout = Layout(pp * cp * tp * dp, pp, cp, tp, ep, experts, M)
            more = {
                "length": chance.randint(5, 23),
                "layers": chance.randint(pp, 5),
                "batch": dp * M * chance.randint(1, 2),
            }
            return layout, more


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(60))
def test_any_of_sixty_random_layouts_is_one_process(seed):
    layout, more = random_layout(seed)
    assert_is_one_process(layout, sizes_of(layout, **more))


def on_two_slices(config, layout, **more):
    """Ranks 0 and 2 train one model, ranks 1 and 3 another, at the same time."""
    return trained(config, layout, [dist.get_rank() % 2, dist.get_rank() % 2 + 2], **more)


@pytest.mark.parametrize("layout", [Layout(2, tp=2, ep=2), Layout(2, pp=2)], ids=name)
def test_two_slices_of_the_world_train_two_models_at_the_same_time(layout):
    assert_is_one_process(layout, trained=on_two_slices, ranks=4)


def test_adamw_with_decay_and_every_step_clipped_is_torchs_own():
    adamw = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    layout = Layout(4, cp=2, tp=2, ep=2)
    assert_is_one_process(layout, limits=(0.3, 0.3, 0.3), optimizer=adamw)


def test_without_any_label_loss_and_gradient_are_zero_and_not_nan():
    for loss, norm in run_ranks(2, step_without_labels):
        assert loss == 0 and norm == 0


def step_without_labels():
    layout = Layout(2, tp=2)
    config, mesh = sizes_of(layout), mesh_of(layout)
    lines = five_d.make_lines(five_d.my_pieces(five_d.whole_weights(config), config, mesh), mesh)
    tokens, labels = batch_of(0, config)
    batch = five_d.cut(tokens, torch.full_like(labels, IGNORE), config, mesh)
    return five_d.train_step(batch, lines, torch.optim.SGD([x.shard for x in lines]), 1.0, config, mesh)


# ----------------------------------------------------------------------------------------------------- bytes


def counted(layout):
    """Bytes of one AdamW step by the harness's counters, by the script, by formula."""
    config, mesh = sizes_of(layout), mesh_of(layout)
    lines = five_d.make_lines(five_d.my_pieces(five_d.whole_weights(config), config, mesh), mesh)
    optimizer = torch.optim.AdamW([line.shard for line in lines])
    for step in range(2):
        batch = five_d.cut(*batch_of(step, config), config, mesh)
        five_d.sent.clear()
        with communication() as wire:
            five_d.train_step(batch, lines, optimizer, 1.0, config, mesh)
    parameters = [p for line in lines for p in (*line.w.values(), line.shard)]
    said = dict(five_d.sent)
    want = five_d.formulas(lines, config, mesh, 2, said.pop("rows", 0))
    return (
        dict(wire.sent),
        held_bytes(parameters, optimizer).total,
        said,
        want,
        dist.get_world_size(mesh.group["stage"]),
    )


BYTES = [Layout(1), Layout(4, cp=2, tp=2, ep=2), Layout(4, pp=2, tp=2, experts=0), Layout(4, pp=4), Layout(3, cp=3)]


@pytest.mark.parametrize("layout", BYTES, ids=name)
def test_bytes_held_and_sent_are_those_of_the_formulas(layout):
    for rank, (wire, held, said, want, stage) in enumerate(run_ranks(layout.ranks, counted, layout)):
        assert held == want["held"], f"rank {rank} holds {held:,} bytes, not {want['held']:,}"
        for axis in ("tp", "cp", "pp", "ep", "zero"):
            assert said.get(axis, 0) == want[axis], f"rank {rank} says that {axis} sends {said.get(axis)}"
        # Three numbers are summed so that all know them: labels over the stage, loss and norm over all.
        scalars = 8 * sum(2 * (n - 1) / n for n in (stage, layout.ranks, layout.ranks))
        total = sum(want[axis] for axis in ("tp", "cp", "pp", "ep", "zero")) + scalars
        assert abs(sum(wire.values()) - total) < 8, f"rank {rank} sends {wire}, not {want}"


# -------------------------------------------------------------------------------------------------- precision


def gradients_in(dtype, layout):
    config, mesh = sizes_of(layout, dtype=dtype), mesh_of(layout)
    whole = {name: x.float() for name, x in five_d.whole_weights(config).items()}
    lines = five_d.make_lines(five_d.my_pieces(whole, config, mesh), mesh)
    optimizer = torch.optim.SGD([line.shard for line in lines], lr=0.0)
    five_d.train_step(five_d.cut(*batch_of(0, config), config, mesh), lines, optimizer, math.inf, config, mesh)
    return whole_gradients(lines, config, mesh)


def test_in_bf16_the_gradient_of_a_layout_is_as_near_to_float64_as_that_of_one_rank():
    layout = Layout(4, cp=2, tp=2, experts=0)
    want = unsharded(sizes_of(layout), limits=(math.inf,))[2][0]
    flat = torch.cat([x.flatten() for x in want.values()])
    errors = []
    for some in (Layout(1, experts=0), layout):
        for got in run_ranks(some.ranks, gradients_in, torch.bfloat16, some)[:1]:
            assert all(x.dtype == torch.float32 for x in got.values()), "gradients are summed in fp32"
            errors.append(((torch.cat([got[n].flatten().double() for n in want]) - flat).norm() / flat.norm()).item())
    assert errors[0] < 0.05 and errors[1] <= 1.5 * errors[0], errors


# ------------------------------------------------------------------------------------------------- the script


def data():
    return torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


def run_check(broken):
    if broken:
        draw = five_d.whole_weights
        five_d.whole_weights = lambda config: {n: x * (math.nan if n == "0.k" else 1) for n, x in draw(config).items()}
    config = five_d.TINY._replace(length=9, batch=8, micro_batches=2)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        wrong = five_d.check(config, Mesh([0, 1], 1, 1, 2, 1), torch.device("cpu"), data())
    if broken:
        five_d.whole_weights = draw
    return wrong, said.getvalue()


def test_the_check_finds_nothing_wrong_and_prints_bytes_beside_formulas():
    for rank, (wrong, said) in enumerate(run_ranks(2, run_check, False)):
        assert wrong == [] and ("by formula" in said) == (rank == 0), wrong


def test_the_check_finds_a_weight_that_is_not_a_number():
    for wrong, _ in run_ranks(2, run_check, True):
        assert any("nan" in line for line in wrong), wrong


@pytest.mark.prove
def test_copied_alone_into_an_empty_folder_it_passes(tmp_path):
    script = Path(shutil.copy(five_d.__file__, tmp_path))
    done = subprocess.run([sys.executable, "-I", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "PASS", done.stdout + done.stderr


def learns(layout, dtype):
    config = five_d.MODEL._replace(layers=2, hidden=32, inner=48, length=32, batch=16, micro_batches=2, dtype=dtype)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        wrong = five_d.train(config, mesh_of(layout), torch.device("cpu"), data(), 30)
    return wrong, said.getvalue()


@pytest.mark.always("dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_and_writes_a_sample(dtype):
    (wrong, said), (_, nothing) = run_ranks(2, learns, Layout(2, tp=2, ep=2), dtype)
    loss = float(said.split()[1].rstrip("."))
    assert wrong == [] and nothing == ""
    assert loss < 4.5, f"after 30 steps the loss is {loss}; it begins at 6, and bytes at random have 5.5"
    assert len(said) > 250


BAD = [
    (1, "--no-such-option 7", "no-such-option"),
    (6, "--tp 3", "--tp 3 does not divide 4 key/value heads; use 1 or 2 or 4"),
    (4, "--pp 3", "--pp x --cp x --tp 3 does not divide 4 ranks; use 1 or 2 or 4"),
    (8, "--pp 8", "--pp 8 is more than the 4 layers; use 1 to 4"),
    (4, "--ep 3", "--ep 3 does not divide 4 experts and 4 ranks of a stage; use 1 or 2 or 4"),
    (4, "--experts 0 --ep 2", "--ep 2 does not divide 0 experts and 4 ranks of a stage; use 1"),
    (1, "--micro-batches 5", "--micro-batches 5 does not divide 32 samples of a rank; use 1 or 2"),
    (3, "", "dp 3 does not divide 32 samples; use 1 or 2"),
    (1, "--cp 0", "--cp 0 is too small; use 1 or more"),
    (1, "--experts -1", "--experts -1 is too small; use 0 or more"),
    (1, "--train 0", "--train 0 is too small; use 1 or more"),
    (1, "--precision bf16", "--precision bf16 is for --train"),
    (1, "--train 5 --precision fp8", "--precision"),
]


@pytest.mark.parametrize(("world", "words", "line"), BAD, ids=lambda x: str(x).replace(" ", ""))
def test_a_layout_that_does_not_fit_is_one_line_that_says_what_would(world, words, line, capsys):
    with pytest.raises(SystemExit) as end:
        five_d.parse(words.split(), world)
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and not dist.is_initialized()
    assert said.err.startswith("five_d.py: ") and line in said.err and said.err.count("\n") == 1, said.err


def test_every_option_arrives(monkeypatch):
    words = "--pp 2 --cp 2 --tp 2 --ep 2 --experts 6 --micro-batches 8"
    args, config = five_d.parse(words.split(), 16)
    assert (args.pp, args.cp, args.tp, args.ep, args.train) == (2, 2, 2, 2, None)
    assert (config.experts, config.micro_batches, config.dtype) == (6, 8, torch.float64)
    args, config = five_d.parse(["--train", "7", "--precision", "bf16", "--experts", "0"], 1)
    assert (args.train, config.dtype, config.experts, config.hidden) == (7, torch.bfloat16, 0, five_d.MODEL.hidden)
    monkeypatch.setenv("RANK", "1")  # the other ranks are silent
    with pytest.raises(SystemExit):
        five_d.parse(["--tp", "3"], 6)


# -------------------------------------------------------------------------------------------------- who has what


def groups_of(layout):
    mesh = mesh_of(layout)
    return {name: dist.get_process_group_ranks(group) for name, group in mesh.group.items()}


def test_the_groups_of_rank_5_of_8_are_lines_of_the_grid():
    got = run_ranks(8, groups_of, Layout(8, pp=2, tp=2, ep=2))[5]
    want = {"tp": [4, 5], "cp": [5], "pp": [1, 5], "ep": [4, 5], "dp x cp": [5, 7], "stage": [4, 5, 6, 7]}
    assert got == want | {"same experts": [5, 7], "all": list(range(8))}


def kept_at_most(layout):
    """Graphs alive at once in 1F1B: outputs of stages whose backward has not come yet."""
    config, mesh = sizes_of(layout), mesh_of(layout)
    lines = five_d.make_lines(five_d.my_pieces(five_d.whole_weights(config), config, mesh), mesh)
    alive, most, run = 0, 0, five_d.run_stage

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            nonlocal alive
            alive -= 1
            return g

    five_d.run_stage = lambda *args: Counted.apply(run(*args))
    optimizer = torch.optim.SGD([line.shard for line in lines])
    five_d.train_step(five_d.cut(*batch_of(0, config), config, mesh), lines, optimizer, 1.0, config, mesh)
    five_d.run_stage = run
    return most


def test_a_stage_keeps_as_many_micro_batches_as_stages_are_left():
    assert run_ranks(4, kept_at_most, Layout(4, pp=4, micro_batches=8)) == [4, 3, 2, 1]


def pairs_of(layout):
    """(query, key) pairs that this rank computes in a ring; those of a square of which half is masked count half."""
    _config, mesh, count, piece = sizes_of(layout), mesh_of(layout), 0, five_d.piece

    def counted_piece(q, k, v, causal):
        nonlocal count
        count += len(q) * (len(q) + 1) // 2 if causal else len(q) * len(k)
        return piece(q, k, v, causal)

    five_d.piece = counted_piece
    s = len(five_d.positions_of(24, mesh))
    five_d.ring(*torch.randn(3, s, 1, 2, 4, dtype=torch.float64), mesh.group["cp"])
    five_d.piece = piece
    return count


def test_in_zigzag_every_rank_computes_as_many_pairs_and_none_that_the_mask_hides():
    assert run_ranks(3, pairs_of, Layout(3, cp=3)) == [24 * 25 // 2 // 3] * 3


def test_the_ring_is_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 8, 2, 4, 4, generator=generator, dtype=torch.float64)
    k, v = k[:, :, :2], v[:, :, :2]
    want = F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    for rank, (positions, got) in enumerate(run_ranks(2, ring_of, q, k, v)):
        assert_same(got, want.permute(2, 0, 1, 3)[positions], what="attention", rank=rank)


def ring_of(q, k, v):
    mesh = mesh_of(Layout(2, cp=2))
    positions = five_d.positions_of(len(q), mesh)
    return positions, five_d.ring(q[positions], k[positions], v[positions], mesh.group["cp"])
