"""Chapter 1, recomputation as a policy: which results to save, by operation, and how much memory that frees.

The problem. "Nothing", "the core of attention" or "whole blocks" are three points of a trade-off between
bytes saved for backward and FLOPs recomputed. There are better points in between, because bytes and FLOPs
come from different operations. Matrix products have nearly all FLOPs, but norms, RoPE and SwiGLU, which are
nearly free to recompute, have nearly half of the bytes.

The idea. Decide for each operation:

    policy     saves per token in a block, in elements         recomputes in backward
    keep       8 H + 2 N_kv D + N + 4 F + 2                    nothing
    products   5 H + 2 N_kv D + N + 2 F                        norms, RoPE, SwiGLU: no matrix product at all
    full       H                                               everything but `down_proj`
    host       nothing: `keep`'s bytes are on the host         nothing, but bytes cross the bus, back once per use

    bytes |keep                                 and for a budget: the cheapest mixture that fits. Blocks are
          | \\                                   equal, so some blocks get one policy and the rest the next.
          |  products                           Mixtures of `keep` and `full` alone, such as "recompute every
          |     `-._                            other block", are above this line everywhere between its ends.
          |         `-._ full
          +-------------- FLOPs again

The bytes are exact (fp32, fused attention of the CPU), the FLOPs are as counted by torch. PyTorch's selective
checkpoint calls the policy for every operation, and the second run takes what was saved instead of
computing it. `host` waits for each copy; chapter 8 overlaps the copies with computation.

    python recompute_policy.py             gradients, bytes and FLOPs of each policy and of budgets; ends with PASS
    python recompute_policy.py --tables    the table of README.md

Symbols: see llama.py; T = B S. GB = 10^9 bytes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from accounting import AROUND_THE_BLOCKS, GB, activations, forward_flops, markdown, recomputed_flops
from llama import (
    LLAMA3_8B,
    Llama,
    LlamaConfig,
    OneLineParser,
    Parts,
    Report,
    attention_math,
    next_token_loss,
    recomputed,
)
from step_peak import Peak
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

POLICIES = ("keep", "products", "full")  # from most bytes to fewest
HOST = "host"
aten = torch.ops.aten
PRODUCTS = {
    *(aten.mm.default, aten.bmm.default, aten.addmm.default),
    *(aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default),
    *(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default),
}

# ------------------------------------------------------------------------------------------------ the policy


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Called for each operation of a block: save its result, or recompute it?"""
    # --- exercise 1.34: what is expensive to run again is kept ---
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
    # --- end exercise ---


class OnHost:
    """A copy of one storage on the host, shared by all saved tensors with that storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.bytes = flat.to("cpu", copy=True)

    def back(self, like: tuple) -> Tensor:
        dtype, device, size, stride, offset = like
        flat = self.bytes.to(device, copy=True)
        return torch.empty(0, dtype=dtype, device=device).set_(flat.untyped_storage(), offset, size, stride)


class Host:
    """Hooks that copy saved tensors to the host in forward and back in backward. `bytes` are on the host now.

    The weights are not copied. If three operations save one tensor there is one copy, found by its storage.
    The entry is deleted when the storage is freed, because the next storage may get the same address.
    """

    def __init__(self, model: Llama) -> None:
        # Kept alive, so that no other storage gets the address of a weight.
        self.weights = [p.untyped_storage() for p in model.parameters()]
        self.stay = {storage._cdata for storage in self.weights}
        self.copies: weakref.WeakValueDictionary[int, OnHost] = weakref.WeakValueDictionary()
        self.bytes = 0

    def count(self, size: int) -> None:
        self.bytes += size

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.stay:
            return tensor
        copy = self.copies.get(key)
        if copy is None:
            copy = self.copies[key] = OnHost(storage)
            self.count(storage.nbytes())
            weakref.finalize(copy, self.count, -storage.nbytes()).atexit = False
            weakref.finalize(storage, self.copies.pop, key, None).atexit = False
        return copy, (tensor.dtype, tensor.device, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].back(packed[1])

    def run(self, block: Any, *args: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return block(*args)


def with_policies(model: Llama, policies: Sequence[str], host: Host | None = None) -> Llama:
    """`model` with one policy per block. `host` stores the saved tensors of blocks with the policy "host".

    ValueError for a wrong number of policies, an unknown policy, or "host" without a host.
    """
    if len(policies) != len(model.model.layers):
        raise ValueError(f"{len(policies)} policies for {len(model.model.layers)} blocks")
    for block, policy in zip(model.model.layers, policies, strict=True):
        if policy not in (*POLICIES, HOST):
            raise ValueError(f"policy {policy!r} must be one of {', '.join((*POLICIES, HOST))}")
        if policy == HOST and host is None:
            raise ValueError("policy 'host' needs a Host")
        plain = type(block).forward.__get__(block)  # parameters and their names do not change
        if policy == "products":
            contexts = partial(create_selective_checkpoint_contexts, keep_products)
            block.forward = partial(checkpoint, plain, use_reentrant=False, context_fn=contexts)
        elif policy == HOST:
            block.forward = partial(host.run, plain)
        else:
            block.forward = plain if policy == "keep" else recomputed(plain)
    return model


# ------------------------------------------------------------------------------------------ what it costs


def block_bytes(config: LlamaConfig, batch: int, seq: int, policy: str) -> int:
    """Bytes that one block saves for backward on the device, fp32."""
    c = config
    T = batch * seq
    if policy == HOST:
        return 0
    if policy == "products":
        # The input; results of out, down; of q and of attention; of k, v; log-sum-exp; of gate, up.
        attention = 2 * c.attention_width + 2 * c.kv_heads * c.head_dim + c.heads
        return 4 * T * (c.hidden + 2 * c.hidden + attention + 2 * c.intermediate)
    kept = activations(c, batch, seq, 4, "fused", "none" if policy == "keep" else "full")
    return sum(size for name, size in kept.items() if name not in AROUND_THE_BLOCKS) // c.layers


def block_flops(config: LlamaConfig, batch: int, seq: int, policy: str) -> int:
    """Matmul FLOPs that one block recomputes in backward."""
    return recomputed_flops(config, batch, seq, "full", "fused") // config.layers if policy == "full" else 0


def by_budget(config: LlamaConfig, batch: int, seq: int, budget: int) -> list[str]:
    """A policy for each block: together at most `budget` bytes, with the fewest matmul FLOPs recomputed.

    The first blocks recompute more, because in backward they come last, when the others have been freed.
    ValueError if not even `full` fits.
    """
    size = {policy: block_bytes(config, batch, seq, policy) for policy in POLICIES}
    # --- exercise 1.35: the cheapest policies that fit ---
    policies = ["keep"] * config.layers
    for weaker, stronger in (("keep", "products"), ("products", "full")):
        for i in range(config.layers):
            if sum(size[policy] for policy in policies) <= budget:
                return policies
            if policies[i] == weaker:
                policies[i] = stronger
    # --- end exercise ---
    if sum(size[policy] for policy in policies) > budget:
        raise ValueError(f"budget {budget} is below {config.layers * size['full']}, what full recomputation keeps")
    return policies


# ----------------------------------------------------------------------------------------------------- demo


def kept(model: Llama, tokens: Tensor, host: Host | None = None) -> tuple[int, int]:
    """Bytes alive after forward but not before, without scalars: (on device, on host).

    (Live tensors are counted, because autograd's saved tensors do not include a selective checkpoint's.)
    """
    with Peak([tokens, list(model.parameters())]) as meter:
        before = meter.now
        loss = next_token_loss(model, tokens)
        away = host.bytes if host else 0
        after = meter.now - away  # in this demo the host and the device share one memory
    del loss
    return after - before, away


def predicted(config: LlamaConfig, batch: int, seq: int, policies: Sequence[str]) -> int:
    around = activations(config, batch, seq)
    rest = around["last norm"] + around["log-probabilities"] - 4 + 8 * batch * seq  # 8 B S: the labels
    rest += around["RoPE tables (fp32)"] * any(policy != HOST for policy in policies)
    return rest + sum(block_bytes(config, batch, seq, policy) for policy in policies)


def predicted_on_host(config: LlamaConfig, batch: int, seq: int, policies: Sequence[str]) -> int:
    away = list(policies).count(HOST)
    tables = activations(config, batch, seq)["RoPE tables (fp32)"]
    return away * block_bytes(config, batch, seq, "keep") + (away > 0) * tables


def curve(config: LlamaConfig, batch: int, seq: int) -> list[tuple[str, int, int]]:
    """(mixture, bytes of all blocks, FLOPs recomputed): by operations, and by whole blocks only."""
    points = []
    for name, ladder in (("by operations", POLICIES), ("whole blocks", ("keep", "full"))):
        for weaker, stronger in pairwise(ladder):
            for count in range(config.layers + 1):
                mixture = [stronger] * count + [weaker] * (config.layers - count)
                sizes = (sum(f(config, batch, seq, policy) for policy in mixture) for f in (block_bytes, block_flops))
                points.append((name, *sizes))
    return points


def table() -> str:
    """Llama-3 8B, one sequence of 8192 tokens: bytes that each policy saves, and FLOPs that it recomputes."""
    step = 3 * sum(forward_flops(LLAMA3_8B, 1, 8192).values())
    rows = []
    for policy in POLICIES:
        size, again = (LLAMA3_8B.layers * f(LLAMA3_8B, 1, 8192, policy) for f in (block_bytes, block_flops))
        rows.append([policy, f"{size / GB:,.1f}", f"{again / step:.1%}"])
    for budget in (80, 40, 20):
        policies = by_budget(LLAMA3_8B, 1, 8192, budget * GB)
        size, again = (sum(f(LLAMA3_8B, 1, 8192, p) for p in policies) for f in (block_bytes, block_flops))
        words = ", ".join(f"{policies.count(p)} {p}" for p in POLICIES if p in policies)
        rows.append([f"budget of {budget} GB: {words}", f"{size / GB:,.1f}", f"{again / step:.1%}"])
    return markdown("policies", ["fp32, 8192 tokens", "GB saved by blocks", "FLOPs again"], rows)


def main() -> int:
    parser = OneLineParser(description="Recomputation decided by operation and by a budget: gradients, bytes, FLOPs.")
    parser.add_argument("--tables", action="store_true", help="print the table of README.md and end")
    if parser.parse_args().tables:
        print(table())
        return 0
    report = Report()
    config = LlamaConfig(hidden=64, layers=3, intermediate=172)
    B, S = (2, 48)
    tokens = torch.randint(config.vocab_size, (B, S), generator=torch.Generator().manual_seed(0))
    most = config.layers * block_bytes(config, B, S, "keep")
    plans = [[policy] * config.layers for policy in POLICIES]
    plans += [by_budget(config, B, S, int(share * most)) for share in (0.9, 0.5, 0.2)]
    plans += [[HOST] * config.layers, [HOST, "products", "keep"]]
    want: dict[str, Tensor] = {}
    for plan in plans:
        name = ", ".join(plan)
        model = Llama(config).double()
        with_policies(model, plan, Host(model))
        next_token_loss(model, tokens).backward()
        got = {at: p.grad for at, p in model.named_parameters() if p.grad is not None}
        want = want or got
        errors = [(got[at] - want[at]).abs().max() / want[at].abs().max() for at in want]
        error = torch.stack(errors).max().item()  # NaN if any error is NaN
        report.add(f"gradients: {name}", "<= 1e-10", f"{error:.1e}", error <= 1e-10)
        size = predicted(config, B, S, plan)
        on_host = predicted_on_host(config, B, S, plan)
        model = Llama(config)
        host = Host(model)
        measured, measured_on_host = kept(with_policies(model, plan, host), tokens, host)
        report.add("  bytes kept", f"{size:,}", f"{measured:,}", size == measured)
        if HOST in plan:
            report.add("  bytes on the host", f"{on_host:,}", f"{measured_on_host:,}", on_host == measured_on_host)
        with FlopCounterMode(display=False) as counter:  # it does not support the CPU's fused kernel
            explicit = Llama(config, replace(Parts(), attention=attention_math))
            next_token_loss(with_policies(explicit, plan, Host(explicit)), tokens).backward()
        step = 3 * sum(forward_flops(config, B, S).values())
        flops = step + sum(block_flops(config, B, S, policy) for policy in plan)
        counted = counter.get_total_flops()
        report.add("  matmul FLOPs of forward and backward", f"{flops:,}", f"{counted:,}", flops == counted)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
