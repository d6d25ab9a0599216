"""The core file's Ulysses against one process, against the depth, and against its formulas."""

import random
import sys
import time
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import ulysses as script
from harness.attention import assert_losses_of_few_labels, attention_results, dense_attention, random_qkv
from harness.meter import communication, saved_activations
from harness.programs import on_stand_in_gpus, refusal
from harness.ranks import run_ranks
from harness.reference import assert_same
from torch import Tensor

sys.path.append(str(Path(__file__).with_name("in_depth")))
import context_ulysses

S = 45  # odd: zeros have to fill up the last shard, on 2 and on 4 ranks
NAMES = ("out", "dq", "dk", "dv")
CPU = torch.device("cpu")


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
            x = block(x, torch.arange(S), dense_attention)
        loss = F.cross_entropy(model[-1](x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, params)
        results += [loss.detach(), *gradients]
        for p, g in zip(params, gradients, strict=True):
            p.data -= 0.1 * g
    return results + [p.detach() for p in params]


def ulysses(group: dist.ProcessGroup):
    comm = script.AllToAllComm(group)
    return lambda q, k, v: script.ulysses_attention(q, k, v, script.causal_attention, comm)


def trained(slices: bool = False, delays: bool = False) -> list[Tensor]:
    group = dist.group.WORLD
    if slices:
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    plain, dice = dist.all_to_all_single, random.Random(dist.get_rank())

    def late(*args, **kwargs):
        time.sleep(dice.choice((0, 0, 0.003)) if delays else 0)
        return plain(*args, **kwargs)

    model = script.build_model(CPU)
    params = list(model.parameters())
    attention = ulysses(group)
    results = []
    with patch.object(dist, "all_to_all_single", late):
        for step in range(3):
            shard = script.shard_sequence(script.get_batch(step, S, CPU), group.rank(), group.size())
            results.append(script.forward_backward(model, shard, attention, group))
            for p in params:
                results.append(p.grad)
                p.data, p.grad = p.data - 0.1 * p.grad, None
        assert_losses_of_few_labels(script, model, shard, attention, group)
    return results + [p.detach() for p in params]


@pytest.mark.always("4-{}")
@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (2, {}), (4, {}), (4, {"slices": True}), (4, {"delays": True})], ids=str
)
def test_losses_gradients_and_parameters_match_reference(ranks, options):
    """On 4 ranks Ulysses gives them 2, 2, 1 and 1 of 6 heads."""
    for rank, got in enumerate(run_ranks(ranks, trained, **options)):
        for at, (x, expected) in enumerate(zip(got, unsharded(), strict=True)):
            assert_same(x, expected, what=f"number {at} of losses, gradients and parameters", rank=rank)


def test_labels_and_positions_follow_their_tokens():
    tokens = torch.randperm(45).view(1, 45) + 1
    for cp in (1, 2, 3, 4):
        parts = [script.shard_sequence(tokens, rank, cp) for rank in range(cp)]
        mine, labels, where = (torch.cat(x, -1).flatten() for x in zip(*parts, strict=True))
        assert where.tolist() == list(range(45 + -45 % cp)), "every position once, in order"
        for token, label, at in zip(mine.tolist(), labels.tolist(), where.tolist(), strict=True):
            assert token == (tokens[0, at].item() if at < 45 else 0)
            assert label == (tokens[0, at + 1].item() if at < 44 else script.IGNORE_INDEX), f"{cp} ranks, {at}"


# ---------------------------------------------------------------------------------------------------- attention alone


def local_inputs(heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    return [x.chunk(dist.get_world_size(), 1)[dist.get_rank()].to(dtype) for x in random_qkv(heads, 24, 8)]


def core_and_depth(heads: tuple[int, int]) -> tuple:
    """This rank's (out, dq, dk, dv) by the core file and by in_depth."""
    ours = attention_results(ulysses(dist.group.WORLD), *local_inputs(heads, torch.float64))
    other = context_ulysses.ulysses(dist.group.WORLD)
    return ours, attention_results(lambda *qkv: other(*qkv, causal=True), *local_inputs(heads, torch.float64))


# Of (6, 2) on 4 ranks, these have 2, 2, 1 and 1 query heads here, and 1, 2, 1 and 2 in in_depth. Of (6, 3) on 2 ranks,
# the three query heads of each use 0 0 1 and 0 1 1 of two K/V heads; of (12, 4) on 3 ranks, four use 0 0 0 1, 0 0 1 1
# and 0 1 1 1.
CASES = [((8, 2), 4), ((8, 1), 4), ((6, 2), 4), ((6, 3), 2), ((12, 4), 3)]


@pytest.mark.parametrize(("heads", "P"), CASES)
def test_any_number_of_heads_matches_dense_attention_and_in_depth(heads, P):
    full = attention_results(dense_attention, *random_qkv(heads, 24, 8))
    for rank, (ours, other) in enumerate(run_ranks(P, core_and_depth, heads)):
        for name, x, y, expected in zip(NAMES, ours, other, full, strict=True):
            assert_same(x, expected.chunk(P, 1)[rank], what=name, rank=rank)
            assert_same(x, y, what=f"{name}, against in_depth", rank=rank)


def exchanged() -> list[Tensor]:
    """Values that say where they come from: 100 head + position, in q, k and v of 6 and 2 heads."""
    comm, rank, s = script.AllToAllComm(dist.group.WORLD), dist.get_rank(), 3
    positions = torch.arange(rank * s, (rank + 1) * s).double()
    q, k = (
        (100 * torch.arange(heads)[None, :] + positions[:, None])[None, :, :, None].expand(2, -1, -1, 4)
        for heads in (6, 2)
    )
    with communication() as sent:
        heads = script.seq_to_heads(q, k, k + 1000, comm)
        back = script.heads_to_seq(heads[0], 6, comm)
    rows, each = torch.ones(comm.cp, 3, requires_grad=True), [1] * comm.cp
    squares = script.AllToAll.apply(rows, each, each, comm).square()
    (gradient,) = torch.autograd.grad(squares.sum(), rows, create_graph=True)
    gradient.sum().backward()
    assert torch.equal(rows.grad, 2 * torch.ones(comm.cp, 3)), "the second derivative of squares"
    return [*(x[0, :, :, 0] for x in heads), (back - q).abs().amax((0, 3)), sent.calls]


@pytest.mark.parametrize("P", [1, 2, 4])
def test_one_all_to_all_brings_all_tokens_in_order_and_one_returns_the_output(P):
    for rank, (*got, off, calls) in enumerate(run_ranks(P, exchanged)):
        queries, kv = script.local_heads(rank, P, 6, 2)
        positions = torch.arange(3 * P).double()[:, None]
        for name, x, heads, more in zip("qkv", got, (queries, kv, kv), (0, 0, 1000), strict=True):
            expected = 100 * torch.tensor(heads)[None, :] + positions + more
            assert torch.equal(x, expected), f"{name} on rank {rank} of {P}: {x.tolist()}, not {expected.tolist()}"
        assert not off.any(), f"rank {rank} of {P}: the returned output is off by {off.tolist()}"
        assert calls == {"all_to_all": 2}, f"rank {rank}: {dict(calls)}"


def heads_of_all(N, N_kv, P):
    return [script.local_heads(rank, P, N, N_kv) for rank in range(P)]


@pytest.mark.parametrize(
    ("N", "N_kv", "P", "copies"),
    [(6, 2, 4, 5), (12, 4, 6, 8), (64, 8, 16, 16), (8, 8, 4, 8), (7, 7, 3, 7), (6, 1, 6, 6)],
)
def test_each_query_head_is_on_one_rank_with_the_kv_head_it_uses(N, N_kv, P, copies):
    [heads] = run_ranks(1, heads_of_all, N, N_kv, P)
    dealt = [h for queries, _ in heads for h in queries]
    assert dealt == list(range(N)), f"{dealt}: not all in order, each on one rank"
    assert max(len(q) for q, _ in heads) - min(len(q) for q, _ in heads) <= 1
    for queries, kv in heads:
        assert kv == sorted({h // (N // N_kv) for h in queries})
    assert sum(len(kv) for _, kv in heads) == copies


# ------------------------------------------------------------------------------------------------------------ bytes


def costs(heads: tuple[int, int]) -> tuple:
    comm = script.AllToAllComm(dist.group.WORLD)
    q, k, v, dout = local_inputs(heads, torch.float32)
    with communication() as forward, saved_activations() as saved:
        out = script.ulysses_attention(
            q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), script.causal_attention, comm
        )
    own = comm.bytes_sent
    with communication() as backward:
        out.backward(dout)
    each = [script.local_heads(rank, comm.cp, *heads) for rank in range(comm.cp)]
    floats = saved.bytes - 8 * sum(len(x) + 2 * len(y) for x, y in each)  # without the indices of rows
    return forward.total, own, backward.total, comm.bytes_sent, floats, forward.calls


@pytest.mark.parametrize(("heads", "P"), [((6, 2), 4), ((8, 8), 2), ((8, 1), 4)])
def test_bytes_match_the_formulas(heads, P):
    N = heads[0]
    sizes = [[len(x) for x in script.local_heads(rank, P, *heads)] for rank in range(P)]
    C, token = sum(m for _, m in sizes), 2 * 24 // P * 8 * 4  # float32
    for rank, (forward, own, backward, own_step, saved, calls) in enumerate(run_ranks(P, costs, heads)):
        n, m = sizes[rank]
        expected = (N - n + 2 * (C - m) + n * (P - 1)) * token, ((n + 2 * m) * (P - 1) + N - n) * token
        assert (forward, backward) == expected, f"rank {rank} sends {forward, backward} bytes, by formula {expected}"
        assert (own, own_step - own) == expected, f"rank {rank} counts {own, own_step - own} bytes"
        assert calls == {"all_to_all": 2}, f"rank {rank}: {dict(calls)}"
        # q, k, v, out and LSE of all tokens and n or m heads; torch adds two words for a random state
        assert saved - 2 * 24 * (8 * (2 * n + 2 * m) + n) * 4 in range(17), f"rank {rank}"


# ----------------------------------------------------------------------------------------------------- the script


def off_by(loss: float, gradient: float):
    def forward_backward(model, *rest, plain=script.forward_backward):
        result = plain(model, *rest)
        model[0].weight.grad *= gradient  # so little that the parameters and the next loss are within 1e-10
        return loss * result

    return forward_backward


def checked(spoil: str) -> list[str]:
    plain, attention = script.expected_bytes, script.causal_attention
    name, spoiled = {
        "": ("expected_bytes", plain),
        "nan": ("causal_attention", lambda *x: attention(*x) * (torch.nan if x[0].shape[2] < 6 else 1)),
        "sent": ("expected_bytes", lambda *sizes: (plain(*sizes)[0] + 8, plain(*sizes)[1])),
        "saved": ("expected_bytes", lambda *sizes: (plain(*sizes)[0], plain(*sizes)[1] + 8)),
        "loss": ("forward_backward", off_by(1 + 1e-8, 1)),
        "gradient": ("forward_backward", off_by(1, 1 + 1e-8)),
    }[spoil]
    with patch.object(script, name, spoiled):
        lengths = [31] if spoil else [31, 32]  # 32 needs no padding
        return [line for length in lengths for line in script.check(length, dist.group.WORLD, CPU)]


@pytest.mark.parametrize("spoil", ["", "nan", "sent", "saved", "loss", "gradient"])
def test_check_accepts_odd_lengths_and_rejects_nan_and_bytes(spoil):
    for found in run_ranks(2 if spoil else 4, checked, spoil):  # 4 ranks have 2, 2, 1 and 1 heads
        assert len(found) == 2 * bool(spoil) and all("error nan" in line or spoil != "nan" for line in found), found
        assert [line.split(":")[0] for line in found] == ["rank 0", "rank 1"] * bool(spoil)
        if spoil == "saved":  # of 32 tokens and 3 heads; 8 elements per token are sent in each pass
            assert found[0].endswith("sent 196,608, expected 196,608; bytes saved 205,824, expected 205,832")


def test_the_last_line_is_pass_or_what_failed(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with patch.dict("os.environ"):
        for length, wrong in ((2, False), (16384, True), (90, True)):  # the shortest, the longest, the default
            monkeypatch.setattr(sys, "argv", ["ulysses.py", *["--seq-len", str(length)] * (length != 90)])
            monkeypatch.setattr(script, "check", lambda *case, wrong=wrong: [f"{case[0]} tokens"] * wrong)
            assert script.main() == wrong
            assert capsys.readouterr().out == (f"FAIL: {length} tokens\n" if wrong else "PASS\n")


WITH_SCORES = """
import sys, ulysses
from torch.nn.attention import SDPBackend, sdpa_kernel
sys.argv = ["ulysses.py"]
with sdpa_kernel(SDPBackend.MATH):  # what a GPU has for float64
    sys.exit(ulysses.main())
"""


@pytest.mark.prove
@pytest.mark.parametrize("gpus", ["1", "0"])
def test_saved_bytes_are_checked_on_cpus_only(gpus):
    done = on_stand_in_gpus(Path(script.__file__).parent, "-c", WITH_SCORES, gpus=int(gpus))
    first, *_, last = done.stdout.splitlines() or [""]
    assert ("bytes saved" in first) == (gpus == "0"), done.stdout + done.stderr[-900:]
    assert (last == "PASS") == (gpus == "1"), done.stdout + done.stderr[-900:]


@pytest.mark.parametrize(
    ("argv", "ranks", "named"),
    [
        (["--seq-len", "1"], 1, "--seq-len 1"),
        (["--seq-len", "16385"], 1, "--seq-len 16385"),
        (["--seq-len", "nan"], 1, "--seq-len"),
        ([], 7, "--nproc_per_node 7: use 6 or less"),
        (["--kv", "2"], 2, "--kv"),
        (["--seq-len", "16384"], 6, "allowed"),
    ],
)
def test_bad_options_are_refused_in_one_line(argv, ranks, named, monkeypatch):
    monkeypatch.setattr(script, "init_distributed", lambda: script.fail("allowed"))
    assert named in refusal(script.main, argv, ranks)
