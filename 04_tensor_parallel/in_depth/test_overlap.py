"""The versions that wait less: the same numbers, the same bytes, and an order of events that hides something."""

import random
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock
from unittest.mock import patch

import overlap
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.meter import communication, saved_activations
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import assert_same_named, numbers
from overlap import VERSIONS, Cluster, block_time, column_overlapped, column_ring, gathered, row_ring, scattered
from parallel_block import Config, ParallelBlock, Parts, block_weights, rope_tables, sync_replicated_gradients
from parallel_linear import Shard, TensorParallel, reduce_scatter
from parallel_llama import load_full_state_dict, vocab_parallel_cross_entropy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

S = 8
SMALL = Config(hidden=32, heads=8, kv_heads=2, intermediate=24)
COS, SIN = rope_tables(torch.arange(S), SMALL.hidden // SMALL.heads, SMALL.rope_theta)


def make_block(version: str, group: dist.ProcessGroup, sequence: bool = True, parts: Parts | None = None):
    block = ParallelBlock(SMALL, TensorParallel(group, sequence, *VERSIONS[version]), parts or Parts()).double()
    load_full_state_dict(block, block_weights(SMALL, numbers(1)))
    return block


def run_block(version: str, group: dist.ProcessGroup, sequence: bool, rows: int = 2) -> dict[str, Tensor]:
    """Output, gradient of x, and all gradients of weights."""
    block = make_block(version, group, sequence)
    mine = Shard(S, 1, block.tp.size, block.tp.rank).cut if sequence else (lambda y: y)
    x = mine(numbers(rows, S, SMALL.hidden)).clone().requires_grad_()
    z = block(x, COS, SIN)
    z.backward(mine(numbers(rows, S, SMALL.hidden, seed=1)))
    sync_replicated_gradients(block, group)
    return {"z": z.detach(), "x": x.grad, **{name: p.grad for name, p in block.named_parameters()}}


def available(sequence: bool) -> list[str]:
    return [version for version in VERSIONS if sequence or version != "ring"]


# ----------------------------------------------------------------------------------------------------- the same numbers


def all_versions(rows: int, slices: bool = False) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])] if slices else [dist.group.WORLD]
    group = groups[dist.get_rank() % len(groups)]
    for sequence in (False, True):
        want = run_block("simple", group, sequence, rows)
        for version in available(sequence)[1:]:
            got = run_block(version, group, sequence, rows)
            assert_same_named(got, want, 1e-12, f"{version}, sequence parallel {sequence},", dist.get_rank())


@pytest.mark.always("4-3")
@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (2, 1), (4, 3)])
def test_every_version_equals_the_simple_one_to_1e_12(ranks, rows):
    run_ranks(ranks, all_versions, rows)


def test_the_ring_of_a_slice_runs_over_the_ranks_of_the_slice():
    run_ranks(4, all_versions, 2, slices=True)


def three_ranks() -> tuple[list[int], float, float]:
    group, me = dist.group.WORLD, dist.get_rank()
    x = numbers(2, 4, 5, seed=me)
    chunks = dict(gathered(x, group))
    gather_error = torch.stack([chunks[rank] - numbers(2, 4, 5, seed=rank) for rank in range(3)]).abs().max().item()
    parts = numbers(2, 12, 5, seed=10 + me)
    got = scattered(lambda c: parts[:, 4 * c : 4 * c + 4].clone(), group)
    return list(chunks), gather_error, (got - reduce_scatter(parts, group)).abs().max().item()


def test_the_ring_brings_its_own_chunk_first_and_then_those_of_the_ranks_before_it():
    for rank, (order, gather_error, scatter_error) in enumerate(run_ranks(3, three_ranks)):
        assert order == [rank, (rank - 1) % 3, (rank - 2) % 3]
        assert gather_error == 0 and scatter_error < 1e-14


def late_ranks() -> None:
    real, noise = overlap.exchange, random.Random(dist.get_rank())

    def late(outgoing, group):
        time.sleep(0.02 * noise.random() * dist.get_rank())
        return real(outgoing, group)

    with patch.object(overlap, "exchange", late):
        want = run_block("simple", dist.group.WORLD, True)
        for _ in range(3):
            assert_same_named(run_block("ring", dist.group.WORLD, True), want, 1e-12, rank=dist.get_rank())


@pytest.mark.prove
def test_ranks_that_are_late_change_nothing_and_hang_nothing():
    run_ranks(4, late_ranks, timeout=60)


def under_bf16() -> list[tuple[torch.dtype, torch.dtype, float]]:
    found = []
    for version in ("overlapped", "ring"):
        block = make_block(version, dist.group.WORLD).float()
        with communication() as sent:
            with torch.autocast("cpu", torch.bfloat16):
                z = block(numbers(2, S // 2, SMALL.hidden).float(), COS, SIN)
            z.sum().backward()
        found.append((z.dtype, block.mlp.up_proj.weight.grad.dtype, sent.total))
    return found


def test_under_autocast_messages_are_bf16_and_gradients_fp32():
    sent = 10 * (2 * S * SMALL.hidden * 2) // 2  # 10 messages in bf16, of which each of 2 ranks sends half
    assert run_ranks(2, under_bf16) == [[(torch.float32, torch.float32, sent)] * 2] * 2


# ------------------------------------------------------------------------------------------------------ the same bytes


def bytes_of_versions() -> dict[str, tuple[dict[str, int], float, int]]:
    found = {}
    for version in ("gather-again", "overlapped", "ring"):
        block = make_block(version, dist.group.WORLD)
        x = numbers(2, S // 4, SMALL.hidden).requires_grad_()
        with communication() as sent, saved_activations(exclude=[*block.parameters(), COS, SIN]) as saved:
            block(x, COS, SIN).sum().backward()
        found[version] = dict(sent.calls), sent.total, saved.bytes
    return found


@pytest.mark.prove
def test_all_versions_that_gather_again_send_and_keep_the_same_bytes():
    for found in run_ranks(4, bytes_of_versions):
        for _, sent, kept in found.values():
            assert sent == 10 * 3 * (2 * S * SMALL.hidden * 8) // 4
            assert kept == found["gather-again"][2]
        assert found["ring"][0] == {"send": 30, "recv": 30}, "10 rings of 3 steps"


# ------------------------------------------------------------------------------------------------- the order of events


class Order(TorchDispatchMode):
    """What torch is really asked for, in order: collectives when they start, when they are waited for, and products."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.events.append(func._opname.strip("_"))
        elif func._opname in ("mm", "bmm", "addmm"):
            self.events.append("product")
        return func(*args, **(kwargs or {}))


class Watched:
    """A handle of something under way that notes when it is waited for."""

    def __init__(self, work: dist.Work, events: list[str]):
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()


def watch(function, events: list[str]):
    def watched(*args, **kwargs):
        result = function(*args, **kwargs)
        if isinstance(result, list):
            return [Watched(work, events) for work in result]
        return Watched(result, events) if kwargs.get("async_op") else result

    return watched


@contextmanager
def watching(events: list[str]) -> Iterator[None]:
    with ExitStack() as patches:
        places = [(dist, "all_reduce"), (dist, "batch_isend_irecv")]
        for place, name in [*places, (overlap, "all_gather_single"), (overlap, "reduce_scatter_single")]:
            patches.enter_context(mock.patch.object(place, name, watch(getattr(place, name), events)))
        yield


def order_of_column(version: str, sequence: bool) -> tuple[list[str], list[str]]:
    """Events of one column-parallel product of two weights, in forward and in backward."""
    tp = TensorParallel(dist.group.WORLD, sequence)
    x = numbers(1, 2 if sequence else S, 6).requires_grad_()
    weights = [numbers(4, 6).requires_grad_(), numbers(4, 6).requires_grad_()]
    with Order() as forward, watching(forward.events):
        outputs = VERSIONS[version][0](x, weights, tp, F.linear)
    with Order() as backward, watching(backward.events):
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    return forward.events, backward.events


def test_the_input_gradient_is_sent_before_the_weight_gradients_and_waited_for_after_them():
    for forward, events in run_ranks(2, order_of_column, "overlapped", False):
        assert forward == ["product"], "one product for both weights"
        assert events == ["product", "allreduce", "product", "product", "wait"]
    for _, events in run_ranks(2, order_of_column, "simple", False):
        assert events[-1] == "allreduce", "autograd finishes all products first: nothing is hidden"


def test_with_sequence_parallel_both_collectives_of_backward_run_beside_products():
    for forward, events in run_ranks(2, order_of_column, "overlapped", True):
        assert forward == ["allgather_base", "product"]
        dw = ["product", "product"]
        assert events == ["allgather_base", "product", "wait", "reduce_scatter_base", *dw, "wait"]


def test_in_the_ring_every_chunk_travels_while_the_one_before_is_multiplied():
    sending = {"send", "recv", "recv_any_source"}
    for forward, backward in run_ranks(3, order_of_column, "ring", True):
        steps = [event for event in forward if event not in sending]
        assert steps == [*["product", "wait", "wait"] * 2, "product"]
        for step in range(2):  # each step has begun to send and receive before its products
            position = [i for i, event in enumerate(forward) if event == "product"][step]
            assert sum(event in sending for event in forward[:position]) == 2 * (step + 1)
        dw = ["product", "product", "wait", "wait"]  # of both weights, beside the next chunk of x
        steps = [event for event in backward if event not in sending]
        assert steps == ["product", *["product", "wait", "wait"] * 2, *dw * 2, "product", "product"]


def products_and_memory(versions: list[str]) -> dict[str, tuple[int, int, dict[str, tuple[int, int]]]]:
    """Of a block in each version: the products it asks for in forward and in backward, attention's own not among them;
    of each gradient its bytes, and those of the memory that it keeps from being freed."""
    no_products, found = Parts(attention=lambda q, k, v, *, causal: q + (k + v).mean(2, keepdim=True)), {}
    for version in versions:
        block = make_block(version, dist.group.WORLD, parts=no_products)
        x = numbers(2, S // dist.get_world_size(), SMALL.hidden).requires_grad_()
        with Order() as forward:
            z = block(x, COS, SIN)
        with Order() as backward:
            z.sum().backward()
        sizes = {name: (p.grad.nbytes, p.grad.untyped_storage().nbytes()) for name, p in block.named_parameters()}
        found[version] = forward.events.count("product"), backward.events.count("product"), sizes
    return found


def test_q_k_and_v_are_one_product_and_so_are_gate_and_up_and_their_gradients_of_x():
    # q k v, o, gate up, down; each dx; and 7 gradients of weights; in the ring the same for each of 2 chunks
    want = {"simple": (7, 14), "gather-again": (4, 4 + 7), "overlapped": (4, 4 + 7), "ring": (2 * 4, 2 * (4 + 7))}
    for ranks, versions in ((1, list(want)[:3]), (2, list(want))):
        for rank, found in enumerate(run_ranks(ranks, products_and_memory, versions)):
            for version, (forward, backward, sizes) in found.items():
                assert (forward, backward) == want[version], f"{version} on {ranks} ranks"
                for name, (own, held) in sizes.items():
                    assert own == held, f"rank {rank}, {version}: the gradient of {name} has {own} bytes, holds {held}"


# ---------------------------------------------------------------------------------------------------- seams and limits


def refusals() -> list[str]:
    x, weight = numbers(1, 4, 6), numbers(4, 6)
    plain, split = TensorParallel(dist.group.WORLD), TensorParallel(dist.group.WORLD, True)
    other = partial(F.linear)
    calls = (
        lambda: column_overlapped(x, [weight], plain, other),
        lambda: column_ring(x, [weight], split, other),
        lambda: row_ring(x, weight, split, other),
        lambda: column_ring(x, [weight], plain, F.linear),
        lambda: row_ring(x, weight, plain, F.linear),
        lambda: row_ring(numbers(1, 3, 6), weight, split, F.linear),
    )
    return [error_from(ValueError, call) for call in calls]


def test_what_a_version_cannot_do_it_refuses_with_the_one_that_can():
    *linear, column, row, uneven = run_ranks(2, refusals)[0]
    assert all("use column_simple" in said for said in linear) and "column_overlapped" in column and "row_simple" in row
    assert uneven.endswith("use a multiple of 2")
    assert [said.split()[0] for said in linear] == ["column_overlapped", "column_ring", "row_ring"]


def second_derivatives() -> list[str]:
    x, found = numbers(1, 4, 6).requires_grad_(), []
    outputs = [vocab_parallel_cross_entropy(x, torch.zeros(1, 4, dtype=torch.long), 12, dist.group.WORLD)]
    for sequence in (False, True):
        for column, row in (VERSIONS[version] for version in available(sequence)):
            tp = TensorParallel(dist.group.WORLD, sequence, column=column, row=row)
            outputs.append(row(*column(x, [numbers(4, 6)], tp, F.linear), numbers(6, 4), tp, F.linear))
    for y in outputs:
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(error_from(RuntimeError, dx.sum().backward))
    return found


def test_a_second_derivative_is_refused_since_it_would_lack_the_other_ranks_terms():
    assert all("once_differentiable" in said for said in run_ranks(2, second_derivatives)[0])


CLUSTER = Cluster(gpus_per_node=8, inside=450e9, nic=50e9, latency=10e-6, flops=400e12)
LLAMA_70B = Config(hidden=8192, heads=64, kv_heads=8, intermediate=28672)


def test_leaving_the_node_costs_more_than_the_second_node_computes():
    def total(t: int, rings: str) -> float:
        return sum(block_time(LLAMA_70B, 8192, 8192, t, CLUSTER, rings))

    assert total(2, "one") > total(4, "one") > total(8, "one")
    assert total(16, "one") > total(8, "one"), "16 ranks are slower than 8 when a NIC is in the ring"
    assert total(8, "many") / total(16, "many") < 1.7, "even with all NICs, twice the GPUs are far from twice as fast"


def test_inside_a_node_the_time_is_that_of_four_ring_all_reduces():
    compute, sending = block_time(LLAMA_70B, 8192, 8192, 8, CLUSTER, "one")
    n = 8192 * 8192 * 2
    assert sending == pytest.approx(4 * (14 * 10e-6 + 2 * 7 / 8 * n / 450e9))
    weights = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert compute == pytest.approx(3 * 2 * 8192 * (weights + 8192 * 8192) / 8 / 400e12)
    assert block_time(LLAMA_70B, 8192, 8192, 1, CLUSTER, "many")[1] == 0
    compute, sending = block_time(LLAMA_70B, 8192, 4096, 8, CLUSTER, "one", e=4)  # half the sequence, twice the bytes
    assert sending == pytest.approx(4 * (14 * 10e-6 + 2 * 7 / 8 * 2 * n / 450e9))
    assert compute == pytest.approx(3 * 2 * 8192 * (weights + 4096 * 8192) / 8 / 400e12)


def test_the_table_adds_what_the_formula_gives(capsys):
    overlap.print_cost_table(CLUSTER, 8192)
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows if "leaves the node" in row] == ["16", "32"] and len(rows) == 6
    for line in rows:
        t, compute, *cells = map(float, line.split()[:6])
        one, many = (1e3 * block_time(LLAMA_70B, 8192, 8192, int(t), CLUSTER, rings)[1] for rings in ("one", "many"))
        assert cells == pytest.approx([one, compute + one, many, compute + many], abs=0.02)


def test_no_ring_is_faster_than_the_links_inside_a_node_however_many_nics_there_are():
    inside, across = block_time(LLAMA_70B, 8192, 8192, 8, CLUSTER, "many")[1], {}
    for nic in (10e9, 50e9, 200e9, 2000e9):  # 8 of them: 80, 400, 1600 and 16,000 GB/s, beside 450 of NVLink
        across[nic] = block_time(LLAMA_70B, 8192, 8192, 16, replace(CLUSTER, nic=nic), "many")[1]
    assert across[10e9] > across[50e9] > across[200e9] == across[2000e9]
    n = 8192 * 8192 * 2
    assert across[200e9] == pytest.approx(4 * 2 * 15 * (10e-6 + n / 16 / 450e9)) and across[200e9] > inside
    one = block_time(LLAMA_70B, 8192, 8192, 16, replace(CLUSTER, nic=2000e9), "one")[1]
    assert one == across[2000e9], "one ring through one NIC that is faster than NVLink is as fast as NVLink"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nic-gbs", "0"], "--nic-gbs 0.0"),
        (["--nvlink-gbs", "inf"], "--nvlink-gbs inf"),
        (["--gpus-per-node", "-8"], "--gpus-per-node -8"),
        (["--latency-us", ""], "--latency-us"),
        (["--sequence", "9"], "sequence 9"),
        (["--sequence", "100000"], "--sequence 100000 is not in 2 .. 4096"),
        (["--sequence", "1"], "--sequence 1 is not in 2 .. 4096"),
        (["--nvlink-gbs", "1e300"], "--nvlink-gbs 1e+300"),
        (["--tflops", "nan"], "--tflops nan"),
        (["--tokens", "0"], "--tokens 0"),
        (["--nic", "3"], "--nic"),
    ],
)
def test_bad_input_ends_in_one_line_before_any_process_group(options, words):
    assert words in refusal(overlap.main, options, world_size=2)


def demo() -> tuple[list[str], list[tuple]]:
    options = dict(gpus_per_node=4, nvlink_gbs=400, nic_gbs=25, latency_us=1, tflops=300, tokens=4096)
    with patch.object(overlap, "print_cost_table") as table:
        wrong = overlap.demo(Namespace(sequence=48, **options), Config(), dist.group.WORLD, torch.device("cpu"))
    return wrong, [call.args for call in table.call_args_list]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_demo_finds_what_it_predicts_and_is_about_the_cluster_that_is_given(ranks):
    table = (Cluster(4, 400e9, 25e9, 1e-6, 300e12), 4096)
    assert run_ranks(ranks, demo) == [([], [table])] + [([], [])] * (ranks - 1)


@pytest.mark.prove
@pytest.mark.parametrize("bench", sorted(Path(__file__).parents[1].glob("**/bench_*.py")), ids=lambda file: file.stem)
def test_a_benchmark_ignores_no_option_in_silence(bench):
    assert "--rows" in refusal(bench, "--rows 3")
