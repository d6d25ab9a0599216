"""Halves that take turns: the same numbers and bytes as whole batches, and an order in which one computes while the
other travels."""

import gc
import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import domino
import pytest
import torch
import torch.distributed as dist
from domino import HalvedBlock, Piece, UnderWay, in_halves, one_by_one
from harness.late import Late
from harness.meter import communication, saved_activations
from harness.programs import error_from, on_stand_in_gpus, refusal
from harness.ranks import run_ranks
from harness.reference import assert_same_named, numbers
from parallel_block import (
    Config,
    ParallelBlock,
    Parts,
    block_weights,
    kept_bytes,
    rope_tables,
    sync_in_backward,
    sync_replicated_gradients,
)
from parallel_linear import Shard, TensorParallel, column_simple
from parallel_llama import load_full_state_dict
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

S, ROWS = 8, 3
SMALL = Config(hidden=32, heads=8, kv_heads=2, intermediate=24, qkv_bias=True)
COS, SIN = rope_tables(torch.arange(S), SMALL.hidden // SMALL.heads, SMALL.rope_theta)
LAYOUTS = {"tensor": False, "sequence": True}


def blocks_of(halved: bool, group: dist.ProcessGroup, sequence: bool, count: int = 2, parts: Parts | None = None):
    """The same `count` blocks, in halves or not; k and v with biases that are not zero."""
    make = partial(HalvedBlock, SMALL, group, sequence)
    if not halved:
        make = partial(ParallelBlock, SMALL, TensorParallel(group, sequence, column=column_simple))
    blocks = nn.ModuleList(make(parts or Parts()) for _ in range(count)).double()
    for i, block in enumerate(blocks):
        full = block_weights(SMALL, numbers(1))
        load_full_state_dict(block, {n: w + 0.1 * numbers(*w.shape, seed=i) for n, w in full.items()})
    return blocks


def step_of(blocks, halved: bool, sequence: bool, cos: Tensor = COS, sin: Tensor = SIN, wrap=None, again=0):
    """Output, gradient of x, and all gradients of weights of blocks, of which the first `again` run twice."""
    group = blocks[0].tp.group
    mine = Shard(S, 1, dist.get_world_size(group), dist.get_rank(group)).cut if sequence else (lambda y: y)
    x = mine(numbers(ROWS, S, SMALL.hidden)).clone().requires_grad_()
    run = partial(in_halves if halved else one_by_one, blocks=[*blocks, *blocks[:again]], cos=cos, sin=sin)
    z = wrap(run, x) if wrap else run(x)
    z.backward(mine(numbers(ROWS, S, SMALL.hidden, seed=1)))
    return {"z": z.detach(), "x": x.grad, **{name: p.grad for name, p in blocks.named_parameters()}}


def one_run(halved: bool, group: dist.ProcessGroup, sequence: bool, *tables: Tensor, **how):
    blocks = blocks_of(halved, group, sequence)
    found = step_of(blocks, halved, sequence, *tables, **how)
    sync_replicated_gradients(blocks, group)
    return found


# ----------------------------------------------------------------------------------------------------- the same numbers


def same_numbers(slices: bool) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])] if slices else [dist.group.WORLD]
    group = groups[dist.get_rank() % len(groups)]
    by_row = rope_tables(torch.arange(S) + torch.tensor([[0], [5], [2]]), SMALL.hidden // SMALL.heads, 10000.0)
    for layout, sequence in LAYOUTS.items():
        for tables in ((COS, SIN), by_row) if dist.get_world_size(group) == 2 else ((COS, SIN),):
            want = one_run(False, group, sequence, *tables, again=1)
            got = one_run(True, group, sequence, *tables, again=1)
            assert_same_named(got, want, 1e-12, f"in halves of 2 rows and 1, {layout} parallel,", dist.get_rank())


@pytest.mark.always("4-True")
@pytest.mark.parametrize(
    ("ranks", "slices"), [(1, False), pytest.param(2, False, marks=pytest.mark.prove), (4, False), (4, True)]
)
def test_halves_equal_whole_batches_in_output_and_every_gradient(ranks, slices):
    run_ranks(ranks, same_numbers, slices)


def numbers_of_late_messages(sequence: bool) -> None:
    group = dist.group.WORLD
    want = one_run(False, group, sequence)
    blocks = blocks_of(True, group, sequence)
    singles = {name: Late(getattr(domino, name)) for name in ("all_gather_single", "reduce_scatter_single")}
    with mock.patch.multiple(domino, **singles), mock.patch.object(dist, "all_reduce", Late(dist.all_reduce)):
        got = step_of(blocks, True, sequence)
    sync_replicated_gradients(blocks, group)
    assert_same_named(got, want, 1e-12, "with messages that are late", dist.get_rank())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_read_before_it_has_been_waited_for(layout):
    run_ranks(2, numbers_of_late_messages, LAYOUTS[layout])


def test_a_message_that_was_waited_for_is_freed_once_its_receiver_lets_go():
    x = torch.ones(3)
    gone, message = weakref.ref(x), UnderWay([], lambda x=x: x)
    del x
    assert message.wait().sum() == 3
    assert gone() is None, "what one half has gathered lives on through the other half's turn"


# ------------------------------------------------------------------------------------------------- the order of events


class Order(TorchDispatchMode):
    """What torch is really asked for, in order: products, and messages by number when they start and are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.messages = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("mm", "bmm", "addmm"):
            self.events.append("product")
        return func(*args, **(kwargs or {}))

    def numbered(self, real):
        def start(*args, **how):
            number, self.messages = self.messages, self.messages + 1
            self.events.append(f"start {number}")
            work = real(*args, **how)
            assert work is not None, "a call that returns no handle has waited already"
            handle = mock.Mock()
            handle.wait = lambda: (self.events.append(f"wait {number}"), work.wait())
            return handle

        return start

    def behind(self) -> list[int]:
        """For each message, how many products were asked for between its start and its wait."""
        spans = [(self.events.index(f"start {i}"), self.events.index(f"wait {i}")) for i in range(self.messages)]
        return [self.events[begin:end].count("product") for begin, end in spans]


def products_behind_messages(sequence: bool) -> tuple[list[int], list[int]]:
    no_products = Parts(attention=lambda q, k, v, *, causal: q + (k + v).mean(2, keepdim=True))
    blocks = blocks_of(True, dist.group.WORLD, sequence, parts=no_products)
    x = numbers(ROWS, S // (2 if sequence else 1), SMALL.hidden).requires_grad_()
    with ExitStack() as patches:
        orders = [Order(), Order()]
        for place, name in ((dist, "all_reduce"), (domino, "all_gather_single"), (domino, "reduce_scatter_single")):
            real = getattr(place, name)
            pick = lambda *a, real=real, **k: orders[len(results)].numbered(real)(*a, **k)  # noqa: E731
            patches.enter_context(mock.patch.object(place, name, pick))
        results: list[Tensor] = []
        with orders[0]:
            results.append(in_halves(x, list(blocks), COS, SIN))
        with orders[1]:
            results[0].sum().backward()
    return orders[0].behind(), orders[1].behind()


def test_every_sum_but_the_last_travels_behind_a_whole_turn_of_the_other_half():
    for forward, backward in run_ranks(2, products_behind_messages, False):
        assert forward == [2] * 7 + [0], "products into and out of the columns, in each of 8 turns"
        mlp, attention = 2 + 3, 2 + 4  # backward: dx and dW of down or o, one dx and two or three dW
        assert backward == [mlp, *[attention] * 2, *[mlp] * 2, *[attention] * 2, 0]


def test_with_sequence_parallel_sums_and_gathers_each_travel_behind_one_part_of_a_turn():
    for directions in run_ranks(2, products_behind_messages, True):
        for behind in directions:
            assert len(behind) == 16
            assert [i for i, products in enumerate(behind) if products == 0] == [0, 15], behind


# ------------------------------------------------------------------------------------------------------ the same bytes


def counted(halved: bool, sequence: bool, autocast: bool) -> tuple[int, float, int]:
    """Messages, bytes sent and bytes kept of two blocks."""
    blocks = blocks_of(halved, dist.group.WORLD, sequence)
    t = dist.get_world_size()
    x = numbers(ROWS, S // t if sequence else S, SMALL.hidden).requires_grad_()
    if autocast:
        blocks.float()
        x = x.detach().float().requires_grad_()
    leave_out = [*blocks.parameters(), COS, SIN]
    with communication() as sent, saved_activations(exclude=leave_out) as saved:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            z = (in_halves if halved else one_by_one)(x, list(blocks), COS, SIN)
        z.sum().backward()
    return sum(sent.calls.values()), sent.total, saved.bytes


def counts() -> None:
    for layout, sequence in LAYOUTS.items():
        whole, halves = (counted(halved, sequence, False) for halved in (False, True))
        assert halves[0] == 2 * whole[0], f"{layout}: each half has messages of its own"
        assert halves[1] == whole[1] == 2 * 8 * 3 * ROWS * S * SMALL.hidden * 8 / 4, layout
        parts = kept_bytes(SMALL, ROWS, S, TensorParallel(dist.group.WORLD, sequence), 8, gather_again=False)
        assert halves[2] == 2 * sum(parts.values()), f"{layout}: a bias keeps nothing"
        in_bf16 = [counted(halved, sequence, True)[1] for halved in (False, True)]
        assert in_bf16 == [whole[1] / 4] * 2, f"{layout}: under autocast a number is sent in 2 bytes, not in 8"


def test_the_halves_send_and_keep_what_whole_batches_do_in_twice_as_many_messages():
    run_ranks(4, counts)


# --------------------------------------------------------------------------------------------------- parameters, modes


def parameters_and_hooks() -> None:
    for sequence in (False, True):
        want = one_run(False, dist.group.WORLD, sequence)
        blocks, calls = blocks_of(True, dist.group.WORLD, sequence), []
        before = dict(blocks.named_parameters())
        sync_in_backward(blocks, dist.group.WORLD)
        for name, p in blocks.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, calls=calls: calls.append(name))
        got = step_of(blocks, True, sequence)
        after = dict(blocks.named_parameters())
        assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
        assert sorted(calls) == sorted(before), "each parameter gets one gradient"
        assert_same_named(got, want, 1e-12, "summed by hooks", dist.get_rank())


def test_a_parameter_gets_one_gradient_of_its_own_and_its_hooks_run_once():
    run_ranks(2, parameters_and_hooks)


def modes() -> None:
    group = dist.group.WORLD
    recomputed = one_run(True, group, True, wrap=partial(checkpoint, use_reentrant=False))
    assert_same_named(recomputed, one_run(False, group, True), 1e-12, "recomputed", dist.get_rank())
    x, blocks = numbers(ROWS, S, SMALL.hidden), blocks_of(True, group, False)
    blocks[0].mlp.up_proj.weight.requires_grad_(False)
    z = in_halves(x, list(blocks), COS, SIN)
    in_halves(2 * x, list(blocks), COS, SIN)  # another micro-batch, before the backward of the first
    z.sum().backward(retain_graph=True)
    whole = blocks_of(False, group, False)
    one_by_one(x, whole, COS, SIN).sum().backward()
    for (name, p), q in zip(blocks.named_parameters(), whole.parameters(), strict=True):
        if p.requires_grad:
            assert p.grad.nbytes == p.grad.untyped_storage().nbytes(), f"the gradient of {name} is a view"
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-12, msg=f"{name}, beside a frozen weight")
        else:
            assert p.grad is None
    with pytest.raises(RuntimeError, match="a second time"):
        z.sum().backward()
    with torch.no_grad(), saved_activations() as saved:
        torch.testing.assert_close(in_halves(x, list(blocks), COS, SIN), z.detach(), rtol=0, atol=0)
    assert saved.bytes == 0
    gc.collect()
    z = in_halves(x, list(blocks), COS, SIN)
    assert sum(isinstance(o, Piece) for o in gc.get_objects()) == 2 * 2 * 2 * 3
    del z
    assert not any(isinstance(o, Piece) for o in gc.get_objects()), "a forward without backward keeps its pieces"
    y, other = x.clone().requires_grad_(), Parts(linear=partial(nn.functional.linear))  # frozen, by another product
    halved, whole = (blocks_of(how, group, False, parts=other).requires_grad_(False) for how in (True, False))
    ends = in_halves(y, list(halved), COS, SIN), one_by_one(y, whole, COS, SIN)
    got, want = (torch.autograd.grad(z.square().sum(), y, create_graph=True)[0] for z in ends)
    assert_same_named({"x": got}, {"x": want}, 1e-12, "below frozen weights", dist.get_rank())
    with pytest.raises(RuntimeError, match="once_differentiable"):
        got.sum().backward()
    with saved_activations() as saved:
        assert not in_halves(x, list(halved), COS, SIN).requires_grad
    assert saved.bytes == 0, "where nothing has a gradient"


def test_recomputation_frozen_weights_no_grad_and_a_forward_without_backward():
    run_ranks(2, modes)


def errors_in_bf16(sequence: bool) -> tuple[float, float]:
    """How far gradients under autocast are from float64, in halves and with whole batches."""
    want, far = one_run(False, dist.group.WORLD, sequence), {}
    mine = Shard(S, 1, 2, dist.get_rank()).cut if sequence else (lambda y: y)
    for halved in (True, False):
        blocks = blocks_of(halved, dist.group.WORLD, sequence).float()
        x = mine(numbers(ROWS, S, SMALL.hidden)).float()
        with torch.autocast("cpu", torch.bfloat16):
            z = (in_halves if halved else one_by_one)(x, list(blocks), COS, SIN)
        z.backward(mine(numbers(ROWS, S, SMALL.hidden, seed=1)).float())
        sync_replicated_gradients(blocks, dist.group.WORLD)
        assert all(p.grad.dtype == torch.float32 for p in blocks.parameters())
        off = [
            (p.grad - want[n]).norm() / want[n].norm() for n, p in blocks.named_parameters() if "k_proj.bias" not in n
        ]
        far[halved] = torch.stack(off).mean().item()
    return far[True], far[False]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_autocast_halves_err_at_most_half_as_much_again_as_whole_batches(layout):
    for halves, whole in run_ranks(2, errors_in_bf16, LAYOUTS[layout]):
        assert 0 < whole < 0.1 and halves <= 1.5 * whole


# ------------------------------------------------------------------------------------------------------------- refusals


def refusals() -> list[str]:
    group, messages = dist.group.WORLD, []
    blocks = list(blocks_of(True, group, False, count=1))
    before = list(blocks[0].parameters())

    def refused(x: Tensor, kind=ValueError) -> None:
        with pytest.raises(kind) as error:
            in_halves(x, blocks, COS, SIN)
        messages.append(str(error.value))

    two = numbers(2, S, SMALL.hidden)
    whole = in_halves(two, blocks, COS, SIN)
    refused(two[:1])
    hooks = {"forward_pre": "", "full_backward": "", "full_backward_pre": "self_attn", "forward": "mlp"}
    for kind, name in hooks.items():
        hook = getattr(blocks[0].get_submodule(name), f"register_{kind}_hook")(lambda *given: None)
        refused(two)
        if not name:
            assert torch.equal(blocks[0](two, COS, SIN), whole), "called by itself, a block may have hooks"
        hook.remove()
    seen = []
    blocks[0].mlp.down_proj.register_forward_hook(lambda module, given, result: seen.append(result.shape[0]))
    assert in_halves(numbers(3, S, SMALL.hidden), blocks, COS, SIN).shape[0] == 3
    assert seen == [2, 1], "a layer's hooks run, once for each half"
    several = list(blocks_of(True, group, False))
    several[1].mlp.register_forward_hook(lambda *given: None)
    assert error_from(ValueError, in_halves, two, several, COS, SIN).startswith("block 1: mlp has hooks")
    several[1].register_forward_hook(lambda *given: None)
    assert error_from(ValueError, in_halves, two, several, COS, SIN).startswith("block 1 has hooks")
    blocks[0].mlp.act = lambda gate, up: 1 / 0
    refused(two, ZeroDivisionError)
    assert all(p is q for p, q in zip(blocks[0].parameters(), before, strict=True)), "parameters come back after errors"
    return messages


def test_one_row_and_hooks_on_what_is_no_whole_any_more_are_refused():
    row, block, again, attention, mlp, _ = run_ranks(1, refusals)[0]
    assert "a batch of 1 row" in row and "column_overlapped" in row
    assert block.startswith("block 0 has hooks") and again == block
    assert attention.startswith("block 0: self_attn has hooks") and mlp.startswith("block 0: mlp has hooks")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", "1"], "--rows 1 is not in 2 .. 256"),
        (["--rows", "257"], "--rows 257 is not in 2 .. 256"),
        (["--layers", "0"], "--layers 0"),
        (["--sequence", "9"], "sequence 9"),
        (["--sequence", "1"], "--sequence 1 is not in 2 .. 256"),
        (["--row", "3"], "--row"),
    ],
)
def test_bad_input_ends_in_one_line_before_any_process_group(options, words):
    assert words in refusal(domino.main, options, world_size=2)


WITH_SCORES = """
import sys, domino
from torch.nn.attention import SDPBackend, sdpa_kernel
sys.argv = ["domino.py"]
with sdpa_kernel(SDPBackend.MATH):  # what a GPU has for float64
    domino.main()
"""


@pytest.mark.prove
def test_what_is_kept_may_be_more_than_with_a_flash_kernel_on_a_gpu():
    done = on_stand_in_gpus(Path(domino.__file__).parent, "-c", WITH_SCORES)
    assert (done.stdout.splitlines() or [""])[-1] == "PASS", done.stdout + done.stderr[-900:]
