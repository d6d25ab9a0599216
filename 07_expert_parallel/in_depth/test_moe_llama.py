"""The model: against transformers' Mixtral, against token-by-token experts, on slices, and inside other chapters."""

import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import moe_llama
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _slow_moe import SlowMoE
from harness.meter import communication, held_bytes
from harness.programs import refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_named, assert_same_trace, sgd_trace
from moe_layer import (
    MoE,
    MoEConfig,
    moe_layers,
    recompute_blocks,
    recomputed,
    set_loss_scale,
    take_losses,
    update_biases,
)
from moe_llama import (
    LlamaConfig,
    MoELlama,
    batch_of,
    cut_experts,
    dense_parameters,
    expert_groups,
    expert_parameters,
    full_name,
    full_state_dict,
    gather_experts,
    init_moe,
    initial_weight,
    load_full_state_dict,
    loss_sum,
    reduce_gradients,
    squared_gradient_norm,
    train_step,
)
from routing import balance_loss, expert_counts, route
from torch import Tensor

CHAPTERS = Path(__file__).resolve().parents[2]
MOE = MoEConfig(16, 12, experts=4, top_k=2, balance=0.2, z=0.01)
CONFIGS = {
    "softmax": LlamaConfig(MOE),
    "sigmoid": LlamaConfig(replace(MOE, router="sigmoid", shared=1, balance=0.0, z=0.0, bias_speed=0.05)),
    "nodes": LlamaConfig(replace(MOE, experts=8, top_k=4, nodes=4, max_nodes=2)),
    "capacity": LlamaConfig(replace(MOE, capacity=0.8)),
}
B, S, M = 4, 6, 2  # sequences of a micro-batch over all ranks, tokens, micro-batches


@torch.no_grad()
def lively(model: torch.nn.Module) -> torch.nn.Module:
    """Larger weights than at the start of training, so that experts matter; the same in every layout."""
    model.double()
    for p in model.parameters():
        p.mul_(1.0 if p.dim() == 1 else 5.0)
    return model


# -------------------------------------------------------------------------------------------- against transformers


def test_logits_gradients_and_auxiliary_loss_equal_those_of_mixtral_in_transformers():
    import transformers
    from transformers.models.mixtral import modeling_mixtral as hugging_face

    # transformers takes norms and the router's softmax in float32 even in a float64 model; here it may not.
    def router(m, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, m.hidden_dim), m.weight)
        best, experts = torch.softmax(logits.double(), -1).topk(m.top_k)
        return logits, best / best.sum(-1, keepdim=True), experts

    norm = lambda m, x: F.rms_norm(x, (x.shape[-1],), m.weight, m.variance_epsilon)  # noqa: E731
    float_ = lambda x: x if x.dtype == torch.float64 else x.to(torch.float32)  # noqa: E731
    c = LlamaConfig(replace(MOE, balance=0.0, z=0.0))
    config = transformers.MixtralConfig(
        vocab_size=c.vocab_size, hidden_size=16, intermediate_size=12, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, num_local_experts=4, num_experts_per_tok=2,
        rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, sliding_window=None, output_router_logits=True,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model, theirs = lively(MoELlama(c, None, None)), transformers.MixtralForCausalLM(config).double()
    whole = full_state_dict(model, None)
    state = {}
    for name in theirs.state_dict():  # transformers 5 stacks the experts; the checkpoints do not
        place = name.replace(".mlp.", ".block_sparse_moe.").removesuffix("gate_up_proj").removesuffix("down_proj")
        if name.endswith("gate_up_proj"):
            pairs = [torch.cat([whole[f"{place}{e}.{w}.weight"] for w in ("w1", "w3")]) for e in range(4)]
            state[name] = torch.stack(pairs)
        elif name.endswith("experts.down_proj"):
            state[name] = torch.stack([whole[f"{place}{e}.w2.weight"] for e in range(4)])
        else:
            state[name] = whole[place]
    theirs.load_state_dict(state)
    tokens = batch_of(0, 1, B, 8)[0][0]  # 2 layers of 32 tokens: a power of two, which float32 divides by exactly
    patches = [patch.object(hugging_face.MixtralRMSNorm, "forward", norm), patch.object(torch.Tensor, "float", float_)]
    with patches[0], patches[1], patch.object(hugging_face.MixtralTopKRouter, "forward", router):
        out = theirs(tokens)
        out.logits.square().sum().backward()
    got = model(tokens)
    got.square().sum().backward()
    assert_same(got, out.logits, 1e-10, "logits")
    gradients = gather_experts(model, {n: p.grad for n, p in model.named_parameters()}, None)
    stacked = dict(theirs.named_parameters())
    for name, gradient in gradients.items():
        place, _, expert = name.replace(".block_sparse_moe.", ".mlp.").partition(".experts.")
        if not expert:
            want = stacked[place].grad
        elif expert[2:4] == "w2":
            want = stacked[f"{place}.experts.down_proj"].grad[int(expert[0])]
        else:
            both = stacked[f"{place}.experts.gate_up_proj"].grad[int(expert[0])]
            want = both.chunk(2)[expert[2:4] == "w3"]
        assert_same(gradient, want, 1e-10, f"gradient of {name}")
    # Its loss is K times ours, of all layers' tokens in one pool.
    routing = route(torch.cat(out.router_logits), 2)
    ours = balance_loss(routing.probabilities, expert_counts(routing.experts, 4), 2)
    assert_same(2 * ours, out.aux_loss, 1e-10, "auxiliary loss")


# ------------------------------------------------------------------------------------------------------ the reference


@cache
def reference(case: str) -> Trace:
    """The model on one process, with experts that compute token by token and losses that are added in the open."""
    c = CONFIGS[case]
    model = lively(MoELlama(c, None, None))
    for block in model.model.layers:
        slow = SlowMoE(c.moe).double()
        slow.load_state_dict({n: v for n, v in block.mlp.state_dict().items() if n != "bias_steps"})
        block.mlp = slow

    def backward(step: int) -> float:
        batch, total = batch_of(step, M, B, S), 0.0
        valid = sum((labels != -100).sum() for _, labels in batch)
        for tokens, labels in batch:
            loss = loss_sum(model, tokens, labels) / valid
            (loss + sum(block.mlp.extra for block in model.model.layers) / M).backward()
            total += loss.item()
        for block in model.model.layers if c.moe.bias_speed else ():
            block.mlp.steps += torch.sign(block.mlp.counts.double().mean() - block.mlp.counts).long()
            block.mlp.counts.zero_()
        return total

    return whole_trace(sgd_trace(dict(model.named_parameters()), backward), MoELlama(c, None, None), None)


def whole_trace(trace: Trace, model: MoELlama, group) -> Trace:
    gradients = [gather_experts(model, g, group) for g in trace.gradients]
    return Trace(trace.losses, gradients, gather_experts(model, trace.weights, group))


def trace_on_ranks(case: str, data_group, experts, replicas, **options) -> tuple[Trace, dict, list]:
    c, rank, D = CONFIGS[case], dist.get_rank(data_group), dist.get_world_size(data_group)
    model = lively(MoELlama(c, experts, data_group, **options))
    norms: list[tuple[Tensor, Tensor]] = []

    def backward(step: int) -> float:
        batch = [(tokens.chunk(D)[rank], labels.chunk(D)[rank]) for tokens, labels in batch_of(step, M, B, S)]
        loss = train_step(model, batch, data_group, replicas)
        update_biases(model, data_group)
        whole = gather_experts(model, {n: p.grad for n, p in model.named_parameters()}, experts)
        norms.append((squared_gradient_norm(model, experts), sum(g.square().sum() for g in whole.values())))
        return loss.item()

    trace = sgd_trace(dict(model.named_parameters()), backward)
    return whole_trace(trace, model, experts), full_state_dict(model, experts), norms


RUNS = {  # (configuration, version, computation, recomputed); those of the first line in every layout
    "all": [("softmax", "pairs", "loop", False), ("capacity", "pairs", "padded", False)],
    "2 of 4": [("sigmoid", "once", "loop", True), ("nodes", "once", "loop", False), ("nodes", "pairs", "loop", True)],
}


def layouts(P: int) -> dict:
    world, D = dist.group.WORLD, dist.get_world_size()
    experts, replicas = expert_groups([[D - 1, *range(D - 1)]], P)  # in whatever order
    runs = RUNS["all"] + (RUNS["2 of 4"] if (D, P) == (4, 2) else [])
    return {
        run: trace_on_ranks(run[0], world, experts, replicas, version=run[1], compute=run[2], recompute=run[3])
        for run in runs
    }


@cache
def results_of(D: int, P: int) -> list[dict]:
    return run_ranks(D, layouts, P)


@pytest.mark.always("2-2")
@pytest.mark.parametrize(("D", "P"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_losses_gradients_and_weights_of_three_steps_equal_one_process_for_every_layout_and_router(D, P):
    for rank, runs in enumerate(results_of(D, P)):
        for run, (trace, _, norms) in runs.items():
            try:
                assert_same_trace(trace, reference(run[0]), rank=rank)
            except AssertionError as error:
                raise AssertionError(f"{run}: {error}") from None
            for got, want in norms:
                assert_same(got, want, 1e-12, f"{run}: squared norm of the gradient", rank)


@pytest.mark.prove
def test_the_norm_of_the_gradient_is_the_same_on_all_ranks_and_in_all_layouts():
    want = [norm for norm, _ in results_of(1, 1)[0][RUNS["all"][0]][2]]
    for rank, runs in enumerate(results_of(4, 4)):
        got = [norm for norm, _ in runs[RUNS["all"][0]][2]]
        assert_same(torch.stack(got), torch.stack(want), 1e-10, "squared norms", rank)


def two_slices() -> tuple[Trace, list]:
    """Two models at once: ranks 0 and 2, 3 and 1, each with its tokens, as if a tensor axis lay between them."""
    slices = [[0, 2], [3, 1]]
    groups = [dist.new_group(ranks) for ranks in slices]
    experts, replicas = expert_groups(slices, 2)
    mine = dist.get_rank() % 2
    trace, _, _ = trace_on_ranks(["softmax", "sigmoid"][mine], groups[mine], experts, replicas)
    return trace, [dist.get_process_group_ranks(g) for g in (experts, replicas)]


def test_a_step_without_a_label_has_loss_0():
    batch = [(tokens, torch.full_like(labels, -100)) for tokens, labels in batch_of(0, M, B, S)]
    loss = train_step(MoELlama(CONFIGS["softmax"], None, None), batch, None, None)
    assert loss == 0 and not loss.requires_grad, "it is for the log, and keeps no graph alive"


@pytest.mark.prove
def test_two_slices_of_the_world_train_two_models_at_once():
    for rank, (trace, members) in enumerate(run_ranks(4, two_slices)):
        assert_same_trace(trace, reference(["softmax", "sigmoid"][rank % 2]), rank=rank)
        assert members == [sorted([[0, 2], [1, 3]][rank % 2]), [rank]], f"rank {rank}: {members}"


def test_a_copy_of_a_recomputed_model_computes_with_its_own_weights_and_routing():
    model = lively(MoELlama(CONFIGS["softmax"], None, None, recompute=True))
    copy, tokens = deepcopy(model), batch_of(0, 1, B, S)[0][0]
    for p in copy.parameters():
        p.data.mul_(2)
    for each in (copy, model):
        each(tokens).square().sum().backward()
    for p, other in zip(model.parameters(), copy.parameters(), strict=True):
        assert p.grad.isfinite().all() and not torch.equal(p.grad, other.grad)


# ------------------------------------------------------------------------------------------------ who holds and sends


def held_and_sent(P: int) -> tuple:
    c, world = CONFIGS["softmax"], dist.group.WORLD
    experts, replicas = expert_groups([[1, 0, 2, 3]], P, timeout=90.0)  # in whatever order
    waits = {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in (experts, replicas)}
    assert waits == {90.0}
    first = [dist.get_process_group_ranks(group)[0] for group in (experts, replicas)]
    assert dist.get_rank() == sum(first), "a rank has the same experts as its replicas: it is at their place"
    model = MoELlama(c, experts, world).double()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with communication() as sent:
        reduce_gradients(model, world, replicas)
    sums = {p.grad.unique().item() for p in expert_parameters(model).values()}
    held = [held_bytes(parameters.values()) for parameters in (dense_parameters(model), expert_parameters(model))]
    return held, sent.sent["all_reduce"], sums, {p.grad.unique().item() for p in dense_parameters(model).values()}


@pytest.mark.parametrize("P", [1, 2, 4])
def test_a_rank_holds_e_over_p_experts_and_sends_their_gradients_to_replicas_only(P):
    c = CONFIGS["softmax"]
    all_experts = c.layers * 3 * 16 * 12 * 4
    for rank, ((dense, experts), sent, sums, dense_sums) in enumerate(run_ranks(4, held_and_sent, P)):
        assert experts.parameters == experts.gradients == all_experts // P * 8, f"rank {rank}"
        replicas = 4 // P
        want = 2 * 3 / 4 * dense.gradients + 2 * (replicas - 1) / replicas * experts.gradients
        assert sent == want, f"rank {rank}: {sent} bytes, not {want}"
        assert (sums, dense_sums) == ({float(replicas)}, {4.0}), f"rank {rank}: a sum over its holders, no average"


# ----------------------------------------------------------------------------------------------- names and the start


def states() -> list[dict]:
    found = []
    for P in (1, 2, 4):
        experts, _ = expert_groups([[0, 1, 2, 3]], P)
        model = MoELlama(CONFIGS["sigmoid"], experts, dist.group.WORLD)
        moe_layers(model)[0].bias_steps[3] = 7
        state = full_state_dict(model, experts)
        again = MoELlama(CONFIGS["sigmoid"], experts, dist.group.WORLD)
        for p in again.parameters():
            p.data.zero_()
        load_full_state_dict(again, state, experts)
        assert_same_named(again.state_dict(), model.state_dict(), 0.0, "loaded")
        found.append(state)
    return found


def test_every_layout_starts_from_the_same_weights_and_gathers_to_the_same_names():
    want = full_state_dict(MoELlama(CONFIGS["sigmoid"], None, None), None)
    want["model.layers.0.block_sparse_moe.bias_steps"][3] = 7
    assert want["model.layers.1.block_sparse_moe.experts.3.w1.weight"].shape == (12, 16)
    experts = [want[f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight"] for e in range(4)]
    assert all(not torch.equal(experts[0], other) for other in experts[1:]), "experts that start alike stay alike"
    assert not torch.equal(*(initial_weight("w", (3, 4), 2, seed) for seed in (0, 1))), "two seeds"
    for rank, found in enumerate(run_ranks(4, states)):
        for state in found:
            assert_same_named(state, want, 0.0, "weight", rank)


def test_a_missing_expert_is_named():
    model = MoELlama(CONFIGS["softmax"], None, None)
    state = full_state_dict(model, None)
    del state["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    with pytest.raises(KeyError, match=r"layers.1.block_sparse_moe.experts.2.w3.weight"):
        load_full_state_dict(model, state, None)
    other = full_state_dict(model, None)
    del other["lm_head.weight"]
    with pytest.raises(RuntimeError, match="lm_head.weight"):
        load_full_state_dict(model, other, None)
    assert [layer.name for layer in moe_layers(model)] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert full_name(model, "model.layers.0.mlp.gate.weight") == "model.layers.0.block_sparse_moe.gate.weight"
    experts = {n: v for n, v in full_state_dict(model, None).items() if ".experts." in n}
    assert cut_experts(model, experts, None).keys() == expert_parameters(model).keys(), "the others are left out"


def test_a_full_state_dict_is_a_snapshot_that_training_does_not_change():
    for config in ("softmax", "sigmoid"):
        model = MoELlama(CONFIGS[config], None, None)
        state = full_state_dict(model, None)
        before = {name: value.clone() for name, value in state.items()}
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(1)
        assert_same_named(state, before, 0.0, f"{config}: saved")
        again = MoELlama(CONFIGS[config], None, None)
        load_full_state_dict(again, state, None)
        with torch.no_grad():
            for tensor in [*again.parameters(), *again.buffers()]:
                tensor.add_(1)
        assert_same_named(state, before, 0.0, f"{config}: loaded from")


def test_what_adds_into_the_residual_stream_starts_smaller_the_more_layers_there_are():
    for layers in (2, 8):
        c = LlamaConfig(replace(MOE, hidden=64, intermediate=96, shared=1), layers=layers)
        for name, p in MoELlama(c, None, None).named_parameters():
            if p.dim() > 1:
                residual = any(word in name for word in ("o_proj", "down_proj", ".w2."))
                want = 0.02 / (2 * layers) ** 0.5 if residual else 0.02
                assert abs(p.std().item() / want - 1) < 0.2, f"{name} of {layers} layers starts at {p.std():.5f}"


def test_the_norm_of_the_gradient_is_summed_in_float64_whatever_the_parameters_are_in():
    model = MoELlama(CONFIGS["softmax"], None, None).bfloat16()
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).bfloat16()
    want = sum(p.grad.double().square().sum() for p in model.parameters())
    got = squared_gradient_norm(model, None)
    assert got.dtype == torch.float64
    assert_same(got, want, 1e-12, "squared norm of bf16 gradients")


def test_positions_1000_and_1001_are_rotated_differently_in_bfloat16():
    rope = moe_llama.Attention(LlamaConfig(MOE)).rope
    x = torch.ones(1, 1002, 1, 4)
    low = rope(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert_same(low[:, 1000:], rope(x)[:, 1000:], 1e-2, "what RoPE makes of bf16")


# ----------------------------------------------------------------------------------- the seams of chapters 01 and 04


def inside_chapter_04(sequence_parallel: bool) -> dict:
    """Chapter 04's Llama on 2 tensor ranks x 2 ranks with different tokens, experts over the latter."""
    sys.path[:0] = [str(CHAPTERS / "04_tensor_parallel" / "in_depth"), str(CHAPTERS / "01_single_gpu" / "in_depth")]
    import parallel_llama as chapter4
    from llama import TINY, Llama, Parts
    from parallel_linear import TensorParallel

    rank, config = dist.get_rank(), replace(TINY, vocab_size=256)
    moe = MoEConfig(config.hidden, 24, 4, 2, router="sigmoid", balance=0.2, z=0.01, bias_speed=0.05, shared=1)
    tensor = [dist.new_group(r) for r in ([0, 1], [2, 3])][rank // 2]
    data = [dist.new_group(r) for r in ([0, 2], [1, 3])][rank % 2]
    experts, _ = expert_groups([[0, 2], [1, 3]], 2)
    count = dist.group.WORLD if sequence_parallel else data
    tp = TensorParallel(tensor, sequence_parallel)

    def make(config, tp, parts) -> MoE:
        return MoE(moe, experts, count, parts=parts, sequence_parallel=tp.sequence_parallel)

    model = chapter4.ParallelLlama(config, tp, Parts(), feed_forward=make, wrap=recomputed)
    init_moe(model, config.layers, 0)
    model.double()

    whole = Llama(config, feed_forward=lambda config, parts: MoE(moe, None, None, parts=parts))
    init_moe(whole, config.layers, 0)
    recompute_blocks(whole.model.layers)
    whole.double()
    tokens, labels = batch_of(0, 1, 4, 8)[0]
    valid = (labels != -100).sum()
    (whole.parts.cross_entropy(whole(tokens), labels) / valid).backward()
    set_loss_scale(model, 1.0)
    half = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
    (model.cross_entropy(model(tokens[half]), labels[half]) / valid).backward()
    chapter4.sync_replicated_gradients(model, tensor)
    reduce_gradients(model, data, None)
    want = gather_experts(whole, {n: p.grad for n, p in whole.named_parameters()}, None)
    mine = chapter4.full_state_dict(model, tensor, {n: p.grad for n, p in model.named_parameters()})
    got = gather_experts(model, mine, experts)
    assert_same_named(got, want, 1e-10, "gradient of", rank)
    logged, expected = take_losses(model, count), take_losses(whole, None)
    counts = update_biases(model, count)
    assert torch.equal(counts, update_biases(whole, None)), "counts"
    assert_same(logged["balance"], expected["balance"], 1e-10, "balance loss", rank)
    return {name: value.abs().max().item() for name, value in got.items()}


@pytest.mark.always("True")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_layer_works_in_chapter_04s_llama_with_heads_and_tokens_over_a_tensor_group(sequence_parallel):
    for rank, sizes in enumerate(run_ranks(4, inside_chapter_04, sequence_parallel)):
        assert min(sizes.values()) > 0, f"rank {rank}"


# ---------------------------------------------------------------------------------------------------------- bad input


def test_a_group_size_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(ValueError, match="ep 3 does not divide the 4 ranks with different tokens; use 1, 2, 4"):
        expert_groups([[0, 1, 2, 3]], 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--ep 3", "--ep 3 does not divide 4 ranks; use 1, 2, 4"),
        ("--experts 6", "--experts 6 do not divide among 4 expert-parallel ranks; use 1, 2, 3, 6 ranks"),
        ("--top-k 9", "--top-k 9 of 8 experts is impossible; use 1 to 8"),
        ("--capacity 0", "--capacity 0.0 leaves no room"),
        ("--capacity inf", "--capacity inf leaves no room"),
        ("--router hash", "--router"),
    ],
)
def test_bad_input_is_one_line_that_names_option_and_remedy(options, words):
    assert words in refusal(moe_llama.main, options, world_size=4)
