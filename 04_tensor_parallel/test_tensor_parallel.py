"""The core file of tensor parallelism against an unsharded model written here, and against its own formulas."""

import contextlib
import io
import itertools
import math
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import tensor_parallel
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.late import Late
from harness.meter import communication, held_bytes, peak_memory, saved_activations
from harness.ranks import run_ranks
from harness.reference import assert_same, assert_same_named, error_between
from tensor_parallel import (
    IGNORE_INDEX,
    TINY,
    ModelConfig,
    Params,
    TPContext,
    all_reduce_partial_grads,
    block,
    column_parallel_linear,
    expected_bytes,
    full_params,
    get_batch,
    loss_sum,
    measured_bytes,
    overlapped_column_parallel_linear,
    row_parallel_linear,
    shard_weight,
    train,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent

SMALL = ModelConfig(13, 16, 1, 4, 2, 24, batch=2, seq_len=6)  # 13 tokens on 4 ranks: 4 rows each, 3 of them padding
SMALLER = SMALL._replace(vocab_size=9, n_kv_heads=1)  # 3 rows on a rank: rank 3 of 4 stores nothing but padding
LAYOUTS = (False, True)  # without sequence parallelism, and with it
FORMS = (column_parallel_linear, overlapped_column_parallel_linear)


# -------------------------------------------------------------------------- the unsharded model, by torch's own modules


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, kv_hidden = config.hidden, config.n_kv_heads * config.hidden // config.n_heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.q_proj, self.o_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.k_proj, self.v_proj = nn.Linear(hidden, kv_hidden), nn.Linear(hidden, kv_hidden)
        self.gate_proj, self.up_proj = nn.Linear(hidden, config.ffn_hidden), nn.Linear(hidden, config.ffn_hidden)
        self.down_proj, self.head_dim = nn.Linear(config.ffn_hidden, hidden), hidden // config.n_heads

    def forward(self, x: Tensor) -> Tensor:
        h = self.attn_norm(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(attn.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class ReferenceModel(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed, self.head = (nn.Embedding(config.vocab_size, config.hidden) for _ in range(2))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.double()
        with torch.no_grad():
            for name, value in full_params(config).items():
                self.named()[name].copy_(value)

    def named(self) -> Params:
        """By the names of the core file: blocks.0.q_proj.bias is 0.q_proj.bias."""
        return {name.removeprefix("blocks."): p for name, p in self.named_parameters()}

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.blocks:
            x = layer(x)
        logits = (self.norm(x) @ self.head.weight.T).double()
        return F.cross_entropy(logits.mT, labels, ignore_index=IGNORE_INDEX)


@cache
def reference(config: ModelConfig) -> tuple[list[Tensor], list[Params]]:
    """As `train`: losses; gradients of three steps of SGD, and the parameters."""
    model, losses, history = ReferenceModel(config), [], []
    for step in range(3):
        model.zero_grad()
        loss = model.loss(*get_batch(step, config))
        loss.backward()
        losses.append(loss.detach())
        history.append({name: p.grad.clone() for name, p in model.named().items()})
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return losses, [*history, {name: p.detach() for name, p in model.named().items()}]


def test_labels_are_the_next_tokens():
    """`reference` reads them from the core file as well."""
    batches = [get_batch(step, SMALL) for step in range(3)]
    for tokens, labels in batches:
        assert tokens.shape == labels.shape == (2, 6)
        assert torch.equal(labels[:, 1:-1], tokens[:, 2:]) and (labels[:, 0] == IGNORE_INDEX).all()
        assert tokens.min() >= 0 and tokens.max() < SMALL.vocab_size
    assert not torch.equal(batches[0][0], batches[1][0])


def shard_params(full: Params, config: ModelConfig, tp: TPContext, dtype=torch.float64) -> Params:
    return {name: shard_weight(name, x, config, tp).to(dtype).requires_grad_() for name, x in full.items()}


def expected_shard(name: str, full: Tensor, config: ModelConfig, rank: int, tp: int) -> Tensor:
    """What one of tp ranks should store of a tensor: said once more, by slices, so that `shard_weight` is tested."""
    layer = name.split(".")[-2]
    if layer in ("k_proj", "v_proj"):
        head_dim = config.hidden // config.n_heads
        num_heads = max(1, config.n_kv_heads // tp)  # on a rank
        first = rank * config.n_kv_heads // tp
        return full[first * head_dim : (first + num_heads) * head_dim]
    if layer in ("q_proj", "gate_proj", "up_proj"):
        n = full.shape[0] // tp
        return full[rank * n : (rank + 1) * n]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        n = full.shape[1] // tp
        return full[:, rank * n : (rank + 1) * n]
    if layer in ("embed", "head"):
        n = -(-config.vocab_size // tp)
        shard = full[rank * n : (rank + 1) * n]
        return torch.cat((shard, shard.new_zeros(n - len(shard), full.shape[1])))
    return full


def train_all(configs: list[ModelConfig], group: dist.ProcessGroup | None = None) -> list[tuple]:
    """What three steps leave on this rank, for each config without sequence parallelism and with it, in both forms."""
    results = []
    for config, sequence_parallel, form in itertools.product(configs, LAYOUTS, FORMS):
        losses, history = train(config, TPContext(group or dist.group.WORLD, sequence_parallel, form))
        results.append((losses, [{name: x.detach() for name, x in part.items()} for part in history]))
    return results


def assert_reference(ranks: list, configs: list[ModelConfig]) -> None:
    """`ranks`: what `train_all` returned on each rank of a group."""
    for rank, results in enumerate(ranks):
        runs = itertools.product(configs, LAYOUTS, FORMS)
        for (config, sequence_parallel, form), got in zip(runs, results, strict=True):
            layout = f"{form.__name__}, {'sequence' if sequence_parallel else 'tensor'}"
            losses, history = reference(config)
            for step, (loss, expected) in enumerate(zip(got[0], losses, strict=True)):
                assert_same(loss, expected, what=f"{layout} parallel, loss of step {step}", rank=rank)
            for when, ours, full in zip(("step 0", "step 1", "step 2", "the end"), got[1], history, strict=True):
                expected = {name: expected_shard(name, x, config, rank, len(ranks)) for name, x in full.items()}
                for name in [name for name in expected if name.endswith("k_proj.bias") and when != "the end"]:
                    # Zero: what is added to all keys moves all scores of a query alike.
                    assert ours.pop(name).abs().max() < 1e-14 and expected.pop(name).abs().max() < 1e-14, name
                assert_same_named(ours, expected, what=f"{layout} parallel, {when}:", rank=rank)


@pytest.mark.always("2")
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_three_steps_match_reference(tp):
    configs = [TINY, SMALLER]
    assert_reference(run_ranks(tp, train_all, configs), configs)


def train_in_slice() -> list:
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    return train_all([SMALLER], groups[dist.get_rank() % 2])


@pytest.mark.prove
def test_two_slices_of_the_world_train_two_models():
    zero, one, two, three = run_ranks(4, train_in_slice)
    for group in ([zero, two], [one, three]):  # in a group ranks are sorted, however they were named
        assert_reference(group, [SMALLER])


def replicated_grads() -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    tp = TPContext(dist.group.WORLD, sequence_parallel=True)
    params = shard_params(full_params(SMALL), SMALL, tp)
    loss_sum(params, *get_batch(0, SMALL), SMALL, tp).backward()
    names = ["norm.weight", "0.attn_norm.weight", "0.mlp_norm.weight", "0.o_proj.bias", "0.down_proj.bias"]
    before = [params[name].grad.clone() for name in names]
    with communication() as wire:
        all_reduce_partial_grads(params, SMALL, tp)
    return before, [params[name].grad for name in names], dict(wire.calls)


def test_gradients_of_norms_and_row_biases_are_summed_with_sequence_parallelism():
    (first, summed, calls), (second, again, _) = run_ranks(2, replicated_grads)
    assert calls == {"all_reduce": len(first)}, f"{len(first)} gradients are partial sums, and these were sent: {calls}"
    for a, b, total, same in zip(first, second, summed, again, strict=True):
        assert not torch.equal(a, b), "the ranks saw the same tokens"
        assert_same(total, a + b, what="the gradient of a replicated parameter")
        assert torch.equal(total, same)


# -------------------------------------------------------------------------------------------- operators and the example


def two_by_two(column_linear) -> list:
    rank, tp = dist.get_rank(), TPContext(dist.group.WORLD, False)
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    A, B = torch.tensor([[1.0, 3.0], [2.0, 4.0]]), torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    (y,) = column_linear(x, [A[:, rank : rank + 1].T.contiguous()], [None], tp)
    z = row_parallel_linear(y, B[rank : rank + 1].T, torch.tensor([0.5, 0.5]), tp)
    dy, dx = torch.autograd.grad(z.sum(), (y, x))
    return [y.tolist(), z.tolist(), dy.tolist(), dx.tolist()]


@pytest.mark.parametrize("column_linear", FORMS)
def test_the_example_by_hand(column_linear):
    first, second = run_ranks(2, two_by_two, column_linear)
    assert first == [[[5]], [[27.5, 11.5]], [[1]], [[10, 14]]]
    assert second == [[[11]], [[27.5, 11.5]], [[3]], [[10, 14]]]


def layouts_sent() -> list[bool]:
    """Is what is gathered in one piece? Gloo takes what is not, NCCL refuses it."""
    tp, found = TPContext(dist.group.WORLD, sequence_parallel=True), []

    def gather(out: Tensor, x: Tensor, **options):
        found.append(x.is_contiguous())
        return all_gather_single(out, x, **options)

    all_gather_single = tensor_parallel.all_gather_single
    with patch.object(tensor_parallel, "all_gather_single", gather):
        for column_linear in FORMS:
            x = torch.arange(12.0).view(2, 6)[:, ::2].requires_grad_()
            (y,) = column_linear(x, [torch.ones(2, 3, requires_grad=True)], [None], tp)
            y.sum().backward()
    return found


def test_an_x_with_gaps_is_gathered_in_one_piece_forward_and_backward():
    assert run_ranks(2, layouts_sent) == [[True] * 3] * 2  # the simple form saves all of x


def operator_table(rank: int, tp: int) -> dict[str, tuple[Tensor, ...]]:
    """Input, output, gradient of the output, gradient of the input: of each operator on one rank."""
    full = torch.arange(8.0).view(4, 2)
    rows = slice(rank * 4 // tp, (rank + 1) * 4 // tp)
    ranks = sum(range(1, tp + 1))
    scaled = full * (rank + 1)  # of each rank another one
    return {
        "copy_to_tp": (full, full, scaled, full * ranks),
        "reduce_from_tp": (scaled, full * ranks, full, full),
        "gather_from_sp": (full[rows], full, scaled, (full * ranks)[rows]),
        "reduce_scatter_to_sp": (scaled, (full * ranks)[rows], full[rows], full),
    }


def operators() -> tuple[dict[str, list[tuple]], list[bool]]:
    """Of each operator, for two layouts in memory: output, its bytes in memory, gradient, and the input afterwards.
    And whether each message was in one piece."""
    results, in_one_piece = {}, []

    def recorded(collective):
        def call(*given, **options):
            in_one_piece.append(all(x.is_contiguous() for x in given if isinstance(x, Tensor)))
            return collective(*given, **options)

        return call

    names = ("all_gather_single", "reduce_scatter_single")
    singles = {name: recorded(getattr(tensor_parallel, name)) for name in names}
    with patch.multiple(tensor_parallel, **singles), patch.object(dist, "all_reduce", recorded(dist.all_reduce)):
        for name, (given, _, grad_output, _) in operator_table(dist.get_rank(), dist.get_world_size()).items():
            results[name] = []
            for lay_out in (lambda x: x.clone(), lambda x: x.T.contiguous().T):
                x = lay_out(given).requires_grad_()
                out = getattr(tensor_parallel, name)(x, dist.group.WORLD)
                out.backward(lay_out(grad_output))
                results[name].append((out.detach(), out.untyped_storage().nbytes(), x.grad, x.detach()))
    return results, in_one_piece


def test_operators_match_the_table():
    for rank, (results, in_one_piece) in enumerate(run_ranks(2, operators)):
        for name, (given, expected, _, expected_grad) in operator_table(rank, 2).items():
            for out, nbytes, grad, x in results[name]:
                assert_same(out, expected, what=f"{name}: the output", rank=rank)
                assert_same(grad, expected_grad, what=f"{name}: the gradient", rank=rank)
                assert torch.equal(x, given), f"{name}: the input was overwritten"
                assert nbytes == expected.nbytes, f"{name}: {nbytes} bytes stay in memory for {expected.nbytes}"
        assert all(in_one_piece), "Gloo takes a message with gaps, NCCL refuses it"


# ---------------------------------------------------------------------------------------------------------------- bytes


def count_bytes(config: ModelConfig) -> list[tuple]:
    """Of each layout and form: bytes by the meter and by the core file, collectives, bytes alive but not saved."""
    found = []
    for sequence_parallel, column_linear in itertools.product(LAYOUTS, FORMS):
        tp = TPContext(dist.group.WORLD, sequence_parallel, column_linear)
        params = shard_params(full_params(config), config, tp)
        stored = held_bytes(params.values())
        rows = config.batch * config.seq_len // (tp.size if sequence_parallel else 1)
        x = torch.randn(rows, config.hidden, dtype=torch.float64)
        saving = saved_activations(exclude=params.values())
        with communication() as wire, peak_memory() as memory, saving as activations:
            z = block(x.requires_grad_(), params, 0, config, tp)
            saved = activations.bytes
            unsaved = memory.current + x.nbytes - z.nbytes - saved  # alive by other means, on ctx or in a closure
            z.sum().backward()
        by_itself = measured_bytes(params, config, tp)
        found.append(([stored.parameters, saved, wire.total], dict(wire.calls), by_itself, unsaved))
    return found


def test_bytes_stored_saved_and_sent_match_the_formulas():
    for tp, config in ((4, TINY), (2, SMALL), (1, SMALL)):
        for results in run_ranks(tp, count_bytes, config):
            runs = itertools.product(LAYOUTS, (False, True))
            for (sequence_parallel, overlapped), found in zip(runs, results, strict=True):
                measured, calls, by_itself, unsaved = found
                assert unsaved == 0, f"{unsaved} bytes live until the backward pass, but not by save_for_backward"
                layout = f"{sequence_parallel=}, {overlapped=}"
                names = "stored", "saved", "sent"
                expected = dict(zip(names, expected_bytes(config, tp, sequence_parallel, overlapped), strict=True))
                for counts in (measured, by_itself):
                    assert {layout: dict(zip(names, counts, strict=True))} == {layout: expected}
                collectives = {"all_gather": 6 if overlapped else 4, "reduce_scatter": 4}
                assert calls == (collectives if sequence_parallel else {"all_reduce": 4}), f"collectives: {calls}"
    layouts = ((1, False, False), (4, False, False), (4, True, False), (4, True, True))
    one, tensor, plain, overlapped = saved = [expected_bytes(TINY, *layout)[1] for layout in layouts]
    assert overlapped * 4 == one and tensor > plain > overlapped
    assert expected_bytes(TINY, 4, True, True, 2) == [n // 4 for n in expected_bytes(TINY, 4, True, True)], "bf16"
    text = (HERE / "README.md").read_text()
    assert all(f"{nbytes:,}" in text for nbytes in saved)


def ends_of_the_model(tokens: int) -> tuple:
    tp = TPContext(dist.group.WORLD, False)
    weight = torch.randn(4, 16, dtype=torch.float64)
    with communication() as loss:
        vocab_parallel_cross_entropy(torch.zeros(tokens, 4, dtype=torch.float64), torch.arange(tokens), 13, tp)
    with communication() as embedding:
        vocab_parallel_embedding(torch.arange(tokens), weight, tp)
    return loss.total, embedding.events


def test_the_loss_sends_three_values_per_token_and_the_embedding_one_sum():
    for sent, events in run_ranks(4, ends_of_the_model, T := 12):
        expected = 2 * (4 - 1) * 3 * T * 8 // 4
        assert sent == expected, f"the loss sends {sent} bytes, and three values per token are {expected}"
        assert events == [("all_reduce", T * 16 * 8, 4)]


def memory_of_shards() -> dict[str, tuple[int, int, bool]]:
    """Of each weight: bytes of this rank's shard, bytes that it keeps in memory, whether the full weight is there."""
    tp, found = TPContext(dist.group.WORLD, True), {}
    for name, x in full_params(SMALL).items():
        shard = shard_weight(name, x, SMALL, tp)
        storage = shard.untyped_storage()
        found[name] = shard.nbytes, storage.nbytes(), storage.data_ptr() == x.untyped_storage().data_ptr()
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_a_shard_owns_its_memory(tp):
    for found in run_ranks(tp, memory_of_shards):
        for name, (nbytes, stored, shared) in found.items():
            assert stored == nbytes and not shared, f"{name}: a view keeps the full weight alive"


def memory_between_steps(sequence_parallel: bool) -> list[int]:
    tp = TPContext(dist.group.WORLD, sequence_parallel, overlapped_column_parallel_linear)
    params, alive = shard_params(full_params(SMALL), SMALL, tp), []
    with peak_memory() as memory:
        for step in range(12):
            tokens, labels = get_batch(0, SMALL)
            loss_sum(params, tokens, labels, SMALL, tp).backward()
            all_reduce_partial_grads(params, SMALL, tp)
            if step % 2:
                with torch.no_grad():
                    loss_sum(params, tokens, labels, SMALL, tp)
            for p in params.values():
                p.grad = None
            del tokens, labels
            alive.append(memory.current)
    return alive


@pytest.mark.prove
@pytest.mark.parametrize("sequence_parallel", LAYOUTS)
def test_nothing_of_a_step_or_of_a_forward_pass_alone_stays_alive(sequence_parallel):
    for alive in run_ranks(2, memory_between_steps, sequence_parallel):
        # Gloo's threads may drop a buffer a little later: what leaks is there after every step.
        assert min(alive[6:]) <= min(alive[:6]), f"bytes alive after each step: {alive}"


# --------------------------------------------------------------------------------------------------- loss and precision


def losses_of_shards(logits: list[Tensor], labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    groups = [dist.new_group([*range(first, first + size)]) for first in range(0, 4, size)]
    mine, found = dist.get_rank() // size, []
    tp = TPContext(groups[mine], False)
    for full in logits:
        full = full + 3000.0 * mine  # the same loss, and far above the logits of another group
        n = -(-full.shape[1] // tp.size)
        padded = F.pad(full, (0, n * tp.size - full.shape[1]), value=7000.0)  # logits of padding must not matter
        shard = padded[:, tp.rank * n : (tp.rank + 1) * n].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(shard, labels, full.shape[1], tp)
        loss.backward()
        found.append((loss.detach(), shard.grad))
    return found


def test_loss_of_huge_logits_ignored_labels_and_padding():
    generator, vocab_size = torch.Generator().manual_seed(0), 9
    labels = torch.tensor([0, 8, IGNORE_INDEX, 3, 4, IGNORE_INDEX])
    scales = ((1.0, 0.0), (50.0, 3000.0), (50.0, -3000.0))
    each = [torch.randn(len(labels), vocab_size, generator=generator, dtype=torch.float64) for _ in scales]
    each = [(full * scale + shift).requires_grad_() for full, (scale, shift) in zip(each, scales, strict=True)]
    losses = [F.cross_entropy(full, labels, ignore_index=IGNORE_INDEX, reduction="sum") for full in each]
    sum(losses).backward()
    for tp in (4, 2, 1):
        n = -(-vocab_size // tp)
        for rank, found in enumerate(run_ranks(4, losses_of_shards, [full.detach() for full in each], labels, tp)):
            for full, expected, (_, shift), (loss, grad) in zip(each, losses, scales, found, strict=True):
                shards = F.pad(full.grad, (0, n * tp - vocab_size)).split(n, 1)
                assert_same(loss, expected, what=f"the loss of logits around {shift}", rank=rank)
                assert_same(grad, shards[rank % tp], what="the gradient of logits", rank=rank)


def loss_of_bf16_logits() -> float:
    logits = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    labels = torch.arange(64)
    expected = F.cross_entropy(logits.double(), labels, reduction="sum")
    tp = TPContext(dist.group.WORLD, False)
    shard = logits.chunk(tp.size, 1)[tp.rank].clone().requires_grad_()
    return error_between(vocab_parallel_cross_entropy(shard, labels, 256, tp), expected)


def test_a_loss_of_bf16_logits_is_summed_in_fp32():
    assert all(error < 1e-5 for error in run_ranks(2, loss_of_bf16_logits))  # max() may lose a NaN


def test_norm_and_softmax_compute_in_fp32():
    """Each beside float64 of the same bf16 inputs: a model in bf16 would err as much as one with the same mistake."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=generator).to(torch.bfloat16)
    expected = F.rms_norm(x.double(), (512,), eps=1e-5).to(torch.bfloat16)
    rounded = tensor_parallel.norm(x, torch.ones(512, dtype=torch.bfloat16))
    assert (rounded != expected).float().mean() < 0.01  # fp32 may round some ties the other way
    q, k, v, grad = (torch.randn(2, 4, 128, 16, generator=generator).to(torch.bfloat16) for _ in range(4))
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [y.to(dtype).clone().requires_grad_() for y in (q, k, v)]
        tensor_parallel.attention(*inputs).backward(grad.to(dtype))
        grads.append(torch.stack([y.grad.double() for y in inputs[:2]]))
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert error < 0.96 * torch.finfo(torch.bfloat16).eps / 2, f"{error:.5f}: probabilities were saved in bf16"


def test_parameters_of_one_shape_differ():
    by_shape: dict = {}
    for name, x in full_params(TINY).items():
        assert not any(torch.equal(x, y) for y in by_shape.setdefault(x.shape, [])), name
        by_shape[x.shape].append(x)


def grads_in_bf16(sequence_parallel: bool) -> tuple[Params, int, int]:
    """Gradients; bytes sent, and by the formula."""
    tp = TPContext(dist.group.WORLD, sequence_parallel, overlapped_column_parallel_linear)
    params = shard_params(full_params(TINY), TINY, tp, torch.bfloat16)
    with communication() as wire:
        loss_sum(params, *get_batch(0, TINY), TINY, tp).backward()
    # T H elements of 2 bytes: ten times a block, or eight; twice for the embedding; three times for the head, or twice.
    passes = 10 * TINY.n_layers + 5 if sequence_parallel else 8 * TINY.n_layers + 4
    num_tokens = TINY.batch * TINY.seq_len
    loss_bytes = 2 * 3 * num_tokens * 4  # three values per token, in fp32
    expected = (passes * num_tokens * TINY.hidden * 2 + loss_bytes) * (tp.size - 1) // tp.size
    all_reduce_partial_grads(params, TINY, tp)
    return {name: p.grad for name, p in params.items()}, wire.total, expected


def reference_grads(round_to: torch.dtype, compute_in: torch.dtype) -> Params:
    model = ReferenceModel(TINY).to(round_to).to(compute_in)
    tokens, labels = get_batch(0, TINY)
    (model.loss(tokens, labels) * (labels != IGNORE_INDEX).sum()).backward()
    return {name: p.grad for name, p in model.named().items() if not name.endswith("k_proj.bias")}  # zero, see above


@pytest.mark.parametrize("sequence_parallel", LAYOUTS)
def test_errors_in_bf16_are_at_most_half_as_large_again_as_of_one_process(sequence_parallel):
    exact = reference_grads(torch.bfloat16, torch.float64)  # of the same rounded parameters
    dense = reference_grads(torch.bfloat16, torch.bfloat16)
    errors, dense_errors = [], []
    for rank, (grads, sent, expected_sent) in enumerate(run_ranks(4, grads_in_bf16, sequence_parallel)):
        assert sent == expected_sent, f"{sent} bytes sent, expected {expected_sent}"
        for name in exact:
            expected = expected_shard(name, exact[name], TINY, rank, 4)
            errors.append(error_between(grads[name], expected))
            dense_errors.append(error_between(expected_shard(name, dense[name], TINY, rank, 4), expected))
    ratio = sum(errors) / sum(dense_errors)
    assert ratio <= 1.5, f"mean error {ratio:.2f} times that of one process"
    assert max(errors) <= 0.1, f"a gradient is off by {max(errors):.2f}"


# -------------------------------------------------------------------------------------------------------- order in time


class Log(TorchDispatchMode):
    def __init__(self, log: list):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("mm", "addmm_", "addmm"):
            self.log.append("matmul")
        return func(*args, **(kwargs or {}))


def late_collectives(sequence_parallel: bool) -> list[str]:
    log = []
    tp = TPContext(dist.group.WORLD, sequence_parallel)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(tp.rank * sequence_parallel), requires_grad=True)
    weights = [torch.randn(3, 6, requires_grad=True), torch.randn(2, 6, requires_grad=True)]
    ys = overlapped_column_parallel_linear(x, weights, [None, None], tp)
    single = {"all-gather": "all_gather_single", "reduce-scatter": "reduce_scatter_single"}
    single = {attribute: Late(getattr(tensor_parallel, attribute), log, name) for name, attribute in single.items()}
    late_sum = patch.object(dist, "all_reduce", Late(dist.all_reduce, log, "sum"))
    with patch.multiple(tensor_parallel, **single), late_sum, Log(log):
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    for what, p in (("x", x), ("a weight", weights[0]), ("a weight", weights[1])):
        assert not p.grad.isnan().any(), f"the gradient of {what} was read before its wait: {log}"
    return [entry if isinstance(entry, str) else " ".join(entry) for entry in log]


def test_collectives_are_in_flight_while_matmuls_run():
    two = ["matmul"] * 2
    for log in run_ranks(2, late_collectives, False):
        assert log == [*two, "start sum", *two, "wait sum"]
    for log in run_ranks(2, late_collectives, True):
        assert log[:4] == ["start all-gather", *two, "start reduce-scatter"]
        assert log[4:] == ["wait all-gather", *two, "wait reduce-scatter"]


# ---------------------------------------------------------------------------------------------------- options, script


@pytest.mark.parametrize(
    ("argv", "ranks", "message"),
    [
        (["--kv-heads", "3"], "1", "--kv-heads: invalid choice: 3"),
        (["--layout", ""], "1", "--layout: invalid choice: ''"),
        (["--lay", "tensor"], "1", "--lay"),
        (["7"], "1", "7"),
        ([], "3", "--nproc_per_node 3 must divide 8 query heads"),
        ([], "16", "--nproc_per_node 16 must divide 8 query heads"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(argv, ranks, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", *argv])
    monkeypatch.setenv("WORLD_SIZE", ranks)
    for rank in ("1", "0"):  # only rank 0 prints
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            tensor_parallel.main()
        out, err = capsys.readouterr()
        assert end.value.code == 2 and out == "" and not dist.is_initialized()
        assert err == "" or rank == "0", "every rank prints the message"
    assert message in err and err.startswith("tensor_parallel.py: ") and err.count("\n") == 1, err


def ids_out_of_range() -> None:
    tp = TPContext(dist.group.WORLD, False)
    params, (tokens, labels) = shard_params(full_params(SMALL), SMALL, tp), get_batch(0, SMALL)
    tokens[0, :2] = torch.tensor([0, 12])
    labels[0, 1:3] = torch.tensor([0, 12])
    loss = loss_sum(params, tokens, labels, SMALL, tp)
    assert_same(loss_sum(params, tokens, labels.T.contiguous().T, SMALL, tp), loss, 0.0, "the loss of strided labels")
    for wrong in (13, -1):
        for what, batch in (("token", (tokens.clone(), labels)), ("label", (tokens, labels.clone()))):
            batch[what == "label"][1, 3] = wrong
            with pytest.raises(ValueError, match=f"{what}s .*{wrong}.*use 0 to 12"):
                loss_sum(params, *batch, SMALL, tp)
    labels.fill_(IGNORE_INDEX)
    assert loss_sum(params, tokens, labels, SMALL, tp).item() == 0


def test_ids_beyond_the_vocabulary_are_refused_and_the_first_and_last_are_not():
    run_ranks(2, ids_out_of_range)


def run_main_with_an_error(where: str, layout: str) -> tuple[int, str]:
    """In the first of two forms, rank 1 has a NaN as a loss, 1e-6 too much elsewhere, or a byte too many."""

    def is_faulty(tp: TPContext) -> bool:
        return tp.size > 1 and tp.rank == 1 and tp.column_linear is column_parallel_linear

    def faulty_train(config, tp, device):
        losses, history = train(config, tp, device)
        values = {"loss": losses[0], "gradient": history[1]["0.q_proj.bias"], "parameter": history[3]["norm.weight"]}
        if is_faulty(tp) and where in values:
            values[where].detach().view(-1)[0] += math.nan if where == "loss" else 1e-6
        return losses, history

    def faulty_bytes(params, config, tp):
        extra = 1 if is_faulty(tp) and where == "bytes" else 0
        return [count + extra for count in measured_bytes(params, config, tp)]

    out = io.StringIO()
    keep_group = patch.multiple(dist, init_process_group=lambda *a, **k: None, destroy_process_group=lambda: None)
    options = patch.object(sys, "argv", ["tensor_parallel.py", "--layout", layout, "--kv-heads", "4"])
    faults = patch.multiple(tensor_parallel, train=faulty_train, measured_bytes=faulty_bytes)
    with keep_group, options, faults, contextlib.redirect_stdout(out):
        return tensor_parallel.main(), out.getvalue()


@pytest.mark.always("parameter", "bytes")
@pytest.mark.parametrize("where", ["loss", "gradient", "parameter", "bytes"])
def test_an_error_on_one_rank_fails_on_all(where):
    layout = "sequence" if where == "parameter" else "tensor"
    (first, out), (second, _) = run_ranks(2, run_main_with_an_error, where, layout)
    assert first == second == 1
    assert out.splitlines()[-1] == "FAIL" and ("largest error inf" in out) == (where == "loss")
    assert ("largest error 1.0e-06" in out) == (where in ("gradient", "parameter"))
    assert out.count("error") == out.count(f"{layout} parallel") == len(FORMS), f"--layout {layout}"
    lines = [line.split() for line in out.splitlines()]
    assert float(next(line[-1] for line in lines if line[2].startswith("overlapped"))) <= 1e-10, "it has no NaN"
    counts = [(line[2].rstrip(","), line[-1]) for line in lines if line[0] == "bytes"]
    assert len(counts) == 3 * len(FORMS) and all(measured == expected for measured, expected in counts), out
    formulas = expected_bytes(TINY._replace(n_kv_heads=4), 2, layout == "sequence", False)
    shown = [line[1::3] for line in lines if line[0] == "bytes"][:3]
    assert shown == [[what, f"{n:,}"] for what, n in zip(("stored", "saved", "sent"), formulas, strict=True)]
