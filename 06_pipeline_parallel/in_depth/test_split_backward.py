"""Backward in two parts: the same gradients, half the work in each, hooks as ever, and no graph left behind."""

import sys
import weakref
from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import split_backward as script
import torch
import torch.nn.functional as F
from harness.reference import assert_same, assert_same_named
from split_backward import (
    Block,
    backward_for_input,
    flops,
    python_nodes_own_their_graph,
    recomputed_once,
    split_backward,
)
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

H = 6


class Product(torch.autograd.Function):
    """A custom function with an input and a weight, such as a fused or an fp8 linear layer."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


def checkpointed(block):
    return partial(checkpoint, block, use_reentrant=False)


class Odd(nn.Module):
    """A module of every kind of use of a weight; `forward` gives the one of `outputs` of x that is named `how`."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.b = (nn.Parameter(torch.randn(H, H)) for _ in range(2))
        self.scale, self.unused = nn.Parameter(torch.randn(H)), nn.Parameter(torch.randn(H))
        self.frozen = nn.Parameter(torch.randn(H, H), requires_grad=False)
        self.linear, self.block = nn.Linear(H, H), Block(H)

    def forward(self, x):
        return self.outputs(x)[self.how]()

    def outputs(self, x):
        a, b, scale = self.a, self.b, self.scale
        return {
            "a weight used twice": lambda: torch.tanh(x @ a) @ a,
            "twice, once through another weight": lambda: torch.tanh(x @ a) @ (a * scale),
            "two different functions of one weight": lambda: torch.tanh(x @ a.t()) @ a.exp(),
            "a linear layer with a bias": lambda: self.linear(x),
            "a custom function": lambda: Product.apply(torch.tanh(Product.apply(x, a)), b),
            "a frozen weight between": lambda: torch.tanh(x @ a @ self.frozen) @ b,
            "weights that never meet x": lambda: x + (a @ b).sum(),
            "the output ignores x": lambda: (a @ b).expand(2, H, H),
            "x itself": lambda: x,
            "no weight": lambda: torch.tanh(x) * x,
            "a hook that changes a gradient": lambda: self.hooked(x @ a) @ b,
            "two outputs of one node": lambda: sum(part * scale[:3] for part in (x @ a).split(3, dim=-1)).repeat(
                1, 1, 2
            ),
            "a block": lambda: self.block(x),
            "checkpointed": lambda: checkpoint(
                self.block, checkpoint(self.block, x, use_reentrant=False), use_reentrant=False
            ),
            "recomputed once": lambda: recomputed_once(self.block)(recomputed_once(self.block)(x)),
            "recomputed inside recomputed": lambda: recomputed_once(lambda y: recomputed_once(self.block)(y) @ a)(x),
            "recomputed with constants": lambda: recomputed_once(lambda y, c, s: self.block(y) @ c * s)(
                x, self.frozen, scale.detach()
            ),
        }

    def hooked(self, y):
        if y.requires_grad:
            y.register_hook(lambda grad: 3 * grad)
        return y


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def make(how):
    torch.manual_seed(0)
    module = Odd(how).double()
    x = torch.randn(2, H, H, dtype=torch.float64, requires_grad=True)
    return module, deepcopy(module), x, torch.randn_like(x)


@pytest.mark.parametrize("how", Odd("x itself").outputs(None))
def test_both_parts_together_give_the_gradients_of_one_backward(how):
    module, whole, x, grad = make(how)
    fired = []
    for weight in (module.a, whole.a):
        weight.register_hook(lambda grad: grad * grad.abs())  # of the sum it is not the sum of the parts
    for name, p in module.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    for _ in range(2):  # the second time it is added to the first
        y = module(x)
        (dx,), part = backward_for_input(get_gradient_edge(y), grad, [get_gradient_edge(x)])
        before = {name: None if g is None else g.clone() for name, g in gradients(module).items()}
        part.run()
        fresh = x.detach().clone().requires_grad_()
        whole(fresh).backward(grad)
        assert_same(dx, fresh.grad, what="gradient of x")
        assert x.grad is None, "the input is no weight: its gradient is returned, and W leaves it alone"
        assert_same_named(gradients(module), gradients(whole), what="gradient of")
    # B has touched no weight: before the second W, the gradients were those of the first step.
    assert_same_named(before, {n: None if g is None else g / 2 for n, g in gradients(whole).items()})
    assert sorted(fired) == sorted(2 * [n for n, g in gradients(whole).items() if g is not None]), "one hook, one W"


def test_any_three_layers_share_any_of_three_weights():
    """Each layer multiplies by the sum of some: those above it may share a weight with it that they do not share."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(2, 2, dtype=torch.float64)) for _ in range(3)]
    some = [[w for w, used in zip(weights, which, strict=True) if used] for which in product((True, False), repeat=3)]
    for layers in product(some[:-1], repeat=3):
        y = x = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
        for layer in layers:
            y = torch.tanh(y @ sum(layer))
        want = torch.autograd.grad(y.sum(), [x, *weights], retain_graph=True, allow_unused=True)
        (dx,), part = backward_for_input(get_gradient_edge(y), torch.ones_like(y), [get_gradient_edge(x)])
        part.run()
        for got, grad in zip([dx, *(w.grad for w in weights)], want, strict=True):
            assert (got is None) == (grad is None)
            assert got is None or torch.allclose(got, grad, rtol=1e-10, atol=0), "a weight's gradient, or the input's"
        for w in weights:
            w.grad = None


def test_operations_of_forward_input_part_and_weight_part_are_equal_in_linear_layers():
    module = nn.Sequential(*(nn.Linear(H, H) for _ in range(4)))
    x = torch.randn(5, H, requires_grad=True)
    forward, y = flops(lambda: module(x))
    for_input, (_, part) = flops(
        lambda: backward_for_input(get_gradient_edge(y), torch.ones_like(y), [get_gradient_edge(x)])
    )
    for_weights, _ = flops(part.run)
    assert (forward, for_input, for_weights) == (4 * 2 * 5 * H * H,) * 3


@pytest.mark.parametrize("tied", [True, False])
def test_below_the_first_activation_the_weight_part_goes_on_to_the_embedding(tied):
    """B stops at the embedding's output, for tokens have no gradient. With a tied head, two ways lead to the table."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(11, H, dtype=torch.float64))
    head = table if tied else nn.Parameter(torch.randn(11, H, dtype=torch.float64))
    weights = [table] if tied else [table, head]
    tokens = torch.tensor([[1, 2, 1], [0, 10, 4]])
    z = torch.randn(3, H, dtype=torch.float64, requires_grad=True)

    def output():
        x = F.embedding(tokens, table).unbind()[1]  # the second output of its node
        return x, torch.tanh(x + z) @ head.t()

    x, y = output()
    edges = [get_gradient_edge(tensor) for tensor in (x, z)]
    (dx, dz), part = backward_for_input(get_gradient_edge(y), torch.ones_like(y), edges)
    assert table.grad is None and dx.shape == x.shape
    part.run()
    assert z.grad is None, "an input that is a leaf, beside one that is none, is left alone"
    want = torch.autograd.grad(output()[1].sum(), [*weights, z])
    for got, grad in zip([*(w.grad for w in weights), dz], want, strict=True):
        assert_same(got, grad, what="gradient of the table, then of the head, then of z")


class Counted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


def test_a_recomputed_block_runs_twice_and_a_checkpointed_one_once_more_for_each_cut():
    counts = {}
    for name, wrap in (("recomputed once", recomputed_once), ("checkpoint", checkpointed)):
        block = Counted(nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H)))
        x = torch.randn(3, H, requires_grad=True)
        split_backward(wrap(block), x, torch.ones(3, H))
        counts[name] = block.calls
    assert counts == {"recomputed once": 1 + 1, "checkpoint": 1 + 1 + 2}


def backward_from(y, x, split):
    """In two parts, or at once; returns the gradient of x."""
    if not split:
        y.backward(torch.ones_like(y))
        return x.grad
    (dx,), part = backward_for_input(get_gradient_edge(y), torch.ones_like(y), [get_gradient_edge(x)])
    part.run()
    return dx


@pytest.mark.parametrize("split", [True, False])
def test_recomputation_keeps_the_input_only_and_draws_the_same_dropout_mask(split):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(H, 4 * H), nn.Dropout(0.5), nn.Linear(4 * H, H)).double()
    x = torch.randn(3, H, dtype=torch.float64, requires_grad=True)
    found = []
    for wrap in (recomputed_once, lambda block: block):
        torch.manual_seed(1)
        block.zero_grad()
        x.grad, saved = None, []

        def pack(tensor, saved=saved):
            saved.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = wrap(block)(x)
        after = torch.rand(1)
        dx = backward_from(y, x, split)
        behind = torch.rand(1)  # what is drawn after backward must not depend on what backward drew again
        found.append((saved, after, behind, dx, *(p.grad for p in block.parameters())))
    assert found[0][0] == [x.shape], "of a block, only its input is kept"
    for got, want in zip(found[0][1:], found[1][1:], strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("split", [True, False])
def test_a_recomputed_block_whose_input_needs_no_gradient_gives_its_weights_theirs(split):
    """As behind a frozen embedding. What is handed in stays as it is, and where gradients are off there is no graph."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(H), Block(H)).double()
    whole, x = deepcopy(blocks), torch.randn(2, H, H, dtype=torch.float64)
    y = recomputed_once(blocks[1])(recomputed_once(blocks[0])(x))
    if split:
        dx, part = backward_for_input(get_gradient_edge(y), torch.ones_like(y), [])
        assert dx == [] and all(p.grad is None for p in blocks.parameters()), "all of it is left to W"
        part.run()
    else:
        y.sum().backward()
    whole(x).sum().backward()
    assert_same_named(gradients(blocks), gradients(whole), what="gradient of")
    before = blocks[0].up.weight.grad.clone()
    with torch.no_grad():
        assert not recomputed_once(blocks)(x).requires_grad
    blocks[0].forward = recomputed_once(blocks[0].forward)
    deepcopy(blocks[0])(x).sum().backward()
    assert torch.equal(blocks[0].up.weight.grad, before), "a copy's gradient is not that of what it was copied from"
    assert x.grad is None and not x.requires_grad


def test_a_recomputed_block_refuses_what_would_get_no_gradient():
    x = torch.ones(2, H, requires_grad=True)
    with pytest.raises(RuntimeError, match="floating point"):  # the embedding of tokens
        recomputed_once(nn.Embedding(11, H))(torch.tensor([1, 2]))
    (dx,) = torch.autograd.grad(recomputed_once(torch.exp)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_recomputation_is_under_the_autocast_of_the_first_run_wherever_backward_is_called(split, enabled):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(H, 4 * H), nn.Tanh(), nn.Linear(4 * H, H))
    x = torch.randn(3, H, requires_grad=True)
    found = []
    for wrap in (recomputed_once, lambda block: block):
        block.zero_grad()
        x.grad = None
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            y = wrap(block)(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=not enabled):
            dx = backward_from(y, x, split)
        found.append((y, dx, *(p.grad for p in block.parameters())))
    assert found[0][0].dtype == (torch.float16 if enabled else torch.float32)
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


class Noted(torch.autograd.Function):
    """A weight as it is; in W, when its gradient comes by, `note` is called."""

    @staticmethod
    def forward(ctx, weight, note):
        ctx.note = note
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return grad, None


def test_the_graph_lives_until_the_weight_part_and_goes_layer_by_layer():
    class Box:
        def __init__(self, tensor):
            self.tensor = tensor

    boxes, alive, kept = weakref.WeakSet(), [], []

    def pack(tensor):
        box = Box(tensor.detach())
        boxes.add(box)
        return box

    weights = [nn.Parameter(torch.randn(H, H)) for _ in range(4)]
    x = torch.randn(5, H, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        y = x
        for weight in weights:
            y = torch.tanh(
                y @ Noted.apply(weight, lambda: alive.append((len(boxes), sum(g() is not None for g in kept))))
            )
    output = [get_gradient_edge(y)]
    del y
    _, part = backward_for_input(output.pop(), torch.ones(5, H), [get_gradient_edge(x)])
    one = 3  # saved by a layer: both factors of the product, and tanh's output; the topmost tanh has gone in B
    assert len(boxes) == 4 * one - 1 and alive == []
    kept += [weakref.ref(grad) for cut in part.cuts for grad in cut.grads if grad is not None]
    assert len(kept) == 4
    part.run()
    assert [layers for layers, _ in alive] == [i * one - 1 for i in (4, 3, 2, 1)], "what is above a layer has gone"
    assert [grads for _, grads in alive] == [4, 3, 2, 1], "and so has the gradient that its cut kept"
    assert len(boxes) == 0 and part.cuts == [] and part.parts == []


def test_who_owns_a_graph_is_found_out_the_same_way_where_gradients_are_off():
    answers = []
    for mode in (torch.no_grad(), torch.enable_grad()):
        python_nodes_own_their_graph.cache_clear()
        with mode:
            answers.append(python_nodes_own_their_graph())
    assert answers[0] == answers[1], "a recomputed block asks in its backward"


def test_a_nan_in_the_gradient_of_one_weight_is_no_pass(monkeypatch, capsys):
    class Spoiled(script.Block):
        def __init__(self, hidden):
            super().__init__(hidden)
            self.down.weight.register_post_accumulate_grad_hook(lambda p: p.grad.__setitem__(0, torch.nan))

    monkeypatch.setattr(sys, "argv", ["split_backward.py"])
    monkeypatch.setattr(script, "Block", Spoiled)  # a copy of it, the reference, has no hooks
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: largest error against one backward"


@pytest.mark.parametrize("options", [[], ["--recompute"]], ids=str)
def test_the_demo_passes_and_recomputation_costs_b_one_more_forward(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["split_backward.py", *options])
    with pytest.raises(SystemExit) as end:
        script.main()
    *_, operations, last = capsys.readouterr().out.splitlines()
    assert (end.value.code, last) == (0, "PASS")
    forward = 3 * 2 * 32 * 32 * 32  # three layers, 4 x 8 tokens
    assert operations.endswith(str((forward, forward * (1 + len(options)), forward)))
