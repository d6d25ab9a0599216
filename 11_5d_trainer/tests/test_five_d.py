"""five_d.py next to a model that is not its own: chapter 01's Llama with chapter 07's experts, in one process.

SIZES       a model and a batch in which nothing is a multiple of anything that it need not be
Layout      ranks, pp, cp, tp, ep, experts, micro-batches
train       three steps of SGD on some ranks: losses, norms, full gradients and weights
reference   the same by chapter 01's module, torch's own autograd, clip_grad_norm_ and SGD
"""

import contextlib
import functools
import io
import itertools
import math
import random
import re
import sys
import types
import weakref
from collections import namedtuple
from pathlib import Path
from unittest.mock import patch

import paths  # noqa: F401  finds the chapters below
import five_d
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from five_d import IGNORE_INDEX, Mesh, ModelConfig
from harness.meter import communication, held_bytes
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named
from llama import Llama, LlamaConfig
from moe_layer import MoE, MoEConfig

SIZES = ModelConfig(4, 16, 4, 2, 12, 4, 2, 21, 16, 2, torch.float64)
Layout = namedtuple("Layout", "ranks pp cp tp ep experts micro_batches", defaults=(1, 1, 1, 1, 4, 2))
MAX_NORMS = (math.inf, 0.5, math.inf)  # of the gradient, in three steps


def sizes_of(layout, **changes):
    experts = layout.experts
    changes = {"n_layers": layout.pp + 1} | changes
    changes |= {"num_experts": experts, "top_k": min(2, experts), "num_micro_batches": layout.micro_batches}
    return SIZES._replace(**changes)


def mesh_of(layout, ranks=None):
    return Mesh(ranks or list(range(layout.ranks)), layout.pp, layout.cp, layout.tp, layout.ep)


def name_of(layout):
    """Such as ranks4-pp2-tp2: what differs from the defaults."""
    values = layout._asdict()
    changed = [f"{axis}{size}" for axis, size in values.items() if size != Layout._field_defaults.get(axis)]
    return "-".join(changed)


def get_batch(step, config):
    """Samples with very unequal numbers of labels; in step 1 most of them, and so most ranks, have none."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(256, (config.batch, config.seq_len + 1), generator=generator)
    masked = torch.rand(config.batch, config.seq_len, generator=generator) < 0.4
    labels = text[:, 1:].masked_fill(masked, IGNORE_INDEX)
    labels[2 if step == 1 else max(2, config.batch - 2) :] = IGNORE_INDEX
    return text[:, :-1], labels


# -------------------------------------------------------------------------------- the reference: one process


def name_in_llama(name):
    """A weight of five_d.py by the name that chapters 01 and 07 give it."""
    layer, _, kind = name.rpartition(".")
    if not layer:
        return {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}[kind] + ".weight"
    inside = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "router": "mlp.gate"}
    inside |= {x: f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj")}
    inside |= {x: f"mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj")}
    inside |= {x: f"mlp.experts.{x}" for x in ("w1", "w2", "w3")}
    return f"model.layers.{layer}.{inside[kind]}.weight"


def build_llama(config, full):
    c = config
    moe = MoEConfig(c.hidden, c.ffn_hidden, c.num_experts, c.top_k) if c.num_experts else None
    own = {"feed_forward": lambda _, parts: MoE(moe, None, None, parts=parts)} if moe else {}
    llama = Llama(LlamaConfig(256, c.hidden, c.n_layers, c.n_heads, c.n_kv_heads, c.ffn_hidden), **own).double()
    parameters = dict(llama.named_parameters())
    assert sorted(parameters) == sorted(map(name_in_llama, full))
    for name, weight in full.items():
        parameters[name_in_llama(name)].data.copy_(weight)
    return llama, {name: parameters[name_in_llama(name)] for name in full}


def mean_loss(llama, tokens, labels):
    valid = labels.flatten() != IGNORE_INDEX
    logits = llama(tokens).flatten(0, 1)[valid]
    return -logits.log_softmax(-1).gather(1, labels.flatten()[valid][:, None]).sum() / valid.sum()


@functools.cache
def reference(config, max_norms=MAX_NORMS, make_optimizer=torch.optim.SGD):
    llama, params = build_llama(config, five_d.build_model(config))
    optimizer = make_optimizer(params.values(), lr=0.1)
    losses, norms, gradients = [], [], []
    for step, max_norm in enumerate(max_norms):
        optimizer.zero_grad()
        loss = mean_loss(llama, *get_batch(step, config))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params.values(), max_norm).item())
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in params.items()})
        optimizer.step()
    return losses, norms, gradients, {name: p.detach() for name, p in params.items()}


# -------------------------------------------------------------------------------------------------- on ranks


def build(config, mesh, dtype=torch.float64):
    full = {name: weight.to(dtype) for name, weight in five_d.build_model(config).items()}
    return five_d.build_flat_params(five_d.shard_weights(full, config, mesh), mesh)


def shards_of(flat_params):
    return [flat_param.shard for flat_param in flat_params]


def step_once(layout, *, dtype=torch.float64, labels=None, make_optimizer=torch.optim.SGD):
    """Flat parameters after one step, and what the step returns."""
    config, mesh = sizes_of(layout), mesh_of(layout)
    flat_params = build(config, mesh, dtype)
    tokens, own_labels = get_batch(0, config)
    batch = five_d.shard_batch(tokens, own_labels if labels is None else labels, config, mesh)
    result = five_d.train_step(batch, flat_params, make_optimizer(shards_of(flat_params)), 1.0, config, mesh)
    return flat_params, result


def full_gradients(flat_params, config, mesh):
    """From the shards of all ranks, by plain collectives of the test."""
    found = {}
    for flat_param in flat_params:
        parts = [torch.empty_like(flat_param.shard) for _ in range(flat_param.group_size)]
        dist.all_gather(parts, flat_param.shard.grad.clone(), group=flat_param.group)
        found |= flat_param.views_of(torch.cat(parts))
    return five_d.gather_full_weights(found, config, mesh)


def train(config, layout, ranks=None, max_norms=MAX_NORMS, make_optimizer=torch.optim.SGD):
    mesh = mesh_of(layout, ranks)
    flat_params = build(config, mesh)
    optimizer = make_optimizer(shards_of(flat_params), lr=0.1)
    losses, norms, gradients = [], [], []
    for step, max_norm in enumerate(max_norms):
        batch = five_d.shard_batch(*get_batch(step, config), config, mesh)
        loss, norm = five_d.train_step(batch, flat_params, optimizer, max_norm, config, mesh)
        losses, norms = [*losses, loss], [*norms, norm]
        gradients.append(full_gradients(flat_params, config, mesh))
        assert not any(x.full_grad.any() for x in flat_params), "gradients of the last step are still there"
    shards = {name: p.detach() for name, p in five_d.all_params(flat_params).items()}
    full = five_d.gather_full_weights(shards, config, mesh)
    assert_same_named(shards, five_d.shard_weights(full, config, mesh), 0.0, "replica", dist.get_rank())
    return losses, norms, gradients, full


def assert_matches_reference(layout, config=None, train=train, ranks=None, **options):
    config = config or sizes_of(layout)
    losses, norms, gradients, weights = reference(config, **options)
    for rank, got in enumerate(run_ranks(ranks or layout.ranks, train, config, layout, **options)):
        for step in range(len(losses)):
            assert_same(got[0][step], losses[step], what=f"loss of step {step}", rank=rank)
            assert_same(got[1][step], norms[step], what=f"norm of step {step}", rank=rank)
            assert_same_named(got[2][step], gradients[step], what=f"step {step}, gradient of", rank=rank)
        assert_same_named(got[3], weights, what="after the last step, weight", rank=rank)


AXES = ("pp", "cp", "tp", "ep")
FIXED = [Layout(1), Layout(1, experts=0), Layout(1, experts=1), Layout(2), Layout(4, pp=4, micro_batches=4)]
FIXED += [Layout(2, **{axis: 2}) for axis in AXES] + [Layout(4, cp=4), Layout(4, ep=4), Layout(3, pp=3)]
FIXED += [Layout(3, pp=3, micro_batches=1)]  # a middle stage without a steady state
FIXED += [Layout(3, cp=3), Layout(2, tp=2, experts=0), Layout(2, cp=2, experts=0)]
PAIRS = [Layout(4, tp=2, ep=2), Layout(4, cp=2, tp=2)]
FIXED += [Layout(4, **dict.fromkeys(pair, 2)) for pair in (("pp", "cp"), ("pp", "tp"), ("pp", "ep"), ("cp", "ep"))]
FIXED += [Layout(4, **{axis: 2}) for axis in AXES]  # with dp
FIXED += [Layout(4, tp=2, cp=2, experts=0), Layout(4, tp=2, pp=2, experts=0)]
FIXED += [Layout(8, pp=2, cp=2, tp=2, ep=2), Layout(8, cp=2, tp=2, ep=4), Layout(8, micro_batches=1)]
FIXED += [Layout(16, pp=2, cp=2, tp=2, ep=2), Layout(16, pp=4, cp=2, tp=2, ep=4, micro_batches=8)]
FIXED += [Layout(16, pp=2, cp=2, tp=2, experts=0), Layout(16, pp=2, tp=2, ep=4)]


def random_layout(seed):
    """A layout of up to 8 ranks, and sizes that fit it: layers, heads, lengths that few numbers divide."""
    chance = random.Random(seed)
    while True:
        pp, cp, tp, dp = (chance.choice(x) for x in ((1, 1, 2, 3, 4), (1, 1, 2, 3), (1, 1, 2), (1, 1, 2, 3)))
        experts, ep, m = chance.choice((0, 1, 2, 3, 4, 6)), chance.choice((1, 1, 2, 3, 4, 6)), chance.choice((1, 2, 3))
        if pp * cp * tp * dp <= 8 and math.gcd(experts, dp * cp * tp) % ep == 0:
            seq_len = chance.randint(5, 23)
            n_layers = chance.randint(pp, 5)
            batch = dp * m * chance.randint(1, 2)
            layout = Layout(pp * cp * tp * dp, pp, cp, tp, ep, experts, m)
            return layout, {"seq_len": seq_len, "n_layers": n_layers, "batch": batch}


LAYOUTS = [pytest.param(each, {"n_layers": 2} if each.ranks == 8 else {}, id=name_of(each)) for each in FIXED]
LAYOUTS += [pytest.param(*random_layout(seed), id=f"random{seed}") for seed in range(60)]


@pytest.mark.always("ranks8-pp2-cp2-tp2-ep2", "ranks2", "ranks2-cp2-experts0", "ranks3-pp3-micro_batches1")
@pytest.mark.parametrize(("layout", "changes"), LAYOUTS)
def test_training_matches_reference(layout, changes):
    assert_matches_reference(layout, sizes_of(layout, **changes))


@pytest.mark.prove
def test_pairs_of_axes_match_reference():
    for layout in PAIRS:
        assert_matches_reference(layout, max_norms=(0.5,))


def train_on_two_slices(config, layout, **options):
    """Ranks 0 and 2 train one model, ranks 1 and 3 another one, at the same time."""
    return train(config, layout, [dist.get_rank() % 2, dist.get_rank() % 2 + 2], **options)


@pytest.mark.always("ranks2-pp2")
@pytest.mark.parametrize("layout", [Layout(2, tp=2, ep=2), Layout(2, pp=2)], ids=name_of)
def test_two_slices_of_the_world_train_two_models_at_the_same_time(layout):
    assert_matches_reference(layout, train=train_on_two_slices, ranks=4)


@pytest.mark.prove
def test_adamw_with_decay_and_clipping_in_every_step_matches_torch():
    adamw = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    layout = Layout(4, cp=2, tp=2, ep=2)
    assert_matches_reference(layout, max_norms=(0.3, 0.3, 0.3), make_optimizer=adamw)


def step_without_labels(layout):
    return step_once(layout, labels=torch.full((SIZES.batch, SIZES.seq_len), IGNORE_INDEX))[1]


def test_without_any_label_loss_and_norm_are_zero_and_not_nan():
    assert run_ranks(2, step_without_labels, Layout(2, tp=2)) == [(0, 0)] * 2


def bf16_loss_and_gradients(layout):
    with patch(f"{__name__}.SIZES", SIZES._replace(dtype=torch.bfloat16)):
        mesh = mesh_of(layout)
        flat_params, (loss, _) = step_once(layout, dtype=torch.float32)
        gradients = full_gradients(flat_params, sizes_of(layout), mesh)
    for x in flat_params:
        x.shard.grad.fill_(1e25)  # its square is no number in fp32
    return loss, gradients, five_d.clip_grads(flat_params, 1.0, mesh).item()


def test_loss_and_gradients_of_a_layout_in_bf16_are_as_near_to_float64_as_those_of_one_rank():
    layout = Layout(4, cp=2, tp=2, experts=0)
    losses, _, (expected,), _ = reference(sizes_of(layout), max_norms=(1.0,))
    flat = torch.cat([x.flatten() for x in expected.values()])
    errors = []
    for each in (Layout(1, experts=0), layout):
        loss, got, norm = run_ranks(each.ranks, bf16_loss_and_gradients, each)[0]
        assert 1e26 < norm < 1e29, f"the norm of thousands of gradients of 1e25 is {norm}"
        assert abs(loss / losses[0] - 1) <= 3e-4, f"{loss}, not {losses[0]}: a sum in bf16 is rounded to 2e-3"
        assert all(x.dtype == torch.float32 for x in got.values()), "gradients are summed in fp32"
        error = torch.cat([got[name].flatten().double() for name in expected]) - flat
        errors.append((error.norm() / flat.norm()).item())
    assert errors[0] < 0.1 and errors[1] <= 1.5 * errors[0], errors


# ----------------------------------------------------------------------------------------------------- bytes


def count_bytes(layout, dtype):
    """Bytes of one AdamW step: by the harness's meters, by the script, by formula."""
    config, mesh = sizes_of(layout, dtype=dtype), mesh_of(layout)
    flat_params = build(config, mesh, torch.promote_types(dtype, torch.float32))
    optimizer = torch.optim.AdamW(shards_of(flat_params))
    for step in range(2):
        batch = five_d.shard_batch(*get_batch(step, config), config, mesh)
        five_d.sent.clear()
        with communication() as wire:
            five_d.train_step(batch, flat_params, optimizer, 1.0, config, mesh)
    stored = held_bytes([*five_d.all_params(flat_params).values(), *shards_of(flat_params)], optimizer).total
    sent = dict(five_d.sent)
    expected = five_d.expected_bytes(flat_params, config, mesh, 2, sent.pop("rows", 0))
    return sum(wire.sent.values()), stored, sent, expected, dist.get_world_size(mesh.groups["stage"])


BYTES = [Layout(1), Layout(4, cp=2, tp=2, ep=2), Layout(4, pp=2, tp=2, experts=0), Layout(3, pp=3), Layout(3, cp=3)]
BYTES = [(layout, torch.float64) for layout in BYTES] + [(BYTES[1], torch.bfloat16)]
BYTES = [pytest.param(layout, dtype, id=f"{str(dtype)[6:]}-{name_of(layout)}") for layout, dtype in BYTES]


@pytest.mark.always(
    "float64-ranks4-pp2-tp2-experts0", "bfloat16-ranks4-cp2-tp2-ep2", "float64-ranks3-pp3", "float64-ranks3-cp3"
)
@pytest.mark.parametrize(("layout", "dtype"), BYTES)
def test_bytes_stored_and_sent_match_the_formulas(layout, dtype):
    for rank, (wire, stored, sent, expected, stage) in enumerate(run_ranks(layout.ranks, count_bytes, layout, dtype)):
        assert stored == expected["stored"], f"rank {rank} stores {stored:,} bytes, not {expected['stored']:,}"
        for axis in ("tp", "cp", "pp", "ep", "zero"):
            assert sent.get(axis, 0) == expected[axis], f"rank {rank}, {axis}: sends {sent.get(axis)}"
        # Three scalars are all-reduced: the number of labels over the stage, loss and norm over all ranks.
        scalars = 8 * sum(2 * (n - 1) / n for n in (stage, layout.ranks, layout.ranks))
        total = sum(expected.values()) - expected["stored"] + scalars
        assert abs(wire - total) < 8, f"rank {rank} sends {wire} bytes, not {total}"


# ------------------------------------------------------------------------------------- groups, pipeline, ring


def test_groups_and_shards_of_16_ranks_are_those_of_the_lesson_and_its_figure():
    def get_rank(group=None):  # a group is a list of ranks, and nothing is sent
        return 5 if group is None else group.index(5)

    def new_group(ranks, *_, **__):
        return ranks

    with patch.multiple(dist, get_rank=get_rank, get_world_size=len, new_group=new_group):
        mesh = mesh_of(Layout(16, pp=2, cp=2, tp=2, ep=2))
        flat_params = build(five_d.TINY, mesh)
    groups = {"tp": [4, 5], "cp": [5, 7], "pp": [5, 13], "ep": [4, 5], "dp x cp": [1, 3, 5, 7]}
    groups |= {"same experts": [1, 3, 5, 7], "stage": list(range(8)), "all": list(range(16))}
    assert mesh.groups.keys() == groups.keys()
    for name, ranks in groups.items():
        assert mesh.groups[name] == ranks, f"the {name} group of rank 5 is {mesh.groups[name]}, not {ranks}"
    figure = (Path(five_d.__file__).parent / "figures/grid.svg").read_text()
    drawn = re.findall(r'data-group="(.*?)" data-ranks="(.*?)"', figure)
    assert drawn and all(groups[name] == [int(rank) for rank in ranks.split()] for name, ranks in drawn)
    assert {len(x.full): len(x.shard) for x in flat_params} == {8576: 1072, 3072: 768, 9216: 2304}
    [matrices] = [x for x in flat_params if len(x.full) == 3072]  # its first shard is rank 1's
    assert next(iter(matrices.shapes.items())) == ("0.q_proj", (16, 32))


def max_in_flight(layout):
    """Outputs of this stage that are alive at once."""
    run_stage, outputs, most = five_d.run_stage, [], 0

    def counted(*args):
        nonlocal most
        output = run_stage(*args)
        assert output.dtype == torch.bfloat16, "what is received is as narrow as what is sent"
        outputs.append(weakref.ref(output))
        most = max(most, sum(ref() is not None for ref in outputs))
        return output

    with patch.object(five_d, "run_stage", counted), patch(f"{__name__}.SIZES", SIZES._replace(dtype=torch.bfloat16)):
        step_once(layout, dtype=torch.float32)
    return most


def test_micro_batches_in_flight_are_as_many_as_stages_from_here_on():
    assert run_ranks(4, max_in_flight, Layout(4, pp=4, micro_batches=8)) == [4, 3, 2, 1]


def micro_batches_of_rank():
    """Of a rank of two samples' groups and two tokens' groups: its tokens in each micro-batch, [s/tp, b]."""
    tokens = torch.arange(8 * 16).view(8, 16)
    layout = Layout(4, tp=2)
    return [
        ids for ids, _ in five_d.shard_batch(tokens, tokens, sizes_of(layout, batch=8, seq_len=16), mesh_of(layout))
    ]


def test_a_rank_has_its_samples_and_of_each_a_run_of_neighbouring_tokens():
    tokens = torch.arange(8 * 16).view(8, 16)
    for rank, micro_batches in enumerate(run_ranks(4, micro_batches_of_rank)):
        samples, run = tokens.chunk(2)[rank // 2], slice(rank % 2 * 8, rank % 2 * 8 + 8)
        want = [part[:, run].T.tolist() for part in samples.chunk(2)]
        assert {f"rank {rank}": [ids.tolist() for ids in micro_batches]} == {f"rank {rank}": want}
    for seq_len, cp, tp in itertools.product((5, 22, 45), (1, 2, 3), (1, 3, 4)):
        ranks = [five_d.token_positions(seq_len, types.SimpleNamespace(cp=cp, cp_rank=r, tp=tp)) for r in range(cp)]
        assert {len(positions) % tp for positions in ranks} == {0}, f"{seq_len} tokens with cp {cp} and tp {tp}"


def test_each_step_has_samples_of_its_own_from_files_in_one_order(monkeypatch):
    tokens, glob = five_d.load_text(), five_d.Path.glob
    monkeypatch.setattr(five_d.Path, "glob", lambda *given: sorted(glob(*given), reverse=True))  # as a file system may
    assert torch.equal(five_d.load_text(), tokens)
    first, second = (five_d.get_batch(tokens, step, five_d.TINY, masked=False)[0] for step in (0, 1))
    assert not torch.equal(first, second)


def run_ring(q, k, v):
    """Positions of this rank, its output and gradients, and how many (query, key) pairs it computed."""
    mesh, pairs, block = mesh_of(Layout(3, cp=3)), 0, five_d.attention_block

    def counted(q, k, v, causal):
        nonlocal pairs
        pairs += len(q) * (len(q) + 1) // 2 if causal else len(q) * len(k)
        return block(q, k, v, causal)

    positions = five_d.token_positions(len(q), mesh)
    inputs = [x[positions].requires_grad_() for x in (q, k, v)]
    with patch.object(five_d, "attention_block", counted):
        out = five_d.ring_attention(*inputs, mesh.groups["cp"])
    out.square().sum().backward()
    return positions, out.detach(), [x.grad for x in inputs], pairs


def test_ring_attention_matches_torch_and_all_ranks_compute_the_same_number_of_pairs():
    q, k, v = torch.randn(3, 24, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (q, k[:, :, :2], v[:, :, :2])]
    heads_first = [x.permute(1, 2, 0, 3) for x in inputs]
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    expected.square().sum().backward()
    results = run_ranks(3, run_ring, *(x.detach() for x in inputs))
    for rank, (positions, out, _, pairs) in enumerate(results):
        assert_same(out, expected.detach()[positions], what="attention", rank=rank)
        assert pairs == 24 * 25 // 2 // 3
    for rank, (positions, _, grads, _) in enumerate(results):
        for name, x, grad in zip("qkv", inputs, grads, strict=True):
            assert_same(grad, x.grad[positions], what=f"gradient of {name}", rank=rank)
    narrow = [x.detach().bfloat16() for x in inputs]
    heads_first = [x.double().permute(1, 2, 0, 3) for x in narrow]
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    for rank, (positions, out, *_) in enumerate(run_ranks(3, run_ring, *narrow)):
        want = expected[positions]
        error, rounding = ((x.double() - want).norm() for x in (out, want.bfloat16()))
        assert error <= 1.05 * rounding, f"rank {rank}, in bf16: off by {error:.2e}, one rounding by {rounding:.2e}"


# ------------------------------------------------------------------------------------------------- the script


def text():
    return torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


def run_check(broken, off=0.0):
    def build_model(config):
        return {n: x * (math.nan if broken and n == "0.k_proj" else 1) for n, x in original(config).items()}

    def expected_bytes(*given, **more):  # of rank 0 one byte less than it sends, of rank 1 one more
        return {what: count + broken * (2 * dist.get_rank() - 1) for what, count in formulas(*given, **more).items()}

    config = five_d.TINY._replace(n_layers=1, seq_len=9, batch=8, num_micro_batches=2)
    printed, original, formulas, clip = io.StringIO(), five_d.build_model, five_d.expected_bytes, five_d.clip_grads
    changed = patch.multiple(five_d, build_model=build_model, expected_bytes=expected_bytes)
    norms = patch.object(five_d, "clip_grads", lambda *given: clip(*given) * (1 + off * (given[2].tp - 1)))
    with contextlib.redirect_stdout(printed), changed, norms:
        failures = five_d.check(config, Mesh([0, 1], 1, 1, 2, 1), torch.device("cpu"), text())
    return failures, printed.getvalue()


def test_check_passes_and_finds_a_weight_that_is_not_a_number_and_bytes_that_are_not_the_formulas():
    counts = (five_d.get_batch(text(), 0, five_d.TINY, masked=True)[1] != IGNORE_INDEX).sum(1).tolist()
    assert counts == sorted(counts, reverse=True) and counts[0] == 45 and counts[-5] > 0 == counts[-4]
    for rank, (failures, printed) in enumerate(run_ranks(2, run_check, False)):
        assert failures == [] and ("by formula" in printed) == (rank == 0), failures
    for failures, _ in run_ranks(2, run_check, True):
        for what in ("rank 0: loss 0: error nan", "rank 0: bytes tp", "rank 1: bytes tp", "rank 1: bytes zero"):
            assert any(failure.startswith(what) for failure in failures), f"{what} is not in {failures}"
    near = run_ranks(2, run_check, False, 1e-8)[0][0]
    assert len(near) == 6 and all(re.match("rank [01]: norm [012]: error ", failure) for failure in near), near


def train_without_steps(norm):
    """How `train` ends if its second step has this norm, what it prints, and the rates of its steps, times their limits
    of a norm."""
    rates, printed = [], io.StringIO()

    def train_step(batch, flat_params, optimizer, max_norm, *_):
        rates.append(optimizer.param_groups[0]["lr"] * max_norm)
        return 1.0, norm if rates[1:] else 1.0

    def generate(full, prompt, num_tokens, config):
        return f"{num_tokens} bytes after {len(prompt)}"

    changed = patch.multiple(five_d, train_step=train_step, generate=generate)
    with changed, contextlib.redirect_stdout(printed):
        failures = five_d.train(five_d.TINY, mesh_of(Layout(2, tp=2)), torch.device("cpu"), text(), 4)
    return failures, printed.getvalue(), rates


def test_the_learning_rate_falls_by_a_cosine_and_a_norm_that_is_not_finite_ends_the_training():
    for norm in (math.nan, math.inf):
        failures, printed, rates = run_ranks(2, train_without_steps, norm)[0]
        assert (failures, printed) == ([f"step 1: loss 1.0, gradient norm {norm}"], "")
        assert rates == pytest.approx([3e-3, 3e-4 + 1.35e-3 * (1 + math.cos(math.pi / 4))])
    first, second = run_ranks(2, train_without_steps, 1.0)
    assert first[:2] == ([], "loss 1.000. It writes:\n\n300 bytes after 45\n") and second[:2] == ([], "")
    assert first[2] == pytest.approx([3e-4 + 1.35e-3 * (1 + math.cos(step * math.pi / 4)) for step in range(4)])


def continued(letters, seq_len):
    """What is generated by a model that always knows the next letter, and what the model is given for each."""
    given = []

    def run_stage(x, full, config, mesh):
        given.append((len(x), mesh.tp, torch.is_grad_enabled()))
        return 1000.0 * F.one_hot(x + 1, 256)  # [S, 1] -> [S, 1, V]

    with patch.object(five_d, "run_stage", run_stage):
        return five_d.generate({}, torch.tensor(list(letters)), 4, five_d.SMALL._replace(seq_len=seq_len)), given


def test_a_text_is_continued_by_its_last_tokens_and_returned_without_its_prompt():
    assert run_ranks(1, continued, b"ABCDE", 3) == [("FGHI", 4 * [(3, 1, False)])]


def end_of_main(failures):
    printed = io.StringIO()
    changed = {"load_text": lambda: None, "init_distributed": lambda: torch.device("cpu"), "check": lambda *_: failures}
    stay = patch.object(dist, "destroy_process_group", lambda: None)
    argv = patch.object(sys, "argv", ["five_d.py"])
    with patch.multiple(five_d, **changed), stay, argv, contextlib.redirect_stdout(printed):
        return five_d.main(), printed.getvalue().splitlines()[-1]


def test_the_exit_code_and_the_last_line_say_whether_something_failed():
    assert run_ranks(1, end_of_main, []) == [(0, "PASS")]
    assert run_ranks(1, end_of_main, list("abcdef")) == [(1, "FAIL: a; b; c; d; e")]


def learn(layout, dtype):
    small = {"n_layers": 2, "hidden": 32, "ffn_hidden": 48, "seq_len": 32, "batch": 16, "num_micro_batches": 2}
    config = five_d.SMALL._replace(**small, dtype=dtype)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        failures = five_d.train(config, mesh_of(layout), torch.device("cpu"), text(), 30)
    return failures, printed.getvalue()


@pytest.mark.prove
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_train_learns_and_writes_a_sample(dtype):
    (failures, printed), (_, nothing) = run_ranks(2, learn, Layout(2, tp=2, ep=2), dtype)
    loss = float(printed.split()[1].rstrip("."))
    assert failures == [] and nothing == ""
    assert loss < 4.5, f"after 30 steps the loss is {loss}; it begins at 6, and bytes at random have 5.5"
    assert len(printed) > 250


REFUSED = [
    (1, "--no-such-option 7", "no-such-option"),
    (6, "--tp 3", "--tp 3 does not divide 4 key/value heads; use 1 or 2 or 4"),
    (8, "--pp 8", "--pp 8: there are 4 layers; use 1 to 4"),
    (4, "--experts 0 --ep 2", "--ep 2 does not divide 0 experts and 4 ranks of a stage; use 1"),
    (4, "--pp 2 --ep 4", "--ep 4 does not divide 4 experts and 2 ranks of a stage; use 1 or 2"),
    (1, "--tp 2", "--pp x --cp x --tp 2 does not divide 1 ranks; use 1"),
    (2, "--micro-batches 32", "--micro-batches 32 does not divide 16 samples of a rank; use 1 or 2"),
    (3, "", "dp 3 does not divide 32 samples; use 1 or 2"),
    (1, "--cp 0", "--cp 0 is too small; use 1 or more"),
    (1, "--experts -1", "--experts -1 is too small; use 0 or more"),
    (1, "--train 0", "--train 0 is too small; use 1 or more"),
    (1, "--precision bf16", "--precision bf16 is for --train"),
    (1, "--train 5 --precision fp8", "--precision"),
]


def test_a_layout_that_does_not_fit_is_refused_in_one_line_that_says_what_would(capsys, monkeypatch):
    for world_size, words, message in REFUSED:
        assert message in refusal(five_d.main, words, world_size)
    monkeypatch.setenv("RANK", "1")  # the other ranks are silent
    with pytest.raises(SystemExit):
        five_d.parse_args(["--tp", "3"], 6)
    assert capsys.readouterr().err == ""


def test_every_option_arrives():
    words = "--pp 2 --cp 2 --tp 2 --ep 2 --experts 6 --micro-batches 8"
    args, config = five_d.parse_args(words.split(), 16)
    assert (args.pp, args.cp, args.tp, args.ep, args.train) == (2, 2, 2, 2, None)
    assert (config.num_experts, config.num_micro_batches, config.dtype) == (6, 8, torch.float64)
    assert [five_d.parse_args(["--experts", str(n)], 1)[1].top_k for n in (0, 1, 2, 6)] == [0, 1, 2, 2]
    args, config = five_d.parse_args(["--train", "7", "--precision", "bf16", "--experts", "0"], 1)
    assert (args.train, config.dtype, config.num_experts) == (7, torch.bfloat16, 0)
    assert config.hidden == five_d.SMALL.hidden and five_d.parse_args(["--train"], 1)[0].train == 300
    assert five_d.parse_args(["--train", "--precision", "fp32"], 1)[1].dtype == torch.float32
    largest = "--pp 4 --tp 4 --ep 4 --micro-batches 32"
    assert five_d.parse_args(largest.split(), 16)[0].pp == 4, "each limit is still allowed"
