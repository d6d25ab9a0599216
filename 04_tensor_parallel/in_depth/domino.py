"""Tensor and sequence parallelism in batch halves: one half computes while the other's sum is in flight.

Problem. In forward a block waits for each sum, because the next operation needs it. Backward can compute the
gradients of weights meanwhile (overlap.py), but forward has no second product.

Idea. The rows of a batch are independent. Split the batch in two and alternate: compute one half's products,
then the other's while the sum of the first is in flight (Domino: Wang et al. 2024, arXiv 2409.15241, row
split). Backward reverses the schedule. The halves are joined only after the last block.

    sublayer             attention 0            MLP 0                  attention 1
    whole batch   |products|sum ......|products|sum ......|products|sum ......|    sum: all-reduce, each rank waits

    computes      |A0: half 0|A0: half 1|M0: half 0|M0: half 1|A1: half 0|A1: half 1|
    in flight                |A0: half 0|A0: half 1|M0: half 0|M0: half 1|A1: half 0|A1: half 1|  waits once

With sequence parallel each half sends two messages between its turns: the reduce-scatter of its sum, then,
after the residual add and the norm, the all-gather of the result. So a turn has two parts, the products into
heads or columns and the products out of them, and each part overlaps one message:

    computes      | into: half 0       | out: half 0       | into: half 1         | out: half 1          |
    in flight     | sum of half 1      | gather half 1     | sum of half 0        | gather half 0        |

A gather's backward is a reduce-scatter, and vice versa, so backward is the same schedule with reversed
pieces. Autograd would choose its own order, so each piece has its own graph and the schedule calls it.

Formulas, for L blocks, n = B S H e bytes:
    sent              L 8 (t-1)/t n, as without halves, but in twice as many messages of half the size
    not hidden        1 of 4 L sums each way, the last; with sequence parallel also 1 of 4 L gathers, the first
    saved             as `column_simple` (kept_bytes with gather_again=False); in bf16 also the norms' inputs
    products          twice as many with half the rows each: every weight is read twice, and small products
                      are less efficient than large ones

Run it:
    python domino.py                                                    one rank, CPU or GPU
    torchrun --nproc_per_node 4 domino.py --rows 3                      halves of 2 and 1; Gloo on CPU, NCCL on GPU
    torchrun --nproc_per_node 2 domino.py --layers 4
Each runs with and without sequence parallel, next to the same blocks on the full batch. The last line is
PASS, or it exits with 1 and says which number is off.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _tensor_parallel_demo import OneLineParser, Report, Wire, kept_for_backward, launch, tokens_of_text
from parallel_block import Config, ParallelBlock, Parts, check_sizes, kept_bytes, one_by_one, rope_tables
from parallel_linear import (
    Columns,
    Shard,
    TensorParallel,
    all_gather_single,
    column_simple,
    init_weights,
    initial_weight,
    input_gradient,
    products,
    reduce_scatter_single,
    under_autocast,
    weight_gradients,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

# Legend of shapes: B batch (of one half, inside the schedule), S sequence, H hidden, t ranks of the tensor group. S/t
# is S sharded over that group. A sublayer is a norm and attention, or a norm and an MLP: two to a block.
Log = Callable[[str], object]  # receives the events in order: "into 1" is half 1's products into heads or columns


# ----------------------------------------------------------------------------------------- messages in flight


@dataclass
class UnderWay:
    """A pending message. Its user calls `wait` once; afterwards no tensor is referenced here."""

    works: list[dist.Work]
    arrived: Callable[[], Tensor] | None

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        arrived = self.arrived
        self.arrived = None
        self.works = []
        return arrived()


def start_sum(share: Tensor, tp: TensorParallel) -> UnderWay:
    """f* or g*, and in backward f or g: this rank's partial [B, S, H] -> the sum [B, S, H], or its [B, S/t,
    H]. The sum may overwrite `share`, so the caller must not use it again."""
    # --- exercise 4.34: start the sum of the shares, and say how one gets it ---
    if not tp.sequence_parallel:
        total = share.contiguous()
        return UnderWay([dist.all_reduce(total, group=tp.group, async_op=True)], lambda: total)
    pieces = share.unflatten(1, (tp.size, -1)).movedim(1, 0).contiguous()  # [B, S, H] -> [t, B, S/t, H]
    mine = torch.empty_like(pieces[0])
    work = reduce_scatter_single(mine, pieces.flatten(0, 1), group=tp.group, async_op=True)
    return UnderWay([work], lambda: (pieces, mine)[1])  # keeps `pieces` alive while they are sent
    # --- end exercise ---


def start_gather(x: Tensor, tp: TensorParallel) -> UnderWay:
    """With sequence parallel g, and in backward g*: [B, S/t, H] -> [B, S, H]. Without it, the identity."""
    if not tp.sequence_parallel:
        return UnderWay([], lambda: x)
    x, pieces = x.contiguous(), x.new_empty(tp.size, *x.shape)
    work = all_gather_single(pieces.flatten(0, 1), x, group=tp.group, async_op=True)
    return UnderWay([work], lambda: (x, pieces)[1].movedim(0, 1).flatten(1, 2))  # [t, B, S/t, H] -> [B, S, H]


# ------------------------------------------------------------------------------------------------------ the turns


@dataclass
class Turn:
    """The work of one half in one sublayer, in forward or in backward."""

    # (stream, received sum) -> (stream, input of the gather)
    arrive: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    first: Callable[[Tensor], Tensor]  # of the gathered tensor
    second: Callable[[Tensor], Tensor]  # -> a partial sum
    names: tuple[str, str]


def take_turns(
    halves: Sequence[Sequence[Turn]], streams: list[Tensor], order: Sequence[int], tp: TensorParallel, log: Log
) -> list[Tensor]:
    """Run the turns of both halves, in `order` within each sublayer. `streams` are the residual streams (in
    backward their gradients). Returns, for each half, the sum of its last turn, not yet added."""
    sums: list[UnderWay | None] = [None, None]
    wholes: list[UnderWay | None] = [None, None]

    def arrive(turn: Turn, half: int) -> None:
        """Wait for the half's last sum, if there was one, and start to gather the input of its turn."""
        total = came(sums[half], "sum", half)
        streams[half], ready = turn.arrive(streams[half], total)
        wholes[half] = left(start_gather(ready, tp), "gather", half)

    def left(message: UnderWay, what: str, half: int) -> UnderWay:
        if message.works:
            log(f"start {what} {half}")
        return message

    def came(message: UnderWay | None, what: str, half: int) -> Tensor | None:
        if message and message.works:
            log(f"wait {what} {half}")
        return message.wait() if message else None

    # --- exercise 4.35: every message starts before some product of the other half, and is waited for after it ---
    turns = [(halves[half][k], half) for k in range(len(halves[0])) for half in order]
    arrive(*turns[0])
    for (turn, half), following in zip(turns, [*turns[1:], None], strict=True):
        whole = came(wholes[half], "gather", half)
        log(f"{turn.names[0]} {half}")
        inner = turn.first(whole)
        del whole  # in backward this was the last reference
        if following and tp.sequence_parallel:  # `first` overlapped the other half's sum; `second` its gather
            arrive(*following)
        log(f"{turn.names[1]} {half}")
        sums[half] = left(start_sum(turn.second(inner), tp), "sum", half)
        if following and not tp.sequence_parallel:  # both parts of this turn overlapped the other half's sum
            arrive(*following)
    # --- end exercise ---
    return [came(sums[half], "sum", half) for half in (0, 1)]


class Piece:
    """A part of a sublayer with its own graph, so that the schedule decides when its backward runs."""

    def __init__(self, function: Callable[[Tensor], Tensor], weights: Sequence[Tensor], keep: bool):
        self.function, self.keep = function, keep
        self.weights = [w for w in weights if w.requires_grad]

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.keep):
            x = x.detach().requires_grad_(self.keep)
            y = self.function(x)
        self.dtype = y.dtype
        if self.keep:  # edges, not tensors, so that y can be freed before backward
            self.begin = get_gradient_edge(x)
            self.end = get_gradient_edge(y)
        return y.detach()

    def backward(self, dy: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
        """dy -> dx. The gradients of the weights are added to `gradients`."""
        inputs = [self.begin, *(get_gradient_edge(w) for w in self.weights)]
        dx, *dw = torch.autograd.grad([self.end], inputs, [dy])
        del self.begin, self.end
        for w, new in zip(self.weights, dw, strict=True):
            gradients[w] = gradients[w].add_(new) if w in gradients else new
        return dx


@contextmanager
def stand_ins(blocks: Sequence[nn.Module], keep: bool) -> Iterator[list[Tensor]]:
    """Replace each parameter by a private tensor with the same memory, at which the pieces' graphs end. Hooks
    on the parameter then run once, with the sum over both halves, instead of in every piece."""
    slots = [(m._parameters, name) for b in blocks for m in b.modules() for name in m._parameters]
    held = [place[name] for place, name in slots]
    others = {p: p.detach().requires_grad_(keep and p.requires_grad) for b in blocks for p in b.parameters()}
    try:
        for (place, name), p in zip(slots, held, strict=True):
            place[name] = others.get(p)
        yield list(others.values())
    finally:
        for (place, name), p in zip(slots, held, strict=True):
            place[name] = p


class InHalves(torch.autograd.Function):
    """All blocks as one node of autograd, so that each parameter gets one gradient, the sum over both halves."""

    @staticmethod
    def forward(ctx, x: Tensor, run: Run, *parameters: Tensor) -> Tensor:
        ctx.run = run
        return run.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dz: Tensor):
        run = ctx.run
        ctx.run = None
        if run is None:
            raise RuntimeError("backward through these halves a second time; run forward again")
        dx, gradients = run.backward(dz)
        return dx, None, *(gradients.get(w) for w in run.weights)


class Run:
    """One forward pass and its backward pass."""

    def __init__(self, blocks: Sequence[HalvedBlock], cos: Tensor, sin: Tensor, log: Log, keep: bool):
        self.blocks = blocks
        self.cos = cos
        self.sin = sin
        self.log = log
        self.keep = keep
        self.tp = blocks[0].tp

    def pieces_of_a_half(self, cos: Tensor, sin: Tensor) -> list[tuple[Piece, Piece, Piece]]:
        """(norm, products into heads or columns, product out of them) of each sublayer."""
        found = []
        for block in self.blocks:
            attention = block.self_attn
            mlp = block.mlp
            inner = partial(attention.inner, cos=cos, sin=sin)
            for norm, layer, into, out in (
                (block.input_layernorm, attention, inner, attention.o_proj),
                (block.post_attention_layernorm, mlp, mlp.inner, mlp.down_proj),
            ):
                weights = [w for name, w in layer.named_parameters() if not name.startswith(("o_proj", "down_proj"))]
                found.append(
                    (
                        Piece(partial(norm_and_cast, norm), list(norm.parameters()), self.keep),
                        Piece(into, weights, self.keep),
                        Piece(out, list(out.parameters()), self.keep),
                    )
                )
        return found

    def forward(self, x: Tensor) -> Tensor:
        streams = list(x.chunk(2))  # [B, S, H] -> [B/2, S, H] each; an odd row goes to the first half
        rows = [len(stream) for stream in streams]
        by_row = self.cos.dim() == 3  # each row has its own positions: tables [B, S, D/2]
        tables = [y.split(rows) if by_row else (y, y) for y in (self.cos, self.sin)]

        def arrive(norm: Piece, x: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
            x = x if total is None else x + total
            return x, norm.forward(x)

        with stand_ins(self.blocks, self.keep) as self.weights:
            self.pieces = [self.pieces_of_a_half(cos, sin) for cos, sin in zip(*tables, strict=True)]
            turns = [
                [Turn(partial(arrive, norm), into.forward, out.forward, ("into", "out")) for norm, into, out in half]
                for half in self.pieces
            ]
            totals = take_turns(turns, streams, (0, 1), self.tp, self.log)
        return torch.cat([x + total for x, total in zip(streams, totals, strict=True)])

    def backward(self, dz: Tensor) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """In reverse: the piece out of the heads or columns, the piece into them, then the norm before it."""
        streams = list(dz.chunk(2))
        gradients = {}

        def arrive(norm: Piece | None, out: Piece, dx: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
            dx = dx if total is None else dx + norm.backward(total, gradients)
            return dx, dx.to(out.dtype)  # if the partial sums were bf16, the gradient is sent in bf16

        turns = []
        for half in self.pieces:
            behind = [norm for norm, _, _ in half[1:]] + [None]  # norms whose gradient sum a turn receives
            turns.append(
                [
                    Turn(
                        partial(arrive, norm, out),
                        partial(out.backward, gradients=gradients),
                        partial(into.backward, gradients=gradients),
                        ("out", "into"),
                    )
                    for norm, (_, into, out) in zip(behind[::-1], half[::-1], strict=True)
                ]
            )
        totals = take_turns(turns, streams, (1, 0), self.tp, self.log)
        firsts = [half[0][0] for half in self.pieces]
        ends = zip(streams, firsts, totals, strict=True)
        return torch.cat([dx + norm.backward(total, gradients) for dx, norm, total in ends]), gradients


def norm_and_cast(norm: nn.Module, x: Tensor) -> Tensor:
    return under_autocast(norm(x))[0]  # cast first: half the bytes to gather, and to sum in backward


# ------------------------------------------------------------------------------------------------------ the blocks


class Here(torch.autograd.Function):
    """Column-parallel products that send nothing, because all tokens are already gathered."""

    @staticmethod
    def forward(ctx, x: Tensor, *weights: Tensor) -> Columns:
        ctx.save_for_backward(x, *weights)
        return products(x, weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        return input_gradient(grads, weights), *weight_gradients(grads, x)


def column_here(x: Tensor, weights: Sequence[Tensor], tp: TensorParallel, linear: Callable) -> Columns:
    """x [B, S, H] -> [B, S, out/t] for each weight. `take_turns` has gathered x."""
    x, *weights = under_autocast(x, *weights)
    return Here.apply(x, *weights) if linear is F.linear else tuple(linear(x, weight) for weight in weights)


def row_here(x: Tensor, weight: Tensor, tp: TensorParallel, linear: Callable) -> Tensor:
    """[B, S, in/t] -> this rank's partial [B, S, out]. `take_turns` sums it."""
    return linear(x, weight)


class HalvedBlock(ParallelBlock):
    """A ParallelBlock (same parameters, same names) that runs in halves; `in_halves` runs several of them.

    Without dropout, and with this chapter's MLP, because the schedule has to split it into two parts.
    """

    def __init__(self, config: Config, group: dist.ProcessGroup, sequence_parallel: bool, parts: Parts):
        super().__init__(config, TensorParallel(group, sequence_parallel, column_here, row_here), parts)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return through(x, [self], cos, sin, None)


def in_halves(x: Tensor, blocks: Sequence[HalvedBlock], cos: Tensor, sin: Tensor, log: Log | None = None) -> Tensor:
    """[B, S, H] or [B, S/t, H] through all blocks, in alternating halves of the rows. All ranks have B >= 2.

    ValueError if B is 1, or if a block has hooks, because its beginning and end fall into different turns.
    torch.utils.checkpoint around it is exact, but recomputes everything for every piece, since each piece has
    its own backward. Around parts.attention, which is within one piece, it recomputes only once.
    """
    for i, block in enumerate(blocks):
        if has_hooks(block):
            raise ValueError(f"block {i} has hooks, but the halves go through all blocks at once; call them one by one")
    return through(x, blocks, cos, sin, log)


def through(x: Tensor, blocks: Sequence[HalvedBlock], cos: Tensor, sin: Tensor, log: Log | None) -> Tensor:
    if len(x) < 2:
        raise ValueError(f"a batch of {len(x)} row has no halves; use 2 rows or more, or column_overlapped")
    for i, block in enumerate(blocks):
        for name in ("self_attn", "mlp"):
            if has_hooks(block.get_submodule(name)):
                raise ValueError(f"block {i}: {name} has hooks, but the halves only call its layers; hook these")
    parameters = list(dict.fromkeys(p for block in blocks for p in block.parameters()))  # blocks may share weights
    keep = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))
    return InHalves.apply(x, Run(blocks, cos, sin, log or (lambda event: None), keep), *parameters)


def has_hooks(module: nn.Module) -> bool:
    return any((module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks))


# ------------------------------------------------------------------------------------------------------------- demo


def hidden(events: Sequence[str]) -> tuple[int, int]:
    """(messages with a product between their start and their wait, all messages)."""
    found = []
    for i, event in enumerate(events):
        if event.startswith("start"):
            until = events.index(event.replace("start", "wait"), i)
            found.append(any(not e.startswith(("start", "wait")) for e in events[i:until]))
    return sum(found), len(found)


def demo(args: argparse.Namespace, config: Config, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The same blocks in halves and on the full batch."""
    B = args.rows
    S = args.sequence
    L = args.layers
    t = dist.get_world_size(group)
    report = Report(group)
    table = initial_weight("embed.weight", (256, config.hidden), 1, seed=0)
    x = F.embedding(tokens_of_text(B, S), table).to(device, torch.float64)
    cos, sin = rope_tables(torch.arange(S, device=device), config.hidden // config.heads, config.rope_theta)
    for sequence in (False, True):
        tp = TensorParallel(group, sequence, column=column_simple)
        mine = Shard(S, 1, t if sequence else 1, tp.rank if sequence else 0).cut  # [B, S/t, H] of [B, S, H]
        results = []
        events = []
        middle = 0
        for halved in (False, True):
            make = partial(HalvedBlock, config, group, sequence) if halved else partial(ParallelBlock, config, tp)
            blocks = nn.ModuleList(make(Parts()) for _ in range(L))
            init_weights(blocks, layers=L, seed=0)
            blocks.to(device, torch.float64)
            my_x = mine(x).clone().requires_grad_()
            run = partial(in_halves, log=events.append) if halved else one_by_one
            forward = partial(run, my_x, list(blocks), cos, sin)
            with Wire(t) as wire:
                z, kept = kept_for_backward(forward, [*blocks.parameters(), cos, sin])
                middle = len(events)
                z.backward(z.detach())
            results.append([z.detach(), my_x.grad, *(p.grad for p in blocks.parameters())])
        for got, want in zip(results[1], results[0], strict=True):
            report.compare(got, want)
        report.title(f"{t} rank(s), {L} blocks in halves, tensor parallel{' and sequence parallel' * sequence}")
        report.add_errors("largest difference from whole batches", 1e-12)
        report.add("bytes sent by a rank", L * 8 * (t - 1) * x.nbytes // t, wire.bytes)
        parts = kept_bytes(config, B, S, tp, x.element_size(), gather_again=False)
        want = L * sum(parts.values())
        report.add("bytes kept for backward", want, kept, kept >= want if device.type != "cpu" else None)
        messages = 4 * L * (1 + sequence)
        behind = (messages - 1 - sequence, messages)
        report.add("hidden messages, all messages: forward", behind, hidden(events[:middle]))
        report.add("hidden messages, all messages: backward", behind, hidden(events[middle:]))
    return report.finish()


def main() -> None:
    parser = OneLineParser(description="Tensor parallelism in halves.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--sequence", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    # With one position softmax is 1 and the gradients of q and k are zero, so there is nothing to compare.
    for option, least in (("rows", 2), ("sequence", 2), ("layers", 1)):
        if not least <= getattr(args, option) <= 256:
            parser.error(f"--{option} {getattr(args, option)} is not in {least} .. 256")
    config = Config()
    try:
        check_sizes(config, int(os.environ.get("WORLD_SIZE", "1")), args.sequence)
    except ValueError as error:
        parser.error(str(error))
    launch(lambda group, device: demo(args, config, group, device))


if __name__ == "__main__":
    main()
