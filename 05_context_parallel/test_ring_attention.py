"""The core file's ring against one process, and against its formulas."""

import random
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import ring_attention as script
import torch
import torch.distributed as dist
import torch.nn.functional as F
import ulysses
from harness.attention import assert_losses_of_few_labels, attention_results, dense_attention, random_qkv
from harness.meter import communication, peak_memory, saved_activations
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import assert_same
from torch import Tensor

LAYOUTS = ("contiguous", "zigzag")
VERSIONS = (("simple", "contiguous"), ("fast", "contiguous"), ("fast", "zigzag"))
S = 45  # odd: zeros have to fill up the last chunk, on any number of ranks
CPU = torch.device("cpu")


def ring_attention(layout: str, group: dist.ProcessGroup, form: str = "fast"):
    ring = script.RingComm(group)
    if form == "simple":
        return lambda q, k, v: script.simple_ring_attention(q, k, v, ring)
    return lambda q, k, v: script.RingAttention.apply(q, k, v, layout, ring)


# ------------------------------------------------------------------------------------------------- the whole model


def rotated(x: Tensor) -> Tensor:
    """RoPE by complex numbers."""
    inv_freq = 10000.0 ** (-torch.arange(0, script.HEAD_DIM, 2).double() / script.HEAD_DIM)
    angle = torch.arange(x.shape[1])[:, None, None] * inv_freq
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


@cache
def unsharded() -> list[Tensor]:
    """Three steps on one process, with torch's mean over tokens: losses and gradients, then parameters."""
    model = script.build_model(CPU)
    params = list(model.parameters())
    text = torch.frombuffer(bytearray(Path(script.tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    results = []
    for step in range(3):
        tokens = text[700 * step :][: script.BATCH * S].view(script.BATCH, S)
        x = model[0](tokens)
        for block in model[1:-1]:
            h = block.attn_norm(x)
            q, k, v = (f(h).unflatten(-1, (-1, script.HEAD_DIM)) for f in (block.q_proj, block.k_proj, block.v_proj))
            x = x + block.o_proj(dense_attention(rotated(q), rotated(k), v).flatten(2))
        loss = F.cross_entropy(model[-1](x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, params)
        results += [loss.detach(), *gradients]
        for p, g in zip(params, gradients, strict=True):
            p.data -= 0.1 * g
    return results + [p.detach() for p in params]


def three_steps(form: str, layout: str, group: dist.ProcessGroup) -> list[Tensor]:
    model = script.build_model(CPU)
    params = list(model.parameters())
    attention = ring_attention(layout, group, form)
    results = []
    for step in range(3):
        shard = script.shard_sequence(script.get_batch(step, S, CPU), layout, group.rank(), group.size())
        results.append(script.forward_backward(model, shard, attention, group))
        for p in params:
            results.append(p.grad)
            p.data, p.grad = p.data - 0.1 * p.grad, None
    assert_losses_of_few_labels(script, model, shard, attention, group)
    return results + [p.detach() for p in params]


def trained(slices: bool = False) -> list[list[Tensor]]:
    """On 4 ranks each stops here and there before its messages: what is not waited for is not there."""
    group, versions = dist.group.WORLD, VERSIONS
    if slices:
        group, versions = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2], VERSIONS[2:]
    dice, plain = random.Random(dist.get_rank()), dist.batch_isend_irecv

    def late(messages):
        time.sleep(dice.choice((0, 0, 0.003)) if dist.get_world_size() == 4 else 0)
        return plain(messages)

    with patch.object(dist, "batch_isend_irecv", late):
        return [three_steps(form, layout, group) for form, layout in versions]


def assert_trained(results: list[list[list[Tensor]]]) -> None:
    for rank, versions in enumerate(results):
        for (form, layout), got in zip(VERSIONS[-len(versions) :], versions, strict=True):
            for at, (x, expected) in enumerate(zip(got, unsharded(), strict=True)):
                what = f"{form} ring, {layout}: number {at} of losses, gradients and parameters"
                assert_same(x, expected, what=what, rank=rank)


@pytest.mark.always("4")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_gradients_and_parameters_match_reference(ranks):
    assert_trained(run_ranks(ranks, trained))


def test_groups_that_are_slices_of_the_world_match_reference():
    assert_trained(run_ranks(4, trained, slices=True))


def test_labels_and_positions_follow_their_tokens():
    for length, layout, P in product((2, 45, 48), LAYOUTS, (1, 2, 3, 4)):  # 48 needs no padding on any of them
        tokens = torch.randperm(length).view(1, length) + 1
        parts = [script.shard_sequence(tokens, layout, rank, P) for rank in range(P)]
        mine, labels, where = (torch.cat(x, -1).flatten() for x in zip(*parts, strict=True))
        assert sorted(where.tolist()) == list(range(length + -length % (2 * P))), "every place once"
        for token, label, at in zip(mine.tolist(), labels.tolist(), where.tolist(), strict=True):
            assert token == (tokens[0, at].item() if at < length else 0)
            following = tokens[0, at + 1].item() if at < length - 1 else script.IGNORE_INDEX
            assert label == following, f"{layout}: label of {at}"


# ---------------------------------------------------------------------------------------------------- attention alone


def shifted() -> Tensor:
    x = torch.zeros(2, 3, requires_grad=True)
    script.RingShift.apply(
        x, script.RingComm(dist.group.WORLD), 1
    ).sum().backward()  # a gradient of one number, expanded
    return x.grad


def second_derivative() -> str:
    x = torch.ones(1, 2, 1, 8, requires_grad=True)
    out = ring_attention("zigzag", dist.group.WORLD)(x, x, x)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return error_from(RuntimeError, dx.sum().backward)


def test_a_second_derivative_is_refused():
    assert "once_differentiable" in run_ranks(1, second_derivative)[0]


def test_an_expanded_gradient_is_sent_with_all_its_numbers():
    assert all(torch.equal(grad, torch.ones(2, 3)) for grad in run_ranks(2, shifted))


HEADS = (4, 2)  # query heads, K/V heads; 48 tokens of 8 elements each


def both_layouts(dtype: torch.dtype, scale: float = 1.0) -> list:
    """This rank's (out, dq, dk, dv) in both layouts, and where its tokens are."""
    group, found = dist.group.WORLD, []
    for layout in LAYOUTS:
        where = script.token_positions(layout, 48, group.rank(), group.size())
        mine = [scale * x[:, where].to(dtype) for x in random_qkv(HEADS, 48, 8)]
        assert ring_attention(layout, group, "simple")(*mine[:3]).dtype == dtype
        with torch.autocast("cpu", torch.bfloat16):  # which rounds no product: all are in fp32 or better
            found.append((attention_results(ring_attention(layout, group), *mine), where))
    return found


NAMES = ("out", "dq", "dk", "dv")


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_matches_dense_attention(scale):
    want = attention_results(dense_attention, *(scale * x for x in random_qkv(HEADS, 48, 8)))
    for rank, layouts in enumerate(run_ranks(4, both_layouts, torch.float64, scale)):
        for layout, (ours, where) in zip(LAYOUTS, layouts, strict=True):
            for name, x, whole in zip(NAMES, ours, want, strict=True):
                # a rank may have tiny gradients only
                error = ((x - whole[:, where]).abs().max() / whole.abs().max()).item()
                assert error <= 1e-10, f"{layout}: {name} on rank {rank} is not that of dense attention: {error:.1e}"


def test_bfloat16_error_is_that_of_one_rounding():
    rounded = [x.bfloat16() for x in random_qkv(HEADS, 48, 8)]
    exact = attention_results(dense_attention, *(x.double() for x in rounded))
    dense = attention_results(script.reference_attention, *rounded)
    ranks = run_ranks(4, both_layouts, torch.bfloat16)
    for at, layout in enumerate(LAYOUTS):
        where = torch.cat([layouts[at][1] for layouts in ranks])
        for i, name in enumerate(NAMES):
            x = torch.cat([layouts[at][0][i] for layouts in ranks], 1)
            assert x.dtype == torch.bfloat16
            want, low = exact[i][:, where], dense[i][:, where]
            error, allowed, once = ((y.double() - want).norm().item() for y in (x, low, want.bfloat16()))
            assert error <= 1.5 * allowed, f"{layout}: {name} is off by {error:.2e}, dense attention by {allowed:.2e}"
            # Sums are in fp32 and rounded once, so that it is about as far off as the exact result, rounded.
            assert error <= 1.25 * once, f"{layout}: {name} is off by {error / once:.2f} times what one rounding is"


def test_merge_equals_softmax_of_all_keys():
    q, k, v, _ = random_qkv(HEADS, 12, 8)
    want = script.attention_block(400 * q, k, v, False)
    parts = [script.attention_block(400 * q, k[:, own], v[:, own], False) for own in (slice(5), slice(5, None))]
    [got] = run_ranks(1, script.merge_attention, *parts[0], *parts[1])
    assert want[1].max() > 800  # e^710 is too large for float64
    for name, x, y in zip(("out", "lse"), got, want, strict=True):
        assert_same(x, y, what=name)
    far = torch.full((1, 2, 1, 8), 1e3, dtype=torch.float64)
    out, _ = script.attention_block(far, -far, torch.arange(2.0).double().view(1, 2, 1, 1).expand(far.shape), True)
    assert out[0, 0].max() == 0, "however low the score of the key that a query sees, it sees no other"
    for half in (torch.float16, torch.bfloat16):
        low = script.attention_block(q.to(half), k.to(half), v.to(half), False)
        assert [x.dtype for x in low] == [torch.float32] * 2, f"attention to keys in {half} adds up in {low[0].dtype}"


# ------------------------------------------------------------------------------------------------ bytes, pairs, order


def costs(dtype: torch.dtype) -> list:
    """Of both layouts: bytes sent in both passes, bytes saved, the script's own count of bytes sent, pairs, calls."""
    group, plain, found = dist.group.WORLD, script.attention_block, []
    for layout in LAYOUTS:
        where = script.token_positions(layout, 48, group.rank(), group.size())
        q, k, v, dout = (x[:, where].to(dtype) for x in random_qkv(HEADS, 48, 8))
        ring, pairs = script.RingComm(group), []

        def attention_block(q, k, v, causal, pairs=pairs):
            s, t = q.shape[1], k.shape[1]
            pairs.append(s * (s + 1) // 2 if causal else s * t)
            return plain(q, k, v, causal)

        with (
            patch.object(script, "attention_block", attention_block),
            communication() as forward,
            saved_activations() as saved,
        ):
            out = script.RingAttention.apply(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), layout, ring)
        own = ring.bytes_sent
        with communication() as backward:
            out.backward(dout, retain_graph=True)
        once = [x.grad.clone() for x in (q, k, v)]
        out.backward(dout)  # once more: what was saved is as it was
        assert all(torch.equal(x.grad, 2 * g) for x, g in zip((q, k, v), once, strict=True)), layout
        found.append((forward.total, backward.total, saved.bytes, own, sum(pairs), {*forward.calls}, {*backward.calls}))
    return found


@pytest.mark.parametrize(("P", "dtype"), [(1, "float64"), (2, "float32"), (4, "bfloat16")])
def test_bytes_and_pairs_match_the_formulas(P, dtype):
    dtype, s = getattr(torch, dtype), 48 // P
    block, dblock = (2 * 2 * s * 2 * 8 * size for size in (dtype.itemsize, max(4, dtype.itemsize)))  # 2 K/V heads of 4
    kept = block + 2 * 2 * s * 4 * 8 * dtype.itemsize + 2 * s * 4 * max(4, dtype.itemsize)
    for rank, layouts in enumerate(run_ranks(P, costs, dtype)):
        for layout, (forward, backward, saved, own, pairs, *calls) in zip(LAYOUTS, layouts, strict=True):
            assert forward == own == (P - 1) * block, f"{layout}: K/V of 2 heads are sent round, not of 4"
            again = (P - 1) * (block + dblock)
            assert backward == again, f"{layout}: {backward:,} bytes, not {again:,}: K/V again, dK/dV in fp32 or better"
            assert saved == kept, "K/V, q, out and LSE of its own tokens"
            assert pairs == (48 * 49 // (2 * P) if layout == "zigzag" else s * (s + 1) // 2 + rank * s * s)
            assert calls == [{"send", "recv"} if P > 1 else set()] * 2, "nothing but messages to neighbours"


def no_block(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    return q.new_zeros(q.shape), q.new_zeros(q.shape[:3])


def no_block_backward(dout, q, k, v, out, lse, causal):
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


@patch.multiple(script, attention_block=no_block, attention_block_backward=no_block_backward)
def peaks() -> list[int]:
    """Peaks of forward and backward, if the pieces need no memory beyond their results; and what is left."""
    attention, found = ring_attention("contiguous", dist.group.WORLD), []
    q, k, v, dout = (torch.ones(1, 64, 1, 8) for _ in range(4))
    for _ in range(3):  # gloo may release a buffer late: the smallest of three counts
        with peak_memory() as forward:
            out = attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        with peak_memory() as backward:
            gradients = torch.autograd.grad(out, (q, k, v), dout)
        del out, gradients
        with torch.no_grad(), peak_memory() as alone:
            out = attention(q, k, v)
        left = alone.current - out.nbytes
        del out
        found.append((forward.peak, backward.peak, left))
    return [min(x) for x in zip(*found, strict=True)]


def test_at_most_two_blocks_of_other_ranks_are_stored():
    two, four = (run_ranks(P, peaks) for P in (2, 4))
    block = 2 * 64 * 8 * 4  # of two ranks a block arrives in one buffer, and rank 1 computes with it
    for rank in (1, 2, 3):  # rank 0 has nothing to merge, which is what the others need memory for
        extra, more = four[rank][0] - two[1][0], four[rank][1] - two[1][1]
        assert extra <= block, f"rank {rank}: a second buffer is all that more ranks need in forward: {extra / block}"
        assert more <= 2 * block, f"rank {rank}: in backward a second buffer, and dK/dV that leave: {more / block}"
    for rank, (*_, left) in enumerate(four):
        assert left == 0, f"rank {rank}: {left} bytes are alive after a forward without gradients"


def order(layout: str) -> tuple[list, list]:
    """What happens on this rank in both passes: messages started and waited for, blocks computed."""
    events: list[tuple[str, str]] = []
    plain_batch, plain_block = dist.batch_isend_irecv, script.attention_block
    plain_backward = script.attention_block_backward

    class Watched:
        def __init__(self, works, what):
            self.works, self.what = works, what

        def wait(self):
            events.append(("wait", self.what))
            for work in self.works:
                work.wait()

    def batch(messages):
        what = "K/V" if messages[0].tensor.dtype == torch.bfloat16 else "dK/dV"
        ends = {message.tensor.untyped_storage().data_ptr() for message in messages}
        assert len(ends) == 2, f"{what}: {len(ends)} buffer for what is sent and what is received"
        events.append(("start", what))
        return [Watched(plain_batch(messages), what)]

    def attention_block(*args):
        events.append(("compute", ""))
        return plain_block(*args)

    def attention_block_backward(*args):
        events.append(("compute", ""))
        return plain_backward(*args)

    with (
        patch.multiple(script, attention_block=attention_block, attention_block_backward=attention_block_backward),
        patch.object(dist, "batch_isend_irecv", batch),
    ):
        group = dist.group.WORLD
        where = script.token_positions(layout, 48, group.rank(), group.size())
        q, k, v, dout = (x[:, where].bfloat16() for x in random_qkv(HEADS, 48, 8))
        out = ring_attention(layout, group)(q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        forward = list(events)
        starts, waits = (forward.count((what, "K/V")) for what in ("start", "wait"))
        assert starts == waits, (
            f"the forward pass starts {starts} messages and waits for {waits} of them"
        )  # backward would hang
        events.clear()
        out.backward(dout)
    return forward, events


def in_flight(events: list, what: str) -> list[int]:
    """At each block: how many messages `what` are started and not yet waited for."""
    counts, now = [], 0
    for event, kind in events:
        now += (event == "start" and kind == what) - (event == "wait" and kind == what)
        counts += [now] if event == "compute" else []
    return counts


def test_messages_are_in_flight_during_computation():
    for rank, (forward, backward) in enumerate(run_ranks(4, order, "zigzag")):
        assert in_flight(forward, "K/V") == [1, 1, 1, 0], f"rank {rank}: {forward}"
        assert in_flight(backward, "K/V") == [1, 1, 1, 0], f"rank {rank}: {backward}"
        assert in_flight(backward, "dK/dV") == [0, 0, 1, 1], f"rank {rank}: {backward}"


def test_hidden_blocks_are_sent_on_without_computation():
    for rank, sides in enumerate(run_ranks(4, order, "contiguous")):
        for events in sides:
            assert sum(event == "compute" for event, _ in events) == rank + 1, f"rank {rank}"
            assert events.count(("start", "K/V")) == 3, f"rank {rank}"


# ----------------------------------------------------------------------------------------------------- the script


def off_by(loss: float, gradient: float):
    def forward_backward(model, *rest, plain=script.forward_backward):
        result = plain(model, *rest)
        model[0].weight.grad *= gradient  # so little that the parameters and the next loss are within 1e-10
        return loss * result

    return forward_backward


def checked(spoil: str) -> list[str]:
    plain = script.expected_bytes
    name, spoiled = {
        "": ("expected_bytes", plain),
        "nan": ("merge_attention", lambda out, lse, *block: (block[0] * torch.nan, lse)),
        "bytes": ("expected_bytes", lambda form, *sizes: (plain(form, *sizes)[0] + (form == "simple"), 8)),
        "loss": ("forward_backward", off_by(1 + 1e-8, 1)),
        "gradient": ("forward_backward", off_by(1, 1 + 1e-8)),
    }[spoil]
    lengths = [32, 31, 31]  # 32 needs no padding
    cases = [(*version, length) for version, length in zip(VERSIONS, lengths, strict=True)]
    with patch.object(script, name, spoiled):
        return [x for case in cases for x in script.check(*case, dist.group.WORLD, CPU)]


@pytest.mark.parametrize(("spoil", "failures"), [("", 0), ("nan", 6), ("bytes", 6), ("loss", 6), ("gradient", 6)])
def test_check_accepts_odd_lengths_and_rejects_nan_and_bytes(spoil, failures):
    for found in run_ranks(2, checked, spoil):  # three forms on two ranks
        assert len(found) == failures and all("error nan" in line or spoil != "nan" for line in found), found
        assert [line.split(":")[0] for line in found] == ["rank 0", "rank 1"] * (failures // 2)
        if spoil == "bytes":  # a block is 2 x 2 x 16 x 2 x 8 elements; 2 layers, 3 steps, 2 or 3 messages
            assert found[0].endswith("; bytes sent 98,304, expected 98,305")
            assert found[5].endswith("; bytes sent 147,456, expected 147,456; bytes saved 153,600, expected 8")


def test_all_forms_are_checked_and_the_last_line_is_pass_or_what_failed(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with patch.dict("os.environ"):
        for length, wrong in ((2, False), (16384, True), (90, True)):  # the shortest, the longest, the default
            monkeypatch.setattr(sys, "argv", ["ring_attention.py", *["--seq-len", str(length)] * (length != 90)])
            monkeypatch.setattr(script, "check", lambda *case, wrong=wrong: [f"{case[:3]}"] * wrong)
            assert script.main() == wrong
            failures = "; ".join(f"{(*version, length)}" for version in VERSIONS)
            assert capsys.readouterr().out == (f"FAIL: {failures}\n" if wrong else "PASS\n")


@pytest.mark.parametrize("core", [script, ulysses], ids=lambda core: core.__name__)
def test_bfloat16_tells_positions_1000_and_1001_apart_and_the_longest_batch_has_text(core):
    x, positions = torch.ones(1, 2, 1, 8), torch.tensor([1000, 1001])
    assert_same(core.apply_rotary(x.bfloat16(), positions), core.apply_rotary(x, positions), 1e-2, "RoPE in bf16")
    x = random_qkv((2, 1), 5, script.HEAD_DIM)[0]
    assert_same(core.apply_rotary(x, torch.arange(5)), rotated(x), what="RoPE")
    text = 9 * list(Path(core.tokenize.__file__).read_bytes())  # which begins anew where it ends
    want = torch.tensor(text[1400:][: core.BATCH * 16384]).view(core.BATCH, 16384)
    assert torch.equal(core.get_batch(2, 16384, CPU), want)


@pytest.mark.parametrize(
    "argv",
    [
        ["--seq-len", "1"],
        ["--seq-len", "16385"],
        ["--seq-len", "nan"],
        ["--layout", "x"],
    ],
)
def test_bad_options_are_refused_in_one_line(argv):
    assert argv[0] in refusal(script.main, argv)
