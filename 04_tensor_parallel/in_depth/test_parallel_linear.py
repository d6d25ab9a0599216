"""The matrix identities, their operators and the MLP made of them, against one device."""

import importlib
import itertools
import os
import sys
import weakref
from unittest import mock

import parallel_linear
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.meter import communication, held_bytes, saved_activations
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_trace, numbers, sgd_trace
from parallel_linear import (
    COLUMNS,
    ColumnParallelLinear,
    ParallelMLP,
    Shard,
    TensorParallel,
    all_gather,
    all_reduce,
    cannot_divide,
    f,
    f_star,
    g,
    g_star,
    init_weights,
    initial_weight,
    input_gradient,
    reduce_scatter,
    shards,
    under_autocast,
)
from parallel_llama import load_full_state_dict
from torch import Tensor

B, S, H, F_ = 2, 12, 6, 24
SHAPES = {"gate_proj.weight": (F_, H), "up_proj.weight": (F_, H), "down_proj.weight": (H, F_)}


def full_weights() -> dict[str, Tensor]:
    return {name: initial_weight(name, shape, 1, seed=0).double() for name, shape in SHAPES.items()}


def piece(x: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's tokens."""
    return Shard(x.shape[1], 1, tp.size, tp.rank).cut(x) if tp.sequence_parallel else x


# ---------------------------------------------------------------------------------------------------- the operators


def operators() -> dict[str, tuple[Tensor, Tensor]]:
    """Output and gradient of each operator. Inputs and outgoing gradients differ on every rank."""
    group, rank = dist.group.WORLD, dist.get_rank()
    results = {}
    for operator in (f, f_star, g, g_star):
        x = numbers(B, S, H, seed=rank).requires_grad_()
        y = operator(x, group)
        y.backward(numbers(*y.shape, seed=100 + rank))
        results[operator.__name__] = (y.detach(), x.grad)
    return results


def test_each_operator_and_its_conjugate_move_what_the_paper_says():
    ranks = 3
    xs = [numbers(B, S, H, seed=rank) for rank in range(ranks)]

    def grads(length: int) -> list[Tensor]:
        return [numbers(B, length, H, seed=100 + rank) for rank in range(ranks)]

    for rank, got in enumerate(run_ranks(ranks, operators)):
        chunk = Shard(S, 1, ranks, rank).cut
        my_gradient = Shard(S * ranks, 1, ranks, rank).cut
        want = {
            "f": (xs[rank], sum(grads(S))),
            "f_star": (sum(xs), grads(S)[rank]),
            "g": (torch.cat(xs, 1), my_gradient(sum(grads(S * ranks)))),
            "g_star": (chunk(sum(xs)), torch.cat(grads(S // ranks), 1)),
        }
        for name, pair in want.items():
            for what, a, b in zip(("output", "gradient"), got[name], pair, strict=True):
                assert_same(a, b, what=f"{what} of {name}", rank=rank)


def sums_of_a_tensor_with_gaps() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = numbers(4, 6, 2, seed=dist.get_rank()).transpose(0, 1)
    before = x.clone()
    total = all_reduce(x, dist.group.WORLD)
    whole = before.clone(memory_format=torch.contiguous_format)
    all_reduce(whole, dist.group.WORLD)
    change = (x - before).abs() + (whole - before).abs()
    return total, change, reduce_scatter(x, dist.group.WORLD), all_gather(x, dist.group.WORLD)


def test_all_reduce_returns_the_sum_of_a_tensor_with_gaps_and_leaves_its_input_alone():
    parts = [numbers(4, 6, 2, seed=rank).transpose(0, 1) for rank in range(2)]
    want = sum(parts)
    for rank, (got, change, scattered, gathered) in enumerate(run_ranks(2, sums_of_a_tensor_with_gaps)):
        assert_same(got, want, what="the sum", rank=rank)
        assert not change.any(), f"rank {rank}: the input was overwritten"
        assert_same(scattered, want.chunk(2, 1)[rank], what="the scattered sum", rank=rank)
        assert_same(gathered, torch.cat(parts, 1), what="what was gathered", rank=rank)


def uneven_sizes() -> list[str]:
    sequence = error_from(ValueError, reduce_scatter, numbers(B, 7, H), dist.group.WORLD)
    return [sequence, error_from(ValueError, ParallelMLP, H, 7, TensorParallel(dist.group.WORLD))]


def test_a_size_that_does_not_divide_is_refused_with_what_would():
    assert all(said.endswith("a multiple of 2") for said in run_ranks(2, uneven_sizes)[0])
    most = "use 1, 2, 4, 8, 16, 32, 64, 128 ranks, or a multiple of 3"
    assert cannot_divide(3, "heads", 256) == f"3 tensor-parallel ranks do not divide heads 256; {most}"


# ----------------------------------------------------------------------------------------------------- the MLP


def reference_trace() -> Trace:
    w = {name: torch.nn.Parameter(value) for name, value in full_weights().items()}

    def backward(step: int) -> float:
        x, target = numbers(B, S, H, seed=step), numbers(B, S, H, seed=50 + step)
        hidden = F.silu(F.linear(x, w["gate_proj.weight"])) * F.linear(x, w["up_proj.weight"])
        loss = (F.linear(hidden, w["down_proj.weight"]) - target).square().sum() / (B * S)
        loss.backward()
        return loss.item()

    return sgd_trace(w, backward)


def mlp_trace(tp: TensorParallel) -> Trace:
    mlp = ParallelMLP(H, F_, tp).double()
    load_full_state_dict(mlp, full_weights())

    def backward(step: int) -> float:
        x, target = numbers(B, S, H, seed=step), numbers(B, S, H, seed=50 + step)
        loss = (mlp(piece(x, tp)) - piece(target, tp)).square().sum() / (B * S)
        loss.backward()
        total = loss.detach().clone()
        if tp.sequence_parallel:  # each rank has the loss of its own tokens
            dist.all_reduce(total, group=tp.group)
        return total.item()

    return sgd_trace(dict(mlp.named_parameters()), backward)


def cut_trace(trace: Trace, ranks: int, rank: int) -> Trace:
    """What this rank should have of the reference's trace."""
    dims = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
    cut = {name: Shard(F_, dim, ranks, rank).cut for name, dim in dims.items()}
    gradients = [{name: cut[name](value) for name, value in step.items()} for step in trace.gradients]
    return Trace(trace.losses, gradients, {name: cut[name](value) for name, value in trace.weights.items()})


def all_mlp_traces() -> list[Trace]:
    group = dist.group.WORLD
    return [mlp_trace(TensorParallel(group, sp, column=c)) for sp in (False, True) for c in COLUMNS.values()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_mlp_loss_gradients_and_weights_after_three_steps_equal_one_device(ranks):
    want = reference_trace()
    for rank, traces in enumerate(run_ranks(ranks, all_mlp_traces)):
        for got in traces:
            assert_same_trace(got, cut_trace(want, ranks, rank), rank=rank)


def measured_mlp(version: str, sequence: bool) -> tuple:
    tp = TensorParallel(dist.group.WORLD, sequence, column=COLUMNS[version])
    mlp = ParallelMLP(H, F_, tp).double()
    init_weights(mlp, 1, 0)
    x = piece(numbers(B, S, H), tp).clone().requires_grad_()
    with communication() as forward, saved_activations(exclude=mlp.parameters()) as saved:
        z = mlp(x)
    with communication() as backward:
        z.sum().backward()
    held = held_bytes(mlp)
    return forward.calls, backward.calls, forward.total + backward.total, saved.bytes, held.parameters, held.gradients


def all_measured_mlps() -> dict[tuple[str, bool], tuple]:
    return {(version, sequence): measured_mlp(version, sequence) for version in COLUMNS for sequence in (False, True)}


def test_a_step_sends_holds_and_keeps_the_bytes_of_the_formulas():
    n, inner, weights, t = B * S * H * 8, 4 * B * S * F_ * 8, 3 * H * F_ * 8, 3
    all_reduces = 4 * (t - 1) * n // t
    for found in run_ranks(t, all_measured_mlps):
        for (version, sequence), (forward, backward, sent, kept, parameters, gradients) in found.items():
            again = int(sequence and version == "gather-again")
            if sequence:
                assert forward == {"all_gather": 1, "reduce_scatter": 1}
                assert backward == {"all_gather": 1 + again, "reduce_scatter": 1}
            else:
                assert forward == backward == {"all_reduce": 1}
            assert sent == all_reduces + again * (t - 1) * n // t
            want = (n // t if again else n) + inner // t  # all of x, gathered or not, or this rank's tokens
            assert kept == want, f"{version}: {kept} bytes kept for backward, but should be {want}"
            assert parameters == gradients == weights // t


def who_holds_the_gathered_x_while_dx_is_made() -> list[bool]:
    """For each product dx of an MLP: is an x that was gathered in backward still alive?"""
    mlp = ParallelMLP(H, F_, TensorParallel(dist.group.WORLD, True)).double()
    init_weights(mlp, 1, 0)
    z = mlp(piece(numbers(B, S, H), mlp.down_proj.tp).clone().requires_grad_())
    gathered, alive = [], []

    def gathers(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = all_gather(x, group)
        gathered.append(weakref.ref(whole))
        return whole

    def makes_dx(grads, weights) -> Tensor:
        alive.append(any(whole() is not None for whole in gathered))
        return input_gradient(grads, weights)

    # g* has its own hold of the operator: what is patched here is only what GatherAgain.backward calls.
    names = {"all_gather": gathers, "input_gradient": makes_dx}
    with mock.patch.multiple(parallel_linear, **names):
        z.sum().backward()
    assert len(gathered) == 1
    return alive


def test_the_x_that_is_gathered_again_is_gone_before_the_gradient_of_x_is_made():
    assert run_ranks(2, who_holds_the_gathered_x_while_dx_is_made) == [[False]] * 2


# ------------------------------------------------------------------------------------------------ pieces and weights


def test_a_cut_that_does_not_divide_is_padded_with_zeros():
    full = numbers(5, 3)
    pieces = [Shard(5, 0, 4, i).cut(full) for i in range(4)]
    assert all(p.shape == (2, 3) for p in pieces)
    assert_same(torch.cat(pieces)[:5], full)
    assert not torch.cat(pieces)[5:].any()
    assert_same(torch.cat([Shard(3, 1, 2, i).cut(full) for i in range(2)], 1)[:, :3], full)


def first_weights() -> dict[str, Tensor]:
    mlp = ParallelMLP(H, F_, TensorParallel(dist.group.WORLD))
    init_weights(mlp, 1, 0)
    assert set(shards(mlp)) == set(SHAPES)
    return {name: p.detach() for name, p in mlp.named_parameters()}


def test_every_degree_starts_from_the_same_model_and_no_two_ranks_hold_the_same_columns():
    want = {name: initial_weight(name, shape, 1, 0) for name, shape in SHAPES.items()}
    for ranks in (1, 3):
        pieces = run_ranks(ranks, first_weights)
        for name, full in want.items():
            whole = torch.cat([p[name] for p in pieces], dim=1 if name.startswith("down") else 0)
            assert_same(whole, full, 0.0, what=f"{name} put together from {ranks} ranks")


def under_bf16() -> tuple[list[torch.dtype], float, float]:
    full = {name: value.float() for name, value in full_weights().items()}
    dtypes, errors = [], []
    for sequence in (False, True):
        tp = TensorParallel(dist.group.WORLD, sequence)
        grads = []
        for low in (True, False):
            mlp = ParallelMLP(H, F_, tp)
            load_full_state_dict(mlp, full)
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                z = mlp(piece(numbers(B, S, H).float(), tp))
            z.float().square().sum().backward()
            dtypes += [p.grad.dtype for p in mlp.parameters()]
            grads.append(mlp.gate_proj.weight.grad)
        errors.append(((grads[0] - grads[1]).abs().max() / grads[1].abs().max()).item())
    return dtypes, *errors


def test_under_autocast_gradients_are_fp32_and_as_near_as_bf16_can_be():
    for dtypes, *errors in run_ranks(2, under_bf16):
        assert set(dtypes) == {torch.float32}
        assert all(0 < error < 0.05 for error in errors), errors


def bytes_under_bf16() -> list[tuple[str, float, float]]:
    """Bytes sent for an fp32 input, with autocast to bf16 and without."""
    found = []
    for name, sequence in itertools.product(COLUMNS, (False, True)):
        tp, totals = TensorParallel(dist.group.WORLD, sequence, column=COLUMNS[name]), []
        for low in (True, False):
            mlp = ParallelMLP(H, F_, tp)
            init_weights(mlp, 1, 0)
            x = piece(numbers(B, S, H).float(), tp).clone().requires_grad_()
            with communication() as sent, torch.autocast("cpu", torch.bfloat16, enabled=low):
                mlp(x).float().sum().backward()
            totals.append(sent.total)
        found.append((f"{name}, sequence parallel {sequence}", *totals))
    return found


def test_under_autocast_inputs_are_cast_before_they_are_sent_and_cost_half_the_bytes():
    for layout, low, full in run_ranks(2, bytes_under_bf16)[1]:
        assert 0 < 2 * low == full, f"{layout}: {low} bytes under autocast, {full} without"
    for low in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", low):
            cast = under_autocast(torch.ones(2), torch.ones(3)), under_autocast(torch.ones(2).double())
        assert [x.dtype for x in (*cast[0], *cast[1])] == [low, low, torch.float64]


class Wired(torch.nn.Module):
    """A layer that somebody puts in the place of another: it does its work by itself, and adds one."""

    def __init__(self, inner: ColumnParallelLinear):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


def watched_mlp(what: str, sequence: bool) -> tuple[Tensor, Tensor, list[Tensor], dict[str, int]]:
    """z, dx, what the hook saw or nothing, and collectives of a step, after `what` has been done to gate_proj."""
    tp = TensorParallel(dist.group.WORLD, sequence)
    mlp = ParallelMLP(H, F_, tp).double()
    load_full_state_dict(mlp, full_weights())
    gate, seen = mlp.gate_proj, []
    if what == "hook":
        gate.register_forward_hook(lambda layer, args, y: seen.append(y.detach()))
    elif what == "hook that changes":
        gate.register_forward_hook(lambda layer, args, y: y + 1)
    elif what == "hook before":
        gate.register_forward_pre_hook(lambda layer, args: (2 * args[0], *args[1:]))
    elif what == "hook in backward":
        gate.register_full_backward_hook(lambda layer, dx, dy: (3 * dx[0],))
    elif what == "replaced":
        mlp.gate_proj = Wired(gate)
    elif what == "other forward":
        gate.forward = lambda x, y=None, forward=gate.forward: forward(x) + 1
    elif what == "other linear":
        gate.linear = lambda x, weight: F.linear(x, weight) + 1
    x = piece(numbers(B, S, H), tp).clone().requires_grad_()
    with communication() as sent:
        z = mlp(x)
        z.backward(piece(numbers(B, S, H, seed=1), tp))
    return z.detach(), x.grad, seen, dict(sent.calls)


WATCHED = ("hook", "hook that changes", "hook before", "hook in backward", "replaced", "other forward", "other linear")


def all_watched() -> list[tuple]:
    return [watched_mlp(what, sequence) for what, sequence in itertools.product(WATCHED, (False, True))]


def test_hooks_on_a_column_parallel_layer_run_and_a_layer_in_its_place_is_called():
    ranks = run_ranks(2, all_watched)
    for i, (what, sequence) in enumerate(itertools.product(WATCHED, (False, True))):
        check_watched(what, sequence, [found[i] for found in ranks])


def check_watched(what: str, sequence: bool, found: list[tuple]) -> None:
    w = full_weights()
    x = numbers(B, S, H).requires_grad_()
    gate_x = x * 2 if what == "hook before" else x
    if what == "hook in backward":
        gate_x = x.clone()
        gate_x.register_hook(lambda grad: 3 * grad)
    gate = F.linear(gate_x, w["gate_proj.weight"])
    shown = gate + 1 if what in ("hook that changes", "replaced", "other forward", "other linear") else gate
    want = F.linear(F.silu(shown) * F.linear(x, w["up_proj.weight"]), w["down_proj.weight"])
    want.backward(numbers(B, S, H, seed=1))
    for rank, (z, dx, seen, calls) in enumerate(found):
        mine = Shard(S, 1, 2, rank).cut if sequence else (lambda y: y)
        assert_same(z, mine(want), what=f"{what}: output", rank=rank)
        assert_same(dx, mine(x.grad), what=f"{what}: gradient of x", rank=rank)
        if what == "hook":
            assert_same(seen[0], gate.chunk(2, -1)[rank], what="what the hook saw", rank=rank)
        if what in ("hook", "hook that changes"):
            plain = {"all_gather": 3, "reduce_scatter": 2} if sequence else {"all_reduce": 2}
            assert calls == plain, "a hook that only looks at the output costs no collective"


def with_biases() -> list[tuple[Tensor, Tensor, dict[str, int]]]:
    return [with_bias(pieces) for pieces in (1, 2, 4)]


def with_bias(pieces: int) -> tuple[Tensor, Tensor, dict[str, int]]:
    tp = TensorParallel(dist.group.WORLD, True)
    column = ColumnParallelLinear(H, 8, tp, pieces=pieces)
    column.add_bias()
    column.double()
    load_full_state_dict(column, {"weight": numbers(8, H), "bias": numbers(8, seed=1)})
    with communication() as sent:
        y = column(piece(numbers(B, S, H), tp))
        y.backward(numbers(B, S, 8, seed=2).chunk(pieces, -1)[tp.rank * pieces // tp.size])
    return column.bias.grad, y.detach(), dict(sent.calls)


def test_a_column_s_bias_is_cut_with_it_and_nothing_is_sent_for_it():
    x, w, b = numbers(B, S, H), numbers(8, H), numbers(8, seed=1).requires_grad_()
    want = F.linear(x, w, b)
    want.backward(numbers(B, S, 8, seed=2))
    for rank, found in enumerate(run_ranks(4, with_biases)):
        for pieces, (grad, y, calls) in zip((1, 2, 4), found, strict=True):
            mine = rank * pieces // 4
            assert_same(y, want.chunk(pieces, -1)[mine], what="output", rank=rank)
            assert_same(grad, b.grad.chunk(pieces)[mine], what="gradient of the bias", rank=rank)
            assert calls == {"all_gather": 2, "reduce_scatter": 1}


# ------------------------------------------------------------------------------------------------------- the script


def run_demo(*argv: str) -> list[str]:
    """What the demo of a script of this folder finds wrong; its report has to find the NaN of rank 1."""
    module, found, here = importlib.import_module(argv[0]), [], (dist.group.WORLD, torch.device("cpu"))
    launched = mock.patch.object(module, "launch", lambda demo: found.extend(demo(*here)))
    ranks = mock.patch.dict(os.environ, WORLD_SIZE=str(dist.get_world_size()))
    with launched, ranks, mock.patch.object(sys, "argv", list(argv)):
        module.main()
    report = module.Report(dist.group.WORLD)
    report.errors = [0.0, float("nan") if report.rank == 1 else 0.0]
    report.add_errors("error")
    assert report.finish() == ["rank 1: error is nan, not <= 1e-10"]
    return found


DEMOS = [
    "parallel_linear --column simple --sequence 12",
    "parallel_linear --sequence 12",
    "parallel_block --dropout 0.1 --kv-heads 1 --sequence 8",
    "parallel_llama --recompute --vocab 13 --sequence 8 --layers 1",
    "parallel_llama --dropout 0.1 --vocab 13 --sequence 8 --layers 1",
    "overlap --sequence 8",
    "domino --sequence 8",
]


@pytest.mark.parametrize("demo", DEMOS)
def test_a_demo_finds_nothing_wrong_and_a_nan_of_any_rank_is_reported(demo):
    assert run_ranks(2, run_demo, *demo.split()) == [[], []]


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        (["--intermediate", "100"], 8, "--intermediate 100; use 1, 2, 4, 5, 10, 20, 25, 50, 100 ranks"),
        (["--sequence", "9"], 2, "2 tensor-parallel ranks do not divide --sequence 9"),
        (["--hidden", "0"], 1, "--hidden 0"),
        (["--hidden", "4097"], 1, "--hidden 4097 is not in 1 .. 4096"),
        (["--intermediate", "16385"], 1, "--intermediate 16385 is not in 1 .. 16384"),
        (["--column", "ring"], 1, "--column"),
        (["--colum", "simple"], 1, "--colum"),
    ],
)
def test_bad_input_ends_in_one_line_before_any_process_group(options, ranks, words):
    assert words in refusal(parallel_linear.main, options, ranks)


def test_more_ranks_than_gpus_are_refused_before_any_process_group(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert refusal(parallel_linear.main) == "--nproc_per_node 4: there are 2 GPUs here; use 2 or less"
