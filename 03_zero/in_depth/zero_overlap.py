"""Stages 1 and 2 that all-gather new weights during the next forward: step() returns, the first use waits.

Problem. In stages 1 and 2 the step ends with an all-gather of all weights, which computation hardly overlaps:
a bucket is in flight while the next is updated, but an update takes a fraction of its gather's time.

Idea. The first layer needs only its own weights. Start the gathers in the order of forward, return from
step() while they are in flight, and let each parameter wait for its bucket when its values are first used:

    zero_stages.py   update | 3 | 2 | 1 | 0 |                   |
                     gather     | 3 . . | 2 . . | 1 . . | 0 . . |
                     forward                                    | layer 0 | layer 1 | layer 2 | layer 3 |

    here             update | 0 | 1 | 2 | 3 |
                     gather     | 0 . . | 1 . . | 2 . . | 3 . . |        bucket 0 has the first layer here
                     forward            | layer 0 | layer 1 | layer 2 | layer 3 |

Where to wait? Megatron-LM waits in hooks before each module's forward. A weight used outside its module's
forward, or in another order, is then silently used too early, or the ranks hang (its issues 663, 728, 950).
Here the parameter itself waits: while in flight it has a class that waits when a function needs its values.

Formulas, for Psi parameters with weights of 2 bytes (arXiv 1910.02054, section 7.2.1):
    stores, sends   as stages 1 and 2: the same gathers, later
    hidden          a bucket's gather, behind the forward of earlier buckets. At b bytes and f operations per
                    second and T tokens per rank, 2 Psi / b <= 2 Psi T / f, so T >= f / b, as in stage 3
    not hidden      the first bucket's gather: keep that bucket small
NCCL runs the collectives of a group one after the other. A sum over the same group right after step(), say of
a batch's tokens, would wait for all gathers and delay the forward: use another group for such sums.

Run it:
    python zero_overlap.py                                           one rank, CPU or GPU
    torchrun --nproc_per_node 2 zero_overlap.py --stage 1            Gloo on CPU, NCCL on GPU; prints the order
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
    """The pending gather of one bucket. A wait for it is recorded in `log`."""

    def __init__(self, index: int, works: list[Any], log: list[tuple[str, Any]]):
        self.index = index
        self.works = works
        self.log = log

    def wait(self) -> None:
        if self.works:
            self.log.append(("wait", self.index))
        while self.works:
            self.works.pop().wait()


class Travelling(nn.Parameter):
    """The class of a parameter in flight. Shape and gradient are available; a use of its values waits.

    It refers to the gather only, so that an unused weight does not keep the optimizer alive.
    """

    arrival = Arrival(0, [], [])  # of a deep copy: it has this class, but the copying has waited

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
                    p.__class__ = nn.Parameter  # from now on an ordinary parameter, and as fast
            # --- end exercise ---
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Overlapped1(Zero1):
    """Stage 1 whose gathers end in the next forward: one new idea. As `Zero1`, but step() does not wait.

    Weights may be read, saved and evaluated at any time, because the first use waits. Call `arrive()` before
    the group is destroyed, to wait for unused weights. `log` has the events since the last step() in order,
    each ("update" | "gather" | "wait", bucket).
    """

    def __init__(self, *args: Any, **options: Any):
        self.arrivals: dict[int, Arrival] = {}
        self.log: list[tuple[str, Any]] = []
        super().__init__(*args, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Update my shards and start their all-gathers, in the order in which forward will need them."""
        self.check_finished()
        self.check_in_place()
        self.arrive()  # without a forward in between: an update must not write what is still being sent
        self.log = []
        # --- exercise 3.52: which weights does forward need first? And where is the wait? ---
        for index in reversed(range(len(self.buckets))):  # buckets are in the order of backward
            self.update(index)
            self.send_off(index)
        # --- end exercise ---

    def update(self, index: int) -> None:
        super().update(index)
        self.log.append(("update", index))

    def send_off(self, index: int) -> None:
        """Start the gather of a bucket; from now on its parameters are in flight."""
        self.log.append(("gather", index))
        self.arrivals[index] = Arrival(index, self.publish(index), self.log)
        for p in self.buckets[index].params:
            p.arrival = self.arrivals[index]  # type: ignore[attr-defined]
            p.__class__ = Travelling

    def arrive(self) -> None:
        """Wait for all weights in flight."""
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
    **options: Any,
) -> Overlapped1:
    """`make_zero` for stages 1 and 2, with gathers that end in the next forward. (Stage 3 has no other gathers.)"""
    if type(stage) is not int or stage not in (1, 2):
        raise ValueError(f"stage {stage!r} has no gather in its step; use 1 or 2")
    return (Overlapped1, Overlapped2)[stage - 1](module, optimizer, group, **options)


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
        while made:  # each refers to the group, which is destroyed next
            made.pop().arrive()
        log = seen[0]
        # Bucket 0 has the last layer and the head. The log has the wait for it, not its arrival: the demo
        # reads full weights after each step, over the same group, so with NCCL all gathers may have ended.
        late = log.index(("wait", 0)) > log.index(("forward", "layer 0"))
        rows.append(("layer 0 begins, no wait for the last bucket", "True", late, late))
        if dist.get_rank(group) == 0:
            print(f"stage {args.stage} on {dist.get_world_size(group)} {device.type} rank(s); after a step came")
            said = ", ".join(f"{what} {who}".replace(" ", "\0") for what, who in log)
            print("\n".join(f"  {line}" for line in textwrap.wrap(said.replace(",\0", ", "), 116)).replace("\0", " "))
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
