"""Stages 1 and 2 whose new weights travel during the next forward: step() sends them off, the first use waits.

Problem. In stages 1 and 2 the step ends with an all-gather of all weights, and nothing computes meanwhile: each bucket
travels while the next is updated, but an update takes a fraction of the time that its gather takes.

Idea. The first layer needs its own weights, not those of the last. Let step() return while buckets are on their way,
the first layer's first, and let each parameter wait for its own bucket when somebody first uses its values:

    zero_stages.py   update | 3 | 2 | 1 | 0 |                   |
                     gather     | 3 . . | 2 . . | 1 . . | 0 . . |
                     forward                                    | layer 0 | layer 1 | layer 2 | layer 3 |

    here             update | 0 | 1 | 2 | 3 |
                     gather     | 0 . . | 1 . . | 2 . . | 3 . . |        bucket 0 has the first layer here
                     forward            | layer 0 | layer 1 | layer 2 | layer 3 |

Who waits? Megatron-LM waits in hooks before each module's forward. A weight that is used outside its module's forward,
or in another order, is then used too early, in silence, or the ranks hang (its issues 663, 728 and 950). Here the
parameter itself waits: while it travels it is of a class that waits as soon as a function wants its values.

Formulas, for Psi parameters with weights of 2 bytes (arXiv 1910.02054, section 7.2.1):
    holds, sends    as stages 1 and 2: the same gathers, later
    hidden          the gather of a bucket behind the forward of the buckets before it. At b bytes and f operations a
                    second, with T tokens a rank: 2 Psi / b <= 2 Psi T / f, so T >= f / b, as for stage 3's prefetch
    not hidden      the first bucket's: keep it small
nccl does the collectives of a group one after the other. A sum over the same group right after step(), say of a
batch's tokens, would wait for all gathers, and the forward with it: give such sums a group of their own.

Run it:
    python zero_overlap.py                                           one rank, CPU or GPU
    torchrun --nproc_per_node 2 zero_overlap.py --stage 1            gloo on CPU, nccl on GPU; prints the order
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _zero_demo import OneLineParser, report, world
from torch import nn
from torch.utils._pytree import tree_leaves
from zero3 import ALLOWED_WITHOUT_VALUES
from zero_stages import Zero1, Zero2, demo

# N is the number of ranks.


class Arrival:
    """The gather of one bucket. `log` is told when somebody has to wait for it."""

    def __init__(self, index: int, works: list[Any], log: list[tuple[str, Any]]):
        self.index, self.works, self.log = index, works, log

    def wait(self) -> None:
        if self.works:
            self.log.append(("wait", self.index))
        while self.works:
            self.works.pop().wait()


class Travelling(nn.Parameter):
    """What a parameter is while its bucket travels. Its shape and its gradient can be had; its values are waited for.

    It refers to the gather only, not to who has started it, so nothing is kept alive by a weight that nobody uses.
    """

    arrival = Arrival(0, [], [])  # of a deep copy, which is of this class too, but had to wait to be made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):  # an attribute
            name = func.__self__.__name__
        if name not in ALLOWED_WITHOUT_VALUES:
            # --- exercise 3.51: the first use of values that may not be here yet ---
            for p in tree_leaves((args, kwargs)):
                if isinstance(p, Travelling):
                    p.arrival.wait()
                    p.__class__ = nn.Parameter  # from now on it is like any other, and as fast
            # --- end exercise ---
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Overlapped1(Zero1):
    """Stage 1 whose gathers end in the next forward: one new idea. As `Zero1`, but step() does not wait.

    Weights may be read, saved and evaluated at any time: whoever comes first waits. Before the group is destroyed,
    `arrive()` waits for what nobody has used. `log` has, since the last step(), ("update" | "gather" | "wait", bucket)
    in order.
    """

    def __init__(self, *args: Any, **options: Any):
        self.arrivals: dict[int, Arrival] = {}
        self.log: list[tuple[str, Any]] = []
        super().__init__(*args, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Update my shards and send them off, in the order in which forward will need them."""
        self.check_finished()
        self.arrive()  # without a forward in between: an update must not write what is still being sent
        self.log = []
        # --- exercise 3.52: whose weights does forward need first? And who waits? ---
        for index in reversed(range(len(self.buckets))):  # buckets are in the order of backward
            self.update(index)
            self.send_off(index)
        # --- end exercise ---

    def update(self, index: int) -> None:
        super().update(index)
        self.log.append(("update", index))

    def send_off(self, index: int) -> None:
        """Start the gather of a bucket; its parameters travel from now on."""
        self.log.append(("gather", index))
        self.arrivals[index] = Arrival(index, self.publish(index), self.log)
        for p in self.buckets[index].params:
            p.arrival = self.arrivals[index]  # type: ignore[attr-defined]
            p.__class__ = Travelling

    def arrive(self) -> None:
        """Wait for all that is on its way."""
        for arrival in self.arrivals.values():
            arrival.wait()
        self.arrivals.clear()


class Overlapped2(Overlapped1, Zero2):
    """Stage 2 the same way."""

    stage = 2


def make_overlapped(
    stage: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    *,
    units: Iterable[nn.Module] = (),
    master: torch.dtype | None = None,
    **options: Any,
) -> Overlapped1:
    """`make_zero` for stages 1 and 2, with gathers that end in the next forward. (Stage 3 has no other gathers.)"""
    if type(stage) is not int or stage not in (1, 2):
        raise ValueError(f"stage {stage!r} has no gather in its step; use 1 or 2")
    return (Overlapped1, Overlapped2)[stage - 1](module, optimizer, group, master=master, **options)


# ------------------------------------------------------------------------------------------------------------- demo


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--stage", type=int, choices=[1, 2], default=2, help="stage 3 gathers in forward anyway")
    args = parser.parse_checked()
    kind = (Overlapped1, Overlapped2)[args.stage - 1]
    with world() as (group, device):
        made: list[Overlapped1] = []
        seen: list[list[tuple[str, Any]]] = []  # the log of the last step that a forward has followed

        def make(module: Any, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup, **options: Any) -> Any:
            made.append(kind(module, optimizer, group, **{"bucket_bytes": 2**17, **options}))
            for i, layer in enumerate(module.layers):
                layer.register_forward_pre_hook(partial(note, made[-1], f"layer {i}"))
            return made[-1]

        def note(zero: Overlapped1, layer: str, *_: Any) -> None:
            if ("forward", layer) not in zero.log:  # else it is another micro-batch
                zero.log.append(("forward", layer))
            if zero.log[0][0] == "update":
                seen[:] = [zero.log]

        rows = demo(args.stage, make, group, device)
        while made:  # each holds the group, which is about to go
            made.pop().arrive()
        log = seen[0]
        # Bucket 0 has the last layer and the head. The log knows when somebody waits for it, not when it arrives: the
        # demo reads whole weights after each step, over the same group, so on nccl all gathers may have ended by then.
        late = log.index(("wait", 0)) > log.index(("forward", "layer 0"))
        rows.append(("layer 0 begins, nobody waits for the last bucket", "True", late, late))
        if dist.get_rank(group) == 0:
            print(f"stage {args.stage} on {dist.get_world_size(group)} {device.type} rank(s); after a step came")
            said = ", ".join(f"{what} {who}".replace(" ", "\0") for what, who in log)
            print("\n".join(f"  {line}" for line in textwrap.wrap(said.replace(",\0", ", "), 116)).replace("\0", " "))
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
