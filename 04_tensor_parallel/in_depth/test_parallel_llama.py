"""The whole model with its vocabulary in pieces, against one device, and against chapter 01's model."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import parallel_llama
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.meter import communication, held_bytes, peak_memory
from harness.programs import error_from, refusal
from harness.ranks import run_ranks
from harness.reference import Trace, assert_same, assert_same_named, assert_same_trace, numbers, sgd_trace
from parallel_block import Config, Parts, attention, drops_of_all_ranks, sync_replicated_gradients
from parallel_linear import COLUMNS, Factor, Shard, TensorParallel, init_weights, initial_weight, shards
from parallel_llama import (
    IGNORE,
    ParallelLlama,
    VocabParallelEmbedding,
    check_words,
    few,
    full_state_dict,
    load_full_state_dict,
    recomputed,
    reference_logits,
    squared_gradient_norm,
    vocab_parallel_cross_entropy,
    weights_per_rank,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[2] / "01_single_gpu" / "in_depth"))

B, S = 2, 8
SMALL = Config(vocab_size=13, hidden=16, layers=2, heads=4, kv_heads=2, intermediate=24)


def batch(step: int, vocab: int = SMALL.vocab_size) -> tuple[Tensor, Tensor]:
    text = torch.randint(vocab, (B, S + 1), generator=torch.Generator().manual_seed(step))
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    labels[0, : S // 2] = IGNORE
    return tokens, labels


def chapter_01(config: Config) -> nn.Module:
    import llama

    fields = {name: getattr(config, name) for name in llama.LlamaConfig.__dataclass_fields__}
    return llama.Llama(llama.LlamaConfig(**fields)).double()


def full_weights(config: Config) -> dict[str, Tensor]:
    """Names and shapes from chapter 01's model, values from this chapter's rule: both must agree on both."""
    return {name: value.detach().clone() for name, value in chapter_01(config).state_dict().items()}


def step_of_one_device(model: nn.Module, positions: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    tokens, labels = batch(0)
    loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def step_of(
    model: ParallelLlama, positions: Tensor | None = None, batch: tuple[Tensor, Tensor] = batch(0)
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole model."""
    tokens, labels = batch
    loss = model.cross_entropy(model(tokens, positions), labels) / (labels != IGNORE).sum()
    loss.backward()
    sync_replicated_gradients(model, model.tp.group)
    gradients = {name: model.get_parameter(name).grad for name in shards(model)}
    return loss.item(), full_state_dict(model, model.tp.group, gradients)


def reference_trace(config: Config, w: dict[str, Tensor], p: float, ranks: int, sequence: bool) -> Trace:
    weights = {name: nn.Parameter(value.clone()) for name, value in w.items()}

    def backward(step: int) -> float:
        torch.manual_seed(step)
        tokens, labels = batch(step, config.vocab_size)
        drops = drops_of_all_ranks(p, ranks, sequence) if p else None
        logits = reference_logits(weights, tokens, config, drops)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        return loss.item()

    return sgd_trace(weights, backward)


def model_trace(model: ParallelLlama) -> Trace:
    def backward(step: int) -> float:
        torch.manual_seed(step)
        tokens, labels = batch(step, model.config.vocab_size)
        loss = model.cross_entropy(model(tokens), labels) / (labels != IGNORE).sum()
        loss.backward()
        sync_replicated_gradients(model, model.tp.group)
        return loss.item()

    return sgd_trace(dict(model.named_parameters()), backward)


def compare_with_reference(config: Config, w: dict[str, Tensor], p: float, tp: TensorParallel) -> None:
    want = reference_trace(config, w, p, tp.size, tp.sequence_parallel)
    for wrap in (lambda block: block, recomputed):
        model = ParallelLlama(config, tp, wrap=wrap, p=p).double()
        held = shards(model)

        def cut(tensors: dict[str, Tensor], held=held) -> dict[str, Tensor]:
            return {name: held[name].cut(value) for name, value in tensors.items()}

        mine = Trace(want.losses, [cut(step) for step in want.gradients], cut(want.weights))
        assert_same_trace(model_trace(model), mine, rank=tp.rank)


# --------------------------------------------------------------------------------------------------- the one reference


def all_layouts(config: Config, w: dict[str, Tensor]) -> None:
    for p in (0.0, 0.2):
        for sequence in (False, True):
            tp = TensorParallel(dist.group.WORLD, sequence)
            compare_with_reference(config, w, p, tp)
            models = (ParallelLlama(config, tp, p=each).double().eval() for each in (p, 0.0))
            assert torch.equal(*(model(batch(0, config.vocab_size)[0]) for model in models)), "no dropout in evaluation"


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_gradients_and_weights_after_three_steps_equal_one_device(ranks):
    config = replace(SMALL, vocab_size=9) if ranks == 4 else SMALL  # rank 3 of 4 holds nothing but padding
    run_ranks(ranks, all_layouts, config, full_weights(config))


def steps_of_variant(config: Config, weights: dict[str, Tensor]) -> list[tuple]:
    """First weights; with these loss, gradients and squared norm: without sequence parallelism, and with it."""
    found = []
    for sequence in (False, True):
        model = ParallelLlama(config, TensorParallel(dist.group.WORLD, sequence)).double()
        first = full_state_dict(model, model.tp.group)
        load_full_state_dict(model, weights)
        found.append((first, *step_of(model), squared_gradient_norm(model, model.tp.group).item()))
        model.zero_grad()  # as if all were frozen
        assert squared_gradient_norm(model, model.tp.group) == 0
        some = {"model.norm.weight": model.model.norm.weight}
        assert full_state_dict(model, model.tp.group, some).keys() == some.keys()
    return found


# Llama 3.1, Qwen2 and 3, other numbers than the defaults, and adapters
LATER = {"qkv_bias": True, "qk_norm": True, "own_head_dim": 6, "rope_scaling": (8.0, 1.0, 4.0, 256)}
LATER |= {"rope_theta": 8000.0, "norm_eps": 1e-3}  # wavelengths of 6, 126 and 2513: kept, between, and slowed
VARIANTS = {"untied": {}, "tied": {"tied": True}, "later": LATER | {"lora_rank": 2, "lora_scale": 1.5}}


@pytest.mark.always("4-tied", "4-later")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_it_is_chapter_01s_model_with_the_same_names_weights_loss_gradients_and_norm(ranks, variant):
    config = replace(SMALL, **VARIANTS[variant])
    model, first = chapter_01(config), full_weights(config)
    weights = {name: w + 0.1 * numbers(*w.shape, seed=i) for i, (name, w) in enumerate(first.items())}
    if config.tied:  # one parameter under two names
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    loss, gradients = step_of_one_device(model)
    norm = sum(gradient.square().sum().item() for gradient in gradients.values() if gradient is not None)
    for rank, layouts in enumerate(run_ranks(ranks, steps_of_variant, config, weights)):
        for got_first, got, got_gradients, got_norm in layouts:
            assert_same_named(got_first, first, 0.0, "first weight", rank)
            assert_same(got, loss, what="loss", rank=rank)
            assert_same(got_norm, norm, what="squared norm", rank=rank)
            if config.tied:
                assert_same(got_gradients.pop("lm_head.weight"), gradients["model.embed_tokens.weight"], rank=rank)
            assert_same_named(got_gradients, gradients, what="gradient of", rank=rank)


REFEREES = {  # a model that nobody here wrote, with its norm, and ours
    "llama": ("LlamaForCausalLM", "LlamaConfig", Config(61, 64, 2, 8, 2, 96)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", Config(61, 64, 2, 8, 2, 96, rope_theta=1e6, qkv_bias=True)),
}


def long_batch(config: Config) -> tuple[Tensor, Tensor]:
    """Enough tokens for the error of a bf16 run to be no matter of luck."""
    pairs = [batch(step, config.vocab_size) for step in range(16)]
    return torch.cat([tokens for tokens, _ in pairs]), torch.cat([labels for _, labels in pairs])


def of_transformers(kind: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Weights, loss and gradients, all of them as float64. The weights are numbers of bf16, whatever the dtype."""
    import transformers

    name, sizes, c = REFEREES[kind]
    made = getattr(transformers, sizes)(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden,
        intermediate_size=c.intermediate,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        tie_word_embeddings=False,
    )
    model = getattr(transformers, name)(made).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):  # large enough, and norms and biases uneven enough, to show mistakes
            p.copy_((0.1 * numbers(*p.shape, seed=i) * (1 + 2 * (p.dim() == 1)) + (p.dim() == 1)).to(torch.bfloat16))
    tokens, labels = long_batch(c)
    logits = model(tokens).logits.to(torch.promote_types(dtype, torch.float32))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    named = dict(model.named_parameters())
    return (
        {n: p.detach().double() for n, p in named.items()},
        loss.item(),
        {n: p.grad.double() for n, p in named.items()},
    )


def of_ours(
    kind: str, weights: dict[str, Tensor], dtype: torch.dtype, sequence: bool, column: str
) -> tuple[float, dict[str, Tensor]]:
    config = REFEREES[kind][-1]
    tp = TensorParallel(dist.group.WORLD, sequence, column=COLUMNS[column])
    model = ParallelLlama(config, tp).to(dtype)
    load_full_state_dict(model, weights)
    loss, gradients = step_of(model, batch=long_batch(config))
    return loss, {name: gradient.double() for name, gradient in gradients.items()}


@pytest.fixture
def float64_norms(monkeypatch):
    """transformers takes a norm's mean in float32 even in a float64 model. Here that is done in float64; no more."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    for norm in (LlamaRMSNorm, Qwen2RMSNorm):
        its = norm.forward

        def forward(self, x, its=its):
            wide = x.dtype == torch.float64
            return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon) if wide else its(self, x)

        monkeypatch.setattr(norm, "forward", forward)


@pytest.mark.always("qwen2-2")
@pytest.mark.parametrize("ranks", [2, 4])  # two key/value heads: on four ranks, two hold the same one
@pytest.mark.parametrize("kind", REFEREES)
def test_llama_and_qwen2_with_biases_equal_transformers(kind, ranks, float64_norms):
    weights, loss, gradients = of_transformers(kind, torch.float64)
    assert sum(name.endswith("bias") for name in weights) == (6 if kind == "qwen2" else 0)
    for sequence in (False, True):
        for rank, (got, mine) in enumerate(run_ranks(ranks, of_ours, kind, weights, torch.float64, sequence, "simple")):
            assert_same(got, loss, what="loss", rank=rank)
            assert_same_named(mine, gradients, what="gradient of", rank=rank)


def distances(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """How far each gradient is from that in float64. Of the biases, what they are on average: the gradient of a key's
    bias is a sum of terms that cancel, and so, alone, a matter of luck."""
    each = {name: ((got[name] - want[name]).norm() / want[name].norm()).item() for name in want}
    biases = [each.pop(name) for name in want if name.endswith("bias")]
    return each | ({"biases": (sum(error**2 for error in biases) / len(biases)) ** 0.5} if biases else {})


@pytest.mark.always("qwen2-2")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", REFEREES)
def test_in_bf16_llama_and_qwen2_are_at_most_half_again_as_far_from_float64_as_transformers(kind, ranks, float64_norms):
    weights, loss, gradients = of_transformers(kind, torch.float64)
    dense = distances(of_transformers(kind, torch.bfloat16)[-1], gradients)
    for sequence in (False, True):
        results = run_ranks(ranks, of_ours, kind, weights, torch.bfloat16, sequence, "gather-again")
        for rank, (got, mine) in enumerate(results):
            assert_same(got, loss, 1e-3, "loss", rank)
            for name, error in distances(mine, gradients).items():
                where = f"gradient of {name} on rank {rank}, sequence parallel {sequence}"
                assert error <= 1.5 * dense[name], f"{where}: {error:.2e} from float64, dense bf16 {dense[name]:.2e}"


def types_in_attention() -> tuple[list[torch.dtype], set[torch.dtype]]:
    seen = []

    def watching(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        seen.extend((q.dtype, k.dtype, v.dtype))
        return attention(q, k, v, causal=causal)

    config = replace(SMALL, layers=1, qkv_bias=True)
    model = ParallelLlama(config, TensorParallel(dist.group.WORLD), Parts(attention=watching))
    tokens, labels = batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.cross_entropy(model(tokens), labels)
    loss.backward()
    return seen, {p.grad.dtype for p in model.parameters()}


def test_qwen2_under_autocast_computes_its_attention_in_bf16():
    for inside, gradients in run_ranks(2, types_in_attention):
        assert inside == [torch.bfloat16] * 3 and gradients == {torch.float32}


def with_chapter_01s_parts() -> tuple[float, dict[str, Tensor]]:
    import llama

    tp = TensorParallel(dist.group.WORLD, True)
    config = llama.LlamaConfig(**{name: getattr(SMALL, name) for name in llama.LlamaConfig.__dataclass_fields__})
    ParallelLlama(config, tp, llama.Parts(), p=0.1)  # with chapter 01's own attention dropout is as good as with ours
    parts = llama.Parts(attention=llama.recomputed(llama.attention_math))
    used = []
    own = {"feed_forward": lambda *of: used.append("mlp") or parallel_llama.parallel_mlp(*of)}
    own |= {"through": lambda *of: used.append(len(of[1])) or parallel_llama.one_by_one(*of)}
    model = ParallelLlama(config, tp, parts, wrap=llama.recomputed, **own).double()
    found = step_of(model)
    assert used == ["mlp", "mlp", 2], "of two blocks"
    return found


def test_it_takes_chapter_01s_config_parts_and_recomputation():
    loss, gradients = step_of_one_device(chapter_01(SMALL))
    for rank, (got, got_gradients) in enumerate(run_ranks(2, with_chapter_01s_parts)):
        assert_same(got, loss, what="loss", rank=rank)
        assert_same_named(got_gradients, gradients, what="gradient of", rank=rank)


def at_positions(each: list[Tensor]) -> list[tuple[Tensor, float, dict[str, Tensor]]]:
    return [
        (positions, *step_of(ParallelLlama(SMALL, TensorParallel(dist.group.WORLD, sequence)).double(), positions))
        for positions in each
        for sequence in (False, True)
    ]


def test_positions_are_those_that_the_caller_gives():
    """In another order: a shift would change nothing, for RoPE knows differences only."""
    rows = [torch.randperm(3 * S, generator=torch.Generator().manual_seed(row))[:S] for row in range(B)]
    for rank, steps in enumerate(run_ranks(2, at_positions, [rows[0], torch.stack(rows)])):  # one for all, or each
        for positions, loss, gradients in steps:
            want, want_gradients = step_of_one_device(chapter_01(SMALL), positions)
            assert_same(loss, want, what="loss", rank=rank)
            assert_same_named(gradients, want_gradients, rank=rank)


def products_of_a_linear() -> Counter[tuple[int, ...]]:
    seen: Counter[tuple[int, ...]] = Counter()

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        seen[tuple(weight.shape)] += 1
        return F.linear(x, weight)

    model = ParallelLlama(SMALL, TensorParallel(dist.group.WORLD, True), replace(Parts(), linear=linear)).double()
    model(batch(0)[0])
    return seen


def test_a_linear_of_ones_own_computes_every_product_and_that_of_the_output_layer_too():
    H, kv, inner, L = SMALL.hidden, SMALL.kv_heads * 4, SMALL.intermediate, SMALL.layers
    products = [(H // 2, H), (kv // 2, H), (kv // 2, H), (H, H // 2), (inner // 2, H), (inner // 2, H), (H, inner // 2)]
    want = Counter(products * L) + Counter({(7, H): 1})  # 13 words on 2 ranks
    assert run_ranks(2, products_of_a_linear) == [want] * 2


# -------------------------------------------------------------------------------------------- embedding and the loss


def embedded(vocab: int) -> list[tuple[Tensor, Tensor]]:
    results, (tokens, _) = [], batch(0, vocab)
    for sequence in (False, True):
        tp = TensorParallel(dist.group.WORLD, sequence)
        layer = VocabParallelEmbedding(vocab, 6, tp).double()
        load_full_state_dict(layer, {"weight": numbers(vocab, 6)})
        x = layer(tokens)
        mine = Shard(S, 1, tp.size, tp.rank).cut if sequence else (lambda y: y)
        x.backward(mine(numbers(B, S, 6, seed=1)))
        results.append((x.detach(), full_state_dict(layer, tp.group, {"weight": layer.weight.grad})["weight"]))
    return results


def test_each_token_is_looked_up_once_over_all_ranks():
    table = numbers(13, 6).requires_grad_()
    want = F.embedding(batch(0, 13)[0], table)
    want.backward(numbers(B, S, 6, seed=1))
    for rank, (whole, split) in enumerate(run_ranks(4, embedded, 13)):
        assert_same(whole[0], want, what="embedding", rank=rank)
        assert_same(split[0], want.chunk(4, 1)[rank], what="embedding of its tokens", rank=rank)
        for _, gradient in (whole, split):
            assert_same(gradient, table.grad, what="gradient of the table", rank=rank)


def losses(cases: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    found = []
    for logits, labels in cases:
        shard = Shard(logits.shape[-1], 2, dist.get_world_size(), dist.get_rank())
        mine = shard.cut(logits).clone()
        mine[..., max(0, logits.shape[-1] - shard.index * shard.length) :] = 5.0  # logits of words that do not exist
        before = mine.clone()
        mine.requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, labels, logits.shape[-1], dist.group.WORLD)
        (loss / 3).backward()
        found.append((loss.detach(), mine.grad, mine.detach() - before))
    return found


@pytest.mark.parametrize("ranks", [1, 4])
def test_loss_and_gradient_of_logits_equal_those_of_the_whole_vocabulary_without_padding(ranks):
    cases = [(3 * numbers(B, S, vocab), batch(0, vocab)[1]) for vocab in (5, 8, 13)]
    cases.append((1e4 * numbers(B, S, 8), batch(0, 8)[1]))
    cases.append((numbers(B, S, 8), torch.full((B, S), IGNORE)))
    for rank, found in enumerate(run_ranks(ranks, losses, cases)):
        for (logits, labels), (loss, gradient, change) in zip(cases, found, strict=True):
            whole = logits.clone().requires_grad_()
            want = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            (want / 3).backward()
            words = Shard(logits.shape[-1], 2, ranks, rank).cut
            assert_same(loss, want, what="loss", rank=rank)
            assert_same(gradient, words(whole.grad), what="gradient of the logits, 0 for padding", rank=rank)
            assert not change.any(), "logits were overwritten"


def low_precision_loss() -> tuple[torch.dtype, torch.dtype, float, float]:
    logits, labels = numbers(B, S, 8).bfloat16(), batch(0, 8)[1]
    mine = logits.chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, labels, 8, dist.group.WORLD)
    loss.backward()
    want = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss.dtype, mine.grad.dtype, loss.item(), want.item()


def test_the_loss_of_bf16_logits_is_summed_in_fp32():
    for loss_type, gradient_type, loss, want in run_ranks(2, low_precision_loss):
        assert (loss_type, gradient_type) == (torch.float32, torch.bfloat16)
        assert_same(loss, want, 1e-6)


def gathered_logits() -> str:
    given = numbers(B, S, 8), batch(0, 8)[1], 8, dist.group.WORLD
    return error_from(ValueError, vocab_parallel_cross_entropy, *given)


def test_gathered_logits_are_refused_because_their_loss_would_be_too_large_by_log_t():
    assert run_ranks(2, gathered_logits)[0] == "logits of 8 words, but a rank holds 4; do not gather them"


def what_strangers_get(cases: list[list[Tensor]]) -> list[str]:
    model = ParallelLlama(SMALL, TensorParallel(dist.group.WORLD, True)).double()

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return model.cross_entropy(model(tokens), labels)

    return [error_from(ValueError, loss, *ids) for ids in cases]


@pytest.mark.parametrize("ranks", [1, 4])  # 13 words on 4 ranks: 13, 14 and 15 are rows of padding
def test_a_token_or_a_label_that_is_no_word_is_refused_by_name(ranks):
    (tokens, labels), cases, want = batch(0), [], []
    for what in ("token", "label"):
        for word in (-1, 13, 15, 16, -101, 2**40):
            ids = [tokens.clone(), labels.clone()]
            ids[what == "label"][1, 3] = word
            cases.append(ids)
            want.append(f"{what} {word} is not in 0 .. 12: the model has no such word")
    ends = torch.tensor([[0, 12] * (S // 2)] * B)
    cases += [[ends.masked_fill(ends == 12, IGNORE), labels], [ends, labels.where(labels == IGNORE, ends)]]
    want += ["token -100 is not in 0 .. 12: the model has no such word", ""]  # -100 is a label, but no token
    assert run_ranks(ranks, what_strangers_get, cases) == [want] * ranks


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_on_a_gpu_the_device_checks_words_and_the_host_does_not_wait_for_it():
    """A fake tensor has no values: whoever asks for one, to decide what to do next, gets an exception."""
    check_words("token", torch.zeros(2, dtype=torch.long, device="meta"), 13)
    with FakeTensorMode(), Operators() as seen:
        ids = torch.zeros(2, 3, dtype=torch.long, device="cuda")
        check_words("token", ids, 13)
        check_words("label", ids, 13, IGNORE)
    assert seen.names.count("_assert_async") == 2


def largest_tensor_of_the_loss() -> tuple[int, int]:
    vocab = 4096
    logits = torch.zeros(1, 16, vocab // 4, requires_grad=True)
    with communication() as sent, peak_memory() as memory:
        vocab_parallel_cross_entropy(logits, batch(0, vocab)[1].flatten()[None], vocab, dist.group.WORLD).backward()
    assert sent.calls == {"all_reduce": 2} and sent.payload["all_reduce"] == 3 * 16 * 4
    return memory.peak, logits.nbytes


def test_logits_are_never_gathered():
    for peak, mine in run_ranks(4, largest_tensor_of_the_loss):
        assert peak < 4 * mine, f"{peak} bytes for logits of {mine}: all of them would be {4 * mine}"


# -------------------------------------------------------------------------------------- state dict, weights and bytes


def trained_state() -> tuple[dict[str, Tensor], float]:
    model = ParallelLlama(SMALL, TensorParallel(dist.group.WORLD, True)).double()
    model_trace(model)
    tokens, labels = batch(7)
    return full_state_dict(model, model.tp.group), model.cross_entropy(model(tokens), labels).item()


def loss_of_loaded(state: dict[str, Tensor], sequence: bool) -> tuple[float, dict[str, Tensor]]:
    model = ParallelLlama(SMALL, TensorParallel(dist.group.WORLD, sequence)).double()
    load_full_state_dict(model, state)
    tokens, labels = batch(7)
    return model.cross_entropy(model(tokens), labels).item(), full_state_dict(model, model.tp.group)


def test_a_state_dict_saved_on_four_ranks_loads_on_two_on_one_and_into_chapter_01s_model():
    (state, loss), *others = run_ranks(4, trained_state)
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in full_weights(SMALL).items()}
    for rank, (other, _) in enumerate(others, 1):
        assert_same_named(other, state, 0.0, rank=rank)
    for ranks, sequence in ((2, True), (1, False)):
        for rank, (got, again) in enumerate(run_ranks(ranks, loss_of_loaded, state, sequence)):
            assert_same(got, loss, what="loss", rank=rank)
            assert_same_named(again, state, 0.0, rank=rank)
    model, (tokens, labels) = chapter_01(SMALL), batch(7)
    model.load_state_dict(state)
    want = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    assert_same(loss, want.item(), what="loss of chapter 01's model")


def state_before_and_after_a_step() -> list[str]:
    """Names of what has changed in a state dict (and in one of gradients) while the model trained on."""
    model = ParallelLlama(replace(SMALL, kv_heads=1), TensorParallel(dist.group.WORLD)).double()
    tokens, labels = batch(0)
    model.cross_entropy(model(tokens), labels).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    states = [full_state_dict(model, model.tp.group), full_state_dict(model, model.tp.group, gradients)]
    copies = [{name: value.clone() for name, value in state.items()} for state in states]
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1
            p.grad.mul_(2)
    pairs = [(name, state[name], copy[name]) for state, copy in zip(states, copies, strict=True) for name in state]
    return [name for name, now, before in pairs if not torch.equal(now, before)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_dict_does_not_change_while_the_model_trains_on(ranks):
    assert run_ranks(ranks, state_before_and_after_a_step) == [[]] * ranks


def refusals_of(cases: list[tuple[dict[str, Tensor], Config]]) -> list[str]:
    said = []
    for state, config in cases:
        model = ParallelLlama(config, TensorParallel(dist.group.WORLD)).double()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        said.append(error_from(ValueError, load_full_state_dict, model, state))
        changed = any((p != 0.5).any() for p in model.parameters())
        assert changed == (said[-1] == ""), "refused, and yet changed, or taken, and yet not"
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))  # nothing says which piece of it a rank has
    return [*said, error_from(ValueError, load_full_state_dict, model, state)]


def test_a_state_of_another_model_or_with_two_values_of_a_tied_weight_is_refused():
    tied, biased = replace(SMALL, tied=True), replace(SMALL, qkv_bias=True)
    plain, both = full_weights(SMALL), full_weights(tied)
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    without_head, without_table = ({n: x for n, x in both.items() if n != lacks} for lacks in (head, table))
    neither = {name: value for name, value in both.items() if name not in (head, table)}
    cases = [
        (full_weights(replace(SMALL, vocab_size=14)), SMALL, f"shape: {head} [14, 16], not [13, 16], {table}"),
        (full_weights(replace(SMALL, layers=3)), SMALL, "unexpected: model.layers.2.input_layernorm.weight, "),
        (full_weights(replace(SMALL, kv_heads=4)), SMALL, "self_attn.k_proj.weight [16, 16], not [8, 16]"),
        (plain, biased, "missing: model.layers.0.self_attn.k_proj.bias, "),
        (neither, tied, f"missing: {table} or {head}"),
        (both | {head: both[head] + 1}, tied, f"tied, but not equal: {head}"),
        (without_head, tied, ""),
        (without_table, tied, ""),
        (plain, SMALL, ""),
    ]
    names = ["d", "b", "c", "a"]
    assert [few("x", names[:n]) for n in (0, 3, 4)] == ["", "x: b, c, d", "x: a, b, c and 1 more"]
    for messages in run_ranks(2, refusals_of, [case[:2] for case in cases]):
        for message, words in zip(messages, [*(words for *_, words in cases), "in no Shard: scale"], strict=True):
            assert words in message and bool(words) == bool(message) and "\n" not in message, message


def step_of_model(sequence: bool, kv_heads: int) -> tuple[int, int, float, dict[str, int]]:
    one = kv_heads == 1
    config = replace(SMALL, kv_heads=kv_heads, qkv_bias=one, qk_norm=one, own_head_dim=6 * one)
    model = ParallelLlama(config, TensorParallel(dist.group.WORLD, sequence)).double()
    tokens, labels = batch(0)
    with communication() as sent:
        model.cross_entropy(model(tokens), labels).backward()
    return held_bytes(model).parameters, weights_per_rank(config, model.tp.size) * 8, sent.total, dict(sent.calls)


def steps_of_models() -> list[list[tuple]]:
    return [[step_of_model(sequence, kv_heads) for kv_heads in (1, 4)] for sequence in (False, True)]


def test_weights_held_and_bytes_sent_are_those_of_the_formulas():
    n, T, L = B * S * SMALL.hidden * 8, B * S * 8, SMALL.layers
    # L blocks; embedding, lm_head and its second gather; two all-reduces of the loss
    split = {"all_gather": 6 * L + 3, "reduce_scatter": 4 * L + 2, "all_reduce": 2}
    for layouts in run_ranks(4, steps_of_models):
        for sequence, models in enumerate(layouts):
            for held, predicted, sent, calls in models:
                assert held == predicted
                assert sent == ((8 + 2 * sequence) * L + 4 + sequence) * 3 * n // 4 + 2 * 3 * T * 3 // 4
                assert calls == (split if sequence else {"all_reduce": 4 * L + 2 + 2})


def test_the_seed_and_the_name_decide_a_weight():
    a = initial_weight("model.layers.0.mlp.up_proj.weight", (4, 4), 2, seed=0)
    assert not torch.equal(a, initial_weight("model.layers.0.mlp.up_proj.weight", (4, 4), 2, seed=1))
    assert not torch.equal(a, initial_weight("model.layers.0.mlp.gate_proj.weight", (4, 4), 2, seed=0))
    factor = Factor(4, 4, Shard(4, 0, 1, 0))
    init_weights(factor, 2, seed=1)
    assert torch.equal(factor.weight, initial_weight("weight", (4, 4), 2, seed=1))


# ------------------------------------------------------------------------------------------------------- the script


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        (["--heads", "6", "--hidden", "60"], 1, "kv-heads 4 do not divide 6 heads"),
        ([], 3, "do not divide heads 8"),
        (["--vocab", "0"], 1, "--vocab 0"),
        (["--vocab", "4097"], 1, "--vocab 4097 is not in 1 .. 4096"),
        (["--layers", "0"], 1, "--layers 0 is not in 1 .. 4096"),
        (["--dropout", "1"], 1, "--dropout 1.0"),
        (["--dropout", "-0.1"], 1, "--dropout -0.1"),
        (["--recomput"], 1, "--recomput"),
    ],
)
def test_bad_input_ends_in_one_line_before_any_process_group(options, ranks, words):
    assert words in refusal(parallel_llama.main, options, ranks)
