"""Shards inside a machine and copies across, beside the unsharded model; and how many bytes stay inside."""

import pytest
import torch
import torch.distributed as dist
from _zero_demo import make_batch, train_step
from harness.meter import communication, storage_bytes
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same_traces
from test_zero_stages import awkward, decoder, mean_loss, reference_trace, sgd, whole_batch, zero_trace
from zero_hybrid import ShardThenCopies, bytes_across, grid, main, make_groups, make_hybrid, measure
from zero_memory import bytes_per_parameter, bytes_sent


def hybrid_trace(shards: int, stage: int = 3, build=decoder, columns_first: bool = False) -> Trace:
    row, column = make_groups(shards)
    if columns_first:  # machines that are no consecutive ranks
        row, column = column, row

    def make(model, optimizer, everyone):
        return make_hybrid(model, optimizer, row, column, stage=stage, units=model.layers)

    return zero_trace(make, dist.group.WORLD, build)


@pytest.mark.always("4-2", "2-1")  # one shard: all that is summed is summed over copies
@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_losses_gradients_and_weights_are_those_of_the_unsharded_model(ranks, shards):
    assert_same_traces(run_ranks(ranks, hybrid_trace, shards), reference_trace(ranks))


@pytest.mark.always("2")
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_take_copies_too(stage):
    assert_same_traces(run_ranks(4, hybrid_trace, 2, stage), reference_trace(4))


def test_machines_need_not_be_consecutive_ranks_and_parameters_may_be_frozen_tied_unused():
    assert_same_traces(run_ranks(4, hybrid_trace, 2, 3, awkward, columns_first=True), reference_trace(4, awkward))


def limits_of_groups() -> set[float]:
    groups = make_groups(2)
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def test_both_groups_wait_a_minute_and_not_half_an_hour():
    assert run_ranks(2, limits_of_groups) == [{60.0}] * 2


def clipped_norm() -> float:
    row, column = make_groups(2)
    model = decoder()
    zero = make_hybrid(model, sgd(model), row, column, units=model.layers)
    train_step(model, zero, make_batch(0, 4)[dist.get_rank()], everyone=dist.group.WORLD)
    return zero.clip_grad_norm(1e9).item()


def test_the_norm_counts_each_shard_once_although_copies_have_it_too():
    model = decoder()
    mean_loss(model, *whole_batch(0, 4)).backward()
    want = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert run_ranks(4, clipped_norm) == pytest.approx([want] * 4, rel=1e-10)


def bytes_of_a_step(shards: int) -> tuple[int, int, float, float, int]:
    row, column = make_groups(shards)
    model = decoder(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    zero = make_hybrid(model, optimizer, row, column, units=model.layers, master=torch.float32, keep=False)
    batch = make_batch(0, dist.get_world_size(), 2)[dist.get_rank()]
    with communication() as sent:
        train_step(model, zero, batch, everyone=dist.group.WORLD)
        zero.step()
    psi = sum(bucket.padded for bucket in zero.buckets)
    held = storage_bytes(t for tensors in zero.held().values() for t in tensors if t.dim())
    loss_and_divisor = [payload for name, payload, _ in sent.events if name == "all_reduce" and payload == 8]
    ranks = dist.get_world_size()
    across = sent.sent["all_reduce"] - 2 * sum(loss_and_divisor) * (ranks - 1) / ranks
    return psi, held, sent.sent["all_gather"] + sent.sent["reduce_scatter"], across, len(loss_and_divisor)


@pytest.mark.always("2")
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_bytes_held_sent_in_the_machine_and_across_are_those_of_the_formulas(shards):
    for psi, held, inside, across, others in run_ranks(4, bytes_of_a_step, shards):
        assert others == 2
        assert held == round(psi * bytes_per_parameter(3, shards))
        assert inside == pytest.approx(bytes_sent(3, shards, 2 * psi, micro_batches=2), abs=1e-6)
        assert across == pytest.approx(bytes_across(shards, 4 // shards, 2 * psi, micro_batches=2), abs=1e-6)


def at_once_and_in_the_demo() -> tuple[float, tuple]:
    """My shard of a sum that nobody waits for, and what the demo measures."""
    row, column = make_groups(2)
    out, given = torch.zeros(1), torch.tensor([1.0, 10.0]) * (dist.get_rank() + 1)
    ShardThenCopies(out, given, group=row, async_op=False, copies=column)
    return out.item(), measure(row, column, torch.device("cpu"))


def test_a_sum_may_be_had_at_once_and_the_demo_measures_what_the_formulas_say():
    sums, measured = zip(*run_ranks(4, at_once_and_in_the_demo), strict=True)
    assert sums == (10.0, 100.0, 10.0, 100.0)
    for held, psi, kept, inside, across in measured:
        assert held == round(psi * bytes_per_parameter(3, 2))
        assert inside == pytest.approx(bytes_sent(3, 2, 2 * psi, kept), abs=1e-6)
        assert across == pytest.approx(bytes_across(2, 2, 2 * psi), abs=1e-6)


def test_rows_and_columns_of_the_grid_cover_all_ranks_and_meet_in_one():
    rows, columns = grid(12, 4)
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert columns == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert bytes_across(2, 4, 1000, micro_batches=3) == 3 * 2 * (1000 / 2) * 3 / 4
    for shards in (0, -2, 5):
        with pytest.raises(ValueError, match=f"{shards} shards do not divide 12 ranks"):
            grid(12, shards)


WRONG = [["--shards", "3"], ["--shards", "0"], ["--shards", "-1"], ["--shards", "x"], ["--shard", "1"]]


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_option_is_one_line_that_names_it(arguments):
    assert arguments[0] in refusal(main, arguments)
