"""Is the parallel run the same as the unsharded one?

From the same weights and the same global batch, a parallel run must have the reference's loss, every gradient at every
step, and the weights after three steps of plain SGD: to 1e-10 in float64, to 1e-5 in float32. SGD, because a
gradient that is N times too large moves the weights N times too far, while Adam divides by the factor.

The error of a tensor is max|got - want| / max|want|, so that an absolute tolerance does not hide errors of a
small gradient; it is absolute where `want` is zero everywhere. A NaN on either side, another shape, or a
gradient that is None on only one side is always a failure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

FLOAT64, FLOAT32 = 1e-10, 1e-5  # tolerances


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers of a seed of their own, drawn in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def error_between(got: Tensor, want: Tensor) -> float:
    """max|got - want| / max|want|, in float64; absolute if `want` is all zero or empty. NaN and infinities give NaN.

    ValueError for unequal shapes: torch would broadcast one, and call an empty one equal to all."""
    if got.shape != want.shape:
        raise ValueError(f"shapes {list(got.shape)} and {list(want.shape)} cannot be compared")
    got, want = got.detach().to("cpu", torch.float64), want.detach().to("cpu", torch.float64)
    if want.numel() == 0:
        return 0.0
    largest = want.abs().max().item()
    return (got - want).abs().max().item() / (largest if largest > 0 else 1.0)


def assert_same(
    got: Tensor | float | None,
    want: Tensor | float | None,
    tol: float = FLOAT64,
    what: str = "the result",
    rank: int | None = None,
) -> None:
    """Raise AssertionError, naming `what`, rank and largest difference, unless `got` equals `want` within `tol`."""
    where = what if rank is None else f"{what} on rank {rank}"
    if got is None or want is None:
        if got is not want:
            raise AssertionError(f"{where}: {_describe(got)}, but should be {_describe(want)}")
        return
    got, want = _as_tensor(got), _as_tensor(want)
    if got.shape != want.shape:
        raise AssertionError(f"{where}: shape {list(got.shape)}, but should be {list(want.shape)}")
    error = error_between(got, want)
    if not (error <= tol):  # not "error > tol": that is False for NaN
        raise AssertionError(f"{where}: {_difference(got, want, error)}, more than {tol:g}")


def assert_same_named(
    got: Mapping[str, Tensor | None],
    want: Mapping[str, Tensor | None],
    tol: float = FLOAT64,
    what: str = "tensor",
    rank: int | None = None,
) -> None:
    """`assert_same` for every entry; both must have the same names. Lists the worst entries, worst first."""
    where = "" if rank is None else f" on rank {rank}"
    if got.keys() != want.keys():
        missing, extra = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
        raise AssertionError(f"{what}{where}: missing {missing}, unexpected {extra}")
    wrong: list[tuple[float, str]] = []
    for name in want:
        try:
            assert_same(got[name], want[name], tol, f"{what} {name}", rank)
        except AssertionError as mismatch:
            a, b = got[name], want[name]
            comparable = a is not None and b is not None and a.shape == b.shape
            error = error_between(a, b) if comparable else float("nan")  # type: ignore[arg-type]
            wrong.append((error if error == error else float("inf"), str(mismatch)))
    if wrong:
        wrong.sort(key=lambda entry: -float(f"{entry[0]:.6g}"))  # rounding must decide no tie
        lines = [message for _, message in wrong[:5]]
        raise AssertionError("\n".join([*lines, f"({len(wrong)} of {len(want)} differ)"]))


@dataclass
class Trace:
    """The results of a few SGD steps: the loss and the gradients of each step, the weights at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def sgd_trace(
    parameters: Mapping[str, nn.Parameter], backward: Callable[[int], float], *, steps: int = 3, lr: float = 0.1
) -> Trace:
    """Train `steps` steps of plain SGD and record everything.

    `backward(step)` computes the loss, leaves the final gradients in `.grad` (after any reduction) and returns the
    loss of the global batch. Gradients are None when it is called.
    """
    trace = Trace()
    for step in range(steps):
        for parameter in parameters.values():
            parameter.grad = None
        trace.losses.append(float(backward(step)))
        gradients = {name: p.grad for name, p in parameters.items()}
        trace.gradients.append({name: None if g is None else g.detach().clone() for name, g in gradients.items()})
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.sub_(lr * parameter.grad)
    trace.weights = {name: p.detach().clone() for name, p in parameters.items()}
    return trace


def adamw_by_hand(
    model: nn.Module, tokens: Tensor, labels: Tensor, lr: float, max_norm: float
) -> tuple[list[float], list[float]]:
    """Losses and norms of three steps: torch's mean, autograd, clipping by the formula, torch's own AdamW."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=False, foreach=False)
    losses, norms = [], []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        gradients = torch.autograd.grad(loss, parameters)
        norms.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item())
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g * min(1.0, max_norm / (norms[-1] + 1e-6))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def assert_same_trace(got: Trace, want: Trace, tol: float = FLOAT64, rank: int | None = None) -> None:
    """Loss and every gradient of every step, then the weights. The first step that differs is the one reported."""
    if len(got.losses) != len(want.losses):
        raise AssertionError(f"{len(got.losses)} steps, but should be {len(want.losses)}")
    for step in range(len(want.losses)):
        assert_same(got.losses[step], want.losses[step], tol, f"loss of step {step}", rank)
        assert_same_named(got.gradients[step], want.gradients[step], tol, f"step {step}, gradient of", rank)
    assert_same_named(got.weights, want.weights, tol, f"after {len(want.losses)} steps, weight", rank)


def assert_same_traces(
    ranks: Sequence[Trace | Sequence[Trace] | Mapping[str, Trace]], want: Trace, tol: float = FLOAT64
) -> None:
    """`assert_same_trace` for each rank, which has one trace or several."""
    for rank, traces in enumerate(ranks):
        every = [traces] if isinstance(traces, Trace) else traces
        for got in every.values() if isinstance(every, Mapping) else every:
            assert_same_trace(got, want, tol, rank)


def _as_tensor(value: Tensor | float) -> Tensor:
    """A Python float has 53 bits of mantissa; torch would make it a float32, and 1 + 1e-9 would become 1."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _describe(value: Tensor | float | None) -> str:
    return "None" if value is None else "a tensor" if isinstance(value, Tensor) else str(value)


def _difference(got: Tensor, want: Tensor, error: float) -> str:
    """The size of the difference, where it is largest, and, if there is one, the common factor of `got`."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if got.isnan().any() or want.isnan().any():
        return f"{int(got.isnan().sum())} NaN in the result, {int(want.isnan().sum())} in what it should be"
    at = int((got - want).abs().argmax())
    text = (
        f"largest difference {error:.3g} (relative): {got.flatten()[at]:.10g}, but should be {want.flatten()[at]:.10g}"
    )
    factor = (got * want).sum() / (want * want).sum() if want.any() else torch.tensor(1.0)
    if error > 1e-3 and want.numel() > 1 and error_between(got, factor * want) < 1e-6:
        text += f"; everything is {factor:.6g} times what it should be"
    return text
