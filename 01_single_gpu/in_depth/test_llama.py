"""The model: against transformers, against its own explicit version, and seam by seam."""

import math
import sys
from dataclasses import FrozenInstanceError, fields, replace

import llama
import pytest
import torch
import torch.nn.functional as F
import transformers
from harness.meter import saved_activations
from harness.reference import assert_same, assert_same_named, numbers
from llama import IGNORE, TINY, Attention, Llama, LlamaConfig, Parts, attention, attention_math

torch.set_num_threads(1)  # on tensors this small a second thread only waits
TOKENS = torch.randint(TINY.vocab_size, (2, 11), generator=torch.Generator().manual_seed(0))


def lively(config=TINY, **arguments):
    """A float64 model whose weights are large enough, and whose norms uneven enough, for every mistake to show."""
    model = Llama(config, **arguments).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(0.3 * numbers(*parameter.shape, seed=i) + (parameter.dim() == 1))
    return model


def hugging_face(config):
    kind, rope = "Qwen3" if config.qk_norm else "Llama", {"rope_type": "default"}
    if config.rope_scaling:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rope = {"rope_type": "llama3"} | dict(zip(names, config.rope_scaling, strict=True))
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope | {"rope_theta": config.rope_theta},
            head_dim=config.head_dim,
            tie_word_embeddings=config.tied,
        )
    ).double()


# ------------------------------------------------------------------------------------- against transformers


KINDS = {
    "theta 1e4": {},
    "theta 5e5": {"rope_theta": 500000.0, "norm_eps": 0.01},
    "llama 3.2": {"rope_theta": 500000.0, "rope_scaling": (8.0, 1.0, 4.0, 64), "own_head_dim": 12},
    "qwen3": {"qk_norm": True, "own_head_dim": 12, "norm_eps": 0.01},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_those_of_transformers_with_grouped_query_heads(tied, kind, monkeypatch):
    # transformers takes the norm's statistics in float32 even in a float64 model, which alone costs 1e-7. For this
    # comparison its norm is torch's own, in float64. Nothing else is touched: its RoPE tables are float32, like ours.
    own = lambda norm, x: F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)  # noqa: E731
    for name in ("llama.modeling_llama.Llama", "qwen3.modeling_qwen3.Qwen3"):
        monkeypatch.setattr(f"transformers.models.{name}RMSNorm.forward", own)
    config = replace(TINY, tied=tied, **KINDS[kind])
    model, theirs = lively(config), hugging_face(config)
    theirs.load_state_dict(model.state_dict())
    logits, want = model(TOKENS), theirs(TOKENS).logits
    assert_same(logits, want, tol=1e-9, what="logits")

    llama.next_token_loss(model, TOKENS).backward()
    logits = theirs(TOKENS).logits[:, :-1]  # its own loss would round to float32
    F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum").backward()
    want = {name: p.grad for name, p in theirs.named_parameters()}
    assert_same_named({name: p.grad for name, p in model.named_parameters()}, want, 1e-9, "gradient of")


# ------------------------------------------------------------------------------------------------ attention


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 3)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("function", [attention, attention_math])
def test_attention_equals_one_head_at_a_time(function, heads, kv_heads, causal):
    B, S, D = 2, 7, 8
    q, k, v = (numbers(B, S, n, D, seed=i).requires_grad_() for i, n in enumerate((heads, kv_heads, kv_heads)))
    out = torch.empty(B, S, heads, D, dtype=torch.float64)
    for b in range(B):
        for n in range(heads):
            shared = n // (heads // kv_heads)  # neighbouring query heads share a key/value head
            scores = q[b, :, n] @ k[b, :, shared].T / math.sqrt(D)
            if causal:
                scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
            out[b, :, n] = scores.softmax(-1) @ v[b, :, shared]
    got = function(q, k, v, causal=causal)
    assert_same(got, out, what="attention")
    weight = numbers(*out.shape, seed=9)
    grads, want = (torch.autograd.grad((result * weight).sum(), (q, k, v)) for result in (got, out))
    for name, a, b in zip("qkv", grads, want, strict=True):
        assert_same(a, b, what=f"gradient of {name}")


def test_explicit_attention_never_expands_keys_and_values():
    B, S, N, D = 2, 8, 8, 16
    q, k, v = numbers(B, S, N, D).requires_grad_(), numbers(B, S, 1, D, seed=1), numbers(B, S, 1, D, seed=2)
    k.requires_grad_(), v.requires_grad_()
    with saved_activations() as saved:
        attention_math(q, k, v, causal=True)
    assert saved.bytes == 8 * (B * S * N * D + 2 * B * S * D + B * N * S * S)  # q, k and v once, the probabilities


# --------------------------------------------------------------------------------------------- norm and RoPE


def test_rms_norm_equals_torch():
    x, weight = numbers(3, 5, 16), numbers(16, seed=1)
    assert_same(llama.rms_norm(x, weight, 1e-3), F.rms_norm(x, (16,), weight, 1e-3), what="rms_norm")


def test_rms_norm_takes_its_statistics_in_fp32_in_a_bf16_model():
    x = (300 * numbers(4, 4096)).to(torch.bfloat16)
    got = llama.rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-5)
    want = F.rms_norm(x.double(), (4096,), eps=1e-5).to(torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert_same(got, want, tol=0, what="bf16 rms_norm")  # one rounding, at the end
    tiny = torch.full((1, 64), 1e-5, dtype=torch.float16)  # its square is 0 in fp16
    assert_same(llama.rms_norm(tiny, torch.ones(64, dtype=torch.float16), 1e-12), torch.ones(1, 64), tol=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rope_tables_are_fp32_whatever_the_dtype_of_the_model(dtype):
    seen = []

    def rope(x, cos, sin):
        seen.append((x.dtype, cos, sin))
        return llama.apply_rope(x, cos, sin)

    config = replace(TINY, rope_theta=500000.0)
    positions = torch.arange(1000, 1011)
    Llama(config, replace(Parts(), rope=rope)).to(dtype)(TOKENS, positions)
    exact = positions.double()[:, None] / 500000.0 ** (torch.arange(0, 8, 2).double() / 8)
    for x_dtype, cos, sin in seen:
        assert x_dtype == dtype and cos.dtype == sin.dtype == torch.float32
        assert_same(cos, exact.cos(), tol=1e-3, what="cos")
        assert_same(sin, exact.sin(), tol=1e-3, what="sin")
    assert len(seen) == 2 * config.layers


def test_rope_rotates_in_fp32_before_it_rounds():
    x = numbers(1, 4, 2, 8).to(torch.bfloat16)
    cos, sin = llama.rope_tables(torch.arange(4) + 5000, 8, 10000.0)
    got = llama.apply_rope(x, cos, sin)
    assert got.dtype == torch.bfloat16
    assert_same(got, llama.apply_rope(x.double(), cos, sin).to(torch.bfloat16), tol=0, what="bf16 rope")


def test_positions_may_be_given_per_sample_and_out_of_order():
    model = lively()
    order = torch.tensor([0, 10, 1, 9, 2, 8, 3, 7, 4, 6, 5])
    want = llama.rope_tables(torch.arange(11), 8, 1e4)[0][order]
    assert_same(llama.rope_tables(order, 8, 1e4)[0], want, tol=0, what="cos")
    assert (model(TOKENS, order) - model(TOKENS)).abs().max() > 0.01  # they reach the model
    assert_same(model(TOKENS, torch.arange(11) + 7), model(TOKENS), tol=1e-5, what="logits of a moved sequence")
    both = torch.stack([order, torch.arange(11)])
    assert_same(model(TOKENS, both)[0], model(TOKENS, order)[0], what="logits of sample 0")
    assert_same(model(TOKENS, both)[1], model(TOKENS)[1], what="logits of sample 1")


# ------------------------------------------------------------------------------------------------------ loss


def test_cross_entropy_is_a_sum_over_the_valid_labels():
    logits, labels = numbers(2, 3, 5), torch.tensor([[1, IGNORE, 4], [0, 2, IGNORE]])
    rows = [(0, 0, 1), (0, 2, 4), (1, 0, 0), (1, 1, 2)]
    want = -sum(logits[b, s].log_softmax(-1)[y] for b, s, y in rows)
    assert_same(llama.cross_entropy(logits, labels), want, what="loss")


def test_cross_entropy_without_a_valid_label_is_zero_not_nan():
    logits = numbers(2, 3, 5).requires_grad_()
    loss = llama.cross_entropy(logits, torch.full((2, 3), IGNORE))
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()


def test_cross_entropy_of_bf16_logits_is_taken_in_fp32():
    logits = (4 * numbers(4, 8, 100)).to(torch.bfloat16)
    labels = torch.zeros(4, 8, dtype=torch.long)
    got = llama.cross_entropy(logits, labels)
    assert got.dtype == torch.float32
    assert_same(got, llama.cross_entropy(logits.double(), labels), tol=1e-6, what="loss")


# --------------------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize("kernel", [attention, attention_math])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_gradient_and_keeps_less(kernel, mode):
    kept, gradients = [], []
    for recompute in ("none", mode):
        model = lively(parts=replace(Parts(), attention=kernel), recompute=recompute)
        with saved_activations(exclude=model.parameters()) as saved:
            loss = llama.next_token_loss(model, TOKENS)
        loss.backward()
        kept.append(saved.bytes)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_same_named(gradients[1], gradients[0], 1e-12, "gradient of")
    assert kept[1] < kept[0]


def test_recomputed_keeps_only_the_inputs():
    x, y = numbers(4, 8).requires_grad_(), numbers(4, 8, seed=1).requires_grad_()
    with saved_activations() as saved:
        llama.recomputed(lambda a, b: (a * b).exp().sin().exp())(x, y)
    assert saved.bytes == x.nbytes + y.nbytes


def test_recomputation_draws_the_same_random_numbers_again():
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    out = llama.recomputed(lambda a: F.dropout(a, 0.5) * a)(x)
    torch.rand(10)  # what other layers draw in between
    out.sum().backward()
    assert_same(x.grad, 2 * out.detach(), what="gradient through dropout")


# ---------------------------------------------------------------------------------------------- first weights


def test_a_first_weight_depends_on_the_seed_and_its_name_only():
    small, large = Llama(TINY).state_dict(), Llama(replace(TINY, vocab_size=99)).state_dict()
    name = "model.layers.1.mlp.gate_proj.weight"
    assert torch.equal(small[name], large[name])  # although the vocabulary was drawn before it
    assert not torch.equal(small[name], small[name.replace("layers.1", "layers.0")])
    assert not torch.equal(small[name], llama.initial_weight(name, small[name].shape, TINY.layers, seed=1))
    full = llama.initial_weight(name, small[name].shape, TINY.layers, seed=0)
    assert torch.equal(full[8:16], small[name][8:16])  # what a tensor-parallel rank cuts out


def test_first_weights_have_the_spread_of_gpt_2():
    model = Llama(LlamaConfig(hidden=256, layers=8, heads=4, kv_heads=4, intermediate=512, lora_rank=32))
    for name, weight in model.state_dict().items():
        if weight.dim() == 1:
            assert (weight == 1).all(), name
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            adapter = {"lora_A": weight.shape[1] ** -0.5, "lora_B": 0.0}
            spread = adapter.get(name.split(".")[-2], 0.02 / 4 if residual else 0.02)
            assert weight.std().item() == pytest.approx(spread, rel=0.05), name


def test_the_same_seed_gives_the_same_model_in_every_dtype():
    a, b = Llama(TINY), Llama(TINY).double()
    llama.init_weights(a, 3), llama.init_weights(b, 3)
    for name, weight in a.state_dict().items():
        assert_same(weight, b.state_dict()[name], tol=0, what=name)
    name = "lm_head.weight"
    assert torch.equal(a.state_dict()[name], llama.initial_weight(name, (TINY.vocab_size, TINY.hidden), TINY.layers, 3))


# ------------------------------------------------------------------------------------------------------ seams


def test_every_part_of_the_model_can_be_replaced():
    plain = {f.name: getattr(Parts(), f.name) for f in fields(Parts)}
    calls = {}

    def counting(name, function):
        calls[name] = 0

        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    single = {name: function for name, function in plain.items() if function is not None}
    model = lively(parts=Parts(**{name: counting(name, function) for name, function in single.items()}))
    llama.next_token_loss(model, TOKENS)
    L = TINY.layers
    assert calls == {
        "attention": L,
        "linear": 7 * L + 1,
        "norm": 2 * L + 1,
        "rope": 2 * L,
        "swiglu": L,
        "cross_entropy": 1,
    }
    several = {
        "linears": llama.linears_of_one_input,
        "add_norm": lambda x, residual, weight, eps: (llama.rms_norm(x + residual, weight, eps), x + residual),
        "linear_cross_entropy": lambda x, weight, labels: llama.cross_entropy(x @ weight.T, labels),
    }
    assert set(several) == {name for name, function in plain.items() if function is None}
    more = {name: counting(name, function) for name, function in (single | several).items()}
    lively(parts=Parts(**more))(TOKENS, labels=TOKENS)
    left = {"linear": 2 * L, "norm": L + 1, "cross_entropy": 0, "linears": 2 * L, "add_norm": L}
    assert calls == {"attention": L, "rope": 2 * L, "swiglu": L, "linear_cross_entropy": 1} | left


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True}, {"lora_rank": 2, "lora_scale": 1.5}])
def test_functions_that_stand_for_several_give_the_loss_and_every_gradient_of_these(options):
    found = []
    for parts in (Parts(), Parts(linears=llama.linears_of_one_input)):
        model = lively(replace(TINY, **options), parts=parts)
        loss = model(TOKENS, labels=TOKENS)
        loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (want, expected), (got, gradients) = found
    assert_same(got, want, 1e-12, "loss")
    for name, gradient in gradients.items():
        assert_same(gradient, expected[name], 1e-11, name)
    x, weights = torch.randn(3, 5, 8, requires_grad=True), [torch.randn(n, 8, requires_grad=True) for n in (4, 6)]
    frozen = weights[1].detach()
    with torch.autocast("cpu", torch.bfloat16):
        ys = llama.linears_of_one_input(x, [weights[0], frozen])
        assert [y.dtype for y in ys] == [torch.bfloat16] * 2
        assert torch.equal(ys[1], F.linear(x, frozen))
        [exact] = llama.linears_of_one_input(x.detach().double(), [frozen.double()])
        assert exact.dtype == torch.float64, "autocast leaves float64 alone"
    sum(y.float().sum() for y in ys).backward()
    assert x.grad.dtype == weights[0].grad.dtype == torch.float32 and weights[1].grad is None
    llama.linears_of_one_input(x.detach(), weights[1:])[0].sum().backward()
    assert weights[1].grad is not None, "although x needs none"


def test_the_feed_forward_of_a_block_can_be_replaced():
    class Nothing(torch.nn.Module):
        def __init__(self, config, parts):
            super().__init__()

        def forward(self, x):
            return torch.zeros_like(x)

    model = Llama(TINY, feed_forward=Nothing)
    assert not [name for name, _ in model.named_parameters() if "mlp" in name]
    assert model(TOKENS).shape == (2, 11, TINY.vocab_size)


def test_an_attention_module_works_with_a_slice_of_the_heads():
    """What tensor parallelism needs: the number of heads comes from the weights, not from the configuration."""
    whole = Attention(TINY, Parts()).double()
    with torch.no_grad():
        for i, p in enumerate(whole.parameters()):
            p.copy_(numbers(*p.shape, seed=i))
    x, tables = numbers(2, 5, TINY.hidden), llama.rope_tables(torch.arange(5), TINY.head_dim, 1e4)
    total = 0
    for half in (0, 1):
        part = Attention(TINY, Parts()).double()
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(whole, name).weight.detach().chunk(2, dim=0)[half]
            getattr(part, name).weight = torch.nn.Parameter(weight)
        part.o_proj.weight = torch.nn.Parameter(whole.o_proj.weight.detach().chunk(2, dim=1)[half])
        total = total + part(x, *tables)
    assert_same(total, whole(x, *tables), what="sum of both halves")


def test_a_bias_is_added_to_q_k_and_v_begins_at_zero_and_does_not_widen_them():
    seen = []

    def looked_at(q, k, v, *, causal):
        seen.append((q, k, v))
        return attention(q, k, v, causal=causal)

    plain = replace(Parts(), attention=looked_at, rope=lambda x, cos, sin: x)
    model, tokens = Llama(replace(TINY, layers=1, qkv_bias=True), plain), torch.zeros(1, 4, dtype=torch.long)
    biases = {name: p for name, p in model.named_parameters() if name.endswith("bias")}
    assert [name.split(".")[-2] for name in biases] == ["q_proj", "k_proj", "v_proj"]
    assert not any(p.any() for p in biases.values()), "no bias has learned anything yet"
    with torch.no_grad():
        model(tokens)
        for p in biases.values():
            p.copy_(torch.arange(len(p)))
        model(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens)
    before, after, low = seen
    for x, moved, narrow, (name, p) in zip(before, after, low, biases.items(), strict=True):
        assert_same(moved.flatten(2), x.flatten(2) + p, 1e-5, f"what {name} adds")
        assert narrow.dtype == torch.bfloat16, name


def test_an_adapter_begins_with_the_model_itself_and_is_a_weight_of_low_rank_that_is_added():
    config = replace(TINY, lora_rank=2, lora_scale=1.5)
    adapted, plain = Llama(config), Llama(TINY)
    assert_same(adapted(TOKENS), plain(TOKENS), 0, "logits at first")
    adapted = lively(config)
    state = adapted.state_dict()
    merged = {name: weight for name, weight in state.items() if "lora" not in name}
    for name in merged:
        A, B = (state.get(name.replace("weight", f"lora_{factor}.weight")) for factor in "AB")
        assert ("_proj" in name) == (A is not None), name
        merged[name] = merged[name] if A is None else merged[name] + 1.5 * B @ A
    plain = plain.double()
    plain.load_state_dict(merged)
    assert_same(adapted(TOKENS), plain(TOKENS), 1e-10, "logits")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"hidden": 30}, "hidden 30 is not a multiple of heads 4"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"hidden": 12}, "head dim 3 must be even"),
        ({"own_head_dim": 5}, "head dim 5 must be even"),
        *[
            ({name: 0}, f"{name} 0 must be at least 1")
            for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "intermediate")
        ],
        ({"layers": -1}, "layers -1 must be at least 1"),
    ],
)
def test_an_impossible_configuration_is_named_in_one_line(wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        replace(TINY, **wrong)
    assert "\n" not in str(error.value)


def test_an_unknown_kind_of_recomputation_is_refused():
    with pytest.raises(ValueError, match="recompute 'some' must be one of none, selective, full"):
        Llama(TINY, recompute="some")


def test_configurations_and_parts_cannot_be_changed_by_accident():
    with pytest.raises(FrozenInstanceError):
        TINY.hidden = 64
    with pytest.raises(FrozenInstanceError):
        Parts().norm = None
    scaling = (8.0, 1.0, 4.0, 64)
    assert replace(TINY, rope_scaling=[*scaling]).rope_scaling == scaling, "JSON gives a list, which can be changed"


def test_the_demo_fails_when_recomputation_keeps_as_many_bytes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py"])
    monkeypatch.setattr(llama, "recomputed", lambda function: function)
    monkeypatch.setattr(llama, "attention", lambda q, k, v, *, causal: attention(2 * q, k, v, causal=causal))
    assert llama.main() == 1
    captured = capsys.readouterr()
    wrong = captured.err.split("; ")
    other = [said for said in wrong if "gradients: <lambda>, " in said]
    assert len(other) == 3, "of the fused kernel, which computes something else here, in every mode"
    wrong = [said for said in wrong if said not in other]
    assert "PASS" not in captured.out and len(wrong) == 4, "two kernels, each with selective and full recomputation"
    assert all("bytes kept for backward" in said for said in wrong), "all else is right"
