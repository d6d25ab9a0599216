"""The formulas against the numbers that the paper prints, and what the chapter's scripts share."""

import importlib
import io
import math
import sys
from contextlib import contextmanager, redirect_stdout

import pytest
import torch
import torch.distributed as dist
from _zero_demo import IGNORE, Decoder, WireCounter, error, make_batch, measure, token_loss_sum, valid_tokens, worst_of
from harness.meter import communication
from harness.ranks import run_ranks
from torch import nn
from zero3 import make_zero
from zero_memory import GB, bytes_per_parameter, bytes_sent, largest_model, paper_tables
from zero_stages import ExchangeAndSum, SendToAll

# Table 1 of 1910.02054: GB per device, for 7.5B, 128B and 1T parameters; stages 1, 2, 3.
TABLE_1 = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


@pytest.mark.parametrize("ranks", TABLE_1)
def test_the_formulas_give_table_1_of_the_paper(ranks):
    for parameters, printed in zip((7.5e9, 128e9, 1e12), TABLE_1[ranks], strict=True):
        for stage, want in zip((1, 2, 3), printed, strict=True):
            got = parameters * bytes_per_parameter(stage, ranks) / GB
            # The paper prints three or four digits, and cuts off where it should round (4187.5 is printed as 4187).
            assert got == pytest.approx(want, rel=4e-3, abs=0.006), (parameters, ranks, stage)


def test_the_largest_models_are_those_of_table_2():
    for tensor, printed in {1: (2, 7.6, 14.4, 128), 16: (32, 121.6, 230.4, 2000)}.items():  # billions
        for stage, want in enumerate(printed):
            got = tensor * largest_model(32 * GB, stage, 64) / 1e9
            assert got == pytest.approx(want, rel=0.025), (tensor, stage)


def test_a_trillion_parameters_fit_on_1024_devices_of_16_gb():
    assert 1e12 * bytes_per_parameter(3, 1024) < 16 * GB < 1e12 * bytes_per_parameter(2, 1024)


def test_plain_fp32_has_no_master_copy():
    assert [bytes_per_parameter(stage, 2, k=8, weight=4, gradient=4) for stage in range(4)] == [16, 12, 10, 8]


def test_stages_1_and_2_send_what_data_parallelism_sends_and_stage_3_half_as_much_again():
    sent = [bytes_sent(stage, 4, 1000) for stage in range(4)]
    assert sent == [1500, 1500, 1500, 2250]
    assert bytes_sent(3, 4, 1000, kept=400) == 1950
    assert bytes_sent(3, 4, 1000, kept=400, micro_batches=3) == 3 * 1950
    assert [bytes_sent(stage, 4, 1000, micro_batches=3) for stage in range(4)] == [1500, 1500, 3000, 6750]
    assert [bytes_sent(stage, 1, 1000) for stage in range(4)] == [0, 0, 0, 0]


def test_gradients_summed_in_fp32_travel_as_4_bytes_beside_weights_of_2():
    sent = [bytes_sent(stage, 4, 4000, weights=2000, micro_batches=2) for stage in range(4)]
    assert sent == [6000, 4500, 7500, 12000]
    assert bytes_sent(3, 4, 4000, kept=400, weights=2000) == 0.75 * (4000 + 4000 - 400)
    assert bytes_sent(2, 4, 4000, weights=0) == 0.75 * 4000, "no weights are not equally many"
    assert bytes_per_parameter(2, 4, gradient=4) == 2 + 16 / 4


def test_a_stage_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="stage 4 does not exist; use 0, 1, 2 or 3"):
        bytes_per_parameter(4, 2)
    with pytest.raises(ValueError, match="stage -1 does not exist; use 0, 1, 2 or 3"):
        bytes_per_parameter(-1, 2)


def test_the_printed_tables_hold_the_numbers_of_the_abstract():
    lines = paper_tables()
    rows = [line.split()[2:] for line in lines if line.startswith("64 ranks")]  # of three models, and of the largest
    assert rows[0] == ["120", "31.41", "16.64", "1.875"] and rows[-1] == ["2B", "7.642B", "14.42B", "128B"]
    assert rows[1] == ["2048", "536", "284", "32"] and rows[2] == ["1.6e+04", "4188", "2219", "250"]
    assert len(rows) == 4 and lines[-2] == "10^12 parameters on 1024 ranks at stage 3: 15.62 GB each"


def measured() -> list[tuple[int, int, int, float]]:
    return [measure(stage, dist.group.WORLD, torch.device("cpu"), make_zero if stage else None) for stage in range(4)]


@pytest.mark.always("3")
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_that_trains_holds_and_sends_what_the_formulas_say(ranks):
    for results in run_ranks(ranks, measured):
        for stage, (held, psi, kept, sent) in enumerate(results):
            assert held == round(psi * bytes_per_parameter(stage, ranks)), stage
            assert sent == pytest.approx(bytes_sent(stage, ranks, 2 * psi, kept), abs=1e-6), stage


def counted() -> tuple[float, float]:
    with WireCounter(dist.group.WORLD) as mine, communication() as harness:
        measure(3, dist.group.WORLD, torch.device("cpu"), make_zero)
    return mine.bytes, harness.total


def test_the_demos_counter_of_bytes_agrees_with_the_harness():
    for mine, harness in run_ranks(2, counted):
        assert mine == harness > 0


def counted_point_to_point() -> tuple[list[float], list[float], set[str]]:
    """Bytes of each stage, by the demo's counter and by the formula, and what was called."""

    def make(stage: int, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, units, master):
        options = {"reduce_scatter": ExchangeAndSum, "all_gather": SendToAll, "master": master}
        return make_zero(stage, model, optimizer, group, units=units, **options)

    sent, formula = [], []
    with communication() as wire:
        for stage in (1, 2, 3):
            _, psi, kept, bytes_ = measure(stage, dist.group.WORLD, torch.device("cpu"), make)
            sent.append(bytes_)
            formula.append(bytes_sent(stage, dist.get_world_size(), 2 * psi, kept))
    return sent, formula, set(wire.calls)


def test_messages_from_rank_to_rank_are_counted_too_and_are_as_many_bytes():
    for sent, formula, calls in run_ranks(3, counted_point_to_point):
        assert calls == {"send", "recv", "broadcast", "all_reduce"}, "no gather and no reduce-scatter by a collective"
        assert sent == pytest.approx(formula, abs=1e-6)


def shares() -> tuple[int, list[int]]:
    ranks = dist.get_world_size()
    batch = make_batch(0, ranks)
    own = [int(sum((y != IGNORE).sum() for _, y in part)) for part in batch]
    return valid_tokens(batch[dist.get_rank()], dist.group.WORLD).item(), own


def test_the_loss_is_divided_by_the_tokens_of_all_ranks_which_have_different_numbers_of_them():
    for total, own in run_ranks(3, shares):
        assert total == sum(own) and len(set(own)) == 3


def test_a_batch_without_targets_has_loss_zero():
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert token_loss_sum(Decoder(), tokens, torch.full_like(tokens, IGNORE)).item() == 0


def test_the_worst_of_some_errors_is_nan_if_one_is():
    assert worst_of([]) == 0.0 and worst_of([1e-3, 1e-9]) == 1e-3
    assert error(torch.zeros(2), torch.ones(2)) == error(torch.full((2,), 2.0), torch.ones(2)) == 1.0
    for errors in ([math.nan], [1.0, math.nan], [math.nan, 1.0]):
        assert math.isnan(worst_of(errors))


def demo_with_nan(name: str) -> tuple[object, str]:
    """The script's main with an error that is NaN on rank 0 alone, in the group that is there."""
    module, demo = importlib.import_module(name), importlib.import_module("_zero_demo")

    @contextmanager
    def world():
        yield dist.group.WORLD, torch.device("cpu")

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(module, "world", world)
        for place in (module, demo):
            patch.setattr(place, "error", lambda *_: 0.0 if dist.get_rank() else math.nan, raising=False)
        patch.setattr(sys, "argv", [f"{name}.py"])
        try:
            module.main()
        except SystemExit as end:
            return end.code, said.getvalue()
    return "did not end", said.getvalue()


@pytest.mark.always("zero3")
@pytest.mark.parametrize(
    "name", ["zero_stages", "zero3", "zero_state", "zero_r", "zero_hybrid", "zero_overlap", "zero_offload"]
)
def test_no_demo_says_pass_when_an_error_is_nan(name):
    for code, said in run_ranks(2, demo_with_nan, name):
        assert code == 1 and "PASS" not in said, said
