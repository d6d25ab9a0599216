"""A slow network: collectives whose results are NaN until somebody waits for them."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor


class Late:
    """Stands in for a collective. Until it is waited for, what it writes is NaN, so that a read that is too early and a
    missing wait both show. `events` tells the order: ("start", name), ("wait", name); without a name, its number.
    """

    def __init__(self, collective: Callable[..., Any], events: list | None = None, name: str | None = None) -> None:
        self.collective, self.name, self.started = collective, name, 0
        self.events = [] if events is None else events

    def __call__(self, output: Tensor, *inputs: Any, async_op: bool = False, **options: Any) -> Any:
        if not async_op:
            return self.collective(output, *inputs, **options)
        name = self.started if self.name is None else self.name
        self.started += 1
        self.events.append(("start", name))
        arrives = output.clone()
        self.collective(arrives, *inputs, **options)  # it is over before the output is spoiled, which may be an input
        output.fill_(math.nan)

        def wait() -> None:
            output.copy_(arrives)
            self.events.append(("wait", name))

        return SimpleNamespace(wait=wait)
