"""ZeRO: train on many ranks a model that no single rank could hold.

Data parallelism keeps a full copy of everything on each of its dp ranks: parameters, gradients and
optimizer states. With Adam in mixed precision that is 16 bytes per parameter on every rank.

ZeRO removes the copies. The parameters of a layer are flattened into one tensor, its flat
parameter, and split into dp equal shards; rank r owns shard r. An all-reduce of the gradients is a
reduce-scatter, which leaves rank r the sum of shard r, followed by an all-gather. Stop after the
reduce-scatter: this sum is all it takes to update shard r, so only the owner of a shard needs
optimizer states for it (stage 1). The rest of the gradient can be freed (stage 2), and so can the
parameters, if they are all-gathered again whenever a layer runs (stage 3, also called FSDP).

                    each rank stores                             and sends per step, in elements,
                    parameters    gradients   optimizer states   by ring collectives
    data parallel   Ψ             Ψ           k Ψ                2 Ψ (dp-1)/dp
    stage 1         Ψ             Ψ + Ψ/dp    k Ψ/dp             2 Ψ (dp-1)/dp
    stage 2         Ψ             Ψ/dp        k Ψ/dp             (M + 1) Ψ (dp-1)/dp
    stage 3         -             Ψ/dp        k Ψ/dp             3 M Ψ (dp-1)/dp

Ψ parameters, padded so that dp divides each layer; M micro-batches per step; k values stored per
parameter for the optimizer: with SGD its master copy, with Adam also two moments, so k = 1 or 3.
Source: Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7.

    python zero.py                                              one rank
    torchrun --nproc_per_node 4 zero.py                         NCCL on GPUs, Gloo on CPUs
    torchrun --nproc_per_node 4 zero.py --stage 3 --prefetch 0  without overlap

Each stage trains a small model for three steps next to a reference in one process. The last line is
PASS if losses, gradients and parameters agree to 1e-10 and all bytes are as in the table.
"""

import argparse
import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: imported later, by torch.optim, it would keep the group alive
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # since 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# -------------------------------------------------------------------- A layer as one flat parameter
class FlatParam:
    """All parameters of one layer, flattened, padded and split into dp equal shards.

    A layer with 10 parameters on 4 ranks needs 2 zeros of padding. A shard may start in the middle
    of a matrix, because the optimizer works element by element.

        | w w w w w w | b b b | v | 0 0 |      n = 12 elements
        | rank 0 | rank 1 | rank 2 | rank 3 |  shards of n/dp = 3
    """

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup, param_dtype=None):
        params = dict(layer.named_parameters())
        frozen = [name for name, p in params.items() if not p.requires_grad]
        if frozen:
            raise ValueError(f"frozen: {', '.join(frozen)}; a flat parameter is trained as a whole")
        flat = torch.cat([p.detach().flatten() for p in params.values()])
        dp = dist.get_world_size(group)
        rank = dist.get_rank(group)  # in this group, which may be a part of the world
        # --- exercise 3.1: dp equal shards, even if dp does not divide the number of parameters ---
        shard_size = -(-len(flat) // dp)  # rounded up
        padded = F.pad(flat, (0, dp * shard_size - len(flat)))  # [n]
        shard = padded[rank * shard_size : (rank + 1) * shard_size]  # [n/dp]
        # --- end exercise ---
        self.shard = nn.Parameter(shard.clone())  # a view would keep all of `padded` in memory
        self.param_dtype = param_dtype or flat.dtype  # of the full parameters and their gradient
        self.group = group
        self.layer = layer.to("meta")  # keeps its code and gives up its own parameters
        self.shapes = {name: p.shape for name, p in params.items()}

    def new_full(self) -> Tensor:
        """Memory for the full parameters of the layer, [n]."""
        n = dist.get_world_size(self.group) * len(self.shard)
        return torch.empty(n, dtype=self.param_dtype, device=self.shard.device)

    def run_layer(self, full: Tensor, x: Tensor) -> Tensor:
        """The layer's forward pass, with views of `full` in place of its own parameters."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        # One split: its backward is one concatenation. Slices would each make a gradient of [n].
        *pieces, _padding = full.split([*sizes, len(full) - sum(sizes)])
        params = {}
        for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True):
            params[name] = piece.view(shape)
        return functional_call(self.layer, params, (x,))


# ---------------------- Stage 3 in its simplest form: forward all-gathers, backward reduce-scatters
class Unshard(torch.autograd.Function):
    """From a rank's shard to the full parameters; from their gradient to the shard's gradient."""

    # --- exercise 3.2: the two collectives of stage 3, one for each direction ---
    @staticmethod
    def forward(ctx, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[n/dp] -> all-gather -> [n]"""
        ctx.group = group
        full = shard.new_empty(dist.get_world_size(group) * len(shard))
        all_gather(full, shard, group=group)
        return full

    @staticmethod
    def backward(ctx, full_grad: Tensor):
        """[n] -> reduce-scatter -> [n/dp]. A sum: the loss is divided by all ranks' labels."""
        grad_shard = full_grad.new_empty(len(full_grad) // dist.get_world_size(ctx.group))
        reduce_scatter(grad_shard, full_grad, group=ctx.group)
        return grad_shard, None

    # --- end exercise ---


class SimpleZero3:
    """Stage 3: the parameters of a layer are full only while it runs."""

    def __init__(self, layers: list[nn.Module], group: dist.ProcessGroup, param_dtype=None):
        self.group = group
        self.flat_params = [FlatParam(layer, group, param_dtype) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        for flat_param in self.flat_params:
            # Without `checkpoint` autograd would save the full parameters of all layers. With it,
            # only x is saved; the backward pass calls the function again and gathers them again.
            x = checkpoint(unshard_and_run, flat_param, x, use_reentrant=False)
        return x

    def finish_backward(self, last_micro_batch: bool) -> None:
        """Call after each backward pass. Here nothing is left to do."""

    def gather_params(self) -> None:
        """Call after the optimizer's step. Here the next forward pass gathers the parameters."""


def unshard_and_run(flat_param: FlatParam, x: Tensor) -> Tensor:
    full = Unshard.apply(flat_param.shard.to(flat_param.param_dtype), flat_param.group)
    return flat_param.run_layer(full, x)


# ---------------------------- The collectives in two halves, so that a layer can compute in between
# --- exercise 3.3: start the collectives, and wait for a gradient's sum ---
def start_all_gather(flat_param: FlatParam, full: Tensor) -> dist.Work:
    """Start to fill `full` with the shards of all ranks: [n/dp] -> all-gather -> [n]."""
    shard = flat_param.shard.detach().to(full.dtype)
    return all_gather(full, shard, group=flat_param.group, async_op=True)


def start_reduce_scatter(flat_param: FlatParam, full_grad: Tensor) -> None:
    """Start to sum the layer's gradient over all ranks: [n] -> reduce-scatter -> [n/dp]."""
    grad_shard = full_grad.new_empty(len(flat_param.shard))
    work = reduce_scatter(grad_shard, full_grad, group=flat_param.group, async_op=True)
    flat_param.in_flight = (work, grad_shard, full_grad)  # full_grad is being sent, so it must live


def wait_reduce_scatter(flat_param: FlatParam) -> None:
    """Wait for the sum, and add it to the gradient of the shard."""
    work, grad_shard, _ = flat_param.in_flight
    work.wait()
    grad = grad_shard.to(flat_param.shard.dtype)  # sums of many micro-batches need all digits
    flat_param.shard.grad = grad if flat_param.shard.grad is None else flat_param.shard.grad + grad
    flat_param.in_flight = None


# --- end exercise ---
# ---------------------------------------------------- Stages 1 and 2: full parameters on every rank
class Zero1:
    """Stage 1: optimizer states are sharded; parameters and gradients are full on every rank."""

    def __init__(self, layers: list[nn.Module], group: dist.ProcessGroup, param_dtype=None):
        self.group = group
        self.flat_params = [FlatParam(layer, group, param_dtype) for layer in layers]
        for flat_param in self.flat_params:
            flat_param.full = flat_param.new_full().requires_grad_()
        self.gather_params()

    def forward(self, x: Tensor) -> Tensor:
        for flat_param in self.flat_params:
            x = flat_param.run_layer(flat_param.full, x)
        return x

    def finish_backward(self, last_micro_batch: bool) -> None:
        """Autograd adds up the gradients of all micro-batches. Sum the result over the ranks."""
        if last_micro_batch:
            for flat_param in self.flat_params:
                start_reduce_scatter(flat_param, flat_param.full.grad)
            for flat_param in self.flat_params:
                wait_reduce_scatter(flat_param)

    def gather_params(self) -> None:
        """After the optimizer's step each shard is new on one rank, and needed on all."""
        # --- exercise 3.4: the second half of an all-reduce ---
        works = [start_all_gather(p, p.full.detach()) for p in self.flat_params]
        for work in works:
            work.wait()
        for flat_param in self.flat_params:
            flat_param.full.grad = None  # or autograd would add the next step's gradient to it
        # --- end exercise ---


class Zero2(Zero1):
    """Stage 2 also shards the gradients: each is reduced once it is complete, and then freed."""

    def __init__(self, layers: list[nn.Module], group: dist.ProcessGroup, param_dtype=None):
        super().__init__(layers, group, param_dtype)
        self.reducer = GradReducer(max_in_flight=1)

    def forward(self, x: Tensor) -> Tensor:
        for flat_param in self.flat_params:
            full = flat_param.full.detach().requires_grad_()
            full.register_post_accumulate_grad_hook(partial(self.post_backward, flat_param))
            x = flat_param.run_layer(full, x)
        return x

    def post_backward(self, flat_param: FlatParam, full: Tensor) -> None:
        """Autograd calls this hook when the layer's gradient is complete, before it goes on."""
        full_grad, full.grad = full.grad, None
        self.reducer.start(flat_param, full_grad)

    def finish_backward(self, last_micro_batch: bool) -> None:
        self.reducer.wait()  # in every micro-batch: adding up first would need full gradients


class GradReducer:
    """Reduce-scatters in flight: a gradient is sent while the next one is computed."""

    def __init__(self, max_in_flight: int):
        self.max_in_flight = max_in_flight  # because each of them keeps a full gradient alive
        self.in_flight: deque[FlatParam] = deque()  # the oldest first

    def start(self, flat_param: FlatParam, full_grad: Tensor) -> None:
        start_reduce_scatter(flat_param, full_grad)
        self.in_flight.append(flat_param)
        self.wait(self.max_in_flight)

    def wait(self, still_in_flight: int = 0) -> None:
        while len(self.in_flight) > still_in_flight:
            wait_reduce_scatter(self.in_flight.popleft())


# --------------- Stage 3 with overlap: the next layer's parameters arrive while this layer computes
class Zero3(SimpleZero3):
    """Stage 3 again, but the next layer's all-gather is in flight while this layer computes.

    prefetch 0    | gather 0 | layer 0 | gather 1 | layer 1 | gather 2 | layer 2 |
    prefetch 1    | gather 0 | layer 0  | layer 1  | layer 2 |
                             | gather 1 | gather 2 |
    """

    def __init__(self, layers: list[nn.Module], group, param_dtype=None, prefetch: int = 1):
        super().__init__(layers, group, param_dtype)
        self.prefetch = prefetch
        self.all_gathers: dict[int, tuple[Tensor, dist.Work]] = {}  # in flight, by layer
        self.reducer = GradReducer(max_in_flight=prefetch)

    def forward(self, x: Tensor) -> Tensor:
        for i, flat_param in enumerate(self.flat_params):
            x = ShardedLayer.apply(x, flat_param.shard, self, i)
        return x

    def finish_backward(self, last_micro_batch: bool) -> None:
        self.reducer.wait()

    # --- exercise 3.5: the full parameters of a layer, and those of the next one in flight ---
    def start_unshard(self, i: int) -> None:
        """Start the all-gather of layer i, unless it is in flight or there is no such layer."""
        if i in range(len(self.flat_params)) and i not in self.all_gathers:
            full = self.flat_params[i].new_full()
            self.all_gathers[i] = (full, start_all_gather(self.flat_params[i], full))

    def unshard(self, i: int, next_layer: int) -> Tensor:
        """The full parameters of layer i, [n]; those of `next_layer` are in flight on return."""
        self.start_unshard(i)
        if self.prefetch:
            self.start_unshard(next_layer)  # in flight while layer i computes
        full, work = self.all_gathers.pop(i)  # no reference stays here, so the caller can free it
        work.wait()
        return full

    # --- end exercise ---


class ShardedLayer(torch.autograd.Function):
    """One layer of stage 3.

    forward:  all-gather the parameters, run the layer, free them; save only the input x
    backward: all-gather again, run again with autograd, go back, reduce-scatter the gradient
    """

    @staticmethod
    def forward(ctx, x: Tensor, shard: Tensor, zero: Zero3, i: int) -> Tensor:
        # `shard` is an input so that `backward` is called even if x, the tokens, has no gradient.
        ctx.save_for_backward(x)
        ctx.zero = zero
        ctx.i = i
        full = zero.unshard(i, next_layer=i + 1)
        return zero.flat_params[i].run_layer(full, x)  # autograd is off: nothing saves `full`

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        zero = ctx.zero
        i = ctx.i
        (x,) = ctx.saved_tensors
        # --- exercise 3.6: parameters again, forward again, backward, and reduce the gradient ---
        full = zero.unshard(i, next_layer=i - 1).requires_grad_()
        x = x.detach().requires_grad_(x.is_floating_point())  # autograd must stop at this layer
        with torch.enable_grad():
            output = zero.flat_params[i].run_layer(full, x)
        output.backward(grad_output)
        zero.reducer.start(zero.flat_params[i], full.grad)
        # --- end exercise ---
        return x.grad, None, None, None  # the shard gets its gradient in `wait_reduce_scatter`


# -------------------------------------------------------------------------------- The training step
def forward_backward(zero: Zero1 | SimpleZero3, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward and backward of this rank's micro-batches, [M, B, S]. Returns the global loss.

    The loss is a sum over tokens, divided by the number of labels in the global batch. So gradients
    of ranks and micro-batches simply add up, even if these have different numbers of labels.
    """
    num_valid = (labels != IGNORE_INDEX).sum()
    dist.all_reduce(num_valid, group=zero.group)
    loss = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for m in range(len(tokens)):
        micro_loss = loss_sum(zero.forward(tokens[m]), labels[m]) / num_valid.clamp(min=1)
        micro_loss.backward()
        zero.finish_backward(last_micro_batch=m == len(tokens) - 1)
        loss += micro_loss.detach()
    dist.all_reduce(loss, group=zero.group)  # only for the log
    return loss


# ----------------------------------------------------------------------- Model and data, in float64
VOCAB_SIZE = 257  # odd sizes, so that flat parameters need padding
HIDDEN = 33
N_HEADS = 3
FFN_HIDDEN = 45
BATCH = 2
SEQ_LEN = 12
IGNORE_INDEX = -100  # a label without a target


class Block(nn.Module):  # of Llama, without position embedding
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.RMSNorm(HIDDEN)
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp_norm = nn.RMSNorm(HIDDEN)
        self.gate_proj = nn.Linear(HIDDEN, FFN_HIDDEN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN_HIDDEN, bias=False)
        self.down_proj = nn.Linear(FFN_HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H] -> [B, S, H]
        h = self.attn_norm(x)
        q = self.q_proj(h).unflatten(-1, (N_HEADS, -1)).transpose(1, 2)  # [B, heads, S, D]
        k = self.k_proj(h).unflatten(-1, (N_HEADS, -1)).transpose(1, 2)
        v = self.v_proj(h).unflatten(-1, (N_HEADS, -1)).transpose(1, 2)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attn.transpose(1, 2).flatten(2))  # [B, heads, S, D] -> [B, S, H]
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def build_layers(device: torch.device) -> list[nn.Module]:
    torch.manual_seed(0)  # the same initial parameters on every rank
    out_proj = nn.Linear(HIDDEN, VOCAB_SIZE, bias=False)
    head = nn.Sequential(nn.RMSNorm(HIDDEN), out_proj)
    layers = [nn.Embedding(VOCAB_SIZE, HIDDEN), Block(), Block(), head]
    return [layer.to(device, torch.float64) for layer in layers]


def get_batch(step: int, dp: int, num_micro_batches: int, device) -> tuple[Tensor, Tensor]:
    """Random tokens and labels, [dp, M, B, S]. Each rank has a random number of labels."""
    generator = torch.Generator().manual_seed(step)
    shape = (dp, num_micro_batches, BATCH, SEQ_LEN + 1)
    text = torch.randint(VOCAB_SIZE, shape, generator=generator)
    masked = torch.rand(shape, generator=generator) < 0.3
    labels = text.masked_fill(masked, IGNORE_INDEX)
    return text[..., :-1].to(device), labels[..., 1:].to(device)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


# ------------------------------------------------------- The check: three steps next to a reference
STAGES = {"1": Zero1, "2": Zero2, "3": Zero3, "3-simple": SimpleZero3}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@contextmanager
def recording(zero: Zero1 | SimpleZero3, events: list, sent: list) -> Iterator[None]:
    """Note (function, layer) in `events`, and the bytes of each collective in `sent`."""
    dp = dist.get_world_size(zero.group)

    def noted(name: str, function: Callable) -> Callable:
        def call(first, *args, **options):
            if isinstance(first, FlatParam):
                events.append((name, zero.flat_params.index(first)))
            else:  # a collective's output and input: a ring sends every shard but one
                sent.append((dp - 1) * min(first.nbytes, args[0].nbytes))
            return function(first, *args, **options)

        return call

    names = "all_gather reduce_scatter start_all_gather start_reduce_scatter wait_reduce_scatter"
    functions = {name: noted(name, globals()[name]) for name in names.split()}
    run_layer = noted("run_layer", FlatParam.run_layer)
    with patch.dict(globals(), functions), patch.object(FlatParam, "run_layer", run_layer):
        yield


def bytes_stored() -> int:
    """Bytes of all float tensors in this process, each storage once; a few scalars are left out."""
    time.sleep(0.02)  # Gloo's threads free a buffer a moment after the wait
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if issubclass(type(obj), Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    tensors = [t for t in tensors if t.is_floating_point() and t.numel() > 9 and not t.is_meta]
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def expected_bytes(stage: int, num_params: int, dp: int, m: int, k: int) -> tuple[int, int]:
    """Stored, and sent per step, by the table at the top, with 8 bytes per element of float64."""
    shard = num_params // dp
    full_tensors = {1: 2, 2: 1, 3: 0}[stage]  # parameters and gradients, parameters, neither
    collectives = {1: 2, 2: m + 1, 3: 3 * m}[stage]
    return 8 * (full_tensors * num_params + (1 + k) * shard), 8 * collectives * (dp - 1) * shard


def train_reference(args: argparse.Namespace, group: dist.ProcessGroup, device) -> list:
    """Three steps of the full model: losses, and this rank's shards of gradients and parameters."""
    dp = dist.get_world_size(group)

    def shard_of(layer: nn.Module, what: str) -> Tensor:
        flat = torch.cat([getattr(p, what).flatten() for p in layer.parameters()])
        return F.pad(flat, (0, -len(flat) % dp)).chunk(dp)[dist.get_rank(group)].clone()

    model = nn.Sequential(*build_layers(device))
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=0.05)
    history = []
    for step in range(3):
        tokens, labels = get_batch(step, dp, args.micro_batches, device)
        loss = loss_sum(model(tokens.flatten(0, 2)), labels) / (labels != IGNORE_INDEX).sum()
        optimizer.zero_grad()
        loss.backward()
        grads = [shard_of(layer, "grad") for layer in model]
        optimizer.step()
        params = [shard_of(layer, "data") for layer in model]
        history.append((loss.item(), grads, params))
    return history


def check(stage: str, reference: list, args: argparse.Namespace, group, device) -> bool:
    """Train one stage next to the reference. True if everything agrees on all ranks."""
    dp = dist.get_world_size(group)
    rank = dist.get_rank(group)
    stored_before = bytes_stored()
    options = {"prefetch": args.prefetch} if stage == "3" else {}
    zero = STAGES[stage](build_layers(device), group, **options)
    shards = [flat_param.shard for flat_param in zero.flat_params]
    optimizer = OPTIMIZERS[args.optimizer](shards, lr=0.05)
    events = []
    errors = []
    for step, (ref_loss, ref_grads, ref_params) in enumerate(reference):
        tokens, labels = get_batch(step, dp, args.micro_batches, device)
        sent = []
        with recording(zero, events, sent):
            loss = forward_backward(zero, tokens[rank], labels[rank])
            stored = bytes_stored() - stored_before
            optimizer.step()
            zero.gather_params()
        errors.append(abs(loss.item() - ref_loss))
        for shard, ref_grad, ref_param in zip(shards, ref_grads, ref_params, strict=True):
            errors.append((shard.grad - ref_grad).abs().max().item())
            errors.append((shard - ref_param).abs().max().item())
        optimizer.zero_grad()
    num_params = dp * sum(len(shard) for shard in shards)
    k = {"sgd": 1, "adamw": 3}[args.optimizer]
    expected = expected_bytes(int(stage[0]), num_params, dp, args.micro_batches, k)
    measured = (stored, sum(sent))
    error = torch.tensor(errors).max().item()  # NaN if one of them is NaN
    passed = error <= 1e-10 and measured == expected
    ranks_passed = torch.tensor(int(passed), device=device)
    dist.all_reduce(ranks_passed, group=group)
    if rank == 0:
        print(f"stage {stage}: largest error {error:.1e}")
        print(f"    bytes stored {measured[0]:,}, by formula {expected[0]:,}")
        print(f"    bytes sent per step {measured[1]:,}, by formula {expected[1]:,}")
        if stage == "3":
            print("    " + ", ".join(f"{name} {layer}" for name, layer in events[:9]) + ", ...")
    return ranks_passed.item() == dp


# ------------------------------------------------------------------- Options, and the process group
def fail(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
        print(f"{os.path.basename(__file__)}: {message}", file=sys.stderr)
    sys.exit(2)


def init_distributed() -> torch.device:
    """Start torchrun's process group, or one of this process alone. Returns this rank's device."""
    num_gpus = torch.cuda.device_count()
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 0 < num_gpus < num_local:
        fail(f"--nproc_per_node {num_local}: use at most {num_gpus}, one for each GPU here")
    if num_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # or all would use GPU 0
    single = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if num_gpus else "gloo", timeout=timedelta(seconds=60), **single)
    return torch.device("cuda" if num_gpus else "cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description="ZeRO in one file", allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--stage", choices=STAGES, help="default: all of them")
    parser.add_argument("--prefetch", type=int, choices=(0, 1), default=1, help="0: no overlap")
    parser.add_argument("--micro-batches", type=int, choices=range(1, 9), default=2)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    args = parser.parse_args()
    device = init_distributed()
    reference = train_reference(args, dist.group.WORLD, device)
    stages = [args.stage] if args.stage else STAGES
    passed = [check(stage, reference, args, dist.group.WORLD, device) for stage in stages]
    if dist.get_rank() == 0:
        print("PASS" if all(passed) else "FAIL")
    dist.destroy_process_group()
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
