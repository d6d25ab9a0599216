"""The ground floor of FPDT beside one process, beside in_depth, beside the harness's counters."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fpdt import (
    FPDT,
    D,
    DeviceMemory,
    H,
    Link,
    attend,
    batch_of,
    dense_loss,
    formulas,
    main,
    make_model,
    merge,
    positions,
    three_steps,
)
from harness.meter import communication
from harness.ranks import run_ranks

sys.path.append(str(Path(__file__).resolve().parent / "in_depth"))


def right(S: int) -> list[torch.Tensor]:
    model = make_model()

    def dense(tokens, labels):
        loss = dense_loss(model, tokens, labels)
        loss.backward()
        return loss.detach()

    return three_steps(model, dense, S)


def largest_error(S: int, u: int, buffers: int, group=None) -> float:
    model = make_model()
    got = three_steps(model, FPDT(model, u, group or dist.group.WORLD, Link(buffers=buffers)).step, S)
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(got, right(S), strict=True)]
    return torch.stack(errors).max().item()


@pytest.mark.parametrize(("ranks", "S", "u"), [(1, 48, 1), (1, 50, 4), (2, 48, 3), (2, 45, 6), (4, 61, 3)])
@pytest.mark.parametrize("buffers", [1, 2])
def test_losses_gradients_and_weights_of_three_steps_are_those_of_one_process(ranks, S, u, buffers):
    for rank, error in enumerate(run_ranks(ranks, largest_error, S, u, buffers)):
        assert error <= 1e-10, f"rank {rank} of {ranks}, {S} tokens in {u} chunks, {buffers} buffers: {error:.1e}"


def in_a_slice() -> float:
    groups = [dist.new_group([2, 0]), dist.new_group([3, 1])]
    return largest_error(40, 3, 2, groups[dist.get_rank() % 2])


def test_two_slices_of_the_world_train_at_the_same_time():
    for rank, error in enumerate(run_ranks(4, in_a_slice)):
        assert error <= 1e-10, f"rank {rank}: {error:.1e}"


def counted(S: int, u: int) -> tuple[list[int], list[int]]:
    model, link = make_model(), Link()
    for w in model.parameters():
        w.grad = torch.zeros_like(w)
    batch, fpdt = batch_of(0, S), FPDT(model, u, dist.group.WORLD, link)
    with communication() as wire, DeviceMemory() as memory:
        fpdt.step(*batch)
    assert link.held == 0, f"{link.held} bytes are still on the host after the step"
    sent = wire.sent["all_to_all"]
    return [memory.most, link.most, link.out, link.back, sent], list(formulas(S, fpdt.P, u))


@pytest.mark.parametrize(("ranks", "u"), [(1, 4), (2, 3)])
def test_bytes_on_the_device_the_host_the_link_and_the_wire_are_those_of_the_formulas(ranks, u):
    for rank, (got, want) in enumerate(run_ranks(ranks, counted, 64 * u, u)):
        names = ("device", "host", "to the host", "from the host", "sent")
        for name, a, b in zip(names, got, want, strict=True):
            assert a == b, f"rank {rank} of {ranks}, {u} chunks, {name}: {a:,} counted, {b:,} by formula"


def test_chunk_i_of_all_ranks_together_is_a_piece_of_the_sequence():
    parts = [positions(24, rank, 2, 3) for rank in range(2)]
    for i in range(3):
        assert torch.cat([part[i] for part in parts]).tolist() == list(range(8 * i, 8 * i + 8))


def test_two_partial_softmaxes_merge_into_the_whole_without_overflow():
    torch.manual_seed(0)
    q, kv = torch.randn(2, 5, D).double() * 100, torch.randn(2, 2, 8, D).double() * 100
    whole, whole_lse = attend(q, kv, causal=False)
    out, lse = merge(*attend(q, kv[:, :, :3], causal=False), *attend(q, kv[:, :, 3:], causal=False))
    assert (out - whole).abs().max() <= 1e-10 and (lse - whole_lse).abs().max() <= 1e-10


def test_a_forward_that_is_thrown_away_leaves_nothing_on_the_host():
    [held] = run_ranks(1, abandoned)
    assert held == [0] * 10, f"bytes on the host after each forward: {held}"


def abandoned() -> list[int]:
    link, model, held = Link(), make_model(), []
    fpdt = FPDT(model, 3, dist.group.WORLD, link)
    with torch.no_grad():
        for _ in range(10):
            ys = fpdt.forward(model[1], [link.away(torch.randn(4, H).double()) for _ in range(3)], [])
            del ys
            held.append(link.held)
    return held


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--tokens", "0"], "--tokens 0"), (["--chunks", "0"], "--chunks 0"), (["--chunks", "501"], "--chunks 501")],
)
def test_a_bad_option_is_named_in_one_line(options, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fpdt.py", *options])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and named in err and len(err.splitlines()) == 1
