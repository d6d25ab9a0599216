"""Backward in two parts, for any module: first the gradient of the input, later the gradients of the weights.

Problem. A pipeline stage waits for the gradient of its output and then computes two things: the gradient of
its input, for which the stage below waits, and the gradients of its weights, which are not needed before the
optimizer step. `loss.backward()` computes both at once, so the stage below waits twice as long as it must.

Idea (Zero Bubble, arXiv 2401.10241). Do the first part at once, B, and delay the second, W, until the rank
would otherwise be idle. For y = x Wᵀ, each part is one matmul:

    F  y  = x Wᵀ              waits for x
    B  dx = dy W              waits for dy; the stage below waits for it
    W  dW = dyᵀ x             waits for dy; the optimizer waits for it

How, in PyTorch. Autograd's graph leads from the output back to the input and to every weight:

    output ── node ── CUT ── node ── CUT ── input        CUT: a node on the path to the input where
                       │              │                       a path to weights branches off (MmBackward)
                       t              t
                       │              │
                     weight         weight

    B   run the graph with only the input as its target. Autograd asks each node only for gradients on that
        path, so MmBackward computes dy W but not dyᵀ x. At each CUT a hook saves the incoming gradient.
    W   start at each CUT with the saved gradient and only its weights as targets: MmBackward computes dyᵀ x.
        Then accumulate each weight's sum once, so that hooks on the weight (data parallel's) fire as usual.

Floating-point operations of a linear layer: F : B : W = 1 : 1 : 1, and the demo counts them.
Bytes: what F saved stays until W, plus one gradient for each CUT between B and W.

Run it:
    python split_backward.py                 one process, CPU or GPU: errors, operations, hooks
    python split_backward.py --recompute     with blocks that save only their input
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

# Legend of shapes: B batch, S sequence, H hidden.

# ------------------------------------------------------------------------------------------------------ the graph


def nodes_between(output: Node, aims: set[Node]) -> list[Node]:
    """The nodes on a path from `output` to one of `aims`, in order from the output; without the aims.

    `node.next_functions` are the nodes that receive this node's results, so gradients flow along such a path.
    """
    reaches: dict[Node, bool] = {}  # filled from the inputs: a node after all nodes behind it
    stack = [output]
    while stack:
        node = stack[-1]
        behind = [child for child, _ in node.next_functions if child is not None]
        unknown = [child for child in behind if child not in reaches and child not in aims]
        if unknown and node not in reaches:
            stack += unknown
            continue
        # --- exercise 6.26: does a way lead from this node to an aim? ---
        reaches[node] = any(child in aims or reaches[child] for child in behind)
        # --- end exercise ---
        stack.pop()
    return [node for node in reversed(reaches) if reaches[node] and node not in aims]


def weights_behind(nodes: Iterable[Node]) -> set[Node]:
    """The AccumulateGrad node of each weight behind these nodes: it adds to the weight's grad."""
    seen = set(nodes)
    stack = list(nodes)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return {node for node in seen if hasattr(node, "variable")}  # only an AccumulateGrad node has one


class Cut:
    """A node on the path to the input where a path to weights branches off, and its gradients from B."""

    def __init__(self, node: Node, weights: set[Node]):
        self.node, self.weights = node, weights
        self.grads: tuple[Tensor | None, ...] = ()

    @classmethod
    def at(cls, edge: GradientEdge, grad: Tensor) -> "Cut":
        """A cut at an edge whose gradient is known; everything behind it is left to W."""
        cut = cls(edge.node, weights_behind([edge.node]))
        grads: list[Tensor | None] = [None] * len(edge.node._input_metadata)  # one for each output of the node
        grads[edge.output_nr] = grad
        cut.grads = tuple(grads)
        return cut

    def keep(self, grads: tuple[Tensor | None, ...]) -> None:
        self.grads = grads

    def again(self, _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """In W, replace the incoming gradient by the one from B, which is already complete."""
        return self.grads

    def kept(self) -> list[tuple[GradientEdge, Tensor]]:
        """The saved gradients, and the edges of the graph to start from."""
        return [(GradientEdge(self.node, i), grad) for i, grad in enumerate(self.grads) if grad is not None]


# ------------------------------------------------------------------------------------------------------- B, then W


def backward_for_input(
    output: GradientEdge, grad: Tensor, inputs: Sequence[GradientEdge]
) -> tuple[list[Tensor | None], "WeightPart"]:
    """B. The gradients of `inputs`, and what is left to do for the weights. No weight's `.grad` is touched.

    output   the module's output, as `get_gradient_edge(y)`: the edge in the graph, without the data of y
    grad     the gradient of the loss with respect to it, of y's shape
    inputs   tensors to get gradients for, also as edges. Usually the module's input x (which must require a
             gradient); if x are tokens, which have none, the first activation computed from them
    """
    aims = {edge.node for edge in inputs}
    between = nodes_between(output.node, aims) if output.node not in aims else []
    on_the_way = set(between) | aims
    cuts = []
    for node in between:
        # --- exercise 6.27: a cut is where a way to weights turns off ---
        aside = {child for child, _ in node.next_functions if child is not None and child not in on_the_way}
        if weights := weights_behind(aside):
            cuts.append(Cut(node, weights))
        # --- end exercise ---
    later = [node for node in between if hasattr(node, "weight_parts")]  # recomputed blocks, see below
    for node in later:
        node.weight_parts = []
    handles = [cut.node.register_prehook(cut.keep) for cut in cuts]
    try:
        found = torch.autograd.grad([output], inputs, [grad], retain_graph=True, allow_unused=True) if inputs else ()
    finally:
        for handle in handles:
            handle.remove()
    # What is behind an input is left to W: nothing for a leaf, the embedding for the first activation.
    leaf = [not edge.node.next_functions for edge in inputs]
    cuts += [Cut.at(edge, g) for edge, g, end in zip(inputs, found, leaf, strict=True) if g is not None and not end]
    if output.node not in on_the_way:  # the output does not depend on the inputs: all of it is left to W
        cuts.append(Cut.at(output, grad))
    parts = [part for node in later for part in node.weight_parts]
    cuts = [cut for cut in cuts if cut.weights and cut.kept()]
    written_in_python = any(isinstance(cut.node, torch._C._FunctionBase) for cut in cuts)
    owner = output if written_in_python and not python_nodes_own_their_graph() else None
    return list(found), WeightPart(cuts, parts, owner)


@cache
def python_nodes_own_their_graph() -> bool:
    """Does the node of a torch.autograd.Function keep itself alive? In torch 2.11 only its predecessor does,
    or the `ownership_token` of the output's edge, so W has to hold that edge until it is done."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return grad

    with torch.enable_grad():  # the first caller may be a recomputed block, in whose backward it is off
        node = Same.apply(torch.ones(1, requires_grad=True)).grad_fn  # the tensor is freed
    try:
        return node is not None and node.next_functions is not None
    except RuntimeError:
        return False


class WeightPart:
    """The rest after B. It keeps the graph, and so the activations, alive until `run`, W, is done."""

    def __init__(self, cuts: list[Cut], parts: list["WeightPart"], owner: GradientEdge | None = None):
        self.cuts = cuts
        self.parts = parts  # of the recomputed blocks inside
        self.owner = owner

    def run(self) -> None:
        """W. Adds the gradient to `.grad` of every weight, and fires each of its hooks once."""
        with without_hooks([node.variable for node in self.weights()]):
            sums = self.gradients()
        if sums:  # one backward for all: a weight with two uses gets the sum of both before its hooks fire
            torch.autograd.backward([place for place, _ in sums], [grad for _, grad in sums])

    def weights(self) -> set[Node]:
        return set().union(*(cut.weights for cut in self.cuts), *(part.weights() for part in self.parts))

    def gradients(self) -> list[tuple[GradientEdge, Tensor]]:
        """The gradients of the weights behind all cuts. Finished parts of the graph are freed on the way."""
        result = []
        for group in together(self.cuts):
            # --- exercise 6.28: from the gradients of these cuts to the gradients of their weights, and no more ---
            aims = [GradientEdge(node, 0) for node in set().union(*(cut.weights for cut in group))]
            starts = [pair for cut in group for pair in cut.kept()]
            edges = [edge for edge, _ in starts]
            grads = [grad for _, grad in starts]
            handles = [cut.node.register_prehook(cut.again) for cut in group]
            try:
                found = torch.autograd.grad(edges, aims, grads, retain_graph=True, allow_unused=True)
            finally:
                for handle in handles:
                    handle.remove()
            result += [(aim, grad) for aim, grad in zip(aims, found, strict=True) if grad is not None]
            # --- end exercise ---
            for cut in group:  # the list of groups still names the cut, so take the graph out of it
                del cut.node, cut.grads
        for part in self.parts:
            result += part.gradients()
        self.cuts = []
        self.parts = []
        self.owner = None
        return result


@contextmanager
def without_hooks(weights: Iterable[Tensor]) -> Iterator[None]:
    """Without the hooks of `register_hook`, which would change each part of a gradient, and then the sum as well."""
    hooks = [(weight, weight._backward_hooks) for weight in weights]
    for weight, _ in hooks:
        weight._backward_hooks = None
    try:
        yield
    finally:
        for weight, its_hooks in hooks:
            weight._backward_hooks = its_hooks


def together(cuts: list[Cut]) -> list[list[Cut]]:
    """Groups of cuts that share a weight; usually each cut is alone.

    From the cut nearer to the output a second path leads to the shared weight, through the other cut. One by
    one, that path would be counted twice. Together, the hook `again` replaces what arrives at the second cut.
    """
    groups: list[list[Cut]] = []
    for cut in cuts:
        sharing = [group for group in groups if any(cut.weights & other.weights for other in group)]
        merged = [other for group in sharing for other in group] + [cut]
        groups = [group for group in groups if group not in sharing] + [merged]
    return groups


# ----------------------------------------------------------------------------------------------------- recomputation


def autocast_of_now(device_type: str) -> AbstractContextManager[object]:
    """The current autocast state, on or off, to enter again later."""
    if not torch.amp.is_autocast_available(device_type):  # meta
        return nullcontext()
    dtype = torch.get_autocast_dtype(device_type)
    enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, dtype, enabled)


class Recomputed(torch.autograd.Function):
    """Save only the input of a block; B runs the block again and splits the backward of that second run."""

    @staticmethod
    def forward(ctx, function: Callable[..., Tensor], x: Tensor, *constants) -> Tensor:
        ctx.function, ctx.constants = function, constants
        ctx.weight_parts = None  # a list during B, set by `backward_for_input`
        ctx.save_for_backward(x)
        ctx.devices = [x.device] if x.is_cuda else []
        ctx.random = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in ctx.devices]
        ctx.autocast = autocast_of_now(x.device.type)
        return function(x, *constants)  # without a graph: torch runs the forward of a Function under no_grad

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(ctx.devices), torch.enable_grad():  # a dropout must draw the same mask again
            torch.set_rng_state(ctx.random[0])
            for device, state in zip(ctx.devices, ctx.random[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            with ctx.autocast:  # backward may be called outside of it, or in another thread
                y = ctx.function(x, *ctx.constants)
        if ctx.weight_parts is None:
            torch.autograd.backward(y, grad)
            return None, x.grad, *(None for _ in ctx.constants)
        (dx,), part = backward_for_input(get_gradient_edge(y), grad, [get_gradient_edge(x)])
        ctx.weight_parts.append(part)
        return None, dx, *(None for _ in ctx.constants)


def recomputed_once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function(x, *constants)`, saving only x; constants (positions, cos, sin) get no gradient.

    torch.utils.checkpoint is also exact with a split backward, but reruns the block for every engine call:
    for B, and for each cut in W. Here it reruns once, in B, and W's part of that run is saved until W. So
    recomputation saves memory between F and B, but not between B and W. x is floating-point.
    """
    return partial(run_recomputed, function)  # a deep copy of it runs the copy of a function that is a method


def run_recomputed(function: Callable[..., Tensor], x: Tensor, *constants) -> Tensor:
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # autograd does not see the weights: without this, no backward
    return Recomputed.apply(function, x, *constants)


# ------------------------------------------------------------------------------------------------------------ demo


class Block(nn.Module):
    """Half a transformer block, with a norm's weight, a layer with a bias, and a weight that is used twice."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.twice = nn.Parameter(torch.randn(hidden, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.down(F.gelu(self.up(self.norm(x))))
        return h + torch.tanh(h @ self.twice) @ self.twice


def split_backward(module: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Backward in two calls, B and then W. Returns the module's output and the gradient of x."""
    y = module(x)
    (dx,), part = backward_for_input(get_gradient_edge(y), grad, [get_gradient_edge(x)])
    part.run()
    assert dx is not None
    return y, dx


def relative(got: Tensor, want: Tensor) -> Tensor:
    return (got - want).abs().max() / want.abs().max()


def flops(call: Callable[[], object]) -> tuple[int, object]:
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


def main() -> None:
    class OneLineParser(argparse.ArgumentParser):
        def error(self, message: str):
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
            sys.exit(2)

    parser = OneLineParser(description="Backward in two parts.", allow_abbrev=False)
    parser.add_argument("--recompute", action="store_true", help="blocks keep their input only")
    args = parser.parse_args()
    if os.environ.get("RANK", "0") != "0":  # every rank would compute the same
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden, rows = 32, []
    blocks = nn.ModuleList(Block(hidden) for _ in range(3)).to(device, torch.float64)
    reference = nn.Sequential(*deepcopy(blocks))

    def model(x: Tensor) -> Tensor:
        for block in blocks:
            x = (recomputed_once(block) if args.recompute else block)(x)
        return x

    x = torch.randn(4, 8, hidden, dtype=torch.float64, device=device, requires_grad=True)  # [B, S, H]
    grad = torch.randn_like(x)
    fired = {name: 0 for name, _ in blocks.named_parameters()}
    for name, p in blocks.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.update({name: fired[name] + 1}))
    _, dx = split_backward(model, x, grad)
    want_x = x.detach().clone().requires_grad_()
    reference(want_x).backward(grad)
    pairs = zip(blocks.parameters(), reference.parameters(), strict=True)
    errors = [relative(dx, want_x.grad), *(relative(p.grad, q.grad) for p, q in pairs)]
    error = torch.stack(errors).max().item()  # NaN if one of them is
    rows.append(("largest error against one backward", "<= 1e-10", f"{error:.1e}", error <= 1e-10))
    counts = sorted(set(fired.values()))
    rows.append(("hooks fired per weight", "[1]", f"{counts}", counts == [1]))

    weights = [torch.randn(hidden, hidden, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)]

    def linear(x: Tensor) -> Tensor:
        for weight in weights:
            x = F.linear(x, weight)
        return x

    stage = recomputed_once(linear) if args.recompute else linear
    forward, y = flops(lambda: stage(x))
    edges = get_gradient_edge(y), get_gradient_edge(x)
    for_input, (_, part) = flops(lambda: backward_for_input(edges[0], grad, [edges[1]]))
    for_weights, _ = flops(part.run)
    want = (forward, forward * (1 + args.recompute), forward)
    got = (forward, for_input, for_weights)
    rows.append(("operations of F, B, W in linear layers", str(want), str(got), want == got))

    print(f"{'':40}{'expected':>28}{'measured':>28}")
    for what, expected, measured, _ in rows:
        print(f"{what:40}{expected:>28}{measured:>28}")
    wrong = [what for what, _, _, right in rows if not right]
    print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
