"""ZeRO: N ranks train together a model that none of them could hold alone.

Problem. In data parallelism each rank keeps a copy of everything: weights, gradients, what the optimizer remembers.
With Adam in mixed precision that is 16 bytes per weight. All copies are equal, and most are needed for a moment only.

Idea. Lay the weights of a layer end to end in a line and cut it into N equal shards; rank r owns shard r. An all-reduce
of the gradients is a reduce-scatter, after which rank r has the sum of shard r, followed by an all-gather. Stop in the
middle: that sum is all one needs to update shard r. What a rank does not own, it need not keep.

    kept by rank 1 of 4    weights     gradients   master copy, moments    bytes kept             bytes sent in a step
    data parallelism       ########    ########    ########                (w + g + K) P          2 g P (N-1)/N
    stage 1  P_os          ########    ########    --##----                (w + g) P + (g'+K) P/N (g + w) P (N-1)/N
    stage 2  P_os+g        ########    --##----    --##----                w P + (g'+K) P/N       (M g + w) P (N-1)/N
    stage 3  P_os+g+p      --------    --##----    --##----                (g'+K) P/N             M (g + 2 w) P (N-1)/N

P weights, padded to a multiple of N in each layer; M micro-batches a step; for each weight w bytes of weight, g of its
gradient, g' of the sum of all ranks' gradients, K of master copy and moments. Stage 3 gathers weights layer by layer.
Source: Rajbhandari et al. 2020, arXiv 1910.02054, figure 1, sections 5 and 7, where w = g = g' = 2, K = 12, M = 1.

    torchrun --nproc_per_node 4 zero.py              gloo on CPUs, nccl on GPUs; `python zero.py` is one rank alone
The last line is PASS if losses, gradients, weights of three steps (to 1e-10) and all bytes are right; else exit code 1.
"""

import argparse
import gc
import inspect
import os
import sys
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # torch.optim imports it; while a group is up, that would keep the group to the end
import torch.nn.functional as F
from torch import Tensor, nn

# N ranks; a line is [N S], a shard [S]. B sequences of T tokens; H numbers for each token (hidden size); attention has
# HEADS heads of D numbers, KV heads of keys and values; V tokens in the vocabulary. Odd sizes: lines need zeros.
V, H, HEADS, KV, D, FF, B, T, NO_LABEL = 257, 31, 4, 2, 6, 45, 1, 24, -100  # after some tokens nothing is predicted
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has new names
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def rope(x: Tensor) -> Tensor:  # [B, T, heads, D]: turn pairs of numbers by angles that grow with the position
    half, wide = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequency = 10000.0 ** (-torch.arange(half, dtype=wide, device=x.device) / half)
    angle = torch.arange(x.shape[1], dtype=wide, device=x.device)[:, None, None] * frequency  # [T, 1, D/2]
    (a, b), cos, sin = x.chunk(2, -1), angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(H), nn.RMSNorm(H)
        self.q, self.k, self.v = (nn.Linear(H, heads * D, bias=False) for heads in (HEADS, KV, KV))
        self.out, self.down = nn.Linear(HEADS * D, H, bias=False), nn.Linear(FF, H, bias=False)
        self.gate, self.up = nn.Linear(H, FF, bias=False), nn.Linear(H, FF, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, H] -> [B, T, H]
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, D)) for f in (self.q, self.k, self.v))  # [B, T, HEADS or KV, D]
        q, k, v = (z.transpose(1, 2) for z in (rope(q), rope(k), v))  # [B, HEADS or KV, T, D]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))  # [B, HEADS, T, D] -> [B, T, HEADS D]
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def make_layers(device: str | torch.device = "cpu") -> list[nn.Module]:
    torch.manual_seed(0)  # every rank draws the same first weights
    layers = nn.Embedding(V, H), Block(), Block(), nn.Sequential(nn.RMSNorm(H), nn.Linear(H, V, bias=False))
    return [layer.to(device, torch.float64) for layer in layers]


def make_batch(step: int, ranks: int, micro_batches: int, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens and labels, [N, M, B, T], of argparse's source. Blanks are no labels, so ranks differ in their number."""
    data = torch.tensor(list(inspect.getsource(argparse).encode()))
    begin = (step * 7 + torch.arange(ranks * micro_batches * B)) * T % (len(data) - T - 1)
    text = data[begin[:, None] + torch.arange(T + 1)].view(ranks, micro_batches, B, T + 1).to(device)
    return text[..., :-1], text[..., 1:].masked_fill(text[..., 1:] == ord(" "), NO_LABEL)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed over tokens, in float32 at least. Whoever knows how many labels all ranks have together divides."""
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=NO_LABEL, reduction="sum")


# ------------------------------------------------------------------------------------ a layer in a line, in N shards
class Unit:
    """One layer. Its parameters lie end to end in a line, of which this rank owns a shard.
    | w w w w w w | b b | v v v | 0 |        a shard does not care where a parameter ends;
    | rank 0 | rank 1 | rank 2 | rank 3 |    zeros at the end make all shards equal"""

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup, compute: torch.dtype | None):
        self.layer, self.shapes = layer, {name: p.shape for name, p in layer.named_parameters()}
        if frozen := [name for name, p in layer.named_parameters() if not p.requires_grad]:
            raise ValueError(f"{', '.join(frozen)} is frozen, but a line is trained whole; see in_depth/zero_stages.py")
        weights = torch.cat([p.detach().flatten() for p in layer.parameters()])
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        # --- exercise 3.1: N equal shards, also of a line that N does not divide ---
        size = -(-len(weights) // n)  # rounded up
        line = F.pad(weights, (0, n * size - len(weights)))  # [N S]
        mine = line[rank * size : (rank + 1) * size]  # [S]
        # --- end exercise ---
        self.shard = nn.Parameter(mine.clone())  # the master copy, and all that the optimizer ever sees: [S]
        self.line = line.to(compute or line.dtype)  # what the layer computes with: [N S]; stage 3 lets it go
        layer.to("meta")  # the layer keeps its code and lets its own weights go

    def run(self, line: Tensor, x: Tensor) -> Tensor:  # its forward, with the line [N S] seen as its parameters
        sizes = [shape.numel() for shape in self.shapes.values()]  # one cut, so backward writes one line
        parts = zip(self.shapes.items(), line.split([*sizes, len(line) - sum(sizes)]), strict=False)
        return torch.func.functional_call(self.layer, {name: part.view(shape) for (name, shape), part in parts}, (x,))


# -------------------------------------------------------------------------------------------------- the three stages
class Zero1:
    """P_os: every rank has all weights and, after backward, its own gradient of each; it updates its shard only.
    `compute` is the dtype of weights and gradients, if not that of the master copy. `ahead` is how many layers travel
    while another one computes: 1, or 0 to see what that is good for. `events` are what happened, in order."""

    def __init__(self, layers: list[nn.Module], group: dist.ProcessGroup, compute=None, ahead: int = 1):
        self.units = [Unit(layer, group, compute) for layer in layers]
        self.group, self.n, self.ahead = group, dist.get_world_size(group), ahead
        self.asked, self.sums, self.events = {}, [], []  # weights on their way, gradients on theirs, what happened
        self.whole, self.sent, self.most = [], 0, 0  # lines that are whole; bytes sent; most bytes of whole lines
        for i, unit in enumerate(self.units):
            self.hold(i, unit)

    def hold(self, i: int, unit: Unit) -> None:
        self.count(unit.line).requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit.run(unit.line, x)
        return x

    def finish(self, last: bool) -> None:
        """After each backward. After the last: from everyone's gradients to the sum of each of my shards."""
        if last:
            for i in reversed(range(len(self.units))):
                self.send(i, self.count(self.units[i].line.grad))
            self.receive(left=0)

    def send(self, i: int, gradient: Tensor) -> None:
        """Start to sum layer i's gradient over ranks: [N S] -> reduce-scatter -> my [S]. Wait for earlier ones only."""
        # --- exercise 3.2: the first half of an all-reduce ---
        mine = torch.empty_like(self.units[i].shard, dtype=gradient.dtype)
        work = reduce_scatter(mine, gradient.detach(), group=self.group, async_op=True)
        self.sums.append((i, mine, work, gradient))  # it is being read: it has to live
        # --- end exercise ---
        self.sent += gradient.nbytes // self.n * (self.n - 1)  # as a ring sends it: all shards but one
        self.events.append(("send", i))
        self.receive(left=self.ahead)

    def receive(self, left: int) -> None:
        """Wait for the oldest sums until only `left` are on their way; add each to those of earlier micro-batches."""
        while len(self.sums) > left:
            i, mine, work, _ = self.sums.pop(0)
            shard = self.units[i].shard
            # --- exercise 3.3: my part of the sum becomes, or is added to, the gradient of my shard ---
            work.wait()
            wide = mine.to(shard.dtype)  # the master copy's: a sum of many small numbers needs its digits
            shard.grad = wide if shard.grad is None else shard.grad + wide
            # --- end exercise ---
            self.events.append(("sum", i))

    def gather(self, i: int, line: Tensor) -> dist.Work:
        """Start to fill a line with everyone's shard of layer i: my [S] -> all-gather -> [N S]."""
        self.sent += line.nbytes // self.n * (self.n - 1)
        return all_gather(line.detach(), self.units[i].shard.detach().to(line.dtype), group=self.group, async_op=True)

    @torch.no_grad()
    def publish(self) -> None:
        """After the update each shard is new on one rank; whoever keeps whole weights needs all of them."""
        lines = [(i, unit.line) for i, unit in enumerate(self.units) if unit.line is not None]
        # --- exercise 3.4: the second half of the all-reduce ---
        for line, work in [(line, self.gather(i, line)) for i, line in lines]:
            work.wait()
            line.grad = None  # stage 1 still had it
        # --- end exercise ---

    def count(self, line: Tensor) -> Tensor:
        """A line of weights or gradients is whole here until the last reference to it has gone."""
        self.whole = [ref for ref in [*self.whole, weakref.ref(line)] if ref() is not None]
        self.most = max(self.most, sum(ref().nbytes for ref in self.whole))
        return line


class Zero2(Zero1):
    """P_os+g: one idea more. A gradient concerns the owners of its shards: send it when it is complete, forget it."""

    def hold(self, i: int, unit: Unit) -> None:
        super().hold(i, unit)
        me = weakref.proxy(self)  # a hook that kept me alive would do so for good, and with me the process group
        unit.line.register_post_accumulate_grad_hook(lambda line: me.send_and_forget(i, line))

    def send_and_forget(self, i: int, line: Tensor) -> None:
        gradient, line.grad = line.grad, None
        self.send(i, self.count(gradient))

    def finish(self, last: bool) -> None:
        self.receive(left=0)  # in every micro-batch


class Zero3(Zero2):
    """P_os+g+p: the last copy goes. The weights of a layer come when it computes, in forward and again in backward.
    The one idea that makes it fast: while a layer computes, the weights of the next one are on their way."""

    def hold(self, i: int, unit: Unit) -> None:
        unit.whole, unit.line = unit.line.to("meta"), None  # shape and dtype, without the bytes

    def forward(self, x: Tensor) -> Tensor:
        for i, unit in enumerate(self.units):
            x = ComeAndGo.apply(x, unit.shard, self, i)
        return x

    def fetch(self, i: int, following: int) -> Tensor:
        """The weights of layer i, whole: [N S]; those of the layer that computes next are on their way by then."""
        # --- exercise 3.5: ask for this layer and already for the next one, then wait for this one ---
        for j in (i, following)[: 1 + self.ahead]:
            if 0 <= j < len(self.units) and j not in self.asked:
                self.events.append(("ask", j))
                line = self.count(torch.empty_like(self.units[j].whole, device=self.units[j].shard.device))
                self.asked[j] = line, self.gather(j, line)
        line, work = self.asked.pop(i)
        work.wait()
        return line
        # --- end exercise ---


class ComeAndGo(torch.autograd.Function):
    """A layer of stage 3. `shard` is an argument so that backward comes here even if x (tokens) needs no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, shard: Tensor, zero: Zero3, i: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.zero, ctx.i, line = zero, i, zero.fetch(i, following=i + 1)
        zero.events.append(("forward", i))
        return zero.units[i].run(line, x)  # autograd records nothing in here: after it nobody refers to the line

    @staticmethod
    def backward(ctx, gradient: Tensor):
        zero, i, (x,) = ctx.zero, ctx.i, ctx.saved_tensors
        # --- exercise 3.6: the weights again, forward again, backward, and away with the gradient ---
        line = zero.fetch(i, following=i - 1).requires_grad_()
        zero.events.append(("backward", i))
        x = x.detach().requires_grad_(x.is_floating_point())  # tokens have no gradient
        with torch.enable_grad():
            zero.units[i].run(line, x).backward(gradient)
        zero.send(i, zero.count(line.grad))
        # --- end exercise ---
        return x.grad, None, None, None  # that of the shard comes in `receive`


# ---------------------------------------------------------------------------------------------------------- the check
def bytes_kept() -> int:
    """Of this process's tensors of real numbers, each memory once; small change, like step counters, is left out."""
    time.sleep(0.02)  # gloo's threads let go of a buffer a moment later than we do
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.device.type != "meta"]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    memory = [t.untyped_storage() for t in tensors if t.is_floating_point() and t.numel() > 9]
    return sum({m.data_ptr(): m.nbytes() for m in memory}.values())


def forward_backward(zero: Zero1, tokens: Tensor, labels: Tensor) -> Tensor:
    """This rank's micro-batches, [M, B, T]: gradients come to the shards. Returns this rank's part of the loss."""
    valid, loss = (labels != NO_LABEL).sum(), 0.0
    dist.all_reduce(valid, group=zero.group)  # a number of the whole global batch, and known before backward
    for m, (x, y) in enumerate(zip(tokens, labels, strict=True)):
        (part := loss_sum(zero.forward(x), y) / valid.clamp(min=1)).backward()  # no label on any rank: 0, not 0 / 0
        zero.finish(last=m == len(tokens) - 1)
        loss += part.detach()
    return loss


def formulas(zero: Zero1, stage: int, m: int, k: int) -> list[int]:
    """Bytes kept, whole at most, and sent in a step, where w = g = g' = 8 and K = 8 k: the table on top."""
    n, lines = zero.n, [unit.shard.nbytes * zero.n for unit in zero.units]
    p, layers = sum(lines), range(len(lines))
    # Whole are the layer that computes and, on their way, the gradient of the one after it, weights of the one before.
    gradients = [sum(lines[i : i + 1 + zero.ahead]) for i in layers]
    both = [gradients[i] + sum(lines[max(i - zero.ahead, 0) : i + 1]) for i in layers]
    whole = {1: 2 * p, 2: p + max(gradients), 3: max(both)}
    return [(3 - stage) * p + (1 + k) * p // n, whole[stage], {1: 2, 2: m + 1, 3: 3 * m}[stage] * p // n * (n - 1)]


def check(stage: int, args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> str:
    """Three steps of a stage, beside one process that has the whole model and the whole batch. Says what is off."""
    before, rank, begin, off = bytes_kept(), dist.get_rank(group), time.perf_counter(), []
    kind, k = (torch.optim.AdamW, 3) if args.optimizer == "adamw" else (torch.optim.SGD, 1)  # k numbers for each weight
    model = nn.Sequential(*make_layers(device))
    zero = (Zero1, Zero2, Zero3)[stage - 1](make_layers(device), group, ahead=args.ahead)
    optimizer = kind([*model.parameters(), *(unit.shard for unit in zero.units)], lr=0.05)  # one serves both
    for step in range(3):
        tokens, labels = make_batch(step, zero.n, args.micro_batches, device)  # [N, M, B, T]
        (right := loss_sum(model(tokens.flatten(0, 2)), labels) / (labels != NO_LABEL).sum()).backward()
        loss = forward_backward(zero, tokens[rank], labels[rank])  # then see what is kept, less the oracle's
        kept = min(bytes_kept() for _ in range(2)) - before - (k + 1) * sum(p.nbytes for p in model.parameters())
        dist.all_reduce(loss, group=group)  # only to compare it
        off.append((loss - right).abs().item())
        optimizer.step()
        zero.publish()
        for unit, layer in zip(zero.units, model, strict=True):
            whole = torch.cat([torch.stack((p, p.grad)).flatten(1) for p in layer.parameters()], 1)
            mine = F.pad(whole, (0, -whole.shape[1] % zero.n)).chunk(zero.n, 1)[rank]  # [2, N S] -> [2, S]
            off.append((torch.stack((unit.shard, unit.shard.grad)) - mine).abs().max().item())
        optimizer.zero_grad()
        del whole, mine  # they would be counted
    got, want = [kept, zero.most, zero.sent // 3], formulas(zero, stage, args.micro_batches, k)
    off = torch.tensor([sum(off), *(abs(a - b) for a, b in zip(got, want, strict=True))], dtype=torch.float64)
    dist.all_reduce(off := off.to(device), group=group)  # a sum: NaN stays NaN, and each rank knows of all others
    if rank == 0:
        print(f"stage {stage}: error {off[0]:.1e}; bytes kept, whole at most, sent by a ring {got}, formula {want}")
        speed = 3 * tokens.numel() / (time.perf_counter() - begin)
        print(f"  {speed:,.0f} tokens/s; a step:", ", ".join(f"{what} {i}" for what, i in zero.events[:14]), "...")
    return "" if (off <= 1e-10).all() else f"FAIL: stage {stage}: error {off[0]:.1e}; bytes off by {off[1:].tolist()}"


def main() -> int:
    def refuse(message: str) -> None:  # in one line, and before there is a process group
        sys.stderr.write(f"zero.py: {message}\n" if os.environ.get("RANK", "0") == "0" else "")
        sys.exit(2)

    parser = argparse.ArgumentParser(description="ZeRO in one file", allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="default: all three")
    parser.add_argument("--ahead", type=int, choices=(0, 1), default=1, help="layers that travel while one computes")
    parser.add_argument("--micro-batches", type=int, choices=range(1, 9), default=2)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    args = parser.parse_args()
    gpus, local, limit = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1)), timedelta(seconds=60)
    if 0 < gpus < local:
        refuse(f"--nproc_per_node {local}: there are {gpus} GPUs here; use {gpus} or less")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpus else torch.device("cpu")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None, timeout=limit, **alone)
    wrong = [check(stage, args, dist.group.WORLD, device) for stage in (1, 2, 3) if args.stage in (None, stage)]
    if dist.get_rank() == 0:
        print("\n".join(filter(None, wrong)) or "PASS")
    dist.destroy_process_group()
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
