"""FPDT IV: the full model in chunks: projections, feed-forward, loss, checkpoints. Weights and x stay full.

Problem. Attention in chunks (fpdt_attention.py) leaves the rest of a block unchanged: q, k, v of all tokens,
an MLP 3 to 4 times as wide as the model, and logits [S, V], 256 GB in bf16 at S = 10⁶, V = 128256.

Idea. Everything but attention works on single tokens, so it can run on a few tokens at a time, and be
recomputed in backward (Mini-Sequence Transformer, 2407.15892). One autograd node is a full block:

    forward, chunk i    x_i -> norm, q k v -> attention to chunks 0..i -> output projection -> norm, MLP in finer pieces
                        store x_i on the host                   (with keep="attention" also q̂ k̂ v̂ ô lse)
    backward
      1  forward again, chunk by chunk; then, while h_i = x_i + attention exists, back through the MLP and the
         output projection: offload dô_i to the host
      2  nested loop of fpdt_attention.py; then back through projections and norm: dx_j is complete

    loss    per few tokens: logits, softmax, d hidden, d weight in forward: logits are made once, not saved

A node returns each weight's gradient once, summed over all chunks in fp32: hooks of data parallelism or
ZeRO see an ordinary parameter. The loss of a rank is a sum over its tokens divided by the valid tokens of the
global batch, so gradients are *summed* over the ranks of the sequence and of data parallelism.

Device memory, T = S/P tokens on a rank: only x and y (in backward dy, dx), 2 T H e, grow with T; the rest
falls with u. Host memory: T H e per layer, and q̂ k̂ v̂ ô dô dq̂ of one layer (q̂ k̂ v̂ ô of each if kept).

Run it:
    python fpdt_model.py                                       three steps next to the reference, one rank
    torchrun --nproc_per_node 2 fpdt_model.py --chunks 4       Gloo on CPU, NCCL on GPU
    python fpdt_model.py --watch                               64k tokens, where the dense model runs out of memory
The last line is PASS, or the script exits with 1 and says which number is wrong.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _fpdt_demo import Llama, Watched, batch, check_ranks_and_heads, run, three_steps
from fpdt_attention import (
    ChunkedAttention,
    Kernel,
    check_sizes,
    copy_kv_heads,
    fpdt_positions,
    to_heads,
    to_tokens,
    wide,
)
from fpdt_costs import Sizes, block_link_bytes, model_host_peak
from fpdt_store import (
    Buffer,
    DeviceMemory,
    Guard,
    OneLineParser,
    Prefetch,
    Store,
    check_chunks,
    check_host,
    machine_for,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

# Legend of shapes: B batch, T = S/P tokens of a rank, H hidden, N query heads, D head dim, F intermediate size, V
# vocabulary; u chunks, s = T/u tokens of a chunk on a rank.
IGNORE = -100  # a label without a target

# ---------------------------------------------------------------------------------------- gradients, a piece at a time


class Pieces(nn.Module):
    """The parts of a Llama block that work on single tokens. Of `block` they need Hugging Face's names, from
    input_layernorm and self_attn.q_proj to mlp, and self_attn.parts.rope, self_attn.head_dim."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block: Any = block

    def forward(self, what: str, *args: Any) -> Any:
        return getattr(self, what)(*args)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor, P: int) -> tuple[Tensor, Tensor, Tensor]:
        a = self.block.self_attn
        x = self.block.input_layernorm(x)
        q, k, v = (proj(x).unflatten(-1, (-1, a.head_dim)) for proj in (a.q_proj, a.k_proj, a.v_proj))
        if getattr(a, "q_norm", None) is not None:  # Qwen3's, over each head
            q = a.q_norm(q)
            k = a.k_norm(k)
        q = a.parts.rope(q, cos, sin)
        k = a.parts.rope(k, cos, sin)
        return q, copy_kv_heads(k, P), copy_kv_heads(v, P)  # [B, s, heads, D]

    def finish(self, x: Tensor, out: Tensor) -> Tensor:
        return x + self.block.self_attn.o_proj(out.flatten(-2))  # [B, s, N, D] -> [B, s, H]

    def feed_forward(self, h: Tensor) -> Tensor:
        return h + self.block.mlp(self.block.post_attention_layernorm(h))


class Gradients:
    """Runs a module's forward piece by piece, and sums the gradients of its parameters over the pieces.

    It differentiates detached parameters that share the memory. So hooks of the real ones do not see the
    pieces; they see the sum, once, when the autograd node that owns this object returns it.
    """

    def __init__(self, module: nn.Module, trained: bool) -> None:
        self.module = module
        self.leaves = {name: p.detach() for name, p in module.named_parameters()}
        self.sums: dict[str, Tensor] = {}
        if trained:
            wanted = [name for name, p in module.named_parameters() if p.requires_grad]
            self.leaves |= {name: self.leaves[name].requires_grad_() for name in wanted}
            self.sums = {n: torch.zeros_like(self.leaves[n], dtype=wide(self.leaves[n].dtype)) for n in wanted}

    def call(self, *args: Any) -> Any:
        return functional_call(self.module, self.leaves, args)

    def back(self, outputs: Sequence[Tensor], douts: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return gradients of the inputs, and add gradients of the parameters to the sums."""
        # --- exercise 8.32: one piece's share of every gradient ---
        (*dinputs,) = torch.autograd.grad(
            outputs, [*inputs, *(self.leaves[n] for n in self.sums)], douts, allow_unused=True
        )
        for total, share in zip(self.sums.values(), dinputs[len(inputs) :], strict=True):
            if share is not None:
                total += share
        return dinputs[: len(inputs)]
        # --- end exercise ---

    def result(self) -> list[Tensor | None]:
        """The sums, in the order of the module's parameters; None for a frozen one."""
        return [self.sums[n].to(p.dtype) if n in self.sums else None for n, p in self.module.named_parameters()]


class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, chunks: int, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.chunks = module, chunks
        ctx.save_for_backward(x)
        run = Gradients(module, trained=False)
        y = torch.empty_like(x)
        for rows, out in zip(x.chunk(chunks, 1), y.chunk(chunks, 1), strict=True):
            out.copy_(run.call(rows))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        run = Gradients(ctx.module, trained=True)
        dx = torch.empty_like(x)
        for rows, dout, into in zip(*(t.chunk(ctx.chunks, 1) for t in (x, dy, dx)), strict=True):
            rows = rows.detach().requires_grad_()
            with torch.enable_grad():
                out = run.call(rows)
            into.copy_(*run.back([out], [dout], [rows]))
            del out
        return None, None, dx, *run.result()


def chunked(module: nn.Module, chunks: int) -> Callable[[Tensor], Tensor]:
    """`module`, which works on single tokens, [B, T, H] -> [B, T, H] in pieces; saves only its input.
    ValueError under autocast, and for dropout."""

    def run(x: Tensor) -> Tensor:
        refuse_autocast(x)
        refuse_dropout(module)
        return Chunked.apply(module, chunks, x, *module.parameters())

    return run


def refuse_autocast(x: Tensor) -> None:
    """Backward usually runs outside of autocast. A rerun there would be another forward, with weights in
    another format. A model in bf16 needs no autocast: sums are in fp32 anyway."""
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError("what runs in chunks knows no autocast: backward runs it again without; use a model in bf16")


def refuse_dropout(module: nn.Module) -> None:
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p and m.training for m in module.modules()):
        raise ValueError("what runs in chunks knows no dropout: backward runs it again with other masks; use p = 0")


# -------------------------------------------------------------------------------------------------------- a block


@dataclass(frozen=True)
class FPDT:
    """How a block is run."""

    pieces: Pieces
    core: ChunkedAttention
    finer: int  # pieces of a chunk in the feed-forward
    keep: str  # "input" or "attention"

    def rows(self, x: Tensor, i: int) -> Tensor:
        """Chunk i of [B, T, ...]."""
        s = x.shape[1] // self.core.u
        return x[:, i * s : (i + 1) * s]

    def tables(self, cos: Tensor, sin: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """RoPE's tables [..., T, D/2] of chunk i."""
        s = cos.shape[-2] // self.core.u
        return cos[..., i * s : (i + 1) * s, :], sin[..., i * s : (i + 1) * s, :]


class Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, fpdt: FPDT, trained: bool, *parameters: Tensor
    ) -> Tensor:  # fmt: skip
        store = fpdt.core.store
        group = fpdt.core.group
        y = torch.empty_like(x)
        run = Gradients(fpdt.pieces, trained=False)

        def source(i: int) -> tuple[Tensor, Tensor, Tensor]:
            return run.call("qkv", fpdt.rows(x, i), *fpdt.tables(cos, sin, i), group.size())

        def sink(i: int, out: Tensor) -> None:
            h = run.call("finish", fpdt.rows(x, i), out)
            del out
            for piece, into in zip(h.chunk(fpdt.finer, 1), fpdt.rows(y, i).chunk(fpdt.finer, 1), strict=True):
                into.copy_(run.call("feed_forward", piece))

        keep = trained and fpdt.keep == "attention"
        kept = fpdt.core.forward(source, sink, x.device, keep)
        ctx.fpdt = fpdt
        ctx.kept = kept if keep else None
        ctx.shape = x.shape
        ctx.tables = (cos, sin)
        ctx.x = [store.offload(fpdt.rows(x, i).contiguous()) for i in range(fpdt.core.u)] if trained else []
        for buffer in [] if keep else kept.buffers():
            store.drop(buffer)
        ctx.guard = Guard(store, [*(kept.buffers() if keep else []), *ctx.x])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        fpdt = ctx.fpdt
        core = ctx.fpdt.core
        store = ctx.fpdt.core.store
        group = ctx.fpdt.core.group
        run = Gradients(fpdt.pieces, trained=True)
        dx = torch.empty_like(dy)
        device = dy.device
        ctx.guard.release()
        away: list[Buffer] = []  # dô_i
        held: list[Tensor] = []

        def source(i: int) -> tuple[Tensor, Tensor, Tensor]:
            held[:] = [slot.data for slot in inputs.take()]
            return run.call("qkv", held[0].detach(), *fpdt.tables(*ctx.tables, i), group.size())

        def sink(i: int, out: Tensor) -> None:
            """Step 1: back from y_i to x_i (past attention) and to the output of attention."""
            out.requires_grad_()
            with torch.enable_grad():
                h = run.call("finish", held[0], out)
            # --- exercise 8.33: back through the feed-forward, a piece at a time ---
            dh = fpdt.rows(dx, i)  # residual stream: the gradient of h_i is a part of the gradient of x_i
            for piece, dout, into in zip(*(t.chunk(fpdt.finer, 1) for t in (h, fpdt.rows(dy, i), dh)), strict=True):
                piece = piece.detach().requires_grad_()
                with torch.enable_grad():
                    y = run.call("feed_forward", piece)
                into.copy_(*run.back([y], [dout], [piece]))
                del y
            # --- end exercise ---
            (dout,) = run.back([h], [dh], [out])
            inputs.done()
            store.compute("back")
            away.append(store.offload(to_heads(dout, group)))

        def home(j: int, *dqkv: Tensor) -> None:
            """Step 2: back through the projections and the norm of chunk j."""
            x = inputs.take()[0].data.detach().requires_grad_()
            with torch.enable_grad():
                qkv = run.call("qkv", x, *fpdt.tables(*ctx.tables, j), group.size())
            fpdt.rows(dx, j).add_(*run.back(qkv, dqkv, [x]))
            inputs.done()

        def every_input() -> Prefetch:
            return Prefetch(store, range(core.u), lambda i: [ctx.x[i]], device)

        inputs = every_input()
        kept = ctx.kept
        if kept is None:
            with torch.no_grad():
                kept = core.forward(source, sink, device, keep=True)
        else:
            outputs = Prefetch(store, range(core.u), lambda i: [kept.out[i]], device)
            for i in range(core.u):
                held[:] = [slot.data for slot in inputs.take()]
                out = to_tokens(outputs.take()[0].data, group)
                outputs.done()
                sink(i, out)
                del out
            del outputs
        held.clear()
        inputs = every_input()
        core.backward(kept, away, home, device)
        for buffer in ctx.x:
            store.drop(buffer)
        ctx.x, ctx.kept = [], None
        return dx, None, None, None, None, *run.result()


def fpdt_block(
    block: nn.Module, chunks: int, group: dist.ProcessGroup, store: Store, *,
    finer: int = 2, keep: str = "input", kernel: Kernel | None = None,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
    """Replaces `block(x, cos, sin)` of a Llama, for tokens as in `fpdt_positions`: x [B, T, H] -> [B, T, H].

    keep    "input": only x is stored on the host, and backward recomputes attention; "attention": also its
            inputs and outputs, (2 + 2 N_kv/N) more tensors of x's size, so backward runs it once less
    finer   pieces of a chunk in the feed-forward

    A call raises ValueError under autocast, for dropout, and for token counts that do not divide.
    """
    if keep not in ("input", "attention"):
        raise ValueError(f"keep {keep!r} must be input or attention")
    fpdt = FPDT(Pieces(block), ChunkedAttention(group, chunks, store, kernel), finer, keep)

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        refuse_autocast(x)
        refuse_dropout(block)
        T = x.shape[1]
        if T % chunks or T // chunks % finer:
            raise ValueError(f"{T} tokens of a rank do not divide into {chunks} chunks of {finer} pieces")
        # Decided here: in `apply` gradients are always off, and needs_input_grad is also true under no_grad.
        parameters = list(fpdt.pieces.parameters())
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters))
        return Block.apply(x, cos, sin, fpdt, trained, *parameters)

    return run


def use_fpdt(model: nn.Module, chunks: int, group: dist.ProcessGroup, store: Store, **options: Any) -> nn.Module:
    """Run every layer of a Llama with chapter 1's names by `fpdt_block`. Its state dict is unchanged."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.forward = fpdt_block(layer, chunks, group, store, **options)
    return model


# ------------------------------------------------------------------------------------------------------ gradients


class HostGradients:
    """Gradients sharded as in ZeRO, on the host: each leaves the device once it is complete. A rank stores
    1/P of the sum over all ranks in fp32, a flat shard padded with zeros, for an optimizer on the host. They
    are also sent in fp32, or each addition of the reduce-scatter would round. Frozen weights have none."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, store: Store) -> None:
        self.group = group
        self.store = store
        self.home = dict[Tensor, Buffer]()
        self.hooks = [p.register_post_accumulate_grad_hook(self.leave) for p in model.parameters() if p.requires_grad]

    def leave(self, p: Tensor) -> None:
        P = self.group.size()
        store = self.store
        whole = nn.functional.pad(p.grad.flatten().to(wide(p.dtype)), (0, -p.numel() % P))
        p.grad = None
        share = whole.new_empty(whole.numel() // P)
        dist.reduce_scatter_tensor(share, whole, group=self.group)  # [n] of every rank -> [n/P] of their sum
        if p in self.home:  # a later micro-batch: fetch the sum so far, and add this one's share
            slot = store.device_empty(self.home[p], share.device)
            store.fetch(self.home[p], slot)
            share += store.use(slot)
            store.done(slot)
        self.home[p] = store.offload(share, into=self.home.get(p))

    def take(self) -> dict[Tensor, Tensor]:
        """This rank's shards, once all have arrived. The next backward starts from zero."""
        if any(p.is_cuda for p in self.home):
            torch.cuda.synchronize()
        pieces = {p: host.data.clone() for p, host in self.home.items()}
        for host in self.home.values():
            self.store.drop(host)
        self.home.clear()
        return pieces


# ----------------------------------------------------------------------------------------------------------- the loss


class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, trained: bool) -> Tensor:
        h_all = hidden.flatten(0, -2)
        labels = labels.flatten()
        total = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device)
        dh_all = torch.empty_like(h_all) if trained else None
        dweight = torch.zeros_like(weight, dtype=total.dtype) if trained else None
        size = -(-h_all.shape[0] // chunks)
        for at in range(0, h_all.shape[0], size):
            h = h_all[at : at + size]
            label = labels[at : at + size, None]
            valid = label != IGNORE
            label = label.masked_fill(~valid, 0)
            logits = (h @ weight.T).to(total.dtype)  # [t, V]: the only logits in memory
            # --- exercise 8.34: loss and gradient from a few tokens' logits, in their own memory ---
            logits -= logits.amax(-1, keepdim=True)
            at_label = logits.gather(-1, label)
            sums = logits.exp_().sum(-1, keepdim=True)
            total += (sums.log() - at_label).masked_fill_(~valid, 0).sum()
            if dh_all is not None and dweight is not None:
                logits *= valid / sums  # softmax, or zero without a target
                logits.scatter_add_(-1, label, -valid.to(logits.dtype))
                dlogits = logits.to(h.dtype)
                torch.mm(dlogits, weight, out=dh_all[at : at + size])
                dweight += dlogits.T @ h
                del dlogits
            # --- end exercise ---
            del logits
        ctx.save_for_backward(dh_all, dweight)
        ctx.shape = hidden.shape
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        dh, dweight = ctx.saved_tensors
        # In place: the unscaled ones are not needed.
        grad = grad.view(1)  # a GPU would round a tensor without dimensions to the 16 bits of dh
        return dh.mul_(grad).view(ctx.shape), dweight.mul_(grad).to(ctx.dtype), None, None, None


def chunked_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int) -> Tensor:
    """SUM of -log p(label) over the valid labels: hidden [B, T, H], weight [V, H], labels [B, T] with -100 for none.

    Only logits of T/chunks tokens exist at a time. Divide by the valid tokens of the global batch.
    """
    trained = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)  # off in `apply`
    return ChunkedLoss.apply(hidden, weight, labels, chunks, trained)


def loss_sum(model: Any, tokens: Tensor, labels: Tensor, positions: Tensor, chunks: int) -> Tensor:
    """Sum of the losses of this rank's tokens, of a Llama whose layers run by `use_fpdt`. Final norm and loss
    also run in `chunks` pieces."""
    x = model.model(tokens, positions)
    return chunked_loss(chunked(model.model.norm, chunks)(x), model.lm_head.weight, labels, chunks)


# --------------------------------------------------------------------------------------------------------------- demo


def demo(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Three steps in 1, 2, 4 ... chunks next to the reference; bytes on the host and over the link."""
    P = group.size()
    S = args.seq
    H = 8 * args.heads
    layers = 2
    dtype = torch.float64
    sizes = dict(hidden=H, layers=layers, heads=args.heads, kv_heads=args.kv_heads, intermediate=2 * H)
    positions = torch.arange(S, device=device)
    reference = Llama(**sizes).to(device, dtype)

    def whole(step: int) -> tuple[Tensor, Tensor]:
        tokens, labels = (t.to(device) for t in batch(S, 256, step))
        return reference.loss_sum(tokens, labels, positions), (labels != IGNORE).sum()

    want = three_steps(reference, whole, None)
    wrong = []
    if group.rank() == 0:
        print(f"{P} rank(s) on {device.type}, {S} tokens, {layers} layers, {args.heads}/{args.kv_heads} heads, float64")
        titles = f"{'link':>10} {'predicted':>10} {'host':>10} {'predicted':>10}"
        print(f"{'chunks':>6} {'keep':>10} {'error':>8}   bytes: {titles}")
    for u in [n for n in range(1, args.chunks + 1) if args.chunks % n == 0]:  # so u divides the sequence
        for keep in ("input", "attention"):
            store = Store(machine_for(device))
            model = use_fpdt(Llama(**sizes).to(device, dtype), u, group, store, keep=keep)
            mine = fpdt_positions(S, group.rank(), P, u)

            def share(step: int, model: Any = model, mine: Tensor = mine, u: int = u) -> tuple[Tensor, Tensor]:
                tokens, labels = (t.to(device) for t in batch(S, 256, step))
                return loss_sum(model, tokens[:, mine], labels[:, mine], mine.to(device), u), (labels != IGNORE).sum()

            got = three_steps(model, share, group)
            errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(got, want, strict=True)]
            error = torch.stack(errors).max().item()  # NaN if any error is NaN
            z = Sizes(S, P, u, args.heads, args.kv_heads, 8, e=8)
            link = 3 * layers * sum(block_link_bytes(z, H, keep))
            host = model_host_peak(z, H, layers, keep)
            counted = [
                ("bytes over the link", store.offloaded + store.fetched, link),
                ("bytes on the host", store.host_peak, host),
            ]
            found: list = [None] * P
            dist.all_gather_object(found, (error, counted), group=group)
            for r, (off, numbers) in enumerate(found):
                if not off <= 1e-10:
                    wrong.append(f"{u} chunks, rank {r}: error {off:.1e}")
                wrong += [f"{u} chunks, rank {r}: {w} {a:,}, predicted {b:,}" for w, a, b in numbers if a != b]
            if group.rank() == 0:
                line = " ".join(f"{number:10,}" for _, *both in counted for number in both)
                largest = max((off for off, _ in found), key=lambda e: (e != e, e))  # a NaN counts as the largest
                print(f"{u:6} {keep:>10} {largest:8.1e}          {line}")
    return wrong


def watch(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """One step on a long sequence; a CPU emulates a device with `--budget-mb` megabytes for activations."""
    from tqdm import tqdm

    torch.set_num_threads(1)  # the CPU's backward splits heads among threads; here each call has one
    S = args.seq
    u = args.chunks
    limit = args.budget_mb * 10**6
    tokens, labels = batch(S, 256, 0)
    losses = {}
    for name in ("dense", f"FPDT, {u} chunks"):
        model = Llama(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=96)
        memory = DeviceMemory(limit)
        pairs = 3 * S * (S + 1) / 2  # forward, forward again, backward
        try:
            with memory, tqdm(total=pairs, unit_scale=True, unit=" pairs", desc=name, mininterval=1) as bar:
                if name == "dense":
                    loss = model.loss_sum(tokens, labels, torch.arange(S))
                else:
                    use_fpdt(model, u, group, Store(Watched(bar)), finer=4)
                    loss = loss_sum(model, tokens, labels, fpdt_positions(S, 0, 1, u), 4 * u)
                (loss / (labels != IGNORE).sum()).backward()
                losses[name] = loss.item() / int((labels != IGNORE).sum())
            print(f"{name:18} loss {losses[name]:.4f}, peak {memory.peak / 1e6:.1f} of {args.budget_mb} MB")
        except MemoryError as error:
            print(f"{name:18} out of memory: {error}")
    fits = list(losses) == [f"FPDT, {u} chunks"]
    return [] if fits else [f"within {args.budget_mb} MB only FPDT should run, but {list(losses) or 'nothing'} did"]


def main() -> int:
    parser = OneLineParser(description="A Llama in chunks.", allow_abbrev=False)
    parser.add_argument("--watch", action="store_true", help="one step of 65536 tokens under a memory budget")
    parser.add_argument("--seq", type=int, help="tokens of the whole sequence; default 128, or 65536 to watch")
    parser.add_argument("--chunks", type=int, help="default 4 (its divisors are shown), or 32 to watch")
    parser.add_argument("--budget-mb", type=int, help="of the device, to watch; default 60")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    args = parser.parse_args()
    if args.budget_mb is not None and not args.watch:
        parser.error(f"--budget-mb {args.budget_mb} is for --watch; add it, or leave the budget out")
    args.budget_mb = 60 if args.budget_mb is None else args.budget_mb
    if args.budget_mb < 1:
        parser.error(f"--budget-mb {args.budget_mb} is no memory; use 1 or more")
    if args.seq is None:
        args.seq = 65536 if args.watch else 128
    if args.chunks is None:
        args.chunks = 32 if args.watch else 4
    check_ranks_and_heads(parser, args)
    P = int(os.environ.get("WORLD_SIZE", "1"))
    if args.watch and P > 1:
        parser.error(f"--watch on {P} ranks: it needs one; start it with python")
    z = Sizes(args.seq, P, 1, args.heads, args.kv_heads, 8, e=8)
    try:
        check_sizes(args.seq, P, args.chunks, args.heads)
        check_chunks(args.chunks)
        if args.seq % (least := P * args.chunks * (4 if args.watch else 2)):  # for pieces of chunks
            raise ValueError(f"pieces of a chunk on a rank would not be equal; use a multiple of {least} tokens")
        check_host(P * model_host_peak(z.with_chunks(args.chunks), 8 * args.heads, 2, "attention"))
    except ValueError as error:
        parser.error(f"--seq {args.seq} --chunks {args.chunks} --heads {args.heads}: {error}")
    return run(args, watch if args.watch else demo, on_cpu=args.watch)  # it emulates the device


if __name__ == "__main__":
    sys.exit(main())
