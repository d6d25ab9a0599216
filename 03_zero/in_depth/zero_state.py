"""The full state of a sharded run: gathered by name, and loaded at another stage or world size.

Problem. With ZeRO no rank has the full optimizer state, and the shards are slices of buckets that depend on
world size and stage. A checkpoint of shards would tie the rest of the run to today's machines.

Idea. Save the state in the form it has without ZeRO: one full tensor for each parameter and kind, under the
parameter's name. To save, gather a bucket, split it into parameters, drop the padding; to load, reverse:

    shard of rank 0   | exp_avg: a a a a |
    shard of rank 1   | exp_avg: a b b - |   --all-gather-->   | a a a a a b b - |   --split--> a: [5]  b: [2]
                                                                       padding ^ is dropped

    a: [5]   b: [2]   --flatten, at 4 ranks-->   | a a | a a | a b | b - |   --own shard-->   rank 2:  | a b |

    {"weights":   {"layers.0.up.weight": tensor, ...},
     "optimizer": {"layers.0.up.weight": {"step": 7, "exp_avg": tensor, "exp_avg_sq": tensor, "master": tensor}, ...}}

The weights of a bf16 model are not enough, because they are rounded. "master" has the fp32 weights that the
optimizer updates. Resuming without them would lose all small updates that do not show in bf16 yet.

Formulas, for a bucket of n padded elements of e bytes and N ranks:
    sent      (N-1)/N n e for each kind of state and for the weights; loading sends nothing at stage 3, and one
              all-gather of the weights at stages 1 and 2
    memory    one gathered bucket at a time on the device, the full state in host memory
Learning rates and the like are options of a run, not its state, and are not saved here.

Run it:
    python zero_state.py                                     one rank, CPU or GPU
    torchrun --nproc_per_node 4 zero_state.py                4 ranks at stage 3, then resume on 2 at stage 1
The last line is PASS, or the script exits with 1 and says which number is off.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _zero_demo import IGNORE, Decoder, OneLineParser, Row, error, make_batch, report, train_step, world, worst_of
from torch import Tensor
from zero3 import make_zero
from zero_stages import Zero1

FullState = dict[str, dict[str, Any]]


def per_element(kind: str) -> bool:
    """Has this kind of state one value for each element of a parameter? `step` is one counter for all."""
    return kind != "step"  # testing for 0 dimensions would fail: a scalar parameter's moments have none


def counter_on(device: torch.device | str, value: Any) -> Any:
    """A copy of a counter that shares no memory with it: a tensor on this device, or a plain number."""
    return value.to(device, copy=True) if isinstance(value, Tensor) else deepcopy(value)


@torch.no_grad()
def full_state_dict(zero: Zero1) -> FullState:
    """{"weights": {name: tensor}, "optimizer": {name: {kind: tensor or counter}}} in host memory, on every rank.

    All ranks of the group call it between two steps. The result depends on neither world size nor stage.
    """
    weights = {name: tensor.cpu() for name, tensor in zero.full_weights().items()}
    states: dict[str, dict[str, Any]] = {name: {} for name in zero.names.values()}
    for some in gathered_states(zero):
        for name, state in some.items():
            states[name] |= state
    return {"weights": weights, "optimizer": states}


@torch.no_grad()
def gathered_states(zero: Zero1) -> Iterator[dict[str, dict[str, Any]]]:
    """{name: {kind: tensor or counter}} in host memory, for one bucket and one kind of state after the other.

    All ranks of the group exhaust it, between two steps. If the caller keeps none, one bucket is in memory.
    """
    held = zero.state
    for index, bucket in enumerate(zero.buckets):
        segments = [segment for _, _, segment in zero.segments[index]]
        for kind, value in held[segments[0]].items():
            states: dict[str, dict[str, Any]] = {zero.names[p]: {} for p in bucket.params}
            # --- exercise 3.32: from shards to whole tensors by name ---
            if per_element(kind):
                shard = torch.cat([held[segment][kind] for segment in segments])  # [S]
                for name, tensor in zero.whole(index, shard):
                    states[name][kind] = tensor.cpu()
            else:
                for p in bucket.params:
                    states[zero.names[p]][kind] = counter_on("cpu", value)
            # --- end exercise ---
            yield states


@torch.no_grad()
def load_full_state_dict(zero: Zero1, full: FullState) -> None:
    """Load weights and optimizer states that were saved at any world size and stage.

    All ranks of the group call it between two steps, with the same state. If the state is of another model,
    raises ValueError, naming a parameter, before anything has changed.
    """
    weights = full["weights"]
    states = full["optimizer"]
    check_full_state(zero, weights, states)
    zero.load_frozen(weights)
    load_buckets(zero, weights, states)


@torch.no_grad()
def load_buckets(zero: Zero1, weights: Mapping[str, Tensor], everything: Mapping[str, Mapping[str, Any]]) -> None:
    """`load_full_state_dict` without its checks and without frozen weights.

    A rank reads a tensor only if some of its elements are in the rank's shard, and frees it once they are
    copied, so the mappings may read from a disk. All ranks of the group call it between two steps.
    """
    zero.arrive()
    for index, bucket in enumerate(zero.buckets):
        states = {zero.names[p]: everything[zero.names[p]] for p, _, _ in bucket.pieces()}  # only what I need
        # --- exercise 3.33: the optimizer works on the master weights, where there are any ---
        masters = {name: state.get("master", weights[name]) for name, state in states.items()}
        zero.masters[index].copy_(shard_of(zero, index, masters))
        # --- end exercise ---
        first = everything[zero.names[bucket.params[0]]]
        dtype = zero.masters[index].dtype  # that of the moments, whatever they were saved in
        dtype = dtype if zero.fused is None else torch.promote_types(dtype, torch.float32)
        kinds = {}
        for kind in first:
            if per_element(kind) and kind != "master":
                kinds[kind] = shard_of(zero, index, {name: state[kind] for name, state in states.items()}).to(dtype)
            elif kind != "master":
                kinds[kind] = first[kind]
        inner = zero.inner[index]
        for options, (_, where, segment) in zip(inner.param_groups, zero.segments[index], strict=True):
            beside = segment.device if options.get("fused") else "cpu"  # a fused one counts on the device
            inner.state[segment] = {
                kind: value[where].clone() if per_element(kind) else counter_on(beside, value)
                for kind, value in kinds.items()
            }
        for work in zero.publish(index):
            work.wait()


def shard_of(zero: Zero1, index: int, whole: dict[str, Tensor]) -> Tensor:
    """My shard [S] of a bucket, from the full tensors with elements in it, by name. Padding is zero."""
    bucket = zero.buckets[index]
    mine_of = zero.masters[index]
    dtype = next((tensor.dtype for tensor in whole.values()), mine_of.dtype)  # my shard may be all padding
    shard = torch.zeros(bucket.shard_numel, dtype=dtype, device=mine_of.device)
    # --- exercise 3.34: from whole tensors by name to my shard of the bucket ---
    for p, mine, theirs in bucket.pieces():
        shard[mine] = whole[zero.names[p]].flatten()[theirs].to(shard.device)
    # --- end exercise ---
    return shard


def check_full_state(zero: Zero1, weights: dict[str, Tensor], states: dict[str, dict[str, Any]]) -> None:
    """ValueError, naming a parameter, if this is the state of another model."""
    named = {name: p for p, name in zero.everything.items()}
    for name, p in named.items():
        if name not in weights:
            raise ValueError(f"the state has no weight {name!r}: it is that of another model")
        if weights[name].shape != p.shape:
            raise ValueError(
                f"weight {name!r} has shape {list(weights[name].shape)} in the state, {list(p.shape)} here"
            )
    for name in weights:
        if name not in named:
            raise ValueError(f"the state has a weight {name!r}, which this model does not have")
    first = next(iter(zero.names.values()))
    if first not in states:
        raise ValueError(f"the state has nothing of the optimizer for {first!r}")
    for name, p in zip(zero.names.values(), zero.names, strict=True):
        kinds = sorted(states.get(name, {}).keys() - {"master"})  # weights of the master's dtype have none
        expected = sorted(states[first].keys() - {"master"})
        if name not in states or kinds != expected:
            raise ValueError(f"the state has {kinds} for {name!r} but {expected} for {first!r}; one step updates all")
        for kind, value in states[name].items():
            if per_element(kind):
                if value.shape != p.shape:
                    raise ValueError(f"{kind} of {name!r} has shape {list(value.shape)}, the weight {list(p.shape)}")
            elif float(value) != float(states[first][kind]):
                raise ValueError(
                    f"{kind} is {float(value):g} for {name!r}, {float(states[first][kind]):g} for {first!r}"
                )


# ------------------------------------------------------------------------------------------------------------- demo


def trained(group: dist.ProcessGroup, stage: int, steps: range, device: torch.device, state: FullState | None) -> Any:
    """A sharded model after these steps of a run whose global batches are the same for every number of ranks."""
    torch.manual_seed(0)
    model = Decoder(tied=True).to(device, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = make_zero(stage, model, optimizer, group, units=model.layers)
    if state:
        load_full_state_dict(zero, state)
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    for step in steps:
        samples = make_batch(step, 1, micro_batches=4)[0]
        nothing = (samples[0][0], torch.full_like(samples[0][1], IGNORE))  # all ranks need equally many
        mine = [*samples, *[nothing] * (-len(samples) % ranks)][rank::ranks]
        train_step(model, zero, [(x.to(device), y.to(device)) for x, y in mine])
        zero.step()
    return zero


def main() -> None:
    OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False).parse_checked()
    rows: list[Row] = []
    with world() as (group, device):
        ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        straight = full_state_dict(trained(group, 2, range(4), device, None))
        saved = full_state_dict(trained(group, 3, range(2), device, None))
        half = max(ranks // 2, 1)
        few = dist.new_group(list(range(half)), timeout=timedelta(seconds=60))
        if rank < half:
            resumed = full_state_dict(trained(few, 1, range(2, 4), device, saved))
            worst = worst_of(
                error(got[kind], want[kind])
                for got, want in (
                    (resumed["weights"], straight["weights"]),
                    *((resumed["optimizer"][name], state) for name, state in straight["optimizer"].items()),
                )
                for kind in want
            )
            what = f"4 steps; or 2, save, load on {half} rank(s), 2 more"
            rows.append((what, "<= 1e-10", f"{worst:.1e}", worst <= 1e-10))
        names = len(saved["optimizer"])
        numbers = sum(t.numel() for t in saved["weights"].values())
        moments = sum(s["exp_avg"].numel() for s in saved["optimizer"].values())
        rows.append((f"momentum saved for {names} parameters", numbers, moments, numbers == moments))
        if rank == 0:
            print(f"saved at stage 3 on {ranks} {device.type} rank(s), loaded at stage 1 on {half}")
        right = report(rows, group)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
