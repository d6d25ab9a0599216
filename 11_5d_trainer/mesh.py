"""Which rank does what: the grid of ranks, and the group of each rank along each axis.

    dp = 2, cp = 2, tp = 2: eight ranks                 groups of rank 5 (dp 1, cp 0, tp 1)

                    cp 0      cp 1                      tp     4 5        share every layer
          dp 0     [0 1]     [2 3]                      cp     5 7        share a sequence
          dp 1     [4 5]     [6 7]                      dp     1 5        see different samples
                    tp ->     tp ->                     data   1 3 5 7    hold the same weights: gradients are summed

Tensor-parallel ranks talk most and are innermost, next to each other: on a cluster they stay inside a node. The context
axis is itself a grid of `ring` x `ulysses`, so that both can be used at once; one of them is usually 1.

The grid is one tensor, and a group is what remains of it when the other axes are fixed. All groups are made here and
handed to the techniques as arguments; nothing else asks for the world's size.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

AXES = ("dp", "ring", "ulysses", "tp")  # outermost first
GROUPS = {
    "tp": ("tp",),
    "ring": ("ring",),
    "ulysses": ("ulysses",),
    "data": ("dp", "ring", "ulysses"),  # the ranks that hold the same weights
}


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, this rank's place on each, and its groups by name."""

    sizes: dict[str, int]
    place: dict[str, int]
    groups: dict[str, dist.ProcessGroup]

    @property
    def cp(self) -> int:
        return self.sizes["ring"] * self.sizes["ulysses"]

    @property
    def cp_rank(self) -> int:
        return self.place["ring"] * self.sizes["ulysses"] + self.place["ulysses"]


def make_mesh(dp: int, ring: int, ulysses: int, tp: int, timeout: float = 300.0) -> Mesh:
    """Lay the whole world out on the grid. Every rank calls it; it makes every group, also those of others.

    A collective that waits for a stuck rank fails after `timeout` seconds. Each group has to be told: a new group does
    not take over the world's limit, but has half an hour.
    """
    sizes = dict(zip(AXES, (dp, ring, ulysses, tp), strict=True))
    grid = torch.arange(dist.get_world_size()).view(*sizes.values())
    me = dist.get_rank()
    place = dict(zip(AXES, (grid == me).nonzero()[0].tolist(), strict=True))
    groups = {}
    for name, axes in GROUPS.items():
        inside = [AXES.index(axis) for axis in axes]
        outside = [i for i in range(len(AXES)) if i not in inside]
        members = grid.permute(*outside, *inside).flatten(0, len(outside) - 1).flatten(1)  # [groups, ranks of each]
        for ranks in members.tolist():
            # Collective over the world, so in the same order everywhere.
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout))
            if me in ranks:
                groups[name] = group
    return Mesh(sizes, place, groups)
