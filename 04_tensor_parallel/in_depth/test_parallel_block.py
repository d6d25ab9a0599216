"""One block with all its regions, against one device: every layout, every number of key/value heads, every mask."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import parallel_block
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.meter import communication, saved_activations
from harness.programs import error_from, on_stand_in_gpus, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_named, assert_same_trace, numbers, sgd_trace
from parallel_block import (
    Config,
    ParallelBlock,
    Parts,
    apply_rope,
    attention,
    block_weights,
    check_sizes,
    dropout,
    drops_of_all_ranks,
    kept_bytes,
    reference_block,
    rms_norm,
    rope_tables,
    sync_in_backward,
    sync_replicated_gradients,
)
from parallel_linear import COLUMNS, Shard, TensorParallel, shards
from parallel_llama import load_full_state_dict
from torch import Tensor, nn

B, S = 2, 8
SMALL = Config(hidden=32, heads=8, kv_heads=4, intermediate=24, norm_eps=1e-3)
COS, SIN = rope_tables(torch.arange(S), SMALL.hidden // SMALL.heads, SMALL.rope_theta)


def piece(x: Tensor, tp: TensorParallel) -> Tensor:
    return Shard(x.shape[1], 1, tp.size, tp.rank).cut(x) if tp.sequence_parallel else x


def reference_trace(config: Config, p: float, ranks: int, sequence: bool) -> Trace:
    w = {name: nn.Parameter(value.detach()) for name, value in block_weights(config, numbers(1)).items()}

    def backward(step: int) -> float:
        torch.manual_seed(step)
        x, target = numbers(B, S, config.hidden, seed=step), numbers(B, S, config.hidden, seed=50 + step)
        z = reference_block(x, w, config, COS, SIN, drops_of_all_ranks(p, ranks, sequence))
        loss = (z - target).square().sum() / (B * S)
        loss.backward()
        return loss.item()

    return sgd_trace(w, backward)


def make_block(config: Config, tp: TensorParallel, p: float = 0.0, parts: Parts | None = None) -> ParallelBlock:
    block = ParallelBlock(config, tp, parts or Parts(), p=p).double()
    load_full_state_dict(block, block_weights(config, numbers(1)))
    return block


def block_loss(block: ParallelBlock, step: int = 0) -> Tensor:
    tp, H = block.tp, block.input_layernorm.weight.shape[0]
    torch.manual_seed(step)
    x, target = numbers(B, S, H, seed=step), numbers(B, S, H, seed=50 + step)
    return (block(piece(x, tp), COS, SIN) - piece(target, tp)).square().sum() / (B * S)


def block_trace(config: Config, p: float, tp: TensorParallel) -> Trace:
    block = make_block(config, tp, p)

    def backward(step: int) -> float:
        loss = block_loss(block, step)
        loss.backward()
        sync_replicated_gradients(block, tp.group)
        total = loss.detach().clone()
        if tp.sequence_parallel:
            dist.all_reduce(total, group=tp.group)
        return total.item()

    return sgd_trace(dict(block.named_parameters()), backward)


def compare_with_reference(config: Config, p: float, tp: TensorParallel) -> None:
    want, held = reference_trace(config, p, tp.size, tp.sequence_parallel), shards(make_block(config, tp))

    def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: held[name].cut(value) for name, value in tensors.items()}

    want = Trace(want.losses, [cut(step) for step in want.gradients], cut(want.weights))
    assert_same_trace(block_trace(config, p, tp), want, rank=tp.rank)


# ---------------------------------------------------------------------------------------------- the one reference


def all_layouts(kv_heads: int) -> None:
    config = replace(SMALL, kv_heads=kv_heads)
    for p in (0.0, 0.3):
        for sequence in (False, True):
            compare_with_reference(config, p, TensorParallel(dist.group.WORLD, sequence))


@pytest.mark.always("2-2")
@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 4), (2, 1), (2, 2), (2, 8), (4, 1), (4, 2), (4, 8)])
def test_loss_gradients_and_weights_after_three_steps_equal_one_device(ranks, kv_heads):
    run_ranks(ranks, all_layouts, kv_heads)


# -------------------------------------------------------------------------------------------- gradients that are shares


def shares(kv_heads: int, sequence: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    tp = TensorParallel(dist.group.WORLD, sequence)
    config = replace(SMALL, kv_heads=kv_heads)
    block = make_block(config, tp)
    block_loss(block).backward()
    before = {name: p.grad.clone() for name, p in block.named_parameters()}
    with communication() as sent:
        sync_replicated_gradients(block, tp.group)
    return before, {name: p.grad for name, p in block.named_parameters()}, sent.calls["all_reduce"]


SHARES = ((4, True), (4, False), (2, False), (1, False))  # key/value heads, and the layout


def all_shares() -> dict[tuple[int, bool], tuple]:
    return {case: shares(*case) for case in SHARES}


@cache
def shares_of_ranks() -> list[dict[tuple[int, bool], tuple]]:
    return run_ranks(4, all_shares)


def test_norm_weights_in_a_sequence_parallel_region_are_summed_not_averaged():
    results = [found[4, True] for found in shares_of_ranks()]
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        parts = [before[name] for before, *_ in results]
        assert not torch.allclose(parts[0], parts[1]), "each rank has a share of its own"
        for rank, (_, after, calls) in enumerate(results):
            assert_same(after[name], sum(parts), what=name, rank=rank)
            assert calls == 1, "one message for all of them"


def test_gradients_of_shared_key_value_heads_are_summed_over_those_who_hold_the_same_head():
    for kv_heads in (1, 2):
        results = [found[kv_heads, False] for found in shares_of_ranks()]
        for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            for rank, (_, after, _) in enumerate(results):
                holders = [other for other in range(4) if other * kv_heads // 4 == rank * kv_heads // 4]
                assert_same(after[name], sum(results[other][0][name] for other in holders), what=name, rank=rank)


def test_what_is_whole_already_is_not_summed_again():
    for found in shares_of_ranks():
        before, after, calls = found[4, False]
        assert calls == 0
        assert_same_named(after, before, 0.0)


def gradients_in_a_bucket() -> list[str]:
    """Parameters whose gradient is no longer in the bucket, or not what the bucket says, after the sum of shares."""
    tp = TensorParallel(dist.group.WORLD, True)
    block = make_block(replace(SMALL, kv_heads=1), tp)
    bucket = torch.zeros(sum(p.numel() for p in block.parameters()), dtype=torch.float64)
    at, views = 0, {}
    for name, p in block.named_parameters():
        p.grad = views[name] = bucket[at : at + p.numel()].view_as(p)
        at += p.numel()
    block_loss(block).backward()
    sync_replicated_gradients(block, tp.group)
    want = gradients_of(make_block(replace(SMALL, kv_heads=1), tp), hook=False)
    return [n for n, p in block.named_parameters() if p.grad is not views[n] or not torch.equal(views[n], want[n])]


def test_sums_of_shares_are_written_to_where_the_gradient_is_which_may_be_a_bucket():
    assert run_ranks(2, gradients_in_a_bucket) == [[], []]


def frozen(sequence: bool) -> tuple[dict[str, Tensor | None], ...]:
    tp, found = TensorParallel(dist.group.WORLD, sequence), []
    for freeze, hook in ((True, True), (True, False), (False, False)):
        block = make_block(replace(SMALL, kv_heads=1), tp)
        for name in FROZEN if freeze else ():
            block.get_parameter(name).requires_grad_(False)
        found.append(gradients_of(block, hook))
    return tuple(found)


def gradients_of(block: ParallelBlock, hook: bool, steps: int = 1) -> dict[str, Tensor | None]:
    """Of one or more batches; what are shares summed by hooks, or at the end."""
    if hook:
        sync_in_backward(block, block.tp.group)
    for step in range(steps):
        block_loss(block, step).backward()
    if not hook:
        sync_replicated_gradients(block, block.tp.group)
    return {name: p.grad for name, p in block.named_parameters()}


FROZEN = ("input_layernorm.weight", "self_attn.k_proj.weight")  # one of two norms, and K but not V


@pytest.mark.parametrize("sequence", [False, True])
def test_a_frozen_parameter_has_no_gradient_to_sum_and_the_others_are_summed_as_before(sequence):
    for rank, (by_hook, after, unfrozen) in enumerate(run_ranks(2, frozen, sequence)):
        for grads in (by_hook, after):
            assert_same_named(grads, unfrozen | dict.fromkeys(FROZEN), what="gradient of", rank=rank)


def two_micro_batches() -> list[dict[str, Tensor]]:
    tp = TensorParallel(dist.group.WORLD, True)
    return [gradients_of(make_block(replace(SMALL, kv_heads=1), tp), hook, steps=2) for hook in (False, True)]


def test_shares_accumulate_over_micro_batches_before_one_sum():
    for rank, (after, by_hook) in enumerate(run_ranks(2, two_micro_batches)):
        assert_same_named(by_hook, after, rank=rank)


# ------------------------------------------------------------------------------------------- what is kept for backward


def kept(
    sequence: bool, kv_heads: int, p: float, dtype: torch.dtype = torch.float64, column: str = "gather-again"
) -> tuple[int, int, list[int]]:
    tp = TensorParallel(dist.group.WORLD, sequence, column=COLUMNS[column])
    config = replace(SMALL, kv_heads=kv_heads, qk_norm=kv_heads == 1, own_head_dim=8 * (kv_heads == 1))
    block = make_block(config, tp, p).to(dtype)
    x = piece(numbers(B, S, SMALL.hidden).to(dtype), tp).clone().requires_grad_()
    torch.manual_seed(0)
    tables = rope_tables(torch.arange(S), config.head_dim, config.rope_theta)
    with saved_activations(exclude=[*block.parameters(), *tables]) as saved:
        block(x, *tables)
    predicted = kept_bytes(config, B, S, tp, dtype.itemsize, p > 0, gather_again=column == "gather-again")
    return saved.bytes, sum(predicted.values()), sorted(saved.storages.values())


def kept_in_all_layouts(p: float, dtype: torch.dtype) -> list[tuple[str, int, int]]:
    layouts = [(sequence, kv_heads, column) for sequence in (False, True) for kv_heads in (1, 4) for column in COLUMNS]
    where = f"{dist.get_world_size()} ranks, sequence parallel {{}}, {{}} key/value heads, {{}}, {dtype}"
    return [(where.format(*layout), *kept(*layout[:2], p, dtype, layout[2])[:2]) for layout in layouts]


@pytest.mark.always("0.1-fp32", "0.0-bf16")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_bytes_kept_for_backward_are_those_of_the_formula(p, dtype):
    for ranks in (1, 4):
        for rank, layouts in enumerate(run_ranks(ranks, kept_in_all_layouts, p, dtype)):
            for where, measured, predicted in layouts:
                assert measured == predicted, f"{where}, rank {rank}: {measured} bytes, but should be {predicted}"


def test_with_sequence_parallel_every_kept_tensor_is_a_quarter_on_four_ranks():
    ((_, _, whole),) = run_ranks(1, kept, False, 4, 0.1)
    for _, _, parts in run_ranks(4, kept, True, 4, 0.1):
        assert [4 * size for size in parts] == whole


# ---------------------------------------------------------------------------------------------------------- dropout


def masks() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tp, ones = TensorParallel(dist.group.WORLD), torch.ones(64, 64)
    torch.manual_seed(0)
    replicated, sharded = dropout(ones, 0.25, tp, sharded=False), dropout(ones, 0.25, tp, sharded=True)
    return replicated, sharded, dropout(ones, 0.25, tp, sharded=True), torch.randint(10**6, (4,))


def test_replicated_activations_get_one_mask_and_sharded_ones_a_mask_per_rank():
    results = run_ranks(4, masks)
    for rank in range(1, 4):
        assert torch.equal(results[rank][0], results[0][0]), f"rank {rank} drops other elements of the same activation"
        assert not torch.equal(results[rank][1], results[0][1]), f"rank {rank} drops what rank 0 drops in its own shard"
        assert torch.equal(results[rank][3], results[0][3]), "the default stream must stay alike on all ranks"
    for replicated, first, second, _ in results:
        assert not torch.equal(first, second) and not torch.equal(replicated, first)
        for mask in (replicated, first):
            assert_same(mask.unique(), torch.tensor([0.0, 1 / 0.75]), 1e-6, what="values of the mask")
            assert abs(mask.mean().item() - 1) < 0.05


# ---------------------------------------------------------------------------------------------------- low precision


def test_a_norm_takes_its_mean_in_fp32_and_rounds_once():
    x = (300 * numbers(4, 4096)).to(torch.bfloat16)
    got = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-5)
    assert got.dtype == torch.bfloat16
    assert_same(got, F.rms_norm(x.double(), (4096,), eps=1e-5).to(torch.bfloat16), 0.0, "bf16 rms_norm")


def test_tables_of_rope_are_fp32_by_any_default_and_rotate_bf16_with_one_rounding():
    given = torch.arange(1000), 8, 1e4, (8.0, 1.0, 4.0, 256)
    want = rope_tables(*given)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = rope_tables(*given)
    finally:
        torch.set_default_dtype(torch.float32)
    for table, exact in zip(got, want, strict=True):
        assert table.dtype == torch.float32 and torch.equal(table, exact)
    x = numbers(B, S, 2, 4).to(torch.bfloat16)
    assert torch.equal(apply_rope(x, COS, SIN), apply_rope(x.float(), COS, SIN).to(torch.bfloat16))
    assert apply_rope(x, COS, SIN).dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------ seams and bad input


def own_attention() -> tuple[list[tuple[int, ...]], Tensor, Tensor]:
    seen, calls, names = [], [], ("linear", "norm", "rope", "swiglu")

    def watching(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        seen.extend((tuple(q.shape), tuple(k.shape)))
        return attention(q, k, v, causal=causal)

    tp = TensorParallel(dist.group.WORLD, True)
    x = piece(numbers(B, S, SMALL.hidden), tp)
    own = {name: lambda *of, name=name: calls.append(name) or getattr(Parts(), name)(*of) for name in names}
    blocks = [make_block(replace(SMALL, kv_heads=2), tp, parts=parts) for parts in (Parts(watching, **own), Parts())]
    found = seen, *(block(x, COS, SIN).detach() for block in blocks)
    assert sorted(calls) == ["linear"] * 7 + ["norm"] * 2 + ["rope"] * 2 + ["swiglu"], "each part is an argument"
    return found


def test_attention_is_an_argument_and_sees_the_heads_of_its_rank_with_key_value_heads_not_expanded():
    for seen, got, want in run_ranks(4, own_attention):
        assert seen == [(B, S, 2, 4), (B, S, 1, 4)]
        assert_same(got, want)


def dropout_and_another_attention() -> tuple[str, int]:
    """What is said of dropout beside another attention, and how often that is called without dropout."""
    calls = []

    def watching(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        calls.append(causal)
        return attention(q, k, v, causal=causal)

    tp, x = TensorParallel(dist.group.WORLD), numbers(B, S, SMALL.hidden)
    block = make_block(SMALL, tp, parts=Parts(watching))
    block(x, COS, SIN), block.eval()(x, COS, SIN)
    make_block(SMALL, tp, p=0.1, parts=Parts(norm=lambda x, weight, eps: rms_norm(x, weight, eps)))  # may be another
    return error_from(ValueError, make_block, SMALL, tp, p=0.1, parts=Parts(watching)), len(calls)


def test_dropout_does_not_take_the_place_of_another_attention_which_may_speak_to_other_ranks():
    ((said, calls),) = run_ranks(1, dropout_and_another_attention)
    assert "dropout 0.1" in said and "parts.attention" in said and "\n" not in said
    assert calls == 2, "in training and in evaluation"


@pytest.mark.parametrize(
    ("change", "ranks", "sequence", "words"),
    [
        ({}, 3, 0, "3 tensor-parallel ranks do not divide heads 8; use 1, 2, 4, 8 ranks"),
        (
            {"heads": 12, "hidden": 48, "kv_heads": 4},
            6,
            0,
            "kv-heads 4 and 6 ranks: one must divide the other; use 1, 2, 3, 6, 12 kv-heads",
        ),
        ({"intermediate": 26}, 4, 0, "do not divide intermediate size 26; use 1, 2, 13, 26 ranks"),
        ({"own_head_dim": 5}, 2, 0, "own-head-dim 5 is odd; use an even number"),
        ({"kv_heads": 3}, 2, 0, "kv-heads 3 do not divide 8 heads; use 1, 2, 4, 8"),
        ({}, 4, 10, "do not divide sequence 10; use 1, 2, 5, 10 ranks, or a multiple of 4"),
        ({"hidden": 36}, 1, 0, "hidden 36 / 8 heads is not even; use a multiple of 16"),
    ],
)
def test_sizes_that_cannot_be_divided_are_named_with_what_would_do(change, ranks, sequence, words):
    with pytest.raises(ValueError) as error:
        check_sizes(replace(SMALL, **change), ranks, sequence)
    assert words in str(error.value) and "\n" not in str(error.value)
    check_sizes(replace(SMALL, hidden=36, own_head_dim=4), 2)


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        (["--heads", "6", "--hidden", "60", "--kv-heads", "3"], 2, "kv-heads 3 and 2 ranks"),
        (["--dropout", "1"], 1, "--dropout 1.0"),
        (["--kv-heads", "0"], 1, "--kv-heads 0"),
        (["--intermediate", "4097"], 1, "--intermediate 4097 is not in 1 .. 4096"),
        (["--sequence", "9"], 2, "sequence 9"),
    ],
)
def test_bad_input_ends_in_one_line_before_any_process_group(options, ranks, words):
    assert words in refusal(parallel_block.main, options, ranks)


WITH_SCORES = """
import sys, parallel_block
from torch.nn.attention import SDPBackend, sdpa_kernel
sys.argv = ["parallel_block.py"]
with sdpa_kernel(SDPBackend.MATH):  # what a GPU has for float64
    parallel_block.main()
"""


@pytest.mark.prove
@pytest.mark.parametrize("gpus", ["1", "0"])
def test_what_is_kept_is_that_of_a_flash_kernel_on_a_cpu_and_may_be_more_on_a_gpu(gpus):
    done = on_stand_in_gpus(Path(parallel_block.__file__).parent, "-c", WITH_SCORES, gpus=int(gpus))
    last = (done.stdout.splitlines() or [""])[-1]
    assert last == "PASS" if gpus == "1" else "bytes kept for backward is" in last, done.stdout + done.stderr[-900:]
