"""Ulysses on the ground floor against one process, against the depth, and against its own formulas."""

import ast
import contextlib
import os
import random
import subprocess
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
from harness.house import ROOT, chapter_of, scripts
from harness.meter import communication, saved_activations
from harness.oracle import assert_same
from harness.ranks import run_ranks
from torch import Tensor, nn

sys.path.append(str(Path(__file__).with_name("in_depth")))
import context_ulysses

S = 45  # odd: zeros have to fill up the last part, on any number of ranks
NAMES = ("out", "dq", "dk", "dv")


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written out, with nothing of the script: [B, S, N, D], causal, each K/V head repeated for its query heads."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * q.shape[-1] ** -0.5
    scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype).triu(1)
    return torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v)


@cache
def unsharded() -> list[Tensor]:
    """Three steps on one process, with torch's mean over tokens: losses and gradients, then weights."""
    torch.manual_seed(0)
    layers = (script.Layer() for _ in range(script.LAYERS))
    model = nn.ModuleList([nn.Embedding(script.V, script.H), *layers, nn.Linear(script.H, script.V)]).double()
    text = torch.frombuffer(bytearray(Path(script.tokenize.__file__).read_bytes()), dtype=torch.uint8).long()
    results = []
    for step in range(3):
        tokens = text[700 * step :][: script.B * S].view(script.B, S)
        x = model[0](tokens)
        for layer in model[1:-1]:
            x = layer(x, torch.arange(S), dense_attention)
        loss = F.cross_entropy(model[-1](x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results += [loss.detach(), *gradients]
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.data -= 0.1 * g
    return results + [p.detach() for p in model.parameters()]


def attention_of(R: int, row, column):
    if R == 1:
        return lambda *qkv: script.ulysses(*qkv, row, script.dense)
    return lambda *qkv: script.ulysses(*qkv, row, lambda q, k, v: script.ring(q, k, v, column))


def trained(meshes: list[tuple[int, int]], slices: bool = False, delays: bool = False) -> list[list[Tensor]]:
    group, found = dist.group.WORLD, []
    if slices:
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    plain, dice = dist.batch_isend_irecv, random.Random(dist.get_rank())

    def late(messages):
        time.sleep(dice.choice((0, 0, 0.003)) if delays else 0)
        return plain(messages)

    dist.batch_isend_irecv = late
    try:
        for R, U in meshes:
            row, column = (group, None) if slices else script.mesh(R, U, list(range(R * U)))
            found.append(script.train(attention_of(R, row, column), R, U, S, group, "cpu"))
    finally:
        dist.batch_isend_irecv = plain
    return found


def assert_trained(results: list, meshes: list[tuple[int, int]]) -> None:
    for rank, versions in enumerate(results):
        for mesh, got in zip(meshes, versions, strict=True):
            for at, (x, want) in enumerate(zip(got, unsharded(), strict=True)):
                assert_same(x, want, what=f"R x U = {mesh}: number {at} of losses, gradients and weights", rank=rank)


@pytest.mark.parametrize(("ranks", "meshes"), [(1, [(1, 1)]), (2, [(1, 2), (2, 1)]), (4, [(1, 4), (2, 2), (4, 1)])])
def test_losses_every_gradient_and_weights_are_those_of_one_process(ranks, meshes):
    """On 4 ranks Ulysses gives them 2, 2, 1 and 1 of 6 heads."""
    assert_trained(run_ranks(ranks, trained, meshes), meshes)


def lines_of(R: int, U: int, ranks: list[int]) -> list[list[int]]:
    return [sorted(dist.get_process_group_ranks(group)) for group in script.mesh(R, U, ranks)]


def test_a_row_is_of_neighbours_in_the_list_of_ranks_and_a_column_crosses_the_rows():
    for rank, (row, column) in enumerate(
        run_ranks(4, lines_of, 2, 2, [2, 0, 3, 1])
    ):  # 2 0 in one row, 3 1 in the other
        assert row == ([0, 2], [1, 3])[rank % 2], f"rank {rank} is in the row {row}"
        assert column == ([2, 3], [0, 1])[rank < 2], f"rank {rank} is in the column {column}"


def test_two_slices_of_the_world_do_not_disturb_each_other():
    assert_trained(run_ranks(4, trained, [(1, 2)], slices=True), [(1, 2)])


def test_what_is_late_is_waited_for():
    assert_trained(run_ranks(4, trained, [(2, 2), (4, 1)], delays=True), [(2, 2), (4, 1)])


def test_a_token_keeps_its_label_and_its_place_on_every_mesh():
    tokens = torch.randperm(45).view(1, 45) + 1
    for R, U in ((1, 1), (1, 4), (2, 2), (3, 2), (4, 1)):
        parts = [script.cut(tokens, R, U, rank) for rank in range(R * U)]
        mine, labels, where = (torch.cat(x, -1).flatten() for x in zip(*parts, strict=True))
        assert sorted(where.tolist()) == list(range(45 + -45 % (2 * R * U))), "every place once"
        for token, label, at in zip(mine.tolist(), labels.tolist(), where.tolist(), strict=True):
            assert token == (tokens[0, at].item() if at < 45 else 0)
            assert label == (tokens[0, at + 1].item() if at < 44 else script.IGNORE), f"{R} x {U}: label of {at}"


# ---------------------------------------------------------------------------------------------------- attention alone


def inputs(heads: tuple[int, int]) -> list[Tensor]:
    """q, k, v of a whole sequence and the gradient of the output: [2, 24, heads, 8] in float64."""
    generator = torch.Generator().manual_seed(1)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(2, 24, n, 8, generator=generator, dtype=torch.float64) for n in sizes]


def results_of(attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def both_floors(heads: tuple[int, int], R: int, dtype: torch.dtype, deep: bool) -> tuple:
    """This rank's (out, dq, dk, dv) by the ground floor and by in_depth, and where its tokens are."""
    P, rank = dist.get_world_size(), dist.get_rank()
    U = P // R
    where = script.positions_of(24, rank // U, R, rank % U, U)
    mine = [x[:, where].to(dtype) for x in inputs(heads)]
    row, column = script.mesh(R, U, list(range(P)))
    ours = results_of(attention_of(R, row, column), *mine)
    if not deep:
        return ours, ours, where
    other = context_ulysses.ulysses(row) if R == 1 else context_ulysses.usp(row, column)
    return ours, results_of(lambda *qkv: other(*qkv, causal=True), *mine), where


# Heads that ranks do not share out evenly are beyond in_depth. Of (6, 3) on 2 ranks, the three query heads of each use
# 0 0 1 and 0 1 1 of two K/V heads; of (12, 4) on 3 ranks, four use 0 0 0 1, 0 0 1 1 and 0 1 1 1.
CASES = [
    *[((8, 2), 4, 1, True), ((8, 8), 4, 2, True), ((8, 1), 4, 2, True), ((6, 2), 4, 1, False)],
    *[((6, 3), 2, 1, True), ((12, 4), 3, 1, True)],
]


@pytest.mark.parametrize(("heads", "P", "R", "deep"), CASES)
def test_it_is_dense_attention_with_any_number_of_heads_and_agrees_with_in_depth(heads, P, R, deep):
    want = results_of(dense_attention, *inputs(heads))
    for rank, (ours, other, where) in enumerate(run_ranks(P, both_floors, heads, R, torch.float64, deep)):
        for name, x, y, whole in zip(NAMES, ours, other, want, strict=True):
            assert_same(x, whole[:, where], what=name, rank=rank)
            assert_same(x, y, what=f"{name}, against in_depth", rank=rank)


@pytest.mark.parametrize("R", [1, 2])
def test_bfloat16_errs_at_most_one_and_a_half_times_as_much_as_dense_attention_in_bfloat16(R):
    rounded = [x.bfloat16() for x in inputs((8, 8))]
    exact = results_of(dense_attention, *(x.double() for x in rounded))
    dense = results_of(script.dense, *rounded)
    ranks = run_ranks(4, both_floors, (8, 8), R, torch.bfloat16, False)
    where = torch.cat([place for *_, place in ranks])
    for i, name in enumerate(NAMES):
        x = torch.cat([ours[i] for ours, *_ in ranks], 1)
        assert x.dtype == torch.bfloat16
        error, allowed = ((y.double() - exact[i][:, where]).norm().item() for y in (x, dense[i][:, where]))
        assert error <= 1.5 * allowed, f"{name} is off by {error:.2e}, dense attention by {allowed:.2e}"


def swapped() -> list[Tensor]:
    """Numbers that say where they come from: 100 head + place, in q, k and v of 6 and 2 heads."""
    rank, s = dist.get_rank(), 3
    places = torch.arange(rank * s, (rank + 1) * s).double()
    q, k = (
        (100 * torch.arange(heads)[None, :] + places[:, None])[None, :, :, None].expand(2, -1, -1, 4)
        for heads in (6, 2)
    )
    with communication() as sent:
        there = script.to_heads(q, k, k + 1000, dist.group.WORLD)
        back = script.to_tokens(there[0], 6, dist.group.WORLD)
    return [*(x[0, :, :, 0] for x in there), (back - q).abs().amax((0, 3)), sent.calls]


@pytest.mark.parametrize("P", [1, 2, 4])
def test_one_message_brings_all_tokens_in_order_and_one_brings_the_outputs_back(P):
    for rank, (*there, off, calls) in enumerate(run_ranks(P, swapped)):
        assert not off.any(), f"rank {rank} of {P}: what comes back is off by {off.tolist()}"
        queries, kv = script.heads_of(rank, P, 6, 2)
        places = torch.arange(3 * P).double()[:, None]
        for name, x, heads, more in zip("qkv", there, (queries, kv, kv), (0, 0, 1000), strict=True):
            want = 100 * torch.tensor(heads)[None, :] + places + more
            assert torch.equal(x, want), f"{name} on rank {rank} of {P}: {x.tolist()}, not {want.tolist()}"
        assert calls == {"all_to_all": 2}, f"rank {rank}: {dict(calls)}"


def heads_of_all(N, N_kv, U):
    return [script.heads_of(rank, U, N, N_kv) for rank in range(U)]


@pytest.mark.parametrize(
    ("N", "N_kv", "U", "copies"),
    [(6, 2, 4, 5), (12, 4, 6, 8), (64, 8, 16, 16), (8, 8, 4, 8), (7, 7, 3, 7), (6, 1, 6, 6)],
)
def test_every_query_head_has_one_rank_and_kv_heads_go_where_they_are_needed_and_nowhere_else(N, N_kv, U, copies):
    [heads] = run_ranks(1, heads_of_all, N, N_kv, U)
    dealt = [h for queries, _ in heads for h in queries]
    assert dealt == list(range(N)), f"{dealt}: not all in order, each on one rank"
    assert max(len(q) for q, _ in heads) - min(len(q) for q, _ in heads) <= 1
    for queries, kv in heads:
        assert kv == sorted({h // (N // N_kv) for h in queries})
    assert sum(len(kv) for _, kv in heads) == copies


# ----------------------------------------------------------------------------------------------------- bytes, pairs


def costs(heads: tuple[int, int], R: int, dtype: torch.dtype) -> tuple:
    P, rank = dist.get_world_size(), dist.get_rank()
    U = P // R
    row, column = script.mesh(R, U, list(range(P)))
    where = script.positions_of(24, rank // U, R, rank % U, U)
    q, k, v, dout = (x[:, where].to(dtype) for x in inputs(heads))
    script.count.clear()
    with communication() as forward, saved_activations() as saved:
        out = attention_of(R, row, column)(q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    own = script.count["sent, step"]
    with communication() as backward:
        out.backward(dout)
    floats = saved.bytes - 8 * sum(len(x) + 2 * len(y) for x, y in (script.heads_of(r, U, *heads) for r in range(U)))
    return forward.total, own, backward.total, script.count["sent, step"], script.count["pairs"], floats, forward.calls


@pytest.mark.parametrize(("heads", "P", "R"), [((6, 2), 4, 1), ((8, 8), 2, 1), ((8, 2), 4, 2), ((8, 1), 4, 4)])
def test_bytes_and_pairs_are_those_of_the_formulas_and_what_the_script_counts_is_what_the_meter_counts(heads, P, R):
    (N, N_kv), U = heads, P // R
    sizes = [[len(x) for x in script.heads_of(rank, U, N, N_kv)] for rank in range(U)]
    C, token = sum(m for _, m in sizes), 2 * 24 // P * 8 * 4  # float32
    for rank, (forward, own, backward, own_step, pairs, kept, calls) in enumerate(
        run_ranks(P, costs, heads, R, torch.float32)
    ):
        n, m = sizes[rank % U]
        hops = (R - 1) * 2 * m * U * token
        there, back = N - n + 2 * (C - m), n * (U - 1)
        assert forward == own == (there + back) * token + hops, f"rank {rank}"
        assert backward == ((n + 2 * m) * (U - 1) + N - n) * token + hops == own_step - own, f"rank {rank}"
        assert calls["all_to_all"] == 2 and calls["send"] == R - 1, f"rank {rank}: {dict(calls)}"
        assert pairs == n * 24 * 25 // (2 * R), f"rank {rank}"
        if R == 1:  # q, k, v, out and LSE of all tokens and n or m heads; torch adds two words for a random state
            assert kept - 2 * 24 * (8 * (2 * n + 2 * m) + n) * 4 in range(17), f"rank {rank}"


# ----------------------------------------------------------------------------------------------------- the script


def checked(spoil: str) -> list[str]:
    spoiled: contextlib.AbstractContextManager = contextlib.nullcontext()
    if spoil == "nan":
        plain = script.dense
        spoiled = patch.object(script, "dense", lambda *x: plain(*x) * (torch.nan if x[0].shape[2] < 6 else 1))
    if spoil == "bytes":
        plain_all = dist.all_to_all_single

        def more(*args, **kwargs):
            script.count["sent, step"] += 8
            return plain_all(*args, **kwargs)

        spoiled = patch.object(dist, "all_to_all_single", more)
    with spoiled:
        return script.check(31, [(1, 2), (2, 1)], dist.group.WORLD, "cpu")


def test_the_check_is_content_with_any_length_and_notices_nan_and_bytes():
    assert run_ranks(2, checked, "")[0] == []
    assert any("error nan" in line for line in run_ranks(2, checked, "nan")[0])
    assert any("sent, step" in line for line in run_ranks(2, checked, "bytes")[1])


STAND_IN = ROOT / "tests/fake_device"
WITH_SCORES = """
import sys, ulysses
from torch.nn.attention import SDPBackend, sdpa_kernel
sys.argv = ["ulysses.py"]
with sdpa_kernel(SDPBackend.MATH):  # what a GPU has for float64
    sys.exit(ulysses.main())
"""


@pytest.mark.skipif(not STAND_IN.exists(), reason="an exercise is checked without a stand-in GPU")
@pytest.mark.parametrize("gpus", ["1", "0"])
def test_what_is_kept_is_that_of_a_flash_kernel_on_a_cpu_and_may_be_more_on_a_gpu(gpus):
    path = f"{STAND_IN}{os.pathsep}{Path(script.__file__).parent}"
    environment = os.environ | {"PYTHONPATH": path, "FAKE_GPUS": gpus, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITH_SCORES], env=environment, capture_output=True, text=True, timeout=120
    )
    first, *_, last = done.stdout.splitlines() or [""]
    assert ("on cuda:0" in first) == (gpus == "1"), done.stdout + done.stderr[-900:]
    want = "PASS" if gpus == "1" else "FAIL: Ulysses, rank 0: kept 1,969,920, not 385,920"
    assert last == want, done.stdout + done.stderr[-900:]


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        (["--tokens", "1"], 1),
        (["--tokens", "9" * 20], 1),
        (["--tokens", "nan"], 1),
        (["--ring", "3"], 4),
        (["--ring", "0"], 4),
        (["--ring", "1"], 8),
        (["--ring", ""], 2),
        (["--kv", "2"], 2),
    ],
)
def test_a_bad_option_is_one_line_that_names_it(argv, ranks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ulysses.py", *argv])
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit) as end:
        script.main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and said.err.count("\n") == 1 and argv[0] in said.err
    assert not dist.is_initialized()


def makers_of_groups(file: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    makers = ("init_process_group", "new_group", "new_subgroups_by_enumeration")
    return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in makers]


def test_no_group_of_a_script_is_left_with_the_default_time_limit_of_half_an_hour():
    """A group does not inherit the world's. (Benchmarks run under the harness, which has a limit of its own.)"""
    found = {file.name: makers_of_groups(file) for file in scripts(chapter_of(Path(__file__)))}
    assert {name for name, calls in found.items() if calls} >= {"ulysses.py", "context_ring.py", "context_ulysses.py"}
    for name, calls in found.items():
        for call in calls:
            assert "timeout" in [word.arg for word in call.keywords], f"{name}, line {call.lineno}: no timeout"


def test_more_ranks_than_gpus_are_refused_and_do_not_fall_back_to_gloo(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ulysses.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as end:
        script.main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "") and not dist.is_initialized()
    assert said.err.endswith(": --nproc_per_node 4: there are 2 GPUs here; use 2 or less\n")
