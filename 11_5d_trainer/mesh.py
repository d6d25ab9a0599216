"""Which rank does what: the grid of ranks, and the group of each rank along each axis.

    pp = 2, dp = 2, cp = 2, tp = 2: sixteen ranks       groups of rank 5 (pp 0, dp 1, cp 0, tp 1)

               pp 0                    pp 1              tp       4 5        share every layer
           cp 0    cp 1            cp 0    cp 1          cp       5 7        share a sequence
    dp 0  [0 1]   [2 3]          [8 9]   [10 11]         pp       5 13       share the layers, one after the other
    dp 1  [4 5]   [6 7]         [12 13]  [14 15]         dp       1 5        see different samples
           tp ->   tp ->          tp ->    tp ->         data     1 3 5 7    hold the same weights: gradients are summed

Tensor-parallel ranks send most and are innermost, next to each other, so on a cluster they stay inside a
node. Pipeline stages send least and are outermost. The context axis is itself a grid of `ring` x `ulysses`,
so that both can be used at once; one of them is usually 1.

Expert parallelism is a slice of data x context: the `batch` ranks of a stage, which see different tokens,
form runs of `ep`, and each run holds every expert once. `experts` are the ranks that hold the same ones.

DualPipe keeps each stage on two ranks, p and pp-1-p: these two hold the same weights, and join the same `data` group.

HSDP (chapter 03) splits the `data` group once more: `shards` consecutive ranks of it, on one machine, share
one copy of the model, and `copies` are the ranks that hold the same shard in the different copies.

The grid is one tensor, and a group is what remains of it when the other axes are fixed. All groups are made
here and passed to the techniques as arguments; no technique uses the world's size.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

AXES = ("pp", "dp", "ring", "ulysses", "tp")  # outermost first
BATCH = ("dp", "ring", "ulysses")  # the ranks of a stage that see different tokens
GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "ring": ("ring",),
    "ulysses": ("ulysses",),
    "pp": ("pp",),
    "batch": BATCH,
    "replica": ("pp", *BATCH),  # the ranks whose losses add up to the global batch's
    "data": ("mirror", *BATCH),  # the ranks that hold the same weights
    "ep": ("ep",),
    "experts": ("mirror", "ep rows"),  # the ranks that hold the same experts
    "tokens": BATCH,  # whose tokens an expert layer counts per micro-batch (and "tp", if they split them)
    "all tokens": ("mirror", *BATCH),  # the same for a whole step
    "stage": (*BATCH, "tp"),  # the ranks that run the same layers at the same time
    "world": AXES,
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

    def size(self, group: str) -> int:
        return dist.get_world_size(self.groups[group])


def members(
    sizes: dict[str, int], ep: int = 1, mirrored: bool = False, split_tokens: bool = False, shards: int = 0
) -> dict[str, Tensor]:
    """The ranks of every group of every kind: name -> [groups, ranks of each]. No process group is needed for it.

    ep            how many ranks hold the experts once; divides dp x ring x ulysses
    mirrored      two pipelines in opposite directions (DualPipe): ranks p and pp-1-p hold the same weights
    split_tokens  tensor ranks hold different tokens too (sequence parallel)
    shards        ranks of a `data` group that share one copy of the weights; 0: no `shards` and `copies`
    """
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    # --- exercise 11.29: a group is what remains of the grid when the other axes are fixed ---
    folded = torch.stack([grid[: len(grid) // 2], grid[len(grid) // 2 :].flip(0)]) if mirrored else grid[None]
    slices = folded.flatten(2, 4).unflatten(2, (-1, ep))  # [mirror, pp, batch/ep, ep, tp]
    pictures = {
        AXES: grid,
        ("mirror", *AXES): folded,
        ("mirror", "pp", "ep rows", "ep", "tp"): slices,
    }
    found = {}
    for name, axes in GROUPS.items():
        if name in ("tokens", "all tokens") and split_tokens:
            axes = (*axes, "tp")
        names, picture = next((n, p) for n, p in pictures.items() if set(axes) <= set(n))
        inside = [names.index(axis) for axis in axes]
        outside = [i for i in range(len(names)) if i not in inside]
        ranks = math.prod(picture.shape[i] for i in inside)
        found[name] = picture.permute(*outside, *inside).reshape(-1, ranks)
    # --- end exercise ---
    if shards:
        cut = found["data"].unflatten(1, (-1, shards))  # [groups, copies, shards]
        found |= {"shards": cut.flatten(0, 1), "copies": cut.transpose(1, 2).flatten(0, 1)}
    found["ends"] = grid[[0, -1]].flatten(1).T if len(grid) > 1 else grid.reshape(-1, 1)  # first and last stage
    return found


def make_mesh(
    sizes: dict[str, int],
    ep: int = 1,
    mirrored: bool = False,
    split_tokens: bool = False,
    shards: int = 0,
    timeout: float = 300.0,
) -> Mesh:
    """Lay the world out on the grid. Every rank calls it and makes every group, also groups of other ranks.

    A collective that waits for a stuck rank fails after `timeout` seconds. Each group gets the timeout
    explicitly, because a new group does not inherit the world's but has 10 minutes (NCCL) or 30 (Gloo).
    """
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    grid = torch.arange(dist.get_world_size()).view(*sizes.values())
    me = dist.get_rank()
    place = dict(zip(AXES, (grid == me).nonzero()[0].tolist(), strict=True))
    groups: dict[str, dist.ProcessGroup] = {}
    alone: dict[int, dist.ProcessGroup] = {}  # most axes have one rank: one group for all of them
    for name, ranks in members(sizes, ep, mirrored, split_tokens, shards).items():
        for line in ranks.tolist():
            # Collective over the world, so in the same order everywhere.
            if len(line) == 1 and line[0] in alone:
                group = alone[line[0]]
            else:
                group = dist.new_group(line, timeout=timedelta(seconds=timeout))
            if len(line) == 1:
                alone[line[0]] = group
            if me in line:
                groups[name] = group
    # Used in the background, concurrently with the other groups: always on the CPU.
    groups["saving"] = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return Mesh(sizes, place, groups)


def picture(
    sizes: dict[str, int], ep: int = 1, mirrored: bool = False, split_tokens: bool = False, shards: int = 0
) -> str:
    """The place of every rank, and all groups: what `--show-mesh` prints."""
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    width = len(str(grid.max().item()))
    lines = [" x ".join(f"{axis} {size}" for axis, size in sizes.items()) + f" = {grid.numel()} ranks", ""]
    for pp, stage in enumerate(grid.flatten(2, 3)):  # [dp, cp, tp]
        lines.append(f"pipeline rank {pp}" + "   (a row is a data-parallel rank, a bracket a tensor group)" * (pp == 0))
        for dp, row in enumerate(stage):
            brackets = ("[" + " ".join(f"{rank:{width}}" for rank in tensor) + "]" for tensor in row.tolist())
            lines.append(f"  dp {dp}  " + " ".join(brackets))
    lines.append("")
    for name, ranks in members(sizes, ep, mirrored, split_tokens, shards).items():
        if ranks.shape[1] > 1:
            lines.append(
                f"{name:8} " + "  ".join("{" + " ".join(map(str, sorted(line))) + "}" for line in ranks.tolist())
            )
    return "\n".join(lines)
