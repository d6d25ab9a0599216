"""The full state of a sharded run does not depend on how it was sharded."""

import sys
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _zero_demo import Decoder, make_batch, token_loss_sum, train_step
from harness.meter import communication, peak_memory
from harness.programs import error_from, on_stand_in_gpus
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named
from test_zero_stages import AdamWInOneGo, awkward, decoder, in_two_groups, mean_loss, whole_batch, with_momentum
from torch import Tensor, nn
from zero3 import make_zero
from zero_state import FullState, full_state_dict, gathered_states, load_buckets, load_full_state_dict, main, shard_of

STAGES = [1, 2, 3]


def run(
    stage: int,
    steps: range,
    state: FullState | None = None,
    optimizer_of=in_two_groups,
    dtype=torch.float64,
    make=make_zero,
) -> FullState:
    """Train on global batches of 12 samples, the same for every number of ranks, and return the full state."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = awkward() if dtype == torch.float64 else decoder(dtype=dtype)
    master = torch.float32 if dtype == torch.bfloat16 else None
    options = {} if stage == 3 else {"bucket_bytes": 40_000}
    zero = make(stage, model, optimizer_of(model), dist.group.WORLD, units=model.layers, master=master, **options)
    if state:
        load_full_state_dict(zero, state)
    for step in steps:
        train_step(model, zero, make_batch(step, 1, 12)[0][rank::ranks])
        zero.step()
    return full_state_dict(zero)


def compare(got: FullState, want: FullState, tol: float = 1e-9) -> None:
    assert_same_named(got["weights"], want["weights"], tol, "weight")
    assert got["optimizer"].keys() == want["optimizer"].keys()
    for name, state in want["optimizer"].items():
        assert got["optimizer"][name].keys() == state.keys()
        for kind, value in state.items():
            assert_same(got["optimizer"][name][kind], value, tol, f"{kind} of {name}")


@pytest.mark.always("2")
@pytest.mark.parametrize("stage", STAGES)
def test_the_full_state_is_that_of_torch_by_name(stage):
    model = awkward()
    optimizer = in_two_groups(model)
    for step in range(3):
        optimizer.zero_grad()
        mean_loss(model, *whole_batch(step, 1, 12)).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
        optimizer.step()
    want = {name: optimizer.state[p] for name, p in model.named_parameters() if p.requires_grad}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for got in run_ranks(3, run, stage, range(3)):
        compare(got, {"weights": weights, "optimizer": want})


@pytest.mark.always("in_two_groups-first1-then1")
@pytest.mark.parametrize(("first", "then"), [((3, 4), (1, 3)), ((1, 3), (3, 2)), ((2, 1), (2, 4))])
@pytest.mark.parametrize("optimizer_of", [in_two_groups, with_momentum])
def test_a_run_goes_on_at_another_stage_and_number_of_ranks_as_if_nothing_had_happened(first, then, optimizer_of):
    straight = run_ranks(1, run, 2, range(4), None, optimizer_of)[0]
    saved = run_ranks(first[1], run, first[0], range(2), None, optimizer_of)[0]
    for resumed in run_ranks(then[1], run, then[0], range(2, 4), saved, optimizer_of):
        compare(resumed, straight)


@pytest.mark.prove
@pytest.mark.parametrize("stage", STAGES)
def test_a_bf16_run_resumes_from_its_master_weights_bit_by_bit(stage):
    straight = run_ranks(2, run, stage, range(4), dtype=torch.bfloat16)[0]
    saved = run_ranks(2, run, stage, range(2), dtype=torch.bfloat16)[0]
    assert saved["optimizer"]["norm.weight"]["master"].dtype == torch.float32
    assert saved["weights"]["norm.weight"].dtype == torch.bfloat16
    resumed = run_ranks(2, run, stage, range(2, 4), saved, dtype=torch.bfloat16)[0]
    compare(resumed, straight, tol=0.0)


def goes_on_in(then: torch.dtype | None, first: torch.dtype | None, fused: bool) -> list[float]:
    """The counters after a step with masters of `first`, and, loaded, one with masters of `then`."""
    options = {"fused": AdamWInOneGo()} if fused else {}
    saved: FullState = {}
    for master in (first, then):
        model = nn.ModuleList([nn.Linear(5, 5, dtype=torch.bfloat16), nn.Linear(1, 1)])  # rank 2 has none of 2 elements
        zero = make_zero(1, model, torch.optim.AdamW(model.parameters()), dist.group.WORLD, master=master, **options)
        if saved:
            load_full_state_dict(zero, saved)
            for name, state in full_state_dict(zero)["optimizer"].items():
                want = saved["optimizer"][name].get("master", saved["weights"][name])
                assert_same(state.get("master", want), want, 1e-2 if then is None else 0.0, f"master of {name}")
                want, rounded = saved["optimizer"][name]["exp_avg"], then is None and not fused
                assert_same(state["exp_avg"], want, 1e-2 if rounded else 0.0, f"moment of {name}")
        zero.zero_grad()
        with zero.micro_batch(last=True):
            torch.stack([p.float().square().sum() for p in model.parameters()]).sum().backward()
        zero.step()
        saved = full_state_dict(zero)
    for name, p in model.named_parameters():
        assert saved["optimizer"][name]["exp_avg"].dtype == (torch.float32 if fused else then or p.dtype)
    return [state["step"].item() for state in saved["optimizer"].values()]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("then", "first"), [(torch.float32,) * 2, (torch.float32, None), (None, torch.float32)])
def test_weights_of_two_dtypes_go_on_with_their_masters_and_with_others(then, first, fused):
    assert run_ranks(3, goes_on_in, then, first, fused) == [[2.0] * 4] * 3


@cache
def saved_state() -> FullState:
    return run_ranks(1, run, 1, range(1))[0]


def loaded_untouched(stage: int, state: FullState) -> FullState:
    return run(stage, range(0), state)


@pytest.mark.always("2", "3")
@pytest.mark.parametrize("stage", STAGES)
def test_loading_and_saving_changes_nothing_frozen_weights_included(stage):
    saved = deepcopy(saved_state())
    saved["weights"]["layers.0.up.weight"] += 1.0  # the frozen one: it must come from the state, not from the model
    for got in run_ranks(3, loaded_untouched, stage, saved):
        compare(got, saved, tol=0.0)


def losses_around_loading(stage: int, left_by: str) -> list[float]:
    """The loss with a saved state, after a further step, and after the state was loaded with weights still gathered."""
    model, tokens, labels = awkward(), *make_batch(0, 1)[0][0]
    zero = make_zero(stage, model, in_two_groups(model), dist.group.WORLD, units=model.layers)

    def loss() -> float:
        with torch.no_grad():
            return token_loss_sum(model, tokens, labels).item()

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle of a forward")

    for step in range(2):
        if step:
            saved, losses = full_state_dict(zero), [loss()]
        train_step(model, zero, make_batch(step, 1)[0])
        zero.step()
    losses.append(loss())
    broken = model.layers[1].register_forward_pre_hook(fail) if left_by == "an error" else None
    with pytest.raises(RuntimeError, match="in the middle") if broken else nullcontext():
        model(tokens)  # no backward follows
    if broken:
        broken.remove()
    load_full_state_dict(zero, saved)
    return [*losses, loss()]


@pytest.mark.always("a forward alone-3", "an error-2")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("left_by", ["a forward alone", "an error"])
def test_the_first_forward_after_loading_is_with_the_loaded_weights(stage, left_by):
    for before, further, loaded in run_ranks(2, losses_around_loading, stage, left_by):
        assert loaded == before != further


def bytes_to_save() -> tuple[float, int]:
    model = decoder()
    zero = make_zero(3, model, in_two_groups(model), dist.group.WORLD, units=model.layers)
    train_step(model, zero, make_batch(0, 2)[dist.get_rank()])
    zero.step()
    with communication() as sent:
        full_state_dict(zero)
    return sent.total, 8 * sum(bucket.padded for bucket in zero.buckets)


def test_saving_sends_each_weight_and_each_moment_once():
    for sent, weights in run_ranks(2, bytes_to_save):
        assert sent == 3 * weights // 2


def peak_while_nothing_is_kept(stage: int) -> tuple[int, int, int, int]:
    model = Decoder(hidden=23, heads=1, layers=10, tied=True).double()
    options = {} if stage == 3 else {"bucket_bytes": 40_000}
    zero = make_zero(stage, model, in_two_groups(model), dist.group.WORLD, units=model.layers, **options)
    train_step(model, zero, make_batch(0, 2)[dist.get_rank()])
    zero.step()
    with peak_memory() as memory:
        kinds = sum(len(state) for states in gathered_states(zero) for state in states.values())
    sizes = [8 * bucket.padded for bucket in zero.buckets]
    return memory.peak, max(sizes), sum(sizes), kinds - 3 * len(zero.names)


@pytest.mark.always("2")
@pytest.mark.parametrize("stage", STAGES)
def test_gathering_without_keeping_holds_one_bucket_of_one_kind(stage):
    for peak, bucket, weights, too_many in run_ranks(2, peak_while_nothing_is_kept, stage):
        assert not too_many, "not every parameter came with its step and two moments"
        # My shard, the bucket, its parameters, those of the bucket before; and a buffer or two that gloo still has.
        assert peak <= 6 * bucket < weights


class Asked(dict):
    """Remembers what was asked for."""

    def __init__(self, of: dict) -> None:
        super().__init__(of)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.names.append(name)
        return super().__getitem__(name)


def asked_for(stage: int, saved: FullState) -> tuple[list[str], list[str]]:
    model = awkward()
    options = {} if stage == 3 else {"bucket_bytes": 40_000}
    zero = make_zero(stage, model, in_two_groups(model), dist.group.WORLD, units=model.layers, **options)
    weights = Asked(saved["weights"])
    load_buckets(zero, weights, saved["optimizer"])
    return weights.names, [zero.names[p] for bucket in zero.buckets for p, _, _ in bucket.pieces()]


@pytest.mark.always("2")
@pytest.mark.parametrize("stage", STAGES)
def test_loading_asks_once_for_each_tensor_with_elements_in_my_shards_and_for_no_other(stage):
    saved = saved_state()
    results = run_ranks(3, asked_for, stage, saved)
    for asked, mine in results:
        assert asked == mine and len(set(asked)) == len(asked) < len(saved["optimizer"])
    assert {name for asked, _ in results for name in asked} == saved["optimizer"].keys()


def padding_after_loading(stage: int, saved: FullState) -> list[Tensor]:
    """What lies in my shards of the masters and of a moment besides parameters."""
    model = awkward()
    zero = make_zero(stage, model, in_two_groups(model), dist.group.WORLD, units=model.layers)
    load_full_state_dict(zero, saved)
    moments = {name: state["exp_avg"] for name, state in saved["optimizer"].items()}
    found = []
    for index, bucket in enumerate(zero.buckets):
        padding = torch.ones(bucket.shard_numel, dtype=torch.bool)
        for _, mine, _ in bucket.pieces():
            padding[mine] = False
        found += [zero.masters[index][padding], shard_of(zero, index, moments)[padding]]
    return found


@pytest.mark.always("2")
@pytest.mark.parametrize("stage", STAGES)
def test_padding_of_a_loaded_shard_is_zero(stage):
    saved = saved_state()
    found = [padding for rank in run_ranks(3, padding_after_loading, stage, saved) for padding in rank]
    assert sum(padding.numel() for padding in found), "sizes that three ranks divide show nothing"
    for padding in found:
        torch.testing.assert_close(padding, torch.zeros_like(padding), rtol=0, atol=0)


def refusals(saved: FullState) -> list[str]:
    messages = []
    changes = ("missing", "extra", "shape", "no moments", "moment's shape", "master's shape", "counter", "one state")
    for change in (*changes, "no state"):
        weights = dict(saved["weights"])
        states = {name: dict(state) for name, state in saved["optimizer"].items()}
        if change == "missing":
            del weights["norm.weight"]
        elif change == "extra":
            weights["layers.7.up.weight"] = torch.zeros(1)
        elif change == "shape":
            weights["norm.weight"] = torch.zeros(3)
        elif change == "no moments":
            del states["norm.weight"]["exp_avg"]
        elif change == "moment's shape":
            states["norm.weight"]["exp_avg"] = torch.zeros(3)
        elif change == "master's shape":
            states["norm.weight"]["master"] = torch.zeros(3)
        elif change == "counter":
            states["norm.weight"]["step"] = torch.tensor(9.0)
        elif change == "one state":  # as of an optimizer without any, for one parameter only
            states = {next(iter(states)): {}}
        else:
            del states[next(iter(states))]
        before = awkward()
        model = awkward()
        zero = make_zero(1, model, in_two_groups(model), dist.group.WORLD)
        changed = {"weights": weights, "optimizer": states}
        messages.append(error_from(ValueError, load_full_state_dict, zero, changed))
        assert all(torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True))
    return messages


def test_the_state_of_another_model_is_refused_by_name_before_anything_changes():
    saved = saved_state()
    (messages,) = run_ranks(1, refusals, saved)
    words = [
        "no weight",
        "layers.7.up.weight",
        "has shape [3]",
        "for 'norm.weight'",
        "exp_avg of",
        "master of",
        "step is 9",
        "has [] for 'embed.weight' but [] for",
        "has nothing of the optim",
    ]
    for message, word in zip(messages, words, strict=True):
        assert word in message, message
    assert sum("norm.weight" in message for message in messages) == 6


STATE = """
import torch
from _zero_demo import Decoder, make_batch, train_step, world
from zero_offload import make_offloaded
from zero_state import full_state_dict, load_full_state_dict
from zero3 import make_zero
with world() as (group, device):
    for fused in (True, False):
        for make, where in ((make_offloaded, "cpu"), (make_zero, "cuda")):
            model = Decoder().to(device)
            zero = make(3, model, torch.optim.AdamW(model.parameters(), fused=fused), group, units=model.layers)
            batch = [(x.to(device), y.to(device)) for x, y in make_batch(0, 1)[0]]

            def counters():
                return {held["step"].device.type for held in zero.state.values()}

            train_step(model, zero, batch)
            zero.step()
            before = counters()
            assert before == {where if fused else "cpu"}, before
            state = full_state_dict(zero)
            saved = {held["step"].device.type for held in state["optimizer"].values()}
            assert saved == {"cpu"}, f"saved on {saved}"
            for device_type in ("cpu", "cuda"):  # wherever it has been saved
                for held in state["optimizer"].values():
                    held["step"] = held["step"].to(device_type)
                load_full_state_dict(zero, state)
                assert counters() == before, f"{before} before loading, {counters()} after"
            train_step(model, zero, batch)
            zero.step()
            assert {held["step"].item() for held in full_state_dict(zero)["optimizer"].values()} == {2.0}
print("PASS")
"""


@pytest.mark.prove
def test_on_a_stand_in_gpu_steps_are_saved_on_the_host_and_loaded_where_the_update_counts_them():
    done = on_stand_in_gpus(Path(__file__).parent, "-c", STATE)
    assert done.stdout.splitlines()[-1:] == ["PASS"], done.stdout[-900:] + done.stderr[-900:]


def counters_before_and_after() -> tuple[list[float], bool, bool]:
    model = awkward()
    zero = make_zero(1, model, in_two_groups(model), dist.group.WORLD)
    train_step(model, zero, make_batch(0, 1)[0])
    zero.step()
    saved = full_state_dict(zero)
    load_full_state_dict(zero, saved)
    steps = [held["step"] for held in saved["optimizer"].values()]
    own = len({step.data_ptr() for step in steps}) == len(steps)
    train_step(model, zero, make_batch(0, 1)[0])
    zero.step()
    frozen = saved["weights"]["layers.0.up.weight"]
    before = frozen.clone()
    zero.load_frozen(saved["weights"] | {"layers.0.up.weight": frozen + 1})
    return [step.item() for step in steps], own, torch.equal(frozen, before)


def test_a_saved_counter_does_not_go_on_counting_and_a_saved_frozen_weight_stays():
    for steps, own, stays in run_ranks(1, counters_before_and_after):
        assert set(steps) == {1.0} and own and stays


@pytest.mark.prove
def test_the_demo_ends_with_pass(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zero_state.py"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0 and capsys.readouterr().out.splitlines()[-1] == "PASS"
